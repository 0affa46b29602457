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
from profiler.model.hub import hub_factory  # noqa: E402
from profiler.model.module_source import module_source  # noqa: E402
from profiler.model.sources import load_source  # noqa: E402
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
    assert (source.name, source.hidden_size, source.num_heads) == ("Model-1B", 16, 4)
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
        (VALUES, OSError("offline"), "no configuration 'x' on this machine, and nothing is down"),
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


def test_a_real_configuration_of_transformers(tmp_path):
    """With the library at hand, a small GPT-2 of it is measured from a local file."""
    pytest.importorskip("transformers", reason="needs the extra hf")
    values = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **values}))
    source = load_source(f"hf:{tmp_path}", seq_lengths=[32], dtype="fp32")
    assert (source.hidden_size, source.num_heads) == (64, 4)
    built = source.build(3, dtype="fp32")
    (layer,) = source.layer_calls(built, 2, 32)
    assert time_module(layer.module, lambda: layer.inputs, QUICK, CPU).reason is None
