"""Estimates: exact accounting, invariants, published figures, and the command."""

from __future__ import annotations

import json

import numpy as np
import pytest

from autopar.documents import catalog
from autopar.documents.hardware import read_hardware_dir
from autopar.documents.model import read_model_profile
from autopar.documents.spec import load_spec
from autopar.errors import DocumentError, InputError
from autopar.rates.card import estimate_hardware, load_card, parse_hardware
from autopar.rates.collectives import GroupShape, collective_time_s
from autopar.rates.command import run
from autopar.rates.measured import COLLECTIVES
from autopar.rates.model import activation_bytes, estimate_model, layer_flop
from autopar.records import replace
from autopar.units import GB, MIB


@pytest.mark.parametrize(
    ("degree", "with_sp", "without_sp"),
    [(1, 656.531, 656.531), (2, 328.266, 392.281), (4, 164.133, 260.156), (8, 82.066, 194.094)],
)
def test_activations_equal_what_autograd_keeps(degree, with_sp, without_sp):
    """Saved tensors of a reference layer (h 4096, 32 heads, 8 kv heads, f 14336, S 4096), MiB."""
    layer = load_spec("llama3-8b").layers[0]
    for sequence_parallel, expected in ((True, with_sp), (False, without_sp)):
        got = activation_bytes(
            layer, 4096, degree, sequence_parallel=sequence_parallel, kernels="fused"
        )
        assert got / MIB == pytest.approx(expected, abs=6e-4)


def test_activations_match_a_measured_eager_layer():
    """272.28 MiB published for gpt-6.7b at 2,048 tokens (Galvatron v2.4), 1/t at degree t."""
    layer = load_spec("gpt-6.7b").layers[0]
    for degree in (1, 2, 4, 8):
        got = activation_bytes(layer, 2048, degree) / MIB
        assert got == pytest.approx(272.2822 / degree, rel=1e-3)


def test_profile_is_complete_and_marked():
    spec = load_spec("llama3-8b")
    profile = estimate_model(spec, "h100", batches=(1, 2, 8))
    assert profile.estimated
    assert profile.notes == ("estimated: llama3-8b on card h100-80gb, bf16, torchtitan-eager",)
    memory = profile.layers[0].memory[8192]
    assert set(memory.activation_bytes_per_sample) == {1, 2, 4, 8, 16, 32}
    assert memory.checkpoint_bytes_per_sample == 8192 * 4096 * 2
    assert profile.logits_peak_bytes_per_sample == 4 * 8192 * 128256
    only = profile.other_memory["only"][(8192,)]
    assert only.model_state_bytes[1] == 16 * (2 * 128256 * 4096 + 4096)


def test_samples_of_a_batch_share_what_a_kernel_costs():
    """Short ones share launches and waves; a long one fills the device, and more of it heats it."""
    spec = load_spec("llama3-8b")
    profile = estimate_model(spec, "h100", seq_lengths=[128, 8192], batches=(1, 2, 8))
    short, long = (
        [p.forward_s / p.batch for p in profile.layers[0].times if p.seq_length == length]
        for length in (128, 8192)
    )
    assert short == sorted(short, reverse=True)
    assert short[0] > 2 * short[-1]
    assert long == sorted(long)
    assert long[-1] < 1.02 * long[0]


def test_tied_weights_stand_once_on_one_stage_and_twice_on_two():
    spec = load_spec("gpt2-xl")
    other = estimate_model(spec, "a100", batches=(1,)).other_memory
    table = 16 * 50304 * 1600
    first, last = (other[p][(1024,)].model_state_bytes[1] for p in ("first", "last"))
    assert first == table + 16 * 1024 * 1600
    assert last == table + 16 * 2 * 1600
    assert other["only"][(1024,)].model_state_bytes[1] == first + last - table


def test_layer_types_have_their_own_figures():
    profile = estimate_model(load_spec("t5-3b"), "a100", batches=(1, 4))
    encoder, decoder = (layer.times[0].forward_s for layer in profile.layers)
    assert encoder < decoder < 2 * encoder
    assert set(profile.other_memory["last"]) == {(512, 512)}


def test_longer_sequences_cost_more_per_token():
    times = (
        estimate_model(load_spec("llama3-8b"), "h100", seq_lengths=[4096, 32768], batches=(1,))
        .layers[0]
        .times
    )
    assert times[1].forward_s > 8 * times[0].forward_s


def test_newer_devices_are_faster():
    spec = load_spec("llama2-7b")
    names = ("a100-80gb", "h100", "b200")
    times = [estimate_model(spec, n, batches=(4,)).layers[0].times[0].forward_s for n in names]
    assert times[0] > 1.7 * times[1] > 1.7 * times[2]


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 8), (3, 2), (4, 6), (32, 8), (2, 1)])
def test_hardware_covers_every_divisor(nodes, gpus):
    profile = estimate_hardware("h100", num_nodes=nodes, gpus_per_node=gpus)
    world = nodes * gpus
    degrees = {g for g in range(2, world + 1) if world % g == 0}
    assert {g for g, _ in profile.allreduce_bytes_per_s} == degrees
    assert set(profile.p2p_bytes_per_s) == set(profile.p2p_curves) == degrees
    assert set(profile.curves) == {(o, g) for o in COLLECTIVES for g in degrees}
    assert set(profile.strided_curves) == {(o, g) for o in COLLECTIVES for g in degrees - {world}}
    assert profile.estimated
    for curve in profile.curves.values():
        assert curve.sizes_bytes[0] == MIB
        assert curve.sizes_bytes[-1] == 1024 * MIB
        assert (curve.times_s[1:] > curve.times_s[:-1]).all()
    assert profile.allreduce_bytes_per_s[world, True] == profile.allreduce_bytes_per_s[world, False]


def test_strided_groups_cross_nodes_and_are_slower():
    table = estimate_hardware("a100", num_nodes=2, gpus_per_node=8).allreduce_bytes_per_s
    assert table[2, False] < 25 * GB < table[2, True]
    assert table[8, False] < table[8, True]
    # ranks 0,4,8,12: two adapters per node; ranks 0,8: one
    assert 2 * table[2, False] < table[4, False] < 3 * table[2, False]
    # a ring of the two adapters has twice the rate; a tree of two nodes sends 2/3 of its bytes
    assert table[4, False] == pytest.approx(2 * 1.5 * table[2, False], rel=0.15)


def test_groups_that_straddle_nodes_unevenly_count_all_their_ranks():
    """Six of twelve ranks lie 4 + 2 or 2 + 4 on nodes of four: two adapters, six ranks."""
    network = load_card("a100-80gb").network
    profile = estimate_hardware("a100-80gb", num_nodes=3, gpus_per_node=4)
    adapters = 2 * network.adapter_bytes_per_s * network.adapter_share
    for operation in COLLECTIVES:
        curve = profile.curves[operation, 6]
        shape = GroupShape(ranks=6, fewest=2, most=4, nodes=2)
        assert curve.times_s == pytest.approx(
            collective_time_s(network, operation, curve.sizes_bytes, shape), rel=1e-12
        )
    # a tree over two nodes sends the tensor once through them, a ring of six 5/3 of it
    assert profile.allreduce_bytes_per_s[6, True] < 5 / 3 * adapters
    # of each rank's input 1/6 goes to each of four peers elsewhere; three are on the node
    curve = profile.curves["all2all", 6]
    remote = curve.sizes_bytes[-1] * 4 / 6 / (adapters / 2)
    assert remote < curve.times_s[-1] < 1.05 * remote


def test_bandwidths_are_averages_of_the_curves():
    profile = estimate_hardware("h100", num_nodes=2, gpus_per_node=8)
    curve = profile.curves["allreduce", 8]
    rates = 2 * 7 / 8 * curve.sizes_bytes / curve.times_s
    assert profile.allreduce_bytes_per_s[8, True] == pytest.approx(np.mean(rates[4:10]))


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_transfers_of_stages_wait_for_each_other(num_nodes):
    """Base, bytes and what two stages wait: by the card's own figures."""
    network = load_card("h100").network
    profile = estimate_hardware("h100", num_nodes=num_nodes, gpus_per_node=8)
    curve = profile.p2p_curves[2]
    rate, base_s = network.link_bytes_per_s * network.p2p_share, network.p2p_base_s
    if num_nodes == 2:
        rate, base_s = network.adapter_bytes_per_s * network.adapter_share, network.p2p_net_base_s
    assert curve.times_s == pytest.approx(base_s + 80e-6 + curve.sizes_bytes / rate, rel=1e-12)
    # a documented bandwidth is message over time, averaged over 16 to 512 MiB
    averaged = (curve.sizes_bytes / curve.times_s)[4:10]
    assert profile.p2p_bytes_per_s[8] == pytest.approx(np.mean(averaged), rel=1e-12)


@pytest.mark.parametrize("text", ["h100", "h100:4", "h100:0x8", "h100:4x0", ":1x8", "h100:-1x8"])
def test_bad_hardware_text(text):
    with pytest.raises(InputError, match="CARD:NODESxGPUS"):
        parse_hardware(text)


def test_hardware_text():
    assert parse_hardware("h100:4x8") == ("h100", 4, 8)


def test_more_gpus_than_the_node_connects():
    with pytest.raises(InputError, match="at most 8 GPUs"):
        estimate_hardware("a100", num_nodes=1, gpus_per_node=16)


@pytest.mark.parametrize("name", catalog.card_names())
def test_every_number_of_a_card_names_its_origin(name):
    card = json.loads(catalog.find_card(name).read_text())
    for section in ("device", "intra_node", "inter_node", "efficiency", "overhead", "host"):
        for key, entry in card[section].items():
            assert set(entry) in ({"value", "source"}, {"value", "basis"}), key
            assert len(entry.get("source", entry.get("basis"))) > 10, key


@pytest.mark.parametrize("value", [None, 0, -1, "x", True, 1.5, float("nan"), float("inf")])
def test_bad_card_value_names_file_and_key(tmp_path, value):
    card = json.loads(catalog.find_card("h200").read_text())
    card["efficiency"]["gemm"]["value"] = value
    path = tmp_path / "card.json"
    path.write_text(json.dumps(card))
    with pytest.raises(DocumentError, match=r"card\.json: key 'efficiency\.gemm\.value'"):
        load_card(str(path))


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("device", "memory_bytes_per_s", 2039, "2039"),
        ("device", "memory_bytes", 80, "GiB"),
        ("device", "memory_bytes", 81920, "MiB"),
        ("device", "fp16_flop_per_s", 312, "It looks like TFLOP/s: write 3\\.12e\\+14$"),
        ("device", "num_sms", 108.5, r"108\.5, expected a whole number from 1 to 10000$"),
        ("device", "num_sms", 10**40, "expected a whole number from 1 to 10000$"),
        ("efficiency", "memory", 85, "It looks like percent: write 0\\.85$"),
        ("efficiency", "memory", 1.5, r"1\.5, expected a number from 0\.02 to 1$"),
        ("overhead", "kernel_launch_s", 5, "It looks like us: write 5e-06$"),
        ("overhead", "overlap_coefficient", 0.9, r"0\.9, expected a number from 1 to 10$"),
        ("inter_node", "bytes_per_s", 25, "It looks like GB/s: write 2\\.5e\\+10$"),
        ("inter_node", "hop_s", None, "null, expected a number from"),
    ],
)
def test_card_value_in_another_unit_is_refused(tmp_path, section, key, value, words):
    card = json.loads(catalog.find_card("h200").read_text())
    card[section][key]["value"] = value
    path = tmp_path / "card.json"
    path.write_text(json.dumps(card))
    with pytest.raises(DocumentError, match=f"key '{section}.{key}.value': the value is .*{words}"):
        load_card(str(path))


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("devise",), 1, "'devise'"),
        (("device", "bf16"), 1, "'device.bf16': this key is unknown.*'bf16_flop_per_s'"),
        (("device", "num_sms", "values"), 1, "'device.num_sms.values': this key.*'value'"),
        (("device", "num_sms"), 108, r"'device.num_sms': the value is 108, expected \{\"value\""),
        (
            ("device",),
            None,
            "'device': the value is null, expected an object with the keys memory_bytes,",
        ),
        (("format",), "autopar-model", "'format': the value is 'autopar-model', expected"),
        (("version",), None, "'version': the value is null, expected 1"),
        (("name",), 5, "'name': the value is 5, expected a text"),
        (("_note",), "of people", None),
        (("format",), ..., "'format'"),
        (
            ("inter_node",),
            ...,
            "'inter_node': this key is missing, expected an object with the keys",
        ),
        (("device", "num_sms"), ..., r"'device.num_sms': this key is missing, expected \{"),
        (("device", "num_sms", "value"), ..., "'device.num_sms.value': this key is missing"),
    ],
)
def test_keys_of_a_card_are_checked(tmp_path, keys, value, words):
    card = node = json.loads(catalog.find_card("h200").read_text())
    for key in keys[:-1]:
        node = node[key]
    if value is ...:
        del node[keys[-1]]
    else:
        node[keys[-1]] = value
    path = tmp_path / "card.json"
    path.write_text(json.dumps(card))
    if words is None:
        assert load_card(str(path)).memory_bytes == load_card("h200").memory_bytes
        return
    with pytest.raises(DocumentError, match=words) as caught:
        load_card(str(path))
    assert "None" not in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"format": 1, "format": 2}', "'format': this key appears twice"),
        (b'{"format": "autopar-card"', "truncated"),
        (b'{"a\xff": 1}', "not UTF-8"),
    ],
)
def test_unreadable_card_is_one_sentence(tmp_path, raw, words):
    (tmp_path / "card.json").write_bytes(raw)
    with pytest.raises(DocumentError, match=words):
        load_card(str(tmp_path / "card.json"))


def test_command_writes_what_readers_read(tmp_path):
    arguments = ["--model", "llama2-7b", "--hardware", "a100-80gb:1x8", "--out", str(tmp_path)]
    assert run(arguments) == 0
    hardware = read_hardware_dir(tmp_path, num_nodes=1, gpus_per_node=8)
    _same_hardware(hardware)
    spec = load_spec("llama2-7b")
    profile = _same_times(tmp_path, spec)
    expected = estimate_model(spec, "a100-80gb")
    assert profile.logits_peak_bytes_per_sample == expected.logits_peak_bytes_per_sample
    length = spec.layers[0].seq_length
    got_memory, want_memory = (p.layers[0].memory[length] for p in (profile, expected))
    assert got_memory.parameter_count == pytest.approx(want_memory.parameter_count)
    assert dict(got_memory.activation_bytes_per_sample) == pytest.approx(
        dict(want_memory.activation_bytes_per_sample)
    )


def test_shipped_documents_are_current():
    """Hardware and times; the shipped memory is counted, see test_shipped_memory.py."""
    _same_hardware(
        read_hardware_dir(catalog.find_hardware("a100-80gb_1x8"), num_nodes=1, gpus_per_node=8)
    )
    _same_times(catalog.find_model("llama2-7b").parent / "configs", load_spec("llama2-7b"))


def _same_hardware(hardware):
    expected = estimate_hardware("a100-80gb", num_nodes=1, gpus_per_node=8)
    assert hardware.estimated
    assert dict(hardware.allreduce_bytes_per_s) == pytest.approx(
        dict(expected.allreduce_bytes_per_s)
    )
    assert dict(hardware.p2p_bytes_per_s) == pytest.approx(dict(expected.p2p_bytes_per_s))
    assert hardware.memory_bytes == expected.memory_bytes
    for kind in ("curves", "strided_curves", "p2p_curves"):
        found, wanted = getattr(hardware, kind), getattr(expected, kind)
        assert set(found) == set(wanted)
        for key, curve in wanted.items():
            assert found[key].times_s == pytest.approx(curve.times_s)


def _same_times(folder, spec):
    profile = read_model_profile(
        computation=folder, memory=folder, spec=spec, sequence_parallel=True, precision="bf16"
    )
    expected = estimate_model(spec, "a100-80gb")
    assert profile.estimated
    for got, want in zip(profile.layers[0].times, expected.layers[0].times, strict=True):
        assert got.forward_s == pytest.approx(want.forward_s)
    return profile


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"--model": "lama2-7b"}, "llama2-7b"),
        ({"--hardware": "a100"}, "CARD:NODESxGPUS"),
        ({"--hardware": "c64:1x8"}, "no device card 'c64'"),
        ({"--precision": "int8"}, "int8"),
        ({"--seq-length": "many"}, "--seq-length"),
        ({"--seq-length": "1,2,3"}, "seq_length"),
        ({"--kernels": "magic"}, "--kernels"),
    ],
)
def test_command_refuses_bad_input_in_one_sentence(tmp_path, capsys, changed, words):
    options = {"--model": "llama2-7b", "--hardware": "a100:1x8", "--out": str(tmp_path), **changed}
    code = run([word for pair in options.items() for word in pair])
    said = capsys.readouterr().err
    assert code == 2
    assert words in said
    assert len(said.strip().splitlines()) == 1


def test_estimates_are_near_published_measurements(cases_dir):
    folder = cases_dir / "galvatron"
    time = json.loads(
        (folder / "model" / "computation_profiling_bf16_llama2-7b_all.json").read_text()
    )
    spec = load_spec("llama2-7b", seq_length=[2048])
    profile = estimate_model(spec, "a100-80gb", batches=range(1, 13))
    for point in profile.layers[0].times:
        measured = time[f"layertype_0_bsz{point.batch}_seq2048"] * 1e-3 * point.batch
        assert point.forward_s == pytest.approx(measured, rel=0.15)
    file = folder / "hardware" / "allreduce_bandwidth_1nodes_8gpus_per_node.json"
    table = estimate_hardware("a100-80gb", num_nodes=1, gpus_per_node=8).allreduce_bytes_per_s
    measured = json.loads(file.read_text())["allreduce_size_8_consec_1"] * MIB * 1000
    assert table[8, True] == pytest.approx(measured, rel=0.2)


def test_tokens_of_a_mixture_visit_some_experts_and_all_are_resident():
    """Time and activations follow the visited experts, memory of parameters all of them."""
    spec = load_spec("mixtral-8x7b", seq_length=[4096])
    (layer,) = spec.layers
    one = replace(layer, num_experts=None, experts_per_token=None)
    profile, dense = (
        estimate_model(replace(spec, layers=(x,)), "h100", batches=(4,)) for x in (layer, one)
    )
    assert profile.layers[0].memory[4096].parameter_count == 1_451_270_144
    ratio = profile.layers[0].times[0].forward_s / dense.layers[0].times[0].forward_s
    assert 1.5 < ratio < 2.2  # two experts of eight, with the same attention
    more = replace(layer, num_experts=64)
    flops = [layer_flop(x, 4096, 4096) for x in (layer, more)]
    router = 2.0 * 4096 * 4096 * (64 - 8)
    assert flops[1] - flops[0] == router


def test_flop_of_a_layer_by_hand():
    """Matrices two FLOP a weight and token, half of all pairs of tokens, a second attention."""
    (layer,) = load_spec("llama3-8b").layers
    s, h, kv, f = 512, 4096, 1024, 14336
    matrices = 2 * s * h * (2 * h + 2 * kv + 3 * f)
    assert layer_flop(layer, s, s) == matrices + 2 * s * s * h
    crossing = replace(layer, cross_attention=True)
    other = 2 * h * (2 * s * h + 64 * 2 * kv) + 4 * s * 64 * h
    assert layer_flop(crossing, s, 64) == matrices + 2 * s * s * h + other


def test_activations_of_a_mixture_by_hand():
    """Two experts' MLPs, their tokens whole on every rank, the router's figures with the rest."""
    (layer,) = load_spec("mixtral-8x7b").layers
    one = replace(layer, num_experts=None, experts_per_token=None)
    s, h, f, e = 4096, 4096, 14336, 2
    for degree in (1, 4):
        for sequence_parallel, kernels in ((True, "fused"), (False, "eager")):
            share = degree if sequence_parallel else 1
            output = (2 if kernels == "eager" else 1) * 2 * s * h * e
            # of each choice: int64 numbers of expert, token and place, its weight in fp32 and again
            router = (3 * 8 + 4 + e) * s * 2
            extra = 4 * s * f * e / degree + 2 * s * h * e + (output + router) / share
            got = [
                activation_bytes(x, s, degree, sequence_parallel=sequence_parallel, kernels=kernels)
                for x in (layer, one)
            ]
            assert got[0] - got[1] == pytest.approx(extra, rel=1e-12)
