"""`profile-model`: measures a model and writes the documented computation and memory files."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from autopar.command.run import guarded, one_line
from profiler.model.options import ModelOptions
from profiler.model.parse import build_options
from profiler.model.spellings import translate
from profiler.option_table import DRY_RUN, FILES, HOW, REPETITIONS, OptionRow, make_app

__all__ = ["app", "main", "run"]

_COMMAND = "profile-model"
_RESUME = "interrupted; the same command with --resume goes on"
_WHAT, _SIZES, _DOCUMENTED = "What to profile", "Sizes", "Documented spellings"

_OPTIONS = (
    OptionRow(
        "model",
        "MODEL",
        "Shipped name, config.json, model.json, hf:NAME, or py:package.module:factory.",
        _WHAT,
    ),
    OptionRow(
        "profile_type",
        "computation|memory|all",
        "Which of the two files; all, but memory alone with --source exact.",
        _WHAT,
    ),
    OptionRow(
        "mode",
        "static|batch|sequence",
        "One size; a range of batch sizes; a range of sequence lengths.",
        _WHAT,
    ),
    OptionRow(
        "source",
        "auto|exact|device",
        "auto: count memory without a device, take times on one; exact: memory only; "
        "device: measure memory too.",
        _WHAT,
    ),
    OptionRow(
        "unit",
        "all|attention|mlp",
        "Whole layers, or one half of them.",
        _WHAT,
        name="--profile-unit",
    ),
    OptionRow("backward", None, "Also time backward, recomputation and the optimizer step.", _WHAT),
    OptionRow(
        "bsz",
        "SIZES",
        "Batch sizes of the times: 8, 1:12, 1:64:x2 or 1,2,4. By mode: 8, 1:12, 1.",
        _SIZES,
    ),
    OptionRow(
        "seq",
        "LENGTHS",
        "Sequence lengths: 2048, 512:32768:x2, 1024,2048; [512,128]: one per layer type. "
        "The model's own; in sequence mode five up to it.",
        _SIZES,
    ),
    OptionRow("tp", "DEGREES", "Tensor degrees; those of 1,2,4,8 that the model allows.", _SIZES),
    OptionRow(
        "tp_impl",
        "megatron|dtensor",
        "What sequence parallelism keeps: shards (megatron) or gathered copies.",
        _SIZES,
    ),
    OptionRow("layernum_min", "N", "Fewest layers of the whole forwards.", _SIZES),
    OptionRow(
        "layernum_max",
        "N",
        "Most layers of the whole forwards; their difference checks a layer's time.",
        _SIZES,
    ),
    OptionRow(
        "vocab_divisor",
        "N",
        "Pad the vocabulary to a multiple; the model's own.",
        _SIZES,
        name="--make-vocab-size-divisible-by",
    ),
    OptionRow(
        "device", "auto|cuda|cpu", "Where times are taken; auto: on a GPU if torch finds one.", HOW
    ),
    OptionRow("dtype", "bf16|fp16|fp32", "Type of weights and activations.", HOW),
    *REPETITIONS,
    OptionRow(
        "out",
        "DIR",
        "Folder of all files; otherwise models/NAME/configs, and times in its folder of the "
        "device.",
        FILES,
    ),
    OptionRow("resume", None, "Measure only what the files do not have yet.", FILES),
    OptionRow("force", None, "Measure again and replace what there is.", FILES),
    DRY_RUN,
    OptionRow("min_batch", "N", "First batch size.", _DOCUMENTED, name="--profile-min-batch-size"),
    OptionRow("max_batch", "N", "Last batch size.", _DOCUMENTED, name="--profile-max-batch-size"),
    OptionRow(
        "batch_step", "N", "Between batch sizes; 1.", _DOCUMENTED, name="--profile-batch-size-step"
    ),
    OptionRow(
        "min_seq", "N", "First sequence length.", _DOCUMENTED, name="--profile-min-seq-length"
    ),
    OptionRow(
        "max_seq", "N", "Last sequence length.", _DOCUMENTED, name="--profile-max-seq-length"
    ),
    OptionRow(
        "seq_step",
        "N",
        "Between sequence lengths; without it each is twice the one before.",
        _DOCUMENTED,
        name="--profile-seq-length-step",
    ),
    OptionRow("max_tp_deg", "N", "Tensor degrees 1, 2, 4, ... up to this.", _DOCUMENTED),
)
_HELP = """
Measure a model and write the two files of it that autopar-search plans with.

profile-model --model llama2-7b --mode batch --bsz 1:12 --out profiles

Memory is counted exactly and needs no GPU; times are taken on one device.
Exit codes: 0 done; 1 a cell failed, the rest is kept; 2 unusable option or model; 130
interrupted. Underscores and hyphens in the names of options mean the same.
"""

app = make_app(_OPTIONS, build_options, _HELP)


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code.

    Whatever goes wrong is one sentence on stderr.
    """
    return guarded(lambda: _execute(arguments), _say, interrupted=_RESUME)


def _execute(arguments: Sequence[str]) -> int:
    normal, notes = translate(arguments)
    options = app(args=normal, prog_name=_COMMAND, standalone_mode=False)
    if not isinstance(options, ModelOptions):  # --help
        return options if isinstance(options, int) else 0
    for note in notes:
        _say(note)
    # heavy imports stay out of --help and of bad options
    if not options.model.startswith(("hf:", "py:")):
        from profiler.model.sources import load_source

        load_source(options.model)  # what is wrong with a file or name is said before torch is here
    from profiler.environment import require_torch

    require_torch()
    from profiler.model.run import run as profile_all

    return profile_all(options, list(arguments))


def _say(text: str) -> None:
    sys.stderr.write(f"{_COMMAND}: {one_line(text)}\n")
    sys.stderr.flush()


def main() -> None:
    """Entry point of `profile-model`."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
