"""`profile-model`: measures a model and writes the documented computation and memory files."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from autopar.errors import AutoparError
from profiler.model.options import ModelOptions
from profiler.model.parse import build_options
from profiler.model.spellings import translate

__all__ = ["app", "main", "run"]

_COMMAND = "profile-model"
_DEBUG_VARIABLE = "AUTOPAR_DEBUG"
_INTERRUPTED = 130
_WHAT, _SIZES, _HOW, _FILES = "What to profile", "Sizes", "How to measure", "Files"
_DOCUMENTED = "Documented spellings"

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
)


@app.command()
def profile(
    model: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_WHAT,
            metavar="MODEL",
            help="Shipped name, config.json, model.json, hf:NAME, or py:package.module:factory.",
        ),
    ] = None,
    profile_type: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_WHAT,
            metavar="computation|memory|all",
            help="Which of the two files; all, but memory alone with --source exact.",
            show_default=False,
        ),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            rich_help_panel=_WHAT,
            metavar="static|batch|sequence",
            help="One size; a range of batch sizes; a range of sequence lengths.",
        ),
    ] = "static",
    source: Annotated[
        str,
        typer.Option(
            rich_help_panel=_WHAT,
            metavar="auto|exact|device",
            help="auto: count memory without a device, take times on one; exact: memory only; "
            "device: measure memory too.",
        ),
    ] = "auto",
    unit: Annotated[
        str,
        typer.Option(
            "--profile-unit",
            rich_help_panel=_WHAT,
            metavar="all|attention|mlp",
            help="Whole layers, or one half of them.",
        ),
    ] = "all",
    backward: Annotated[
        bool,
        typer.Option(
            "--backward/--no-backward",
            rich_help_panel=_WHAT,
            help="Also time backward, recomputation and the optimizer step.",
        ),
    ] = True,
    bsz: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_SIZES,
            metavar="SIZES",
            help="Batch sizes of the times: 8, 1:12, 1:64:x2 or 1,2,4. By mode: 8, 1:12, 1.",
            show_default=False,
        ),
    ] = None,
    seq: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_SIZES,
            metavar="LENGTHS",
            help="Sequence lengths: 2048, 512:32768:x2, 1024,2048; [512,128]: one per layer type. "
            "The model's own; in sequence mode five up to it.",
            show_default=False,
        ),
    ] = None,
    tp: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_SIZES,
            metavar="DEGREES",
            help="Tensor degrees; those of 1,2,4,8 that the model allows.",
            show_default=False,
        ),
    ] = None,
    tp_impl: Annotated[
        str,
        typer.Option(
            rich_help_panel=_SIZES,
            metavar="megatron|dtensor",
            help="What sequence parallelism keeps: shards (megatron) or gathered copies.",
        ),
    ] = "megatron",
    layernum_min: Annotated[
        int,
        typer.Option(
            rich_help_panel=_SIZES,
            metavar="N",
            help="Fewest layers of the whole forwards.",
        ),
    ] = 2,
    layernum_max: Annotated[
        int,
        typer.Option(
            rich_help_panel=_SIZES,
            metavar="N",
            help="Most layers of the whole forwards; their difference checks a layer's time.",
        ),
    ] = 4,
    vocab_divisor: Annotated[
        int | None,
        typer.Option(
            "--make-vocab-size-divisible-by",
            rich_help_panel=_SIZES,
            metavar="N",
            help="Pad the vocabulary to a multiple; the model's own.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            rich_help_panel=_HOW,
            metavar="auto|cuda|cpu",
            help="Where times are taken; auto: on a GPU if torch finds one.",
        ),
    ] = "auto",
    dtype: Annotated[
        str,
        typer.Option(
            rich_help_panel=_HOW,
            metavar="bf16|fp16|fp32",
            help="Type of weights and activations.",
        ),
    ] = "bf16",
    iters: Annotated[
        int, typer.Option(rich_help_panel=_HOW, metavar="N", help="Most timed repetitions.")
    ] = 50,
    warmup: Annotated[
        int, typer.Option(rich_help_panel=_HOW, metavar="N", help="Most untimed repetitions.")
    ] = 5,
    max_seconds: Annotated[
        float,
        typer.Option(
            rich_help_panel=_HOW,
            metavar="S",
            help="After so long no further repetition of the same measurement begins.",
        ),
    ] = 2.0,
    out: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=_FILES,
            metavar="DIR",
            help="Folder of all files; otherwise models/NAME/configs, and times in its folder of "
            "the device.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", rich_help_panel=_FILES, help="Measure only what the files do not have yet."
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", rich_help_panel=_FILES, help="Measure again and replace what there is."
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            rich_help_panel=_FILES,
            help="Print what would be measured and how long it takes; write nothing.",
        ),
    ] = False,
    profile_min_batch_size: Annotated[
        int | None,
        typer.Option(rich_help_panel=_DOCUMENTED, metavar="N", help="First batch size."),
    ] = None,
    profile_max_batch_size: Annotated[
        int | None,
        typer.Option(rich_help_panel=_DOCUMENTED, metavar="N", help="Last batch size."),
    ] = None,
    profile_batch_size_step: Annotated[
        int | None,
        typer.Option(rich_help_panel=_DOCUMENTED, metavar="N", help="Between batch sizes; 1."),
    ] = None,
    profile_min_seq_length: Annotated[
        int | None,
        typer.Option(rich_help_panel=_DOCUMENTED, metavar="N", help="First sequence length."),
    ] = None,
    profile_max_seq_length: Annotated[
        int | None,
        typer.Option(rich_help_panel=_DOCUMENTED, metavar="N", help="Last sequence length."),
    ] = None,
    profile_seq_length_step: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_DOCUMENTED,
            metavar="N",
            help="Between sequence lengths; without it each is twice the one before.",
        ),
    ] = None,
    max_tp_deg: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_DOCUMENTED,
            metavar="N",
            help="Tensor degrees 1, 2, 4, ... up to this.",
        ),
    ] = None,
) -> ModelOptions:
    """Measure a model and write the two files of it that autopar-search plans with.

    profile-model --model llama2-7b --mode batch --bsz 1:12 --out profiles

    Memory is counted exactly and needs no GPU; times are taken on one device.
    Exit codes: 0 done; 1 a cell failed, the rest is kept; 2 unusable option or model; 130
    interrupted. Underscores and hyphens in the names of options mean the same.
    """
    return build_options(
        model=model,
        mode=mode,
        profile_type=profile_type,
        source=source,
        device=device,
        dtype=dtype,
        tp=tp,
        max_tp_deg=max_tp_deg,
        tp_impl=tp_impl,
        bsz=bsz,
        seq=seq,
        min_batch=profile_min_batch_size,
        max_batch=profile_max_batch_size,
        batch_step=profile_batch_size_step,
        min_seq=profile_min_seq_length,
        max_seq=profile_max_seq_length,
        seq_step=profile_seq_length_step,
        layernum_min=layernum_min,
        layernum_max=layernum_max,
        backward=backward,
        unit=unit,
        vocab_divisor=vocab_divisor,
        out=out,
        resume=resume,
        force=force,
        dry_run=dry_run,
        iters=iters,
        warmup=warmup,
        max_seconds=max_seconds,
    )


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code.

    Whatever goes wrong is one sentence on stderr.
    """
    try:
        normal, notes = translate(arguments)
        options = app(args=normal, prog_name=_COMMAND, standalone_mode=False)
        if not isinstance(options, ModelOptions):  # --help
            return options if isinstance(options, int) else 0
        for note in notes:
            _say(note)
        # heavy imports stay out of --help and of bad options
        from profiler.environment import require_torch

        require_torch()
        from profiler.model.run import run as profile_all

        return profile_all(options, list(arguments))
    except AutoparError as error:
        if os.environ.get(_DEBUG_VARIABLE):
            raise
        return _end(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _end("interrupted; the same command with --resume goes on", _INTERRUPTED)
    except BrokenPipeError:  # the reader of the output left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        message = getattr(error, "format_message", None)
        if callable(message):  # typer's own usage errors, whose classes it does not export
            return _end(f"{str(message()).rstrip('.')}; see --help", 2)
        if os.environ.get(_DEBUG_VARIABLE):
            raise
        return _end(
            f"internal error, please report it: {type(error).__name__}: {error} "
            f"(set {_DEBUG_VARIABLE}=1 for the traceback)",
            1,
        )


def _end(text: str, code: int) -> int:
    _say(text)
    return code


def _say(text: str) -> None:
    sys.stderr.write(f"{_COMMAND}: {' '.join(text.split())}\n")
    sys.stderr.flush()


def main() -> None:
    """Entry point of `profile-model`."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
