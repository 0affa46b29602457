"""Reader of the `config.json` of Hugging Face models, which imports none of their code.

Families are looked up by `model_type`, or by `_class_name` in files of diffusers. Of multimodal
models only the text part is read.
`autopar.families.unknown` drafts a `model.json` of an unknown family.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.documents.json import read_record
from autopar.errors import DocumentError, InputError, OptionError, nearest
from autopar.families.base import Config
from autopar.families.consistency import checked_model
from autopar.families.decoders import DECODERS
from autopar.families.hybrids import HYBRIDS
from autopar.families.images import IMAGES
from autopar.families.mixtures import MIXTURES
from autopar.families.others import OTHERS
from autopar.families.unknown import (
    NO_ATTENTION,
    NO_TOKENS,
    TWO_TOWERS,
    unsaid,
    usual_spec,
)
from autopar.records import shorten
from autopar.run.model import ModelSpec

_FAMILIES: dict[str, type[Config]] = dict(
    sorted({**DECODERS, **MIXTURES, **HYBRIDS, **OTHERS, **IMAGES}.items())
)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names of the number of experts in files."""
_LENGTH = "max_position_embeddings"
_UNSAID = {
    **dict.fromkeys(
        ("falcon_mamba", "jamba", "mamba", "mamba2", "recurrent_gemma", "rwkv", "zamba",
         "zamba2"),
        NO_ATTENTION,
    ),
    **dict.fromkeys(("clip", "siglip"), TWO_TOWERS),
    **dict.fromkeys(
        ("resnet", "swin", "wav2vec2", "whisper"),
        NO_TOKENS,
    ),
}  # fmt: skip
"""Families that a `model.json` cannot express, and the reason."""
_VARIANT = re.compile(r"(_(moe|text|vl|omni|thinker))+$")
"""Pattern of the end of a `model_type` that names a variant of a family."""


def parse_hugging_face(
    path: Path, data: Mapping[str, Any], *, seq_length: int | None = None
) -> ModelSpec:
    """Return the spec of a Hugging Face `config.json`; raises DocumentError naming the key.

    seq_length : sequence length that replaces a missing `max_position_embeddings`

    The name of a model with image or audio parts ends with `-text`, because those are not read.
    """
    family, text, part = _text_of(data)
    kind = _FAMILIES.get(family) if isinstance(family, str) else None
    if kind is None:
        raise _unknown(path, data)
    for key in _EXPERTS:
        if not kind.mixture and key in text and text[key] not in (None, 0, 1):
            raise DocumentError(
                path,
                f"the value is {shorten(text[key])}, but {family} has one MLP per layer",
                key=key,
                remedy="Use model_type mixtral, or describe the model in a model.json",
            )
    text = _complete(data, text, seq_length)
    try:
        spec = read_record(kind, path, text).spec(path, _name_of(path, data) + part)
    except OptionError as error:
        # sizes of image models are products and quotients of keys
        raise DocumentError(path, error.short) from error
    return checked_model(path, spec)


def skeleton_of(
    path: Path, data: Mapping[str, Any], *, seq_length: int | None = None
) -> tuple[ModelSpec, tuple[str, ...]]:
    """Return a spec of a `config.json` of any family, and assumptions on an unknown family.

    Raises DocumentError if no `model.json` can express the layers, or if a needed key is missing.

    seq_length : sequence length that replaces a missing `max_position_embeddings`.
    """
    family, text, part = _text_of(data)
    if _is_family(family):
        return parse_hugging_face(path, data, seq_length=seq_length), ()
    reason = _reason(data, text)
    if reason is not None:
        raise _unsupported(path, data, reason)
    text = _complete(data, text, seq_length)
    return usual_spec(path, text, _name_of(path, data) + part)


def _text_of(data: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any], str]:
    """Return (family, keys, suffix of the name) of the text model of a file."""
    family, inner = data.get(_key_of(data)), data.get("text_config")
    # An unhashable value is no family.
    if isinstance(inner, dict) and not _is_family(family):
        return inner.get("model_type", family), inner, "-text"
    if isinstance(inner, dict) and _is_family(inner.get("model_type")):
        return inner.get("model_type"), inner, "-text"
    return family, data, "-text" if isinstance(data.get("vision_config"), dict) else ""


def _key_of(data: Mapping[str, Any]) -> str:
    """Return the key that names the family of a file."""
    return "_class_name" if "_class_name" in data and "model_type" not in data else "model_type"


def _complete(
    data: Mapping[str, Any], text: Mapping[str, Any], seq_length: int | None
) -> Mapping[str, Any]:
    """Return the keys of a text model with those that are outside of it or given by the user."""
    if text is not data and "tie_word_embeddings" in data:
        text = {"tie_word_embeddings": data["tie_word_embeddings"], **text}
    return text if seq_length is None else {_LENGTH: seq_length, **text}


def _name_of(path: Path, data: Mapping[str, Any]) -> str:
    name = data.get("_name_or_path") or ""
    if not isinstance(name, str):
        problem = f"the value is {shorten(name)}, expected a string"
        raise DocumentError(path, problem, key="_name_or_path")
    given = name.rstrip("/").split("/")[-1]
    # Files without a name are in a folder with the name of the model; others have a file name.
    own = path.resolve().parent.name if path.name == "config.json" else path.stem
    return own if given in ("", ".", "..") else given


def _is_family(value: object) -> bool:
    return isinstance(value, str) and value in _FAMILIES


def _reason(data: Mapping[str, Any], text: Mapping[str, Any]) -> str | None:
    """Return the reason why no `model.json` can express a model; None if there is none."""
    for family in (data.get("model_type"), text.get("model_type")):
        if isinstance(family, str):
            # Variants such as `qwen3_5_moe_text` have the layers of their family.
            found = _UNSAID.get(family) or _UNSAID.get(_VARIANT.sub("", family))
            if found is not None:
                return found
    return unsaid(text)


def family_names() -> list[str]:
    """Return the supported families, sorted, without their versions and variants."""
    # Text models inside of others have the names of these, with an end, as have versions.
    own = (name.partition("Transformer")[0].lower() for name in _FAMILIES)
    first = {re.findall("m?t5|sd3|dinov2|[a-z]+", name)[0] for name in own}
    return sorted(one for one in first if not any(one[:end] in first for end in range(3, len(one))))


def _unsupported(path: Path, data: Mapping[str, Any], reason: str) -> DocumentError:
    return DocumentError(
        path,
        f"the value is {shorten(data.get(_key_of(data)))}: not supported ({reason})",
        key=_key_of(data),
        remedy="Use a model of a supported family (autopar models --all)",
    )


def _unknown(path: Path, data: Mapping[str, Any]) -> DocumentError:
    """Return the error for an unknown family."""
    _, text, _ = _text_of(data)
    reason = _reason(data, text)
    if reason is not None:
        return _unsupported(path, data, reason)
    key = _key_of(data)
    family = data.get(key)
    near = nearest(str(family)[:50], _FAMILIES)
    found = f"the value is {shorten(family)}" if key in data else "this key is missing"
    command = f"autopar-search --model {shlex.quote(str(path))} --write-skeleton model.json"
    try:
        usual_spec(path, _complete(data, text, 1), "model")
    except InputError:
        advice = "Describe the model in a model.json (docs/concepts/estimates.md)"
    else:
        advice = f"Write a model.json of its layers with {command}, and check it"
    return DocumentError(
        path,
        f"{found}, expected the name of a supported architecture"
        + (f" (the nearest is {near})" if near else ""),
        key=key,
        remedy=f"{advice}. Supported families: autopar models --all",
    )
