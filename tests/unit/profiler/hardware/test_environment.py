"""Who takes part in a run: what is recorded, which ranks fit together, which runs compare."""

from __future__ import annotations

import json
import os
import re
from datetime import datetime
from pathlib import Path

import pytest

from autopar.errors import InputError, InstallError
from autopar.records import replace
from profiler import processes as shared_gpu
from profiler.environment import (
    METADATA,
    RankInfo,
    check_alike,
    check_torch_version,
    collect,
    comparable,
    driver_version,
    gpu_clocks,
    host_labels,
    nvidia_smi,
    rank_threads,
    recorded_environment,
    summarize_hosts,
)
from profiler.hardware.options import build_options
from profiler.hardware.record import hardware_metadata

GPU = RankInfo(
    rank=0,
    local_rank=0,
    host="a",
    machine="kernel-a",
    pid=100,
    device="NVIDIA H200",
    device_uuid="uuid-a-0",
    memory_bytes=140 << 30,
    torch="2.11.0+cu130",
    cuda="13.0",
    nccl="2.28.9",
    driver="580.95.05",
    python="3.11.7",
    cpu="some CPU",
    num_cpus=16,
    threads=None,
)
OPTIONS = build_options()


def ranks(hosts: str) -> list[RankInfo]:
    """Return one rank per letter, each on the host of that letter and on a GPU of its own."""
    return [
        replace(
            GPU,
            rank=rank,
            local_rank=hosts[:rank].count(host),
            host=host,
            machine=f"kernel-{host}",
            device_uuid=f"uuid-{host}-{hosts[:rank].count(host)}",
        )
        for rank, host in enumerate(hosts)
    ]


def complaint(infos: list[RankInfo]) -> str:
    """Return what is said about ranks that do not fit together."""
    with pytest.raises(InputError) as caught:
        check_alike(infos)
    return str(caught.value)


def test_information_survives_json() -> None:
    """A rank's description is sent to the others as JSON and comes back equal."""
    for info in (GPU, replace(GPU, device="cpu", device_uuid=None, memory_bytes=None, nccl=None)):
        assert RankInfo.from_dict(json.loads(json.dumps(info.to_dict()))) == info


def test_collect_describes_this_process() -> None:
    """On a CPU what only GPUs have is None, and the rest is this process's own."""
    torch = pytest.importorskip("torch")
    info = collect(3, 1, torch.device("cpu"))

    assert (info.rank, info.local_rank, info.pid) == (3, 1, os.getpid())
    assert info.device == "cpu"
    assert (info.device_uuid, info.memory_bytes, info.nccl, info.driver) == (None,) * 4
    assert info.torch == str(torch.__version__)
    assert info.host
    assert info.cpu
    assert info.num_cpus >= 1
    assert info.threads == torch.get_num_threads()


@pytest.mark.parametrize(("variable", "expected"), [(None, 1), ("1", 1), ("6", 6)])
def test_threads_are_those_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, expected: int
) -> None:
    """torchrun gives a rank one thread unless OMP_NUM_THREADS is set; all commands use it."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert rank_threads() == expected


@pytest.mark.parametrize("variable", ["0", "", "4,2", "all"])
def test_threads_that_are_no_number_are_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    with pytest.raises(InputError, match="OMP_NUM_THREADS"):
        rank_threads()


@pytest.mark.gpu
def test_collect_describes_a_gpu() -> None:
    """On a GPU its name, memory, uuid, driver and NCCL are known, and so are its clocks."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    info = collect(0, 0, torch.device("cuda", 0))

    assert info.device == torch.cuda.get_device_name(0)
    assert info.memory_bytes == pytest.approx(torch.cuda.mem_get_info(0)[1], rel=0.05)
    assert re.fullmatch(r"(GPU-|MIG-)?[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", info.device_uuid)
    assert re.match(r"\d+\.\d+", info.nccl)
    assert re.match(r"\d+\.\d+", info.driver)
    if nvidia_smi("-L") is not None:
        assert gpu_clocks(info.device_uuid)["sm_clock_max_hz"] > 1e8


@pytest.mark.parametrize("version", ["2.6.0", "2.7.1+cu126", "2.13.0+cpu", "3.0.0a0"])
def test_torch_is_new_enough(version: str) -> None:
    """Versions count as numbers: 2.13 is newer than 2.6."""
    check_torch_version(version)


@pytest.mark.parametrize("version", ["2.5.1", "1.13.0", "unknown"])
def test_torch_is_too_old(version: str) -> None:
    """The sentence names the version and the command that installs another one."""
    with pytest.raises(InstallError, match=r"2\.6 is needed. Run `pip install 'autopar\["):
        check_torch_version(version)


@pytest.mark.parametrize("hosts", ["a", "aa", "aabb", "abcd", "bbaa"])
def test_equal_hosts_in_rank_order_are_accepted(hosts: str) -> None:
    """Hosts with as many ranks each, one after the other, are a cluster."""
    check_alike(ranks(hosts))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("torch", "2.6.0", "torch differs between ranks: rank 3 on host b has 2.6.0, rank 0 on"),
        ("nccl", None, "NCCL differs between ranks: rank 3 on host b has none, rank 0 on host a"),
        ("cuda", "12.6", "CUDA differs between ranks: rank 3 on host b has 12.6"),
        ("device", "NVIDIA A100", "the device differs between ranks: rank 3 on host b has NVIDIA"),
    ],
)
def test_ranks_must_be_alike(field: str, value: str | None, said: str) -> None:
    """A rank with other software or another device is named with its host and both values."""
    infos = ranks("aabb")
    infos[3] = replace(infos[3], **{field: value})

    assert said in complaint(infos)
    assert complaint(infos).endswith("Use the same value on every host")


def test_hosts_must_have_as_many_ranks() -> None:
    """The arithmetic shows why unequal hosts are no cluster."""
    said = complaint(ranks("aaabb"))

    assert "host a has 3 ranks and host b has 2: 3 + 2 = 5 is not 2 * 3" in said
    assert "--nproc-per-node" in said


def test_hosts_must_be_in_rank_order() -> None:
    """A host whose ranks are scattered is named with its ranks."""
    said = complaint(ranks("abab"))

    assert "the ranks of host a (0, 2) do not follow one another, expected 0 to 1" in said


def test_two_machines_may_not_share_a_name() -> None:
    """Two kernels under one host name would count as one node; two names on one kernel may be."""
    infos = ranks("aa")
    check_alike([infos[0], replace(infos[1], host="b")])
    said = complaint([infos[0], replace(infos[1], machine="another")])

    assert "two machines are named a (those of rank 0 and rank 1)" in said


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (["a"], "a"),
        (["n1", "n2"], "n1,n2"),
        ([f"node{i:03d}" for i in range(1, 129)], "node[001-128]"),
        ([f"gpu-{i}.example" for i in range(8, 14)], "gpu-[8-13].example"),
        (["n1", "n2", "n3", "n4", "n6"], "n1,n2,n3,n4,... (5 hosts)"),
        (["red", "green", "blue", "cyan", "pink"], "red,green,blue,cyan,... (5 hosts)"),
    ],
)
def test_hosts_are_shortened(hosts: list[str], expected: str) -> None:
    """Few hosts are listed, many that count up become a range, others their number."""
    assert summarize_hosts(hosts) == expected


def test_environment_is_recorded_with_harmless_values_only() -> None:
    """Of variables that are not on the list of numbers and known words only the name is kept."""
    harmless = {
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "LL,LL128,Simple",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "OMP_NUM_THREADS": "1",
        "UCX_TLS": "rc,cuda_copy",
        "FI_PROVIDER": "efa",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NVIDIA_TF32_OVERRIDE": "0",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
    }
    private = {
        "NCCL_SOCKET_IFNAME": "=eth0",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "GPU-0a1b2c3d-0a1b-0a1b-0a1b-0a1b2c3d4e5f",
        "NCCL_HOSTID": "login1.example.org-rank0",
        "NCCL_TOPO_FILE": "somebody/topo.xml",
        "NCCL_PLUGIN_TOKEN": "t",
        "NCCL_ACCESS": "hunter2",
        "UCX_API_KEY": "k",
        "FI_PROXY": "http://user:word@proxy:80/",
        # on the list, and no known word
        "NCCL_DEBUG": "a8" * 20,
        "NCCL_NTHREADS": "${SECRET}/x",
    }
    others = {
        "HOME": "a",
        "TORCH_HOME": "b",
        "PYTORCH": "x",
        "MY_NCCL_ALGO": "T",
        "CUDA_lower": "x",
    }
    kept = recorded_environment({**harmless, **private, **others})
    assert kept == {**harmless, **dict.fromkeys(private, "(set)")}
    assert list(kept) == sorted(kept)


def test_a_variable_without_its_value_does_not_stop_a_run_from_going_on() -> None:
    """Files of earlier versions hold the value that is not stored any more."""
    key = "env.NCCL_SOCKET_IFNAME"
    assert comparable({key: "=eth0"}, {key: "(set)"}, resume=True) == []
    assert comparable({key: "(hidden)"}, {key: "(set)"}, resume=True) == []
    assert len(comparable({}, {key: "(set)"}, resume=True)) == 1
    assert len(comparable({"env.NCCL_ALGO": "Ring"}, {"env.NCCL_ALGO": "Tree"}, resume=True)) == 1


def test_hosts_have_labels_that_tell_them_apart(tmp_path: Path) -> None:
    """The same in every run of a folder, others in another, and as long as it takes."""
    labels = host_labels(["n1", "n2", "n1"], tmp_path)
    assert labels.keys() == {"n1", "n2"}
    assert all(re.fullmatch("host-[0-9a-f]{4}", label) for label in labels.values())
    assert labels == host_labels(["n2", "n1"], tmp_path)
    assert labels != host_labels(["n1", "n2"], tmp_path / "other")
    many = host_labels([f"node{i:04d}" for i in range(2000)], tmp_path)
    assert len(set(many.values())) == 2000


def test_names_of_hosts_are_recorded_where_somebody_asks() -> None:
    """Files are shared; an option stores the names as they are."""
    assert metadata(ranks("ab"), host_names=True)["hosts"] == "a,b"
    assert re.fullmatch("host-[0-9a-f]{4},host-[0-9a-f]{4}", metadata(ranks("ab"))["hosts"])


def metadata(infos: list[RankInfo], **options: object) -> dict[str, object]:
    """Return what a run of these ranks records."""
    return dict(hardware_metadata(infos, ["--out", "a b"], "nccl", replace(OPTIONS, **options)))


def test_metadata_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key is a row or a variable, every row is a key, and values are what JSON holds."""
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    found = metadata(ranks("aabb"))

    assert {key for key in found if not key.startswith("env.")} == {row.key for row in METADATA}
    assert found["env.NCCL_ALGO"] == "Ring"
    assert json.loads(json.dumps(found)) == found
    assert found["command"] == "torchrun ... -m profiler.hardware --out 'a b'"
    assert datetime.fromisoformat(str(found["time_utc"])).utcoffset().total_seconds() == 0
    assert (found["world_size"], found["num_nodes"], found["gpus_per_node"]) == (4, 2, 2)
    assert (found["device"], found["ranks_per_gpu"]) == ("NVIDIA H200", 1)
    cpu = replace(GPU, device="cpu", device_uuid=None, memory_bytes=None)
    assert metadata([cpu])["device"] == "cpu (some CPU)"
    assert metadata([cpu])["ranks_per_gpu"] is None


def test_resolved_values_are_recorded() -> None:
    """What `auto` became is recorded in its place."""
    assert hardware_metadata([GPU], [], "nccl", OPTIONS, dtype="bf16")["dtype"] == "bf16"


def test_metadata_rows_are_unique() -> None:
    """A key has one meaning."""
    assert len({row.key for row in METADATA}) == len(METADATA)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"backend": "gloo"}, "communication library (backend): nccl and gloo"),
        ({"device": "NVIDIA A100"}, "device of every rank (device): NVIDIA H200 and NVIDIA A100"),
        ({"isolated": True}, "one group at a time (isolated): false and true"),
        ({"dtype": "fp32"}, "element type of the messages (dtype): auto and fp32"),
        ({"cuda_graph": True}, "launched from CUDA graphs (cuda_graph): false and true"),
        ({"num_nodes": 4}, "number of hosts (num_nodes): 2 and 4"),
        ({"ranks_per_gpu": 2}, "most ranks on one GPU (ranks_per_gpu): 1 and 2"),
    ],
)
def test_incomparable_runs(change: dict[str, object], said: str) -> None:
    """Whatever changes what was measured is named with both values."""
    a = metadata(ranks("aabb"))

    assert comparable(a, a) == comparable(a, a, resume=True) == []
    assert comparable(a, {**a, **change}) == [said]


@pytest.mark.parametrize(
    "change", [{"nccl": "2.30.1"}, {"driver": None}, {"torch": "2.12.0"}, {"env.NCCL_ALGO": "Tree"}]
)
def test_versions_are_compared_but_not_mixed(change: dict[str, object]) -> None:
    """Other software is a reason to compare two runs, and none to put them into one file."""
    a = metadata(ranks("aabb"))
    b = {**a, **change}

    assert comparable(a, b) == []
    assert len(comparable(a, b, resume=True)) == 1
    assert next(iter(change)).removeprefix("env.") in comparable(a, b, resume=True)[0]


def test_what_makes_no_difference() -> None:
    """Time, hosts of the same kind and the level of NCCL's log stop nobody from resuming."""
    a = metadata(ranks("aabb"))
    b = {**a, "time_utc": "later", "hosts": "c,d", "env.NCCL_DEBUG": "INFO", "power_limit_w": 1.0}

    assert comparable(a, b, resume=True) == []


def test_nvidia_smi_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks come in Hz; what the tool does not know, and all of it without the tool, is None."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "$@" >&2\necho "1980, 1980, [N/A], 700.00, Enabled"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    expected = {
        "sm_clock_hz": 1.98e9,
        "sm_clock_max_hz": 1.98e9,
        "memory_clock_hz": None,
        "power_limit_w": 700.0,
        "persistence": "Enabled",
    }

    assert gpu_clocks("abc") == expected
    assert gpu_clocks(None) == dict.fromkeys(expected)
    tool.write_text("#!/bin/sh\necho 'Field is not a valid field to query.'\nexit 2\n")
    assert gpu_clocks("abc") == dict.fromkeys(expected)
    tool.unlink()
    assert gpu_clocks("abc") == dict.fromkeys(expected)
    if not Path("/sys/module/nvidia/version").exists():
        assert driver_version() is None


def test_shared_gpus_are_found() -> None:
    """Ranks count as sharing when their GPU is one device, on whatever host they say they are."""
    infos = ranks("aaaa")
    shared = [replace(info, device_uuid=f"gpu-{info.rank // 3}") for info in infos]

    assert shared_gpu.sharing(infos) == {}
    assert shared_gpu.sharing(shared) == {"gpu-0": [0, 1, 2]}
    assert shared_gpu.sharing([replace(info, device_uuid=None) for info in infos]) == {}
    said = str(shared_gpu.refusal(shared))
    assert "1 GPU" in said
    assert "--allow-shared-gpu" in said


def test_recipe_gives_every_rank_a_host_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL sees as many hosts as ranks; the loopback is for one host; the user's word counts."""
    recipes = [shared_gpu.recipe(rank, "a") for rank in range(4)]
    assert len({recipe["NCCL_HOSTID"] for recipe in recipes}) == 4
    assert recipes[0]["NCCL_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in shared_gpu.recipe(0, "a", one_host=False)

    monkeypatch.setattr(os, "environ", {"NCCL_ALGO": "Tree", "WORLD_SIZE": "4"})
    shared_gpu.apply(1, "a")
    assert os.environ["NCCL_ALGO"] == "Tree"
    assert os.environ["NCCL_HOSTID"] == recipes[1]["NCCL_HOSTID"]
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    shared_gpu.apply(1, "a")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
