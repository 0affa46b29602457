"""The layout string of Megatron-LM: which layers stand on which pipeline stage.

`--pipeline-model-parallel-layout` spells the stages one after the other, `|` between them: `E` is
the embedding, `t` a transformer layer, `m` a multi-token-prediction layer, `L` the loss; `x*3` is
`xxx`, `(tt|)*3` is `tt|tt|tt|`, commas mean nothing. The grammar and the rules are those of
`megatron/core/transformer/pipeline_parallel_layer_layout.py` (NVIDIA/Megatron-LM, main).
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["LayoutError", "layout_string", "parse_layout", "stage_sizes"]

_KINDS = frozenset("EtmL|")
_MOST = 1 << 16
"""Characters of a layout at most, written out; far above any model."""


class LayoutError(ValueError):
    """A string that is no layout, or one of another model; the text says why, without a subject."""


def layout_string(sizes: Sequence[int]) -> str:
    """Return the layout of stages with so many layers each: `Et*7|t*9|t*9|t*7L`."""
    stages = ["t" if size == 1 else f"t*{size}" for size in sizes]
    return "E" + "|".join(stages) + "L"


def parse_layout(text: str) -> tuple[str, ...]:
    """Return the stages of a layout written out, such as `("Ett", "ttL")`.

    Raises
    ------
    LayoutError : a character is unknown, a bracket or a repetition is incomplete.
    """
    written, at = "", 0
    source = text.replace(",", "")
    while at < len(source):
        if source[at] == "(":
            end = source.find(")", at)
            if end < 0:
                raise LayoutError("a bracket is not closed")
            piece = _unrolled(source[at + 1 : end])
            count, next_at = _count(source, end + 1)
            if count is None:
                raise LayoutError("a bracket needs a repetition such as (tt|)*3")
        else:
            piece = _unit(source[at])
            count, next_at = _count(source, at + 1)
        written += _repeated(piece, 1 if count is None else count, len(written))
        at = next_at
    return tuple(written.split("|"))


def stage_sizes(text: str, *, num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return the transformer layers of every stage.

    Raises
    ------
    LayoutError : it is no layout, or none of this model, or one that no plan has: several parts
        per stage, multi-token prediction, a stage without a layer.
    """
    stages = parse_layout(text)
    if len(stages) % num_stages:
        raise LayoutError(f"has {len(stages)} parts, no multiple of the {num_stages} stages")
    flat = "".join(stages)
    if flat[:1] != "E" or flat.count("E") != 1:
        raise LayoutError("needs one E, as its first character")
    if flat[-1:] != "L" or flat.count("L") != 1:
        raise LayoutError("needs one L, as its last character")
    if flat.count("t") != num_layers:
        raise LayoutError(f"has {flat.count('t')} layers where the model has {num_layers}")
    if "m" in flat:
        raise LayoutError("has multi-token-prediction layers (m), which no plan has")
    if len(stages) != num_stages:
        raise LayoutError(
            f"has {len(stages) // num_stages} parts per stage, and no plan is interleaved"
        )
    sizes = tuple(stage.count("t") for stage in stages)
    if not all(sizes):
        raise LayoutError(f"leaves stage {sizes.index(0)} without a layer, which no plan does")
    return sizes


def _unit(character: str) -> str:
    if character not in _KINDS:
        raise LayoutError(f"holds the unknown character {character!r}")
    return character


def _unrolled(text: str) -> str:
    """Return what stands in a bracket, which holds no other bracket."""
    if not text:
        raise LayoutError("a bracket is empty")
    written, at = "", 0
    while at < len(text):
        count, next_at = _count(text, at + 1)
        written += _repeated(_unit(text[at]), 1 if count is None else count, len(written))
        at = next_at
    return written


def _count(text: str, at: int) -> tuple[int | None, int]:
    """Return the number of a repetition that begins at `at`, and where what follows begins."""
    if text[at : at + 1] != "*":
        return None, at
    end = at + 1
    while end < len(text) and text[end].isascii() and text[end].isdigit():
        end += 1
    if end == at + 1:
        raise LayoutError("a * is followed by no number")
    if end - at > 7:
        raise LayoutError(f"repeats something more than {_MOST} times")
    return int(text[at + 1 : end]), end


def _repeated(piece: str, count: int, before: int) -> str:
    if before + len(piece) * count > _MOST:
        raise LayoutError(f"describes more than {_MOST} layers and stages")
    return piece * count
