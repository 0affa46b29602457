"""Runs over samples of different lengths: nothing changes for equal ones, steps are simulated."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from autopar.errors import InputError, OptionError
from autopar.price.assessment import Assessment, assess
from autopar.price.job import job_of_run
from autopar.price.step import step_time
from autopar.rates.card import load_card
from autopar.rates.parts.operations import machine_of
from autopar.rates.stack import load_stack
from autopar.records import replace
from autopar.run.run import Run
from autopar.training.batches import Batches
from autopar.training.lengths import BATCHINGS, KnownBatching, Lengths, lengths_of
from search.commands import check, search
from search.engines.huggingface.script import batching_of
from search.engines.table import read_checked
from search.questions.lengths import LengthsQuestion, question_of, with_lengths
from tests.step_cases import target_named

PERCENTILES = "p50=310,p90=790,p99=1800,max=4096"
TRL = """accelerate launch --num_processes {gpus} --config_file fsdp.yaml trl/scripts/sft.py
 --model_name_or_path meta-llama/Llama-3.1-8B --max_length 4096 --bf16 True
 --per_device_train_batch_size {rows} --gradient_accumulation_steps {steps}
 --gradient_checkpointing True --attn_implementation flash_attention_2 {more}"""
FSDP = """distributed_type: FSDP
mixed_precision: bf16
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: {gathers}
"""


def script(
    folder: Path, *, more: str = "", gathers: str = "true", gpus: int = 8, rows: int = 4
) -> Path:
    """Return a TRL script with its configuration of accelerate."""
    (folder / "fsdp.yaml").write_text(FSDP.format(gathers=gathers), encoding="utf-8")
    path = folder / "sft.sh"
    text = TRL.format(gpus=gpus, rows=rows, steps=2, more=more)
    path.write_text(" ".join(text.split()) + "\n", encoding="utf-8")
    return path


@cache
def assessed(folder: Path, **how: Any) -> Assessment:
    """Return the estimate of a script with full rows."""
    gpus = how.get("gpus", 8)
    run = read_checked(str(script(folder, **how)), world_size=gpus, gpu="h100-80gb").run
    assert run is not None
    return assess(run, EAGER)


# --------------------------------------------------------------------------------------------------
# Equal lengths.


def megatron(tmp_path: Path, flags: str) -> Run:
    """Return a run of Megatron-LM."""
    path = tmp_path / "megatron.sh"
    path.write_text(
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 2048 "
        "--ffn-hidden-size 8192 --num-attention-heads 16 --seq-length 4096 --vocab-size 32000 "
        "--max-position-embeddings 4096 --swiglu --bf16 --use-distributed-optimizer "
        f"--micro-batch-size 2 --global-batch-size 32 {flags}\n",
        encoding="utf-8",
    )
    run = read_checked(str(path), world_size=8, gpu="h100-80gb").run
    assert run is not None
    return run


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 2",
        "--context-parallel-size 2",
    ],
)
@pytest.mark.parametrize("batching", BATCHINGS)
def test_equal_lengths_change_nothing(flags: str, batching: Any, tmp_path: Path) -> None:
    """To the byte and to the nanosecond, with any way to batch them."""
    before = assess(megatron(tmp_path, flags), CORE)
    assert before.step is not None
    lengths = Lengths(values=(4096,), counts=(1000,))
    asked = LengthsQuestion(lengths=lengths, batching=batching)
    own = with_lengths(before, CORE, asked, compare=False).own
    assert own.step_s == before.step.total_s
    assert own.interval_s == before.interval_s
    assert own.real_tokens_per_s == before.tokens_per_s
    assert own.oom_probability == before.odds_of_oom
    assert set(own.peak_bytes) == {before.fullest.peak_bytes}
    assert (own.imbalance, own.real_share, own.row_tokens) == (1.0, 1.0, 4096.0)


def test_documents_of_the_whole_row_change_no_step(tmp_path: Path) -> None:
    job = job_of_run(megatron(tmp_path, ""))
    machine = CORE.machine
    whole = step_time(machine, job)
    assert step_time(machine, replace(job, attended=4096.0)) == whole
    halves = step_time(machine, replace(job, attended=2048.0))
    # attention is the only term that shrinks, by less than half: a kernel has fixed parts
    for name, value in whole.terms_s.items():
        if name in ("attention", "stragglers", "gradients", "host"):
            continue
        assert halves.terms_s[name] == value, name
    assert 0.5 < halves.terms_s["attention"] / whole.terms_s["attention"] < 0.7


# --------------------------------------------------------------------------------------------------
# Steps against simulations.


CORE, EAGER = target_named(), target_named(stack="torchtitan-eager")
FEW = lengths_of([(200, 50), (400, 30), (800, 15), (1600, 4), (4096, 1)])


@pytest.mark.parametrize("gathers", ["true", "false"])
def test_a_step_is_that_of_the_slowest_rank(gathers: str, tmp_path: Path) -> None:
    """Ranks wait in every micro-batch where they gather weights, else once per step."""
    before = assessed(tmp_path, gathers=gathers, gpus=4, rows=2)
    found = with_lengths(
        before,
        EAGER,
        LengthsQuestion(lengths=FEW, batching="longest"),
    )
    times = {}
    for value in FEW.values:
        run = replace(before.run, seq_length=value)
        times[value] = step_time(EAGER.machine, job_of_run(run)).total_s
    draws = np.random.default_rng(7).choice(
        FEW.values, size=(40_000, 4, 2, 2), p=np.array(FEW.counts) / 100
    )
    seconds = np.vectorize(times.get)(draws.max(axis=3))
    if gathers == "true":
        steps = seconds.max(axis=1).mean(axis=1)
    else:
        steps = seconds.mean(axis=2).max(axis=1)
    assert found.own.step_s == pytest.approx(steps.mean(), rel=0.01)
    assert found.own.imbalance == pytest.approx(steps.mean() / seconds.mean(), rel=0.01)
    real = FEW.mean * 16 / steps.mean() / 4
    assert found.own.real_tokens_per_s == pytest.approx(real, rel=0.01)


def test_memory_follows_the_longest_row_of_a_step(tmp_path: Path) -> None:
    before = assessed(tmp_path, gpus=4, rows=2)
    asked = LengthsQuestion(lengths=FEW, batching="longest", steps=3)
    own = with_lengths(before, EAGER, asked, compare=False).own
    from autopar.price.account import account_of

    peaks = {
        value: account_of(replace(before.run, seq_length=value), 0).peak_bytes
        for value in FEW.values
    }
    rng = np.random.default_rng(11)
    samples = np.repeat(FEW.values, FEW.counts)
    runs = np.array([rng.permutation(samples)[:48].reshape(3, 16).max(axis=1) for _ in range(4000)])
    half, _, most, _ = own.peak_bytes
    assert half == pytest.approx(peaks[int(np.median(runs))], rel=1e-12)
    assert most == peaks[4096]
    longest = runs.max(axis=1)
    odds = np.mean([EAGER.oom_probability(before.run, peaks[int(one)]) for one in longest])
    assert own.oom_probability == pytest.approx(odds, rel=0.05)
    whole = with_lengths(
        before,
        EAGER,
        LengthsQuestion(lengths=FEW, batching="longest"),
        compare=False,
    ).own
    assert whole.oom_probability == before.odds_of_oom


def test_one_step_of_many_exceeds_the_memory(tmp_path: Path) -> None:
    before = assessed(tmp_path, gpus=4, rows=2)
    room = before.fullest.peak_bytes - 1.0 + (1 << 30)
    card = replace(load_card("h100-80gb"), memory_bytes=room)
    machine = machine_of(card, load_stack("torchtitan-eager"), None)
    tight = replace(EAGER, machine=machine)
    asked = LengthsQuestion(lengths=FEW, batching="longest")
    found = with_lengths(before, tight, asked, compare=False)
    assert found.own.above == pytest.approx(1.0 - 0.99**16, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    pairs=st.dictionaries(st.integers(1, 5000), st.integers(1, 50), min_size=1, max_size=30),
    batching=st.sampled_from(BATCHINGS),
    rows=st.sampled_from((1, 2, 8)),
    ranks=st.sampled_from((1, 3, 16)),
    micro_batches=st.sampled_from((1, 4)),
)
def test_rows_are_distributions_within_the_sequence_length(
    pairs: dict[int, int], batching: Any, rows: int, ranks: int, micro_batches: int
) -> None:
    """Weights add up to one, real tokens are kept, and more micro-batches have longer rows."""
    real = lengths_of(pairs.items()).within(4096)
    own = Batches(
        lengths=real.within(4096, 8),
        real=real,
        batching=batching,
        seq_length=4096,
        micro_batch=rows,
        ranks=ranks,
        micro_batches=micro_batches,
    )
    found = own.rows
    assert found.weights.sum() == pytest.approx(1.0, abs=1e-9)
    assert found.weights.min() >= 0.0
    assert found.tokens.min() >= 1.0
    assert found.tokens.max() <= 4096.0
    assert np.all(np.diff(found.tokens) >= 0)
    assert np.all(found.attended > 0)
    assert found.real <= found.mean_tokens * (1.0 + 1e-9)
    if batching in ("longest", "grouped", "padding-free"):
        assert found.real == pytest.approx(real.mean, rel=1e-9)
        means = [found.tokens @ own.weights_of_longest(one) for one in (1, 2, 5)]
        assert means[0] == pytest.approx(found.mean_tokens, rel=1e-6)
        assert means[0] <= means[1] * (1 + 1e-9)
        assert means[1] <= means[2] * (1 + 1e-9)
        for steps in (1, 1000):
            weights = own.weights_of_run(steps)
            assert weights.sum() == pytest.approx(1.0, abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(pairs=st.dictionaries(st.integers(1, 4096), st.integers(1, 50), min_size=2, max_size=12))
def test_sorting_pads_no_more_than_shuffling(pairs: dict[int, int]) -> None:
    real = lengths_of((value, 100 * count) for value, count in pairs.items())
    means = {}
    for batching in ("grouped", "longest", "maximum"):
        own = Batches(
            lengths=real,
            real=real,
            batching=batching,  # type: ignore[arg-type]
            seq_length=4096,
            micro_batch=4,
            ranks=8,
            micro_batches=2,
        )
        means[batching] = own.rows.mean_tokens
    assert real.mean * (1 - 1e-9) <= means["grouped"] <= means["longest"] * (1 + 1e-9)
    assert means["longest"] <= means["maximum"]


# --------------------------------------------------------------------------------------------------
# Refusals.


def test_rows_of_a_pipeline_have_one_length(tmp_path: Path) -> None:
    before = assess(megatron(tmp_path, "--pipeline-model-parallel-size 2"), CORE)
    with pytest.raises(InputError, match="pp 2"):
        with_lengths(before, CORE, LengthsQuestion(lengths=FEW, batching="longest"))
    asked = LengthsQuestion(lengths=FEW, batching="packed")
    found = with_lengths(before, CORE, asked)
    assert {one.batching for one in found.others} == {"maximum", "packed-full", "wrapped"}
    assert "pp 2" in found.refused


def test_how_samples_are_batched_must_be_known() -> None:
    with pytest.raises(OptionError, match="--batching"):
        question_of(FEW, None, None, None)
    known = KnownBatching("longest", 8)
    assert question_of(FEW, None, None, known).multiple == 8
    assert question_of(FEW, "longest", None, known).multiple == 8
    assert question_of(FEW, "packed", 7, known) == LengthsQuestion(
        lengths=FEW, batching="packed", steps=7
    )


def test_options_of_lengths_need_lengths(tmp_path: Path, capsys: Any) -> None:
    path = str(script(tmp_path))
    for more in (["--batching", "packed"], ["--steps", "5"]):
        assert check.run([path, "--hardware", "h100:1x8", *more]) == 2
        assert "needs --lengths" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# Readers.


@pytest.mark.parametrize(
    ("program", "flags", "expected"),
    [
        ("trl/scripts/sft.py", {}, ("longest", 1)),
        ("sft.py", {"packing": ()}, ("packed-full", 1)),
        ("sft.py", {"packing": ("True",), "attn-implementation": ("flash_attention_2",)},
         ("packed", 1)),
        ("sft.py", {"packing": ("True",), "packing-strategy": ("wrapped",)}, ("wrapped", 1)),
        ("sft.py", {"packing": ("False",), "pad-to-multiple-of": ("64",)}, ("longest", 64)),
        ("sft.py", {"padding-free": (), "attn-implementation": ("flash_attention_3",)},
         ("padding-free", 1)),
        ("sft.py", {"padding-free": ()}, None),
        ("sft.py", {"train-sampling-strategy": ("group_by_length",)}, ("grouped", 1)),
        ("train.py", {"group-by-length": ("True",)}, ("grouped", 1)),
        ("train.py", {}, None),
        ("llamafactory-cli", {}, ("longest", 8)),
        ("src/train.py", {"finetuning-type": ("lora",)}, ("longest", 8)),
        ("llamafactory-cli", {"packing": ("true",), "flash-attn": ("fa2",)}, ("packed-full", 1)),
        ("llamafactory-cli", {"neat-packing": ("true",), "flash-attn": ("fa2",)}, ("packed", 1)),
        ("llamafactory-cli", {"neat-packing": ("true",)}, ("packed-full", 1)),
        ("qlora.py", {}, ("longest", 1)),
        ("examples/run_clm.py", {}, ("wrapped", 1)),
    ],
)  # fmt: skip
def test_scripts_tell_how_they_batch(
    program: str, flags: dict[str, tuple[str, ...]], expected: tuple[Any, int] | None
) -> None:
    assert batching_of(flags, program) == expected


def test_packed_recipes_of_bridge_are_priced_with_their_lengths(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "torchrun --nproc-per-node 8 scripts/training/run_recipe.py "
        "--recipe llama3_8b_sft_config\n",
        encoding="utf-8",
    )
    before = read_checked(str(path), world_size=8, gpu="h100-80gb")
    assert before.run is None
    after = read_checked(str(path), world_size=8, gpu="h100-80gb", lengths=True)
    assert after.run is not None
    assert after.batching == KnownBatching("packed")
    assert not after.withdrawn


# --------------------------------------------------------------------------------------------------
# Commands.


def test_check_answers_with_lengths(tmp_path: Path, capsys: Any) -> None:
    path = script(tmp_path, more="--pad_to_multiple_of 64")
    words = [str(path), "--hardware", "h100:1x8", "--lengths", PERCENTILES]
    assert check.run([*words, "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)["launches"][0]
    found = document["lengths"]
    own, *others = found["batchings"]
    assert own["batching"] == "longest"
    assert own["steps"] == -(-10_000 // 64)
    assert [one["batching"] for one in others] == [
        one["batching"] for one in sorted(others, key=lambda one: -one["real_tokens_per_s_per_gpu"])
    ]
    assert {one["batching"] for one in found["batchings"]} == set(BATCHINGS)
    packed = next(one for one in others if one["batching"] == "packed")
    # an epoch of packed rows has fewer steps
    assert packed["steps"] == -(-4_349_414 // round(64 * 4096 * packed["real_share"]))
    assert packed["real_tokens_per_s_per_gpu"] > 2 * own["real_tokens_per_s_per_gpu"]
    assert own["imbalance"] > 1.5
    assert own["peak_bytes"]["p50"] < own["peak_bytes"]["p90"] < own["peak_bytes"]["max"]
    assert own["peak_bytes"]["max"] == max(one["peak_bytes"] for one in document["stages"])
    assert check.run(words) == 0
    screen = capsys.readouterr().out
    assert "real tokens/s/GPU" in screen
    assert len(screen.splitlines()) <= 24


def test_samples_shorter_than_the_sequence_length_decide_whether_it_fits(
    tmp_path: Path, capsys: Any
) -> None:
    """Rows padded to the longest sample need less memory than full ones."""
    path = str(script(tmp_path, rows=12))
    words = [path, "--hardware", "h100:1x8", "--strict", "--no-neighbours", "--json", "-"]
    assert check.run(words) == 1
    full = json.loads(capsys.readouterr().out)["launches"][0]
    assert full["odds_of_oom"] > 0.01
    short = tmp_path / "short.txt"
    short.write_text("900,100\n1000\n", encoding="utf-8")
    check.run([*words, "--lengths", str(short)])
    found = json.loads(capsys.readouterr().out)["launches"][0]["lengths"]
    assert found["batchings"][0]["oom_probability"] < 0.01


def test_lengths_of_a_run_without_an_estimate_are_not_priced(tmp_path: Path, capsys: Any) -> None:
    path = str(script(tmp_path, more="--use_galore True"))
    words = [path, "--hardware", "h100:1x8", "--lengths", PERCENTILES, "--json", "-"]
    assert check.run(words) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)["launches"][0]
    assert "memory" in document["withdrawn"]
    assert "lengths" not in document
    assert "--lengths is not priced" in err


def test_search_prices_its_plan_with_lengths(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model", "llama3-8b", "--hardware", "h100:1x8", "--seq-length", "4096",
             "--global-batch-size", "64", "--engine", "accelerate", "--lengths", PERCENTILES,
             "--output-config-path", "none"]  # fmt: skip
    assert search.run([*words, "--json", "-"]) == 2
    assert "--batching" in capsys.readouterr().err
    assert search.run([*words, "--batching", "longest", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["launch"]["degrees"]["pp"] == 1
    assert document["status"] == "optimal"
    own = document["lengths"]["batchings"][0]
    assert own["batching"] == "longest"
    assert (
        0
        < own["real_tokens_per_s_per_gpu"]
        < document["lengths"]["batchings"][1]["real_tokens_per_s_per_gpu"]
    )
    assert search.run([*words, "--batching", "longest"]) == 0
    screen = capsys.readouterr().out
    assert "proven for full rows" in screen
    assert len(screen.splitlines()) <= 24
    for more in (["--evaluate", "plan.json"], ["--goal", "cost"]):
        assert search.run([*words, "--batching", "packed", *more]) == 2
        assert "--lengths cannot be combined with" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["megatron", "deepspeed"])
def test_a_search_of_packed_rows_is_the_optimum_of_their_step_times(
    engine: str, tmp_path: Path
) -> None:
    """Every candidate is priced with attention within samples, and bounds stay below prices."""
    from search.engines.table import engine_space
    from search.planning.uniform.answer import answer, open_launches
    from search.request.request import build_request

    words = {"model": "llama3-8b", "hardware": "h100:1x8", "seq-length": "16384",
             "global-batch-size": "32", "engine": engine}  # fmt: skip
    many = lengths_of(
        (value, 100 * count) for value, count in zip(FEW.values, FEW.counts, strict=True)
    )
    asked = LengthsQuestion(lengths=many, batching="packed")
    request = replace(build_request(words), samples=asked)
    question = open_launches(request, (engine_space(engine),))
    attended = question.job.attended
    assert attended is not None
    assert attended == pytest.approx(FEW.attended, rel=0.05)
    found = answer(question)
    assert found.best is not None
    assert found.best.solved is not None
    assert found.best.solved.complete
    fastest, *others = found.best.solved.solutions
    machine = found.best.target.machine
    for one in (fastest, *others):
        job = replace(job_of_run(one.assessment.run), attended=attended)
        own = step_time(machine, job).total_s
        assert one.assessment.step is not None
        assert one.assessment.step.total_s == pytest.approx(own, rel=1e-12)
    # the fastest plan with full attention is no faster with these samples
    full = answer(open_launches(replace(request, samples=None), (engine_space(engine),)))
    assert full.best is not None
    assert full.best.solved is not None
    for one in full.best.solved.solutions:
        job = replace(job_of_run(one.assessment.run), attended=attended)
        rate = one.assessment.run.strategy.global_batch / step_time(machine, job).total_s
        assert rate <= fastest.samples_per_s * (1 + 1e-9)


def test_packed_rows_of_whole_samples_are_searched_as_full_ones() -> None:
    lengths = Lengths(values=(4096,), counts=(1000,))
    assert LengthsQuestion(lengths=lengths, batching="packed").attended(4096) is None
    assert LengthsQuestion(lengths=FEW, batching="packed-full").attended(4096) is None


@pytest.mark.whole
def test_lengths_price_the_plan_of_the_answer(tmp_path: Path, capsys: Any) -> None:
    """Samples as long as a row: the real rate is that of the chosen plan, not of the fastest."""
    samples = tmp_path / "full.txt"
    samples.write_text("8192,1000\n", encoding="utf-8")
    words = [
        *("--model", "llama3-8b", "--hardware", "h100:8x8", "--engine", "megatron"),
        *("--seq-length", "8192", "--global-batch-size", "1024", "--output-config-path", "none"),
        *("--lengths", str(samples), "--batching", "packed", "--json", "-"),
    ]
    assert search.run(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["engines"][0]["avoided"]
    own = document["lengths"]["batchings"][0]
    rate = document["launch"]["samples_per_s"] * 8192 / 64
    assert own["real_tokens_per_s_per_gpu"] == pytest.approx(rate, rel=1e-9)
