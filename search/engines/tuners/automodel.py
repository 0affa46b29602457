"""Reader and writer of recipes of NeMo Automodel 0.7, which fine-tune with FSDP2 or DDP.

The keys are those of `recipes/_typed_config.py`, `recipes/_dist_utils.py`, `_peft/lora.py` and
`components/distributed/config.py` in the wheel of 0.7.0. `model.force_hf` selects the layers of
transformers; without it, models of some classes have the layers of Automodel (`_OWN`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autopar.documents.catalog import model_names, shipped_model
from autopar.documents.json import load_object
from autopar.run.rules import Estimate
from autopar.run.run import Run
from autopar.training.lengths import Batching, KnownBatching
from search.engines.arguments import BOTH, Ignored, Unpriced
from search.engines.deepspeed.check import yaml_file
from search.engines.exporter_types import Draft, ExportTarget
from search.engines.huggingface.models import config_named
from search.engines.huggingface.transformers import (
    NamedModel,
    adapted_modules,
    trainer_settings,
    trains_narrow_weights,
)
from search.engines.keys import Keys, flattened
from search.engines.reader import CheckedFile, CheckOptions
from search.engines.text import Configuration, dump_yaml, read_configuration
from search.engines.tuners import keyed
from search.engines.tuners.check import needed
from search.engines.tuners.keyed import KeyedProgram, Shape, Translated
from search.engines.words import required, shell_lines, torchrun

VERSION = "0.7.0"
FILE = "automodel.yaml"
_TITLE = "NeMo Automodel"
_RECIPE = "TrainFinetuneRecipeForNextTokenPrediction"
_DATA = required(
    "DATA_PATH", "set DATA_PATH to a .jsonl file with the column messages, or a dataset of the hub"
)
_OWN = frozenset(
    {
        "Baichuan", "BailingMoeV2", "DeepseekV3", "DeepseekV32", "DeepseekV4", "DeepseekV41",
        "Ernie4_5_Moe", "Gemma4Assistant", "Glm4Moe", "Glm4MoeLite", "GlmMoeDsa", "GptOss",
        "HYV3", "HyMT2", "KimiK3", "KimiLinear48B", "Laguna", "Llama", "MiMoV2", "MiMoV25",
        "MiMoV2Flash", "MiniMaxM2", "Ministral3", "Mistral4", "NemotronH", "Qwen2", "Qwen3",
        "Qwen3Moe", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "Step3p5",
    }
)  # fmt: skip
"""Classes of models, without `ForCausalLM`, that have layers of Automodel
(`_transformers/registry.py`)."""
_COMPILED_NORMS = ("Llama", "Qwen2")
"""Classes whose own layers differ from those of transformers only in their norms, which are
compiled and save their input alone. Layers of Qwen3 are those of transformers."""
_CLASSES: Mapping[str, str] = {
    r"(tiny)?llama-?[23-]|smollm": "Llama",
    r"qwen2": "Qwen2",
    r"qwen3-[0-9.]+b$": "Qwen3",
    r"mistral-(7b|nemo)": "Mistral",
    r"phi-4$": "Phi3",
    r"gemma-2-": "Gemma2",
}
"""Class of a model by a pattern of its shipped name."""
_LOSSES: Mapping[str, int] = {
    # fp32 logits, their log-softmax and gradient
    "MaskedCrossEntropy": 12,
    # the gradient replaces the logits (`loss/triton/te_cross_entropy.py`)
    "TEParallelCrossEntropy": 2,
}
"""Bytes per logit of each loss of `components/loss` that has a price."""
_NARROW = ("auto", "bfloat16", "bf16", "torch.bfloat16")
_WIDE = ("float32", "fp32", "torch.float32", "torch.float")
_STRATEGY = "distributed.strategy"
_RESHARD = "distributed.reshard_after_forward"
_RECOMPUTE = "distributed.activation_checkpointing"
_BATCH = "step_scheduler.local_batch_size"
_LORA = "nemo_automodel.components._peft.lora.PeftConfig"
_POLICY = "distributed.mp_policy"
_CAUSAL = "ForCausalLM"
_BUILDER = "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained"
_LIGER = "model.use_liger_kernel"
_PACKED = "packed_sequence.packed_sequence_size"
_LENGTHS = ("dataset.seq_length", "dataset.seq_len", "dataset.max_length")
_SIZES = {
    "tp_size": "the tensor plans of Automodel are not priced",
    "cp_size": "its context ranks exchange in another way than those of accelerate",
    "pp_size": "its pipeline stages are not priced",
    "ep_size": "its expert ranks are not priced",
}
"""Degrees of `distributed` that have no price, and why."""
_HARMLESS = frozenset(
    {
        "recipe", "dist_env", "rng", "seed", "dataset", "dataloader", "validation_dataset",
        "validation_dataloader", "lr_scheduler", "checkpoint", "wandb", "mlflow", "comet", "ci",
        "clip_grad_norm", "step_scheduler", "optimizer", "nvtx", "tokenizer", "skypilot", "slurm",
        "nemo_run", "benchmark", "mfu", "tool_call_eval", "neftune", "moe_metrics", "fp8", "qat",
        "compile", "quantization", "packed_sequence", "peft._target_", "peft.alpha",
        "peft.lora_A_init", "peft.moe_rank_scaling", "peft.dropout_position", "loss_fn",
        # A recomputed A x is smaller than the estimate can tell.
        "peft.use_memory_efficient_lora",
        "distributed.dp_size", "distributed._target_", "distributed.sequence_parallel",
        "distributed.pipeline",
        "distributed.moe", "distributed.enable_async_tensor_parallel", "distributed.tp_plan",
        "distributed.fsdp2_backward_prefetch_depth", "distributed.fsdp2_forward_prefetch_depth",
        "distributed.patch_is_packed_sequence", "distributed.broadcast_buffers",
        "distributed.find_unused_parameters", "distributed.static_graph", "model._target_",
        "model.trust_remote_code", "model.use_liger_kernel", "model.cache_dir", "model.revision",
        "model.use_cache",
        "model.use_sdpa_patching", "model.tokenizer_name", f"{_POLICY}._target_",
        f"{_POLICY}.cast_forward_inputs", "distributed.offload_policy",
    }
)  # fmt: skip
_TYPES = (*_NARROW, "null", "none")
_UNPRICED: Mapping[str, Unpriced] = {
    "fp8.enabled": Unpriced("GEMMs of 8 bits"),
    "qat.enabled": Unpriced("weights are quantised in the forward"),
    "compile.enabled": Unpriced("the whole model is compiled"),
    "distributed.enable_compile": Unpriced("parts of layers are compiled and recomputed"),
    "distributed.enable_fsdp2_prefetch": Unpriced("more units are gathered at once"),
    "distributed.activation_checkpointing_scope": Unpriced("recomputes in part", off=("all",)),
    "quantization.load_in_4bit": Unpriced("Automodel's weights of 4 bits"),
    "quantization.load_in_8bit": Unpriced("Automodel's weights of 8 bits"),
    "peft.use_triton": Unpriced("fused kernels of adapters", ("time",)),
    "peft.use_dora": Unpriced("magnitudes and norms of weights are not counted"),
    "peft.exclude_modules": Unpriced("adapters of other modules"),
    "peft.match_all_linear": Unpriced("the head has an adapter, too"),
    "peft.lora_dtype": Unpriced("adapters of this type", off=("null", "none", "")),
    "loss_fn.fp32_upcast": Unpriced("the loss is computed in 16 bits", off=("true",)),
    f"{_POLICY}.param_dtype": Unpriced("another precision", off=_TYPES),
    f"{_POLICY}.output_dtype": Unpriced("hidden states of another type", off=_TYPES),
}  # fmt: skip


def owns(source: Configuration) -> bool:
    """Return True for a recipe, and for a command that starts one."""
    if source.command is not None:
        return source.command.program in ("automodel", "nemo_automodel.cli.app")
    return {"step_scheduler", "model"} <= source.document.keys() and (
        "recipe" in source.document or "distributed" in source.document
    )


def read(source: Configuration, asked: CheckOptions) -> CheckedFile:
    """Return the run that a recipe describes, with the findings about it; raises DocumentError."""
    document: Mapping[str, Any] = source.document
    given = dict[str, Any]()
    if source.command is not None:
        path = yaml_file(source)
        document = {} if path is None else read_configuration(path).document
        for flag, words in (source.flags or {}).items():
            given[flag.replace("-", "_")] = " ".join(words) or "true"
        given.pop("nproc_per_node", None)
    values = {**dict(flattened(document)), **given}
    # A recipe may have several sections of validation data, and `translate_value` reads none.
    values = {
        key: None if str(one).lower() == "none" else one
        for key, one in values.items()
        if not key.startswith("validation_dataset")
    }
    return keyed.read(PROGRAM, source, values, asked)


def _translated(keys: Keys, asked: CheckOptions, world: int) -> Translated:
    """Return the keys of a recipe in those of accelerate and TRL.

    Raises UnpricedError for degrees and layers without a price.
    """
    name = "recipe._target_" if _has(keys, "recipe") else "recipe"
    recipe = keys.text(name, _RECIPE).rpartition(".")[2]
    if recipe != _RECIPE:
        raise keys.unpriced("recipe", f"{recipe} is not read", f"Use {_RECIPE}")
    for name, why in _SIZES.items():
        if keys.number(f"distributed.{name}", 1, least=0) > 1:
            raise keys.unpriced(f"distributed.{name}", f"is above 1, and {why}", "Set it to 1")
    strategy = keys.text(_STRATEGY, "fsdp2").lower()
    if strategy not in ("fsdp2", "ddp"):
        raise keys.unpriced(_STRATEGY, f"{strategy} is not priced", "Use fsdp2")
    loss = keys.text("loss_fn._target_", "MaskedCrossEntropy").rpartition(".")[2]
    if loss not in _LOSSES:
        raise keys.unpriced("loss_fn._target_", f"{loss} makes no logits, and has no price",
                            "Use MaskedCrossEntropy to price the rest")  # fmt: skip
    narrow = _type_of(keys) in _NARROW
    document: dict[str, Any] = {"distributed_type": "MULTI_GPU"}
    if strategy == "ddp":
        cast = keys.text("distributed.autocast_dtype")
        document["mixed_precision"] = "bf16" if narrow or cast in _NARROW else "no"
    else:
        document = keyed.accelerated(
            keys,
            world,
            shards=world // _divisor(keys, "distributed.dp_replicate_size", world),
            version=2,
            reshards=keys.flag(_RESHARD, default=True),
            host=_has(keys, "distributed.offload_policy"),
        )
    flags = dict(_flags(keys, asked, narrow=narrow))
    lora = "use-peft" in flags
    attention = flags["attn-implementation"][0]
    layers = _class_of(asked.model or flags["model-name-or-path"][0], Path(keys.source).parent)
    automodel = keys.text("model._target_", _BUILDER).startswith(_BUILDER.partition(".")[0])
    own = not keys.flag("model.force_hf") and automodel and layers in (*_OWN, None)
    shape = Shape(
        saved_norms=not (own and layers in _COMPILED_NORMS),
        logit_bytes=_LOSSES[loss],
        # Frozen tables stay in the root (`_fully_shard_untied_input_output_embeddings`).
        apart=strategy == "fsdp2" and not lora,
        narrow=narrow,
        wide_gradients=keys.text(f"{_POLICY}.reduce_dtype", "float32") in _WIDE,
    )
    way: Batching = "packed" if attention.startswith("flash") else "packed-full"
    padded = keys.text("dataset.padding") == "max_length"
    packs = keys.number(_PACKED, 0, least=0) > 0
    return Translated(
        document=document,
        flags=flags,
        global_batch=keys.number("step_scheduler.global_batch_size", 32),
        shape=shape,
        batching=KnownBatching(way if packs else "maximum" if padded else "longest"),
        notes=tuple(_notes(keys, liger=automodel and not own)),
        unpriced=tuple(_of_defaults(keys, layers, own=own)),
    )


def _class_of(name: str, folder: Path) -> str | None:
    """Return the class of a causal model without `ForCausalLM`; None if it is unknown.

    It is empty if a config.json names none, which selects the layers of transformers.

    name : name or path of the model, relative to `folder`
    """
    config = config_named(name, folder)
    if config is not None:
        classes = load_object(config).data.get("architectures") or [""]
        first = str(classes[0]) if isinstance(classes, list) else "unknown"
        return first.removesuffix(_CAUSAL) if not first or first.endswith(_CAUSAL) else None
    shipped = shipped_model(name)
    if shipped not in model_names():
        return None
    return next((one for like, one in _CLASSES.items() if re.match(like, shipped)), None)


def _type_of(keys: Keys) -> str:
    """Return the type of the weights; raises UnpricedError for one without a price."""
    kind = keys.text("model.dtype") or keys.text("model.torch_dtype", "auto")
    if kind not in (*_NARROW, *_WIDE):
        raise keys.unpriced("model.torch_dtype", f"{kind} is not priced", "Use bfloat16")
    return kind


def _has(keys: Keys, section: str) -> bool:
    return any(key.startswith(f"{section}.") for key in keys.values)


def _divisor(keys: Keys, key: str, world: int) -> int:
    number = keys.number(key, 1)
    if world % number:
        raise keys.fail(key, f"{number} does not divide the {world} GPUs")
    return number


def _flags(
    keys: Keys, asked: CheckOptions, *, narrow: bool
) -> Iterator[tuple[str, tuple[str, ...]]]:
    config = "model.config"
    if _has(keys, config):
        config += ".pretrained_model_name_or_path"
    yield "model-name-or-path", (keys.text(PROGRAM.model) or keys.text(config),)
    length = asked.seq_length or keys.number(_PACKED, 0, least=0)
    length = length or keys.number(keys.first(*_LENGTHS), 0, least=0)
    if length:
        yield "max-length", (str(length),)
    yield "per-device-train-batch-size", (str(keys.number(_BATCH, 1)),)
    yield "attn-implementation", (keys.text("model.attn_implementation", "sdpa"),)
    yield "dtype", ("bfloat16" if narrow else "float32",)
    again = keys.text(_RECOMPUTE, "false").lower()
    if again not in ("true", "full", "false", "none", "off"):
        raise keys.unpriced(_RECOMPUTE, f"{again} is not priced", "Use full")
    yield "gradient-checkpointing", (str(again in ("true", "full")),)
    if keys.number("step_scheduler.max_steps", 0, least=0):
        yield "max-steps", (keys.text("step_scheduler.max_steps"),)
    if not keys.flag("distributed.defer_fsdp_grad_sync", default=True):
        yield keyed.SYNCED_FLAG
    yield from keyed.optimizer_flag(
        keys, "optimizer._target_", keys.text("optimizer._target_", "torch.optim.AdamW"),
        fused=keys.flag("optimizer.fused"), decay=keys.text("optimizer.weight_decay", "0"),
    )  # fmt: skip
    if _has(keys, "peft"):
        if keys.text("peft._target_", _LORA) != _LORA:
            raise keys.unpriced("peft._target_", "is not priced", f"Use {_LORA}")
        dropout = keys.text("peft.dropout", "0.0")
        names = keys.text("peft.target_modules").replace("*.", "").split(",")
        targets = "all-linear" if {*names} <= {"", "*_proj"} else ",".join(names)
        yield from keyed.adapter_flags(keys.number("peft.dim", 8), dropout, targets).items()


def _notes(keys: Keys, *, liger: bool) -> Iterator[str]:
    if keys.text(_STRATEGY, "fsdp2") == "fsdp2" and not keys.has(_RESHARD):
        yield f"{_RESHARD} not given; the last layer, which stays gathered, is priced as freed"
    if liger and not keys.has(_LIGER):
        yield f"{_LIGER} not given; kernels of Liger, which Automodel does not install, save memory"


def _of_defaults(keys: Keys, layers: str | None, *, own: bool) -> Iterator[Ignored]:
    """Yield settings of layers that have no price.

    layers : class of the model; own : True if its layers are those of Automodel
    """
    packed = keys.number(_PACKED, 0, least=0)
    if own and packed:
        yield Ignored(
            flag=_PACKED,
            value=str(packed),
            understood=False,
            concern="attention of Transformer Engine where it is installed",
        )
    if own and layers in _COMPILED_NORMS:
        yield _layers_unpriced("norms that Automodel compiles", ("time",))
    elif own and layers != "Qwen3":
        yield _layers_unpriced("layers of Automodel itself, which have no price", BOTH)
    elif not own and keys.flag(_LIGER):
        yield Ignored(
            flag=_LIGER,
            value="true",
            understood=False,
            concern="kernels of Liger, if it is installed",
        )


def _layers_unpriced(concern: str, changes: tuple[Estimate, ...]) -> Ignored:
    return Ignored(
        flag="model.force_hf", value="false", understood=False, concern=concern, changes=changes
    )


def _spelled(key: str, value: str | None) -> str:
    return f"{key}: {value}" if value else key


PROGRAM = KeyedProgram(
    name="automodel",
    title=_TITLE,
    translate=_translated,
    harmless=_HARMLESS,
    unpriced=_UNPRICED,
    model="model.pretrained_model_name_or_path",
    lengths=(_PACKED, *_LENGTHS),
    micro_batch=_BATCH,
    recompute=_RECOMPUTE,
    reshard=_RESHARD,
    spelled=_spelled,
)


# --------------------------------------------------------------------------------------------------
# Writing.


def as_trained(run: Run) -> Run:
    """Return a run with Automodel's loss, adapters of 16 bits and gradients reduced in fp32."""
    tuned = run.runtime.adapters is not None
    narrow = tuned or trains_narrow_weights(run)
    return keyed.shaped(keyed.plain_kernels(run), Shape(12, apart=not tuned, narrow=narrow))


def write(run: Run, place: ExportTarget) -> Draft:
    """Return the files of a run and its launch command.

    Raises InputError for a run of another engine, and UnsupportedError for a run with stages,
    other ranks, or a precision or optimizer that a recipe cannot name.
    """
    model = keyed.model_of(run, place, _TITLE)
    head = f"# For {_TITLE} {VERSION}, written by autopar-export: pip install nemo_automodel"
    text = f"{head}=={VERSION}{needed(run)}\n{dump_yaml(_document(run, model))}"
    words = shell_lines([*_words(run, model)]).rstrip("\n")
    return Draft(
        version=VERSION,
        files={FILE: text, **model.files},
        launch=torchrun(place, words),
        notes=tuple(_to_fill_in(run, model)),
    )


def _document(run: Run, model: NamedModel) -> dict[str, Any]:
    adapters, strategy = run.runtime.adapters, run.strategy
    narrow = adapters is not None or trains_narrow_weights(run)
    optimizer, fused = keyed.optimizer_class(run, _TITLE)
    flash = not run.kernels.repeated_heads
    sharded = run.split.zero > 0
    steps = {} if run.steps is None else {"max_steps": run.steps}
    found: dict[str, Any] = {
        "recipe": _RECIPE,
        "step_scheduler": {
            "global_batch_size": strategy.global_batch,
            "local_batch_size": strategy.micro_batch,
            "num_epochs": 1,
            **steps,
        },
        "dist_env": {"backend": "nccl", "timeout_minutes": 30},
        "model": {
            "_target_": _BUILDER,
            "pretrained_model_name_or_path": model.name,
            "torch_dtype": "bfloat16" if narrow else "float32",
            "attn_implementation": trainer_settings(run, model)["attn_implementation"],
            "force_hf": True,
            "use_liger_kernel": False,
        },
        "distributed": {
            "strategy": "fsdp2" if sharded else "ddp",
            _RECOMPUTE.partition(".")[2]: strategy.recomputed.kind != "none",
            **(_sharding(run) if sharded else {} if narrow else {"autocast_dtype": "bfloat16"}),
        },
    }
    if adapters is not None:
        found["peft"] = {
            "_target_": _LORA,
            "target_modules": adapted_modules(run),
            "dim": adapters.rank,
            "alpha": 2 * adapters.rank,
            "dropout": adapters.dropout,
            # the copy of the input that PEFT makes
            "dropout_position": "pre",
            "use_memory_efficient_lora": False,
        }
    return found | {
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "optimizer": {
            "_target_": optimizer,
            **({"fused": True} if fused else {}),
            "lr": 1.0e-4 if adapters is not None else 1.0e-5,
            "weight_decay": 0,
        },
        "dataset": {
            "_target_": "nemo_automodel.components.datasets.llm.chat_dataset.ChatDataset",
            "path_or_dataset_id": "DATA_PATH",
            "split": "train",
            "seq_length": run.seq_length,
            # Packed sequences are separate only with flash attention.
            "padding": "do_not_pad" if flash else "max_length",
            "truncation": True,
        },
        "packed_sequence": {
            "packed_sequence_size": run.seq_length if flash else 0,
            "packing_strategy": "neat",
        },
        "dataloader": {
            "_target_": "torchdata.stateful_dataloader.StatefulDataLoader",
            "shuffle": True,
        },
    }


def _sharding(run: Run) -> dict[str, Any]:
    host = {"_target_": "torch.distributed.fsdp.CPUOffloadPolicy"}
    return {
        "dp_replicate_size": run.split.replicas,
        _RESHARD.partition(".")[2]: run.split.zero == 3,
        "defer_fsdp_grad_sync": not run.syncs_each_batch,
        **({"offload_policy": host} if run.runtime.optimizer.offload_weights else {}),
    }


def _words(run: Run, model: NamedModel) -> Iterator[str]:
    yield f"-m nemo_automodel.cli.app {FILE}"
    yield f'--dataset.path_or_dataset_id="{_DATA}"'
    yield '${LOAD:+--model.pretrained_model_name_or_path="$LOAD"}'
    if run.steps is None:
        yield '${TRAIN_ITERS:+--step_scheduler.max_steps="$TRAIN_ITERS"}'
    yield '${SAVE:+--checkpoint.checkpoint_dir="$SAVE"}'


def _to_fill_in(run: Run, model: NamedModel) -> Iterator[str]:
    yield (
        "DATA_PATH is the absolute path of a .jsonl file with the column messages, or a dataset of "
        "the Hugging Face hub"
    )
    if model.files:
        yield "LOAD names the weights: only the sizes of the model are known"
    steps = "" if run.steps is not None else "; TRAIN_ITERS, steps"
    where = f"LOAD, a folder with the weights of {model.name}; "
    yield f"optional: {where}SAVE, folder of the checkpoints{steps}"
