"""Sources of models: every way to name one, and one sentence for each that cannot be measured."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from autopar.documents.spec import load_spec
from autopar.errors import InputError, OptionError
from autopar.records import replace
from profiler.model.cells import plan_cells
from profiler.model.options import build_options
from profiler.model.sources import load_source

torch = pytest.importorskip("torch", reason="the profilers need torch")

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402

from profiler.measure import Policy  # noqa: E402
from profiler.model.counting import count_memory  # noqa: E402
from profiler.model.layers.vocab import build_stack  # noqa: E402
from profiler.model.modules import call, main_output  # noqa: E402
from profiler.model.timing import time_module  # noqa: E402

ROOT = Path(__file__).resolve().parents[4]
CPU = torch.device("cpu")
QUICK = Policy(iters=3, warmup=1, max_seconds=0.05)


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Return a function that writes a Python module into the current folder and names it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write(text: str, name: str = "theirs") -> str:
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return name

    yield write
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
    importlib.invalidate_caches()


# --- specs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama2-7b", "t5-3b", "gpt2-xl", "mixtral-8x7b", "bert-large"])
def test_a_shipped_model_is_built_from_reference_blocks(name):
    """A spec's model has the asked-for layers of each type, and its loss has a gradient."""
    source = load_source(name)
    assert source.spec is source.sizes
    assert source.spec == load_spec(name)
    assert source.warnings == ()
    layers = [replace(layer, num_layers=3, seq_length=64) for layer in source.spec.layers]
    spec = replace(source.spec, layers=tuple(layers))
    with FakeTensorMode():
        built = build_stack(spec, dtype=torch.bfloat16, device="cpu")
        loss = main_output(call(built.module, built.make_batch(2, 64)), name)
        loss.backward()
        with pytest.raises(InputError, match=r"64.*32"):
            built.make_batch(1, 32)
    assert [len(layers) for layers in built.layers] == [3] * len(source.spec.layers)
    assert all(p.grad is not None for layers in built.layers for p in layers[0].parameters())


def test_a_spec_without_torch_is_enough_for_its_degrees():
    """Degrees are those that heads and widths allow, in every type of layers."""
    source = load_source("llama3-8b")
    assert source.degrees == (1, 2, 4, 8, 16, 32)
    assert source.check_degree(8) is None
    with pytest.raises(InputError, match="--tp: 5 does not divide the 32 attention heads of model"):
        source.check_degree(5)


def test_a_config_is_a_spec(tmp_path):
    """A Hugging Face config.json is measured with reference blocks, without transformers."""
    values = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 100}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", **values}))
    source = load_source(str(path))
    assert [(x.hidden_size, x.num_heads) for x in source.sizes.layers] == [(64, 4)]
    options = build_options(model=str(path), seq="129")
    with pytest.raises(InputError, match="--seq: 129 tokens are more than the 128 rows"):
        plan_cells(source.sizes, options)
    path.write_text(json.dumps({"model_type": "gpt2", **values, "n_head": None}))
    with pytest.raises(InputError, match=r"n_head.*the value is null"):
        load_source(str(path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "lama2-7b",
            "'lama2-7b'",
        ),
        ("py:", "'py:'"),
        ("py:models/mine.py:build", "without .py or slashes"),
        ("py:mine", "is not a Python object"),
        ("hf:", "'hf:'"),
    ],
)
def test_texts_that_name_nothing(text, words):
    """What cannot be a model is refused before anything is imported."""
    with pytest.raises(InputError, match=words) as caught:
        load_source(text)
    assert caught.value.exit_code == 2


# --- the documented example ----------------------------------------------------------------


def documented_module() -> str:
    """Return the module of docs/how-to-add.md, as it is printed there."""
    page = (ROOT / "docs" / "how-to-add.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    return str(code)


def test_the_documented_model_is_measured(modules):
    """The decoder of the documentation, byte for byte, has times, memory and a name."""
    text = documented_module()
    assert len(text.splitlines()) <= 70
    name = modules(text, "my_model")
    source = load_source(f"py:{name}:build", seq_lengths=[16, 32], dtype="fp32")
    assert source.sizes.name == "my-model-build"
    assert [(x.hidden_size, x.num_heads) for x in source.sizes.layers] == [(256, 8)]
    assert source.spec is None
    assert source.sizes.layers[0].seq_length == 32
    assert source.warnings == ()
    built = source.build(2, dtype="fp32")
    (layer,) = source.layer_calls(built, 2, 16)
    assert [tuple(x.shape) for x in layer.inputs] == [(2, 16, 256)]
    timed = time_module(layer.module, lambda: layer.inputs, QUICK, CPU)
    assert timed.reason is None
    assert set(timed.samples_s) == {"forward", "backward", "recompute", "optimizer"}
    assert all(s > 0 for samples in timed.samples_s.values() for s in samples)


def test_memory_of_the_documented_model_is_counted_without_a_device(modules):
    """Bytes of a layer are exact and linear in the batch; its parameters are all of them."""
    source = load_source(f"py:{modules(documented_module(), 'my_model')}:build", seq_lengths=[64])
    counted = []
    for batch in (1, 2):
        with FakeTensorMode():
            built = source.build(2, dtype="bf16")
            (layer,) = source.layer_calls(built, batch, 64)
            assert isinstance(layer.inputs[0], FakeTensor)
            counted.append(count_memory(layer.module, layer.inputs))
    assert counted[0].num_parameters == 256 * 3 * 256 + 256 * 256 + 2 * 4 * 256**2 + 9 * 256
    assert counted[0].parameter_bytes == 2 * counted[0].num_parameters
    assert counted[1].activation_bytes == 2 * counted[0].activation_bytes > 0


def test_higher_degrees_of_a_module_are_scaled_with_a_warning(modules):
    """Without a plan only whole layers are measured; degrees must divide the heads all the same."""
    source = load_source(f"py:{modules(documented_module(), 'my_model')}:build", seq_lengths=[16])
    assert source.degrees == (1,)
    assert source.check_degree(1) is None
    assert "no parallelize_plan" in str(source.check_degree(4))
    with pytest.raises(InputError, match="--tp: 3 does not divide the 8 attention heads"):
        source.check_degree(3)


def test_positions_that_run_out_are_one_sentence(modules):
    """A position table is known by its name, since tensors without contents have no wrong index."""
    text = documented_module().replace(
        "nn.Embedding(seq_length, hidden)", "nn.Embedding(24, hidden)"
    )
    name = modules(text, "my_model")
    with pytest.raises(InputError, match=r"32 tokens are more than the 24 rows of .* positions"):
        load_source(f"py:{name}:build", seq_lengths=[16, 32])


@pytest.mark.parametrize(
    ("text", "named", "words"),
    [
        ("x = 1", "py:missing:build", "'missing'"),
        (
            "x = 1",
            "py:theirs.more:build",
            "there is no Python module 'theirs.more'|is not a package",
        ),
        ("import not_there_at_all", "py:theirs:b", "importing theirs raised ModuleNotFoundError"),
        ("1 / 0", "py:theirs:b", "importing theirs raised ZeroDivisionError: division by zero$"),
        ("def (", "py:theirs:b", "importing theirs raised SyntaxError"),
        ("def build_it(): pass", "py:theirs:buildit", "build_it"),
        ("build = 3", "py:theirs:build", "'build' of Python module theirs cannot be called"),
    ],
)
def test_python_names_that_lead_nowhere(modules, text, named, words):
    """Modules that are missing or fail, and names that are not in them, are one sentence."""
    modules(text)
    with pytest.raises(InputError, match=words) as caught:
        load_source(named)
    assert "\n" not in str(caught.value)


def test_a_module_in_a_package_is_imported_from_here(modules):
    """`py:` finds packages of the current folder."""
    modules("", "pack.__init__")
    name = modules(documented_module(), "pack.models")
    source = load_source(f"py:{name}:build", seq_lengths=[8])
    assert source.sizes.name == "models-build"


def test_sources_are_values():
    """Sources compare by what they name."""
    one, other = load_source("llama2-7b"), load_source("llama2-7b")
    assert one == other
    assert dataclasses.is_dataclass(one)
    with pytest.raises(OptionError):
        load_source("py:a b:c")
