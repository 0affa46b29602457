"""`autopar-profile-estimate`: writes the documented files of a model and a cluster as estimates."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app", "main", "run"]

_COMMAND = "autopar-profile-estimate"

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def estimate(
    model: Annotated[
        str, typer.Option(help="Shipped name, Hugging Face config.json or model.json.")
    ],
    hardware: Annotated[str, typer.Option(help="CARD:NxG, for example h100:4x8.")],
    out: Annotated[Path, typer.Option(help="Folder that receives the documented files.")],
    precision: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    seq_length: Annotated[
        str | None, typer.Option(help="Tokens per sample: one number, or one per layer type.")
    ] = None,
    sequence_parallel: Annotated[
        bool,
        typer.Option(help="Write memory tables with and without it, or only those without."),
    ] = True,
    kernels: Annotated[
        str, typer.Option(help="eager: PyTorch operations one by one; fused: fused kernels.")
    ] = "eager",
    max_batch: Annotated[
        int, typer.Option(help="Layer times for batches 1 to this.", min=1, max=1024)
    ] = 8,
) -> None:
    """Write estimated profiles of MODEL on HARDWARE: no GPU is needed, nothing is measured."""
    # heavy imports stay out of --help
    from autopar.errors import AutoparError, OptionError
    from autopar.estimate.hardware import estimate_hardware, parse_hardware
    from autopar.estimate.model import estimate_model
    from autopar.hardware_files import write_hardware
    from autopar.model_files import write_model_profile
    from autopar.specs import load_spec

    try:
        lengths = None
        if seq_length is not None:
            try:
                lengths = [int(text) for text in seq_length.split(",")]
            except ValueError:
                raise OptionError(
                    f"--seq-length is {seq_length!r}, expected numbers such as 4096 or 512,512"
                ) from None
        if kernels not in ("eager", "fused"):
            raise OptionError(f"--kernels must be eager or fused, got {kernels!r}")
        card, num_nodes, gpus_per_node = parse_hardware(hardware)
        spec = load_spec(model, seq_length=lengths)
        cluster = estimate_hardware(card, num_nodes=num_nodes, gpus_per_node=gpus_per_node)
        with_sp, without_sp = (
            estimate_model(
                spec,
                card,
                precision=precision,
                sequence_parallel=variant,
                batches=range(1, max_batch + 1),
                kernels="eager" if kernels == "eager" else "fused",
            )
            for variant in (True, False)
        )
        paths = write_hardware(cluster, out)
        if sequence_parallel:
            paths += write_model_profile(with_sp, spec, out, other_variant=without_sp)
        else:
            paths += write_model_profile(without_sp, spec, out)
    except AutoparError as error:
        typer.echo(f"{_COMMAND}: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    except OSError as error:
        text = f"--out: {out} cannot be written ({error.strerror or error}); choose another folder"
        typer.echo(f"{_COMMAND}: {text}", err=True)
        raise typer.Exit(2) from None
    for path in paths:
        typer.echo(str(path))
    typer.echo(f"{_COMMAND}: estimated from datasheets, not measured", err=True)


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    try:
        code = app(args=list(arguments), prog_name=_COMMAND, standalone_mode=False)
    except Exception as error:
        message = getattr(error, "format_message", None)
        if not callable(message):  # only typer's own usage errors are for the user
            raise
        text = " ".join(str(message()).split()).rstrip(".")
        typer.echo(f"{_COMMAND}: {text}; see --help", err=True)
        return 2
    return code if isinstance(code, int) else 0


def main() -> None:
    """Entry point of `autopar-profile-estimate`."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
