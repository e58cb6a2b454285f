"""The kinds of values: ddp, module, optimizer, loader, batch, loss, rank, counter, …"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paralab.doctor.static.bindings import dotted_key
from paralab.doctor.static.facts import SAME_VALUE, Call, once_per_node
from paralab.doctor.static.names import is_model_class, kind_of_made, meaning, sounds_like
from paralab.doctor.static.project import Definition, Scope
from paralab.doctor.static.values import Values

_WRAPPED = {"ddp", "dp", "fsdp"}
# The kinds that an item or an element may share with its collection.
_OF_ITEMS = {"loader", "sampler", "optimizer", "batch", "output", "ddp", "module"}
# The kind of a project class that derives from one of these library classes. The first match wins.
_KIND_OF_CLASS = (
    (("DistributedDataParallel",), "ddp"),
    (("DistributedSampler",), "distributed sampler"),
    (("DataLoader",), "loader"),
    (("Sampler", "BatchSampler"), "sampler"),
    (("Dataset", "IterableDataset"), "dataset"),
    (("Optimizer", "SGD", "Adam", "AdamW"), "optimizer"),
    (("Module", "LightningModule", "PreTrainedModel"), "module"),
)


class Kinds(Values):
    @once_per_node(frozenset[str]())
    def kinds(self, node: ast.AST, scope: Scope) -> frozenset[str]:
        """Return the possible kinds of a value."""
        return frozenset(self._find_kinds(node, scope))

    def is_kind(self, node: ast.AST | None, scope: Scope, *kinds: str) -> bool:
        return not self.kinds(node, scope).isdisjoint(kinds)

    def methods_on(self, kind: str, *names: str) -> list[Call]:
        """Return calls to methods with this name on values of a kind: `methods_on("scaler",
        "step")`."""
        return [c for c in self.methods(*names) if self.is_kind(c.receiver, c.scope, kind)]

    def calls_to(self, kind: str, calls: list[Call]) -> list[Call]:
        """Return the calls that call a value of this kind, such as `model(x)` for "ddp"."""
        return [call for call in calls if self.is_kind(call.node.func, call.scope, kind)]

    def _find_kinds(self, node: ast.AST, scope: Scope) -> Iterator[str]:
        match node:
            case ast.Call() if node in self.call_at:
                yield from self._kinds_of_call(self.call_at[node])
            case ast.IfExp():
                yield from self.kinds(node.body, scope) | self.kinds(node.orelse, scope)
            case ast.BoolOp():
                for value in node.values:
                    yield from self.kinds(value, scope)
            case ast.NamedExpr() | ast.Starred() | ast.Await():
                yield from self.kinds(node.value, scope)
            case ast.BinOp():
                found = self.kinds(node.left, scope) | self.kinds(node.right, scope)
                yield from found & {"loss", "output"}
            case ast.Subscript():
                yield from self.kinds(node.value, scope) & _OF_ITEMS
                if isinstance(node.slice, ast.Constant) and (
                    guess := meaning(str(node.slice.value))
                ):
                    yield guess
            case ast.Attribute(inner, "module") if self.kinds(inner, scope) & _WRAPPED:
                yield "module"
            case ast.Name() | ast.Attribute():
                yield from self._kinds_of_name(node, scope)

    def _kinds_of_name(self, node: ast.Name | ast.Attribute, scope: Scope) -> set[str]:
        definitions = self.reaching(node, scope)
        found = {kind for one in definitions for kind in self.kinds_of_definition(one)}
        name = (dotted_key(node) or "").rpartition(".")[2]
        guess = meaning(name) or sounds_like(name) if name else None
        return {guess} if guess and not found else found

    def kinds_of_definition(self, definition: Definition) -> Iterator[str]:
        if definition.how == "item" and definition.value is not None:
            yield from self._kinds_of_item(definition, definition.value)
        elif definition.how in ("parameter", "assign", "augmented"):
            is_with = isinstance(definition.node, (ast.With, ast.AsyncWith))
            for given, where in self.sources(definition):
                yield from self.kinds(given, where) - (
                    {"no_grad", "autocast"} if is_with else set()
                )

    def _kinds_of_item(self, definition: Definition, value: ast.expr) -> Iterator[str]:
        """Yield the kinds of loop items and of elements of unpacked tuples."""
        scope, index = definition.scope, definition.index
        call = self.call_at.get(value)
        target = call.target if call else ""
        if target == "builtins.range" or (target == "builtins.enumerate" and index == 0):
            yield "counter"
        elif call and target in ("builtins.enumerate", "builtins.zip", "itertools.islice"):
            most = 1 if target == "builtins.enumerate" else None
            if any(self.is_kind(one, scope, "loader") for one in call.node.args[:most]):
                yield "batch"
        elif call and call.method in ("prepare", "setup") and index is not None:
            yield from self._kinds_of_prepared(call, index)
        elif call and call.function is not None and index is not None:
            for returned in call.function.returns:
                if isinstance(returned, ast.Tuple) and index < len(returned.elts):
                    yield from self.kinds(returned.elts[index], call.function)
        elif index is not None and (elements := self.unpacked(definition)):
            for element, where in elements:
                yield from self.kinds(element, where)
        elif self.is_kind(value, scope, "loader"):
            yield "batch"
        else:
            yield from self.kinds(value, scope) & {"batch", "output", "loss"}

    def _kinds_of_prepared(self, call: Call, index: int) -> Iterator[str]:
        """Yield the kinds of a value that a framework prepared. Frameworks wrap models in DDP."""
        for given in call.node.args[index : index + 1]:
            found = self.kinds(given, call.scope)
            yield from found
            if "module" in found:
                yield "ddp"

    def _kinds_of_call(self, call: Call) -> Iterator[str]:
        scope = call.scope
        if call.receiver is not None and call.method in SAME_VALUE:
            yield from self.kinds(call.receiver, scope)
            return
        if call.target in ("torch.compile", "copy.deepcopy", "copy.copy", "torch.jit.script"):
            yield from self.kinds(call.argument(0, "model"), scope)
            return
        kind = kind_of_made(call.target) if call.target else None
        if kind:
            yield kind
            return
        if call.made is not None:
            yield from self._kinds_of_class(call.made)
            return
        if call.function is not None:
            returned = [self.kinds(value, call.function) for value in call.function.returns]
            if found := frozenset[str]().union(*returned):
                yield from found
                return
        if call.method in ("prepare", "setup", "setup_module", "prepare_model") and call.node.args:
            yield from self._kinds_of_prepared(call, 0)
            return
        called = self.kinds(call.node.func, scope)
        guess = meaning(call.method.removeprefix("get_")) if call.method else None
        if is_model_class(call.method):
            yield "module"
        elif called & {*_WRAPPED, "module"}:
            yield "output"
        elif "loss function" in called or call.method in ("criterion", "loss_fn", "compute_loss"):
            yield "loss"
        elif guess:
            yield guess

    def _kinds_of_class(self, owner: Scope) -> Iterator[str]:
        kind = next((kind for names, kind in _KIND_OF_CLASS if self.is_a(owner, *names)), None)
        if kind == "module" and owner.name.lower().endswith("loss"):
            kind = "loss function"
        if kind:
            yield kind
