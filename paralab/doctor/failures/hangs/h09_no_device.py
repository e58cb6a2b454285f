"""H09: Nothing tells NCCL which GPU a rank uses.

Symptom: NCCL guesses the GPU from the rank and warns that this can hang. barrier() may never return.
Cause: The script neither calls `torch.cuda.set_device` nor passes `device_id=`, so the first collective has to guess.
Fix: Set the device from LOCAL_RANK before init_process_group, and pass it as device_id.
Limits: Only NCCL guesses. CPU ranks cannot trigger it, so only scripts and logs show it.
Reported: pytorch/pytorch#134617 #178977 #159262 deepspeedai/DeepSpeed#7266

- dist.init_process_group("nccl")
+ device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
+ torch.cuda.set_device(device)
+ dist.init_process_group("nccl", device_id=device)
  dist.barrier()
"""

from paralab.doctor.failures.hangs.groups import backends
from paralab.doctor.failures.launch.devices import destination, moves
from paralab.doctor.registry import Findings, check, describe, printed
from paralab.doctor.static.facts import Call
from paralab.doctor.static.hints import trains, words_of_project
from paralab.doctor.static.names import INIT
from paralab.doctor.static.report import code, found, line_of
from paralab.doctor.static.script import Script
from paralab.doctor.static.ways import ways_to

ENTRY = describe(
    __doc__,
    printed(
        r"using GPU (?P<gpu>\d+) (?:to perform barrier )?as (?:the )?devices? used by this process (?:is|are) "
        r"currently unknown|Guessing device ID based on global rank",
        "NCCL guessed the GPU of {who} from the rank, because the first collective ran before "
        "torch.cuda.set_device. A wrong guess makes the job hang.",
        severity="warning",
    ),
)


_NOTHING = "Nothing calls torch.cuda.set_device or passes device_id, so GPU 0 is the current device of every rank."
OWN_DEVICES = ("accelerate", "deepspeed", "lightning", "pytorch_lightning", "horovod", "ray")


@check("H09", source="script")
def no_device_chosen(script: Script) -> Findings:
    """Report a project that uses NCCL and never tells it which GPU belongs to a rank."""
    starts, names = script.calls_of(INIT), backends(script)
    if names.isdisjoint({"nccl", "unknown"}) or script.imports(*OWN_DEVICES):
        return
    if any(call.argument(99, "device_id") or call.unpacks for call in starts):
        return
    if script.methods("set_device", "set_default_device", "set_device_index") or any(
        "CUDA_VISIBLE_DEVICES" in module.text for module in script.modules
    ):
        return
    devices = [
        call
        for call in script.calls
        if "device" in call.method.lower() and (call.target or call.method != "get_device")
    ]
    known = ("torch.", "builtins.")
    if any(call.function is None and not call.target.startswith(known) for call in devices):
        return  # a function outside the project may choose the GPU
    barriers = script.calls_of("torch.distributed.barrier")
    barriers = [call for call in barriers if call.argument(99, "device_ids") is None]
    bare = [call for call in script.methods("cuda") if not call.node.args and call.receiver]
    bare += [call for call in moves(script) if destination(script, call) == "cuda"]
    if script.is_spawned(starts[0].scope):  # the rest of the project may belong to another job
        job = script.reached(starts[0].scope)
        barriers = [call for call in barriers if call in job]
        bare = [call for call in bare if call in job]
    is_run = trains(script) and any(way.known for way in ways_to(script, starts[0]))
    if names != {"nccl"} or not (barriers or bare) or not is_run:
        yield from _by_name(script, starts[0])
        return
    first = (bare or barriers)[0]
    use = "barrier()" if not bare else f".{code(first.node).rpartition('.')[2]}"
    why = f"{_NOTHING} `{use}` ({line_of(first, starts[0])}) relies on it."
    # NCCL takes the GPU of an earlier collective, or guesses from the rank, which is often right.
    doubt = "" if bare else "if no collective ran on the rank's GPU before, and NCCL guesses wrong"
    yield found(script, "H09", "warning", starts[0], why, doubt=doubt, also=(first,))


def _by_name(script: Script, start: Call) -> Findings:
    """Flag a project that uses GPUs but never sets a rank's GPU, even if every tensor names its
    GPU."""
    chosen = {"set_device", "set_default_device", "CUDA_VISIBLE_DEVICES"}
    is_whole = trains(script) and start.module is script.modules[0]
    if not is_whole and chosen & words_of_project(script):
        return  # code that imports this module may choose the GPU
    if not any("cuda" in one.text for one in script.modules):
        return
    doubt = "if the backend is nccl, and a barrier or an allocation uses the current device"
    yield found(script, "H09", "suspect", start, _NOTHING, doubt=doubt)
