"""S14: The logged number is a sum over the ranks, or covers only one rank.

Symptom: A noisy curve, or values that are N times too high with N ranks.
Cause: Rank 0 logs the loss of its own share, or nothing divides the sum that all_reduce returns.
Fix: all_reduce, divide by the world size, and log the result.
Reported: Lightning-AI/pytorch-lightning#13364 #19072 roboflow/rf-detr#909

  shown = loss.detach().clone()
  dist.all_reduce(shown)
- print("loss", shown.item())
+ print("loss", shown.item() / dist.get_world_size())
"""

import ast
import math
import re

from paralab.doctor.events import Backward, Batch, Collective, Loss
from paralab.doctor.observation import Observation
from paralab.doctor.place import Place
from paralab.doctor.rank_checks import ddp_wraps, make_finding, place_of
from paralab.doctor.registry import Findings, check, describe
from paralab.doctor.source_context import around
from paralab.doctor.static.facts import Call, If
from paralab.doctor.static.hints import is_parallel
from paralab.doctor.static.models import is_decided, is_without_grad
from paralab.doctor.static.names import LOADER
from paralab.doctor.static.project import Scope, position
from paralab.doctor.static.report import at, code, found, line_of
from paralab.doctor.static.script import Script
from paralab.doctor.windows import is_close

ENTRY = describe(__doc__)
DIVIDE = "Divide by dist.get_world_size() after all_reduce, or use op=dist.ReduceOp.AVG (NCCL)."
_SHOW = (
    "print", "info", "debug", "warning", "log", "add_scalar", "add_scalars", "log_metric",
    "log_metrics", "set_postfix", "write",
)  # fmt: skip
# Calls that leave a mean unchanged.
_KEEP = (
    "detach", "clone", "item", "float", "to", "cuda", "cpu", "tensor", "as_tensor", "double",
    "reshape", "view", "squeeze", "format", "str", "round",
)  # fmt: skip


@check("S14", source="script")
def sum_shown_as_mean(script: Script) -> Findings:
    """Report a mean loss that all_reduce adds up, if nothing divides the sum later."""
    for reduce in script.calls_of("torch.distributed.all_reduce"):
        given, op = reduce.argument(0, "tensor"), reduce.argument(1, "op")
        if not isinstance(given, ast.Name) or reduce.argument(2, "group") is not None:
            continue
        if op is not None and not code(op).endswith("SUM"):
            continue
        sure = _is_mean(script, given, reduce.scope)
        uses = _uses_after(script, given, reduce)
        shows = bool(uses) and all(_is_shown(use, reduce.scope) for use in uses)
        if sure is None or not shows:
            continue
        shown = at(uses[0], reduce.scope)
        if "sum" in reduce.module.lines[shown.line - 1].lower():
            continue
        why = (
            f"all_reduce sums the mean losses of all ranks, and {line_of(shown, reduce)} shows the sum, "
            "which is 8 times too high with 8 ranks."
        )
        doubt = f"if `{given.id}` is a mean over this rank's share, and nothing divides it"
        doubt = "" if sure and is_decided(script, reduce) else doubt
        yield found(script, "S14", "warning", reduce, why, DIVIDE, doubt=doubt, also=(shown,))


_MEANS = re.compile(r"loss|accuracy|metric|psnr|ssim|miou|perplexity", re.I)
_DIVIDES = re.compile(
    r"\bdiv|mean|average|AVG|\bavg|world|num_replicas|count|num_|\bn_|len\(", re.I
)


@check("S14", source="script")
def sum_by_name(script: Script) -> Findings:
    """Flag a summed loss in a function without division, if no caller uses the world size."""
    for reduce in script.calls_of("torch.distributed.all_reduce", "torch.distributed.reduce"):
        given, op = reduce.argument(0, "tensor"), reduce.argument(99, "op")
        group = reduce.argument(99, "group")
        if given is None or not _MEANS.search(code(given)) or group is not None:
            continue
        if op is not None and not code(op).endswith("SUM"):
            continue
        scopes = [reduce.scope, *(call.scope for call in script.callers(reduce.scope))]
        texts = [ast.unparse(scope.node) for scope in scopes if scope.is_function]
        divides = any("/" in text or _DIVIDES.search(text) for text in texts[1:] or texts)
        if texts and not divides and not re.search("/|div|mean|AVG", texts[0]):
            why = f"all_reduce sums `{code(given)}` over the ranks, and nothing here divides it."
            doubt = "if it is a mean over this rank's share, and nothing divides it later"
            yield found(script, "S14", "suspect", reduce, why, DIVIDE, doubt=doubt)


def _is_mean(script: Script, node: ast.expr, scope: Scope) -> bool | None:
    """Return True for an unchanged batch mean, False for `total / len(loader)`, else None."""
    for _ in range(8):
        if isinstance(node, ast.Name):
            own = script.reaching(node, scope)
            if len(own) != 1 or own[0].how != "assign" or own[0].value is None:
                return None
            node, scope = own[0].value, own[0].scope
        elif isinstance(node, ast.Call) and node in script.call_at:
            call = script.call_at[node]
            if call.method not in _KEEP:
                reduced = (k for k in node.keywords if k.arg in ("reduction", "size_average"))
                known = call.target.startswith("torch.nn.functional.") and "loss" in script.kinds(
                    node, scope
                )
                return True if call.method == "mean" or (known and not any(reduced)) else None
            inner = call.receiver if call.method not in ("tensor", "as_tensor") else None
            if inner is None and not node.args:
                return None
            node = inner if inner is not None else node.args[0]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            count = (
                node.right.args[0] if isinstance(node.right, ast.Call) and node.right.args else None
            )
            return False if script.is_kind(count, scope, "loader") else None
        else:
            return None
    return None


def _uses_after(script: Script, given: ast.Name, reduce: Call) -> list[ast.Name]:
    return [
        node
        for node in reduce.module.nodes_in(reduce.scope.node)
        if isinstance(node, ast.Name) and node.id == given.id and position(node) > position(given)
    ]


def _is_shown(use: ast.Name, scope: Scope) -> bool:
    """Return whether a value is printed or logged unchanged."""
    parents = scope.module.parents
    node: ast.AST = use
    while node in parents:
        node = parents[node]
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else code(node.func)
            if name in _SHOW:
                return True
            if name not in _KEEP:
                return False
        elif not isinstance(
            node, (ast.Attribute, ast.FormattedValue, ast.JoinedStr, ast.Dict, ast.keyword)
        ):
            return False
    return False


@check("S14", source="script")
def metric_of_one_rank(script: Script) -> Findings:
    """Flag a number that rank 0 prints about its own share of the evaluation data."""
    shared = [
        call
        for call in script.calls_of(LOADER)
        if script.is_kind(call.argument(99, "sampler"), call.scope, "distributed sampler")
    ]
    for call in script.methods(*_SHOW) if shared else ():
        guards = [one for one in call.inside(If) if script.differs(one.test, call.scope)]
        for value in call.node.args if guards else ():
            parts = [part for part in ast.walk(value) if isinstance(part, ast.Name)]
            own = [part for part in parts if script.nature(part, call.scope) == "local"]
            makers = [one for part in own for one in script.contributors(part, call.scope)]
            if any(is_without_grad(script, one) for one in makers):
                why = (
                    f"Rank 0 prints a number (`{code(guards[0].test)}`) that covers only its own share of the "
                    f"samples, because the loader ({line_of(shared[0], call)}) has a DistributedSampler."
                )
                fix = "all_reduce the sums and the counts on all ranks before dividing."
                doubt = "if the number is meant for all samples"
                yield found(script, "S14", "suspect", call, why, fix, doubt=doubt)
                break


@check("S14", source="script")
def metric_without_exchange(script: Script) -> Findings:
    """Flag `compute()` of a torcheval metric, which knows only its own rank's samples."""
    if not is_parallel(script) or any("sync_and_compute" in one.text for one in script.modules):
        return
    for call in script.methods("compute"):
        if call.target.startswith("torcheval.metrics."):
            why = "torcheval's `compute` uses only this rank's updates."
            fix = "Use `torcheval.metrics.toolkit.sync_and_compute(metric)`."
            doubt = "if each rank evaluates its own share of the samples"
            yield found(script, "S14", "suspect", call, why, fix, doubt=doubt)


@check("S14", source="ranks")
def sum_on_ranks(seen: Observation) -> Findings:
    """Report losses that ranks add up in a function that does not divide the sum afterward. A loss
    that is itself a sum, or was divided by a common count or the number of ranks, may be summed."""
    rank = seen.ranks[0] if len(seen.ranks) > 1 else None
    if rank is None or any(loss.grad and loss.reduction != "mean" for loss in rank.of(Loss)):
        return
    sums: dict[Place, list[tuple[Collective, float]]] = {}
    loss, mean = None, None
    counted = False  # whether the ranks have summed another value, such as a count
    for event in rank.events:
        if isinstance(event, Batch):
            counted, mean = False, None
        elif isinstance(event, Loss):
            mean = event.value
        elif isinstance(event, Backward):
            loss = event.loss if isinstance(event.loss, float) and not counted else None
            # Without DDP, the script may sum the gradients, and divide the loss before.
            if (mean and loss and is_close(mean, loss * seen.world)) or not (
                mean or ddp_wraps(rank)
            ):
                loss = None
            counted = False
        elif isinstance(event, Collective) and event.reduction == "SUM":
            if event.op not in ("all_reduce", "reduce"):
                continue
            place, value = place_of(event), event.value
            if place is None or not loss or value is None or event.in_graph:
                counted = True
            elif math.isclose(value, loss, rel_tol=1e-5):
                sums.setdefault(place, []).append((event, loss))
            else:
                counted = True
    for place, calls in sums.items():
        event, value = calls[-1]
        if len(calls) < 2 or any(map(_divides_after, event.site.stack[:2] if event.site else [])):
            continue
        why = (
            f"This sums the loss ({value:.4g} on rank 0) over {seen.world} ranks, and nothing divides "
            f"the result, so the logged value is {seen.world} times the mean loss."
        )
        yield make_finding("S14", "warning", why, place, fix=DIVIDE)


def _divides_after(place: Place) -> bool:
    """Return whether the function divides or returns something after this line. Return True if its
    source cannot be read."""
    function = next(iter(around(place)), None)
    if function is None:
        return True
    for node in ast.walk(function):
        if getattr(node, "lineno", 0) < place.line:
            continue
        match node:
            case (
                ast.BinOp(op=ast.Div() | ast.FloorDiv())
                | ast.AugAssign(op=ast.Div() | ast.FloorDiv())
            ):
                return True
            case ast.Attribute(attr="div" | "div_" | "mean" | "true_divide" | "divide"):
                return True
            case ast.Return(value=ast.expr()) | ast.Yield() | ast.YieldFrom():
                return True
    return False
