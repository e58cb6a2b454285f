"""GPU memory that all ranks in a group can read: three slots per rank, through CUDA IPC.

All work runs on one stream per rank. Interprocess events order the ranks' streams, so neither the
training thread nor a kernel waits for another rank's GPU work. An event must be recorded before
another rank waits for it. So the ranks also meet on the host, in the thread that runs collectives:

    stream    stage, record my event            wait for every rank's event, reduce, …
    host                              meet
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from paralab.collectives.gpu_driver import GpuMemory
from paralab.collectives.staging import SLOTS, Staging

SLOT_BYTES = 32 * 2**20  # larger than one of DDP's buckets: fewer rounds, so fewer meetings
# A rank records an event again two meetings later. By then, all ranks have waited for it.
EVENTS = 2
INVITATION_BYTES = 1024


class GpuStaging(Staging):
    """The slots of every rank on its GPU. All ranks must create it at the same time. If a rank
    cannot share memory, `problem` says why, on all ranks, and nothing works here."""

    slot_bytes = SLOT_BYTES

    def __init__(
        self, rank: int, device: torch.device, exchange: Callable[[bytes], list[bytes]]
    ) -> None:
        self.turn = self._meetings = 0
        self._memory: list[GpuMemory] = []
        with torch.cuda.device(device):
            # High priority: a rank's copies must not queue behind its own backward pass.
            self.stream = torch.cuda.Stream(priority=-1)
            self.stream.synchronize()  # CUDA is initialized in this thread
            mine = self._invite(device)
            invitations = list(map(_decode, exchange(_encode(mine))))
            problem = next((each["problem"] for each in invitations if "problem" in each), "")
            if not problem:
                problem = self._open(rank, device, invitations)
            problems = [_decode(each) for each in exchange(_encode({"problem": problem}))]
        self.problem: str = next((each["problem"] for each in problems if each["problem"]), "")
        if self.problem:
            self.close()

    def _invite(self, device: torch.device) -> dict[str, Any]:
        """Return what other ranks need to use this rank's memory and events, or the problem."""
        try:
            own = GpuMemory.allocate(SLOTS * self.slot_bytes, device)
            self._memory.append(own)
            self._own_events = [torch.cuda.Event(interprocess=True) for _ in range(EVENTS)]
            events = [_text(each.ipc_handle()) for each in self._own_events]
            return {"memory": _text(own.handle()), "events": events}
        except (OSError, RuntimeError) as error:
            return {"problem": str(error).splitlines()[0]}

    def _open(self, rank: int, device: torch.device, invitations: list[dict[str, Any]]) -> str:
        """Map every other rank's memory. Return the problem, if any."""
        own, size = self._memory[0], SLOTS * self.slot_bytes
        self._events: list[list[torch.cuda.Event]] = []
        self._data = []
        try:
            for other, each in enumerate(invitations):
                memory = own
                if other != rank:
                    memory = GpuMemory.open(_bytes(each["memory"]), size, device)
                    self._memory.append(memory)
                    self._events.append(
                        [
                            torch.cuda.Event.from_ipc_handle(device, _bytes(event))
                            for event in each["events"]
                        ]
                    )
                self._data.append(memory.data.view(SLOTS, -1))
        except (OSError, RuntimeError) as error:
            return str(error).splitlines()[0]
        return ""

    def meet(self, meet: Callable[[], None]) -> None:
        number = self._meetings % EVENTS
        self._own_events[number].record(self.stream)
        meet()
        for events in self._events:
            self.stream.wait_event(events[number])
        self._meetings += 1

    def close(self) -> None:
        """Give the memory back. The driver keeps it until the other ranks have closed it too."""
        self.stream.synchronize()
        while self._memory:
            with suppress(RuntimeError):
                self._memory.pop().close()


def _encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode().ljust(INVITATION_BYTES)


def _decode(message: bytes) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(message)
    return decoded


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
