"""Layers on the parts of a pipeline: against every placement, and as layouts of Megatron-LM."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
from hypothesis import strategies as st

from autopar.errors import InputError
from autopar.pipeline.placement import equal_layer_counts, place_layers, stage_seconds
from autopar.pipeline.schedules import Schedule
from autopar.records import replace
from autopar.run.strategy import chunks_of_sizes
from search.engines.megatron.read import read_run
from search.engines.megatron.stages import layout_of
from tests.often import often


def cuts(number: int, parts: int, least: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to cut so many layers into parts of `least` or more."""
    if parts == 1:
        if number >= least:
            yield (number,)
        return
    for first in range(least, number - least * (parts - 1) + 1):
        yield from ((first, *rest) for rest in cuts(number - first, parts - 1, least))


def shortest(
    layer_s: Sequence[float],
    stages: int,
    chunks: int,
    schedule: Schedule,
    *,
    ends: tuple[float, float],
    mtp: int,
    mtp_s: float,
    least: int,
) -> float:
    """Return the longest stage of the best of all placements."""
    parts, best = stages * chunks, float("inf")
    for sizes in cuts(len(layer_s), parts, least):
        last = max(at for at, size in enumerate(sizes) if size)
        for place in range(max(last, parts - 2), parts):
            further = [mtp * (at == place) for at in range(parts)]
            found = stage_seconds(
                sizes,
                further,
                layer_s,
                stages=stages,
                schedule=schedule,
                embedding_s=ends[0],
                head_s=ends[1],
                mtp_s=mtp_s,
            )
            best = min(best, max(found))
    return best


@often(40, 1000, st.sampled_from(["one chunk", "alike", "unlike"]), st.integers(0, 2**32))
def test_no_placement_has_a_shorter_longest_stage(kind: str, seed: int) -> None:
    """Of unlike layers in several chunks: at most a sixth longer, and mostly not at all."""
    chance = random.Random(seed)
    stages = chance.randint(1, 3)
    chunks = 1 if kind == "one chunk" else 2
    schedule: Schedule = "1f1b" if chunks == 1 else chance.choice(["interleaved", "zero_bubble_v"])
    least = chance.randint(0, 1)
    number = chance.randint(max(stages * chunks * least, 1), max(stages * chunks, 5) + 2)
    layer_s = [1.0] * number
    if kind == "one chunk":
        layer_s = [chance.choice([0.5, 1.0, 1.3]) for _ in layer_s]
    elif kind == "unlike":
        layer_s[:2] = [0.4] * len(layer_s[:2])
    ends = chance.uniform(0, 2), chance.uniform(0, 3)
    mtp, mtp_s = chance.randint(0, 2), chance.uniform(0, 1.5)
    found = place_layers(
        layer_s,
        stages=stages,
        chunks=chunks,
        schedule=schedule,
        embedding_s=ends[0],
        head_s=ends[1],
        mtp=mtp,
        mtp_s=mtp_s,
        least_layers=least,
    )
    assert sum(found.sizes) == number
    assert sum(found.mtp) == mtp
    assert min(found.sizes) >= least
    best = shortest(layer_s, stages, chunks, schedule, ends=ends, mtp=mtp, mtp_s=mtp_s, least=least)
    assert best <= max(found.stage_s) * (1 + 1e-12)
    if found.exact and number >= stages * chunks:
        assert max(found.stage_s) == pytest.approx(best)
    else:
        assert max(found.stage_s) <= best * 7 / 6 + max(layer_s) * (number < stages * chunks)


def test_ends_take_the_place_of_layers() -> None:
    """Llama 3's 126 layers on 16 stages: embedding and head as long as a layer each."""
    found = place_layers([1.0] * 126, stages=16, embedding_s=1.0, head_s=1.0)
    assert found.sizes == (7, *(8,) * 14, 7)
    assert found.stage_s == (8.0,) * 16
    assert found.exact


def one_by_one(
    around_s: Sequence[float], each_s: float, number: int, parts: Sequence[int], least: int
) -> list[int]:
    """Return the counts of stages after each layer went to the stage that is shortest with it."""
    counts = [least * own for own in parts]
    stages = [at for at, own in enumerate(parts) if own]
    for _ in range(number - sum(counts)):
        at = min(
            stages,
            key=lambda at: (
                around_s[at] + counts[at] * each_s, abs(2 * at - len(parts) + 1), at
            ),
        )  # fmt: skip
        counts[at] += 1
    return counts


@pytest.mark.parametrize("seed", range(300))
def test_equal_layers_go_one_by_one_to_the_shortest_stage(seed: int) -> None:
    rng = random.Random(seed)
    each_s = rng.choice((1.0, 0.5, 0.1, rng.random()))
    parts = [rng.choice((1, 1, 2, 0)) for _ in range(rng.randint(1, 12))] + [1]
    around_s = [each_s * rng.choice((0.0, 0.0, 1.0, 3.0, rng.uniform(-1.0, 9.0))) for _ in parts]
    least = rng.choice((0, 1, 1, 3))
    number = sum(parts) * least + rng.randint(0, 100)
    found = equal_layer_counts(around_s, each_s, number, parts, least=least)
    assert found == one_by_one(around_s, each_s, number, parts, least)


def test_a_heavy_head_stands_alone() -> None:
    """DeepSeek-V3's: modules of further tokens and the head have parts without layers."""
    place = partial(place_layers, [0.3] * 3 + [1.0] * 58, stages=8, chunks=4, embedding_s=0.1)
    found, crowded = (place(head_s=1.5, mtp=1, mtp_s=1.2, least_layers=least) for least in (0, 1))
    assert max(found.stage_s) <= max(crowded.stage_s)
    assert sum(found.sizes) == 61
    assert not found.exact


@pytest.mark.parametrize(
    ("stages", "chunks", "mtp", "least"), [(4, 1, 0, 1), (4, 2, 0, 1), (2, 4, 0, 0)]
)
def test_a_placement_is_a_layout_that_is_read_back(
    stages: int, chunks: int, mtp: int, least: int
) -> None:
    arguments = {
        "num-layers": "30", "hidden-size": "512", "num-attention-heads": "8",
        "seq-length": "1024", "max-position-embeddings": "1024", "micro-batch-size": "1",
        "global-batch-size": "16", "vocab-size": "50000", "lr": "1e-4", "train-iters": "10",
        "untie-embeddings-and-output-weights": "",
        "pipeline-model-parallel-size": str(stages),
    }  # fmt: skip
    found = place_layers(
        [1.0] * 30,
        stages=stages,
        chunks=chunks,
        embedding_s=0.4,
        head_s=2.2,
        mtp=mtp,
        least_layers=least,
    )
    held = chunks_of_sizes(found.sizes, stages, mtp=found.mtp)
    plain = read_run({**arguments, "num-layers": str(stages * chunks * 4)}, world_size=8).run
    layout = layout_of(replace(plain.strategy, stages=held))
    again = read_run({**arguments, "pipeline-model-parallel-layout": layout}, world_size=8).run
    assert again.strategy.stages == held


def test_further_tokens_may_stand_on_any_part() -> None:
    held = chunks_of_sizes([2, 2, 1, 0], 2, mtp=[0, 0, 1, 0])
    assert [[chunk.mtp for chunk in stage] for stage in held] == [[0, 1], [0, 0]]
    v = chunks_of_sizes([2, 2, 1, 1], 2, schedule="zero_bubble_v")
    assert [[chunk.layers for chunk in stage] for stage in v] == [[(0, 1), (5,)], [(2, 3), (4,)]]


def test_too_few_layers_are_refused() -> None:
    with pytest.raises(InputError, match="3 layers are fewer than 1 for each of 4"):
        place_layers([1.0] * 3, stages=2, chunks=2)
    assert max(place_layers([1.0] * 3, stages=2, chunks=2, least_layers=0).stage_s) == 2.0
