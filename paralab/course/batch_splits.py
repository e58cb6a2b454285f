"""Practical 5: the batch, seen from inside the model, and its even and odd splits."""

from __future__ import annotations

from paralab.analyse import table_cells as cells
from paralab.analyse.blocks import Answer, Block, Table
from paralab.analyse.phrases import listed, split_words
from paralab.course.configurations import DP2, DP3, DP5
from paralab.course.measurements import Measurements, Row, drawn_split
from paralab.units import plural

SRUN = "srun --partition=gpu --gres=gpu:3 --cpus-per-task=16 --mem=16G python practicals/practical5_dp.py"


def inside(lab: Measurements) -> list[Block]:
    row = lab[DP2]
    rows = tuple(
        (
            cells.exact(number),
            cells.name(split.device),
            cells.name(f"torch.Size({split.shape})"),
            cells.name(
                f"Inside model on device {split.physical}, shape: torch.Size({split.shape})"
            ),
        )
        for number, split in enumerate(row.splits)
    )
    sizes, batch = arrived(row), row.batch.size
    text = f"The program passes {batch} samples; inside, {plural(len(sizes), 'replica')} see {listed(sizes)}, together {sum(sizes)}"
    text += ". Only the first dimension is cut." if sum(sizes) == batch else f" and not {batch}."
    return [
        Table(
            "What the model prints in its forward pass",
            ("replica", "device", "shape", "line"),
            rows,
        ),
        *drawn_split(row),
        Answer("What does the model see of the batch?", text, {"batch": batch, "inside": sizes}),
    ]


def arrived(row: Row) -> list[int]:
    return [split.shape[0] for split in row.splits]


def chunks(samples: int, parts: int) -> list[int]:
    """As torch.chunk: 64 over 3 -> 22 22 20. Parts that get nothing are left out, as nothing
    arrives there."""
    each = -(-samples // parts)
    return [size for part in range(parts) if (size := min(each, samples - part * each)) > 0]


def splits(lab: Measurements) -> list[Block]:
    seen = {len(row.ranks[0].roles): row for row in lab.given(DP2, DP3, DP5)}
    batch = lab[DP2].batch.size
    found = {number: arrived(row) for number, row in seen.items()}
    lines = [
        (
            cells.exact(number),
            cells.exact(batch),
            cells.exact(-(-batch // number)),
            cells.split(sizes),
            cells.yes_no(len(set(sizes)) == 1),
        )
        for number, sizes in found.items()
    ]
    columns = (
        "devices",
        "batch",
        "batch ÷ devices, rounded up",
        "split, as it arrived inside the model",
        "equal",
    )
    gpus = len(lab.comparison.machine.gpus)
    shares = "" if lab[DP2].device == "cuda" else ", and the devices above are shares of its cores"
    here = f"; this machine has {plural(gpus, 'GPU')}{shares}"
    return [
        Table("Who gets how many samples", columns, tuple(lines)),
        *(block for row in seen.values() for block in drawn_split(row)),
        *_split_answers(batch, found),
        Answer(
            "How are three GPUs allocated on a cluster?",
            f"`{SRUN}`{here}.",
            {"gpus_here": gpus, "gpus_asked_for": 3},
        ),
    ]


def _split_answers(batch: int, found: dict[int, list[int]]) -> list[Answer]:
    even = [number for number, sizes in found.items() if len(set(sizes)) == 1]
    odd = [number for number in found if number not in even]
    as_rule = all(chunks(batch, number) == sizes for number, sizes in found.items())
    who = f"DataParallel does, in its forward call: it was given {batch} samples each time, and "
    who += f"{listed([split_words(sizes) for sizes in found.values()])} arrived inside the model"
    who += ", as `torch.chunk` cuts." if as_rule else ", which is NOT how `torch.chunk` cuts."
    equal = listed([f"{batch} ÷ {number} = {batch // number}" for number in even])
    uneven = [
        f"{batch} ÷ {number} leaves {batch % number}, so {split_words(found[number])}"
        for number in odd
    ]
    return [
        Answer(
            "Who splits the batch?",
            who,
            {
                "batch": batch,
                "arrived": {str(n): s for n, s in found.items()},
                "as_torch_chunk": as_rule,
            },
        ),
        Answer(
            "When is the split equal?",
            f"When the batch can be divided by the number of devices: here {equal}, without remainder."
            if even
            else f"When the batch can be divided by the number of devices; {batch} cannot be divided by {listed(odd, 'or')}.",
            {"batch": batch, "equal_with_devices": even},
        ),
        Answer(
            "When is it uneven, and why?",
            f"When there is a remainder: {listed(uneven)}. Every device gets the quotient rounded up, the last one what is left."
            if odd
            else f"When there is a remainder; {batch} has none with {listed(even)} devices.",
            {
                "batch": batch,
                "uneven_with_devices": odd,
                "remainders": [batch % number for number in odd],
            },
        ),
    ]
