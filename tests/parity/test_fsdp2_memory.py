"""Memory of FSDP2 as it is counted, against torch's own tracker of tensors on fake ranks.

`FSDPMemTracker` runs two steps of a small Llama under `fully_shard` with fake tensors in a world of
eight, so that every allocation of autograd, FSDP2 and AdamW is seen and none is made. Fake tensors
are of the CPU: its attention keeps what FlashAttention does, its RMSNorm is written out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import pytest

from autopar.price.sharded_peak import LivePoint, live_points
from autopar.run.run import Run
from tests.runs import llama, torch_run

pytestmark = pytest.mark.whole

torch = pytest.importorskip("torch", reason="torch is the oracle")

WORLD = 8
HIDDEN, HEADS, GROUPS, WIDTH = 1024, 8, 2, 128
SEQ, BATCH = 512, 2
NOT_TENSORS = frozenset({"cuBLAS workspaces"})
Checkpoint = Literal["none", "full"]


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    """Give a mesh of fake ranks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    try:
        yield init_device_mesh("cpu", (WORLD,))
    finally:
        dist.destroy_process_group()


def _block(ffn: int) -> Any:
    """Return a layer of Llama with torch's own modules, keys and values copied for every head."""
    from torch import nn
    from torch.nn import functional

    def linear(inputs: int, outputs: int) -> Any:
        return nn.Linear(inputs, outputs, bias=False)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = linear(HIDDEN, HEADS * WIDTH)
            self.key = linear(HIDDEN, GROUPS * WIDTH)
            self.value = linear(HIDDEN, GROUPS * WIDTH)
            self.out = linear(HEADS * WIDTH, HIDDEN)
            self.gate, self.up = linear(HIDDEN, ffn), linear(HIDDEN, ffn)
            self.down = linear(ffn, HIDDEN)
            self.before, self.between = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)

        def attend(self, x: Any) -> Any:
            shape = (*x.shape[:2], -1, WIDTH)
            query, key, value = (
                module(x).view(shape) for module in (self.query, self.key, self.value)
            )
            each = HEADS // GROUPS
            key, value = (
                t[:, :, :, None, :]
                .expand(*t.shape[:2], GROUPS, each, WIDTH)
                .reshape(*t.shape[:2], HEADS, WIDTH)
                for t in (key, value)
            )
            heads = (t.transpose(1, 2) for t in (query, key, value))
            found = functional.scaled_dot_product_attention(*heads, is_causal=True)
            return self.out(found.transpose(1, 2).contiguous().view(*x.shape[:2], -1))

        def forward(self, x: Any) -> Any:
            x = x + self.attend(self.before(x))
            normed = self.between(x)
            return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))

    return Block()


def _model(vocab: int, layers: int, ffn: int) -> Any:
    from torch import nn

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(vocab, HIDDEN)
            self.layers = nn.ModuleList([_block(ffn) for _ in range(layers)])
            self.norm = nn.RMSNorm(HIDDEN)
            self.head = nn.Linear(HIDDEN, vocab, bias=False)

        def forward(self, x: Any) -> Any:
            x = self.words(x)
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x))

    return Llama()


def _tracked(
    world: Any, *, vocab: int, layers: int, ffn: int, checkpoint: Checkpoint, reshard: bool
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return bytes by category after a step, and at the peak of one."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    both: dict[str, Any] = {"mesh": world, "mp_policy": policy}
    with FakeTensorMode():
        model = _model(vocab, layers, ffn)
        if checkpoint == "full":
            for at, layer in enumerate(model.layers):
                model.layers[at] = checkpoint_wrapper(layer, preserve_rng_state=False)
        # as torchtitan wraps them
        fully_shard(model.words, **both, reshard_after_forward=reshard)
        fully_shard([model.norm, model.head], **both, reshard_after_forward=False)
        for layer in model.layers:
            fully_shard(layer, **both, reshard_after_forward=reshard)
        fully_shard(model, **both)
        optimizer = torch.optim.AdamW(model.parameters(), fused=False, foreach=False)
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs(())

        def step() -> None:
            tokens = torch.randint(0, vocab, (BATCH, SEQ))
            logits = model(tokens)
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), tokens.flatten(0, 1)
            )
            del logits
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        # the first step makes the optimizer's states
        step()
        with tracker:
            step()
        found = []
        for kind in ("current", "peak"):
            # the other device is meta
            (snapshot,) = (
                values
                for values in tracker.get_tracker_snapshot(kind).values()
                if values["Total"] > 0
            )
            found.append({str(getattr(key, "value", key)): size for key, size in snapshot.items()})
    return found[0], found[1]


def _run(*, vocab: int, layers: int, ffn: int, checkpoint: Checkpoint, reshard: bool) -> Run:
    return torch_run(
        llama(
            layers=layers,
            hidden=HIDDEN,
            width=ffn,
            heads=HEADS,
            kv_heads=GROUPS,
            head_width=WIDTH,
            vocab=vocab,
            vocab_divisor=1,
            positions="none",
        ),
        gpus=WORLD,
        seq_length=SEQ,
        micro_batch=BATCH,
        zero=3 if reshard else 2,
        recompute="full" if checkpoint == "full" else frozenset(),
        fused_norms=False,
        repeated_heads=True,
    )


def _sizes(instant: LivePoint) -> dict[str, int]:
    found = Counter[str]()
    for part in instant.parts:
        if part.name not in NOT_TENSORS:
            found[part.name] += part.num_bytes
    return dict(found)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("checkpoint", ["none", "full"])
@pytest.mark.parametrize(
    ("vocab", "layers", "ffn"),
    [
        (16384, 6, 3584),  # the loss is the fullest
        (512, 6, 3584),  # a layer's backward, or the forward of the last one
        # large units beside few activations
        pytest.param(8192, 3, 8192, marks=pytest.mark.slow),
        pytest.param(8192, 1, 8192, marks=pytest.mark.slow),  # the head's reduction
    ],
)
def test_states_and_peak_are_the_tracker_s(
    world: Any, vocab: int, layers: int, ffn: int, checkpoint: Checkpoint, reshard: bool
) -> None:
    """States to the byte, the peak to a thousandth, and of the same kinds."""
    asked: Any = {
        "vocab": vocab, "layers": layers, "ffn": ffn, "checkpoint": checkpoint, "reshard": reshard
    }  # fmt: skip
    after, peak = _tracked(world, **asked)
    found = list(live_points(_run(**asked), 0))
    fullest = max(found, key=lambda instant: sum(_sizes(instant).values()))
    sizes = _sizes(fullest)

    assert sizes["weights"] == after["Sharded Param"] == peak["Sharded Param"]
    # and a number of steps of each tensor
    assert sizes["Adam moments"] == pytest.approx(after["OptState"], abs=4096)
    assert sum(sizes.values()) == pytest.approx(peak["Total"], rel=1e-3), (sizes, peak)
    assert sizes.get("gradients", 0) == pytest.approx(peak["Sharded Grad"], abs=4 * HIDDEN)
    gathered = sizes.get("gathered weights", 0)
    assert gathered == peak["Unsharded Param"]
    # the last norm is a reduction of its own
    reduced = sizes.get("input of the reduction", 0)
    assert reduced == pytest.approx(peak["Reduce Scatter"], abs=4 * HIDDEN)
    ahead = sizes.get("weights fetched ahead", 0) + sizes.get("output of the gather", 0)
    assert ahead == peak["All Gather"]
