"""Stacks: what a trainer's software does besides the mathematics, read from documents.

Two trainers run one plan in different times: their kernels move other bytes, their host code takes
other times per layer, they hide other transfers. `hardware_configs/stacks/NAME.json` holds that,
figure by figure with its source; counting what a layer does with it is `autopar.rates.layer`.
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
from autopar.rates.constants import Figure, constants
from autopar.records import Record, some_text
from autopar.run.runtime import Hiding
from autopar.sources import STACK_ROLE, Source

FORMAT = "autopar-stack"
"""Value of `format` that tells a stack from other documents."""

DEFAULT_STACK = "torchtitan-eager"
"""What estimates are of where nobody says: PyTorch's own kernels, one by one."""

HIDDEN_REDUCTION = 0.05
"""Of an overlapped reduction of gradients, what is visible even if there is time to hide it."""
STRAGGLERS = 0.0013
"""Share of a step per doubling of the nodes that the slowest adds; from published runs."""

_MOST_BYTES = 200.0
_BOTH = {"forward": (0.0, _MOST_BYTES), "backward": (0.0, _MOST_BYTES)}
_BYTES = constants({**_BOTH, "gated": (0.1, 2.0)}, {"gated": 1.0})
"""Per element, moved by all kernels of an operation; `gated`: factor where an MLP is gated."""
_GRADIENT = constants(
    {"accumulation_bytes": (0.0, 40.0), "reduce_bytes": (1.0, 8.0)}, {"accumulation_bytes": 0.0}
)
_CAST = constants({"bytes": (0.0, 40.0), "row_scales_rate": (0.1, 1.0)}, {"row_scales_rate": 1.0})
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

BytesFigure = Annotated[Figure, _BYTES]
_Text = Annotated[str, some_text()]


class _Bytes(Record):
    """Bytes per element by operation, forward and backward, all kernels of it together."""

    norm: BytesFigure
    """One norm over the hidden size."""
    residual: BytesFigure
    """One residual sum, with bias and dropout where there are."""
    activation: BytesFigure
    """Per output of an MLP's first matrix."""
    layout: BytesFigure
    """Copies around attention, per element of queries and twice those of keys and values."""
    rope: BytesFigure
    cross_entropy: BytesFigure
    """Per logit."""


BYTE_CLASSES = _Bytes.__struct_fields__


@published("stack")
class StackDocument(Record):
    """What a trainer's software does besides the mathematics, every figure with its source."""

    format: Literal["autopar-stack"]
    version: Literal[1]
    name: _Text | None = None
    """The name of the file without."""
    description: str = ""
    attention: Annotated[list[_Text], Meta(min_length=1)]
    """Kernels by preference: the first that the card has is used; "unfused" is always had."""
    activations: Literal["eager", "fused"]
    """What layers keep until their backward: what PyTorch's operations keep, or fused kernels."""
    bytes_per_element: _Bytes
    gradient: Annotated[Figure, _GRADIENT]
    """Bytes moved per weight to add a micro-batch's gradient, and of an element that is reduced."""
    cast: Annotated[Figure, _CAST]
    """Bytes moved per element that is quantised; rate of products with a scale per row."""
    optimizer: Annotated[Figure, _OPTIMIZER]
    """Bytes moved per parameter that a rank updates."""
    host: Annotated[Figure, _HOST]
    """Host time of a layer, of a collective, of a layer's routing and of each expert that a rank
    holds; what partial CUDA graphs leave of it, and `merged`, how many times as long experts take
    whose forward and backward run in one schedule."""
    overlap: Annotated[Figure, _OVERLAP]
    """Shares that are hidden: `tensor` of tensor-parallel collectives, `gradients` of the step's
    reduction as a share of one micro-batch's time; `fully_sharded` is what stays visible of the
    shorter of compute and ZeRO-3's traffic; `sharded_network` of the network's rate that traffic
    reaches; `regather` is an all-gather again for the weight gradient, with the first."""

    @classmethod
    def prepared(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Refuse a document of another kind."""
        return headed(data, FORMAT, "a stack")


class Stack(Record):
    """A trainer's software in base units."""

    name: str
    description: str
    attention: tuple[str, ...]
    figures: StackDocument
    path: Path
    source: Source

    @property
    def overlap_coefficient(self) -> float:
        """Factor by which compute and the traffic beside it slow each other down, 1 to 2.

        max + x min of the two is k min + the rest of the longer, with k = 1 + x; at 2 nothing is
        hidden.
        """
        return min(2.0, 1.0 + self.figures.overlap["fully_sharded"])

    @property
    def hiding(self) -> Hiding:
        """What is hidden besides, for whoever prices plans from estimated profiles."""
        shares, host = self.figures.overlap, self.figures.host
        states, reduced = self.figures.optimizer["bytes"], self.figures.gradient["reduce_bytes"]
        # gradients are read twice, for their norm and to be scaled
        return Hiding(
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

    def element_bytes(self, operation: str, *, backward: bool, gated: bool = False) -> float:
        """Return the bytes moved per element of one of `BYTE_CLASSES`."""
        figure: Figure = getattr(self.figures.bytes_per_element, operation)
        # gating fuses a product into the pass over both halves of the first matrix' output
        factor = figure["gated"] if gated and not backward else 1.0
        return factor * figure["backward" if backward else "forward"]


def load_stack(name: str) -> Stack:
    """Return a stack by name or path; raises InputError naming file, key and value."""
    return read_stack(load_object(catalog.find_document("stacks", "stack", name)))


def read_stack(document: JsonDocument) -> Stack:
    """Return the stack of a document; raises DocumentError naming file, key and value."""
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
