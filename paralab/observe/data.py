"""DataLoaders and samplers: each pass over a loader, and its batches."""

import time
import weakref
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from paralab.observe import sites
from paralab.observe.digests import FIRST, first_tensor, is_sampled, of_rows, size_of
from paralab.observe.light import Light
from paralab.observe.rank import Fields, Rank
from paralab.observe.wrappers import wrap


class Loaders:
    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.passes: list[int] = []  # number of passes over each loader
        self.made: weakref.WeakKeyDictionary[Any, list[list[Any]]] = weakref.WeakKeyDictionary()
        self.light = Light(rank, "batch", ("loader", "epoch", "size"))

    def install(self) -> None:
        wrap(self.rank, DataLoader, "__init__", "made", self._remember_maker)
        wrap(self.rank, DataLoader, "__iter__", "loader", self._loader, self._began)
        epoch = lambda sampler, epoch: {"epoch": int(epoch)}  # noqa: E731
        wrap(self.rank, DistributedSampler, "set_epoch", "set_epoch", epoch)
        self._install_next()

    def _remember_maker(self, loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        self.made[loader] = sites.places(sites.where())

    def _loader(self, loader: DataLoader[Any]) -> Fields | None:
        if torch.utils.data.get_worker_info() is not None:
            return None
        if loader not in self.numbers:
            self.numbers[loader] = len(self.passes)
            self.passes.append(0)
        number = self.numbers[loader]
        self.passes[number] += 1
        sampler = getattr(loader.batch_sampler, "sampler", None) or loader.sampler
        return {
            "loader": number,
            "epoch": self.passes[number],
            "batches": _length(loader),
            "batch_size": loader.batch_size,
            "samples": _length(loader.dataset),
            "dataset": type(loader.dataset).__name__,
            "iterable": isinstance(loader.dataset, torch.utils.data.IterableDataset),
            "sampler": type(sampler).__name__,
            "sampler_samples": _length(sampler),
            "sampler_epoch": getattr(sampler, "epoch", None),
            "replicas": getattr(sampler, "num_replicas", None),
            "replica": getattr(sampler, "rank", None),
            "shuffle": getattr(sampler, "shuffle", type(sampler).__name__ == "RandomSampler"),
            "workers": loader.num_workers,
            "made": self.made.get(loader, []),
        }

    def _began(self, iterator: Any, loader: DataLoader[Any]) -> Fields:
        number = self.numbers[loader]
        place = {"loader": number, "epoch": self.passes[number]}
        iterator._paralab = {**place, "batch": 0, "samples": 0, "call": None}
        return {}

    def _install_next(self) -> None:
        original = _BaseDataLoaderIter.__next__
        rank = self.rank

        def __next__(iterator: Any) -> Any:
            state = getattr(iterator, "_paralab", None) if rank.on else None
            if state is None:
                return original(iterator)
            start = time.time()
            try:
                batch = original(iterator)
            except StopIteration:
                self._note(state, None, start)
                raise
            self._note(state, batch, start)
            return batch

        __next__._paralab = True  # type: ignore[attr-defined]
        _BaseDataLoaderIter.__next__ = __next__  # type: ignore[method-assign, assignment]

    def _note(self, state: Fields, batch: Any, start: float) -> None:
        """Record a batch, or the end of a pass."""
        began = time.perf_counter_ns()
        try:
            seconds = time.time() - start
            place = {"loader": state["loader"], "epoch": state["epoch"]}
            if batch is None:
                batches, samples = state["batch"], state["samples"]
                self.rank.emit("epoch", **place, batches=batches, samples=samples, t=start)
                return
            state["batch"] += 1
            size = size_of(batch)
            state["samples"] += size or 0
            if not self.rank.watched:
                if state["call"] is None or size != state["size"]:
                    state["size"] = size
                    state["call"] = self.light.call((state["loader"], state["epoch"], size))
                recent: Any = self.rank.recent
                recent.begin(state["call"], start, self.rank.steps, state["batch"], seconds)
                return
            fields = {**place, "batch": state["batch"], "size": size, "wait": round(seconds, 6)}
            # Checksum the first batches of the first passes, then fewer. This is enough to compare
            # the ranks' data and the order of epochs.
            if state["epoch"] <= FIRST:
                samples_rows = is_sampled(state["batch"])
            else:
                samples_rows = state["batch"] == 1 and is_sampled(state["epoch"])
            if samples_rows:
                tensor = first_tensor(batch)
                fields["rows"] = of_rows(tensor) if tensor is not None else []
            self.rank.emit("batch", **fields, t=start)
        except Exception as error:
            self.rank.switch_off(error)
        finally:
            self.rank.budget.spent += time.perf_counter_ns() - began


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except Exception:  # an iterable dataset, or __len__ fails
        return None
