"""Recipes of torchtitan 0.3 in Python, read as job files without executing them.

A recipe is a function that returns `Trainer.Config`. `--module llama3 --config llama3_8b` names one
of the package (`recipes.json`, made by `python -m benchmarks.titan_recipes`), or one of a file. The
result has the keys of `Trainer.Config` as sections, like the TOML of earlier releases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from autopar.records import Record, replace
from autopar.run.architecture import LayerGroup, Mlp, Model
from search.engines.huggingface.models import flavour
from search.engines.text.python import (
    Named,
    Section,
    Unknown,
    built_by,
    holds_unknown,
    unread,
)
from search.engines.torchtitan.rules import LOSS_CHUNKS

DATA = Path(__file__).with_name("recipes.json")
RELEASE = "0.3.0"
CONFIG = "Trainer.Config"
_PACKAGE = "torchtitan."
_POLICIES: Mapping[str, Mapping[str, Any]] = {
    "FullAC.Config": {"mode": "full"},
    "SelectiveAC.Config": {"mode": "selective", "selective_ac_option": "op"},
    "MemoryBudgetAC.Config": {"mode": "memory_budget"},
}
"""Policy of recomputation -> section `activation_checkpoint` of release 0.2."""
_CONVERTERS = {
    "Float8LinearConverter.Config": "quantize.linear.float8",
    "MXFP8LinearConverter.Config": "quantize.linear.mx",
}
"""Converter of a model -> its name in release 0.2."""
_LORA = "LoRAConverter.Config"
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "CompileConfig": {"enable": False, "components": ["model", "loss"]},
    "TrainingConfig": {"seq_len": 2048, "local_batch_size": 8, "disable_cuda_graphs": False},
    "ParallelismConfig": {
        f"{name}_parallel_degree": 1 for name in ("tensor", "pipeline", "context", "expert")
    },
}
"""Defaults of fields that recipes read."""
_SECTIONS = {
    "training": "TrainingConfig", "parallelism": "ParallelismConfig", "compile": "CompileConfig",
    "activation_checkpoint": "SelectiveAC.Config", "debug": "DebugConfig",
    "optimizer": "OptimizersContainer.Config", "metrics": "MetricsProcessor.Config",
    "checkpoint": "CheckpointManager.Config", "comm": "CommConfig",
    "validator": "Validator.Config", "lr_scheduler": "LRSchedulersContainer.Config",
    "dataloader": "BaseDataLoader.Config", "tokenizer": "BaseTokenizer.Config",
    "profiler": "Profiler.Config",
}  # fmt: skip
"""Section of `Trainer.Config` -> its class where a recipe does not set it."""
_READ = ("training", "parallelism", "compile", "debug")
"""Sections whose fields are keys of job files."""
_SPEC = ("family", "flavor", "converters", "attn_backend", "model")
"""Arguments of `model_registry` that are read, or that change neither memory nor time much."""


class TitanKnown:
    """Knowledge of torchtitan, for `Evaluator`."""

    def __init__(
        self, source: Callable[[str], str | None], recipe: Callable[[str], Section | None]
    ) -> None:
        """Take two functions: name of a module -> source, and name of a recipe -> its value."""
        self._source = source
        self._recipe = recipe

    def module(self, name: str) -> str | None:
        """Return the source of a module by its dotted name; None: without source."""
        return self._source(name)

    def call(self, name: str, of: Any, words: list[Any], named: Mapping[str, Any]) -> Any:
        """Return the value of a call; NotImplemented: not known."""
        outer, _, last = name.rpartition(".")
        if isinstance(of, Section) or not name.startswith(_PACKAGE):
            return NotImplemented
        if last == "model_registry" and words:
            family = outer.rpartition(".")[2]
            return Section("ModelSpec", {"family": family, "flavor": words[0], **named})
        if last in ("make_gqa_config", "make_ffn_config"):
            return Section(last, named)
        if last == "default_adamw":
            return Section("OptimizersContainer.Config")
        if last == "decoder_vocab_size":
            # It changes nothing, and the vocabulary is that of the model.
            return Unknown(why="it is the vocabulary of the model", line=1)
        found = self._recipe(last) if not words and not named else None
        return NotImplemented if found is None else found

    def has(self, section: Section, name: str) -> bool | None:
        """Return None: fields are read by name."""

    def field(self, section: Section, name: str) -> Any:
        """Return a field that was not set; NotImplemented: not known."""
        if section.name == CONFIG and name in _SECTIONS:
            return section.fields.setdefault(name, Section(_SECTIONS[name]))
        return _DEFAULTS.get(section.name, {}).get(name, NotImplemented)


class TitanRecipe(Record):
    """Recipe as a job file."""

    document: Mapping[str, Any]
    model: Model | None = None
    """Model that the recipe builds from blocks; None: the document names it."""
    unknown: tuple[str, ...] = ()
    """Sentences on values that only the run knows."""
    assumed: tuple[str, ...] = ()
    """Sentences on defaults that stand for them."""


def read_config(config: Section) -> tuple[dict[str, Any], Section | None, dict[str, Unknown]]:
    """Return (job file, model specification or None, unknown values by key) of a configuration."""
    unknown: dict[str, Unknown] = {}
    # Only 0.3 has this key, from which readers infer the release.
    found: dict[str, Any] = {"parallelism": {"spmd_backend": "spmd_types"}, "compile": {}}
    found["compile"]["enable"] = False
    for name in _READ:
        section = config.fields.get(name)
        lost = unread(section)
        if lost is not None:
            unknown[name] = lost
        elif isinstance(section, Section):
            found.setdefault(name, {}).update(section.fields)
        elif name in config.fields:
            unknown[name] = Unknown(why=f"it is {section!r:.40}", line=1)
    policy = config.fields.get("activation_checkpoint", Section("SelectiveAC.Config"))
    if policy is None:
        found["activation_checkpoint"] = {"mode": "none"}
    elif isinstance(policy, Section) and policy.name in _POLICIES:
        found["activation_checkpoint"] = dict(_POLICIES[policy.name])
    else:
        unknown["activation_checkpoint"] = Unknown(why="its policy is not read", line=1)
    loss = config.fields.get("loss")
    if isinstance(loss, Section) and loss.name == "ChunkedLossWrapper.Config":
        found["loss"] = {"num_chunks": loss.fields.get("num_chunks", LOSS_CHUNKS)}
    spec = config.fields.get("model_spec")
    if not isinstance(spec, Section):
        unknown["model_spec"] = spec if isinstance(spec, Unknown) else Unknown(
            why="no model is given", line=1)  # fmt: skip
        return found, None, unknown
    found["model"] = {"name": str(spec.fields.get("family")), "flavor": spec.fields.get("flavor")}
    for key, value in spec.fields.items():
        if key not in _SPEC and not isinstance(value, Section | Named | Unknown):
            found["model"][key] = value
    converters = spec.fields.get("converters") or []
    names = list[str]()
    for one in converters if isinstance(converters, list) else [converters]:
        if not isinstance(one, Section):
            unknown["model_spec.converters"] = Unknown(why="a converter is not known", line=1)
            continue
        if one.name == _LORA:
            found["lora"] = {"rank": 8, **one.fields}
            continue
        names.append(_CONVERTERS.get(one.name, one.name))
        if one.name == "Float8LinearConverter.Config":
            recipe = one.fields.get("recipe_name", "rowwise")
            found["quantize"] = {"linear": {"float8": {"recipe_name": recipe}}}
    if names:
        found["model"]["converters"] = names
    return _settled("", found, unknown), spec, unknown


def _settled(name: str, section: dict[str, Any], unknown: dict[str, Unknown]) -> dict[str, Any]:
    """Return a section without None and without values that are not known, which go to `unknown`.

    name : prefix of the keys, with a dot at its end; empty for the whole job file.
    """
    found = dict[str, Any]()
    for key, value in section.items():
        lost = unread(value)
        if lost is None and (isinstance(value, Section) or holds_unknown(value)):
            what = f"a {value.name}" if isinstance(value, Section) else "in another file"
            lost = Unknown(why=f"it is {what}", line=1)
        if isinstance(value, dict):
            found[key] = _settled(f"{name}{key}.", value, unknown)
        elif lost is not None:
            unknown[f"{name}{key}"] = lost
        elif value is not None:
            found[key] = value
    return found


# --------------------------------------------------------------------------------------------------
# Recipes of the package, and those of a file.


@cache
def recipes() -> dict[str, dict[str, Any]]:
    """Return the recipes of the package as job files, by name of the function."""
    return msgspec.json.decode(DATA.read_bytes(), type=dict[str, dict[str, Any]])


def is_source(text: str) -> bool:
    """Return True for a Python file that imports torchtitan's trainer or a recipe of it."""
    return ("Trainer" in text and f"from {_PACKAGE}" in text) or ".config_registry" in text


def read_source(
    path: Path, text: str, name: str = "", environment: Mapping[str, str] = MappingProxyType({})
) -> TitanRecipe:
    """Return the recipe of a Python file.

    name : of its function; empty for its only one. environment : known variables.
    Raises DocumentError for a file that is not Python, without a recipe, or with several.
    """
    built = built_by(
        path,
        text,
        TitanKnown(lambda _: None, _packaged),
        CONFIG,
        function=name,
        environment=environment,
    )
    document, spec, unknown = read_config(built.config)
    own = None if spec is None else spec.fields.get("model")
    return TitanRecipe(
        document=document,
        model=_built(own) if isinstance(own, Section) else None,
        unknown=built.sentences(unknown),
        assumed=built.assumed,
    )


def _packaged(name: str) -> Section | None:
    """Return a recipe of the package as a configuration; `read_config` reverses it."""
    document = recipes().get(name)
    if document is None:
        return None
    model = document["model"]
    names = {made: kind for kind, made in _CONVERTERS.items()}
    float8 = document.get("quantize", {}).get("linear", {}).get("float8", {})
    spec = Section(
        "ModelSpec",
        {
            "family": model["name"],
            "flavor": model["flavor"],
            "converters": [
                *(Section(names.get(one, one), float8) for one in model.get("converters", [])),
                *([Section(_LORA, document["lora"])] if "lora" in document else []),
            ],
        },
    )
    config = Section(CONFIG, {"model_spec": spec})
    for key in _READ:
        config.fields[key] = Section(_SECTIONS[key], document.get(key, {}))
    policy = document["activation_checkpoint"]
    kinds = (kind for kind, found in _POLICIES.items() if found == policy)
    kind = next(kinds, None)
    config.fields["activation_checkpoint"] = None if kind is None else Section(kind)
    if "loss" in document:
        config.fields["loss"] = Section("ChunkedLossWrapper.Config", document["loss"])
    return config


def _built(config: Section) -> Model | None:
    """Return the model that a recipe builds from Llama 3's blocks; None: other blocks."""
    layers = config.fields.get("layers")
    base = flavour("llama3", "8B")
    assert base is not None, "a shipped model"
    blocks = [_block(one) for one in layers] if isinstance(layers, list) else []
    if config.name != "Llama3Model.Config" or not blocks or None in blocks:
        return None
    width, heads, groups, hidden = blocks[0] or (0, 0, 0, 0)
    if any(block != blocks[0] for block in blocks) or not all(
        isinstance(size, int) for size in (width, heads, groups, hidden)
    ):
        return None
    attention = replace(
        base.attention, heads=heads, kv_heads=groups, width=width, value_width=width
    )
    layer = replace(
        base.last,
        hidden=config.fields["dim"],
        mixers=(attention,),
        mlp=Mlp(width=hidden, gated=True),
    )
    return replace(
        base,
        layers=(LayerGroup(count=len(blocks), layer=layer),),
        repeat=1,
        vocab=config.fields["vocab_size"],
        tied=config.fields.get("enable_weight_tying") is True,
    )


def _block(layer: Any) -> tuple[Any, Any, Any, Any] | None:
    """Return (width of a head, heads, KV heads, width of the MLP) of a block."""
    if not isinstance(layer, Section):
        return None
    attention, mlp = layer.fields.get("attention"), layer.fields.get("feed_forward")
    if not isinstance(attention, Section) or not isinstance(mlp, Section):
        return None
    heads = attention.fields.get("n_heads")
    width = attention.fields.get("head_dim") or attention.fields.get("dim", 0) // (heads or 1)
    groups = attention.fields.get("n_kv_heads") or heads
    return width, heads, groups, mlp.fields.get("hidden_dim")
