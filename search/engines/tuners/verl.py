"""Reader and writer of the overrides of verl 0.9, `python -m verl.trainer.sft_trainer KEY=VALUE`.

The keys are those of `trainer/config/sft_trainer_engine.yaml` and the groups that it names, in the
wheel of 0.9.1; their meaning is that of `workers/engine/fsdp/transformer_impl.py`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

from autopar.errors import UnsupportedError
from autopar.rates.devices import lacks_flash_attention
from autopar.records import replace
from autopar.run.run import Run
from autopar.training.lengths import KnownBatching
from search.engines.arguments import Unpriced
from search.engines.exporter_types import Draft, ExportTarget
from search.engines.huggingface.transformers import (
    NamedModel,
    adapted_modules,
    trains_narrow_weights,
)
from search.engines.keys import Keys
from search.engines.reader import CheckedFile, CheckOptions
from search.engines.text import Configuration
from search.engines.tuners import keyed
from search.engines.tuners.check import needed
from search.engines.tuners.keyed import KeyedProgram, Shape, Translated
from search.engines.words import required, shell_lines, torchrun

VERSION = "0.9.1"
_TITLE = "verl"
_PROGRAM = "verl.trainer.sft_trainer"
_DATA = required(
    "DATA_PATH", "set DATA_PATH to a .parquet file with the column messages, lists of turns"
)
_LOGIT_BYTES = 2
"""The cross-entropy of flash-attn replaces logits of 16 bits with their gradient
(`logprobs_from_logits_flash_attn` of `utils/torch_functional.py`)."""
_OVERRIDE = re.compile(r"(\+{0,2})([A-Za-z_][\w.@]*)=(.*)", re.DOTALL)
_BATCH = "data.micro_batch_size_per_gpu"
_RECOMPUTE = "model.enable_gradient_checkpointing"
_RESHARD = "engine.reshard_after_forward"
_DYNAMIC, _MOST_TOKENS = "data.use_dynamic_bsz", "data.max_token_len_per_gpu"
_GROUP = "defaults."
"""Prefix of the groups of Hydra among the values."""
_ENGINES = ("fsdp", "fsdp2")
_NARROW, _WIDE = ("bf16", "bfloat16"), ("fp32", "float32")
_HARMLESS = frozenset(
    {
        "trainer", "checkpoint", "profiler", "hydra", "optim.lr", "optim.lr_warmup_steps_ratio",
        "optim.lr_warmup_steps", "optim.total_training_steps", "optim.weight_decay",
        "optim.betas", "optim.clip_grad", "optim.min_lr_ratio", "optim.num_cycles",
        "optim.lr_scheduler_type", "optim.zero_indexed_step", "optim.warmup_style",
        "optim._target_", "data.train_files", "data.val_files", "data.train_max_samples",
        "data.val_max_samples", "data.messages_key", "data.tools_key", "data.enable_thinking_key",
        "data.enable_thinking_default", "data.truncation", "data.balance_dp_token",
        "data.custom_cls", "data.use_shm", "data.apply_chat_template_kwargs", "data.num_workers",
        "data.ignore_input_ids_mismatch", "data.pad_mode", "model.hf_config_path",
        "model.tokenizer_path", "model.use_shm", "model.trust_remote_code",
        "model.custom_chat_template", "model.external_lib", "model.lora_alpha", "model.lora",
        "model.fused_kernel_options", "model._target_", "model.use_remove_padding",
        "engine.forward_prefetch", "engine.use_orig_params", "engine.seed",
        # Only the entropy is compiled, which SFT does not compute.
        "engine.use_torch_compile", "engine.full_determinism", "engine.wrap_policy",
        "engine.entropy_from_logits_with_chunking", "engine.entropy_from_logits_chunk_size",
        "engine.entropy_checkpointing", "engine.forward_only", "engine._target_",
        "engine.pad_to_length_bucket", "engine.qat", "engine.turbo_config", "model.mtp",
        "model.tiled_mlp", "optim.override_optimizer_config",
    }
)  # fmt: skip
_UNPRICED = {
    "model.enable_activation_offload": Unpriced("activations are on the host"),
    "model.use_fused_kernels": Unpriced("its loss makes no logits"),
    "model.use_liger": Unpriced("kernels of Liger without the loss"),
    "model.exclude_modules": Unpriced("adapters of other modules"),
    "model.target_parameters": Unpriced("adapters of experts"),
    "model.lora_adapter_path": Unpriced("adapters of another run"),
    "model.mtp.enable": Unpriced("another head"),
    "model.tiled_mlp.enabled": Unpriced("the MLP is computed in tiles"),
    "engine.param_offload": Unpriced("weights move to the host between steps", ("time",)),
    "engine.optimizer_offload": Unpriced("states move to the host between steps", ("time",)),
    "engine.pad_to_length": Unpriced("micro-batches are padded"),
    "engine.qat.enable": Unpriced("weights are quantised in the forward"),
    "engine.mixed_precision": Unpriced("other types of FSDP", off=("null", "none", "")),
    "engine.dtype": Unpriced("another precision", off=_NARROW),
    "engine.wrap_policy.min_num_params": Unpriced("not a unit per layer"),
}
"""Keys that change memory or time and have no price."""


def owns(source: Configuration) -> bool:
    """Return True for a command that starts verl's trainer of supervised fine-tuning."""
    return source.command is not None and source.command.program == _PROGRAM


def read(source: Configuration, asked: CheckOptions) -> CheckedFile:
    """Return the run that overrides describe, with the findings about it; raises DocumentError."""
    words = () if source.command is None else source.command.arguments
    found = (_OVERRIDE.fullmatch(word) for word in words)
    given = {one[2]: None if one[3] == "null" else one[3] for one in found if one is not None}
    # The name of a group, such as `engine`, is also a section.
    values = {key if "." in key else f"{_GROUP}{key}": value for key, value in given.items()}
    return keyed.read(PROGRAM, source, values, asked)


def _translated(keys: Keys, asked: CheckOptions, world: int) -> Translated:
    """Return overrides in the keys of accelerate and the arguments of TRL.

    Raises UnpricedError for engines other than FSDP, Ulysses ranks and padded batches.
    """
    for key in ("engine", "optim", "model_engine"):
        group = keys.text(f"{_GROUP}{key}", "fsdp")
        if group != "fsdp":
            raise keys.unpriced(key, f"{group} is not priced", "Use engine=fsdp")
    strategy = keys.text("engine.strategy", "fsdp")
    if strategy not in _ENGINES:
        raise keys.unpriced("engine.strategy", f"{strategy} is not priced", "Use fsdp2")
    if keys.number("engine.ulysses_sequence_parallel_size", 1) > 1:
        raise keys.unpriced(
            "engine.ulysses_sequence_parallel_size",
            "Ulysses saves activations that are not counted",
            "Remove it to price the rest",
        )
    if not keys.flag("model.use_remove_padding", default=True):
        raise keys.unpriced(
            "model.use_remove_padding", "padded logits are copied", "Set it to True"
        )
    version, size = 1 + _ENGINES.index(strategy), keys.number("engine.fsdp_size", -1, least=-1)
    narrow, total = _is_narrow(keys), keys.number("data.train_batch_size", 256)
    length = asked.seq_length or keys.number("data.max_length", 1024)
    micro = _micro_batch(keys, total, world, length)
    return Translated(
        document=keyed.accelerated(
            keys,
            world,
            shards=size if 0 < size < world else world,
            version=version,
            reshards=keys.flag(_RESHARD, default=True),
            host=version == 2 and keys.flag("engine.offload_policy"),
        ),
        flags=dict(_flags(keys, micro, length, narrow=narrow)),
        global_batch=total,
        # FSDP1 wraps layers alone (`get_fsdp_wrap_policy`).
        shape=Shape(_LOGIT_BYTES, apart=version == 2, narrow=narrow),
        batching=None if keys.flag(_DYNAMIC, default=True) else KnownBatching("padding-free"),
    )


def _is_narrow(keys: Keys) -> bool:
    kind = keys.text("engine.model_dtype", "fp32")
    if kind not in (*_NARROW, *_WIDE):
        raise keys.unpriced("engine.model_dtype", f"{kind} is not priced", "Use fp32 or bf16")
    return kind in _NARROW


def _micro_batch(keys: Keys, total: int, world: int, length: int) -> int:
    """Return the sequences of a micro-batch, each of the longest length.

    Dynamic batches have at most the tokens of a key, and as many sequences each as possible
    (`rearrange_micro_batches` of `utils/seqlen_balancing.py`).

    Raises DocumentError for a batch that the ranks do not divide, and UnpricedError for
    micro-batches of different sizes.
    """
    own = keys.number(_BATCH, 4)
    most = keys.number(_MOST_TOKENS, 8192)
    if total % world:
        raise keys.fail("data.train_batch_size", f"{total} is no multiple of {world} GPUs")
    if not keys.flag(_DYNAMIC, default=True):
        return own
    each = total // world
    if most < length:
        raise keys.fail(_MOST_TOKENS, f"{most} is less than a sequence of {length} tokens")
    number = -(-each * length // most)
    if each % number:
        raise keys.unpriced(
            _MOST_TOKENS,
            f"{each} sequences of {length} tokens make {number} micro-batches of different sizes",
            f"Set {_DYNAMIC} to False",
        )
    return each // number


def _flags(
    keys: Keys, micro: int, length: int, *, narrow: bool
) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "model-name-or-path", (keys.text("model.path"),)
    yield "max-length", (str(length),)
    yield "per-device-train-batch-size", (str(micro),)
    kernel = keys.text("model.override_config.attn_implementation", "flash_attention_2")
    yield "attn-implementation", (kernel,)
    yield "dtype", ("bfloat16" if narrow else "float32",)
    yield "gradient-checkpointing", (str(keys.flag(_RECOMPUTE, default=True)),)
    if keys.values.get("trainer.total_training_steps"):
        yield "max-steps", (keys.text("trainer.total_training_steps"),)
    if not keys.flag("engine.use_no_sync_for_gradient_accumulation"):
        yield keyed.SYNCED_FLAG
    name = keys.text("optim.optimizer", "AdamW")
    yield from keyed.optimizer_flag(
        keys,
        "optim.optimizer",
        f"{keys.text('optim.optimizer_impl', 'torch.optim')}.{name}",
        fused=keys.flag("optim.override_optimizer_config.fused"),
        decay=keys.text("optim.weight_decay", "0.01"),
    )
    rank = keys.number("model.lora_rank", 0, least=0)
    targets = keys.text("model.target_modules", "all-linear").strip("[]").replace("'", "")
    if rank:
        yield from keyed.adapter_flags(rank, "0.0", targets).items()


def _spelled(key: str, value: str | None) -> str:
    key = key.removeprefix(_GROUP)
    return f"{key}={value}" if value else key


PROGRAM = KeyedProgram(
    name="verl",
    title=_TITLE,
    translate=_translated,
    harmless=_HARMLESS,
    unpriced=_UNPRICED,
    model="model.path",
    lengths=("data.max_length",),
    micro_batch=_BATCH,
    recompute=_RECOMPUTE,
    reshard=_RESHARD,
    spelled=_spelled,
)


# --------------------------------------------------------------------------------------------------
# Writing.


def as_trained(run: Run) -> Run:
    """Return a run with the loss and flash attention of verl, and adapters of 16 bits, no dropout.

    Gradients are reduced in fp32, and embedding and head are FSDP units.
    """
    adapters = run.runtime.adapters
    narrow = adapters is not None or trains_narrow_weights(run)
    found = keyed.shaped(keyed.plain_kernels(run), Shape(_LOGIT_BYTES, apart=True, narrow=narrow))
    kernels = replace(found.kernels, repeated_heads=lacks_flash_attention(run.gpu))
    adapters = None if adapters is None else replace(adapters, dropout=0.0)
    return replace(found, runtime=replace(found.runtime, kernels=kernels, adapters=adapters))


def write(run: Run, place: ExportTarget) -> Draft:
    """Return the launch command of a run.

    Raises InputError for a run of another engine, and UnsupportedError for a run with stages,
    other ranks, replicated weights, or a precision or optimizer without a key.
    """
    model = keyed.model_of(run, place, _TITLE)
    if run.kernels.repeated_heads:
        raise UnsupportedError("exports for verl need flash attention", remedy="Use another card")
    if run.split.zero == 0:
        raise UnsupportedError("exports for verl shard weights", remedy="Search with --zero 3")
    words = shell_lines([*_words(run, model)]).rstrip("\n")
    head = f"# For verl {VERSION}, written by autopar-export: pip install verl=={VERSION}"
    return Draft(
        version=VERSION,
        files={**model.files},
        launch=f"{head}{needed(run)}\n{torchrun(place, words)}",
        notes=tuple(_to_fill_in(run, model)),
    )


def _words(run: Run, model: NamedModel) -> Iterator[str]:
    yield f"-m {_PROGRAM}"
    yield f'data.train_files="{_DATA}"'
    name = model.name if model.stand_in is not None else f"${{LOAD:-{model.name}}}"
    yield f'model.path="{name}"'
    for key, value in _overrides(run).items():
        yield f"{key}={shlex.quote(str(value))}"
    if run.steps is None:
        yield '${TRAIN_ITERS:+trainer.total_training_steps="$TRAIN_ITERS"}'
    yield '${SAVE:+trainer.default_local_dir="$SAVE"}'


def _overrides(run: Run) -> dict[str, Any]:
    adapters, strategy, split = run.runtime.adapters, run.strategy, run.split
    narrow = adapters is not None or trains_narrow_weights(run)
    path, fused = keyed.optimizer_class(run, _TITLE)
    module, _, name = path.rpartition(".")
    found: dict[str, Any] = {
        "data.train_batch_size": strategy.global_batch,
        _BATCH: strategy.micro_batch,
        _DYNAMIC: False,
        "data.max_length": run.seq_length,
        "data.truncation": "right",
        _RECOMPUTE: strategy.recomputed.kind != "none",
        "engine": "fsdp",
        "engine.strategy": "fsdp2",
        "engine.fsdp_size": strategy.gpus // split.replicas if split.replicas > 1 else -1,
        _RESHARD: split.zero == 3,
        "engine.model_dtype": "bf16" if narrow else "fp32",
        "engine.use_no_sync_for_gradient_accumulation": not run.syncs_each_batch,
        "engine.offload_policy": run.runtime.optimizer.offload_weights,
        "optim.optimizer_impl": module,
        "optim.optimizer": name,
        "optim.lr": 1.0e-4 if adapters is not None else 1.0e-5,
    }
    if fused:
        found["+optim.override_optimizer_config.fused"] = True
    if adapters is not None:
        found["model.lora_rank"] = adapters.rank
        found["model.lora_alpha"] = 2 * adapters.rank
        found["model.target_modules"] = f"[{','.join(adapted_modules(run))}]"
    if run.steps is not None:
        found["trainer.total_training_steps"] = run.steps
    return found | {"trainer.logger": "[console]"}


def _to_fill_in(run: Run, model: NamedModel) -> Iterator[str]:
    yield "DATA_PATH is the absolute path of a .parquet file with the column messages"
    if run.runtime.adapters is not None:
        yield "adapters have no dropout, which verl has no key for"
    if model.files:
        yield "LOAD names the weights: only the sizes of the model are known"
    steps = "" if run.steps is not None else "; TRAIN_ITERS, steps"
    where = f"LOAD, a folder with the weights of {model.name}; "
    yield f"optional: {where}SAVE, folder of the checkpoints{steps}"
