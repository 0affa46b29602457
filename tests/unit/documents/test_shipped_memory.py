"""Shipped memory: complete, right by hand, free of the machine, and used by the planner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.documents import catalog
from autopar.documents.model import ModelMemory, read_model_memory, with_shipped_memory
from autopar.documents.sidecar import read_sidecar, sidecar_path
from autopar.documents.spec import load_spec, write_spec
from autopar.rates.model import activation_bytes, estimate_model
from autopar.records import replace
from autopar.run.model import (
    ModelProfile,
    ModelSpec,
    embedding_parameter_counts,
    padded_vocab_size,
    parameter_count,
)
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy, tensor_degrees, violations
from search.commands import search as cli
from search.request.options import SearchOptions
from search.request.request import InputSpec, load_inputs
from tests.shipped import PROFILED

NAMES = PROFILED
BOTH = pytest.mark.parametrize("sequence_parallel", [True, False])
EVERY = pytest.mark.parametrize("name", NAMES)


def shipped_file(name: str) -> Path:
    """Return the memory file of a model."""
    folder = catalog.find_configs(name)
    assert folder is not None
    (path,) = (p for p in folder.glob("memory_*.json") if not p.name.endswith(".meta.json"))
    return path


def shipped_memory(name: str, sequence_parallel: bool = True) -> ModelMemory:
    """Return what is in it."""
    return read_model_memory(
        shipped_file(name),
        spec=load_spec(name),
        sequence_parallel=sequence_parallel,
        precision="bf16",
    )


def planned(
    name: str, *, sequence_parallel: bool = True, precision: str = "bf16", **changes: tuple[int]
) -> tuple[ModelSpec, ModelProfile]:
    """Return what a search on a device card would plan with."""
    spec = load_spec(name, **changes)
    profile = estimate_model(
        spec, "a100", sequence_parallel=sequence_parallel, precision=precision, batches=(1,)
    )
    return spec, with_shipped_memory(profile, spec, name)


@EVERY
@BOTH
def test_layers_are_those_of_the_formulas(name: str, sequence_parallel: bool) -> None:
    """The counts of fused code, byte for byte, at every degree that the planner may choose."""
    spec = load_spec(name)
    memory = shipped_memory(name, sequence_parallel)

    assert not memory.estimated
    for kind, layer in enumerate(spec.layers):
        length = layer.seq_length
        (counted,) = memory.layers[kind].values()
        allowed = {t for t in tensor_degrees(layer) if length % t == 0 or not sequence_parallel}
        assert set(counted.activation_bytes_per_sample) == allowed
        for degree, kept in counted.activation_bytes_per_sample.items():
            formula = activation_bytes(
                layer,
                length,
                degree,
                sequence_parallel=sequence_parallel,
                kernels="fused",
                memory_seq_length=spec.layers[0].seq_length,
            )
            ranks = degree if sequence_parallel else 1
            visited, experts = layer.experts_per_token or 0, layer.num_experts or 1
            # visits that experts do not share evenly are counted as if they all had the most
            visits = length * visited // ranks
            places = -(-visits // experts) * experts
            uneven = formula * (places / visits - 1) if visits else 0.0
            assert kept == pytest.approx(formula, abs=0.01 + uneven)
        assert counted.parameter_count == pytest.approx(parameter_count(layer), abs=0.01)
        assert counted.checkpoint_bytes_per_sample == length * layer.hidden_size * 2


@EVERY
def test_embedding_and_head_have_their_states(name: str) -> None:
    """16 bytes per parameter, the vocabulary padded for its degree; tied tables once on one."""
    spec = load_spec(name)
    own = tuple(layer.seq_length for layer in spec.layers)
    memory = shipped_memory(name, sequence_parallel=False)

    for degree in (1, 2, 3, 8, 48, 64):
        vocab = padded_vocab_size(spec, degree)
        table = vocab * spec.layers[0].hidden_size
        in_front, behind = embedding_parameter_counts(spec, 0)
        split = table // degree
        both = split + in_front + behind + (0 if spec.tied_embeddings else split)
        expected = {"first": split + in_front, "last": split + behind, "only": both}
        states = {part: memory.other[part][own].model_state_bytes[degree] for part in expected}
        assert states == pytest.approx({k: 16 * v for k, v in expected.items()}, abs=0.01)


def test_figures_by_hand() -> None:
    """Bytes that one sample leaves in one layer, without the package's own formulas."""
    # GPT: S*h*(4 norm inputs and outputs + 3 qkv + 1 attention + 2*4 MLP) of 2 bytes, the
    # statistics of two LayerNorms (mean and rstd, fp32) and the log-sum-exp of every head
    for name, s, h, a in (
        ("gpt-6.7b", 2048, 4096, 32),
        ("gpt2-xl", 1024, 1600, 25),
        ("bert-large", 512, 1024, 16),
    ):
        assert activations(name)[0] == 32 * s * h + 16 * s + 4 * s * a

    # T5, S 512, h 1024, 32 heads of 128 (q is 4 h wide), MLP 16 h, RMSNorm: encoder, and decoder
    # with one more norm and attention
    s, h = 512, 1024
    norms, attention, mlp = (
        2 * 2 * 2 * s * h + 2 * 4 * s,
        4 * 2 * s * 4 * h + 4 * s * 32,
        64 * s * h,
    )
    assert activations("t5-3b") == [
        norms + attention + mlp,
        norms * 3 // 2 + 2 * attention + mlp,
    ]

    # Mixtral, S 32768, h 4096, 8 kv heads of 32, two of 8 experts of width 14336: four MLP buffers
    # of every visit, the tokens in the order of experts before and after them; of a visit what
    # the router chose (8), its weight in fp32 and bf16 (6), its places before and after (16)
    s, h, f = 32768, 4096, 14336
    norms = 2 * 2 * 2 * s * h + 2 * 4 * s
    attention = 2 * s * h * 2 + 2 * 2 * s * h // 4 + 4 * s * 32
    experts = 2 * (4 * 2 * s * f + 2 * 2 * s * h) + 2 * 30 * s
    assert activations("mixtral-8x7b") == [norms + attention + experts]
    per_expert = 3 * h * f
    (layer,) = shipped_memory("mixtral-8x7b").layers[0].values()
    assert layer.parameter_count == 8 * per_expert + 8 * h + 2 * h * h + 2 * h * h // 4 + 2 * h


def activations(name: str) -> list[float]:
    """Return the activations of whole layers, bytes."""
    tables = shipped_memory(name).layers
    return [next(iter(t.values())).activation_bytes_per_sample[1] for t in tables]


@EVERY
def test_sidecars_are_small_and_of_no_machine(name: str) -> None:
    """Versions and the model, no time, host, path or device; nothing is marked as estimated."""
    path = shipped_file(name)
    sidecar = read_sidecar(path, "memory")

    assert sidecar is not None
    assert sidecar.name == name
    assert not sidecar.estimated
    assert sidecar.source.startswith("counted exactly by")
    (run,) = sidecar.runs
    assert set(run.metadata) == {"torch", "dtype", "model", "unit", "tp_impl"}
    assert all(m.status == "ok" and m.elapsed_s == 0.0 for m in run.model_measurements)
    assert any(m.kind == "ulysses" for m in run.model_measurements) or name == "gpt2-xl"
    assert sidecar_path(path).stat().st_size + path.stat().st_size < 100_000


@EVERY
@pytest.mark.parametrize("share", [(1, 1), (1, 2), (3, 4)])
def test_every_cluster_finds_its_degrees(name: str, share: tuple[int, int]) -> None:
    """No strategy that is legal on 8, 24 or 64 GPUs lacks memory, at any length.

    Degrees that do not divide the model's own length were not counted.
    """
    lengths = tuple(x.seq_length * share[0] // share[1] for x in load_spec(name).layers)
    spec, profile = planned(name, seq_length=lengths)
    tables = [layer.memory[length] for layer, length in zip(profile.layers, lengths, strict=True)]
    others = [profile.other_memory[part][lengths] for part in ("only", "first", "last")]

    for world in (8, 24, 64):
        for t in (t for t in range(1, world + 1) if world % t == 0):
            if is_legal(spec, world, t, 1) and is_legal(load_spec(name), world, t, 1):
                assert all(t in memory.activation_bytes_per_sample for memory in tables)
            if is_legal(spec, world, 1, t):
                assert all(t in other.activation_bytes_per_sample for other in others)
                assert all(t in other.model_state_bytes for other in others)


def is_legal(spec: ModelSpec, world: int, tp: int, vtp: int) -> bool:
    """Return whether one stage may have these degrees."""
    plan = Plan(
        world_size=world,
        num_stages=1,
        stage_sizes=(spec.num_layers,),
        global_batch=world,
        num_microbatches=1,
        layers=(LayerStrategy(tp=tp),) * spec.num_layers,
        vocab=VocabStrategy(tp=vtp),
    )
    return not violations(plan, spec, sequence_parallel=True)


@pytest.mark.parametrize("share", [(1, 32), (1, 8), (1, 2), (2, 1), (8, 1)])
def test_other_lengths_are_scaled(share: tuple[int, int]) -> None:
    """Layers in proportion; a note says it; numbers of layers change nothing."""
    own = 4096
    length = own * share[0] // share[1]
    spec, profile = planned("llama2-7b", seq_length=(length,), num_layers=(5,))
    (counted,) = shipped_memory("llama2-7b").layers[0].values()
    memory = profile.layers[0].memory[length]

    assert spec.num_layers == 5
    assert memory.parameter_count == counted.parameter_count
    assert memory.activation_bytes_per_sample == {
        t: kept * share[0] / share[1] for t, kept in counted.activation_bytes_per_sample.items()
    }
    assert memory.ulysses_activation_bytes_per_sample == {
        t: kept * share[0] / share[1]
        for t, kept in counted.ulysses_activation_bytes_per_sample.items()
    }
    for scaled, own_bytes in (
        (memory.backward_bytes_per_sample, counted.backward_bytes_per_sample),
        (memory.ulysses_backward_bytes_per_sample, counted.ulysses_backward_bytes_per_sample),
    ):
        assert 2 in scaled
        assert scaled == {t: need * share[0] / share[1] for t, need in own_bytes.items()}
    assert memory.checkpoint_bytes_per_sample == length * 4096 * 2
    (note,) = (n for n in profile.notes if n.startswith("scaled: "))
    assert f"linearly from sequence length 4096 to {length}, which is exact" in note
    assert profile.logits_peak_bytes_per_sample == 0.0  # the counted tables contain the peak


def test_embedding_and_head_lie_between_counted_lengths() -> None:
    """On the line between two counted lengths, and in proportion beyond the longest."""
    table = shipped_memory("gpt2-xl").other["only"]
    low, high = (table[(s,)].activation_bytes_per_sample for s in (256, 768))

    def at(length: int) -> dict[int, float]:
        _, profile = planned("gpt2-xl", seq_length=(length,))
        return dict(profile.other_memory["only"][(length,)].activation_bytes_per_sample)

    for t in (1, 2, 8, 64):
        assert at(256)[t] == pytest.approx(low[t])
        assert at(512)[t] == pytest.approx((low[t] + high[t]) / 2)
    assert at(4096)[8] == 4 * table[(1024,)].activation_bytes_per_sample[8]
    assert at(384)[3] == pytest.approx(high[3] / 2)  # 3 divides one counted length alone
    assert 0.0 < at(16)[1] < at(64)[1] == table[(64,)].activation_bytes_per_sample[1]


@BOTH
def test_the_planner_takes_the_shipped_memory(sequence_parallel: bool) -> None:
    """Of a card and of the shipped set alike; sources say what is estimated and what is not."""
    options = SearchOptions(sequence_parallel=sequence_parallel, time_profile_mode="batch")
    named = InputSpec(model="llama2-7b", hardware="h100:2x8")
    for inputs in (named, InputSpec()):
        _, profile, _ = load_inputs(inputs, options)
        counted = shipped_memory("llama2-7b", sequence_parallel).layers[0]
        kept = profile.layers[0].memory[4096].activation_bytes_per_sample
        marks = {s.role: s.estimated for s in profile.sources}

        assert kept == counted[4096].activation_bytes_per_sample
        assert profile.estimated
        assert marks["memory"] is marks["memory sidecar"] is False
        assert marks["computation" if inputs == InputSpec() else "model spec"]
        assert [n for n in profile.notes if not n.startswith("estimated: ")] == []


def test_half_precisions_share_a_file() -> None:
    """Both have 2 bytes per element."""
    half, brain = (
        planned("gpt2-xl", precision=precision)[1].layers[0].memory
        for precision in ("fp16", "bf16")
    )

    assert half == brain


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"vocab_size": 64000}, "the shipped file is of vocab_size 32000, not 64000"),
        ({"hidden_size": (2048,)}, "the shipped file is of hidden_size 4096, not 2048"),
        ({"num_heads": 16}, "the shipped file is of num_heads 32, not 16"),
        ({"make_vocab_size_divisible_by": 64}, "make_vocab_size_divisible_by 128, not 64"),
        ({"precision": "fp32"}, "the shipped file is of bf16, not fp32"),
    ],
)
def test_other_models_keep_the_estimate(changes: dict[str, object], why: str) -> None:
    """Where an option changes what memory depends on, and then it is said."""
    precision = str(changes.pop("precision", "bf16"))
    inputs = InputSpec(model="llama2-7b", hardware="a100:1x8", **changes)  # type: ignore[arg-type]
    options = SearchOptions(time_profile_mode="batch", mixed_precision=precision)  # type: ignore[arg-type]
    spec, profile, _ = load_inputs(inputs, options)

    assert profile.layers == estimate_model(spec, "a100", precision=precision).layers
    assert profile.logits_peak_bytes_per_sample > 0.0
    assert not any(source.role == "memory" for source in profile.sources)
    (note,) = (n for n in profile.notes if n.startswith("memory is estimated: "))
    assert why in note


def test_lengths_out_of_proportion_keep_the_estimate() -> None:
    """A decoder reads the encoder's tokens too, which one counted pair cannot take apart."""
    _, profile = planned("t5-3b", seq_length=(512, 128))

    assert "sequence lengths 512, 512, and 512, 128 are not proportional" in profile.notes[-1]
    assert not any(source.role == "memory" for source in profile.sources)

    spec, profile = planned("t5-3b", seq_length=(256, 256))
    for kind, table in enumerate(shipped_memory("t5-3b").layers):
        whole = table[512].activation_bytes_per_sample[4]
        assert profile.layers[kind].memory[256].activation_bytes_per_sample[4] == whole / 2
    assert spec.layers[0].seq_length == 256


def test_a_model_of_ones_own_is_estimated(tmp_path: Path) -> None:
    """Also if it has the name of a shipped one; one with its blocks has its bytes, by any name."""
    mine = tmp_path / "model.json"
    write_spec(replace(load_spec("llama2-7b"), vocab_size=50000), mine)
    options = SearchOptions(time_profile_mode="batch")

    _, profile, _ = load_inputs(InputSpec(model=str(mine), hardware="a100:1x8"), options)
    assert profile.notes[-1] == "memory is estimated: llama2-7b is not a shipped model"

    own = replace(load_spec("llama2-7b"), name="mine", rotary_base=5e5)
    write_spec(own, mine)
    for path in (mine, catalog.find_model("llama2-7b")):
        _, profile, _ = load_inputs(InputSpec(model=str(path), hardware="a100:1x8"), options)
        assert any(source.role == "memory" for source in profile.sources)


CARD = catalog.find_card("a100")


def test_a_model_without_a_file_is_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a model is before its memory is counted."""
    (tmp_path / "models" / "new").mkdir(parents=True)
    write_spec(
        replace(load_spec("llama2-7b"), name="new"), tmp_path / "models" / "new" / "model.json"
    )
    monkeypatch.setattr(catalog, "_ROOTS", (tmp_path, *catalog._ROOTS))
    spec = load_spec("new")

    profile = with_shipped_memory(estimate_model(spec, str(CARD), batches=(1,)), spec, "new")

    assert profile.notes[-1] == "memory is estimated: no counted memory of new is shipped"


def test_the_report_says_what_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the title and in the list of inputs; of a changed model the notes say it is not."""
    common = ["--hardware", "a100:1x8", "--model", "gpt2-xl", "--engine", "none"]
    common += ["--verbose", "--output-config-path"]

    assert cli.run([*common, str(tmp_path / "plan.json"), "--seq-length", "512"]) == 0
    text = capsys.readouterr().out
    assert "memory counted exactly" in text
    assert "scaled: memory of layers linearly from sequence length 1024 to 512" in text
    plan = json.loads((tmp_path / "autopar_plan_plan.json").read_text(encoding="utf-8"))
    assert "estimated: times of gpt2-xl" in plan["notes"]
    estimated = {source["role"]: source["estimated"] for source in plan["inputs"]}
    assert estimated["memory"] is False
    assert estimated["model spec"] is True

    assert cli.run([*common, "none", "--vocab-size", "60000"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "counted exactly" not in text
    assert "memory is estimated: the shipped file is of vocab_size 50257, not 60000" in text
