"""Checks of DeepSpeed configurations: settings that it rejects and settings without effect.

`search.engines.deepspeed.read` defines the meaning of the keys, and
`search.engines.deepspeed.rules` defines the rules.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from autopar.documents.json import load_object
from autopar.errors import DocumentError, InputError, shortened
from autopar.records import Record, replace
from autopar.run.rules import Notice, broken, notice, without_repetitions
from autopar.run.run import Run
from search.engines.arguments import Ignored, spelled_variable, variables_of
from search.engines.changes import Changes, Move
from search.engines.deepspeed.read import read_deepspeed
from search.engines.deepspeed.rules import FILE
from search.engines.engine import asked_release
from search.engines.huggingface.names import KNOWN_VARIABLES, RELEASES, VARIABLES, span_of
from search.engines.huggingface.script import (
    LENGTHS,
    MODELS,
    Flags,
    Program,
    ScriptOptions,
    axolotl_fsdp_version,
    batching_of,
    classified,
    is_trainer,
    is_trl,
    known_program,
    program_of,
    program_of_document,
    reads_yaml,
    written_flags,
)
from search.engines.keys import flattened, whole, words_of_values
from search.engines.megatron.read import ReadRun
from search.engines.reader import (
    CheckedFile,
    CheckOptions,
    attempt,
    read_notes,
    release_notices,
    unread,
    with_problems,
    without_effect,
    world_size_of,
)
from search.engines.text import (
    Configuration,
    named_path,
    named_text,
    read_configuration,
)
from search.engines.tuners.swift_arguments import FSDP_PRESET, deepspeed_preset, fsdp_section


def stack_of(run: Run | None) -> str:
    """Return the software stack for DeepSpeed and accelerate: that of torchtitan.

    No measured runs of these engines are published.
    """
    compiled = run is not None and run.kernels.compiled
    return "torchtitan-compiled" if compiled else "torchtitan-eager"


_MOVES: frozenset[Move] = frozenset({"micro_batch", "recompute", "optimizer"})


CONFIGURATIONS = ("deepspeed", "deepspeed-config", "ds-config")
"""Flags of a script that pass a configuration; without a value, the program makes it."""


def configuration_flag(source: Configuration) -> str | None:
    """Return the JSON file of DeepSpeed that a script passes, else None."""
    flags = all_flags(source)
    for flag in CONFIGURATIONS:
        for word in flags.get(flag, ()):
            if word.endswith(".json"):
                return word
    return None


def owns(source: Configuration) -> bool:
    """Return True if a file is a DeepSpeed configuration or a script that starts DeepSpeed."""
    document, flags = source.document, source.flags or {}
    if "zero_optimization" in document or "train_micro_batch_size_per_gpu" in document:
        return True
    with suppress(DocumentError):  # of a YAML file that is no YAML
        flags = all_flags(source)
    command = source.command
    if "hidden-size" in flags or not (command or program_of_document(document)):
        return False  # Megatron-DeepSpeed, which has the arguments of Megatron-LM
    starts = command is not None and any(Path(word).name == "deepspeed" for word in command.before)
    return starts or any(flag in flags for flag in CONFIGURATIONS)


def all_flags(source: Configuration) -> Flags:
    """Return the arguments of a script by flag, with those of its YAML file, which count less.

    The file is that of `--config`, as TRL reads it, or the first argument of LLaMA-Factory, axolotl
    and ms-swift, where `KEY=VALUE` overrides it. A document of such a program has only arguments.

    Raises DocumentError if the YAML file cannot be read.
    """
    if source.command is None:
        known = program_of_document(source.document)
        return _sharded(source, known, written_flags(source.document)) if known else {}
    flags, path = dict(source.flags or {}), yaml_file(source)
    program = source.command.program
    if path is None:
        return _sharded(source, program, flags)
    flags.pop("config", None)
    given = (word.partition("=") for word in source.command.arguments)
    over = {key.replace("_", "-"): (value,) for key, equals, value in given if equals}
    over = {key: words for key, words in over.items() if not key.startswith("-")}
    found = {**written_flags(read_configuration(path).document), **over, **flags}
    return _sharded(source, program, found)


def _sharded(source: Configuration, program: str, flags: Flags) -> Flags:
    """Return arguments with the content of the file of `--fsdp_config`, or of ms-swift's `--fsdp`.

    That of ms-swift becomes the two arguments of axolotl. An `--fsdp_config` that is not there
    remains a name.

    Raises DocumentError if the file cannot be read.
    """
    if known_program(program) == "axolotl" and "fsdp-config" in flags:
        return {**flags, "fsdp-version": (axolotl_fsdp_version(flags),)}
    given = " ".join(flags.get("fsdp", ()))
    if given in ("", "None", "null"):
        return flags
    if known_program(program) != "ms-swift":
        name = " ".join(flags.get("fsdp-config", ()))
        if not name:
            return flags
        try:
            path, text = named_text(name, source.path.parent, source.written)
        except DocumentError:
            return flags
        return {**flags, "fsdp-config": (json.dumps(load_object(path, text=text).data),)}
    document = None
    if given != FSDP_PRESET:
        path, text = named_text(given, source.path.parent, source.written)
        document = load_object(path, text=text).data
    section = fsdp_section(document)
    version = str(section.pop("version"))
    rest = {flag: words for flag, words in flags.items() if flag != "fsdp"}
    return {**rest, "fsdp-version": (version,), "fsdp-config": (json.dumps(section),)}


def yaml_file(source: Configuration) -> Path | None:
    """Return the file in YAML or JSON with the arguments of a script; None if there is none."""
    command = source.command
    if command is None:
        return None
    names = [*(source.flags or {}).get("config", ())[:1]]
    if reads_yaml(command.program):
        first = [word for word in command.arguments[:1] if word.lower().endswith(".json")]
        words = command.arguments
        names += first or [word for word in words if word.lower().endswith((".yaml", ".yml"))]
    path = _beside(source, "".join(names[:1]))
    kinds = (".yaml", ".yml", ".json")
    return path if path is not None and path.suffix.lower() in kinds else None


def script_flags(source: Configuration) -> Flags:
    """Return the arguments of a script by flag, without those whose value is open (`open_words`).

    The arguments of its YAML file are included, as in `all_flags`.
    """
    flags = dict(all_flags(source))
    steps = source.environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    if steps is not None:
        flags.setdefault("gradient-accumulation-steps", (steps,))
    return {flag: words for flag, words in flags.items() if not _is_open(words)}


def _is_open(words: tuple[str, ...]) -> bool:
    """Return whether a word starts with a variable or command, whose value is open until a run."""
    return any(word[:1] in ("$", "`") for word in words)


def open_words(source: Configuration, asked: CheckOptions) -> tuple[Ignored, ...]:
    """Return the arguments of a script whose value is known only at run time, and its variables.

    asked : options; an argument that one of them replaces is understood.
    """
    named, flags = configuration_flag(source), all_flags(source)
    given = {
        **dict.fromkeys(MODELS, asked.model),
        **dict.fromkeys(LENGTHS, asked.seq_length),
        "per-device-train-batch-size": asked.micro_batch,
        # Files that are read, although a part of their paths is open.
        **{flag: named for flag in CONFIGURATIONS if named in flags.get(flag, ())},
    }
    variables = variables_of(source.environment, VARIABLES, KNOWN_VARIABLES)
    return *variables, *(
        Ignored(
            flag=f"--{flag}",
            value=" ".join(words),
            understood=classified(flag, words, ()).understood or given.get(flag) is not None,
            concern="its value is known only at run time",
        )
        for flag, words in sorted(flags.items())
        if _is_open(words)
    )


def _beside(source: Configuration, name: str) -> Path | None:
    """Return the file with a name relative to the script or to the working folder, if any."""
    path = named_path(name, source.path.parent) if name else None
    return path if path is not None and path.is_file() else None


def _implied_world(document: Mapping[str, Any]) -> int | None:
    """Return the number of processes for which DeepSpeed accepts the batch of a configuration.

    That is train_batch_size / (micro-batch * accumulation) replicas, with the ranks of each. None:
    a size is missing, or they do not divide.
    """
    values = dict(flattened(document))

    def size(key: str, default: int = 0) -> int:
        return max(whole(values.get(key, default)) or 0, 0)

    each = size("train_micro_batch_size_per_gpu") * size("gradient_accumulation_steps")
    total = size("train_batch_size")
    if not each or not total or total % each:
        return None
    tensor, sequence = size("tensor_parallel.autotp_size"), size("sequence_parallel_size", 1)
    return total // each * max(tensor, 1) * max(sequence, 1)


# --------------------------------------------------------------------------------------------------
# Rules.


_ZERO_KEYS = frozenset(
    {
        "stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size",
        "use_multi_rank_bucket_allreduce", "allgather_partitions", "allgather_bucket_size",
        "overlap_comm", "load_from_fp32_weights", "elastic_checkpoint", "offload_param",
        "offload_optimizer", "sub_group_size", "cpu_offload", "cpu_offload_param",
        "cpu_offload_use_pin_memory", "prefetch_bucket_size", "param_persistence_threshold",
        "model_persistence_threshold", "max_live_parameters", "max_reuse_distance",
        "gather_16bit_weights_on_model_save", "module_granularity_threshold",
        "use_all_reduce_for_fetch_params", "allgather_sequential",
        "stage3_gather_fp16_weights_on_model_save", "ignore_unused_parameters", "legacy_stage1",
        "round_robin_gradients", "parameter_alignment", "zero_hpz_partition_size",
        "zero_quantized_weights", "zero_quantized_nontrainable_weights",
        "zero_quantized_gradients", "mics_shard_size", "mics_hierarchical_params_gather",
        "memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply",
        "log_trace_cache_warnings", "enable_sanity_checks", "compute_grad_norm", "leaf_module",
        "save_muon_momentum_buffer_in_memory", "zenflow",
        "zeropp_loco_param", "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
        "stage3_max_live_parameters", "stage3_max_reuse_distance",
        "stage3_gather_16bit_weights_on_model_save", "stage3_module_granularity_threshold",
        "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential",
    }
)  # fmt: skip
_ZERO, _BUCKET = "zero_optimization.", "zero_optimization.allgather_bucket_size"
_OF_STAGE_3 = ("stage3_", "sub_group_size", "offload_param", "memory_efficient_linear")
_OF_STAGES_1_2 = ("allgather_bucket_size", "allgather_partitions", "round_robin_gradients",
                  "use_multi_rank_bucket_allreduce")  # fmt: skip


def _on(values: Mapping[str, Any], key: str) -> bool:
    return values.get(key) is True or str(values.get(key, "")).lower() == "true"


def _stage(values: Mapping[str, Any]) -> int:
    return whole(values.get("zero_optimization.stage")) or 0


def broken_of_deepspeed(
    values: Mapping[str, Any], flags: Mapping[str, tuple[str, ...]]
) -> tuple[Notice, ...]:
    """Return notices on violated rules of DeepSpeed and of Hugging Face's Trainer.

    values : values of the configuration by dotted key. flags : arguments of the script by name.
    """
    keys = dict.fromkeys(key.split(".")[1] for key in values if key.startswith(_ZERO))
    tp, bucket = whole(values.get("tensor_parallel.autotp_size")), whole(values.get(_BUCKET))
    found = [
        *broken(
            FILE,
            {
                "bf16": _on(values, "bf16.enabled"),
                "fp16": _on(values, "fp16.enabled"),
                "legacy_stage1": _on(values, "zero_optimization.legacy_stage1"),
                "tp": tp,
                "allgather_bucket": bucket,
                "zero": _stage(values),
            },
        )
    ]
    for key in keys:
        found += broken(FILE, {"unknown_key": "" if key in _ZERO_KEYS else key})
    for key, flag in (
        ("train_micro_batch_size_per_gpu", "per-device-train-batch-size"),
        ("gradient_accumulation_steps", "gradient-accumulation-steps"),
    ):
        value, words = whole(values.get(key)), flags.get(flag, ())
        given = whole(words[0]) if len(words) == 1 else None
        if value is not None and given is not None:
            numbers = {"number": value, "flag_number": given}
            found += broken(FILE, {"key": key, "flag": flag.replace("-", "_"), **numbers})
    for kind in ("bf16", "fp16"):
        other = _other(flags, kind)
        if other and _on(values, f"{kind}.enabled") and kind not in flags:
            found += broken(FILE, {"enabled": kind, "other_precision": other})
    return without_repetitions(found)


def _other(flags: Mapping[str, tuple[str, ...]], kind: str) -> str:
    other = "fp16" if kind == "bf16" else "bf16"
    words = flags.get(other)
    return other if words is not None and (not words or words[0].lower() == "true") else ""


def idle_of_deepspeed(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each key without effect; the reason is mostly the ZeRO stage."""
    stage = _stage(values)
    for key in values:
        name = key.removeprefix("zero_optimization.")
        if name == key or name == "stage" or values[key] in (None, False):
            continue
        if stage < 3 and name.startswith(_OF_STAGE_3):
            device = values.get("zero_optimization.offload_param.device")
            if not (name.startswith("offload_param") and device in (None, "none")):
                yield key, f"zero_optimization.stage is {stage}"
        elif stage == 3 and name in _OF_STAGES_1_2:
            yield key, "zero_optimization.stage is 3"
        elif stage == 0:
            yield key, "zero_optimization.stage is 0"
    if (
        values.get("zero_optimization.contiguous_gradients") is False
        and _on(values, "zero_optimization.overlap_comm")
        and stage in (1, 2)
    ):
        why = "contiguous_gradients is false, which leaves no second bucket"
        yield "zero_optimization.overlap_comm", why


# --------------------------------------------------------------------------------------------------
# The file.


class ScriptedFile(Record):
    """A configuration with the arguments of its script and the function that reads both."""

    document: Mapping[str, Any]
    flags: Mapping[str, tuple[str, ...]]
    world_size: int
    asked: CheckOptions
    path: Path
    reader: Callable[..., ReadRun]
    """Reader of the configuration: `read_deepspeed` or `read_accelerate`."""
    program: str = ""
    declared: Program = Program()
    """Declarations of the program."""

    def read(self) -> ReadRun:
        """Return the run that the configuration and the script describe.

        Raises InputError if a value is invalid or has no estimate.
        """
        return self.reader(
            self.document,
            self.flags,
            world_size=self.world_size,
            gpu=self.asked.gpu,
            asked=ScriptOptions(
                model=self.asked.model,
                seq_length=self.asked.seq_length,
                micro_batch=self.asked.micro_batch,
                global_batch=self.asked.global_batch,
                precision=self.asked.precision,
                program=self.program,
                declared=self.declared.flags,
                prepared=self.declared.prepared,
                world_size=self.world_size,
                release=self.asked.release,
            ),
            beside=self.path.parent,
            source=str(self.path),
        )


def scripted_file(
    source: Configuration,
    document: Mapping[str, Any],
    flags: Flags,
    world: int,
    asked: CheckOptions,
    reader: Callable[..., ReadRun],
) -> ScriptedFile:
    """Return a configuration with the script that passes it.

    document : the configuration. flags : arguments of the script. world : number of GPUs.
    """
    program = program_of_document(source.document)
    if source.command is not None:
        program = source.command.program
    own = _beside(source, program)
    return ScriptedFile(
        document=document,
        flags=flags,
        world_size=world,
        asked=asked,
        path=source.path,
        reader=reader,
        program=program,
        declared=Program() if own is None else program_of(own),
    )


def read(source: Configuration, asked: CheckOptions) -> CheckedFile:
    """Return the run that a configuration or script describes, with the findings about it.

    Raises DocumentError if a configuration that the script passes cannot be read, or if the number
    of GPUs is unknown or contradictory. Other errors of the files become findings.
    """
    flags = script_flags(source)
    named = configuration_flag(source)
    document: Mapping[str, Any] = source.document
    notes = [*source.notes]
    preset = deepspeed_preset(" ".join(flags.get("deepspeed", ())))
    if named is not None:
        path, text = named_text(named, source.path.parent, source.written, notes)
        document = load_object(path, text=text).data
    elif preset is not None:
        document = preset
    elif source.command is not None or program_of_document(document):
        raise _without_file(source)
    own = source.world_size
    if own is None and asked.world_size is None and (own := _implied_world(document)) is not None:
        notes.append(f"{own} GPUs follow from the three sizes of the batch")
    world = world_size_of(source.path, own, asked)
    _refuse_other_batch(source, document, asked)
    given = scripted_file(source, document, flags, world, asked, read_deepspeed)
    values = dict(flattened(document))
    found = attempt(given.read)
    said = [*with_problems(found, broken_of_deepspeed(values, flags))]
    idle = dict(idle_of_deepspeed(values))
    said += without_effect("deepspeed", idle.items())
    # A key of ZeRO that DeepSpeed refuses is reported as illegal.
    ignored = (*found.ignored, *open_words(source, asked))
    entries = (one for one in ignored if _is_legal(one) and one.flag not in idle)
    said += unread("deepspeed", entries, _spelled)
    if found.run is not None and not flags:
        text = "gradient checkpointing is set in the training script; assumed off"
        said.append(notice("deepspeed.recompute", "read", text))
    said += (*trainer_releases("deepspeed", given), *optimizer_notes(found.run, flags, values))
    return CheckedFile(
        path=str(source.path),
        trainer="DeepSpeed",
        stack=stack_of(found.run),
        world_size=world,
        num_nodes=source.num_nodes,
        run=found.run,
        described=found.described,
        findings=(*said, *read_notes((*found.notes, *notes))),
        harmless=tuple(one for one in ignored if one.understood and one.flag not in idle),
        words={**words_of_values(values), **{f"--{key}": value for key, value in flags.items()}},
        batching=batching_of(flags, source.command.program if source.command else ""),
        moves=_MOVES,
        written=partial(_written, given, found.run),
        spelled=_spelled,
    )


def trainer_releases(engine: str, given: ScriptedFile) -> Iterator[Notice]:
    """Yield a notice for each argument of the Trainer that the release of transformers lacks.

    Programs with other arguments and scripts without the Trainer have none.

    engine : first part of the ids.
    """
    program = given.program
    if is_trl(program) or (is_trainer(given.flags, program) and not known_program(program)):
        own = (flag for flag in given.flags if flag not in given.declared.flags)
        keys = ((f"--{flag.replace('-', '_')}", span_of(flag)) for flag in own)
        release = given.asked.release or asked_release(None, RELEASES)
        yield from release_notices(
            engine, release, keys, package="transformers", sure=is_trl(program)
        )
    elif given.asked.release is not None:
        yield from without_effect(engine, [("--release", "no arguments of the Trainer are given")])


def _without_file(source: Configuration) -> DocumentError:
    """Return the error for a script that passes no configuration in JSON."""
    program = source.command.program if source.command is not None else ""
    flags = all_flags(source)
    given = ["".join(flags.get(flag, ())[:1]) for flag in CONFIGURATIONS]
    problem = f"starts DeepSpeed with the configuration that {Path(program).name} makes"
    for name in filter(None, given):
        problem = f"the DeepSpeed configuration is {shortened(name)}, which is no JSON file"
    return DocumentError(
        source.path,
        problem,
        remedy="Check that configuration as a .json file, with --model and --seq-length",
    )


def optimizer_notes(
    run: Run | None, flags: Mapping[str, tuple[str, ...]], values: Mapping[str, Any]
) -> Iterator[Notice]:
    """Yield the note that an optimizer of unknown kind is priced as the one with more memory.

    flags : arguments of the script. values : DeepSpeed configuration by dotted key, if there is one
    """
    if run is None or "optim" in flags or "optimizer.type" in values:
        return
    if not run.runtime.optimizer.fused and run.runtime.optimizer.offload < 1.0:
        yield notice(
            "trainer.optimizer",
            "read",
            "the training script sets the optimizer: adamw_torch is priced; adamw_torch_fused "
            "(--optim) needs {saved} bytes less per parameter of the shard",
            saved=4,
        )


def _refuse_other_batch(
    source: Configuration, document: Mapping[str, Any], asked: CheckOptions
) -> None:
    """Raise DocumentError if an option contradicts a number of the configuration."""
    for key, option, number in (
        ("train_micro_batch_size_per_gpu", "--micro-batch-size", asked.micro_batch),
        ("train_batch_size", "--global-batch-size", asked.global_batch),
    ):
        own = whole(document.get(key))
        if own is not None and number is not None and own != number:
            raise DocumentError(
                source.path, f"{key} is {own}, but {option} is {number}", remedy=f"Remove {option}"
            )


def _is_legal(one: Ignored) -> bool:
    name = one.flag.removeprefix(_ZERO)
    return name == one.flag or name.partition(".")[0] in _ZERO_KEYS


def _written(given: ScriptedFile, before: Run | None, after: Run) -> Changes | None:
    """Return the changes of keys and flags after which the files describe the run `after`.

    The changed files are read again. Returns None if they then describe another run or violate a
    rule, or if recomputation changes and there is no script that sets it.
    """
    assert before is not None, "only a run that was read has others next to it"
    values = dict(flattened(given.document))
    keys: dict[str, Any] = {}
    flags: dict[str, tuple[str, ...] | None] = {}
    one, other = before.strategy, after.strategy
    if one.micro_batch != other.micro_batch:
        for key, flag, number in (
            ("train_micro_batch_size_per_gpu", "per-device-train-batch-size", other.micro_batch),
            ("gradient_accumulation_steps", "gradient-accumulation-steps", other.micro_batches),
        ):
            if flag in given.flags or (given.flags and values.get(key, "auto") == "auto"):
                flags[flag] = (str(number),)
            if values.get(key, "auto") != "auto" or not given.flags:
                keys[key] = number
    if before.split.zero != after.split.zero:
        keys["zero_optimization.stage"] = after.split.zero
    if one.recomputed != other.recomputed:
        if not given.flags:
            return None  # only the script sets recomputation
        flags["gradient-checkpointing"] = ("True",) if other.recomputed.kind == "full" else None
    changed = copy.deepcopy(dict(given.document))
    for key, value in keys.items():
        section, _, name = key.rpartition(".")
        if section and changed.get(section) is None:
            changed[section] = {}
        (changed[section] if section else changed)[name] = value
    words = {**given.flags, **{flag: to for flag, to in flags.items() if to is not None}}
    for flag, to in flags.items():
        if to is None:
            words.pop(flag, None)
    try:
        again = replace(given, document=changed, flags=words).read().run
    except InputError:
        return None
    wanted = _normal(after)
    if _normal(again) != wanted or broken_of_deepspeed(dict(flattened(changed)), words):
        return None
    return tuple(
        [(key, _text(values.get(key)), _text(value)) for key, value in keys.items()]
        + [(f"--{flag}", _joined(given.flags.get(flag)), _joined(to)) for flag, to in flags.items()]
    )


def _normal(run: Run) -> Run:
    """Return a run with `each_micro_batch` derived from its ZeRO stage, to compare two runs."""
    each = run.split.zero >= 2 or run.strategy.micro_batches == 1
    states = replace(run.runtime.states, each_micro_batch=each)
    return replace(run, runtime=replace(run.runtime, states=states))


def _text(value: object) -> str | None:
    return None if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _joined(words: tuple[str, ...] | None) -> str | None:
    return None if words is None else " ".join(words)


def _spelled(key: str, value: str | None) -> str:
    """Return `"key": value` in JSON syntax, or `--flag value` for a flag of the script."""
    variable = spelled_variable(key, value)
    if variable is not None:
        return variable
    if key.startswith("--"):
        return f"--{key[2:].replace('-', '_')} {value or ''}".rstrip()
    if not value:
        return f'"{key}"'
    plain = value.lstrip("-").isdigit() or value in ("true", "false")
    return f'"{key}": {value}' if plain else f'"{key}": "{value}"'
