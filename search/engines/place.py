"""Where a run is handed over to, and what comes of it: records, nothing of one engine.

A `Run` holds what memory and time depend on. Where it runs, and by which name others know its
model, is a `Place`; where data and weights are is asked for by the files themselves.
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


class Loss(Record):
    """One thing that an engine cannot express."""

    field: str
    """Key of the strategy file, such as `tp_sizes_enc`, or field of a launch."""
    what: str
    """One sentence: what is asked for, for which layers, and what the engine does instead."""


class Place(Record):
    """Where a launch runs, and what no launch says of it."""

    num_nodes: int
    gpus_per_node: int
    model: str | None = None
    """The name that the model has: a shipped one, a recipe's, of Hugging Face; None: it is known by
    its sizes alone. What a launch does not hold, such as the base of rotary positions, is taken
    from where a model of that name stands."""
    spec: ModelSpec | None = None
    """The model itself, where it is at hand."""
    release: Literal["0.2", "0.3"] = "0.2"
    """Of torchtitan: job files (TOML), or recipes in Python."""
    recomputed: frozenset[int] | None = None
    """Layers that alone are computed again of a launch that recomputes all; None: all of them."""
    exchanges: tuple[str, ...] = ()
    """Of Megatron-LM: how context ranks of every layer exchange (`--cp-comm-type`), where layers
    differ; empty: as the launch."""
    exchange_degree: int = 1
    """Ranks of those that exchange heads within rings."""
    of_script: bool = False
    """The user's script builds the model, which no `config.json` known here describes: the sizes of
    the launch are a stand-in's."""

    @property
    def num_gpus(self) -> int:
        """Of all machines."""
        return self.num_nodes * self.gpus_per_node


class Draft(Record):
    """What one trainer's file writes of a launch, before it is read back."""

    version: str
    """Release that the keys are of."""
    files: Mapping[str, str]
    launch: str
    notes: tuple[str, ...]
    entry: str | None = None
    """The file that says all of the launch; None: the command does, with what it names."""
    read: Callable[[], Run] | None = None
    """Returns the run of files that `autopar check` does not read."""
    stand_in: str | None = None
    """`config.json` of the sizes that are read back where the script builds another model."""


class WrittenLaunch(Record):
    """A launch as one trainer takes it."""

    engine: str
    engine_version: str
    """Release that the keys are of."""
    files: Mapping[str, str]
    """Text by file name; the first is the configuration."""
    launch: str
    """The command of one node, with its environment; ends in a newline."""
    notes: tuple[str, ...]
    """What the user has to know besides."""
    losses: tuple[Loss, ...]
    """What the engine cannot express of the launch; empty where it does just that."""
    entry: str | None
    """The file that `autopar check` takes; None: `launch.sh`, which holds the command."""
    runs: Run
    """What the files say, read back: the launch itself where nothing is lost."""


class Imported(Record):
    """A plan that was found in an engine's configuration."""

    plan: Plan
    notes: tuple[str, ...]
    """What a plan does not say, and how to price it; what was read in two ways."""
    strategy_path: Path | None = None
    """The file that holds the plan, where the configuration only names it."""


def refuse_others(run: Run, title: str, keepers: tuple[str, ...]) -> None:
    """Raise InputError unless states are kept as a trainer keeps them.

    keepers : of `autopar.price.state_layouts`; none for Megatron-LM's own.
    """
    keeper = run.runtime.states.keeper if run.kernels.torch_layers else None
    if keeper not in (keepers or (None,)):
        own = "Megatron-LM" if keeper is None else keeper
        raise InputError(
            f"the launch keeps and computes as {own} does, which {title} does otherwise; ask for "
            f"a launch of {title}, or write this one for {own}"
        )


def spec_of(place: Place, model: Model) -> ModelSpec | None:
    """Return the shipped description of a model, None where its name is no shipped one.

    Raises InputError where it is one of another model.
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
            f"{place.model} has {named[0]} layers of width {named[1]}, the launch {own[0]} of "
            f"width {own[1]}; name the model of the launch"
        )
    return spec


def step_count(run: Run) -> str:
    """Return the number of steps for a shell: asked for where the run does not say it."""
    if run.steps is not None:
        return str(run.steps)
    return "${TRAIN_ITERS:?set TRAIN_ITERS to the number of steps}"
