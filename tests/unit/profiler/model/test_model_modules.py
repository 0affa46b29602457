"""Modules that others wrote: how their layers are found, called, and refused in one sentence."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from autopar.errors import InputError

torch = pytest.importorskip("torch", reason="the profilers need torch")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel  # noqa: E402

from profiler.model.cells import plan_cells  # noqa: E402
from profiler.model.counting import count_memory  # noqa: E402
from profiler.model.measuring import ModuleMeasurer  # noqa: E402
from profiler.model.modules import fake_tensors, find_layers  # noqa: E402
from profiler.model.options import build_options  # noqa: E402
from tests.unit.own_modules import Layer, Model, model_of, source_of  # noqa: E402


@pytest.mark.parametrize("output", ["tensor", "pair", "logits", "loss"])
@pytest.mark.parametrize("layer", ["hidden", "pair"])
def test_outputs_that_contain_a_hidden_state_are_accepted(layer, output):
    """Tuples that start with it, logits and losses are as good as a tensor."""
    source = source_of(model_of(layer=layer, output=output))
    built = source.build(2, dtype="fp32")
    (one,) = source.layer_calls(built, 3, 8)
    result = one.module(*one.inputs)
    assert result.shape == (3, 8, 8)
    # the captured scale of one half is bound to the layer
    expected = one.inputs[0] + 0.5 * (
        built.layers[0][0].down(built.layers[0][0].up(one.inputs[0]).relu())
    )
    if layer == "hidden":
        whole = built.layers[0][0](one.inputs[0], scale=torch.tensor(0.5))
        assert torch.equal(result, whole)
        assert torch.allclose(whole, expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layer": "flags"}, "layer Layer returns a tuple that starts with Size. Return"),
        ({"layer": "narrow"}, r"layer Layer returns a tensor of shape \[1, 8, 1\] first"),
        ({"output": "dict"}, "the module Model returns a dict. Return"),
        ({"output": "late"}, "the module Model returns a tuple that starts with FakeTensor"),
        ({"output": "tokens"}, "the module Model returns a tensor of int64"),
        ({"output": "none"}, "the module Model returns None. Return"),
    ],
)
def test_outputs_without_a_hidden_state_are_one_sentence(options, words):
    """A module whose output cannot be differentiated is refused, with what it returns."""
    with pytest.raises(InputError, match=words):
        source_of(model_of(**options))


def test_weights_that_are_not_numbers_are_named():
    """NaN weights would be timed like any others: they are refused where they can be seen."""

    def factory(num_layers, seq_length, dtype):
        model = Model(num_layers)
        with torch.no_grad():
            model.blocks[1].down.weight[0, 0] = torch.nan
        return model

    source = source_of(factory)
    with pytest.raises(InputError, match=r"blocks\.1\.down\.weight holds NaN or infinite values"):
        source.build(2)


def test_masks_of_infinity_are_no_mistake():
    """Buffers hold -inf on purpose; parameters do not."""

    def factory(num_layers, seq_length, dtype):
        model = Model(num_layers)
        model.register_buffer("mask", torch.full((2, 2), -torch.inf))
        return model

    assert len(source_of(factory).build(2).layers[0]) == 2


def with_two_lists(num_layers, seq_length, dtype):
    """Return a model with a second list of as many modules."""
    model = Model(num_layers)
    model.other = nn.ModuleList(nn.Linear(2, 2) for _ in range(num_layers))
    return model


def in_float64(num_layers, seq_length, dtype):
    """Return a model that ignores the type it was asked for."""
    return Model(num_layers).double()


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (lambda n, s, t: {}["vocab"], "py:x: the factory raised KeyError: 'vocab'$"),
        (lambda n, s, t: sys.exit("no"), "the factory raised SystemExit: no$"),
        (lambda n: n, "the factory raised TypeError: .*takes 1 positional argument but 3"),
        (lambda n, s, t: 5, "the factory returned a int. Return an nn.Module"),
        (lambda n, s, t: nn.Linear(2, 2), r"Linear has no make_batch\(batch, seq_length\)"),
        (lambda n, s, t: Model(n + 1), "returned 3 layers of Layer for num_layers 2"),
        (with_two_lists, r"2 lists of 2 modules \(blocks, other\)"),
        (in_float64, "bfloat16"),
    ],
)
def test_factories_that_make_no_model(factory, words):
    """What a factory does wrong is one sentence that names it."""
    with pytest.raises(InputError, match=words) as caught:
        source_of(factory)
    assert "\n" not in str(caught.value)


def stated(layers, **values):
    """Return a factory of objects that say which modules are the layers."""

    def factory(num_layers, seq_length, dtype):
        model = Model(num_layers)
        return SimpleNamespace(
            module=model, make_batch=model.make_batch, layers=layers(model), **values
        )

    return factory


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (lambda m: list(m.blocks), "\\.layers is not a list of lists of modules"),
        (lambda m: [], "\\.layers is not a list of lists"),
        (lambda m: [[1, 2]], "\\.layers is not a list of lists"),
        (lambda m: [[m.blocks[0], m.embed]], "mixes classes"),
        (lambda m: [list(m.blocks)[:1]], "returned 1 layers of \\w+ for num_layers 2"),
        (lambda m: [[nn.Linear(2, 2), nn.Linear(2, 2)]], "layer Linear is not called"),
    ],
)
def test_layers_that_are_stated_wrongly(layers, words):
    """The protocol's list of layers is checked before anything is measured."""
    with pytest.raises(InputError, match=words):
        source_of(stated(layers))


def test_stated_sizes_and_plans_are_taken():
    """Attributes beside the module name the files, and a plan opens the divisors of the heads."""
    values = {"num_heads": 4, "hidden_size": 8, "parallelize_plan": {"up": "column"}}
    source = source_of(stated(lambda m: [list(m.blocks)], **values))
    (layer,) = source.sizes.layers
    assert (layer.num_heads, layer.hidden_size, source.degrees) == (4, 8, (1, 2, 4))
    assert source.parallelize_plan == {"up": "column"}
    assert source.check_degree(2) is None
    with pytest.raises(InputError, match="parallelize_plan is a list, expected a dict"):
        source_of(stated(lambda m: [list(m.blocks)], parallelize_plan=["up"]))


def test_unknown_heads_are_said():
    """Without any word on heads, one is assumed, and the source says so."""
    source = source_of(model_of())
    assert source.sizes.layers[0].num_heads == 1
    assert any("number of heads is unknown" in text for text in source.warnings)


def test_experts_inside_layers_are_not_the_layers():
    """A longer list inside every layer is a part of it."""

    class Mixture(Layer):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    model = Model(0)
    model.blocks = nn.ModuleList(Mixture() for _ in range(2))
    assert find_layers(model, "x") == [list(model.blocks)]
    with pytest.raises(InputError, match=r"Linear has no nn.ModuleList"):
        find_layers(nn.Linear(2, 2), "x")


def test_shapes_that_depend_on_values_are_tried_in_earnest():
    """A module that asks for values is measured with values alone, and the source says so."""

    class Sorting(Layer):
        def forward(self, x, scale=None):
            chosen = (x.flatten(0, 1)[:, 0] > 0).nonzero().flatten()
            return x + self.down(self.up(x)) + chosen.sum() * 0

    def factory(num_layers, seq_length, dtype):
        model = Model(0)
        model.blocks = nn.ModuleList(Sorting() for _ in range(num_layers))
        return model

    source = source_of(factory)
    assert not source.fakeable
    (said,) = (text for text in source.warnings if "allocated tensors" in text)
    assert (
        "memory is counted with allocated tensors, and needs that memory: its shapes depend"
    ) in said
    assert len(source.build(2).layers[0]) == 2


def test_default_type_is_what_it_was():
    """A factory is called with other defaults of torch, which are put back even where it fails."""
    before = torch.get_default_dtype()
    seen = []

    def factory(num_layers, seq_length, dtype):
        seen.append(torch.get_default_dtype())
        raise ValueError("no")

    with pytest.raises(InputError, match="ValueError: no"):
        source_of(factory)
    assert seen == [torch.bfloat16]
    assert torch.get_default_dtype() == before


def test_tensors_without_contents_replace_all_that_a_module_holds():
    """Tied weights stay tied, and buffers and plain tensors of the module follow."""

    def factory(num_layers, seq_length, dtype):
        model = Model(num_layers)
        model.head = nn.Linear(8, 32, bias=False)
        model.head.weight = model.embed.weight
        model.register_buffer("mask", torch.ones(4, 4).tril())
        model.scale = torch.ones(3)
        return model.to(dtype)  # fails inside FakeTensorMode

    source = source_of(factory)
    with FakeTensorMode():
        module = source.build(2).module
    assert module.head.weight is module.embed.weight
    assert isinstance(module.embed.weight, nn.Parameter)
    for tensor in (module.embed.weight, module.mask, module.scale):
        assert isinstance(tensor, FakeTensor)
        assert tensor.device.type == "cpu"
    assert module.mask.dtype == module.embed.weight.dtype == torch.bfloat16


def test_a_factory_that_reads_values_is_run_in_earnest():
    """Where meta tensors do not do, a module is made of real ones, and counted all the same."""

    def factory(num_layers, seq_length, dtype):
        model = Model(num_layers)
        model.largest = float(model.embed.weight.abs().max())
        return model

    source = source_of(factory)
    assert source.fakeable
    with FakeTensorMode():
        built = source.build(2)
        (layer,) = source.layer_calls(built, 1, 8)
        assert isinstance(layer.inputs[0], FakeTensor)
        assert count_memory(layer.module, layer.inputs).num_parameters == 8 * 16 + 16 + 16 * 8 + 8


def test_a_plan_lays_a_layer_out_as_a_rank_holds_it():
    """At degree 2 and 4 a rank counts its share of weights and of what lies between them."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    source = source_of(stated(lambda m: [list(m.blocks)], num_heads=4, parallelize_plan=plan))
    assert source.degrees == (1, 2, 4)
    try:
        for degree in source.degrees:
            with FakeTensorMode():
                built = source.build(2, dtype="fp32")
                (layer,) = source.layer_calls(built, 2, 8, degree=degree)
                counted = count_memory(layer.module, layer.inputs, shared=layer.shared)
            assert counted.num_parameters == (8 * 16 + 16 + 16 * 8) // degree + 8
            # the input is 8 wide, the output of relu 16 and divided; the scale is the model's
            assert counted.activation_bytes == 4 * 2 * 8 * (8 + 16 // degree)
        bad = {"up": "sideways"}
        broken = source_of(stated(lambda m: [list(m.blocks)], parallelize_plan=bad))
        built = broken.build(2)
        with pytest.raises(InputError, match="parallelize_plan at degree 2 raised"):
            broken.layer_calls(built, 1, 8, degree=2)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_a_layer_keeps_what_the_gradient_of_its_input_needs():
    """In the middle of a model gradients go on; what all layers share is not a layer's own."""

    class Squared(Layer):
        def forward(self, x, scale=None):
            return self.down(self.up(x * x)) * scale

    def factory(num_layers, seq_length, dtype):
        model = Model(0)
        model.blocks = nn.ModuleList(Squared() for _ in range(num_layers))
        return model

    source = source_of(factory)
    with fake_tensors():
        (layer,) = source.layer_calls(source.build(1, dtype="fp32"), 2, 8)
        counted = count_memory(layer.module, layer.inputs, shared=layer.shared)
    assert layer.inputs[0].requires_grad
    # x and x * x, 8 wide each, and the 16 in between
    assert counted.activation_bytes == 4 * 2 * 8 * (8 + 8 + 16)


def test_a_table_in_the_first_layer_is_not_of_the_others():
    """Where a first layer holds what all use, one of the others is measured."""

    class Holding(Layer):
        def __init__(self, first):
            super().__init__()
            if first:
                self.table = nn.Embedding(4, 8)

        def forward(self, x, scale=None):
            return super().forward(x + self.table.weight[0] if hasattr(self, "table") else x)

    def factory(num_layers, seq_length, dtype):
        model = Model(0)
        model.blocks = nn.ModuleList(Holding(k == 0) for k in range(num_layers))
        return model

    options = build_options(model="py:x", dtype="fp32", source="exact", seq="8")
    source = source_of(factory, dtype="fp32")
    measurer = ModuleMeasurer(source, options, torch.device("cpu"))
    cells = {c.key: c for c in plan_cells(source.sizes, options, own_degrees=source.degrees)}
    found = {key: measurer.measure(cell).num_parameters for key, cell in cells.items()}
    of_layer = 8 * 16 + 16 + 16 * 8 + 8
    assert found["memory_layertype_0_bsz1_seq8"] == of_layer
    assert found["memory_other_only_bsz8_seq8"] == 32 * 8 + 4 * 8


def test_an_operator_without_known_shapes_is_run_in_earnest():
    """Where tensors without contents fail and real ones do not, real ones are used."""

    class Printing(Layer):
        def forward(self, x, scale=None):
            x.numpy(force=True)  # of a tensor without contents: a RuntimeError
            return super().forward(x)

    def factory(num_layers, seq_length, dtype):
        model = Model(0)
        model.blocks = nn.ModuleList(Printing() for _ in range(num_layers))
        return model

    source = source_of(factory, dtype="fp32")
    assert not source.fakeable
    assert "does not run on tensors without contents (RuntimeError" in source.warnings[0]


def test_what_no_training_changes_is_said():
    """A model without a gradient is refused; layers with some frozen weights are warned of."""

    def factory(frozen):
        def make(num_layers, seq_length, dtype):
            model = Model(num_layers)
            for name, parameter in model.named_parameters():
                parameter.requires_grad = not frozen(name)
            return model

        return make

    with pytest.raises(InputError, match="Model has no parameter with a gradient"):
        source_of(factory(lambda name: True))
    source = source_of(factory(lambda name: ".up." in name))
    assert any("51 % of the parameters of a layer have no gradient" in w for w in source.warnings)
    built = source.build(2)
    assert not built.layers[0][0].up.weight.requires_grad
