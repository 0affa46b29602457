"""Launches written for trainers: what is refused, what is lost, what bash makes of it.

That nothing is lost where nothing has to be is a property (`tests/property/test_written_launches`).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from autopar.documents.catalog import model_names
from autopar.documents.spec import load_spec
from autopar.errors import InputError
from autopar.families.config import parse_hugging_face
from autopar.records import replace
from autopar.run.architecture import Mlp, decoder_layers
from autopar.run.of_plan import uniform_model
from autopar.run.run import Run, run_with_split
from autopar.run.runtime import Precision, Quirks
from autopar.run.strategy import chunks_of_sizes, even_chunks
from search.engines.candidate import Candidate, Constraints
from search.engines.differences import without_effect
from search.engines.exporter_types import ExportTarget
from search.engines.files import LAUNCH, written
from search.engines.megatron.write import environment_of
from search.engines.space import EngineContext, run_of
from search.engines.table import spaces
from search.engines.text import flags_of, script_command
from search.planning.uniform.infeasibility import violated_rule
from tests.runs import decoder, run_of as run_of_model

DATA = Path(__file__).resolve().parents[2] / "data"
PUBLISHED = json.loads((DATA / "published_configs.json").read_text(encoding="utf-8"))
NODE = ExportTarget(num_nodes=1, gpus_per_node=8)


def searched(engine: str, model: str = "llama3-8b", **choice: Any) -> Run:
    """Return a run as a search over trainers makes it, on eight H100."""
    space = next(one for one in spaces() if one.name == engine)
    sizes = uniform_model(load_spec(model))
    usual = {"zero": 1 if engine in ("megatron", "deepspeed") else 2, "global_batch": 64}
    chunks = even_chunks(
        sizes.num_layers,
        choice.get("pp", 1),
        choice.get("vpp", 1),
        schedule=choice.get("schedule"),
        mtp=sizes.mtp,
    )
    job = EngineContext(name="x", model=sizes, seq=4096, global_batches=(64,), world=8, gpu="H100")
    return run_of(space, job, Candidate(**{"chunks": chunks, **usual, **choice}))


def told(run: Run, **records: dict[str, Any]) -> Run:
    """Return a run whose engine is told otherwise; records : fields of each by its name."""
    own = {name: replace(getattr(run.runtime, name), **told) for name, told in records.items()}
    return replace(run, runtime=replace(run.runtime, **own))


def test_exchanges_of_experts_beside_kernels_have_queues_of_their_own() -> None:
    """Beside tensor ranks, too, whose transfers would need one: these are not overlapped then."""
    choice = {"tp": 2, "ep": 4, "etp": 1, "overlap_experts": True}
    run = searched("megatron", "mixtral-8x7b", **choice)
    text = written(run, engine="megatron", place=NODE).files["megatron_args.sh"]
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=32\n" in text
    with pytest.raises(InputError, match="CUDA_DEVICE_MAX_CONNECTIONS"):
        searched("megatron", "mixtral-8x7b", **choice, tp_overlap=True)
    with pytest.raises(InputError, match="MTP"):
        searched("megatron", "deepseek-v3", ep=8, overlap_experts=True)


def test_variables_that_kernels_and_copies_need_are_set() -> None:
    """Modules on the host, whose weights stay; dispatch over the GPUs that NVLink joins."""
    offload = searched("megatron", recompute="layernorm", offload="core_attn")
    assert environment_of(offload)["NVTE_CPU_OFFLOAD_V1"] == "1"
    plain = searched("megatron", "mixtral-8x7b", ep=8, dispatcher="flex")
    assert not {"NVTE_CPU_OFFLOAD_V1", "USE_MNNVL"} & {*environment_of(plain)}
    joined = replace(plain, gpu="GB200")
    assert environment_of(joined) == {
        "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN": "8",
        "NVLINK_DOMAIN_SIZE": "72",
        "USE_MNNVL": "1",
    }


@pytest.mark.parametrize(
    ("engine", "choice"),
    [
        ("megatron", {}),
        ("megatron", {"tp": 2, "pp": 2, "vpp": 2, "recompute": "core_attn+mlp"}),
        ("megatron", {"zero": 3, "cp": 2, "recompute": "full"}),
        ("megatron", {"precision": "fp8"}),
        ("torchtitan", {"tp": 2, "recompute": "op"}),
        ("torchtitan", {"pp": 2, "zero": 3, "precision": "fp8"}),
        ("deepspeed", {"zero": 3, "recompute": "full"}),
        ("accelerate", {"zero": 3, "tp": 2}),
        ("accelerate", {"zero": 0}),
    ],
)
def test_what_a_search_finds_is_written_whole(engine: str, choice: dict[str, Any]) -> None:
    """A launch of each trainer, as it is found, loses nothing on the way to its files."""
    run = searched(engine, **choice)

    found = written(run, engine=engine, place=replace(NODE, model="llama3-8b"))  # type: ignore[arg-type]

    assert found.losses == ()
    assert without_effect(found.runs) == without_effect(run)


@pytest.mark.parametrize("name", sorted({*model_names(), *PUBLISHED}))
def test_megatron_answers_with_no_model_that_its_script_cannot_tell(name: str) -> None:
    """A rule excludes the model from searches, or its launch is written whole."""
    path, config = Path(name), PUBLISHED.get(name, {}).get("config")
    spec = load_spec(name) if config is None else parse_hugging_face(path, config, seq_length=4096)
    try:
        model = replace(uniform_model(spec), mtp=0, mtp_block=())
    except InputError:
        return  # searches answer with per-layer plans
    space = next(one for one in spaces() if one.name == "megatron")
    seq = spec.layers[0].seq_length
    job = EngineContext(name="x", model=model, seq=seq, global_batches=(64,), world=8, gpu="H100")
    if violated_rule(space, job, Constraints()) is None:
        chunks = even_chunks(model.num_layers, 1)
        run = run_of(space, job, Candidate(chunks=chunks, zero=1, global_batch=64))
        assert written(run, engine="megatron", place=NODE).losses == ()


def test_megatron_launch_is_written_for_bridge_as_well() -> None:
    """The two have the same arguments; one bucket is what overlaps of a recipe always set."""
    run = searched("megatron", tp=2, pp=2)

    found = written(run, engine="megatron-bridge", place=replace(NODE, model="llama3_8b"))

    assert found.losses == ()
    assert "--recipe llama3_8b_pretrain_config" in found.files["bridge_overrides.sh"]


def test_bash_makes_the_arguments_that_were_meant(tmp_path: Path) -> None:
    """Brackets, bars and stars of a layout and of layers with experts come through bash."""
    model = uniform_model(load_spec("mixtral-8x7b"))
    dense = replace(model.last, mlp=Mlp(width=14336, gated=True))
    layers, repeat = decoder_layers(dense, (False,) * 3 + (True,) * 29, model.experts)
    run = searched("megatron", "mixtral-8x7b", pp=4)
    run = replace(
        run,
        model=replace(model, layers=layers, repeat=repeat),
        strategy=replace(run.strategy, stages=chunks_of_sizes([7, 9, 9, 7], 4)),
    )
    found = written(run, engine="megatron", place=replace(NODE, model="mixtral-8x7b"))
    for name, text in found.files.items():
        (tmp_path / name).write_text(text)

    done = subprocess.run(
        ["bash", "-c", 'source megatron_args.sh && printf "%s\\n" "${MEGATRON_ARGS[@]}"'],
        cwd=tmp_path,
        env={**os.environ, "DATA_PATH": "data", "TOKENIZER_MODEL": "t", "TRAIN_ITERS": "7"},
        capture_output=True,
        text=True,
        check=True,
    )

    flags = flags_of(done.stdout.split("\n")[:-1])
    assert flags["pipeline-model-parallel-layout"] == ("Et*7|t*9|t*9|t*7L",)
    assert flags["moe-layer-freq"] == ("([0]*3+[1]*29)",)
    assert flags["train-iters"] == ("7",)
    # the shipped model knows it
    assert flags["rotary-base"] == ("1000000",)
    text = found.files["megatron_args.sh"]
    own = flags_of(script_command(text, "x").arguments)
    assert flags.keys() == own.keys()


def test_routers_of_shipped_mixtures_are_written_by_their_shipped_names() -> None:
    """DeepSeek-V3 as it is published: sigmoids with a bias, four of eight groups, times 2.5."""
    run = searched("megatron", "deepseek-v3", ep=8)

    text = written(run, engine="megatron", place=replace(NODE, model="deepseek-v3")).files[
        "megatron_args.sh"
    ]

    for flag in (
        "moe-router-score-function sigmoid",
        "moe-router-enable-expert-bias",
        "moe-router-num-groups 8",
        "moe-router-group-topk 4",
        "moe-router-topk-scaling-factor 2.5",
    ):
        assert f"--{flag}\n" in text


@pytest.mark.parametrize(
    ("name", "factor"),
    [("nemotron-3-nano", 2.5), ("nemotron-3-super", 5.0), ("glm-4.5-air", 1.0), ("glm-5", 2.5),
     ("kimi-k2", 2.827)],
)  # fmt: skip
def test_sigmoid_routers_are_written_by_shipped_names(name: str, factor: float) -> None:
    """`routed_scaling_factor` of the published files, scores and loss of Megatron-Bridge."""
    place = replace(NODE, model=name)
    found = written(searched("megatron", name, ep=8), engine="megatron", place=place)
    flags = flags_of(script_command(found.files["megatron_args.sh"], "x").arguments)
    assert flags["moe-router-score-function"] == ("sigmoid",)
    assert flags["moe-router-enable-expert-bias"] == ()
    assert flags["moe-router-load-balancing-type"] == ("seq_aux_loss",)
    assert flags["moe-router-topk-scaling-factor"] == (str(factor),)
    assert not any("router scores" in note for note in found.notes)


@pytest.mark.parametrize("name", [*model_names()])
def test_a_router_is_written_or_noted(name: str) -> None:
    """Softmax after the choice of experts is the default, which models of no note here have."""
    spec = load_spec(name)
    if all(layer.num_experts is None for layer in spec.layers):
        pytest.skip("no experts")
    if name in ("gemma-4-26b-a4b", "kimi-linear-48b"):
        with pytest.raises(InputError, match="Megatron-LM has no"):
            searched("megatron", name, ep=8)
        return
    place = replace(NODE, model=name)
    place = replace(place, spec=spec)
    found = written(searched("megatron", name, ep=8), engine="megatron", place=place)
    noted = any("router scores" in note for note in found.notes)
    said = "--moe-router-score-function" in found.files["megatron_args.sh"]
    softmax = name.startswith(("qwen3", "gpt-oss", "mixtral-8x7b"))
    assert noted + said + softmax == 1


@pytest.mark.parametrize(
    ("name", "share", "gate"), [("qwen3-next-80b", 0.25, True), ("glm-4.5-air", 0.5, False)]
)
def test_positions_and_gate_of_the_model_are_written(name: str, share: float, gate: bool) -> None:
    place = replace(NODE, model=name)
    run = searched("megatron", name, ep=8)
    before = replace(run, model=uniform_model(replace(load_spec(name), rotary_share=1.0)))
    for one in (run, before):  # plan files of earlier releases lack the fraction
        found = written(one, engine="megatron", place=place)
        flags = flags_of(script_command(found.files["megatron_args.sh"], "x").arguments)
        assert flags["rotary-percent"] == (str(share),)
        assert ("moe-shared-expert-gate" in flags) == gate
        assert found.losses == ()
        assert not any("ROTARY_BASE" in note for note in found.notes)


def test_a_model_of_ends_alone_is_written() -> None:
    """All of its layers are computed in 16 bits, and an end has no more of them than a stage."""
    run = run_of_model(
        decoder(layers=2), pp=2, wide_ends=(1, 1), global_batch=2,
        precision=Precision(fp8=True, fp8_recipe="tensorwise"),
    )  # fmt: skip

    found = written(run, engine="megatron", place=ExportTarget(num_nodes=1, gpus_per_node=2))

    assert found.losses == ()
    assert "--num-layers-at-end-in-bf16 1\n" in found.files["megatron_args.sh"]


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v2-lite"])
def test_shipped_mixtures_are_flavours_of_torchtitan(model: str) -> None:
    """Their sizes are those of the flavours, and come from one place."""
    run = searched("torchtitan", model, ep=8)

    assert written(run, engine="torchtitan", place=NODE).losses == ()


@pytest.mark.parametrize("engine", ["megatron", "torchtitan", "deepspeed", "accelerate"])
def test_commands_are_scripts_of_bash(tmp_path: Path, engine: str) -> None:
    """What is printed to be run is read by bash without a complaint."""
    found = written(searched(engine), engine=engine, place=NODE)  # type: ignore[arg-type]
    path = tmp_path / LAUNCH
    path.write_text(found.launch)

    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    assert found.launch.endswith("\n")


@pytest.mark.parametrize(
    ("engine", "run", "place", "said"),
    [
        ("megatron", searched("megatron"), ExportTarget(num_nodes=2, gpus_per_node=8),
         "8 GPUs"),
        ("deepspeed", searched("megatron"), NODE, "Megatron-LM"),
        ("megatron", searched("torchtitan"), NODE, "torchtitan"),
        ("torchtitan", searched("torchtitan", "mixtral-8x7b"), NODE,
         "llama3 8B differs from the model"),
        ("megatron", searched("megatron"), replace(NODE, model="llama3-70b"),
         "llama3-70b has 80 layers of width 8192"),
        ("megatron", run_with_split(told(searched("megatron", tp=2), overlap={"tensor": True}),
                                 sequence_parallel=False), NODE,
         "--tp-comm-overlap needs --sequence-parallel"),
    ],
)  # fmt: skip
def test_refusals_say_what_is_wrong(engine: Any, run: Run, place: ExportTarget, said: str) -> None:
    """Another cluster, another trainer's launch, another model, and what the trainer ends with."""
    with pytest.raises(InputError, match=said.replace("(", r"\(")):
        written(run, engine=engine, place=place)


@pytest.mark.parametrize(
    ("engine", "changes", "loss"),
    [
        ("megatron", {"kernels": {"graphs": "partial"}},
         "Megatron-LM does not support CUDA graphs: partial becomes none"),
        ("megatron", {"precision": {"fp8_attention": True, "fp8": True}},
         "Megatron-LM does not support scores of 8 bits: yes becomes no"),
        ("torchtitan", {"precision": {"kind": "fp16"}},
         "torchtitan 0.2.2 does not support precision.kind: fp16 becomes bf16"),
        ("torchtitan", {"kernels": {"loss": "native"}},
         "torchtitan 0.3.0 does not support kernels.loss: native becomes whole"),
        ("deepspeed", {"precision": {"fp8": True}},
         "DeepSpeed does not support precision.fp8: yes becomes no"),
    ],
)  # fmt: skip
def test_what_a_trainer_cannot_say_is_a_sentence(
    engine: Any, changes: dict[str, Any], loss: str
) -> None:
    """And what it runs instead is the launch without it."""
    run = told(searched(engine), **changes)

    found = written(run, engine=engine, place=NODE)

    assert [one.what for one in found.losses] == [loss]
    assert without_effect(found.runs) != without_effect(run)


def test_software_that_a_release_has_is_no_loss() -> None:
    """Older kernels are where a launch runs, and nothing that its files could say."""
    old = Quirks(kept_dummies=False, grouped_workspaces=0, fused_loss_copies=9)
    run = told(searched("megatron"), kernels={"quirks": old})

    assert written(run, engine="megatron", place=NODE).losses == ()
