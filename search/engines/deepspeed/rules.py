"""Rules of DeepSpeed 0.19.8 and of the DeepSpeed integration in Hugging Face's Trainer.

Sources: `runtime/config.py`, `runtime/zero/config.py` and `runtime/engine.py`.
"""

from __future__ import annotations

from autopar.run.rules import Rule
from search.engines.space import PLAIN_RULES, TRL_TENSOR

SPACE = (
    *PLAIN_RULES,
    # Source: `_configure_tensor_parallel_states` of runtime/engine.py.
    Rule("deepspeed.zero3-tensor", ("zero", "tp"), lambda zero, tp: (zero == 3) * (tp > 1),
         "ZeRO-3 cannot be combined with tensor parallelism, got tp({tp})"),
    # AutoTP of module_inject/auto_tp.py splits outputs of `lora_A`, but not inputs of `lora_B`.
    Rule("deepspeed.adapters-tensor", ("lora_rank", "tp"), lambda rank, tp: (rank > 0) * (tp > 1),
         "AutoTP of DeepSpeed cannot split adapters"),
    # huggingface/transformers#29587 supports ZeRO-3 with 4 bits alone.
    Rule("deepspeed.base-int8", ("lora_base", "zero"), lambda base, zero:
         (base == "int8") * (zero == 3), "ZeRO-3 cannot shard weights in int8"),
    TRL_TENSOR,
)  # fmt: skip
"""Rules of searched candidates."""
FILE = (
    Rule("deepspeed.bf16-fp16", ("bf16", "fp16"), lambda bf16, fp16: bf16 * fp16,
         "bf16.enabled and fp16.enabled exclude each other"),
    Rule("deepspeed.batch", ("micro_batch", "steps", "ranks", "product", "train_batch"),
         lambda micro, steps, ranks, product, total: product != total,
         "train_micro_batch_size_per_gpu({micro_batch}) * gradient_accumulation_steps({steps}) * "
         "ranks({ranks}) = {product} != train_batch_size({train_batch})"),
    Rule("deepspeed.key", ("unknown_key",), lambda key: key != "",
         "zero_optimization.{unknown_key}: unknown key, which DeepSpeed refuses"),
    Rule("deepspeed.legacy-stage1", ("legacy_stage1",), lambda legacy: legacy,
         "zero_optimization.legacy_stage1 is refused since DeepSpeed 0.5.9"),
    Rule("deepspeed.tensor-stage", ("tp", "zero"), lambda tp, zero: (tp > 1) * (zero == 3),
         "tensor_parallel.autotp_size({tp}) needs zero_optimization.stage 2 at most"),
    Rule("deepspeed.bucket", ("allgather_bucket", "zero"), lambda bucket, zero:
         (zero > 0) * (zero < 3) * (bucket % 2),
         "zero_optimization.allgather_bucket_size({allgather_bucket}) % 2 = {rest} != 0"),
    Rule("deepspeed.trainer-number", ("key", "number", "flag", "flag_number"),
         lambda key, number, flag, other: number != other,
         "{key}({number}) != --{flag}({flag_number}): the Trainer of Hugging "
         "Face needs equal values or auto"),
    Rule("deepspeed.trainer-precision", ("enabled", "other_precision"),
         lambda enabled, other: enabled != other,
         "{enabled}.enabled is true, but the script sets --{other_precision}"),
)  # fmt: skip
"""Rules of a configuration together with its script."""
