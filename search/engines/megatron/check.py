"""Check of Megatron-LM launch files: scripts, and YAML or JSON of its arguments.

`search.engines.megatron.read` interprets the arguments, `search.engines.megatron.rules` contains
the constraints of Megatron-LM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

from autopar.errors import InputError, shortened
from autopar.records import Record, replace, shorten
from autopar.run.rules import Notice, notice
from autopar.run.run import Run, run_with_split
from search.engines.arguments import BOTH, variables_of, words_of
from search.engines.changes import Changes, changed_words, changes_of
from search.engines.engine import EngineRelease, asked_release
from search.engines.megatron.findings import findings_of, spelled
from search.engines.megatron.names import KNOWN_VARIABLES, VARIABLES, spans_of
from search.engines.megatron.read import (
    arguments_of_configuration,
    read_run,
    underscored,
    unread_parts,
)
from search.engines.megatron.release import RELEASES, code_of
from search.engines.megatron.rules import broken_rules
from search.engines.megatron.setting import Setting, Words
from search.engines.reader import (
    CheckedFile,
    CheckOptions,
    attempt,
    read_notes,
    world_size_of,
)
from search.engines.text import Command, Configuration

_OWN = frozenset({"num-layers", "hidden-size", "micro-batch-size", "seq-length"})
"""Arguments that identify Megatron-LM: a file with at least two of them is of this engine."""
_STACK = "megatron-core"


_BARE = re.compile(
    r"""
    accumulate-allreduce-grads-in-fp32 | add-qkv-bias | bf16 | cross-entropy-loss-fusion |
    disable-bias-linear | fp16 | fp8-param-gather | group-query-attention | moe-grouped-gemm |
    moe-permute-fusion | moe-router-pre-softmax | multi-latent-attention |
    no-create-attention-mask-in-dataloader |
    no-rope-fusion | overlap-grad-reduce | overlap-moe-expert-parallel-comm |
    overlap-param-gather | qk-layernorm | recompute-activations | sequence-parallel | swiglu |
    tp-comm-overlap | untie-embeddings-and-output-weights | use-distributed-optimizer |
    use-flash-attn | use-mcore-models | use-megatron-fsdp | use-rotary-position-embeddings
    """,
    re.VERBOSE,
)
"""Pattern of flags that have no value and may change time or memory."""


class MegatronWords(Record):
    """Megatron-LM arguments of a run with its GPUs and environment variables."""

    words: Words
    world_size: int
    environment: Mapping[str, str]
    gpu: str
    release: EngineRelease
    name: str
    """Name of the run."""

    def run(self) -> Run | None:
        """Return the run that the arguments describe; None if they are invalid or break a rule."""
        try:
            found = read_run(
                {flag: list(given) if given else True for flag, given in self.words.items()},
                world_size=self.world_size,
                environment=self.environment,
                gpu=self.gpu,
                release=code_of(self.release),
                source=self.name,
            ).run
        except InputError:
            return None
        setting = Setting(self.words, self.world_size, self.gpu.upper())
        return None if broken_rules(setting, (), found) else found

    def becoming(self, before: Run, after: Run) -> Changes | None:
        """Return the argument changes that turn `before` into `after`, verified by reading them.

        None: the changed arguments do not describe `after`, break a rule, or are of other releases.
        """
        changes = changes_of(self.words, before, after)
        added = (
            spans_of(flag, (word,) if word else ()) for flag, _, word in changes if word is not None
        )
        if not all(span.has(self.release.name) for spans in added for span in spans.values()):
            return None
        again = replace(self, words=changed_words(self.words, changes)).run()
        return None if again is None or not same_run(again, after) else changes


def same_run(one: Run, other: Run) -> bool:
    """Return whether two runs are equal, ignoring sequence parallelism at tensor degree 1."""
    first, second = (
        run_with_split(run, sequence_parallel=run.split.splits_sequence) for run in (one, other)
    )
    return first == second


def owns(source: Configuration) -> bool:
    """Return whether a file is a Megatron-LM script or a YAML or JSON of its arguments."""
    return len(_OWN & words_of(arguments_of_configuration(source)[0]).keys()) >= 2


def read(source: Configuration, asked: CheckOptions) -> CheckedFile:
    """Return the run that a file describes, with the findings on its arguments.

    Raises DocumentError if the number of GPUs is unknown or contradictory.
    """
    release = asked.release or asked_release(None, RELEASES)
    arguments, environment = arguments_of_configuration(source)
    words, left_out, wrong = _without_values(words_of(arguments))
    arguments = {flag: value for flag, value in arguments.items() if _flag(flag) not in left_out}
    arguments |= dict.fromkeys(left_out, True)
    world = world_size_of(source.path, _own_world(source, words), asked)
    found = attempt(
        lambda: read_run(
            arguments,
            world_size=world,
            environment=environment,
            gpu=asked.gpu,
            release=code_of(release),
            source=str(source.path),
        )
    )
    ignored = (*found.ignored, *variables_of(environment, VARIABLES, KNOWN_VARIABLES))
    said = findings_of(
        words,
        world_size=world,
        environment=environment,
        gpu=asked.gpu,
        ignored=ignored,
        problems=found.problems,
        run=found.run,
        declares=_declares(source),
        release=release,
    )
    if found.unpriced is not None:
        said = (found.unpriced, *said)
    spelt = [
        notice(
            "megatron.underscores",
            "illegal",
            "{given} is spelled with hyphens in argparse: --{flag}",
            given=given,
            flag=_flag(given),
        )
        for given in underscored(source)
    ]
    if _declares(source):
        said = tuple(_of_own_arguments(one, source.command) for one in said)
    said = (*wrong, *spelt, *said)
    texts = (*left_out.values(), *source.notes, *unread_parts(source))
    # The text of a variable may span several lines.
    notes = (" ".join(text.split()) for text in texts if text)
    whole = MegatronWords(
        words=words,
        world_size=world,
        environment=environment,
        gpu=asked.gpu,
        release=release,
        name=str(source.path),
    )
    return CheckedFile(
        path=str(source.path),
        trainer="Megatron-LM",
        stack=_STACK,
        world_size=world,
        num_nodes=source.num_nodes,
        run=found.run,
        described=found.described,
        findings=(*said, *read_notes(notes)),
        harmless=tuple(entry for entry in ignored if entry.understood),
        words=words,
        written=partial(_written, whole, found.run),
        spelled=spelled,
    )


_PROGRAMS = re.compile(
    r"(.*/)?(pretrain_(gpt|mamba|hybrid|hybrid_flex|vlm|bert|t5|ict|retro|mimo|vision_\w+)|train_rl)"
    r"\.py",
    re.DOTALL,
)
"""Pattern of the programs of Megatron-LM. Others may declare arguments, or set their defaults."""


def _declares(source: Configuration) -> bool:
    """Return whether a program, or one that takes an array of arguments, may have its own ones."""
    return source.command is not None and not _PROGRAMS.fullmatch(source.command.program)


def _of_own_arguments(one: Notice, command: Command | None) -> Notice:
    """Return a finding of a program that may declare arguments, which is illegal for others.

    An argument that is missing may have a default; one of an array may be in the launch command.
    """
    is_part = command is not None and not command.program
    may_be = _OF_A_PART if is_part else _OF_A_PROGRAM
    if one.kind != "illegal" or not may_be & {*one.id.split(".")}:
        return one
    return replace(one, kind="not priced", withdraws=BOTH)


_OF_A_PART = frozenset({"missing", "needs"})
_OF_A_PROGRAM = frozenset({"key", "missing", "renamed"})
"""Parts of ids of findings that are no proof against an array, or against another program."""


def _written(whole: MegatronWords, before: Run | None, after: Run) -> Changes | None:
    assert before is not None, "only a run that was read has others next to it"
    return whole.becoming(before, after)


def _flag(name: object) -> str:
    return str(name).lstrip("-").replace("_", "-")


def _without_values(
    words: Words,
) -> tuple[dict[str, tuple[str, ...]], dict[str, str], list[Notice]]:
    """Return (words without values of `_BARE` flags, note by flag, notices on illegal values).

    A variable such as `$ARGS` after such a flag contains other flags or nothing. It is read as
    empty, which a note reports. Any other value is illegal.
    """
    found, left_out, wrong = {**words}, dict[str, str](), list[Notice]()
    for flag, given in sorted(words.items()):
        if not given or not _BARE.fullmatch(flag):
            continue
        found[flag] = ()
        text = " ".join(given)
        if all(word[:1] in ("$", "`") for word in given):
            left_out[flag] = f"{shortened(text)} is known only at run time; using no value"
        else:
            message = "--{flag} has no value, got {value}"
            value = shorten(text)
            wrong.append(notice("megatron.bare", "illegal", message, flag=flag, value=value))
    return found, left_out, wrong


def _own_world(source: Configuration, words: Words) -> int | None:
    if source.world_size is None and words.get("world-size", ("",))[0].isdigit():
        return int(words["world-size"][0])
    return source.world_size
