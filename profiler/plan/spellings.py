"""Other spellings of the options of `profile-plan`: of the documentation and of its peers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from autopar.documents.json import shorten
from autopar.errors import OptionError

__all__ = ["ALIASES", "translate"]

_OVERRIDE = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)=(.*)", re.DOTALL)

ALIASES: Mapping[str, str] = {
    "--model-size": "--model",
    "--model-name": "--model",
    "--seq-length": "--seq",
    "--seqlen": "--seq",
    "--pp-size": "--pp-deg",
    "--global-sdp": "--sdp",
    "--vocab-sdp": "--embed-sdp",
    "--global-bsz": "--global-train-batch-size",
    "--precision": "--mixed-precision",
    "--dtype": "--mixed-precision",
    "--dry-run": "--mode=dryrun",
}
"""Our names by documented ones and those of other releases."""

_NUMBERED = frozenset(
    {
        *("--sequence-parallel", "--no-sequence-parallel"),
        *("--async-grad-reduce", "--no-async-grad-reduce"),
        *("--use-ulysses", "--reference", "--no-reference"),
    }
)
"""Flags that others write with a 0 or 1 behind them."""
_NOT_GIVEN = frozenset({"--global-tp-deg", "--global-tp-consec", "--chunks"})
"""Options where -1 stands for one that is not given."""
_ONE_ONLY: Mapping[str, str] = {
    "--global-cp-deg": "ring attention is not run here",
    "--vocab-cp": "ring attention is not run here",
    "--global-ep-deg": "experts are not divided here",
}
"""Degrees that can be 1 (or -1) and nothing else, and why."""
_FILES = frozenset({"--galvatron-config-path", "--plan"})

_IGNORED: Mapping[str, tuple[int, str]] = {
    "--use-flash-attn": (0, "attention never keeps the matrix of scores"),
    "--initialize-on-meta": (1, "weights are made piece by piece"),
    "--profile": (1, "what is measured is printed at the end"),
    "--check-loss": (1, "losses are always compared"),
    "--set-model-config-manually": (1, "--model names the model"),
    "--set-layernum-manually": (1, "--num-layers is enough"),
    "--set-seqlen-manually": (1, "--seq is enough"),
    "--lr": (1, "the executor checks plans and does not train"),
    "--dropout-prob": (1, "nothing is dropped, so that runs can be compared"),
    "--epochs": (1, "--steps is enough"),
    "--train-iters": (1, "--steps is enough"),
}
"""Options of Galvatron without a meaning here: values that follow, and why."""


def translate(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return arguments in our spelling, and sentences on those that were left out.

    Underscores become hyphens, overrides such as `parallel.pp_deg=2` options, flags with a 0 or 1
    their two forms; `--galvatron-config-path FILE` is the plan.

    Raises
    ------
    OptionError: a degree that can only be 1 is another.
    """
    result: list[str] = []
    notes: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        override = _OVERRIDE.fullmatch(argument)
        if override is not None and not (result and _takes_value(result[-1])):
            argument = f"--{override[1]}={override[2]}"
        if not argument.startswith("--"):
            result.append(argument)
            continue
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")
        name = ALIASES.get(name, name)
        following = value if equals else (rest[0] if rest else "")
        if name in _IGNORED:
            count, why = _IGNORED[name]
            if not equals and rest and (count or _is_flag_value(following)):
                rest.pop(0)
            notes.append(f"{name} has no effect: {why}")
        elif name in _NUMBERED and (equals or _is_flag_value(following)):
            if not equals:
                rest.pop(0)
            result.append(_flag(name, following) if _is_flag_value(following) else argument)
        elif name in _NOT_GIVEN and following == "-1":
            if not equals:
                rest.pop(0)
        elif name in _ONE_ONLY:
            if not equals and rest:
                rest.pop(0)
            if following not in ("1", "-1"):
                raise OptionError(
                    f"{name}: {_ONE_ONLY[name]}, so expected 1, got {shorten(following)}"
                )
        elif name in _FILES:
            if not equals and rest:
                rest.pop(0)
            if following.lower() not in ("", "none", "null"):
                result.append(following)
        else:
            result.append(name + equals + value)
    return result, notes


def _flag(name: str, value: str) -> str:
    """Return a flag without the 0 or 1 that follows it."""
    positive = "--" + name.removeprefix("--no-") if name.startswith("--no-") else name
    on = (value.lower() in ("1", "true")) != (name != positive)
    return positive if on else f"--no-{positive.removeprefix('--')}"


def _is_flag_value(text: str) -> bool:
    return text.lower() in ("0", "1", "true", "false")


def _takes_value(previous: str) -> bool:
    """Return whether what follows an argument may be its value and not an override."""
    return previous.startswith("--") and "=" not in previous
