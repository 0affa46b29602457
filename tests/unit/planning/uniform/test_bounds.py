"""Bounds of the search: early stages against every layer partition, and bounds that are reused."""

from __future__ import annotations

import random

import pytest

from autopar.pipeline.schedules import SCHEDULES, Schedule
from autopar.price.assessment import Target
from autopar.rates.accuracy import load_accuracy
from autopar.rates.card import load_card
from autopar.rates.parts.operations import machine_of
from autopar.rates.stack import load_stack
from search.engines.huggingface.models import model_named
from search.engines.space import EngineContext
from search.engines.table import engine_space
from search.planning.uniform.best_first import UniformSearch
from search.planning.uniform.layout import layouts, least_early_layers


@pytest.mark.parametrize("v_shaped", [False, True])
@pytest.mark.parametrize("seed", range(100))
def test_no_partition_has_fewer_layers_on_early_stages(seed: int, v_shaped: bool) -> None:
    rng = random.Random(seed)
    number, stages = rng.randint(6, 96), rng.choice((2, 3, 4, 5, 8, 16))
    dense = rng.choice((0, 0, 1, 3))
    layer_s = [rng.choice((0.3, 2.5))] * dense + [1.0] * (number - dense)
    first_s, last_s = rng.choice((0.0, 0.05, 2.0)), rng.choice((0.1, 1.2, 4.0))
    names: tuple[Schedule, ...] = ("1f1b", "interleaved")
    if v_shaped:
        names += tuple(name for name, one in SCHEDULES.items() if one.v_shaped)
    most = number // stages
    found = [
        tuple(sum(len(chunk.layers) for chunk in stage) for stage in layout)
        for name in names
        for chunks in range(1, min(most, 2 if SCHEDULES[name].v_shaped else most) + 1)
        for layout in layouts(layer_s, first_s, last_s, stages, chunks, schedule=name)
    ]
    least = least_early_layers(layer_s, first_s, last_s, stages, most, v_shaped=v_shaped)
    if not found:
        return
    assert least[0] <= min(one[0] for one in found)
    assert least[1] <= min(one[1] for one in found)
    if not dense and not v_shaped and stages > 2:
        # of equal layers the partitions are known
        assert least[0] >= min(one[0] for one in found) - 1


def test_reductions_count_once_in_a_second_search() -> None:
    """Bounds of numbers of stages from a first search contain the reductions of gradients."""
    engine, card = engine_space("megatron"), load_card("h100-80gb")
    target = Target(
        machine=machine_of(card, load_stack(engine.stack)),
        accuracy=load_accuracy(),
        site_known=False,
        oom_risk=0.01,
    )
    model = model_named("llama2-7b")
    assert model is not None
    job = EngineContext(
        name="llama2-7b", model=model, seq=4096, global_batches=(16,), world=8, gpu=card.name
    )
    kept, alone = UniformSearch(engine, job, target), UniformSearch(engine, job, target)
    kept.solve(top=6)
    again, first = (one.solve(oom_risk=0.001).solutions[0] for one in (kept, alone))
    assert again.choice == first.choice
