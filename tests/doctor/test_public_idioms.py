"""Lessons from public code: a mistake, and similar code that the doctor once confused with it."""

import textwrap

import pytest

from paralab.doctor.catalog import apply
from paralab.doctor.static.script import Script

# name: (id, severity, text, what makes it a mistake, what makes it healthy or undecided)
PAIRS = {
    "rank 0 unwraps the model if it is wrapped": (
        "H07",
        "suspect",
        """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        from nets import Net

        dist.init_process_group("gloo")
        model = Net()
        if wrapped:
            model = DDP(model)
        raw = {} if isinstance(model, DDP) else model
        if dist.get_rank() == 0:
            with torch.no_grad():
                print(raw(torch.zeros(1)))
        """,
        "model",
        "model.module",
    ),
    "only the condition says that a file is a checkpoint": (
        "C04",
        "suspect",
        """
        import torch
        from torch.nn.parallel import DistributedDataParallel

        if {}:
            state = torch.load(path)
            build(state["sizes"])
        """,
        "RESUME",
        "SHOW",
    ),
    "a lock lets one rank save at a time": (
        "C03",
        "error",
        """
        import fcntl, torch, torch.distributed as dist

        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.zeros(1, 2)).sum().backward()
        with open("turn", "w") as file:
            fcntl.{}(file, fcntl.LOCK_EX)
            torch.save(model.module.state_dict(), "net.pt")
        """,
        "fcntl",
        "flock",
    ),
    "an attribute of a model that Accelerate wrapped": (
        "D05",
        "suspect",
        """
        from accelerate import Accelerator
        from models import Unet

        accelerator = Accelerator()
        unet = Unet.from_pretrained("unet")
        optimizer = make_optimizer(unet.parameters())
        print(unet.config)
        unet, optimizer = accelerator.prepare(unet, optimizer)
        unet.train()
        size = {}.config.size
        """,
        "unet",
        "accelerator.unwrap_model(unet)",
    ),
    "rank 0 validates a model that it was given": (
        "H07",
        "suspect",
        """
        import torch
        from torch.nn.parallel import DistributedDataParallel

        def evaluate(model, batches, args):
            if not is_master(args):
                return None
            {}
            with torch.inference_mode():
                for x in batches:
                    print(model(x))
        """,
        "",
        "model = model.module",
    ),
    "autocast only in the other branch": (
        "A09",
        "warning",
        """
        import contextlib, torch

        context = contextlib.nullcontext()
        if half:
            scaler = torch.amp.GradScaler()
            context = torch.autocast("cuda")
        for x, y in batches:
            with context:
                loss = loss_of(model(x), y)
                if {}:
                    loss.backward()
                    optimizer.step()
        """,
        "half",
        "not half",
    ),
    "a loader for a single process": (
        "T01",
        "warning",
        """
        import os, torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torch.utils.data import DataLoader, TensorDataset

        class Trainer:
            def __init__(self):
                self.distributed = int(os.environ.get("RANK", -1)) != -1
                if self.distributed:
                    dist.init_process_group("gloo")
                self.model = DDP(torch.nn.Linear(4, 1))
                data = TensorDataset(torch.load("x.pt"), torch.load("y.pt"))
                if {}:
                    self.loader = DataLoader(data, shuffle=True)
                else:
                    self.loader = DataLoader(data, sampler=divide(data))

            def train(self):
                for x, y in self.loader:
                    torch.nn.functional.mse_loss(self.model(x), y).backward()
                    optimizer.step()

        Trainer().train()
        """,
        "self.distributed",
        "not self.distributed",
    ),
    "each rank trains on what its own model says": (
        "T01",
        "warning",
        """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torch.utils.data import DataLoader, Dataset

        class Answers(Dataset):
            def __init__(self, rows):
                self.rows = rows

            def __getitem__(self, index):
                return self.rows[index]

        dist.init_process_group("gloo")
        model = DDP(torch.nn.Linear(4, 1))
        rows = []
        with {}:
            for question in questions:
                rows.append(model(question))
        loader = DataLoader(Answers(rows), shuffle=True)
        for epoch in range(3):
            for x, y in loader:
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        """,
        "open('log') as log",
        "torch.no_grad()",
    ),
    "rank 0 answers the others in a callback": (
        "H03",
        "error",
        """
        import torch.distributed as dist
        from windows import Button

        def answer(text):
            dist.broadcast_object_list([text])
            return text

        def follow():
            while True:
                dist.broadcast_object_list([None])

        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            {}
        else:
            follow()
        """,
        "print(answer)",
        'Button("ask").click(fn=answer)',
    ),
    "a function returns its counter next to its loss": (
        "H08",
        "error",
        """
        import torch, torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

        dist.init_process_group("gloo")
        data = TensorDataset(torch.zeros(64, 4), torch.zeros(64, 1))
        loader = DataLoader(data, sampler=DistributedSampler(data))
        model = DDP(nn.Linear(4, 1))

        def fit(step):
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                step += 1
            return step, loss.item()

        step, loss = 0, 1.0
        while {}:
            step, loss = fit(step)
        """,
        "loss > 0.1",
        "step < 1000",
    ),
    "each machine has one rank and its own disk": (
        "C03",
        "error",
        """
        import torch, torch.distributed as dist

        def train(hosts, current_host, rank):
            dist.init_process_group("gloo", rank={}, world_size=len(hosts))
            net(x).sum().backward()
            torch.save(torch.nn.Linear(2, 1).state_dict(), "net.pt")

        if __name__ == "__main__":
            train(["a", "b"], "a", 0)
        """,
        "rank",
        "hosts.index(current_host)",
    ),
    "a folder per rank": (  # os.chdir once caused endless recursion in this check
        "C03",
        "error",
        """
        import os, torch, torch.distributed as dist

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        os.chdir({})
        weights = torch.zeros(2, requires_grad=True)
        weights.sum().backward()
        torch.save(weights, "net.pt")
        """,
        '"runs"',
        'f"runs/{rank}"',
    ),
    "a function that nothing calls": (
        "S08",
        "error",
        """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        dist.init_process_group("gloo")
        model = DDP(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def update():
            model(torch.ones(1, 2)).sum().backward()
            if dist.get_rank() == 0:
                optimizer.step()

        {}()
        """,
        "update",
        "print",
    ),
    "a job with a single process": (
        "C03",
        "error",
        """
        import torch, torch.distributed as dist

        dist.init_process_group("gloo", rank={}, store=store)
        weights = torch.zeros(2, requires_grad=True)
        weights.sum().backward()
        torch.save(weights, "net.pt")
        """,
        "rank, world_size=size",
        "0, world_size=1",
    ),
    "one process per machine": (  # the number of machines is the world size
        "C03",
        "error",
        """
        import argparse, torch, torch.distributed as dist

        parser = argparse.ArgumentParser()
        parser.add_argument("--world-size", type=int)
        args = parser.parse_args()
        dist.init_process_group("gloo", "tcp://host:1", world_size=args.world_size)
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1){})
        net(torch.ones(2)).sum().backward()
        torch.save(net.module.state_dict(), "net.pt")
        """,
        ", device_ids=[gpu]",
        "",
    ),
    "the others wait in unknown code": (
        "H03",
        "error",
        """
        import torch.distributed as dist
        from serving import Engine

        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            dist.broadcast_object_list([None])
        else:
            {}
        """,
        'print("ready")',
        "Engine().follow()",
    ),
    "the state under a test for the wrapper": (
        "C01",
        "error",
        """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        dist.init_process_group("gloo")
        net = DDP(torch.nn.Linear(2, 1))
        torch.save({}, "net.pt")
        plain = torch.nn.Linear(2, 1)
        plain.load_state_dict(torch.load("net.pt"))
        """,
        "net.state_dict()",
        'net.module.state_dict() if hasattr(net, "module") else net.state_dict()',
    ),
    "a reduced loss that nothing divides": (  # its gradient stays the same
        "S13",
        "error",
        """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        dist.init_process_group("gloo")
        net = DDP(torch.nn.Linear(2, 1))
        loss = net(torch.ones(1, 2)).square().mean()
        dist.all_reduce(loss)
        loss = loss / {}
        loss.backward()
        """,
        "dist.get_world_size()",
        "2",
    ),
    "another function makes the sampler": (
        "T02",
        "warning",
        """
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torch.utils.data import DataLoader, DistributedSampler
        from sets import rows, net

        def share():
            return DataLoader(rows, sampler=DistributedSampler(rows))

        dist.init_process_group("gloo")
        model, batches = DDP(net), {}
        for epoch in range(9):
            for x in batches:
                model(x).sum().backward()
        """,
        "[*share()]",
        "[*DataLoader(rows)]",
    ),
    "a new dataset in every epoch": (
        "T02",
        "warning",
        """
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torch.utils.data import DataLoader, DistributedSampler
        from sets import load, net

        dist.init_process_group("gloo")
        model = DDP(net)
        {}
            for x in loader:
                model(x).sum().backward()
        """,
        """loader = DataLoader(load(0), sampler=DistributedSampler(load(0)))
        for epoch in range(9):""",
        """for epoch in range(9):
            loader = DataLoader(load(epoch), sampler=DistributedSampler(load(epoch)))""",
    ),
    "another function unscales": (
        "A01",
        "error",
        """
        import torch
        from torch.nn.utils import clip_grad_norm_

        net = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        scaler = torch.amp.GradScaler()

        def prepare():
            {}

        for _ in range(9):
            scaler.scale(net(torch.ones(2)).sum()).backward()
            hook.run()
            clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        """,
        "pass",
        "scaler.unscale_(optimizer)",
    ),
    "an attribute that the model does not have": (  # DeepSpeed's engine has it
        "D05",
        "error",
        """
        import torch
        from torch.nn.parallel import DistributedDataParallel as DDP

        class Net(torch.nn.Module):
            def {}(self, folder): ...

        DDP(Net()).save_checkpoint("runs")
        """,
        "save_checkpoint",
        "forward",
    ),
    "a function elsewhere without ranks sets the local rank": (
        "L03",
        "suspect",
        """
        import argparse, torch, torch.distributed as dist

        parser = argparse.ArgumentParser()
        parser.add_argument("--local_rank", type=int)

        def alone(args):
            args.local_rank = args.place = 0

        def main(args):
            dist.init_process_group("nccl")
            torch.cuda.set_device(args.{})

        alone(parser.parse_args())
        main(parser.parse_args())
        """,
        "place",
        "local_rank",
    ),
    "a script that never trains": (  # usually, only one process runs such a script
        "C03",
        "error",
        """
        import torch, torch.distributed as dist

        dist.init_process_group("gloo")
        net = torch.nn.Linear(2, 1)
        {}
        torch.save(net.state_dict(), "net.pt")
        """,
        "net(torch.ones(2)).backward()",
        "net(torch.ones(2))",
    ),
    "autocast of another library": (
        "A09",
        "warning",
        """
        import torch
        from torch.optim import SGD
        from {} import autocast

        net = torch.nn.Linear(2, 1)
        with autocast("cuda"):
            net(torch.ones(2)).backward()
        SGD(net.parameters(), 0.1).step()
        """,
        "torch.amp",
        "transformer_engine.pytorch",
    ),
    "backward in autocast, to measure memory": (
        "A09",
        "warning",
        """
        import torch

        net = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with torch.autocast("cuda"):
            net(torch.ones(2)).backward()
        {}
        """,
        "optimizer.step()",
        "print(torch.cuda.memory_allocated())",
    ),
    "the script expects that the wrapper lacks the attribute": (
        "D05",
        "error",
        """
        import torch
        from torch import nn

        class Net(nn.Module):
            def keep(self):
                pass

        model = nn.parallel.DistributedDataParallel(Net())
        try:
            model.keep()
        except {}:
            model.module.keep()
        """,
        "KeyboardInterrupt",
        "AttributeError",
    ),
    "a barrier, for which NCCL takes or guesses a GPU": (
        "H09",
        "warning",
        """
        import torch, torch.distributed as dist
        from torch import nn

        def main(rank):
            dist.init_process_group("nccl")
            {}
            model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1).to(rank))
            model(torch.ones(2, device=rank)).backward()

        main(dist.get_rank())
        """,
        "torch.ones(2).cuda()",
        "dist.barrier()",
    ),
    "a generator with its own seed": (
        "S10",
        "warning",
        """
        import random, torch, torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel as DDP

        class Songs(torch.utils.data.Dataset):
            def __init__(self, seed):
                self.dice = random.Random(seed)

            def __getitem__(self, index):
                return {}.random()

        dist.init_process_group("gloo")
        random.seed(1)
        torch.manual_seed(1)
        model = DDP(nn.Linear(4, 1))
        model(torch.ones(4)).backward()
        """,
        "random",
        "self.dice",
    ),
    "a seed in a function that evaluates": (
        "S10",
        "warning",
        """
        import torch, torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel as DDP

        def load(path):
            torch.manual_seed(1)
            net = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.1))
            {}
            return net

        dist.init_process_group("gloo")
        net = load("net.pt")
        model = DDP(nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.1)))
        model(net(torch.ones(4))).backward()
        """,
        "net.train()",
        "net.eval()",
    ),
    "a seed in a script that only reads its loader": (
        "S10",
        "warning",
        """
        import torch, torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel as DDP

        def main():
            dist.init_process_group("gloo")
            torch.manual_seed(1)
            model = DDP(nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.1)))
            {}

        main()
        """,
        "model(torch.ones(4)).backward()",
        "print(model(torch.ones(4)))",
    ),
    "the rank in a dictionary of options": (
        "S10",
        "warning",
        """
        import torch, torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel as DDP

        config = dict(seed=1, rank=0)
        torch.manual_seed(config["seed"]{})
        dist.init_process_group("gloo", rank=config["rank"])
        model = DDP(nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.1)))
        model(torch.ones(4)).backward()
        """,
        " + 1",
        ' + config["rank"]',
    ),
    "forward converts a mask": (
        "D04",
        "error",
        """
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.mask = torch.ones(2)

            def forward(self, x):
                self.mask = {}
                return x * self.mask

        model = nn.DataParallel(Net())
        """,
        "self.mask * 0.9",
        "self.mask.to(x.device).view(-1)",
    ),
    "rank 0 evaluates the model inside the wrapper": (
        "H07",
        "error",
        """
        import torch, torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel as DDP

        def evaluate(model):
            model.eval()
            with torch.no_grad():
                return model(torch.zeros(2, 4))

        dist.init_process_group("gloo")
        model = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        if dist.get_rank() == 0:
            evaluate({})
        """,
        "model",
        "model.module if isinstance(model, DDP) else model",
    ),
    "a barrier that names its GPU": (
        "H09",
        "suspect",
        """
        import torch, torch.distributed as dist
        import torch.multiprocessing as mp

        def other_job():
            dist.barrier()

        def work(rank, world):
            dist.init_process_group("nccl", "file:///tmp/group", rank=rank, world_size=world)
            dist.barrier({})

        def fit(model):
            model.sum().backward()

        if __name__ == "__main__":
            mp.spawn(work, args=(2,), nprocs=2)
        """,
        "",
        "device_ids=[rank]",
    ),
    "others wait under a test with two parts": (
        "H03",
        "error",
        """
        import torch.distributed as dist
        from tools import is_master, read

        def load(path):
            {}
            value = read(path)
            if dist.is_initialized() and is_master():
                dist.barrier()
            return value

        load("table")
        """,
        "pass",
        "if dist.is_initialized() and not is_master(): dist.barrier()",
    ),
    "the models of a GAN in one list": (
        "D05",
        "error",
        """
        import torch, torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel as DDP

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = 2.0

        def fit(nets):
            drawer, critic = nets
            return drawer{}.scale

        def work(rank):
            dist.init_process_group("gloo")
            fit([DDP(Net()), nn.Linear(2, 1)])

        work(0)
        """,
        "",
        ".module",
    ),
    "Fabric does not divide the loss": (
        "G01",
        "error",
        """
        import lightning as L
        import torch
        from torch import nn

        fabric = L.Fabric(devices=2, strategy="ddp")
        fabric.launch()
        net = nn.Linear(4, 1)
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for i in range(100):
            waits = (i + 1) % 4 != 0
            with fabric.no_backward_sync(model, enabled=waits):
                loss = nn.functional.mse_loss(model(torch.zeros(2, 4)), torch.zeros(2, 1))
                fabric.backward(loss{})
            if not waits:
                optimizer.step()
                optimizer.zero_grad()
        """,
        "",
        " / 4",
    ),
    "Accelerate synchronizes in every pass": (
        "G02",
        "suspect",
        """
        from contextlib import nullcontext
        from accelerate import Accelerator

        class Trainer:
            def __init__(self, model, optimizer, grad_accum_every):
                self.accelerator = Accelerator()
                self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
                self.grad_accum_every = grad_accum_every

            def train_step(self, batches):
                for i in range(self.grad_accum_every):
                    with {}:
                        loss = self.model(next(batches))
                        self.accelerator.backward(loss / self.grad_accum_every)
                self.optimizer.step()
                self.optimizer.zero_grad()
        """,
        "nullcontext()",
        "self.accelerator.accumulate(self.model)",
    ),
    "FSDP trains, and DDP only evaluates": (
        "G02",
        "warning",
        """
        import argparse
        import torch, torch.distributed as dist
        from torch import nn
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.nn.parallel import DistributedDataParallel as DDP

        args = argparse.ArgumentParser().parse_args()
        dist.init_process_group("gloo")
        if args.only_eval:
            model = DDP(nn.Linear(4, 1))
        else:
            model = {}(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(16):
            loss = nn.functional.mse_loss(model(torch.zeros(2, 4)), torch.zeros(2, 1)) / 4
            loss.backward()
            if (step + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
        "DDP",
        "FSDP",
    ),
    "a checkpoint that others published": (
        "C04",
        "warning",
        """
        import torch, torch.distributed as dist
        from torch import nn

        dist.init_process_group("nccl")
        model = nn.Linear(4, 1).cuda()
        {}("https://example.org/net.pth", "./ckpts/net.pth")
        model.load_state_dict(torch.load("./ckpts/net.pth"))
        """,
        "print",
        "torch.hub.download_url_to_file",
    ),
    "the world has several machines": (
        "H18",
        "error",
        """
        import torch.distributed as dist
        import torch.multiprocessing as mp
        from options import args

        def launch(work, processes, machines):
            world_size = {}
            mp.spawn(follow, nprocs=processes, args=(work, world_size))

        def follow(local_rank, work, world_size):
            global_rank = local_rank
            dist.init_process_group("gloo", world_size=world_size, rank=global_rank)
            work()

        launch(print, 1, args.machines)
        """,
        "2",
        "processes * machines",
    ),
    "a job that counts steps": (
        "T01",
        "warning",
        """
        import torch, torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torch.utils.data import DataLoader, Dataset

        class Photos(Dataset):
            pass

        dist.init_process_group("gloo")
        model = DDP(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train_loader = DataLoader(Photos(), shuffle=True)
        {}
            model(x).mean().backward()
            optimizer.step()
        """,
        "for x in train_loader:",
        "for _, x in zip(range(100), iter(train_loader)):",
    ),
    "one rank wraps the model again": (
        "H03",
        "suspect",
        """
        from accelerate import Accelerator

        def save(accelerator: Accelerator, model, path):
            if accelerator.is_main_process:
                plain = accelerator.unwrap_model(model)
                plain.save_pretrained(path)
                {}
        """,
        "model = accelerator.prepare(model)",
        "print(path)",
    ),
    "every rank writes the folder of a tokenizer": (
        "C03",
        "suspect",
        """
        from accelerate import Accelerator

        def main(model, tokenizer, loader):
            accelerator = Accelerator()
            model, loader = accelerator.prepare(model, loader)
            for batch in loader:
                accelerator.backward(model(batch))
            if {}:
                tokenizer.save_pretrained("out")
            if accelerator.is_main_process:
                print("done")
        """,
        "len(loader)",
        "accelerator.is_main_process",
    ),
    "every rank copies the code": (
        "C03",
        "suspect",
        """
        import shutil, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        def main(net, rank):
            dist.init_process_group("gloo")
            if {}:
                shutil.copytree("models", "out/models")
            return DDP(net)
        """,
        "net",
        "rank == 0",
    ),
    "a function that cleans up and that nothing calls": (
        "H17",
        "suspect",
        """
        import torch.distributed as dist

        def cleanup():
            dist.destroy_process_group()

        def main():
            dist.init_process_group("gloo")
            {}

        main()
        """,
        "pass",
        "cleanup()",
    ),
    "a metric of torcheval": (
        "S14",
        "suspect",
        """
        import torch.distributed as dist
        from torcheval import metrics
        from torcheval.metrics.toolkit import {}

        def evaluate(scores, labels):
            dist.init_process_group("gloo")
            curve = metrics.BinaryAUROC()
            curve.update(scores, labels)
            return curve.compute().item()
        """,
        "clone_metric",
        "sync_and_compute",
    ),
    "a sampler that shuffles only once": (
        "T02",
        "suspect",
        """
        import random
        from accelerate import Accelerator
        from torch.utils.data import Sampler

        class Groups(Sampler[list[int]]):
            def __init__(self, groups):
                self.groups = groups
                random.shuffle(self.groups)

            def __iter__(self):
                {}
                return iter(self.groups)
        """,
        "pass",
        "random.shuffle(self.groups)",
    ),
    "one function trains and tests": (
        "T01",
        "error",
        """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torch.utils.data import DataLoader, TensorDataset

        def run(loader, model, optimizer=None):
            for x, y in loader:
                loss = (model(x) - y).square().mean()
                if optimizer:
                    loss.backward()
                    optimizer.step()

        dist.init_process_group("gloo")
        model = DDP(torch.nn.Linear(2, 1))
        data = TensorDataset(torch.zeros(64, 2), torch.zeros(64, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        {}
        """,
        "loader = DataLoader(data, batch_size=8); run(loader, model, optimizer)",
        "test_loader = DataLoader(data, batch_size=8); run(test_loader, model)",
    ),
    "options that hide no sampler": (
        "T01",
        "suspect",
        """
        import torch, torch.distributed as dist
        from torch.utils.data import DataLoader

        def load(train_set, cuda, model):
            dist.init_process_group("gloo")
            wrap = torch.nn.parallel.DistributedDataParallel if cuda else torch.nn.DataParallel
            options = {"pin_memory": True, {}} if cuda else {}
            loader = DataLoader(train_set, batch_size=8, shuffle=True, **options)
            return loader, wrap(model)
        """,
        '"num_workers": 1',
        '"sampler": cuda',
    ),
    "weights that only rank 0 loads": (
        "S08",
        "error",
        """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        from data import loader, show

        dist.init_process_group("gloo")
        model = DDP(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if dist.get_rank() == 0:
            {}
        for x, y in loader:
            (model(x) - y).square().mean().backward()
            optimizer.step()
        if dist.get_rank() == 0:
            model.module.load_state_dict(torch.load("best.pt", map_location="cpu"))
            show(model.module)
        """,
        'model.module.load_state_dict(torch.load("best.pt", map_location="cpu"))',
        'print("start")',
    ),
    "a wrapper that nobody keeps": (
        "S06",
        "error",
        """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        from data import loader

        def build():
            model = torch.nn.Linear(2, 1)
            {}
            return model

        dist.init_process_group("gloo")
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in loader:
            (model(x) - y).square().mean().backward()
            optimizer.step()
        """,
        "DDP(model)",
        "model = DDP(model)",
    ),
    "another name for the loss": (
        "S13",
        "suspect",
        """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        from data import loader

        def mean(tensor):
            total = {}
            dist.all_reduce(total)
            return total / 2

        dist.init_process_group("gloo")
        model = DDP(torch.nn.Linear(2, 1))
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            shown = mean(loss)
            loss.backward()
        """,
        "tensor",
        "tensor.detach().clone()",
    ),
    "parts of a sharded model": (
        "H03",
        "suspect",
        """
        import torch, torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        def whole(model):
            return {name: one.full_tensor() for name, one in model.named_parameters()}

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        model = torch.nn.Linear(2, 1)
        fully_shard(model)
        {}
        """,
        "if rank == 0: torch.save(whole(model), 'last.pt')",
        "state = whole(model); rank or torch.save(state, 'last.pt')",
    ),
    "every rank uses the group that it belongs to": (
        "H04",
        "suspect",
        """
        import torch, torch.distributed as dist

        def main(group):
            dist.init_process_group("gloo")
            rank, x = dist.get_rank(), torch.ones(1)
            groups = [dist.new_group([0]), dist.new_group([1])]
            mine = {}
            if rank == 0:
                dist.all_reduce(x, group=mine)
                dist.broadcast(x, src=0, group=mine)
            else:
                dist.broadcast(x, src=1, group=mine)
                dist.all_reduce(x, group=mine)
        """,
        "group",
        "groups[rank]",
    ),
    "a loss of rows that this rank moves to its own device": (
        "H08",
        "error",
        """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        data = torch.arange(64.0).reshape(16, 4)
        model = DDP(torch.nn.Linear(4, 1).to(rank))
        for rows in {}:
            noise = torch.ones(4, device=rank)
            loss = model(rows.to(rank) + noise).square().mean()
            loss.backward()
            if loss.item() < 0.1:
                break
        dist.destroy_process_group()
        """,
        "data[rank::2]",
        "data",
    ),
    "a helper that exits": (
        "H02",
        "suspect",
        """
        import os, sys, torch.distributed as dist

        def check(rank):
            if {} not os.path.isdir("data"):
                sys.exit(0)

        dist.init_process_group("gloo")
        check(dist.get_rank())
        dist.barrier()
        dist.destroy_process_group()
        """,
        "rank == 0 and",
        "",
    ),
    "an object that needs the group": (
        "L06",
        "error",
        """
        import torch.distributed as dist
        from torch.utils.data import DataLoader, DistributedSampler
        from data import train_set

        class App:
            def __init__(self):
                {}
                self.rank = dist.get_rank()

            def load(self):
                self.loader = DataLoader(train_set, sampler=DistributedSampler(train_set))

            def start(self):
                dist.init_process_group("gloo")

        App()
        dist.destroy_process_group()
        """,
        "self.load(); self.start()",
        "self.start(); self.load()",
    ),
    "the number of micro-batches is a field whose default is 1": (
        "G02",
        "warning",
        """
        from dataclasses import dataclass
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        @dataclass
        class Config:
            every: int = {}

        def train(config: Config):
            dist.init_process_group("gloo")
            model = DDP(torch.nn.Linear(2, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for i, x in enumerate(torch.zeros(40, 4, 2)):
                (model(x).mean() / config.every).backward()
                if (i + 1) % config.every == 0:
                    optimizer.step()
                    optimizer.zero_grad()

        train(parse())
        """,
        "8",
        "1",
    ),
    "the number of micro-batches is 1 unless a file changes it": (
        "G02",
        "warning",
        """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        config = read()
        every = int(config.get("every", {}))
        dist.init_process_group("gloo")
        model = DDP(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i, x in enumerate(torch.zeros(40, 4, 2)):
            (model(x).mean() / every).backward()
            if (i + 1) % every == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
        "8",
        "1",
    ),
    "a forward pass without gradients prepares another model's pass": (
        "G02",
        "warning",
        """
        from contextlib import nullcontext
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        dist.init_process_group("gloo")
        model, critic = DDP(torch.nn.Linear(2, 1)), torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
        for i, x in enumerate(torch.zeros(40, 4, 2)):
            with {}:
                made = model(x)
            (critic(made).mean() / 4).backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
        "nullcontext()",
        "torch.no_grad()",
    ),
    "the loss is divided before its mean": (
        "G01",
        "error",
        """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        dist.init_process_group("gloo")
        model = DDP(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i, x in enumerate(torch.zeros(40, 4, 2)):
            losses = model(x)
            losses = losses{}
            losses = losses.mean()
            losses.backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
        "",
        " / 4",
    ),
    "Adam ignores the scale of the gradients": (
        "G01",
        "error",
        """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        dist.init_process_group("gloo")
        model = DDP(torch.nn.Linear(2, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for i, x in enumerate(torch.zeros(40, 4, 2)):
            model(x).mean().backward()
            if (i + 1) % 4 == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), {})
                optimizer.step()
                optimizer.zero_grad()
        """,
        "1.0",
        "1e6",
    ),
    "a sampler shuffles before another divides its order by rank": (
        "S10",
        "warning",
        """
        import random, torch, torch.distributed as dist
        from itertools import islice
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torch.utils.data import DataLoader, Sampler

        class Shuffled(Sampler):
            def __iter__(self):
                order = list(range(100))
                random.shuffle(order)
                return iter(order)

        class Divided(Sampler):
            def __iter__(self):
                return islice(iter(Shuffled()), {}, 100, 2)

        dist.init_process_group("gloo")
        torch.manual_seed(0)
        random.seed(0)
        model = DDP(torch.nn.Linear(2, 1))
        for x in DataLoader(torch.zeros(100, 2), sampler=Divided()):
            model(x).mean().backward()
        """,
        "0",
        "dist.get_rank()",
    ),
    "the loop over epochs runs once": (
        "T02",
        "warning",
        """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torch.utils.data import DataLoader, DistributedSampler

        def train(model, loaders):
            for x in loaders["train"]:
                model(x).mean().backward()

        dist.init_process_group("gloo")
        data = torch.zeros(40, 2)
        loaders = {"train": DataLoader(data, sampler=DistributedSampler(data))}
        model = DDP(torch.nn.Linear(2, 1))
        for epoch in range({}):
            train(model, loaders)
        """,
        "10",
        "1",
    ),
    "Slurm shows each rank one GPU": (
        "C04",
        "warning",
        """
        import os
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        dist.init_process_group("nccl")
        device = torch.device("cuda", {})
        model = DDP(torch.nn.Linear(2, 1).to(device))
        model.load_state_dict(torch.load("checkpoint.pt"))
        """,
        'int(os.environ["LOCAL_RANK"])',
        "torch.cuda.current_device()",
    ),
}


def fill(text, part):
    """Put a part into the first placeholder."""
    return text.replace("{}", part, 1)


def find(folder, text):
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text))
    return {(finding.id, finding.severity) for finding in apply("script", Script(path))}


@pytest.mark.parametrize("name", PAIRS)
def test_only_the_mistake_is_reported(name, tmp_path):
    id, severity, text, mistake, healthy = PAIRS[name]
    assert (id, severity) in find(tmp_path, fill(text, mistake))
    assert (id, severity) not in find(tmp_path, fill(text, healthy))


def test_nothing_is_certain_after_evaluation_was_cut_short(tmp_path, monkeypatch):
    # In a large project, a test's value was known on one rank only, and H03 concluded that the test
    # depends on the rank.
    text = """
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.barrier()
    """
    assert ("H03", "error") in find(tmp_path, text)
    monkeypatch.setattr("paralab.doctor.static.values.MOST_EVALUATIONS", 3)
    assert "error" not in {severity for _, severity in find(tmp_path, text)}


def test_names_that_depend_on_each_other(tmp_path):
    # The doctor once followed every path through these definitions, which took minutes for a few
    # lines.
    loop = (
        "while input():"
        + """
    if input(): x = y
    if input(): y = x"""
        * 20
    )
    find(tmp_path, f"import other, torch\ntorch.amp.GradScaler()\n{loop}\na, b = x\nother.use(a)\n")


def test_a_library_is_known_by_name_even_if_its_source_is_here(tmp_path):
    # The doctor once checked each example in the accelerate repository together with 39 files of
    # the library.
    (tmp_path / "setup.py").touch()
    package = tmp_path / "src" / "accelerate"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from .state import rank\n\nclass Accelerator: ...\n")
    (package / "state.py").write_text("rank = 0\n")
    (tmp_path / "example.py").write_text("from accelerate import Accelerator\nAccelerator()\n")
    example = Script(tmp_path / "example.py")
    assert [call.target for call in example.calls] == ["accelerate.Accelerator"]
    assert len(example.modules) == 1
    assert len(Script(package / "__init__.py").modules) == 2


def test_evidence_in_a_test_says_nothing_about_other_code(tmp_path):
    # A test's loader of 10 samples became the evidence against a trainer that takes any loader.
    (tmp_path / "trainer.py").write_text(
        textwrap.dedent("""
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel as DDP

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.BatchNorm2d(3)

        model = DDP(Net())
        """)
    )
    loader = """
    import torch
    from torch.utils.data import DataLoader, DistributedSampler
    from trainer import model

    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(loader))
    (tmp_path / "test_train.py").write_text(textwrap.dedent(loader))
    found = {
        name: {(one.id, one.severity) for one in apply("script", Script(tmp_path / name))}
        for name in ("train.py", "test_train.py")
    }
    assert ("S09", "warning") in found["train.py"]
    assert ("S09", "suspect") in found["test_train.py"]
