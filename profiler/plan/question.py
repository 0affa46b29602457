"""Options, plan file and model of `profile-plan`, combined into one job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from autopar.command.fields import rows_of
from autopar.documents.catalog import find_model
from autopar.documents.plan import PlanDocument, read_strategy
from autopar.errors import DocumentError, InputError, OptionError
from autopar.records import Record, replace, shorten
from autopar.run.model import ModelSpec
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy, violations
from profiler.environment import rank_threads
from profiler.options import Precision, SizeOptions
from profiler.plan.job import GlobalOptions, Mode, PlanJob, PlanOptions

# --------------------------------------------------------------------------------------------------
# Scaling a plan down: fewer layers and samples, with the same stages, ranks and strategies.


def scale_down(
    plan: Plan,
    spec: ModelSpec,
    *,
    layers: int | None = None,
    global_batch: int | None = None,
    num_microbatches: int | None = None,
) -> tuple[Plan, ModelSpec]:
    """Return a plan and its model with fewer layers or another batch; None keeps a value.

    Embedding and head are not changed. Raises OptionError for fewer layers than stages, more than
    in the plan, an encoder-decoder without one of its stacks, or chunks without layers.
    """
    if global_batch is not None:
        plan = replace(plan, global_batch=global_batch)
    if num_microbatches is not None:
        plan = replace(plan, num_microbatches=num_microbatches)
    if layers is None:
        return plan, spec
    if 0 in plan.chunks:
        raise OptionError(
            "--layers: the plan has chunks without layers, which cannot be scaled in proportion",
            remedy="Remove --layers",
        )
    sizes, chosen = chosen_layers(plan.chunks, layers)
    types = spec.layer_types
    if not _keeps_stacks(spec, chosen):
        total = len(plan.layers)
        more = (n for n in range(layers + 1, total) if _keeps_stacks(spec, _chosen(plan, n)))
        raise OptionError(
            f"--layers {layers}: leaves model {spec.name!r} ({total} layers) "
            "without an encoder or without a decoder",
            remedy=f"Use at least {next(more, total)}",
        )
    runs = [(kind, len(list(run))) for kind, run in groupby(types[index] for index in chosen)]
    scaled = replace(
        spec, layers=tuple(replace(spec.layers[kind], num_layers=n) for kind, n in runs)
    )
    kept = tuple(plan.layers[index] for index in chosen)
    if plan.num_chunks == 1:
        return replace(plan, stage_sizes=sizes, layers=kept), scaled
    held = [0] * plan.num_stages
    for chunk, size in enumerate(sizes):
        held[plan.stage_of_chunk(chunk)] += size
    return replace(plan, stage_sizes=tuple(held), chunk_sizes=sizes, layers=kept), scaled


def _chosen(plan: Plan, layers: int) -> tuple[int, ...]:
    return chosen_layers(plan.chunks, layers)[1]


def _keeps_stacks(spec: ModelSpec, chosen: Sequence[int]) -> bool:
    """Return True if the chosen layers include encoder and decoder; True for other models."""
    types = spec.layer_types
    kept = {spec.layers[types[index]].cross_attention for index in chosen}
    return kept == {layer.cross_attention for layer in spec.layers}


def chosen_layers(
    stage_sizes: tuple[int, ...], layers: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Choose `layers` layers of a plan; return (number per stage, indices of the layers).

    Every stage has at least one. The numbers are proportional to the stage sizes, rounded by
    largest remainder. In a stage, the layers are evenly spaced. Raises OptionError for fewer layers
    than stages or more than in the plan.
    """
    total, stages = sum(stage_sizes), len(stage_sizes)
    if not stages <= layers <= total:
        raise OptionError(
            f"--layers: expected {stages} (one per stage) to {total} (all of the plan), "
            f"got {layers}"
        )
    free = layers - stages
    # only layers beyond the first of each stage are shared out, so that no stage is empty
    beyond = total - stages
    shares = [(size - 1) * free for size in stage_sizes]
    sizes = [1 + (share // beyond if beyond else 0) for share in shares]
    # largest remainders first; among equals, the earlier stage
    order = sorted(range(stages), key=lambda j: (-(shares[j] % beyond) if beyond else 0, j))
    for stage in order[: layers - sum(sizes)]:
        sizes[stage] += 1
    chosen: list[int] = []
    first = 0
    for size, kept in zip(stage_sizes, sizes, strict=True):
        chosen += (first + (2 * k + 1) * size // (2 * kept) for k in range(kept))
        first += size
    return tuple(sizes), tuple(chosen)


# --------------------------------------------------------------------------------------------------
# GLOBAL mode: one strategy for all layers from a few options, as in Galvatron's launcher.


def make_plan(options: GlobalOptions, *, num_layers: int, world_size: int) -> Plan:
    """Return the uniform plan of the options of GLOBAL mode.

    Stages have equal sizes, and the last one also has the remainder, as in strategy files without
    `pp_division`. Defaults: degrees 1, consecutive groups, ddp, no checkpointing, gpipe (default of
    Galvatron's launcher), and one micro-batch per stage.


    Raises OptionError: the batch is not given, or there are more stages than layers.
    """
    if options.global_train_batch_size is None:
        raise OptionError(
            f"{options.given[0]} without a plan file needs "
            "--global-train-batch-size (samples per step)",
            remedy="Add it",
        )
    stages = options.pp_deg or 1
    each, rest = divmod(num_layers, stages)
    if each == 0:
        raise OptionError(
            f"--pp-deg: {stages} stages for {num_layers} layers",
            remedy=f"Use at most {num_layers}",
        )
    degree = options.global_tp_deg or 1
    layer = LayerStrategy(
        tp=degree,
        ulysses=bool(options.use_ulysses) and degree > 1,
        zero3=bool(options.sdp),
        checkpoint=bool(options.global_checkpoint),
        strided=options.global_tp_consec is False and degree > 1,
    )
    vocab_degree = options.vocab_tp or 1
    return Plan(
        world_size=world_size,
        num_stages=stages,
        stage_sizes=(each,) * (stages - 1) + (each + rest,),
        layers=(layer,) * num_layers,
        vocab=VocabStrategy(
            tp=vocab_degree,
            ulysses=bool(options.vocab_sp) and vocab_degree > 1,
            zero3=bool(options.embed_sdp),
        ),
        global_batch=options.global_train_batch_size,
        num_microbatches=options.chunks or stages,
        pipeline_type=options.pipeline_type or "gpipe",
        default_dp_type=options.default_dp_type or "ddp",
    )


# --------------------------------------------------------------------------------------------------
# Plan, model and prediction, from options and files.


_SHARDED_IN_FP32 = ("accelerate", "galvatron", "torchtitan")
"""Engines whose ZeRO-3 is torch's FSDP, which gathers bf16 or fp16 weights from fp32 shards. For
other engines the planner assumes bf16 or fp16 shards in addition to the fp32 ones."""
_RUN_HERE: Mapping[str, Precision] = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}


class Question(Record):
    """Job of `profile-plan` with its source, its prediction and notes."""

    job: PlanJob
    source: str
    """Path of the plan file, or `GLOBAL mode`."""
    problems: tuple[str, ...]
    """Violations that make the plan illegal, each with its arithmetic."""
    prediction: PlanDocument | None
    """Plan file with a prediction; None without one, or if it is for a different job."""
    notes: tuple[str, ...]
    """Assumptions, ignored values and scaling, one sentence each."""


def ask(options: PlanOptions, *, mode: Mode, launched: int | None = None) -> Question:
    """Return the job that the options and the plan file describe.


    launched : number of ranks that torchrun started, None without it; the world size of a plan
        that does not contain one.

    Raises InputError: an option or a file is missing, invalid, or contradicts another.
    """
    stored = _Stored(options.plan)
    notes = [] if options.model is not None else list(stored.notes)
    world = options.world_size or launched
    spec = _load_model(options, stored)
    if options.plan is None:
        source = "GLOBAL mode"
        plan = make_plan(options.uniform, num_layers=spec.num_layers, world_size=_known(world))
    else:
        source = str(options.plan)
        plan = _read(stored, world, spec.num_layers)
        if options.uniform.given:
            notes.append(
                "the plan file contains the strategy, so "
                f"{', '.join(options.uniform.given)} "
                f"{'is' if len(options.uniform.given) == 1 else 'are'} ignored"
            )
    if options.world_size is not None and options.world_size != plan.world_size:
        raise OptionError(
            f"--world-size is {options.world_size}, but {source} is a plan for "
            f"{plan.world_size} ranks",
            remedy="Remove --world-size",
        )
    if len(plan.layers) != spec.num_layers:
        raise InputError(
            f"{source} has {len(plan.layers)} layers, but model {spec.name!r} "
            f"has {spec.num_layers}",
            remedy=f"Use the model of the plan, or --num-layers {len(plan.layers)}",
        )
    for layer in spec.layers:
        if 0 < spec.learned_positions < layer.seq_length:
            raise OptionError(
                f"--seq: model {spec.name!r} has {spec.learned_positions} "
                "learned positions, but the sequence length is "
                f"{layer.seq_length}",
                remedy="Use a shorter sequence",
            )
    job = _job(options, stored, mode, plan, spec)
    prediction = _prediction(stored, plan)
    why = () if options.plan is None else _other_run(stored, job, plan, spec)
    if mode == "run":
        why = (*why, *_other_threads(stored))
    if prediction is not None and why:
        notes.append(
            f"the prediction in {source} is for another run ({', '.join(why)}) and is ignored"
        )
        prediction = None
    if prediction is not None and not stored.has_options:
        notes.append(
            "the file has no sequence length, precision and options of its "
            "prediction; using those of this run"
        )
    problems = violations(job.plan, job.spec, sequence_parallel=job.sequence_parallel)
    return Question(
        job=job, source=source, problems=problems, prediction=prediction, notes=tuple(notes)
    )


# --- plan and model ------------------------------------------------------------------------


class _Stored:
    """Request and options in an autopar plan file or result; empty for other files."""

    def __init__(self, path: Path | None) -> None:
        self.path = path or Path()
        self.document = PlanDocument() if path is None else PlanDocument.read(path)
        self.options = self.document.options
        self.has_options = bool(self.options.given)
        self._request, found = self.document.located_request(self.path)
        # only notes about the model matter here
        self.notes = [note for note in found if note.startswith("--model ")]
        """Notes about the location of the model, if it was found next to the plan file."""

    def text(self, key: str) -> str | None:
        """Return an option of the request as text, or None if it is absent."""
        value = self._request.get(key)
        if value is not None and not isinstance(value, str):
            raise self._unusable(key, value, "a text")
        return value

    def counts(self, key: str) -> tuple[int, ...] | None:
        """Return an option of the request as numbers, or None if it is absent."""
        text = self.text(key)
        if text is None:
            return None
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isdecimal() and len(part) < 10 for part in parts):
            raise self._unusable(key, text, "a comma list of numbers")
        return tuple(map(int, parts))

    @property
    def sizes(self) -> SizeOptions:
        """Sizes of the request that have one value for all layer types."""
        found = {}
        for row in rows_of(SizeOptions):
            numbers = self.counts(row.name) if row.name != "hidden-size" else None
            if numbers is not None:
                if len(numbers) > 1:
                    raise self._unusable(row.name, self.text(row.name), "one number")
                found[row.field] = numbers[0]
        return SizeOptions(**found)

    def _unusable(self, key: str, value: object, expected: str) -> DocumentError:
        return DocumentError(
            self.path,
            f"expected {expected}, got {shorten(value)}",
            key=f"request.{key}",
            remedy="Write the plan again with autopar-search",
        )


def _load_model(options: PlanOptions, stored: _Stored) -> ModelSpec:
    name = options.model or stored.text("model")
    if name is None:
        file = "the options of GLOBAL mode do" if options.plan is None else f"{options.plan} does"
        raise OptionError(
            f"--model is missing: {file} not contain the model of the plan",
            remedy="Add --model with a shipped name, a config.json or a model.json",
        )
    try:
        find_model(name)
    except InputError as error:
        if options.model is not None:
            raise
        raise DocumentError(
            stored.path, error.short, key="request.model", remedy="Add --model"
        ) from None
    # given sizes replace those of the plan file one by one
    sizes = SizeOptions(**{**stored.sizes.given, **options.sizes.given})
    spec = sizes.load(
        name,
        num_layers=options.num_layers or stored.counts("num-layers"),
        seq_length=_seq_length(options, stored),
        hidden_size=stored.counts("hidden-size"),
    )
    for index, layer in enumerate(spec.layers):
        for key in ("num_heads", "ffn_hidden_size"):
            if getattr(layer, key) is None:
                raise InputError(
                    f"model {spec.name!r}: {key} of layer type {index} is unknown",
                    remedy="Add it to model.json",
                )
    return spec


def _seq_length(options: PlanOptions, stored: _Stored) -> Sequence[int] | None:
    return (options.seq_length,) if options.seq_length else stored.counts("seq-length")


def _read(stored: _Stored, world: int | None, num_layers: int) -> Plan:
    try:
        return read_strategy(
            stored.document, world_size=world, num_layers=num_layers, path=stored.path
        )
    except DocumentError as error:
        if error.key != "world_size" or world is not None:
            raise
        remedy = "Add --world-size, or start with torchrun"
        raise DocumentError(stored.path, error.problem, key=error.key, remedy=remedy) from None


def _known(world: int | None) -> int:
    if world is None:
        raise OptionError(
            "--world-size is missing: the number of ranks is unknown without a plan file",
            remedy="Add --world-size, or start with torchrun",
        )
    return world


# --- the job and its prediction ------------------------------------------------------------


def _job(
    options: PlanOptions,
    stored: _Stored,
    mode: Mode,
    plan: Plan,
    spec: ModelSpec,
) -> PlanJob:
    plan, spec = scale_down(
        plan,
        spec,
        layers=options.layers,
        global_batch=options.global_batch,
        num_microbatches=options.num_microbatches,
    )

    def flag(*said: bool | None) -> bool:
        # the option, then the file; True if neither sets it
        return next((value for value in said if value is not None), True)

    return PlanJob(
        plan=plan,
        spec=spec,
        sequence_parallel=flag(options.sequence_parallel, stored.options.sequence_parallel),
        async_grad_reduce=flag(options.async_grad_reduce, stored.options.async_grad_reduce),
        fp32_gradients=flag(options.fp32_gradients, stored.options.fp32_gradients),
        precision=_precision(options, stored, mode),
        narrow_shards=stored.has_options and stored.options.engine not in _SHARDED_IN_FP32,
        routing=options.routing,
        context_exchange=options.context_exchange,
        seed=options.seed,
    )


def _precision(options: PlanOptions, stored: _Stored, mode: Mode) -> Precision:
    if options.precision is not None:
        return options.precision
    text = stored.options.mixed_precision
    if text is not None and text not in _RUN_HERE:
        raise DocumentError(
            stored.path,
            f"expected fp32, bf16 or fp16, got {shorten(text)}",
            key="options.mixed_precision",
            remedy="Add --mixed-precision",
        )
    return _RUN_HERE[text] if text else ("bf16" if mode == "dryrun" else "fp32")


def _prediction(stored: _Stored, plan: Plan) -> PlanDocument | None:
    """Return the document if it contains a prediction, else None."""
    document, count = stored.document, plan.num_stages
    if document.step_time_s is None and not document.stages:
        return None
    if document.stages and len(document.stages) != count:
        raise DocumentError(
            stored.path,
            f"expected a list of {count} stages, got {len(document.stages)}",
            key="prediction.stages",
            remedy="Write the plan again with autopar-search",
        )
    return document


def _other_run(stored: _Stored, job: PlanJob, whole: Plan, spec: ModelSpec) -> tuple[str, ...]:
    """Return the differences between a job and the predicted one; empty if there are none.

    whole : plan of the file, before scaling down.
    spec : its model.
    """
    differences = []
    if job.plan.layers != whole.layers:
        differences.append(f"{len(whole.layers)} layers, here {len(job.plan.layers)}")
    if job.plan.global_batch != whole.global_batch:
        differences.append(f"batch {whole.global_batch}, here {job.plan.global_batch}")
    if job.plan.num_microbatches != whole.num_microbatches:
        differences.append(
            f"{whole.num_microbatches} micro-batches, here {job.plan.num_microbatches}"
        )
    if not stored.has_options:
        return tuple(differences)
    differences += _other_model(stored, spec)
    texts = {True: "with", False: "without"}
    for key, word in (
        ("sequence_parallel", "sequence parallelism"),
        ("async_grad_reduce", "one reduction of gradients per step"),
        ("fp32_gradients", "sums of gradients in fp32"),
    ):
        then, now = getattr(stored.options, key), getattr(job, key)
        if then is not None and then != now:
            differences.append(f"{texts[then]} {word}, here {texts[now]}")
    then_precision = stored.options.mixed_precision
    if then_precision is not None and then_precision != job.precision:
        differences.append(f"{then_precision}, here {job.precision}")
    return tuple(differences)


def _other_threads(stored: _Stored) -> tuple[str, ...]:
    then, now = stored.options.threads, rank_threads()
    return () if then in (None, now) else (f"{then} threads per rank, here {now}",)


def _other_model(stored: _Stored, spec: ModelSpec) -> list[str]:
    """Return the differences between a model and the model of the plan file."""
    name = stored.text("model")
    if name is None:  # made of profile files alone, so only the model's sizes are known
        return []
    try:
        own = stored.sizes.load(
            name,
            num_layers=stored.counts("num-layers"),
            seq_length=stored.counts("seq-length"),
            hidden_size=stored.counts("hidden-size"),
        )
    except InputError:
        return [f"model {name}, which is not here"]
    then, now = (sorted({layer.seq_length for layer in s.layers}) for s in (own, spec))
    if then != now:
        shown = (", ".join(map(str, lengths)) for lengths in (then, now))
        return [f"sequence length {next(shown)}, here {next(shown)}"]
    return [] if own == spec else [f"model {own.name}, here {spec.name} of other sizes"]
