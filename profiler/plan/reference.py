"""The same training steps in one process without parallelism: what a plan has to reproduce."""

from __future__ import annotations

import torch

from profiler.model.stack import build_stack
from profiler.plan.batches import global_tokens
from profiler.plan.job import PlanJob
from profiler.plan.layout import Cube, Layout
from profiler.plan.replicas import Replica
from profiler.plan.stage import padded_spec
from profiler.plan.weights import fill, pieces_of, shapes

__all__ = ["reference_steps"]


def reference_steps(
    job: PlanJob, num_steps: int, *, device: torch.device
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return loss and gradient norm of every step of the model on one device.

    Micro-batches follow one another, as they do on one rank of the plan, so that the memory of
    one micro-batch of the whole model is enough.
    """
    dtype = torch.bfloat16 if job.precision == "bf16" else torch.float32
    spec = padded_spec(job)
    module = build_stack(spec, dtype=dtype, device=device).module
    _fill(module, job)
    unit = Replica(
        list(module.parameters()), None, precision=job.precision, learning_rate=job.learning_rate
    )
    losses, norms = [], []
    for step in range(num_steps):
        tokens, labels = global_tokens(job, step)
        total = 0.0
        m = job.plan.num_microbatches
        for part, wanted in zip(tokens.chunk(m), labels.chunk(m), strict=True):
            sequences = (values.t().contiguous().to(device) for values in (part, wanted))
            loss = module(*sequences) / m
            loss.backward()
            total += float(loss.detach())
        squared = sum(
            p.grad.double().square().sum() for p in module.parameters() if p.grad is not None
        )
        losses.append(total)
        norms.append(float(squared) ** 0.5)
        unit.step()
    return tuple(losses), tuple(norms)


def _fill(module: torch.nn.Module, job: PlanJob) -> None:
    """Give every part the values that it has on any plan."""
    whole = Layout(cube=Cube(factors=(1,)), kind="tp", tensor_axes=(), zero="ddp")
    tied = job.spec.tied_embeddings
    layers = [layer for of_type in module.layers for layer in of_type]
    parts = [("embedding", module.first), ("head", module.last)]
    parts += [(f"layer{k}", layer) for k, layer in enumerate(layers)]
    for name, part in parts:
        pieces = pieces_of(part, shapes(part), whole, 0)
        fill(part, pieces, seed=job.seed, where=name, tied=tied)
