"""PaddleNLP's flow: its search script as written, the plan, the export, and the launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.warm import command

pytestmark = pytest.mark.whole

MIB = 2.0**20
HIDDEN, FFN, VOCAB, LAYERS, SEQ = 5120, 25600, 32000, 72, 32768
DEGREES = (1, 2, 4, 8)
GROUPS = (2, 4, 8, 16, 32, 64)
SHAPE = "8nodes_8gpus_per_node.json"
SEARCH_DIST = """
    --time_profile_mode sequence \\
    --memory_profile_mode static \\
    --num_layertype 1 \\
    --hidden_size_list 5120 \\
    --layernum_list 72 \\
    --seqlen_list 32768 \\
    --profile_gpu_num 64 \\
    --time_profile_data_path ./configs/computation_profiling_bf16_llama_rank[0].json \\
    --memory_profile_data_path ./configs/memory_profiling_bf16_llama.json \\
    --overlap_coe_path ./configs/overlap_coefficient.json \\
    --allreduce_coe_path ./configs/allreduce_bandwidth_8nodes_8gpus_per_node.json \\
    --p2p_coe_path ./configs/p2p_bandwidth_8nodes_8gpus_per_node.json \\
    --sp_time_path ./configs/sp_time_8nodes_8gpus_per_node.json \\
    --search_granularity fine-grained \\
    --world_size 64 \\
    --min_bsz 64 \\
    --max_bsz 64 \\
    --bsz_step 1 \\
    --max_tp_size 8 \\
    --max_pp_size 8 \\
    --mixed_precision_type bf16 \\
    --memory_upper_limit 95 \\
    --sp_space tp \\
    --layernum 72 \\
    --disable_sdp 0 \\
    --disable_vtp 0 \\
    --parallel_search 0 \\
    --log_dir ./search-engine-logs
"""
"""Arguments of PaddleNLP's search_dist.sh, as written there."""
LINE = SEARCH_DIST.replace("\\\n", " ").split()


def other_memory(states: float, activation: float) -> dict[str, Any]:
    """Return the table of embedding and head, MiB; both are divided by the vocabulary degree."""
    tables = {"model_states": states, "activation": activation}
    return {
        str(SEQ): {name: {str(n): v / n for n in DEGREES} for name, v in tables.items()},
    }


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the working folder of the documented line."""
    folder = tmp_path_factory.mktemp("paddlenlp")
    write_configs(folder)
    return folder


def write_configs(folder: Path) -> None:
    """Write made-up figures with PaddleNLP's file names and keys into `configs`."""
    (folder / "configs").mkdir()
    layer = 2.25 * HIDDEN**2 + 3 * HIDDEN * FFN
    embedding, saved = 2 * VOCAB * HIDDEN / MIB, 34 * HIDDEN * SEQ / MIB
    times = {}
    for length in (4096, 8192, 12288, 16384):
        layer_ms = (2 * layer * length + 4 * length**2 * HIDDEN) / 4e11
        other_ms = 2 * VOCAB * HIDDEN * length / 4e11
        times |= {f"layernum[{n}]_bsz1_seq{length}": other_ms + n * layer_ms for n in (1, 2)}
        times |= {f"layertype_0_bsz1_seq{length}": layer_ms}
        times |= {f"layertype_other_bsz1_seq{length}": other_ms}
    raw = {f"layernum[{n}]_bsz8_seq{SEQ}_first_ms": 1000.0 * n for n in (1, 2)}
    memory = {
        "1_1_8_False": raw,
        "1_1_8_True": raw,
        "layertype_0": {
            str(SEQ): {
                "parameter_size": 2 * layer / MIB,
                "tp_activation_per_bsz_dict": {
                    **{str(n): saved / n for n in DEGREES},
                    "checkpoint": 2 * HIDDEN * SEQ / MIB,
                },
            }
        },
        "other_memory_pp_off": other_memory(18 * embedding, 6 * VOCAB * SEQ / MIB),
        "other_memory_pp_on_first": other_memory(9 * embedding, 2 * HIDDEN * SEQ / MIB),
        "other_memory_pp_on_last": other_memory(9 * embedding, 6 * VOCAB * SEQ / MIB),
    }
    files = {
        "computation_profiling_bf16_llama_rank[0].json": times,
        "memory_profiling_bf16_llama.json": memory,
        "overlap_coefficient.json": {"overlap_coe": 1.2},
        f"allreduce_bandwidth_{SHAPE}": {f"allreduce_size_{n}": 240.0 - 2 * n for n in GROUPS},
        f"p2p_bandwidth_{SHAPE}": {f"pp_size_{n}": 25.0 for n in GROUPS},
        f"sp_time_{SHAPE}": {
            f"{name}_size_{n}_{size}MB_time": 0.03 + ways * (n - 1) / n * size / 150
            for name, ways in (("allreduce", 2), ("all2all", 1))
            for n in GROUPS
            for size in (2**k for k in range(11))
        },
    }
    for name, content in files.items():
        (folder / "configs" / name).write_text(json.dumps(content), encoding="utf-8")


def ran(folder: Path, name: str, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Return what a command prints in the folder, after its exit code was checked."""
    done = command(name, *words, cwd=folder).completed()
    assert done.returncode == code, done.stderr
    return done


def plan_of(folder: Path, *words: str) -> dict[str, Any]:
    """Return the answer of the documented line with further words."""
    done = ran(folder, "autopar-search", *LINE, *words, "--json", "-")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_documented_line_ends_in_a_launch(configs: Path, tmp_path: Path) -> None:
    """Its engine's rules apply by default: sequence parallelism on, no context parallelism."""
    done = ran(configs, "autopar-search", *LINE)
    assert "--engine not given; using paddlenlp" in done.stderr
    (plan,) = (configs / "configs").glob("autopar_plan_*.json")
    document = json.loads(plan.read_text(encoding="utf-8"))
    assert document["options"]["engine"] == "paddlenlp"
    assert document["options"]["sequence_parallel"] is True

    ran(configs, "autopar", "export", str(plan), "--out", str(tmp_path))
    own = json.loads((tmp_path / "fine_grained_config.json").read_text(encoding="utf-8"))
    assert own["global_batch_size"] == 64
    assert len(own["tp_size_list"].split(",")) == LAYERS
    stub = tmp_path / "python"
    stub.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    stub.chmod(0o755)
    given = {"PADDLENLP_PATH": "/paddle", "DATA_DIR": "/data", "MASTER_ADDR": "a", "NODE_RANK": "0"}
    launch = subprocess.run(
        ["bash", "launch.sh"],
        cwd=tmp_path,
        env={**os.environ, **given, "MODEL_ARGS": "--a b", "PATH": f"{tmp_path}:/bin:/usr/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    words = json.loads(launch.stdout)
    named = dict(pairwise(words))
    assert named["--sequence_parallel"] == "true"
    assert named["--fine_grained_config_path"] == "fine_grained_config.json"
    assert named["--nnodes"] == "8"


def test_given_engine_replaces_that_of_the_files(configs: Path) -> None:
    """Plans of any engine may have context parallelism, which PaddleNLP has not."""
    own, wide = plan_of(configs), plan_of(configs, "--engine", "none")
    assert set(own["plan"].get("cp_sizes_enc", "1").split(",")) == {"1"}
    assert set(wide["plan"]["cp_sizes_enc"].split(",")) != {"1"}
    assert wide["samples_per_s"] >= own["samples_per_s"]


def test_files_of_galvatron_have_no_engine(configs: Path) -> None:
    """Without PaddleNLP's raw keys nothing says which engine measured."""
    path = configs / "configs" / "memory_profiling_bf16_llama.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    other = configs / "tables.json"
    tables = {f"{k}_sp": v for k, v in content.items() if not k.startswith("1_")}
    other.write_text(json.dumps(tables), encoding="utf-8")
    line = list(LINE)
    line[line.index("--memory_profile_data_path") + 1] = str(other)
    done = ran(configs, "autopar-search", *line, "--output-config-path", "none")
    assert "paddlenlp" not in done.stderr
