"""Terms that explain the published memory file of llama2-7b from our count.

The engine behind the file runs bf16 with fused kernels, FSDP and Megatron's sequence parallelism.
Each term is one difference of that engine, in bytes of the table it belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from autopar.documents.spec import load_spec
from autopar.records import replace
from autopar.run.model import ModelSpec, head_dim, padded_vocab_size
from autopar.units import MIB
from benchmarks.published_memory import BLOCK, DEVICES, WORKSPACES, Published, Row, Run
from profiler.model.counting import ExactMemory, layer_memory, vocab_memory
from profiler.model.layers.sharding import Sharding
from profiler.model.layers.vocab import VocabPart

__all__ = ["TOKENS", "llama_rows"]

TOKENS = 4096
"""Tokens per sample of the published figures, although their keys contain 2048."""
BATCH = 8
"""Batch for the counts of embedding, head and loss, as in `profile-model`."""
States = Literal["model_states", "activation"]
_SPLIT = "vocabulary not padded"
_PARTS: dict[str, VocabPart] = {"off": "only", "on_first": "first", "on_last": "last"}


def llama_rows(cases: Path) -> Iterator[Row]:
    """Yield every published quantity of llama2-7b and our count at the measured tokens."""
    folder = cases / "model"
    published = Published.read(folder / "memory_profiling_bf16_llama2-7b_all.json", 2048)
    published.check()
    layer = _llama().layers[0]
    width, ffn = layer.hidden_size, layer.ffn_hidden_size or 0
    whole = _layer("llama2-7b", TOKENS)
    yield _parameter_size(published, whole)
    for degree in (1, 2, 4, 8):
        run = Run(pp=1, tp=degree, vtp=1)
        counted = _layer("llama2-7b", TOKENS, degree)
        terms = {
            "SwiGLU is one kernel": -TOKENS * ffn * 2 / degree,
            "its norm keeps a mean": 2 * TOKENS * 4 / degree,
            "flash attention's offsets and random state": 2 * BLOCK / degree,
        }
        if degree > 1:  # with one sample both layouts are the same
            terms["attention's output in both layouts"] = TOKENS * width * 2 / degree
            terms["a block of the allocator not split"] = published.slack(run, "act") / degree
        yield Row(
            quantity=f"layer, activation, tp {degree}",
            published_bytes=published.layer["tp_activation_per_bsz_dict"][str(degree)] * MIB,
            ours_bytes=counted.activation_bytes,
            terms=terms,
        )
    yield Row(
        quantity="layer, checkpoint",
        published_bytes=published.layer["tp_activation_per_bsz_dict"]["checkpoint"] * MIB,
        ours_bytes=_layer("llama2-7b", TOKENS, full=True).activation_bytes,
    )
    for degree in (1, 2, 4, 8):
        yield _kept_around(published, degree)
    for kind in ("model_states", "activation"):
        for where in _PARTS:
            yield from _other(published, where, kind)
    yield _at_2048(folder)


def _parameter_size(published: Published, whole: ExactMemory) -> Row:
    run = Run(pp=1, tp=DEVICES, vtp=1)  # the largest of the degrees, which the table takes
    counted = _layer("llama2-7b", TOKENS, run.tp)
    to_table = run.tp / 4  # 16 bytes a parameter on a rank to 4 of the whole layer
    return Row(
        quantity="layer, parameter_size",
        published_bytes=published.layer["parameter_size"] * MIB,
        ours_bytes=4 * whole.num_parameters,
        terms={
            "norms whole on 8 ranks": 4 * (run.tp * counted.num_parameters - whole.num_parameters),
            "rotary table of 4096 fp32 rows, x 8/4": to_table * _rotary_bytes(),
            "a block of the allocator not split, x 8/4": to_table * published.slack(run, "ms"),
        },
    )


def _rotary_bytes() -> int:
    """Return the bytes of the fp32 table of angles that a layer of its engine keeps."""
    return TOKENS * head_dim(_llama().layers[0]) * 4


def _kept_around(published: Published, degree: int) -> Row:
    """Return the saved bytes of embedding, head and loss on a rank, one sample per group rank."""
    run = Run(pp=1, tp=degree, vtp=degree)
    spec = _llama()
    ours = vocab_memory(spec, "only", degree=degree, batch=degree)
    tokens = TOKENS * degree
    small = tokens * (8 + 1 + 2) - tokens * 16 + 2 * BLOCK
    if degree == 1:
        small -= tokens * 8
    else:
        small += tokens + BLOCK
    return Row(
        quantity=f"around the layers, kept on a rank, vtp {degree}",
        published_bytes=published.figure(run, "act", 1) - published.per_layer(run, "act"),
        ours_bytes=ours.activation_bytes,
        terms={
            _SPLIT: vocab_memory(
                _unpadded(spec), "only", degree=degree, batch=degree
            ).activation_bytes
            - ours.activation_bytes,
            "the loss keeps its softmax in bf16": -2 * TOKENS * _vocab(spec),
            "its norm keeps a mean": 4 * TOKENS,
            "targets, masks, losses; tokens were there before": small,
        },
    )


def _other(published: Published, where: str, kind: States) -> Iterator[Row]:
    part = _PARTS[where]
    terms_of = _state_terms if kind == "model_states" else _activation_terms
    before: Row | None = None
    for degree in (1, 2, 4, 8):
        counted = _counted_vocab(part, degree)
        ours = 16.0 * counted.num_parameters if kind == "model_states" else _in_file(part, counted)
        run = published.taken(where, kind, degree)
        if run is not None:
            terms = terms_of(run, part)
        elif before is not None:
            terms = {name: term / 2 for name, term in before.terms.items()}
            terms["not measured: half of that at 4"] = before.ours_bytes / 2 - ours
        else:
            raise AssertionError("the first degree is always measured")
        if run is not None and kind == "model_states":
            terms |= _allocator_terms(published, run)
        before = Row(
            quantity=f"other_memory_pp_{where}, {kind}, vtp {degree}",
            published_bytes=published.other(where)[kind][str(degree)] * MIB,
            ours_bytes=ours,
            terms=terms,
            conjecture=kind == "activation" and part == "first",
        )
        yield before


def _state_terms(run: Run, part: VocabPart) -> dict[str, float]:
    """Return the terms of a table of states other than 16 bytes a parameter, in its unit."""
    to_table = DEVICES / run.pp / run.vtp
    padding = (
        _counted_vocab(part, run.vtp, padded=False).num_parameters
        - _counted_vocab(part, run.vtp).num_parameters
    )
    samples = run.vocab_samples
    tokens = samples * TOKENS * 16 if samples > 1 else (TOKENS + 1) * 8
    terms = {
        "two cuBLAS workspaces": WORKSPACES * to_table,
        "tokens and labels": tokens * to_table,
    }
    if padding:
        terms[_SPLIT] = 16.0 * padding
    if run.tp > 1:
        gathered = run.layer_samples * TOKENS * _llama().layers[0].hidden_size * 2
        terms["buffer of gathered sequences"] = gathered * to_table
    if run.pp > 1:  # its formula divides a layer's states by the data ranks, and this with them
        terms["rotary table taken off pp times"] = -(run.pp - 1) * _rotary_bytes() * to_table
    return terms


def _allocator_terms(published: Published, run: Run) -> dict[str, float]:
    """Return the unused bytes of allocator blocks: a rest of 1 MiB or less is not split off.

    Segments are whole multiples of 2 MiB, so four tensors of an odd number of MiB (a table's
    weights, gradients and both moments) are in blocks that are 1 MiB larger. A layer's share comes
    from the run with a whole vocabulary, whose slack the formula subtracts.
    """
    to_table = DEVICES / run.pp / run.vtp
    table = 4 * _vocab(_llama()) * _llama().layers[0].hidden_size / DEVICES * run.pp
    segment = math.ceil(table / (2 * MIB)) * 2 * MIB
    terms = {}
    if segment - table <= MIB:
        terms["four tensors of odd MiB, in blocks of even"] = 4 * (segment - table) * to_table
    slack = published.slack(Run(pp=1, tp=run.tp, vtp=1), "ms") if run.tp > 1 else 0
    if slack:
        terms["a block of the allocator not split, taken off"] = -slack * run.pp * to_table
    return terms


def _activation_terms(run: Run, part: VocabPart) -> dict[str, float]:
    """Return the terms from our figure to the peak of a run, per sample of a vocabulary group."""
    spec = _llama()
    hidden, samples = spec.layers[0].hidden_size, run.vocab_samples
    plain = _counted_vocab(part, run.vtp, padded=False)
    layer = _layer("llama2-7b", TOKENS, run.tp)
    left = layer.num_parameters / run.dp + plain.num_parameters / (DEVICES / run.pp / run.vtp)
    gradients = {"gradients left at the end, taken off": -4.0 * left / samples}
    if part == "first":
        return gradients | {
            "the stage's output": run.layer_samples / run.tp * TOKENS * hidden * 2 / samples,
            "backward of a layer": layer.peak_bytes * run.layer_samples / samples,
            "its weights gathered, its gradient whole": 4.0 * layer.num_parameters / samples,
        }
    logits = TOKENS * _vocab(spec) / run.vtp
    terms = gradients | {
        "the loss keeps its softmax in bf16": -2.0 * logits,
        "two bf16 copies of the logits": 4.0 * logits - plain.peak_bytes / BATCH,
        "the head's weights gathered": 2.0 * _vocab(spec) * hidden / run.vtp / samples,
    }
    padding = _in_file(part, plain) - _in_file(part, _counted_vocab(part, run.vtp))
    return terms | ({_SPLIT: padding} if padding else {})


def _at_2048(folder: Path) -> Row:
    """Return the one published figure of a run that did train with 2048 tokens."""
    path = folder / "memory_profiling_bf16_llama2-7b_seqlen2048_all.json"
    published = Published.read(path, 2048)
    spec = load_spec("llama2-7b", seq_length=[2048])
    around = vocab_memory(spec, "only", batch=1).activation_bytes
    return Row(
        quantity="2048 tokens: one layer and what is around it, kept",
        published_bytes=published.figure(Run(pp=1, tp=1, vtp=1), "act", 1),
        ours_bytes=_layer("llama2-7b", 2048).activation_bytes + around,
        terms={"the loss keeps its softmax in bf16": -2.0 * 2048 * _vocab(spec)},
    )


# --- counts --------------------------------------------------------------------------------


@cache
def _llama() -> ModelSpec:
    return load_spec("llama2-7b", seq_length=[TOKENS])


def _vocab(spec: ModelSpec) -> int:
    return padded_vocab_size(_unpadded(spec))


@cache
def _layer(model: str, seq_length: int, degree: int = 1, *, full: bool = False) -> ExactMemory:
    layer = load_spec(model, seq_length=[seq_length]).layers[0]
    return layer_memory(layer, Sharding(degree=degree, checkpoint="full" if full else "none"))


@cache
def _counted_vocab(part: VocabPart, degree: int, *, padded: bool = True) -> ExactMemory:
    spec = _llama() if padded else _unpadded(_llama())
    return vocab_memory(spec, part, degree=degree, batch=BATCH)


def _unpadded(spec: ModelSpec) -> ModelSpec:
    return replace(spec, make_vocab_size_divisible_by=1)


def _in_file(part: VocabPart, memory: ExactMemory) -> float:
    """Return the activation of the documented tables per sample of `BATCH`, in bytes."""
    peak = 0 if part == "first" else memory.peak_bytes
    return (memory.activation_bytes + peak) / BATCH
