"""H18: The ranks never find each other.

Symptom: 'Timed out after … seconds waiting for clients. 1/2 clients joined', or 'The client socket has timed out'.
Cause: WORLD_SIZE, MASTER_ADDR, or MASTER_PORT is wrong, a firewall blocks the port, or some ranks were not started.
Fix: Start WORLD_SIZE ranks, all with the same reachable MASTER_ADDR and MASTER_PORT. torchrun does this for you.

- around = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "2"}
- subprocess.run(["python", "train.py"], env=around)
+ subprocess.run(["torchrun", "--nproc_per_node=2", "train.py"])
"""

import ast

from paralab.doctor.environment import is_loopback
from paralab.doctor.events import Init
from paralab.doctor.failures.hangs.h13_long_preparation import FIRST_COLLECTIVE
from paralab.doctor.observation import Observation, WatchedRank
from paralab.doctor.preflight import Facts
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.registry import Finding, Findings, Message, check, describe, printed
from paralab.doctor.static import report
from paralab.doctor.static.facts import Call
from paralab.doctor.static.names import INIT
from paralab.doctor.static.project import Scope
from paralab.doctor.static.script import Script
from paralab.record.victims import WAITED

ENTRY = describe(
    __doc__,
    printed(
        r"Timed out after (?P<seconds>\d+) seconds waiting for clients\. (?P<came>\d+)/(?P<wanted>\d+) clients "
        r"joined",
        "Only {came} of {wanted} processes connected within {seconds} s{at}. The others were "
        "not started, they use a different MASTER_ADDR or MASTER_PORT, or a firewall blocks "
        "them.",
        blames=False,
    ),
    Message(
        r"init_process_group.*wait timeout after (?P<limit>\d+) ?ms, keys: \S*/\w*//\S*?(?P<other>\d+)\s*$",
        "{who} waited {limit} ms in init_process_group{at} for the address of rank {other}. Fewer "
        "processes were started than world_size requires, or rank {other} failed earlier.",
        blames=False,
    ),
    printed(
        FIRST_COLLECTIVE,
        "Rank {waiting} waited for rank {other} to set up NCCL, but rank {other} did not reach "
        "its first collective in time. It failed earlier, is still busy (H13), or takes a "
        "different path (H03). The log of rank {other} would confirm this.",
        fix="Read the log of rank {other}: its last lines show where it is.",
        severity="suspect",
        blames=False,
    ),
    printed(
        r"network addresses of \((?P<host>[^,)]+), (?P<port>\d+)\) cannot be retrieved",
        "The name {host} has no address on this machine, so {who} cannot reach port {port} there.",
        blames=False,
    ),
    printed(
        r"client socket has timed out after (?P<limit>\d+ ?m?s) while trying to connect to "
        r"\(?'?(?P<host>[^,':)\s]+)'?[,:] ?(?P<port>\d+)\)?",
        "{who} tried to reach {host}:{port} for {limit}{at}. Rank 0 is not running there, it "
        "listens on another port, or a firewall blocks the connection.",
        blames=False,
    ),
    printed(
        r"failed to connect to any network address of \((?P<host>[^,)]+), (?P<port>\d+)\)",
        "{who} cannot reach {host}:{port}: the name is wrong, rank 0 is not running there, or "
        "a firewall blocks the connection.",
        blames=False,
    ),
    Message(
        r"c10d_rendezvous_backend\.py.*(?:reset by peer|Broken pipe|closed by peer)",
        "A launcher lost its connection to the node that runs the rendezvous: that node stopped first, "
        "or the network is down.",
        fix="Read the log of the node that --rdzv-endpoint names. Use the same --nnodes, --rdzv-id, and "
        "--rdzv-endpoint on all nodes.",
        severity="suspect",
        blames=False,
    ),
    Message(
        r"connect\(\) timed out",
        "{who} could not connect to the rendezvous{at}: no process listens at that address, or "
        "a firewall blocks the connection.",
        blames=False,
    ),
    Message(
        r"(?P<error>Rendezvous(?:Timeout|Connection|Closed|GracefulExit)Error)",
        "The launchers on the nodes did not find each other ({error}). One was not started, "
        "or uses a different --rdzv-endpoint, --rdzv-id, or --nnodes.",
        blames=False,
    ),
)


@check("H18", source="ranks")
def too_few_ranks(seen: Observation) -> Findings:
    inits = {rank.rank: init for rank in seen.ranks for init in _inits(rank) if init.world}
    for number, init in inits.items():
        world = init.world or 0
        if world <= len(inits) or not init.error or not WAITED.search(init.error):
            continue
        absent = [str(rank) for rank in range(world) if rank not in inits]
        why = (
            f"init_process_group waits for {world} ranks, but only {len(inits)} arrived. Missing: rank "
            f"{', '.join(absent[:8])}."
        )
        fix = f"Start {world} ranks, or pass world_size={len(inits)}. torchrun sets rank and world_size itself."
        evidence = f"rank {number}: {init.error.splitlines()[0][:160]}"
        yield make_finding("H18", "error", why, init, evidence, fix=fix)
        return


@check("H18", source="ranks")
def other_address(seen: Observation) -> Findings:
    """Report a program that replaces the address that torchrun sets. torchrun's agent runs the
    rendezvous, so no process listens at the new address."""
    inits = [(rank, init) for rank in seen.ranks for init in _inits(rank)]
    waiting = [(r, i) for r, i in inits if i in r.doing or (i.error and WAITED.search(i.error))]
    elsewhere = [(rank, init) for rank, init in waiting if _is_elsewhere(init)]
    if not seen.settled or not elsewhere or len(waiting) < len(inits):
        return
    init = elsewhere[0][1]
    why = (
        f"torchrun runs the rendezvous at {init.agent}, but the program sets MASTER_ADDR and "
        f"MASTER_PORT to {init.address}, where no process listens, so all ranks wait forever."
    )
    fix = "Keep torchrun's MASTER_ADDR and MASTER_PORT: set them with os.environ.setdefault, or use torchrun --master_port=…"
    yield make_finding("H18", "error", why, init, fix=fix)


def _is_elsewhere(init: Init) -> bool:
    addresses = init.agent, init.address
    return all(addresses) and len({(one or "").rpartition(":")[2] for one in addresses}) == 2


def _inits(rank: WatchedRank) -> list[Init]:
    return [event for event in (*rank.events, *rank.doing) if isinstance(event, Init)]


SPAWNS = ("torch.multiprocessing.spawn", "torch.multiprocessing.spawn.spawn")


@check("H18", source="script")
def more_ranks_than_processes(script: Script) -> Findings:
    """Report an init_process_group call that waits for more ranks than mp.spawn starts."""
    spawns, starts = script.calls_of(*SPAWNS), script.calls_of(INIT)
    if len(spawns) != 1 or len(starts) != 1:
        return
    spawn, init = spawns[0], starts[0]
    given, size, rank = (
        spawn.argument(2, "nprocs"),
        init.argument(3, "world_size"),
        init.argument(4, "rank"),
    )
    if given is None or size is None or rank is None or not _is_spawn_index(script, rank, init):
        return
    started = script.evaluate(given, spawn.scope, 0)
    wanted = _spawned_value(script, spawn, size, init.scope)
    if not isinstance(started, int) or not isinstance(wanted, int) or wanted <= started:
        return
    why = (
        f"This waits for {wanted} ranks, but {report.line_of(spawn, init)} starts only {started}, so all ranks "
        "wait until the timeout."
    )
    fix = f"Use one number for both: world_size={started}, or nprocs={wanted}."
    yield report.found(script, "H18", "error", init, why, fix, also=(spawn,))


def _is_spawn_index(script: Script, rank: ast.expr, init: Call) -> bool:
    """Return whether the rank is the index from spawn, not a rank across multiple machines."""
    return [script.evaluate(rank, init.scope, number) for number in (0, 1)] == [0, 1]


def _spawned_value(script: Script, spawn: Call, node: ast.expr, scope: Scope) -> object:
    """Evaluate an expression in a spawned function, given `spawn(function, args=(…))`. The usual
    meaning of a name such as `world_size` is no evidence."""
    for _ in range(6):
        found_here = script.reaching(node, scope)
        if len(found_here) != 1 or found_here[0].how not in ("parameter", "assign"):
            break
        definition = found_here[0]
        target = script.resolve(spawn.node.args[0], spawn.scope) if spawn.node.args else None
        values = list(script.sources(definition))
        if definition.how == "parameter" and target is definition.scope:
            names = [one.arg for one in definition.scope.parameters]
            place, given = names.index(definition.name), spawn.argument(1, "args")
            if not isinstance(given, ast.Tuple) or not 0 < place <= len(given.elts):
                return None
            values = [(given.elts[place - 1], spawn.scope)]  # the first parameter is the rank
        if len(values) != 1:
            return None
        node, scope = values[0]
    by_name = isinstance(node, (ast.Name, ast.Attribute))
    return None if by_name else script.evaluate(node, scope, 0)


@check("H18", source="machine")
def wrong_address(facts: Facts) -> Findings:
    address, launch, evidence = facts.address, facts.launch, facts.evidence("MASTER_ADDR")
    if address is None:
        return
    if address.resolved is None:
        why = (
            f"MASTER_ADDR={address.name} does not resolve ({address.problem}), so no rank can find rank 0, "
            "and all ranks wait until their timeout."
        )
        fix = "Use the IP address of the first node: `hostname -I` there, or `scontrol show node NAME`."
        yield Finding("H18", "error", why, fix, evidence=evidence)
    elsewhere = launch.ranks and launch.local_ranks and launch.ranks > launch.local_ranks
    if ((launch.nodes or 1) > 1 or elsewhere) and is_loopback(address.name):
        why = (
            f"MASTER_ADDR={address.name} means a different machine on each node of this job, so each "
            "node waits for itself."
        )
        fix = "Set MASTER_ADDR to the address of the first node, on all nodes."
        yield Finding("H18", "error", why, fix, evidence=evidence)
    if address.connects is False:
        port = launch.variables.get("MASTER_PORT")
        why = (
            f"Rank {launch.rank} cannot connect to {address.name}:{port} ({address.problem}): a firewall "
            "blocks it, or the address or port is wrong."
        )
        fix = "Start rank 0, and use the same MASTER_ADDR and MASTER_PORT on all nodes."
        doubt = "if rank 0 is running"
        yield make_finding("H18", "suspect", why, None, evidence, fix=fix, doubt=doubt)


@check("H18", source="machine")
def wrong_world_size(facts: Facts) -> Findings:
    tasks, launch = facts.environment.get("SLURM_STEP_NUM_TASKS", ""), facts.launch
    world = launch.variables.get("WORLD_SIZE", tasks)
    if tasks.isdigit() and int(tasks) > 1 and launch.by != "torchrun" and world != tasks:
        why = f"WORLD_SIZE={world}, but Slurm started {tasks} tasks, so the ranks wait forever."
        fix = "export WORLD_SIZE=$SLURM_NTASKS RANK=$SLURM_PROCID in every task."
        yield Finding("H18", "error", why, fix, evidence=facts.evidence("launcher"))


@check("H18", source="machine")
def unresolved_host(facts: Facts) -> Findings:
    if facts.host and facts.host_address is None:
        why = (
            f"The name of this machine, {facts.host}, does not resolve. Unless you name an "
            f"interface, gloo and torchrun look up this name, and then hang or fail."
        )
        fix = (
            f"Add the line `127.0.1.1 {facts.host}` to /etc/hosts, or use GLOO_SOCKET_IFNAME=lo and "
            "torchrun --rdzv-endpoint=127.0.0.1:0."
        )
        doubt = "if a job on this machine says 'Unable to resolve hostname'"
        name = facts.evidence("host name")
        yield make_finding("H18", "suspect", why, None, name, fix=fix, doubt=doubt)
