"""Shell script, YAML and torchrun command for given Megatron-LM arguments.

`search.engines.megatron.write` makes the arguments of a run. Values that are not in a run, such as
the path of the data, are environment variables that the files require.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from search.engines.megatron.arguments import Argument
from search.engines.text import dump_yaml
from search.engines.words import Nodes, one_line, required, torchrun

ENGINE_VERSION = "main of September 2026"
"""Code that arguments are written for, unless the user names a release."""
SCRIPT = "megatron_args.sh"
YAML = "megatron_args.yaml"
Sections = Mapping[str, Sequence[Argument]]
"""Arguments by section name. Section MODEL becomes the array MODEL_ARGS of the script."""
Environment = Mapping[str, str | None]
"""Environment variables of the ranks; None: the variable must be unset."""

OPTIMIZER: Sequence[Argument] = (
    ("lr", ("3.0e-4",)),
    ("min-lr", ("3.0e-5",)),
    ("lr-decay-style", ("cosine",)),
    ("weight-decay", ("0.1",)),
    ("adam-beta1", ("0.9",)),
    ("adam-beta2", ("0.95",)),
    ("clip-grad", ("1.0",)),
    ("log-interval", ("1",)),
    ("log-throughput", ()),
)
"""Placeholder arguments of the optimizer, which change neither memory nor time."""
NO_MASKS: Argument = ("no-create-attention-mask-in-dataloader", ())
"""Flag that omits attention masks, seq_length^2 bytes per sample; causal kernels need none."""
DATA: Sequence[Argument] = (
    ("data-path", (required("DATA_PATH", "set DATA_PATH to the prefix of the preprocessed data"),)),
    ("split", ("949,50,1",)),
    ("tokenizer-type", ("HuggingFaceTokenizer",)),
    (
        "tokenizer-model",
        (required("TOKENIZER_MODEL", "set TOKENIZER_MODEL to a name or folder of Hugging Face"),),
    ),
)
FILL_IN = (
    "set MEGATRON_PATH, DATA_PATH (prefix written by tools/preprocess_data.py) and TOKENIZER_MODEL",
    "learning rate, its schedule and the number of steps in TRAINING_ARGS are placeholders",
    (
        "SAVE: checkpoint folder; LOAD: checkpoint of Megatron-LM. Megatron-Bridge "
        "loads those of Hugging Face"
    ),
)
"""Notes for the user on values to fill in before training."""


def connections(
    *, split: bool, fully_sharded: bool, experts_overlap: bool = False
) -> dict[str, str | None]:
    """Return the required CUDA_DEVICE_MAX_CONNECTIONS as an environment variable.

    The value is None if the variable must be unset. The result is empty if any value is allowed.

    split : True for tensor or context parallelism on a device before Blackwell.
    fully_sharded : True if Megatron-FSDP shards the model states.
    experts_overlap : True if expert dispatch and combine overlap with other kernels.
    """
    if experts_overlap:
        # In a single queue the communication would wait for the kernels
        # (docs/user-guide/features/moe_a2a_overlap.md).
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    # Tensor and context parallelism rely on the launch order of kernels in a single queue.
    # Megatron-FSDP must not use a single queue, so the variable is unset there.
    if fully_sharded:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": None}
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if split else {}


# Checkpoint arguments, given only if SAVE or LOAD is set. Bash does not split quoted words in `:+`.
_CHECKPOINTS = """\
# SAVE: where checkpoints go; LOAD: Megatron-LM's own, to begin with. Hugging Face's weights are
# Megatron-Bridge's matter (checkpoint.pretrained_checkpoint=, checkpoint.save= of its recipes).
CHECKPOINT_ARGS=(
    ${SAVE:+--save "$SAVE" --save-interval "${SAVE_INTERVAL:-500}"}
    ${LOAD:+--load "$LOAD"}
)
"""


def script_text(
    name: str,
    nodes: Nodes,
    program: str,
    sections: Sections,
    environment: Environment,
    version: str = ENGINE_VERSION,
) -> str:
    """Return a bash script to source, which exports variables and sets the array `MEGATRON_ARGS`.

    name : name of the model, for the header comment. program : training program. version : release
    of Megatron-LM, for the same comment.
    """
    where = f"{nodes.num_nodes} x {nodes.gpus_per_node} GPUs"
    lines = [
        f"# Arguments of Megatron-LM's {program} ({version})",
        f"# for {one_line(name)} on {where}; source it with bash.",
        *_exports(environment),
        "",
    ]
    for part, arguments in sections.items():
        lines.append(f"{part}_ARGS=(")
        lines += ["    " + " ".join([f"--{flag}", *map(quoted, w)]) for flag, w in arguments]
        lines += [")", ""]
    lines += [_CHECKPOINTS, "MEGATRON_ARGS=("]
    lines += [f'    "${{{part}_ARGS[@]}}"' for part in (*sections, "CHECKPOINT")]
    lines.append(")")
    return "\n".join(lines) + "\n"


def _exports(environment: Environment) -> list[str]:
    return [
        f"unset {name}" if value is None else f"export {name}={value}"
        for name, value in environment.items()
    ]


def quoted(word: str) -> str:
    """Return a word quoted for bash; variables in it are still expanded."""
    return word if re.fullmatch(r"[A-Za-z0-9_.,:/+-]+", word) else f'"{word}"'


def yaml_text(sections: Sections, environment: Environment, version: str = ENGINE_VERSION) -> str:
    """Return the arguments as YAML in the format of `model_config.yaml` in Megatron-LM's tests."""
    document: dict[str, object] = {}
    # ENV_VARS of the format can set variables but not unset them.
    kept = {name: value for name, value in environment.items() if value is not None}
    if kept:
        document["ENV_VARS"] = {name: _number(value) for name, value in kept.items()}
    document["MODEL_ARGS"] = {
        f"--{flag}": _yaml_value(words) for part in sections.values() for flag, words in part
    }
    head = f"# Megatron-LM, {version}\n# to save and load add --save, --save-interval, --load\n"
    return head + dump_yaml(document)


def _yaml_value(words: tuple[str, ...]) -> object:
    if not words:
        return True
    if len(words) > 1:
        return list(words)
    # Readers of the YAML expand only plain variables, so `:?MESSAGE` is removed.
    return _number(re.sub(r":\?[^}]*\}", "}", words[0]))


def _number(word: str) -> object:
    """Return a word as int or float where it is a number, else unchanged."""
    # int() and float() also accept non-ASCII digits.
    if not word.isascii():
        return word
    try:
        return int(word) if word.isdigit() else float(word)
    except ValueError:
        return word


def command(nodes: Nodes, program: str) -> str:
    """Return the launch command of one node: source the script, then run a training program."""
    path = required("MEGATRON_PATH", "set MEGATRON_PATH to a checkout of Megatron-LM")
    whole = f'"{path}/{program}" "${{MEGATRON_ARGS[@]}}"'
    return f"source {SCRIPT}\n" + torchrun(nodes, whole)
