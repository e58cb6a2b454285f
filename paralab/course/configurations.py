"""The names of the practicals' set-ups: what their parts ask for, and what is trained under each
name."""

from __future__ import annotations

# Practicals 5 and 6
SINGLE = "single"
DP2, DP3, DP4, DP5 = (f"DataParallel, {number} devices" for number in (2, 3, 4, 5))
DDP2, DDP4 = "DDP, 2 ranks", "DDP, 4 ranks"
ODD = "DDP, one sample more"
SMALL, LARGE = "DDP, small buckets", "DDP, one bucket"

# Practical 7
DDP, ACCUMULATE, SYNC = "DDP", "accumulate 4", "accumulate 4 without no_sync()"
BF16, FP16 = "bf16", "fp16 with GradScaler"
BOTH, BOTH_FP16 = "accumulate 4 and bf16", "accumulate 4 and fp16"
FAINT, FAINT_BF16 = "small loss, fp32", "small loss, bf16"
FAINT_SCALED, FAINT_BARE = "small loss, fp16 with GradScaler", "small loss, fp16 without GradScaler"

# Practical 10
HYBRID, MICRO2, MICRO8 = (f"hybrid, {number} micro-batches" for number in (4, 2, 8))
HALF, DOUBLE = "hybrid, half the batch", "hybrid, twice the batch"
PIPELINE, MP = "one process, 4 micro-batches", "one process, no micro-batches"
SAME = "hybrid, second device = first"
