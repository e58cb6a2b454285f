"""The messages that only victims print: a rank whose connection broke, or whose wait timed out,
because another rank is gone or did not arrive. The launcher, the doctor, and attach all use this
list, so none of them blames a victim."""

from __future__ import annotations

import re

# Another rank is gone.
GONE = re.compile(
    r"onnection (?:closed|reset) by peer|Connection refused|Broken pipe|ncclRemoteError"
    r"|remote process (?:has )?exited|Socket closed|ECONNRESET"
)
# Another rank did not arrive in time.
WAITED = re.compile(
    r"Timed out waiting|Watchdog caught collective|wait timeout|Socket Timeout|monitoredBarrier"
    r"|ollective operation timeout|clients joined|client socket has timed out"
    r"|Application timeout|communicator was aborted|barrier.{0,40}timed out"
)
# Downloads and data bases also lose connections; these words mean that it was one between ranks.
_BETWEEN_RANKS = re.compile(
    r"gloo|nccl|NCCL|c10d|TCPStore|Store|pair\.cc|pair closure|monitoredBarrier|Watchdog"
    r"|clients joined|client socket|torch[/\\.]distributed|torch/autograd|Dist\w+Error"
)
# Ranks in different collectives: both sides of the mismatch see this, and neither is a victim.
MISMATCH = re.compile(
    r"collective mismatch in your code|mismatch between collectives|op\.preamble\.length"
)


def is_victim(message: str, traceback: str | None = None) -> bool:
    """Return whether the message is about another rank. Without a traceback, every lost connection
    counts as one between ranks."""
    if MISMATCH.search(message) or not (GONE.search(message) or WAITED.search(message)):
        return False
    return traceback is None or bool(_BETWEEN_RANKS.search(f"{message}\n{traceback}"))
