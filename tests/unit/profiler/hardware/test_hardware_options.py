"""Command lines of `torchrun -m profiler.hardware`: what they mean and what is said about them."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from autopar.errors import OptionError
from autopar.units import GIB, MIB, format_exact_size
from profiler.hardware.command import COMMAND
from profiler.hardware.options import (
    MAX_BYTES,
    OPERATIONS,
    Cluster,
    HardwareOptions,
    build_options,
    check_shape,
    check_world,
    divisors,
    parse_groups,
    parse_operations,
    parse_size,
    parse_sizes,
    plan_cells,
)
from tests.warm import new_interpreter

LAUNCHER = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def read(*arguments: str) -> HardwareOptions:
    """Return the options of a command line."""
    raw = COMMAND.read(arguments, lambda _: None)
    assert raw is not None
    return build_options(**raw)


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the module as a process that cannot import torch, outside torchrun unless told."""
    code = (
        "import runpy, sys\n"
        "sys.modules['torch'] = None\n"
        "runpy.run_module('profiler.hardware', run_name='__main__', alter_sys=True)"
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in LAUNCHER:
            patch.delenv(name, raising=False)
        return new_interpreter(code, *arguments, **environment)


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    """Return the message that a command left on stderr, its hint included, on one line."""
    lines = done.stderr.replace("\nhint: ", " hint: ").splitlines()
    assert len(lines) == 1, done.stderr
    assert done.stdout == ""
    return lines[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64K", 64 << 10),
        ("32m", 32 * MIB),
        ("1G", GIB),
        ("3KiB", 3 << 10),
        ("8MiB", 8 * MIB),
        ("2gib", 2 * GIB),
        (" 4096 ", 4096),
        ("128B", 128),
    ],
)
def test_size(text: str, expected: int) -> None:
    """K, M and G are powers of 1024 in every spelling; a bare number is bytes."""
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is not a size"),
        ("64KB", "'64KB'"),
        ("-1M", "'-1M'"),
        ("1.5M", "'1.5M'"),
        ("0", "'0' is 0 bytes, expected 1 to 1099511627776"),
        ("2048G", "expected 1 to 1099511627776 (1024G)"),
        ("4095", "not a whole number of elements, 4095 = 1023 * 4 + 3"),
        ("9" * 400, "is not a size"),
    ],
)
def test_bad_size(text: str, said: str) -> None:
    """An unusable size is named with its option, its arithmetic and what to write."""
    with pytest.raises(OptionError) as caught:
        parse_size(text, "--reference-size")

    assert str(caught.value).startswith("--reference-size: ")
    assert said in str(caught.value)


@given(st.integers(1, MAX_BYTES // 4))
def test_sizes_are_read_as_they_are_written(quarters: int) -> None:
    """`parse_size` reads what `format_exact_size` writes."""
    assert parse_size(format_exact_size(4 * quarters)) == 4 * quarters


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64K:256K:x2", (64 << 10, 128 << 10, 256 << 10)),
        ("64K:256K", (64 << 10, 128 << 10, 256 << 10)),
        ("1M:16M:x4", (MIB, 4 * MIB, 16 * MIB)),
        ("1M:15M:x4", (MIB, 4 * MIB)),
        ("1M:1M:x2", (MIB,)),
        ("32M", (32 * MIB,)),
        ("64M,1M,8M,1M", (MIB, 8 * MIB, 64 * MIB)),
        ("1M:4M:x2,64K", (64 << 10, MIB, 2 * MIB, 4 * MIB)),
    ],
)
def test_size_list(text: str, expected: tuple[int, ...]) -> None:
    """Ranges contain their end when a step meets it; lists are sorted and hold a size once."""
    assert parse_sizes(text) == expected


@given(st.integers(1, 2**20), st.integers(0, 2**24), st.integers(2, 9))
def test_ranges_have_no_holes(quarter: int, more: int, factor: int) -> None:
    """Every size is the factor times the one before; the first is the beginning, none is beyond."""
    low, high = 4 * quarter, 4 * (quarter + more)
    sizes = parse_sizes(f"{low}:{high}:x{factor}")

    assert sizes[0] == low
    assert sizes[-1] <= high < sizes[-1] * factor
    assert all(b == a * factor for a, b in itertools.pairwise(sizes))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1G:64K:x2", "'1G:64K:x2'"),
        ("64K:1G:x1", "the factor 'x1' never reaches the end"),
        ("64K:1G:x0", "never reaches the end"),
        ("64K:1G:2", "'2'"),
        ("64K:1G:x1.5", "'x1.5'"),
        ("64K:1G:x2:x2", "too many parts"),
        ("1M,,2M", "'' is not a size"),
        ("small", "'small'"),
    ],
)
def test_bad_size_list(text: str, said: str) -> None:
    """Reversed ranges, factors that do not grow and bad text are refused with the remedy."""
    with pytest.raises(OptionError) as caught:
        parse_sizes(text)

    assert str(caught.value).startswith("--sizes: ")
    assert said in str(caught.value)


def test_operations() -> None:
    """Each once, in the order of the table, in any spelling; none or `all` is all of them."""
    assert parse_operations(()) == parse_operations(["p2p", "all"]) == OPERATIONS
    assert parse_operations(["p2p", "all_reduce", "P2P"]) == ("allreduce", "p2p")
    assert parse_operations(["reduce-scatter", "all2all"]) == ("all2all", "reducescatter")
    with pytest.raises(OptionError, match=r"'allredcue'.*Did you mean 'allreduce'\?"):
        parse_operations(["allredcue"])


def test_groups() -> None:
    """A list is sorted and holds a size once; `all` is decided when the world is known."""
    assert parse_groups("all") is None
    assert parse_groups("8, 2,4,2") == (2, 4, 8)
    for text in ("", "2,", "2;4", "two", "-2"):
        with pytest.raises(OptionError, match="2,4,8"):
            parse_groups(text)
    with pytest.raises(OptionError, match="--groups: a group of 1"):
        parse_groups("1,2")


def test_defaults_are_those_of_the_options() -> None:
    """The command's defaults are the dataclass's, and the default sizes are 64K to 1G."""
    options = build_options()

    assert options == HardwareOptions(
        out=Path("hardware"), sizes_bytes=tuple(1 << power for power in range(16, 31))
    )


def test_options_arrive(tmp_path: Path) -> None:
    """Every option fills its field; the reference size is one of the sizes."""
    options = build_options(
        operations=["p2p"],
        out=tmp_path,
        sizes="1M,4M",
        reference_size="2M",
        iters=7,
        warmup=3,
        max_seconds=0.5,
        timeout=9.0,
        backend="NCCL",
        dtype="fp16",
        groups="2",
        isolated=True,
        check=False,
        resume=True,
        dry_run=True,
        cuda_graph=True,
        allow_shared_gpu=True,
    )

    assert options == HardwareOptions(
        operations=("p2p",),
        out=tmp_path,
        sizes_bytes=(MIB, 2 * MIB, 4 * MIB),
        reference_bytes=2 * MIB,
        groups=(2,),
        iters=7,
        warmup=3,
        max_seconds=0.5,
        timeout_s=9.0,
        backend="nccl",
        dtype="fp16",
        isolated=True,
        check=False,
        resume=True,
        dry_run=True,
        cuda_graph=True,
        allow_shared_gpu=True,
    )
    assert build_options(force=True).force


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"iters": -5}, "--iters: expected 1 to 1000000 repetitions, got -5"),
        ({"iters": 0}, "--iters: expected 1 to"),
        ({"warmup": -1}, "--warmup: expected 1 to"),
        ({"timeout": 0.0}, "--timeout: expected seconds above 0"),
        ({"timeout": float("nan")}, "--timeout: expected seconds above 0"),
        ({"max_seconds": float("inf")}, "--max-seconds: expected seconds above 0"),
        ({"backend": "ncl"}, "--backend"),
        ({"dtype": "float8"}, "--dtype: expected auto, bf16, fp16 or fp32, got 'float8'"),
        ({"resume": True, "force": True}, "--resume"),
        ({"cuda_graph": True, "backend": "gloo"}, "--cuda-graph"),
        ({"reference_size": "x"}, "--reference-size"),
    ],
)
def test_bad_options(values: dict[str, object], said: str) -> None:
    """Each unusable value and each contradiction is a sentence that names the option."""
    with pytest.raises(OptionError) as caught:
        build_options(**values)

    assert said in str(caught.value)


def test_out_is_no_file(tmp_path: Path) -> None:
    """A file cannot receive files."""
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(OptionError, match="expected a folder, got a file"):
        build_options(out=path)


def test_groups_divide_the_world() -> None:
    """The sizes of groups are checked against the number of ranks, with the arithmetic."""
    check_world(build_options(groups="2,4"), 8)
    check_world(build_options(groups="all"), 7)
    with pytest.raises(OptionError) as caught:
        check_world(build_options(groups="2,3"), 8)
    assert "3 does not divide the world size, 8 = 2 * 3 + 2. Use 2, 4, 8" in str(caught.value)
    with pytest.raises(OptionError, match="1 = 0"):
        check_world(build_options(groups="2"), 1)
    with pytest.raises(OptionError, match=r"the world size is 1. Start torchrun with"):
        check_world(build_options(operations=["p2p"]), 1)


@given(st.integers(1, 200), st.integers(2, 200))
def test_world_check_agrees_with_the_divisors(world: int, size: int) -> None:
    """A group size is refused exactly when it is no divisor."""
    options = build_options(groups=str(size))
    if size in divisors(world):
        check_world(options, world)
    else:
        with pytest.raises(OptionError):
            check_world(options, world)


def test_command_reads_every_option() -> None:
    """The application hands every option on; the dataclass's defaults are the command's."""
    assert read() == build_options()
    text = (
        "p2p overlap --sizes 1M --reference-size 2M --groups 2 --dtype fp32 --isolated --iters 9 "
        "--warmup 2 --max-seconds 1 --timeout 5 --no-check --backend gloo --allow-shared-gpu "
        "--out there --force --dry-run"
    )
    assert read(*shlex.split(text)) == build_options(
        operations=["p2p", "overlap"],
        sizes="1M",
        reference_size="2M",
        groups="2",
        dtype="fp32",
        isolated=True,
        iters=9,
        warmup=2,
        max_seconds=1.0,
        timeout=5.0,
        check=False,
        backend="gloo",
        allow_shared_gpu=True,
        out=Path("there"),
        force=True,
        dry_run=True,
    )
    assert read("--resume", "--cuda-graph") == build_options(resume=True, cuda_graph=True)


def test_help_needs_neither_torchrun_nor_torch() -> None:
    """`--help all` is on stdout, in groups, and names every option; `--help` is one screen."""
    screen = command("--help", COLUMNS="100")
    assert screen.returncode == 0, screen.stderr
    assert "torchrun --standalone" in screen.stdout
    assert len(screen.stdout.splitlines()) <= 24
    done = command("--help", "all", COLUMNS="100")

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for text in ("torchrun", "--sizes", "--allow-shared-gpu", "What to measure", "Files"):
        assert text in done.stdout
    assert command("--help", RANK="1").stdout == ""


def test_without_torchrun() -> None:
    """One sentence gives the command to type instead, with the arguments that were given."""
    done = command("all_reduce", "--dry_run", "--out", "a b")

    assert done.returncode == 2
    said = sentence(done)
    assert said.startswith("autopar: this command measures between processes hint: Run `torchrun ")
    assert "-m profiler.hardware all_reduce --dry_run --out" in said
    assert "this command measures between processes" in sentence(command(RANK="0", WORLD_SIZE="2"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--itres", "3"], "--itres"),
        (["--groups", "2"], "1 = 0 * 2 + 1"),
    ],
)
def test_bad_options_are_one_sentence(arguments: list[str], said: str) -> None:
    """Bad options end the command before torch is looked for, with exit code 2."""
    done = command(*arguments, **LAUNCHER)

    assert done.returncode == 2
    assert said in sentence(done)


@pytest.mark.whole
def test_other_ranks_keep_silent() -> None:
    """What rank 0 says of the options is not said again; the exit code is the same."""
    done = command("--iters", "0", **{**LAUNCHER, "RANK": "1", "LOCAL_RANK": "1"})

    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_bad_launcher() -> None:
    """A rank that is no number is the launcher's mistake, and named."""
    done = command(**{**LAUNCHER, "RANK": "first"})

    assert done.returncode == 2
    assert "the environment variable RANK is 'first', expected a number" in sentence(done)


def test_torch_is_missing() -> None:
    """Without torch the sentence names the command that installs it."""
    done = command(**LAUNCHER)

    assert done.returncode == 1
    assert "torch cannot be imported" in sentence(done)
    assert "`pip install 'autopar[profile]'`" in done.stderr


def test_traceback_on_request() -> None:
    """AUTOPAR_DEBUG=1 shows where an error comes from."""
    done = command("--iters", "0", **LAUNCHER, AUTOPAR_DEBUG="1")

    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "OptionError" in done.stderr


# --- documented spellings ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ({"start-mb": "16", "end-mb": "512", "scale": "2"}, "1M:1G:x2"),
        ({"start-mb": "16", "end-mb": "256", "scale": "2"}, "16M:256M:x2"),
        ({"end-mb": "8"}, "8M"),
        ({"start-mb": "1024"}, "1M:1G:x2"),
        ({"start-mb": "16", "end-mb": "2048", "scale": "8"}, "1M:1G:x2,16M:2G:x8"),
        ({"scale": "8"}, "16M:128M:x8"),
    ],
)
def test_documented_sizes(words: dict[str, str], sizes: str) -> None:
    assert build_options(**words) == build_options(sizes=sizes)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"start-mb": "8", "end-mb": "4"}, "--end-mb: 4 is below --start-mb 8"),
        ({"start-mb": "8", "sizes": "1M"}, "--start-mb"),
        ({"scale": "1"}, "--scale: expected 2 to"),
    ],
)
def test_documented_sizes_that_cannot_be(words: dict[str, str], said: str) -> None:
    with pytest.raises(OptionError, match=re.escape(said)):
        build_options(**words)


def test_largest_degrees_limit_what_they_are_of() -> None:
    """Data parallelism has all-reduces in larger groups than tensor parallelism."""
    cluster = Cluster(hosts=("a",) * 8)
    options = build_options(max_tp_deg="2", max_pp_deg="4", sizes="1M")
    groups: dict[str, set[int]] = {}
    for cell in plan_cells(options, cluster):
        groups.setdefault(cell.operation, set()).add(cell.group_size)
    assert groups["all2all"] == {2}
    assert groups["p2p"] == groups["p2p_bidirectional"] == {2, 4}
    assert groups["allreduce"] == groups["allgather"] == {2, 4, 8}


def test_a_shape_that_torchrun_did_not_start_is_refused() -> None:
    options = build_options(num_nodes="2", num_gpus_per_node="4")
    check_world(options, 8)
    with pytest.raises(OptionError, match=re.escape("(2) * --num-gpus-per-node(4) = 8 != 4")):
        check_world(options, 4)
    check_shape(options, Cluster(hosts=("a",) * 4 + ("b",) * 4))
    with pytest.raises(OptionError, match="--num-nodes"):
        check_shape(options, Cluster(hosts=("a",) * 8))


def test_what_starts_processes_elsewhere_is_said() -> None:
    """A list of variables is left out as a whole, whatever its words look like."""
    said: list[str] = []
    words = ("--envs", "A=1", "num_nodes=7", "--hostfile", "h", "--backend", "torch")
    raw = COMMAND.read(words, said.append)
    assert raw == {"backend": "auto"}
    assert [line.split()[0] for line in said] == ["--envs", "--hostfile"]
