"""Prints the linear modules of models of torchtitan 0.3, and those that cannot have adapters.

Arguments are NAME:FLAVOR. Run by `test_written_packages.py` with a Python that has torchtitan;
models are built on torch's meta device, so nothing is allocated.
"""

import importlib
import json
import sys

import torch
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.common.linear import Linear
from torchtitan.trainer import Trainer


def builds(family, size, name):
    """Return True if a model with adapters on the modules of a name can be built."""
    converters = [LoRAConverter.Config(rank=1, target_modules=[name])]
    spec = family.model_registry(size, converters=converters)
    spec.model.update_from_config(config=Trainer.Config(model_spec=spec))
    try:
        with torch.device("meta"):
            spec.model.build()
    except AssertionError:
        return False
    return True


results = []
for argument in sys.argv[1:]:
    name, size = argument.split(":")
    family = importlib.import_module(f"torchtitan.models.{name}")
    model = family.model_registry(size).model
    linears = {fqn.rsplit(".", 1)[-1] for fqn, *_ in model.traverse(Linear.Config)}
    failed = [one for one in linears if not builds(family, size, one)]
    results.append({"linears": sorted(linears), "failed": sorted(failed)})
print("RESULT " + json.dumps(results))
