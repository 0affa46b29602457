"""Records for the export and import of runs, common to all engines.

A `Run` contains what memory and time depend on. An `ExportTarget` contains the machines and the
name of the model. The exported files ask for the paths of data and weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from autopar.documents.catalog import model_names
from autopar.documents.spec import load_spec
from autopar.errors import InputError
from autopar.records import Record
from autopar.run.architecture import Model
from autopar.run.model import ModelSpec
from autopar.run.plan import Plan
from autopar.run.run import Run


class UnsupportedFeature(Record):
    """One feature of a plan or run that an engine cannot express."""

    field: str
    """Key of the strategy file, such as `tp_sizes_enc`, or field of a run."""
    what: str
    """Sentence on the requested value, the layers, and the behaviour of the engine instead."""


class ExportTarget(Record):
    """Machines of a run, and export data that the run itself does not contain."""

    num_nodes: int
    gpus_per_node: int
    model: str | None = None
    """Name of the model: a shipped name, a recipe name, or a Hugging Face name. It is the source of
    values that a run does not contain, such as the base of rotary positions. None: only the sizes
    are known."""
    spec: ModelSpec | None = None
    """Description of the model; None: not available."""
    release: Literal["0.2", "0.3"] = "0.2"
    """Release of torchtitan: 0.2 with job files (TOML), 0.3 with recipes in Python."""
    recomputed: frozenset[int] | None = None
    """Numbers of the layers to recompute in a run with full recomputation; None: all layers."""
    exchanges: tuple[str, ...] = ()
    """Context-parallel communication by layer for Megatron-LM (`--cp-comm-type`), where layers
    differ; empty: as in the run."""
    exchange_degree: int = 1
    """All-to-all degree inside the context group, for layers with `a2a+p2p`; 1: none."""
    of_script: bool = False
    """True if the user's script builds a model without a known `config.json`. The sizes of the run
    are then those of a substitute model."""

    @property
    def num_gpus(self) -> int:
        """Total number of GPUs."""
        return self.num_nodes * self.gpus_per_node


class Draft(Record):
    """Files and command that an engine's writer made from a run, before they are read back."""

    version: str
    """Release of the engine that the keys come from."""
    files: Mapping[str, str]
    launch: str
    notes: tuple[str, ...]
    entry: str | None = None
    """File that describes the whole run; None: the command does, with the files that it names."""
    read: Callable[[], Run] | None = None
    """Function that returns the run of files that `autopar check` cannot read; None: it can."""
    stand_in: str | None = None
    """`config.json` with the sizes to read back where the script builds the model; None: unused."""


class ExportedRun(Record):
    """Exported run: files and launch command for one engine, with the losses."""

    engine: str
    engine_version: str
    """Release of the engine that the keys come from."""
    files: Mapping[str, str]
    """Text by file name; the first is the configuration."""
    launch: str
    """Launch command of one node, with its environment; ends in a newline."""
    notes: tuple[str, ...]
    """Further notes for the user."""
    losses: tuple[UnsupportedFeature, ...]
    """Features of the run that the engine cannot express; empty where it runs exactly this."""
    entry: str | None
    """File to pass to `autopar check`; None: `launch.sh`, which contains the command."""
    runs: Run
    """Run that is read back from the files; equal to the exported run where nothing is lost."""


class ImportedPlan(Record):
    """Plan that was read from the configuration of an engine."""

    plan: Plan
    notes: tuple[str, ...]
    """Sentences on settings outside the plan and how to price them, and on ambiguous settings."""
    strategy_path: Path | None = None
    """File with the plan, where the configuration only names it; None: the configuration itself."""


def refuse_others(run: Run, title: str, keepers: tuple[str, ...]) -> None:
    """Raise InputError unless the model states of a run have the layout of an engine.

    keepers : state layouts of `autopar.price.state_layouts`; empty for Megatron-LM layers.
    """
    keeper = run.runtime.states.keeper if run.kernels.torch_layers else None
    if keeper not in (keepers or (None,)):
        own = "Megatron-LM" if keeper is None else keeper
        raise InputError(
            f"the plan uses memory and kernels of {own}, which differ in {title}",
            remedy=f"Use a plan of {title}, or export to {own}",
        )


def spec_of(place: ExportTarget, model: Model) -> ModelSpec | None:
    """Return the description of a model; None where none is given and its name is not shipped.

    Raises InputError where the shipped model of that name has other sizes.
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
    """Return the number of steps as shell text; a required variable where the run has none."""
    if run.steps is not None:
        return str(run.steps)
    return "${TRAIN_ITERS:?set TRAIN_ITERS to the number of steps}"
