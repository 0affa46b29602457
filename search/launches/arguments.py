"""Arguments of a launch as words, and which of them change neither memory nor time.

What the words of one trainer mean is another file; here they are looked up, checked and counted as
understood, so that a launch can say what nobody has read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from autopar.documents.json import shorten
from autopar.errors import DocumentError
from autopar.records import dataclass

__all__ = ["HARMLESS", "Ignored", "LaunchArguments", "UnpricedError", "words_of"]


class UnpricedError(DocumentError):
    """A launch that may well run, and has something that nobody here can price."""


@dataclass(frozen=True, kw_only=True)
class Ignored:
    """An argument that the reading did not need."""

    flag: str
    value: str
    understood: bool
    """It is known to change neither memory nor time; otherwise nobody knows what it does."""


HARMLESS = re.compile(
    r"""
    adam-.* | adlr-autoresume.* | apply-query-key-layer-scaling | async-(ckpt|save|strategy).* |
    attention-softmax-in-fp32 | auto-detect-ckpt-format | calculate-per-token-loss |
    check-(for-.*|weight-hash.*) | ckpt-.* | clip-grad | data-(cache-path|path|args-path) |
    dataloader-type | decoupled-.* | dist-ckpt-.* | distributed-(backend|timeout-minutes) |
    disable-gloo-process-groups | end-weight-decay | eval-.* | exit-(duration|signal).* |
    fim-.* | finetune | init-method-.* | load | log-.* | logging-level | loss-scale.* | lr |
    lr-.* | manual-gc.* |
    merge-file | min-lr | min-loss-scale | initial-loss-scale | mmap-bin-files | mock-data |
    moe-(aux-loss-coeff|z-loss-coeff|router-(load-balancing-type|bias-update-rate|group-topk|
    num-groups|pre-softmax|score-function|topk-scaling-factor|enable-expert-bias|dtype)) |
    mscale.* | mtp-loss-scaling-factor | no-(bias-gelu-fusion|check-for-nan-in-loss-and-grad|
    ckpt-fully-parallel-(save|load)|load-(optim|rng)|mmap-bin-files|save-(optim|rng)|
    use-tokenizer-model-from-checkpoint-args|masked-softmax-fusion) |
    non-persistent-.* |
    norm-epsilon | num-workers | one-logger.* | override-opt.param-scheduler | per-split-.* |
    profile.* | rampup-batch-size | rerun-mode | rotary-(base|interleaved|scaling-factor|
    seq-len-interpolation-factor) | save | save-(interval|retain-interval) | seed | split |
    muon-.* | sgd-momentum | straggler-.* | step-batch-size-schedule | tensorboard-.* |
    test-(mode|data-path) | tiktoken-.* |
    timing-log-.* | tokenizer-model | train-(data-path|sync-interval) |
    use-(checkpoint-args|checkpoint-opt.param-scheduler|mcore-models|persistent-ckpt-worker|
    dist-ckpt|tp-pp-dp-mapping|rope-scaling) | valid-data-path | verify-integrity | vocab-file |
    wandb-.* | weight-decay.* | accumulate-allreduce-grads-in-fp32 | ddp-average-in-collective |
    apply-layernorm-1p | enable-experimental | test-only | hysteresis | start-weight-decay |
    data-sharding | moe-token-drop-policy | eod-mask-loss | reset-position-ids |
    reset-attention-mask | no-async-tensor-model-parallel-allreduce | empty-unused-memory-level |
    no-persist-layer-norm
    """,
    re.VERBOSE,
)
"""Flags that say how a run is logged, stored, fed, seeded and steered."""


_NONE_AT_ZERO = frozenset({"mtp-num-layers", "num-experts"})
"""Numbers of what a model need not have, of which 0 says that it has none."""


@dataclass(frozen=True, kw_only=True)
class LaunchArguments:
    """Words by flag without hyphens in front, and which of them were asked for."""

    source: str
    """What is read, for sentences on what is wrong with it."""
    words: Mapping[str, tuple[str, ...]]
    asked: set[str]
    """Filled by the lookups below."""

    def fail(self, flag: str, problem: str, remedy: str | None = None) -> DocumentError:
        """Return the sentence on an unusable flag."""
        return DocumentError(self.source, problem, key=f"--{flag}", remedy=remedy)

    def unpriced(self, flag: str, problem: str, remedy: str) -> UnpricedError:
        """Return the sentence on a flag that runs and is not priced."""
        return UnpricedError(self.source, problem, key=f"--{flag}", remedy=remedy)

    def has(self, flag: str) -> bool:
        """Return whether a flag is given."""
        self.asked.add(flag)
        return flag in self.words

    def list(self, flag: str) -> tuple[str, ...]:
        """Return the words of a flag, those of `[a b]` apart; none where it is absent."""
        self.asked.add(flag)
        text = " ".join(self.words.get(flag, ()))
        return tuple(re.sub(r"[\[\],]", " ", text).split())

    def text(self, flag: str, default: str = "") -> str:
        """Return the one word of a flag."""
        self.asked.add(flag)
        words = self.words.get(flag)
        if words is None:
            return default
        if len(words) != 1:
            raise self.fail(flag, f"expected one value, got {shorten(' '.join(words))}")
        return words[0]

    def choice(self, flag: str, known: tuple[str, ...], default: str) -> str:
        """Return a word out of the known ones."""
        found = self.text(flag, default)
        if found not in known:
            raise self.fail(flag, f"expected one of {', '.join(known)}, got {shorten(found)}")
        return found

    def number(
        self, flag: str, default: int | None = None, *, most: int | None = None, digits: int = 9
    ) -> int:
        """Return a positive whole number; raises DocumentError without it and without a default."""
        if not self.has(flag):
            if default is None:
                raise self.fail(flag, "is missing", "add it")
            return default
        found = self._whole(flag, self.text(flag), digits)
        if most is not None and found > most:
            raise self.fail(flag, f"expected at most {most}, got {found}")
        return found

    def numbers(self, flag: str) -> tuple[int, ...]:
        """Return positive whole numbers, none where the flag is absent."""
        return tuple(self._whole(flag, word) for word in self.list(flag))

    def real(self, flag: str, default: float) -> float:
        """Return a finite number that is not negative."""
        text = self.text(flag, str(default))
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise self.fail(flag, f"expected a number of at least 0, got {shorten(text)}")
        return value

    def ignored(self) -> tuple[Ignored, ...]:
        """Return the flags that were not asked for, in the order of their names."""
        return tuple(
            Ignored(
                flag=flag,
                value=" ".join(self.words[flag]),
                understood=HARMLESS.fullmatch(flag) is not None,
            )
            for flag in sorted(self.words)
            if flag not in self.asked
        )

    def _whole(self, flag: str, text: str, digits: int = 9) -> int:
        # short before int(), which refuses thousands of digits
        if not (text.isascii() and text.isdigit() and len(text) <= digits and int(text) > 0):
            unknown = "$" in text or "`" in text
            raise self.fail(
                flag,
                f"expected a positive integer, got {shorten(text)}",
                "write the number, the script's variable is unknown here" if unknown else None,
            )
        return int(text)


def words_of(document: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the flags of a document of arguments; `false` and `null` are flags not given."""
    words: dict[str, tuple[str, ...]] = {}
    for key, value in document.items():
        flag = str(key).lstrip("-").replace("_", "-")
        if value is None or value is False or isinstance(value, Mapping):
            continue
        if flag in _NONE_AT_ZERO and str(value) == "0":
            continue
        if value is True:
            words[flag] = ()
        elif isinstance(value, list | tuple):
            words[flag] = tuple(str(item) for item in value)
        elif isinstance(value, float) and value.is_integer():
            # YAML reads 5e3 as a float
            words[flag] = (str(int(value)),)
        else:
            words[flag] = (str(value),)
    return words
