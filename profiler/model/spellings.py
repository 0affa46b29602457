"""Other spellings of the options of `profile-model`: of the documentation and of its peers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

__all__ = ["ALIASES", "translate"]

_OVERRIDE = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)=(.*)", re.DOTALL)

ALIASES: Mapping[str, str] = {
    "--profile-mode": "--mode",
    "--model-size": "--model",
    "--mixed-precision": "--dtype",
    "--profile-mixed-precision": "--dtype",
    "--precision": "--dtype",
    "--profile-batch-size": "--bsz",
    "--profile-fixed-batch-size": "--bsz",
    "--seq-length": "--seq",
    "--profile-seq-length-list": "--seq",
    "--profile-fixed-seq-length-list": "--seq",
    "--profile-layernum-min": "--layernum-min",
    "--profile-layernum-max": "--layernum-max",
    "--profile-max-tp-deg": "--max-tp-deg",
}
"""Our names by documented ones and those of other releases."""

_IGNORED: Mapping[str, tuple[int, str]] = {
    "--profile-dp-type": (1, "model states are counted, whatever is sharded by data"),
    "--profile-flow-control": (1, "everything runs in this process"),
    "--sequence-parallel": (0, "memory is written with and without it"),
    "--use-flash-attn": (0, "attention never keeps the matrix of scores"),
    "--shape-order": (1, "the layers have their own"),
    "--set-model-config-manually": (1, "--model names what is profiled"),
    "--set-layernum-manually": (1, "--layernum-min and --layernum-max are enough"),
    "--set-seqlen-manually": (1, "--seq is enough"),
    "--num-layertype": (1, "the model says it"),
    "--extra-args-str": (1, "no other program is started"),
    "--runtime-yaml-template-path": (1, "no other program is started"),
    "--max-per-device-train-batch-size": (1, "--bsz says it"),
}
"""Options of Galvatron and PaddleNLP without a meaning here: values that follow, and why."""


def translate(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return arguments in our spelling, and sentences on those that were left out.

    Underscores become hyphens, overrides such as `model_profiler.profile_type=memory` options.
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
        if name in _IGNORED:
            count, why = _IGNORED[name]
            flag_value = count == 0 and rest and rest[0].lower() in ("0", "1", "true", "false")
            if not equals and (count or flag_value) and rest:
                rest.pop(0)
            notes.append(f"{name} has no effect: {why}")
            continue
        result.append(name + equals + value)
    return result, notes


def _takes_value(previous: str) -> bool:
    """Return whether what follows an argument may be its value and not an override."""
    return previous.startswith("--") and "=" not in previous
