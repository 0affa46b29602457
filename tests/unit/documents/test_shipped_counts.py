"""A memory file that came with its model is neither counted again nor replaced."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from autopar.documents import catalog
from autopar.documents.catalog import model_file_name
from autopar.documents.sidecar import read_sidecar, sidecar_path
from autopar.documents.spec import load_spec
from profiler.model import command as model_cli
from profiler.model.cells import plan_cells, tensor_kinds
from profiler.model.options import build_options
from profiler.model.record import describe_model
from profiler.model.shipped import is_counted

NAME = "llama2-7b"
SPEC = load_spec(NAME)
FILE = model_file_name("memory", "bf16", SPEC)
FOLDER = Path("models") / NAME / "configs"


def shipped() -> Path:
    """Return the shipped memory file."""
    folder = catalog.find_configs(NAME)
    assert folder is not None
    return folder / FILE


def shipped_torch() -> str:
    """Return the version of torch that it was counted with."""
    sidecar = read_sidecar(shipped())
    assert sidecar is not None
    return str(sidecar.runs[0].metadata["torch"])


def counted(path: Path, *, torch: str | None = None, **changes: Any) -> bool:
    """Return whether a file has what a command with these options would count."""
    options = build_options(**{"model": NAME, "profile_type": "memory", **changes})
    return is_counted(
        path,
        plan_cells(SPEC, options),
        SPEC,
        metadata={
            "dtype": options.dtype,
            "torch": torch or f"{shipped_torch()}+cu130",
            "model": describe_model(SPEC),
            "unit": options.unit,
            "tp_impl": options.tp_impl,
        },
        kinds=tensor_kinds(options),
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"tp": "1,4,16,32"}, True),
        ({"profile_type": "all"}, True),
        ({"seq": "512"}, False),  # layers are shipped at one length
        ({"tp_impl": "dtensor"}, False),
        ({"dtype": "fp16"}, False),
        ({"profile_unit": "mlp"}, False),
        ({"torch": "2.6.0"}, False),
        ({"profile_type": "computation"}, False),
    ],
)
def test_what_the_shipped_file_says(changes: dict[str, Any], expected: bool) -> None:
    """All that is asked for, counted alike, whatever torch was built for; nothing less."""
    assert counted(shipped(), **changes) == expected


def test_only_whole_files_count(tmp_path: Path) -> None:
    """A file without a sidecar, with a damaged one, or without a key is no such file."""
    path = tmp_path / FILE
    assert not counted(path)
    shutil.copy(shipped(), path)
    assert not counted(path)
    shutil.copy(sidecar_path(shipped()), sidecar_path(path))
    assert counted(path)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("other_memory_pp_on_last_sp", "x"), encoding="utf-8")
    assert not counted(path)
    path.write_text(text, encoding="utf-8")
    sidecar_path(path).write_text("{", encoding="utf-8")
    assert not counted(path)


def test_nothing_to_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command says so, names the file and leaves it; where more is asked for it asks back."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if str(torch.__version__).split("+")[0] != shipped_torch():
        pytest.skip("the shipped file was counted with another torch")
    shutil.copytree(shipped().parent, folder / FOLDER)
    before = {path: path.read_bytes() for path in (folder / FOLDER).iterdir()}

    assert model_cli.run(["--model", NAME, "--profile-type", "memory"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{FOLDER / FILE}\n"
    assert "is shipped with the model" in err
    assert model_cli.run(["--model", NAME, "--profile-type", "memory", "--seq", "512"]) == 2
    assert "--force" in capsys.readouterr().err
    after = {p: p.read_bytes() for p in (folder / FOLDER).iterdir() if p in before}
    assert after == before
