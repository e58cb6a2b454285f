"""The live view: the run's progress and the activity of each rank and device, redrawn in place
during training.

Bars are made of characters, so the view also works without colors. On a narrow terminal, columns
shrink or disappear.
"""

import math
import time
from collections.abc import Sequence
from itertools import pairwise

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paralab.plan.plan import label
from paralab.show.console import plain_table
from paralab.show.follow import Follower, MemoryUse, RankProgress, Share
from paralab.units import age, plural, rate, seconds, size

REDRAW_SECONDS = 0.25  # four times per second is enough for a human reader
UNKNOWN = "–"
BLOCKS = "▁▂▃▄▅▆▇█"
# Minimum terminal widths for all columns, memory bars, and sample counts.
WIDE, MEDIUM, NARROW = 112, 76, 66


class LiveView:
    """`update` redraws in the calling thread, so Ctrl-C never leaves a half-drawn frame."""

    def __init__(self, follower: Follower, console: Console) -> None:
        self.follower, self.console = follower, console
        self.opened = self.drawn = time.monotonic()
        self.live = Live(get_renderable=self._frame, console=console, auto_refresh=False)
        self.live.start(refresh=True)

    def update(self) -> None:
        if time.monotonic() - self.drawn >= REDRAW_SECONDS:
            self.drawn = time.monotonic()
            self.live.refresh()

    def stop(self) -> None:
        """Draw the final frame with the ranks' last events, and restore the cursor."""
        self.follower.poll()
        self.live.stop()

    def _frame(self) -> Group:
        return frame(self.follower, time.monotonic() - self.opened, self.console.width)


def frame(follower: Follower, elapsed_seconds: float, width: int) -> Group:
    """Create one frame: three lines about the run, and a row per rank and device."""
    return Group(Text(), *_header(follower, elapsed_seconds, width), _table(follower, width))


def _header(follower: Follower, elapsed_seconds: float, width: int) -> list[Text]:
    plan, done = follower.plan, follower.done
    left = follower.seconds_left
    cells = 30 if width >= WIDE else 16 if width >= MEDIUM else 10
    what = Text.assemble((label(plan), "bold"), " · ", plan.workload.rpartition("/")[2])
    far = Text.assemble(
        *_bar(done / plan.num_steps, cells, "cyan"),
        f" step {done}/{plan.num_steps} · {seconds(elapsed_seconds)} elapsed",
        "" if left is None else " · done" if done >= plan.num_steps else f" · {age(left)} left",
    )
    parts = [f"loss {follower.losses[-1]:.4f}" if follower.losses else "waiting for the first step"]
    if follower.losses:
        parts.append(f"{rate(follower.samples_per_second)} samples/s")
    if follower.cores_used is not None:
        parts.append(f"{follower.cores_used:.1f} of {plural(follower.machine.cores, 'core')}")
    learned = Text.assemble(" · ".join(parts), " ", (sparkline(follower.losses, cells), "green"))
    for line in (what, far, learned):
        line.no_wrap, line.overflow = True, "ellipsis"
    return [what, far, learned]


def _table(follower: Follower, width: int) -> Table:
    """Create the table. A title says how its column was measured, if that is the same for all
    rows."""
    rows = [(rank, device) for rank in follower.ranks for device in rank.devices]
    loads = [rank.load_of(device) for rank, device in rows]
    usage = [rank.memory_of(device) for rank, device in rows]
    titles = []
    for name, measured in (("load", loads), ("memory", usage)):
        ways = {each.measure for each in measured if each}
        titles.append(ways.pop() if len(ways) == 1 else name)
    several = len(follower.ranks) > 1
    own = {rank.plan.rank: _of_rank(follower, rank, width, several) for rank in follower.ranks}
    names = list(own[0])
    table = plain_table("rank", "device", *titles, *names, right=("rank", *names))
    table.padding = (0, 2 if width >= MEDIUM else 1, 0, 0)
    for (rank, device), load, memory in zip(rows, loads, usage, strict=True):
        numbers = own.pop(rank.plan.rank, None)  # shown only once, next to the rank's first device
        who, cells = (str(rank.plan.rank), numbers.values()) if numbers else ("", [""] * len(names))
        table.add_row(who, device, _load(load, width), _memory(memory, width), *cells)
    for column in table.columns:
        column.no_wrap = True
    return table


def _of_rank(
    follower: Follower, rank: RankProgress, width: int, with_communication: bool
) -> dict[str, str]:
    """Return the text in each column for numbers that belong to the process, not to a device."""
    step, data = rank.step_seconds, rank.data_seconds
    share = follower.communication_share(rank.plan.rank)
    numbers = {"step": UNKNOWN if step is None else seconds(step)}
    if with_communication:
        name = "communication" if width >= WIDE else "comm."
        numbers[name] = UNKNOWN if share is None else f"{share:.0%}"
    numbers["data"] = UNKNOWN if data is None else seconds(data)
    if width >= NARROW:
        numbers["samples"] = f"{rank.samples:,}"
    return numbers


def _load(load: Share | None, width: int) -> Text:
    if load is None:
        return Text(UNKNOWN)
    cells = 12 if width >= WIDE else 6 if width >= MEDIUM else 4
    return Text.assemble(*_bar(load.value, cells, "green"), f" {load.value:4.0%}")


def _memory(memory: MemoryUse | None, width: int) -> Text:
    if memory is None:
        return Text(UNKNOWN)
    if width < MEDIUM or memory.capacity_bytes is None:
        return Text(size(memory.bytes))
    bar = _bar(memory.bytes / memory.capacity_bytes, 12 if width >= WIDE else 4, "magenta")
    of = f" of {size(memory.capacity_bytes)}" if width >= WIDE else ""
    return Text.assemble(*bar, f" {size(memory.bytes)}{of}")


def _bar(share: float, cells: int, color: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Draw `███░░░`. A value above 0 is always visible, and a value above 1 fills the bar."""
    full = min(cells, max(0, math.ceil(share * cells - 0.5), 1 if share > 0 else 0))
    return ("█" * full, color), ("░" * (cells - full), "dim")


def sparkline(values: Sequence[float], cells: int) -> str:
    """Draw the mean of each part: [4, 3, 2, 1] in 4 cells -> █▆▃▁. NaN leaves a gap."""
    cells = min(cells, len(values))
    edges = [len(values) * cell // cells for cell in range(cells + 1)] if cells else []
    parts = [
        [value for value in values[start:stop] if math.isfinite(value)]
        for start, stop in pairwise(edges)
    ]
    means = [sum(part) / len(part) if part else None for part in parts]
    known = [mean for mean in means if mean is not None]
    if not known:
        return ""
    low, spread = min(known), max(known) - min(known)
    per_block = spread / (len(BLOCKS) - 1) or 1.0
    return "".join(" " if m is None else BLOCKS[round((m - low) / per_block)] for m in means)
