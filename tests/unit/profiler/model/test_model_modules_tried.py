"""Modules that others wrote are tried before they are measured: batches, values, memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from autopar.errors import InputError

torch = pytest.importorskip("torch", reason="the profilers need torch")

from torch import nn  # noqa: E402

from profiler.model.cells import plan_cells  # noqa: E402
from profiler.model.measuring import ModuleMeasurer  # noqa: E402
from profiler.model.options import build_options  # noqa: E402
from tests.unit.own_modules import Layer, Model, source_of  # noqa: E402


class Spoilt(Model):
    """A model with one thing wrong, which only some tokens, sizes or passes show."""

    def __init__(self, num_layers, flaw):
        super().__init__(num_layers)
        self.flaw = flaw
        self.table = nn.Embedding(4, 8)

    def make_batch(self, batch, seq_length):
        device = "meta" if self.flaw == "elsewhere" else None
        top = 99 if self.flaw == "beyond" else 32
        batch = 1 if self.flaw == "one sample" else batch
        return torch.randint(top - 1, top, (batch, seq_length), device=device)

    def forward(self, tokens):
        if self.flaw == "position":
            self.table(torch.arange(tokens.shape[1]))
        x = super().forward(tokens)
        return x.detach() if self.flaw == "detached" else x


def spoilt(flaw):
    """Return the factory of models with one thing wrong."""
    return lambda num_layers, seq_length, dtype: Spoilt(num_layers, flaw)


@pytest.mark.parametrize(
    ("flaw", "words"),
    [
        ("elsewhere", "make_batch"),
        ("one sample", r"shape \[1, 8, 8\] for one sample and of \[1, 8, 8\] for two"),
        ("detached", "module Spoilt returns a tensor without gradient"),
    ],
)
def test_batches_and_outputs_are_tried(flaw, words):
    """What would be measured wrongly, or fail cell by cell, is refused at once."""
    with pytest.raises(InputError, match=words):
        source_of(spoilt(flaw))


def nan_activations(num_layers, seq_length, dtype):
    """Return a model whose weights are finite and whose activations are not."""
    model = Model(num_layers)
    for block in model.blocks:
        nn.init.constant_(block.up.weight, 1e30)
        nn.init.constant_(block.down.weight, 1e30)
    return model


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (spoilt("beyond"), "IndexError"),
        (spoilt("position"), "IndexError"),
        (nan_activations, "layer Layer returns NaN or infinite values for random tokens"),
    ],
)
def test_what_only_values_show_is_said_before_anything_is_measured(factory, words):
    """Tables and activations are tried in earnest where times are asked for, and only there."""
    source = source_of(factory, dtype="fp32")
    found = {}
    for how in ("auto", "exact"):
        options = build_options(model="py:x", dtype="fp32", source=how, seq="8", bsz="1")
        cells = plan_cells(source.sizes, options, own_degrees=source.degrees)
        found[how] = (ModuleMeasurer(source, options, torch.device("cpu")), cells)
    measurer, cells = found["exact"]
    measurer.rehearse(cells)
    measurer, cells = found["auto"]
    with pytest.raises(InputError, match=words):
        measurer.rehearse(cells)


def test_what_does_not_fit_is_not_tried():
    """On a CPU a cell that needs more than there is says so, and the process lives."""

    def factory(num_layers, seq_length, dtype):
        model = Model(num_layers)
        for block in model.blocks:
            block.wide = nn.Parameter(torch.empty(1 << 20, 1 << 20))
        return model

    source = source_of(factory, dtype="fp32")
    options = build_options(model="py:x", dtype="fp32", seq="8", bsz="1")
    cells = plan_cells(source.sizes, options, own_degrees=source.degrees)
    measurer = ModuleMeasurer(source, options, torch.device("cpu"))
    measurer.rehearse(cells)
    for cell in cells:
        found = measurer.measure(cell)
        if cell.quantity == "time":
            assert found.reason.startswith("out of memory: about ")
        else:
            assert found.status == "ok", found.reason


@pytest.mark.parametrize("name", ["hidden_states", "last_hidden_state"])
def test_dicts_with_a_hidden_state_are_accepted(name):
    """Layers may return what newer models do: a dict or an object that names it."""

    class Naming(Layer):
        def forward(self, x, scale=None):
            return {name: super().forward(x)}

    class Reading(Model):
        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)[name]
            return SimpleNamespace(**{name: x})

    def factory(num_layers, seq_length, dtype):
        model = Reading(0)
        model.blocks = nn.ModuleList(Naming() for _ in range(num_layers))
        return model

    source = source_of(factory)
    (one,) = source.layer_calls(source.build(1), 3, 8)
    assert one.module(*one.inputs).shape == (3, 8, 8)


@pytest.mark.gpu
def test_memory_of_a_module_on_a_gpu():
    """What the allocator says stands beside the exact count, and is close to it."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    source = source_of(lambda n, s, t: Model(n, hidden=1024), dtype="fp32")
    options = build_options(model="py:x", dtype="fp32", source="device", seq="512", bsz="1")
    cells = plan_cells(source.sizes, options, own_degrees=source.degrees)
    measurer = ModuleMeasurer(source, options, torch.device("cuda", 0))
    for cell in cells:
        if cell.quantity == "memory" and cell.part != "first":
            found = measurer.measure(cell)
            assert found.status == "ok", found.reason
            assert found.bytes["device_activation"] == pytest.approx(
                found.bytes["activation"], rel=0.02, abs=64 << 10
            )
