"""Loads the folders named on the command line as `swift sft swift.yaml` reads its arguments.

Run by `test_fine_tuning_packages.py` with a Python that has ms-swift. Prints, for each folder, the
settings that it would train with.
"""

import json
import os
import sys

from swift.arguments import SftArguments
from swift.cli.main import parse_yaml_args
from swift.utils import parse_args

# it loads the model
SftArguments.__post_init__ = lambda self: None

results = []
for folder in sys.argv[1:]:
    os.chdir(folder)
    words = ["swift.yaml", "--dataset", "data", *(["--model", "model"])]
    parse_yaml_args(words)
    parsed, rest = parse_args(SftArguments, words)
    assert not rest, rest
    sharding = None
    if parsed.fsdp:
        parsed._init_fsdp()
        sharding = {"fsdp": parsed.fsdp, **parsed.fsdp_config}
    quantised = parsed.quant_method is not None
    results.append(
        {
            "data": parsed.dataset,
            "attention": parsed.attn_impl,
            "length": parsed.max_length,
            "packing": parsed.packing,
            "micro_batch": parsed.per_device_train_batch_size,
            "accumulation": parsed.gradient_accumulation_steps,
            "checkpointing": parsed.gradient_checkpointing,
            "bf16": parsed.bf16,
            "fp16": parsed.fp16,
            "dtype": parsed.torch_dtype,
            "optim": str(getattr(parsed.optim, "value", parsed.optim)),
            "kind": parsed.tuner_type,
            "rank": parsed.lora_rank,
            "targets": parsed.target_modules,
            "bits": parsed.quant_bits if quantised else None,
            "four_bits": bool(quantised and parsed.get_quantization_config().load_in_4bit),
            "fsdp": sharding,
        }
    )
print("RESULT " + json.dumps(results))
