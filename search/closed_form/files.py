"""Loading of applications, models and systems for Calculon and tensor2d, by name or file.

The document types are in `calculon.documents` and `tensor2d.documents`. Systems are read from files
or derived from device cards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import asdict

from autopar.documents import catalog
from autopar.documents.checks import (
    APPLICATION,
    CALCULON_SYSTEM,
    CONFIG,
    EXECUTION,
    SIZES,
    TENSOR2D_SYSTEM,
    check_kind,
)
from autopar.documents.json import (
    load_object,
    read_record,
)
from autopar.documents.spec import load_spec
from autopar.errors import InputError
from autopar.rates.card import Card, Link, read_card
from autopar.records import Record
from autopar.run.model import (
    LayerSpec,
    ModelSpec,
    embedding_parameter_counts,
    has_patches,
    head_dim,
    padded_vocab_size,
    parameter_count,
    refuse_hybrid,
)
from autopar.units import GIB
from search.closed_form.calculon.documents import Application, Execution, System as CalculonSystem
from search.closed_form.tensor2d.documents import Model, System as Tensor2dSystem

_System = TypeVar("_System", CalculonSystem, Tensor2dSystem)
_Sizes = TypeVar("_Sizes", Application, Model)


# --------------------------------------------------------------------------------------------------
# Systems and executions by file or shipped name.


def calculon_system(name: str) -> CalculonSystem:
    """Return the Calculon system in a file, or the system derived from a card.

    name : path of a system or card, shipped name of a card, or its alias.

    Raises InputError for an unknown name, and DocumentError for an invalid file or if the card
    lacks a number that Calculon needs.
    """
    return _system(name, CalculonSystem, calculon_from_card)


def tensor2d_system(name: str) -> Tensor2dSystem:
    """Return the tensor2d system in a file, or the system derived from a card.

    Names and errors are those of `calculon_system`.
    """
    return _system(name, Tensor2dSystem, tensor2d_from_card)


def _system(name: str, kind: type[_System], from_card: Callable[[Card], _System]) -> _System:
    document = load_object(catalog.find_document("cards", "system", name))
    # A card has the key `format`; any other file is a system.
    if "format" in document.data:
        return from_card(read_card(document))
    own = TENSOR2D_SYSTEM if kind is Tensor2dSystem else CALCULON_SYSTEM
    check_kind(document.path, document.data, own, remedy="Use a shipped card, see `autopar cards`")
    return read_record(kind, document.path, document.data)


def input_files(
    *, model: str, system: str | None = None, execution: str | None = None
) -> list[Path]:
    """Return the paths of the input files of a command, also of those given by shipped name.

    model, system, execution : paths or shipped names; `model` may also be an application.

    Raises InputError for a name that is neither a file nor shipped.
    """
    found = [Path(model) if Path(model).is_file() else catalog.find_model(model)]
    if system is not None:
        found.append(catalog.find_document("cards", "system", system))
    if execution is not None:
        found.append(catalog.find_document("executions", "execution", execution))
    return found


def execution_keys(name: str) -> tuple[Path, dict[str, object]]:
    """Return the path and the unchecked keys of an execution, given by file or shipped name."""
    path = catalog.find_document("executions", "execution", name)
    return path, load_object(path).data


# --------------------------------------------------------------------------------------------------
# Conversion of model specs: the sizes of the blocks, embedding and head.
#
# A shipped name, a `config.json` or a `model.json` can thus replace an application file.


class KnownModel(Record):
    """An application with its name and, if it was converted from one, the model spec."""

    name: str
    application: Application
    spec: ModelSpec | None = None
    """Model spec; None if a file contains the application itself."""

    @property
    def parameters(self) -> int:
        """Number of parameters; Calculon's published formula if there is no spec."""
        if self.spec is None:
            return self.application.num_parameters
        vocab = padded_vocab_size(self.spec) if self.spec.vocab_size is not None else 0
        blocks = sum(layer.num_layers * parameter_count(layer) for layer in self.spec.layers)
        return blocks + sum(embedding_parameter_counts(self.spec, vocab))


def application_of(spec: ModelSpec) -> Application:
    """Return the Calculon application of a model with equal layers; its vocabulary is padded.

    Raises InputError for encoder-decoder models, mixtures of experts, latent attention, sliding
    windows, layers that differ, and specs without the number of heads or the MLP width.
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
    """Return the `structure_type` of a model's blocks: 'llama' for a gated MLP, else 'gpt'."""
    return "llama" if _only_layer(spec).gated_mlp else "gpt"


def model_of(spec: ModelSpec) -> Model:
    """Return the tensor2d model of a spec, with gradients of 4 bytes per parameter.

    Raises InputError for the models that `application_of` rejects.
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


def load_application(name: str) -> KnownModel:
    """Return the application in a file, or the application of a model spec.

    name : path of an application, a model.json or a config.json, or a shipped model name.

    Raises InputError for an unknown name or an unsupported model, DocumentError for an invalid
    file.
    """
    # Only applications have the key `hidden`.
    written = _written_model(name, Application, "hidden")
    if written is not None:
        return KnownModel(name=Path(name).stem, application=written)
    spec = refuse_hybrid(load_spec(name), "the closed form")
    return KnownModel(name=spec.name, application=application_of(spec), spec=spec)


def load_model(name: str) -> tuple[str, Model]:
    """Return (name, tensor2d model) for a model file or a shipped model name.

    Raises the errors of `load_application`.
    """
    written = _written_model(name, Model, "e")
    if written is not None:
        return Path(name).stem, written
    spec = refuse_hybrid(load_spec(str(catalog.find_model(name))), "the closed form")
    return spec.name, model_of(spec)


def _written_model(name: str, kind: type[_Sizes], own_key: str) -> _Sizes | None:
    """Return the record in a Calculon or tensor2d file; None for a spec or a shipped name.

    own_key : key that exists only in files of this kind.
    """
    if not Path(name).is_file():
        return None
    data = load_object(Path(name)).data
    # A file of unknown kind is reported as an invalid file of this kind.
    if own_key not in data and any(key in data for key in ("format", "layers", "model_type")):
        return None
    own = SIZES if kind is Model else APPLICATION
    check_kind(name, data, own, CONFIG, remedy="Use a shipped model, see `autopar models`")
    return read_record(kind, Path(name), data)


def load_execution(
    name: str, known: KnownModel, *, compat: bool
) -> tuple[Execution, list[str], Path]:
    """Return (execution, assumed values as sentences, path) for a file or a shipped name.

    known : model, which sets `structure_type` if the file does not.
    compat : True to keep the published default of `structure_type`.

    Raises InputError for an unknown name, DocumentError for an invalid file.
    """
    path, keys = execution_keys(name)
    check_kind(path, keys, EXECUTION, remedy="Use a shipped execution, such as 1x8-tp8")
    added: dict[str, object] = {}
    # The published model has a single structure.
    if known.spec is not None and "structure_type" not in keys and not compat:
        added["structure_type"] = structure_of(known.spec)
    execution = read_record(Execution, path, {**keys, **added})
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


def _only_layer(spec: ModelSpec) -> LayerSpec:
    first = spec.layers[0]
    if has_patches(spec):
        what = "has no vocabulary"
    elif any(layer.cross_attention for layer in spec.layers):
        what = "is an encoder-decoder model"
    elif any(layer.num_experts for layer in spec.layers):
        what = "is a mixture of experts"
    elif any(layer.latent is not None for layer in spec.layers):
        what = "has latent attention"
    elif any(layer.window and layer.window < layer.seq_length for layer in spec.layers):
        what = "has sliding-window attention"
    # Equal in everything but the number of layers.
    elif any(
        asdict(layer) != {**asdict(first), "num_layers": layer.num_layers} for layer in spec.layers
    ):
        what = "has layers of several kinds"
    else:
        return first
    raise InputError(
        f"model {spec.name!r} {what}, and a closed form needs equal dense blocks",
        remedy="Use another model, or autopar-search",
    )


def _sizes(spec: ModelSpec, layer: LayerSpec) -> tuple[int, int]:
    if layer.num_heads is None or layer.ffn_hidden_size is None:
        raise InputError(
            f"model {spec.name!r}: the heads or the width of the MLP are unknown",
            remedy="Add num_heads and ffn_hidden_size to model.json",
        )
    return layer.num_heads, layer.ffn_hidden_size


# --------------------------------------------------------------------------------------------------
# Systems of Calculon and tensor2d, derived from the card of a device.
#
# The card contains all numbers. The functions here only convert them to the inputs of each model.


_MATRIX_STEPS_GFLOP = (100.0, 10.0, 1.0, 0.1)
_MEMORY_STEPS_MB = (100.0, 10.0, 1.0)
"""Lower ends of the steps of an efficiency curve; one more step, from 0, covers smaller sizes."""
_RING = {
    "p2p": [1.0, None],
    "reduce_scatter": [1.0, -1.0],
    "all_gather": [1.0, -1.0],
    "all_reduce": [2.0, -1.0],
}
"""(scalar, offset) of rings over g ranks: traffic is bytes * scalar * (1 + offset / g)."""


def calculon_from_card(card: Card) -> CalculonSystem:
    """Return the Calculon system of a card, with an intra-node and an inter-node network.

    Raises DocumentError if the card lacks a number that Calculon needs.
    """
    reader = "a system of calculon"

    def need(key: str) -> float:
        return card.need(key, reader)

    # Outside the matrix units, fp32 runs at the card's fp32 rate, which excludes TensorFloat-32.
    peaks = {
        "float16": (card.flop_per_s["fp16"], need("device.vector_fp16_flop_per_s")),
        "bfloat16": (card.flop_per_s["bf16"], need("device.vector_bf16_flop_per_s")),
        "float32": (card.flop_per_s["fp32"], card.flop_per_s["fp32"]),
    }
    if "device.fp8_flop_per_s" in card.more:  # optional: not every device supports fp8
        # Outside the matrix units, 8-bit numbers are computed at the 16-bit rate.
        peaks["float8"] = (need("device.fp8_flop_per_s"), peaks["float16"][1])
    # The launch of a vector operation is counted with its memory traffic, which is longer.
    vector_curve = [[0.0, need("efficiency.vector")]]
    # A ring inside a node has one hop fewer than GPUs; between nodes a single hop is counted.
    inside_s = card.collective_base_s + (card.max_gpus_per_node - 1) * card.intra_node.hop_s
    between_s = card.collective_base_s + card.inter_node.hop_s
    # The document uses TFLOP/s, GFLOP, GB/s, MB and GiB, the card base units.
    return read_record(
        CalculonSystem,
        card.path,
        {
            "matrix": {
                datatype: {
                    "tflops": matrix / 1e12,
                    # Peak in the unit of the sizes, per second.
                    "gflops_efficiency": _curve(
                        _MATRIX_STEPS_GFLOP, matrix / 1e9, card.gemm_efficiency, card
                    ),
                }
                for datatype, (matrix, _) in peaks.items()
            },
            "vector": {
                datatype: {"tflops": vector / 1e12, "gflops_efficiency": vector_curve}
                for datatype, (_, vector) in peaks.items()
            },
            "mem1": {
                "GiB": round(card.memory_bytes / GIB, 2),
                "GBps": card.memory_bytes_per_s / 1e9,
                "MB_efficiency": _curve(
                    _MEMORY_STEPS_MB, card.memory_bytes_per_s / 1e6, card.memory_efficiency, card
                ),
            },
            "mem2": {
                "GiB": round(need("host.memory_bytes") / GIB, 1),
                "GBps": need("host.bytes_per_s") / 1e9,
                "MB_efficiency": [[0.0, need("host.efficiency")]],
            },
            # A kernel computes and transfers at the same time, so the slower of the two counts.
            "processing_mode": "roofline",
            "networks": [
                _network(
                    card.intra_node,
                    card.max_gpus_per_node,
                    inside_s,
                    need("intra_node.collective_sm_share"),
                ),
                _network(
                    card.inter_node,
                    int(need("inter_node.max_gpus")),
                    between_s,
                    need("inter_node.collective_sm_share"),
                ),
            ],
        },
    )


def tensor2d_from_card(card: Card) -> Tensor2dSystem:
    """Return the tensor2d system of a card.

    tensor2d uses constant network efficiencies, and a latency per ring hop.
    Raises DocumentError if the card lacks the fp16 rate of its vector units.
    """
    vector_fp16 = card.need("device.vector_fp16_flop_per_s", "a system of tensor2d")
    # The document uses 1e12 FLOP/s and 1e9 bytes, the card base units.
    return Tensor2dSystem(
        matrix_flops_fp16=card.flop_per_s["fp16"] / 1e12,
        vector_flops_fp16=vector_fp16 / 1e12,
        vector_flops_fp32=card.flop_per_s["fp32"] / 1e12,
        hbm_bandwidth=card.memory_bytes_per_s / 1e9,
        hbm_capacity=round(card.memory_bytes / 1e9, 2),
        nvlink_bandwidth=card.intra_node.bytes_per_s / 1e9,
        nvlink_eff=card.intra_node.collective_efficiency,
        nvlink_latency=card.intra_node.hop_s,
        nvlink_size=card.max_gpus_per_node,
        ib_bandwidth=card.inter_node.bytes_per_s / 1e9,
        ib_eff=card.inter_node.collective_efficiency,
        ib_latency=card.inter_node.hop_s,
        nic_factor=1,  # the inter-node bandwidth is already per GPU
    )


def _network(link: Link, size: int, latency_s: float, sm_share: float) -> dict[str, Any]:
    return {
        "bandwidth": link.bytes_per_s / 1e9,
        "efficiency": link.collective_efficiency,
        "size": size,
        "latency": _digits(latency_s, 12),  # rounds off the binary noise of a sum
        "ops": _RING,
        "must_be_filled": False,
        "processor_usage": sm_share,
    }


def _curve(steps: tuple[float, ...], peak_per_s: float, share: float, card: Card) -> list[Any]:
    """Return an efficiency curve: [smallest size, efficiency] per step, in descending order.

    steps : smallest sizes, GFLOP or MB.
    peak_per_s : peak rate in the same unit per second.
    share : efficiency of large operations.

    The efficiency of a step is that of an operation with the geometric mean of its sizes, which
    takes a kernel launch plus its work at `share` of the peak. Small operations are therefore
    launch-bound.
    """
    curve = []
    for step in (*steps, 0.0):
        # Geometric mean of a decade; the step from 0 represents the decade below the last.
        middle = (step or steps[-1] / 10) * math.sqrt(10)
        work_s = middle / peak_per_s
        curve.append([step, _digits(work_s / (card.kernel_launch_s + work_s / share), 3)])
    return curve


def _digits(value: float, count: int) -> float:
    return float(f"{value:.{count}g}")
