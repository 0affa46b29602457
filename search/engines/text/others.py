"""Recognition of launch files of unsupported engines, and of programs that do not train.

Such files contain arguments of supported engines: Megatron-DeepSpeed and text generation servers
accept those of Megatron-LM. Errors name the program, so that the file is not read as a file of
Megatron-LM.

Sources: launchers and examples of the repositories in `ENGINES`, August 2026.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from search.engines.text.files import Configuration, arguments_in, flags_of_document


class _Other(NamedTuple):
    """Engine that is not read, and how its files are recognised."""

    title: str
    command: str = r"(?!)"
    """Pattern of a command, at its beginning, or of a program or module."""
    flags: frozenset[str] = frozenset()
    """Flags that identify the engine, each alone."""
    keys: tuple[frozenset[str], ...] = ()
    """Sets of keys; a document with all keys of a set is of the engine. A section counts."""


def _keys(*sets: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(one.split()) for one in sets)


_WORKER = r"(\S*/)?python[0-9.]*\s+(-\S+\s+)*"
ENGINES: tuple[_Other, ...] = (
    _Other(
        "Megatron-DeepSpeed",
        flags=frozenset({"no-pipeline-parallel", "ds-sequence-parallel-size",
                         "deepspeed-activation-checkpointing", "pp-partition-method",
                         "abort-on-unmet-fused-kernel-constraints"}),
    ),
    _Other("a command of ms-swift other than sft and pt",
           r"(\S*/)?swift\s+(rlhf|infer|deploy|eval|export|rollout|sample)\b"
           r"|swift[/.]cli[/.](?!(sft|pt)\b).*"),
    _Other("Megatron-SWIFT (the command megatron of ms-swift)",
           r"(\S*/)?megatron\s+(sft|pt|rlhf|export)\b|swift[/.]megatron[/.]cli\b.*"),
    _Other("OpenRLHF", r"openrlhf\.cli\b.*"),
    _Other("verl", r"verl\.(trainer(?!\.sft_trainer\b)|experimental|model_merger)\b.*"
           r"|recipe\.\w+\.main_\w+",
           keys=_keys("actor_rollout_ref", "trainer algorithm data")),
    _Other("slime", rf"{_WORKER}(\S*/)?train\w*\.py\b.*--actor-num-nodes\b.*",
           flags=frozenset({"actor-num-nodes", "rollout-num-gpus", "rollout-batch-size"})),
    _Other("VeOmni", r"(\S*/)?tasks/(\w+/)?train_\w+\.py|veomni\..*",
           keys=_keys("model.model_path data.train_path train",
                      "model.config_path data.train_path train",
                      "train.accelerator train.checkpoint data")),
    _Other("FlagScale", r"(\S*/)?flagscale\s+(train|serve|inference|run)\b|flagscale[/.].*"
           rf"|({_WORKER})?run\.py\s+--config-path\b.*",
           keys=_keys("experiment.exp_name experiment.task",
                      "system.tensor_model_parallel_size model",
                      "system.checkpoint model.num_layers")),
    _Other("Primus", r"(\S*/)?primus-cli\b|(\S*/)?primus/(cli/main|train)\.py",
           keys=_keys("modules.pre_trainer", "modules.post_trainer", "modules.sft_trainer",
                      *(f"{name} {size}" for name in ("extends", "bases")
                        for size in ("num_layers", "hidden_size", "seq_length", "model_type",
                                     "train_iters", "tokenizer_type")))),
    # `llamafactory-cli train` is read, with the configurations of releases before 1.0.
    _Other("a command of LLaMA-Factory other than train",
           r"(\S*/)?(llamafactory-cli|lmf)\s+(?!train\b|\S+\.ya?ml)\w+"),
    _Other("LLaMA-Factory 1.0", keys=_keys("model model_class", "model peft_config.name")),
    _Other("OLMo-core", r"(\S*/)?olmo_core\w*\.py"),
    _Other("reinforcement learning of open-instruct", r"(\S*/)?open_instruct/(grpo|ppo)\w*\.py"),
    _Other("a command of axolotl other than train",
           r"(\S*/)?axolotl\s+(?!train\b|\S+\.ya?ml)\w+|axolotl\.cli\.(?!train\b)\w+"),
    _Other("torchtune", r"(\S*/)?tune\s+(run|download)\b",
           keys=_keys("model._component_ tokenizer._component_", "model._component_ optimizer")),
    _Other("NeMo", r"(\S*/)?nemo\s+llm\b|(\S*/)?automodel\s+(?!\S+\.ya?ml\b)\w+"
           r"|nemo_automodel[/.](?!cli\.app\b).*|(\S*/)?nemo-rl\b.*",
           keys=_keys("trainer exp_manager", "policy cluster data loss_fn")),
    _Other("BioNeMo", r"(\S*/)?(train|finetune)_(esm2|evo2|geneformer)(\.py)?\b.*"
           r"|(\S*/)?bionemo[/.].*"),
    _Other("TRL's launcher", r"(\S*/)?trl\s+(sft|dpo|grpo|kto|reward|rloo)\b"),
    _Other("a server of generated text", r"(\S*/)?vllm\s+serve\b|vllm\.entrypoints\b.*"
           r"|sglang\.launch_server\b|sglang_router\b.*"),
    _Other("a task of Megatron-LM", r"(\S*/)?tasks/(\w+/)?main\.py"),
    _Other("an evaluation", r"(\S*/)?lm[_-]eval\b.*"),
)  # fmt: skip
"""Engines that are not read, and commands that launch no training."""
_TRAINS = frozenset({"train", "pretrain", "finetune", "finetuning", "sft", "clm", "qlora"})
_PURPOSES: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"generate", "generation", "inference", "infer", "server", "serve", "chat",
                "serving"}), "generates text and does not train"),
    (frozenset({"eval", "evals", "evaluate", "evaluation"}), "evaluates a model"),
    (frozenset({"convert", "converter", "conversion", "convertor", "export", "merge"}),
     "converts checkpoints"),
    (frozenset({"quantize", "prune"}), "changes a model without training"),
    (frozenset({"preprocess", "preprocessing", "tokenize"}), "prepares data"),
)  # fmt: skip
"""Words in the name of a program that does not train, with its purpose."""
_METHODS: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"dpo", "orpo", "kto", "cpo", "simpo", "bco", "xpo", "ipo"}), "on preferences"),
    (frozenset({"ppo", "grpo", "rloo", "gspo", "dapo", "reinforce", "remax"}),
     "by reinforcement learning"),
    (frozenset({"reward", "rm", "prm"}), "a reward model"),
    (frozenset({"gkd", "distill", "distillation"}), "with a teacher"),
)  # fmt: skip
"""Words in the name of a program that trains in another way than on the next token, and the way.

Such programs hold a second model, or process several sequences for each one of their batch.
"""


_OF_DEEPSPEED = frozenset({"deepspeed", "deepspeed-config", "zero-stage"})
_GENERATES = frozenset(
    {
        "num-tokens-to-generate", "prompts", "prompt-file", "incoming-requests-per-sec",
        "incoming-requests-per-step", "inference-repeat-n",
    }
)  # fmt: skip
"""Arguments of the inference programs of Megatron-LM."""


def problem_of(source: Configuration) -> str | None:
    """Return a sentence on why a file is not read; None if its type is not recognised."""
    command = source.command
    if command is None:
        title = _of_document(source.document)
        if title is None:
            purpose = _of_flags(flags_of_document(arguments_in(source.document)))
            return None if purpose is None else f"is of a program that {purpose}"
        return f"is a file of {title}, which autopar does not read"
    flags, program = source.flags or {}, command.program
    launch = " ".join((program, *command.arguments))
    title = next(
        (one.title for one in ENGINES if re.match(one.command, launch) or one.flags & flags.keys()),
        None,
    )
    if "hidden-size" in flags and _OF_DEEPSPEED & flags.keys():
        # Other programs of DeepSpeed have a model of Hugging Face, or a size under their own name.
        title = "Megatron-DeepSpeed"
    if title is not None:
        return _launches(title)
    purpose = _purpose(program) or _of_flags(flags)
    return None if purpose is None else f"runs {program.rpartition('/')[2]}, which {purpose}"


def problem_of_text(text: str) -> str | None:
    """Return why a script whose command was not found is not read; None if nothing is known.

    Only commands count: the beginning of a line, or what follows `-m`, `&&`, `;` or assignments.
    """
    for line in _commands(text):
        for one in ENGINES:
            if re.match(one.command, line):
                return _launches(one.title)
    return None


def _launches(title: str) -> str:
    return f"launches {title}, which autopar does not read"


_ASSIGNMENTS = re.compile(r"(?:(?:\w+=(?:\"[^\"]*\"|'[^']*'|\S*)|exec|nohup|time|sudo|srun)\s+)*")
_MODULE = re.compile(r"(?:\s-m|\s--module)[\s=]+([\w.]+.*)")
_STARTED = re.compile(
    r"(?:\S*/)?(?:torchrun|accelerate|deepspeed|python[0-9.]*)\s+(?:\S+\s+)*?(\S+\.py\b.*)"
)
_MOST_LINES = 5_000


def _commands(text: str) -> list[str]:
    """Return the beginnings of commands in the text of a script, without comments."""
    found = []
    # A submitter gets `\&\&` as words of its command.
    for line in text.replace("\\\n", " ").replace("\\&", "&").splitlines()[:_MOST_LINES]:
        plain = line.strip()
        if plain.startswith("#"):
            continue
        for part in re.split(r"&&|\|\||;", plain):
            command = part.strip()[:1_000]
            start = _ASSIGNMENTS.match(command)
            plainly = command[start.end() :] if start is not None else command
            found.append(plainly)
            # Ray and containers start what follows `--`.
            found += [rest.strip() for rest in command.split(" -- ")[1:]]
            program = _STARTED.match(plainly)
            if program is not None:
                found.append(program[1])
            module = _MODULE.search(command)
            if module is not None:
                found.append(module[1])
    return found


def _of_document(document: Mapping[str, Any]) -> str | None:
    names = {*_dotted(document)}
    return next((one.title for one in ENGINES if any(keys <= names for keys in one.keys)), None)


def _dotted(document: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Yield the dotted names of sections and keys."""
    for key, value in document.items():
        yield f"{before}{key}"
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{before}{key}.")


def _purpose(program: str) -> str | None:
    """Return the purpose of a program, from its name; None if it may train on the next token."""
    stem = re.split(r"[/.]", program.removesuffix(".py"))[-1]
    words = {*re.split(r"[^a-z0-9]+", stem.lower())}
    method = next((method for names, method in _METHODS if words & names), None)
    if method is not None:
        return f"trains {method} and is not priced"
    if words & _TRAINS:
        return None
    return next((purpose for names, purpose in _PURPOSES if words & names), None)


def _of_flags(flags: Mapping[str, tuple[str, ...]]) -> str | None:
    """Return the purpose of a program from its arguments; None if it may train."""
    if _GENERATES & flags.keys():
        return "generates text and does not train"
    if "skip-train" in flags:
        return "evaluates a model (--skip-train)"
    only = [name for name in ("do-eval", "do-predict") if _is_on(flags, name)]
    # Programs of other projects train without `--do_train`, for epochs or steps of their own.
    if only and not _is_on(flags, "do-train") and not {"num-train-epochs", "max-steps"} & {*flags}:
        return f"evaluates a model (--{only[0].replace('-', '_')} without --do_train)"
    return None


def _is_on(flags: Mapping[str, tuple[str, ...]], name: str) -> bool:
    words = flags.get(name)
    return words is not None and (not words or words[0].lower() not in ("false", "0", "no"))
