"""Kernel constants of a card beyond its datasheet, typed and checked.

The section `kernels` of a card holds one entry per GEMM precision, attention kernel and class of
memory-bound kernels. An entry contains the constants of one formula of `autopar.rates.kernels`,
their source and quality, and the error of the resulting times against measurements. The formulas
themselves are not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from msgspec import Meta

from autopar.documents.json import Fault, converted, own_reader
from autopar.errors import DocumentError, InputError
from autopar.records import KeyFault, Record, number, record_of, replace

if TYPE_CHECKING:
    from autopar.rates.card import Card

Quality = Literal["measured", "derived", "nominal"]
"""Origin: `measured` (fitted to measured kernels), `derived` (from other kernels or from training
runs), or `nominal` (assumed)."""
Dtype = Literal["bf16", "fp16", "fp32", "fp8", "fp8_block", "mxfp8", "nvfp4"]
"""Precision of a GEMM's inputs; fp8 has one scale per tensor, fp8_block per 128 x 128 block."""
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
MemoryClass = Literal["elementwise", "norm", "softmax", "permute", "optimizer"]
"""Class of memory-bound kernels; kernels of one class reach about the same fraction of HBM rate."""

ELEMENT_BYTES: Mapping[str, float] = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0,
    "mxfp8": 1.0,
    "nvfp4": 0.5,
}
"""Bytes of one element by precision, without block scales, which add 3 to 12 %."""
_SAME_AS: Mapping[str, str] = {"fp16": "bf16", "mxfp8": "fp8_block"}
"""Precision -> precision whose constants are used if the card has none for it.

Tensor cores run both 16-bit formats at one rate, and MXFP8 differs from 128-blocks only in the
shape of its scales.
"""


class FormulaConstants(Record):
    """Constants of one formula with their quality and the error of the resulting times."""

    values: Mapping[str, float]
    quality: Quality
    source: str
    spread: float
    """Relative error that 9 of 10 measurements do not exceed."""

    def __getitem__(self, key: str) -> float:
        return self.values[key]


def constants(bounds: Mapping[str, tuple[float, float]], optional: Mapping[str, float]) -> Meta:
    """Return the `Meta` that reads the constants of a formula as `FormulaConstants`.

    bounds : (least, greatest) value of each constant
    optional : defaults of optional constants
    """
    kinds = {key: Annotated[float, number(*ends)] for key, ends in bounds.items()}
    source = Annotated[str, Meta(min_length=1, extra={"expected": "source of the value"})]
    description = "Share by which 9 of 10 measurements differ at most."
    spread = Annotated[float, number(0.0, 2.0), Meta(description=description)]
    values = record_of("Constants", kinds, optional)
    keys = {"value": values, "quality": Quality, "source": source, "spread": spread}
    entry: Any = record_of("Entry", keys)

    def read(value: Any, key: str, found: list[Fault]) -> FormulaConstants | None:
        made = converted(entry, value, key, found)
        if made is None:
            return None
        return FormulaConstants(
            values={name: getattr(made.value, name) for name in bounds},
            quality=made.quality,
            source=made.source,
            spread=made.spread,
        )

    return own_reader(read, entry)


# Fractions end at 1, so that no time is below the roofline of the datasheet.
_GEMM = constants(
    {
        "peak_share": (0.02, 1.0),
        "prologue_elements": (0.0, 1e4),
        "wave_rounding": (0.0, 1.0),
        "tile_exponent": (0.0, 2.0),
        "launch_s": (1e-7, 1e-3),
        "memory_share": (0.02, 1.0),
        "slowdown": (0.0, 0.5),
        "split_s": (0.0, 1e-3),
        "cast_share": (0.02, 2.0),
    },
    {"slowdown": 0.0, "split_s": 2e-6, "cast_share": 0.5},
)
"""Constants of `autopar.rates.kernels.gemm_s`: peak_share c, prologue_elements k0, wave_rounding w,
tile_exponent a, launch_s t0, memory_share hb, slowdown z, split_s ts, and cast_share."""
_ATTENTION = constants(
    {
        "flop_per_s": (1e12, 1e17),
        "prologue_keys": (0.0, 1e5),
        "window_keys": (0.0, 1e5),
        "tail": (0.0, 1.0),
        "launch_s": (1e-7, 1e-3),
        "slowdown": (0.0, 0.5),
        "narrow_exponent": (0.0, 1.0),
        "wide_exponent": (-0.5, 0.5),
    },
    {"tail": 0.0, "slowdown": 0.0, "narrow_exponent": 0.06, "wide_exponent": 0.0},
)
"""Constants of `autopar.rates.kernels.attention_s`: rate R, prologue h and the others."""
_SHARE = constants({"share": (0.02, 1.0)}, {})
_GROUPED = constants(
    {"share": (0.02, 1.0), "narrow_share": (0.02, 1.0), "group_s": (0.0, 1e-3)},
    {"narrow_share": 0.84, "group_s": 5e-6},
)
"""Grouped GEMMs: rate over that of batched ones in 16 bits or more (`share`) and in fewer
(`narrow_share`), and seconds added for each group (`group_s`)."""
_LAUNCH = constants({"launch_s": (1e-7, 1e-3)}, {})

GemmFigure = Annotated[FormulaConstants, _GEMM]
AttentionFigure = Annotated[FormulaConstants, _ATTENTION]
ShareFigure = Annotated[FormulaConstants, _SHARE]
GroupedFigure = Annotated[FormulaConstants, _GROUPED]
# The union is inside: msgspec's schema of a record loses annotations within a union.
_MaybeAttention = Annotated[FormulaConstants | None, _ATTENTION]
_MaybeShare = Annotated[FormulaConstants | None, _SHARE]


class AttentionFigures(Record):
    """One attention kernel, with forward and backward measured separately."""

    forward: AttentionFigure
    backward: _MaybeAttention = None
    """None: measured for inference only; `attention_s` uses the forward constants."""


def _keys(kind: Any) -> Meta:
    """Return metadata that names the keys in the schema; msgspec before 0.23 omits them."""
    return Meta(extra_json_schema={"propertyNames": {"enum": sorted(get_args(kind))}})


class KernelsSection(Record):
    """Section `kernels` of a card."""

    clock: ShareFigure
    """Sustained rate of a run over the rate of a short benchmark."""
    product_clock: _MaybeShare = None
    """Additional clock factor for GEMMs in 16 bits; None for 1."""
    low_precision_clock: _MaybeShare = None
    """Additional clock factor for GEMMs in 8 bits or fewer; None for 1."""
    gemm: Annotated[dict[Dtype, GemmFigure], _keys(Dtype)]
    grouped_gemm: GroupedFigure
    """Rate of a grouped GEMM over that of a batched GEMM of the same shape, and seconds of each
    group."""
    fused_grouped_gemm: ShareFigure
    """Rate of grouped kernels that run an expert's whole MLP in one launch, over a batched GEMM."""
    attention: dict[str, AttentionFigures]
    memory: Annotated[dict[MemoryClass, ShareFigure], _keys(MemoryClass)]
    """Fraction of the datasheet's HBM rate by class; `elementwise` is the default for others."""
    memory_launch: Annotated[FormulaConstants, _LAUNCH]
    """Launch time of a memory-bound kernel, in addition to the time of its bytes."""

    def __post_init__(self) -> None:
        if "elementwise" not in self.memory:
            raise KeyFault("memory.elementwise", "this key is missing, and other classes use it")


class Kernels(Record):
    """All constants for the kernel times of one card, in base units."""

    card: str
    num_sms: int
    memory_bytes_per_s: float
    flop_per_s: Mapping[str, float]
    """Peak by precision to which the constants refer; low precisions are multiples of bf16."""
    section: KernelsSection

    @property
    def clock(self) -> float:
        """Sustained GEMM rate of a run over that of a short benchmark, 0 to 1."""
        return self.section.clock["share"]

    def product_clock(self, dtype: str, clock: float) -> float:
        """Return the sustained GEMM clock of a precision; `clock` is that of other kernels."""
        # GEMMs draw the most power, and the clock falls further.
        size, section = ELEMENT_BYTES[dtype], self.section
        if size > ELEMENT_BYTES["bf16"]:
            return clock
        low = size < ELEMENT_BYTES["bf16"]
        more = section.low_precision_clock if low else section.product_clock
        return clock * (1.0 if more is None else more["share"])

    def relative_to_products(self) -> Kernels:
        """Return the constants for a clock measured with GEMMs in 16 bits, as those of sites."""
        section = self.section
        products, low = section.product_clock, section.low_precision_clock
        if products is not None and low is not None:
            low = replace(low, values={"share": low["share"] / products["share"]})
        section = replace(section, product_clock=None, low_precision_clock=low)
        return replace(self, section=section)

    def gemm(self, dtype: str) -> FormulaConstants:
        """Return the GEMM constants of a precision; raises InputError if the card has none."""
        surfaces: Mapping[Any, FormulaConstants] = self.section.gemm
        for name in (dtype, _SAME_AS.get(dtype)):
            if name in surfaces:
                return surfaces[name]
        known = ", ".join(surfaces)
        other = "fp16" if "fp16" in surfaces else next(iter(surfaces))
        raise InputError(
            f"card {self.card!r} has no GEMM times of {dtype!r}, only of {known}",
            remedy=f"Use another precision, such as --precision {other}",
        )

    def attention(self, kernel: str) -> AttentionFigures:
        """Return the constants of an attention kernel; raises InputError if the card has none."""
        if kernel in self.section.attention:
            return self.section.attention[kernel]
        known = ", ".join(self.section.attention)
        raise InputError(f"card {self.card!r} has no attention kernel {kernel!r}, only {known}")

    def memory_share(self, kind: MemoryClass) -> float:
        """Return the fraction of the HBM rate that kernels of a class reach."""
        shares = self.section.memory
        return shares.get(kind, shares["elementwise"])["share"]


def kernels_of(card: Card) -> Kernels:
    """Return the kernel constants of a card; raises DocumentError if the card has none."""
    section = card.kernels
    if section is None:
        raise DocumentError(
            card.path,
            "this key is missing, and kernel times need it",
            key="kernels",
            remedy="Copy the section of the most similar card and call its quality nominal",
        )
    bf16 = card.flop_per_s["bf16"]
    return Kernels(
        card=card.name,
        num_sms=card.num_sms,
        memory_bytes_per_s=card.memory_bytes_per_s,
        flop_per_s={
            "bf16": bf16,
            "fp16": card.flop_per_s["fp16"],
            "fp32": card.flop_per_s["fp32"],
            # Tensor cores double their rate with each halving of the width.
            "fp8": 2 * bf16,
            "fp8_block": 2 * bf16,
            "mxfp8": 2 * bf16,
            "nvfp4": 4 * bf16,
        },
        section=section,
    )
