"""S02: A parameter is marked ready twice in one backward pass.

Symptom: 'Expected to mark a variable ready only once', with the index or name of a parameter.
Cause: Reentrant checkpointing, shared weights, or use outside forward triggers a parameter's hook twice.
Fix: Pass `use_reentrant=False` to checkpoint(). If you do not use checkpointing, drop
find_unused_parameters or use static_graph=True.
Reported: huggingface/peft#313 huggingface/accelerate#2017 lucidrains/DALLE2-pytorch#225
microsoft/FocalNet#4 pytorch/pytorch#24005

- model = DistributedDataParallel(model, find_unused_parameters=True)
- hidden = checkpoint(block, hidden, use_reentrant=True)
+ model = DistributedDataParallel(model)
+ hidden = checkpoint(block, hidden, use_reentrant=False)
"""

from paralab.doctor.registry import Findings, Message, check, describe
from paralab.doctor.static.facts import is_constant
from paralab.doctor.static.models import classes, is_decided, option, wraps
from paralab.doctor.static.report import add_keyword, found, line_of, replace
from paralab.doctor.static.script import Script

ENTRY = describe(
    __doc__,
    Message(
        r"Expected to mark a variable ready only once"
        r"(?:.*?Parameter at index (?P<index>\d+)(?: with name (?P<name>\S+))? has been marked)?",
        "In one backward pass{at}, the gradient of a parameter ({name} {index}) became ready twice. "
        "Reentrant checkpointing ran part of the model again, or two places share the "
        "parameter.",
    ),
)


@check("S02", source="script")
def reentrant_checkpoint(script: Script) -> Findings:
    """Report reentrant checkpointing together with find_unused_parameters=True."""
    searching = [wrap for wrap in wraps(script) if option(script, wrap, "find_unused_parameters")]
    searching = [wrap for wrap in searching if option(script, wrap, "static_graph") is False]
    for call in script.calls_of("torch.utils.checkpoint.checkpoint") if searching else ():
        given, wrap = call.argument(99, "use_reentrant"), searching[0]
        if not is_constant(given, True) and (given is not None or call.unpacks):
            continue
        owner = call.scope.class_around
        inside = owner in classes(script, wrap.argument(0, "module"), wrap.scope)
        sure = inside and call.scope.name == "forward" and is_decided(script, call)
        how = "use_reentrant=True" if given else "use_reentrant=True (the default)"
        why = (
            f"Checkpointing with {how} runs a second backward inside the first. By then "
            f"find_unused_parameters=True ({line_of(wrap, call)}) has marked the parameters of this "
            "block as done, so DDP raises."
        )
        doubt = "" if sure else "if this line runs in the DDP model"
        edits = add_keyword(script, call, "use_reentrant=False")
        edits = replace(script, call.module, given, "False") if given is not None else edits
        yield found(script, "S02", "error", call, why, doubt=doubt, also=(wrap,), edits=edits)
