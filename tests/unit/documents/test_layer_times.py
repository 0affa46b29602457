"""What the sidecar of a computation file adds: read, written, contradicted and damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict

from autopar.documents.checks import document_errors
from autopar.documents.model import read_model_profile, write_model_profile
from autopar.documents.schemas import ComputationDocument, MemoryDocument
from autopar.documents.sidecar import sidecar_path
from autopar.errors import DocumentError
from autopar.records import replace
from autopar.run.model import ModelProfile, OtherTime, ShardedTime
from tests.unit.documents_support import DOCUMENTS, SPEC, write

WHOLE: dict[str, Any] = {
    "layer_type": 0,
    "batch": 1,
    "seq_length": 2048,
    "forward_s": 4e-3,
    "backward_s": 9e-3,
    "recompute_s": 5e-3,
    "forward_low_s": 3e-3,
    "forward_high_s": 6e-3,
    "backward_low_s": 8e-3,
    "backward_high_s": 9.5e-3,
}
OTHER: dict[str, Any] = {
    "batch": 8,
    "seq_lengths": [2048],
    "forward_s": 20e-3,
    "backward_s": 30e-3,
    "forward_low_s": 18e-3,
    "forward_high_s": 25e-3,
    "backward_low_s": 29e-3,
    "backward_high_s": 36e-3,
}
"""The documented forward of 8 samples is 2.5 ms for each."""
HALF = {**WHOLE, "degree": 2, "kind": "tp", "forward_s": 3.5e-3}


def load(
    folder: Path, *entries: dict[str, Any], others: tuple[dict[str, Any], ...] = ()
) -> ModelProfile:
    """Read the documents with these `layer_times` and `other_times`; without, no sidecar."""
    computation = write(folder / "computation.json", DOCUMENTS["computation"])
    if entries or others:
        content = {
            "version": 3 if others else 2,
            "document": "computation",
            "unit": "ms",
            "source": "measured",
            "layer_times": list(entries),
            "other_times": list(others),
        }
        sidecar_path(computation).write_text(json.dumps(content))
    return read_model_profile(
        computation=computation,
        memory=write(folder / "memory.json", DOCUMENTS["memory"]),
        spec=SPEC,
        sequence_parallel=True,
        precision="bf16",
    )


def test_entries_become_sharded_times_and_spread(tmp_path: Path) -> None:
    """Cells are sorted by size; whole layers give the documented forward its percentiles."""
    layer = load(tmp_path, HALF, WHOLE).layers[0]
    assert [(t.degree, t.kind, t.forward_s, t.backward_s) for t in layer.sharded_times] == [
        (1, "sp", 4e-3, 9e-3),
        (2, "tp", 3.5e-3, 9e-3),
    ]
    assert layer.sharded_times[0] == ShardedTime(
        layer_type=0,
        **{name: value for name, value in WHOLE.items() if name != "layer_type"},
        degree=1,
        kind="sp",
    )
    first, second = layer.times
    assert first.low_s == pytest.approx(3e-3)
    assert first.high_s == pytest.approx(6e-3)
    assert (second.low_s, second.high_s) == (None, None)


def test_documents_alone_have_no_sharded_times(tmp_path: Path) -> None:
    """Without a sidecar nothing is added."""
    profile = load(tmp_path)
    assert profile.layers[0].sharded_times == ()
    assert all(p.low_s is None and p.high_s is None for p in profile.layers[0].times)
    assert profile.notes == ()


def test_unknown_kinds_and_layer_types_are_notes(tmp_path: Path) -> None:
    """What a later version measures is left out, and said."""
    profile = load(tmp_path, WHOLE, {**HALF, "kind": "rings"}, {**WHOLE, "layer_type": 3})
    assert len(profile.layers[0].sharded_times) == 1
    assert profile.notes == (
        "layer_times of the unknown kind 'rings' are ignored",
        "layer_times of layer type 3 are ignored: tiny has 1 layer type(s), numbered from 0",
    )


def test_an_edited_forward_wins_and_is_noted(tmp_path: Path) -> None:
    """The documented 4 ms stay; percentiles keep their ratio to the sidecar's median of 5 ms."""
    profile = load(tmp_path, {**WHOLE, "forward_s": 5e-3})
    point = profile.layers[0].times[0]
    assert point.forward_s == 4e-3
    assert point.low_s == pytest.approx(2.4e-3)
    assert point.high_s == pytest.approx(4.8e-3)
    (note,) = profile.notes
    assert note.startswith(
        "contradiction: computation.json differs by up to -20 % from its sidecar"
    )


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([WHOLE, WHOLE], "entry 1 repeats"),
        (
            [{**WHOLE, "degree": 0}],
            r"layer_times\[0\]\.degree.*is 0, expected a whole number from 1",
        ),
        ([{**WHOLE, "forward_low_s": 4.1e-3}], "forward median is outside of"),
        ([{**WHOLE, "backward_high_s": 8.9e-3}], "backward median is outside of"),
        (
            [{k: v for k, v in WHOLE.items() if k != "backward_s"}],
            "percentiles of backward but no median",
        ),
        (
            [{**WHOLE, "recompute_low_s": 4e-3, "recompute_high_s": 4.5e-3}],
            "recompute median is outside of",
        ),
    ],
)
def test_damage_is_refused(tmp_path: Path, entries: list[dict[str, Any]], text: str) -> None:
    """One sentence names the sidecar, the entry and what is wrong."""
    with pytest.raises(DocumentError, match=text) as caught:
        load(tmp_path, *entries)
    assert "computation.json.meta.json" in str(caught.value)


def test_round_trip(tmp_path: Path) -> None:
    """A profile that is written and read again has the same times."""
    before = load(tmp_path, WHOLE, HALF)
    write_model_profile(before, SPEC, tmp_path / "out")
    after = read_model_profile(
        computation=tmp_path / "out",
        memory=tmp_path / "out",
        spec=SPEC,
        sequence_parallel=True,
        precision="bf16",
    )
    assert after.layers[0].sharded_times == before.layers[0].sharded_times
    assert after.layers[0].times == before.layers[0].times


def test_spread_without_sharded_times_is_written(tmp_path: Path) -> None:
    """Percentiles of a documented forward alone become an entry, and come back."""
    profile = load(tmp_path)
    first, second = profile.layers[0].times
    spread = replace(first, low_s=3e-3, high_s=5e-3)
    layer = replace(profile.layers[0], times=(spread, second))
    write_model_profile(replace(profile, layers=(layer,)), SPEC, tmp_path / "out")
    back = read_model_profile(
        computation=tmp_path / "out",
        memory=tmp_path / "out",
        spec=SPEC,
        sequence_parallel=True,
        precision="bf16",
    )
    assert back.layers[0].times[0].low_s == pytest.approx(3e-3)
    assert back.layers[0].times[0].high_s == pytest.approx(5e-3)
    assert back.layers[0].times[1].low_s is None


def test_other_times_gain_backward_and_spread(tmp_path: Path) -> None:
    """A size with an entry has its figures, the other one stays as documented."""
    first, second = load(tmp_path, others=(OTHER,)).other_times

    assert first == OtherTime(batch=1, seq_lengths=(2048,), forward_s=4e-3)
    assert second.seq_lengths == (2048,)
    found = {k: v for k, v in asdict(second).items() if k != "seq_lengths"}
    assert found == pytest.approx({k: v for k, v in OTHER.items() if k != "seq_lengths"})


def test_an_edited_forward_of_the_rest_wins_and_is_noted(tmp_path: Path) -> None:
    """The documented 20 ms stay with percentiles in proportion; the backward is the sidecar's."""
    profile = load(tmp_path, others=({**OTHER, "forward_s": 25e-3},))
    point = profile.other_times[1]

    assert point.forward_s == pytest.approx(20e-3)
    assert point.backward_s == 30e-3
    assert point.forward_low_s == pytest.approx(18e-3 * 0.8)
    assert point.forward_high_s == pytest.approx(20e-3)
    (note,) = profile.notes
    assert note.startswith(
        "contradiction: computation.json differs by up to -20 % from its sidecar"
    )
    assert "(forward of embedding and head, batch 8, sequence length 2048)" in note


def test_other_times_of_unknown_sizes_are_notes(tmp_path: Path) -> None:
    """A size without a documented forward is left out, and said."""
    profile = load(tmp_path, others=({**OTHER, "batch": 4},))

    assert all(t.backward_s is None for t in profile.other_times)
    (note,) = profile.notes
    assert note == (
        "other_times at batch 4, sequence length 2048 are ignored: "
        "computation.json has no such forward"
    )


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ((OTHER, OTHER), "entry 1 repeats this size"),
        (({**OTHER, "batch": 0},), r"'other_times\[0\]\.batch': the value is 0, expected"),
        (({**OTHER, "seq_lengths": [2048, 2048]},), "one length for each of 1 layer type"),
        (({**OTHER, "seq_lengths": []},), "one length for each of 1 layer type"),
        (({**OTHER, "forward_high_s": 19e-3},), "forward median is outside of"),
        (({**OTHER, "backward_low_s": 31e-3},), "backward median is outside of"),
    ],
)
def test_damaged_other_times_are_refused(
    tmp_path: Path, others: tuple[dict[str, Any], ...], text: str
) -> None:
    """One sentence names the sidecar, its key, the entry and what is wrong."""
    with pytest.raises(DocumentError, match=text) as caught:
        load(tmp_path, others=others)
    assert "computation.json.meta.json" in str(caught.value)
    assert "'other_times" in str(caught.value)


def test_other_times_round_trip(tmp_path: Path) -> None:
    """Backward, its spread and the forward's come back; a plain forward writes no entry."""
    before = load(tmp_path, others=(OTHER,))
    _, sidecar, *_ = write_model_profile(before, SPEC, tmp_path / "out")
    after = read_model_profile(
        computation=tmp_path / "out",
        memory=tmp_path / "out",
        spec=SPEC,
        sequence_parallel=True,
        precision="bf16",
    )

    assert after.other_times == before.other_times
    assert [entry["batch"] for entry in json.loads(sidecar.read_text())["other_times"]] == [8]


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (ComputationDocument, "layernum[2]_bsz1_seq4096_attention"),
        (ComputationDocument, "layernum[2]_bsz2_seq4096_mlp"),
        (ComputationDocument, "layertype_0_bsz1_seq4096_mlp"),
        (MemoryDocument, "layertype_0_attention"),
        (MemoryDocument, "layertype_0_mlp_sp"),
    ],
)
def test_half_a_layer_is_not_taken_for_a_whole_one(kind: type[Any], key: str) -> None:
    """Galvatron's profiles of experts; a key of a whole layer would hold another quantity."""
    (found,) = document_errors(kind, Path("p.json"), {key: 19.2})

    assert found.key == key
    assert "half a layer" in str(found)
    assert "Did you mean" not in str(found)


@pytest.mark.parametrize("key", ["layernum[2]_bsz1_seq4096_mpl", "layertype_0_bzs1"])
def test_a_misspelt_key_has_its_suggestion(key: str) -> None:
    """A key of neither kind is a slip."""
    (found,) = document_errors(ComputationDocument, Path("p.json"), {key: 19.2})

    assert "Did you mean" in str(found)
