"""The figures with sliders: compute a figure's state from its sliders and its measured constants.

explore.js does the same in the browser; a test moves the sliders and compares the states. A reader
without scripts sees the state that Python draws.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from paralab.analyse.blocks import Explorable
from paralab.plan.batches import chunk_sizes, even_sizes
from paralab.plan.memory import STRATEGIES, DeviceMemory, device_memory
from paralab.plan.overlap import Link, reduce_buckets
from paralab.plan.scaling import predict_step
from paralab.plan.schedules import PARTS_PER_RANK, ideal_bubble, misfit, order, simulate
from paralab.units import measure

Values = Mapping[str, Any]
KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}
OTHER_COUNTS = (1, 2, 4, 8, 16, 32, 64)  # numbers of devices that the prediction compares


class Box(NamedTuple):
    start: float
    end: float
    kind: str
    words: str = ""


class Lane(NamedTuple):
    label: str
    boxes: tuple[Box, ...]


class Output(NamedTuple):
    """A number below the figure. `value` is exact; `text` is what the reader sees."""

    name: str
    label: str
    value: float | str
    text: str


class State(NamedTuple):
    unit: str  # the unit of the axis
    lanes: tuple[Lane, ...]
    outputs: tuple[Output, ...]
    problem: str = ""  # why these values cannot be combined


def start_of(block: Explorable) -> State:
    return state_of(block, {control.name: control.value for control in block.controls})


def state_of(block: Explorable, values: Values) -> State:
    return FIGURES[block.figure](values, block.constants)


def control_words(block: Explorable, name: str, value: int) -> str:
    """Return what a slider shows beside its label."""
    known = block.constants
    if name == "latency":
        return measure(known["transfer_seconds"] * value / 100, "seconds")
    if name == "speed":
        return f"× {2.0**value:g}"
    if name == "bucket":
        return measure(known["gradient_bytes"] * value / known["parts"], "bytes")
    return str(value)


def _output(name: str, label: str, value: float, unit: str) -> Output:
    return Output(name, label, value, measure(value, unit))


def _schedule(values: Values, constants: Values) -> State:
    stages, micro, name = values["stages"], values["micro_batches"], values["schedule"]
    boxes: dict[int, list[Box]] = defaultdict(list)
    for stage, number, kind, start, end in constants["measured"]:
        boxes[stage].append(Box(start, end, kind, str(number)))
    measured = [Lane(f"measured {stage}", tuple(boxes[stage])) for stage in range(1 + max(boxes))]
    measured_end = max(box.end for lane in measured for box in lane.boxes)
    measured_time = _output("measured_seconds", "Measured time", measured_end, "seconds")
    if problem := misfit(name, stages, micro):
        labels = {
            "bubble": "Ideal bubble",
            "ideal_seconds": "Ideal time",
            "difference": "Difference",
        }
        bubble, ideal_time, gap = (Output(key, label, "", "–") for key, label in labels.items())
        return State("seconds", tuple(measured), (bubble, ideal_time, measured_time, gap), problem)

    parts = PARTS_PER_RANK[name]
    forward, backward = (
        constants[f"{way}_seconds"] / (stages * micro * parts) for way in ("forward", "backward")
    )
    seconds = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
    slots = simulate(order(name, stages, micro), seconds)
    ideal_end = max(slot.end for slot in slots)
    planned: dict[int, list[Box]] = defaultdict(list)
    for slot in slots:
        box = Box(slot.start, slot.end, KINDS[slot.action.kind], str(slot.action.micro))
        planned[slot.rank].append(box)
    ideal = [Lane(f"ideal {stage}", tuple(planned[stage])) for stage in range(stages)]
    shorter, ends = (ideal, (ideal_end, measured_end))
    if ideal_end > measured_end:
        shorter, ends = measured, (measured_end, ideal_end)
    shaded = [
        Lane(lane.label, (*lane.boxes, Box(*ends, "difference"))) if lane in shorter else lane
        for lane in (*ideal, *measured)
    ]
    share, longer = ideal_bubble(stages, micro, name), measured_end - ideal_end
    passes = parts * micro * (3 if name == "zero-bubble" else 1)
    formula = f"({stages} − 1) / ({passes} + {stages} − 1) = {measure(share, 'share')}"
    signed = f"{'−' if longer < 0 else '+'}{measure(abs(longer), 'seconds')}"
    return State(
        "seconds",
        tuple(shaded),
        (
            Output("bubble", "Ideal bubble", share, formula),
            _output("ideal_seconds", "Ideal time", ideal_end, "seconds"),
            measured_time,
            Output("difference", "Difference", longer, signed),
        ),
    )


def _overlap(values: Values, constants: Values) -> State:
    backward, total = constants["backward_seconds"], constants["gradient_bytes"]
    size = total * values["bucket"] / constants["parts"]
    latency = constants["transfer_seconds"] * values["latency"] / 100
    rate = constants["transfer_bytes"] / (constants["transfer_seconds"] - latency)
    rate *= 2.0 ** values["speed"]
    transfers = reduce_buckets(backward, total, size, Link(latency, rate))
    end = transfers[-1].end
    exposed = max(0.0, end - backward)
    busy = sum(each.end - each.start for each in transfers)
    boxes = tuple(Box(t.start, t.end, "all_reduce", str(n)) for n, t in enumerate(transfers))
    device = (Box(0.0, backward, "backward", "backward"), Box(backward, end, "exposed", ""))
    one = latency + size / rate
    formula = f"{measure(latency, 'seconds')} + {measure(size, 'bytes')} / "
    formula += f"{measure(rate, 'bytes')}/s = {measure(one, 'seconds')}"
    return State(
        "seconds",
        (Lane("device", device if exposed else device[:1]), Lane("all-reduce", boxes)),
        (
            _output("buckets", "Buckets", len(transfers), "number"),
            Output("transfer", "One transfer", one, formula),
            _output("hidden", "Hidden share", 1 - exposed / busy, "share"),
            _output("exposed", "Exposed", exposed, "seconds"),
            _output("measured", "Exposed in the run", constants["exposed_seconds"], "seconds"),
        ),
    )


def _memory(values: Values, constants: Values) -> State:
    names = ("parameters", "gradients", "optimizer", "activations_per_sample")
    whole = DeviceMemory(*(constants[name] for name in names))
    devices, batch, precision = (values[name] for name in ("devices", "batch", "precision"))
    lanes, outputs = [], []
    for strategy in STRATEGIES:
        memory = device_memory(strategy, devices, batch, whole, precision)
        boxes, start = [], 0.0
        for kind, bytes_ in memory._asdict().items():
            boxes.append(Box(start, start + bytes_, kind, measure(bytes_, "bytes")))
            start += bytes_
        lanes.append(Lane(strategy, tuple(boxes)))
        peak = _measured_peak(constants, strategy, values)
        words = f"; measured: {measure(peak, 'bytes')}" if peak else ""
        outputs.append(Output(strategy, strategy, start, measure(start, "bytes") + words))
    return State("bytes", tuple(lanes), tuple(outputs))


def _measured_peak(constants: Values, strategy: str, values: Values) -> int | None:
    if values["batch"] != constants["measured_batch"]:
        return None
    wanted = (strategy, 1 if strategy == "single" else values["devices"], values["precision"])
    return next((peak for *who, peak in constants["measured"] if tuple(who) == wanted), None)


def _split(values: Values, constants: Values) -> State:
    shares = chunk_sizes(values["batch"], values["devices"])
    lanes, first = [], 0
    for device, share in enumerate(shares):
        boxes, start = [], first
        for piece in even_sizes(share, values["accumulate"]):
            boxes += [Box(start, start + piece, "samples", str(piece))] if piece else []
            start += piece
        lanes.append(Lane(f"device {device}", tuple(boxes)))
        first += share
    each = -(-values["batch"] // values["devices"])
    formula = f"ceil({values['batch']} / {values['devices']}) = {each}"
    pieces = [str(piece) for piece in even_sizes(shares[0], values["accumulate"]) if piece]
    return State(
        "samples",
        tuple(lanes),
        (
            Output("share", "Largest share", each, formula),
            Output("split", "Split", "/".join(map(str, shares)), "/".join(map(str, shares))),
            Output("passes", "Passes of device 0", " + ".join(pieces), " + ".join(pieces)),
            _output("idle", "Devices without samples", shares.count(0), "number"),
        ),
    )


def _what_if(values: Values, constants: Values) -> State:
    names = ("compute_seconds", "optimizer_seconds", "other_seconds", "communication_seconds")
    known = [constants[name] for name in (*names, "measured_devices", "overlap", "strategy")]
    chosen = values["devices"]
    lanes = []
    for devices in sorted({*OTHER_COUNTS, chosen}):
        parts = predict_step(devices, *known)
        boxes, start = [], 0.0
        for kind, seconds in zip(("compute", "optimizer", "other", "exposed"), parts, strict=True):
            boxes += [Box(start, start + seconds, kind)] if seconds else []
            start += seconds
        mark = " ←" if devices == chosen else ""
        lanes.append(Lane(f"{devices}{mark}", tuple(boxes)))
    one, step = (sum(predict_step(devices, *known)) for devices in (1, chosen))
    terms = " + ".join(measure(part, "seconds") for part in predict_step(chosen, *known))
    formula = f"{terms} = {measure(step, 'seconds')}"
    measured = constants["measured_seconds"].get(str(chosen))
    return State(
        "seconds",
        tuple(lanes),
        (
            Output("step", "Predicted step", step, formula),
            _output("speed_up", "Predicted speed-up", one / step, "×"),
            _output("efficiency", "Efficiency", one / step / chosen, "share"),
            Output("measured", "Measured step", measured or "", measure(measured, "seconds")),
        ),
    )


FIGURES: Mapping[str, Callable[[Values, Values], State]] = {
    "schedule": _schedule,
    "overlap": _overlap,
    "memory": _memory,
    "split": _split,
    "what_if": _what_if,
}
