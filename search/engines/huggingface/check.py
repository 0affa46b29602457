"""Checks of accelerate configurations: settings that it rejects and settings without effect.

`search.engines.huggingface.read` defines the meaning of the keys, and
`search.engines.huggingface.rules` defines the rules. A DeepSpeed section is checked with the rules
of DeepSpeed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from autopar.errors import DocumentError, InputError
from autopar.records import replace
from autopar.run.rules import Notice, broken, notice
from autopar.run.run import Run
from search.engines.arguments import spelled_variable
from search.engines.changes import Changes, Move
from search.engines.deepspeed.check import (
    CONFIGURATIONS,
    ScriptedFile,
    all_flags,
    broken_of_deepspeed,
    idle_of_deepspeed,
    open_words,
    optimizer_notes,
    script_flags,
    scripted_file,
    stack_of,
    trainer_releases,
)
from search.engines.huggingface.read import (
    AXOLOTL_DEGREES,
    TRAINER_FSDP,
    axolotl_degrees,
    deepspeed_document,
    launched,
    read_accelerate,
    trainer_document,
    trainer_section,
)
from search.engines.huggingface.rules import FILE, grid_values
from search.engines.huggingface.script import (
    MODELS,
    Flags,
    ScriptWords,
    batching_of,
    is_trl,
    known_program,
    program_of_document,
    sets_batch,
    translated,
)
from search.engines.huggingface.transformers import SYNCED
from search.engines.keys import flattened, whole, words_of_values
from search.engines.reader import (
    CheckedFile,
    CheckOptions,
    attempt,
    read_notes,
    unread,
    with_problems,
    without_effect,
    world_size_of,
)
from search.engines.text import Configuration, named_text, read_configuration

_MOVES: frozenset[Move] = frozenset({"micro_batch", "recompute", "optimizer"})
_FSDP1 = ("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy", "fsdp_forward_prefetch",
          "fsdp_sharding_strategy", "fsdp_use_orig_params", "fsdp_sync_module_states")  # fmt: skip
"""Keys of FSDP version 1 without effect in version 2."""


def _starter(source: Configuration) -> str | None:
    """Return the launcher of a script, `accelerate` or `torchrun`; None for another or none.

    A document of a program that fine-tunes is started by torchrun, as its command does itself.
    """
    if program_of_document(source.document):
        return "torchrun"
    if source.command is None:
        return None
    names = {Path(word).name for word in source.command.before}
    if "accelerate" in names:
        return "accelerate"
    ranks = {"torchrun", "torch.distributed.run", "torch.distributed.launch"}
    return "torchrun" if names & ranks or known_program(source.command.program) else None


def _file_flag(source: Configuration) -> str | None:
    """Return the path in `--config_file` of `accelerate launch`; None if it is not given."""
    words = source.command.before if source.command is not None else ()
    if _starter(source) != "accelerate":
        return None
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in ("--config_file", "--config-file"):
            return value if equals else (words[at + 1] if at + 1 < len(words) else None)
    return None


def owns(source: Configuration) -> bool:
    """Return True if a file is an accelerate configuration or a script that starts accelerate.

    Hugging Face's Trainer starts it too, where torchrun runs a script with its arguments.
    """
    if source.command is None and not program_of_document(source.document):
        return "distributed_type" in source.document
    flags, starter = source.flags or {}, _starter(source)
    with suppress(DocumentError):  # of a YAML file that is no YAML
        flags = all_flags(source)
    # The Trainer takes the file of its argument --deepspeed, not that of the launcher.
    if any(flag in flags for flag in CONFIGURATIONS):
        return False
    if starter == "torchrun":
        named = any(flag in flags for flag in MODELS) and "hidden-size" not in flags
        program = program_of_document(source.document)
        program = program if source.command is None else source.command.program
        return named and ("fsdp" in flags or sets_batch(flags, program))
    return starter == "accelerate"


def _broken(
    values: Mapping[str, Any], flags: Flags, program: str, world: int
) -> tuple[Notice, ...]:
    kind = str(values.get("distributed_type", "NO")).upper()
    degrees = {
        name: values.get(f"parallelism_config.parallelism_config_{name}_size", 1)
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    numbers = {name: whole(size) or 1 for name, size in degrees.items()}
    given = any(key.startswith("parallelism_config.") for key in values)
    version = str(values.get("fsdp_config.fsdp_version", 1))
    meant = ScriptWords(words=translated(flags, program, world).flags, asked=set())
    packs = [name for name in ("packing", "eval-packing") if is_trl(program) and meant.yes(name)]
    return broken(
        FILE,
        {
            **numbers,
            "world": world,
            **(grid_values(numbers) if given else {}),
            "fsdp1": kind == "FSDP" and version == "1",
            "fp8": str(values.get("mixed_precision", "no")) == "fp8",
            "no_distribution": kind == "NO",
            "kernel": meant.text("attn-implementation"),
            "packing": "".join(packs[:1]).replace("-", "_"),
        },
    )


def _idle(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    kind = str(values.get("distributed_type", "NO")).upper()
    for section, wanted in (("fsdp_config", "FSDP"), ("deepspeed_config", "DEEPSPEED")):
        if kind != wanted and any(key.startswith(f"{section}.") for key in values):
            yield section, f"distributed_type is {kind}"
    if kind == "FSDP" and str(values.get("fsdp_config.fsdp_version", 1)) == "2":
        for name in _FSDP1:
            value = values.get(f"fsdp_config.{name}")
            if value not in (None, False, "NO_PREFETCH"):
                yield f"fsdp_config.{name}", "fsdp_version is 2"
    if kind == "DEEPSPEED" and values.get("deepspeed_config.deepspeed_config_file") not in (
        None,
        "none",
    ):
        for name in ("zero_stage", "gradient_accumulation_steps", "gradient_clipping",
                     "offload_optimizer_device", "offload_param_device"):  # fmt: skip
            if f"deepspeed_config.{name}" in values:
                yield f"deepspeed_config.{name}", "there is a deepspeed_config_file"


def read(source: Configuration, asked: CheckOptions) -> CheckedFile:
    """Return the run that a configuration or script describes, with the findings about it.

    Raises DocumentError if a configuration that the script passes cannot be read, or if the number
    of GPUs is unknown or contradictory. Other errors of the files become findings.
    """
    flags, named, starter = script_flags(source), _file_flag(source), _starter(source)
    document: dict[str, Any] = dict(source.document)
    program = program_of_document(source.document)
    program = known_program(program if source.command is None else source.command.program)
    notes = [*source.notes]
    if starter == "torchrun":
        document = trainer_document(flags)
        known = "fsdp-version" in flags or trainer_section(flags) is not None
        read_here = TRAINER_FSDP | ({"fsdp-config"} if known else set())
        if program == "axolotl":
            read_here -= {"fsdp-version"}  # it also decides on fused kernels
        flags = {flag: words for flag, words in flags.items() if flag not in read_here}
    elif starter is not None:
        if named is not None:
            path, text = named_text(named, source.path.parent, source.written, notes)
            document = dict(read_configuration(path, text=text).document)
        document = launched(document, source)
    own = source.world_size
    if own is None:
        alone = source.command is None and str(document.get("distributed_type")).upper() == "NO"
        own = whole(document.get("num_processes")) or (1 if alone else None)
    world = world_size_of(source.path, own, asked)
    if program == "axolotl" and (degrees := axolotl_degrees(all_flags(source), world)):
        document.update(degrees)
        flags = {name: one for name, one in flags.items() if name not in AXOLOTL_DEGREES}
    if "distributed_type" not in document:
        # `_validate_launch_command` of accelerate/commands/launch.py.
        document["distributed_type"] = "MULTI_GPU" if world > 1 else "NO"
    if starter == "accelerate" and named is None:
        notes.append("no --config_file; read as if `accelerate config` has written none")
    below: dict[str, Any] = {}
    if str(document["distributed_type"]).upper() == "DEEPSPEED":
        below = dict(flattened(deepspeed_document(document, source.path.parent, source.written)))
    reader = partial(read_accelerate, written=source.written)
    given = scripted_file(source, document, flags, world, asked, reader)
    values = dict(flattened(document))
    found = attempt(given.read)
    wrong, idle = _broken(values, flags, given.program, world), [*_idle(values)]
    if below:
        wrong += broken_of_deepspeed(below, flags)
        idle += idle_of_deepspeed(below)
    said = [*with_problems(found, wrong), *without_effect("accelerate", idle)]
    ignored, gone = (*found.ignored, *open_words(source, asked)), dict(idle)
    said += unread("accelerate", (one for one in ignored if one.flag not in gone), _spelled)
    batched = sets_batch(flags, given.program) or asked.micro_batch is not None
    if found.run is not None and not batched:
        text = "the batch per GPU is set in the training script; assumed 1 sequence"
        said.append(notice("accelerate.batch", "read", text))
    said += (*trainer_releases("accelerate", given), *optimizer_notes(found.run, flags, below))
    return CheckedFile(
        path=str(source.path),
        trainer="Hugging Face's Trainer" if starter == "torchrun" else "accelerate",
        stack=stack_of(found.run),
        world_size=world,
        num_nodes=source.num_nodes or whole(document.get("num_machines")),
        run=found.run,
        described=found.described,
        findings=(*said, *read_notes((*found.notes, *notes))),
        harmless=tuple(one for one in ignored if one.understood and one.flag not in gone),
        words={**words_of_values(values), **{f"--{key}": value for key, value in flags.items()}},
        batching=batching_of(flags, source.command.program if source.command else ""),
        moves=_MOVES,
        written=partial(_written, given, found.run, named is not None or starter is None),
        spelled=_spelled,
    )


def _written(given: ScriptedFile, before: Run | None, in_file: bool, after: Run) -> Changes | None:
    """Return the changes after which the files describe the run `after`.

    in_file : True if the configuration is a file; otherwise arguments make it.

    Recomputation is `fsdp_activation_checkpointing` of the configuration or
    `--gradient_checkpointing` of the script, which sets the batch and its accumulation as well.
    Returns None if the changed files, read again, describe another run.
    """
    assert before is not None, "only a run that was read has others next to it"
    flags, changed = dict(given.flags), copy.deepcopy(dict(given.document))
    changes = list[tuple[str, str | None, str | None]]()

    def put(flag: str, words: str | None) -> None:
        was = flags.pop(flag, None)
        if words is not None:
            flags[flag] = (words,)
        changes.append((f"--{flag}", None if was is None else " ".join(was), words))

    one, other = before.strategy, after.strategy
    if one.micro_batch != other.micro_batch and flags:
        own = known_program(given.program) == "axolotl"
        put("micro-batch-size" if own else "per-device-train-batch-size", str(other.micro_batch))
        put("gradient-accumulation-steps", str(other.micro_batches))
    if before.syncs_each_batch != after.syncs_each_batch and flags:
        put(*((_SYNC, json.dumps(SYNCED[_SYNCED])) if after.syncs_each_batch else (_SYNC, None)))
    if one.recomputed != other.recomputed:
        whole, key = other.recomputed.kind == "full", "fsdp_activation_checkpointing"
        section = given.document.get("fsdp_config") if in_file else None
        if ("gradient-checkpointing" in flags or not isinstance(section, Mapping)) and flags:
            put("gradient-checkpointing", "True" if whole else None)
        elif isinstance(section, Mapping):
            changed["fsdp_config"][key] = whole
            value = section.get(key)
            written = None if value is None else str(value).lower()
            changes.append((f"fsdp_config.{key}", written, str(whole).lower()))
    try:
        again = replace(given, document=changed, flags=flags).read().run
    except InputError:
        return None
    return tuple(changes) if changes and again == after else None


(_SYNCED,) = SYNCED
_SYNC = _SYNCED.replace("_", "-")


def _spelled(key: str, value: str | None) -> str:
    """Return `key: value` in YAML syntax, or `--flag value` for a flag of the script."""
    variable = spelled_variable(key, value)
    if variable is not None:
        return variable
    if key.startswith("--"):
        return f"--{key[2:].replace('-', '_')} {value or ''}".rstrip()
    return f"{key}: {value}" if value else key
