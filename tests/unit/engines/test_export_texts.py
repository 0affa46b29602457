"""Launch scripts and YAML of others, read without running or importing anything."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from autopar.errors import DocumentError
from autopar.records import replace
from autopar.run.plan import LayerStrategy, VocabStrategy
from search.engines.files import with_script
from search.engines.plans import lower_for
from search.engines.text import dump_yaml, flags_of, load_yaml, script_command
from tests.export_cases import HETEROGENEOUS, job
from tests.often import often

SCRIPTS = {
    "variables": 'A=1\nB="$A 2"\npython x.py --a $B --b "$B" --c ${C:-3} --d "${A}x"\n',
    "arrays": 'X=(--a 1\n  # comment )\n  --b "2 3")\nX+=(--c)\npython x.py "${X[@]}" --d\n',
    "falling apart": 'X=("--a 1" --b)\npython x.py ${X[@]}\n',
    "continued": "python \\\n  x.py --a \\\n  1 # end\n",
    "text of flags": 'ARGS="\n  --a 1 \\\n  --b two"\npython x.py $ARGS\n',
    "quotes": "python x.py --a 'one two' --b \"it's\" --c a\\ b\n",
    "export": "export A=4 B=5\npython x.py --a $A --b $B\n",
    "several": "python y.py --z 1; A=1 && python x.py --a $A\n",
    "defaults": 'A=${A:-7}\npython x.py --a $A --b "${B-}" --c "${A:+set}"\n',
    "quotes in defaults": 'A=${1:-"x y"}\npython x.py --a "$A" --b ${C:-${A}z} "${C:-"$A"}"\n',
    "quotes in values": 'A=\'a"b\\c $B\'\npython x.py --a "$A" --b $A "\\$A \\x" \\$A\n',
    "blanks in values": 'A=" 1 2 "\nB=$A\npython x.py --a x${A}y "$B" x\'$A\'\n',
    "without blanks": 'X=(--a "x"#1);python x.py --c\\\nd "${X[@]}" a#b;A=1\n',
    "empty words": (
        'E=\nX=(\'\' 1)\npython x.py --a "" --b "$E" --c $E --d \'\' --e "${X[@]}" --f ${X[@]}\n'
    ),
    "redirected": "python x.py --a 2 --b 1>log 2>&1 | cat; echo x </dev/null >> log\n",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_bash(name: str, tmp_path: Path) -> None:
    """bash itself, with a `python` that prints its words, sees the same."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash on this machine")
    program = 'python() { shift; printf "%s\\n" "$@" > words; }\n' + SCRIPTS[name]
    subprocess.run([bash, "-c", program], cwd=tmp_path, env={}, check=True)
    expected = (tmp_path / "words").read_text(encoding="utf-8").splitlines()

    command = script_command(SCRIPTS[name], "x.sh")

    assert list(command.arguments) == expected


def test_an_empty_word_is_a_value() -> None:
    """`--a ""` gives an empty text, and is no flag without one."""
    command = script_command('python x.py --a "" --b\n', "x.sh")

    assert flags_of(command.arguments) == {"a": ("",), "b": ()}


def test_launcher_in_variables() -> None:
    """A launcher that is put together from texts is found, with its nodes."""
    text = (
        'LAUNCHER="python3 -m torch.distributed.launch"\n'
        'LAUNCHER="${LAUNCHER} --nproc_per_node 8"\nTRAINER="train_dist.py"\n'
        "${LAUNCHER} ${TRAINER} --pp_deg 2\n"
    )
    command = script_command(text, "x.sh")

    assert command.before[-1] == "8"
    assert command.arguments == ("--pp_deg", "2")


def test_what_is_unknown_stays() -> None:
    """Variables of the environment are not guessed."""
    text = 'python x.py --a $HOSTS --b "${A:?set it}" --c ${B%.py} --d "$1"\n'
    command = script_command(text, "x.sh")

    expected = "--a $HOSTS --b", "${A:?set it}", "--c ${B%.py} --d $1"
    assert command.arguments == (*expected[0].split(), expected[1], *expected[2].split())


@pytest.mark.parametrize("text", ["A='x\n", 'A="x\n', "A=(1 2\n", "A=(1 'x\n", "A=${x\n"])
def test_unclosed_texts_are_refused(text: str) -> None:
    """One sentence with the line."""
    with pytest.raises(DocumentError, match="line 1 is not closed"):
        script_command(text, "x.sh")


@given(st.text(alphabet="aA=$(){}[]'\"`\\ \n#;|&-+*:@x.py", max_size=40))
@settings(max_examples=300)
def test_no_script_is_an_internal_error(text: str) -> None:
    """Every text has words or is refused."""
    try:
        script_command(text, "x.sh")
    except DocumentError as error:
        assert "\n" not in str(error)  # noqa: PT017


def test_growing_variables_are_stopped() -> None:
    """A script that doubles a variable a hundred times ends in a sentence."""
    with pytest.raises(DocumentError, match="grows beyond"):
        script_command("A=aaaaaaaa\n" + "A=$A$A\n" * 100, "x.sh")


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**9), 10**9),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12),
)
KEYS = st.text(alphabet="abc_-", min_size=1, max_size=6).filter(lambda key: not key.startswith("-"))
DOCUMENTS = st.dictionaries(
    KEYS,
    st.one_of(
        SCALARS,
        st.lists(SCALARS, max_size=3),
        st.dictionaries(KEYS, SCALARS, min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=4,
)


@often(25, 100, DOCUMENTS)
def test_yaml_is_read_back(document: dict[str, Any]) -> None:
    """What is written is read, by us and by others."""
    text = dump_yaml(document)

    assert load_yaml(text, "x") == document
    assert yaml.safe_load(text) == document


@pytest.mark.parametrize("text", ["no", "1_0", "2026-01-02", "1:30", "1e5", "{}", "}", "${A}", ""])
def test_texts_stay_texts(text: str) -> None:
    """Also those that YAML 1.1 takes for something else."""
    document = {"a": text, "b": [text, "x"]}

    assert yaml.safe_load(dump_yaml(document)) == document


def test_yaml_of_others() -> None:
    """Comments, quotes, lists over lines, keys with hyphens."""
    text = """---
# a comment
ENV_VARS:
  CUBLAS: :4096:8   # with colons
MODEL_ARGS:
  --num-layers: 12
  --lr: 1.0e-5
  --data-path: ${DATA_PATH}/text # comment
  --layout: "Et*3|t*5L"
  --kinds: [p2p, 'a2a', "a,b"]
  --list:
  - 1
  - two
  --empty:
  --flag: true
  --pairs: {a: 1, b: [2,
    3]}
  --text: |
    two
    lines
last: 'it''s'
"""

    assert load_yaml(text, "x") == yaml.safe_load(text)


def test_anchors_and_merged_keys() -> None:
    """What a mapping says itself counts, then the first of those that it merges, which is said.

    PyYAML 6.0.4 takes the last of several merged values, and is no oracle for that key.
    """
    text = """
base: &base
  --num-layers: 12
  --bf16: true
other: &other {--num-layers: 4, --lr: 1}
MODEL_ARGS:
  <<: [*base, *other]
  --lr: &rate 2
again: *rate
folded: >-
  one
  two
"""
    notes = list[str]()
    found = load_yaml(text, "x", notes)
    expected = yaml.safe_load(text)

    assert found["MODEL_ARGS"] == {"--num-layers": 12, "--bf16": True, "--lr": 2}
    (note,) = notes
    assert note.startswith("line 7 merges two values of --num-layers: the first, 12, counts")
    expected["MODEL_ARGS"]["--num-layers"] = 12
    assert found == expected
    assert load_yaml(text, "x") == found
    assert found["folded"] == "one two"


def test_the_last_of_repeated_keys_counts_and_is_said() -> None:
    """As every engine's reader has it; the same value twice is nothing to say."""
    notes = list[str]()
    found = load_yaml("a: 1\nb:\n  c: x\n  c: y\na: 1\n", "x", notes)

    assert found == {"a": 1, "b": {"c": "y"}}
    assert notes == ["line 4 repeats c: 'y' counts, not 'x'"]


BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("- 1\n- 2\n", "is a list"),
        ("a: 1\nb: *a\n", "line 2 is not YAML: found undefined alias"),
        ("a: &x [*x]\n", "is nested too deeply"),
        ("a: &x 1\nb:\n  <<: *x\n", "line 3 merges"),
        (BOMB, "has more than 65536 values"),
        ("a: !!python/name:os.system\n", "line 1 has a YAML tag"),
        ("a: 1\na: 2\n", "'a'"),
        ("a:\n  b: {c: 1, c: 2}\n", "'c'"),
        ("[a]: 1\n", "line 1 has a key"),
        ("a: 1\n   b: 2\n", "line 2 is not YAML: mapping values are not allowed here"),
        ("  a: 1\nb: 2\n", "line 2 is not YAML: expected '<document start>'"),
        ("a: 1\n---\nb: 2\n", "that autopar knows: line 2 starts another document"),
        ("a: b\n{{- if .Values.c }}\n{{ end }}\n", "that autopar knows: it is a template"),
        ("a: !Ref b\n", "that autopar knows: line 1 has the tag !Ref"),
        ("a:\n\tb: 1\n", "line 2 is not YAML: found character '\\t'"),
        ("a: 1\nb: \0\n", "line 2 has the character '\\x00'"),
        ("a: " + "[" * 1500, "line 1 nests deeper than 64 levels"),
        ("just words\n", "line 1 is not `key: value`"),
    ],
)
def test_other_yaml_is_refused(text: str, problem: str) -> None:
    """The line is named."""
    with pytest.raises(DocumentError) as caught:
        load_yaml(text, "x.yaml")

    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(alphabet="ab01_-: \n\t[]{},&*!|>'\"#%@`?<=~.\\", max_size=30))
@settings(max_examples=300)
def test_no_yaml_is_an_internal_error(text: str) -> None:
    """Every text is a mapping or is refused."""
    try:
        assert isinstance(load_yaml(text, "x"), dict)
    except DocumentError as error:
        assert "\n" not in str(error)  # noqa: PT017


def bash_beside(engine: str, folder: Path) -> str:
    """Write the files of a plan of two ranks, and return the program bash."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash on this machine")
    plan = replace(HETEROGENEOUS, world_size=2, num_stages=1, stage_sizes=(8,))
    plan = replace(plan, layers=(LayerStrategy(),) * 8, vocab=VocabStrategy())
    lowered = lower_for(engine)(job(plan))
    for name, text in with_script(lowered.files, lowered.launch).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return bash


@pytest.mark.parametrize(
    ("engine", "asked"),
    [
        ("galvatron", ["DATA_PATH", "TOKENIZER_MODEL", "ROTARY_BASE", "GALVATRON_PATH"]),
        (
            "megatron",
            ["ROTARY_BASE", "TRAIN_ITERS", "DATA_PATH", "TOKENIZER_MODEL", "MEGATRON_PATH"],
        ),
        ("torchtitan", ["HF_ASSETS_PATH", "ROTARY_BASE"]),
    ],
)
def test_launches_ask_for_what_is_unset(engine: str, asked: list[str], tmp_path: Path) -> None:
    """bash ends with one sentence for each variable in turn, and then finds its torchrun."""
    bash = bash_beside(engine, tmp_path)
    environment: dict[str, str] = {}
    for name in [*asked, None]:
        done = subprocess.run(
            [bash, "launch.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode != 0
        expected = "torchrun: " if name is None else f"{name}: set {name} to "
        assert expected in done.stderr
        environment[str(name)] = "here"


@pytest.mark.parametrize(
    ("engine", "file", "load", "save"),
    [
        ("galvatron", "train_dist_v2.4.sh", "--load", "--save"),
        ("deepspeed", "launch.sh", "--model_name_or_path", "--output_dir"),
        ("accelerate", "launch.sh", "--model_name_or_path", "--output_dir"),
        ("megatron", "launch.sh", "--load", "--save"),
        ("paddlenlp", "launch.sh", "--resume_from_checkpoint", "--output_dir"),
    ],
)
def test_weights_come_and_go_where_the_environment_says(
    engine: str, file: str, load: str, save: str, tmp_path: Path
) -> None:
    """LOAD and SAVE are options of the launch, one word each.

    Without LOAD a script names the configuration of its model.
    """
    bash = bash_beside(engine, tmp_path)
    for name in ("torchrun", "accelerate", "python"):
        program = tmp_path / name
        program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n', encoding="utf-8")
        program.chmod(0o755)
    asked = "DATA_PATH TOKENIZER_MODEL ROTARY_BASE MODEL_SIZE MEGATRON_PATH PADDLENLP_PATH DATA_DIR"
    asked += " TRAIN_ITERS"
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **dict.fromkeys(asked.split(), "here")}

    def words(**more: str) -> list[str]:
        done = subprocess.run(
            [bash, "-eu", file], cwd=tmp_path, env=environment | more, capture_output=True,
            text=True, check=True,
        )  # fmt: skip
        return done.stdout.splitlines()

    plain = words()
    if load == "--model_name_or_path":
        assert plain[plain.index(load) + 1] == "model"
    else:
        assert load not in plain
    assert "" not in plain
    full = words(LOAD="/my weights", SAVE="/my runs")
    assert full[full.index(load) + 1] == "/my weights"
    assert full[full.index(save) + 1] == "/my runs"


def test_a_recipe_takes_weights_from_the_environment() -> None:
    """torchtitan's begins with LOAD, and writes to SAVE."""
    plan = replace(HETEROGENEOUS, layers=(LayerStrategy(),) * 8, vocab=VocabStrategy())
    text = lower_for("torchtitan")(job(plan)).files["autopar_recipe.py"]
    for line in (
        'enable=bool(environ.get("LOAD") or environ.get("SAVE"))',
        'initial_load_path=environ.get("LOAD") or None',
        'initial_load_in_hf=bool(environ.get("LOAD"))',
        'folder=environ.get("SAVE") or "checkpoint"',
    ):
        assert line in text
