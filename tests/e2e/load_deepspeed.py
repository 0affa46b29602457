"""Loads the configurations named on the command line with DeepSpeed, and prints what it read.

Arguments are FILE:WORLD_SIZE. Run by `test_export_packages.py` with a Python that has deepspeed.
The world is torch's fake process group, because DeepSpeed takes the number of ranks from there.
"""

import json
import sys
from pathlib import Path

import deepspeed
import deepspeed.comm
import torch.distributed
from deepspeed.runtime.config import DeepSpeedConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

# Nothing communicates here: its shared-memory operation would be compiled for half a minute.
deepspeed.ops.__compatible_ops__.clear()
results = []
for argument in sys.argv[1:]:
    path, world = argument.rsplit(":", 1)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=int(world))
    deepspeed.comm.cdb = None
    deepspeed.init_distributed(dist_backend="fake", verbose=False)
    try:
        config = DeepSpeedConfig(json.loads(Path(path).read_text()))
    except AssertionError as error:
        results.append({"refused": str(error)})
    else:
        results.append(
            {
                "world": config.world_size,
                "batch": config.train_batch_size,
                "micro_batch": config.train_micro_batch_size_per_gpu,
                "accumulation": config.gradient_accumulation_steps,
                "stage": int(config.zero_config.stage),
                "overlap": config.zero_config.overlap_comm,
                "tensor": config.tensor_parallel_config.autotp_size,
                "bf16": config.bfloat16_config.enabled,
            }
        )
    torch.distributed.destroy_process_group()
print("RESULT " + json.dumps(results))
