"""C03: Every rank saves to the same file.

Symptom: Occasionally a checkpoint is unreadable: 'PytorchStreamReader failed reading file'.
Cause: All ranks truncate and write the same file at the same time.
Fix: Save on rank 0 only, rename the finished file into place, and call `dist.barrier()` before others read it.
Reported: DLLXW/baby-llama2-chinese#56 MLI-lab/DeepDeWedge#41 pytorch/pytorch#73168

- torch.save(model.module.state_dict(), "net.pt")
+ if dist.get_rank() == 0:
+     torch.save(model.module.state_dict(), "net.pt.new")
+     os.replace("net.pt.new", "net.pt")
+ dist.barrier()
"""

import ast
import os
import re

from paralab.doctor.events import Save
from paralab.doctor.failures.checkpoints.files import is_own_path
from paralab.doctor.observation import Observation
from paralab.doctor.rank_checks import listed, make_finding
from paralab.doctor.registry import Findings, Message, check, describe
from paralab.doctor.static.bindings import dotted_key
from paralab.doctor.static.facts import Call, If, With
from paralab.doctor.static.hints import guards, is_for_one_rank, is_in_training, trains
from paralab.doctor.static.names import ACCELERATOR, DDP, INIT
from paralab.doctor.static.report import code, found
from paralab.doctor.static.script import Script
from paralab.doctor.static.ways import arrives, excludes, starts_of_job, ways_to

ENTRY = describe(
    __doc__,
    Message(
        r"PytorchStreamReader failed (?:reading|locating|finding)",
        "{who} read a damaged checkpoint{at}. Multiple ranks wrote it at once (certain if "
        "torch.save runs on every rank), its writer was killed, or a download was incomplete.",
        severity="suspect",
    ),
    silent=True,
)
# A condition of unknown value may check the rank if it contains one of these words.
_ABOUT_RANKS = re.compile(
    r"rank|main|master|primary|chief|leader|gpu|local|zero|node|dist|world|multi|device", re.I
)


_SAVES = re.compile(
    r"^(torch\.)?save(_\w*)?(checkpoint|ckpt|model|snapshot|weights|network|state)s?$|^save$", re.I
)
# With these frameworks, every rank must call the save function, or the framework chooses the rank.
_SAVE_TOGETHER = (
    "accelerate", "deepspeed", "lightning", "pytorch_lightning", "transformers", "composer", "ignite", "mmcv",
    "mmengine", "fairscale", "torch.distributed.checkpoint", "torch.distributed.fsdp", "megatron", "colossalai",
)  # fmt: skip
_RANKS_HERE = re.compile(
    r"\b(local_|global_)?rank\b|is_main_process|is_master|get_rank|world_size|is_distributed|DistributedDataParallel|init_process_group"
)
_FOR_ONE = re.compile(
    r"rank|main_?proc|is_main|if_main|master|primary|chief|leader|zero|root|coordinator|writer|should_save",
    re.I,
)
_ON_FOLDERS = ("shutil.rmtree", "shutil.copytree")
_MACHINE = re.compile(r"(^|[._])(current_)?hosts?(_?name|_?rank)?$|(^|[._])node_(rank|id)$", re.I)
_GLOBAL = re.compile(r"global_rank|get_rank\(|[\"']RANK[\"']")


@check("C03", source="script")
def every_rank_saves(script: Script) -> Findings:
    """Report a save that all ranks reach with the same path."""
    saves = script.calls_of("torch.save")
    starts = starts_of_job(script) if saves else []
    apart = bool(starts) and _has_one_rank_per_machine(script)
    for call in saves if starts else []:
        path = call.argument(1, "f")
        if path is None or is_own_path(script, path, call.scope) or _takes_turns(script, call):
            continue
        ways = [
            way
            for way in ways_to(script, call)
            if any(not excludes(way, start) for start in starts)
            and (way.known or len(way.calls) > 1 or call.module is script.modules[0])
        ]
        arrivals = [(way, arrives(script, way, 0), arrives(script, way, 1)) for way in ways]
        doubts = [one.doubt for _, *both in arrivals for one in both if one.doubt]
        if any(_ABOUT_RANKS.search(ast.unparse(doubt.test)) for doubt in doubts):
            continue
        twins = [one for one in script.calls_in(call.scope) if one is not call]
        twin = any(
            one.target == call.target and code(one.argument(1, "f")) == code(path) for one in twins
        )
        reached = [
            way
            for way, first, second in arrivals
            if second.taken is not False and (first.taken is not False or twin)
        ]
        if reached:
            known = any(way.known for way in reached)
            doubt = "" if known else "if multiple ranks call this function"
            doubt = doubt if trains(script) else "if multiple ranks run this script"
            doubt = (
                "if the machines share a file system, because each machine has a rank for which this is true"
                if apart
                else doubt
            )
            doubt = f"if `{code(doubts[0].test)}` is true on multiple ranks" if doubts else doubt
            why = f"All ranks save to `{code(path)}` at the same time, which can corrupt the file."
            yield found(script, "C03", "error", call, why, doubt=doubt)
    yield from _by_name(script, saves if starts else [])
    yield from _on_every_machine(script, saves)
    yield from _folders_by_name(script)


def _folders_by_name(script: Script) -> Findings:
    """Flag `save_pretrained`, `rmtree`, or `copytree` if every rank of a training script calls
    it."""
    here = script.modules[0]
    is_job = trains(script) or script.calls_of(DDP, ACCELERATOR)
    if not is_job or not _RANKS_HERE.search(here.text) or script.methods("Trainer"):
        return
    for call in (*script.methods("save_pretrained"), *script.calls_of(*_ON_FOLDERS)):
        given, named = call.arguments, call.argument(99, "is_main_process")
        words = [call.scope.name, *(code(one, 200) for one in (*guards(script, call), *given))]
        if call.module is not here or not given or named or any(map(_FOR_ONE.search, words)):
            continue
        if not any(is_own_path(script, one, call.scope) for one in given):
            why = f"No test before `{code(call.node.func)}` mentions the rank."
            doubt = "if every rank gets here, and they share a file system"
            yield found(script, "C03", "suspect", call, why, doubt=doubt)


def _by_name(script: Script, judged: list[Call]) -> Findings:
    """Flag a save in a file that mentions ranks, if no condition before the save does."""
    here = script.modules[0]
    if script.imports(*_SAVE_TOGETHER) or not _RANKS_HERE.search(here.text):
        return
    for call in script.calls_matching(_SAVES):
        own = call.function is not None and call.made is None and call.module is here
        if call in judged or call.module is not here or own or not call.arguments:
            continue
        if call.target != "torch.save" and not is_in_training(script, call.scope):
            continue
        inside = list(script.parts(call.function.node)) if call.function is not None else []
        tests = [*guards(script, call), *(one.test for one in inside if isinstance(one, ast.If))]
        if any(_FOR_ONE.search(code(one, 200)) for one in (*tests, *call.arguments)):
            continue
        if not any(is_own_path(script, one, call.scope) for one in call.arguments):
            why = f"No test before `{code(call.node.func)}` mentions the rank."
            doubt = "if every rank gets here and the function writes one file"
            yield found(script, "C03", "suspect", call, why, doubt=doubt)
            return


def _on_every_machine(script: Script, saves: list[Call]) -> Findings:
    """Flag `if local_rank == 0: save()` if the script also has the global rank."""
    for call in saves if any(_GLOBAL.search(one.text) for one in script.modules) else ():
        for test in guards(script, call):
            text = code(test, 200)
            if is_for_one_rank(test) and "local_rank" in text and not _GLOBAL.search(text):
                why = f"`{text}` is true once per machine."
                fix = "Test the global rank: `dist.get_rank() == 0`."
                doubt = "if multiple machines write to one file system"
                yield found(script, "C03", "suspect", call, why, fix, doubt=doubt)
                return


def _has_one_rank_per_machine(script: Script) -> bool:
    """Return whether the "rank" is really the number of a machine:
    `rank=hosts.index(current_host)`."""
    ranks = [(call.argument(99, "rank"), call.scope) for call in script.calls_of(INIT)]
    return any(
        _MACHINE.search(dotted_key(part) or "")
        for rank, scope in ranks
        if rank is not None and "local" not in code(rank, 200)
        for part, _ in script.ingredients(rank, scope, hops=2)
    ) and not any("local_rank" in one.text for one in script.modules)


def _takes_turns(script: Script, call: Call) -> bool:
    """Return whether a lock, a barrier, or a context manager makes the ranks save one after
    another."""
    managers = [ast.unparse(one.item) for one in call.inside(With)]
    around = script.calls_in(call.scope)
    if any(re.search("first|(?<![bc])lock", one, re.I) for one in managers):
        return True
    if any(one.method in ("flock", "lockf", "acquire") for one in around):
        return True
    waits = [one for one in around if one.method == "barrier"]
    return any(script.differs(test.test, one.scope) for one in waits for test in one.inside(If))


@check("C03", source="ranks")
def several_writers(seen: Observation) -> Findings:
    writers: dict[tuple[str, str, int], dict[int, Save]] = {}
    for rank in seen.ranks:
        for save in rank.of(Save):
            if save.path and save.path != os.devnull and not save.error:
                writers.setdefault((rank.start.host, save.path, save.step), {})[rank.rank] = save
    for (_, path, step), saves in writers.items():
        if len(saves) > 1:
            why = (
                f"Ranks {listed(list(map(str, saves)))} all write {os.path.basename(path)} after step "
                f"{step}. Each truncates the file while another writes, which can corrupt it."
            )
            yield make_finding("C03", "error", why, next(iter(saves.values())), path)
            return
