"""Simulate two nodes on one machine: two network namespaces, connected by a link (a veth pair) with
a known rate. This needs root and iproute2.

with link(mbit_per_second=200) as options:
    paralab run ddp --replicas 2 *options
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

INTERFACE = "eth0"  # the link's name on each node; GLOO_SOCKET_IFNAME makes gloo use it
BURST_BYTES = 256 * 1024  # tbf's burst size, larger than the packets that the kernel merges (64 KB)


def why_not() -> str | None:
    """Return why this machine cannot create network namespaces, or None if it can."""
    if not shutil.which("ip") or not shutil.which("tc"):
        return "needs ip and tc (iproute2)"
    if os.geteuid():
        return "needs root to create network namespaces"
    name = f"paralab-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"cannot create network namespaces: {tried.stderr.strip()}" if tried.returncode else None


@contextmanager
def link(mbit_per_second: float) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Put rank r on node r. Yield the options and environment variables for paralab."""
    base = f"pl{os.getpid()}"
    try:
        for rank in (0, 1):
            _run("ip", "netns", "add", f"{base}-{rank}")
        _run(
            "ip",
            "link",
            "add",
            INTERFACE,
            "netns",
            f"{base}-0",
            "type",
            "veth",
            "peer",
            "name",
            INTERFACE,
            "netns",
            f"{base}-1",
        )
        for rank in (0, 1):
            inside = ("ip", "-n", f"{base}-{rank}")
            _run(*inside, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", INTERFACE)
            _run(*inside, "link", "set", INTERFACE, "up")
            _run(*inside, "link", "set", "lo", "up")
            shape = (
                "rate",
                f"{mbit_per_second}mbit",
                "burst",
                str(BURST_BYTES),
                "latency",
                "200ms",
            )
            _run(
                "tc",
                "-n",
                f"{base}-{rank}",
                "qdisc",
                "add",
                "dev",
                INTERFACE,
                "root",
                "tbf",
                *shape,
            )
        yield ["--prefix", f"ip netns exec {base}-{{rank}}"], {"GLOO_SOCKET_IFNAME": INTERFACE}
    finally:
        for rank in (0, 1):
            subprocess.run(["ip", "netns", "del", f"{base}-{rank}"], capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
