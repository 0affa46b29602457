"""Checks of torchtitan job files: settings that torchtitan rejects and settings without effect.

`search.engines.torchtitan.read` defines the meaning of the keys, and
`search.engines.torchtitan.rules` defines the rules.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from autopar.errors import DocumentError, InputError
from autopar.pipeline.schedules import schedule_problem
from autopar.rates.devices import lacks_precision
from autopar.records import Record, replace
from autopar.run.architecture import Model
from autopar.run.rules import Notice, broken, notice
from autopar.run.run import Run
from search.engines.arguments import BOTH
from search.engines.changes import Changes, Move
from search.engines.engine import EngineRelease
from search.engines.keys import Keys, whole, words_of_values
from search.engines.reader import (
    CheckedFile,
    CheckOptions,
    ReadResult,
    attempt,
    read_notes,
    release_notices,
    unread,
    with_problems,
    without_effect,
    world_size_of,
)
from search.engines.text import Configuration, named_text, read_configuration
from search.engines.torchtitan.flavours import JOB_FILES, SPANS, linear_modules
from search.engines.torchtitan.read import (
    Generation,
    TitanDegrees,
    degrees_of,
    generation_of,
    grid_values,
    keys_of,
    read_titan,
    spans_of,
)
from search.engines.torchtitan.rules import FILE
from search.engines.torchtitan.source import TitanRecipe, is_source, read_source, recipes

_MOVES: frozenset[Move] = frozenset({"tensor", "context", "experts", "micro_batch", "recompute"})


_EXPERTS_SPLIT = "expert_tensor_parallel_degree"
"""Degree that release 0.3 does not have."""
_CONFIG_FILE = "job.config-file"
"""Argument of torchtitan that passes a job file."""


def owns(source: Configuration) -> bool:
    """Return True if a document has the sections `model`, with a flavor, and `training`.

    A script is of torchtitan if it passes such a document.
    """
    document, flags = source.document, source.flags or {}
    if source.python is not None:
        return is_source(source.python)
    if _CONFIG_FILE in flags or _is_launch(source):
        return True
    model, training = document.get("model"), document.get("training")
    return isinstance(model, Mapping) and "flavor" in model and isinstance(training, Mapping)


def _is_launch(source: Configuration) -> bool:
    """Return True for a launch of release 0.3: `-m torchtitan.train --module M --config NAME`."""
    program = "" if source.command is None else source.command.program
    named = {"module", "config"} <= (source.flags or {}).keys()
    return named and program.startswith("torchtitan")


def _recipe(source: Configuration, given: dict[str, Any], notes: list[str]) -> TitanRecipe:
    """Return the recipe of a Python file, or the one that a launch of 0.3 names.

    given : values of the launch by dotted key; `module` and `config` are taken out.
    """
    if source.python is not None:
        return read_source(source.path, source.python, environment=source.environment)
    module, name = str(given.pop("module")), str(given.pop("config"))
    known = recipes().get(name)
    if known is not None and module in ("", known["model"]["name"]):
        return TitanRecipe(document=known)
    file = f"{module.replace('.', '/')}.py"
    path, text = named_text(file, source.path.parent, source.written, notes)
    text = path.read_text("utf-8") if text is None else text
    return read_source(path, text, name, source.environment)


# --------------------------------------------------------------------------------------------------
# Violated rules.


class _File(Record):
    """Keys of a job file, with the parallel degrees and the GPU of its run."""

    keys: Keys
    degrees: TitanDegrees
    generation: Generation
    gpu: str

    def on(self, key: str) -> bool:
        value = self.keys.values.get(key)
        return value is True or value == "true"

    def has(self, key: str) -> bool:
        return self.keys.values.get(key) is not None

    @property
    def compiled(self) -> bool:
        return self.on("training.compile") or self.on("compile.enable")

    @property
    def asynchronous(self) -> bool:
        name = "enable_async_tensor_parallel"
        return any(self.on(f"{one}.{name}") for one in ("compile", "parallelism", "experimental"))

    @property
    def float8(self) -> str:
        """Name of the section that configures float8 GEMMs; empty if they are off."""
        given = str(self.keys.values.get("model.converters", ""))
        if "quantize.linear.float8" in given or "quantize.dense.float8" in given:
            return "quantize.linear.float8" if "linear" in given else "quantize.dense.float8"
        on = "float8" in given or self.on("float8.enable_float8_linear")
        return "float8" if on else ""


def _broken(file: _File, run: Run | None) -> tuple[Notice, ...]:
    """Return one notice for each rule of torchtitan or PyTorch that a job file violates.

    run : run that the file describes; None skips the rules on model and schedule.
    """
    degrees, section = file.degrees, file.float8
    values: dict[str, Any] = {
        **grid_values(degrees),
        # 0.3 has no DDP.
        "replicas_alone": degrees.replicate > 1
        and degrees.shard * degrees.cp == 1
        and file.generation != "0.3",
        "asynchronous": file.asynchronous,
        "compiled": file.compiled,
        "float8": section,
        "float8_gather": bool(section) and file.on(f"{section}.enable_fsdp_float8_all_gather"),
        "float8_recipe": file.keys.values.get(f"{section}.recipe_name") not in (None, ""),
        "no_fp8": lacks_precision(file.gpu, "fp8"),
    }
    return broken(FILE, values | ({} if run is None else _of_run(file, run)))


def _of_run(file: _File, run: Run) -> dict[str, Any]:
    """Return the inputs of the rules on model and schedule, by input name."""
    degrees, model = file.degrees, run.model
    return {
        "kv_heads": model.attention.kv_heads if model.attention.latent is None else None,
        "seq_length": run.seq_length,
        "sequence_parallel": True,
        "ulysses": 1,
        "ep": degrees.ep,
        "etp": degrees.etp,
        "experts": sum(model.mixtures),
        "tied": model.tied,
        "schedule_problem": _of_pipeline(file, run) if degrees.pp > 1 else None,
    }


def _of_pipeline(file: _File, run: Run) -> str | None:
    # A schedule runs the micro-batches of one local batch; the default of torchtitan is 8.
    local = file.keys.values.get("training.local_batch_size", file.keys.values.get(
        "training.batch_size", 8))  # fmt: skip
    number = (whole(local) or 0) // run.strategy.micro_batch
    return schedule_problem(
        run.strategy.schedule,
        stages=file.degrees.pp,
        chunks=run.strategy.vpp,
        micro_batches=max(number, 1),
        engine="torchtitan",
    )


# --------------------------------------------------------------------------------------------------
# Settings without effect.


def _idle(file: _File, run: Run | None) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each key without effect."""
    degrees, values = file.degrees, file.keys.values
    for keys, needed, why in (
        (
            ("parallelism.disable_loss_parallel", "parallelism.enable_async_tensor_parallel",
             "experimental.enable_async_tensor_parallel"),
            degrees.tp > 1,
            "tensor_parallel_degree is 1",
        ),
        (
            ("parallelism.context_parallel_rotate_method",
             "experimental.context_parallel_rotate_method"),
            degrees.cp > 1,
            "context_parallel_degree is 1",
        ),
        (
            ("parallelism.pipeline_parallel_split_points",
             "parallelism.module_fqns_per_model_part",
             "parallelism.pipeline_parallel_layers_per_stage",
             "parallelism.pipeline_parallel_microbatch_size",
             "experimental.pipeline_parallel_microbatches",
             "experimental.pipeline_parallel_split_points"),
            degrees.pp > 1,
            "pipeline_parallel_degree is 1",
        ),
        (
            ("activation_checkpoint.selective_ac_option",),
            values.get("activation_checkpoint.mode", "selective") == "selective",
            f"activation_checkpoint.mode is {values.get('activation_checkpoint.mode')}",
        ),
        (
            ("activation_checkpoint.memory_budget",),
            values.get("activation_checkpoint.mode") == "memory_budget",
            "activation_checkpoint.mode is not memory_budget",
        ),
        (
            ("compile.components", "compile.backend"),
            file.compiled,
            "compile.enable is not true",
        ),
    ):  # fmt: skip
        for key in keys:
            if not needed and values.get(key) not in (None, False, "", []):
                yield key, why
    if run is not None:
        yield from _idle_of_model(file, run)
    yield from _idle_float8(file)
    if file.generation == "0.3":
        return
    if degrees.shard * degrees.cp == 1 and degrees.tp * degrees.pp > 1:
        why = "no sharding with tensor or pipeline ranks only"
        yield "training.mixed_precision_param", why
    policy = values.get("parallelism.fsdp_reshard_after_forward", "default")
    if policy != "default" and degrees.shard * degrees.cp == 1:
        yield "parallelism.fsdp_reshard_after_forward", "data_parallel_shard_degree is 1"


def _idle_of_model(file: _File, run: Run) -> Iterator[tuple[str, str]]:
    values = file.keys.values
    names = {*(values.get("lora.target_modules") or [])} - linear_modules(run.model)
    if names:
        yield "lora.target_modules", f"{', '.join(sorted(names))}: no such module"
    for key in ("expert_parallel_degree", "expert_tensor_parallel_degree"):
        degree = whole(values.get(f"parallelism.{key}", 1))
        if degree != 1 and run.model.experts is None:
            yield f"parallelism.{key}", "the model has no experts"
        elif degree != 1 and "tensor" in key and file.degrees.ep == 1:
            yield f"parallelism.{key}", "expert_parallel_degree is 1"


def _idle_float8(file: _File) -> Iterator[tuple[str, str]]:
    names = ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp",
             "force_recompute_fp8_weight_in_bwd", "recipe_name")  # fmt: skip
    on = file.float8
    for section in ("float8", "quantize.linear.float8", "quantize.dense.float8"):
        for name in names:
            value = file.keys.values.get(f"{section}.{name}")
            if value in (None, False, "") or section == on:
                continue
            yield f"{section}.{name}", f"model.converters has no {section}"
    gathers = file.on(f"{on}.enable_fsdp_float8_all_gather")
    if on and file.on(f"{on}.precompute_float8_dynamic_scale_for_fsdp") and not gathers:
        key = f"{on}.precompute_float8_dynamic_scale_for_fsdp"
        yield key, "enable_fsdp_float8_all_gather is not true"
    if gathers and file.degrees.shard * file.degrees.cp == 1:
        yield f"{on}.enable_fsdp_float8_all_gather", "nothing is sharded"


# --------------------------------------------------------------------------------------------------
# The file.


def read(source: Configuration, asked: CheckOptions) -> CheckedFile:
    """Return the run that a job file describes, with the findings about the file.

    Raises DocumentError if the number of GPUs is unknown or contradictory. Other errors of the file
    become findings.
    """
    world = world_size_of(source.path, source.world_size, asked)
    notes = [*source.notes]
    document: Mapping[str, Any] = source.document
    given = _given(source)
    recipe = None
    if source.python is not None or _is_launch(source):
        recipe = _recipe(source, given, notes)
        document = _with_keys(recipe.document, given)
        notes += recipe.assumed
    elif source.flags is not None:
        name = "".join(source.flags[_CONFIG_FILE][:1])
        path, text = named_text(name, source.path.parent, source.written, notes)
        job = read_configuration(path, text=text).document
        document = _with_keys(job, given)
    keys = keys_of(document, str(source.path))
    model = None if recipe is None else recipe.model
    found = ReadResult()
    if recipe is None or not recipe.unknown:
        found = attempt(
            lambda: read_titan(
                document, world_size=world, gpu=asked.gpu, model=model, source=str(source.path)
            )
        )
    file = _file(keys, world, asked.gpu)
    spans = {} if recipe is not None else spans_of(keys)
    form = "a recipe in Python" if recipe is not None else "a job file in TOML"
    # of the releases with its form, that of a job file is known by its keys
    usual = EngineRelease(name=JOB_FILES if generation_of(keys) == "0.2" else "")
    unknown = () if recipe is None else recipe.unknown
    facts = [notice("torchtitan.unknown", "not understood", "{fact}",
                    "Write the value into the file", fact=text) for text in unknown]  # fmt: skip
    said = [replace(one, withdraws=BOTH) for one in facts]
    if found.run is not None and found.run.kernels.graphs != "none":
        text = "memory of CUDA graphs is not counted; their time is (training.disable_cuda_graphs)"
        said.append(notice("torchtitan.graphs", "not priced", text))
    said += [*with_problems(found, () if file is None else _broken(file, found.run))]
    idle = dict(_idle(file, found.run)) if file is not None else {}
    said += without_effect("torchtitan", idle.items())
    entries = (one for one in found.ignored if one.flag not in idle)
    said += unread("torchtitan", entries, _spelled, lambda _: _REFUSED)
    release = asked.release or usual
    if release.name:
        rows = (
            (_spelled(key, None) if "." in key else f"[{key}]", span) for key, span in spans.items()
        )
        own = [(form, SPANS[recipe is not None])] if release.given else []
        said += release_notices("torchtitan", release, (*own, *rows))
    said += read_notes(notes)
    compiled = found.run is not None and found.run.kernels.compiled
    return CheckedFile(
        path=str(source.path),
        trainer=f"torchtitan ({_TIMES[generation_of(keys)]})",
        stack="torchtitan-compiled" if compiled else "torchtitan-eager",
        world_size=world,
        num_nodes=source.num_nodes,
        run=found.run,
        findings=tuple(said),
        harmless=tuple(entry for entry in found.ignored if entry.understood),
        words=words_of_values(keys.values),
        # Recipes choose the recomputation by a class, not by a value.
        moves=_MOVES if recipe is None else _MOVES - {"recompute"},
        written=partial(_written, document, frozenset(given), world, asked.gpu, found.run, model),
        spelled=_spelled,
    )


_REFUSED = "Releases since late 2025 refuse unknown keys"
_TIMES: Mapping[Generation, str] = {
    "2024": "keys of 2024", "2025": "keys of 2025", "0.2": "keys of 0.2", "0.3": "keys of 0.3",
}  # fmt: skip


def _file(keys: Keys, world: int, gpu: str) -> _File | None:
    try:
        degrees = degrees_of(keys, world)
    except DocumentError:
        return None  # the invalid degree is already reported
    return _File(keys=keys, degrees=degrees, generation=generation_of(keys), gpu=gpu)


def _given(source: Configuration) -> dict[str, Any]:
    """Return the values of a script by dotted key; they override those of its job file."""
    found = dict[str, Any]()
    for flag, words in (source.flags or {}).items():
        values = [_parsed(word) for word in words]
        found[flag.replace("-", "_")] = values[0] if len(values) == 1 else values or True
    return {key: value for key, value in found.items() if key != "job.config_file"}


def _parsed(word: str) -> Any:
    """Return the value of a word of a command line: a boolean, a number or text."""
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    number = whole(word)
    return word if number is None else number


def _with_keys(document: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job file with other values, by dotted key."""
    changed = copy.deepcopy(dict(document))
    for key, value in values.items():
        *sections, name = key.split(".")
        inner = changed
        for section in sections:
            if not isinstance(inner.get(section), dict):
                inner[section] = {}
            inner = inner[section]
        inner[name] = value
    return changed


def _written(
    document: Mapping[str, Any],
    overridden: frozenset[str],
    world: int,
    gpu: str,
    before: Run | None,
    model: Model | None,
    after: Run,
) -> Changes | None:
    """Return the changes of keys after which the file describes the run `after`.

    model : that of a recipe that builds its own; None: the document names it.

    The changed file is read again. Returns None if it then describes another run or violates a
    rule, if its generation has no key for the change, or if an argument overrides the key.
    """
    assert before is not None, "only a run that was read has others next to it"
    keys = keys_of(document, "")
    wanted = dict(_wanted(keys, before, after))
    if "training.global_batch_size" in wanted and keys.has("training.batch_size"):
        return None  # files with `batch_size` predate `global_batch_size`
    if overridden & wanted.keys():
        return None
    if generation_of(keys) == "0.3" and any(name.endswith(_EXPERTS_SPLIT) for name in wanted):
        return None
    changed = _with_keys(document, wanted)
    try:
        again = read_titan(changed, world_size=world, gpu=gpu, model=model, source=before.name).run
    except InputError:
        return None
    file = _file(keys_of(changed, ""), world, gpu)
    if again != after or file is None or _broken(file, again):
        return None
    return tuple(
        (key, _text(keys.values.get(key)), _text(value))
        for key, value in wanted.items()
        if keys.values.get(key) != value
    )


def _wanted(keys: Keys, before: Run, after: Run) -> Iterator[tuple[str, Any]]:
    """Yield (key, new value) for each setting that differs between two runs.

    A key that the file already contains keeps its section and name.
    """
    one, other, split = before.strategy, after.strategy, after.split
    for old, new, name in (
        (before.split.tp, split.tp, "tensor_parallel_degree"),
        (before.split.cp, split.cp, "context_parallel_degree"),
        (before.split.ep, split.ep, "expert_parallel_degree"),
        (before.split.etp, split.etp, "expert_tensor_parallel_degree"),
    ):
        if old != new:
            places = (f"training.{name}", f"experimental.{name}", f"parallelism.{name}")
            yield keys.first(*places), new
    shard = keys.first(
        "training.data_parallel_shard_degree",
        "training.data_parallel_degree",
        "parallelism.data_parallel_shard_degree",
    )
    if one.dp != other.dp and keys.values.get(shard, -1) != -1:
        yield shard, other.dp // split.replicas
    piped = other.pp > 1
    if one.micro_batch != other.micro_batch:
        name = keys.first("training.batch_size", "training.local_batch_size")
        size = "parallelism.pipeline_parallel_microbatch_size" if piped else name
        yield size, other.micro_batch
    if one.dp != other.dp or one.micro_batch != other.micro_batch:
        yield "training.global_batch_size", other.global_batch
    if one.recomputed != other.recomputed:
        kind = other.recomputed.kind
        yield "activation_checkpoint.mode", "selective" if kind == "op" else kind
        if kind == "op":
            yield "activation_checkpoint.selective_ac_option", "op"


def _text(value: object) -> str | None:
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def _spelled(key: str, value: str | None) -> str:
    """Return `[section] key = value` in TOML syntax; without a value, only `[section] key`."""
    section, _, name = key.rpartition(".")
    place = f"[{section}] {name}"
    if not value:
        return place
    number = value.lstrip("-").isdigit() or value in ("true", "false")
    return f"{place} = {value}" if number else f'{place} = "{value}"'
