"""What a layer with adapters saves, against what autograd itself holds of one.

A small layer of Llama in torch, its matrices frozen with low-rank ones beside some of them, is run
under `saved_tensors_hooks`; storages are counted once, weights left out. Compared is how much less
than a layer whose weights are all trained it holds.
"""

from __future__ import annotations

from typing import Any

import pytest

from autopar.price.torch_layers import parts_without_recompute
from autopar.run.runtime import Precision
from autopar.training.adapters import TARGETS, Adapters
from tests.runs import llama, torch_run

torch = pytest.importorskip("torch", reason="torch is the oracle")

HIDDEN, HEADS, WIDTH, FFN, SEQ, BATCH, RANK = 256, 4, 64, 704, 64, 2, 8
DENSE = frozenset(one for one in TARGETS if not one.startswith(("expert", "mixer")))


def _layer(adapters: Adapters | None) -> Any:
    """Return the layer with torch's own modules, as PEFT wraps them."""
    from torch import nn
    from torch.nn import functional

    chosen = adapters.targets if adapters is not None else frozenset()

    class Linear(nn.Module):
        def __init__(self, target: str, inputs: int, outputs: int) -> None:
            super().__init__()
            self.base = nn.Linear(inputs, outputs, bias=False)
            self.base.weight.requires_grad_(adapters is None)
            self.beside = None
            if adapters is not None and target in chosen:
                self.beside = nn.Sequential(
                    nn.Dropout(adapters.dropout) if adapters.dropout else nn.Identity(),
                    nn.Linear(inputs, adapters.rank, bias=False),
                    nn.Linear(adapters.rank, outputs, bias=False),
                )

        def forward(self, x: Any) -> Any:
            found = self.base(x)
            return found if self.beside is None else found + self.beside(x)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = Linear("query", HIDDEN, HIDDEN)
            self.key = Linear("key", HIDDEN, HIDDEN)
            self.value = Linear("value", HIDDEN, HIDDEN)
            self.out = Linear("projection", HIDDEN, HIDDEN)
            self.gate, self.up = Linear("fc1", HIDDEN, FFN), Linear("fc1", HIDDEN, FFN)
            self.down = Linear("fc2", FFN, HIDDEN)
            self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
            for parameter in self.norms.parameters():
                parameter.requires_grad_(adapters is None)

        def forward(self, x: Any) -> Any:
            normed = self.norms[0](x)
            heads = (
                module(normed).view(BATCH, SEQ, HEADS, WIDTH).transpose(1, 2)
                for module in (self.query, self.key, self.value)
            )
            found = functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.out(found.transpose(1, 2).reshape(BATCH, SEQ, HIDDEN))
            normed = self.norms[1](x)
            return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))

    return Layer()


def held_bytes(adapters: Adapters | None) -> int:
    """Return the bytes of all storages that autograd holds, weights left out."""
    layer, storages = _layer(adapters), dict[int, Any]()
    weights = {one.untyped_storage().data_ptr() for one in layer.parameters()}

    def saved(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            # kept, so that no other storage comes to lie where it was
            storages[storage.data_ptr()] = storage
        return tensor

    x = torch.randn(BATCH, SEQ, HIDDEN, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
        found = layer(x)
    total = sum(storage.nbytes() for storage in storages.values())
    found.sum().backward()
    return total


def counted_bytes(adapters: Adapters | None) -> int:
    """Return the same as it is counted."""
    run = torch_run(
        llama(layers=1, hidden=HIDDEN, width=FFN, heads=HEADS, positions="none"),
        "accelerate",
        module="transformers",
        seq_length=SEQ,
        micro_batch=BATCH,
        precision=Precision(kind="fp32"),
        adapters=adapters,
    )
    return sum(size for _, size in parts_without_recompute(run.rank_layers[0]))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    "targets",
    [
        DENSE,
        frozenset({"query", "value"}),
        frozenset({"query", "key", "value", "projection"}),
        frozenset({"fc1"}),
        frozenset({"fc2"}),
        frozenset({"projection"}),
    ],
    ids=lambda targets: "+".join(sorted(targets)),
)
def test_a_layer_with_adapters_holds_so_much_less(targets: Any, dropout: float) -> None:
    """Inputs that no gradient needs are gone, what A made is there, to a hundredth."""
    adapters = Adapters(rank=RANK, targets=targets, dropout=dropout)
    measured = held_bytes(None) - held_bytes(adapters)
    if dropout:
        # a mask of the CPU's is fp32, and a byte an element on devices
        inputs = [FFN if target == "fc2" else HIDDEN for target in targets]
        inputs += [HIDDEN] * ("fc1" in targets)
        measured += 3 * BATCH * SEQ * sum(inputs)
    counted = counted_bytes(None) - counted_bytes(adapters)
    assert counted == pytest.approx(measured, abs=0.01 * held_bytes(None))
