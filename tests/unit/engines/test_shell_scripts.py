"""Launch scripts: what bash itself sees of them is the oracle; what only running tells is said."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from autopar.errors import DocumentError
from search.engines.text import flags_of, read_configuration, script_command

SCRIPTS = {
    "if": 'A=1\nif [ "$A" = 1 ]; then B=x; elif [ $A -gt 3 ]; then B=y; fi\npython x.py --b $B\n',
    "else": "A=5\nif [[ $A == 1 ]]\nthen B=x\nelif [ $A -lt 3 ]\nthen B=y\nelse B=z\nfi\n"
    "python x.py --b $B\n",
    "sums": "N=4\nG=8\nW=$(($N*$G))\nD=$(( W / (2*2) ))\n"
    "python x.py $W $D --m $((W%5)) $((2**3**1)) $((N>3?1:0)) "
    "$((-N)) $((0x1f)) $((010))\n",
    "sums that assign": "let A=3*4 B=A+1\n((B+=2)); ((A++))\npython x.py $A $B --c $((B-->A))\n",
    "logic": "N=4; if (( N > 2 )); then B=big; fi\npython x.py --b $B $((N==4 && N!=3 || 0))\n",
    "case": "M=8b\ncase $M in\n 8b|8B) L=32;;\n (70b)\n  L=80 ;;\n *) L=1;;\nesac\n"
    "python x.py --l $L\n",
    "case with patterns": 'M=llama-8b\ncase "$M" in llama-*) L=3;; *) L=1;; esac\n'
    "python x.py --l $L\n",
    "for": 'A=\nfor x in 1 2 3; do A+=" --n$x $x"; done\npython x.py --z $A\n',
    "for with a counter": "S=0\nfor ((i=0;i<4;i++)); do S=$((S+i)); done\npython x.py --s $S\n",
    "while": "I=0\nwhile [ $I -lt 5 ]; do I=$((I+1)); if [ $I -eq 3 ]; then break; fi; done\n"
    "python x.py --i $I\n",
    "until": "I=0\nuntil (( I >= 4 )); do ((I++)); done\npython x.py --i $I\n",
    "continue": 'for i in 1 2 3; do [ $i = 2 ] && continue; L="$L$i"; done\npython x.py --l $L\n',
    "function": 'f() { local n=$1; R="$n-$2"; }\nf 3 "a b"\npython x.py --r "$R"\n',
    "names of a function": "T=4\nA=(1 2)\n"
    "f() { local T=1 U=2; local -a A=(9); local V; V=3; R=$T; }\n"
    "f\npython x.py --t $T --u$U ${A[@]} --v$V --r $R\n",
    "names that a called function sees": "T=4\ng() { R=$T; T=5; }\nf() { local T=1; g; S=$T; }\nf\n"
    "python x.py --t $T --r $R --s $S\n",
    "words taken away": "f() { while [ $# -gt 0 ]; do case $1 in --tp) T=$2; shift 2;; *) shift 9; "
    "shift;; esac; done; }\nf --tp 2 --tp 4 x y\npython x.py --t $T\n",
    "words set": "A='--x 1'\nset -- $A --y 2\npython x.py \"$@\" --n $#\n",
    "launch in a function": 'function g {\n  echo\n  python x.py --r "$@" --l $#\n}\ng 1 "2 3"\n',
    "return": "f() { A=1; return; A=2; }\nf\npython x.py --a $A\n",
    "and, or": 'A=1; [ $A = 2 ] && B=x || B=y\n[[ $A -eq 1 && -n "$B" ]] && C=z\n'
    "python x.py --b $B --c $C\n",
    "cut": "P=/a/b/c.tar.gz\npython x.py --a ${P##*/} ${P%.*} ${P%%.*} ${P#/a} ${P/b/q} ${#P} "
    "${P:1:3} ${P: -2}\n",
    "letters": "A=Bf16\npython x.py --a ${A^^} --b ${A,,} --c ${A^}\n",
    "eval": 'A=(--x 1)\nC="python x.py ${A[@]} --y \'2 3\'"\nC="$C 2>&1 | tee log"\neval $C\n',
    "command in a variable": 'C="python x.py --y 2"\n$C --z\n',
    "another bash": "T=4\nexport T\nbash -c 'python x.py --t $T --u'\n",
    "places of arrays": "A=(1 2 3)\nA[1]=x\nA[4]=z\nA[0]+=9\npython x.py --n ${#A[@]} ${A[1]} "
    '"${A[@]}" ${A[-1]}\n',
    "a text in a script": "cat <<EOF > conf\nif then $(\nEOF\nA=3\npython x.py --a $A\n",
    "an indented text": "cat <<-'END'\n\tpython x.py --no\n\tEND\npython x.py --a 2\n",
    "groups": "A=1\nB=2\nif [ $A = 1 ] && { [ $B = 3 ] || [ $B = 2 ]; }; then\n"
    " if ! [ $B -ne 2 ]; then C=in; fi\nfi\npython x.py --c $C\n",
    "a bracket too near": "P=1\nif [$P = 1]; then X=1; else X=2; fi\npython x.py --x $X\n",
    "set nowhere it came by": 'SP=true\nTP=1\nif [ $SP = true ] && [ $TP -gt 1 ]; then sp=" --s"; '
    'elif [ $SP = false ]; then sp=" "; fi\npython x.py --tp $TP $sp\n',
    "empty arrays": "X=()\nif [ 1 -eq 2 ]; then X+=(--a); fi\n"
    'python x.py --q "${X[@]}" ${X[*]} -r\n',
    "exit": "python x.py --a 1\nexit 0\npython x.py --a 2\n",
    "a shell of its own": "(A=4; python x.py --a $A)\n",
    "patterns": 'A=llama3\nif [[ $A == llama* ]]; then B=1; fi\nif [[ $A == "llama*" ]]; then C=1; '
    "else C=2; fi\nif [[ $A =~ ^llama[0-9]$ ]]; then D=1; fi\npython x.py $B $C --d $D\n",
    "sums of a command": "N=4\nW=$(expr $N \\* 6 / 4 - 1)\npython x.py --w $W $(expr 7)\n",
    "older tests": '[ -z "" -a -n "x" ] && B=1\n[[ a < b ]] && A=1\npython x.py --a $A --b $B\n',
    "unset": 'if [ -z ${VP} ]; then v=""; else v="--vp ${VP}"; fi\npython x.py --a 1 $v\n',
    "quotes in values": "F='([0]*1+[1]*2)'\nO=\" --f '$F' \"\npython x.py --a $O\n",
    "other quotes": "python x.py --a $'a\\tb' --b ${Z:=9} --c $Z\n",
    "several launches": "for tp in 1 2; do python x.py --tp $tp; done\n",
    "names and values": "declare -A TP=([8b]=1 ['70b x']=8)\nTP[405b]=16\nM=70b\nM+=' x'\n"
    'declare -A PP; PP[$M]=4; PP["$M"]+=2\n'
    'python x.py --tp ${TP[$M]} --pp ${PP["70b x"]} --n ${#TP[@]} --none "${TP[none]}" ${TP[8b]}\n',
    "keys": 'declare -A F=([--lr]=1)\nfor k in "${!F[@]}"; do X+=($k ${F[$k]}); done\n'
    'A=(x y)\npython x.py "${X[@]}" --p "${!A[@]}"\n',
    "names of a function by name": "f() { local -A M=([a]=2); R=${M[a]}; }\ndeclare -A M=([a]=1)\n"
    "f\npython x.py --r $R --m ${M[a]}\n",
    "a name in a variable": "TP_8B=2\nM=8B\nV=TP_$M\nA=(1 2); W=A\n"
    "python x.py --tp ${!V} --w ${!W} --d ${!V:-7}\n",
    "places in variables": "A=(0 0 0)\nfor i in 0 2; do A[$i]=$((i+4)); A[i]+=z; done\n"
    'python x.py --a "${A[@]}"\n',
    "read words": "read -r TP PP REST <<< \" 2  4 8  9 \"\nIFS=, read -r A B <<< '1,2,3'\n"
    "IFS=: read -ra L <<< 'a:b c:d'\nread X <<< ' one  two '\n"
    'python x.py --tp $TP --pp $PP --r "$REST" --a $A --b $B --l "${L[@]}" --x "$X"\n',
    "a script in a script": "T=4\nexport T\nbash <<EOF\nA='x \"y\"'\npython x.py --t $T --u \\$T "
    '--a "\\$A"\nEOF\n',
    "a script in a script as it stands": "T=4\nexport T\nbash -e <<'END'\nU=$((T * 2))\n"
    "python x.py --t $T --u $U\nEND\nU=1\n",
    "read a line of a text": "read -r A B <<EOF\n1 2 3\n4\nEOF\ncat <<EOF > x\n5\nEOF\n"
    'python x.py --a $A --b "$B"\n',
    "options of none": "T=4\nwhile getopts 't:' o; do case $o in t) T=$OPTARG;; esac; done\n"
    "python x.py --t $T\n",
    "nested defaults": "A=${X:-${Y:-7}}\npython x.py --a $A\n",
}
"""By construct; every one was met in public launch scripts, or is next to one that was."""


def words_of_bash(scripts: list[str], folder: Path) -> list[list[str] | None]:
    """Return the words of the last `python` that bash runs in each script, in an empty shell."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash on this machine")
    for index, script in enumerate(scripts):
        (folder / f"{index}.sh").write_text(script, encoding="utf-8")
    program = (
        'python() { shift; printf "%s\\n" "$@" > "$WORDS"; }\nexport -f python\n'
        f"for i in {{0..{len(scripts) - 1}}}; do\n"
        '  WORDS=$PWD/words$i "$BASH" -c "$(cat $i.sh)" >/dev/null 2>&1\ndone\n'
    )
    environment = {"PATH": "/usr/bin:/bin"}
    subprocess.run([bash, "-c", program], cwd=folder, env=environment, check=False)
    found: list[list[str] | None] = []
    for index in range(len(scripts)):
        path = folder / f"words{index}"
        text = path.read_text(encoding="utf-8") if path.exists() else None
        found.append(None if text is None else text.removesuffix("\n").split("\n"))
    return found


def test_constructs_are_followed_as_bash_does(tmp_path: Path) -> None:
    """The words of the launch, for one script of each construct."""
    expected = words_of_bash([*SCRIPTS.values()], tmp_path)
    found = [[*script_command(text, "x.sh").arguments] for text in SCRIPTS.values()]

    assert dict(zip(SCRIPTS, found, strict=True)) == dict(zip(SCRIPTS, expected, strict=True))


@pytest.mark.whole
def test_random_scripts_are_followed_as_bash_does(tmp_path: Path) -> None:
    """Conditions in loops in cases, with sums and arrays that depend on each other."""
    scripts = [_Random(seed).script() for seed in range(150)]
    expected = words_of_bash(scripts, tmp_path)

    assert sum(words is not None and len(words) > 8 for words in expected) > 100
    for script, words in zip(scripts, expected, strict=True):
        assert [*script_command(script, "x.sh").arguments] == words, script


class _Random:
    """A script of random statements over a few variables that are always set."""

    NAMES = ("A", "B", "C")

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._loops = 0

    def script(self) -> str:
        lines = [f"{name}={self._draw.randint(0, 9)}" for name in self.NAMES]
        lines += ["X=(--x 1)", "T='one  two'", *self._body(3, 6)]
        last = " ".join(f'--{n.lower()} ${n} "${{{n}}}z"' for n in (*self.NAMES, "T"))
        return "\n".join([*lines, f'python x.py {last} "${{X[@]}}" ${{#X[@]}}', ""])

    def _body(self, depth: int, most: int) -> list[str]:
        return [line for _ in range(self._draw.randint(1, most)) for line in self._statement(depth)]

    def _statement(self, depth: int) -> list[str]:
        draw, name = self._draw, self._draw.choice(self.NAMES)
        kind = draw.randrange(9 if depth else 5)
        if kind == 0:
            return [f"{name}=$(( {self._sum()} ))"]
        if kind == 1:
            return [f'X+=(--{name.lower()}{draw.randint(0, 9)} "${name}" $T)']
        if kind == 2:
            return [f'T="$T{draw.choice(["", " "])}${name}"', f"T=${{T: -{draw.randint(3, 9)}}}"]
        if kind == 3:
            return [f"{self._test()} && {name}=1 || {name}=2"]
        if kind == 4:
            return [f'X=("${{X[@]}}" ${{{name}}}${{T#one}})', 'X=("${X[@]:0}")'[:0] or ":"]
        if kind == 5:
            other = ["else", *self._body(depth - 1, 2)] if draw.random() < 0.5 else []
            return [f"if {self._test()}; then", *self._body(depth - 1, 2), *other, "fi"]
        if kind == 6:
            clauses = [f"{draw.randint(0, 9)}|{draw.randint(0, 9)}*)", *self._body(depth - 1, 1)]
            return [
                f"case ${name} in",
                *clauses,
                ";;",
                "*)",
                *self._body(depth - 1, 1),
                ";;",
                "esac",
            ]
        self._loops += 1
        if kind == 7:
            loop = f"for i{self._loops} in 1 ${name} '2 3'; do X+=($i{self._loops})"
        else:
            loop = f"for ((i{self._loops}=0; i{self._loops}<2; i{self._loops}++)); do"
        stop = [f"[ $((i{self._loops} + 0)) -gt 1 ] && break"] if kind == 8 else []
        return [loop, *self._body(depth - 1, 2), *stop, "done"]

    def _sum(self) -> str:
        draw = self._draw
        one, other = (
            draw.choice((*self.NAMES, f"${{{draw.choice(self.NAMES)}}}", str(draw.randint(0, 9))))
            for _ in range(2)
        )
        sign = draw.choice(("+", "-", "*", "/ 3 -", "% 7 +", "<", "==", "&&", "|", "<< 1 ^"))
        # signs that follow each other would be one operator
        return f"({one}) {sign} ({other}) % 97"

    def _test(self) -> str:
        draw, name = self._draw, self._draw.choice(self.NAMES)
        number = draw.randint(0, 9)
        return draw.choice(
            (
                f"[ ${name} -gt {number} ]",
                f'[[ "${name}" == {number}* ]]',
                f"[[ ${name} -le {number} && -n $T ]]",
                f"(( {name} % 2 ))",
                f'! [ "$T" = "${name}" ]',
                f"[[ $T == *{number}* || ${name} -eq 0 ]]",
            )
        )


@pytest.mark.parametrize(
    ("text", "words", "notes"),
    [
        (
            "A=$(nproc)\npython x.py --a $A --b $((A*2)) --c `date +%Y`\n",
            ["--a", "$(nproc)", "--b", "$((A*2))", "--c", "`date +%Y`"],
            ("known only at run time, counted as one word each: $(nproc), $((A*2)), `date +%Y`",),
        ),
        (
            'if [ "$NNODES" -gt 1 ]; then X=1; else X=2; fi\npython x.py --x $X\n',
            ["--x", "2"],
            ("assumed unset in conditions: NNODES",),
        ),
        (
            "if [ ! -f x.py ]; then exit 1; fi\nif [ -d data ]; then D=a; fi\npython x.py --x 1\n",
            ["--x", "1"],
            (),
        ),
        (
            "if docker ps; then C=docker; else C=podman; fi\npython x.py --path $C/x\n",
            ["--path", "$C/x"],
            (
                "--path depends on `docker ps` on line 1",
                "known only at run time, counted as one word each: $C",
            ),
        ),
        (
            "case $(hostname) in a*) P=1;; *) P=2;; esac\npython x.py --p $P\n",
            ["--p", "$P"],
            (
                "--p depends on `$(hostname)` on line 1",
                "known only at run time, counted as one word each: $P",
            ),
        ),
        ("while ! nc -z host 80; do sleep 1; done\npython x.py --p 1\n", ["--p", "1"], ()),
        ("cd x && python x.py --p 1\n", ["--p", "1"], ()),
        (
            "for t in 1 2; do python x.py --t $t; done\n",
            ["--t", "2"],
            ("the script has 2 launch commands; the last one is read",),
        ),
    ],
)
def test_what_only_running_tells_stays_as_it_is_written(
    text: str, words: list[str], notes: tuple[str, ...]
) -> None:
    """What is the same in every branch is known; the value of a flag is said to be open."""
    command = script_command(text, "x.sh")

    assert [*command.arguments] == words
    assert command.notes == notes


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "X=(--a)\nif [ -d data ]; then X+=(--b); fi\npython x.py ${X[@]}\n",
            "`[ -d data ]` on line 2",
        ),
        ("if ls; then python x.py --a 1; else python x.py --a 2; fi\n", "`ls` on line 1"),
        ('[ -e y ] && O="--b --c"\npython x.py --a $O\n', "`[ -e y ]` on line 1"),
    ],
)
def test_launches_that_depend_on_the_machine_are_refused(text: str, why: str) -> None:
    """Flags that may be there or not are no plan; the sentence names the condition."""
    with pytest.raises(DocumentError) as caught:
        script_command(text, "x.sh")

    assert str(caught.value) == (
        f"x.sh: the launch command depends on {why}, known only at run time. Keep only the branch "
        "to check, or use YAML or JSON"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("if true; then\npython x.py --a\n", "line 4: not a supported shell statement"),
        ("A=1\n)\n", "')'"),
        ("A=1\nselect A in 1 2; do :; done\n", "line 2: `select` is not read"),
        ("A=0; while true; do ((A++)); done\n", "runs more than 50000 statements"),
        ("A=1\nwhile true; do sleep 1; done\n", "line 2: this loop does not end"),
        ("f() { f; }\nf\n", "the function 'f' calls itself too often"),
        ("if true; then " * 100, "is nested too deeply"),
        ("A=" + "${A:-" * 300 + "}" * 300 + "\n", "is nested too deeply"),
        ("case $A in\n1) B=2\n", "line 4: not a supported shell statement"),
        ("A=${B\n", "the ${ on line 1 is not closed"),
        ("A=$(nproc\n", "the $( on line 1 is not closed"),
    ],
)
def test_scripts_that_do_not_go_on_are_one_sentence(text: str, said: str) -> None:
    """With the line; loops and functions without an end are stopped."""
    with pytest.raises(DocumentError) as caught:
        script_command(text, "x.sh")

    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_environment_of_a_launch() -> None:
    """What is exported, as it is then, and what stands in front of the command."""
    text = (
        "export CUDA_DEVICE_MAX_CONNECTIONS=1\nexport A B=${B:-3}\nC=1\nunset A\n"
        "PYTORCH_ALLOC_CONF=expandable_segments:True python x.py --a 1\nB=4\n"
    )
    assert script_command(text, "x.sh").environment == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "B": "3",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }


def test_launchers_around_launchers(tmp_path: Path) -> None:
    """`srun bash -c` and a module in place of a file; the number of GPUs is the launcher's."""
    path = tmp_path / "train.sh"
    inner = "torchrun --nnodes 2 --nproc-per-node $N x.py --t 4"
    path.write_text(f"N=8\nexport N\nsrun -l bash -c '{inner}'\n", encoding="utf-8")
    found = read_configuration(path)

    assert found.world_size == 16
    assert found.flags == {"t": ("4",)}
    module = script_command("torchrun --nproc_per_node 8 -m trainer.train --config a.toml\n", "x")
    assert flags_of(module.arguments) == {"config": ("a.toml",)}


@pytest.mark.parametrize(
    ("script", "arguments", "note"),
    [
        # a comment, or a blank behind the backslash, ends a command
        (
            "python x.py --a 1 \\\n  # --b 2 \\\n  --c 3 \\\n  --d 4\n",
            ("--a", "1"),
            "line 3 begins a command with --c",
        ),
        ("python x.py --a 1 \\ \n  --c 3\n", ("--a", "1", " "), "line 2 begins a command with --c"),
        (
            "source ./env.sh\nT=${T:-1}\npython x.py --t $T\n",
            ("--t", "1"),
            "./env.sh",
        ),
        ("source ./env.sh\npython x.py --t 1\n", ("--t", "1"), "./env.sh"),
        (
            "A=(--a 1 --b 2)\nB=(--c 3)\n$RUN x.py ${A[@]} ${B[@]}\n",
            ("--a", "1", "--b", "2"),
            "no launch command found; using A",
        ),
        (
            "A=()\nmapfile -t A < a.txt\npython x.py --u 1 ${A[@]}\n",
            ("--u", "1", "${A[@]}"),
            "${A[@]} is known only",
        ),
        ("python x.py --t 1 $MORE --u\n", ("--t", "1", "$MORE", "--u"), "$MORE is known only"),
        (
            "mapfile -t A < a.txt\npython x.py --u ${A[@]}\n",
            ("--u", "${A[@]}"),
            "${A[@]} is known only",
        ),
    ],
)
def test_what_is_left_out_is_said(
    script: str, arguments: tuple[str, ...], note: str, tmp_path: Path
) -> None:
    """Nothing of a launch disappears without a word."""
    command = script_command(script, tmp_path / "x.sh")

    assert command.arguments == arguments
    assert any(note in text for text in command.notes), command.notes


def test_what_says_nothing_of_a_launch_has_no_note(tmp_path: Path) -> None:
    """Files of a shell."""
    script = "source /opt/venv/bin/activate\n. ~/.bashrc\npython x.py --t 1 --data-path 0.5\n"

    assert script_command(script, tmp_path / "x.sh").notes == ()


def test_a_tool_behind_a_launch_is_no_launch(tmp_path: Path) -> None:
    """What starts ranks counts over a program that is run once, wherever it stands."""
    launch = "torchrun --nproc-per-node 8 train.py --t 1\n"
    tool = "python tools/report.py --log x\n"

    for script in (launch + tool, tool + launch):
        command = script_command(script, tmp_path / "x.sh")
        assert command.arguments == ("--t", "1")
    # two of a kind: the last
    assert script_command(tool + "python a.py --b\n", tmp_path / "x.sh").arguments == ("--b",)


@pytest.mark.parametrize(
    ("fill", "word"),
    [
        ("printf -v T %d 4", "4"),
        ('read -r T <<< "$(nproc)"', "$(nproc)"),
        ("read -ra T < t.txt", "$T"),
    ],
)
def test_what_a_command_fills_is_not_what_it_was(fill: str, word: str, tmp_path: Path) -> None:
    """A value in front of it is not taken for the one behind."""
    for before in ("T=1", "T=(1 2)"):
        command = script_command(f"{before}\n{fill}\npython x.py --t $T --u\n", tmp_path / "x.sh")
        assert command.arguments == ("--t", word, "--u")


@pytest.mark.parametrize(
    "text",
    [
        "( [ -d /x ] || exit 1; true ) || T=5",
        "if ( [ -d /x ] || exit 1; echo a ); then T=5; fi",
        "(if [ -d /x ]; then exit 0; else exit 1; fi) && T=5",
        "X=$( [ -d /x ] || exit 3; echo a ) || T=5",
        "f() { [ -d /x ] || exit 1; }\n( f; true ) || T=5",
        "f() { if [ -d /x ]; then return 0; else return 1; fi; }\nf && T=5",
        "( for i in 1 2; do [ -d /$i ] || exit 1; done; true ) || T=5",
        "( ( [ -d /x ] || exit 1; true ) ) || T=5",
        "set -o pipefail; { [ -d /x ] || exit 1; true; } | cat || T=5",
        "true | { [ -d /x ] || exit 1; cat; } || T=5",
    ],
)
def test_the_status_of_a_shell_that_may_end_is_open(text: str, tmp_path: Path) -> None:
    """Whether a folder is there decides it, so that both branches behind it count."""
    path = tmp_path / "x.sh"
    path.write_text(f"T=2\n{text}\npython x.py --t $T\n", encoding="utf-8")
    assert (read_configuration(path).flags or {})["t"] == ("$T",)
    # `set -e` ends a subshell that is no condition, whose status a script may ask for.
    path.write_text("( set -e; [ -d /x ]; true )\nT=$?\npython x.py --t $T\n", encoding="utf-8")
    with pytest.raises(DocumentError, match=r"line 2: `\$\?` is not read"):
        read_configuration(path)


@pytest.mark.parametrize(
    "text",
    [
        "[ -d /x ] || exit 1",
        "set -e; ( [ -d /x ] || exit 1 )",
        "( ( [ -d /x ] || exit 1; true ); true ) || T=5",
        "f() { [ -d /x ] || return 1; }\nf || exit 1",
    ],
)
def test_a_script_is_meant_to_reach_its_launch(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.sh"
    path.write_text(f"T=2\n{text}\npython x.py --t $T\n", encoding="utf-8")
    assert (read_configuration(path).flags or {})["t"] == ("2",)


@pytest.mark.parametrize(
    "text",
    [
        "f() { if [ -d /x ]; then 0; else return 1; fi; }\nf",
        "f() { if [ -d /x ]; then return 0; else return 1; fi; }\nf",
        "f() { [ -d /x ] || return 1; true; }\nf",
        "( [ -d /x ] || exit 1; true )",
        "X=$( [ -d /x ] || exit 3; echo a )",
        "f() { grep x y && X=1; }\nf",
        "A=1\nset -u\nrm y || unset A\nB=$A",
    ],
)
def test_a_failure_that_ends_a_script_is_said(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.sh"
    path.write_text(f"set -e\n{text}\npython x.py --t 1\n", encoding="utf-8")
    notes = read_configuration(path).notes
    assert any(one.startswith("nothing is launched if") for one in notes), notes


@pytest.mark.parametrize(
    "branch",
    [
        "if [ -d /x ]; then {}; exit 0; fi\n{}",
        "if [ -d /x ]; then exec {}; fi\n{}",
        "( if [ -d /x ]; then {}; exit; fi\n{} )",
        "for i in 1 2; do if [ -d /$i ]; then {}; exit; fi; done\n{}",
        "case $(hostname) in a*) {}; exit ;; esac\n{}",
    ],
)
def test_a_launch_in_a_branch_that_ends_counts(branch: str, tmp_path: Path) -> None:
    """It is not the one behind the branch; two that are alike are one."""
    path = tmp_path / "x.sh"
    path.write_text(branch.format("python x.py --t 1", "python x.py --t 2"), encoding="utf-8")
    with pytest.raises(DocumentError, match="the launch command depends on"):
        read_configuration(path)
    path.write_text(branch.format("python x.py --t 1", "python x.py --t 1"), encoding="utf-8")
    assert read_configuration(path).flags == {"t": ("1",)}
