"""profile-show as a person runs it: exit codes, streams, speed, and what is missing."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar.records import replace
from autopar.units import MIB
from profiler.show import command as show_cli
from tests.unit.show_folders import REFERENCE_BYTES, measured, samples, troubled, write_folder
from tests.warm import ROOT, new_interpreter

pytestmark = pytest.mark.whole

ESTIMATED = ROOT / "hardware_configs" / "a100-80gb_1x8"


def run(
    *arguments: object, expected: int = 0, without: str = "torch", encoding: str = "utf-8"
) -> subprocess.CompletedProcess[str]:
    """Run the command where one module cannot be imported, and check its exit code."""
    code = f"import sys; sys.modules[{without!r}] = None; "
    code += "from autopar.cli import show; show()"
    done = new_interpreter(code, *map(str, arguments), PYTHONIOENCODING=encoding)
    assert done.returncode == expected, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


Ask = Callable[..., tuple[str, str]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Return what runs the command in this process and returns its stdout and stderr."""

    def call(*arguments: object, expected: int = 0) -> tuple[str, str]:
        code = show_cli.run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert code == expected, captured
        return captured.out, captured.err

    return call


@pytest.fixture
def sentence(ask: Ask) -> Callable[..., str]:
    """Return what runs an unusable command and returns its only line, which is on stderr."""

    def call(*arguments: object) -> str:
        out, err = ask(*arguments, expected=2)
        assert out == ""
        line, *hint = err.splitlines()
        assert all(one.startswith("hint: ") for one in hint)
        assert len(hint) <= 1
        return "\n".join([line, *hint])

    return call


def test_help_says_what_is_shown() -> None:
    assert "--threshold" in run("--help").stdout


def test_shows_without_torch() -> None:
    """The shipped estimates, without torch; nothing but the result is on stdout."""
    done = run(ESTIMATED)

    assert "ESTIMATED" in done.stdout
    assert "●" in done.stdout
    assert done.stderr == ""


def test_ascii_output_on_a_plain_terminal(tmp_path: Path) -> None:
    """No character that the output's encoding lacks."""
    done = run(write_folder(tmp_path / "häuser"), "--curves", "bandwidth", encoding="ascii")

    assert done.stdout.isascii()
    assert "h\\xe4user" in done.stdout


def test_picture(tmp_path: Path, ask: Ask, sentence: Callable[..., str]) -> None:
    """A picture is written beside the text, or one sentence says what is missing."""
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    box = write_folder(tmp_path / "box")

    _, err = ask(box, "--plot", tmp_path / "curves.svg", "--curves", "none")

    assert (tmp_path / "curves.svg").read_text(encoding="utf-8").startswith("<?xml")
    assert err.startswith("profile-show: wrote ")
    assert ".png or .svg" in sentence(box, "--plot", tmp_path / "b.pdf")


def test_picture_without_matplotlib(tmp_path: Path) -> None:
    """Without matplotlib the command says how to install it, before anything is shown."""
    done = run(ESTIMATED, "--plot", tmp_path / "b.png", expected=1, without="matplotlib")

    assert done.stdout == ""
    assert "pip install 'autopar[plot]'" in done.stderr
    assert not (tmp_path / "b.png").exists()


def test_diff_gates_a_job(tmp_path: Path, ask: Ask, sentence: Callable[..., str]) -> None:
    """0 without regressions, 1 with one, 2 for what is not comparable unless it is forced."""
    old = write_folder(tmp_path / "old")
    key = f"p2p_stages_4_{REFERENCE_BYTES}B"
    cells = measured()
    cells["p2p"] = [
        replace(m, samples_s={"time": samples(5e-3)}) if m.key == key else m for m in cells["p2p"]
    ]
    new = write_folder(tmp_path / "new", cells)

    assert " 0 regressions" in ask(old, "--diff", old)[0]
    assert " 2 regressions" in ask(new, "--diff", old, expected=1)[0]
    assert " 2 improvements" in ask(old, "--diff", new)[0]
    assert " 0 regressions" in ask(new, "--diff", old, "--threshold", "3")[0]
    assert "contains 1 node x 8 GPUs, but " in sentence(old, "--diff", ESTIMATED)
    other = write_folder(tmp_path / "other", estimated=True)
    assert "--anyway" in sentence(other, "--diff", old)
    assert "not comparable" in ask(other, "--diff", old, "--anyway")[1]


def test_validate_gates_a_job(tmp_path: Path, ask: Ask) -> None:
    """0 for a clean profile, 1 with findings, which are the result."""
    assert "no findings" in ask(ESTIMATED, "--validate")[0]

    out, err = ask(write_folder(tmp_path, troubled()), "--validate", expected=1)

    assert f"allreduce_size_2_consec_0_{MIB << 10}B" in out
    assert err == ""


def test_unusable_requests(tmp_path: Path, ask: Ask, sentence: Callable[..., str]) -> None:
    """Each is one sentence and exit code 2."""
    box = write_folder(tmp_path / "box")
    (tmp_path / "empty").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "memory_profiling_bf16_x.json").write_text("{}", encoding="utf-8")

    assert "does not exist" in sentence(tmp_path / "nowhere")
    assert "`torchrun -m profiler.hardware`" in sentence(tmp_path / "empty")
    assert "only profiles of models" in sentence(tmp_path / "models")
    said = sentence(tmp_path / "models", "--diff", box)
    assert "only profiles of models" in said
    assert "--diff" in said
    assert "have a sidecar" not in said
    out, _ = ask(tmp_path / "models", "--validate", expected=1)
    assert "no processed key is in this file" in " ".join(out.split())
    assert "Use its document" in sentence(box / "overlap_coefficient.json.meta.json")
    assert "--curves: expected time, bandwidth or none" in sentence(box, "--curves", "size")
    assert "GB/s or MiB/ms" in sentence(box, "--bandwidth-unit", "Gbit/s")
    assert "Remove --bandwidth-unit" in sentence(box, "--bandwidth-unit", "MiB/ms")
    assert "--diff" in sentence(box, "--diff", box, "--validate")
    assert "--anyway" in sentence(box, "--anyway")
    assert "0.05 for 5 %" in sentence(box, "--diff", box, "--threshold", "-1")
    assert "--colour" in sentence(box, "--colour")
    assert "DIR" in sentence()

    path = box / "p2p_bandwidth_2nodes_2gpus_per_node.json"
    path.write_text('{"pp_size_2": -1, "pp_size_4": "x"}', encoding="utf-8")
    _, err = ask(box, expected=2)
    assert "1 more error; --validate lists all" in err
    assert "the value is -1" in err
