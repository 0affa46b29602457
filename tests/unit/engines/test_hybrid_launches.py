"""Hybrid models of Megatron-LM: the pattern of their layers, read, priced, refused and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from autopar.errors import InputError
from autopar.price.account import account_of
from autopar.price.activations import saved_parts
from autopar.price.oom_risk import MIXER_RATIOS
from autopar.price.parameters import stage_weights
from autopar.records import replace
from autopar.run.architecture import Experts, Mlp
from autopar.run.rules import RuleError
from autopar.run.run import Run
from search.engines.arguments import UnpricedError, words_of
from search.engines.exporter_types import ExportTarget
from search.engines.megatron.arguments import LayoutError
from search.engines.megatron.read import read_run
from search.engines.megatron.rules import SPACE, broken_rules, violated_rules
from search.engines.megatron.setting import Setting
from search.engines.megatron.stages import LayerPattern, parse_pattern
from search.engines.megatron.write import write
from search.engines.text import flags_of, script_command
from tests.often import often

SMALL: dict[str, Any] = {
    "--hybrid-layer-pattern": "M-M*-E",
    "--hidden-size": 512,
    "--num-attention-heads": 8,
    "--seq-length": 1024,
    "--max-position-embeddings": 1024,
    "--micro-batch-size": 2,
    "--global-batch-size": 32,
    "--vocab-size": 50257,
    "--num-experts": 8,
    "--moe-grouped-gemm": True,
    "--moe-token-dispatcher-type": "alltoall",
    "--mamba-num-heads": 16,
    "--bf16": True,
}
PATTERN = "--hybrid-layer-pattern"


def read(arguments: dict[str, Any] | None = None, **options: Any) -> Run:
    """Return the run of the small hybrid with more arguments."""
    return read_run(SMALL | (arguments or {}), **({"world_size": 8} | options)).run


def letters(run: Run) -> list[tuple[int, str | None]]:
    """Return (number of mixers, class of the MLP) of every layer."""
    return [
        (len(one.mixers), None if one.mlp is None else type(one.mlp).__name__)
        for one in run.model.each_layer
    ]


# --------------------------------------------------------------------------------------------------
# The language


segments = st.text("MG*-E", max_size=6)
patterns = st.builds(
    LayerPattern,
    st.lists(segments, min_size=1, max_size=5).filter(any).map(tuple),
    st.text("MG*-E", min_size=1, max_size=3),
    st.integers(0, 3),
).map(lambda one: one if one.depths else LayerPattern(one.segments))


@often(300, 10_000, patterns)
def test_a_pattern_is_read_as_it_was_written(pattern: LayerPattern) -> None:
    """Letters, chunks and MTP; the inverse too."""
    assert parse_pattern(str(pattern)) == pattern


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("M-x", "unknown letter 'x'"),
        ("M-/M|M", "unknown letter '|'"),
        ("M*-/M/MM", "differ: M and MM"),
        ("*-+-", "both attention"),
        ("||", "no layers"),
    ],
)
def test_a_wrong_pattern_says_why(text: str, problem: str) -> None:
    """As `parse_hybrid_pattern` raises for them."""
    with pytest.raises(LayoutError, match=problem.replace("|", r"\|").replace("+", r"\+")):
        parse_pattern(text)


# --------------------------------------------------------------------------------------------------
# What is read


def test_every_letter_is_a_layer_of_one_part() -> None:
    """With one norm; sizes of mixers are those of the arguments."""
    run = read()
    assert letters(run) == [
        (1, None), (0, "Mlp"), (1, None), (1, None), (0, "Mlp"), (0, "Experts"),
    ]  # fmt: skip
    assert {one.norms for one in run.model.each_layer} == {1}
    mamba = run.model.first_mamba
    assert mamba is not None
    assert (mamba.heads, mamba.width, mamba.state, mamba.groups) == (16, 64, 128, 8)
    assert mamba.projected == 2 * 1024 + 2 * 8 * 128 + 16


def test_segments_are_chunks_of_stages() -> None:
    """Segment i is chunk i // pp of stage i % pp; an even split without |, as before."""
    run = read({PATTERN: "M-|M*|-E|MM", "--pipeline-model-parallel-size": 2})
    layers = [[chunk.layers for chunk in stage] for stage in run.strategy.stages]
    assert layers == [[(0, 1), (4, 5)], [(2, 3), (6, 7)]]
    plain = read({"--pipeline-model-parallel-size": 2})
    assert [[chunk.layers for chunk in stage] for stage in plain.strategy.stages] == [
        [(0, 1, 2)], [(3, 4, 5)],
    ]  # fmt: skip
    with pytest.raises(InputError, match="3 segments, no multiple of the 2 stages"):
        read({PATTERN: "M|-|*", "--pipeline-model-parallel-size": 2})


def test_mtp_is_a_part_of_the_pattern() -> None:
    """Its depth counts, not `--mtp-num-layers`; the old argument is joined to the pattern."""
    rope = {"--position-embedding-type": "rope"}
    run = read({PATTERN: "M-M*E/*E/*E", "--mtp-num-layers": 1, **rope})
    assert run.model.mtp == 2
    assert [len(one.mixers) for one in run.model.each_mtp] == [1, 0]
    old = {"--hybrid-override-pattern": "M-M*E", "--mtp-hybrid-override-pattern": "*E"}
    plain = {key: value for key, value in SMALL.items() if key != PATTERN}
    other = read_run({**plain, **old, "--mtp-num-layers": 2, **rope}, world_size=8).run
    assert other.model == run.model


def test_windows_of_a_hybrid_count_letters() -> None:
    """Every n-th letter has full attention, as `is_layer_window_attention` counts layers."""
    run = read({PATTERN: "**M*", "--window-size": "128,0", "--window-attn-skip-freq": 4})
    windows = [one.attention.window for one in run.model.each_layer if one.attention]
    assert windows == [129, 129, None]


# --------------------------------------------------------------------------------------------------
# GPT models


def gpt(pattern: str, **more: Any) -> tuple[Run, Run]:
    """Return the run of a pattern of pairs and that of the GPT launch with the same layers."""
    own = {key: value for key, value in SMALL.items() if key not in (PATTERN, "--mamba-num-heads")}
    shared = {**own, "--position-embedding-type": "rope", **more}
    flat = pattern.split("/")[0].replace("|", "")
    frequency = [int(letter == "E") for letter in flat[1::2]]
    arguments = {"--num-layers": len(flat) // 2, "--moe-layer-freq": str(frequency)}
    if "G" in flat:
        linear = [int(letter == "G") for letter in flat[::2]]
        arguments["--experimental-attention-variant"] = "gdn"
        arguments["--linear-attention-freq"] = str(linear)
    depths = pattern.count("/")
    if depths:
        arguments["--mtp-num-layers"] = depths
    if "|" in pattern:
        parts = pattern.split("/")[0].split("|")
        layout = ["t" * (len(part) // 2) for part in parts]
        layout[0], layout[-1] = "E" + layout[0], layout[-1] + "m" * depths + "L"
        arguments["--pipeline-model-parallel-layout"] = "|".join(layout)
    first = read_run({**shared, PATTERN: pattern}, world_size=8, source="x").run
    return first, read_run({**shared, **arguments}, world_size=8, source="x").run


pairs = st.lists(st.sampled_from(["*-", "*E", "G-", "GE"]), min_size=4, max_size=8)


@often(30, 500, pairs, st.sampled_from([1, 2]), st.integers(0, 2))
def test_a_gpt_launch_and_its_pattern_are_one_run(each: list[str], pp: int, depths: int) -> None:
    """Layers, chunks and MTP, so that memory and time are equal."""
    half = len(each) // 2
    main = "".join(each) if pp == 1 else "|".join(("".join(each[:half]), "".join(each[half:])))
    pattern = "/".join((main, *[each[-1]] * depths))
    own, other = gpt(pattern, **{"--pipeline-model-parallel-size": pp})
    assert own == other
    assert account_of(own) == account_of(other)


def test_units_of_full_recomputation_are_letters() -> None:
    """Two letters are one layer of a GPT model; an odd number cuts such layers in two."""
    full = {"--recompute-granularity": "full", "--recompute-method": "uniform"}
    own, other = gpt("*-*-*-*-", **full, **{"--recompute-num-layers": 2})
    assert own.split.recompute_unit == 1
    assert own.model == other.model
    single, _ = gpt("*-*-*-*-", **full, **{"--recompute-num-layers": 1})
    assert single.model.is_hybrid
    assert single.model.num_layers == 8


# --------------------------------------------------------------------------------------------------
# Memory


GOLDEN: dict[str, Any] = {
    "--hidden-size": 1024,
    "--num-attention-heads": 16,
    "--group-query-attention": True,
    "--num-query-groups": 8,
    PATTERN: "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-",
    "--micro-batch-size": 4,
    "--global-batch-size": 32,
    "--seq-length": 1024,
    "--max-position-embeddings": 1024,
    "--vocab-size": 50257,
    "--use-distributed-optimizer": True,
    "--overlap-grad-reduce": True,
    "--overlap-param-gather": True,
    "--no-gradient-accumulation-fusion": True,
    "--bf16": True,
    "--attention-backend": "unfused",
}
_FOUR = "M-M-M-M*-M-|M-M-M*-M-M-|M-M*-M-M-M-|M*-M-M-M-M-"


@pytest.mark.parametrize(
    ("more", "states", "peak"),
    [
        ({}, 3_117_479_936, 10_145_497_088),
        ({"--tensor-model-parallel-size": 2}, 1_917_382_656, 5_907_976_192),
        ({"--tensor-model-parallel-size": 2, "--context-parallel-size": 4,
          "--attention-backend": "fused"},
         1_917_252_608, 2_743_789_056),
        ({PATTERN: _FOUR, "--pipeline-model-parallel-size": 2}, 2_178_641_920, 7_744_709_120),
    ],
)  # fmt: skip
def test_memory_is_that_of_measured_runs(more: dict[str, Any], states: int, peak: int) -> None:
    """On 8 H100; NVIDIA/Megatron-LM d98e8a64, functional tests hybrid_mr_mcore_te."""
    run = read_run(
        GOLDEN | more, world_size=8, environment={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    ).run
    found = account_of(run)
    assert found.states_bytes == pytest.approx(states, rel=0.005)
    assert found.peak_bytes == pytest.approx(peak, rel=0.005)


NANO: dict[str, Any] = {
    PATTERN: "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "--hidden-size": 2688, "--ffn-hidden-size": 1856, "--num-attention-heads": 32,
    "--group-query-attention": True, "--num-query-groups": 2, "--kv-channels": 128,
    "--mamba-num-heads": 64, "--num-experts": 128, "--moe-router-topk": 6,
    "--moe-ffn-hidden-size": 1856, "--moe-shared-expert-intermediate-size": 3712,
    "--moe-token-dispatcher-type": "flex", "--moe-grouped-gemm": True,
    "--moe-permute-fusion": True, "--moe-router-dtype": "fp32", "--squared-relu": True,
    "--use-fused-weighted-squared-relu": True, "--moe-router-force-load-balancing": True,
    "--position-embedding-type": "none", "--normalization": "RMSNorm",
    "--disable-bias-linear": True, "--untie-embeddings-and-output-weights": True,
    "--hidden-dropout": 0, "--attention-dropout": 0, "--vocab-size": 131072,
    "--seq-length": 8192, "--max-position-embeddings": 8192, "--micro-batch-size": 1,
    "--global-batch-size": 16, "--expert-model-parallel-size": 8,
    "--expert-tensor-parallel-size": 1, "--use-distributed-optimizer": True,
    "--overlap-grad-reduce": True, "--overlap-param-gather": True, "--bf16": True,
    "--grad-reduce-in-bf16": True, "--cross-entropy-loss-fusion": True,
    "--cross-entropy-fusion-impl": "te", "--no-create-attention-mask-in-dataloader": True,
}  # fmt: skip
"""Nemotron 3 Nano in Megatron-Bridge's recipe for 16 H100."""


def nano_bytes(modules: str, *, first: bool = False) -> int:
    """Return the peak of Nemotron 3 Nano with recomputed modules, on 16 H100.

    first : True for the first step, in which the optimizer has no moments yet.
    """
    again = {"--recompute-granularity": "selective", "--recompute-modules": modules}
    run = read_run(
        NANO | (again if modules else {}),
        world_size=16,
        environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    ).run
    found = account_of(run)
    moments = sum(one.num_bytes for one in found.states if one.name == "Adam moments")
    return found.peak_bytes - first * moments


@pytest.mark.parametrize(
    ("modules", "first", "measured_gb"),
    [
        ("", True, 66.297),
        ("moe_act", True, 62.103),
        ("moe", False, 64.653),
        ("moe layernorm", False, 63.639),
    ],
)
def test_memory_of_a_mixture_is_that_of_a_card(
    modules: str, first: bool, measured_gb: float
) -> None:
    """Megatron-Bridge 067f987, skills/nemo-mbridge-perf-activation-recompute/card.yaml."""
    assert nano_bytes(modules, first=first) == pytest.approx(measured_gb * 1e9, rel=0.02)


def test_recomputed_modules_save_what_was_measured() -> None:
    """4.194 GB by moe_act; 1.014 GB by layernorm, which only norms of experts have here."""
    assert nano_bytes("") - nano_bytes("moe_act") == pytest.approx(4.194e9, rel=0.005)
    saved = nano_bytes("moe") - nano_bytes("moe layernorm")
    assert saved == pytest.approx(1.014e9, rel=0.005)


def test_fp32_weights_of_a_mixer_have_no_other_copy() -> None:
    """Decay and skip of every head: 8 bytes beside the moments, which ranks share."""
    run = read({PATTERN: "M" * 8, "--num-experts": 0, "--use-distributed-optimizer": True})
    few = read({PATTERN: "M" * 7, "--num-experts": 0, "--use-distributed-optimizer": True})
    masters = [
        sum(one.num_bytes for one in account_of(one_run).states if one.name == "fp32 weights")
        for one_run in (run, few)
    ]
    mamba = run.model.first_mamba
    assert mamba is not None
    weights = 512 * mamba.projected + 5 * mamba.convolved + mamba.inner * 513 + mamba.heads
    assert masters[0] - masters[1] == pytest.approx(4 * (weights + 2 * 512) / 8, rel=0.001)


# --------------------------------------------------------------------------------------------------
# Gated delta nets


NEXT: dict[str, Any] = {
    "--num-layers": 48, "--hidden-size": 2048, "--ffn-hidden-size": 5120,
    "--num-attention-heads": 16, "--kv-channels": 256, "--group-query-attention": True,
    "--num-query-groups": 2, "--qk-layernorm": True, "--attention-output-gate": True,
    "--experimental-attention-variant": "gated_delta_net", "--linear-attention-freq": 4,
    "--position-embedding-type": "rope", "--normalization": "RMSNorm", "--swiglu": True,
    "--disable-bias-linear": True, "--untie-embeddings-and-output-weights": True,
    "--num-experts": 512, "--moe-router-topk": 10, "--moe-ffn-hidden-size": 512,
    "--moe-shared-expert-intermediate-size": 512, "--moe-grouped-gemm": True,
    "--moe-token-dispatcher-type": "alltoall", "--vocab-size": 151936,
    "--seq-length": 4096, "--max-position-embeddings": 4096, "--micro-batch-size": 1,
    "--global-batch-size": 256, "--expert-model-parallel-size": 8, "--bf16": True,
    "--use-distributed-optimizer": True, "--hidden-dropout": 0, "--attention-dropout": 0,
}  # fmt: skip
"""Qwen3-Next-80B-A3B without MTP."""


def test_weights_of_gated_delta_nets_are_those_of_the_model() -> None:
    """All of the checkpoint without MTP, but for the vector that gates the shared expert.

    Megatron-LM has that vector only with a further argument.
    """
    run = read_run({**NEXT, "--expert-model-parallel-size": 1}, world_size=8).run
    found = sum(one.elements for one in stage_weights(run, 0)[0])
    assert found == 79_674_391_296 - 48 * 2048
    assert [one.recurrent is not None for one in run.model.each_layer] == [
        True,
        True,
        True,
        False,
    ] * 12


def test_a_gated_delta_net_saves_its_projection_and_copies() -> None:
    """Counted by hand, in elements of 2 bytes per token.

    Projection, normed and repeated keys, values, chunk matrices, output, gate, and the normed
    output before and after the gate.
    """
    run = read_run(NEXT, world_size=8).run
    parts = dict(saved_parts(run.rank_layers[0]))
    tokens, inner = 4096, 32 * 128
    assert parts["mixer projection"] == 2 * tokens * (2 * 2048 + 2 * inner + 64)
    assert parts["normed keys"] == 2 * tokens * 2 * 2048
    assert parts["repeated keys"] == 2 * tokens * 2 * inner
    assert parts["chunk matrices"] == 2 * tokens * 32 * 64
    for name in ("values", "delta output", "output gate", "normed output", "mixer output"):
        assert parts[name] == 2 * tokens * inner
    again = {"--recompute-granularity": "selective", "--recompute-modules": "gdn_norm_out"}
    less = account_of(read_run({**NEXT, **again}, world_size=8).run)
    kept = account_of(run).peak_bytes - less.peak_bytes
    assert kept == pytest.approx(36 * 2 * 2 * tokens * inner, rel=0.01)


def test_a_gate_of_attention_doubles_its_queries() -> None:
    """In weights; the gate is copied out of the projected input and the output is saved twice."""
    run = read_run(NEXT, world_size=8).run
    plain = read_run(
        {key: value for key, value in NEXT.items() if "gate" not in key}, world_size=8
    ).run
    more = sum(one.elements for one in stage_weights(run, 0)[0])
    assert more - sum(one.elements for one in stage_weights(plain, 0)[0]) == 12 * 2048 * 4096
    parts, others = (dict(saved_parts(one.rank_layers[3])) for one in (run, plain))
    assert parts["qkv"] - others["qkv"] == parts["output gate"] == 2 * 4096 * 4096


@pytest.mark.parametrize("loss", ["native", "te"])
def test_memory_with_gated_delta_nets_is_in_its_interval(loss: str) -> None:
    """186.96 GB of Qwen3.8 27B on 16 GB200; Megatron-Bridge 067f987, its verification card.

    The card does not name the loss. The vision tower, which it has, is not counted.
    """
    sizes = {
        "--num-layers": 64, "--hidden-size": 5120, "--ffn-hidden-size": 17408,
        "--num-attention-heads": 24, "--num-query-groups": 4, "--linear-num-value-heads": 48,
        "--vocab-size": 248320, "--micro-batch-size": 2, "--global-batch-size": 32,
        "--tensor-model-parallel-size": 2, "--grad-reduce-in-bf16": True,
        "--cross-entropy-loss-fusion": True, "--cross-entropy-fusion-impl": loss,
    }  # fmt: skip
    dense = {key: one for key, one in NEXT.items() if "moe" not in key and "expert" not in key}
    run = read_run({**dense, **sizes}, world_size=16, gpu="GB200").run
    low, high = MIXER_RATIOS["other mixers"]
    assert low < 186_959_926_394 / account_of(run).peak_bytes < high


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"--tensor-model-parallel-size": 32, "--sequence-parallel": True}, "delta-keys.tensor"),
        ({"--linear-num-value-heads": 24}, "delta-values.keys"),
        ({"--tensor-model-parallel-size": 4, "--sequence-parallel": True,
          "--context-parallel-size": 8}, "delta-keys.context"),
    ],
)  # fmt: skip
def test_heads_of_a_gated_delta_net_are_divided(arguments: dict[str, Any], rule: str) -> None:
    """Assertions of `TransformerConfig` (d98e8a64)."""
    with pytest.raises(RuleError) as caught:
        read_run({**NEXT, **arguments}, world_size=256)
    assert rule in caught.value.ids


def test_gated_delta_nets_are_written_as_they_are_read() -> None:
    """With the period of attention, for the program of GPT models."""
    run = read_run({**NEXT, "--rotary-base": 10000}, world_size=8).run
    draft = write(run, ExportTarget(num_nodes=1, gpus_per_node=8))
    assert "pretrain_gpt.py" in draft.launch
    flags = flags_of(script_command(draft.files["megatron_args.sh"], "x").arguments)
    assert flags["linear-attention-freq"] == ("4",)
    arguments = {
        f"--{flag}": True if not words else words[0] if len(words) == 1 else [*words]
        for flag, words in flags.items()
    }
    again = read_run(arguments, world_size=8, source=run.name).run
    assert replace(again, steps=run.steps) == run


def test_a_missing_period_and_a_wrong_list_are_refused() -> None:
    """With the argument."""
    with pytest.raises(InputError, match="linear-attention-freq"):
        read_run({key: one for key, one in NEXT.items() if "freq" not in key}, world_size=8)
    with pytest.raises(InputError, match="expected 48 entries of 0 and 1, got 2"):
        read_run({**NEXT, "--linear-attention-freq": "[1,0]"}, world_size=8)


# --------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"--tensor-model-parallel-size": 16}, "mixer-groups.tensor"),
        ({"--mamba-num-groups": 1, "--tensor-model-parallel-size": 2}, "mixer-groups.tensor"),
        ({"--mamba-num-groups": 5}, "mixer-groups.heads"),
        ({"--mamba-num-heads": 4, "--mamba-num-groups": 4, "--context-parallel-size": 8},
         "mixer-heads.context"),
        ({"--mamba-num-heads": 24, "--mamba-num-groups": 3, "--context-parallel-size": 2},
         "mixer-groups.context"),
    ],
)  # fmt: skip
def test_sizes_of_a_mixer_are_divided(arguments: dict[str, Any], rule: str) -> None:
    """Assertions of `MambaMixer` and of `MambaContextParallel`."""
    with pytest.raises(RuleError) as caught:
        read({PATTERN: "M-M-", "--num-experts": 0, "--seq-length": 4096, **arguments},
             world_size=16)  # fmt: skip
    assert rule in caught.value.ids


def test_fp8_needs_a_projection_of_whole_blocks() -> None:
    """A launch file and a search have the same rule."""
    odd = {"--mamba-num-heads": 15, "--mamba-num-groups": 5, "--fp8-format": "hybrid"}
    arguments = {**SMALL, **odd, PATTERN: "M-M*", "--num-experts": 0}
    run = read_run(arguments, world_size=8).run
    setting = Setting(words_of(arguments), 8, "H100")
    assert "mixer.fp8" in [one.id for one in broken_rules(setting, (), run)]
    assert "mixer.fp8" in [one.id for one in SPACE]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"--experimental-attention-variant": "gdn2", PATTERN: "G-G*"}, "is not priced"),
        ({PATTERN: "D-", "--kv-lora-rank": 64}, "dsa-kernel-backend"),
        ({PATTERN: "G-G*", "--deterministic-mode": True}, "loop over chunks"),
        ({"--mtp-num-layers": 1}, "has no part in --hybrid-layer-pattern"),
        ({"--disable-mamba-mem-eff-path": True}, "saves other tensors"),
        ({"--spec": "[my.module spec]"}, "names unknown layers"),
    ],
)
def test_what_has_no_formula_is_refused(arguments: dict[str, Any], problem: str) -> None:
    """With the argument and the layer, never priced as another."""
    with pytest.raises(UnpricedError, match=problem):
        read(arguments)


@pytest.mark.parametrize(
    ("flag", "rule"),
    [
        ("num-virtual-stages-per-pipeline-rank", "pattern.excludes.num-virtual-stages"),
        ("pipeline-model-parallel-layout", "pattern.excludes.pipeline-model-parallel-layout"),
        ("decoder-first-pipeline-num-layers", "pattern.placed"),
        ("hybrid-override-pattern", "excludes.hybrid-override-pattern"),
    ],
)
def test_a_pattern_excludes_other_partitions(flag: str, rule: str) -> None:
    """As `validate_args` asserts (d98e8a64)."""
    words = {"hybrid-layer-pattern": ("M-|M*",), flag: ("2",), "num-layers": ("4",)}
    found = violated_rules({**words, "pipeline-model-parallel-size": ("2",)}, world_size=8)
    assert any(rule in one.id for one in found), [one.id for one in found]


# --------------------------------------------------------------------------------------------------
# What is written


hybrids = st.lists(st.text("MG*-E", min_size=1, max_size=5), min_size=2, max_size=4).map("|".join)


@often(
    30,
    500,
    hybrids.filter(lambda text: "M" in text and "*" in text and text[0] != "-"),
    st.integers(0, 1),
)
def test_a_hybrid_is_written_as_it_is_read(pattern: str, depths: int) -> None:
    """The script and its program; equality of the run that it describes."""
    chunks = pattern.count("|") + 1
    text = pattern + "/*E" * depths
    rope = {"--position-embedding-type": "rope", "--rotary-base": 10000}
    run = read({PATTERN: text, "--pipeline-model-parallel-size": chunks, **rope},
               world_size=chunks * 2)  # fmt: skip
    draft = write(run, ExportTarget(num_nodes=1, gpus_per_node=chunks * 2))
    assert "pretrain_hybrid.py" in draft.launch
    flags = flags_of(script_command(draft.files["megatron_args.sh"], "x").arguments)
    assert flags["hybrid-layer-pattern"] == (text,)
    arguments = {
        f"--{flag}": True if not words else words[0] if len(words) == 1 else [*words]
        for flag, words in flags.items()
    }
    again = read_run(arguments, world_size=chunks * 2, source=run.name).run
    assert replace(again, steps=run.steps) == run


def test_experts_of_latent_width_are_written(tmp_path: Path) -> None:
    """`--moe-latent-size`, whose projections every tensor rank has."""
    run = read({"--moe-latent-size": 128})
    experts = run.model.experts
    assert isinstance(experts, Experts)
    assert experts.latent == 128
    draft = write(run, ExportTarget(num_nodes=1, gpus_per_node=8))
    assert "--moe-latent-size 128" in draft.files["megatron_args.sh"]
    wide = read()
    assert isinstance(wide.model.each_layer[1].mlp, Mlp)
    assert account_of(run).states_bytes < account_of(wide).states_bytes
