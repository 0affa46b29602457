"""`autopar check`: launches are understood, broken ones found, better ones are what they claim."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest

from autopar.price.account import Account, account_of
from autopar.price.assessment import Assessment, Target, Timing, assess
from autopar.price.job import job_of_run
from autopar.price.oom_risk import (
    PEAK_RATIOS,
    kind_of,
    oom_probability_at,
    probability_of_ratio,
    rarely_validated,
    reserved_interval,
    reserved_range,
)
from autopar.price.step import step_time
from autopar.records import replace
from autopar.run.architecture import Attention, Experts, LatentAttention, Mlp
from autopar.run.job import Block, Job
from autopar.run.run import Run
from benchmarks.memory_goldens import Priced, intervals_of, price_row, read_goldens
from benchmarks.published_peaks import published_peaks
from benchmarks.published_recipes import RECIPES, Recipe, target as place
from search.check import alternatives
from search.check.alternatives import BestChanges, ChangedRun, neighbours_of
from search.commands import check
from search.engines.changes import MOVES
from search.engines.megatron.read import read_run
from search.engines.space import keeps_stages_busy
from search.engines.table import read_checked
from tests.step_cases import machine_named

LLAMA: dict[str, Any] = {
    "--num-layers": 80,
    "--hidden-size": 8192,
    "--ffn-hidden-size": 28672,
    "--num-attention-heads": 64,
    "--group-query-attention": True,
    "--num-query-groups": 8,
    "--seq-length": 8192,
    "--max-position-embeddings": 8192,
    "--position-embedding-type": "rope",
    "--normalization": "RMSNorm",
    "--swiglu": True,
    "--disable-bias-linear": True,
    "--untie-embeddings-and-output-weights": True,
    "--vocab-size": 128256,
    "--attention-dropout": 0.0,
    "--hidden-dropout": 0.0,
    "--micro-batch-size": 1,
    "--global-batch-size": 32,
    "--tensor-model-parallel-size": 4,
    "--sequence-parallel": True,
    "--pipeline-model-parallel-size": 4,
    "--bf16": True,
    "--use-distributed-optimizer": True,
    "--overlap-grad-reduce": True,
    "--no-create-attention-mask-in-dataloader": True,
}
"""Llama 3 70B on 64 GPUs."""
MIXTURE: dict[str, Any] = {
    **{flag: value for flag, value in LLAMA.items() if flag != "--untie"},
    "--num-layers": 32,
    "--hidden-size": 4096,
    "--ffn-hidden-size": 14336,
    "--num-attention-heads": 32,
    "--num-experts": 8,
    "--moe-router-topk": 2,
    "--moe-token-dispatcher-type": "alltoall",
    "--expert-model-parallel-size": 8,
    "--expert-tensor-parallel-size": 1,
    "--tensor-model-parallel-size": 2,
    "--pipeline-model-parallel-size": 1,
}


def with_flags(arguments: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return arguments with others; None takes one out."""
    found = dict(arguments)
    for name, value in changes.items():
        flag = "--" + name.replace("_", "-")
        found.pop(flag, None)
        if value is not None:
            found[flag] = value
    return found


def written(folder: Path, arguments: Mapping[str, Any], name: str = "launch.json") -> str:
    """Write arguments to a file."""
    path = folder / name
    path.write_text(json.dumps(arguments), encoding="utf-8")
    return str(path)


# --------------------------------------------------------------------------------------------------
# A launch as a job.


def test_a_launch_is_the_job_that_somebody_would_write() -> None:
    """Field by field, for a dense model in chunks of layers."""
    arguments = with_flags(
        LLAMA,
        num_layers_per_virtual_pipeline_stage=5,
        context_parallel_size=2,
        tp_comm_overlap=True,
    )
    job = job_of_run(read_run(arguments, world_size=64).run)
    attention = Attention(heads=64, kv_heads=8, width=128, value_width=128)

    assert job == Job(
        name="arguments",
        blocks=tuple(
            Block(
                number=20,
                hidden=8192,
                attention=attention,
                mlp=Mlp(width=28672, gated=True),
                recompute=frozenset(),
            )
            for _ in range(4)
        ),
        vocab=128512,
        seq=8192,
        micro_batch=1,
        global_batch=32,
        gpus=64,
        tp=4,
        cp=2,
        pp=4,
        dp=2,
        vpp=4,
        stage_layers=(20, 20, 20, 20),
        sequence_parallel=True,
        zero=1,
        gradient_bytes=4.0,
    )


def test_mixtures_and_latents() -> None:
    """Experts, the layers before them, what tokens all visit; compressed keys, queries or not."""
    arguments = with_flags(
        MIXTURE,
        moe_layer_freq="([0]*2+[1]*30)",
        moe_shared_expert_intermediate_size=2048,
        moe_ffn_hidden_size=1408,
        multi_latent_attention=True,
        group_query_attention=None,
        num_query_groups=None,
        kv_lora_rank=512,
        qk_head_dim=128,
        qk_pos_emb_head_dim=64,
        v_head_dim=128,
    )
    dense, mixture = job_of_run(read_run(arguments, world_size=64).run).blocks

    assert (dense.number, mixture.number) == (2, 30)
    assert dense.mlp == Mlp(width=14336, gated=True)
    assert mixture.mlp == Experts(number=8, per_token=2, width=1408, gated=True, shared_width=2048)
    assert mixture.attention is not None
    assert mixture.attention.width == 192
    latent = LatentAttention(query_rank=None, kv_rank=512, key_width=128, rotary_width=64)
    assert mixture.attention.latent == latent


def test_queries_that_are_projected_at_once_take_as_long_as_their_product() -> None:
    """Of the same widths, without the narrow product and its norm in front."""
    machine = machine_named()

    def gemm_s(rank: int | None) -> float:
        flags = {"multi_latent_attention": True, "group_query_attention": None}
        sizes = {"kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64}
        given = with_flags(LLAMA, **flags, **sizes, v_head_dim=128, q_lora_rank=rank)
        job = job_of_run(read_run(given, world_size=64).run)
        return step_time(machine, job).terms_s["gemm"]

    # 8192 x 12288 at once, or 1536 x (8192 + 12288)
    assert gemm_s(1536) < gemm_s(None)


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [
        ({"recompute_granularity": "full", "recompute_method": "uniform"}, [(20, "full")] * 4),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 3,
                "num_layers_per_virtual_pipeline_stage": 10,
            },
            [(3, "full"), (7, frozenset()), (3, "full"), (7, frozenset())] * 4,
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
            [(20, frozenset({"mlp"}))] * 4,
        ),
    ],
)
def test_recomputed_layers_are_those_of_every_chunk(
    flags: dict[str, Any], numbers: list[tuple[int, Any]]
) -> None:
    """All of them, the first of each chunk, or modules of all."""
    run = read_run(with_flags(LLAMA, **flags), world_size=64).run
    assert [(block.number, block.recompute) for block in job_of_run(run).blocks] == numbers


# --------------------------------------------------------------------------------------------------
# Findings.


@pytest.mark.parametrize(
    ("base", "changes", "found"),
    [
        (LLAMA, {"num_attention_heads": 62}, "heads.tensor"),
        (LLAMA, {"num_query_groups": 6}, "kv-heads.copied"),
        (LLAMA, {"global_batch_size": 34}, "batch.whole"),
        (LLAMA, {"context_parallel_size": 5}, "grid.dense"),
        (LLAMA, {"num_layers": 78}, "layers.even"),
        (LLAMA, {"num_layers_per_virtual_pipeline_stage": 3}, "megatron.layers.chunk"),
        (MIXTURE, {"expert_model_parallel_size": 3}, "experts.whole"),
        (MIXTURE, {"expert_tensor_parallel_size": 16}, "grid.experts"),
        (MIXTURE, {"sequence_parallel": None}, "megatron.experts.sequence-parallel"),
        (MIXTURE, {"overlap_moe_expert_parallel_comm": True, "recompute_modules": ["moe"],
                   "recompute_granularity": "selective"}, "megatron.moe-overlap.recompute"),
        (LLAMA, {"context_parallel_size": 2, "cp_comm_type": "a2a+p2p"},
         "megatron.cp-comm-type-a2a+p2p.needs.hierarchical-context-parallel-sizes"),
        (LLAMA, {"tensor_model_parallel_size": 1}, "megatron.no-effect sequence-parallel"),
        (LLAMA, {"expert_tensor_parallel_size": 2},
         "megatron.no-effect expert-tensor-parallel-size"),
        (LLAMA, {"recompute_num_layers": 1}, "megatron.no-effect recompute-num-layers"),
        (LLAMA, {"overlap_param_gather": True, "use_distributed_optimizer": None},
         "megatron.overlap-param-gather.needs.sharded"),
        (LLAMA, {"pipeline_model_parallel_layout": "Et*3|tL"}, "megatron.layout"),
        (LLAMA, {"some_new_switch": 7}, "megatron.unknown some-new-switch"),
        (LLAMA, {"seq_length": "$SEQ"}, "read.unpriced"),
        (LLAMA, {"use_megatron_fsdp": True}, "read.unpriced"),
    ],
)  # fmt: skip
def test_broken_launches_are_found(
    base: dict[str, Any], changes: dict[str, Any], found: str, tmp_path: Path
) -> None:
    """Each by its id, and the flag where a rule is about any; the launch itself breaks none."""
    path = written(tmp_path, with_flags(base, **changes))
    findings = read_checked(path, world_size=64, gpu="h100-80gb").findings
    ident, _, flag = found.partition(" ")
    named = {
        (one.id, str(one.values["flag"]) if flag else "") for one in findings if one.id == ident
    }
    assert named == {(ident, flag)}, findings


def test_a_good_launch_has_nothing_to_be_found(tmp_path: Path) -> None:
    """Both, and its arguments of logging are counted."""
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    for arguments in (LLAMA, MIXTURE):
        document = {"MODEL_ARGS": {**arguments, "--lr": 1e-4}, "ENV_VARS": environment}
        file = read_checked(written(tmp_path, document), world_size=64, gpu="h100-80gb")
        assert file.findings == ()
        assert [entry.flag for entry in file.harmless] == ["lr"]


def test_launches_that_ran_are_not_called_illegal(tmp_path: Path) -> None:
    """Megatron-LM's own tests, every configuration whose memory was measured: all are priced."""
    rows = {row["config_key"]: row for row in read_goldens()}
    ran = 0
    for row in rows.values():
        entry = price_row(row)
        if isinstance(entry, Priced) and row["world_size"]:
            ran += 1
            # the table leaves out what memory does not depend on
            arguments = json.loads(row["args"])
            if "--use-megatron-fsdp" in arguments:
                arguments["--ckpt-format"] = "fsdp_dtensor"
            elif "--overlap-param-gather-with-optimizer-step" in arguments:
                arguments["--ckpt-format"] = "torch"
            path = written(tmp_path, {"MODEL_ARGS": arguments})
            file = read_checked(path, world_size=int(row["world_size"]), gpu=row["platform"])
            assert [one.text for one in file.findings if one.kind == "illegal"] == [], row["id"]
    assert ran > 60


@pytest.mark.parametrize(
    ("value", "gpu", "said"),
    [
        ("8", "h100-80gb", "set CUDA_DEVICE_MAX_CONNECTIONS=1 (is 8)"),
        (None, "a100-80gb", "set CUDA_DEVICE_MAX_CONNECTIONS=1: "),
        (None, "gb200", None),
        ("8", "b200", None),
    ],
)
def test_what_the_environment_has_to_say(
    value: str | None, gpu: str, said: str | None, tmp_path: Path
) -> None:
    """Devices before Blackwell need one connection where ranks exchange inside of layers."""
    variables = {} if value is None else {"CUDA_DEVICE_MAX_CONNECTIONS": value}
    path = written(tmp_path, {"MODEL_ARGS": LLAMA, "ENV_VARS": variables})
    found = [one.text for one in read_checked(path, world_size=64, gpu=gpu).findings]
    assert bool(found) == (said is not None)
    assert all(said is not None and text.startswith(said) for text in found)


# --------------------------------------------------------------------------------------------------
# Neighbours.


def changed(arguments: Mapping[str, Any], neighbour: ChangedRun) -> dict[str, Any]:
    """Return arguments as somebody would write them who follows the advice."""
    found = dict(arguments)
    for flag, before, after in neighbour.changes:
        assert ("--" + flag in found) == (before is not None) or before == "1"
        found.pop("--" + flag, None)
        if after is not None:
            found["--" + flag] = True if after == "" else after
    return found


@pytest.mark.parametrize("arguments", [LLAMA, MIXTURE], ids=["dense", "mixture"])
def test_advice_is_what_it_claims(arguments: dict[str, Any], target: Target) -> None:
    """Arguments with the changes, read anew, have the time and memory that was said."""
    start = assess(read_run(arguments, world_size=64).run, target)
    found = neighbours_of(start, target)

    assert found.one is not None
    assert found.any is not None
    for neighbour in (found.one, found.two, found.any):
        if neighbour is None:
            continue
        again = assess(read_run(changed(arguments, neighbour), world_size=64).run, target)
        said = neighbour.assessment
        assert again.step == said.step
        assert again.fullest.peak_bytes == said.fullest.peak_bytes
        assert said.odds_of_oom <= target.oom_risk


def test_the_best_single_change_is_the_best_of_all(target: Target) -> None:
    """Every value of every argument that is turned, written into the arguments one at a time."""
    single: list[dict[str, Any]] = [
        *({"tensor_model_parallel_size": n} for n in (1, 2, 8)),
        *({"context_parallel_size": n} for n in (2, 4, 8, 16, 32)),
        *({"pipeline_model_parallel_size": n} for n in (1, 2, 8, 16, 32)),
        *({"num_layers_per_virtual_pipeline_stage": n} for n in (1, 2, 4, 5, 10)),
        *({"micro_batch_size": n} for n in (2, 4, 8)),
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"tp_comm_overlap": True},
    ]
    arguments = with_flags(LLAMA, micro_batch_size=1)
    times = []
    for flags in single:
        given = with_flags(arguments, **flags)
        if given["--tensor-model-parallel-size"] == 1:
            given.pop("--sequence-parallel")
        try:
            one = assess(read_run(given, world_size=64).run, target)
        except Exception as error:  # not legal
            assert type(error).__name__ in ("RuleError", "DocumentError")  # noqa: PT017
            continue
        if one.step is not None and one.odds_of_oom <= target.oom_risk:
            times.append(one.step.total_s)
    start = assess(read_run(arguments, world_size=64).run, target)
    assert start.odds_of_oom > target.oom_risk
    best = neighbours_of(start, target).one

    assert len(times) > 3
    assert best is not None
    assert best.assessment.step is not None
    assert best.assessment.step.total_s == pytest.approx(min(times), rel=1e-12)


@pytest.mark.parametrize(("batch", "busy"), [(64, True), (8, False)], ids=["busy", "few"])
def test_advice_stays_in_the_space_of_the_search(batch: int, busy: bool, target: Target) -> None:
    """No search returns fewer micro-batches than stages, so they are no advice for others."""
    sizes = {"pipeline_model_parallel_size": 8, "global_batch_size": batch}
    start = read_run(with_flags(LLAMA, **sizes, micro_batch_size=1), world_size=64).run
    assert keeps_stages_busy(start.strategy.micro_batches, 8) is busy
    found = list(alternatives._single_changes(start, MOVES, alternatives._beyond(start, target)))
    assert found
    of = [keeps_stages_busy(one.strategy.micro_batches, one.strategy.pp) for one in found]
    assert all(of) is busy


@pytest.mark.parametrize(("domain", "overlaps"), [(8, True), (4, False)])
def test_overlap_of_tensor_ranks_is_advised_within_a_node(
    domain: int, overlaps: bool, target: Target
) -> None:
    """A search overlaps it only between GPUs that NVLink connects (`tp-overlap.links`)."""
    start = read_run(with_flags(LLAMA, tensor_model_parallel_size=8), world_size=64).run
    assert start.split.splits_sequence
    place = replace(target, machine=replace(target.machine, domain_gpus=domain))
    found = alternatives._single_changes(start, MOVES, alternatives._beyond(start, place))
    assert any(one.runtime.overlap.tensor for one in found) is overlaps


@pytest.mark.parametrize("dispatcher", ["alltoall", "flex"])
def test_no_advice_leads_to_flex_without_expert_ranks(dispatcher: str, target: Target) -> None:
    """A search has one dispatcher there, and Megatron-LM refuses `flex` with one rank."""
    arguments = with_flags(MIXTURE, moe_token_dispatcher_type=dispatcher)
    start = read_run(arguments, world_size=64).run
    found = alternatives._single_changes(start, MOVES, alternatives._beyond(start, target))
    degrees = {one.split.ep for one in found}
    assert degrees >= {2, 4, 8}
    assert (1 in degrees) is (dispatcher == "alltoall")


def test_a_launch_that_fits_is_compared_with_faster_ones(target: Target) -> None:
    """Each step of more changes is faster by half a percent at least, and the launch is slower."""
    arguments = with_flags(LLAMA, pipeline_model_parallel_size=8, recompute_granularity="full",
                           recompute_method="uniform", recompute_num_layers=1)  # fmt: skip
    start = assess(read_run(arguments, world_size=64).run, target)
    found = neighbours_of(start, target)
    times = [one.assessment.step for one in (found.one, found.two, found.any) if one is not None]

    assert start.odds_of_oom <= target.oom_risk
    assert start.step is not None
    totals = [start.step.total_s, *(step.total_s for step in times if step is not None)]
    assert totals == sorted(totals, reverse=True)
    assert totals[1] < 0.995 * totals[0]


@pytest.mark.whole
@pytest.mark.parametrize("arguments", [LLAMA, MIXTURE], ids=["dense", "mixture"])
def test_memory_that_is_not_counted_changes_no_advice(
    arguments: dict[str, Any], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting that of every launch, and then sorting them, finds the same ones for more work."""
    counted: list[int] = []

    def counting(run: Run, stage: int) -> Account:
        counted[-1] += 1
        return account_of(run, stage)

    counted_price = partial(assess, count=counting)

    def eager(
        found: list[tuple[Run, Timing]],
        target: Target,
        written: Callable[[Run], Any],
        wanted_s: float,
    ) -> tuple[list[Assessment], Assessment | None, Any]:
        all_ = [alternatives._quick(run, target, timing) for run, timing in found]

        def rank(one: Assessment) -> tuple[bool, float, float]:
            time = one.step.total_s if one.step is not None else math.inf
            fits = one.odds_of_oom <= target.oom_risk and one.step is not None
            return (False, time, 0.0) if fits else (True, float(one.fullest.peak_bytes), time)

        all_.sort(key=rank)
        for one in all_:
            wholly = counted_price(one.run, target)
            if rank(one)[0] or rank(one)[1] >= wanted_s:
                break
            if wholly.odds_of_oom <= target.oom_risk:
                return all_[:4], wholly, written(one.run)
        return all_[:4], None, ()

    monkeypatch.setattr(alternatives, "assess", counted_price)
    found = list[BestChanges]()
    for patched in (False, True):
        if patched:
            monkeypatch.setattr(alternatives, "_best", eager)
        counted.append(0)
        start = counted_price(read_run(arguments, world_size=64).run, target)
        found.append(neighbours_of(start, target))

    assert found[0] == found[1]
    assert counted[0] < counted[1] / 2


# --------------------------------------------------------------------------------------------------
# Odds.


def test_odds_of_running_out() -> None:
    """A half where what is left is the median reserve, and the interval holds nine of ten."""
    gib = float(1 << 30)
    run = read_run(LLAMA, world_size=64).run
    low, high = reserved_interval(run, 60 * gib)
    middle = math.sqrt(low * high)
    # the median reserve, and the middle of measured over predicted peaks
    assert middle / (60 * gib) == pytest.approx(1.04 * math.sqrt(math.prod(PEAK_RATIOS["dense"])))
    for end, odds in ((low, 0.95), (middle, 0.5), (high, 0.05)):
        assert oom_probability_at(run, 60 * gib, end + gib) == pytest.approx(odds)
    assert oom_probability_at(run, 60 * gib, gib) == 1.0


def test_odds_are_students_beside_a_normal_reserve() -> None:
    """Without a reserve the odds are those of t with two degrees, alone those of the normal."""
    ends = (math.exp(-0.01), math.exp(0.01))
    scale = 0.01 / 2.919985580353726
    for distance in (-0.3, -0.02, 0.0, 0.01, 0.05, 0.3):
        t = distance / scale
        student = 0.5 - t / (2.0 * math.sqrt(2.0 + t * t))
        assert probability_of_ratio(math.exp(distance), ends, None) == pytest.approx(
            student, abs=1e-6
        )
    reserve = (math.exp(0.01), math.exp(0.04), math.exp(0.07))
    exact = (math.exp(-1e-9), math.exp(1e-9))
    for distance in (0.0, 0.04, 0.1):
        normal = NormalDist(0.04, 0.06 / (2 * NormalDist().inv_cdf(0.95)))
        found = probability_of_ratio(math.exp(distance), exact, reserve)
        assert found == pytest.approx(1.0 - normal.cdf(distance), abs=1e-6)


def test_odds_are_as_wide_as_the_errors_of_measured_runs() -> None:
    """Peaks of launches that few measured runs are like are further off, those of experts most."""
    low = with_flags(LLAMA, fp8_format="hybrid")
    runs = [read_run(arguments, world_size=64).run for arguments in (LLAMA, low, MIXTURE)]
    assert [*map(kind_of, runs)] == ["dense", "few runs", "experts"]
    assert [*map(rarely_validated, runs)] == [(), ("8-bit products",), ()]
    widths = [high / low for low, high in (reserved_interval(run, 1e10) for run in runs)]
    assert widths == sorted(widths)


def test_shown_intervals_begin_with_the_allocated_bytes() -> None:
    """No more is allocated than is reserved, in every answer and every form of it."""
    run = read_run(with_flags(MIXTURE), world_size=64).run
    low, high = reserved_interval(run, 1e10)
    assert low < 1e10 < high
    assert reserved_range(run, 1e10) == (1e10, high)


@pytest.mark.whole
def test_few_runs_are_of_fewer_than_five_configurations() -> None:
    """Each feature that widens odds has fewer measured configurations than five, others more."""
    entries = [price_row(row) for row in read_goldens()]
    read = {entry.config: entry.read.run for entry in entries if isinstance(entry, Priced)}
    runs = {config: run for config, run in read.items() if run.kernels.graphs == "none"}
    runs |= {row.name: row.run for row in published_peaks() if row.what == "allocated"}
    seldom = Counter(name for run in runs.values() for name in rarely_validated(run))
    assert max(seldom.values()) < 5
    often: dict[str, Callable[[Run], bool]] = {
        "scattered": lambda run: run.split.splits_sequence,
        "chunks": lambda run: run.strategy.vpp > 1,
        "context": lambda run: run.split.cp > 1,
        "exchanged heads": lambda run: run.split.exchanges_heads,
        "a loss in place": lambda run: run.kernels.loss == "te",
        "a fused loss": lambda run: run.kernels.loss == "native",
        "further tokens": lambda run: run.model.mtp > 0,
        "latent attention": lambda run: run.model.attention.latent is not None,
        "gates": lambda run: run.model.last.gates == 2,
    }
    assert min(sum(map(has, runs.values())) for has in often.values()) >= 5


def test_errors_of_peaks_are_those_of_the_benchmark() -> None:
    """The shipped intervals contain those of the measured runs; ten mixtures alone are wider."""
    entries = [price_row(row) for row in read_goldens()]
    found = intervals_of(entry for entry in entries if isinstance(entry, Priced))
    for kind, ends in PEAK_RATIOS.items():
        if kind != "experts":
            assert found[kind] == ends


# --------------------------------------------------------------------------------------------------
# The command.

Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Return what runs the command."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = check.run(arguments)
        return code, *capsys.readouterr()

    return run


SCRIPT = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
ARGS=({flags})
if [ -n "$SAVE" ]; then ARGS+=(--save "$SAVE"); fi
torchrun --nnodes ${{NNODES:-8}} --nproc-per-node 8 pretrain_gpt.py "${{ARGS[@]}}"
"""


def script(folder: Path, arguments: Mapping[str, Any]) -> str:
    """Write a launch script."""
    words = (f"{flag} {'' if value is True else value}" for flag, value in arguments.items())
    path = folder / "train.sh"
    path.write_text(SCRIPT.format(flags=" ".join(words)), encoding="utf-8")
    return str(path)


def test_a_script_is_checked(ask: Ask, tmp_path: Path) -> None:
    """The tables, and the same as one object."""
    path = script(tmp_path, LLAMA)
    code, out, err = ask(path, "--hardware", "h100:8x8")

    assert (code, err) == (0, "")
    assert out.startswith(f"{path}: Megatron-LM on 64 h100-80gb\n")
    code, out, err = ask(path, "--json", "-")
    assert code == 0
    assert "--hardware" in err
    (launch,) = json.loads(out)["launches"]
    assert launch["num_gpus"] == 64
    assert launch["understood"]["degrees"] == "tp4 pp4 dp4, sequence parallel, ZeRO-1"
    assert "SAVE" in launch["findings"][0]["text"]
    assert "--tp-comm-overlap" in {one["flag"] for one in launch["neighbours"]["any"]["arguments"]}
    assert len(launch["stages"]) == 4
    for stage in launch["stages"]:
        assert sum(stage["terms_bytes"].values()) == stage["peak_bytes"]
    assert sum(launch["terms_s"].values()) == pytest.approx(launch["step_time_s"])
    any_ = launch["neighbours"]["any"]
    assert any_["odds_of_oom"] < 0.01 < launch["odds_of_oom"]


@pytest.mark.whole
def test_what_few_measured_runs_have_is_said(ask: Ask, tmp_path: Path) -> None:
    """Below the table of stages, and in the object; nothing where runs are like the launch."""
    path = script(tmp_path, with_flags(LLAMA, fp8_format="hybrid"))
    _, out, _ = ask(path, "--hardware", "h100:8x8", "--verbose")
    assert "few measured runs have fp8 GEMMs" in " ".join(out.split())
    for arguments, expected in (
        (with_flags(LLAMA, fp8_format="hybrid"), ["8-bit products"]),
        (LLAMA, []),
    ):
        _, out, _ = ask(script(tmp_path, arguments), "--hardware", "h100:8x8", "--json", "-")
        (launch,) = json.loads(out)["launches"]
        assert launch["few_measured_runs_have"] == expected


def test_strict_is_for_repositories_of_launches(ask: Ask, tmp_path: Path) -> None:
    """1 for findings and for what does not fit, 0 for a launch with nothing to say of."""
    good = {"MODEL_ARGS": with_flags(LLAMA, tensor_model_parallel_size=8),
            "ENV_VARS": {"CUDA_DEVICE_MAX_CONNECTIONS": 1}}  # fmt: skip
    fits = written(tmp_path, good, "good.json")
    full = written(tmp_path, {**good, "MODEL_ARGS": LLAMA}, "full.json")
    more = ("--hardware", "h100:8x8", "--no-neighbours")

    assert ask(fits, "--strict", *more)[0] == 0
    assert ask(full, "--strict", *more)[0] == 1
    assert ask(fits, full, "--strict", *more)[0] == 1
    assert ask(full, *more)[0] == 0
    broken = written(tmp_path, with_flags(LLAMA, num_layers=78))
    code, out, _ = ask(broken, "--strict", *more)
    assert code == 1
    assert "layers(78) % (pp(4)" in out
    assert "Step time" not in out


def test_a_file_that_is_no_launch_does_not_hide_the_others(ask: Ask, tmp_path: Path) -> None:
    """Each is checked, the object has a row of each, and the exit code is 2."""
    good = written(tmp_path, LLAMA, "good.json")
    missing, no_launch = str(tmp_path / "none.sh"), written(tmp_path, {"--model": 3}, "no.json")
    more = ("--hardware", "h100:8x8", "--no-neighbours", "--strict")
    code, out, err = ask(missing, good, no_launch, *more)

    assert code == 2
    assert out.startswith(f"{good}: Megatron-LM on 64")
    assert "none.sh" in err
    assert "no.json" in err
    code, out, _ = ask(missing, good, *more, "--json", "-")
    first, second = json.loads(out)["launches"]
    assert code == 2
    assert first["file"] == missing
    assert first["error"].startswith(f"{missing}: this file does not exist")
    assert second["stages"]


def test_processes_of_a_node_are_not_those_of_the_cluster(ask: Ask, tmp_path: Path) -> None:
    """torchrun without `--nnodes` starts one node, however many GPUs this node has."""
    path = script(tmp_path, with_flags(LLAMA, pipeline_model_parallel_size=1))
    text = Path(path).read_text(encoding="utf-8")
    own = text.replace("--nnodes ${NNODES:-8} --nproc-per-node 8", "--nproc-per-node $(count)")
    assert own != text
    Path(path).write_text(own, encoding="utf-8")

    code, out, err = ask(path, "--hardware", "h100:2x8")
    assert (code, out) == (2, "")
    assert "h100-80gb:1x8" in err
    code, out, _ = ask(path, "--hardware", "h100:1x8", "--json", "-")
    assert (code, json.loads(out)["launches"][0]["num_gpus"]) == (0, 8)


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        (
            {"--model": 3},
            ("--hardware", "h100:8x8"),
            "Megatron-LM (script, YAML or JSON)",
        ),
        (LLAMA, (), "--hardware"),
        (LLAMA, ("--hardware", "h100:8"), "--hardware h100:8: expected CARD:NODESxGPUS"),
        (
            with_flags(LLAMA, world_size=32),
            ("--hardware", "h100:8x8"),
            "--hardware",
        ),
        (LLAMA, ("--hardware", "h100:8x8", "--site", "selene-a100"), "a100-80gb"),
        (LLAMA, ("--hardware", "h100:8x8", "--oom-risk", "2"), "--oom-risk"),
    ],
)
def test_what_cannot_be_checked_is_one_sentence(
    content: dict[str, Any], arguments: tuple[str, ...], said: str, ask: Ask, tmp_path: Path
) -> None:
    """Exit code 2."""
    code, out, err = ask(written(tmp_path, content), *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"is_hybrid_model": True}, "belongs to a hybrid model without --hybrid-layer-pattern"),
        ({"decoder_seq_length": 512}, "belongs to a T5 model"),
        ({"optimizer": "sgd"}, "sgd"),
        ({"cpu_offloading_weights": True}, "weights of layers are offloaded"),
    ],
)
def test_other_trainings_are_said_and_not_priced(
    flags: dict[str, Any], said: str, ask: Ask, tmp_path: Path
) -> None:
    """As a finding, and never read as something else."""
    path = written(tmp_path, with_flags(LLAMA, **flags))
    code, out, _ = ask(path, "--hardware", "h100:8x8", "--json", "-")
    (launch,) = json.loads(out)["launches"]
    assert code == 0
    texts = {one["kind"]: one["text"] for one in launch["findings"]}
    assert texts["not priced"].startswith(f"--{next(iter(flags)).replace('_', '-')} {said}")
    assert "illegal" not in texts
    assert "stages" not in launch


def test_other_optimizers_have_memory_and_no_time(target: Target) -> None:
    """Matrices that tensor ranks share have a reason in place of the time."""
    found = assess(read_run(with_flags(LLAMA, optimizer="muon"), world_size=64).run, target)
    assert found.step is None
    assert str(found.untimed).startswith("optimizer muon with tp ")
    assert found.fullest.peak_bytes > 0
    assert found.tokens_per_s is None


def test_experts_that_tensor_ranks_split_have_a_time(target: Target) -> None:
    """As products of half the width with twice the tokens, and their gathering besides."""
    whole = job_of_run(read_run(MIXTURE, world_size=64).run)
    given = with_flags(MIXTURE, expert_tensor_parallel_size=2, expert_model_parallel_size=4)
    split = job_of_run(read_run(given, world_size=64).run)
    assert (whole.ep, whole.etp, split.ep, split.etp) == (8, 1, 4, 2)
    one, two = (step_time(target.machine, job).terms_s for job in (whole, split))
    assert two["gemm"] == pytest.approx(one["gemm"], rel=0.05)
    assert two["experts"] > one["experts"]
    assert two["optimizer"] == pytest.approx(one["optimizer"], rel=1e-9)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_published_recipes_are_read_and_lie_in_their_intervals(recipe: Recipe) -> None:
    """None of them is called illegal, and the measured step is one of nine of ten."""
    found = assess(read_run(recipe.arguments, world_size=recipe.num_gpus).run, place())
    assert found.interval_s is not None
    low, high = found.interval_s
    assert low < recipe.measured_s < high
