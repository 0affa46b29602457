"""`autopar-estimate`: what is printed and written of one execution, and what ends with an error."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.command.answers import without_head
from autopar.documents.checks import load_document
from search.closed_form.calculon import evaluate, exploration as calculon_points
from search.closed_form.calculon.documents import Execution
from search.closed_form.calculon.exploration import peers
from search.closed_form.files import calculon_system, execution_keys
from search.closed_form.tensor2d import Quirks as Tensor2dQuirks, exploration as tensor2d_points
from search.commands import estimate as cli_estimate
from tests.unit.explore_documents import EXAMPLE as SEED

SIZES = {
    "hidden": 12288,
    "feedforward": 49152,
    "seq_size": 2048,
    "attn_heads": 96,
    "attn_size": 128,
    "num_blocks": 96,
}
CALCULON = ("calculon", "--application", "llama2-7b", "--system", "a100")
TWO = ("tensor2d", "--model", "gpt-6.7b", "--system", "h100", "--batch", "64")
FLAT = (*TWO, "--strategy", "1d", "--config", "dp=2,tp=8,pp=4,mbs=1")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what a command prints; it must end well."""
    code = cli_estimate.run(arguments)
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def test_the_execution_of_a_user_runs_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Processors and training are assumed and said; the rest is as written."""
    path = tmp_path / "execution.json"
    path.write_text(json.dumps(SEED))
    text = answer(capsys, *CALCULON, "--execution", str(path))

    assert len(SEED) == 22
    assert "llama2-7b on a100: 32 processors = tensor 4 * pipeline 1 * data 8" in text
    assumed = text[text.index("\nDefaults\n") :]
    assert "num_procs = 32, the product of the degrees" in assumed
    assert "training = true" in assumed
    assert "structure_type" not in assumed
    for part in ("forward", "TP comm", "DP comm", "optimizer", "head and loss"):
        assert f"\n{part} " in text


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"activation_recompute": "full"},
        {"tensor_par": 2, "pipeline_par": 2, "pipeline_interleaving": 4, "batch_size": 64},
        {"weight_offload": True, "activations_offload": True, "optimizer_offload": True},
        {"tensor_par_overlap": "pipe", "seq_par_ag_redo": True},
        {"training": False, "data_par_overlap": False},
    ],
)
def test_parts_add_up(change: dict[str, Any]) -> None:
    """The rows of the tables are the whole step and the whole memory, with a vocabulary and not."""
    x = {**SEED, **change}
    for vocabulary in (0, 51200):
        a = {**SIZES, "num_blocks": 32, "hidden": 4096, "attn_heads": 32, "feedforward": 16384}
        s = evaluate({**a, "vocab_size": vocabulary}, x, calculon_system("a100"))
        time, memory = calculon_points.time_parts(s), calculon_points.memory_parts(s, x)

        assert sum(part.amount for part in time) == pytest.approx(s["total_time"], rel=1e-12)
        needed = sum(part.amount for part in memory)
        assert needed == pytest.approx(s["proc_mem_tier1_cap_req"], rel=1e-12)
        names = {part.name for part in time}
        assert ("head and loss" in names) == (vocabulary > 0)


def test_json_is_the_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Published names in their order, to stdout alone or to a file beside the tables."""
    arguments = (*CALCULON, "--execution", "8x8-tp8-pp4-dp2")
    document = without_head(json.loads(answer(capsys, *arguments, "--json", "-")))
    path = tmp_path / "new" / "answer.json"
    text = answer(capsys, *arguments, "--layers", "--json", str(path))
    written = without_head(json.loads(path.read_text()))
    layers = written.pop("layers")

    assert list(written.items()) == list(document.items())
    assert list(document)[:2] == ["block_fw_flops", "block_fw_flops_time"]
    assert document["sample_rate"] > 0
    assert len(document) == 96 + 3
    assert [row["name"] for row in layers][:2] == ["AttnBlock_Fork", "AttnBlock_LayerNorm"]
    assert all(f"\n{row['name']} " in text for row in layers)


def test_what_nothing_could_provide_is_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has no infinity."""
    from search.commands.app import write_answer

    write_answer("-", {"a": [float("inf")], "b": {"c": 1.5}}, command="autopar-estimate")

    assert json.loads(capsys.readouterr().out) == {"a": ["Infinity"], "b": {"c": 1.5}}


def test_compat_names_what_it_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The figures are the published ones, and every correction that is off is listed."""
    a, x = tmp_path / "application.json", tmp_path / "execution.json"
    a.write_text(json.dumps({**SIZES, "num_blocks": 8}))
    keys = {k: v for k, v in SEED.items() if k != "structure_type"}
    keys = {**keys, "attention_type": "multihead", "num_procs": 32, "training": True}
    x.write_text(json.dumps(keys))
    documents = ("calculon", "--application", str(a), "--system", "h100", "--execution", str(x))
    text = answer(capsys, *documents, "--compat")
    plain = answer(capsys, *documents)

    off = text[text.index("\nCorrections that are off\n") :]
    numbers = [word[2:-1] for word in off.split() if word.startswith("B") and word.endswith(":")]
    assert len(numbers) == 18
    assert "Corrections that are off" not in plain
    assert text.splitlines()[1:14] != plain.splitlines()[1:14]
    document = json.loads(answer(capsys, *documents, "--compat", "--json", "-"))
    assert without_head(document) == evaluate(
        json.loads(a.read_text()), keys, calculon_system("h100"), compat=True
    )


def test_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tensor ranks count fastest, then stages, then data; stages are a ring."""
    path = tmp_path / "peers.json"
    answer(capsys, *CALCULON, "--execution", "8x8-tp8-pp4-dp2", "--peers", str(path))
    document = json.loads(path.read_text())

    assert list(document) == [str(rank) for rank in range(64)]
    assert document["33"] == {
        "tensor": list(range(32, 40)),
        "pipeline": 41,
        "data": [1, 33],
    }
    assert document["63"]["pipeline"] == 39
    alone = load_document(Execution, {**SEED, "tensor_par": 1, "data_par": 1})
    assert peers(alone) == {"0": {}}


def test_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    """A name and a count."""
    text = answer(capsys, "calculon", "--application", "llama2-7b", "--parameters")

    assert text == "llama2-7b     -> 6.738 G\n"


def test_structure_follows_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A gate is assumed where the model has one, and a contradiction is said."""
    x = tmp_path / "execution.json"
    keys = {k: v for k, v in SEED.items() if k != "structure_type"}
    x.write_text(json.dumps(keys))
    arguments = (*CALCULON, "--execution", str(x))
    assumed = answer(capsys, *arguments)
    as_seed = answer(capsys, *CALCULON, "--execution", str(write(tmp_path, SEED)))
    other = answer(
        capsys, *CALCULON, "--execution", str(write(tmp_path, {**SEED, "structure_type": "gpt"}))
    )

    assert "structure_type = llama, as llama2-7b has" in assumed
    assert assumed.splitlines()[3] == as_seed.splitlines()[3] != other.splitlines()[3]
    assert "structure_type is gpt, and llama2-7b is built as llama" in other


def write(folder: Path, keys: dict[str, object]) -> Path:
    """Return a file with these keys."""
    path = folder / "written.json"
    path.write_text(json.dumps(keys))
    return path


def test_placement_is_the_fastest_unless_given(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a placement every one that fits is priced."""
    best = json.loads(answer(capsys, *FLAT, "--json", "-"))
    times = {}
    for nv in ("nv_tp=8,nv_dp=1,nv_pp=1", "nv_tp=4,nv_dp=2,nv_pp=1", "nv_tp=1,nv_dp=2,nv_pp=4"):
        found = json.loads(answer(capsys, *FLAT, "--placement", nv, "--json", "-"))
        times[nv] = found["t"]
        assert {k: found[k] for k in ("nv_tp", "nv_dp", "nv_pp")} == {
            part.split("=")[0]: int(part.split("=")[1]) for part in nv.split(",")
        }
    text = answer(capsys, *FLAT)

    assert best["t"] <= min(times.values())
    assert "n_gpus = 64, the product of the degrees" in text
    placed = ",".join(f"{k}={best[k]}" for k in ("nv_tp", "nv_dp", "nv_pp"))
    assert f"placement {placed}, the fastest that fits into a domain" in text


def test_the_capacity_has_a_blank_in_front(capsys: pytest.CaptureFixture[str]) -> None:
    """A capacity of four digits does not touch its unit."""
    words = ["tensor2d", "--model", "gpt-6.7b", "--system", "h200", "--strategy", "1d"]
    text = answer(capsys, *words, "--config", "dp=2,tp=8,pp=4,mbs=1", "--batch", "64")
    (header,) = (line for line in text.splitlines() if line.startswith("Step time"))
    assert header.split()[-3:] == ["GiB", "of", "140"]


@pytest.mark.parametrize(
    ("strategy", "config"),
    [
        ("1d", {"dp": 2, "tp": 8, "pp": 4, "mbs": 1}),
        ("2d-seqp", {"dp": 2, "tp1": 4, "tp2": 2, "pp": 4, "mbs": 1}),
        ("2d", {"dp": 2, "tp1": 4, "tp2": 2, "pp": 4, "mbs": 1, "nb": 4}),
    ],
)
def test_execution_file_says_what_options_say(
    strategy: str, config: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Time and memory of every strategy, with the parts that add up to them."""
    path = write(
        tmp_path, {"_why": "a", "strategy": strategy, "config": config, "global_batch_size": 64}
    )
    words = ",".join(f"{key}={value}" for key, value in config.items())
    from_file = answer(capsys, *TWO[:5], "--execution", str(path), "--json", "-", "--layers")
    options = (*TWO, "--strategy", strategy, "--config", words)

    s = without_head(json.loads(from_file))
    assert s == without_head(json.loads(answer(capsys, *options, "--json", "-", "--layers")))
    assert sum(part.amount for part in tensor2d_points.time_parts(s)) == pytest.approx(
        s["t"], rel=1e-9
    )
    needed = sum(part.amount for part in tensor2d_points.memory_parts(s))
    assert needed == pytest.approx(s["mem"] * 1e9, rel=1e-9)
    text = answer(capsys, *options, "--layers")
    assert all(f"\n{row['name']} " in text for row in s["layers"])
    assert {"embedding", "head", "loss"} < {row["name"] for row in s["layers"]}
    text = answer(capsys, *options, "--layers", "--compat")
    assert "\nfusedla " in text
    assert "\nembedding " not in text
    assert all(number.split(":")[0] in text for number in Tensor2dQuirks.meanings.values())


def test_attention_is_said_in_the_title(capsys: pytest.CaptureFixture[str]) -> None:
    """Plain attention replaces a row by four, and one that starts again keeps less."""
    plain = answer(capsys, *FLAT, "--attention", "plain", "--layers")
    again = answer(capsys, *FLAT, "--attention", "plain", "--recompute", "--layers")
    assert "1d, dp=2 tp=8 pp=4 mbs=1, plain attention\n" in plain
    assert "plain attention, recomputed\n" in again
    assert "\nsoftmax " in plain
    assert "fusedla" not in plain
    assert plain != again


def test_compressed_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name in .gz makes gzip of what the plain name has, the same bytes every time."""
    for number, model in enumerate(((*CALCULON, "--execution", "1x8-tp8"), FLAT)):
        folder = tmp_path / f"{number}"
        for name in ("a.json", "b.json.gz", "c.json.gz"):
            answer(capsys, *model, "--json", str(folder / name))
        packed = (folder / "b.json.gz").read_bytes()
        assert packed == (folder / "c.json.gz").read_bytes()
        assert gzip.decompress(packed) == (folder / "a.json").read_bytes()


@pytest.mark.parametrize(
    "arguments",
    [
        (*CALCULON, "--execution", "8x8-tp8-pp4-dp2", "--layers"),
        (*FLAT, "--layers", "--compat"),
        ("--validate",),
    ],
    ids=["calculon", "tensor2d", "validate"],
)
def test_reports_fit_into_80_columns(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without colours, and without a number that is cut."""
    text = answer(capsys, *arguments)

    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert "…" not in text
    assert not [line for line in text.splitlines() if line.strip() in ("%", "s", "GiB")]


def test_validation_prints_and_writes_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """Every published figure with two signed errors, and their summary."""
    document = without_head(
        json.loads(answer(capsys, "--validate", "--system", "a100", "--json", "-"))
    )
    text = answer(capsys, "--validate")

    assert list(document) == ["default", "compat"]
    assert [len(rows) for rows in document.values()] == [36, 36]
    assert all(
        row["error"] == pytest.approx(row["computed"] / row["published"] - 1)
        for rows in document.values()
        for row in rows
    )
    for row in document["default"] + document["compat"]:
        assert f"{row['error'] * 100:+.2f} %" in text
    rows = [line.split("  ") for line in text.splitlines() if " --compat  " in line][:3]
    printed = {row[0]: row[-1].strip() for row in rows}
    assert printed.pop("step time") == "3.65 %"
    # counts of bytes do not depend on the machine: those of the published one are ours of --compat
    for group, published in printed.items():
        errors = [abs(row["error"]) for row in document["compat"] if row["group"] == group]
        assert published == f"{np.mean(errors) * 100:.1f} %"
    assert printed.keys() == {"states", "activations"}


def test_shipped_name_of_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    """A name of a model, of a machine and of an execution is enough."""
    for name in ("1x8-dp8", "1x8-tp8"):
        assert execution_keys(name)[0].is_file()
        assert "samples/s" in answer(capsys, *CALCULON, "--execution", name)
