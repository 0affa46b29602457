"""Loads the folders named on the command line as `trl.scripts.sft` does before it loads a model.

Run by `test_fine_tuning_packages.py` with a Python that has TRL. Prints, for each folder, the
settings that the script would train with.
"""

import json
import os
import sys
from pathlib import Path

from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser
from trl.trainer.utils import get_peft_config

results = []
for folder in sys.argv[1:]:
    os.chdir(folder)
    # a machine without a GPU refuses bf16, and DeepSpeed is another package
    text = Path("sft.yaml").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("deepspeed:")]
    Path("cpu.yaml").write_text("\n".join([*lines, "use_cpu: true"]), encoding="utf-8")
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
    script, training, model, _ = parser.parse_args_and_config(
        ["--config", "cpu.yaml", "--dataset_name", "data", "--model_name_or_path", "model"]
        if "model_name_or_path" not in text
        else ["--config", "cpu.yaml", "--dataset_name", "data"]
    )
    peft = get_peft_config(model)
    results.append(
        {
            "data": script.dataset_name,
            "model": model.model_name_or_path,
            "dtype": model.dtype,
            "attention": model.attn_implementation,
            "length": training.max_length,
            "packing": training.packing,
            "micro_batch": training.per_device_train_batch_size,
            "accumulation": training.gradient_accumulation_steps,
            "checkpointing": training.gradient_checkpointing,
            "bf16": training.bf16,
            "synced": bool(
                (training.accelerator_config.gradient_accumulation_kwargs or {}).get(
                    "sync_each_batch"
                )
            ),
            "optim": str(getattr(training.optim, "value", training.optim)),
            "four_bits": model.load_in_4bit and model.bnb_4bit_quant_type,
            "rank": None if peft is None else peft.r,
            "targets": None if peft is None else sorted(peft.target_modules),
        }
    )
print("RESULT " + json.dumps(results))
