"""The rows of bad input for `autopar-verify` and for the calibrations that it writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autopar import __version__
from tests.e2e.bad_input_table import COMMANDS, ESTIMATED, Case

COMMAND = "autopar-verify"
_CPU = ("--device", "cpu")
_SECTION, _FILES = "options of autopar-verify", "calibration"
_ONE = {"value": 1.0}


def _calibration(**changes: Any) -> dict[str, Any]:
    """Return a good calibration of the estimated case, with other top-level entries."""
    content = {
        "format": "autopar-calibration",
        "version": 1,
        "hardware": {"name": "a100-80gb_1x8", "world_size": 8, "estimated": True},
        "model": {
            "name": "llama2-7b",
            "num_layers": 32,
            "seq_length": [4096],
            "hidden_size": [4096],
            "precision": "bf16",
        },
        "factors": {
            "computation": _ONE,
            "communication": _ONE,
            "fixed_s": {"value": 0.0},
            "memory": _ONE,
        },
    }
    return {**content, **changes}


def cases() -> Iterator[Case]:
    """Yield every row."""
    yield from _options()
    yield from _calibrations()


def _options() -> Iterator[Case]:
    for what, arguments in {
        "no rank": ("--nproc", "0"),
        "a batch that does not divide": ("--batch", "7"),
        "layers in words": ("--layers", "four"),
        "no plan": ("--plans", "0"),
        "no round": ("--repeats", "0"),
        "no step": ("--steps", "0"),
        "unknown device": ("--device", "tpu"),
        "unknown precision": ("--precision", "fp8"),
        "negative memory": ("--memory-constraint", "-1"),
        "hardware that is no folder": ("--hardware", "strategy.json"),
        "profiles that do not exist": ("--model", "llama2-7b", "--profiles", "profiles"),
        "profiles of no model": ("--profiles", "."),
        "unknown model": (*_CPU, "--model", "llama2-8b"),
        "layers of two types": (*_CPU, "--model", "llama2-7b", "--layers", "2,2"),
        "a work folder below a file": (*_CPU, "--work", "strategy.json/work"),
        "--json below a file": ("--json", "strategy.json/out.json"),
        "unknown option": ("--plan", "x"),
        "half a rank": ("--nproc", "1.5"),
    }.items():
        yield Case(section=_SECTION, what=what, arguments=arguments, code=2, command=COMMAND)
    yield Case(
        section=_SECTION,
        what="a work folder of another question",
        arguments=(*_CPU, "--work", "verify", "--batch", "16"),
        code=2,
        command=COMMAND,
        edit=_other_question,
    )
    yield Case(
        section=_SECTION,
        what="files where --no-resume deletes",
        arguments=(*_CPU, "--work", "verify", "--hardware", "verify/hardware", "--no-resume"),
        code=2,
        command=COMMAND,
        edit=lambda folder: (folder / "verify" / "hardware").mkdir(parents=True),
    )


def _other_question(folder: Path) -> None:
    (folder / "verify").mkdir()
    before = {"autopar": __version__, "nproc": "2", "batch": "8", "steps": "5", "device": "cpu"}
    (folder / "verify" / "question.json").write_text(json.dumps(before), encoding="utf-8")


def _calibrations() -> Iterator[Case]:
    factors = _calibration()["factors"]

    def other(name: str, value: Mapping[str, float]) -> dict[str, Any]:
        return _calibration(factors={**factors, name: value})

    for what, content in {
        "another format": _calibration(format="autopar-plan"),
        "a newer version": _calibration(version=2),
        "no factors": {k: v for k, v in _calibration().items() if k != "factors"},
        "a factor of 0": other("computation", {"value": 0.0}),
        "a negative factor": other("memory", {"value": -1.0}),
        "a factor in percent": other("communication", {"value": 1e5}),
        "seconds in milliseconds": other("fixed_s", {"value": 12000.0}),
        "a factor outside of its interval": other(
            "computation", {"value": 1.0, "low": 1.1, "high": 1.3}
        ),
        "half an interval": other("memory", {"value": 1.0, "high": 1.3}),
        "a misspelt factor": other("comunication", _ONE),
        "another device": _calibration(hardware={"name": "cpu_1x2", "world_size": 2}),
        "no ranks": _calibration(hardware={"name": "a100-80gb_1x8", "world_size": 0}),
    }.items():
        yield _case(what, _writing(content))
    yield _case("missing file", None)
    yield _case("a file that is no calibration", _writing({"pp_deg": 2}))


def _case(what: str, edit: Callable[[Path], None] | None) -> Case:
    arguments = (*ESTIMATED, "--calibration", "calibration.json")
    return Case(
        section=_FILES, what=what, arguments=arguments, code=2, command=COMMANDS[0], edit=edit
    )


def _writing(content: Mapping[str, Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "calibration.json").write_text(json.dumps(content), encoding="utf-8")

    return write
