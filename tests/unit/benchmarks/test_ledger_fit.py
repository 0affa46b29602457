"""The fit of the ledger's constants: what each changes, sums of changes, priors, left-out rows."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.records import replace
from benchmarks.intervals import covered_table
from benchmarks.ledger_constants import (
    CONSTANTS,
    FITTED,
    Constant,
    Entry,
    Sensitivity,
    fit,
    groups_of,
    load_entries,
    log_ratio,
    misfit,
    ranges_around,
)
from benchmarks.ledger_docs import left_out_table, write_tables
from benchmarks.ledger_left_out import (
    LEFT_OUT,
    Case,
    Estimated,
    classes_left_out,
    classes_of,
)
from docs import make_answers

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = [constant.shipped for constant in CONSTANTS]
NAMES = [constant.name for constant in CONSTANTS]


@cache
def entries() -> list[Entry]:
    """Return the rows that the fit sees, read once."""
    return [entry for entry in load_entries() if entry.group in FITTED]


def touched(constant: Constant) -> Entry:
    """Return the first row that knows a constant."""
    return next(entry for entry in entries() if constant.touches(entry.run))


def changed(index: int, share: float) -> list[float]:
    """Return the shipped values, one of them changed."""
    return [value * (share if place == index else 1.0) for place, value in enumerate(SHIPPED)]


def test_shipped_values_change_nothing() -> None:
    """Each constant put at its shipped value leaves the time of rows on every card as it is."""
    cards = {entry.run.machine.card.name: entry for entry in entries()}
    for entry in cards.values():
        direct = [c.put(entry.run.machine, c.shipped) for c in CONSTANTS if c.touches(entry.run)]
        for machine in direct:
            assert machine.clock == entry.run.machine.clock
            assert machine.kernels.section.memory == entry.run.machine.kernels.section.memory
            assert machine.stack.figures.overlap["fully_sharded"] == pytest.approx(
                entry.run.machine.stack.figures.overlap["fully_sharded"]
            )


@pytest.mark.parametrize("index", range(len(CONSTANTS)), ids=NAMES)
def test_a_constant_moves_the_rows_that_know_it(index: int) -> None:
    """Rates make a step shorter, exposed traffic and host time longer; other rows do not move."""
    constant = CONSTANTS[index]
    slows = constant.name.startswith(("tensor", "ZeRO", "host"))
    row = touched(constant)
    before = log_ratio(row.run, SHIPPED)

    after = log_ratio(row.run, changed(index, 1.1))

    if constant.name.startswith("host"):
        # devices may be so much slower that hosts are not seen
        assert after >= before
    else:
        assert (after > before) == slows
        assert after != before
    other = next(entry for entry in entries() if not constant.touches(entry.run))
    assert log_ratio(other.run, changed(index, 1.1)) == log_ratio(other.run, SHIPPED)


def test_sums_are_exact_at_nodes_and_near_between() -> None:
    """One constant at a node gives the priced time; several between them are near."""
    rows = [touched(CONSTANTS[NAMES.index(name)]) for name in ("clock A100", "clock GB200")]
    widths = [constant.width for constant in CONSTANTS]
    sums = Sensitivity(rows, SHIPPED, ranges_around(SHIPPED, widths), 3)
    index = NAMES.index("clock A100")

    logs = np.log(SHIPPED)
    logs[index] += widths[index]
    exact = [log_ratio(row.run, [*np.exp(logs)]) for row in rows]
    assert sums.log_ratios(logs) == pytest.approx(exact, abs=1e-9)

    logs = np.log(SHIPPED) + 0.4 * np.array(widths)
    exact = [log_ratio(row.run, [*np.exp(logs)]) for row in rows]
    assert sums.log_ratios(logs) == pytest.approx(exact, abs=0.005)


class Slopes(Sensitivity):
    """Rows whose logarithm falls by a slope times that of each constant."""

    def __init__(self, base: np.ndarray, slopes: np.ndarray, least: float, most: float) -> None:
        """Take base (rows) and slopes (rows x constants)."""
        grid = np.array([least, most])
        self.centre = np.zeros(slopes.shape[1])
        self.base = base
        self.grids = [grid] * slopes.shape[1]
        self.rows = [np.arange(len(base))] * slopes.shape[1]
        self.changes = [np.outer(column, grid) for column in slopes.T]


def test_the_fit_finds_what_the_rows_say() -> None:
    """Rows that are too slow by known values of two constants are met again, with weak priors."""
    random = np.random.default_rng(1)
    slopes = random.uniform(-1.0, 0.0, (40, 2))
    truth = np.array([0.21, -0.13])
    sums = Slopes(-slopes @ truth, slopes, -0.5, 0.5)
    groups = {"all": np.arange(40)}

    found = fit(sums, groups, [(0.0, 10.0), (0.0, 10.0)])

    assert found == pytest.approx(truth, abs=0.005)


def test_a_strong_prior_and_missing_rows_keep_a_constant() -> None:
    """What no row knows stays at its prior, and a prior without doubt is not left."""
    slopes = np.stack([np.full(9, -1.0), np.zeros(9)], axis=1)
    sums = Slopes(np.full(9, 0.2), slopes, -0.5, 0.5)
    groups = {"all": np.arange(9)}

    found = fit(sums, groups, [(0.0, 1e-4), (0.3, 1.0)])

    assert found == pytest.approx([0.0, 0.3], abs=2e-3)


def test_the_misfit_of_a_source_grows_with_the_root_of_its_rows() -> None:
    """Sources add up; an error beyond the largest counts as that, so that none runs the fit."""
    ratios = np.array([[0.1]] * 4 + [[-0.2]] * 9 + [[50.0]])
    groups = {"a": np.arange(4), "b": np.arange(4, 13), "c": np.array([13])}

    assert misfit(groups, ratios)[0] == pytest.approx(2 * 0.1 + 3 * 0.2 + 0.6)


def test_every_fitted_source_is_left_out_once() -> None:
    """Together the sources that are left out are those of the fit, and all have rows."""
    assert sorted(group for left in LEFT_OUT.values() for group in left) == sorted(FITTED)
    assert sorted(groups_of(entries())) == sorted(FITTED)


def test_without_a_site_nothing_of_the_cluster_is_known() -> None:
    """Rows without their site have the card's clock, links and adapters."""
    for entry in load_entries(use_site=False):
        machine = entry.run.machine
        assert not entry.run.site_known
        assert machine.clock == machine.kernels.clock
        assert (machine.factors.in_node, machine.factors.cross_node) == (1.0, 1.0)


def row(group: str, stack: str, ratio: float, *, known: bool = False) -> Any:
    """Return a row of 10 s on an H100 whose measured time is `ratio` times the estimated one."""
    base = next(e.run for e in load_entries(use_site=False) if e.group == "NeMo")
    machine = replace(base.machine, stack=replace(base.machine.stack, name=stack))
    run = replace(base, machine=machine, site_known=known, measured_s=10.0)
    return Estimated(group, run, 10.0 / ratio)


def test_clusters_of_all_stacks_decide_the_level_of_a_class() -> None:
    """A slow cluster of one stack widens the interval of another, and its own scatter does not."""
    calm = [row(name, "a", 1.0 + d) for name in ("x", "y") for d in (-0.01, 0.0, 0.01) * 4]
    wild = [row("z", "b", 1.3 * math.exp(d)) for d in np.linspace(-0.5, 0.5, 25)]
    known = [row("v", "a", 1.0 + d, known=True) for d in (-0.01, 0.0, 0.01) * 8]

    alone = {c["stack"]: c for c in classes_of(calm) if not c["site_known"]}
    both = {(c["stack"], c["site_known"]): c for c in classes_of([*calm, *wild, *known])}

    assert alone["a"]["high"] < 1.02
    assert 1.29 < both["a", False]["high"] < 1.32
    assert both["a", False]["low"] == pytest.approx(alone["a"]["low"], abs=0.003)
    assert both["b", False]["high"] > 1.7
    assert both["a", True]["high"] < 1.02
    assert (both["a", False]["rows"], both["a", False]["sources"]) == (24, 2)
    # the spread of plans is within clusters
    assert both["a", False]["plan_spread"] < 0.02 < both["b", False]["plan_spread"]


def test_a_class_of_few_rows_is_as_uncertain_as_the_widest() -> None:
    """Two near rows do not show the scatter of a stack; one has none and is no class."""
    wild = [row("z", "b", math.exp(d)) for d in np.linspace(-0.5, 0.5, 25)]
    few = [row("x", "a", 1.0), row("x", "a", 1.01), row("y", "c", 1.0)]

    found = {c["stack"]: (c["low"], c["high"]) for c in classes_of([*wild, *few])}

    assert found.keys() == {"a", "b"}
    assert found["a"] == found["b"]


def test_each_source_is_judged_by_the_others() -> None:
    """All clusters of a source are held out together, and counts are of its rows."""
    near = [row(name, "a", 1.0 + d) for name in "uvwx" for d in (-0.01, 0.0, 0.01) * 4]
    # both are one source of the fit
    far = [row(name, "a", 1.4) for name in ("MPT H100", "MPT fp8") for _ in range(3)]

    (found,) = classes_left_out([*near, *far])

    assert (found.rows, found.sources, found.inside) == (54, 5, 48)
    assert "| a | 54 | 5 | 89 % |" in covered_table([found], "sources")


def test_tables_are_written_between_their_markers(tmp_path: Path) -> None:
    """Only what stands between the markers of a table changes, whatever it holds."""
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- left-out: made -->\nold\n<!-- end of left-out -->\nz\n")
    errors = {"rows": 3, "bias": -0.01, "median": 0.02, "mape": 0.03, "p90": 0.04, "coverage": 1.0}

    write_tables({"left-out": left_out_table([Case(r"A \1", errors, 0.05)])}, page)
    write_tables({"left-out": left_out_table([Case(r"A \1", errors, 0.05)])}, page)

    lines = page.read_text().splitlines()
    assert lines[0] == "a"
    assert lines[-1] == "z"
    assert lines[4] == r"| A \1 | 3 | -1.0 | 2.0 | 3.0 | 4.0 | 100 | 5.0 |"
    assert len(lines) == 7
    with pytest.raises(ValueError, match="no markers of the table 'order'"):
        write_tables({"order": ""}, page)


def test_the_readme_shows_held_out_errors_of_the_page() -> None:
    """Its rows are those of docs/concepts/accuracy.md, whose tables the fit writes."""
    head = "| left out | rows | bias | median | MAPE | p90 | in the interval | as shipped |\n"
    rows = (f"| {name} | 9 | -1.0 | 2.0 | 3.0 | 4.0 | 95 | 1.0 |" for name in make_answers._SOURCES)
    page = f"<!-- left-out: made -->\n{head}{chr(10).join(rows)}\n<!-- end of left-out -->\n"
    assert make_answers.accuracy_table(page).splitlines()[2:] == [
        f"| {name} | 9 | 2.0 % | 95 % |" for name in make_answers._SOURCES.values()
    ]
    found = make_answers.accuracy_table(
        (ROOT / "docs" / "concepts" / "accuracy.md").read_text("utf-8")
    )
    assert found in (ROOT / "README.md").read_text("utf-8")
