"""Values of other types at every public name: the sentence of the command, or a right answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import autopar
from autopar.documents.catalog import model_folder
from autopar.errors import AutoparError, DocumentError, OptionError
from search.request.interface import request_of
from search.request.request import ROWS

SCRIPT = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 1024"
    " --num-attention-heads 16 --seq-length 1024 --micro-batch-size 1 --global-batch-size 8"
)


class Odd:
    """A value whose text cannot be made."""

    def __repr__(self) -> str:
        raise RuntimeError


WRONG: tuple[Any, ...] = (
    *(None, -1, 0, 1.5, math.nan, math.inf, True, 10**30, 10**400, 10**5000),
    *("x", "", "a\0b", "\ud800", "9" * 5000, b"8", [], {}, {1}, [1, "x"], [None], (1, 2)),
    *(Odd(), int, Path("none"), Path(), np.int64(-2), np.float32(2.5), np.bool_(True)),
    *(np.array([1, 2]), np.array([[1.5]]), np.array(-4)),
)


def raw_errors(call: Callable[[Any], object]) -> list[str]:
    """Return the errors, of all wrong values, that are not meant for users."""
    found = []
    for place, value in enumerate(WRONG):
        try:
            call(value)
        except AutoparError:
            continue
        except Exception as error:  # each is one failure of the test
            found.append(f"WRONG[{place}]: {type(error).__name__}: {error}"[:150])
    return found


@pytest.fixture(scope="module")
def planner() -> autopar.Planner:
    return autopar.Planner("gpt2-xl", "a100-80gb:1x2", settle_bsz=8)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    return path


FOLDER = model_folder("llama2-7b")
PROFILE = {
    "computation": FOLDER,
    "memory": FOLDER,
    "spec": autopar.read_model("llama2-7b"),
    "sequence_parallel": True,
    "precision": "bf16",
    "parameter_bytes": None,
}
SIZES = ("num_layers", "seq_length", "hidden_size", "num_heads", "num_kv_heads", "head_dim")
READERS: dict[str, Callable[[Any], object]] = {
    "card": lambda value: autopar.read_card(value),
    "model": lambda value: autopar.read_model(value),
    "plan": lambda value: autopar.read_plan(value),
    "answer": lambda value: autopar.Answer(value),
    "hardware": lambda value: autopar.read_hardware(value, num_nodes=1, gpus_per_node=8),
    "executions": lambda value: autopar.evaluate_many({}, value, {}),
    **{
        f"size {name}": lambda value, name=name: autopar.read_model("llama3-8b", **{name: value})
        for name in SIZES
    },
    **{
        f"plan {name}": lambda value, name=name: autopar.read_plan({"pp_deg": 1}, **{name: value})
        for name in ("world_size", "num_layers", "path")
    },
    **{
        f"hardware {name}": lambda value, name=name: autopar.read_hardware(
            Path(), **{"num_nodes": 1, "gpus_per_node": 8, name: value}
        )
        for name in ("num_nodes", "gpus_per_node", "bandwidth_unit")
    },
    **{
        f"profile {name}": lambda value, name=name: autopar.read_model_profile(
            **{**PROFILE, name: value}
        )
        for name in PROFILE
    },
}


@pytest.mark.parametrize("name", READERS)
def test_readers(name: str) -> None:
    """Readers of models, plans, cards, clusters and answers."""
    assert raw_errors(READERS[name]) == []


@pytest.mark.parametrize("name", autopar.SearchOptions.__dataclass_fields__)
def test_options_of_a_search(name: str) -> None:
    """Every field of `SearchOptions`."""
    assert raw_errors(lambda value: autopar.SearchOptions(**{name: value})) == []


@pytest.mark.parametrize("name", [one.key for one in ROWS if one.key not in ("model", "hardware")])
def test_keywords_of_a_search(name: str) -> None:
    """Every option of a question; those of its output are unknown."""
    wrong = raw_errors(lambda value: request_of("gpt2-xl", "h100:1x2", {name: value}))
    assert wrong == []


def test_commands(script: Path) -> None:
    """Words and options of commands; searches would take long, and share this code."""
    calls: tuple[Callable[[Any], object], ...] = (
        autopar.ask,
        lambda value: autopar.ask("models", value),
        autopar.check,
        lambda value: autopar.check(script, hardware=value),
        lambda value: autopar.check(script, card=value),
        lambda value: autopar.check(script, strict=value),
        autopar.explain,
        lambda value: autopar.explain(script, value),
        lambda value: autopar.compare(script, value),
        lambda value: autopar.plan(value, "h100:1x0"),
        lambda value: autopar.plan("gpt2-xl", value, settle_bsz=0),
    )
    assert [raw_errors(call) for call in calls] == [[]] * len(calls)


@pytest.mark.parametrize("document", [{}, {"pp_deg": 2}])
def test_an_error_of_a_mapping_names_its_argument(
    document: dict[str, object], script: Path
) -> None:
    """It once named a temporary file."""
    with pytest.raises(DocumentError, match=r"^first: "):
        autopar.compare(document, script)
    with pytest.raises(DocumentError, match=r"^plan: "):
        autopar.explain(document)


def test_words_for_no_file_are_files(folder: Path) -> None:
    """A file in Python is never left out."""
    for name in ("none", "-o", "lr=1"):
        Path(name).write_text(SCRIPT)
        assert len(autopar.check(name, Path(name)).rows()) == 2


def test_planner(planner: autopar.Planner) -> None:
    """Methods of a planner."""
    found = planner.solve()
    documents = (planner.spec, planner.profile, planner.hardware, planner.options)
    calls: list[Callable[[Any], object]] = [
        lambda value: planner.solve(memory_constraint_bytes=value),
        lambda value: planner.solve(memory_constraint_gib=value),
        lambda value: planner.solve(global_batch_sizes=value),
        lambda value: planner.solve(global_batch_sizes=[value]),
        lambda value: planner.solve(top=value),
        lambda value: planner.evaluate(value),
        lambda value: planner.evaluate(found.plan, value),
        lambda value: planner.why_not(value, found),
        lambda value: planner.why_not("tp=2", value),
        *(
            lambda value, place=place: autopar.Planner.from_documents(
                *documents[:place], value, *documents[place + 1 :]
            )
            for place in range(4)
        ),
    ]
    assert [raw_errors(call) for call in calls] == [[]] * len(calls)


def test_records(planner: autopar.Planner) -> None:
    """Records that users make check every field, and are priced if they exist."""
    found = planner.solve()
    plan, spec = found.plan, planner.spec
    assert plan is not None
    layer, kind = plan.layers[0], spec.layers[0]

    def priced(value: Any) -> object:
        return planner.evaluate(value)

    def searched(value: Any) -> object:
        return autopar.Planner.from_documents(value, planner.profile, planner.hardware).solve()

    def alone(value: Any) -> object:
        return value

    records: tuple[tuple[Any, Callable[[Any], object]], ...] = (
        (plan, priced),
        (layer, lambda one: priced(autopar_plan(plan, one))),
        (spec, alone),
        (kind, lambda one: searched(msgspec.structs.replace(spec, layers=(one,)))),
        (planner.profile, alone),
        (planner.hardware, alone),
        (found, alone),
    )
    for record, use in records:
        for name in record.__struct_fields__:

            def call(value: Any, record: Any = record, name: str = name, use: Any = use) -> object:
                fields = {one: getattr(record, one) for one in record.__struct_fields__}
                return use(type(record)(**{**fields, name: value}))

            assert raw_errors(call) == [], (type(record), name)


def autopar_plan(plan: Any, layer: Any) -> Any:
    """Return a plan whose layers all have one strategy."""
    return msgspec.structs.replace(plan, layers=(layer,) * len(plan.layers))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: autopar.search(None, "h100:1x8"), "model: expected a text or a path, got None"),
        (lambda: autopar.search("gpt2-xl", None), "hardware: expected a text or a path, got None"),
        (lambda: autopar.read_model("gpt2-xl", num_heads=0), "num_heads: expected a whole number"),
        (lambda: autopar.ask("serch"), "unknown command 'serch'. Did you mean 'search'?"),
        (lambda: autopar.search("gpt2-xl", "h100:1x8", tp=True), "--tp: expected an integer"),
        (lambda: autopar.search("gpt2-xl", "h100:1x8", tpp=1), "--tpp: unknown option"),
        (lambda: autopar.plan("", "h100:1x8"), "--model: expected a text, got ''"),
        (lambda: autopar.check(""), "expected a path, got ''"),
    ],
)
def test_sentences(call: Callable[[], object], message: str) -> None:
    """Those of the command, which name the argument."""
    with pytest.raises(OptionError, match=message.replace("?", r"\?")):
        call()


def test_numbers_of_numpy_and_paths(script: Path, planner: autopar.Planner) -> None:
    """They work where an integer or a text does."""
    assert autopar.SearchOptions(settle_bsz=np.int64(16), disable_cp=np.bool_(True)) == (
        autopar.SearchOptions(settle_bsz=16, disable_cp=True)
    )
    assert autopar.read_model("gpt2-xl", num_layers=np.array([3])).num_layers == 3
    assert autopar.read_model(Path("gpt2-xl")).name == "gpt2-xl"
    read = autopar.check(script, hardware="h100:1x8", batch_tokens=None).rows()
    assert read == autopar.check(str(script), hardware=Path("h100:1x8")).rows()
    plan = planner.solve().plan
    assert plan is not None
    same = msgspec.structs.replace(plan, world_size=np.int32(2), stage_sizes=np.array([48]))
    assert (same, type(same.world_size), type(same.stage_sizes)) == (plan, int, tuple)
    found = planner.solve(global_batch_sizes=np.array([8, 16]), top=np.int64(0))
    assert found.plan == planner.solve(global_batch_sizes=[8, 16], top=0).plan
