"""Arguments of ms-swift 4.6 in the words of transformers and TRL, and its named configurations.

Sources: `swift/arguments`, `swift/trainers/arguments.py`, `swift/config` and `swift/cli/main.py` in
the wheel of 4.6.0. `search.engines.huggingface.script` replaces the arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from autopar.records import Record

_Words = dict[str, tuple[str, ...]]


class RenamedArguments(Record):
    """Arguments in the words of transformers and TRL."""

    flags: Mapping[str, tuple[str, ...]]
    taken: tuple[str, ...]
    """Sentences on defaults."""


_NAMES: Mapping[str, str] = {
    "model": "model-name-or-path",
    "train-type": "tuner-type",  # release 3
    "attn-impl": "attn-implementation",
    "target-modules": "lora-target-modules",
    "bnb-4bit-use-double-quant": "use-bnb-nested-quant",
}
"""Argument of ms-swift -> argument with the same values."""
_BATCH = 16
"""Sequences of a step that the default of `gradient_accumulation_steps` reaches."""


def renamed(given: Mapping[str, tuple[str, ...]], world_size: int) -> RenamedArguments:
    """Return arguments of `swift sft` and `swift pt`, with their defaults.

    world_size : number of GPUs, which determines the default accumulation.
    """
    # names of a person, not of a model
    found = {name: words for name, words in given.items() if name != "model-name"}
    for name, meant in _NAMES.items():
        if name in found:
            found.setdefault(meant, found.pop(name))
    if _first(found, "attn-implementation") == "flash_attn":
        found["attn-implementation"] = ("flash_attention_2",)
    if _first(found, "packing").lower() == "true" and "packing-length" in found:
        found["max-length"] = found.pop("packing-length")
    _set_base(found)
    if _on(found, "use-galore"):
        del found["use-galore"]
        found["optimizer"] = ("galore",)
    return RenamedArguments(flags=found, taken=tuple(_set_defaults(found, world_size)))


def _set_base(found: _Words) -> None:
    bits = _first(found, "quant-bits")
    found.setdefault("use-bnb-nested-quant", ("True",))
    if _first(found, "quant-method") == "bnb" and bits in ("4", "8"):
        del found["quant-method"], found["quant-bits"]
        found[f"load-in-{bits}bit"] = ("True",)


def _set_defaults(found: _Words, world_size: int) -> Iterator[str]:
    """Yield sentences on defaults, and set them in `found`."""
    kind = _first(found, "tuner-type") or "lora"
    if "tuner-type" not in found:
        yield "--tuner_type not given; using lora, the default of ms-swift"
    if kind == "full":
        for name in [name for name in found if name.startswith("lora-")]:
            del found[name]
    elif kind == "lora":
        found["use-peft"] = ("True",)
        found["lora-r"] = found.pop("lora-rank", ("8",))
        found.setdefault("lora-target-modules", ("all-linear",))
    dtype = _first(found, "torch-dtype")
    if not dtype:
        found["torch-dtype"] = ("auto",)
        yield "--torch_dtype not given; using that of the checkpoint, taken as bfloat16"
    # `ModelArguments._init_mixed_precision`
    narrow = dtype in ("", "bfloat16")
    found.setdefault("bf16", (str(narrow),))
    found.setdefault("fp16", (str(not narrow),))
    defaults = {
        "per-device-train-batch-size": "1",
        "gradient-checkpointing": "True",
        "optim": "adamw_torch_fused",
    }
    for name, value in defaults.items():
        if name not in found:
            found[name] = (value,)
            yield f"--{name.replace('-', '_')} not given; using {value}, a default of ms-swift"
    each = _first(found, "per-device-train-batch-size")
    if "gradient-accumulation-steps" not in found and each.isascii() and each.isdigit():
        number = max(math.ceil(_BATCH / max(int(each), 1) / world_size), 1)
        found["gradient-accumulation-steps"] = (str(number),)
        yield f"--gradient_accumulation_steps not given; using {number}, a default of ms-swift"


def _first(found: Mapping[str, tuple[str, ...]], name: str) -> str:
    return "".join(found.get(name, ())[:1])


def _on(found: Mapping[str, tuple[str, ...]], name: str) -> bool:
    return (_first(found, name) or "true").lower() == "true" if name in found else False


# --------------------------------------------------------------------------------------------------
# Configurations by name.


def deepspeed_preset(name: str) -> dict[str, Any] | None:
    """Return the DeepSpeed configuration of a value of `--deepspeed`; None for a file."""
    stage, _, host = name.removeprefix("zero").partition("_")
    if not name.startswith("zero") or stage not in ("0", "1", "2", "3"):
        return None
    if host != "" and (host != "offload" or stage < "2"):
        return None
    zero: dict[str, Any] = {
        "stage": int(stage),
        "overlap_comm": False,
        "contiguous_gradients": True,
    }
    moved = {"device": "cpu" if host else "none", "pin_memory": True}
    if stage != "0":
        zero["offload_optimizer"] = moved
    if stage == "3":
        zero |= {
            "offload_param": moved,
            "sub_group_size": 10**9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 10**9,
            "stage3_max_reuse_distance": 10**9,
        }
    else:
        zero |= {"allgather_bucket_size": 2 * 10**8, "reduce_bucket_size": 2 * 10**8}
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": zero,
    }


FSDP_PRESET = "fsdp2"
_FSDP2: Mapping[str, Any] = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {
        "fsdp_version": 2,
        "reshard_after_forward": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "activation_checkpointing": True,
    },
}


def fsdp_section(document: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the FSDP section in the keys of accelerate without prefix, and its version.

    document : content of the file of `--fsdp`; None for the configuration `fsdp2`.
    Source: `SftArguments._init_fsdp`, and `_apply_legacy_fsdp_to_config` of transformers 5.19.
    """
    given = _FSDP2 if document is None else document
    words = str(given.get("fsdp", "full_shard auto_wrap")).split()
    section = {
        key.removeprefix("fsdp_"): value
        for key, value in dict(given.get("fsdp_config", {})).items()
    }
    section.setdefault("version", 2)
    section.setdefault("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    section.setdefault("reshard_after_forward", "shard_grad_op" not in words)
    if "offload" in words or section.pop("cpu_offload", False):
        section["offload_params"] = True
    return section
