"""P03: Fewer micro-batches than stages.

Symptom: 'Number of microbatches (1) must be greater than or equal to the number of stages (2)'.
Cause: 1F1B fills the pipeline with one micro-batch per stage before the first backward.
Fix: Use at least as many micro-batches as stages. Four times as many keeps the bubble small.

  stage = PipelineStage(part, rank, num_stages=2, device=device)
- schedule = Schedule1F1B(stage, n_microbatches=1, loss_fn=loss_fn)
+ schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
"""

from paralab.doctor.failures.pipeline.schedules import micro_batches, schedules, stages
from paralab.doctor.registry import Findings, Message, check, describe
from paralab.doctor.static.report import code, found
from paralab.doctor.static.script import Script

ENTRY = describe(
    __doc__,
    Message(
        r"Number of microbatches \((?P<chunks>\d+)\) must be greater than or equal to the number of "
        r"stages \((?P<stages>\d+)\)",
        "The pipeline has {stages} stages and n_microbatches={chunks}{at}. 1F1B keeps one "
        "micro-batch in every stage, so it needs at least {stages}.",
    ),
)


@check("P03", source="script")
def too_few_for_1f1b(script: Script) -> Findings:
    for schedule in schedules(script):
        count, known = micro_batches(script, schedule), stages(script, schedule)
        least = known or 2  # every pipeline has at least two stages
        if "1F1B" in schedule.target and count and count < least:
            why = f"`{code(schedule.node.func)}` raises a ValueError: n_microbatches is {count} for {known or 'two or more'} stages."
            yield found(script, "P03", "error", schedule, why)
