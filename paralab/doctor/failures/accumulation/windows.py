"""Gradient accumulation in a script: the backward passes that one optimizer step adds up.

for i, x in enumerate(loader):              turn      0 1 2 3 4 5 6 7
    f(x).backward()                         backward  x x x x x x x x
    if (i + 1) % 4 == 0: optimizer.step()   step            x       x
"""

import ast
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from paralab.doctor.failures.data.sizes import batches
from paralab.doctor.static.bindings import dotted_key
from paralab.doctor.static.facts import Call, If, Loop, With
from paralab.doctor.static.names import COLLECTIVES
from paralab.doctor.static.project import Scope, position
from paralab.doctor.static.report import code, line_of
from paralab.doctor.static.script import Env, Script, once_per_script
from paralab.doctor.static.timeline import Chain, Event, Timelines, condition, excludes, extra_tests

Expression = tuple[ast.expr, Scope]
MOST_PARTS = 300
ASSUMED = 4  # micro-batches per step if the script does not show the number
RESTARTS = -1  # the counter restarts after each step


@once_per_script
def timelines(script: Script) -> list[list[Event]]:
    """Return DDP forward passes, backward passes, steps, and manual reductions in program order."""
    if not script.methods("backward"):
        return []
    wraps = script.methods("prepare", "setup", "setup_module", "prepare_model") or any(
        "DistributedDataParallel" in module.text for module in script.modules
    )
    forwards = {
        call.last_name
        for call in (script.calls if wraps else ())
        if not call.function and script.is_kind(call.node.func, call.scope, "ddp")
    }
    methods = ("backward", "step", "zero_grad", *COLLECTIVES, *forwards)
    return list(Timelines(script, lambda call: role(script, call), methods).all())


def role(script: Script, call: Call) -> str:
    """Return the role of a call in a step, or an empty string."""
    name = call.last_name
    if name in ("backward", "step", "zero_grad") and call.receiver is not None:
        kinds = script.kinds(call.receiver, call.scope)
        is_fabric = call.target.endswith("Fabric.backward")
        if call.node.args and name == "backward" and not is_fabric:
            return ""  # accelerator.backward(loss) and engine.backward(loss) follow different rules
        if name == "step":
            return "schedule" if "scheduler" in kinds else "step" if kinds & _STEPPERS else ""
        return name
    if name in COLLECTIVES:
        return "exchange" if _sends_parameters(script, call) else ""
    return "forward" if script.is_kind(call.node.func, call.scope, "ddp") else ""


_STEPPERS = {"optimizer", "scaler"}
_NUMBERS = {"norm", "sum", "mean", "item", "numel", "len", "max", "min"}
_PARAMETERS = {"parameters", "named_parameters", "state_dict", "parameters_to_vector"}


def _sends_parameters(script: Script, call: Call) -> bool:
    """Return whether a collective sends gradients or parameters, not a number derived from them."""
    names = set()
    for given in call.node.args:
        for part, _ in parts(script, given, call.scope, items=True):
            names.add(getattr(part, "attr", getattr(part, "id", "")))
    return bool(names & {"grad", "data", *_PARAMETERS}) and not names & _NUMBERS


def averaged_by(script: Script, step: Event) -> str | None:
    """Describe what may average gradients besides DDP. Return "" if something definitely does, and
    None if nothing does."""
    packages = ("torch.distributed.algorithms.model_averaging", "torch.distributed.optim")
    if script.imports(*packages):
        return ""
    for events in timelines(script):
        for event in events:
            if event.role == "exchange" and (set(event.loops) & set(step.loops) or not step.loops):
                return ""
    for call in script.calls:
        library = not call.function and not call.target.startswith(("torch.", "builtins."))
        given = call.node.args if library and call.target and call.inside(Loop) else []
        if any(script.is_kind(one, call.scope, "ddp") for one in given) and not role(script, call):
            return f"`{code(call.node.func)}` (line {call.line})"
    return None


def parts(
    script: Script, node: ast.expr, scope: Scope, items: bool = False
) -> Iterator[Expression]:
    """Yield the parts of an expression, including those of its names' values and of the values that
    project functions return."""
    seen: set[ast.AST] = set()
    waiting = deque([(node, scope)])
    follow = {"assign", "augmented", "parameter", *(["item"] if items else [])}
    while waiting and len(seen) < MOST_PARTS:
        value, where = waiting.popleft()
        for part in script.parts(value):
            if part in seen or not isinstance(part, ast.expr):
                continue
            seen.add(part)
            yield part, where
            if isinstance(part, (ast.Name, ast.Attribute)):
                for definition in script.reaching(part, where):
                    if definition.how in follow:
                        waiting.extend(script.sources(definition))
            elif isinstance(part, ast.Call) and part in script.call_at:
                function = script.call_at[part].function
                if function is not None:
                    waiting.extend((one, function) for one in function.returns)


def modulo_in(script: Script, test: ast.expr, scope: Scope) -> tuple[ast.BinOp, Scope] | None:
    """Return the `i % n` that a condition depends on."""
    for part, where in parts(script, test, scope):
        match part:
            case ast.BinOp(left, ast.Mod()) if not isinstance(left, (ast.Constant, ast.JoinedStr)):
                return part, where
    return None


@dataclass(frozen=True, eq=False)
class Window:
    """Backward passes in a loop, and the step that uses their sum.

    `guard` is the condition that delays the step, or None if the step follows an inner loop. If
    `is_apart`, the micro-batch before the step has its own branch and backward pass.
    """

    script: Script
    backward: Event
    step: Event
    loop: tuple[Chain, Loop]
    guard: tuple[Chain, If] | None
    size: Expression | None
    counter: str
    start: int
    is_apart: bool = False

    @property
    def number(self) -> int | None:
        value = self.script.evaluate(*self.size, 0) if self.size is not None else None
        return value if isinstance(value, int) and value > 0 else None

    @property
    def is_optional(self) -> bool:
        """Whether the size is a setting whose default is 1."""
        return self.size is not None and bool(self.script.usual_value(*self.size) == 1)

    @property
    def size_text(self) -> str:
        return code(self.size[0]) if self.size is not None else "n"

    @property
    def many(self) -> str:
        """The number of backward passes, as text."""
        return str(self.number or f"`{self.size_text}`")

    @property
    def stepping(self) -> str:
        """The step and its line, as text: "`optimizer.step()` (line 7)"."""
        return f"`{code(self.step.call.node)}` ({line_of(self.step.call, self.backward.call)})"

    @property
    def length(self) -> int | None:
        """The number of iterations of the loop."""
        items = getattr(self.loop[1].node, "iter", None)
        scope = self.backward.scope_at(self.loop[0])
        return batches(self.script, items, scope) if items is not None else None

    def env(self, turn: int, length: int) -> Env:
        """Return the values of the names in iteration `turn`, counted from 0."""
        count = self.start + turn
        if self.start == RESTARTS:
            count = turn % (self.number or ASSUMED) + 1
        found: Env = {"len()": length, self.counter: count}
        key = dotted_key(self.size[0]) if self.size is not None else None
        if key is not None and self.number is None:
            found[key] = ASSUMED
        return found

    def happens(self, event: Event, env: Env) -> bool | None:
        """Return whether a call runs in this iteration."""
        inside = list(event.path)
        inside = inside[inside.index(self.loop) + 1 :] if self.loop in inside else []
        truths = [
            self.script.decide(item, event.scope_at(chain), 0, self.env_at(chain, env, item.node))
            for chain, item in inside
            if isinstance(item, If)
        ]
        return False if False in truths else None if None in truths else True

    def env_at(self, chain: Chain, env: Env, node: ast.AST) -> Env:
        """Adjust `env` for a node above the line that increments the counter, or in a function that
        the loop calls."""
        if chain == self.loop[0] and self.start == 1 and self._is_above_the_count(node):
            env = {**env, self.counter: env[self.counter] - 1}
        for call in chain[len(self.loop[0]) :]:
            if call.function is not None:
                env = self.script.bind(call, call.function, 0, env)
        return env

    def _is_above_the_count(self, node: ast.AST) -> bool:
        """Return whether a node is above `counter += 1` in the loop."""
        counts = [
            one
            for one in ast.walk(self.loop[1].node)
            if isinstance(one, ast.AugAssign) and dotted_key(one.target) == self.counter
        ]
        return len(counts) == 1 and position(node) < position(counts[0])

    def is_quiet(self, event: Event, env: Env) -> bool | None:
        """Return whether a call runs under `no_sync` in this iteration."""
        found = [
            quiet(self.script, item.item, event.scope_at(chain), self.env_at(chain, env, item.node))
            for chain, item in event.path
            if isinstance(item, With)
        ]
        return True if True in found else None if None in found else False


def quiet(
    script: Script, node: ast.expr, scope: Scope, env: Env | None = None, depth: int = 0
) -> bool | None:
    """Return whether a context manager is `no_sync`, or None if unknown."""
    match node:
        case ast.IfExp():
            truth = script.truth(node.test, scope, 0, env)
            ways = (
                [node.body, node.orelse] if truth is None else [node.body if truth else node.orelse]
            )
            found = {quiet(script, way, scope, env, depth + 1) for way in ways}
            return found.pop() if len(found) == 1 else None
        case ast.Attribute(attr="no_sync") | ast.Call(ast.Attribute(attr="no_sync")):
            return True
        case ast.Call(ast.Attribute(attr="no_backward_sync")):  # Lightning Fabric
            enabled = script.call_at[node].argument(1, "enabled")
            return True if enabled is None else script.truth(enabled, scope, 0, env)
        case ast.Call():
            call = script.call_at[node]
            function = call.function
            if function is None or call.made is not None:
                return False if call.target else quiet(script, node.func, scope, env, depth + 1)
            if len(function.returns) == 1 and depth < 6:
                inner = script.bind(call, function, 0, env)
                return quiet(script, function.returns[0], function, inner, depth + 1)
            return (
                None if any(one.method == "no_sync" for one in script.reached(function)) else False
            )
        case ast.Name() | ast.Attribute():
            if isinstance(script.resolve(node, scope), str):
                return False
            values = [
                quiet(script, one.value, one.scope, env, depth + 1)
                for one in script.reaching(node, scope)
                if one.how == "assign" and one.value is not None and depth < 6
            ]
            return values[0] if values and len(set(values)) == 1 else None
    return None


@once_per_script
def windows(script: Script) -> list[Window]:
    """Return every step that adds up multiple backward passes."""
    found: dict[Call, Window] = {}  # one for each backward pass
    for events in timelines(script):
        for place, step in enumerate(events):
            if step.role == "step":
                for window in _windows_of(script, events, place):
                    found.setdefault(window.backward.call, window)
    return list(found.values())


def _windows_of(script: Script, events: list[Event], place: int) -> Iterator[Window]:
    step = events[place]
    backwards = [one for one in events if one.role == "backward"]
    before = [one for one in events[:place] if one.role == "backward" and not excludes(one, step)]
    nearest = before[-1] if before else None
    if nearest is not None:
        inner = nearest.loops[len(step.loops) :]
        if step.loops and inner and nearest.loops[: len(step.loops)] == step.loops:
            if not _is_cleared(events, nearest):
                yield from _after_inner_loop(script, nearest, step, inner[0])
        elif nearest.loops and nearest.loops == step.loops and not _is_cleared(events, nearest):
            yield from _guarded(script, nearest, step)
    for other in backwards:
        apart = excludes(other, step) and other.loops == step.loops and bool(step.loops)
        if apart and not any(
            one.role == "step" and not excludes(one, other) and one.loops == other.loops
            for one in events
        ):
            yield from _guarded(script, other, step, is_apart=True)


def _is_cleared(events: list[Event], backward: Event) -> bool:
    """Return whether gradients are zeroed for every backward pass."""
    return any(
        event.role == "zero_grad"
        and event.loops == backward.loops
        and not extra_tests(event, backward)
        for event in events
    )


def _guarded(
    script: Script, backward: Event, step: Event, is_apart: bool = False
) -> Iterator[Window]:
    loop = step.loops[-1]
    known = backward.tests()
    for chain, item in step.path[step.path.index(loop) + 1 :]:
        if not isinstance(item, If) or isinstance(item.node, ast.While):
            continue
        text, taken = condition(item)
        if known.get((chain, text)) == taken:
            continue
        counted = _read_counter(script, item.test, step.scope_at(chain))
        if counted is not None:
            size, counter, start = counted
            yield Window(
                script, backward, step, loop, (chain, item), size, counter, start, is_apart
            )
            return


def _read_counter(
    script: Script, test: ast.expr, scope: Scope
) -> tuple[Expression, str, int] | None:
    """Return the size, the counter, and its first value in `(i + 1) % n == 0` or `seen == n`."""
    modulo = modulo_in(script, test, scope)
    if modulo is not None:
        counter = _counter(script, modulo[0].left, modulo[1])
        return ((modulo[0].right, modulo[1]), *counter) if counter is not None else None
    for part, where in parts(script, test, scope):
        match part:
            case ast.Compare(left, [ast.Eq() | ast.GtE()], [right]):
                key = dotted_key(left)
                ways = {one.how for one in script.reaching(left, where)} if key else set()
                if key is not None and "augmented" in ways and not isinstance(right, ast.Call):
                    return (right, where), key, RESTARTS
    return None


def _counter(script: Script, node: ast.expr, scope: Scope) -> tuple[str, int] | None:
    """Return the name that counts iterations and its value in the first iteration."""
    for part, where in parts(script, node, scope):
        key = dotted_key(part)
        for definition in script.reaching(part, where) if key else []:
            assert key is not None
            if definition.how == "augmented":
                return key, 1
            if definition.how == "item" and isinstance(definition.value, ast.Call):
                call = script.call_at.get(definition.value)
                name = call.target if call is not None else ""
                if name == "builtins.enumerate" and definition.index == 0 and call is not None:
                    first = call.argument(1, "start")
                    start = script.evaluate(first, definition.scope, 0) if first else 0
                    return key, start if isinstance(start, int) else 0
                if name == "builtins.range":
                    return key, 0
    return None


def _after_inner_loop(
    script: Script, backward: Event, step: Event, loop: tuple[Chain, Loop]
) -> Iterator[Window]:
    """Yield the window of `for part in batch.chunk(4): …backward()`, which a step follows."""
    items, scope = getattr(loop[1].node, "iter", None), backward.scope_at(loop[0])
    if items is None:
        return
    target = loop[1].node.target  # type: ignore[attr-defined]
    calls = [one for one in ast.walk(items) if isinstance(one, ast.Call)]
    for node in calls:
        call = script.call_at.get(node)
        if call is not None and call.target == "builtins.range" and len(node.args) == 1:
            yield Window(script, backward, step, loop, None, (node.args[0], scope), code(target), 0)
            return
        if call is not None and call.method in ("chunk", "split") and call.receiver is not None:
            size = (node.args[0], scope) if call.method == "chunk" and node.args else None
            yield Window(script, backward, step, loop, None, size, "", 0)
            return
    if script.is_kind(items, scope, "loader"):
        yield Window(script, backward, step, loop, None, None, "", 0)
