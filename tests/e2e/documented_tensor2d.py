"""Documented figures of the model with two-dimensional tensor parallelism: spaces, totals, output.

The source is the public code of arXiv 2410.00273 (002). What a search has to enumerate is worked
out here a second time, by hand from its rules; published counts and figures are in `tests/data`.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from autopar.command.answers import without_head
from tests.data.read import tensor2d_counts, tensor2d_documents, tensor2d_rows
from tests.e2e.documented_lab import Lab, Table, write
from tests.warm import ROOT

TABLE = Table("002")
DATA = ROOT / "tests" / "data"
MODEL, SYSTEM, GPUS, BATCH = "gpt3_1T", "A100-NVS4", 512, 4096
STRATEGIES = ("1d", "2d", "2d-seqp")
_LEAST = 128
"""Rows and columns of a matrix that a GPU has at least."""
_LEAST_PANEL = 512
"""Columns of a panel of a SUMMA product, at least."""


def explored(lab: Lab, *words: object, expected: int = 0, **documents: object) -> Any:
    """Return what a search of the published space says as JSON, and of a refusal what is said."""
    published = tensor2d_documents(DATA)
    folder = lab.folder.parent / "tensor2d"
    model = write(folder / "model.json", documents.get("model", published["models"][MODEL]))
    system = write(folder / "system.json", documents.get("system", published["systems"][SYSTEM]))
    answer = lab.ask(
        *("autopar-explore", "tensor2d", "--model", model, "--system", system),
        *("--batch", BATCH, "--compat", "--frontier", "--json", "-", *words),
        expected=expected,
    )
    return answer.data["searches"] if expected == 0 else answer.err


def estimated(lab: Lab, *words: object, expected: int = 0) -> Any:
    """Return the statistics of one candidate: gpt-6.7b, two replicas of 4 stages of 8 GPUs."""
    system = write(
        lab.folder.parent / "tensor2d" / "one.json", tensor2d_documents(DATA)["systems"][SYSTEM]
    )
    answer = lab.ask(
        *("autopar-estimate", "tensor2d", "--model", "gpt-6.7b", "--system", system),
        *("--strategy", "1d", "--config", "dp=2,tp=8,pp=4,mbs=1", "--batch", 64),
        *("--json", "-", *words),
        expected=expected,
    )
    return without_head(answer.data) if expected == 0 else answer.err


def divisors(number: int) -> list[int]:
    """Return the factors of a number, increasing."""
    return [n for n in range(1, number + 1) if number % n == 0]


def degrees(strategy: str) -> Iterator[tuple[int, ...]]:
    """Yield the tensor degrees (one or two) of the published space for the model above."""
    model = tensor2d_documents(DATA)["models"][MODEL]
    length, width, heads = model["l"], model["e"], model["h"]
    if strategy == "1d":
        for degree in divisors(heads):
            if width // degree >= _LEAST and width % degree == 0:
                yield (degree,)
        return
    for first in divisors(heads):
        if width % first or width // first < _LEAST:
            continue
        for second in divisors(length):
            if length // second >= _LEAST and (strategy != "2d" or width % second == 0):
                yield first, second


def panels_of(tensor: tuple[int, ...]) -> list[int]:
    """Return the numbers of panels: the larger degree, doubled as long as panels are wide."""
    width = tensor2d_documents(DATA)["models"][MODEL]["e"]
    smallest = max(tensor)
    if width / smallest < _LEAST_PANEL:
        return [smallest]
    doubled = (smallest * 2**n for n in range(20))
    wide = itertools.takewhile(lambda panels: width // panels >= _LEAST_PANEL, doubled)
    return [panels for panels in wide if width % panels == 0]


@cache
def candidates(strategy: str) -> tuple[tuple[int, ...], ...]:
    """Return all candidates for the GPUs above: degrees, pp, dp, micro-batch, panels, placement."""
    depth = tensor2d_documents(DATA)["models"][MODEL]["depth"]
    domain = tensor2d_documents(DATA)["systems"][SYSTEM]["nvlink_size"]
    found = []
    for tensor in degrees(strategy):
        size = tensor[0] * (tensor[1] if len(tensor) == 2 else 1)
        if GPUS % size:
            continue
        for stages in (n for n in divisors(depth) if (GPUS // size) % n == 0):
            replicas = GPUS // size // stages
            if BATCH % replicas:
                continue
            groups = (*tensor, replicas, stages)
            for micro, panels in itertools.product(
                divisors(BATCH // replicas), panels_of(tensor) if strategy == "2d" else (1,)
            ):
                found += [
                    (*groups, micro, panels, *inside) for inside in _placements(groups, domain)
                ]
    return tuple(found)


def _placements(groups: tuple[int, ...], domain: int) -> list[tuple[int, ...]]:
    """Return how many ranks of every group share a domain, filling it as far as they can."""
    product = 1
    for size in groups:
        product *= size
    want = min(domain, product)
    choices = itertools.product(*(divisors(size) for size in groups))
    found = []
    for choice in choices:
        inside = 1
        for count in choice:
            inside *= count
        if inside == want:
            found.append(choice)
    return found


@cache
def published_count(strategy: str, gpus: int = GPUS) -> int:
    """Return how many candidates the published space has."""
    for row in tensor2d_counts(DATA):
        if (row["model"], row["nvlink_size"], row["n_gpus"], row["strat"]) == (
            *(MODEL, 4, gpus),
            strategy,
        ):
            return int(row["candidates"])
    raise AssertionError(f"no count of {strategy} on {gpus} GPUs")


def all_rows(lab: Lab, strategy: str) -> list[dict[str, str]]:
    """Return every candidate that can run, as the search writes them to a file."""
    path = lab.folder.parent / "tensor2d" / f"all-{strategy}.csv"
    if not path.is_file():
        explored(lab, "--strategy", strategy, "--num-gpus", GPUS, "--all", path, system=roomy())
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def roomy() -> dict[str, Any]:
    """Return the machine with so much memory that every candidate can run."""
    return {**tensor2d_documents(DATA)["systems"][SYSTEM], "hbm_capacity": 1e9}


def column(lab: Lab, strategy: str, *names: str) -> set[tuple[int, ...]]:
    """Return the values of columns that occur among all candidates."""
    return {tuple(int(row[name]) for name in names) for row in all_rows(lab, strategy)}


def expected_column(strategy: str, *places: int) -> set[tuple[int, ...]]:
    """Return the same of the candidates enumerated here."""
    return {tuple(row[place] for place in places) for row in candidates(strategy)}


@TABLE.works("factors, tp1d_candidates (heads, embed)")
def _(lab: Lab) -> None:
    assert column(lab, "1d", "tp1") == expected_column("1d", 0)
    assert max(column(lab, "1d", "tp1")) == (32,)  # 160 heads, 512 GPUs


@TABLE.works("tp2d_candidates_dim1/dim2")
def _(lab: Lab) -> None:
    assert column(lab, "2d", "tp1", "tp2") == expected_column("2d", 0, 1)


@TABLE.works("tpseqp_candidates_dim1/dim2")
def _(lab: Lab) -> None:
    assert column(lab, "2d-seqp", "tp1", "tp2") == expected_column("2d-seqp", 0, 1)


@TABLE.works("nv_candidates_1d")
def _(lab: Lab) -> None:
    """One tensor group, replicas, stages: as many ranks of each as fill a domain of four."""
    seen = column(lab, "1d", "tp1", "dp", "pp", "nv_tp1", "nv_dp", "nv_pp")
    assert seen == expected_column("1d", 0, 1, 2, 5, 6, 7)
    assert {row[3] * row[4] * row[5] for row in seen} == {4}


@TABLE.works("nv_candidates_2d")
def _(lab: Lab) -> None:
    names = ("tp1", "tp2", "dp", "pp", "nv_tp1", "nv_tp2", "nv_dp", "nv_pp")
    assert column(lab, "2d-seqp", *names) == expected_column("2d-seqp", 0, 1, 2, 3, 6, 7, 8, 9)


@TABLE.works("pp_candidates (even stages)")
def _(lab: Lab) -> None:
    assert column(lab, "1d", "tp1", "pp") == expected_column("1d", 0, 2)
    assert {128 % stages for (stages,) in column(lab, "1d", "pp")} == {0}


@TABLE.works("micro_batch_size_candidates")
def _(lab: Lab) -> None:
    assert column(lab, "1d", "dp", "mbs") == expected_column("1d", 1, 3)


@TABLE.works("summa_nb_candidates")
def _(lab: Lab) -> None:
    assert column(lab, "2d", "tp1", "tp2", "nb") == expected_column("2d", 0, 1, 5)


@TABLE.works("128 rows/columns limit")
def _(lab: Lab) -> None:
    """A model of 1,024 columns leaves 8 GPUs at most 128 of them."""
    small = {"l": 256, "e": 1024, "h": 64, "depth": 8}
    path = lab.folder.parent / "tensor2d" / "small.csv"
    words = ("--strategy", "2d-seqp", "--num-gpus", 64, "--all", path)
    explored(lab, *words, model=small, system=roomy())
    with path.open(encoding="utf-8", newline="") as file:
        degrees_seen = {(int(row["tp1"]), int(row["tp2"])) for row in csv.DictReader(file)}
    assert degrees_seen == set(itertools.product((1, 2, 4, 8), (1, 2)))


@TABLE.works("totals(): time, pp, bubble, dp")
def _(lab: Lab) -> None:
    found = estimated(lab)
    parts = ("t_comp", "t_mem", "t_tp_comm", "t_dp_comm", "t_pp_comm", "t_bubble")
    assert found["t"] == pytest.approx(sum(found[part] for part in parts), rel=1e-12)
    # 4 stages, 32 micro-batches: three of them wait
    work = found["t_comp"] + found["t_mem"] + found["t_tp_comm"]
    assert found["t_bubble"] == pytest.approx(work * 3 / 32, rel=0.1)


@TABLE.works("totals(): memory 1F1B, 6x optimizer states / (dp*seqp)")
def _(lab: Lab) -> None:
    found = estimated(lab)
    parts = ("wts_mem", "wts_grad_mem", "wts_optimizer_states_mem", "acts_mem")
    assert found["mem"] == pytest.approx(sum(found[part] for part in parts), rel=1e-12)
    # 12 bytes a parameter beside 2 of the weight, over two replicas
    assert found["wts_optimizer_states_mem"] == pytest.approx(6 * found["wts_mem"] / 2, rel=1e-12)


@TABLE.works("stats keys (t ... acts_mem, nv_*)")
def _(lab: Lab) -> None:
    times = {f"t{part}" for part in ("", *(f"_{name}" for name in _PARTS))}
    shares = {f"{name}_frac" for name in _PARTS}
    memory = {"mem", "wts_mem", "wts_grad_mem", "wts_optimizer_states_mem", "acts_mem"}
    inside = {"nv_tp", "nv_dp", "nv_pp"}
    assert set(estimated(lab)) == times | shares | memory | inside | {"flops_per_gpu"}


_PARTS = ("comp", "mem", "tp_comm", "dp_comm", "pp_comm", "bubble")


@TABLE.works("comp/tp/dp/pp/bubble/mem fractions")
def _(lab: Lab) -> None:
    found = estimated(lab)
    for name in _PARTS:
        assert found[f"{name}_frac"] == pytest.approx(found[f"t_{name}"] / found["t"], rel=1e-12)
    assert sum(found[f"{name}_frac"] for name in _PARTS) == pytest.approx(1.0)


def _search_row(feature: str, strategy: str, gpus: int) -> None:
    """Add a row: the ten best on so many GPUs hold the published ones, nine or all of them."""

    @TABLE.works(feature)
    def _(lab: Lab) -> None:
        published = [
            row["stats"]["t"]
            for row in tensor2d_rows(DATA, "best")
            if (row["model"], row["system"], row["n_gpus"], row["strat"])
            == (MODEL, SYSTEM, gpus, strategy)
        ]
        assert len(published) >= 9
        (search,) = explored(lab, "--strategy", strategy, "--num-gpus", gpus, "--top", 10)
        found = [item["stats"]["t"] for item in search["best"].values()]
        for seconds in published:
            assert any(item == pytest.approx(seconds, rel=1e-9) for item in found)


_search_row("execute_1d", "1d", 8192)
_search_row("execute_2d (SUMMA)", "2d", 512)
_search_row("execute_seqp (context parallel)", "2d-seqp", 4096)


@TABLE.works("list of GPU counts")
def _(lab: Lab) -> None:
    searches = explored(lab, "--strategy", "1d", "--num-gpus", "512,1024,2048")
    assert [search["num_procs"] for search in searches] == [512, 1024, 2048]
    counts = [search["considered"] for search in searches]
    assert (counts[0], counts[2]) == (published_count("1d"), published_count("1d", 2048))


@TABLE.works("nlargest")
def _(lab: Lab) -> None:
    (search,) = explored(lab, "--strategy", "1d", "--num-gpus", 8192, "--top", 7)
    seconds = [item["stats"]["t"] for item in search["best"].values()]
    assert (len(seconds), seconds) == (7, sorted(seconds))


@TABLE.works("capacity filter")
def _(lab: Lab) -> None:
    said = explored(lab, "--strategy", "1d", "--num-gpus", 64, expected=3)
    assert "can run on 64 GPUs" in said
    assert "need more memory than a GPU has" in said


@TABLE.works("verbose per candidate")
def _(lab: Lab) -> None:
    rows = all_rows(lab, "1d")
    assert len(rows) == published_count("1d")
    assert set(rows[0]) >= {"dp", "tp1", "pp", "mbs", "throughput", "t", "mem", "nv_tp1"}


@TABLE.works("nvlink_size / fast domain")
def _(lab: Lab) -> None:
    words = ("--strategy", "1d", "--num-gpus", 1024, "--sweep", "system.nvlink_size=4:64:x2")
    searches = explored(lab, *words)
    assert [search["sweep"]["system.nvlink_size"] for search in searches] == [4, 8, 16, 32, 64]
    seconds = [search["best"]["0"]["stats"]["t"] for search in searches]
    assert seconds[0] == max(seconds) > 1.1 * seconds[-1]


@TABLE.works("summa_nb")
def _(lab: Lab) -> None:
    (search,) = explored(lab, "--strategy", "2d", "--num-gpus", 8192, "--top", 1)
    assert search["best"]["0"]["execution"]["config"]["nb"] == 16


@TABLE.works("flash_attention=True; plain")
def _(lab: Lab) -> None:
    flash, plain = estimated(lab), estimated(lab, "--attention", "plain")
    assert plain["acts_mem"] > flash["acts_mem"]
    again = estimated(lab, "--attention", "plain", "--recompute")
    assert again["acts_mem"] < plain["acts_mem"] / 2
    assert again["t_comp"] > plain["t_comp"]


@TABLE.works("dp overlap / pp not overlapped")
def _(lab: Lab) -> None:
    """Gradients of all layers but the last travel beside backward; transfers of stages wait."""
    found = estimated(lab)
    assert 0.0 < found["t_dp_comm"] < 0.05
    assert found["t_pp_comm"] == pytest.approx(0.00798958, rel=1e-5)


@TABLE.works("Pool/threads")
def _(lab: Lab) -> None:
    words = ("--strategy", "2d", "--num-gpus", GPUS, "--top", 5)
    one, two = (explored(lab, *words, "--threads", count) for count in (1, 2))
    assert one == two


@TABLE.works("matplotlib plots")
def _(lab: Lab) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib, an extra of the package")
    folder = lab.folder.parent / "tensor2d" / "pictures"
    words = ("--strategy", "1d", "--num-gpus", "1024,8192", "--top", 2, "--plot", folder)
    explored(lab, *words, "--plot-format", "both")
    kinds = {"breakdown", "scaling", "frontier", "degrees"}
    names = {f"{kind}.{suffix}" for kind in kinds for suffix in ("png", "svg")}
    assert {path.name for path in folder.iterdir()} == names


@TABLE.works("model fields l,e,f,h,depth; system JSON")
def _(lab: Lab) -> None:
    published = tensor2d_documents(DATA)["models"][MODEL]
    assert set(published) == {"l", "e", "h", "depth"}
    words = ("--strategy", "1d", "--num-gpus", 8192, "--top", 1)
    (plain,) = explored(lab, *words)
    (same,) = explored(lab, *words, model={**published, "f": 4 * published["e"]})
    (wide,) = explored(lab, *words, model={**published, "f": 5 * published["e"]})
    assert plain["best"] == same["best"]
    assert wide["best"]["0"]["stats"]["t"] > plain["best"]["0"]["stats"]["t"]


@TABLE.different(
    "default global batch 2048",
    "The batch decides what is compared, so it is given.",
)
def _(lab: Lab) -> None:
    words = ("--model", "gpt-6.7b", "--system", "a100", "--strategy", "1d", "--num-gpus", 64)
    said = lab.ask("autopar-explore", "tensor2d", *words, expected=2).err
    assert "missing argument --batch" in said


@TABLE.works("sweeps")
def _(lab: Lab) -> None:
    words = ("--strategy", "1d", "--num-gpus", 8192, "--top", 1)
    searches = explored(
        *(lab, *words, "--sweep", "system.ib_bandwidth=25,100", "--sweep", "model.l=1024,2048")
    )
    settings = [tuple(search["sweep"].values()) for search in searches]
    assert settings == list(itertools.product((25, 100), (1024, 2048)))


@TABLE.different(
    "infeasible candidate priced all the same",
    "A time of what cannot run misleads; the refusal says what is needed and what there is.",
)
def _(lab: Lab) -> None:
    folder = lab.folder.parent / "tensor2d"
    published = tensor2d_documents(DATA)
    model = write(folder / "1t.json", published["models"][MODEL])
    system = write(folder / "one.json", published["systems"][SYSTEM])
    answer = lab.ask(
        *("autopar-estimate", "tensor2d", "--model", model, "--system", system),
        *("--strategy", "1d", "--config", "dp=2,tp=8,pp=4,mbs=1", "--batch", 64, "--json", "-"),
        expected=3,
    )
    assert without_head(answer.data).keys() == {"error"}
    assert "needs 371.7 GB of memory per GPU but only has 80 GB (hbm_capacity)" in answer.err
