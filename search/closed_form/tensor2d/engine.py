"""The compiled engine: one candidate with all its figures, or candidates by the million.

Packs them for the engine and reads its answers; every formula is in csrc/closed_form/tensor2d.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Integral
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autopar.documents.json import shorten
from autopar.errors import InfeasibleExecution, InputError
from search.closed_form import native
from search.closed_form.native import check_names, integers, packed_rows
from search.closed_form.tensor2d.documents import (
    ATTENTIONS,
    STRATEGIES,
    Attention,
    Model,
    Strategy,
    System,
)

__all__ = [
    "CANDIDATE",
    "COLLECTIVES",
    "COMPAT",
    "CORRECT",
    "LARGEST",
    "OPERATIONS",
    "OUTCOME",
    "PRODUCT",
    "REASONS",
    "STATISTICS",
    "Quirks",
    "link_s",
    "native_engine",
    "pack_candidates",
    "price_candidate",
    "refusal",
    "unpack_candidate",
]


# --------------------------------------------------------------------------------------------------
# Switches for what the published numbers of this model contain and should not.
#
# All off is the corrected model and the default; all on reproduces published figures (`compat`).


@dataclass(frozen=True, kw_only=True)
class Quirks:
    """Defects to reproduce, one switch each; numbers are those of the documentation."""

    single_allreduce: bool = False
    """Q1: an all-reduce inside one domain, or with one rank per domain, moves data once, and its
    latency is never doubled; right: twice, everywhere."""
    free_slow_links: bool = False
    """Q2: pipeline links between domains cost nothing once some are inside; right: their time."""
    norm_width_of_sequence: bool = False
    """Q3: norms of the two-dimensional model are as wide as the sequence; right: as the
    hidden size."""
    norm_gradient_group: bool = False
    """Q4: both gradients of such a norm are reduced over the columns; right: weights over the
    rows, statistics over the columns."""
    extra_panel: bool = False
    """Q5: a communication-bound SUMMA product exposes one panel too many and pools the loops of
    backward; right: each loop by itself."""
    bias_shapes: bool = False
    """Q6: biases behind a reduce-scatter work on all rows; right: on their share."""
    one_adapter: bool = False
    """Q7: more than one network adapter per GPU helps only groups with several ranks per domain;
    right: every transfer."""
    flash_traffic: bool = False
    """Q8: keys and values gathered again in backward count as local parts; right: whole."""
    dropped_rows: bool = False
    """Q9: sequences that the tensor degree does not divide lose their remainder; right: rows are
    of the whole micro-batch."""
    recompute_time_only: bool = False
    """Q10: recomputing attention adds time but no FLOP; right: both."""
    repeated_panels: bool = False
    """Q14: SUMMA products count 2*i per output and write every panel; right: 2*i-1, once when
    nothing is divided."""


CORRECT = Quirks()
COMPAT = Quirks(**dict.fromkeys((f.name for f in fields(Quirks)), True))


# --------------------------------------------------------------------------------------------------
# Why the compiled engine refuses a candidate, in the order of its codes: in general, with figures.
#
# What is wrong with a question itself, whatever the sizes, is said where the question is read.


REASONS: tuple[str, ...] = (
    "",
    "a degree, a panel count or a placement is below 1, or tp2 is above 1 without a second axis",
    "dp * tp1 * tp2 * pp != n_gpus",
    "tp1 does not divide the heads",
    "tp1 does not divide the hidden size",
    "tp1 does not divide the feed-forward width",
    "pp does not divide the layers",
    "dp * mbs does not divide the batch",
    "tp2 does not divide the hidden size",
    "the sequence is shorter than tp1 * tp2",
    "the tokens of a micro-batch do not divide over the GPUs that share them",
    "nb is above the hidden size",
    "neither of kv_heads and tp1 divides the other",
    "a placement does not divide its group",
    "a fast domain is smaller than the placement",
    "tp1 does not divide the width of a head, or the sequence",
    "needs more memory than a GPU has",
)
"""Sentences without figures; `evaluate` gives them with their figures."""
PRODUCT = REASONS.index("dp * tp1 * tp2 * pp != n_gpus")
_CONTRADICTIONS = (PRODUCT, REASONS.index("a placement does not divide its group"))
"""What no other model or machine would change."""


def refusal(
    reason: int,
    model: Model,
    strategy: Strategy,
    c: Mapping[str, int],
    n_gpus: int,
    batch: int,
    system: System,
) -> InfeasibleExecution:
    """Return the refusal of one candidate with the figures that contradict each other.

    reason : a code of the engine for a question that was well formed, memory left aside.
    c : the fields of a packed candidate.
    """
    flat = strategy == "1d"
    tp1, tensor = ("tp", "tp") if flat else ("tp1", "tp1 * tp2")
    dims = {tp1: c["tp1"], **({} if flat else {"tp2": c["tp2"]}), "pp": c["pp"], "dp": c["dp"]}
    product = " * ".join(f"{name}({size})" for name, size in dims.items())
    ranks = c["tp1"] * c["tp2"]
    tokens = c["mbs"] * model.l
    shared = f"tp2 = {c['tp2']}" if strategy == "2d" else f"{tensor} = {ranks}"
    inside = {name: c[f"nv_{field}"] for name, field in _fields(tp1).items()}
    apart = [
        (f"nv_{name}", inside[name], c[field])
        for name, field in _fields(tp1).items()
        if c[field] % inside[name]
    ]
    group, part, dim = apart[0] if apart else ("", 0, 0)
    used = math.prod(inside.values())
    keys = f"heads of width {model.e // model.h} and a sequence of {model.l}"
    sentences = (
        "",
        "",
        f"n_gpus: {product} = {math.prod(dims.values())} != {n_gpus}",
        f"cannot divide {model.h} heads over {tp1} = {c['tp1']} evenly",
        f"cannot divide the hidden size {model.e} over {tp1} = {c['tp1']} evenly",
        f"cannot divide the feed-forward width {model.f} over {tp1} = {c['tp1']} evenly",
        f"cannot divide {model.depth} layers over pp = {c['pp']} evenly",
        f"cannot divide a batch of {batch} over dp * mbs = {c['dp'] * c['mbs']} evenly",
        f"cannot divide the hidden size {model.e} over tp2 = {c['tp2']} evenly",
        f"a sequence of {model.l} leaves some of {tensor} = {ranks} GPUs without a row",
        f"cannot divide the {tokens} tokens of a micro-batch (mbs * l) over {shared} evenly",
        f"nb = {c['nb']} panels are more than the {model.e} columns that they divide",
        f"neither of {model.key_heads} kv_heads and {tp1} = {c['tp1']} divides the other",
        f"placement.{group}: {part} does not divide its group of {dim}",
        f"a fast domain has {system.nvlink_size} GPUs and the placement puts {used} into one",
        f"cannot divide {keys} over tp1 = {c['tp1']} evenly",
    )
    assert sentences[reason], REASONS[reason]
    kind: Literal["input", "infeasible"] = "input" if reason in _CONTRADICTIONS else "infeasible"
    return InfeasibleExecution(sentences[reason], kind)


def _fields(tp1: str) -> dict[str, str]:
    """Return the published names of groups, and the packed fields that hold them."""
    return {tp1: "tp1", "tp2": "tp2", "dp": "dp", "pp": "pp"}


# --------------------------------------------------------------------------------------------------
# Candidates packed for the engine, and its answers unpacked.


CANDIDATE: np.dtype[Any] = native.tensor2d.CANDIDATE
"""Fields of one packed candidate; `1d` has `tp1` for its `tp`, and `tp2` = 1."""
OUTCOME = np.dtype(
    [
        ("ok", np.bool_),
        ("reason", object),
        ("total_time_s", np.float64),
        ("memory_bytes", np.float64),
        ("sample_rate_per_s", np.float64),
    ]
)
"""What is known of one candidate; figures are 0 where it contradicts itself."""
_PARTS = ("comp", "mem", "tp_comm", "dp_comm", "pp_comm", "bubble")
STATISTICS: tuple[str, ...] = (
    "t",
    "flops_per_gpu",
    "mem",
    *(f"t_{name}" for name in _PARTS),
    *(f"{name}_frac" for name in _PARTS),
    "wts_mem",
    "wts_grad_mem",
    "wts_optimizer_states_mem",
    "acts_mem",
)
"""Published names of the engine's statistics, in its order; the placement follows them."""
COLLECTIVES = ("allgather", "reducescatter", "allreduce", "reduce", "broadcast")
"""Published names of the engine's collectives, in its order."""
OPERATIONS: tuple[str, ...] = (
    *("embedding", "fc1", "fc1-bias", "act1", "dpr1", "fc2", "fc2-bias", "dpr2", "ln1", "qkv"),
    *("fusedla", "logits", "softmax", "dpr_at", "attend"),
    *("vproj", "vproj-bias", "dpr_v", "ln2", "ln_f", "head", "loss"),
)
"""Published names of the engine's operations, in its order."""
LARGEST = 2**31 - 1
"""Of GPUs, of a batch, and of every field of a candidate."""
_MOST_SAMPLES = 2**63 - 1
"""Of a batch where one candidate is priced."""
_NAMES: tuple[str, ...] = CANDIDATE.names or ()


def native_engine(
    strategy: Strategy, model: Model, n_gpus: int, batch: int, system: System, quirks: Quirks
) -> Any:
    """Return the compiled engine of a model on a system."""
    for name, value in (("n_gpus", n_gpus), ("batch", batch)):
        if type(value) is not int or not 1 <= value <= LARGEST:
            raise InputError(
                f"{name}: the value is {shorten(value)}, expected an integer from 1 to {LARGEST}"
            )
    if strategy not in STRATEGIES:
        raise InputError(
            f"strategy: the value is {shorten(strategy)}, expected one of {', '.join(STRATEGIES)}"
        )
    return _engine(strategy, model, n_gpus, batch, system, quirks)


def _engine(
    strategy: Strategy, model: Model, n_gpus: int, batch: int, system: System, quirks: Quirks
) -> Any:
    return native.tensor2d.Engine(
        model.model_dump()
        | {
            "kv_heads": model.kv_heads or 0,
            "gpt": model.structure == "gpt",
            # as a multiple of the 2 bytes of a weight
            "gradients": model.gradient_bytes / 2,
        },
        system.model_dump(),
        asdict(quirks),
        STRATEGIES.index(strategy),
        n_gpus,
        batch,
    )


def price_candidate(
    strategy: Strategy,
    model: Model,
    config: Mapping[str, int],
    placement: Mapping[str, int],
    n_gpus: int,
    batch: int,
    system: System,
    quirks: Quirks,
    *,
    attention: Attention,
    recompute: bool,
    layers: bool,
    published: bool,
) -> dict[str, Any]:
    """Return the statistics of one candidate by name, and its operations under `layers`.

    published : the published model, which recomputes in one dimension only.

    Raises
    ------
    InputError: a number is none that the engine can hold.
    InfeasibleExecution: the candidate cannot run.
    """
    c = _candidate(strategy, config, placement)
    if math.prod(c[name] for name in ("dp", "tp1", "tp2", "pp")) != n_gpus:
        raise refusal(PRODUCT, model, strategy, c, n_gpus, batch, system)
    for name, value in (("global_batch_size", batch), *c.items()):
        _check_size(name, value, _MOST_SAMPLES if name == "global_batch_size" else LARGEST)
    wrong = _attention_fault(strategy, attention, recompute=recompute, published=published)
    packed = np.array([tuple(c[name] for name in _NAMES)], dtype=CANDIDATE)
    # faults of sizes are named first, so the engine is asked with some attention
    way = 0 if wrong else ATTENTIONS.index(attention)
    # its number of GPUs is for searches
    engine = _engine(strategy, model, 1, int(batch), system, quirks)
    reason, figures, rows = engine.evaluate(packed, way, recompute, layers)
    if reason:
        raise refusal(reason, model, strategy, c, n_gpus, batch, system)
    if wrong:
        raise InfeasibleExecution(wrong, "input")
    statistics: dict[str, Any] = dict(zip(STATISTICS, figures.tolist(), strict=True))
    for name, field in _published(strategy).items():
        if name.startswith("nv_"):
            statistics[name] = c[field]
    if layers:
        statistics["layers"] = [_layer(row) for row in rows]
    return statistics


def link_s(
    system: System, quirks: Quirks, operation: str, volume_gb: float, ranks: int, in_domain: int
) -> float:
    """Return the seconds of a collective, or of one transfer (`p2p`).

    volume_gb : the whole (gathered, or not yet reduced) tensor, 1e9 bytes.
    ranks, in_domain : size of the group, and how many of it share a domain; it divides `ranks`.
    """
    code = (*COLLECTIVES, "p2p").index(operation)
    seconds: float = native.tensor2d.link_s(
        system.model_dump(), asdict(quirks), code, volume_gb, ranks, in_domain
    )
    return seconds


def _layer(row: np.void) -> dict[str, Any]:
    """Return one operation as plain numbers: 1e9 bytes, 1e12 FLOP and seconds."""
    forward, backward = row["forward"], row["backward"]
    listed = bool(row["in_panels"])
    return {
        "name": OPERATIONS[row["operation"]],
        "weights_mem": float(row["weights_gb"]),
        # gradients have the bytes of weights in published tables, whatever a model says of them
        "weights_grad_mem": float(row["weights_gb"]),
        "flops_fwd": float(forward["flops"]),
        "activation_buffer": float(row["kept_gb"]),
        **_links("fwd", forward, listed=listed),
        "flops_bwd": float(backward["flops"]),
        **_links("bwd", backward, listed=listed),
        **_times("fwd", forward),
        **_times("bwd", backward),
        "t": float(forward["time_s"] + backward["time_s"]),
    }


def _links(name: str, one: np.void, *, listed: bool) -> dict[str, Any]:
    """Return the collectives of a pass: lists where there are several, or loops over panels."""
    count = int(one["num_links"])
    volumes = one["volumes_gb"][:count].tolist()
    types = [COLLECTIVES[code] for code in one["collectives"][:count]]
    if count > 1 or (listed and count):
        return {f"comm_{name}": volumes, f"comm_{name}_type": types}
    return {
        f"comm_{name}": volumes[0] if count else 0.0,
        f"comm_{name}_type": types[0] if count else "none",
    }


def _times(name: str, one: np.void) -> dict[str, float]:
    return {
        f"t_{name}": float(one["time_s"]),
        # an integer where there is no collective, as published tables have it
        f"t_{name}_comm": float(one["link_s"]) if one["num_links"] else 0,
        f"t_{name}_comp": float(one["compute_s"]),
        f"t_{name}_mem": float(one["memory_s"]),
        f"intensity_{name}": float(one["intensity"]),
    }


def _candidate(
    strategy: Strategy, config: Mapping[str, int], placement: Mapping[str, int]
) -> dict[str, int]:
    """Return the packed fields of a candidate of published names.

    Raises
    ------
    InfeasibleExecution: a name is missing, unknown, or its value no positive integer.
    """
    if strategy not in STRATEGIES:
        raise _contradiction(
            f"strategy: the value is {shorten(strategy)}, expected one of {', '.join(STRATEGIES)}"
        )
    known = _published(strategy)
    domains = tuple(name for name in known if name.startswith("nv_"))
    degrees = tuple(name for name in known if name not in domains)
    config = _counts("config", config, degrees, () if strategy == "1d" else ("tp",))
    placement = _counts("placement", placement, domains, ())
    if strategy != "1d" and config.get("tp", config["tp1"] * config["tp2"]) != (
        config["tp1"] * config["tp2"]
    ):
        raise _contradiction(
            f"config.tp: {config['tp']} != tp1 * tp2 = {config['tp1']} * {config['tp2']}"
        )
    given = {**config, **placement}
    return dict.fromkeys(_NAMES, 1) | {field: given[name] for name, field in known.items()}


def _counts(
    where: str, given: Mapping[str, int], required: tuple[str, ...], optional: tuple[str, ...]
) -> dict[str, int]:
    """Return the numbers, those of NumPy as plain ones."""
    for name in given:
        if name not in required and name not in optional:
            raise _contradiction(f"{where}.{name}: is unknown, expected {', '.join(required)}")
    for name in required:
        if name not in given:
            raise _contradiction(f"{where}.{name}: is missing, expected {', '.join(required)}")
    for name, value in given.items():
        # True is an Integral too, and no count
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise _contradiction(
                f"{where}.{name}: the value is {shorten(value)}, expected a positive integer"
            )
    return {name: int(value) for name, value in given.items()}


def _check_size(name: str, value: object, most: int) -> None:
    """Raise InputError where a number is none that the engine can hold."""
    if not isinstance(value, Integral) or not 1 <= int(value) <= most:
        raise InputError(
            f"{name}: the value is {shorten(value)}, expected an integer from 1 to {most}"
        )


def _attention_fault(
    strategy: Strategy, attention: str, *, recompute: bool, published: bool
) -> str | None:
    """Return what is wrong with an attention of a strategy, whatever the sizes are."""
    if attention not in ATTENTIONS:
        return (
            f"attention: the value is {shorten(attention)}, expected one of {', '.join(ATTENTIONS)}"
        )
    if attention == "summa" and strategy != "2d":
        return f"attention: summa needs the strategy 2d, and this one is {strategy}"
    if recompute and attention == "flash":
        return "recompute: flash attention keeps no scores; take attention plain"
    if recompute and published and strategy != "1d":
        return f"recompute: the published model has it in 1d only, and the strategy is {strategy}"
    return None


def _contradiction(reason: str) -> InfeasibleExecution:
    return InfeasibleExecution(reason, "input")


def pack_candidates(
    strategy: Strategy,
    candidates: NDArray[Any] | Mapping[str, Any] | Iterable[Mapping[str, int]],
) -> NDArray[Any]:
    """Return candidates as an array of `CANDIDATE`.

    candidates : such an array; columns by published name, broadcast to one length; or one mapping
        each, the configuration and the placement in one.

    Raises
    ------
    InputError: a name is unknown or missing, or a value is not what it can hold.
    """
    if isinstance(candidates, np.ndarray):
        if candidates.dtype != CANDIDATE:
            raise InputError(
                f"candidates: the array has fields {shorten(candidates.dtype.names)}, expected "
                "those of search.closed_form.tensor2d.CANDIDATE"
            )
        return np.ascontiguousarray(candidates)
    expected = _published(strategy)
    if isinstance(candidates, Mapping):
        return _pack_columns(strategy, expected, candidates)
    rows = list(candidates)
    for n, row in enumerate(rows):
        for name in expected:
            if name not in row:
                raise InputError(f"candidates[{n}].{name}: is missing")
    # unknown names go along, to be refused by name
    names = dict.fromkeys(name for row in rows for name in row if name not in expected)
    return _pack_columns(
        strategy,
        expected,
        {name: [row[name] for row in rows] for name in expected}
        | {name: [row.get(name, 0) for row in rows] for name in names},
    )


def unpack_candidate(strategy: Strategy, row: np.void) -> tuple[dict[str, int], dict[str, int]]:
    """Return configuration and placement of one packed candidate under their published names."""
    values = {name: int(row[name]) for name in _NAMES}
    found = {name: values[packed] for name, packed in _published(strategy).items()}
    config = {name: value for name, value in found.items() if not name.startswith("nv_")}
    if strategy != "1d":
        config["tp"] = values["tp1"] * values["tp2"]
    return config, {name: value for name, value in found.items() if name.startswith("nv_")}


def _published(strategy: Strategy) -> dict[str, str]:
    """Return the published names of a candidate, and the fields that hold them."""
    flat = strategy == "1d"
    degrees = ("tp1",) if flat else ("tp1", "tp2")
    panels = ("nb",) if strategy == "2d" else ()
    domains = tuple(f"nv_{name}" for name in degrees)
    fields = ("dp", *degrees, "pp", "mbs", *panels, *domains, "nv_dp", "nv_pp")
    return {name.replace("tp1", "tp") if flat else name: name for name in fields}


def _pack_columns(
    strategy: Strategy, expected: Mapping[str, str], columns: Mapping[str, Any]
) -> NDArray[Any]:
    given = dict(columns)
    # tp follows from the other two; where it is given it has to agree
    if strategy != "1d" and "tp" in given and {"tp1", "tp2"} <= given.keys():
        tp = _column("tp", given.pop("tp"))
        if not np.all(tp == _column("tp1", given["tp1"]) * _column("tp2", given["tp2"])):
            raise InputError("candidates.tp: is not tp1 * tp2 everywhere")
    check_names("candidates", given, expected)
    columns = {packed: _column(name, given[name]) for name, packed in expected.items()}
    return packed_rows("candidates", CANDIDATE, columns)


def _column(name: str, values: Any) -> NDArray[Any]:
    # degrees are multiplied, and 32 bits would overflow
    return integers(f"candidates.{name}", values, LARGEST).astype(np.int64)
