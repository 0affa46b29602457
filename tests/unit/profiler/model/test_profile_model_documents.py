"""What the documented files of a profile hold, by hand-made cells."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from autopar.documents.json import read_record
from autopar.documents.schemas import ComputationDocument, MemoryDocument
from autopar.documents.sidecar import ModelMeasurement
from autopar.records import replace
from autopar.run.model import ModelSpec
from profiler.model.cells import plan_cells, tensor_kinds
from profiler.model.documents import ModelDocument, derive_computation, derive_memory
from tests.unit.profile_model_support import LLAMA, OTHER_S, SAMPLE_S, T5, MadeUp, make_options

MS = 1e-3


def cells_of(spec: ModelSpec, **changes: Any) -> dict[str, ModelMeasurement]:
    """Return all cells of a run, measured."""
    measurer = MadeUp()
    return {cell.key: measurer.measure(cell) for cell in plan_cells(spec, make_options(**changes))}


def computation(spec: ModelSpec, **changes: Any) -> ModelDocument:
    """Return the computation file of a run."""
    options = make_options(**changes)
    return derive_computation(cells_of(spec, **changes), spec, options.mode)


def memory(spec: ModelSpec, **changes: Any) -> ModelDocument:
    """Return the memory file of a run."""
    return derive_memory(cells_of(spec, **changes), spec, tensor_kinds(make_options(**changes)))


def outline(data: Mapping[str, Any], indent: str = "") -> str:
    """Return the keys of a document, one a line, inner ones indented."""
    text = ""
    for key, value in data.items():
        text += f"{indent}{key}\n"
        if isinstance(value, dict):
            text += outline(value, indent + "    ")
    return text


@pytest.mark.parametrize(
    ("name", "spec", "changes"),
    [
        ("static", LLAMA, {"bsz": "2"}),
        ("batch", LLAMA, {"mode": "batch", "bsz": "1:8"}),
        ("sequence", LLAMA, {"mode": "sequence", "seq": "32:128:x2"}),
        ("t5", T5, {"bsz": "2"}),
    ],
)
def test_golden_key_sets(
    name: str,
    spec: ModelSpec,
    changes: dict[str, str],
    golden: Callable[[str, str], None],
    tmp_path: Path,
) -> None:
    """Exactly the documented keys, processed and raw, which the readers accept."""
    times, tables = computation(spec, **changes).data, memory(spec, **changes).data

    golden(f"profile_model_{name}.txt", outline({"computation": times, "memory": tables}))
    read_record(ComputationDocument, tmp_path, dict(times))
    read_record(MemoryDocument, tmp_path, json.loads(json.dumps(tables)))


def test_times_are_per_layer_and_sample() -> None:
    """Processed entries are ms per layer per sample, raw ones ms of a whole forward."""
    data = computation(LLAMA, mode="batch", bsz="1:8").data

    assert data["layertype_0_bsz8_seq128"] == pytest.approx(SAMPLE_S / MS)
    assert data["layertype_other_bsz8_seq128"] == pytest.approx(OTHER_S / MS)
    assert data["layernum[2]_bsz8_seq128"] == pytest.approx(8 * (2 * SAMPLE_S + OTHER_S) / MS)
    assert data["layernum[4]_bsz8_seq128"] == pytest.approx(8 * (4 * SAMPLE_S + OTHER_S) / MS)


def test_layer_times_of_the_sidecar() -> None:
    """Backward, recomputation, optimizer, shards and spread stand beside the documented forward."""
    found = computation(LLAMA, bsz="2").layer_times

    assert [(t.degree, t.kind) for t in found] == [(1, "sp"), (2, "sp")]
    whole = found[0]
    assert whole.forward_s == pytest.approx(2 * SAMPLE_S)
    assert whole.backward_s == pytest.approx(4 * SAMPLE_S)
    assert whole.recompute_s == pytest.approx(2 * SAMPLE_S)
    assert whole.optimizer_s == pytest.approx(1e-4)
    assert whole.forward_low_s is not None
    assert whole.forward_high_s is not None
    assert whole.forward_low_s < whole.forward_s < whole.forward_high_s
    assert found[1].forward_s == pytest.approx(SAMPLE_S)


def test_memory_is_per_sample_with_parameters_at_four_bytes() -> None:
    """Tables with and without `_sp` hold MiB per sample; model states are 16 bytes a parameter."""
    data = memory(LLAMA).data
    layer = data["layertype_0_sp"]["128"]

    assert layer["parameter_size"] == 4.0
    assert layer["tp_activation_per_bsz_dict"] == {"1": 1.0, "2": 0.5, "checkpoint": 0.125}
    plain = data["layertype_0"]["128"]["tp_activation_per_bsz_dict"]
    assert plain == {"1": 1.0, "2": 1.0, "checkpoint": 0.125}
    assert data["other_memory_pp_off_sp"]["128"]["model_states"] == {"1": 16.0, "2": 8.0}


def test_the_peak_of_the_loss_is_in_the_tables() -> None:
    """Where the loss is, what it needs for a moment counts; the embedding only keeps."""
    data = memory(LLAMA).data

    assert data["other_memory_pp_off_sp"]["128"]["activation"] == {"1": 1.5, "2": 0.75}
    assert data["other_memory_pp_on_last"]["128"]["activation"] == {"1": 1.5, "2": 1.5}
    assert data["other_memory_pp_on_first_sp"]["128"]["activation"] == {"1": 1.0, "2": 0.5}


def test_a_file_of_few_cells_has_only_what_they_say() -> None:
    """Nothing is made up for cells that are missing, and a layer without its whole has no entry."""
    found = cells_of(LLAMA, bsz="2")
    sharded = {key: m for key, m in found.items() if "_tp2_" in key}

    assert derive_memory(sharded, LLAMA, ("sp", "tp")).data == {}
    assert derive_computation(sharded, LLAMA, "static").data == {}
    one = {key: m for key, m in found.items() if key == "time_layertype_0_bsz2_seq128"}
    assert list(derive_computation(one, LLAMA, "static").data) == ["layertype_0_bsz2_seq128"]


def test_order_of_measuring_is_of_no_matter() -> None:
    """The same cells give the same bytes, whichever was measured first."""
    found = cells_of(T5, bsz="2")
    backwards = dict(reversed(found.items()))

    for first, second in (
        (derive_computation(found, T5, "static"), derive_computation(backwards, T5, "static")),
        (derive_memory(found, T5, ("sp", "tp")), derive_memory(backwards, T5, ("sp", "tp"))),
    ):
        assert json.dumps(first.data) == json.dumps(second.data)


def test_the_rest_of_a_module_is_what_its_layers_do_not_explain() -> None:
    """Without a cell of its own it comes from the whole forward with the fewest layers."""
    found = {key: m for key, m in cells_of(LLAMA, bsz="2").items() if "_other_" not in key}
    data = derive_computation(found, LLAMA, "static").data

    assert data["layertype_other_bsz2_seq128"] == pytest.approx(OTHER_S / MS)


def test_few_batches_are_a_warning() -> None:
    """Galvatron refuses batch mode with fewer than 8; the warning names the option."""
    few = computation(LLAMA, mode="batch", bsz="1:4").warnings

    assert [w for w in few if "Galvatron refuses" in w and "--resume --bsz 1:8" in w]
    assert not computation(LLAMA, mode="batch", bsz="1:8").warnings


def test_layers_that_are_slower_among_others_are_a_warning() -> None:
    """A difference of whole forwards that is 30 % above the layer alone is named, 5 % is not."""
    for factor, expected in ((1.05, 0), (1.3, 1)):
        found = cells_of(LLAMA, bsz="2")
        stack = found["time_layernum[4]_bsz2_seq128"]
        two = found["time_layernum[2]_bsz2_seq128"].samples_s["forward"]
        slower = [s + 2 * 2 * SAMPLE_S * factor for s in two]
        found[stack.key] = replace(stack, samples_s={"forward": slower})
        warnings = derive_computation(found, LLAMA, "static").warnings
        assert len(warnings) == expected
        assert all("layertype_0_bsz2_seq128 (x1.30)" in w for w in warnings)


def test_failed_cells_are_named_once_per_reason() -> None:
    """Two cells without memory are one sentence."""
    found = cells_of(LLAMA, bsz="2")
    for key in list(found)[:2]:
        found[key] = replace(found[key], status="failed", reason="made up", bytes={}, samples_s={})

    warnings = derive_memory(found, LLAMA, ("sp", "tp")).warnings
    assert warnings == ["memory_layertype_0_bsz1_seq128 and 1 more failed: made up"]


def test_a_device_that_disagrees_is_named() -> None:
    """Allocator and count within 1 % are fine; above it the cell says by how much, and why."""
    pytest.importorskip("torch", reason="torch is not installed")
    from profiler.model.timing import explain_difference

    assert explain_difference(100e6, 100.9e6) is None
    assert explain_difference(100e6, 90e6) == (
        "-10.0 % on the device: a kernel of this device keeps less than the reference, such as a "
        "fused one"
    )
    assert "rounds every tensor up" in str(explain_difference(10e3, 12e3))
    said = str(explain_difference(100e6, 130e6))
    found = cells_of(LLAMA)
    key = "memory_layertype_0_bsz1_seq128"
    found[key] = replace(found[key], notes=[said])

    assert derive_memory(found, LLAMA, ("sp", "tp")).warnings == [
        f"1 cell differs from its device by over 1 %; {key}: {said}"
    ]


def test_another_implementation_fills_the_same_tables() -> None:
    """DTensor's cells stand where Megatron's do, under the documented keys."""
    assert outline(memory(LLAMA, tp_impl="dtensor").data) == outline(memory(LLAMA).data)


def test_untied_models_need_no_vocabulary(tmp_path: Path) -> None:
    """A module of somebody's own is a spec of sizes alone; its tables validate as well."""
    sizes = replace(LLAMA, vocab_size=None)
    measurer = MadeUp()
    cells = plan_cells(sizes, make_options(), own_degrees=(1, 2))
    found = {cell.key: measurer.measure(cell) for cell in cells}

    tables = derive_memory(found, sizes, ("dtensor", "dtensor")).data
    read_record(MemoryDocument, tmp_path, json.loads(json.dumps(tables)))
    assert tables["layertype_0"] == tables["layertype_0_sp"]
