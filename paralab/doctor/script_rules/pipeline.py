"""Pipelines: batches and micro-batches that do not go together, and schedules without overlap."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.registry import check
from paralab.doctor.script.feeding import content
from paralab.doctor.script.naming import LOADER
from paralab.doctor.script.pointing import called, found
from paralab.doctor.script.reading import Script
from paralab.doctor.script.settings import known_number
from paralab.doctor.script.turns import length, rows
from paralab.doctor.script.values import Call, Constant, Made, Value, options

_PACKAGE = "torch.distributed.pipelining."


def splits(batch: int, micro_batches: int) -> list[int]:
    """The rows of each micro-batch: 10 over 4 are 3 3 2 2."""
    return [
        batch // micro_batches + (part < batch % micro_batches) for part in range(micro_batches)
    ]


def _schedules(script: Script) -> Iterator[Call]:
    for call in script.calls:
        if call.target.startswith(_PACKAGE) and call.target.rpartition(".")[2].startswith(
            "Schedule"
        ):
            yield call


def _micro_batches(script: Script, schedule: Call) -> int | None:
    number = known_number(script, schedule.argument(1, "n_microbatches"))
    return number if isinstance(number, int) and number > 0 else None


def _stages(script: Script, schedule: Call) -> int | None:
    """The number of stages, where it is a number in the script."""
    for way in options(schedule.argument(0, "stage") or Value()):
        if isinstance(way, Made) and way.call.target.endswith("PipelineStage"):
            number = known_number(script, way.call.argument(2, "num_stages"))
            if isinstance(number, int):
                return number
    return None


def _batches(script: Script, step: Call) -> Iterator[tuple[int, str]]:
    """The numbers of rows that a step is given, with where they come from."""
    if not step.args:
        return
    number = rows(step.args[0])
    if number is not None:
        yield number, f"the batch has {number} rows"
    for part in content(step.args[0]):
        if isinstance(part, Made) and part.call.target == LOADER:
            loader = part.call
            size = known_number(script, loader.argument(1, "batch_size") or Constant(1))
            if not isinstance(size, int) or size < 1:
                continue
            yield size, f"the loader of line {loader.line} gives batches of {size}"
            dropped, samples = (
                loader.argument(8, "drop_last"),
                length(loader.argument(0, "dataset")),
            )
            kept = dropped is None or (isinstance(dropped, Constant) and not dropped.value)
            if kept and samples and samples % size:
                yield (
                    samples % size,
                    f"the last batch of the loader of line {loader.line} has {samples % size} of {size} rows",
                )


def _steps(script: Script) -> Iterator[tuple[Call, Call]]:
    """Every `schedule.step(batch)`, with the making of its schedule."""
    made = {id(schedule.result): schedule for schedule in _schedules(script)}
    for step in script.methods("step"):
        for way in options(step.receiver) if step.receiver else ():
            if id(way) in made:
                yield step, made[id(way)]


def _misfits(script: Script) -> Iterator[tuple[Call, Call, int, int, str]]:
    """Steps with a batch that the micro-batches do not divide: the step, its schedule, rows,
    micro-batches, and where they are " "from."""
    for step, schedule in _steps(script):
        number = _micro_batches(script, schedule)
        for batch, where in _batches(script, step):
            if number and batch % number:
                yield step, schedule, batch, number, where
                break


@check("P01", source="script")
def batch_that_cannot_be_split_evenly(script: Script) -> Iterator[Finding]:
    for step, schedule, batch, number, where in _misfits(script):
        if batch > number and min(splits(batch, number)) > 1:
            sizes = ", ".join(map(str, splits(batch, number)))
            why = (
                f"{number} micro-batches (line {schedule.line}), but {where}: they would get {sizes} rows. The buffers between "
                "stages keep the size of the first, so the last stage compares outputs and targets of different sizes."
            )
            yield found(script, "P01", "error", step, why, _cure(batch, number), also=(schedule,))


@check("P02", source="script")
def batch_smaller_than_the_number_of_micro_batches(script: Script) -> Iterator[Finding]:
    for step, schedule, batch, number, where in _misfits(script):
        if batch < number:
            why = f"{number} micro-batches (line {schedule.line}), but {where}: there is not one row for each, and the ranks fail."
            yield found(script, "P02", "error", step, why, _cure(batch, number), also=(schedule,))


@check("P04", source="script")
def micro_batch_of_one_row(script: Script) -> Iterator[Finding]:
    for step, schedule, batch, number, where in _misfits(script):
        if batch > number and min(splits(batch, number)) == 1:
            sizes = ", ".join(map(str, splits(batch, number)))
            why = (
                f"{number} micro-batches (line {schedule.line}), but {where}: they would get {sizes} rows. The last stage still "
                "receives as many rows as the first micro-batch had, and a target of one row is stretched to them by broadcasting: "
                "a wrong loss, then an error in the backward of the stage before."
            )
            yield found(script, "P04", "error", step, why, _cure(batch, number), also=(schedule,))


def _cure(batch: int, number: int) -> str:
    return f"A batch that is a multiple of {number} ({-(-batch // number) * number} for {batch}), and `drop_last=True` in the loader."


@check("P03", source="script")
def fewer_micro_batches_than_stages(script: Script) -> Iterator[Finding]:
    for schedule in _schedules(script):
        number, stages = _micro_batches(script, schedule), _stages(script, schedule)
        least = stages or 2  # a pipeline has at least two
        if "1F1B" in schedule.target and number and number < least:
            many = f"{stages}" if stages else "two or more"
            why = f"n_microbatches = {number} for {many} stages: `{called(schedule)}` refuses with a ValueError."
            fix = f"At least {least} micro-batches; 4 per stage keep the pipeline filled."
            yield found(script, "P03", "error", schedule, why, fix)


@check("P05", source="script")
def one_micro_batch(script: Script) -> Iterator[Finding]:
    for schedule in _schedules(script):
        if "1F1B" in schedule.target or _micro_batches(script, schedule) != 1:
            continue
        stages = _stages(script, schedule)
        share = (
            f"{stages} stages: {(stages - 1) / stages:.0%} of the time"
            if stages and stages > 1
            else "S stages: (S − 1)/S of the time"
        )
        why = f"One micro-batch: while a stage works all others wait. With {share} is idle: no faster than one device."
        fix = "At least 4 micro-batches per stage."
        yield found(script, "P05", "warning", schedule, why, fix)
