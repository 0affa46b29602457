"""Search space of per-layer plans: strategies, numbers of stages and batches allowed by options.

The space lists combinations only. `search.planning.cost.model` computes their time and memory, and
excludes strategies that are illegal for the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from autopar.errors import OptionError, nearest
from autopar.records import Record
from autopar.run.plan import LayerStrategy, VocabStrategy, ZeroDefault, fewest_microbatches
from autopar.units import divisors
from search.request.options import SearchOptions

# --------------------------------------------------------------------------------------------------
# Grammar of `--pin` and `--forbid`. Rules are parsed into predicates that filter the space.
#
#     rule      = [ scope ":" ] condition { "," condition }
#     scope     = "layers" N [ "-" N ]  |  "stage" N
#     condition = key "=" integer
#
# Layer keys: tp, ulysses, cp, zero3, ckpt, strided. Keys of embedding and head: vtp, vulysses,
# vzero3, vcp. Keys of the whole plan: pp, m, bsz. A pin requires all its conditions; a forbidden
# rule excludes plans in which all its conditions hold.


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
    "vcp": lambda v: v.cp,
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
# at most nine digits, because counts must fit into 32 bits
_SCOPE = re.compile(r"(?:layers?\s+([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?|stage\s+([0-9]{1,9}))")
_CONDITION = re.compile(r"([a-z_][a-z0-9_]*)\s*=\s*([0-9]{1,9})")


class Rule(Record):
    """Rule of `--pin` or `--forbid` on one kind of setting."""

    text: str
    forbid: bool
    """True for a rule of `--forbid`, False for a pin."""
    kind: str
    """Restricted setting: `layer`, `vocab` (embedding and head), `stages` or `batch`."""
    conditions: tuple[tuple[str, int], ...]
    """Pairs (key, value); a pin requires all of them."""
    layers: tuple[int, int] | None = None
    """First and last layer, both inclusive; None for all layers."""
    stage: int | None = None
    """Pipeline stage whose layers are restricted; None for all stages."""

    def allows(self, values: Mapping[str, int]) -> bool:
        """Return True if a layer or plan with these values, by key, obeys the rule."""
        holds = all(values[key] == wanted for key, wanted in self.conditions)
        return not holds if self.forbid else holds


class Rules(Record):
    """Rules of `--pin` and `--forbid` of a search."""

    rules: tuple[Rule, ...] = ()

    @property
    def has_stage_rules(self) -> bool:
        """True if some rule has the scope `stage J`."""
        return any(rule.stage is not None for rule in self.rules)

    @property
    def stages(self) -> tuple[int, ...]:
        """Stages J of rules with the scope `stage J`, in increasing order."""
        return tuple(sorted({rule.stage for rule in self.rules if rule.stage is not None}))

    def layer_masks(
        self, layers: Iterable[int], strategies: Sequence[LayerStrategy]
    ) -> list[tuple[bool, ...]]:
        """Return for each layer a mask of allowed strategies, ignoring rules with a stage."""
        rules = [rule for rule in self.rules if rule.kind == "layer" and rule.stage is None]
        values = [_layer_values(strategy) for strategy in strategies]
        # layers under the same subset of rules share one mask, and there are few such subsets
        masks: dict[tuple[bool, ...], tuple[bool, ...]] = {}
        found = []
        for layer in layers:
            about = tuple(
                rule.layers is None or rule.layers[0] <= layer <= rule.layers[1] for rule in rules
            )
            if about not in masks:
                mine = [rule for rule, yes in zip(rules, about, strict=True) if yes]
                masks[about] = tuple(all(rule.allows(value) for rule in mine) for value in values)
            found.append(masks[about])
        return found

    def allows_stage(self, stage: int, strategy: LayerStrategy) -> bool:
        """Return True if the rules of a stage allow a strategy for its layers."""
        return all(
            rule.allows(_layer_values(strategy)) for rule in self.rules if rule.stage == stage
        )

    def allows_vocab(self, strategy: VocabStrategy) -> bool:
        """Return True if embedding and head may use a strategy."""
        if not self.rules:
            return True
        values = {key: get(strategy) for key, get in _VOCAB.items()}
        return self._allows("vocab", values)

    def allows_stages(self, num_stages: int) -> bool:
        """Return True if the plan may have `num_stages` pipeline stages."""
        return self._allows("stages", {"pp": num_stages})

    def allows_batch(self, global_batch: int, num_microbatches: int) -> bool:
        """Return True if the plan may have this global batch and number of micro-batches."""
        return self._allows("batch", {"bsz": global_batch, "m": num_microbatches})

    def last_layer(self) -> int | None:
        """Return the largest layer index in a rule, None if no rule has one."""
        return max((rule.layers[1] for rule in self.rules if rule.layers), default=None)

    def _allows(self, kind: str, values: Mapping[str, int]) -> bool:
        return all(rule.allows(values) for rule in self.rules if rule.kind == kind)


def parse_rules(pin: Sequence[str], forbid: Sequence[str]) -> Rules:
    """Return the parsed rules of `--pin` and `--forbid`.

    Raises OptionError for a rule that does not follow the grammar; the message prints the grammar.
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
        return OptionError(f"{option} {text!r}: {problem}", remedy=f"Expected grammar: {GRAMMAR}")

    scope, colon, body = text.strip().partition(":")
    layers: tuple[int, int] | None = None
    stage: int | None = None
    # without a colon, the whole text is conditions
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
            near = nearest(key, (*_KIND, *_SYNONYMS))
            near = _SYNONYMS.get(near or "", near)
            raise fail(
                f"unknown key {key!r}"
                + (f". Did you mean {near!r}?" if near else f", expected one of {', '.join(_KIND)}")
            )
        if colon and _KIND[key] != "layer":
            raise fail(f"{key!r} belongs to the whole plan and cannot follow {scope.strip()!r}")
        if key in _FLAGS and value > 1:
            raise fail(f"expected {key}=0 or {key}=1, got {value}")
        if key not in _FLAGS and value < 1:
            raise fail(f"expected a positive integer for {key!r}, got {value}")
        # repeating a condition is harmless, but two values of one key can never hold
        known = dict(groups.get(_KIND[key], ()))
        if known.get(key, value) != value:
            raise fail(f"{key!r} cannot be both {known[key]} and {value}")
        groups.setdefault(_KIND[key], []).append((key, value))
    # each predicate tests one kind of subject, so it cannot forbid a combination of kinds
    if forbid and len(groups) > 1:
        keys = ", ".join(key for pairs in groups.values() for key, _ in pairs)
        raise fail(f"one rule cannot forbid a combination of layers and the plan ({keys})")
    # pins of several kinds are independent: one rule per predicate
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


def freed(pins: Sequence[str], rule: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (conditions of pins that are compatible with a rule, removed conditions).

    Pins are split into single conditions. A condition is removed if the rule sets its key to
    another value for some of its layers. Raises OptionError as `parse_rules`.
    """
    asked = [
        (key, wanted, one) for one in _parse(rule, forbid=False) for key, wanted in one.conditions
    ]
    kept: list[str] = []
    dropped: list[str] = []
    for pin in pins:
        for one in _parse(pin, forbid=False):
            scope = pin.partition(":")[0].strip() + ":" if ":" in pin else ""
            for key, wanted in one.conditions:
                against = any(
                    key == other and wanted != value and _overlap(one, rule_of)
                    for other, value, rule_of in asked
                )
                (dropped if against else kept).append(f"{scope}{key}={wanted}")
    return tuple(kept), tuple(dropped)


def _overlap(one: Rule, other: Rule) -> bool:
    """Return True if some layer can be in the scope of both rules."""
    if one.layers is not None and other.layers is not None:
        return one.layers[0] <= other.layers[1] and other.layers[0] <= one.layers[1]
    return one.stage is None or other.stage is None or one.stage == other.stage


def _layer_values(strategy: LayerStrategy) -> dict[str, int]:
    return {key: get(strategy) for key, get in _LAYER.items()}


# --------------------------------------------------------------------------------------------------
# Enumeration of strategies, stages and micro-batches.


TOKENS_OF_RANK = 1024
"""Minimum number of tokens of a sample per context rank, unless `--max-cp-deg` is given.

With fewer tokens, the communication of keys and values takes longer than the attention."""

Table = tuple[int, int, ZeroDefault]
"""(number of stages p, samples per micro-batch g, default dp type)."""


class SearchSpace(Record):
    """Search space of per-layer plans; indices are those of `PlanTables`."""

    strategies: tuple[LayerStrategy, ...]
    """Layer strategies in canonical order."""
    vocab: tuple[VocabStrategy, ...]
    tables: tuple[Table, ...]
    candidates: tuple[tuple[int, int], ...]
    """(index into tables, micro-batches m)."""
    uniform: bool
    """True if all layers must share one strategy."""
    only_data_degree_1: bool = False
    """True if data parallelism is disabled."""


class _Preset(Record):
    """Parallel dimensions searched with a value of `--search-space`."""

    stages: str = "any"  # any, one, largest
    tensor: str = "any"  # any, one, largest
    context: bool = False  # True if context parallelism is searched without being requested
    zero3: tuple[bool, ...] = (False, True)
    checkpoint: tuple[bool, ...] = (False, True)
    uniform: bool = False


# Search spaces of Galvatron: `full` varies all dimensions per layer, `3d` sets (dp, tp, pp) for the
# whole model, the others vary the named dimensions per layer.
PRESETS = {
    "full": _Preset(context=True),
    "3d": _Preset(zero3=(False,), checkpoint=(False,), uniform=True),
    "dp+tp": _Preset(stages="one", zero3=(False,)),
    "dp+pp": _Preset(tensor="one", zero3=(False,)),
    "dp": _Preset(stages="one", tensor="one", zero3=(False,), checkpoint=(False,)),
    "sdp": _Preset(stages="one", tensor="one", zero3=(True,), checkpoint=(False,)),
    "tp": _Preset(stages="one", tensor="largest", zero3=(False,), checkpoint=(False,)),
    "pp": _Preset(stages="largest", tensor="one", zero3=(False,), checkpoint=(False,)),
}


@lru_cache(maxsize=4096)
def next_batch(batch: int, world_size: int) -> int | None:
    """Return the next larger global batch that all ranks share equally; None if `batch` is one.

    A batch is shared equally if the largest divisor of `world_size` not above it divides it.
    """

    def shared(number: int) -> bool:
        most = max(degree for degree in divisors(world_size) if degree <= number)
        return number % most == 0

    if shared(batch):
        return None
    # every multiple of the ranks divides evenly, so the range contains one
    return next(number for number in range(batch + 1, batch + world_size + 1) if shared(number))


def context_degrees(options: SearchOptions, degrees: Sequence[int], num_tokens: int) -> list[int]:
    """Return the context degrees allowed by the options, a subset of `degrees`.

    num_tokens : shortest sequence length of any layer, tokens.
    """
    most = options.max_cp_deg
    if most is None:
        has_context = PRESETS[options.search_space].context
        most = num_tokens // TOKENS_OF_RANK if has_context else 1
    return [c for c in degrees if c == 1 or (c <= most and not options.disable_cp)]


def global_batches(options: SearchOptions) -> tuple[int, ...]:
    """Return the global batch sizes to search: `--global-batch-size`, else the range of batches."""
    if options.settle_bsz is not None:
        return (options.settle_bsz,)
    return tuple(range(options.min_bsz, options.max_bsz + 1, options.bsz_scale))


def build_space(
    options: SearchOptions,
    *,
    world_size: int,
    num_layers: int,
    num_tokens: int,
    batches: Sequence[int],
    rules: Rules,
) -> SearchSpace:
    """Return the search space of a cluster and a number of layers.

    num_tokens : shortest sequence length of any layer, tokens.
    batches : global batch sizes.

    Raises OptionError if the options exclude every plan; the message names these options.
    """
    preset = PRESETS[options.search_space]
    stages = _stages(options, preset, world_size, num_layers, rules)
    if not stages:
        raise OptionError(
            f"no number of pipeline stages is possible for {world_size} GPUs and "
            f"{num_layers} layers",
            remedy="Check --max-pp-deg, --disable-pp, --pp-division and --pin pp=",
        )
    # union over all numbers of stages; degrees that do not divide the ranks of a stage have no row
    degrees = sorted({d for p in stages for d in divisors(world_size // p)})
    contexts = context_degrees(options, degrees, num_tokens)
    strategies = _strategies(options, preset, degrees, contexts)
    vocab = tuple(v for v in _vocab(options, preset, degrees, contexts) if rules.allows_vocab(v))
    if not strategies or not vocab:
        raise OptionError(
            "no strategy is possible for "
            + ("the layers" if not strategies else "embedding and head")
            + ". Check --sp-space, the --disable-* options, --pin and --forbid"
        )
    shards = sorted({s.tp * s.cp for s in strategies})
    types = _defaults(options)
    batch_rules = any(rule.kind == "batch" for rule in rules.rules)
    index: dict[Table, int] = {}
    candidates: list[tuple[int, int]] = []
    for p in stages:
        ranks = world_size // p
        data = [ranks // s for s in shards if ranks % s == 0]
        # skip multiples of smaller degrees: a batch with whole samples on more ranks has them on
        # fewer
        data = [d for d in data if not any(d % other == 0 for other in data if other < d)]
        # per g: True if some strategy has whole samples; pricing rejects the others row by row
        whole: dict[int, bool] = {}
        for batch in batches:
            for m in _microbatches(options, batch, p):
                g = batch // m
                if g not in whole:
                    whole[g] = any(g % d == 0 for d in data)
                if not whole[g] or (batch_rules and not rules.allows_batch(batch, m)):
                    continue
                for kind in types:
                    # with one reduction per step ZeRO-2 needs the memory of ZeRO-1, and fewer
                    # engines support it
                    if kind == "zero1" and "zero2" in types and m > 1 and options.async_grad_reduce:
                        continue
                    # batches of equal p and g share a table, which is priced once
                    at = index.setdefault((p, g, kind), len(index))
                    candidates.append((at, m))
    if not candidates:
        raise _no_batch(options, batches, stages, world_size, ruled=batch_rules)
    return SearchSpace(
        strategies=strategies,
        vocab=vocab,
        tables=tuple(index),
        candidates=tuple(candidates),
        uniform=preset.uniform or not options.fine_grained_mode,
        only_data_degree_1=options.disable_dp,
    )


def _defaults(options: SearchOptions) -> tuple[ZeroDefault, ...]:
    """Return the data-parallel types to search for layers without ZeRO-3."""
    if options.default_dp_type != "any":
        return (options.default_dp_type,)
    # ZeRO-1 only without `--memory-of`: Galvatron has no such setting, and the spaces of other
    # engines define the type that they use
    return ("ddp", "zero1", "zero2") if options.memory_of is None else ("ddp", "zero2")


def _stages(
    options: SearchOptions, preset: _Preset, world_size: int, num_layers: int, rules: Rules
) -> list[int]:
    # every stage has at least one layer
    most = min(num_layers, options.max_pp_deg or world_size)
    stages = [p for p in divisors(world_size) if p <= most]
    if options.disable_pp or preset.stages == "one":
        stages = [1]
    elif preset.stages == "largest":
        stages = stages[-1:]
    if options.pp_division is not None:
        if sum(options.pp_division) != num_layers:
            shown = " + ".join(map(str, options.pp_division))
            raise OptionError(
                f"--pp-division: {shown} = {sum(options.pp_division)} layers, "
                f"but the model has {num_layers}",
                remedy=f"Give the layers of each stage; their sum must be {num_layers}",
            )
        stages = [p for p in stages if p == len(options.pp_division)]
    return [p for p in stages if rules.allows_stages(p)]


def _kinds(options: SearchOptions) -> list[bool]:
    """Return the allowed kinds of tensor parallelism, as values of `ulysses`."""
    kinds = []
    if "tp" in options.sp_space.split("+") and not options.disable_tp:
        kinds.append(False)
    if "sp" in options.sp_space.split("+") and not options.disable_sp:
        kinds.append(True)
    return kinds


def _tensor(
    options: SearchOptions, preset: _Preset, degrees: Sequence[int]
) -> list[tuple[int, bool]]:
    """Return the (degree, ulysses) pairs of a layer."""
    # both kinds are equal at degree 1, so it is listed once
    pairs = [(1, False)]
    for ulysses in _kinds(options):
        most = options.max_sp_deg if ulysses else options.max_tp_deg
        pairs += [(t, ulysses) for t in degrees if 1 < t <= most]
    if preset.tensor == "one":
        pairs = [(1, False)]
    elif preset.tensor == "largest":
        largest = max(t for t, _ in pairs)
        pairs = [pair for pair in pairs if pair[0] == largest]
    return pairs


def _strategies(
    options: SearchOptions, preset: _Preset, degrees: Sequence[int], contexts: Sequence[int]
) -> tuple[LayerStrategy, ...]:
    zero3 = [z for z in preset.zero3 if not (z and options.disable_sdp)]
    checkpoint = [c for c in preset.checkpoint if not (c and options.disable_ckpt)]
    strided = [False, True] if options.strided_tp and not options.disable_tp_consec else [False]
    # tuples in the order of the fields sort as strategies do, and faster
    values = sorted(
        (t, u, c, z, k, r)
        for t, u in _tensor(options, preset, degrees)
        for c in contexts
        for z in zero3
        for k in checkpoint
        for r in strided
        # one rank has no stride, and only Megatron's tensor groups can have one
        if not (r and (t == 1 or u))
    )
    return tuple(
        LayerStrategy(tp=t, ulysses=u, cp=c, zero3=z, checkpoint=k, strided=r)
        for t, u, c, z, k, r in values
    )


def _vocab(
    options: SearchOptions, preset: _Preset, degrees: Sequence[int], contexts: Sequence[int]
) -> tuple[VocabStrategy, ...]:
    pairs = [(1, False)]
    if not options.disable_vtp and preset.tensor != "one":
        for ulysses in _kinds(options):
            off = (
                options.disable_embedding_lmhead_sp
                if ulysses
                else options.disable_embedding_lmhead_tp
            )
            if off:
                continue
            most = options.max_sp_deg if ulysses else options.max_tp_deg
            pairs += [(t, ulysses) for t in degrees if 1 < t <= most]
    zero3 = [
        z for z in (False, True) if not (z and (options.disable_sdp or preset.zero3 == (False,)))
    ]
    values = sorted((t, u, z, c) for t, u in pairs for z in zero3 for c in contexts)
    return tuple(VocabStrategy(tp=t, ulysses=u, zero3=z, cp=c) for t, u, z, c in values)


def _microbatches(options: SearchOptions, batch: int, stages: int) -> list[int]:
    if options.settle_chunk is not None:
        choices = [options.settle_chunk] if batch % options.settle_chunk == 0 else []
    else:
        choices = list(divisors(batch))
    fewest = fewest_microbatches("gpipe" if options.pipeline_type == "gpipe" else "1f1b", stages)
    return [m for m in choices if m >= fewest]


def _no_batch(
    options: SearchOptions,
    batches: Sequence[int],
    stages: Sequence[int],
    world_size: int,
    *,
    ruled: bool,
) -> OptionError:
    """Return the error if no batch can be divided.

    ruled : True if --pin or --forbid restrict batches.
    """
    if not batches:
        return OptionError(
            f"--min-bsz {options.min_bsz} to --max-bsz {options.max_bsz} contains no batch size",
            remedy="Use --max-bsz >= --min-bsz",
        )
    shown = ", ".join(map(str, batches[:4]))
    shown += f" and {len(batches) - 4} more" if len(batches) > 4 else ""
    problem = f"no searched global batch size ({shown})"
    # With any multiple of the GPUs, each GPU can have a whole sample.
    if options.settle_chunk is None and not ruled and all(one % world_size for one in batches):
        return OptionError(
            f"{problem} can be split evenly over {world_size} GPUs",
            remedy=f"Use --global-batch-size {batches[0] + -batches[0] % world_size}",
        )
    chunk = "" if options.settle_chunk is None else f" in {options.settle_chunk} micro-batches"
    pipelines = " or ".join(map(str, stages[:4])) + (" or more" if len(stages) > 4 else "")
    return OptionError(
        f"{problem}{chunk} is possible on {world_size} GPUs: it must be a multiple of "
        "micro-batches x data-parallel ranks, and 1F1B needs at least as many micro-batches as "
        f"stages ({pipelines})",
        remedy="Change --global-batch-size, --micro-batches or the batch of --pin",
    )


def check_batches(values: dict[str, Any]) -> None:
    """Complete `--min-bsz` or `--max-bsz` in `values` if only one of them is given.

    Raises OptionError if the range is empty, or if `--micro-batches` does not divide
    `--global-batch-size`.
    """
    low, high = values.get("min-bsz"), values.get("max-bsz")
    if low is not None and high is None:
        values["max-bsz"] = max(low, SearchOptions.max_bsz)
    elif high is not None and low is None:
        values["min-bsz"] = min(high, SearchOptions.min_bsz)
    elif low is not None and high is not None and low > high:
        raise OptionError(f"--min-bsz: {low} exceeds --max-bsz {high}")
    batch, chunks = values.get("global-batch-size"), values.get("micro-batches")
    if batch is not None and chunks is not None and batch % chunks:
        raise OptionError(
            f"--micro-batches: {chunks} does not divide --global-batch-size {batch} "
            f"({batch} % {chunks} = {batch % chunks})"
        )
