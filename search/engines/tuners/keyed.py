"""Programs with dotted keys that shard layers of transformers: NeMo Automodel, verl.

A program translates its keys into a configuration of accelerate and arguments of TRL, whose reader
makes the run. Both programs reduce gradients in fp32 and wrap embedding and head as two units,
which `shaped` adds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from autopar.errors import InputError, UnsupportedError
from autopar.records import Record, replace, shorten
from autopar.run.rules import notice
from autopar.run.run import Run
from autopar.run.runtime import Loss
from autopar.training.lengths import KnownBatching
from search.engines.arguments import Ignored, Unpriced
from search.engines.changes import Changes, Move
from search.engines.deepspeed.check import stack_of
from search.engines.exporter_types import ExportTarget
from search.engines.huggingface.named_optimizers import of_narrow_weights, word_of
from search.engines.huggingface.read import read_accelerate
from search.engines.huggingface.script import Flags, ScriptOptions
from search.engines.huggingface.transformers import SYNCED, NamedModel
from search.engines.keys import Keys, sections_of, words_of_values
from search.engines.megatron.read import ReadRun
from search.engines.reader import (
    CheckedFile,
    CheckOptions,
    attempt,
    read_notes,
    unread,
    with_problems,
    world_size_of,
)
from search.engines.text import Configuration
from search.engines.tuners.check import named_model

SYNCED_FLAG = ("accelerator-config", (json.dumps(SYNCED["accelerator_config"]),))
"""Argument of the Trainer that reduces gradients after each micro-batch, by name."""
_MOVES: frozenset[Move] = frozenset({"micro_batch", "recompute", "optimizer"})


class Shape(NamedTuple):
    """Properties of a program that accelerate and transformers do not have."""

    logit_bytes: int
    """Bytes per logit of the loss, gradients included."""
    apart: bool
    """True if embedding and head are FSDP units."""
    narrow: bool
    """True if trained weights have 16 bits, without an fp32 copy."""
    wide_gradients: bool = True
    """True if gradients are reduced in fp32."""
    loss: Loss = "whole"
    saved_norms: bool = True
    """`Quirks.saved_norms`."""


class Translated(Record):
    """Keys of a program in those of accelerate and in the arguments of TRL."""

    document: Mapping[str, Any]
    flags: Flags
    global_batch: int
    shape: Shape
    batching: KnownBatching | None = None
    notes: tuple[str, ...] = ()
    unpriced: tuple[Ignored, ...] = ()
    """Defaults that change memory or time and have no price."""


class KeyedProgram(Record):
    """Table of keys of a program."""

    name: str
    title: str
    translate: Callable[[Keys, CheckOptions, int], Translated]
    """Function (keys, options, number of GPUs) -> translation. Raises InputError."""
    harmless: frozenset[str]
    """Sections and keys that change neither memory nor time."""
    unpriced: Mapping[str, Unpriced]
    model: str
    lengths: tuple[str, ...]
    """Keys that `--model` and `--seq-length` replace."""
    micro_batch: str
    recompute: str
    reshard: str
    """Keys of the micro-batch, of recomputation, and of resharding after the forward."""
    spelled: Callable[[str, str | None], str]


def shaped(run: Run, shape: Shape) -> Run:
    """Return a run of accelerate with the properties of a program."""
    runtime, kernels = run.runtime, run.kernels
    quirks = replace(kernels.quirks, logit_bytes=shape.logit_bytes, saved_norms=shape.saved_norms)
    states, optimizer = runtime.states, runtime.optimizer
    if states.keeper == "accelerate" and run.split.zero:
        wide = shape.wide_gradients or None
        states = replace(states, wide_gradients=wide, apart=shape.apart)
    if shape.narrow and optimizer.master_bytes:
        optimizer = of_narrow_weights(optimizer)
    kernels = replace(kernels, loss=shape.loss, quirks=quirks)
    return replace(
        run, runtime=replace(runtime, kernels=kernels, states=states, optimizer=optimizer)
    )


def plain_kernels(run: Run) -> Run:
    """Return a run without compiled layers and without kernels of Liger."""
    kernels = replace(run.kernels, compiled=False, liger=False)
    return replace(run, runtime=replace(run.runtime, kernels=kernels))


def accelerated(
    keys: Keys, world: int, *, shards: int, version: int, reshards: bool, host: bool
) -> dict[str, Any]:
    """Return FSDP as a configuration of accelerate.

    shards : ranks that share the weights. Raises DocumentError if they do not divide the world.
    """
    if world % shards:
        raise keys.fail("", f"{world} GPUs are no multiple of {shards}, which share the weights")
    kind: dict[str, Any] = {"reshard_after_forward": reshards}
    if version == 1:
        kind = {"sharding_strategy": "FULL_SHARD" if reshards else "SHARD_GRAD_OP"}
    return {
        "distributed_type": "FSDP",
        "mixed_precision": "bf16",
        "fsdp_config": {
            "version": version,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "offload_params": host,
            **kind,
        },
        "parallelism_config": {
            "parallelism_config_dp_replicate_size": world // shards,
            "parallelism_config_dp_shard_size": shards,
        },
    }


def adapter_flags(rank: int, dropout: str, targets: str) -> dict[str, tuple[str, ...]]:
    """Return the arguments of TRL for adapters; targets : names of modules, or `all-linear`."""
    return {
        "use-peft": ("True",),
        "lora-r": (str(rank),),
        "lora-dropout": (dropout,),
        "lora-target-modules": (targets,),
    }


# --------------------------------------------------------------------------------------------------
# Optimizers by class.


_CLASSES: Mapping[str, tuple[str, ...]] = {
    "adamw_torch": ("torch.optim.AdamW", "torch.optim.Adam"),
    "adamw_torch_8bit": ("torchao.optim.AdamW8bit",),
    "adamw_bnb_8bit": ("bitsandbytes.optim.AdamW8bit",),
    "paged_adamw_32bit": ("bitsandbytes.optim.PagedAdamW",),
    "paged_adamw_8bit": ("bitsandbytes.optim.PagedAdamW8bit",),
    "lion_32bit": ("bitsandbytes.optim.Lion",),
    "lion_8bit": ("bitsandbytes.optim.Lion8bit",),
    "paged_lion_32bit": ("bitsandbytes.optim.PagedLion",),
    "paged_lion_8bit": ("bitsandbytes.optim.PagedLion8bit",),
}
"""Classes of optimizers by their word in transformers; the first is written."""


def optimizer_word(name: str, *, fused: bool) -> str | None:
    """Return the word of transformers for the path of a class; None for another class."""
    word = next((word for word, classes in _CLASSES.items() if name in classes), None)
    return "adamw_torch_fused" if word == "adamw_torch" and fused else word


def optimizer_flag(
    keys: Keys, key: str, name: str, *, fused: bool, decay: str
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the arguments of transformers for the class of an optimizer.

    Raises UnpricedError for a class without a price.
    """
    word = optimizer_word(name, fused=fused)
    if word is None:
        raise keys.unpriced(key, f"{shorten(name)} is not priced", "Use torch.optim.AdamW")
    yield "optim", (word,)
    yield "weight-decay", (decay,)


def optimizer_class(run: Run, title: str) -> tuple[str, bool]:
    """Return the path of a run's optimizer, and True if its update is fused.

    Raises UnsupportedError for an optimizer without a class.
    """
    word = word_of(run.runtime.optimizer)
    fused = word == "adamw_torch_fused"
    found = _CLASSES.get("adamw_torch" if fused else word)
    if found is None:
        raise UnsupportedError(f"exports for {title} have no optimizer {word}")
    return found[0], fused


# --------------------------------------------------------------------------------------------------
# Runs that both programs train.


def model_of(run: Run, place: ExportTarget, title: str) -> NamedModel:
    """Return the model of a run that such a program can train.

    Raises errors as `named_model`, and UnsupportedError for a quantised base, another precision
    than bf16, and states of DeepSpeed.
    """
    model = named_model(run, place, title, ("accelerate", "ddp"))
    adapters = run.runtime.adapters
    if adapters is not None and adapters.base != "16 bits":
        raise UnsupportedError(
            f"exports for {title} have no quantised base", remedy="Use --to llamafactory"
        )
    if run.runtime.precision.kind != "bf16":
        raise UnsupportedError(f"exports for {title} compute in bf16", remedy="Search with bf16")
    return model


# --------------------------------------------------------------------------------------------------
# Reading.


def read(
    program: KeyedProgram, source: Configuration, values: Mapping[str, Any], asked: CheckOptions
) -> CheckedFile:
    """Return the run that the keys of a program describe, with the findings about it.

    values : values by dotted key. Raises DocumentError if the number of GPUs is unknown.
    """
    world = world_size_of(source.path, source.world_size, asked)
    describe = partial(_described, program, source, world, asked)
    batching = list[KnownBatching | None]()
    found = attempt(lambda: describe(values, batching))
    said = [*with_problems(found, ()), *unread(program.name, found.ignored, program.spelled)]
    if found.run is not None and found.run.runtime.optimizer.fused is False:
        text = "this Adam is not fused: `fused: true` needs {saved} bytes less per parameter"
        said.append(notice("trainer.optimizer", "read", text, saved=4))
    return CheckedFile(
        path=str(source.path),
        trainer=program.title,
        stack=stack_of(found.run),
        world_size=world,
        num_nodes=source.num_nodes,
        run=found.run,
        described=found.described,
        findings=(*said, *read_notes((*found.notes, *source.notes))),
        harmless=tuple(one for one in found.ignored if one.understood),
        words=words_of_values(values),
        batching=next(iter(batching), None),
        moves=_MOVES,
        written=partial(_written, program, describe, values, found.run),
        spelled=program.spelled,
    )


def _described(
    program: KeyedProgram,
    source: Configuration,
    world: int,
    asked: CheckOptions,
    values: Mapping[str, Any],
    batching: list[KnownBatching | None],
) -> ReadRun:
    """Return the run of keys; appends how its samples become batches."""
    replaced = [program.model] if asked.model else []
    replaced += program.lengths if asked.seq_length else ()
    keys = Keys(source=str(source.path), values=values, asked={*replaced})
    for key, value in values.items():
        known = not program.harmless.isdisjoint((key, *sections_of(key))) or key in replaced
        # the last part of a path names the model
        text = str(value).rpartition("/")[2] if key == program.model else str(value)
        if text[:1] in ("$", "`") and not known:
            raise keys.unpriced(key, f"is {shorten(str(value))}", "Give the value")
    own = program.translate(keys, asked, world)
    batching.append(own.batching)
    found = read_accelerate(
        own.document,
        own.flags,
        world_size=world,
        gpu=asked.gpu,
        asked=ScriptOptions(
            model=asked.model,
            seq_length=asked.seq_length,
            global_batch=own.global_batch,
            program=program.name,
            world_size=world,
        ),
        beside=source.path.parent,
        source=str(source.path),
    )
    ignored = keys.ignored(program.harmless, frozenset(), program.unpriced)
    left = tuple(one for one in found.ignored if not one.understood)
    return replace(
        found,
        run=shaped(found.run, own.shape),
        ignored=(*own.unpriced, *left, *ignored),
        notes=(*found.notes, *own.notes),
    )


def _written(
    program: KeyedProgram,
    describe: Callable[[Mapping[str, Any], list[KnownBatching | None]], ReadRun],
    values: Mapping[str, Any],
    before: Run | None,
    after: Run,
) -> Changes | None:
    """Return the changes of keys after which the file describes the run `after`.

    The changed keys are read again; None if they then describe another run.
    """
    assert before is not None, "only a run that was read has others next to it"
    wanted = dict[str, Any]()
    if before.strategy.micro_batch != after.strategy.micro_batch:
        wanted[program.micro_batch] = after.strategy.micro_batch
    if before.strategy.recomputed != after.strategy.recomputed:
        wanted[program.recompute] = after.strategy.recomputed.kind != "none"
    if before.split.zero != after.split.zero:
        wanted[program.reshard] = after.split.zero == 3
    try:
        again = describe({**values, **wanted}, []).run
    except InputError:
        return None
    if not wanted or again != after:
        return None
    old, new = words_of_values(values), words_of_values(wanted)
    return tuple((key, " ".join(old.get(key, ())) or None, " ".join(new[key])) for key in wanted)
