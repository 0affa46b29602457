"""`autopar-estimate tensor2d`: one candidate's degrees and placement in, its table out."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autopar.errors import InfeasibleExecution, OptionError
from search.cli_options import OptionRow
from search.cli_parse import convert
from search.commands.app import make_app

if TYPE_CHECKING:
    import typer

    from search.closed_form.tensor2d import Model, System

__all__ = ["HELP", "MODEL", "ROWS", "app"]

MODEL = "tensor2d"
HELP = """Price one training step after arXiv 2410.00273: tensor parallelism in one and two
dimensions, with groups placed in fast domains.

M and S are a JSON file or a shipped name. Strategy 1d divides heads, 2d rows and columns (SUMMA),
2d-seqp heads and the sequence. --config takes dp, tp, pp, mbs; in two dimensions tp1, tp2 in the
place of tp, and for 2d the panels nb. --placement says how many of a group share a domain.

Exit codes: 0 done, 2 an input is unusable, 3 the candidate cannot run.
"""
_IN, _OUT = "Inputs", "Output"
_STRATEGIES = ("1d", "2d", "2d-seqp")
_EXAMPLES = {"config": "dp=2,tp=8,pp=4,mbs=1", "placement": "nv_tp=8,nv_dp=1,nv_pp=1"}
ROWS = (
    OptionRow("model", "text", "file with l, e, h, depth, f, or shipped model", _IN),
    OptionRow("system", "text", "file, or shipped name such as a100, h100, h200, b200", _IN),
    OptionRow("strategy", "choice", "how tensors are divided", _IN, choices=_STRATEGIES),
    OptionRow("config", "text", f"degrees, such as {_EXAMPLES['config']}", _IN),
    OptionRow("placement", "text", f"such as {_EXAMPLES['placement']} [default: the fastest]", _IN),
    OptionRow("n-gpus", "int", "GPUs in all [default: dp * tp * pp]", _IN, low=1, high=1 << 30),
    OptionRow("batch", "int", "samples of a step, in all", _IN, low=1, high=1 << 40),
    OptionRow("execution", "text", "JSON file with strategy, config, placement, ...", _IN),
    OptionRow(
        "attention",
        "choice",
        "plain writes its scores, summa divides its products too (2d) [default: flash]",
        _IN,
        choices=("flash", "plain", "summa"),
    ),
    OptionRow("recompute", "flag", "make what plain attention writes again in backward", _IN),
    OptionRow("compat", "flag", "the published figures, with their known defects", _IN),
    OptionRow("layers", "flag", "add the operations of one layer and around the layers", _OUT),
    OptionRow(
        "json", "text", "file for the statistics (.gz compresses), - for stdout, no tables", _OUT
    ),
)
_BY_NAME = {row.name: row for row in ROWS}
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


def app() -> typer.Typer:
    """Return the application of the subcommand."""
    return make_app("autopar-estimate", ROWS, _execute)


def _execute(raw: dict[str, Any]) -> int:
    from search.closed_form.files import load_model, tensor2d_system
    from search.commands.estimate import refuse_nonsense, write_answer

    for row in ROWS:
        if row.kind in ("text", "choice") and raw[row.name] is not None:
            convert(row, raw[row.name])  # refuses an empty one, and a word that is no choice
    asked = _asked(raw)
    for name in ("model", "system"):
        if raw[name] is None:
            raise OptionError(f"--{name} is missing; give a file or a shipped name")
    for name in ("strategy", "config", "batch"):
        if name not in asked:
            raise OptionError(f"--{name} is missing; give it, or an --execution file with it")
    if raw["recompute"] and raw["attention"] in (None, "flash"):
        raise OptionError(
            "--recompute: flash attention keeps no scores; give --attention plain too"
        )
    if raw["attention"] == "summa" and asked["strategy"] != "2d":
        raise OptionError(
            f"--attention: summa needs the strategy 2d, got {asked['strategy']!r:.60}"
        )
    name, model = load_model(raw["model"])
    system = tensor2d_system(raw["system"])
    assumed = []
    config = asked["config"]
    if "n-gpus" not in asked:
        degrees = ("dp", "pp", *(("tp",) if asked["strategy"] == "1d" else ("tp1", "tp2")))
        sizes = [config[key] for key in degrees if type(config.get(key)) is int]
        asked["n-gpus"] = math.prod(sizes)  # what is missing or no number is refused below
        assumed.append(f"n_gpus = {asked['n-gpus']}, the product of the degrees")
    try:
        priced = _priced(model, system, asked, raw)
    except InfeasibleExecution as error:
        if raw["execution"] is None:
            raise
        raise InfeasibleExecution(f"{raw['execution']}: {error.reason}", error.kind) from None
    refuse_nonsense(raw["system"], priced, "t")
    if priced.pop("_placed", False):
        placed = ",".join(f"{key}={priced[key]}" for key in priced if key.startswith("nv_"))
        assumed.append(f"placement {placed}, the fastest of those that fit into a domain")
    if priced["mem"] > system.hbm_capacity:
        raise InfeasibleExecution(
            f"needs {priced['mem']:.4g} GB of memory per GPU but only has "
            f"{system.hbm_capacity:.4g} GB (hbm_capacity)"
        )
    if raw["json"] is not None:
        write_answer(raw["json"], priced)
    if raw["json"] != "-":
        _show(raw, name, asked, model, system, priced, assumed)
    return 0


def _asked(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is asked for, options before the execution file."""
    from autopar.documents.checks import nearest_key
    from autopar.documents.json import load_object, shorten
    from autopar.errors import DocumentError

    asked: dict[str, Any] = {}
    path = raw["execution"]
    if path is not None:
        for key, value in load_object(path).data.items():
            if key.startswith("_"):
                continue
            if key not in _FILE_KEYS:
                near = nearest_key(key, list(_FILE_KEYS))
                raise DocumentError(
                    path, f"this key is unknown; the nearest known key is {near!r}", key=key
                )
            shape = {"strategy": str, "config": dict, "placement": dict}.get(key, int)
            if type(value) is not shape or (shape is int and value < 1):
                words = {str: "a text", dict: "an object", int: "a positive integer"}[shape]
                raise DocumentError(
                    path, f"the value is {shorten(value)}, expected {words}", key=key
                )
            asked[_FILE_KEYS[key]] = value
    for name in _FILE_KEYS.values():
        if raw[name] is None:
            continue
        value = convert(_BY_NAME[name], raw[name])
        asked[name] = _numbers(name, str(value)) if name in ("config", "placement") else value
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
    model: Model, system: System, asked: Mapping[str, Any], raw: Mapping[str, Any]
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
            compat=raw["compat"],
            attention=raw["attention"] or "flash",
            recompute=raw["recompute"],
            layers=layers,
        )

    if "placement" in asked:
        return price(asked["placement"], layers=raw["layers"])
    tensor = ("tp",) if strategy == "1d" else ("tp1", "tp2")
    groups = (*tensor, "dp", "pp")
    names = tuple(f"nv_{group}" for group in groups)
    alone = price(dict.fromkeys(names, 1))  # says what is wrong with the degrees
    dims = tuple(config[group] for group in groups)
    inside = assignments(dims, system.nvlink_size) or _largest(dims, system.nvlink_size)
    found = [price(dict(zip(names, choice, strict=True))) for choice in inside]
    best = min([*found, alone], key=lambda statistics: float(statistics["t"]))
    if raw["layers"]:
        best = price({name: best[name] for name in names}, layers=True)
    return {**best, "_placed": True}


def _largest(dims: tuple[int, ...], domain: int) -> list[tuple[int, ...]]:
    """Return every choice of ranks that fits where none fills a domain."""
    from search.closed_form.tensor2d.exploration import divisors

    return [
        choice for choice in itertools.product(*map(divisors, dims)) if math.prod(choice) <= domain
    ]


def _show(
    raw: Mapping[str, Any],
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
    from search.closed_form.validation import quirk_texts
    from search.report import closed_form as report

    console = make_console(sys.stdout)
    attention = f"{raw['attention'] or 'flash'} attention" + ", recomputed" * raw["recompute"]
    rate = asked["batch"] / s["t"]
    degrees = " ".join(f"{key}={value}" for key, value in asked["config"].items())
    report.show_title(
        console,
        f"{name} on {raw['system']}: {asked['n-gpus']} GPUs, {asked['strategy']}, {degrees}, "
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
            ("tokens per second", report.format_rate(rate * model.l)),
            ("tokens per second and GPU", report.format_rate(rate * model.l / asked["n-gpus"])),
            ("TFLOP/s per GPU", f"{achieved:.4g} of {system.matrix_flops_fp16:.4g}"),
            ("share of the peak", f"{achieved / system.matrix_flops_fp16 * 100:.1f} %"),
        ],
    )
    if raw["layers"]:
        rows = [
            {**row, **{key: row[key] * 1e9 for key in ("weights_mem", "activation_buffer")}}
            for row in s["layers"]
        ]
        around = ", embedding and head" if any(row["name"] == "embedding" for row in rows) else ""
        report.show_layers(console, rows, _LAYERS, heading=f"one layer{around}, one micro-batch")
    kept = list(quirk_texts(Quirks).values()) if raw["compat"] else []
    notes = []
    if raw["compat"] and model != model.published():
        notes.append("what is more than l, e, h, depth and f of the model is not in this model")
    elif not model.vocab:
        notes.append("vocab is not given: embedding, head and loss are left out")
    report.show_lists(
        console, {"assumed": assumed, "notes": notes, "corrections that are off": kept}
    )
