"""What is printed and written of a result, compared with golden files and with the documents."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from autopar.answer import RequestedPlan
from autopar.command.console import make_console
from autopar.documents.plan import (
    PLAN_FILE_VERSION,
    HardwareEntry,
    PlanDocument,
    RunDocument,
    read_strategy,
)
from autopar.output import write_files
from autopar.rates.measured import Curve
from autopar.records import replace
from autopar.run.model import ModelSpec
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy, violations
from autopar.units import GB, GIB
from search.commands import search as search_command
from search.planning.layered.core import ABI_VERSION
from search.planning.layered.prediction import SearchResult
from search.planning.layered.summary import (
    found_or_reason,
    infeasible_sentence,
    one_line,
    priced_of_result,
    summary_of,
)
from search.planning.session import ConstrainedResult
from search.questions.gains import add_bandwidth, gains_of
from search.request.options import SearchOptions, option_record
from search.show.files import (
    evaluation_document,
    frontier_entries,
    output_paths,
    output_texts,
    plan_document,
    result_document,
)
from search.show.frontier import show_frontier
from search.show.summary import SCREEN_WIDTH
from search.show.terminal import (
    plan_runs,
    show_answer,
    show_categories,
    show_given,
    show_more,
    show_why_not,
)
from tests.unit.cli_results import (
    HARDWARE,
    INFEASIBLE,
    PLAN,
    PREDICTION,
    RESULT,
    SPEC,
    make_session,
)

JSON_KEYS = [
    "status",
    "legal",
    "fits",
    "step_time_s",
    "replay_s",
    "samples_per_s",
    "bound_samples_per_s",
    "gap",
    "memory",
    "plan",
    "alternatives",
    "defaults_used",
    "search",
]


def printed(show: Callable[..., None], *arguments: object, **options: object) -> str:
    """Return what a report prints into a pipe."""
    stream = io.StringIO()
    show(make_console(stream, SCREEN_WIDTH), *arguments, **options)
    return stream.getvalue()


def write_all(
    folder: Path, result: SearchResult = RESULT, spec: ModelSpec = SPEC
) -> tuple[Path, ...]:
    """Write the files of a result."""
    options = SearchOptions(settle_bsz=16, disable_ckpt=True)
    paths = output_paths(
        spec=SPEC, options=options, hardware=HARDWARE, config_path=str(folder), request={}
    )
    texts = output_texts(
        result,
        paths,
        spec=spec,
        hardware=HardwareEntry(card="box", num_nodes=1, num_gpus_per_node=8),
        options=options,
        request={"model": "toy"},
    )
    write_files(texts)
    return tuple(texts)


def test_report_is_the_golden_one(golden: Callable[[str, str], None]) -> None:
    """Plan, waterfall, memory, alternatives, bound, defaults and inputs, within 80 columns."""
    found = make_session().throughput(PLAN, PREDICTION)
    answer = summary_of(RESULT, title="toy on box", throughput=found, gpu_hour_price=2.0)
    text = printed(show_answer, answer)

    golden("search_report.txt", text)
    assert max(len(line) for line in text.splitlines()) <= SCREEN_WIDTH
    assert "\x1b" not in text
    for needed in ("ESTIMATES", "2-3", "bubble", "tp2 dp4", "25.00 %", "gap 0 %", "replay", "$"):
        assert needed in text


def test_evaluation_report_is_the_golden_one(golden: Callable[[str, str], None]) -> None:
    """An illegal plan over its budget shows why, and still its price."""
    stage = replace(PREDICTION.stages[0], reserved_bytes=30 * GIB)
    bad = replace(
        PREDICTION,
        legal=False,
        fits=False,
        stages=(stage, PREDICTION.stages[1]),
        problems=("layers 0-3: heads(16) % tp(3) = 1 != 0", "stage 0: 30 GiB > 24 GiB"),
    )
    text = printed(show_given, make_session().summary(PLAN, bad, (), None), path="x.json")

    golden("evaluate_report.txt", text)
    assert "Verdict    is illegal\n" in text
    assert "heads(16) % tp(3) = 1 != 0" in text


def test_explanation_is_the_golden_one(golden: Callable[[str, str], None]) -> None:
    """Categories per stage and run, what one more GiB brings, and the term behind a why-not."""
    session = make_session()
    text = printed(show_categories, PREDICTION) + printed(show_more, gains_of(session, RESULT))
    text += why_not(
        "tp=8", RESULT, ConstrainedResult(result=session.planner.why_not("tp=8", RESULT))
    )

    golden("explain_report.txt", text)
    assert "+1 GiB of memory per GPU: +10.000 %" in text
    assert "Why not tp=8: 20.00 % slower" in text
    assert "DP comm   +2.50 ms" in text


def why_not(rule: str, baseline: SearchResult, asked: ConstrainedResult) -> str:
    """Return what is printed of the best plan under a rule."""
    best, (other, reason) = priced_of_result(baseline), found_or_reason(asked, baseline, 24 * GIB)
    asked = RequestedPlan(rule, other, reason)
    return printed(show_why_not, asked, best)


def test_why_not_of_what_the_best_plan_does_or_nothing_can() -> None:
    """A rule that holds already, and one that leaves nothing."""
    assert "it is this plan" in why_not("tp=2", RESULT, ConstrainedResult(result=RESULT))
    assert "no plan fits in 24 GiB" in why_not("tp=1", RESULT, ConstrainedResult(result=INFEASIBLE))


def test_plan_that_cannot_run_has_no_price() -> None:
    """An unpriced plan is shown without bars or numbers."""
    unpriced = replace(PREDICTION, step_time_s=math.nan, samples_per_s=math.nan)
    text = printed(show_given, make_session().summary(PLAN, unpriced, (), None))

    assert "the plan cannot run" in text
    assert "nan" not in text
    assert json.dumps(evaluation_document(PLAN, unpriced).content(), allow_nan=False)


def test_frontier_shows_budget_and_plan() -> None:
    """One row per budget."""
    text = printed(show_frontier, [RESULT, INFEASIBLE])

    assert "24.00" in text
    assert " ".join(text.split()).count("batch 16,") == 1
    assert len(frontier_entries([RESULT, INFEASIBLE])) == 1


def test_infeasible_sentence_has_stage_bytes_and_budget() -> None:
    """The budget shown is rounded up, so that it works."""
    infeasibility = INFEASIBLE.infeasibility
    assert infeasibility is not None

    text = infeasible_sentence(infeasibility, 24 * GIB)

    assert "stage 1 of 0-1 of the smallest plan needs 3.00 GiB more (3221225472 bytes)" in text
    assert "--memory-constraint 27.01" in text
    never = replace(infeasibility, smallest_budget_bytes=0)
    text = infeasible_sentence(never, 24 * GIB)
    assert text == "no plan, with any --memory-constraint: model states of 2 layers"


def test_infeasible_sentence_names_what_restricts_the_search() -> None:
    """Preset, disabled dimensions and rules as they are written, and no option at its default."""
    infeasibility = INFEASIBLE.infeasibility
    assert infeasibility is not None
    never = replace(infeasibility, smallest_budget_bytes=0)

    def sentence(options: SearchOptions) -> str:
        text = infeasible_sentence(
            never, 24 * GIB, options=dataclasses.asdict(options), subject="toy on 8 GPUs"
        )
        head, _, tail = text.partition(", with any --memory-constraint: ")
        assert tail == "model states of 2 layers"
        return head

    assert sentence(SearchOptions()) == "no plan for toy on 8 GPUs"
    assert sentence(SearchOptions(search_space="tp", disable_vtp=True)) == (
        "no plan for toy on 8 GPUs with --search-space tp --disable-vtp"
    )
    pins = tuple(f"layers {i}:tp=2" for i in range(9))
    text = sentence(SearchOptions(pin=pins, forbid=("ckpt=1",)))
    assert text.endswith("--pin 'layers 5:tp=2' and 4 more")


def test_why_not_names_the_options_of_the_search() -> None:
    """The rule asked about is named once, in front."""
    infeasibility = INFEASIBLE.infeasibility
    assert infeasibility is not None
    options = dict(RESULT.options) | {"search_space": "dp"}
    baseline = replace(RESULT, options=options)
    never = replace(
        INFEASIBLE,
        options=options | {"pin": ("tp=2",)},
        infeasibility=replace(infeasibility, smallest_budget_bytes=0),
    )

    text = why_not("tp=2", baseline, ConstrainedResult(result=never))

    assert "--search-space" in text
    assert "--pin" not in text


def test_runs_of_a_plan() -> None:
    """Equal neighbours of one stage are one run."""
    assert [run[:3] for run in plan_runs(PLAN)] == [(0, 0, 1), (0, 1, 1), (1, 2, 2)]


def test_alternatives_name_strategies_as_the_plan_does() -> None:
    """One label per strategy, with the default data-parallel type where it matters."""
    assert one_line(PLAN, batch=True) == (
        "pp2, per layer: 3 x tp2 dp2 ZeRO-2, 1 x tp2 dp2 ZeRO-3 recompute full, micro-batch 2, "
        "batch 16, embedding and head tp4 ZeRO-3"
    )
    same = replace(PLAN, layers=(LayerStrategy(tp=2, cp=2),) * 4, vocab=VocabStrategy(tp=2, cp=2))
    assert one_line(same) == "tp2 cp2 pp2, ZeRO-2, micro-batch 4"
    alone = replace(
        same, layers=(LayerStrategy(checkpoint=True),) * 4, vocab=VocabStrategy(), world_size=2
    )
    assert one_line(alone) == "pp2, micro-batch 4, recompute full"


def test_json_has_exactly_the_documented_keys() -> None:
    """No key more, none less, and numbers only."""
    document = result_document(RESULT).content()

    assert list(document) == JSON_KEYS
    assert document["plan"]["pp_deg"] == 2
    assert document["memory"][1] == {
        "stage": 1,
        "allocated_bytes": 11 * GIB,
        "reserved_bytes": 13 * GIB,
        "budget_bytes": 24 * GIB,
        "odds_of_oom": 0.004,
    }
    assert document["search"] == {"states": 123, "cpu_s": 0.01, "wall_s": 0.02}
    assert document["alternatives"][0]["differs_by"] == "p=1"


def test_json_of_an_infeasible_search() -> None:
    """Keys stay, the plan is null, and the reason is there."""
    document = result_document(INFEASIBLE).content()

    assert list(document) == [*JSON_KEYS, "infeasible"]
    assert document["status"] == "infeasible"
    assert document["plan"] is None
    assert document["fits"] is False
    assert document["infeasible"]["missing_bytes"] == 3 * GIB


def test_both_files_hold_the_plan(tmp_path: Path) -> None:
    """The strategy file has the documented name; the plan file stands beside it."""
    strategy, own = write_all(tmp_path)

    name = "toy_1nodes_8gpus_per_node_24GB_bf16_bsz16_ckpt_off_box_seq2048.json"
    assert strategy.name == f"galvatron_config_{name}"
    assert own.name == f"autopar_plan_{name}"
    assert read_strategy(strategy) == read_strategy(own) == PLAN


def test_plan_file_holds_prediction_inputs_and_options(tmp_path: Path) -> None:
    """Per stage, run and category; the memory interval; hashes; what was asked."""
    document = PlanDocument.read(write_all(tmp_path)[1]).content()

    stage = document["prediction"]["stages"][1]
    assert stage["ranks"] == [4, 7]
    assert stage["memory_interval_bytes"] == [11 * GIB, 13 * GIB]
    assert stage["runs"][0]["time_s"]["tail"] == 0.002
    assert document["inputs"][0]["sha256"] == "ab" * 32
    assert document["request"] == {"model": "toy"}
    assert document["estimated"] is True
    assert document["versions"] == {
        "autopar": metadata.version("autopar"),
        "core_interface": ABI_VERSION,
    }


def test_plans_of_unknown_sizes_are_written_as_strategies(tmp_path: Path) -> None:
    """Galvatron's profiles do not say heads; the figures are those of the file of a run."""
    strategy, own = write_all(tmp_path)
    run = RunDocument.read(own)
    assert (run.run.strategy.gpus, run.runtime.engine, run.hardware.card) == (8, "none", "box")
    layer = replace(SPEC.layers[0], num_heads=None, num_kv_heads=None)

    again, other = write_all(tmp_path / "unknown", spec=replace(SPEC, layers=(layer,)))

    assert json.loads(other.read_text())["version"] == PLAN_FILE_VERSION
    assert again.read_bytes() == strategy.read_bytes()
    assert PlanDocument.read(other) == PlanDocument.read(own)


def test_plan_file_does_not_depend_on_limits_of_time_or_the_clock() -> None:
    """Same inputs, other limits and times: the same document."""
    other = replace(
        RESULT,
        options=option_record(SearchOptions(time_limit_s=5.0), 24.0 * GIB),
        stats=replace(RESULT.stats, cpu_s=9.0, wall_s=9.0, states=7),
    )

    assert plan_document(other) == plan_document(RESULT)
    assert json.dumps(plan_document(RESULT).content(), allow_nan=False)


def test_infeasible_result_writes_nothing(tmp_path: Path) -> None:
    """There is no plan to write."""
    assert write_all(tmp_path, INFEASIBLE) == ()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("operation", "factor"), [("allreduce", 1.5), ("all2all", 0.75)])
def test_more_bandwidth_raises_the_bus_bandwidth_at_every_size(
    operation: str, factor: float
) -> None:
    """Bytes on the wire per second grow by exactly what was added."""
    sizes, times = np.array([1e6, 1e9]), np.array([1e-4, 2e-2])
    curve = Curve(sizes_bytes=sizes, times_s=times)
    hardware = replace(HARDWARE, curves={(operation, 4): curve})

    more = add_bandwidth(hardware, collective=GB)

    faster = more.curves[(operation, 4)]
    gained = factor * sizes / faster.times_s - factor * sizes / times
    np.testing.assert_allclose(gained, GB, rtol=1e-9)
    assert more.allreduce_bytes_per_s[(8, True)] == 1e11 + GB
    assert more.p2p_bytes_per_s == hardware.p2p_bytes_per_s
    assert add_bandwidth(hardware, p2p=GB).curves == hardware.curves


def test_runs_with_the_same_violation_share_a_sentence() -> None:
    """What differs between neighbours, such as checkpointing, does not repeat the arithmetic."""
    bad = (LayerStrategy(tp=3), LayerStrategy(tp=3, checkpoint=True))
    spec = replace(SPEC, layers=(replace(SPEC.layers[0], num_layers=12),))
    good = LayerStrategy()
    plan = Plan(
        world_size=8,
        num_stages=1,
        stage_sizes=(12,),
        layers=(*bad, good, bad[0], good, bad[0], good, bad[0], good, bad[0], good, good),
        vocab=VocabStrategy(),
        global_batch=8,
        num_microbatches=1,
    )

    found = violations(plan, spec, sequence_parallel=False)

    heads = [text for text in found if ": heads(" in text]
    assert len(heads) == 1
    assert heads[0].startswith("layers 0-1, 3, 5, 7, 9: heads(16) % tp(3) = 1 != 0")


def test_the_frontier_is_drawn(folder: Path) -> None:
    """`--plot` asks for it, writes before anything is printed, and the same bytes again."""
    pytest.importorskip("matplotlib")
    words = ("--model", "llama2-7b", "--hardware", "a100-80gb:1x8", "--num-layers", "4")
    words += ("--engine", "none")
    assert search_command.run([*words, "--plot", "front.svg"]) == 0
    drawn = Path("front.svg").read_text()
    assert "memory budget, GiB/GPU" in drawn
    assert search_command.run([*words, "--frontier", "--plot", "front.svg"]) == 0
    assert Path("front.svg").read_text() == drawn
    assert not list(folder.glob("*.bak*"))
    assert search_command.run([*words, "--plot", "front.pdf"]) == 2
