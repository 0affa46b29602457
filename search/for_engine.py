"""`autopar-search --engine NAME`: the fastest plan that an engine runs as it is.

An engine with one degree for the whole model, embedding and head included, runs few of all plans.
Its space is the union of smaller ones, one for each degree and kind of data parallelism, each
given by options that anybody could type. Every one is searched exactly, its plan is handed to the
exporter, and of those that lose nothing the fastest is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import InfeasibleError, InputError
from search.cli_parse import Request, build_request
from search.exports.contract import Job
from search.exports.registry import lower_for
from search.session import Session, fill_options, open_session
from search.space import divisors

__all__ = ["Choice", "choose"]

Additions = Mapping[str, object]

_ONE_STAGE: Additions = {"max-pp-deg": "1"}
_STAGES: Additions = {"forbid": ["pp=1"]}
_UNIFORM: Additions = {"fine-grained-mode": False}
_EVERY_MICROBATCH: Additions = {"async-grad-reduce": False}
_SHARDED_OPTIMIZER: Additions = {"default-dp-type": "zero2", "disable-sdp": True}
_ZERO3 = "zero3=1,vzero3=1"
_FP32: Additions = {"fp32-gradients": True}

# What spans the space of each engine: options, and rules beside the degree.
_SPACES: Mapping[str, tuple[tuple[Additions, str], ...]] = {
    "megatron": (
        ({**_SHARDED_OPTIMIZER}, ""),
        ({**_SHARDED_OPTIMIZER, **_UNIFORM}, ""),
        ({**_UNIFORM, **_ONE_STAGE, **_EVERY_MICROBATCH}, _ZERO3),
    ),
    # with stages it reduces once per step
    "torchtitan": (
        ({**_ONE_STAGE, **_EVERY_MICROBATCH, **_FP32}, _ZERO3),
        ({**_ONE_STAGE, **_EVERY_MICROBATCH, **_FP32, **_SHARDED_OPTIMIZER}, ""),
        ({**_STAGES, **_FP32}, _ZERO3),
        ({**_STAGES, **_FP32, **_SHARDED_OPTIMIZER}, ""),
    ),
    "deepspeed": (
        ({**_UNIFORM, **_ONE_STAGE, **_EVERY_MICROBATCH}, _ZERO3),
        ({**_UNIFORM, **_ONE_STAGE, **_EVERY_MICROBATCH, **_SHARDED_OPTIMIZER}, ""),
    ),
    "accelerate": (
        ({**_UNIFORM, **_ONE_STAGE}, _ZERO3),
        ({**_UNIFORM, **_ONE_STAGE, **_SHARDED_OPTIMIZER}, ""),
    ),
}
_WITHOUT_SP = frozenset({"deepspeed", "accelerate"})
"""Keep whole sequences between the blocks of tensor parallelism."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The part of an engine's space with the fastest plan."""

    request: Request
    """As if the options of that part had been typed."""
    notices: tuple[str, ...]


def choose(raw: Mapping[str, object], engine: str) -> Choice:
    """Return the request whose search finds the fastest plan that an engine runs as it is.

    raw : the command line as `build_request` takes it. What it says itself is never changed: where
    that leaves an engine nothing, it is said.

    Raises
    ------
    InfeasibleError : no plan that the engine runs fits.
    """
    plain = {name: value for name, value in raw.items() if name != "engine"}
    if engine == "galvatron":  # runs every plan
        return Choice(request=build_request(plain), notices=())
    session = open_session(*_parts(build_request(plain)))
    best: tuple[float, str, Request] | None = None
    reasons: dict[str, int] = {}
    num_tried = 0
    for additions, rules in _SPACES[engine]:
        for degree in divisors(session.hardware.world_size):
            if degree > session.options.max_tp_deg:
                break
            request = build_request(_added(plain, additions, rules, degree, engine))
            num_tried += 1
            found = _fastest(session, request, engine)
            if isinstance(found, str):
                reasons[found] = reasons.get(found, 0) + 1
            elif best is None or found > best[0]:
                best = (found, _typed(plain, request), request)
    if best is None:
        shown = "; ".join(f"{why} ({count} of {num_tried})" for why, count in reasons.items())
        raise InfeasibleError(
            f"{engine} runs no plan of this search as it is: {shown}; search without --engine and "
            "let autopar-export --allow-approx take the nearest plan"
        )
    rate, typed, request = best
    notice = (
        f"{engine}: of {num_tried} searches the fastest plan without losses, {rate:.5g} samples/s, "
        f"is that of {typed}"
    )
    return Choice(request=request, notices=(notice,))


def _parts(request: Request) -> tuple[Any, Any, Any]:
    return request.inputs, request.options, request.given


def _added(
    raw: Mapping[str, object], additions: Additions, rules: str, degree: int, engine: str
) -> dict[str, object]:
    """Return a command line with options added where it does not have them."""
    result = dict(raw)
    if degree > 1 and engine in _WITHOUT_SP:
        additions = {**additions, "sequence-parallel": False}
    for name, value in additions.items():
        typed = result.get(name)
        if isinstance(value, list):
            result[name] = [*(typed if isinstance(typed, list | tuple) else ()), *value]
        elif typed is None or typed is False:
            result[name] = value
    pin = f"tp={degree},vtp={degree}" + (f",{rules}" if rules else "")
    before = result.get("pin")
    result["pin"] = [*(before if isinstance(before, list | tuple) else ()), pin]
    return result


def _fastest(session: Session, request: Request, engine: str) -> float | str:
    """Return samples per second of the plan that a search finds, or why there is none."""
    options, _ = fill_options(request.options, request.given, session.profile, session.hardware)
    try:
        result = session.rebuilt(options=options).solve()
    except InputError:  # a pin that the space does not have, such as a degree of no legal layer
        return "the degree is not legal"
    if result.plan is None or result.prediction is None:
        return "nothing fits"
    job = Job(
        plan=result.plan,
        spec=session.spec,
        model=request.inputs.model or session.spec.name,
        num_nodes=session.hardware.num_nodes,
        gpus_per_node=session.hardware.gpus_per_node,
        sequence_parallel=options.sequence_parallel,
        async_grad_reduce=options.async_grad_reduce,
        precision=options.mixed_precision,
        fp32_gradients=options.fp32_gradients,
    )
    try:
        lowered = lower_for(engine)(job)
    except InputError as error:
        return str(error)
    if lowered.losses:
        fields = dict.fromkeys(loss.field for loss in lowered.losses)
        return f"its best plan loses {', '.join(fields)}"
    prediction = result.prediction
    if lowered.as_run:
        changed = replace(options, **lowered.as_run)  # type: ignore[arg-type]
        prediction = session.rebuilt(options=changed).evaluate(lowered.plan)
        if not prediction.fits:
            return "its best plan does not fit as the engine runs it"
    return float(prediction.samples_per_s)


def _typed(raw: Mapping[str, object], request: Request) -> str:
    """Return the options that were added, as one would type them."""
    words = []
    for name, value in request.given.items():
        if raw.get(name) == value:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list | tuple):
            words += [f"--{name} {item}" for item in value]
        else:
            words.append(f"--{name} {value}")
    return " ".join(words)
