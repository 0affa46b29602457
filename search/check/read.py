"""A file of a launch as it is checked: what it says, and what is wrong with it.

Which trainer a file is for is found here; its arguments are read by `search.launches`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from autopar.documents.json import shorten
from autopar.errors import DocumentError, InputError
from autopar.memory.launch import Launch
from autopar.records import dataclass
from search.check.changes import Changes, changed_words, changes_of
from search.check.findings import Finding, findings_of
from search.check.rules import Setting, broken_rules
from search.configuration import Configuration, read_configuration
from search.launches.arguments import Ignored, UnpricedError, words_of
from search.launches.megatron import arguments_of_configuration, read_launch

__all__ = ["CheckedFile", "read_checked"]

_OF_MEGATRON = frozenset({"num-layers", "hidden-size", "micro-batch-size", "seq-length"})
"""Arguments that every launch of Megatron-LM has most of."""


_BARE = re.compile(
    r"""
    add-qkv-bias | bf16 | cross-entropy-loss-fusion | disable-bias-linear | fp16 |
    fp8-param-gather | group-query-attention | moe-grouped-gemm | moe-permute-fusion |
    moe-router-pre-softmax | multi-latent-attention | no-create-attention-mask-in-dataloader |
    no-rope-fusion | overlap-grad-reduce | overlap-moe-expert-parallel-comm |
    overlap-param-gather | qk-layernorm | recompute-activations | sequence-parallel | swiglu |
    tp-comm-overlap | untie-embeddings-and-output-weights | use-distributed-optimizer |
    use-flash-attn | use-mcore-models | use-megatron-fsdp | use-rotary-position-embeddings
    """,
    re.VERBOSE,
)
"""Flags that take no value, of those that change time or memory."""


@dataclass(frozen=True, kw_only=True)
class CheckedFile:
    """What a file says."""

    path: str
    trainer: str
    world_size: int
    launch: Launch | None
    """None: an argument is unusable, which is a finding."""
    findings: tuple[Finding, ...]
    harmless: tuple[Ignored, ...]
    """Arguments that change neither time nor memory."""
    environment: Mapping[str, str]
    gpu: str
    words: Mapping[str, tuple[str, ...]]
    """Arguments as they are written, by flag without its hyphens."""

    def written(self, other: Launch) -> Changes | None:
        """Return what changes in the file so that it is another launch; None: that would not run.

        Read anew with the changes, the arguments have to be that launch, and break no rule.
        """
        assert self.launch is not None, "only a launch that was read has others next to it"
        changes = changes_of(self.words, self.launch, other)
        words = changed_words(self.words, changes)
        try:
            again = read_launch(
                {flag: list(given) if given else True for flag, given in words.items()},
                world_size=self.world_size,
                environment=self.environment,
                gpu=self.gpu,
                source=self.launch.name,
            ).launch
        except InputError:
            return None
        setting = Setting(words, self.world_size, self.gpu.upper())
        if not _same(again, other) or any(broken_rules(setting, None, again)):
            return None
        return changes


def _same(one: Launch, other: Launch) -> bool:
    """Return whether two launches do the same; without tensor ranks nothing is scattered."""
    degrees = [
        replace(one.degrees, sequence_parallel=one.degrees.scattered) for one in (one, other)
    ]
    return degrees[0] == degrees[1] and replace(one, degrees=other.degrees) == other


def read_checked(path: str, *, world_size: int | None, gpu: str) -> CheckedFile:
    """Return what a file of a launch says; raises DocumentError where it is none that is read.

    world_size : number of GPUs, where the file does not say it. gpu : kind of device.
    """
    source = read_configuration(path)
    arguments, environment = arguments_of_configuration(source)
    words = words_of(arguments)
    if len(_OF_MEGATRON & words.keys()) < 2:
        raise DocumentError(
            path,
            "has no arguments of Megatron-LM such as --num-layers and --micro-batch-size",
            remedy="give a launch script, YAML or JSON of Megatron-LM",
        )
    words, left_out, wrong = _without_values(words)
    arguments = {flag: value for flag, value in arguments.items() if _flag(flag) not in left_out}
    arguments |= dict.fromkeys(left_out, True)
    world = _world(source, words, world_size)
    launch: Launch | None = None
    ignored: tuple[Ignored, ...] = ()
    problem: str | None = None
    unpriced: str | None = None
    try:
        read = read_launch(
            arguments, world_size=world, environment=environment, gpu=gpu, source=str(source.path)
        )
        launch, ignored = read.launch, read.ignored
    except UnpricedError as error:
        unpriced = f"{error.key} {error.problem}; {error.remedy}"
    except DocumentError as error:
        problem = f"{error.key}: {error.problem}" if error.key else error.problem
    except InputError as error:
        problem = str(error)
    found = findings_of(
        words,
        world_size=world,
        environment=environment,
        gpu=gpu,
        ignored=ignored,
        problem=problem,
        launch=launch,
    )
    if unpriced is not None:
        found = (Finding(kind="not priced", text=unpriced), *found)
    found = (*(Finding(kind="illegal", text=text) for text in wrong), *found)
    notes = tuple(
        Finding(kind="read", text=text) for text in (*left_out.values(), *source.notes) if text
    )
    return CheckedFile(
        path=str(source.path),
        trainer="Megatron-LM",
        world_size=world,
        launch=launch,
        findings=(*found, *notes),
        harmless=tuple(entry for entry in ignored if entry.understood),
        environment=environment,
        gpu=gpu,
        words=words,
    )


def _flag(name: object) -> str:
    return str(name).lstrip("-").replace("_", "-")


def _without_values(
    words: Mapping[str, tuple[str, ...]],
) -> tuple[dict[str, tuple[str, ...]], dict[str, str], list[str]]:
    """Return words whose flags without values have none, what was taken away, and what is wrong.

    Behind such a flag `$ARGS` is no value of it: it holds other flags, or nothing.
    """
    found, left_out, wrong = {**words}, dict[str, str](), list[str]()
    for flag, given in words.items():
        if not given or not _BARE.fullmatch(flag):
            continue
        found[flag] = ()
        text = " ".join(given)
        if all(word[:1] in ("$", "`") for word in given):
            left_out[flag] = f"{text[:60]} is known where the launch runs, and taken as nothing"
        else:
            wrong.append(f"--{flag} takes no value, got {shorten(text)}")
    return found, dict(sorted(left_out.items())), sorted(wrong)


def _world(
    source: Configuration, words: Mapping[str, tuple[str, ...]], world_size: int | None
) -> int:
    own = source.world_size
    if own is None and words.get("world-size", ("",))[0].isdigit():
        own = int(words["world-size"][0])
    if world_size is not None and own is not None and own != world_size:
        raise DocumentError(
            source.path,
            f"the launch starts {own} processes and --hardware has {world_size} GPUs",
            remedy="give the hardware that it is for",
        )
    found = world_size or own
    if found is None:
        raise DocumentError(
            source.path,
            "does not say the number of GPUs",
            remedy="give --hardware, such as h100:8x8",
        )
    return found
