"""Limits of files: each is refused before it is expanded, with its true reason."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from autopar import limits
from autopar.documents import catalog
from autopar.documents.json import MOST_ERRORS, Fault, load_object
from autopar.documents.plan import RunDocument
from autopar.documents.schemas import AllreduceDocument
from autopar.documents.spec import load_spec
from autopar.errors import DocumentError
from search.engines.text import read_configuration
from tests.warm import ROOT

DOUBLING = "a0: &a0 {}\n" + "".join(
    f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
FILES = {
    "digits.toml": ("a = 1\nb = " + "9" * 100_000, "line 2 has an integer of 100,000 digits"),
    "hexadecimal.toml": (
        "[a]\nb = 0x" + "f" * 100_000,
        "'a.b': the value is an integer of more than 4,300",
    ),
    "dotted.toml": (
        "x = 1\n" + ".".join("a" * 20_000) + " = 1",
        "line 2 has a key of 20,000 parts",
    ),
    "header.toml": (f"[{'.'.join(['a'] * 65)}]\n", "line 1 has a key of 65 parts"),
    "quoted.toml": ("x = {" + ".".join(['"a b"'] * 99) + " = 1}\n", "line 1 has a key of 99 parts"),
    "tables.toml": ("[" + ".".join("a" * 60) + "]\n" + ".".join("b" * 9) + " = 1", "nest deeper"),
    "deep.toml": ("x = " + "[" * 20_000 + "]" * 20_000, "is nested too deeply"),
    "digits.yaml": ("a: 1\nb: " + "9" * 5000, "line 2 has a number of more than 4,300 digits"),
    "hexadecimal.yaml": ("b: 0x" + "f" * 4200, "line 1 has a number of more than 4,300 digits"),
    "base60.yaml": ("b: 1" + ":59" * 80_000, "line 1 has a number of more than 4,300 digits"),
    "merged.yaml": (DOUBLING, "has more than 65536 values, aliases resolved"),
    "flow.yaml": ("a: " + "[\n" * 100_000, "line 64 nests deeper than 64 levels"),
    "items.yaml": ("- " * 100_000, "line 1 nests deeper than 64 levels"),
    "large.yaml": ("a: 1\n" * 60_000, "the file is larger than 256 KiB"),
    "large.toml": ("#" * (4 << 20) + "\n", "the file is larger than 4 MiB"),
    "digits.json": ('{\n"a": ' + "9" * 6000 + "}", "line 2 has an integer of 6,000 digits"),
    "runs.json": ('{"a": [' + ("1" * 4000 + ",") * 500 + "9" * 6000 + "]}", "of 6,000 digits"),
    "lists.json": ('{"a": [' + "[]," * 3_000_000 + "[]]}", "has 6,000,003 commas and brackets"),
    "deep.json": ('{"a":' * 100_000 + "1" + "}" * 100_000, "brackets nest deeper than 64"),
    "level.json": ('{"a":' * 65 + "1" + "}" * 65, "brackets nest deeper than 64"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_are_refused_before_they_are_expanded(name: str, tmp_path: Path) -> None:
    """The reason is the limit, and nothing takes seconds."""
    text, problem = FILES[name]
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    start = time.process_time()
    with pytest.raises(DocumentError) as caught:
        read_configuration(path)
    assert problem in str(caught.value)
    assert time.process_time() - start < 2.0


def test_values_at_the_limits_are_read(tmp_path: Path) -> None:
    """Dots in texts and numbers are no keys, and 4,300 digits are read."""
    toml = tmp_path / "a.toml"
    whole = "9" * limits.MOST_DIGITS
    dots = ".".join("a" * 500)
    toml.write_text(
        f'x = "{dots}"\ny = {[0.5] * 200}\n[{".".join("k" * 64)}]\nn = {whole}\n', encoding="utf-8"
    )
    with pytest.raises(DocumentError, match="nest deeper"):  # the table is one level more
        read_configuration(toml)
    toml.write_text(f'x = "{dots}"\ny = {[0.5] * 200}\nn = {whole}\n', encoding="utf-8")
    found = read_configuration(toml).document
    assert (found["x"], len(found["y"]), found["n"]) == (dots, 200, int(whole))
    yaml = tmp_path / "a.yaml"
    yaml.write_text(f"a: 1:2:3\nb: 5e3\nc: {whole}\n", encoding="utf-8")
    # as PyYAML reads YAML 1.1 for the engines: base 60, and a text without a decimal point
    assert read_configuration(yaml).document == {"a": 3723, "b": "5e3", "c": int(whole)}
    nested = tmp_path / "a.json"
    nested.write_text('{"a":' * 64 + whole + "}" * 64, encoding="utf-8")
    assert load_object(nested).data


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"num_experts": 10_000_000}, "the value is 10000000, expected at most 4096"),
        ({"hidden_size": 10**9}, "parameters, expected at most 1e+15"),
        ({"num_layers": 10_000_000}, "expected a whole number from 1 to 10000"),
    ],
)
def test_models_have_a_plausible_size(change: dict[str, int], problem: str, tmp_path: Path) -> None:
    """Prices count experts one by one, and plans choose a strategy for each layer."""
    spec = json.loads(catalog.find_model("deepseek-v2-lite").read_text("utf-8"))
    spec["layers"][-1] |= change
    path = tmp_path / "model.json"
    path.write_text(json.dumps(spec), encoding="utf-8")
    with pytest.raises(DocumentError) as caught:
        load_spec(str(path))
    assert problem in str(caught.value)
    spec["layers"] = spec["layers"][:1] * 100_000
    path.write_text(json.dumps(spec), encoding="utf-8")
    with pytest.raises(DocumentError, match="has 100000 layer types, expected at most 64"):
        load_spec(str(path))


def test_a_million_wrong_entries_are_not_all_listed(tmp_path: Path) -> None:
    """Each error costs a search for similar keys."""
    path = tmp_path / "model.json"
    start = time.process_time()
    for data in ({"layers": [1] * 1_000_000}, {f"key{place}": 1 for place in range(200_000)}):
        path.write_text(json.dumps({"format": "autopar-model", **data}), encoding="utf-8")
        with pytest.raises(DocumentError):
            load_spec(str(path))
    assert time.process_time() - start < 10.0


def test_no_price_of_a_plan_file_is_nan(tmp_path: Path) -> None:
    """A key whose value has any type may still hold no NaN, however deep."""
    path = tmp_path / "plan.json"
    run = json.loads((ROOT / "tests" / "data" / "run_v2.json").read_text("utf-8"))
    run["price"] = {"figures": [{"step": float("nan")}]}
    path.write_text(json.dumps(run), encoding="utf-8")
    with pytest.raises(DocumentError, match=r"price\.figures\[0\]\.step.*nan"):
        RunDocument.read(path)


def test_keys_are_searched_once_for_all_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory file with 200,000 unknown keys took minutes; 100 errors are listed."""
    kind: Any = AllreduceDocument
    searches = list[int]()
    known_keys = kind.known_keys
    monkeypatch.setattr(kind, "known_keys", lambda keys: searches.append(1) or known_keys(keys))
    data = {f"key{n}": 1 for n in range(3000)}
    found: list[Fault] = []
    kind.taken(data, "", found)
    assert (len(found), len(searches)) == (MOST_ERRORS, 1)
