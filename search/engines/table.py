"""Table of all engines, and identification of the engine of a file."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from autopar.documents.checks import kind_of
from autopar.errors import DocumentError, InputError, OptionError
from autopar.records import replace, shorten
from search.engines.engine import Engine, EngineRelease, asked_release, function_of, value_of

if TYPE_CHECKING:
    from autopar.run.run import Run
    from autopar.run.runtime import PrecisionKind
    from search.engines.reader import CheckedFile
    from search.engines.space import EngineSpace
    from search.engines.text import Configuration


class _HasName(Protocol):
    @property
    def name(self) -> str: ...


_Named = TypeVar("_Named", bound=_HasName)
NOISE = 0.01
"""Relative difference of step times below which estimates of one engine do not decide between two
plans: a safer or simpler plan is preferred, and a check proposes no change."""
ALIKE = 0.005
"""Median relative difference of step times between the planner and the uniform search for one plan
(docs/concepts/closed-form.md). A per-layer plan must be faster by more than this fraction."""


def _uniform(name: str, title: str, folder: str, forms: str, **more: Any) -> Engine:
    """Return an engine with one set of degrees, whose functions are in `folder`."""
    return Engine(
        name=name,
        title=title,
        forms=forms,
        owns=function_of(f"{folder}.check.owns"),
        read=function_of(f"{folder}.check.read"),
        write=function_of(f"{folder}.write.write"),
        spaces=value_of(f"{folder}.space.VARIANTS"),
        near=function_of(f"{folder}.plan.near"),
        handed=function_of(f"{folder}.plan.handed"),
        plans=value_of(f"{folder}.plan.SPACE"),
        **more,
    )


def _layered(name: str, title: str) -> Engine:
    """Return an engine that runs per-layer plans."""
    return Engine(
        name=name,
        title=title,
        lower=function_of(f"{name}.plan.lower"),
        plans=value_of(f"{name}.plan.SPACE"),
        imports=function_of(f"{name}.plan.import_{name}"),
    )


ENGINES: tuple[Engine, ...] = (
    _layered("galvatron", "Galvatron"),
    _uniform(
        "megatron",
        "Megatron-LM",
        "megatron",
        "script, YAML or JSON",
        tuner="megatron-bridge",
        releases=value_of("megatron.release.RELEASES"),
        imports=function_of("megatron.plan.import_megatron"),
    ),
    Engine(
        name="megatron-bridge",
        title="Megatron-Bridge",
        forms="script, recipe or YAML",
        owns=function_of("bridge.read.is_bridge"),
        read=function_of("bridge.check.read"),
        card=function_of("bridge.check.card"),
        write=function_of("bridge.write.write"),
        releases=value_of("bridge.keys.RELEASES"),
        starts=("megatron",),
    ),
    _uniform(
        "torchtitan",
        "torchtitan",
        "torchtitan",
        "TOML, script or Python",
        titled_by_release=True,
        releases=value_of("torchtitan.flavours.RELEASES"),
    ),
    _uniform(
        "deepspeed",
        "DeepSpeed",
        "deepspeed",
        "JSON or script",
        asks_for_batch=True,
        releases=value_of("huggingface.names.RELEASES"),
        released_by="transformers",
    ),
    _uniform(
        "accelerate",
        "accelerate",
        "huggingface",
        "YAML or script",
        releases=value_of("huggingface.names.RELEASES"),
        released_by="transformers",
        starts=("deepspeed",),
        asks_for_batch=True,
    ),
    Engine(
        name="llamafactory",
        title="LLaMA-Factory",
        forms="YAML",
        owns=function_of("tuners.check.owns_llamafactory"),
        read=function_of("tuners.check.read_llamafactory"),
        write=function_of("tuners.llamafactory.write"),
        starts=("accelerate", "deepspeed"),
        as_run=function_of("huggingface.transformers.as_trainer"),
        asks_for_batch=True,
    ),
    Engine(
        name="axolotl",
        title="axolotl",
        forms="YAML",
        owns=function_of("tuners.check.owns_axolotl"),
        read=function_of("tuners.check.read_axolotl"),
        write=function_of("tuners.axolotl.write"),
        starts=("accelerate", "deepspeed"),
        as_run=function_of("huggingface.transformers.as_trainer"),
        asks_for_batch=True,
    ),
    Engine(
        name="ms-swift",
        title="ms-swift",
        forms="YAML",
        owns=function_of("tuners.check.owns_swift"),
        read=function_of("tuners.check.read_swift"),
        write=function_of("tuners.swift.write"),
        starts=("accelerate", "deepspeed"),
        as_run=function_of("huggingface.transformers.as_trainer"),
        asks_for_batch=True,
    ),
    Engine(
        name="automodel",
        title="Automodel",
        forms="YAML",
        owns=function_of("tuners.automodel.owns"),
        read=function_of("tuners.automodel.read"),
        write=function_of("tuners.automodel.write"),
        starts=("accelerate",),
        as_run=function_of("tuners.automodel.as_trained"),
    ),
    Engine(
        name="verl",
        title="verl",
        forms="script",
        owns=function_of("tuners.verl.owns"),
        read=function_of("tuners.verl.read"),
        write=function_of("tuners.verl.write"),
        starts=("accelerate",),
        as_run=function_of("tuners.verl.as_trained"),
    ),
    _layered("paddlenlp", "PaddleNLP"),
)
"""All engines, preferred first among equally fast plans."""
EXPORTERS: tuple[str, ...] = tuple(one.name for one in ENGINES if one.exports)
"""Names of engines that per-layer plans can be exported to."""
IMPORTERS: tuple[str, ...] = tuple(one.name for one in ENGINES if one.imports is not None)
"""Names of engines whose configurations can be read as plans."""
WRITERS: tuple[str, ...] = tuple(one.name for one in ENGINES if one.write is not None)
"""Names of engines that runs can be exported to."""


def engine_named(name: str) -> Engine:
    """Return the engine with a name of ENGINES; raises InputError for another name."""
    return _with_name(name, ENGINES)


def release_for(engine: Engine, asked: str | None) -> EngineRelease | None:
    """Return the release of an engine that `--release` names; None: not given.

    Raises OptionError for a release that is unknown, or an engine whose keys have no releases.
    """
    if asked is None:
        return None
    if engine.releases is None:
        title = engine.title
        raise OptionError(
            f"--release {shorten(asked)}: keys of {title} are not known by release",
            remedy="Remove it",
        )
    return asked_release(asked, engine.releases(), engine.released_by)


def planned_as(name: str) -> str:
    """Return the engine of the plans that an engine runs: megatron for megatron-bridge."""
    own = engine_named(name)
    return own.name if own.spaces is not None else own.starts[0]


def writer_of(name: str, run: Run) -> str:
    """Return the engine whose files train a run of the engine with a name of ENGINES."""
    tuner = engine_named(name).tuner if run.runtime.fine_tunes else ""
    return tuner or name


def as_trained(name: str, run: Run) -> Run:
    """Return a run as the engine with a name of ENGINES trains it, such as with another loss."""
    own = engine_named(name)
    if own.as_run is None:
        return run
    found: Run = own.as_run(run)
    return found


# --------------------------------------------------------------------------------------------------
# Search spaces of engines with one set of degrees.


@cache
def _variants() -> tuple[EngineSpace, ...]:
    return tuple(space for one in ENGINES if one.spaces is not None for space in one.spaces())


def spaces() -> tuple[EngineSpace, ...]:
    """Return the spaces of engines with one set of degrees, of each its first variant."""
    return tuple({one.name: one for one in reversed(_variants())}.values())[::-1]


def variants(space: EngineSpace) -> tuple[EngineSpace, ...]:
    """Return all variants of the space of an engine, with eager and with compiled layers."""
    own = (one for one in _variants() if one.name == space.name)
    return tuple(replace(one, title=space.title) for one in own)


def tuning(space: EngineSpace) -> EngineSpace:
    """Return the space of an engine with the title of the engine that fine-tunes its models."""
    tuner = engine_named(space.name).tuner
    return replace(space, title=engine_named(tuner).title) if tuner else space


def engine_space(name: str, *, compiled: bool = False) -> EngineSpace:
    """Return the space of the eager or compiled variant of an engine, by its name.

    Raises InputError for another name.
    """
    return _with_name(name, [one for one in _variants() if one.compiled == compiled])


def _with_name(name: str, known: Sequence[_Named]) -> _Named:
    found = next((one for one in known if one.name == name), None)
    if found is None:
        names = _listed([one.name for one in known])
        raise InputError(f"engine: expected {names}, got {shorten(name)}")
    return found


# --------------------------------------------------------------------------------------------------
# Engine of a file.


def _readers() -> list[Engine]:
    # Engines with distinctive keys come first: their scripts may also contain Megatron-LM flags.
    return [one for one in reversed(ENGINES) if one.owns is not None]


def engine_of(source: Configuration) -> Engine:
    """Return the engine of a file.

    Raises DocumentError if no engine recognises the file, or if it is of an engine that is not
    read or of a program that does not train (`search.engines.text.others`).
    """
    from search.engines.text import problem_of, refuse_other

    problem = problem_of(source)
    if problem is None and source.command is not None and not source.command.program:
        # Without a program the arguments are those of an array, which any engine may take.
        problem = _problem_of_script(source.path)
    if problem is not None:
        raise DocumentError(source.path, problem)
    readers = _readers()
    found = next((one for one in readers if one.owns is not None and one.owns(source)), None)
    if found is None and source.python is not None:
        refuse_other(source.path)
    if found is None:
        problem = _problem_of_script(source.path) if source.command is not None else None
        if problem is not None:
            raise DocumentError(source.path, problem)
        plain = ("YAML", "script")
        known = [
            one.title if one.forms in plain else f"{one.title} ({one.forms})" for one in readers
        ]
        kind = kind_of(source.document) if isinstance(source.document, dict) else None
        is_own = kind is not None and "autopar-" in kind
        raise DocumentError(
            source.path,
            ("" if kind is None else f"this is {kind}; it ")
            + f"is not a launch script or configuration of {_listed(known)}",
            remedy="Use `autopar explain` for a plan file" if is_own else None,
        )
    return found


def launch_file(
    path: str, *, world_size: int | None = None, text: str | None = None
) -> Configuration:
    """Return the content of a launch file.

    Raises DocumentError for a file that cannot be read; the message names the program that the file
    belongs to, if `search.engines.text.others` knows it. `world_size` and `text` as in
    `read_configuration`.
    """
    from search.engines.text import read_configuration

    try:
        return read_configuration(path, world_size=world_size, harmless=_is_harmless, text=text)
    except DocumentError:
        problem = _problem_of_script(Path(path))
        if problem is None:
            raise
        raise DocumentError(path, problem) from None


_MOST_BYTES = 4 << 20


def _problem_of_script(file: Path) -> str | None:
    """Return why a script is not read, from the commands in its text; None if nothing is known.

    Its arguments may be a command, too.
    """
    from search.engines.text import given_arguments, problem_of_text

    documents = (".json", ".yaml", ".yml", ".toml")
    with suppress(OSError):
        # A pipe or a device has no size, and may have no end.
        regular = file.is_file() and file.stat().st_size <= _MOST_BYTES
        if regular and file.suffix.lower() not in documents:
            text = file.read_text("utf-8", "replace")
            return problem_of_text(f"{text}\n{' '.join(given_arguments())}")
    return None


def _is_harmless(flag: str) -> bool:
    """Return whether a flag changes neither memory nor time in any engine that reads scripts."""
    from search.engines.huggingface import names
    from search.engines.megatron.names import concern_of, harmless

    # Names of Megatron-LM mean the same in scripts of other engines.
    return harmless(flag) or (concern_of(flag) is None and names.harmless(flag))


def named_card(path: str) -> str | None:
    """Return the GPU model that a file names, or None.

    Raises DocumentError if no engine recognises the file.
    """
    source = launch_file(path)
    engine = engine_of(source)
    return None if engine.card is None else engine.card(source)


def read_checked(
    path: str,
    *,
    world_size: int | None,
    gpu: str,
    model: str | None = None,
    seq_length: int | None = None,
    micro_batch: int | None = None,
    global_batch: int | None = None,
    precision: PrecisionKind | None = None,
    lengths: bool = False,
    release: str | None = None,
    ignored: Collection[str] = (),
    text: str | None = None,
) -> CheckedFile:
    """Return the run and the findings of a launch file.

    world_size : number of GPUs; None: the file contains it.
    gpu : GPU model.
    model, seq_length : model and sequence length in tokens, if the training script sets them.
    micro_batch, global_batch : sequences of a rank and micro-batch, and of a step, likewise.
    precision : bf16, fp16 or fp32, likewise.
    lengths : True if the lengths of samples are given.
    release : release of the engine; None: that of the file, or the newest known.
    ignored : names of arguments and keys that change neither memory nor time.
    text : text of the file; None to read it.

    Raises DocumentError if no engine recognises the file, or if the number of GPUs is unknown, and
    OptionError for an unusable release.
    """
    from search.engines.reader import CheckOptions

    source = launch_file(path, world_size=world_size, text=text)
    engine = engine_of(source)
    asked = CheckOptions(
        release=release_for(engine, release),
        world_size=world_size,
        gpu=gpu,
        model=model,
        seq_length=seq_length,
        micro_batch=micro_batch,
        global_batch=global_batch,
        precision=precision,
        lengths=lengths,
    )
    assert engine.read is not None, "an engine that owns a file reads it"
    if not engine.asks_for_batch and (micro_batch or global_batch or precision):
        raise DocumentError(
            path,
            f"a file of {engine.title} sets its own batch and precision",
            remedy="Remove --micro-batch-size, --global-batch-size and --precision",
        )
    found: CheckedFile = engine.read(source, asked)
    return found.ignoring(ignored) if ignored else found


def _listed(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
