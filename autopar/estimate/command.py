"""`autopar-profile-estimate`: writes the documented files of a model and a cluster as estimates."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from autopar.command.run import guarded, one_line
from autopar.errors import OptionError

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
    from autopar.documents.hardware import write_hardware
    from autopar.documents.model import write_model_profile
    from autopar.documents.spec import load_spec
    from autopar.estimate.card import estimate_hardware, parse_hardware
    from autopar.estimate.model import estimate_model

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
    try:
        paths = write_hardware(cluster, out)
        if sequence_parallel:
            paths += write_model_profile(with_sp, spec, out, other_variant=without_sp)
        else:
            paths += write_model_profile(without_sp, spec, out)
    except OSError as error:
        raise OptionError(
            f"--out: {out} cannot be written ({error.strerror or error}); choose another folder"
        ) from None
    for path in paths:
        typer.echo(str(path))
    _talk("estimated from datasheets, not measured")


def _talk(text: str) -> None:
    typer.echo(f"{_COMMAND}: {one_line(text)}", err=True)


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    return guarded(
        lambda: app(args=list(arguments), prog_name=_COMMAND, standalone_mode=False), _talk
    )


def main() -> None:
    """Entry point of `autopar-profile-estimate`."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
