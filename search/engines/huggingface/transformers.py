"""What a script of Hugging Face's Trainer is told of a launch: its model and its arguments.

DeepSpeed and accelerate leave model, sequence and batch to the script, which is the user's. A model
that the hub has goes by its name; another one by its sizes, as a `config.json` that
`search.engines.huggingface.models` reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from autopar.errors import InputError, UnsupportedError
from autopar.records import Record
from autopar.run.launch import Launch, Model
from autopar.training.adapters import Adapters, Target
from search.engines.huggingface.models import model_named
from search.engines.place import Place, spec_of

_FOLDER = "model"


class NamedModel(Record):
    """A model as `--model_name_or_path` takes it."""

    name: str
    files: Mapping[str, str]
    """Its `config.json`, where no hub has it by that name."""


def model_for(launch: Launch, place: Place, title: str) -> NamedModel:
    """Return the model of a launch.

    Raises InputError where the place names another model, UnsupportedError for sizes that no
    `config.json` known here says.
    """
    name, model = place.model, launch.model
    # names of the hub have an owner
    if name is not None and "/" in name:
        found = model_named(name)
        if found is not None and _sizes(found) != _sizes(model):
            raise InputError(f"{name} has other sizes than the model of the launch; name that one")
        if found is not None:
            return NamedModel(name=name, files={})
    config = _config(launch, place, title)
    text = json.dumps(config, indent=2) + "\n"
    return NamedModel(name=_FOLDER, files={f"{_FOLDER}/config.json": text})


def _sizes(model: Model) -> tuple[object, ...]:
    attention = model.attention
    return (model.hidden, model.num_layers, model.ffn, model.vocab, attention.heads,
            attention.groups, model.experts and model.experts.number)  # fmt: skip


def _config(launch: Launch, place: Place, title: str) -> dict[str, Any]:
    """Return sizes as the configurations of Llama, Qwen 2 and 3 and Mixtral name them."""
    model, attention = launch.model, launch.model.attention
    experts = model.experts
    shared = experts is not None and experts.shared_ffn > 0
    others = {
        "experts that every token visits": shared,
        "experts in some layers": experts is not None and not all(model.expert_layers),
        "experts beside biases": experts is not None and model.qkv_biases,
        "latent attention": attention.latent is not None,
        "windows of attention": attention.window is not None,
        "modules of further tokens": model.mtp > 0,
        "an MLP without a gate": not model.gated,
        "biases": model.biases,
        "LayerNorm": model.norm != "rms",
        f"{model.positions} positions": model.positions != "rotary",
        "positions in a part of each head": model.rotary_share != 1.0,
        "norms of heads beside biases": attention.head_norms and model.qkv_biases,
        "heads that do not divide its width": model.hidden % attention.heads != 0,
    }
    found = [what for what, there in others.items() if there]
    if found:
        raise UnsupportedError(
            f"no config.json that is written here has {' and '.join(found)}, which {title} would "
            "need for the launch",
            remedy="name the model as Hugging Face does, with its owner",
        )
    kind, name = _kind(model)
    spec = spec_of(place, model)
    base = None if spec is None else spec.rotary_base
    return {
        "model_type": kind,
        "architectures": [f"{name}ForCausalLM"],
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.groups,
        "head_dim": attention.width,
        "vocab_size": model.vocab,
        "max_position_embeddings": launch.seq,
        "tie_word_embeddings": model.tied,
        **({} if base is None else {"rope_theta": base}),
        **_experts(model, kind),
    }


def _kind(model: Model) -> tuple[str, str]:
    """Return the type of a model and the name of its class."""
    norms = model.attention.head_norms
    if model.experts is not None:
        return ("qwen3_moe", "Qwen3Moe") if norms else ("mixtral", "Mixtral")
    if norms:
        return "qwen3", "Qwen3"
    return ("qwen2", "Qwen2") if model.qkv_biases else ("llama", "Llama")


def _experts(model: Model, kind: str) -> dict[str, Any]:
    experts = model.experts
    if experts is None:
        return {}
    found: dict[str, Any] = {"num_experts_per_tok": experts.per_token}
    if kind == "mixtral":
        return {**found, "num_local_experts": experts.number, "intermediate_size": experts.ffn}
    return {
        **found,
        "num_experts": experts.number,
        "moe_intermediate_size": experts.ffn,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def script_words(launch: Launch, model: NamedModel) -> Iterator[str]:
    """Yield the arguments of the user's script, one to a line, as TrainingArguments names them."""
    trainer = launch.trainer
    assert trainer is not None, "scripts of Hugging Face run launches of torch"
    # weights to begin with bring their own configuration
    yield f'--model_name_or_path "${{LOAD:-{model.name}}}"'
    yield f"--block_size {launch.seq}"
    yield f"--per_device_train_batch_size {launch.micro_batch}"
    yield f"--gradient_accumulation_steps {launch.micro_batches}"
    kernel = "sdpa" if trainer.repeated_heads else "flash_attention_2"
    yield f"--attn_implementation {kernel}"
    if trainer.checkpoint != "none":
        yield "--gradient_checkpointing True"
    if trainer.compiled:
        yield "--torch_compile True"
    if launch.optimizer.kind == "adam8bit":
        yield "--optim adamw_bnb_8bit"
    if launch.adapters is not None:
        yield from _adapters(launch.adapters)
    if launch.steps is None:
        yield '${TRAIN_ITERS:+--max_steps "$TRAIN_ITERS"}'
    else:
        yield f"--max_steps {launch.steps}"
    yield '${SAVE:+--output_dir "$SAVE"}'


_MODULES: Mapping[Target, tuple[str, ...]] = {
    "query": ("q_proj",),
    "key": ("k_proj",),
    "value": ("v_proj",),
    "projection": ("o_proj",),
    "fc1": ("gate_proj", "up_proj"),
    "fc2": ("down_proj",),
}
"""What modules of decoders in transformers are called; those of experts have no names of theirs."""


def _adapters(adapters: Adapters) -> Iterator[str]:
    """Yield the arguments of adapters as TRL's `ModelConfig` names them."""
    yield "--use_peft True"
    yield f"--lora_r {adapters.rank}"
    yield f"--lora_dropout {adapters.dropout}"
    names = [name for target, own in _MODULES.items() if target in adapters.targets for name in own]
    if names:
        yield f"--lora_target_modules {' '.join(names)}"
    if adapters.base != "16 bits":
        yield "--load_in_4bit True" if adapters.base == "nf4" else "--load_in_8bit True"
