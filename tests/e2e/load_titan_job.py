"""Parses the job files named on the command line with torchtitan 0.2 and prints what it understood.

Arguments are FILE:WORLD_SIZE. Run by `test_written_packages.py` with a Python that has torchtitan;
nothing is built, so nothing is allocated.
"""

import importlib.util
import json
import sys

from torchtitan.config.manager import ConfigManager
from torchtitan.distributed import ParallelDims

# its models need Triton, which comes with torch for GPUs alone
SPECS = importlib.util.find_spec("triton") is not None
if SPECS:
    from torchtitan.protocols.train_spec import get_train_spec

results = []
for argument in sys.argv[1:]:
    path, world = argument.rsplit(":", 1)
    config = ConfigManager().parse_args(["--job.config_file", path])
    degrees = config.parallelism
    dims = ParallelDims(
        dp_replicate=degrees.data_parallel_replicate_degree,
        dp_shard=degrees.data_parallel_shard_degree,
        cp=degrees.context_parallel_degree,
        tp=degrees.tensor_parallel_degree,
        pp=degrees.pipeline_parallel_degree,
        ep=degrees.expert_parallel_degree,
        etp=degrees.expert_tensor_parallel_degree,
        world_size=int(world),
    )
    model = None
    if SPECS:
        found = get_train_spec(config.model.name).model_args[config.model.flavor]
        model = [found.n_layers, found.dim, found.vocab_size]
    results.append(
        {
            "degrees": {
                k: getattr(dims, k) for k in ("dp_replicate", "dp_shard", "cp", "tp", "pp")
            },
            "experts": [dims.ep, dims.etp],
            "model": model,
            "converters": config.model.converters,
            "gathered": config.quantize.linear.float8.enable_fsdp_float8_all_gather,
            "local_batch": config.training.local_batch_size,
            "global_batch": config.training.global_batch_size,
            "seq_len": config.training.seq_len,
            "steps": config.training.steps,
            "precision": config.training.mixed_precision_param,
            "reshard": degrees.fsdp_reshard_after_forward,
            "schedule": degrees.pipeline_parallel_schedule,
            "micro_batch": degrees.pipeline_parallel_microbatch_size,
            "stages": degrees.module_fqns_per_model_part,
            "dispatcher": degrees.expert_parallel_comm_backend,
            "checkpoint": config.activation_checkpoint.mode,
            "option": config.activation_checkpoint.selective_ac_option,
            "compiled": config.compile.components if config.compile.enable else [],
        }
    )
print("RESULT " + json.dumps(results))
