"""What a symbolic run of a script is made of: values that names may hold, and what happened to them, in program order.

A value remembers where it came from (`parents`), so that a rule can ask what a loss was computed from or what a test depends on.
Every call, store and leave remembers its context: the branches, loops, with-blocks and function calls it stands in.

    for x, y in loader:                 Loop
        with model.no_sync():           With
            loss = f(model(x), y)       Call f, whose argument is the result of Call model
        if rank == 0:                   Branch(test=Computed Eq, taken=True)
            dist.barrier()              Call torch.distributed.barrier
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(eq=False)
class Value:
    """Something unknown, computed from its parents. The parts of a tuple that is not known have the whole as their parent."""

    parents: tuple[Value, ...] = field(default=(), kw_only=True)

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
    """A name of a library: `torch.distributed.all_reduce`, whatever it is called here. `written`: before it was made canonical."""

    name: str
    written: str = ""


@dataclass(eq=False, repr=False)
class Computed(Value):
    """The result of an operator (`Div`, `Mod`, `Eq`, `And`, `Not`, `FString`, `Index`, `Item` of a loop …) on its parents."""

    op: str
    node: ast.AST | None = None


@dataclass(eq=False, repr=False)
class Choice(Value):
    """One of several values, by how a branch went; the tests that decide are among the parents, not among the options."""

    options: tuple[Value, ...]
    tests: tuple[Value, ...] = ()


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
    """An attribute of a value that is not an object of the script: `model.module`, `args.local_rank`, `batch.labels`."""

    base: Value
    name: str


@dataclass(eq=False, repr=False)
class Function(Value):
    """A function of the script. `owner`: the object that it is a method of; `scope`: where its free names are looked up."""

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
    """What a generator function of the script gives: the contexts in which it yields (for `@contextmanager`)."""

    contexts: tuple[Context, ...]


@dataclass(eq=False)
class Scope:
    """Where names live: a module, a function under way, a class, an object. `outer`: where free names are looked up."""

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
    """`over`: what is iterated, or the test of a while loop."""

    node: ast.For | ast.AsyncFor | ast.While | ast.comprehension
    over: Value
    file: Path


@dataclass(frozen=True, eq=False)
class With:
    """A with-block, with the values of its context expressions (also a decorator's, and what ExitStack entered)."""

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
    `torch.nn.parallel.DistributedDataParallel.no_sync`), the function's own name for the script's; `?.backward` for a method of
    something unknown, `?` for an unknown callable. `written`: the dotted name before it was made canonical. `function`: what was
    called, as a value. `into`: the function of the script that was run for it."""

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
    """`base.name = value` where base is not an object of the script's own or is one (then it is also in its scope)."""

    base: Value = field(default_factory=Value)
    name: str = ""
    value: Value = field(default_factory=Value)


@dataclass(eq=False)
class Leave(Happening):
    """`kind`: return, break, continue, raise or exit (sys.exit, exit, quit, os._exit)."""

    kind: str = ""
    value: Value | None = None


def options(value: Value) -> Iterator[Value]:
    """The value, or what it may be."""
    if isinstance(value, Choice):
        for option in value.options:
            yield from options(option)
    else:
        yield value
