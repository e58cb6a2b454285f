"""Statements of a symbolic run: every one is run once, both ways of a branch are taken, and names
are joined afterwards."""

from __future__ import annotations

import ast
from pathlib import Path

from paralab.doctor.script.calls import Calls, managed
from paralab.doctor.script.expressions import OPERATORS
from paralab.doctor.script.state import MOST_STEPS, Changes
from paralab.doctor.script.values import (
    Branch,
    Choice,
    Class,
    Computed,
    Constant,
    Context,
    Dotted,
    Function,
    Generated,
    Loop,
    Made,
    Object,
    Scope,
    Trying,
    Value,
    With,
)
from paralab.doctor.sources import python_of

MOST_BYTES = (
    500_000  # of modules that are followed; a script inside a large package does not read all of it
)


class Run(Calls):
    """The symbolic run of one script, with the modules of its folder that it imports."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.class_scopes: set[Scope] = set()
        self.defined: list[Function | Class] = []
        self.sources: dict[Path, ast.Module] = {}
        self.bytes_read = 0

    def module(self, path: Path, tree: ast.Module, name: str) -> Scope:
        scope = Scope(path)
        self.sources[path] = tree
        self.modules[name] = scope
        self.names[scope, "__name__"] = Constant(name)
        self.files.append(scope)
        for node in ast.walk(tree):
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute):
                self.added_to.setdefault(node.target.attr, []).append(node)
        self.block(tree.body, scope)
        self.files.pop()
        return scope

    def run_the_rest(self, main: Path) -> None:
        """What nothing called: entry points that a launcher calls, and code that is called from
        elsewhere."""
        for thing in list(self.defined):
            if thing.scope.file != main:
                continue
            if (
                isinstance(thing, Function)
                and thing.node not in self.runs
                and thing.scope in self.modules.values()
            ):
                self._alone(thing)
            elif isinstance(thing, Class):
                owner = self.objects.get(thing.node)
                for statement in thing.node.body:
                    if (
                        isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
                        and statement not in self.runs
                    ):
                        owner = owner or self._instance(thing)
                        method = self._of_class(thing, owner, statement.name)
                        if isinstance(method, Function) and statement not in self.runs:
                            self._alone(method)

    def _alone(self, function: Function) -> None:
        self.files.append(function.scope)
        self.enter(function, (), {}, None)
        self.files.pop()

    def _instance(self, of: Class) -> Object:
        self.files.append(of.scope)
        made = self.construct(of, None)
        self.files.pop()
        return made

    def block(self, statements: list[ast.stmt], scope: Scope) -> bool:
        """Run statements; True if they always leave (return, break, raise, …)."""
        depth = len(self.stack)
        left = False
        for statement in statements:
            self.steps += 1
            if self.steps > MOST_STEPS or self._statement(statement, scope):
                left = True
                break
        del self.stack[depth:]
        return left

    def _statement(self, node: ast.stmt, scope: Scope) -> bool:
        special = getattr(self, f"_do_{type(node).__name__.lower()}", None)
        if special:
            return bool(special(node, scope))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child, scope)
        return False

    def _do_expr(self, node: ast.Expr, scope: Scope) -> bool:
        before = len(self.happened)
        self.value(node.value, scope)
        return any(
            getattr(happening, "kind", "") == "exit" and happening.node is node.value
            for happening in self.happened[before:]
        )

    def _do_assign(self, node: ast.Assign, scope: Scope) -> None:
        value = self.value(node.value, scope)
        for target in node.targets:
            self.bind(target, value, scope)

    def _do_annassign(self, node: ast.AnnAssign, scope: Scope) -> None:
        if node.value:
            self.bind(node.target, self.value(node.value, scope), scope)

    def _do_augassign(self, node: ast.AugAssign, scope: Scope) -> None:
        held, other = self.value(node.target, scope), self.value(node.value, scope)
        op = type(node.op).__name__
        method = OPERATORS.get(op, op)
        given = self.special(held, f"i{method}", other) or self.special(held, method, other)
        self.bind(node.target, given or Computed(op, node, parents=(held, other)), scope)

    def _do_return(self, node: ast.Return, scope: Scope) -> bool:
        value = self.value(node.value, scope)
        self.returned(value)
        self.leave(node, "return", value)
        return True

    def _do_raise(self, node: ast.Raise, scope: Scope) -> bool:
        raised = self.value(node.exc, scope) if node.exc else None
        if isinstance(raised, Made) and raised.call.target == "builtins.SystemExit":
            self.leave(node, "exit", next(iter(raised.call.args), None))
        else:
            self.leave(node, "raise", raised)
        return True

    def _do_break(self, node: ast.Break, scope: Scope) -> bool:
        self.leave(node, "break")
        return True

    def _do_continue(self, node: ast.Continue, scope: Scope) -> bool:
        self.leave(node, "continue")
        return True

    def _do_if(self, node: ast.If, scope: Scope) -> bool:
        test = self.value(node.test, scope)
        known = self.decided(node.test, scope) if _is_main(test) is None else _is_main(test)
        before = len(self.entered)
        if known is not None:
            left = self.block(node.body if known else node.orelse, scope)
            self.stack.extend(With(node, (manager,)) for manager in self.entered[before:])
            return left
        body, left_body = self._way(Branch(node, test, True), node.body, scope)
        stacked = [
            Choice((manager, Constant(None)), (test,), parents=(manager, test))
            for manager in self.entered[before:]
        ]
        self.entered[before:] = stacked
        other, left_other = self._way(Branch(node, test, False), node.orelse, scope)
        if left_body and left_other:
            return True
        if left_body or left_other:  # what follows is the other way
            self.names.update_all(other if left_body else body)
            self.stack.append(Branch(node, test, left_other))
        else:
            self.names.join(body, other, test)
        # what an ExitStack has entered stays open after the branch: it may be open
        self.stack.extend(With(node, (manager,)) for manager in stacked)
        return False

    def _way(
        self, context: Context, statements: list[ast.stmt], scope: Scope
    ) -> tuple[Changes, bool]:
        """Run one way of a branch: what it changes, and whether it always leaves."""
        self.names.begin()
        with self.within(context):
            left = self.block(statements, scope)
        return self.names.undo(), left

    def _do_match(self, node: ast.Match, scope: Scope) -> None:
        subject = self.value(node.subject, scope)
        for case in node.cases:
            for part in ast.walk(case.pattern):
                if isinstance(part, ast.MatchAs | ast.MatchStar) and part.name:
                    self.names[scope, part.name] = Value(parents=(subject,))
            changes, _ = self._way(Branch(node, subject, True), case.body, scope)
            self.names.join(changes, {}, subject)

    def _do_for(self, node: ast.For | ast.AsyncFor, scope: Scope) -> None:
        over = self.value(node.iter, scope)
        self._turn(node, Loop(node, over, scope.file), scope, self.item_of(over))

    _do_asyncfor = _do_for

    def _do_while(self, node: ast.While, scope: Scope) -> None:
        self._forget_counters(node, scope)
        self._turn(node, Loop(node, self.value(node.test, scope), scope.file), scope, None)

    def _turn(
        self, node: ast.For | ast.AsyncFor | ast.While, loop: Loop, scope: Scope, item: Value | None
    ) -> None:
        """One turn of a loop stands for all of them. Afterwards it may have turned or not."""
        self._forget_counters(node, scope)
        self.names.begin()
        with self.within(loop):
            if item and not isinstance(node, ast.While):
                self.bind(node.target, item, scope)
            self.block(node.body, scope)
            if isinstance(node, ast.While):
                happened = len(self.happened)
                loop.again.append(self.value(node.test, scope))
                del self.happened[happened:]  # its calls are there already, from before the turn
        self.names.join(self.names.undo(), {})
        self.block(node.orelse, scope)

    def _forget_counters(self, node: ast.AST, scope: Scope) -> None:
        """A number that the loop changes is not the number it had before the loop."""
        for part in self.stored_in(node):
            if isinstance(self.names.get((scope, part.id)), Constant):
                before = self.names[scope, part.id]
                self.names[scope, part.id] = Computed(
                    "Varying", part, parents=(before,), known={"loop": node}
                )

    def _do_with(self, node: ast.With | ast.AsyncWith, scope: Scope) -> bool:
        depth, managers = len(self.stack), []
        for item in node.items:
            manager, before = self.value(item.context_expr, scope), len(self.entered)
            self.stack.extend(managed(item.context_expr, manager))
            entered = (
                manager.entered
                if isinstance(manager, Generated)
                else self.special(manager, "enter")
            )
            self.stack.extend(With(item.context_expr, (inner,)) for inner in self.entered[before:])
            managers.append(manager)
            if item.optional_vars:
                self.bind(item.optional_vars, entered or manager, scope)
        left = self.block(node.body, scope)
        del self.stack[depth:]
        for manager in reversed(managers):
            self.special(manager, "exit", *[Constant(None)] * 3)
        return left

    _do_asyncwith = _do_with

    def _do_try(self, node: ast.Try, scope: Scope) -> bool:
        with self.within(Trying(node, "body")):
            left = self.block(node.body, scope)
        for handler in node.handlers:
            if handler.name:
                self.names[scope, handler.name] = Value()
            changes, handled = self._way(Trying(node, "handler"), handler.body, scope)
            if not handled:
                self.names.join({}, changes)
            left = left and handled
        with self.within(Trying(node, "else")):
            left = self.block(node.orelse, scope) or left
        with self.within(Trying(node, "finally")):
            return self.block(node.finalbody, scope) or left

    _do_trystar = _do_try

    def _do_functiondef(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> None:
        decorators = tuple(self.value(decorator, scope) for decorator in node.decorator_list)
        sees = (
            scope.outer if scope in self.class_scopes and scope.outer else scope
        )  # a method does not see its class's names
        function = Function(node, sees, decorators=decorators)
        self.defined.append(function)
        for decorator in reversed(decorators):
            if isinstance(
                decorator, Function
            ):  # what it gives back takes the place of the function
                wrapped = self.enter(decorator, (function,), {}, None)
                function = wrapped if isinstance(wrapped, Function) else function
        self.names[scope, node.name] = function

    _do_asyncfunctiondef = _do_functiondef

    def _do_classdef(self, node: ast.ClassDef, scope: Scope) -> None:
        bases = tuple(self.value(base, scope) for base in node.bases)
        own = Scope(scope.file, scope)
        self.class_scopes.add(own)
        made = Class(node, own, bases, parents=bases)
        self.block(node.body, own)
        self.names[scope, node.name] = made
        self.defined.append(made)

    def _do_global(self, node: ast.Global, scope: Scope) -> None:
        top = scope
        while top.outer:
            top = top.outer
        for name in node.names:
            self.globals_of[scope, name] = top

    def _do_nonlocal(self, node: ast.Nonlocal, scope: Scope) -> None:
        for name in node.names:
            outer = scope.outer
            while outer and (outer, name) not in self.names:
                outer = outer.outer
            if outer:
                self.globals_of[scope, name] = outer

    def _do_import(self, node: ast.Import, scope: Scope) -> None:
        for alias in node.names:
            self._local_module(alias.name, self.folder)
            first = alias.name.split(".")[0]
            self.names[scope, alias.asname or first] = Dotted(alias.name if alias.asname else first)

    def _do_importfrom(self, node: ast.ImportFrom, scope: Scope) -> None:
        start = self.folder
        if node.level:
            start = scope.file.parent
            for _ in range(node.level - 1):
                start = start.parent
        name = node.module or ""
        module = self._local_module(name, start) if name else None
        for alias in node.names:
            inner = self._local_module(f"{name}.{alias.name}".strip("."), start)
            if alias.name == "*" and module:
                own = [(key[1], value) for key, value in self.names.items() if key[0] is module]
                for exported, value in own:
                    self.names[scope, exported] = value
                continue
            found = self.names.get((module, alias.name)) if module else None
            dotted = (
                Dotted(f"{name}.{alias.name}".strip("."))
                if inner
                else self.library(f"{name}.{alias.name}")
            )
            self.names[scope, alias.asname or alias.name] = found or dotted

    def _local_module(self, name: str, start: Path) -> Scope | None:
        """A module of the script's own folder (or of a package that the script is part of), run
        when it is imported first."""
        if name in self.modules:
            return self.modules[name]
        parts = name.split(".")
        homes = [
            start,
            *(parent.parent for parent in (start, *start.parents[:2]) if parent.name == parts[0]),
        ]
        for home in homes:
            for path in (
                home.joinpath(*parts).with_suffix(".py"),
                home.joinpath(*parts, "__init__.py"),
            ):
                if path.is_file() and path not in self.sources and self.bytes_read < MOST_BYTES:
                    self.bytes_read += path.stat().st_size
                    try:
                        tree = ast.parse(python_of(path), str(path))
                    except (SyntaxError, ValueError):
                        return None
                    return self.module(path, tree, name)
        return None


def _is_main(test: Value) -> bool | None:
    """`__name__ == "__main__"`"""
    if isinstance(test, Computed) and test.op == "Eq":
        values = [part.value for part in test.parents if isinstance(part, Constant)]
        if len(values) == 2 and "__main__" in values:
            return bool(values[0] == values[1])
    return None
