"""Small search questions for uniform plans, answered by pricing every launch.

Nothing here bounds or skips anything. All combinations of all values are tried. Those that an
engine refuses are excluded; for every other launch, the step is priced and each stage counted.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from autopar.errors import InputError
from autopar.pipeline.schedules import Schedule
from autopar.price.account import account_of, host_bytes_of
from autopar.price.assessment import Target
from autopar.price.job import job_of_run
from autopar.price.oom_risk import CONTEXT_BYTES, kind_of, reserve_share
from autopar.price.step import LayerTimeCache, step_time
from autopar.rates.accuracy import load_accuracy
from autopar.rates.card import load_card
from autopar.rates.parts.operations import machine_of
from autopar.rates.stack import load_stack
from autopar.records import replace
from autopar.run.architecture import (
    DeltaNet,
    Experts,
    Indexer,
    KimiDelta,
    LatentAttention,
    LightningAttention,
    Mamba,
    Mlp,
    Model,
    Recurrent,
    ShortConvolution,
    grouped,
    with_attention,
)
from autopar.run.run import Run
from search.engines.candidate import Candidate, Constraints, TrainingSettings
from search.engines.huggingface.space import SYNCED
from search.engines.space import EngineContext, EngineSpace, run_of, runs
from search.engines.table import engine_space, spaces
from search.planning.uniform.best_first import UniformSearch
from search.planning.uniform.cost_model import UniformCostModel
from search.planning.uniform.layout import layouts
from tests.runs import decoder

_CARDS = ("a100-80gb", "h100-80gb", "b200-180gb")


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A launch with its exact price."""

    choice: Candidate
    run: Run
    seconds: float
    """Step seconds per sequence."""
    peaks: tuple[int, ...]
    """Peak bytes of every stage."""
    host: float
    """Host bytes of the stage with the most of them."""

    def fits(self, target: Target) -> bool:
        return self.fits_device(target) and self.host <= _host_room(target)

    def fits_device(self, target: Target) -> bool:
        return target.oom_probability(self.run, max(self.peaks)) <= target.oom_risk


def _host_room(target: Target) -> float:
    return target.machine.card.more["host.memory_bytes"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Question:
    """A question that is small enough for exhaustive search."""

    seed: int
    uniform: UniformSearch
    fixed: Constraints
    memory_bytes: float
    """Device memory in bytes; depending on the instance ample, scarce or too small."""
    priced: tuple[Priced, ...]

    @cached_property
    def target(self) -> Target:
        found = self.uniform.target
        card = replace(found.machine.card, memory_bytes=self.memory_bytes)
        return replace(found, machine=replace(found.machine, card=card))

    @cached_property
    def best(self) -> Priced | None:
        """The fastest launch that fits."""
        fits = [one for one in self.priced if one.fits(self.target)]
        return min(fits, key=lambda one: one.seconds, default=None)

    @cached_property
    def least_on_host(self) -> float | None:
        """Least host bytes of the launches that fit on the device; None if none fits."""
        fits = [one for one in self.priced if one.fits_device(self.target)]
        return min((one.host for one in fits), default=None)

    @cached_property
    def smallest(self) -> int:
        """Bytes of the smallest peak of any launch."""
        return min(max(one.peaks) for one in self.priced)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def every_choice(prices: UniformCostModel, fixed: Constraints) -> Iterator[Candidate]:
    """Yield all combinations of the values that the user has not fixed, legal or not."""
    engine, job = prices.engine, prices.job
    model, world = job.model, job.world
    usual = ("all-gather",) if model.first_sparse else ("ring", "a2a")

    def left(values: object, name: str) -> list[object]:
        wanted = getattr(fixed, name)
        return [one for one in values if wanted is None or one in wanted]  # type: ignore[attr-defined]

    number = model.experts.number if model.experts else 1
    degrees = itertools.product(
        left(_divisors(world), "tp"),
        left(_divisors(world) if engine.context else [1], "cp"),
        left(_divisors(world) if engine.schedules else [1], "pp"),
        left([e for e in _divisors(world) if engine.experts and number % e == 0] or [1], "ep"),
        fixed.micro_batch or [1, 2, 4, 8, 16, 32, 64],
        job.global_batches,
        ["ring", "a2a", "all-gather"] if engine.name == "megatron" else ["ring"],
    )
    for tp, cp, pp, ep, size, batch, kind in degrees:
        if (cp == 1 and kind != "ring") or (cp > 1 and kind not in (fixed.cp_kind or usual)):
            continue
        if world % (tp * cp * pp) or model.attention.heads % tp or pp > model.num_layers:
            continue
        if cp > 1 and job.seq % (2 * cp):
            continue
        dp = world // (tp * cp * pp)
        micro_batches, rest = divmod(batch, size * dp)
        if (fixed.dp is not None and dp not in fixed.dp) or rest or micro_batches < pp:
            continue
        both = (False, True) if tp > 1 and engine.name == "megatron" else (False,)
        overlaps = [one for one in both if tp == 1 or fixed.tp_overlap in (None, one)]
        for etp, overlap in itertools.product(left(_splits(engine, job, tp), "etp"), overlaps):
            if (tp * cp * dp) % (ep * etp):
                continue
            one = Candidate(
                tp=tp, tp_overlap=overlap, cp=cp, cp_kind=kind, pp=pp, ep=ep, etp=etp,
                micro_batch=size, global_batch=batch,
            )  # fmt: skip
            yield from _settings(prices, one, fixed, micro_batches)


def _splits(engine: EngineSpace, job: EngineContext, tp: int) -> list[int]:
    """Return the expert tensor degrees of an engine for a tensor degree."""
    if job.model.experts is None:
        return [1]
    if engine.name == "megatron":
        return _divisors(job.world)
    return sorted({1, tp}) if engine.name == "torchtitan" else [tp]


def _settings(
    prices: UniformCostModel, one: Candidate, fixed: Constraints, micro_batches: int
) -> Iterator[Candidate]:
    engine, job = prices.engine, prices.job
    spread = one.ep > 1
    zeros = engine.zero if one.pp == 1 else engine.zero_with_stages
    if job.world == one.tp * one.pp == one.ep * one.etp * one.pp and fixed.zero is None:
        # without data ranks all shardings are one launch: the first one counts
        zeros = [
            zero
            for zero in zeros
            if prices.has(one.precision, zero) and runs(engine, job, replace(one, zero=zero))
        ][:1]
    for precision, dispatcher, overlap, (zero, copies), (schedule, vpp) in itertools.product(
        [p for p in engine.precisions(job.gpu) if p in fixed.precision],
        [d for d in engine.dispatchers(job.gpu) if not fixed.dispatcher or d in fixed.dispatcher]
        if spread
        else ["alltoall"],
        [o for o in (False, True) if fixed.overlap_experts in (None, o)]
        if spread and engine.overlaps_experts
        else [False],
        [
            (z, copies)
            for z in zeros
            for copies in _copies(engine, job, one, z)
            if (fixed.zero is None or z in fixed.zero)
            and (fixed.dp_replicate is None or copies in fixed.dp_replicate)
        ],
        [
            (schedule, v)
            for schedule, v in _pipelines(engine, job, one.pp, micro_batches)
            if (fixed.vpp is None or v in fixed.vpp)
            and (fixed.schedule is None or schedule in fixed.schedule)
        ],
    ):
        choice = replace(
            one, precision=precision, dispatcher=dispatcher, overlap_experts=overlap, zero=zero,
            vpp=vpp, schedule=schedule, dp_replicate=copies, compiled=engine.compiled,
        )  # fmt: skip
        try:
            unit = prices.unit(choice)
        except InputError:
            continue
        times = unit.layer_s, unit.first_s, unit.end_s
        found = layouts(
            *times, one.pp, vpp, mtp=job.model.mtp, any_layout=engine.any_layout, schedule=schedule,
            reused=job.model.reused,
        )  # fmt: skip
        for layout in found:
            words = [*engine.recompute(job.model)]
            if engine.blocks:
                longest = max(len(chunk.layers) for stage in layout for chunk in stage)
                words += [f"block {n}" for n in range(1, longest)]
            for word, hosted in itertools.product(words, _hosted(engine, job.model)):
                if fixed.recompute is not None and word not in fixed.recompute:
                    continue
                if fixed.offload is None or hosted in fixed.offload:
                    yield replace(choice, chunks=layout, recompute=word, offload=hosted)


def _hosted(engine: EngineSpace, model: Model) -> list[str]:
    """Return the modules of a layer whose activations an engine can offload."""
    if engine.name != "megatron":
        return ["none"]
    modules = [] if model.first_sparse else ["core_attn", "qkv_linear", "attn_proj"]
    modules += ["attn_norm"] if model.attention.latent else []
    modules += ["mlp_norm", "expert_fc1", "moe_act"] if model.experts else []
    found = ["none"]
    for size in range(1, len(modules) + 1):
        for some in itertools.combinations(sorted(modules), size):
            if "attn_proj" not in some or "core_attn" in some:
                found.append("+".join(some))
    return found


def _copies(engine: EngineSpace, job: EngineContext, one: Candidate, zero: int) -> list[int]:
    """Return the numbers of HSDP replicas; each replica has at least two ranks."""
    known = {"megatron": (1,), "torchtitan": (2, 3), "accelerate": (2, 3), "deepspeed": ()}
    if zero not in known[engine.name]:
        return [1]
    dp = job.world // (one.tp * one.cp * one.pp)
    edp = job.world // (one.ep * one.etp * one.pp) if job.model.experts else dp
    return [1] + [n for n in _divisors(dp) if 1 < n < dp * one.cp and edp % n == 0]


def _pipelines(
    engine: EngineSpace, job: EngineContext, stages: int, micro_batches: int
) -> Iterator[tuple[Schedule, int]]:
    """Yield the schedules and rounds of an engine's pipeline with `stages` stages."""
    if stages == 1:
        yield "1f1b", 1
        return
    torch = engine.name == "torchtitan"
    most = job.model.num_layers // stages
    # torch's rounds may be longer than there are stages
    rounds = max(1, micro_batches // stages) if torch else stages
    for chunks in range(1, most + 1):
        if chunks == 1:
            yield "1f1b", 1
            if torch:
                yield "gpipe", 1
            continue
        if micro_batches % rounds == 0:
            yield "interleaved", chunks
        if torch:
            yield "looped_bfs", chunks
            if micro_batches % rounds == 0:
                yield "interleaved_zero_bubble", chunks
            if chunks == 2:
                yield "zero_bubble_v", 2
                if micro_batches >= 2 * stages:
                    yield "dual_pipe_v", 2


def priced(uniform: UniformSearch, fixed: Constraints) -> tuple[Priced, ...]:
    """Return every launch with its exact price."""
    prices, job = uniform.prices, uniform.job
    machine = uniform.target.machine
    known = LayerTimeCache(machine)
    found = []
    for choice in every_choice(prices, fixed):
        try:
            run = run_of(uniform.engine, job, choice)
            step = replace(job_of_run(run), attended=job.attended)
            if job.skew is not None:
                step = replace(step, skew=job.skew)
            seconds = step_time(machine, step, known).total_s / choice.global_batch
        except InputError:
            continue
        peaks = tuple(account_of(run, stage).peak_bytes for stage in range(choice.pp))
        host = max(host_bytes_of(run, account_of(run, stage)) for stage in range(choice.pp))
        found.append(Priced(choice=choice, run=run, seconds=seconds, peaks=peaks, host=host))
    return tuple(found)


def _tight_for_hosted(target: Target, every: tuple[Priced, ...]) -> float | None:
    """Return the memory at which a launch with activation offload is the fastest that fits."""

    def needs(one: Priced) -> float:
        share = reserve_share(kind_of(one.run), target.oom_risk)
        return max(one.peaks) * (1.0 + share) * 1.000001 + CONTEXT_BYTES

    least = min(needs(one) for one in every)
    for one in sorted(every, key=lambda one: one.seconds):
        least_before = [needs(other) for other in every if other.seconds < one.seconds]
        if one.choice.offload != "none" and least < needs(one) < min(least_before, default=0.0):
            return needs(one)
    return None


# --------------------------------------------------------------------------------------------------
# Questions


def small_model(draw: random.Random) -> Model:
    layers = draw.choice([2, 3, 4, 4, 6, 8])
    heads, width = draw.choice([(4, 64), (8, 64), (8, 128), (16, 64)])
    hidden = draw.choice([512, 1024, 2048])
    mixture = draw.random() < 0.55
    latent = None
    if draw.random() < 0.25:
        query_rank = draw.choice([None, 256])
        latent = LatentAttention(query_rank=query_rank, kv_rank=128, key_width=64, rotary_width=32)
    experts = None
    kinds = [False] * layers
    if mixture:
        experts = Experts(
            number=draw.choice([4, 8, 16]),
            per_token=draw.choice([1, 2, 4]),
            width=draw.choice([256, 512]),
            shared_width=draw.choice([0, 0, 512]),
        )
        dense = draw.choice([0, 0, 1])
        every = draw.choice([1, 1, 2])
        kinds = [at >= dense and at % every == every - 1 for at in range(layers)]
        kinds[-1] = True
    window = draw.choice([None, None, 256])
    return decoder(
        layers=layers,
        hidden=hidden,
        width=draw.choice([1024, 2048, 4096]),
        heads=heads,
        kv_heads=heads if latent else draw.choice([heads, max(1, heads // 4)]),
        head_width=width,
        value_width=64 if latent else None,
        head_norms=draw.random() < 0.4,
        latent=latent,
        window=None if latent else window,
        whole_every=draw.choice([0, 2]),
        attention_dropout=0.0,
        vocab=draw.choice([2000, 32000, 50257]),
        mixtures=kinds,
        experts=experts,
        gated=True,
        biases=draw.random() < 0.2 and not mixture,
        qkv_biases=True,
        tied=draw.random() < 0.3,
        norm=draw.choice(["layer", "rms"]),
        positions="rotary",
        dropout=draw.choice([0.0, 0.0, 0.1]),
        mtp=draw.choice([0, 0, 0, 1]),
    )


def small_hybrid(draw: random.Random) -> Model:
    """Return a model with Mamba-2 or gated delta nets; its layers have one part, or some both."""
    plain = small_model(draw)
    whole = plain.last
    attention = whole.attention
    assert attention is not None
    mixer: Recurrent = Mamba(
        heads=draw.choice([4, 8, 16]),
        width=64,
        state=draw.choice([64, 128]),
        groups=draw.choice([2, 4]),
        chunk=draw.choice([64, 128]),
    )
    if draw.random() < 0.5:
        keys = draw.choice([4, 8])
        mixer = DeltaNet(
            key_heads=keys, value_heads=keys * draw.choice([1, 2]), key_width=64, value_width=128
        )
        if attention.latent is None:
            whole = with_attention(whole, replace(attention, gated=draw.random() < 0.5))
        if draw.random() < 0.5:
            every = (replace(whole, mixers=(mixer,)), replace(whole, mixers=(mixer,)), whole)
            return replace(plain, layers=grouped(every)[0], repeat=draw.choice([1, 2, 3]))
    parts = {
        "*": replace(whole, mlp=None, norms=1),
        "M": replace(whole, mixers=(mixer,), mlp=None, norms=1),
        "-": replace(whole, mixers=(), mlp=Mlp(width=1024, gated=True), norms=1),
        "E": replace(whole, mixers=(), norms=1),
    }
    kinds = "M*-E" if whole.experts is not None else "M*-"
    letters = "".join(draw.choices(kinds, k=draw.choice([3, 4, 6, 8]))) + "*"
    if whole.experts is not None:
        letters += draw.choice(["", "E", "M"])
    groups, repeat = grouped(tuple(parts[letter] for letter in letters))
    block = (parts["*"], parts["E"]) if "E" in letters else ()
    return replace(
        plain, layers=groups, repeat=repeat, mtp_block=block if plain.mtp else (), tied=plain.tied
    )


def small_sparse(draw: random.Random) -> Model:
    """Return a model with sparse attention, with or without a loss of its indexer."""
    plain = small_model(draw)
    latent = LatentAttention(query_rank=256, kv_rank=512, key_width=64, rotary_width=32)
    indexer = Indexer(
        heads=draw.choice([4, 8]),
        width=64,
        topk=draw.choice([256, 1024]),
        trained=draw.random() < 0.7,
    )
    groups = []
    for group in plain.layers:
        old = group.layer.attention
        assert old is not None
        attention = replace(
            old, kv_heads=old.heads, width=96, value_width=64, latent=latent, indexer=indexer,
            window=None, head_norms="head", gated=False,
        )  # fmt: skip
        layer = replace(with_attention(group.layer, attention), biases=False)
        groups.append(replace(group, layer=layer))
    each = [one.layer for one in groups for _ in range(one.count)] * plain.repeat
    layers, repeat = grouped(tuple(each))
    return replace(plain, layers=layers, repeat=repeat)


def small_reused(draw: random.Random) -> Model:
    """Return a model with sparse attention in which layers reuse keys of earlier ones."""
    plain = small_sparse(draw)
    first, every = draw.choice([1, 2]), draw.choice([2, 3])
    each = []
    for place, layer in enumerate(plain.each_layer):
        attention = layer.attention
        assert attention is not None
        assert attention.indexer is not None
        reused = max(place + 1 - first, 0) % every > 0
        own = replace(attention.indexer, every=every, reused=reused)
        each.append(with_attention(layer, replace(attention, indexer=own)))
    groups, repeat = grouped(tuple(each))
    # an MTP layer chooses its keys
    block = () if any(one == each[-1] for one in each[:first]) else (each[0],)
    return replace(plain, layers=groups, repeat=repeat, mtp_block=block if plain.mtp else ())


def small_wide(draw: random.Random) -> Model:
    """Return a model with norms of queries and keys over all heads."""
    plain = small_model(draw)
    groups = []
    for group in plain.layers:
        attention = group.layer.attention
        assert attention is not None
        own = replace(attention, head_norms="all", latent=None)
        own = replace(own, width=own.value_width, kv_heads=own.heads // 2)
        groups.append(replace(group, layer=with_attention(group.layer, own)))
    return replace(plain, layers=tuple(groups))


def small_convolution(draw: random.Random) -> Model:
    """Return a model of transformers with short convolutions or lightning attention."""
    plain = replace(small_wide(draw), mtp=0, mtp_block=(), dropout=0.0)
    whole = plain.last
    attention = whole.attention
    assert attention is not None
    whole = with_attention(whole, replace(attention, head_norms="head", window=None))
    mixer: Recurrent = ShortConvolution(width=whole.hidden, kernel=3, biases=whole.biases)
    if draw.random() < 0.5:
        mixer = LightningAttention(heads=draw.choice([4, 8]), width=64, chunk=128)
    short = replace(whole, mixers=(mixer,))
    dense = replace(short, mlp=Mlp(width=1024, gated=True))
    every = draw.choice([(short, whole), (dense, short, whole), (dense, short, short, whole)])
    groups, repeat = grouped(every * draw.choice([1, 2]))
    return replace(plain, layers=groups, repeat=repeat)


def small_shared(draw: random.Random) -> Model:
    """Return a model of Gemma 4's kind: wide heads without a window whose keys are values."""
    plain = replace(small_wide(draw), mtp=0, mtp_block=(), dropout=0.0)
    whole = plain.last
    attention = whole.attention
    assert attention is not None
    narrow = replace(attention, head_norms="head", value_norms=True, window=256)
    wide = replace(
        narrow, width=4 * narrow.width, value_width=4 * narrow.width, window=None,
        kv_heads=draw.choice([1, narrow.kv_heads]), keys_as_values=draw.random() < 0.7,
    )  # fmt: skip
    norms, more = (7, 4) if whole.experts is not None else (4, 0)
    whole = replace(whole, biases=False, norm="rms", norms=norms, fp32_norms=True, elementwise=more)
    narrows = (with_attention(whole, narrow),) * draw.choice([1, 2, 5])
    groups, repeat = grouped((*narrows, with_attention(whole, wide)) * draw.choice([1, 2]))
    return replace(plain, layers=groups, repeat=repeat, capped_logits=draw.random() < 0.5)


def small_kimi(draw: random.Random) -> Model:
    """Return a model with Kimi delta attention, and latent attention without positions."""
    plain = replace(small_wide(draw), mtp=0, mtp_block=(), dropout=0.0, positions="none")
    whole = replace(plain.last, biases=False, norm="rms", elementwise=draw.choice([0, 2]))
    old = whole.attention
    assert old is not None
    latent = LatentAttention(query_rank=None, kv_rank=128, key_width=64, rotary_width=32)
    own = replace(
        old, kv_heads=old.heads, width=96, value_width=64, latent=latent, window=None,
        head_norms="head", qkv_biases=False, rotary_share=0.0,
    )  # fmt: skip
    whole = with_attention(whole, own)
    mixer = KimiDelta(heads=draw.choice([4, 8, 16]), width=draw.choice([64, 128]))
    delta = replace(whole, mixers=(mixer,))
    dense = replace(delta, mlp=Mlp(width=1024, gated=True))
    groups, repeat = grouped((dense, delta, whole, delta, whole)[draw.choice([0, 1]) :])
    return replace(plain, layers=groups, repeat=repeat)


def _some(draw: random.Random, values: list[int], most: int) -> tuple[int, ...]:
    return tuple(sorted(draw.sample(values, min(most, len(values)))))


Kind = Literal[
    "plain", "hybrid", "sparse", "reused", "wide", "convolution", "shared", "kimi", "packed",
    "recipe", "tuned", "synced", "narrow",
]  # fmt: skip
"""Kind of questions: of Megatron-LM's models alone, of those of transformers alone (`wide`,
`convolution`, `shared`, `kimi`), of torchtitan's adapters (`recipe`), or of optimizers of
fine-tuning (`tuned`). Gradients that accelerate reduces after each micro-batch are `synced`, GEMMs
of 8 and 4 bits in Megatron-LM `narrow`."""
TUNED: tuple[tuple[str, TrainingSettings], ...] = (
    *(
        ("deepspeed", TrainingSettings(optimizer=name))
        for name in ("lion", "paged-adam8bit", "sgd", "adafactor", "adam8bit", "paged-adam")
    ),
    *(
        ("accelerate", TrainingSettings(optimizer=name))
        for name in ("lion", "paged-adam8bit", "adafactor", "adam8bit", "sgd")
    ),
    *(
        ("accelerate", TrainingSettings(optimizer=name, pure_bf16=True))
        for name in ("adam", "adam8bit", "adafactor", "paged-lion")
    ),
    ("torchtitan", TrainingSettings(pure_bf16=True)),
    ("megatron", TrainingSettings(sft=True)),
    ("deepspeed", TrainingSettings(offload=1.0)),
)
"""Engine and settings of the questions of kind `tuned`."""
_OF_MEGATRON = {"hybrid": small_hybrid, "sparse": small_sparse, "reused": small_reused}
"""Models of Megatron-LM alone, by kind."""
_OF_TRANSFORMERS = {
    "wide": small_wide,
    "convolution": small_convolution,
    "shared": small_shared,
    "kimi": small_kimi,
}
"""Models of transformers alone, by kind."""


def question(seed: int, *, most: int = 120, kind: Kind = "plain") -> Question:
    """Return a random question with at most `most` launches; kind : of its model."""
    draw = random.Random(seed if kind == "plain" else f"{kind} {seed}")
    while True:
        found = _drawn(seed, draw, most, kind)
        if found is not None:
            return found


def _drawn(seed: int, draw: random.Random, most: int, kind: Kind) -> Question | None:
    engine = draw.choice([spaces()[0], spaces()[0], *spaces()])
    model = small_model(draw)
    schedules: tuple[Schedule, ...] | None = None
    stages = [1, 2, 3, 4]
    zero: tuple[int, ...] | None = None
    training = TrainingSettings(lora_rank=8) if kind == "recipe" else _training(seed)
    if kind == "recipe":
        engine, model = engine_space("torchtitan"), replace(model, tied=seed % 4 == 0)
        schedules = tuple(draw.sample(engine.schedules, 3))
    elif kind == "tuned":
        # a multiple of 8 has no other settings
        name, training = TUNED[seed % len(TUNED)]
        engine, seed = engine_space(name), seed * 8
    elif kind == "synced":
        engine, stages, training = SYNCED, [1], TrainingSettings(pure_bf16=seed % 2 == 0)
    elif kind == "narrow":
        engine, training = spaces()[0], TrainingSettings()
    elif kind in _OF_MEGATRON:
        if training.lora_rank is not None or seed % 8 == 2:
            seed, training = seed + 1, _training(seed + 1)
        engine, model = spaces()[0], _OF_MEGATRON[kind](draw)
    elif kind in _OF_TRANSFORMERS:
        engine, stages = engine_space(draw.choice(["deepspeed", "accelerate"])), [1]
        model, training = _OF_TRANSFORMERS[kind](draw), TrainingSettings()
        if kind == "shared" and seed % 3 == 0:
            training = TrainingSettings(lora_rank=8)
    elif seed % 4 == 3 and training in (TrainingSettings(), TrainingSettings(offload=1.0)):
        # only one engine has many schedules, so few of them are drawn; it has neither adapters nor
        # 8-bit moments
        engine, model, stages = engine_space("torchtitan"), replace(model, tied=False), [2, 3, 4]
        schedules = tuple(draw.sample(engine.schedules, 3))
    if (
        kind not in ("recipe", "synced", *_OF_TRANSFORMERS)
        and seed % 4 == 1
        and (engine is not spaces()[0] or model.experts is None)
    ):
        # limits the questions of mixtures with all remedies
        return None
    if engine.name == "torchtitan" and random.Random(seed).random() < 0.4:
        # as far as these schedules are supported
        engine = engine_space("torchtitan", compiled=True)
        schedules = tuple(s for s in schedules or engine.schedules if s in engine.schedules)
    card = draw.choice(_CARDS)
    world = draw.choice([4, 8, 8, 16, 24, 32, 64])
    copies = draw.choice([None, None, (1,), (2, 4)])
    if seed % 8 == 2 and kind == "plain":
        # several nodes, each of which can hold a replica
        engine, world, stages, zero = engine_space("torchtitan"), 64, [1], (3,)
        copies = draw.choice([None, (1, 8), (1, 2, 8)])
    seq = draw.choice([512, 1024, 2048])
    if seed % 4 == 0:
        # with this number of tokens, tensors are large enough to be offloaded
        seq *= 4
    batches = draw.choice([(64,), (48,), (32, 64), (128,)])
    job = EngineContext(
        name="small", model=model, seq=seq, global_batches=batches, world=world, gpu=card,
        skew=draw.choice([None, None, 1.3]), training=training,
        domain=random.Random(f"links {seed}").choice([None, 2, 4, 8]),
        attended=seq * random.Random(seed).uniform(0.02, 0.9) if kind == "packed" else None,
    )  # fmt: skip
    words = [*engine.recompute(model)]
    if engine.blocks:
        words += ["block 1", "block 2"]
    fixed = Constraints(
        tp=_some(draw, [1, 2, 4], 2),
        cp=_some(draw, [1, 2, 2], 2),
        tp_overlap=draw.choice([None, True, False]),
        cp_kind=draw.choice([None, None, ("ring", "all-gather"), ("a2a",)]),
        pp=_some(draw, stages, 2),
        schedule=schedules,
        ep=_some(draw, [1, 2, 4, 8], 2),
        etp=_some(draw, [1, 2, 3, 4], 2) if model.experts and engine is spaces()[0] else None,
        micro_batch=_some(draw, [1, 2, 3, 4, 6], 2),
        recompute=tuple(draw.sample(words, min(3, len(words)))),
        offload=("none",),
        precision=("bf16", "fp8") if draw.random() < 0.2 else ("bf16",),
        dispatcher=draw.choice([None, ("flex",), ("alltoall",)]),
        overlap_experts=None if seed % 4 == 1 else draw.choice([None, False]),
        zero=zero or draw.choice([None, None, None, (1, 2), (3,)]),
        dp_replicate=copies,
    )
    if kind == "narrow":
        card = draw.choice(_CARDS[1:])
        narrow = [one for one in engine.precisions(card) if one != "bf16"]
        job, fixed = replace(job, gpu=card), replace(fixed, precision=(draw.choice(narrow),))
    target = Target(
        machine=machine_of(load_card(card), load_stack(engine.stack)),
        accuracy=load_accuracy(),
        site_known=False,
        oom_risk=draw.choice([0.01, 0.05]),
    )
    uniform = UniformSearch(engine, job, target)
    number = sum(1 for _ in itertools.islice(every_choice(uniform.prices, fixed), most + 1))
    if not 4 <= number <= most:
        return None
    fixed = replace(fixed, offload=_offloads(seed, engine, model))
    every = priced(uniform, fixed)
    if not every:
        return None
    uniform = UniformSearch(engine, job, _on_host(seed, target, every))
    return Question(
        seed=seed,
        uniform=uniform,
        fixed=fixed,
        memory_bytes=_memory(draw, target, every),
        priced=every,
    )


def _offloads(seed: int, engine: EngineSpace, model: Model) -> tuple[str, ...]:
    """Return the modules that may be offloaded: none, or some sets, for MoE mostly experts."""
    draw = random.Random(f"modules on the host {seed}")
    sets = _hosted(engine, model)[1:]
    if not sets or draw.random() < 0.2:
        return ("none",)
    some = tuple(draw.sample(sets, min(draw.choice([2, 3]), len(sets))))
    return some if draw.random() < 0.2 else ("none", *some)


def _on_host(seed: int, target: Target, every: tuple[Priced, ...]) -> Target:
    """Return a target with host memory for only some launches in most cases, or for all."""
    draw = random.Random(f"memory of the host {seed}")
    sizes = sorted({one.host for one in every if one.host})
    if not sizes or draw.random() < 0.3:
        return target
    some = sizes[0] if draw.random() < 0.6 else draw.choice(sizes)
    card = target.machine.card
    more = card.more | {"host.memory_bytes": some * draw.choice([0.99, 0.99, 1.01])}
    return replace(target, machine=replace(target.machine, card=replace(card, more=more)))


def _training(seed: int) -> TrainingSettings:
    """Return, for every eighth question, adapters, 8-bit states or optimizer offload."""
    kinds = (
        TrainingSettings(lora_rank=8),
        TrainingSettings(optimizer="adam-bf16"),
        TrainingSettings(lora_rank=16, lora_base="nf4"),
        TrainingSettings(offload=1.0),
    )
    return kinds[seed // 8 % len(kinds)] if seed % 8 == 7 else TrainingSettings()


def _memory(draw: random.Random, target: Target, every: tuple[Priced, ...]) -> float:
    """Return device memory in bytes: in three of six questions it binds, in one nothing fits."""
    fullest = sorted(max(one.peaks) for one in every)
    kind = draw.randrange(6)
    if kind >= 4:
        # about the peak of the first of the fastest launches that fit only with activation offload
        tight = _tight_for_hosted(target, every)
        if tight is not None:
            return tight
    if kind == 0:
        return 0.9 * fullest[0]
    if kind <= 3:
        # about the peak of one of them plus context and reserve
        return 1.1 * draw.choice(fullest) + (1 << 30)
    return target.machine.card.memory_bytes
