"""Memory of fine-tuning launches against counts by hand: weights, optimizers, loss, FSDP units.

The model is Llama 2 7B: hidden size 4,096, 32 layers, MLP of 11,008, vocabulary of 32,000.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from autopar.price.account import account_of
from autopar.price.job import job_of_run
from autopar.price.oom_risk import CONTEXT_BYTES, oom_probability_at, reserved_interval
from autopar.price.sharded_peak import live_points
from autopar.price.states import units_of
from autopar.price.torch_layers import layer_saved_bytes, loss_bytes
from autopar.records import replace
from autopar.run.run import Run
from search.engines.candidate import TrainingSettings, with_training
from search.engines.deepspeed.write import configuration
from search.engines.reader import CheckedFile
from search.engines.table import read_checked

H, F, V, LAYERS = 4096, 11008, 32000, 32
MATRICES = 4 * H * H + 3 * H * F
VECTORS = LAYERS * 2 * H + H
P = LAYERS * MATRICES + 2 * V * H + VECTORS
RANK, SEQ = 16, 2048
LORA = f"--use_peft True --lora_r {RANK} --lora_target_modules q_proj --lora_dropout 0"
WORDS = (
    "--model_name_or_path meta-llama/Llama-2-7b-hf --max_length 2048 "
    "--per_device_train_batch_size 2 --gradient_checkpointing True --output_dir out "
)
ONE = {"distributed_type": "NO", "num_processes": 1, "mixed_precision": "bf16"}
REPLICAS = {"distributed_type": "MULTI_GPU", "num_processes": 8, "mixed_precision": "bf16"}
SHARDS: dict[str, Any] = {
    "distributed_type": "FSDP",
    "num_processes": 8,
    "mixed_precision": "bf16",
    "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
}
FSDP1 = {**SHARDS, "fsdp_config": {**SHARDS["fsdp_config"], "fsdp_version": 1}}
UNMIXED = {"mixed_precision": "no"}
Read = Callable[..., CheckedFile]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Return a function that checks a script with an accelerate configuration."""

    def read(
        words: str, document: Mapping[str, Any] = ONE, program: str = "train.py"
    ) -> CheckedFile:
        (tmp_path / "a.yaml").write_text(json.dumps(document), encoding="utf-8")
        if not any(name in words for name in ("dtype", "bf16", "lora", "load_in")):
            words += " --dtype float32"
        text = f"accelerate launch --config_file a.yaml {program} {WORDS} {words}"
        path = tmp_path / "run.sh"
        path.write_text(text, encoding="utf-8")
        return read_checked(str(path), world_size=None, gpu="h100-80gb")

    return read


def _run(file: CheckedFile) -> Run:
    assert file.run is not None, file.findings
    assert not file.withdrawn, file.findings
    return file.run


def _states(run: Run) -> dict[str, int]:
    """Return the bytes of states at a step by name, with gradients."""
    found = {part.name: part.num_bytes for part in [*live_points(run, 0)][-1].parts}
    return {name: found.get(name, 0) for name in ("weights", "gradients", "Adam moments")}


# --------------------------------------------------------------------------------------------------
# Types of weights.


@pytest.mark.parametrize(
    ("words", "document", "each", "ranks"),
    [
        ("", ONE, (4, 4, 8), 1),
        ("--dtype float32", ONE, (4, 4, 8), 1),
        ("--dtype bfloat16", ONE, (2, 2, 4), 1),
        ("--torch_dtype auto", REPLICAS, (2, 2, 4), 1),
        ("--pure_bf16 True", REPLICAS, (2, 2, 4), 1),
        # moments of bitsandbytes are in fp32
        ("--dtype bfloat16 --optim lion_32bit", ONE, (2, 2, 4), 1),
        # FSDP casts to fp32 with mixed precision alone
        ("--dtype bfloat16", SHARDS, (4, 4, 8), 8),
        ("--dtype bfloat16", {**SHARDS, **UNMIXED}, (2, 2, 4), 8),
        ("--dtype bfloat16", {**FSDP1, **UNMIXED}, (2, 2, 4), 8),
    ],
)
def test_weights_are_trained_in_their_type(
    read: Read, words: str, document: Mapping[str, Any], each: tuple[int, ...], ranks: int
) -> None:
    run = _run(read(words, document))
    assert [*_states(run).values()] == [size * P // ranks for size in each]
    assert run.runtime.precision.kind == "bf16"


@pytest.mark.parametrize(
    ("words", "program", "document", "each"),
    [
        # transformers 5 takes the type of the checkpoint, release 4 has fp32
        ("--weight_decay 0.0", "train.py", ONE, (2, 2, 4)),
        ("--evaluation_strategy no", "train.py", ONE, (4, 4, 8)),
        ("--overwrite_output_dir True", "run_clm.py", REPLICAS, (4, 4, 8)),
        # FSDP with mixed precision casts to fp32, TRL and LLaMA-Factory have fp32 by default
        ("--weight_decay 0.0", "train.py", SHARDS, (4, 4, 8)),
        ("--weight_decay 0.0", "train.py", {**SHARDS, **UNMIXED}, (2, 2, 4)),
        ("--weight_decay 0.0", "trl/scripts/sft.py", ONE, (4, 4, 8)),
        ("--finetuning_type full", "src/train.py", ONE, (4, 4, 8)),
    ],
)
def test_the_type_of_weights_without_dtype_is_that_of_the_release(
    tmp_path: Path, words: str, program: str, document: Mapping[str, Any], each: tuple[int, ...]
) -> None:
    (tmp_path / "a.yaml").write_text(json.dumps(document), encoding="utf-8")
    text = f"accelerate launch --config_file a.yaml {program} {WORDS} {words}"
    (tmp_path / "run.sh").write_text(text, encoding="utf-8")
    file = read_checked(str(tmp_path / "run.sh"), world_size=None, gpu="h100-80gb")
    assert file.run is not None, file.findings
    ranks = 8 if document["distributed_type"] == "FSDP" else 1
    assert [*_states(file.run).values()] == [size * P // ranks for size in each]


def test_narrow_weights_have_no_copies_and_smaller_buckets(read: Read) -> None:
    """Autocast copies fp32 weights to 2 bytes, and buckets have the type of gradients."""
    wide, narrow = (_run(read(words, REPLICAS)) for words in ("", "--dtype bfloat16"))
    sizes = [
        {part.name: part.num_bytes for part in point.parts}
        for run in (wide, narrow)
        for point in live_points(run, 0)
        if point.name == "loss"
    ]
    copies = [one.get("copies of autocast", 0) for one in sizes]
    assert copies == [2 * P, 0]
    assert [one["buckets of the reduction"] for one in sizes] == [4 * P, 2 * P]


def test_weights_in_fp16_have_no_verdict(read: Read) -> None:
    """torch scales no gradients in fp16, so that a script with such weights does not train."""
    assert read("--dtype float16 --fp16 True").withdrawn


@pytest.mark.parametrize(
    ("words", "document", "program", "each"),
    [
        ("", ONE, "train.py", 4),
        # TRL casts adapters of quantised weights, and LLaMA-Factory does not
        ("--load_in_4bit True", ONE, "train.py", 2),
        ("--quantization_bit 4", ONE, "train_bash.py", 4),
        # FSDP1 casts them again
        ("--load_in_4bit True", FSDP1, "train.py", 4),
        ("--load_in_4bit True", SHARDS, "train.py", 2),
    ],
)
def test_adapters_have_their_own_type(
    read: Read, words: str, document: Mapping[str, Any], program: str, each: int
) -> None:
    ranks = document["num_processes"]
    found = _states(_run(read(f"{LORA} {words}", document, program)))
    adapters = LAYERS * RANK * 2 * H // ranks
    assert found["Adam moments"] == 2 * each * adapters
    assert found["gradients"] == each * adapters


# --------------------------------------------------------------------------------------------------
# Optimizers.

FACTORED = 4 * (
    # rows and columns of q, k, v as one matrix, of the projection, of both gates, of the last
    LAYERS * ((3 * H + H) + (H + H) + (2 * F + H) + (H + F)) + 2 * (V + H) + VECTORS
)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--optim adamw_torch", 8 * P),
        ("--optim adamw_torch_fused", 8 * P),
        ("--optim adamw_bnb_8bit", 2 * (1 + 1 / 64) * (P - V * H) + 8 * V * H),
        ("--optim adamw_8bit", 2 * (1 + 1 / 64) * (P - V * H) + 8 * V * H),
        ("--optim lion_32bit", 4 * P),
        ("--optim lion_8bit", (1 + 1 / 64) * (P - V * H) + 4 * V * H),
        ("--optim sgd", 0),
        ("--optim sgd --optim_args momentum=0.9", 4 * P),
        ("--optim adafactor", FACTORED),
        ("--adafactor True", FACTORED),
        # memory that moves to the host is not that of the allocator
        ("--optim paged_adamw_8bit", 0),
        ("--optim paged_adamw_32bit", 0),
        ("--optim paged_lion_8bit", 0),
    ],
)
def test_moments_of_each_optimizer(read: Read, words: str, expected: float) -> None:
    run = _run(read(words))
    assert _states(run)["Adam moments"] == pytest.approx(expected, abs=1)
    assert job_of_run(run).state_bytes >= 4


def _low_rank(rows: int, columns: int) -> int:
    """Return the elements of two moments and of the projector, by the shape of a matrix."""
    return RANK * (2 * max(rows, columns) + min(rows, columns))


@pytest.mark.parametrize(
    ("words", "layer", "others"),
    [
        (
            "--optim galore_adamw --optim_target_modules attn mlp --optim_args rank=16",
            4 * _low_rank(H, H) + 3 * _low_rank(F, H),
            2 * V * H,
        ),
        (
            "--optim apollo_adamw --optim_target_modules attn --optim_args rank=16",
            4 * _low_rank(H, H) + 2 * 3 * H * F,
            2 * V * H,
        ),
        (
            "--finetuning_type full --use_galore True --galore_rank 16 --optim adamw_torch",
            4 * _low_rank(H, H) + 3 * _low_rank(F, H),
            2 * V * H,
        ),
    ],
)
def test_a_low_rank_has_its_moments_and_projectors(
    read: Read, words: str, layer: int, others: int
) -> None:
    """All in fp32, as the weights; embedding, head and norms have ordinary moments."""
    run = _run_without_time(read(words))
    expected = 4 * (LAYERS * layer + 2 * (others + VECTORS))
    assert _states(run)["Adam moments"] == expected


def _run_without_time(file: CheckedFile) -> Run:
    assert file.run is not None, file.findings
    assert "memory" not in file.withdrawn, file.findings
    return file.run


def test_layerwise_updates_keep_one_gradient(read: Read) -> None:
    words = "--optim galore_adamw{} --optim_target_modules attn mlp"
    whole, each = (_run_without_time(read(words.format(end))) for end in ("", "_layerwise"))
    assert [_states(run)["gradients"] for run in (whole, each)] == [4 * P, 0]


def test_a_low_rank_needs_whole_gradients(read: Read) -> None:
    """Shards have none, so that the words stay unread."""
    words = "--optim galore_adamw --optim_target_modules attn mlp"
    assert set(read(words, SHARDS).withdrawn) == {"memory", "time"}


@pytest.mark.parametrize(
    ("words", "document", "expected"),
    [
        ("--optim adamw_torch", ONE, 4 * P),
        ("--optim adamw_torch --dtype bfloat16", ONE, 2 * P),
        ("--optim adamw_torch_fused", ONE, 0),
        ("--optim adamw_torch", SHARDS, 4 * P // 8),
        ("--optim adamw_bnb_8bit", ONE, 0),
        ("--optim sgd --weight_decay 0.0", ONE, 0),
        ("--optim sgd --weight_decay 0.1", ONE, 4 * P),
        # two tensors of the largest matrix in fp32, and with 16-bit weights gradient and weight too
        ("--optim adafactor", ONE, 2 * 4 * V * H),
        ("--optim adafactor --dtype bfloat16", ONE, 4 * 4 * V * H),
    ],
)
def test_temporaries_of_an_update(
    read: Read, words: str, document: Mapping[str, Any], expected: int
) -> None:
    step = [*live_points(_run(read(words, document)), 0)][-1]
    assert step.name == "step"
    found = sum(part.num_bytes for part in step.parts if part.name == "temporary of the update")
    assert found == expected


def test_adafactor_of_flat_shards_is_not_factored(read: Read) -> None:
    assert _states(_run(read("--optim adafactor", FSDP1)))["Adam moments"] == 4 * P // 8


# --------------------------------------------------------------------------------------------------
# Loss.

TOKENS = 2 * SEQ


@pytest.mark.parametrize(
    ("words", "each"), [("", 16), ("--save_strategy no", 12), ("--optim adamw_torch", 12)]
)
def test_a_loss_of_logits_has_tensors_in_fp32(read: Read, words: str, each: int) -> None:
    """Three of Trainer; a loop, which has no argument of Trainer alone, holds the logits too."""
    assert loss_bytes(_run(read(words))) == each * TOKENS * V


def test_unknown_loops_widen_the_interval(read: Read) -> None:
    """From 12 bytes a logit of Trainer to 18 of a loop before transformers 4.45."""
    lora = "--use_peft True --lora_dropout 0"
    loop, trainer = (_run(read(f"{lora} {words}")) for words in ("", "--save_strategy no"))
    low, high = reserved_interval(trainer, peak := account_of(trainer).peak_bytes)
    more = TOKENS * V
    wide = reserved_interval(loop, account_of(loop).peak_bytes)
    assert account_of(loop).peak_bytes == peak + 4 * more
    assert wide == pytest.approx((low, high * (peak + 6 * more) / peak))
    capacity = CONTEXT_BYTES + 1.1 * (peak + 4 * more)
    each = [oom_probability_at(trainer, peak + size * more, capacity) for size in (0, 4, 6)]
    found = oom_probability_at(loop, peak + 4 * more, capacity)
    assert found == pytest.approx(sum(each) / 3)
    assert each[0] < found < each[2]


def test_weights_on_the_host_widen_the_interval_of_fsdp1(read: Read) -> None:
    """Published runs need up to a quarter more, for an unknown reason; FSDP2 is not measured."""
    section = {**FSDP1["fsdp_config"], "fsdp_offload_params": True}
    words = "--use_peft True --lora_dropout 0 --save_strategy no"
    for version, more in ((1, 1.25), (2, 1.0)):
        config = {**FSDP1, "fsdp_config": {**section, "fsdp_version": version}}
        run = _run(read(words, config))
        own = replace(run.runtime.optimizer, offload=0.0, offload_weights=False)
        plain = replace(run, runtime=replace(run.runtime, optimizer=own))
        low, high = reserved_interval(plain, 1e9)
        assert reserved_interval(run, 1e9) == pytest.approx((low, more * high))


@pytest.mark.parametrize(
    ("words", "document", "head"),
    [
        ("", ONE, 4 * V * H),
        ("--dtype bfloat16", ONE, 2 * V * H),
        ("", SHARDS, 2 * V * H),
        ("--use_peft True --lora_dropout 0", ONE, 0),
    ],
)
def test_ligers_head_has_chunks_of_tokens(
    read: Read, words: str, document: Mapping[str, Any], head: int
) -> None:
    """32,000 / 4,096 is 8 chunks of 512 tokens; the logits become their gradient."""
    run = _run(read(f"--use_liger_kernel True {words}", document))
    assert loss_bytes(run) == 2 * 512 * V + 2 * TOKENS * H + head


def test_ligers_layers_save_inputs(read: Read) -> None:
    """Two norms save 2 bytes an element, not 4 + 2; the activation is made again."""
    words = "--gradient_checkpointing False"
    plain, liger = (
        layer_saved_bytes(_run(read(f"{words} {more}")).rank_layers[0])
        for more in ("", "--use_liger_kernel True")
    )
    assert plain - liger == TOKENS * (2 * 4 * H + 2 * F)


@pytest.mark.parametrize("program", ["-m trl.scripts.sft", "trl/scripts/sft.py"])
def test_trls_head_has_tiles(read: Read, program: str) -> None:
    """A tile of all 4,096 tokens and 32,000 columns, and both gradients in fp32."""
    run = _run(read("", program=program))
    assert loss_bytes(run) == 2 * TOKENS * V + (4 + 2) * TOKENS * H + 4 * V * H
    # Liger's kernels without its loss
    other = _run(read("--use_liger_kernel True", program=program))
    assert (loss_bytes(other), other.kernels.liger) == (loss_bytes(run), True)


# --------------------------------------------------------------------------------------------------
# FSDP units.


def _wrapped(policy: str, least: int = 0, **more: Any) -> dict[str, Any]:
    own = {"fsdp_auto_wrap_policy": policy, "fsdp_min_num_params": least, "fsdp_version": 1}
    return {**SHARDS, "fsdp_config": {**own, **more}}


def _root(run: Run) -> int:
    """Return the elements of the root, the last unit."""
    return units_of(run, run.strategy.stages[0][0])[-1].elements


ATTENTION, MLP = 4 * H * H, 3 * H * F


@pytest.mark.parametrize(
    ("document", "of_layer"),
    [
        (_wrapped("TRANSFORMER_BASED_WRAP"), 0),
        (_wrapped("NO_WRAP"), MATRICES + 2 * H),
        (_wrapped("SIZE_BASED_WRAP"), MATRICES + 2 * H),
        # attention is a unit, and so is each matrix of the MLP; norms are too small for one
        (_wrapped("SIZE_BASED_WRAP", 20_000_000), 2 * H),
        # the MLP is a unit, and attention is too small for one
        (_wrapped("SIZE_BASED_WRAP", 100_000_000), ATTENTION + 2 * H),
        # a layer has 202 million
        (_wrapped("SIZE_BASED_WRAP", 200_000_000), 0),
        (_wrapped("SIZE_BASED_WRAP", 300_000_000), MATRICES + 2 * H),
    ],
)
def test_the_root_has_what_is_in_no_unit(
    read: Read, document: Mapping[str, Any], of_layer: int
) -> None:
    """Sizes by hand: torch's policy wraps what has enough elements that are in no unit."""
    assert _root(_run_untimed(read("", document))) == 2 * V * H + H + LAYERS * of_layer


def _run_untimed(file: CheckedFile) -> Run:
    assert file.run is not None, file.findings
    assert set(file.withdrawn) <= {"time"}, file.findings
    return file.run


def test_a_model_that_is_one_unit_is_gathered_whole(read: Read) -> None:
    """2 bytes of weights, of gradients and of the reduction, next to an eighth of 16 bytes."""
    run = _run_untimed(read("", _wrapped("NO_WRAP")))
    fullest = max(live_points(run, 0), key=lambda point: point.num_bytes)
    assert fullest.name == "reduction of the root"
    sizes = {part.name: part.num_bytes for part in fullest.parts if part.num_bytes}
    assert sizes.pop("cuBLAS workspaces") == 64 * 2**20
    assert sizes == {
        "weights": 4 * P // 8,
        "Adam moments": 8 * P // 8,
        "gathered weights": 2 * P,
        "unreduced gradients": 2 * P,
        "input of the reduction": 2 * P,
    }


# --------------------------------------------------------------------------------------------------
# Hidden states, and frozen weights, in fp32.


@pytest.mark.parametrize(
    ("words", "document", "each"),
    [
        # the embedding of fp32 weights has an output in fp32, to which layers add
        ("", ONE, 4),
        ("", REPLICAS, 4),
        ("--dtype bfloat16", ONE, 2),
        # FSDP gathers the embedding in 16 bits
        ("", SHARDS, 2),
        (LORA, ONE, 2),
        (f"{LORA} --dtype float32", ONE, 4),
    ],
)
def test_layers_are_recomputed_from_hidden_states(
    read: Read, words: str, document: Mapping[str, Any], each: int
) -> None:
    """`saved_tensors_hooks` of a Llama in transformers 5.24 under autocast show the same."""
    layer = _run(read(words, document)).rank_layers[0]
    assert layer_saved_bytes(layer) == each * TOKENS * H


def test_autocast_casts_wide_hidden_states_for_each_matrix(read: Read) -> None:
    """Seen likewise: inputs and outputs of two norms in fp32, and five casts to 16 bits, not two.

    Equal are queries, keys and values, the output of attention, and four tensors of the MLP.
    """
    wide, narrow = (
        layer_saved_bytes(_run(read(f"--gradient_checkpointing False {words}")).rank_layers[0])
        for words in ("", "--dtype bfloat16")
    )
    equal = 4 * 2 * H + 4 * 32 + 4 * 2 * F + 2 * 4
    assert wide == TOKENS * (equal + 2 * (4 + 4) * H + (3 + 2) * 2 * H)
    assert narrow == TOKENS * (equal + 2 * (4 + 2) * H + (1 + 1) * 2 * H)


@pytest.mark.parametrize(
    ("words", "matrices", "others"),
    [
        (LORA, 2, 2),
        (f"{LORA} --dtype float32", 4, 4),
        (f"{LORA} --load_in_8bit True", 1, 2),
        (f"{LORA} --load_in_8bit True --dtype float32", 1, 4),
    ],
)
def test_frozen_weights_have_the_type_they_are_loaded_in(
    read: Read, words: str, matrices: int, others: int
) -> None:
    run = _run(read(words))
    trained = LAYERS * RANK * 2 * H * (4 if run.runtime.optimizer.master_bytes else 2)
    frozen = matrices * LAYERS * MATRICES + others * (2 * V * H + VECTORS)
    assert _states(run)["weights"] == frozen + trained


def test_a_script_that_prepares_quantised_weights_is_read(tmp_path: Path, read: Read) -> None:
    """PEFT casts what is not quantised to fp32; only the call is looked for."""
    words = f"{LORA} --load_in_8bit True"
    before = _states(_run(read(words)))["weights"]
    text = "import peft\nmodel = peft.prepare_model_for_kbit_training(load())\n"
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    after = _states(_run(read(words)))["weights"]
    assert after - before == 2 * (2 * V * H + VECTORS)


# --------------------------------------------------------------------------------------------------
# ZeRO-3.


@pytest.mark.parametrize(
    ("keys", "words", "elements"),
    [
        ({}, "", VECTORS),
        # ten times the hidden size; each adapter matrix has rank 16 times that
        ({"stage3_param_persistence_threshold": "auto"}, "", VECTORS),
        ({}, LORA, VECTORS + LAYERS * 2 * RANK * H),
        ({"stage3_param_persistence_threshold": "auto"}, LORA, VECTORS),
        ({"stage3_param_persistence_threshold": 2 * 10**7}, "", VECTORS + LAYERS * 4 * H * H),
        ({"stage3_param_persistence_threshold": 10**8}, "", VECTORS + LAYERS * MATRICES),
        # 24 norms of 4,096 elements; the 25th is above the limit
        ({"stage3_model_persistence_threshold": 24 * H}, "", 24 * H),
        ({"model_persistence_threshold": 10**9}, "", VECTORS),
    ],
)
def test_small_parameters_are_on_every_rank(
    tmp_path: Path, read: Read, keys: dict[str, Any], words: str, elements: int
) -> None:
    """2 bytes each, next to the shards."""
    own = {
        "train_micro_batch_size_per_gpu": "auto",
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, **keys},
    }
    (tmp_path / "ds.json").write_text(json.dumps(own), encoding="utf-8")
    document = {
        "distributed_type": "DEEPSPEED",
        "num_processes": 8,
        "deepspeed_config": {"deepspeed_config_file": "ds.json"},
    }
    run = _run_untimed(read(words, document))
    states = {term.name: term.num_bytes for term in account_of(run).states}
    assert states["weights kept whole"] == 2 * elements


@pytest.mark.parametrize(
    ("words", "own"), [("--optim adamw_torch_fused", True), ("--optim adamw_bnb_8bit", False)]
)
def test_an_exported_configuration_leaves_8_bits_to_the_script(
    tmp_path: Path, read: Read, words: str, own: bool
) -> None:
    """An optimizer in the file would replace that of `--optim`."""
    sharded = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(sharded), encoding="utf-8")
    document = {
        "distributed_type": "DEEPSPEED",
        "num_processes": 8,
        "deepspeed_config": {"deepspeed_config_file": "ds.json"},
    }
    run = _run(read(words, document))
    written = configuration(run)
    assert ("optimizer" in written, "zero_allow_untested_optimizer" in written) == (own, not own)
    (tmp_path / "ds.json").write_text(json.dumps(written), encoding="utf-8")
    again = _run(read(words, document))
    assert again.runtime.optimizer == run.runtime.optimizer


@pytest.mark.parametrize(("engine", "master"), [("accelerate", 0), ("deepspeed", 4)])
def test_searched_adapters_have_the_type_of_their_launch(
    read: Read, engine: str, master: int
) -> None:
    """The reader of the exported launch gives adapters of quantised weights the same type."""
    run = _run(read("", SHARDS))
    found = with_training(run, TrainingSettings(lora_rank=8, lora_base="nf4"), engine)
    assert found.runtime.optimizer.master_bytes == master


def test_a_launch_with_a_fused_head_peaks_lower(read: Read) -> None:
    plain, fused = (
        account_of(_run(read(words))).peak_bytes for words in ("", "--use_liger_kernel True")
    )
    assert fused <= plain
