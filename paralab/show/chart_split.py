"""Draw a batch to scale. The top row is the full batch; below it, each device's pieces appear at
their position in the batch."""

from __future__ import annotations

from paralab.analyse.blocks import Split
from paralab.show.chart_bars import rows
from paralab.show.svg import NARROW, element, nothing, picture, text, width_of

GAP = 2  # px between pieces


def draw_split(split: Split, name: str, width: int) -> str:
    extent = max(split.total, sum(sum(part.pieces) for part in split.parts))
    if extent <= 0:
        return nothing("nothing to split")
    sums = [_sum(part.pieces) if width > NARROW else str(sum(part.pieces)) for part in split.parts]
    shape = rows(["batch", *(part.label for part in split.parts)], width, 0, 34, ["", *sums])
    px_per_sample = (shape.right - shape.left) / extent

    drawn = [
        shape.draw_label(0),
        _piece(split.total, shape.left, shape.middle(0), split.total * px_per_sample, "whole"),
    ]
    x = shape.left
    for number, part in enumerate(split.parts):
        middle = shape.middle(number + 1)
        drawn.append(shape.draw_label(number + 1))
        drawn.append(
            element("line", class_="grid", x1=shape.left, x2=shape.right, y1=middle, y2=middle)
        )
        for piece in part.pieces:
            drawn.append(
                _piece(piece, x, middle, piece * px_per_sample, f"share line-{number % 8}")
            )
            x += piece * px_per_sample
        drawn.append(text(sums[number], shape.right + 10, middle + 4.5, "value"))
    told = f"{split.total} samples: " + "; ".join(
        f"{part.label} {words}" for part, words in zip(split.parts, sums, strict=True)
    )
    return picture(name, split.title, told, width, shape.bottom, *drawn)


def _piece(samples: int, x: float, middle: float, width: float, look: str) -> str:
    """Draw a box with its sample count, if the number fits."""
    if samples <= 0:
        return ""
    tip = element("title", f"{samples} samples")
    box = element(
        "rect",
        tip,
        class_=f"piece {look}",
        x=x + GAP / 2,
        y=middle - 12,
        width=max(width - GAP, 1),
        height=24,
        rx=2,
    )
    fits = width - GAP > width_of(str(samples)) + 2
    return box + (
        text(str(samples), x + width / 2, middle + 4.5, "in-piece", "middle") if fits else ""
    )


def _sum(pieces: tuple[int, ...]) -> str:
    """Return `22`, `8 + 8 + 6 = 22`, or `4 × 16 = 64`. Equal pieces are counted; for many unequal
    pieces, only their number and sum appear."""
    total = str(sum(pieces))
    if len(pieces) < 2:
        return total
    if len(set(pieces)) == 1:
        return f"{len(pieces)} × {pieces[0]} = {total}"
    return (
        f"{' + '.join(map(str, pieces))} = {total}"
        if len(pieces) <= 3
        else f"{len(pieces)} pieces = {total}"
    )
