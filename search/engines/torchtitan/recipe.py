"""Recipes of torchtitan 0.3.0: one Python file whose function returns Trainer.Config.

The keys come from `torchtitan/config/configs.py`, `distributed/activation_checkpoint.py`,
`components/lora.py` and `trainer.py` of the wheel of 0.3.0. Stages may have any size. If only some
layers are recomputed, the recipe defines a subclass of `FullAC`. `docs/guides/export.md` compares
the engines.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from autopar.errors import UnsupportedError
from autopar.pipeline.schedules import TORCH_NAMES
from autopar.records import replace
from autopar.run.architecture import LayerGroup, Model
from autopar.run.run import Run, run_with_split
from autopar.training.adapters import Adapters
from search.engines.exporter_types import Draft, ExportTarget, spec_of
from search.engines.megatron.stages import parts_in_order
from search.engines.torchtitan.flavours import (
    MODULES,
    RECIPES,
    adapted_modules,
    flavour_of,
    has_flavour,
    linear_modules,
)
from search.engines.torchtitan.read import read_titan
from search.engines.torchtitan.rules import LOSS_CHUNKS
from search.engines.torchtitan.source import read_source
from search.engines.words import ROTARY_BASE, layer_ranges, required, torchrun

VERSION = RECIPES
FILE = "autopar_recipe.py"
_TITLE = f"torchtitan {VERSION}"
_MODULE = "autopar_recipe"
_FUNCTION = "autopar_plan"


def recipe(run: Run, place: ExportTarget) -> Draft:
    """Return the recipe of a run and the command that starts it.

    A uniform plan has a model of torchtitan's registry, a per-layer plan one of Llama 3's blocks.

    Raises UnsupportedError for a model that is no flavor of torchtitan, or that Llama 3 blocks
    cannot build, and for settings that a recipe cannot describe.
    """
    of_layers = place.recomputed is not None
    if of_layers:
        refuse_model(place.model or run.name, beyond(run.model))
    others = _others_of_layers(run) if of_layers else beyond_recipes(run)
    if others:
        raise UnsupportedError(f"a recipe of {_TITLE} cannot describe {' and '.join(others)}")
    text = _text(run, place)
    return Draft(
        version=VERSION if place.release is None else place.release.name,
        files={FILE: text},
        launch=_command(run, place),
        notes=tuple(_notes(run, place)),
        read=(lambda: _read(text, run)) if of_layers else None,
    )


def beyond_recipes(run: Run) -> tuple[str, ...]:
    """Return the settings of a uniform plan that a recipe cannot describe, in words."""
    split, precision, kernels = run.split, run.runtime.precision, run.kernels
    rows = precision.row_scales or precision.fp8_recipe == "mxfp8"
    return _present(
        {
            f"a model of {run.model.num_layers} layers of width {run.model.hidden}": not (
                has_flavour(run.model, RECIPES)
            ),
            f"precision {precision.kind}": precision.kind not in ("bf16", "fp32"),
            "fp8 with one scale per tensor": precision.fp8 and not rows,
            "weights gathered in fp8": run.runtime.states.gathered_fp8,
            "replicas without FSDP2": run.runtime.states.keeper != "torchtitan",
            "recomputation of every n-th layer": run.strategy.recomputed.kind == "every",
            "expert tensor ranks": split.ep > 1 and split.etp > 1,
            "logits gathered for the loss": split.tp > 1 and not kernels.loss_parallel,
        }
    )


def _others_of_layers(run: Run) -> tuple[str, ...]:
    """Return the settings of a per-layer plan that its recipe cannot describe, in words."""
    return _present(
        {
            "fp8 GEMMs": run.runtime.precision.low_precision,
            "compiled layers": run.kernels.compiled,
            "several chunks of a stage": run.strategy.vpp > 1,
            "recomputation of parts of layers": run.strategy.recomputed.kind in ("op", "every"),
            "states on the host": run.runtime.optimizer.offload > 0,
        }
    )


def _present(obstacles: Mapping[str, bool]) -> tuple[str, ...]:
    return tuple(text for text, present in obstacles.items() if present)


def recomputed(run: Run, place: ExportTarget) -> list[int]:
    """Return the indices of the recomputed layers of a run."""
    if run.strategy.recomputed.kind == "none":
        return []
    every = range(run.model.num_layers)
    return [layer for layer in every if place.recomputed is None or layer in place.recomputed]


# --------------------------------------------------------------------------------------------------
# The model of a recipe, built from torchtitan's blocks with the sizes of a run.
#
# Recipes use the blocks of Llama 3: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no
# biases. Llama 2 and Mistral have these blocks with other sizes, which are written as in
# `torchtitan/models/llama3/__init__.py` of 0.3.0. The flavors there (8B, 70B, 405B) are Llama 3.1
# with scaled rotary frequencies, so a recipe refers to none of them.


def refuse_model(name: str, obstacles: Mapping[str, bool]) -> None:
    """Raise UnsupportedError if a model has a feature that recipes do not support.

    obstacles : descriptions of unsupported features -> True if the model has the feature.
    """
    found = _present(obstacles)
    if found:
        raise UnsupportedError(f"{_TITLE} does not support {' and '.join(found)} of {name}")


def beyond(model: Model) -> Mapping[str, bool]:
    """Return descriptions of unsupported features -> True if the model has the feature."""
    attention, layer, rotary = model.attention, model.last, model.positions == "rotary"
    return {
        "experts": model.experts is not None,
        "an MLP that is not gated": layer.gates == 1,
        "biases": layer.biases,
        "biases of the QKV projection": attention.qkv_biases,
        f"{model.positions} positions": not rotary,
        "positions in a part of each head": rotary and attention.rotary_share != 1.0,
        "norms other than two RMSNorms a layer": layer.norm != "rms" or layer.norms != 2,
        "QK norms": attention.head_norms != "none",
        "latent attention": attention.latent is not None,
        "sliding-window attention": attention.window is not None,
        "MTP layers": model.mtp > 0,
    }


_BUILT = '''\
DIM = {dim}
NUM_HEADS = {heads}
NUM_KV_HEADS = {kv_heads}
HEAD_DIM = {head_dim}
FFN_DIM = {ffn}
VOCAB_SIZE = {vocab}
{theta}
_INIT = {{"weight": partial(nn.init.trunc_normal_, std=0.02), "bias": nn.init.zeros_}}
_EMBEDDING_INIT = {{"weight": {embedding_init}}}
_ONES = {{"weight": nn.init.ones_}}


def _layer() -> Llama3TransformerBlock.Config:
    return Llama3TransformerBlock.Config(
        attention_norm=RMSNorm.Config(normalized_shape=DIM, param_init=_ONES),
        ffn_norm=RMSNorm.Config(normalized_shape=DIM, param_init=_ONES),
        attention=make_gqa_config(
            dim=DIM,
            n_heads=NUM_HEADS,
            n_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            fuse_qkv=True,
            wqkv_param_init=_INIT,
            wo_param_init=_INIT,
            inner_attention=get_attention_config("flex"),
            rope=ComplexRoPE.Config(
                dim=HEAD_DIM, max_seq_len=SEQ_LEN, theta=ROPE_THETA{scaling}
            ),
        ),
        feed_forward=make_ffn_config(
            dim=DIM, hidden_dim=FFN_DIM, w1_param_init=_INIT, w2w3_param_init=_INIT
        ),
    )


def model_spec() -> ModelSpec:
    """Return {name} out of Llama 3's blocks."""
    model = Llama3Model.Config(
        dim=DIM,
        vocab_size=VOCAB_SIZE,
        enable_weight_tying={tied},
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCAB_SIZE, embedding_dim=DIM, param_init=_EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=DIM, param_init=_ONES),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCAB_SIZE, param_init=_INIT),
        layers=[_layer() for _ in range(NUM_LAYERS)],
    )
    return replace(model_registry("debugmodel"), flavor="{name}", model=model)
'''

_ASKED = """\
if "ROTARY_BASE" not in environ:  # the model file that was planned with does not hold it
    raise ValueError("{message}")
ROPE_THETA = float(environ["ROTARY_BASE"])"""


def plain(name: str) -> str:
    """Return a name that is safe inside any Python string or docstring."""
    return re.sub(r"[^\w./+-]", "_", name)


def _model(run: Run, place: ExportTarget) -> str:
    """Return the source of `model_spec()`."""
    model, spec = run.model, spec_of(place, run.model)
    base = None if spec is None else spec.rotary_base
    factor = None if spec is None else spec.rotary_scaling_factor
    return _BUILT.format(
        name=_name(run, place),
        dim=model.hidden,
        heads=model.attention.heads,
        kv_heads=model.attention.kv_heads,
        head_dim=model.attention.width,
        ffn=model.dense_width,
        vocab=model.vocab,
        theta=_ASKED.format(message=ROTARY_BASE) if base is None else f"ROPE_THETA = {base}",
        scaling="" if factor is None else f', scaling="llama", scaling_factor={factor}',
        tied=model.tied,
        # A tied embedding is initialised once, as the weight of the head.
        embedding_init=("skip_param_init" if model.tied else "partial(nn.init.normal_, std=0.02)"),
    )


def _name(run: Run, place: ExportTarget) -> str:
    return plain(place.model or run.name or "model")


def _asks_base(run: Run, place: ExportTarget) -> bool:
    """Return True if the user must set the rotary base, which the model description lacks."""
    spec = spec_of(place, run.model)
    return place.recomputed is not None and (spec is None or spec.rotary_base is None)


# --------------------------------------------------------------------------------------------------
# The file and the command.


def _command(run: Run, place: ExportTarget) -> str:
    """Return the launch command, which fails if a required environment variable is not set."""
    asked = {"HF_ASSETS_PATH": "set HF_ASSETS_PATH to the folder with the tokenizer"}
    if run.runtime.adapters is not None:
        asked["LOAD"] = "set LOAD to the folder with the Hugging Face weights below the adapters"
    if _asks_base(run, place):
        asked["ROTARY_BASE"] = ROTARY_BASE
    words = [f'{name}="{required(name, message)}"' for name, message in asked.items()]
    words.append('PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"')
    words.append(
        torchrun(place, ["-m", "torchtitan.train", "--module", _MODULE, "--config", _FUNCTION])
    )
    return " ".join(words)


def _text(run: Run, place: ExportTarget) -> str:
    of_layers = place.recomputed is not None
    layers = recomputed(run, place)
    partly = of_layers and 0 < len(layers) < run.model.num_layers
    head = (
        f'"""{_name(run, place)} on {run.strategy.gpus} GPUs.\n\n'
        f"Written by autopar-export for {_TITLE}; other releases have other keys.\n"
        '"""\n'
    )
    if partly:
        policy = "LayersAC.Config()"
    else:
        policy = _POLICIES[run.strategy.recomputed.kind if layers else "none"]
    spec, names = ("model_spec()", _block_imports(run)) if of_layers else _registered(run)
    body = _config(run, place, spec, policy, chunks=0 if of_layers else _chunks(run))
    parts = ["\n" + _model(run, place)] if of_layers else []
    if partly:
        parts.append("\n" + _LAYERS_AC.format(layers=_int_set(layers)))
    others = {"dataclasses": ("dataclass",)} if partly else {}
    text = "\n".join([_constants(run, place), *parts, body])
    return "\n".join([head, _imports(_used(_IMPORTS, text), names, others), text])


_POLICIES = {"none": "None", "op": "SelectiveAC.Config()", "full": "FullAC.Config()"}
"""Kind of recomputation -> policy."""


def _chunks(run: Run) -> int:
    """Return the number of chunks of the loss; 0: a loss on all logits."""
    return run.kernels.loss_chunks if run.kernels.loss == "chunked" else 0


def _registered(run: Run) -> tuple[str, dict[str, tuple[str, ...]]]:
    """Return (the call of a model of torchtitan's registry, its imports by module)."""
    family, size = flavour_of(run.model, RECIPES)
    precision, compiled = run.runtime.precision, run.kernels.compiled
    words, converters = [f'"{size}"'], list[str]()
    names: dict[str, tuple[str, ...]] = {f"torchtitan.models.{family}": ("model_registry",)}
    if family == "gpt_oss" and run.split.cp > 1:
        # `varlen`, its default, has no context parallelism.
        words.append('attn_backend="flex"')
    if run.model.experts is not None and run.runtime.experts.dispatcher == "flex":
        words.append('moe_comm_backend="deepep"')
    if precision.fp8:
        mx = precision.fp8_recipe == "mxfp8"
        kind = "MXFP8LinearConverter" if mx else "Float8LinearConverter"
        where = 'fqns=["layers"]' if mx else 'filter_fqns=["lm_head"]'
        converters.append(f"{kind}.Config({where}, model_compile_enabled={compiled})")
        names["torchtitan.components.quantization"] = (kind,)
    if run.runtime.adapters is not None:
        # Converters of precision come before those of adapters.
        converters.append(_adapters(run, run.runtime.adapters))
        names["torchtitan.components.lora"] = ("LoRAConverter",)
    if converters:
        inner = "".join(f"\n            {one}," for one in converters)
        words.append(f"converters=[{inner}\n        ]")
    if len(words) == 1:
        return f"model_registry({words[0]})", names
    return "model_registry(" + "".join(f"\n        {one}," for one in words) + "\n    )", names


def _adapters(run: Run, adapters: Adapters) -> str:
    """Return the converter of adapters; raises UnsupportedError if names cannot describe them.

    LoRAConverter ignores names that match no module, so they are checked here.
    """
    modules = adapted_modules(run.model, adapters.targets)
    fits = adapters.fused == "qkv" or not {"wqkv", "w1"} & {*modules}
    if not modules or not fits or adapters.dropout or adapters.base != "16 bits":
        raise UnsupportedError(
            f"{_TITLE} supports adapters without dropout on 16-bit weights of whole modules only: "
            f"{', '.join(sorted(linear_modules(run.model) & {*MODULES}))}"
        )
    listed = ", ".join(f'"{name}"' for name in modules)
    # The ratio is that of the defaults.
    return f"""LoRAConverter.Config(
                rank={adapters.rank},
                alpha={2.0 * adapters.rank},
                target_modules=[{listed}],
            )"""


# Names to import from each module, where the text uses them.
_IMPORTS = {
    "os": ("environ",),
    "torchtitan.components.checkpoint": ("CheckpointManager",),
    "torchtitan.components.loss": ("ChunkedLossWrapper", "CrossEntropyLoss"),
    "torchtitan.components.optimizer": ("default_adamw",),
    "torchtitan.config": ("CompileConfig", "ParallelismConfig", "TrainingConfig"),
    "torchtitan.distributed.activation_checkpoint": ("FullAC", "SelectiveAC"),
    "torchtitan.hf_datasets.text_datasets": ("HuggingFaceTextDataLoader",),
    "torchtitan.models.common.config_utils": ("decoder_vocab_size",),
    "torchtitan.trainer": ("Trainer",),
}
# Of a model of Llama 3's blocks.
_BLOCKS = {
    "dataclasses": ("replace",),
    "functools": ("partial",),
    "torch": ("nn",),
    "torchtitan.models.common": ("ComplexRoPE", "Embedding", "Linear", "RMSNorm"),
    "torchtitan.models.common.config_utils": (
        "get_attention_config",
        "make_ffn_config",
        "make_gqa_config",
    ),
    "torchtitan.models.llama3": ("model_registry",),
    "torchtitan.models.llama3.model": ("Llama3Model", "Llama3TransformerBlock"),
    "torchtitan.protocols.model_spec": ("ModelSpec",),
}


def _block_imports(run: Run) -> dict[str, tuple[str, ...]]:
    tied = {"torchtitan.models.common.param_init": ("skip_param_init",)} if run.model.tied else {}
    return _BLOCKS | tied


def _used(table: Mapping[str, tuple[str, ...]], text: str) -> dict[str, tuple[str, ...]]:
    """Return the names of a table of imports that a text contains."""
    found = {
        module: tuple(name for name in names if re.search(rf"\b{name}\b", text))
        for module, names in table.items()
    }
    return {module: names for module, names in found.items() if names}


def _imports(*tables: Mapping[str, tuple[str, ...]]) -> str:
    """Return import statements, standard library first, in the order that a formatter uses.

    tables : names to import, by module.
    """
    names: dict[str, set[str]] = {}
    for table in tables:
        for module, wanted in table.items():
            names.setdefault(module, set()).update(wanted)
    standard: list[str] = []
    others: list[str] = []
    for module in sorted(names):
        ordered = sorted(names[module], key=lambda name: (not name[0].isupper(), name))
        line = f"from {module} import {', '.join(ordered)}"
        # Wrapped as a formatter would, so that formatting does not change the recipe.
        if len(line) > 100:
            line = "\n".join([f"from {module} import (", *(f"    {n}," for n in ordered), ")"])
        (standard if module in ("dataclasses", "functools", "os") else others).append(line)
    return "\n".join([*standard, *([""] if standard else []), *others]) + "\n"


def _constants(run: Run, place: ExportTarget) -> str:
    lines = [f"NUM_LAYERS = {run.model.num_layers}", f"SEQ_LEN = {run.seq_length}"]
    if place.recomputed is None and run.strategy.pp == 1:
        del lines[0]
    if run.strategy.pp > 1:
        sizes = [len(chunk.layers) for chunk in parts_in_order(run.strategy)]
        lines += [f"STAGE_SIZES = {sizes}", "", "", _STAGE_MODULES.rstrip()]
    return "\n".join(lines) + "\n"


_STAGE_MODULES = '''\
def stage_modules() -> list[list[str]]:
    """Return the modules of every part: the layers in order, embedding first, head last."""
    names = [f"layers.{i}" for i in range(NUM_LAYERS)]
    stages = []
    for size in STAGE_SIZES:
        stages.append(names[:size])
        del names[:size]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "lm_head"]
    return stages
'''

_LAYERS_AC = '''\
CHECKPOINTED = {layers}


class LayersAC(FullAC):
    """Recomputes the layers in CHECKPOINTED and keeps the activations of the others."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        pass

    def _wrap_block(self, module, *, base_fqn=None):
        if int(base_fqn.removeprefix("layers.")) in CHECKPOINTED:
            return super()._wrap_block(module, base_fqn=base_fqn)
        return module
'''


def _int_set(numbers: list[int]) -> str:
    """Return the source of a Python set of layer indices, in lines of at most 100 columns."""
    text = ", ".join(map(str, numbers))
    if len(text) < 80:
        return f"{{{text}}}"
    body = textwrap.fill(text + ",", width=96, initial_indent="    ", subsequent_indent="    ")
    return f"{{\n{body}\n}}"


def _config(run: Run, place: ExportTarget, spec: str, policy: str, *, chunks: int) -> str:
    """Return the source of the function; chunks : as in `_chunks`, or 0 for a per-layer plan."""
    loss = "CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))"
    if chunks or place.recomputed is not None:
        number = f"num_chunks={chunks}, " if chunks not in (0, LOSS_CHUNKS) else ""
        loss = f"ChunkedLossWrapper.Config(\n            {number}loss_fn={loss},\n        )"
    key = "initial_load_in_hf_quantized"
    is_quantized = place.recomputed is None and flavour_of(run.model, RECIPES) in _QUANTIZED
    quantized = f'\n            {key}=bool(environ.get("LOAD")),' if is_quantized else ""
    return f'''
def {_FUNCTION}() -> Trainer.Config:
    """Return the configuration that `--module {_MODULE} --config {_FUNCTION}` names."""
    spec = {spec}
    return Trainer.Config(
        model_spec=spec,
        loss={loss},
        optimizer=default_adamw(lr=3e-4),
        parallelism=ParallelismConfig(
{_keys(_parallelism(run))}
        ),
        training=TrainingConfig(
{_keys(_training(run))}
        ),
        activation_checkpoint={policy},
        compile=CompileConfig({_compile(run)}),
        hf_assets_path=environ.get("HF_ASSETS_PATH", "./assets/hf/{_name(run, place)}"),
        # LOAD: Hugging Face safetensors to begin with; SAVE: the folder of checkpoints.
        checkpoint=CheckpointManager.Config(
            enable=bool(environ.get("LOAD") or environ.get("SAVE")),
            initial_load_path=environ.get("LOAD") or None,
            initial_load_in_hf=bool(environ.get("LOAD")),{quantized}
            folder=environ.get("SAVE") or "checkpoint",
        ),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
    )
'''


_QUANTIZED = frozenset({("gpt_oss", "20b"), ("gpt_oss", "120b"), ("deepseek_v3", "671B")})
"""Flavors whose published weights are in MXFP4 or in blocks of fp8."""


def _parallelism(run: Run) -> dict[str, object]:
    strategy, split = run.strategy, run.split
    # With ZeRO the mesh shards over the data-parallel ranks of each HSDP replica. With DDP every
    # data-parallel rank is a replica.
    copies = split.replicas if split.zero else strategy.dp
    # Resharding after the forward pass is ZeRO-3. Without it weights stay gathered, as in ZeRO-2.
    reshard = "always" if split.zero == 3 else "never"
    found: dict[str, object] = {
        "data_parallel_replicate_degree": copies,
        "data_parallel_shard_degree": strategy.dp // copies,
        "fsdp_reshard_after_forward": f'"{reshard}"',
        "tensor_parallel_degree": split.tp,
        "context_parallel_degree": split.cp,
        "pipeline_parallel_degree": strategy.pp,
    }
    if split.tp > 1:
        found["enable_sequence_parallel"] = split.splits_sequence
    if run.model.experts is not None:
        found["expert_parallel_degree"] = split.ep
    if strategy.pp > 1:
        found |= {
            "pipeline_parallel_schedule": f'"{TORCH_NAMES[strategy.schedule]}"',
            "pipeline_parallel_microbatch_size": strategy.micro_batch,
            "module_fqns_per_model_part": "stage_modules()",
        }
    return found


def _training(run: Run) -> dict[str, object]:
    strategy, optimizer = run.strategy, run.runtime.optimizer
    wide = run.runtime.precision.kind == "fp32"
    found: dict[str, object] = {
        # Without stages micro-batches are steps of gradient accumulation.
        "local_batch_size": strategy.micro_batch
        * (strategy.micro_batches if strategy.pp > 1 else 1),
        "global_batch_size": strategy.global_batch,
        "seq_len": "SEQ_LEN",
        "mixed_precision_param": '"float32"' if wide else '"bfloat16"',
        # The memory of graphs is not planned, and pipelines have none.
        "disable_cuda_graphs": run.kernels.graphs == "none",
    }
    if run.steps is not None:
        found["steps"] = run.steps
    if optimizer.master_bytes == 0:
        # Weights, adapters and optimizer states are in bf16.
        found["dtype"] = '"bfloat16"'
    if optimizer.offload_weights:
        found["enable_cpu_offload"] = True
    return found


def _compile(run: Run) -> str:
    """Return the arguments of the compiler."""
    kernels = run.kernels
    parts = {"model": kernels.compiled, "loss": kernels.loss == "compiled"}
    on = [f'"{name}"' for name, is_on in parts.items() if is_on]
    if not on:
        return "enable=False"
    words = f"enable=True, components=[{', '.join(on)}]"
    return f"{words}, enable_async_tensor_parallel=True" if run.runtime.overlap.tensor else words


def _keys(values: Mapping[str, object]) -> str:
    return "\n".join(f"            {key}={value}," for key, value in values.items())


def _notes(run: Run, place: ExportTarget) -> Iterator[str]:
    yield "set HF_ASSETS_PATH to the folder with the tokenizer"
    yield (
        "LOAD is the absolute path of Hugging Face weights to begin with, SAVE that of checkpoints"
    )
    yield "dataset and learning rate are placeholders"
    if run.steps is None:
        yield "training.steps is the number of steps, 10000 unless it is given"
    if run.runtime.precision.fp8:
        yield "fp8 GEMMs need torchao"
    if run.model.experts is not None and run.runtime.experts.dispatcher == "flex":
        yield "deepep needs DeepEP 2.0 or later"
    if place.recomputed is not None:
        yield "the loss is computed in chunks: less memory on the last stage than predicted"
    elif flavour_of(run.model, RECIPES)[0] == "llama3":
        yield "rotary positions are those of Llama 3.1, with scaled frequencies"
    if _asks_base(run, place):
        yield "set ROTARY_BASE: the model description does not hold the base of rotary positions"
    if run.split.cp > 1:
        yield "its context parallelism gathers keys and values instead of a ring"
    layers = recomputed(run, place)
    if 0 < len(layers) < run.model.num_layers:
        yield f"LayersAC recomputes {layer_ranges(layers)}"
    if run.strategy.pp > 1:
        yield (
            f"{_TITLE} passes lists of micro-batches to torch's pipeline "
            "schedule: it needs a torch later than 2.13.0"
        )


# --------------------------------------------------------------------------------------------------
# Reading a recipe back, to verify it.


def _read(text: str, run: Run) -> Run:
    """Return the run that a recipe describes.

    run : the written run, which supplies the parts of the model that a recipe does not contain.
    """
    found = read_source(Path(FILE), text)
    built = found.model
    assert built is not None, "a recipe builds its model"
    attention, width = built.attention, built.attention.width
    layer = replace(
        run.model.last,
        hidden=built.hidden,
        mixers=(replace(run.model.attention, heads=attention.heads, kv_heads=attention.kv_heads,
                        width=width, value_width=width),),
        mlp=built.last.mlp,
    )  # fmt: skip
    model = replace(
        run.model,
        layers=(LayerGroup(count=built.num_layers, layer=layer),),
        repeat=1,
        vocab=built.vocab,
        tied=built.tied,
    )
    # The loss in chunks is not planned. LayersAC recomputes whole layers.
    document = {key: value for key, value in found.document.items() if key != "loss"}
    document.setdefault("activation_checkpoint", {"mode": "full"})
    again = read_titan(document, world_size=run.strategy.gpus, gpu=run.gpu, model=model).run
    if run.split.zero:
        return again
    # Replicas of a per-layer plan are priced as those of DDP, without the copies of FSDP2.
    states = replace(again.runtime.states, keeper="ddp")
    again = replace(again, runtime=replace(again.runtime, states=states))
    return run_with_split(again, zero=0, replicas=1)
