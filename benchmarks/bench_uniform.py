"""Time of searches for uniform plans, and its growth.

`python -m benchmarks.bench_uniform [--only WORD ...] [--runs N] [--limit S] [--json LEDGER]`. Every
case runs in several separate processes, so that peak memory is measured per case, and medians over
them are printed: a first question, the same one again, two with less memory and one with a fixed
degree. The answer is compared with its bound, and with `autopar check` of the plan found. Growth is
measured for a mixture of experts in layers, GPUs, experts and chunks per stage, and for a dense
model in pipeline schedules. Cards and models are shipped; nothing is measured on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from autopar.price.assessment import Target, assess
from autopar.rates.accuracy import load_accuracy
from autopar.rates.card import load_card
from autopar.rates.parts.operations import machine_of
from autopar.rates.stack import load_stack
from autopar.records import Record, replace
from autopar.run.architecture import LayerGroup, Model
from autopar.units import GIB
from benchmarks.bench_growth import exponent
from benchmarks.metadata import ROOT, append, peak_memory_bytes
from search.engines.candidate import PRECISIONS, Constraints
from search.engines.huggingface.models import flavour, model_named
from search.engines.space import EngineContext
from search.engines.table import engine_space
from search.planning.uniform.best_first import UniformSearch

__all__ = ["CASES", "Case", "main", "measure"]

_H100 = "h100-80gb"


class Case(Record):
    """One question, with the growth line of which it is a point."""

    model: tuple[str, str]
    """Family and size of the model."""
    world: int
    batch: int
    seq: int = 4096
    engine: str = "megatron"
    card: str = _H100
    fixed: Constraints = Constraints()
    layers: int | None = None
    experts: int | None = None
    axis: str = ""
    size: float = 0.0


_MIXTURE = ("qwen3", "30B-A3B")
_SCHEDULES = engine_space("torchtitan").schedules
CASES: dict[str, Case] = {
    "qwen3-235b-256": Case(model=("qwen3", "235B-A22B"), world=256, batch=2048),
    "deepseek-v3-1024": Case(model=("deepseek_v3", "671B"), world=1024, batch=16384),
    "deepseek-v3-256-gb200": Case(
        model=("deepseek_v3", "671B"),
        world=256,
        batch=1024,
        card="gb200",
        fixed=Constraints(precision=PRECISIONS),
    ),
    "gpt-oss-120b-64": Case(model=("", "gpt-oss-120b"), world=64, batch=1024),
    "llama3-405b-16384": Case(
        model=("llama3", "405B"), world=16384, batch=16384, seq=8192
    ),
    "llama3-70b-64": Case(model=("llama3", "70B"), world=64, batch=512, seq=8192),
    "llama3-70b-1024": Case(model=("llama3", "70B"), world=1024, batch=2048, seq=8192),
    "llama3-70b-16384": Case(model=("llama3", "70B"), world=16384, batch=16384, seq=8192),
    "mixtral-64": Case(model=("", "mixtral-8x7b"), world=64, batch=512),
    "torchtitan-llama3-8b-64": Case(
        model=("llama3", "8B"), world=64, batch=512, seq=8192, engine="torchtitan"
    ),
    **{
        f"layers-{n}": Case(
            model=_MIXTURE, world=64, batch=1024, layers=n, axis="layers", size=n
        )
        for n in (12, 24, 48, 96)
    },
    **{
        f"gpus-{n}": Case(model=_MIXTURE, world=n, batch=4096, axis="GPUs", size=n)
        for n in (16, 64, 256, 1024)
    },
    **{
        f"experts-{n}": Case(
            model=_MIXTURE, world=64, batch=1024, experts=n, axis="experts", size=n
        )
        for n in (16, 32, 64, 128)
    },
    **{
        f"chunks-{n}": Case(
            model=_MIXTURE, world=64, batch=1024, fixed=Constraints(vpp=(*range(1, n + 1),)),
            axis="chunks", size=n,
        )
        for n in (1, 2, 4, 8, 16)
    },
    **{
        f"schedules-{n}": Case(
            model=("llama3", "70B"), world=256, batch=512, seq=8192, engine="torchtitan",
            fixed=Constraints(schedule=_SCHEDULES[:n]), axis="schedules", size=n,
        )
        for n in (1, 2, 4, len(_SCHEDULES))
    },
}  # fmt: skip


def _model(case: Case) -> Model:
    family, size = case.model
    model = flavour(family, size) if family else model_named(size)
    assert model is not None, case.model
    layer, count = model.last, case.layers or model.num_layers
    if case.experts is not None:
        assert layer.experts is not None, case.model
        layer = replace(layer, mlp=replace(layer.experts, number=case.experts))
    if case.layers or case.experts:
        assert model.kinds == (model.last,), "layers that are alike can be any number"
        model = replace(model, layers=(LayerGroup(count=count, layer=layer),), repeat=1)
    return model


def measure(case: Case) -> dict[str, Any]:
    """Return the seconds, the memory and the counts of a case, once its answer is right."""
    engine = engine_space(case.engine)
    target = Target(
        machine=machine_of(load_card(case.card), load_stack(engine.stack)),
        accuracy=load_accuracy(),
        site_known=False,
        oom_risk=0.01,
    )
    job = EngineContext(
        name=" ".join(case.model).strip(),
        model=_model(case),
        seq=case.seq,
        global_batches=(case.batch,),
        world=case.world,
        gpu=case.card,
    )
    began, uniform = time.process_time(), UniformSearch(engine, job, target)
    solved = uniform.solve(case.fixed)
    cpu = {"first": time.process_time() - began}
    whole = target.capacity_bytes
    for name, fixed, memory_bytes in (
        ("again", case.fixed, whole),
        ("-1 GiB", case.fixed, whole - GIB),
        ("-10 GiB", case.fixed, whole - 10 * GIB),
        ("tp 2", replace(case.fixed, tp=(2,)), whole),
    ):
        began = time.process_time()
        uniform.solve(fixed, memory_bytes=memory_bytes)
        cpu[name] = time.process_time() - began
    found = {
        "cpu_s": cpu,
        "peak_bytes": peak_memory_bytes(),
        "choices": solved.effort.choices,
        "degrees": solved.effort.degrees,
        "opened": solved.effort.opened,
        "timed": solved.effort.timed,
        "counted": solved.effort.counted,
        "answer": "nothing fits",
    }
    if solved.solutions:
        best = solved.solutions[0]
        checked = assess(best.run, target)
        assert checked.step is not None
        assert best.assessment.step is not None
        assert solved.gap == 0.0
        assert abs(checked.step.total_s / best.assessment.step.total_s - 1.0) < 1e-9
        assert checked.odds_of_oom <= target.oom_risk
        line = best.choice.line(case.world, experts=job.model.experts is not None)
        found["answer"] = f"{checked.step.total_s:.3f} s: {line}"
    return found


def _asked(name: str, runs: int, limit_s: float) -> dict[str, Any] | None:
    """Return medians over separate processes, None if one was ended."""
    command = [sys.executable, "-m", "benchmarks.bench_uniform", "--one", name]
    found: list[dict[str, Any]] = []
    for _ in range(runs):
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=True
            )
        except subprocess.TimeoutExpired:
            return None
        found.append(json.loads(done.stdout))
    assert len({one["answer"] for one in found}) == 1, name
    cpu = {
        asked: statistics.median(one["cpu_s"][asked] for one in found)
        for asked in found[0]["cpu_s"]
    }
    peak = statistics.median(one["peak_bytes"] for one in found)
    return {**found[0], "cpu_s": cpu, "peak_bytes": peak}


def _line(name: str, row: dict[str, Any] | None) -> str:
    if row is None:
        return f"{name:24s} ended"
    cpu = " ".join(f"{seconds:7.2f}" for seconds in row["cpu_s"].values())
    counts = f"{row['choices']:12.3g} {row['degrees']:7d} {row['opened']:6d} {row['timed']:6d}"
    size = row["peak_bytes"] / (1 << 20)
    return f"{name:24s} {cpu} {size:6.0f} {counts} {row['counted']:7d}  {row['answer']}"


def main() -> int:
    """Print one line per case and one per axis."""
    parser = argparse.ArgumentParser(description="Searches over launches with one set of degrees.")
    parser.add_argument("--only", nargs="+", default=[""], help="words in the names of cases")
    parser.add_argument("--runs", type=int, default=3, help="processes of a case")
    parser.add_argument("--limit", type=float, default=120.0, help="wall seconds of a process")
    parser.add_argument("--json", type=Path, help="append the result to this file")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(CASES[given.one])))
        return 0
    print(
        f"{'CPU seconds':24s} {'first':>7s} {'again':>7s} {'-1 GiB':>7s} {'-10 GiB':>7s} "
        f"{'tp 2':>7s} {'MiB':>6s} "
        f"{'choices':>12s} {'degrees':>7s} {'opened':>6s} {'timed':>6s} {'counted':>7s}  answer"
    )
    rows: dict[str, dict[str, Any] | None] = {}
    for name in CASES:
        if any(word in name for word in given.only):
            rows[name] = _asked(name, given.runs, given.limit)
            print(_line(name, rows[name]), flush=True)
    for axis in dict.fromkeys(case.axis for case in CASES.values() if case.axis):
        done = [
            (CASES[name].size, row["cpu_s"]["first"])
            for name, row in rows.items()
            if row is not None and CASES[name].axis == axis
        ]
        if len(done) > 2:
            slope = exponent(*map(list, zip(*done, strict=True)))
            print(f"{axis:24s} exponent {slope:.2f}")
    append(given.json, "uniform", {"cases": rows})
    return 1 if None in rows.values() else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
