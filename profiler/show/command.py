"""`profile-show`: show, compare and validate measured, estimated and published profiles."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from autopar.command.fields import json_option, make, option, read_values, rows_of, validate
from autopar.command.options import Command
from autopar.command.run import say_kept
from autopar.errors import FAILED, InputError, OptionError

if TYPE_CHECKING:
    from autopar.documents.hardware import BandwidthUnit
    from profiler.show.read import Folder

_WHAT, _DIFF, _PICTURES = "What to show", "Comparison", "Pictures"
_WIDTH = 80
"""Width of the tables without a terminal, columns."""


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """Options of `profile-show`."""

    PANEL: ClassVar[str] = _WHAT

    path: Path = option(help="profile folder, or one file of it", positional=True, metavar="DIR")
    validate: bool = option(False, help="list errors and suspicious values")
    bandwidth_unit: Literal["GB/s", "MiB/ms"] | None = option(
        None, help="unit of bandwidths in files without a sidecar"
    )
    diff: Path | None = option(
        None,
        help="compare with the older profile OTHER",
        panel=_DIFF,
        metavar="OTHER",
    )
    threshold: float = option(
        0.05, help="smallest relative change to report, 0.05 is 5 %", panel=_DIFF
    )
    anyway: bool = option(
        False, help="compare profiles of different devices or settings too", panel=_DIFF
    )
    plot: Path | None = option(
        None, help="write the curves to FILE.png or FILE.svg", panel=_PICTURES, metavar="FILE"
    )
    curves: Literal["time", "bandwidth", "none"] = option(
        "time", help="plotted quantity over message size", panel=_PICTURES
    )

    json: str | None = json_option("Answer")

    def __post_init__(self) -> None:
        validate(self)
        if self.diff is not None and self.validate:
            raise OptionError(
                "--diff cannot be combined with --validate", remedy="Remove one of them"
            )
        if self.plot is not None and (self.diff is not None or self.validate):
            raise OptionError(
                "--plot cannot be combined with --diff or --validate", remedy="Remove one of them"
            )
        if not 0.0 <= self.threshold < 10.0:
            raise OptionError(
                f"--threshold {self.threshold:g}: expected a fraction such as 0.05 for 5 %"
            )
        if self.anyway and self.diff is None:
            raise OptionError("--anyway needs --diff OTHER")


COMMAND = Command(
    name="profile-show",
    usage="DIR [OPTIONS]",
    fills=(ShowOptions,),
    panels=(_WHAT, _DIFF, _PICTURES, "Answer"),
    intro="""Print the profiles in DIR: machine, tables, curves and failed measurements.

DIR contains hardware files of one or several cluster shapes, with or without sidecars, or the
layer times that `profile-model` measured. --validate also reads memory files.

Exit codes: 0 done; 1 --diff found regressions, --validate found errors, or matplotlib is missing;
2 invalid input, or two profiles that cannot be compared.
""",
)


def _execute(raw: dict[str, Any]) -> int:
    asked = make(ShowOptions, read_values(rows_of(ShowOptions), raw))
    if asked.diff is not None:
        return _diff(asked, asked.diff)
    if asked.validate:
        return _validate(asked)
    return _show(asked)


def _answer(asked: ShowOptions, document: Mapping[str, Any], exit_code: int = 0) -> bool:
    """Write the answer of `--json`; return True if tables are to be printed as well."""
    from autopar.command.show import write_result

    return write_result(asked.json, document, exit_code, command=COMMAND.name)


def _check_unit(unit: BandwidthUnit | None, *folders: Folder) -> None:
    """Raise OptionError for a unit that no file was read in, since all sidecars specify another."""
    files = [file for f in folders for p in f.profiles for file in p.files]
    bandwidths = [file for file in files if file.kind in ("allreduce", "p2p")]
    if unit is None or not bandwidths or any(file.unit == unit for file in bandwidths):
        return
    first = bandwidths[0]
    raise OptionError(
        f"--bandwidth-unit is {unit}, but the sidecar of {first.path} has {first.unit}",
        remedy="Remove --bandwidth-unit",
    )


def _load(path: Path, unit: BandwidthUnit | None, *, models: bool = False) -> Folder:
    """Return the profiles at a path.

    models : True to include model files with measured times.
    """
    from profiler.show.read import load_folder
    from profiler.show.tables import has_fits

    folder = load_folder(path, unit)
    others = [file for file in folder.model_files if not (models and has_fits(file))]
    if others:
        names = ", ".join(file.name for file in others[:4])
        if not folder.profiles and len(others) == len(folder.model_files):
            shown = "times of models are shown where they have a sidecar, and" if models else ""
            raise InputError(
                f"{path}: only profiles of models found ({names})",
                remedy=(
                    f"{shown} Use a folder that `torchrun -m "
                    f"profiler.hardware`{' or `profile-model`' if models else ''} "
                    "wrote for --diff; --validate reads all"
                ),
            )
        COMMAND.warn(f"profiles of models are not printed: {names}")
    if folder.problems:
        first, more = folder.problems[0], len(folder.problems) - 1
        if more:
            COMMAND.warn(f"{more} more error{'s' if more > 1 else ''}; --validate lists all")
        raise first
    return folder


def _show(asked: ShowOptions) -> int:
    from autopar.command.console import make_console
    from profiler.show.pictures import check_suffix, save_picture
    from profiler.show.read import folder_document
    from profiler.show.tables import has_fits, show_folder, show_model

    path, unit, plot = asked.path, asked.bandwidth_unit, asked.plot
    if plot is not None:
        check_suffix(plot)
    folder = _load(path, unit, models=True)
    _check_unit(unit, folder)
    if plot is not None:
        save_picture(folder, plot, say_kept(COMMAND.name))
        COMMAND.warn(f"wrote {plot}")
    if not _answer(asked, folder_document(folder)):
        return 0
    console = make_console(sys.stdout, _WIDTH)
    show_folder(console, folder, None if asked.curves == "none" else asked.curves)
    for file in folder.model_files:
        if has_fits(file):
            # The table of fits has nine columns.
            show_model(make_console(sys.stdout), file)
    return 0


def _diff(asked: ShowOptions, other: Path) -> int:
    from autopar.command.console import make_console
    from profiler.show.checks import (
        circumstances,
        compare,
        comparison_document,
        obstacles,
        pairs,
    )
    from profiler.show.tables import show_comparison

    path, unit, threshold, anyway = asked.path, asked.bandwidth_unit, asked.threshold, asked.anyway
    new, old = _load(path, unit), _load(other, unit)
    _check_unit(unit, new, old)
    found = pairs(old, new, anyway=anyway)
    if not found:
        shapes = (", ".join(p.title for p in folder.profiles) for folder in (old, new))
        raise InputError(
            f"{other} contains {next(shapes)}, but {path} contains {next(shapes)}: they "
            "cannot be compared",
            remedy="Compare them with --anyway"
            if len(old.profiles) == len(new.profiles) == 1
            else None,
        )
    reasons = [reason for pair in found for reason in obstacles(*pair)]
    for reason in reasons if anyway else ():
        COMMAND.warn(f"not comparable: {reason}")
    if reasons and not anyway:
        raise InputError(
            f"{path} and {other} are not comparable: {'; '.join(dict.fromkeys(reasons))}",
            remedy="Compare them with --anyway",
        )
    if not all(a.sidecars or b.sidecars for a, b in found):
        COMMAND.warn("neither has a sidecar, so their machines are unknown")
    compared = [(a, b, compare(a, b, threshold)) for a, b in found]
    regressions = sum(comparison.count("regression") for _, _, comparison in compared)
    exit_code = FAILED if regressions else 0
    left = [p.title for p in new.profiles if all(p is not b for _, b in found)]
    document = {
        "profiles": [comparison_document(b.title, comparison) for _, b, comparison in compared],
        "without_counterpart": left,
    }
    shown = _answer(asked, document, exit_code)
    console = make_console(sys.stdout, _WIDTH)
    for a, b, comparison in compared if shown else ():
        show_comparison(
            console,
            comparison,
            title=f"{b.title}: {path} (new) against {other} (old)",
            threshold=threshold,
            circumstances=circumstances(a, b),
        )
    if left:
        COMMAND.warn(f"{other} has no counterpart of {', '.join(left)}")
    return exit_code


def _validate(asked: ShowOptions) -> int:
    from autopar.command.console import make_console
    from profiler.show.checks import validate
    from profiler.show.read import load_folder
    from profiler.show.tables import show_findings

    folder = load_folder(asked.path, asked.bandwidth_unit)
    _check_unit(asked.bandwidth_unit, folder)
    findings = validate(folder)
    files = {file.path for profile in folder.profiles for file in profile.files}
    files |= set(folder.model_files)
    exit_code = FAILED if findings else 0
    document = {
        "num_files": len(files),
        "findings": [{"severity": one.severity, "sentence": one.sentence} for one in findings],
    }
    if _answer(asked, document, exit_code):
        show_findings(make_console(sys.stdout, _WIDTH), findings, len(files))
    return exit_code


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    return COMMAND.run(arguments, _execute)
