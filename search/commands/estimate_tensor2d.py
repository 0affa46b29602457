"""`autopar-estimate tensor2d`: one candidate's degrees and placement in, its table out."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from autopar.command.options import Command, make, option, read_values
from autopar.errors import InfeasibleExecution, OptionError

if TYPE_CHECKING:
    from search.closed_form.tensor2d import Model, System

__all__ = ["COMMAND", "MODEL", "Tensor2dSpec", "execute"]

MODEL = "tensor2d"
_IN, _OUT = "Inputs", "Output"
_EXAMPLES = {"config": "dp=2,tp=8,pp=4,mbs=1", "placement": "nv_tp=8,nv_dp=1,nv_pp=1"}


@dataclass(frozen=True, kw_only=True)
class Tensor2dSpec:
    """What `autopar-estimate tensor2d` is asked."""

    model: str | None = option(
        None, help="file with l, e, h, depth, f, or shipped model", panel=_IN
    )
    system: str | None = option(
        None, help="file, or shipped name such as a100, h100, h200, b200", panel=_IN
    )
    strategy: Literal["1d", "2d", "2d-seqp"] | None = option(
        None, help="how tensors are divided", panel=_IN
    )
    config: str | None = option(None, help=f"degrees, such as {_EXAMPLES['config']}", panel=_IN)
    placement: str | None = option(
        None, help=f"such as {_EXAMPLES['placement']}", panel=_IN, shown="the fastest"
    )
    n_gpus: int | None = option(
        None, help="GPUs in all", panel=_IN, shown="dp * tp * pp", low=1, high=1 << 30
    )
    batch: int | None = option(
        None, help="samples of a step, in all", panel=_IN, low=1, high=1 << 40
    )
    execution: str | None = option(
        None, help="JSON file with strategy, config, placement, ...", panel=_IN
    )
    attention: Literal["flash", "plain", "summa"] = option(
        "flash", help="plain writes its scores, summa divides its products too (2d)", panel=_IN
    )
    recompute: bool = option(
        False, help="make what plain attention writes again in backward", panel=_IN
    )
    compat: bool = option(False, help="the published figures, with their known defects", panel=_IN)
    layers: bool = option(
        False, help="add the operations of one layer and around the layers", panel=_OUT
    )
    json: str | None = option(
        None, help="file for the statistics (.gz compresses), - for stdout, no tables", panel=_OUT
    )


COMMAND = Command(
    name="autopar-estimate",
    usage=f"{MODEL} [OPTIONS]",
    fills=(Tensor2dSpec,),
    intro="""Price one training step after arXiv 2410.00273: tensor parallelism in one and two
dimensions, with groups placed in fast domains.

M and S are a JSON file or a shipped name. Strategy 1d divides heads, 2d rows and columns (SUMMA),
2d-seqp heads and the sequence. --config takes dp, tp, pp, mbs; in two dimensions tp1, tp2 in the
place of tp, and for 2d the panels nb. --placement says how many of a group share a domain.

Exit codes: 0 done, 2 an input is unusable, 3 the candidate cannot run.
""",
)
_LAYERS = {
    "name": ("operation", ""),
    "t_fwd": ("forward", "s"),
    "t_fwd_comm": ("links", "s"),
    "t_bwd": ("backward", "s"),
    "t_bwd_comm": ("links", "s"),
    "weights_mem": ("weights", "B"),
    "activation_buffer": ("kept", "B"),
}
_FILE_KEYS = {
    "strategy": "strategy",
    "config": "config",
    "placement": "placement",
    "n_gpus": "n-gpus",
    "global_batch_size": "batch",
}
"""Keys of an execution file -> the options that say the same."""


def execute(raw: dict[str, Any]) -> int:
    """Price what a parsed command line says, and return the exit code."""
    from search.closed_form.files import load_model, tensor2d_system
    from search.commands.app import refuse_nonsense, write_answer

    given = make(Tensor2dSpec, read_values(COMMAND.rows, raw))
    asked = _asked(given)
    if given.model is None or given.system is None:
        missing = "model" if given.model is None else "system"
        raise OptionError(f"--{missing} is missing; give a file or a shipped name")
    for name in ("strategy", "config", "batch"):
        if name not in asked:
            raise OptionError(f"--{name} is missing; give it, or an --execution file with it")
    if given.recompute and given.attention == "flash":
        raise OptionError(
            "--recompute: flash attention keeps no scores; give --attention plain too"
        )
    if given.attention == "summa" and asked["strategy"] != "2d":
        raise OptionError(
            f"--attention: summa needs the strategy 2d, got {asked['strategy']!r:.60}"
        )
    name, model = load_model(given.model)
    system = tensor2d_system(given.system)
    assumed = []
    config = asked["config"]
    if "n-gpus" not in asked:
        degrees = ("dp", "pp", *(("tp",) if asked["strategy"] == "1d" else ("tp1", "tp2")))
        sizes = [config[key] for key in degrees if type(config.get(key)) is int]
        asked["n-gpus"] = math.prod(sizes)  # what is missing or no number is refused below
        assumed.append(f"n_gpus = {asked['n-gpus']}, the product of the degrees")
    try:
        priced = _priced(model, system, asked, given)
    except InfeasibleExecution as error:
        if given.execution is None:
            raise
        raise InfeasibleExecution(f"{given.execution}: {error.reason}", error.kind) from None
    refuse_nonsense(given.system, priced, "t")
    if priced.pop("_placed", False):
        placed = ",".join(f"{key}={priced[key]}" for key in priced if key.startswith("nv_"))
        assumed.append(f"placement {placed}, the fastest of those that fit into a domain")
    # both are GB of 1e9 bytes, as in the published documents
    if priced["mem"] > system.hbm_capacity:
        raise InfeasibleExecution(
            f"needs {priced['mem']:.4g} GB of memory per GPU but only has "
            f"{system.hbm_capacity:.4g} GB (hbm_capacity)"
        )
    if given.json is not None:
        write_answer(given.json, priced)
    if given.json != "-":
        _show(given, name, asked, model, system, priced, assumed)
    return 0


def _asked(given: Tensor2dSpec) -> dict[str, Any]:
    """Return what is asked for, options before the execution file."""
    from autopar.documents.json import load_object, shorten
    from autopar.errors import DocumentError, nearest

    asked: dict[str, Any] = {}
    path = given.execution
    if path is not None:
        for key, value in load_object(path).data.items():
            if key.startswith("_"):
                continue
            if key not in _FILE_KEYS:
                near = nearest(key, _FILE_KEYS, 0.0)
                raise DocumentError(
                    path, f"this key is unknown; the nearest known key is {near!r}", key=key
                )
            shape = {"strategy": str, "config": dict, "placement": dict}.get(key, int)
            # type() and not isinstance: true is no count
            if type(value) is not shape or (shape is int and value < 1):
                words = {str: "a text", dict: "an object", int: "a positive integer"}[shape]
                raise DocumentError(
                    path, f"the value is {shorten(value)}, expected {words}", key=key
                )
            asked[_FILE_KEYS[key]] = value
    for name in _FILE_KEYS.values():
        value = getattr(given, name.replace("-", "_"))
        if value is not None:
            asked[name] = _numbers(name, value) if name in ("config", "placement") else value
    return asked


def _numbers(option: str, text: str) -> dict[str, int]:
    """Return the numbers of `dp=2,tp=8`."""
    found: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([a-z]\w*)=(\d{1,9})\s*", part)
        if match is None:
            raise OptionError(
                f"--{option}: expected names and numbers such as {_EXAMPLES[option]}, "
                f"got {part.strip()!r:.60}"
            )
        if match[1] in found:
            raise OptionError(f"--{option}: {match[1]} is given twice")
        found[match[1]] = int(match[2])
    return found


def _priced(
    model: Model, system: System, asked: Mapping[str, Any], given: Tensor2dSpec
) -> dict[str, Any]:
    from search.closed_form.tensor2d import evaluate
    from search.closed_form.tensor2d.exploration import assignments

    strategy, config = asked["strategy"], asked["config"]

    def price(placement: Mapping[str, int], *, layers: bool = False) -> dict[str, Any]:
        return evaluate(
            strategy,
            model,
            config,
            placement,
            asked["n-gpus"],
            asked["batch"],
            system,
            compat=given.compat,
            attention=given.attention,
            recompute=given.recompute,
            layers=layers,
        )

    if "placement" in asked:
        return price(asked["placement"], layers=given.layers)
    tensor = ("tp",) if strategy == "1d" else ("tp1", "tp2")
    groups = (*tensor, "dp", "pp")
    names = tuple(f"nv_{group}" for group in groups)
    alone = price(dict.fromkeys(names, 1))  # says what is wrong with the degrees
    dims = tuple(config[group] for group in groups)
    inside = assignments(dims, system.nvlink_size) or _largest(dims, system.nvlink_size)
    found = [price(dict(zip(names, choice, strict=True))) for choice in inside]
    best = min([*found, alone], key=lambda statistics: float(statistics["t"]))
    if given.layers:
        # operations are listed once, for the placement that is shown
        best = price({name: best[name] for name in names}, layers=True)
    return {**best, "_placed": True}


def _largest(dims: tuple[int, ...], domain: int) -> list[tuple[int, ...]]:
    """Return every choice of ranks that fits where none fills a domain."""
    from search.closed_form.tensor2d.exploration import divisors

    return [
        choice for choice in itertools.product(*map(divisors, dims)) if math.prod(choice) <= domain
    ]


def _show(
    given: Tensor2dSpec,
    name: str,
    asked: Mapping[str, Any],
    model: Model,
    system: System,
    s: dict[str, Any],
    assumed: list[str],
) -> None:
    from autopar.command.show import make_console
    from autopar.units import format_seconds
    from search.closed_form.questions import tensor2d_memory, tensor2d_time
    from search.closed_form.tensor2d import Quirks
    from search.report import closed_form as report

    console = make_console(sys.stdout)
    attention = f"{given.attention} attention" + ", recomputed" * given.recompute
    rate = asked["batch"] / s["t"]
    degrees = " ".join(f"{key}={value}" for key, value in asked["config"].items())
    report.show_title(
        console,
        f"{name} on {given.system}: {asked['n-gpus']} GPUs, {asked['strategy']}, {degrees}, "
        f"{attention}",
        f"{rate:.5g} samples/s, step {format_seconds(s['t'])}, batch {asked['batch']}",
    )
    report.show_time_parts(console, tensor2d_time(s), s["t"])
    report.show_memory_parts(console, tensor2d_memory(s), system.hbm_capacity * 1e9)
    achieved = s["flops_per_gpu"] / s["t"]
    report.show_pairs(
        console,
        "rates",
        [
            ("samples per second", report.format_rate(rate)),
            # l is the sequence length
            ("tokens per second", report.format_rate(rate * model.l)),
            ("tokens per second and GPU", report.format_rate(rate * model.l / asked["n-gpus"])),
            ("TFLOP/s per GPU", f"{achieved:.4g} of {system.matrix_flops_fp16:.4g}"),
            ("share of the peak", f"{achieved / system.matrix_flops_fp16 * 100:.1f} %"),
        ],
    )
    if given.layers:
        rows = [
            # GB of the model -> bytes of the table
            {**row, **{key: row[key] * 1e9 for key in ("weights_mem", "activation_buffer")}}
            for row in s["layers"]
        ]
        around = ", embedding and head" if any(row["name"] == "embedding" for row in rows) else ""
        report.show_layers(console, rows, _LAYERS, heading=f"one layer{around}, one micro-batch")
    kept = list(Quirks.meanings.values()) if given.compat else []
    notes = []
    if given.compat and model != model.published():
        notes.append("what is more than l, e, h, depth and f of the model is not in this model")
    elif not model.vocab:
        notes.append("vocab is not given: embedding, head and loss are left out")
    report.show_lists(
        console, {"assumed": assumed, "notes": notes, "corrections that are off": kept}
    )
