"""Trains a small model with DeepSpeed on fake ranks, and prints the bytes of its tensors.

The argument is a configuration. Run by `test_deepspeed_states.py` with a Python that has deepspeed;
rank 0 of eight, whose exchanges do nothing, on the CPU, where every tensor that Python holds is
counted after a step and after a backward.
"""

import gc
import json
import os
import sys
import warnings

warnings.filterwarnings("ignore")
os.environ.update(
    DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="8", MASTER_ADDR="localhost",
    MASTER_PORT="29500", CUDA_VISIBLE_DEVICES="",
)  # fmt: skip

import deepspeed  # noqa: E402
import deepspeed.comm  # noqa: E402
import torch  # noqa: E402
import torch.distributed  # noqa: E402
from torch import nn  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

WIDTH, LAYERS = 512, 8
"""Sixteen matrices, so that each of eight ranks has two whole ones."""

torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
# nothing communicates here: its shared-memory operation would be compiled for half a minute
deepspeed.ops.__compatible_ops__.clear()
deepspeed.comm.cdb = None
deepspeed.init_distributed(dist_backend="fake", verbose=False)


def live_bytes() -> int:
    """Return the bytes of all tensors that are there, each storage once."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        try:
            if isinstance(found, torch.Tensor) and found.device.type == "cpu":
                storage = found.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
        except Exception:
            continue  # objects on their way out
    return sum(storages.values())


model = nn.Sequential(
    *[
        nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        )
        for _ in range(LAYERS)
    ]
)
parameters = sum(weight.numel() for weight in model.parameters())
config = json.loads(sys.argv[1])
if config.get("bf16", {}).get("enabled"):
    model = model.bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=False)
engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
dtype = next(model.parameters()).dtype
found = {}
for _ in range(3):
    inputs = torch.randn(1, WIDTH, dtype=dtype)
    loss = engine(inputs).float().sum()
    engine.backward(loss)
    del loss, inputs
    found["backward"] = live_bytes()
    engine.step()
    found["step"] = live_bytes()
print("RESULT " + json.dumps({"parameters": parameters, **found}))
