"""Sources of `--model`: a shipped model or file, a Hugging Face model, or a custom module.

Before measuring, `load_source` checks the sizes of a model that a file describes, and runs a trial
forward pass of a custom module.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.documents.catalog import WITHOUT_SIZES, published_name
from autopar.errors import InputError, OptionError, nearest
from autopar.run.model import LayerSpec, ModelSpec
from autopar.run.plan import tensor_degrees
from profiler.model.layers.sharding import Sharding
from profiler.model.modules import (
    Built,
    LayerCall,
    blamed,
    call,
    capture_layers,
    check_positions,
    check_weights,
    fake_tensors,
    find_layers,
    first_line,
    made_here,
    main_output,
    needs_values,
    typical_layer,
)
from profiler.options import SizeOptions
from profiler.processes import available_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn

# --------------------------------------------------------------------------------------------------
# Layers of custom modules, sharded over a tensor-parallel group by their `parallelize_plan`.
#
# The group is the "fake" process group of torch, in which only one rank exists. DTensor gets the
# shapes of that rank, and collectives exchange no data.


def parallelized(layer: nn.Module, plan: Mapping[str, Any], degree: int) -> nn.Module:
    """Shard a layer in place by a tensor-parallel plan, as rank 0 of `degree` ranks; return it.

    Raises the exceptions of `parallelize_module` if the plan does not fit the layer.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.tensor.parallel import parallelize_module

    with unset_fake_temporarily():  # the mesh is real, since rank numbers are read from it
        mesh = _mesh(degree, next(layer.parameters()).device.type)
    result: nn.Module = parallelize_module(layer, mesh, dict(plan))
    return result


def _mesh(degree: int, device_type: str) -> Any:
    """Return a device mesh of `degree` ranks of torch's fake backend; this process is rank 0."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # only one process group exists at a time, and its size is the degree
    if dist.is_initialized() and dist.get_world_size() != degree:
        assert dist.get_backend() == "fake", dist.get_backend()
        dist.destroy_process_group()
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=degree, store=FakeStore())
    return init_device_mesh(device_type, (degree,))


# --------------------------------------------------------------------------------------------------
# Sources for all values of `--model`.


Factory = Callable[[int, int, Any], Any]
"""Function (num_layers, seq_length, torch dtype) that returns a model.

The result is a module with `make_batch`, or an object with `module`, `make_batch` and `layers`.
`layers` may be absent if the layers are the longest ModuleList of one class."""

_FORM = "py:package.module:factory"


@dataclass(frozen=True, kw_only=True)
class ModelSource(ABC):
    """Base class of the models that can be profiled."""

    sizes: ModelSpec
    """Sizes of the model. For a custom module only name, layers, lengths, hidden size and heads
    are set."""
    warnings: tuple[str, ...] = ()
    """Assumptions about the model, one sentence each."""

    @property
    @abstractmethod
    def spec(self) -> ModelSpec | None:
        """Architecture whose reference layers are measured; None for a custom module."""

    @property
    @abstractmethod
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that can be measured; at others, the planner scales results."""

    def check_degree(self, degree: int) -> str | None:
        """Return a warning for a degree that cannot be measured; None for one that can.


        Raises InputError: the degree does not divide the attention heads.
        """
        for layer in self.sizes.layers:
            if layer.num_heads is not None and layer.num_heads % degree:
                raise InputError(
                    f"--tp: {degree} does not divide the {layer.num_heads} attention heads of "
                    f"model {self.sizes.name!r}",
                    remedy="Use a divisor",
                )
        if degree in self.degrees:
            return None
        return (
            f"model {self.sizes.name!r} has no parallelize_plan: at tensor "
            f"degree {degree} nothing is measured, a rank is assumed to need "
            f"1/{degree} of the whole layer"
        )


@dataclass(frozen=True, kw_only=True)
class SpecSource(ModelSource):
    """Model of a shipped name, config.json or model.json, with all sizes known."""

    @property
    def spec(self) -> ModelSpec:
        """Architecture of the model."""
        return self.sizes

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that all layer types allow."""
        by_type = [set(tensor_degrees(layer)) for layer in self.sizes.layers]
        return tuple(sorted(set.intersection(*by_type)))


def load_source(
    text: str,
    *,
    seq_lengths: Sequence[int] | None = None,
    num_layers: int = 2,
    dtype: str = "bf16",
    sizes: SizeOptions = SizeOptions(),
) -> ModelSource:
    """Return the source of a `--model` value, after a trial forward pass of a custom module.

    text : value of `--model`.
    seq_lengths : lengths to measure, for a custom module; None means the factory's `seq_length`, or
        2,048.
    num_layers : layers of each type in the trial.
    sizes : options that replace sizes in the model's file; not allowed for a custom module.


    Raises OptionError: `sizes` are given for a module, or the name is not a Python object. Raises
    InputError: no model has that name, or it cannot be measured. Raises InstallError: torch or
    transformers is needed and missing.
    """
    kind, _, rest = text.partition(":")
    if kind in ("py", "hf") and sizes.given:
        option = next(iter(sizes.given)).replace("_", "-")
        raise OptionError(
            f"--{option}: {text} is a module with its own sizes", remedy=f"Remove --{option}"
        )
    if kind == "py":
        module_name, attribute, factory = _import_factory(text, rest)
        label = f"{module_name.rpartition('.')[2]}-{attribute}".replace("_", "-").lower()
    elif kind == "hf":
        from profiler.model.modules import hub_factory

        factory = hub_factory(rest)
        label = factory.name
    else:
        return _spec_source(text, sizes, num_layers)
    from profiler.environment import require_torch

    require_torch()

    return module_source(
        factory, text=text, label=label, seq_lengths=seq_lengths, num_layers=num_layers, dtype=dtype
    )


def _spec_source(text: str, sizes: SizeOptions, num_layers: int) -> SpecSource:
    # A profile is of single layers, so a name without sizes needs no number of layers here.
    without = text in WITHOUT_SIZES and published_name(text) is not None
    spec = sizes.load(text, num_layers=(num_layers,) if without else None)
    for layer in spec.layers:
        for name in ("num_heads", "ffn_hidden_size"):
            if getattr(layer, name) is None:
                raise InputError(
                    f"--model: {text} has no {name}, which a layer needs",
                    remedy="Add it to the file",
                )
        Sharding().check(layer)
    if spec.vocab_size is None:
        raise InputError(
            f"--model: {text} has no vocab_size, which embedding and head need",
            remedy="Add it to the file",
        )
    return SpecSource(sizes=spec)


def _import_factory(text: str, path: str) -> tuple[str, str, Factory]:
    """Import `package.module:factory`; return (module name, attribute name, factory).

    Raises OptionError for a malformed path, InputError if the import fails.
    """
    module_name, _, attribute = path.partition(":")
    parts = (*module_name.split("."), attribute)
    if parts[-2] == "py" or not all(part.isidentifier() for part in parts):
        raise OptionError(
            f"--model: {text!r} is not a Python object",
            remedy=f"Use {_FORM}, without .py or slashes",
        )
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # like `python -m`; a console script has its own folder there
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
            f"--model: there is no Python module {missing!r}",
            remedy="Run from its folder, or add that folder to PYTHONPATH",
        ) from None
    factory = getattr(module, attribute, None)
    if not callable(factory):
        names = [name for name, value in vars(module).items() if callable(value)]
        near = nearest(attribute, names)
        problem = "cannot be called" if hasattr(module, attribute) else "does not exist"
        remedy = f"Did you mean {near}?" if near else "Name a function or class"
        raise InputError(
            f"--model: {attribute!r} of Python module {module_name} {problem}", remedy=remedy
        )
    return module_name, attribute, factory


# --------------------------------------------------------------------------------------------------
# A custom module, created by a factory, as a source of layers to measure.
#
# The trial uses fake tensors, which cost neither memory nor time. If shapes depend on values (a
# router that sorts tokens), the trial uses real tensors at the shortest length.


_LENGTH = 2048
"""Sequence length if neither the options nor the factory set it, tokens."""
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_WIDTHS = ("hidden_size", "d_model", "n_embd")


@dataclass(frozen=True, kw_only=True)
class ModuleSource(ModelSource):
    """Custom module or Hugging Face model, created by a factory."""

    text: str
    """Value of `--model`, for messages."""
    factory: Factory
    parallelize_plan: Mapping[str, Any] | None = None
    """Tensor-parallel plan of one layer, for torch's `parallelize_module`; None if not given."""
    fakeable: bool = True
    """True if memory can be counted with fake tensors; False if shapes depend on values."""
    num_typical: int = 1
    """Smallest number of layers per type that includes a typical layer: 1, or 2 if the first layer
    has additional parameters, such as a table that all layers share."""

    @property
    def spec(self) -> None:
        """None: the module itself is measured."""
        return

    @property
    def degrees(self) -> tuple[int, ...]:
        """Divisors of the number of heads; only 1 without a `parallelize_plan`."""
        heads = (self.sizes.layers[0].num_heads or 1) if self.parallelize_plan is not None else 1
        return tuple(t for t in range(1, heads + 1) if heads % t == 0)

    def build(
        self,
        num_layers: int,
        *,
        seq_length: int | None = None,
        dtype: str = "bf16",
        device: torch.device | str = "cpu",
    ) -> Built:
        """Call the factory and return the model on a device, with its layers and `make_batch`.

        Inside FakeTensorMode, its tensors are fake. Raises InputError if the factory fails or its
        result is unusable.

        num_layers : layers of each type.
        seq_length : longest sequence of a batch; None means that of `sizes`.
        """
        length = seq_length or max(layer.seq_length for layer in self.sizes.layers)
        return _make(self.factory, self.text, num_layers, length, dtype, device)[1]

    def layer_calls(
        self, built: Built, batch: int, seq_length: int, *, degree: int = 1
    ) -> list[LayerCall]:
        """Return the typical layer of each type, with the arguments that the model passes to it.

        degree : tensor-parallel degree. Above 1, `parallelize_plan` shards these layers of `built`
        in place, as on one rank.
        """
        calls = capture_layers(built, batch, seq_length, self.text)
        if degree > 1:
            assert self.parallelize_plan is not None, "only degrees in `degrees` can be built"
            what = f"{self.text}: parallelize_plan at degree {degree}"
            for one in calls:
                # names in the plan are relative to the layer, not to the wrapper around it
                blamed(what, partial(parallelized, one.module.layer, self.parallelize_plan, degree))
        return calls


def module_source(
    factory: Factory,
    *,
    text: str,
    label: str,
    seq_lengths: Sequence[int] | None = None,
    num_layers: int = 2,
    dtype: str = "bf16",
) -> ModuleSource:
    """Return the source of a factory, after a trial forward pass of its model.

    text : value of `--model`, for messages.
    label : name of the model. Other parameters are as in `load_source`.

    Raises InputError if the trial fails.
    """
    lengths = tuple(seq_lengths or (getattr(factory, "seq_length", None) or _LENGTH,))
    assumed = []
    made, built, widths, flaw = _tried(factory, text, num_layers, lengths, dtype)
    if flaw is not None:
        assumed.append(
            f"{text}: memory is counted with allocated tensors, and needs that memory: {flaw}"
        )
    assumed += _frozen(built, text)
    # if untypical, two layers must be made, so that the last one is typical
    typical = all(typical_layer(of_type) is of_type[0] for of_type in built.layers)
    owners = (made, built.module, getattr(built.module, "config", None))
    heads = _number((*owners, *built.layers[0][0].modules()), _HEADS)
    if heads is None:
        assumed.append(f"{text}: the number of heads is unknown; using 1. Set num_heads")
    hidden = _number(owners, _WIDTHS)
    plan = next(
        (p for o in owners if (p := getattr(o, "parallelize_plan", None)) is not None), None
    )
    if plan is not None and not isinstance(plan, Mapping):
        raise InputError(
            f"{text}: parallelize_plan is a {type(plan).__name__}, expected a dict of names inside "
            "a layer to styles of torch.distributed.tensor.parallel"
        )
    layers = (
        LayerSpec(
            num_layers=num_layers,
            seq_length=max(lengths),
            hidden_size=hidden or width,
            num_heads=heads or 1,
        )
        for width in widths
    )
    return ModuleSource(
        text=text,
        factory=factory,
        sizes=ModelSpec(name=label, layers=tuple(layers)),
        parallelize_plan=plan,
        fakeable=flaw is None,
        num_typical=1 if typical else 2,
        warnings=tuple(assumed),
    )


def _tried(
    factory: Factory, text: str, num_layers: int, lengths: Sequence[int], dtype: str
) -> tuple[Any, Built, list[int], str | None]:
    """Run the trial; return (factory's result, model, hidden size per layer type, flaw).

    The flaw is a phrase that explains why fake tensors do not work for the model, or None. Raises
    InputError if the trial fails, also with real tensors.
    """
    made = built = None
    try:
        with fake_tensors():
            made, built = _make(factory, text, num_layers, max(lengths), dtype, "cpu")
            return made, built, _run_once(built, max(lengths), text), None
    except needs_values() as error:
        flaw = f"its shapes depend on values ({first_line(error)})"
    except InputError as error:
        # torch may not know the output shapes of an operator for fake tensors
        if built is None or not isinstance(error.__cause__, RuntimeError):
            raise
        flaw = f"it does not run on tensors without contents ({first_line(error.__cause__)})"
        # with real tensors, the process would run out of memory
        if not _fits(built):
            raise
    if built is not None and not _fits(built):
        raise InputError(f"{text}: {flaw}, and with allocated tensors it does not fit into memory")
    # the shortest length, since a trial with real tensors costs a full forward
    made, built = _make(factory, text, num_layers, min(lengths), dtype, "cpu")
    return made, built, _run_once(built, min(lengths), text), flaw


def _run_once(built: Built, seq_length: int, text: str) -> list[int]:
    """Return the hidden size of each layer type, after one forward of every type and of the model.

    Raises InputError if a forward fails or its output cannot start a backward.
    """
    check_positions(built.module, seq_length, text)
    widths = []
    calls = capture_layers(built, 1, seq_length, text)
    for layer, double in zip(calls, capture_layers(built, 2, seq_length, text), strict=True):
        name = f"{text}: layer {type(layer.module.layer).__name__}"
        _check_gradient(blamed(name, partial(layer.module, *layer.inputs)), name)
        shapes = [tuple(one.inputs[0].shape) for one in (layer, double)]
        # a wrong batch size would make the times per sample wrong
        if double.inputs[0].numel() != 2 * layer.inputs[0].numel():
            raise InputError(
                f"{name} receives a hidden state of shape {list(shapes[0])} for "
                f"one sample and of {list(shapes[1])} for two",
                remedy=("Let make_batch(batch, seq_length) return the given number of samples"),
            )
        widths.append(shapes[0][-1])
    data = built.make_batch(1, seq_length)
    output = blamed(f"{text}: the forward", lambda: call(built.module, data))
    name = f"{text}: the module {type(built.module).__name__}"
    _check_gradient(main_output(output, name), name)
    return widths


def _check_gradient(output: torch.Tensor, name: str) -> None:
    """Raise InputError if a backward cannot start from the output."""
    if not output.requires_grad:
        raise InputError(
            f"{name} returns a tensor without gradient, so there is no backward to measure",
            remedy="Call its forward without torch.no_grad() and detach()",
        )


def rehearse(source: ModuleSource, lengths: Sequence[int], dtype: str, device: Any) -> None:
    """Run the smallest model with real tensors; raise InputError if it fails.

    Fake tensors do not reveal tokens or positions beyond their tables, non-finite outputs or
    weights, or operators that the device does not support.
    """
    import torch

    text = source.text
    # the longest length, so that position tables are large enough for all
    built = source.build(source.num_typical, seq_length=max(lengths), dtype=dtype, device=device)
    capture_layers(built, 1, max(lengths), text)  # stops at the last layer, before the head
    for layer in capture_layers(built, 1, min(lengths), text):
        name = f"{text}: layer {type(layer.module.layer).__name__}"
        output = blamed(name, partial(layer.module, *layer.inputs))
        if not bool(torch.isfinite(output).all()):
            raise InputError(
                f"{name} returns NaN or infinite values for random tokens, whose "
                "times differ from those of training",
                remedy="Initialise its weights, or use another --dtype",
            )


def _fits(built: Built) -> bool:
    """Return True if the parameters and gradients of a model fit into the free host memory."""
    # weights and gradients
    needed: float = 2.0 * sum(p.nbytes for p in built.module.parameters())
    return needed < available_bytes()


def _frozen(built: Built, text: str) -> list[str]:
    """Return a warning if layers contain frozen parameters, else an empty list."""
    every = [p for of_type in built.layers for p in typical_layer(of_type).parameters()]
    share = sum(p.numel() for p in every if not p.requires_grad) / sum(p.numel() for p in every)
    said = (
        f"{text}: {100 * share:.0f} % of the parameters of a layer have no "
        "gradient; times and activations reflect that, parameter_size counts "
        "all"
    )
    return [said] if share else []


def _make(
    factory: Factory,
    text: str,
    num_layers: int,
    seq_length: int,
    dtype: str,
    device: torch.device | str,
) -> tuple[Any, Built]:
    """Call the factory; return (its result, the model), after all checks without a forward.

    Raises InputError if the factory fails or its result is unusable.
    """
    from torch import nn

    from profiler.measure import torch_dtype
    from profiler.model.layers.blocks import tensor_defaults

    element = torch_dtype(dtype)

    def make(where: torch.device | str) -> Any:
        with tensor_defaults(element, where):
            return blamed(f"{text}: the factory", lambda: factory(num_layers, seq_length, element))

    made = made_here(make, _module_of, device)
    module = _module_of(made)
    if not isinstance(module, nn.Module):
        what = "None" if made is None else f"a {type(made).__name__}"
        raise InputError(
            f"{text}: the factory returned {what}",
            remedy=("Return an nn.Module, or an object with .module, .make_batch and .layers"),
        )
    own_batch = getattr(made, "make_batch", None)
    if not callable(own_batch):
        raise InputError(
            f"{text}: {type(made).__name__} has no make_batch(batch, seq_length)",
            remedy="Add it: it returns the arguments of one call of the module",
        )
    # .layers of a module may be anything, so its layers are found by class
    stated = None if made is module else getattr(made, "layers", None)
    layers = find_layers(module, text) if stated is None else _checked_layers(stated, text)
    for of_type in layers:
        # the first layer may contain shared parameters; the last one is typical
        if next(of_type[-1].parameters(), None) is None:
            raise InputError(
                f"{text}: layer {type(of_type[0]).__name__} has no parameters to train or divide",
                remedy="Name layers with parameters in .layers",
            )
        if len(of_type) != num_layers:
            raise InputError(
                f"{text}: the factory returned {len(of_type)} layers of "
                f"{type(of_type[0]).__name__} for num_layers {num_layers}",
                remedy="Build num_layers layers",
            )
    if not any(p.requires_grad for p in module.parameters()):
        raise InputError(
            f"{text}: {type(module).__name__} has no parameter with a gradient, "
            "so there is no training to measure",
            remedy="Set requires_grad for some parameters",
        )
    _check_dtype(layers, element, text)
    check_weights(module, text)
    return made, Built(module, _batches(own_batch, text, device, element), layers)


def _module_of(made: Any) -> Any:
    """Return the module of a factory's result: the result itself or its `.module`."""
    from torch import nn

    return made if isinstance(made, nn.Module) else getattr(made, "module", None)


def _batches(
    own: Callable[[int, int], Any], text: str, device: torch.device | str, element: torch.dtype
) -> Callable[[int, int], Any]:
    """Return `own` as a function that creates tensors on `device` and raises only InputError."""

    import torch
    from torch.utils._pytree import tree_leaves

    from profiler.model.layers.blocks import tensor_defaults

    def make_batch(batch: int, seq_length: int) -> Any:
        with tensor_defaults(element, device):
            made = blamed(f"{text}: make_batch", lambda: own(batch, seq_length))
        expected = torch.device(device).type
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor) and one.device.type != expected:
                raise InputError(
                    f"{text}: make_batch returned a tensor on {one.device.type}, "
                    f"but the model is on {expected}",
                    remedy="Remove device=: the default device is set",
                )
        return made

    return make_batch


def _checked_layers(stated: Any, text: str) -> list[list[Any]]:
    """Return `.layers` as one list per layer type; raise InputError if it is malformed."""
    from torch import nn

    try:
        layers = [list(of_type) for of_type in stated]
    except TypeError:
        layers = []
    for of_type in layers:
        if not of_type or not all(isinstance(layer, nn.Module) for layer in of_type):
            layers = []
            break
        if len({type(layer) for layer in of_type}) > 1:
            raise InputError(
                f"{text}: a list of .layers mixes classes",
                remedy="Use one list per layer type",
            )
    if not layers:
        raise InputError(
            f"{text}: .layers is not a list of lists of modules",
            remedy="Use [list(model.blocks)], one list per layer type",
        )
    return layers


def _check_dtype(layers: list[list[Any]], element: torch.dtype, text: str) -> None:
    """Raise InputError if at most half of the layer parameters have dtype `element`."""
    right = total = 0
    for of_type in layers:
        for parameter in of_type[0].parameters():
            if parameter.is_floating_point():
                total += parameter.numel()
                right += parameter.numel() if parameter.dtype == element else 0
    # norms may stay in fp32
    if total and 2 * right <= total:
        other = next(p.dtype for p in layers[0][0].parameters() if p.dtype != element)
        names = [str(t).removeprefix("torch.") for t in (other, element)]
        raise InputError(
            f"{text}: the factory returned weights in {names[0]}, expected {names[1]}",
            remedy="Pass its dtype to the modules",
        )


def _number(owners: Sequence[Any], names: Sequence[str]) -> int | None:
    """Return the first attribute of `owners` among `names` that is a positive integer, or None."""
    for owner in owners:
        for name in names:
            value = getattr(owner, name, None)
            # True is an int in Python
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None
