"""The plan file and the printed result: one typed document, written, read and refused alike."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from autopar.documents.checks import load_document
from autopar.documents.plan import (
    AlternativeEntry,
    OptionsEntry,
    PlanDocument,
    PredictionEntry,
    ResultDocument,
    VersionsEntry,
    finite,
    plain,
    read_strategy,
    write_document,
)
from autopar.documents.strategy import strategy_document
from autopar.errors import DocumentError
from autopar.records import replace
from autopar.run.plan import Infeasibility, LayerRun, Prediction, StagePrediction, WidestCell
from autopar.sources import Source
from search.show.files import evaluation_document, plan_document, result_document
from tests.often import often
from tests.unit.cli_results import INFEASIBLE, PLAN, PREDICTION, RESULT

PLAN_V1 = Path(__file__).resolve().parents[2] / "data" / "plan_v1.json"
RESULT_V1 = PLAN_V1.with_name("result_v1.json")

TEXTS = st.text(max_size=8)
AMOUNTS = st.floats(min_value=0.0, max_value=1e12)
NUMBERS = st.floats(min_value=-1e12, max_value=1e12) | st.integers(-(10**9), 10**9)
COUNTS = st.integers(0, 2**45)
UNKNOWN = st.sampled_from([math.inf, math.nan])
FLAGS = st.none() | st.booleans()
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
RUNS = st.builds(
    LayerRun,
    first_layer=COUNTS,
    num_layers=COUNTS,
    layer_type=COUNTS,
    label=TEXTS,
    time_s=st.dictionaries(TEXTS, NUMBERS | UNKNOWN, max_size=3),
    memory_bytes=st.dictionaries(TEXTS, NUMBERS, max_size=3),
)
STAGES = st.builds(
    StagePrediction,
    stage=st.integers(0, 9),
    forward_s=AMOUNTS,
    backward_s=AMOUNTS | UNKNOWN,
    send_s=AMOUNTS,
    tail_s=AMOUNTS,
    allocated_bytes=COUNTS,
    reserved_bytes=COUNTS,
    budget_bytes=COUNTS,
    odds_of_oom=AMOUNTS,
    in_flight=COUNTS,
    memory_bytes=st.dictionaries(TEXTS, COUNTS, max_size=3),
    time_s=st.dictionaries(TEXTS, NUMBERS, max_size=3),
    runs=st.lists(RUNS, max_size=2).map(tuple),
)
PREDICTIONS = st.builds(
    Prediction,
    step_time_s=AMOUNTS | UNKNOWN,
    samples_per_s=AMOUNTS,
    replay_s=AMOUNTS | UNKNOWN,
    stages=st.lists(STAGES, max_size=3).map(tuple),
    legal=st.booleans(),
    fits=st.booleans(),
    problems=st.lists(TEXTS, max_size=2).map(tuple),
    waterfall_s=st.dictionaries(TEXTS, NUMBERS, max_size=3),
    step_time_interval_s=st.none() | st.tuples(AMOUNTS, AMOUNTS),
    interval_of=st.sampled_from([("communication",), ("communication", "computation"), ()]),
    widest_cell=st.none() | st.builds(WidestCell, name=TEXTS, share=st.floats(0.0, 1.0)),
)
STRATEGIES = st.just(strategy_document(PLAN)) | st.dictionaries(TEXTS, COUNTS, max_size=3)
OPTIONS = st.builds(
    OptionsEntry,
    mixed_precision=st.none() | TEXTS,
    sequence_parallel=FLAGS,
    fp32_gradients=FLAGS,
    memory_constraint_bytes=AMOUNTS,  # one of many that nobody reads again
    pin=st.lists(TEXTS, max_size=2),
)
DOCUMENTS = st.builds(
    PlanDocument,
    plan=st.none() | STRATEGIES,
    status=st.none() | TEXTS,
    legal=FLAGS,
    step_time_s=st.none() | AMOUNTS,
    gap=st.none() | NUMBERS,
    prediction=st.none() | PREDICTIONS.map(lambda found: PredictionEntry.of(PLAN, found)),
    alternatives=st.lists(
        st.builds(
            AlternativeEntry,
            differs_by=TEXTS,
            step_time_s=st.none() | AMOUNTS,
            samples_per_s=AMOUNTS,
            bound_samples_per_s=AMOUNTS,
            probability_faster=st.none() | st.floats(0.0, 1.0),
            plan=STRATEGIES,
        ),
        max_size=2,
    ),
    infeasibility=st.none()
    | st.builds(
        Infeasibility,
        stage=COUNTS,
        num_stages=COUNTS,
        missing_bytes=COUNTS,
        smallest_budget_bytes=COUNTS,
        reason=TEXTS,
    ),
    notes=st.lists(TEXTS, max_size=2),
    estimated=st.booleans(),
    synthetic=st.booleans(),
    inputs=st.lists(
        st.builds(Source, role=TEXTS, path=TEXTS, sha256=TEXTS, notes=st.lists(TEXTS).map(tuple)),
        max_size=2,
    ),
    options=OPTIONS,
    request=st.dictionaries(TEXTS, TEXTS | st.booleans() | st.lists(TEXTS, max_size=2), max_size=3),
    versions=st.none() | st.builds(VersionsEntry, autopar=TEXTS, core_interface=COUNTS),
)


def content_of(path: Path) -> Any:
    """Return the JSON of a file."""
    return json.loads(path.read_text(encoding="utf-8"))


def places(value: Any, *at: str | int) -> Iterator[tuple[str | int, ...]]:
    """Yield the way to every value inside a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield (*at, key)
        if isinstance(item, dict | list) and key != "plan":  # strategies have their own reader
            yield from places(item, *at, key)


@pytest.mark.whole
@given(document=DOCUMENTS)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, document: PlanDocument
) -> None:
    """Equal, and the same bytes when it is written again."""
    path = tmp_path_factory.getbasetemp() / "round.json"
    document.write(path)
    back = PlanDocument.read(path)
    before = path.read_bytes()
    back.write(path)

    assert back == document
    assert path.read_bytes() == before


@often(25, 100, prediction=PREDICTIONS)
def test_a_prediction_is_written_as_it_is(prediction: Prediction) -> None:
    """Every figure of the noun, what is not finite as null, nothing else but ranks and memory."""
    entry = PredictionEntry.of(PLAN, prediction)
    content = json.loads(json.dumps(entry.content(), allow_nan=False))

    assert content["waterfall_s"] == plain(prediction.waterfall_s)
    assert ("widest_cell" in content) == ("computation" in prediction.interval_of)
    for written, stage in zip(content["stages"], prediction.stages, strict=True):
        assert written.pop("ranks") == [4 * stage.stage, 4 * stage.stage + 3]
        interval = [stage.allocated_bytes, stage.reserved_bytes]
        assert written.pop("memory_interval_bytes") == interval
        assert written == plain(stage)
    result = replace(RESULT, prediction=prediction)
    document = PlanDocument.parse(json.loads(json.dumps(plan_document(result).content())))
    assert document.step_time_s == finite(prediction.step_time_s)
    assert document.stages == entry.stages
    assert document.interval_s == prediction.step_time_interval_s


@pytest.mark.parametrize("result", [RESULT, INFEASIBLE])
def test_results_are_written_and_read(result: Any) -> None:
    """The plan file and the printed object of a search, found and not."""
    document = plan_document(result, request={"model": "toy", "pin": ["tp=1"]})
    assert PlanDocument.parse(document.content()) == document
    printed = result_document(result, [RESULT, RESULT])
    assert load_document(ResultDocument, printed.content()) == printed
    assert PlanDocument.parse(printed.content()).plan == document.plan


def test_files_of_version_1_are_read() -> None:
    """All of it, and written again it is the same file."""
    document = PlanDocument.read(PLAN_V1)

    plan = read_strategy(document)
    assert (plan.num_stages, plan.world_size, len(plan.layers)) == (2, 16, 40)
    assert document.step_time_s == 1.2345099720394541
    assert [stage.allocated_bytes for stage in document.stages] == [23704454144, 20313491968]
    assert document.stages[0].runs[0].num_layers == 20
    assert document.options.mixed_precision == "bf16"
    assert document.request["model"] == "llama2-13b"
    assert document.basis is not None
    assert [item.role for item in document.inputs][:2] == ["hardware card", "model spec"]
    assert json.dumps(document.content()) == json.dumps(content_of(PLAN_V1))
    assert not document.is_strategy


def test_printed_results_of_version_1_are_read() -> None:
    """What `--evaluate --json` prints says the same as the plan file."""
    printed, own = PlanDocument.read(RESULT_V1), PlanDocument.read(PLAN_V1)

    for key in ("plan", "step_time_s", "samples_per_s", "prediction", "options", "estimated"):
        assert getattr(printed, key) == getattr(own, key)
    again = load_document(ResultDocument, content_of(RESULT_V1))
    assert json.dumps(again.content()) == json.dumps(content_of(RESULT_V1))


def test_a_search_prints_memory_and_no_times() -> None:
    """It becomes the stages of the document; the interval stands at the top."""
    known = replace(PREDICTION, step_time_interval_s=(0.1, 0.2))
    content = result_document(replace(RESULT, prediction=known)).content()
    document = PlanDocument.parse(content)

    assert [s.reserved_bytes for s in document.stages] == [s.reserved_bytes for s in known.stages]
    assert document.stages[0].step_times(2) is None
    assert document.stages[0].tensor_bytes == known.stages[0].allocated_bytes
    assert document.interval_s == (0.1, 0.2)
    evaluated = PlanDocument.parse(evaluation_document(PLAN, known).content())
    assert evaluated.stages[0].step_times(4) == {
        "forward_s": 0.04,
        "backward_s": 0.08,
        "tail_s": 0.004,
    }


def test_what_exports_print_is_read_for_its_plan() -> None:
    """Whatever stands under the keys that a search uses otherwise."""
    content = {"status": "exported", "search": "--pin tp=1", "memory_rows": 1, "files": []}
    document = PlanDocument.parse({**content, "plan": strategy_document(PLAN)})
    assert read_strategy(document) == PLAN
    strategy = PlanDocument.parse(strategy_document(PLAN))
    assert strategy.is_strategy
    kept = PlanDocument.parse(strategy.content())
    assert (kept, kept.is_strategy) == (strategy, False)


@often(25, 100, data=st.data(), value=JSON_VALUES)
def test_damaged_files_get_one_sentence(data: st.DataObject, value: Any) -> None:
    """Another value anywhere, or a key taken away: it is read, or the key is named."""
    source = data.draw(st.sampled_from([PLAN_V1, RESULT_V1]))
    content = copy.deepcopy(content_of(source))
    *way, last = data.draw(st.sampled_from(list(places(content))))
    inner = content
    for key in way:
        inner = inner[key]
    if isinstance(inner, dict) and data.draw(st.booleans()):
        del inner[last]
    else:
        inner[last] = value
    found: DocumentError | None = None
    try:
        PlanDocument.parse(content, "a.json")
    except DocumentError as error:
        found = error
    if found is not None:
        assert str(found).startswith("a.json: key '")
        assert "\n" not in str(found)
        assert found.key is not None
        assert re.split(r"[.\[]", found.key)[0] == str([*way, last][0])


@pytest.mark.parametrize(
    ("key", "value", "named", "problem"),
    [
        ("step_time_s", "0.5 s", "", "the value is '0.5 s', expected a number of at least 0"),
        ("step_time_s", math.nan, "", "the value is nan, expected a number of at least 0"),
        ("estimated", "no", "", "the value is 'no', expected true or false"),
        ("inputs", {}, "", "the value is {}, expected a list"),
        ("inputs", [{"role": "p2p", "path": 1}], "[0].path", "the value is 1, expected a text"),
        ("options", {"fp32_gradients": 4}, ".fp32_gradients", "the value is 4, expected true or"),
        ("request", {"pin": [1]}, ".pin", "the value is [1], expected a text, true, false or a l"),
        ("prediction", {"stage": []}, ".stage", "this key is unknown. Did you mean '"),
        ("step_times", 1, "", "this key is unknown. Did you mean 'step_time_s'"),
        ("versions", {}, ".autopar", "this key is missing, expected a text"),
    ],
)
def test_sentences(tmp_path: Path, key: str, value: Any, named: str, problem: str) -> None:
    """File, key, value, what was expected, and the remedy."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**content_of(PLAN_V1), key: value}), encoding="utf-8")

    with pytest.raises(DocumentError) as caught:
        PlanDocument.read(path)

    assert str(caught.value).startswith(f"{path}: key '{key}{named}': {problem}")
    assert caught.value.remedy == "Write the plan again with autopar-search"


def test_comments_are_no_keys() -> None:
    """As in every document."""
    content = {**content_of(PLAN_V1), "_comment": {"any": ["thing"]}}
    assert PlanDocument.parse(content) == PlanDocument.read(PLAN_V1)


def test_schemas_say_what_the_readers_say(tmp_path: Path) -> None:
    """What is written is valid, what is refused is not."""
    jsonschema = pytest.importorskip("jsonschema")
    from autopar.documents.schemas import json_schemas

    schemas = json_schemas()
    own = jsonschema.Draft202012Validator(schemas["plan"])
    printed = jsonschema.Draft202012Validator(schemas["result"])
    for result in (RESULT, INFEASIBLE):
        assert own.is_valid(plan_document(result).content())
        assert printed.is_valid(result_document(result, [RESULT]).content())
    assert printed.is_valid(evaluation_document(PLAN, PREDICTION).content())
    good = content_of(PLAN_V1)
    assert own.is_valid(good)
    for wrong in (
        {"step_time_s": -1},
        {"version": 2},
        {"format": "other"},
        {"estimated": 1},
        {"request": {"pin": [1]}},
        {"options": {"fp32_gradients": "yes"}},
        {"prediction": {"stages": [{"allocated_bytes": 0.5}]}},
    ):
        assert not own.is_valid({**good, **wrong}), wrong
    assert not own.is_valid({key: value for key, value in good.items() if key != "format"})


def test_documents_that_cannot_be_written_name_the_option(tmp_path: Path) -> None:
    """A folder that is a file."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DocumentError, match="--output-con"):
        write_document(tmp_path / "file" / "plan.json", {})
