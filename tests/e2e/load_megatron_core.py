"""Makes Megatron-Core's configurations of the arguments in the files on the command line.

Files are JSON objects of flags with their words. Run by
`test_written_packages.py` with a Python that has megatron-core; Megatron-LM's own parser is in no
wheel, and hands its arguments to these classes by their names
(`core_transformer_config_from_args` of `megatron/training/arguments.py`).
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch
from megatron.core import utils
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from packaging.version import Version

# Transformer Engine needs a GPU; which version of it has what is not asked here
utils.get_te_version = lambda: Version("99.0")
for name in ("permute", "permute_with_probs", "sort_chunks_by_index",
             "sort_chunks_by_index_with_probs", "unpermute"):  # fmt: skip
    setattr(moe_utils, f"fused_{name}", object())
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}
RENAMED = {
    "num_experts": "num_moe_experts",
    "fp8_format": "fp8",
    "fp4_format": "fp4",
    "fp4_param_gather": "fp4_param",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
    "ddp_bucket_size": "bucket_size",
    "ddp_pad_buckets_for_high_nccl_busbw": "pad_buckets_for_high_nccl_busbw",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
OFF = {
    "disable_bias_linear": "add_bias_linear",
    "no_rope_fusion": "apply_rope_fusion",
    "no_gradient_accumulation_fusion": "gradient_accumulation_fusion",
    "no_bias_swiglu_fusion": "bias_activation_fusion",
}


def typed(words, field):
    """Return the words of a flag as its field has them."""
    if not words:
        return True
    if field.name == "attention_backend":
        return AttnBackend[words[0]]
    if field.name == "window_size":
        return tuple(int(part) for part in words[0].split(","))
    if field.name in ("moe_layer_freq", "window_attn_skip_freq"):
        return eval(words[0], {"__builtins__": {}})
    if words[0] in DTYPES and "dtype" in field.name:
        return DTYPES[words[0]]
    if field.name in ("recompute_modules", "offload_modules"):
        return list(words)
    for kind in (int, float):
        try:
            return kind(words[0])
        except ValueError:
            continue
    return words[0]


def made(kind, flags, **more):
    """Return a configuration and the flags that it took."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values, taken = dict(more), []
    for flag, words in flags.items():
        name = flag.replace("-", "_")
        if name in OFF and OFF[name] in fields:
            values[OFF[name]] = False
        elif RENAMED.get(name, name) in fields:
            field = fields[RENAMED.get(name, name)]
            values[field.name] = typed(words, field)
        else:
            continue
        taken.append(flag)
    try:
        return kind(**values), taken
    except RuntimeError as error:
        # its last question, whose answer is Transformer Engine's
        if "requires FusedAdam" not in str(error):
            raise
        return None, taken


def read(flags):
    """Return what Megatron-Core makes of flags; raises what it refuses."""
    # what is on unless a flag switches it off
    more = dict.fromkeys(OFF.values(), True)
    # a kernel of Transformer Engine
    more["apply_rope_fusion"] = False
    if "swiglu" in flags:
        more |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    else:
        # GeLU is fused with its bias, where there is one
        more["bias_activation_fusion"] = "disable-bias-linear" not in flags
    if "squared-relu" in flags:
        more |= {"activation_func": squared_relu, "bias_activation_fusion": False}
    words = {"bf16": torch.bfloat16, "fp16": torch.float16}
    kind = next((words[flag] for flag in words if flag in flags), torch.float32)
    more |= {"params_dtype": kind, "pipeline_dtype": kind}
    layout = flags.get("pipeline-model-parallel-layout")
    chunks = flags.get("num-virtual-stages-per-pipeline-rank")
    parsed = None
    if layout:
        stages = int(flags["pipeline-model-parallel-size"][0])
        parsed = PipelineParallelLayerLayout(layout[0], pipeline_model_parallel_size=stages)
        more["virtual_pipeline_model_parallel_size"] = parsed.virtual_pipeline_model_parallel_size
    elif chunks:
        more["virtual_pipeline_model_parallel_size"] = int(chunks[0])
    latent = "multi-latent-attention" in flags
    config, taken = made(MLATransformerConfig if latent else TransformerConfig, flags, **more)
    ddp, of_ddp = made(DistributedDataParallelConfig, flags)
    _, of_optimizer = made(OptimizerConfig, flags)
    return {
        "taken": sorted({*taken, *of_ddp, *of_optimizer}),
        "layers": config.num_layers,
        "experts": config.num_moe_experts,
        "degrees": [
            config.tensor_model_parallel_size,
            config.pipeline_model_parallel_size,
            config.context_parallel_size,
        ],
        "sharded": ddp.use_distributed_optimizer,
        "layout": parsed and [[[k.name for k in part] for part in s] for s in parsed.layout],
    }


results = []
for path in sys.argv[1:]:
    flags = json.loads(Path(path).read_text())
    try:
        results.append(read(flags))
    except (AssertionError, ValueError) as error:
        results.append({"refused": str(error)})
print("RESULT " + json.dumps(results))
