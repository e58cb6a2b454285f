"""S02: A parameter is ready twice in one backward pass."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paralab.doctor.events import Wrap
from paralab.doctor.finding import Finding, Severity
from paralab.doctor.observation import WatchedRank
from paralab.doctor.rank_checks import check_each_rank, make_finding
from paralab.doctor.registry import Entry, Message, check
from paralab.doctor.static.models import classes, is_decided, option, wraps
from paralab.doctor.static.report import add_keyword, found, line_of, replace
from paralab.doctor.static.script import Script

ENTRY = Entry(
    id="S02",
    title="A parameter is ready twice in one backward pass",
    symptom="'Expected to mark a variable ready only once', with the index or name of a parameter.",
    cause=(
        "Reentrant activation checkpointing, shared weights, or a use outside forward fires a parameter's hook "
        "twice in one backward pass."
    ),
    fix="Pass `use_reentrant=False` to checkpoint(). Otherwise drop find_unused_parameters or use static_graph=True.",
    example="""\
- model = DistributedDataParallel(model, find_unused_parameters=True)
- hidden = checkpoint(block, hidden, use_reentrant=True)
+ model = DistributedDataParallel(model)
+ hidden = checkpoint(block, hidden, use_reentrant=False)
""",
    sources=(
        "huggingface/peft#313",
        "huggingface/accelerate#2017",
        "lucidrains/DALLE2-pytorch#225",
        "microsoft/FocalNet#4",
        "pytorch/pytorch#24005",
    ),
    messages=(
        Message(
            r"Expected to mark a variable ready only once"
            r"(?:.*?Parameter at index (?P<index>\d+)(?: with name (?P<name>\S+))? has been marked)?",
            "In one backward pass{at} the gradient of a parameter ({name} {index}) became ready twice. "
            "A reentrant checkpoint runs its part of the graph separately, or two places share the parameter.",
        ),
    ),
)
TWICE = "mark a variable ready only once"


@check("S02", source="script")
def reentrant_checkpoint(script: Script) -> Iterator[Finding]:
    """Report reentrant checkpointing together with find_unused_parameters=True."""
    searching = [wrap for wrap in wraps(script) if option(script, wrap, "find_unused_parameters")]
    searching = [wrap for wrap in searching if option(script, wrap, "static_graph") is False]
    for call in script.calls_of("torch.utils.checkpoint.checkpoint"):
        given = call.argument(99, "use_reentrant")
        reentrant = isinstance(given, ast.Constant) and given.value is True
        if not searching or not (reentrant or (given is None and not call.unpacks)):
            continue
        wrap = searching[0]
        owner = script.class_around(call.scope)
        inside = owner in classes(script, wrap.argument(0, "module"), wrap.scope)
        sure = inside and call.scope.name == "forward" and is_decided(script, call)
        how = "use_reentrant=True" if given else "use_reentrant=True (the default)"
        why = (
            f"Checkpointing with {how} runs a second backward inside the first. By then "
            f"find_unused_parameters=True ({line_of(wrap, call)}) has marked the parameters of this "
            "block as done, so DDP raises 'Expected to mark a variable ready only once'."
        )
        if not sure:
            why += " Certain if this line runs in the DDP model."
        edits = (
            add_keyword(script, call, "use_reentrant=False")
            if given is None
            else replace(script, call.module, given, "False")
        )
        severity: Severity = "error" if sure else "suspect"
        fix = "Pass use_reentrant=False."
        yield found(script, "S02", severity, call, why, fix, also=(wrap,), edits=edits)


@check_each_rank("S02")
def ready_twice(rank: WatchedRank) -> Finding | None:
    """Explain DDP's exception on the first rank that raised it."""
    if not rank.raised or TWICE not in rank.raised.message:
        return None
    name = rank.raised.message.partition("with name ")[2].split(" ")[0]
    wrap = rank.last(Wrap)
    searches = wrap is not None and wrap.options.get("find_unused_parameters")
    why = (
        f"{name or 'A parameter'} was ready for averaging twice in one backward pass. Part of the "
        "model is recomputed (reentrant checkpointing) or used twice under "
        f"{'find_unused_parameters=True' if searches else 'DDP'}."
    )
    evidence = f"rank {rank.rank}: {rank.raised.message.splitlines()[0][:160]}"
    return make_finding("S02", "error", why, rank.raised.place, evidence)
