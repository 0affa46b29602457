"""Reader of uniform-plan files in the formats `autopar-run` and `autopar-launch`.

`autopar-run` files contain a run. The older `autopar-launch` files, which are the output of
`--json`, contain degrees instead. Files are written by `search.show.uniform_files`, and engine
configurations by `search.engines`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from msgspec.structs import asdict

from autopar.command.answers import is_answer
from autopar.command.dialect import own_names
from autopar.documents.json import load_object, read_record
from autopar.documents.plan import AGAIN, RUN_FORMAT, HardwareEntry, RunDocument
from autopar.errors import DocumentError, InputError, OptionError
from autopar.pipeline.orders import rank_of
from autopar.pipeline.schedules import Schedule, schedule_problem
from autopar.records import Record, expected_of, replace
from autopar.run.run import Run, legal
from autopar.run.runtime import Precision as RunPrecision, Trainer
from autopar.run.strategy import ContextKind, Split, chunks_of_sizes
from autopar.training.launch_file import (
    FORMAT,
    DegreesEntry,
    LaunchDocument,
)
from autopar.training.launch_settings import settings_of, with_settings
from search.engines.candidate import (
    NONE,
    Candidate,
    Precision,
    offload_words,
    recompute_words,
)
from search.engines.space import run_of
from search.engines.table import engine_space
from search.planning.uniform.answer import UniformRequest, open_launches
from search.request.degrees import fixed_of
from search.request.request import ROWS, build_request, located_request

_SAME = frozenset(DegreesEntry.__struct_fields__) & frozenset(Candidate.__struct_fields__)
"""Fields that `Candidate` and `DegreesEntry` have in common."""


def degrees_entry(choice: Candidate, world: int) -> DegreesEntry:
    """Return the entry of a plan file with all degrees of a candidate, including derived ones.

    world : number of GPUs.
    """
    same: dict[str, Any] = {name: getattr(choice, name) for name in _SAME}
    dp = world // (choice.tp * choice.cp * choice.pp)
    return DegreesEntry(
        **same,
        dp=dp,
        edp=world // (choice.ep * choice.etp * choice.pp),
        micro_batch_size=choice.micro_batch,
        num_microbatches=choice.global_batch // (choice.micro_batch * dp),
        global_batch_size=choice.global_batch,
        layers_of_chunks=[[len(chunk.layers) for chunk in stage] for stage in choice.chunks],
    )


_RECIPES: Mapping[str, Precision] = {"blockwise": "fp8-blockwise", "mxfp8": "mxfp8"}
"""fp8 recipe -> precision; all recipes with per-tensor scaling are `fp8`."""


def _context_kind(split: Split) -> ContextKind:
    """Return the context-parallel communication type of a candidate.

    `ring` also for hierarchical context parallelism, that is all-to-all within groups and rings
    between them, which is a setting of the run.
    """
    return split.cp_kind if split.cp > 1 and split.rings == 1 else "ring"


def _precision(precision: RunPrecision) -> Precision:
    """Return the precision of a candidate for the precision settings of a run."""
    if precision.fp8:
        return _RECIPES.get(precision.fp8_recipe, "fp8")
    return "nvfp4" if precision.fp4 else "bf16"


def choice_of(run: Run) -> Candidate:
    """Return the candidate with the degrees and batch of a run; other settings are approximated."""
    strategy, split, kernels = run.strategy, run.split, run.kernels
    recomputed, experts = strategy.recomputed, run.runtime.experts
    return Candidate(
        tp=split.tp,
        tp_overlap=run.runtime.overlap.tensor and not kernels.torch_layers,
        cp=split.cp,
        cp_kind=_context_kind(split),
        ep=split.ep,
        etp=split.etp,
        pp=strategy.pp,
        vpp=strategy.vpp,
        schedule=strategy.schedule,
        micro_batch=strategy.micro_batch,
        zero=split.zero,
        dp_replicate=split.replicas if split.zero else 1,
        # recomputation of every n-th layer is a setting of the run
        recompute=NONE if recomputed.kind == "every" else recompute_words(recomputed),
        # offload with fully recomputed layers is a setting of the run
        offload=NONE if recomputed.kind in ("full", "block") else offload_words(split),
        precision=_precision(run.runtime.precision),
        compiled=kernels.compiled,
        dispatcher="flex" if run.model.experts and experts.dispatcher == "flex" else "alltoall",
        overlap_experts=run.runtime.overlap.experts,
        global_batch=strategy.global_batch,
        chunks=strategy.stages,
    )


class StoredRun(Record):
    """Run read from a file: a uniform plan of autopar, or a configuration of an engine."""

    engine: str
    question: UniformRequest
    request: Mapping[str, object]
    """Options that reproduce `question`, by name."""
    choice: Candidate
    run: Run
    """Run of the candidate on its engine, with the settings of the file."""
    notes: tuple[str, ...] = ()
    """Notes on the reading of the file and on ignored settings, one sentence each."""


def is_launch(path: Path | str) -> bool:
    """Return True if a file is in a format of uniform plans; False if it cannot be read."""
    try:
        data = load_object(Path(path)).data
    except InputError:
        return False  # readers of other formats report the problem
    if data.get("format") == RUN_FORMAT:
        return data.get("price") is not None
    return data.get("format") == FORMAT


_CLUSTER = {"hardware", "nodes", "gpus-per-node", "gpus"}
"""Options that set the number of GPUs."""


def _check(
    where: Path,
    document: LaunchDocument,
    question: UniformRequest,
    choice: Candidate,
    typed: set[str],
) -> None:
    """Raise DocumentError if values of a file contradict the plan that was read from it.

    typed : names of options that the user passed; values that they may change are not compared.
    """
    assert document.launch is not None, "there is a launch"
    said: dict[str, object] = {}
    made: dict[str, object] = {}
    if not typed & {"model", "num-layers", "seq-length"}:
        said |= {"model": document.model, "seq_length": document.seq_length}
        made |= {"model": question.spec.name, "seq_length": question.job.seq}
    if not typed & _CLUSTER:
        said |= _named(document.hardware)
        made |= _named(cluster_of(question))
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
                f"the value is {copies}, which does not divide dp {whole['dp']} * cp {choice.cp}",
                key="launch.degrees.dp_replicate",
                remedy=AGAIN,
            )
    _refuse_contradiction(where, said, made)


def cluster_of(question: UniformRequest) -> HardwareEntry:
    """Return the cluster of a question in the representation of plan files."""
    return HardwareEntry(
        card=question.card.name,
        num_nodes=question.num_nodes,
        num_gpus_per_node=question.gpus_per_node,
    )


def _named(hardware: HardwareEntry) -> dict[str, object]:
    return {f"hardware.{key}": one for key, one in asdict(hardware).items()}


def _refuse_contradiction(
    where: Path, said: Mapping[str, object], made: Mapping[str, object]
) -> None:
    """Raise DocumentError for the first value of a file that differs from the derived one.

    The first mapping contains the values of the file by key, the second one the derived values.
    """
    for key, value in said.items():
        if value != made[key]:
            raise DocumentError(
                where,
                f"the value is {value!r:.60}, but the rest of the file implies {made[key]!r:.60}",
                key=key,
                remedy=AGAIN,
            )


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
        raise DocumentError(where, problem, key="schedule", remedy=AGAIN)
    return entry.schedule


def _refuse_degrees(where: Path, typed: Mapping[str, object]) -> None:
    """Raise OptionError if the user passes a degree with a plan file, which sets all degrees."""
    named = [*fixed_of(build_request(typed).degrees).options]
    named += [name for name in ("precision", "cp-kind") if name in typed]
    if named:
        raise OptionError(
            f"--{named[0]}: {where} defines the degrees. To compare with others, use "
            f"`autopar-explain {where} --why-not {named[0]}=N`"
        )


def _batch(question: UniformRequest, stored: int, typed: Mapping[str, object]) -> int:
    """Return the global batch of the file, or that of `--global-batch-size` if it is passed.

    Raises OptionError for `--min-bsz` and `--max-bsz`.
    """
    for name in ("min-bsz", "max-bsz"):
        if name in typed:
            raise OptionError(
                f"--{name}: a plan has one global batch", remedy="Use --global-batch-size"
            )
    typed_batch = "global-batch-size" in typed
    return question.job.global_batches[0] if typed_batch else stored


def _read_run(where: Path, document: RunDocument, typed: Mapping[str, object]) -> StoredRun:
    """Return the uniform plan of an `autopar-run` document.

    Raises InputError if it is illegal or contradicts itself.

    typed : options that the user passed, such as another cluster; they replace the stored ones.
    """
    run = document.run
    if run.runtime.engine not in get_args(Trainer):
        raise DocumentError(
            where,
            f"the value is {run.runtime.engine!r:.60}, expected {expected_of(Trainer)}",
            key="runtime.engine",
            remedy=AGAIN,
        )
    _refuse_degrees(where, typed)
    stored = located_request(where, own_names(document.request, ROWS), typed)
    own = open_launches(build_request(stored))
    job = own.job
    said = {
        "seq_length": run.seq_length,
        "gpu": run.gpu,
        "strategy.gpus": run.strategy.gpus,
        "strategy.layers": run.strategy.num_layers,
    }
    made = dict(zip(said, (job.seq, job.gpu, job.world, job.model.num_layers), strict=True))
    _refuse_contradiction(where, said | _named(document.hardware), made | _named(cluster_of(own)))
    try:
        legal(run)
        choice = choice_of(run)
        found = StoredRun(
            engine=run.runtime.engine, question=own, request=stored, choice=choice, run=run
        )
        if not typed:
            return found
        usual = run_of(engine_space(found.engine), job, choice)
    except InputError as error:
        raise DocumentError(where, str(error), key="strategy", remedy=AGAIN) from None
    request = {**stored, **typed}
    question = open_launches(build_request(request))
    choice = replace(choice, global_batch=_batch(question, run.strategy.global_batch, typed))
    again = run_of(engine_space(found.engine), question.job, choice)
    settings = settings_of(run, usual)
    return replace(
        found,
        question=question,
        request=request,
        choice=choice,
        run=with_settings(again, settings, where),
    )


def read_launch(path: Path | str, typed: Mapping[str, object] | None = None) -> StoredRun:
    """Return the uniform plan of a file; raises InputError if its engine cannot run it.

    typed : options that the user passed; they replace those stored in the file.
    """
    where = Path(path)
    data = load_object(where).data
    if data.get("format") == RUN_FORMAT:
        return _read_run(where, RunDocument.parse(data, where), typed or {})
    if is_answer(data):
        # an answer contains more fields than the format, such as plans of every engine
        data = {key: data[key] for key in LaunchDocument.__struct_fields__ if key in data}
        data["engines"] = []
    document = read_record(LaunchDocument, where, data)
    if document.launch is None:
        raise DocumentError(
            where,
            "no plan is given, because the search found none that fits",
            key="launch",
            remedy="Search again with more memory",
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
            f"the list does not describe pp({entry.pp}) stages of vpp({entry.vpp}) chunks",
            key="layers_of_chunks",
            remedy=AGAIN,
        )
    schedule = _schedule(where, entry)
    # in execution order: the first chunks of all stages, then the second ones
    parts = [
        sizes[rank_of(schedule, part, entry.pp)][part // entry.pp]
        for part in range(entry.vpp * entry.pp)
    ]
    same: dict[str, Any] = {name: getattr(entry, name) for name in _SAME}
    choice = Candidate(
        **{**same, "schedule": schedule},
        micro_batch=entry.micro_batch_size,
        global_batch=_batch(question, entry.global_batch_size, typed or {}),
        chunks=chunks_of_sizes(parts, entry.pp, mtp=question.job.model.mtp, schedule=schedule),
    )
    usual = run_of(engine_space(document.launch.engine), question.job, choice)
    _check(where, document, question, choice, {*(typed or {})})
    return StoredRun(
        engine=document.launch.engine,
        question=question,
        request=request,
        choice=choice,
        run=with_settings(usual, document.launch.settings, where),
    )
