"""Models of the library transformers (`hf:NAME_OR_PATH`), made from their configuration alone.

Nothing is downloaded: the configuration is a local file, a folder, or one that an earlier download
left in the library's cache, and weights are random. The library is imported when it is needed.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.errors import InputError, InstallError
from profiler.model.modules import blamed, find_layers, first_line

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["HubFactory", "HubModel", "hub_factory"]

_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""What configurations call the number of layers."""
_OTHER_COUNTS = ("num_decoder_layers", "encoder_layers", "decoder_layers")
"""What encoder-decoders have besides; all their stacks get the same number."""
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx")
_DROPOUTS = ("dropout", "drop", "pdrop", "dropout_rate", "dropout_prob")
"""Last words of what configurations call a share of dropped values."""


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """What a `HubFactory` makes."""

    module: nn.Module
    layers: list[list[nn.Module]]
    vocab_size: int

    def make_batch(self, batch: int, seq_length: int) -> dict[str, torch.Tensor]:
        """Return random tokens, and the same as labels, so that the model computes its loss."""
        import torch

        tokens = torch.randint(0, self.vocab_size, (batch, seq_length))
        return {"input_ids": tokens, "labels": tokens.clone()}


@dataclass(frozen=True, kw_only=True)
class HubFactory:
    """Makes models of one configuration with any number of layers, without dropout."""

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
        """Longest sequence that the configuration speaks of, at most 4,096; None: of none."""
        for key in _LENGTHS:
            value = getattr(self.config, key, None)
            if isinstance(value, int) and value > 0:
                return min(value, 4096)
        return None

    def __call__(self, num_layers: int, seq_length: int, dtype: torch.dtype) -> HubModel:
        """Return a model with random weights.

        Raises
        ------
        InputError: the configuration says no number of layers, or has fewer positions.
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
        """Return the configuration with so many layers, no dropout, no cache, of one type."""
        values = dict(self.config.to_dict())
        count = next((key for key in _COUNTS if isinstance(values.get(key), int)), None)
        if count is None:
            raise InputError(
                f"hf:{self.text}: the configuration has none of {', '.join(_COUNTS)}; measure the "
                "model as py:package.module:factory"
            )
        before = values[count]
        for key in (count, *(key for key in _OTHER_COUNTS if isinstance(values.get(key), int))):
            values[key] = num_layers
        for key, value in values.items():
            if isinstance(value, list) and len(value) == before and key.endswith("layer_types"):
                values[key] = [value[k % before] for k in range(num_layers)]
            share = isinstance(value, int | float) and not isinstance(value, bool)
            if share and key.endswith(_DROPOUTS):
                values[key] = 0.0
        if "use_cache" in values:
            values["use_cache"] = False
        if values.get("is_encoder_decoder") and values.get("decoder_start_token_id") is None:
            # labels become the decoder's tokens behind it; which one it is changes no size
            values["decoder_start_token_id"] = values.get("pad_token_id") or 0
        # older versions read the first, newer ones the second
        return {**values, "torch_dtype": dtype, "dtype": dtype}

    def _kind(self, config: Any) -> Any:
        """Return the class that makes the model with its head: of what it was trained for."""
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
    """Return the factory of a configuration that lies on this machine.

    library : stands in for transformers. Raises InstallError without it, InputError where there is
    no such configuration here or it needs code of its own.
    """
    if not name_or_path:
        raise InputError("--model: 'hf:' names no model; write hf:NAME or hf:FOLDER")
    if library is None:
        try:
            library = importlib.import_module("transformers")
        except ImportError as error:
            raise InstallError(
                f"transformers cannot be imported ({first_line(error)}), which hf: needs; install "
                "it with `pip install 'autopar[hf]'`"
            ) from None
    quiet = getattr(getattr(library, "logging", None), "set_verbosity_error", None)
    if callable(quiet):
        quiet()  # it advises on generating and on special tokens, which nothing here depends on
    try:
        config = library.AutoConfig.from_pretrained(
            name_or_path, local_files_only=True, trust_remote_code=False
        )
    except OSError:
        raise InputError(
            f"--model: there is no configuration {name_or_path!r} on this machine, and nothing is "
            "downloaded; name a folder or config.json, or download it first"
        ) from None
    except Exception as error:
        raise InputError(f"--model: hf:{name_or_path} raised {first_line(error)}") from None
    return HubFactory(library=library, config=config, text=name_or_path)
