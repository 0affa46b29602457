"""Which cells a model is profiled in, and what they are called."""

from __future__ import annotations

import pytest

from autopar.documents.spec import load_spec
from autopar.errors import InputError, OptionError
from autopar.records import replace
from profiler.model.cells import ModelCell, length_cases, plan_cells, stack_counts, tensor_degrees
from tests.unit.profile_model_support import LLAMA, T5, make_options


def keys(**changes: object) -> list[str]:
    """Return the names of the cells of the tiny llama."""
    return [cell.key for cell in plan_cells(LLAMA, make_options(**changes))]


def test_static_mode_in_full() -> None:
    """What the documented keys need comes first; checks and shards follow."""
    assert keys(profile_type="computation") == [
        "time_layertype_0_bsz8_seq128",
        "time_other_bsz8_seq128",
        "time_layernum[2]_bsz8_seq128",
        "time_layernum[4]_bsz8_seq128",
        "time_layertype_0_bsz8_seq128_tp2_sp",
    ]
    assert keys(profile_type="memory") == [
        "memory_layertype_0_bsz1_seq128",
        "memory_layertype_0_bsz1_seq128_full",
        "memory_layertype_0_bsz1_seq128_selective",
        "memory_layertype_0_bsz1_seq128_tp2_sp",
        "memory_layertype_0_bsz1_seq128_tp2_sp_full",
        "memory_layertype_0_bsz1_seq128_tp2_sp_selective",
        "memory_layertype_0_bsz1_seq128_tp2_tp",
        "memory_layertype_0_bsz1_seq128_tp2_ulysses",
        "memory_other_only_bsz8_seq128",
        "memory_other_only_bsz8_seq128_tp2_sp",
        "memory_other_only_bsz8_seq128_tp2_tp",
        "memory_other_first_bsz8_seq128",
        "memory_other_first_bsz8_seq128_tp2_sp",
        "memory_other_first_bsz8_seq128_tp2_tp",
        "memory_other_last_bsz8_seq128",
        "memory_other_last_bsz8_seq128_tp2_sp",
        "memory_other_last_bsz8_seq128_tp2_tp",
    ]


def test_batch_mode_shards_the_ends() -> None:
    """Every batch is measured whole, the smallest and the largest also sharded."""
    found = keys(mode="batch", bsz="1:4", profile_type="computation")

    for batch in range(1, 5):
        assert f"time_layertype_0_bsz{batch}_seq128" in found
        assert f"time_layernum[4]_bsz{batch}_seq128" in found
    assert [key for key in found if "_tp2_" in key] == [
        "time_layertype_0_bsz1_seq128_tp2_sp",
        "time_layertype_0_bsz4_seq128_tp2_sp",
    ]


def test_sequence_mode_halves_the_own_length() -> None:
    """Five lengths, geometric, with the longest the model's own; short models have fewer."""
    long = replace(LLAMA, layers=(replace(LLAMA.layers[0], seq_length=4096),))
    options = make_options(mode="sequence")

    assert length_cases(long, options) == ((256,), (512,), (1024,), (2048,), (4096,))
    assert length_cases(LLAMA, options) == ((64,), (128,))


def test_two_layer_types() -> None:
    """Every type has cells of its own, the rest names all lengths, stacks vary one type each."""
    options = make_options(profile_type="computation", bsz="2", seq="[64,32],[128,32]")
    cells = plan_cells(T5, options)
    names = [cell.key for cell in cells]

    assert stack_counts(T5, options) == ((2, 2), (4, 2), (2, 4))
    assert len(set(names)) == len(names)
    assert "time_layertype_1_bsz2_seq32" in names
    assert "time_other_bsz2_seq[64,32]" in names
    assert "time_layernum[2,4]_bsz2_seq[128,32]" in names
    decoder = [cell for cell in cells if cell.layer_type == 1]
    assert {cell.encoder_seq_length for cell in decoder} == {64}
    assert all(c.encoder_seq_length is None for c in cells if c.layer_type != 1)


def test_one_length_is_that_of_all_types() -> None:
    """`--seq 64` profiles encoder and decoder at 64 tokens."""
    assert length_cases(T5, make_options(seq="64")) == ((64, 64),)


def test_dtensor_has_its_own_kinds() -> None:
    """The implementation of tensor parallelism is a part of a cell's name; Ulysses has none."""
    found = keys(tp_impl="dtensor")

    assert "memory_layertype_0_bsz1_seq128_tp2_dtensor_sp" in found
    assert "memory_layertype_0_bsz1_seq128_tp2_dtensor" in found
    assert not [key for key in found if key.endswith(("_tp", "_sp", "ulysses")) and "dt" not in key]


def test_half_a_layer() -> None:
    """A half has neither surroundings nor whole forwards."""
    assert keys(profile_unit="mlp", tp="1") == [
        "memory_layertype_0_bsz1_seq128",
        "time_layertype_0_bsz8_seq128",
    ]


def test_a_module_of_ones_own() -> None:
    """Its plan's degrees alone, its surroundings whole, what is not a layer left to be derived."""
    options = make_options(tp="1,2,4", bsz="2")
    found = [cell.key for cell in plan_cells(LLAMA, options, own_degrees=(1, 2))]

    assert found == [
        "memory_layertype_0_bsz1_seq128",
        "memory_layertype_0_bsz1_seq128_full",
        "memory_layertype_0_bsz1_seq128_tp2_dtensor",
        "memory_layertype_0_bsz1_seq128_tp2_dtensor_full",
        "memory_other_only_bsz8_seq128",
        "memory_other_first_bsz8_seq128",
        "memory_other_last_bsz8_seq128",
        "time_layertype_0_bsz2_seq128",
        "time_layernum[2]_bsz2_seq128",
        "time_layernum[4]_bsz2_seq128",
        "time_layertype_0_bsz2_seq128_tp2_dtensor",
    ]


def test_default_degrees_are_those_that_fit() -> None:
    """4 heads and 2 of keys and values take degree 4, not 8; llama2-7b takes all of them."""
    assert tensor_degrees(LLAMA, make_options(tp=None)) == (1, 2, 4)
    assert tensor_degrees(load_spec("llama2-7b"), make_options(tp=None)) == (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tp": "3"}, "tensor degree 3 does not divide the attention heads 4"),
        ({"seq": "[64,64]"}, "has 2 lengths, but model 'tiny-llama' has 1 layer type(s)"),
        ({"seq": "129", "tp": "2"}, "does not divide the sequence length 129"),
    ],
)
def test_what_the_model_does_not_allow(changes: dict[str, object], said: str) -> None:
    """One sentence with the number and the remedy."""
    with pytest.raises(InputError) as caught:
        keys(**changes)

    assert said in str(caught.value)


def test_lengths_beyond_the_position_table() -> None:
    """A learned table ends the sequences, before anything is measured."""
    short = replace(LLAMA, learned_positions=100)

    with pytest.raises(InputError, match="128 tokens are more than the 100 rows"):
        plan_cells(short, make_options())


def test_sequence_mode_needs_several_lengths() -> None:
    """A model too short for a default range gets the option that helps."""
    short = replace(LLAMA, layers=(replace(LLAMA.layers[0], seq_length=64),))

    with pytest.raises(OptionError, match="--seq 64:512:x2"):
        plan_cells(short, make_options(mode="sequence"))


def test_a_cell_names_its_measurement() -> None:
    """The sidecar's cell has everything that the name says."""
    cell = ModelCell(quantity="time", part="only", batch=2, seq_lengths=(64, 32), num_layers=(2, 4))
    found = cell.filled(status="skipped", reason="made up")

    assert found.key == "time_layernum[2,4]_bsz2_seq[64,32]"
    assert (found.num_layers, found.seq_lengths, found.source) == ([2, 4], [64, 32], "device")
    assert (found.status, found.reason) == ("skipped", "made up")
