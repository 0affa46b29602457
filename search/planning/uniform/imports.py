"""Import of uniform plans from engine configurations, and conversion between engines.

The result is a candidate of the search with its model and cluster. Settings that a candidate does
not contain are stored in the run (`autopar.training.launch_settings`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autopar.command.answers import OUTPUTS
from autopar.command.dialect import own_names
from autopar.documents.catalog import model_names
from autopar.documents.json import load_object
from autopar.documents.spec import load_spec
from autopar.errors import DocumentError, InputError, OptionError, UnsupportedError, shortened
from autopar.pipeline.schedules import SCHEDULES, schedule_of_chunks
from autopar.records import Record, replace
from autopar.run.architecture import Model
from autopar.run.of_plan import uniform_model
from autopar.run.rules import broken
from autopar.run.run import Run
from autopar.run.strategy import Strategy, chunks_of_sizes
from autopar.training.launch_settings import settings_of, with_settings
from search.engines.candidate import (
    BASES,
    FULL,
    NONE,
    Candidate,
)
from search.engines.differences import losses_of, without_effect
from search.engines.engine import Engine
from search.engines.exporter_types import UnsupportedFeature
from search.engines.huggingface.named_optimizers import name_of
from search.engines.megatron.stages import parts_in_order
from search.engines.reader import CheckedFile
from search.engines.space import EngineSpace, run_of, values_of
from search.engines.table import (
    engine_of,
    engine_space,
    launch_file,
    planned_as,
    read_checked,
    variants,
)
from search.planning.uniform.answer import UniformRequest, open_launches
from search.planning.uniform.files import StoredRun, choice_of, is_launch, read_launch
from search.request.profiles import card_with_shape, named_card
from search.request.request import ROWS, Request, build_request


def import_launch(source: str | None, path: str, raw: Mapping[str, object]) -> StoredRun:
    """Return the uniform plan in a script or configuration file of an engine.

    Raises InputError if the file belongs to another engine, if the engine rejects it, or if its
    model is neither passed nor a shipped one.

    source : name of the engine; None to detect it
    path : path of the file
    raw : options that the user passed; `hardware` with a card is required
    """
    asked = build_request(raw)
    inputs = asked.inputs
    own = engine_of(launch_file(path))
    gpu, world = _cluster(path, inputs.hardware)
    if source not in (None, own.name):
        raise DocumentError(
            path, f"is a configuration of {own.title}", remedy=f"Use --from {own.name}"
        )
    file = _read(path, own, asked, gpu, world)
    run = _priced(file)
    # The plan that is stored no longer contains the arguments of the file.
    kept = {name: value for name, value in raw.items() if name != "check-ignore"}
    request: dict[str, object] = {**kept, **_question(run, inputs.model, path)}
    question = open_launches(build_request(request))
    engine = planned_as(own.name)
    choice = choice_of(run)
    try:
        usual = run_of(engine_space(engine), question.job, choice)
    except InputError as error:
        raise DocumentError(path, f"no plan of a search matches it: {error}") from None
    settings = settings_of(without_effect(run), without_effect(usual))
    found = with_settings(usual, settings, Path(path))
    return StoredRun(
        engine=engine,
        question=question,
        choice=choice,
        run=found,
        request=request,
        notes=(*_notes(file), *(one.what for one in losses_of(run, found, "a plan file"))),
    )


def _read(path: str, own: Engine, asked: Request, gpu: str, world_size: int | None) -> CheckedFile:
    """Return the file of an engine as `autopar check` reads it."""
    lengths, batches = asked.inputs.seq_length or (None,), asked.degrees.micro_batch_size or (None,)
    return read_checked(
        path,
        world_size=world_size,
        gpu=gpu,
        model=asked.inputs.model,
        seq_length=lengths[0],
        micro_batch=batches[0] if own.asks_for_batch else None,
        global_batch=asked.options.settle_bsz if own.asks_for_batch else None,
        precision="bf16" if own.asks_for_batch and asked.degrees.precision == ("bf16",) else None,
        ignored=asked.inputs.check_ignore or (),
    )


def with_cluster(path: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return options whose hardware, a card alone, has the GPUs of an engine's file.

    Options with a size of the cluster, and those for other files, are returned as they are. Raises
    InputError for the name of an unknown card.
    """
    from autopar.documents.catalog import find_card, hardware_names
    from autopar.rates.card import load_card

    raw = own_names(raw, ROWS)
    card = raw.get("hardware")
    if (
        not isinstance(card, str)
        or not holds_launch(path)
        or (path.endswith(".json") and is_launch(path))
        or named_card(card)
        or Path(card).exists()
        or card in hardware_names()
    ):
        return dict(raw)
    find_card(card)
    if {"nodes", "gpus-per-node", "gpus"} & raw.keys():
        return dict(raw)
    asked = build_request({name: value for name, value in raw.items() if name != "hardware"})
    device = load_card(card)
    file = _read(path, engine_of(launch_file(path)), asked, device.gpu, None)
    world_size = file.world_size
    each = file.gpus_per_node or min(device.max_gpus_per_node, world_size)
    return {**raw, "hardware": card_with_shape(card, file.num_nodes, each, world_size)}


def holds_launch(path: str) -> bool:
    """Return True if a file contains a uniform plan, or is assumed to be a file of an engine.

    JSON files are opened to find out. All other files except `.gz` are assumed to be scripts or
    configurations of an engine.
    """
    if not Path(path).is_file() or path.endswith(".gz"):
        return False
    return not path.endswith(".json") or is_launch(path) or _is_configuration(path)


def _is_configuration(path: str) -> bool:
    """Return True if a JSON file is a configuration of an engine with uniform plans."""
    try:
        data = load_object(Path(path)).data
        if "format" in data or "traceEvents" in data:  # files of autopar and of profilers
            return False
        return engine_of(launch_file(path)).write is not None
    except InputError:
        return False  # readers of other formats report the problem


def launch_in(path: str, given: Mapping[str, object], notice: Callable[[str], None]) -> StoredRun:
    """Return the uniform plan of a plan file, or of a script or configuration of an engine.

    Raises InputError if the file is invalid or contradicts the options.

    given : options that the user passed; for files of engines they must include the cluster
    notice : called with each note on how a file of an engine was read
    """
    if path.endswith(".json") and is_launch(path):
        return read_launch(path, given)
    raw = {name: given[name] for name in given if name not in OUTPUTS | _OF_COMMANDS}
    found = import_launch(None, path, raw)
    for note in found.notes:
        notice(f"{path}: {note}")
    return found


_OF_COMMANDS = frozenset({"evaluate", "verbose", "price"})
"""Options of commands that do not change model, cluster or batch."""


def _cluster(path: str, hardware: str | None) -> tuple[str, int]:
    """Return (card, GPUs) of `--hardware`; raises OptionError if it names no card."""
    from autopar.rates.card import load_card, parse_hardware

    if hardware is None or named_card(hardware) is None:
        raise OptionError(
            f"{path} names no cards and no number of GPUs",
            remedy="Add --hardware CARD:NODESxGPUS, such as h100:8x8",
        )
    name, nodes, each = parse_hardware(hardware)
    return load_card(name).gpu, nodes * each


def _priced(file: CheckedFile) -> Run:
    """Return the run of a file; raises DocumentError if it is illegal or cannot be priced."""
    problem = next((one.text for one in file.findings if one.kind == "illegal"), None)
    if problem is not None:
        raise DocumentError(file.path, f"illegal for {file.trainer}: {problem}")
    if file.run is None:
        why = next((one.text for one in file.findings if one.kind == "not priced"), "")
        raise DocumentError(file.path, f"cannot be estimated: {why}")
    if file.withdrawn:
        first = next(one for one in file.findings if one.withdraws)
        name = str(first.values["flag"]).lstrip("-").replace("-", "_")
        raise DocumentError(
            file.path,
            f"cannot be estimated: {file.why_not_priced()}",
            remedy=f"Remove it, or add --check-ignore {name} if it changes neither memory nor time",
        )
    return file.run


def _notes(file: CheckedFile) -> Iterator[str]:
    """Yield notes on how a file was read and on settings that were ignored."""
    yield from (one.text for one in file.findings if one.kind == "read")
    idle = [one.text for one in file.findings if one.kind == "no effect"]
    if idle:
        yield f"ignored (no effect): {'; '.join(idle)}"
    if file.harmless:
        names = ", ".join(file.spelled(one.flag, None) for one in file.harmless)
        yield f"no effect on time or memory: {names}"


# --------------------------------------------------------------------------------------------------
# Question: model, cluster and batch.


def _question(run: Run, model: str | None, path: str) -> dict[str, object]:
    """Return the options that reproduce model, batch and optimizer of a run.

    Raises DocumentError if the sizes of the run and of the named model differ.

    model : name or file of the model; None to find a shipped model of equal sizes.
    """
    found: dict[str, object] = {
        "model": model or _model_name(run.model, path),
        "seq-length": str(run.seq_length),
        "global-batch-size": str(run.strategy.global_batch),
        **_training(run),
    }
    spec = load_spec(str(found["model"]))
    if len(spec.layers) == 1 and spec.num_layers != run.model.num_layers:
        found["num-layers"] = str(run.model.num_layers)
        spec = load_spec(str(found["model"]), num_layers=(run.model.num_layers,))
    named, own = _sizes(uniform_model(spec)), _sizes(run.model)
    for what, size in own.items():
        if named.get(what) != size:
            raise DocumentError(
                path,
                f"has {what} {_shown(size)}, but {found['model']} has {_shown(named.get(what))}",
                remedy="Add --model with the config.json of its model",
            )
    return found


def _model_name(model: Model, path: str) -> str:
    """Return the name of a shipped model of equal sizes, preferably of equal vocabulary size.

    Raises DocumentError if there is none.
    """
    near = []
    for name in model_names():
        try:
            known = uniform_model(load_spec(name))
        except InputError:
            continue  # not a decoder
        if _sizes(known) == _sizes(model):
            near.append((known.vocab != model.vocab, name))
    if not near:
        sizes = ", ".join(f"{what} {size}" for what, size in [*_sizes(model).items()][:4])
        raise DocumentError(
            path, f"no shipped model has {sizes}", remedy="Add --model with its config.json"
        )
    return min(near)[1]


def _sizes(model: Model) -> dict[str, object]:
    """Return the sizes that identify a model, by their names in messages."""
    attention, experts = model.attention, model.experts
    found: dict[str, object] = {
        "layers": model.num_layers,
        "hidden size": model.hidden,
        "heads": attention.heads,
        "width of a query": attention.width,
    }
    if attention.latent is None:
        found["heads of keys and values"] = attention.kv_heads
    found["experts"] = None if experts is None else experts.number
    if not all(model.mixtures):
        found["MLP width"] = model.dense_width
    if experts is not None:
        found["experts of a token"] = experts.per_token
        found["width of an expert"] = experts.width
    return found


def _training(run: Run) -> dict[str, object]:
    """Return the options of adapters and optimizer that differ from the defaults."""
    optimizer, adapters = run.runtime.optimizer, run.runtime.adapters
    found: dict[str, object] = {}
    if adapters is not None:
        found["lora"] = str(adapters.rank)
        bases = {kind: word for word, kind in BASES.items()}
        if adapters.base != "16 bits":
            found["lora-base"] = bases[adapters.base]
    if name_of(optimizer) != "adam":
        found["optimizer"] = name_of(optimizer)
    elif not run.kernels.torch_layers and optimizer.moments_bytes == 4:
        found["optimizer"] = "adam-bf16"
    if run.runtime.sft:
        found["sft"] = True
    if adapters is None and optimizer.master_bytes == 0:
        found["pure-bf16"] = True
    if optimizer.offload:
        found["offload-optimizer"] = f"{optimizer.offload:g}"
    return found


# --------------------------------------------------------------------------------------------------
# Conversion to another engine.


class ConvertedRun(Record):
    """Run of one engine, converted to another engine."""

    choice: Candidate
    run: Run
    losses: tuple[UnsupportedFeature, ...]
    """Features of the original run that the other engine lacks or sets differently."""


_OF_JOB = ("model.", "steps", "runtime.experts.")
"""Prefixes of settings that do not depend on the engine: model, number of steps, routing."""


def converted(
    question: UniformRequest, run: Run, usual: Run, choice: Candidate, engine: str
) -> ConvertedRun:
    """Return the most similar run of another engine, with its differences.

    Raises UnsupportedError if the other engine does not support the plan's parallelism, or rejects
    the converted plan.

    run : run to convert
    choice : its candidate
    usual : run of the candidate with the default settings of its original engine
    engine : name of the other engine
    """
    space = engine_space(engine)
    near, losses = choice, list[UnsupportedFeature]()
    for changes, sentence in _adapted(question, run.strategy, choice, space):
        near = replace(near, **changes)
        what = f"{space.title} has no {sentence}"
        losses.append(UnsupportedFeature(field=next(iter(changes)), what=what))
    if others := broken(space.writable, values_of(space, question.job, near)):
        raise UnsupportedError(
            f"illegal for {space.title}: {others[0].problem}",
            remedy="Use --to with another engine",
        )
    try:
        made = run_of(space, question.job, near)
    except InputError as error:
        raise UnsupportedError(
            f"illegal for {space.title}: {error.short}",
            remedy=f"Search again with --engine {engine}",
        ) from None
    own = settings_of(without_effect(run), without_effect(usual))
    kept = {name: value for name, value in own.items() if name.startswith(_OF_JOB)}
    losses += [
        UnsupportedFeature(
            field=name,
            what=(
                f"{name.replace('_', ' ')}, which the target engine sets itself: {_shown(value)}"
            ),
        )
        for name, value in own.items()
        if name not in kept
    ]
    found = with_settings(made, kept, Path(question.spec.name))
    return ConvertedRun(choice=near, run=found, losses=tuple(losses))


def _shown(value: object) -> str:
    return "none" if value is None else shortened(str(value))


def _adapted(
    question: UniformRequest, strategy: Strategy, choice: Candidate, space: EngineSpace
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (changed fields, description of the missing feature) for an engine.

    Raises UnsupportedError if the engine lacks a dimension of parallelism.
    """
    model, gpu = question.job.model, question.job.gpu
    ranks = {
        "pipeline stages": (choice.pp, bool(space.schedules)),
        "context ranks": (choice.cp, bool(space.context)),
        "expert ranks": (choice.ep, space.experts),
    }
    for what, (number, there) in ranks.items():
        if number > 1 and not there:
            raise UnsupportedError(
                f"{space.title} has no {what}, but the plan has {number}",
                remedy=f"Search again with --engine {space.name}",
            )
    if choice.pp > 1 and choice.schedule not in space.schedules:
        schedule = schedule_of_chunks(choice.vpp)
        # each model chunk retains its layers, but may be on another stage
        parts = parts_in_order(strategy)
        chunks = chunks_of_sizes(
            [len(chunk.layers) for chunk in parts],
            choice.pp,
            mtp=[chunk.mtp for chunk in parts],
            schedule=schedule,
        )
        told = f"schedule {SCHEDULES[choice.schedule].title}: {SCHEDULES[schedule].title}"
        yield {"schedule": schedule, "chunks": chunks}, told
    if choice.cp > 1 and choice.cp_kind not in space.context:
        kind = space.context[0]
        yield {"cp_kind": kind}, f"{choice.cp_kind} between context ranks: {kind}"
    beside = space.expert_tensor
    if model.experts is not None and beside is not None and choice.etp not in beside(choice.tp):
        etp = beside(choice.tp)[-1]
        yield {"etp": etp}, f"expert tensor degree {choice.etp} with tp {choice.tp}: {etp}"
    stages = space.zero_with_stages if choice.pp > 1 else space.zero
    if choice.zero not in stages:
        more = [stage for stage in stages if stage > choice.zero]
        zero = min(more) if more else max(stages)
        where = " with pipeline stages" if choice.pp > 1 else ""
        yield {"zero": zero}, f"ZeRO-{choice.zero}{where}: ZeRO-{zero}"
        choice = replace(choice, zero=zero)
    if choice.dp_replicate > 1 and choice.zero not in space.replicated:
        yield {"dp_replicate": 1}, f"{choice.dp_replicate} copies of ZeRO-{choice.zero}: one"
    if choice.tp_overlap and not space.overlaps_tensor(question.job, choice.tp):
        yield {"tp_overlap": False}, "TP communication overlapped with GEMMs"
    known = space.recompute(model)
    if choice.recompute not in known and not (
        choice.recompute.startswith("block") and space.blocks
    ):
        # full recomputation needs less memory
        yield {"recompute": FULL}, f"recomputation of {choice.recompute}: full"
    if choice.offload != NONE and space.offload(model) == (NONE,):
        yield {"offload": NONE}, "activations of modules on the host: they stay on the device"
    if choice.precision not in space.precisions(gpu):
        yield {"precision": "bf16"}, f"{choice.precision} GEMMs: bf16"
    if choice.compiled and not any(one.compiled for one in variants(space)):
        yield {"compiled": False}, "torch.compile"
    if choice.dispatcher not in space.dispatchers(gpu) and choice.ep > 1:
        yield {"dispatcher": space.dispatchers(gpu)[0]}, f"{choice.dispatcher} dispatcher"
    if choice.overlap_experts and not space.overlaps_experts:
        yield {"overlap_experts": False}, "expert communication overlapped with another micro-batch"
