"""`--profile`: record all operators and kernels of a few steps with torch.profiler for Perfetto."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

# Profile steps 4 to 7. Earlier steps are warm-up, and step 3 also warms up the profiler.
FIRST, STEPS = 4, 4


@contextmanager
def profile_steps(folder: Path | None, rank: int) -> Iterator[Callable[[], None]]:
    """Profile the steps in this context. Yield a function to call after each step."""
    if folder is None:
        yield lambda: None
        return
    folder.mkdir(exist_ok=True)
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    path = str(folder / f"rank{rank}.json")
    with profile(
        activities=activities,
        schedule=schedule(wait=FIRST - 1, warmup=1, active=STEPS, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(path),
    ) as profiler:
        yield profiler.step
