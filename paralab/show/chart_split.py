"""Draw a batch to scale: the full batch, and each device's pieces at their positions in it."""

from paralab.analyse.blocks import Split
from paralab.show.chart_bars import Rows
from paralab.show.svg import line, nothing, picture, rect, text, width_of
from paralab.units import plural

GAP = 2  # px between pieces


def draw_split(split: Split, name: str, width: int) -> str:
    extent = max(split.total, sum(sum(part.pieces) for part in split.parts))
    if extent <= 0:
        return nothing("nothing to split")
    sums = [_sum(part.pieces) for part in split.parts]
    rows = Rows(["batch", *(part.label for part in split.parts)], width, 0, 34, ["", *sums])
    px_per_sample = (rows.right - rows.left) / extent

    x, middle = rows.left, rows.middle(0)
    drawn = [rows.draw_label(0), _piece(split.total, x, middle, px_per_sample, "whole")]
    for number, part in enumerate(split.parts):
        middle = rows.middle(number + 1)
        drawn.append(rows.draw_label(number + 1))
        drawn.append(line("grid", rows.left, middle, rows.right, middle))
        for piece in part.pieces:
            drawn.append(_piece(piece, x, middle, px_per_sample, f"share line-{number % 8}"))
            x += piece * px_per_sample
        drawn.append(rows.draw_number(number + 1, rows.right + 10))

    parts = [f"{part.label} {words}" for part, words in zip(split.parts, sums, strict=True)]
    description = f"{plural(split.total, 'sample')}: {'; '.join(parts)}"
    return picture(name, split.title, description, (width, rows.bottom), *drawn)


def _piece(samples: int, x: float, middle: float, px_per_sample: float, look: str) -> str:
    """Draw a box with its sample count, if the number fits."""
    if samples <= 0:
        return ""
    width, words = samples * px_per_sample, str(samples)
    room = max(width - GAP, 1)
    tip = plural(samples, "sample")
    box = rect(f"piece {look}", x + GAP / 2, middle - 12, room, 24, tip)
    fits = room > width_of(words) + 2
    return box + (text(words, x + width / 2, middle + 4.5, "in-piece", "middle") if fits else "")


def _sum(pieces: tuple[int, ...]) -> str:
    """`22`, `8 + 8 + 6 = 22`, or `4 × 16 = 64`; many unequal pieces are only counted."""
    total = str(sum(pieces))
    if len(pieces) < 2:
        return total
    if len(set(pieces)) == 1:
        return f"{len(pieces)} × {pieces[0]} = {total}"
    each = " + ".join(map(str, pieces)) if len(pieces) <= 3 else f"{len(pieces)} pieces"
    return f"{each} = {total}"
