"""Rules of a run: one row each, with an id, the values that it reads and its arithmetic.

A row is evaluated on numbers, or on numpy arrays for all combinations at once. `broken` lists every
broken rule, `refuse` raises them, `holds_all` returns a mask, and `nearest` proposes other values.
The rules here apply to all engines; `search.engines.NAME.rules` adds those of one engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from msgspec import field

from autopar.errors import InputError, with_remedy
from autopar.records import Record

Level = Literal["illegal", "warned", "unpriced"]
Kind = Literal["illegal", "not priced", "no effect", "environment", "not understood", "read"]
Estimate = Literal["time", "memory"]
"""Estimate of a run: memory with its OOM probability, or step time."""
Values = Mapping[str, Any]
"""Values of a run by name; missing or None means unknown."""


class Rule(NamedTuple):
    """One rule: it holds where `rest` of the values `over` is 0, elementwise for arrays.

    `rest` uses only arithmetic and comparisons, so that it works on arrays: `a * b` is AND, `a + b`
    is OR, `a > b` is a AND NOT b. Zero values, such as `dp` of an uneven grid, are guarded in the
    arithmetic.
    """

    id: str
    """Stable name, such as `grid.dense`, used in JSON and errors."""
    over: tuple[str, ...]
    rest: Callable[..., Any]
    message: str
    """Message template with the values and `rest` in braces."""
    suggestion: str = ""
    """Suggested change, a sentence without a period."""
    source: str = ""
    """Source of the rule: file and release of the engine, or paper."""
    level: Level = "illegal"


_KINDS: Mapping[Level, Kind] = {
    "illegal": "illegal",
    "warned": "environment",
    "unpriced": "not priced",
}


class Notice(Record):
    """One finding: a broken rule, or a fact about a launch script."""

    id: str
    kind: Kind
    problem: str
    """Formatted message without a period; programs should read `id` and `values` instead."""
    values: Mapping[str, Any] = field(default_factory=dict)
    remedy: str = ""
    """Suggested change, a sentence without a period; empty if unknown."""
    withdraws: tuple[Estimate, ...] = ()
    """Estimates that are not given because of the argument `values["flag"]`."""

    @property
    def text(self) -> str:
        """Problem and remedy as one text."""
        return with_remedy(self.problem, self.remedy)

    @property
    def entry(self) -> dict[str, Any]:
        """JSON object of the notice without its kind; JSON output lists notices by kind."""
        entry = {"id": self.id, "values": {**self.values}, "text": self.text}
        return {**entry, "withdraws": [*self.withdraws]} if self.withdraws else entry

    @property
    def key(self) -> tuple[object, ...]:
        """Key that identifies the notice: its id and values."""
        return (self.id, *((name, str(value)) for name, value in self.values.items()))


class RuleError(InputError):
    """Error for a run that breaks rules; `broken` contains one notice per broken rule."""

    def __init__(self, broken: Sequence[Notice]) -> None:
        self.broken = tuple(broken)
        remedies = dict.fromkeys(one.remedy for one in self.broken if one.remedy)
        super().__init__("; ".join(one.problem for one in self.broken), remedy=". ".join(remedies))

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the broken rules."""
        return tuple(one.id for one in self.broken)


def notice(
    id: str,
    kind: Kind,
    message: str,
    suggestion: str = "",
    *,
    withdraws: tuple[Estimate, ...] = (),
    **values: Any,
) -> Notice:
    """Return a notice; `message` and `suggestion` are templates formatted with `values`."""
    return Notice(
        id=id,
        kind=kind,
        problem=message.format(**values),
        values=values,
        remedy=suggestion.format(**values),
        withdraws=withdraws,
    )


def without_repetitions(notices: Iterable[Notice]) -> tuple[Notice, ...]:
    """Return notices with distinct ids and values, in the order of their last occurrences."""
    return tuple({one.key: one for one in reversed([*notices])}.values())[::-1]


# --------------------------------------------------------------------------------------------------
# Evaluation


def _data_degree(world: Any, tp: Any, cp: Any, pp: Any) -> Any:
    return (world // (tp * cp * pp)) * (world % (tp * cp * pp) == 0)


DERIVED: Mapping[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "dp": (("world", "tp", "cp", "pp"), _data_degree),
    "dp_shard": (("world", "tp", "cp", "pp", "dp_replicate"),
                 lambda world, tp, cp, pp, replicate: world // (tp * cp * pp * replicate)),
}  # fmt: skip
"""Derived value -> (values that it is computed from, function). `dp` is 0 if the degrees do not
divide the world size."""


def _known(values: Values) -> Values:
    """Return the values, with those of `DERIVED` added where they can be computed."""
    found = dict(values)
    for name, (over, made) in DERIVED.items():
        given = [found.get(one) for one in over]
        if found.get(name) is None and all(one is not None for one in given):
            found[name] = made(*given)
    return found


def _given(rule: Rule, values: Values) -> list[Any] | None:
    """Return the values that a rule reads, or None if one of them is unknown."""
    found = []
    for name in rule.over:
        value = values.get(name)
        if value is None:
            return None
        found.append(value)
    return found


def holds_all(rules: Iterable[Rule], values: Values) -> Any:
    """Return True if no rule is broken; element by element if values are arrays.

    Rules that read an unknown value count as satisfied.
    """
    values = _known(values)
    found: Any = True
    for rule in rules:
        given = _given(rule, values)
        if given is not None:
            found = found & (rule.rest(*given) == 0)
    return found


def broken(rules: Iterable[Rule], values: Values) -> tuple[Notice, ...]:
    """Return one notice per rule that the known values break."""
    values = _known(values)
    found = []
    for rule in rules:
        given = _given(rule, values)
        if given is not None:
            rest = rule.rest(*given)
            if rest:
                found.append(_notice(rule, dict(zip(rule.over, given, strict=True)), rest))
    return tuple(found)


def _notice(rule: Rule, values: Values, rest: Any) -> Notice:
    return Notice(
        id=rule.id,
        kind=_KINDS[rule.level],
        problem=rule.message.format(**values, rest=rest),
        values=values,
        remedy=rule.suggestion,
    )


def refuse(rules: Iterable[Rule], values: Values) -> None:
    """Raise RuleError with all rules that the values break."""
    found = broken(rules, values)
    if found:
        raise RuleError(found)


_Value = TypeVar("_Value")


def nearest(
    rules: Sequence[Rule], values: Values, name: str, domain: Iterable[_Value]
) -> tuple[_Value, ...]:
    """Return the values of `domain` for `name` that break no rule, nearest to the current first.

    Integers are ordered by distance, the smaller first; other values keep the order of `domain`.
    """
    given = values.get(name)
    found = [one for one in domain if holds_all(rules, {**values, name: one})]
    if isinstance(given, int):
        found.sort(key=lambda one: (abs(one - given), one))  # type: ignore[operator]
    return tuple(found)


# --------------------------------------------------------------------------------------------------
# Degrees and ranks


GRID = (
    Rule("grid.dense", ("world", "tp", "cp", "pp"),
         lambda world, tp, cp, pp: world % (tp * cp * pp) + (world < 1),
         "world size({world}) % (tp({tp}) * cp({cp}) * pp({pp})) = {rest} != 0"),
    Rule("grid.experts", ("world", "etp", "ep", "pp"),
         # Without ep and etp the dense grid is the only one.
         lambda world, etp, ep, pp: (etp * ep > 1) * (world % (etp * ep * pp)),
         "world size({world}) % (etp({etp}) * ep({ep}) * pp({pp})) = {rest} != 0"),
)  # fmt: skip
WHOLE_GRID = Rule(
    "grid.data", ("world", "tp", "cp", "pp", "dp"),
    lambda world, tp, cp, pp, dp: world - tp * cp * pp * dp,
    "tp({tp}) * cp({cp}) * pp({pp}) * dp({dp}) != world size({world})",
)  # fmt: skip
"""Rule for the grid if the data-parallel degree is given."""
CONTEXT = (
    Rule("context.rings", ("rings", "cp", "heads_exchanged"),
         lambda rings, cp, exchanged: cp % rings + (rings > 1) * (exchanged == 0),
         "rings({rings}) need groups of cp({cp}) with all-to-all, and must "
         "divide cp"),
)  # fmt: skip
CHUNK_COUNTS = Rule("pipeline.chunks", ("chunk_counts",), lambda counts: counts != 1,
                    "the stages of a pipeline have different numbers of chunks")  # fmt: skip
EVEN_LAYERS = Rule(
    "layers.even", ("layers", "pp", "vpp"), lambda layers, pp, vpp: layers % (pp * vpp),
    "layers({layers}) % (pp({pp}) * chunks({vpp})) = {rest} != 0", "Use a pipeline layout",
)  # fmt: skip

# --------------------------------------------------------------------------------------------------
# Batch


BATCH = (
    # dp is 0 for an uneven grid, which another rule reports.
    Rule("batch.whole", ("global_batch", "micro_batch", "dp"),
         lambda batch, micro, dp: batch % (micro * dp + (dp == 0)) + (batch < 1),
         "global batch({global_batch}) % (micro batch({micro_batch}) * dp({dp})) = {rest} != 0"),
)  # fmt: skip

# --------------------------------------------------------------------------------------------------
# Heads and widths


HEADS = Rule("heads.tensor", ("heads", "tp"), lambda heads, tp: heads % tp,
             "heads({heads}) % tp({tp}) = {rest} != 0")  # fmt: skip
COPIED_KEYS = Rule(
    "kv-heads.copied", ("kv_heads", "tp"), lambda groups, tp: (groups % tp) * (tp % groups),
    "kv_heads({kv_heads}) and tp({tp}) do not divide each other",
)  # fmt: skip
"""Rule for engines that copy key-value heads when there are fewer heads than tensor ranks."""
WHOLE_KEYS = Rule("kv-heads.whole", ("kv_heads", "tp"), lambda groups, tp: groups % tp,
                  "kv_heads({kv_heads}) % tp({tp}) = {rest} != 0")  # fmt: skip
"""Rule for engines that do not copy key-value heads."""
FFN = Rule("ffn.tensor", ("ffn_hidden_size", "tp"), lambda ffn, tp: ffn % tp,
           "ffn_hidden_size({ffn_hidden_size}) % tp({tp}) = {rest} != 0")  # fmt: skip
WIDTHS = (
    HEADS,
    COPIED_KEYS,
    FFN,
    # The shared expert is split like a dense MLP, whatever the expert ranks.
    Rule("shared-expert.tensor", ("shared_expert_width", "tp"), lambda width, tp: width % tp,
         "shared_expert_width({shared_expert_width}) % tp({tp}) = {rest} != 0"),
    # Ulysses splits tokens and heads, never the width of the MLP.
    Rule("heads.ulysses", ("heads", "ulysses"), lambda heads, ulysses: heads % ulysses,
         "heads({heads}) % ulysses({ulysses}) = {rest} != 0"),
    Rule("kv-heads.ulysses", ("kv_heads", "ulysses"),
         lambda groups, ulysses: (groups % ulysses) * (ulysses % groups),
         "kv_heads({kv_heads}) and ulysses({ulysses}) do not divide each other"),
)  # fmt: skip

# --------------------------------------------------------------------------------------------------
# Sequence: a context-parallel rank holds two pieces, an early and a late one, to balance causal
# attention. Tensor ranks split the sequence only with sequence parallelism.


def _sequence(place: str, tp: str, ulysses: str, cp: str) -> tuple[Rule, ...]:
    """Return the rules on the sequence length of layers, or of embedding and head.

    place : prefix of the rule ids
    tp, ulysses, cp : names of the degrees
    """
    both = ("seq_length", cp, tp, "sequence_parallel")
    start = "seq_length({seq_length}) % "
    return (
        Rule(f"{place}.tensor", both, lambda s, c, t, sp: (c == 1) * sp * (s % t),
             f"{start}{tp}({{{tp}}}) = {{rest}} != 0"),
        Rule(f"{place}.ulysses", ("seq_length", cp, ulysses), lambda s, c, u: (c == 1) * (s % u),
             f"{start}{ulysses}({{{ulysses}}}) = {{rest}} != 0"),
        Rule(f"{place}.context", (*both, ulysses),
             lambda s, c, t, sp, u: (c > 1) * (sp * (t > 1) + (u > 1) == 0) * (s % (2 * c)),
             f"{start}(2 * {cp}({{{cp}}})) = {{rest}} != 0"),
        Rule(f"{place}.context-tensor", both,
             lambda s, c, t, sp: (c > 1) * (t > 1) * sp * (s % (2 * c * t)),
             f"{start}(2 * {cp}({{{cp}}}) * {tp}({{{tp}}})) = {{rest}} != 0"),
        Rule(f"{place}.context-ulysses", ("seq_length", cp, ulysses),
             lambda s, c, u: (c > 1) * (u > 1) * (s % (2 * c * u)),
             f"{start}(2 * {cp}({{{cp}}}) * {ulysses}({{{ulysses}}})) = {{rest}} != 0"),
    )  # fmt: skip


SEQUENCE = _sequence("sequence", "tp", "ulysses", "cp")
ENDS = _sequence("ends", "vtp", "vsp", "vcp")
"""Sequence rules of embedding and head; the vocabulary is padded and needs no rule."""
RING = Rule("sequence.ring", ("seq_length", "cp"), lambda s, cp: (cp > 1) * (s % (2 * cp)),
            "seq_length({seq_length}) % (2 * cp({cp})) = {rest} != 0")  # fmt: skip
"""Sequence rule of ring attention in every search, independent of tensor ranks."""
SHARED_SEQUENCE = Rule("sequence.shared", ("seq_length", "cp"), lambda s, c: s % c,
                       "seq_length({seq_length}) % cp({cp}) = {rest} != 0")  # fmt: skip
"""Sequence rule of every kind of context parallelism."""

# --------------------------------------------------------------------------------------------------
# Experts


WHOLE_EXPERTS = Rule("experts.whole", ("experts", "ep"), lambda experts, ep: experts % ep,
                     "experts({experts}) % ep({ep}) = {rest} != 0")  # fmt: skip
NO_EXPERTS = Rule("experts.none", ("experts", "ep"), lambda experts, ep: (experts == 0) * (ep > 1),
                  "ep({ep}) needs a model with experts")  # fmt: skip
NO_SPLIT_EXPERTS = Rule(
    "experts.none-etp", ("experts", "etp"), lambda experts, etp: (experts == 0) * (etp > 1),
    "etp({etp}) needs a model with experts",
)  # fmt: skip
EXPERT_WIDTH = Rule("experts.width", ("expert_width", "etp"), lambda width, etp: width % etp,
                    "ffn_hidden_size({expert_width}) % etp({etp}) = {rest} != 0")  # fmt: skip
EXPERTS = (NO_EXPERTS, NO_SPLIT_EXPERTS, WHOLE_EXPERTS, EXPERT_WIDTH)
_DELTA = "megatron/core/transformer/transformer_config.py (d98e8a64)"
_SPARSE = "megatron/core/transformer/experimental_attention_variant/dsa_cudnn_kernels.py (d98e8a64)"
_MIXERS = "megatron/core/ssm/mamba_mixer.py, mamba_context_parallel.py (d98e8a64)"
MIXER_HEADS = Rule(
    "mixer-heads.tensor", ("mixer_heads", "tp"), lambda heads, tp: heads % tp,
    "heads of a mixer({mixer_heads}) % tp({tp}) = {rest} != 0", source=_MIXERS,
)  # fmt: skip
SPARSE_PRECISION = Rule(
    "sparse.precision", ("sparse_heads", "precision"),
    lambda heads, precision: (heads > 0) * (precision != "bf16"),
    "{precision} with sparse attention is not priced", "Use bf16", _SPARSE,
)  # fmt: skip
MIXERS = (
    Rule("layer-inputs", ("layer_inputs",), lambda inputs: inputs,
         "embeddings of each layer, and keys and values of earlier layers, are not priced",
         "Use a model without them", "models/gemma4 (transformers 5.24)", level="unpriced"),
    MIXER_HEADS,
    Rule("mixer-heads.context", ("mixer_heads", "tp", "cp"),
         lambda heads, tp, cp: (cp > 1) * (heads % tp == 0) * (heads % (tp * cp)),
         "heads of a mixer({mixer_heads}) % (tp({tp}) * cp({cp})) = {rest} != 0",
         source=_MIXERS),
    Rule("mixer-groups.tensor", ("mixer_groups", "tp"), lambda groups, tp: groups % tp,
         "groups of a mixer({mixer_groups}) % tp({tp}) = {rest} != 0", source=_MIXERS),
    Rule("mixer-groups.context", ("mixer_groups", "tp", "cp"),
         # groups of a rank are copied where there are fewer of them than context ranks
         lambda groups, tp, cp: (groups % tp == 0) * ((groups // tp) % cp)
         * (cp % (groups // tp + (groups < tp))),
         "groups of a mixer({mixer_groups}) / tp({tp}) and cp({cp}) do not divide each other",
         source=_MIXERS),
    Rule("mixer-groups.heads", ("mixer_heads", "mixer_groups"),
         lambda heads, groups: heads % groups,
         "heads of a mixer({mixer_heads}) % its groups({mixer_groups}) = {rest} != 0",
         source=_MIXERS),
    *(Rule(f"delta-{heads}.tensor", (f"delta_{heads}", "tp"), lambda number, tp: number % tp,
           f"{heads[:-1]} heads of a gated delta net({{delta_{heads}}}) % tp({{tp}}) = "
           "{rest} != 0", source=_DELTA)
      for heads in ("keys", "values")),
    *(Rule(f"delta-{heads}.context", (f"delta_{heads}", "tp", "cp"),
           lambda number, tp, cp: (cp > 1) * (number % tp == 0) * (number % (tp * cp)),
           f"{heads[:-1]} heads of a gated delta net({{delta_{heads}}}) % "
           "(tp({tp}) * cp({cp})) = {rest} != 0", source=_DELTA)
      for heads in ("keys", "values")),
    Rule("delta-values.keys", ("delta_values", "delta_keys"), lambda values, keys: values % keys,
         "value heads of a gated delta net({delta_values}) % its key heads({delta_keys}) "
         "= {rest} != 0", source=_DELTA),
    Rule("sparse-heads.tensor", ("sparse_heads", "tp"),
         # of at most 64 heads per rank, or of whole tiles of 64
         lambda heads, tp: (heads % tp == 0) * ((heads // tp) % 64)
         * (64 % (heads // tp + 64 * (heads < tp))),
         "heads({sparse_heads}) / tp({tp}) and 64, the tile of sparse attention, do not divide "
         "each other", source=_SPARSE),
    Rule("sparse-latent", ("sparse_latent",), lambda width: (width > 0) * (width != 512),
         "sparse attention needs kv-lora-rank 512, not {sparse_latent}", source=_SPARSE),
    SPARSE_PRECISION,
    Rule("sparse.stages", ("reused_starts",), lambda number: number,
         "{reused_starts} chunks of stages begin with a layer that reuses the keys of an earlier "
         "layer", "Begin each with a layer that chooses keys",
         "megatron/core/models/gpt/experimental_attention_variant_module_specs.py (d98e8a64)"),
    Rule("sparse.context", ("sparse_heads", "cp", "cp_kind"), lambda heads, cp, kind:
         (heads > 0) * (cp > 1) * (kind != "all-gather"),
         "context ranks of sparse attention gather all keys, so {cp_kind} is impossible",
         "Use --cp-comm-type all_gather", _DELTA),
    *(Rule(f"torch-mixers.{name}", ("torch_mixers", degree),
           lambda mixers, degree: (mixers != "") * (degree > 1),
           f"{name} ranks with {{torch_mixers}} are not priced, got {degree}({{{degree}}})",
           level="unpriced")
      for name, degree in (("tensor", "tp"), ("context", "cp"))),
)  # fmt: skip
"""Rules of mixers: tensor ranks split heads and groups, context ranks exchange heads."""
MIXER_FP8 = Rule(
    "mixer.fp8", ("mixer_projected", "tp", "fp8"),
    lambda width, tp, fp8: fp8 * (width % tp == 0) * ((width // tp) % 16),
    "input projection of a mixer({mixer_projected}) / tp({tp}) is no multiple of 16, "
    "which fp8 needs", source=_MIXERS,
)  # fmt: skip
NO_HYBRID = Rule(
    "hybrid.engine", ("needs_megatron",), lambda needs: needs,
    "only Megatron-LM is priced with layers of one part, Mamba-2, gated delta nets, and gated or "
    "sparse attention", "Use --engine megatron",
)  # fmt: skip
"""Rule for engines whose hybrid models have no price."""
NO_WIDE_NORMS = Rule(
    "wide-norms.tensor", ("wide_norms", "tp"), lambda wide, tp: wide * (tp > 1),
    "with norms of queries and keys over all heads each tensor rank computes all heads, which is "
    "not priced, got tp({tp})", "Use --tp 1", "base_model_tp_plan of models/minimax_m2 and "
    "models/olmo2 (transformers 5.24)", level="unpriced",
)  # fmt: skip
"""Rule for engines that gather queries and keys for their norms."""
NO_TORCH_MIXERS = Rule(
    "torch-mixers.engine", ("torch_mixers",), lambda mixers: mixers != "",
    "Megatron-LM has no {torch_mixers}", "Use --engine accelerate or deepspeed",
    "megatron/core/models/hybrid/hybrid_layer_allocation.py (d98e8a64)",
)  # fmt: skip
NO_PATCHES = Rule(
    "patches.engine", ("patches",), lambda patches: patches,
    "models of images and videos are planned for scripts of transformers and diffusers alone",
    "Use --engine accelerate or deepspeed",
)  # fmt: skip
"""Rule for engines whose models read the tokens of a vocabulary."""
ANY = (HEADS, WHOLE_EXPERTS, *MIXERS)
"""Rules of every engine on sizes and degrees, for runs, candidates and layers of plans."""

# --------------------------------------------------------------------------------------------------
# Rules of a job in `autopar.price.step`


POSITIVE = (
    Rule("job.positive", ("name", "size"), lambda name, size: size < 1,
         "{name}({size}) is less than 1"),
)  # fmt: skip
JOB = (
    WHOLE_GRID,
    # A remainder would be tokens that are never trained.
    *BATCH,
    SHARED_SEQUENCE,
    Rule("grid.expert-ranks", ("tp", "cp", "dp", "ep", "etp"),
         lambda tp, cp, dp, ep, etp: tp * cp * dp % (ep * etp),
         "tp({tp}) * cp({cp}) * dp({dp}) % (ep({ep}) * etp({etp})) = {rest} != 0"),
    Rule("job.mtp", ("mtp_stages", "stage_mtp", "pp", "mtp"),
         lambda stages, found, pp, mtp: (stages != pp) + (found != mtp),
         "MTP layers({stage_mtp}) on stages({mtp_stages}) != {mtp} of the job "
         "on pp({pp})"),
    # Engines can count embedding and head as one layer each to fill the chunks.
    Rule("job.chunks", ("pp", "vpp", "layers"),
         lambda pp, vpp, layers: (pp > 1) * (pp * vpp > layers + 2),
         "pp({pp}) * chunks({vpp}) is more than the layers"),
)  # fmt: skip
BLOCK = (
    HEADS,
    MIXER_HEADS,
    WHOLE_EXPERTS,
    EXPERT_WIDTH,
)  # fmt: skip

# --------------------------------------------------------------------------------------------------
# Rules of a uniform run in `autopar.run.run.legal`


DEGREES = (*GRID, *CONTEXT, CHUNK_COUNTS)
PRECISION = (
    Rule("precision.fp8-fp4", ("fp8", "fp4"), lambda fp8, fp4: fp8 * fp4,
         "fp8 and fp4 cannot be combined"),
    Rule("precision.fp4-kind", ("fp4", "precision"), lambda fp4, kind: fp4 * (kind != "bf16"),
         "NVFP4 needs bf16, got {precision}"),
    Rule("precision.fp4-weights", ("fp4_weights", "fp4"), lambda weights, fp4: weights > fp4,
         "fp4 weights need fp4 GEMMs"),
)  # fmt: skip
OFFLOAD = (
    Rule("offload.fraction", ("offload_fraction",), lambda share: (share < 0) + (share > 1),
         "offloaded activation fraction({offload_fraction}): expected 0 to 1"),
    Rule("offload.counts", ("offload_layers", "offload_elements"),
         lambda layers, elements: (layers < 0) + (elements < 0),
         "numbers of offloaded layers and elements must be at least 0"),
    # Megatron-Core, transformer_config.py: attn_proj saves the output of core_attn.
    Rule("offload.projection", ("offload_modules",),
         lambda modules: ("attn_proj" in modules) > ("core_attn" in modules),
         "attn_proj is offloaded only together with core_attn", "Add core_attn"),
    Rule("offload.one-way", ("offload_modules", "offload_layers"),
         lambda modules, layers: (len(modules) > 0) * (layers > 0),
         "activations are offloaded by module or by layer, not both"),
    Rule("offload.stages", ("offload_layers", "pp"), lambda number, pp: (number > 0) * (pp > 1),
         "activation offload by layer needs pp 1, got pp({pp})"),
    Rule("offload.recompute", ("offload_layers", "recomputes"),
         lambda number, recomputes: (number > 0) * recomputes,
         "activation offload by layer cannot be combined with recomputation", "Remove one of them"),
    Rule("offload.all-layers", ("offload_layers", "layers"),
         lambda number, layers: (number > 0) * (number >= layers),
         "offloaded layers({offload_layers}) must be fewer than "
         "layers({layers})"),
    Rule("offload.engine", ("offloads", "torch"), lambda offloads, torch: offloads * torch,
         "activation offload by module or layer needs Megatron-Core"),
)  # fmt: skip
OPTIMIZER = (
    Rule("optimizer.offload-share", ("offload",), lambda share: (share < 0) + (share > 1),
         "offloaded optimizer fraction({offload}): expected 0 to 1"),
    Rule("optimizer.offload-weights", ("offload", "offload_weights"),
         lambda share, weights: weights * (share < 1),
         "weights are offloaded only with all optimizer states", "Set offload to 1"),
    Rule("optimizer.muon-host", ("optimizer", "offload"),
         lambda kind, share: (kind == "muon") * (share != 0),
         "optimizer offload needs Adam, not Muon"),
    Rule("optimizer.blocks", ("optimizer", "torch"),
         lambda kind, torch: (kind == "adam8bit") > torch,
         "Megatron-Core has no block-scaled 8-bit Adam", "Use 16-bit moments"),
    # Megatron-Core, optimizer/__init__.py
    Rule("optimizer.offload-sharded", ("offload", "zero", "torch"),
         lambda share, zero, torch: (share > 0) * (zero == 0) > torch,
         "optimizer offload needs the distributed optimizer"),
    Rule("optimizer.weights-device", ("offload_weights", "torch"),
         lambda weights, torch: weights > torch, "Megatron-Core does not offload weights"),
    Rule("optimizer.offload-whole", ("offload", "offload_weights", "keeper", "torch"),
         lambda share, weights, keeper, torch:
         torch * (share > 0) * (keeper != "deepspeed") > weights,
         "{keeper} offloads optimizer states only together with weights"),
    Rule("optimizer.offload-zero", ("offload", "keeper", "zero", "torch"),
         lambda share, keeper, zero, torch: torch * (share > 0) * (zero == 0),
         "{keeper} offloads sharded states only, and zero is 0"),
    Rule("adapters.muon", ("adapters", "optimizer"),
         lambda adapters, kind: adapters * (kind == "muon"),
         "adapters need Adam: Muon trains whole matrices"),
)  # fmt: skip
RUN = (
    *BATCH,
    SHARED_SEQUENCE,
    *ANY,
    Rule("layout.layers", ("misplaced_layers", "placed_layers", "layers"),
         lambda misplaced, placed, layers: misplaced,
         "layers of the layout({placed_layers}) != layers of the "
         "model({layers})"),
    *OFFLOAD,
    *OPTIMIZER,
)  # fmt: skip

# --------------------------------------------------------------------------------------------------
# Per-layer plans


LAYER = (
    *WIDTHS,
    *EXPERTS,
    *(one for one in ANY if one not in (*WIDTHS, *EXPERTS)),
    Rule("recompute.once", ("checkpoint", "recomputed"),
         lambda checkpoint, modules: checkpoint * (modules != ""),
         "the whole layer is recomputed, so {recomputed} cannot be recomputed "
         "separately", "Remove one of them"),
    *SEQUENCE,
)  # fmt: skip
LAYER_BATCH = (
    # A batch that the micro-batches do not divide breaks another rule.
    Rule("batch.samples", ("global_batch", "micro_batches", "dp"),
         lambda batch, micro, dp: (batch % micro == 0) * (batch % (micro * dp + (dp == 0))),
         "global batch({global_batch}) % (micro-batches({micro_batches}) * dp({dp})) = "
         "{rest} != 0"),
)  # fmt: skip
VOCABULARY_GRID = (
    Rule("grid.ends", ("world", "vtp", "vcp", "pp"), lambda world, vtp, vcp, pp:
         world % (vtp * vcp * pp),
         "world size({world}) % (vtp({vtp}) * vcp({vcp}) * pp({pp})) = {rest} != 0"),
)  # fmt: skip
PLAN = (
    Rule("plan.layers", ("plan_layers", "layers", "model"),
         lambda own, layers, model: own != layers,
         "layers of the plan({plan_layers}) != layers of {model}({layers})"),
    Rule("plan.stages", ("stage_entries", "pp"), lambda entries, pp: entries != pp,
         "entries of pp_division({stage_entries}) != pp({pp})"),
    Rule("plan.stage-sum", ("stage_terms", "stage_sum", "plan_layers"),
         lambda terms, found, layers: found != layers,
         "{stage_terms} = {stage_sum} != layers({plan_layers})"),
    Rule("pipeline.layers", ("pp", "plan_layers"), lambda pp, layers: pp > layers,
         "pp({pp}) > layers({plan_layers})"),
    Rule("grid.stages", ("world", "pp"), lambda world, pp: world % pp,
         "world size({world}) % pp({pp}) = {rest} != 0"),
    Rule("pipeline.full", ("schedule", "micro_batches", "fewest", "pp"),
         lambda schedule, number, fewest, pp: number < fewest,
         "{schedule} needs micro-batches({micro_batches}) >= {fewest} with pp({pp})"),
    Rule("pipeline.chunks-few", ("schedule", "vpp", "least_chunks"),
         lambda schedule, chunks, least: chunks < least,
         "{schedule} needs at least {least_chunks} chunks per stage, got "
         "num_chunks({vpp})"),
    Rule("pipeline.chunks-many", ("schedule", "vpp", "most_chunks"),
         lambda schedule, chunks, most: chunks > most,
         "{schedule} allows at most {most_chunks} chunks per stage, got "
         "num_chunks({vpp})"),
    Rule("pipeline.single", ("schedule", "pp"),
         lambda schedule, pp: (schedule != "1f1b") * (schedule != "gpipe") * (pp == 1),
         "{schedule} needs pp 2 or more, got pp({pp})"),
    # Micro-batches pass through the chunks in rounds of one per stage.
    Rule("pipeline.rounds", ("schedule", "micro_batches", "pp"),
         lambda schedule, number, pp:
         ((schedule == "interleaved") + (schedule == "interleaved_zero_bubble"))
         * (number >= pp) * (number % pp),
         "{schedule} needs micro-batches({micro_batches}) % pp({pp}) = {rest} "
         "to be 0"),
    Rule("batch.micro-batches", ("global_batch", "micro_batches"),
         lambda batch, number: batch % number,
         "global batch({global_batch}) % micro-batches({micro_batches}) = {rest} != 0"),
)  # fmt: skip
STAGE = (
    Rule("stage.empty", ("stage", "stage_layers"), lambda stage, layers: layers < 1,
         "stage {stage} has {stage_layers} layers, expected at least 1"),
    Rule("stage.even", ("stage", "stage_layers", "even_chunks"),
         lambda stage, layers, chunks: layers % chunks,
         "layers of stage {stage}({stage_layers}) % num_chunks({even_chunks}) = {rest} != 0"),
    Rule("stage.chunks", ("stage", "stage_layers", "chunk_layers"),
         lambda stage, layers, held: held != layers,
         "layers in chunks of stage {stage}({chunk_layers}) != layers of the "
         "stage({stage_layers})"),
)  # fmt: skip
CHUNKS = (
    Rule("chunk.entries", ("chunk_entries", "pp", "vpp"),
         lambda entries, pp, chunks: entries != pp * chunks,
         "entries of chunk_sizes({chunk_entries}) != pp({pp}) * num_chunks({vpp})"),
    Rule("chunk.negative", ("chunk", "chunk_size"), lambda chunk, size: size < 0,
         "chunk {chunk} has {chunk_size} layers, expected at least 0"),
)  # fmt: skip
