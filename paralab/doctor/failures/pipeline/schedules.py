"""Pipeline schedules: their micro-batches and stages, and how a batch is split."""

from collections.abc import Iterator

from paralab.doctor.failures.data.sizes import (
    batch_size,
    drops_last,
    loader_of,
    number,
    rows,
    samples_of,
)
from paralab.doctor.static.facts import Call
from paralab.doctor.static.script import Script

_PACKAGE = "torch.distributed.pipelining."


def split_sizes(batch: int, micro_batches: int) -> list[int]:
    """Return the rows of each micro-batch. The first ones get the remainder: 10 / 4 is 3 3 2 2."""
    small, larger = divmod(batch, micro_batches)
    return [small + 1] * larger + [small] * (micro_batches - larger)


def schedules(script: Script) -> list[Call]:
    """Return the calls that create a schedule."""
    return [
        call
        for call in script.calls
        if call.last_name.startswith("Schedule") and call.target.startswith(_PACKAGE)
    ]


def micro_batches(script: Script, schedule: Call) -> int | None:
    return number(script, schedule.argument(1, "n_microbatches"), schedule.scope) or None


def stages(script: Script, schedule: Call) -> int | None:
    """Return the number of stages, if the script shows it and it is not the world size."""
    for made in script.makers(schedule.argument(0, "stage"), schedule.scope):
        given = made.argument(2, "num_stages")
        if given is not None and not script.is_kind(given, made.scope, "world"):
            return number(script, given, made.scope)
    return None


def uneven_steps(script: Script) -> Iterator[tuple[Call, Call, int, int, str]]:
    """Yield uneven batches as (step, schedule, rows, micro-batches, reason)."""
    every = schedules(script)
    for step in script.methods("step") if every else []:
        made = script.makers(step.receiver, step.scope)
        for schedule in [call for call in every if call in made]:
            count = micro_batches(script, schedule)
            for batch, why in _batches(script, step) if count else ():
                if count and batch % count:
                    yield step, schedule, batch, count, why
                    break


def _batches(script: Script, step: Call) -> Iterator[tuple[int, str]]:
    """Yield the number of rows that a step may get, and the source of that number."""
    given = step.node.args[0] if step.node.args else None
    size = rows(script, given, step.scope)
    if size is not None:
        yield size, f"the batch has {size} rows"
    for definition in script.reaching(given, step.scope) if given is not None else []:
        items = definition.value if definition.how == "item" else None
        loader = loader_of(script, items, definition.scope) if items is not None else None
        size = batch_size(script, loader) if loader is not None else None
        if loader is None or size is None:
            continue
        yield size, f"the loader (line {loader.line}) returns batches of {size}"
        samples = samples_of(script, loader)
        if samples is not None and samples % size and not drops_last(script, loader):
            rest = samples % size
            yield rest, f"the last batch of the loader (line {loader.line}) has {rest} rows"


def even_fix(batch: int, count: int) -> str:
    return (
        f"Use a batch size that is a multiple of {count} ({-(-batch // count) * count} instead of {batch}), "
        "and `drop_last=True` in the loader."
    )
