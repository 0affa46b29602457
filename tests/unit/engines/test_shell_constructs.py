"""Constructs of bash's manual: interpreted as bash does, or refused by name and line."""

from __future__ import annotations

import re
import resource
import time
from contextlib import suppress
from pathlib import Path

import pytest

from autopar.errors import DocumentError, OptionError
from search.commands.app import with_script
from search.engines.text import read_configuration, script_command
from search.engines.text.shell_builtins import BUILTINS, REFUSED
from search.engines.text.shell_patterns import Matcher, glob_pattern, regular_pattern
from tests.unit.engines.test_shell_scripts import words_of_bash

CONSTRUCTS = Path(__file__).parents[2] / "data" / "shell_constructs.txt"
"""Scripts by construct, separated by lines of `====`; each ends with a launch."""
LAUNCH = "python x.py --a 1\n"


def test_constructs_of_the_manual_give_the_words_of_bash(tmp_path: Path) -> None:
    """Quotes, braces, expansions, arrays, conditions, loops, functions, redirections, builtins."""
    scripts = [text + "\n" for text in CONSTRUCTS.read_text(encoding="utf-8").split("\n====\n")]
    expected = words_of_bash(scripts, tmp_path)
    found = [[*script_command(text, "x.sh").arguments] for text in scripts]

    assert len(scripts) > 130
    assert dict(zip(scripts, found, strict=True)) == dict(zip(scripts, expected, strict=True))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("select A in 1 2; do :; done\n", "`select`"),
        ("coproc cat\n", "`coproc`"),
        ("declare -n A=B\n", "`declare -n`"),
        ("declare -c A=b\n", "`declare -c`"),
        ("shopt -s expand_aliases\n", "`shopt -s expand_aliases`"),
        ("shopt -s lastpipe\n", "`shopt -s lastpipe`"),
        ("set -k\n", "`set -k`"),
        ("set -o posix\n", "`set -o posix`"),
        ("enable -n echo\n", "`enable` here"),
        ("trap 'A=1' DEBUG\n", "`trap` for DEBUG"),
        ("trap 'A=1' ERR; false\n", "`trap` for ERR"),
        ("readonly A=1; A=2\n", "the assignment to A, which is readonly"),
        ("A=abc; python x.py --a ${A/b/&}\n", "`${A/b/&}`"),
        ("A=abc; python x.py --a ${A@A}\n", "`${A@A}`"),
        ("python x.py --a ${!A*}\n", "`${!A*}`"),
        ("python x.py --a $(printf %q 'a b')\n", "`$(printf %q 'a b')`"),
        ("[[ a =~ (.)\\1 ]]\n", "a back reference in the pattern"),
        ("case a in @(a|b)) A=1;; esac\n", "without `shopt -s extglob`"),
        ("A=$((1/0))\n", "the expression `$((1/0))`"),
        ("A=$((08))\n", "the expression `$((08))`"),
        ("A=2; echo $A{b,c}\n", "a name that braces join"),
        ("exec {fd}>x\n", "`{fd}>`"),
        ("set -u; unset A; B=$A\n", "$A, unset with `set -u`,"),
        ("A=; B=${A:?}\n", "${A:?}, which ends the script,"),
        ("shopt -s nullglob; A=(*.x); python x.py --a ${A[@]}\n", "`*.x`"),
        ("declare -A M; M[$B]=1; M['']=2\n", "an empty key"),
        ("for f in *; do exit; done\n", "`exit` in a loop of unknown length"),
        ("read A <<< 'a\\b'\n", "a backslash in what `read` reads"),
        ('N=x; B="${N:-"{a,b}"}"\n', "braces in double quotes within double quotes"),
        ('N=A; B="${!N#"{1..3}"}"\n', "braces in double quotes within double quotes"),
        ('B="${N:-it\'s}"\n', "an apostrophe in a default in double quotes"),
        ("shopt -s failglob; P+=(a *.bin)\n", "*.bin with `shopt -s failglob`"),
        ("set -- ' b '; bash <<E\npython x.py --a $*\nE\n", "$* in a here-document"),
        ("rm y && P+=(a b); unset 'P[-1]'\n", "`unset P[-1]`"),
        ("trap 'B=1' ERR; printf -v C %03d p\n", "what `printf` prints and returns"),
        ("set -e; printf -v A $_\n", "what `printf` prints and returns"),
        ("declare -A M=($(date) b)\n", "a key of M that is empty or known only at run time"),
        ("shopt -s nocasematch; case a in [[:upper:]]) B=1; esac\n", "`shopt -s nocasematch`"),
        ("F() { declare -g A=1; }; G() { local A; F; }; G\n", "`declare -g` of A, which is local,"),
        ("set -e; A=$(printf %d 1e-4)\n", "what `printf` prints and returns"),
        ("x <<< ${U:=a}\n", "an assignment in a redirection"),
        ("set -u; declare -a P; B=${#P[@]}\n", "${#P[@]}, unset with `set -u`,"),
        ("P=('' ''); IFS=; B=${P[*]:+x}\n", "a list with this IFS,"),
        ('P=(a b); IFS=,; B="${P[@]^^}"\n', "${P[@]^^}, a list with this IFS,"),
        ('P=(a b); IFS=,; B="${N:-"${P[@]#a}"}"\n', "a list with this IFS,"),
        ("P=(a b); IFS=,; python x.py ${N:-${P[@]}}\n", "${N:-${P[@]}}, a list with this IFS,"),
        ("set -- a b; IFS=; declare B=$*\n", "$*, a list with this IFS,"),
        ("A=abc; B=${A:0:1:2}\n", "the slice `0:1:2`"),
        ("declare -A M=([a]=1); set -u; B=~/x; C=${M[$B]}\n", "which may be unset with `set -u`"),
    ],
)
def test_other_constructs_are_refused_by_name_and_line(text: str, what: str) -> None:
    """Everything that can change a word and is not interpreted."""
    with pytest.raises(DocumentError) as caught:
        script_command(f"A=1\n{text}{LAUNCH}", "x.sh")

    said = str(caught.value)
    assert said.startswith("x.sh: line 2: ")
    assert what in said
    assert "is not read. " in said


@pytest.mark.parametrize("value", ['"${X##*}"', "${X//?/}", "${X%%!(a)}", "${X/*/b}"])
def test_an_open_value_of_which_nothing_is_left_is_refused(value: str) -> None:
    """It counts as a word that is not empty; bash has an empty one, or none."""
    text = f"shopt -s extglob; X=$(date)\npython x.py --a 1 {value} --b 2\n"
    with pytest.raises(DocumentError) as caught:
        script_command(text, "x.sh")

    said = str(caught.value)
    assert said.startswith("x.sh: line 2: ")
    assert value.strip('"') in said


@pytest.mark.parametrize(
    "text",
    ["if x; then fi\n", "fi\n", "}\n", "[[ -o ]]\n", "[[ ]]\n", "python x.py a (b)\n", "()\n"],
)
def test_syntax_errors_of_bash_are_errors(text: str) -> None:
    """No launch is read where bash reads none."""
    with pytest.raises(DocumentError, match="not a supported shell statement"):
        script_command(text + LAUNCH, "x.sh")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('A="--b $X/c --d 2"\npython x.py $A\n', ("--b", "$X/c", "--d", "2")),
        ('A=("--b $(date +%Y) --c")\npython x.py ${A[@]}\n', ("--b", "$(date +%Y)", "--c")),
        ('A="--b $X"\neval "python x.py $A --c"\n', ("--b", "$X", "--c")),
        ('A="python x.py --b $X"\n$A --c 2>&1 | tee log\n', ("--b", "$X", "--c")),
        ("IFS=,\nA=--b,$X,2\npython x.py $A\n", ("--b", "$X", "2")),
    ],
)
def test_known_words_around_an_open_value_keep_their_meaning(
    text: str, words: tuple[str, ...]
) -> None:
    """It counts as one word, and the note names it."""
    command = script_command(text, "x.sh")

    assert command.arguments == words
    name = next(word for word in words if "$" in word).removesuffix("/c")
    assert any(note.endswith(f"one word each: {name}") or name in note for note in command.notes)


@pytest.mark.parametrize(
    "text",
    [
        '[ -f x ] && B="x y"\npython x.py --a $B\n',
        '[ -f x ] && B="x y"\nC=(python x.py --a "b"$B)\n"${C[@]}"\n',
        'if [ -f x ]; then P=(--b 1); fi\nC="python x.py --a ${P[*]}"\n$C\n',
        'for i in *.x; do A+=" --b $i"; done\npython x.py --a $A\n',
        'while read -r l; do A+=" $l"; done < f\npython x.py --a $A\n',
        "rm y || A='--b 1'\npython x.py --a 1 $A\n",
        "A=(x y)\nrm y || A[0]='1 2 3'\npython x.py --a ${A[@]}\n",
        "A=(x)\nrm y && A+=(y)\nA=z\npython x.py --a ${A[*]}\n",
        "A=x\nrm y && A=\\$B\nbash -c 'python x.py --a '$A\n",
        "A=bf16 I=3\nrm y && ((I++))\npython x.py --a ${A:I}\n",
        "A=' '\nrm y && A='b c'\nP=(x '*')\npython x.py --a ${P[@]/\\*/$A}\n",
        "rm y && A=b\npython x.py '--a 2' $A\n",
        "rm y && A='{1..3}'\nA+=x\npython x.py --a 1 $A\n",
        "A=(a b c) I=2\nrm y && ((I++))\npython x.py --a ${A[I]}\n",
        "A='*'\nfor i in $A\"it's b\"; do python x.py --a $i; done\n",
        "B='a '\nrm y && B='a b'\nif [ $B* ]; then python x.py --a 1; else python x.py --a 2; fi\n",
    ],
)
def test_words_that_only_running_counts_are_refused(text: str) -> None:
    """A branch or a number of rounds that decides how many words there are."""
    with pytest.raises(DocumentError, match="the launch command depends on"):
        script_command(text, "x.sh")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("set -- a ' b '\nrm y && shift\npython x.py --a ${!#}\n", "`${!#}`"),
        ("A='--a 2'; B=$(date); python x.py --a ${A%%*$B*}\n", "`${A%%*$B*}`"),
        ("A='--a 2'; B=$(date); python x.py --a ${A/$B/x}\n", "`${A/$B/x}`"),
        ('set -- \'\' b; python x.py --a "${1:-"c $@"}"\n', '`${1:-"c $@"}`'),
        ('P=(a b); python x.py --a "${1:-"c ${P[@]^^}"}"\n', '`${1:-"c ${P[@]^^}"}`'),
        ("shopt -s nullglob; P=(*.x); python x.py --a ${!P[@]}\n", "`${!P[@]}`"),
        ("A=$(exec > x.log; echo b); python x.py --a $A\n", "`$(exec > x.log; echo b)`"),
    ],
)
def test_unquoted_values_that_may_be_several_words_are_refused(text: str, what: str) -> None:
    """Cuts by an unknown pattern, the last parameter after a branch that shifts, lost output."""
    with pytest.raises(DocumentError, match=re.escape(f"{what} is not read")):
        script_command(text, "x.sh")


def test_quoted_values_of_a_branch_are_one_word() -> None:
    """However many words they have."""
    command = script_command('[ -f x ] && B="x y"\npython x.py --a "$B" --c 1\n', "x.sh")

    assert command.arguments == ("--a", "$B", "--c", "1")


HOSTILE = {
    "cuts of a long text": "A=a\nfor i in {1..15}; do A=$A$A; done\nB=${A%%*b*c*d}${A##*b*}\n",
    "nested groups": "shopt -s extglob\nA=a\nfor i in {1..15}; do A=$A$A; done\n"
    "[[ $A == +(+(a|aa)|a)b ]] && B=1\nC=${A//!(b)/x}\n",
    "nested repetitions": "A=a\nfor i in {1..15}; do A=$A$A; done\n"
    "[[ $A =~ (a*)*(a*)*b ]] && B=1\n",
    "arrays that double": 'A=(a)\nfor i in {1..40}; do A=("${A[@]}" "${A[@]}"); done\n',
    "many long values": "A=a\nfor i in {1..15}; do A=$A$A; done\n"
    "for ((i=0;;i++)); do printf -v B$i %s%s $A $i; done\n",
    "a script that sources itself": "while source x.sh; do :; done\n",
    "functions": "f() { [ $1 -gt 0 ] && { f $(($1-1)); f $(($1-1)); }; }\nf 30\n",
    "braces": "echo {1..9}{1..9}{1..9}{1..9}{1..9}{1..9}{1..9}{1..9}\n",
    "sequences": "for i in $(seq 1 999999999); do :; done\n",
    "widths": "printf -v A '%999999999s' x\nprintf -v B '%99999d' 1\n",
    "open brackets": "echo " + "{" * 20000 + "\n",
    "open sums": "echo " + "$((" * 60000 + "\n",
    "open conditions": "".join(f"if c{i}; then A{i}=1; fi\n" for i in range(60))
    + "python x.py " + " ".join(f"$A{i}" for i in range(60)) + " --a\n",
    "calls under open conditions": "f0() { :; }\n"
    + "".join(f"f{i}() {{ if c; then f{i - 1}; else f{i - 1}; fi; }}\n" for i in range(1, 30))
    + "f29\n",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_scripts_end_in_a_stated_limit(name: str, tmp_path: Path) -> None:
    """Within seconds and little memory, read or refused."""
    path = tmp_path / "x.sh"
    path.write_text(HOSTILE[name] + LAUNCH, encoding="utf-8")
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with suppress(DocumentError):
        read_configuration(path)
    assert time.process_time() - start < 4  # a limit of 1.5 s, on a machine that is busy
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        ("a*b?", "axxbc", True),
        ("[[:digit:]x-z]", "y", True),
        ("[!a-c]*", "b", False),
        (r"a\*", "a*", True),
        ("@(a|b+(c))d", "bccd", True),
        ("!(a)", "a", False),
        ("*(ab)", "abab", True),
        ("[", "[", True),
    ],
)
def test_patterns(pattern: str, text: str, matches: bool) -> None:
    """Whole texts, forwards and from the end."""
    parsed = glob_pattern(pattern, extended=True)
    for back in (False, True):
        ends = Matcher(text, lambda _: None, back=back).ends(parsed, 1)
        assert bool(ends >> len(text) & 1) == matches


def test_regular_expressions_are_leftmost_and_longest() -> None:
    """POSIX takes the longest alternative, Python the first."""
    assert Matcher("xabcd", lambda _: None).found(regular_pattern("(a|ab)(c|bcd)?")) == (1, 5)
    assert Matcher("x", lambda _: None).found(regular_pattern("^y|z$")) is None


def test_a_script_is_started_with_arguments_and_variables(tmp_path: Path) -> None:
    """Without them, the sentence asks for them."""
    path = tmp_path / "x.sh"
    path.write_text(
        "TP=$2\nif [ $1 = one ]; then N=1; else N=$WORLD; fi\n"
        "torchrun --nnodes $N --nproc-per-node 8 x.py --t $TP $@\n",
        encoding="utf-8",
    )
    found = dict[str, object]()

    def execute(raw: dict[str, object]) -> int:
        source = read_configuration(path)
        found.update(raw, world=source.world_size, flags=source.flags)
        return 0

    with_script(execute)({"args": "one 4", "other": 1})
    assert found == {"other": 1, "world": 8, "flags": {"t": ("4", "one", "4")}}
    with_script(execute)({"args": "more 2", "env": ["WORLD=3"]})
    assert found["world"] == 24
    with pytest.raises(DocumentError, match="Add --args with the 2 arguments of the script"):
        read_configuration(path)
    for raw in ({"args": "'a"}, {"env": ["1=2"]}, {"env": ["A"]}):
        with pytest.raises(OptionError, match=r"--(args|env)"):
            with_script(execute)(raw)


@pytest.mark.parametrize(
    ("head", "launch", "ranks"),
    [
        ("#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\n", "srun python -u x.py --t 1", 32),
        ("#SBATCH -N 2 -n 16 # all\n", "srun -l python x.py --t 1", 16),
        ("#SBATCH -N4\n", "srun --ntasks-per-node 8 python x.py --t 1", 8),
        ("", "srun -N 2 --ntasks-per-node=4 bash -c 'python x.py --t 1'", None),
        ("#SBATCH -N 2\n", "srun torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 x.py --t", 16),
        ("#SBATCH --nodes=2-4\n", "srun python x.py --t 1", None),
        ("", "mpirun -np 16 python x.py --t 1", 16),
        ("#SBATCH --gres=gpu:l4:8\n", "torchrun --nproc-per-node $SLURM_GPUS_ON_NODE t.py --t", 8),
    ],
)  # fmt: skip
def test_the_number_of_ranks_that_slurm_starts(
    head: str, launch: str, ranks: int | None, tmp_path: Path
) -> None:
    """From the options of the job and of srun."""
    path = tmp_path / "x.sh"
    path.write_text(f"#!/bin/bash\n{head}{launch}\n", encoding="utf-8")

    assert read_configuration(path).world_size == ranks


def test_each_command_is_interpreted_or_refused() -> None:
    """No name is in both tables."""
    assert not REFUSED & BUILTINS.keys()
