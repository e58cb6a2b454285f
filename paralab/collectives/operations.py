"""The collectives, on flat tensors, through the staging slots.

Large data goes through a slot in rounds. In each interval, a rank works on up to three rounds and
then synchronizes with the others. No rank writes to memory that another rank uses in the same
interval. All-reduce of three rounds:

    interval       0        1        2        3        4
    stage       round 0  round 1  round 2                    copy my data into my slot
    reduce               round 0  round 1  round 2           combine my slice of all slots
    copy out                      round 0  round 1  round 2  fetch every slice

A slot is reused three rounds later, when all ranks have read it. Two ranks need no slices: each
reduces everything, and the ranks synchronize once per round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paralab.collectives.call import Call, check_calls
from paralab.collectives.mesh import Mesh
from paralab.collectives.reduction import reduce_in_order
from paralab.collectives.shared_memory import Notes
from paralab.collectives.staging import Staging

SAME_SIZE = ("all_reduce", "reduce", "broadcast", "gather", "scatter")
Stage = Callable[[int], None]  # a function of the round number


class Collectives:
    """Run a group's collectives, one at a time."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.rank, self.size = mesh, mesh.rank, mesh.size
        self.notes = Notes(mesh)
        self.staging: dict[str, Staging] = {"cpu": Staging(mesh)}  # device type -> staging slots
        self.calls = 0

    def all_reduce(self, tensor: Tensor, operator: str, root: int | None, seconds: float) -> None:
        """Reduce on all ranks, or only on `root`."""
        staging = self.staging[tensor.device.type]
        size = tensor.numel() * tensor.element_size()
        staging.fit(size)
        per_round = staging.slot_bytes // tensor.element_size()
        rounds = max(1, -(-tensor.numel() // per_round))
        call = self._call(
            "all_reduce" if root is None else "reduce", tensor, operator, root, rounds
        )
        receives = root in (None, self.rank)

        def part(number: int) -> Tensor:
            return tensor[number * per_round : (number + 1) * per_round]

        def slot(rank: int, number: int) -> Tensor:
            return staging.slot(rank, number, tensor.dtype)

        def stage_all(number: int) -> None:
            mine = part(number)
            slot(self.rank, number)[: len(mine)].copy_(mine)

        def reduce_all(number: int) -> None:
            if receives:
                mine = part(number)
                values = [slot(rank, number)[: len(mine)] for rank in range(self.size)]
                reduce_in_order(values, operator, mine)

        def stage(number: int) -> None:
            mine = part(number)
            for rank, where in enumerate(split(mine.numel(), self.size)):
                if rank != self.rank:
                    slot(self.rank, number)[where].copy_(mine[where])

        def reduce(number: int) -> None:
            mine = part(number)
            where = split(mine.numel(), self.size)[self.rank]
            values = [
                mine[where] if rank == self.rank else slot(rank, number)[where]
                for rank in range(self.size)
            ]
            reduce_in_order(values, operator, slot(self.rank, number)[where])

        def copy_out(number: int) -> None:
            if receives:
                mine = part(number)
                for rank, where in enumerate(split(mine.numel(), self.size)):
                    mine[where].copy_(slot(rank, number)[where])

        once = staging.meets_once(size)
        stages = [stage_all, reduce_all] if once else [stage, reduce, copy_out]
        self._work(call, staging, stages, seconds)

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], operator: str, seconds: float
    ) -> None:
        """Reduce `inputs[r]` of all ranks into the output of rank r."""
        staging = self.staging[output.device.type]
        per_round = staging.slot_bytes // self.size // output.element_size()
        rounds = max(1, -(-max(each.numel() for each in inputs) // per_round))
        sends = tuple(each.numel() * each.element_size() for each in inputs)
        call = self._call("reduce_scatter", output, operator, None, rounds, sends)

        def slot(rank: int, number: int, destination: int) -> Tensor:
            first = destination * per_round
            return staging.slot(rank, number, output.dtype)[first : first + per_round]

        def stage(number: int) -> None:
            for rank, tensor in enumerate(inputs):
                piece = tensor[number * per_round : (number + 1) * per_round]
                if rank != self.rank:
                    slot(self.rank, number, rank)[: piece.numel()].copy_(piece)

        def reduce(number: int) -> None:
            where = slice(number * per_round, (number + 1) * per_round)
            out, own = output[where], inputs[self.rank][where]
            if own.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
                own = own.clone()  # `out` is written before all values are read
            values = [
                own if rank == self.rank else slot(rank, number, self.rank)[: len(out)]
                for rank in range(self.size)
            ]
            reduce_in_order(values, operator, out)

        expects = (output.numel() * output.element_size(),) * self.size
        self._work(call, staging, [stage, reduce], seconds, expects)

    def broadcast(self, tensor: Tensor, root: int, seconds: float) -> None:
        source = tensor if self.rank == root else None
        targets = [tensor if rank == root != self.rank else None for rank in range(self.size)]
        self._send_same("broadcast", source, targets, tensor, root, seconds)

    def all_gather(self, tensor: Tensor, outputs: Sequence[Tensor], seconds: float) -> None:
        self._send_same("all_gather", tensor, outputs, tensor, None, seconds)

    def gather(self, tensor: Tensor, outputs: Sequence[Tensor], root: int, seconds: float) -> None:
        self._send_same("gather", tensor, outputs, tensor, root, seconds)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int, seconds: float) -> None:
        outputs = [output if rank == root else None for rank in range(self.size)]
        self._send_pieces("scatter", inputs, outputs, output, root, seconds)

    def all_to_all(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], seconds: float
    ) -> None:
        self._send_pieces("all_to_all", inputs, outputs, inputs[0], None, seconds)

    def exchange_bytes(self, name: str, mine: bytes, seconds: float) -> list[bytes]:
        """Return the bytes of every rank. All ranks pass the same number of bytes."""
        source = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        outputs = [torch.empty_like(source) for _ in range(self.size)]
        self._send_same(name, source, outputs, source, None, seconds)
        return [each.numpy().tobytes() for each in outputs]

    def barrier(self, seconds: float) -> None:
        self._work(self._call("barrier"), self.staging["cpu"], [lambda number: None] * 2, seconds)

    def _send_same(
        self,
        name: str,
        source: Tensor | None,
        outputs: Sequence[Tensor | None],
        like: Tensor,
        root: int | None,
        seconds: float,
    ) -> None:
        """Send `source` to all ranks, and receive `outputs[r]` from rank r."""
        sources = [source] * self.size
        self._exchange(name, sources, outputs, like, root, seconds, same=True)

    def _send_pieces(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor | None],
        like: Tensor,
        root: int | None,
        seconds: float,
    ) -> None:
        """Send `inputs[r]` to rank r, and receive `outputs[r]` from it."""
        self._exchange(name, inputs, outputs, like, root, seconds, same=False)

    def _exchange(
        self,
        name: str,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor | None],
        like: Tensor,
        root: int | None,
        seconds: float,
        same: bool,
    ) -> None:
        """Move bytes. Each destination has its own part of the slot, unless all receive the same
        data."""
        wrong = {each.dtype for each in (*inputs, *outputs) if each is not None} - {like.dtype}
        if wrong:
            raise dist.DistBackendError(f"{name} of {like.dtype} got a tensor of {wrong.pop()}.")
        staging = self.staging[like.device.type]
        per_round = staging.slot_bytes // (1 if same else self.size)
        sources, targets = _as_bytes(inputs), _as_bytes(outputs)
        sends = tuple(0 if each is None else each.numel() for each in sources)
        expects = tuple(0 if each is None else each.numel() for each in targets)
        rounds = max(1, -(-max((0, *sends, *expects)) // per_round))
        call = self._call(name, like, "", root, rounds, sends)

        def piece(tensor: Tensor, number: int) -> Tensor:
            return tensor[number * per_round : (number + 1) * per_round]

        def slot(rank: int, number: int, destination: int, size: int) -> Tensor:
            first = 0 if same else destination * per_round
            return staging.slot(rank, number, torch.uint8)[first : first + size]

        def stage(number: int) -> None:
            for rank, tensor in enumerate(sources):
                if tensor is not None and (same or rank != self.rank):
                    mine = piece(tensor, number)
                    slot(self.rank, number, rank, mine.numel()).copy_(mine)
                    if same:
                        break

        def fetch(number: int) -> None:
            for rank, tensor in enumerate(targets):
                if tensor is None:
                    continue
                out, own = piece(tensor, number), sources[rank] if rank < len(sources) else None
                if rank != self.rank:
                    out.copy_(slot(rank, number, self.rank, out.numel()))
                elif own is not None:
                    out.copy_(piece(own, number))

        self._work(call, staging, [stage, fetch], seconds, expects)

    def _call(
        self,
        name: str,
        tensor: Tensor | None = None,
        operator: str = "",
        root: int | None = None,
        rounds: int = 1,
        sends: tuple[int, ...] = (),
    ) -> Call:
        self.calls += 1
        if tensor is None:
            return Call(self.calls, name)
        dtype = str(tensor.dtype).removeprefix("torch.")
        elements = tensor.numel() if name in SAME_SIZE else None
        shape = tuple(tensor.shape)
        device = tensor.device.type
        root = None if root is None else self.mesh.names[root]
        return Call(self.calls, name, dtype, elements, shape, operator, root, sends, rounds, device)

    def _work(
        self,
        call: Call,
        staging: Staging,
        stages: Sequence[Stage],
        seconds: float,
        expects: tuple[int, ...] = (),
    ) -> None:
        """Run every stage on every round, each stage one interval after the previous stage."""
        deadline = time.monotonic() + seconds
        note, rounds, interval = call.encode(), call.rounds, 0
        self.notes.write(call.number, note)
        while True:
            for delay, stage in enumerate(stages):
                # A rank with less data has nothing to do in the last rounds, but still synchronizes
                # with the others.
                if 0 <= interval - delay < call.rounds:
                    stage(interval - delay)
            interval += 1
            if interval == rounds + len(stages) - 1:
                break
            staging.meet(lambda: self.mesh.meet(call, deadline))
            if interval == 1:
                notes = {rank: self.notes.read(call.number, rank) for rank in self.mesh.peers}
                others = {
                    rank: call if each == note else Call.decode(each)
                    for rank, each in notes.items()
                }
                check_calls(self.rank, call, others, expects, self.mesh.names)
                rounds = max(each.rounds for each in (call, *others.values()))
        staging.turn += rounds


def split(size: int, parts: int) -> list[slice]:
    """Split a range like torch.chunk: 10 over 4 -> 3 3 3 1."""
    step = -(-size // parts)
    return [slice(min(size, part * step), min(size, (part + 1) * step)) for part in range(parts)]


def _as_bytes(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if each is None else each.view(torch.uint8) for each in tensors]
