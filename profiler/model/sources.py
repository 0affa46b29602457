"""What `--model` names: a shipped model or its file, a Hugging Face model, somebody's own module.

`load_source` reads it and tries it out, so that what is wrong is said before anything is measured.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import InputError, OptionError
from autopar.estimate.memory import tensor_degrees
from autopar.model import ModelSpec
from autopar.specs import load_spec
from profiler.model.modules import Built, first_line
from profiler.model.sharding import Sharding

if TYPE_CHECKING:
    import torch

__all__ = ["Factory", "ModelSource", "SpecSource", "load_source"]

Factory = Callable[[int, int, Any], Any]
"""(num_layers, seq_length, torch dtype) to a module with `make_batch`, or to an object with
`module`, `make_batch` and, where they are not its longest ModuleList of one class, `layers`."""

_FORM = "py:package.module:factory"


class ModelSource(ABC):
    """What is profiled, however it was named."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the folder that receives the files."""

    @property
    @abstractmethod
    def spec(self) -> ModelSpec | None:
        """The architecture, where reference blocks are measured; None for a module."""

    @property
    @abstractmethod
    def sizes(self) -> ModelSpec:
        """Layer types, lengths, width and heads: the spec, or as much as a module tells of them."""

    @property
    @abstractmethod
    def degrees(self) -> tuple[int, ...]:
        """Tensor degrees that can be measured; times and memory at others are scaled."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was assumed, in sentences."""
        return ()

    @property
    def parallelize_plan(self) -> Mapping[str, Any] | None:
        """A module's tensor parallelism, as torch's `parallelize_module` wants it of one layer."""
        return None

    @property
    def hidden_size(self) -> int:
        """Of the first layer, for the names of files."""
        return self.sizes.layers[0].hidden_size

    @property
    def num_heads(self) -> int:
        """Of the first layer, for the names of files."""
        return self.sizes.layers[0].num_heads or 1

    @abstractmethod
    def build(
        self,
        num_layers: int,
        *,
        seq_length: int | None = None,
        dtype: str = "bf16",
        device: torch.device | str = "cpu",
    ) -> Built:
        """Return a model with so many layers of each type on a device.

        Inside FakeTensorMode it is made of fake tensors. seq_length : the longest it will see;
        None for that of `sizes`. Raises InputError, one sentence.
        """

    def check_degree(self, degree: int) -> str | None:
        """Return None for a degree that can be measured, a warning for one that is scaled.

        Raises
        ------
        InputError: it does not divide the attention heads.
        """
        for layer in self.sizes.layers:
            if layer.num_heads is not None and layer.num_heads % degree:
                raise InputError(
                    f"--tp: {degree} does not divide the {layer.num_heads} attention heads of "
                    f"model {self.name!r}; choose a degree that does"
                )
        if degree in self.degrees:
            return None
        return (
            f"model {self.name!r} says no parallelize_plan: at tensor degree {degree} nothing is "
            f"measured, a rank is taken to need 1/{degree} of the whole layer"
        )


@dataclass(frozen=True, kw_only=True)
class SpecSource(ModelSource):
    """A model that a spec describes completely: a shipped name, config.json or model.json."""

    architecture: ModelSpec

    @property
    def name(self) -> str:
        """Name of the folder that receives the files."""
        return self.architecture.name

    @property
    def spec(self) -> ModelSpec:
        """The architecture."""
        return self.architecture

    @property
    def sizes(self) -> ModelSpec:
        """The architecture."""
        return self.architecture

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees that every layer type can be laid out with."""
        by_type = [set(tensor_degrees(layer)) for layer in self.architecture.layers]
        return tuple(sorted(set.intersection(*by_type)))

    def build(
        self,
        num_layers: int,
        *,
        seq_length: int | None = None,
        dtype: str = "bf16",
        device: torch.device | str = "cpu",
    ) -> Built:
        """Return reference blocks with embedding, head and loss (`build_stack`)."""
        from profiler.model.stack import build_stack
        from profiler.model.timing import torch_dtype

        layers = (
            replace(layer, num_layers=num_layers, seq_length=seq_length or layer.seq_length)
            for layer in self.architecture.layers
        )
        spec = replace(self.architecture, layers=tuple(layers))
        return build_stack(spec, dtype=torch_dtype(dtype), device=device)


def load_source(
    text: str,
    *,
    seq_lengths: Sequence[int] | None = None,
    num_layers: int = 2,
    dtype: str = "bf16",
) -> ModelSource:
    """Return what `--model` names, tried out.

    seq_lengths : lengths that will be measured; None for the model's own, which a factory that
    does not say it has at 2,048. num_layers : layers of each type in the trial.

    Raises
    ------
    InputError: nothing is of that name, or it cannot be measured; one sentence.
    InstallError: torch or transformers is missing where they are needed.
    """
    kind, _, rest = text.partition(":")
    if kind == "py":
        module_name, attribute, factory = _import_factory(text, rest)
        label = f"{module_name.rpartition('.')[2]}-{attribute}".replace("_", "-").lower()
    elif kind == "hf":
        from profiler.model.hub import hub_factory

        factory = hub_factory(rest)
        label = factory.name
    else:
        return _spec_source(text, seq_lengths)
    from profiler.environment import require_torch

    require_torch()
    from profiler.model.module_source import module_source

    return module_source(
        factory, text=text, label=label, seq_lengths=seq_lengths, num_layers=num_layers, dtype=dtype
    )


def _spec_source(text: str, seq_lengths: Sequence[int] | None) -> SpecSource:
    spec = load_spec(text)
    longest = max(seq_lengths or (0,))
    if spec.learned_positions and longest > spec.learned_positions:
        raise InputError(
            f"--seq: {longest} tokens are more than the {spec.learned_positions} rows of the "
            f"position table of model {spec.name!r}; choose shorter sequences"
        )
    for layer in spec.layers:
        for name in ("num_heads", "ffn_hidden_size"):
            if getattr(layer, name) is None:
                raise InputError(
                    f"--model: {text} says no {name}, which a layer is made from; add it to the "
                    "file"
                )
        Sharding().check(layer)
    if spec.vocab_size is None:
        raise InputError(
            f"--model: {text} says no vocab_size, which embedding and head are made from; add it "
            "to the file"
        )
    return SpecSource(architecture=spec)


def _import_factory(text: str, path: str) -> tuple[str, str, Factory]:
    """Return module, attribute and factory of `package.module:factory`."""
    module_name, _, attribute = path.partition(":")
    parts = (*module_name.split("."), attribute)
    if parts[-2] == "py" or not all(part.isidentifier() for part in parts):
        raise OptionError(
            f"--model: {text!r} names no Python object; write {_FORM}, without .py or slashes"
        )
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # as `python -m` has it; a command has its own folder there
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{module_name}.".startswith(f"{missing}."):
            raise InputError(
                f"--model: importing {module_name} raised {first_line(error)}"
            ) from None
        raise InputError(
            f"--model: there is no Python module {missing!r}; run from the folder that contains "
            "it, or name that folder in PYTHONPATH"
        ) from None
    factory = getattr(module, attribute, None)
    if not callable(factory):
        names = [name for name, value in vars(module).items() if callable(value)]
        near = difflib.get_close_matches(attribute, names, n=1, cutoff=0.5)
        problem = "cannot be called" if hasattr(module, attribute) else "does not exist"
        remedy = f"did you mean {near[0]}" if near else "name a function or class"
        raise InputError(
            f"--model: {attribute!r} of Python module {module_name} {problem}; {remedy}"
        )
    return module_name, attribute, factory
