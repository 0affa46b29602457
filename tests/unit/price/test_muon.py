"""Time of Muon: Newton-Schulz iterations of whole matrices, distributed over data-parallel ranks.

Products are counted here anew: X X^T and the product with X have 2 m^2 n FLOP, the square 2 m^3.
"""

from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import InputError
from autopar.price.job import job_of_run
from autopar.price.step import step_time
from autopar.rates.parts.operations import Machine, machine_of
from autopar.rates.parts.optimizer import orthogonalization_s
from autopar.run.job import Matrices
from autopar.run.run import Run
from autopar.run.runtime import Optimizer
from tests.runs import decoder, run_of, told
from tests.step_cases import card_named, stack_named

HIDDEN, WIDTH, HEADS, GROUPS, LAYERS = 2048, 8192, 16, 4, 8
HEAD = HIDDEN // HEADS


@pytest.fixture(scope="module")
def machine() -> Machine:
    """Return H100 with Megatron-Core."""
    return machine_of(card_named("h100-80gb"), stack_named("megatron-core"))


def muon(*, gpus: int = 1, **more: Any) -> Run:
    """Return a run of a small decoder with grouped queries, trained with Muon."""
    model = decoder(
        layers=LAYERS, hidden=HIDDEN, width=WIDTH, heads=HEADS, kv_heads=GROUPS, vocab=32000,
    )  # fmt: skip
    usual = {"micro_batch": 1, "global_batch": 32}
    return told(run_of(model, gpus=gpus, **{**usual, **more}), optimizer=Optimizer(kind="muon"))


def flop(rows: int, columns: int) -> float:
    """Return the FLOP of five iterations of a matrix."""
    m, n = min(rows, columns), max(rows, columns)
    return 5.0 * (2 * 2 * m * m * n + 2 * m**3)


def shapes_of(run: Run) -> dict[tuple[int, int], int]:
    """Return the number of matrices of all stages by shape."""
    found: dict[tuple[int, int], int] = {}
    for one in (one for stage in job_of_run(run).orthogonalized for one in stage):
        key = (one.rows, one.columns)
        found[key] = found.get(key, 0) + one.number
    return found


def test_the_matrices_are_those_of_the_layers() -> None:
    """QKV is three; embedding, head, norms and biases are updated by Adam."""
    gates = 2 if muon().model.last.gates == 2 else 1
    expected = {
        (HIDDEN, HIDDEN): 2 * LAYERS,  # Q and the output projection
        (GROUPS * HEAD, HIDDEN): 2 * LAYERS,
        (gates * WIDTH, HIDDEN): LAYERS,
        (HIDDEN, WIDTH): LAYERS,
    }
    assert shapes_of(muon()) == expected
    assert shapes_of(muon(gpus=4, pp=4)) == expected
    assert job_of_run(told(muon(), optimizer=Optimizer())).orthogonalized == ()


@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 14336), (28672, 4096), (1024, 4096)])
def test_the_time_is_that_of_the_products(shape: tuple[int, int], machine: Machine) -> None:
    """Between the peak of the card and a third of it, and equal for a transposed matrix."""
    seconds = orthogonalization_s(machine, [Matrices(*shape, 1, 1)])
    least = flop(*shape) / 989e12
    assert least < seconds < 3.5 * least
    assert seconds == orthogonalization_s(machine, [Matrices(*shape[::-1], 1, 1)])


def test_whole_matrices_are_distributed(machine: Machine) -> None:
    """No rank has less than an equal part, or less than one matrix."""
    large, small = Matrices(8192, 8192, 1, 8), Matrices(1024, 1024, 64, 8)
    alone = [orthogonalization_s(machine, [one._replace(ranks=1)]) for one in (large, small)]
    both = orthogonalization_s(machine, [large, small])
    assert both == pytest.approx(max(sum(alone) / 8, alone[0]))
    experts = small._replace(ranks=2)
    assert orthogonalization_s(machine, [large, experts]) == pytest.approx(alone[0] + alone[1] / 2)


def test_the_step_has_the_iterations_in_the_optimizer(machine: Machine) -> None:
    """Other terms are those of Adam; sharded states share the work of replicas."""
    for zero, part in ((0, 1), (1, 8)):
        run = muon(gpus=8, zero=zero)
        steps = [
            step_time(machine, job_of_run(one)).terms_s
            for one in (run, told(run, optimizer=Optimizer()))
        ]
        more = {key: steps[0][key] - steps[1][key] for key in steps[0]}
        (matrices,) = job_of_run(run).orthogonalized
        work = orthogonalization_s(machine, [one._replace(ranks=part) for one in matrices])
        assert more.pop("optimizer") == pytest.approx(work, rel=0.02)
        assert set(more.values()) == {0.0}
        assert work > sum(number * flop(*shape) for shape, number in shapes_of(run).items()) / (
            part * 989e12
        )


def test_tensor_ranks_have_no_time() -> None:
    """Their iterations depend on `--muon-tp-mode`."""
    with pytest.raises(InputError, match="muon with tp 2"):
        job_of_run(muon(gpus=8, tp=2))
