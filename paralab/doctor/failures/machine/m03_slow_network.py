"""M03: The way between the ranks is slow, or closed."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="M03",
    title="The way between the ranks is slow, or closed",
    symptom="More ranks make it slower; or the first all-reduce never ends.",
    cause="The wrong network interface, a slow link, a busy machine, a firewall on the loopback interface.",
    fix="Name the fast interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME); measure again on an idle machine.",
    wrong="""\
os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
dist.init_process_group("gloo")
""",
    right="""\
os.environ["GLOO_SOCKET_IFNAME"] = "ib0"
dist.init_process_group("gloo")
""",
)
