"""Recipes of Megatron-Bridge in Python, read without executing them.

A recipe is a function that returns a `ConfigContainer`. It takes another recipe, such as
`llama3_70b_pretrain_config`, or a model of the Hugging Face hub. Then it assigns fields.
`search.engines.text.python` evaluates the function; this module knows the parts of
Megatron-Bridge that have no source there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from autopar.records import Record
from search.engines.bridge.keys import HARMLESS_KEYS, KEYS
from search.engines.bridge.recipes import (
    LIBRARY,
    Recipe,
    Settings,
    model_of,
    named_recipe,
    precision_settings,
    sizes_of,
)
from search.engines.huggingface.architectures import architecture
from search.engines.text.python import (
    Named,
    Section,
    Sets,
    Unknown,
    built_by,
    copied,
    holds_unknown,
    unread,
)

CONFIG = "ConfigContainer"
_ROOT = "megatron."
_PACKAGE = f"{_ROOT}bridge"
_BASE = "hf"
"""Field of a provider: the name of its model on the hub."""
_MODELS = ("from_hf_pretrained", "from_hf_config", "from_auto_config")
_PROVIDERS = ("to_megatron_provider", "provider_bridge", "to_megatron_model")
_STARTS = ("pretrain", "finetune")
"""Functions that train a configuration."""
_HARMLESS = ("finalize", "validate", "register_pre_wrap_hook")
_FALSE = frozenset({"use_transformer_engine_op_fuser", "use_te_rng_tracker", "te_rng_tracker"})
"""Fields that are False unless set, which recipes read."""
_NONE = frozenset({"cuda_graph_impl", "mtp_num_layers", "num_moe_experts"})
"""Fields of a model that are None unless set."""
_SECTIONS = frozenset({
    "checkpoint", "dist", "logger", "profiling", "rerun_state_machine", "rng", "scheduler",
    "tokenizer", "validation",
})  # fmt: skip
"""Sections of `ConfigContainer` that exist without being set."""


class BridgeKnown:
    """Knowledge of Megatron-Bridge, for `Evaluator`."""

    def __init__(
        self,
        source: Callable[[str], str | None],
        recipe: Callable[[str], Section | None],
    ) -> None:
        """Take two functions: name of a module -> source, and name of a recipe -> its value."""
        self._source = source
        self._recipe = recipe
        self.started: list[Section] = []
        """Configurations that the file trains, as they are then."""
        self.origins: dict[int, Section] = {}
        """`id` of a configuration of `started` -> the object of the file."""

    def module(self, name: str) -> str | None:
        """Return the source of a module by its dotted name; None: without source."""
        return self._source(name)

    def call(self, name: str, of: Any, words: list[Any], named: Mapping[str, Any]) -> Any:
        """Return the value of a call; NotImplemented: not known."""
        last = name.rpartition(".")[2]
        if isinstance(of, Section):
            own = of.kind is not None and not of.kind.module.name.startswith(_ROOT)
            if not own and last in _PROVIDERS:
                return Section("GPTModelProvider", {_BASE: of.fields.get(_BASE)})
            return None if not own and last in _HARMLESS else NotImplemented
        if not name.startswith(_ROOT):
            return NotImplemented
        if last in _MODELS and words:
            return Section("AutoBridge", {_BASE: words[0]})
        if last.endswith("DatasetConfig"):
            # Its `__init__` passes the arguments on to classes of Megatron-Core.
            return Section(last, named)
        if last in _STARTS:
            given = [one for one in (*words, *named.values()) if isinstance(one, Section)]
            for one in given:
                if one.name == CONFIG:
                    # Changes after the training do not count.
                    done: dict[int, Any] = {}
                    self.started.append(copied(one, done))
                    self.origins[id(self.started[-1])] = one
            return None
        if last == "get_mixed_precision_config" and words:
            return _precision(words[0])
        if last == "get_rank_safe":
            return 0
        if last == "apply_flex_dispatcher_backend" and words and isinstance(words[0], Section):
            return self._flex(words[0], named.get("moe_flex_dispatcher_backend", [*words, None][1]))
        if [*words, *named.values()] not in ([], ["lora"]):
            return NotImplemented
        found = self._recipe(LIBRARY + last if f"{_PACKAGE}.{LIBRARY}" in name else last)
        return NotImplemented if found is None else found

    def _flex(self, provider: Section, backend: Any) -> Any:
        """Return what `apply_flex_dispatcher_backend` sets on a device that has the backend."""
        if backend is None or self.field(provider, "num_moe_experts") is None:
            return None
        fields = {
            "moe_token_dispatcher_type": "flex",
            "moe_flex_dispatcher_backend": backend,
            "moe_shared_expert_overlap": False,
        }
        return Sets(of=provider, fields=fields)

    def has(self, section: Section, name: str) -> bool | None:
        """Return whether a section has a field that was not set; None: not known.

        Providers have all fields but `cuda_graph_modules`, which replaces `cuda_graph_scope` in
        some releases of Megatron-Core.
        """
        if name == "cuda_graph_modules" and section.name.endswith("Provider"):
            return False
        return True if _BASE in section.fields else None

    def field(self, section: Section, name: str) -> Any:
        """Return a field that was not set; NotImplemented: not known."""
        if section.name == CONFIG and name in _SECTIONS:
            return section.fields.setdefault(name, Section(name))
        if name in _FALSE:
            return False
        if name == "cuda_graph_scope" and section.name.endswith("Provider"):
            return None
        sizes = (
            architecture(model_of(str(section.fields[_BASE]))) if _BASE in section.fields else None
        )
        if sizes is None:
            return NotImplemented
        return sizes.get(name, None if name in _NONE else NotImplemented)


def _precision(found: Any) -> Any:
    settings = precision_settings(found) if isinstance(found, str) else None
    if settings is None:
        return found if isinstance(found, Section) else NotImplemented
    fields = {key.partition(".")[2]: value for key, value in settings.items()}
    return Section("MixedPrecisionConfig", fields)


class ReadRecipe(Record):
    """Configuration of a recipe: settings by dotted key, and values known only at run time."""

    hub: str | None
    """Name of the model on the hub; None: the recipe sets its sizes."""
    settings: Mapping[str, Any]
    unknown: Mapping[str, Unknown]
    """Keys whose values are not known."""


def read_recipe(config: Section) -> ReadRecipe:
    """Return the settings of a `ConfigContainer` by dotted key."""
    settings: dict[str, Any] = {}
    unknown: dict[str, Unknown] = {}
    hub = None
    for name, section in config.fields.items():
        if name == "mixed_precision":
            settings |= {**(precision_settings("bf16_mixed") or {}), "mixed_precision.bf16": False}
            found = _precision(section)
            section = section if found is NotImplemented else found
        if name == "peft" and isinstance(section, Section):
            settings["peft.dim"] = 32  # the default of `LoRA`
            if section.name != "LoRA":
                unknown["peft"] = Unknown(why=f"adapters of {section.name} are not read", line=1)
        if section is None:
            continue
        for key, value in _flat(str(name), section):
            if key == f"model.{_BASE}" and not isinstance(value, Unknown):
                hub = str(value)
            elif isinstance(value, Unknown):
                unknown[key] = value
                settings.pop(key, None)
            else:
                settings[key] = value
    return ReadRecipe(hub=hub, settings=settings, unknown=unknown)


def _flat(key: str, value: Any, seen: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    unknown = unread(value)
    if id(value) in seen:
        unknown = Unknown(why="it contains itself", line=1)
    if isinstance(value, Section) and unknown is None:
        for name, inner in value.fields.items():
            yield from _flat(f"{key}.{name}", inner, (*seen, id(value)))
    else:
        yield key, unknown or next(_elsewhere(value), None) or _plain(value)


def _elsewhere(value: Any) -> Iterator[Unknown]:
    """Yield the constants of other files in a value.

    Types and functions of torch and Megatron-Core are known, and enumerations are.
    """
    if isinstance(value, list | tuple):
        for one in value:
            yield from _elsewhere(one)
    elif isinstance(value, Named):
        outer = value.name.rpartition(".")[0].rpartition(".")[2]
        if not (value.name.startswith(("torch.", "megatron.core.")) or outer[:1].isupper()):
            yield Unknown(why=f"{value.name} is in another file", line=1)
    elif holds_unknown(value):
        yield Unknown(why="an item is not known", line=1)


def _plain(value: Any) -> Any:
    """Return a value with names such as `torch.bfloat16` as their last part, and with lists."""
    if isinstance(value, Named):
        return value.last
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


# --------------------------------------------------------------------------------------------------
# A recipe of the user.


class PythonFile(Record):
    """Recipe in a Python file."""

    recipe: Recipe
    """Recipe that it starts from, with the keys that the file keeps."""
    own: Settings
    """Settings that the file changes, by dotted key."""
    environment: Mapping[str, str]
    unknown: tuple[str, ...]
    """Sentences on values that only the run knows."""
    assumed: tuple[str, ...]
    """Sentences on defaults that stand for them."""


def is_source(text: str) -> bool:
    """Return True for a Python file that imports Megatron-Bridge."""
    return re.search(rf"(?m)^\s*(from|import)\s+{re.escape(_PACKAGE)}\b", text) is not None


def read_source(
    path: Path, text: str, environment: Mapping[str, str], release: str | None = None
) -> PythonFile:
    """Return the recipe of a Python file: the one that it trains, else that of its only function.

    environment : known variables of the run. release : as in `named_recipe`. Raises DocumentError
    for a file that is not Python, without a recipe, or with several.
    """
    bases: dict[int, Recipe] = {}
    kept: list[Section] = []  # an `id` is of one object while the object exists

    def recipe(name: str) -> Section | None:
        found = named_recipe(name, release)
        if not found.settings:
            return None
        section = _section(found)
        bases[id(section)] = found
        kept.append(section)
        return section

    known = BridgeKnown(lambda _: None, recipe)
    built = built_by(
        path, text, known, CONFIG, environment=environment, started=lambda: known.started
    )
    config = built.config
    read = read_recipe(config)
    base = bases.get(id(known.origins.get(id(config), config)))
    settings = {} if base is None else base.settings
    model = None if base is None else base.model
    settings = {key: value for key, value in settings.items() if key in read.settings}
    if read.hub is not None:
        model = model_of(read.hub)
        sizes = sizes_of(model)
        model, settings = (model if sizes else None), {**sizes, **settings}
    changed = {key: value for key, value in read.settings.items()
               if key not in settings or settings[key] != value}  # fmt: skip
    given = config.fields.get("env_vars")
    environment = {
        str(name): str(value)
        for name, value in (given.items() if isinstance(given, dict) else ())
        if isinstance(value, str | int)
    }
    counted = {
        key: one for key, one in read.unknown.items()
        if key in KEYS or HARMLESS_KEYS.fullmatch(key) is None
    }  # fmt: skip
    if isinstance(given, dict):
        counted |= {f"env_vars.{name}": one for name, one in given.items()
                    if isinstance(one, Unknown)}  # fmt: skip
    kind: Literal["library", "performance", "tuning"] = "library" if base is None else base.kind
    return PythonFile(
        recipe=Recipe(name=path.name, model=model, kind=kind, settings=settings),
        own=changed,
        environment=environment,
        unknown=built.sentences(counted),
        assumed=built.assumed,
    )


def _section(recipe: Recipe) -> Section:
    """Return the configuration of a recipe as a section; `read_recipe` reverses it."""
    config = Section(CONFIG, {"comm_overlap": None})
    for key, value in recipe.settings.items():
        name, _, field = key.partition(".")
        section = config.fields.get(name)
        if section is None:
            section = config.fields[name] = Section(_CLASSES.get(name, name))
        *inner, last = field.split(".")
        for part in inner:
            section = section.fields.setdefault(part, Section(part))
        section.fields[last] = list(value) if isinstance(value, list) else value
    return config


_CLASSES = {
    "comm_overlap": "CommOverlapConfig", "mixed_precision": "MixedPrecisionConfig",
    "model": "GPTModelProvider", "peft": "LoRA",
}  # fmt: skip
"""Section of a configuration -> its class, for `isinstance`."""
