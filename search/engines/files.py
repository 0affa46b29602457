"""A run written for an engine: its files and its command, read back as `autopar check` reads.

Whatever the files do not hold of the run is a loss, and what the engine would refuse is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from autopar.errors import InputError
from autopar.run.architecture import refuse_unlike
from autopar.run.run import Run
from search.engines.differences import losses_of
from search.engines.engine import Engine
from search.engines.place import Draft, Place, WrittenLaunch
from search.engines.reader import CheckedFile
from search.engines.table import engine_named, read_checked

LAUNCH = "launch.sh"
"""Name of the script that holds the command."""
_STAND_IN = "stand-in"
_HEAD = "#!/usr/bin/env bash\nset -euo pipefail\n"
# the command names its files without a folder
_HOME = 'cd "$(dirname "${BASH_SOURCE[0]}")"\n'


def with_script(files: Mapping[str, str], command: str) -> dict[str, str]:
    """Return all files of an export: those of the engine, and the command as a script."""
    return {**files, LAUNCH: _HEAD + _HOME + command}


def title_of(engine: Engine, draft: Draft) -> str:
    """Return the name of an engine in sentences on its files."""
    return f"{engine.title} {draft.version}" if engine.titled_by_release else engine.title


def written(run: Run, *, engine: str, place: Place) -> WrittenLaunch:
    """Return the files and the command that make an engine train a run.

    Parameters
    ----------
    engine : its name; a run of Megatron-LM is one of Megatron-Bridge as well, and what
        DeepSpeed keeps accelerate can start. place : the machines, and the model's name.

    Raises InputError, one sentence: the place has another number of GPUs, the engine has no such
    model or keeps states otherwise, or it would refuse the launch.
    """
    if place.num_gpus != run.strategy.gpus:
        raise InputError(
            f"{place.num_nodes} x {place.gpus_per_node} GPUs are {place.num_gpus}, and the launch "
            f"is for {run.strategy.gpus}; give the cluster that it is for"
        )
    refuse_unlike(run.model)
    own = engine_named(engine)
    draft = _draft(own, run, place)
    title = title_of(own, draft)
    runs = read_back(draft, run, title)
    if run.runtime.adapters is not None and runs.runtime.adapters is None:
        # no loss beside others: it trains something else, and takes several times the memory
        raise InputError(
            f"{title} would train all weights: the launch trains adapters, which no file of "
            "it says here; the files of --engine accelerate and deepspeed do (Megatron-Bridge has "
            "recipes with adapters, which take these degrees by hand)"
        )
    return WrittenLaunch(
        engine=engine,
        engine_version=draft.version,
        files=draft.files,
        launch=draft.launch,
        notes=draft.notes,
        losses=losses_of(run, runs, title),
        entry=draft.entry,
        runs=runs,
    )


def _draft(engine: Engine, run: Run, place: Place) -> Draft:
    assert engine.write is not None, "launches are written for it"
    draft: Draft = engine.write(run, place)
    return draft


def unwritten(run: Run, *, engine: str, place: Place) -> str:
    """Return why an engine has no files for a run, such as another model; empty where it has.

    Nothing is read back: what the engine would end with is found by `written`.
    """
    try:
        _draft(engine_named(engine), run, place)
    except InputError as error:
        return str(error)
    return ""


def read_back(draft: Draft, run: Run, title: str) -> Run:
    """Return the run that files describe; raises InputError for what the engine ends with."""
    if draft.read is not None:
        return draft.read()
    found = checked(draft, run)
    illegal = [one.text for one in found.findings if one.kind == "illegal"]
    if illegal:
        more = f", and {len(illegal) - 1} more" if len(illegal) > 1 else ""
        raise InputError(f"{title} refuses the launch: {illegal[0]}{more}")
    runs = found.run or found.described
    if runs is None:
        why = next((one.text for one in found.findings if one.kind == "not priced"), "")
        raise InputError(f"{title} has what is written, and it has no price: {why}")
    return runs


def checked(draft: Draft | WrittenLaunch, run: Run) -> CheckedFile:
    """Return what `autopar check` reads in files, in a folder as a user has them."""
    texts = with_script(draft.files, draft.launch)
    stand_in = draft.stand_in if isinstance(draft, Draft) else None
    if stand_in is not None:
        texts[f"{_STAND_IN}/config.json"] = stand_in
    with TemporaryDirectory(prefix="autopar-") as folder:
        for name, text in texts.items():
            path = Path(folder) / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return read_checked(
            str(Path(folder) / (draft.entry or LAUNCH)),
            world_size=run.strategy.gpus,
            gpu=run.gpu,
            model=None if stand_in is None else str(Path(folder) / _STAND_IN),
        )
