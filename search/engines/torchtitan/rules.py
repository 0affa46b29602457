"""Rules of torchtitan and PyTorch, for searched candidates and for job files.

Sources: `parallel_dims.py`, `pipeline_parallel.py`, `components/quantization` and
`models/*/parallelize.py`, from 2024 to release 0.2; `components/lora.py`, `components/loss.py` and
`distributed/fsdp.py` of 0.3.0. A search checks degrees; a job file is also checked for its keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.run.rules import FFN, NO_PATCHES, SEQUENCE, WHOLE_KEYS, Level, Rule

LOSS_CHUNKS = 8
"""Default number of chunks of `ChunkedLossWrapper` of 0.3."""


def _rule(
    name: str, over: str, rest: Callable[..., Any], message: str, level: Level = "illegal"
) -> Rule:
    return Rule(f"torchtitan.{name}", tuple(over.split(", ")), rest, message, level=level)


_EXPERT_RANKS = "ep, etp, cp, tp, dp_shard, experts"
"""Inputs of the rules on expert-parallel groups.

A group contains all context-parallel ranks, and all tensor-parallel ranks unless etp is tp.
"""
EXPERTS = (
    _rule("etp", "etp, tp, ep, experts", lambda etp, tp, ep, experts:
          (experts > 0) * (ep > 1) * (etp != 1) * (etp != tp),
          "expert_tensor_parallel_degree({etp}) is neither 1 nor tp({tp})"),
    _rule("ep.tensor", _EXPERT_RANKS, lambda ep, etp, cp, tp, shard, experts:
          (experts > 0) * (ep > 1) * (etp == tp) * (ep % cp),
          "ep({ep}) % cp({cp}) = {rest} != 0"),
    _rule("ep.ranks-tensor", _EXPERT_RANKS, lambda ep, etp, cp, tp, shard, experts:
          (experts > 0) * (ep > 1) * (etp == tp) * (shard * cp % ep),
          "dp_shard({dp_shard}) * cp({cp}) % ep({ep}) = {rest} != 0"),
    _rule("ep.whole", _EXPERT_RANKS, lambda ep, etp, cp, tp, shard, experts:
          (experts > 0) * (ep > 1) * (etp != tp) * (ep % (cp * tp)),
          "ep({ep}) % (cp({cp}) * tp({tp})) = {rest} != 0"),
    _rule("ep.ranks", _EXPERT_RANKS, lambda ep, etp, cp, tp, shard, experts:
          (experts > 0) * (ep > 1) * (etp != tp) * (shard * cp * tp % ep),
          "dp_shard({dp_shard}) * cp({cp}) * tp({tp}) % ep({ep}) = {rest} != 0"),
)  # fmt: skip
MODEL = (
    # torchtitan does not replicate key-value heads.
    WHOLE_KEYS,
    *SEQUENCE,
    *EXPERTS,
    _rule("tied", "pp, tied", lambda pp, tied: (pp > 1) * tied,
          "tied embeddings have no pipeline"),
)  # fmt: skip
"""Rules on the sizes of a model and the parallel degrees."""
_REPLICAS = "DDP excludes tensor, context and pipeline parallelism"
SPACE = (
    NO_PATCHES,
    *MODEL,
    FFN,
    _rule("ddp", "zero, tp, cp, pp", lambda zero, tp, cp, pp: (zero == 0) * (tp * cp * pp > 1),
          _REPLICAS),
    # Source: `maybe_enable_amp` of distributed/utils.py.
    _rule("fp32", "zero, dp_shard, cp, tp, pp, recipe", lambda zero, shard, cp, tp, pp, recipe:
          (zero > 0) * (shard * cp == 1) * (tp * pp > 1) * (not recipe),
          "tensor and pipeline ranks without dp_shard or cp compute in fp32"),
    _rule("split-experts", "experts, ep, etp, tp", lambda experts, ep, etp, tp:
          (experts > 0) * (ep == 1) * (etp != tp),
          "etp({etp}) must be tp({tp}): without expert ranks tensor ranks split "
          "the experts"),
    # `recipe` is true for runs that need the recipes of release 0.3.
    _rule("recipe.ddp", "recipe, zero", lambda recipe, zero: recipe * (zero == 0),
          "torchtitan 0.3 shards with FSDP2 only, got zero({zero})"),
    # FSDP2 copies the weights of one rank as if it gathered them, and keeps the copies.
    _rule("recipe.copies", "recipe, zero, dp_shard, cp", lambda recipe, zero, shard, cp:
          recipe * (zero == 2) * (shard * cp == 1),
          "one shard needs zero 3: with zero({zero}) FSDP2 keeps copies of all weights"),
    _rule("recipe.etp", "recipe, ep, etp", lambda recipe, ep, etp: recipe * (ep > 1) * (etp > 1),
          "torchtitan 0.3 has no expert tensor degree, got etp({etp})"),
    _rule("recipe.chunks", "recipe, seq_length, cp", lambda recipe, seq, cp:
          recipe * (seq % (LOSS_CHUNKS * cp)),
          "the loss has 8 chunks: seq_length({seq_length}) % (8 * cp({cp})) != 0"),
    _rule("adapters.base", "lora_rank, lora_base", lambda rank, base: (rank > 0) * (base != "bf16"),
          "torchtitan 0.3 has no base weights in {lora_base}"),
    _rule("adapters.fp8", "lora_rank, fp8", lambda rank, fp8: (rank > 0) * fp8,
          "8-bit GEMMs below adapters have no price", level="unpriced"),
    # `_map_to_hf_layer_key` of models/deepseek_v3/state_dict_adapter.py.
    _rule("adapters.latent", "lora_rank, latent", lambda rank, latent: (rank > 0) * latent,
          "torchtitan 0.3 cannot load base weights of DeepSeek-V3 into a model with adapters"),
)  # fmt: skip
"""Rules of searched candidates."""
FLAVOURED = (
    # The text of the problem comes from `flavour_of`.
    _rule("flavour", "flavour_problem", lambda problem: problem != "", "{flavour_problem}"),
)  # fmt: skip
"""Rule on the models that files of releases 0.2 and 0.3 can name."""

GRID = (
    _rule("grid", "dp_replicate, dp_shard, cp, tp, pp, ranks, world",
          lambda replicate, shard, cp, tp, pp, ranks, world: ranks != world,
          "dp_replicate({dp_replicate}) * dp_shard({dp_shard}) * cp({cp}) * tp({tp}) * pp({pp}) "
          "= {ranks} != world size({world})"),
)  # fmt: skip
LOCAL_BATCH = (
    _rule("local-batch", "local_batch, micro_batch", lambda local, micro: local % micro,
          "local_batch_size({local_batch}) % pipeline_parallel_microbatch_size({micro_batch}) = "
          "{rest} != 0"),
    _rule("local-parts", "local_batch, parts",
          lambda local, parts: local % parts + (local < parts),
          "batch_size({local_batch}) % pipeline_parallel_microbatches({parts}) != 0"),
)  # fmt: skip
"""Rules of the local batch: a schedule runs the micro-batches of one local batch."""
WHOLE_STAGES = (
    _rule("stages", "stages, pp", lambda stages, pp: stages % pp,
          "stages({stages}) % pp({pp}) = {rest} != 0"),
)  # fmt: skip
FILE = (
    *GRID,
    _rule("ddp", "replicas_alone, tp, pp", lambda alone, tp, pp: alone * (tp * pp > 1), _REPLICAS),
    _rule("async-tensor", "asynchronous, tp, compiled", lambda asynchronous, tp, compiled:
          asynchronous * (tp > 1) > compiled, "enable_async_tensor_parallel needs compile"),
    _rule("float8.gather", "float8, float8_gather, float8_recipe",
          lambda section, gathers, recipe: gathers * recipe,
          "[{float8}] enable_fsdp_float8_all_gather and recipe_name exclude each other"),
    _rule("float8.device", "float8, no_fp8", lambda section, lacks: (section != "") * lacks,
          "[{float8}] needs a GPU with fp8 GEMMs"),
    *MODEL,
    # The text of the problem comes from `autopar.pipeline.schedules`.
    _rule("schedule", "schedule_problem", lambda problem: problem != "", "{schedule_problem}"),
)  # fmt: skip
"""Rules of a job file."""
