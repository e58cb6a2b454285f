"""The process group that torch.distributed sees.

A separate thread runs each collective as a job, so DDP's backward pass can continue.
Calls that this thread cannot handle (sparse tensors, unusual operators, GPUs that cannot share
memory) go to gloo, with a warning the first time.
"""

from __future__ import annotations

import atexit
import threading
import warnings
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import partialmethod
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from paralab.collectives.flat import flat_inputs, flat_outputs
from paralab.collectives.gpu_staging import GpuStaging
from paralab.collectives.mesh import Mesh
from paralab.collectives.operations import Collectives
from paralab.collectives.point_to_point import Connection, receive_from_any
from paralab.collectives.recorder import record
from paralab.collectives.reduction import can_reduce
from paralab.collectives.thread import Job, OrderedThread

# torch's type stubs lack half of the methods below.
ProcessGroup: Any = dist.ProcessGroup
Lists = list[list[Tensor]]
Some = Tensor | list[Tensor]
CLOSE_SECONDS = 5.0
_groups: weakref.WeakSet[Any] = weakref.WeakSet()


def register() -> None:
    """Register the `local` backend with torch.distributed."""
    if "LOCAL" not in dist.Backend._plugins:

        def create(opts: Any, _: Any) -> LocalGroup:
            size = opts.group_size
            ranks = opts.global_ranks_in_group or range(size)
            return LocalGroup(opts.store, opts.group_rank, size, opts.timeout, ranks)

        devices = ["cpu", "cuda"]
        dist.Backend.register_backend("local", create, extended_api=True, devices=devices)


class LocalGroup(ProcessGroup):  # type: ignore[misc]
    """A group of ranks on one machine. torch dictates the names and arguments of the methods."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, global_ranks: Sequence[int]
    ) -> None:
        super().__init__(rank, size)
        # torchrun's store outlives the group. A new group of this name must not read old addresses.
        store = PrefixStore(f"{store.add(f'groups of rank {rank}', 1)}", store)
        self._gloo = _make_gloo(store, rank, size, timeout, self)
        self._mesh = Mesh.connect(store, rank, size, timeout.total_seconds(), global_ranks)
        self._run = Collectives(self._mesh)
        self._thread = OrderedThread("collectives", self._mesh.abort)
        self._connections: dict[int, Connection] = {}
        self._connecting = threading.Lock()
        self._any_source: OrderedThread | None = None  # started by the first recv without a source
        self._warned: set[str] = set()
        self._number = 0  # number of the last collective
        self._gpu: GpuStaging | None = None  # set by the first collective on a GPU
        _groups.add(self)
        atexit.register(self._leave_at_exit)

    def getBackendName(self) -> str:
        return "local"

    def shutdown(self, seconds: float = CLOSE_SECONDS) -> None:
        """Stop the threads and leave the group. Give running calls a few seconds, then interrupt
        them."""
        atexit.unregister(self._leave_at_exit)
        for group in list(_groups):
            if group._mesh.failure:  # the reason for leaving this group too
                self._mesh.abort(group._mesh.failure)
        connections = self._connections.values()
        threads = [self._thread, *(each for pair in connections for each in pair.threads)]
        threads += [self._any_source] if self._any_source else []
        if not all([each.close(seconds) for each in threads]):
            self._mesh.interrupt()
            for each in threads:
                each.close(CLOSE_SECONDS)
        if self._gpu and not self._thread.error:  # the GPU stream must not wait for a dead rank
            self._gpu.close()
        self._mesh.close()

    def abort(self) -> None:
        self.shutdown(0)

    def _leave_at_exit(self) -> None:
        # Python kills threads that are still running at exit, which can abort inside torch's code.
        self._gpu = None  # the driver frees the group's memory
        self.shutdown(0)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return self._reduce("allreduce", tensors, None, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return self._reduce("allreduce_coalesced", tensors, None, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return self._reduce("reduce", tensors, opts.rootRank, opts)

    def _reduce(self, name: str, tensors: list[Tensor], root: int | None, opts: Any) -> dist.Work:
        def job() -> list[Tensor]:
            with flat_outputs(tensors) as flat:
                for each in flat:
                    self._run.all_reduce(each, _operator(opts), root, self._limit(opts))
            return tensors

        return self._start(job, tensors, name, tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        def job() -> list[Tensor]:
            with flat_outputs(tensors) as flat:
                for each in flat:
                    self._run.broadcast(each, opts.rootRank, self._limit(opts))
            return tensors

        return self._start(job, tensors, "broadcast", tensors, opts)

    def allgather(self, outputs: Lists, inputs: list[Tensor], opts: Any) -> dist.Work:
        def job() -> Lists:
            for targets, tensor in zip(outputs, inputs, strict=True):
                with flat_inputs([tensor]) as (source,), flat_outputs(targets) as flat:
                    self._run.all_gather(source, flat, self._limit(opts))
            return outputs

        return self._start(job, [*inputs, *chain(*outputs)], "allgather", outputs, inputs, opts)

    def _gather_single(self, name: str, outputs: Some, inputs: Some, opts: Any) -> dist.Work:
        targets, sources = _listed(outputs), _listed(inputs)

        def job() -> list[Tensor]:
            with flat_inputs(sources) as whole, flat_outputs(targets) as flat:
                for source, target in zip(whole, flat, strict=True):
                    self._run.all_gather(source, self._chunks(target), self._limit(opts))
            return targets

        return self._start(job, [*sources, *targets], name, outputs, inputs, opts)

    all_gather_single = partialmethod(_gather_single, "all_gather_single")
    all_gather_single_coalesced = partialmethod(_gather_single, "all_gather_single_coalesced")
    # Their names before torch 2.13.
    _allgather_base = partialmethod(_gather_single, "_allgather_base")
    allgather_into_tensor_coalesced = partialmethod(
        _gather_single, "allgather_into_tensor_coalesced"
    )

    def reduce_scatter(self, outputs: list[Tensor], inputs: Lists, opts: Any) -> dist.Work:
        def job() -> list[Tensor]:
            for output, sources in zip(outputs, inputs, strict=True):
                with flat_inputs(sources) as flat, flat_outputs([output]) as (target,):
                    self._run.reduce_scatter(target, flat, _operator(opts), self._limit(opts))
            return outputs

        tensors = [*outputs, *chain(*inputs)]
        return self._start(job, tensors, "reduce_scatter", outputs, inputs, opts)

    def _scatter_single(self, name: str, outputs: Some, inputs: Some, opts: Any) -> dist.Work:
        targets, sources = _listed(outputs), _listed(inputs)

        def job() -> list[Tensor]:
            with flat_inputs(sources) as whole, flat_outputs(targets) as flat:
                for target, source in zip(flat, whole, strict=True):
                    chunks = self._chunks(source)
                    self._run.reduce_scatter(target, chunks, _operator(opts), self._limit(opts))
            return targets

        return self._start(job, [*sources, *targets], name, outputs, inputs, opts)

    reduce_scatter_single = partialmethod(_scatter_single, "reduce_scatter_single")
    reduce_scatter_single_coalesced = partialmethod(
        _scatter_single, "reduce_scatter_single_coalesced"
    )
    # Their names before torch 2.13.
    _reduce_scatter_base = partialmethod(_scatter_single, "_reduce_scatter_base")
    reduce_scatter_tensor_coalesced = partialmethod(
        _scatter_single, "reduce_scatter_tensor_coalesced"
    )

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, out_sizes: list[int], in_sizes: list[int], opts: Any
    ) -> dist.Work:
        ranks = self.size()
        outputs = list(output.split(list(out_sizes) or [len(output) // ranks] * ranks))
        inputs = list(tensor.split(list(in_sizes) or [len(tensor) // ranks] * ranks))
        return self.alltoall(outputs, inputs, opts)

    alltoall_base = all_to_all_single  # its name before torch 2.13

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> dist.Work:
        def job() -> list[Tensor]:
            with flat_inputs(inputs) as sources, flat_outputs(outputs) as targets:
                self._run.all_to_all(sources, targets, self._limit(opts))
            return outputs

        return self._start(job, [*inputs, *outputs], "alltoall", outputs, inputs, opts)

    def gather(self, outputs: Lists, inputs: list[Tensor], opts: Any) -> dist.Work:
        def job() -> Lists:
            with flat_inputs(inputs) as (source,), flat_outputs([*chain(*outputs)]) as targets:
                self._run.gather(source, targets, opts.rootRank, self._limit(opts))
            return outputs

        return self._start(job, [*inputs, *chain(*outputs)], "gather", outputs, inputs, opts)

    def scatter(self, outputs: list[Tensor], inputs: Lists, opts: Any) -> dist.Work:
        def job() -> list[Tensor]:
            with flat_inputs([*chain(*inputs)]) as sources, flat_outputs(outputs) as (target,):
                self._run.scatter(target, sources, opts.rootRank, self._limit(opts))
            return outputs

        return self._start(job, [*chain(*inputs), *outputs], "scatter", outputs, inputs, opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._submit(lambda: self._run.barrier(self._limit(opts)), "barrier", [])

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> dist.Work:
        return self._connection(rank).send(tensors, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> dist.Work:
        return self._connection(rank).receive(tensors, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        others = [rank for rank in range(self.size()) if rank != self.rank()]
        connections = {rank: self._connection(rank) for rank in others}
        if not self._any_source:
            self._any_source = OrderedThread("receive from any", self._mesh.abort)
        (tensor,) = tensors
        return receive_from_any(connections, self._any_source, tensor, tag, self._limit())

    def _connection(self, rank: int) -> Connection:
        if rank == self.rank():
            raise dist.DistBackendError(f"Rank {rank} cannot send to or receive from itself.")
        with self._connecting:
            if rank not in self._connections:
                self._connections[rank] = Connection(self._mesh, rank, self._limit)
            return self._connections[rank]

    def _chunks(self, flat: Tensor) -> list[Tensor]:
        return list(flat.view(self.size(), flat.numel() // self.size()).unbind())

    def _limit(self, opts: Any = None) -> float:
        """Return a call's timeout in seconds. torch passes a negative number if none is set."""
        given = opts.timeout.total_seconds() if hasattr(opts, "timeout") else 0.0
        if given > 0:
            return given
        # `_set_pg_timeout` changes the timeout of the gloo backend.
        usual: timedelta = self._get_backend(torch.device("cpu")).options._timeout
        return usual.total_seconds()

    def _can_serve(self, tensors: Sequence[Tensor], operator: str | None) -> bool:
        return (
            all(
                each.layout == torch.strided
                and (operator is None or can_reduce(operator, each.dtype))
                for each in tensors
            )
            and len({each.device for each in tensors}) <= 1
            and self._can_reach(tensors[0].device if tensors else torch.device("cpu"))
        )

    def _can_reach(self, device: torch.device) -> bool:
        """Return whether ranks share memory on this device. The first collective on a GPU sets up
        the shared memory with the other ranks."""
        if device.type != "cuda":
            return device.type == "cpu"
        if not self._gpu:

            def exchange(mine: bytes) -> list[bytes]:
                return self._run.exchange_bytes("GPU setup", mine, self._limit())

            def set_up() -> None:
                self._gpu = GpuStaging(self.rank(), self.size(), device, exchange)
                self._run.staging[device.type] = self._gpu

            self._submit(set_up, "GPU setup", []).wait()
        assert self._gpu
        return not self._gpu.problem and device == self._gpu.stream.device

    def _start(self, job: Job, tensors: Sequence[Tensor], name: str, *arguments: Any) -> dist.Work:
        """Run a job in the collectives thread, or call gloo's method `name`."""
        opts = arguments[-1]
        if not self._can_serve(tensors, _operator(opts) if hasattr(opts, "reduceOp") else None):
            return self._pass_on(name, tensors, *arguments)
        return self._submit(job, name, tensors, caller_waits=not getattr(opts, "asyncOp", True))

    def _submit(
        self, job: Job, name: str, tensors: Sequence[Tensor], caller_waits: bool = False
    ) -> dist.Work:
        self._number += 1
        entry = record(self.group_name, self._number, name, tensors)
        if not any(each.is_cuda for each in tensors):
            return self._thread.submit(job, entry, caller_waits)

        assert self._gpu
        for each in tensors:
            each.record_stream(self._gpu.stream)
        return self._thread.submit(job, entry, caller_waits, self._gpu.stream)

    def _pass_on(self, name: str, tensors: Sequence[Tensor], *arguments: Any) -> dist.Work:
        what = f"{name} of {tensors[0].dtype} on {tensors[0].device.type}"
        if what not in self._warned:
            self._warned.add(what)
            reason = f" ({self._gpu.problem})" if self._gpu and self._gpu.problem else ""
            warnings.warn(
                f"Backend 'local' does not support {what}{reason}, so gloo runs it.", stacklevel=4
            )
        work: dist.Work = getattr(self._gloo, name)(*arguments)
        return work


def _listed(tensors: Some) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _operator(opts: Any) -> str:
    return str(opts.reduceOp.op.name)


def _make_gloo(store: Any, rank: int, size: int, timeout: timedelta, group: LocalGroup) -> Any:
    """Return a plain gloo group. `group` gets the same backend, for calls that torch makes from C++
    without using our methods."""
    backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    plain = ProcessGroup(store, rank, size)
    kind = ProcessGroup.BackendType.GLOO
    for each in (plain, group):
        for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
            each._register_backend(torch.device(device), kind, backend)
        each._set_default_backend(kind)
    return plain
