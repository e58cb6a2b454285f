"""P03: Fewer micro-batches than stages."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

ENTRY = Entry(
    id="P03",
    title="Fewer micro-batches than stages",
    symptom="'Number of microbatches (1) must be greater than or equal to the number of stages (2)'.",
    cause="1F1B fills the pipeline with one micro-batch per stage before the first backward.",
    fix="At least as many micro-batches as stages; four times as many for a small bubble.",
    wrong="""\
stage = PipelineStage(part, rank, num_stages=2, device=device)
schedule = Schedule1F1B(stage, n_microbatches=1, loss_fn=loss_fn)
""",
    right="""\
stage = PipelineStage(part, rank, num_stages=2, device=device)
schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
""",
    messages=(
        Message(
            r"Number of microbatches \((?P<chunks>\d+)\) must be greater than or equal to the number of "
            r"stages \((?P<stages>\d+)\)",
            "The pipeline has {stages} stages and n_microbatches={chunks}{at}. 1F1B keeps one "
            "micro-batch in every stage, so it needs at least {stages}.",
        ),
    ),
)
