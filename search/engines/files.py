"""Export of a run to files and a launch command, verified by reading them with `autopar check`.

Differences between the run and the run read back are reported as unsupported features. A run that
the engine would reject raises an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from autopar.errors import InputError
from autopar.records import replace
from autopar.run.architecture import with_attention
from autopar.run.of_plan import refuse_unlike
from autopar.run.run import Run
from search.engines.differences import losses_of
from search.engines.engine import Engine, EngineRelease
from search.engines.exporter_types import Draft, ExportedRun, ExportTarget, spec_of
from search.engines.reader import CheckedFile
from search.engines.table import engine_named, read_checked

LAUNCH = "launch.sh"
"""Name of the script with the launch command."""
_STAND_IN = "stand-in"
_HEAD = "#!/usr/bin/env bash\nset -euo pipefail\n"
# The command refers to its files by name only.
_HOME = 'cd "$(dirname "${BASH_SOURCE[0]}")"\n'


def with_script(files: Mapping[str, str], command: str) -> dict[str, str]:
    """Return the text of all exported files by name, with the launch command in `launch.sh`."""
    return {**files, LAUNCH: _HEAD + _HOME + command}


def title_of(engine: Engine, draft: Draft) -> str:
    """Return the name of an engine for messages, with the release if keys depend on it."""
    return f"{engine.title} {draft.version}" if engine.titled_by_release else engine.title


def written(run: Run, *, engine: str, place: ExportTarget) -> ExportedRun:
    """Return the files and the launch command with which an engine trains a run.

    Parameters
    ----------
    engine : name of the engine. Megatron-Bridge also trains runs of Megatron-LM, and accelerate
        starts runs of DeepSpeed.
    place : machines and name of the model.

    Raises InputError if `place` and `run` differ in the number of GPUs. It is also raised if the
    engine would reject the run, or does not support its model, adapters or model-state layout.
    """
    if place.num_gpus != run.strategy.gpus:
        raise InputError(
            f"{place.num_nodes} x {place.gpus_per_node} GPUs are "
            f"{place.num_gpus}, but the plan needs {run.strategy.gpus}",
            remedy="Use the cluster of the plan",
        )
    refuse_unlike(run.model)
    run = _with_rotary_share(run, place)
    own = engine_named(engine)
    draft = _draft(own, run, place)
    title = title_of(own, draft)
    runs = read_back(draft, run, title, place.release)
    if run.runtime.adapters is not None and runs.runtime.adapters is None:
        # An error, not an unsupported feature: training all weights instead of adapters gives
        # another result and needs several times the memory.
        raise InputError(
            f"cannot export LoRA for {title}: it has no adapter arguments",
            remedy=f"Use --to {own.tuner}" if own.tuner else "",
        )
    return ExportedRun(
        engine=engine,
        engine_version=draft.version,
        files=draft.files,
        launch=draft.launch,
        notes=draft.notes,
        losses=losses_of(run, runs, title),
        entry=draft.entry,
        runs=runs,
    )


def _with_rotary_share(run: Run, place: ExportTarget) -> Run:
    """Return a run with the rotary fraction of its model, which earlier plan files lack."""
    model = run.model
    spec = spec_of(place, model) if model.positions == "rotary" else None
    if spec is None or spec.rotary_share == 1.0:
        return run
    groups = []
    for group in model.layers:
        layer, attention = group.layer, group.layer.attention
        if attention is not None and attention.latent is None and attention.rotary_share == 1.0:
            layer = with_attention(layer, replace(attention, rotary_share=spec.rotary_share))
        groups.append(replace(group, layer=layer))
    return replace(run, model=replace(model, layers=tuple(groups)))


def _draft(engine: Engine, run: Run, place: ExportTarget) -> Draft:
    assert engine.write is not None, "launches are written for it"
    draft: Draft = engine.write(run, place)
    return draft


def read_back(draft: Draft, run: Run, title: str, release: EngineRelease | None = None) -> Run:
    """Return the run that the files of a draft describe.

    run : exported run, for the number of GPUs and the GPU model
    title : name of the engine in messages
    release : release of the engine that the files are for; None: the newest known

    Raises InputError if the engine would reject the run, or if its files cannot be read as a run.
    """
    if draft.read is not None:
        return draft.read()
    found = checked(draft, run, release)
    illegal = [one.text for one in found.findings if one.kind == "illegal"]
    if illegal:
        more = f", and {len(illegal) - 1} more" if len(illegal) > 1 else ""
        raise InputError(f"illegal for {title}: {illegal[0]}{more}")
    runs = found.run or found.described
    if runs is None:
        why = next((one.text for one in found.findings if one.kind == "not priced"), "")
        raise InputError(f"the files of {title} have no price: {why}")
    return runs


def checked(
    draft: Draft | ExportedRun, run: Run, release: EngineRelease | None = None
) -> CheckedFile:
    """Return the result of `autopar check` for the files, written to a temporary folder."""
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
            release=None if release is None else release.name,
            model=None if stand_in is None else str(Path(folder) / _STAND_IN),
        )
