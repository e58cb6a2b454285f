"""Suspects that are based on names and nesting. Each mistake has a healthy twin that differs in
one place."""

import textwrap

import pytest

from paralab.doctor.catalog import apply
from paralab.doctor.static.script import Script

PAIRS = {
    "nothing sets the epoch of a loader that is returned": (
        "T02",
        """
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader, DistributedSampler

        def make_loader(songs):
            return DataLoader(songs, sampler=DistributedSampler(songs{}))
        """,
        "",
        ", shuffle=False",
    ),
    "no rank has a GPU of its own": (
        "H09",
        """
        import os, torch
        import torch.distributed as dist

        def start(backend):
            number = int(os.environ["LOCAL_RANK"])
            {}
            dist.init_process_group(backend)
            return torch.device(f"cuda:{{number}}")
        """,
        "pass",
        "torch.cuda.set_device(number)",
    ),
    "a state whose way to the model is not shown": (
        "C04",
        """
        import torch
        from torch.nn.parallel import DistributedDataParallel

        def read_checkpoint(path):
            return torch.load(path{})["weights"]
        """,
        "",
        ', map_location="cpu"',
    ),
    "a model in a table is saved with its wrapper": (
        "C01",
        """
        import torch
        from torch.nn.parallel import DistributedDataParallel as DDP

        class Trainer:
            def wrap(self, parts):
                parts["speaker"] = DDP(parts["speaker"])
                self.parts = parts

            def save(self, path):
                torch.save(self.parts["speaker"]{}.state_dict(), path)
        """,
        "",
        ".module",
    ),
    "an unknown writer saves on every rank": (
        "C03",
        """
        import torch
        from store import writer

        def fit(model, rank, loader, optimizer):
            for song in loader:
                model(song).sum().backward()
                optimizer.step()
            if {}:
                writer.save(model, "songs.pt")
        """,
        "len(loader) > 3",
        "rank == 0",
    ),
    "one writer per machine": (
        "C03",
        """
        import os, torch
        import torch.distributed as dist

        local_rank = int(os.environ["LOCAL_RANK"])
        global_rank = int(os.environ["RANK"])

        def keep(model):
            if {} == 0:
                torch.save(model.state_dict(), "songs.pt")
        """,
        "local_rank",
        "global_rank",
    ),
    "a shuffled loader in a project without samplers": (
        "T01",
        """
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torch.utils.data import DataLoader

        def prepare(model, train_songs, rank):
            loader = DataLoader(train_songs, batch_size=4, shuffle=True{})
            return DDP(model), loader
        """,
        "",
        ", sampler=None if rank is None else pick(rank)",
    ),
    "a sampler that no loader gets": (
        "T01",
        """
        from torch.utils.data import DataLoader, DistributedSampler

        def prepare(songs, epoch):
            sampler = DistributedSampler(songs, drop_last=True)
            sampler.set_epoch(epoch)
            return DataLoader(songs, batch_size=4, {})
        """,
        "shuffle=True",
        "sampler=sampler",
    ),
    "clipping in another class than scaling": (
        "A01",
        """
        import torch
        from torch.nn.utils import clip_grad_norm_

        class Backward:
            def __init__(self):
                self.scaler = torch.amp.GradScaler("cuda")

            def run(self, loss, optimizer):
                self.scaler.scale(loss).backward()
                {}

        class Clip:
            def on_end(self, model):
                clip_grad_norm_(model.parameters(), 1.0)
        """,
        "pass",
        "self.scaler.unscale_(optimizer)",
    ),
    "an accumulated loss of unknown size": (
        "G01",
        """
        def turn(model, song, i, args, optimizer):
            loss = model(song){}
            loss.backward()
            if (i + 1) % args.accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
        "",
        " / args.accumulation_steps",
    ),
    "every accumulated pass synchronizes": (
        "G02",
        """
        from torch.nn.parallel import DistributedDataParallel as DDP

        class Trainer:
            def backward(self, loss):
                (loss / self.accumulation).backward()

            def turn(self, i, loss):
                {}
                if i % self.accumulation == 0:
                    self.optimizer.step()
        """,
        "self.backward(loss)",
        "with self.model.no_sync(): self.backward(loss)",
    ),
    "two counts of the same passes": (
        "G04",
        """
        import contextlib

        class Trainer:
            def turn(self, model, i, song, every):
                quiet = model.no_sync if {} % every != 0 else contextlib.nullcontext
                with quiet():
                    model(song).mean().backward()

            def end(self, i):
                if (i + 1) % self.every == 0:
                    self.optimizer.step()
        """,
        "i",
        "(i + 1)",
    ),
    "a barrier for one rank, in a group of all": (
        "H03",
        """
        import torch.distributed as dist

        class Trainer:
            def show(self, step):
                if step % 10 == 0 and {}:
                    if self.parallel:
                        dist.barrier(self.group)
                    print(step)
        """,
        "self.global_rank == 0",
        "self.talks",
    ),
    "one rank stops the training of all": (
        "H08",
        """
        from steps import train_one_epoch, validate

        def fit(model, rank, patience):
            waited = 0
            while waited < 100:
                train_one_epoch(model)
                if {}:
                    waited += validate(model)
                    if waited > patience:
                        break
        """,
        "rank == 0",
        "model.training",
    ),
    "loader workers with the same seed on all ranks": (
        "S10",
        """
        import numpy as np
        from torch.nn.parallel import DistributedDataParallel

        def worker_init_fn(worker):
            np.random.seed(worker{})
        """,
        " + 17",
        " + torch.initial_seed()",
    ),
    "a function that seeds every rank alike": (
        "S10",
        """
        import random, torch
        from torch.nn.parallel import DistributedDataParallel

        def set_seeds(config, place):
            random.seed(config.seed{0})
            torch.manual_seed(config.seed{0})
        """,
        "",
        " + place.rank",
    ),
    "a loop of accumulated passes": (
        "G01",
        """
        def turn(model, songs, args, optimizer):
            optimizer.zero_grad()
            for _ in range(args.accumulation_steps):
                loss = model(next(songs)){}
                loss.backward()
            optimizer.step()
        """,
        "",
        " / args.accumulation_steps",
    ),
    "a store that knows about ranks saves on all of them": (
        "C03",
        """
        import torch
        from tools import get_rank

        class Store:
            def keep(self, model, path):
                if {}:
                    torch.save(model, path)
        """,
        "path.exists()",
        "get_rank() == 0",
    ),
    "a loss that reduces outside of the graph": (
        "S13",
        """
        import torch
        import torch.distributed as dist
        from torch import nn

        class PairLoss(nn.Module):
            def forward(self, one, two):
                both = one.T @ two
                {}
                return both.pow(2).sum()
        """,
        "dist.all_reduce(both)",
        "both = torch.distributed.nn.functional.all_reduce(both)",
    ),
    "a summed loss that nobody divides": (
        "S14",
        """
        import torch.distributed as dist

        def show(writer, loss, step):
            dist.all_reduce(loss)
            writer.keep("loss", loss.item(){}, step)
        """,
        "",
        " / dist.get_world_size()",
    ),
    "the caller scales the loss": (
        "A01",
        """
        from torch.nn.utils import clip_grad_norm_

        class Updater:
            def step(self, grad_scaler=None):
                {}
                clip_grad_norm_(self.net.parameters(), 1.0)
                if grad_scaler is not None:
                    grad_scaler.step(self.optimizer)
                else:
                    self.optimizer.step()
        """,
        "pass",
        "grad_scaler and grad_scaler.unscale_(self.optimizer)",
    ),
    "an attribute of a model that several ranks wrap": (
        "D05",
        """
        import torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel as DDP

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.history = dict()

        class Trainer:
            def __init__(self):
                self.net = Net()
                if dist.is_initialized():
                    self.net = DDP(self.net)

            def keep(self, step):
                {}
                net.history["step"] = step
        """,
        "net = self.net",
        "net = self.net.module if dist.is_initialized() else self.net",
    ),
}


def find(tmp_path, text):
    (tmp_path / "setup.py").touch()  # the root of the project
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(text))
    return {(finding.id, finding.severity) for finding in apply("script", Script(path))}


@pytest.mark.parametrize("name", PAIRS)
def test_names_and_nesting_suggest_a_mistake(name, tmp_path):
    id, text, broken, healthy = PAIRS[name]
    assert (id, "suspect") in find(tmp_path, text.format(broken))
    assert id not in {one for one, _ in find(tmp_path, text.format(healthy))}


def test_another_file_of_the_project_may_set_the_epoch(tmp_path):
    id, text, broken, _ = PAIRS["nothing sets the epoch of a loader that is returned"]
    (tmp_path / "fit.py").write_text("def start(sampler, epoch):\n    sampler.set_epoch(epoch)\n")
    assert id not in {one for one, _ in find(tmp_path, text.format(broken))}


def test_the_class_of_a_sampler_may_depend_on_an_option(tmp_path):
    text = """
    import argparse, os
    from torch.utils.data import DataLoader, DistributedSampler, RandomSampler
    from nets import net, optimizer, songs

    args = argparse.ArgumentParser().parse_args()
    kind = RandomSampler if args.local_rank == -1 else DistributedSampler
    loader = DataLoader(songs, sampler=kind(songs))
    for epoch in range(10):
        {}
        for song in loader:
            net(song).sum().backward()
            optimizer.step()
    """
    assert ("T02", "warning") in find(tmp_path, text.format("pass"))
    assert find(tmp_path, text.format("loader.sampler.set_epoch(epoch)")) == set()


def test_another_script_of_the_project_sets_no_device_for_this_one(tmp_path):
    id, text, broken, _ = PAIRS["no rank has a GPU of its own"]
    text = textwrap.dedent(text.format(broken)) + "start('nccl')\nnet(1).backward()\n"
    (tmp_path / "other.py").write_text("torch.cuda.set_device(0)\n")
    assert (id, "suspect") in find(tmp_path, text)
    assert id not in {one for one, _ in find(tmp_path, text.replace("net(1).backward()", ""))}


def test_a_lambda_may_run_before_the_model_is_wrapped(tmp_path):
    text = """
    from torch.nn.parallel import DistributedDataParallel as DDP
    from nets import Net, later

    class Trainer:
        def __init__(self):
            self.net = Net()
            later(lambda: self.net.share())
            self.net = DDP(self.net)
    """
    assert "D05" not in {id for id, _ in find(tmp_path, text)}


def test_a_cached_function_may_do_nothing(tmp_path):
    text = """
    import functools, torch, torch.distributed as dist

    dist.init_process_group("gloo")
    {}
    def measure(place):
        dist.barrier()
        return place

    measure(3)
    if dist.get_rank() == 0:
        print(measure(3))
    """
    assert ("H03", "error") in find(tmp_path, text.format(""))
    assert ("H03", "error") not in find(tmp_path, text.format("@functools.cache"))
