"""`autopar-profile-estimate`: write estimated profiles of a model and a cluster."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autopar.command.fields import make, option, read_values, rows_of
from autopar.command.options import Command
from autopar.command.run import say_kept, visible
from autopar.documents.catalog import shipped_model, spelled_hardware
from autopar.errors import OptionError
from autopar.output import write_files
from autopar.records import replace
from autopar.run.model import ModelProfile, refuse_hybrid

_WHAT, _HOW = "What to estimate", "How"


@dataclass(frozen=True, kw_only=True)
class EstimatedFiles:
    """Options of `autopar-profile-estimate`: the files to estimate and their folder."""

    model: str = option(
        help="shipped name, Hugging Face config.json or model.json",
        panel=_WHAT,
        parse=shipped_model,
    )
    hardware: str = option(
        help="GPUs, such as h100:4x8 (4 nodes of 8 GPUs)",
        panel=_WHAT,
        metavar="CARD:NODESxGPUS",
        parse=spelled_hardware,
    )
    out: Path = option(help="folder of the written files", panel=_WHAT, metavar="DIR")
    precision: str = option("bf16", help="bf16, fp16 or fp32", panel=_HOW, metavar="bf16|fp16|fp32")
    seq_length: str | None = option(
        None,
        help="tokens per sample: one number, or one per layer type",
        panel=_WHAT,
        metavar="N[,N]",
    )
    sequence_parallel: bool = option(
        True, help="write memory tables with and without sequence parallelism", panel=_HOW
    )
    kernels: Literal["eager", "fused"] | None = option(
        None,
        help="saved activations of plain PyTorch operations or of fused kernels",
        panel=_HOW,
        shown="eager",
    )
    stack: str | None = option(
        None,
        help="software stack of the estimates (`autopar stacks`)",
        panel=_HOW,
        shown="from --kernels",
    )
    site: str | None = option(
        None, help="measured cluster (`autopar sites`)", panel=_HOW, metavar="NAME|FILE"
    )
    max_batch: int = option(
        8, help="largest batch of the layer times", panel=_HOW, low=1, high=1024
    )


COMMAND = Command(
    name="autopar-profile-estimate",
    fills=(EstimatedFiles,),
    panels=(_WHAT, _HOW),
    intro="""Write estimated profiles of a model on a cluster, without a GPU or a measurement.

autopar-search reads these files in place of measured ones.
""",
)


def _execute(raw: dict[str, Any]) -> int:
    # Heavy imports are deferred so that --help is fast.
    from autopar.documents.hardware import write_hardware
    from autopar.documents.model import write_model_profile
    from autopar.documents.spec import load_spec
    from autopar.rates.card import estimate_hardware, parse_hardware
    from autopar.rates.model import STACKS, estimate_model
    from autopar.rates.site import load_site
    from autopar.rates.stack import load_stack

    asked = make(EstimatedFiles, read_values(rows_of(EstimatedFiles), raw))
    out, lengths = asked.out, None
    if asked.seq_length is not None:
        if not re.fullmatch("[0-9]{1,9}(,[0-9]{1,9})*", asked.seq_length):
            raise OptionError(
                f"--seq-length {asked.seq_length!r}: expected numbers such as 4096 or 512,512"
            )
        lengths = [int(text) for text in asked.seq_length.split(",")]
    card, num_nodes, gpus_per_node = parse_hardware(asked.hardware)
    spec = refuse_hybrid(load_spec(asked.model, seq_length=lengths), "estimate-profiles")
    site = None if asked.site is None else load_site(asked.site)
    if asked.stack is not None and asked.kernels is not None:
        raise OptionError(
            "--kernels cannot be combined with --stack, which defines the kernels",
            remedy=f"Use --kernels {asked.kernels} or --stack {asked.stack}",
        )
    kept = asked.kernels or "eager"
    trainer = load_stack(asked.stack or STACKS[kept])
    cluster = estimate_hardware(
        card, num_nodes=num_nodes, gpus_per_node=gpus_per_node, stack=trainer, site=site
    )
    # Galvatron's memory file and its sidecar contain both variants.
    with_sp, without_sp = (
        estimate_model(
            spec,
            card,
            precision=asked.precision,
            sequence_parallel=variant,
            batches=range(1, asked.max_batch + 1),
            kernels=kept,
            stack=asked.stack,
            site=site,
        )
        for variant in (True, False)
    )
    try:
        # All files are written or none; earlier measured files in the folder are kept aside.
        with tempfile.TemporaryDirectory(prefix="autopar-") as made:
            written = write_hardware(cluster, made)
            if asked.sequence_parallel:
                both = _with_layers_of(with_sp, without_sp)
                written += write_model_profile(both, spec, made, other_variant=without_sp)
            else:
                written += write_model_profile(without_sp, spec, made)
            texts = {path.relative_to(made): path.read_bytes() for path in _files_below(made)}
        paths = [out / path.relative_to(made) for path in written]
        files = {out / name: content for name, content in texts.items()}
        write_files(files, aside=say_kept(COMMAND.name))
    except OSError as error:
        raise OptionError(
            f"--out {out}: cannot be written ({error.strerror or error})",
            remedy="Use another folder",
        ) from None
    for path in paths:
        sys.stdout.write(visible(f"{path}\n"))
    sys.stdout.flush()
    COMMAND.warn("estimated from a card and a software stack, not measured")
    return 0


def _files_below(folder: str) -> list[Path]:
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def _with_layers_of(profile: ModelProfile, other: ModelProfile) -> ModelProfile:
    """Return `profile` with the layer times of `other` without sequence parallelism added."""
    layers = tuple(
        replace(
            layer,
            sharded_times=(
                *layer.sharded_times,
                *(cell for cell in more.sharded_times if cell.kind == "tp"),
            ),
        )
        for layer, more in zip(profile.layers, other.layers, strict=True)
    )
    return replace(profile, layers=layers)


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    return COMMAND.run(arguments, _execute)
