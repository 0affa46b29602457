"""A launch written for a trainer: its files and its command, read back as `autopar check` reads.

What one trainer's keys are stands in the module of its name. Whatever the files do not say of the
launch is a sentence, and what the trainer would refuse is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from autopar.errors import InputError
from autopar.records import Record
from autopar.run.launch import Launch
from search.engines.bridge import write as bridge
from search.engines.deepspeed import write as deepspeed
from search.engines.differences import losses_of
from search.engines.huggingface import write as accelerate
from search.engines.megatron import write as megatron
from search.engines.place import Draft, Engine, Place, WrittenLaunch
from search.engines.reader import CheckedFile
from search.engines.readers import read_checked
from search.engines.torchtitan import write as torchtitan

LAUNCH = "launch.sh"
"""The file that the command stands in, beside the others."""


class _Writer(Record):
    """One trainer."""

    title: str
    write: Callable[[Launch, Place], Draft]
    """Raises InputError where nothing of the trainer is near the launch."""


_WRITERS: Mapping[Engine, _Writer] = {
    "megatron": _Writer(title="Megatron-LM", write=megatron.write),
    "megatron-bridge": _Writer(title="Megatron-Bridge", write=bridge.write),
    "torchtitan": _Writer(title=f"torchtitan {torchtitan.VERSION}", write=torchtitan.write),
    "deepspeed": _Writer(title="DeepSpeed", write=deepspeed.write),
    "accelerate": _Writer(title="accelerate", write=accelerate.write),
}
TITLES: Mapping[Engine, str] = {engine: writer.title for engine, writer in _WRITERS.items()}
"""What trainers are called."""


def written(launch: Launch, *, engine: Engine, place: Place) -> WrittenLaunch:
    """Return the files and the command that make a trainer run a launch.

    Parameters
    ----------
    engine : who runs it; a launch of Megatron-LM is one of Megatron-Bridge as well, and what
        DeepSpeed keeps accelerate can start. place : the machines, and the model's name.

    Raises InputError, one sentence: the place has another number of GPUs, the trainer has no such
    model or keeps states otherwise, or it would refuse the launch.
    """
    if place.num_gpus != launch.degrees.world:
        raise InputError(
            f"{place.num_nodes} x {place.gpus_per_node} GPUs are {place.num_gpus}, and the launch "
            f"is for {launch.degrees.world}; give the cluster that it is for"
        )
    writer = _WRITERS[engine]
    draft = writer.write(launch, place)
    runs = _read_back(draft, launch, writer.title)
    if launch.adapters is not None and runs.adapters is None:
        # no loss beside others: it trains something else, and takes several times the memory
        raise InputError(
            f"{writer.title} would train all weights: the launch trains adapters, which no file of "
            "it says here; the files of --engine accelerate and deepspeed do (Megatron-Bridge has "
            "recipes with adapters, which take these degrees by hand)"
        )
    return WrittenLaunch(
        engine=engine,
        engine_version=draft.version,
        files=draft.files,
        launch=draft.launch,
        notes=draft.notes,
        losses=losses_of(launch, runs, writer.title),
        entry=draft.entry,
        runs=runs,
    )


def unwritten(launch: Launch, *, engine: Engine, place: Place) -> str:
    """Return why a trainer has no files for a launch, such as another model; empty where it has.

    Nothing is read back: what the trainer would end with is said by `written`.
    """
    try:
        _WRITERS[engine].write(launch, place)
    except InputError as error:
        return str(error)
    return ""


def _read_back(draft: Draft, launch: Launch, title: str) -> Launch:
    """Return the launch that files say; raises InputError for what the trainer ends with."""
    found = checked(draft, launch)
    illegal = [one.text for one in found.findings if one.kind == "illegal"]
    if illegal:
        more = f", and {len(illegal) - 1} more" if len(illegal) > 1 else ""
        raise InputError(f"{title} refuses the launch: {illegal[0]}{more}")
    if found.launch is None:
        why = next((one.text for one in found.findings if one.kind == "not priced"), "")
        raise InputError(f"{title} has what is written, and it has no price: {why}")
    return found.launch


def checked(draft: Draft | WrittenLaunch, launch: Launch) -> CheckedFile:
    """Return what `autopar check` says of files, which lie as a user has them."""
    with TemporaryDirectory(prefix="autopar-") as folder:
        for name, text in {**draft.files, LAUNCH: draft.launch}.items():
            path = Path(folder) / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return read_checked(
            str(Path(folder) / (draft.entry or LAUNCH)),
            world_size=launch.degrees.world,
            gpu=launch.software.gpu,
        )
