"""The grammar of `--pin` and `--forbid`, as predicates that the search asks while it enumerates.

    rule      = [ scope ":" ] condition { "," condition }
    scope     = "layers" N [ "-" N ]  |  "stage" N
    condition = key "=" integer

Layer keys: tp, ulysses, cp, zero3, ckpt, strided. Keys of embedding and head: vtp, vulysses,
vzero3. Keys of the whole plan: pp, m, bsz. A pin says that all its conditions hold; a forbidden
rule says that they do not all hold together.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import OptionError
from autopar.plan import LayerStrategy, VocabStrategy

__all__ = ["GRAMMAR", "Rule", "Rules", "parse_rules"]

GRAMMAR = "[layers A-B: | stage J:] key=N[,key=N]"

_LAYER: Mapping[str, Callable[[LayerStrategy], int]] = {
    "tp": lambda s: s.tp,
    "ulysses": lambda s: int(s.ulysses),
    "cp": lambda s: s.cp,
    "zero3": lambda s: int(s.zero3),
    "ckpt": lambda s: int(s.checkpoint),
    "strided": lambda s: int(s.strided),
}
_VOCAB: Mapping[str, Callable[[VocabStrategy], int]] = {
    "vtp": lambda v: v.tp,
    "vulysses": lambda v: int(v.ulysses),
    "vzero3": lambda v: int(v.zero3),
}
_KIND = (
    dict.fromkeys(_LAYER, "layer")
    | dict.fromkeys(_VOCAB, "vocab")
    | {"pp": "stages", "m": "batch", "bsz": "batch"}
)
_FLAGS = frozenset({"ulysses", "zero3", "ckpt", "strided", "vulysses", "vzero3"})
_SYNONYMS = {
    "sp": "ulysses",
    "checkpoint": "ckpt",
    "sdp": "zero3",
    "fsdp": "zero3",
    "p": "pp",
    "chunks": "m",
    "global_bsz": "bsz",
    "vsp": "vulysses",
    "embed_sdp": "vzero3",
    "vocab_sdp": "vzero3",
}
_SCOPE = re.compile(r"(?:layers?\s+(\d{1,9})(?:\s*-\s*(\d{1,9}))?|stage\s+(\d{1,9}))")
_CONDITION = re.compile(r"([a-z_][a-z0-9_]*)\s*=\s*(\d{1,9})")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One parsed rule; `kind` says which predicate it restricts."""

    text: str
    forbid: bool
    kind: str
    """`layer`, `vocab`, `stages` or `batch`."""
    conditions: tuple[tuple[str, int], ...]
    layers: tuple[int, int] | None = None
    """First and last layer, both inclusive."""
    stage: int | None = None

    def allows(self, values: Mapping[str, int]) -> bool:
        """Return whether a subject with these values obeys the rule."""
        holds = all(values[key] == wanted for key, wanted in self.conditions)
        return not holds if self.forbid else holds


@dataclass(frozen=True, kw_only=True)
class Rules:
    """All pins and forbidden rules of a search, as predicates."""

    rules: tuple[Rule, ...] = ()

    @property
    def has_stage_rules(self) -> bool:
        """True when some rule singles out a stage."""
        return any(rule.stage is not None for rule in self.rules)

    def allows_layer(self, layer: int, strategy: LayerStrategy) -> bool:
        """Return whether a layer may have a strategy, rules about stages aside."""
        return all(
            rule.allows(_layer_values(strategy))
            for rule in self.rules
            if rule.kind == "layer"
            and rule.stage is None
            and (rule.layers is None or rule.layers[0] <= layer <= rule.layers[1])
        )

    def allows_stage(self, stage: int, strategy: LayerStrategy) -> bool:
        """Return whether layers of a stage may have a strategy, by the rules about stages."""
        return all(
            rule.allows(_layer_values(strategy)) for rule in self.rules if rule.stage == stage
        )

    def allows_vocab(self, strategy: VocabStrategy) -> bool:
        """Return whether embedding and head may have a strategy."""
        values = {key: get(strategy) for key, get in _VOCAB.items()}
        return self._allows("vocab", values)

    def allows_stages(self, num_stages: int) -> bool:
        """Return whether the plan may have so many pipeline stages."""
        return self._allows("stages", {"pp": num_stages})

    def allows_batch(self, global_batch: int, num_microbatches: int) -> bool:
        """Return whether the plan may have this global batch and number of micro-batches."""
        return self._allows("batch", {"bsz": global_batch, "m": num_microbatches})

    def last_layer(self) -> int | None:
        """Return the largest layer index that a rule names, None when none names any."""
        return max((rule.layers[1] for rule in self.rules if rule.layers), default=None)

    def _allows(self, kind: str, values: Mapping[str, int]) -> bool:
        return all(rule.allows(values) for rule in self.rules if rule.kind == kind)


def parse_rules(pin: Sequence[str], forbid: Sequence[str]) -> Rules:
    """Return the rules of `--pin` and `--forbid`.

    Raises
    ------
    OptionError
        When a rule does not follow the grammar; the message shows it.
    """
    rules: list[Rule] = []
    for text in pin:
        rules += _parse(text, forbid=False)
    for text in forbid:
        rules += _parse(text, forbid=True)
    return Rules(rules=tuple(rules))


def _parse(text: str, *, forbid: bool) -> list[Rule]:
    option = "--forbid" if forbid else "--pin"

    def fail(problem: str) -> OptionError:
        return OptionError(f"{option} {text!r}: {problem}; the grammar is {GRAMMAR}")

    scope, colon, body = text.strip().partition(":")
    layers: tuple[int, int] | None = None
    stage: int | None = None
    if not colon:
        scope, body = "", scope
    else:
        match = _SCOPE.fullmatch(scope.strip())
        if match is None:
            raise fail(f"expected `layers A-B` or `stage J` before the colon, got {scope!r}")
        first, last, stage_text = match.groups()
        if stage_text is not None:
            stage = int(stage_text)
        else:
            layers = (int(first), int(last if last is not None else first))
            if layers[0] > layers[1]:
                raise fail(f"the range of layers is empty ({layers[0]} > {layers[1]})")

    groups: dict[str, list[tuple[str, int]]] = {}
    for part in body.split(","):
        match = _CONDITION.fullmatch(part.strip())
        if match is None:
            raise fail(f"expected key=integer, got {part.strip()!r}")
        key, value = _SYNONYMS.get(match[1], match[1]), int(match[2])
        if key not in _KIND:
            near = difflib.get_close_matches(key, list(_KIND), n=1, cutoff=0.4)
            raise fail(
                f"unknown key {key!r}"
                + (f", did you mean {near[0]!r}?" if near else f", known are {', '.join(_KIND)}")
            )
        if colon and _KIND[key] != "layer":
            raise fail(f"{key!r} belongs to the whole plan and cannot follow {scope.strip()!r}")
        if key in _FLAGS and value > 1:
            raise fail(f"expected {key}=0 or {key}=1, got {value}")
        if key not in _FLAGS and value < 1:
            raise fail(f"expected a positive integer for {key!r}, got {value}")
        known = dict(groups.get(_KIND[key], ()))
        if known.get(key, value) != value:
            raise fail(f"{key!r} cannot be both {known[key]} and {value}")
        groups.setdefault(_KIND[key], []).append((key, value))
    if forbid and len(groups) > 1:
        keys = ", ".join(key for pairs in groups.values() for key, _ in pairs)
        raise fail(f"one rule cannot forbid a combination of layers and the plan ({keys})")
    return [
        Rule(
            text=text.strip(),
            forbid=forbid,
            kind=kind,
            conditions=tuple(conditions),
            layers=layers,
            stage=stage,
        )
        for kind, conditions in groups.items()
    ]


def _layer_values(strategy: LayerStrategy) -> dict[str, int]:
    return {key: get(strategy) for key, get in _LAYER.items()}
