"""Megatron-LM's own rules for its arguments, so that a launch is not refused on the cluster.

Taken from `validate_args` in `megatron/training/arguments.py` and from the Megatron-FSDP guide
(NVIDIA/Megatron-LM, main of 2026), from `TransformerConfig` of megatron-core 0.16.1, and, that
Megatron-FSDP and pipeline stages exclude each other, from NVIDIA/Megatron-LM pull request 6081.
That experts beside tensor parallelism need sequence parallelism: `MoELayer.forward` of
`megatron/core/transformer/moe/moe_layer.py`, which ends the first step otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from search.exports.megatron_layout import LayoutError, stage_sizes

__all__ = ["Arguments", "number", "violated_rules"]

Arguments = Mapping[str, tuple[str, ...]]
"""Flag without its hyphens in front -> its words; none for a flag that is only there."""


def number(arguments: Arguments, flag: str, default: int) -> int:
    """Return the whole number of a flag, the default where it is absent; ValueError otherwise."""
    return int(arguments[flag][0]) if arguments.get(flag) else default


def violated_rules(arguments: Arguments, world_size: int) -> tuple[str, ...]:
    """Return one sentence per rule that arguments of so many GPUs break."""
    return (
        tuple(_degrees(arguments, world_size)) + tuple(_layers(arguments)) + tuple(_data(arguments))
    )


def _degrees(arguments: Arguments, world: int) -> Iterator[str]:
    tp = number(arguments, "tensor-model-parallel-size", 1)
    pp = number(arguments, "pipeline-model-parallel-size", 1)
    cp = number(arguments, "context-parallel-size", 1)
    if world % (tp * pp * cp):
        yield f"world size({world}) % (tp({tp}) * pp({pp}) * cp({cp})) != 0"
        return
    dp = world // (tp * pp * cp)
    micro = number(arguments, "micro-batch-size", 1)
    batch = number(arguments, "global-batch-size", micro * dp)
    if batch % (micro * dp):
        yield f"global batch({batch}) % (micro batch({micro}) * dp({dp})) = {batch % (micro * dp)}"
    heads = number(arguments, "num-attention-heads", 0)
    groups = number(arguments, "num-query-groups", heads)
    for what, count in (
        ("attention heads", heads),
        ("ffn-hidden-size", number(arguments, "ffn-hidden-size", 0)),
    ):
        if count % tp:
            yield f"{what}({count}) % tp({tp}) = {count % tp} != 0"
    if groups and groups % tp and tp % groups:
        yield f"query groups({groups}) is neither a multiple nor a divisor of tp({tp})"
    shift = _all_to_all(arguments, cp)
    for what, count in (("attention heads", heads), ("query groups", groups)):
        if shift > 1 and count % (tp * shift):
            yield f"{what}({count}) % (tp({tp}) * a2a({shift})) = {count % (tp * shift)} != 0"
    length = number(arguments, "seq-length", 0)
    if cp > 1 and length % (2 * cp):
        yield f"seq-length({length}) % (2 * cp({cp})) = {length % (2 * cp)} != 0"
    if "sequence-parallel" in arguments:
        if tp == 1:
            yield "--sequence-parallel needs --tensor-model-parallel-size above 1"
        elif length % (tp * cp):
            yield f"seq-length({length}) % (tp({tp}) * cp({cp})) = {length % (tp * cp)} != 0"
    if "num-experts" in arguments and tp > 1 and "sequence-parallel" not in arguments:
        yield f"experts with tp({tp}) need --sequence-parallel"
    if number(arguments, "max-position-embeddings", length) < length:
        yield f"max-position-embeddings is below seq-length({length})"


def _all_to_all(arguments: Arguments, cp: int) -> int:
    """Return over how many ranks heads are exchanged."""
    kinds = arguments.get("cp-comm-type", ())
    if "a2a" in kinds:
        return cp
    sizes = arguments.get("hierarchical-context-parallel-sizes", ())
    return int(sizes[0]) if "a2a+p2p" in kinds and sizes else 1


def _layers(arguments: Arguments) -> Iterator[str]:
    pp = number(arguments, "pipeline-model-parallel-size", 1)
    cp = number(arguments, "context-parallel-size", 1)
    layers = number(arguments, "num-layers", 0)
    layout = arguments.get("pipeline-model-parallel-layout")
    if layout:
        try:
            stage_sizes(layout[0], num_layers=layers, num_stages=pp)
        except LayoutError as error:
            yield f"--pipeline-model-parallel-layout {error}"
    elif layers % pp:
        yield f"layers({layers}) % pp({pp}) = {layers % pp} != 0 without a layout"
    kinds = arguments.get("cp-comm-type", ())
    if len(kinds) not in (0, 1, layers):
        yield f"--cp-comm-type has {len(kinds)} entries for {layers} layers"
    sizes = arguments.get("hierarchical-context-parallel-sizes", ())
    product = 1
    for size in sizes:
        product *= int(size)
    if sizes and product != cp:
        yield f"hierarchical sizes multiply to {product} where cp is {cp}"
    if "a2a+p2p" in kinds and not sizes:
        yield "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes"
    if arguments.get("recompute-granularity") == ("full",):
        for flag in ("recompute-method", "recompute-num-layers"):
            if flag not in arguments:
                yield f"--recompute-granularity full needs --{flag}"


def _data(arguments: Arguments) -> Iterator[str]:
    sharded = "use-megatron-fsdp" in arguments
    if "overlap-param-gather" in arguments:
        if not (sharded or "use-distributed-optimizer" in arguments):
            yield "--overlap-param-gather needs a distributed optimizer or Megatron-FSDP"
        if "overlap-grad-reduce" not in arguments:
            yield "--overlap-param-gather needs --overlap-grad-reduce"
    if sharded:
        if arguments.get("ckpt-format") != ("fsdp_dtensor",):
            yield "--use-megatron-fsdp needs --ckpt-format fsdp_dtensor"
        if "gradient-accumulation-fusion" not in arguments and (
            "no-gradient-accumulation-fusion" not in arguments
        ):
            yield "--use-megatron-fsdp needs --no-gradient-accumulation-fusion"
        if number(arguments, "pipeline-model-parallel-size", 1) > 1:
            yield "--use-megatron-fsdp is not combined with pipeline stages"
