"""Why a trainer has no launch: said exactly where the search has none, and true.

The search itself says what is legal, and the arithmetic of every sentence is done here again.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from autopar.errors import InputError
from autopar.pipeline.schedules import SCHEDULES, SHORT_NAMES, Facts
from autopar.rates.accuracy import load_accuracy
from autopar.rates.card import load_card
from autopar.rates.parts.operations import machine_of
from autopar.rates.stack import load_stack
from autopar.records import replace
from search.check.assessment import Target
from search.engines.choice import Fixed, Training
from search.engines.space import EngineSpace, Job
from search.engines.spaces import ENGINES
from search.planning.uniform.obstacle import obstacle
from search.planning.uniform.solve import Uniform
from tests.often import often
from tests.oracles.uniform import small_model

_CARDS = ("a100-80gb", "h100-80gb", "b200-180gb")
_TRAINED = (
    Training(optimizer="adam8bit"),
    Training(offload=1.0),
    Training(lora_rank=8, lora_base="nf4"),
)
_WITHOUT_ZERO = {("megatron", 2), ("torchtitan", 1), ("accelerate", 1)}
_MEMORY = 1e15
"""Of a device on which everything fits."""


def _drawn(seed: int) -> tuple[EngineSpace, Job, Fixed]:
    """Return a trainer, a small job and values of which many are of no launch."""
    draw = random.Random(seed)
    engine = draw.choice([ENGINES[0], *ENGINES])
    job = Job(
        name="small",
        model=small_model(draw),
        seq=draw.choice([1, 96, 512, 1000, 1024]),
        global_batches=draw.choice([(1,), (3,), (8,), (30,), (64,), (16, 32), (6, 7)]),
        world=draw.choice([1, 2, 8, 12, 16, 24]),
        gpu=draw.choice(_CARDS),
        domain=draw.choice([None, None, 4, 8]),
        training=draw.choice([Training(), Training(), Training(), *_TRAINED]),
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
    return engine, job, Fixed(**given)  # type: ignore[arg-type]


def _is_there(engine: EngineSpace, job: Job, fixed: Fixed) -> bool:
    """Return whether the search finds a launch where memory is no matter."""
    machine = machine_of(load_card(job.gpu), load_stack(engine.stack))
    target = Target(machine=machine, accuracy=load_accuracy(), site_known=False, oom_risk=0.05)
    try:
        # any launch will do: of equally fast ones there may be many to price
        solved = Uniform(engine, job, target).solve(fixed, memory_bytes=_MEMORY, seconds=2.0)
    except InputError:
        return False
    return bool(solved.solutions)


def _no_layout(fixed: Fixed) -> bool:
    """Return whether chunks are asked for that layers may not lie in, which no rule says."""
    blocks = any(word.startswith("block") for word in fixed.recompute or ())
    chunks = fixed.schedule is not None and "1f1b" not in fixed.schedule
    return blocks or chunks or bool(fixed.vpp and set(fixed.vpp) != {1})


@often(60, 1500, st.integers(0, 10**6))
def test_there_is_an_obstacle_where_the_search_has_no_launch(seed: int) -> None:
    """And nowhere else; what it says is true, and what it advises has a launch."""
    engine, job, fixed = _drawn(seed)
    said = obstacle(engine, job, fixed)
    there = _is_there(engine, job, fixed)
    if said is None:
        assert there or _no_layout(fixed)
        return
    assert not there, said
    sentence, remedy = parted(said)
    assert is_true(sentence, engine, job), sentence
    other = _changed(job, fixed, remedy)
    if other is not None:
        assert _is_there(engine, *other), said


def parted(said: str) -> tuple[str, str]:
    """Return the sentence about one combination, and the remedy."""
    found = re.fullmatch(r"(.*?)(?:, and no other [a-z ,-]+ helps)?(?:; ((?:leave )?--.*))?", said)
    assert found is not None, said
    return found[1], found[2] or ""


def _changed(job: Job, fixed: Fixed, remedy: str) -> tuple[Job, Fixed] | None:
    """Return the job and the values that a remedy leaves; None without one."""
    names = {
        "micro-batch-size": "micro_batch",
        "global-batch-size": "global_batch",
        "cp-kind": "cp_kind",
        "offload-activations": "offload",
        "dp-replicate": "dp_replicate",
    }
    if not remedy:
        return None
    if remedy.startswith("leave "):
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
    found = re.fullmatch(r"--([a-z-]+) (.*) (does|do)", remedy)
    assert found is not None, remedy
    option, texts, _ = found.groups()
    name = names.get(option, option.replace("-", "_"))
    values = [word.strip("'") for word in texts.split(" or ")]
    # each of them does, so the last one
    last: Any = int(values[-1]) if values[-1].isdigit() else values[-1]
    if name == "global_batch":
        return replace(job, global_batches=(last,)), fixed
    if name == "schedule":
        last = next(one for one, short in SHORT_NAMES.items() if short == last)
    changed: Any = {name: (last,)}
    return job, replace(fixed, **changed)


# --------------------------------------------------------------------------------------------------
# Arithmetic


def is_true(sentence: str, engine: EngineSpace, job: Job) -> bool:
    """Return whether a sentence holds, by its own numbers and those of the job."""
    for pattern, holds in _SENTENCES:
        found = re.fullmatch(pattern, sentence)
        if found is not None:
            return holds(engine, job, *found.groups())
    raise AssertionError(f"nobody knows {sentence!r}")


def _product(words: str) -> int:
    """Return the product of `tp 2 * cp 4`, `2 * cp 3` or `7`."""
    number = 1
    for word in words.split(" * "):
        number *= int(word.split()[-1])
    return number


_Holds = Callable[..., bool]


def _named(title: str) -> Facts:
    return next(facts for facts in SCHEDULES.values() if facts.title == title)


def _divides(of: Callable[[Job], int]) -> _Holds:
    def holds(engine: EngineSpace, job: Job, words: str, product: str | None, whole: str) -> bool:
        number = _product(words)
        return (product is None or int(product) == number) and (
            int(whole) == of(job) and int(whole) % number != 0
        )

    return holds


_PRODUCT = r"((?:[a-z-]* ?\d+ \* )*[a-z-]* ?\d+)(?: = (\d+))?"
_SENTENCES: tuple[tuple[str, _Holds], ...] = (
    (f"{_PRODUCT} does not divide (\\d+) heads", _divides(lambda job: job.model.attention.heads)),
    (f"{_PRODUCT} does not divide (\\d+) GPUs", _divides(lambda job: job.world)),
    (f"{_PRODUCT} does not divide (\\d+) tokens", _divides(lambda job: job.seq)),
    (f"{_PRODUCT} does not divide (\\d+) experts", _divides(lambda job: job.model.experts.number)),  # type: ignore[union-attr]
    (
        f"{_PRODUCT} does not divide the (\\d+) GPUs of a stage",
        lambda engine, job, words, product, ranks: (
            _product(words) == int(product)
            and job.world % int(ranks) == 0
            and int(ranks) % int(product) != 0
        ),
    ),
    (
        f"{_PRODUCT} does not divide the global batch (\\d+)",
        lambda engine, job, words, product, batch: (
            _product(words) == int(product)
            and int(batch) in job.global_batches
            and int(batch) % int(product) != 0
        ),
    ),
    (
        f"{_PRODUCT} is not the (\\d+) GPUs",
        lambda engine, job, words, product, world: (
            _product(words) == int(product) != int(world) == job.world
        ),
    ),
    (
        r"global batch (\d+) / \(micro-batch (\d+) \* dp (\d+)\) = (\d+) .* fewer than pp (\d+)",
        lambda engine, job, batch, size, dp, number, pp: (
            int(batch) in job.global_batches
            and int(batch) == int(size) * int(dp) * int(number)
            and int(number) < int(pp)
        ),
    ),
    (
        r"micro-batch (\d+) is more than the global batch (\d+)",
        lambda engine, job, size, batch: int(size) > int(batch) == max(job.global_batches),
    ),
    (
        r"(?:\S+|Megatron-LM) has no (.*) schedule",
        lambda engine, job, title: engine.name not in _named(title).engines,
    ),
    (
        r"schedule (\S+) is of pipeline stages, and pp is 1",
        lambda engine, job, name: name != "1f1b",
    ),
    (
        r"(.*) has (\d)( or more)? chunks a stage, not (\d+)",
        lambda engine, job, title, least, more, chunks: (
            _named(title).least_chunks == int(least)
            and (int(chunks) < int(least) or (not more and chunks != least))
        ),
    ),
    (
        r".*: micro-batches\((\d+)\) % .*stages\((\d+)\) = (\d+) != 0",
        lambda engine, job, number, rounds, rest: int(number) % int(rounds) == int(rest) != 0,
    ),
    (
        r"DualPipeV needs as many micro-batches\((\d+)\) as .* 2 \* stages\((\d+)\) = (\d+)",
        lambda engine, job, number, stages, parts: int(number) < int(parts) == 2 * int(stages),
    ),
    (
        r"pp (\d+) is more than (\d+) layers",
        lambda engine, job, pp, layers: int(pp) > int(layers) == job.model.num_layers,
    ),
    (
        r"pp (\d+) \* vpp (\d+) = (\d+) chunks are more than (\d+) layers",
        lambda engine, job, pp, vpp, chunks, layers: (
            int(pp) * int(vpp) == int(chunks) > int(layers) == job.model.num_layers
        ),
    ),
    (
        r"vpp (\d+) is of chunks of pipeline stages, and pp is 1",
        lambda engine, job, vpp: vpp != "1",
    ),
    (
        r".* has no pipeline stages, and (?:pp is|vpp) (\d+).*",
        lambda engine, job, degree: engine.zero_with_stages == () and degree != "1",
    ),
    (
        r".* has no context degree, and cp is (\d+)",
        lambda engine, job, cp: engine.name == "deepspeed" and cp != "1",
    ),
    (
        r"(.*) has no context ranks of kind a2a, and cp is (\d+)",
        lambda engine, job, title, cp: engine.name != "megatron" and int(cp) > 1,
    ),
    (
        r"latent attention exchanges no heads.*",
        lambda engine, job: job.model.attention.latent is not None,
    ),
    (
        r".* has no copies of ZeRO stage (\d), and dp-replicate is (\d+)",
        lambda engine, job, zero, copies: (
            int(copies) > 1
            and int(zero) not in {"megatron": (1,), "deepspeed": ()}.get(engine.name, (2, 3))
        ),
    ),
    (
        r"dp-replicate (\d+) does not divide dp (\d+)",
        lambda engine, job, copies, dp: job.world % int(dp) == 0 and int(dp) % int(copies) != 0,
    ),
    (
        r"dp-replicate (\d+) leaves nothing to share of dp (\d+) \* cp (\d+)",
        lambda engine, job, copies, dp, cp: int(copies) == int(dp) * int(cp) > 1,
    ),
    (
        r"dp-replicate (\d+) does not divide edp (\d+) \(ep (\d+), etp (\d+)\)",
        lambda engine, job, copies, edp, ep, etp: (
            job.world % (int(edp) * int(ep) * int(etp)) == 0 and int(edp) % int(copies) != 0
        ),
    ),
    (
        r".* has no expert degree, and ep is (\d+)",
        lambda engine, job, ep: engine.name in ("deepspeed", "accelerate") and ep != "1",
    ),
    (
        r".* has no experts, and e(?:t)?p is (\d+)",
        lambda engine, job, ep: job.model.experts is None and ep != "1",
    ),
    (
        r"etp (\d+) is neither 1 nor tp (\d+)",
        lambda engine, job, etp, tp: etp not in ("1", tp),
    ),
    (
        r".* has no degrees of experts of their own: etp (\d+) is not tp (\d+)",
        lambda engine, job, etp, tp: etp != tp and not engine.experts,
    ),
    (
        r".* has no ZeRO stage (\d)",
        lambda engine, job, zero: (engine.name, int(zero)) in _WITHOUT_ZERO,
    ),
    (
        r".* has no ZeRO stage (\d) beside pp (\d+)",
        lambda engine, job, zero, pp: (
            int(pp) > 1 and int(zero) not in {"megatron": (0, 1), "torchtitan": (2, 3)}[engine.name]
        ),
    ),
    (
        r".* has no products in (\S+) on (\S+)",
        lambda engine, job, precision, gpu: (
            gpu == job.gpu
            and (
                not engine.schedules
                or gpu == "a100-80gb"
                or precision in {"h100-80gb": ("mxfp8", "nvfp4")}.get(gpu, ("fp8-blockwise",))
                or engine.name == "torchtitan"
            )
        ),
    ),
    (
        r".* does not recompute (.*) of small",
        lambda engine, job, word: (
            (word == "op" and engine.name != "torchtitan")
            or (word not in ("none", "full", "op") and engine.name != "megatron")
            or (
                word == "mla_up_proj+moe"
                and (job.model.attention.latent is None or job.model.experts is None)
            )
        ),
    ),
    (
        r"block (\d+) has to be fewer than .*, (\d+) at most of (\d+) in pp (\d+) \* vpp (\d+)",
        lambda engine, job, number, most, layers, pp, vpp: (
            int(layers) == job.model.num_layers
            and int(most) == int(layers) - int(pp) * int(vpp) + 1 <= int(number)
        ),
    ),
    (
        r".* does not put (\S+) of small on the host",
        lambda engine, job, words: (
            engine.name != "megatron"
            or (job.model.experts is None and {*words.split("+")} >= {"expert_fc1", "moe_act"})
            or (job.model.attention.latent is None and words == "attn_norm")
        ),
    ),
    (
        r"modules go to the host beside layers of which modules alone are recomputed",
        lambda engine, job: engine.name == "megatron",
    ),
    (
        r".* has no flex dispatcher on (\S+), and ep is (\d+)",
        lambda engine, job, gpu, ep: (
            (engine.name != "megatron" or gpu == "mi300x") and gpu == job.gpu and int(ep) > 1
        ),
    ),
    (
        r".* does not overlap exchanges of experts, and ep is (\d+)",
        lambda engine, job, ep: engine.name != "megatron" and int(ep) > 1,
    ),
    (
        r".* does not send beside products of tp (\d+) on (\S+)",
        lambda engine, job, tp, gpu: (
            engine.name != "megatron" or gpu == "mi300x" or int(tp) > (job.domain or job.world)
        ),
    ),
    (
        r".* has no (?:a2a|all-gather) of context ranks, and cp is (\d+)",
        lambda engine, job, cp: engine.name != "megatron" and int(cp) > 1,
    ),
    (
        r".* has no copies of ZeRO stage (\d), and dp-replicate is (\d+)",
        lambda engine, job, zero, number: (
            int(number) > 1
            and int(zero)
            not in {"megatron": (1,), "torchtitan": (2, 3), "accelerate": (2, 3)}.get(
                engine.name, ()
            )
        ),
    ),
    (
        r"dp-replicate (\d+) does not divide dp (\d+)",
        lambda engine, job, number, dp: int(dp) % int(number) != 0,
    ),
    (
        r"dp-replicate (\d+) leaves each of dp (\d+) \* cp (\d+) = (\d+) ranks alone",
        lambda engine, job, number, dp, cp, ranks: (
            1 < int(number) == int(dp) * int(cp) == int(ranks)
        ),
    ),
    (
        r"dp-replicate (\d+) does not divide the (\d+) ranks of the same experts",
        lambda engine, job, number, ranks: int(ranks) % int(number) != 0,
    ),
    # what the trainers themselves refuse
    (
        r"attention with a window has no rings",
        lambda engine, job: engine.name == "megatron" and job.model.attention.window is not None,
    ),
    (
        r"latent attention has rings alone: its queries and values differ in width",
        lambda engine, job: job.model.attention.latent is not None,
    ),
    (
        r"replicas beside tensor ranks need dp_shard_size above 1",
        lambda engine, job: engine.name == "accelerate",
    ),
    (
        r"heads of keys and values\((\d+)\) and tp\((\d+)\) do not divide each other",
        lambda engine, job, groups, tp: int(groups) % int(tp) > 0 < int(tp) % int(groups),
    ),
    (
        r"[^=]*\((\d+)\) % .*\((\d+)\) = (\d+) != 0",
        lambda engine, job, whole, part, rest: int(whole) % int(part) == int(rest) != 0,
    ),
    (r"Megatron-FSDP is not combined with pipeline stages", lambda engine, job: job.world > 1),
    (r"--overlap-moe-expert-parallel-comm .*", lambda engine, job: job.model.experts is not None),
    (r"experts with biases are not split over tensor ranks", lambda engine, job: job.model.biases),
    (r"tied embeddings have no pipeline", lambda engine, job: job.model.tied),
    (
        r"replicas alone \(DDP\) have no tensor, context or pipeline ranks beside them",
        lambda engine, job: engine.name == "torchtitan",
    ),
    (
        r"beside tensor and pipeline ranks alone \(dp_shard \* cp = 1\) it computes in fp32",
        lambda engine, job: engine.name == "torchtitan" and job.world > 1,
    ),
    (
        r"ZeRO-3 has no tensor ranks beside it, and tp is (\d+)",
        lambda engine, job, tp: engine.name == "deepspeed" and int(tp) > 1,
    ),
    (
        r"without expert ranks tensor ranks split the experts",
        lambda engine, job: engine.name == "torchtitan",
    ),
    (
        r"it has no degrees of experts of their own",
        lambda engine, job: not engine.experts,
    ),
    (
        r"layers of transformers with latent attention keep activations that nobody counts",
        lambda engine, job: job.model.attention.latent is not None,
    ),
    # what a launch is refused for, whatever its degrees
    (
        r"(?:\S+ has no (?:Adam with|ada)|states are offloaded|\S+ offloads |moments of ).*",
        lambda engine, job: job.training != Training(),
    ),
)
"""Sentences of obstacles, and what makes them true."""
