"""Import and export of PaddleNLP plans: fine_grained_config.json and the launch command.

The keys come from `paddlenlp/experimental/galvatron` (`search_engine/search_engine.py`,
`runtime/comm_group.py`) and from `train_qwen_fine_grained.sh`, as of 2025. Strategies may differ
between layers, but have no context degrees and no strided groups. Embedding and head have a
separate strategy, and stages may have any size. One `--sharding` argument sets the sharding of all
layers without ZeRO-3.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autopar.documents.json import load_object
from autopar.documents.plan import read_strategy
from autopar.documents.strategy import paddle_document
from autopar.errors import DocumentError, InputError, UnsupportedError
from autopar.records import replace
from autopar.run.model import ModelSpec, head_dim
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy, violations
from search.engines.exporter_types import ImportedPlan, UnsupportedFeature
from search.engines.plans import (
    REPLICAS,
    SHARDED_OPTIMIZER,
    ZERO3,
    ExportedPlan,
    ExporterSpace,
    ExporterSubspace,
    ExportJob,
    different,
    has_one_kind,
    unsupported_modules,
)
from search.engines.text import Configuration, named_file
from search.engines.words import NODE_RANK, layer_ranges, per_value, required, shell_lines

VERSION = "galvatron of paddlenlp/experimental, 2025"
_TITLE = "PaddleNLP"
_FILE = "fine_grained_config.json"
_NEIGHBOURS: ExporterSubspace = {"disable_tp_consec": True}
# Its search engine combines ZeRO-3 layers with ZeRO-2 for the others.
_ZERO2: ExporterSubspace = {"default_dp_type": "zero2"}
SPACE = ExporterSpace(
    parts=(
        ({**_NEIGHBOURS, **_ZERO2}, ""),
        ({**_NEIGHBOURS, **SHARDED_OPTIMIZER}, ""),
        ({**_NEIGHBOURS, **REPLICAS}, ""),
        ({**_NEIGHBOURS}, ZERO3),
    ),
    one_degree=False,
)


# --------------------------------------------------------------------------------------------------
# Import of its files.


def import_paddlenlp(
    source: Configuration, *, world_size: int | None = None, num_layers: int | None = None
) -> ImportedPlan:
    """Return the plan of a strategy file, or of a launch script that names a strategy file.

    Strategy files are fine_grained_config.json and optimal_solution.json.

    world_size : number of GPUs, if the strategy file does not contain it.
    num_layers : number of layers of the model, which optimal_solution.json does not contain.

    Raises DocumentError if a value is missing or invalid, or if plans cannot express it.
    """
    path: Path = source.path
    document: Mapping[str, Any] = source.document
    schedule, notes = None, list[str]()
    if source.flags is not None:
        named = source.flags.get("fine-grained-config-path", ())
        if not named or "$" in named[0]:
            raise DocumentError(
                path,
                "does not name the strategy file",
                key="fine_grained_config_path",
                remedy="Give fine_grained_config.json itself",
            )
        schedule = next(iter(source.flags.get("pipeline-schedule-mode", ())), None)
        path = named_file(named[0], path.parent, notes)
        document = load_object(path).data
    plan = read_strategy(document, world_size=world_size, num_layers=num_layers, path=path)
    if schedule == "FThenB":
        plan = replace(plan, pipeline_type="gpipe")
    elif schedule not in (None, "1F1B"):
        raise DocumentError(
            source.path,
            f"the value is {schedule!r:.40}, but plans have 1F1B or FThenB (GPipe)",
            key="pipeline_schedule_mode",
        )
    elif schedule is None and plan.num_stages > 1 and "pipeline_type" not in document:
        notes.append("the file does not name the schedule; using the default 1F1B")
    other = path if source.flags is not None else None
    return ImportedPlan(plan=plan, notes=tuple(notes), strategy_path=other)


# --------------------------------------------------------------------------------------------------
# The nearest plan that the strategy file can express.


def lower(job: ExportJob) -> ExportedPlan:
    """Return the files of a plan, or of the nearest plan that the strategy file can express.

    Raises UnsupportedError for a model with blocks other than Llama's. Raises InputError if no plan
    near this one is legal.
    """
    _check(job.spec)
    plan, losses = _nearest(job)
    runs = {"fp32_gradients": job.fp32_gradients, "async_grad_reduce": job.async_grad_reduce}
    # Its blocks always use sequence parallelism in tensor groups.
    parts: list[LayerStrategy | VocabStrategy] = [*plan.layers, plan.vocab]
    if any(part.tp > 1 and not part.ulysses for part in parts):
        runs["sequence_parallel"] = True
    return ExportedPlan(
        engine="paddlenlp",
        engine_version=VERSION,
        plan=plan,
        files={_FILE: json.dumps(paddle_document(plan), indent=4) + "\n"},
        losses=losses,
        launch=_launch(job, plan),
        notes=tuple(_notes(job, plan)),
        as_run=different(job, plan, runs),
        search=(("disable_tp_consec", True), ("default_dp_type", "zero2")) if losses else (),
    )


def _nearest(job: ExportJob) -> tuple[Plan, tuple[UnsupportedFeature, ...]]:
    before = job.plan
    problems: tuple[str, ...] = ()
    for plan in _plans(before):
        found = tuple(violations(plan, job.spec, sequence_parallel=True))
        if not found:
            return plan, tuple(_losses(before, plan))
        problems = problems or found
    raise InputError(
        f"{_TITLE} supports neither this plan nor a similar one: {problems[0]}",
        remedy="Search again with --disable-tp-consec and without context parallelism",
    )


def _plans(plan: Plan) -> Iterator[Plan]:
    """Yield variants of a plan without strided groups and context degrees, nearest first."""
    default = "zero2" if _is_mixed(plan) else plan.default_dp_type
    plan = replace(
        plan,
        layers=tuple(replace(layer, strided=False) for layer in plan.layers),
        default_dp_type=default,
    )
    if not any(layer.cp > 1 for layer in plan.layers):
        yield plan
        return

    for change in (_as_ulysses, _as_tensor, _as_data):
        layers = (change(layer) if layer.cp > 1 else layer for layer in plan.layers)
        yield replace(plan, layers=tuple(layers))


# The first two changes keep the number of ranks per sequence, so that no rank holds more tokens of
# it. Data parallelism is the fallback.


def _as_ulysses(layer: LayerStrategy) -> LayerStrategy:
    kind = layer.ulysses or layer.tp == 1
    return replace(layer, tp=layer.tp * layer.cp, cp=1, ulysses=kind)


def _as_tensor(layer: LayerStrategy) -> LayerStrategy:
    return replace(layer, tp=layer.tp * layer.cp, cp=1, ulysses=False)


def _as_data(layer: LayerStrategy) -> LayerStrategy:
    return replace(layer, cp=1)


def _is_mixed(plan: Plan) -> bool:
    """Return True if a plan combines replicas and ZeRO-3, which one `--sharding` cannot express."""
    if plan.default_dp_type != "ddp":
        return False
    ranks = plan.world_size // plan.num_stages
    parts: list[LayerStrategy | VocabStrategy] = [*plan.layers, plan.vocab]
    # Ulysses splits no weights: every rank of the stage is a replica.
    others = (part for part in parts if not part.zero3 and (part.ulysses or ranks > part.tp))
    return any(part.zero3 for part in parts) and any(True for _ in others)


def _losses(before: Plan, after: Plan) -> Iterator[UnsupportedFeature]:
    old, new = before.layers, after.layers
    strided = [i for i, layer in enumerate(old) if layer.strided]
    if strided:
        yield UnsupportedFeature(
            field="tp_consecutive_flags",
            what=(
                f"strided tensor groups of {layer_ranges(strided)} become "
                "neighbouring ranks, which its meshes need"
            ),
        )
    if any(layer.cp > 1 for layer in old):

        def kind(s: LayerStrategy) -> str:
            return f"{'Ulysses' if s.ulysses else 'tensor'} degree {s.tp}"

        context = per_value([s.cp for s in old])
        yield UnsupportedFeature(
            field="cp_sizes_enc",
            what=f"the file has no context degrees: {context} become "
            f"{per_value([kind(s) for s in new])}",
        )
    if before.default_dp_type != after.default_dp_type:
        yield UnsupportedFeature(
            field="default_dp_type",
            what=(
                "replicas without ZeRO-3 become ZeRO-2: --sharding is one value for "
                "all layers without ZeRO-3"
            ),
        )


# --------------------------------------------------------------------------------------------------
# The launch command.


_TRAINER = "llm/auto_parallel/galvatron-llama-submita/train_qwen_fine_graine.py"
_LLAMA_BASE = 10000.0


def _check(spec: ModelSpec) -> None:
    """Raise UnsupportedError for a model that is known to have blocks other than Llama's."""
    layer = spec.layers[-1]
    found = {
        "layers of several kinds": not has_one_kind(spec),
        "attention that is not causal": not layer.causal,
        "experts": layer.num_experts is not None,
        # An incomplete description does not define the blocks.
        "an MLP that is not gated": _is_known(spec) and not layer.gated_mlp,
        "biases": _is_known(spec) and layer.biases,
        "learned positions": spec.learned_positions > 0,
        **dict.fromkeys(unsupported_modules(spec), True),
        "norms other than RMSNorm": _is_known(spec) and layer.norm_parameters_per_hidden != 2,
    }
    names = [name for name, present in found.items() if present]
    if names:
        raise UnsupportedError(
            f"{_TITLE}'s fine-grained trainer builds Llama blocks, but "
            f"{spec.name} has {' and '.join(names)}"
        )


def _is_known(spec: ModelSpec) -> bool:
    layer = spec.layers[-1]
    return None not in (layer.num_heads, layer.ffn_hidden_size, spec.vocab_size)


def _left_out(spec: ModelSpec) -> list[str]:
    """Return the features of a model that PaddleNLP's Llama does not support, for notes."""
    layer = spec.layers[-1]
    found = {
        "biases of the QKV projection": layer.qkv_biases,
        "tied embeddings": spec.tied_embeddings,
        f"a rotary base of {spec.rotary_base}": spec.rotary_base not in (None, _LLAMA_BASE),
        "rotary positions in a part of each head": spec.rotary_share != 1.0,
        "scaled rotary frequencies": spec.rotary_scaling_factor is not None,
        "heads of another width than hidden size over heads": layer.num_heads is not None
        and layer.num_heads * head_dim(layer) != layer.hidden_size,
    }
    return [name for name, present in found.items() if present]


def _model(spec: ModelSpec) -> list[str]:
    if not _is_known(spec):
        # Unquoted, so that the shell splits it into words.
        return ["${MODEL_ARGS:?set MODEL_ARGS to the arguments of your model}"]
    layer = spec.layers[-1]
    sizes = {
        "num_hidden_layers": spec.num_layers,
        "intermediate_size": layer.ffn_hidden_size,
        "vocab_size": spec.vocab_size,
        "hidden_size": layer.hidden_size,
        "seq_length": layer.seq_length,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads or layer.num_heads,
    }
    words = ["--model_type llama_fine_grained_final"]
    return words + [f"--{name} {value}" for name, value in sizes.items()]


def _parallel(job: ExportJob, plan: Plan) -> list[str]:
    """Return the command-line arguments for batch, recomputation, sharding and degrees.

    The degrees are those of embedding and head, since the strategy file contains those of layers.
    Constant arguments are copied from `train_qwen_fine_grained.sh`.
    """
    ranks = plan.world_size // plan.num_stages
    data = ranks // plan.vocab.tp
    samples = max(1, plan.global_batch // plan.num_microbatches // data)
    sharded = plan.default_dp_type != "ddp" or plan.vocab.zero3
    sharded = sharded or any(layer.zero3 for layer in plan.layers)
    sharding = [f"--sharding_parallel_degree {data}", "--sharding stage2"] if sharded else []
    once = " gradient_sync_after_accumulate" if job.async_grad_reduce else ""
    schedule = "FThenB" if plan.pipeline_type == "gpipe" else "1F1B"
    return [
        f"--per_device_train_batch_size {samples}",
        f"--gradient_accumulation_steps {plan.num_microbatches}",
        f"--recompute {str(any(s.checkpoint for s in plan.layers)).lower()}",
        "--recompute_use_reentrant true",
        "--recompute_granularity full",
        *([f"--{job.precision} true", "--fp16_opt_level O2"] if job.precision != "fp32" else []),
        # In fp32 all gradients are fp32 anyway, and PaddleNLP warns about the switch.
        f"--amp_master_grad {str(job.fp32_gradients and job.precision != 'fp32').lower()}",
        "--to_static 1",
        *sharding,
        f"--tensor_parallel_degree {plan.vocab.tp}",
        "--sequence_parallel true",
        f"--pipeline_parallel_degree {plan.num_stages}",
        "--virtual_pp_degree 1",
        f"--pipeline_schedule_mode {schedule}",
        "--sep_parallel_degree 1",
        "--pipeline_parallel_config enable_send_recv_overlap",
        f'--data_parallel_config "enable_allreduce_avg_in_gradinent_scale{once}"',
        "--granularity_type fine_grained",
        f"--usp_flag {int(plan.vocab.ulysses)}",
        "--sharding_stage_level 2",
        f"--fine_grained_config_path {_FILE}",
    ]


def _launch(job: ExportJob, plan: Plan) -> str:
    path = required("PADDLENLP_PATH", "set PADDLENLP_PATH to a checkout of PaddleNLP")
    launcher = "python -u -m paddle.distributed.launch"
    devices = ",".join(map(str, range(job.gpus_per_node)))
    nodes = []
    if job.num_nodes > 1:
        address = '"${MASTER_ADDR:?set it to the first node}:${MASTER_PORT:-29500}"'
        nodes = [f"--master {address} --nnodes {job.num_nodes} --rank {NODE_RANK}"]
    data = required("DATA_DIR", "set DATA_DIR to the folder of the preprocessed data")
    training = [
        "--do_train true",
        "--device gpu",
        "--enable_auto_parallel 1",
        "--continue_training 0",
        "--max_steps ${TRAIN_STEPS:-500}",
        "--logging_steps 1",
        "--learning_rate 3e-04",
        "--min_learning_rate 3e-05",
        "--weight_decay 0.1",
        "--max_grad_norm 1.0",
        "--use_flash_attention true",
        f'--input_dir "{data}"',
        "--split 949,50,1",
        f"--max_seq_length {job.seq_length}",
        '--output_dir "${SAVE:-output}"',
        '${LOAD:+--resume_from_checkpoint "$LOAD"}',
    ]
    command = [
        f"{launcher} --gpus {devices}",
        *nodes,
        f'"${{PADDLENLP_TRAINER:-$PADDLENLP_PATH/{_TRAINER}}}"',
        *_model(job.spec),
        *_parallel(job, plan),
        *training,
    ]
    home = f': "{path}"\nexport PYTHONPATH="$PADDLENLP_PATH${{PYTHONPATH:+:$PYTHONPATH}}"\n'
    return home + shell_lines(command)


def _notes(job: ExportJob, plan: Plan) -> list[str]:
    trainer = "another trainer script than in train_qwen_fine_grained.sh"
    notes = [
        f"set PADDLENLP_PATH to a checkout of PaddleNLP and DATA_DIR; PADDLENLP_TRAINER: {trainer}",
        "SAVE is the folder of checkpoints, LOAD one to resume from",
        "learning rate and number of steps are placeholders",
    ]
    if not _is_known(job.spec):
        notes.append("some sizes of the model are unknown: set MODEL_ARGS")
    else:
        notes += [
            f"the trainer's Llama lacks {name}: the model is {job.spec.name} without"
            for name in _left_out(job.spec)
        ]
    if plan.pipeline_type == "gpipe":
        notes.append(
            "GPipe is --pipeline_schedule_mode FThenB of the launch command; the "
            "strategy file has no key for it"
        )
    return notes
