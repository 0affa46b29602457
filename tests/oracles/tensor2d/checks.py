"""Constraints on a candidate, checked before pricing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral
from typing import Literal, get_args

from autopar.errors import InfeasibleExecution
from autopar.records import shorten
from search.closed_form.tensor2d.documents import Model, Strategy, System
from tests.oracles.tensor2d.step import Candidate

Attention = Literal["flash", "plain", "summa"]
"""flash: no scores in memory; plain: scores in memory; summa: scores in memory, and SUMMA GEMMs."""


def candidate_of(
    strategy: Strategy, config: Mapping[str, int], placement: Mapping[str, int]
) -> Candidate:
    """Return the candidate from its published names.

    Raises
    ------
    InfeasibleExecution: a name is missing or unknown, or its value is no positive integer.
    """
    if strategy not in get_args(Strategy):
        raise _contradiction(
            f"strategy: the value is {shorten(strategy)}, expected one of "
            f"{', '.join(get_args(Strategy))}"
        )
    flat = strategy == "1d"
    degrees = ("dp", "tp", "pp", "mbs") if flat else ("dp", "tp1", "tp2", "pp", "mbs")
    panels = ("nb",) if strategy == "2d" else ()
    domains = ("nv_tp", "nv_dp", "nv_pp") if flat else ("nv_tp1", "nv_tp2", "nv_dp", "nv_pp")
    config = _counts("config", config, (*degrees, *panels), () if flat else ("tp",))
    placement = _counts("placement", placement, domains, ())
    if not flat and config.get("tp", config["tp1"] * config["tp2"]) != (
        config["tp1"] * config["tp2"]
    ):
        raise _contradiction(
            f"config.tp: {config['tp']} != tp1 * tp2 = {config['tp1']} * {config['tp2']}"
        )
    return Candidate(
        data=config["dp"],
        columns=config["tp" if flat else "tp1"],
        rows=1 if flat else config["tp2"],
        pipeline=config["pp"],
        microbatch=config["mbs"],
        panels=config["nb"] if panels else 1,
        columns_in_domain=placement["nv_tp" if flat else "nv_tp1"],
        rows_in_domain=1 if flat else placement["nv_tp2"],
        data_in_domain=placement["nv_dp"],
        pipeline_in_domain=placement["nv_pp"],
    )


def check_candidate(
    model: Model, strategy: Strategy, c: Candidate, n_gpus: int, batch: int, system: System
) -> None:
    """Raise InfeasibleExecution where a candidate contradicts itself, the model or the system."""
    flat = strategy == "1d"
    tp1, tensor = ("tp", "tp") if flat else ("tp1", "tp1 * tp2")
    dims = {tp1: c.columns, "tp2": c.rows, "pp": c.pipeline, "dp": c.data}
    if flat:
        del dims["tp2"]
    if math.prod(dims.values()) != n_gpus:
        product = " * ".join(f"{name}({size})" for name, size in dims.items())
        raise _contradiction(f"n_gpus: {product} = {math.prod(dims.values())} != {n_gpus}")
    if model.l < c.columns * c.rows:
        raise InfeasibleExecution(
            f"a sequence of {model.l} leaves some of {tensor} = {c.columns * c.rows} GPUs without "
            "a row"
        )
    name, ranks = ("tp2", c.rows) if strategy == "2d" else (tensor, c.columns * c.rows)
    if c.microbatch * model.l % ranks:
        raise InfeasibleExecution(
            f"cannot divide the {c.microbatch * model.l} tokens of a micro-batch (mbs * l) over "
            f"{name} = {ranks} evenly"
        )
    if strategy == "2d" and c.panels > model.e:
        raise InfeasibleExecution(
            f"nb = {c.panels} panels are more than the {model.e} columns that they divide"
        )
    hidden = model.e if strategy == "2d" else c.rows
    grouped = model.kv_heads or c.columns
    if grouped % c.columns and c.columns % grouped:
        raise InfeasibleExecution(
            f"neither of {grouped} kv_heads and {tp1} = {c.columns} divides the other"
        )
    for what, divisor, text in (
        (model.h, c.columns, f"{model.h} heads over {tp1}"),
        (model.e, c.columns, f"the hidden size {model.e} over {tp1}"),
        (model.f, c.columns, f"the feed-forward width {model.f} over {tp1}"),
        (hidden, c.rows, f"the hidden size {hidden} over tp2"),
        (model.depth, c.pipeline, f"{model.depth} layers over pp"),
        (batch, c.data * c.microbatch, f"a batch of {batch} over dp * mbs"),
    ):
        if what % divisor:
            raise InfeasibleExecution(f"cannot divide {text} = {divisor} evenly")
    inside = {
        f"nv_{tp1}": (c.columns_in_domain, c.columns),
        "nv_tp2": (c.rows_in_domain, c.rows),
        "nv_dp": (c.data_in_domain, c.data),
        "nv_pp": (c.pipeline_in_domain, c.pipeline),
    }
    for name, (part, dim) in inside.items():
        if dim % part:
            raise _contradiction(f"placement.{name}: {part} does not divide its group of {dim}")
    used = math.prod(part for part, _ in inside.values())
    if used > system.nvlink_size:
        raise InfeasibleExecution(
            f"a fast domain has {system.nvlink_size} GPUs and the placement puts {used} into one"
        )


def check_attention(
    attention: str,
    model: Model,
    strategy: Strategy,
    c: Candidate,
    *,
    recompute: bool,
    compat: bool,
) -> None:
    """Raise InfeasibleExecution if this attention is unknown, or not possible for the candidate."""
    if attention not in get_args(Attention):
        raise _contradiction(
            f"attention: the value is {shorten(attention)}, expected one of "
            f"{', '.join(get_args(Attention))}"
        )
    if attention == "summa" and strategy != "2d":
        raise _contradiction(f"attention: summa needs the strategy 2d, and this one is {strategy}")
    if recompute and attention == "flash":
        raise _contradiction("recompute: flash attention stores no scores. Use attention plain")
    if recompute and compat and strategy != "1d":
        raise _contradiction(
            f"recompute: the published model has it in 1d only, and the strategy is {strategy}"
        )
    width = model.e // model.h
    if attention == "summa" and (width % c.columns or model.l % c.columns):
        raise InfeasibleExecution(
            f"cannot divide heads of width {width} and a sequence of {model.l} over tp1 = "
            f"{c.columns} evenly"
        )


def _counts(
    where: str, given: Mapping[str, int], required: tuple[str, ...], optional: tuple[str, ...]
) -> dict[str, int]:
    """Return the numbers as plain integers, NumPy's included."""
    for name in given:
        if name not in required and name not in optional:
            raise _contradiction(f"{where}.{name}: unknown key, expected {', '.join(required)}")
    for name in required:
        if name not in given:
            raise _contradiction(
                f"{where}.{name}: this key is missing, expected {', '.join(required)}"
            )
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise _contradiction(
                f"{where}.{name}: the value is {shorten(value)}, expected a positive integer"
            )
    return {name: int(value) for name, value in given.items()}


def _contradiction(reason: str) -> InfeasibleExecution:
    return InfeasibleExecution(reason, "input")
