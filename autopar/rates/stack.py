"""Software stacks: kernel traffic, host overheads and overlap of an engine, read from documents.

Two engines run one plan in different times. Their kernels move different numbers of bytes, their
host overheads differ, and they overlap different transfers. `hardware_configs/stacks/NAME.json`
contains these figures, each with its source. `autopar.rates.layer` applies them to layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from autopar.documents import catalog
from autopar.documents.checks import published
from autopar.documents.json import (
    JsonDocument,
    headed,
    load_object,
    read_record,
)
from autopar.rates.constants import FormulaConstants, constants
from autopar.records import Record, some_text
from autopar.run.runtime import OverlapFactors
from autopar.sources import STACK_ROLE, Source

FORMAT = "autopar-stack"
"""Value of `format` that identifies a stack."""

DEFAULT_STACK = "torchtitan-eager"
"""Stack of estimates if none is given: PyTorch's own kernels, not fused."""

HIDDEN_REDUCTION = 0.05
"""Exposed fraction of an overlapped gradient reduction even with enough time to hide it."""
STRAGGLERS = 0.0013
"""Straggler factor: fraction of a step added per doubling of nodes; from published runs."""

_MOST_BYTES = 200.0
_BOTH = {"forward": (0.0, _MOST_BYTES), "backward": (0.0, _MOST_BYTES)}
_BYTES = constants({**_BOTH, "gated": (0.1, 2.0)}, {"gated": 1.0})
"""Bytes per element of all kernels of an operation; `gated` is the factor for gated MLPs."""
_GRADIENT = constants(
    {"accumulation_bytes": (0.0, 40.0), "reduce_bytes": (1.0, 8.0)}, {"accumulation_bytes": 0.0}
)
_CAST = constants(
    {"bytes": (0.0, 40.0), "row_bytes": (0.0, 40.0), "row_scales_rate": (0.1, 1.0)},
    {"row_bytes": 10.0, "row_scales_rate": 1.0},
)
_COPIES = constants({"gather": (0.0, 10.0), "gradient_bytes": (0.0, 40.0)}, {})
_OPTIMIZER = constants({"bytes": (4.0, 200.0)}, {})
_HOST = constants(
    {
        "forward_s": (0.0, 0.1),
        "backward_s": (0.0, 0.1),
        "collective_s": (0.0, 1e-2),
        "experts_s": (0.0, 0.1),
        "expert_s": (0.0, 0.01),
        "merged": (1.0, 10.0),
        "partial_graphs": (0.0, 1.0),
    },
    {"experts_s": 0.0, "expert_s": 0.0, "merged": 1.0, "partial_graphs": 0.7},
)
_OVERLAP = constants(
    {
        "tensor": (0.0, 1.0),
        "fully_sharded": (0.0, 1.5),
        "sharded_network": (0.02, 1.0),
        "gradients": (0.0, 1.0),
        "regather": (1.0, 2.0),
    },
    {"sharded_network": 1.0, "gradients": 0.45, "regather": 1.3},
)

BytesFigure = Annotated[FormulaConstants, _BYTES]
# The union is inside, as in `autopar.rates.constants`.
_MaybeBytes = Annotated[FormulaConstants | None, _BYTES]
_Text = Annotated[str, some_text()]


class _Bytes(Record):
    """Bytes per element by operation, forward and backward, over all of its kernels."""

    norm: BytesFigure
    """One norm over the hidden size."""
    residual: BytesFigure
    """One residual sum, with bias and dropout if present."""
    activation: BytesFigure
    """Per output of an MLP's first matrix."""
    layout: BytesFigure
    """Copies around attention, per element; queries, keys and values count twice."""
    rope: BytesFigure
    cross_entropy: BytesFigure
    """Per logit."""
    plain_rope: _MaybeBytes = None
    """Rotary positions without a fused kernel; None: as `rope`. Further optional operations whose
    kernels an engine does not have or that cost nothing there follow."""
    plain_residual: _MaybeBytes = None
    """Residual sum without a fused kernel; None: as `residual`."""
    latent_rope: _MaybeBytes = None
    """Fused rotary positions and layout of latent attention, per element of a head that they read
    or write; None: as `layout` and `rope`."""
    expert_bias: _MaybeBytes = None
    """Biases of experts, per output of their second matrix."""
    fused_expert_bias: _MaybeBytes = None
    """Biases of experts whose MLP is one kernel, per output of both matrices."""
    clamp: _MaybeBytes = None
    """Clamp of an activation's inputs, per output of an expert's first matrix."""


_USUAL = {"plain_rope": "rope", "plain_residual": "residual"}
"""Operation -> operation whose figure is used if the stack has none."""
BYTE_CLASSES = _Bytes.__struct_fields__


@published("stack")
class StackDocument(Record):
    """Kernel traffic, host overheads and overlap of an engine, every figure with its source."""

    format: Literal["autopar-stack"]
    version: Literal[1]
    name: _Text | None = None
    """Name of the stack; the file name without suffix by default."""
    description: str = ""
    attention: Annotated[list[_Text], Meta(min_length=1)]
    """Kernels by preference; the first that the card supports is used, "unfused" always."""
    activations: Literal["eager", "fused"]
    """Saved activations: those of PyTorch's own operations or those of fused kernels."""
    bytes_per_element: _Bytes
    gradient: Annotated[FormulaConstants, _GRADIENT]
    """Bytes moved per weight to accumulate a micro-batch's gradient, and bytes per reduced element.
    """
    cast: Annotated[FormulaConstants, _CAST]
    """Bytes moved per quantised element, with one scale per row `row_bytes`, and relative rate of
    GEMMs with one scale per row."""
    copies: Annotated[FormulaConstants | None, _COPIES] = None
    """Copies around ZeRO-3 communication: reads and writes of a gathered element, and bytes per
    element of a gradient; None for none."""
    optimizer: Annotated[FormulaConstants, _OPTIMIZER]
    """Bytes moved per parameter that a rank updates."""
    host: Annotated[FormulaConstants, _HOST]
    """Host overheads in seconds, and factors on them.

    Overheads of a layer, of a collective, of a layer's routing, and of each local expert in 8 bits
    or fewer; half of the last applies in 16 bits or more.
    `partial_graphs` : fraction left with partial CUDA graphs. `merged` : factor for experts whose
    forward and backward run in one schedule.
    """
    overlap: Annotated[FormulaConstants, _OVERLAP]
    """Overlap of compute and communication.

    `tensor` : overlapped fraction of tensor-parallel collectives. `gradients` : hidden part of the
    step's gradient reduction over the time of one micro-batch. `fully_sharded` : exposed fraction
    of the shorter of compute and ZeRO-3 traffic. `sharded_network` : fraction of the network rate
    that this traffic reaches. `regather` : time of both all-gathers of the backward over that of
    one; the second one serves the weight gradient.
    """

    @classmethod
    def prepared(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `data` after a check of its header; raises an error for another document type."""
        return headed(data, FORMAT, "a stack")


class Stack(Record):
    """Software stack of an engine, in base units."""

    name: str
    description: str
    attention: tuple[str, ...]
    figures: StackDocument
    path: Path
    source: Source

    @property
    def overlap_coefficient(self) -> float:
        """Mutual slow-down factor of compute and concurrent ZeRO-3 traffic, 1 to 2.

        Both together take max + x min, where x is `fully_sharded`. That equals k min plus the
        remainder of the longer, with k = 1 + x. At k = 2 nothing is hidden.
        """
        return min(2.0, 1.0 + self.figures.overlap["fully_sharded"])

    @property
    def hiding(self) -> OverlapFactors:
        """Overlap factors and host overheads for predictions from estimated profiles."""
        shares, host = self.figures.overlap, self.figures.host
        states, reduced = self.figures.optimizer["bytes"], self.figures.gradient["reduce_bytes"]
        # Gradients are read twice: for their norm and to be scaled.
        return OverlapFactors(
            tensor=shares["tensor"],
            regather=shares["regather"],
            sharded_network=shares["sharded_network"],
            gradients=shares["gradients"],
            reduction=HIDDEN_REDUCTION,
            stragglers=STRAGGLERS,
            update_states=states / (states + 2.0 * reduced),
            update_gradients=2.0 / (states + 2.0 * reduced),
            host_forward_s=host["forward_s"],
            host_backward_s=host["backward_s"],
            host_collective_s=host["collective_s"],
            host_experts_s=host["experts_s"],
        )

    def has(self, operation: str) -> bool:
        """Return True if the stack has a figure of an optional operation of `BYTE_CLASSES`."""
        return getattr(self.figures.bytes_per_element, operation) is not None

    def element_bytes(self, operation: str, *, backward: bool, gated: bool = False) -> float:
        """Return the bytes moved per element of one operation of `BYTE_CLASSES`.

        An operation without a figure costs what `_USUAL` names, else nothing.
        """
        figure: FormulaConstants | None = getattr(self.figures.bytes_per_element, operation)
        if figure is None:
            usual = _USUAL.get(operation)
            return 0.0 if usual is None else self.element_bytes(usual, backward=backward)
        # Gating fuses a product into the pass over both halves of the first matrix' output.
        factor = figure["gated"] if gated and not backward else 1.0
        return factor * figure["backward" if backward else "forward"]


def load_stack(name: str) -> Stack:
    """Return a stack by name or path; raises InputError if it is unknown or invalid."""
    return read_stack(load_object(catalog.find_document("stacks", "stack", name)))


def read_stack(document: JsonDocument) -> Stack:
    """Return the stack of a document; raises DocumentError if a key is missing or invalid."""
    path = document.path
    stack = read_record(StackDocument, path, document.data)
    return Stack(
        name=path.stem if stack.name is None else stack.name,
        description=stack.description,
        attention=tuple(stack.attention),
        figures=stack,
        path=path,
        source=Source(
            role=STACK_ROLE,
            path=f"{path.parent.name}/{path.name}",
            sha256=document.sha256,
            estimated=True,
        ),
    )
