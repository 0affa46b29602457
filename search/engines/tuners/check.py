"""Readers of files and commands of LLaMA-Factory 0.9.5, axolotl 0.19 and ms-swift 4.6.

Their arguments are those of Hugging Face's Trainer, partly by other names, which
`search.engines.huggingface.script` translates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress

from autopar.errors import DocumentError, UnsupportedError
from autopar.records import replace, shorten
from autopar.run.rules import broken
from autopar.run.run import Run
from search.engines.deepspeed import check as deepspeed
from search.engines.deepspeed.write import refuse_splits
from search.engines.exporter_types import ExportTarget, refuse_others
from search.engines.huggingface import check as huggingface
from search.engines.huggingface.named_optimizers import needs_bitsandbytes
from search.engines.huggingface.script import (
    Flags,
    is_factory,
    known_program,
    program_of_document,
)
from search.engines.huggingface.transformers import NamedModel, model_for
from search.engines.reader import CheckedFile, CheckOptions
from search.engines.text import Configuration
from search.engines.tuners.rules import FILE
from search.engines.words import NODE_RANK


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
    return known_program(_program(source)) == "axolotl"


def owns_swift(source: Configuration) -> bool:
    """Return True for arguments of ms-swift in YAML, and for a command that passes them."""
    return known_program(_program(source)) == "ms-swift"


def read_llamafactory(source: Configuration, asked: CheckOptions) -> CheckedFile:
    """Return the run that a file describes, with the findings about it; raises DocumentError."""
    return _read(source, asked, "LLaMA-Factory")


def read_axolotl(source: Configuration, asked: CheckOptions) -> CheckedFile:
    """Return the run that a file describes, with the findings about it; raises DocumentError."""
    return _read(source, asked, "axolotl")


def read_swift(source: Configuration, asked: CheckOptions) -> CheckedFile:
    """Return the run that a file describes, with the findings about it; raises DocumentError."""
    # `parse_yaml_args` of `swift/cli/main.py` sets the variables in the file that are not set
    found = _variables_in(source)
    source = replace(source, environment={**found, **source.environment})
    cards = source.environment.get("CUDA_VISIBLE_DEVICES", "")
    ranks = {"NPROC_PER_NODE", "NNODES"} & source.environment.keys()
    sizes = [source.environment.get(name, "1") for name in ("NNODES", "NPROC_PER_NODE")]
    if ranks & found.keys() and all(size.isdigit() and len(size) < 9 for size in sizes):
        source = replace(source, world_size=math.prod(map(int, sizes)))
    if "," in cards and source.world_size == 1 and not ranks:
        # `device_map` of transformers places the layers (`swift/utils/torch_utils.py`)
        raise DocumentError(
            source.path,
            f"one process has the GPUs {shorten(cards)}, whose layers take turns and have no price",
            remedy="Set NPROC_PER_NODE to their number",
        )
    result = _read(source, asked, "ms-swift")
    flags = deepspeed.script_flags(source)
    kernel = " ".join(flags.get("attn-impl", ("sdpa",)))
    packs = [name for name in ("packing", "padding-free") if _is_on(flags, name)]
    packs = [name for name in packs if not kernel.startswith("flash")]
    illegal = broken(FILE, {"packing": "".join(packs[:1]).replace("-", "_"), "kernel": kernel})
    return replace(result, findings=(*illegal, *result.findings)) if illegal else result


def _variables_in(source: Configuration) -> dict[str, str]:
    """Return the variables in the section `ENV` of a file; raises DocumentError."""
    with suppress(ValueError):
        section = json.loads("".join(deepspeed.all_flags(source).get("ENV", ("{}",))))
        if isinstance(section, dict):
            return {name: str(value) for name, value in section.items()}
    raise DocumentError(source.path, "expected names and values", key="ENV")


def _is_on(flags: Flags, name: str) -> bool:
    return name in flags and " ".join(flags[name]).lower() in ("", "true", "1", "yes")


def _read(source: Configuration, asked: CheckOptions, title: str) -> CheckedFile:
    configured = any(flag in deepspeed.all_flags(source) for flag in deepspeed.CONFIGURATIONS)
    reader = deepspeed.read if configured else huggingface.read
    return replace(reader(source, asked), trainer=title)


# --------------------------------------------------------------------------------------------------
# Runs that these programs cannot train, and packages that a run needs.


def named_model(
    run: Run,
    place: ExportTarget,
    title: str,
    keepers: tuple[str, ...] = ("accelerate", "deepspeed", "ddp"),
) -> NamedModel:
    """Return the model of a run without tensor and context ranks, whose arguments are not written.

    title : name of the program. keepers : as in `refuse_others`. Raises errors as `write`.
    """
    refuse_others(run, title, keepers)
    refuse_splits(run, title, cp=False)
    if run.split.tp * run.split.cp > 1:
        raise UnsupportedError(
            f"exports for {title} do not set tensor and context ranks",
            remedy="Search a plan with --tp 1 --cp 1",
        )
    return model_for(run, place, title, hub=True)


def refuse_replicas(run: Run, title: str) -> None:
    """Raise UnsupportedError for a run with HSDP replicas, which transformers cannot set up."""
    if run.split.replicas > 1:
        raise UnsupportedError(
            f"exports for {title} have no HSDP replicas", remedy="Search with --dp-replicate 1"
        )


def rank_variables(place: ExportTarget) -> Iterator[str]:
    """Yield the variables with which LLaMA-Factory and ms-swift start their ranks."""
    if place.num_nodes > 1:
        yield f'NODE_RANK={NODE_RANK} MASTER_ADDR="${{MASTER_ADDR:?set it to the first node}}"'
        yield 'MASTER_PORT="${MASTER_PORT:-29500}"'
    yield f"NNODES={place.num_nodes} NPROC_PER_NODE={place.gpus_per_node}"


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
