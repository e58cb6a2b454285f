"""Run a rank inside the test's own process, with its plan and its context."""

import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from paralab.machine.host import Machine
from paralab.machine.precision import Probe as PrecisionProbe
from paralab.plan.request import Request
from paralab.plan.resolve import resolve
from paralab.record.writer import EventWriter
from paralab.worker.inspection.inspect_workload import inspect_workload
from paralab.worker.rank_context import set_up_rank
from paralab.workload.summary import Inspection, Summary
from paralab.workload.workload import Workload

MACHINE = Machine(4, 2**34, "a CPU", "linux", "3.11", "2.13.0", None, (), ("gloo",), "none")


def make_workload(samples=10, **fields):
    generator = torch.Generator().manual_seed(0)
    defaults = {
        "model": lambda: torch.nn.Linear(3, 2),
        "data": (
            torch.randn(samples, 3, generator=generator),
            torch.randn(samples, 2, generator=generator),
        ),
        "loss": torch.nn.functional.mse_loss,
        "batch_size": 4,
        "name": "test",
    }
    return Workload(**(defaults | fields))


def make_plan(workload, strategy="single", samples=10, **options):
    summary = Summary(
        name=workload.name,
        parameters=8,
        parameter_bytes=32,
        samples=samples,
        batch_size=workload.batch_size,
        data_path="",
        weighted=workload.weight is not None,
        optimizer="SGD",
        batch_norms=0,
        dropout=False,
        random=False,
    )
    return _resolve(Request(strategy, **options), summary)


def plan_workload(reference, strategy, **options):
    """Inspect the workload and make a plan, as a command does."""
    summary = inspect_workload(Inspection(reference, "cpu", layers=True))
    return _resolve(Request(strategy, workload=reference, **options), summary)


def _resolve(request, summary):
    return resolve(request, MACHINE, summary, lambda name: PrecisionProbe(True, "tried"), None)


@contextmanager
def make_context(folder: Path, workload, plan, rank=0):
    """Yield (context, model) of this rank. Afterward, restore what the setup changed in the
    process."""
    writer = EventWriter(Path(tempfile.mkdtemp(dir=folder), "events.jsonl"))
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    try:
        yield set_up_rank(workload, plan, rank, writer, 0.0)
    finally:
        writer.close()
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)


@contextmanager
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
