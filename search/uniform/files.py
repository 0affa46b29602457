"""What a search over launches writes: the object of `--json`, and a file that holds a launch.

The same inputs give the same bytes: neither depends on the clock or on where the program runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar import __version__
from search.report.check import assessed_entry
from search.uniform.answer import Answer, EngineAnswer
from search.uniform.choice import Choice
from search.uniform.solve import Solution

__all__ = ["FORMAT", "choice_entry", "file_name", "launch_document", "result_document"]

FORMAT = "autopar-launch"
_VERSION = 1


def choice_entry(choice: Choice, world: int, *, experts: bool) -> dict[str, Any]:
    """Return every degree and setting of a launch by name."""
    dp = world // (choice.tp * choice.cp * choice.pp)
    entry: dict[str, Any] = {
        "tp": choice.tp,
        "cp": choice.cp,
        "pp": choice.pp,
        "dp": dp,
        "vpp": choice.vpp,
        "schedule": choice.schedule,
        "zero": choice.zero,
        "micro_batch_size": choice.micro_batch,
        "num_microbatches": choice.global_batch // (choice.micro_batch * dp),
        "global_batch_size": choice.global_batch,
        "precision": choice.precision,
        "recompute": choice.recompute,
        "layers_of_chunks": [[len(chunk[1]) for chunk in stage] for stage in choice.chunks],
    }
    if experts:
        entry |= {
            "ep": choice.ep,
            "etp": choice.etp,
            "edp": world // (choice.ep * choice.etp * choice.pp),
            "dispatcher": choice.dispatcher,
            "overlap_experts": choice.overlap_experts,
        }
    return entry


def _solution(answer: Answer, engine: EngineAnswer, solution: Solution) -> dict[str, Any]:
    job = answer.question.job
    return {
        "engine": engine.engine.name,
        "degrees": choice_entry(solution.choice, job.world, experts=job.model.experts is not None),
        "samples_per_s": solution.samples_per_s,
        **assessed_entry(solution.assessment, engine.target),
    }


def result_document(answer: Answer, request: Mapping[str, object]) -> dict[str, Any]:
    """Return what `--json` prints of a search over launches: seconds, bytes, shares."""
    question, best = answer.question, answer.best
    return {
        "format": FORMAT,
        "version": _VERSION,
        "autopar": __version__,
        "status": "optimal" if best else "infeasible",
        "request": {name: request[name] for name in sorted(request)},
        "model": question.spec.name,
        "hardware": {
            "card": question.card.name,
            "num_nodes": question.num_nodes,
            "num_gpus_per_node": question.gpus_per_node,
        },
        "seq_length": question.job.seq,
        "launch": None if best is None or best.best is None else _solution(answer, best, best.best),
        "engines": [
            {
                "engine": one.engine.name,
                "stack": one.target.machine.stack.name,
                "reason": one.reason or None,
                "launches": []
                if one.solved is None
                else [_solution(answer, one, found) for found in one.solved.solutions],
                "search": None
                if one.solved is None
                else {
                    "degrees": one.solved.effort.degrees,
                    "timed": one.solved.effort.timed,
                    "counted": one.solved.effort.counted,
                },
            }
            for one in answer.engines
        ],
        "assumed": list(question.assumed),
    }


def launch_document(answer: Answer, request: Mapping[str, object]) -> dict[str, Any]:
    """Return the file of the best launch: the question, the degrees, what is predicted of it."""
    found = result_document(answer, request)
    del found["engines"]
    return found


def file_name(answer: Answer) -> Path:
    """Return the name of a launch's file: all that makes the launch another one."""
    question, best = answer.question, answer.best
    assert best is not None, "nothing is written where nothing fits"
    assert best.best is not None, "the best trainer has a launch"
    choice = best.best.choice
    parts = (
        question.spec.name,
        f"{question.num_nodes}nodes_{question.gpus_per_node}gpus_{question.card.name}",
        best.engine.name,
        choice.precision,
        f"seq{question.job.seq}_bsz{choice.global_batch}",
    )
    return Path(f"autopar_launch_{'_'.join(parts)}.json")
