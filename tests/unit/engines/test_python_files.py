"""Evaluator of Python files: the values that Python itself computes, or unknown."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from search.engines.text.python import (
    Evaluator,
    Named,
    Section,
    TooLongError,
    Unknown,
    is_python,
)


class Nothing:
    """No module has source, and no call or field is known."""

    def module(self, name: str) -> str | None:
        """Return None."""
        return {"base": BASE, "package.__init__": "from .inner import x\n",
                "package.inner": "x = [1, 2]\n"}.get(name)  # fmt: skip

    def call(self, name: str, of: Any, words: list[Any], named: Mapping[str, Any]) -> Any:
        """Return NotImplemented."""
        return NotImplemented

    def has(self, section: Section, name: str) -> bool | None:
        """Return None."""
        return None

    def field(self, section: Section, name: str) -> Any:
        """Return NotImplemented."""
        return NotImplemented


BASE = """
class Config:
    size: int = 4
    name: str = "base"

    @property
    def double(self):
        return 2 * self.size

    def grow(self, by=1):
        self.size = self.size + by

def make(size=4, **more):
    cfg = Config(size=size)
    for key, value in more.items():
        setattr(cfg, key, value)
    return cfg
"""


def found_by(body: str) -> tuple[Section, Evaluator]:
    """Return the section that a function with this body returns."""
    evaluator = Evaluator(Nothing())
    text = "from base import Config, make\nimport os\n\ndef recipe():\n"
    module = evaluator.load("__main__", text + textwrap.indent(body, "    "), "recipe.py")
    value = evaluator.call(module, "recipe")
    assert isinstance(value, Section), value
    return value, evaluator


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ("cfg = make(2)\ncfg.a = 1 if cfg.size > 1 else 2\nreturn cfg", {"size": 2, "a": 1}),
        ("cfg = make(a=[*range(3)])\ncfg.a.append(9)\nreturn cfg", {"a": [0, 1, 2, 9]}),
        ("cfg = make()\ncfg.b, cfg.c = divmod(7, 2)\nreturn cfg", {"b": 3, "c": 1}),
        ("cfg = make()\ncfg.grow(by=3)\ncfg.d = cfg.double\nreturn cfg", {"size": 7, "d": 14}),
        ("cfg = make()\ncfg.e = cfg.name\nreturn cfg", {"e": "base"}),
        ("cfg = make()\nd = {'x': 1}\nd['y'] = 2\ncfg.f = {**d, 'z': 3}\nreturn cfg",
         {"f": {"x": 1, "y": 2, "z": 3}}),
        ("cfg = make()\ncfg.g = [i * i for i in range(5) if i % 2]\nreturn cfg", {"g": [1, 9]}),
        ("cfg = make()\ncfg.h = f'{cfg.size}-x'.upper()\nreturn cfg", {"h": "4-X"}),
        ("cfg = make()\nfor i in (1, 2):\n    if i == 2:\n        break\n    cfg.i = i\nreturn cfg",
         {"i": 1}),
        ("cfg = make()\nf = lambda x, y=2: x + y\ncfg.j = f(1)\nreturn cfg", {"j": 3}),
        ("cfg = make()\ncfg.k = hasattr(cfg, 'size')\ncfg.l = getattr(cfg, 'none', 5)\nreturn cfg",
         {"k": True, "l": 5}),
        ("cfg = make()\ncfg.m = isinstance(cfg, Config) and not isinstance(cfg, str)\nreturn cfg",
         {"m": True}),
        ("import torch\ncfg = make()\ncfg.n = torch.bfloat16\nreturn cfg",
         {"n": Named(name="torch.bfloat16")}),
        ("from package import x\ncfg = make()\ncfg.o = x + [3]\nreturn cfg", {"o": [1, 2, 3]}),
        ("import copy\none = make()\ncfg = copy.deepcopy(one)\none.size = 9\nreturn cfg",
         {"size": 4}),
        ("cfg = make()\ncfg.p = (q := 3) + q\nreturn cfg", {"p": 6}),
        ("cfg = make()\ncfg.r = 'a' in ('a', 'b') and 1 < 2 <= 2\nreturn cfg", {"r": True}),
        ("x = 1\ndef f():\n    return x\nx = 2\ncfg = make(a=f())\nreturn cfg", {"a": 2}),
        ("x = 1\ndef f(y=x):\n    return y\nx = 2\ncfg = make(a=f())\nreturn cfg", {"a": 1}),
        ("import copy\na = make()\ncfg = make(a=a)\ncopy.copy(cfg).a.b = 7\nreturn a",
         {"b": 7}),
        ("class Own:\n    def __init__(self, x):\n        self.y = 2 * x\ncfg = Own(3)\nreturn cfg",
         {"y": 6}),
        ("a = [1, 2, 3, 4]\ndel a[:2], a[-1]\ncfg = make(a=a)\nreturn cfg", {"a": [3]}),
        ("d = {1: 2, 3: 4}\ndel d[1]\ncfg = make(a=d)\nreturn cfg", {"a": {3: 4}}),
        ("def validate(c):\n    c.a = 1\ncfg = make()\nvalidate(cfg)\nreturn cfg", {"a": 1}),
        ("cfg = make()\ntry:\n    cfg.s = 1\nfinally:\n    cfg.t = 2\nreturn cfg",
         {"s": 1, "t": 2}),
    ],
)  # fmt: skip
def test_values_are_those_of_python(body: str, fields: dict[str, Any]) -> None:
    """Assignments, calls, loops, containers, properties and methods are followed."""
    section, evaluator = found_by(body)
    assert {key: section.fields[key] for key in fields} == fields
    assert not evaluator.lost


PARSER = """import argparse
p = argparse.ArgumentParser(description='x')
p.set_defaults(set=4)
g = p.add_argument_group('sizes')
g.add_argument('--seq', '--seq-length', type=int, default='4096')
p.add_argument('-n', '--num-x', default=3, type=float)
p.add_argument('--flag', action='store_true')
p.add_argument('--no-y', dest='y', action='store_false')
p.add_argument('--nil', default=None)
p.add_argument('--none')
p.add_argument('--need', required=True, default=2)
p.add_argument('place')
p.add_argument('--own', type=lambda s: 2 * int(s), default='3')
"""


TOP = """import copy, functools, os, random
from dataclasses import dataclass, field

class Kept:
    TP = 2
    v: int = 1
    xs: list = field(default_factory=list)

    def up(self):
        self.v = 9

    def more(self, xs=[]):
        xs.append(1)
        return xs

class Doubled:
    def __init__(self, n):
        self.n = 2 * n

class Below(Doubled):
    def __init__(self, n):
        super().__init__(n)

def steps(cfg):
    cfg.a = 1
    yield 1

def matched(s):
    match s:
        case "x":
            return 8
        case _:
            return 2

def looped():
    while True:
        return 3

def kept():
    try:
        return 1
    finally:
        seen.append(2)

def three(a=1, b=2):
    return b

seen = []
"""


@pytest.mark.parametrize(
    "body",
    [
        "cfg.a = Kept.TP",
        "cfg.a = matched('x')",
        "cfg.a = looped()",
        "kept()\ncfg.a = list(seen)",
        "d = {'x': 1}\nwhile 'x' in d:\n    del d['x']\ncfg.a = len(d)",
        "xs = [3, 1]\nxs.sort()\ncfg.a = xs",
        "xs = {1, 2}\nxs.discard(1)\ncfg.a = len(xs)",
        "cfg.a = [1]\ncfg.a.extend(R)",
        "xs = [1]\ncfg.a = xs\nxs += [2]",
        "xs = {}\ncfg.a = xs\nxs |= {1: 2}",
        "a, b = [1], [2]\nx = a if R else b\nx.append(9)\ncfg.a = a",
        "a, b = Kept(), Kept()\nx = a if R else b\nx.up()\ncfg.a = a.v",
        "a, b = Kept(), Kept()\nx = a if R else b\nsetattr(x, 'v', 5)\ncfg.a = a.v",
        "xs = [1]\nx = xs if R else [1]\nx.append(2)\ncfg.a = xs",
        "d = {}\nif R:\n    d['x'] = 1\ncfg.a = 1 if d else 2",
        "d = {}\nif R:\n    d['x'] = 1\ncfg.a = [k for k in d]",
        "if R:\n    cfg.z = 1\ncfg.a = hasattr(cfg, 'z')",
        "cfg.z = 1\ndel cfg.z\ncfg.a = hasattr(cfg, 'z')",
        "xs = [1, 2, 3]\nrandom.Random(4).shuffle(xs)\ncfg.a = xs",
        "list(map(lambda c: setattr(c, 'a', 2), [cfg]))",
        "cfg.__dict__.update(a=2)",
        "exec('cfg.a = 2', {'cfg': cfg})",
        "cfg.a = Below(n=3).n",
        "x = Kept()\nx.up = 3\ncfg.a = x.up",
        "f = Kept.up\nx = Kept()\nf(x)\ncfg.a = x.v",
        "x = Kept()\nf = x.up\nf()\ncfg.a = x.v",
        "steps(cfg)",
        "Kept.v = 8\ncfg.a = Kept().v",
        "cfg.a = isinstance({1}, set)",
        "cfg.a = isinstance(1, object)",
        "cfg.a = three(*[1, 5] if R else [1])",
        "[setattr(cfg, k, 2) for k in ['a'] if R]",
        "cfg.a = {k: 2 for k in 'xy'}",
        "g = (x for x in [1, 2])\nlist(g)\ncfg.a = list(g)",
        "g = zip([1], [2])\nlist(g)\ncfg.a = list(g)",
        "y = 0\n[y := x for x in [1, 2]]\ncfg.a = y",
        "x = Kept()\nx.more()\ncfg.a = len(Kept().more())",
        "with open(os.devnull) as f:\n    cfg.a = f is None",
        "xs = [1, 2]\nfor x in xs:\n    xs.remove(x)\ncfg.a = xs",
        "a = (Kept(),)\nb = copy.deepcopy(a)\nb[0].v = 7\ncfg.a = a[0].v",
        "xs = [1, 2]\ncfg.b = R < 2 < xs.pop()\ncfg.a = len(xs)",
        "x = 5\nclass C:\n    y: int = x\ncfg.a = C().y",
        "cfg.a = range(10**30)[0]",
        "cfg.a = sum(range(10**9)) if R == 'no' else 1",
        "d = {(three, 1): 2}\ncfg.a = len(d)",
        "os.environ |= {'NOT_SET_ELSEWHERE': '1'}\ncfg.a = os.getenv('NOT_SET_ELSEWHERE', '4')",
    ],
)  # fmt: skip
def test_what_is_not_followed_is_unknown(body: str) -> None:
    """A known field has Python's value for every value of R, unless a lost effect is told."""
    text = f"{TOP}\ndef recipe():\n    cfg = Config()\n    cfg.a = 0\n"
    text += textwrap.indent(body, "    ") + "\n    return cfg\n"
    evaluator = Evaluator(Nothing())
    module = evaluator.load("__main__", "from somewhere import R, Config\n" + text, "recipe.py")
    section = evaluator.call(module, "recipe")
    assert isinstance(section, Section)
    before = dict(os.environ)
    for value in (0, 1):
        names: dict[str, Any] = {"R": value, "Config": _Config, "__name__": __name__}
        try:
            exec(text, names)
            expected = vars(names["recipe"]())
        except TypeError:  # of this R
            continue
        finally:
            os.environ.clear()
            os.environ.update(before)
        for key in section.fields.keys() & expected.keys():
            found = section.fields[key]
            assert isinstance(found, Unknown) or evaluator.lost or found == expected[key]


@pytest.mark.parametrize(
    "body",
    [
        "sum(range(10**12))", "xs = [1]\nfor i in range(60):\n    xs.extend(xs)",
        "x = 1\nfor i in range(60):\n    x = [x, x]\nlen(x)",
        "s = 'aa'\nfor i in range(60):\n    s = f'{s}{s}'", "'{:>2000000000}'.format(1)",
        "s = 'a' * 9999\nfor i in range(9):\n    s = s.replace('a', s)",
        "xs = [1]\nfor i in range(60):\n    xs = [*xs, *xs]", "os.getenv('X', 1, 2)",
        "cfg.parent = cfg", "d = {}\nd[([],)] = 1", "list(zip([1], [2, 3], strict=True))",
    ],
)  # fmt: skip
def test_large_and_wrong_values_end(body: str) -> None:
    """In few steps, or with the error for them."""
    text = f"cfg = make()\n{body}\nreturn cfg"
    try:
        found_by(text)
    except TooLongError:
        assert "range(60)" in body


def test_arguments_of_a_program_have_their_defaults() -> None:
    """Arguments of argparse are converted by their type; required ones are not known."""
    body = f"{PARSER}args = p.parse_args()\ncfg = make()\ncfg.args = args\nreturn cfg"
    section, evaluator = found_by(body)
    fields = section.fields["args"].fields
    unknown = {key for key, one in fields.items() if isinstance(one, Unknown)}
    assert unknown == {"need", "place", "own"}
    names: dict[str, Any] = {}
    exec(f"{PARSER}own = vars(p.parse_args(['--need', '1', 'here']))", names)
    expected = {key: one for key, one in names["own"].items() if key not in unknown}
    assert {key: fields[key] for key in expected} == expected
    assert [text for _, text in evaluator.process.assumed] == [
        "arguments of the program have their defaults"
    ]


def test_arguments_that_the_program_gives_itself_are_unknown() -> None:
    """A parser with words, or with parents, is not followed."""
    for head, call in (("", "['--x', '3']"), ("parents=[os.x]", "")):
        text = f"import argparse\np = argparse.ArgumentParser({head})\ncfg = make()\n"
        text += "p.add_argument('--x', default=1)\n"
        section, _ = found_by(f"{text}cfg.a = p.parse_args({call}).x\nreturn cfg")
        assert isinstance(section.fields["a"], Unknown)


@pytest.mark.parametrize(
    ("line", "value", "assumed"),
    [
        ("cfg.a = int(os.environ.get('X', '4'))", 4, True),
        ("cfg.a = os.getenv('X', default=4)", 4, True),
        ("cfg.a = os.environ.setdefault('X', 4)", 4, True),
        ("os.environ['X'] = '5'\ncfg.a = int(os.environ.get('X', '4'))", 5, False),
        ("os.environ['X'] = '5'\ncfg.a = os.environ['X']", "5", False),
        ("os.environ.setdefault('X', '5')\ncfg.a = os.getenv('X', '4')", "5", True),
        ("cfg.a = os.getenv('GIVEN', '4')", "8", False),
        ("cfg.a = os.environ['GIVEN']", "8", False),
        ("cfg.a = os.getenv('OPEN', '4')", None, False),
        ("if os.x:\n    os.environ['X'] = '5'\ncfg.a = os.getenv('X', '4')", None, False),
        ("cfg.a = os.environ.get('X')", None, False),
    ],
)
def test_variables_of_the_environment(line: str, value: Any, assumed: bool) -> None:
    """Given and set variables count, else the default with a note; None here: not known."""
    evaluator = Evaluator(Nothing(), environment={"GIVEN": "8", "OPEN": "$X"})
    body = textwrap.indent(f"cfg = make()\n{line}\nreturn cfg", "    ")
    text = f"from base import make\nimport os\n\ndef recipe():\n{body}\n"
    section = evaluator.call(evaluator.load("__main__", text, "recipe.py"), "recipe")
    assert isinstance(section, Section)
    found = section.fields["a"]
    assert isinstance(found, Unknown) if value is None else found == value
    assert bool(evaluator.process.assumed) is assumed
    assert not evaluator.lost


@pytest.mark.parametrize(
    ("body", "unknown", "known"),
    [
        ("cfg = make()\ncfg.a = os.environ['X']\ncfg.b = 1\nreturn cfg", {"a"}, {"b": 1}),
        ("cfg = make()\nif os.x:\n    cfg.a = 1\nelse:\n    cfg.a = 2\n    cfg.b = 3\nreturn cfg",
         {"a", "b"}, {"size": 4}),
        ("cfg = make()\nif os.getenv('X'):\n    cfg.a = 1\nelse:\n    cfg.a = 1\nreturn cfg",
         set(), {"a": 1}),
        ("cfg = make()\nif os.getenv('X'):\n    raise ValueError\ncfg.a = 1\nreturn cfg",
         set(), {"a": 1}),
        ("cfg = make()\nx = [1]\nif os.getenv('X'):\n    x = [2]\ncfg.a = x\nreturn cfg",
         {"a"}, {}),
        ("cfg = make()\nfor i in os.listdir():\n    cfg.a = i\nreturn cfg", {"a"}, {"size": 4}),
        ("cfg = make()\ncfg.a = 10 ** 10 ** 10\ncfg.b = 'x' * 10 ** 9\nreturn cfg",
         {"a", "b"}, {}),
        ("cfg = make()\ncfg.a = 1 / 0\nreturn cfg", {"a"}, {}),
        ("cfg = make()\ncfg.a = os.x or True\nreturn cfg", {"a"}, {}),
        ("cfg = make()\nif os.x and False:\n    cfg.a = 1\nreturn cfg", set(), {"size": 4}),
        ("cfg = make()\nfor i in range(10 ** 6):\n    cfg.a = i\nreturn cfg", {"a"}, {}),
        ("cfg = make()\ncfg.a = f'{1!r}'\nreturn cfg", {"a"}, {}),
        ("cfg = make()\nd = {os.x: 1, 2: 3}\ncfg.a = d[2]\nreturn cfg", {"a"}, {}),
        ("cfg = make()\nwhile cfg.size:\n    cfg.size = 0\nreturn cfg", {"size"}, {}),
    ],
)  # fmt: skip
def test_what_is_known_at_run_time_alone_is_unknown(
    body: str, unknown: set[str], known: dict[str, Any]
) -> None:
    """Environment, conditions on it and results too large are unknown, and all else is kept."""
    section, _ = found_by(body)
    fields = section.fields
    assert {key for key, value in fields.items() if isinstance(value, Unknown)} == unknown
    assert {key: fields[key] for key in known} == known


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("cfg = make()\nos.tune(cfg)\nreturn cfg", "os.tune may change the configuration"),
        ("cfg = make()\nx = [1]\nif os.getenv('X'):\n    x.append(2)\ncfg.a = x\nreturn cfg",
         "a condition decides the items of a list"),
        ("cfg = make()\nif os.getenv('X'):\n    return cfg\ncfg.a = 1\nreturn cfg",
         "a condition decides where the function ends"),
        ("cfg = make()\nos.x and make(a=setattr(cfg, 'a', 1))\nreturn cfg",
         "a condition decides whether make(a=setattr(cfg, 'a', 1)) runs"),
        ("cfg = make()\ndef f():\n    global G\n    G = 1\nf()\nreturn cfg",
         "G may be set outside of the function"),
        ("cfg = make()\ncfg['a'] = 1\nreturn cfg", "cfg['a'] is set"),
        ("cfg = make()\nother = os.load()\nother.x = 1\nreturn cfg",
         "other.x of an unknown object is set"),
    ],
)  # fmt: skip
def test_effects_that_are_not_followed_are_listed(body: str, said: str) -> None:
    """They are not assumed to be harmless."""
    _, evaluator = found_by(body)
    assert [one.what for one in evaluator.lost] == [said]


def test_an_evaluation_ends() -> None:
    """Endless recursion is unknown, and long loops end with an error."""
    evaluator = Evaluator(Nothing(), most_steps=10_000)
    module = evaluator.load("a", "def f():\n    return f()\n", "a.py")
    assert isinstance(evaluator.call(module, "f"), Unknown)
    text = "def f():\n" + "".join(
        f"{' ' * (4 * depth + 4)}for i{depth} in range(999):\n" for depth in range(3)
    )
    module = evaluator.load("b", text + " " * 16 + "x = i0\n", "b.py")
    with pytest.raises(TooLongError):
        evaluator.call(module, "f")


def test_scripts_of_a_shell_are_not_python() -> None:
    """A file is Python if a line starts an import or a function, also with a wrong syntax."""
    assert is_python("import os\n")
    assert is_python("from os import path\ndef f(:\n")
    assert not is_python("torchrun train.py --lr 1\n")
    assert not is_python("x = 1\n")
    assert not is_python("(" * 10_000)


# --------------------------------------------------------------------------------------------------
# Random programs, run by Python.


class _Config:
    """Object with fields, for the programs that Python runs."""


NAMES = st.sampled_from("abc")
NUMBERS = st.sampled_from(["0", "1", "2", "7", "R"])
OPERANDS = st.one_of(NUMBERS, st.sampled_from(["cfg.a", "cfg.b", "x"]))
VALUES = st.one_of(
    OPERANDS,
    st.builds("({} + {})".format, OPERANDS, OPERANDS),
    st.builds("({} * {})".format, OPERANDS, OPERANDS),
    st.builds("({} if {} else {})".format, OPERANDS, OPERANDS, OPERANDS),
    st.builds("({} and {} or {})".format, OPERANDS, OPERANDS, OPERANDS),
    st.builds("max({}, {})".format, OPERANDS, OPERANDS),
    st.builds("helper({}, y={})".format, OPERANDS, OPERANDS),
    st.builds("sum([{}, {}, *xs])".format, OPERANDS, OPERANDS),
    st.builds("int({} > {})".format, OPERANDS, OPERANDS),
    st.builds("d.get({}, {})".format, OPERANDS, OPERANDS),
    st.builds("({} or {})".format, OPERANDS, OPERANDS),
    st.builds("(not {} or {} == {})".format, OPERANDS, OPERANDS, OPERANDS),
    st.builds("len([i for i in xs if i > {}])".format, OPERANDS),
)
PLAIN = st.one_of(
    st.builds("cfg.{} = {}".format, NAMES, VALUES),
    st.builds("x = {}".format, VALUES),
    st.builds("cfg.{} += {}".format, st.sampled_from("ab"), OPERANDS),
    st.builds("xs.append({})".format, OPERANDS),
    st.builds("d[{}] = {}".format, OPERANDS, OPERANDS),
    st.builds("tune(cfg, {})".format, OPERANDS),
    st.builds("{} and tune(cfg, {})".format, OPERANDS, OPERANDS),
    st.builds("tune(cfg, 0) if {} else tune(cfg, {})".format, OPERANDS, OPERANDS),
    st.builds("later = lambda: x + {}".format, OPERANDS),
    st.builds("cfg.{} = later()".format, NAMES),
    st.builds("other = copy.{}(cfg)".format, st.sampled_from(["copy", "deepcopy"])),
    st.builds("other.{} = {}".format, NAMES, OPERANDS),
    st.builds("cfg.{} = other.{}".format, NAMES, NAMES),
)


def _nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    block = st.lists(inner, min_size=1, max_size=3).map(
        lambda lines: textwrap.indent("\n".join(lines), "    ")
    )
    return st.one_of(
        st.builds("if {}:\n{}\nelse:\n{}".format, VALUES, block, block),
        st.builds("if {}:\n{}".format, VALUES, block),
        st.builds("for i in range({}):\n{}".format, st.sampled_from("0123"), block),
    )


PROGRAMS = st.lists(st.recursive(PLAIN, _nested, max_leaves=6), min_size=1, max_size=6)
PRELUDE = """
import copy
def helper(x, y=1):
    return x - y

def tune(cfg, n):
    if n > 1:
        cfg.c = n
    else:
        cfg.b = 5

def recipe():
    cfg = Config()
    cfg.a = 1
    cfg.b = 2
    cfg.c = 0
    x = 3
    xs = []
    d = {}
    later = lambda: 8
    other = copy.copy(cfg)
"""


@settings(max_examples=400, deadline=None)
@given(PROGRAMS)
def test_random_programs_have_the_values_of_python(lines: list[str]) -> None:
    """For every value of R, which only the run knows, each known field is that of Python."""
    body = textwrap.indent("\n".join(lines), "    ")
    text = f"{PRELUDE}{body}\n    return cfg\n"
    evaluator = Evaluator(Nothing())
    module = evaluator.load("__main__", "from somewhere import R, Config\n" + text, "recipe.py")
    section = evaluator.call(module, "recipe")
    for value in (0, 1, 2, -3):
        names: dict[str, Any] = {"R": value, "Config": _Config}
        exec(text, names)
        expected = vars(names["recipe"]())
        assert isinstance(section, Section)
        for key, one in section.fields.items():
            assert isinstance(one, Unknown | Named) or evaluator.lost or one == expected[key], text
