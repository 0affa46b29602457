"""Files of models: what is known of a computation file beyond its documented keys."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from autopar.sidecar import newest_cells, read_sidecar
from profiler.model.fits import bad_fits, fit_cells
from profiler.show.fits import show_fits
from profiler.show.frame import print_heading, print_line, print_pair
from profiler.show.kinds import kind_of

__all__ = ["has_fits", "show_model"]


def has_fits(path: Path) -> bool:
    """Return whether a file of a model is one of times with a sidecar beside it.

    Raises
    ------
    DocumentError: the sidecar is damaged.
    """
    found = kind_of(path)
    if found is None or found[0].kind != "computation":
        return False
    return read_sidecar(path, "computation") is not None


def show_model(console: Console, path: Path) -> None:
    """Print where the times of a model come from, and how well formulas go through them.

    Fits of an older sidecar, which has none, are made of its samples.
    """
    sidecar = read_sidecar(path, "computation")
    assert sidecar is not None, "the caller asks has_fits"
    print_heading(console, "times of a model" + (f": {sidecar.name}" if sidecar.name else ""))
    print_pair(console, "read from", str(path))
    print_pair(console, "source", f"{sidecar.source} ({sidecar.tool})")
    cells = [m for m in newest_cells(sidecar.runs).values() if m.status == "ok"]
    fits = sidecar.fits or fit_cells(cells)
    if not fits:
        print_line(console, "no samples are beside these times, so no fit can be shown")
    show_fits(console, fits)
    for sentence in bad_fits(fits):
        print_line(console, sentence, style="yellow")
