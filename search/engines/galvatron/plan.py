"""Import and export of Galvatron plans: strategy files and the configurations that launch them.

The strategy file can express every plan. The newest release runs
`torchrun train_dist.py train_dist.yaml`, with the keys of `galvatron/core/runtime/args_schema.py`
(PKU-DAIR/Hetu-Galvatron, 2026). Release v2.4 uses a shell script.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from autopar.documents.json import load_object, read_record, value_reader
from autopar.documents.plan import read_strategy
from autopar.documents.strategy import galvatron_document, has_context_degrees
from autopar.errors import DocumentError
from autopar.records import KeyFault, Record, replace, shorten
from autopar.run.model import ModelSpec, head_dim
from autopar.run.plan import Plan
from search.engines.exporter_types import ImportedPlan
from search.engines.plans import (
    ExportedPlan,
    ExporterSpace,
    ExportJob,
    has_one_kind,
    unsupported_modules,
)
from search.engines.text import Configuration, dump_yaml, named_file
from search.engines.words import ROTARY_BASE, inert, one_line, required, torchrun

# --------------------------------------------------------------------------------------------------
# Import of Galvatron configurations: the file of JSON mode, and GLOBAL mode in YAML or flags.


_LAYERS = ("tp_sizes_enc", "tp_size_list", "format", "plan")
_SHELL_NAMES = {
    "global_train_batch_size": "global_batch_size",
    "num_hidden_layers": "num_layers",
    "embed_sdp": "vocab_sdp",
}


def _is_positive(value: object) -> bool:
    text = str(value)
    # The length is checked before int(), which raises an error for thousands of digits.
    if isinstance(value, bool) or not (text.isascii() and text.isdigit() and len(text) < 9):
        return False
    return 0 < int(text) < 1 << 24


def _positive(value: object) -> int:
    if not _is_positive(value):
        raise KeyFault("", f"the value is {shorten(value)}, expected a positive integer")
    return int(str(value))


def _flag(value: object) -> bool:
    text = str(value).lower()
    if text not in ("0", "1", "true", "false"):
        raise KeyFault("", f"the value is {shorten(value)}, expected 0 or 1")
    return text in ("1", "true")


_Positive = Annotated[int, value_reader(_positive, "a positive integer")]
_Flag = Annotated[bool, value_reader(_flag, "0 or 1")]


class _GlobalMode(Record, forbid_unknown_fields=False):
    """Options of GLOBAL mode by their names in the newest release, with Galvatron's defaults."""

    pp_deg: _Positive = 1
    global_tp_deg: _Positive = 1
    global_tp_consec: _Flag = True
    global_cp_deg: _Positive = 1
    global_ep_deg: _Positive = 1
    global_checkpoint: _Flag = False
    use_ulysses: _Flag = False
    sdp: _Flag = False
    vocab_tp: _Positive = 1
    vocab_cp: _Positive = 1
    vocab_sdp: _Flag = False
    num_layers: _Positive | None = None
    global_batch_size: _Positive | None = None
    chunks: _Positive | None = None
    """Number of micro-batches per step; None if Galvatron computes it as in `_chunks`."""
    default_dp_type: Any = "ddp"
    pipeline_type: Any = "gpipe"

    @classmethod
    def prepared(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options that are set.

        Unset are null and, where Galvatron's default is -1, that value.
        """
        kinds = get_type_hints(cls)
        found = {}
        for key, value in data.items():
            # Options with the default -1 in Galvatron use it for "not given".
            minus = kinds.get(key) is bool or key in ("global_tp_deg", "chunks")
            if kinds.get(key) is Any or not (value is None or (minus and str(value) == "-1")):
                found[key] = value
        return found


def import_galvatron(
    source: Configuration, *, world_size: int | None = None, num_layers: int | None = None
) -> ImportedPlan:
    """Return the plan that a Galvatron configuration describes.

    world_size : number of GPUs; overrides the configuration, but not a number in a strategy file.
    num_layers : number of layers of the model, if the GLOBAL mode options do not contain it.

    Raises DocumentError if a value is missing or invalid, or if plans cannot express it.
    """
    world = world_size or source.world_size
    if any(key in source.document for key in _LAYERS):
        return _strategy(source.path, source.document, world, [])
    values, from_shell = _values(source), source.flags is not None
    named = values.get("galvatron_config_path")
    if named not in (None, "None", ""):
        # The value of a shell variable is known only when the script runs.
        if "$" in str(named):
            raise DocumentError(
                source.path,
                f"names the strategy file with a variable, {shorten(named)}",
                key="galvatron_config_path",
                remedy="Give the strategy file itself",
            )
        notes = list[str]()
        path = named_file(str(named), source.path.parent, notes)
        _say_gradients(values, notes)
        found = _strategy(path, load_object(path).data, world, notes)
        return replace(found, strategy_path=path)
    return _global(source, values, world, num_layers, from_shell=from_shell)


def _say_gradients(values: Mapping[str, Any], notes: list[str]) -> None:
    """Append a note if Galvatron reduces gradients in 16 bits, which is its default."""
    wide = str(values.get("reduce_in_fp32", False)).lower() in ("1", "true")
    if not wide and values.get("mixed_precision") != "fp32":
        notes.append("no reduce_in_fp32: price it with --no-fp32-gradients")


def _strategy(
    path: Path, document: Mapping[str, Any], world: int | None, notes: list[str]
) -> ImportedPlan:
    sharded = document.get("embed_sdp") in (1, "1", True)
    if sharded and "vocab_sdp" not in document and "tp_sizes_enc" in document:
        notes.append(
            "embed_sdp is 1 without vocab_sdp, the only key that the newest "
            "Galvatron reads: it would train without ZeRO-3 of the embedding. "
            "The price includes ZeRO-3"
        )
    plan = read_strategy(document, world_size=world, path=path)
    return ImportedPlan(plan=plan, notes=tuple(notes))


def _values(source: Configuration) -> dict[str, Any]:
    """Return the options of all sections by their names in the newest release."""
    if source.flags is not None:
        pairs = {
            name.replace("-", "_"): (words[0] if words else True)
            for name, words in source.flags.items()
        }
        return {_SHELL_NAMES.get(key, key): value for key, value in pairs.items()}
    document = _resolved(source.document, source.document)
    runtime = document.get("runtime", document)
    if not isinstance(runtime, Mapping):
        raise DocumentError(source.path, "expected sections such as parallel", key="runtime")
    values: dict[str, Any] = {k: v for k, v in runtime.items() if not isinstance(v, Mapping)}
    for section in ("parallel", "model", "train"):
        part = runtime.get(section, {})
        if isinstance(part, Mapping):
            values |= part
    return {_SHELL_NAMES.get(key, key): value for key, value in values.items()}


def _resolved(value: Any, document: Mapping[str, Any]) -> Any:
    """Return a YAML value with OmegaConf references resolved.

    `${section.key}` becomes the value in `document`, and `${oc.env:NAME,default}` the default.
    Other references stay as written.
    """
    if isinstance(value, Mapping):
        return {key: _resolved(item, document) for key, item in value.items()}
    if not isinstance(value, str) or "${" not in value:
        return value
    match = re.fullmatch(r"\$\{oc\.env:\w+,([^{}]*)\}", value)
    if match is not None:
        return match[1]
    match = re.fullmatch(r"\$\{([\w.]+)\}", value)
    found: Any = document
    for key in match[1].split(".") if match is not None else ():
        found = found.get(key) if isinstance(found, Mapping) else None
    # One step only: a reference to a reference is kept, so that cycles cannot occur.
    return value if match is None or isinstance(found, Mapping) else found


def _global(
    source: Configuration,
    values: Mapping[str, Any],
    world: int | None,
    num_layers: int | None,
    *,
    from_shell: bool,
) -> ImportedPlan:
    if not {"pp_deg", "global_tp_deg"} & set(values):
        raise DocumentError(
            source.path,
            "contains neither a strategy (tp_sizes_enc) nor pp_deg and "
            "global_tp_deg of the GLOBAL mode",
            remedy="Give Galvatron's strategy file, train_dist.yaml or launch script",
        )
    notes = list[str]()
    world = source.num_gpus(world)
    mode = read_record(_GlobalMode, source.path, values)
    layers = mode.num_layers or num_layers
    if layers is None:
        raise DocumentError(
            source.path,
            "this key is missing: it is in the configuration of the model",
            key="num_layers",
            remedy="Add --num-layers or --model",
        )
    # Plans have no expert degree and no context degree of the vocabulary.
    for key in ("global_ep_deg", "vocab_cp"):
        if getattr(mode, key) != 1:
            raise DocumentError(
                source.path, f"the value is {shorten(values[key])}, expected 1", key=key
            )
    consecutive = mode.global_tp_consec
    if not consecutive and not from_shell:
        notes.append("the newest Galvatron uses neighbouring ranks for any global_tp_consec")
        consecutive = True
    if mode.global_batch_size is None:
        raise DocumentError(
            source.path, "this key is missing", key="global_batch_size", remedy="Add it"
        )
    default = str(mode.default_dp_type)
    # The default zero3 means ZeRO-3 in every layer, which plans express per layer.
    zero3 = mode.sdp or default == "zero3"
    document: dict[str, object] = {
        "pp_deg": mode.pp_deg,
        "tp_sizes_enc": [mode.global_tp_deg] * layers,
        "tp_consecutive_flags": [int(consecutive)] * layers,
        "dp_types_enc": [int(zero3)] * layers,
        "use_sp": [int(mode.use_ulysses)] * layers,
        "cp_sizes_enc": [mode.global_cp_deg] * layers,
        "checkpoint": [int(mode.global_checkpoint)] * layers,
        "world_size": world,
        "global_bsz": mode.global_batch_size,
        "chunks": mode.chunks or _chunks(mode.global_batch_size, world, mode.pp_deg),
        "pipeline_type": str(mode.pipeline_type),
        # The default of a plan applies to layers without ZeRO-3.
        "default_dp_type": "ddp" if default == "zero3" else default,
        "vtp": mode.vocab_tp,
        "vsp": int(mode.use_ulysses),
        # Older releases read embed_sdp, the newest reads vocab_sdp.
        "embed_sdp": int(mode.vocab_sdp),
        "vocab_sdp": int(mode.vocab_sdp),
    }
    _say_gradients(values, notes)
    return _strategy(source.path, document, world, notes)


def _chunks(batch: int, world: int, stages: int) -> int:
    """Return the number of micro-batches per step that Galvatron uses if `chunks` is not set.

    It is a quarter of the local batch, rounded up, or 1 for a single stage.
    """
    if stages == 1:
        return 1
    local = batch // max(1, world // stages)
    return max(1, -(-local // 4))


# --------------------------------------------------------------------------------------------------
# Export: the strategy file and its launch files.


ENGINE_VERSION = "newest (June 2026); v2.4 by the shell script"
_NEEDS_NEWEST = "newest (June 2026); v2.4 would ignore the context degrees and run another plan"
_STRATEGY, _TRAIN, _MODEL, _OLD = (
    "galvatron_config.json",
    "train_dist.yaml",
    "model_config.yaml",
    "train_dist_v2.4.sh",
)


SPACE = ExporterSpace(priced={"default_dp_type": "any"})
"""Search space of Galvatron: every plan, with any default for layers without ZeRO-3."""


def lower(job: ExportJob) -> ExportedPlan:
    """Return the strategy file and the launch files of a plan for Galvatron.

    Every plan is supported, so the exported plan is `job.plan`. v2.4 has no script of a plan with
    context degrees.
    """
    files = {_STRATEGY: strategy_text(job.plan), _TRAIN: _train(job)}
    notes = [
        "set DATA_PATH and TOKENIZER_MODEL, and GALVATRON_PATH to the folder with train_dist.py",
        "learning rate, its schedule and the number of steps are placeholders",
    ]
    if _has_config(job.spec):
        files[_MODEL] = f"# {one_line(job.spec.name)}\n" + dump_yaml(_model(job.spec))
        if _lacks_base(job.spec):
            notes.append("the model description has no base of rotary positions: set ROTARY_BASE")
        base = job.spec.rotary_base
        if base is not None and not base.is_integer():
            notes.append(
                "Galvatron's rotary_base is a whole number: the model is "
                f"{job.spec.name} with {round(base)} instead of {base}"
            )
        if job.spec.rotary_scaling_factor is not None:
            notes.append(
                f"Galvatron has no scaled rotary frequencies: the model is {job.spec.name} without "
                "them, for training from the start and not for its weights"
            )
    else:
        notes.append(
            f"{job.spec.name} has different decoder layers, or unknown sizes: "
            f"write {_MODEL} yourself and set MODEL_CONFIG"
        )
    # v2.4 ignores context degrees, so that its script would run another plan.
    has_context = has_context_degrees(job.plan)
    if not has_context:
        files[_OLD] = _shell(job)
    if not has_context and _old_size(job.spec) is None:
        notes.append(
            f"v2.4 has no model of the sizes of {job.spec.name}: add one to "
            "meta_configs/config_utils.py and set MODEL_SIZE"
        )
    notes.append(
        "LOAD: weights converted from Hugging Face with tools/convert_*_h2g.sh; "
        "SAVE: checkpoint folder"
    )
    keys = _global_keys(job.plan)
    if keys is not None:
        notes.append(f"all layers are equal: {keys} of the GLOBAL mode are equivalent")
    return ExportedPlan(
        engine="galvatron",
        engine_version=_NEEDS_NEWEST if has_context else ENGINE_VERSION,
        plan=job.plan,
        files=files,
        losses=(),
        launch=_launch(job),
        notes=tuple(notes),
    )


def strategy_text(plan: Plan) -> str:
    """Return the strategy file of a plan as JSON, in the file format of Galvatron."""
    return json.dumps(galvatron_document(plan), indent=2) + "\n"


def is_complete(document: Mapping[str, object]) -> bool:
    """Return True if the newest Galvatron trains an imported strategy file as it was searched.

    Galvatron's runtime reads ZeRO-3 of the embedding from `vocab_sdp`, but its search engine writes
    `embed_sdp`.
    """
    needed = ("tp_sizes_enc", "tp_consecutive_flags", "use_sp", "vtp", "vsp", "chunks")
    sharded = document.get("embed_sdp") in (1, "1", True)
    return all(key in document for key in needed) and (not sharded or "vocab_sdp" in document)


def _global_keys(plan: Plan) -> str | None:
    """Return the `key=value` options of GLOBAL mode for a plan; None if they cannot express it."""
    first = plan.layers[0]
    each, rest = divmod(len(plan.layers), plan.num_stages)
    # GLOBAL mode assigns the remaining layers to the last stage.
    even = (each,) * (plan.num_stages - 1) + (each + rest,)
    if (
        len(set(plan.layers)) > 1
        or first.strided  # the newest release ignores global_tp_consec
        or plan.stage_sizes != even
        # One use_ulysses covers layers and vocabulary; it has no effect at degree 1.
        or (plan.vocab.ulysses != first.ulysses and plan.vocab.tp > 1)
    ):
        return None
    keys = {
        "pp_deg": plan.num_stages,
        "global_tp_deg": first.tp,
        "global_cp_deg": first.cp,
        "sdp": int(first.zero3),
        "default_dp_type": plan.default_dp_type,
        "global_checkpoint": int(first.checkpoint),
        "pipeline_type": _pipeline(plan),
        "use_ulysses": str(first.ulysses).lower(),
        "vocab_tp": plan.vocab.tp,
        "vocab_sdp": int(plan.vocab.zero3),
    }
    return " ".join(f"runtime.parallel.{key}={value}" for key, value in keys.items())


def _pipeline(plan: Plan) -> str:
    return "gpipe" if plan.pipeline_type == "gpipe" else "pipedream_flush"


def _train(job: ExportJob) -> str:
    plan, spec = job.plan, replace(job.spec, name=inert(job.spec.name))
    data = plan.world_size // plan.num_stages
    document = {
        "runtime": {
            "parallel": {
                "galvatron_config_path": f"${{oc.env:STRATEGY,{_STRATEGY}}}",
                "pp_deg": plan.num_stages,
                "pipeline_type": _pipeline(plan),
                "default_dp_type": plan.default_dp_type,
                "vocab_tp": plan.vocab.tp,
                "vocab_sp": int(plan.vocab.ulysses),
                "vocab_sdp": int(plan.vocab.zero3),
                "async_grad_reduce": job.async_grad_reduce,
                "mixed_precision": job.precision,
                "reduce_in_fp32": job.fp32_gradients,
            },
            "model": {
                "model_size": spec.name,
                "model_config_path": f"${{oc.env:MODEL_CONFIG,{_MODEL}}}"
                if _has_config(spec)
                else "${oc.env:MODEL_CONFIG}",
                "is_moe_model": any(layer.num_experts for layer in spec.layers),
                "set_model_config_manually": 0,
                "set_layernum_manually": 0,
                "set_seqlen_manually": 1,
                "initialize_on_meta": 1,
                "shape_order": "SBH",
                "dropout_prob": 0.0,
                **({"rotary_base": "${oc.env:ROTARY_BASE}"} if _lacks_base(spec) else {}),
            },
            "profile": {"profile": 0, "exit_after_profiling": 0},
            "train": {
                "train_iters": 500,
                "lr": 3.0e-4,
                "min_lr": 3.0e-5,
                "lr_decay_style": "cosine",
                "weight_decay": 0.1,
                "adam_beta1": 0.9,
                "adam_beta2": 0.95,
                "clip_grad": 1.0,
                "sequence_parallel": job.sequence_parallel,
                "use_flash_attn": True,
                "global_batch_size": plan.global_batch,
                "micro_batch_size": max(1, plan.global_batch // (plan.num_microbatches * data)),
                "chunks": plan.num_microbatches,
                "seq_length": job.seq_length,
            },
            "data": {
                "data_path": "${oc.env:DATA_PATH}",
                "split": "949,50,1",
                "tokenizer_type": "HuggingFaceTokenizer",
                "tokenizer_model": "${oc.env:TOKENIZER_MODEL}",
            },
            # Unset variables give null: nothing is loaded or saved.
            "ckpt": {"load": "${oc.env:LOAD,null}", "save": "${oc.env:SAVE,null}"},
        }
    }
    return f"# Galvatron, {ENGINE_VERSION}\n" + dump_yaml(document)


def _lacks_base(spec: ModelSpec) -> bool:
    """Return True if a model has rotary positions but its description lacks their base."""
    return _has_config(spec) and not spec.learned_positions and spec.rotary_base is None


def _has_config(spec: ModelSpec) -> bool:
    first = spec.layers[0]
    known = first.num_heads is not None and first.ffn_hidden_size is not None
    # Galvatron's model configuration has no keys for query-key norms, rotary positions in a part
    # of each head, or newer modules.
    whole = not first.qk_norms and spec.rotary_share == 1.0
    said = known and whole and not unsupported_modules(spec)
    return has_one_kind(spec) and first.causal and said and spec.vocab_size is not None


def _model(spec: ModelSpec) -> dict[str, object]:
    layer = spec.layers[-1]
    gated = layer.gated_mlp
    document: dict[str, object] = {
        "model_size": inert(spec.name),
        "hf_model_name_or_path": None,
        "hidden_size": layer.hidden_size,
        "ffn_hidden_size": layer.ffn_hidden_size,
        "num_layers": spec.num_layers,
        "num_attention_heads": layer.num_heads,
        "num_query_groups": layer.num_kv_heads or layer.num_heads,
        "kv_channels": head_dim(layer),
        "vocab_size": spec.vocab_size,
        "make_vocab_size_divisible_by": spec.make_vocab_size_divisible_by,
        "normalization": "LayerNorm" if layer.norm_parameters_per_hidden == 4 else "RMSNorm",
        "activation_func": "torch.nn.functional." + ("silu" if gated else "gelu"),
        "gated_linear_unit": gated,
        "add_bias_linear": layer.biases,
        # Biases of all linear layers include those of the QKV projection.
        "add_qkv_bias": layer.biases or layer.qkv_biases,
        "untie_embeddings_and_output_weights": not spec.tied_embeddings,
    }
    if spec.learned_positions:
        document["position_embedding_type"] = "learned_absolute"
    else:
        document["position_embedding_type"] = "rope"
        if spec.rotary_base is not None:  # Galvatron would replace null by 10000
            document["rotary_base"] = round(spec.rotary_base)
    if layer.num_experts is not None:
        document |= {
            "num_moe_experts": layer.num_experts,
            "moe_ffn_hidden_size": layer.ffn_hidden_size,
            "moe_router_topk": layer.experts_per_token or 1,
        }
    return document


_ASKED = {
    "DATA_PATH": "set DATA_PATH to the prefix of the preprocessed data",
    "TOKENIZER_MODEL": "set TOKENIZER_MODEL to a name or folder of Hugging Face",
}


_MODEL_CONFIG = "set MODEL_CONFIG to a file of the model in the names of GalvatronModelArgs"


def _launch(job: ExportJob) -> str:
    asked = dict(_ASKED)
    if _lacks_base(job.spec):
        asked["ROTARY_BASE"] = ROTARY_BASE
    own = f' MODEL_CONFIG="$PWD/{_MODEL}"'
    if not _has_config(job.spec):
        asked["MODEL_CONFIG"], own = _MODEL_CONFIG, " MODEL_CONFIG"
    # The YAML file reads these variables from the environment.
    checks = " ".join(f'"{required(name, message)}"' for name, message in asked.items())
    here = f'export STRATEGY="$PWD/{_STRATEGY}"{own}\n'
    path = required("GALVATRON_PATH", "set GALVATRON_PATH to the folder with train_dist.py")
    return f": {checks}\n{here}" + torchrun(job, f'"{path}/train_dist.py" "$PWD/{_TRAIN}"')


# --- v2.4, where each model family has a train_dist.py with flags ---

_OldSizes = tuple[int, int, int, int, int]
"""Hidden size, heads, key-value heads, MLP width and vocabulary size."""
_OLD_SIZES: Mapping[_OldSizes, tuple[str, str, int]] = {
    (4096, 32, 32, 11008, 32000): ("llama_hf", "llama-7b", 32),
    (5120, 40, 40, 13824, 32000): ("llama_hf", "llama-13b", 40),
    (1024, 16, 16, 2816, 32000): ("llama_hf", "llama-0.3b", 24),
    (8192, 64, 8, 22016, 32000): ("llama_hf", "llama-30b", 48),
    (8192, 64, 8, 28672, 32000): ("llama_hf", "llama2-70b", 80),
    (3584, 28, 28, 18944, 152064): ("llama_hf", "qwen2.5-7b", 28),
    (8192, 64, 8, 29568, 152064): ("llama_hf", "qwen2.5-72b", 80),
    (1024, 16, 16, 4096, 50257): ("gpt_hf", "gpt-0.3b", 24),
    (1600, 32, 32, 6400, 50257): ("gpt_hf", "gpt-1.5b", 48),
    (2560, 32, 32, 10240, 50257): ("gpt_hf", "gpt-2.7b", 32),
    (4096, 32, 32, 16384, 50257): ("gpt_hf", "gpt-6.7b", 32),
    (512, 8, 8, 2048, 32128): ("T5", "t5-small", 6),
    (768, 12, 12, 3072, 32128): ("T5", "t5-base", 12),
    (1024, 16, 16, 4096, 32128): ("T5", "t5-large", 24),
    (1024, 32, 32, 16384, 32128): ("T5", "t5-3B", 24),
}
"""Folder in galvatron/models, `--model_size` and number of layers, by model sizes.

T5 models have this number of layers in the encoder and in the decoder. Source: the files of
`meta_configs` at v2.4.0. There qwen2.5-7b has no `n_kv_heads`, and so a KV head for each head.
"""


def _old_size(spec: ModelSpec) -> tuple[str, str, int] | None:
    """Return (folder, `--model_size`, number of layers) of the v2.4 model with the sizes of a spec.

    Returns None if v2.4 has no such model.
    """
    layer = spec.layers[-1]
    if any(layer.num_experts is not None for layer in spec.layers):
        return None
    sizes = (
        layer.hidden_size,
        layer.num_heads,
        layer.num_kv_heads or layer.num_heads,
        layer.ffn_hidden_size,
        spec.vocab_size,
    )
    known = {key: value for key, value in _OLD_SIZES.items() if key == sizes}
    found = next(iter(known.values()), None)
    if found is None:
        return None
    if found[0] == "T5":
        return found if len(spec.layers) == 2 and layer.cross_attention else None
    # Sizes alone do not distinguish the blocks of Llama and GPT.
    is_llama = layer.gated_mlp and not layer.biases
    return found if has_one_kind(spec) and is_llama == (found[0] == "llama_hf") else None


def _old_model(spec: ModelSpec) -> list[str]:
    """Return the v2.4 flags that set the model, its layers and its sequence lengths."""
    found = _old_size(spec)
    # The name goes into a message inside braces and quotes of the shell.
    name = re.sub(r"[^\w./+-]", "_", spec.name)
    asked = required("MODEL_SIZE", f"set MODEL_SIZE to the name of a model such as {name} in v2.4")
    counts = [layer.num_layers for layer in spec.layers]
    is_t5 = len(counts) == 2
    other = found is None or counts != [found[2]] * len(counts)
    names = ["num_encoder_layers", "num_decoder_layers"] if is_t5 else ["num_hidden_layers"]
    numbers = counts if is_t5 else [spec.num_layers]
    lengths = ["encoder_seq_length", "decoder_seq_length"] if is_t5 else ["seq_length"]
    tokens = [layer.seq_length for layer in spec.layers] if is_t5 else [spec.layers[-1].seq_length]
    return [
        f"--model_size {found[1]}" if found is not None else f'--model_size "{asked}"',
        "--set_model_config_manually 0",
        f"--set_layernum_manually {int(other)}",
        *(f"--{name} {n}" for name, n in zip(names, numbers, strict=True) if other),
        "--set_seqlen_manually 1",
        *(f"--{name} {n}" for name, n in zip(lengths, tokens, strict=True)),
    ]


def _shell(job: ExportJob) -> str:
    """Return the launch script for v2.4."""
    plan, found = job.plan, _old_size(job.spec)
    arguments = [
        *_old_model(job.spec),
        f"--global_train_batch_size {plan.global_batch}",
        f"--chunks {plan.num_microbatches}",
        f"--pp_deg {plan.num_stages}",
        f'--galvatron_config_path "${{STRATEGY:-{_STRATEGY}}}"',
        f"--mixed_precision {job.precision}",
        *(["--sequence-parallel"] if job.sequence_parallel else []),
        *([] if job.async_grad_reduce else ["--no_async_grad_reduce"]),
        *(["--reduce_in_fp32"] if job.fp32_gradients else []),
        "--use-flash-attn",
        "--initialize_on_meta 1",
        "--train-iters 500",
        "--lr 3.0e-4",
        f'--data-path "{required("DATA_PATH", _ASKED["DATA_PATH"])}"',
        "--split 949,50,1",
        "--tokenizer-type HuggingFaceTokenizer",
        f'--tokenizer-model "{required("TOKENIZER_MODEL", _ASKED["TOKENIZER_MODEL"])}"',
        '${LOAD:+--load "$LOAD"}',
        '${SAVE:+--save "$SAVE" --save-interval "${SAVE_INTERVAL:-500}"}',
    ]
    words = ["train_dist.py", *arguments]
    where = f"galvatron/models/{found[0]}" if found is not None else "the folder of the model"
    head = f"# Galvatron v2.4, from {where} there, with STRATEGY=/folder/of/{_STRATEGY}\n"
    return head + torchrun(job, " \\\n    ".join(words))
