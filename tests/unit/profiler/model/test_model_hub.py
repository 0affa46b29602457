"""Models of the library transformers, whose place a double takes."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from autopar.errors import AutoparError, InputError, InstallError

torch = pytest.importorskip("torch", reason="the profilers need torch")

from torch import nn  # noqa: E402

from profiler.measure import Policy  # noqa: E402
from profiler.model.cells import plan_cells  # noqa: E402
from profiler.model.measuring import ModuleMeasurer, SpecMeasurer  # noqa: E402
from profiler.model.modules import hub_factory  # noqa: E402
from profiler.model.options import build_options  # noqa: E402
from profiler.model.sources import load_source, module_source  # noqa: E402
from profiler.model.timing import time_module  # noqa: E402
from tests.unit.own_modules import Layer  # noqa: E402

CPU = torch.device("cpu")
QUICK = Policy(iters=3, warmup=1, max_seconds=0.05)


class Config:
    """Stands in for a configuration of transformers: its values, and back."""

    def __init__(self, values):
        self.__dict__.update(values)

    def to_dict(self):
        return dict(self.__dict__)

    @classmethod
    def from_dict(cls, values):
        return cls(values)


class HubDecoder(nn.Module):
    """Stands in for a model of transformers: named arguments, an output object, tuples inside."""

    def __init__(self, config):
        super().__init__()
        assert (
            str(torch.get_default_dtype())
            == f"torch.{config.dtype}"
            == f"torch.{config.torch_dtype}"
        )
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        stacks = 2 if config.is_encoder_decoder else 1
        self.h = nn.ModuleList(
            Layer(config.hidden_size, "pair") for _ in range(config.num_hidden_layers)
        )
        if stacks == 2:
            self.g = nn.ModuleList(
                Layer(config.hidden_size) for _ in range(config.num_decoder_layers)
            )
        self.drop = nn.Dropout(config.attn_pdrop)

    def forward(self, *, input_ids, labels):
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        for layer in self.h:
            x = self.drop(layer(x)[0])
        for layer in getattr(self, "g", ()):
            x = layer(x)
        return SimpleNamespace(loss=(x.float() ** 2).mean() + labels.sum() * 0, logits=x)


VALUES = {
    "model_type": "double",
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_decoder_layers": 3,
    "layer_types": ["a", "b", "a"],
    "max_position_embeddings": 64,
    "vocab_size": 50,
    "attn_pdrop": 0.1,
    "classifier_dropout": None,
    "use_dropout": True,
    "is_encoder_decoder": False,
    "use_cache": True,
}


def library(values=VALUES, *, error=None):
    """Return a double of the library transformers with one configuration."""
    asked = []

    def load(name, **options):
        asked.append((name, options))
        if error is not None:
            raise error
        return Config(values)

    kind = SimpleNamespace(from_config=HubDecoder)
    return SimpleNamespace(
        AutoConfig=SimpleNamespace(from_pretrained=load),
        AutoModelForCausalLM=kind,
        AutoModelForSeq2SeqLM=kind,
        AutoModelForMaskedLM=SimpleNamespace(from_config=None),
        asked=asked,
    )


def test_a_hub_model_is_made_from_its_configuration_alone():
    """Few layers, no dropout, no cache, the asked-for type, and nothing from the network."""
    double = library()
    factory = hub_factory("somebody/Model-1B", library=double)
    assert double.asked == [
        ("somebody/Model-1B", {"local_files_only": True, "trust_remote_code": False})
    ]
    source = module_source(factory, text="hf:x", label=factory.name, seq_lengths=[32])
    layer = source.sizes.layers[0]
    assert (source.sizes.name, layer.hidden_size, layer.num_heads) == ("Model-1B", 16, 4)
    built = source.build(5, dtype="fp32")
    config = built.module.config
    assert (config.num_hidden_layers, config.layer_types) == (5, ["a", "b", "a", "a", "b"])
    assert (config.attn_pdrop, config.classifier_dropout, config.use_dropout) == (0.0, None, True)
    assert config.use_cache is False
    assert [len(layers) for layers in built.layers] == [5]
    (layer,) = source.layer_calls(built, 2, 32)
    assert layer.module(*layer.inputs).shape == (2, 32, 16)
    with pytest.raises(InputError, match=r"65 tokens are more than the 64 rows of .* wpe"):
        module_source(factory, text="hf:x", label="x", seq_lengths=[65])


def test_an_encoder_and_a_decoder_are_two_types():
    """Both stacks of an encoder-decoder are found, with as many layers each."""
    factory = hub_factory("x", library=library({**VALUES, "is_encoder_decoder": True}))
    source = module_source(factory, text="hf:x", label="x")
    assert [layer.seq_length for layer in source.sizes.layers] == [64, 64]
    built = source.build(2)
    assert [len(layers) for layers in built.layers] == [2, 2]
    assert len(source.layer_calls(built, 1, 8)) == 2


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        (VALUES, OSError("offline"), "'x'"),
        (VALUES, ValueError("needs\nits code"), "hf:x raised ValueError: needs$"),
        ({"model_type": "image"}, None, "has none of num_hidden_layers, n_layer"),
        ({**VALUES, "architectures": ["XForMaskedLM"]}, None, "hf:x: the model raised TypeError"),
    ],
)
def test_configurations_that_make_no_model(values, error, words):
    """A configuration that is not here, or makes no model, is one sentence."""

    def load():
        return hub_factory("x", library=library(values, error=error))

    with pytest.raises(InputError, match=words) as caught:
        module_source(load(), text="hf:x", label="x")
    assert "\n" not in str(caught.value)


def test_without_transformers_the_extra_is_named(monkeypatch):
    """`hf:` needs the optional extra, and says which."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InstallError, match=r"pip install 'autopar\[hf\]'") as caught:
        load_source("hf:gpt2")
    assert isinstance(caught.value, AutoparError)


def tiny(family, **more):
    """Return what a configuration of so many heads, layers and tokens says in its family."""
    values = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "intermediate_size": 176,
        "max_position_embeddings": 64,
    }
    own = {
        "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 8, "n_positions": 64},
        "t5": {"d_model": 64, "num_layers": 3, "num_heads": 8, "d_kv": 8, "d_ff": 256},
    }
    if family in ("llama", "mistral", "mixtral", "qwen2"):
        values["num_key_value_heads"] = 4
    return {**own.get(family, values), "model_type": family, "vocab_size": 512, **more}


@pytest.mark.parametrize(
    ("family", "more", "factor"),
    [
        # what theirs keeps beside ours: norms in steps (wide copies), GELU in steps
        ("llama", {}, (1.2, 1.4)),
        ("mistral", {}, (1.2, 1.4)),
        ("qwen2", {}, (1.2, 1.4)),
        ("gpt2", {"bos_token_id": 0, "eos_token_id": 0}, (1.6, 1.9)),
        ("gpt_neox", {}, (0.99, 1.2)),
        ("t5", {"pad_token_id": 0}, (1.1, 2.4)),
        ("bert", {}, (0.99, 1.0)),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, (1.0, 1.3)),
    ],
)
def test_layers_of_transformers_are_those_of_the_reference(family, more, factor, tmp_path):
    """The same configuration, read by us and by the library: the same parameters everywhere."""
    pytest.importorskip("transformers", reason="needs the extra hf")
    (tmp_path / "config.json").write_text(json.dumps(tiny(family, **more)), encoding="utf-8")
    options = {"dtype": "bf16", "source": "exact", "tp": "1", "seq": "32"}
    found = {}
    for kind, name in (("theirs", f"hf:{tmp_path}"), ("ours", f"{tmp_path}/config.json")):
        asked = build_options(model=name, **options)
        source = load_source(name, seq_lengths=[32])
        degrees = None if kind == "ours" else source.degrees
        cells = plan_cells(source.sizes, asked, own_degrees=degrees)
        measurer = (
            SpecMeasurer(source.spec, asked, CPU)
            if kind == "ours"
            else ModuleMeasurer(source, asked, CPU)
        )
        chosen = [c for c in cells if c.part != "first" and c.checkpoint != "selective"]
        found[kind] = {cell.key: measurer.measure(cell) for cell in chosen}
    assert found["theirs"].keys() == found["ours"].keys()
    for key, theirs in found["theirs"].items():
        ours = found["ours"][key]
        assert theirs.status == "ok", theirs.reason
        if "_last_" not in key or family != "t5":  # biases by position: whose stage is a choice
            assert theirs.num_parameters == ours.num_parameters, key
        if "layertype" in key:
            ratio = theirs.bytes["activation"] / ours.bytes["activation"]
            low, high = factor if "full" not in key else (1.0, 1.0)
            assert low <= ratio <= high, (key, ratio)


@pytest.mark.parametrize("family", ["t5", "mixtral", "bert"])
def test_layers_of_transformers_are_timed(family, tmp_path):
    """Forward and backward run on this machine, two stacks and experts among them."""
    pytest.importorskip("transformers", reason="needs the extra hf")
    (tmp_path / "config.json").write_text(json.dumps(tiny(family)), encoding="utf-8")
    source = load_source(f"hf:{tmp_path}", seq_lengths=[32], dtype="fp32")
    built = source.build(source.num_typical, dtype="fp32")
    calls = source.layer_calls(built, 2, 32)
    assert len(calls) == (2 if family == "t5" else 1)
    for layer in calls:
        timed = time_module(layer.module, lambda layer=layer: layer.inputs, QUICK, CPU)
        assert timed.reason is None
        assert set(timed.samples_s) >= {"forward", "backward"}


def test_what_transformers_refuses_is_one_sentence(tmp_path):
    """A position beyond the table, and a family that the library does not know."""
    pytest.importorskip("transformers", reason="needs the extra hf")
    (tmp_path / "config.json").write_text(json.dumps(tiny("gpt2")), encoding="utf-8")
    with pytest.raises(InputError, match=r"65 tokens are more than the 64 rows of .*wpe"):
        load_source(f"hf:{tmp_path}", seq_lengths=[65])
    (tmp_path / "config.json").write_text('{"model_type": "wat"}', encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_source(f"hf:{tmp_path}")
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="no configuration 'no/such-model' on this machine"):
        load_source("hf:no/such-model")
