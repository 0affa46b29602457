"""Comparison of the Calculon model with published step times and memory of four models.

Source: V. Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv
2205.05198. Table 5 contains measured step times on A100 80 GB. Figures 1 and 7 contain byte counts
computed in the paper, not measurements. Figure 1 assumes 18 bytes per parameter, 12*h*h parameters
per block, and the activation formula of the paper. No constant of the model or of the shipped
system was fitted to these values.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from autopar.records import (
    Record,
    replace,
)
from autopar.units import GIB
from search.closed_form.calculon import Application, Execution, System, evaluate

SOURCE = "arXiv 2205.05198"
_VOCAB = 51200
"""Vocabulary size of all four models; the published Calculon model has no vocabulary."""
_ROOM_GIB = 1e6
"""Memory capacity in this comparison, GiB: several executions do not fit in 80 GB."""


class _Case(NamedTuple):
    hidden: int
    heads: int
    blocks: int
    pipeline: int
    interleaving: int
    batch: int
    microbatch: int
    full_s: float
    """Table 5: step time with full recomputation, seconds."""
    selective_s: float
    """Table 5: step time with sequence parallelism and selective recomputation, seconds."""
    states_gib: float
    """Figure 1: weights, gradients and optimizer states of the blocks, GiB."""
    plain_gib: float
    """Figure 1: activations without recomputation and sequence parallelism, GiB."""
    selective_gib: float
    """Figure 1: activations with sequence parallelism and selective recomputation, GiB."""
    seq: float
    """Figure 7: activations with sequence parallelism, percent of `plain_gib`."""
    sel: float
    """Figure 7: activations with selective recomputation, percent of `plain_gib`."""
    seqsel: float
    """Figure 7: activations with both, percent of `plain_gib`."""
    full: float
    """Figure 7: activations with full recomputation, percent of `plain_gib`."""


_CASES = {
    # Sizes, then figures of table 5, figure 1 and figure 7, one line each.
    "megatron-22B": _Case(
        *(6144, 64, 48, 1, 1, 4, 4),
        *(1.42, 1.10),
        *(45.5625, 59.25, 9.5625),
        *(66.84, 49.42, 16.18, 7.64),
    ),
    "gpt3-175B": _Case(
        *(12288, 96, 96, 8, 3, 64, 1),
        *(18.13, 13.75),
        *(45.5625, 66.84375, 12.3515625),
        *(62.04, 56.53, 18.49, 8.71),
    ),
    "turing-530B": _Case(
        *(20480, 128, 105, 35, 3, 280, 1),
        *(49.05, 37.83),
        *(31.640625, 114.0234375, 23.076171875),
        *(58.31, 62.04, 20.27, 9.42),
    ),
    "megatron-1T": _Case(
        *(25600, 160, 128, 64, 1, 512, 1),
        *(94.42, 71.49),
        *(32.958984375, 131.25, 26.5625),
        *(58.31, 62.04, 20.27, 9.42),
    ),
}
_MODES = {  # communication, recomputation, input gathered again
    "none": ("ar", "none", False),
    "sel": ("ar", "attn_only", False),
    "full": ("ar", "full", False),
    "seq": ("rs_ag", "none", True),
    "seqsel": ("rs_ag", "attn_only", True),
}


class Check(Record):
    """One published value and the value that the Calculon model computes."""

    group: str
    """Quantity: 'step time', 'states', 'activations' or 'activation shares'."""
    where: str
    """Table or figure of the paper."""
    model: str
    mode: str
    """Recomputation and sequence parallelism, as in `_MODES`; empty for states."""
    unit: str
    """Unit of both values: 's', 'GiB' or '%'."""
    published: float
    computed: float

    @property
    def error(self) -> float:
        """Signed relative error, computed / published - 1."""
        return self.computed / self.published - 1.0


class Errors(Record):
    """Relative errors of a group of checks, as fractions."""

    mean: float
    """Mean absolute error."""
    bias: float
    """Mean signed error."""
    worst: float
    """Signed error with the largest magnitude."""


def validate(system: System, *, compat: bool = False) -> tuple[Check, ...]:
    """Return all published values with the values computed for a system, in a fixed order.

    The memory capacity of the system is ignored.
    compat : True for the published Calculon with its defects, which has no vocabulary.
    """
    # Include runs that do not fit.
    machine = replace(system, mem1=replace(system.mem1, GiB=_ROOM_GIB))
    return tuple(
        check
        for name, case in _CASES.items()
        for check in _checks(name, case, _answers(case, machine, compat=compat))
    )


def errors_of(checks: tuple[Check, ...]) -> dict[str, Errors]:
    """Return the errors of each group of checks, by group name."""
    found = {}
    for group in dict.fromkeys(check.group for check in checks):
        errors = [check.error for check in checks if check.group == group]
        found[group] = Errors(
            mean=sum(map(abs, errors)) / len(errors),
            bias=sum(errors) / len(errors),
            worst=max(errors, key=abs),
        )
    return found


def _answers(case: _Case, machine: System, *, compat: bool) -> dict[str, dict[str, Any]]:
    application = Application(
        hidden=case.hidden,
        # GPT blocks, as in all models of the paper.
        feedforward=4 * case.hidden,
        seq_size=2048,
        attn_heads=case.heads,
        attn_size=case.hidden // case.heads,
        num_blocks=case.blocks,
        vocab_size=0 if compat else _VOCAB,
        tied_embeddings=True,
    )
    return {
        mode: evaluate(application, _execution(case, mode), machine, compat=compat)
        for mode in _MODES
    }


def _execution(case: _Case, mode: str) -> Execution:
    communication, recompute, again = _MODES[mode]
    return Execution(
        # As in table 5: tensor groups within a node, no data parallelism.
        num_procs=8 * case.pipeline,
        tensor_par=8,
        pipeline_par=case.pipeline,
        data_par=1,
        tensor_par_net=0,
        pipeline_par_net=1,
        data_par_net=1,
        batch_size=case.batch,
        microbatch_size=case.microbatch,
        datatype="float16",
        fused_activation=False,
        attention_type="multihead",
        activation_recompute=recompute,
        pipeline_interleaving=case.interleaving,
        optimizer_sharding=False,
        tensor_par_comm_type=communication,
        tensor_par_overlap="none",
        seq_par_ag_redo=again,
        data_par_overlap=False,
        weight_offload=False,
        activations_offload=False,
        optimizer_offload=False,
    )


def _checks(name: str, case: _Case, answers: dict[str, dict[str, Any]]) -> Iterator[Check]:
    check = partial(Check, model=name)
    timed = partial(check, group="step time", where="table 5", unit="s")
    for mode, measured in (("full", case.full_s), ("seqsel", case.selective_s)):
        yield timed(mode=mode, published=measured, computed=answers[mode]["total_time"])
    plain = answers["none"]
    counted = partial(check, where="figure 1", unit="GiB")
    parts = ("weight_space", "weight_grad_space", "optimizer_space")
    states_gib = sum(plain[key] for key in parts) / GIB
    yield counted(group="states", mode="", published=case.states_gib, computed=states_gib)
    for mode, size in (("none", case.plain_gib), ("seqsel", case.selective_gib)):
        kept_gib = answers[mode]["act_space"] / GIB
        yield counted(group="activations", mode=mode, published=size, computed=kept_gib)
    shared = partial(check, group="activation shares", where="figure 7", unit="%")
    for mode in ("seq", "sel", "seqsel", "full"):
        # With full recomputation, only checkpoints are saved.
        kept = answers[mode]["act_space"] + answers[mode]["act_checkpoint_size"]
        percent = 100.0 * kept / plain["act_space"]
        yield shared(mode=mode, published=getattr(case, mode), computed=percent)
