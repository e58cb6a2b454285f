"""`--profile`: a few steps seen by torch.profiler as well, every operator and kernel, left in the
run folder for Perfetto."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

FIRST, STEPS = 4, 4  # steps 4 to 7: the first ones warm up, and one step warms the profiler up


@contextmanager
def profiled(folder: Path | None, rank: int) -> Iterator[Callable[[], None]]:
    """Yields what is to be called after every step."""
    if folder is None:
        yield lambda: None
        return
    folder.mkdir(exist_ok=True)
    activities = [ProfilerActivity.CPU] + (
        [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    )
    with profile(
        activities=activities,
        schedule=schedule(wait=FIRST - 1, warmup=1, active=STEPS, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(
            str(folder / f"rank{rank}.json")
        ),
    ) as profiler:
        yield profiler.step
