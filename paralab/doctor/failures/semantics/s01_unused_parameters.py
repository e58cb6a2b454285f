"""S01: Some parameters do not contribute to the loss.

Symptom: 'Expected to have finished reduction in the prior iteration before starting a new one', one step after the cause.
Cause: DDP waits for the gradient of every parameter. A layer that forward or the loss skips never produces one.
Fix: Use the layer, remove it, freeze it before wrapping, or pass `find_unused_parameters=True`.
Reported: huggingface/accelerate#2017 pytorch/pytorch#22049

  model = Net()  # .auxiliary is not used in forward
+ model.auxiliary.requires_grad_(False)
  model = DistributedDataParallel(model)
"""

import ast
import re
from collections.abc import Iterator
from functools import lru_cache

from paralab.doctor.events import Trainable, Wrap
from paralab.doctor.logs.blame import blame
from paralab.doctor.logs.job import Logs
from paralab.doctor.messages import named
from paralab.doctor.observation import Observation, WatchedRank
from paralab.doctor.rank_checks import ddp_wraps, is_data_parallel, listed, make_finding
from paralab.doctor.registry import Finding, Findings, Message, check, describe, entries
from paralab.doctor.static.facts import If
from paralab.doctor.static.models import wraps
from paralab.doctor.static.project import MOST_MODULES, Definition, Scope
from paralab.doctor.static.report import at, found, line_of
from paralab.doctor.static.script import Script
from paralab.doctor.windows import windows

ENTRY = describe(
    __doc__,
    Message(
        r"Expected to have finished reduction in the prior iteration(?!.*training graph has changed)"
    ),
)
UNFINISHED = "Expected to have finished reduction in the prior iteration"
WHICH = re.compile(
    r"Parameter(?: indice)?s which did not receive grad for rank (?P<rank>\d+): (?P<names>[^\n]+)"
)
_WITHOUT = re.compile(r"did not receive grad for rank \d+: ([\d ]*\d)")
_WEIGHTED = re.compile(
    r"Linear|Bilinear|Conv\w*|Embedding|BatchNorm\w*|LayerNorm|LSTM|GRU|Parameter"
)
# Ways to reach a layer without writing its name.
_DYNAMIC = {"children", "named_children", "_modules", "named_modules", "modules", "get_submodule", "__dict__"}  # fmt: skip


@check("S01", source="script")
def unused_layer(script: Script) -> Findings:
    """Report a layer of a DDP model that nothing in the project reads."""
    names = script.strings.union(*(module.attributes_read for module in script.modules))
    if names & _DYNAMIC or any(
        not isinstance(call.argument(1, "name"), ast.Constant) for call in script.methods("getattr")
    ):
        return
    for wrap in wraps(script):
        options = [wrap.argument(99, name) for name in ("find_unused_parameters", "static_graph")]
        model = wrap.argument(0, "module")
        if wrap.unpacks or any(options) or model is None:
            continue
        owners = {maker.made for maker in script.makers(model, wrap.scope)}
        for owner in owners if len(owners) == 1 else ():
            if owner is None or script.bases(owner) != ["torch.nn.Module"]:
                continue
            for layer in _layers(script, owner):
                name = layer.name.removeprefix("self.")
                if name in names:
                    continue
                where = at(layer.node, layer.scope)
                why = (
                    f"Nothing reads `self.{name}`, so its parameters never get a gradient. DDP "
                    f"({line_of(wrap, where)}) waits for them and raises in the second step."
                )
                sure = "requires_grad" not in names and len(script.modules) < MOST_MODULES
                doubt = "" if sure else "if it is trainable when DDP is created"
                yield found(script, "S01", "error", where, why, doubt=doubt, also=(wrap,))


def _layers(script: Script, owner: Scope) -> Iterator[Definition]:
    """Yield the layers with weights that `__init__` unconditionally stores on self."""
    init = script.method(owner, "__init__")
    for name, definitions in init.definitions.items() if init else ():
        one = definitions[-1]
        call = script.call_at.get(one.value) if isinstance(one.value, ast.Call) else None
        if name.startswith("self.") and name.count(".") == 1 and call is not None:
            last = call.target.rpartition(".")[2]
            plain = not any(isinstance(part, If) for part in call.context)
            if call.target.startswith("torch.nn.") and _WEIGHTED.fullmatch(last) and plain:
                yield one


@check("S01", "S07", source="ranks")
@lru_cache(maxsize=1)
def find_unused(seen: Observation) -> Finding | None:
    """Report parameters that do not get a gradient on any rank, while DDP waits for them."""
    for wrap in ddp_wraps(seen.ranks[0]) if is_data_parallel(seen) else ():
        if wrap.options.get("find_unused_parameters") or wrap.options.get("static_graph"):
            continue
        lacking = [_lacking(rank, wrap) for rank in seen.ranks]
        names = [name for name in lacking[0] if all(name in other for other in lacking)]
        if names:
            return _explain(seen, wrap, names)
    return None


def _explain(seen: Observation, wrap: Wrap, names: list[str]) -> Finding:
    raised = [r.raised.message for r in seen.ranks if r.raised and UNFINISHED in r.raised.message]
    evidence = [f"no gradient after backward: {listed(names, 8)}"]
    evidence += [message.splitlines()[0][:160] for message in raised[:1]]
    changes = seen.ranks[0].of(Trainable)
    frozen = [event for event in changes if event.name in names and not event.trainable]
    if frozen and raised:
        why = (
            f"{listed(names)} were trainable when DDP was created and are frozen here. DDP still waits "
            "for their gradients and raises in the second forward after this line."
        )
        return make_finding("S07", "error", why, frozen[0], evidence)
    why = (
        f"On every rank, {listed(names)} of {wrap.model_class} get no gradient from the loss. DDP "
        f"waits for all {sum(wrap.trainable)} trainable parameters and raises in the next forward."
    )
    doubt = "" if raised else "once another forward pass runs"
    return make_finding("S01", "error", why, wrap, evidence, doubt=doubt)


def _lacking(rank: WatchedRank, wrap: Wrap) -> list[str]:
    """Return the parameters without a gradient after a pass in which DDP averages gradients. Ignore
    a model without any gradient: it belongs to a different loss (a GAN has two)."""
    message = rank.raised.message if rank.raised else ""
    numbers = _WITHOUT.search(message) if UNFINISHED in message else None
    if numbers:
        trained = [name for name, is_on in zip(wrap.names, wrap.trainable, strict=True) if is_on]
        places = [int(place) for place in numbers[1].split()]
        known = len(ddp_wraps(rank)) == 1 and max(places) < len(trained)
        return [trained[place] for place in places] if known else []
    for window in windows(rank):
        forwards = [f for one in window.micro_steps for f in one.forwards if f.model == wrap.model]
        if any(f.grad and f.sync and f.through == "wrapper" for f in forwards):
            lacking = (window.micro_steps[-1].backward.lacking or {}).get(str(wrap.model))
            if lacking and len(lacking) < sum(wrap.trainable):
                return lacking
    return []


@check("S01", "H14", source="log")
def unused_in_log(logs: Logs) -> Findings:
    """Report S01, or H14 if only some ranks skipped the parameters and the others waited."""
    causes = blame(logs)
    events = [e for e in causes.roots if e.trace and UNFINISHED in e.trace.text]
    changed = any("training graph has changed" in e.trace.text for e in events if e.trace)
    lines = [line for line in logs.lines if WHICH.search(line.text)]
    if changed or not (events or lines):
        return
    text = events[0].trace.text if events and events[0].trace else lines[0].text
    which = WHICH.search(text)
    parameters = which["names"].strip() if which else "some parameters"
    ranks = {event.rank for event in events} or {int(which["rank"])} if which else {None}
    place = events[0].at if events else None
    where = f" at {place}" if place else ""
    waiting = {event.rank for event in causes.victims} - ranks - {None}
    evidence = tuple(text for e in events[:3] for text in e.evidence()) or (str(lines[0]),)
    file, line = (place.file, place.line) if place else (None, None)
    if len(events) == 1 and waiting and events[0].rank is not None:
        why = (
            f"Only rank {events[0].rank} has parameters without a gradient ({parameters}). "
            f"{named(waiting)} waited for their average{where}."
        )
        fix = entries["H14"].fix
        yield Finding("H14", "error", why, fix, file, line, events[0].rank, evidence)
        return
    why = f"Some parameters got no gradient in the previous step, so DDP waits for them{where}: {parameters}."
    if which is None or which["names"].strip()[:1].isdigit():
        why += " Numbers are positions in model.parameters(); TORCH_DISTRIBUTED_DEBUG=INFO prints the names."
    yield Finding("S01", "error", why, ENTRY.fix, file, line, None, evidence)
