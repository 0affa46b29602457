"""Catalog: shipped names, aliases, explicit paths, and the order of places."""

from __future__ import annotations

import pytest

from autopar.documents import catalog
from autopar.errors import InputError


def test_cards_are_found_by_name_and_alias():
    assert set(catalog.card_names()) == {"a100-40gb", "a100-80gb", "h100-80gb", "h200", "b200"}
    assert catalog.find_card("h100") == catalog.find_card("h100-80gb")
    assert catalog.find_card("A100").stem == "a100-80gb"


def test_explicit_path_wins(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text("{}")
    assert catalog.find_card(str(path)) == path
    assert catalog.find_model(str(path)) == path
    assert catalog.find_hardware(str(tmp_path)) == tmp_path


def test_packaged_data_wins_over_the_repository(tmp_path, monkeypatch):
    packaged, repository = tmp_path / "_data", tmp_path / "repo"
    for root in (packaged, repository):
        (root / "models" / "m").mkdir(parents=True)
        (root / "models" / "m" / "model.json").write_text("{}")
    (repository / "models" / "only").mkdir()
    (repository / "models" / "only" / "model.json").write_text("{}")
    monkeypatch.setattr(catalog, "_ROOTS", (packaged, repository))
    assert catalog.find_model("m").is_relative_to(packaged)
    assert catalog.model_names() == ("m", "only")


@pytest.mark.parametrize(
    ("find", "name", "words"),
    [
        (catalog.find_card, "h10", "did you mean h100"),
        (catalog.find_model, "qwen2.5-8b", "did you mean qwen2.5-7b"),
        (catalog.find_hardware, "a100-80gb_1x9", "did you mean a100-80gb_1x8"),
        (catalog.find_card, "zzzz", "known: "),
    ],
)
def test_unknown_name_says_the_nearest(find, name, words):
    with pytest.raises(InputError, match=words):
        find(name)
