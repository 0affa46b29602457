"""Documented figures of Calculon, every field of its three documents, and tuners over its space.

The source is a page on tuning with Calculon (004), with the commands of the published program.
Published inputs and figures are those of `tests/data`; the machine that fields are varied on is
the published A100 with 80 GiB and a second memory without limit.
"""

from __future__ import annotations

import copy
import csv
import gzip
import importlib.util
import itertools
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from autopar.command.answers import without_head
from tests.data.read import calculon_best, calculon_documents
from tests.e2e.documented_lab import Lab, Table, write
from tests.unit.explore_documents import EXAMPLE, EXECUTION as PLAIN
from tests.warm import ROOT

TABLE = Table("004")
DATA = ROOT / "tests" / "data"
TIME, TIER1, TIER2 = "total_time", "proc_mem_tier1_cap_req", "proc_mem_tier2_cap_req"
APPLICATION: dict[str, Any] = {
    "hidden": 5120,
    "feedforward": 20480,
    "seq_size": 2048,
    "attn_heads": 40,
    "attn_size": 128,
    "num_blocks": 40,
}
EXECUTION: dict[str, Any] = PLAIN | {
    "num_procs": 64,
    "tensor_par": 8,
    "pipeline_par": 2,
    "data_par": 4,
    "batch_size": 128,
    "microbatch_size": 2,
    "fused_activation": True,
    "structure_type": "gpt",
    "activation_recompute": "full",
    "optimizer_sharding": True,
    "tensor_par_comm_type": "rs_ag",
    "training": True,
}
SPACE: dict[str, Any] = {
    **EXECUTION,
    "tensor_par": [1, 2, 4, 8],
    "pipeline_par": [1, 2, 4, 8],
    "data_par_net": [0, 1],
    "batch_size": {"from": 128, "to": 512, "step": 128},
    "microbatch_size": [1, 2, 4],
    "activation_recompute": ["none", "attn_only", "full"],
    "pipeline_interleaving": [1, 5],
    "optimizer_sharding": [False, True],
    "tensor_par_comm_type": ["ar", "rs_ag"],
    "tensor_par_overlap": ["none", "ring"],
    "data_par_overlap": [False, True],
}
del SPACE["data_par"]  # it follows from the other two


def published_system(name: str = "a100_80e_bigmem2") -> dict[str, Any]:
    """Return a machine of the published model, its first memory 80 GiB."""
    system = copy.deepcopy(calculon_documents(DATA)["systems"][name])
    system["mem1"]["GiB"] = 80
    return dict(system)


def priced(
    lab: Lab,
    *words: str,
    application: object = None,
    system: object = None,
    expected: int = 0,
    without: tuple[str, ...] = (),
    **changes: object,
) -> Any:
    """Return the statistics of the execution above with changes; of a refusal what is said."""
    execution = {key: value for key, value in EXECUTION.items() if key not in without} | changes
    folder = lab.folder.parent / "calculon"
    names = [
        write(folder / "application.json", application or APPLICATION),
        write(folder / "system.json", system or published_system()),
        write(folder / "execution.json", execution),
    ]
    options = itertools.chain.from_iterable(
        zip(("--application", "--system", "--execution"), names, strict=True)
    )
    answer = lab.ask(
        "autopar-estimate", "calculon", *options, "--json", "-", *words, expected=expected
    )
    return answer.data if expected == 0 else answer.err


def searched(lab: Lab, *words: object, expected: int = 0) -> Any:
    """Return what autopar-explore answers about llama2-13b on A100, as JSON."""
    words = ("--application", "llama2-13b", "--system", "a100", *words)
    answer = lab.ask("autopar-explore", "calculon", *words, "--json", "-", expected=expected)
    return without_head(answer.data) if expected == 0 else answer.err


def of_space(lab: Lab, *words: object, expected: int = 0, **changes: object) -> Any:
    """Return what a tuner answers about the space above."""
    path = write(lab.folder.parent / "calculon" / "space.json", SPACE | changes)
    return searched(lab, "--space", path, *words, expected=expected)


@TABLE.works("Calculon: time and resources of one execution")
def _(lab: Lab) -> None:
    found = priced(lab)
    assert found[TIME] == pytest.approx(3.9243, abs=1e-4)
    assert found[TIER1] / 2**30 == pytest.approx(5.449, abs=1e-3)
    assert found["sample_rate"] == pytest.approx(128 / found[TIME])


@TABLE.works("~1 ms per estimate, billions of configurations")
def _(lab: Lab) -> None:
    """The best of three: an estimate is about a microsecond, and may not take a millisecond."""
    from search.closed_form.calculon import evaluate_many
    from search.closed_form.calculon.engine import pack_executions

    count = 20_000
    columns = {key: np.full(count, value) for key, value in EXECUTION.items()}
    executions = pack_executions(columns)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        found = evaluate_many(APPLICATION, executions, published_system())
        seconds.append(time.process_time() - start)
    assert found["ok"].all()
    assert min(seconds) < count * 1e-3


@TABLE.works("TP, PP, DP search for the best split")
def _(lab: Lab) -> None:
    """The documented search: of 10,944 executions 1,080 can run, and the best is the published."""
    documents = calculon_documents(DATA)
    words = [
        *(
            "--application",
            write(lab.path("..", "turing.json"), documents["models"]["turing-530B"]),
        ),
        *("--system", write(lab.path("..", "a100.json"), documents["systems"]["a100_80g"])),
        *("--num-procs", 5128, "--max-batch", 2520, "--compat", "--any-batch"),
    ]
    answer = lab.ask("autopar-explore", "calculon", *words, "--frontier", "--json", "-")
    (search,) = answer.data["searches"]
    assert (search["considered"], search["feasible"]) == (10_944, 1_080)
    rate = search["best"]["0"]["stats"]["sample_rate"]
    assert rate == pytest.approx(calculon_best(DATA)[0]["stats"]["sample_rate"], rel=1e-9)


@TABLE.works("two memory levels, several networks")
def _(lab: Lab) -> None:
    found = priced(lab, weight_offload=True)
    assert found[TIER2] == pytest.approx(priced(lab)["weight_space"])
    assert priced(lab, tensor_par_net=1)[TIME] > 2 * priced(lab)[TIME]


@TABLE.works("three JSON kinds application, system, execution")
def _(lab: Lab) -> None:
    for kind, words in (
        ("application", {"application": {"feedforward": 1}}),
        ("system", {"system": {**published_system(), "hiden": 1}}),
        ("execution", {"hiden": 1}),
    ):
        assert f"{kind}.json: " in priced(lab, expected=2, **words), kind


@TABLE.works("the seed's execution example verbatim (22 fields, flash, llama)")
def _(lab: Lab) -> None:
    assert len(EXAMPLE) == 22
    path = write(lab.folder.parent / "calculon" / "example.json", EXAMPLE)
    words = ("--application", "llama2-7b", "--system", "a100", "--execution", path)
    answer = lab.ask("autopar-estimate", "calculon", *words, "--json", "-")
    assert answer.data["sample_rate"] == pytest.approx(19.7878, abs=1e-4)
    out = " ".join(lab.ask("autopar-estimate", "calculon", *words).out.split())
    assert "32 processors = tensor 4 * pipeline 1 * data 8" in out
    said = lab.ask("autopar-estimate", "calculon", *words, "--compat", expected=2).err
    assert "'flash' is not in the published model. Remove compat" in said


@TABLE.works("execution.num_procs")
def _(lab: Lab) -> None:
    said = priced(lab, num_procs=32, expected=2)
    assert "tensor * pipeline * data parallelism != num_procs: 8 * 2 * 4 != 32" in said
    assert priced(lab, without=("num_procs",)) == priced(lab)


def _field(name: str, check: Callable[[Lab, dict[str, Any]], None]) -> None:
    """Add a row for a field of the execution; the check takes the statistics of the plain one."""

    @TABLE.works(f"execution.{name}")
    def _(lab: Lab) -> None:
        check(lab, priced(lab))


def _faster_by_halves(lab: Lab, plain: dict[str, Any]) -> None:
    half = priced(lab, tensor_par=4, data_par=8)
    assert half["weight_space"] == pytest.approx(2 * plain["weight_space"], rel=1e-3)
    assert half[TIME] == pytest.approx(3.2459, abs=1e-4)


def _more_stages(lab: Lab, plain: dict[str, Any]) -> None:
    four = priced(lab, pipeline_par=4, data_par=2)
    assert four["weight_space"] == pytest.approx(plain["weight_space"] / 2)
    assert four["bubble_time"] > plain["bubble_time"]
    assert priced(lab, pipeline_par=1, data_par=8)["bubble_time"] == 0.0


def _more_replicas(lab: Lab, plain: dict[str, Any]) -> None:
    eight = priced(lab, num_procs=128, data_par=8)
    assert eight["optimizer_space"] == pytest.approx(plain["optimizer_space"] / 2)
    assert eight["bw_time"] == pytest.approx(plain["bw_time"] / 2)


def _slower_tier(lab: Lab, plain: dict[str, Any]) -> None:
    assert priced(lab, tensor_par_net=1)[TIME] == pytest.approx(10.419, abs=1e-3)
    assert plain[TIME] == pytest.approx(3.9243, abs=1e-4)


def _tier_too_small(name: str) -> Callable[[Lab, dict[str, Any]], None]:
    def check(lab: Lab, plain: dict[str, Any]) -> None:
        assert "Network tier0 isn't big enough" in priced(lab, expected=3, **{name: 0})
        assert plain[TIME] > 0.0

    return check


def _twice_the_batch(lab: Lab, plain: dict[str, Any]) -> None:
    twice = priced(lab, batch_size=256)
    assert twice["bw_time"] == pytest.approx(2 * plain["bw_time"])
    assert twice["bubble_time"] == pytest.approx(plain["bubble_time"])


def _larger_micro_batches(lab: Lab, plain: dict[str, Any]) -> None:
    four = priced(lab, microbatch_size=4)
    assert four["act_space"] == pytest.approx(2 * plain["act_space"])
    assert four["bubble_time"] > 1.8 * plain["bubble_time"]


def _types(lab: Lab, plain: dict[str, Any]) -> None:
    assert "Unsupported type: float8" in priced(lab, datatype="float8", expected=3)
    path = write(lab.folder.parent / "calculon" / "example.json", EXAMPLE)
    rates = []
    for datatype in ("float16", "float8"):
        write(path, {**EXAMPLE, "datatype": datatype})
        words = ("--application", "llama2-7b", "--system", "h100", "--execution", path)
        answer = lab.ask("autopar-estimate", "calculon", *words, "--json", "-")
        rates.append(answer.data["sample_rate"])
    assert rates[1] > rates[0]


def _fused(lab: Lab, plain: dict[str, Any]) -> None:
    kept = [
        priced(lab, fused_activation=fused, activation_recompute="none")["act_space"]
        for fused in (True, False)
    ]
    assert [value / 2**30 for value in kept] == pytest.approx([13.486, 14.268], abs=1e-3)


def _kinds_of_attention(lab: Lab, plain: dict[str, Any]) -> None:
    assert priced(lab, attention_type="multiquery")["weight_space"] < plain["weight_space"]
    kept = [
        priced(lab, attention_type=kind, activation_recompute="none")["act_space"]
        for kind in ("multihead", "flash")
    ]
    assert kept[1] < kept[0] / 2


def _llama(lab: Lab, plain: dict[str, Any]) -> None:
    """A third matrix in the MLP: 4 of 12 square matrices more."""
    found = priced(lab, structure_type="llama")
    assert found["weight_space"] / plain["weight_space"] == pytest.approx(16 / 12, rel=1e-3)


def _recompute(lab: Lab, plain: dict[str, Any]) -> None:
    found = [priced(lab, activation_recompute=kind) for kind in ("none", "attn_only", "full")]
    assert [item[TIME] for item in found] == pytest.approx([2.8850, 3.0983, 3.9243], abs=1e-4)
    gib = [item[TIER1] / 2**30 for item in found]
    assert gib == pytest.approx([18.393, 9.253, 5.449], abs=1e-3)


def _interleaving(lab: Lab, plain: dict[str, Any]) -> None:
    bubbles = [priced(lab, pipeline_interleaving=n)["bubble_time"] for n in (1, 2, 5)]
    assert bubbles == pytest.approx([bubbles[0] / n for n in (1, 2, 5)], rel=0.02)


def _sharding(lab: Lab, plain: dict[str, Any]) -> None:
    whole = priced(lab, optimizer_sharding=False)
    assert whole["optimizer_space"] == pytest.approx(4 * plain["optimizer_space"])


def _collectives(lab: Lab, plain: dict[str, Any]) -> None:
    kinds = ("ar", "p2p_rs_ag", "rs_ag")
    found = [priced(lab, tensor_par_comm_type=kind) for kind in kinds]
    assert [item[TIME] for item in found] == pytest.approx([3.9468, 3.9115, 3.9243], abs=1e-4)
    assert found[0][TIER1] > found[2][TIER1]


def _tiles(lab: Lab, plain: dict[str, Any]) -> None:
    seconds = [priced(lab, tensor_par_overlap=kind)[TIME] for kind in ("none", "pipe", "ring")]
    assert seconds == pytest.approx([3.9243, 2.9270, 2.7776], abs=1e-4)


def _gather_again(lab: Lab, plain: dict[str, Any]) -> None:
    found = [
        priced(lab, seq_par_ag_redo=again, activation_recompute="none") for again in (False, True)
    ]
    assert [item[TIME] for item in found] == pytest.approx([2.8850, 3.0838], abs=1e-4)
    assert [item[TIER1] / 2**30 for item in found] == pytest.approx([18.393, 15.347], abs=1e-3)


def _overlapped_gradients(lab: Lab, plain: dict[str, Any]) -> None:
    exposed = priced(lab, data_par_overlap=True)["dp_comm_exposed_time"]
    assert exposed == pytest.approx(0.0210, abs=1e-4)
    assert plain["dp_comm_exposed_time"] == pytest.approx(0.1407, abs=1e-4)


def _offload(name: str, tier1_gib: float, tier2_gib: float) -> Callable[[Lab, Any], None]:
    def check(lab: Lab, plain: dict[str, Any]) -> None:
        found = priced(lab, **{name: True})
        gib = [found[TIER1] / 2**30, found[TIER2] / 2**30]
        assert gib == pytest.approx([tier1_gib, tier2_gib], abs=1e-3)
        assert plain[TIER2] == 0.0

    return check


def _inference(lab: Lab, plain: dict[str, Any]) -> None:
    assert "only perform recompute during training" in priced(lab, training=False, expected=2)
    words = {"training": False, "activation_recompute": "none", "optimizer_sharding": False}
    found = priced(lab, **words)
    assert (found["bw_time"], found["optimizer_space"]) == (0.0, 0.0)


for _name, _check in {
    "tensor_par": _faster_by_halves,
    "pipeline_par": _more_stages,
    "data_par": _more_replicas,
    "tensor_par_net": _slower_tier,
    "pipeline_par_net": _tier_too_small("pipeline_par_net"),
    "data_par_net": _tier_too_small("data_par_net"),
    "batch_size": _twice_the_batch,
    "microbatch_size": _larger_micro_batches,
    "datatype": _types,
    "fused_activation": _fused,
    "attention_type": _kinds_of_attention,
    "structure_type": _llama,
    "activation_recompute": _recompute,
    "pipeline_interleaving": _interleaving,
    "optimizer_sharding": _sharding,
    "tensor_par_comm_type": _collectives,
    "tensor_par_overlap": _tiles,
    "seq_par_ag_redo": _gather_again,
    "data_par_overlap": _overlapped_gradients,
    "weight_offload": _offload("weight_offload", 4.130, 1.466),
    "activations_offload": _offload("activations_offload", 5.264, 0.195),
    "optimizer_offload": _offload("optimizer_offload", 2.811, 2.931),
    "training": _inference,
}.items():
    _field(_name, _check)


def _size(name: str, value: int, seconds: float, gib: float) -> None:
    """Add a row for a field of the application, with the figures at another value."""

    @TABLE.works(f"application.{name}")
    def _(lab: Lab) -> None:
        found = priced(lab, application={**APPLICATION, name: value})
        assert found[TIME] == pytest.approx(seconds, abs=1e-4)
        assert found[TIER1] / 2**30 == pytest.approx(gib, abs=1e-3)


_size("hidden", 10_240, 7.0222, 10.390)
_size("feedforward", 40_960, 4.9651, 8.491)
_size("seq_size", 4_096, 8.1238, 7.251)
_size("attn_heads", 80, 4.9339, 7.419)
_size("attn_size", 256, 4.6097, 6.990)
_size("num_blocks", 20, 1.9665, 3.153)


def altered(*path: str | int, **values: object) -> dict[str, Any]:
    """Return the machine with other values of the object at a path."""
    system = published_system()
    place: Any = system
    for key in path:
        place = place[key]
    place.update(values)
    return system


@TABLE.works("system.matrix/vector tflops + efficiency")
def _(lab: Lab) -> None:
    seconds = [
        priced(lab, system=system)[TIME]
        for system in (
            altered("matrix", "float16", tflops=156),
            altered("vector", "float16", tflops=39),
            altered("matrix", "float16", gflops_efficiency=[[0, 0.5]]),
        )
    ]
    assert seconds == pytest.approx([5.6145, 3.9932, 5.2296], abs=1e-4)


@TABLE.works("system.mem1 GiB/GBps")
def _(lab: Lab) -> None:
    slow = priced(lab, system=altered("mem1", GBps=1024))
    assert slow[TIME] == pytest.approx(4.7477, abs=1e-4)
    said = priced(lab, system=altered("mem1", GiB=4), expected=3)
    assert "Mem tier1 needs 5.449 GiB but only has 4.000 GiB" in said


@TABLE.works("system.mem2 GiB/GBps")
def _(lab: Lab) -> None:
    slow = priced(lab, system=altered("mem2", GBps=8), optimizer_offload=True)
    assert slow[TIME] == pytest.approx(8.5967, abs=1e-4)
    words = {"weight_offload": True, "optimizer_offload": True}
    said = priced(lab, system=altered("mem2", GiB=1), expected=3, **words)
    assert "Mem tier2 needs 4.397 GiB but only has 1.000 GiB" in said


@TABLE.works("system.processing_mode roofline/no_overlap")
def _(lab: Lab) -> None:
    found = priced(lab, system=altered(processing_mode="roofline"))
    assert found[TIME] == pytest.approx(3.4609, abs=1e-4)


@TABLE.works("system.networks bandwidth/efficiency/latency/size/ops/must_be_filled/processor_usage")
def _(lab: Lab) -> None:
    words = {"tensor_par_overlap": "ring", "data_par_overlap": True}
    plain = priced(lab, **words)[TIME]
    for values in (
        {"bandwidth": 100},
        {"efficiency": 0.3},
        {"latency": 1e-3},
        {"processor_usage": 0.5},
    ):
        assert priced(lab, system=altered("networks", 0, **values), **words)[TIME] > plain, values
    for tier in (0, 1):
        said = priced(lab, system=altered("networks", tier, size=4), expected=3)
        assert f"Network tier{tier} isn't big enough" in said
    gathers = altered("networks", 0, "ops", all_gather=[3.0, -1])
    assert priced(lab, system=gathers)[TIME] > priced(lab)[TIME]
    # three of a domain's eight processors idle, unless the tier need not be filled
    five = {"tensor_par": 5, "data_par": 4, "num_procs": 40}
    sizes = {**APPLICATION, "seq_size": 2560}
    assert "tier" in priced(lab, application=sizes, expected=3, **five)
    free = altered("networks", 0, must_be_filled=False)
    assert priced(lab, application=sizes, system=free, **five)[TIME] > 0.0


@TABLE.works("all fields but num_procs and training tunable")
def _(lab: Lab) -> None:
    for name, values in (("num_procs", [32, 64]), ("training", [True, False])):
        said = of_space(lab, expected=2, **{name: values})
        assert f"key '{name}'" in said
        assert "Give one value" in said
    others = [name for name in EXAMPLE if name != "data_par"]
    assert len(others) == 21
    both = {name: [EXAMPLE[name], EXECUTION[name]] for name in others}
    single = {name: list(dict.fromkeys(values)) for name, values in both.items()}
    found = of_space(lab, "--tuner", "random", "--evaluations", 500, **single)
    assert set(found["best"]["execution"]) >= set(EXAMPLE)


def _tuner_row(feature: str, modules: tuple[str, ...], *words: object) -> None:
    """Add a row: a tuner that is an extra ends at or below the exact best."""

    @TABLE.works(feature, "slow")
    def _(lab: Lab) -> None:
        for module in modules:
            pytest.importorskip(module, reason="needs extras of the package")
        path = write(lab.folder.parent / "calculon" / "space.json", SPACE)
        answer = lab.process(
            *("autopar-explore", "calculon", "--application", "llama2-13b", "--system", "a100"),
            *("--space", path, *words, "--evaluations", 20, "--json", "-"),
        )
        assert 0.0 < _rate(answer.data) <= _rate(of_space(lab))


_tuner_row("Ray Tune", ("ray", "optuna"), "--tuner", "ray")
_tuner_row(
    *("Ray Tune with hyperopt", ("ray", "hyperopt"), "--tuner", "ray", "--ray-search", "hyperopt")
)
_tuner_row("SMAC3", ("smac",), "--tuner", "smac")


def _rate(answer: Any) -> float:
    rate: float = answer["best"]["sample_rate_per_s"]
    return rate


@TABLE.works("tuners find the best")
def _(lab: Lab) -> None:
    """Exhaustive is exact; a million random points, none twice, are all of these."""
    exact = of_space(lab)
    assert exact["tuner"] == "exhaustive"
    assert of_space(lab, "--tuner", "random")["best"] == exact["best"]
    few = of_space(lab, "--tuner", "random", "--evaluations", 50)
    assert _rate(few) < _rate(exact)


@TABLE.works("top-n of a user space")
def _(lab: Lab) -> None:
    """The best three of all points, best first, as one is with nothing asked."""
    found = of_space(lab, "--top", 3)
    rates = [point["sample_rate_per_s"] for point in found["top"]]
    assert len(rates) == 3
    assert rates == sorted(rates, reverse=True)
    assert found["top"][0] == found["best"] == of_space(lab)["best"]
    assert of_space(lab, "--top", 3, "--tuner", "random")["top"] == found["top"]


@TABLE.works("missing package said in one sentence")
def _(lab: Lab) -> None:
    extras = {"ray": "Ray", "smac": "SMAC3"}
    missing = [module for module in extras if importlib.util.find_spec(module) is None]
    if not missing:
        pytest.skip("both extras are installed")
    for module in missing:
        said = of_space(lab, "--tuner", module, "--evaluations", 5, expected=1)
        assert said.count("\n") == 1
        assert f"{extras[module]} needs a package that cannot be imported" in said
        assert f"`pip install 'autopar[{module}]'`" in said


@TABLE.works("calculon llm")
def _(lab: Lab) -> None:
    """With the operations of a block, and the partners of every rank."""
    words = ("--application", "llama2-7b", "--system", "a100", "--execution", "8x8-tp8-pp4-dp2")
    path = lab.folder.parent / "calculon" / "peers.json"
    out = lab.ask("autopar-estimate", "calculon", *words, "--layers", "--peers", path).out
    assert "64 processors = tensor 8 * pipeline 4 * data 2" in out
    peers = lab.load(path)
    assert len(peers) == 64
    assert peers["0"] == {"tensor": list(range(8)), "pipeline": 8, "data": [0, 32]}


@TABLE.works("llm-optimal-execution")
def _(lab: Lab) -> None:
    """Every execution of the published space, whatever the batch, and its best."""
    found = searched(lab, "--num-procs", 8, "--max-batch", 8, "--compat", "--any-batch", "--top", 1)
    best = found["0"]["stats"]
    one = ("--num-procs", 8, "--max-batch", 8, "--compat", "--any-batch", "--top", 5)
    rates = [item["stats"]["sample_rate"] for item in searched(lab, *one).values()]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == best["sample_rate"]


@TABLE.works("llm-all-executions")
def _(lab: Lab) -> None:
    path = lab.folder.parent / "all.csv.gz"
    words = ("--num-procs", 4, "--max-batch", 4, "--no-offload", "--no-tp-overlap")
    words = (*words, "--frontier", "--all", path, "--all-statistics")
    small = lab.ask(
        *("autopar-explore", "calculon", "--application", "gpt2-xl", "--system", "a100"),
        *(*words, "--json", "-"),
    )
    (search,) = small.data["searches"]
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == search["feasible"]
    assert len(rows[0]) > 110
    best = max(float(row["sample_rate"]) for row in rows)
    assert best == pytest.approx(search["best"]["0"]["stats"]["sample_rate"])


@TABLE.works("llm-validation")
def _(lab: Lab) -> None:
    out = lab.ask("autopar-estimate", "--validate").out
    rows = [line.split() for line in out.splitlines()]
    (row,) = (r for r in rows if r[:2] == ["gpt3-175B", "full"] and "18.13" in r)
    assert row[2:] == ["18.13", "s", "18.35", "+1.21", "%", "18.05", "-0.44", "%"]


@TABLE.works("llm-parameter-calculator")
def _(lab: Lab) -> None:
    application = calculon_documents(DATA)["models"]["gpt3-13B"]
    path = write(lab.folder.parent / "calculon" / "gpt3-13B.json", application)
    out = lab.ask("autopar-estimate", "calculon", "--application", path, "--parameters").out
    assert out.split() == ["gpt3-13B", "->", "12.941", "G"]


_COMMANDS = {
    "llm": "-l --layers -p --peers",
    "llm-optimal-execution": "-t --top-n -c --cpus -f --fused_activation --no-tp-overlap "
    "--no-dp-overlap -m --mbs-break -l -n --noneok -d --debug",
    "llm-all-executions": "",
    "llm-validation": "-b -v",
    "llm-parameter-calculator": "-a",
    "version": "",
}
"""Of the published program, with their options."""


@TABLE.works("command names `calculon ...`")
def _(lab: Lab) -> None:
    """A table from each of them and its options to ours, whose options exist."""
    page = (ROOT / "docs" / "concepts" / "closed-form.md").read_text(encoding="utf-8")
    table = page.split("## From Calculon's command line")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    theirs = " ".join(left for left, *_ in rows)
    for command, options in _COMMANDS.items():
        assert f"`calculon {command}" in theirs
        for option in options.split():
            assert f"`{option}" in theirs, option
    help_text = "".join(
        lab.ask(name, "calculon", "--help").out for name in ("autopar-estimate", "autopar-explore")
    )
    help_text += lab.ask("autopar-estimate", "--help").out
    ours = {option for _, right in rows for option in re.findall(r"--[a-z][a-z-]+", right)}
    known = set(re.findall(r"--[a-z][a-z-]+", help_text.replace("--[no-]", "--"))) | {"--version"}
    assert len(ours) > 15
    assert ours <= known


@TABLE.works("system-size study")
def _(lab: Lab) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib, an extra of the package")
    folder = lab.folder.parent / "pictures"
    out = lab.ask(
        *("autopar-explore", "calculon", "--application", "gpt2-xl", "--system", "a100"),
        *("--num-procs", "4,8", "--max-batch", 8, "--no-offload", "--no-tp-overlap"),
        *("--top", 1, "--plot", folder, "--plot-format", "svg"),
    ).out
    assert "Scaling" in out
    assert (folder / "scaling.svg").stat().st_size > 1000


@TABLE.different(
    "json_to_csv, 3dplot, heatmap, find_huge scripts",
    "--all writes CSV, and the map of --plot has the rates of the surface, which hides some of "
    "them; shapes of a model are swept with their prices, where find_huge lists them without.",
)
def _(lab: Lab) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib, an extra of the package")
    folder = lab.folder.parent / "maps"
    lab.ask(
        *("autopar-explore", "calculon", "--application", "gpt2-xl", "--system", "a100"),
        *("--num-procs", 4, "--max-batch", 8, "--no-offload", "--no-tp-overlap", "--top", 1),
        *("--frontier", "--plot", folder, "--plot-format", "svg"),
    )
    assert {path.stem for path in folder.iterdir()} == {"breakdown", "frontier", "degrees"}
    picture = (folder / "degrees.svg").read_text(encoding="utf-8")
    for words in ("pipeline degree, stages", "tensor degree, processors", "samples/s"):
        assert f">{words}<" in picture
    shapes = ("--sweep", "application.hidden=1600,3200", "--sweep", "application.num_blocks=24,48")
    small = lab.ask(
        *("autopar-explore", "calculon", "--application", "gpt2-xl", "--system", "a100"),
        *("--num-procs", 4, "--max-batch", 8, "--no-offload", "--no-tp-overlap"),
        *(*shapes, "--json", "-"),
    )
    assert len(small.data["searches"]) == 4
