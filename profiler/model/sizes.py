"""At which sequence lengths and tensor degrees a model is profiled, and how they are written."""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import InputError, OptionError
from autopar.model import ModelSpec
from autopar.model_measurements import TensorKind
from autopar.units import format_count
from profiler.model.options import ModelOptions
from profiler.model.sharding import Sharding

__all__ = [
    "DEFAULT_DEGREES",
    "length_cases",
    "seqs_text",
    "tensor_degrees",
    "tensor_kinds",
    "with_seq_lengths",
]

DEFAULT_DEGREES = (1, 2, 4, 8)
"""Tensor degrees of the documented tables."""
_KINDS: dict[str, tuple[TensorKind, TensorKind]] = {
    "megatron": ("sp", "tp"),
    "dtensor": ("dtensor_sp", "dtensor"),
}
_LENGTHS = 5
_SHORTEST = 64


def seqs_text(seqs: tuple[int, ...]) -> str:
    """Return sequence lengths as the documented keys have them: `2048` or `[512,512]`."""
    return str(seqs[0]) if len(seqs) == 1 else f"[{','.join(map(str, seqs))}]"


def with_seq_lengths(spec: ModelSpec, seqs: tuple[int, ...]) -> ModelSpec:
    """Return the spec at other sequence lengths, one per layer type."""
    layers = (replace(layer, seq_length=seq) for layer, seq in zip(spec.layers, seqs, strict=True))
    return replace(spec, layers=tuple(layers))


def tensor_kinds(
    options: ModelOptions, *, own_module: bool = False
) -> tuple[TensorKind, TensorKind]:
    """Return what the tables with and without sequence parallelism hold.

    A module's own plan decides whether it divides the sequence: both tables hold what it does.
    """
    return ("dtensor", "dtensor") if own_module else _KINDS[options.tp_impl]


def tensor_degrees(spec: ModelSpec, options: ModelOptions) -> tuple[int, ...]:
    """Return the tensor degrees to profile; the default leaves out those the model does not allow.

    Raises
    ------
    InputError: an asked-for degree does not divide heads, widths or a sequence length.
    """
    cases = length_cases(spec, options)
    found = []
    for degree in options.degrees or DEFAULT_DEGREES:
        sharding = Sharding(degree=degree, kind=tensor_kinds(options)[0])
        try:
            for case in cases:
                for layer in with_seq_lengths(spec, case).layers:
                    sharding.check(layer)
        except InputError:
            if options.degrees is not None or degree == 1:
                raise
        else:
            found.append(degree)
    return tuple(found)


def length_cases(spec: ModelSpec, options: ModelOptions) -> tuple[tuple[int, ...], ...]:
    """Return the sequence lengths of all layer types, case by case.

    Raises
    ------
    InputError: a case names another number of types, or is beyond a learned position table.
    """
    own = tuple(layer.seq_length for layer in spec.layers)
    types = len(own)
    if options.seq_lengths is None:
        cases = _default_cases(own) if options.mode == "sequence" else (own,)
    else:
        cases = tuple(case * types if len(case) == 1 else case for case in options.seq_lengths)
    for case in cases:
        if len(case) != types:
            raise OptionError(
                f"--seq: {seqs_text(case)} has {format_count(len(case), 'length')} and model "
                f"{spec.name!r} has {types} layer type(s); give one length, or one per type"
            )
        if spec.learned_positions and max(case) > spec.learned_positions:
            raise InputError(
                f"--seq: {max(case)} tokens are more than the {spec.learned_positions} rows of "
                f"the position table of model {spec.name!r}; choose shorter sequences"
            )
    if options.mode == "sequence" and len(cases) < 2:
        raise OptionError(
            f"--mode sequence measures several sequence lengths and model {spec.name!r} is too "
            "short for a default range; write --seq 64:512:x2"
        )
    return cases


def _default_cases(own: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return five lengths, each half of the next, that end at the model's own."""
    halves = (tuple(seq >> k for seq in own) for k in reversed(range(_LENGTHS)))
    return tuple(case for case in halves if case == own or min(case) >= _SHORTEST)
