"""Measurement of one cell of a site; collectives and copies are measured as in `profiler.hardware`.

Two operations are specific to a site: GEMMs back to back until the clock has settled, and the host
overhead of a layer. All ranks measure both at the same time, as in training: GPUs of a node share
its power and cooling, and processes share its cores.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.documents.sidecar import Measurement
from autopar.run.model import LayerSpec
from autopar.units import format_bytes
from profiler.hardware.driver import Driver, identity, stragglers, unmeasured
from profiler.hardware.options import Cell
from profiler.hardware.run import forecast, probe_policy
from profiler.measure import Forecast, ForecastPart, HostTimer, Policy
from profiler.processes import Session
from profiler.progress import Watch
from profiler.site.options import GEMM, HOST, SiteOptions, gemm_size

# --------------------------------------------------------------------------------------------------
# Selection of repetitions.


_REPETITION_S = 0.25
"""Seconds of a repetition of GEMMs: the pauses between repetitions are a thousandth of that, too
short to cool a GPU."""
_FEWEST, _MOST_REPETITIONS = 9, 1200
_FIRST_S = 1.0
"""Seconds of a short benchmark, before the clock has settled."""
_SETTLED_SHARE = 3
"""Only the last 1/n of the samples count, because the clock has settled by then."""


def repetitions(seconds: float, operation_s: float) -> tuple[int, int]:
    """Return (repetitions, operations per repetition) that fill `seconds`, each at least 1."""
    count = int(min(max(seconds / _REPETITION_S, _FEWEST), _MOST_REPETITIONS))
    return count, max(1, round(seconds / count / operation_s))


def settled(samples_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the last third of the repetitions, shape (..., n) -> (..., n // 3 or 1)."""
    kept = max(1, samples_s.shape[-1] // _SETTLED_SHARE)
    return samples_s[..., -kept:]


def _first(samples_s: NDArray[np.float64], loops: int) -> NDArray[np.float64]:
    """Return the repetitions of the first second, at least one."""
    begun_s = np.concatenate([[0.0], np.cumsum(samples_s * loops)[:-1]])
    return samples_s[begun_s < _FIRST_S]


# --------------------------------------------------------------------------------------------------
# The measurement of a cell.


SMALL_LAYER = LayerSpec(
    num_layers=1,
    seq_length=16,
    hidden_size=64,
    num_heads=1,
    num_kv_heads=1,
    ffn_hidden_size=128,
    gated_mlp=True,
    norm_parameters_per_hidden=2,
)
"""Layer whose kernels finish before the host has launched the next ones."""
_LAYERS = 8
"""Layers in sequence: about 500 kernels; a device queues 1,024 before its host must wait."""


class SiteDriver(Driver):
    """Measures cells on this rank together with the drivers of all other ranks."""

    def __init__(
        self, session: Session, watch: Watch, policy: Policy, options: SiteOptions
    ) -> None:
        super().__init__(session, watch, policy, check=options.check)
        self._options = options

    def measure(self, cell: Cell) -> Measurement:
        """Return the measurement of a cell, equal on all ranks."""
        own = {GEMM: self._products, HOST: self._layer}
        if cell.operation not in own:
            return super().measure(cell)
        self._watch.step(cell.key)
        return self.timed(lambda: own[cell.operation](cell))

    def _products(self, cell: Cell) -> Measurement:
        """Measure GEMMs out = x w^T back to back, without synchronizing the ranks in between."""
        import torch

        session, side = self._session, gemm_size(self._options, self._session.device.type)
        needed, free = 3 * cell.size_bytes, session.free_bytes()
        if needed > free:
            return unmeasured(
                cell,
                "skipped",
                f"matrices need {format_bytes(needed)} on a rank, but "
                f"{format_bytes(free)} are free. Use a smaller --gemm-size",
            )
        # Random values: with zeros a device draws less power, and its clock stays high.
        x, w, out = (
            torch.randn(side, side, device=session.device, dtype=session.dtype) for _ in range(3)
        )

        def product() -> None:
            torch.mm(x, w.t(), out=out)

        once = self._timer.bind(product, 1)
        once()  # loads kernels and allocates workspaces
        # Only a few, so that the first second of load is measured.
        operation_s = session.largest(min(once() for _ in range(2)))
        count, loops = repetitions(self._options.gemm_seconds, operation_s)
        repetition = self._timer.bind(product, loops)
        session.barrier()
        own = []
        for _ in range(count):
            self._watch.step(cell.key)
            own.append(repetition())
        self._watch.step(cell.key)
        times_s = session.gather(own)
        medians = np.median(settled(times_s), axis=1)
        slowest = int(medians.argmax())
        return self._of_all_ranks(
            cell,
            {
                "time": settled(times_s)[slowest].tolist(),
                "first": _first(times_s[slowest], loops).tolist(),
            },
            medians,
            loops,
        )

    def _layer(self, cell: Cell) -> Measurement:
        """Measure the host time of launching a layer's kernels, without waiting for the device."""
        from profiler.model.layers.blocks import build_layer, layer_inputs
        from profiler.model.layers.sharding import Sharding
        from profiler.model.timing import Passes

        session, whole = self._session, Sharding()
        kind = {"dtype": session.dtype, "device": session.device}
        layer = build_layer(SMALL_LAYER, whole, **kind)
        passes = Passes(layer, layer_inputs(SMALL_LAYER, whole, batch=1, **kind))
        flaw = passes.rehearse("the size of a small layer", backward=True)
        # All ranks must agree, whichever rank found the flaw.
        if session.largest(0.0 if flaw is None else 1.0):
            return unmeasured(cell, "failed", flaw or "the layer's output is not finite elsewhere")
        clock = HostTimer()
        stages = [clock.bind(passes.forward, _LAYERS), clock.bind(passes.backward, _LAYERS)]

        def play() -> list[float]:
            found = []
            for repetition in stages:
                # With an empty queue the host never has to wait for free slots.
                self._timer.synchronize()
                found.append(repetition())
            self._timer.synchronize()
            passes.drop()
            return found

        # The first repetitions load kernels.
        for _ in range(self._policy.warmup):
            play()
        self._watch.step(cell.key)
        session.barrier()
        taken = np.array([play() for _ in range(self._policy.iters)])
        self._watch.step(cell.key)
        shape = (session.world_size, *taken.shape)
        times_s = session.gather(taken.ravel().tolist()).reshape(shape)
        medians = np.median(times_s.sum(axis=2), axis=1)
        forward_s, backward_s = times_s[int(medians.argmax())].T
        return self._of_all_ranks(
            cell,
            {"forward": forward_s.tolist(), "backward": backward_s.tolist()},
            medians,
            _LAYERS,
        )

    def _of_all_ranks(
        self,
        cell: Cell,
        samples_s: dict[str, list[float]],
        medians_s: NDArray[np.float64],
        loops: int,
    ) -> Measurement:
        """Return the measurement of a cell that every rank runs without communication.

        Its samples are those of the slowest rank, for which the others wait in a training step. Its
        medians are those of all ranks.
        """
        ranks = [(rank,) for rank in range(self._session.world_size)]
        return Measurement(
            **identity(cell),
            status="ok",
            samples_s=samples_s,
            loops=loops,
            worst_group=[int(medians_s.argmax())],
            group_medians_s=medians_s.tolist(),
            stragglers=stragglers(ranks, medians_s, self._session.cluster.hosts),
        )


def forecast_site(
    cells: Sequence[Cell], session: Session, watch: Watch, policy: Policy, options: SiteOptions
) -> Forecast:
    """Return the forecast of a run: collectives and copies are probed, GEMM time is an option.

    Every rank must call it with equal cells.
    """
    driver = Driver(session, watch, probe_policy(policy), check=options.check)
    own = {GEMM: options.gemm_seconds, HOST: _HOST_S}
    probed = forecast(
        [cell for cell in cells if cell.operation not in own], policy, driver, session
    )
    parts = tuple(
        ForecastPart(f"{cell.operation:<24s} {1:>9d} {'every rank':<12s} {1:>5d}", 1, own[name])
        for cell in cells
        for name in (cell.operation,)
        if name in own
    )
    return Forecast(heading=probed.heading, parts=(*parts, *probed.parts), probe_s=probed.probe_s)


_HOST_S = 2.0
"""Seconds of the host cell, imports included."""
