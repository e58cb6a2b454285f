"""One rank's part of a checkpoint.

All entries are tensors whose names do not depend on the topology, so any strategy can read any
other strategy's checkpoint:

    model.NAME            a parameter: shards from all ranks, otherwise the first replica's copy
    buffer.NAME           a buffer from the first replica
    optimizer.NAME.KEY    optimizer state for parameter NAME, from the rank that has it
    plain.N               other optimizer state for rank N's parameters (pickled)
    shared                optimizer settings, scheduler, and scaler (pickled)
    rank.N                rank N's random streams, its strategy's state, and its buffers unless it
                          is in the first replica (pickled); with local-sgd, also its parameters and
                          optimizer, because replicas differ between averages

Loading a checkpoint never runs code from it, because its source may be untrusted: `SafeReader`
reads the metadata, and `torch.load(weights_only=True)` reads all tensors and pickled values.
"""

from __future__ import annotations

import io
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from paralab.errors import ParalabError
from paralab.record.checkpoints import TOPOLOGY
from paralab.worker.checkpoints.safe_reader import SafeReader
from paralab.worker.groups import checkpoint_group
from paralab.worker.optimizer import own_optimizer
from paralab.worker.rank_context import RankContext, Strategy
from paralab.worker.sharding.shards import in_pieces, local, shard_like, whole
from paralab.workload.batch import map_tensors

State = dict[str, torch.Tensor]
PICKLED = ("shared", "plain.", "rank.")


class TrainingState:
    def __init__(
        self,
        context: RankContext,
        strategy: Strategy,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
    ) -> None:
        model, self.strategy = strategy.model, strategy
        self.plan, self.rank, self.streams = context.plan, context.rank.rank, context.streams
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.own_optimizer = own_optimizer(optimizer)
        self.scaler = context.precision.scaler
        # Parameters on the meta device belong to other ranks' stages.
        self.parameters = {name: p for name, p in model.named_parameters() if not p.is_meta}
        self.first_shard = not context.rank.shard
        self.first_replica = context.rank.replica == 0 and self.first_shard
        names = [device.torch for device in context.rank.devices]
        self.gpus = [name for name in names if name.startswith("cuda")]

    @property
    def buffers(self) -> State:
        """Return the current buffers. A forward pass may have replaced them since the last call."""
        return {name: buffer for name, buffer in self.model.named_buffers() if not buffer.is_meta}

    def tensors(self) -> State:
        """Return the state without copying it. Only one rank saves each unsharded tensor. If
        multiple replicas saved a buffer, DCP would pick an arbitrary replica's value."""
        model = {f"model.{name}": _storable(p.detach()) for name, p in self.parameters.items()}
        optimizer: State = {}
        plain: dict[str, dict[str, Any]] = {}
        for name, parameter in self.parameters.items():
            for key, value in self.own_optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    optimizer[f"optimizer.{name}.{key}"] = _storable(value)
                else:
                    plain.setdefault(name, {})[key] = value

        # With --zero 1, no other replica has this state.
        has_state = self.first_replica or (self.plan.zero == 1 and self.first_shard)
        if self.first_replica:
            model |= {f"buffer.{name}": buffer for name, buffer in self.buffers.items()}
        else:
            model = _shards_of(model)
        state = model | (optimizer if has_state else _shards_of(optimizer))
        if has_state:
            state[f"plain.{self.rank}"] = _pickle(plain)
        if self.rank == 0:
            state["shared"] = _pickle(self._shared())
        return state | {f"rank.{self.rank}": _pickle(self._own())}

    def describe(self, step: int, samples: int, epoch: int) -> dict[str, Any]:
        """Return all manifest entries except the list of files."""
        plan = self.plan
        differ = plan.sync_every and not plan.lossy.synchronizes(step - 1, plan.num_steps)
        return {
            "replicas_differ": bool(differ),
            "step": step,
            "samples_seen": samples,
            "epoch": epoch,
            **self.plan.training,
            "topology": {name: getattr(self.plan, name) for name in TOPOLOGY},
            "torch": torch.__version__,
        }

    def restore(self, folder: Path, same_topology: bool) -> None:
        """Load the checkpoint, but not the random streams if the topology has changed."""
        try:
            self._restore(folder, same_topology)
        except (Exception, CheckpointException) as error:  # DCP's error is a BaseException
            # DCP's message has a traceback for each rank. Report only the first rank's error.
            failures = error.failures if isinstance(error, CheckpointException) else {}
            cause = next((each for each, _ in failures.values()), error)
            why = f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"
            if isinstance(cause, pickle.UnpicklingError):  # torch suggests an unsafe load
                why = "it is damaged, or contains more than tensors and plain values"
            raise ParalabError(f"The checkpoint {folder} cannot be loaded: {why}") from error

    def _restore(self, folder: Path, same_topology: bool) -> None:
        reader = SafeReader(folder)
        state = self._make_targets(reader.read_metadata().state_dict_metadata, same_topology)
        group = checkpoint_group(self.plan)
        load(state, storage_reader=reader, process_group=group, no_dist=group is None)

        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(_like(parameter, state[f"model.{name}"]))
            for name, buffer in self.buffers.items():
                buffer.copy_(state[f"buffer.{name}"])
        self._restore_shared(unpickle(state["shared"]), state)
        own = unpickle(state[f"rank.{self.rank}"]) if same_topology else {}
        if own:
            self._restore_own(own)
        self.strategy.restore_own(own.get("strategy", {}))

    def _make_targets(self, saved: dict[str, Any], same_topology: bool) -> State:
        """Create the tensors to load into. DCP reads only these entries."""
        state = {f"model.{name}": _target(p) for name, p in self.parameters.items()}
        state |= {f"buffer.{name}": buffer for name, buffer in self.buffers.items()}
        own = f"rank.{self.rank}" if same_topology else "shared"
        groups = self.own_optimizer.param_groups
        updated = {id(parameter) for group in groups for parameter in group["params"]}
        for key, entry in saved.items():
            kind, _, rest = key.partition(".")
            parameter = (
                self.parameters.get(rest.rpartition(".")[0]) if kind == "optimizer" else None
            )
            if parameter is not None and id(parameter) not in updated:
                continue  # with --zero 1, another rank updates this parameter
            if parameter is not None and entry.size == parameter.shape:  # shard this one too
                state[key] = _target(torch.empty_like(parameter, requires_grad=False))
            elif parameter is not None or kind in ("shared", "plain") or key == own:
                state[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        return state

    def _shared(self) -> dict[str, Any]:
        groups = [dict(group) for group in self.optimizer.param_groups]
        for group in groups:
            del group["params"]
        scheduler = self.scheduler.state_dict() if self.scheduler else None
        return {"groups": groups, "scheduler": scheduler, "scaler": self.scaler.state_dict()}

    def _restore_shared(self, shared: dict[str, Any], state: State) -> None:
        """Restore the optimizer (whose state_dict numbers parameters), scheduler, and scaler."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        plain: dict[str, dict[str, Any]] = {}
        for key in state:
            if key.startswith("plain."):
                plain |= unpickle(state[key])

        values: dict[int, dict[str, Any]] = {}
        groups = self.own_optimizer.param_groups
        parameters = [p for group in groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            # In a stage without parameters, the optimizer has one empty, unnamed parameter.
            name = names.get(id(parameter), "")
            prefix = f"optimizer.{name}."
            tensors = {
                k.removeprefix(prefix): _like(parameter, state[k])
                for k in state
                if k.startswith(prefix)
            }
            if own := tensors | plain.get(name, {}):
                values[number] = own

        numbered = self.optimizer.state_dict()["param_groups"]
        both = zip(numbered, shared["groups"], strict=True)
        settings = [{**saved, "params": group["params"]} for group, saved in both]
        self.optimizer.load_state_dict({"state": values, "param_groups": settings})
        if self.scheduler:
            self.scheduler.load_state_dict(shared["scheduler"])
        if shared["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(shared["scaler"])

    def _own(self) -> dict[str, Any]:
        numpy = sys.modules.get("numpy")
        numpy_state = list(numpy.random.get_state()) if numpy else []
        buffers = {} if self.first_replica else self.buffers
        replica = None
        if self.plan.sync_every:
            parameters = {name: p.detach() for name, p in self.parameters.items()}
            replica = parameters, self.optimizer.state_dict(), self._shared()
        return {
            "torch": torch.get_rng_state(),
            "streams": self.streams.states if self.streams else [],
            "cuda": [torch.cuda.get_rng_state(device) for device in self.gpus],
            "python": random.getstate(),
            "numpy": [v.tolist() if hasattr(v, "tolist") else v for v in numpy_state],
            "buffers": {name: buffer.cpu() for name, buffer in buffers.items()},
            "strategy": _to_cpu(self.strategy.own_state()),
            "replica": _to_cpu(replica),
        }

    def _restore_own(self, own: dict[str, Any]) -> None:
        torch.set_rng_state(own["torch"])
        if self.streams and own.get("streams"):  # older checkpoints have no streams
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
            if replica := own.get("replica"):
                parameters, optimizer, shared = replica
                for name, value in parameters.items():
                    self.parameters[name].copy_(value)
                self.optimizer.load_state_dict(optimizer)
                if self.scheduler:
                    self.scheduler.load_state_dict(shared["scheduler"])
                if shared["scaler"]:
                    self.scaler.load_state_dict(shared["scaler"])


def _to_cpu(state: Any) -> Any:
    return map_tensors(lambda tensor: tensor.cpu(), state)


def _shards_of(state: State) -> State:
    return {name: value for name, value in state.items() if isinstance(value, DTensor)}


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or the full tensor if DCP cannot store its shards."""
    return whole(tensor) if in_pieces(tensor) else tensor


def _target(parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor that DCP loads a parameter into."""
    if not in_pieces(parameter):
        return parameter.detach()
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=local(parameter).device)


def _like(parameter: torch.Tensor, loaded: torch.Tensor) -> torch.Tensor:
    """Shard a loaded tensor like its parameter if `_target` made a full tensor."""
    full = in_pieces(parameter) and loaded.shape == parameter.shape
    return shard_like(loaded, parameter) if full else loaded


def _pickle(value: Any) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(_without_numpy(value), buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def unpickle(tensor: torch.Tensor) -> Any:
    return torch.load(io.BytesIO(tensor.numpy().tobytes()), weights_only=True)


def _without_numpy(value: Any) -> Any:
    """Replace numpy numbers (such as a learning rate from `np.cos`), which are unsafe to load."""
    if isinstance(value, dict):
        return {key: _without_numpy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_numpy(item) for item in value)
    is_number = type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0
    return value.item() if is_number else value
