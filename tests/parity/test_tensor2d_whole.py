"""All that the two-dimensional engine says of one candidate, beside the readable oracle."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from autopar.errors import InfeasibleExecution, InputError
from search.closed_form.tensor2d import COMPAT, STRATEGIES, Quirks, evaluate, evaluate_many
from tests.oracles.tensor2d import evaluate as readable
from tests.parity.test_tensor2d_engine import MODEL, ROUNDING, SYSTEM, random_point


def answer(price: Any, *question: Any, **options: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Return statistics, or else the words of a refusal."""
    try:
        return price(*question, **options), ()
    except InfeasibleExecution as refused:
        return {}, (refused.reason, refused.kind, refused.exit_code)


def compare_whole(rng: random.Random, quirks: bool | Quirks) -> tuple[bool, str]:
    """Compare all that is said of a random candidate; return whether it is legal, or why not."""
    strategy, config, placement, gpus, batch, model, system = random_point(rng)
    common = ["flash", "plain"] if strategy != "2d" else ["flash", "plain", "summa", "summa"]
    way: dict[str, Any] = {
        "attention": rng.choice(common if rng.random() < 0.9 else ["summa", "linear"]),
        "recompute": rng.random() < 0.4,
        "compat": quirks,
    }
    if rng.random() < 0.05:
        config[rng.choice(list(config))] = rng.choice([0, True, 1.5, "8"])
    question = (strategy, model, config, placement, gpus, batch, system)
    ours, refused = answer(evaluate, *question, **way, layers=True)
    expected, why_not = answer(readable, *question, **way, layers=True)
    assert refused == why_not
    if not expected:
        return False, str(refused[0])
    # names, their order and their types, as files have them
    assert shape_of(ours) == shape_of(expected)
    rows, other_rows = ours.pop("layers"), expected.pop("layers")
    assert ours == pytest.approx(expected, rel=ROUNDING, abs=0)
    for row, other in zip(rows, other_rows, strict=True):
        for name, value in other.items():
            if row[name] != value:
                assert row[name] == pytest.approx(value, rel=ROUNDING, abs=0), (row["name"], name)
    assert ours == answer(evaluate, *question, **way)[0]
    return True, f"{strategy} {way['attention']} {way['recompute']}"


def shape_of(value: Any) -> Any:
    """Return an object with types in the place of its numbers."""
    if isinstance(value, dict):
        return [(name, shape_of(item)) for name, item in value.items()]
    return [shape_of(item) for item in value] if isinstance(value, list) else type(value)


@pytest.mark.whole
def test_whole_answers() -> None:
    """All statistics and every operation, any attention and any defects; refusals to the letter."""
    rng = random.Random(3)
    names = list(Quirks.meanings)
    legal: Counter[str] = Counter()
    refused = set()
    for n in range(2500):
        some = Quirks(**{name: rng.random() < 0.4 for name in names})
        ran, what = compare_whole(rng, (False, True, some, COMPAT)[n % 4])
        if ran:
            legal[what] += 1
        else:
            refused.add(" ".join(word for word in what.split() if not word.isdigit()))
    ways = {f"{s} flash False" for s in STRATEGIES} | {"2d summa False", "2d summa True"}
    ways |= {f"{s} plain {again}" for s in STRATEGIES for again in (False, True)}
    assert legal.keys() == ways
    assert min(legal.values()) > 20
    for words in REFUSALS:
        assert any(words in text for text in refused), words


REFUSALS = (
    "a sequence of leaves some of tp1 * tp2 = GPUs without a row",
    "tokens of a micro-batch (mbs * l) over",
    "kv_heads and",
    "heads over",
    "a batch of over dp * mbs",
    "a fast domain has",
    "heads of width and a sequence of",
    "expected a positive integer",
    "attention: the value is 'linear'",
    "summa needs the strategy",
    "flash attention stores no scores",
    "the published model has it in",
)
"""What the random questions must have been refused for, among others; numbers left out."""


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"n": 12}, "n_gpus: tp(2) * pp(2) * dp(4) = 16 != 12"),
        ({"l": 3, "tp": 4, "dp": 2}, "a sequence of 3 leaves some of tp = 4 GPUs without a row"),
        (
            {"l": 2047, "mbs": 1},
            "cannot divide the 2047 tokens of a micro-batch (mbs * l) over tp = 2 evenly",
        ),
        ({"h": 9, "e": 1530, "kv_heads": 1}, "cannot divide 9 heads over tp = 2 evenly"),
        ({"f": 6143}, "cannot divide the feed-forward width 6143 over tp = 2 evenly"),
        (
            {"h": 3, "kv_heads": 3, "e": 1536, "tp": 2},
            "neither of 3 kv_heads and tp = 2 divides the other",
        ),
        ({"depth": 13}, "cannot divide 13 layers over pp = 2 evenly"),
        ({"mbs": 3}, "cannot divide a batch of 64 over dp * mbs = 12 evenly"),
        ({"nv_dp": 3}, "placement.nv_dp: 3 does not divide its group of 4"),
        (
            {"nv_dp": 4, "nv_tp": 2, "nv_pp": 2},
            "a fast domain has 8 GPUs and the placement puts 16 into one",
        ),
        # of several the first of this list is said
        ({"n": 12, "depth": 13, "mbs": 3}, "n_gpus: tp(2) * pp(2) * dp(4) = 16 != 12"),
        (
            {"l": 2047, "mbs": 1, "f": 6143},
            "cannot divide the 2047 tokens of a micro-batch (mbs * l) over tp = 2 evenly",
        ),
        ({"n": 8, "dp": 2**40}, f"n_gpus: tp(2) * pp(2) * dp({2**40}) = {2**42} != 8"),
        (
            {"tp": 10**9 - 1, "pp": 10**9 - 1, "dp": 10**9 - 1},
            "a sequence of 2000 leaves some of tp = 999999999 GPUs without a row",
        ),
    ],
)
def test_refusals_with_their_figures(change: dict[str, int], sentence: str) -> None:
    """Word for word, and in one order where several are due; many at a time are refused, too."""
    x = {"dp": 4, "tp": 2, "pp": 2, "mbs": 2, "nv_tp": 2, "nv_dp": 2, "nv_pp": 1} | change
    gpus = x.pop("n", x["dp"] * x["tp"] * x["pp"])
    model = MODEL | {name: x.pop(name) for name in set(x) & {*MODEL, "kv_heads"}}
    parts: list[dict[str, int]] = [{}, {}]
    for name, value in x.items():
        parts[name.startswith("nv_")][name] = value
    with pytest.raises(InfeasibleExecution) as caught:
        evaluate("1d", model, *parts, gpus, 64, SYSTEM)
    assert str(caught.value) == sentence
    with pytest.raises(InfeasibleExecution) as expected:
        readable("1d", model, *parts, gpus, 64, SYSTEM)
    assert str(expected.value) == sentence
    assert caught.value.exit_code == expected.value.exit_code
    if max(gpus, *x.values()) < 2**31:
        row = evaluate_many("1d", model, [x], gpus, 64, SYSTEM)[0]
        assert not row["ok"]
        assert row["reason"]


@pytest.mark.parametrize(
    ("batch", "microbatch", "sentence"),
    [
        (0, 1, "global_batch_size: the value is 0, expected an integer from 1 to"),
        (16.5, 1, r"global_batch_size: the value is 16\.5"),
        (2**63, 1, "global_batch_size: the value is 9223372036854775808"),
        (16, 2**31, "mbs: the value is 2147483648, expected an integer from 1 to 2147483647"),
    ],
)
def test_numbers_that_no_engine_holds(batch: Any, microbatch: int, sentence: str) -> None:
    """One sentence with the name; more samples than searches take are no problem."""
    config = {"dp": 8, "tp": 1, "pp": 1, "mbs": 1}
    near = {"nv_tp": 1, "nv_dp": 1, "nv_pp": 1}
    with pytest.raises(InputError, match=sentence):
        evaluate("1d", MODEL, config | {"mbs": microbatch}, near, 8, batch, SYSTEM)
    large: tuple[Any, ...] = ("1d", MODEL, config, near, 8, 2**40, SYSTEM)
    assert evaluate(*large) == pytest.approx(readable(*large), rel=ROUNDING, abs=0)
