"""Synchronize the ranks in a group: bells signal "ready", and sockets show which rank is gone.

The data itself goes through shared memory (staging.py). A waiting rank sleeps. If a rank dies, the
kernel closes its sockets, so the others know immediately which rank it was. On Linux, neither
bells nor addresses have a name in a file system, so nothing remains, even after kill -9.

A bell is an eventfd. Writing to a socket would also work. But Linux would move the reader to the
writer's core, where the two ranks would take turns.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import struct
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

HELLO = struct.Struct("!16sIc")  # the listening rank's secret, the caller's rank, the channel
CONTROL, DATA = b"c", b"d"
LEAVE = b"\0"  # a rank writes this before a normal exit; any other message is an error
ONE = (1).to_bytes(8, sys.byteorder)


_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close a forked child's copies of the sockets (a DataLoader worker has them). Otherwise, the
    other ranks would not notice that this rank died while its child is alive."""
    for mesh in list(_meshes):
        mesh.close_files()


os.register_at_fork(after_in_child=_close_in_child)


class Peer:
    """Another rank. `gone` says how the connection closed, and `abort` why the rank gave up."""

    def __init__(self, name: int, control: socket.socket, data: socket.socket) -> None:
        self.name, self.control, self.data = name, control, data
        self.bell = self.their_bell = -1  # files: the peer rings our bell, and we ring the peer's
        self.gone = self.abort = ""
        self._lock = threading.Lock()

    def exchange_file(self, file: int) -> int:
        """Send an open file to the peer, and return the file that it sends."""
        with suppress(ConnectionError):  # its earlier messages may give the reason
            socket.send_fds(self.control, [b"f"], [file])
        with _name_the_dead(self.name):
            words, received, _, _ = socket.recv_fds(self.control, 1, 1)
            if received:
                return int(received[0])
            if not words:
                raise ConnectionResetError
        self.listen()
        raise dist.DistBackendError(words.decode() + self.abort)

    def listen(self) -> None:
        """Read the reason, if any, that the peer sent before it left."""
        with self._lock:
            try:
                words = self.control.recv(65536, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                words = b""
            reason = words.removesuffix(LEAVE)  # LEAVE may come right after a reason
            if reason:
                self.abort = reason.decode(errors="replace")
            if not words:
                self.gone = self.gone or "died"
            elif reason != words:
                self.gone = "left the group"


class Mesh:
    """Connections from this rank to every other rank in the group. `names` has the global rank of
    each rank, for messages."""

    def __init__(self, rank: int, size: int, peers: dict[int, Peer], names: Sequence[int]) -> None:
        self.rank, self.size, self.peers, self.names = rank, size, peers, names
        self.failure: Exception | None = None
        bells = {rank: _make_bell() for rank in peers}
        theirs = self.exchange_files({rank: writing for rank, (_, writing) in bells.items()})
        for rank, (reading, writing) in bells.items():
            peers[rank].bell, peers[rank].their_bell = reading, theirs[rank]
            if writing != reading:
                os.close(writing)
        _meshes.add(self)

    @classmethod
    def connect(
        cls, store: Any, rank: int, size: int, seconds: float, names: Sequence[int] = ()
    ) -> Mesh:
        """Connect to all other ranks. Each rank connects to the lower ranks and accepts connections
        from the higher ones."""
        names = names or range(size)
        secret = secrets.token_bytes(16)
        listener, address = _listen()
        found: dict[bytes, dict[int, socket.socket]] = {CONTROL: {}, DATA: {}}
        with ExitStack() as opened:  # closed if an error follows
            try:
                listener.settimeout(seconds)
                store.set(f"local/{rank}", json.dumps([_machine(), address, secret.hex()]))
                for other in range(rank):
                    machine, where, key = json.loads(store.get(f"local/{other}"))
                    if machine != _machine():
                        raise dist.DistBackendError(
                            f"Backend 'local' needs all ranks on one machine, but ranks {names[other]} "
                            f"and {names[rank]} are on different machines. Use gloo or nccl."
                        )
                    for channel, connections in found.items():
                        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                        connections[other] = opened.enter_context(connection)
                        with _name_the_dead(names[other]):
                            connection.connect(where)
                            connection.sendall(HELLO.pack(bytes.fromhex(key), rank, channel))

                while any(len(connections) < size - 1 for connections in found.values()):
                    connection = opened.enter_context(listener.accept()[0])
                    hello = connection.recv(HELLO.size, socket.MSG_WAITALL)
                    if len(hello) < HELLO.size or not secrets.compare_digest(hello[:16], secret):
                        connection.close()  # not one of our ranks
                        continue
                    _, other, channel = HELLO.unpack(hello)
                    found[channel][other] = connection
            except TimeoutError:
                missing = [names[r] for r in range(size) if r not in (rank, *found[DATA])]
                raise dist.DistBackendError(
                    f"Rank {names[rank]} waited {seconds:g} s, but these ranks did not connect: "
                    f"{missing}."
                ) from None
            finally:
                listener.close()
                if not address.startswith("\0"):
                    Path(address).unlink(missing_ok=True)

            control, data = found[CONTROL], found[DATA]
            peers = {each: Peer(names[each], control[each], data[each]) for each in sorted(data)}
            mesh = cls(rank, size, peers, names)
            opened.pop_all()
            return mesh

    def exchange_files(self, files: Mapping[int, int]) -> dict[int, int]:
        """Send an open file to each other rank, and return the files that they send."""
        try:
            return {rank: peer.exchange_file(files[rank]) for rank, peer in self.peers.items()}
        except dist.DistBackendError as error:
            self.abort(error)
            raise

    @property
    def name(self) -> int:
        return self.names[self.rank]

    def meet(self, call: object, deadline: float) -> None:
        """Ring every other rank's bell, and sleep until every rank has rung ours."""
        for peer in self.peers.values():
            os.write(peer.their_bell, ONE)

        bells = {peer.bell: peer for peer in self.peers.values()}
        doors = {peer.control.fileno(): peer for peer in self.peers.values() if not peer.gone}
        poll = select.poll()
        for file in (*bells, *doors):
            poll.register(file, select.POLLIN)
        while bells:
            left = deadline - time.monotonic()
            ready = [file for file, _ in poll.poll(max(left, 0) * 1000)]
            for file in ready:
                if file in bells:
                    os.read(file, 8)
                    poll.unregister(file)
                    del bells[file]
            for file in ready:
                if file in doors:
                    doors[file].listen()
                    poll.unregister(file)
            # A rank that has rung may exit, because we no longer need it.
            for peer in bells.values():
                if (peer.gone or peer.abort) and not _can_read(peer.bell):
                    raise self.explain_loss(peer, call)
            if bells and left <= 0:
                late = ", ".join(str(peer.name) for peer in bells.values())
                raise dist.DistBackendError(
                    f"Rank {self.name} waited for rank {late} in {call} until the timeout."
                )

    def explain_loss(self, lost: Peer, call: object) -> dist.DistBackendError:
        """Return an error that names the rank to blame if a rank does not answer. A rank that gives
        up because of another rank names that rank before it exits."""
        for peer in self.peers.values():
            peer.listen()
        gone = [each for each in self.peers.values() if each.gone or each.abort or each is lost]
        culprits = [each for each in gone if not each.abort]
        if not culprits:
            return dist.DistBackendError(gone[0].abort)
        how = culprits[0].gone or "died"
        return dist.DistBackendError(
            f"Rank {culprits[0].name} {how} while rank {self.name} was in {call}."
        )

    def say(self, last_words: bytes) -> None:
        for peer in self.peers.values():
            with suppress(OSError):  # the rank may already be gone
                peer.control.sendall(last_words)

    def abort(self, error: Exception) -> None:
        """Tell every rank why this rank gives up, so that they blame the right rank. This also
        wakes up ranks that are waiting for data from this rank. Only the first error counts."""
        if self.failure:
            return
        self.failure = error
        named = isinstance(error, dist.DistBackendError)
        self.say((str(error) if named else f"Rank {self.name}: {error}").encode())
        for peer in self.peers.values():
            with suppress(OSError):
                peer.data.shutdown(socket.SHUT_WR)

    def interrupt(self) -> None:
        """Interrupt all of this rank's waits by closing its connections, as if the other ranks were
        gone."""
        self.say(LEAVE)
        for peer in self.peers.values():
            for connection in (peer.control, peer.data):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Leave the group. Later calls do nothing."""
        self.say(LEAVE)
        self.close_files()

    def close_files(self) -> None:
        while self.peers:
            _, peer = self.peers.popitem()
            peer.control.close()
            peer.data.close()
            os.close(peer.bell)
            os.close(peer.their_bell)


@contextmanager
def _name_the_dead(rank: int) -> Iterator[None]:
    """Name the rank if the connection to it breaks in this context."""
    try:
        yield
    except ConnectionError:
        raise dist.DistBackendError(
            f"Rank {rank} died while the process group was being set up."
        ) from None


def _make_bell() -> tuple[int, int]:
    """Return the files to read from and to write to."""
    if hasattr(os, "eventfd"):
        file = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        return file, file
    return os.pipe()


def _can_read(file: int) -> bool:
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(0))


def _listen() -> tuple[socket.socket, str]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = f"paralab-{uuid.uuid4().hex}"
    address = f"\0{name}" if sys.platform == "linux" else str(Path(tempfile.gettempdir()) / name)
    listener.bind(address)
    listener.listen(512)
    return listener, address


def _machine() -> str:
    """Name this machine. Abstract addresses work only within one network namespace."""
    if sys.platform != "linux":
        return str(uuid.getnode())
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
