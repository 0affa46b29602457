"""Low-rank adapters of frozen matrices: rank, adapted matrices, precision of frozen weights.

LoRA (Hu et al., arXiv 2106.09685) adds B A x to W x, with A of r rows and B of r columns, and
trains only these two; QLoRA (Dettmers et al., arXiv 2305.14314) keeps W in 4 bits. This module
contains the records and counts that memory and time share, without activation bytes and seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from autopar.errors import InputError
from autopar.records import Record

if TYPE_CHECKING:
    # the help of commands reads these records and needs no arrays
    from autopar.arrays import F64

Target = Literal[
    "query", "key", "value", "projection", "fc1", "fc2", "expert_fc1", "expert_fc2",
    "mixer_in", "mixer_out",
]  # fmt: skip
"""Matrix that can have an adapter: of attention, of a dense MLP or shared expert, of routed
experts, of another mixer. `fc1` and `mixer_in` include all matrices before the activation."""
TARGETS: tuple[Target, ...] = get_args(Target)
DENSE_TARGETS: tuple[Target, ...] = ("query", "key", "value", "projection", "fc1", "fc2")
MIXER_TARGETS: tuple[Target, ...] = ("mixer_in", "mixer_out")
BaseKind = Literal["16 bits", "int8", "nf4"]
"""Precision of frozen matrices: 16 bits as in computation, or quantised by bitsandbytes."""

_BASE_BYTES: dict[BaseKind, float] = {
    "16 bits": 2.0,
    # LLM.int8 (arXiv 2208.07339), without the fp32 scale of each row
    "int8": 1.0,
    # arXiv 2305.14314, section 3: 4 bits, and 0.5 for an fp32 scale per 64 elements
    "nf4": (4.0 + 32.0 / 64.0) / 8.0,
}
_NESTED_BYTES = (4.0 + 8.0 / 64.0 + 32.0 / (64.0 * 256.0)) / 8.0
"""Bytes per element of nf4 with quantised scales: 4 bits, and 0.127 for scales (ibid.)."""


class Adapters(Record):
    """Low-rank adapters; all other weights are frozen.

    The default rank and targets are those of Megatron-Bridge; experts do not share adapters by
    default, as in PEFT's `all-linear` without experts.
    """

    rank: int = 32
    targets: frozenset[Target] = frozenset(DENSE_TARGETS)
    fused: bool | Literal["qkv"] = False
    """True if queries, keys and values share one adapter. So do both halves of a gated MLP
    (Megatron's `linear_qkv`, `linear_fc1`). `qkv`: only queries, keys and values do (torchtitan's
    `wqkv`; `w1` and `w3` have an adapter each)."""
    shared_by_experts: bool = False
    """True if all experts of a rank share one adapter (Megatron-Bridge's default)."""
    base: BaseKind = "16 bits"
    """Precision of the layers' frozen matrices; embedding, norms, router and head stay in 16
    bits."""
    nested: bool = True
    """True if the scales of nf4 are quantised too (`bnb_4bit_use_double_quant`)."""
    wide: bool = False
    """True if frozen weights that are not quantised are in fp32: those of a script that loads them
    so, or calls `prepare_model_for_kbit_training` of PEFT."""
    dropout: float = 0.0
    """Dropout before A, 0 to 1. Above 0 a layer saves a copy of its input and one mask byte per
    element."""

    def __post_init__(self) -> None:
        """Raise InputError for unknown or no targets, and for values out of range."""
        if self.rank < 1:
            raise InputError(f"adapter rank {self.rank}: expected at least 1")
        unknown = sorted(self.targets - set(TARGETS))
        if unknown or not self.targets:
            got = unknown[0] if unknown else "none"
            raise InputError(f"adapters are possible in {', '.join(TARGETS)}, got {got}")
        if self.base not in _BASE_BYTES:
            raise InputError(f"frozen weights: expected {', '.join(_BASE_BYTES)}, got {self.base}")
        if not 0 <= self.dropout < 1:
            raise InputError(f"adapter dropout {self.dropout}: expected 0 to 1")


def base_bytes(adapters: Adapters) -> float:
    """Return the bytes per element of a frozen matrix, its block scales included."""
    nested = adapters.base == "nf4" and adapters.nested
    return _NESTED_BYTES if nested else _BASE_BYTES[adapters.base]


_Width = TypeVar("_Width", float, "float | F64")


def adapted_widths(
    adapters: Adapters | None, widths: Sequence[tuple[Target, _Width]]
) -> tuple[_Width, ...]:
    """Return the output width of each adapter of a matrix; empty without adapters.

    Each adapted part of a matrix, such as queries in the QKV matrix, has an adapter. With
    `adapters.fused` all of them share one; with `qkv` only queries, keys and values do.

    widths : (target, output width) of each part of the matrix.
    """
    if adapters is None:
        return ()
    chosen = [width for target, width in widths if target in adapters.targets]
    of_attention = bool(widths) and widths[0][0] in ("query", "key", "value")
    if chosen and (of_attention if adapters.fused == "qkv" else adapters.fused):
        return (sum(chosen[1:], start=chosen[0]),)
    return tuple(chosen)


def needs_input(adapters: Adapters | None, *targets: Target) -> bool:
    """Return True if the input of a matrix is saved for a weight gradient.

    The gradient is that of the matrix, or of A of an adapter. With dropout, adapters save a copy of
    the input instead.
    """
    if adapters is None:
        return True
    return not adapters.dropout and not adapters.targets.isdisjoint(targets)


def adapter_elements(rank: int, widths: Sequence[float], inputs: float) -> float:
    """Return the number of elements of all A (rank x inputs) and B (outputs x rank) of a matrix.

    widths : outputs of each adapter, from `adapted_widths`.
    """
    return sum(rank * (width + inputs) for width in widths)
