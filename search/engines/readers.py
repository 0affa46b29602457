"""Whose launch a file is, and what it says: the trainers that `autopar check` reads.

What a trainer has to give is `search.engines.reader`'s; prices are not made here.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import DocumentError
from search.engines.bridge.check import BRIDGE
from search.engines.deepspeed.check import DEEPSPEED
from search.engines.huggingface.check import ACCELERATE
from search.engines.megatron.check import MEGATRON
from search.engines.megatron.names import harmless
from search.engines.reader import Asked, CheckedFile, Trainer
from search.engines.text import Configuration, read_configuration
from search.engines.torchtitan.check import TORCHTITAN

TRAINERS: tuple[Trainer, ...] = (TORCHTITAN, ACCELERATE, DEEPSPEED, BRIDGE, MEGATRON)
"""In the order in which a file is held to them: those with keys of their own first, since scripts
of others have flags of Megatron-LM as well."""


def trainer_of(source: Configuration) -> Trainer:
    """Return the trainer of a file; raises DocumentError, which names all, where it has none."""
    found = next((trainer for trainer in TRAINERS if trainer.owns(source)), None)
    if found is None:
        known = [f"{trainer.name} ({trainer.forms})" for trainer in TRAINERS]
        raise DocumentError(source.path, f"is no launch of {_listed(known)}")
    return found


def named_card(path: str) -> str | None:
    """Return the card that a file itself is for, where it says one; raises as `read_checked`."""
    source = read_configuration(path)
    return trainer_of(source).card(source)


def read_checked(
    path: str,
    *,
    world_size: int | None,
    gpu: str,
    model: str | None = None,
    seq_length: int | None = None,
) -> CheckedFile:
    """Return what a file of a launch says; raises DocumentError where it is none that is read.

    world_size : number of GPUs, where the file does not say it. gpu : kind of device. model,
    seq_length : where they are the script's to say.
    """
    # names of Megatron-LM that others have as well mean the same there
    source = read_configuration(path, world_size=world_size, harmless=harmless)
    asked = Asked(world_size=world_size, gpu=gpu, model=model, seq_length=seq_length)
    return trainer_of(source).read(source, asked)


def _listed(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
