"""The circumstances of a profiling run, and which of them forbid to continue an earlier one."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Literal

from autopar.model import ModelSpec
from profiler.environment import RankInfo, machine_metadata
from profiler.metadata import Metadata, comparable
from profiler.model.options import ModelOptions

__all__ = ["describe_model", "model_differences", "model_metadata"]

_MODEL_ROWS = {
    "model": "the model",
    "unit": "the part of a layer",
}
"""Keys of the metadata beside those of `profiler.metadata`, and their meaning; equal in all runs
of a file."""
_TIME_ROWS = {**_MODEL_ROWS, "threads": "the threads of a CPU"}
_MEMORY_ROWS = {**_MODEL_ROWS, "tp_impl": "the implementation of tensor parallelism"}
_EXACT_KEYS = ("dtype", "torch")
"""What exact counting depends on besides the model; no machine takes part in it."""


def describe_model(spec: ModelSpec) -> str:
    """Return the name of an architecture and a digest of it, whatever its depth and lengths."""
    fields = asdict(spec)
    # neither a name nor a base of rotary positions changes what is measured
    for key in ("name", "rotary_base", "rotary_scaling_factor"):
        fields.pop(key)
    for layer in fields["layers"]:
        layer.pop("num_layers")
        layer.pop("seq_length")
    text = json.dumps(fields, sort_keys=True)
    return f"{spec.name} ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def model_metadata(
    info: RankInfo, argv: Sequence[str], options: ModelOptions, spec: ModelSpec
) -> Metadata:
    """Return the circumstances of a run of this process."""
    import torch

    return {
        **machine_metadata([info], shlex.join(["profile-model", *argv])),
        "dtype": options.dtype,
        "model": describe_model(spec),
        "unit": options.unit,
        "tp_impl": options.tp_impl,
        "mode": options.mode,
        "threads": torch.get_num_threads() if info.device_uuid is None else None,
    }


def model_differences(
    kind: Literal["computation", "memory"],
    earlier: Mapping[str, object],
    now: Mapping[str, object],
) -> list[str]:
    """Return why cells of two runs may not stand in one file, one clause each."""
    if kind == "memory":
        rows = _MEMORY_ROWS
        found = comparable(_only_exact(earlier), _only_exact(now), resume=True)
    else:
        rows = _TIME_ROWS
        found = comparable(earlier, now, resume=True)
    return [
        f"{meaning} ({key}): {earlier.get(key)} and {now.get(key)}"
        for key, meaning in rows.items()
        if earlier.get(key) != now.get(key)
    ] + found


def _only_exact(metadata: Mapping[str, object]) -> dict[str, object]:
    return {key: metadata.get(key) for key in _EXACT_KEYS}
