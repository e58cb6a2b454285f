"""Mixed precision: GradScaler's calls in their order, and what autocast stands around."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator

from paralab.doctor.finding import Edit, Finding
from paralab.doctor.registry import check
from paralab.doctor.script.editing import function_of, inserted, statement_of, swapped
from paralab.doctor.script.naming import AUTOCAST, SCALER
from paralab.doctor.script.pointing import called, found, short
from paralab.doctor.script.questions import comes_from, is_dotted, origins, roles
from paralab.doctor.script.reading import Script
from paralab.doctor.script.turns import happens
from paralab.doctor.script.updates import (
    SCALE,
    STEP,
    UNSCALE,
    UPDATE,
    Backward,
    backwards,
    counts,
    excludes,
    optimizer_of,
    steps,
    windows,
)
from paralab.doctor.script.values import (
    Branch,
    Call,
    Computed,
    Constant,
    Dotted,
    Happening,
    Loop,
    Made,
    Value,
    With,
    options,
)

_HALF = ("torch.float16", "torch.half")


def _same(one: Value | None, other: Value | None) -> bool:
    """May two names stand for one thing?"""
    if one is None or other is None:
        return False
    return bool({id(way) for way in options(one)} & {id(way) for way in options(other)})


def _of(script: Script, target: str, scaler: Value) -> list[Call]:
    """The calls of one method of this scaler."""
    return [call for call in script.calls_of(target) if _same(call.receiver, scaler)]


def _scalers(script: Script) -> Iterator[Value]:
    """GradScalers that are not switched off, and that nobody outside of the script gets hold of."""
    given = {
        id(way)
        for call in script.calls
        if _leaves(call)
        for value in _arguments(call)
        for way in options(value)
    }
    for made in _all_scalers(script):
        if id(made) not in given and _truth(_enabled(made)) is not False:
            yield made


def _all_scalers(script: Script) -> list[Value]:
    found: dict[int, Value] = {id(call.result): call.result for call in script.calls_of(SCALER)}
    for call in script.calls_of(STEP, SCALE):
        found.update(
            {id(way): way for way in options(call.receiver or Value()) if "scaler" in roles(way)}
        )
    return list(found.values())


def _leaves(call: Call) -> bool:
    """Into code that was not read: a library's, or something unknown."""
    return (
        call.into is None
        and not call.target.startswith(("builtins.", "torch."))
        and call.method[:1].islower()
    )


def _arguments(call: Call) -> tuple[Value, ...]:
    return (*call.args, *call.keywords.values())


def _enabled(scaler: Value) -> Value | None:
    return scaler.call.keywords.get("enabled") if isinstance(scaler, Made) else None


def _truth(value: Value | None) -> bool | None:
    """True, False, or None for what cannot be read. What is not given is on."""
    if value is None:
        return True
    if isinstance(value, Constant):
        return bool(value.value)
    if (
        isinstance(value, Computed)
        and value.op in ("Is", "Eq", "IsNot", "NotEq")
        and len(value.parents) == 2
    ):
        one, other = value.parents
        if isinstance(one, Dotted) and isinstance(other, Dotted):
            return (one.name == other.name) is (value.op in ("Is", "Eq"))
    return None


def _before(every: list[Backward], call: Happening) -> Backward | None:
    """The last backward before this, on the same way through the script."""
    earlier = [
        backward
        for backward in every
        if backward.call.number < call.number and not excludes(backward.call, call)
    ]
    return earlier[-1] if earlier else None


# --- A01: clipping what is still scaled
# ------------------------------------------------------------------------------------------


@check("A01", source="script")
def clipping_scaled_gradients(script: Script) -> Iterator[Finding]:
    every = backwards(script)
    for clip in script.methods("clip_grad_norm_", "clip_grad_value_"):
        backward = _before(every, clip)
        for scaler in backward.scalers if backward else ():
            assert backward is not None
            if _truth(_enabled(scaler)) is False:
                continue
            start = backward.call.number
            unscaled = [
                u
                for u in _of(script, UNSCALE, scaler)
                if start < u.number < clip.number and not excludes(u, clip)
            ]
            step = next(
                (
                    s
                    for s in _of(script, STEP, scaler)
                    if s.number > clip.number and not excludes(s, clip)
                ),
                None,
            )
            if unscaled or step is None:
                continue
            why = (
                f"The gradients are still multiplied by the loss scale of `{called(step).rpartition('.')[0]}` (65536 at first) "
                f"when `{called(clip)}` sees them: after `scale(…).backward()` in line {backward.call.line} nothing has unscaled "
                "them, so nearly every step is cut down to a tiny one."
            )
            fix = f"Call `{_unscale(step)}` before clipping; `step` then does not unscale again."
            edits = _unscaling(script, clip, step)
            yield found(
                script, "A01", "error", clip, why, fix, also=(backward.call, step), edits=edits
            )


def _unscale(step: Call) -> str:
    """`scaler.unscale_(optimizer)` in the words of `scaler.step(optimizer)`."""
    node = step.node
    assert isinstance(node, ast.Call)
    given = ast.unparse(node.args[0]) if node.args else "optimizer"
    return f"{called(step).rpartition('.')[0]}.unscale_({given})"


def _unscaling(script: Script, clip: Call, step: Call) -> tuple[Edit, ...]:
    if clip.file != step.file or function_of(script, clip.file, clip.node) is not function_of(
        script, step.file, step.node
    ):
        return ()
    statement = statement_of(script, clip.file, clip.node)
    return inserted(script, clip.file, statement, _unscale(step)) if statement else ()


# --- A02, A03, A04, A11: the scaler's calls in the wrong number or order
# ---------------------------------------------------------


@check("A02", source="script")
def unscaled_twice(script: Script) -> Iterator[Finding]:
    for scaler in _scalers(script):
        calls, updates = _of(script, UNSCALE, scaler), _of(script, UPDATE, scaler)
        for one, other in itertools.pairwise(calls):
            if any(one.number < update.number < other.number for update in updates) or excludes(
                one, other
            ):
                continue
            if _same(one.argument(0, "optimizer"), other.argument(0, "optimizer")) and _loops(
                one
            ) == _loops(other):
                why = (
                    f"The gradients of `{_given(other)}` were already unscaled in line {one.line}, and `update()` has not been "
                    "called since: GradScaler refuses with a RuntimeError."
                )
                yield found(
                    script,
                    "A02",
                    "error",
                    other,
                    why,
                    "Unscale once per step, before the first use.",
                    also=(one,),
                )
                break
        else:
            yield from _unscaled_in_every_turn(script, scaler, calls, updates)


def _loops(call: Call) -> list[Loop]:
    return list(call.inside(Loop))


def _given(call: Call) -> str:
    return (
        short(call.node.args[0])
        if isinstance(call.node, ast.Call) and call.node.args
        else "the optimizer"
    )


def _unscaled_in_every_turn(
    script: Script, scaler: Value, calls: list[Call], updates: list[Call]
) -> Iterator[Finding]:
    for window in windows(script):
        if scaler not in window.backward.scalers or window.number == 1:
            continue
        for call in calls:
            inside = [update for update in updates if window.loop in update.context]
            if window.loop not in call.context or _varies(call, window.loop):
                continue
            early = any(
                happens(call, turn) is True
                and all(happens(update, turn) is False for update in inside)
                for turn in window.turns()
                if window.guard is not None or not inside
            )
            if early:
                why = (
                    f"`{called(call)}` runs with every micro-batch, `update()` once per window (the step is in line "
                    f"{window.step.line}): in the second micro-batch GradScaler refuses with a RuntimeError."
                )
                fix = "Unscale only where the optimizer steps, right before clipping."
                yield found(script, "A02", "error", call, why, fix, also=(window.step,))


def _varies(call: Call, loop: Loop) -> bool:
    """Another optimizer in every turn."""
    given = call.argument(0, "optimizer")
    return (
        given is not None
        and any(isinstance(o, Computed) and o.op in ("Item", "Part") for o in options(given))
        and bool(loop)
    )


@check("A03", source="script")
def never_updated(script: Script) -> Iterator[Finding]:
    for scaler in _scalers(script):
        stepping = [call for call in _of(script, STEP, scaler) if _loops(call)]
        if stepping and not _of(script, UPDATE, scaler):
            name = called(stepping[0]).rpartition(".")[0]
            why = f"`{name}.update()` is never called: the second `{called(stepping[0])}(…)` refuses with a RuntimeError."
            edits = _after(script, stepping[0], f"{name}.update()")
            fix = f"Call `{name}.update()` after every `{called(stepping[0])}(…)`."
            yield found(script, "A03", "error", stepping[0], why, fix, edits=edits)


def _after(script: Script, call: Call, text: str) -> tuple[Edit, ...]:
    """A statement after the call's own, which is a line of its own."""
    line = script.lines(call.file)[call.line - 1]
    statement = statement_of(script, call.file, call.node)
    if (
        not isinstance(statement, ast.Expr)
        or statement.end_lineno != call.line
        or line[: statement.col_offset].strip()
    ):
        return ()
    new = line[: statement.col_offset] + text
    return (Edit(script.shown(call.file), call.line + 1, call.line, (new,)),)


@check("A04", source="script")
def stepped_past_the_scaler(script: Script) -> Iterator[Finding]:
    every = backwards(script)
    for step in steps(script):
        backward = _before(every, step)
        if step.target == STEP or backward is None or backward.scaling is None:
            continue
        scalers = [scaler for scaler in _scalers(script) if scaler in backward.scalers]
        optimizer = optimizer_of(step)
        through = [call for scaler in scalers for call in _of(script, STEP, scaler)]
        if not scalers or any(_same(call.argument(0, "optimizer"), optimizer) for call in through):
            continue
        unscaled = _unscaled_before(script, scalers, step, backward)
        if unscaled is not None and _is_asked_for(step, unscaled):
            continue
        name = called(backward.scaling).rpartition(".")[0]
        stepped = called(step).rpartition(".")[0]
        if unscaled is None:
            why = (
                f"The gradients of line {backward.call.line} are multiplied by the loss scale (65536 at first), and "
                f"`{called(step)}()` uses them as they are: steps are far too large, and overflows are not skipped."
            )
        else:
            why = (
                f"`{called(unscaled)}` in line {unscaled.line} has divided the loss scale out again, but `{called(step)}()` steps "
                "whatever came out. Where float16 has overflowed, as it does while the scale is too large (65536 at first), the "
                "gradients are inf or NaN, and so are the weights from then on."
            )
        fix = f"`{name}.step({stepped})` and then `{name}.update()`."
        edits = _through_scaler(script, step, backward, scalers[0], f"{name}.step({stepped})")
        yield found(script, "A04", "error", step, why, fix, also=(backward.call,), edits=edits)


def _unscaled_before(
    script: Script, scalers: list[Value], step: Call, backward: Backward
) -> Call | None:
    """Where the gradients of this step were unscaled, after the backward."""
    calls = [call for scaler in scalers for call in _of(script, UNSCALE, scaler)]
    given = [
        call
        for call in calls
        if _same(call.argument(0, "optimizer"), optimizer_of(step)) and not excludes(call, step)
    ]
    return next((call for call in given if backward.call.number < call.number < step.number), None)


def _is_asked_for(step: Call, unscaled: Call) -> bool:
    """`if torch.isfinite(norm): optimizer.step()`: the script looks for overflows itself."""
    return any(
        branch not in unscaled.context and not counts(branch) for branch in step.inside(Branch)
    )


def _through_scaler(
    script: Script, step: Call, backward: Backward, scaler: Value, text: str
) -> tuple[Edit, ...]:
    assert backward.scaling is not None
    same_file = step.file == backward.call.file
    if not same_file or function_of(script, step.file, step.node) is not function_of(
        script, step.file, backward.scaling.node
    ):
        return ()
    edits = swapped(script, step.file, step.node, text)
    if edits and not _of(script, UPDATE, scaler):
        more = _after(script, step, f"{text.rpartition('.step(')[0]}.update()")
        return (*edits, *more) if more else ()
    return edits


@check("A11", source="script")
def never_scaled(script: Script) -> Iterator[Finding]:
    for scaler in _scalers(script):
        stepping = _of(script, STEP, scaler)
        if stepping and not _of(script, SCALE, scaler):
            name = called(stepping[0]).rpartition(".")[0]
            plain = _before(backwards(script), stepping[0])
            where = (
                f" `{called(plain.call)}()` in line {plain.call.line} starts from the loss as it is."
                if plain
                else ""
            )
            why = f"`{name}.scale(loss)` is never called, and `{called(stepping[0])}(…)` refuses with an AssertionError.{where}"
            fix = f"`{name}.scale(loss).backward()`"
            also = (plain.call,) if plain else ()
            yield found(
                script,
                "A11",
                "error",
                stepping[0],
                why,
                fix,
                also=also,
                edits=_scaling(script, plain, stepping[0], name),
            )


def _scaling(script: Script, plain: Backward | None, step: Call, name: str) -> tuple[Edit, ...]:
    """`loss.backward()` → `scaler.scale(loss).backward()`"""
    node = plain.call.node if plain else None
    if (
        not isinstance(node, ast.Call)
        or not isinstance(node.func, ast.Attribute)
        or not plain
        or plain.call.file != step.file
    ):
        return ()
    if function_of(script, step.file, node) is not function_of(
        script, step.file, step.node
    ) and not name.startswith("self."):
        return ()
    return swapped(
        script, step.file, node.func.value, f"{name}.scale({ast.unparse(node.func.value)})"
    )


# --- A05, A06, A09: number formats
# -----------------------------------------------------------------------------------------------


@check("A05", source="script")
def half_precision_parameters(script: Script) -> Iterator[Finding]:
    for scaler in _scalers(script):
        for step in _of(script, STEP, scaler):
            optimizer = step.argument(0, "optimizer")
            weights = {id(origin) for origin in origins(optimizer)} if optimizer else set()
            for call in script.methods("half", "to", "from_pretrained"):
                held = call.result if call.method == "from_pretrained" else call.receiver
                if (
                    not _to_half(call)
                    or held is None
                    or not any(id(way) in weights for way in options(held))
                ):
                    continue
                later = [
                    c
                    for c in script.methods("float", "to")
                    if c.number > call.number and _same(c.receiver, held) and not _to_half(c)
                ]
                if any(c.method == "float" for c in later):
                    continue
                why = (
                    f"This makes the parameters float16, and their gradients too. `{called(step)}(…)` in line {step.line} then "
                    "refuses: `Attempting to unscale FP16 gradients.`"
                )
                fix = "Keep the parameters in float32; autocast converts what is worth converting."
                yield found(script, "A05", "error", call, why, fix, also=(step,))


def _to_half(call: Call) -> bool:
    if call.method == "half":
        return True
    names = ("dtype", "torch_dtype") if call.method == "from_pretrained" else ("dtype",)
    given = [
        *(call.args if call.method == "to" else ()),
        *(call.keywords[name] for name in names if name in call.keywords),
    ]
    return any(is_dotted(way, name) for value in given for way in options(value) for name in _HALF)


@check("A06", source="script")
def scaler_for_bfloat16(script: Script) -> Iterator[Finding]:
    said = set()
    for backward in backwards(script):
        for scaler in backward.scalers:
            if (
                not isinstance(scaler, Made)
                or id(scaler) in said
                or _truth(_enabled(scaler)) is not True
            ):
                continue
            casts = [cast for call in backward.forwards if (cast := _autocast(call))]
            if casts and all(_is_bfloat16(cast) for cast in casts):
                said.add(id(scaler))
                line = casts[0].line
                why = (
                    f"`autocast` in line {line} computes in bfloat16, whose range is that of float32: there is nothing to scale. "
                    "The scaler costs a pass over all gradients per step, and with bfloat16 gradients on CUDA it fails."
                )
                fix = "Drop the GradScaler, or `enabled=False` for bfloat16."
                yield found(script, "A06", "warning", scaler.call, why, fix, also=(casts[0],))


def _autocast(call: Happening) -> Call | None:
    """The innermost autocast around this that is not switched off."""
    for block in call.inside(With):
        made = [
            way.call
            for manager in block.managers
            for way in options(manager)
            if isinstance(way, Made)
        ]
        for cast in made:
            if cast.target == AUTOCAST:
                on = (
                    cast.argument(0, "enabled")
                    if cast.written.startswith("torch.cuda.")
                    else cast.keywords.get("enabled")
                )
                return None if _truth(on) is False else cast
    return None


def _is_bfloat16(cast: Call) -> bool:
    given = cast.argument(1, "dtype")
    if given is None:
        device = cast.argument(0, "device_type")
        return isinstance(device, Constant) and device.value == "cpu"  # the default there
    return all(is_dotted(way, "torch.bfloat16") for way in options(given))


@check("A09", source="script")
def backward_in_autocast(script: Script) -> Iterator[Finding]:
    for backward in backwards(script):
        cast = _autocast(backward.call)
        if cast is not None and comes_from(backward.loss, "module"):
            why = (
                f"`backward` runs inside `autocast` (line {cast.line}). It uses the formats of the forward anyway; under autocast "
                "it may compute in others, and with torch.compile give wrong gradients."
            )
            fix = "End the `with` block before `backward`."
            yield found(script, "A09", "warning", backward.call, why, fix, also=(cast,))
