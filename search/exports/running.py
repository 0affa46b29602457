"""How an engine runs a plan, as options of the search: to price it, and to search again.

What the search takes for granted, such as sequence parallelism, an engine may do otherwise. Each
exporter says how its engine does it; what differs from the job is priced, and the options that a
new search needs are put into one line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.plan import Plan
from search.exports.contract import Job

__all__ = ["different", "flags", "search_options"]

_FLAGS = {
    ("sequence_parallel", True): "--sequence-parallel",
    ("sequence_parallel", False): "--no-sequence-parallel",
    ("async_grad_reduce", True): "--async-grad-reduce",
    ("async_grad_reduce", False): "--no-async-grad-reduce",
    ("fp32_gradients", True): "--fp32-gradients",
    ("fp32_gradients", False): "--no-fp32-gradients",
}
_DEFAULTS = {"sequence_parallel": True, "async_grad_reduce": True, "fp32_gradients": False}


def different(job: Job, plan: Plan, runs: Mapping[str, bool]) -> dict[str, bool]:
    """Return the options that an engine runs otherwise than the job was priced.

    When a micro-batch is the whole step it makes no difference when gradients are reduced, nor
    in fp32 how they are.
    """
    return {
        name: value
        for name, value in runs.items()
        if getattr(job, name) != value
        and not (name == "async_grad_reduce" and plan.num_microbatches == 1)
        and not (name == "fp32_gradients" and job.precision == "fp32")
    }


def flags(options: Mapping[str, bool]) -> str:
    """Return options as they are typed."""
    return " ".join(_FLAGS[item] for item in options.items())


def search_options(plan: Plan, runs: Mapping[str, bool], more: Sequence[str] = ()) -> str:
    """Return a line of options whose search finds plans of these degrees that lose nothing.

    more : options of the engine, such as `--max-pp-deg 1`.
    """
    words = list(more)
    words += [_FLAGS[item] for item in runs.items() if item[1] != _DEFAULTS[item[0]]]
    layer = plan.layers[0]
    rules = [f"tp={layer.tp}", f"vtp={plan.vocab.tp}"]
    if layer.tp > 1 and layer.ulysses:
        words.append("--sp-space tp+sp")
        rules += ["ulysses=1", "vulysses=1"]
    if layer.cp > 1:
        words.append(f"--max-cp-deg {layer.cp}")
        rules.append(f"cp={layer.cp}")
    if layer.zero3:
        rules += ["zero3=1", "vzero3=1"]
    else:
        kind = " --default-dp-type zero2" if plan.default_dp_type == "zero2" else ""
        words.append(f"--disable-sdp{kind}")
    return " ".join([*words, f"--pin {','.join(rules)}"])
