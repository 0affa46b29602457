"""Loads the folders named on the command line as `llamafactory-cli train` reads its arguments.

Run by `test_fine_tuning_packages.py` with a Python that has LLaMA-Factory. Prints, for each folder,
the settings that it would train with.
"""

import json
import os
import sys
from pathlib import Path

os.environ["DISABLE_VERSION_CHECK"] = "1"

from llamafactory.hparams.parser import _TRAIN_ARGS
from omegaconf import OmegaConf
from transformers import HfArgumentParser

results = []
for folder in sys.argv[1:]:
    os.chdir(folder)
    own = OmegaConf.load(Path("train.yaml").absolute())
    over = OmegaConf.from_cli(["dataset=data", "use_cpu=true"])
    words = OmegaConf.to_container(OmegaConf.merge(own, over))
    words.setdefault("model_name_or_path", "model")
    # DeepSpeed is another package, and a machine without a GPU refuses bf16
    words.pop("deepspeed", None)
    parsed = HfArgumentParser(_TRAIN_ARGS).parse_dict(words)
    model, data, training, tuning, _ = parsed
    results.append(
        {
            "data": data.dataset,
            "model": model.model_name_or_path,
            "attention": str(getattr(model.flash_attn, "value", model.flash_attn)),
            "length": data.cutoff_len,
            "packing": data.packing,
            "micro_batch": training.per_device_train_batch_size,
            "accumulation": training.gradient_accumulation_steps,
            "checkpointing": not model.disable_gradient_checkpointing,
            "bf16": training.bf16,
            "synced": bool(
                (training.accelerator_config.gradient_accumulation_kwargs or {}).get(
                    "sync_each_batch"
                )
            ),
            "optim": str(getattr(training.optim, "value", training.optim)),
            "bits": model.quantization_bit,
            "double": model.double_quantization,
            "kind": tuning.finetuning_type,
            "rank": tuning.lora_rank,
            "targets": tuning.lora_target,
        }
    )
print("RESULT " + json.dumps(results))
