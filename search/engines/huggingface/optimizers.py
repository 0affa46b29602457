"""Words of scripts that change model states and loss: optimizers, types of weights, fused heads.

Sources: `trainer_optimizer.py` and `optimization.py` (Adafactor) of transformers 5.24,
`train/trainer_utils.py` of LLaMA-Factory 0.9.5, galore_torch 1.0 and
apollo_torch 1.0. Arguments of other optimizers are not looked up, so that they withdraw estimates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.records import replace
from autopar.run.runtime import Kernels, LowRank, Optimizer, Quirks
from autopar.training.adapters import DENSE_TARGETS, Target
from search.engines.engine import EngineRelease, Span
from search.engines.huggingface.named_optimizers import WORDS, of_flat_tensors, of_narrow_weights
from search.engines.huggingface.names import span_of
from search.engines.huggingface.script import (
    Flags,
    ScriptWords,
    is_trainer,
    is_trl,
    known_program,
    takes_factory_words,
)
from search.engines.keys import whole
from search.engines.space import TRANSFORMERS

_PLAIN = Optimizer(fused=False)
_LOW_RANK = ("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw")
_MODULES: Mapping[str, tuple[Target, ...]] = {
    "attn": ("query", "key", "value", "projection"),
    "self_attn": ("query", "key", "value", "projection"),
    "mlp": ("fc1", "fc2"),
    "q_proj": ("query",),
    "k_proj": ("key",),
    "v_proj": ("value",),
    "o_proj": ("projection",),
    "down_proj": ("fc2",),
}
"""Targets of a low rank; the gate and the gated matrix of an MLP have no name together."""
_FACTORY = ("galore", "apollo")


def script_optimizer(words: ScriptWords, *, pure: bool, flat: bool, sharded: bool) -> Optimizer:
    """Return the optimizer that a script makes, on the device.

    pure : True if the trained weights have 16 bits and no fp32 copy.
    flat : True if states are partitions of flat tensors (DeepSpeed, FSDP1), which Adafactor does
        not factor. sharded : True if they are shards of any kind, which have no low rank.
    """
    name = "".join(words.words.get("optim", ())[:1])
    if not name and words.yes("adafactor"):
        name = "adafactor"
    found = _by_name(words, name, pure=pure, flat=flat)
    low = _low_rank(words, name, sharded=sharded)
    if found is None and low is None:
        # an unknown name stays unread; no name is the default of transformers before 5
        found = _PLAIN
    else:
        words.asked.update(("optim", "adafactor"))
    found = replace(found or _PLAIN, **(low or {}))
    return of_narrow_weights(found) if pure else found


def _by_name(words: ScriptWords, name: str, *, pure: bool, flat: bool) -> Optimizer | None:
    """Return the optimizer of a value of `--optim`; None without a name and for others."""
    if name == "sgd":
        options = _options(words)
        momentum = 0 if options.get("momentum", "0") in ("0", "0.0") else 2 if pure else 4
        decay = words.text("weight-decay") or "0"
        # weight decay is added to a copy of the gradients (`_multi_tensor_sgd`)
        plain = decay.strip("0.") == ""
        return Optimizer(kind="sgd", moments_bytes=momentum, fused=plain)
    found = WORDS.get(name)
    return of_flat_tensors(found) if found is not None and flat else found


def _options(words: ScriptWords) -> dict[str, str]:
    """Return the settings in `--optim_args`, such as `rank=64,scale=0.1`."""
    parts = words.text("optim-args").replace(" ", "").split(",")
    pairs = (part.partition("=") for part in parts)
    return {key: value for key, _, value in pairs if key}


def _low_rank(words: ScriptWords, name: str, *, sharded: bool) -> dict[str, Any] | None:
    """Return the fields of GaLore and APOLLO; None without them, and for unknown targets."""
    if name.removesuffix("_layerwise") in _LOW_RANK:
        targets = words.list("optim-target-modules")
        every = [one.replace("_", "-") for one in targets] == ["all-linear"]
        rank = whole(_options(words).get("rank", "128"))
        layerwise, kind = name.endswith("_layerwise"), name
    else:
        chosen = [one for one in _FACTORY if words.yes(f"use-{one}")]
        if len(chosen) != 1 or name not in ("", "adamw_torch"):
            words.asked.difference_update(f"use-{one}" for one in chosen)
            return None
        kind = chosen[0]
        targets = words.list(f"{kind}-target") or ("all",)
        every, rank = targets == ("all",), words.number(f"{kind}-rank") or 16
        layerwise = words.yes(f"{kind}-layerwise")
        words.asked.update(
            f"{kind}-{one}"
            for one in ("update-interval", "scale", "proj", "proj-type", "scale-type",
                        "scale-front")
        )  # fmt: skip
    if sharded or not rank or not (every or all(one in _MODULES for one in targets)):
        words.asked.difference_update(("optim", f"use-{kind}"))
        return None
    adapted = [*DENSE_TARGETS] if every else [t for one in targets for t in _MODULES[one]]
    # the names of transformers include the head, those of LLaMA-Factory do not
    low = LowRank(rank=rank, targets=frozenset(adapted), head=every and kind == name)
    fields: dict[str, Any] = {"low_rank": low, "layerwise": layerwise, "fused": True}
    if "8bit" in kind:
        fields["kind"] = "adam8bit"
    elif "adafactor" in kind:
        fields |= {"kind": "adafactor", "moments_bytes": 0}
    return fields


_NARROW = ("bfloat16", "bf16", "auto")
"""Types of 16 bits; published weights, whose type `auto` takes, have 16 bits."""
_WIDE = ("float32", "fp32")


def weights_are_narrow(words: ScriptWords) -> bool:
    """Return True if a script loads weights in bf16, which it then trains without an fp32 copy.

    An engine that casts weights itself may replace this. Other types stay unread.
    """
    pure = words.yes("pure-bf16")
    given = [words.words[name] for name in ("dtype", "torch-dtype") if name in words.words]
    kinds = {" ".join(one).lower() for one in given}
    if kinds <= {*_NARROW, *_WIDE}:
        words.asked.update(("dtype", "torch-dtype"))
    return pure or (bool(kinds) and kinds <= set(_NARROW))


def default_type(flags: Flags, program: str, release: EngineRelease | None) -> tuple[str, str]:
    """Return the type in which a script loads trained weights by default, and a sentence on it.

    Both are empty if the script names a type or is a program with its own default. transformers 5
    takes the type of the checkpoint, release 4 fp32 (`from_pretrained` of modeling_utils.py).

    release : given release of transformers; None: 4 if release 5 lacks an argument, else 5.
    """
    own = known_program(program) != "" or takes_factory_words(flags, program)
    named = not {"dtype", "torch-dtype", "full-finetune"}.isdisjoint(flags)
    if not flags or own or named or program.endswith("qlora.py"):
        return "", ""
    if release is not None:
        number, reason = release.name.split(".")[0], ""
    else:
        old = next((name for name in flags if not Span(last=span_of(name).last).has("5.0")), None)
        number, reason = ("5", "") if old is None else ("4", f" (--{old.replace('-', '_')})")
    kind = "float32" if number == "4" else "auto"
    return kind, f"--dtype not given; using {kind}, the default of transformers {number}{reason}"


def weights_are_wide(words: ScriptWords) -> bool:
    """Return True if a script loads weights in fp32, frozen ones too."""
    return words.text("dtype", "torch-dtype").lower() in _WIDE


_LIGER = ("use-liger-kernel", "use-liger", "enable-liger-kernel")


def script_kernels(words: ScriptWords, program: str) -> Kernels:
    """Return the kernels of a script: those of transformers, with Liger's, and TRL's fused head.

    A script that may be a loop without Trainer may hold the logits.

    program : path of the script or name of its module. TRL's own script never makes logits, and
        applies Liger's kernels without the loss (`SFTTrainer` of TRL 1.16).
    """
    chosen = [name for name in _LIGER if words.yes(name)]
    quirks = Quirks(logit_bytes=12 if is_trainer(words.words, program) else None)
    return replace(
        TRANSFORMERS,
        quirks=quirks,
        liger=bool(chosen),
        loss="trl" if is_trl(program) else "liger" if chosen else TRANSFORMERS.loss,
    )
