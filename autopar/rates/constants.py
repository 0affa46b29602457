"""Kernel constants: what a card says of its kernels beyond the datasheet, typed and checked.

The section `kernels` of a card holds one entry per GEMM precision, attention kernel and class of
memory-bound kernels: the constants of one formula of `autopar.rates.kernels`, where they are
from, how good they are and how far prices made from them are from measurements. The formulas
themselves are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from autopar.documents.checks import StrictObject, key_error
from autopar.documents.json import shorten
from autopar.errors import DocumentError, InputError, nearest
from autopar.objects import model_validator
from autopar.records import Record

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import core_schema

    from autopar.rates.card import Card

Quality = Literal["measured", "derived", "nominal"]
"""Fitted to measured kernels; carried over from such, or from training runs; or assumed."""
Dtype = Literal["bf16", "fp16", "fp32", "fp8", "fp8_block", "mxfp8", "nvfp4"]
"""Precision of a GEMM's inputs; fp8 has one scale per tensor, fp8_block per 128 x 128 block."""
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
MemoryClass = Literal["elementwise", "norm", "softmax", "permute", "optimizer"]
"""Kind of a memory-bound kernel: of one kind, kernels reach about the same share of HBM."""
MEMORY_CLASSES: tuple[MemoryClass, ...] = get_args(MemoryClass)

ELEMENT_BYTES: Mapping[str, float] = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0,
    "mxfp8": 1.0,
    "nvfp4": 0.5,
}
"""Bytes of one element by precision; the scales of blocks, 3 to 12 % more, are not counted."""
_QUALITIES: tuple[Quality, ...] = get_args(Quality)
_ENTRY_KEYS = ("value", "quality", "source", "spread")
_SAME_AS: Mapping[str, str] = {"fp16": "bf16", "mxfp8": "fp8_block"}
"""Precisions that run at another's rate where a card has no surface of their own: tensor cores
take both 16-bit formats alike, and MXFP8 differs from 128-blocks in the shape of its scales."""


class Figure(Record):
    """The constants of one formula with their quality and the error of what they price."""

    values: Mapping[str, float]
    quality: Quality
    source: str
    spread: float
    """Share by which 9 of 10 measurements differ from the price at most."""

    def __getitem__(self, key: str) -> float:
        return self.values[key]


class Constants(Record, kw_only=False, eq=False):
    """The constants of one formula: name, least and greatest value of each; reads an entry."""

    bounds: Mapping[str, tuple[float, float]]
    optional: Mapping[str, float]
    """Value of each constant that an entry may leave out."""

    def read(self, entry: object) -> Figure:
        """Return the constants of an entry; raises ValidationError naming the key inside it."""
        if not isinstance(entry, dict):
            raise key_error(f"the value is {shorten(entry)}, expected an object of {_listed()}")
        for key in entry:
            if key not in _ENTRY_KEYS and not str(key).startswith("_"):
                # cut-off 0: of four keys the nearest is worth naming however far it is
                near = nearest(str(key), _ENTRY_KEYS, 0.0)
                raise key_error(f"this key is unknown; the nearest known key is {near!r}", key)
        for key in _ENTRY_KEYS:
            if key not in entry:
                raise key_error(f"this key is missing; an entry has {_listed()}", key)
        if entry["quality"] not in _QUALITIES:
            expected = ", ".join(_QUALITIES)
            problem = f"the value is {shorten(entry['quality'])}, expected one of {expected}"
            raise key_error(problem, "quality")
        if not isinstance(entry["source"], str) or not entry["source"]:
            problem = f"the value is {shorten(entry['source'])}, expected where the figure is from"
            raise key_error(problem, "source")
        return Figure(
            values=self._constants(entry["value"]),
            quality=entry["quality"],
            source=entry["source"],
            spread=_number(entry["spread"], 0.0, 2.0, "spread"),
        )

    def _constants(self, values: object) -> Mapping[str, float]:
        if not isinstance(values, dict):
            names = ", ".join(key for key in self.bounds if key not in self.optional)
            problem = f"the value is {shorten(values)}, expected an object of {names}"
            raise key_error(problem, "value")
        for key in values:
            if key not in self.bounds:
                near = nearest(str(key), [*self.bounds], 0.0)
                problem = f"this key is unknown; the nearest known key is {near!r}"
                raise key_error(problem, "value", key)
        found = {}
        for key, (least, most) in self.bounds.items():
            if key not in values and key not in self.optional:
                problem = f"this key is missing, expected a number from {least:g} to {most:g}"
                raise key_error(problem, "value", key)
            value = values.get(key, self.optional.get(key))
            found[key] = _number(value, least, most, "value", key)
        return found

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        from pydantic_core import core_schema

        # plain: what is read is no object of the document but the figure made of it
        return core_schema.no_info_plain_validator_function(self.read)

    def reader(self, inner: object) -> Callable[[object], Figure]:
        """Return what reads an entry, for `autopar.objects`."""
        return self.read

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        numbers = {
            key: {"type": "number", "minimum": least, "maximum": most}
            for key, (least, most) in self.bounds.items()
        }
        return {
            "type": "object",
            "properties": {
                "value": {
                    "type": "object",
                    "properties": numbers,
                    "required": [key for key in self.bounds if key not in self.optional],
                    "additionalProperties": False,
                },
                "quality": {"enum": list(_QUALITIES)},
                "source": {"type": "string", "minLength": 1},
                "spread": {
                    "type": "number",
                    "minimum": 0,
                    "maximum": 2,
                    "description": "Share by which 9 of 10 measurements differ at most.",
                },
            },
            "patternProperties": {"^_": {"description": "A comment; ignored."}},
            "required": list(_ENTRY_KEYS),
            "additionalProperties": False,
        }


def _listed() -> str:
    return ", ".join(_ENTRY_KEYS)


def _number(value: object, least: float, most: float, *where: str) -> float:
    # a bool is an int in Python, and true is no number; NaN is in no range
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        problem = f"the value is {shorten(value)}, expected a number from {least:g} to {most:g}"
        raise key_error(problem, *where)
    return float(value)


# shares end at 1, so that no price is below the roofline of the datasheet
_GEMM = Constants(
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
"""peak_share c, prologue_elements k0, wave_rounding w, tile_exponent a, launch_s t0, memory_share
hb, slowdown z, split_s ts and cast_share of `autopar.rates.kernels.gemm_s`."""
_ATTENTION = Constants(
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
"""Rate R, prologue h and the rest of `autopar.rates.kernels.attention_s`."""
_SHARE = Constants({"share": (0.02, 1.0)}, {})
_LAUNCH = Constants({"launch_s": (1e-7, 1e-3)}, {})

GemmFigure = Annotated[Figure, _GEMM]
AttentionFigure = Annotated[Figure, _ATTENTION]
ShareFigure = Annotated[Figure, _SHARE]


class _Section(StrictObject):
    """An object of figures; a missing one is asked for by name."""

    @model_validator(mode="before")
    @classmethod
    def _has_all_keys(cls, data: Any) -> Any:
        required = [key for key, field in cls.model_fields.items() if field.is_required()]
        if not isinstance(data, dict):
            listed = ", ".join(required)
            raise key_error(f"the value is {shorten(data)}, expected an object of {listed}")
        for key in required:
            if key not in data:
                raise key_error("this key is missing; docs/estimates.md says what it holds", key)
        return data


class AttentionFigures(_Section):
    """One attention kernel, whose two directions are measured apart."""

    forward: AttentionFigure
    backward: AttentionFigure | None = None
    """None: the kernel was measured, and is used, for inference only."""


class KernelsSection(_Section):
    """The section `kernels` of a card."""

    clock: ShareFigure
    """Rate that a run sustains per rate of a short benchmark."""
    low_precision_clock: ShareFigure | None = None
    """Of that, what products in 8 bits and less sustain; None: all."""
    gemm: dict[Dtype, GemmFigure]
    grouped_gemm: ShareFigure
    """Rate of a grouped GEMM per rate of a batched one of the same shape."""
    fused_grouped_gemm: ShareFigure
    """The same of kernels that keep an expert's whole MLP in one launch."""
    attention: dict[str, AttentionFigures]
    memory: dict[MemoryClass, ShareFigure]
    """Share of the datasheet's HBM rate by class; `elementwise` stands for what is missing."""
    memory_launch: Annotated[Figure, _LAUNCH]
    """Time of a memory-bound kernel besides its bytes."""


class Kernels(Record):
    """All that prices the kernels of one card, in base units."""

    card: str
    num_sms: int
    memory_bytes_per_s: float
    flop_per_s: Mapping[str, float]
    """Peak by precision as the surfaces mean it: low precisions are multiples of bf16."""
    section: KernelsSection

    @property
    def clock(self) -> float:
        """Sustained rate per rate of a short benchmark; the tables have 1."""
        return self.section.clock["share"]

    def product_clock(self, dtype: str, clock: float) -> float:
        """Return the sustained share of a precision's products; that of 16 bits is `clock`."""
        low = self.section.low_precision_clock
        # products in few bits draw more power, and the clock falls further
        narrow = ELEMENT_BYTES[dtype] < ELEMENT_BYTES["bf16"]
        return clock * (low["share"] if low is not None and narrow else 1.0)

    def gemm(self, dtype: str) -> Figure:
        """Return the surface of a precision; raises InputError naming those of the card."""
        surfaces: Mapping[Any, Figure] = self.section.gemm
        for name in (dtype, _SAME_AS.get(dtype)):
            if name in surfaces:
                return surfaces[name]
        known = ", ".join(surfaces)
        raise InputError(f"card {self.card!r} has no GEMM times of {dtype!r}, only of {known}")

    def attention(self, kernel: str) -> AttentionFigures:
        """Return an attention kernel; raises InputError naming those of the card."""
        if kernel in self.section.attention:
            return self.section.attention[kernel]
        known = ", ".join(self.section.attention)
        raise InputError(f"card {self.card!r} has no attention kernel {kernel!r}, only {known}")

    def memory_share(self, kind: MemoryClass) -> float:
        """Return the share of HBM that kernels of a class reach."""
        shares = self.section.memory
        return shares.get(kind, shares["elementwise"])["share"]


def kernels_of(card: Card) -> Kernels:
    """Return what prices the kernels of a card; raises DocumentError where the card has none."""
    section = card.kernels
    if section is None:
        raise DocumentError(
            card.path,
            "this key is missing, and times of kernels are made from it",
            key="kernels",
            remedy="copy the section of the most similar card and call its quality nominal",
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
            # tensor cores double their rate with each halving of the width
            "fp8": 2 * bf16,
            "fp8_block": 2 * bf16,
            "mxfp8": 2 * bf16,
            "nvfp4": 4 * bf16,
        },
        section=section,
    )
