"""Files that commands write: whole, through links, and never in the place of what is no file."""

from __future__ import annotations

import gzip
import os
import stat
import threading
from pathlib import Path

import pytest

from autopar.errors import OptionError
from autopar.output import begun, refuse_clashes, write_files, write_text


def left_in(folder: Path) -> list[str]:
    """Return the names of all files, hidden ones too."""
    return sorted(path.name for path in folder.iterdir())


def test_devices_and_pipes_are_written_to(tmp_path: Path) -> None:
    """A renamed file in their place would end them."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "through")
    reader.join(10)

    assert read == ["through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    # a link to a device stands for devices of root, which a failing test must not destroy
    null = tmp_path / "null"
    null.symlink_to(os.devnull)
    write_text(null, "nowhere")
    assert null.is_symlink()
    assert stat.S_ISCHR(null.stat().st_mode)
    assert left_in(tmp_path) == ["null", "pipe"]


def test_a_link_keeps_its_name_and_its_target_gets_the_content(tmp_path: Path) -> None:
    """Whether the target is there, is not yet, or is in another folder."""
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "real.json", tmp_path / "link.json"
    link.symlink_to(Path("there") / "real.json")
    for text in ("new", "changed"):
        write_text(link, text)
        assert link.is_symlink()
        assert target.read_text() == text
    assert left_in(tmp_path) == ["link.json", "there"]
    assert left_in(tmp_path / "there") == ["real.json"]


def test_a_link_that_waits_at_a_temporary_name_is_not_followed(tmp_path: Path) -> None:
    """Nobody can foresee the name."""
    victim = tmp_path / "victim"
    victim.write_text("kept")
    names = set()
    for _ in range(3):
        with begun(tmp_path / "out.csv") as file:
            names.add(file.part.name)
    assert len(names) == 3
    for name in (".out.csv.part", "out.csv.part", "out.csv.tmp"):
        (tmp_path / name).symlink_to(victim)
    write_text(tmp_path / "out.csv", "rows")
    assert victim.read_text() == "kept"


def test_rights_of_a_file_stay_and_new_ones_follow_the_umask(tmp_path: Path) -> None:
    """A private plan stays private."""
    private, new = tmp_path / "private", tmp_path / "new"
    private.write_text("old")
    private.chmod(0o600)
    write_files({private: "a", new: "b"})
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(new.stat().st_mode) == 0o666 & ~umask


def test_all_files_or_none(tmp_path: Path) -> None:
    """A full device, or a folder in the place of one file, changes no other."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("old")
    if Path("/dev/full").exists():
        with pytest.raises(OSError, match="No space left"):
            write_files({one: "new", Path("/dev/full"): "new", two: "new"})
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_files({one: "new", tmp_path / "folder": "new", two: "new"})
    assert one.read_text() == "old"
    assert left_in(tmp_path) == ["folder", "one"]


def test_names_as_long_as_a_file_system_allows(tmp_path: Path) -> None:
    """The temporary name is shorter than the name; what is too long is an OSError."""
    path = tmp_path / ("é" * 127)  # 254 bytes
    write_text(path, "x")
    assert path.read_text() == "x"
    with pytest.raises(OSError, match="too long"):
        write_text(tmp_path / ("n" * 256), "x")
    assert left_in(tmp_path) == [path.name]


def test_compressed_files_are_equal_for_equal_texts(tmp_path: Path) -> None:
    """Without the time of writing; and bytes of names that are no text are escaped."""
    for name in ("a.gz", "b.gz"):
        write_text(tmp_path / name, "text \udcff")
    first, second = ((tmp_path / name).read_bytes() for name in ("a.gz", "b.gz"))
    assert first == second
    assert gzip.decompress(first) == b"text \\udcff"


def test_outputs_may_be_neither_inputs_nor_each_other(tmp_path: Path) -> None:
    """Whatever the spelling; stdout and devices take several."""
    plan, other = tmp_path / "plan.json", tmp_path / "other.json"
    plan.write_text("{}")
    (tmp_path / "link.json").symlink_to(plan)
    refuse_clashes({"--json": "-", "--out": "-", "--a": os.devnull, "--b": os.devnull}, [plan])
    refuse_clashes({"--json": other, "--out": None}, [plan])
    with pytest.raises(OptionError, match=r"--json: .*link\.json is what the command reads"):
        refuse_clashes({"--json": tmp_path / "link.json"}, [plan])
    with pytest.raises(OptionError, match=r"--out: .*other\.json is the file of --json too"):
        refuse_clashes({"--json": other, "--out": tmp_path / "." / "other.json"}, [])
