"""A script with everything that checks need to know about it, including whether its ranks agree on
a value."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cached_property, wraps
from typing import TypeVar, cast

from paralab.doctor.static.bindings import dotted_key
from paralab.doctor.static.context import If, Loop
from paralab.doctor.static.facts import SAME_VALUE, Call, once_per_node
from paralab.doctor.static.kinds import Kinds
from paralab.doctor.static.names import COLLECTIVES, GROUP_POSITION
from paralab.doctor.static.project import Definition, Scope
from paralab.doctor.static.values import (
    ALWAYS_TRUE,
    OBJECT,
    RANK_VARIABLES,
    UNKNOWN,
    WORLD,
    Env,
)

# Libraries whose functions return a value that is local to a rank if an argument is local.
_PURE = ("torch.", "numpy.", "math.", "builtins.")
_DRAWS = ("torch.rand", "torch.normal", "torch.bernoulli", "torch.multinomial")
_SEEDS = ("manual_seed", "manual_seed_all", "set_seed", "seed_everything", "set_rng_state")
_CLOCKS = ("time.time", "time.perf_counter", "time.monotonic")
_SAME = {"world", "counter", "arguments", "distributed", "device count"}
# Names of options, which are the same on every rank.
_CONFIGS = frozenset(
    (
        "args opt opts cfg config conf hparams flags params options settings training_args c hp "
        "self.args self.cfg self.config self.opt self.hparams"
    ).split()
)
T = TypeVar("T")


def once_per_script(function: Callable[[Script], T]) -> Callable[[Script], T]:
    """Cache a function's result in the script, because several checks need it."""

    @wraps(function)
    def ask(script: Script) -> T:
        if function not in script.memory:
            script.memory[function] = function(script)
        return cast(T, script.memory[function])

    return ask


class Script(Kinds):
    """The facts about a script, and what its values mean in a job of two ranks."""

    @once_per_node("same", too_deep="unknown")
    def nature(self, node: ast.AST, scope: Scope) -> str:
        """Return `same` (on all ranks), `rank` (depends on the rank), `local` (depends on this
        rank's data), or `unknown`."""
        match node:
            case ast.Constant() | ast.JoinedStr() | ast.Name("__name__"):
                return "same"
            case ast.Name() | ast.Attribute():
                return self._nature_of_name(node, scope)
            case ast.Call():
                return (
                    self._nature_of_call(self.call_at[node]) if node in self.call_at else "unknown"
                )
            case ast.Subscript() if self.resolve(node.value, scope) == "os.environ":
                known = isinstance(node.slice, ast.Constant) and node.slice.value in RANK_VARIABLES
                return "rank" if known else "same"
            case ast.Subscript() if self.is_kind(node, scope, "rank", "main"):
                return "rank"
            case ast.Lambda():
                return "unknown"
        parts = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
        return self._worst(parts, scope)

    def _worst(self, parts: list[ast.expr], scope: Scope) -> str:
        return worst([self.nature(one, scope) for one in parts])

    def _nature_of_name(self, node: ast.Name | ast.Attribute, scope: Scope) -> str:
        kinds, key = self.kinds(node, scope), dotted_key(node)
        if kinds & {"rank", "main"}:
            return "rank"
        if kinds & _SAME or (key and self.is_reduced(key, scope)):
            return "same"
        definitions = self.reaching(node, scope)
        if definitions:
            return worst([self.nature_of_definition(one) for one in definitions])
        base = self.nature(node.value, scope) if isinstance(node, ast.Attribute) else "unknown"
        return "same" if _is_config(key) and base != "local" else base

    def nature_of_definition(self, definition: Definition) -> str:
        scope = definition.scope
        if definition.how in ("function", "class", "import"):
            return "same"
        if definition.how == "parameter":
            given = [self.nature(*value) for value in self.arguments_for(definition)]
            return worst(given) if given or _is_config(definition.name) else "unknown"
        kinds = set(self.kinds_of_definition(definition)) if definition.how == "item" else set()
        if kinds & {"counter", "batch"}:
            return "same" if "counter" in kinds else "local"
        tests = [
            self.nature(one.test, scope)
            for one in self.context(definition.node, scope.module)
            if isinstance(one, If) and self.decide(one, scope, None) is None
        ]
        values = list(self.sources(definition))
        if definition.how == "item" and not any(
            self.reduces(self.call_at[one]) for one, _ in values if one in self.call_at
        ):
            values = self.unpacked(definition) or values
        here = [self.nature(*value) for value in values]
        return worst([*here, *(one for one in tests if one == "rank")])

    def _nature_of_call(self, call: Call) -> str:
        kinds = self.kinds(call.node, call.scope)
        if kinds & {"rank", "main"}:
            return "rank"
        if kinds & {*_SAME, "loader", "optimizer"} - {"counter"}:
            return "same"
        if call.target in _CLOCKS or self._draws_by_rank(call):
            return "local"
        if call.target in {*ALWAYS_TRUE, "builtins.len"}:
            return "same"
        if call.method in COLLECTIVES or call.method == "gather_for_metrics":
            return "same"
        if "output" in kinds and not self._gets_batch(call):
            return "unknown"
        if kinds & {"output", "loss"} and call.function is None:
            return "local"
        if call.function is not None:
            returned = call.function.returns
            return "same" if self.reduces(call) else self._worst(returned, call.function)
        receiver = [call.receiver] if call.receiver is not None and not call.target else []
        if not call.target.startswith(_PURE) and not receiver:
            return "unknown"
        if call.method in SAME_VALUE and receiver:  # `x.to(rank)`
            return self._worst(receiver, call.scope)
        device = call.argument(99, "device")
        given = [one for one in call.arguments if one is not device]
        return self._worst([*given, *receiver], call.scope)

    def _gets_batch(self, call: Call) -> bool:
        """Return whether a forward pass gets this rank's own batch."""
        return any(
            self.nature(one, call.scope) in ("local", "rank")
            or self.is_kind(one, call.scope, "batch")
            for one in call.node.args
        )

    def _draws_by_rank(self, call: Call) -> bool:
        """Return whether a call draws random numbers, and every seed in the script uses the rank."""
        if not call.target.startswith(_DRAWS) or call.argument(99, "generator") is not None:
            return False
        return self.seeds_differ

    @cached_property
    def seeds_differ(self) -> bool:
        calls = [call for call in self.methods(*_SEEDS) if call.target and "Gen" not in call.target]
        seeds = [(call.argument(0, "seed"), call.scope) for call in calls]
        return bool(seeds) and all(seed and self.nature(seed, at) == "rank" for seed, at in seeds)

    # --- conditions that become true at some point

    def counts(self, test: ast.AST, scope: Scope) -> bool:
        """Return whether a condition uses a counter (`step % 10 == 0`) and therefore becomes true
        at some point."""
        return any(
            isinstance(one, (ast.Name, ast.Attribute)) and self.is_kind(one, scope, "counter")
            for one in ast.walk(test)
        ) and self.comes_true(test, scope)

    def comes_true(self, test: ast.AST, scope: Scope, depth: int = 0) -> bool:
        """Return whether a condition that ranks agree on becomes true at some point: it uses only
        counters, options, and the like."""
        return all(
            self._comes_true(one, scope, depth)
            for one in ast.walk(test)
            if isinstance(one, (ast.Name, ast.Attribute)) and isinstance(one.ctx, ast.Load)
        )

    def _comes_true(self, name: ast.Name | ast.Attribute, scope: Scope, depth: int) -> bool:
        if _is_config(dotted_key(name)) or self.is_kind(name, scope, *_SAME, "rank", "main"):
            return True
        definitions = self.reaching(name, scope)
        if not definitions:
            return isinstance(self.resolve(name, scope), str)
        return depth < 4 and all(
            one.how in ("import", "function")
            or (
                one.how in ("assign", "augmented")
                and one.value is not None
                and (one.value is name or self.comes_true(one.value, one.scope, depth + 1))
            )
            for one in definitions
        )

    # --- reductions

    def is_reduced(self, key: str, scope: Scope) -> bool:
        """Return whether this name is passed to a collective, or to a project function that
        contains one."""
        known: dict[Scope, set[str | None]] = self.memory.setdefault(Script.is_reduced, {})
        if scope not in known:
            names = known[scope] = set[str | None]()
            for call in self.calls_in(scope):
                if call.method in COLLECTIVES or self.reduces(call):
                    group = call.argument(GROUP_POSITION.get(call.method, 99), "group")
                    given = [one for one in call.arguments if one is not group]
                    for loop in call.inside(Loop):  # `for each in (loss, count): all_reduce(each)`
                        if isinstance(items := getattr(loop.node, "iter", None), ast.Tuple):
                            given.extend(items.elts)
                    names.update(dotted_key(part) for one in given for part in ast.walk(one))
        return key in known[scope]

    def reduces(self, call: Call) -> bool:
        """Return whether a project function contains a collective."""
        inside = self.reached(call.function) if call.function is not None else []
        return any(one.method in COLLECTIVES for one in inside)


def worst(natures: list[str]) -> str:
    return next((one for one in ("rank", "local", "unknown") if one in natures), "same")


def _is_config(key: str | None) -> bool:
    """Return whether a name refers to options or a configuration, which are the same on every
    rank."""
    first, _, rest = (key or "").partition(".")
    return first.lower() in _CONFIGS or f"{first}.{rest.partition('.')[0]}" in _CONFIGS


__all__ = ["OBJECT", "UNKNOWN", "WORLD", "Env", "Loop", "Script"]
