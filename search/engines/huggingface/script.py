"""Arguments of Hugging Face scripts: aliases, lookups, and the remaining arguments.

Scripts with their own parser name the settings of `TrainingArguments`, TRL and PEFT in their own
words. `translated` replaces the words that always mean the same. Arguments that no reader looks up
are classified with `search.engines.huggingface.names`, and with the arguments that the script
declares itself.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from autopar.records import Record
from autopar.run.runtime import PrecisionKind
from autopar.training.lengths import Batching, KnownBatching
from search.engines.arguments import Ignored, Unpriced
from search.engines.engine import EngineRelease
from search.engines.huggingface.names import harmless, names_a_cost, unpriced
from search.engines.keys import whole
from search.engines.text import flags_of_document
from search.engines.tuners.swift_arguments import renamed

Flags = Mapping[str, tuple[str, ...]]
"""Words by flag, without leading hyphens and with `-` for `_`."""
LENGTHS = (
    "block-size", "max-seq-length", "max-seq-len", "max-length", "model-max-length", "cutoff-len",
    "seq-length", "seq-len", "sequence-length", "max-len",
)  # fmt: skip
"""Names of the sequence length, tokens."""
MODELS = (
    "model-name-or-path", "model-name", "model-id", "model-path", "base-model",
    "pretrained-model-name-or-path",
)  # fmt: skip
"""Names of the model."""
_MOST_BYTES = 1 << 20
_MOST = 10**9
"""Largest number, above any real size."""
_YES = ("true", "1", "yes", "y", "t")
_NO = ("false", "0", "no", "n", "f", "none", "null")


class ScriptOptions(Record):
    """Settings that the user gives for a script, and the properties of its program."""

    model: str | None = None
    seq_length: int | None = None
    """Sequence length, tokens."""
    micro_batch: int | None = None
    """Sequences of a rank and micro-batch."""
    global_batch: int | None = None
    """Sequences of a step."""
    precision: PrecisionKind | None = None
    program: str = ""
    """Path of the program or name of its module; empty without a script."""
    declared: frozenset[str] = frozenset()
    """Flags that the program declares itself."""
    prepared: bool = False
    """True if the program calls `prepare_model_for_kbit_training` of PEFT."""
    world_size: int = 1
    """Number of GPUs."""
    release: EngineRelease | None = None
    """Given release of transformers; None: not given."""


NO_OPTIONS = ScriptOptions()


class ScriptWords(Record):
    """Words of a script by flag, with a record of the flags that were looked up.

    A flag whose value is not understood counts as not looked up.
    """

    words: Flags
    asked: set[str]

    def number(self, *names: str) -> int | None:
        """Return the positive number of the first flag that has one; None if none has.

        Other numbers count as not looked up, except for `--max_steps`, which they switch off.
        """
        found = None
        for name in names:
            words = self.words.get(name, ())
            number = whole(words[0]) if len(words) == 1 else None
            if number is not None and (0 < number < _MOST or name == "max-steps"):
                self.asked.add(name)
                found = found or (number if number > 0 else None)
        return found

    def yes(self, name: str) -> bool:
        """Return whether a flag is on: given without a value, or as true, 1 or yes."""
        words = self.words.get(name)
        text = " ".join(words or ()).lower()
        if text in (*_YES, *_NO, ""):
            self.asked.add(name)
        return words is not None and (not words or text in _YES)

    def text(self, *names: str) -> str:
        """Return the first word of the first flag that is given; empty if none is."""
        self.asked.update(names)
        return next(("".join(self.words[name][:1]) for name in names if name in self.words), "")

    def list(self, name: str) -> tuple[str, ...]:
        """Return the words of a flag, split at commas."""
        self.asked.add(name)
        return tuple(" ".join(self.words.get(name, ())).replace(",", " ").split())

    def ignored(self, declared: Collection[str]) -> Iterator[Ignored]:
        """Yield the flags that were not looked up.

        declared : flags that the file of the script declares itself.
        """
        for flag, words in sorted(self.words.items()):
            if flag not in self.asked:
                yield classified(flag, words, declared)


_OF_ACCELERATOR = frozenset(
    {"dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking",
     "gradient_accumulation_kwargs"}
)  # fmt: skip
_OF_ACCUMULATION = frozenset({"sync_each_batch", "adjust_scheduler", "sync_with_dataloader"})
"""Keys of `AcceleratorConfig` and `GradientAccumulationPlugin` that keep batches as given."""


def syncs_each_batch(words: ScriptWords) -> bool | None:
    """Return whether gradients are reduced after each micro-batch; None: not understood.

    Source: `sync_each_batch` in the training loop of transformers' Trainer 5.6 to 5.24.
    """
    given = words.words.get("accelerator-config")
    if given is None:
        return False
    with suppress(ValueError):
        document = json.loads(" ".join(given))
        if isinstance(document, dict) and document.keys() <= _OF_ACCELERATOR:
            own = document.get("gradient_accumulation_kwargs") or {}
            if isinstance(own, dict) and own.keys() <= _OF_ACCUMULATION:
                return own.get("sync_each_batch") is True
    return None


def classified(flag: str, words: tuple[str, ...], declared: Collection[str]) -> Ignored:
    """Return an argument that no reader looked up, with the estimates that it may change."""
    row = unpriced(flag)
    if row is None and names_a_cost(flag) and not harmless(flag):
        row = Unpriced("a setting of the script")
    known = harmless(flag) or (row is not None and row.is_off(words))
    if row is None:
        known |= flag in declared
        return Ignored(flag=f"--{flag}", value=" ".join(words), understood=known)
    return Ignored(
        flag=f"--{flag}",
        value=" ".join(words),
        understood=known,
        concern=row.why,
        changes=row.changes,
    )


class Program(Record):
    """Declarations and calls in a Python file, which is not run."""

    flags: frozenset[str] = frozenset()
    """Names in calls of `add_argument`, and fields of classes."""
    prepared: bool = False
    """True if it calls `prepare_model_for_kbit_training` of PEFT."""


def program_of(path: Path) -> Program:
    """Return declarations of a Python file; none if it is missing, over 1 MiB or not Python."""
    found, prepared = set[str](), False
    with suppress(OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return Program()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            prepared |= isinstance(node, ast.Call) and _PREPARE in ast.dump(node.func)
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                names = (arg.value for arg in node.args if isinstance(arg, ast.Constant))
                found.update(str(name) for name in names if str(name).startswith("--"))
            elif isinstance(node, ast.ClassDef):
                fields = (one.target for one in node.body if isinstance(one, ast.AnnAssign))
                found.update(one.id for one in fields if isinstance(one, ast.Name))
    flags = frozenset(name.lstrip("-").replace("_", "-") for name in found)
    return Program(flags=flags, prepared=prepared)


_PREPARE = "prepare_model_for_kbit_training"


# --------------------------------------------------------------------------------------------------
# Aliases.


class Translated(Record):
    """Arguments of a script in the words of transformers and TRL."""

    flags: Flags
    taken: tuple[str, ...] = ()
    """Sentences on arguments that were taken for others, and on defaults of the program."""


_ALIASES: Mapping[str, str] = {
    "use-peft-lora": "use-peft",
    "use-lora": "use-peft",
    "lora-rank": "lora-r",
    "lora-target": "lora-target-modules",
    "use-4bit-quantization": "load-in-4bit",
    "use-4bit-quantisation": "load-in-4bit",
    "use-4bit": "load-in-4bit",
    "double-quantization": "use-bnb-nested-quant",
    "double-quant": "use-bnb-nested-quant",
    "use-nested-quant": "use-bnb-nested-quant",
    "bnb-4bit-use-double-quant": "use-bnb-nested-quant",
    "q-lora": "load-in-4bit",
    "use-8bit-quantization": "load-in-8bit",
    "use-8bit": "load-in-8bit",
    "use-gradient-checkpointing": "gradient-checkpointing",
    "enable-gradient-checkpointing": "gradient-checkpointing",
    "activation-checkpointing": "gradient-checkpointing",
    "activation-checkpointing-kwargs": "gradient-checkpointing-kwargs",
    "per-gpu-train-batch-size": "per-device-train-batch-size",
    "max-train-steps": "max-steps",
}
"""Argument of a script's own parser -> argument of transformers or TRL that it always means."""
_SUMS = (("max-source-length", "max-target-length"), ("source-max-len", "target-max-len"))
"""Lengths of prompt and answer, which are one sequence of a decoder."""
_PROGRAMS: Mapping[str, re.Pattern[str]] = {
    "llamafactory": re.compile(
        r"(.*/)?(train_bash\.py|llamafactory-cli|lmf)|llamafactory\.launcher|(.*/)?src/train\.py"
    ),
    "trl": re.compile(r"(.*/)?trl|trl\.scripts\.sft|(.*/)?trl/scripts/sft\.py"),
    "axolotl": re.compile(r"axolotl(\.cli\.train)?"),
    "ms-swift": re.compile(r"(.*/)?swift|swift\.cli\.(sft|pt)|(.*/)?swift/cli/(sft|pt)\.py"),
    "automodel": re.compile(r"automodel|nemo_automodel\.cli\.app"),
    "verl": re.compile(r"verl(\.trainer\.sft_trainer)?"),
}
"""Pattern of the path, module or command of each program with known defaults."""


def known_program(program: str) -> str:
    """Return the name of a program with known defaults, by path, module or command; or empty."""
    return next((name for name, one in _PROGRAMS.items() if one.fullmatch(program)), "")


def is_trl(program: str) -> bool:
    """Return True for the script of supervised fine-tuning in TRL, by path, module or command."""
    return known_program(program) == "trl"


def is_factory(program: str) -> bool:
    """Return True for the program of LLaMA-Factory, by path, module or command."""
    return known_program(program) == "llamafactory"


_KEYS: Mapping[str, tuple[frozenset[str], ...]] = {
    "llamafactory-cli": tuple(
        frozenset({"model_name_or_path", key})
        for key in ("finetuning_type", "cutoff_len", "template", "stage")
    ),
    "trl": tuple(
        frozenset({"model_name_or_path", key}) for key in ("max_length", "use_peft", "packing")
    ),
    "axolotl": tuple(
        frozenset({"base_model", key}) for key in ("datasets", "sequence_len", "adapter")
    ),
    "swift": tuple(
        frozenset({"model", key}) for key in ("tuner_type", "train_type", "attn_impl", "quant_bits")
    ),
}
"""Sets of keys of a YAML file by program; a file with all keys of a set is of the program."""


def program_of_document(document: Mapping[str, Any]) -> str:
    """Return the program whose arguments a document contains; empty if none is known."""
    keys = document.keys()
    known = (name for name, sets in _KEYS.items() if any(own <= keys for own in sets))
    return next(known, "")


def reads_yaml(program: str) -> bool:
    """Return True if the first argument of a program is a YAML file with all arguments."""
    return known_program(program) in ("llamafactory", "axolotl", "ms-swift", "automodel")


def written_flags(document: Mapping[str, Any]) -> Flags:
    """Return the arguments in a YAML file by flag: `false` of a switch that is off, JSON of a
    section.
    """
    off = {name: ("false",) for name in document if document[name] is False}
    sections = {
        name: (json.dumps(value),) for name, value in document.items() if isinstance(value, Mapping)
    }
    plain = {name.replace("_", "-"): words for name, words in {**off, **sections}.items()}
    return {**plain, **flags_of_document(document)}


def sets_batch(flags: Flags, program: str) -> bool:
    """Return True if the micro-batch is known: given, or the default of a program."""
    return known_program(program) != "" or "per-device-train-batch-size" in flags


def takes_factory_words(flags: Flags, program: str) -> bool:
    """Return True for LLaMA-Factory and scripts with its words; program : as in `translated`."""
    return is_factory(program) or "finetuning-type" in flags


_TRAINER = frozenset(
    {"do-train", "logging-steps", "logging-strategy", "save-steps", "save-strategy",
     "eval-strategy", "evaluation-strategy", "optim", "max-steps", "bf16", "fp16"}
)  # fmt: skip
"""Arguments of `TrainingArguments` that loops of scripts name otherwise (`mixed_precision`)."""


def is_trainer(flags: Flags, program: str) -> bool:
    """Return True for a script of Hugging Face's Trainer, False for a loop and if it is unknown."""
    known = known_program(program) != "" or takes_factory_words(flags, program)
    return known or not _TRAINER.isdisjoint(flags)


def translated(flags: Flags, program: str, world_size: int = 1) -> Translated:
    """Return arguments with aliases replaced, and with the defaults of known programs.

    program : path of the script or name of the module; empty if there is none. world_size : number
    of GPUs.
    """
    found, taken = dict(flags), list[str]()
    if known_program(program) == "axolotl":
        found = _of_axolotl(found, world_size)
        kept = " ".join(flags.get("gradient-checkpointing", ()))
        if kept in _OFFLOADED:
            meant = f"--activation_offloading {_OFFLOADED[kept]}"
            taken.append(f"--gradient_checkpointing {kept} taken for {meant}")
    elif known_program(program) == "ms-swift":
        own = renamed(found, world_size)
        found, taken = dict(own.flags), [*own.taken]

    def take(name: str, meant: str, words: tuple[str, ...]) -> None:
        given = " ".join([f"--{name.replace('-', '_')}", *found.pop(name)])
        if meant not in flags:
            found[meant] = words
            if is_factory(program):
                return  # its words, which are no guesses
            shown = " ".join([f"--{meant.replace('-', '_')}", *words])
            taken.append(f"{given} taken for {shown}")

    for name, meant in _ALIASES.items():
        if name in found:
            take(name, meant, found[name])
    for first, second in _SUMS:
        sizes = [found.get(name, ("",))[0] for name in (first, second)]
        if all(size.isascii() and size.isdigit() and len(size) < 9 for size in sizes):
            del found[second]
            take(first, "max-length", (str(sum(map(int, sizes))),))
    for name in ("bits", "quantization-bit"):
        bits = " ".join(found.get(name, ()))
        if bits in ("4", "8"):
            take(name, f"load-in-{bits}bit", ("True",))
        elif bits in ("16", "32"):
            del found[name]
    stem = program.rpartition("/")[2]
    if takes_factory_words(found, program):
        taken += _of_factory(found, known=is_factory(program))
    elif stem == "qlora.py" or "full-finetune" in found:
        taken += _of_qlora(found)
    elif is_trl(program):
        taken += _of_trl(found)
    if "flash-attn" in found:
        kind = " ".join(found["flash-attn"]).lower()
        kernels = {"fa2": "flash_attention_2", "fa3": "flash_attention_3",
                   "true": "flash_attention_2", "": "flash_attention_2",
                   "auto": "sdpa", "sdpa": "sdpa", "disabled": "eager"}  # fmt: skip
        if kind in kernels:
            take("flash-attn", "attn-implementation", (kernels[kind],))
    return Translated(flags=found, taken=tuple(taken))


def _on(found: Flags, name: str, default: str = "false") -> bool:
    return ("".join(found.get(name, (default,))[:1]) or "true").lower() in _YES


def _of_factory(found: dict[str, tuple[str, ...]], *, known: bool) -> Iterator[str]:
    """Yield sentences on defaults of LLaMA-Factory, and set them in `found`.

    known : True for its program; False for scripts with its words, which have other lengths.

    Source: `src/llamafactory/hparams/{finetuning_args,model_args}.py` of 0.9.5.
    """
    kind = " ".join(found.get("finetuning-type", ("lora",)))
    if kind == "lora":
        if "finetuning-type" not in found:
            yield "--finetuning_type not given; using lora, the default of LLaMA-Factory"
        found.pop("finetuning-type", None)
        found["use-peft"] = ("True",)
        found.setdefault("lora-r", ("8",))
        found.setdefault("lora-dropout", ("0",))
        found.setdefault("use-bnb-nested-quant", ("True",))
        targets = " ".join(found.get("lora-target-modules", ("all",)))
        found["lora-target-modules"] = ("all-linear",) if targets == "all" else (targets,)
    else:
        for name in [name for name in found if name.startswith("lora-")]:
            del found[name]
    if "gradient-checkpointing" not in found and not _on(found, "disable-gradient-checkpointing"):
        found["gradient-checkpointing"] = ("True",)
        yield "LLaMA-Factory recomputes all layers by default"
    found.pop("disable-gradient-checkpointing", None)
    found.pop("use-reentrant-gc", None)
    defaults = {
        "cutoff-len": "2048",
        "per-device-train-batch-size": "8",
        "optim": "adamw_torch_fused",
    }
    for name, value in defaults.items() if known else ():
        if name not in found:
            found[name] = (value,)
            yield f"--{name.replace('-', '_')} not given; using {value}, a default of LLaMA-Factory"


def _of_trl(found: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield sentences on defaults of TRL's script, and set them in `found`.

    Source: `trl/trainer/{base_config,sft_config,model_config}.py` of 1.16, and `TrainingArguments`
    of transformers 5.24.
    """
    if "bf16" not in found and not _on(found, "fp16"):
        found["bf16"] = ("True",)
    defaults = {
        "max-length": "1024",
        "per-device-train-batch-size": "8",
        "gradient-checkpointing": "True",
        "dtype": "float32",
        "optim": "adamw_torch_fused",
    }
    for name, value in defaults.items():
        if name not in found:
            found[name] = (value,)
            yield f"--{name.replace('-', '_')} not given; using {value}, the default of TRL"


_AXOLOTL: Mapping[str, str] = {
    "sequence-len": "max-length",
    "micro-batch-size": "per-device-train-batch-size",
    "optimizer": "optim",
    "peft-use-dora": "use-dora",
}
"""Argument of axolotl -> argument of transformers or TRL."""


def _of_axolotl(given: Flags, world_size: int) -> dict[str, tuple[str, ...]]:
    """Return the arguments of axolotl in the words of transformers and TRL, with its defaults.

    Source: `axolotl/utils/schemas/{config,training,peft}.py` of 0.19.
    """
    found = {_AXOLOTL.get(name, name): words for name, words in given.items()}
    if _fuses_adapters(found, world_size):
        found["lora-mlp-kernel"] = ("auto-enabled",)
    sharded = found.pop("fsdp-version", None) is not None
    defaults = {"max-length": "512", "per-device-train-batch-size": "1"}
    for name, value in {**defaults, "optim": "adamw_torch_fused"}.items():
        found.setdefault(name, (value,))
    for name in ("bf16", "fp16"):
        if " ".join(found.get(name, ())) == "auto":
            found[name] = ("True",)
    if (place := _OFFLOADED.get(" ".join(found.get("gradient-checkpointing", ())))) is not None:
        found["gradient-checkpointing"] = ("True",)
        found["activation-offloading"] = (place,)
    # `loaders/model.py`; the argument of the same name is that of experts (`moe_quant.py`)
    found.pop("bnb-4bit-use-double-quant", None)
    nested = True
    with suppress(ValueError, AttributeError):
        kwargs = json.loads(" ".join(found.get("bnb-config-kwargs", ("{}",))))
        nested = kwargs.pop("bnb_4bit_use_double_quant", True) is True
        if not kwargs:
            found.pop("bnb-config-kwargs", None)
    found["use-bnb-nested-quant"] = (str(nested),)
    for name, kernel in (("flash-attention", "flash_attention_2"), ("sdp-attention", "sdpa")):
        if name in found and _on(found, name):
            del found[name]
            found["attn-implementation"] = (kernel,)
    if found.pop("adapter", ("",))[0] in ("lora", "qlora"):
        found["use-peft"] = ("True",)
        found.setdefault("lora-dropout", ("0.0",))
        if found.pop("lora-target-linear", ("false",)) in ((), ("true",)):
            found["lora-target-modules"] = ("all-linear",)
    elif not (sharded or "deepspeed" in found) and not _on(found, "float32"):
        found["dtype"] = ("bfloat16",)  # replicas of weights and states in 16 bits
    return found


_OFFLOADED: Mapping[str, str] = {"offload": "True", "offload_disk": "disk"}
"""Value of axolotl's `gradient_checkpointing` -> that of `activation_offloading`, which it implies.

Source: `check_gradient_checkpointing_w_offload` in `axolotl/utils/schemas/validation.py` of 0.19.
"""
_FUSED_KERNELS = (
    "lora-mlp-kernel", "lora-qkv-kernel", "lora-o-kernel", "lora-embedding-kernel",
)  # fmt: skip


def _fuses_adapters(found: Flags, world_size: int) -> bool:
    """Return True if axolotl enables its fused kernels of adapters without being asked to.

    Source: `check_auto_enable_lora_kernels` in `axolotl/utils/schemas/config.py` of 0.19.
    """
    adapter = " ".join(found.get("adapter", ()))
    if adapter not in ("lora", "qlora") or "rl" in found:
        return False
    if any(name in found for name in _FUSED_KERNELS):
        return False
    if _on(found, "trust-remote-code") or _on(found, "nvfp4-merge-aware"):
        return False
    if adapter == "lora" and _on(found, "load-in-8bit"):
        return False
    return world_size == 1 or found.get("fsdp-version", ("2",)) == ("2",)


def axolotl_fsdp_version(flags: Flags) -> str:
    """Return the version of FSDP of axolotl's arguments with `fsdp_config`.

    Source: `check_fsdp_version_in_fsdp_config` in `axolotl/utils/schemas/validation.py` of 0.19.
    """
    section: Mapping[str, Any] = {}
    with suppress(ValueError):
        section = json.loads(" ".join(flags.get("fsdp-config", ("{}",))))
    given = " ".join(flags.get("fsdp-version", ()))
    return given or str(section.get("version") or section.get("fsdp_version") or 1)


def _of_qlora(found: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield sentences on defaults of qlora.py, and set them in `found`.

    Source: `qlora.py` of artidoro/qlora: adapters of all linear layers on a base of 4 bits.
    """
    if not _on(found, "full-finetune"):
        yield "--full_finetune False taken for adapters of all linear layers, as in qlora.py"
        found["use-peft"] = ("True",)
        found.setdefault("lora-r", ("64",))
        found.setdefault("lora-dropout", ("0.0",))
        found.setdefault("lora-target-modules", ("all-linear",))
        found.setdefault("use-bnb-nested-quant", ("True",))
    found.pop("full-finetune", None)
    if "gradient-checkpointing" not in found:
        found["gradient-checkpointing"] = ("True",)
        yield "qlora.py recomputes all layers by default"


# --------------------------------------------------------------------------------------------------
# Batches of samples.


_BATCHES: Mapping[str, Batching] = {
    "sft.py": "longest",
    "qlora.py": "longest",
    "run_clm.py": "wrapped",
}
"""Batching by script, where no argument changes it; TRL and LLaMA-Factory pad to the longest.

Sources: `DataCollatorForLanguageModeling` of TRL 1.16 (`trainer/sft_trainer.py`), the collator of
qlora.py, `group_texts` of transformers' `run_clm.py`, and `pad_to_multiple_of=8` of LLaMA-Factory
0.9.5 (`train/sft/workflow.py`).
"""


def batching_of(flags: Flags, program: str) -> KnownBatching | None:
    """Return how a script makes micro-batches of its samples; None if that is not known.

    TRL and ms-swift pack by best fit, LLaMA-Factory by a knapsack; only flash attention stays
    within samples.

    flags : arguments of the script, not translated.
    program : path of the script or name of the module; empty without a script.
    """
    names = ("attn-implementation", "flash-attn", "attn-impl")
    kernel = " ".join(word for name in names for word in flags.get(name, ()))
    flash = "flash" in kernel or kernel in ("fa2", "fa3")
    factory = takes_factory_words(flags, program)
    padded = factory or known_program(program) in ("trl", "ms-swift")
    usual = "longest" if padded else _BATCHES.get(program.rpartition("/")[2])
    multiple = 8 if factory else 1
    given = " ".join(flags.get("pad-to-multiple-of", ()))
    if given.isascii() and given.isdigit() and 0 < len(given) < 7 and int(given):
        multiple = int(given)
    if factory and _given(flags, "neat-packing"):
        return KnownBatching("packed" if flash else "packed-full")
    if _given(flags, "packing"):
        strategy = " ".join(flags.get("packing-strategy", ())).lower()
        if strategy == "wrapped":
            return KnownBatching("wrapped")
        if strategy == "sequential":
            return None
        return KnownBatching("packed" if flash and not factory else "packed-full")
    if _given(flags, "padding-free"):
        return KnownBatching("padding-free") if flash else None
    sampling = " ".join(flags.get("train-sampling-strategy", ()))
    if _given(flags, "group-by-length") or sampling == "group_by_length":
        return KnownBatching("grouped", multiple)
    return None if usual is None else KnownBatching(usual, multiple)


def _given(flags: Flags, name: str) -> bool:
    """Return whether a flag is on: given without a value, or as true, 1 or yes."""
    return name in flags and (" ".join(flags[name]).lower() or "true") in _YES
