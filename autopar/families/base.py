"""Common parts of `config.json` readers: value types, names, groups of equal layers.

Each family defines its keys and the defaults for missing ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from autopar.errors import DocumentError
from autopar.families.consistency import checked_layer, is_ratio
from autopar.records import Entry, Record, number, replace, whole_number
from autopar.run.model import MOST_LAYERS, MOST_SIZE, LayerSpec, ModelSpec

Whole = Annotated[int, whole_number(1, MOST_SIZE)]
WholeOrZero = Annotated[int, whole_number(0, MOST_SIZE)]
Layers = Annotated[int, whole_number(1, MOST_LAYERS)]
Switch = bool
Ratio = Annotated[float, number(1.0, 1e12)]
Share = Annotated[float, number(0.01, 1.0)]

_LLAMA3_SCALING = {
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}
"""Values next to the factor in every release of Llama since 3.1; engines assume them."""


class Config(Entry, forbid_unknown_fields=False):
    """Keys of a `config.json` that describe the architecture; files contain many others."""

    keys: ClassVar[Mapping[str, str]] = {
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "num_experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
    }
    """Key in the file of each field of a `LayerSpec` that consistency checks name in errors."""
    other_names: ClassVar[Mapping[str, str]] = {}
    """Alternative name of a key in files of other releases, by key."""
    mixture: ClassVar[bool] = False
    """True if the family has experts, whose keys it reads."""

    vocab_size: Whole
    tie_word_embeddings: Switch | None = None

    def spec(self, path: Path, name: str) -> ModelSpec:
        """Return the architecture; raises DocumentError if keys contradict each other."""
        raise NotImplementedError

    def model(
        self, path: Path, name: str, *layers: LayerSpec, tied: bool, **values: Any
    ) -> ModelSpec:
        """Return the model with these layer types; raises DocumentError for inconsistent layers.

        tied : True if embeddings of the family are tied by default.
        values : other fields of the `ModelSpec`.
        """
        for layer in layers:
            checked_layer(path, layer, self.keys)
        said = self.tie_word_embeddings
        return ModelSpec(
            name=name,
            layers=layers,
            vocab_size=self.vocab_size,
            tied_embeddings=tied if said is None else said,
            **values,
        )


def divided_width(path: Path, config: Record, hidden_key: str, heads_key: str) -> int:
    """Return hidden size / heads; raises DocumentError if it is no whole number."""
    hidden, heads = getattr(config, hidden_key), getattr(config, heads_key)
    if hidden % heads:
        raise DocumentError(
            path,
            f"the value is {heads}, which does not divide {hidden_key} {hidden}",
            key=heads_key,
            remedy="Change one of them",
        )
    width: int = hidden // heads
    return width


# --------------------------------------------------------------------------------------------------
# Rotary positions


class _Rope(Entry, forbid_unknown_fields=False):
    """Section of rotary positions: rope_scaling in transformers 4, rope_parameters in 5."""

    rope_theta: Ratio | None = None
    partial_rotary_factor: Share | None = None


Section = Annotated[_Rope, Meta(extra={"expected": "an object or null"})]


def read_rotary(
    sections: Sequence[_Rope | None], base: float | None, share: float
) -> dict[str, float | None]:
    """Return rotary positions as fields of a ModelSpec; base and scaling are None if unknown.

    Parameters
    ----------
    sections : objects of the file; later ones take precedence
    base : base outside of the sections, or that of the family
    share : rotary fraction of a head outside of the sections, or that of the family
    """
    unknown: dict[str, float | None] = {"rotary_base": None, "rotary_scaling_factor": None}
    section: dict[str, Any] = {}
    for part in sections:
        section = (part.content() if part is not None else {}) or section
    unknown["rotary_share"] = float(section.get("partial_rotary_factor") or share)
    kind = section.get("rope_type", section.get("type", "default"))
    if kind == "yarn":
        unknown["yarn_positions"] = True
    # transformers 5 keeps the base in the section, 4 at the top level.
    given = section.get("rope_theta")
    given = base if given is None else given
    if given is None:
        return unknown
    found = {**unknown, "rotary_base": float(given)}
    # Objects inside the section are separate positions for each kind of layers.
    if kind == "default" and not any(isinstance(value, dict) for value in section.values()):
        return found
    factor = section.get("factor")
    alike = all(section.get(key) == value for key, value in _LLAMA3_SCALING.items())
    if kind == "llama3" and alike and factor is not None and is_ratio(factor):
        return {**found, "rotary_scaling_factor": float(factor)}
    return unknown


# --------------------------------------------------------------------------------------------------
# Groups of layers


def runs_of(layers: Sequence[LayerSpec]) -> tuple[tuple[LayerSpec, ...], bool]:
    """Return (layer types, True if they alternate) for all layers of a model in order.

    Layers that differ only in a window are one type if the full-attention layers are periodic.
    """
    shapes = [replace(layer, window=None) for layer in layers]
    runs = [(shape, len(list(run))) for shape, run in groupby(shapes)]
    kinds = list(dict.fromkeys(shapes))
    if len(runs) > len(kinds) and shapes == kinds * (len(shapes) // len(kinds)):
        # The types alternate; the layers of one type decide about its window.
        turns = [_one_type(layers[place :: len(kinds)]) for place in range(len(kinds))]
        if None not in turns:
            return tuple(turn for turn in turns if turn is not None), True
    found: list[LayerSpec] = []
    first = 0
    for _, many in runs:
        part = layers[first : first + many]
        first += many
        one = _one_type(part)
        found += [one] if one is not None else _equal_runs(part)
    return tuple(found), False


def in_order(layers: Sequence[LayerSpec]) -> tuple[tuple[LayerSpec, ...], tuple[int, ...]]:
    """Return (layer types, type of every layer) for all layers of a model in order.

    The second is empty if layers of each type follow each other.
    """
    number = Counter(layers)
    types = tuple(replace(one, num_layers=many) for one, many in number.items())
    places = {one: place for place, one in enumerate(number)}
    order = tuple(places[one] for one in layers)
    return types, () if list(order) == sorted(order) else order


def _one_type(layers: Sequence[LayerSpec]) -> LayerSpec | None:
    """Return the type of layers that differ only in their windows; None if it is not one type."""
    windows = {layer.window for layer in layers}
    number = len(layers)
    if len(windows) == 1:
        return replace(layers[0], num_layers=number)
    whole = [place for place, layer in enumerate(layers, 1) if layer.window is None]
    if len(windows) > 2 or not whole or whole != [*range(whole[0], number + 1, whole[0])]:
        return None
    (window,) = windows - {None}
    return replace(layers[0], num_layers=number, window=window, whole_every=whole[0])


def _equal_runs(layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    return [replace(layer, num_layers=len(list(run))) for layer, run in groupby(layers)]
