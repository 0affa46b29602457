"""Where a launch is handed over to, and what comes of it: records, nothing of one trainer.

A `Launch` holds what memory and time depend on. Where it runs, and by which name others know its
model, is a `Place`; where data and weights are is asked for by the files themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from autopar.documents.catalog import model_names
from autopar.documents.spec import load_spec
from autopar.errors import InputError
from autopar.records import Record
from autopar.run.launch import Launch, Model
from autopar.run.model import ModelSpec

Engine = Literal["megatron", "megatron-bridge", "torchtitan", "deepspeed", "accelerate"]
"""Who can be handed a launch, and whose files are read as one."""
ENGINES: tuple[Engine, ...] = get_args(Engine)


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


class WrittenLaunch(Record):
    """A launch as one trainer takes it."""

    engine: Engine
    engine_version: str
    """Release that the keys are of."""
    files: Mapping[str, str]
    """Text by file name; the first is the configuration."""
    launch: str
    """The command of one node, with its environment; ends in a newline."""
    notes: tuple[str, ...]
    """What the user has to know besides."""
    losses: tuple[str, ...]
    """What the trainer cannot say of the launch, one sentence each; empty where it does just that.
    """
    entry: str | None
    """The file that `autopar check` takes; None: `launch.sh`, which holds the command."""
    runs: Launch
    """What the files say, read back: the launch itself where nothing is lost."""


def refuse_others(launch: Launch, title: str, keepers: tuple[str, ...]) -> None:
    """Raise InputError unless states are kept as a trainer keeps them.

    keepers : of `autopar.price.state_layouts`; none for Megatron-LM's own.
    """
    keeper = None if launch.trainer is None else launch.trainer.keeper
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
    if place.model is None or place.model not in model_names():
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


def step_count(launch: Launch) -> str:
    """Return the number of steps for a shell: asked for where the launch does not say it."""
    if launch.steps is not None:
        return str(launch.steps)
    return "${TRAIN_ITERS:?set TRAIN_ITERS to the number of steps}"
