"""Site file derived from measured cells, and the record that keeps both.

Figures depend only on the measurements and the card, so a file can always be derived again from its
sidecar, for example with another card. `autopar.rates.site` defines the factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from autopar import records
from autopar.documents.sidecar import (
    SIDECAR_VERSION,
    Measurement,
    Run,
    Sidecar,
    counting_runs,
    newest,
)
from autopar.errors import InputError
from autopar.rates.card import Card
from autopar.rates.constants import ELEMENT_BYTES
from autopar.rates.measured import OPERATIONS, bus_bytes_per_s
from autopar.rates.site import (
    FORMAT,
    CollectiveTime,
    fit_factors,
    gemm_flop,
    relative_gemm_rate,
)
from autopar.statistics import summarize
from autopar.units import format_list
from profiler.environment import Metadata, RankInfo, machine_metadata
from profiler.hardware.options import Cluster
from profiler.hardware.record import ClusterRecord
from profiler.record import Content, DocumentFile
from profiler.site.options import GEMM, HOST, MEMCOPY, SiteOptions

# --------------------------------------------------------------------------------------------------
# The figures.


_SLOW = 1.1
"""Time of a rank's GEMMs over the median rank's above which the rank is reported as slow."""


class SiteDescription(records.Record):
    """Content of a site file that is not measured."""

    name: str
    card: Card | None
    card_name: str | None
    """Name of the card, from the catalog or the user; None if the card is unknown."""
    adapter_bytes_per_s: float | None
    cluster: Cluster
    device: str
    torch: str
    dtype: str
    synthetic: bool
    """True if several ranks share a GPU, so that no figure describes a real machine."""


def collective_times(
    measurements: Iterable[Measurement], cluster: Cluster
) -> tuple[CollectiveTime, ...]:
    """Return the median times of all measured collectives, by group, operation and size."""
    rows = [
        CollectiveTime(
            operation=m.operation,  # type: ignore[arg-type]  # one of these is what is left
            ranks=m.group_size,
            nodes=len({cluster.hosts[rank] for rank in m.worst_group}),
            size_bytes=float(m.size_bytes),
            time_s=summarize(m.samples_s["time"]).median_s,
        )
        for m in measurements
        if m.status == "ok" and m.operation not in (GEMM, MEMCOPY, HOST)
    ]
    order = list(OPERATIONS)
    return tuple(
        sorted(rows, key=lambda r: (r.nodes, r.ranks, order.index(r.operation), r.size_bytes))
    )


def figures(
    measurements: Mapping[str, Measurement], asked: SiteDescription
) -> tuple[dict[str, Any], list[str]]:
    """Return the content of the site file, and notes on missing or unusual values."""
    by_name = {m.operation: m for m in measurements.values() if m.status == "ok"}
    notes = [] if asked.card is not None else [_NO_CARD]
    source = (
        f"measured by `torchrun -m profiler.site` on {asked.cluster.num_nodes} x "
        f"{asked.cluster.gpus_per_node} {asked.device}"
    )
    quality = "nominal" if asked.synthetic else "measured"
    if asked.synthetic:
        source = (
            f"synthetic: several ranks share one GPU, so rates are not those of a machine; {source}"
        )

    def entry(value: float, spread: float) -> dict[str, Any]:
        # Six digits are well below the difference between two runs.
        return {
            "value": float(f"{value:.6g}"),
            "quality": quality,
            "source": source,
            "spread": float(f"{min(spread, 10.0):.3g}"),
        }

    data: dict[str, Any] = {"format": FORMAT, "version": 1, "name": asked.name}
    if asked.card_name is not None:
        data["card"] = asked.card_name
    data["device"] = asked.device
    data["gpus_per_node"] = asked.cluster.gpus_per_node
    data["num_nodes"] = asked.cluster.num_nodes
    if GEMM in by_name:
        notes += _put_products(data, by_name[GEMM], asked, entry)
    if MEMCOPY in by_name:
        m = by_name[MEMCOPY]
        rate = bus_bytes_per_s(MEMCOPY, 1, m.size_bytes, summarize(m.samples_s["time"]).median_s)
        data["copy_bytes_per_s"] = entry(rate, _apart(m))
        if asked.card is not None:
            data["memory_share"] = entry(rate / asked.card.memory_bytes_per_s, _apart(m))
    times = collective_times(measurements.values(), asked.cluster)
    if asked.card is not None:
        found = fit_factors(
            asked.card,
            times,
            gpus_per_node=asked.cluster.gpus_per_node,
            adapter_bytes_per_s=asked.adapter_bytes_per_s,
        )
        for key, factor in zip(("in_node", "cross_node"), found, strict=True):
            if factor is not None:
                data[key] = entry(factor.value, factor.spread)
        if times and found == (None, None):
            notes.append(_NO_LARGE)
    if asked.adapter_bytes_per_s is not None:
        data["adapter_bytes_per_s"] = {
            "value": asked.adapter_bytes_per_s,
            "quality": "nominal",
            "source": "--adapter of `torchrun -m profiler.site`",
        }
    if HOST in by_name:
        m = by_name[HOST]
        data["host"] = {
            **{
                f"{which}_s": entry(
                    summarize(m.samples_s[which]).median_s, _spread(m.samples_s[which])
                )
                for which in ("forward", "backward")
            },
            "torch": asked.torch,
        }
    if times:
        data["collectives"] = [
            {
                "operation": row.operation,
                "ranks": row.ranks,
                "nodes": row.nodes,
                "size_bytes": row.size_bytes,
                "time_s": float(f"{row.time_s:.6g}"),
            }
            for row in times
        ]
    return data, notes


_NO_CARD = (
    "no card of this device is known: the file has rates and times, but no "
    "factors. Add them with --card NAME --resume"
)
_NO_LARGE = (
    "no collective of 16M or more was measured: no network factor. Add it with "
    "--resume --sizes 16M,128M"
)


def _put_products(
    data: dict[str, Any], m: Measurement, asked: SiteDescription, entry: Any
) -> list[str]:
    """Add GEMM rate and clock to `data`; return notes."""
    side = math.isqrt(round(float(m.size_bytes) / ELEMENT_BYTES[asked.dtype]))
    notes = []
    rate = gemm_flop(side) / summarize(m.samples_s["time"]).median_s
    first = gemm_flop(side) / summarize(m.samples_s["first"]).median_s
    data["gemm"] = {
        "flop_per_s": entry(rate, _apart(m)),
        "first_flop_per_s": entry(first, _spread(m.samples_s["first"])),
        "size": side,
        "dtype": asked.dtype,
    }
    if asked.card is not None:
        try:
            clock = relative_gemm_rate(asked.card, rate, side, asked.dtype)
        except InputError as error:
            notes.append(f"no clock: {error}")
        else:
            data["clock"] = entry(clock, _apart(m))
    normal = float(np.median(m.group_medians_s))
    slow = [rank for rank, took in enumerate(m.group_medians_s) if took > _SLOW * normal]
    if slow:
        share = normal / max(m.group_medians_s)
        notes.append(
            f"GEMMs are slow on rank{'s' if len(slow) > 1 else ''} "
            f"{format_list(slow)}: {share:.2f} of the median rank's rate, for "
            "which all others wait in a training step"
        )
    return notes


def _spread(samples_s: Sequence[float]) -> float:
    """Return the 90 % quantile of the samples' relative deviation from their median."""
    found = np.asarray(samples_s)
    return float(np.quantile(np.abs(found / np.median(found) - 1.0), 0.9))


def _apart(m: Measurement) -> float:
    """Return the larger spread: that of the slowest rank's samples, or that between ranks."""
    medians = np.asarray(m.group_medians_s)
    # The figure is that of the slowest rank, so compare it with the faster ones.
    ranks = float(np.quantile(1.0 - medians / medians.max(), 0.9))
    return max(_spread(m.samples_s["time"]), ranks)


# --------------------------------------------------------------------------------------------------
# The record.


def site_metadata(
    infos: Sequence[RankInfo], argv: Sequence[str], options: SiteOptions, **in_use: Any
) -> Metadata:
    """Return the metadata of a run.

    in_use : values in use, after options and defaults are resolved.
    """
    command = ["torchrun", "...", "-m", "profiler.site", *argv]
    return {
        **machine_metadata(infos, command, folder=None if options.host_names else options.out),
        "gemm_seconds": options.gemm_seconds,
        **in_use,
    }


def site_path(out: Path, name: str) -> Path:
    """Return the path of a site file in a folder."""
    return out / f"site_{name}.json"


class SiteRecord(ClusterRecord):
    """Measurements of a site, in its file and sidecar."""

    OWN_ROWS: ClassVar[Mapping[str, str]] = {
        "gemm_size": "rows of the matrices",
        "gemm_seconds": "seconds of GEMMs",
    }

    def __init__(self, options: SiteOptions, metadata: Metadata, asked: SiteDescription) -> None:
        """Open the record of a site; raises the errors of `Record`."""
        self.path = site_path(options.out, asked.name)
        self._site = asked
        super().__init__(
            options.out,
            {"site": self.path},
            metadata,
            cluster=asked.cluster,
            options=options,
            asked=["site"],
        )

    def _before(self, file: DocumentFile) -> Sequence[Run]:
        return [run for run in file.earlier if run.id is not None]

    @property
    def measurements(self) -> dict[str, Measurement]:
        """Current measurements by cell key, those of earlier runs included."""
        return newest(m for run in counting_runs(self._runs()) for m in run.measurements)

    def derived(self) -> tuple[dict[str, Any], list[str]]:
        """Return the current content of the site file, and notes on it."""
        return figures(self.measurements, self._site)

    def _runs(self) -> list[Run]:
        (file,) = self._asked
        return [*self._before(file), self._own_run]

    def _contents(self, measurement: Measurement | None = None) -> Iterator[Content]:
        (file,) = self._asked
        data, _ = self.derived()
        hosts = self._run.metadata.get("hosts")
        yield Content(
            file,
            # Without a measured cell there is no figure.
            data if any(m.status == "ok" for m in self.measurements.values()) else None,
            Sidecar(
                version=SIDECAR_VERSION,
                document="site",
                unit="s",
                source=f"measured by `{self._run.metadata.get('command')}` on {hosts}",
                synthetic=self._site.synthetic,
                name=self._site.name,
                runs=self._runs(),
            ),
        )
