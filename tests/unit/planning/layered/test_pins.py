"""The grammar of --pin and --forbid and what its rules allow."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from autopar.command.fields import rows_of
from autopar.errors import OptionError
from autopar.run.plan import LayerStrategy, VocabStrategy
from search.planning.space import Rules, parse_rules
from search.request.options import SPACE_PANEL, SearchOptions, widest

TP4 = LayerStrategy(tp=4)
TP8_CKPT = LayerStrategy(tp=8, checkpoint=True)
TP8 = LayerStrategy(tp=8)


def allows_layer(rules: Rules, layer: int, strategy: LayerStrategy) -> bool:
    """Return whether a layer may use a strategy."""
    ((allowed,),) = rules.layer_masks([layer], [strategy])
    return allowed


def test_no_rules_allow_everything() -> None:
    """An empty set of rules restricts nothing."""
    rules = parse_rules([], [])

    assert allows_layer(rules, 0, TP8)
    assert rules.allows_stage(0, TP8)
    assert rules.allows_vocab(VocabStrategy())
    assert rules.allows_stages(4)
    assert rules.allows_batch(64, 8)
    assert not rules.has_stage_rules
    assert rules.last_layer() is None


def test_layer_range_is_inclusive() -> None:
    """`layers 0-3` are four layers; others are free."""
    rules = parse_rules(["layers 0-3:tp=4"], [])

    assert [allows_layer(rules, i, TP8) for i in (0, 3, 4)] == [False, False, True]
    assert allows_layer(rules, 0, TP4)
    assert rules.allows_stage(0, TP8)
    assert rules.last_layer() == 3


def test_one_layer() -> None:
    """A single number is a range of one."""
    rules = parse_rules(["layer 2:ckpt=1"], [])

    assert [allows_layer(rules, i, TP8) for i in (1, 2, 3)] == [True, False, True]


def test_stage_rule() -> None:
    """A rule about a stage does not restrict layers by their index."""
    rules = parse_rules(["stage 0:ckpt=0"], [])

    assert not rules.allows_stage(0, TP8_CKPT)
    assert rules.allows_stage(1, TP8_CKPT)
    assert allows_layer(rules, 0, TP8_CKPT)
    assert rules.has_stage_rules


def test_conditions_of_different_kinds_split() -> None:
    """One pin may fix layers, embedding, stages and batch at once."""
    rules = parse_rules(["tp=8,vtp=2,pp=4,m=8,bsz=64"], [])

    assert allows_layer(rules, 5, TP8)
    assert not allows_layer(rules, 5, TP4)
    assert rules.allows_vocab(VocabStrategy(tp=2))
    assert not rules.allows_vocab(VocabStrategy(tp=1))
    assert rules.allows_stages(4)
    assert not rules.allows_stages(2)
    assert rules.allows_batch(64, 8)
    assert not rules.allows_batch(64, 4)
    assert not rules.allows_batch(32, 8)


def test_forbidden_rule_needs_all_conditions() -> None:
    """`tp=8,ckpt=1` forbids the combination, not each part."""
    rules = parse_rules([], ["tp=8,ckpt=1"])

    assert not allows_layer(rules, 0, TP8_CKPT)
    assert allows_layer(rules, 0, TP8)
    assert allows_layer(rules, 0, LayerStrategy(checkpoint=True))


@pytest.mark.parametrize(
    ("key", "strategy"),
    [
        ("ulysses", LayerStrategy(tp=2, ulysses=True)),
        ("zero3", LayerStrategy(zero3=True)),
        ("ckpt", LayerStrategy(checkpoint=True)),
        ("strided", LayerStrategy(tp=2, strided=True)),
        ("fsdp", LayerStrategy(zero3=True)),
    ],
)
def test_flags(key: str, strategy: LayerStrategy) -> None:
    """Every flag of a layer can be pinned on and off."""
    assert allows_layer(parse_rules([f"{key}=1"], []), 0, strategy)
    assert not allows_layer(parse_rules([f"{key}=0"], []), 0, strategy)
    assert not allows_layer(parse_rules([f"{key} = 1"], []), 0, LayerStrategy())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected key=integer, got ''"),
        ("tp", "expected key=integer, got 'tp'"),
        ("tp=two", "expected key=integer"),
        ("tp=0", "positive integer for 'tp'"),
        ("ckpt=2", "expected ckpt=0 or ckpt=1, got 2"),
        ("layers 3-0:tp=4", r"empty \(3 > 0\)"),
        ("layers:tp=4", "expected `layers A-B` or `stage J`"),
        ("layers 0-3:pp=4", "'pp' belongs to the whole plan"),
        ("checkpont=1", "Did you mean 'ckpt'"),
        ("tp=2,tp=4", "cannot be both 2 and 4"),
        ("tp=2,", "expected key=integer, got ''"),
    ],
)
def test_bad_rule_shows_the_grammar(text: str, message: str) -> None:
    """One sentence with the rule, the problem and the grammar."""
    with pytest.raises(OptionError, match=message) as caught:
        parse_rules([text], [])

    assert "[layers A-B: | stage J:] key=N[,key=N]" in str(caught.value)


def test_forbidding_a_combination_of_kinds_is_refused() -> None:
    """No predicate could tell `tp=8 and pp=2`."""
    with pytest.raises(OptionError, match=r"--forbid.*tp, pp"):
        parse_rules([], ["tp=8,pp=2"])


@given(st.text(alphabet="layerstgpckmvz0123456789-:=, ", max_size=20))
def test_any_text_is_a_rule_or_one_sentence(text: str) -> None:
    """The parser never raises anything else."""
    try:
        rules = parse_rules([text], [])
    except OptionError as error:
        message = str(error)
    else:
        message = ""
        assert rules.rules

    assert "\n" not in message


def test_masks_of_all_layers_are_what_each_layer_allows() -> None:
    """Pinned and forbidden ranges that overlap, asked of all layers at once and one by one."""
    pins, forbidden = ["layers 2-5:ckpt=1", "layers 4-9:tp=8"], ["tp=4,ckpt=0", "stage 1:tp=8"]
    rules = parse_rules(pins, forbidden)
    strategies = [TP4, TP8, TP8_CKPT, LayerStrategy()]

    masks = rules.layer_masks(range(12), strategies)

    assert masks == [tuple(allows_layer(rules, i, s) for s in strategies) for i in range(12)]
    assert len(set(masks)) == 3
    assert rules.stages == (1,)


def test_what_bounds_a_space_has_a_value_that_leaves_nothing_out() -> None:
    """A limit or switch without one would never be named as what is in the way."""
    names = [row.field for row in rows_of(SearchOptions) if row.panel == SPACE_PANEL]
    assert {name for name in names if name.startswith(("max_", "disable_"))} <= {*widest(8)}
    assert SearchOptions(**widest(8)).max_tp_deg == 8
