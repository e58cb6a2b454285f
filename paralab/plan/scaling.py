"""Predict a data-parallel step on more devices. These are pure functions on plain numbers.

    step(n) = compute / n + optimizer + other + exposed(n)
    exposed(n) = (1 - overlap) · communication(n)
    communication(n) = communication(k) · ring(n) / ring(k), measured with k devices
    ring(n) = 2 · (n - 1) / n        a ring all-reduce sends this many times the gradients

8 devices instead of 2: ring(8) / ring(2) = 1.75 / 1, so communication takes 1.75 times as long.
"""

from __future__ import annotations

from typing import NamedTuple


class StepPrediction(NamedTuple):
    """Seconds per step."""

    compute: float
    optimizer: float
    other: float
    exposed: float


def ring_factor(devices: int) -> float:
    """Return the bytes that each device sends, relative to the gradients' size."""
    return 2 * (devices - 1) / devices


def predict_step(
    devices: int,
    compute_seconds: float,
    optimizer_seconds: float,
    other_seconds: float,
    communication_seconds: float,
    measured_devices: int,
    overlap: float,
) -> StepPrediction:
    """Predict a step. Compute is measured on one device, communication on `measured_devices`."""
    communication = communication_seconds * ring_factor(devices) / ring_factor(measured_devices)
    exposed = (1 - overlap) * communication
    return StepPrediction(compute_seconds / devices, optimizer_seconds, other_seconds, exposed)
