"""Idioms of training loops, in a few lines each: correct code that looks like a mistake with data,
accumulation, or precision, and mistakes in unusual forms."""

import textwrap
from pathlib import Path

import pytest

from paralab.doctor.catalog import apply
from paralab.doctor.static.script import Script
from tests.doctor.cases import marks_in

START = """
import argparse, contextlib, itertools, math, os
from functools import partial
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
loader = DataLoader(data, batch_size=8, shuffle=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
"""
SCALER = START + "scaler = torch.amp.GradScaler('cuda')\n"
RANKS = """
import contextlib, os
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""

HEALTHY = {
    "two models take turns": """
other = nn.Linear(4, 1)
second = torch.optim.SGD(other.parameters(), lr=0.1)
for i, (x, y) in enumerate(loader):
    if i % 2:
        second.zero_grad()
        F.mse_loss(other(x), y).backward()
        second.step()
    else:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
""",
    "windows that go on over the epochs": """
step = 0
for epoch in range(3):
    for x, y in loader:
        step += 1
        (F.mse_loss(model(x), y) / 3).backward()
        if step % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
""",
    "windows of an object that go on over the epochs": """
class Trainer:
    def __init__(self):
        self.seen = 0

    def epoch(self):
        for x, y in loader:
            self.seen += 1
            (F.mse_loss(model(x), y) / 3).backward()
            if self.seen == 3:
                optimizer.step()
                optimizer.zero_grad()
                self.seen = 0

trainer = Trainer()
for epoch in range(3):
    trainer.epoch()
""",
    "a sum of the losses of the samples": """
for i, (x, y) in enumerate(loader):
    losses = [F.mse_loss(model(a), b) for a, b in zip(x, y)]
    (sum(losses) / 32).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "a sum of terms of which nothing is known": """
from somewhere import losses_of
for i, (x, y) in enumerate(loader):
    terms = losses_of(model(x), y)
    sum(terms.values()).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "the sum over the steps of a sequence": """
state, losses = torch.zeros(1), []
for t in range(12):
    state = model(torch.cat([state, torch.randn(3)]))
    losses.append(state.square().mean())
    if (t + 1) % 4 == 0:
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
        state, losses = state.detach(), []
""",
    "a log every n steps": """
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (i + 1) % 10 == 0:
            print(loss.item())
    scheduler.step()
""",
    "a warmup that steps the schedule with the optimizer": """
for i, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    scheduler.step()
""",
    "a discriminator that trains more often": """
critic = nn.Linear(1, 1)
critic_optimizer = torch.optim.Adam(critic.parameters())
for i, (x, y) in enumerate(loader):
    critic_optimizer.zero_grad()
    (critic(model(x).detach()).mean() - critic(y).mean()).backward()
    critic_optimizer.step()
    if i % 5 == 0:
        optimizer.zero_grad()
        (-critic(model(x)).mean()).backward()
        optimizer.step()
""",
    "a step that is left out on overflow": """
for i, (x, y) in enumerate(loader):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    if torch.isfinite(loss):
        optimizer.step()
""",
    "weights by hand": """
every = 4
for i, (x, y) in enumerate(loader):
    loss = F.mse_loss(model(x), y)
    weight = 1.0 / every
    (weight * loss).backward()
    if (i + 1) % every == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "weighted by what a batch has": """
total = 32
for i, (x, y) in enumerate(loader):
    loss = F.mse_loss(model(x), y)
    (loss * len(x) / total).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "divided in place": """
every = 4
for i, (x, y) in enumerate(loader):
    loss = F.mse_loss(model(x), y)
    loss.div_(every)
    loss.backward()
    if (i + 1) % every == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "a loss that counts its tokens": """
every = 4
for i, (x, y) in enumerate(loader):
    loss = F.mse_loss(model(x), y, reduction="sum") / 32
    loss.backward()
    if (i + 1) % every == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "several losses, one step": """
for x, y in loader:
    optimizer.zero_grad()
    out = model(x)
    for part in (F.l1_loss, F.mse_loss):
        part(out, y).backward(retain_graph=True)
    optimizer.step()
""",
    "a closure": """
for x, y in loader:
    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss
    optimizer.step(closure)
""",
    "a mean where there are several GPUs": """
class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 1)
    def forward(self, x, y):
        return F.mse_loss(self.inner(x), y)

net = WithLoss().cuda()
if torch.cuda.device_count() > 1:
    net = nn.DataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in loader:
    loss = net(x, y)
    if torch.cuda.device_count() > 1:
        loss = loss.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "divided only where there is a window": """
parser = argparse.ArgumentParser()
parser.add_argument("--every", type=int, default=1)
args = parser.parse_args()
for i, (x, y) in enumerate(loader):
    loss = F.mse_loss(model(x), y)
    if args.every > 1:
        loss = loss / args.every
    loss.backward()
    if (i + 1) % args.every == 0 or i == len(loader) - 1:
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
""",
    "the window by islice": """
batches = iter(loader)
while window := list(itertools.islice(batches, 4)):
    for x, y in window:
        (F.mse_loss(model(x), y) / len(window)).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
}

WITH_SCALER = {
    "half of a copy of a model from elsewhere": """
import copy
import zoo

class Average:
    def __init__(self, net):
        self.net = copy.deepcopy(net)

net = zoo.load(os.environ["NET"])
net = net[-1] if isinstance(net, list) else net
average = Average(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.mse_loss(net(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
torch.save({"net": copy.deepcopy(average.net).half()}, "last.pt")
""",
    "a flag that is off in this call": """
def build(half):
    net = nn.Linear(4, 1).cuda()
    return net.half() if half else net

net = build(half=False)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in loader:
    opt.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = F.mse_loss(net(x.cuda()), y.cuda())
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
""",
    "clipping only where asked": """
for x, y in loader:
    with torch.autocast("cuda"):
        loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    if os.environ.get("CLIP"):
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
    "a scaler that may be missing": """
if os.environ.get("FULL"):
    scaler = None
for x, y in loader:
    with torch.autocast("cuda", enabled=scaler is not None):
        loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    if scaler is None:
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
""",
    "asked twice whether there is a scaler": """
use = bool(os.environ.get("AMP"))
for x, y in loader:
    with torch.autocast("cuda", enabled=use):
        loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    if use:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
    else:
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if use:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
""",
    "a wrapper that does it all": """
class Scaling:
    def __init__(self):
        self._scaler = torch.cuda.amp.GradScaler()

    def __call__(self, loss, optimizer, parameters, clip=None, update=True):
        self._scaler.scale(loss).backward()
        if update:
            if clip is not None:
                self._scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(parameters, clip)
            self._scaler.step(optimizer)
            self._scaler.update()

scaling = Scaling()
every = 2
for i, (x, y) in enumerate(loader):
    with torch.cuda.amp.autocast():
        loss = F.mse_loss(model(x), y)
    loss /= every
    scaling(loss, optimizer, model.parameters(), clip=1.0, update=(i + 1) % every == 0)
    if (i + 1) % every == 0:
        optimizer.zero_grad()
""",
    "two optimizers and one scaler": """
other = nn.Linear(4, 1)
second = torch.optim.Adam(other.parameters())
for x, y in loader:
    with torch.autocast("cuda"):
        loss = F.mse_loss(model(x) + other(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(second)
    nn.utils.clip_grad_norm_([*model.parameters(), *other.parameters()], 1.0)
    scaler.step(optimizer)
    scaler.step(second)
    scaler.update()
    optimizer.zero_grad()
    second.zero_grad()
""",
    "bfloat16 without scaling": """
scaler = torch.amp.GradScaler("cuda", enabled=False)
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
    "half precision for inference": """
for x, y in loader:
    with torch.autocast("cuda"):
        loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
exported = nn.Linear(4, 1).half()
""",
}

WITH_RANKS = {
    "an argument tells whether to synchronize": """
def micro(x, y, last):
    if last:
        (F.mse_loss(model(x), y) / 2).backward()
    else:
        with model.no_sync():
            (F.mse_loss(model(x), y) / 2).backward()

for i, (x, y) in enumerate(loader):
    last = (i + 1) % 2 == 0
    micro(x, y, last)
    if last:
        optimizer.step()
        optimizer.zero_grad()
""",
    "means over the loader are averaged": """
for epoch in range(3):
    sampler.set_epoch(epoch)
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    shown = torch.tensor(total / len(loader))
    dist.all_reduce(shown)
    shown /= world
    print(shown.item())
""",
    "sums over the dataset are added up": """
for epoch in range(3):
    sampler.set_epoch(epoch)
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    shown = torch.tensor(total / len(data))
    dist.all_reduce(shown)
    print(shown.item())
""",
    "a look at the gradients of the module inside": """
def look(batches):
    net = DDP(nn.Linear(4, 1))
    for x, y in batches:
        F.mse_loss(net.module(x), y).backward()

for x, y in loader:
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
""",
    "a context manager that yields in both branches": """
@contextlib.contextmanager
def quiet(sync):
    if sync:
        yield
    else:
        with model.no_sync():
            yield

for i, (x, y) in enumerate(loader, 1):
    last = i % 4 == 0 or i == len(loader)
    with quiet(last):
        (F.mse_loss(model(x), y) / 4).backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
""",
    "the last micro-batch has a branch of its own": """
for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        if not (i + 1) % 4 or i + 1 == len(loader):
            (F.mse_loss(model(x), y) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with model.no_sync():
                (F.mse_loss(model(x), y) / 4).backward()
""",
    "set_epoch through the loader": """
for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
""",
    "set_epoch where there is one": """
for epoch in range(3):
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
""",
    "a part of the data per rank": """
class Shard(Dataset):
    def __init__(self, data, part, parts):
        self.rows = list(range(part, len(data) // parts * parts, parts))
        self.data = data
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, i):
        return self.data[self.rows[i]]

for x, y in DataLoader(Shard(data, rank, world), batch_size=8, shuffle=True):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
""",
    "each rank takes its rows of a batch": """
whole = DataLoader(data, batch_size=8 * world, drop_last=True)
for x, y in whole:
    x, y = x[rank::world], y[rank::world]
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
""",
    "random numbers that differ by the rank": """
torch.manual_seed(rank)
own = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), batch_size=8)
for x, y in own:
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
""",
    "a stream that splits itself": """
class Stream(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        workers = info.num_workers if info else 1
        mine = dist.get_rank() * workers + (info.id if info else 0)
        for i in range(64):
            if i % (dist.get_world_size() * workers) == mine:
                yield data[i]

for x, y in DataLoader(Stream(), batch_size=8):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
""",
    "moved to the rank's device": """
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        x, y = x.to(rank), y.to(rank)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
""",
    "local steps, averaged in place": """
for i, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    with model.no_sync():
        F.mse_loss(model(x), y).backward()
    optimizer.step()
    if (i + 1) % 4 == 0:
        for p in model.parameters():
            dist.all_reduce(p.data)
            p.data /= world
""",
    "local steps, averaged by a helper from the state": """
def mean_of_ranks(tensor):
    tensor = tensor.detach().clone()
    dist.all_reduce(tensor)
    return tensor / world

def average(net):
    net.load_state_dict({name: mean_of_ranks(tensor) for name, tensor in net.state_dict().items()})

for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        with model.no_sync():
            F.mse_loss(model(x), y).backward()
        optimizer.step()
    average(model.module)
""",
    "local steps past the wrapper, averaged as one vector": """
from torch.nn.utils import parameters_to_vector, vector_to_parameters
for x, y in loader:
    optimizer.zero_grad()
    F.mse_loss(model.module(x), y).backward()
    optimizer.step()
    weights = parameters_to_vector(model.parameters())
    dist.all_reduce(weights)
    vector_to_parameters(weights / world, model.parameters())
""",
    "local steps with torch's averager": """
import torch.distributed.algorithms.model_averaging.averagers as averagers
averager = averagers.PeriodicModelAverager(period=4, warmup_steps=0)
for x, y in loader:
    optimizer.zero_grad()
    with model.no_sync():
        F.mse_loss(model(x), y).backward()
    optimizer.step()
    averager.average_parameters(model.parameters())
""",
    "local steps with torch's optimizer for them": """
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
outer = PostLocalSGDOptimizer(optim=optimizer, averager=PeriodicModelAverager(period=4, warmup_steps=0))
for x, y in loader:
    outer.zero_grad()
    with model.no_sync():
        F.mse_loss(model(x), y).backward()
    outer.step()
""",
    "gradients exchanged by hand in the end": """
for x, y in loader:
    optimizer.zero_grad()
    with model.no_sync():
        F.mse_loss(model(x), y).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
""",
    "the first rank steps for all": """
for x, y in loader:
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    if rank == 0:
        optimizer.step()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
""",
    "no_sync by hand": """
every = 4
for i, (x, y) in enumerate(loader):
    if (i + 1) % every != 0 and i + 1 < len(loader):
        with model.no_sync():
            (F.mse_loss(model(x), y) / every).backward()
    else:
        (F.mse_loss(model(x), y) / every).backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    "no_sync as a function that may be nothing": """
every = 4
for i, (x, y) in enumerate(loader):
    last = (i + 1) % every == 0 or i == len(loader) - 1
    quiet = model.no_sync if not last else contextlib.nullcontext
    with quiet():
        (F.mse_loss(model(x), y) / every).backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
""",
    "attributes through the wrapper": """
model.module.note = "kept"
print(model.module.note, model.device, model.module.weight.shape)
for x, y in loader:
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
""",
}

BROKEN = {
    "the window in a while loop": """
seen = 0
batches = iter(loader)
while seen < 8:
    x, y = next(batches)
    loss = F.mse_loss(model(x), y)
    loss.backward()  # finds G01
    seen += 1
    if seen % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "the window by a boolean": """
every = 4
for i, (x, y) in enumerate(loader):
    loss = F.mse_loss(model(x), y)
    loss.backward()  # finds G01
    is_update = not (i + 1) % every
    if not is_update:
        continue
    optimizer.step()
    optimizer.zero_grad()
""",
    "a loss of two terms": """
every = 4
for i, (x, y) in enumerate(loader):
    out = model(x)
    loss = F.mse_loss(out, y) + 0.1 * F.l1_loss(out, y)
    loss.backward()  # finds G01
    if (i + 1) % every == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "chunks of a batch": """
for x, y in loader:
    optimizer.zero_grad()
    for a, b in zip(x.chunk(4), y.chunk(4)):
        loss = nn.MSELoss()(model(a), b)
        loss.backward()  # finds G01
    optimizer.step()
""",
    "cleared before the window": """
every = 4
for i, (x, y) in enumerate(loader):
    if i % every == 0:
        optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()  # finds G01
    if i % every == every - 1:
        optimizer.step()
""",
    "a helper that divides something else": """
def mean_of(values):
    return sum(values) / len(values)

for i, (x, y) in enumerate(loader):
    loss = F.mse_loss(model(x), y)
    print(mean_of([loss.item()]))
    loss.backward()  # finds G01
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "a schedule in the loop": """
for i, (x, y) in enumerate(loader):
    (F.mse_loss(model(x), y) / 4).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()  # finds G09
""",
}

BROKEN_WITH_SCALER = {
    "unscaled after clipping": """
for x, y in loader:
    with torch.autocast("cuda"):
        loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # finds A01
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
    "scaled in a lambda": """
back = lambda value: scaler.scale(value).backward()
for x, y in loader:
    with torch.autocast("cuda"):
        loss = F.mse_loss(model(x), y)
    back(loss)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)  # finds A01
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
    "backward under autocast by a decorator": """
@torch.autocast("cuda", dtype=torch.float16)
def step(x, y):
    loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()  # finds A09
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()

for x, y in loader:
    step(x, y)
""",
    "the optimizer past the scaler": """
def update(opt):
    opt.step()  # finds A04
    opt.zero_grad()

for x, y in loader:
    with torch.autocast("cuda"):
        loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    update(optimizer)
""",
    "an update that is forgotten in the window": """
for i, (x, y) in enumerate(loader):
    with torch.autocast("cuda"):
        loss = F.mse_loss(model(x), y) / 2
    scaler.scale(loss).backward()
    if (i + 1) % 2 == 0:
        scaler.step(optimizer)  # finds A03
        optimizer.zero_grad()
""",
}

BROKEN_WITH_RANKS = {
    "means over the loader are added up": """
for epoch in range(3):
    sampler.set_epoch(epoch)
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    shown = torch.tensor(total / len(loader))
    dist.all_reduce(shown)  # finds S14
    print(shown.item())
""",
    "both branches undivided, the last micro-batch in its own": """
for i, (x, y) in enumerate(loader):
    if not (i + 1) % 4 or i + 1 == len(loader):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        with model.no_sync():
            F.mse_loss(model(x), y).backward()  # finds G01
""",
    "a schedule that also runs before the window is full": """
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
seen = 0
for x, y in loader:
    seen += 1
    if seen % 4 and seen < len(loader):
        with model.no_sync():
            (F.mse_loss(model(x), y) / 4).backward()
        schedule.step()  # finds G09
        continue
    (F.mse_loss(model(x), y) / 4).backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
""",
    "an epoch loop in a function": """
def fit(loader, epochs):
    for _ in range(epochs):
        for x, y in loader:  # finds T02
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()

fit(loader, 3)
""",
    "a loader of all, with a device": """
whole = DataLoader(data, 8, num_workers=0)  # finds T01
for x, y in whole:
    x = x.to(rank)
    optimizer.zero_grad()
    F.mse_loss(model(x), y.to(rank)).backward()
    optimizer.step()
""",
    "a stream of workers only": """
class Stream(IterableDataset):
    def __iter__(self):  # finds T04
        info = torch.utils.data.get_worker_info()
        first, stride = (info.id, info.num_workers) if info else (0, 1)
        for i in range(first, 64, stride):
            yield data[i]

for x, y in DataLoader(Stream(), batch_size=8):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
""",
    "no_sync in every turn of the window": """
for window in range(2):
    sampler.set_epoch(window)
    with model.no_sync():
        for x, y in loader:
            (F.mse_loss(model(x), y) / len(loader)).backward()
    optimizer.step()  # finds G04
    optimizer.zero_grad()
""",
    "the exchange of every micro-batch": """
every = 2
for i, (x, y) in enumerate(loader):
    loss = F.mse_loss(model(x), y) / every
    loss.backward()  # finds G02
    if (i + 1) % every == 0 or i + 1 == len(loader):
        optimizer.step()
        optimizer.zero_grad()
""",
    "first weights are sent, and a norm is shown, but nothing is averaged": """
for p in model.parameters():
    dist.broadcast(p.data, src=0)
for x, y in loader:
    optimizer.zero_grad()
    with model.no_sync():
        F.mse_loss(model(x), y).backward()
    optimizer.step()  # finds G04
    size = sum(p.norm() for p in model.parameters())
    dist.all_reduce(size)
""",
    "a count of what the model has right is no exchange of it": """
right = torch.zeros(1)
for x, y in loader:
    optimizer.zero_grad()
    with model.no_sync():
        out = model(x)
        F.mse_loss(out, y).backward()
    optimizer.step()  # finds G04
    right += (model.module(x) > 0).sum()
    dist.all_reduce(right)
""",
    "no_sync by hand, and nothing for the last window": """
every = 3
for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        if (i + 1) % every:
            with model.no_sync():
                (F.mse_loss(model(x), y) / every).backward()
        else:
            (F.mse_loss(model(x), y) / every).backward()
            optimizer.step()  # finds G06
            optimizer.zero_grad()
""",
    "an attribute of the model inside": """
print(model.in_features)  # finds D05
for x, y in loader:
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
""",
}

ALL_HEALTHY = {
    **{name: START + text for name, text in HEALTHY.items()},
    **{name: SCALER + text for name, text in WITH_SCALER.items()},
    **{name: RANKS + text + "dist.destroy_process_group()\n" for name, text in WITH_RANKS.items()},
}
ALL_BROKEN = {
    **{name: START + text for name, text in BROKEN.items()},
    **{name: SCALER + text for name, text in BROKEN_WITH_SCALER.items()},
    **{
        name: RANKS + text + "dist.destroy_process_group()\n"
        for name, text in BROKEN_WITH_RANKS.items()
    },
}


def findings(text, tmp_path):
    path = Path(tmp_path) / "train.py"
    path.write_text(text)
    return path, apply("script", Script(path))


@pytest.mark.parametrize("name", ALL_HEALTHY)
def test_a_healthy_idiom_is_left_alone(name, tmp_path):
    _, found = findings(ALL_HEALTHY[name], tmp_path)
    assert found == []


@pytest.mark.parametrize("name", ALL_BROKEN)
def test_a_mistake_is_found_in_unusual_clothes(name, tmp_path):
    path, found = findings(ALL_BROKEN[name], tmp_path)
    assert {(mark.id, mark.line) for mark in marks_in(path)} == {
        (finding.id, finding.line) for finding in found
    }


EPOCHS = "for epoch in range(3):"


@pytest.mark.parametrize(
    ("start", "severity", "fate"),
    [
        ("", "warning", "are never used."),
        (
            EPOCHS,
            "error",
            "are added to the first step of the next epoch; those of the last epoch are never used.",
        ),
        (
            f"{EPOCHS}\n    optimizer.zero_grad()",
            "warning",
            "are never used: `optimizer.zero_grad()` in line 15 clears them.",
        ),
    ],
)
def test_what_becomes_of_the_rest_of_an_epoch_is_said_as_it_is(start, severity, fate, tmp_path):
    turns = """\
    for i, (x, y) in enumerate(loader):
        (F.mse_loss(model(x), y) / 3).backward()
        if (i + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
    _, (found,) = findings(
        START + start + "\n" + (turns if start else textwrap.dedent(turns)), tmp_path
    )
    assert (found.id, found.severity) == ("G06", severity)
    assert found.why.endswith(f"There are 8 batches: the gradients of the last 2 {fate}")


@pytest.mark.parametrize(
    ("given", "severity"), [("", "error"), ("averaging.Every(2).after(model)", "suspect")]
)
def test_a_library_that_gets_the_model_may_average_it(given, severity, tmp_path):
    text = f"""import averaging
for x, y in loader:
    optimizer.zero_grad()
    with model.no_sync():
        F.mse_loss(model(x), y).backward()
    optimizer.step()
    {given}
dist.destroy_process_group()
"""
    _, (found,) = findings(RANKS + text, tmp_path)
    assert (found.id, found.severity) == ("G04", severity)
    assert ("certain if `averaging.Every(2).after` (line" in found.why) is bool(given)
