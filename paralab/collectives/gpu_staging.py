"""GPU memory that all ranks in a group can read: three slots per rank, through CUDA IPC.

All work runs on one stream per rank. Interprocess events order the ranks' streams, so neither the
training thread nor a kernel waits for another rank's GPU work. An event must be recorded before
another rank waits for it, so the ranks also synchronize on the host, in the thread that runs
collectives:

    stream    stage, record my event            wait for every rank's event, reduce, …
    host                              sync
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from paralab.collectives.gpu_driver import GpuMemory
from paralab.collectives.staging import SLOTS, Staging

SLOT_BYTES = 32 * 2**20  # initial slot size: larger than one of DDP's buckets
PART_OF_MEMORY = 64  # all slots of a rank use at most a 64th of its GPU
# A rank reuses an event after two synchronizations, when all ranks have waited for it.
EVENTS = 2
INVITATION_BYTES = 1024


class GpuStaging(Staging):
    """The slots of every rank on its GPU. All ranks must create this object at the same time. If
    any rank cannot share memory, `problem` has the reason on all ranks, and the slots are unusable.

    The slots grow with the largest tensor, so ranks that take turns on a GPU need fewer turns.
    """

    few_ranks = 4

    def __init__(
        self, rank: int, size: int, device: torch.device, exchange: Callable[[bytes], list[bytes]]
    ) -> None:
        self.rank, self.device, self._exchange = rank, device, exchange
        self.turn = self._meetings = 0
        self.ranks = size
        memory = torch.cuda.get_device_properties(device).total_memory
        self._most_bytes = max(SLOT_BYTES, memory // PART_OF_MEMORY // SLOTS)
        self._memory: list[GpuMemory] = []
        with torch.cuda.device(device):
            # High priority: a rank's copies must not queue behind its own backward pass.
            self.stream = torch.cuda.Stream(priority=-1)
        self.problem = self._share(SLOT_BYTES)

    def fit(self, size: int) -> None:
        slot_bytes = min(self._most_bytes, 1 << (size - 1).bit_length()) // 4096 * 4096
        if slot_bytes > self.slot_bytes and self._share(slot_bytes):
            self._most_bytes = self.slot_bytes  # not enough memory: do not try again

    def _share(self, slot_bytes: int) -> str:
        """Replace all slots on all ranks. If any rank fails, keep the old slots and return the
        reason, which is the same on all ranks."""
        self.stream.synchronize()  # after this exchange, no rank uses the old slots
        with torch.cuda.device(self.device):
            own, mine = _allocate(SLOTS * slot_bytes, self.device)
            answers = self._exchange(_encode(mine | {"most_bytes": self._most_bytes}))
            invitations = list(map(_decode, answers))
            # Ranks may have GPUs of different sizes.
            self._most_bytes = min(each["most_bytes"] for each in invitations)
            problem = next((each["problem"] for each in invitations if "problem" in each), "")
            others: dict[int, _Peer] = {}
            if not problem:
                others, problem = self._open(invitations, SLOTS * slot_bytes)
            problems = [
                _decode(each)["problem"] for each in self._exchange(_encode({"problem": problem}))
            ]
        problem = next(filter(None, problems), "")
        mapped = [own, *others.values()]
        if problem:
            _close(each.memory for each in mapped if each)
            return problem

        assert own
        _close(self._memory)
        self._memory = [each.memory for each in mapped if each]
        self.slot_bytes, self._own_events = slot_bytes, own.events
        self._events = [each.events for each in others.values()]
        by_rank = {self.rank: own, **others}
        self._data = [by_rank[each].memory.data.view(SLOTS, -1) for each in sorted(by_rank)]
        return ""

    def _open(self, invitations: list[dict[str, Any]], size: int) -> tuple[dict[int, _Peer], str]:
        """Map the other ranks' memory. Return the memory by rank, and the problem, if any."""
        peers: dict[int, _Peer] = {}
        try:
            for rank, each in enumerate(invitations):
                if rank != self.rank:
                    memory = GpuMemory.open(_bytes(each["memory"]), size, self.device)
                    events = [
                        torch.cuda.Event.from_ipc_handle(self.device, _bytes(event))
                        for event in each["events"]
                    ]
                    peers[rank] = _Peer(memory, events)
        except (OSError, RuntimeError) as error:
            return peers, _first_line(error)
        return peers, ""

    def meet(self, meet: Callable[[], None]) -> None:
        number = self._meetings % EVENTS
        self._own_events[number].record(self.stream)
        meet()
        for events in self._events:
            self.stream.wait_event(events[number])
        self._meetings += 1

    def close(self) -> None:
        """Free the memory. The driver keeps it until the other ranks have closed it too."""
        self.stream.synchronize()
        _close(self._memory)


@dataclass(frozen=True)
class _Peer:
    """One rank's slots and events, as this rank sees them."""

    memory: GpuMemory
    events: list[torch.cuda.Event]


def _allocate(size: int, device: torch.device) -> tuple[_Peer | None, dict[str, Any]]:
    """Return this rank's memory and the handles for the other ranks, or the problem."""
    try:
        memory = GpuMemory.allocate(size, device)
        events = [torch.cuda.Event(interprocess=True) for _ in range(EVENTS)]
        handles = [_text(each.ipc_handle()) for each in events]
        return _Peer(memory, events), {"memory": _text(memory.handle()), "events": handles}
    except (OSError, RuntimeError) as error:
        return None, {"problem": _first_line(error)}


def _close(memory: Iterable[GpuMemory]) -> None:
    for each in memory:
        with suppress(RuntimeError):
            each.close()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]


def _encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode().ljust(INVITATION_BYTES)


def _decode(message: bytes) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(message)
    return decoded


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
