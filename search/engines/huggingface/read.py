"""Reader of accelerate configurations and their scripts, for memory and time estimates.

The keys come from `accelerate/commands/config/config_args.py`, `commands/launch.py` and
`parallelism_config.py` of 1.15. `distributed_type` MULTI_GPU is read as DDP, FSDP as FSDP of either
version and DEEPSPEED as DeepSpeed. The script sets the model, the sequence length and the batch.
`search.engines.huggingface.check` reports settings that accelerate rejects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autopar.documents.json import load_object
from autopar.records import replace, shorten
from autopar.run.rules import BATCH, refuse
from autopar.run.run import Run
from autopar.run.runtime import Optimizer, PrecisionKind, States, Zero
from autopar.run.strategy import Split
from search.engines.arguments import Ignored, Unpriced
from search.engines.candidate import SHARDS
from search.engines.deepspeed.read import (
    ULYSSES,
    TrainerScript,
    read_deepspeed,
    script_of,
    script_run,
)
from search.engines.huggingface.named_optimizers import updates_shards
from search.engines.huggingface.names import RANKS
from search.engines.huggingface.optimizers import default_type, script_optimizer
from search.engines.huggingface.rules import FILE, SPACE, grid_values
from search.engines.huggingface.script import (
    NO_OPTIONS,
    ScriptOptions,
    sets_batch,
    syncs_each_batch,
)
from search.engines.keys import Keys, flattened, whole
from search.engines.megatron.read import ReadRun
from search.engines.space import refuse_unsupported
from search.engines.text import Configuration, flags_of, named_text

_HARMLESS = frozenset(
    {
        "compute_environment", "debug", "downcast_bf16", "enable_cpu_affinity",
        "fp8_config", "gpu_ids", "ipex_config", "machine_rank", "main_process_ip",
        "main_process_port", "main_training_function", "num_machines", "rdzv_backend",
        "same_network", "tpu_env", "tpu_vm", "tpu_use_cluster", "tpu_use_sudo", "use_cpu",
        "commands", "command_file", "tpu_name", "tpu_zone", "num_processes", "mpirun_config",
        "dynamo_config.dynamo_use_dynamic", "dynamo_config.dynamo_use_fullgraph",
        "fsdp_config.fsdp_cpu_ram_efficient_loading", "fsdp_config.fsdp_state_dict_type",
        "fsdp_config.fsdp_sync_module_states", "fsdp_config.fsdp_use_orig_params",
        # transformers documents it, and passes it to nothing
        "fsdp_config.fsdp_limit_all_gathers",
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
        "parallelism_config.parallelism_config_sp_backend",
        "parallelism_config.parallelism_config_sp_seq_length",
        "parallelism_config.parallelism_config_sp_seq_length_is_variable",
        "parallelism_config.parallelism_config_sp_attn_implementation",
        "parallelism_config.parallelism_config_cp_backend",
        *(f"deepspeed_config.{name}" for name in (
            "deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_exclusion_filter",
            "deepspeed_inclusion_filter", "deepspeed_moe_layer_cls_names", "gradient_clipping",
            "offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_init_flag",
            "zero3_save_16bit_model")),
    }
)  # fmt: skip
"""Sections and keys that affect neither memory nor time."""
_KNOWN = frozenset(
    f"fsdp_config.{key}"
    for key in (
        "fsdp_backward_prefetch", "fsdp_backward_prefetch_policy", "fsdp_forward_prefetch",
        "fsdp_min_num_params", "fsdp_sharding_strategy", "fsdp_reshard_after_forward",
        "fsdp_activation_checkpointing", "fsdp_version", "fsdp_offload_params",
    )
)  # fmt: skip
"""Keys that are read, or that have an effect only with other settings."""
_VERSION = "fsdp_config.fsdp_version"
_WRAP = "fsdp_config.fsdp_auto_wrap_policy"
_LEAST = "fsdp_config.fsdp_min_num_params"
_WHOLE_MODEL = 10**15
"""Elements that no module has."""
_BACKEND = "dynamo_config.dynamo_backend"
_RING = "parallelism_config.parallelism_config_cp_comm_strategy"
_UNPRICED: Mapping[str, Unpriced] = {
    _WRAP: Unpriced("not a unit per layer", off=()),
    _BACKEND: Unpriced("another compiler", off=("no",)),
    "dynamo_config.dynamo_mode": Unpriced("CUDA graphs", off=("default",)),
    "dynamo_config.dynamo_use_regional_compilation": Unpriced("layers compiled one by one"),
    _RING: Unpriced("keys and values of all ranks are gathered", off=("alltoall",)),
}
"""Keys that change memory or time and have no price."""
_SEQUENCE = "parallelism_config.parallelism_config_sp_size"
_STRATEGIES: Mapping[str, Zero] = {
    "FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2,
    "1": 3, "2": 2, "3": 0, "4": 3, "5": 2,
}  # fmt: skip
"""ZeRO stage of each sharding strategy of FSDP version 1, by name and by number."""


_SECTIONS = {"fsdp": "fsdp_config", "dynamo": "dynamo_config", "parallelism": "parallelism_config"}
_LAUNCHER = frozenset(
    {
        "config_file", "quiet", "num_processes", "num_machines", "num_cpu_threads_per_process",
        "enable_cpu_affinity", "gpu_ids", "same_network", "machine_rank", "main_process_ip",
        "main_process_port", "tee", "log_dir", "role", "rdzv_backend", "rdzv_conf", "max_restarts",
        "monitor_interval", "module", "no_python", "main_training_function", "downcast_bf16",
        "debug", "mpirun_hostfile", "env", "use_parallelism_config",
    }
)  # fmt: skip
"""Arguments of `accelerate launch` that change neither memory nor time."""
_KINDS = {"use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED", "multi_gpu": "MULTI_GPU"}


def launched(document: Mapping[str, Any], source: Configuration) -> dict[str, Any]:
    """Return a configuration with the arguments of `accelerate launch`, which override it.

    Source: `_validate_launch_command` of `accelerate/commands/launch.py`. Arguments without a key
    are added as `--NAME`.
    """
    found: dict[str, Any] = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in document.items()
    }
    command = source.command
    words = flags_of(command.before) if command is not None else {}
    for flag, given in words.items():
        name = flag.replace("-", "_")
        value: object = " ".join(given[:1]) if given else True
        section = _SECTIONS.get(name.partition("_")[0])
        if name in _LAUNCHER:
            continue
        if name in _KINDS:
            found["distributed_type"] = _KINDS[name]
        elif name == "mixed_precision":
            found[name] = value
        elif section is not None:
            found.setdefault(section, {})[name] = value
        elif f"deepspeed_config.{name}" in {*_OF_PLUGIN, *_HARMLESS}:
            found.setdefault("deepspeed_config", {})[name] = value
        else:
            found[f"--{name}"] = value
    return found


_OPTIONS = ("auto_wrap", "offload")


def trainer_section(flags: Mapping[str, tuple[str, ...]]) -> dict[str, Any] | None:
    """Return the keys of an `--fsdp_config` with its content, without prefix; None for a file."""
    try:
        found = json.loads(" ".join(flags.get("fsdp-config", ())))
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    return {key.removeprefix("fsdp_"): value for key, value in found.items()}


def trainer_document(flags: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return the configuration that Hugging Face's Trainer makes from its arguments.

    flags : arguments of the script. Unknown options of `--fsdp` are keys that nothing reads.
    Source: `TrainingArguments._process_fsdp_args`, which sets the variables of accelerate.
    """
    if "fsdp-version" in flags:  # axolotl, whose keys are those of accelerate without a prefix
        section = json.loads(" ".join(flags.get("fsdp-config", ("{}",))))
        version = " ".join(flags["fsdp-version"])
        return {"distributed_type": "FSDP", "fsdp_config": {**section, "version": version}}
    words = " ".join(flags.get("fsdp", ())).split()
    if not words:
        return {"distributed_type": "MULTI_GPU"}
    strategies = [word.upper() for word in words if word.upper() in _STRATEGIES]
    others = {f"--fsdp {word}": True for word in words if word not in _OPTIONS}
    section = trainer_section(flags) or {}
    policy = "SIZE_BASED_WRAP" if section.get("min_num_params") else "TRANSFORMER_BASED_WRAP"
    return {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "version": 1,
            "sharding_strategy": "".join(strategies[:1]) or "FULL_SHARD",
            "auto_wrap_policy": policy if "auto_wrap" in words else None,
            "offload_params": "offload" in words,
            **section,
        },
        **{name: on for name, on in others.items() if name[7:].upper() not in strategies[:1]},
    }


def axolotl_degrees(flags: Mapping[str, tuple[str, ...]], world_size: int) -> dict[str, Any]:
    """Return the section of degrees that axolotl makes for FSDP2; empty where it makes none.

    It is also empty with tensor, context or expert ranks, which have no price.
    Source: `_get_parallel_config_kwargs` in `axolotl/utils/distributed.py` of 0.19.
    """
    if " ".join(flags.get("fsdp-version", ())) != "2" or not AXOLOTL_DEGREES & flags.keys():
        return {}
    if any(" ".join(flags.get(name, ("1",))) != "1" for name in RANKS):
        return {}
    shard, replicate = (
        max(whole("".join(flags.get(f"dp-{name}-size", ())[:1])) or 1, 1)
        for name in ("shard", "replicate")
    )
    if replicate == 1:
        replicate = max(world_size // shard, 1) if shard > 1 else 1
    elif shard == 1:
        shard = max(world_size // replicate, 1)
    sizes = {"dp_replicate": replicate, "dp_shard": shard if shard > 1 else world_size}
    return {
        "parallelism_config": {
            f"parallelism_config_{name}_size": size for name, size in sizes.items()
        }
    }


AXOLOTL_DEGREES = frozenset({"dp-shard-size", "dp-replicate-size"})
"""Arguments of axolotl that `axolotl_degrees` reads."""
TRAINER_FSDP = frozenset({"fsdp", "fsdp-version", "fsdp-transformer-layer-cls-to-wrap"})
"""Arguments of the Trainer that `trainer_document` reads, or that name the class of its layers."""


def _prefixed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration whose keys in sections have their prefix, such as `fsdp_version`."""
    found = dict(document)
    for prefix in ("fsdp", "dynamo"):
        section = found.get(f"{prefix}_config")
        if isinstance(section, Mapping):
            found[f"{prefix}_config"] = {
                key if key.startswith(prefix) else f"{prefix}_{key}": value
                for key, value in section.items()
            }
    return found


def deepspeed_document(
    document: Mapping[str, Any], beside: Path | None, written: Mapping[str, str | None]
) -> dict[str, Any]:
    """Return the DeepSpeed configuration that accelerate derives from `deepspeed_config`.

    beside, written : where `deepspeed_config_file` is looked for, as in `named_text`.

    Raises DocumentError if that file cannot be read.
    """
    section = document.get("deepspeed_config")
    given: Mapping[str, Any] = section if isinstance(section, Mapping) else {}
    name = given.get("deepspeed_config_file")
    if isinstance(name, str) and name != "none":
        path, text = named_text(name, beside, written)
        return dict(load_object(path, text=text).data)
    precision = str(document.get("mixed_precision", "no"))
    zero: dict[str, Any] = {"stage": given.get("zero_stage", 2)}
    for part in ("optimizer", "param"):
        device = given.get(f"offload_{part}_device", "none")
        if device not in (None, "none"):
            zero[f"offload_{part}"] = {"device": device}
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        # The Trainer fills in a number that is not given.
        "gradient_accumulation_steps": given.get("gradient_accumulation_steps", "auto"),
        "zero_optimization": zero,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
    }


def read_accelerate(
    document: Mapping[str, Any],
    flags: Mapping[str, tuple[str, ...]],
    *,
    world_size: int,
    gpu: str,
    asked: ScriptOptions = NO_OPTIONS,
    beside: Path | None = None,
    written: Mapping[str, str | None] = MappingProxyType({}),
    source: str = "configuration",
) -> ReadRun:
    """Return the run that a configuration and the arguments of its script describe.

    written : text of each file that the script writes, as in `named_text`. The other parameters are
        those of `read_deepspeed`.

    Raises InputError if a value is invalid or has no estimate.
    """
    keys = Keys(source=source, values=dict(flattened(_prefixed(document))), asked=set())
    kind = keys.text("distributed_type", "NO").upper()
    if kind == "DEEPSPEED":
        if not sets_batch(flags, asked.program):
            # A batch that is not given is one sequence; `check` reports this default.
            asked = replace(asked, micro_batch=asked.micro_batch or 1)
        keys.has("deepspeed_config.deepspeed_config_file")  # refuses a section that is a value
        _refuse_fp8(keys)
        own = deepspeed_document(document, beside, written)
        sequence = keys.number(_SEQUENCE, 1, least=-1)
        if sequence > 1:
            own["sequence_parallel_size"] = sequence
        found = read_deepspeed(
            own,
            flags,
            world_size=world_size,
            gpu=gpu,
            asked=asked,
            beside=beside,
            source=source,
        )
        keys.asked.update((*_OF_PLUGIN, *_DEGREES))
        keys.asked.update(key for key in keys.values if key.startswith("fsdp_config."))
        unpriced = ULYSSES.format(_SEQUENCE) if sequence > 1 else found.unpriced
        compiled, run = found.run.kernels.compiled or _compiles(keys), found.run
        ignored = (*keys.ignored(_HARMLESS, _KNOWN, _UNPRICED), *found.ignored)
        return replace(found, run=_compiled(run, compiled), ignored=ignored, unpriced=unpriced)
    if kind not in ("FSDP", "MULTI_GPU", "NO"):
        raise keys.unpriced(
            "distributed_type",
            f"{shorten(kind)} is not priced",
            "Use FSDP, DEEPSPEED or MULTI_GPU",
        )
    script = script_of(keys, flags, asked=asked, beside=beside)
    degrees = {
        name: keys.number(f"parallelism_config.parallelism_config_{name}_size", 1, least=-1)
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    if degrees["sp"] > 1:
        raise keys.unpriced(
            _SEQUENCE,
            "Ulysses saves activations that are not counted",
            "Remove it to price the rest",
        )
    tp, cp = max(degrees["tp"], 1), max(degrees["cp"], 1)
    zero, replicas = _sharding(keys, kind, degrees, world_size)
    synced = syncs_each_batch(script.words)
    if synced is False or (synced and zero):
        script.words.asked.add("accelerator-config")
    checkpointing = script.checkpointing or keys.flag("fsdp_config.fsdp_activation_checkpointing")
    steps = keys.number("gradient_accumulation_steps", 1)
    steps = script.accumulation or steps
    micro = script.micro_batch or 1
    if script.global_batch is not None:
        ranks = max(world_size // (tp * cp), 1)
        steps = max(script.global_batch // (micro * ranks), 1)
        refuse(BATCH, {"global_batch": script.global_batch, "micro_batch": micro, "dp": ranks})
    mixed = _refuse_fp8(keys) != "no" or script.kind is not None
    if script.adapters is None and not (zero and mixed):
        # FSDP with mixed precision casts weights to fp32
        loaded, sentence = default_type(flags, asked.program, asked.release)
        notes = (*script.notes, *filter(None, [sentence]))
        script = replace(script, narrow=script.narrow or loaded == "auto", notes=notes)
    precision, narrow = _precision(keys, script, zero)
    if zero or script.adapters is not None:
        # FSDP casts weights to fp32, and adapters are on a frozen base of 16 bits.
        script.words.asked.update(("dtype", "torch-dtype"))
    run = script_run(
        replace(
            script,
            accumulation=steps,
            checkpointing=checkpointing,
            compiled=script.compiled or _compiles(keys),
        ),
        # Accumulation uses `no_sync`: gradients are reduced after the last micro-batch.
        states=States(
            keeper="accelerate",
            each_micro_batch=steps == 1 or (zero > 0 and bool(synced)),
            flat=zero > 0 and keys.number(_VERSION, 1) == 1,
            least_unit=_least_unit(keys, zero),
        ),
        optimizer=_optimizer(keys, script, zero, narrow=narrow),
        world_size=world_size,
        gpu=gpu,
        source=source,
        micro_batch=micro,
        accumulation=steps,
        kind=precision,
        split=Split(tp=tp, cp=cp, zero=zero, replicas=replicas),
    )
    refuse_unsupported(SPACE, run)
    if kind != "FSDP":
        # A section without effect is reported as such.
        keys.asked.update(key for key in keys.values if key.startswith("fsdp_config."))
    keys.asked.update(key for key in keys.values if key.startswith("deepspeed_config."))
    ignored = (
        *([_UNTIMED] if run.runtime.states.least_unit else []),
        *keys.ignored(_HARMLESS, _KNOWN, _UNPRICED),
        *([_GATHERED] if cp > 1 and not keys.has(_RING) else []),
        *script.words.ignored(asked.declared),
    )
    return ReadRun(run=run, ignored=ignored, notes=script.notes)


_DEGREES = tuple(
    f"parallelism_config.parallelism_config_{name}_size"
    for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
)
_OF_PLUGIN = tuple(
    f"deepspeed_config.{name}"
    for name in (
        "deepspeed_config_file",
        "gradient_accumulation_steps",
        "offload_optimizer_device",
        "offload_param_device",
        "zero_stage",
    )
)
"""Keys that `deepspeed_document` reads."""
_GATHERED = Ignored(flag=_RING, value="allgather", understood=False, concern=_UNPRICED[_RING].why)
"""Default of accelerate for context ranks."""
_UNTIMED = Ignored(
    flag=_WRAP,
    value="not TRANSFORMER_BASED_WRAP",
    understood=False,
    concern="one unit of many layers is gathered before it is computed",
    changes=("time",),
)


def _least_unit(keys: Keys, zero: Zero) -> int:
    """Return the elements of the smallest FSDP unit; 0 if each layer is one, or without sharding.

    A missing policy is NO_WRAP, and so is SIZE_BASED_WRAP without a size
    (`FullyShardedDataParallelPlugin` of accelerate). FSDP2 with sizes stays unread: torch refuses
    it for lists of modules.
    """
    policy = str(keys.values.get(_WRAP) or "NO_WRAP").upper()
    sized = policy == "SIZE_BASED_WRAP" and keys.number(_VERSION, 1) == 1
    if not zero or sized or policy in ("NO_WRAP", "TRANSFORMER_BASED_WRAP"):
        keys.asked.add(_WRAP)
    if not zero or policy == "TRANSFORMER_BASED_WRAP":
        return 0
    return (keys.number(_LEAST, 0, least=0) if sized else 0) or _WHOLE_MODEL


def _compiles(keys: Keys) -> bool:
    """Return whether accelerate compiles the layers with TorchInductor."""
    backend = str(keys.values.get(_BACKEND) or "no").upper()
    if backend in ("NO", "FALSE"):
        keys.asked.update(key for key in keys.values if key.startswith("dynamo_config."))
    if backend != "INDUCTOR":
        return False
    keys.asked.add(_BACKEND)
    return True


def _compiled(run: Run, compiled: bool) -> Run:
    kernels = replace(run.kernels, compiled=compiled)
    return replace(run, runtime=replace(run.runtime, kernels=kernels))


def _refuse_fp8(keys: Keys) -> str:
    """Return the mixed precision: no, fp16 or bf16; raises UnpricedError for fp8."""
    word = keys.choice("mixed_precision", ("no", "fp16", "bf16", "fp8"), "no")
    if word == "fp8":
        raise keys.unpriced(
            "mixed_precision", "fp8 of a separate library is not priced", "Say bf16"
        )
    return word


def _precision(keys: Keys, script: TrainerScript, zero: Zero) -> tuple[PrecisionKind, bool]:
    """Return the precision, and True if trained weights have 16 bits and no fp32 copy.

    Autocast leaves the weights of a model in bf16 as they are. FSDP casts trained weights to fp32
    where mixed precision is on (`prepare_model` of accelerate/accelerator.py, and
    `fsdp2_prepare_model` of utils/fsdp_utils.py, except next to weights of 4 bits).
    """
    word = _refuse_fp8(keys)
    narrow = script.narrow if script.adapters is None else script.narrow_adapters
    if word == "no":
        word = script.kind or ""
    if not word:
        return "bf16" if script.narrow or narrow else "fp32", narrow
    second = keys.number(_VERSION, 1) == 2 and script.adapters is not None
    return ("bf16" if word == "bf16" else "fp16"), narrow and (not zero or second)


def _optimizer(keys: Keys, script: TrainerScript, zero: Zero, *, narrow: bool) -> Optimizer:
    """Return the optimizer; FSDP offloads either all sharded states and weights or none."""
    flat = zero > 0 and keys.number(_VERSION, 1) == 1
    found = script_optimizer(script.words, pure=narrow, flat=flat, sharded=zero > 0)
    tp = keys.number("parallelism_config.parallelism_config_tp_size", 1, least=-1)
    name = "" if updates_shards(found) else script.words.text("optim") or found.kind
    refuse([SHARDS], {"unsharded_optimizer": name, "zero": 0 if flat else zero, "tp": tp})
    if not (keys.flag("fsdp_config.fsdp_offload_params") and zero):
        return found
    return replace(found, offload=1.0, offload_master=True, offload_weights=True)


def _sharding(
    keys: Keys, kind: str, degrees: Mapping[str, int], world_size: int
) -> tuple[Zero, int]:
    """Return the ZeRO stage of a configuration and its number of HSDP replicas.

    Raises DocumentError for an unknown sharding strategy, UnpricedError for HYBRID_SHARD, and
    InputError if the degrees do not multiply to the world size.
    """
    if kind != "FSDP":
        return 0, 1
    version = keys.number(_VERSION, 1)
    word = keys.text("fsdp_config.fsdp_reshard_after_forward", "")
    strategy = keys.text("fsdp_config.fsdp_sharding_strategy", "")
    zero: Zero = 3
    if version == 1:
        # In version 1 one key selects both sharding and resharding. Its strategy names are also
        # accepted in the key of version 2.
        name = (strategy or word or "FULL_SHARD").upper()
        if name not in _STRATEGIES and name not in ("TRUE", "FALSE"):
            raise keys.fail(
                "fsdp_config.fsdp_sharding_strategy",
                f"expected one of {', '.join(list(_STRATEGIES)[:5])}, got {shorten(name)}",
            )
        zero = _STRATEGIES.get(name, 3)
        if name.startswith("HYBRID") or name in ("4", "5"):
            raise keys.unpriced(
                "fsdp_config.fsdp_sharding_strategy",
                "shards over the GPUs of a node, but the file has no number of them",
                "Use fsdp_version 2 with dp_replicate_size",
            )
    elif word and word.lower() == "false":
        zero = 2
    replicas = max(degrees["dp_replicate"], 1)
    shard = degrees["dp_shard"]
    tp, cp = max(degrees["tp"], 1), max(degrees["cp"], 1)
    if shard > 1:
        numbers = {"dp_replicate": replicas, "dp_shard": shard, "tp": tp, "cp": cp}
        refuse(FILE, {**grid_values(numbers), "world": world_size})
    return zero, replicas
