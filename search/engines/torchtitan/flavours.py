"""Models of torchtitan's releases, and the linear modules to which adapters can be attached.

Sources: `models/*/__init__.py` of the wheels of 0.2.2 and 0.3.0; `components/lora.py`,
`models/common/moe_sharding.py` and `models/*/state_dict_adapter.py` of 0.3.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

from autopar.errors import UnsupportedError
from autopar.run.architecture import Model
from autopar.run.run import mixer_values
from autopar.training.adapters import Target
from search.engines.engine import Span
from search.engines.huggingface.models import FLAVOURS, flavour

Release = Literal["0.2.2", "0.3.0"]
JOB_FILES: Release = "0.2.2"
"""Last release with job files (TOML)."""
RECIPES: Release = "0.3.0"
"""Release with recipes in Python."""
RELEASES = ("0.1", "0.2", "0.3")
"""Releases with known keys, oldest first."""
SPANS: Mapping[bool, Span] = {False: Span(last="0.2"), True: Span("0.3")}
"""True for recipes in Python, False for job files -> releases that read them."""
MODELS: Mapping[Release, tuple[str, ...]] = {
    JOB_FILES: ("llama3", "llama4", "deepseek_v3", "qwen3"),
    RECIPES: ("llama3", "deepseek_v3", "qwen3", "gpt_oss"),
}
"""Written models of a release; `FLAVOURS` also contains names of other releases."""
_NEW = frozenset({("llama3", "1B"), ("llama3", "3B")})
"""Flavors that 0.2.2 does not have."""


def flavour_of(model: Model, release: Release) -> tuple[str, str]:
    """Return torchtitan's model name and flavor for the sizes of a model.

    Raises UnsupportedError if no flavor of the release has these sizes.
    """
    shapes, own = _shapes(release), _shape(model)
    for names, shape in shapes.items():
        if shape == own:
            return names
    unlike = {
        names: [each for each in own if shape[each] != own[each]]
        for names, shape in shapes.items()
        if shape["layers"] == own["layers"] and shape["width"] == own["width"]
    }
    if unlike:
        (name, size), differs = min(unlike.items(), key=lambda item: len(item[1]))
        raise UnsupportedError(
            f"torchtitan {release}'s {name} {size} differs from the model in: {', '.join(differs)}"
        )
    listed = ", ".join(f"{name} {size}" for name, size in shapes)
    raise UnsupportedError(
        f"torchtitan {release} has no model of {model.num_layers} layers of width {model.hidden}",
        remedy=f"Use one of its flavours: {listed}",
    )


@lru_cache
def _shapes(release: Release) -> Mapping[tuple[str, str], Mapping[str, object]]:
    """Return the sizes of all flavors of a release by model name and flavor."""
    models = {
        (name, size): flavour(name, size)
        for name in MODELS[release]
        for size in FLAVOURS[name]
        if release == RECIPES or (name, size) not in _NEW
    }
    return {names: _shape(model) for names, model in models.items() if model is not None}


def has_flavour(model: Model, release: Release) -> bool:
    """Return True if a release has a flavor with the sizes of a model."""
    try:
        flavour_of(model, release)
    except UnsupportedError:
        return False
    return True


def needs_recipe(model: Model, lora_rank: int) -> bool:
    """Return True if only 0.3.0 can train a model; lora_rank : 0 without adapters."""
    return lora_rank > 0 or (has_flavour(model, RECIPES) and not has_flavour(model, JOB_FILES))


def _shape(model: Model) -> Mapping[str, object]:
    """Return the sizes and block types that identify a model, independent of its kernels."""
    attention, experts, layer = model.attention, model.experts, model.last
    heads = attention.heads if attention.latent is not None else attention.kv_heads
    return {
        "layers": model.num_layers,
        "width": model.hidden,
        "MLP width": model.dense_width,
        "vocabulary": model.vocab,
        "layers without attention": mixer_values(model),
        "layers with experts": model.mixtures,
        "gated MLP": layer.gates,
        "norm": layer.norm,
        "tied embeddings": model.tied,
        "biases": (layer.biases, attention.qkv_biases or layer.biases),
        "positions": model.positions,
        "heads": (attention.heads, attention.width, attention.value_width),
        "KV heads": heads,
        "latent attention": attention.latent,
        "norms of heads": attention.head_norms,
        "attention window": attention.window,
        "MTP layers": model.mtp,
        "experts": experts
        and (experts.number, experts.per_token, experts.width, experts.shared_width),
    }


# --------------------------------------------------------------------------------------------------
# Modules with adapters. Names that match no module are only a warning of `LoRAConverter`.


MODULES: Mapping[str, frozenset[Target]] = {
    "wqkv": frozenset({"query", "key", "value"}),
    "wq": frozenset({"query"}),
    "wq_a": frozenset({"query"}),
    "wq_b": frozenset({"query"}),
    "wkv_a": frozenset({"key", "value"}),
    "wkv_b": frozenset({"key", "value"}),
    "wo": frozenset({"projection"}),
    "w1": frozenset({"fc1"}),
    "w3": frozenset({"fc1"}),
    "w2": frozenset({"fc2"}),
}
"""Linear module of a layer -> weights of it."""
UNSHARDED = frozenset({"wq_a", "wkv_a", "gate"})
"""Modules whose weights tensor ranks replicate; adapters on them end with an AssertionError."""


def linear_modules(model: Model) -> frozenset[str]:
    """Return the names of the linear modules of a model of 0.3.0, the head included."""
    names = {"wo", "lm_head"}
    latent, experts = model.attention.latent, model.experts
    if latent is None:
        names.add("wqkv")
    else:
        names |= {"wkv_a", "wkv_b"} | ({"wq_a", "wq_b"} if latent.query_rank else {"wq"})
    if experts is not None:
        # Routed experts are tensors, not linear modules.
        names.add("gate")
    if not all(model.mixtures) or (experts is not None and experts.shared_width):
        names |= {"w1", "w2", "w3"}
    return frozenset(names)


def targets_of(names: frozenset[str]) -> frozenset[Target]:
    """Return the weights of linear modules; modules outside of layers have none."""
    return frozenset(target for name in names & {*MODULES} for target in MODULES[name])


def adapted_modules(model: Model, targets: frozenset[Target]) -> tuple[str, ...]:
    """Return the modules of a model whose adapters are those of `targets`; empty if none are.

    A target without a module of the model has none; one that shares a module needs all its targets.
    """
    own = [name for name in MODULES if name in linear_modules(model) and MODULES[name] & targets]
    whole = all(MODULES[name] <= targets and name not in UNSHARDED for name in own)
    return tuple(own) if whole else ()
