"""Python interface of the compiled tensor2d engine, for one candidate or millions of them.

It packs candidates for the engine and unpacks the results. All formulas are in
csrc/closed_form/tensor2d.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec.structs import asdict
from numpy.typing import NDArray

from autopar.documents.checks import load_document
from autopar.errors import InfeasibleExecution, InputError
from autopar.records import shorten
from search.closed_form import native
from search.closed_form.native import (
    ABSENT,
    LARGEST,
    DocumentField,
    Switches,
    check_choice,
    check_count,
    check_names,
    check_threads,
    given_rows,
    integers,
    interruptible,
    packed_rows,
    plain_columns,
)
from search.closed_form.tensor2d.documents import (
    ATTENTIONS,
    STRATEGIES,
    Attention,
    Model,
    Strategy,
    System,
)


class Quirks(Switches):
    """Defects of the published two-dimensional model that can be reproduced."""

    meanings = native.tensor2d.QUIRKS


CORRECT, COMPAT = Quirks.of(False), Quirks.of(True)


# --------------------------------------------------------------------------------------------------
# Reasons why the engine rejects a candidate, in the order of its codes. Each has a general text and
# a sentence with numbers.
#
# Errors that do not depend on sizes are raised by the code that reads the arguments.


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
"""Reasons without numbers; `evaluate` raises errors with numbers."""
PRODUCT = REASONS.index("dp * tp1 * tp2 * pp != n_gpus")
_CONTRADICTIONS = (PRODUCT, REASONS.index("a placement does not divide its group"))
"""Reasons that hold for every model and system."""


def refusal(
    reason: int,
    model: Model,
    strategy: Strategy,
    c: Mapping[str, int],
    n_gpus: int,
    batch: int,
    system: System,
) -> InfeasibleExecution:
    """Return the error for a candidate that the engine rejected, with the contradicting numbers.

    reason : index in `REASONS`, except the codes for values below 1 and for memory.
    c : fields of the packed candidate.
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
    """Return published group names -> packed fields; tp1 : published name of the tensor group."""
    return {tp1: "tp1", "tp2": "tp2", "dp": "dp", "pp": "pp"}


# --------------------------------------------------------------------------------------------------
# Candidates packed for the engine, and its results unpacked.


CANDIDATE: np.dtype[Any] = native.tensor2d.CANDIDATE
"""Fields of one packed candidate; `1d` stores its `tp` in `tp1`, with `tp2` = 1."""
OUTCOME = np.dtype(
    [
        ("ok", np.bool_),
        ("reason", object),
        ("total_time_s", np.float64),
        ("memory_bytes", np.float64),
        ("sample_rate_per_s", np.float64),
    ]
)
"""Result of one candidate; time and memory are 0 if its settings contradict each other."""
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
"""Published names of the statistics, in engine order; `evaluate` appends the placement."""
COLLECTIVES = ("allgather", "reducescatter", "allreduce", "reduce", "broadcast")
"""Published names of the engine's collectives, in engine order."""
OPERATIONS: tuple[str, ...] = (
    *("embedding", "fc1", "fc1-bias", "act1", "dpr1", "fc2", "fc2-bias", "dpr2", "ln1", "qkv"),
    *("fusedla", "logits", "softmax", "dpr_at", "attend"),
    *("vproj", "vproj-bias", "dpr_v", "ln2", "ln_f", "head", "loss"),
)
"""Published names of the engine's operations, in engine order."""
_MOST_SAMPLES = 2**63 - 1
"""Maximum samples per batch in `evaluate`."""
_NAMES: tuple[str, ...] = CANDIDATE.names or ()


def native_engine(
    strategy: Strategy, model: Model, n_gpus: int, batch: int, system: System, quirks: Quirks
) -> Any:
    """Return the compiled engine for a model on a system.

    batch : samples per step.

    Raises InputError if a count or the strategy is invalid.
    """
    for name, value in (("n_gpus", n_gpus), ("batch", batch)):
        check_count(name, value, f"an integer from 1 to {LARGEST}", 1, LARGEST)
    check_choice("strategy", strategy, STRATEGIES)
    return _engine(strategy, model, n_gpus, batch, system, quirks)


def _engine(
    strategy: Strategy, model: Model, n_gpus: int, batch: int, system: System, quirks: Quirks
) -> Any:
    return native.tensor2d.Engine(
        asdict(model)
        | {
            "kv_heads": model.kv_heads or 0,
            "gpt": model.structure == "gpt",
            # As a multiple of the 2 bytes of a weight.
            "gradients": model.gradient_bytes / 2,
        },
        asdict(system),
        quirks.flags(),
        STRATEGIES.index(strategy),
        n_gpus,
        batch,
    )


def known_model(model: Model | Mapping[str, Any] | Path | str, compat: bool | Quirks) -> Model:
    """Return the model; if `compat` is True, only with the five sizes of the published model.

    Raises InputError for an invalid document.
    """
    known = load_document(Model, model)
    return known.published() if compat is True else known


def evaluate(
    strategy: Strategy,
    model: Model | Mapping[str, Any] | Path | str,
    config: Mapping[str, int],
    placement: Mapping[str, int],
    n_gpus: int,
    global_batch_size: int,
    system: System | Mapping[str, Any] | Path | str,
    *,
    compat: bool | Quirks = False,
    attention: Attention = "flash",
    recompute: bool = False,
    layers: bool = False,
) -> dict[str, Any]:
    """Return the statistics of one candidate by name, in seconds, 1e9 bytes and 1e12 FLOP.

    config : `dp`, `tp`, `pp`, `mbs`; two-dimensional strategies also `tp1`, `tp2`, and `2d` `nb`.
    placement : ranks per NVLink domain of each group: `nv_tp` (or `nv_tp1`, `nv_tp2`), `nv_dp`,
        `nv_pp`.
    compat : True for the published model with its defects and only five sizes, False for the
        corrected model, or `Quirks` with the defects to reproduce.
    attention : `plain` stores the scores and ignores causal masks; `summa` (only `2d`) also
        distributes both attention GEMMs with SUMMA. Searches use `flash` only.
    recompute : True to recompute the tensors of plain attention in the backward pass.
    layers : True to add the key `layers`, with one row per operation of a layer and of the
        embedding, head and loss.

    Memory is not checked: compare `mem` with the system's `hbm_capacity`.

    Raises InputError: a document or a number is invalid. Raises InfeasibleExecution: the candidate
    cannot run; its `reason` explains why.
    """
    known, machine, batch = (
        known_model(model, compat),
        load_document(System, system),
        global_batch_size,
    )
    c = _candidate(strategy, config, placement)
    if math.prod(c[name] for name in ("dp", "tp1", "tp2", "pp")) != n_gpus:
        raise refusal(PRODUCT, known, strategy, c, n_gpus, batch, machine)
    for name, value in (("global_batch_size", batch), *c.items()):
        _check_size(name, value, _MOST_SAMPLES if name == "global_batch_size" else LARGEST)
    wrong = _attention_fault(strategy, attention, recompute=recompute, published=compat is True)
    packed = np.array([tuple(c[name] for name in _NAMES)], dtype=CANDIDATE)
    # Size errors are reported first, so the engine gets a valid attention.
    way = 0 if wrong else ATTENTIONS.index(attention)
    # Only searches use its number of GPUs.
    engine = _engine(strategy, known, 1, int(batch), machine, Quirks.of(compat))
    reason, figures, rows = engine.evaluate(packed, way, recompute, layers)
    if reason:
        raise refusal(reason, known, strategy, c, n_gpus, batch, machine)
    if wrong:
        raise InfeasibleExecution(wrong, "input")
    statistics: dict[str, Any] = dict(zip(STATISTICS, figures.tolist(), strict=True))
    for name, field in _published(strategy).items():
        if name.startswith("nv_"):
            statistics[name] = c[field]
    if layers:
        statistics["layers"] = [_layer(row) for row in rows]
    return statistics


def evaluate_many(
    strategy: Strategy,
    model: Model | Mapping[str, Any] | Path | str,
    candidates: NDArray[Any] | Mapping[str, Any] | Iterable[Mapping[str, int]],
    n_gpus: int,
    global_batch_size: int,
    system: System | Mapping[str, Any] | Path | str,
    *,
    compat: bool | Quirks = False,
    threads: int = 1,
) -> NDArray[Any]:
    """Return the results of many candidates, as a structured array in their order.

    candidates : an array of `CANDIDATE`; or columns by published name; or one mapping each, with
        the names of `config` and `placement` together.
    threads : threads of the compiled engine, 1 to 1024; results do not depend on their number.

    Fields: `ok`, `reason` (without numbers, empty for feasible candidates), `total_time_s`,
    `memory_bytes` and `sample_rate_per_s`. For a candidate that exceeds the memory of a GPU, `ok`
    is False, but time and memory are set.

    Raises InputError: a document or a column is invalid.
    """
    check_threads(threads)
    known, machine = known_model(model, compat), load_document(System, system)
    engine = native_engine(strategy, known, n_gpus, global_batch_size, machine, Quirks.of(compat))
    packed = pack_candidates(strategy, candidates)
    found, _ = interruptible(
        lambda halt: engine.evaluate_many(packed, threads, False, halt), rows=packed.size
    )
    result = np.zeros(found.shape, dtype=OUTCOME)
    result["ok"] = found["ok"]
    result["reason"] = np.array(REASONS, dtype=object)[found["reason"]]
    result["total_time_s"] = found["time_s"]
    # The engine counts in 1e9 bytes.
    result["memory_bytes"] = found["memory_gb"] * 1e9
    # A candidate that contradicts itself has time 0.
    priced = found["time_s"] > 0
    result["sample_rate_per_s"][priced] = global_batch_size / found["time_s"][priced]
    return result


def link_s(
    system: System, quirks: Quirks, operation: str, volume_gb: float, ranks: int, in_domain: int
) -> float:
    """Return the time of a collective or of a point-to-point transfer (`p2p`), seconds.

    volume_gb : size of the full tensor (after a gather, before a reduction), 1e9 bytes.
    ranks, in_domain : group size, and its ranks per NVLink domain; `in_domain` divides `ranks`.
    """
    code = (*COLLECTIVES, "p2p").index(operation)
    seconds: float = native.tensor2d.link_s(
        asdict(system), quirks.flags(), code, volume_gb, ranks, in_domain
    )
    return seconds


def _layer(row: np.void) -> dict[str, Any]:
    """Return the row of one operation by published name, in 1e9 bytes, 1e12 FLOP and seconds."""
    forward, backward = row["forward"], row["backward"]
    listed = bool(row["in_panels"])
    return {
        "name": OPERATIONS[row["operation"]],
        "weights_mem": float(row["weights_gb"]),
        # In published tables gradients have the bytes of weights, whatever the model's setting.
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
    """Return volumes (1e9 bytes) and names of the collectives of a pass.

    name : 'fwd' or 'bwd'.
    listed : True for an operation in a loop over panels. Values are lists if `listed` is True or
        there are several collectives.
    """
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
        # An integer if there is no collective, as in published tables.
        f"t_{name}_comm": float(one["link_s"]) if one["num_links"] else 0,
        f"t_{name}_comp": float(one["compute_s"]),
        f"t_{name}_mem": float(one["memory_s"]),
        f"intensity_{name}": float(one["intensity"]),
    }


def _candidate(
    strategy: Strategy, config: Mapping[str, int], placement: Mapping[str, int]
) -> dict[str, int]:
    """Return the packed fields of a candidate from its published names; fields not given are 1.

    Raises InfeasibleExecution: a name is missing or unknown, a value is not a positive integer, or
    `tp` contradicts `tp1` and `tp2`.
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
    """Return the given numbers as Python integers; NumPy integers are accepted.

    where : 'config' or 'placement', for messages.

    Raises InfeasibleExecution for an unknown or missing name, or a value that is not a positive
    integer.
    """
    for name in given:
        if name not in required and name not in optional:
            raise _contradiction(f"{where}.{name}: unknown key, expected {', '.join(required)}")
    for name in required:
        if name not in given:
            raise _contradiction(
                f"{where}.{name}: this key is missing, expected {', '.join(required)}"
            )
    for name, value in given.items():
        # True is an Integral too, but not a valid number.
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise _contradiction(
                f"{where}.{name}: the value is {shorten(value)}, expected a positive integer"
            )
    return {name: int(value) for name, value in given.items()}


def _check_size(name: str, value: object, most: int) -> None:
    """Raise InputError if a value is not an integer from 1 to `most`."""
    if not isinstance(value, Integral) or not 1 <= int(value) <= most:
        raise InputError(
            f"{name}: the value is {shorten(value)}, expected an integer from 1 to {most}"
        )


def _attention_fault(
    strategy: Strategy, attention: str, *, recompute: bool, published: bool
) -> str | None:
    """Return a sentence on an unsupported attention setting; None if it is supported.

    published : True for the published model, which supports less.
    """
    if attention not in ATTENTIONS:
        return (
            f"attention: the value is {shorten(attention)}, expected one of {', '.join(ATTENTIONS)}"
        )
    if attention == "summa" and strategy != "2d":
        return f"attention: summa needs the strategy 2d, and this one is {strategy}"
    if recompute and attention == "flash":
        return "recompute: flash attention stores no scores. Use attention plain"
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

    candidates : an array of `CANDIDATE`; or columns by published name, broadcast to one length; or
        one mapping per candidate, with configuration and placement together.

    Raises InputError: a name is unknown or missing, or a value is invalid.
    """
    if isinstance(candidates, np.ndarray):
        expected = "search.closed_form.tensor2d.CANDIDATE"
        return given_rows("candidates", candidates, CANDIDATE, expected)
    known = _published(strategy)
    if isinstance(candidates, Mapping):
        return _pack_columns(strategy, known, candidates)
    rows = list(candidates)
    plain = _plain_columns(strategy, known, rows)
    if plain is not None:
        return _pack_columns(strategy, known, plain)
    for n, row in enumerate(rows):
        for name in known:
            if name not in row:
                raise InputError(f"candidates[{n}].{name}: this key is missing")
    # Unknown names are included, so that the error contains them.
    names = dict.fromkeys(name for row in rows for name in row if name not in known)
    return _pack_columns(
        strategy,
        known,
        {name: [row[name] for row in rows] for name in known}
        | {name: [row.get(name, 0) for row in rows] for name in names},
    )


def _plain_columns(
    strategy: Strategy, known: Mapping[str, str], rows: list[Any]
) -> Mapping[str, Any] | None:
    """Return the columns of candidates, if all are dictionaries of known names and integers.

    Returns None for other candidates, or if only some of them contain `tp`.
    """
    fields = dict.fromkeys(known, DocumentField(largest=LARGEST))
    if strategy != "1d":
        fields["tp"] = DocumentField(largest=LARGEST, default=ABSENT)
    columns = plain_columns(rows, fields)
    if columns is None or strategy == "1d":
        return columns
    absent = columns["tp"] == ABSENT
    if absent.all():
        del columns["tp"]
    elif absent.any():
        return None
    return columns


def unpack_candidate(strategy: Strategy, row: np.void) -> tuple[dict[str, int], dict[str, int]]:
    """Return (configuration, placement) of one packed candidate, by published name."""
    values = {name: int(row[name]) for name in _NAMES}
    found = {name: values[packed] for name, packed in _published(strategy).items()}
    config = {name: value for name, value in found.items() if not name.startswith("nv_")}
    if strategy != "1d":
        config["tp"] = values["tp1"] * values["tp2"]
    return config, {name: value for name, value in found.items() if name.startswith("nv_")}


def _published(strategy: Strategy) -> dict[str, str]:
    """Return the published names of a candidate's settings -> packed fields."""
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
    # tp is the product of the other two; a given value must agree.
    if strategy != "1d" and "tp" in given and {"tp1", "tp2"} <= given.keys():
        tp = _column("tp", given.pop("tp"))
        if not np.all(tp == _column("tp1", given["tp1"]) * _column("tp2", given["tp2"])):
            raise InputError("candidates.tp: is not tp1 * tp2 everywhere")
    check_names("candidates", given, expected)
    columns = {packed: _column(name, given[name]) for name, packed in expected.items()}
    return packed_rows("candidates", CANDIDATE, columns)


def _column(name: str, values: Any) -> NDArray[Any]:
    # Degrees are multiplied, which would overflow 32 bits.
    return integers(f"candidates.{name}", values, LARGEST).astype(np.int64)
