"""Dry runs: their duration, and their memory compared with predictions for default and other plans.

`python -m benchmarks.dry_run [--only NAME ...] [--json LEDGER]`

First it runs one rank of all of llama2-7b at 64 and at 1,024 ranks and compares parameters and
optimizer with arithmetic. Then it runs the plans that searches with default options return for
several models and machines, and twelve plans of llama2-7b for 64 GPUs at 4,096 tokens. For each
stage it prints predicted memory, peak memory of the first rank in the dry run, both with
communicators, and the differences. Rows compare as a whole: what the loss or a layer saves at its
peak is transient in a prediction and an activation in a dry run. docs/concepts/accuracy.md gives
the range of differences.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.documents.spec import load_spec
from autopar.rates.measured import COMMUNICATOR_BYTES
from autopar.run.model import ModelSpec
from autopar.run.plan import (
    LayerStrategy,
    PipelineType,
    Plan,
    StagePrediction,
    VocabStrategy,
    ZeroDefault,
)
from autopar.units import MIB
from benchmarks.metadata import append, peak_memory_bytes
from profiler.plan.arithmetic import first_shapes, held, last_shapes, layer_shapes
from profiler.plan.dryrun import dry_run, first_ranks
from profiler.plan.job import DryRunRank, PlanJob
from search.planning.layered.planner import Planner
from search.planning.layered.summary import one_line
from search.request.interface import open_documents

__all__ = ["CASES", "DEFAULTS", "Case", "Row", "default_rows", "full_size", "main", "rows"]

_SEQ_LENGTH = 4096
_LAYERS = 32
_L = LayerStrategy


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan for 64 GPUs, with settings that its strategy file does not contain."""

    name: str
    plan: Plan
    sequence_parallel: bool = True


def _case(
    name: str,
    *layers: LayerStrategy,
    vocab: VocabStrategy,
    batch: int,
    m: int = 1,
    stages: Sequence[int] = (_LAYERS,),
    pipeline_type: PipelineType = "1f1b",
    default: ZeroDefault = "ddp",
    sequence_parallel: bool = True,
) -> Case:
    each = _LAYERS // len(layers)
    plan = Plan(
        world_size=64,
        num_stages=len(stages),
        stage_sizes=tuple(stages),
        layers=tuple(layer for layer in layers for _ in range(each)),
        vocab=vocab,
        global_batch=batch,
        num_microbatches=m,
        pipeline_type=pipeline_type,
        default_dp_type=default,
    )
    return Case(name=name, plan=plan, sequence_parallel=sequence_parallel)


_V = VocabStrategy
CASES = (
    _case("tp2, zero3", _L(tp=2, zero3=True), vocab=_V(tp=2, zero3=True), batch=32),
    _case("zero3, m 4", _L(zero3=True), vocab=_V(zero3=True), batch=256, m=4),
    _case(
        "zero3, ckpt, m 2",
        _L(zero3=True, checkpoint=True),
        vocab=_V(zero3=True),
        batch=128,
        m=2,
    ),
    _case("tp8, ddp, m 2", _L(tp=8), vocab=_V(tp=8), batch=16, m=2),
    _case("tp4 without SP, ddp", _L(tp=4), vocab=_V(tp=4), batch=16, sequence_parallel=False),
    _case("tp4, zero2, m 2", _L(tp=4), vocab=_V(tp=4), batch=32, m=2, default="zero2"),
    _case(
        "ulysses4, zero3",
        _L(tp=4, ulysses=True, zero3=True),
        vocab=_V(tp=4, ulysses=True, zero3=True),
        batch=16,
    ),
    _case("pp4 1F1B, tp2, ddp, m 8", _L(tp=2), vocab=_V(tp=2), batch=64, m=8, stages=[8] * 4),
    _case(
        "pp4 GPipe, tp4, ddp, m 4",
        _L(tp=4),
        vocab=_V(tp=4),
        batch=16,
        m=4,
        stages=[8] * 4,
        pipeline_type="gpipe",
    ),
    _case(
        "pp2 (14, 18), tp2, zero2, half ckpt, m 4",
        *[_L(tp=2, checkpoint=k % 2 == 0) for k in range(_LAYERS)],
        vocab=_V(tp=2),
        batch=64,
        m=4,
        stages=(14, 18),
        default="zero2",
    ),
    _case("tp2, vtp8, zero3, m 2", _L(tp=2, zero3=True), vocab=_V(tp=8, zero3=True), batch=64, m=2),
    _case(
        "tp4 zero2, tp2 zero3, ulysses2 zero3 ckpt, strided tp4 zero2, m 2",
        _L(tp=4),
        _L(tp=2, zero3=True),
        _L(tp=2, ulysses=True, zero3=True, checkpoint=True),
        _L(tp=4, strided=True),
        vocab=_V(tp=2, zero3=True),
        batch=64,
        m=2,
        default="zero2",
    ),
)


DEFAULTS = (
    ("llama2-7b", "h100:1x8", 128),
    ("llama2-7b", "h100:1x8", 16),
    ("llama2-13b", "l40s:2x8", 64),
    ("llama3-8b", "a100-80gb:2x8", 128),
    ("qwen2.5-7b", "h100:1x8", 64),
    ("mistral-7b", "a100-80gb:1x8", 32),
    ("gpt-6.7b", "a100-80gb:2x8", 256),
    ("t5-3b", "h100:1x8", 64),
    ("gpt2-xl", "rtx-4090:1x8", 64),
    ("bert-large", "a100-40gb:1x8", 256),
    ("llama3-70b", "h100:8x8", 256),
    ("qwen2.5-72b", "b200:2x8", 128),
    ("mixtral-8x7b", "h100:8x8", 256),
)
"""Model, machine and batch of a search whose other options are the defaults."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One stage of a plan: predicted and dry-run bytes by category."""

    name: str
    stage: int
    predicted: dict[str, float]
    """Bytes of states (weights, gradients and optimizer), activations, passing (transient and
    shared memory), and buffers of communicators and of receiving.
    """
    counted: DryRunRank
    kept_gathered: float
    """Whole weights kept by ZeRO-2, bytes."""
    seconds: float

    @property
    def found(self) -> dict[str, float]:
        """Bytes of the dry run in the categories of the prediction."""
        parts = self.counted.peak_parts
        return {
            "states": parts["parameters"]
            + parts["optimizer"]
            + parts["gradients"]
            + self.kept_gathered,
            "activations": parts["activations"],
            "passing": parts["gathered parameters"] - self.kept_gathered + parts["other"],
            "buffers": COMMUNICATOR_BYTES * self.counted.num_communicators,
        }

    @property
    def difference(self) -> float:
        """Predicted over dry-run bytes, less one."""
        return sum(self.predicted.values()) / sum(self.found.values()) - 1


def full_size(world_size: int, degree: int) -> tuple[DryRunRank, float]:
    """Return the dry run of the whole model in ZeRO-3, and its seconds; states are checked."""
    spec = load_spec("llama2-7b", seq_length=[_SEQ_LENGTH])
    plan = Plan(
        world_size=world_size,
        num_stages=1,
        stage_sizes=(_LAYERS,),
        layers=(_L(tp=degree, zero3=True),) * _LAYERS,
        vocab=_V(tp=degree, zero3=True),
        global_batch=world_size // degree,
        num_microbatches=1,
    )
    start = time.perf_counter()
    (found,) = dry_run(PlanJob(plan=plan, spec=spec, precision="bf16"), ranks=[0])
    seconds = time.perf_counter() - start
    pieces = world_size // degree
    expected = _LAYERS * held(layer_shapes(spec.layers[0], degree), pieces)
    expected += held(first_shapes(spec, degree), pieces)
    expected += held(last_shapes(spec, degree, own_table=True), pieces)
    assert found.num_parameters == expected, (found, expected)
    assert (found.parameter_bytes, found.optimizer_bytes) == (4 * expected, 8 * expected), found
    return found, seconds


def rows(case: Case) -> Iterator[Row]:
    """Yield the first, the last and the largest stage of a plan."""
    options = {"sequence_parallel": case.sequence_parallel, "memory_constraint_gib": 80.0}
    spec, profile, hardware, chosen = open_documents("llama2-7b", "a100-80gb:8x8", options)
    planner = Planner.from_documents(spec, profile, hardware, chosen)
    stages = planner.evaluate(case.plan).stages
    yield from _rows(case.name, case.plan, spec, stages, sequence_parallel=case.sequence_parallel)


def default_rows(model: str, machine: str, batch: int) -> Iterator[Row]:
    """Yield the first, the last and the largest stage of the plan that a search returns."""
    spec, profile, hardware, chosen = open_documents(model, machine, {"settle_bsz": batch})
    result = Planner.from_documents(spec, profile, hardware, chosen).solve()
    assert result.plan is not None, (model, machine, batch)
    assert result.prediction is not None, (model, machine, batch)
    name = f"{model}, {machine}, batch {batch}: {one_line(result.plan)}"
    yield from _rows(name, result.plan, spec, result.prediction.stages)


def _rows(
    name: str,
    plan: Plan,
    spec: ModelSpec,
    stages: Sequence[StagePrediction],
    *,
    sequence_parallel: bool = True,
) -> Iterator[Row]:
    # shards of weights in bf16 in addition to fp32 ones, as in the planner's recipe
    job = PlanJob(
        plan=plan,
        spec=spec,
        precision="bf16",
        sequence_parallel=sequence_parallel,
        narrow_shards=True,
    )
    each = plan.world_size // plan.num_stages
    for rank in sorted(set(first_ranks(job).values())):
        start = time.perf_counter()
        (counted,) = dry_run(job, ranks=[rank])
        seconds = time.perf_counter() - start
        at = rank // each
        bytes_of = stages[at].memory_bytes
        yield Row(
            name=name,
            stage=at,
            predicted={
                "states": bytes_of["states"] + bytes_of["vocab_states"],
                "activations": bytes_of["activations"] + bytes_of["vocab_activations"],
                "passing": bytes_of["transient"] + bytes_of["shared"],
                "buffers": bytes_of["fixed"],
            },
            counted=counted,
            kept_gathered=_kept_gathered(plan, spec, at),
            seconds=seconds,
        )


def _kept_gathered(plan: Plan, spec: ModelSpec, stage: int) -> float:
    if plan.default_dp_type != "zero2":
        return 0.0
    shapes = [
        held(layer_shapes(spec.layers[0], 1 if s.ulysses else s.tp))
        for s, at in zip(plan.layers, plan.stage_of_layer(), strict=True)
        if at == stage and not s.zero3
    ]
    if not plan.vocab.zero3:
        degree = 1 if plan.vocab.ulysses else plan.vocab.tp
        if stage == 0:
            shapes.append(held(first_shapes(spec, degree)))
        if stage == plan.num_stages - 1:
            shapes.append(held(last_shapes(spec, degree, own_table=True)))
    return 2.0 * sum(shapes)


def _text(row: Row) -> str:
    found = row.found
    cells = [f"{row.predicted[name] / MIB:.0f} / {found[name] / MIB:.0f}" for name in row.predicted]
    return (
        f"| {row.name} | {row.stage} | {' | '.join(cells)} "
        f"| {sum(row.predicted.values()) / MIB:.0f} / {sum(found.values()) / MIB:.0f} "
        f"| {row.difference:+.1%} | {row.seconds:.1f} |"
    )


def main() -> int:
    """Print durations, then the table of all plans."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="*", help="names of plans as the table has them, or models of default plans"
    )
    parser.add_argument("--json", type=Path, help="append the result to this file")
    arguments = parser.parse_args()
    sizes = []
    for world_size, degree in () if arguments.only else ((64, 2), (1024, 8)):
        counted, seconds = full_size(world_size, degree)
        memory = peak_memory_bytes()
        print(
            f"{world_size} ranks, tp {degree}, ZeRO-3, {_LAYERS} layers: {seconds:.1f} s, "
            f"{memory / MIB:.0f} MiB resident; parameters {counted.parameter_bytes} and optimizer "
            f"{counted.optimizer_bytes} bytes as computed; peak {counted.peak_bytes / MIB:.0f} MiB",
            flush=True,
        )
        sizes.append(
            {"world_size": world_size, "degree": degree, "seconds": seconds, "bytes": memory}
        )
    print("MiB, predicted / dry run; communicators are on both sides, some among the states\n")
    print("| plan | stage | states | activations | passing | buffers | all | difference | s |")
    print("|---|---|---|---|---|---|---|---|---|")
    wanted = arguments.only
    asked = [default_rows(*case) for case in DEFAULTS if not wanted or case[0] in wanted]
    asked += [rows(case) for case in CASES if not wanted or case.name in wanted]
    found = []
    for each in asked:
        for row in each:
            print(_text(row), flush=True)
            found.append(row)
    values = [
        {
            "plan": row.name,
            "stage": row.stage,
            "predicted_bytes": row.predicted,
            "found_bytes": row.found,
            "difference": row.difference,
        }
        for row in found
    ]
    append(arguments.json, "dry_run", {"full_size": sizes, "rows": values})
    return 0


if __name__ == "__main__":
    sys.exit(main())
