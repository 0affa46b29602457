"""Sites: what their files may say, and the factors that follow from made-up measurements."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.documents.catalog import find_site, site_names
from autopar.errors import DocumentError, InputError
from autopar.rates.accuracy import class_of_sources
from autopar.rates.card import estimate_hardware, load_card
from autopar.rates.collectives import GroupShape, SiteFactors, collective_time_s
from autopar.rates.constants import kernels_of
from autopar.rates.kernels import gemm_s
from autopar.rates.parts.operations import machine_of
from autopar.rates.site import (
    LARGE_BYTES,
    CollectiveTime,
    Site,
    StepWork,
    collective_s,
    data_parallel_work,
    fit_factors,
    gemm_flop,
    load_site,
    relative_gemm_rate,
    step_time_s,
)
from autopar.rates.stack import load_stack
from autopar.records import replace
from autopar.run.model import LayerSpec, ModelSpec
from autopar.sources import Source
from autopar.units import MIB

A100 = load_card("a100-80gb")
OPERATIONS = ("allreduce", "allgather", "reducescatter", "all2all")
SIZES = (MIB, 16 * MIB, 128 * MIB, 512 * MIB)


def figure(value: float, quality: str = "measured", spread: float = 0.02) -> dict[str, Any]:
    """Return an entry of a site."""
    return {"value": value, "quality": quality, "source": "a test", "spread": spread}


def whole() -> dict[str, Any]:
    """Return a document with everything that a site may say."""
    return {
        "format": "autopar-site",
        "version": 1,
        "name": "mine",
        "description": "two nodes",
        "card": "a100-80gb",
        "device": "NVIDIA A100-SXM4-80GB",
        "gpus_per_node": 8,
        "num_nodes": 2,
        "gemm": {
            "flop_per_s": figure(250e12),
            "first_flop_per_s": figure(260e12),
            "size": 8192,
            "dtype": "bf16",
        },
        "clock": figure(0.95),
        "copy_bytes_per_s": figure(1.7e12),
        "memory_share": figure(0.83),
        "in_node": figure(0.9, spread=0.1),
        "cross_node": figure(0.5),
        "adapter_bytes_per_s": figure(12.5e9, "nominal"),
        "host": {
            "forward_s": figure(3e-4),
            "backward_s": figure(5e-4),
            "torch": "2.11.0",
        },
        "collectives": [
            {
                "operation": "allreduce",
                "ranks": 16,
                "nodes": 2,
                "size_bytes": 1048576.0,
                "time_s": 1e-4,
            },
            {
                "operation": "allreduce",
                "ranks": 16,
                "nodes": 2,
                "size_bytes": 104857600.0,
                "time_s": 1e-2,
            },
        ],
    }


def site_of(folder: Path, document: object) -> Site:
    """Return the site of a document."""
    path = folder / "site.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return load_site(str(path))


def test_a_site_in_base_units(tmp_path: Path) -> None:
    """Every figure is read, with its quality and spread."""
    site = site_of(tmp_path, whole())

    assert (site.name, site.card, site.gpus_per_node, site.num_nodes) == ("mine", "a100-80gb", 8, 2)
    assert (site.gemm_flop_per_s, site.gemm_size, site.gemm_dtype) == (250e12, 8192, "bf16")
    assert (site.clock, site.memory_share, site.copy_bytes_per_s) == (0.95, 0.83, 1.7e12)
    assert site.factors == SiteFactors(in_node=0.9, cross_node=0.5)
    assert site.adapter_bytes_per_s == 12.5e9
    assert (site.host_forward_s, site.host_backward_s, site.torch) == (3e-4, 5e-4, "2.11.0")
    assert [row.time_s for row in site.collectives] == [1e-4, 1e-2]
    assert site.quality["clock"] == "measured"
    assert site.quality["adapter_bytes_per_s"] == "nominal"
    assert site.spread["in_node"] == 0.1
    assert site.known == {"clock", "memory_share", "in_node", "cross_node", "host"}
    assert site.network(A100.network) == replace(A100.network, adapter_bytes_per_s=12.5e9)


def test_what_is_missing_is_as_the_card_says(tmp_path: Path) -> None:
    """A site of two keys changes nothing, and nothing is known of it."""
    site = site_of(tmp_path, {"format": "autopar-site", "version": 1})

    assert site.name == "site"
    assert site.factors == SiteFactors()
    assert site.known == frozenset()
    assert site.network(A100.network) == A100.network
    assert (site.clock, site.memory_share, site.collectives) == (None, None, ())


def _without(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        *path, last = keys
        for key in path:
            document = document[key]
        del document[last]

    return change


def _with(value: object, *keys: str | int) -> Callable[[dict[str, Any]], None]:
    def change(document: Any) -> None:
        *path, last = keys
        for key in path:
            document = document[key]
        document[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "key", "said"),
    [
        (_without("format"), "format", 'Begin a site with "format": "autopar-site"'),
        (_with("autopar-card", "format"), "format", "'autopar-card', expected 'autopar-site'"),
        (_with(2, "version"), "version", "the value is 2, expected 1"),
        (_with(0.95, "clock"), "clock", "object"),
        (_with(95, "clock", "value"), "clock.value", "looks like a percentage"),
        (_with(0, "in_node", "value"), "in_node.value", "a number above"),
        (_with("good", "clock", "quality"), "clock.quality", "measured"),
        (_without("clock", "source"), "clock.source", "source of the value"),
        (_with(-0.1, "clock", "spread"), "clock.spread", "-0.1"),
        (_with(25, "adapter_bytes_per_s", "value"), "adapter_bytes_per_s.value", "GB/s"),
        (_with(250, "gemm", "flop_per_s", "value"), "gemm.flop_per_s.value", "TFLOP/s"),
        (_with("fp8", "gemm", "dtype"), "gemm.dtype", "bf16"),
        (_without("host", "backward_s"), "host.backward_s", "this key is missing"),
        (_with(0, "gpus_per_node"), "gpus_per_node", "a whole number from 1"),
        (_without("card"), "card", "'clock'"),
        (_with(3, "collectives", 0, "nodes"), "collectives", "a divisor of the 16 ranks"),
        (_with(1, "collectives", 0, "ranks"), "collectives", "a group of at least 2"),
        (_with("p2p", "collectives", 0, "operation"), "collectives", "allreduce"),
        (_with(0.0, "collectives", 0, "time_s"), "collectives", "a time"),
    ],
)
def test_what_a_site_must_not_say(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], key: str, said: str
) -> None:
    """One sentence with file, key, value and what was expected."""
    document = whole()
    change(document)
    with pytest.raises(DocumentError) as caught:
        site_of(tmp_path, document)

    assert str(tmp_path / "site.json") in str(caught.value)
    assert f"'{key}" in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", site_names())
def test_shipped_sites(name: str) -> None:
    """Each is of a card that is shipped, and says where its figures are from."""
    site = load_site(name)

    assert site.name == name
    assert site.card is not None
    assert load_card(site.card).name == site.card
    # some clusters are known by the nominal rate of their adapters alone
    nominal = name in ("vtrain-a100", "ibm-a100", "ibm-h100", "nvidia-b300")
    assert bool(site.known) == (not nominal)
    assert site.source.estimated == nominal
    assert site.known or site.adapter_bytes_per_s is not None
    assert set(site.quality.values()) <= {"derived", "nominal"}


def test_a_site_of_another_card_is_refused(tmp_path: Path) -> None:
    """Its factors are over the figures of its own card: as a machine and as estimated links."""
    site = site_of(tmp_path, whole())
    remedy = ("card", "Use a site of h100-80gb or --site none")
    with pytest.raises(DocumentError) as caught:
        machine_of(load_card("h100"), load_stack("megatron-core"), site)
    assert (caught.value.key, caught.value.remedy) == remedy
    with pytest.raises(DocumentError) as caught:
        estimate_hardware("h100", num_nodes=2, gpus_per_node=8, site=site)
    assert (caught.value.key, caught.value.remedy) == remedy

    aliased = site_of(tmp_path, {**whole(), "card": "a100"})
    assert machine_of(A100, load_stack("megatron-core"), aliased).clock == 0.95
    own = site_of(tmp_path, {**whole(), "card": "mine"})
    with pytest.raises(DocumentError, match="a100-80gb"):
        machine_of(A100, load_stack("megatron-core"), own)
    mine = replace(A100, name="mine")
    assert machine_of(mine, load_stack("megatron-core"), own).clock == 0.95


def test_a_site_changes_all_products_alike() -> None:
    """Its clock is of GEMMs in 16 bits; those in 8 bits keep their relation to them."""
    card, stack = load_card("h100-80gb"), load_stack("torchtitan-compiled")
    shares = set()
    for site in (None, load_site("meta-h100")):
        machine = machine_of(card, stack, site)
        wide, low = (machine.kernels.product_clock(one, machine.clock) for one in ("bf16", "fp8"))
        shares.add(round(low / wide, 12))
        assert site is None or wide == site.clock
    assert len(shares) == 1


def test_a_site_of_nominal_figures_is_as_unknown_as_none() -> None:
    """Nominal adapters say nothing of what is reached, so that the interval is no narrower."""
    stack = Source(role="software stack", path="stacks/megatron-core.json")
    bloom, vtrain = (load_site(name).source for name in ("jean-zay-a100", "vtrain-a100"))
    none = class_of_sources([stack], experts=False)

    assert class_of_sources([stack, vtrain], experts=False) == none
    assert class_of_sources([stack, bloom], experts=False) != none


def test_names_of_sites() -> None:
    """A name that is near is asked for; others are listed."""
    assert find_site("Selene-A100").stem == "selene-a100"
    with pytest.raises(InputError, match="Did you mean selene-a100"):
        load_site("selen-a100")
    with pytest.raises(InputError, match="See `autopar sites`"):
        load_site("zzz")


# --------------------------------------------------------------------------------------------------
# Factors.


def made_up(
    factors: SiteFactors,
    groups: tuple[tuple[int, int], ...],
    *,
    adapter_bytes_per_s: float = 25e9,
    gpus_per_node: int = 8,
    card: str = "a100-80gb",
    slower: float = 1.0,
) -> list[CollectiveTime]:
    """Return collectives of a cluster that has these factors, in groups of (ranks, nodes)."""
    network = replace(load_card(card).network, adapter_bytes_per_s=adapter_bytes_per_s)
    return [
        CollectiveTime(
            operation=operation,
            ranks=ranks,
            nodes=nodes,
            size_bytes=float(size),
            time_s=slower
            * collective_time_s(
                network,
                operation,
                float(size),
                GroupShape.even(ranks=ranks, per_node=min(ranks // nodes, gpus_per_node)),
                factors,
            ),
        )
        for operation in OPERATIONS
        for ranks, nodes in groups
        for size in SIZES
    ]


@pytest.mark.parametrize(("inside", "across"), [(1.0, 1.0), (0.36, 0.41), (1.2, 0.05)])
def test_factors_are_those_of_the_cluster(inside: float, across: float) -> None:
    """Times made with factors give these factors, and a spread of nothing."""
    factors = SiteFactors(in_node=inside, cross_node=across)
    rows = made_up(factors, ((2, 1), (4, 1), (8, 1), (16, 2), (2, 2)))
    in_node, cross_node = fit_factors(A100, rows, gpus_per_node=8)

    assert in_node is not None
    assert in_node == pytest.approx((inside, 0.0), abs=1e-6)
    assert cross_node is not None
    assert cross_node == pytest.approx((across, 0.0), abs=1e-6)


def test_factors_of_adapters_that_are_not_the_cards() -> None:
    """Four adapters of 100 Gb/s for eight GPUs are no factor when they are named."""
    rows = made_up(SiteFactors(), ((16, 2), (2, 2)), adapter_bytes_per_s=6.25e9)
    named = fit_factors(A100, rows, gpus_per_node=8, adapter_bytes_per_s=6.25e9)
    unnamed = fit_factors(A100, rows, gpus_per_node=8)

    assert named[0] is None
    assert named[1] == pytest.approx((1.0, 0.0), abs=1e-6)
    assert unnamed[1] is not None
    assert unnamed[1].value == pytest.approx(0.25, abs=1e-6)


def test_long_messages_weigh_most() -> None:
    """One operation at half the card's rate: the price of all with the factor is what all took."""
    rows = made_up(SiteFactors(), ((8, 1),))
    rows = [
        replace(row, time_s=2.0 * row.time_s) if row.operation == "allreduce" else row
        for row in rows
    ]
    (found, none) = fit_factors(A100, rows, gpus_per_node=8)
    assert found is not None
    assert none is None
    large = [row for row in rows if row.size_bytes >= LARGE_BYTES]
    shape = GroupShape.even(ranks=8, per_node=8)
    site = SiteFactors(in_node=found.value)
    priced = [
        collective_time_s(A100.network, row.operation, row.size_bytes, shape, site) for row in large
    ]

    assert sum(priced) == pytest.approx(sum(row.time_s for row in large), rel=1e-9)
    assert 0.5 < found.value < 1.0
    assert 0.1 < found.spread < 0.6
    # of a small one nothing is seen
    rows[0] = replace(rows[0], time_s=1.0)
    assert rows[0].size_bytes < LARGE_BYTES
    assert fit_factors(A100, rows, gpus_per_node=8)[0] == found


def test_small_messages_make_no_factor() -> None:
    """They would say what the latency is."""
    rows = [row for row in made_up(SiteFactors(), ((8, 1), (16, 2))) if row.size_bytes == MIB]

    assert fit_factors(A100, rows, gpus_per_node=8) == (None, None)
    assert fit_factors(A100, [], gpus_per_node=8) == (None, None)


@pytest.mark.parametrize("slower", [1e-5, 1e8])
def test_factors_stay_in_the_range_of_documents(slower: float) -> None:
    """Whatever times somebody measures."""
    rows = made_up(SiteFactors(), ((8, 1), (16, 2)), slower=slower)
    for found in fit_factors(A100, rows, gpus_per_node=8):
        assert found is not None
        assert 0.0 < found.value <= 10.0
        assert 0.0 <= found.spread <= 10.0
        assert math.isfinite(found.value)


def test_a_rack_of_links_is_one_domain() -> None:
    """Nodes of 4 in a rack of 72 talk through the links of the node."""
    rack = load_card("gb200")
    factors = SiteFactors(in_node=0.8)
    joined = made_up(factors, ((16, 1),), gpus_per_node=72, card="gb200")
    rows = [replace(row, nodes=4) for row in joined]
    in_node, cross_node = fit_factors(rack, rows, gpus_per_node=4)

    assert in_node is not None
    assert in_node.value == pytest.approx(0.8, abs=1e-6)
    assert cross_node is None


def test_nodes_of_fewer_gpus_than_the_cards() -> None:
    """A site with four GPUs a node: eight ranks are on two domains."""
    rows = made_up(SiteFactors(cross_node=0.5), ((8, 2),), gpus_per_node=4)
    in_node, cross_node = fit_factors(A100, rows, gpus_per_node=4)

    assert in_node is None
    assert cross_node is not None
    assert cross_node.value == pytest.approx(0.5, abs=1e-6)
    assert collective_s(A100, rows[-1], 4) < rows[-1].time_s


def test_the_clock_of_a_rate() -> None:
    """It is the measured rate over that of the card's surface, at the same shape."""
    said = gemm_flop(8192) / float(gemm_s(kernels_of(A100), 8192, 8192, 8192))

    assert relative_gemm_rate(A100, 0.9 * said, 8192, "bf16") == pytest.approx(0.9)
    clocked = float(gemm_s(kernels_of(A100), 8192, 8192, 8192, clock=0.9))
    assert clocked == pytest.approx(gemm_flop(8192) / (0.9 * said), rel=0.01)
    with pytest.raises(InputError, match="no GEMM times of 'fp16'"):
        relative_gemm_rate(single_precision(), 1e12, 64, "fp16")


def single_precision() -> Any:
    """Return a card that knows single precision only."""
    assert A100.kernels is not None
    section = A100.kernels
    gemm = {"fp32": section.gemm["fp32"]}
    return replace(A100, kernels=replace(section, gemm=gemm))


# --------------------------------------------------------------------------------------------------
# A step from absolute figures.


def test_a_step_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    """FLOP, bytes and collectives at their rates; a GPU works while its host does."""
    work = StepWork(
        flop=500e12,
        moved_bytes=3.4e12,
        num_layers=1000,
        collectives=(("allreduce", 16, 2, 104857600.0),),
    )
    step = step_time_s(site_of(tmp_path, whole()), work)
    assert step == pytest.approx((2.0, 2.0, 0.0, 1e-2))
    assert step is not None
    assert step.total_s == pytest.approx(4.01)

    on_cpu = whole() | {"device": "cpu"}
    assert step_time_s(site_of(tmp_path, on_cpu), work) == pytest.approx((2.0, 2.0, 0.8, 1e-2))
    small = replace(work, flop=0.0, moved_bytes=0.0)
    assert step_time_s(site_of(tmp_path, whole()), small) == pytest.approx((0.0, 0.0, 0.8, 1e-2))


@pytest.mark.parametrize(
    ("size_bytes", "time_s"),
    [(1.0, 1e-4), (10485760.0, 1e-3), (1048576000.0, 1e-1)],
    ids=["below", "between", "above"],
)
def test_collectives_between_measured_ones(
    tmp_path: Path, size_bytes: float, time_s: float
) -> None:
    """A power law between, no less than the smallest, in proportion above."""
    work = StepWork(
        flop=0.0,
        moved_bytes=0.0,
        num_layers=0,
        collectives=(("allreduce", 16, 2, size_bytes),),
    )
    step = step_time_s(site_of(tmp_path, whole()), work)
    assert step is not None
    assert step.collectives_s == pytest.approx(time_s)


def test_a_step_needs_all_figures(tmp_path: Path) -> None:
    """What was not measured is not made up."""
    work = StepWork(flop=1.0, moved_bytes=1.0, num_layers=1, collectives=())
    other = replace(work, collectives=(("allreduce", 8, 1, 1.0),))

    assert step_time_s(load_site("selene-a100"), work) is None
    assert step_time_s(site_of(tmp_path, whole()), work) is not None
    assert step_time_s(site_of(tmp_path, whole()), other) is None


def test_work_of_a_model() -> None:
    """6 FLOP per weight and token, attention's pairs, and gradients in fp32."""
    layer = LayerSpec(
        num_layers=3,
        seq_length=100,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=4,
        ffn_hidden_size=256,
        norm_parameters_per_hidden=0,
    )
    spec = ModelSpec(name="m", layers=(layer,), vocab_size=1024)
    weights = 3 * (4 * 64 * 64 + 2 * 64 * 256)
    table = 1024 * 64
    work = data_parallel_work(spec, batch=2, ranks=4, nodes=2, element_bytes=2.0)

    pairs = 2 * 100 * 100 / 2
    assert work.flop == 6 * (weights + table) * 200 + 3 * 12 * pairs * 64
    assert work.collectives == (("allreduce", 4, 2, 4.0 * (weights + 2 * table)),)
    assert work.num_layers == 4
    assert work.moved_bytes > 28.0 * (weights + 2 * table)
    alone = data_parallel_work(spec, batch=2, ranks=1, nodes=1, element_bytes=2.0)
    assert alone.collectives == ()
    experts = replace(layer, num_experts=8, experts_per_token=2)
    mixture = replace(spec, layers=(experts,))
    more = data_parallel_work(mixture, batch=2, ranks=4, nodes=2, element_bytes=2.0).flop
    # one more MLP of 2 h f for every token, and the router's weights for two experts
    assert more - work.flop == 6 * 200 * 3 * (2 * 64 * 256 + 2 * 64)
