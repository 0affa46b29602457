"""Expressions of Python files: the value that Python computes, or `Unknown`."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from autopar.errors import shortened
from search.engines.text.python.process import ENVIRONMENT, MODULES, NAMESPACE, Process
from search.engines.text.python.values import (
    BINARY,
    BUILTINS,
    CHANGING,
    CLASSES,
    COMPARED,
    KEEPING,
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
    Unknown,
    bounded,
    copied,
    equal,
    has_unknown_keys,
    hashable,
    holds_object,
    holds_unknown,
    may_lack,
)

RUN_TIME = "a condition decides it when it runs"
_EMPTY = ("Counter", "Decimal", "Fraction", "OrderedDict")
"""Classes whose instances may be false."""
_OPEN = ("delattr", "eval", "exec", "globals", "locals", "super", "vars")
"""Functions that reach any value."""
_MOST_TEXT = 1 << 20


class Owner(Protocol):
    """Evaluation of a file, as its expressions use it (`Evaluator`)."""

    journal: Journal
    known: Known
    lost: list[Lost]
    process: Process

    def step(self, number: int = 1) -> None:
        """Count steps."""

    def named(self, name: str) -> Any:
        """Return the value of a dotted name."""

    def module(self, name: str) -> Module | None:
        """Return a module with source by its dotted name; None: without source."""

    def known_call(self, name: str, of: Any, words: list[Any], named: Mapping[str, Any]) -> Any:
        """Return the value of a call that the caller knows; NotImplemented: not known."""

    def invoke(self, function: Function, words: list[Any], named: Mapping[str, Any]) -> Any:
        """Return the value of a call of a function with source."""

    def inherited(self, kind: Class, of: Section, name: str) -> Any:
        """Return the default, property or method of a class; NotImplemented: it has none."""

    def foreign(self, kind: Class) -> bool:
        """Return whether a class has a base without source."""

    def instance(self, kind: Class, words: list[Any], named: Mapping[str, Any]) -> Any:
        """Return an instance of a class with source."""


class Expressions:
    """Evaluation of the expressions of one function or module.

    names : values of the function by name. scopes : those of the enclosing functions, inner first.
    """

    def __init__(
        self,
        owner: Owner,
        module: Module,
        names: dict[str, Any],
        scopes: tuple[dict[str, Any], ...] = (),
    ) -> None:
        self._owner = owner
        self._module = module
        self._names = names
        self._scopes = scopes

    def _unknown(self, node: ast.AST, why: str) -> Unknown:
        return Unknown(why=why, line=getattr(node, "lineno", 1), file=self._module.file)

    def _undecided(self, node: ast.AST, why: str = RUN_TIME) -> Unknown:
        """Return an unknown value that may be an object or function of the file."""
        line = getattr(node, "lineno", 1)
        return Unknown(why=why, line=line, file=self._module.file, acts=True)

    def _lose(self, node: ast.AST, what: str) -> None:
        line = getattr(node, "lineno", 1)
        self._owner.lost.append(Lost(what=what, line=line, file=self._module.file))

    def function(self, name: str, node: ast.FunctionDef | ast.Lambda) -> Function:
        """Return a function, with its defaults as they are at its definition."""
        at_top = self._names is self._module.names
        rows = node.args
        plain = [*rows.posonlyargs, *rows.args]
        with_default = plain[len(plain) - len(rows.defaults) :]
        pairs = [*zip(with_default, rows.defaults, strict=True),
                 *zip(rows.kwonlyargs, rows.kw_defaults, strict=True)]  # fmt: skip
        return Function(
            name=name,
            node=node,
            module=self._module,
            scopes=() if at_top else (self._names, *self._scopes),
            defaults={row.arg: self.value(one) for row, one in pairs if one is not None},
        )

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
                elif of is None or isinstance(of, Class | Function | Module) or of in MODULES:
                    self._lose(target, f"{ast.unparse(target)} is set")
            case ast.Subscript():
                of, key = self.value(target.value), self.value(target.slice)
                if of == ENVIRONMENT and isinstance(key, str):
                    of = self._owner.process.environment
                if isinstance(of, dict) and hashable(key):
                    self._owner.journal.put(of, key, value)
                elif isinstance(of, list) and isinstance(key, int) and -len(of) <= key < len(of):
                    self._owner.journal.altered(of)
                    of[key] = value
                else:
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
                known = self.truth(node.test)
                if known is not None:
                    return self.value(node.body if known else node.orelse)
                first, other = self._maybe(node.body), self._maybe(node.orelse)
                return first if equal(first, other) else self._undecided(node)
            case ast.Subscript():
                return self._subscript(node)
            case ast.JoinedStr():
                return self._joined(node)
            case ast.DictComp():
                pair = ast.Tuple(elts=[node.key, node.value], ctx=ast.Load())
                pairs = list(self._comprehension(node.generators, pair))
                known = all(isinstance(one, tuple) and hashable(one[0]) for one in pairs)
                return dict(pairs) if known else self._unknown(node, "its keys are not known")
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                found = list(self._comprehension(node.generators, node.elt))
                if any(isinstance(one, Unknown) for one in found):
                    return next(one for one in found if isinstance(one, Unknown))
                return self._tried(node, set, found) if isinstance(node, ast.SetComp) else found
            case ast.Lambda():
                return self.function("a lambda", node)
            case ast.NamedExpr():
                value = self.value(node.value)
                self._assign(node.target, value)
                return value
            case _:
                if any(isinstance(one, ast.Call | ast.NamedExpr) for one in ast.walk(node)):
                    self._lose(node, f"{shortened(ast.unparse(node))} is not evaluated")
                return self._unknown(node, f"{shortened(ast.unparse(node))} is not evaluated")

    def _name(self, node: ast.Name) -> Any:
        for names in (self._names, *self._scopes, self._module.names):
            if node.id in names:
                return names[node.id]
        return Named(name=node.id)

    def _attribute(self, node: ast.Attribute) -> Any:
        of = self.value(node.value)
        found = self._field(node, of, node.attr)
        # A method that is not called here is called elsewhere, or never.
        bound = isinstance(found, Method) or (
            isinstance(of, Section) and isinstance(found, Function) and node.attr not in of.fields
        )
        return self._undecided(node, f"{node.attr} is a method") if bound else found

    def _field(self, node: ast.AST, of: Any, name: str) -> Any:
        if isinstance(of, Section):
            if name in of.fields:
                return of.fields[name]
            found = self._owner.known.field(of, name)
            if found is NotImplemented and of.kind is not None:
                found = self._owner.inherited(of.kind, of, name)
                if isinstance(found, list | dict | set | Section):
                    of.fields[name] = found
            if found is not NotImplemented:
                return found
            if name == "__dict__":
                self._lose(node, "fields are read together")
            return self._unknown(node, f"{name} is not set before")
        if isinstance(of, Named):
            return self._owner.named(f"{of.name}.{name}")
        if isinstance(of, Module):
            return of.names.get(name, Named(name=f"{of.name}.{name}"))
        if isinstance(of, Class):
            found = self._owner.inherited(of, Section(of.name, kind=of), name)
            known = isinstance(found, (*PLAIN, Class)) and not of.node.bases
            why = f"{of.name}.{name} is a member of a class with bases, or a method"
            return found if known else self._undecided(node, why)
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
                self._owner.step(len(value))
            else:
                self._lose(one, f"{shortened(ast.unparse(one))} is unpacked")
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
        if isinstance(node.op, ast.Not):
            truth = self.truth(node.operand)
            return self._unknown(node, RUN_TIME) if truth is None else not truth
        value = self.value(node.operand)
        return value if isinstance(value, Unknown) else self._tried(
            node, UNARY[type(node.op)], value)  # fmt: skip

    def _bool(self, node: ast.BoolOp) -> Any:
        ends = isinstance(node.op, ast.Or)
        for at, one in enumerate(node.values):
            value = self.value(one)
            truth = _truth_of(value)
            if truth is None and at + 1 < len(node.values):
                for later in node.values[at + 1 :]:
                    self._maybe(later)
                return self._undecided(one)
            if truth is ends or at + 1 == len(node.values):
                return value
        raise AssertionError("an operation has values")

    def truth(self, node: ast.expr) -> bool | None:
        """Return whether an expression is true; None: unknown.

        `unknown and False` is false, though the value of the expression is not known.
        """
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            found = self.truth(node.operand)
            return None if found is None else not found
        if not isinstance(node, ast.BoolOp):
            return _truth_of(self.value(node))
        ends = isinstance(node.op, ast.Or)
        found = not ends
        for one in node.values:
            # Behind an unknown operand it is open whether this one is evaluated.
            truth = self.truth(one) if found is not None else _truth_of(self._maybe(one))
            if truth is ends:
                return ends
            found = None if truth is None else found
        return found

    def _maybe(self, node: ast.expr) -> Any:
        """Return the value of an expression that may not be evaluated; its effects are lost."""
        with self._owner.journal.branch() as changes:
            value = self.value(node)
        if changes:
            self._lose(node, f"a condition decides whether {shortened(ast.unparse(node))} runs")
        return value

    def _compare(self, node: ast.Compare) -> Any:
        left = self.value(node.left)
        for at, (op, right_node) in enumerate(zip(node.ops, node.comparators, strict=True)):
            right = self.value(right_node)
            for one in (left, right):
                if isinstance(one, Unknown):
                    return self._open_after(node, at, one)
            if isinstance(left, Named) or isinstance(right, Named):
                classes = all(
                    one is None or getattr(one, "is_class", False) for one in (left, right)
                )
                if left != right and not classes:
                    why = "a constant of another module decides it"
                    return self._open_after(node, at, self._unknown(node, why))
                found: Any = (left == right) is isinstance(op, ast.Is | ast.Eq)
            elif isinstance(op, ast.Is | ast.IsNot):
                if (
                    left == right
                    and isinstance(left, int | float | str | tuple)
                    and not (isinstance(left, bool) and isinstance(right, bool))
                ):
                    return self._unknown(node, "equal values may be one object")
                found = (left is right) is isinstance(op, ast.Is)
            else:
                if holds_unknown(left) or holds_unknown(right):
                    return self._open_after(node, at, self._unknown(node, "an item is not known"))
                if holds_object(left) and left is not right and holds_object(right):
                    return self._open_after(node, at, self._unknown(node, "objects are compared"))
                found = self._tried(node, COMPARED[type(op)], left, right)
            if found is not True:
                return found
            left = right
        return True

    def _open_after(self, node: ast.Compare, at: int, found: Unknown) -> Unknown:
        """Return an unknown comparison after the operands that Python may evaluate."""
        for later in node.comparators[at + 1 :]:
            self._maybe(later)
        return found

    def index(self, node: ast.expr) -> Any:
        """Return the value of an index, a slice for `a:b:c`."""
        if not isinstance(node, ast.Slice):
            return self.value(node)
        parts = [None if one is None else self.value(one)
                 for one in (node.lower, node.upper, node.step)]  # fmt: skip
        unknown = next((one for one in parts if holds_unknown(one)), None)
        return slice(*parts) if unknown is None else self._unknown(node, "a part of the slice")

    def _subscript(self, node: ast.Subscript) -> Any:
        of = self.value(node.value)
        if isinstance(of, Unknown):
            return of
        key = self.index(node.slice)
        if isinstance(key, Unknown):
            return key
        if isinstance(of, Named) and isinstance(key, str) and of.is_class:
            return Named(name=f"{of.name}.{key}")  # a member of an enumeration
        if of == ENVIRONMENT and key in self._owner.process.environment:
            return self._owner.process.environment[key]
        if not isinstance(of, list | tuple | dict | str) or has_unknown_keys(of):
            return self._unknown(node, f"{shortened(ast.unparse(node))} is read when it runs")
        return self._tried(node, lambda: of[key])

    def _joined(self, node: ast.JoinedStr) -> Any:
        text, unknown = "", None
        for part in node.values:
            if isinstance(part, ast.Constant):
                text += str(part.value)
                continue
            assert isinstance(part, ast.FormattedValue), "the other part of a joined string"
            value = self.value(part.value)
            formatted = part.format_spec is not None or part.conversion >= 0
            if not isinstance(value, str | int | float | bool | None) or formatted:
                unknown = value if isinstance(value, Unknown) else self._unknown(node, "it is text")
            text += str(value) if isinstance(value, str | int | float | bool | None) else ""
            self._owner.step(len(text))
        return text if unknown is None else unknown

    def _comprehension(self, rows: list[ast.comprehension], item: ast.expr) -> Iterator[Any]:
        if not rows:
            yield self.value(item)
            return
        first, *rest = rows
        items = self.value(first.iter)
        found = items_of(items)
        inside = [item, *first.ifs, *(one.iter for one in rest)]
        effects = any(isinstance(one, ast.Call | ast.NamedExpr)
                      for part in inside for one in ast.walk(part))  # fmt: skip
        if any(isinstance(one, ast.NamedExpr) for part in inside for one in ast.walk(part)):
            self._lose(first.iter, "a comprehension sets a name")
        if found is None:
            if effects:
                self._lose(first.iter, "calls in a loop over values that are not known")
            yield self._unknown(first.iter, "a loop over values that are not known")
            return
        inner = Expressions(self._owner, self._module, {}, (self._names, *self._scopes))
        for one in found:
            inner._assign(first.target, one)
            tests = [inner.truth(test) for test in first.ifs]
            if None in tests:
                if effects:
                    self._lose(first.iter, "a condition decides a call")
                yield self._unknown(first.iter, "a condition decides it")
            elif all(tests):
                yield from inner._comprehension(rest, item)

    def _tried(self, node: ast.AST, work: Callable[..., Any], *words: Any) -> Any:
        """Return the result of an operation on plain values; an error makes it unknown."""
        try:
            return work(*words)
        except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError,
                ValueError) as error:  # fmt: skip
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
                if not isinstance(called, Named | Unknown) or isinstance(of, Section):
                    self._lose(node, f"{shortened(ast.unparse(one.value))} is unpacked")
                return self._lost_call(node, words, named)
        attribute = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if isinstance(of, Section) and attribute not in of.fields:
            found = self._owner.known_call(attribute, of, words, named)
            if found is NotImplemented:
                place = self._unknown(node, "")
                found = self._owner.process.parser_call(of, place, attribute, words, named)
            if found is not NotImplemented:
                return found
            words = [of, *words]
        if isinstance(called, Function):
            name = f"{called.module.name}.{called.name}"
            found = self._owner.known_call(name, None, words, named)
            return self._owner.invoke(called, words, named) if found is NotImplemented else found
        if isinstance(called, Class):
            name = f"{called.module.name}.{called.name}"
            found = self._owner.known_call(name, None, words, named)
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
                return Section(called.class_name, {**numbered, **named})
        if isinstance(called, Section) or (isinstance(called, Unknown) and called.acts):
            self._lose(node, f"{shortened(ast.unparse(node.func))} is called")
        return self._lost_call(node, words, named)

    def _lost_call(self, node: ast.Call, words: list[Any], named: Mapping[str, Any]) -> Unknown:
        name = shortened(ast.unparse(node.func))
        nodes = [*node.args, *(one.value for one in node.keywords)]
        # No other name refers to a container that the call writes out.
        stored = any(not isinstance(one, ast.List | ast.Dict | ast.Set | ast.Tuple | ast.Constant)
                     for one in nodes)  # fmt: skip
        given = any(holds_object(one) or (stored and isinstance(one, list | dict | set))
                    for one in (*words, *named.values()))  # fmt: skip
        partial = name.rpartition(".")[2] == "partial"
        if (given and not partial) or name in _OPEN:
            self._lose(node, f"{name} may change the configuration")
        why = f"{name} is called when it runs"
        return self._undecided(node, why) if partial else self._unknown(node, why)

    def _builtin(
        self, node: ast.Call, name: str, words: list[Any], named: Mapping[str, Any]
    ) -> Any:
        if name in ("getattr", "hasattr") and len(words) in (2, 3) and isinstance(words[1], str):
            of, field, *default = words
            if isinstance(of, Section):
                found = self._field(node, of, field)
                missing = isinstance(found, Unknown) and field not in of.fields
                if name == "hasattr":
                    has = self._has(of, field) if missing else True
                    open_ = isinstance(found, Unknown) and found.absent
                    return found if has is None or open_ else has
                if not (missing and default):
                    return found
                has = self._has(of, field)
                return found if has is None or has else default[0]
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
        variable = self._owner.process.variable(node.lineno, name, words, named)
        if variable is not NotImplemented:
            return variable
        if self._owner.process.changed_by(name):
            self._lose(node, f"{name} may change values of the run")
            return NotImplemented
        if name == "isinstance" and len(words) == 2:
            return self._is_instance(node, *words)
        if name == "setattr":
            self._lose(node, "setattr of an object that is not known")
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
        if name == "copy.deepcopy" and words:
            return copied(words[0], {})
        if name in ("copy.copy", "dataclasses.replace") and words:
            of = words[0]
            if isinstance(of, Section):
                if name == "dataclasses.replace" and of.kind is not None:
                    self._lose(node, f"{of.name} is made again")
                return Section(of.name, {**of.fields, **named}, of.kind)
            return of.copy() if isinstance(of, list | dict | set) else of
        if name == "range":
            found = self._tried(node, lambda: [*range(*words)[: MOST_ITEMS + 1]])
            long = isinstance(found, list) and len(found) > MOST_ITEMS
            return self._unknown(node, "a long range") if long else found
        work = BUILTINS.get(name)
        if work is None:
            return NotImplemented
        for one in (*words, *named.values()):
            if isinstance(one, Unknown):
                return one
            objects = name == "str" and holds_object(one)
            if objects or not isinstance(one, (*PLAIN, range)) or holds_unknown(one):
                return self._unknown(node, f"{name} of a value that is not known")
        lazy = name in ("enumerate", "reversed", "zip")
        return self._tried(
            node, lambda: list(work(*words, **named)) if lazy else work(*words, **named)
        )

    def _has(self, of: Section, name: str) -> bool | None:
        """Return whether a section has a field that was not set; None: not known."""
        if of.name == NAMESPACE and of.kind is None:
            return False
        has = self._owner.known.has(of, name)
        if has is not None or of.kind is None:
            return has
        return None if self._owner.foreign(of.kind) else False

    def _is_instance(self, node: ast.Call, of: Any, kinds: Any) -> Any:
        listed = list(kinds) if isinstance(kinds, tuple) else [kinds]
        if isinstance(of, Unknown | Named) or not all(
            isinstance(one, Named | Class) for one in listed
        ):
            return self._unknown(node, "isinstance of a value that is not known")
        names = [one.last if isinstance(one, Named) else one.name for one in listed]
        if not isinstance(of, Section):
            if any(isinstance(of, CLASSES[name]) for name in names if name in CLASSES):
                return True
            known = all(isinstance(one, Class) or one.last in CLASSES for one in listed)
            return False if known else self._unknown(node, "a class is not known")
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
        container = isinstance(of, list | dict | set)
        if has_unknown_keys(of) or (may_lack(of) and name not in ("copy", "get")):
            if container and name not in PURE:
                self._lose(node, f"{name} of a dict whose keys are not known")
            return self._unknown(node, "a key is not known")
        if not hasattr(of, name) or (name not in PURE and not changes):
            if container:
                self._lose(node, f"{name} is not followed")
            return self._unknown(node, f"{name} is called when it runs")
        keeps = name == KEEPING or (
            name == "extend" and len(words) == 1 and isinstance(words[0], list | tuple)
        )
        if holds_unknown(list(named.values())) or (holds_unknown(words) and not keeps):
            if changes:
                self._lose(node, f"{name} of a value that is not known changes a list")
            return self._unknown(node, "an argument is not known")
        sizes = [len(one) for one in (of, *words) if isinstance(one, str | list | tuple | dict)]
        if (name in ("join", "replace") and math.prod(sizes) > _MOST_TEXT) or (
            name == "format" and (":" in of or holds_object([*words, *named.values()]))
        ):
            return self._unknown(node, "a long text")
        self._owner.step(sum(sizes))
        if changes:
            self._owner.journal.altered(of)
        found = self._tried(node, lambda: getattr(of, name)(*words, **named))
        if changes and isinstance(found, Unknown):
            self._lose(node, f"{name} has an error")
        return list(found) if isinstance(found, type({}.items()) | type({}.keys()) |
                                         type({}.values())) else found  # fmt: skip


def items_of(value: Any) -> list[Any] | None:
    """Return the items of a value in a loop; None: not known, or more than the limit."""
    if not isinstance(value, list | tuple | set | frozenset | dict | range | str):
        return None
    unknown = has_unknown_keys(value) or may_lack(value)
    return None if len(value) > MOST_ITEMS or unknown else list(value)


def _truth_of(value: Any) -> bool | None:
    """Return whether a value is true; None: unknown, as for a constant of another module."""
    if isinstance(value, Unknown) or (isinstance(value, Named) and not value.is_class):
        return None
    if may_lack(value) and all(isinstance(one, Unknown) and one.absent for one in value.values()):
        return None
    if isinstance(value, Section) and value.name in _EMPTY:
        return None
    return bool(value) if isinstance(value, (*PLAIN, range)) else True
