"""Files that commands write: whole, through links, and never in the place of what is no file."""

from __future__ import annotations

import gzip
import os
import stat
import threading
from pathlib import Path

import pytest

from autopar import output
from autopar.errors import OptionError
from autopar.output import (
    OutsideError,
    PendingFile,
    only_below,
    refuse_clashes,
    safe_name,
    write_files,
    write_text,
)
from tests.interrupts import ended_at_each_moment


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
        file = PendingFile(tmp_path / "out.csv")
        assert file.part is not None
        names.add(file.part.name)
        file.drop()
    assert len(names) == 3
    for name in (".out.csv.part", "out.csv.part", "out.csv.tmp"):
        (tmp_path / name).symlink_to(victim)
    write_text(tmp_path / "out.csv", "rows")
    assert victim.read_text() == "kept"


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of streams left open
@pytest.mark.parametrize("old", [None, "new", "old"])
def test_a_signal_at_any_moment_leaves_no_temporary_file(
    tmp_path: Path, old: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has no name, its old content or its new one."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    path = tmp_path / "out.json"

    def write() -> None:
        if old is not None:
            path.write_text(old)
        write_files({path: "new"}, aside=lambda *_: None)

    last = 0
    for last in ended_at_each_moment(write, output):
        assert set(left_in(tmp_path)) <= {"out.json", "out.json.bak-1"}, last
        assert not path.exists() or path.read_text() in {"new", old}
    assert last > 50
    assert path.read_text() == "new"


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
    with pytest.raises(OptionError, match=r"--json.*link\.json"):
        refuse_clashes({"--json": tmp_path / "link.json"}, [plan])
    with pytest.raises(OptionError, match=r"--out.*other\.json.*--json"):
        refuse_clashes({"--json": other, "--out": tmp_path / "." / "other.json"}, [])


def _written(path: Path, text: str, **how: object) -> list[tuple[Path, Path]]:
    """Write a file and return what was said of an earlier content."""
    said: list[tuple[Path, Path]] = []
    write_files({path: text}, aside=lambda *pair: said.append(pair), **how)  # type: ignore[arg-type]
    return said


def test_another_content_is_kept_and_said_and_the_same_is_left(tmp_path: Path) -> None:
    """Once each, whatever comes and goes."""
    path = tmp_path / "plan.json"
    first, second = tmp_path / "plan.json.bak-1", tmp_path / "plan.json.bak-2"
    assert _written(path, "a") == []
    os.utime(path, (1, 1))
    assert _written(path, "a") == []
    assert path.stat().st_mtime == 1  # not even its time changed
    assert _written(path, "b") == [(path, first)]
    assert _written(path, "c") == [(path, second)]
    # what is kept already is not kept again
    assert _written(path, "a") == [(path, tmp_path / "plan.json.bak-3")]
    assert _written(path, "b") == [(path, first)]
    assert [p.read_text() for p in (path, first, second)] == ["b", "a", "b"]
    # nobody is told of what is replaced on purpose
    assert _written(path, "d", replace=[path]) == []
    assert left_in(tmp_path) == ["plan.json", *(f"plan.json.bak-{n}" for n in (1, 2, 3))]


def test_what_is_kept_is_never_written_over(tmp_path: Path) -> None:
    """Neither a file of that name, nor a folder, nor a link that leads nowhere."""
    path = tmp_path / "a"
    path.write_text("old")
    (tmp_path / "a.bak-1").write_text("of somebody")
    (tmp_path / "a.bak-2").mkdir()
    (tmp_path / "a.bak-3").symlink_to("nowhere")
    assert _written(path, "new") == [(path, tmp_path / "a.bak-4")]
    assert (tmp_path / "a.bak-1").read_text() == "of somebody"
    assert (tmp_path / "a.bak-4").read_text() == "old"


def test_a_file_system_without_links_keeps_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAT has none."""

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    path = tmp_path / "a"
    for text in ("one", "two", "three"):
        _written(path, text)
    assert [(tmp_path / f"a.bak-{n}").read_text() for n in (1, 2)] == ["one", "two"]


def test_through_a_link_the_target_is_kept(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "real", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    assert _written(link, "new") == [(link, tmp_path / "there" / "real.bak-1")]
    assert link.is_symlink()
    assert left_in(tmp_path / "there") == ["real", "real.bak-1"]


def test_files_that_are_not_all_written_keep_what_was_there(tmp_path: Path) -> None:
    """The second is a folder: of the first neither content nor name changes."""
    path = tmp_path / "a"
    path.write_text("old")
    (tmp_path / "b").mkdir()
    with pytest.raises(IsADirectoryError):
        write_files({path: "new", tmp_path / "b": "new"}, aside=lambda *_: None)
    assert path.read_text() == "old"
    assert left_in(tmp_path) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llama2-7b", "llama2-7b"),
        ("org/My model (v2).5", "org-My-model-v2-.5"),
        ("-rf *", "rf"),
        ("..", "5ec1f7e7"),
        ("日本", "cf2abf0c"),
    ],
)
def test_a_part_of_a_name_means_nothing_to_a_shell(text: str, name: str) -> None:
    assert safe_name(text) == name


def test_long_parts_of_names_stay_different() -> None:
    names = {safe_name(200 * "a" + end, most=40) for end in ("b", "c")}
    assert [len(name) for name in names] == [40, 40]


def test_a_folder_limits_all_writers(tmp_path: Path) -> None:
    """Links are followed before the path is judged; afterwards the limit is gone."""
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "out").symlink_to(tmp_path)
    (inside / "file").symlink_to(tmp_path / "file")
    (tmp_path / "in").symlink_to(inside)
    os.mkfifo(inside / "pipe")
    with only_below(inside):
        for path in ("../a", "out/a", "file", "pipe"):
            with pytest.raises(OutsideError):
                write_text(inside / path, "new")
        with pytest.raises(OutsideError):
            write_files({inside / "a": "new", Path("/dev/null"): "new"})
        write_text(tmp_path / "in" / "new" / "b", "new")
    assert left_in(tmp_path) == ["in", "inside"]
    assert left_in(inside) == ["file", "new", "out", "pipe"]
    write_text(tmp_path / "a", "new")
