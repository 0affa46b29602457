"""Reader of Megatron-Bridge files, which converts settings to Megatron-LM arguments.

A file is a script or YAML. Scripts run launchers such as `run_recipe.py` with arguments and with
Hydra overrides `key=value`. YAML contains a complete `ConfigContainer` or overrides.
`search.engines.bridge.recipes` contains the settings of the recipes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec import field

from autopar.errors import DocumentError, shortened
from autopar.records import Record, replace, shorten
from autopar.run.run import Run, legal
from autopar.training.adapters import Adapters, Target
from search.engines.arguments import BOTH, Ignored, Unpriced, UnpricedError
from search.engines.bridge.keys import (
    ARGUMENTS,
    DATASET_LENGTHS,
    DETERMINISTIC,
    HARMLESS_KEYS,
    KEYS,
    SHORT,
    UNLESS_TRUE,
    UNPRICED_ARGUMENTS,
    UNPRICED_KEYS,
    VALUES,
    WHERE_TRUE,
    argument_settings,
)
from search.engines.bridge.recipes import (
    PACKS,
    Recipe,
    Settings,
    layout_of,
    named_recipe,
    performance_recipe,
    precision_settings,
    release_of,
)
from search.engines.bridge.source import is_source, read_source
from search.engines.megatron.read import ReadRun, read_run
from search.engines.megatron.rules import ADAPTERS
from search.engines.space import refuse_unsupported
from search.engines.text import Command, Configuration

_PROGRAMS = re.compile(
    r"(.*/)?(setup_experiment|run_script|run_recipe|launch_with_nemo_run|bootstrap)\.py"
    r"|(.*/)?scripts/training/train\.sh"
)
_WORD = re.compile(r"(?P<mark>\+{0,2}|~)(?P<key>[A-Za-z_]\w*(?:\.\w+)*)(?:=(?P<value>.*))?", re.S)


class GivenSetting(Record):
    """Setting of a file: a key with its value, or an argument that sets one or more keys."""

    spelled: str
    """Spelling in the file: `-tp`, `--recompute_modules`, or the dotted key."""
    value: str
    settings: Mapping[str, Any]
    derived: frozenset[str] = frozenset()
    """Keys of `settings` that follow from others, such as sequence parallelism from `-tp`."""


class BridgeFile(Record):
    """Content of a file: recipe, overrides, number of GPUs and environment variables."""

    recipe: Recipe
    given: tuple[GivenSetting, ...]
    """Settings in order of precedence; later ones override earlier ones."""
    world_size: int | None
    form: Literal["script", "document", "python"]
    is_whole: bool = False
    """True if the file is a dump of a complete `ConfigContainer` instead of overrides."""
    gpu: str | None = None
    """GPU model of the recipe, such as h100: the beginning of a card name; None: not given."""
    ignored: tuple[Ignored, ...] = ()
    """Launcher arguments without settings that do not select the recipe or the machine."""
    notes: tuple[str, ...] = ()
    unpriced: str | None = None
    packed: str | None = None
    """Sentence on packed samples, which have a price with their lengths alone; None: not packed."""
    unknown: tuple[str, ...] = ()
    """Sentences on what a Python file sets only when it runs."""
    environment: Mapping[str, str] = field(default_factory=dict)
    release: str | None = None
    """Release of the container, or that which the user names; None: not known."""

    @property
    def own(self) -> Settings:
        """Settings of the file by dotted key, without those of the recipe."""
        return {key: value for one in self.given for key, value in one.settings.items()}

    @property
    def spelled(self) -> dict[str, GivenSetting]:
        """Setting of the file with the highest precedence, by dotted key."""
        return {key: one for one in self.given for key in one.settings}

    @property
    def samples(self) -> tuple[str, int] | None:
        """Pair (key of the sample length, length in tokens); None: not set separately.

        An argument of the performance scripts sets the length of model and samples together.
        """
        length = self.spelled.get(_LENGTH)
        performance = self.recipe.kind == "performance"
        if performance and length is not None and length.spelled.startswith("-"):
            return None
        own = self.own
        found = [(key, own[key]) for key in DATASET_LENGTHS if isinstance(own.get(key), int)]
        return found[0] if found else None

    def ordered(self, given: Iterable[GivenSetting]) -> tuple[GivenSetting, ...]:
        """Return settings in order of precedence; the last one overrides the others.

        In performance scripts, arguments take precedence over overrides (`set_user_overrides` runs
        after `set_cli_overrides`). In the recipe runner, overrides take precedence.
        """
        over = self.recipe.kind == "performance"
        return tuple(sorted(given, key=lambda one: one.spelled.startswith("-") == over))

    def settings(self, world: int) -> Settings:
        """Return the combined settings of recipe and file on `world` GPUs, by dotted key."""
        own = self.own
        found = {**self.recipe.settings, **own}
        tuned = self.recipe.num_gpus
        batch = self.recipe.settings.get("train.global_batch_size")
        if tuned and batch and world != tuned and "train.global_batch_size" not in own:
            # `set_post_overrides` and `run_recipe.py` keep the number of samples per GPU constant.
            found["train.global_batch_size"] = batch * world // tuned
        # A length of another type stays, and is refused.
        if self.samples is not None and is_length(own.get(_LENGTH)):
            # Source: `sync_model_dataset_sequence_length` of `scripts/training/recipe_runner.py`.
            found[_LENGTH] = self.samples[1]
        degrees = ("model.pipeline_model_parallel_size", _VP)
        if any(own.get(k, self.recipe.settings.get(k)) != self.recipe.settings.get(k)
               for k in degrees) and _LAYOUT not in own:  # fmt: skip
            # The layout of the recipe is valid only for its number of stages and chunks.
            found[_LAYOUT] = None
        if found.get(_LAYOUT) is None and _LAYOUT not in own:
            pp, vp, mtp = (_number(found.get(key)) for key in (*degrees, "model.mtp_num_layers"))
            found[_LAYOUT] = layout_of(self.recipe.model, pp, max(vp, 1), mtp)
        return found


def _number(value: Any) -> int:
    """Return an int unchanged; 0 for any other value."""
    return value if isinstance(value, int) else 0


SIZES = ("model.num_layers", "model.hidden_size", "model.num_attention_heads")
"""Sizes of a model that have no default."""


def needed_sizes(settings: Settings) -> tuple[str, ...]:
    """Return the keys of the sizes that settings need, those of mixers included."""
    patterns = ("model.hybrid_layer_pattern", "model.hybrid_override_pattern")
    if any("M" in str(settings.get(key) or "") for key in patterns):
        # providers of hybrids do not have the default of `TransformerConfig`
        return (*SIZES, "model.mamba_num_heads")
    return SIZES


_LENGTH = "model.seq_length"
_VP = "model.virtual_pipeline_model_parallel_size"
_LAYOUT = "model.pipeline_model_parallel_layout"


# --------------------------------------------------------------------------------------------------
# Content of a file.


def is_bridge(source: Configuration) -> bool:
    """Return whether a script or document is of Megatron-Bridge."""
    command = source.command
    if source.python is not None:
        return is_source(source.python)
    if command is None:
        keys = _flattened(_container(source.document))
        return len(keys.keys() & KEYS) >= 2 or _is_whole(source.document)
    words = [found["key"] for word in command.arguments if (found := _override(word))]
    # verl, NeMo and others also use these section names, along with those tested here.
    if any(key.startswith(("trainer.", "actor", "exp_manager.")) for key in words):
        return False
    if _PROGRAMS.fullmatch(command.program):
        names = {_name(word) for word in command.arguments}
        chosen = {"model_recipe_name", "recipe", "model_name", "model_family_name"}
        return bool(names & chosen) or names >= {"model", "mode"}
    return any(key in KEYS for key in words)


def read_bridge(source: Configuration, release: str | None = None) -> BridgeFile:
    """Return the content of a Megatron-Bridge file; problems are in the result and not raised.

    release : release of the recipes; None: that of the container, or the newest with the recipe.
    """
    if source.python is not None:
        return _python(source, source.python, release)
    if source.command is None:
        return _document(source)
    return _command(source, source.command, release)


def _python(source: Configuration, text: str, release: str | None) -> BridgeFile:
    found = read_source(source.path, text, source.environment, release)
    given = [GivenSetting(spelled=key, value=repr(value), settings={key: value})
             for key, value in found.own.items()]  # fmt: skip
    packed = found.own.get(PACKS, found.recipe.settings.get(PACKS))
    return BridgeFile(
        recipe=found.recipe,
        given=tuple(given),
        world_size=None,
        form="python",
        notes=(*found.recipe.notes, *found.assumed),
        packed=f"samples are packed: add --lengths, or set {PACKS} to False" if packed else None,
        unknown=found.unknown,
        environment={**source.environment, **found.environment},
    )


def _override(word: str) -> re.Match[str] | None:
    found = _WORD.fullmatch(word)
    if found is None or (found["value"] is None and found["mark"] != "~"):
        return None
    return found


def _name(word: str) -> str | None:
    """Return the long name of a launcher argument; None for other words."""
    if word.startswith("--"):
        return word[2:].partition("=")[0].replace("-", "_")
    return SHORT.get(word)


def _command(source: Configuration, command: Command, release: str | None) -> BridgeFile:
    plain: dict[str, tuple[str, list[str]]] = {}
    given, others = list[GivenSetting](), list[GivenSetting]()
    at = 0
    words = command.arguments
    while at < len(words):
        word, name = words[at], _name(words[at])
        at += 1
        if name is None:
            found = _override(word)
            if found is not None:
                value = None if found["mark"] == "~" else _parsed(found["value"])
                others += _dotted(found["key"], value, found["value"] or "null")
            continue
        values = [word.partition("=")[2]] if "=" in word else []
        while "=" not in word and at < len(words) and not _starts(words[at]):
            values.append(words[at])
            at += 1
        plain[name] = (word.partition("=")[0], values)
    text = {name: " ".join(values).strip() for name, (_, values) in plain.items()}
    ignored = list[Ignored]()
    for name, (spelled, values) in plain.items():
        settings = argument_settings(name, values)
        if settings:
            derived = frozenset({"model.sequence_parallel"} & settings.keys())
            given.append(GivenSetting(spelled=spelled, value=" ".join(values), settings=settings,
                               derived=derived))  # fmt: skip
        elif name not in _SELECTING:
            row = UNPRICED_ARGUMENTS.get(name)
            known = name in ARGUMENTS if row is None else row.is_off(values)
            ignored.append(_ignored(spelled, values, row, known))
    own = {key: value for one in (*given, *others) for key, value in one.settings.items()}
    started = [text.get("container_image", ""), *command.around, *command.before]
    release = release or release_of(" ".join(started))
    recipe, notes, unpriced = _recipe_of(text, command.program, release)
    packs = own.get(PACKS, recipe.settings.get(PACKS))
    packed = f"{recipe.name} packs samples: add --lengths, or {PACKS}=false" if packs else None
    gpu = text.get("gpu")
    flat = re.search(r"gpu_([a-z]+[0-9]+)_", text.get("recipe", ""))
    file = BridgeFile(
        recipe=recipe,
        given=(),
        world_size=_world(text, source.world_size),
        form="script",
        gpu=gpu or (flat[1] if flat is not None else None),
        ignored=tuple(ignored),
        notes=(*notes, *recipe.notes, *source.notes),
        unpriced=unpriced,
        packed=packed,
        environment=_environment(text, source.environment),
        release=release,
    )
    return replace(file, given=file.ordered((*given, *others)))


def _starts(word: str) -> bool:
    """Return whether a word starts an argument or override; False: a value of the previous one."""
    found = _override(word)
    dotted = found is not None and ("." in found["key"] or found["key"] == "mixed_precision")
    return _name(word) is not None or dotted


_SELECTING = frozenset({
    "model_family_name", "model_recipe_name", "model_name", "model_size", "recipe", "model",
    "num_gpus", "nodes", "gpus_per_node", "gpu", "compute_dtype", "fp8_recipe", "config_variant",
    "task", "mode", "domain", "use_recipes", "config_file",
})  # fmt: skip
"""Arguments that select the recipe and the machine."""


def _world(text: Mapping[str, str], own: int | None) -> int | None:
    if text.get("num_gpus", "").isdigit():
        return int(text["num_gpus"])
    nodes, each = text.get("nodes", ""), text.get("gpus_per_node", "")
    return int(nodes) * int(each) if nodes.isdigit() and each.isdigit() else own


def _environment(text: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    named = text.get("custom_env_vars", "").split(",")
    given = [*named, text.get("env", "")]
    found = {**own, **dict(item.split("=", 1) for item in given if "=" in item)}
    return {**DETERMINISTIC, **found} if "deterministic" in text else found


def _recipe_of(
    text: Mapping[str, str], program: str, release: str | None
) -> tuple[Recipe, tuple[str, ...], str | None]:
    """Return (recipe of a command, notes on assumptions, reason why it cannot be priced or None).

    text : values of arguments by long name. release : as in `named_recipe`.
    """
    asked = text.get("task", text.get("mode", "pretrain"))
    task = {"lora": "peft", "finetune": "sft"}.get(asked, asked)
    known = task in ("pretrain", "sft", "peft")
    unpriced = None if known else f"--task {asked} is not priced"
    if text.get("domain", "llm") != "llm":
        unpriced = f"--domain {text['domain']} has models that are not text decoders"
    if "recipe" in text or "model" in text:
        name = text.get("recipe", f"{text.get('model', '')}_{task}_config")
        recipe = named_recipe(name.rpartition(".")[2], release)
        if recipe.kind == "tuning" and not recipe.settings and unpriced is None:
            unpriced = f"{name} trains adapters or task samples, whose memory is unknown"
        return recipe, (), unpriced
    model = text.get("model_recipe_name", "")
    if not model and "model_name" in text:
        # Releases before 25.11 have separate arguments for family and size.
        model = "_".join(filter(None, (text["model_name"], text.get("model_size"))))
    elif not model and "model_size" in text:
        model = f"{text.get('model_family_name', '')}_{text['model_size']}"
    notes = list[str]()
    if not model:
        stem = program.rpartition("/")[2].removesuffix(".py").removeprefix("pretrain_")
        recipe = named_recipe(f"{stem}_pretrain_config", release)
        if recipe.model is not None:
            notes.append(f"recipe from the name of the program: {recipe.name}")
        return recipe, tuple(notes), unpriced
    if "use_recipes" in text:
        return named_recipe(f"{model}_{task}_config", release), (), unpriced
    precision = text.get("compute_dtype", "bf16").lower()
    if precision == "fp8":
        precision = f"fp8_{text.get('fp8_recipe', 'ds')}"
    gpu = text.get("gpu", "h100").lower()
    if "gpu" not in text:
        notes.append("--gpu not given; using the recipe of h100")
    variant = text.get("config_variant")
    variant = None if variant is None else variant.lower()
    recipe = performance_recipe(model.lower(), gpu, precision, variant, task=task, release=release)
    if recipe.model is None and not recipe.settings:
        unpriced = unpriced or recipe.notes[0]
        recipe = replace(recipe, notes=())
    return recipe, tuple(notes), unpriced


def _document(source: Configuration) -> BridgeFile:
    document = _container(source.document)
    for name in _SECTIONS:
        if not isinstance(document.get(name) or {}, Mapping):
            problem = f"expected a section, got {shorten(document[name])}"
            raise DocumentError(source.path, problem, key=name)
    given = list[GivenSetting]()
    for key, value in _flattened(document).items():
        given += _dotted(key, value, _shown(value))
    whole = _is_whole(source.document)
    notes = list[str](source.notes)
    if whole or {*SIZES} <= {key for one in given for key in one.settings}:
        recipe = Recipe(name="the file", model=None, kind="library", settings=_UNNAMED)
    else:
        stem = re.sub(r"\W", "_", source.path.stem.lower())
        recipe = named_recipe(re.sub(r"_(llm_)?pretrain.*", "", stem) + "_pretrain_config")
        if recipe.settings:
            notes.append(f"recipe from the name of the file: {recipe.name}")
        else:
            recipe = Recipe(name="the file", model=None, kind="library", settings={})
    return BridgeFile(
        recipe=recipe,
        given=tuple(given),
        world_size=None,
        form="document",
        is_whole=whole,
        notes=(*notes, *recipe.notes),
    )


_UNNAMED: Settings = {
    "dataset.skip_getting_attention_mask_from_dataset": True,
    **(precision_settings("bf16_mixed") or {}),
}
"""Defaults of `ConfigContainer` that differ from those of Megatron-LM."""


_SECTIONS = ("model", "train", "ddp", "optimizer", "comm_overlap")


def _container(document: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = document.get("ConfigContainer")
    return inner if isinstance(inner, Mapping) else document


def _is_whole(document: Mapping[str, Any]) -> bool:
    return str(_container(document).get("_target_", "")).endswith("ConfigContainer")


def _flattened(document: Mapping[str, Any], prefix: str = "") -> Settings:
    found: Settings = {}
    for key, value in document.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and "_target_" in value and "_call_" in value:
            # The value is a type or a function: use the last part of its name.
            found[name] = str(value["_target_"]).rpartition(".")[2]
        elif isinstance(value, Mapping) and value:
            found |= _flattened(value, f"{name}.")
        elif key != "_target_":
            found[name] = value
    return found


def _dotted(key: str, value: Any, shown: str) -> Iterator[GivenSetting]:
    if key == "mixed_precision" and isinstance(value, str):
        settings = precision_settings(value)
        if settings is not None:
            yield GivenSetting(spelled=key, value=shown, settings=settings)
            return
    yield GivenSetting(spelled=key, value=shown, settings={key: value})


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value)


def _parsed(text: str) -> Any:
    """Return the Python value of the VALUE in a Hydra override `KEY=VALUE`; `none` is a text."""
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text.startswith("[") and text.endswith("]"):
        return [_parsed(item) for item in filter(None, (i.strip() for i in text[1:-1].split(",")))]
    if text.lower() == "null":
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if re.fullmatch(r"[0-9]{1,15}", text) else text


# --------------------------------------------------------------------------------------------------
# Conversion of settings to Megatron-LM arguments.


_KINDS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_SMALL = {"bfloat16": 2, "bf16": 2, "float16": 2, "half": 2, "float8": 1, "uint8": 1}
"""Data type -> bytes of an optimizer moment per parameter; 4 for other types."""
_BUCKET = 128 << 20
"""Default bucket size with a `comm_overlap` section, in parameters. Source:
`_get_optimizer_overlap_cfgs` of `src/megatron/bridge/training/comm_overlap.py`."""


def flags_of_settings(settings: Mapping[str, Any], world: int) -> dict[str, Any]:
    """Return the Megatron-LM arguments, by flag, for all settings of a run on `world` GPUs.

    Defaults that differ from Megatron-LM come from `src/megatron/bridge/models/gpt_provider.py`
    (vocabulary, positions, fused loss), `training/comm_overlap.py` (overlaps and buckets) and
    `training/mixed_precision.py`. `mixed_precision.grad_reduce_in_fp32` overrides that of `ddp`.
    """
    get = settings.get
    # Compared by identity: a dropout of 0.0 equals False but must be kept.
    found: dict[str, Any] = {
        flag: value
        for key, flag in VALUES.items()
        if (value := get(key)) is not None and value is not False and value != []
    }
    if not {"hybrid-layer-pattern", "hybrid-override-pattern"} & {*found}:
        # `TransformerConfig` has sizes of mixers for every model.
        found = {flag: value for flag, value in found.items() if not flag.startswith("mamba-")}
    if "experimental-attention-variant" not in found:
        others = ("linear-", "dsa-")
        found = {flag: value for flag, value in found.items() if not flag.startswith(others)}
    found |= {flag: True for key, flag in WHERE_TRUE.items() if get(key) is True}
    found |= {flag: True for key, flag in UNLESS_TRUE.items() if get(key) is False}
    found.setdefault("position-embedding-type", "learned_absolute")
    if "hidden-size" in found and isinstance(found["hidden-size"], int):
        found.setdefault("ffn-hidden-size", 4 * found["hidden-size"])
    if "seq-length" in found:
        found["max-position-embeddings"] = found["seq-length"]
    groups = get("model.num_query_groups")
    if groups is not None and get("model.multi_latent_attention") is not True:
        found |= {"group-query-attention": True, "num-query-groups": groups}
    if get("model.activation_func") == "squared_relu":
        found["squared-relu"] = True
    window = get("model.window_size")
    if isinstance(window, list) and window:
        found["window-size"] = ",".join(map(str, window))
        if get("model.window_attn_skip_freq") is not None:
            found["window-attn-skip-freq"] = get("model.window_attn_skip_freq")
    if get("model.attention_backend") is not None:
        found["attention-backend"] = str(get("model.attention_backend")).rpartition(".")[2]
    if "linear-attention-freq" in found:
        found["linear-attention-freq"] = str(found["linear-attention-freq"])
    if get("model.moe_layer_freq") is not None and "num-experts" in found:
        found["moe-layer-freq"] = str(get("model.moe_layer_freq"))
    vocab = get("model.vocab_size") or get("tokenizer.vocab_size")
    if vocab is not None:
        found["vocab-size"] = vocab
    # Without should_pad_vocab, the vocabulary is padded only to a multiple of the tensor degree.
    padded = get("model.should_pad_vocab") is True
    divisor = get("model.make_vocab_size_divisible_by") or 128
    found["make-vocab-size-divisible-by"] = divisor if padded else 1
    if get("model.cross_entropy_loss_fusion") is None:
        found["cross-entropy-loss-fusion"] = True
    if get("dataset.skip_getting_attention_mask_from_dataset") is not False:
        found["no-create-attention-mask-in-dataloader"] = True
    return {**found, **_layers(settings), **_precision(settings), **_overlaps(settings, world)}


def _layers(settings: Mapping[str, Any]) -> dict[str, Any]:
    layout = settings.get(_LAYOUT)
    if isinstance(layout, list):
        parts = [part if isinstance(part, list) else [part] for part in layout]
        layout = "|".join("".join(_KINDS.get(str(k), str(k)) for k in part) for part in parts)
    if layout is not None:
        return {"pipeline-model-parallel-layout": layout}
    chunks = settings.get(_VP)
    return {} if chunks in (None, 1) else {"num-virtual-stages-per-pipeline-rank": chunks}


def _precision(settings: Mapping[str, Any]) -> dict[str, Any]:
    get = settings.get
    found: dict[str, Any] = {}
    if get("mixed_precision.fp8") is not None:
        found["fp8-recipe"] = get("mixed_precision.fp8_recipe") or "tensorwise"
        if get("mixed_precision.fp8_param") is True:
            found["fp8-param-gather"] = True
    fp32 = get("mixed_precision.grad_reduce_in_fp32", get("ddp.grad_reduce_in_fp32"))
    if fp32 is False and get("mixed_precision.bf16") is True:
        found["grad-reduce-in-bf16"] = True
    if fp32 is True and get("mixed_precision.fp16") is True:
        found["accumulate-allreduce-grads-in-fp32"] = True
    return found


def _overlaps(settings: Mapping[str, Any], world: int) -> dict[str, Any]:
    get = settings.get
    found: dict[str, Any] = {}
    configured = any(key.startswith("comm_overlap.") for key in settings)
    replicas = world // _product(settings) > 1
    sharded = get("ddp.use_distributed_optimizer") is True
    fsdp = get("ddp.use_megatron_fsdp") is True or get("dist.use_megatron_fsdp") is True
    section = "comm_overlap" if configured and sharded else "ddp"
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        # The default in the `comm_overlap` section is True with several data-parallel replicas.
        value = get(f"{section}.{name}", replicas if section == "comm_overlap" else False)
        if value is True:
            found[name.replace("_", "-")] = True
    bucket = get("comm_overlap.bucket_size", get("ddp.bucket_size"))
    if bucket is None and section == "comm_overlap" and replicas and not fsdp:
        bucket = _BUCKET
    if bucket is not None:
        found["ddp-bucket-size"] = bucket
    if fsdp:
        strategy = get("ddp.data_parallel_sharding_strategy") or "no_shard"
        found["data-parallel-sharding-strategy"] = strategy
        # Bridge has other checkpoint settings; this value satisfies the rule of Megatron-LM.
        found["ckpt-format"] = "fsdp_dtensor"
    scattered = get("model.sequence_parallel") is True
    tensor = get("model.tensor_model_parallel_size")
    # Without sequence parallelism, Bridge warns and disables TP overlap.
    asked = get(f"{'comm_overlap' if configured else 'model'}.tp_comm_overlap")
    if asked is True and (not configured or (scattered and tensor not in (None, 1))):
        found["tp-comm-overlap"] = True
    if get("comm_overlap.defer_embedding_wgrad_compute") is True:
        limit = get("comm_overlap.wgrad_deferral_limit")
        if isinstance(limit, int) and limit > 0:
            found["wgrad-deferral-limit"] = limit
    return found


def _product(settings: Mapping[str, Any]) -> int:
    """Return tp * pp * cp, the number of ranks per replica; invalid degrees count as 1."""
    product = 1
    for name in ("tensor_model", "pipeline_model", "context"):
        size = settings.get(f"model.{name}_parallel_size")
        product *= size if isinstance(size, int) and size > 0 else 1
    return product


def other_keys(own: Mapping[str, Any], *, whole: bool) -> Iterator[Ignored]:
    """Yield the settings of a file that are not read, harmless ones and unknown ones.

    own : settings of the file by dotted key. whole : True for a dump of a complete configuration,
    whose values None, False, 0, empty and `none` are skipped.
    """
    off: tuple[Any, ...] = (None, False, 0, 0.0, "", [], "none")
    for key, value in own.items():
        if key in KEYS or key in DATASET_LENGTHS or value == {} or (whole and value in off):
            continue
        row, shown = UNPRICED_KEYS.get(key), _shown(value)
        known = HARMLESS_KEYS.fullmatch(key) is not None if row is None else row.is_off([shown])
        yield _ignored(key, [shown], row, known)


def _ignored(flag: str, words: Sequence[str], row: Unpriced | None, known: bool) -> Ignored:
    """Return an argument or key that is not read; known : True if it has no effect."""
    return Ignored(
        flag=flag,
        value=" ".join(words),
        understood=known,
        concern=None if row is None else row.why,
        changes=BOTH if row is None else row.changes,
    )


def run_of_settings(
    settings: Mapping[str, Any],
    *,
    world_size: int,
    environment: Mapping[str, str],
    gpu: str,
    source: str,
) -> ReadRun:
    """Return the run that settings describe; raises the errors of `read_run`.

    settings : combined settings of recipe and file by dotted key. world_size : number of GPUs.
    environment : environment variables of the ranks. source : name of the file, for messages.
    """
    _refuse_wrong_types(settings, source)
    read = read_run(
        flags_of_settings(settings, world_size),
        world_size=world_size,
        environment=environment,
        gpu=gpu,
        source=source,
    )
    return replace(read, run=refuse_unsupported(ADAPTERS, legal(_beyond(read.run, settings))))


_SWITCHES = frozenset(
    {
        *WHERE_TRUE, *UNLESS_TRUE, "model.multi_latent_attention", "model.should_pad_vocab",
        "model.sequence_parallel", "dataset.skip_getting_attention_mask_from_dataset",
        "ddp.grad_reduce_in_fp32", "ddp.overlap_grad_reduce", "ddp.overlap_param_gather",
        "ddp.use_distributed_optimizer", "ddp.use_megatron_fsdp", "dist.use_megatron_fsdp",
        "comm_overlap.overlap_grad_reduce", "comm_overlap.overlap_param_gather",
        "comm_overlap.tp_comm_overlap", "comm_overlap.defer_embedding_wgrad_compute",
        "mixed_precision.bf16", "mixed_precision.fp16", "mixed_precision.fp8_param",
        "mixed_precision.grad_reduce_in_fp32", "mixed_precision.fp8_dot_product_attention",
        "optimizer.optimizer_cpu_offload", "optimizer.store_param_remainders",
        "optimizer.use_precision_aware_optimizer", "model.tp_comm_overlap",
    }
)  # fmt: skip
"""Keys whose value is true or false."""
_LISTS = frozenset(
    f"model.{name}"
    for name in (
        "cp_comm_type", "hierarchical_context_parallel_sizes", "recompute_modules",
        "offload_modules", "moe_layer_freq", "pipeline_model_parallel_layout", "cuda_graph_scope",
        "window_size", "window_attn_skip_freq", "linear_attention_freq",
    )
) | {"peft.target_modules"}  # fmt: skip
"""Keys whose value may be a list."""
_FRACTION = "optimizer.optimizer_offload_fraction"


def _refuse_wrong_types(settings: Mapping[str, Any], source: str) -> None:
    """Raise DocumentError for an object or list in place of a value, or another value's type."""
    for key, value in settings.items():
        if key in KEYS - _LISTS and isinstance(value, list):
            raise DocumentError(source, f"expected one value, got {shorten(value)}", key=key)
        if key in KEYS and isinstance(value, Mapping):
            raise DocumentError(source, "expected a value, got an object", key=key)
        if key in _SWITCHES and value is not None and not isinstance(value, bool):
            raise DocumentError(source, f"expected true or false, got {shorten(value)}", key=key)
        if key == "model.cuda_graph_impl" and value is None:
            raise DocumentError(source, "expected an implementation or none, got null", key=key)
        known = not (isinstance(value, str) and value.startswith("$"))
        if key in (_LENGTH, *DATASET_LENGTHS) and known and not is_length(value):
            raise DocumentError(source, f"expected a whole number, got {shorten(value)}", key=key)
    fraction = settings.get(_FRACTION)
    if fraction is not None and not 0 <= _real(fraction) <= 1:
        raise DocumentError(source, f"expected 0 to 1, got {shorten(fraction)}", key=_FRACTION)


def is_length(value: Any) -> bool:
    """Return True for a whole number, or for none."""
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _real(value: Any) -> float:
    """Return a number, or text of a number, as float; NaN for other values."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _beyond(run: Run, settings: Mapping[str, Any]) -> Run:
    """Return a run with the settings that are not converted to Megatron-LM arguments.

    These are optimizer states and offload, fp8 attention and adapters.
    """
    get, runtime, adapters = settings.get, run.runtime, _adapters(run, settings)
    moments, master = 8, 4
    aware = get("optimizer.use_precision_aware_optimizer") is True
    offload = 0.0
    if get("optimizer.optimizer_cpu_offload") is True:
        # The default is 0.0 in `OptimizerConfig`, but 1.0 in the arguments of Megatron-LM.
        offload = _real(get(_FRACTION) or 0.0)
    if aware:
        names = (get(f"optimizer.{name}_dtype") for name in ("exp_avg", "exp_avg_sq"))
        moments = sum(_SMALL.get(str(name).rpartition(".")[2], 4) for name in names)
        # fp32 weights are stored as bf16 copies and 2-byte remainders (`store_param_remainders`).
        whole = runtime.precision.fp8_weights or runtime.precision.kind != "bf16"
        whole |= run.split.zero != 1 or offload > 0
        if not whole and get("optimizer.store_param_remainders") is not False:
            master = 2
    fp8_attention = get("mixed_precision.fp8_dot_product_attention") is True
    runtime = replace(
        runtime,
        optimizer=replace(
            runtime.optimizer,
            moments_bytes=moments,
            master_bytes=master,
            offload=offload,
            offload_master=aware and offload > 0,
        ),
        precision=replace(runtime.precision, fp8_attention=fp8_attention),
        adapters=adapters,
        sft=adapters is None and PACKS in settings,
    )
    return replace(run, runtime=runtime)


ADAPTED: Mapping[str, tuple[Target, ...]] = {
    "linear_qkv": ("query", "key", "value"),
    **{f"linear_{name}_proj": ("query",) for name in ("q", "q_down", "q_up")},
    **{f"linear_{name}_proj": ("key",) for name in ("kv_down", "kv_up")},
    "linear_proj": ("projection",),
    "linear_fc1": ("fc1",),
    "linear_fc2": ("fc2",),
    "in_proj": ("mixer_in",),
    "out_proj": ("mixer_out",),
}
"""Module name of Megatron-Core -> weights that get adapters."""


def _adapters(run: Run, settings: Mapping[str, Any]) -> Adapters | None:
    """Return the adapters of a configuration; None without `peft` settings.

    Defaults are those of `peft/lora.py`. In a model with experts, MLP targets include the experts,
    and all experts of a rank share one adapter.

    Raises UnpricedError for target modules that are not in `ADAPTED`.
    """
    own = {key: settings[f"peft.{key}"] for key in ("dim", "target_modules", "dropout")
           if settings.get(f"peft.{key}") is not None}  # fmt: skip
    if not own:
        return None
    names = own.get("target_modules", ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])
    listed = [str(name) for name in names] if isinstance(names, list) else [str(names)]
    others = sorted({*listed} - {*ADAPTED})
    if others:
        raise UnpricedError(
            run.name,
            f"{shortened(others[0])} is not priced",
            key="peft.target_modules",
            remedy=f"Use {', '.join(ADAPTED)}",
        )
    mixture = run.model.experts is not None
    targets = {target for name in listed for target in ADAPTED[name]}
    if mixture:
        experts: dict[str, Target] = {"fc1": "expert_fc1", "fc2": "expert_fc2"}
        targets |= {target for name, target in experts.items() if name in targets}
    rank, dropout = own.get("dim", 32), own.get("dropout", 0.0)
    return Adapters(
        rank=rank if isinstance(rank, int) else 32,
        targets=frozenset(targets),
        fused=True,
        shared_by_experts=mixture,
        dropout=float(dropout) if isinstance(dropout, int | float) else 0.0,
    )
