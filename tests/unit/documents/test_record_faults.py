"""Runs that are killed, disks that are full: no file is ever half, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from autopar.documents.hardware import read_hardware_dir
from autopar.errors import InputError
from tests.unit.measured import (
    MIB,
    measure,
)
from tests.unit.record_support import (
    ALLREDUCE,
    P2P,
    SP_TIME,
    load,
    opened,
    planned,
)

ROOT = Path(__file__).resolve().parents[3]


def test_a_path_below_a_file_is_refused(tmp_path: Path) -> None:
    """The sentence names the option and the reason, before anything is measured."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match=r"--out .*file.*cannot be written there \(.+\)"):
            opened(out)


def test_one_run_at_a_time(tmp_path: Path) -> None:
    """A second process is told so in one sentence; the first one's end lets it in."""
    code = _child("""
        try:
            record = opened(out, resume=True)
        except AutoparError as error:
            print(error)
        else:
            print("open")
    """)
    with opened(tmp_path):
        assert "another run is writing to it" in _run(code, tmp_path).stdout
    assert _run(code, tmp_path).stdout.strip() == "open"


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    """A thread that parses every JSON file in a loop during 30 puts meets only whole ones."""
    stop, seen, wrong = threading.Event(), set[str](), list[str]()

    def poll() -> None:
        while not stop.is_set():
            for path in tmp_path.glob("*.json"):
                try:
                    load(path)
                except (ValueError, FileNotFoundError) as error:
                    wrong.append(f"{path.name}: {error}")
                seen.add(path.name)

    reader = threading.Thread(target=poll)
    reader.start()
    try:
        cells = planned("p2p") + planned("allreduce")
        with opened(tmp_path) as record:
            for number in range(30):
                record.put(measure(cells[number % len(cells)], factor=1.0 + number))
    finally:
        stop.set()
        reader.join()
    assert wrong == []
    assert {P2P, ALLREDUCE, SP_TIME, P2P + ".meta.json"} <= seen


@pytest.mark.whole
def test_a_killed_run_loses_at_most_its_current_cell(tmp_path: Path) -> None:
    """kill -9 in the middle of puts: what was reported as put is there, and --resume goes on."""
    code = _child("""
        cells = planned("all", SIZES)
        with opened(out, sizes=SIZES) as record:
            for cell in cells:
                record.put(measure(cell))
                print(cell.key, flush=True)
    """)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        reported = [child.stdout.readline().strip() for _ in range(20)]
        child.send_signal(signal.SIGKILL)
        reported += child.stdout.read().split()
        assert child.wait() == -signal.SIGKILL
    sizes = tuple(MIB << n for n in range(11))
    cells = planned("all", sizes)
    keys = [c.key for c in cells]
    assert reported == keys[: len(reported)]
    (tmp_path / f".{P2P}.abc.part").write_text("left behind", encoding="utf-8")
    with opened(tmp_path, sizes=sizes, resume=True) as record:
        missing = record.missing(cells)
        assert len(cells) - len(missing) - len(reported) in (0, 1)
        assert missing == cells[len(cells) - len(missing) :]
        for cell in missing:
            record.put(measure(cell))
        assert record.missing(cells) == []
    assert not list(tmp_path.glob(".*.part"))
    assert read_hardware_dir(tmp_path, num_nodes=1, gpus_per_node=4).curves


SMALL_DISK = """
    cells = planned("all", SIZES)
    put, sentence = [], ""
    with opened(out, sizes=SIZES) as record:
        for cell in cells:
            try:
                record.put(measure(cell))
            except InputError as error:
                sentence = str(error)
                break
            put.append(cell.key)
    files = [p for p in out.iterdir() if p.name.endswith(".json")]
    broken = [p.name for p in files if not load(p)]
    subprocess.run(["mount", "-o", "remount,size=8m", str(out)], check=True)
    with opened(out, sizes=SIZES, resume=True) as record:
        kept = {c.key for c in cells} - {c.key for c in record.missing(cells)}
        for cell in record.missing(cells):
            record.put(measure(cell))
        left = len(record.missing(cells))
    print(json.dumps({
        "sentence": sentence, "put": len(put), "lost": sorted(set(put) - kept), "left": left,
        "broken": broken, "temporary": [p.name for p in out.rglob("*.part")],
    }))
"""


@pytest.mark.whole
def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """The sentence has file, reason and remedy; with space again, --resume completes."""
    report = json.loads(_mounted("size=160k", SMALL_DISK, tmp_path))
    assert report["put"] > 3
    assert "cannot be written (No space left on device). Free space" in report["sentence"]
    assert "--resume" in report["sentence"]
    assert report["lost"] == report["broken"] == report["temporary"] == []
    assert report["left"] == 0


def test_a_read_only_folder_is_refused_at_once(tmp_path: Path) -> None:
    """A file system without write access is found before anything is measured."""
    said = _mounted(
        "ro",
        """
        try:
            opened(out)
        except InputError as error:
            print(error)
        """,
        tmp_path,
    )
    assert "cannot be written there (Read-only file system)" in said
    assert "--out" in said


def test_a_folder_that_becomes_read_only_keeps_its_content(tmp_path: Path) -> None:
    """The run ends with a sentence, and the file is what it was."""
    said = _mounted(
        "size=1m",
        """
        first, second = planned("p2p")[:2]
        record = opened(out)
        record.put(measure(first))
        before = contents(out)
        record.close()  # a lock that is held keeps the mount busy
        subprocess.run(["mount", "-o", "remount,ro", str(out)], check=True)
        try:
            record.put(measure(second))
        except InputError as error:
            print(error, contents(out) == before)
        """,
        tmp_path,
    )
    assert "(Read-only file system)" in said
    assert said.strip().endswith("True")


def _child(body: str) -> str:
    """Return a program that has this module's helpers and `out`."""
    head = """
        import json, subprocess, sys
        from pathlib import Path
        from autopar.errors import AutoparError, InputError
        from tests.unit.measured import MIB, measure
        from tests.unit.record_support import contents, load, opened, planned
        out = Path(sys.argv[1])
        SIZES = tuple(MIB << n for n in range(11))
    """
    return textwrap.dedent(head) + textwrap.dedent(body)


def _run(code: str, out: Path, *before: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-c", code, str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _mounted(options: str, body: str, out: Path) -> str:
    """Return what a program prints that has a file system of its own, seen by nobody else."""
    mount = ["unshare", "-Urm", "sh", "-c", f'mount -t tmpfs -o {options} none "$0" && exec "$@"']
    probe = subprocess.run(
        [*mount, str(out), "true"], capture_output=True, text=True, timeout=60, check=False
    )
    if probe.returncode != 0:
        pytest.skip(f"no file system of our own: {probe.stderr.strip()}")
    done = _run(_child(body), out, *mount, str(out))
    assert done.returncode == 0, done.stderr
    return done.stdout
