"""M03: The connection between ranks is slow or blocked.

Symptom: More ranks make training slower; or the first all-reduce never returns.
Cause: The ranks use the wrong network interface or a slow link, the machine is busy, or a firewall blocks the loopback interface.
Fix: Name the fast interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), and measure again on an idle machine.

- os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
+ os.environ["GLOO_SOCKET_IFNAME"] = "ib0"
  dist.init_process_group("gloo")
"""

from paralab.doctor.preflight import Facts
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.registry import Finding, Findings, check, describe
from paralab.units import seconds, size

ENTRY = describe(__doc__)
AGAINST_COPY = 40  # times as long as a copy in memory; gloo on one machine usually takes 5 to 15
SLOW_MEGABITS = 1000
SLOWEST_GPU_LINK = 1e9  # bytes per second; even PCIe through host memory is faster


@check("M03", source="machine")
def slow_link(facts: Facts) -> Findings:
    """Report a slow network, or a slow all-reduce between two ranks or two GPUs on this machine."""
    yield from _between_ranks(facts)
    for pair in facts.pairs:
        if (pair.direct.bytes_per_second or SLOWEST_GPU_LINK) < SLOWEST_GPU_LINK:
            first, second = pair.direct.ranks
            speed = size(pair.direct.bytes_per_second)
            why = f"{first} and {second} exchange only {speed}/s."
            fix = "`nvidia-smi topo -m` shows how they are connected."
            evidence = facts.evidence(f"GPU pair {first}-{second}")
            doubt = "if the link is this slow even when the GPUs are idle"
            yield make_finding("M03", "suspect", why, None, evidence, fix=fix, doubt=doubt)
    fastest = max(facts.megabits.values(), default=0)
    if (facts.launch.nodes or 1) > 1 and not facts.infiniband and 0 < fastest <= SLOW_MEGABITS:
        takes = 25 * 2**20 * 8 / (fastest * 1e6)
        why = (
            f"The fastest network interface on this node has {fastest / 1000:g} Gbit/s, so a "
            f"bucket of 25 MiB takes at least {seconds(takes)}."
        )
        fix = "Use a faster network (select it with NCCL_SOCKET_IFNAME), accumulation, or compressed gradients."
        yield Finding("M03", "warning", why, fix, evidence=facts.evidence("network"))


def _between_ranks(facts: Facts) -> Findings:
    link, evidence = facts.link, facts.evidence("all-reduce")
    if link is None or facts.torch is None:
        return
    if link.seconds is None and "gloo" in facts.torch.backends:
        why = f"Two ranks on this machine did not complete an all-reduce: {link.problem}."
        fix = (
            "Set GLOO_SOCKET_IFNAME=lo. Check that no firewall blocks the loopback interface, and "
            "that /tmp is writable."
        )
        doubt = "if it happens again on an idle machine"
        yield make_finding("M03", "suspect", why, None, evidence, fix=fix, doubt=doubt)
    elif link.seconds and link.copy_seconds and link.seconds > AGAINST_COPY * link.copy_seconds:
        why = (
            f"An all-reduce of {size(link.bytes)} between two ranks on this machine takes "
            f"{seconds(link.seconds)}, {link.seconds / link.copy_seconds:.0f} times as long as a "
            f"copy in memory ({seconds(link.copy_seconds)}). The usual range is 5 to 15 times."
        )
        fix = "Check what else is running (top), and use more cores per rank."
        doubt = "on an idle machine"
        yield make_finding("M03", "suspect", why, None, evidence, fix=fix, doubt=doubt)
