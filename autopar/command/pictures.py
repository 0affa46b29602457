"""Pictures of commands, PNG or SVG, in one style; matplotlib is optional."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autopar.errors import InstallError, OptionError

__all__ = [
    "COLOURS",
    "GRID",
    "MARKERS",
    "QUIET",
    "drawn",
    "require_matplotlib",
    "save_figure",
]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555", "#000000")
"""Okabe and Ito's palette, which the colour-blind can tell apart."""
MARKERS = "os^Dvph*"
GRID = "#dddddd"
QUIET = "#555555"
_STYLE = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "autopar",  # the same numbers give the same file
    "svg.fonttype": "none",
}


def require_matplotlib(option: str) -> None:
    """Raise InstallError, which names the option, where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InstallError(
            f"{option} needs matplotlib, which is not installed; `pip install 'autopar[plot]'`"
        )


@contextlib.contextmanager
def drawn(option: str) -> Iterator[Any]:
    """Give the class of figures, and the style in which they are made and saved."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        require_matplotlib(option)
        raise  # it is there and does not work
    with mpl.rc_context(_STYLE):
        yield Figure


def save_figure(figure: Any, path: Path, option: str) -> None:
    """Write a figure in the format of its suffix.

    Raises
    ------
    OptionError: the file cannot be written.
    """
    content = io.BytesIO()
    kind = path.suffix.lower().removeprefix(".")
    undated = {"Date": None} if kind == "svg" else None
    figure.savefig(content, format=kind, dpi=130, metadata=undated)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.getvalue())
    except OSError as error:
        raise OptionError(
            f"{option}: {path} cannot be written ({error.strerror or error}); choose another file"
        ) from None
