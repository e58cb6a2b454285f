"""Draw the parts of a whole: one stacked bar for each row, all of the same length."""

from paralab.analyse.blocks import Cell, Shares, Table
from paralab.show import svg
from paralab.show.chart_bars import Rows
from paralab.show.palette import LEGEND, Legend, fill, kind_of, kinds_legend
from paralab.units import whole_percents

BAR = 24  # px


def shares_legend(shares: Shares) -> Legend:
    pairs = [pair for row in shares.rows for pair in zip(shares.kinds, row.shares, strict=True)]
    drawn = {kind for kind, share in pairs if share > 0}
    return kinds_legend(kind for kind in LEGEND if kind in drawn)


def draw_shares(shares: Shares, name: str, width: int) -> str:
    if not shares.rows:
        return svg.nothing()
    rows = Rows([row.label for row in shares.rows], width, 6, 34)
    x = rows.axis([0.0, 1.0], "share", from_zero=True)

    drawn, described = [], []
    for number, row in enumerate(shares.rows):
        start, words = 0.0, []
        drawn.append(rows.draw_label(number))
        for kind, share, percent in zip(
            shares.kinds, row.shares, whole_percents(row.shares), strict=True
        ):
            left, room = x(start), x(start + share) - x(start)
            start += share
            if share <= 0:
                continue
            shown = f"{percent}%"
            words.append(f"{LEGEND[kind_of(kind)][0]} {shown}")
            top = rows.middle(number) - BAR / 2
            look = "span is-exposed" if kind == "exposed" else "span"
            drawn.append(svg.rect(look, left, top, room, BAR, words[-1], fill=fill(kind), rx=None))
            if room > svg.width_of(shown) + 4:
                class_ = "in-span on-exposed" if kind == "exposed" else "in-span"
                middle = left + room / 2
                drawn.append(svg.text(shown, middle, rows.middle(number) + 4.5, class_, "middle"))
        described.append(f"{row.label}: {', '.join(words)}")
    return rows.picture(name, shares.title, "; ".join(described), x, *drawn)


def as_table(shares: Shares) -> Table:
    """Return the same numbers as a table, for the terminal and Markdown."""
    rows = tuple(
        (
            Cell(row.label, row.label),
            *(
                Cell(f"{percent}%", share)
                for share, percent in zip(row.shares, whole_percents(row.shares), strict=True)
            ),
        )
        for row in shares.rows
    )
    columns = tuple(LEGEND[kind_of(kind)][0].partition(":")[0] for kind in shares.kinds)
    return Table(shares.title, ("", *columns), rows, shares.note)
