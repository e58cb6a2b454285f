"""Peak FLOP/s by exact device name: dense (without sparsity), from the vendors' data sheets.

An unlisted device has no known peak: a percentage of a guess is worse than none. Variants with
different clocks or memory have different names and count as different devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Peak:
    """FLOP/s by precision, and their source. None if unsupported or not in the data sheet."""

    fp32: float
    tf32: float | None
    half: float | None  # bf16 and fp16 with fp32 sums; fp16 alone before Ampere
    fp64: float | None
    source: str

    def of(self, precision: str) -> float | None:
        return {
            "fp32": self.fp32,
            "tf32": self.tf32,
            "bf16": self.half,
            "fp16": self.half,
            "fp64": self.fp64,
        }[precision]


_T = 1e12
_A100 = Peak(19.5 * _T, 156 * _T, 312 * _T, 19.5 * _T, "NVIDIA A100 data sheet")
_H100 = Peak(
    66.9 * _T,
    494.7 * _T,
    989.4 * _T,
    66.9 * _T,
    "NVIDIA H100 Tensor Core GPU architecture paper, SXM5",
)
_V100 = Peak(15.7 * _T, None, 125 * _T, 7.8 * _T, "NVIDIA V100 data sheet, SXM2")

PEAKS: Mapping[str, Peak] = MappingProxyType(
    {
        "NVIDIA H200": Peak(
            67 * _T,
            494.5 * _T,
            989 * _T,
            67 * _T,
            "NVIDIA H200 data sheet, SXM, half of the sparse figures",
        ),
        "NVIDIA H100 80GB HBM3": _H100,
        "NVIDIA H100 PCIe": Peak(
            51.2 * _T, 378 * _T, 756 * _T, 51.2 * _T, "NVIDIA H100 architecture paper, PCIe"
        ),
        "NVIDIA A100-SXM4-40GB": _A100,
        "NVIDIA A100-SXM4-80GB": _A100,
        "NVIDIA A100-PCIE-40GB": _A100,
        "NVIDIA A100 80GB PCIe": _A100,
        "NVIDIA A10": Peak(31.2 * _T, 62.5 * _T, 125 * _T, None, "NVIDIA A10 data sheet"),
        "NVIDIA L4": Peak(
            30.3 * _T, 60 * _T, 121 * _T, None, "NVIDIA L4 data sheet, half of the sparse figures"
        ),
        "NVIDIA L40S": Peak(91.6 * _T, 183 * _T, 362 * _T, None, "NVIDIA L40S data sheet"),
        "Tesla V100-SXM2-16GB": _V100,
        "Tesla V100-SXM2-32GB": _V100,
        "Tesla T4": Peak(8.1 * _T, None, 65 * _T, None, "NVIDIA T4 data sheet"),
    }
)
