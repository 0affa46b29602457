"""Galvatron configurations -> plan: the JSON mode's file, and the GLOBAL mode in YAML or flags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.errors import DocumentError
from autopar.jsonio import load_object, shorten
from autopar.plan_files import read_strategy
from search.exports.configurations import Configuration, Imported

__all__ = ["import_galvatron"]

_LAYERS = ("tp_sizes_enc", "tp_size_list", "format", "plan")
_SHELL_NAMES = {
    "global_train_batch_size": "global_batch_size",
    "num_hidden_layers": "num_layers",
    "embed_sdp": "vocab_sdp",
}


def import_galvatron(
    source: Configuration, *, world_size: int | None = None, num_layers: int | None = None
) -> Imported:
    """Return the plan that a Galvatron configuration describes.

    Parameters
    ----------
    world_size : number of GPUs, where the configuration does not say it.
    num_layers : layers of the model, for a GLOBAL mode that leaves them to the model.

    Raises
    ------
    DocumentError : a value is missing or unusable, or says what no plan can.
    """
    world = world_size or source.world_size
    if any(key in source.document for key in _LAYERS):
        return _strategy(source.path, source.document, world, list(source.notes))
    values, from_shell = _values(source), source.flags is not None
    named = values.get("galvatron_config_path")
    if named not in (None, "None", ""):
        if "$" in str(named):
            raise DocumentError(
                source.path,
                f"names the strategy file by a variable, {shorten(named)}",
                key="galvatron_config_path",
                remedy="give the strategy file itself",
            )
        path = source.path.parent / str(named)
        return _strategy(path, load_object(path).data, world, list(source.notes))
    return _global(source, values, world, num_layers, from_shell=from_shell)


def _strategy(
    path: Path, document: Mapping[str, Any], world: int | None, notes: list[str]
) -> Imported:
    sharded = document.get("embed_sdp") in (1, "1", True)
    if sharded and "vocab_sdp" not in document and "tp_sizes_enc" in document:
        notes.append(
            "embed_sdp is 1 without vocab_sdp, the key that the newest Galvatron reads: it would "
            "train without ZeRO-3 of the embedding; priced is what the file says"
        )
    try:
        plan = read_strategy(document, world_size=world)
    except DocumentError as error:
        raise DocumentError(path, error.problem, key=error.key, remedy=error.remedy) from None
    return Imported(plan=plan, notes=tuple(notes))


def _values(source: Configuration) -> dict[str, Any]:
    """Return the options of the GLOBAL mode by the newest names, from whatever section."""
    if source.flags is not None:
        pairs = {
            name.replace("-", "_"): (words[0] if words else True)
            for name, words in source.flags.items()
        }
        return {_SHELL_NAMES.get(key, key): value for key, value in pairs.items()}
    document = _resolved(source.document, source.document)
    runtime = document.get("runtime", document)
    if not isinstance(runtime, Mapping):
        raise DocumentError(source.path, "expected sections such as parallel", key="runtime")
    values: dict[str, Any] = {k: v for k, v in runtime.items() if not isinstance(v, Mapping)}
    for section in ("parallel", "model", "train"):
        part = runtime.get(section, {})
        if isinstance(part, Mapping):
            values |= part
    return {_SHELL_NAMES.get(key, key): value for key, value in values.items()}


def _resolved(value: Any, document: Mapping[str, Any]) -> Any:
    """Return a value with `${section.key}` and `${oc.env:NAME,default}` replaced where known."""
    if isinstance(value, Mapping):
        return {key: _resolved(item, document) for key, item in value.items()}
    if not isinstance(value, str) or "${" not in value:
        return value
    match = re.fullmatch(r"\$\{oc\.env:\w+,([^{}]*)\}", value)
    if match is not None:
        return match[1]
    match = re.fullmatch(r"\$\{([\w.]+)\}", value)
    found: Any = document
    for key in match[1].split(".") if match is not None else ():
        found = found.get(key) if isinstance(found, Mapping) else None
    # One step only: a reference to a reference stays one, and cannot go round in circles.
    return value if match is None or isinstance(found, Mapping) else found


def _global(
    source: Configuration,
    values: Mapping[str, Any],
    world: int | None,
    num_layers: int | None,
    *,
    from_shell: bool,
) -> Imported:
    reader = _Values(source.path, values)
    if not {"pp_deg", "global_tp_deg"} & set(values):
        raise DocumentError(
            source.path,
            "holds neither a strategy (tp_sizes_enc) nor the GLOBAL mode's pp_deg and "
            "global_tp_deg",
            remedy="give Galvatron's strategy file, train_dist.yaml or launch script",
        )
    notes = list(source.notes)
    if world is None:
        raise DocumentError(
            source.path,
            "does not say the number of GPUs",
            remedy="give --num-nodes and --num-gpus-per-node",
        )
    layers = reader.number("num_layers", num_layers)
    if layers is None:
        raise DocumentError(
            source.path,
            "is missing, the model's configuration says it",
            key="num_layers",
            remedy="give --num-layers or --model",
        )
    for key in ("global_ep_deg", "vocab_cp"):
        if reader.number(key, 1) != 1:
            raise DocumentError(
                source.path, f"is {shorten(values[key])}, and plans have 1", key=key
            )
    stages, tensor = reader.number("pp_deg", 1), reader.number("global_tp_deg", 1)
    assert stages is not None
    assert tensor is not None
    consecutive = reader.flag("global_tp_consec", True)
    if not consecutive and not from_shell:
        notes.append("the newest Galvatron takes neighbours whatever global_tp_consec says")
        consecutive = True
    ulysses = reader.flag("use_ulysses")
    default = str(values.get("default_dp_type", "ddp"))
    batch = reader.number("global_batch_size", None)
    if batch is None:
        raise DocumentError(source.path, "is missing", key="global_batch_size", remedy="add it")
    zero3 = reader.flag("sdp") or default == "zero3"
    document: dict[str, object] = {
        "pp_deg": stages,
        "tp_sizes_enc": [tensor] * layers,
        "tp_consecutive_flags": [int(consecutive)] * layers,
        "dp_types_enc": [int(zero3)] * layers,
        "use_sp": [int(ulysses)] * layers,
        "cp_sizes_enc": [reader.number("global_cp_deg", 1)] * layers,
        "checkpoint": [int(reader.flag("global_checkpoint"))] * layers,
        "world_size": world,
        "global_bsz": batch,
        "chunks": _chunks(reader, batch, world, stages),
        "pipeline_type": str(values.get("pipeline_type", "gpipe")),
        "default_dp_type": "ddp" if default == "zero3" else default,
        "vtp": reader.number("vocab_tp", 1),
        "vsp": int(ulysses),
        "embed_sdp": int(reader.flag("vocab_sdp")),
    }
    return _strategy(source.path, document | {"vocab_sdp": document["embed_sdp"]}, world, notes)


def _chunks(reader: _Values, batch: int, world: int, stages: int) -> int:
    """Return the micro-batches; -1 lets the runtime take a quarter of the local batch."""
    if str(reader.values.get("chunks", "-1")) != "-1":
        return reader.number("chunks", 1) or 1
    if stages == 1:
        return 1
    local = batch // max(1, world // stages)
    return max(1, -(-local // 4))


class _Values:
    """Takes typed values out of options."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self.values = path, values

    def number(self, key: str, default: int | None) -> int | None:
        value = self.values.get(key)
        if value is None or (key == "global_tp_deg" and str(value) == "-1"):
            return default
        text = str(value)
        if isinstance(value, bool) or not (
            text.isascii() and text.isdigit() and 0 < int(text) < 1 << 24
        ):
            raise DocumentError(
                self.path, f"expected a positive integer, got {shorten(value)}", key=key
            )
        return int(text)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is None or str(value) == "-1":
            return default
        if value is True or str(value).lower() in ("1", "true"):
            return True
        if value is False or str(value).lower() in ("0", "false"):
            return False
        raise DocumentError(self.path, f"expected 0 or 1, got {shorten(value)}", key=key)
