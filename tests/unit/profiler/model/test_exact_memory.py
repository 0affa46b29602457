"""Memory counted without a device is that of known tables and formulas."""

from __future__ import annotations

import json
import resource
import time
from itertools import product
from typing import Any

import pytest

from autopar.records import replace
from autopar.run.model import LayerSpec, ModelSpec
from profiler.model.layers.sharding import Sharding
from tests.warm import Warm

torch = pytest.importorskip("torch", reason="the profilers need torch")

MIB = 2.0**20
LLAMA = LayerSpec(
    num_layers=32,
    seq_length=4096,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    ffn_hidden_size=14336,
    gated_mlp=True,
)
SMALL = replace(
    LLAMA, seq_length=64, hidden_size=64, num_heads=8, num_kv_heads=4, ffn_hidden_size=160
)
DEGREES = (1, 2, 4, 8)


def activations_mib(spec: LayerSpec, *, checkpoint: Any = "none", kind: Any = "sp") -> list[float]:
    """Return what a layer keeps at degrees 1, 2, 4 and 8, in MiB to three places."""
    from profiler.model.counting import layer_memory

    return [
        round(
            layer_memory(
                spec, Sharding(degree=degree, kind=kind, checkpoint=checkpoint)
            ).activation_bytes
            / MIB,
            3,
        )
        for degree in DEGREES
    ]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("kind", "checkpoint", "expected"),
    [
        ("sp", "none", [656.531, 328.266, 164.133, 82.066]),
        ("tp", "none", [656.531, 392.281, 260.156, 194.094]),
        ("dtensor", "none", [656.531, 392.281, 260.156, 194.094]),
        ("dtensor_sp", "none", [656.531, 360.266, 212.133, 138.066]),
        # attention's output is kept on both sides of the exchange: s*b*h*2 more, divided
        ("ulysses", "none", [656.531, 344.266, 172.133, 86.066]),
        ("sp", "full", [32.0, 16.0, 8.0, 4.0]),
        ("tp", "full", [32.0, 32.0, 32.0, 32.0]),
        ("ulysses", "full", [32.0, 16.0, 8.0, 4.0]),
        # recomputing flash attention saves its sums alone: its inputs and output stay
        ("sp", "selective", [656.031, 328.016, 164.008, 82.004]),
    ],
)
def test_llama_block(kind: Any, checkpoint: Any, expected: list[float]) -> None:
    """A Llama block of h 4096, 32 heads, 8 kv, f 14336 keeps the known number of bytes."""
    assert activations_mib(LLAMA, kind=kind, checkpoint=checkpoint) == expected


def test_llama_block_parameters() -> None:
    """Its parameters are divided, its norms are not; Ulysses divides none."""
    from profiler.model.counting import layer_memory

    def mib(kind: Any) -> list[float]:
        found = [layer_memory(LLAMA, Sharding(degree=t, kind=kind)) for t in DEGREES]
        assert all(memory.parameter_bytes == 2 * memory.num_parameters for memory in found)
        return [round(memory.parameter_bytes / MIB, 3) for memory in found]

    assert mib("sp") == mib("tp") == [416.016, 208.016, 104.016, 52.016]
    assert mib("ulysses") == [416.016] * 4


@pytest.mark.parametrize(("hidden", "heads", "seq"), [(2048, 16, 1024), (6144, 64, 2048)])
@pytest.mark.parametrize("batch", [1, 2])
def test_formula_of_korthikanti(hidden: int, heads: int, seq: int, batch: int) -> None:
    """A block with its softmax in the open keeps s*b*h*(34 + 5as/h), norm statistics aside."""
    from profiler.model.counting import layer_memory

    spec = LayerSpec(
        num_layers=1,
        seq_length=seq,
        hidden_size=hidden,
        num_heads=heads,
        ffn_hidden_size=4 * hidden,
        biases=True,
        norm_parameters_per_hidden=4,
    )
    sharding = Sharding(flash=False, dropout=0.1)
    found = layer_memory(spec, sharding, batch=batch)
    formula = seq * batch * hidden * (34 + 5 * heads * seq / hidden)
    assert found.activation_bytes == pytest.approx(formula, rel=2e-4)
    excess = found.activation_bytes - round(formula)
    assert excess == 2 * 2 * 4 * seq * batch  # mean and rstd, fp32
    assert any("score matrix" in note for note in found.notes)
    selective = layer_memory(spec, replace(sharding, checkpoint="selective"))
    assert selective.activation_bytes == seq * (34 * hidden + 2 * 2 * 4)


@pytest.mark.whole
def test_figures_are_linear_in_the_batch_and_the_same_every_time() -> None:
    """Twice the samples keep twice as much, and counting again counts the same."""
    from profiler.model.counting import layer_memory

    for kind, checkpoint in product(("tp", "sp", "ulysses"), ("none", "full")):
        sharding = Sharding(degree=2, kind=kind, checkpoint=checkpoint)
        one, two, again = (layer_memory(SMALL, sharding, batch=batch) for batch in (1, 3, 1))
        assert one == again
        assert two.activation_bytes == 3 * one.activation_bytes
        assert two.peak_bytes == 3 * one.peak_bytes


def test_other_types_are_wider() -> None:
    """fp32 keeps twice the bytes of 16 bit, but for statistics, which are fp32 in both."""
    from profiler.model.counting import layer_memory

    half, whole = (layer_memory(SMALL, Sharding(), dtype=dtype) for dtype in ("fp16", "fp32"))
    statistics = 4 * SMALL.seq_length * (8 + 2)  # a sum per head, and two norms
    assert whole.activation_bytes == 2 * half.activation_bytes - statistics
    assert half == layer_memory(SMALL, Sharding(), dtype="bf16")


def test_cross_attention() -> None:
    """A decoder layer keeps a second attention; the encoder's output is not its own."""
    from profiler.model.counting import layer_memory

    plain = replace(SMALL, num_kv_heads=8, causal=False)
    cross = replace(plain, cross_attention=True, norm_parameters_per_hidden=3)
    s, h, e = 64, 64, 48
    extra = 2 * s * h * 4 + 2 * e * h * 2 + 4 * s * (8 + 1)  # x, norm, q, out; k, v; statistics
    found = layer_memory(cross, Sharding(), encoder_seq_length=e)
    assert found.activation_bytes - layer_memory(plain, Sharding()).activation_bytes == extra
    assert any("encoder's output" in note for note in found.notes)


@pytest.mark.parametrize(("degree", "experts_over"), [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_mixture_of_experts(degree: int, experts_over: int) -> None:
    """A mixture keeps its router's choice, its tokens in expert order and c MLPs per token."""
    from profiler.model.counting import layer_memory

    spec = replace(SMALL, num_experts=8, experts_per_token=2)
    sharding = Sharding(degree=degree, expert_degree=experts_over)
    found = layer_memory(spec, sharding)
    dense = layer_memory(SMALL, Sharding(degree=degree))
    s, h, f, c = 64, 64, 160, 2
    mlp = 4 * 2 * s * f // degree
    inputs = c * 2 * s * h  # whole on every rank of the tensor group
    outputs = c * 2 * s * h // degree
    # top-k positions (8), softmax (4), weights (2), places in order (8 + 8)
    router = c * s * (8 + 4 + 2 + 8 + 8) // degree
    assert found.activation_bytes - dense.activation_bytes == (c - 1) * mlp + inputs + outputs + (
        router
    )
    expert = 3 * h * f // degree
    assert found.num_parameters - dense.num_parameters == (8 // experts_over - 1) * expert + 8 * h


def test_peak_is_above_what_is_kept() -> None:
    """A recomputed layer needs at its peak about what a plain one keeps, and both are whole."""
    from profiler.model.counting import layer_memory

    plain, full = (layer_memory(LLAMA, Sharding(checkpoint=c)) for c in ("none", "full"))
    # the widest moment of the backward: gradients of gate, up, product and their silu
    assert 0 < plain.peak_bytes <= 4 * 2 * 4096 * 14336
    total = plain.activation_bytes + plain.peak_bytes
    assert full.activation_bytes + full.peak_bytes == total


@pytest.mark.parametrize("degree", DEGREES)
def test_outer_parts(degree: int) -> None:
    """Head and loss keep the fp32 softmax, their norm and its output; the embedding its tokens."""
    from profiler.model.counting import vocab_memory

    spec = ModelSpec(name="llama", layers=(LLAMA,), vocab_size=128256)
    s, h = 4096, 4096
    vocab = 128256 // (128 * degree) * 128 if 128256 % (128 * degree) == 0 else 0
    vocab = vocab or -(-128256 // (128 * degree)) * 128
    first, last, only = (
        vocab_memory(spec, part, degree=degree) for part in ("first", "last", "only")
    )
    assert first.activation_bytes == 8 * s
    head = 4 * s * vocab + 2 * 2 * s * h // degree + 4 * s // degree + 8 * s
    assert last.activation_bytes == head
    assert only.activation_bytes == head + 8 * s
    assert first.num_parameters == vocab * h
    assert last.num_parameters == vocab * h + h
    # in 16 bit: the logits beside their softmax, or the gradient that becomes of it
    assert last.peak_bytes == pytest.approx(2 * s * vocab, rel=0.15)


def test_tied_tables_are_one_on_the_only_stage() -> None:
    """A tied table is counted once where both ends are, and on both of two stages."""
    from profiler.model.counting import vocab_memory

    spec = ModelSpec(
        name="gpt", layers=(SMALL,), vocab_size=512, tied_embeddings=True, learned_positions=64
    )
    first, last, only = (vocab_memory(spec, part) for part in ("first", "last", "only"))
    assert first.num_parameters == (512 + 64) * 64
    assert last.num_parameters == 512 * 64 + 64
    assert only.num_parameters == (512 + 64) * 64 + 64
    assert any("tied" in note for note in last.notes)


def test_measurement_is_a_cell() -> None:
    """What was counted is kept as a sidecar's cell."""
    from profiler.model.cells import ModelCell
    from profiler.model.counting import layer_memory
    from profiler.model.measuring import counted_as

    found = layer_memory(SMALL, Sharding(degree=2, kind="tp"), batch=3)
    asked = ModelCell(
        quantity="memory",
        part="layer",
        layer_type=0,
        batch=3,
        seq_lengths=(64,),
        degree=2,
        kind="tp",
    )
    cell = counted_as(asked, found)
    assert (cell.part, cell.batch, cell.seq_lengths, cell.degree, cell.kind, cell.source) == (
        ("layer", 3, [64], 2, "tp", "exact")
    )
    assert cell.bytes == {
        "parameters": found.parameter_bytes,
        "activation": found.activation_bytes,
        "peak": found.peak_bytes,
    }
    assert cell.num_parameters == found.num_parameters


# --- cost ---


def count_a_model() -> None:
    """Count 24 points of a model in a process of its own, and print what that took."""
    import torch.distributed as dist

    from autopar.documents.spec import load_spec
    from profiler.model.counting import layer_memory, vocab_memory

    started_s = time.perf_counter()
    spec = load_spec("llama3-8b")
    points = 0
    for degree in (1, 2, 4, 8):
        for kind, checkpoint in (("sp", "none"), ("tp", "none"), ("sp", "full")):
            sharding = Sharding(degree=degree, kind=kind, checkpoint=checkpoint)  # type: ignore[arg-type]
            layer_memory(spec.layers[0], sharding)
            points += 1
        for part in ("only", "first", "last"):
            vocab_memory(spec, part, degree=degree)  # type: ignore[arg-type]
            points += 1
    found = {
        "points": points,
        "seconds": time.perf_counter() - started_s,
        "kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "distributed": dist.is_initialized(),
    }
    print(json.dumps(found))


@pytest.mark.whole
def test_a_model_is_counted_in_seconds() -> None:
    """All 24 points of a model take under 60 s and 1.5 GB, and set up nothing global."""
    done = Warm(count_a_model, name="count").completed()
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["points"] == 24
    assert found["seconds"] < 60
    assert found["kib"] * 1024 < 1.5e9
    assert found["distributed"] is False
