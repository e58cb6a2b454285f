"""Predict a data-parallel step on more devices. These are pure functions on plain numbers.

    step(n) = compute / n + optimizer + other + exposed(n)
    exposed(n) = (1 - overlap) · communication(n)
    communication(n) = communication(k) · sent(n) / sent(k), measured with k devices
    sent(n) = 2 · (n - 1) / n        ddp: each device of a ring all-reduce sends this many gradients
    sent(n) = 2 · (n - 1)            dp: device 0 sends the model and receives the gradients

8 devices instead of 2: 1.75 / 1 in ddp, so communication takes 1.75 times as long; 7 times in dp.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Strategy = Literal["dp", "ddp"]


class StepPrediction(NamedTuple):
    """The predicted seconds of a step, by part."""

    compute: float
    optimizer: float
    other: float
    exposed: float


def sent(strategy: Strategy, devices: int) -> float:
    """Return the bytes that the busiest device sends or receives, relative to the gradients'
    size."""
    return 2 * (devices - 1) / (devices if strategy == "ddp" else 1)


def predict_step(
    devices: int,
    compute_seconds: float,
    optimizer_seconds: float,
    other_seconds: float,
    communication_seconds: float,
    measured_devices: int,
    overlap: float,
    strategy: Strategy = "ddp",
) -> StepPrediction:
    """Predict a step. Compute is measured on one device, communication on `measured_devices`."""
    ratio = sent(strategy, devices) / sent(strategy, measured_devices)
    communication = communication_seconds * ratio
    exposed = (1 - overlap) * communication
    return StepPrediction(compute_seconds / devices, optimizer_seconds, other_seconds, exposed)
