"""Low-rank adapters beside frozen matrices: what is trained, and in what the others are kept.

LoRA (Hu et al., arXiv 2106.09685) adds B A x to W x, with A of r rows and B of r columns, and
trains these two alone; QLoRA (Dettmers et al., arXiv 2305.14314) keeps W in 4 bits. Here are the
records and the counts that memory and time share; bytes of activations and seconds are elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from autopar.errors import InputError
from autopar.records import Record

if TYPE_CHECKING:
    # the help of commands reads records, and needs no arrays
    from autopar.arrays import F64

Target = Literal["query", "key", "value", "projection", "fc1", "fc2", "expert_fc1", "expert_fc2"]
"""A matrix that adapters stand beside: of attention, of a dense MLP (and of one that every token
visits), of routed experts. `fc1` is all that is in front of the activation."""
TARGETS: tuple[Target, ...] = get_args(Target)
BaseKind = Literal["16 bits", "int8", "nf4"]
"""In what frozen matrices are kept: as they are computed with, or quantised by bitsandbytes."""

_BASE_BYTES: dict[BaseKind, float] = {
    "16 bits": 2.0,
    # LLM.int8 (arXiv 2208.07339): an fp32 scale of each row is left out
    "int8": 1.0,
    # arXiv 2305.14314, section 3: 4 bits, and 0.127 of scales that are quantised themselves
    "nf4": (4.0 + 8.0 / 64.0 + 32.0 / (64.0 * 256.0)) / 8.0,
}


class Adapters(Record):
    """Low-rank adapters; everything else is frozen.

    The defaults are Megatron-Bridge's and those of PEFT's `all-linear`, experts left out.
    """

    rank: int = 32
    targets: frozenset[Target] = frozenset({"query", "key", "value", "projection", "fc1", "fc2"})
    fused: bool = False
    """Queries, keys and values share one adapter, and so do both halves of a gated MLP, where the
    trainer's matrices are one (Megatron's `linear_qkv`, `linear_fc1`)."""
    shared_by_experts: bool = False
    """All experts of a rank have one adapter (Megatron-Bridge's default), not one each."""
    base: BaseKind = "16 bits"
    """Of the frozen matrices of layers; embedding, norms, router and head stay in 16 bits."""
    dropout: float = 0.0
    """In front of A: above 0 a layer saves a copy of its input, and a byte of mask an element."""

    def __post_init__(self) -> None:
        """Refuse adapters that train nothing."""
        if self.rank < 1:
            raise InputError(f"the rank of adapters is {self.rank}, and has to be 1 at least")
        unknown = sorted(self.targets - set(TARGETS))
        if unknown or not self.targets:
            got = unknown[0] if unknown else "none"
            raise InputError(f"adapters stand beside {', '.join(TARGETS)}, got {got}")
        if self.base not in _BASE_BYTES:
            raise InputError(
                f"frozen weights are kept in {', '.join(_BASE_BYTES)}, got {self.base}"
            )
        if not 0 <= self.dropout < 1:
            raise InputError(f"the dropout of adapters is {self.dropout}, expected 0 to 1")


def base_bytes(adapters: Adapters) -> float:
    """Return the bytes of an element of a frozen matrix, scales of its blocks included."""
    return _BASE_BYTES[adapters.base]


_Width = TypeVar("_Width", float, "float | F64")


def adapted_widths(
    adapters: Adapters | None, widths: Sequence[tuple[Target, _Width]]
) -> tuple[_Width, ...]:
    """Return the outputs of each adapter beside a matrix whose parts have so many outputs.

    Parts with one input, such as queries, keys and values, share an adapter where the trainer has
    one matrix of them. Empty: the matrix has none.
    """
    if adapters is None:
        return ()
    chosen = [width for target, width in widths if target in adapters.targets]
    if adapters.fused and chosen:
        return (sum(chosen[1:], start=chosen[0]),)
    return tuple(chosen)


def needs_input(adapters: Adapters | None, *targets: Target) -> bool:
    """Return whether a matrix's input is saved for a weight's gradient: its own, or an adapter's.

    With dropout adapters save a copy of their own, and the input is none of theirs.
    """
    if adapters is None:
        return True
    return not adapters.dropout and not adapters.targets.isdisjoint(targets)


def adapter_elements(rank: int, widths: Sequence[float], inputs: float) -> float:
    """Return the elements of all A (rank x inputs) and B (outputs x rank) beside one matrix.

    widths : outputs of each adapter, as `adapted_widths` has them.
    """
    return sum(rank * (width + inputs) for width in widths)
