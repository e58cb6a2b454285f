"""The words that make a line worth keeping. A log of 100 MB is searched for them block by block, and a block without any is never
split into lines."""

from __future__ import annotations

NEEDLES: tuple[bytes, ...] = (
    # Python
    b"Traceback (most recent call last):",
    b"Fatal Python error",
    b"Warning: ",
    b"has been modified by an inplace operation",
    # torchrun, elastic
    b"exitcode",
    b"closing signal",
    b"forcefully exiting via SIGKILL",
    b"Root Cause (first observed",
    b"Failures:",
    b"first observed failure",
    b"  rank      : ",
    b"  host      : ",
    b"  time      : ",
    b"  traceback : ",
    b"OMP_NUM_THREADS",
    b"got signal: ",
    # Slurm, the kernel, the shell
    b"slurmstepd",
    b"srun: ",
    b"oom-kill",
    b"oom_kill",
    b"Out of memory: ",
    b"Killed process",
    b"Segmentation fault",
    b"Illegal instruction",
    b"Bus error",
    b"Xid",
    # NCCL, gloo, the store
    b"Watchdog caught collective",
    b"ast enqueued",
    b"NCCL WARN",
    b"NCCL error",
    b"ncclUnhandledCudaError",
    b"ncclRemoteError",
    b"ncclSystemError",
    b"ncclInternalError",
    b"Duplicate GPU detected",
    b"retrieving ncclUniqueId",
    b"devices used by this process are currently unknown",
    b"Guessing device ID based on global rank",
    b"destroy_process_group() was not called",
    b"collective mismatch",
    b"mismatch between collectives",
    b"monitoredBarrier",
    b"Timed out waiting",
    b"onnection closed by peer",
    b"onnection reset by peer",
    b"Broken pipe",
    b"Application timeout",
    b"clients joined",
    b"client socket has timed out",
    b"EADDRINUSE",
    b"ddress already in use",
    b"terminate called",
    b"what():",
    # CUDA
    b"CUDA error",
    b"CUDA out of memory",
    b"device-side assert",
    b"Assertion `",
    b"uncorrectable ECC",
    b"ncorrectable ECC",
    # words of the catalogue that are printed without a traceback
    b"find_unused_parameters=True was specified",
    b"imbalance between your GPUs",
    b"an autograd kernel was not registered",
    b"Grad strides do not match",
    b"grad.sizes() = ",
    b"bucket_view.sizes() = ",
    b"Error initializing torch.distributed",
)

# These begin or make up something of several lines, so they are looked for to the end, however often they come.
_STARTS = (b"Traceback", b"Fatal", b"exitcode", b"closing", b"Root", b"Failures", b"  ", b"srun", b"slurmstepd", b"Watchdog")
STRUCTURE: frozenset[bytes] = frozenset(needle for needle in NEEDLES if needle.startswith(_STARTS))
