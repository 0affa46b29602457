"""Constants that no table of kernels determines, and their fit to published training runs.

A whole pricing of all rows takes seconds. So the fit prices each row once per node of a grid of
each constant that affects the row, and adds the changes in the logarithm. Coordinate descent then
runs on these sums. `ledger_fit` and `ledger_left_out` define which constants are fitted to which
rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.price.step import step_time
from autopar.rates.card import load_card
from autopar.rates.constants import ELEMENT_BYTES, KernelsSection
from autopar.rates.parts.operations import Machine
from autopar.rates.stack import load_stack
from autopar.records import replace
from autopar.run.architecture import Experts
from benchmarks.ledger import doubt_of, group_of, read_runs
from benchmarks.ledger_rows import Run, UnusableError, run_of

__all__ = [
    "CONSTANTS",
    "FITTED",
    "Constant",
    "Entry",
    "Sensitivity",
    "fit",
    "groups_of",
    "load_entries",
    "log_ratio",
    "misfit",
    "put",
    "ranges_around",
]

FITTED = (
    "BLOOM",
    "Korthikanti",
    "Narayanan",
    "MPT A100",
    "MPT H100",
    "MPT fp8",
    "Megatron-Bridge dense",
    "Megatron-Bridge mixtures",
    "NeMo",
    "SimuMax dense",
    "SimuMax context",
    "SimuMax mixtures",
    "torchtitan",
    "Megatron-MoE-ModelZoo",
    "Megatron-Bridge cards",
    "NeMo benchmarks dense",
    "MLPerf 5.1 dense",
    "torchao",
    "torchao eager",
    "torchtitan GB200",
)
"""Sources used by the fit; all others are only priced, and so are a separate check."""

_PRIOR_WEIGHT = 0.02
"""Weight of a prior's squared distance; errors count sqrt(rows) times their size."""
_MOST = 0.6
"""Largest |ln(estimated / measured)| that counts; beyond it, settings are not understood."""

_A100 = frozenset({"a100-40gb", "a100-80gb"})
_HOPPER = frozenset({"h100-80gb", "h200"})
_BLACKWELL = frozenset({"b200", "b300", "gb200", "gb300"})


class Entry(NamedTuple):
    """A row that can be priced."""

    line: int
    group: str
    row: Mapping[str, str]
    run: Run


class Constant(NamedTuple):
    """One fitted constant."""

    name: str
    shipped: float
    width: float
    """Standard deviation of its logarithm, around the shipped value."""
    neutral: float
    """Value assumed without any training run; `doubt` is its deviation."""
    doubt: float
    basis: str
    """Source of the neutral value."""
    touches: Callable[[Run], bool]
    put: Callable[[Machine, float], Machine]


# --------------------------------------------------------------------------------------------------
# Constants


def _section(machine: Machine, **changes: object) -> Machine:
    section = replace(machine.kernels.section, **changes)
    return replace(machine, kernels=replace(machine.kernels, section=section))


def _stack(machine: Machine, figure: str, key: str, value: float) -> Machine:
    old = getattr(machine.stack.figures, figure)
    new = replace(old, values={**old.values, key: value})
    figures = replace(machine.stack.figures, **{figure: new})
    return replace(machine, stack=replace(machine.stack, figures=figures))


def _put_clock(machine: Machine, value: float) -> Machine:
    return replace(machine, clock=value)


def _put_memory(machine: Machine, value: float) -> Machine:
    # the shares of all classes move together: they are of one memory
    shares = machine.kernels.section.memory
    scale = value / shares["elementwise"]["share"]
    scaled = {
        kind: replace(figure, values={"share": min(1.0, scale * figure["share"])})
        for kind, figure in shares.items()
    }
    return _section(machine, memory=scaled)


def _put_low_clock(machine: Machine, value: float) -> Machine:
    old = machine.kernels.section.low_precision_clock
    assert old is not None, machine.card.name
    return _section(machine, low_precision_clock=replace(old, values={"share": min(1.0, value)}))


def _put_product_clock(machine: Machine, value: float) -> Machine:
    old = machine.kernels.section.product_clock
    assert old is not None, machine.card.name
    return _section(machine, product_clock=replace(old, values={"share": min(1.0, value)}))


def _put_grouped(key: str) -> Callable[[Machine, float], Machine]:
    def put_share(machine: Machine, value: float) -> Machine:
        old = machine.kernels.section.grouped_gemm
        return _section(
            machine, grouped_gemm=replace(old, values={**old.values, key: min(1.0, value)})
        )

    return put_share


def _put_fused_grouped(machine: Machine, value: float) -> Machine:
    old = machine.kernels.section.fused_grouped_gemm
    return _section(machine, fused_grouped_gemm=replace(old, values={"share": min(1.0, value)}))


def _put_exposed(machine: Machine, value: float) -> Machine:
    return _stack(machine, "overlap", "tensor", max(0.0, 1.0 - value))


def _put_sharded(machine: Machine, value: float) -> Machine:
    return _stack(machine, "overlap", "fully_sharded", value)


def _put_host(key: str) -> Callable[[Machine, float], Machine]:
    return lambda machine, value: _stack(machine, "host", key, value)


def _mixture(run: Run) -> bool:
    return any(isinstance(block.mlp, Experts) for block in run.job.blocks)


def _measured_site(run: Run) -> bool:
    """Return True if the cluster's own clock, and with it its memory rate, are known."""
    return run.machine.clock != run.machine.kernels.clock


def _on(cards: Iterable[str]) -> Callable[[Run], bool]:
    names = frozenset(cards)
    return lambda run: run.machine.card.name in names and not _measured_site(run)


def _low_precision_on(cards: Iterable[str]) -> Callable[[Run], bool]:
    names = frozenset(cards)

    def touches(run: Run) -> bool:
        return run.machine.card.name in names and ELEMENT_BYTES[run.job.precision] < 2.0

    return touches


def _has_product_clock(run: Run) -> bool:
    """Return True for GEMMs in 16 bits or more on a card with their own clock, at no known site."""
    wide = ELEMENT_BYTES[run.job.precision] >= ELEMENT_BYTES["bf16"]
    return wide and run.machine.kernels.section.product_clock is not None


def _grouped_in(*, narrow: bool, fused: bool) -> Callable[[Run], bool]:
    def touches(run: Run) -> bool:
        low = ELEMENT_BYTES[run.job.precision] < ELEMENT_BYTES["bf16"]
        return _mixture(run) and run.job.fused_experts == fused and (fused or low == narrow)

    return touches


def _sharded_by(start: str) -> Callable[[Run], bool]:
    return lambda run: run.machine.stack.name.startswith(start) and run.job.zero == 3


def _tensor_overlap(run: Run) -> bool:
    job = run.job
    return run.machine.stack.name == "megatron-core" and job.overlap_tensor and job.tp > 1


def _mcore_mixture(run: Run) -> bool:
    return run.machine.stack.name == "megatron-core" and _mixture(run)


def _merged(run: Run) -> bool:
    return _mcore_mixture(run) and run.job.overlap_experts


def _kernels(card: str) -> KernelsSection:
    section = load_card(card).kernels
    assert section is not None, card
    return section


def _overlap(stack: str, key: str) -> float:
    return load_stack(stack).figures.overlap[key]


_LONG_LOOPS = "A100 PCIe in longer loops of GEMMs reaches .88 of short ones; cards without runs .9"
_ALL_BITS = "narrow products sustain what 16-bit ones do"
_UNKNOWN_SHARE = "half of the shorter of compute and traffic"


def _constants() -> tuple[Constant, ...]:
    found = [
        Constant(
            f"clock {name}",
            _kernels(card).clock["share"],
            width,
            0.9,
            0.06,
            _LONG_LOOPS,
            _on(cards),
            _put_clock,
        )
        for name, card, cards, width in (
            ("A100", "a100-80gb", _A100, 0.03),
            ("H100, H200", "h100-80gb", _HOPPER, 0.03),
            ("B200", "b200", {"b200"}, 0.05),
            ("GB200", "gb200", {"gb200"}, 0.04),
            ("GB300", "gb300", {"gb300"}, 0.04),
        )
    ]
    found += [
        Constant(
            f"share of HBM {name}",
            _kernels(card).memory["elementwise"]["share"],
            0.1,
            neutral,
            0.2,
            basis,
            _on(cards),
            _put_memory,
        )
        for name, card, cards, neutral, basis in (
            ("A100", "a100-80gb", _A100, 0.75, "norms .68 and softmax .77 of NeuSight's tables"),
            ("Hopper", "h100-80gb", _HOPPER, 0.65, "norms of cuDNN's tables on H200, .31 to .93"),
            (
                "Blackwell",
                "gb200",
                _BLACKWELL,
                0.55,
                "norms of cuDNN's tables on GB200 and GB300, .12 to .9",
            ),
        )
    ]
    low = _kernels("h100-80gb").low_precision_clock
    assert low is not None
    found.append(
        Constant(
            "clock of narrow products, Hopper",
            low["share"],
            0.06,
            1.0,
            0.08,
            _ALL_BITS,
            _low_precision_on(_HOPPER),
            _put_low_clock,
        )
    )
    found.append(
        Constant(
            "tensor traffic exposed, megatron-core",
            1.0 - _overlap("megatron-core", "tensor"),
            0.4,
            0.25,
            0.7,
            "sent in as many pieces as ranks, the first is not hidden: 1 of 4",
            _tensor_overlap,
            _put_exposed,
        )
    )
    found += [
        Constant(
            f"ZeRO-3 visible, {start}",
            _overlap(stack, "fully_sharded"),
            0.3,
            0.5,
            0.7,
            _UNKNOWN_SHARE,
            _sharded_by(start),
            _put_sharded,
        )
        for start, stack in (
            ("megatron-core", "megatron-core"),
            ("composer-fsdp", "composer-fsdp"),
            ("torchtitan", "torchtitan-compiled"),
        )
    ]
    product = _kernels("h100-80gb").product_clock
    assert product is not None
    found.append(
        Constant(
            "clock of 16-bit products, H100",
            product["share"],
            0.03,
            1.0,
            0.08,
            "products sustain what other kernels do",
            _has_product_clock,
            _put_product_clock,
        )
    )
    grouped = _kernels("h100-80gb").grouped_gemm
    tables = "tables of Transformer Engine on B200 and A100, beside 5 us a group"
    found += [
        Constant(
            "grouped GEMM in 16 bits",
            grouped["share"],
            0.1,
            1.0,
            0.15,
            tables,
            _grouped_in(narrow=False, fused=False),
            _put_grouped("share"),
        ),
        Constant(
            "grouped GEMM in 8 bits and fewer",
            grouped["narrow_share"],
            0.1,
            1.0,
            0.2,
            tables,
            _grouped_in(narrow=True, fused=False),
            _put_grouped("narrow_share"),
        ),
        Constant(
            "fused MLP of experts",
            _kernels("gb200").fused_grouped_gemm["share"],
            0.1,
            1.0,
            0.2,
            tables,
            _grouped_in(narrow=False, fused=True),
            _put_fused_grouped,
        ),
    ]
    host = load_stack("megatron-core").figures.host
    found += [
        Constant(name, host[key], width, neutral, doubt, basis, touches, _put_host(key))
        for name, key, width, neutral, doubt, basis, touches in (
            (
                "host seconds of experts, megatron-core",
                "experts_s",
                0.4,
                0.001,
                1.0,
                "a hundred launches of 5 to 10 us",
                _mcore_mixture,
            ),
            (
                "host seconds of each held expert, megatron-core",
                "expert_s",
                0.4,
                0.0001,
                1.0,
                "four casts in 8 bits, launched one by one with a search for the largest element",
                _mcore_mixture,
            ),
            (
                "host, merged forward and backward, megatron-core",
                "merged",
                0.2,
                1.0,
                0.3,
                "as many launches as in turn",
                _merged,
            ),
        )
    ]
    return tuple(found)


CONSTANTS = _constants()


def load_entries(*, use_site: bool = True) -> list[Entry]:
    """Return the shipped rows that can be priced; `use_site` as in `run_of`."""
    rows, settings = read_runs()
    found = []
    for line, row in rows:
        try:
            run = run_of(row, settings.get(line, {}), use_site=use_site)
        except UnusableError:
            continue
        if doubt_of(row) is None:
            found.append(Entry(line, group_of(row), row, run))
    return found


def put(run: Run, values: Sequence[float]) -> Machine:
    """Return the machine of a run with the given values of all constants that affect it."""
    machine = run.machine
    for constant, value in zip(CONSTANTS, values, strict=True):
        if constant.touches(run):
            machine = constant.put(machine, value)
    return machine


def log_ratio(run: Run, values: Sequence[float]) -> float:
    """Return ln(estimated / measured) of a run with values of the constants."""
    return math.log(step_time(put(run, values), run.job).total_s / run.measured_s)


# --------------------------------------------------------------------------------------------------
# Sums of changes


class Sensitivity:
    """ln(estimated / measured) of rows as a sum of one function of each constant.

    Each function is a line between nodes, measured with all other constants at `centre`: exact
    where only one constant differs, and near where several do.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        centre: Sequence[float],
        ranges: Sequence[tuple[float, float]],
        nodes: int,
    ) -> None:
        """Price the rows at `nodes` values of each constant; ranges: least and most, logarithms."""
        self.centre = np.log(np.asarray(centre))
        self.base = np.array([log_ratio(entry.run, centre) for entry in entries])
        self.grids: list[NDArray[np.float64]] = []
        self.rows: list[NDArray[np.intp]] = []
        self.changes: list[NDArray[np.float64]] = []
        for index, (constant, (least, most)) in enumerate(zip(CONSTANTS, ranges, strict=True)):
            own = self.centre[index]
            others = np.linspace(least, most, nodes)
            # the centre is a separate node, which is known already
            grid = np.unique(np.append(others[np.abs(others - own) > 1e-3 * (most - least)], own))
            touched = [row for row, entry in enumerate(entries) if constant.touches(entry.run)]
            changes = np.zeros((len(touched), len(grid)))
            for column, node in enumerate(grid):
                if node == own:
                    continue
                values = [*centre]
                values[index] = math.exp(node)
                for place, row in enumerate(touched):
                    changes[place, column] = log_ratio(entries[row].run, values) - self.base[row]
            self.grids.append(grid)
            self.rows.append(np.array(touched, dtype=np.intp))
            self.changes.append(changes)

    def change(self, index: int, logs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the changes of all rows (rows x values) at values of one constant."""
        grid = self.grids[index]
        found = np.zeros((len(self.base), len(logs)))
        if len(grid) > 1:
            place = np.clip(np.searchsorted(grid, logs) - 1, 0, len(grid) - 2)
            share = (logs - grid[place]) / (grid[place + 1] - grid[place])
            known = self.changes[index]
            found[self.rows[index]] = known[:, place] * (1 - share) + known[:, place + 1] * share
        return found

    def log_ratios(self, logs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ln(estimated / measured) of all rows at logarithms of all constants."""
        found = self.base.copy()
        for index, value in enumerate(logs):
            found += self.change(index, np.array([value]))[:, 0]
        return found


def ranges_around(centre: Sequence[float], widths: Sequence[float]) -> list[tuple[float, float]]:
    """Return least and most logarithm of each constant, a width to both sides."""
    return [
        (math.log(value) - width, math.log(value) + width)
        for value, width in zip(centre, widths, strict=True)
    ]


def misfit(
    groups: Mapping[str, NDArray[np.intp]], ratios: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the sum over sources of sqrt(n) (mean |ln ratio| + median |ln ratio|) / 2.

    The root lets sources of a hundred rows not outvote those of ten; the median lets a few rows
    with settings that are not understood not pull. ratios: rows x values.
    """
    sizes = np.minimum(np.abs(ratios), _MOST)
    total = np.zeros(ratios.shape[1])
    for rows in groups.values():
        own = sizes[rows]
        total += math.sqrt(len(rows)) * (own.mean(axis=0) + np.median(own, axis=0)) / 2
    return total


def fit(
    sensitivity: Sensitivity,
    groups: Mapping[str, NDArray[np.intp]],
    priors: Sequence[tuple[float, float]],
) -> NDArray[np.float64]:
    """Return the logarithms of the constants with the least misfit and distance from their priors.

    Coordinate descent, each constant over values of its whole range, then of narrower ones. priors:
    logarithm and deviation; those of constants that no row knows stay at their prior.
    """
    logs = np.clip(
        np.array([centre for centre, _ in priors]),
        [grid[0] for grid in sensitivity.grids],
        [grid[-1] for grid in sensitivity.grids],
    )
    ratios = sensitivity.log_ratios(logs)
    for share in (1.0, 0.3, 0.08, 0.02):
        for _ in range(12):
            before = logs.copy()
            for index, (centre, deviation) in enumerate(priors):
                grid = sensitivity.grids[index]
                half = share * (grid[-1] - grid[0]) / 2
                values = logs[index] + np.linspace(-half, half, 13)
                values = np.clip(values, grid[0], grid[-1])
                own = sensitivity.change(index, logs[index : index + 1])
                tried = ratios[:, None] - own + sensitivity.change(index, values)
                losses = misfit(groups, tried)
                losses += _PRIOR_WEIGHT * ((values - centre) / deviation) ** 2
                # the middle value is the current one: no move without a gain
                best = int(np.argmin(losses))
                if losses[best] < losses[6] - 1e-9:
                    logs[index], ratios = values[best], tried[:, best]
            if np.array_equal(before, logs):
                break
    return logs


def groups_of(
    entries: Sequence[Entry], wanted: Iterable[str] = FITTED
) -> dict[str, NDArray[np.intp]]:
    """Return the places of the rows of each source."""
    places: dict[str, list[int]] = {group: [] for group in wanted}
    for place, entry in enumerate(entries):
        if entry.group in places:
            places[entry.group].append(place)
    return {group: np.array(found, dtype=np.intp) for group, found in places.items() if found}
