"""What the closed forms are asked about by name or file: applications, models and systems.

The documents themselves are in `calculon.documents` and `tensor2d.documents`; systems are made
from device cards by `systems`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autopar.documents import catalog
from autopar.documents.checks import validate_document
from autopar.documents.json import load_object
from autopar.documents.spec import (
    embedding_parameter_counts,
    head_dim,
    load_spec,
    padded_vocab_size,
    parameter_count,
)
from autopar.errors import InputError
from autopar.estimate.card import FORMAT, read_card
from autopar.model import LayerSpec, ModelSpec
from search.closed_form.calculon.documents import Application, Execution, System as CalculonSystem
from search.closed_form.systems import calculon_from_card, tensor2d_from_card
from search.closed_form.tensor2d.documents import Model, System as Tensor2dSystem

__all__ = [
    "Known",
    "application_of",
    "calculon_system",
    "execution_keys",
    "load_application",
    "load_execution",
    "load_model",
    "model_of",
    "structure_of",
    "tensor2d_system",
]


# --------------------------------------------------------------------------------------------------
# Finds the documents of the analytic models by name: systems of cards, shipped executions.


def calculon_system(name: str) -> CalculonSystem:
    """Return the machine of a file, or of a card: its file, its shipped name or an alias.

    Raises InputError (DocumentError: file, key, value, remedy; also where a card lacks a number).
    """
    document = load_object(catalog.find_document("cards", "system", name))
    # a card says its format, a system is any other file
    if document.data.get("format") == FORMAT:
        return calculon_from_card(read_card(document))
    return validate_document(CalculonSystem, document.path, document.data)


def tensor2d_system(name: str) -> Tensor2dSystem:
    """Return the machine of a file, or of a card; names and errors as above."""
    document = load_object(catalog.find_document("cards", "system", name))
    if document.data.get("format") == FORMAT:
        return tensor2d_from_card(read_card(document))
    return validate_document(Tensor2dSystem, document.path, document.data)


def execution_keys(name: str) -> tuple[Path, dict[str, object]]:
    """Return the path and the keys of an execution, before they are checked."""
    path = catalog.find_document("executions", "execution", name)
    return path, load_object(path).data


# --------------------------------------------------------------------------------------------------
# What the analytic models know of a model spec: the sizes of its blocks, and what surrounds them.
#
# So a shipped name, a `config.json` or a `model.json` serves in the place of an application file.


@dataclass(frozen=True, kw_only=True)
class Known:
    """An application, and what else its source says."""

    name: str
    application: Application
    spec: ModelSpec | None = None
    """None where a file holds an application itself."""

    @property
    def parameters(self) -> int:
        """Return the parameters of the whole model; without a spec by the published count."""
        if self.spec is None:
            return self.application.num_parameters
        vocab = padded_vocab_size(self.spec) if self.spec.vocab_size is not None else 0
        blocks = sum(layer.num_layers * parameter_count(layer) for layer in self.spec.layers)
        return blocks + sum(embedding_parameter_counts(self.spec, vocab))


def application_of(spec: ModelSpec) -> Application:
    """Return the blocks of a model whose layers are all alike, with its padded vocabulary.

    Raises InputError for encoder-decoder models, mixtures of experts, layers that differ, and
    specs without heads or widths.
    """
    layer = _only_layer(spec)
    heads, width = _sizes(spec, layer)
    return Application(
        hidden=layer.hidden_size,
        feedforward=width,
        seq_size=layer.seq_length,
        attn_heads=heads,
        attn_size=head_dim(layer),
        num_blocks=spec.num_layers,
        attn_kv_heads=layer.num_kv_heads,
        vocab_size=0 if spec.vocab_size is None else padded_vocab_size(spec),
        tied_embeddings=spec.tied_embeddings,
        causal=layer.causal,
    )


def structure_of(spec: ModelSpec) -> str:
    """Return the word of an execution for the blocks of a model: 'llama' with a gate, or 'gpt'."""
    return "llama" if _only_layer(spec).gated_mlp else "gpt"


def model_of(spec: ModelSpec) -> Model:
    """Return the same for the two-dimensional model, with gradients of 4 bytes.

    Raises InputError as `application_of`.
    """
    layer = _only_layer(spec)
    heads, width = _sizes(spec, layer)
    return Model(
        l=layer.seq_length,
        e=layer.hidden_size,
        h=heads,
        depth=spec.num_layers,
        f=width,
        kv_heads=layer.num_kv_heads,
        causal=layer.causal,
        structure="llama" if layer.gated_mlp else "gpt",
        vocab=0 if spec.vocab_size is None else padded_vocab_size(spec),
        tied=spec.tied_embeddings,
        gradient_bytes=4,
    )


def load_application(name: str) -> Known:
    """Return the application of a file, or of a model spec by its file or shipped name.

    Raises InputError (DocumentError: file, key, value, remedy).
    """
    path = Path(name)
    if path.is_file():
        data = load_object(path).data
        # `hidden` is of applications alone; what is neither is refused as one
        if "hidden" in data or not _is_spec(data):
            return Known(name=path.stem, application=validate_document(Application, path, data))
    spec = load_spec(name)
    return Known(name=spec.name, application=application_of(spec), spec=spec)


def load_model(name: str) -> tuple[str, Model]:
    """Return the name of a model, and its sizes for the two-dimensional model.

    Raises InputError as `load_application`.
    """
    path = Path(name)
    if path.is_file():
        data = load_object(path).data
        if "e" in data or not _is_spec(data):
            return path.stem, validate_document(Model, path, data)
    spec = load_spec(str(catalog.find_model(name)))
    return spec.name, model_of(spec)


def load_execution(name: str, known: Known, *, compat: bool) -> tuple[Execution, list[str], Path]:
    """Return the execution of a file or a shipped name, what was added to it, and its path.

    Raises InputError (DocumentError: file, key, value, remedy).
    """
    path, keys = execution_keys(name)
    added: dict[str, object] = {}
    # the published model knows one structure only
    if known.spec is not None and "structure_type" not in keys and not compat:
        added["structure_type"] = structure_of(known.spec)
    execution = validate_document(Execution, path, {**keys, **added})
    assumed = [
        f"{key} = {_written(getattr(execution, key))}{why}"
        for key, why in (
            ("num_procs", ", the product of the degrees"),
            ("training", ""),
            ("structure_type", f", as {known.name} has" if added else ""),
        )
        if key not in keys
    ]
    return execution, assumed, path


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_spec(data: dict[str, object]) -> bool:
    return any(key in data for key in ("format", "layers", "model_type"))


def _only_layer(spec: ModelSpec) -> LayerSpec:
    first = spec.layers[0]
    if any(layer.cross_attention for layer in spec.layers):
        what = "is an encoder-decoder model"
    elif any(layer.num_experts for layer in spec.layers):
        what = "is a mixture of experts"
    # alike in all but how many there are
    elif any(
        vars(layer) != {**vars(first), "num_layers": layer.num_layers} for layer in spec.layers
    ):
        what = "has layers of several kinds"
    else:
        return first
    raise InputError(
        f"model {spec.name!r} {what}, and an analytic model has one kind of dense block; "
        "choose another model, or plan it with autopar-search"
    )


def _sizes(spec: ModelSpec, layer: LayerSpec) -> tuple[int, int]:
    if layer.num_heads is None or layer.ffn_hidden_size is None:
        raise InputError(
            f"model {spec.name!r}: the heads or the width of the MLP are unknown; "
            "give num_heads and ffn_hidden_size in model.json"
        )
    return layer.num_heads, layer.ffn_hidden_size
