"""`autopar-estimate --plan`: one plan in four models, their parts and what differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.documents.spec import load_spec
from autopar.errors import InputError
from autopar.price.job import job_of_run
from autopar.price.step import step_time
from autopar.rates.accuracy import load_accuracy
from autopar.rates.parts.operations import machine_of
from autopar.rates.stack import DEFAULT_STACK
from autopar.records import replace
from autopar.run.plan import LayerStrategy, VocabStrategy
from search.closed_form.calculon import evaluate
from search.closed_form.comparison import (
    KINDS,
    MODELS,
    TERMS,
    Column,
    PlanQuestion,
    bottom_up_run,
    compare,
    load_question,
)
from search.closed_form.files import application_of, calculon_system, execution_keys
from search.commands import estimate, search
from search.show.comparison import comparison_document

ASKED = ("--model", "llama2-7b", "--hardware", "a100-80gb:1x8", "--global-batch-size", "8")
TENSOR = (*ASKED, "--stack", "megatron-core", "--micro-batches", "8", "--pin", "tp=8,vtp=8")
Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the plan of llama2-7b on 8 A100, tensor degree 8, 8 micro-batches of 1."""
    folder = tmp_path_factory.mktemp("plans")
    assert search.run([*TENSOR, "--output-config-path", str(folder / "tp8.json")]) == 0
    return folder / "autopar_plan_tp8.json"


@pytest.fixture
def question(path: Path) -> PlanQuestion:
    """Return what that file asks."""
    return load_question(str(path))


def columns(question: PlanQuestion, **changes: Any) -> dict[str, Column]:
    """Return what all models say of the plan with changes."""
    plan = replace(question.plan, **changes)
    return {one.model: one for one in compare(replace(question, plan=plan)).columns}


def test_parts_add_up(question: PlanQuestion) -> None:
    """To the step in every model, and kinds to what is computed."""
    found = columns(question)

    assert list(found) == list(MODELS)
    for column in found.values():
        assert set(column.terms_s) <= set(TERMS)
        assert sum(column.terms_s.values()) == pytest.approx(column.total_s, rel=1e-9)
        assert sum(column.own_s.values()) == pytest.approx(column.total_s, rel=1e-9)
        if column.kinds_s:
            assert set(column.kinds_s) == set(KINDS)
            computed = sum(column.kinds_s.values())
            assert computed == pytest.approx(column.terms_s["compute"], rel=1e-9)
    assert [model for model, column in found.items() if not column.kinds_s] == ["planner"]


def test_bottom_up_is_the_step_of_its_job(question: PlanQuestion) -> None:
    """On the card with the stack of its estimates; the interval is that of its class of runs."""
    column = columns(question)["bottom_up"]
    job = job_of_run(bottom_up_run(question))
    step = step_time(machine_of(question.card, question.stack), job)
    runs = load_accuracy().of("megatron-core", experts=False, site_known=False)

    assert (question.stack.name, question.card.name) == ("megatron-core", "a100-80gb")
    assert column.total_s == step.total_s
    assert column.runs == runs
    assert runs.stack == "megatron-core"


def test_bottom_up_notes_what_it_prices_otherwise(question: PlanQuestion) -> None:
    """ZeRO-3 that keeps its gradients, and layers of other degrees than embedding and head."""
    sharded = (LayerStrategy(tp=2, zero3=True),) * 32
    wide = {"num_microbatches": 2, "vocab": VocabStrategy(tp=2)}
    assert columns(question)["bottom_up"].notes == ()
    (one,) = columns(question, layers=sharded, **wide)["bottom_up"].notes
    assert one == "gradients of ZeRO-3 are scattered in every micro-batch, not once a step"
    (other,) = columns(question, vocab=VocabStrategy(tp=4))["bottom_up"].notes
    assert other == "redistribution between layers of different degrees is ignored"
    late = replace(question, async_grad_reduce=False)
    assert columns(late, layers=sharded, **wide)["bottom_up"].notes == ()


def test_bottom_up_leaves_refinements_to_the_planner(question: PlanQuestion) -> None:
    """Split experts, expert degrees and selective recomputation; MTP layers are ignored."""
    mixture = load_spec("mixtral-8x7b")
    for spec, strategy, reason in (
        (mixture, LayerStrategy(tp=8), "experts that tensor ranks split"),
        (mixture, LayerStrategy(ep=8), "expert degree 8 of the plan"),
        (
            question.spec,
            LayerStrategy(tp=8, recompute=("core_attn",)),
            "recomputation of core_attn",
        ),
    ):
        plan = replace(question.plan, layers=(strategy,) * 32)
        with pytest.raises(InputError, match=reason):
            bottom_up_run(replace(question, plan=plan, spec=spec))
    more = replace(question, spec=replace(question.spec, mtp_layers=1))
    assert bottom_up_run(more) == bottom_up_run(question)


def test_planner_is_what_the_file_says(question: PlanQuestion, path: Path) -> None:
    """Step and parts; a file without them has none, and says what writes one."""
    document = json.loads(path.read_text())
    column = columns(question)["planner"]
    assert column.total_s == document["step_time_s"]
    assert dict(column.own_s) == document["prediction"]["waterfall_s"]

    bare = replace(question, step_time_s=None)
    (none,) = (one for one in compare(bare).columns if one.model == "planner")
    assert none.total_s is None
    assert "--evaluate" in none.reason


def test_calculon_is_asked_the_same(question: PlanQuestion) -> None:
    """The shipped execution of 8 tensor ranks, with the plan's batch, as Megatron runs it."""
    _, keys = execution_keys("1x8-tp8")
    execution = {
        **keys,
        "batch_size": 8,
        "structure_type": "llama",
        "seq_par_ag_redo": True,
    }
    expected = evaluate(
        application_of(load_spec("llama2-7b")), execution, calculon_system("a100-80gb")
    )

    assert columns(question)["calculon"].total_s == expected["total_time"]


def test_two_dimensions_are_asked_the_same(question: PlanQuestion) -> None:
    """Degrees and placement of the command line that says the same."""
    arguments = ["tensor2d", "--model", "llama2-7b", "--system", "a100-80gb", "--strategy", "1d"]
    arguments += ["--config", "dp=1,tp=8,pp=1,mbs=1", "--batch", "8", "--json"]
    target = Path(question.path).with_name("two.json")
    assert estimate.run([*arguments, str(target)]) == 0

    assert columns(question)["tensor2d"].total_s == json.loads(target.read_text())["t"]


def test_closed_forms_say_what_they_cannot_price(question: PlanQuestion) -> None:
    """In one sentence each; the bottom-up step prices all of these."""
    wide = {"num_microbatches": 1, "vocab": VocabStrategy(tp=2)}
    of_layers = {
        "no context-parallel ring in this model": LayerStrategy(tp=2, cp=4),
        "this model does not shard weights over data-parallel ranks as ZeRO-3 does": LayerStrategy(
            tp=2, zero3=True
        ),
    }
    for reason, strategy in of_layers.items():
        found = columns(question, layers=(strategy,) * 32, **wide)
        assert found["calculon"].reason == found["tensor2d"].reason == reason
        assert found["bottom_up"].total_s
    again = LayerStrategy(tp=8, checkpoint=True)
    found = columns(question, layers=(again,) * 32)
    assert (
        found["tensor2d"].reason == "this model recomputes attention scores only, not whole layers"
    )
    assert found["calculon"].terms_s["recomputation"] > 0
    mixed = columns(question, layers=(again,) * 8 + question.plan.layers[8:])
    assert (
        mixed["calculon"].reason == "layers differ in checkpoint, and Calculon needs equal layers"
    )
    assert mixed["tensor2d"].reason.startswith("layers differ in checkpoint")
    assert mixed["bottom_up"].terms_s["recomputation"] > 0


def test_no_closed_form_has_experts(question: PlanQuestion) -> None:
    """The bottom-up step does, with the interval of runs that have them."""
    spec = load_spec("mixtral-8x7b")
    plan = replace(question.plan, layers=(LayerStrategy(zero3=True),) * 32, num_microbatches=1)
    asked = replace(question, spec=spec, plan=plan)
    found = {one.model: one for one in compare(asked).columns}

    assert found["bottom_up"].runs is not None
    assert found["bottom_up"].runs.experts
    for model in ("calculon", "tensor2d"):
        assert "is a mixture of experts" in found[model].reason


def test_bottom_up_says_what_it_cannot_price(question: PlanQuestion) -> None:
    """The others still have their columns; layers of several degrees are priced, and it is said."""
    found = columns(question, layers=(LayerStrategy(tp=8, ulysses=True),) * 32)
    assert found["bottom_up"].total_s is None
    assert (
        found["bottom_up"].reason
        == "only the planner prices Ulysses sequence parallelism, not bottom-up"
    )
    assert found["planner"].total_s is not None

    layers = (LayerStrategy(tp=8),) * 16 + (LayerStrategy(tp=4),) * 16
    found = columns(question, layers=layers, num_microbatches=1)
    assert found["bottom_up"].total_s
    assert found["bottom_up"].notes == (
        "redistribution between layers of different degrees is ignored",
    )
    assert found["calculon"].reason == "layers differ in tp, and Calculon needs equal layers"


def test_notes_say_how_what_is_priced_differs(question: PlanQuestion) -> None:
    """Stages of another length, a vocabulary of another degree."""
    tensor = LayerStrategy(tp=4)
    found = columns(
        question,
        num_stages=2,
        stage_sizes=(15, 17),
        layers=(tensor,) * 32,
        vocab=VocabStrategy(tp=1),
        global_batch=32,
    )
    for model in ("calculon", "tensor2d"):
        assert "stages of 16 layers in the place of 15, 17" in found[model].notes
        assert "embedding and head have tp 4 as the layers, not 1" in found[model].notes
    assert "it has no optimizer" in found["tensor2d"].notes


def test_differences_name_the_part_that_makes_most(question: PlanQuestion) -> None:
    """The part with the largest gap in the direction of the whole, by kind where both say it."""
    comparison = compare(question)
    by_model = {one.model: one for one in comparison.columns}
    assert len(comparison.differences) == 6

    for gap in comparison.differences:
        one, other = by_model[gap.one], by_model[gap.other]
        assert one.total_s is not None
        assert other.total_s is not None
        assert gap.seconds == other.total_s - one.total_s
        fine = bool(one.kinds_s and other.kinds_s)
        left, right = (c.parts_s if fine else dict(c.terms_s) for c in (one, other))
        gaps = {name: right.get(name, 0) - left.get(name, 0) for name in {**left, **right}}
        assert sum(gaps.values()) == pytest.approx(gap.seconds, rel=1e-9)
        assert gap.term_s == gaps[gap.term]
        assert gap.term_s * gap.seconds > 0
        same_way = [abs(value) for value in gaps.values() if value * gap.seconds > 0]
        assert abs(gap.term_s) == max(same_way)
        if gap.against:
            assert gap.against_s * gap.seconds < 0


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Return a function that runs the command: its exit code and what it prints."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = estimate.run(arguments)
        return code, *capsys.readouterr()

    return run


def test_json_is_what_is_shown(ask: Ask, path: Path, question: PlanQuestion) -> None:
    """One object for each plan, and every figure of the table in it."""
    code, out, _ = ask("--plan", str(path), "--plan", str(path), "--json", "-")
    assert code == 0
    one, same = json.loads(out)["plans"]
    assert one == same == json.loads(json.dumps(comparison_document(compare(question))))
    assert (one["model"], one["system"], one["stack"], one["num_gpus"]) == (
        *("llama2-7b", "a100-80gb", "megatron-core"),
        8,
    )
    code, out, _ = ask("--plan", str(path))
    assert code == 0
    assert "llama2-7b, 8 a100-80gb, tp8: 8 micro-batches of 1 x 4,096 tokens" in out
    assert "published megatron-core runs" in " ".join(out.split())
    for word in (*MODELS.values(), "TP comm", "  GEMM", "Differences", "Notes"):
        assert word in out


@pytest.mark.whole
def test_stack_is_that_of_the_estimates_or_of_the_engine(ask: Ask, tmp_path: Path) -> None:
    """Estimated times are of a stack; measured ones of whatever the engine runs; an option wins."""
    target = tmp_path / "fsdp.json"
    asked = [*ASKED, "--engine", "accelerate", "--output-config-path", str(target)]
    # options of plans whose layers may differ ask for one of them
    assert search.run([*asked, "--max-pp-deg", "1"]) == 0
    made = tmp_path / "autopar_plan_fsdp.json"
    assert json.loads(made.read_text())["options"]["engine"] == "accelerate"

    assert load_question(str(made)).stack.name == DEFAULT_STACK
    measured = tmp_path / "autopar_plan_measured.json"
    measured.write_text(json.dumps(json.loads(made.read_text()) | {"estimated": False}))
    assert load_question(str(measured)).stack.name == "composer-fsdp"
    assert load_question(str(made), stack="megatron-2021").stack.name == "megatron-2021"


def test_nodes_are_those_of_the_plan(tmp_path: Path) -> None:
    """Four GPUs of a card of eight in each node: tensor ranks are on two of them."""
    target = tmp_path / "nodes.json"
    asked = ["--model", "llama2-7b", "--hardware", "a100-80gb:2x4", "--global-batch-size", "8"]
    asked += ["--micro-batches", "8", "--pin", "tp=8,vtp=8", "--output-config-path", str(target)]
    assert search.run(asked) == 0
    question = load_question(str(tmp_path / "autopar_plan_nodes.json"))
    apart = {one.model: one for one in compare(question).columns}
    together = replace(question, card=replace(question.card, max_gpus_per_node=8))
    near = {one.model: one for one in compare(together).columns}

    assert question.card.max_gpus_per_node == 4
    for model in ("bottom_up", "calculon", "tensor2d"):
        assert apart[model].terms_s["tensor parallel"] > near[model].terms_s["tensor parallel"]


def test_strategy_files_need_model_and_devices(ask: Ask, path: Path) -> None:
    """They name neither; with both all but the planner have a column."""
    strategy = str(path.with_name("tp8.json"))
    assert ask("--plan", strategy)[0] == 2
    code, _, err = ask("--plan", strategy, "--model", "llama2-7b")
    assert code == 2
    assert "--system" in err
    code, out, _ = ask(
        *("--plan", strategy, "--model", "llama2-7b", "--system", "a100", "--json", "-")
    )
    assert code == 0
    (one,) = json.loads(out)["plans"]
    assert [name for name, found in one["models"].items() if found["reason"]] == ["planner"]


def test_measured_clusters_need_a_card(
    ask: Ask,
    path: Path,
    tmp_path: Path,
) -> None:
    """Files of bandwidths say nothing of a device's kernels."""
    document = json.loads(path.read_text())
    document["request"]["hardware"] = "a100-80gb_1x8"
    made = tmp_path / "measured.json"
    made.write_text(json.dumps(document))
    code, _, err = ask("--plan", str(made))
    assert code == 2
    assert "--system" in err
    assert ask("--plan", str(made), "--system", "a100-80gb")[0] == 0


def test_a_site_is_left_out_for_other_devices(
    ask: Ask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the plan's cluster reached says nothing of a card that is asked for instead."""
    arguments = [*ASKED, "--site", "selene-a100", "--pin", "tp=8,vtp=8"]
    assert search.run([*arguments, "--output-config-path", str(tmp_path / "sited.json")]) == 0
    capsys.readouterr()
    made = tmp_path / "autopar_plan_sited.json"

    code, out, err = ask("--plan", str(made), "--json", "-")
    assert (code, "left out" in err) == (0, False)
    other = ask("--plan", str(made), "--system", "h100", "--json", "-")
    assert other[0] == 0
    assert "a100-80gb" in other[2]
    (mine,), (theirs,) = (json.loads(text)["plans"] for text in (out, other[1]))
    assert mine["system"] == "a100-80gb"
    assert theirs["system"] == "h100-80gb"
