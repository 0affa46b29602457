"""What `profile-plan` makes of options, plan file and model together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from autopar.documents.plan import read_strategy
from autopar.documents.spec import load_spec
from autopar.errors import OptionError
from autopar.run.plan import LayerStrategy
from profiler.plan.question import Question, ask, chosen_layers, scale_down
from tests.plan_cases import T5, make_job
from tests.unit.plan_cli_support import MODEL, PREDICTED, STRATEGY, read, small_files, write


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_files(tmp_path)
    monkeypatch.chdir(tmp_path)


def asked(*arguments: str, mode: Any = "static", launched: int | None = None) -> Question:
    """Return the question of a command line."""
    return ask(read(*arguments), mode=mode, launched=launched)


def test_plan_file_says_model_and_options() -> None:
    """Its request names the model, its options what the strategy file does not hold."""
    question = asked("plan.json")
    job = question.job

    assert (job.spec.name, job.precision, job.async_grad_reduce) == ("small", "fp32", False)
    assert job.plan == read_strategy(STRATEGY)
    assert (question.problems, question.notes) == ((), ())
    assert question.prediction is not None
    assert question.prediction.interval_s == (0.018, 0.023)
    assert question.prediction.basis is not None
    stage = question.prediction.stages[1]
    assert stage.step_times(2) == {"forward_s": 0.006, "backward_s": 0.008, "tail_s": 0.001}
    assert stage.tensor_bytes == 2900


def test_strategy_file_takes_stated_defaults() -> None:
    """On, on, and fp32 unless memory is counted; there is no prediction."""
    question = asked("strategy.json", "--model", "small.json")
    assert question.prediction is None
    job = question.job
    assert (job.sequence_parallel, job.async_grad_reduce, job.precision) == (True, True, "fp32")
    dry = asked("strategy.json", "--model", "small.json", mode="dryrun").job
    assert dry.precision == "bf16"


@pytest.mark.parametrize("threads", [1, 3])
def test_prediction_for_other_threads_is_not_compared(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """A run of other threads is another run; arithmetic and counting do not depend on them."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = {**PREDICTED["options"], "threads": threads}
    write(Path("plan.json"), {**PREDICTED, "options": options})
    run = asked("plan.json", mode="run")
    assert (run.prediction is None) == (threads != 1)
    assert any("3 threads per rank, here 1" in note for note in run.notes) == (threads != 1)
    assert asked("plan.json", mode="dryrun").prediction is not None


def test_printed_object_is_read() -> None:
    """What `--evaluate --json` prints has the plan and memory, and no options."""
    memory = [{"stage": j, "allocated_bytes": 7, "reserved_bytes": 9} for j in range(2)]
    write(Path("e.json"), {"plan": STRATEGY, "step_time_s": 0.5, "memory": memory})
    question = asked("e.json", "--model", "small.json")

    assert question.prediction is not None
    assert question.prediction.step_time_s == 0.5
    assert [s.tensor_bytes for s in question.prediction.stages] == [7, 7]
    assert question.prediction.stages[0].step_times(2) is None
    assert "no sequence length" in question.notes[0]


@pytest.mark.parametrize(
    ("arguments", "difference"),
    [
        (["--layers", "2"], "4 layers, here 2"),
        (["--seq", "8"], "sequence length 16, here 8"),
        (["--global-batch", "16"], "batch 8, here 16"),
        (["--microbatches", "4"], "2 micro-batches, here 4"),
        (["--mixed-precision", "bf16"], "fp32, here bf16"),
        (["--async-grad-reduce"], "without one reduction of gradients per step, here with"),
        (["--no-sequence-parallel"], "with sequence parallelism, here without"),
        (["--model", "other.json"], "model small, here other of other sizes"),
    ],
)
def test_prediction_of_another_run_is_left_out(arguments: list[str], difference: str) -> None:
    """And a note says in what it differs."""
    other = {**MODEL, "name": "other", "vocab_size": 500}
    write(Path("other.json"), other)
    question = asked("plan.json", *arguments)

    assert question.prediction is None
    assert difference in question.notes[-1]
    assert question.problems == ()


def test_same_options_keep_the_prediction() -> None:
    """What is given again as it was changes nothing."""
    same = ("--seq", "16", "--layers", "4", "--model", "small.json", "--no-async-grad-reduce")
    assert asked("plan.json", *same).prediction is not None


def test_sizes_of_the_search_are_those_of_the_run() -> None:
    """A plan made with other sizes is of that model, unless the command line says another."""
    request = {**PREDICTED["request"], "num-heads": "8", "ffn-hidden-size": "64"}
    write(Path("sized.json"), {**PREDICTED, "request": {**request, "vocab-size": "500"}})
    question = asked("sized.json")
    layer = question.job.spec.layers[0]
    assert (layer.num_heads, layer.num_kv_heads, layer.ffn_hidden_size) == (8, 4, 64)
    assert question.job.spec.vocab_size == 500
    assert question.prediction is not None
    other = asked("sized.json", "--ffn_hidden_size", "96")
    assert other.job.spec.layers[0].ffn_hidden_size == 96
    assert other.prediction is None
    assert "of other sizes" in other.notes[-1]


def test_global_options_beside_a_file_are_ignored_with_a_note() -> None:
    """The documentation: they are ignored and overwritten by the JSON file."""
    question = asked("plan.json", "--pp_deg", "4", "--sdp", "1")
    assert question.job.plan == read_strategy(STRATEGY)
    assert question.notes == (
        "the plan file contains the strategy, so --pp-deg, --sdp are ignored",
    )


def test_world_size_of_old_files() -> None:
    """From the option, or from torchrun."""
    old = {key: value for key, value in STRATEGY.items() if key != "world_size"}
    write(Path("old.json"), old)
    model = ("--model", "small.json")

    assert asked("old.json", *model, "--world-size", "8").job.plan.world_size == 8
    assert asked("old.json", *model, launched=16).job.plan.world_size == 16


def test_layers_of_another_number() -> None:
    """The option takes so many of them."""
    write(Path("six.json"), {**MODEL, "layers": [{**MODEL["layers"][0], "num_layers": 6}]})
    question = asked("strategy.json", "--model", "six.json", "--num-layers", "4")
    assert question.job.spec.num_layers == 4


def test_a_plan_for_fp16_is_run_in_fp16() -> None:
    """In another precision it is another run, and its prediction is left out."""
    write(Path("plan.json"), {**PREDICTED, "options": {"mixed_precision": "fp16"}})
    question = asked("plan.json")
    assert (question.job.precision, question.prediction is None) == ("fp16", False)
    other = asked("plan.json", "--mixed-precision", "bf16")
    assert (other.job.precision, other.prediction) == ("bf16", None)
    assert "fp16, here bf16" in other.notes[0]


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6).map(tuple), data=st.data())
def test_scaling_down_keeps_proportions(sizes: tuple[int, ...], data: st.DataObject) -> None:
    """Every stage keeps a layer, none grows, shares are within one layer of their proportion."""
    layers = data.draw(st.integers(len(sizes), sum(sizes)))
    kept, chosen = chosen_layers(sizes, layers)

    assert sum(kept) == layers == len(chosen) == len(set(chosen))
    assert all(1 <= own <= size for own, size in zip(kept, sizes, strict=True))
    assert list(chosen) == sorted(chosen)
    stage_of = [j for j, size in enumerate(sizes) for _ in range(size)]
    assert tuple(stage_of[index] for index in chosen) == tuple(
        j for j, own in enumerate(kept) for _ in range(own)
    )
    beyond = sum(sizes) - len(sizes)
    for own, size in zip(kept, sizes, strict=True):
        share = (size - 1) * (layers - len(sizes)) / beyond if beyond else 0
        assert abs(own - 1 - share) < 1


def test_scaling_down_keeps_encoder_and_decoder() -> None:
    """One layer of a T5 would be another model; the remedy is the fewest layers that are both."""
    plan = make_job(2, *(LayerStrategy(),) * 4, model=T5).plan
    with pytest.raises(OptionError, match=r"without an encoder .*Use at least 2$"):
        scale_down(plan, T5, layers=1)
    scaled, small = scale_down(plan, T5, layers=2)
    assert [layer.num_layers for layer in small.layers] == [1, 1]
    assert small.layers[1].cross_attention
    assert scaled.stage_sizes == (2,)


def test_scaling_down_takes_layers_evenly() -> None:
    """Strategies and layer types come along."""
    types = [{**MODEL["layers"][0], "num_layers": 4}, {**MODEL["layers"][0], "num_layers": 4}]
    types[1]["ffn_hidden_size"] = 64
    spec = load_spec(str(write(Path("two.json"), {**MODEL, "layers": types})))
    text = ",".join("12" * 4)
    columns = dict.fromkeys(("dp_types_enc", "use_sp", "checkpoint"), "0,0,0,0,0,0,0,0")
    plan = read_strategy(
        {
            **STRATEGY,
            **columns,
            "tp_sizes_enc": text,
            "pp_division": "2,6",
            "tp_consecutive_flags": "1,1,1,1,1,1,1,1",
        }
    )
    assert chosen_layers((2, 6), 4) == ((1, 3), (1, 3, 5, 7))
    scaled, small = scale_down(plan, spec, layers=4)

    assert scaled.stage_sizes == (1, 3)
    assert [s.tp for s in scaled.layers] == [2, 2, 2, 2]
    assert [(kind.num_layers, kind.ffn_hidden_size) for kind in small.layers] == [(2, 48), (2, 64)]
    with pytest.raises(OptionError, match=r"--layers: expected 2 .* to 8 .* got 1"):
        scale_down(plan, spec, layers=1)
