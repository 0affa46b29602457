"""Times of layers, of what surrounds them, and of whole models: shares, shapes and agreement."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from autopar.documents.sidecar import TensorKind
from autopar.errors import InputError
from autopar.records import replace
from autopar.run.model import LayerSpec, ModelSpec
from profiler.measure import Policy
from profiler.model.cells import ModelCell
from profiler.model.layers.sharding import Sharding
from tests.unit.cpu_clock import CpuTimer, one_thread
from tests.unit.replay import ReplayTimer

torch = pytest.importorskip("torch", reason="the profilers need torch")

from profiler.model.layers.blocks import build_layer, layer_inputs  # noqa: E402
from profiler.model.layers.parallel import LocalGroup, SoleRank, timed_group  # noqa: E402
from profiler.model.measuring import time_cell  # noqa: E402
from profiler.model.timing import Timed  # noqa: E402

CPU = torch.device("cpu")
LLAMA = LayerSpec(
    num_layers=2,
    seq_length=16,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=48,
    gated_mlp=True,
)
ENCODER = LayerSpec(
    num_layers=2,
    seq_length=16,
    hidden_size=32,
    num_heads=4,
    ffn_hidden_size=64,
    causal=False,
)
DECODER = replace(ENCODER, causal=True, cross_attention=True, norm_parameters_per_hidden=3)
LARGE = LayerSpec(
    num_layers=2,
    seq_length=2048,
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=4,
    ffn_hidden_size=5632,
    gated_mlp=True,
)
STEADY = Policy(iters=6, warmup=1, sample_s=0.0, max_seconds=1e3)
"""Six repetitions of one operation each, after the rehearsal and one warm-up."""


ON_CPU: dict[str, Any] = {"dtype": "fp32", "device": CPU, "policy": STEADY}


def clock() -> ReplayTimer:
    """Return a timer for which every operation takes a millisecond."""
    return ReplayTimer([1e-3], repeat=True)


def cuda() -> torch.device:
    """Return the CUDA device; skip where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", 0)


def time_layer(layer: LayerSpec, sharding: Sharding, *, batch: int = 2, **how: Any) -> Timed:
    """Return the times of a layer's cell."""
    cell = ModelCell(
        quantity="time",
        part="layer",
        layer_type=0,
        batch=batch,
        seq_lengths=(layer.seq_length,),
        degree=sharding.degree,
        kind=sharding.kind,
        checkpoint=sharding.checkpoint,
        encoder_seq_length=8 if layer.cross_attention else None,
    )
    return time_cell(ModelSpec(name="one", layers=(layer,)), cell, **{**ON_CPU, **how})


def time_rest(spec: ModelSpec, seq_lengths: tuple[int, ...], **how: Any) -> Timed:
    """Return the times of what surrounds the layers, or of a whole forward with `num_layers`."""
    names = ("batch", "degree", "kind", "num_layers")
    size: dict[str, Any] = {"batch": 2, **{name: how.pop(name) for name in names if name in how}}
    cell = ModelCell(quantity="time", part="only", seq_lengths=seq_lengths, **size)
    return time_cell(spec, cell, **{**ON_CPU, **how})


@pytest.mark.parametrize("kind", ["tp", "sp", "dtensor", "dtensor_sp", "ulysses"])
def test_the_timed_group_gives_the_shapes_of_a_group_that_allocates(kind: TensorKind) -> None:
    """Outputs and gradients of a rank are as large and finite with both stand-ins of a group."""
    sharding = Sharding(degree=2, kind=kind)
    shapes = []
    for group in (LocalGroup(2), SoleRank(2)):
        layer = build_layer(LLAMA, sharding, group=group, dtype=torch.float32, device=CPU)
        inputs = layer_inputs(LLAMA, sharding, batch=3, dtype=torch.float32, device=CPU)
        # several graphs at once share what was gathered
        outputs = [layer(*inputs) for _ in range(2)]
        for output in outputs:
            output.backward(torch.randn_like(output))
        gradients = [x.grad for x in (*inputs, *layer.parameters())]
        assert all(bool(torch.isfinite(x).all()) for x in (*outputs, *gradients))
        shapes.append([x.shape for x in (*outputs, *gradients)])

    assert shapes[0] == shapes[1]


def test_collectives_of_the_timed_group_copy_nothing() -> None:
    """What goes in comes out, or what was made for the shape before."""
    group = LocalGroup(4)
    x = torch.randn(8, 3)

    gathered = group.all_gather(x)

    assert gathered.shape == (32, 3)
    assert bool(gathered.any(dim=1).all())
    assert group.all_gather(torch.randn(8, 3)).data_ptr() == gathered.data_ptr()
    for same in (group.all_reduce(x), group.reduce_scatter(x), group.all_to_all(x)):
        assert same.data_ptr() == x.data_ptr()
    assert torch.equal(group.reduce_scatter(x), x[:2])
    assert timed_group(1) is None


@pytest.mark.whole
def test_a_shard_of_a_layer_takes_its_share_of_the_time() -> None:
    """Half of all matrices take about half as long."""
    layer = replace(LLAMA, seq_length=256, hidden_size=512, num_heads=8, ffn_hidden_size=1408)
    least = {}
    for degree in (1, 2):
        with one_thread():
            found = time_layer(
                layer,
                Sharding(degree=degree),
                policy=Policy(iters=8, warmup=2, max_seconds=0.4),
                more=False,
                timer=CpuTimer(),
            )
        assert found.reason is None
        least[degree] = {name: min(samples) for name, samples in found.samples_s.items()}

    for name in ("forward", "backward"):
        assert 0.25 < least[2][name] / least[1][name] < 0.85, name


def test_a_checkpointed_layer_recomputes_in_its_backward_alone() -> None:
    """Where the layer recomputes by itself, nothing is added to its backward."""

    def names(sharding: Sharding) -> set[str]:
        return set(time_layer(LLAMA, sharding, dtype="bf16", timer=clock()).samples_s)

    assert names(Sharding()) == {"forward", "backward", "recompute", "optimizer"}
    for checkpoint in ("full", "selective"):
        sharding = Sharding(checkpoint=checkpoint)
        assert names(sharding) == {"forward", "backward", "optimizer"}


def test_layers_with_other_inputs_and_groups_are_timed() -> None:
    """Cross-attention gets an encoder's output, experts are divided like any MLP."""
    experts = replace(LLAMA, num_experts=4, experts_per_token=2)
    for layer in (DECODER, experts):
        found = time_layer(layer, Sharding(degree=2), timer=clock())
        assert found.reason is None
        assert [len(samples) for samples in found.samples_s.values()] == [6] * 4


def test_a_layer_that_cannot_be_laid_out_is_refused() -> None:
    """Three ranks cannot share four heads."""
    with pytest.raises(InputError, match=r"^tensor degree 3 does not divide the attention heads 4"):
        time_layer(LLAMA, Sharding(degree=3))


@pytest.mark.parametrize(("degree", "kind"), [(1, "sp"), (2, "sp"), (2, "tp"), (2, "ulysses")])
def test_what_surrounds_the_layers_is_timed(degree: int, kind: TensorKind) -> None:
    """Embedding, head and loss have a forward and a backward; their step is the tables'."""
    spec = ModelSpec(name="tiny", layers=(LLAMA,), vocab_size=200)

    found = time_rest(spec, (32,), degree=degree, kind=kind, timer=clock())

    assert found.reason is None
    assert set(found.samples_s) == {"forward", "backward"}


@pytest.mark.parametrize(
    ("layers", "counts", "seqs"), [((LLAMA,), (3,), (32,)), ((ENCODER, DECODER), (1, 2), (16, 8))]
)
def test_whole_forwards_are_timed(
    layers: tuple[LayerSpec, ...], counts: tuple[int, ...], seqs: tuple[int, ...]
) -> None:
    """Models of one and of two stacks have a forward at lengths and numbers of their own."""
    spec = ModelSpec(name="tiny", layers=layers, vocab_size=200)

    found = time_rest(spec, seqs, num_layers=counts, timer=clock())

    assert found.samples_s == {"forward": [1e-3] * 6}


@pytest.mark.gpu
def test_a_layer_alone_takes_as_long_as_one_among_others_on_a_gpu() -> None:
    """Its time and the difference of whole forwards agree, and so do those of its passes."""
    device, policy = cuda(), Policy()
    spec = ModelSpec(name="large", layers=(LARGE,), vocab_size=32000)
    size: dict[str, Any] = {"batch": 4, "dtype": "bf16", "device": device, "policy": policy}

    found = time_layer(LARGE, Sharding(), **size)
    checkpointed = time_layer(LARGE, Sharding(checkpoint="full"), **size)
    wholes = [
        median(time_rest(spec, (2048,), num_layers=(n,), **size).samples_s["forward"])
        for n in (2, 6)
    ]

    alone = {name: median(samples) for name, samples in found.samples_s.items()}
    assert (wholes[1] - wholes[0]) / 4 == pytest.approx(alone["forward"], rel=0.1)
    assert 1.5 < alone["backward"] / alone["forward"] < 3.5
    again = median(checkpointed.samples_s["backward"])
    assert again == pytest.approx(alone["backward"] + alone["recompute"], rel=0.1)
    # AdamW moves 28 bytes per parameter, at 10^13 bytes per second at the very most
    assert alone["optimizer"] > 28 * 45e6 / 1e13


@pytest.mark.gpu
def test_a_layer_that_does_not_fit_on_a_gpu_is_a_failed_cell() -> None:
    """Memory is missing, is said to be, and is free again afterwards."""
    device = cuda()
    before = torch.cuda.memory_allocated(device)

    found = time_layer(
        replace(LARGE, seq_length=1 << 20),
        Sharding(),
        batch=512,
        dtype="bf16",
        device=device,
        policy=Policy(),
    )

    assert found.reason == "out of memory at batch 512, sequence 1048576"
    assert found.samples_s == {}
    assert torch.cuda.memory_allocated(device) == before
