"""Send and receive between two ranks, through a dedicated socket.

Each direction has a thread, so two ranks can send to each other at the same time. CUDA tensors go
through host memory.
"""

from __future__ import annotations

import struct

import torch
import torch.distributed as dist

from paralab.collectives.flat import flat_inputs, flat_outputs
from paralab.collectives.mesh import Mesh
from paralab.collectives.recorder import record
from paralab.collectives.thread import OrderedThread

HEADER = struct.Struct("!qq16s")  # tag, number of bytes, dtype


class Connection:
    """Messages to and from one rank. A message that arrives before its receive call waits in
    `early`."""

    def __init__(self, mesh: Mesh, rank: int, seconds: float) -> None:
        self.mesh, self.rank, self.socket = mesh, rank, mesh.peers[rank].data
        self.socket.settimeout(seconds)
        self.early: list[tuple[int, str, bytearray]] = []
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

        entry = record("", None, "send", tensors)
        return self.sender.submit(job, entry, stream=_stream_for(tensors))

    def receive(self, tensors: list[torch.Tensor], tag: int) -> dist.Work:
        def job() -> list[torch.Tensor]:
            with flat_outputs(tensors) as flat:
                for each in flat:
                    host = torch.empty_like(each, device="cpu") if each.is_cuda else each
                    self._receive(host, tag)
                    if host is not each:
                        each.copy_(host)
            return tensors

        entry = record("", None, "recv", tensors)
        return self.receiver.submit(job, entry, stream=_stream_for(tensors))

    def _receive(self, tensor: torch.Tensor, tag: int) -> None:
        target = _bytes(tensor)
        wanted = (_dtype(tensor), target.nbytes)
        for place, (other, dtype, data) in enumerate(self.early):
            if other == tag:
                self._check(tag, (dtype, len(data)), wanted)
                target[:] = data
                del self.early[place]
                return
        while True:
            header = bytearray(HEADER.size)
            self._fill(memoryview(header))
            other, size, name = HEADER.unpack(header)
            dtype = name.rstrip(b"\0").decode()
            if other == tag:
                self._check(tag, (dtype, size), wanted)
                self._fill(target)
                return
            data = bytearray(size)
            self._fill(memoryview(data))
            self.early.append((other, dtype, data))

    def _check(self, tag: int, sent: tuple[str, int], wanted: tuple[str, int]) -> None:
        if sent != wanted:
            raise dist.DistBackendError(
                f"Rank {self.rank} sent {sent[1]:,} bytes of {sent[0]} with tag {tag}, but rank "
                f"{self.mesh.rank} receives {wanted[1]:,} bytes of {wanted[0]}."
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
                f"Rank {self.mesh.rank} waited for rank {self.rank} in {name} until the timeout."
            )
        return self.mesh.explain_loss(self.rank, name)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")[:16]


def _stream_for(tensors: list[torch.Tensor]) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(tensors[0].device) if tensors[0].is_cuda else None


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).cpu().numpy()).cast("B")  # type: ignore[arg-type]
