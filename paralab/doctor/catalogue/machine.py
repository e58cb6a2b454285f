"""Machines: what a preflight finds before anything is trained, beside the entries of `launch`."""

from __future__ import annotations

from paralab.doctor.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        id="M01",
        title="No room, or no right to write",
        symptom="A training ends at its first checkpoint: 'No space left on device', 'Permission denied'.",
        cause="The disk is full or belongs to somebody else; many clusters have a quota on the home folder.",
        fix="Save where there is room; TMPDIR for temporary files; delete old checkpoints.",
        wrong="""\
torch.save(model.state_dict(), "/home/me/last.pt")
""",
        right="""\
torch.save(model.state_dict(), os.path.join(os.environ["SCRATCH"], "last.pt"))
""",
    ),
    Entry(
        id="M02",
        title="Limits of a process too low",
        symptom="'Too many open files' from a loader worker; or NCCL does not use InfiniBand.",
        cause="Every tensor that a worker hands over is an open file; InfiniBand needs memory that is locked.",
        fix="`ulimit -n 65536`, `ulimit -l unlimited`; in a container --ulimit memlock=-1.",
        wrong="""\
subprocess.run(["torchrun", "--nproc_per_node=8", "train.py"])
""",
        right="""\
resource.setrlimit(resource.RLIMIT_NOFILE, (65536, 65536))
subprocess.run(["torchrun", "--nproc_per_node=8", "train.py"])
""",
    ),
    Entry(
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
    ),
)
