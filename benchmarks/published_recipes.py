"""Results of `autopar check` for published launches: time, memory, and better ones.

`python -m benchmarks.published_recipes` prices five recipes of Megatron-Bridge and of
Megatron-MoE-ModelZoo as in their tables, and searches for faster launches next to each. Settings
missing in a table (fused kernels, overlaps) are the defaults of these engines.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from autopar.price.assessment import Assessment, Target, assess
from autopar.rates.accuracy import load_accuracy
from autopar.rates.card import load_card
from autopar.rates.parts.operations import machine_of
from autopar.rates.stack import load_stack
from autopar.units import format_bytes, format_seconds
from search.check.alternatives import neighbours_of
from search.engines.megatron.read import read_run

__all__ = ["RECIPES", "Recipe", "main", "target"]


class Recipe(NamedTuple):
    """A launch with its measured step time."""

    name: str
    source: str
    num_gpus: int
    measured_s: float
    arguments: Mapping[str, Any]


def _common(sizes: tuple[int, int, int, int, int], seq: int, **more: Any) -> dict[str, Any]:
    """Return a decoder's arguments: layers, hidden and MLP width, heads, key heads; others."""
    layers, hidden, ffn, heads, groups = sizes
    return {
        "--num-layers": layers,
        "--hidden-size": hidden,
        "--ffn-hidden-size": ffn,
        "--num-attention-heads": heads,
        "--group-query-attention": True,
        "--num-query-groups": groups,
        "--kv-channels": 128,
        "--seq-length": seq,
        "--max-position-embeddings": seq,
        "--position-embedding-type": "rope",
        "--normalization": "RMSNorm",
        "--swiglu": True,
        "--disable-bias-linear": True,
        "--untie-embeddings-and-output-weights": True,
        "--attention-dropout": 0.0,
        "--hidden-dropout": 0.0,
        "--micro-batch-size": 1,
        "--sequence-parallel": True,
        "--bf16": True,
        "--use-distributed-optimizer": True,
        "--overlap-grad-reduce": True,
        "--overlap-param-gather": True,
        "--no-create-attention-mask-in-dataloader": True,
        "--account-for-embedding-in-pipeline-split": True,
        "--account-for-loss-in-pipeline-split": True,
        "--cross-entropy-loss-fusion": True,
        "--cross-entropy-fusion-impl": "te",
        **{"--" + name.replace("_", "-"): value for name, value in more.items()},
    }


def _llama(sizes: tuple[int, int, int, int, int], **more: Any) -> dict[str, Any]:
    return _common(sizes, 8192, vocab_size=128256, tp_comm_overlap=True, **more)


def _qwen(**more: Any) -> dict[str, Any]:
    return _common(
        (94, 4096, 12288, 64, 4),
        4096,
        vocab_size=151936,
        qk_layernorm=True,
        num_experts=128,
        moe_router_topk=8,
        moe_ffn_hidden_size=1536,
        moe_grouped_gemm=True,
        moe_permute_fusion=True,
        expert_tensor_parallel_size=1,
        global_batch_size=2048,
        # routing in both tables is forced to balance
        moe_router_force_load_balancing=True,
        **more,
    )


def _without_ends(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments whose embedding and loss do not count as layers."""
    return {flag: value for flag, value in arguments.items() if "--account-for" not in flag}


_BRIDGE = "Megatron-Bridge performance summary"
_FP8 = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": True}
RECIPES = (
    Recipe(
        "Llama 3 70B, FP8",
        f"{_BRIDGE}, 25.11",
        64,
        10.2272,
        _without_ends(
            _llama(
                (80, 8192, 28672, 64, 8),
                global_batch_size=128,
                tensor_model_parallel_size=4,
                pipeline_model_parallel_size=8,
                num_layers_per_virtual_pipeline_stage=2,
                **_FP8,
            )
        ),
    ),
    Recipe(
        "Llama 3.1 405B, FP8",
        f"{_BRIDGE}, 25.09",
        1024,
        13.5629,
        _llama(
            (126, 16384, 53248, 128, 8),
            global_batch_size=512,
            tensor_model_parallel_size=8,
            pipeline_model_parallel_size=8,
            context_parallel_size=2,
            num_layers_per_virtual_pipeline_stage=2,
            **_FP8,
        ),
    ),
    Recipe(
        "Qwen3 235B-A22B, FP8",
        f"{_BRIDGE}, 25.11",
        256,
        20.8051,
        _qwen(
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=8,
            num_layers_per_virtual_pipeline_stage=3,
            expert_model_parallel_size=32,
            moe_token_dispatcher_type="alltoall",
            overlap_moe_expert_parallel_comm=True,
            **_FP8,
        ),
    ),
    Recipe(
        "Qwen3 235B-A22B, BF16, pp 32",
        "Megatron-MoE-ModelZoo, Qwen3 best practice",
        256,
        24.2,
        _qwen(
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=32,
            num_layers_per_virtual_pipeline_stage=1,
            expert_model_parallel_size=8,
            moe_token_dispatcher_type="alltoall",
            recompute_granularity="selective",
            recompute_modules=["layernorm", "moe_act"],
        ),
    ),
    Recipe(
        "Qwen3 235B-A22B, BF16, tp 4",
        "Megatron-MoE-ModelZoo, Qwen3 best practice",
        256,
        29.0,
        _qwen(
            tensor_model_parallel_size=4,
            pipeline_model_parallel_size=8,
            num_layers_per_virtual_pipeline_stage=3,
            expert_model_parallel_size=8,
            moe_token_dispatcher_type="alltoall",
        ),
    ),
)
"""Recipes on H100; sizes from the public model cards."""


def target() -> Target:
    """Return H100 with Megatron-Core, without probed figures."""
    return Target(
        machine=machine_of(load_card("h100-80gb"), load_stack("megatron-core")),
        accuracy=load_accuracy(),
        site_known=False,
        oom_risk=0.01,
    )


def _said(found: Assessment) -> str:
    assert found.step is not None, found.untimed
    assert found.interval_s is not None, "every step has one"
    low, high = map(format_seconds, found.interval_s)
    peak = format_bytes(found.fullest.peak_bytes)
    return (
        f"{format_seconds(found.step.total_s)} ({low} to {high}), peak {peak} on stage "
        f"{found.fullest.stage}, out of memory {found.odds_of_oom:.1%}"
    )


def _terms(before: Assessment, after: Assessment) -> str:
    """Return the three terms that change most, as shares of the first step."""
    assert before.step is not None
    assert after.step is not None
    gaps = {key: after.step.terms_s[key] - value for key, value in before.step.terms_s.items()}
    most = sorted(gaps, key=lambda key: -abs(gaps[key]))[:3]
    return ", ".join(f"{key} {gaps[key] / before.step.total_s:+.1%}" for key in most)


def _change(flag: str, before: str | None, after: str | None) -> str:
    """Return a changed argument as words."""
    if before and after:
        return f"--{flag} {before} -> {after}"
    return f"+ --{flag} {after}".rstrip() if before is None else f"- --{flag} {before}".rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every recipe with its measured step, its estimate, and the best launches next to it."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    place = target()
    for recipe in RECIPES:
        run = read_run(recipe.arguments, world_size=recipe.num_gpus).run
        found = assess(run, place)
        assert found.step is not None, found.untimed
        off = found.step.total_s / recipe.measured_s - 1.0
        print(f"{recipe.name}, {recipe.num_gpus} H100 ({recipe.source})")
        print(f"  measured {format_seconds(recipe.measured_s)}, estimated {off:+.1%}")
        print(f"  theirs: {_said(found)}")
        near = neighbours_of(found, place)
        for name, one in (("one change", near.one), ("best", near.any)):
            if one is None:
                print(f"  {name}: none better in {near.tried} launches")
                continue
            after = one.assessment
            assert after.step is not None
            words = [_change(*change) for change in one.changes]
            print(f"  {name}: {'; '.join(words)}")
            print(f"    {_said(after)}, {after.step.total_s / found.step.total_s - 1.0:+.1%}: "
                  f"{_terms(found, after)}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
