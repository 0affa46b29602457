"""Records for the export and import of runs, common to all engines.

A `Run` contains all settings that determine memory and time. An `ExportTarget` adds the machines
and the model name. Paths of data and weights are environment variables of the exported files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from autopar.documents.catalog import model_names
from autopar.documents.spec import load_spec
from autopar.errors import InputError
from autopar.records import Record
from autopar.run.architecture import Model
from autopar.run.model import ModelSpec
from autopar.run.plan import Plan
from autopar.run.run import Run
from search.engines.engine import EngineRelease


class UnsupportedFeature(Record):
    """One feature of a plan or run that an engine cannot express."""

    field: str
    """Key of the strategy file, such as `tp_sizes_enc`, or field of a run."""
    what: str
    """Sentence that names the requested value, the layers, and the value that the engine uses."""


class ExportTarget(Record):
    """Machines of a run, and other export data that are not in `Run`."""

    num_nodes: int
    gpus_per_node: int
    model: str | None = None
    """Name of the model: a shipped name, a recipe name, or a Hugging Face name. It
    determines values that are not in `Run`, such as the base of rotary positions. None: only the
    sizes are known."""
    repository: str | None = None
    """Repository on the Hugging Face hub that the user named, with the weights to fine-tune; None:
    that of the shipped model."""
    spec: ModelSpec | None = None
    """Description of the model; None: not available."""
    recomputed: frozenset[int] | None = None
    """Numbers of the layers to recompute in a run with full recomputation; None: the run is no
    per-layer plan and recomputes all layers."""
    exchanges: tuple[str, ...] = ()
    """Value of `--cp-comm-type` for each layer, if layers differ; empty: one type, from the run."""
    exchange_degree: int = 1
    """All-to-all degree inside the context-parallel group for `a2a+p2p`; 1: no such layers."""
    release: EngineRelease | None = None
    """Release of the engine to write for; None: the newest known."""
    of_script: bool = False
    """True if the user's script builds the model and its `config.json` is unknown. The sizes of the
    run are then those of a substitute model."""

    @property
    def num_gpus(self) -> int:
        """Total number of GPUs."""
        return self.num_nodes * self.gpus_per_node


class Draft(Record):
    """Files and launch command that the writer of an engine made from a run, not yet read back."""

    version: str
    """Release of the engine that the keys come from."""
    files: Mapping[str, str]
    launch: str
    notes: tuple[str, ...]
    entry: str | None = None
    """File to read back, if it describes the entire run; None: read back the launch command."""
    read: Callable[[], Run] | None = None
    """Function that reads the files back as a run; None: `autopar check` can read them."""
    stand_in: str | None = None
    """Text of a `config.json` for the read-back; None unless the user's script builds the model."""


class ExportedRun(Record):
    """Exported run: files and launch command for one engine, and its unsupported features."""

    engine: str
    engine_version: str
    """Release of the engine that the keys come from."""
    files: Mapping[str, str]
    """Text by file name; the first is the configuration."""
    launch: str
    """Launch command of one node, with its environment; ends in a newline."""
    notes: tuple[str, ...]
    """Notes for the user, such as values to fill in."""
    losses: tuple[UnsupportedFeature, ...]
    """Features of the run that the engine cannot express; empty if it executes the run exactly."""
    entry: str | None
    """File to pass to `autopar check`; None: `launch.sh`, which contains the command."""
    runs: Run
    """Run read back from the files, equal in effect to the exported run if `losses` is empty."""


class ImportedPlan(Record):
    """Plan read from a configuration or launch script of an engine."""

    plan: Plan
    notes: tuple[str, ...]
    """Sentences on ambiguous settings, and on settings outside the plan with their options."""
    strategy_path: Path | None = None
    """File that contains the plan, if the configuration refers to one; None: the configuration."""


def refuse_others(run: Run, title: str, keepers: tuple[str, ...]) -> None:
    """Raise InputError unless the model states of a run have the layout of an engine.

    title : name of the engine in sentences.
    keepers : names of the state layouts that the engine supports (`States.keeper`); empty for
        Megatron-LM layers.
    """
    keeper = run.runtime.states.keeper if run.kernels.torch_layers else None
    if keeper not in (keepers or (None,)):
        own = "Megatron-LM" if keeper is None else keeper
        raise InputError(
            f"the plan uses memory and kernels of {own}, which differ in {title}",
            remedy=f"Use a plan of {title}, or export to {own}",
        )


def spec_of(place: ExportTarget, model: Model) -> ModelSpec | None:
    """Return the description of a model, given or shipped with autopar; None: neither exists.

    Raises InputError if the shipped model differs from `model` in layers or hidden size.
    """
    if place.spec is not None:
        return place.spec
    if place.of_script or place.model is None or place.model not in model_names():
        return None
    spec = load_spec(place.model)
    layer = spec.layers[0]
    named, own = (spec.num_layers, layer.hidden_size), (model.num_layers, model.hidden)
    if named != own:
        raise InputError(
            f"{place.model} has {named[0]} layers of width {named[1]}, but the "
            f"plan has {own[0]} of width {own[1]}",
            remedy="Use the model of the plan",
        )
    return spec


def step_count(run: Run) -> str:
    """Return the number of steps as shell text; `TRAIN_ITERS` as a required variable if unknown."""
    if run.steps is not None:
        return str(run.steps)
    return "${TRAIN_ITERS:?set TRAIN_ITERS to the number of steps}"
