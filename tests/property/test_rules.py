"""The table of rules: its verdicts, its arrays, and the values that it proposes.

Verdicts are those of branches in `tests.oracles.rules`, which know nothing of the table.
"""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autopar.errors import InputError
from autopar.run.rules import (
    ANY,
    BATCH,
    COPIED_KEYS,
    DEGREES,
    EVEN_LAYERS,
    EXPERTS,
    FFN,
    GRID,
    HEADS,
    LAYER,
    OPTIMIZER,
    PLAN,
    PRECISION,
    RUN,
    SEQUENCE,
    Rule,
    RuleError,
    broken,
    holds_all,
    nearest,
    refuse,
)
from search.engines.deepspeed import rules as deepspeed
from search.engines.huggingface import rules as huggingface
from search.engines.megatron import rules as megatron, setting
from search.engines.megatron.names import concern_of
from search.engines.torchtitan import rules as torchtitan
from search.engines.tuners import rules as tuners
from search.planning.uniform import infeasibility
from tests.oracles.rules import broken_ids
from tests.runs import decoder, run_of

GENERAL = (*GRID, *BATCH, HEADS, COPIED_KEYS, FFN, EVEN_LAYERS, *SEQUENCE, *EXPERTS)
# Mixtral's sizes on 512 GPUs
MIXTRAL: dict[str, Any] = {
    "world": 512,
    "heads": 32,
    "kv_heads": 8,
    "ffn_hidden_size": 14336,
    "expert_width": 14336,
    "experts": 8,
    "layers": 32,
    "seq_length": 4096,
    "global_batch": 1024,
    "vpp": 1,
    "ulysses": 1,
    "sequence_parallel": True,
}
AXES: dict[str, tuple[int, ...]] = {
    "tp": (1, 2, 3, 4, 6, 8, 16),
    "cp": (1, 2, 4, 8),
    "pp": (1, 2, 3, 4, 8, 16),
    "ep": (1, 2, 3, 4, 8),
    "etp": (1, 2, 3),
    "micro_batch": (1, 2, 3, 4),
}


@given(st.integers(0, 10**9))
def test_verdicts_are_those_of_plain_branches(seed: int) -> None:
    """On random sizes and degrees, each broken rule by its id, once."""
    draw = random.Random(seed)
    degrees = {name: draw.choice(values) for name, values in AXES.items()}
    values: dict[str, Any] = {
        **degrees,
        "world": draw.choice([1, 8, 12, 24, 48, 64, 96, 512]),
        "heads": draw.choice([1, 6, 8, 12, 32, 62]),
        "kv_heads": draw.choice([1, 2, 6, 8, 32]),
        "ffn_hidden_size": draw.choice([96, 4096, 11008, 14336]),
        "expert_width": draw.choice([96, 1000, 1408]),
        "experts": draw.choice([0, 0, 8, 12, 64]),
        "layers": draw.choice([1, 4, 12, 31, 32, 80]),
        "seq_length": draw.choice([1, 96, 1000, 4096]),
        "global_batch": draw.choice([1, 30, 64, 240, 1024]),
        "vpp": draw.choice([1, 1, 2]),
        "ulysses": 1,
        "sequence_parallel": draw.random() < 0.5,
    }
    if not values["experts"]:
        values["expert_width"] = None
    found = [one.id for one in broken(GENERAL, values)]

    assert len(found) == len({*found})
    wanted = broken_ids(values, sequence_parallel=values["sequence_parallel"] is True)
    assert {*found} == wanted
    assert holds_all(GENERAL, values) == (not wanted)
    if wanted:
        with pytest.raises(RuleError) as raised:
            refuse(GENERAL, values)
        assert {*raised.value.ids} == wanted


def test_arrays_agree_with_numbers() -> None:
    """Over 10,080 combinations of degrees, masked at once and one by one."""
    combinations = [*product(*AXES.values())]
    assert len(combinations) == 10_080
    columns = dict(zip(AXES, np.array(combinations).T, strict=True))
    mask = holds_all(GENERAL, {**MIXTRAL, **columns})
    single = [
        holds_all(GENERAL, {**MIXTRAL, **dict(zip(AXES, one, strict=True))}) for one in combinations
    ]

    assert mask.tolist() == single
    assert 0 < sum(single) < len(single)


def test_an_unknown_value_leaves_a_rule_undecided() -> None:
    """Values known only to a running script break no rule."""
    values = {"world": 64, "tp": 3, "cp": 1, "pp": 4, "heads": None, "ffn_hidden_size": 11008}

    assert [one.id for one in broken(GENERAL, values)] == ["grid.dense", "ffn.tensor"]
    assert [one.id for one in broken(GENERAL, {**values, "tp": None})] == []


def test_the_nearest_value_keeps_all_rules() -> None:
    """Of two equally near values, the smaller one is returned."""
    values = {"world": 64, "tp": 3, "cp": 1, "pp": 4, "heads": 32, "kv_heads": 8}
    rules = (*GRID, HEADS, COPIED_KEYS)

    assert nearest(rules, values, "tp", range(1, 17)) == (2, 4, 1, 8, 16)
    assert nearest(rules, {**values, "tp": 2, "pp": 5}, "pp", range(1, 9)) == (4, 2, 8, 1)


def test_a_run_names_all_rules_that_it_breaks() -> None:
    """Not the first one alone, and as an error of a user."""
    with pytest.raises(InputError) as raised:
        run_of(decoder(layers=32, heads=6), gpus=64, tp=3, pp=4, ep=5, rings=2)

    assert isinstance(raised.value, RuleError)
    assert raised.value.ids == ("grid.dense", "grid.experts", "context.rings")
    assert raised.value.broken[0].values == {"world": 64, "tp": 3, "cp": 1, "pp": 4}


@pytest.mark.parametrize(("shard", "cp", "copied"), [(1, 1, True), (2, 1, False), (2, 2, False)])
def test_weights_of_one_shard_are_kept_as_copies(shard: int, cp: int, copied: bool) -> None:
    """Ranks of torchtitan's FSDP2 are the shards times the context ranks."""
    values = {"recipe": True, "zero": 2, "dp_shard": shard, "cp": cp}
    assert (
        "torchtitan.recipe.copies" in {r.id for r in broken(torchtitan.SPACE, values)}
    ) == copied


TABLES: dict[str, tuple[Rule, ...]] = {
    "degrees": DEGREES,
    "run": RUN,
    "layer": LAYER,
    "plan": PLAN,
    "precision": PRECISION,
    "optimizer": OPTIMIZER,
    "megatron": (*megatron.RULES, *megatron.LAYERS, *megatron.WRITTEN, *megatron.BY_RELEASE),
    "megatron search": megatron.SPACE,
    "torchtitan": (*torchtitan.FILE, *torchtitan.LOCAL_BATCH, *torchtitan.WHOLE_STAGES),
    "torchtitan search": torchtitan.SPACE,
    "deepspeed": deepspeed.FILE,
    "deepspeed search": deepspeed.SPACE,
    "accelerate": huggingface.FILE,
    "accelerate search": (*huggingface.SPACE, *huggingface.SYNCED_GRADIENTS),
    "tuners": tuners.FILE,
}


def test_rules_of_arguments_read_values_that_there_are() -> None:
    """A flag without any release, or a misspelt value, would never be found."""
    flags = set()
    for rule in TABLES["megatron"]:
        for name in rule.over:
            if name not in {*setting.FACTS, *setting.NUMBERS, *setting.OF_RUN}:
                flags.add(name.partition("=")[0])
    flags |= {flag for flag, _ in setting.NUMBERS.values()}

    assert {flag for flag in flags if concern_of(flag) is None} <= RENAMED


RENAMED = {"batch-size", "warmup", "model-parallel-size", "checkpoint-activations"}
"""Final parts of flags in current releases."""


def test_rows_of_any_engine_are_asked_of_runs_choices_and_layers() -> None:
    """Each exactly once: a missing rule would let a search offer a launch that a check refuses."""
    for rules in (RUN, infeasibility.GENERAL, LAYER):
        assert {*ANY} <= {*rules}
    ids = [one.id for one in infeasibility.GENERAL]
    assert sorted(ids) == sorted({*ids})


@pytest.mark.parametrize("name", TABLES)
def test_rows_are_complete(name: str) -> None:
    """Ids are unique, sentences name values that are read, and every value is read once."""
    rules = TABLES[name]
    ids = [rule.id for rule in rules]

    assert sorted(ids) == sorted({*ids})
    for rule in rules:
        assert len(rule.over) == len({*rule.over}), rule.id
        text = rule.message.format(**dict.fromkeys(rule.over, 7), rest=1)
        assert text, rule.id
