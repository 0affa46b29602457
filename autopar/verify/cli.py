"""`autopar-verify`: are this machine's plans as fast as predicted, and in that order?"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from autopar.commands import guarded, one_line
from autopar.errors import OptionError

__all__ = ["app", "main", "run"]

_COMMAND = "autopar-verify"
_WHAT, _HOW, _FILES = "What to verify", "How to measure", "Files"

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
)


def _option(text: str, panel: str, metavar: str | None = None) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, metavar=metavar)


@app.command()
def command(
    model: Annotated[
        str | None,
        _option(
            "Shipped name or model file; without it a small model that a CPU runs.", _WHAT, "MODEL"
        ),
    ] = None,
    layers: Annotated[
        str | None, _option("Layers that are left of the model: 4, or 2,2.", _WHAT, "K")
    ] = None,
    seq: Annotated[int | None, _option("Tokens of a sample; the model's own.", _WHAT, "N")] = None,
    nproc: Annotated[int, _option("Ranks, all on this machine.", _WHAT, "N")] = 2,
    batch: Annotated[int, _option("Global batch of a step.", _WHAT, "N")] = 8,
    plans: Annotated[int, _option("Best plans of the search that are run.", _WHAT, "K")] = 4,
    contrast: Annotated[
        int, _option("Plans beside them that differ in kind, for a range of times.", _WHAT, "K")
    ] = 8,
    memory_constraint: Annotated[
        float | None, _option("Memory of a rank for the search.", _WHAT, "GIB")
    ] = None,
    repeats: Annotated[
        int, _option("Rounds; each starts every plan once, in turn.", _HOW, "R")
    ] = 3,
    steps: Annotated[int, _option("Timed steps of a start.", _HOW, "N")] = 5,
    device: Annotated[
        str, _option("auto: GPUs where torch finds one for every rank.", _HOW, "auto|cuda|cpu")
    ] = "auto",
    precision: Annotated[
        str, _option("auto: bf16 on GPUs, fp32 on CPUs.", _HOW, "auto|bf16|fp32")
    ] = "auto",
    work: Annotated[
        Path, _option("Folder of everything that is measured and found.", _FILES, "DIR")
    ] = Path("verify"),
    resume: Annotated[
        bool, _option("Keep what DIR has of the same question; otherwise begin again.", _FILES)
    ] = True,
    hardware: Annotated[
        str | None, _option("Measured hardware files; otherwise measured quickly.", _FILES, "DIR")
    ] = None,
    profiles: Annotated[
        str | None, _option("Measured files of the model; otherwise measured.", _FILES, "DIR")
    ] = None,
    json_path: Annotated[
        str | None,
        typer.Option(
            "--json",
            help="Write the result to a path too, or - for stdout alone.",
            rich_help_panel=_FILES,
            metavar="FILE",
        ),
    ] = None,
    dry_run: Annotated[bool, _option("Print the commands; run nothing.", _FILES)] = False,
) -> None:
    """Profile this machine, search, run the best plans and others, and compare with predictions.

    Writes DIR/calibration.json, which autopar-search --calibration applies.
    Needs torch; without options it takes a few minutes on two CPU cores.
    """
    # heavy imports stay out of --help
    from autopar.verify.options import Device, VerifyOptions, checked_options
    from autopar.verify.run import planned_commands, verify

    for name, text, choices in (
        ("--device", device, ("auto", "cuda", "cpu")),
        ("--precision", precision, ("auto", "bf16", "fp32")),
    ):
        if text not in choices:
            raise OptionError(f"{name}: expected {', '.join(choices)}, got {text!r}")
    options = checked_options(
        VerifyOptions(
            model=model,
            layers=layers,
            seq_length=seq,
            nproc=nproc,
            batch=batch,
            plans=plans,
            contrast=contrast,
            repeats=repeats,
            steps=steps,
            work=work,
            resume=resume,
            device=None if device == "auto" else cast("Device", device),
            precision=None if precision == "auto" else cast('Literal["fp32", "bf16"]', precision),
            hardware=hardware,
            profiles=profiles,
            memory_constraint=memory_constraint,
            json=json_path,
            dry_run=dry_run,
        )
    )
    if json_path is not None and json_path != "-":
        _check_writable(json_path)
    if dry_run:
        for line in planned_commands(options):
            sys.stdout.write(line + "\n")
        return
    from autopar.console import make_console
    from autopar.verify.documents import verify_document
    from autopar.verify.report import show_verification

    found = verify(options, _talk)
    if json_path != "-":
        show_verification(
            make_console(sys.stdout),
            found.subject,
            found.comparison,
            found.calibrated,
            found.calibration_path,
            found.notes,
        )
    document = verify_document(
        options,
        found.subject,
        found.comparison,
        found.calibrated,
        found.calibration_path,
        found.notes,
    )
    if json_path is not None:
        _write(json_path, document)


def _check_writable(path: str) -> None:
    """Raise an OptionError before minutes of measuring, where the result could not be written."""
    folder = next(parent for parent in Path(path).absolute().parents if parent.exists())
    if not folder.is_dir() or Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise OptionError(
            f"--json {path}: the file cannot be written; choose another path, or - for stdout"
        )


def _write(path: str, document: dict[str, Any]) -> None:
    from autopar.jsonio import write_json

    if path == "-":
        sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
        return
    try:
        write_json(Path(path), document, number_rows=True)
    except OSError as error:
        raise OptionError(
            f"--json {path}: the file cannot be written ({error.strerror or error}); choose "
            "another path, or - for stdout"
        ) from None


def _talk(text: str) -> None:
    typer.echo(f"{_COMMAND}: {one_line(text)}", err=True)


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    return guarded(
        lambda: app(args=list(arguments), prog_name=_COMMAND, standalone_mode=False), _talk
    )


def main() -> None:
    """Entry point of `autopar-verify`."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
