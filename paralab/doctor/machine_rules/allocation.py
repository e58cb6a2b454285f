"""Is there enough memory for every rank?"""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.preflight import Facts
from paralab.doctor.registry import check
from paralab.units import plural, size

RANK_BYTES = (
    2**30
)  # of the host's memory: torch alone takes a third of it, with CUDA more than half


@check("H12", source="machine")
def little_memory(facts: Facts) -> Iterator[Finding]:
    cgroup, ranks = facts.cgroup, facts.ranks_here or 2
    if cgroup is None:
        return
    if cgroup.limit_bytes is not None and cgroup.used_bytes is not None:
        left = cgroup.limit_bytes - cgroup.used_bytes
        if left < ranks * RANK_BYTES:
            why = (
                f"{size(left)} of the {size(cgroup.limit_bytes)} that this container or job may use is left, for {ranks} ranks of "
                "about "
                f"{size(RANK_BYTES)} each: the kernel kills one (SIGKILL) when it is used up. Certain if your ranks need that much."
            )
            yield Finding(
                "H12",
                "suspect",
                why,
                "More memory for the job (--mem, docker run --memory), or fewer ranks.",
                evidence=facts.seen("memory"),
            )
    if cgroup.killed:
        why = (
            f"The kernel has killed {plural(cgroup.killed, 'process')} of this container or job for want of memory. Certain if "
            "one was a rank."
        )
        yield Finding(
            "H12",
            "suspect",
            why,
            "More memory, smaller batches, fewer loader workers.",
            evidence=facts.seen("memory"),
        )
