"""Send and receive between two ranks, through a dedicated socket.

Each direction has a thread, so two ranks can send to each other at the same time. CUDA tensors go
through host memory.
"""

from __future__ import annotations

import select
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paralab.collectives.flat import flat_inputs, flat_outputs
from paralab.collectives.mesh import Mesh
from paralab.collectives.recorder import record
from paralab.collectives.thread import Entry, LocalWork, OrderedThread

POLL_SECONDS = 1e-3
HEADER = struct.Struct("!qq16s")  # tag, number of bytes, dtype


@dataclass(frozen=True, eq=False)
class Receive:
    """A call to recv. `work` finishes when its message has arrived."""

    tensor: torch.Tensor
    tag: int
    work: LocalWork
    entry: Entry


@dataclass(frozen=True, eq=False)
class Message:
    tag: int
    dtype: str
    data: bytearray


Each = TypeVar("Each", Receive, Message)


class Connection:
    """Messages to and from one rank. A message that arrives before its receive call waits in
    `early`, and a receive call waits for its message in `waiting`."""

    def __init__(self, mesh: Mesh, rank: int, limit: Callable[[], float]) -> None:
        self.mesh, self.peer, self.socket = mesh, mesh.peers[rank], mesh.peers[rank].data
        self._limit = limit
        self._lock = threading.Lock()
        self.early: list[Message] = []
        self.waiting: list[Receive] = []
        self.sender = OrderedThread(f"send {rank}", mesh.abort)
        self.receiver = OrderedThread(f"receive {rank}", mesh.abort)
        self.threads = (self.sender, self.receiver)

    def send(self, tensors: list[torch.Tensor], tag: int) -> dist.Work:
        def job() -> list[torch.Tensor]:
            with flat_inputs(tensors) as flat:
                for each in flat:
                    data = _bytes(each)
                    header = HEADER.pack(tag, data.nbytes, _dtype(each).encode())
                    try:
                        self.socket.sendall(header)
                        self.socket.sendall(data)
                    except OSError as error:
                        raise self._explain("send", error) from None
            return tensors

        self.socket.settimeout(self._limit())
        entry = record("", None, "send", tensors)
        return self.sender.submit(job, entry, stream=_stream_for(tensors))

    def receive(self, tensors: list[torch.Tensor], tag: int) -> dist.Work:
        """Receive a message with this tag. An earlier call that waits for a different tag does not
        delay it."""
        (tensor,) = tensors
        entry = record("", None, "recv", tensors)
        receive = Receive(tensor, tag, LocalWork(_stream_for(tensors)), entry)
        with self._lock:
            message = _take(self.early, tag)
            if not message:
                self.waiting.append(receive)
        if message:
            try:
                self._copy(receive, message)
            except Exception as error:  # the caller sees it in `work`
                self.mesh.abort(error)
            return receive.work

        def job() -> None:
            while receive in self.waiting:
                self._read_message()

        def fail(future: torch.futures.Future[Any]) -> None:
            if receive in self.waiting:
                self.waiting.remove(receive)
                receive.work.finish(future.value())

        self.socket.settimeout(self._limit())
        self.receiver.submit(job, entry).add_done_callback(fail)
        return receive.work

    def take(self, receive: Receive) -> bool:
        """Take a message with the call's tag if one has arrived."""
        with self._lock:
            message = _take(self.early, receive.tag)
        if message:
            self._copy(receive, message)
        return message is not None

    def read(self) -> None:
        """Read a message if one has begun to arrive. If a call of receive waits, its job reads."""
        if self.waiting:
            time.sleep(POLL_SECONDS)
        else:
            self.receiver.submit(self._read_if_ready, record("", None, "recv", [])).wait()

    def _read_if_ready(self) -> None:
        if select.select([self.socket], [], [], 0)[0]:
            self._read_message()

    def _read_message(self) -> None:
        header = bytearray(HEADER.size)
        self._fill(memoryview(header))
        tag, size, name = HEADER.unpack(header)
        dtype = name.rstrip(b"\0").decode()
        with self._lock:
            receive = _take(self.waiting, tag)
        if receive:
            self._deliver(receive, dtype, size, self._fill)
            return
        message = Message(tag, dtype, bytearray(size))
        self._fill(memoryview(message.data))
        with self._lock:
            receive = _take(self.waiting, tag)  # a receive may have been called in the meantime
            if not receive:
                self.early.append(message)
        if receive:
            self._copy(receive, message)

    def _copy(self, receive: Receive, message: Message) -> None:
        def fill(target: memoryview) -> None:
            target[:] = message.data

        self._deliver(receive, message.dtype, len(message.data), fill)

    def _deliver(
        self, receive: Receive, dtype: str, size: int, fill: Callable[[memoryview], None]
    ) -> None:
        work = receive.work
        try:
            with work.run(), flat_outputs([receive.tensor]) as (flat,):
                host = torch.empty_like(flat, device="cpu") if flat.is_cuda else flat
                target = _bytes(host)
                self._check(receive.tag, (dtype, size), (_dtype(flat), target.nbytes))
                fill(target)
                if host is not flat:
                    flat.copy_(host)
        except Exception as error:
            work.finish(error)
            raise
        receive.entry["state"] = "completed"
        work.finish([receive.tensor])

    def _check(self, tag: int, sent: tuple[str, int], wanted: tuple[str, int]) -> None:
        if sent != wanted:
            raise dist.DistBackendError(
                f"Rank {self.peer.name} sent {sent[1]:,} bytes of {sent[0]} with tag {tag}, but rank "
                f"{self.mesh.name} receives {wanted[1]:,} bytes of {wanted[0]}."
            )

    def _fill(self, target: memoryview) -> None:
        while target:
            try:
                count = self.socket.recv_into(target)
            except OSError as error:
                raise self._explain("recv", error) from None
            if not count:
                raise self._explain("recv", None)
            target = target[count:]

    def _explain(self, name: str, error: OSError | None) -> dist.DistBackendError:
        if isinstance(error, TimeoutError):
            return dist.DistBackendError(
                f"Rank {self.mesh.name} waited for rank {self.peer.name} in {name} until the timeout."
            )
        return self.mesh.explain_loss(self.peer, name)


def receive_from_any(
    connections: Mapping[int, Connection],
    thread: OrderedThread,
    tensor: torch.Tensor,
    tag: int,
    seconds: float,
) -> dist.Work:
    """Receive the first message with this tag, from any rank."""
    entry, work = record("", None, "recv", [tensor]), LocalWork(_stream_for([tensor]))
    receive = Receive(tensor, tag, work, entry)
    by_socket = {each.socket: each for each in connections.values()}
    for each in by_socket:
        each.settimeout(seconds)

    def job() -> None:
        end = time.monotonic() + seconds
        while True:
            for rank, connection in connections.items():
                work.source = rank
                if connection.take(receive):
                    return
            left = max(0.0, end - time.monotonic())
            ready = select.select(list(by_socket), [], [], left)[0]
            if not ready:
                problem = "waited in recv for a message from any rank until the timeout"
                name = next(iter(connections.values())).mesh.name
                raise dist.DistBackendError(f"Rank {name} {problem}.")
            for each in ready:
                by_socket[each].read()

    def fail(future: torch.futures.Future[Any]) -> None:
        if isinstance(future.value(), Exception) and not work.is_completed():
            work.finish(future.value())

    thread.submit(job, entry).add_done_callback(fail)
    return work


def _take(waiting: list[Each], tag: int) -> Each | None:
    """Remove and return the first element with this tag."""
    for place, each in enumerate(waiting):
        if each.tag == tag:
            return waiting.pop(place)
    return None


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")[:16]


def _stream_for(tensors: list[torch.Tensor]) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(tensors[0].device) if tensors[0].is_cuda else None


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).cpu().numpy())  # type: ignore[arg-type]
