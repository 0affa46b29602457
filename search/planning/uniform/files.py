"""Reader of files of uniform plans, format `autopar-launch`: the question and all degrees.

Engine settings of a plan are made in `search.engines`; files are written in `search.show.files`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from msgspec.structs import asdict

from autopar.command.answers import is_answer
from autopar.command.dialect import own_names
from autopar.documents.json import (
    load_object,
    read_record,
)
from autopar.errors import DocumentError, InputError, OptionError
from autopar.pipeline.orders import rank_of
from autopar.pipeline.schedules import Schedule, schedule_problem
from autopar.records import Record
from autopar.run.run import Run
from autopar.run.runtime import Zero
from autopar.run.strategy import OFFLOADED, chunks_of_sizes
from autopar.training.launch_file import (
    FORMAT,
    DegreesEntry,
    LaunchDocument,
)
from autopar.training.launch_settings import with_settings
from search.engines.choice import FULL, MODULES, NONE, Choice
from search.engines.space import run_of
from search.engines.table import engine_space
from search.planning.uniform.answer import Question, open_launches
from search.request.degrees import fixed_of
from search.request.request import ROWS, build_request, located_request


def degrees_entry(choice: Choice, world: int) -> DegreesEntry:
    """Return all degrees of a candidate, including derived ones."""
    dp = world // (choice.tp * choice.cp * choice.pp)
    return DegreesEntry(
        tp=choice.tp,
        tp_overlap=choice.tp_overlap,
        cp=choice.cp,
        cp_kind=choice.cp_kind,
        pp=choice.pp,
        dp=dp,
        ep=choice.ep,
        etp=choice.etp,
        edp=world // (choice.ep * choice.etp * choice.pp),
        vpp=choice.vpp,
        schedule=choice.schedule,
        zero=cast(Zero, choice.zero),
        dp_replicate=choice.dp_replicate,
        micro_batch_size=choice.micro_batch,
        num_microbatches=choice.global_batch // (choice.micro_batch * dp),
        global_batch_size=choice.global_batch,
        precision=choice.precision,
        compiled=choice.compiled,
        recompute=choice.recompute,
        offload=choice.offload,
        dispatcher=choice.dispatcher,
        overlap_experts=choice.overlap_experts,
        layers_of_chunks=[[len(chunk.layers) for chunk in stage] for stage in choice.chunks],
    )


class StoredLaunch(Record):
    """Run read from a file: a uniform plan of autopar, or a configuration of an engine."""

    engine: str
    question: Question
    request: Mapping[str, object]
    """Options that reproduce the question."""
    choice: Choice
    run: Run
    """Run of the candidate on its engine, with the settings of the file."""
    notes: tuple[str, ...] = ()
    """Notes on the reading of the file and on ignored settings, one sentence each."""


def is_launch(path: Path | str) -> bool:
    """Return True if a file contains a uniform plan; an unreadable file does not."""
    try:
        data = load_object(Path(path)).data
    except InputError:
        return False  # readers of other formats report the problem
    return isinstance(data, Mapping) and data.get("format") == FORMAT


_CLUSTER = {"hardware", "nodes", "gpus-per-node", "gpus"}
"""Options that set the number of GPUs."""


def _check(
    where: Path, document: LaunchDocument, question: Question, choice: Choice, typed: set[str]
) -> None:
    """Raise DocumentError if redundant values of a file contradict each other.

    typed : names of given options that replace the file's and may change the plan.
    """
    assert document.launch is not None, "there is a launch"
    said: dict[str, object] = {}
    made: dict[str, object] = {}
    if not typed & {"model", "num-layers", "seq-length"}:
        said |= {"model": document.model, "seq_length": document.seq_length}
        made |= {"model": question.spec.name, "seq_length": question.job.seq}
    if not typed & _CLUSTER:
        said |= {f"hardware.{key}": one for key, one in asdict(document.hardware).items()}
        made |= {
            "hardware.card": question.card.name,
            "hardware.num_nodes": question.num_nodes,
            "hardware.num_gpus_per_node": question.gpus_per_node,
        }
        entry = asdict(document.launch.degrees)
        if "global-batch-size" in typed:
            # the user requests another batch with the same degrees
            del entry["global_batch_size"], entry["num_microbatches"]
        whole = asdict(degrees_entry(choice, question.job.world))
        said |= {f"launch.degrees.{key}": one for key, one in entry.items()}
        made |= {f"launch.degrees.{key}": one for key, one in whole.items()}
        copies = entry["dp_replicate"]
        if whole["dp"] * choice.cp % copies:
            raise DocumentError(
                where,
                f"is {copies}, which does not divide dp {whole['dp']} * cp {choice.cp}",
                key="launch.degrees.dp_replicate",
                remedy="write the launch again with autopar-search",
            )
    for key, value in said.items():
        if value != made[key]:
            raise DocumentError(
                where,
                f"is {value!r:.60}, and what else the file says makes it {made[key]!r:.60}",
                key=key,
                remedy="write the launch again with autopar-search",
            )


def _recompute(where: Path, words: str) -> str:
    """Return a recomputation policy of a file; raises DocumentError if it is invalid."""
    kind, _, number = words.partition(" ")
    block = kind == "block" and number.isascii() and number.isdigit() and int(number) > 0
    if not (block or words in (NONE, FULL, "op") or {*words.split("+")} <= {*MODULES}):
        raise DocumentError(
            where,
            f"is {words!r:.60}, expected none, full, op, block N, or modules joined by +",
            key="launch.degrees.recompute",
            remedy="write the launch again with autopar-search",
        )
    return words


def _offload(where: Path, words: str) -> str:
    """Return the offloaded modules of a file; raises DocumentError if they are invalid."""
    if words != NONE and not {*words.split("+")} <= {*OFFLOADED}:
        raise DocumentError(
            where,
            f"is {words!r:.60}, expected none, or modules joined by + ({', '.join(OFFLOADED)})",
            key="launch.degrees.offload",
            remedy="write the launch again with autopar-search",
        )
    return words


def _schedule(where: Path, entry: DegreesEntry) -> Schedule:
    """Return the schedule of a file; raises DocumentError if its pipeline cannot run it."""
    if entry.pp == 1:
        return "1f1b"
    problem = schedule_problem(
        entry.schedule,
        stages=entry.pp,
        chunks=entry.vpp,
        micro_batches=max(1, entry.num_microbatches),
    )
    if problem is not None:
        raise DocumentError(
            where, problem, key="schedule", remedy="write the launch again with autopar-search"
        )
    return entry.schedule


def _refuse_degrees(where: Path, typed: Mapping[str, object]) -> None:
    """Raise OptionError if the user gives a degree with a plan file, which sets all degrees."""
    named = [*fixed_of(build_request(typed).degrees).options]
    named += [name for name in ("precision", "cp-kind") if name in typed]
    if named:
        raise OptionError(
            f"--{named[0]}: {where} has its own degrees; `autopar-explain {where} --why-not "
            f"{named[0]}=N` compares it with others, a search with the option finds them"
        )


def _batch(question: Question, entry: DegreesEntry, typed: Mapping[str, object]) -> int:
    """Return the global batch of the file, unless the user gave another one."""
    for name in ("min-bsz", "max-bsz"):
        if name in typed:
            raise OptionError(f"--{name}: a launch has one global batch; give --global-batch-size")
    typed_batch = "global-batch-size" in typed
    return question.job.global_batches[0] if typed_batch else entry.global_batch_size


def read_launch(path: Path | str, typed: Mapping[str, object] | None = None) -> StoredLaunch:
    """Return the uniform plan of a file; raises InputError if its engine cannot run it.

    typed : given options, which replace those stored in the file.
    """
    where = Path(path)
    data = load_object(where).data
    if is_answer(data):
        # other parts of an answer, such as plans of every engine, do not belong to the format
        data = {key: data[key] for key in LaunchDocument.__struct_fields__ if key in data}
        data["engines"] = []
    document = read_record(LaunchDocument, where, data)
    if document.launch is None:
        raise DocumentError(
            where, "holds no launch", key="launch", remedy="search again with more memory"
        )
    _refuse_degrees(where, typed or {})
    # files of earlier releases contain earlier option names
    stored = located_request(where, own_names(document.request, ROWS), typed or {})
    request = {**stored, **(typed or {})}
    question = open_launches(build_request(request))
    entry = document.launch.degrees
    sizes = entry.layers_of_chunks
    if len(sizes) != entry.pp or any(len(stage) != entry.vpp for stage in sizes):
        raise DocumentError(
            where,
            f"has other stages than pp {entry.pp} of vpp {entry.vpp} chunks",
            key="layers_of_chunks",
            remedy="write the launch again with autopar-search",
        )
    schedule = _schedule(where, entry)
    # in execution order: the first chunks of all stages, then the second ones
    parts = [
        sizes[rank_of(schedule, part, entry.pp)][part // entry.pp]
        for part in range(entry.vpp * entry.pp)
    ]
    choice = Choice(
        tp=entry.tp,
        tp_overlap=entry.tp_overlap,
        cp=entry.cp,
        cp_kind=entry.cp_kind,
        ep=entry.ep,
        etp=entry.etp,
        pp=entry.pp,
        vpp=entry.vpp,
        schedule=schedule,
        micro_batch=entry.micro_batch_size,
        zero=entry.zero,
        dp_replicate=entry.dp_replicate,
        recompute=_recompute(where, entry.recompute),
        offload=_offload(where, entry.offload),
        precision=entry.precision,
        compiled=entry.compiled,
        dispatcher=entry.dispatcher,
        overlap_experts=entry.overlap_experts,
        global_batch=_batch(question, entry, typed or {}),
        chunks=chunks_of_sizes(parts, entry.pp, mtp=question.job.model.mtp, schedule=schedule),
    )
    usual = run_of(engine_space(document.launch.engine), question.job, choice)
    _check(where, document, question, choice, {*(typed or {})})
    return StoredLaunch(
        engine=document.launch.engine,
        question=question,
        request=request,
        choice=choice,
        run=with_settings(usual, document.launch.settings, where),
    )
