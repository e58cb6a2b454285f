"""The launcher for `paralab run` under torchrun or srun, which have already started a process for
each rank.

Each launched process starts its one rank as a child, exactly as on one machine, and watches it. So
the rank writes to its own log, its exit code is known, and paralab can kill a hung rank. Rank 0
plans, creates the run folder, informs the other ranks, and reports to the user. The other ranks do
not print anything.
"""

import atexit
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import psutil

from paralab.errors import ParalabError, UsageError, refusing
from paralab.launch.job import Job, Outcome, conclude, wait_for_file
from paralab.launch.launched_by import LaunchedRank, assign_places, own_address, rendezvous_file
from paralab.launch.ranks import GRACE_SECONDS, RankExits, Seat, run_ranks
from paralab.launch.restart import Attempts, LocalLauncher
from paralab.launch.run_options import Deadlines, RunOptions
from paralab.launch.stop import (
    ASK_SECONDS,
    REPEAT_SECONDS,
    OtherFailed,
    StopRequest,
    StopTogether,
    stop_in_order,
)
from paralab.launch.store import CONNECT_SECONDS, Lost, Store
from paralab.machine.host import address_towards, core_numbers, host_mark, loopback, usable_cores
from paralab.machine.signals import ENDS, STOPS, StopSignal, exit_code_of, number_of
from paralab.record.folder import RunFolder
from paralab.record.status_board import NEVER, Post, StatusBoard

PLAN_SECONDS = 900  # how long rank 0 may plan; longer than its deadline for the inspection
SEE_SECONDS = 15  # how long a file from rank 0 may take to appear on another node
# Other ranks wait this long for rank 0's report, because torchrun kills all ranks after one exits.
REPORT_SECONDS = 20
STOPPED_BY = {exit_code_of(number): number for number in ENDS}


@dataclass(frozen=True)
class Team:
    """One launched process's connection to the other processes."""

    place: LaunchedRank
    store: Store
    address: str  # the address of the store
    group: str  # where the ranks rendezvous

    def run_rank(
        self,
        work: dict[str, Any],
        request: StopRequest,
        show_progress: Callable[[], None] = lambda: None,
    ) -> RankExits:
        """Start this process's rank and watch it. Return how it exited. The exit code is None if we
        killed it because another rank failed, and 128 + N if signal N stopped this process."""
        rank, folder = self.place.rank, RunFolder(Path(work["folder"]))
        seat = Seat(rank, self.group, _interface(work["towards"][rank]))
        stop = StopTogether(self.place, self.store, request)

        def on_poll(board: StatusBoard) -> None:
            show_progress()
            stop.poll(board)

        try:
            deadlines = Deadlines(*work["deadlines"])
            return run_ranks(folder, work["jobs"], work["origin"], on_poll, deadlines, seat)
        except OtherFailed:
            return ended_with(None)
        except KeyboardInterrupt as error:  # sent by the user, or by torchrun after a failure
            return ended_with(exit_code_of(number_of(error)))


@dataclass(frozen=True)
class JoinedLauncher:
    """The launcher in each launched process. `run` returns on rank 0 and exits on the others."""

    place: LaunchedRank

    def run(self, job: Job) -> Outcome:
        place = self.place
        job = replace(job, options=adapt_to_restart(place, job.options))
        try:
            store = Store()
            if place.world_size == 1:
                facts = collect_facts(place, store.gpus(), None)
                store.close()
                return LocalLauncher(assign_places([facts])).run(job)

            team = join(place, store)
            store.put(f"facts/{place.rank}", collect_facts(place, store.gpus(), team.address))
            if place.rank:
                follow(team)
            return lead(team, job)
        except Lost as error:
            where = f"{place.address}:{place.port}" if place.address else rendezvous_file(place)
            who = f"Rank {place.rank} of {place.world_size} ({place.launcher})"
            fix = f"check that all ranks were started, and that every node can access {where}"
            raise ParalabError(f"{who} did not find the other ranks: {error}.", fix) from error


def adapt_to_restart(place: LaunchedRank, options: RunOptions) -> RunOptions:
    """If torchrun or Slurm has restarted the ranks, resume and write to a new folder."""
    fix = "torchrun --max-restarts N …, or a Slurm job with --requeue"
    options.leave_restarts_to(place.launcher, fix)
    if not place.restarts:
        return options
    out = options.out
    if out and out.exists():
        out = out.with_name(f"{out.name}-restart{place.restarts}")
    return replace(options, out=out, resume=options.checkpoint is not None)


def join(place: LaunchedRank, store: Store) -> Team:
    """Open the job's store. srun does not provide an address for it. So rank 0 chooses a port and
    writes its address and port to a file that all nodes can see."""
    path = rendezvous_file(place)
    serve = place.rank == 0 and not place.served
    if place.address is not None:
        assert place.port is not None
        address, port = place.address, place.port
    elif place.rank == 0:
        address, port = own_address(), 0
    else:
        if not wait_for_file(path, CONNECT_SECONDS):
            raise Lost(f"{path} did not appear within {CONNECT_SECONDS} s")
        address, text = path.read_text().split()
        port = int(text)

    prefix = f"paralab/{place.attempt}"
    port = store.open(address, port, prefix, serve)
    if place.address is None and place.rank == 0:
        part = path.with_name(path.name + ".part")
        with refusing(f"{path} is not writable", fix="start srun in a writable folder"):
            part.write_text(f"{address} {port}")
            part.rename(path)
        atexit.register(path.unlink, missing_ok=True)
    return Team(place, store, address, f"tcp://{address}:{port}/{prefix}/group")


def collect_facts(place: LaunchedRank, gpus: list[str], address: str | None) -> dict[str, Any]:
    """Return what rank 0 needs to know about this rank."""
    return {
        "rank": place.rank,
        "node": place.node,
        "name": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "machine": host_mark(),
        "local_rank": place.local_rank,
        "gpus": gpus,
        "cores": usable_cores(),
        "mask": core_numbers(),
        "address": address_towards(address) if address else None,
    }


def lead(team: Team, job: Job) -> Outcome:
    """Run rank 0, which leads the job. After an error, tell the waiting ranks to exit."""
    place, store = team.place, team.store

    def report() -> None:
        sys.stdout.flush()
        store.put("reported", True)

    atexit.register(report)
    try:
        facts = []
        for rank in range(place.world_size):
            try:
                facts.append(store.get(f"facts/{rank}", CONNECT_SECONDS))
            except Lost as error:
                raise Lost(f"rank {rank} did not join within {CONNECT_SECONDS} s") from error
        if place.address is None:
            rendezvous_file(place).unlink(missing_ok=True)  # by now, all ranks have joined
        return JoinedAttempts(job, team, facts).train()
    except BaseException as error:
        store.put("work", {"code": error.exit_code if isinstance(error, ParalabError) else 1})
        raise


class JoinedAttempts(Attempts):
    """Rank 0's only attempt: torchrun or Slurm, not paralab, restarts failed ranks. Ctrl-C reaches
    a rank twice: directly, and forwarded by the launcher. So signals within REPEAT_SECONDS count as
    one."""

    together_seconds = REPEAT_SECONDS

    def __init__(self, job: Job, team: Team, facts: list[dict[str, Any]]) -> None:
        self.team, self.store, self.facts = team, team.store, facts
        self.places = assign_places(facts)
        super().__init__(job, self.places)

    def run_ranks(self, attempt: int, stop: StopRequest) -> RankExits:
        work = {
            "code": 0,
            "folder": str(self.training.folder.path.resolve()),
            "jobs": [self.training.to_spec()],
            "origin": self.origin_seconds,
            "towards": self._towards(),
            "deadlines": self.job.options.deadlines,
        }
        self.store.put("work", work)
        self._require_shared_folder()

        own = self.team.run_rank(work, stop, self.show_progress)
        if own.failed:
            self.store.put("failed", True)
        exits = self._collect_exits(own)
        # A failed rank waits until rank 0 has reported, so torchrun has no reason to stop the other
        # ranks yet. If a signal stopped a rank, it came from the user.
        signals = [STOPPED_BY[code] for code in exits.codes if code in STOPPED_BY]
        if signals and not exits.unknown:
            raise StopSignal(signals[0])
        # On a shared file system, another node's last events may appear a little later.
        deadline = time.monotonic() + SEE_SECONDS
        while not exits.failed and time.monotonic() < deadline:
            if conclude(self.training, exits).status != "failed":
                break
            time.sleep(0.1)
        return exits

    def _towards(self) -> list[str | None]:
        """For each rank, return the address of another node. The rank then uses the network
        interface that leads there. If all ranks are on one node, return None for each rank."""
        nodes = [place.node for place in self.places]
        away = next((rank for rank, node in enumerate(nodes) if node != nodes[0]), None)
        if away is None:
            return [None] * len(nodes)
        other = self.facts[away]["address"]
        return [other if node == nodes[0] else self.team.address for node in nodes]

    def _require_shared_folder(self) -> None:
        """Reject a run folder that some nodes cannot see: their ranks could not write events."""
        blind = {
            place.node
            for rank, place in enumerate(self.places)
            if rank and not self.store.get(f"sees/{rank}", SEE_SECONDS * 3)
        }
        self.store.put("begin", 2 if blind else 0)
        if blind:
            created = f"{self.training.folder.path.resolve()}, created on {self.places[0].node}"
            problem = f"{', '.join(sorted(blind))} cannot see the run folder {created}."
            raise UsageError(problem, fix="--out DIR on a file system that all nodes share")

    def _collect_exits(self, own: RankExits) -> RankExits:
        deadline = time.monotonic() + (3 * GRACE_SECONDS if own.failed else CONNECT_SECONDS)
        ranks, unknown = [own], []
        for rank in range(1, len(self.places)):
            try:
                note = self.store.get(f"ended/{rank}", deadline - time.monotonic())
                ranks.append(msgspec.convert(note, RankExits, str_keys=True))
            except Lost:
                ranks.append(ended_with(None))
                unknown.append(rank)
        return RankExits(
            codes=[code for exits in ranks for code in exits.codes],
            posts=[post for exits in ranks for post in exits.posts],
            late=[late for exits in ranks for late in exits.late],
            noticed=time.time(),
            errors={rank: text for exits in ranks for rank, text in exits.errors.items()},
            unknown=tuple(unknown),
        )


def ended_with(code: int | None) -> RankExits:
    """Return the exit of a rank whose last step is unknown."""
    return RankExits([code], [Post("start", NEVER, 0.0, False)])


def follow(team: Team) -> NoReturn:
    """Run a rank other than 0: follow rank 0, report the rank's exit code, and exit with it."""
    rank, store = team.place.rank, team.store
    exits = ended_with(1)
    try:
        work = store.get("work", PLAN_SECONDS)
        exits = ended_with(work["code"])
        if "folder" in work:
            sees = wait_for_file(Path(work["folder"], "manifest.json"), SEE_SECONDS)
            store.put(f"sees/{rank}", sees)
            exits = ended_with(store.get("begin", SEE_SECONDS * 4))
            if not exits.failed:
                saves = work["jobs"][0]["checkpoints"] is not None
                with stop_in_order(saves, together_seconds=REPEAT_SECONDS) as request:
                    exits = team.run_rank(work, request)
    except KeyboardInterrupt as error:
        exits = ended_with(exit_code_of(number_of(error)))
    except BaseException as error:
        exits = ended_with(1)
        if not isinstance(error, Lost):
            raise
    finally:
        store.put(f"ended/{rank}", asdict(exits))
        if exits.failed:
            store.put("failed", True)

    # Let rank 0 report and exit first, so that the launcher returns rank 0's exit code.
    [code] = exits.codes
    with suppress(Lost, KeyboardInterrupt):
        store.get("reported", REPORT_SECONDS)
        if exits.failed:
            time.sleep(ASK_SECONDS)
    # torchrun may still send a signal after rank 0 has exited.
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(1 if code is None or code < 0 else code)


def _interface(towards: str | None) -> str | None:
    """Return the network interface for gloo, or None to let gloo choose."""
    if towards is None:
        return loopback()
    own, interfaces = address_towards(towards), psutil.net_if_addrs().items()
    own_names = [name for name, listed in interfaces for each in listed if each.address == own]
    return own_names[0] if own_names else None
