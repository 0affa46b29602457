"""Releases of engines: keys that a release lacks, in checked files and in written ones.

Expected releases are those of the tags of Megatron-LM and Megatron-Bridge, and of the wheels of
torchtitan and transformers.
"""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import InputError, OptionError, UnsupportedError
from autopar.records import replace
from autopar.run.run import Run
from autopar.run.runtime import ActivationOffload
from search.engines.bridge import keys as bridge
from search.engines.engine import EngineRelease, Span, asked_release, spanned
from search.engines.files import written
from search.engines.huggingface.names import RELEASES as TRANSFORMERS, _spans as trainer_spans
from search.engines.megatron import names
from search.engines.megatron.release import RELEASES, code_of
from search.engines.reader import CheckedFile
from search.engines.table import read_checked
from search.engines.torchtitan import flavours
from tests.unit.engines.test_check_rules import DENSE, MIXTURE
from tests.unit.engines.test_writing import NODE, searched


@pytest.mark.parametrize(
    ("word", "has", "lacks"),
    [
        ("x@0.18", ("0.18", "0.18.0", "0.19", "1.0"), ("0.17", "0.17.9")),
        ("x@-0.16", ("0.15", "0.16", "0.16.1"), ("0.17", "1.0")),
        ("x@0.16-0.17", ("0.16.0", "0.17.1"), ("0.15.3", "0.18")),
        ("x@0.17.1", ("0.17", "0.17.1", "0.18"), ("0.17.0",)),
        ("x", ("0.1", "9.9"), ()),
    ],
)
def test_a_word_has_its_releases(word: str, has: tuple[str, ...], lacks: tuple[str, ...]) -> None:
    """A release without patch stands for its newest."""
    name, span = spanned(word)
    assert name == "x"
    assert [one for one in (*has, *lacks) if span.has(one)] == [*has]


@pytest.mark.parametrize(
    ("asked", "name", "newer"),
    [("0.17", "0.17", ""), ("core_v0.17.1", "0.17.1", ""), ("v0.18.0rc2", "0.18.0", ""),
     ("main", "0.20", ""), ("0.21", "0.21", "0.20"), ("1.0.0", "1.0.0", "0.20")],
)  # fmt: skip
def test_a_release_is_named(asked: str, name: str, newer: str) -> None:
    """One that is newer than the known ones is used, and reported."""
    found = asked_release(asked, RELEASES)
    assert found == EngineRelease(name=name, given=True, newer_than=newer)
    assert bool(found.note) == bool(newer)


@pytest.mark.parametrize("asked", ["0.14", "0.9.1", "new", "", "17", "0.17; ls"])
def test_other_releases_are_refused(asked: str) -> None:
    """Neither words nor releases before the oldest known one."""
    with pytest.raises(OptionError, match="--release"):
        asked_release(asked, RELEASES)


def test_rows_have_releases_of_their_engine() -> None:
    """First before last, and neither outside of the releases that were compared."""
    words = " ".join((*names._HARMLESS.values(), *names._EFFECTIVE.values(), names._VALUES)).split()
    spans = dict(spanned(word) for word in words if "@" in word)
    ends = {".".join(end.split(".")[:2]) for span in spans.values() for end in span if end}
    assert ends <= {*RELEASES, "0.14"}
    assert all(Span(first).has(last) for first, last in spans.values() if last)
    assert len(spans) > 250
    # facts of the tags, each read from their `arguments.py`
    assert spans["hybrid-layer-pattern"] == Span("0.17")
    assert spans["moe-use-legacy-grouped-gemm"] == Span(last="0.16")
    assert spans["muon-use-nesterov"] == Span("0.16", "0.17")
    assert spans["optimizer=muon"] == Span("0.16")


def checked(folder: Path, base: dict[str, Any], release: str | None, **more: Any) -> CheckedFile:
    """Return the check of 32 GPUs' arguments for a release."""
    arguments = {**base, **{f"--{name.replace('_', '-')}": value for name, value in more.items()}}
    document = {"MODEL_ARGS": arguments, "ENV_VARS": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}
    (folder / "launch.json").write_text(json.dumps(document), encoding="utf-8")
    path = str(folder / "launch.json")
    return read_checked(path, world_size=32, gpu="h100-80gb", release=release)


def kinds(file: CheckedFile, name: str) -> dict[str, str]:
    """Return kind by argument of the findings with an id."""
    return {str(one.values["given"]): one.kind for one in file.findings if one.id == name}


@pytest.mark.parametrize(
    ("release", "lacking"),
    [
        ("0.15", {"--attention-output-gate", "--fp8-output-proj"}),
        ("0.17.1", {"--fp8-output-proj", "--legacy-tokenizer"}),
        ("0.19", {"--legacy-tokenizer"}),
    ],
)
def test_arguments_are_those_of_the_release(
    release: str, lacking: set[str], tmp_path: Path
) -> None:
    """An argument that the parser of a release rejects ends the run."""
    more = {"attention_output_gate": True, "fp8_output_proj": True, "legacy_tokenizer": True}
    file = checked(tmp_path, DENSE, release, **more)
    assert kinds(file, "megatron.release") == dict.fromkeys(lacking, "illegal")


def test_values_are_those_of_the_release(tmp_path: Path) -> None:
    """`choices` of an argument grow as well."""
    name = "--moe-flex-dispatcher-backend ncclep"
    for release, found in (("0.18", {name: "illegal"}), ("0.19", {})):
        file = checked(tmp_path, MIXTURE, release, moe_flex_dispatcher_backend="ncclep")
        assert kinds(file, "megatron.release") == found


def test_without_a_release_the_newest_known_decides(tmp_path: Path) -> None:
    """An argument that it lacks may be of the user's release, so it is a warning."""
    file = checked(tmp_path, DENSE, None, legacy_tokenizer=True, fp8_output_proj=True)
    assert kinds(file, "megatron.release") == {"--legacy-tokenizer": "environment"}
    assert file.run is not None
    one = next(one for one in file.findings if one.id == "megatron.release")
    assert one.values["last"] == "0.16"


def test_a_newer_release_is_reported(tmp_path: Path) -> None:
    """With the keys of the newest known one."""
    file = checked(tmp_path, DENSE, "0.30")
    one = next(one for one in file.findings if one.id == "megatron.release-newer")
    assert (one.values["release"], one.values["newest"]) == ("0.30", RELEASES[-1])
    assert file.run is not None


@pytest.mark.parametrize(
    ("release", "kind"),
    [(None, "environment"), ("0.17", None), ("0.18.0", None), ("0.18", "illegal")],
)
def test_rules_are_those_of_the_release(
    release: str | None, kind: str | None, tmp_path: Path
) -> None:
    """Warnings where any release may run; else only the rules of the release, which are illegal."""
    more = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
    file = checked(tmp_path, DENSE, release, **more)
    found = [one.kind for one in file.findings if one.id == "megatron.since.te-loss"]
    assert found == [kind] * (kind is not None)


@pytest.mark.parametrize(("release", "zero"), [("0.17", 0), ("0.18", 3), (None, 3)])
def test_defaults_are_those_of_the_release(release: str | None, zero: int, tmp_path: Path) -> None:
    """Megatron-FSDP shards everything by default since NVIDIA/Megatron-LM#3691 (April 2026)."""
    base = {**DENSE, "--use-distributed-optimizer": None, "--pipeline-model-parallel-size": 1}
    file = checked(tmp_path, base, release, use_megatron_fsdp=True, ckpt_format="fsdp_dtensor")
    assert file.described is not None
    assert file.described.split.zero == zero


def test_the_date_of_a_release_is_that_of_its_code() -> None:
    """A release has the changes of main before its branch."""
    codes = [code_of(asked_release(name, RELEASES)) for name in RELEASES]
    assert [one.date for one in codes] == sorted(one.date for one in codes)
    assert [one.has("fourth copy") for one in codes] == [False, *[True] * 5]
    assert code_of(asked_release("0.16.1", RELEASES)) == codes[1]


# --------------------------------------------------------------------------------------------------
# Written files.


def flags_of(run: Run, release: str | None, engine: str = "megatron") -> set[str]:
    """Return the words of the files of a run for a release."""
    asked = None if release is None else asked_release(release, RELEASES)
    place = replace(NODE, model="llama3-8b", release=asked)
    files = written(run, engine=engine, place=place).files
    return set(chain.from_iterable(text.split() for text in files.values()))


def test_older_arguments_are_written() -> None:
    """DeepEP was a flag before backends had a name."""
    run = searched("megatron", "mixtral-8x7b", ep=8, dispatcher="flex")
    assert "--moe-enable-deepep" in flags_of(run, "0.15")
    assert {"--moe-flex-dispatcher-backend", "deepep"} <= flags_of(run, "0.16")


def test_defaults_that_a_release_has_no_argument_for_are_left_out() -> None:
    """The share of offloaded activations is an argument since 0.19; its default is all."""
    run = searched("megatron", recompute="layernorm", offload="core_attn")
    assert "--activation-offload-fraction" not in flags_of(run, "0.18")
    half = replace(run.runtime, offload=ActivationOffload(fraction=0.5))
    assert "--activation-offload-fraction" in flags_of(replace(run, runtime=half), "0.19")
    with pytest.raises(InputError, match="--activation-offload-fraction"):
        flags_of(replace(run, runtime=half), "0.18")


def test_layers_on_the_host_have_one_argument() -> None:
    """No parser of core 0.8 to 0.20 has a flag `--cpu-offloading`; the number switches it on."""
    run = searched("megatron")
    layers = replace(run.runtime, offload=ActivationOffload(layers=4))
    words = flags_of(replace(run, runtime=layers), None)
    found = {word.rstrip(":") for word in words if "cpu-offloading" in word}
    assert found == {"--cpu-offloading-num-layers"}


@pytest.mark.parametrize(
    ("release", "file"), [("0.2", "autopar_torchtitan.toml"), ("0.3", "autopar_recipe.py")]
)
def test_torchtitan_is_written_in_the_form_of_the_release(release: str, file: str) -> None:
    """Job files until 0.2, recipes since 0.3."""
    asked = asked_release(release, flavours.RELEASES)
    run = searched("torchtitan", tp=2)
    found = written(run, engine="torchtitan", place=replace(NODE, release=asked))
    assert file in found.files
    assert found.engine_version == release


def test_torchtitan_refuses_what_a_release_lacks() -> None:
    """Keys of job files before 0.2, and a recipe for what only job files describe."""
    run = searched("torchtitan", tp=2)
    for release, one, match in (
        ("0.1", run, "new in 0.2"),
        ("0.3", searched("torchtitan", tp=2, precision="fp8"), "cannot describe"),
    ):
        place = replace(NODE, release=asked_release(release, flavours.RELEASES))
        with pytest.raises(InputError, match=match):
            written(one, engine="torchtitan", place=place)


def test_hybrids_need_the_program_of_their_release() -> None:
    """`pretrain_hybrid.py` is in 0.18."""
    run = searched("megatron", "nemotron-3-nano")
    with pytest.raises(UnsupportedError, match="pretrain_hybrid"):
        flags_of(run, "0.17")


# --------------------------------------------------------------------------------------------------
# The other engines.


def test_keys_of_bridge_are_those_of_its_core() -> None:
    """Fields of `TransformerConfig` in the submodule of each tag; others have own releases."""
    spans = {key: bridge.span_of(key) for key in bridge.KEYS}
    assert {key: span.first for key, span in spans.items() if any(span)} == {
        "model.activation_offload_fraction": "0.6",
        "model.delta_offload_bytes_across_pp_ranks": "0.6",
        "model.dsa_indexer_scoring_relu": "0.6",
        "model.dsa_indexer_skip_topk_offset": "0.6",
        "model.dsa_indexer_topk_freq": "0.6",
        "model.dsa_kernel_backend": "0.6",
        "model.fp8_output_proj": "0.5",
        "model.hybrid_layer_pattern": "0.4",
        "model.mtp_use_repeated_layer": "0.4",
        "mixed_precision.fp4_param": "0.4.2",
        "mixed_precision.fp4_param_gather": "0.4.2",
    }


@pytest.mark.parametrize(
    ("container", "release", "lacks"),
    [("26.02", None, True), ("26.06", None, False), ("26.06", "0.4", True), (None, None, False)],
)
def test_the_container_of_bridge_is_its_release(
    container: str | None, release: str | None, lacks: bool, tmp_path: Path
) -> None:
    """Unless the user names another."""
    image = "" if container is None else f"-i nvcr.io/nvidia/nemo:{container} "
    (tmp_path / "run.sh").write_text(
        "python scripts/performance/setup_experiment.py -m llama -mr llama3_8b -g h100 -c bf16 "
        f"-ng 8 {image}model.fp8_output_proj=true\n",
        encoding="utf-8",
    )
    path = str(tmp_path / "run.sh")
    file = read_checked(path, world_size=8, gpu="h100-80gb", release=release)
    assert kinds(file, "bridge.release") == ({"model.fp8_output_proj": "illegal"} if lacks else {})


JOB = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 4096
{training}
[parallelism]
data_parallel_shard_degree = -1
{more}
"""


@pytest.mark.parametrize(
    ("training", "more", "release", "lacking"),
    [
        ("compile = true", "", None, {}),
        ("compile = true", "", "0.2", {"[training] compile": "illegal"}),
        ("", "[compile]\nenable = true", "0.1", {"[compile]": "illegal"}),
        ("", "[compile]\nenable = true", None, {}),
        ("deterministic = false", "[compile]\nenable = true", None,
         {"[training] deterministic": "environment"}),
        ("deterministic = false", "[compile]\nenable = true", "0.2.0", {}),
        ("", "", "0.3", {"a job file in TOML": "illegal"}),
    ],
)  # fmt: skip
def test_keys_of_torchtitan_are_those_of_the_release(
    training: str, more: str, release: str | None, lacking: dict[str, str], tmp_path: Path
) -> None:
    """A job file with keys of 2025 is of an older release than the newest one with job files."""
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(training=training, more=more), encoding="utf-8")
    file = read_checked(str(path), world_size=8, gpu="h100-80gb", release=release)
    assert kinds(file, "torchtitan.release") == lacking


def test_engines_without_known_releases_refuse_the_option(tmp_path: Path) -> None:
    """The option is not ignored silently."""
    path = tmp_path / "train.yaml"
    path.write_text("model_name_or_path: m\ncutoff_len: 8\nfinetuning_type: lora\n", "utf-8")
    with pytest.raises(OptionError, match="LLaMA-Factory"):
        read_checked(str(path), world_size=8, gpu="h100-80gb", release="5.0")


def test_a_release_of_transformers_has_no_effect_without_the_trainer(tmp_path: Path) -> None:
    """A DeepSpeed configuration alone has no arguments of the Trainer."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}}), encoding="utf-8")
    file = read_checked(
        str(path), world_size=8, gpu="h100-80gb", model="llama3-8b", seq_length=64, release="5.0"
    )
    assert [one.kind for one in file.findings if one.values.get("key") == "--release"] == [
        "no effect"
    ]


# --------------------------------------------------------------------------------------------------
# Parallelism of new releases that has no estimate.


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"dynamic_context_parallel": True}, "dynamic context parallelism"),
        ({"hybrid_context_parallel": True}, "dynamic context parallelism"),
        ({"tensor_parallel_num_weight_shards": 8}, "generalized tensor parallelism"),
        ({"expert_tensor_parallel_num_weight_shards": 8}, "generalized tensor parallelism"),
        # as many shards as tensor ranks are plain tensor parallelism
        ({"tensor_parallel_num_weight_shards": 2}, ""),
    ],
)
def test_new_parallelism_has_no_verdict(more: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """The reason is that of the feature, not an unknown argument."""
    file = checked(tmp_path, DENSE, None, **more)
    assert (file.run is None) == bool(reason)
    assert {*file.withdrawn} == ({"memory", "time"} if reason else set())
    assert reason in file.why_not_priced()
    assert not [one for one in file.findings if one.kind == "not understood"]


@pytest.mark.parametrize(
    "key", ["dynamic_context_parallel=true", "tensor_parallel_num_weight_shards=4"]
)
def test_new_parallelism_of_bridge_has_no_verdict(key: str, tmp_path: Path) -> None:
    """Keys of the model have the same reasons."""
    text = "python scripts/performance/setup_experiment.py -m llama -mr llama3_8b -g h100 -ng 8 "
    (tmp_path / "run.sh").write_text(f"{text}model.{key}\n", encoding="utf-8")
    file = read_checked(str(tmp_path / "run.sh"), world_size=8, gpu="h100-80gb")
    assert {*file.withdrawn} == {"memory", "time"}
    assert [one.kind for one in file.findings if one.withdraws] == ["not priced"]


@pytest.mark.parametrize("name", ["main_grads", "main_params", "exp_avg", "exp_avg_sq"])
def test_types_of_states_in_fp32_are_the_default(name: str, tmp_path: Path) -> None:
    """Scripts write them down; others need the precision-aware optimizer."""
    usual = checked(tmp_path, DENSE, None)
    same = checked(tmp_path, DENSE, None, **{f"{name}_dtype": "fp32"})
    assert not same.withdrawn
    assert same.run == usual.run
    other = checked(tmp_path, DENSE, None, **{f"{name}_dtype": "bf16"})
    assert other.withdrawn or "illegal" in {one.kind for one in other.findings}


def test_iterations_of_muon_that_differ_have_no_time(tmp_path: Path) -> None:
    """The defaults are priced, and the estimate is named as derived."""
    base = {**DENSE, "--tensor-model-parallel-size": 1, "--optimizer": "muon"}
    del base["--sequence-parallel"]
    usual = checked(tmp_path, base, None, muon_num_ns_steps=5, muon_tp_mode="duplicated")
    assert not usual.withdrawn
    assert [one.kind for one in usual.findings if one.id == "megatron.muon"] == ["read"]
    for more in ({"muon_num_ns_steps": 8}, {"muon_use_syrk": True}, {"muon_no_split_qkv": True}):
        assert {*checked(tmp_path, base, None, **more).withdrawn} == {"time"}
    assert {*checked(tmp_path, base, None, optimizer="dist_muon").withdrawn} == {"time"}
    adam = checked(tmp_path, DENSE, None, muon_num_ns_steps=8)
    assert not adam.withdrawn


def test_arguments_of_the_trainer_have_releases() -> None:
    """Facts of the wheels, each read from their `training_args.py`."""
    spans = trainer_spans()
    assert all(Span(TRANSFORMERS[0]).has(end) for span in spans.values() for end in span if end)
    assert all(
        Span(last=TRANSFORMERS[1]).has(end) for span in spans.values() for end in span if end
    )
    assert all(Span(first).has(last) for first, last in spans.values() if first and last)
    assert spans["eval-strategy"] == Span("4.41")
    assert spans["evaluation-strategy"] == Span(last="4.50")
    assert spans["save-safetensors"] == Span("4.28", "4.57")


TRAINED = (
    "torchrun --nproc_per_node 8 {program} --model_name_or_path meta-llama/Llama-3.1-8B "
    "--per_device_train_batch_size 1 --output_dir out --max_length 2048 {more}\n"
)


def trained(folder: Path, release: str | None, more: str, program: str = "train.py") -> CheckedFile:
    """Return the check of a script with the Trainer for a release of transformers."""
    (folder / "run.sh").write_text(TRAINED.format(program=program, more=more), encoding="utf-8")
    path = str(folder / "run.sh")
    return read_checked(path, world_size=8, gpu="h100-80gb", release=release)


@pytest.mark.parametrize(
    ("program", "release", "kind"),
    [
        ("train.py", "4.46", None),
        ("train.py", "4.57", "environment"),
        ("train.py", None, "environment"),
        ("trl/scripts/sft.py", None, "environment"),
        ("trl/scripts/sft.py", "5.0", "illegal"),
        ("trl/scripts/sft.py", "4.50.3", None),
    ],
)
def test_the_trainer_has_arguments_by_release(
    program: str, release: str | None, kind: str | None, tmp_path: Path
) -> None:
    """TRL's own script has no other arguments; a user's script may declare them itself."""
    file = trained(tmp_path, release, "--evaluation_strategy no", program)
    lacking = {"--evaluation_strategy": kind} if kind else {}
    assert kinds(file, "accelerate.release") == lacking


@pytest.mark.parametrize(
    ("release", "more", "narrow"),
    [
        ("4.57", "", False),
        ("5.0", "", True),
        (None, "", True),
        (None, "--overwrite_output_dir True", False),
        (None, "--train_sampling_strategy random", True),
        ("5.24", "--overwrite_output_dir True", True),
    ],
)
def test_the_release_decides_the_type_of_weights(
    release: str | None, more: str, narrow: bool, tmp_path: Path
) -> None:
    """transformers 5 loads weights in the type of the checkpoint, release 4 in fp32."""
    run = trained(tmp_path, release, more).run
    assert run is not None
    assert (run.runtime.optimizer.master_bytes == 0) == narrow


def test_new_names_of_checkpointing_are_read(tmp_path: Path) -> None:
    """Release 5.24 calls gradient checkpointing activation checkpointing."""
    run = trained(tmp_path, None, "--activation_checkpointing True").run
    assert run is not None
    assert run.strategy.recomputed.kind == "full"
    offloaded = "--activation_checkpointing_kwargs '{\"offload\": true}'"
    file = trained(tmp_path, None, f"--activation_checkpointing True {offloaded}")
    assert {*file.withdrawn} == {"memory", "time"}
