"""Explain why a step takes longer than a perfect split would.

perfect   n devices take 1/n of one device's step time for the same batch (or the same time for an
          n times larger batch)
lost      all time beyond that, split by measured cause
"""

from paralab.analyse.compare import Row


def perfect_seconds(row: Row, one: Row) -> float:
    return _work(row, one) * one.step_seconds.median


def _work(row: Row, one: Row) -> float:
    """Return the samples per device relative to `one`."""
    return row.batch.size / one.batch.size / (row.devices / one.devices)


def losses_of(row: Row, one: Row) -> dict[str, float]:
    """Return the seconds per step lost by cause, compared with a perfect split of `one`."""
    mine, theirs = row.metrics, one.metrics
    work = _work(row, one)

    def more(name: str) -> float:
        return max(0.0, (mine[name] or 0.0) - work * (theirs[name] or 0.0))

    computing = more("compute_seconds")
    idle = mine.bubble.measured if mine.bubble else 0.0
    bubble = min(computing, idle * (mine.compute_seconds or 0.0))
    known = {
        "exposed communication": more("exposed_communication_seconds"),
        "waiting for a slower rank": more("exposed_waiting_seconds"),
        "idle stages (the bubble)": bubble,
        "slower compute": computing - bubble,
        "the optimizer, which every device repeats": more("optimizer_seconds"),
    }
    lost = row.step_seconds.median - perfect_seconds(row, one)
    return known | {"other": max(0.0, lost - sum(known.values()))}
