"""Expressions of a symbolic run: what every kind of expression may be worth."""

from __future__ import annotations

import ast
import builtins
from typing import Any

from paralab.doctor.script.naming import RANK_NAMES, canonical, role_of_made
from paralab.doctor.script.state import State
from paralab.doctor.script.values import (
    Attr,
    Branch,
    Choice,
    Class,
    Computed,
    Constant,
    Dotted,
    Function,
    Generated,
    Items,
    Loop,
    Made,
    Mapping,
    Object,
    Scope,
    Value,
    either,
    options,
)

# the special methods of operators that classes of a script have
OPERATORS = {
    "Add": "add",
    "Sub": "sub",
    "Mult": "mul",
    "MatMult": "matmul",
    "Div": "truediv",
    "BitOr": "or",
    "LShift": "lshift",
}
NAMESPACES = ("types.SimpleNamespace", "argparse.Namespace")


def wrapped_by(value: Value) -> Object | None:
    """The object of the script that a wrapper (DDP, DataParallel) holds."""
    if not isinstance(value, Made) or not value.call.target.endswith("DataParallel"):
        return None
    module = value.call.argument(0, "module")
    return (
        next((option for option in options(module) if isinstance(option, Object)), None)
        if module
        else None
    )


class Expressions(State):
    """Evaluates expressions in a scope. Calls are made in `calls.py`."""

    def __init__(self) -> None:
        super().__init__()
        self.settled: set[tuple[Scope, str]] = (
            set()
        )  # parameters that are literals in the call under way

    def call(self, node: ast.Call, scope: Scope) -> Value:
        raise NotImplementedError

    def enter(
        self, function: Function, args: tuple[Value, ...], keywords: dict[str, Value], call: Any
    ) -> Value:
        raise NotImplementedError

    def value(self, node: ast.expr | None, scope: Scope) -> Value:
        if node is None:
            return Constant(None)
        special = getattr(self, f"_{type(node).__name__.lower()}", None)
        if special:
            result: Value = special(node, scope)
            return result
        parts = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        op = type(getattr(node, "op", node)).__name__
        return Computed(op, node, parents=tuple(self.value(part, scope) for part in parts))

    def _constant(self, node: ast.Constant, scope: Scope) -> Value:
        return Constant(node.value)

    def _name(self, node: ast.Name, scope: Scope) -> Value:
        found = self.look_up(node.id, scope)
        if found is not None:
            return found
        return Dotted(f"builtins.{node.id}") if hasattr(builtins, node.id) else Value()

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Value:
        found = self.attribute(self.value(node.value, scope), node.attr)
        is_read = isinstance(node.ctx, ast.Load) and any(
            isinstance(context, Loop) for context in self.stack
        )
        if (
            isinstance(found, Constant) and node.attr in self.added_to and is_read
        ):  # in another turn it has been added to
            return Computed(
                "Counted", node, parents=(found,), known={"added": self.added_to[node.attr]}
            )
        return found

    def attribute(self, base: Value, name: str) -> Value:
        """An attribute of a value: followed into modules, objects and classes of the script, a
        longer name for a library's."""
        if isinstance(base, Choice):
            found = tuple(self.attribute(option, name) for option in base.options)
            return either(found, base.tests)
        if isinstance(base, Dotted):
            module = self.modules.get(base.name)
            known = self.names.get((module, name)) if module else None
            return known or self.library(f"{base.written or base.name}.{name}")
        if isinstance(base, Object):
            held = self.names.get((base.scope, name))
            return held or self._of_class(base.of, base, name) or Attr(base, name, parents=(base,))
        if isinstance(base, Class):
            return self._of_class(base, None, name) or Attr(base, name, parents=(base,))
        if (
            isinstance(base, Made)
            and "scope" in base.known
            and (base.known["scope"], name) in self.names
        ):
            return self.names[base.known["scope"], name]
        if isinstance(base, Made) and base.call.target in NAMESPACES and name in base.call.keywords:
            return base.call.keywords[name]
        if isinstance(base, Attr) and base.name == "module" and (inner := wrapped_by(base.base)):
            held = self.attribute(inner, name)
            return held if not isinstance(held, Attr) else Attr(base, name, parents=(base,))
        return Attr(base, name, parents=(base,))

    def _of_class(self, of: Class, owner: Object | None, name: str) -> Value | None:
        """A class's attribute; a method is bound to its owner, a property is run."""
        found = self.names.get((of.scope, name))
        if found is None:
            inherited = (
                self._of_class(base, owner, name) for base in of.bases if isinstance(base, Class)
            )
            return next((value for value in inherited if value is not None), None)
        if not isinstance(found, Function) or owner is None:
            return found
        kinds = {d.name for d in found.decorators if isinstance(d, Dotted)}
        if "builtins.staticmethod" in kinds:
            return found
        bound = Function(found.node, found.scope, owner, of, found.decorators, parents=(owner,))
        if kinds & {"builtins.property", "functools.cached_property"}:
            return self.enter(bound, (), {}, None)
        return bound

    def _subscript(self, node: ast.Subscript, scope: Scope) -> Value:
        base, key = self.value(node.value, scope), self.value(node.slice, scope)
        if isinstance(base, Dotted) and base.name == "os.environ":
            return self.made("os.environ", node, (key,))
        if isinstance(key, Constant):
            if isinstance(base, Mapping) and key.value in base.entries:
                return base.entries[key.value]
            if (
                isinstance(base, Items)
                and isinstance(key.value, int)
                and -len(base.items) <= key.value < len(base.items)
            ):
                return base.items[key.value]
        return Computed("Index", node, parents=(base, key))

    def _tuple(self, node: ast.Tuple | ast.List | ast.Set, scope: Scope) -> Value:
        items = tuple(self.value(item, scope) for item in node.elts)
        if any(isinstance(item, ast.Starred) for item in node.elts):
            return Value(parents=items)
        return Items(items, parents=items)

    _list = _set = _tuple

    def _starred(self, node: ast.Starred, scope: Scope) -> Value:
        return self.value(node.value, scope)

    def _dict(self, node: ast.Dict, scope: Scope) -> Value:
        entries, rest = {}, []
        for key, item in zip(node.keys, node.values, strict=True):
            value = self.value(item, scope)
            if isinstance(key, ast.Constant):
                entries[key.value] = value
            elif key is None and isinstance(value, Mapping):
                entries.update(value.entries)
            else:
                rest.append(value)
        return Mapping(entries, parents=(*entries.values(), *rest))

    def settle(
        self,
        function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
        scope: Scope,
        call: ast.AST,
    ) -> None:
        """Parameters that this call of a function gives as literals (or leaves at a literal), and
        that stay as they are."""
        wanted = function.args
        names = [
            argument.arg for argument in (*wanted.posonlyargs, *wanted.args, *wanted.kwonlyargs)
        ]
        changed = {part.id for part in self.stored_in(function)}
        given = (
            [*call.args, *(keyword.value for keyword in call.keywords)]
            if isinstance(call, ast.Call)
            else []
        )
        literals = [
            part
            for part in (*given, *wanted.defaults, *wanted.kw_defaults)
            if isinstance(part, ast.Constant)
        ]
        for name in names:
            value = self.names.get((scope, name))
            if (
                isinstance(value, Constant)
                and name not in changed
                and any(part.value is value.value for part in literals)
            ):
                self.settled.add((scope, name))

    def decided(self, test: ast.expr, scope: Scope) -> bool | None:
        """How a test on a settled parameter comes out: `flag`, `not flag`."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.decided(test.operand, scope)
            return None if inner is None else not inner
        if isinstance(test, ast.Name) and (scope, test.id) in self.settled:
            value = self.names.get((scope, test.id))
            return (
                bool(value.value)
                if isinstance(value, Constant) and isinstance(value.value, bool | None)
                else None
            )
        return None

    def _ifexp(self, node: ast.IfExp, scope: Scope) -> Value:
        way = self.decided(node.test, scope)
        if way is not None:
            return self.value(node.body if way else node.orelse, scope)
        test = self.value(node.test, scope)
        found = []
        for part, taken in ((node.body, True), (node.orelse, False)):
            with self.within(Branch(node, test, taken)):
                found.append(self.value(part, scope))
        return either(found, (test,))

    def special(self, value: Value, name: str, *args: Value) -> Value | None:
        """What a class of the script gives by a special method: `folder / "model.pt"`, `meter +=
        loss`, `with Job():`."""
        method = self.attribute(value, f"__{name}__") if isinstance(value, Object) else None
        return self.enter(method, args, {}, None) if isinstance(method, Function) else None

    def _binop(self, node: ast.BinOp, scope: Scope) -> Value:
        left, right = self.value(node.left, scope), self.value(node.right, scope)
        op = type(node.op).__name__
        return self.special(left, OPERATORS.get(op, op), right) or Computed(
            op, node, parents=(left, right)
        )

    def _boolop(self, node: ast.BoolOp, scope: Scope) -> Value:
        """`a and f()`: what follows stands in a branch."""
        first = self.value(node.values[0], scope)
        with self.within(Branch(node, first, isinstance(node.op, ast.And))):
            rest = [self.value(part, scope) for part in node.values[1:]]
        return Computed(type(node.op).__name__, node, parents=(first, *rest))

    def _compare(self, node: ast.Compare, scope: Scope) -> Value:
        parts = (
            self.value(node.left, scope),
            *(self.value(part, scope) for part in node.comparators),
        )
        return Computed(type(node.ops[0]).__name__, node, parents=parts)

    def _joinedstr(self, node: ast.JoinedStr, scope: Scope) -> Value:
        parts = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
        return Computed("FString", node, parents=tuple(self.value(part, scope) for part in parts))

    def _lambda(self, node: ast.Lambda, scope: Scope) -> Value:
        return Function(node, scope)

    def _namedexpr(self, node: ast.NamedExpr, scope: Scope) -> Value:
        value = self.value(node.value, scope)
        self.names[scope, node.target.id] = value
        return value

    def _await(self, node: ast.Await | ast.YieldFrom, scope: Scope) -> Value:
        return self.value(node.value, scope)

    _yieldfrom = _await

    def _yield(self, node: ast.Yield, scope: Scope) -> Value:
        self.yields.append((self.context, self.value(node.value, scope)))
        return Value()

    def _listcomp(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, scope: Scope
    ) -> Value:
        own, depth, tests = Scope(scope.file, scope), len(self.stack), []
        for part in node.generators:
            over = self.value(part.iter, own)
            self.stack.append(Loop(part, over, scope.file))
            self.bind(part.target, self.item_of(over), own)
            for test in part.ifs:
                tests.append(self.value(test, own))
                self.stack.append(Branch(test, tests[-1], True))
        made = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        value = Computed(
            "Comprehension", node, parents=(*(self.value(part, own) for part in made), *tests)
        )
        del self.stack[depth:]
        return value

    _setcomp = _generatorexp = _dictcomp = _listcomp

    def _call(self, node: ast.Call, scope: Scope) -> Value:
        return self.call(node, scope)

    def item_of(self, over: Value) -> Value:
        """What one turn of a loop over this gives. `enumerate(xs)` gives a pair, of which the
        second is of xs; so does zip."""
        if isinstance(over, Made):
            name, inner = over.call.target, over.call.args
            if name == "builtins.enumerate" and inner:
                pair = (Computed("Count", over.call.node, parents=(over,)), self.item_of(inner[0]))
                return Items(pair, parents=(over, *pair))
            if name == "builtins.zip":
                items = tuple(self.item_of(value) for value in inner)
                return Items(items, parents=(over, *items))
            if name.startswith("tqdm") and inner:
                return self.item_of(inner[0])
        if isinstance(over, Generated) and over.each is not None:
            return over.each
        if isinstance(over, Items) and any(
            isinstance(item, Object) for item in over.items
        ):  # `for callback in self.callbacks`
            return either(over.items, ())
        return Computed("Item", getattr(over, "node", None), parents=(over,))

    def bind(self, target: ast.expr, value: Value, scope: Scope) -> None:
        """Give a value to a name, an attribute, an entry, or to several names."""
        if isinstance(target, ast.Name):
            self.names[self.globals_of.get((scope, target.id), scope), target.id] = value
        elif isinstance(target, ast.Attribute):
            base = self.value(target.value, scope)
            for option in options(base):
                if isinstance(option, Object | Class):
                    self.names[option.scope, target.attr] = value
                elif isinstance(option, Made) and role_of_made(option.call.target) == "arguments":
                    self._store_option(option, target.attr, value)
            self.store(target, base, target.attr, value)
        elif isinstance(target, ast.Subscript):
            base, key = self.value(target.value, scope), self.value(target.slice, scope)
            if isinstance(base, Mapping) and isinstance(key, Constant):
                base.entries[key.value] = value
                base.parents = (*base.parents, value)
            self.store(target, base, "[]", value)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, Value(parents=(value,)), scope)
        elif isinstance(target, ast.Tuple | ast.List):
            self._unpack(target, value, scope)

    def _store_option(self, arguments: Made, name: str, value: Value) -> None:
        """`args.save = args.out and rank == 0`. What is called a rank is one, wherever it came
        from."""
        if name not in RANK_NAMES:
            scope = arguments.known.setdefault("scope", Scope(self.file))
            self.names.before((scope, name), Attr(arguments, name, parents=(arguments,)))
            self.names[scope, name] = value

    def _unpack(self, target: ast.Tuple | ast.List, value: Value, scope: Scope) -> None:
        if isinstance(value, Choice):  # (a, b) on one way, (c, d) on the other
            pairs = [
                option.items
                for option in value.options
                if isinstance(option, Items) and len(option.items) == len(target.elts)
            ]
            if len(pairs) == len(value.options):
                joined = tuple(either(way, value.tests) for way in zip(*pairs, strict=True))
                value = Items(joined, parents=joined)
        known = (
            value.items
            if isinstance(value, Items) and len(value.items) == len(target.elts)
            else None
        )
        for number, part in enumerate(target.elts):
            self.bind(
                part, known[number] if known else Computed("Part", target, parents=(value,)), scope
            )

    def library(self, name: str) -> Dotted:
        return Dotted(canonical(name), name)
