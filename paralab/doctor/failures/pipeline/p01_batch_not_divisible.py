"""P01: The batch does not split into equal micro-batches. Its checks also report P02 and P04.

Symptom: The last stage raises 'The size of tensor a (3) must match the size of tensor b (2)'; the first loses the connection.
Cause: The micro-batches differ in size, but the receive buffers between stages keep the shape of the first.
Fix: Use a batch size that is a multiple of n_microbatches, and drop_last=True.
Reported: pytorch/pytorch#126600 pytorch/torchtitan#947 Coobiw/MPP-LLaVA#25

  schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_fn)
- loader = DataLoader(data, batch_size=10)
+ loader = DataLoader(data, batch_size=12, drop_last=True)
"""

from paralab.doctor.events import Pipeline
from paralab.doctor.failures.hangs.failed_ranks import is_uneven
from paralab.doctor.failures.pipeline.schedules import even_fix, split_sizes, uneven_steps
from paralab.doctor.observation import Observation
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.registry import Findings, Message, check, describe
from paralab.doctor.static.report import found
from paralab.doctor.static.script import Script

ENTRY = describe(
    __doc__,
    Message(
        r"pipelining[/\\](?:schedules|stage)\.py.*The size of tensor a \((?P<a>\d+)\) must match "
        r"the size of tensor b \((?P<b>\d+)\)",
        "{who} got micro-batches of {a} and {b} rows in one step{at}, but receive buffers keep the "
        "shape of the first micro-batch.",
    ),
    silent=True,
)


@check("P01", "P02", "P04", source="script")
def uneven_batch(script: Script) -> Findings:
    for step, schedule, batch, count, reason in uneven_steps(script):
        sizes = split_sizes(batch, count)
        why = f"{count} micro-batches (line {schedule.line}), but {reason}. {_consequence(sizes)}"
        fix = even_fix(batch, count)
        yield found(script, _entry(sizes), "error", step, why, fix, also=(schedule,))


@check("P01", "P02", "P04", source="ranks")
def observed_uneven_batch(seen: Observation) -> Findings:
    """Report steps with micro-batches of different sizes, including unfinished steps."""
    events = [(rank, event) for rank in seen.ranks for event in (*rank.story, *rank.doing)]
    reported = set()
    for rank, event in events:
        if not isinstance(event, Pipeline) or not event.size or not is_uneven(event):
            continue
        sizes = split_sizes(event.size, event.microbatches)
        if _entry(sizes) not in reported:
            reported.add(_entry(sizes))
            why = f"A batch of {event.size} is split into {event.microbatches} micro-batches. {_consequence(sizes)}"
            where = f"rank {rank.rank}, stage {event.stage} of {event.stages}"
            evidence = f"{where}: {(event.error or 'no error').splitlines()[0][:160]}"
            fix = even_fix(event.size, event.microbatches)
            yield make_finding(_entry(sizes), "error", why, event, evidence, fix=fix)


def _entry(sizes: list[int]) -> str:
    return {0: "P02", 1: "P04"}.get(min(sizes), "P01")


def _consequence(sizes: list[int]) -> str:
    if min(sizes) == 0:
        return "There are fewer rows than micro-batches, and each stage fails differently."
    parts = ", ".join(map(str, sizes))
    if min(sizes) == 1:
        return f"They get {parts} rows. The loss silently broadcasts the single row, and other stages fail in backward."
    return f"They get {parts} rows, but every stage expects {sizes[0]} and fails."
