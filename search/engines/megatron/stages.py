"""Megatron-LM arguments for the layer partition, expert layers and context parallelism.

An even partition is the number of chunks per stage, with one flag if the embedding counts as a
layer and one if the loss does. Every other partition is a layout string. A hybrid model has its
layers and their partition in one pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from autopar.errors import InputError
from autopar.pipeline.orders import rank_of
from autopar.run.architecture import Attention, DeltaNet, Layer, Mamba
from autopar.run.run import Run
from autopar.run.strategy import Chunk, Split, Strategy, even_chunks
from search.engines.megatron.arguments import Argument, Flag, LayoutError, parse_layout

PATTERN = "hybrid-layer-pattern"
LETTERS = "MG*+D-E"
"""Layers of a pattern, one part and one norm each: Mamba-2, gated delta net, attention, latent
attention, latent attention with an indexer, MLP, experts."""
_PAIR = re.compile(r"[*+DG][-E]")
"""Pattern of two layers that are one layer of a GPT model."""
_ENDS = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")
_CHUNKS = "num-virtual-stages-per-pipeline-rank"
_GROUP = "microbatch-group-size-per-virtual-pipeline-stage"


def stage_arguments(run: Run) -> Iterator[Argument]:
    """Yield the arguments for the layer partition of a run; none for an even one without chunks.

    Raises InputError if a layout string is needed that Megatron-LM does not support (`layout_of`).
    """
    strategy = run.strategy
    if run.model.is_hybrid:
        pattern = str(pattern_of(run))
        if pattern.startswith("-"):
            raise InputError(
                f"the pattern {pattern} begins with an MLP, which argparse takes for an argument",
                remedy="Start the pattern with another layer",
            )
        yield (PATTERN, (pattern,))
    elif (ends := even_ends(run)) is None:
        yield (Flag.LAYOUT, (layout_of(strategy),))
    else:
        for flag, counts in zip(_ENDS, ends, strict=True):
            if counts:
                yield (flag, ())
        if strategy.vpp > 1:
            yield (_CHUNKS, (str(strategy.vpp),))
    if strategy.vpp > 1 and strategy.group:
        yield (_GROUP, (str(strategy.group),))


def even_ends(run: Run) -> tuple[int, int] | None:
    """Return the number of layers, 0 or 1, that (embedding, loss) count as in an even partition.

    None: the partition is uneven, or has several chunks on a single stage.
    """
    model, stages, pp, vpp = run.model, run.strategy.stages, run.strategy.pp, run.strategy.vpp
    # Megatron-LM has no flag for several chunks at pipeline degree 1.
    if pp == 1 and vpp > 1:
        return None
    for ends in ((0, 0), (1, 0), (0, 1), (1, 1)) if pp > 1 else ((0, 0),):
        try:
            even = even_chunks(model.num_layers, pp, vpp, mtp=model.mtp, ends=ends)
        except InputError:
            continue
        if even == stages:
            return ends
    return None


def layout_of(strategy: Strategy) -> str:
    """Return the layout string of the chunks in execution order, such as `Et*3|t*4|t*4|t*3mL`.

    Raises InputError unless the embedding is in the first chunk, the head in the last, and layers
    are in order.
    """
    parts = parts_in_order(strategy)
    first = 0
    for place, chunk in enumerate(parts):
        if chunk.embeds != (place == 0) or chunk.head != (place == len(parts) - 1):
            raise InputError(
                "a pipeline layout of Megatron-LM needs the embedding in its first part "
                "and the head in its last"
            )
        if chunk.layers != tuple(range(first, first + len(chunk.layers))):
            raise InputError(
                f"part {place} of the pipeline layout does not start with layer {first}"
            )
        first += len(chunk.layers)
    return "|".join(map(_part, parts))


def chunks_of_layout(
    text: str, *, num_layers: int, num_stages: int, mtp: int = 0
) -> tuple[tuple[Chunk, ...], ...]:
    """Return the chunks of every stage that a layout string describes.

    num_layers, mtp : number of decoder and of MTP layers of the model.

    Raises LayoutError for a layout that is invalid or does not fit the model and the stages.
    """
    # Backslashes escape characters for the shell.
    parts = parse_layout(text.replace("\\", ""))
    if len(parts) % num_stages:
        raise LayoutError(
            f"the layout has {len(parts)} parts, no multiple of the {num_stages} stages"
        )
    flat = "".join(parts)
    for letter, is_there, place in (
        ("E", flat.startswith("E"), "first"),
        ("L", flat.endswith("L"), "last"),
    ):
        if not is_there or flat.count(letter) != 1:
            raise LayoutError(f"the layout needs one {letter}, as its {place} character")
    if flat.count("t") != num_layers:
        raise LayoutError(
            f"the layout has {flat.count('t')} layers where the model has {num_layers}"
        )
    if flat.count("m") not in (0, mtp):
        raise LayoutError(
            f"the layout has {flat.count('m')} MTP layers (m) where the model has {mtp}"
        )
    # Without `m`, as in earlier releases, all MTP layers are in the part of the loss.
    implied = 0 if "m" in flat else mtp
    found: list[list[Chunk]] = [[] for _ in range(num_stages)]
    first = 0
    for part, kinds in enumerate(parts):
        layers = tuple(range(first, first + kinds.count("t")))
        first += len(layers)
        further = kinds.count("m") + (implied if "L" in kinds else 0)
        found[part % num_stages].append(Chunk("E" in kinds, layers, further, "L" in kinds))
    return tuple(map(tuple, found))


class LayerPattern(NamedTuple):
    """Layers of a hybrid model, one letter of `LETTERS` each."""

    segments: tuple[str, ...]
    """Letters of every pipeline chunk in execution order; a single segment may span all stages."""
    mtp: str = ""
    """Letters of one MTP layer; empty without MTP."""
    depths: int = 0
    """Number of MTP layers."""

    @property
    def letters(self) -> str:
        """Letters of all layers, without those of MTP."""
        return "".join(self.segments)

    @property
    def is_paired(self) -> bool:
        """True if all letters are pairs that a GPT model has as one layer."""
        return all(not _PAIR.sub("", part) for part in (*self.segments, self.mtp))

    def __str__(self) -> str:
        """Return the value of `--hybrid-layer-pattern`."""
        return "/".join(("|".join(self.segments), *[self.mtp] * self.depths))


def parse_pattern(text: str) -> LayerPattern:
    """Return the layers that a value of `--hybrid-layer-pattern` describes.

    The form is `main/mtp/mtp`, where `|` separates the pipeline chunks of `main`. Source:
    `megatron/core/models/hybrid/hybrid_layer_allocation.py` (d98e8a64).

    Raises LayoutError for unknown letters, MTP parts that differ, attention of two kinds, and a
    pattern without layers.
    """
    main, *further = text.split("/")
    if not any(further):
        further = []
    for part, allowed in ((main, LETTERS + "|"), *((one, LETTERS) for one in further)):
        unknown = next((letter for letter in part if letter not in allowed), None)
        if unknown is not None:
            raise LayoutError(f"the pattern contains the unknown letter {unknown!r}")
        if "*" in part and ("+" in part or "D" in part):
            raise LayoutError("the pattern has both attention (*) and latent attention (+ or D)")
    if len({*further}) > 1:
        raise LayoutError(f"the MTP parts of the pattern differ: {further[0]} and {further[1]}")
    segments = tuple(main.split("|"))
    if not "".join(segments):
        raise LayoutError("the pattern has no layers")
    return LayerPattern(segments, further[0] if further else "", len(further))


def pattern_of(run: Run) -> LayerPattern:
    """Return the pattern of a run's layers, with one segment per pipeline chunk."""
    model = run.model
    parts = parts_in_order(run.strategy)
    letters = [letters_of(layer) for layer in model.each_layer]
    return LayerPattern(
        tuple("".join(letters[layer] for layer in chunk.layers) for chunk in parts),
        "".join(map(letters_of, model.each_mtp)) if model.mtp else "",
        model.mtp,
    )


_RECURRENT: dict[type, str] = {Mamba: "M", DeltaNet: "G"}
"""Letters of mixers that are not attention."""


def letters_of(layer: Layer) -> str:
    """Return the letters of a layer in `--hybrid-layer-pattern`, one for each part."""
    found = ""
    for mixer in layer.mixers:
        if isinstance(mixer, Attention):
            found += "*" if mixer.latent is None else "+" if mixer.indexer is None else "D"
        else:
            found += _RECURRENT[type(mixer)]
    return found + ("" if layer.mlp is None else "E" if layer.experts is not None else "-")


def parts_in_order(strategy: Strategy) -> list[Chunk]:
    """Return the chunks of all stages in execution order of a forward pass."""
    left = [list(stage) for stage in strategy.stages]
    parts = range(strategy.pp * strategy.vpp)
    return [left[rank_of(strategy.schedule, part, strategy.pp)].pop(0) for part in parts]


def _part(chunk: Chunk) -> str:
    layers = _repeated("t", len(chunk.layers)) + _repeated("m", chunk.mtp)
    return "E" * chunk.embeds + layers + "L" * chunk.head


def _repeated(kind: str, number: int) -> str:
    return kind * number if number < 2 else f"{kind}*{number}"


def layer_pattern(layers: tuple[bool, ...], *, last: bool = False) -> str:
    """Return the value of `--moe-layer-freq`: N for every Nth layer, or a sum of lists.

    layers : one boolean per layer, True if it has experts.
    last : as `--linear-attention-freq`, whose N is N - 1 layers of True, then one of False.
    """
    for every in range(1 + last, len(layers) + 1):
        chosen = (((at + 1) % every > 0) if last else at % every == 0 for at in range(len(layers)))
        if layers == tuple(chosen):
            return str(every)
    runs: list[tuple[bool, int]] = []
    for is_mixture in layers:
        if runs and runs[-1][0] == is_mixture:
            runs[-1] = (is_mixture, runs[-1][1] + 1)
        else:
            runs.append((is_mixture, 1))
    # `_eval_pattern` of Megatron-LM accepts digits, brackets, commas, + and * only.
    return "(" + "+".join(f"[{int(kind)}]*{number}" for kind, number in runs) + ")"


def context_words(split: Split) -> str:
    """Return the value of `--cp-comm-type` for a split."""
    if split.gathers_keys:
        return "all_gather"
    if split.exchanges_heads:
        return "a2a+p2p" if split.rings > 1 else "a2a"
    return "p2p"
