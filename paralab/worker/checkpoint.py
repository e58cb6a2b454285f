"""Saving and restoring a training: built on torch.distributed.checkpoint (DCP), with what it lacks.

Everything is a tensor under a name that does not depend on the topology, so that any strategy can
read what any other one wrote:

    model.NAME            a parameter; replicated ones are written by the first replica, sharded ones by every rank
    buffer.NAME           a buffer, of the first replica
    optimizer.NAME.KEY    the optimiser's state of the parameter NAME
    plain.N               what else the optimiser keeps of the parameters that rank N holds (pickled)
    shared                the optimiser's settings, scheduler and scaler (pickled)
    rank.N                rank N's random streams, and its buffers where they are its own (pickled)

A save copies the state aside (that is all the training waits for), and a side thread writes it. The
manifest that makes it a checkpoint comes last. What goes wrong in the thread is raised at the next
step.

A checkpoint may come from somebody else. Reading one never runs what it holds: `SafeReader` for the
metadata, and `torch.load(weights_only=True)` for every tensor and for what is pickled inside one.
"""

from __future__ import annotations

import io
import pickle
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._state_dict_utils import (
    _copy_state_dict,
    _create_cpu_state_dict,
)  # what DCP's own stagers use
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from paralab.errors import ParalabError
from paralab.plan.plan import Plan
from paralab.record.checkpoints import TOPOLOGY, require_room, rotate, step_folder, write_manifest
from paralab.record.metadata import read_metadata
from paralab.worker.inject import planted
from paralab.worker.probes import Probe
from paralab.worker.rank_context import RankContext
from paralab.worker.safe_reader import SafeReader
from paralab.worker.shards import local

State = dict[str, torch.Tensor]
PICKLED = ("shared", "plain.", "rank.")
WRITERS = 4  # threads that write a checkpoint while a GPU trains


class Parts:
    """What of a training is saved, as this rank holds it."""

    def __init__(
        self, job: RankContext, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any
    ) -> None:
        self.plan, self.rank, self.streams, self.model = job.plan, job.rank.rank, job.streams, model
        self.optimizer, self.scheduler, self.scaler = optimizer, scheduler, job.precision.scaler
        # A parameter on the meta device belongs to another rank's stage.
        self.parameters = {name: p for name, p in model.named_parameters() if not p.is_meta}
        self.first_replica = job.rank.replica == 0

    @property
    def buffers(self) -> State:
        """Asked for each time: a forward may put a new tensor in the place of a buffer."""
        return {name: buffer for name, buffer in self.model.named_buffers() if not buffer.is_meta}

    def state(self) -> State:
        """Where it lies, not yet copied. Every plain tensor is in the state of one rank only: then
        no rank's copy is chosen by chance (buffers differ between replicas)."""
        state = {f"model.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, values in self._optimizer_values():
            state |= {
                f"optimizer.{name}.{key}": value
                for key, value in values.items()
                if isinstance(value, torch.Tensor)
            }
        if self.first_replica:
            state |= {f"buffer.{name}": buffer for name, buffer in self.buffers.items()}
        state = {
            name: value
            for name, value in state.items()
            if self.first_replica or isinstance(value, DTensor)
        }
        if self.first_replica:
            state[f"plain.{self.rank}"] = _pickled(self._plain())
        if self.rank == 0:
            state["shared"] = _pickled(self._shared())
        return state | {f"rank.{self.rank}": _pickled(self._own())}

    def restore(self, folder: Path, same_topology: bool) -> None:
        """Put back what the checkpoint holds. At another topology the random streams begin anew,
        from seed and step."""
        try:
            self._restore(folder, same_topology)
        except (
            Exception,
            CheckpointException,
        ) as error:  # DCP's is a BaseException, and its text a traceback of every rank
            failures = error.failures if isinstance(error, CheckpointException) else {}
            cause = next((each for each, _ in failures.values()), error)
            why = f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"
            if isinstance(
                cause, pickle.UnpicklingError
            ):  # torch would advise to load it without a check
                why = "it is damaged, or it holds more than tensors and plain values"
            raise ParalabError(f"The checkpoint {folder} cannot be loaded: {why}") from error

    def _restore(self, folder: Path, same_topology: bool) -> None:
        reader = SafeReader(folder)
        known: dict[str, Any] = reader.read_metadata().state_dict_metadata
        state: State = {
            f"model.{name}": parameter.detach() for name, parameter in self.parameters.items()
        }
        state |= {f"buffer.{name}": buffer for name, buffer in self.buffers.items()}
        for name, parameter in self.parameters.items():
            prefix = f"optimizer.{name}."
            for key in [
                key for key in known if key.startswith(prefix) and "." not in key[len(prefix) :]
            ]:
                shaped = known[key].size == parameter.shape
                state[key] = (
                    torch.empty_like(parameter, requires_grad=False)
                    if shaped
                    else _empty(known[key])
                )
        state |= {
            key: _empty(known[key]) for key in known if key == "shared" or key.startswith("plain.")
        }
        if same_topology:
            state[f"rank.{self.rank}"] = _empty(known[f"rank.{self.rank}"])
        group = _group(self.plan)
        load(state, storage_reader=reader, process_group=group, no_dist=group is None)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state[f"model.{name}"])
            for name, buffer in self.buffers.items():
                buffer.copy_(state[f"buffer.{name}"])
        self._restore_shared(_unpickled(state["shared"]), state)
        if same_topology:
            self._restore_own(_unpickled(state[f"rank.{self.rank}"]))

    def about(self, step: int, samples: int, epoch: int) -> dict[str, Any]:
        """What the manifest says besides the files."""
        plan = self.plan
        topology = {name: getattr(plan, name) for name in TOPOLOGY}  # as JSON gives it back
        done = {"step": step, "samples_seen": samples, "epoch": epoch}
        return {**done, **plan.training, "topology": topology, "torch": torch.__version__}

    def _optimizer_values(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, parameter in self.parameters.items():
            if parameter in self.optimizer.state:
                yield name, self.optimizer.state[parameter]

    def _plain(self) -> dict[str, dict[str, Any]]:
        kept = {
            name: {k: v for k, v in values.items() if not isinstance(v, torch.Tensor)}
            for name, values in self._optimizer_values()
        }
        return {name: values for name, values in kept.items() if values}

    def _shared(self) -> dict[str, Any]:
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        return {
            "groups": groups,
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "scaler": self.scaler.state_dict(),
        }

    def _restore_shared(self, shared: dict[str, Any], state: State) -> None:
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        plain = {
            name: kept
            for key in state
            if key.startswith("plain.")
            for name, kept in _unpickled(state[key]).items()
        }
        values: dict[int, dict[str, Any]] = {}
        groups = []
        number = 0
        for group, saved in zip(self.optimizer.param_groups, shared["groups"], strict=True):
            groups.append({**saved, "params": list(range(number, number + len(group["params"])))})
            for parameter in group["params"]:
                name = names.get(
                    id(parameter), ""
                )  # a stage without parameters gives its optimizer one of its own
                prefix = f"optimizer.{name}."
                tensors = {
                    key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)
                }
                if found := tensors | plain.get(name, {}):
                    values[number] = found
                number += 1
        self.optimizer.load_state_dict({"state": values, "param_groups": groups})
        if self.scheduler:
            self.scheduler.load_state_dict(shared["scheduler"])
        if shared["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(shared["scaler"])

    def _own(self) -> dict[str, Any]:
        numpy = sys.modules.get("numpy")
        numpy_state = list(numpy.random.get_state()) if numpy else []
        return {
            "torch": torch.get_rng_state(),
            "streams": self.streams.states if self.streams else [],
            "cuda": [torch.cuda.get_rng_state(device) for device in self.gpus],
            "python": random.getstate(),
            "numpy": [
                value.tolist() if hasattr(value, "tolist") else value for value in numpy_state
            ],
            "buffers": {}
            if self.first_replica
            else {name: buffer.cpu() for name, buffer in self.buffers.items()},
        }

    def _restore_own(self, own: dict[str, Any]) -> None:
        torch.set_rng_state(own["torch"])
        if self.streams and own.get("streams"):  # a checkpoint of an earlier paralab has none
            self.streams.states = own["streams"]
        for device, state in zip(self.gpus, own["cuda"], strict=False):
            torch.cuda.set_rng_state(state, device)
        random.setstate(own["python"])
        numpy = sys.modules.get("numpy")
        if numpy and own["numpy"]:
            numpy.random.set_state(tuple(own["numpy"]))
        with torch.no_grad():
            for name, buffer in own["buffers"].items():
                self.buffers[name].copy_(buffer)

    @property
    def gpus(self) -> list[str]:
        return [
            device.torch
            for device in self.plan.ranks[self.rank].devices
            if device.torch.startswith("cuda")
        ]


class Saver:
    """Saves while the training goes on; one save at a time."""

    def __init__(self, parts: Parts, directory: Path, keep: int, probe: Probe) -> None:
        self.parts, self.directory, self.keep, self.probe = parts, directory, keep, probe
        self._staged: State = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._saved: dict[str, Any] | None = None

    def prepare(self) -> None:
        """Take the memory for the copies now, in a step that no timing counts: pinning a gigabyte
        takes half a second. What could not be read back is found out now, too."""
        state = self.parts.state()
        for name, tensor in state.items():
            if name.startswith(PICKLED):
                try:
                    _unpickled(tensor)
                except Exception as error:
                    raise ParalabError(
                        f"A checkpoint of this training could not be loaded: {error}"
                    ) from error
        self._make_room(state)

    def _require_finite(self, step: int) -> None:
        """A step can have a finite loss and leave NaN: every training that went on from there would
        be lost."""
        for name, tensor in self._staged.items():
            held = local(tensor)
            if (
                name.startswith("model.")
                and held.is_floating_point()
                and not bool(torch.isfinite(held).all())
            ):
                raise ParalabError(
                    f"{name.removeprefix('model.')} is not finite after {step} steps.",
                    fix="a lower learning rate",
                )

    def _make_room(self, state: State) -> None:
        changed = {
            n: t
            for n, t in state.items()
            if n not in self._staged or self._staged[n].shape != t.shape
        }
        new = _create_cpu_state_dict(changed, pin_memory=self.parts.plan.device == "cuda")
        self._staged = {name: new[name] if name in new else self._staged[name] for name in state}

    def begin(self, step: int, samples: int, epoch: int) -> None:
        """Copy the state aside and let the thread write it. `step`: how many are done."""
        self.finish()
        start = self.probe.clock.now()
        state = self.parts.state()
        if self.parts.rank == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            parts = (
                self.parts.plan.stages if self.parts.plan.schedule else 1
            )  # other ranks hold about as much
            whole = sum(tensor.nbytes for tensor in state.values()) * parts
            require_room(self.directory, whole)
        self._make_room(state)
        _copy_state_dict(state, self._staged, non_blocking=True)
        copied = []
        for device in (
            self.parts.gpus
        ):  # the next step's kernels come behind the copies, so nothing has to wait
            copied.append(torch.cuda.Event())
            copied[-1].record(torch.cuda.current_stream(device))
        about = self.parts.about(step, samples, epoch)
        blocked = self.probe.clock.now() - start
        self._thread = threading.Thread(
            target=self._write, args=(step, about, copied, start, blocked), name="paralab-save"
        )
        self._thread.start()

    def poll(self) -> None:
        """Raise what went wrong in the thread; note a save that is done."""
        if self._thread and not self._thread.is_alive():
            self.finish()

    def finish(self) -> None:
        """Wait for the save that is under way."""
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._error:
            error, self._error = self._error, None
            raise error
        if self._saved:
            self.probe.emit("save", **self._saved)
            self._saved = None

    def _write(
        self,
        step: int,
        about: dict[str, Any],
        copied: list[torch.cuda.Event],
        start: float,
        blocked: float,
    ) -> None:
        try:
            for event in copied:
                event.synchronize()
            self._require_finite(step)
            folder = step_folder(self.directory, step)
            group = _group(self.parts.plan)
            planted("write", self.parts.rank, step, self.parts.model)
            # Into a new folder: DCP would overwrite in place, and a rank killed half-way would
            # leave a folder that loads, half old.
            writer = FileSystemWriter(
                folder,
                overwrite=False,
                thread_count=WRITERS if self.parts.plan.device == "cuda" else 1,
            )
            with _without_crc():
                save(
                    self._staged, storage_writer=writer, process_group=group, no_dist=group is None
                )
            planted("save", self.parts.rank, step, self.parts.model)
            if self.parts.rank == 0:
                _require_files(folder)
                write_manifest(folder, **about)
                rotate(self.directory, self.keep)
            if group:
                dist.barrier(group)  # no rank believes in a checkpoint before it is one
            seconds = self.probe.clock.now() - start
            self._saved = {
                "step": step,
                "blocked_seconds": round(blocked, 6),
                "seconds": round(seconds, 6),
                "folder": folder.name,
            }
        except BaseException as error:
            self._error = error


def _require_files(folder: Path) -> None:
    """What other nodes wrote must be here too, or the manifest would be of a part."""
    # Read back: what `save` returns knows its files in some versions of torch only (2.13 yes, 2.11
    # no).
    wanted = {location.file for location in read_metadata(folder).locations}
    missing = sorted(name for name in wanted if not (folder / name).exists())
    if missing:
        raise ParalabError(
            f"{folder} lacks {missing[0]}, which another rank has written: its node has another {folder.parent}.",
            fix="--checkpoint DIR on a file system that all nodes share",
        )


@contextmanager
def _without_crc() -> Iterator[None]:
    """The manifest has a better checksum, and this one takes as long as the writing. The setting is
    the process's: it is put back for what else is saved."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


_groups: dict[int, dist.ProcessGroup] = {}


def make_group(plan: Plan) -> None:
    """The group in which checkpoints are written: its own, because they are written while training
    uses the others. All ranks of the launch must call this in the same order."""
    if dist.is_initialized() and plan.world_size not in _groups:
        _groups[plan.world_size] = dist.new_group(range(plan.world_size), backend="gloo")


def _group(plan: Plan) -> dist.ProcessGroup | None:
    return _groups.get(plan.world_size)


def _pickled(value: Any) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(_without_numpy(value), buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _without_numpy(value: Any) -> Any:
    """numpy's numbers (a learning rate from `np.cos`) as Python's: only these can be read back
    safely."""
    if isinstance(value, dict):
        return {key: _without_numpy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_numpy(item) for item in value)
    return (
        value.item()
        if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0
        else value
    )


def _unpickled(tensor: torch.Tensor) -> Any:
    return torch.load(io.BytesIO(tensor.numpy().tobytes()), weights_only=True)


def _empty(metadata: Any) -> torch.Tensor:
    return torch.empty(metadata.size, dtype=metadata.properties.dtype)
