"""Comparison of plans with a single process, run by every rank of a real process group.

The reference is independent of the executor: one model, the whole global batch at once without
micro-batches, and torch's plain AdamW. A rank compares its own results: losses and norms, the
gradient of every parameter in every step, and the weights after the last one.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from profiler.model.layers import context, recompute
from profiler.model.layers.vocab import build_stack
from profiler.plan.arithmetic import Cube, Layout, check_job
from profiler.plan.exchange import fill, global_tokens, local_batch, pieces_of, shapes
from profiler.plan.job import PlanJob, RunResult
from profiler.plan.run import Trainer, run_in_world
from profiler.plan.stage import Stage, build_stages, open_groups, padded_spec
from profiler.plan.units import gradient_of

_WHOLE = Layout(cube=Cube(factors=(1,)), kind="tp", tensor_axes=(), zero="ddp")
_NOISE = 1e-4
"""Share of the largest gradient below which all is rounding, which AdamW steps amplify."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Relative differences of one rank from a single process."""

    loss: tuple[float, ...]
    grad_norm: tuple[float, ...]
    gradients: Mapping[str, float]
    """By step and parameter: largest difference over the largest gradient of the model's part."""
    weights: Mapping[str, float]
    """By parameter: largest difference over the largest change of the weights."""
    said: tuple[str, ...]
    """Warnings of torch's loggers."""


def compare_all(jobs: Mapping[str, PlanJob], num_steps: int = 2) -> dict[str, Compared]:
    """Return the comparisons of every plan on this rank by name, run one after the other.

    A Python warning is an error here, as in all tests.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return {name: _compare(job, num_steps) for name, job in jobs.items()}


def _other_halves(seen: Any) -> Any:
    def swapped(rank: int, source: int, length: int, *, causal: bool) -> tuple[slice, slice]:
        front, back = slice(length // 2), slice(length // 2, None)
        rows, columns = seen(rank, source, length, causal=causal)
        # a part with an offset is the back one; the whole has no ends
        rows = front if rows.start else rows
        return rows, back if columns.stop else columns

    return swapped


BREAKS: dict[str, tuple[Any, str, Any]] = {
    # without axes every rank keeps the gradients of its own tokens
    "gradients of experts are not summed": (Layout, "expert_sync_axes", lambda old: ()),
    "front and back of a sequence are swapped": (context, "_seen", _other_halves),
    "gradients of keys stay with the next rank": (
        context._Gradients, "finish", lambda old: lambda self: tuple(self._sums)
    ),
    "tokens go to the experts in the order of the ranks that send them": (
        torch.Tensor, "argsort",
        lambda old: lambda self, **_: torch.arange(len(self), device=self.device),
    ),
    "what is made again is half of what it was": (
        recompute._Again, "part", lambda old: lambda self, at: old(self, at) / 2
    ),
}  # fmt: skip
"""Mistakes in the executor: owner, attribute, and a function that returns the wrong attribute."""


def compare_broken(jobs: Mapping[str, PlanJob], what: str) -> dict[str, Compared]:
    """Return the comparisons for an executor with a mistake; the process ends after them."""
    owner, name, change = BREAKS[what]
    setattr(owner, name, change(getattr(owner, name)))
    return compare_all(jobs, num_steps=1)


def run_all(jobs: Mapping[str, PlanJob]) -> dict[str, RunResult | None]:
    """Return the result of every plan on this rank by name, with two timed steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return {
            name: run_in_world(job, device=torch.device("cpu"), num_timed_steps=2)
            for name, job in jobs.items()
        }


def overflow_on_rank(job: PlanJob, where: int) -> list[tuple[float, float, bool]]:
    """Return norm, next scale and True if weights changed, for two steps on this rank.

    In the first step, only a gradient of the rank `where` is infinite.
    """
    device = torch.device("cpu")
    groups = open_groups(job, check_job(job), rank=dist.get_rank(), device_type="cpu")
    (stage,) = build_stages(job, groups, device=device)
    trainer = Trainer([stage], job, device)
    finish, found = stage.finish_backward, []

    def overflow() -> None:
        finish()
        _, _, gradient = next(stage.parts[-1].gradients())
        gradient.view(-1)[0] = float("inf")

    for step in range(2):
        is_poisoned = step == 0 and dist.get_rank() == where
        stage.finish_backward = overflow if is_poisoned else finish  # type: ignore[method-assign]
        before = [_full(p.detach()).clone() for p in stage.parameters()]
        batch = local_batch(job, stage.vocab, groups.place, step=step, device=device)
        _, norm = trainer.checked_step(batch)
        assert trainer.scaler is not None
        after = [_full(p.detach()) for p in stage.parameters()]
        changed = any(not torch.equal(*pair) for pair in zip(before, after, strict=True))
        found.append((norm, trainer.scaler.scale, changed))
    return found


def _compare(job: PlanJob, num_steps: int) -> Compared:
    device = torch.device("cpu")
    wanted = _Reference(job)
    with _logged() as said:
        cube = check_job(job)
        groups = open_groups(job, cube, rank=dist.get_rank(), device_type="cpu")
        stages = build_stages(job, groups, device=device)
        trainer = Trainer(stages, job, device)
        losses, norms, gradients = [], [], {}
        for step in range(num_steps):
            wanted.step(step)
            found: dict[str, float] = {}
            for stage in stages:
                _before_stepping(
                    stage,
                    lambda found=found, stage=stage: found.update(_gradients(stage, wanted)),
                )
            batch = local_batch(job, stages[0].vocab, groups.place, step=step, device=device)
            loss, norm = trainer.checked_step(batch)
            losses.append(abs(loss / wanted.loss - 1))
            norms.append(abs(norm / wanted.grad_norm - 1))
            gradients |= {f"{step}/{name}": value for name, value in found.items()}
        rate = job.learning_rate
        weights = {k: v for stage in stages for k, v in _weights(stage, wanted, rate)}
    return Compared(
        loss=tuple(losses),
        grad_norm=tuple(norms),
        gradients=gradients,
        weights=weights,
        said=tuple(said),
    )


def _before_stepping(stage: Stage, look: Any) -> None:
    """Call `look` when the next gradients are complete, before the optimizers use them."""
    step = type(stage).step

    def looked() -> None:
        look()
        step(stage)

    stage.step = looked  # type: ignore[method-assign]


def _gradients(stage: Stage, wanted: _Reference) -> Iterator[tuple[str, float]]:
    for name, parameter, piece in _held(stage):
        whole, own = wanted.parameters[name].grad, gradient_of(parameter)
        if whole is None or own is None:
            yield name, 0.0 if _is_nothing(whole) and _is_nothing(own) else float("inf")
            continue
        expected = _own(whole, piece)
        found = _full(own).double() / stage.loss_scale
        difference = (found - expected).abs().max()
        yield name, float(difference / max(expected.abs().max(), _NOISE * wanted.largest))


def _weights(stage: Stage, wanted: _Reference, rate: float) -> Iterator[tuple[str, float]]:
    for name, parameter, piece in _held(stage):
        found = _full(parameter.detach()).double()
        expected = _own(wanted.parameters[name].detach(), piece)
        difference = (found - expected).abs() / rate
        certain = difference[_own(wanted.is_certain[name], piece)]
        yield name, float(certain.max()) if certain.numel() else 0.0


def _held(stage: Stage) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name in the whole model, parameter, piece) of all parameters of a rank."""
    for part in stage.parts:
        for name, parameter in part.holder.named_parameters():
            where, own = part.name, name
            if where == "ends":
                first, _, own = name.partition(".")
                where = "embedding" if first == "first" else "head"
            yield f"{where}.{own}", parameter, part.pieces[name]


def _own(whole: torch.Tensor, piece: Any) -> Any:
    if piece.dim is not None:
        whole = whole.chunk(piece.pieces, piece.dim)[piece.index]
    return whole.double() if whole.is_floating_point() else whole


def _full(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _is_nothing(gradient: Any) -> bool:
    return gradient is None or not bool(_full(gradient).any())


class _Reference:
    """One process that trains the whole model."""

    def __init__(self, job: PlanJob) -> None:
        self._job = job
        dtype = torch.float32
        self._module = build_stack(
            padded_spec(job), dtype=dtype, device="cpu", routing=job.routing
        ).module
        layers = [layer for of_type in self._module.layers for layer in of_type]
        parts = {"embedding": self._module.first, "head": self._module.last}
        parts |= {f"layer{k}": layer for k, layer in enumerate(layers)}
        if self._module.encoder_norm is not None:
            parts["encoder_norm"] = self._module.encoder_norm
        self.parameters: dict[str, torch.Tensor] = {}
        for where, part in parts.items():
            pieces = pieces_of(part, shapes(part), _WHOLE, 0)
            tied = job.spec.tied_embeddings
            fill(part, pieces, seed=job.seed, where=where, tied=tied)
            named = part.named_parameters(remove_duplicate=False)
            self.parameters |= {f"{where}.{name}": parameter for name, parameter in named}
        unique = list(dict.fromkeys(self.parameters.values()))
        self._optimizer = torch.optim.AdamW(unique, lr=job.learning_rate)
        self.is_certain = {
            name: torch.ones_like(p, dtype=torch.bool) for name, p in self.parameters.items()
        }
        self.loss = self.grad_norm = self.largest = 0.0

    def step(self, number: int) -> None:
        """Train a step; gradients stay until the next one."""
        self._optimizer.zero_grad()
        batch = global_tokens(self._job, number)
        loss = self._module(*(values.t().contiguous() for values in batch))
        loss.backward()
        gradients = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        unique = {id(g): g for g in gradients.values()}.values()
        self.loss = float(loss.detach())
        self.grad_norm = float(sum(g.double().square().sum() for g in unique)) ** 0.5
        self.largest = max(float(g.abs().max()) for g in unique)
        for name, gradient in gradients.items():
            certain = (gradient.abs() > _NOISE * self.largest) | (gradient == 0)
            self.is_certain[name] &= certain
        self._optimizer.step()


@contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect the warnings of torch's loggers."""
    said: list[str] = []

    class _Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = _Collect(logging.WARNING)
    # some of torch's loggers do not pass messages to their parents
    names = ["torch", *(n for n in logging.root.manager.loggerDict if n.startswith("torch."))]
    loggers = [logging.getLogger(name) for name in names]
    loggers = [each for each in loggers if each.name == "torch" or not each.propagate]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield said
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
