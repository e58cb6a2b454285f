"""What CUDA's and the driver's words mean."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paralab.doctor.logs.job import Logs
from paralab.doctor.logs.line import Line

MEMORY = re.compile(
    r"CUDA out of memory\. Tried to allocate (?P<asked>[\d.]+ \w+)(?:.*?total capacity of (?P<total>[\d.]+ \w+))?"
    r"(?:.*?of which (?P<free>[\d.]+ \w+) is free)?(?:.*?(?P<reserved>[\d.]+ \w+) is reserved by PyTorch but unallocated)?",
    re.DOTALL,
)
XID = re.compile(r"NVRM: Xid \((?:PCI:)?([\w:.]+)\): (\d+)|\bXid (\d+)")
XIDS = {
    "31": "a kernel touched memory that is not its own",
    "48": "a memory error that could not be corrected: the GPU is defective or needs a reset",
    "63": "a memory row was retired",
    "64": "a memory row could not be retired",
    "74": "NVLink failed",
    "79": "the GPU fell off the bus: power, heat or a loose card",
    "94": "a memory error hit this process",
    "95": "a memory error hit all processes of the GPU",
}


@dataclass(frozen=True)
class Trouble:
    why: str
    fix: str


def cuda_trouble(text: str) -> Trouble | None:
    """An explanation of CUDA's words."""
    if found := MEMORY.search(text):
        numbers = f"It asked for {found['asked']}"
        numbers += (
            f", {found['free']} of {found['total']} were free"
            if found["free"] and found["total"]
            else ""
        )
        kept = f"; {found['reserved']} lay in pieces that did not fit" if found["reserved"] else ""
        return Trouble(
            f"The GPU's memory ran out. {numbers}{kept}.",
            "a smaller batch per rank with gradient accumulation, autocast, or activation checkpointing"
            + (
                "; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against the pieces"
                if found["reserved"]
                else ""
            ),
        )
    if (found := XID.search(text)) and (number := found[2] or found[3]):
        return Trouble(
            f"The driver reports Xid {number}: {XIDS.get(number, 'see the list of Xid errors')}.",
            "leave this GPU or node out (nvidia-smi -q shows ECC and NVLink counters), and tell who runs the machine",
        )
    if "ncorrectable ECC" in text:
        return Trouble(
            "The GPU's memory has an error that could not be corrected: the hardware, not the script.",
            "leave this GPU or node out, and tell who runs the machine (nvidia-smi -q -d ECC)",
        )
    if "device-side assert" in text:
        return Trouble(
            "A check inside a GPU kernel failed, most often a class or token number outside its table; the line is where it was "
            "noticed.",
            "CUDA_LAUNCH_BLOCKING=1 shows the line that did it; compare the labels' maximum with the number of classes",
        )
    if "illegal memory access" in text:
        return Trouble(
            "A GPU kernel touched memory that is not its own; the line is where it was noticed, not where it happened.",
            "CUDA_LAUNCH_BLOCKING=1, or compute-sanitizer, shows the kernel; a custom kernel is the first suspect",
        )
    if "ncclUnhandledCudaError" in text:
        return Trouble(
            "NCCL met an error of CUDA: the GPU of this rank was already in trouble (memory, a failed kernel, the driver).",
            "NCCL_DEBUG=INFO, and look for the first CUDA error of this rank",
        )
    return None


def driver_line(logs: Logs) -> tuple[Line, Trouble] | None:
    """The first line in which the driver itself speaks of a defect."""
    for line in logs.lines:
        speaks = "NVRM: Xid" in line.text or (
            "ncorrectable ECC" in line.text and "encountered" in line.text
        )
        if speaks and (known := cuda_trouble(line.text)):
            return line, known
    return None
