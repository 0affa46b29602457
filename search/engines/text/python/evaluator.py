"""Evaluator of configuration functions in Python files, which executes nothing of them.

A recipe is a function that builds a configuration by assignments: `cfg = base(); cfg.model.x = 4`.
The evaluator follows assignments, expressions and calls of functions whose source is given.
Classes and functions without source are named values, which the caller may know (`Known`).
All else is an `Unknown` value, with the line that causes it. An unknown condition leaves both
branches possible: what they set differently is unknown. Errors are assumed not to occur.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from search.engines.text.python.expressions import RUN_TIME, Expressions, items_of
from search.engines.text.python.values import (
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

    lost : effects that were not followed. assumed : pairs (line, default that stands for a value of
    the run): of environment variables and of arguments. environment : known variables of the run.
    """

    def __init__(
        self,
        known: Known,
        *,
        environment: Mapping[str, str] = MappingProxyType({}),
        most_steps: int = _MOST_STEPS,
    ) -> None:
        self.lost: list[Lost] = []
        self.assumed: list[tuple[int, str]] = []
        self.environment: dict[str, Any] = {
            name: Unknown(why=f"{name} has a value of the run", line=1, file="environment")
            if "$" in value
            else value
            for name, value in environment.items()
        }
        self._most_steps = most_steps
        self.known = known
        self._modules: dict[str, Module | None] = {}
        self.journal = Journal()
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
        line = function.node.lineno
        if self._calls >= _MOST_CALLS:
            return Unknown(
                why=f"{function.name} calls itself", line=line, file=function.module.file
            )
        names = self._bound(function, words, named)
        if isinstance(names, Unknown):
            return names
        frame = _Frame(self, function.module, names, function.scopes)
        self._calls += 1
        try:
            if isinstance(function.node, ast.Lambda):
                return frame.value(function.node.body)
            frame.block(function.node.body)
        except _Return as found:
            return found.value
        except _Stop:
            return Unknown(why=f"{function.name} raises an error", line=line,
                           file=function.module.file)  # fmt: skip
        finally:
            self._calls -= 1
        return None

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
        for one in kind.node.body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                if one.target.id == name and one.value is not None:
                    return frame.value(one.value)
            elif isinstance(one, ast.FunctionDef) and one.name == name:
                method = frame.function(name, one)
                if any(ast.unparse(mark) == "property" for mark in one.decorator_list):
                    return self.invoke(method, [of], {})
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
        found = Section(kind.name, named, kind)
        start = self.inherited(kind, found, "__init__")
        if isinstance(start, Function):
            # `super().__init__(**more)` is not followed: the arguments stay as fields.
            self.invoke(start, [found, *words], named)
            return found
        rows = (one.target for one in kind.node.body if isinstance(one, ast.AnnAssign))
        fields = [row.id for row in rows if isinstance(row, ast.Name)]
        found.fields = {**dict(zip(fields, words, strict=False)), **named}
        after = self.inherited(kind, found, "__post_init__")
        if isinstance(after, Function):
            self.invoke(after, [found], {})
        return found

    def step(self) -> None:
        """Count a step; raises TooLongError above the limit."""
        self._steps += 1
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
                for target in node.targets:
                    self._assign(target, value)
            case ast.AnnAssign():
                if node.value is not None:
                    self._assign(node.target, self.value(node.value))
            case ast.AugAssign():
                before = self.value(loaded(node.target))
                after = self._binary(node, node.op, before, self.value(node.value))
                self._assign(node.target, after)
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
                found = Class(name=node.name, node=node, module=self._module)
                self._owner.journal.put(self._names, node.name, found)
            case ast.Import() | ast.ImportFrom():
                self._import(node)
            case ast.With():
                self.block(node.body)
            case ast.Try():
                self.block(node.body)
                self.block([*node.orelse, *node.finalbody])
            case ast.Pass() | ast.Assert():
                pass
            case ast.Global() | ast.Nonlocal():
                self._lose(node, f"{', '.join(node.names)} may be set outside of the function")
            case ast.Delete():
                for target in node.targets:
                    self._delete(target)
            case _:
                self._blur(node, f"a {type(node).__name__.lower()} statement is not followed")

    def _delete(self, target: ast.expr) -> None:
        if isinstance(target, ast.Subscript):
            of, key = self.value(target.value), self.index(target.slice)
            if isinstance(of, list | dict) and not holds_unknown(key) and not has_unknown_keys(of):
                self._owner.journal.altered(of)
                self._tried(target, lambda: of.__delitem__(key))
                return
        self._assign(target, self._unknown(target, "it is deleted"))

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
            same = all(one is not None and equal(one[2], value) for one in values)
            if key is MISSING:
                self._owner.journal.altered(store)
                refill(store, value)
                if not same:
                    self._lose(node, "a condition decides the items of a list")
            else:
                self._owner.journal.put(
                    store, key, value if same else self._unknown(node, RUN_TIME)
                )
        leaving = [ends[at] for at in possible]
        if all(isinstance(end, _Return) for end in leaving):
            values = [end.value for end in leaving if isinstance(end, _Return)]
            same = all(equal(value, values[0]) for value in values)
            raise _Return(values[0] if same else self._unknown(node, RUN_TIME))
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
        items = items_of(self.value(node.iter))
        if items is None:
            self._blur(node, "a loop over values that are not known")
            return
        for item in items:
            self._assign(node.target, item)
            end = self._end(node.body)
            if isinstance(end, _Return) or (isinstance(end, _Stop) and end.kind == "raise"):
                raise end
            if isinstance(end, _Stop) and end.kind == "break":
                return
        self.block(node.orelse)

    def _blur(self, node: ast.stmt, why: str) -> None:
        """Set everything that a statement assigns to unknown."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name | ast.Attribute | ast.Subscript) and isinstance(
                inner.ctx, ast.Store
            ):
                self._assign(inner, self._unknown(node, RUN_TIME))
            elif isinstance(inner, ast.Call):
                self._lose(inner, f"{ast.unparse(inner.func)} is called in {why}")

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
