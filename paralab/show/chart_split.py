"""A batch drawn to scale: all of it on top, below it what every device takes, each piece where it lies in the batch."""

from __future__ import annotations

from paralab.analyse.blocks import Split
from paralab.show.svg import element, label, nothing, picture, text, width_of

WIDTH, ROW = 620, 34
GAP = 2  # px between pieces


def draw_split(split: Split, name: str) -> str:
    shares = [sum(part.pieces) for part in split.parts]
    extent = max(split.total, sum(shares))
    if extent <= 0:
        return nothing("nothing to split")
    left = min(max(map(width_of, ["batch", *(part.label for part in split.parts)])) + 18, 190)
    sums = [_sum(part.pieces) for part in split.parts]
    right = WIDTH - min(max(map(width_of, sums), default=0) + 16, 150)
    px_per_sample = (right - left) / extent

    rows = [label("batch", left - 12, 20, left - 12), *_piece(split.total, left, 4, split.total * px_per_sample, "whole")]
    x = left
    for number, part in enumerate(split.parts):
        y = 4 + ROW * (number + 1)
        rows.append(label(part.label, left - 12, y + 16, left - 12))
        rows.append(element("line", class_="grid", x1=left, x2=right, y1=y + 12, y2=y + 12))
        for piece in part.pieces:
            rows += _piece(piece, x, y, piece * px_per_sample, f"share line-{number % 8}")
            x += piece * px_per_sample
        rows.append(text(sums[number], right + 10, y + 16, "value"))
    told = f"{split.total} samples: " + "; ".join(f"{part.label} {words}" for part, words in zip(split.parts, sums, strict=True))
    return picture(name, split.title, told, WIDTH, 4 + ROW * (len(split.parts) + 1), *rows)


def _piece(samples: int, x: float, y: float, width: float, look: str) -> list[str]:
    """A box with its number of samples, where there is room for the number."""
    if samples <= 0:
        return []
    tip = element("title", f"{samples} samples")
    box = element("rect", tip, class_=f"piece {look}", x=x + GAP / 2, y=y, width=max(width - GAP, 1), height=24, rx=2)
    fits = width - GAP > width_of(str(samples)) + 2
    return [box, text(str(samples), x + width / 2, y + 16.5, "in-piece", "middle")] if fits else [box]


def _sum(pieces: tuple[int, ...]) -> str:
    """`22`, `8 + 8 + 6 = 22`, `16 × 4 = 64`: equal pieces are counted, many unequal ones only added up."""
    total = str(sum(pieces))
    if len(pieces) < 2:
        return total
    if len(set(pieces)) == 1:
        return f"{len(pieces)} × {pieces[0]} = {total}"
    return f"{' + '.join(map(str, pieces))} = {total}" if len(pieces) <= 3 else f"{len(pieces)} pieces = {total}"
