"""What Ulysses layers keep: read from a sidecar, between counted degrees, and planned with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.documents.model import read_model_profile
from autopar.documents.sidecar import sidecar_path
from autopar.errors import DocumentError
from autopar.records import replace
from autopar.run.model import LayerMemory, LayerSpec, ModelProfile
from autopar.run.plan import LayerStrategy
from search.planning.cost.memory import ulysses_bytes
from search.planning.cost.model import CostModel
from search.planning.cost.state_layouts import Recipe
from search.request.options import SearchOptions
from tests.cost_cases import toy_hardware, toy_model, toy_spec
from tests.unit.documents_support import DOCUMENTS, SPEC, write

MIB = 2**20
RECIPE = Recipe.of(SearchOptions())
LLAMA = LayerSpec(
    num_layers=1,
    seq_length=4096,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_hidden_size=14336,
    gated_mlp=True,
)


def cell(degree: int, activation: float, **changes: Any) -> dict[str, Any]:
    """Return a counted cell: MiB of activations of one sample at length 2048."""
    kind = "ulysses" if degree > 1 else "sp"
    return {
        "key": f"memory_layertype_0_bsz1_seq2048_tp{degree}_{kind}",
        "quantity": "memory",
        "part": "layer",
        "layer_type": 0,
        "batch": 1,
        "seq_lengths": [2048],
        "degree": degree,
        "kind": kind,
        "source": "exact",
        "status": "ok",
        "bytes": {"activation": activation * MIB, "parameters": 1.0},
        **changes,
    }


def load(folder: Path, *runs: dict[str, Any]) -> ModelProfile:
    """Read the documents, whose unsharded layer keeps 80 MiB, with these runs in the sidecar."""
    memory = write(folder / "memory.json", DOCUMENTS["memory"])
    sidecar = {
        "version": 3,
        "document": "memory",
        "unit": "MiB",
        "source": "counted",
        "parameter_bytes": 4,
        "runs": list(runs),
    }
    sidecar_path(memory).write_text(json.dumps(sidecar))
    return read_model_profile(
        computation=write(folder / "computation.json", DOCUMENTS["computation"]),
        memory=memory,
        spec=SPEC,
        sequence_parallel=True,
        precision="bf16",
    )


def run(*cells: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    """Return a run with these cells."""
    return {"id": "r1", "metadata": metadata, "model_measurements": list(cells)}


def ulysses(profile: ModelProfile) -> dict[int, float]:
    """Return the Ulysses activations in MiB."""
    table = profile.layers[0].memory[2048].ulysses_activation_bytes_per_sample
    return {degree: value / MIB for degree, value in table.items()}


# --- reading ---


def test_ulysses_cells_are_read_by_degree(tmp_path: Path) -> None:
    """Per sample, in bytes; what is sharded otherwise, checkpointed or failed is not looked at."""
    profile = load(
        tmp_path,
        run(
            cell(1, 80.0),
            cell(4, 21.5),
            cell(2, 86.0, batch=2),
            cell(8, 1.0, kind="sp", key="a"),
            cell(8, 1.0, checkpoint="full", key="b"),
            cell(8, 1.0, status="failed", reason="out of memory", bytes={}, key="c"),
            cell(8, 1.0, seq_lengths=[512], key="d"),
            cell(8, 1.0, layer_type=3, key="e"),
            cell(8, 1.0, part="only", layer_type=None, key="f"),
        ),
    )

    assert ulysses(profile) == {2: 43.0, 4: 21.5}
    assert profile.layers[0].memory[2048].activation_bytes_per_sample[1] == 80.0 * MIB
    assert profile.notes == ()


def test_the_newest_ok_cell_counts(tmp_path: Path) -> None:
    """A later failure keeps the earlier count; a run that replaces drops all before it."""
    failed = cell(2, 1.0, status="failed", reason="why", bytes={})
    assert ulysses(load(tmp_path, run(cell(2, 43.0)), run(cell(2, 44.0)), run(failed))) == {2: 44.0}
    later = run(cell(4, 22.0), replaces=True)
    assert ulysses(load(tmp_path, run(cell(2, 43.0)), later)) == {4: 22.0}


def test_without_cells_nothing_is_added(tmp_path: Path) -> None:
    """A sidecar without runs, or without Ulysses cells, leaves the tables as documented."""
    assert ulysses(load(tmp_path)) == {}
    assert ulysses(load(tmp_path, run(cell(1, 80.0)))) == {}


def test_an_edited_table_wins_and_is_noted(tmp_path: Path) -> None:
    """The documented 80 MiB stay; 45 MiB of a layer that was counted with 100 become 36."""
    profile = load(tmp_path, run(cell(1, 100.0), cell(2, 45.0)))

    assert ulysses(profile) == pytest.approx({2: 36.0})
    (note,) = profile.notes
    assert note.startswith("contradiction: memory.json differs by up to -20 % from its sidecar")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"batch": 0}, "has no positive batch, degree and sequence length"),
        ({"seq_lengths": []}, "has no positive batch, degree and sequence length"),
        ({"layer_type": -1}, "has no positive batch, degree and sequence length"),
        ({"bytes": {}}, "has no activation bytes"),
    ],
)
def test_damage_is_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    """One sentence names the sidecar, the cell and what is wrong."""
    with pytest.raises(DocumentError, match=text) as caught:
        load(tmp_path, run(cell(2, 43.0, **changes)))
    assert "memory.json.meta.json" in str(caught.value)
    assert "memory_layertype_0_bsz1_seq2048_tp2_ulysses" in str(caught.value)


def backwards(profile: ModelProfile) -> tuple[dict[int, float], dict[int, float]]:
    """Return what backwards need in MiB, by tensor and by Ulysses degree."""
    memory = profile.layers[0].memory[2048]
    tables = (memory.backward_bytes_per_sample, memory.ulysses_backward_bytes_per_sample)
    return tuple({t: value / MIB for t, value in table.items()} for table in tables)  # type: ignore[return-value]


def peak(degree: int, value: float, **changes: Any) -> dict[str, Any]:
    """Return a counted cell of a layer that keeps 80 MiB over the degree, with this peak."""
    found = cell(degree, 80.0 / degree, **changes)
    found["key"] += str(changes)
    return {**found, "bytes": {**found["bytes"], "peak": value * MIB}}


def test_backwards_are_read_by_kind_and_degree(tmp_path: Path) -> None:
    """Per sample; of the kind of the tables, where DTensor stands in; not of checkpoints."""
    profile = load(
        tmp_path,
        run(
            peak(1, 20.0),
            peak(2, 28.0, kind="sp", batch=2),
            peak(2, 99.0, kind="tp"),
            peak(2, 99.0, kind="dtensor_sp"),
            peak(4, 9.0, kind="dtensor_sp"),
            peak(2, 11.0),
            peak(8, 99.0, kind="sp", checkpoint="full"),
            cell(8, 10.0, kind="sp", key="without a peak"),
        ),
    )

    assert backwards(profile) == ({1: 20.0, 2: 14.0, 4: 9.0}, {2: 11.0})


def test_backwards_of_an_edited_table_are_never_lowered(tmp_path: Path) -> None:
    """The documented 80 MiB beside 100 counted leave them, beside 40 they double."""
    less = load(tmp_path, run(peak(1, 20.0, bytes={"activation": 100.0 * MIB}), peak(2, 11.0)))
    more = load(tmp_path, run(peak(1, 20.0, bytes={"activation": 40.0 * MIB}), peak(2, 11.0)))

    assert backwards(less) == ({1: 20.0}, {2: 11.0})
    assert backwards(more) == ({1: 40.0}, {2: 22.0})


# --- between degrees ---


@pytest.mark.whole
def test_the_llama_block_keeps_more_than_its_share() -> None:
    """Counted exactly: 344.27 MiB at t = 2; degrees that were not counted are never below."""
    pytest.importorskip("torch", reason="counting needs torch")
    from profiler.model.counting import layer_memory
    from profiler.model.layers.sharding import Sharding

    counted = {
        t: layer_memory(LLAMA, Sharding(degree=t, kind="ulysses")).activation_bytes
        for t in (1, 2, 4, 8, 16, 32)
    }
    assert counted[2] / MIB == pytest.approx(344.27, abs=0.005)

    def table(*degrees: int) -> LayerMemory:
        return LayerMemory(
            parameter_count=1.0,
            activation_bytes_per_sample={1: counted[1]},
            checkpoint_bytes_per_sample=None,
            ulysses_activation_bytes_per_sample={t: counted[t] for t in degrees},
        )

    for known in ((2,), (4,), (2, 8), (16,), (32,), (2, 4, 8, 16, 32)):
        for t in (2, 4, 8, 16, 32):
            derived, source = ulysses_bytes(table(*known), t, LLAMA, RECIPE)
            assert derived is not None
            assert derived >= counted[t] * (1 - 1e-12)
            assert (source == "") == (t in known)
            if t in known:
                assert derived == counted[t]
            elif t > max(known):  # k and v are copied beyond 8 ranks, which is counted too
                assert derived == pytest.approx(counted[t], rel=1e-9)
    alone, source = ulysses_bytes(table(), 2, LLAMA, RECIPE)
    assert alone == counted[1] / 2
    assert source == "those at tp=1 over 2, without all-to-all buffers"


def test_without_heads_a_larger_degree_keeps_what_the_largest_counted_does() -> None:
    """Copies of k and v are then unknown; a smaller degree takes the next counted one."""
    memory = replace(
        toy_model().layers[0].memory[1024], ulysses_activation_bytes_per_sample={2: 5e6, 8: 1.5e6}
    )
    bare = toy_spec(num_heads=None).layers[0]

    assert ulysses_bytes(memory, 16, bare, RECIPE)[0] == 1.5e6
    assert ulysses_bytes(memory, 4, bare, RECIPE)[0] == 1.5e6 * 8 / 4
    assert ulysses_bytes(memory, 3, bare, RECIPE)[0] == 1.5e6 * 8 / 3
    assert ulysses_bytes(memory, 1, bare, RECIPE)[0] == 8e6


# --- planning ---


def cost_of(counted: dict[int, float], *, lengths: tuple[int, ...] = (1024,)) -> CostModel:
    """Return the cost model of the toy profile with Ulysses activations at 1024 tokens."""
    model = toy_model()
    memory = replace(model.layers[0].memory[1024], ulysses_activation_bytes_per_sample=counted)
    layer = replace(model.layers[0], memory={1024: memory})
    options = SearchOptions(time_profile_mode="batch")
    if lengths != (1024,):
        options = replace(options, time_profile_mode="sequence", memory_profile_mode="sequence")
        model = replace(
            model, other_times=tuple(replace(t, seq_lengths=(512,)) for t in model.other_times)
        )
        layer = replace(layer, times=tuple(replace(t, seq_length=512) for t in layer.times))
    spec = toy_spec(seq_length=lengths[0])
    return CostModel(spec, replace(model, layers=(layer,)), toy_hardware(), options)


def test_counted_activations_are_planned_with() -> None:
    """b = 4 samples of 5 MB instead of 8/2; context over 2; recomputed ones are the same."""
    cost = cost_of({2: 5e6})
    strategies = [
        LayerStrategy(tp=2, ulysses=True),
        LayerStrategy(tp=2, ulysses=True, cp=2),
        LayerStrategy(tp=2, ulysses=True, checkpoint=True),
        LayerStrategy(tp=2),
    ]
    rows = cost.layer_rows(0, strategies, [(1, 16, "ddp")])

    assert rows.activations[0].tolist() == [20e6, 20e6, 4 * 1e6 / 2, 4 * 4.5e6]
    backward = 4 * 5 / 2 * 1024 * 512 * 2
    # and the gradient of the MLP's last matrix, which Ulysses ranks have whole
    backward += 2 * 512 * 2048
    assert rows.transient[1, 0].tolist()[:3] == [backward, backward, 20e6 + backward]
    assert not any("activations at ulysses=2" in text for text in cost.defaults_used)


def test_without_counts_the_share_is_used_and_listed() -> None:
    """As before, table[1]/t; a checkpointed layer's bytes follow as well, and it is said."""
    cost = cost_of({})
    rows = cost.layer_rows(0, [LayerStrategy(tp=2, ulysses=True)], [(1, 16, "ddp")])

    assert rows.activations[0, 0] == 4 * 8e6 / 2
    assert (
        "layer type 0: activations at ulysses=2 are those at tp=1 over 2, "
        "without all-to-all buffers"
    ) in cost.defaults_used


def test_sequence_mode_scales_counted_activations() -> None:
    """Counted at 1024 tokens, planned with 512: half of it."""
    cost = cost_of({2: 5e6}, lengths=(512,))
    rows = cost.layer_rows(0, [LayerStrategy(tp=2, ulysses=True)], [(1, 16, "ddp")])

    assert rows.activations[0, 0] == 4 * 5e6 / 2


def test_what_a_checkpointed_layer_keeps_is_its_input_over_the_degree() -> None:
    """Counted exactly, for Megatron and DTensor with split sequences, and for Ulysses."""
    pytest.importorskip("torch", reason="counting needs torch")
    from profiler.model.counting import layer_memory
    from profiler.model.layers.sharding import Sharding

    whole = layer_memory(LLAMA, Sharding(checkpoint="full")).activation_bytes
    assert whole == 32 * MIB
    for kind in ("sp", "dtensor_sp", "ulysses"):
        sharded = Sharding(degree=4, kind=kind, checkpoint="full")  # type: ignore[arg-type]
        assert layer_memory(LLAMA, sharded).activation_bytes == whole / 4
    plain = Sharding(degree=4, kind="tp", checkpoint="full")
    assert layer_memory(LLAMA, plain).activation_bytes == whole
