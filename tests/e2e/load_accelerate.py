"""Loads the configurations named on the command line as `accelerate launch` does.

Run by `test_export_packages.py` with a Python that has accelerate and transformers. Prints the
parallelism that the launched processes would read from their environment.
"""

import json
import os
import sys
from pathlib import Path

from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

results = []
for path in sys.argv[1:]:
    # a file that a configuration names is one of the folder that it is launched in
    os.chdir(Path(path).parent)
    config = load_config_from_file(path)
    parsed = launch_command_parser().parse_args(["--config_file", path, "train.py"])
    args, _, _ = _validate_launch_command(parsed)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ""
        environment = prepare_deepspeed_cmd_env(args)[1]
    else:
        environment = prepare_multi_gpu_env(args)
    result = {
        "kind": str(config.distributed_type.value),
        "processes": args.num_processes,
        "precision": environment["ACCELERATE_MIXED_PRECISION"],
        "fsdp": environment.get("FSDP_VERSION"),
        "reshard": environment.get("FSDP_RESHARD_AFTER_FORWARD"),
        "checkpoints": environment.get("FSDP_ACTIVATION_CHECKPOINTING"),
    }
    if args.use_parallelism_config:
        own = {k: v for k, v in environment.items() if k.startswith("PARALLELISM_CONFIG")}
        os.environ.update(own)
        parallelism = ParallelismConfig()
        result |= {k: getattr(parallelism, f"{k}_size") for k in ("dp_shard", "tp", "cp", "sp")}
        result["total"] = parallelism.total_size
        for key in own:
            del os.environ[key]
    results.append(result)
print("RESULT " + json.dumps(results))
