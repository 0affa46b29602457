"""What the layers of a strategy keep, recompute and need in their backward, in bytes per sample.

Source: cost-model.md "Memory of a rank". Degrees that were not counted follow from counted ones,
never below what would be counted, and every such step leaves a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.backward_memory import ShardKind, backward_bytes
from autopar.model import LayerMemory, LayerSpec
from autopar.plan import LayerStrategy
from autopar.specs import head_dim
from search.cost.memory import Recipe

__all__ = [
    "ActivationBytes",
    "activation_bytes",
    "layer_backward_bytes",
    "tensor_bytes",
    "ulysses_bytes",
]

F64 = NDArray[np.float64]

_Known = tuple[float | None, str]
"""Bytes, None where nothing says them, and from where they were derived ('': as counted)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ActivationBytes:
    """(S,) bytes per sample that a layer's strategy keeps, recomputes, and needs in its backward.

    kept is nan where it was not measured.
    """

    kept: F64
    recomputed: F64
    backward: F64
    """Above what is kept or was recomputed, while the layer's backward runs."""
    derived: tuple[str, ...]
    """Sentences on degrees whose bytes follow from those at another one, or from a rule."""


def activation_bytes(
    memory: LayerMemory,
    strategies: Sequence[LayerStrategy],
    spec: LayerSpec,
    recipe: Recipe,
    *,
    sequence_parallel: bool,
) -> ActivationBytes:
    """Return the activation bytes per sample of every strategy.

    tp: `tensor_bytes`; Ulysses: `ulysses_bytes`; backward: `layer_backward_bytes`; all over c.
    Checkpointed input: entry /t with SP or Ulysses, /c.
    """
    kept = np.full(len(strategies), np.nan)
    recomputed = np.zeros(len(strategies))
    backward = np.zeros(len(strategies))
    derived: dict[tuple[bool, int], str] = {}
    ruled: dict[tuple[bool, int], str] = {}
    for k, s in enumerate(strategies):
        split = s.ulysses or sequence_parallel
        if s.ulysses:
            full, source = ulysses_bytes(memory, s.tp, spec, recipe)
        else:
            full, source = tensor_bytes(
                memory, s.tp, spec, recipe, sequence_parallel=sequence_parallel
            )
        if full is None:
            continue
        name = "ulysses" if s.ulysses else "tp"
        if source:
            derived[s.ulysses, s.tp] = f"activations at {name}={s.tp} are {source}"
        kind: ShardKind = "ulysses" if s.ulysses else "sp" if sequence_parallel else "tp"
        peak, rule = layer_backward_bytes(memory, s.tp, kind, spec, recipe, full)
        if rule:
            ruled[s.ulysses, s.tp] = rule
        backward[k] = peak / s.cp
        if not s.checkpoint:
            kept[k] = full / s.cp
        elif memory.checkpoint_bytes_per_sample is not None:
            kept[k] = memory.checkpoint_bytes_per_sample / ((s.tp if split else 1) * s.cp)
            recomputed[k] = full / s.cp
    return ActivationBytes(
        kept=kept,
        recomputed=recomputed,
        backward=backward,
        derived=(*(derived[key] for key in sorted(derived)), *_by_rule(ruled)),
    )


def tensor_bytes(
    memory: LayerMemory, degree: int, spec: LayerSpec, recipe: Recipe, *, sequence_parallel: bool
) -> _Known:
    """Return what a tensor-parallel layer keeps of a sample on a rank, in bytes.

    table[t]; without SP a missing t stays unknown, with SP it follows from its neighbours as
    `_derived` says.
    """
    table = memory.activation_bytes_per_sample
    if degree in table or not sequence_parallel:
        return table.get(degree), ""
    return _derived(table, degree, "tp", spec, recipe)


def ulysses_bytes(memory: LayerMemory, degree: int, spec: LayerSpec, recipe: Recipe) -> _Known:
    """Return what a Ulysses layer keeps of a sample on a rank, in bytes.

    Counted degrees are as counted, others follow from them as `_derived` says; without any it is
    table[1]/t, which leaves out what the all-to-alls keep.
    """
    table, counted = memory.activation_bytes_per_sample, memory.ulysses_activation_bytes_per_sample
    if degree == 1 or not counted:
        whole = table.get(1)
        known = whole is None or degree == 1
        return (
            None if whole is None else whole / degree,
            "" if known else f"those at tp=1 over {degree}, without what its all-to-alls keep",
        )
    if degree in counted:
        return counted[degree], ""
    return _derived(counted, degree, "ulysses", spec, recipe)


def layer_backward_bytes(
    memory: LayerMemory,
    degree: int,
    kind: ShardKind,
    spec: LayerSpec,
    recipe: Recipe,
    kept_bytes: float,
) -> tuple[float, str]:
    """Return what the backward of one sample needs above `kept_bytes`, and the rule if it is one.

    As counted; at another degree the rule of `autopar.backward_memory`, raised by what the nearest
    counted degree is above it.
    """
    counted = (
        memory.ulysses_backward_bytes_per_sample
        if kind == "ulysses" and degree > 1
        else memory.backward_bytes_per_sample
    )
    if degree in counted:
        return counted[degree], ""

    def rule(at: int) -> float:
        return backward_bytes(
            spec, spec.seq_length, at, kind, kept_bytes, element_bytes=recipe.element
        )

    text = "by a rule (not counted)"
    if spec.num_heads is None or spec.ffn_hidden_size is None:
        text = "half of its activations, and its input at tp > 1 (not counted, widths unknown)"
        return rule(degree), text
    if not counted:
        return rule(degree), text
    nearest = min(counted, key=lambda t: (abs(t - degree), t))
    return rule(degree) * max(1.0, counted[nearest] / rule(nearest)), text


def _derived(
    counted: Mapping[int, float], degree: int, name: str, spec: LayerSpec, recipe: Recipe
) -> _Known:
    """Return the bytes at a degree that is not among the counted ones, never below a count of it.

    Over all t ranks a layer never keeps less at a larger degree, and grows by nothing but copies
    of k and v and, with SP, of the tokens that experts see. So up to the largest counted degree
    the next counted t1 gives t1*A(t1)/t, and beyond it the largest t0 gives (t0*A(t0) + copies)/t,
    at most A(t0), which is all that is known without heads.
    """
    if not counted:
        return None, ""
    larger = [t for t in counted if t > degree]
    if larger:
        above = min(larger)
        text = f"those at {name}={above} times {above}/{degree} (an upper bound)"
        return counted[above] * above / degree, text
    below = max(counted)
    heads = spec.num_heads
    if heads is None:
        return counted[below], f"those at {name}={below} (an upper bound)"
    key_value = spec.num_kv_heads or heads
    attentions = 2.0 if spec.cross_attention else 1.0
    more = max(key_value, degree) - max(key_value, below)
    element = spec.seq_length * recipe.element
    copies = attentions * 2.0 * more * head_dim(spec) * element
    text = f"those at {name}={below} times {below}/{degree}"
    if name == "ulysses" or more:
        text += ", and copies of k and v"
    if name == "tp" and spec.num_experts is not None:
        visited = spec.experts_per_token or spec.num_experts
        copies += (degree - below) * visited * spec.hidden_size * element
        text += ", and the tokens of its experts"
    return min(counted[below], (counted[below] * below + copies) / degree), text


def _by_rule(ruled: Mapping[tuple[bool, int], str]) -> tuple[str, ...]:
    """Return one sentence for every rule, with the degrees that it stands for."""
    degrees: dict[str, list[str]] = {}
    for (ulysses, degree), text in sorted(ruled.items()):
        name = "ulysses" if ulysses else "tp"
        degrees.setdefault(text, []).append(f"{name}={degree}")
    return tuple(
        f"memory of its backward at {', '.join(names)} is {text}" for text, names in degrees.items()
    )
