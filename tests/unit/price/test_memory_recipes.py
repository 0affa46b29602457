"""Recipes of states by engine, against the figures that their own documents print."""

from typing import Any, Literal

import pytest

from autopar.errors import InputError
from autopar.price.state_layouts import KEEPERS, layout_of
from autopar.run.runtime import Buckets

GB = 1_000_000_000


@pytest.mark.parametrize("replicas", [1, 8, 64])
@pytest.mark.parametrize(
    ("precision", "zero", "whole", "shared"),
    [
        ("bf16", 0, 18, 0),
        ("bf16", 1, 6, 12),
        ("bf16", 3, 0, 18),
        ("fp32", 0, 16, 0),
        ("fp32", 1, 8, 8),
        ("fp32", 3, 0, 16),
    ],
)
def test_megatron_keeps_fp32_gradients_and_weights(
    replicas: int, precision: Literal["bf16", "fp32"], zero: Any, whole: int, shared: int
) -> None:
    # Megatron-LM, docs/user-guide/features/dist_optimizer.md: 18 and 6 + 12/d, 16 and 8 + 8/d
    recipe = layout_of("megatron", zero, precision)
    assert recipe.per_parameter(replicas) == pytest.approx(whole + shared / replicas)


@pytest.mark.parametrize(
    ("zero", "whole", "shared"), [(0, 16, 0), (1, 4, 12), (2, 2, 14), (3, 0, 16)]
)
def test_deepspeed_is_the_table_of_zero(zero: int, whole: int, shared: int) -> None:
    # Rajbhandari et al., arXiv 1910.02054, figure 1: 16, 4 + 12/N, 2 + 14/N, 16/N bytes
    recipe = layout_of("deepspeed", zero, "fp16")
    assert recipe.whole_and_shared() == (whole, shared)
    assert recipe.per_parameter(64) == whole + shared / 64


def test_deepspeed_sums_bf16_in_fp32_in_one_whole_buffer() -> None:
    # BF16_Optimizer: 2 + 4 + 12/D, as stage 1 of 0.19 and without ZeRO before
    for zero in (0, 1):
        recipe = layout_of("deepspeed", zero, "bf16", fp32_gradients=True)
        assert recipe.whole_and_shared() == (6, 12)
        # its buffer is not given back with the step
        assert recipe.per_parameter(8, always=True) == recipe.per_parameter(8)
    assert layout_of("deepspeed", 2, "bf16", fp32_gradients=True).whole_and_shared() == (2, 16)


def test_deepspeed_makes_buckets_of_half_a_billion_elements() -> None:
    sizes: Any = {"stage": 7e9, "unit": 2e8, "replicas": 8}
    plain = layout_of("deepspeed", 2, "bf16").passing_bytes("backward", **sizes)
    double = layout_of("deepspeed", 2, "bf16", buckets=Buckets(overlap=True))
    assert plain == GB
    assert double.passing_bytes("backward", **sizes) == 2 * GB
    small = layout_of("deepspeed", 2, "bf16", buckets=Buckets(reduce=200_000_000))
    assert small.passing_bytes("backward", **sizes) == 0.4 * GB
    assert small.passing_bytes("forward", **sizes) == 0
    # the part of the rank, flat and in fp32: 2 + 4 bytes of 7/8 billion
    assert small.passing_bytes("step", **sizes) == 6 * 7e9 / 8


def test_deepspeed_gathers_what_is_near_its_use() -> None:
    recipe = layout_of("deepspeed", 3, "bf16")
    bucket = 2 * 500_000_000
    # a layer, 50 million ahead and the buffer they came in, half of the distance of a billion
    held = 2 * (2e8 + 5e7 + 5e8) + 2 * 5e7
    assert recipe.passing_bytes("forward", stage=7e9, unit=2e8, replicas=8) == bucket + held
    # never more than there is
    small = recipe.passing_bytes("forward", stage=1e8, unit=1e7, replicas=8)
    assert small == bucket + 2 * 1e8 + 2 * 5e7
    none = Buckets(reuse=0, prefetch=0)
    tight = layout_of("deepspeed", 3, "bf16", buckets=none)
    assert tight.passing_bytes("forward", stage=7e9, unit=2e8, replicas=8) == bucket + 2 * 2e8


def test_fsdp2_keeps_fp32_shards_and_gathers_units() -> None:
    recipe = layout_of("torchtitan", 3)
    assert recipe.whole_and_shared() == (0, 16)
    # gradients are given back with the step
    assert recipe.per_parameter(8, always=True) == 12 / 8
    unit: Any = {"stage": 8e9, "unit": 2e8, "replicas": 8}
    assert recipe.passing_bytes("forward", **unit) == (2 + 2) * 2e8
    # gathered, fetched ahead, 16-bit gradients, and the input of the reduction before in fp32
    assert recipe.passing_bytes("backward", **unit) == (2 + 2 + 2 + 4) * 2e8
    assert layout_of("accelerate", 3).passing_bytes("backward", **unit) == (2 + 2 + 2 + 2) * 2e8


def test_fsdp2_without_resharding_holds_all_weights() -> None:
    unit: Any = {"stage": 8e9, "unit": 2e8, "replicas": 8}
    recipe = layout_of("torchtitan", 2)
    assert recipe.passing_bytes("forward", **unit) == 2 * 8e9 + 2 * 2e8
    assert recipe.passing_bytes("backward", **unit) == 2 * 8e9 + (2 + 4) * 2e8
    waiting = layout_of("torchtitan", 2, each_micro_batch=False)
    assert waiting.passing_bytes("backward", **unit) == (2 + 4) * 8e9 + (2 + 4) * 2e8


def test_replicas_of_accelerate_have_buckets_and_copies() -> None:
    recipe = layout_of("accelerate", 0)
    assert recipe.whole_and_shared() == (16, 0)
    assert recipe.passing_bytes("backward", stage=1e9, unit=1e7) == (4 + 2) * 1e9
    single = layout_of("accelerate", 0, "fp32")
    assert single.passing_bytes("backward", stage=1e9, unit=1e7) == 4 * 1e9


def test_executor_is_megatron_without_zero_and_fsdp2_with_it() -> None:
    assert layout_of("executor", 0).whole_and_shared() == (16, 0)
    assert layout_of("executor", 0, "fp32").whole_and_shared() == (16, 0)
    assert layout_of("executor", 3).whole_and_shared() == (0, 16)


@pytest.mark.parametrize("keeper", KEEPERS)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_higher_stage_never_keeps_more(keeper: str, precision: str) -> None:
    sizes = [
        layout_of(keeper, zero, precision, fp32_gradients=False).per_parameter(16)
        for zero in (0, 1, 2, 3)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == layout_of(keeper, 0, precision, fp32_gradients=False).per_parameter(1)
    for zero in (0, 1, 2, 3):
        recipe = layout_of(keeper, zero, precision)
        assert recipe.source
        assert recipe.moments.each_bytes == 8
        for phase in ("forward", "backward", "step"):
            assert recipe.passing_bytes(phase, stage=1e9, unit=1e7, replicas=16) >= 0


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (("colossal", 1), "'colossal'"),
        (("deepspeed", 4), "ZeRO"),
        (("deepspeed", 1, "fp8"), "ZeRO"),
    ],
)
def test_unknown_ones_are_refused(asked: tuple[Any, ...], text: str) -> None:
    with pytest.raises(InputError, match=text):
        layout_of(*asked)
