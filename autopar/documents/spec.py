"""Reader and writer of model specs, which describe architectures.

A spec comes from a shipped name, from a Hugging Face `config.json` or from autopar's `model.json`
(`{"format": "autopar-model", "version": 1, "name": ..., "layers": [{...}], ...}`, keys as in
`autopar.run.model.ModelSpec` and `LayerSpec`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from msgspec.structs import fields

from autopar.documents import catalog
from autopar.documents.checks import CONFIG, MODEL, check_kind, published
from autopar.documents.json import load_object, read_record, write_json
from autopar.errors import DocumentError, OptionError
from autopar.families.consistency import checked_layer, checked_model
from autopar.records import Positive, Record, replace, shorten, typed
from autopar.run.model import LayerSpec, ModelSpec
from autopar.units import format_count

# --------------------------------------------------------------------------------------------------
# Parsing `model.json`, autopar's own file of a model.


FORMAT: Final = "autopar-model"
"""Value of `format` in `model.json`."""


@published("model")
class ModelDocument(ModelSpec):
    """Architecture of a model (`model.json`): layer types in execution order, vocabulary, MTP."""

    format: Literal["autopar-model"] = FORMAT
    version: Literal[1] = 1
    source: Any = None


def parse_own(path: Path, data: Mapping[str, Any]) -> ModelSpec:
    """Return the spec in the content of a `model.json`; raises DocumentError for invalid values."""
    document = read_record(ModelDocument, path, data)
    layers = [
        checked_layer(path, layer, {k: f"layers[{index}].{k}" for k in layer.__struct_fields__})
        for index, layer in enumerate(document.layers)
    ]
    if document.interleaved and len({layer.num_layers for layer in layers}) > 1:
        numbers = ", ".join(str(layer.num_layers) for layer in layers)
        raise DocumentError(
            path,
            f"the value is true, but the layer types have {numbers} layers",
            key="interleaved",
            remedy="Use the same number of layers for each type",
        )
    _check_order(path, document)
    spec = ModelSpec(**{name: getattr(document, name) for name in ModelSpec.__struct_fields__})
    return checked_model(path, spec)


def _check_order(path: Path, document: ModelSpec) -> None:
    """Raise DocumentError if the order of layers contradicts their types and numbers."""
    types = len(document.layers)
    for key in ("order", "mtp_order"):
        unknown = next((one for one in getattr(document, key) if one >= types), None)
        if unknown is not None:
            raise DocumentError(
                path,
                f"the value {unknown} is no layer type, expected 0 to {types - 1}",
                key=key,
            )
    if not document.order:
        return
    if document.interleaved:
        raise DocumentError(
            path, "contradicts interleaved", key="order", remedy="Remove one of them"
        )
    for kind, layer in enumerate(document.layers):
        number = document.order.count(kind)
        if number != layer.num_layers:
            raise DocumentError(
                path,
                f"the value is {layer.num_layers}, but order has {number} layers of this type",
                key=f"layers[{kind}].num_layers",
                remedy="Change one of them",
            )


# --------------------------------------------------------------------------------------------------
# A spec by name or path, with other sizes, and written again.


@typed
def load_spec(
    name_or_path: str,
    *,
    num_layers: Sequence[Positive] | None = None,
    seq_length: Sequence[Positive] | None = None,
    hidden_size: Sequence[Positive] | None = None,
    num_heads: Positive | None = None,
    num_kv_heads: Positive | None = None,
    head_dim: Positive | None = None,
    ffn_hidden_size: Positive | None = None,
) -> ModelSpec:
    """Return the spec of a shipped name, a Hugging Face `config.json` or a `model.json`.

    Overrides are sequences of one value for all layer types or one per type. Sizes that are not
    given are scaled, see `resized`.

    num_heads, num_kv_heads, head_dim, ffn_hidden_size : widths of all layer types.

    Raises InputError for an unknown name, DocumentError for an invalid file, OptionError for an
    invalid override.
    """
    path = catalog.find_model(name_or_path)
    data = load_object(path).data
    if "format" in data and data["format"] != FORMAT:
        # First of all, since all other errors of another kind of document would be misleading.
        raise DocumentError(
            path,
            f"the value is {shorten(data['format'])}, expected {FORMAT!r}",
            key="format",
            remedy="Use a model.json, a config.json of Hugging Face, or a shipped name",
        )
    if "format" in data or ("layers" in data and "model_type" not in data):
        # Without `format`, a file with layers and without a family is a `model.json`.
        spec = parse_own(path, data)
    else:
        from autopar.families.config import parse_hugging_face

        check_kind(path, data, CONFIG, MODEL, remedy="See `autopar models` for shipped names")
        # A config.json has one length for all types, except T5, which has another key.
        length = seq_length[0] if seq_length and len(seq_length) == 1 else None
        spec = parse_hugging_face(path, data, seq_length=length)
    published = catalog.published_name(name_or_path)
    if published is not None and name_or_path in catalog.WITHOUT_SIZES:
        sizes = {
            "hidden_size": hidden_size,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "ffn_hidden_size": ffn_hidden_size,
        }
        needed = ("hidden_size", "num_layers", "num_heads", "ffn_hidden_size")
        missing = [f"--{name.replace('_', '-')}" for name in needed if not sizes.get(name)]
        if missing:
            raise OptionError(
                f"--model {name_or_path}: no known model, and its sizes are not given",
                remedy=f"Add {', '.join(missing)}, or use {published[0]}",
            )
    if published is not None:
        spec = replace(spec, name=name_or_path)
        seq_length = (published[1],) if seq_length is None else seq_length
    layers = list(spec.layers)
    for option, values in (("num_layers", num_layers), ("seq_length", seq_length)):
        for index, value in enumerate(_per_type(option, values, len(layers), spec.name)):
            changed: dict[str, Any] = {option: value}
            layers[index] = replace(layers[index], **changed)
    hidden: list[Any] = _per_type("hidden_size", hidden_size, len(layers), spec.name)
    hidden = hidden or [None] * len(layers)
    sized = tuple(
        resized(
            layer,
            hidden_size=value,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            ffn_hidden_size=ffn_hidden_size,
        )
        for layer, value in zip(layers, hidden, strict=True)
    )
    if sized != tuple(layers):
        # Another model: its plans and files must not have the names of this one's.
        first = sized[0]
        spec = replace(spec, name=f"{spec.name}_hidden{first.hidden_size}_head{first.num_heads}")
    return replace(spec, layers=sized)


def resized(
    layer: LayerSpec,
    *,
    hidden_size: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    ffn_hidden_size: int | None = None,
) -> LayerSpec:
    """Return the layer with other sizes; sizes that are not given are scaled.

    MLP width grows with the hidden size. The number of query heads per key-value head is kept.
    Heads divide the hidden size if they did so before; otherwise their width grows with it.

    Raises OptionError: a scaled size is no whole number; contains the option to give.
    """
    hidden, heads = hidden_size or layer.hidden_size, num_heads or layer.num_heads
    old_heads = layer.num_heads
    follows: dict[str, tuple[int, int, str]] = {}
    if ffn_hidden_size is None and layer.ffn_hidden_size is not None:
        ratio = f"the MLP of width {layer.ffn_hidden_size} over hidden size {layer.hidden_size}"
        follows["ffn_hidden_size"] = (layer.ffn_hidden_size * hidden, layer.hidden_size, ratio)
    if num_kv_heads is None and layer.num_kv_heads and heads and old_heads:
        ratio = f"{layer.num_kv_heads} key-value heads for {old_heads} heads"
        follows["num_kv_heads"] = (layer.num_kv_heads * heads, old_heads, ratio)
    width = layer.head_dim
    if head_dim is None and heads and old_heads:
        if width is None or width * old_heads == layer.hidden_size:
            follows["head_dim"] = (hidden, heads, "heads that divide the hidden size")
        elif hidden != layer.hidden_size:
            ratio = f"heads of width {width} at hidden size {layer.hidden_size}"
            follows["head_dim"] = (width * hidden, layer.hidden_size, ratio)
    given = {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "ffn_hidden_size": ffn_hidden_size,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    if not chosen:
        return layer
    if layer.latent is not None:
        option = "--" + next(iter(chosen)).replace("_", "-")
        raise OptionError(
            f"{option} does not define the widths of latent attention",
            remedy="Set them in a model.json",
        )
    changes: dict[str, Any] = dict(chosen)
    for name, (product, divisor, ratio) in follows.items():
        changes[name], rest = divmod(product, divisor)
        if rest or not changes[name]:
            said = ", ".join(f"--{n.replace('_', '-')} {v}" for n, v in chosen.items())
            raise OptionError(
                f"{said}: no whole number keeps {ratio}",
                remedy=f"Add --{name.replace('_', '-')}",
            )
    new_ffn, ffn = changes.get("ffn_hidden_size"), layer.ffn_hidden_size
    if layer.shared_expert_width and new_ffn is not None and ffn:
        # The shared expert grows like the routed experts.
        shared, rest = divmod(layer.shared_expert_width * new_ffn, ffn)
        if rest:
            raise OptionError(
                f"no whole number keeps the ratio of the shared MLP "
                f"width {layer.shared_expert_width} to the expert width {ffn}",
                remedy="Describe the model in a model.json",
            )
        changes["shared_expert_width"] = shared
    # A width that follows from hidden size and heads is left implicit.
    if layer.head_dim is None and "head_dim" not in chosen:
        changes.pop("head_dim", None)
    new = replace(layer, **changes)
    if new.num_heads and new.num_kv_heads and new.num_heads % new.num_kv_heads:
        raise OptionError(
            f"--num-kv-heads {new.num_kv_heads}: does not divide the "
            f"{new.num_heads} attention heads",
            remedy="Use a divisor",
        )
    return new


_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx")
"""Keys of a config.json with the sequence length: the longest that is supported."""


def length_key(name_or_path: str) -> str | None:
    """Return the key of a `config.json` that contains the sequence length of a spec.

    None for a shipped name and for a `model.json`, which contain the training length. Raises
    DocumentError for an invalid file.
    """
    path = Path(name_or_path)
    if not path.is_file():
        return None
    data = load_object(path).data
    if "format" in data or "model_type" not in data:
        return None
    inner = data.get("text_config")
    for part in (data, inner if isinstance(inner, dict) else {}):
        for key in _LENGTHS:
            if key in part:
                return key
    return f"{_LENGTHS[0]} that the family has by default"


def bare_spec(
    *,
    num_layers: Sequence[int],
    seq_length: Sequence[int],
    hidden_size: Sequence[int],
    name: str = "custom",
) -> ModelSpec:
    """Return a spec of sizes only, for measured files of a model without a description.

    Each list has one value per layer type, or one value for all.
    """
    types = max(len(num_layers), len(seq_length), len(hidden_size))
    columns: dict[str, Sequence[Any]] = {
        "num_layers": _per_type("num_layers", num_layers, types, name),
        "seq_length": _per_type("seq_length", seq_length, types, name),
        "hidden_size": _per_type("hidden_size", hidden_size, types, name),
    }
    return ModelSpec(
        name=name,
        layers=tuple(
            LayerSpec(**{key: column[k] for key, column in columns.items()}) for k in range(types)
        ),
    )


def write_spec(spec: ModelSpec, path: Path, *, source: str | None = None) -> None:
    """Write a spec as `model.json`; fields with their default value are omitted."""
    write_json(path, spec_document(spec, source=source))


def spec_document(spec: ModelSpec, *, source: str | None = None) -> dict[str, Any]:
    """Return a spec as the object of a `model.json`, without fields that have their default."""
    given = _given(spec)
    document: dict[str, Any] = {"format": FORMAT, "version": 1, "name": given.pop("name")}
    if source is not None:
        document["source"] = source
    layers = given.pop("layers")
    return {**document, "layers": layers, **given}


def _given(record: Record) -> dict[str, Any]:
    """Return the fields of a record whose values differ from their defaults, also nested ones."""
    own = record.__struct_config__
    tag = {} if own.tag_field is None else {own.tag_field: own.tag}
    return tag | {
        field.name: _plain(value)
        for field in fields(record)
        if (value := getattr(record, field.name)) != field.default
    }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [*map(_plain, value)]
    return _given(value) if isinstance(value, Record) else value


# --- overrides -----------------------------------------------------------------------------


def _per_type(option: str, values: Sequence[int] | None, types: int, name: str) -> list[int]:
    if values is None:
        return []
    if len(values) not in (1, types):
        raise OptionError(
            f"{option} has {format_count(len(values), 'value')}, but model "
            f"{name!r} has {types} layer type(s)",
            remedy="Give one value or one per type",
        )
    return list(values) * (types if len(values) == 1 else 1)
