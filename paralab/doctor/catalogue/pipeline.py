"""Pipelines: stages, micro-batches and their shapes."""

from __future__ import annotations

from paralab.doctor.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        id="P01",
        title="The batch is no multiple of the micro-batches",
        symptom=(
            "The last stage: 'The size of tensor a (3) must match the size of tensor b (2)' in the loss; the first: a "
            "lost connection."
        ),
        cause="The pieces differ in size, and the buffers in which stages receive keep the shape of the first piece.",
        fix="A batch that is a multiple of n_microbatches, and drop_last=True.",
        wrong="""\
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_fn)
loader = DataLoader(data, batch_size=10)
""",
        right="""\
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_fn)
loader = DataLoader(data, batch_size=12, drop_last=True)
""",
        sources=("pytorch/pytorch#126600", "pytorch/torchtitan#947", "Coobiw/MPP-LLaVA#25"),
        silent=True,
    ),
    Entry(
        id="P02",
        title="The batch is smaller than the number of micro-batches",
        symptom="'Tensor size 3 is smaller than num_chunks', or 'Expecting 4 arg_mbs but got 3'; each stage says something else.",
        cause="The last batch of the epoch has fewer samples than pieces are asked for.",
        fix="drop_last=True.",
        wrong="""\
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_fn)
loader = DataLoader(data_of_11_samples, batch_size=8)
""",
        right="""\
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_fn)
loader = DataLoader(data_of_11_samples, batch_size=8, drop_last=True)
""",
    ),
    Entry(
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
    ),
    Entry(
        id="P04",
        title="A last micro-batch of one row is stretched",
        symptom="A warning about target sizes, a loss and 8 outputs for 7 rows; then the first stage fails in backward.",
        cause="The last piece has one row, the receive buffer two; the loss broadcasts one against the other.",
        fix="As P01: equal pieces.",
        wrong="""\
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.MSELoss())
loader = DataLoader(data, batch_size=7)
""",
        right="""\
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.MSELoss())
loader = DataLoader(data, batch_size=8, drop_last=True)
""",
        sources=("pytorch/pytorch#126600",),
        silent=True,
    ),
    Entry(
        id="P05",
        title="A pipeline with one micro-batch",
        symptom="No message. One stage works at a time: with S stages, (S−1)/S of the devices' time is idle.",
        cause="Nothing can overlap if the batch flows through in one piece.",
        fix="At least four micro-batches per stage.",
        wrong="""\
schedule = ScheduleGPipe(stage, n_microbatches=1, loss_fn=loss_fn)
""",
        right="""\
schedule = ScheduleGPipe(stage, n_microbatches=4 * stage.num_stages, loss_fn=loss_fn)
""",
        silent=True,
    ),
    Entry(
        id="P06",
        title="Pipeline with DDP: no_sync left between forward and backward",
        symptom="The replicas of a stage drift apart without a message; or gradients are sent more often per step than needed.",
        cause=(
            "Forward and backward of a micro-batch run in two no_sync() blocks, and DDP looks at the first only. With all forwards "
            "before the backwards, the last forward makes it ready to send, the first backward does it, and what the later ones "
            "add stays on each rank. (Measured with torch 2.13; without other forwards in between, two blocks do no harm.)"
        ),
        fix="One no_sync() block around both; torch.distributed.pipelining does the right thing for stages under DDP.",
        wrong="""\
for number, x in enumerate(parts):
    with stage.no_sync() if number < last else nullcontext():
        outputs.append(stage(x))
for number, output in enumerate(outputs):
    with stage.no_sync() if number < last else nullcontext():
        loss_fn(output).backward()
""",
        right="""\
for number, x in enumerate(parts):
    with stage.no_sync() if number < last else nullcontext():
        loss_fn(stage(x)).backward()
""",
        sources=("pytorch/PiPPy#1133",),
        silent=True,
    ),
)
