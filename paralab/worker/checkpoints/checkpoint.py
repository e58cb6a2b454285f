"""Save checkpoints with torch.distributed.checkpoint (DCP) while training continues.

Training waits only while a save copies the state. A background thread then writes the copy and
finally the manifest, which completes the checkpoint. If the thread fails, the next step raises the
error. See `paralab.worker.checkpoints.training_state` for the contents of a checkpoint.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._state_dict_utils import (  # DCP's own stagers use these
    _copy_state_dict,
    _create_cpu_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.serialization import config as serialization_config

from paralab.errors import ParalabError
from paralab.record.checkpoints import (
    CheckpointPolicy,
    require_room,
    rotate,
    step_folder,
    write_manifest,
)
from paralab.record.metadata import read_metadata
from paralab.units import plural
from paralab.worker.checkpoints.training_state import PICKLED, State, TrainingState, unpickle
from paralab.worker.groups import checkpoint_group
from paralab.worker.inject import inject_fault
from paralab.worker.measure.probes import Probe
from paralab.worker.sharding.shards import local

WRITERS = 4  # threads that write a checkpoint while a GPU trains


class Saver:
    """Writes checkpoints, one at a time, in a background thread."""

    def __init__(self, state: TrainingState, policy: CheckpointPolicy, probe: Probe) -> None:
        self.state, self.policy, self.probe = state, policy, probe
        self.directory = Path(policy.directory)
        self._copy: State = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paralab-save")
        self._saving: Future[dict[str, Any]] | None = None  # returns a `save` event

    def prepare(self) -> None:
        """Allocate memory for the copies during a warm-up step, because pinning a gigabyte takes
        half a second. Also check early that a checkpoint of this state can be loaded."""
        tensors = self.state.tensors()
        try:
            for name, tensor in tensors.items():
                if name.startswith(PICKLED):
                    unpickle(tensor)
        except Exception as error:
            raise ParalabError(f"A checkpoint of this run could not be loaded: {error}") from error
        self._allocate(tensors)

    def begin(self, step: int, samples: int, epoch: int) -> None:
        """Copy the state after `step` completed steps and start the thread that writes it."""
        self.finish()
        start = self.probe.clock.now()
        tensors = self.state.tensors()
        if self.state.rank == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            # Assume that all stages have about the same size.
            stages = self.state.plan.stages if self.state.plan.schedule else 1
            require_room(self.directory, sum(t.nbytes for t in tensors.values()) * stages)

        self._allocate(tensors)
        _copy_state_dict(tensors, self._copy, non_blocking=True)
        copied = []
        for device in self.state.gpus:
            # The next step's kernels are queued behind the copies, so the CPU does not wait.
            copied.append(torch.cuda.Event())
            copied[-1].record(torch.cuda.current_stream(device))

        about = self.state.describe(step, samples, epoch)
        blocked = self.probe.clock.now() - start
        self._saving = self._thread.submit(self._write, about, copied, start, blocked)

    def poll(self) -> None:
        """Raise the thread's error, or write the event for a finished save."""
        if self._saving and self._saving.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the current save to finish."""
        if self._saving:
            saving, self._saving = self._saving, None
            self.probe.emit("save", **saving.result())

    def _allocate(self, tensors: State) -> None:
        shapes = {name: copy.shape for name, copy in self._copy.items()}
        changed = {name: t for name, t in tensors.items() if shapes.get(name) != t.shape}
        new = _create_cpu_state_dict(changed, pin_memory=self.state.plan.device == "cuda")
        self._copy = {name: new[name] if name in new else self._copy[name] for name in tensors}

    def _write(
        self, about: dict[str, Any], copied: list[torch.cuda.Event], start: float, blocked: float
    ) -> dict[str, Any]:
        """Write a checkpoint in the background thread."""
        state, step = self.state, about["step"]
        folder = step_folder(self.directory, step)
        for event in copied:
            event.synchronize()
        self._require_finite(step)

        group = checkpoint_group(state.plan)
        inject_fault("write", state.rank, step, state.model)
        # Write into a new folder. DCP overwrites in place, so a rank killed halfway would leave a
        # folder that can be loaded but mixes two steps.
        threads = WRITERS if state.plan.device == "cuda" else 1
        writer = FileSystemWriter(folder, overwrite=False, thread_count=threads)
        # Do not compute torch's checksum, which takes as long as writing. The manifest has a better
        # checksum.
        config: Any = serialization_config
        with config.patch({"save.compute_crc32": False}):
            save(self._copy, storage_writer=writer, process_group=group, no_dist=group is None)

        inject_fault("save", state.rank, step, state.model)
        if state.rank == 0:
            _require_files(folder)
            write_manifest(folder, **about)
            rotate(self.directory, self.policy.keep)
        if group:
            dist.barrier(group)  # do not report the checkpoint before it has a manifest
        return {
            "step": step,
            "blocked_seconds": round(blocked, 6),
            "seconds": round(self.probe.clock.now() - start, 6),
            "folder": folder.name,
        }

    def _require_finite(self, step: int) -> None:
        """Raise if a parameter is not finite. A step with a finite loss can still produce NaN in a
        parameter, and training cannot recover from such a checkpoint."""
        for name, tensor in self._copy.items():
            values = local(tensor)
            if not name.startswith("model.") or not values.is_floating_point():
                continue
            if not bool(torch.isfinite(values).all()):
                problem = (
                    f"{name.removeprefix('model.')} is not finite after {plural(step, 'step')}."
                )
                raise ParalabError(problem, fix="a lower learning rate")


def _require_files(folder: Path) -> None:
    """Raise if files that other nodes wrote are not visible here."""
    # Read the metadata back, because `save` does not return the file names in torch 2.11.
    names = {location.file for location in read_metadata(folder).locations}
    missing = sorted(name for name in names if not (folder / name).exists())
    if missing:
        raise ParalabError(
            f"{folder} does not contain {missing[0]}, which another rank wrote. {folder.parent} is "
            "not on a file system that both nodes share.",
            fix="--checkpoint DIR on a file system that all nodes share",
        )
