"""Readers of YAML files and commands of LLaMA-Factory 0.9.5 and axolotl 0.19, and their limits.

Their arguments are those of Hugging Face's Trainer, partly by other names, which
`search.engines.huggingface.script` translates.
"""

from __future__ import annotations

from contextlib import suppress

from autopar.errors import DocumentError, UnsupportedError
from autopar.records import replace
from autopar.run.run import Run
from search.engines.deepspeed import check as deepspeed
from search.engines.deepspeed.write import refuse_splits
from search.engines.exporter_types import ExportTarget, refuse_others
from search.engines.huggingface import check as huggingface
from search.engines.huggingface.named_optimizers import needs_bitsandbytes
from search.engines.huggingface.script import is_axolotl, is_factory, program_of_document
from search.engines.huggingface.transformers import NamedModel, model_for
from search.engines.reader import CheckedFile, CheckOptions
from search.engines.text import Configuration


def _program(source: Configuration) -> str:
    command = source.command
    return program_of_document(source.document) if command is None else command.program


def owns_llamafactory(source: Configuration) -> bool:
    """Return True for arguments of LLaMA-Factory in YAML, and for a command that passes them."""
    if is_factory(_program(source)):
        return True
    with suppress(DocumentError):  # of a YAML file that is no YAML
        return "finetuning-type" in deepspeed.all_flags(source)
    return False


def owns_axolotl(source: Configuration) -> bool:
    """Return True for arguments of axolotl in YAML, and for a command that passes them."""
    return is_axolotl(_program(source))


def read_llamafactory(source: Configuration, asked: CheckOptions) -> CheckedFile:
    """Return the run that a file describes, with the findings about it; raises DocumentError."""
    return _read(source, asked, "LLaMA-Factory")


def read_axolotl(source: Configuration, asked: CheckOptions) -> CheckedFile:
    """Return the run that a file describes, with the findings about it; raises DocumentError."""
    return _read(source, asked, "axolotl")


def _read(source: Configuration, asked: CheckOptions, title: str) -> CheckedFile:
    configured = any(flag in deepspeed.all_flags(source) for flag in deepspeed.CONFIGURATIONS)
    reader = deepspeed.read if configured else huggingface.read
    return replace(reader(source, asked), trainer=title)


# --------------------------------------------------------------------------------------------------
# Runs that these programs cannot train, and packages that a run needs.


def named_model(run: Run, place: ExportTarget, title: str) -> NamedModel:
    """Return the model of a run without tensor and context ranks, which programs like this lack.

    title : name of the program. Raises errors as `write`.
    """
    refuse_others(run, title, ("accelerate", "deepspeed", "ddp"))
    refuse_splits(run, title, cp=False)
    if run.split.tp * run.split.cp > 1:
        raise UnsupportedError(
            f"exports for {title} have no tensor and context ranks",
            remedy="Search a plan with --tp 1 --cp 1",
        )
    return model_for(run, place, title, hub=True)


def needed(run: Run) -> str:
    """Return the packages that a run needs next to its program, each after a blank."""
    adapters = run.runtime.adapters
    packages = {
        "deepspeed": run.runtime.states.keeper == "deepspeed",
        "flash-attn": not run.kernels.repeated_heads,
        "bitsandbytes": (adapters is not None and adapters.base != "16 bits")
        or needs_bitsandbytes(run.runtime.optimizer),
        "torchao": run.runtime.optimizer.torchao,
    }
    return "".join(f" {name}" for name, needed in packages.items() if needed)
