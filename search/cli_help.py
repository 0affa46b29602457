"""The `--help` of a command, from its option table: one column of options, one of words."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

from search.cli_options import OptionRow

__all__ = ["HELP_WIDTH", "help_text"]

HELP_WIDTH = 100
_LEFT = 34
_VALUES = {"int": "N", "float": "X", "ints": "N[,N]", "text": "TEXT", "texts": "RULE"}


def help_text(usage: str, intro: str, rows: Sequence[OptionRow]) -> str:
    """Return the help of a command, options grouped by panel, at most 100 columns wide."""
    terminal = sys.stdout.isatty()
    width = min(HELP_WIDTH, shutil.get_terminal_size().columns) if terminal else HELP_WIDTH
    bold = ("\x1b[1m", "\x1b[0m") if terminal else ("", "")
    lines = [f"usage: {usage}", ""]
    for paragraph in intro.strip().split("\n\n"):
        lines += [*textwrap.wrap(paragraph, width), ""]
    if any(row.kind in ("flag", "switch") for row in rows):
        # Without numbers in the column of options, which is narrow.
        text = "Options shown without a value are flags; they also take 0 or 1 (off or on)."
        lines += [*textwrap.wrap(text, width), ""]
    for panel in dict.fromkeys(row.panel for row in rows):
        lines.append(f"{bold[0]}{panel}{bold[1]}")
        for row in rows:
            if row.panel == panel:
                lines += _option(row, max(width, 60))
        lines.append("")
    lines += textwrap.wrap(
        "--help shows this. Underscores and hyphens mean the same, and so do `--name value`, "
        "`--name=value` and `name=value`.",
        width,
    )
    return "\n".join(lines) + "\n"


def _option(row: OptionRow, width: int) -> list[str]:
    if row.kind == "switch":
        left = f"  --[no-]{row.name}"
    elif row.kind == "flag":
        left = f"  --{row.name}"
    else:
        left = f"  --{row.name} {'|'.join(row.choices) or _VALUES[row.kind]}"
    right = textwrap.wrap(row.help, width - _LEFT)
    pad = " " * _LEFT
    if len(left) + 2 > _LEFT:
        return [left, *(pad + text for text in right)]
    return [left.ljust(_LEFT) + right[0], *(pad + text for text in right[1:])]
