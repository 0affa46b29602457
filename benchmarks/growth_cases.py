"""Cases of `bench_growth`: those with a target, and points of growth lines.

Inputs are estimated: shipped models, some with more layers than they have, on several nodes of
H100.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CASES", "Case"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One question, the kind of its measurement, and its target."""

    name: str
    kind: str = "first"
    """A key of `KINDS`."""
    target: float | None = None
    """CPU seconds; `limit`, `interrupt`: wall seconds beyond it; `dictionaries`: seconds each."""
    model: str = "llama3-405b"
    cluster: tuple[int, int] = (128, 8)
    layers: int | None = None
    """Total number of layers; None: the model's own."""
    types: int = 1
    """Layer types, in runs."""
    widths: int = 1
    """Number of MLP widths, in turns; with 1, layer types differ only in their index."""
    batches: tuple[int, ...] = (1024,)
    gib: float = 80.0
    times_smallest: float | None = None
    """The constraint as a multiple of the smallest that any plan meets; replaces `gib`."""
    resolve_gib: tuple[float, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    """Arguments of a command."""
    axis: str = ""
    """Quantity that grows along the line, empty for a single case."""
    size: float = 0.0


_SPACE: dict[str, Any] = {"sp_space": "tp+sp", "default_dp_type": "zero2"}
_SCALE: dict[str, Any] = {"model": "llama3-70b", "layers": 96, "options": _SPACE}
_SMALL: dict[str, Any] = {
    "model": "llama2-7b", "cluster": (1, 8), "batches": (64,), "options": _SPACE,
}  # fmt: skip
_RESOLVE = (72.0, 64.0, 56.0, 79.0)
_RANGE = tuple(range(1024, 4993, 128))
# mostly powers of two and their small multiples: many more ways to split a batch
_SMOOTH = tuple(sorted(f * 2**k for f in (1, 3, 5, 7) for k in range(9, 17)))
_MANY = tuple(range(128, 128 * 129, 128))
_ODD = tuple(f"layers {layer}:ckpt=1" for layer in range(1, 80, 2))
_HUGE = {**_SPACE, "default_dp_type": "any", "max_tp_deg": 64, "max_cp_deg": 4, "max_sp_deg": 64}


def _named() -> Iterator[Case]:
    """Yield the cases with a target."""
    for layers in (126, 252, 300, 390, 396, 420, 500, 1000):
        yield Case(name=f"layers-{layers}", layers=layers, target=0.5, options=_SPACE)
    for layers in (252, 420, 500, 1000):
        yield Case(name=f"layers-{layers}-ddp", layers=layers, target=0.5)
    for layers in (252, 500):
        gpipe = {**_SPACE, "pipeline_type": "gpipe"}
        # it keeps every micro-batch: fewer samples
        yield Case(name=f"layers-{layers}-gpipe", layers=layers, batches=(64,), target=0.5,
                   options=gpipe)  # fmt: skip
    yield Case(name="layers-500-top5", layers=500, target=1.0, options={**_SPACE, "top": 5})
    yield Case(name="layers-500-uniform", layers=500, target=0.1, options=_uniform())
    yield Case(name="batches-128", **_SCALE, batches=_MANY, target=0.2)
    yield Case(name="scale-range", **_SCALE, batches=_RANGE, target=0.2)
    yield Case(name="scale-smooth", **_SCALE, batches=_SMOOTH, target=0.2)
    for name, batches in (("range", _RANGE), ("smooth", _SMOOTH)):
        yield Case(
            name=f"resolve-{name}", kind="again", **_SCALE, batches=batches,
            resolve_gib=_RESOLVE, target=0.05,
        )  # fmt: skip
    yield Case(
        name="resolve-layers-252", kind="again", layers=252, options=_SPACE,
        resolve_gib=_RESOLVE, target=0.05,
    )  # fmt: skip
    many: dict[str, Any] = {
        "model": "llama3-70b",
        "cluster": (8, 8),
        "batches": (256,),
        "layers": 80,
    }
    yield Case(name="types-80", **many, types=80, options=_SPACE, target=0.3)
    yield Case(name="types-80-unlike", **many, types=80, widths=80, options=_SPACE, target=0.3)
    yield Case(name="types-80-two-widths", **many, types=80, widths=2, options=_SPACE, target=0.3)
    yield Case(name="types-80-gpus-1024", **{**many, "cluster": (128, 8), "batches": (1024,)},
               types=80, options=_SPACE, target=0.3)  # fmt: skip
    yield Case(name="types-80-tight", **many, types=80, options=_SPACE, times_smallest=1.05,
               target=0.3)  # fmt: skip
    yield Case(name="types-alternating", **many, options={**_SPACE, "pin": _ODD}, target=0.03)
    yield Case(name="7b-top0", **_SMALL, target=0.0015)
    yield Case(name="7b-top5", **{**_SMALL, "options": {**_SPACE, "top": 5}}, target=0.003)
    yield Case(name="7b-default-top5", **{**_SMALL, "options": {"top": 5}}, target=0.003)
    yield Case(name="7b-uniform", **{**_SMALL, "options": _uniform()}, target=0.0015)
    yield Case(
        name="7b-resolve", kind="again", **_SMALL, resolve_gib=tuple(range(20, 81, 4)),
        target=0.001,
    )  # fmt: skip
    yield Case(name="7b-frontier", kind="frontier", **_SMALL, target=0.05)
    yield Case(
        name="micro-batches-16384", batches=(131_072,), target=0.1,
        options={**_SPACE, "settle_chunk": 16_384},
    )  # fmt: skip
    yield Case(name="infeasible", layers=252, gib=4.0, options=_SPACE, target=0.2)
    spaces: tuple[tuple[str, dict[str, Any]], ...] = (("tp+sp", _SPACE), ("ddp", {}))
    for name, hard in spaces:
        yield Case(
            name=f"limit-1s-layers-500-{name}", kind="limit", layers=500, target=0.2,
            options={**hard, "time_limit_s": 1.0},
        )  # fmt: skip
    huge: dict[str, Any] = {
        "cluster": (128, 8),
        "layers": 252,
        "batches": tuple(range(1024, 1024 + 64 * 300, 64)),
    }
    yield Case(name="limit-3s-huge-space", kind="limit", **huge, target=0.2,
               options={**_HUGE, "time_limit_s": 3.0})  # fmt: skip
    yield Case(name="interrupt-layers-500", kind="interrupt", layers=500, target=1.0)
    yield Case(name="interrupt-huge-space", kind="interrupt", **huge, options=_HUGE, target=1.0)
    small = ("--model", "llama2-7b", "--hardware", "a100-80gb:1x8", "--settle-bsz", "64")
    yield Case(name="command-search", kind="command", arguments=("search", *small), target=0.1)
    yield Case(
        name="command-estimate", kind="command", target=0.1,
        arguments=(
            "estimate", "calculon", "--application", "llama2-7b", "--system", "a100",
            "--execution", "1x8-tp8",
        ),
    )  # fmt: skip
    yield Case(name="stage-call", kind="stage", target=5e-6)
    yield Case(name="dictionaries", kind="dictionaries", target=1 / 300_000)


def _uniform() -> dict[str, Any]:
    return {**_SPACE, "fine_grained_mode": False}


def _points() -> Iterator[Case]:
    """Yield the points of growth lines."""
    for layers in (32, 64, 126, 252, 500, 1000):
        yield Case(name=f"growth-layers-{layers}", layers=layers, axis="layers", size=layers,
                   options=_SPACE)  # fmt: skip
    for nodes in (1, 8, 64, 512, 2048):
        gpus = 8 * nodes
        yield Case(
            name=f"growth-gpus-{gpus}", model="llama2-13b", cluster=(nodes, 8), axis="GPUs",
            size=gpus, batches=(max(64, gpus),), options=_SPACE, times_smallest=1.5,
        )  # fmt: skip
    for count in (1, 4, 16, 64, 128):
        yield Case(name=f"growth-batches-{count}", **_SCALE, batches=_MANY[7 : 7 + count],
                   axis="batches", size=count)  # fmt: skip
    for types in (1, 2, 5, 10, 20, 40, 80):
        yield Case(
            name=f"growth-types-{types}", model="llama3-70b", cluster=(8, 8), layers=80,
            batches=(256,), types=types, options=_SPACE, axis="types", size=types,
        )  # fmt: skip
    for types in (1, 2, 5, 10, 20, 40, 80):
        yield Case(
            name=f"growth-unlike-{types}", model="llama3-70b", cluster=(8, 8), layers=80,
            batches=(256,), types=types, widths=types, options=_SPACE, axis="unlike types",
            size=types,
        )  # fmt: skip
    for share in (1.0, 1.02, 1.1, 1.3, 2.0, 4.0):
        yield Case(
            name=f"growth-budget-{share:g}", layers=252, times_smallest=share, options=_SPACE,
            axis="budget / smallest", size=share,
        )  # fmt: skip


CASES = {case.name: case for case in (*_named(), *_points())}
