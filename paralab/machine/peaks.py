"""Peak FLOP/s by exact device name, without sparsity, from the vendors' data sheets.

For a device that is not listed, paralab does not guess a peak, because a percentage of a guess is
worse than no percentage. Variants with different clocks or memory have different names and are
separate devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """TFLOP/s by precision, and their source. A precision is None if the device does not support it
    or the data sheet does not list it."""

    fp32: float
    tf32: float | None
    half: float | None  # bf16 and fp16 with fp32 sums; fp16 alone before Ampere
    fp64: float | None
    source: str

    def of(self, precision: str) -> float | None:
        """Return the peak in FLOP/s."""
        name = "half" if precision in ("bf16", "fp16") else precision
        peak: float | None = getattr(self, name)
        return None if peak is None else peak * 1e12


_A100 = Peak(19.5, 156, 312, 19.5, "NVIDIA A100 data sheet")
_V100 = Peak(15.7, None, 125, 7.8, "NVIDIA V100 data sheet, SXM2")
_H100 = "NVIDIA H100 Tensor Core GPU architecture paper, SXM5"
_H200 = "NVIDIA H200 data sheet, SXM, half of the sparse figures"

PEAKS: Mapping[str, Peak] = {
    "NVIDIA H200": Peak(67, 494.5, 989, 67, _H200),
    "NVIDIA H100 80GB HBM3": Peak(66.9, 494.7, 989.4, 66.9, _H100),
    "NVIDIA H100 PCIe": Peak(51.2, 378, 756, 51.2, "NVIDIA H100 architecture paper, PCIe"),
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA A10": Peak(31.2, 62.5, 125, None, "NVIDIA A10 data sheet"),
    "NVIDIA L4": Peak(30.3, 60, 121, None, "NVIDIA L4 data sheet, half of the sparse figures"),
    "NVIDIA L40S": Peak(91.6, 183, 362, None, "NVIDIA L40S data sheet"),
    "Tesla V100-SXM2-16GB": _V100,
    "Tesla V100-SXM2-32GB": _V100,
    "Tesla T4": Peak(8.1, None, 65, None, "NVIDIA T4 data sheet"),
}
