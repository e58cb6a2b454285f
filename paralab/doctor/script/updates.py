"""Which backward calls feed which optimizer step: every turn its own, or a window of several turns
(gradient accumulation).

for i, batch in enumerate(loader):              for batch in loader:
    (f(batch) / 4).backward()                       for micro in batch.chunk(4):
    if (i + 1) % 4 == 0:    ← guard                     (f(micro) / 4).backward()      ← the inner loop is the window
        optimizer.step()                            optimizer.step()
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from paralab.doctor.script.naming import SCALER
from paralab.doctor.script.pointing import short
from paralab.doctor.script.questions import comes_from, is_forward, origins, roles
from paralab.doctor.script.reading import Script
from paralab.doctor.script.remembering import remembered
from paralab.doctor.script.turns import Turn, counters, is_counter, length
from paralab.doctor.script.values import (
    Branch,
    Call,
    Computed,
    Constant,
    Entered,
    Happening,
    Loop,
    Made,
    Value,
    options,
    same,
)

SCALE, STEP, UPDATE, UNSCALE = (
    f"{SCALER}.{method}" for method in ("scale", "step", "update", "unscale_")
)
TAKEN = 3  # for a window whose size is not known


@dataclass(eq=False)
class Backward:
    """A backward call of plain torch. `loss` is what it starts from, without the scaling by a
    GradScaler."""

    call: Call
    loss: Value
    scaling: Call | None

    @property
    def scalers(self) -> list[Value]:
        return (
            list(options(self.scaling.receiver)) if self.scaling and self.scaling.receiver else []
        )

    @cached_property
    def forwards(self) -> list[Call]:
        """The calls of models that the loss comes from."""
        made = origins(self.loss, lambda value: isinstance(value, Made) and is_forward(value.call))
        return [value.call for value in made if isinstance(value, Made) and is_forward(value.call)]

    @cached_property
    def wrapped(self) -> list[Call]:
        """Those of them that go through DDP."""
        return [call for call in self.forwards if "ddp" in roles(call.receiver)]


@dataclass(eq=False)
class Window:
    """Several backward calls per optimizer step. `size`: how many, as a value of the script (None:
    as many as the loop has turns). `guard`: the branch that the step stands in; None where the
    window is a loop of its own inside."""

    backward: Backward
    step: Call
    loop: Loop
    guard: Branch | None
    size: Value | None

    @cached_property
    def number(self) -> int | None:
        """The size, where it is known."""
        return (
            self.size.value
            if isinstance(self.size, Constant) and isinstance(self.size.value, int)
            else None
        )

    @property
    def is_apart(self) -> bool:
        """The micro-batch before the step has a forward and a backward of its own, in the other
        branch."""
        guard = self.guard
        return guard is not None and any(
            branch.node is guard.node for branch in self.backward.call.inside(Branch)
        )

    @cached_property
    def size_text(self) -> str | None:
        """The number of backward calls per step, as it is written."""
        node: ast.AST | None
        for value in origins(self.guard.test) if self.guard else ():
            node = value.node if isinstance(value, Computed) else None
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
                return short(node.right)
            if (
                isinstance(node, ast.Compare)
                and self.number is None
                and any(part is self.size for part in value.parents)
            ):
                return short(node.comparators[0])
        node = self.loop.node
        for part in ast.walk(node.iter) if self.guard is None and isinstance(node, ast.For) else ():
            if (
                isinstance(part, ast.Call)
                and ast.unparse(part.func) == "range"
                and len(part.args) == 1
            ):
                return short(part.args[0])
        return str(self.number) if self.number else None

    def turns(self, more: int = 0) -> list[Turn]:
        """All turns of two windows, and of `more` turns after them."""
        size = self.number or TAKEN
        taken = ((self.size, size),) if self.size is not None and self.number is None else ()
        resets = dict.fromkeys(_reset_in(self.guard), size) if self.guard else {}
        return [
            Turn(self.loop, index, 2 * size + more, taken, resets)
            for index in range(2 * size + more)
        ]

    @cached_property
    def length(self) -> int | None:
        """How many turns the loop has, where it is known."""
        return length(self.loop.over)


@remembered
def backwards(script: Script) -> list[Backward]:
    found = []
    for call in script.calls:
        if (
            call.method != "backward"
            or call.receiver is None
            or not call.target.startswith(("?", "torch."))
        ):
            continue
        if (
            call.args
            and comes_from(call.args[0], "module")
            and not any(is_forward(c.call) for c in _made(call.receiver))
        ):
            continue  # engine.backward(loss): somebody else's business
        scaling = next(
            (
                made.call
                for made in options(call.receiver)
                if isinstance(made, Made) and made.call.target == SCALE
            ),
            None,
        )
        loss = scaling.args[0] if scaling and scaling.args else call.receiver
        found.append(Backward(call, loss, scaling))
    return found


def _made(value: Value) -> Iterator[Made]:
    return (origin for origin in origins(value) if isinstance(origin, Made))


def optimizer_of(call: Call) -> Value | None:
    """The optimizer that a call steps, directly or through a GradScaler."""
    if call.target == STEP:
        return call.argument(0, "optimizer")
    return call.receiver if call.method == "step" and "optimizer" in roles(call.receiver) else None


def steps(script: Script) -> list[Call]:
    return [call for call in script.methods("step") if optimizer_of(call) is not None]


@remembered
def windows(script: Script) -> list[Window]:
    every = backwards(script)
    stepping = steps(script)
    clearing = list(script.methods("zero_grad"))
    found = (_window(backward, every, stepping, clearing) for backward in every)
    return [window for window in found if window is not None]


def _window(
    backward: Backward, every: list[Backward], stepping: list[Call], clearing: list[Call]
) -> Window | None:
    call = backward.call
    loop = next(
        (loop for loop in call.inside(Loop) if not isinstance(loop.node, ast.comprehension)), None
    )
    if loop is None:
        return None
    apart = _apart(backward, loop, every, stepping)
    if apart is not None:
        return apart
    inside = [step for step in stepping if step.number > call.number and loop in step.context]
    cleared = any(
        loop in clear.context and guard_between(clear, call, loop) is None for clear in clearing
    )
    if cleared and all(guard_between(step, call, loop) for step in inside):
        return None  # the gradients of every turn are thrown away, or belong to another loop
    if inside:
        guards = [guard_between(step, call, loop) for step in inside]
        first = next(iter(guards))
        own = any(first in other.call.context for other in every if first is not None)
        if None in guards or first is None or own:
            return None
        return Window(backward, inside[0], loop, first, size_of(first))
    after = next(
        (step for step in stepping if step.number > call.number and _encloses(step, call, loop)),
        None,
    )
    if after is None:
        return None
    between = [
        other
        for other in every
        if call.number < other.call.number < after.number and loop not in other.call.context
    ]
    return None if between else Window(backward, after, loop, None, _turns_of(loop))


def _apart(
    backward: Backward, loop: Loop, every: list[Backward], stepping: list[Call]
) -> Window | None:
    """The last micro-batch has a branch of its own, with the step: `if last: f(x).backward();
    step() else: f(x).backward()`."""
    around = backward.call.context
    for branch in around[around.index(loop) + 1 :]:
        if (
            not isinstance(branch, Branch)
            or not counts(branch)
            or any(branch in step.context for step in stepping)
        ):
            continue
        for step in stepping:
            guard = next(
                (
                    c
                    for c in step.inside(Branch)
                    if c.node is branch.node and c.taken is not branch.taken
                ),
                None,
            )
            if guard is None or loop not in step.context:
                continue
            if any(
                guard in other.call.context and _of_one_model(backward, other) for other in every
            ):
                return Window(backward, step, loop, guard, size_of(guard))
    return None


def _of_one_model(one: Backward, other: Backward) -> bool:
    def models(backward: Backward) -> set[int]:
        return {
            id(way) for call in backward.forwards if call.receiver for way in options(call.receiver)
        }

    return bool(models(one) & models(other))


def _encloses(step: Call, call: Call, loop: Loop) -> bool:
    """After the inner loop, in the function or loop that the inner loop stands in."""
    around = call.context[: call.context.index(loop)]
    kept = [context for context in around if isinstance(context, Loop | Entered)]
    return loop not in step.context and all(context in step.context for context in kept)


def guard_between(happening: Happening, base: Call, loop: Loop) -> Branch | None:
    """The branch on a counter, inside the loop, that stands around this and not around the base."""
    inside = happening.context[happening.context.index(loop) + 1 :]
    for context in inside:
        if isinstance(context, Branch) and context not in base.context and counts(context):
            return context
    return None


def counts(branch: Branch) -> bool:
    """Is it taken every n-th turn? A counter modulo something, or one that starts again when it has
    reached something."""
    found = counters(branch.test)
    if not found:
        return False
    return any(_is_op(value, "Mod") and counters(value) for value in origins(branch.test)) or bool(
        _reset_in(branch)
    )


def _is_op(value: Value, *ops: str) -> bool:
    return isinstance(value, Computed) and value.op in ops


def size_of(guard: Branch) -> Value | None:
    """The number of turns after which the guard is taken."""
    for value in origins(guard.test):
        if _is_op(value, "Mod") and counters(value):
            return _constant(value.parents[1])
    for value in origins(guard.test):
        if _is_op(value, "Eq", "GtE", "Lt", "NotEq") and counters(value):
            return _constant(
                next(
                    (part for part in value.parents if not counters(part) and not is_counter(part)),
                    Constant(None),
                )
            )
    return None


def _turns_of(loop: Loop) -> Value | None:
    found = length(loop.over)
    if found is not None:
        return Constant(found)
    for value in origins(loop.over):
        if (
            isinstance(value, Made)
            and value.call.target == "builtins.range"
            and len(value.call.args) == 1
        ):
            return value.call.args[0]
    return None


def _constant(value: Value) -> Value:
    """A number written as an expression is that number."""
    if isinstance(value, Computed) and not counters(value):
        numbers = [
            part.value
            for part in value.parents
            if isinstance(part, Constant) and isinstance(part.value, int)
        ]
        if value.op == "Mult" and len(numbers) == 2:
            return Constant(numbers[0] * numbers[1])
    return value


def _reset_in(branch: Branch) -> set[str]:
    """The counters that are set to a number in a branch, as they are written; also by a method that
    is called there, or by the method that gave the test: `if self.seen == n: self.seen = 0; return
    True`."""
    body = getattr(branch.node, "body", []) if branch.taken else getattr(branch.node, "orelse", [])
    found: set[str] = set()
    for statement in body if isinstance(body, list) else []:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            found.update(ast.unparse(target) for target in statement.targets)
    attributes: set[str] = set(branch.test.known.get(("sets", branch.taken), ()))
    for test in origins(branch.test):
        if test is not branch.test:
            attributes.update(*(test.known.get(("sets", taken), ()) for taken in (True, False)))
    counting = {name for value in counters(branch.test) if (name := _name_of(value))}
    return (found & counting) | {
        name for name in counting if "." in name and name.rpartition(".")[2] in attributes
    }


def _name_of(value: Computed) -> str | None:
    if isinstance(value.node, ast.AugAssign):
        return ast.unparse(value.node.target)
    return value.node.id if isinstance(value.node, ast.Name) else None


def excludes(one: Happening, other: Happening) -> bool:
    """Never on the same way: `if amp:` here, `else:` there; also where the same is asked twice."""
    mine = [context for context in one.context if isinstance(context, Branch)]
    theirs = [context for context in other.context if isinstance(context, Branch)]
    opposite = [(a, b) for a in mine for b in theirs if a.taken is not b.taken]
    return any(
        a.node is b.node or (same(a.test, b.test) and not counters(a.test)) for a, b in opposite
    )
