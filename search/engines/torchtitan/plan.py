"""A plan as a recipe of torchtitan 0.3.0: one Python file whose function returns Trainer.Config.

Keys: `torchtitan/config/configs.py`, `distributed/activation_checkpoint.py`, `trainer.py` of the
wheel of 0.3.0. One tensor, context and data degree for the whole model; stages of any size;
checkpoints per layer by a subclass of `FullAC`. `docs/export-torchtitan.md` says what is kept.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping

from autopar.errors import InputError, UnsupportedError
from autopar.run.model import ModelSpec, head_dim
from autopar.run.plan import LayerStrategy, Plan
from search.engines.engine import (
    EVERY_MICROBATCH,
    ONE_STAGE,
    REPLICAS,
    ROTARY_BASE,
    SHARDED_OPTIMIZER,
    SINGLE_STAGE,
    ZERO3,
    Job,
    Loss,
    Lowered,
    Part,
    Space,
    different,
    further_parts,
    layer_ranges,
    required,
    samples_of_a_rank,
    search_fields,
    torchrun,
)
from search.engines.nearest import DataMode, Reach, kv_heads_problems, nearest

# --------------------------------------------------------------------------------------------------
# The model of a torchtitan recipe, written out of torchtitan's blocks by our spec.
#
# torchtitan's language models with the blocks that our specs describe are Llama 3's: RMSNorm,
# rotary positions, grouped-query attention, SwiGLU, no biases. Llama 2 and Mistral are these with
# other numbers, which `torchtitan/models/llama3/__init__.py` of 0.3.0 shows how to write. Its own
# flavours (8B, 70B, 405B) are Llama 3.1, whose rotary frequencies are scaled, so none of them is
# named.


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
    """Return a name that any string or docstring of Python can hold."""
    return re.sub(r"[^\w./+-]", "_", name)


def model_source(spec: ModelSpec) -> str:
    """Return the source of `model_spec()`.

    Raises InputError where torchtitan 0.3.0 has no such model, with what stands in the way.
    """
    layer = spec.layers[0]
    obstacles = {
        f"{len(spec.layers)} layer types": len(spec.layers) > 1,
        "experts": layer.num_experts is not None,
        "an MLP that is not gated": not layer.gated_mlp,
        "biases": layer.biases,
        "biases of the QKV projection": layer.qkv_biases,
        "cross attention": layer.cross_attention,
        "attention that is not causal": not layer.causal,
        "learned positions": spec.learned_positions > 0,
        "norms other than two RMSNorms a layer": layer.norm_parameters_per_hidden != 2,
        "norms of queries and keys": layer.qk_norms,
        **dict.fromkeys(further_parts(spec), True),
        "no vocabulary size": spec.vocab_size is None,
        "no number of heads": layer.num_heads is None,
        "no width of the MLP": layer.ffn_hidden_size is None,
    }
    found = [text for text, present in obstacles.items() if present]
    if found:
        raise UnsupportedError(
            f"torchtitan 0.3.0 has no model like {spec.name}, which has {' and '.join(found)}"
        )
    base, factor = spec.rotary_base, spec.rotary_scaling_factor
    return _BUILT.format(
        name=plain(spec.name),
        dim=layer.hidden_size,
        heads=layer.num_heads,
        kv_heads=layer.num_kv_heads or layer.num_heads,
        head_dim=head_dim(layer),
        ffn=layer.ffn_hidden_size,
        vocab=spec.vocab_size,
        theta=_ASKED.format(message=ROTARY_BASE) if base is None else f"ROPE_THETA = {base}",
        scaling="" if factor is None else f', scaling="llama", scaling_factor={factor}',
        tied=spec.tied_embeddings,
        # A tied table is initialised once, as the head's weight.
        embedding_init=(
            "skip_param_init" if spec.tied_embeddings else "partial(nn.init.normal_, std=0.02)"
        ),
    )


# --------------------------------------------------------------------------------------------------
# Export: the recipe.


VERSION = "0.3.0"
_MODULE = "autopar_recipe"
_FUNCTION = "autopar_plan"


def _data_mode(mode: DataMode, shape: LayerStrategy, data_degree: int) -> DataMode:
    # Its FSDP mesh is dp_shard * cp, so a context group always shards what it holds.
    # And units of FSDP2 share gradients where they share the optimizer.
    return "zero2" if mode == "zero1" or (mode == "ddp" and shape.cp > 1) else mode


_REACH = Reach(
    title=f"torchtitan {VERSION}",
    context=True,
    layer_checkpoints=True,
    data_mode=_data_mode,
    problems=kv_heads_problems,
    reasons={"default_dp_type": "shards the parameters over every context group"},
)


_STAGES: Part = {"forbid": ("pp=1",)}
# with stages it reduces once per step
SPACE = Space(
    parts=(
        ({**SINGLE_STAGE, **EVERY_MICROBATCH}, ZERO3),
        ({**SINGLE_STAGE, **EVERY_MICROBATCH, **SHARDED_OPTIMIZER}, ""),
        ({**SINGLE_STAGE, **EVERY_MICROBATCH, **REPLICAS}, ""),
        ({**_STAGES}, ZERO3),
        ({**_STAGES, **SHARDED_OPTIMIZER}, ""),
        ({**_STAGES, **REPLICAS}, ""),
    ),
    context=True,
    # `context_parallel_rotate_method` is allgather unless somebody says otherwise
    gathers=True,
)


def lower(job: Job) -> Lowered:
    """Return the recipe of a plan, or of the nearest plan that torchtitan can express.

    Raises InputError where torchtitan has no such model, or no plan near this one is legal.
    """
    model = model_source(job.spec)
    if job.spec.tied_embeddings and job.plan.num_stages > 1:
        raise InputError(
            f"torchtitan {VERSION} has no pipeline for models with tied embeddings, and the plan "
            f"has {job.plan.num_stages} stages; search again with --max-pp-deg 1"
        )
    plan, found = nearest(job, _REACH)
    losses = list(found)
    if job.precision == "fp16":
        losses.append(
            Loss(
                field="mixed_precision",
                what=f"the plan is for fp16; torchtitan {VERSION} trains in bf16 or fp32, "
                "so it takes bf16",
            )
        )
    # Without stages every backward reduces, in the one reduce dtype that it has; schedules of
    # torch.distributed.pipelining reduce behind the last micro-batch.
    staged = plan.num_stages > 1
    runs = {"async_grad_reduce": staged, "fp32_gradients": True}
    stages = (("pin", (f"pp={plan.num_stages}",)),) if staged else ONE_STAGE
    return Lowered(
        engine="torchtitan",
        engine_version=VERSION,
        plan=plan,
        files={f"{_MODULE}.py": _recipe(job, plan, model)},
        losses=tuple(losses),
        launch=_launch(job),
        notes=tuple(_notes(job, plan)),
        as_run=different(job, plan, runs),
        search=search_fields(plan, runs, stages),
    )


def _launch(job: Job) -> str:
    """Return the command; what the recipe takes from the environment is asked for before."""
    asked = {"HF_ASSETS_PATH": "set HF_ASSETS_PATH to the folder with the tokenizer"}
    if job.spec.rotary_base is None:
        asked["ROTARY_BASE"] = ROTARY_BASE
    words = [f'{name}="{required(name, message)}"' for name, message in asked.items()]
    words.append('PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"')
    words.append(
        torchrun(job, ["-m", "torchtitan.train", "--module", _MODULE, "--config", _FUNCTION])
    )
    return " ".join(words)


def _recipe(job: Job, plan: Plan, model: str) -> str:
    checkpointed = [i for i, layer in enumerate(plan.layers) if layer.checkpoint]
    partly = 0 < len(checkpointed) < len(plan.layers)
    policies = {0: "None", len(plan.layers): "FullAC.Config()"}
    policy = policies.get(len(checkpointed), "LayersAC.Config()")
    head = (
        f'"""{plain(job.model)} on {plan.world_size} GPUs.\n\n'
        f"Written by autopar-export for torchtitan {VERSION}; other releases have other keys.\n"
        '"""\n'
    )
    parts = [
        head,
        _imports(
            _IMPORTS,
            _TIED_IMPORTS if job.spec.tied_embeddings else {},
            _FULL_AC if checkpointed else {},
            {"dataclasses": ("dataclass",)} if partly else {},
        ),
        _constants(job, plan),
        "\n" + model,
    ]
    if partly:
        parts.append("\n" + _LAYERS_AC.format(layers=_int_set(checkpointed)))
    parts.append(_config(job, plan, policy))
    return "\n".join(parts)


# Names to import by module; a formatter lays them out.
_IMPORTS = {
    "dataclasses": ("replace",),
    "functools": ("partial",),
    "os": ("environ",),
    "torch": ("nn",),
    "torchtitan.components.checkpoint": ("CheckpointManager",),
    "torchtitan.components.loss": ("ChunkedLossWrapper", "CrossEntropyLoss"),
    "torchtitan.components.optimizer": ("default_adamw",),
    "torchtitan.config": ("CompileConfig", "ParallelismConfig", "TrainingConfig"),
    "torchtitan.hf_datasets.text_datasets": ("HuggingFaceTextDataLoader",),
    "torchtitan.models.common": ("ComplexRoPE", "Embedding", "Linear", "RMSNorm"),
    "torchtitan.models.common.config_utils": (
        "decoder_vocab_size",
        "get_attention_config",
        "make_ffn_config",
        "make_gqa_config",
    ),
    "torchtitan.models.llama3": ("model_registry",),
    "torchtitan.models.llama3.model": ("Llama3Model", "Llama3TransformerBlock"),
    "torchtitan.protocols.model_spec": ("ModelSpec",),
    "torchtitan.trainer": ("Trainer",),
}
_TIED_IMPORTS = {"torchtitan.models.common.param_init": ("skip_param_init",)}
_FULL_AC = {"torchtitan.distributed.activation_checkpoint": ("FullAC",)}


def _imports(*tables: Mapping[str, tuple[str, ...]]) -> str:
    """Return import lines, the standard library's first, sorted as formatters do it."""
    names: dict[str, set[str]] = {}
    for table in tables:
        for module, wanted in table.items():
            names.setdefault(module, set()).update(wanted)
    standard: list[str] = []
    others: list[str] = []
    for module in sorted(names):
        ordered = sorted(names[module], key=lambda name: (not name[0].isupper(), name))
        line = f"from {module} import {', '.join(ordered)}"
        # the recipe is Python that formatters leave as it is
        if len(line) > 100:
            line = "\n".join([f"from {module} import (", *(f"    {n}," for n in ordered), ")"])
        (standard if module in ("dataclasses", "functools", "os") else others).append(line)
    return "\n".join([*standard, *([""] if standard else []), *others]) + "\n"


def _constants(job: Job, plan: Plan) -> str:
    lines = [f"NUM_LAYERS = {len(plan.layers)}", f"SEQ_LEN = {job.seq_length}"]
    if plan.num_stages > 1:
        lines += [f"STAGE_SIZES = {list(plan.stage_sizes)}", "", "", _STAGE_MODULES.rstrip()]
    return "\n".join(lines) + "\n"


_STAGE_MODULES = '''\
def stage_modules() -> list[list[str]]:
    """Return the modules of every stage: the layers in order, embedding first, head last."""
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
    """Return a set of layers as Python of at most 100 columns."""
    text = ", ".join(map(str, numbers))
    if len(text) < 80:
        return f"{{{text}}}"
    body = textwrap.fill(text + ",", width=96, initial_indent="    ", subsequent_indent="    ")
    return f"{{\n{body}\n}}"


def _config(job: Job, plan: Plan, policy: str) -> str:
    layer = plan.layers[0]
    dp = plan.data_degree(0)
    # samples of one data rank
    micro = samples_of_a_rank(plan)
    piped = plan.num_stages > 1
    sharded = _sharded(plan)
    # a mesh that shards holds all data ranks; ddp replicates over them
    replicate, shard = (1, dp) if sharded else (dp, 1)
    # resharding after the forward is ZeRO-3; without it the weights stay, as in ZeRO-2
    reshard = "always" if _zero3(plan) else "never"
    parallelism = {
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": repr(reshard).replace("'", '"'),
        "tensor_parallel_degree": layer.tp,
        "enable_sequence_parallel": job.sequence_parallel,
        "context_parallel_degree": layer.cp,
        "pipeline_parallel_degree": plan.num_stages,
    }
    if piped:
        schedule = "GPipe" if plan.pipeline_type == "gpipe" else "1F1B"
        parallelism |= {
            "pipeline_parallel_schedule": f'"{schedule}"',
            "pipeline_parallel_microbatch_size": micro,
            "module_fqns_per_model_part": "stage_modules()",
        }
    training: dict[str, object] = {
        # Without stages its micro-batches are steps of gradient accumulation.
        "local_batch_size": micro * plan.num_microbatches if piped else micro,
        "global_batch_size": plan.global_batch,
        "seq_len": "SEQ_LEN",
        "steps": 1000,
        # fp16 becomes bf16, which is one of the losses
        "mixed_precision_param": '"float32"' if job.precision == "fp32" else '"bfloat16"',
    }
    if piped:
        training["disable_cuda_graphs"] = True  # its own rule for pipelines
    return f'''
def {_FUNCTION}() -> Trainer.Config:
    """Return the configuration that `--module {_MODULE} --config {_FUNCTION}` names."""
    spec = model_spec()
    return Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        ),
        optimizer=default_adamw(lr=3e-4),
        parallelism=ParallelismConfig(
{_keys(parallelism)}
        ),
        training=TrainingConfig(
{_keys(training)}
        ),
        activation_checkpoint={policy},
        compile=CompileConfig(enable=False),
        hf_assets_path=environ.get("HF_ASSETS_PATH", "./assets/hf/{plain(job.spec.name)}"),
        # LOAD: Hugging Face safetensors to begin with; SAVE: the folder of checkpoints.
        checkpoint=CheckpointManager.Config(
            enable=bool(environ.get("LOAD") or environ.get("SAVE")),
            initial_load_path=environ.get("LOAD") or None,
            initial_load_in_hf=bool(environ.get("LOAD")),
            folder=environ.get("SAVE") or "checkpoint",
        ),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
    )
'''


def _keys(values: dict[str, object]) -> str:
    return "\n".join(f"            {key}={value}," for key, value in values.items())


def _zero3(plan: Plan) -> bool:
    return any(layer.zero3 for layer in plan.layers)


def _sharded(plan: Plan) -> bool:
    return _zero3(plan) or plan.vocab.zero3 or plan.default_dp_type == "zero2"


def _notes(job: Job, plan: Plan) -> list[str]:
    notes = [
        "set HF_ASSETS_PATH to the folder with the tokenizer",
        "LOAD is the absolute path of Hugging Face weights to begin with, SAVE that of checkpoints",
        "fill in dataset, steps and learning rate",
        "the loss is computed in chunks: less memory on the last stage than predicted",
    ]
    if job.spec.rotary_base is None:
        notes.append(
            "set ROTARY_BASE: the model description does not hold the base of rotary positions"
        )
    if plan.num_microbatches > 1 and plan.num_stages == 1 and job.async_grad_reduce:
        notes.append(
            "gradients are reduced in every micro-batch, as --no-async-grad-reduce predicts it"
        )
    if plan.layers[0].cp > 1:
        notes.append("its context parallelism gathers keys and values instead of a ring")
    checkpointed = [i for i, layer in enumerate(plan.layers) if layer.checkpoint]
    if 0 < len(checkpointed) < len(plan.layers):
        notes.append(f"LayersAC recomputes {layer_ranges(checkpointed)}")
    if plan.num_stages > 1:
        notes.append(
            f"torchtitan {VERSION} hands lists of micro-batches to torch's pipeline schedule: it "
            "needs a torch later than 2.13.0, whose schedules refuse them"
        )
    return notes
