"""Obstacles of an engine: found exactly if the search has no launch, and true.

The search itself decides which launches are legal; the arithmetic of every rule is repeated here.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st

from autopar.errors import InputError
from autopar.pipeline.schedules import SCHEDULES, SHORT_NAMES
from autopar.price.assessment import Target
from autopar.rates.accuracy import load_accuracy
from autopar.rates.card import load_card
from autopar.rates.parts.operations import machine_of
from autopar.rates.stack import load_stack
from autopar.records import replace
from autopar.run.rules import Notice
from search.engines.candidate import Constraints, TrainingSettings
from search.engines.space import EngineContext, EngineSpace
from search.engines.table import spaces
from search.planning.uniform.best_first import UniformSearch
from search.planning.uniform.infeasibility import violated_rule
from tests.often import often
from tests.oracles.uniform import small_model

pytestmark = pytest.mark.whole

_CARDS = ("a100-80gb", "h100-80gb", "b200-180gb")
_TRAINED = (
    TrainingSettings(optimizer="adam8bit"),
    TrainingSettings(offload=1.0),
    TrainingSettings(lora_rank=8),
    TrainingSettings(lora_rank=8, lora_base="nf4"),
)
_WITHOUT_ZERO = {("megatron", 2), ("torchtitan", 1), ("accelerate", 1)}
_MEMORY = 1e15
"""Device memory in bytes that fits every launch."""


def _drawn(seed: int) -> tuple[EngineSpace, EngineContext, Constraints]:
    """Return an engine, a small job and values, many of which have no launch."""
    draw = random.Random(seed)
    engine = draw.choice([spaces()[0], *spaces()])
    job = EngineContext(
        name="small",
        model=small_model(draw),
        seq=draw.choice([1, 96, 512, 1000, 1024]),
        global_batches=draw.choice([(1,), (3,), (8,), (30,), (64,), (16, 32), (6, 7)]),
        world=draw.choice([1, 2, 8, 12, 16, 24]),
        gpu=draw.choice(_CARDS),
        domain=draw.choice([None, None, 4, 8]),
        training=draw.choice(
            [TrainingSettings(), TrainingSettings(), TrainingSettings(), *_TRAINED]
        ),
    )
    degrees: list[object] = [1, 1, 2, 2, 3, 4, 5, 8, 16]
    values: dict[str, list[object]] = {
        **dict.fromkeys(("tp", "cp", "pp", "dp", "ep", "etp", "vpp"), degrees),
        "micro_batch": [1, 2, 3, 4, 6, 16, 64],
        "schedule": ["1f1b", *SCHEDULES],
        "zero": [0, 1, 2, 3],
        "recompute": ["none", "full", "op", "block 1", "block 3", "core_attn", "mla_up_proj+moe"],
        "offload": ["none", "core_attn", "attn_norm", "expert_fc1+moe_act", "attn_proj+core_attn"],
        "dispatcher": ["alltoall", "flex"],
        "cp_kind": ["ring", "a2a", "all-gather"],
        "dp_replicate": [1, 2, 2, 3, 4],
    }
    given: dict[str, object] = {}
    for name in draw.sample(sorted(values), draw.randint(0, 4)):
        given[name] = tuple(draw.sample(values[name], draw.choice([1, 1, 2])))
    if draw.random() < 0.2:
        given["precision"] = (draw.choice(["fp8", "fp8-blockwise", "mxfp8", "nvfp4"]),)
    if draw.random() < 0.2:
        given["overlap_experts"] = draw.random() < 0.7
    if draw.random() < 0.2:
        given["tp_overlap"] = draw.random() < 0.7
    return engine, job, Constraints(**given)  # type: ignore[arg-type]


def _is_there(engine: EngineSpace, job: EngineContext, fixed: Constraints) -> bool:
    """Return True if the search finds a launch with unlimited memory."""
    machine = machine_of(load_card(job.gpu), load_stack(engine.stack))
    target = Target(machine=machine, accuracy=load_accuracy(), site_known=False, oom_risk=0.05)
    try:
        # any launch will do: of equally fast ones there may be many to price
        solved = UniformSearch(engine, job, target).solve(fixed, memory_bytes=_MEMORY, seconds=2.0)
    except InputError:
        return False
    return bool(solved.solutions)


def _no_layout(fixed: Constraints) -> bool:
    """Return True if the chunks allow no layer layout, which no rule states."""
    blocks = any(word.startswith("block") for word in fixed.recompute or ())
    chunks = fixed.schedule is not None and "1f1b" not in fixed.schedule
    return blocks or chunks or bool(fixed.vpp and set(fixed.vpp) != {1})


@often(60, 1500, st.integers(0, 10**6))
def test_there_is_an_obstacle_where_the_search_has_no_launch(seed: int) -> None:
    """There is none elsewhere. Its statement is true, and its advice has a launch."""
    engine, job, fixed = _drawn(seed)
    found = violated_rule(engine, job, fixed)
    there = _is_there(engine, job, fixed)
    if found is None:
        assert there or _no_layout(fixed)
        return
    assert is_true(found, engine, job), found
    if found.id in {rule.id for rule in engine.writable}:
        return  # of a model that no launch can name, which `choose` refuses before any search
    assert not there, found
    other = _changed(job, fixed, str(found.values.get("suggestion", "")))
    if other is not None:
        assert _is_there(engine, *other), found


def _changed(
    job: EngineContext, fixed: Constraints, remedy: str
) -> tuple[EngineContext, Constraints] | None:
    """Return the job and the values after a remedy; None without one."""
    names = {
        "micro-batch-size": "micro_batch",
        "global-batch-size": "global_batch",
        "cp-kind": "cp_kind",
        "offload-activations": "offload",
        "dp-replicate": "dp_replicate",
    }
    if not remedy:
        return None
    if remedy.startswith("Remove "):
        for option in re.findall(r"--([a-z-]+)", remedy):
            switches = {"moe-overlap": "overlap_experts", "no-moe-overlap": "overlap_experts"}
            name = {**names, **switches}.get(option, option.replace("-", "_"))
            free: Any = {name: None}
            fixed = replace(fixed, **free)
        return job, fixed
    if "moe-overlap" in remedy:
        return job, replace(fixed, overlap_experts="--no" not in remedy)
    if "tp-overlap" in remedy:
        return job, replace(fixed, tp_overlap="--no" not in remedy)
    found = re.fullmatch(r"Use --([a-z-]+) (.*)", remedy)
    assert found is not None, remedy
    option, texts = found.groups()
    name = names.get(option, option.replace("-", "_"))
    values = [word.strip("'") for word in texts.split(" or ")]
    # each value works, so the last one is taken
    last: Any = int(values[-1]) if values[-1].isdigit() else values[-1]
    if name == "global_batch":
        return replace(job, global_batches=(last,)), fixed
    if name == "schedule":
        last = next(one for one, short in SHORT_NAMES.items() if short == last)
    changed: Any = {name: (last,)}
    return job, replace(fixed, **changed)


# --------------------------------------------------------------------------------------------------
# Arithmetic


def is_true(found: Notice, engine: EngineSpace, job: EngineContext) -> bool:
    """Return True if a rule is broken by its own values, which must be those of the job."""
    model, values = job.model, found.values
    own = {
        "world": job.world,
        "heads": model.attention.heads,
        "seq_length": job.seq,
        "layers": model.num_layers,
        "experts": 0 if model.experts is None else model.experts.number,
        "largest_batch": max(job.global_batches),
    }
    assert all(values[name] == number for name, number in own.items() if name in values), found
    assert values.get("global_batch", job.global_batches[0]) in job.global_batches
    return _HOLDS[found.id](engine, job, SimpleNamespace(**values))


_Holds = Callable[[EngineSpace, EngineContext, Any], bool]
_ZERO_WITH_STAGES = {"megatron": (0, 1), "torchtitan": (2, 3)}
_REPLICATED = {"megatron": (1,), "deepspeed": (), "torchtitan": (2, 3), "accelerate": (2, 3)}


def _no_schedule(engine: EngineSpace, job: EngineContext, v: Any) -> bool:
    facts = SCHEDULES[v.schedule]
    rounds = getattr(v, "global_batch", 2 * v.pp)
    if hasattr(v, "global_batch"):
        rounds = v.global_batch // (v.micro_batch * v.dp)
    few = v.vpp < facts.least_chunks or v.vpp > (facts.most_chunks or v.vpp)
    short = rounds < (2 * v.pp if v.schedule == "dual_pipe_v" else v.pp)
    return engine.name not in facts.engines or few or short or rounds % v.pp != 0


def _no_products(engine: EngineSpace, job: EngineContext, v: Any) -> bool:
    lacking = {"h100-80gb": ("mxfp8", "nvfp4"), "a100-80gb": tuple(_LOW)}
    return (
        engine.name not in ("megatron", "torchtitan")
        or v.precision in lacking.get(job.gpu, ("fp8-blockwise",))
        or (engine.name == "torchtitan" and v.precision not in ("fp8", "mxfp8"))
    )


_LOW = ("fp8", "fp8-blockwise", "mxfp8", "nvfp4")
_HOLDS: dict[str, _Holds] = {
    "heads.tensor": lambda engine, job, v: v.heads % v.tp > 0,
    "kv-heads.whole": lambda engine, job, v: v.kv_heads % v.tp > 0,
    "kv-heads.copied": lambda engine, job, v: v.kv_heads % v.tp > 0 < v.tp % v.kv_heads,
    "ffn.tensor": lambda engine, job, v: job.model.ffn % v.tp > 0,
    "sequence.ring": lambda engine, job, v: v.cp > 1 and job.seq % (2 * v.cp) > 0,
    "sequence.tensor": lambda engine, job, v: v.cp == 1 and job.seq % v.tp > 0,
    "sequence.context": lambda engine, job, v: v.cp > 1 and job.seq % (2 * v.cp) > 0,
    "sequence.context-tensor": lambda engine, job, v: job.seq % (2 * v.cp * v.tp) > 0,
    "pipeline.layers": lambda engine, job, v: v.pp > v.layers,
    "pipeline.no-stages": lambda engine, job, v: v.vpp > 1 == v.pp,
    "pipeline.many-chunks": lambda engine, job, v: v.pp * v.vpp > v.layers,
    "pipeline.single": lambda engine, job, v: v.schedule != "1f1b" and v.pp == 1,
    "pipeline.schedule": _no_schedule,
    "pipeline.schedule-rounds": _no_schedule,
    "experts.none": lambda engine, job, v: job.model.experts is None and v.ep > 1,
    "experts.none-etp": lambda engine, job, v: job.model.experts is None and v.etp > 1,
    "experts.whole": lambda engine, job, v: v.experts % v.ep > 0,
    "experts.width": lambda engine, job, v: job.model.experts.width % v.etp > 0,  # type: ignore[union-attr]
    "batch.micro": lambda engine, job, v: v.micro_batch > v.largest_batch,
    "batch.whole": lambda engine, job, v: v.global_batch % (v.micro_batch * v.dp) > 0,
    "batch.stages": lambda engine, job, v: v.global_batch < v.micro_batch * v.dp * v.pp,
    "grid.dense": lambda engine, job, v: v.world % (v.tp * v.cp * v.pp) > 0,
    "grid.data": lambda engine, job, v: v.world != v.tp * v.cp * v.pp * v.dp,
    "grid.experts": lambda engine, job, v: v.world % (v.etp * v.ep * v.pp) > 0,
    "replicas.dp": lambda engine, job, v: v.dp % v.dp_replicate > 0,
    "replicas.alone": lambda engine, job, v: 1 < v.dp_replicate == v.dp * v.cp,
    "replicas.experts": lambda engine, job, v: (
        job.world // (v.pp * v.ep * v.etp) % v.dp_replicate > 0
    ),
    "recompute.blocks": lambda engine, job, v: (
        int(v.recompute.split()[1]) > v.layers - v.pp * v.vpp
    ),
    "engine.precision": _no_products,
    "engine.recompute": lambda engine, job, v: (
        (v.recompute == "op" and engine.name != "torchtitan")
        or (v.recompute not in ("none", "full", "op") and engine.name != "megatron")
        or (
            v.recompute == "mla_up_proj+moe"
            and (job.model.attention.latent is None or job.model.experts is None)
        )
    ),
    "engine.offload": lambda engine, job, v: (
        engine.name != "megatron"
        or (job.model.experts is None and {*v.offload.split("+")} >= {"expert_fc1", "moe_act"})
        or (job.model.attention.latent is None and v.offload == "attn_norm")
    ),
    "engine.context": lambda engine, job, v: engine.name == "deepspeed" and v.cp > 1,
    "engine.context-kind": lambda engine, job, v: engine.name != "megatron" and v.cp > 1,
    "engine.stages": lambda engine, job, v: engine.name not in _ZERO_WITH_STAGES and v.pp > 1,
    "engine.chunks": lambda engine, job, v: engine.name not in _ZERO_WITH_STAGES and v.vpp > 1,
    "engine.schedule": lambda engine, job, v: engine.name not in SCHEDULES[v.schedule].engines,
    "engine.experts": lambda engine, job, v: engine.name not in _ZERO_WITH_STAGES and v.ep > 1,
    "engine.expert-tensor": lambda engine, job, v: (
        (engine.name != "megatron" and v.etp not in (1, v.tp))
        or (engine.name not in _ZERO_WITH_STAGES and v.etp != v.tp)
    ),
    "engine.zero": lambda engine, job, v: (engine.name, v.zero) in _WITHOUT_ZERO,
    "engine.zero-stages": lambda engine, job, v: (
        v.pp > 1 and v.zero not in _ZERO_WITH_STAGES.get(engine.name, ())
    ),
    "engine.replicas": lambda engine, job, v: (
        v.dp_replicate > 1 and v.zero not in _REPLICATED.get(engine.name, (1,))
    ),
    "engine.dispatcher": lambda engine, job, v: v.dispatcher == "flex" and v.ep > 1,
    "engine.overlap-experts": lambda engine, job, v: engine.name != "megatron" and v.ep > 1,
    "engine.overlap-tensor": lambda engine, job, v: (
        engine.name != "megatron"
        or v.tp > (job.domain or job.world)
        or (job.domain or job.world) % v.tp > 0
    ),
    # constraints on a training, for all degrees
    "engine.training": lambda engine, job, v: job.training != TrainingSettings(),
    "megatron.window.rings": lambda engine, job, v: (
        engine.name == "megatron" and job.model.attention.window is not None
    ),
    "megatron.latent.rings": lambda engine, job, v: job.model.attention.latent is not None,
    "megatron.exchange.heads": lambda engine, job, v: v.heads % (v.tp * v.cp) > 0,
    "megatron.exchange.query-groups": lambda engine, job, v: v.query_groups % (v.tp * v.cp) > 0,
    "megatron.tp-overlap.links": lambda engine, job, v: v.domain % v.tp > 0,
    "megatron.connections.both": lambda engine, job, v: job.gpu != "b200-180gb" and v.tp_overlap,
    "megatron.offload.recompute": lambda engine, job, v: v.offload != "none" and v.whole_layers,
    "megatron.fsdp.stages": lambda engine, job, v: v.zero == 3 and v.pp > 1,
    "megatron.experts.biases": lambda engine, job, v: job.model.biases and v.etp > 1,
    "megatron.moe-overlap.virtual": lambda engine, job, v: v.pp > 1 == v.vpp,
    "megatron.moe-overlap.recompute": lambda engine, job, v: v.recomputed_experts,
    "megatron.moe-overlap.mtp": lambda engine, job, v: job.model.mtp > 1,
    "megatron.moe-overlap.mtp-stages": lambda engine, job, v: job.model.mtp == 1 == v.pp,
    "torchtitan.tied": lambda engine, job, v: job.model.tied and v.pp > 1,
    "torchtitan.ddp": lambda engine, job, v: v.zero == 0 and v.tp * v.cp * v.pp > 1,
    "torchtitan.fp32": lambda engine, job, v: v.zero > 0 and v.tp * v.pp > 1,
    "torchtitan.etp": lambda engine, job, v: v.etp not in (1, v.tp),
    "torchtitan.split-experts": lambda engine, job, v: v.ep == 1 and v.etp != v.tp,
    "torchtitan.ep.whole": lambda engine, job, v: v.ep % (v.cp * v.tp) > 0,
    "torchtitan.ep.tensor": lambda engine, job, v: v.etp == v.tp and v.ep % v.cp > 0,
    "torchtitan.ep.ranks": lambda engine, job, v: v.dp_shard * v.cp * v.tp % v.ep > 0,
    "torchtitan.ep.ranks-tensor": lambda engine, job, v: v.dp_shard * v.cp % v.ep > 0,
    "deepspeed.zero3-tensor": lambda engine, job, v: v.zero == 3 and v.tp > 1,
    "accelerate.context-shards": lambda engine, job, v: v.cp > 1,
    "accelerate.replicas-context": lambda engine, job, v: v.cp > 1 and v.dp_replicate > 1,
    "accelerate.replicas-tensor": lambda engine, job, v: v.tp > 1 and v.dp_shard == 1,
    "transformers.etp": lambda engine, job, v: v.etp != v.tp,
    "megatron.adapters.recipe": lambda engine, job, v: job.training.lora_rank > 0,
    **dict.fromkeys(
        (
            "transformers.base-experts",
            "deepspeed.adapters-tensor",
            "transformers.base-tensor",
            "accelerate.base-int8",
            "deepspeed.base-int8",
            "megatron.adapters.rank",
            "megatron.adapters.expert-rank",
            "megatron.adapters.fsdp",
            "megatron.adapters.tp-overlap",
        ),
        lambda engine, job, v: job.training.lora_rank is not None,
    ),
    **dict.fromkeys(
        ("megatron.adapters.base", "torchtitan.adapters.base"),
        lambda engine, job, v: job.training.lora_base != "bf16",
    ),
    "torchtitan.adapters.latent": lambda engine, job, v: (
        job.training.lora_rank == 8 and job.model.attention.latent is not None
    ),
    "torchtitan.adapters.fp8": lambda engine, job, v: v.fp8 and job.training.lora_rank == 8,
    "torchtitan.recipe.ddp": lambda engine, job, v: v.zero == 0 and job.training.lora_rank == 8,
    "torchtitan.recipe.copies": lambda engine, job, v: v.zero == 2 and v.dp_shard == v.cp == 1,
    "torchtitan.recipe.etp": lambda engine, job, v: v.ep > 1 and v.etp > 1,
    "torchtitan.recipe.chunks": lambda engine, job, v: job.seq % (8 * v.cp) > 0,
    # torchtitan has few models, and of small ones only those of torchtitan's tests
    "torchtitan.flavour": lambda engine, job, v: job.model.num_layers < 6 or job.model.hidden > 256,
    "transformers.model": lambda engine, job, v: v.model_name == "small" and v.unwritable,
    "transformers.latent": lambda engine, job, v: job.model.attention.latent is not None,
}
"""Id of an obstacle -> check that it holds, implemented again."""
