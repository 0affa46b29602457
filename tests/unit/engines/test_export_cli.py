"""autopar-export: files, launch, losses, prices and the way back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.documents.plan import read_strategy
from autopar.documents.spec import write_spec
from autopar.documents.strategy import strategy_document
from autopar.errors import INFEASIBLE
from autopar.records import replace
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy
from search.commands import export as export_cli, search as cli
from search.engines.galvatron.plan import lower, strategy_text
from search.engines.plans import lower_for
from search.engines.table import EXPORTERS
from search.planning.exports import change_sentence
from tests.export_cases import HETEROGENEOUS, SMALL, job

UNIFORM = replace(
    HETEROGENEOUS,
    layers=(LayerStrategy(tp=2),) * 8,
    vocab=VocabStrategy(tp=2),
    num_microbatches=4,
)
DOCUMENTED = {
    "pp_deg": 1,
    "tp_sizes_enc": "1,1,2,2",
    "tp_consecutive_flags": "1,1,1,1",
    "dp_types_enc": "1,1,0,0",
    "use_sp": "0,0,0,1",
    "checkpoint": "1,0,0,0",
    "world_size": 8,
    "global_bsz": 16,
    "chunks": 1,
    "pp_division": "4",
    "pipeline_type": "pipedream_flush",
    "default_dp_type": "zero2",
    "vtp": 2,
    "vsp": 1,
    "embed_sdp": 0,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with the small model and two plans."""
    monkeypatch.chdir(tmp_path)
    write_spec(SMALL, tmp_path / "model.json")
    for name, plan in (("uniform", UNIFORM), ("mixed", HETEROGENEOUS)):
        (tmp_path / f"{name}.json").write_text(strategy_text(plan), encoding="utf-8")
    return tmp_path


def export(*arguments: str) -> int:
    """Run the command with the small model."""
    return export_cli.run([*arguments, "--model", "model.json"])


def test_lossless_export_writes_and_prints(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files in their folder, the launch command on stdout, cluster by default said on stderr."""
    assert export("uniform.json", "--to", "megatron") == 0

    out, err = capsys.readouterr()
    written = {path.name for path in (folder / "exports" / "megatron").iterdir()}
    assert written == {"megatron_args.sh", "megatron_args.yaml", "launch.sh"}
    assert "--nnodes 2 --nproc-per-node 8" in out
    assert "Not supported" not in out
    assert err == "autopar-export: --nodes not given; writing for 2 x 8 GPUs\n"


def test_lossy_export_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line per loss, the remedy last, exit 3, and no file."""
    assert export("mixed.json", "--to", "megatron", "--num-nodes", "2") == INFEASIBLE

    err = capsys.readouterr().err.splitlines()
    assert err[0] == "autopar-export: megatron does not support all of the plan:"
    assert sum(line.startswith("autopar-export:   ") for line in err) == 6
    assert err[-1].endswith("--allow-approx uses the nearest plan")
    assert not (folder / "exports").exists()


@pytest.mark.whole
def test_nearest_plan_is_priced(capsys: pytest.CaptureFixture[str]) -> None:
    """With hardware, time and memory beside those of the plan, and why this degree."""
    arguments = ("mixed.json", "--to", "megatron", "--allow-approx", "--json", "-")

    assert export(*arguments, "--hardware", "a100-80gb:2x8") == 0
    document = json.loads(capsys.readouterr().out)
    assert export("mixed.json", "--to", "megatron", "--allow-approx", "--force") == 0
    unpriced = capsys.readouterr().out

    before, after = document["price"]["before"], document["price"]["after"]
    assert before["step_time_s"] > 0
    assert after["fits"]
    assert "the fastest that fits" in document["chosen_by"]
    times = {
        lowered.step_time_s
        for lowered in (_priced(degree, before["step_time_s"]) for degree in ("1", "2", "4", "8"))
        if lowered is not None
    }
    assert after["step_time_s"] == min(times)
    assert "--hardware" in unpriced


class _Time:
    def __init__(self, step_time_s: float) -> None:
        self.step_time_s = step_time_s


def _priced(degree: str, before: float) -> _Time | None:
    """Price the nearest plan of one degree the long way: written to a file and evaluated."""
    from autopar.errors import InputError

    try:
        lowered = lower_for("megatron")(job(HETEROGENEOUS, tensor_degree=int(degree)))
    except InputError:
        return None
    path = Path(f"degree{degree}.json")
    path.write_text(strategy_text(lowered.plan), encoding="utf-8")
    result = Path("result.json")
    code = cli.run(
        [
            *("--evaluate", str(path), "--model", "model.json", "--hardware", "a100-80gb:2x8"),
            *("--json", str(result)),
        ]
    )
    assert code == 0
    document = json.loads(result.read_text(encoding="utf-8"))
    assert before > 0
    return _Time(document["step_time_s"]) if document["fits"] else None


@pytest.mark.whole
def test_plan_file_of_ours_needs_nothing_else(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Model, cluster and options are those that it was searched with."""
    searched = (
        "--hardware",
        "a100-80gb:1x4",
        "--global-batch-size",
        "8",
        "--mixed-precision",
        "fp16",
    )
    assert cli.run(["--model", "model.json", *searched, "--output-config-path", "found"]) == 0
    (plan,) = (folder / "found").glob("autopar_plan_*.json")
    capsys.readouterr()

    assert export_cli.run([str(plan), "--to", "galvatron"]) == 0

    train = (folder / "exports" / "galvatron" / "train_dist.yaml").read_text(encoding="utf-8")
    assert "mixed_precision: fp16\n" in train
    assert "torchrun --nnodes 1 --nproc-per-node 4" in capsys.readouterr().out


def test_files_of_other_content_stay(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same again leaves them; other content is kept beside them unless --force is given."""
    arguments = ("uniform.json", "--to", "megatron", "--num-nodes", "2", "--out", "here")
    assert export(*arguments) == 0
    assert export(*arguments) == 0
    script = folder / "here" / "megatron_args.yaml"
    script.write_text("mine", encoding="utf-8")

    assert export(*arguments) == 0
    kept = script.with_name("megatron_args.yaml.bak-1")
    said = capsys.readouterr().err
    assert "here/megatron_args.yaml had another content, which is kept as megatron_args" in said
    assert kept.read_text(encoding="utf-8") == "mine"
    assert script.read_text(encoding="utf-8") != "mine"
    script.write_text("mine too", encoding="utf-8")
    assert export(*arguments, "--force") == 0
    assert script.read_text(encoding="utf-8") != "mine too"
    assert sorted(script.parent.glob("*.bak-*")) == [kept]


def test_galvatron_files_round_trip() -> None:
    """Bytes of ours, and of everyone's that the newest runtime reads as they were meant."""
    for plan in (UNIFORM, HETEROGENEOUS):
        text = lower(job(plan)).files["galvatron_config.json"]
        assert strategy_text(read_strategy(json.loads(text))) == text
        assert json.loads(text) == strategy_document(plan)


@pytest.mark.parametrize("indent", [None, 4])
def test_documented_file_keeps_its_bytes(folder: Path, indent: int | None) -> None:
    """A strategy file in the documented spelling is handed on as it is."""
    text = json.dumps(DOCUMENTED, indent=indent)
    (folder / "theirs.json").write_text(text, encoding="utf-8")

    assert export("theirs.json", "--to", "galvatron", "--num-layers", "4") == 0

    out = folder / "exports" / "galvatron" / "galvatron_config.json"
    assert out.read_text(encoding="utf-8") == text


def test_dropped_decision_is_completed(folder: Path) -> None:
    """embed_sdp alone is what the newest runtime overlooks: vocab_sdp is added."""
    text = json.dumps({**DOCUMENTED, "embed_sdp": 1})
    (folder / "theirs.json").write_text(text, encoding="utf-8")

    assert export("theirs.json", "--to", "galvatron", "--num-layers", "4") == 0

    out = folder / "exports" / "galvatron" / "galvatron_config.json"
    assert json.loads(out.read_text(encoding="utf-8")) == {
        **DOCUMENTED,
        "embed_sdp": 1,
        "vocab_sdp": 1,
    }


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ("galvatron", "galvatron_config.json"),
        ("galvatron", "train_dist.yaml"),
        ("galvatron", "train_dist_v2.4.sh"),
        ("megatron", "megatron_args.sh"),
        ("megatron", "megatron_args.yaml"),
    ],
)
def test_exports_are_read_back(engine: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--from reads each file of an export as the plan that was exported."""
    assert export("uniform.json", "--to", engine) == 0
    capsys.readouterr()

    code = export_cli.run(["--from", engine, f"exports/{engine}/{name}", "--num-nodes", "2"])

    assert code == 0
    # what reduces once per step is the distributed optimizer there
    read = replace(UNIFORM, default_dp_type="zero1") if engine == "megatron" else UNIFORM
    assert read_strategy(json.loads(capsys.readouterr().out)) == read


def test_imported_plan_is_priced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The strategy file of --from --out is one that --evaluate prices."""
    assert export("uniform.json", "--to", "megatron") == 0
    found = ("--from", "megatron", "exports/megatron/launch.sh")
    # it sources the file with the flags, which lies beside it
    assert export_cli.run([*found, "--num-nodes", "2"]) == 0
    source = ("--from", "megatron", "exports/megatron/megatron_args.sh", "--num-nodes", "2")
    assert export_cli.run([*source, "--out", "read.json"]) == 0
    capsys.readouterr()

    code = cli.run(
        ["--evaluate", "read.json", "--model", "model.json", "--hardware", "a100-80gb:2x8"]
    )

    assert code == 0
    assert "Verdict    fits" in capsys.readouterr().out


GLOBAL = """runtime:
  parallel:
    pp_deg: 2
    global_tp_deg: 2
    global_tp_consec: 0
    sdp: 1
    global_checkpoint: 1
    pipeline_type: pipedream_flush
    default_dp_type: zero2
    galvatron_config_path: null
    vocab_tp: 4
    vocab_sdp: 1
    use_ulysses: false
  model:
    num_layers: 7
  train:
    global_batch_size: 32
    chunks: -1
"""


def test_global_mode_is_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One strategy for all layers, the rest on the last stage, a quarter of the local batch."""
    (folder / "train_dist.yaml").write_text(GLOBAL, encoding="utf-8")

    assert export_cli.run(["--from", "galvatron", "train_dist.yaml", "--world-size", "16"]) == 0

    out, err = capsys.readouterr()
    assert read_strategy(json.loads(out)) == Plan(
        world_size=16,
        num_stages=2,
        stage_sizes=(3, 4),
        layers=(LayerStrategy(tp=2, zero3=True, checkpoint=True),) * 7,
        vocab=VocabStrategy(tp=4, zero3=True),
        global_batch=32,
        num_microbatches=1,  # ceil(32 / 8 / 4)
        default_dp_type="zero2",
    )
    assert "global_tp_consec" in err


def test_older_flags_are_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The shell form of v2.x, whose GLOBAL mode has strided groups."""
    script = folder / "train_dist.sh"
    script.write_text(
        'export NUM_NODES=2\nLAUNCHER="python3 -m torch.distributed.launch '
        '--nnodes ${NUM_NODES} --nproc_per_node 8"\n'
        'ARGS="\n    --pp_deg 2 \\\n    --global_tp_deg 2 --global_tp_consec 0 --chunks 4 \\\n'
        '    --num_hidden_layers 8 --global_train_batch_size 64 --default_dp_type zero2"\n'
        "${LAUNCHER} train_dist.py ${ARGS}\n",
        encoding="utf-8",
    )

    assert export_cli.run(["--from", "galvatron", str(script)]) == 0

    plan = read_strategy(json.loads(capsys.readouterr().out))
    assert plan.layers == (LayerStrategy(tp=2, strided=True),) * 8
    assert (plan.world_size, plan.num_microbatches) == (16, 4)


def test_every_engine_says_what_one_plan_loses(
    golden: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """The heterogeneous plan on all engines: the losses as they are printed."""
    one_stage = replace(HETEROGENEOUS, num_stages=1, stage_sizes=(8,), num_microbatches=1)
    Path("one.json").write_text(strategy_text(one_stage), encoding="utf-8")
    lines = []
    for engine in EXPORTERS:
        for name in ("mixed.json", "one.json"):
            capsys.readouterr()
            code = export(name, "--to", engine, "--num-nodes", "2", "--out", "none")
            err = capsys.readouterr().err
            lines += [f"$ autopar-export {name} --to {engine}  # exit {code}", err]

    golden("export_losses.txt", "\n".join(lines))  # type: ignore[operator]


def test_change_of_memory_names_the_stage(capsys: pytest.CaptureFixture[str]) -> None:
    """The sentence takes the stage that grows most."""
    from search.planning.session import open_session
    from search.request.options import SearchOptions
    from search.request.request import InputSpec

    session = open_session(InputSpec(model="model.json", hardware="a100-80gb:2x8"), SearchOptions())
    before = session.planner.evaluate(UNIFORM)
    stages = tuple(
        replace(stage, reserved_bytes=stage.reserved_bytes + stage.stage * 2**30)
        for stage in before.stages
    )
    after = replace(before, step_time_s=before.step_time_s * 1.041, stages=stages)

    assert change_sentence(before, after) == "+4.1 % time, +1.0 GiB on stage 1"
    assert change_sentence(after, after) == "+0.0 % time, same memory"
    assert change_sentence(after, before) == "-3.9 % time, -1.0 GiB on stage 1"


SCRIPT = """#!/bin/bash
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 \\
    --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention \\
    --num-query-groups 8 --seq-length 4096 --max-position-embeddings 8192 \\
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \\
    --untie-embeddings-and-output-weights --vocab-size 128256 --micro-batch-size 1 \\
    --global-batch-size 64 --tensor-model-parallel-size {tp} --sequence-parallel --bf16 \\
    --use-distributed-optimizer --use-flash-attn --lr 1e-4 --train-iters 10
"""
CLUSTER = ("--hardware", "h100:1x8")


@pytest.fixture
def script(folder: Path) -> Path:
    """Return the path of a script that starts eight ranks of Llama 3 8B."""
    path = folder / "run.sh"
    path.write_text(SCRIPT.format(tp=4), encoding="utf-8")
    return path


@pytest.mark.parametrize("engine", ["megatron", "megatron-bridge", "torchtitan"])
def test_a_launch_script_is_exported(
    engine: str, script: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check, explain and compare read it, too, and its degrees are those of the script."""
    out = folder / "out"
    arguments = [str(script), *CLUSTER, "--to", engine, "--out", str(out), "--json", "-"]
    assert export_cli.run([*arguments, "--allow-approx"]) == 0
    answer = json.loads(capsys.readouterr().out)

    assert answer["status"] == "exported"
    assert answer["engine"] == engine
    texts = "".join(Path(name).read_text(encoding="utf-8") for name in answer["files"])
    assert {
        "megatron": "--tensor-model-parallel-size 4",
        "megatron-bridge": "tensor_model_parallel_size=4",
        "torchtitan": "tensor_parallel_degree=4",
    }[engine] in texts


@pytest.mark.parametrize("engine", ["megatron", "megatron-bridge"])
def test_an_export_to_the_same_kernels_prints_the_estimate(
    engine: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron-Bridge trains with the layers of Megatron-LM, so nothing changes."""
    assert export_cli.run([str(script), *CLUSTER, "--to", engine, "--out", "none"]) == 0
    assert "\n  Step time " in capsys.readouterr().out


def test_arguments_in_a_json_file_are_exported(
    script: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A JSON file of an engine is no plan file, and not refused as one."""
    words = SCRIPT.format(tp=4).split("pretrain_gpt.py")[1].replace("\\\n", " ").split()
    arguments: dict[str, object] = {}
    for at, word in enumerate(words):
        if word.startswith("--"):
            value = words[at + 1] if at + 1 < len(words) else "--"
            arguments[word] = True if value.startswith("--") else value
    path = folder / "arguments.json"
    path.write_text(json.dumps({"MODEL_ARGS": arguments}), encoding="utf-8")

    assert export_cli.run([str(path), *CLUSTER, "--to", "megatron", "--out", "none"]) == 0
    assert "--nproc-per-node 8" in capsys.readouterr().out


def test_an_engine_file_needs_the_engine_of_the_export(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that was not named gets no files."""
    assert export_cli.run([str(script), *CLUSTER]) == 2
    assert "--to" in capsys.readouterr().err


@pytest.mark.parametrize("engine", [(), ("--to", "megatron")])
def test_a_missing_file_is_named_first(
    engine: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Before an option is asked for that could not help."""
    assert export_cli.run(["nofile.json", *engine]) == 2
    found = capsys.readouterr().err
    assert "nofile.json" in found
    assert "--to" not in found


@pytest.mark.parametrize("engine", ["megatron", "torchtitan"])
def test_a_launch_that_does_not_fit_is_refused(
    engine: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused like a plan; with --allow-approx it is written with a warning."""
    script.write_text(
        SCRIPT.format(tp=1).replace("--use-distributed-optimizer", ""), encoding="utf-8"
    )
    arguments = [str(script), *CLUSTER, "--to", engine, "--out", "none"]
    assert export_cli.run(arguments) == INFEASIBLE
    refused = capsys.readouterr()
    assert refused.out == ""
    assert "OOM probability" in refused.err
    assert f"--engine {engine}" in refused.err

    assert export_cli.run([*arguments, "--allow-approx"]) == 0
    assert "WARNING" in capsys.readouterr().err
