"""Limits of files: each is refused before it is expanded, with its true reason."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from autopar.documents import limits
from autopar.documents.json import load_object
from autopar.errors import DocumentError
from search.engines.text import read_configuration

DOUBLING = "a0: &a0 {}\n" + "".join(
    f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
FILES = {
    "digits.toml": ("a = 1\nb = " + "9" * 100_000, "line 2 has an integer of 100,000 digits"),
    "hexadecimal.toml": ("[a]\nb = 0x" + "f" * 100_000, "'a.b': is an integer of more than 4,300"),
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
    json = tmp_path / "a.json"
    json.write_text('{"a":' * 64 + whole + "}" * 64, encoding="utf-8")
    assert load_object(json).data
