"""Custom modules: find their layers, call them, and report their errors.

A custom model is any `nn.Module` with repeated layers. Each layer is measured with the arguments
that the model passes to it, which are captured in a forward pass.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from autopar.errors import AutoparError, InputError, InstallError
from autopar.records import Record
from profiler.measure import out_of_memory

if TYPE_CHECKING:
    import torch
    from torch import nn

# --------------------------------------------------------------------------------------------------
# Custom modules with fake tensors, which have shapes and no contents.
#
# A module is not built inside FakeTensorMode: there, `module.to(dtype)` fails, which most factories
# call. It is built with meta tensors outside, or with real tensors if its code does not support
# meta tensors. Afterwards its tensors are replaced by fake ones.


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Activate FakeTensorMode, without its log messages about exceptions that are also raised."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.disabled = before


def needs_values() -> tuple[type[Exception], ...]:
    """Return the exception types that torch raises if an operation needs values of fake tensors."""
    from torch._subclasses import fake_tensor

    names = (
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "UnsupportedFakeTensorException",
        "UnsupportedOperatorException",
    )
    return tuple(getattr(fake_tensor, name) for name in names if hasattr(fake_tensor, name))


def made_here(
    make: Callable[[torch.device | str], Any],
    module_of: Callable[[Any], Any],
    device: torch.device | str,
) -> Any:
    """Return the result of `make` on a device; inside FakeTensorMode its tensors are fake.

    make : function from a device to the factory's result; it raises InputError on failure.
    module_of : function from that result to the module.
    """
    from torch import nn
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily() as mode:
        if mode is None:
            return make(device)
        try:
            made = make("meta")
        except InputError as error:
            # the code does not support meta tensors: build with real ones
            if "meta" not in str(error).lower():
                raise
            made = make("cpu")
    module = module_of(made)
    if isinstance(module, nn.Module):
        replace_tensors(module, device)
    return made


def replace_tensors(module: nn.Module, device: torch.device | str) -> None:
    """Replace every tensor of a module by a new one on a device; tied tensors stay tied."""
    import torch
    from torch import nn

    new: dict[int, torch.Tensor] = {}
    old: list[torch.Tensor] = []  # kept alive, so that no id is reused

    def replaced(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in new:
            old.append(tensor)
            empty = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
            )
            new[id(tensor)] = (
                nn.Parameter(empty, requires_grad=tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else empty
            )
        return new[id(tensor)]

    for owner in module.modules():
        held = [
            *owner.named_parameters(recurse=False, remove_duplicate=False),
            *owner.named_buffers(recurse=False, remove_duplicate=False),
            # tensors that are neither parameters nor buffers
            *((name, x) for name, x in vars(owner).items() if isinstance(x, torch.Tensor)),
        ]
        for name, tensor in held:
            setattr(owner, name, replaced(tensor))


# --------------------------------------------------------------------------------------------------
# A custom model: its layers, their arguments, and errors of its code.


class Built(NamedTuple):
    """Model with few layers, with its `make_batch` and its layers."""

    module: nn.Module
    make_batch: Callable[[int, int], Any]
    """Function (batch, seq_length) that returns the input of `call`: a tensor, tuple or dict."""
    layers: list[list[nn.Module]]
    """Layers by layer type, in execution order."""


class LayerCall(NamedTuple):
    """One layer and the arguments that its model passes to it."""

    module: nn.Module
    """The layer with all arguments bound except `inputs`; returns only the hidden state."""
    inputs: tuple[torch.Tensor, ...]
    """Inputs with a gradient: the hidden state and, if any, encoder states."""
    shared: tuple[torch.Tensor, ...] = ()
    """Tensors other than the hidden state, which all layers share: encoder states, positions,
    masks."""


class _CapturedError(Exception):
    """Internal exception that ends a forward pass once all layers are captured."""


def first_line(error: BaseException) -> str:
    """Return type and first line of an exception, at most 300 characters, no final period."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text[:300].rstrip(".")


def blamed(what: str, action: Callable[[], Any]) -> Any:
    """Return the result of `action`; convert its exceptions to an InputError that names `what`.

    Errors of autopar, out-of-memory errors and the exceptions of `needs_values` are raised
    unchanged.
    """
    try:
        return action()
    except (Exception, SystemExit) as error:
        if isinstance(error, (AutoparError, _CapturedError)) or out_of_memory(error):
            raise
        if isinstance(error, needs_values()):
            raise
        hint = ""
        if isinstance(error, IndexError):
            hint = "Check that tokens and positions are within their tables"
        elif "in-place operation" in str(error):
            hint = "Write x = x + y: an earlier layer needs its output"
        raise InputError(f"{what} raised {first_line(error)}", remedy=hint) from error


def find_layers(module: nn.Module, where: str, *, several: bool = False) -> list[list[nn.Module]]:
    """Return the layers by type: the longest `nn.ModuleList` whose modules have one class.

    Lists inside layers are ignored. Raises InputError if there is no such list, or if several have
    the largest length and `several` is False.

    several : True to return all lists of the largest length, as for an encoder and a decoder.
    """
    found = dict(_outermost_lists(module, ""))
    if not found:
        raise InputError(
            f"{where}: {type(module).__name__} has no nn.ModuleList with modules of one class",
            remedy="Keep the layers in one list, or return an object with .layers",
        )
    length = max(map(len, found.values()))
    longest = {name: layers for name, layers in found.items() if len(layers) == length}
    if len(longest) > 1 and not several:
        raise InputError(
            f"{where}: {type(module).__name__} has {len(longest)} lists of {length} modules "
            f"({', '.join(longest)})",
            remedy="Return an object whose .layers contains the layers",
        )
    return list(longest.values())


def call(module: nn.Module, batch: Any) -> Any:
    """Call a module with a batch: a tensor, a tuple or list of arguments, or a dict of them."""
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, tuple | list) else module(batch)


def main_output(output: Any, where: str) -> torch.Tensor:
    """Return the output tensor that starts the backward, or that the next layer receives.

    This is the first floating-point tensor among: the output; its attribute or key `loss`,
    `logits`, `last_hidden_state` or `hidden_states`; its first element. Raises InputError if there
    is none.
    """
    import torch

    candidates: list[Any] = [output]
    for name in ("loss", "logits", "last_hidden_state", "hidden_states"):
        candidates.append(getattr(output, name, None))
        if isinstance(output, Mapping):
            candidates.append(output.get(name))
    if isinstance(output, tuple | list) and output:
        candidates.append(output[0])
    for candidate in candidates:
        if isinstance(candidate, torch.Tensor) and candidate.is_floating_point():
            return candidate
    what = "None" if output is None else f"a {type(output).__name__}"
    if isinstance(output, tuple | list):
        what += f" that starts with {type(output[0]).__name__}" if output else " without elements"
    elif isinstance(output, torch.Tensor):
        what = f"a tensor of {str(output.dtype).removeprefix('torch.')}"
    raise InputError(
        f"{where} returns {what}",
        remedy=(
            "Return the hidden state, a tuple that starts with it, or a dict or "
            "object with loss, logits or hidden_states"
        ),
    )


def check_weights(module: nn.Module, where: str) -> None:
    """Raise InputError if a parameter is not finite or a buffer contains NaN.

    Fake and meta tensors are ignored.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta or isinstance(tensor, FakeTensor) or not tensor.is_floating_point():
            continue
        # masks are buffers that contain -inf on purpose
        bad = tensor.isnan() if not isinstance(tensor, torch.nn.Parameter) else ~tensor.isfinite()
        if bool(bad.any()):
            raise InputError(
                f"{where}: the weight {name} holds NaN or infinite values",
                remedy="Initialise it: non-finite numbers change the times",
            )


def check_positions(module: nn.Module, seq_length: int, where: str) -> None:
    """Raise InputError if a position embedding, found by its name, has under `seq_length` rows."""
    from torch import nn

    for name, table in module.named_modules():
        last = name.rpartition(".")[2].lower()
        if (
            isinstance(table, nn.Embedding)
            and ("position" in last or last.startswith("pos") or last == "wpe")
            and table.num_embeddings < seq_length
        ):
            raise InputError(
                f"{where}: {seq_length} tokens are more than the {table.num_embeddings} rows of "
                f"the position table {name}",
                remedy="Use shorter sequences",
            )


def capture_layers(built: Built, batch: int, seq_length: int, where: str) -> list[LayerCall]:
    """Return the typical layer of every type with the arguments of its first call in a forward.

    The forward pass ends as soon as all layers are captured. Raises InputError if it fails, a
    layer is never called, or it receives no floating-point tensor.
    """
    import torch

    chosen = [typical_layer(layers) for layers in built.layers]
    found: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kind = next(k for k, one in enumerate(chosen) if one is module)
        # for a layer that is called several times, the first call counts
        found.setdefault(kind, (args, kwargs))
        if len(found) == len(chosen):
            raise _CapturedError

    hooks = [one.register_forward_pre_hook(keep, with_kwargs=True) for one in chosen]
    data = built.make_batch(batch, seq_length)
    try:
        # gradients must be on: `requires_grad` tells which arguments the backward passes through
        with torch.enable_grad():
            blamed(f"{where}: the forward", lambda: call(built.module, data))
    except _CapturedError:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    calls = []
    for kind, one in enumerate(chosen):
        name = f"{where}: layer {type(one).__name__}"
        if kind not in found:
            raise InputError(
                f"{name} is not called in the model's forward",
                remedy="Name its layers in .layers",
            )
        calls.append(_bound(one, *found[kind], name))
    return calls


def typical_layer(layers: Sequence[nn.Module]) -> nn.Module:
    """Return the first layer, or the last one if the first has different parameters.

    The first layer may contain parameters that all layers use, such as T5's relative position
    table.
    """
    shapes = [
        [(name, tuple(p.shape)) for name, p in layer.named_parameters()]
        for layer in (layers[0], layers[-1])
    ]
    return layers[0] if shapes[0] == shapes[1] else layers[-1]


def _bound(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], where: str
) -> LayerCall:
    """Return the layer with all arguments bound, except the hidden state and encoder states.

    args, kwargs : arguments that the model passes to the layer.

    Raises InputError without a floating-point tensor among them.
    """
    import torch
    from torch import nn
    from torch.utils._pytree import tree_leaves

    values: dict[int | str, Any] = dict(enumerate(args))
    values.update(kwargs)
    floating = {
        key: value
        for key, value in values.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    if not floating:
        raise InputError(
            f"{where} receives no floating-point tensor", remedy="Pass the hidden state to it"
        )
    hidden = next(iter(floating))
    # other arguments with gradients are encoder states; positions and masks have none
    free = [hidden, *(k for k, v in floating.items() if k != hidden and v.requires_grad)]
    fixed = {key: _detached(value) for key, value in values.items() if key not in free}
    shape = tuple(floating[hidden].shape)

    class Call(nn.Module):
        """Wrapper that calls a layer with its model's arguments and returns the hidden state."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            """Return the hidden state after the layer."""
            now = {**fixed, **dict(zip(free, inputs, strict=True))}
            positional = [now[k] for k in range(len(args))]
            named = {k: v for k, v in now.items() if isinstance(k, str)}
            output = main_output(self.layer(*positional, **named), where)
            if tuple(output.shape) != shape:
                raise InputError(
                    f"{where} returns a tensor of shape {list(output.shape)} first, expected the "
                    f"shape of the hidden state, {list(shape)}",
                    remedy="Return the hidden state first",
                )
            return output

    Call.__name__ = type(layer).__name__  # for messages
    # in a model, gradients flow on to the layer before
    inputs = tuple(floating[key].detach().requires_grad_() for key in free)
    shared = (*inputs[1:], *(x for x in tree_leaves(fixed) if isinstance(x, torch.Tensor)))
    return LayerCall(Call(), inputs, shared)


def _detached(value: Any) -> Any:
    """Return a copy of a value with detached tensors; containers are copied."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach()
    if type(value) in (tuple, list):
        return type(value)(_detached(element) for element in value)
    if type(value) is dict:
        return {key: _detached(element) for key, element in value.items()}
    return value


def _outermost_lists(module: nn.Module, prefix: str) -> Iterator[tuple[str, list[nn.Module]]]:
    """Yield (name, modules) of every outermost ModuleList whose modules have one class."""
    from torch import nn

    for name, child in module.named_children():
        modules = list(child) if isinstance(child, nn.ModuleList) else []
        if modules and len({type(one) for one in modules}) == 1:
            yield prefix + name, modules
        else:
            yield from _outermost_lists(child, f"{prefix}{name}.")


# --------------------------------------------------------------------------------------------------
# Models of the transformers library (`hf:NAME_OR_PATH`), created from their configurations.
#
# Nothing is downloaded. The configuration is a local file, a folder, or in the library's cache
# after an earlier download; weights are random. The library is imported only when needed.


_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Configuration keys of the number of layers."""
_OTHER_COUNTS = ("num_decoder_layers", "encoder_layers", "decoder_layers")
"""Additional keys of encoder-decoders; all their stacks get the same number of layers."""
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx")
_DROPOUTS = ("dropout", "drop", "pdrop", "dropout_rate", "dropout_prob")
"""Suffixes of configuration keys for dropout probabilities."""


class HubModel(Record):
    """transformers model with random weights, created by a `HubFactory`."""

    module: nn.Module
    layers: list[list[nn.Module]]
    vocab_size: int

    def make_batch(self, batch: int, seq_length: int) -> dict[str, torch.Tensor]:
        """Return random tokens as `input_ids` and `labels`, so that the model returns its loss."""
        import torch

        tokens = torch.randint(0, self.vocab_size, (batch, seq_length))
        return {"input_ids": tokens, "labels": tokens.clone()}


class HubFactory(Record):
    """Factory of transformers models from one configuration, without dropout."""

    library: Any
    config: Any
    text: str

    @property
    def name(self) -> str:
        """Last part of the name or path."""
        path = self.text.rstrip("/").removesuffix("/config.json")
        return path.rpartition("/")[2] or str(getattr(self.config, "model_type", "model"))

    @property
    def seq_length(self) -> int | None:
        """Longest sequence in the configuration, at most 4,096 tokens; None if not given."""
        for key in _LENGTHS:
            value = getattr(self.config, key, None)
            if isinstance(value, int) and value > 0:
                return min(value, 4096)
        return None

    def __call__(self, num_layers: int, seq_length: int, dtype: torch.dtype) -> HubModel:
        """Return a model with random weights and `num_layers` layers of each type.


        Raises InputError: the configuration gives no number of layers, or the model cannot be
        built.
        """
        values = self._values(num_layers, str(dtype).removeprefix("torch."))
        config = blamed(f"hf:{self.text}: the configuration", lambda: self._rebuilt(values))
        module = blamed(
            f"hf:{self.text}: the model", lambda: self._kind(config).from_config(config)
        )
        several = bool(getattr(config, "is_encoder_decoder", False))
        return HubModel(
            module=module.train(),
            layers=find_layers(module, f"hf:{self.text}", several=several),
            vocab_size=int(getattr(config, "vocab_size", 0)) or 2,
        )

    def _rebuilt(self, values: dict[str, Any]) -> Any:
        return type(self.config).from_dict(values)

    def _values(self, num_layers: int, dtype: str) -> dict[str, Any]:
        """Return the configuration with `num_layers` layers and `dtype`, no dropout, no cache."""
        values = dict(self.config.to_dict())
        count = next((key for key in _COUNTS if isinstance(values.get(key), int)), None)
        if count is None:
            raise InputError(
                f"hf:{self.text}: the configuration has none of {', '.join(_COUNTS)}",
                remedy="Measure the model as py:package.module:factory",
            )
        before = values[count]
        for key in (count, *(key for key in _OTHER_COUNTS if isinstance(values.get(key), int))):
            values[key] = num_layers
        for key, value in values.items():
            if isinstance(value, list) and len(value) == before and key.endswith("layer_types"):
                # one entry per layer: cut or repeated to the number of layers that are built
                values[key] = [value[k % before] for k in range(num_layers)]
            # True is an int in Python, but no probability
            share = isinstance(value, int | float) and not isinstance(value, bool)
            if share and key.endswith(_DROPOUTS):
                values[key] = 0.0
        if "use_cache" in values:
            # keys and values are cached only for generation, which is not measured
            values["use_cache"] = False
        if values.get("is_encoder_decoder") and values.get("decoder_start_token_id") is None:
            # the first token of the decoder's input; its value does not affect any size
            values["decoder_start_token_id"] = values.get("pad_token_id") or 0
        # older versions read `torch_dtype`, newer ones `dtype`
        return {**values, "torch_dtype": dtype, "dtype": dtype}

    def _kind(self, config: Any) -> Any:
        """Return the transformers auto class of the configuration: seq2seq, masked or causal LM."""
        if getattr(config, "is_encoder_decoder", False):
            return self.library.AutoModelForSeq2SeqLM
        trained = getattr(config, "architectures", None)
        masked = getattr(self.library, "MODEL_FOR_MASKED_LM_MAPPING", None) or ()
        if not trained:
            encodes = type(config) in masked and not getattr(config, "is_decoder", False)
        else:
            encodes = any(name.endswith(("ForMaskedLM", "ForPreTraining")) for name in trained)
        library = self.library
        return library.AutoModelForMaskedLM if encodes else library.AutoModelForCausalLM


def hub_factory(name_or_path: str, *, library: Any = None) -> HubFactory:
    """Return the factory for a transformers configuration; nothing is downloaded.

    library : replacement of the transformers module, for tests.

    Raises InstallError if transformers is missing, and InputError if the configuration is not on
    this machine or needs custom code.
    """
    if not name_or_path:
        raise InputError("--model: 'hf:' without a name", remedy="Use hf:NAME or hf:FOLDER")
    if library is None:
        try:
            library = importlib.import_module("transformers")
        except ImportError as error:
            raise InstallError(
                f"hf: needs transformers, which cannot be imported ({first_line(error)})",
                remedy="Run `pip install 'autopar[hf]'`",
            ) from None
    quiet = getattr(getattr(library, "logging", None), "set_verbosity_error", None)
    if callable(quiet):
        quiet()  # its advice on generation and special tokens is irrelevant here
    try:
        config = library.AutoConfig.from_pretrained(
            name_or_path, local_files_only=True, trust_remote_code=False
        )
    except OSError:
        raise InputError(
            f"--model: no configuration {name_or_path!r} on this machine (nothing is downloaded)",
            remedy="Give a folder or config.json, or download it first",
        ) from None
    except Exception as error:
        raise InputError(f"--model: hf:{name_or_path} raised {first_line(error)}") from None
    return HubFactory(library=library, config=config, text=name_or_path)
