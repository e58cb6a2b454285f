"""G02: Every accumulated pass synchronizes gradients.

Symptom: The results are correct, but each step all-reduces all gradients N times instead of once.
Cause: DDP synchronizes in every backward pass unless the pass runs under `no_sync()`.
Fix: Run the forward and backward of every pass except the last under `with model.no_sync():`.
Reported: speechbrain/speechbrain#1802 goodfire-ai/spd#215 Lightning-AI/pytorch-lightning#2595

  for i, (x, y) in enumerate(loader):
-     (criterion(model(x), y) / N).backward()
+     with nullcontext() if (i + 1) % N == 0 else model.no_sync():
+         (criterion(model(x), y) / N).backward()
      if (i + 1) % N == 0:
          optimizer.step()
          optimizer.zero_grad()
"""

from paralab.doctor.failures.accumulation.accumulating import SYNCHRONIZERS, accumulations
from paralab.doctor.failures.accumulation.synchronizing import forwards_of, reduces, wasteful
from paralab.doctor.failures.accumulation.windows import quiet, windows
from paralab.doctor.observation import Observation
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.recorded import Run, check_each_run
from paralab.doctor.registry import Finding, Findings, check, describe
from paralab.doctor.static.facts import Call
from paralab.doctor.static.hints import is_parallel
from paralab.doctor.static.report import code, found, line_of
from paralab.doctor.static.script import Script
from paralab.units import plural, seconds

ENTRY = describe(__doc__, silent=True)


@check("G02", source="script")
def synchronizes_in_every_turn(script: Script) -> Findings:
    """Report several DDP backward passes per step in a project that never uses `no_sync`."""
    if script.methods("no_sync", "no_backward_sync") or script.attributes.get(
        "require_backward_grad_sync"
    ):
        return
    judged: set[Call] = set()
    for window in windows(script):
        call = window.backward.call
        judged.add(call)
        forwards = forwards_of(script, window.backward)
        events = (window.backward, *forwards)
        blocks = [quiet(script, *one) for event in events for one in event.blocks()]
        if window.number == 1 or not forwards or None in blocks:
            continue
        model = code(forwards[0].call.node.func)
        why = (
            f"{window.stepping} needs the sum over {window.many} backward passes, but each of them "
            f"all-reduces the gradients of `{model}`. One all-reduce is enough."
        )
        doubt = f"if `{window.size_text}` is more than 1" if window.is_optional else ""
        if script.is_kind(forwards[0].call.node.func, forwards[0].call.scope, "fsdp"):
            doubt = f"if `{model}` is the DDP wrapper"
        yield found(script, "G02", "warning", call, why, doubt=doubt, also=(window.step.call,))
    others = [name for name in SYNCHRONIZERS if name != "accelerate"]
    is_plain = not script.imports("accelerate") or not script.methods("accumulate")
    if is_parallel(script) and is_plain and not script.imports(*others):
        for call, step in accumulations(script):
            if call not in judged:
                why = f"`{code(step.node)}` ({line_of(step, call)}) runs only after multiple backward passes, and nothing calls `no_sync`."
                doubt = "if the model is the DDP wrapper, which all-reduces in each pass"
                yield found(script, "G02", "suspect", call, why, doubt=doubt, also=(step,))


@check("G02", source="ranks")
def synchronized_every_time(seen: Observation) -> Findings:
    for rank, window, inside in wasteful(seen):
        if inside:
            return  # G03 reports this
        count, early = len(window.micro_steps), window.micro_steps[:-1]
        spent = sum(one.backward.seconds or 0.0 for one in early if reduces(one))
        why = (
            f"In one optimizer step, {sum(map(reduces, window.micro_steps))} of {count} backward passes "
            "all-reduce the gradients. Only the last one needs to."
        )
        evidence = f"rank {rank.rank}: {seconds(spent)} per step in the other backward passes"
        yield make_finding("G02", "warning", why, early[0].backward, evidence)
        return


@check_each_run("G02", "P06")
def synchronized_in_run(run: Run) -> Finding | None:
    plan, all_reduces = run.plan, run.result.all_reduces_per_step or 0.0
    exposed, step = run.metrics.exposed_communication_seconds or 0.0, run.step_seconds
    buckets = len(run.last_buckets)
    return judge_synchronizations(all_reduces, buckets, plan.accumulate, exposed, step, plan.stages)


def judge_synchronizations(
    all_reduces: float, buckets: int, passes: int, exposed: float, step: float, stages: int = 1
) -> Finding | None:
    """Report a run that sends each bucket several times per step, before its sum is final."""
    if passes < 2 or not buckets or all_reduces < 2 * buckets or not step:
        return None
    times = all_reduces / buckets
    why = (
        f"{all_reduces:g} all-reduces per optimizer step for {plural(buckets, 'bucket')}: the gradients "
        f"are synchronized {times:g} times in {passes} backward passes, and once is enough. "
        f"{seconds(exposed)} per step ({exposed / step:.0%}) is exposed."
    )
    fix = f"{ENTRY.fix} In paralab, drop --sync-every-pass."
    gain = exposed * (1 - 1 / times) / step
    return Finding("P06" if stages > 1 else "G02", "warning", why, fix, gain=gain)
