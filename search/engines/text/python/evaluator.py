"""Evaluator of configuration functions in Python files, which executes nothing of them.

A recipe is a function that builds a configuration by assignments: `cfg = base(); cfg.model.x = 4`.
`evaluate` follows assignments, plain expressions and calls of functions whose source is given.
Classes and functions without source are named values, which the caller may know (`Known`).
All else is an `Unknown` value, with the line that causes it. An unknown condition leaves both
branches possible: what they set differently is unknown.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from autopar.errors import shortened
from search.engines.text.python.values import (
    BINARY,
    BUILTINS,
    CHANGING,
    CLASSES,
    COMPARED,
    KEEPING,
    MISSING,
    MOST_ITEMS,
    PLAIN,
    PURE,
    UNARY,
    Class,
    Function,
    Journal,
    Known,
    Lost,
    Method,
    Module,
    Named,
    Section,
    Sets,
    Unknown,
    bounded,
    copied,
    equal,
    has_unknown_keys,
    hashable,
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
    """Evaluation of one file; `lost` lists effects that were not followed."""

    def __init__(self, known: Known, *, most_steps: int = _MOST_STEPS) -> None:
        self.lost: list[Lost] = []
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
        _Frame(self, module, module.names, {}).block(tree.body)
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
        frame = _Frame(self, function.module, names, function.scope)
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
        frame = _Frame(self, function.module, {}, function.scope)
        plain = [*rows.posonlyargs, *rows.args]
        names: dict[str, Any] = {}
        first = len(plain) - len(rows.defaults)
        for row, default in zip(plain[first:], rows.defaults, strict=True):
            names[row.arg] = frame.value(default)
        for row, value in zip(rows.kwonlyargs, rows.kw_defaults, strict=True):
            if value is not None:
                names[row.arg] = frame.value(value)
        names |= {row.arg: word for row, word in zip(plain, words, strict=False)}
        if rows.vararg is not None:
            names[rows.vararg.arg] = tuple(words[len(plain) :])
        own = {row.arg for row in (*plain, *rows.kwonlyargs)}
        names |= {name: value for name, value in named.items() if name in own}
        rest = {name: value for name, value in named.items() if name not in own}
        if rows.kwarg is not None:
            names[rows.kwarg.arg] = rest
        if own - names.keys() or (rest and rows.kwarg is None):
            name = min(own - names.keys() or rest)
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
        frame = _Frame(self, kind.module, {}, {})
        for one in kind.node.body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                if one.target.id == name and one.value is not None:
                    return frame.value(one.value)
            elif isinstance(one, ast.FunctionDef) and one.name == name:
                method = Function(name=name, node=one, module=kind.module, scope={})
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

    def instance(self, kind: Class, words: list[Any], named: Mapping[str, Any]) -> Section:
        """Return an instance of a class whose fields are its arguments."""
        rows = (one.target for one in kind.node.body if isinstance(one, ast.AnnAssign))
        fields = [row.id for row in rows if isinstance(row, ast.Name)]
        given = dict(zip(fields, words, strict=False))
        return Section(kind.name, {**given, **named}, kind)

    def step(self) -> None:
        """Count a step; raises TooLongError above the limit."""
        self._steps += 1
        if self._steps > self._most_steps:
            raise TooLongError


class _Frame:
    """Evaluation of statements and expressions of one function or module."""

    def __init__(
        self, owner: Evaluator, module: Module, names: dict[str, Any], scope: Mapping[str, Any]
    ) -> None:
        self._owner = owner
        self._module = module
        self._names = names
        self._scope = scope

    def _unknown(self, node: ast.AST, why: str) -> Unknown:
        return Unknown(why=why, line=getattr(node, "lineno", 1), file=self._module.file)

    def _lose(self, node: ast.AST, what: str, of: tuple[int, ...] = ()) -> None:
        line = getattr(node, "lineno", 1)
        self._owner.lost.append(Lost(what=what, line=line, file=self._module.file, of=of))

    # ----------------------------------------------------------------------------------------------
    # Statements.

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
                self._assign(
                    node.target, self._binary(node, node.op, before, self.value(node.value))
                )
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
                self._owner.journal.put(self._names, node.name, self._function(node.name, node))
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
            case ast.Pass() | ast.Assert() | ast.Global() | ast.Nonlocal():
                pass
            case ast.Delete():
                for target in node.targets:
                    self._assign(target, self._unknown(node, "it is deleted"))
            case _:
                self._blur(node, f"a {type(node).__name__.lower()} statement is not followed")

    def _function(self, name: str, node: ast.FunctionDef | ast.Lambda) -> Function:
        scope = {} if self._names is self._module.names else {**self._scope, **self._names}
        return Function(name=name, node=node, module=self._module, scope=scope)

    def _if(self, node: ast.If) -> None:
        known = self._truth(self.value(node.test))
        if known is not None:
            self.block(node.body if known else node.orelse)
            return
        why = "a condition decides it when it runs"
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
                self._owner.journal.put(store, key, value if same else self._unknown(node, why))
        leaving = [ends[at] for at in possible]
        if all(isinstance(end, _Return) for end in leaving):
            values = [end.value for end in leaving if isinstance(end, _Return)]
            same = all(equal(value, values[0]) for value in values)
            raise _Return(values[0] if same else self._unknown(node, why))
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
        items = self.value(node.iter)
        if not isinstance(items, list | tuple | set | frozenset | dict | range | str):
            self._blur(node, "a loop over values that are not known")
            return
        for item in list(items)[:MOST_ITEMS]:
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
                self._assign(inner, self._unknown(node, why))
            elif isinstance(inner, ast.Call):
                self._lose(inner, f"{ast.unparse(inner.func)} is called in {why}")

    def _assign(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name():
                self._owner.journal.put(self._names, target.id, value)
            case ast.Attribute():
                of = self.value(target.value)
                if isinstance(of, Section):
                    self._owner.journal.put(of.fields, target.attr, value)
                elif isinstance(of, Unknown):
                    self._lose(target, f"{ast.unparse(target)} of an unknown object is set")
                elif of is None:
                    self._lose(target, f"{ast.unparse(target.value)} is None")
            case ast.Subscript():
                of, key = self.value(target.value), self.value(target.slice)
                if isinstance(of, dict) and hashable(key):
                    self._owner.journal.put(of, key, value)
                elif isinstance(of, list) and isinstance(key, int) and -len(of) <= key < len(of):
                    self._owner.journal.altered(of)
                    of[key] = value
                elif not isinstance(of, Section):
                    self._lose(target, f"{ast.unparse(target)} is set")
            case ast.Tuple() | ast.List():
                items = list(value) if isinstance(value, list | tuple) else None
                if items is None or len(items) != len(target.elts):
                    items = [self._unknown(target, "it is unpacked")] * len(target.elts)
                for one, item in zip(target.elts, items, strict=True):
                    self._assign(one, item)
            case ast.Starred():
                self._assign(target.value, self._unknown(target, "it is unpacked"))
            case _:
                self._lose(target, f"{ast.unparse(target)} is set")

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

    # ----------------------------------------------------------------------------------------------
    # Expressions.

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression."""
        self._owner.step()
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self._name(node)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call():
                return self._call(node)
            case ast.List() | ast.Tuple() | ast.Set():
                items = self._items(node.elts)
                kind = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
                return self._tried(node, kind, items)
            case ast.Dict():
                return self._dict(node)
            case ast.BinOp():
                return self._binary(node, node.op, self.value(node.left), self.value(node.right))
            case ast.UnaryOp():
                return self._unary(node)
            case ast.BoolOp():
                return self._bool(node)
            case ast.Compare():
                return self._compare(node)
            case ast.IfExp():
                known = self._truth(self.value(node.test))
                first = self.value(node.body) if known is not False else None
                other = self.value(node.orelse) if known is not True else None
                if known is None:
                    return first if equal(first, other) else self._unknown(
                        node, "a condition decides it when it runs")  # fmt: skip
                return first if known else other
            case ast.Subscript():
                return self._subscript(node)
            case ast.JoinedStr():
                return self._joined(node)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                found = list(self._comprehension(node.generators, node.elt))
                if any(isinstance(one, Unknown) for one in found):
                    return next(one for one in found if isinstance(one, Unknown))
                return self._tried(node, set, found) if isinstance(node, ast.SetComp) else found
            case ast.Lambda():
                return self._function("a lambda", node)
            case ast.NamedExpr():
                value = self.value(node.value)
                self._assign(node.target, value)
                return value
            case _:
                return self._unknown(node, f"{shortened(ast.unparse(node))} is not evaluated")

    def _name(self, node: ast.Name) -> Any:
        for names in (self._names, self._scope, self._module.names):
            if node.id in names:
                return names[node.id]
        return Named(name=node.id)

    def _attribute(self, node: ast.Attribute) -> Any:
        of = self.value(node.value)
        return self._field(node, of, node.attr)

    def _field(self, node: ast.AST, of: Any, name: str) -> Any:
        if isinstance(of, Section):
            if name in of.fields:
                return of.fields[name]
            found = self._owner.known.field(of, name)
            if found is NotImplemented and of.kind is not None:
                found = self._owner.inherited(of.kind, of, name)
            if found is not NotImplemented:
                return found
            return self._unknown(node, f"{name} is not set before")
        if isinstance(of, Named):
            return self._owner.named(f"{of.name}.{name}")
        if isinstance(of, Module):
            return of.names.get(name, Named(name=f"{of.name}.{name}"))
        if isinstance(of, Class):
            return Named(name=f"{of.name}.{name}")
        if isinstance(of, Unknown):
            return of
        if isinstance(of, PLAIN):
            return Method(of=of, name=name)
        return self._unknown(node, f"{name} is not known")

    def _items(self, nodes: list[ast.expr]) -> list[Any]:
        found = list[Any]()
        for one in nodes:
            value = self.value(one.value if isinstance(one, ast.Starred) else one)
            if not isinstance(one, ast.Starred):
                found.append(value)
            elif isinstance(value, list | tuple | set | frozenset | dict | range):
                found += value
            else:
                found.append(self._unknown(one, "it is unpacked"))
        return found

    def _dict(self, node: ast.Dict) -> Any:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            item = self.value(value)
            name = None if key is None else self.value(key)
            if key is None and isinstance(item, dict):
                found |= item
            elif key is None or not hashable(name):
                return self._unknown(node, "its keys are not known")
            else:
                found[name] = item
        return found

    def _binary(self, node: ast.AST, op: ast.operator, left: Any, right: Any) -> Any:
        for one in (left, right):
            if isinstance(one, Unknown):
                return one
        work = BINARY.get(type(op))
        plain = isinstance(left, PLAIN) and isinstance(right, PLAIN)
        if work is None or not plain or not bounded(op, left, right):
            return self._unknown(node, "it is computed when it runs")
        return self._tried(node, work, left, right)

    def _unary(self, node: ast.UnaryOp) -> Any:
        value = self.value(node.operand)
        if isinstance(node.op, ast.Not):
            truth = self._truth(value)
            return self._unknown(node, "a condition decides it") if truth is None else not truth
        if isinstance(value, Unknown):
            return value
        return self._tried(node, UNARY[type(node.op)], value)

    def _bool(self, node: ast.BoolOp) -> Any:
        ends = isinstance(node.op, ast.Or)
        undecided = None
        for one in node.values:
            value = self.value(one)
            truth = self._truth(value)
            if truth is None:
                undecided = undecided or self._unknown(one, "a condition decides it")
            elif truth is ends:
                # `unknown or True` is true, but its value is not known.
                return value if undecided is None or isinstance(value, bool) else undecided
        return undecided if undecided is not None else value

    def _compare(self, node: ast.Compare) -> Any:
        left = self.value(node.left)
        for op, right_node in zip(node.ops, node.comparators, strict=True):
            right = self.value(right_node)
            for one in (left, right):
                if isinstance(one, Unknown):
                    return one
            if isinstance(left, Named) or isinstance(right, Named):
                classes = all(
                    one is None or getattr(one, "is_class", False) for one in (left, right)
                )
                if left != right and not classes:
                    return self._unknown(node, "a constant of another module decides it")
                found: Any = (left == right) is isinstance(op, ast.Is | ast.Eq)
            elif isinstance(op, ast.Is | ast.IsNot):
                found = (left is right) is isinstance(op, ast.Is)
            else:
                if holds_unknown(left) or holds_unknown(right):
                    return self._unknown(node, "an item is not known")
                found = self._tried(node, COMPARED[type(op)], left, right)
            if found is not True:
                return found
            left = right
        return True

    def _subscript(self, node: ast.Subscript) -> Any:
        of = self.value(node.value)
        if isinstance(of, Unknown):
            return of
        if isinstance(node.slice, ast.Slice):
            parts = [None if one is None else self.value(one)
                     for one in (node.slice.lower, node.slice.upper, node.slice.step)]  # fmt: skip
            return self._tried(node, lambda: of[slice(*parts)])
        key = self.value(node.slice)
        if isinstance(key, Unknown):
            return key
        if isinstance(of, Named) and isinstance(key, str) and of.is_class:
            return Named(name=f"{of.name}.{key}")  # a member of an enumeration
        if not isinstance(of, list | tuple | dict | str) or has_unknown_keys(of):
            return self._unknown(node, f"{shortened(ast.unparse(node))} is read when it runs")
        return self._tried(node, lambda: of[key])

    def _joined(self, node: ast.JoinedStr) -> Any:
        text = ""
        for part in node.values:
            if isinstance(part, ast.Constant):
                text += str(part.value)
                continue
            assert isinstance(part, ast.FormattedValue), "the other part of a joined string"
            value = self.value(part.value)
            if not isinstance(value, str | int | float | bool | None) or part.format_spec:
                return value if isinstance(value, Unknown) else self._unknown(node, "it is text")
            text += str(value)
        return text

    def _comprehension(self, rows: list[ast.comprehension], item: ast.expr) -> Iterator[Any]:
        if not rows:
            yield self.value(item)
            return
        first, *rest = rows
        items = self.value(first.iter)
        if not isinstance(items, list | tuple | set | frozenset | dict | range | str):
            yield self._unknown(first.iter, "a loop over values that are not known")
            return
        inner = _Frame(self._owner, self._module, dict(self._names), self._scope)
        for one in list(items)[:MOST_ITEMS]:
            inner._assign(first.target, one)
            tests = [inner._truth(inner.value(test)) for test in first.ifs]
            if None in tests:
                yield self._unknown(first.iter, "a condition decides it")
            elif all(tests):
                yield from inner._comprehension(rest, item)

    def _truth(self, value: Any) -> bool | None:
        """Return whether a value is true; None: unknown, as for a constant of another module."""
        if isinstance(value, Unknown) or (isinstance(value, Named) and not value.is_class):
            return None
        return bool(value) if isinstance(value, (*PLAIN, range)) else True

    def _tried(self, node: ast.AST, work: Callable[..., Any], *words: Any) -> Any:
        """Return the result of an operation on plain values; an error makes it unknown."""
        try:
            return work(*words)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            return self._unknown(node, f"{type(error).__name__} when it runs")

    # ----------------------------------------------------------------------------------------------
    # Calls.

    def _call(self, node: ast.Call) -> Any:
        of = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else None
        if isinstance(node.func, ast.Attribute):
            called = self._field(node.func, of, node.func.attr)
        else:
            called = self.value(node.func)
        words = self._items(node.args)
        named: dict[str, Any] = {}
        for one in node.keywords:
            value = self.value(one.value)
            if one.arg is not None:
                named[one.arg] = value
            elif isinstance(value, dict):
                named |= {str(key): item for key, item in value.items()}
            else:
                return self._lost_call(node, words, named)
        if isinstance(of, Section) and isinstance(node.func, ast.Attribute):
            found = self._owner.known_call(node.func.attr, of, words, named)
            if found is not NotImplemented:
                return found
            words = [of, *words]
        if isinstance(called, Function):
            found = self._owner.known_call(called.name, None, words, named)
            return self._owner.invoke(called, words, named) if found is NotImplemented else found
        if isinstance(called, Class):
            found = self._owner.known_call(called.name, None, words, named)
            return self._owner.instance(called, words, named) if found is NotImplemented else found
        if isinstance(called, Method):
            return self._method(node, called, words, named)
        if isinstance(called, Named):
            builtin = self._builtin(node, called.name, words, named)
            if builtin is not NotImplemented:
                return builtin
            found = self._owner.known_call(called.name, None, words, named)
            if found is not NotImplemented:
                return found
            if called.is_class:
                numbered = {str(at): word for at, word in enumerate(words)}
                return Section(called.last, {**numbered, **named})
        return self._lost_call(node, words, named)

    def _lost_call(self, node: ast.Call, words: list[Any], named: Mapping[str, Any]) -> Unknown:
        name = shortened(ast.unparse(node.func))
        given = tuple(id(one) for one in (*words, *named.values()) if isinstance(one, Section))
        if given:
            self._lose(node, f"{name} may change the configuration", given)
        return self._unknown(node, f"{name} is called when it runs")

    def _builtin(
        self, node: ast.Call, name: str, words: list[Any], named: Mapping[str, Any]
    ) -> Any:
        if name in ("getattr", "hasattr") and len(words) in (2, 3) and isinstance(words[1], str):
            of, field, *default = words
            if isinstance(of, Section):
                found = self._field(node, of, field)
                missing = isinstance(found, Unknown) and field not in of.fields
                if name == "hasattr":
                    has = self._owner.known.has(of, field) if missing else True
                    return found if has is None else has
                return default[0] if missing and default else found
            if isinstance(of, Module):
                found = of.names.get(field, default[0] if default else NotImplemented)
                return field in of.names if name == "hasattr" else found
            if isinstance(of, Unknown):
                return of
            return NotImplemented
        if name == "setattr" and len(words) == 3 and isinstance(words[0], Section):
            if isinstance(words[1], str):
                self._owner.journal.put(words[0].fields, words[1], words[2])
            else:
                self._lose(node, "setattr sets a field that is not known")
            return None
        if name == "isinstance" and len(words) == 2:
            return self._is_instance(node, *words)
        if name in ("print", "setattr"):
            return None
        if name == "typing.cast" and len(words) == 2:
            return words[1]
        if name.endswith("import_module") and words and isinstance(words[0], str):
            return self._owner.named(words[0])
        if name in ("field", "dataclasses.field"):
            factory = named.get("default_factory")
            made = {"dict": dict, "list": list, "set": set}.get(getattr(factory, "name", ""))
            return (
                named.get("default", self._unknown(node, "a default")) if made is None else made()
            )
        if name in ("copy.copy", "copy.deepcopy", "dataclasses.replace") and words:
            found = copied(words[0], {})
            if isinstance(found, Section):
                found.fields |= named
            return found
        if name == "range":
            found = self._tried(node, lambda: range(*words))
            return list(found) if isinstance(found, range) and len(found) <= MOST_ITEMS else found
        work = BUILTINS.get(name)
        if work is None:
            return NotImplemented
        for one in (*words, *named.values()):
            if isinstance(one, Unknown):
                return one
            if not isinstance(one, (*PLAIN, range)) or holds_unknown(one):
                return self._unknown(node, f"{name} of a value that is not known")
        found = self._tried(node, lambda: work(*words, **named))
        lazy = isinstance(found, enumerate | zip | reversed)
        return list(found) if lazy else found

    def _is_instance(self, node: ast.Call, of: Any, kinds: Any) -> Any:
        listed = list(kinds) if isinstance(kinds, tuple) else [kinds]
        if isinstance(of, Unknown) or not all(isinstance(one, Named | Class) for one in listed):
            return self._unknown(node, "isinstance of a value that is not known")
        names = [one.last if isinstance(one, Named) else one.name for one in listed]
        if not isinstance(of, Section):
            return any(isinstance(of, CLASSES[name]) for name in names if name in CLASSES)
        if of.name in names:
            return True
        if all(name in CLASSES for name in names):
            return False
        return self._unknown(node, f"the bases of {of.name} are not known")

    def _method(
        self, node: ast.Call, method: Method, words: list[Any], named: Mapping[str, Any]
    ) -> Any:
        of, name = method.of, method.name
        changes = name in CHANGING
        if has_unknown_keys(of):
            return self._unknown(node, "a key is not known")
        if not hasattr(of, name) or (name not in PURE and not changes):
            return self._unknown(node, f"{name} is called when it runs")
        values = name in KEEPING
        if holds_unknown(list(named.values())) or (holds_unknown(words) and not values):
            if changes:
                self._lose(node, f"{name} of a value that is not known changes a list")
            return self._unknown(node, "an argument is not known")
        if changes:
            self._owner.journal.altered(of)
        found = self._tried(node, lambda: getattr(of, name)(*words, **named))
        return list(found) if isinstance(found, type({}.items()) | type({}.keys()) |
                                         type({}.values())) else found  # fmt: skip
