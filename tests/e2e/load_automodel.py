"""Loads the folders named on the command line as `automodel automodel.yaml` reads a recipe.

Run by `test_fine_tuning_packages.py` with a Python that has nemo_automodel. Prints, for each
folder, the settings that it would train with.
"""

import inspect
import json
import os
import sys

from nemo_automodel import NeMoAutoModelForCausalLM
from nemo_automodel.cli.utils import resolve_recipe_name
from nemo_automodel.components.config._arg_parser import parse_args_and_load_config
from nemo_automodel.recipes._dist_utils import parse_distributed_section
from nemo_automodel.recipes._typed_config import RecipeConfig

known = inspect.signature(NeMoAutoModelForCausalLM.from_pretrained).parameters
results = []
for folder in sys.argv[1:]:
    os.chdir(folder)
    raw = parse_args_and_load_config("automodel.yaml", ["--dataset.path_or_dataset_id=data"])
    recipe = RecipeConfig(raw)
    sharding = parse_distributed_section(raw.distributed.to_dict())
    strategy, sizes = sharding["strategy_config"], sharding["parallelism_sizes"]
    model = {key: value for key, value in raw.model.to_dict().items() if key != "_target_"}
    loader, adapters = recipe.dataloader, raw.get("peft", None)
    adapters = None if adapters is None else adapters.instantiate()
    policy = getattr(strategy, "mp_policy", None)
    results.append(
        {
            "recipe": resolve_recipe_name(raw.recipe).rpartition(".")[2],
            "model": model,
            "unknown": sorted(model.keys() - known.keys()),
            "data": loader.dataset_config.path_or_dataset_id,
            "length": loader.dataset_config.seq_length,
            "padding": loader.dataset_config.padding,
            "packing": None if loader.packing is None else loader.packing.packed_sequence_size,
            "batch": recipe.step_scheduler.global_batch_size,
            "micro_batch": loader.batch_size,
            "strategy": type(strategy).__name__,
            "replicas": sizes.dp_replicate_size,
            "reshards": getattr(strategy, "reshard_after_forward", None),
            "defers": getattr(strategy, "defer_fsdp_grad_sync", None),
            "host": getattr(strategy, "offload_policy", None) is not None,
            "reduced": None if policy is None else str(policy.reduce_dtype),
            "autocast": str(getattr(strategy, "autocast_dtype", None)),
            "checkpointing": sharding["activation_checkpointing"],
            "loss": type(recipe.loss_fn.build()).__name__,
            "optimizer": recipe.optimizer.factory.__name__,
            "fused": bool(recipe.optimizer.kwargs.get("fused")),
            "rank": None if adapters is None else adapters.dim,
            "targets": None if adapters is None else list(adapters.target_modules),
        }
    )
print("RESULT " + json.dumps(results, default=str))
