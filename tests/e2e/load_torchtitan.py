"""Parses the recipe in the working folder with torchtitan itself and prints what it understood.

Run by `test_export_packages.py` with a Python that has torchtitan; the model is built on torch's
meta device, so nothing is allocated.
"""

import json
import sys

import torch
from torchtitan.config.manager import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import _get_pipeline_metadata

sys.path.insert(0, ".")
config = ConfigManager().parse_args(["--module", "autopar_recipe", "--config", "autopar_plan"])
dims = ParallelDims.from_config(config.parallelism, int(sys.argv[1]))
config.model_spec.model.update_from_config(config=config)
with torch.device("meta"):
    model = config.model_spec.model.build()
parameters = sum(p.numel() for p in model.parameters())
if config.activation_checkpoint is not None:
    config.activation_checkpoint.build(dump_folder="").apply(model)
rope = config.model_spec.model.layers[0].attention.rope
result = {
    "rope": [rope.theta, rope.scaling_factor if rope.scaling == "llama" else None],
    "degrees": {k: getattr(dims, k) for k in ("dp_replicate", "dp_shard", "cp", "tp", "pp")},
    "parameters": parameters,
    "checkpointed": [
        int(name)
        for name, layer in model.layers.named_children()
        if type(layer).__name__ == "CheckpointWrapper"
    ],
    "modules": sorted(name for name, _ in model.named_children()),
    "stages": config.parallelism.module_fqns_per_model_part,
    "reshard": config.parallelism.fsdp_reshard_after_forward,
    "schedule": config.parallelism.pipeline_parallel_schedule,
    "virtual_stages": _get_pipeline_metadata(dims, config.parallelism, config.model_spec.model)[0],
    "local_batch": config.training.local_batch_size,
    "micro_batch": config.parallelism.pipeline_parallel_microbatch_size,
    "global_batch": config.training.global_batch_size,
    "seq_len": config.training.seq_len,
    "initial_load_in_hf": config.checkpoint.initial_load_in_hf,
}
print("RESULT " + json.dumps(result))
