"""Shipped memory counted again: files that are not of today's counting fail here."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="counting needs torch")

from autopar.documents import catalog  # noqa: E402
from autopar.documents.json import load_object  # noqa: E402
from autopar.documents.model import with_shipped_memory  # noqa: E402
from autopar.documents.sidecar import sidecar_path  # noqa: E402
from autopar.documents.spec import load_spec  # noqa: E402
from autopar.rates.model import estimate_model  # noqa: E402
from profiler.model import shipped  # noqa: E402
from profiler.model.cells import with_seq_lengths  # noqa: E402
from profiler.model.counting import layer_memory, vocab_memory  # noqa: E402
from profiler.model.layers.sharding import Sharding  # noqa: E402


def recounted(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return (the shipped file, the same written anew elsewhere)."""
    own = catalog.find_model(name)
    (folder / name).mkdir()
    (folder / name / "model.json").write_bytes(own.read_bytes())
    monkeypatch.chdir(folder)  # an existing path wins over shipped names
    written = shipped.write_shipped(name).resolve()
    return own.parent / "configs" / written.name, written


@pytest.mark.whole
@pytest.mark.parametrize(
    "name",
    [
        name if name == "gpt2-xl" else pytest.param(name, marks=pytest.mark.slow)
        for name in catalog.model_names()
    ],
)
def test_shipped_files_are_todays_count(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte; of the sidecar all but the versions. `make models` writes them anew."""
    there, anew = recounted(name, tmp_path, monkeypatch)

    assert there.read_bytes() == anew.read_bytes()
    data = [load_object(sidecar_path(path)).data for path in (there, anew)]
    for one in data:
        one.pop("version")
        one.pop("tool")
        one["runs"][0]["metadata"].pop("torch")
    assert data[0] == data[1]


@pytest.mark.parametrize(
    ("name", "kind", "degree"),
    [
        ("llama3-8b", "sp", 4),
        ("qwen2.5-7b", "ulysses", 2),
        ("t5-3b", "tp", 8),
        ("mixtral-8x7b", "sp", 2),
        ("gpt-6.7b", "sp", 1),
    ],
)
def test_layers_are_proportional_to_the_tokens(name: str, kind: str, degree: int) -> None:
    """What one counted length stands for: the other lengths to the byte."""
    spec = load_spec(name)
    lengths = tuple(layer.seq_length // 2 for layer in spec.layers)
    half = with_seq_lengths(spec, lengths)
    profile = estimate_model(half, "a100", batches=(1,), sequence_parallel=kind != "tp")
    profile = with_shipped_memory(profile, half, name)

    for number, layer in enumerate(half.layers):
        memory = profile.layers[number].memory[layer.seq_length]
        table = memory.activation_bytes_per_sample
        if kind == "ulysses":
            table = memory.ulysses_activation_bytes_per_sample
        sharding = Sharding(degree=degree, kind=kind)  # type: ignore[arg-type]
        counted = layer_memory(layer, sharding, encoder_seq_length=lengths[0])
        assert table[degree] == pytest.approx(counted.activation_bytes, abs=0.01)


@pytest.mark.parametrize("name", ["llama2-7b", "gpt2-xl", "t5-3b"])
@pytest.mark.parametrize(("share", "above"), [(2, 0.01), (8, 0.35)])
def test_embedding_and_head_are_never_counted_too_small(
    name: str, share: int, above: float
) -> None:
    """Between counted lengths: a line, above what is needed where a tied table's gradient ends."""
    spec = load_spec(name)
    lengths = tuple(layer.seq_length // share for layer in spec.layers)
    short = with_seq_lengths(spec, lengths)
    profile = with_shipped_memory(estimate_model(short, "a100", batches=(1,)), short, name)

    for part in ("only", "first", "last"):
        table = profile.other_memory[part][lengths].activation_bytes_per_sample
        for degree in (1, 8):
            found = vocab_memory(short, part, degree=degree, batch=8)  # type: ignore[arg-type]
            needed = found.activation_bytes + (found.peak_bytes if part != "first" else 0)
            assert needed / 8 * 0.999999 <= table[degree] <= needed / 8 * (1 + above)


def test_half_precisions_count_the_same() -> None:
    """So that one file serves both."""
    layer = load_spec("llama3-8b").layers[0]
    brain, half = (layer_memory(layer, Sharding(degree=2), dtype=d) for d in ("bf16", "fp16"))

    assert brain == half


def test_the_command_needs_a_known_name(capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, with the nearest names."""
    assert shipped.main(["lama2-7b"]) == 2

    assert "Did you mean llama2-7b" in capsys.readouterr().err
