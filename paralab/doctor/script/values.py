"""What a symbolic run of a script is made of: values that names may hold, and what happened to
them, in program order.

A value remembers where it came from (`parents`), so that a rule can ask what a loss was computed
from or what a test depends on. Every call, store and leave remembers its context: the branches,
loops, with-blocks and function calls it stands in.

    for x, y in loader:                 Loop
        with model.no_sync():           With
            loss = f(model(x), y)       Call f, whose argument is the result of Call model
        if rank == 0:                   Branch(test=Computed Eq, taken=True)
            dist.barrier()              Call torch.distributed.barrier
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Questions that have the same answer whenever they are asked.
ASKED = (
    "torch.distributed.is_",
    "torch.distributed.get_",
    "torch.cuda.is_available",
    "os.environ",
    "builtins.int",
)


@dataclass(eq=False)
class Value:
    """Something unknown, computed from its parents. The parts of a tuple that is not known have the
    whole as their parent."""

    parents: tuple[Value, ...] = field(default=(), kw_only=True)
    known: dict[Any, Any] = field(
        default_factory=dict, kw_only=True
    )  # answers to questions that were asked before

    def __repr__(self) -> str:  # a value may refer to the whole run
        return f"<{type(self).__name__}>"


@dataclass(eq=False, repr=False)
class Constant(Value):
    value: Any


@dataclass(eq=False, repr=False)
class Parameter(Value):
    """A parameter of a function that nobody calls in what was read."""

    name: str


@dataclass(eq=False, repr=False)
class Dotted(Value):
    """A name of a library: `torch.distributed.all_reduce`, whatever it is called here. `written`:
    before it was made canonical."""

    name: str
    written: str = ""


@dataclass(eq=False, repr=False)
class Computed(Value):
    """The result of an operator (`Div`, `Mod`, `Eq`, `And`, `Not`, `FString`, `Index`, `Item` of a
    loop …) on its parents."""

    op: str
    node: ast.AST | None = None


@dataclass(eq=False, repr=False)
class Choice(Value):
    """One of several values, by how a branch went; the tests that decide are among the parents, not
    among the options."""

    options: tuple[Value, ...]
    tests: tuple[Value, ...] = ()
    leaves: tuple[Value, ...] = ()  # the options of the options


@dataclass(eq=False, repr=False)
class Items(Value):
    """A list or tuple whose items are known."""

    items: tuple[Value, ...]


@dataclass(eq=False, repr=False)
class Mapping(Value):
    """A dict with keys that are known; what has other keys is among the parents."""

    entries: dict[Any, Value]


@dataclass(eq=False, repr=False)
class Attr(Value):
    """An attribute of a value that is not an object of the script: `model.module`,
    `args.local_rank`, `batch.labels`."""

    base: Value
    name: str


@dataclass(eq=False, repr=False)
class Function(Value):
    """A function of the script. `owner`: the object that it is a method of; `scope`: where its free
    names are looked up."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Scope
    owner: Value | None = None
    of_class: Class | None = None
    decorators: tuple[Value, ...] = ()
    bound: tuple[Value, ...] = ()  # by functools.partial

    @property
    def name(self) -> str:
        return getattr(self.node, "name", "<lambda>")


@dataclass(eq=False, repr=False)
class Class(Value):
    node: ast.ClassDef
    scope: Scope  # the class's own names
    bases: tuple[Value, ...]


@dataclass(eq=False, repr=False)
class Object(Value):
    """An instance of a class of the script. Its attributes are names in its own scope."""

    of: Class
    scope: Scope
    made: Call | None = None


@dataclass(eq=False, repr=False)
class Made(Value):
    """What a call that is not of the script has returned."""

    call: Call


@dataclass(eq=False, repr=False)
class Generated(Value):
    """What a generator function of the script gives: the contexts in which it yields (for
    `@contextmanager`). `each`: what every turn of its one loop yields, where that is so; another
    turn of who goes over it is another turn of that loop. `entered`: what its only `yield`
    gives."""

    contexts: tuple[Context, ...]
    each: Value | None = None
    entered: Value | None = None


@dataclass(eq=False)
class Scope:
    """Where names live: a module, a function under way, a class, an object. `outer`: where free
    names are looked up."""

    file: Path
    outer: Scope | None = None


@dataclass(frozen=True, eq=False)
class Branch:
    """A branch that was taken or not; also what follows `if test: return` (not taken)."""

    node: ast.AST
    test: Value
    taken: bool


@dataclass(frozen=True, eq=False)
class Loop:
    """`over`: what is iterated, or the test of a while loop. `again`: that test after a turn."""

    node: ast.For | ast.AsyncFor | ast.While | ast.comprehension
    over: Value
    file: Path
    again: list[Value] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class With:
    """A with-block, with the values of its context expressions (also a decorator's, and what
    ExitStack entered)."""

    node: ast.AST
    managers: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class Entered:
    """Inside a function of the script, called from `call`."""

    function: Function
    call: Call | None


@dataclass(frozen=True, eq=False)
class Trying:
    """`part`: body, handler, else or finally."""

    node: ast.Try
    part: str


Context = Branch | Loop | With | Entered | Trying


@dataclass(eq=False)
class Happening:
    """`number`: its place in program order (loops are run through once)."""

    number: int
    node: ast.AST
    file: Path
    context: tuple[Context, ...]

    @property
    def line(self) -> int:
        return getattr(self.node, "lineno", 1)

    def inside(self, kind: type[Any]) -> Iterator[Any]:
        """The contexts of one kind that it stands in, the innermost first."""
        return (context for context in reversed(self.context) if isinstance(context, kind))


@dataclass(eq=False)
class Call(Happening):
    """`target`: the canonical dotted name for what a library has (`torch.distributed.all_reduce`,
    `torch.nn.parallel.DistributedDataParallel.no_sync`), the function's own name for the script's;
    `?.backward` for a method of something unknown, `?` for an unknown callable. `written`: the
    dotted name before it was made canonical. `function`: what was called, as a value. `into`: the
    function of the script that was run for it."""

    target: str = "?"
    written: str = "?"
    function: Value = field(default_factory=Value)
    receiver: Value | None = None
    args: tuple[Value, ...] = ()
    keywords: dict[str, Value] = field(default_factory=dict)
    into: Function | None = None
    result: Value = field(default_factory=Value)

    @property
    def method(self) -> str:
        return self.target.rpartition(".")[2]

    def argument(self, position: int, name: str) -> Value | None:
        """An argument given by name or by position."""
        if name in self.keywords:
            return self.keywords[name]
        return self.args[position] if position < len(self.args) else None

    def __repr__(self) -> str:
        return f"<{self.target} {self.file.name}:{self.line}>"


@dataclass(eq=False)
class Store(Happening):
    """`base.name = value` where base is not an object of the script's own or is one (then it is
    also in its scope)."""

    base: Value = field(default_factory=Value)
    name: str = ""
    value: Value = field(default_factory=Value)


@dataclass(eq=False)
class Leave(Happening):
    """`kind`: return, break, continue, raise or exit (sys.exit, exit, quit, os._exit)."""

    kind: str = ""
    value: Value | None = None


MOST_OPTIONS = 8
DEEPEST = 20  # values that were computed from values; past that a question is not answered


def either(ways: Sequence[Value], tests: tuple[Value, ...]) -> Value:
    """One of several values; of two, the first is taken when the test holds. A name that changes in
    a hundred branches stays small: where there are too many options, choices among them are opened,
    and what decided is forgotten."""
    if all(way is ways[0] for way in ways):
        return ways[0]
    leaves = [
        option for way in ways for option in (way.leaves if isinstance(way, Choice) else (way,))
    ]
    kept = tuple(dict.fromkeys(leaves))[:MOST_OPTIONS]
    if len(leaves) <= MOST_OPTIONS:
        return Choice(tuple(ways), tests, kept, parents=(*ways, *tests))
    return Choice(kept, (), kept, parents=(*kept, *tests))


def options(value: Value, known: tuple[tuple[Value, bool], ...] = ()) -> Iterator[Value]:
    """The value, or what it may be. A test that decides twice comes out the same way both times:
    `raw = model.module if ddp else model` is never the wrapper that `if ddp: model = DDP(model)`
    has made."""
    if not isinstance(value, Choice):
        yield value
    elif len(value.tests) == 1 and len(value.options) == 2:
        test = value.tests[0]
        ways = [way for other, way in known if same(test, other)] or [True, False]
        for way in ways[:1] if len(ways) == 1 else ways:
            yield from options(value.options[0 if way else 1], (*known, (test, way)))
    else:
        for option in value.options:
            yield from options(option, known)


def same(one: Value, other: Value, depth: int = 0) -> bool:
    """Certainly the same, if nothing was stored in between: one value, or the same attribute,
    comparison or question twice."""
    if one is other:
        return True
    if type(one) is not type(other) or len(one.parents) != len(other.parents) or depth > DEEPEST:
        return False
    pairs = zip(one.parents, other.parents, strict=True)
    if isinstance(one, Constant) and isinstance(other, Constant):
        return type(one.value) is type(other.value) and bool(one.value == other.value)
    if isinstance(one, Attr) and isinstance(other, Attr):
        return one.name == other.name and same(one.base, other.base, depth + 1)
    if isinstance(one, Computed) and isinstance(other, Computed):
        return (
            one.op == other.op
            and bool(one.parents)
            and all(same(*pair, depth + 1) for pair in pairs)
        )
    if isinstance(one, Made) and isinstance(other, Made):
        asked = one.call.target == other.call.target and one.call.target.startswith(ASKED)
        return asked and all(same(*pair, depth + 1) for pair in pairs)
    return isinstance(one, Dotted) and isinstance(other, Dotted) and one.name == other.name
