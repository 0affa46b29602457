"""Evaluator of configuration functions in Python files, which executes nothing of them.

A recipe is a function that builds a configuration by assignments: `cfg = base(); cfg.model.x = 4`.
The evaluator follows assignments, expressions and calls of functions whose source is given.
Classes and functions without source are named values, which the caller may know (`Known`).
All else is an `Unknown` value, with the line that causes it. An unknown condition leaves both
branches possible: what they set differently is unknown. Errors are assumed not to occur.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from autopar.records import replace
from search.engines.text.python.expressions import Expressions, items_of
from search.engines.text.python.process import Process
from search.engines.text.python.values import (
    MAIN,
    MISSING,
    Class,
    Function,
    Journal,
    Known,
    Lost,
    Module,
    Named,
    Section,
    Sets,
    Unknown,
    equal,
    has_unknown_keys,
    holds_unknown,
    loaded,
    refill,
)

_MOST_STEPS = 1 << 19
"""Maximum number of statements and expressions of an evaluation, unless the caller gives one."""
_MOST_CALLS = 40
"""Maximum depth of calls."""


_ODD = ("__bool__", "__contains__", "__delattr__", "__enter__", "__eq__", "__getattr__",
        "__getattribute__", "__getitem__", "__iter__", "__len__", "__new__", "__setattr__",
        "__setitem__")  # fmt: skip
"""Methods that are called without their names."""


class _Return(Exception):  # noqa: N818 - control flow
    def __init__(self, value: Any) -> None:
        self.value = value


class _Stop(Exception):  # noqa: N818 - control flow
    """End of a branch: `raise`, `break` or `continue`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


class TooLongError(Exception):
    """The evaluation has more steps than the limit."""


class Evaluator:
    """Evaluation of one file.

    lost : effects that were not followed. process : environment variables and arguments.
    """

    def __init__(
        self,
        known: Known,
        *,
        environment: Mapping[str, str] = MappingProxyType({}),
        most_steps: int = _MOST_STEPS,
    ) -> None:
        self.lost: list[Lost] = []
        self._most_steps = most_steps
        self.known = known
        self._modules: dict[str, Module | None] = {}
        self.journal = Journal()
        self.process = Process(environment, self.journal)
        self._methods: dict[int, Function] = {}
        self._steps = 0
        self._calls = 0

    def load(self, name: str, text: str, file: str, *, package: bool = False) -> Module:
        """Return a module after evaluating its text; raises SyntaxError and ValueError of `ast`."""
        module = Module(name, file, package=package)
        module.names["__name__"] = name
        self._modules[name] = module
        tree = ast.parse(text)
        _Frame(self, module, module.names).block(tree.body)
        module.functions = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}
        return module

    def call(self, module: Module, name: str) -> Any:
        """Return the value of a function of a module, called without arguments."""
        function = module.names.get(name)
        if not isinstance(function, Function):
            return Unknown(why=f"{name} is no function of the file", line=1, file=module.file)
        return self.invoke(function, [], {})

    # ----------------------------------------------------------------------------------------------

    def invoke(self, function: Function, words: list[Any], named: Mapping[str, Any]) -> Any:
        """Return the value of a call of a function with source."""
        deep = self._calls >= _MOST_CALLS
        if deep or _is_generator(function.node):
            why = f"{function.name} {'calls itself' if deep else 'is a generator'}"
            return self._left(why, function)
        names = self._bound(function, words, named)
        if isinstance(names, Unknown):
            return self._left(names.why, function)
        frame = _Frame(self, function.module, names, function.scopes)
        self._calls += 1
        try:
            if isinstance(function.node, ast.Lambda):
                return frame.value(function.node.body)
            frame.block(function.node.body)
        except _Return as found:
            return found.value
        except _Stop:
            return self._left(f"{function.name} raises an error", function)
        finally:
            self._calls -= 1
        return None

    def _left(self, why: str, function: Function) -> Unknown:
        """Return the value of a call that is not followed, whose effects are lost."""
        line, file = function.node.lineno, function.module.file
        self.lost.append(Lost(what=why, line=line, file=file))
        return Unknown(why=why, line=line, file=file)

    def _bound(
        self, function: Function, words: list[Any], named: Mapping[str, Any]
    ) -> dict[str, Any] | Unknown:
        """Return the parameters of a call by name, with their defaults."""
        rows = function.node.args
        plain = [*rows.posonlyargs, *rows.args]
        names = dict(function.defaults)
        names |= {row.arg: word for row, word in zip(plain, words, strict=False)}
        if rows.vararg is not None:
            names[rows.vararg.arg] = tuple(words[len(plain) :])
        own = {row.arg for row in (*plain, *rows.kwonlyargs)}
        names |= {name: value for name, value in named.items() if name in own}
        rest = {name: value for name, value in named.items() if name not in own}
        if rows.kwarg is not None:
            names[rows.kwarg.arg] = rest
        if (
            own - names.keys()
            or (rest and rows.kwarg is None)
            or (len(words) > len(plain) and rows.vararg is None)
        ):
            name = min(own - names.keys() or rest or {str(len(words))})
            return Unknown(why=f"{function.name} is called with other arguments: {name}",
                           line=function.node.lineno, file=function.module.file)  # fmt: skip
        return names

    def known_call(self, name: str, of: Any, words: list[Any], named: Mapping[str, Any]) -> Any:
        """Return the value of a call that the caller knows; NotImplemented: not known."""
        found = self.known.call(name, of, words, named)
        if isinstance(found, Sets):
            for key, value in found.fields.items():
                self.journal.put(found.of.fields, key, value)
            return None
        return found

    def named(self, name: str) -> Any:
        """Return the value of a dotted name: of a module with source, or a `Named`."""
        module = self.module(name)
        if module is not None:
            return module
        outer, _, last = name.rpartition(".")
        found = self.module(outer) if outer else None
        if found is None:
            return Named(name=name)
        return found.names.get(last, Named(name=name))

    def module(self, name: str) -> Module | None:
        """Return a module with source by its dotted name; None: without source."""
        if name not in self._modules:
            self._modules[name] = None
            for path, package in ((name, False), (f"{name}.__init__", True)):
                text = self.known.module(path)
                if text is not None:
                    return self.load(name, text, path, package=package)
        return self._modules[name]

    def inherited(self, kind: Class, of: Section, name: str) -> Any:
        """Return the default, property or method of a class; NotImplemented: it has none."""
        frame = _Frame(self, kind.module, {})
        for one in reversed(kind.node.body):
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                if one.target.id == name and one.value is not None:
                    return frame.value(one.value)
            elif isinstance(one, ast.Assign):
                if any(isinstance(at, ast.Name) and at.id == name for at in one.targets):
                    return frame.value(one.value)
            elif isinstance(one, ast.FunctionDef) and one.name == name:
                method = self._methods.setdefault(id(one), frame.function(name, one))
                marks = [ast.unparse(mark) for mark in one.decorator_list]
                if marks == ["property"]:
                    return self.invoke(method, [of], {})
                if {*marks} & {"classmethod", "staticmethod", "cached_property"}:
                    why = f"{name} is a {marks[0]}"
                    return Unknown(why=why, line=one.lineno, file=kind.module.file, acts=True)
                return method
        for base in kind.node.bases:
            found = frame.value(base)
            if isinstance(found, Class):
                value = self.inherited(found, of, name)
                if value is not NotImplemented:
                    return value
        return NotImplemented

    def instance(self, kind: Class, words: list[Any], named: Mapping[str, Any]) -> Any:
        """Return an instance of a class: its fields are its arguments, or set by `__init__`."""
        found = Section(kind.name, kind=kind)
        odd = self._not_followed(kind, several=bool(words))
        if odd:
            what = f"{kind.name} has {odd}"
            line, file = kind.node.lineno, kind.module.file
            self.lost.append(Lost(what=what, line=line, file=file))
        start = self.inherited(kind, found, "__init__")
        if isinstance(start, Function):
            if "super()" in ast.unparse(start.node):
                # It is not followed: the arguments stay as fields.
                found.fields |= named
            self.invoke(start, [found, *words], named)
            return found
        rows = (one.target for one in kind.node.body if isinstance(one, ast.AnnAssign))
        fields = [row.id for row in rows if isinstance(row, ast.Name)]
        found.fields = {**dict(zip(fields, words, strict=False)), **named}
        after = self.inherited(kind, found, "__post_init__")
        if isinstance(after, Function):
            self.invoke(after, [found], {})
        return found

    def foreign(self, kind: Class) -> bool:
        """Return whether a class has a base without source."""
        frame = _Frame(self, kind.module, {})
        bases = [frame.value(base) for base in kind.node.bases]
        return any(
            self.foreign(base) if isinstance(base, Class) else base != Named(name="object")
            for base in bases
        )

    def _not_followed(self, kind: Class, *, several: bool) -> str:
        """Return what instances of a class of the file have that is not followed; empty: nothing.

        several : arguments are given by position.
        """
        if kind.module.name != MAIN:
            return ""
        for one in kind.node.body:
            text = ast.unparse(one)
            marks = [ast.unparse(mark) for mark in getattr(one, "decorator_list", ())]
            if any(mark.endswith(".setter") for mark in marks):
                return "a property that is set"
            if isinstance(one, ast.FunctionDef) and one.name in _ODD:
                return one.name
            if isinstance(one, ast.AnnAssign) and "InitVar" in text:
                return "an argument of __post_init__"
            if isinstance(one, ast.If | ast.For | ast.While | ast.Try | ast.With | ast.AugAssign):
                return "statements"
        if len(kind.node.bases) > 1:
            return "several bases"
        return "bases and arguments by position" if several and kind.node.bases else ""

    def step(self, number: int = 1) -> None:
        """Count steps; raises TooLongError above the limit."""
        self._steps += number
        if self._steps > self._most_steps:
            raise TooLongError


class _Frame(Expressions):
    """Evaluation of the statements of one function or module."""

    def block(self, body: list[ast.stmt]) -> None:
        """Evaluate statements in order."""
        for node in body:
            self._owner.step()
            self._statement(node)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign():
                value = self.value(node.value)
                if _is_consumed(node.value):
                    value = self._undecided(node, "an iterator is consumed when it is read")
                for target in node.targets:
                    self._assign(target, value)
            case ast.AnnAssign():
                if node.value is not None:
                    self._assign(node.target, self.value(node.value))
            case ast.AugAssign():
                before, word = self.value(loaded(node.target)), self.value(node.value)
                self._assign(node.target, self._changed(node, before, word))
                if any(isinstance(one, ast.Call) for one in ast.walk(node.target)):
                    self._lose(node, "a call is in the target")
            case ast.Expr():
                self.value(node.value)
            case ast.If():
                self._if(node)
            case ast.For():
                self._for(node)
            case ast.Return():
                raise _Return(None if node.value is None else self.value(node.value))
            case ast.Raise():
                raise _Stop("raise")
            case ast.Break() | ast.Continue():
                raise _Stop("break" if isinstance(node, ast.Break) else "continue")
            case ast.FunctionDef():
                self._owner.journal.put(self._names, node.name, self.function(node.name, node))
            case ast.ClassDef():
                local = {*self._names, *(name for scope in self._scopes for name in scope)}
                read = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
                if self._names is not self._module.names and read & local:
                    self._lose(node, f"class {node.name} has values of the function around it")
                found = Class(name=node.name, node=node, module=self._module)
                self._owner.journal.put(self._names, node.name, found)
            case ast.Import() | ast.ImportFrom():
                self._import(node)
            case ast.With():
                for one in node.items:
                    if isinstance(self.value(one.context_expr), Section):
                        self._lose(node, "a with statement calls methods")
                    if one.optional_vars is not None:
                        self._assign(one.optional_vars, self._undecided(node, "with ... as"))
                self.block(node.body)
            case ast.Try():
                end = self._end([*node.body, *node.orelse])
                if node.handlers and isinstance(end, _Stop) and end.kind == "raise":
                    self._lose(node, "an error is raised and handled")
                    end = None
                self.block(node.finalbody)
                if end is not None:
                    raise end
            case ast.Assert():
                self.value(node.test)
            case ast.Pass():
                pass
            case ast.Global() | ast.Nonlocal():
                self._lose(node, f"{', '.join(node.names)} may be set outside of the function")
            case ast.Delete():
                for target in node.targets:
                    self._delete(target)
            case _:
                self._blur(node, f"a {type(node).__name__.lower()} statement is not followed")

    def _changed(self, node: ast.AugAssign, before: Any, word: Any) -> Any:
        """Return the value after `before += word`; a container changes in place."""
        if not isinstance(before, list | dict | set):
            return self._binary(node, node.op, before, word)
        op = ast.Add if isinstance(before, list) else ast.BitOr
        other = (list, tuple) if isinstance(before, list) else type(before)
        if not isinstance(node.op, op) or not isinstance(word, other):
            self._lose(node, "the items of a container are not known")
            return self._undecided(node, "the items of a container are not known")
        self._owner.journal.altered(before)
        self._owner.step(len(word))
        (before.extend if isinstance(before, list) else before.update)(word)
        return before

    def _delete(self, target: ast.expr) -> None:
        if isinstance(target, ast.Subscript):
            of, key = self.value(target.value), self.index(target.slice)
            if isinstance(of, list | dict) and not holds_unknown(key) and not has_unknown_keys(of):
                self._owner.journal.altered(of)
                self._tried(target, lambda: of.__delitem__(key))
                return
        gone = Unknown(why="it is deleted", line=target.lineno, file=self._module.file, absent=True)
        self._assign(target, gone)

    def _if(self, node: ast.If) -> None:
        known = self.truth(node.test)
        if known is not None:
            self.block(node.body if known else node.orelse)
            return
        ends, changes = [], []
        for body in (node.body, node.orelse):
            with self._owner.journal.branch() as found:
                ends.append(self._end(body))
            changes.append(found)
        # A branch that raises an error is not taken: the program would not train.
        possible = [at for at, end in enumerate(ends) if not isinstance(end, _Stop) or
                    end.kind != "raise"]  # fmt: skip
        if not possible:
            raise _Stop("raise")
        for place in {**changes[0], **changes[1]}:
            values = [changes[at].get(place) for at in possible]
            store, key, value = next(one for one in values if one) if any(values) else (None,) * 3
            if store is None:
                continue
            alike = operator.eq if key is MISSING else equal
            same = all(one is not None and alike(one[2], value) for one in values)
            if key is MISSING:
                self._owner.journal.altered(store)
                refill(store, value)
                if not same:
                    self._lose(node, "a condition decides the items of a list")
            else:
                absent = key not in store and any(
                    one is None or one[2] is MISSING for one in values
                )
                unknown = replace(self._undecided(node), absent=absent)
                self._owner.journal.put(store, key, value if same else unknown)
        leaving = [ends[at] for at in possible]
        if all(isinstance(end, _Return) for end in leaving):
            values = [end.value for end in leaving if isinstance(end, _Return)]
            same = all(equal(value, values[0]) for value in values)
            raise _Return(values[0] if same else self._undecided(node))
        if len(leaving) == 1 and isinstance(leaving[0], _Stop):
            raise leaving[0]
        if any(leaving):
            self._lose(node, "a condition decides where the function ends")

    def _end(self, body: list[ast.stmt]) -> _Return | _Stop | None:
        try:
            self.block(body)
        except (_Return, _Stop) as end:
            return end
        return None

    def _for(self, node: ast.For) -> None:
        source = self.value(node.iter)
        items = items_of(source)
        if items is None:
            self._blur(node, "a loop over values that are not known")
            return
        ended = False
        for item in items:
            self._assign(node.target, item)
            end = self._end(node.body)
            if isinstance(end, _Return) or (isinstance(end, _Stop) and end.kind == "raise"):
                raise end
            ended = isinstance(end, _Stop) and end.kind == "break"
            if ended:
                break
        if isinstance(source, list) and [*map(id, source)] != [*map(id, items)]:
            self._lose(node, "a list changes while it is looped over")
        if not ended:
            self.block(node.orelse)

    def _blur(self, node: ast.stmt, why: str) -> None:
        """Set everything that a statement assigns to unknown; its other effects are lost."""
        self._lose(node, why)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name | ast.Attribute | ast.Subscript) and isinstance(
                inner.ctx, ast.Store
            ):
                self._assign(inner, self._undecided(node, why))

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for one in node.names:
                first = one.name.partition(".")[0]
                name = one.name if one.asname else first
                self._owner.journal.put(self._names, one.asname or first, Named(name=name))
            return
        base = node.module or ""
        if node.level:
            parts = self._module.name.split(".")
            parts = parts[: len(parts) - node.level + self._module.package]
            base = ".".join([*parts, *filter(None, [base])])
        for one in node.names:
            if one.name == "*":
                module = self._owner.module(base)
                if module is not None:
                    public = {k: v for k, v in module.names.items() if not k.startswith("_")}
                    self._names.update(public)
            else:
                found = self._owner.named(f"{base}.{one.name}")
                self._owner.journal.put(self._names, one.asname or one.name, found)


def _is_consumed(node: ast.expr) -> bool:
    """Return whether an expression is an iterator, whose items are read once."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in ("enumerate", "filter", "iter", "map", "reversed", "zip")
    return isinstance(node, ast.GeneratorExp)


def _is_generator(node: ast.AST) -> bool:
    """Return whether a function yields, itself and not in a function inside it."""
    inner = (one for one in ast.iter_child_nodes(node)
             if not isinstance(one, ast.FunctionDef | ast.Lambda | ast.ClassDef))  # fmt: skip
    return any(isinstance(one, ast.Yield | ast.YieldFrom) or _is_generator(one) for one in inner)
