"""Values in a script: their kinds, their truth on each rank, and whether ranks agree on them."""

from __future__ import annotations

import ast
import operator
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from paralab.doctor.static.facts import SAME_VALUE, Call, Facts, If, Loop, default_of
from paralab.doctor.static.names import (
    COLLECTIVES,
    is_model_class,
    kind_of_made,
    meaning,
    sounds_like,
)
from paralab.doctor.static.project import Definition, Project, Scope, dotted_key

WORLD = 2  # ranks in the assumed job, all on one machine


class Special(Enum):
    UNKNOWN = "unknown"
    OBJECT = "object"  # something that is true and is not None


UNKNOWN, OBJECT = Special.UNKNOWN, Special.OBJECT
_RANKS = frozenset(
    (
        "RANK LOCAL_RANK SLURM_PROCID SLURM_LOCALID OMPI_COMM_WORLD_RANK "
        "OMPI_COMM_WORLD_LOCAL_RANK PMI_RANK MV2_COMM_WORLD_LOCAL_RANK"
    ).split()
)
_WORLDS = frozenset(
    ["WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "SLURM_NPROCS"]
)
_TRUE = frozenset(
    f"torch.distributed.{name}"
    for name in ("is_initialized", "is_available", "is_nccl_available", "is_torchelastic_launched")
) | {"torch.cuda.is_available"}
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
# Library functions whose result is local to a rank if an argument is.
_PURE = ("torch.", "numpy.", "math.", "builtins.")
Env = dict[str, Any]
MOST_EVALUATIONS = 20_000


T = TypeVar("T")


def once_per_script(function: Callable[[Script], T]) -> Callable[[Script], T]:
    """Cache a function's result with the script, for several checks that need it."""

    @wraps(function)
    def ask(script: Script) -> T:
        if function not in script.memory:
            script.memory[function] = function(script)
        return cast(T, script.memory[function])

    return ask


class Script(Facts):
    """The facts about a script, and what its values mean in a job of two ranks."""

    def __init__(self, path: Path, project: Project | None = None) -> None:
        super().__init__(path, project)
        self._values: dict[tuple[ast.AST, int], Any] = {}
        self._kinds: dict[ast.AST, frozenset[str]] = {}
        self._evaluating: set[Any] = set()
        self._cuts, self._budget = 0, MOST_EVALUATIONS
        self._natures: dict[ast.AST, str] = {}
        self.memory: dict[Any, Any] = {}
        self._reduced: dict[Scope, set[str | None]] = {}
        self._reached: dict[Scope, list[Call]] = {}

    # --- truth on a rank

    def decide(
        self, test: If, scope: Scope, rank: int | None, env: Env | None = None
    ) -> bool | None:
        ranks = (0, 1) if rank is None else (rank,)
        found = {self.truth(test.test, scope, one, env) for one in ranks}
        return next(iter(found)) == test.taken if len(found) == 1 and None not in found else None

    def truth(self, test: ast.expr, scope: Scope, rank: int, env: Env | None = None) -> bool | None:
        value = self.evaluate(test, scope, rank, env)
        if value is UNKNOWN:
            return None
        return True if value is OBJECT else bool(value)

    def evaluate(self, node: ast.AST, scope: Scope, rank: int, env: Env | None = None) -> Any:
        """Return the value of an expression on one rank: a constant, OBJECT, or UNKNOWN."""
        key = (node, rank)
        if not env and key in self._values:
            return self._values[key]
        busy = (node, rank, bool(env))
        if busy in self._evaluating or self.is_too_deep() or self._budget <= 0:
            self._cuts += 1
            return UNKNOWN
        cuts, self._budget = self._cuts, self._budget - 1
        self._evaluating.add(busy)
        try:
            with self.deeper():
                value = self._evaluate(node, scope, rank, env or {})
        except (TypeError, ValueError, ZeroDivisionError, OverflowError):
            value = UNKNOWN
        finally:
            self._evaluating.discard(busy)
        complete = cuts == self._cuts or not self._evaluating  # else a cycle cut this short
        if not env and (complete or value is not UNKNOWN):
            self._values[key] = value
        return value

    def _evaluate(self, node: ast.AST, scope: Scope, rank: int, env: Env) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.UnaryOp(ast.Not(), operand):
                truth = self.truth(operand, scope, rank, env)
                return UNKNOWN if truth is None else not truth
            case ast.UnaryOp(ast.USub(), operand):
                value = self.evaluate(operand, scope, rank, env)
                return -value if isinstance(value, (int, float)) else UNKNOWN
            case ast.BoolOp():
                return self._evaluate_bool(node, scope, rank, env)
            case ast.Compare(left, [op], [right]):
                return self._compare(op, left, right, scope, rank, env)
            case ast.BinOp(left, op, right):
                one, two = (self.evaluate(part, scope, rank, env) for part in (left, right))
                known = isinstance(one, (int, float, str)) and isinstance(two, (int, float, str))
                return _BINARY[type(op)](one, two) if known and type(op) in _BINARY else UNKNOWN
            case ast.IfExp(test, body, orelse):
                truth = self.truth(test, scope, rank, env)
                if truth is not None:
                    return self.evaluate(body if truth else orelse, scope, rank, env)
                return _only([self.evaluate(part, scope, rank, env) for part in (body, orelse)])
            case ast.Tuple() | ast.List() | ast.Set():
                values = [self.evaluate(part, scope, rank, env) for part in node.elts]
                return OBJECT if values and UNKNOWN in values else tuple(values)
            case ast.Subscript():
                if self.resolve(node.value, scope) == "os.environ":
                    return self._environment(node.slice, rank)
            case ast.Call():
                return self._evaluate_call(node, scope, rank, env)
            case ast.Name() | ast.Attribute():
                return self._evaluate_name(node, scope, rank, env)
            case ast.JoinedStr() | ast.Dict() | ast.Lambda():
                return OBJECT
        return UNKNOWN

    def _evaluate_bool(self, node: ast.BoolOp, scope: Scope, rank: int, env: Env) -> Any:
        decisive = isinstance(node.op, ast.Or)
        truths = [self.truth(part, scope, rank, env) for part in node.values]
        if decisive in truths:
            return decisive
        return UNKNOWN if None in truths else not decisive

    def _compare(
        self, op: ast.cmpop, left: ast.expr, right: ast.expr, scope: Scope, rank: int, env: Env
    ) -> Any:
        if isinstance(op, (ast.In, ast.NotIn)) and dotted_key(right) == "os.environ":
            name = self.evaluate(left, scope, rank, env)
            known = name in _RANKS | _WORLDS | {"MASTER_ADDR", "MASTER_PORT"}
            return isinstance(op, ast.In) if known else UNKNOWN
        one, two = (self.evaluate(part, scope, rank, env) for part in (left, right))
        if UNKNOWN in (one, two) or (one is OBJECT and two is OBJECT):
            return UNKNOWN
        if OBJECT in (one, two) and not isinstance(op, (ast.Is, ast.IsNot)):
            return UNKNOWN
        return _COMPARE[type(op)](one, two)

    def _environment(self, key: ast.expr, rank: int) -> Any:
        """Return the value of an environment variable on a rank: `os.environ["RANK"]`."""
        name = key.value if isinstance(key, ast.Constant) else None
        if name in _RANKS:
            return str(rank)
        return str(WORLD) if name in _WORLDS else UNKNOWN

    def _evaluate_call(self, node: ast.Call, scope: Scope, rank: int, env: Env) -> Any:
        call = self.call_at.get(node)
        if call is None:
            return UNKNOWN
        target = call.target
        if target in ("os.environ.get", "os.getenv") and node.args:
            return self._environment(node.args[0], rank)
        if target in _TRUE:
            return True
        if target == "builtins.len":
            return env.get("len()", UNKNOWN)
        if target in ("builtins.int", "builtins.bool", "builtins.str") and len(node.args) == 1:
            value = self.evaluate(node.args[0], scope, rank, env)
            if isinstance(value, Special):
                return UNKNOWN
            return {"int": int, "bool": bool, "str": str}[target.rpartition(".")[2]](value)
        if target == "builtins.getattr" and len(node.args) >= 2:
            name = node.args[1]
            if isinstance(name, ast.Constant):
                return _by_meaning(str(name.value), rank)
        kind = kind_of_made(target) if target else None
        if kind in ("rank", "world"):
            return rank if kind == "rank" else WORLD
        if call.function is not None and call.made is None:
            value = self.run(call.function, self.bind(call, call.function, rank, env), rank)
            if value is not UNKNOWN:
                return value
        named = _by_meaning(call.method, rank)
        if named is not UNKNOWN:
            return named
        if (
            call.made is not None
            or call.method[:1].isupper()
            or call.method in ("getLogger", "open")
        ):
            return OBJECT
        return UNKNOWN

    def bind(self, call: Call, function: Scope, rank: int, env: Env | None = None) -> Env:
        """Return the values of a call's arguments, by parameter name."""
        names = [one.arg for one in function.parameters]
        if function.owner is not None and names[:1] in (["self"], ["cls"]):
            names = names[1:]
        bound: Env = {key: value for key, value in (env or {}).items() if "." in key or "(" in key}
        for place, name in enumerate(names):
            value = call.argument(place, name)
            if value is not None:
                bound[name] = self.evaluate(value, call.scope, rank, env)
            elif not call.unpacks:
                default = default_of(function, name)
                if default is not None:
                    bound[name] = self.evaluate(default, function.parent or function, rank)
        return bound

    def run(self, function: Scope, env: Env, rank: int) -> Any:
        """Return what a project function returns on a rank."""
        key = (function, rank)
        if key in self._evaluating or self.is_too_deep():
            self._cuts += 1
            return UNKNOWN
        self._evaluating.add(key)
        try:
            if isinstance(function.node, ast.Lambda):
                return self.evaluate(function.node.body, function, rank, env)
            values = list(self._returns(getattr(function.node, "body", []), function, env, rank))
            return _only(values) if values else None
        finally:
            self._evaluating.discard(key)

    def _returns(self, block: list[ast.stmt], scope: Scope, env: Env, rank: int) -> Iterator[Any]:
        """Yield the values that a block may return, up to the first certain return."""
        for statement in block:
            if isinstance(statement, ast.Return):
                yield self.evaluate(statement.value, scope, rank, env) if statement.value else None
                return
            if isinstance(statement, ast.If):
                truth = self.truth(statement.test, scope, rank, env)
                if truth is not None:
                    chosen = statement.body if truth else statement.orelse
                    found = list(self._returns(chosen, scope, env, rank))
                    yield from found
                    if found and any(isinstance(one, (ast.Return, ast.If)) for one in chosen):
                        return
                else:
                    yield from self._returns(statement.body, scope, env, rank)
                    yield from self._returns(statement.orelse, scope, env, rank)
            elif isinstance(statement, (ast.Try, ast.With)):
                found = list(self._returns(statement.body, scope, env, rank))
                yield from found
                if found:
                    return
            elif isinstance(statement, (ast.For, ast.While)):
                yield from self._returns(statement.body, scope, env, rank)

    def _evaluate_name(
        self, node: ast.Name | ast.Attribute, scope: Scope, rank: int, env: Env
    ) -> Any:
        key = dotted_key(node)
        if key in env:
            return env[key]
        if isinstance(node, ast.Name) and node.id == "__name__":
            return "__main__" if scope.module is self.modules[0] else scope.module.name
        if isinstance(node, ast.Attribute) and isinstance(self.resolve(node, scope), Scope):
            found = self.resolve(node, scope)
            assert isinstance(found, Scope)
            if _is_property(found):
                value = self.run(found, {}, rank)
                if value is not UNKNOWN:
                    return value
        values = []
        for definition in self.reaching(node, scope, rank):
            values.append(self._evaluate_definition(definition, rank, env))
        value = _only(values) if values else UNKNOWN
        if value is not UNKNOWN:
            return value
        key = dotted_key(node)
        return _by_meaning(key.rpartition(".")[2], rank) if key else UNKNOWN

    def _evaluate_definition(self, definition: Definition, rank: int, env: Env) -> Any:
        if definition.how == "parameter":
            if self.is_spawned(definition.scope) and definition.scope.parameters[:1] == [
                definition.node
            ]:
                return rank
            given = list(self.arguments_for(definition))
            return _only([self.evaluate(value, where, rank) for value, where in given])
        if definition.how in ("assign", "augmented") and definition.value is not None:
            return self.evaluate(definition.value, definition.scope, rank, env)
        if definition.how in ("function", "class", "import"):
            return OBJECT
        if definition.how == "item" and definition.index is not None:
            return self._item(definition, rank)
        return UNKNOWN

    def _item(self, definition: Definition, rank: int) -> Any:
        """Return one value of a tuple that a call returns: `rank, world = get_dist_info()`."""
        if isinstance(definition.value, ast.Call):
            call = self.call_at.get(definition.value)
            if call is not None and call.function is not None and definition.index is not None:
                values = self.run(call.function, self.bind(call, call.function, rank), rank)
                if isinstance(values, tuple) and definition.index < len(values):
                    return values[definition.index]
        return UNKNOWN

    def is_spawned(self, function: Scope) -> bool:
        """Return whether the function starts once per rank, with the rank as its first argument."""
        for call in self.methods("spawn", "start_processes"):
            entry = call.argument(0, "fn")
            if entry is not None and self.resolve(entry, call.scope) is function:
                return True
        return False

    def differs(self, test: ast.expr, scope: Scope, env: tuple[Env, Env] | None = None) -> bool:
        """Return whether a test is certainly true on one rank and false on another."""
        pair = env or ({}, {})
        truths = {self.truth(test, scope, rank, pair[rank]) for rank in (0, 1)}
        return truths == {True, False}

    # --- kinds

    def kinds(self, node: ast.AST | None, scope: Scope, depth: int = 0) -> frozenset[str]:
        """Return the possible kinds: ddp, module, optimizer, loader, rank, loss, batch, …"""
        if node is None or depth > 12:
            return frozenset()
        if node not in self._kinds:
            if self.is_too_deep():
                return frozenset()
            self._kinds[node] = frozenset()  # a cycle adds nothing
            with self.deeper():
                self._kinds[node] = frozenset(self._find_kinds(node, scope, depth))
        return self._kinds[node]

    def is_kind(self, node: ast.AST | None, scope: Scope, *kinds: str) -> bool:
        return not self.kinds(node, scope).isdisjoint(kinds)

    def _find_kinds(self, node: ast.AST, scope: Scope, depth: int) -> Iterator[str]:
        match node:
            case ast.Call():
                call = self.call_at.get(node)
                if call is not None:
                    yield from self._kinds_of_call(call, depth)
            case ast.IfExp():
                yield from self.kinds(node.body, scope, depth + 1)
                yield from self.kinds(node.orelse, scope, depth + 1)
            case ast.BoolOp():
                for value in node.values:
                    yield from self.kinds(value, scope, depth + 1)
            case ast.NamedExpr() | ast.Starred() | ast.Await():
                yield from self.kinds(node.value, scope, depth + 1)
            case ast.BinOp():
                found = self.kinds(node.left, scope, depth + 1) | self.kinds(
                    node.right, scope, depth + 1
                )
                yield from found & {"loss", "output"}
            case ast.Subscript():
                yield from self.kinds(node.value, scope, depth + 1) & {
                    "loader",
                    "sampler",
                    "optimizer",
                    "batch",
                    "output",
                    "ddp",
                    "module",
                }
            case ast.Name() | ast.Attribute():
                yield from self._kinds_of_name(node, scope, depth)

    def _kinds_of_name(
        self, node: ast.Name | ast.Attribute, scope: Scope, depth: int
    ) -> Iterator[str]:
        if isinstance(node, ast.Attribute) and node.attr == "module":
            wrapped = self.kinds(node.value, scope, depth + 1)
            if wrapped & {"ddp", "dp", "fsdp"}:
                yield "module"
                return
        found: set[str] = set()
        for definition in self.reaching(node, scope):
            found.update(self._kinds_of_definition(definition, depth))
        key = dotted_key(node)
        if not found and key:
            name = key.rpartition(".")[2]
            guess = meaning(name) or sounds_like(name)
            found.update([guess] if guess else [])
        yield from found

    def _kinds_of_definition(self, definition: Definition, depth: int) -> Iterator[str]:
        value, scope = definition.value, definition.scope
        if definition.how == "parameter":
            for given, where in self.arguments_for(definition):
                yield from self.kinds(given, where, depth + 1)
        elif definition.how in ("assign", "augmented"):
            if isinstance(definition.node, (ast.With, ast.AsyncWith)) and value is not None:
                yield from self.kinds(value, scope, depth + 1) - {"no_grad", "autocast"}
            else:
                yield from self.kinds(value, scope, depth + 1)
        elif definition.how == "item" and value is not None:
            yield from self._kinds_of_item(definition, value, depth)

    def _kinds_of_item(self, definition: Definition, value: ast.expr, depth: int) -> Iterator[str]:
        """Yield the kinds of loop items and of elements of unpacked tuples."""
        scope, index = definition.scope, definition.index
        call = self.call_at.get(value) if isinstance(value, ast.Call) else None
        if call is not None and call.target == "builtins.range":
            yield "counter"
        elif call is not None and call.target == "builtins.enumerate":
            if index == 0:
                yield "counter"
            elif call.node.args and self.is_kind(call.node.args[0], scope, "loader"):
                yield "batch"
        elif call is not None and call.method == "prepare" and index is not None:
            given = call.node.args
            if index < len(given):
                found = self.kinds(given[index], scope, depth + 1)
                yield from found
                if "module" in found:
                    yield "ddp"
        elif call is not None and call.function is not None and index is not None:
            for returned in call.function.returns:
                if isinstance(returned, ast.Tuple) and index < len(returned.elts):
                    yield from self.kinds(returned.elts[index], call.function, depth + 1)
        elif call is not None and call.target in ("builtins.zip", "itertools.islice"):
            if any(self.is_kind(one, scope, "loader") for one in call.node.args):
                yield "batch"
        elif self.is_kind(value, scope, "loader"):
            yield "batch"
        else:
            yield from self.kinds(value, scope, depth + 1) & {"batch", "output", "loss"}

    def _kinds_of_call(self, call: Call, depth: int) -> Iterator[str]:
        scope = call.scope
        if call.receiver is not None and call.method in SAME_VALUE:
            yield from self.kinds(call.receiver, scope, depth + 1)
            return
        if call.target in ("torch.compile", "copy.deepcopy", "copy.copy", "torch.jit.script"):
            yield from self.kinds(call.argument(0, "model"), scope, depth + 1)
            return
        kind = kind_of_made(call.target) if call.target else None
        if kind:
            yield kind
            return
        if call.made is not None:
            yield from self._kinds_of_class(call.made)
            return
        if call.function is not None:
            found: set[str] = set()
            for value in call.function.returns:
                found.update(self.kinds(value, call.function, depth + 1))
            yield from found
            if found:
                return
        if call.method in ("prepare", "setup", "setup_module", "prepare_model") and call.node.args:
            found = set(self.kinds(call.node.args[0], scope, depth + 1))
            yield from found
            if "module" in found:
                yield "ddp"
            return
        if is_model_class(call.method):
            yield "module"
            return
        called = self.kinds(call.node.func, scope, depth + 1)
        if called & {"ddp", "dp", "fsdp", "module"}:
            yield "output"
        elif "loss function" in called or call.method in ("criterion", "loss_fn", "compute_loss"):
            yield "loss"
        else:
            guess = meaning(call.method.removeprefix("get_")) if call.method else None
            if guess:
                yield guess

    def _kinds_of_class(self, owner: Scope) -> Iterator[str]:
        if self.is_a(owner, "DistributedDataParallel"):
            yield "ddp"
        elif self.is_a(owner, "DistributedSampler"):
            yield "distributed sampler"
        elif self.is_a(owner, "DataLoader"):
            yield "loader"
        elif self.is_a(owner, "Sampler", "BatchSampler"):
            yield "sampler"
        elif self.is_a(owner, "Dataset", "IterableDataset"):
            yield "dataset"
        elif self.is_a(owner, "Optimizer", "SGD", "Adam", "AdamW"):
            yield "optimizer"
        elif self.is_a(owner, "Module", "LightningModule", "PreTrainedModel"):
            yield "loss function" if owner.name.lower().endswith("loss") else "module"

    # --- do ranks agree?

    def nature(self, node: ast.AST | None, scope: Scope, depth: int = 0) -> str:
        """Return `same` (on all ranks), `rank` (decided by the rank), `local` (from this rank's
        data), or `unknown`."""
        if node is None or isinstance(node, (ast.Constant, ast.JoinedStr)):
            return "same"
        if depth > 10 or self.is_too_deep():
            return "unknown"
        if node not in self._natures:
            self._natures[node] = "same"  # a cycle adds nothing
            with self.deeper():
                self._natures[node] = self._find_nature(node, scope, depth)
        return self._natures[node]

    def counts(self, test: ast.AST, scope: Scope) -> bool:
        """Return whether a test uses a counter (`step % 10 == 0`) and so is true at some time."""
        return any(
            isinstance(one, (ast.Name, ast.Attribute)) and self.is_kind(one, scope, "counter")
            for one in ast.walk(test)
        ) and self.comes_true(test, scope)

    def comes_true(self, test: ast.AST, scope: Scope, depth: int = 0) -> bool:
        """Return whether a test that ranks agree on is true at some time (a counter, an option)."""
        names = [
            one
            for one in ast.walk(test)
            if isinstance(one, (ast.Name, ast.Attribute)) and isinstance(one.ctx, ast.Load)
        ]
        return all(self._comes_true(one, scope, depth) for one in names)

    def _comes_true(self, name: ast.Name | ast.Attribute, scope: Scope, depth: int) -> bool:
        key = dotted_key(name)
        known = {"counter", "world", "rank", "main", "distributed", "arguments", "device count"}
        if _is_config(key) or self.is_kind(name, scope, *known):
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

    def _find_nature(self, node: ast.AST, scope: Scope, depth: int) -> str:
        match node:
            case ast.Name() | ast.Attribute() if dotted_key(node) != "__name__":
                return self._nature_of_name(node, scope, depth)
            case ast.Call():
                return self._nature_of_call(node, scope, depth)
            case ast.Subscript() if self.resolve(node.value, scope) == "os.environ":
                known = isinstance(node.slice, ast.Constant) and node.slice.value in _RANKS
                return "rank" if known else "same"
            case ast.Name(id="__name__"):
                return "same"
            case ast.Lambda():
                return "unknown"
        parts = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
        return worst([self.nature(one, scope, depth + 1) for one in parts])

    def _nature_of_name(self, node: ast.Name | ast.Attribute, scope: Scope, depth: int) -> str:
        kinds = self.kinds(node, scope)
        if kinds & {"rank", "main"}:
            return "rank"
        if kinds & {"world", "counter", "arguments", "distributed", "device count"}:
            return "same"
        key = dotted_key(node)
        if key and self.is_reduced(key, scope):
            return "same"
        definitions = self.reaching(node, scope)
        if not definitions:
            if isinstance(node, ast.Attribute):
                base = self.nature(node.value, scope, depth + 1)
                return "same" if _is_config(key) and base != "local" else base
            return "same" if _is_config(key) else "unknown"
        return worst([self._nature_of_definition(one, depth) for one in definitions])

    def _nature_of_definition(self, definition: Definition, depth: int) -> str:
        if definition.how in ("function", "class", "import"):
            return "same"
        if definition.how == "parameter":
            given = list(self.arguments_for(definition))
            if not given:
                return "same" if _is_config(definition.name) else "unknown"
            return worst([self.nature(value, where, depth + 1) for value, where in given])
        if definition.how == "item":
            kinds = set(self._kinds_of_definition(definition, depth))
            if "counter" in kinds:
                return "same"
            if "batch" in kinds:
                return "local"
        tests = [
            self.nature(one.test, definition.scope, depth + 2)
            for one in self.context(definition.node, definition.scope.module)
            if isinstance(one, If) and self.decide(one, definition.scope, None) is None
        ]
        here = self.nature(definition.value, definition.scope, depth + 1)
        return worst([here, *(one for one in tests if one == "rank")])

    def _nature_of_call(self, node: ast.Call, scope: Scope, depth: int) -> str:
        call = self.call_at.get(node)
        if call is None:
            return "unknown"
        kinds = self.kinds(node, scope)
        if kinds & {"rank", "main"}:
            return "rank"
        if kinds & {"world", "distributed", "arguments", "loader", "optimizer", "device count"}:
            return "same"
        if call.target in _TRUE:
            return "same"
        if call.target in ("time.time", "time.perf_counter", "time.monotonic"):
            return "local"
        if call.method in COLLECTIVES or call.method in ("gather_for_metrics", "reduce"):
            return "same"
        if call.target == "builtins.len":
            return "same"
        if "output" in kinds and not self.makes_local(call):
            return "unknown"
        if kinds & {"output", "loss"} and call.function is None:
            return "local"
        if call.function is not None:
            if self.reduces(call):
                return "same"
            values = [self.nature(one, call.function, depth + 2) for one in call.function.returns]
            return worst(values) if values else "same"
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if call.target and not call.target.startswith(_PURE):
            return "unknown"
        if not call.target:
            if call.receiver is None:
                return "unknown"
            given.append(call.receiver)
        return worst([self.nature(one, scope, depth + 1) for one in given])

    def ingredients(
        self, node: ast.expr, scope: Scope, hops: int = 20
    ) -> Iterator[tuple[ast.AST, Scope]]:
        """Yield each expression that a value is computed from, through names and functions."""
        seen: set[ast.AST] = set()
        waiting: deque[tuple[ast.expr, Scope, int]] = deque([(node, scope, 0)])  # nearest first
        while waiting and len(seen) < 400:
            value, where, depth = waiting.popleft()
            for part in self.parts(value):
                if part in seen:
                    continue
                seen.add(part)
                yield part, where
                more: list[tuple[ast.expr, Scope]] = []
                if isinstance(part, ast.Call) and part in self.call_at:
                    call = self.call_at[part]
                    if call.function is not None and call.made is None:
                        more += [(one, call.function) for one in call.function.returns]
                elif isinstance(part, (ast.Name, ast.Attribute)):
                    for definition in self.reaching(part, where):
                        if definition.how == "parameter":
                            more += self.arguments_for(definition)
                        elif definition.value is not None:
                            more.append((definition.value, definition.scope))
                if depth < hops:
                    waiting += [(one, at, depth + 1) for one, at in more]

    def contributors(self, node: ast.expr, scope: Scope) -> list[Call]:
        """Return every call that took part in computing a value."""
        parts = self.ingredients(node, scope)
        return [self.call_at[part] for part, _ in parts if part in self.call_at]

    def makes_local(self, call: Call) -> bool:
        """Return whether a forward pass gets this rank's own batch."""
        return any(self.nature(one, call.scope, 6) == "local" for one in call.node.args) or any(
            self.is_kind(one, call.scope, "batch") for one in call.node.args
        )

    def is_reduced(self, key: str, scope: Scope) -> bool:
        """Return whether a collective, or a project function with one, gets this name here."""
        if scope not in self._reduced:
            names: set[str | None] = set()
            self._reduced[scope] = names
            for call in self.calls_in(scope):
                if call.method in COLLECTIVES or self.reduces(call):
                    given = [*call.node.args, *(one.value for one in call.node.keywords)]
                    for loop in call.inside(Loop):  # `for each in (loss, count): all_reduce(each)`
                        if isinstance(items := getattr(loop.node, "iter", None), ast.Tuple):
                            given.extend(items.elts)
                    names.update(dotted_key(part) for one in given for part in ast.walk(one))
        return key in self._reduced[scope]

    def reduces(self, call: Call) -> bool:
        """Return whether a project function contains a collective."""
        function = call.function
        return function is not None and any(
            one.method in COLLECTIVES for one in self.reached(function)
        )

    def reached(self, function: Scope, depth: int = 3) -> list[Call]:
        """Return the calls in a function and in the project functions it calls."""
        if function in self._reached:
            return self._reached[function]
        found: list[Call] = []
        self._reached[function] = found
        seen, level = {function}, [function]
        for _ in range(depth):
            following = []
            for scope in level:
                for call in self.calls_in(scope):
                    found.append(call)
                    if call.function is not None and call.function not in seen:
                        seen.add(call.function)
                        following.append(call.function)
            level = following
        return found

    def calls_in(self, scope: Scope) -> list[Call]:
        return self._calls_by_scope.get(scope, [])

    @property
    def _calls_by_scope(self) -> dict[Scope, list[Call]]:
        if not hasattr(self, "_by_scope"):
            self._by_scope: dict[Scope, list[Call]] = {}
            for call in self.calls:
                self._by_scope.setdefault(call.scope, []).append(call)
        return self._by_scope


def worst(natures: list[str]) -> str:
    for one in ("rank", "local", "unknown"):
        if one in natures:
            return one
    return "same"


def _only(values: list[Any]) -> Any:
    """Return the one value that all agree on, or UNKNOWN."""
    if not values or UNKNOWN in values:
        return UNKNOWN
    first = values[0]
    return first if all(type(one) is type(first) and one == first for one in values) else UNKNOWN


def _by_meaning(name: str, rank: int) -> Any:
    kind = meaning(name.removeprefix("get_")) if name else None
    if kind is None:
        return UNKNOWN
    return {"rank": rank, "world": WORLD, "main": rank == 0, "distributed": True}[kind]


def _is_property(function: Scope) -> bool:
    decorators = getattr(function.node, "decorator_list", [])
    return any(
        (dotted_key(one) or "").rpartition(".")[2] in ("property", "cached_property")
        for one in decorators
    )


def _is_config(key: str | None) -> bool:
    """Return whether a name holds options or a configuration, which are the same on every rank."""
    first = (key or "").partition(".")[0].lower()
    return first in (
        "args",
        "opt",
        "opts",
        "cfg",
        "config",
        "conf",
        "hparams",
        "flags",
        "params",
        "options",
        "settings",
        "training_args",
        "c",
        "hp",
    ) or (key or "").startswith(
        ("self.args", "self.cfg", "self.config", "self.opt", "self.hparams")
    )


__all__ = ["OBJECT", "UNKNOWN", "Env", "Loop", "Script"]
