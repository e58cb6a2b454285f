"""Calls of a symbolic run: what is called, under its canonical name, and what comes back. Functions
of the script are run."""

from __future__ import annotations

import ast
import itertools
from dataclasses import replace
from typing import Any

from paralab.doctor.script.agreed import mark
from paralab.doctor.script.expressions import Expressions, wrapped_by
from paralab.doctor.script.naming import canonical, role_of_made
from paralab.doctor.script.state import MOST_STEPS
from paralab.doctor.script.values import (
    Attr,
    Branch,
    Call,
    Choice,
    Class,
    Computed,
    Constant,
    Context,
    Dotted,
    Entered,
    Function,
    Generated,
    Items,
    Loop,
    Made,
    Mapping,
    Object,
    Parameter,
    Scope,
    Value,
    With,
    either,
    options,
)

MOST_RUNS = 6  # of one function: each run may come from another place
DEEPEST = 25
# A module's methods that give the module back, and functions that give back what they were given,
# wrapped in what does not matter.
SAME = {
    "to",
    "cuda",
    "cpu",
    "train",
    "eval",
    "float",
    "double",
    "half",
    "bfloat16",
    "requires_grad_",
    "xpu",
    "to_empty",
}
PASSED_ON = {
    "torch.compile",
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
    "copy.copy",
    "typing.cast",
}
ADDS = {"append", "extend", "appendleft", "insert"}
EXITS = {"sys.exit", "builtins.exit", "builtins.quit", "os._exit", "os.abort"}
SPAWNS = {
    "torch.multiprocessing.spawn",
    "torch.multiprocessing.start_processes",
    "torch.multiprocessing.spawn.spawn",
}
PROCESSES = {"torch.multiprocessing.Process", "multiprocessing.Process"}
Keywords = dict[str, Value]
Ways = tuple[tuple[Value, bool], ...]  # the tests on the way, and how they came out


class Calls(Expressions):
    def __init__(self) -> None:
        super().__init__()
        self.active: list[Function] = []
        self.returns: list[list[tuple[Value, Ways]]] = []
        self.runs: dict[ast.AST, int] = {}
        self.turns: dict[
            tuple[ast.AST, Scope], int
        ] = {}  # as runs, but a closure counts for each function that it wraps
        self.last: dict[ast.AST, Value] = {}  # what a function gave when it was run last
        self.objects: dict[ast.ClassDef, Object] = {}
        self.entered: list[Value] = []  # by ExitStack.enter_context

    def block(self, statements: list[ast.stmt], scope: Scope) -> bool:
        raise NotImplementedError

    def call(self, node: ast.Call, scope: Scope) -> Value:
        receiver = None
        if isinstance(node.func, ast.Attribute):
            receiver = self.value(node.func.value, scope)
            function = self.attribute(receiver, node.func.attr)
            if isinstance(receiver, Dotted):
                receiver = None
            elif not any(
                isinstance(way, Attr | Function | Class | Dotted) for way in options(function)
            ):
                receiver = function  # `self.net(x)` calls what self holds
        else:
            function = self.value(node.func, scope)
            if isinstance(function, Attr):
                receiver = function.base
            elif not isinstance(function, Dotted | Function | Class):
                receiver = function
        args: list[Value] = []
        for part in node.args:
            value = self.value(part, scope)
            args.extend(
                value.items
                if isinstance(part, ast.Starred) and isinstance(value, Items)
                else [value]
            )
        keywords: Keywords = {}
        for keyword in node.keywords:
            value = self.value(keyword.value, scope)
            if keyword.arg:
                keywords[keyword.arg] = value
            elif isinstance(value, Mapping):
                keywords.update(
                    {key: entry for key, entry in value.entries.items() if isinstance(key, str)}
                )
            else:
                keywords["**"] = value
        return self.invoke(function, receiver, tuple(args), keywords, node)

    def invoke(
        self,
        function: Value,
        receiver: Value | None,
        args: tuple[Value, ...],
        keywords: Keywords,
        node: ast.AST,
    ) -> Value:
        while (
            isinstance(function, Made)
            and function.call.target == "functools.partial"
            and function.call.args
        ):
            bound = function.call
            function, receiver = bound.args[0], None
            args, keywords = (*bound.args[1:], *args), {**bound.keywords, **keywords}
        ways = list(options(function))
        named = [self._target(way) for way in ways]
        target, written = next((pair for pair in named if not pair[0].startswith("?")), named[0])
        into = next((way for way in ways if isinstance(way, Function)), None)
        fields = {
            "function": function,
            "receiver": receiver,
            "args": args,
            "keywords": keywords,
            "into": into,
        }
        call: Call = self.record(Call, node, target=target, written=written, **fields)
        # `quiet = model.no_sync if more else nullcontext`: what comes back is of the one or of the
        # other
        several = any(isinstance(way, Dotted) for way in ways)
        results = tuple(
            self._result(
                way,
                replace(call, target=name, written=as_written)
                if several and name != target
                else call,
            )
            for way, (name, as_written) in zip(ways, named, strict=True)
        )
        tests = function.tests if isinstance(function, Choice) else ()
        call.result = either(results, tests)
        mark(call)
        return call.result

    def _target(self, function: Value) -> tuple[str, str]:
        if isinstance(function, Dotted):
            return function.name, function.written or function.name
        if isinstance(function, Function):
            return (
                f"{function.of_class.node.name}.{function.name}"
                if function.of_class
                else function.name,
            ) * 2
        if isinstance(function, Class):
            return (function.node.name,) * 2
        if isinstance(function, Attr):
            return (self._method(function.base, function.name),) * 2
        return (
            (self._method(function, "__call__"),) * 2
            if isinstance(function, Object | Made)
            else ("?", "?")
        )

    def _method(self, base: Value, name: str) -> str:
        """`torch.amp.GradScaler.step` where the receiver's class is known, else `?.step`."""
        found = "?"
        for option in options(base):
            if isinstance(option, Object):
                library = library_base(option.of)
                found = library.name if library else option.of.node.name
            elif isinstance(option, Made) and option.call.target.rpartition(".")[2][:1].isupper():
                found = option.call.target
            elif isinstance(option, Dotted):
                found = option.name
            if found != "?":
                break
        return canonical(f"{found}.{name}")

    def _result(self, function: Value, call: Call) -> Value:
        parents = (
            *((call.receiver,) if call.receiver else ()),
            *call.args,
            *call.keywords.values(),
        )
        if isinstance(function, Function):
            return self.enter(function, call.args, call.keywords, call)
        if isinstance(function, Class):
            return self.construct(function, call)
        if isinstance(function, Object):
            run = self.attribute(function, "forward")
            run = run if isinstance(run, Function) else self.attribute(function, "__call__")
            returned = (
                self.enter(run, call.args, call.keywords, call)
                if isinstance(run, Function)
                else Value()
            )
            return Made(call, parents=(*parents, returned))
        if isinstance(function, Made):
            return Made(call, parents=(*parents, *self._forward_of_wrapped(function, call)))
        if isinstance(function, Dotted):
            return self._library_call(function, call, parents)
        if (
            isinstance(function, Attr)
            and function.name in SAME
            and call.receiver
            and _is_model(call.receiver)
        ):
            return call.receiver
        if isinstance(function, Attr) and function.name in ADDS and call.receiver:
            for held in options(
                call.receiver
            ):  # a list that is appended to is made from what it is given
                held.parents = (*held.parents, *call.args)
                if isinstance(held, Items) and function.name == "append":
                    held.items = (*held.items, *call.args)
        if isinstance(function, Attr) and function.name == "enter_context" and call.args:
            self.entered.append(call.args[0])
            self.stack.extend(managed(call.node, call.args[0]))
            return call.args[0]
        return Made(call, parents=parents)

    def _forward_of_wrapped(self, wrapper: Made, call: Call) -> tuple[Value, ...]:
        """`ddp(x)` runs the forward of the module inside."""
        inner = wrapped_by(wrapper)
        run = self.attribute(inner, "forward") if inner else None
        return (
            (self.enter(run, call.args, call.keywords, call),) if isinstance(run, Function) else ()
        )

    def _library_call(self, function: Dotted, call: Call, parents: tuple[Value, ...]) -> Value:
        name, args = function.name, call.args
        if name == "copy.deepcopy" and args:
            return self.copied(args[0], call)
        if name in PASSED_ON and args:
            return args[-1] if name == "typing.cast" else args[0]
        if name in EXITS:
            self.leave(call.node, "exit", args[0] if args else None)
        elif name in ("os.environ.get", "os.getenv"):
            call.target = "os.environ"
        elif name == "functools.partial" and args and isinstance(args[0], Function):
            f = args[0]
            return Function(
                f.node,
                f.scope,
                f.owner,
                f.of_class,
                f.decorators,
                (*f.bound, *args[1:]),
                parents=parents,
            )
        elif name in SPAWNS and args and isinstance(args[0], Function):
            given = call.argument(1, "args")
            rank = self.made("torch.multiprocessing.spawn.rank", call.node, ())
            self.enter(
                args[0], (rank, *(given.items if isinstance(given, Items) else ())), {}, call
            )
        elif name in PROCESSES and isinstance(call.keywords.get("target"), Function):
            self._start_process(call)
        elif name == "builtins.super" and self.active:
            return self._super()
        elif name == "builtins.getattr" and len(args) > 1 and isinstance(args[1], Constant):
            return self.attribute(args[0], str(args[1].value))
        elif name in ("builtins.list", "builtins.tuple") and args and isinstance(args[0], Items):
            return args[0]
        elif name == "builtins.dict" and not args:
            return Mapping(dict(call.keywords), parents=parents)
        return Made(call, parents=parents)

    def copied(self, value: Value, call: Call) -> Value:
        """A deep copy of a module, or of what may be one, is another; any other copy is as good as
        the value."""
        if isinstance(value, Choice):
            copies = tuple(self.copied(option, call) for option in value.options)
            return Choice(copies, value.tests, parents=(*copies, *value.tests))
        if isinstance(value, Attr) and value.name == "module" and isinstance(value.base, Made):
            module = value.base.call.argument(0, "module")
            return (
                self.copied(module, call)
                if module and _is_model(value.base)
                else Made(call, parents=(value,))
            )
        if isinstance(value, Object):
            made = Object(value.of, Scope(value.scope.file), value.made)
            for (scope, name), held in list(self.names.items()):
                if scope is value.scope:
                    self.names[made.scope, name] = (
                        self.copied(held, call) if _is_model(held) else held
                    )
            return made
        if isinstance(value, Made) and _is_model(value):
            return Made(value.call)
        unknown = (
            type(value) is Value
            or isinstance(value, Attr | Parameter | Computed)
            or (isinstance(value, Made) and role_of_made(value.call.target) is None)
        )
        return Made(call, parents=(value,)) if unknown else value

    def _start_process(self, call: Call) -> None:
        """A process per rank, started by hand: the loop's variable among the arguments is the
        rank."""
        function, given = call.keywords["target"], call.keywords.get("args")
        assert isinstance(function, Function)
        items = given.items if isinstance(given, Items) else ()
        rank = self.made("torch.multiprocessing.spawn.rank", call.node, ())
        self.enter(
            function,
            tuple(
                rank if isinstance(item, Computed) and item.op == "Item" else item for item in items
            ),
            {},
            call,
        )

    def _super(self) -> Value:
        function = self.active[-1]
        if not isinstance(function.owner, Object) or not function.of_class:
            return Value()
        parent = next((base for base in function.of_class.bases if isinstance(base, Class)), None)
        return Object(parent, function.owner.scope) if parent else Value()

    def construct(self, of: Class, call: Call | None) -> Object:
        args, keywords = (call.args, call.keywords) if call else ((), {})
        made = Object(of, Scope(of.scope.file), call, parents=(*args, *keywords.values()))
        self.objects[of.node] = made
        first = self.attribute(made, "__init__")
        if isinstance(first, Function):
            self.enter(first, args, keywords, call)
        else:  # a dataclass or a named tuple
            fields = [
                s.target.id
                for s in of.node.body
                if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
            ]
            for name, value in [*zip(fields, args, strict=False), *keywords.items()]:
                self.names[made.scope, name] = value
        return made

    def enter(
        self, function: Function, args: tuple[Value, ...], keywords: Keywords, call: Any
    ) -> Value:
        """Run a function of the script with these arguments."""
        node = function.node
        given = (*args, *keywords.values())
        self.runs[node] = self.runs.get(node, 0) + 1
        self.turns[node, function.scope] = turns = self.turns.get((node, function.scope), 0) + 1
        too_much = turns > MOST_RUNS or len(self.active) > DEEPEST or self.steps > MOST_STEPS
        if too_much or any(
            active.node is node and active.scope is function.scope for active in self.active
        ):
            last = (self.last[node],) if node in self.last else ()
            return Value(parents=(*last, *given), known={"last": self.last.get(node)})
        scope = Scope(function.scope.file, function.scope)
        self._bind_parameters(function, args, keywords, scope)
        if isinstance(call, Call):
            self.settle(function.node, scope, call.node)
        managers = tuple(d for d in function.decorators if not isinstance(d, Dotted | Function))
        self.files.append(scope)
        self.active.append(function)
        self.returns.append([])
        outer, self.yields = self.yields, []
        with self.within(Entered(function, call), *((With(node, managers),) if managers else ())):
            depth = len(self.stack)
            if isinstance(node, ast.Lambda):
                self.returns[-1].append((self.value(node.body, scope), ()))
            else:
                self.block(node.body, scope)
        self.active.pop()
        self.files.pop()
        found, yielded, self.yields = self.returns.pop(), self.yields, outer
        if yielded:
            ways = [inside[depth:] for inside, _ in yielded]
            plain = len(ways) == 1 and [type(context) for context in ways[0]] == [Loop]
            first = yielded[0][1]
            parents = (*(value for _, value in yielded), *given)
            return Generated(
                _around(ways),
                first if plain else None,
                first if len(ways) == 1 else None,
                parents=parents,
            )
        self.last[node] = _returned(found)
        return self.last[node]

    def returned(self, value: Value) -> None:
        """Note what the function under way gives back, and the tests on the way there."""
        if self.returns:
            start = max(
                number for number, context in enumerate(self.stack) if isinstance(context, Entered)
            )
            ways = tuple(
                (context.test, context.taken)
                for context in self.stack[start:]
                if isinstance(context, Branch)
            )
            self.returns[-1].append((value, ways))

    def _bind_parameters(
        self, function: Function, args: tuple[Value, ...], keywords: Keywords, scope: Scope
    ) -> None:
        wanted = function.node.args
        names = [argument.arg for argument in (*wanted.posonlyargs, *wanted.args)]
        given = [*((function.owner,) if function.owner else ()), *function.bound, *args]
        defaults = dict(
            zip(names[len(names) - len(wanted.defaults) :], wanted.defaults, strict=True)
        )
        only = {
            argument.arg: default
            for argument, default in zip(wanted.kwonlyargs, wanted.kw_defaults, strict=True)
        }
        values: Keywords = dict(zip(names, given, strict=False))
        if wanted.vararg:
            rest = tuple(given[len(names) :])
            values[wanted.vararg.arg] = Items(rest, parents=rest)
        extra = {
            name: value
            for name, value in keywords.items()
            if name not in names and name not in only
        }
        if wanted.kwarg:
            values[wanted.kwarg.arg] = Mapping(dict(extra), parents=tuple(extra.values()))
        for name in (*names, *only):
            default = defaults.get(name) or only.get(name)
            if name in keywords:
                values[name] = keywords[name]
            elif name not in values:
                values[name] = self.value(default, function.scope) if default else Parameter(name)
        for name, value in values.items():
            self.names[scope, name] = value


def library_base(of: Class) -> Dotted | None:
    """The library's class that a class of the script comes from."""
    for base in of.bases:
        found = (
            base
            if isinstance(base, Dotted)
            else library_base(base)
            if isinstance(base, Class)
            else None
        )
        if found:
            return found
    return None


def _is_model(value: Value) -> bool:
    """Something whose `.to(device)` is itself: a module, not a tensor."""
    classes = (option for option in options(value) if isinstance(option, Made))
    made = any(
        call.call.target.startswith(("torch.nn.", "torch.distributed.fsdp"))
        and _is_class(call.call.target)
        for call in classes
    )
    return made or any(isinstance(option, Object) for option in options(value))


def _is_class(target: str) -> bool:
    return target.rpartition(".")[2][:1].isupper()


def managed(node: ast.AST, manager: Value) -> list[Any]:
    """The contexts that entering this opens: a generator's own, or one with-block."""
    if isinstance(manager, Generated):
        return [*manager.contexts, With(node, (manager,))]
    return [With(node, (manager,))]


def _around(ways: list[tuple[Context, ...]]) -> tuple[Context, ...]:
    """What stands around the one `yield` of a context manager, or may stand there where there are
    several, each in its branch."""
    if len(ways) == 1:
        return ways[0]
    shared = tuple(
        itertools.takewhile(lambda context: all(context in way for way in ways), ways[0])
    )
    found: list[Context] = list(shared)
    for way in ways:
        branches = [context for context in way[len(shared) :] if isinstance(context, Branch)]
        for block in (context for context in way[len(shared) :] if isinstance(context, With)):
            managers = block.managers
            for branch in reversed(branches):
                test, nothing = branch.test, Constant(None)
                pairs = [
                    (manager, nothing) if branch.taken else (nothing, manager)
                    for manager in managers
                ]
                managers = tuple(Choice(pair, (test,), parents=(*pair, test)) for pair in pairs)
            found.append(With(block.node, managers))
    return tuple(found)


def _returned(found: list[tuple[Value, Ways]]) -> Value:
    if not found:
        return Constant(None)
    if len(found) == 1:
        return found[0][0]
    tests = tuple(dict.fromkeys(test for _, ways in found for test, _ in ways))
    if len(found) == 2 and len(tests) == 1 and found[0][1] and not found[0][1][0][1]:
        found = found[::-1]  # of one test, the first option is what holds if it is true
    return either([value for value, _ in found], tests)
