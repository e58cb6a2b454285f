"""What goes wrong before the first step: ports, rendezvous, devices, environment, libraries."""

from __future__ import annotations

import re
from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.logs.job import Logs
from paralab.doctor.logs.said import blamed, claims, errors, lines, victims
from paralab.doctor.registry import check

PORT = claims(
    r"(?:port: (\d+).{0,120})?EADDRINUSE|The server socket has failed to listen.{0,80}port: (\d+)|ddress already in use"
)
LISTEN = re.compile(r"The server socket has failed to listen")
NUMBER = re.compile(r"port: (\d+)|:(\d{4,5})\b")
NO_RANK = claims(
    r"Error initializing torch\.distributed using env:// rendezvous: environment variable (\w+) expected, but not set"
)
DUPLICATE = claims(r"Duplicate GPU detected : rank (\d+) and rank (\d+) both on CUDA device (\w+)")
NOT_BUILT = claims(r"Distributed package doesn't have (\w+) built in")
NOT_INITIALISED = claims(r"Default process group has not been initialized")
THREADS = re.compile(
    r"Setting OMP_NUM_THREADS environment variable for each process to be (\d+) in default"
)
WORKERS = re.compile(
    r"This DataLoader will create (\d+) worker processes in total\. Our suggested max number of worker .{0,80}?is (\d+)"
)
NO_ROOM = r"unable to (?:allocate shared memory\(shm\)|(?:write to|resize) file </torch_)"
SHM = claims(
    NO_ROOM
    + r"|DataLoader worker \(pid\(?s?\)? ?\d*\)? ?(?:is killed by signal: Bus error|.{0,40}Bus error)|out of shared memory"
)
BUS = re.compile(r"DataLoader worker .{0,40}killed by signal: Bus error")
UNKNOWN_DEVICE = re.compile(
    r"using GPU (\d+) (?:to perform barrier )?as (?:the )?devices? used by this process (?:is|are) currently "
    r"unknown|Guessing device ID based on global rank"
)
NOT_DESTROYED = re.compile(r"destroy_process_group\(\) was not called before program exit")
JOINED = re.compile(
    r"Timed out after (\d+) seconds waiting for clients\. (\d+)/(\d+) clients joined"
)
CLIENT = re.compile(
    r"client socket has timed out after (\d+) ?ms while trying to connect to \(([^,)]+), (\d+)\)"
)
# gloo's ranks leave their addresses in the store, and wait there for each other's: the last number
# is the rank that is missed.
ADDRESS = re.compile(
    r"wait timeout after (\d+) ?ms, keys: \S*/(?:cpu|cuda|\w*)//\S*?(\d+)\s*$", re.MULTILINE
)
INITIAL = "init_process_group"
MEETING = claims(r"Rendezvous(?:Timeout|Connection|Closed|GracefulExit)Error")
NAMELESS = re.compile(r"network addresses of \(([^,)]+), (\d+)\) cannot be retrieved")
STORE = re.compile(
    r"\[(\d+)\] is setting up NCCL communicator and retrieving ncclUniqueId from \[(\d+)\] via c10d key-value store by "
    r"key '[^']*', "
    r"but (?:store->get|got error)"
)


@check("L01", source="log")
def port_in_use(logs: Logs) -> Iterator[Finding]:
    said = (
        errors(logs, PORT) or victims(logs, PORT) or lines(logs, LISTEN)
    )  # other servers look for another port
    if said is None:
        return
    found = NUMBER.search(said.match.string)
    port = f"Port {found[1] or found[2]}" if found else "The port"
    yield said.finding(
        "L01",
        "error",
        f"{port} is taken on this host: another job, or a process left over from an earlier one, listens there, and {said.who} "
        "wanted to.",
        "torchrun --standalone (or --rdzv-endpoint=localhost:0) takes a free port; `ss -ltnp` names who holds this one",
    )


@check("L02", source="log")
def no_launcher(logs: Logs) -> Iterator[Finding]:
    if said := errors(logs, NO_RANK):
        yield said.finding(
            "L02",
            "error",
            f"init_process_group{said.at} takes its place in the job from the environment, and {said.match[1]} is not set there: "
            "the script was started with plain python.",
            "torchrun --nproc_per_node=2 script.py",
        )


@check("L03", source="log")
def two_ranks_on_one_gpu(logs: Logs) -> Iterator[Finding]:
    said = errors(logs, DUPLICATE) or lines(logs, DUPLICATE)
    if said is not None:
        first, second, device = said.match.groups()
        yield said.of_all().finding(
            "L03",
            "error",
            f"Ranks {first} and {second} both use the GPU {device}, and NCCL takes one rank per GPU: "
            "torch.cuda.set_device(LOCAL_RANK) is missing, a device is written down as cuda:0, or more ranks than GPUs were "
            "started.",
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before init_process_group; at most one rank per GPU',
        )


@check("L05", source="log")
def backend_not_built(logs: Logs) -> Iterator[Finding]:
    if said := errors(logs, NOT_BUILT):
        yield said.finding(
            "L05",
            "error",
            f"{said.who} asks for {said.match[1]}{said.at}, and this build of torch does not have it (a CPU build, Windows or "
            "macOS).",
            'init_process_group("gloo"), or install the CUDA build of torch',
        )


@check("L06", source="log")
def used_before_init(logs: Logs) -> Iterator[Finding]:
    if said := errors(logs, NOT_INITIALISED):
        yield said.finding(
            "L06",
            "error",
            f"{said.who} needs the process group{said.at} before init_process_group was called.",
            "call init_process_group first, then make samplers and DDP",
        )


@check("L09", source="log")
def threads(logs: Logs) -> Iterator[Finding]:
    if said := lines(logs, WORKERS):
        asked, cores = said.match.groups()
        yield said.finding(
            "L09",
            "warning",
            f"Each rank starts {asked} data workers, and there are {cores} cores for it: they take the time from each other and "
            "from training.",
            f"num_workers = cores / ranks, at most {cores}",
        )
    elif (said := lines(logs, THREADS)) and not blamed(logs).roots and not blamed(logs).victims:
        yield said.finding(
            "L09",
            "suspect",
            f"OMP_NUM_THREADS was not set, so torchrun gave every process {said.match[1]} thread. If the machine has more cores "
            "than ranks, work on the CPU (transforms, CPU training) is that much slower; certain with the number of cores.",
            "OMP_NUM_THREADS = cores / ranks before torchrun",
        )


@check("L11", source="log")
def shared_memory(logs: Logs) -> Iterator[Finding]:
    if said := errors(logs, SHM) or lines(logs, BUS):
        yield said.finding(
            "L11",
            "error",
            (
                f"A data worker of {said.who} found no room in shared memory"
                if re.search(NO_ROOM, said.match.string)
                else f"A data worker of {said.who} died of a bus error"
            )
            + f"{said.at}: batches travel through /dev/shm, and it was full "
            "(containers give it 64 MB, to be shared by ranks × workers × prefetched batches).",
            "start the container with --shm-size=8g or --ipc=host; fewer num_workers or a smaller prefetch_factor",
        )


@check("H09", source="log")
def device_guessed(logs: Logs) -> Iterator[Finding]:
    if said := lines(logs, UNKNOWN_DEVICE):
        guess = f"GPU {said.match[1]}" if said.match[1] else "the GPU with its rank's number"
        yield said.finding(
            "H09",
            "warning",
            f"NCCL does not know the device of {said.who} and took {guess}: the first collective came before "
            "torch.cuda.set_device. If that is not its GPU (several nodes, CUDA_VISIBLE_DEVICES), the job hangs.",
            "torch.cuda.set_device(local_rank) first, and init_process_group(..., device_id=torch.device('cuda', local_rank))",
        )


@check("H17", source="log")
def not_destroyed(logs: Logs) -> Iterator[Finding]:
    blame = blamed(logs)
    if (said := lines(logs, NOT_DESTROYED)) and not blame.roots and not blame.victims:
        yield said.finding(
            "H17",
            "warning",
            f"{said.who} ended without destroy_process_group(): NCCL's threads are cut off, and the next job may meet its "
            "leftovers.",
            "call dist.destroy_process_group() on every rank at the end, in a finally block",
        )


@check("H18", source="log")
def rendezvous(logs: Logs) -> Iterator[Finding]:
    said = victims(logs, JOINED) or lines(logs, JOINED)
    if said is not None:
        seconds, came, wanted = (int(group) for group in said.match.groups())
        yield said.of_all().finding(
            "H18",
            "error",
            f"{came} of {wanted} processes met within {seconds} s{said.at}; {wanted - came} never came: not started, started "
            "with another MASTER_ADDR or MASTER_PORT, or behind a firewall. The one that waited is not to blame.",
            f"start all {wanted} with the same WORLD_SIZE={wanted}, MASTER_ADDR and MASTER_PORT, each with its own RANK",
        )
        return
    said = victims(logs, ADDRESS)
    if said is not None and not blamed(logs).roots and INITIAL in said.match.string:
        patience, missed = (int(group) for group in said.match.groups())
        yield said.of_all().finding(
            "H18",
            "error",
            f"{said.who} waited {patience / 1000:g} s in init_process_group{said.at} for the address of rank {missed}, and it "
            "did not come: fewer processes were started than world_size says, or some rank never got so far. Those that waited are "
            "not to blame.",
            "start as many processes as world_size says; with torchrun leave rank and world_size out, it knows them",
        )
        return
    said = victims(logs, CLIENT) or errors(logs, CLIENT) or lines(logs, CLIENT)
    if said is not None:
        milliseconds, host, port = said.match.groups()
        host = host.strip("'")
        unknown = lines(logs, NAMELESS)
        why = f"{said.who} asked {host}:{port} for {int(milliseconds) / 1000:g} s{said.at} and nobody answered: "
        why += (
            f"the name {host} has no address on this machine."
            if unknown
            else "rank 0 is not running there, listens on another port, or a firewall is between."
        )
        yield said.of_all().finding(
            "H18",
            "error",
            why,
            f"start rank 0 on {host} with MASTER_PORT={port}; try `nc -vz {host} {port}` from the other node",
        )
    elif said := errors(logs, MEETING):
        yield said.of_all().finding(
            "H18",
            "error",
            f"The launchers of the nodes did not meet: `{said.match[0]}`. One was not started, or has another --rdzv-endpoint or "
            "--nnodes.",
            "start torchrun on every node with the same --rdzv-id, --rdzv-endpoint and --nnodes",
        )


@check("H13", source="log")
def waiting_for_the_id(logs: Logs) -> Iterator[Finding]:
    said = victims(logs, STORE) or lines(logs, STORE)
    if said is not None and not blamed(logs).roots:
        waiting, culprit = said.match.groups()
        yield said.finding(
            "H13",
            "error",
            f"Rank {waiting} came to its first collective and waited for rank {culprit} until the timeout; rank {culprit} was "
            "not there yet (it downloads, tokenises or builds the data while the others wait), or is dead.",
            "prepare the data before the job; or init_process_group(..., timeout=timedelta(hours=2)); or wait in a gloo group",
            rank=int(culprit),
        )
