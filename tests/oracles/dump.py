"""Planning problems as text, with their answers, for tests of the core in C++.

`python -m tests.oracles.dump` rewrites `tests/data/planner`. A file contains any number of
problems:

    problem NAME
    oracle WHO RATE         independent solver (see ORACLES), and its samples per second
    gpipe 0|1
    division N...           required layers per stage; nothing when free
    budget BYTES
    alternatives N
    uniform 0|1
    array NAME TYPE DIMENSIONS SIZE... DISTINCT VALUE... INDEX[*TIMES]...
    status optimal|infeasible
    best CANDIDATE VOCAB STEP_S STAGES SIZE... STRATEGY...       candidate -1: there is no plan
    bound S_PER_SAMPLE
    alternative ...         as `best`, one line each
    smallest_budget BYTES CANDIDATE STAGE
    end

TYPE is that of the C++ view (i4, i8, u1, f8). Values are the distinct ones in ascending order, and
every element is an index into them, a run of equal ones `INDEX*TIMES`. Reals are hexadecimal, so
that nothing is rounded. Lines that start with # are comments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from search.planning.cost.tables import PlanTables
from search.planning.layered.core import TableSolution, core, solve_tables
from search.planning.session import open_session
from search.request.options import SearchOptions
from search.request.request import InputSpec
from tests.oracles import milp
from tests.oracles.instances import large_instance, small_instance
from tests.oracles.reference import evaluate
from tests.oracles.wild import NO_PLAN, Kind, wild_instance

FOLDER = Path(__file__).resolve().parent.parent / "data" / "planner"
ORACLES = {
    "exhaustive": "every plan was priced: status, optimum and smallest budget are right",
    "exhaustive-all": "so are the alternatives",
    "integer-program": "an integer program has the same optimum, to 1e-6",
    "priced": "the plan has this price and fits; that no other is faster was not checked",
}
GIB = 2.0**30

_TYPES = {"int32": "i4", "int64": "i8", "uint8": "u1", "float64": "f8"}
_SCALARS = ("gpipe", "division", "budget", "alternatives", "uniform")


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """One call of the C++ planner and its answer, a dict in the format of the binding."""

    name: str
    oracle: str
    samples_per_s: float
    """Throughput of the optimum according to the oracle; -1 if nothing fits."""
    arrays: dict[str, NDArray[Any]]
    gpipe: bool
    division: tuple[int, ...]
    budget: int
    alternatives: int
    uniform: bool
    answer: dict[str, Any] = field(default_factory=dict)


def answer_of(problem: Problem) -> dict[str, Any]:
    """Return the answer of the current core, in the format of the binding."""
    found: dict[str, Any] = core.search_plan(
        problem.arrays,
        problem.gpipe,
        list(problem.division),
        problem.budget,
        0.0,
        problem.alternatives,
        problem.uniform,
    )
    return found


def _captured(name: str, call: Callable[[], object]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return arguments and answer of the only core call inside `call`."""
    calls: list[tuple[dict[str, Any], dict[str, Any]]] = []
    original = core.search_plan

    def record(*given: Any) -> dict[str, Any]:
        arrays, gpipe, division, budget, time_limit_s, alternatives, uniform, _ = given
        assert time_limit_s == 0.0, f"{name}: what a time limit leaves differs from run to run"
        answer: dict[str, Any] = original(*given)
        fields = {
            "arrays": arrays,
            "gpipe": gpipe,
            "division": tuple(division),
            "budget": budget,
            "alternatives": alternatives,
            "uniform": uniform,
        }
        calls.append((fields, answer))
        return answer

    with patch.object(core, "search_plan", record):
        call()
    assert len(calls) == 1, f"{name}: {len(calls)} calls of the core, expected one"
    return calls[0]


def _close(ours: float, theirs: float, relative: float = 1e-9) -> bool:
    return ours == theirs or abs(ours - theirs) <= relative * abs(theirs)


def _rate(tables: PlanTables, answer: TableSolution) -> float:
    batch = float(tables.candidate_batch[answer.candidate])
    return batch / answer.step_time_s if answer.step_time_s else float("inf")


def small_problem(seed: int) -> Problem:
    """Return `small_instance(seed)`, whose answer agrees with the exhaustive search."""
    name = f"small-{seed}"
    instance = small_instance(seed)
    assert instance.space is not None
    best = instance.space.optimum(instance.budget_bytes)
    found: list[TableSolution] = []
    fields, answer = _captured(
        name, lambda: found.append(solve_tables(instance.tables, instance.budget_bytes))
    )
    rate = NO_PLAN
    assert found[0].status == best.status, name
    if best.status == "optimal":
        rate = best.samples_per_s
        assert _close(_rate(instance.tables, found[0]), rate), name
    else:
        assert found[0].smallest_budget_bytes == best.smallest_budget_bytes, name
    return Problem(name=name, oracle="exhaustive", samples_per_s=rate, answer=answer, **fields)


def wild_problem(seed: int) -> Problem:
    """Return `wild_instance(seed)`, whose answer and alternatives agree with all its plans."""
    name = f"wild-{seed}"
    instance = wild_instance(seed)
    solutions: list[TableSolution] = []
    fields, answer = _captured(
        name,
        lambda: solutions.append(
            solve_tables(instance.tables, instance.budget_bytes, **instance.options)
        ),
    )
    found, rate = solutions[0], instance.best_samples_per_s()
    if rate == NO_PLAN:
        assert found.status == "infeasible", name
        assert found.smallest_budget_bytes == instance.smallest_budget_bytes, name
    else:
        better: list[Kind] = []
        for plan in (found, *found.alternatives):
            assert _close(instance.samples_per_s(plan), instance.best_samples_per_s(better)), name
            assert instance.priced(plan)[1] <= instance.budget_bytes, name
            better.append(instance.kind(plan))
        if len(found.alternatives) < instance.alternatives:
            assert instance.best_samples_per_s(better) == NO_PLAN, name
    return Problem(name=name, oracle="exhaustive-all", samples_per_s=rate, answer=answer, **fields)


def large_problem(seed: int) -> Problem:
    """Return `large_instance(seed)`, whose answer agrees with the integer programs."""
    name = f"large-{seed}"
    instance = large_instance(seed)
    best = milp.solve_tables(instance.tables, instance.budget_bytes)
    found: list[TableSolution] = []
    fields, answer = _captured(
        name, lambda: found.append(solve_tables(instance.tables, instance.budget_bytes))
    )
    rate = NO_PLAN
    assert found[0].status == best.status, name
    if best.status == "optimal":
        rate = best.samples_per_s
        assert _close(_rate(instance.tables, found[0]), rate, 1e-6), name
    return Problem(name=name, oracle="integer-program", samples_per_s=rate, answer=answer, **fields)


REAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "alternatives": (
        "llama2-7b",
        "a100-80gb:1x8",
        {"settle_bsz": 64, "memory_constraint_bytes": 40 * GIB, "top": 4},
    ),
    "small-memory": (
        "llama2-7b",
        "h100:1x8",
        {"settle_bsz": 32, "memory_constraint_bytes": 18 * GIB, "default_dp_type": "any"},
    ),
    "experts": ("mixtral-8x7b", "h100:4x8", {"settle_bsz": 64, "top": 1}),
    "two-layer-types": (
        "t5-3b",
        "h100:1x8",
        {"settle_bsz": 32, "memory_constraint_bytes": 9 * GIB},
    ),
    "pins": (
        "t5-3b",
        "h100:1x8",
        {
            "settle_bsz": 32,
            "memory_constraint_bytes": 20 * GIB,
            "pp_division": (24, 24),
            "pin": ("layers 0-7:tp=1", "stage 1:ckpt=1"),
            "forbid": ("zero3=1",),
        },
    ),
    "1f1b": ("llama3-70b", "h100:8x8", {"settle_bsz": 256, "top": 1, "pin": ("pp=4",)}),
    "gpipe": (
        "llama3-70b",
        "h100:8x8",
        {"settle_bsz": 128, "pipeline_type": "gpipe", "pin": ("pp=4",)},
    ),
    "uniform": (
        "llama2-13b",
        "h100:2x8",
        {"settle_bsz": 64, "memory_constraint_bytes": 24 * GIB, "fine_grained_mode": False},
    ),
    "too-small": (
        "llama3-70b",
        "h100:1x8",
        {"settle_bsz": 16, "memory_constraint_bytes": 40 * GIB},
    ),
}
"""Name -> model, cluster, options of a search on estimated inputs."""


def real_problem(name: str) -> Problem:
    """Return a search on shipped models and cards; its plan is priced by the plain evaluation."""
    model, hardware, options = REAL[name]
    values: dict[str, Any] = {"sp_space": "tp+sp", "default_dp_type": "zero2", "top": 0, **options}
    inputs = InputSpec(model=model, hardware=hardware)
    # without an explicit memory constraint, it is that of the card
    given = {"memory-constraint"} if "memory_constraint_bytes" in options else set()
    planner = open_session(inputs, SearchOptions(**values), given).planner
    handed: list[PlanTables] = []
    original = solve_tables

    def keep(tables: PlanTables, *given: Any, **named: Any) -> TableSolution:
        handed.append(tables)
        return original(tables, *given, **named)

    with patch(f"{type(planner).__module__}.solve_tables", keep):
        fields, answer = _captured(name, planner.solve)
    best, rate = answer["best"], NO_PLAN
    if answer["found"]:
        plan = (best["candidate"], best["stage_sizes"], best["strategies"], best["vocab"])
        own = evaluate(handed[0], *plan)
        assert own.valid, name
        assert own.peak_bytes <= fields["budget"], name
        assert _close(best["step_time_s"], own.step_time_s), name
        rate = own.samples_per_s
    return Problem(name=name, oracle="priced", samples_per_s=rate, answer=answer, **fields)


def _real(value: float) -> str:
    """Return a real number as exact text without trailing zeros."""
    if value == 0 or not np.isfinite(value):
        return str(value) if value else "0"
    mantissa, exponent = float(value).hex().split("p")
    return mantissa.rstrip("0").rstrip(".") + "p" + exponent


def _array_line(name: str, array: NDArray[Any]) -> str:
    kind = _TYPES[array.dtype.name]
    values, index = np.unique(array, return_inverse=True)
    flat = index.ravel()
    words = [_real(v) if kind == "f8" else str(v) for v in values.tolist()]
    starts = np.flatnonzero(np.diff(flat, prepend=-1))
    for start, end in zip(starts, np.append(starts, flat.size)[1:], strict=True):
        words.append(f"{flat[start]}*{end - start}" if end - start > 1 else str(flat[start]))
    sizes = (array.ndim, *array.shape, len(values))
    return " ".join(["array", name, kind, *map(str, sizes), *words])


def _choice_line(word: str, choice: dict[str, Any]) -> str:
    numbers = [len(choice["stage_sizes"]), *choice["stage_sizes"], *choice["strategies"]]
    head = [word, str(choice["candidate"]), str(choice["vocab"]), _real(choice["step_time_s"])]
    return " ".join([*head, *map(str, numbers)])


def as_text(problem: Problem) -> str:
    """Return the problem and its answer in the format of the module's docstring."""
    answer = problem.answer
    least = (answer["smallest_budget"], answer["binding_candidate"], answer["binding_stage"])
    lines = [
        f"problem {problem.name}",
        f"oracle {problem.oracle} {_real(problem.samples_per_s)}",
        f"gpipe {int(problem.gpipe)}",
        " ".join(["division", *map(str, problem.division)]),
        f"budget {problem.budget}",
        f"alternatives {problem.alternatives}",
        f"uniform {int(problem.uniform)}",
        *(_array_line(name, array) for name, array in sorted(problem.arrays.items())),
        f"status {answer['status']}",
        _choice_line("best", answer["best"]),
        f"bound {_real(answer['bound_s_per_sample'])}",
        *(_choice_line("alternative", choice) for choice in answer["alternatives"]),
        " ".join(["smallest_budget", *map(str, least)]),
        "end",
    ]
    return "\n".join(lines) + "\n"


def _choice(words: list[str]) -> dict[str, Any]:
    numbers = [int(word) for word in words[3:]]
    return {
        "candidate": int(words[0]),
        "vocab": int(words[1]),
        "step_time_s": float.fromhex(words[2]),
        "stage_sizes": numbers[1 : 1 + numbers[0]],
        "strategies": numbers[1 + numbers[0] :],
    }


def _array(words: list[str]) -> NDArray[Any]:
    kind, ndim = words[0], int(words[1])
    shape = tuple(int(word) for word in words[2 : 2 + ndim])
    start = 3 + ndim
    end = start + int(words[2 + ndim])
    parse: Callable[[str], float] = float.fromhex if kind == "f8" else int
    values = np.array([parse(word) for word in words[start:end]], dtype=kind)
    runs = [word.partition("*")[::2] for word in words[end:]]
    index = np.repeat([int(i) for i, _ in runs], [int(n or 1) for _, n in runs])
    return values[index.astype(np.intp)].reshape(shape)


def read_problems(path: Path) -> Iterator[Problem]:
    """Yield the problems of a file; raises ValueError for an invalid line."""
    fields: dict[str, Any] = {}
    answer: dict[str, Any] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        word, *words = line.split()
        if word == "problem":
            fields = {"name": words[0], "arrays": {}}
            answer = {"alternatives": []}
        elif word == "oracle":
            fields |= {"oracle": words[0], "samples_per_s": float.fromhex(words[1])}
        elif word in _SCALARS:
            numbers = tuple(int(n) for n in words)
            fields[word] = numbers if word == "division" else numbers[0]
        elif word == "array":
            fields["arrays"][words[0]] = _array(words[1:])
        elif word == "status":
            answer["status"] = words[0]
        elif word == "best":
            answer["best"] = _choice(words)
            answer["found"] = answer["best"]["candidate"] >= 0
        elif word == "bound":
            answer["bound_s_per_sample"] = float.fromhex(words[0])
        elif word == "alternative":
            answer["alternatives"].append(_choice(words))
        elif word == "smallest_budget":
            names = ("smallest_budget", "binding_candidate", "binding_stage")
            answer |= dict(zip(names, map(int, words), strict=True))
        elif word == "end":
            yield Problem(**fields, answer=answer)
        else:
            raise ValueError(f"{path}: unknown line {line[:60]!r}")


def problem_texts() -> dict[str, Callable[[], Iterable[Problem]]]:
    """Return file name -> function that makes its problems."""
    return {
        "small.dump": lambda: map(small_problem, range(36)),
        "wild.dump": lambda: map(wild_problem, range(40)),
        "large.dump": lambda: map(large_problem, range(8)),
        "real.dump": lambda: map(real_problem, REAL),
    }


def main() -> int:
    """Write the files; stops if an oracle disagrees."""
    head = "# Written by `python -m tests.oracles.dump`, which documents the format.\n"
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, problems in problem_texts().items():
        text = head + "".join(map(as_text, problems()))
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"{FOLDER / name}: {len(text)} characters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
