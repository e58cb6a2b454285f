"""Compute an expression's value on each rank of a two-rank job, if the script alone determines
it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from paralab.doctor.static.bindings import dotted_key
from paralab.doctor.static.context import If
from paralab.doctor.static.facts import DEEPEST, Call
from paralab.doctor.static.names import kind_of_made, meaning
from paralab.doctor.static.origins import Origins
from paralab.doctor.static.project import Definition, Project, Scope

WORLD = 2  # ranks in the assumed job, all on one machine
MOST_EVALUATIONS = 20_000


class Special(Enum):
    UNKNOWN = "unknown"
    OBJECT = "object"  # stands for an unknown object, which is true and not None


UNKNOWN, OBJECT = Special.UNKNOWN, Special.OBJECT
RANK_VARIABLES = frozenset(
    (
        "RANK LOCAL_RANK SLURM_PROCID SLURM_LOCALID OMPI_COMM_WORLD_RANK "
        "OMPI_COMM_WORLD_LOCAL_RANK PMI_RANK MV2_COMM_WORLD_LOCAL_RANK"
    ).split()
)
_WORLD_VARIABLES = frozenset(
    "WORLD_SIZE LOCAL_WORLD_SIZE SLURM_NTASKS OMPI_COMM_WORLD_SIZE SLURM_NPROCS".split()
)
_SET_BY_LAUNCHERS = RANK_VARIABLES | _WORLD_VARIABLES | {"MASTER_ADDR", "MASTER_PORT"}
ALWAYS_TRUE = frozenset(
    f"torch.distributed.{name}"
    for name in ("is_initialized", "is_available", "is_nccl_available", "is_torchelastic_launched")
) | {"torch.cuda.is_available"}
_CONVERSIONS = {"builtins.int": int, "builtins.bool": bool, "builtins.str": str}
_BINARY: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}
_COMPARE: dict[type[ast.cmpop], Any] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
Env = dict[str, Any]  # values of parameters by name, in one call
At = tuple[Scope, int, Env]  # the context of an evaluation: scope, rank, parameters


class Values(Origins):
    def __init__(self, path: Path, project: Project | None = None) -> None:
        super().__init__(path, project)
        self._values: dict[tuple[ast.AST, int], Any] = {}
        self._evaluating: set[Any] = set()
        self._reaching: dict[tuple[ast.AST, int | None], list[Definition]] = {}
        self._cuts, self._budget = 0, MOST_EVALUATIONS

    def reaching(self, node: ast.AST, scope: Scope, rank: int | None = None) -> list[Definition]:
        if self._evaluating:
            return super().reaching(node, scope, rank)  # a cycle may have cut this short
        key = node, rank
        if key not in self._reaching:
            self._reaching[key] = super().reaching(node, scope, rank)
        return self._reaching[key]

    @property
    def is_exhausted(self) -> bool:
        """Whether evaluation was cut short. If so, a value may be known on only one of two ranks,
        so nothing is certain."""
        return self._budget <= 0

    # --- truth

    def decide(
        self, test: If, scope: Scope, rank: int | None, env: Env | None = None
    ) -> bool | None:
        """Return whether this rank takes a branch, or None if that is unknown. Without a rank,
        return None also if the ranks differ."""
        ranks = (0, 1) if rank is None else (rank,)
        found = {self.truth(test.test, scope, one, env) for one in ranks}
        return next(iter(found)) == test.taken if len(found) == 1 and None not in found else None

    def truth(self, test: ast.expr, scope: Scope, rank: int, env: Env | None = None) -> bool | None:
        value = self.evaluate(test, scope, rank, env)
        if value is UNKNOWN:
            return None
        return True if value is OBJECT else bool(value)

    def differs(self, test: ast.expr, scope: Scope, env: tuple[Env, Env] | None = None) -> bool:
        """Return whether a condition is definitely true on one rank and false on the other."""
        pair = env or ({}, {})
        return {self.truth(test, scope, rank, pair[rank]) for rank in (0, 1)} == {True, False}

    # --- expressions

    def evaluate(self, node: ast.AST, scope: Scope, rank: int, env: Env | None = None) -> Any:
        """Return the value of an expression on one rank: a constant, OBJECT, or UNKNOWN."""
        if isinstance(node, ast.Constant):
            return node.value
        key = (node, rank)
        if not env and key in self._values:
            return self._values[key]
        busy = (node, rank, bool(env))
        if busy in self._evaluating or self.depth > DEEPEST or self._budget <= 0:
            self._cuts += 1
            return UNKNOWN
        cuts, self._budget = self._cuts, self._budget - 1
        self._evaluating.add(busy)
        self.depth += 1
        try:
            value = self._evaluate(node, (scope, rank, env or {}))
        except (TypeError, ValueError, ZeroDivisionError, OverflowError):
            value = UNKNOWN
        finally:
            self.depth -= 1
            self._evaluating.discard(busy)
        complete = cuts == self._cuts or not self._evaluating  # otherwise, a cycle cut this short
        if not env and (complete or value is not UNKNOWN):
            self._values[key] = value
        return value

    def _evaluate(self, node: ast.AST, at: At) -> Any:
        match node:
            case ast.UnaryOp(ast.Not(), operand):
                truth = self.truth(operand, *at)
                return UNKNOWN if truth is None else not truth
            case ast.UnaryOp(ast.USub(), operand):
                value = self.evaluate(operand, *at)
                return -value if isinstance(value, (int, float)) else UNKNOWN
            case ast.BoolOp(op, values):
                decisive = isinstance(op, ast.Or)
                truths = [self.truth(part, *at) for part in values]
                if decisive in truths:
                    return decisive
                return UNKNOWN if None in truths else not decisive
            case ast.Compare(left, [op], [right]):
                return self._compare(op, left, right, at)
            case ast.BinOp(left, op, right):
                one, two = (self.evaluate(part, *at) for part in (left, right))
                known = isinstance(one, (int, float, str)) and isinstance(two, (int, float, str))
                return _BINARY[type(op)](one, two) if known and type(op) in _BINARY else UNKNOWN
            case ast.IfExp(test, body, orelse):
                truth = self.truth(test, *at)
                parts = (body, orelse) if truth is None else (body if truth else orelse,)
                return _only(self.evaluate(part, *at) for part in parts)
            case ast.Tuple(elements) | ast.List(elements) | ast.Set(elements):
                found = [self.evaluate(part, *at) for part in elements]
                return OBJECT if UNKNOWN in found else tuple(found)
            case ast.Subscript() if self.resolve(node.value, at[0]) == "os.environ":
                return _environment(node.slice, at[1])
            case ast.Subscript(_, ast.Constant(str() as key)):  # `config["rank"]`
                return by_meaning(key, at[1])
            case ast.Call() if node in self.call_at:
                return self._evaluate_call(self.call_at[node], at)
            case ast.Name() | ast.Attribute():
                return self._evaluate_name(node, at)
            case ast.JoinedStr() | ast.Dict() | ast.Lambda():
                return OBJECT
        return UNKNOWN

    def _compare(self, op: ast.cmpop, left: ast.expr, right: ast.expr, at: At) -> Any:
        is_identity = isinstance(op, (ast.Is, ast.IsNot))
        if isinstance(op, (ast.In, ast.NotIn)) and dotted_key(right) == "os.environ":
            known = self.evaluate(left, *at) in _SET_BY_LAUNCHERS
            return isinstance(op, ast.In) if known else UNKNOWN
        pair = [self.evaluate(part, *at) for part in (left, right)]
        if UNKNOWN in pair or (OBJECT in pair and not is_identity) or pair == [OBJECT, OBJECT]:
            return UNKNOWN
        return _COMPARE[type(op)](*pair)

    def _evaluate_call(self, call: Call, at: At) -> Any:
        (_, rank, env), target, given = at, call.target, call.node.args
        if target in ("os.environ.get", "os.getenv") and given:
            return _environment(given[0], rank)
        if target in ALWAYS_TRUE:
            return True
        if target == "builtins.len":
            return env.get("len()", UNKNOWN)
        if target in _CONVERSIONS and len(given) == 1:
            value = self.evaluate(given[0], *at)
            return UNKNOWN if isinstance(value, Special) else _CONVERSIONS[target](value)
        if target == "builtins.getattr" and len(given) > 1 and isinstance(given[1], ast.Constant):
            return by_meaning(str(given[1].value), rank)
        kind = kind_of_made(target) if target else None
        if kind in ("rank", "world"):
            return rank if kind == "rank" else WORLD
        value = UNKNOWN
        if call.function is not None and call.made is None:
            value = self.run(call.function, self.bind(call, call.function, rank, env), rank)
        if value is UNKNOWN:
            value = by_meaning(call.method, rank)
        makes_object = call.made is not None or call.method[:1].isupper()
        if value is UNKNOWN and (makes_object or call.method in ("getLogger", "open")):
            return OBJECT
        return value

    def _evaluate_name(self, node: ast.Name | ast.Attribute, at: At) -> Any:
        scope, rank, env = at
        key = dotted_key(node)
        if key in env:
            return env[key]
        if key == "__name__":
            return "__main__" if scope.module is self.modules[0] else scope.module.name
        found = self.resolve(node, scope) if isinstance(node, ast.Attribute) else None
        if isinstance(found, Scope) and {"property", "cached_property"} & set(found.decorators):
            value = self.run(found, {}, rank)
            if value is not UNKNOWN:
                return value
        definitions = self.reaching(node, scope, rank)
        value = _only(self._evaluate_definition(one, rank, env) for one in definitions)
        last = (key or "").rpartition(".")[2]
        # The launcher passes `--local_rank`, even if the script sets it to 0 for runs that are not
        # distributed.
        is_passed = last in self.flags and key is not None and self.lookup(key, scope) is None
        return by_meaning(last, rank, value) if value is UNKNOWN or is_passed else value

    def _evaluate_definition(self, definition: Definition, rank: int, env: Env) -> Any:
        scope, value = definition.scope, definition.value
        if definition.how == "parameter":
            if self.is_spawned(scope) and scope.parameters[:1] == [definition.node]:
                return rank
            given = self.arguments_for(definition)
            return _only(self.evaluate(argument, where, rank) for argument, where in given)
        if definition.how in ("assign", "augmented") and value is not None:
            return self.evaluate(value, scope, rank, env)
        if definition.how in ("function", "class", "import"):
            return OBJECT
        call, index = self.call_at.get(value) if value else None, definition.index
        if call and call.function and index is not None:  # `rank, world = get_dist_info()`
            returned = self.run(call.function, self.bind(call, call.function, rank), rank)
            if isinstance(returned, tuple) and index < len(returned):
                return returned[index]
        return UNKNOWN

    def usual_value(self, node: ast.expr, scope: Scope) -> Any:
        """Return the default of a setting: of `args.n`, `config.get("n", 1)`, or `int(config.n)`,
        also through variables. Return None if it is not a constant."""
        named = self.defaults.get((dotted_key(node) or "").rpartition(".")[2])
        for _ in range(4):
            own = self.reaching(node, scope)
            if isinstance(node, ast.Call):
                name, given = dotted_key(node.func) or "", node.args
                falls_back = len(given) > 1 and name.rpartition(".")[2] in ("get", "getattr")
                if not falls_back and not (name == "int" and given):
                    break
                node = given[-1] if falls_back else given[0]
            elif len(own) == 1 and own[0].how == "assign" and own[0].value not in (None, node):
                node, scope = own[0].value or node, own[0].scope
            else:
                node = self.defaults.get((dotted_key(node) or "").rpartition(".")[2], node)
        found = node if isinstance(node, ast.Constant) else named
        return found.value if isinstance(found, ast.Constant) else None

    # --- functions

    def bind(self, call: Call, function: Scope, rank: int, env: Env | None = None) -> Env:
        """Return the values of a call's arguments, by parameter name."""
        names = [one.arg for one in function.parameters]
        if function.owner is not None and names[:1] in (["self"], ["cls"]):
            names = names[1:]
        bound: Env = {key: value for key, value in (env or {}).items() if "." in key or "(" in key}
        for place, name in enumerate(names):
            value, default = call.argument(place, name), function.default_of(name)
            if value is not None:
                bound[name] = self.evaluate(value, call.scope, rank, env)
            elif not call.unpacks and default is not None:
                bound[name] = self.evaluate(default, function.parent or function, rank)
        return bound

    def run(self, function: Scope, env: Env, rank: int) -> Any:
        """Return what a project function returns on a rank."""
        key = (function, rank)
        if key in self._evaluating or self.depth > DEEPEST:
            self._cuts += 1
            return UNKNOWN
        self._evaluating.add(key)
        try:
            if isinstance(function.node, ast.Lambda):
                return self.evaluate(function.node.body, function, rank, env)
            block = getattr(function.node, "body", [])
            values = list(self._returns(block, (function, rank, env)))
            return _only(values) if values else None
        finally:
            self._evaluating.discard(key)

    def _returns(self, block: list[ast.stmt], at: At) -> Iterator[Any]:
        """Yield the values that a block may return, up to the first certain return."""
        for statement in block:
            if isinstance(statement, ast.Return):
                yield self.evaluate(statement.value, *at) if statement.value else None
                return
            if isinstance(statement, ast.If):
                truth = self.truth(statement.test, *at)
                if truth is not None:
                    chosen = statement.body if truth else statement.orelse
                    found = list(self._returns(chosen, at))
                    yield from found
                    if found and any(isinstance(one, (ast.Return, ast.If)) for one in chosen):
                        return
                else:
                    yield from self._returns(statement.body, at)
                    yield from self._returns(statement.orelse, at)
            elif isinstance(statement, (ast.Try, ast.With)):
                found = list(self._returns(statement.body, at))
                yield from found
                if found:
                    return
            elif isinstance(statement, (ast.For, ast.While)):
                yield from self._returns(statement.body, at)

    def is_spawned(self, function: Scope) -> bool:
        """Return whether the function starts once per rank, with the rank as its first argument."""
        entries = (
            (call.argument(0, "fn"), call) for call in self.methods("spawn", "start_processes")
        )
        return any(self.resolve(entry, call.scope) is function for entry, call in entries)


def _environment(key: ast.expr, rank: int) -> Any:
    """Return the value of an environment variable on a rank: `os.environ["RANK"]`."""
    name = key.value if isinstance(key, ast.Constant) else None
    if name in RANK_VARIABLES:
        return str(rank)
    return str(WORLD) if name in _WORLD_VARIABLES else UNKNOWN


def _only(values: Iterable[Any]) -> Any:
    """Return the value if all values are equal, or else UNKNOWN. Stop at the first that differs."""
    first: list[Any] = []
    for value in values:
        if value is UNKNOWN or (first and (type(value) is not type(first[0]) or value != first[0])):
            return UNKNOWN
        first = first or [value]
    return first[0] if first else UNKNOWN


def by_meaning(name: str, rank: int, otherwise: Any = UNKNOWN) -> Any:
    """Return the value that a name such as `local_rank` or `is_main_process` usually has."""
    kind = meaning(name.removeprefix("get_")) if name else None
    values = {"rank": rank, "world": WORLD, "main": rank == 0, "distributed": True}
    return values.get(kind or "", otherwise)
