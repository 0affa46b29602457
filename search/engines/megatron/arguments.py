"""Argument names, context-parallel degrees and pipeline layout strings of Megatron-LM."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum

from autopar.records import Record
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy, data_degree

Argument = tuple[str, tuple[str, ...]]
"""A flag without leading hyphens, and its words; no words for a flag without a value."""
Arguments = Mapping[str, tuple[str, ...]]
"""Words by flag without leading hyphens."""


class Flag(StrEnum):
    """Argument names that several modules use, without leading hyphens."""

    TENSOR = "tensor-model-parallel-size"
    STAGES = "pipeline-model-parallel-size"
    CONTEXT = "context-parallel-size"
    COMMUNICATION = "cp-comm-type"
    HIERARCHY = "hierarchical-context-parallel-sizes"
    LAYOUT = "pipeline-model-parallel-layout"
    MICRO_BATCH = "micro-batch-size"
    GLOBAL_BATCH = "global-batch-size"
    SHARDING = "data-parallel-sharding-strategy"
    GRANULARITY = "recompute-granularity"
    METHOD = "recompute-method"
    RECOMPUTED = "recompute-num-layers"


SEVERAL = frozenset(
    {
        Flag.COMMUNICATION,
        Flag.HIERARCHY,
        "moe-aux-loss-coeff",
        "moe-router-load-balancing-type",
        "offload-modules",
        "rampup-batch-size",
        "recompute-modules",
    }
)
"""Flags with several words, which YAML and JSON files may contain as a single string."""


# --------------------------------------------------------------------------------------------------
# Conversion between layer strategies and values of `--cp-comm-type`.


class MegatronDegrees(Record):
    """Tensor- and context-parallel degrees of a model in Megatron-LM, equal for all layers."""

    tensor: int = 1
    context: int = 1
    exchange: int = 1
    """All-to-all degree inside the context-parallel group for `a2a+p2p`; 1: no such layers."""

    def data(self, plan: Plan) -> int:
        """Return the data-parallel degree of a plan with these degrees; 0 if they do not divide."""
        return data_degree(plan.world_size, plan.num_stages, self.tensor * self.context)

    def layer(self, word: str) -> LayerStrategy:
        """Return the strategy of a layer with a `--cp-comm-type` that is a key of `WAYS`."""
        ulysses, ring = WAYS[word]
        if not ulysses:
            return LayerStrategy(tp=self.tensor, cp=self.context)
        # An all-to-all over the whole context group is Ulysses of that degree.
        degree = self.exchange if ring else self.context
        return LayerStrategy(tp=degree, ulysses=degree > 1, cp=self.context // degree)


WAYS = {
    "p2p": (False, True),
    "a2a": (True, False),
    "a2a+p2p": (True, True),
    # Imported as a ring and never exported: plans have one type of context parallelism.
    "all_gather": (False, True),
    "allgather": (False, True),
}
"""Value of `--cp-comm-type` -> (True if it uses Ulysses all-to-all, True if it uses a ring)."""


def communication(strategy: LayerStrategy) -> str:
    """Return the `--cp-comm-type` of a layer; without effect at context degree 1."""
    way = (strategy.ulysses, strategy.cp > 1 or not strategy.ulysses)
    return next(word for word, known in WAYS.items() if known == way)


def engine_vocab(
    degrees: MegatronDegrees, layers: Sequence[LayerStrategy], *, zero3: bool
) -> VocabStrategy:
    """Return the strategy of embedding and head in Megatron-LM.

    Tensor ranks shard the weights, context ranks the tokens. If all layers use all-to-all over the
    entire context-parallel group, embedding and head count as Ulysses too.
    """
    if degrees.context > 1 and all(s.ulysses and s.cp == 1 for s in layers):
        return VocabStrategy(tp=degrees.context, ulysses=True, zero3=zero3)
    return VocabStrategy(tp=degrees.tensor, zero3=zero3, cp=degrees.context)


# --------------------------------------------------------------------------------------------------
# The layout string of Megatron-LM, which assigns layers to pipeline stages.
#
# `--pipeline-model-parallel-layout` lists the stages in order, separated by `|`. `E` is the
# embedding, `t` a transformer layer, `m` a multi-token-prediction layer, `L` the loss. `x*3` means
# `xxx`, `(tt|)*3` means `tt|tt|tt|`; commas are ignored. Source of the grammar and the rules:
# `megatron/core/transformer/pipeline_parallel_layer_layout.py` (NVIDIA/Megatron-LM, main).


_KINDS = frozenset("EtmL|")
_MOST = 1 << 16
"""Maximum length of an expanded layout, in characters; far above any real model."""


class LayoutError(ValueError):
    """Layout that is invalid or does not fit the model.

    The message continues the name of the layout, such as `has 3 parts, no multiple of 2 stages`.
    """


def parse_layout(text: str) -> tuple[str, ...]:
    """Return the parts of a layout in expanded form, such as `("Ett", "ttL")`.

    Raises LayoutError for unknown characters, incomplete brackets or repetitions, and layouts of
    more than `_MOST` characters.
    """
    return tuple(_written_out(text.replace(",", "")).split("|"))


def _written_out(text: str, *, in_bracket: bool = False) -> str:
    """Return a layout with brackets and repetitions expanded; brackets are not nested."""
    written, at = "", 0
    while at < len(text):
        piece, at = text[at], at + 1
        if piece == "(" and not in_bracket:
            end = text.find(")", at)
            if end < 0:
                raise LayoutError("a bracket is not closed")
            if end == at:
                raise LayoutError("a bracket is empty")
            piece, at = _written_out(text[at:end], in_bracket=True), end + 1
            if text[at : at + 1] != "*":
                raise LayoutError("a bracket needs a repetition such as (tt|)*3")
        elif piece not in _KINDS:
            raise LayoutError(f"the layout contains the unknown character {piece!r}")
        count, at = _count(text, at)
        # Checked before the expansion: `t*9999999` would fill the memory.
        if len(written) + len(piece) * count > _MOST:
            raise LayoutError(f"describes more than {_MOST} layers and stages")
        written += piece * count
    return written


def _count(text: str, at: int) -> tuple[int, int]:
    """Return (N, position after it) of a repetition `*N` at position `at`; N is 1 without one.

    Raises LayoutError for `*` without a number, or with too large a number.
    """
    if text[at : at + 1] != "*":
        return 1, at
    match = re.compile(r"\*([0-9]+)").match(text, at)
    if match is None:
        raise LayoutError("a * needs a number")
    # Checked before int(), which rejects numbers of thousands of digits.
    if len(match[1]) > 6:
        raise LayoutError(f"repeats a part more than {_MOST} times")
    return int(match[1]), match.end()
