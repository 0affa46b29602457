"""Arguments of Megatron-LM as files and a command: a shell script, YAML, `torchrun`.

`search.engines.megatron.write` makes the arguments of a run. What it does not hold, such as
where the data is, comes from the environment and is asked for here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from search.engines.megatron.arguments import Argument
from search.engines.text import dump_yaml
from search.engines.words import Nodes, one_line, required, torchrun

ENGINE_VERSION = "main of September 2026"
SCRIPT = "megatron_args.sh"
YAML = "megatron_args.yaml"
Sections = Mapping[str, Sequence[Argument]]
"""Arguments by what they are about, in capitals, which names an array of the script."""
Environment = Mapping[str, str | None]
"""Variables that the ranks need; None: one that has to be unset."""

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
"""Placeholders of a training, which change neither memory nor time."""
NO_MASKS: Argument = ("no-create-attention-mask-in-dataloader", ())
"""Causal kernels need no mask, which otherwise every batch brings: s^2 bytes of a sample."""
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
    "SAVE is where checkpoints go, LOAD one of Megatron-LM; Megatron-Bridge takes Hugging Face's",
)
"""What the user has to know of the files."""


def connections(
    *, split: bool, fully_sharded: bool, experts_overlap: bool = False
) -> dict[str, str | None]:
    """Return the variable of CUDA's queues that ranks need.

    split : there are tensor or context ranks, on a device before Blackwell. fully_sharded : states
    are Megatron-FSDP's. experts_overlap : exchanges of experts run beside other kernels.
    """
    if experts_overlap:
        # in one queue they would wait for these (docs/user-guide/features/moe_a2a_overlap.md)
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    # tensor and context parallelism need kernels of one queue in their order of launch, and
    # Megatron-FSDP must not have that, so that it is unset there
    if fully_sharded:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": None}
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if split else {}


# Where they are wanted; words inside `:+` stay one word each.
_CHECKPOINTS = """\
# SAVE: where checkpoints go; LOAD: Megatron-LM's own, to begin with. Hugging Face's weights are
# Megatron-Bridge's matter (checkpoint.pretrained_checkpoint=, checkpoint.save= of its recipes).
CHECKPOINT_ARGS=(
    ${SAVE:+--save "$SAVE" --save-interval "${SAVE_INTERVAL:-500}"}
    ${LOAD:+--load "$LOAD"}
)
"""


def script_text(name: str, nodes: Nodes, sections: Sections, environment: Environment) -> str:
    """Return a script to be sourced by bash: the environment, and the array `MEGATRON_ARGS`.

    name : of the model, for the first line.
    """
    where = f"{nodes.num_nodes} x {nodes.gpus_per_node} GPUs"
    lines = [
        f"# Arguments of Megatron-LM's pretrain_gpt.py ({ENGINE_VERSION})",
        f"# for {one_line(name)} on {where}; to be sourced by bash.",
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
    """Return a word for bash; variables stay variables."""
    return word if re.fullmatch(r"[A-Za-z0-9_.,:/+-]+", word) else f'"{word}"'


def yaml_text(sections: Sections, environment: Environment) -> str:
    """Return the arguments as Megatron-LM's functional tests spell them (model_config.yaml)."""
    document: dict[str, object] = {}
    # YAML can set a variable, not unset it
    kept = {name: value for name, value in environment.items() if value is not None}
    if kept:
        document["ENV_VARS"] = {name: _number(value) for name, value in kept.items()}
    document["MODEL_ARGS"] = {
        f"--{flag}": _yaml_value(words) for part in sections.values() for flag, words in part
    }
    head = (
        f"# Megatron-LM, {ENGINE_VERSION}\n# to save and load add --save, --save-interval, --load\n"
    )
    return head + dump_yaml(document)


def _yaml_value(words: tuple[str, ...]) -> object:
    if not words:
        return True
    if len(words) > 1:
        return list(words)
    # whoever reads YAML puts variables in alone
    return _number(re.sub(r":\?[^}]*\}", "}", words[0]))


def _number(word: str) -> object:
    """Return a word as the number that it is, if it is one."""
    # Python reads digits of every script
    if not word.isascii():
        return word
    try:
        return int(word) if word.isdigit() else float(word)
    except ValueError:
        return word


def command(nodes: Nodes) -> str:
    """Return the command; the script that it reads sets the environment."""
    path = required("MEGATRON_PATH", "set MEGATRON_PATH to a checkout of Megatron-LM")
    program = f'"{path}/pretrain_gpt.py" "${{MEGATRON_ARGS[@]}}"'
    return f"source {SCRIPT}\n" + torchrun(nodes, program)
