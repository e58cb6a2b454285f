"""H18: The ranks never find each other."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

ENTRY = Entry(
    id="H18",
    title="The ranks never find each other",
    symptom=(
        "'Timed out after … seconds waiting for clients. 1/2 clients joined', or 'The client "
        "socket has timed out'."
    ),
    cause=(
        "WORLD_SIZE, MASTER_ADDR, or MASTER_PORT is wrong (or the script overwrites "
        "torchrun's), a firewall blocks the port, or some ranks were not started."
    ),
    fix=(
        "Start as many ranks as WORLD_SIZE says, all with the same reachable MASTER_ADDR and "
        "MASTER_PORT. torchrun does that."
    ),
    wrong="""\
around = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "2"}
subprocess.run(["python", "train.py"], env=around)
""",
    right="""\
subprocess.run(["torchrun", "--nproc_per_node=2", "train.py"])
""",
    messages=(
        Message(
            r"Timed out after (?P<seconds>\d+) seconds waiting for clients\. (?P<came>\d+)/(?P<wanted>\d+) clients "
            r"joined",
            "{came} of {wanted} processes connected within {seconds} s{at}. The others were not started, use "
            "another MASTER_ADDR or MASTER_PORT, or a firewall blocks them.",
            kind="printed",
            blames=False,
        ),
        Message(
            r"init_process_group.*wait timeout after (?P<limit>\d+) ?ms, keys: \S*/\w*//\S*?(?P<other>\d+)\s*$",
            "{who} waited {limit} ms in init_process_group{at} for the address of rank {other}. Fewer "
            "processes were started than world_size says, or rank {other} failed before it.",
            blames=False,
        ),
        Message(
            r"network addresses of \((?P<host>[^,)]+), (?P<port>\d+)\) cannot be retrieved",
            "The name {host} has no address on this machine, so {who} cannot reach port {port} there.",
            kind="printed",
            blames=False,
        ),
        Message(
            r"client socket has timed out after (?P<limit>\d+ ?m?s) while trying to connect to "
            r"\('?(?P<host>[^,')]+)'?, (?P<port>\d+)\)",
            "{who} tried for {limit} to reach {host}:{port}{at}. Rank 0 is not running there, listens on "
            "another port, or a firewall is in between.",
            kind="printed",
            blames=False,
        ),
        Message(
            r"failed to connect to any network address of \((?P<host>[^,)]+), (?P<port>\d+)\)",
            "{who} cannot reach {host}:{port}: the name is wrong, rank 0 does not run there, or a firewall "
            "is in between.",
            kind="printed",
            blames=False,
        ),
        Message(
            r"(?P<error>Rendezvous(?:Timeout|Connection|Closed|GracefulExit)Error)",
            "The launchers of the nodes did not find each other ({error}). One was not started, or uses "
            "another --rdzv-endpoint, --rdzv-id, or --nnodes.",
            blames=False,
        ),
    ),
)
