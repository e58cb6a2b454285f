"""Messages that only victims print. A victim is a rank whose connection broke, or whose wait timed
out, because another rank exited or did not arrive. The launcher, the doctor, and attach all use
this list, so none of them blames a victim."""

import re

# Messages of a rank after another rank exited.
GONE = re.compile(
    r"onnection (?:closed|reset) by peer|Connection refused|Broken pipe|ncclRemoteError"
    r"|remote process (?:has )?exited|Socket closed|ECONNRESET|remote server shutdown|got 0 bytes"
    r"|Rank \d+ (?:died|left the group) while rank \d+ was in|Rank \d+: \w+ of \[.*\] failed"  # local
    r"|Rank \d+ died while the process group was being set up"
)
# Messages of a rank that waited for another rank until its timeout.
WAITED = re.compile(
    r"Timed out waiting|Watchdog caught collective|wait timeout|Socket Timeout|monitoredBarrier"
    r"|ollective operation timeout|clients joined|client socket has timed out"
    r"|Rank \d+ waited for rank [\d, ]+ in |Application timeout|communicator was aborted|barrier.{0,40}timed out"
    r"|A collective did not finish within"
)
# Downloads and databases also lose connections. These words identify a connection between ranks.
_BETWEEN_RANKS = re.compile(
    r"gloo|nccl|NCCL|c10d|TCPStore|Store|pair\.cc|pair closure|monitoredBarrier|Watchdog"
    r"|clients joined|client socket|torch[/\\.]distributed|torch/autograd|Dist\w+Error"
)
# Two ranks called different collectives. Both print this message, and neither is a victim.
MISMATCH = re.compile(
    r"collective mismatch in your code|mismatch between collectives|op\.preamble\.length"
    r"|Ranks make different calls: call|Sizes differ in \w+ \(call|sent [\d,]+ bytes of \w+ with tag"
)


def is_victim(message: str, traceback: str | None = None) -> bool:
    """Return whether another rank caused this message. Without a traceback, assume that every lost
    connection was between ranks."""
    if MISMATCH.search(message) or not (GONE.search(message) or WAITED.search(message)):
        return False
    return traceback is None or bool(_BETWEEN_RANKS.search(f"{message}\n{traceback}"))
