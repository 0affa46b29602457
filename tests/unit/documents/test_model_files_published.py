"""The published model files of Galvatron: read by directory and file, and derived from raw runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.documents.model import read_model_profile
from autopar.errors import DocumentError
from autopar.run.model import LayerSpec, ModelSpec
from tests.unit.documents_support import assert_same, read_dir, write


def published(name: str, seq: int = 2048) -> ModelSpec:
    """Return the spec of a published 7B model."""
    layer = LayerSpec(num_layers=32, seq_length=seq, hidden_size=4096, num_heads=32)
    return ModelSpec(name=name, layers=(layer,))


@pytest.mark.parametrize(
    ("folder", "name", "points", "seqs"),
    [
        ("model", "llama2-7b", 12, [2048]),
        ("model_v24", "llama2-7b", 12, [2048]),
        ("model_v24", "gpt-6.7b", 16, [512, 2048, 8192]),
    ],
)
def test_published_directories(
    cases_dir: Path, folder: str, name: str, points: int, seqs: list[int]
) -> None:
    """The published directories are read by the model's name."""
    profile = read_dir(cases_dir / "galvatron" / folder, published(name))
    assert len(profile.layers[0].times) == len(profile.other_times) == points
    assert list(profile.layers[0].memory) == seqs
    assert all(name in Path(source.path).name for source in profile.sources)
    assert len(profile.notes) == (2 if folder == "model" else 0)  # two raw-only files skipped


@pytest.mark.parametrize(
    ("folder", "stem"),
    [("model", "bf16_llama2-7b_all"), ("model_v24", "bf16_gpt-6.7b")],
)
def test_derivation_reproduces_the_published_processing(
    cases_dir: Path, tmp_path: Path, folder: str, stem: str
) -> None:
    """From the raw entries alone come the very numbers that were published beside them."""
    profiles = []
    for only_raw in (False, True):
        paths = {}
        for kind in ("computation", "memory"):
            name = f"{kind}_profiling_{stem}.json"
            data = json.loads((cases_dir / "galvatron" / folder / name).read_text())
            raw = {k: v for k, v in data.items() if not k.startswith(("layertype", "other_"))}
            assert len(raw) < len(data)
            paths[kind] = write(tmp_path / f"{only_raw}_{kind}.json", raw if only_raw else data)
        profiles.append(
            read_model_profile(
                computation=paths["computation"],
                memory=paths["memory"],
                spec=published("x"),
                sequence_parallel=True,
                precision="bf16",
            )
        )
    assert_same(profiles[1], profiles[0])
    assert any("derived" in note for note in profiles[1].notes)


def test_raw_memory_that_does_not_suffice(cases_dir: Path) -> None:
    """A file with one raw run names the command that makes the processed keys."""
    folder = cases_dir / "galvatron" / "model"
    with pytest.raises(DocumentError, match=r"raw runs do not suffice.*profile-model"):
        read_model_profile(
            computation=folder,
            memory=folder / "memory_profiling_bf16_llama2-7b_seqlen2048_all.json",
            spec=published("llama2-7b"),
            sequence_parallel=True,
            precision="bf16",
        )


@pytest.mark.parametrize(
    ("times", "memory", "sequence_parallel"),
    [
        ("static_time_config", "static_memory_config", False),
        ("static_time_config", "static_memory_config_sp", True),
        ("batch_time_config", "static_memory_config_sp", True),
        ("sequence_time_config", "sequence_memory_config_sp", True),
    ],
)
def test_published_engine_test_inputs(
    cases_dir: Path, times: str, memory: str, sequence_parallel: bool
) -> None:
    """The mock profiles of the peer's own tests."""
    folder = cases_dir / "galvatron" / "engine_test_inputs"
    profile = read_model_profile(
        computation=folder / f"{times}.json",
        memory=folder / f"{memory}.json",
        spec=published("llama", 4096),
        sequence_parallel=sequence_parallel,
        precision="bf16",
    )
    raw = json.loads((folder / f"{times}.json").read_text())
    assert len(profile.layers[0].times) + len(profile.other_times) == len(raw)
    assert profile.other_memory.keys() == {"only", "first", "last"}
