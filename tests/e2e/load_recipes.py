"""Loads the recipes named on the command line with torchtitan 0.3 and prints what it understood.

Arguments are FOLDER:WORLD_SIZE. Run by `test_written_packages.py` with a Python that has
torchtitan; models are built on torch's meta device, so nothing is allocated.
"""

import importlib
import json
import sys

import torch
from torchtitan.config.manager import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import _get_pipeline_metadata

results = []
for argument in sys.argv[1:]:
    folder, world = argument.rsplit(":", 1)
    sys.path.insert(0, folder)
    sys.modules.pop("autopar_recipe", None)
    importlib.invalidate_caches()
    config = ConfigManager().parse_args(["--module", "autopar_recipe", "--config", "autopar_plan"])
    sys.path.pop(0)
    degrees, compiled = config.parallelism, config.compile
    dims = ParallelDims.from_config(degrees, int(world))
    sizes = config.model_spec.model
    sizes.update_from_config(config=config)
    with torch.device("meta"):
        model = sizes.build()
    parameters = dict(model.named_parameters())
    adapted = {name.split(".")[-3] for name in parameters if ".lora_a." in name}
    policy = config.activation_checkpoint
    stages = degrees.module_fqns_per_model_part
    results.append(
        {
            "degrees": [dims.dp_replicate, dims.dp_shard, dims.cp, dims.tp, dims.pp, dims.ep],
            "reshard": degrees.fsdp_reshard_after_forward,
            "parameters": sum(p.numel() for n, p in parameters.items() if ".lora_" not in n),
            "trained": sum(p.numel() for p in parameters.values() if p.requires_grad),
            "adapted": sorted(adapted),
            "dtype": config.training.dtype,
            "precision": config.training.mixed_precision_param,
            "batch": [
                config.training.local_batch_size,
                config.training.global_batch_size,
                degrees.pipeline_parallel_microbatch_size,
            ],
            "seq_len": config.training.seq_len,
            "policy": None if policy is None else type(policy).__qualname__,
            "compiled": compiled.components if compiled.enable else [],
            "chunks": getattr(config.loss, "num_chunks", 1),
            "schedule": degrees.pipeline_parallel_schedule,
            "stages": stages,
            "parts": _get_pipeline_metadata(dims, degrees, sizes)[0],
        }
    )
print("RESULT " + json.dumps(results))
