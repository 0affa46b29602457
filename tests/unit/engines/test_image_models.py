"""Transformers of images and videos: counts, saved tensors, prices, exports and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import autopar
from autopar.documents.spec import load_spec
from autopar.errors import AutoparError, DocumentError, InputError
from autopar.families.config import parse_hugging_face
from autopar.price.assessment import Target, assess
from autopar.price.job import job_of_run
from autopar.price.parameters import stage_weights
from autopar.price.step import LayerTimeCache, seconds_of_times
from autopar.price.torch_layers import parts_without_recompute
from autopar.rates.accuracy import load_accuracy
from autopar.rates.card import load_card
from autopar.rates.layer import layer_times
from autopar.rates.parts.operations import machine_of
from autopar.rates.stack import load_stack
from autopar.records import replace
from autopar.run.model import ModelSpec, model_parameter_count
from autopar.run.of_plan import uniform_model
from autopar.run.run import Run
from autopar.run.strategy import even_chunks
from autopar.training.throughput import model_flop
from search.commands import search as search_command
from search.engines.candidate import Candidate, Constraints, TrainingSettings
from search.engines.exporter_types import ExportTarget
from search.engines.files import written
from search.engines.space import EngineContext, run_of
from search.engines.table import engine_space, read_checked
from search.planning.uniform.infeasibility import violated_rule
from search.planning.uniform.summary import PATCHES
from search.show.summary import SCREEN_HEIGHT, SCREEN_WIDTH

PUBLISHED = json.loads(
    (Path(__file__).parents[2] / "data" / "image_models.json").read_text(encoding="utf-8")
)
SMALL = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
"""Two layers of 32 channels."""
BY_CLASS = {
    "dit": {"_class_name": "DiTTransformer2DModel", **SMALL},
    "flux": {"_class_name": "FluxTransformer2DModel", **SMALL, "num_single_layers": 2},
    "sd3": {"_class_name": "SD3Transformer2DModel", **SMALL},
    "wan": {"_class_name": "WanTransformer3DModel", **SMALL, "ffn_dim": 128},
    "vit": {
        "model_type": "vit", "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2,
        "intermediate_size": 128,
    },
}  # fmt: skip
TOKENS, TEXT, H = 96, 32, 32


def small(name: str, **layer: Any) -> ModelSpec:
    """Return a model of TOKENS tokens; layer : changed fields of its layer types."""
    spec = parse_hugging_face(Path("config.json"), BY_CLASS[name], seq_length=TOKENS)
    return replace(spec, layers=tuple(replace(one, **layer) for one in spec.layers))


def context(spec: ModelSpec, **more: Any) -> EngineContext:
    values: dict[str, Any] = {"name": spec.name, "seq": spec.layers[0].seq_length, "world": 8}
    values |= {"global_batches": (64,), "gpu": "h100-80gb", "domain": 8}
    return EngineContext(model=uniform_model(spec), **{**values, **more})


def run_in(engine: str, spec: ModelSpec, **choice: Any) -> Run:
    job = context(spec)
    chunks = even_chunks(job.model.num_layers, 1)
    given = {"global_batch": 64, "micro_batch": 1, "zero": 3, "chunks": chunks, **choice}
    return run_of(engine_space(engine), job, Candidate(**given))


@pytest.mark.parametrize(
    "name", ["flux.1-dev", "gemma-2-9b", "gemma-3-4b", "llama3-8b", "vit-l", "wan2.1-14b"]
)
def test_halves_of_a_layer_are_the_layer(name: str) -> None:
    """Searches price and bound mixer and MLP alone: nothing may be lost or counted twice."""
    machine = machine_of(load_card("h100-80gb"), stack=load_stack("torchtitan-eager"))
    job = job_of_run(run_in("deepspeed", load_spec(name)))
    for block in dict.fromkeys(replace(one, number=1) for one in job.blocks):
        whole = layer_times(machine, job, block)
        both = LayerTimeCache(machine).times(job, block)
        one, other = (sum(seconds_of_times(machine, job, times)) for times in (whole, both))
        assert other == pytest.approx(one, rel=1e-9)


# --------------------------------------------------------------------------------------------------
# Counts


@pytest.mark.parametrize("row", PUBLISHED, ids=[row["name"] for row in PUBLISHED])
def test_parameters_are_those_of_the_library(row: Mapping[str, Any]) -> None:
    spec = parse_hugging_face(Path("config.json"), row["config"])
    assert model_parameter_count(spec) == row["parameters"]
    run = run_in("deepspeed", spec, zero=0)
    assert sum(one.elements for one in stage_weights(run, 0)[0]) == row["parameters"]


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("flux.1-dev", (1024 // 16) ** 2 + 512),
        ("wan2.1-t2v-14b", (81 - 1 + 4) // 4 * (480 // 16) * (832 // 16)),
        ("sd3-medium", (1024 // 16) ** 2 + 77 + 256),
        ("dit-xl-2-256", (256 // 16) ** 2),
        ("vit-l-16", (224 // 16) ** 2 + 1),
        ("dinov2-registers", (518 // 16) ** 2 + 1 + 4),
        ("siglip-so400m", (384 // 14) ** 2),
    ],
)
def test_tokens_of_a_sample_are_its_patches_and_text(name: str, tokens: int) -> None:
    (row,) = (row for row in PUBLISHED if row["name"] == name)
    spec = parse_hugging_face(Path("config.json"), row["config"])
    assert {layer.seq_length for layer in spec.layers} == {tokens}
    given = parse_hugging_face(Path("config.json"), row["config"], seq_length=77)
    assert {layer.seq_length for layer in given.layers} == {77}
    # positions of an image are those of the file, whatever the length
    assert model_parameter_count(given) == row["parameters"]


def test_shipped_models_are_the_published_configurations() -> None:
    rows = {row["name"]: row["config"] for row in PUBLISHED}
    for name, row in (("flux.1-dev", "flux.1-dev"), ("wan2.1-14b", "wan2.1-t2v-14b")):
        own = parse_hugging_face(Path("config.json"), rows[row])
        assert replace(own, name=name) == load_spec(name)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({**BY_CLASS["sd3"], "dual_attention_layers": [0]}, "dual_attention_layers"),
        ({**BY_CLASS["dit"], "attention_bias": False}, "attention_bias"),
        ({**BY_CLASS["dit"], "norm_elementwise_affine": True}, "norm_elementwise_affine"),
        ({**BY_CLASS["vit"], "qkv_bias": False}, "qkv_bias"),
        ({**BY_CLASS["vit"], "num_attention_heads": 3}, "num_attention_heads"),
        ({**BY_CLASS["flux"], "num_layers": 0}, "num_layers"),
        ({"_class_name": "UNet2DConditionModel"}, "_class_name"),
        ({"model_type": "siglip_vision_model", "image_size": 1}, None),
        ({**BY_CLASS["flux"], "num_attention_heads": 10**9, "attention_head_dim": 10**9}, None),
        ({"model_type": "clip", "vision_config": {"model_type": "clip_vision_model"}},
         "model_type"),
    ],
)  # fmt: skip
def test_unread_parts_are_refused_with_their_key(config: dict[str, Any], key: str | None) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_hugging_face(Path("config.json"), config)
    assert caught.value.key == key


# --------------------------------------------------------------------------------------------------
# Memory: what autograd saves of the operators of diffusers and transformers


def _linear(inputs: int, outputs: int) -> torch.nn.Linear:
    return torch.nn.Linear(inputs, outputs, dtype=torch.bfloat16)


class Stream(torch.nn.Module):
    """Matrices of attention and MLP of one stream."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (_linear(H, H) for _ in range(4))
        self.up, self.down = _linear(H, 4 * H), _linear(4 * H, H)

    def heads(self, x: torch.Tensor) -> list[torch.Tensor]:
        found = (one(x) for one in (self.q, self.k, self.v))
        return [one.unflatten(-1, (2, -1)).transpose(1, 2) for one in found]

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(functional.gelu(self.up(x), approximate="tanh"))
        return found


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = functional.scaled_dot_product_attention(q, k, v)
    return found.transpose(1, 2).flatten(2)


def _norm(x: torch.Tensor, weight: Any = None) -> torch.Tensor:
    return functional.layer_norm(x, (H,), weight, weight)


def _encoder(x: torch.Tensor, text: torch.Tensor, vector: torch.Tensor) -> Any:
    one, weight = Stream(), torch.nn.Parameter(torch.ones(H, dtype=x.dtype))
    x = x + one.out(_attend(*one.heads(_norm(x, weight))))
    return x + one.mlp(_norm(x, weight))


def _conditioned(x: torch.Tensor, text: torch.Tensor, vector: torch.Tensor) -> Any:
    one = Stream()
    x = x + vector * one.out(_attend(*one.heads(_norm(x) * (1 + vector) + vector)))
    return x + vector * one.mlp(_norm(x) * (1 + vector) + vector)


def _double(x: torch.Tensor, text: torch.Tensor, vector: torch.Tensor) -> Any:
    image, words, places = Stream(), Stream(), TOKENS - TEXT
    x = x[:, :places] + 0
    pairs = zip(
        image.heads(_norm(x) * (1 + vector) + vector),
        words.heads(_norm(text) * (1 + vector) + vector),
        strict=True,
    )
    both = _attend(*(torch.cat(pair, dim=2) for pair in pairs))
    x, text = x + vector * image.out(both[:, :places]), text + vector * words.out(both[:, places:])
    x = x + vector * image.mlp(_norm(x) * (1 + vector) + vector)
    return x, text + vector * words.mlp(_norm(text) * (1 + vector) + vector)


def _single(x: torch.Tensor, text: torch.Tensor, vector: torch.Tensor) -> Any:
    one, joined = Stream(), _linear(5 * H, H)
    normed = _norm(x) * (1 + vector) + vector
    inner = functional.gelu(one.up(normed), approximate="tanh")
    return x + vector * joined(torch.cat([_attend(*one.heads(normed)), inner], dim=2))


def _crossed(x: torch.Tensor, text: torch.Tensor, vector: torch.Tensor) -> Any:
    own, other, wide = Stream(), Stream(), vector.float()

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return (_norm(x.float()) * (1 + wide) + wide).type_as(x)

    x = (x.float() + own.out(_attend(*own.heads(scaled(x)))) * wide).type_as(x)
    normed = _norm(x.float(), torch.nn.Parameter(torch.ones(H))).type_as(x)
    q, (_, k, v) = other.heads(normed)[0], other.heads(text)
    x = x + other.out(_attend(q, k, v))
    return (x.float() + own.mlp(scaled(x)).float() * wide).type_as(x)


@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize(
    ("name", "forward", "layer"),
    [
        ("vit", _encoder, 0),
        ("dit", _conditioned, 0),
        ("sd3", _double, 0),
        ("flux", _single, 1),
        ("wan", _crossed, 0),
    ],
)
def test_a_layer_saves_what_autograd_does(
    name: str, forward: Callable[..., Any], layer: int, sequences: int
) -> None:
    more = {"cross_tokens": TEXT} if name == "wan" else {}
    # fused norms of heads save what Llama's do; PyTorch fuses them on GPUs alone
    spec = small(name, qk_norms=False, wide_qk_norms=False, **more)
    run = run_in("deepspeed", spec, micro_batch=sequences, global_batch=64)
    counted = sum(size for _, size in parts_without_recompute(run.rank_layers[2 * layer]))
    x, text = (
        torch.randn(sequences, tokens, H, dtype=torch.bfloat16, requires_grad=True) + 0
        for tokens in (TOKENS, TEXT)
    )
    vector = torch.randn(sequences, 1, H, dtype=torch.bfloat16, requires_grad=True)
    found: dict[int, int] = {}
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        base = tensor if tensor._base is None else tensor._base
        # text is an input of all layers
        if not isinstance(base, torch.nn.Parameter) and base is not text:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        kept.append(forward(x, text, vector))
    if name == "sd3":
        # text is half of the input of this block
        found[-1] = text.nbytes
    assert sum(found.values()) == pytest.approx(counted, rel=0.03)


def test_autocast_computes_norms_in_fp32() -> None:
    """Accelerate's inputs of norms and outputs without weights have 4 bytes, not 2."""
    parts = {}
    for engine in ("deepspeed", "accelerate"):
        run = run_in(engine, small("dit"))
        found = parts_without_recompute(run.rank_layers[0])
        parts[engine] = sum(size for name, size in found if "norm" in name)
    assert parts["accelerate"] - parts["deepspeed"] == 2 * 2 * TOKENS * H * 2


# --------------------------------------------------------------------------------------------------
# Time


def test_flop_are_those_of_matrices_and_of_all_pairs() -> None:
    """12 h^2 per layer and token, keys and values of text, and scores of all pairs."""
    dit, wan = (job_of_run(run_in("deepspeed", small(name))) for name in ("dit", "wan"))
    matrices, scores = 12 * H * H, 2 * TOKENS * H
    assert model_flop(dit) == pytest.approx(64 * TOKENS * 2 * 6 * (matrices + scores))
    text = 2 * H * H + 2 * H * H * 512 / TOKENS + 2 * 512 * H
    assert model_flop(wan) == pytest.approx(64 * TOKENS * 2 * 6 * (matrices + scores + text))


def test_a_condition_costs_time_and_no_head_does() -> None:
    machine = machine_of(load_card("h100-80gb"), stack=load_stack("torchtitan-eager"))
    run = run_in("deepspeed", load_spec("flux.1-dev"))
    job = job_of_run(run)
    named = {part.name: part for part in layer_times(machine, job, job.blocks[0]).parts}
    extra = job.blocks[0].extra
    # forward: weights are read once; backward: read again, and a gradient of their size
    slowest = 2 * extra / machine.card.memory_bytes_per_s
    assert slowest < named["conditioning weights"].forward_s < 2 * slowest
    assert named["condition"].forward_s > 0
    attention = named["core attention"].forward_s
    causal = replace(
        job.blocks[0], attention=replace(run.model.attention, causal=True, head_norms="none")
    )
    half = {part.name: part for part in layer_times(machine, job, causal).parts}
    assert 1.5 < attention / half["core attention"].forward_s <= 2.2


# --------------------------------------------------------------------------------------------------
# Search, export and refusals


def test_the_answer_is_the_best_of_all_plans() -> None:
    """No candidate of ZeRO stages, micro-batches and recomputation that fits is faster."""
    answer = autopar.search("vit-l", hardware="h100:1x8", engine="deepspeed", global_batch=512)
    target = Target(
        machine=machine_of(load_card("h100-80gb"), stack=load_stack("torchtitan-eager")),
        accuracy=load_accuracy(),
        site_known=False,
        oom_risk=0.01,
    )
    times = []
    for zero in (0, 1, 2, 3):
        for micro in (1, 2, 4, 8, 16, 32, 64):
            for recompute in ("none", "full"):
                run = run_in("deepspeed", load_spec("vit-l"), zero=zero, micro_batch=micro,
                             global_batch=512, recompute=recompute)  # fmt: skip
                found = assess(run, target)
                if found.fits(target) and found.step is not None:
                    times.append(found.step.total_s)
    assert len(times) > 40
    assert answer["launch"]["samples_per_s"] == pytest.approx(512 / min(times), rel=1e-6)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", ["flux.1-dev", "wan2.1-14b", "vit-l"])
def test_the_first_screen_says_what_tokens_are(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", name, "--hardware", "h100:1x8", "--global-batch-size", "512"]
    assert search_command.run(words) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert len(lines) <= SCREEN_HEIGHT, shown
    assert max(map(len, lines)) <= SCREEN_WIDTH, shown
    assert PATCHES in shown
    assert f"{load_spec(name).layers[0].seq_length:,} tokens" in lines[0]


def test_a_batch_without_option_is_a_power_of_two_per_gpu() -> None:
    """4 Mi tokens are 21,288 images, which micro-batches above 1 do not divide over 8 GPUs."""
    answer = autopar.search("vit-l", hardware="h100:1x8", engine="deepspeed")
    assert any(text.startswith("--global-batch-size 16384") for text in answer["assumed"])


@pytest.mark.parametrize("engine", ["deepspeed", "accelerate"])
@pytest.mark.parametrize("name", ["flux.1-dev", "wan2.1-14b", "vit-l"])
def test_an_export_is_read_back_as_the_plan(name: str, engine: str) -> None:
    spec = load_spec(name)
    run = run_in(engine, spec, recompute="full")
    found = written(run, engine=engine, place=ExportTarget(num_nodes=1, gpus_per_node=8, spec=spec))
    assert found.losses == ()
    assert found.runs.model == run.model
    # the folder of the model is the user's: no file of a model without its other sizes
    assert not [one for one in found.files if one.endswith("config.json")]
    assert "${LOAD:?" in found.launch
    if engine == "accelerate":
        wrapped = f'fsdp_transformer_layer_cls_to_wrap: "{",".join(spec.layer_classes)}"'
        assert wrapped in found.files["autopar_accelerate.yaml"]


@pytest.mark.parametrize("engine", ["llamafactory", "axolotl", "megatron"])
def test_exports_to_trainers_of_language_models_are_refused(engine: str) -> None:
    spec = load_spec("flux.1-dev")
    place = ExportTarget(num_nodes=1, gpus_per_node=8, spec=spec)
    with pytest.raises(InputError):
        written(run_in("deepspeed", spec), engine=engine, place=place)


@pytest.mark.parametrize(
    ("engine", "fixed", "training", "rule"),
    [
        ("megatron", {}, {}, "patches.engine"),
        ("torchtitan", {}, {}, "patches.engine"),
        ("deepspeed", {"tp": (2,)}, {}, "patches.tensor"),
        ("accelerate", {"tp": (2,)}, {}, "patches.tensor"),
        ("accelerate", {"cp": (2,)}, {}, "patches.context"),
        ("accelerate", {}, {"lora_rank": 16}, "patches.adapters"),
        ("deepspeed", {}, {"sft": True}, "patches.fine-tuning"),
    ],
)
def test_engines_and_settings_that_do_not_train_it_are_refused(
    engine: str, fixed: dict[str, Any], training: dict[str, Any], rule: str
) -> None:
    job = context(load_spec("flux.1-dev"), training=TrainingSettings(**training))
    found = violated_rule(engine_space(engine), job, Constraints(**fixed))
    assert found is not None
    assert found.id == rule


@pytest.mark.parametrize("engine", ["galvatron", "paddlenlp", "none"])
def test_planners_of_layers_refuse_it(engine: Any) -> None:
    with pytest.raises(AutoparError) as caught:
        autopar.search("flux.1-dev", hardware="h100:1x8", engine=engine)
    assert caught.value.exit_code == 2


def test_a_launch_with_tensor_ranks_is_not_priced(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2},
    }))  # fmt: skip
    found = autopar.check(str(path), hardware="h100:1x8", model="vit-l", seq_length=197)
    assert [one["id"] for one in found["launches"][0]["findings"]] == ["patches.tensor"]


def test_tokens_of_a_script_follow_from_the_pixels(tmp_path: Path) -> None:
    """`autopar check` needs no length for a model of images, by name or by its config.json."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(BY_CLASS["vit"]))
    own = parse_hugging_face(Path("config.json"), BY_CLASS["vit"]).layers[0].seq_length
    for name, tokens in (("vit-l", 197), ("flux.1-dev", 4608), ("./model", own)):
        path = tmp_path / "run.sh"
        path.write_text(
            "torchrun --nproc_per_node 8 train.py --bf16 --per_device_train_batch_size 2 "
            f"--model_name_or_path {name}\n"
        )
        found = read_checked(str(path), world_size=8, gpu="h100-80gb")
        assert found.run is not None, found.findings
        assert found.run.seq_length == tokens
        assert any(str(tokens) in one.text for one in found.findings if one.kind == "read")
