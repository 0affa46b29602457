"""Documented files of the search engine: the cluster's, the model's, and the options naming them.

The source is the page of Galvatron's search engine (000). Figures are those of the laboratory's own
files; a key is shown to be read by changing it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from tests.e2e.documented_lab import (
    BASE,
    COMPUTATION,
    GPT,
    HARDWARE,
    LAYERS,
    MEMORY,
    MODEL,
    SEQ,
    SHAPE,
    Lab,
    Table,
    hardware_files,
    memory_file,
    shape,
    times,
    write,
)
from tests.e2e.profiling import CONFIG as TINY
from tests.warm import ROOT

TABLE = Table("000")
TRIAL = Table("use")
"""What no page says and everybody who uses the files expects."""
ALLREDUCE, P2P = HARDWARE / f"allreduce_bandwidth_{SHAPE}", HARDWARE / f"p2p_bandwidth_{SHAPE}"
SP_TIME, OVERLAP = HARDWARE / f"sp_time_{SHAPE}", HARDWARE / "overlap_coefficient.json"
SIZES = GPT[: GPT.index("--time_profiling_path")]
STAGES = ("--pin", "pp=2", "--pin", "tp=2")
SHARDED = (
    *("--pin", "pp=1", "--pin", "tp=2", "--pin", "zero3=0", "--default_dp_type", "zero2"),
    *("--memory_constraint", "40", "--settle_bsz", "8"),
)
MEASURE = (
    *("--backend", "gloo", "--sizes", "1M:2M:x2", "--reference-size", "1M", "--max-seconds"),
    *("0.05", "--iters", "3", "--warmup", "1"),
)
SHORT = ("--device", "cpu", "--dtype", "fp32", "--max-seconds", "0.02", "--iters", "3")


def at_layers(lab: Lab, file: Path, *keys: str) -> dict[str, float]:
    """Return a table inside a memory file."""
    content = lab.load(file)
    for key in keys:
        content = content[key]
    return dict(content)


@TABLE.works("search engine usable standalone, without a training runtime")
def _(lab: Lab) -> None:
    """A new interpreter that cannot import torch nor the profilers plans the hand-written files."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
        "sys.modules['torch'] = sys.modules['profiler'] = None; "
        "from autopar.cli import search; search()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *GPT, *BASE, "--output_config_path", "none"],
        cwd=lab.folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"custom ({LAYERS} layers)" in done.stdout


@TABLE.works("used together with a runtime (profile -> search -> train)", "ranks")
def _(lab: Lab) -> None:
    """Two processes measure, the model is measured, a plan is found and run as it was priced."""
    lab = lab.fresh()
    write(lab.path("tiny", "config.json"), TINY)
    lab.ranks(2, "profiler.hardware", "--out", "hw", *MEASURE, "allreduce", "p2p")
    write(lab.path("hw", "overlap_coefficient.json"), {"overlap_coe": 1.1})
    lab.torch(
        *("profile-model", "--model", "tiny/config.json", "--mode", "batch", "--bsz", "1,2"),
        *("--seq", "64", "--out", "pm", *SHORT),
    )
    lab.ask(
        *("autopar-search", "--model", "tiny/config.json", "--seq_length", "64"),
        *("--hardware", "hw", "--time_profiling_path", "pm", "--memory_profiling_path", "pm"),
        *("--mixed_precision", "fp32", "--settle_bsz", "4", "--output_config_path", "s.json"),
    )
    done = lab.ranks(2, "profiler.plan", "autopar_plan_s.json", "--json", "run.json")
    assert done.code == 0
    found = lab.load("run.json")
    assert found["reference"]["matches"] is True


@TABLE.works("`profile_hardware/hardware_configs` folder as input")
def _(lab: Lab) -> None:
    """One option names the folder, the other files are found beside."""
    words = [*SIZES, "--time_profiling_path", MODEL, "--memory_profiling_path", MODEL]
    one = lab.found(*words, "--allreduce_bandwidth_config_path", HARDWARE, *BASE)
    assert one["plan"] == lab.search(*BASE)["plan"]


@TABLE.works(
    "that folder and `models/{name}/configs` found without path options (documented locations)",
    "ranks",
)
def _(lab: Lab) -> None:
    """Both documented folders, and those of this project's profilers, are read and said."""
    plan = lab.search(*BASE)["plan"]
    measured = ("--time_profiling_path", MODEL, "--memory_profiling_path", MODEL)
    assert lab.found(*SIZES, *measured, *BASE)["plan"] == plan
    answer = lab.ask("autopar-search", "--model", "gpt", *SIZES, *BASE, "--json", "-", *NO_FILES)
    assert answer.data["plan"] == plan
    assert f"using the hardware of {HARDWARE}" in answer.err
    assert f"times and memory of {MODEL}" in answer.err
    lab = lab.fresh()
    write(lab.path("tiny", "config.json"), TINY)
    lab.path(HARDWARE).rename(lab.path("elsewhere"))
    lab.torch("profile-model", "--model", "tiny/config.json", *SHORT, "--tp", "1,2")
    lab.ranks(2, "profiler.hardware", *MEASURE)
    answer = lab.ask(
        *("autopar-search", "--model", "tiny/config.json", "--mixed_precision", "fp32"),
        *("--settle_bsz", 4, "--json", "s.json"),
    )
    assert "1 x 2 GPUs" in answer.out
    folder = "models/tiny/configs"
    said = f"times of {folder}/cpu and memory of {folder}"
    assert said in answer.err
    used = lab.load("s.json")["defaults_used"]
    assert any(said in line for line in used)
    assert any(line.startswith("--hardware hardware (") for line in used)
    (path,) = lab.path("configs").glob("autopar_plan_*.json")
    assert lab.ask("autopar-explain", path).err.count("autopar-explain: ") == 1  # the length


@TABLE.works("allreduce_bandwidth_{N}nodes_{G}gpus_per_node.json read")
def _(lab: Lab) -> None:
    answer = lab.ask("autopar-search", *GPT, *BASE, *NO_FILES, "--verbose")
    assert str(ALLREDUCE) in answer.out
    missing = lab.without(ALLREDUCE).found(*GPT, *BASE, expected=2)
    assert ALLREDUCE.name in missing


@TABLE.works("key allreduce_size_{g}_consec_1")
def _(lab: Lab) -> None:
    key = "allreduce_size_2_consec_1"
    alone = lab.without(SP_TIME)
    fast = alone.rate(*SHARDED)
    slow = lab.without(SP_TIME)
    write(slow.path(ALLREDUCE), {**lab.load(ALLREDUCE), key: 16.0})
    assert slow.rate(*SHARDED) < 0.8 * fast
    # times by message size do not stand in for it, and what contradicts is said
    beside = lab.changed(ALLREDUCE, times(key, 0.1))
    whole = ("--pin", "tp=1", "--pin", "pp=1")
    of_all = lab.changed(ALLREDUCE, times("allreduce_size_8_consec_1", 0.05))
    assert of_all.rate(*whole) < 0.8 * lab.rate(*whole)
    answer = beside.ask("autopar-search", *GPT, *BASE, *NO_FILES, "--verbose")
    assert f"contradiction: in {ALLREDUCE.name} {key} is 16 GB/s" in " ".join(answer.out.split())


@TABLE.works("key allreduce_size_{g}_consec_0")
def _(lab: Lab) -> None:
    fast = lab.without(SP_TIME)
    slow = lab.without(SP_TIME)
    write(slow.path(ALLREDUCE), {**lab.load(ALLREDUCE), "allreduce_size_4_consec_0": 12.0})
    assert slow.rate(*SHARDED) == pytest.approx(31.867, rel=1e-3)
    assert fast.rate(*SHARDED) == pytest.approx(68.020, rel=1e-3)


@TABLE.works("group_size keys 2..world, consec_0 omitted for world")
def _(lab: Lab) -> None:
    lab = lab.fresh()
    hardware_files(lab.path(HARDWARE), 2, 8)
    keys = set(lab.load(HARDWARE, "allreduce_bandwidth_2nodes_8gpus_per_node.json"))
    assert "allreduce_size_16_consec_1" in keys
    assert "allreduce_size_16_consec_0" not in keys
    found = lab.search(*BASE, "--num_nodes", 2, "--num_gpus_per_node", 8)
    assert shape(found)["world_size"] == 16


@TABLE.works("p2p_bandwidth file, key pp_size_{n}")
def _(lab: Lab) -> None:
    slow = lab.changed(P2P, times("pp_size_2", 0.1))
    assert slow.rate(*STAGES) == pytest.approx(61.707, rel=1e-3)
    assert lab.rate(*STAGES) == pytest.approx(62.350, rel=1e-3)


@TABLE.works("overlap_coefficient.json, overlap_coe")
def _(lab: Lab) -> None:
    rates = [
        lab.changed(OVERLAP, lambda file, value=value: file.update(overlap_coe=value)).rate()
        for value in (1.0, 1.15, 1.3)
    ]
    assert rates == pytest.approx([67.564, 65.006, 63.506], rel=1e-3)


@TABLE.works("sp_time file: allreduce_size_{g}_{m}MB_time")
def _(lab: Lab) -> None:
    slow = lab.changed(SP_TIME, times("allreduce", 10.0))
    assert slow.rate() == pytest.approx(59.499, rel=1e-3)
    pins = ("--pin", "tp=2", "--pin", "pp=1", "--pin", "vtp=2")
    slower = lab.changed(SP_TIME, times("allreduce", 2.0))
    assert lab.rate(*pins) == pytest.approx(64.688, rel=1e-3)
    assert slower.rate(*pins) == pytest.approx(60.216, rel=1e-3)


@TABLE.works("sp_time file: all2all_size_{g}_{m}MB_time")
def _(lab: Lab) -> None:
    ulysses = (
        *("--sp_space", "tp+sp", "--pin", "ulysses=1", "--pin", "zero3=0", "--pin", "pp=1"),
        *("--memory_constraint", "60", "--settle_bsz", "8"),
    )
    slow = lab.changed(SP_TIME, times("all2all", 2.0))
    assert slow.rate(*ulysses) == pytest.approx(59.292, rel=1e-3)
    assert lab.rate(*ulysses) == pytest.approx(63.253, rel=1e-3)


@TABLE.works("sp_time only needed for tp+sp")
def _(lab: Lab) -> None:
    lab = lab.without(SP_TIME)
    assert shape(lab.search(*BASE))["ulysses"] == {0}
    said = lab.said(*BASE, "--sp_space", "tp+sp", expected=2)
    assert "there are none (--sp-time-path is not given)" in said
    assert "Create it with `torchrun -m profiler.hardware`" in said


@TABLE.works("sp_time with few message sizes")
def _(lab: Lab) -> None:
    few = {
        key: value for key, value in lab.load(SP_TIME).items() if "_1MB" in key or "_16MB" in key
    }
    assert len(few) == 12
    lab = lab.fresh()
    write(lab.path(SP_TIME), few)
    assert lab.rate("--sp_space", "tp+sp") == pytest.approx(64.706, rel=1e-3)


@TABLE.works("bus bandwidth unit (GB/s; Galvatron MiB/ms)")
def _(lab: Lab) -> None:
    """A MiB per millisecond is 1.048576 GB/s."""
    lab = lab.without(SP_TIME)
    plain = lab.search(*BASE, "--settle_bsz", 8)
    faster = lab.search(*BASE, "--settle_bsz", 8, "--bandwidth_unit", "MiB/ms")
    assert faster["samples_per_s"] > plain["samples_per_s"]
    scaled = lab.fresh()
    scaled.path(SP_TIME).unlink()
    for file in (ALLREDUCE, P2P):
        write(scaled.path(file), {k: v * 1.048576 for k, v in lab.load(file).items()})
    assert scaled.rate("--settle_bsz", 8) == pytest.approx(faster["samples_per_s"], rel=1e-12)


def measured(lab: Lab, *operations: str, num_ranks: int = 2) -> Lab:
    """Return a laboratory where ranks have measured operations into `hw`."""
    lab = lab.fresh()
    lab.ranks(num_ranks, "profiler.hardware", "--out", "hw", *MEASURE, *operations)
    return lab


@TABLE.works("hardware profiler writes allreduce file with exact keys", "ranks")
def _(lab: Lab) -> None:
    lab = measured(lab, "allreduce", num_ranks=4)
    found = lab.load("hw", "allreduce_bandwidth_1nodes_4gpus_per_node.json")
    assert set(found) == {
        f"allreduce_size_{key}" for key in ("4_consec_1", "2_consec_1", "2_consec_0")
    }
    assert all(value > 0.0 for value in found.values())


@TABLE.works("hardware profiler writes p2p file", "ranks")
def _(lab: Lab) -> None:
    lab = measured(lab, "p2p", num_ranks=4)
    found = lab.load("hw", "p2p_bandwidth_1nodes_4gpus_per_node.json")
    assert set(found) == {"pp_size_2", "pp_size_4"}


@TABLE.works("hardware profiler writes overlap file", "ranks")
def _(lab: Lab) -> None:
    """The largest slowdown of the cells that overlapped; without one, no file and an error.

    Where processes share cores a cell may not overlap; it is measured again.
    """
    lab = lab.fresh()
    words = ("--out", "hw", *MEASURE, "overlap", "--resume")
    from tests.e2e.launching import Copies

    name = "overlap_coefficient.json"
    for _ in range(3):
        with Copies.of(2, "profiler.hardware", *words, cwd=lab.folder) as copies:
            done = copies.wait(120.0)
        if lab.path("hw", name).exists():
            break
        assert done.rank_code != 0
        assert "overlap_" in done.stderr
    else:
        pytest.skip("nothing overlapped on this machine in three runs")
    cells = {
        cell["key"]: cell
        for run in lab.load("hw", f"{name}.meta.json")["runs"]
        for cell in run["measurements"]
        if cell["operation"].startswith("overlap_") and cell["status"] == "ok"
    }
    slowdowns = [
        median(cell["samples_s"][f"{lane}_overlapped"]) / median(cell["samples_s"][f"{lane}_alone"])
        for cell in cells.values()
        for lane in ("compute", "communication")
    ]
    expected = min(max(1.0, *slowdowns), 10.0)
    assert lab.load("hw", name) == {"overlap_coe": pytest.approx(expected)}


@TABLE.works("hardware profiler writes sp_time file, 1..1024 MB", "ranks")
def _(lab: Lab) -> None:
    lab = measured(lab, "allreduce", "all2all")
    found = lab.load("hw", "sp_time_1nodes_2gpus_per_node.json")
    assert set(found) == {
        f"{operation}_size_2_{mb}MB_time" for operation in ("allreduce", "all2all") for mb in (1, 2)
    }
    # the default sizes, 64 KiB to 1 GiB, hold the documented ones, 1 to 1024 MB
    said = lab.ranks(2, "profiler.hardware", "allreduce", "--backend", "gloo", "--dry-run").stdout
    (row,) = (line.split() for line in said.splitlines() if line.startswith("allreduce"))
    assert row[:4] == ["allreduce", "2", "consecutive", "15"]


@TABLE.works("names for several nodes ({N}nodes_{G}gpus)")
def _(lab: Lab) -> None:
    from autopar.documents.hardware import hardware_file_name

    names = [hardware_file_name(kind, 2, 8) for kind in ("allreduce", "p2p", "overlap", "sp_time")]
    assert names == [
        "allreduce_bandwidth_2nodes_8gpus_per_node.json",
        "p2p_bandwidth_2nodes_8gpus_per_node.json",
        "overlap_coefficient.json",
        "sp_time_2nodes_8gpus_per_node.json",
    ]


@TABLE.works(
    "`models/{model}/configs` folder and "
    "computation_/memory_profiling_{prec}_hidden_{H}_head_{A}.json"
)
def _(lab: Lab) -> None:
    out = lab.ask("autopar-search", *GPT, *BASE, *NO_FILES, "--verbose").out
    assert f"computation: {MODEL / COMPUTATION}" in out
    assert f"memory: {MODEL / MEMORY}" in out


@TABLE.works("bf16 / fp16 / fp32 in the file name")
def _(lab: Lab) -> None:
    said = lab.said(*BASE, "--mixed_precision", "fp16", expected=2)
    assert f"expected {COMPUTATION.replace('bf16', 'fp16')}" in said
    lab = lab.fresh()
    for name in (COMPUTATION, MEMORY):
        for precision in ("fp16", "fp32"):
            content = lab.load(MODEL, name)
            write(lab.path(MODEL, name.replace("bf16", precision)), content)
    assert lab.rate("--mixed_precision", "fp16") == lab.rate()
    assert lab.rate("--mixed_precision", "fp32") < lab.rate()  # all messages are twice as large


@TABLE.works("computation key layertype_{t}_bsz{b}_seq{s}")
def _(lab: Lab) -> None:
    slow = lab.changed(MODEL / COMPUTATION, times(f"layertype_0_bsz8_seq{SEQ}", 2.0))
    assert slow.rate() == pytest.approx(34.622, rel=1e-3)
    renamed = lab.fresh()
    keys = (f"layertype_{kind}_bsz8_seq{2 * SEQ}" for kind in ("0", "other"))
    write(renamed.path(MODEL, COMPUTATION), dict.fromkeys(keys, 1.5))
    assert f"sequence length {SEQ} (measured: {2 * SEQ})" in renamed.said(*BASE, expected=2)


@TABLE.works("time is forward per layer (per sample)")
def _(lab: Lab) -> None:
    """On one stage without tensor parallelism: 24 layers of 1.5 ms for 4 samples a GPU."""
    one = ("--search_space", "dp", "--memory_constraint", "80", "--settle_chunk", "1")
    (stage,) = lab.planned(*one, "--settle_bsz", "32")["prediction"]["stages"]
    assert stage["time_s"]["forward"] == pytest.approx(LAYERS * 1.5e-3 * 4)


@TABLE.works("layer types 0 and 1 (T5 encoder, decoder)")
def _(lab: Lab) -> None:
    lab = lab.fresh()
    folder = Path("models") / "t5" / "configs"
    name = "hidden_1024_head_16.json"
    write(
        lab.path(folder, f"computation_profiling_bf16_{name}"),
        {
            "layertype_0_bsz8_seq512": 1.0,
            "layertype_1_bsz8_seq128": 0.5,
            "layertype_other_bsz8_seq[512,128]": 0.4,
        },
    )
    source = memory_file(lengths=(512,))
    (entry,) = source["layertype_0_sp"].values()
    tables = {key: {"512,128": table["512"]} for key, table in source.items() if "other" in key}
    types = {"layertype_0_sp": {"512": entry}, "layertype_1_sp": {"128": entry}}
    write(lab.path(folder, f"memory_profiling_bf16_{name}"), types | tables)
    words = [
        *("--num_layers", "12,12", "--hidden_size", "1024", "--num_attention_heads", "16"),
        *("--seq_length", "512,128", "--time_profiling_path", folder),
        *("--memory_profiling_path", folder, "--allreduce_bandwidth_config_path", HARDWARE),
    ]
    assert shape(lab.found(*words, *BASE))["layers"] == 24


@TABLE.works("memory: layertype_{t}, layertype_{t}_sp")
def _(lab: Lab) -> None:
    said = lab.said(*BASE, "--no-sequence-parallel", expected=2)
    assert "key 'layertype_0': this key is missing" in said
    lab = lab.fresh()
    write(lab.path(MODEL, MEMORY), memory_file("") | memory_file())
    assert lab.rate() == pytest.approx(65.006, rel=1e-3)
    assert lab.rate("--no-sequence-parallel") == pytest.approx(68.241, rel=1e-3)


@TABLE.works("memory: sequence-length level")
def _(lab: Lab) -> None:
    plain = lab.rate()
    lab = lab.fresh()
    write(lab.path(MODEL, MEMORY), memory_file(lengths=(512, SEQ, 2048)))
    assert lab.rate() == plain
    write(lab.path(MODEL, MEMORY), memory_file(lengths=(512, 2048)))
    # other words than before, whose answer is known
    said = lab.said(*BASE, "--top", "4", expected=2)
    assert f"{SEQ}" in said


@TABLE.works("memory: parameter_size")
def _(lab: Lab) -> None:
    """Twice the parameters, 4 bytes each: their states are 18 bytes each, with gradients of 4."""

    def grow(file: dict[str, dict[str, dict[str, float]]]) -> None:
        file["layertype_0_sp"][str(SEQ)]["parameter_size"] *= 2.0

    one = ("--search_space", "dp", "--memory_constraint", "200")
    before = lab.search(*BASE, *one)["memory"][0]["allocated_bytes"]
    after = lab.changed(MODEL / MEMORY, grow).search(*BASE, *one)["memory"][0]["allocated_bytes"]
    size_mib = at_layers(lab, MODEL / MEMORY, "layertype_0_sp", str(SEQ))["parameter_size"]
    assert after - before == pytest.approx(LAYERS * 18 / 4 * size_mib * 2**20, rel=1e-6)
    bf16 = (*BASE, *one, "--no-fp32-gradients")
    before = lab.search(*bf16)["memory"][0]["allocated_bytes"]
    after = lab.changed(MODEL / MEMORY, grow).search(*bf16)["memory"][0]["allocated_bytes"]
    assert after - before == pytest.approx(LAYERS * 16 / 4 * size_mib * 2**20, rel=1e-6)


@TABLE.works("memory: tp_activation_per_bsz_dict with checkpoint,1,2,..")
def _(lab: Lab) -> None:
    path = ("layertype_0_sp", str(SEQ))

    def drop(file: dict[str, dict[str, dict[str, dict[str, float]]]]) -> None:
        del file[path[0]][path[1]]["tp_activation_per_bsz_dict"]["checkpoint"]

    words = (*BASE, "--memory_constraint", "13", "--disable_tp", 1)
    with_it = shape(lab.search(*words))
    without = shape(lab.changed(MODEL / MEMORY, drop).search(*words))
    assert with_it["ckpt"] == {0, 1}
    assert without["ckpt"] == {0}
    assert without["rate"] < with_it["rate"]

    def double(file: dict[str, dict[str, dict[str, dict[str, float]]]]) -> None:
        file[path[0]][path[1]]["tp_activation_per_bsz_dict"]["checkpoint"] *= 2.0

    pins = [word for pin in ("tp=1", "pp=1", "m=1", "vtp=1", "ckpt=1") for word in ("--pin", pin)]
    words = (*BASE, *pins, "--pin", "zero3=0", "--memory_constraint", "60")
    kept, more = (
        one.search(*words)["memory"][0]["allocated_bytes"]
        for one in (lab, lab.changed(MODEL / MEMORY, double))
    )
    # 4 MiB more for each layer and each of the 4 samples of a GPU
    assert more - kept == LAYERS * 4 * 4 * 2**20


def _other_row(feature: str, key: str, *words: str, stage: int = 0) -> None:
    """Add a row: a GiB more per sample in a table around the layers is found on its stage."""

    @TABLE.works(feature)
    def _(lab: Lab) -> None:
        def grow(file: dict[str, dict[str, dict[str, dict[str, float]]]]) -> None:
            for degree in file[key][str(SEQ)]["model_states"]:
                file[key][str(SEQ)]["model_states"][degree] += 1024.0

        room = (*words, "--memory_constraint", "200", "--pin", "vtp=1", "--pin", "vzero3=0")
        before = lab.search(*BASE, *room)
        after = lab.changed(MODEL / MEMORY, grow).search(*BASE, *room)
        grown = [
            new["allocated_bytes"] - old["allocated_bytes"]
            for old, new in zip(before["memory"], after["memory"], strict=True)
        ]
        assert before["plan"] == after["plan"]
        # the file has 16 bytes a parameter, gradients of 4 bytes make them 18; where a gradient of
        # 2 bytes is added to its sum that may be the fullest moment
        assert 18 / 16 - 1e-6 <= grown[stage] / 2.0**30 <= 20 / 16 + 1e-6
        assert sum(grown) == grown[stage]


_other_row("memory: other_memory_pp_off[_sp]", "other_memory_pp_off_sp", "--pin", "pp=1")
_other_row("memory: other_memory_pp_on_first[_sp]", "other_memory_pp_on_first_sp", *STAGES)
_other_row("memory: other_memory_pp_on_last[_sp]", "other_memory_pp_on_last_sp", *STAGES, stage=1)


@TABLE.works("memory: model_states / activation by vocabulary tp")
def _(lab: Lab) -> None:
    def only_one(file: dict[str, dict[str, dict[str, dict[str, float]]]]) -> None:
        for key in (key for key in file if key.startswith("other")):
            for table in file[key][str(SEQ)].values():
                for degree in ("2", "4", "8"):
                    del table[degree]

    found = shape(lab.changed(MODEL / MEMORY, only_one).search(*BASE))
    assert found["vtp"] == 1
    assert found["rate"] == pytest.approx(63.322, rel=1e-3)
    assert shape(lab.search(*BASE))["vtp"] == 4


def drop_degrees(suffix: str, *degrees: str) -> dict[str, object]:
    """Return a memory file whose layers lack tensor degrees."""
    file = memory_file(suffix)
    for degree in degrees:
        del file[f"layertype_0{suffix}"][str(SEQ)]["tp_activation_per_bsz_dict"][degree]
    return file


@TABLE.works("with SP the tp entries may be left out (inverse relation)")
def _(lab: Lab) -> None:
    plain = lab.search(*BASE)
    lab = lab.fresh()
    write(lab.path(MODEL, MEMORY), drop_degrees("_sp", "2", "4", "8"))
    assert lab.search(*BASE)["step_time_s"] == plain["step_time_s"]


@TABLE.works("without SP every tp has to be measured")
def _(lab: Lab) -> None:
    lab = lab.fresh()
    write(lab.path(MODEL, MEMORY), drop_degrees("", "4", "8"))
    words = (*BASE, "--no-sequence-parallel")
    assert shape(lab.search(*words))["tp"] <= {1, 2}
    said = lab.said(*words, "--pin", "tp=4", expected=3)
    assert "--pin tp=4" in said


@TABLE.different("scripts/search_dist.sh", "One command in place of a script that is edited.")
def _(lab: Lab) -> None:
    assert not list(ROOT.glob("models/*/scripts"))
    assert lab.search(*BASE)["status"] == "optimal"


NO_FILES = ("--output_config_path", "none")
FILES = {
    "--memory_profiling_path": MODEL / MEMORY,
    "--time_profiling_path": MODEL / COMPUTATION,
    "--allreduce_bandwidth_config_path": ALLREDUCE,
    "--p2p_bandwidth_config_path": P2P,
    "--overlap_coe_path": OVERLAP,
    "--sp_time_path": SP_TIME,
}


def _path_row(option: str) -> None:
    """Add a row: a file elsewhere, by its own name, and the folder that it lies in."""

    @TABLE.works(option)
    def _(lab: Lab) -> None:
        plain = lab.rate()
        lab = lab.fresh()
        own = lab.path("elsewhere", FILES[option].name)
        own.parent.mkdir()
        lab.path(FILES[option]).rename(own)
        paths = [word for name, path in FILES.items() if name != option for word in (name, path)]
        for value in ("elsewhere", Path("elsewhere") / own.name):
            words = (*SIZES, *paths, option, value, *BASE, *NO_FILES, "--verbose")
            answer = lab.ask("autopar-search", *words)
            assert f": {Path('elsewhere') / own.name}\n" in answer.out
            assert f" {plain:.5g} samples/s\n" in answer.out


for _option in FILES:
    _path_row(_option)


@TABLE.works("--output_config_path")
def _(lab: Lab) -> None:
    lab = lab.fresh()
    # what else makes the plan another one stands behind the documented name
    name = f"galvatron_config_custom_{SHAPE.removesuffix('.json')}_10GB_bf16_bsz32_*.json"
    for value, written in (("folder", f"folder/{name}"), ("own.json", "own.json")):
        lab.ask("autopar-search", *GPT, *BASE, "--output_config_path", value)
        (path,) = lab.folder.glob(written)
        assert lab.load(path)["pp_deg"] == 1
    before = sorted(lab.folder.rglob("*"))
    lab.ask("autopar-search", *GPT, *BASE, *NO_FILES)
    assert sorted(lab.folder.rglob("*")) == before


@TABLE.works("third-party profiling data")
def _(lab: Lab) -> None:
    """Files without sidecars are used, and their plan is not called an estimate."""
    lab = lab.fresh()
    lab.ask("autopar-search", *GPT, *BASE, "--output_config_path", "own.json")
    plan = lab.load("autopar_plan_own.json")
    assert plan["estimated"] is False
    assert not list(lab.folder.rglob("*.meta.json"))
    assert {Path(item["path"]).name for item in plan["inputs"]} == {
        path.name for path in FILES.values()
    }


@TABLE.works("the strategy JSON")
def _(lab: Lab) -> None:
    lab = lab.fresh()
    lab.ask("autopar-search", *GPT, *BASE)
    (path,) = lab.path("configs").glob("galvatron_config_*.json")
    assert set(lab.load(path)) == {
        *("pp_deg", "tp_sizes_enc", "tp_consecutive_flags", "dp_types_enc", "use_sp"),
        *("checkpoint", "global_bsz", "chunks", "pp_division", "pipeline_type", "vtp", "vsp"),
        *("default_dp_type", "embed_sdp", "vocab_sdp", "world_size"),
    }
    again = lab.found(*GPT, *BASE, "--evaluate", path)
    assert again["samples_per_s"] == lab.rate()


@TRIAL.works("allreduce_size_{g}_consec_0 that times by message size contradict")
def _(lab: Lab) -> None:
    slow = lab.changed(ALLREDUCE, times("allreduce_size_4_consec_0", 0.1))
    plan = slow.planned(*SHARDED)
    assert plan["samples_per_s"] < 0.7 * lab.search(*SHARDED)["samples_per_s"]


@TRIAL.works("remedy of a bandwidth that times by message size contradict")
def _(lab: Lab) -> None:
    plan = lab.changed(ALLREDUCE, times("allreduce_size_2_consec_1", 0.1)).planned(*BASE)
    assert not list(lab.folder.rglob("*.meta.json"))
    note, neighbours = plan["notes"]
    assert neighbours.startswith("suspicious: in allreduce_bandwidth_1nodes_8gpus_per_node.json")
    assert "is 16 GB/s, but sp_time_1nodes_8gpus_per_node.json" in note
    assert note.endswith("these times its sequence parallelism")
    assert "sidecar" not in note
