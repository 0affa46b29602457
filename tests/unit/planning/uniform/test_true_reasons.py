"""True reasons: what excludes a rule, answers before reports, batches that divide badly."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from autopar.errors import OptionError
from search.commands import explain, search
from search.planning.space import freed, next_batch

pytestmark = pytest.mark.whole

PUBLISHED = json.loads(
    (Path(__file__).parents[3] / "data" / "published_configs.json").read_text(encoding="utf-8")
)
_ASKED = ("--model", "llama2-7b", "--hardware", "a100-80gb:1x8", "--engine", "none")
_LAUNCH = ("--model", "llama3-8b", "--hardware", "h100:1x8", "--seq-length", "4096")


def plan_of(folder: Path, *words: str, base: tuple[str, ...] = _ASKED) -> Path:
    """Return the file of a search, of ours where there is one of Galvatron beside it."""
    out = ("--output-config-path", str(folder / "found"))
    assert search.run([*base, "--global-batch-size", "16", "--top", "0", *words, *out]) == 0
    files = sorted((folder / "found").glob("*.json"), key=lambda path: path.name)
    return next((one for one in files if one.name.startswith("autopar_plan")), files[0])


@given(st.integers(1, 512), st.integers(1, 96))
def test_the_next_batch_is_the_nearest_that_is_shared_better(batch: int, world: int) -> None:
    """Against trying every one: of each as many ranks work as have a sample."""

    def idle(number: int) -> bool:
        most = max(d for d in range(1, world + 1) if world % d == 0 and d <= number)
        return math.gcd(number, world) % most != 0

    found = next_batch(batch, world)

    assert (found is None) == (not idle(batch))
    if found is not None:
        assert not idle(found)
        assert all(idle(number) for number in range(batch, found))


@pytest.mark.parametrize(
    ("pins", "rule", "kept", "dropped"),
    [
        (("tp=2,zero3=0",), "tp=4", ("zero3=0",), ("tp=2",)),
        (("tp=2", "pp=2"), "tp=2", ("tp=2", "pp=2"), ()),
        (("layers 0-3:tp=2",), "layers 4-5:tp=4", ("layers 0-3:tp=2",), ()),
        (("layers 0-3:tp=2,ckpt=1",), "tp=4", ("layers 0-3:ckpt=1",), ("layers 0-3:tp=2",)),
        (("stage 0:ckpt=1",), "stage 1:ckpt=0", ("stage 0:ckpt=1",), ()),
        (("pp=2",), "pp=4", (), ("pp=2",)),
    ],
)
def test_pins_make_room_for_a_rule(
    pins: tuple[str, ...], rule: str, kept: tuple[str, ...], dropped: tuple[str, ...]
) -> None:
    """Only what contradicts it, of the same layers."""
    assert freed(pins, rule) == (kept, dropped)


@pytest.mark.parametrize(
    ("words", "rule", "said"),
    [
        (("--max-cp-deg", "1"), "cp=2", "without --max-cp-deg 1"),
        (("--disable-tp",), "tp=2", "without --disable-tp"),
        (("--disable-pp",), "pp=2", "without --disable-pp"),
        (("--search-space", "dp+tp"), "pp=2", "without --search-space dp+tp"),
        (("--tp", "2"), "tp=4", "without --pin tp=2"),
        (("--forbid", "tp=4"), "tp=4", "without --forbid tp=4"),
    ],
)
def test_what_excludes_a_rule_is_named_and_left_away(
    words: tuple[str, ...],
    rule: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The comparison is one within the whole space, and comes before the report."""
    path = plan_of(tmp_path, *words)
    capsys.readouterr()

    assert explain.run([str(path), "--why-not", rule, "--why-not", "pp=3"]) == 0

    out = " ".join(capsys.readouterr().out.split())
    assert f"Why not {rule} ({said})" in out
    # both are answered, and the plan itself only with --verbose
    assert 0 <= out.index(f"Why not {rule}") < out.index("Why not pp=3")
    assert "Why not pp=3: no plan no number of pipeline stages" in out
    assert "Basis" not in out


def test_another_launch_is_looked_for_among_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Degrees that were fixed in the search bind its launch, not the one that is asked about."""
    path = plan_of(tmp_path, "--engine", "megatron", "--pp", "1", "--tp", "1", base=_LAUNCH)
    capsys.readouterr()

    assert explain.run([str(path), "--why-not", "tp=2,pp=4"]) == 0
    assert explain.run([str(path), "--why-not", "tp=2"]) == 0

    out = " ".join(capsys.readouterr().out.split())
    assert "Why not tp=2,pp=4: " in out
    assert "Why not tp=2 (without --pp): " in out
    assert " tp=2 tp2 " in out


@pytest.mark.parametrize(
    ("base", "batch", "said"),
    [
        (_ASKED, "12", "--global-batch"),
        ((*_LAUNCH, "--engine", "megatron"), "9", "--global"),
        (_ASKED, "16", ""),
    ],
)
def test_a_batch_that_divides_badly_is_said(
    base: tuple[str, ...], batch: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the next better one, and what it brings."""
    words = ("--global-batch-size", batch, "--output-config-path", "none", "--top", "0")
    assert search.run([*base, *words]) == 0

    err = capsys.readouterr().err
    assert said in err
    assert ("--global-batch-size 16 reaches" in err) == bool(said)


def test_experts_of_a_model_without_any_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """By the model, whoever would answer."""
    words = ("--model", "t5-3b", "--hardware", "h100-80gb:1x8", "--ep", "2")
    assert search.run(words) == 2
    assert "t5-3b" in capsys.readouterr().err


def test_a_rule_of_why_not_is_checked() -> None:
    """Before anything is searched."""
    with pytest.raises(OptionError):
        freed((), "fast please")


def test_a_strategy_file_names_the_plan_beside_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Galvatron's file says neither model nor cluster; ours, which was written with it, does."""
    words = ("--model", "llama2-7b", "--hardware", "a100-80gb:2x8", "--engine", "none")
    assert search.run([*words, "--output-config-path", "own.json"]) == 0
    capsys.readouterr()
    assert explain.run(["own.json"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("Add autopar_plan_own.json, which contains model and hardware")
    Path("autopar_plan_own.json").unlink()
    assert explain.run(["own.json"]) == 2
    assert "--hardware" in capsys.readouterr().err


def test_an_engine_without_a_plan_says_why_without_parts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """How its space was divided is nothing to who asks all engines."""
    words = ("--model", "llama2-7b", "--hardware", "rtx-4090:1x4", "--seq-length", "2048")
    assert search.run([*words, "--num-layers", "16", "--memory-constraint", "4"]) == 3
    assert search.run([*words, "--num-layers", "16", "--memory-constraint", "4", "--verbose"]) == 3
    text = capsys.readouterr().out
    assert "galvatron: nothing fits" in text
    assert "parts of its space" not in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "llama2-7b"), "--hardware"),
        (("--hardware", "a100-80gb:1x8"), "--model"),
        ((), ""),
        (("--model", "llama2-7b", "--engine", "none"), ""),
    ],
)
def test_what_is_not_named_says_who_answered(
    words: tuple[str, ...],
    said: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A model alone is planned for the shipped cluster, by nobody's launches: that is said."""
    assert search.run([*words, "--output-config-path", "none"]) == 0
    err = capsys.readouterr().err
    assert ("answered with per-layer plans" in err) == bool(said)
    assert said in err


def test_per_layer_plans_replace_uniform_ones_without_a_legal_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """OLMo 2: no argument of Megatron-LM makes its norms, and no config.json of it is written."""
    monkeypatch.chdir(tmp_path)
    config = PUBLISHED["olmo-2-32b"]["config"] | {"num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    asked = ["--model", "config.json", "--hardware", "h100:1x8", "--global-batch-size", "64"]
    assert search.run([*asked, "--seq-length", "2048"]) == 0
    assert "answered with per-layer plans" in capsys.readouterr().err

    assert search.run([*asked, "--lora", "16"]) == 2
    err = capsys.readouterr().err
    assert all(f"{name}: " in err for name in ("megatron", "torchtitan", "deepspeed, accelerate"))
    assert err.count("\n") == 1


def test_options_of_per_layer_plans_are_named_for_models_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither images nor hybrids have per-layer plans, so another engine would not help."""
    monkeypatch.chdir(tmp_path)
    for name, words in (("vit-l", ("--precision", "fp16")), ("nemotron-3-nano", ("--pin", "tp=2"))):
        asked = ["--model", name, "--hardware", "v100:1x8", "--global-batch-size", "256"]
        assert search.run([*asked, *words]) == 2
        assert f"Remove {words[0]}" in capsys.readouterr().err
