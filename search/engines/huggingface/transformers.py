"""Model files and script arguments of a run, for the user's script with Hugging Face's Trainer.

With DeepSpeed and accelerate, the script sets the model, the sequence length and the batch. A model
of the Hugging Face hub is passed by name. Any other model is written as a `config.json`, which
`search.engines.huggingface.models` reads.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from autopar.documents.catalog import find_model, model_names
from autopar.documents.json import load_object
from autopar.documents.spec import spec_document
from autopar.errors import InputError, UnsupportedError
from autopar.records import Record, replace
from autopar.run.architecture import LightningAttention, Model, Recurrent, ShortConvolution
from autopar.run.of_plan import uniform_model
from autopar.run.run import Run
from autopar.training.adapters import Adapters
from search.engines.exporter_types import ExportTarget, spec_of
from search.engines.huggingface.models import Decoder, projections_of, published_model
from search.engines.huggingface.named_optimizers import of_wide_weights, word_of
from search.engines.plans import ExportJob, target_of
from search.engines.words import one_line, required

_FOLDER = "model"


class NamedModel(Record):
    """A model for `--model_name_or_path`."""

    name: str
    files: Mapping[str, str]
    """Text of the `config.json` to write, by path; empty if the name needs no file."""
    stand_in: str | None = None
    """Text of a `config.json` with the sizes of the run, if the user's script builds the model.

    None if the name or `files` define the model.
    """
    sinks: bool = False
    """True if the softmax of the model has attention sinks."""


def model_for(run: Run, place: ExportTarget, title: str, *, hub: bool = False) -> NamedModel:
    """Return the model of a run for a script.

    title : name of the engine, for messages. hub : True to name a shipped model by its repository
    on the Hugging Face hub, with weights; False only if its `config.json` cannot be written.

    Raises InputError if the name in `place` belongs to a model of other sizes. Raises
    UnsupportedError for a model that no supported `config.json` describes.
    """
    name, model = (place.repository if hub else None) or place.model, run.model
    if model.has_patches:
        if hub:
            raise UnsupportedError(f"{title} trains language models, not those of images or videos")
        return _of_images(run, place, title)
    # Names of the hub contain an owner.
    if name is not None and "/" in name:
        found = published_model(name)
        if found is not None and _sizes(found) != _sizes(model):
            raise InputError(
                f"{name} has other sizes than the model of the plan",
                remedy="Use the model of the plan",
            )
        if found is not None:
            return NamedModel(name=name, files={}, sinks=_has_sinks(place))
    repository = None if place.of_script else _repository_of(model, name, always=hub)
    if repository is not None:
        return NamedModel(name=repository, files={}, sinks=_has_sinks(place))
    config = _config(model, run.seq_length, place, title)
    text = json.dumps(config, indent=2) + "\n"
    if place.of_script:
        asked = required("LOAD", f"set LOAD to the weights or the folder of {one_line(str(name))}")
        return NamedModel(name=asked, files={}, stand_in=text)
    return NamedModel(name=_FOLDER, files={f"{_FOLDER}/config.json": text})


def _of_images(run: Run, place: ExportTarget, title: str) -> NamedModel:
    """Return a model of images or videos, whose folder the user names: sizes do not define it."""
    spec = spec_of(place, run.model)
    if spec is None:
        raise UnsupportedError(
            f"{title} needs the description of {place.model or 'the model'}", remedy="Add --model"
        )
    asked = required("LOAD", f"set LOAD to the folder of {one_line(spec.name)}")
    return NamedModel(name=asked, files={}, stand_in=json.dumps(spec_document(spec)))


def _has_sinks(place: ExportTarget) -> bool:
    return place.spec is not None and any(one.attention_sinks for one in place.spec.layers)


def _sizes(model: Model) -> tuple[object, ...]:
    attention = model.attention
    return (model.hidden, model.num_layers, model.dense_width, model.vocab, attention.heads,
            attention.kv_heads, model.experts and model.experts.number)  # fmt: skip


def unwritable_model(model: Model, name: str | None) -> str:
    """Return the parts of a model that no argument of a script can name; empty if it has none.

    name : name of the model, with its owner on the Hugging Face hub, or of a shipped model; None:
        only its sizes are known.
    """
    if model.has_patches:
        return ""
    named = name is not None and "/" in name and published_model(name) is not None
    return "" if named or _repository_of(model, name) is not None else " and ".join(_others(model))


def _repository_of(model: Model, name: str | None, *, always: bool = False) -> str | None:
    """Return the repository of a shipped model, or None.

    always : False: None as well if a `config.json` can be written.
    """
    if name is None or name not in model_names() or not (always or _others(model)):
        return None
    source = str(load_object(find_model(name)).data.get("source", ""))
    found = re.search(r"config\.json of ([\w.-]+/[\w.-]+) on the Hugging Face hub", source)
    known = None if found is None else published_model(found[1])
    same = known is not None and (*_sizes(known), known.mtp) == (*_sizes(model), model.mtp)
    return found[1] if found is not None and same else None


def as_trainer(run: Run) -> Run:
    """Return a run with the loss of transformers' Trainer, which holds all logits in fp32.

    Adapters have 32 bits, as PEFT makes them.
    """
    runtime, kernels = run.runtime, replace(run.kernels, loss="whole")
    optimizer = runtime.optimizer
    if runtime.adapters is not None and optimizer.master_bytes == 0:
        optimizer = of_wide_weights(optimizer)
    return replace(run, runtime=replace(runtime, kernels=kernels, optimizer=optimizer))


def script_place(job: ExportJob, title: str) -> tuple[Model, ExportTarget]:
    """Return the model of a plan and its export target.

    If no supported `config.json` describes the model (an encoder, for example), the user's script
    builds it. A decoder with the same number of layers then replaces it in the run.
    """
    place = target_of(job)
    try:
        model = uniform_model(job.spec)
        _config(model, job.seq_length, place, title)
    except InputError:
        return _stand_in(job), replace(place, spec=None, of_script=True)
    return model, place


def _stand_in(job: ExportJob) -> Model:
    spec = job.spec
    layer, width = spec.layers[-1], 64
    # Every degree divides the world size, so this number of heads is always legal.
    heads = layer.num_heads or job.plan.world_size
    return Decoder(
        hidden=heads * width,
        layers=spec.num_layers,
        heads=heads,
        groups=heads,
        ffn=layer.ffn_hidden_size or 4 * layer.hidden_size,
        vocab=spec.vocab_size or 32000,
    ).model()


def _config(model: Model, seq: int, place: ExportTarget, title: str) -> dict[str, Any]:
    """Return a model as a `config.json` of a type that `_kind` names.

    Raises UnsupportedError for a model with parts that these configurations lack.
    """
    attention, found = model.attention, _others(model)
    if found:
        raise UnsupportedError(
            f"a config.json cannot describe {' and '.join(found)}, which the plan needs in {title}",
            remedy="Use the Hugging Face name of the model, with its owner",
        )
    kind, name = _kind(model)
    spec = spec_of(place, model)
    base = None if spec is None else spec.rotary_base
    return {
        "model_type": kind,
        "architectures": [f"{name}ForCausalLM"],
        "hidden_size": model.hidden,
        "intermediate_size": model.dense_width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.width,
        "vocab_size": model.vocab,
        "max_position_embeddings": seq,
        "tie_word_embeddings": model.tied,
        **({} if base is None else {"rope_theta": base}),
        **({"partial_rotary_factor": attention.rotary_share} if kind == "minimax_m2" else {}),
        **_experts(model, kind),
        **_layers(model),
    }


def _others(model: Model) -> list[str]:
    """Return the parts of a model that the configurations of `_config` lack."""
    attention, experts, layer = model.attention, model.experts, model.last
    shared = experts is not None and experts.shared_width > 0
    normed, rotary = attention.head_norms != "none", model.positions == "rotary"
    wide, mixer = attention.head_norms == "all", _mixer(model)
    # the first layers of LFM2 are dense
    short = isinstance(mixer, ShortConvolution)
    apart = sorted(model.mixtures) if short else [True] * model.num_layers
    lightning = isinstance(mixer, LightningAttention)
    others = {
        "mixers of other models": model.needs_megatron,
        "short convolutions and heads without norms": short and (wide or not normed),
        "lightning attention and norms of heads": lightning and normed,
        "lightning attention without experts": lightning and experts is None,
        "norms of queries and keys over all heads without experts": wide and experts is None,
        "experts that every token visits": shared,
        "experts in some layers": experts is not None and list(model.mixtures) != apart,
        "experts with biases": experts is not None and attention.qkv_biases,
        "latent attention": attention.latent is not None,
        "sliding-window attention": attention.window is not None,
        "MTP layers": model.mtp > 0,
        "an MLP without a gate": layer.gates == 1,
        "biases": layer.biases,
        "LayerNorm": layer.norm != "rms",
        "more or fewer norms than one before each part": model.has_other_norms,
        f"{model.positions} positions": not rotary,
        "positions in a part of each head": rotary and attention.rotary_share != 1.0 and not wide,
        "norms of heads with biases": normed and attention.qkv_biases,
        "heads that do not divide its width": model.hidden % attention.heads != 0,
    }
    return [what for what, there in others.items() if there]


def _kind(model: Model) -> tuple[str, str]:
    """Return the `model_type` of a model and the prefix of its class name."""
    norms = model.attention.head_norms != "none"
    mixer = _mixer(model)
    if isinstance(mixer, ShortConvolution):
        return ("lfm2", "Lfm2") if model.experts is None else ("lfm2_moe", "Lfm2Moe")
    if isinstance(mixer, LightningAttention):
        return "minimax", "MiniMax"
    if model.attention.head_norms == "all":
        return "minimax_m2", "MiniMaxM2"
    if model.experts is not None:
        return ("qwen3_moe", "Qwen3Moe") if norms else ("mixtral", "Mixtral")
    if norms:
        return "qwen3", "Qwen3"
    return ("qwen2", "Qwen2") if model.attention.qkv_biases else ("llama", "Llama")


def _experts(model: Model, kind: str) -> dict[str, Any]:
    experts = model.experts
    if experts is None:
        return {}
    found: dict[str, Any] = {"num_experts_per_tok": experts.per_token}
    if kind in ("mixtral", "minimax", "minimax_m2"):
        return {**found, "num_local_experts": experts.number, "intermediate_size": experts.width}
    return {
        **found,
        "num_experts": experts.number,
        "moe_intermediate_size": experts.width,
        **({"num_dense_layers": model.mixtures.index(True)} if kind == "lfm2_moe" else {}),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _mixer(model: Model) -> Recurrent | None:
    return next((one.recurrent for one in model.kinds if one.recurrent is not None), None)


def _layers(model: Model) -> dict[str, Any]:
    """Return the keys of layers with a mixer other than attention."""
    mixer = _mixer(model)
    if mixer is None:
        return {}
    other = "conv" if isinstance(mixer, ShortConvolution) else "linear_attention"
    kinds = ["full_attention" if one.attention else other for one in model.each_layer]
    if isinstance(mixer, LightningAttention):
        return {"layer_types": kinds, "block_size": mixer.chunk}
    assert isinstance(mixer, ShortConvolution), "others have no such configuration"
    return {
        "layer_types": kinds,
        "conv_L_cache": mixer.kernel,
        "conv_bias": mixer.biases,
        # the width of the MLP is final
        "block_auto_adjust_ff_dim": False,
    }


def script_words(run: Run, model: NamedModel, *, checkpoints: bool = True) -> Iterator[str]:
    """Yield the arguments of the user's script, with the names of TrainingArguments.

    checkpoints : as in `trainer_settings`.
    """
    # Initial weights (LOAD) contain their own configuration.
    name = model.name if model.stand_in is not None else f"${{LOAD:-{model.name}}}"
    yield f'--model_name_or_path "{name}"'
    yield f"--block_size {run.seq_length}"
    if run.runtime.adapters is None and run.runtime.states.keeper != "deepspeed":
        # transformers 5 loads weights in the type of the checkpoint.
        yield f"--dtype {'bfloat16' if trains_narrow_weights(run) else 'float32'}"
    for key, value in trainer_settings(run, model, checkpoints=checkpoints).items():
        text = " ".join(value) if isinstance(value, list) else str(value)
        yield f"--{key} {shlex.quote(json.dumps(value)) if isinstance(value, dict) else text}"
    if run.steps is None:
        yield '${TRAIN_ITERS:+--max_steps "$TRAIN_ITERS"}'
    else:
        yield f"--max_steps {run.steps}"
    yield '${SAVE:+--output_dir "$SAVE"}'


def image_notes(run: Run) -> Iterator[str]:
    """Yield the note on the samples of a model of images or videos; nothing for other models."""
    if run.model.has_patches:
        yield (
            f"--block_size is for autopar check: choose the resolution for {run.seq_length:,} "
            "tokens (patches, and text where blocks attend to both); text encoders and the "
            "autoencoder are not part of the plan"
        )


def trains_narrow_weights(run: Run) -> bool:
    """Return True if all weights are trained in 16 bits, without mixed precision."""
    runtime = run.runtime
    return runtime.adapters is None and runtime.optimizer.master_bytes == 0


SYNCED: Mapping[str, Any] = {
    "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
}
"""Argument of the Trainer that reduces gradients after each micro-batch."""


def trainer_settings(run: Run, model: NamedModel, *, checkpoints: bool = True) -> dict[str, Any]:
    """Return the settings of a run by name: those of TrainingArguments and of TRL's ModelConfig.

    checkpoints : True if the script enables recomputation, False if the configuration does. Trainer
    rejects a run in which both enable it.
    """
    kernels = run.kernels
    # Other kernels of flash attention have no attention sinks (gpt-oss).
    flash = "flash_attention_4" if model.sinks else "flash_attention_2"
    found: dict[str, Any] = {
        "per_device_train_batch_size": run.strategy.micro_batch,
        "gradient_accumulation_steps": run.strategy.micro_batches,
        "attn_implementation": "sdpa" if kernels.repeated_heads else flash,
    }
    if checkpoints and run.strategy.recomputed.kind != "none":
        found["gradient_checkpointing"] = True
    if kernels.compiled:
        found["torch_compile"] = True
    found["optim"] = word_of(run.runtime.optimizer)
    if run.syncs_each_batch:
        found |= SYNCED
    if run.runtime.adapters is not None:
        found |= _adapters(run, run.runtime.adapters)
    return found


def _adapters(run: Run, adapters: Adapters) -> dict[str, Any]:
    """Return the settings of LoRA adapters, with the names of TRL's `ModelConfig`."""
    found: dict[str, Any] = {
        "use_peft": True,
        "lora_r": adapters.rank,
        "lora_dropout": adapters.dropout,
    }
    names = adapted_modules(run)
    if names:
        found["lora_target_modules"] = names
    if adapters.base == "nf4":
        found |= {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "use_bnb_nested_quant": adapters.nested,
            # FSDP and ZeRO-3 shard floating-point tensors alone.
            "bnb_4bit_quant_storage": "bfloat16",
        }
    elif adapters.base == "int8":
        found["load_in_8bit"] = True
    return found


def adapted_modules(run: Run) -> list[str]:
    """Return the names in transformers of the modules that have an adapter."""
    adapters = run.runtime.adapters
    targets = frozenset() if adapters is None else adapters.targets
    modules = projections_of(run.model).items()
    return [name for name, own in modules if own and targets.issuperset(own)]
