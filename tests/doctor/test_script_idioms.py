"""Idioms from real training scripts, in a few lines each: correct code that looks like a mistake,
and mistakes in unusual forms."""

from pathlib import Path

import pytest

from paralab.doctor.catalog import apply
from paralab.doctor.static.script import Script
from tests.doctor.cases import marks_in

START = """
import argparse, contextlib, copy, itertools, math, os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--out", default="out.pt")
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
data = TensorDataset(torch.zeros(64, 4), torch.zeros(64, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
checks = DataLoader(data, batch_size=16)
plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
model = DDP(plain)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train_epoch(epoch):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss

"""
END = "\ndist.destroy_process_group()\n"

HEALTHY = {
    "the window's counter is an attribute": """
class Fit:
    def __init__(self, every):
        self.every, self.seen = every, 0

    def epoch(self, epoch):
        sampler.set_epoch(epoch)
        for x, y in loader:
            last = (self.seen + 1) % self.every == 0
            with contextlib.nullcontext() if last else model.no_sync():
                (nn.functional.mse_loss(model(x), y) / self.every).backward()
            self.seen += 1
            if self.seen % self.every == 0:
                optimizer.step()
                optimizer.zero_grad()

fit = Fit(4)
for epoch in range(2):
    fit.epoch(epoch)
""",
    "who saves is told by what a context gives": """
class World:
    def __init__(self, number):
        self.number = number

    @property
    def is_main(self):
        return self.number == 0

@contextlib.contextmanager
def world_of():
    yield World(dist.get_rank())
    dist.barrier()

with world_of() as here:
    train_epoch(0)
    if here.is_main:
        torch.save(plain.state_dict(), args.out)
""",
    "others have nothing to save with": """
class Saver:
    def __call__(self, state):
        torch.save(state, args.out)

class Nothing:
    def __call__(self, state):
        pass

keep = Saver() if rank == 0 else Nothing()
store = torch.save if rank == 0 else (lambda *given: None)
train_epoch(0)
keep(plain.state_dict())
store(plain.state_dict(), "other.pt")
""",
    "the best rank saves": """
loss = train_epoch(0).detach()
losses = [torch.zeros(()) for _ in range(world)]
dist.all_gather(losses, loss)
if torch.stack(losses).argmin().item() == rank:
    torch.save(plain.state_dict(), args.out)
""",
    "settings that were broadcast": """
box = [{"width": 16} if rank == 0 else None]
dist.broadcast_object_list(box)
wide = DDP(nn.Linear(4, box[0]["width"]))
if box[0] == "again":
    dist.barrier()
""",
    "reduced one after the other": """
for epoch in range(9):
    loss, count = train_epoch(epoch).detach().clone(), torch.tensor(1.0)
    for each in (loss, count):
        dist.all_reduce(each)
    sums = {"loss": loss.clone(), "count": count.clone()}
    for name in sums:
        dist.all_reduce(sums[name])
    if (loss / count).item() < 0.1 or sums["loss"].item() < 1:
        break
""",
    "all evaluate the same": """
def check():
    with torch.no_grad():
        return sum(nn.functional.mse_loss(plain(x), y).item() for x, y in checks)

for epoch in range(9):
    train_epoch(epoch)
    if check() < 0.1:
        break
""",
    "they meet before some leave": """
def finish():
    loss = train_epoch(0).detach().clone()
    dist.reduce(loss, 0)
    if rank != 0:
        dist.barrier()
        return
    print(loss / world)
    dist.barrier()

finish()
""",
    "layers by number": """
class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer0 = nn.Linear(4, 4)
        self.layer1 = nn.Linear(4, 1)

    def forward(self, x):
        for number in range(2):
            x = getattr(self, f"layer{number}")(x)
        return x

tower = DDP(Tower())
""",
    "frozen for the export": """
train_epoch(0)
for p in model.parameters():
    p.requires_grad_(False)
""",
    "an attack on the input": """
for x, y in loader:
    x.requires_grad_()
    nn.functional.mse_loss(plain(x), y).backward()
    worse = (x + x.grad.sign()).detach()
    optimizer.zero_grad()
    nn.functional.mse_loss(model(worse), y).backward()
    optimizer.step()
""",
    "statistics without gradients in the loss": """
for x, y in loader:
    out = model(x)
    with torch.no_grad():
        centre = out.mean(0)
        dist.all_reduce(centre)
        centre /= world
    optimizer.zero_grad()
    nn.functional.mse_loss(out - centre, y).backward()
    optimizer.step()
""",
    "one process first": """
@contextlib.contextmanager
def first(local_rank):
    if local_rank not in (-1, 0):
        dist.barrier()
    yield
    if local_rank == 0:
        dist.barrier()

with first(args.local_rank):
    words = open("words.txt").read()
for epoch in range(2):
    train_epoch(epoch)
""",
    "first waits, then the others": """
if rank != 0:
    dist.barrier()
words = open("words.txt").read()
if rank == 0:
    dist.barrier()
""",
    "both ways call the same": """
parts = [torch.zeros(4) for _ in range(world)]
mine = torch.zeros(4)
if rank == 0:
    dist.gather(mine, parts)
else:
    dist.gather(mine)
""",
    "a group of its own": """
pair = dist.new_group([0, 1])
if rank < 2:
    dist.all_reduce(torch.zeros(1), group=pair)
""",
    "an argument of one rank": """
found = [None] * world if rank == 0 else None
dist.gather_object(rank, found, dst=0)
if rank == 0:
    print(found)
""",
    "a list of one rank": """
names = ["a", "b"] if rank == 0 else [None, None]
dist.broadcast_object_list(names, src=0)
""",
    "sorted names": """
values = {"loss": torch.zeros(1), "error": torch.zeros(1)}
for name in sorted(set(values)):
    dist.all_reduce(values[name])
    values[name] /= world
""",
    "stop by the first rank's word": """
stop = torch.zeros(1)
for epoch in range(9):
    loss = train_epoch(epoch)
    if rank == 0:
        stop.fill_(float(loss < 0.1))
    dist.broadcast(stop, 0)
    if stop.item():
        break
""",
    "stop by all ranks' words": """
for epoch in range(9):
    loss = train_epoch(epoch)
    words = [None] * world
    dist.all_gather_object(words, loss.item())
    if sum(words) / world < 0.1:
        break
""",
    "the mean of all ranks decides": """
def mean_over_ranks(value):
    value = value.detach().clone()
    dist.all_reduce(value, op=dist.ReduceOp.SUM)
    value /= world
    return value

for epoch in range(9):
    loss = mean_over_ranks(train_epoch(epoch))
    if loss.item() < 0.1:
        break
""",
    "a failure ends all": """
for x, y in loader:
    loss = nn.functional.mse_loss(model(x), y)
    if not math.isfinite(loss.item()):
        print("not finite")
        sys.exit(1)
    loss.backward()
""",
    "a number of steps": """
step = 0
while True:
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        step += 1
        if step >= 100:
            break
    if step >= 100:
        break
""",
    "a progress bar of one rank": """
from tqdm import tqdm
batches = tqdm(loader) if rank == 0 else loader
for x, y in batches:
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        batches.set_postfix(loss=loss.item())
""",
    "an average of the weights on one rank": """
average = copy.deepcopy(model.module)
for p in average.parameters():
    p.requires_grad_(False)
average.eval()
for epoch in range(2):
    train_epoch(epoch)
    if rank == 0:
        with torch.no_grad():
            print(sum(average(x).sum() for x, y in checks))
""",
    "saved by one of each machine": """
ngpus = torch.cuda.device_count()
for epoch in range(2):
    train_epoch(epoch)
    if rank % ngpus == 0:
        torch.save(model.module.state_dict(), args.out)
""",
    "saved under the rank": """
train_epoch(0)
torch.save(optimizer.state_dict(), f"optimizer-{rank}.pt")
""",
    "saved by a helper": """
def is_main():
    return not dist.is_initialized() or dist.get_rank() == 0

def save_on_main(*things, **named):
    if is_main():
        torch.save(*things, **named)

train_epoch(0)
save_on_main({"model": model.module.state_dict()}, args.out)
""",
    "the wrapper is saved and read by the wrapper": """
train_epoch(0)
if rank == 0:
    torch.save(model.state_dict(), args.out)
dist.barrier()
model.load_state_dict(torch.load(args.out, map_location="cpu"))
""",
    "the module under its own name": """
without = model.module
print(sum(p.numel() for p in without.parameters() if p.requires_grad))
train_epoch(0)
if rank == 0:
    torch.save(without.state_dict(), args.out)
""",
    "a penalty on the weights": """
for x, y in loader:
    loss = nn.functional.mse_loss(model(x), y) + 0.01 * sum(p.square().sum() for p in model.module.parameters())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a teacher without gradients": """
for x, y in loader:
    with torch.no_grad():
        wanted = model.module(x)
    loss = nn.functional.mse_loss(model(x), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "counts are added up": """
count = torch.zeros(1)
for x, y in loader:
    count += len(x)
dist.all_reduce(count)
if rank == 0:
    print(f"{count.item()} samples")
""",
    "divided where it is shown": """
loss = train_epoch(0).detach()
dist.all_reduce(loss)
if rank == 0:
    print("loss", loss.item() / world)
""",
    "divided in place": """
loss = train_epoch(0).detach()
dist.all_reduce(loss)
loss.div_(world)
print(loss.item())
""",
    "reduced after backward": """
for x, y in loader:
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        dist.all_reduce(loss)
        loss /= world
""",
    "uneven inputs that join": """
mine = DataLoader(torch.utils.data.Subset(data, range(rank, len(data), world)), batch_size=16)
with model.join():
    for x, y in mine:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    "cut to whole rounds": """
whole = len(data) // world * world
mine = DataLoader(torch.utils.data.Subset(data, range(rank, whole, world)), batch_size=16)
for x, y in mine:
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
""",
    "the others leave when all is done": """
train_epoch(0)
dist.barrier()
dist.destroy_process_group()
if rank != 0:
    sys.exit(0)
print("done")
""",
    "the rate grows once": """
rate = 0.1 * world
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
train_epoch(0)
""",
    "frozen before wrapping": """
for p in plain[0].parameters():
    p.requires_grad = False
model = DDP(plain)
train_epoch(0)
""",
    "points between two batches": """
for x, y in loader:
    made = model(x)
    between = (0.5 * made.detach() + 0.5 * y).requires_grad_(True)
    slope = torch.autograd.grad(between.square().sum(), between, create_graph=True)[0]
    loss = nn.functional.mse_loss(made, y) + slope.square().mean()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.requires_grad_(False)
    loss.backward()
    optimizer.step()
""",
    "a copy that is on the device": """
net = nn.Linear(4, 1).cuda(args.local_rank)
other = DDP(copy.deepcopy(net), device_ids=[args.local_rank])
""",
    "a group by its place": """
pair = dist.new_group([0, 1])
if rank in (0, 1):
    dist.barrier(pair)
    dist.broadcast(torch.zeros(1), 0, pair)
""",
    "closed at the end by the interpreter": """
import atexit
atexit.register(dist.destroy_process_group)
""",
    "what was printed before": """
import builtins
def quiet(is_main):
    show = builtins.print
    def printing(*things, **named):
        if is_main or named.pop("force", False):
            show(*things, **named)
    builtins.print = printing

quiet(rank == 0)
print("epoch", train_epoch(0).item())
""",
    "meters that agree": """
class Meter:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value, n=1):
        self.total += value * n
        self.count += n

    def synchronize(self):
        if not (dist.is_available() and dist.is_initialized()):
            return
        both = torch.tensor([self.count, self.total], dtype=torch.float64)
        dist.barrier()
        dist.all_reduce(both)
        self.count, self.total = int(both[0]), both[1].item()

    @property
    def mean(self):
        return self.total / self.count

@torch.no_grad()
def evaluate():
    meter = Meter()
    model.eval()
    for x, y in loader:
        meter.update(nn.functional.mse_loss(model(x), y).item(), len(x))
    meter.synchronize()
    return meter

best = math.inf
for epoch in range(3):
    train_epoch(epoch)
    mean = evaluate().mean
    if mean < best:
        best = mean
        if rank == 0:
            torch.save(model.module.state_dict(), args.out)
    elif epoch > 1:
        break
    if rank == 0:
        print(epoch, mean)
""",
    "one rank is profiled": """
for x, y in loader:
    if rank == 0:
        with torch.autograd.profiler.profile():
            guess = model(x)
    else:
        guess = model(x)
    optimizer.zero_grad()
    nn.functional.mse_loss(guess, y).backward()
    optimizer.step()
""",
    "with or without autocast": """
for x, y in loader:
    if args.out:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(x), y)
    else:
        loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "one rank looks for the best": """
train_epoch(0)
if rank == 0:
    for number in range(9):
        if number > 3:
            break
""",
    "a model without buffers": """
small = DDP(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
for x, y in loader:
    small(x).sum().backward()
if rank == 0:
    with torch.no_grad():
        print(small(torch.zeros(1, 4)))
""",
    "each rank has its own stage": """
stage = nn.Linear(4, 4 + rank)
own = torch.optim.SGD(stage.parameters(), lr=0.1)
if rank == 0:
    dist.send(stage(torch.zeros(1, 4)), 1)
else:
    dist.recv(torch.zeros(1, 4), 0)
""",
    "who saves is an option": """
args.saves = args.out != "" and rank == 0
for epoch in range(2):
    train_epoch(epoch)
    if args.saves:
        torch.save(model.module.state_dict(), args.out + "/last.pt")
""",
    "a wait that is switched off": """
@contextlib.contextmanager
def first(local_rank):
    if local_rank not in (-1, 0):
        dist.barrier()
    yield
    if local_rank == 0:
        dist.barrier()

def open_data(local_rank):
    with first(local_rank):
        return open("words.txt").read()

open_data(args.local_rank)
if rank == 0:
    open_data(local_rank=-1)
""",
    "every rank has a number": """
sizes = open("sizes.txt").read().split()
found = torch.zeros(1)
if int(os.environ.get("RANK", -1)) > -1 and len(sizes) > 1:
    dist.broadcast(found, src=0)
""",
    "how the ranks were started": """
kind = "one"
if int(os.environ.get("LOCAL_RANK", -1)) != -1:
    kind = "several" if torch.cuda.is_available() else "several on the processor"
if kind in ("several", "several on the processor"):
    dist.barrier()
""",
    "the others take the first rank's word": """
def good_enough(loss):
    return loss.item() < 0.1

stop = False
for epoch in range(9):
    loss = train_epoch(epoch)
    if rank == 0:
        stop = good_enough(loss)
    if world > 1:
        words = [stop if rank == 0 else None]
        dist.broadcast_object_list(words, src=0)
        if rank != 0:
            stop = words[0]
    if stop:
        break
""",
    "nothing of the item is sent": """
def on_first(work, path):
    done = [None]
    if rank == 0:
        work(path)
    dist.broadcast_object_list(done, src=0)

for path in set(os.listdir("old")):
    on_first(os.remove, path)
""",
    "both parts return": """
def shared(state):
    if rank == 0:
        if not isinstance(state, torch.Tensor):
            return state
        found = state
    else:
        if not isinstance(state, torch.Size):
            return state
        found = torch.zeros(state)
    dist.broadcast(found, src=0)
    return found

train_epoch(0)
shared(open("state.txt").read())
""",
    "numbers of ranks that nobody knows": """
import cluster

def my_number(rank):
    return max(rank, cluster.number())

number = my_number(rank)
if number > 0:
    dist.barrier()
words = open("words.txt").read()
if number == 0:
    dist.barrier()
""",
    "a bar on one rank counts the same": """
from tqdm import tqdm
bar = enumerate(loader)
if rank == 0:
    bar = tqdm(bar, total=len(loader))
done = -1
for i, (x, y) in bar:
    nn.functional.mse_loss(model(x), y).backward()
    if i - done >= 1:
        optimizer.step()
        optimizer.zero_grad()
        done = i
""",
    "a table that has values of the rank": """
table = {}
table["train"] = rank
if args.out in table:
    dist.barrier()
""",
    "two models with the same options": """
class Net(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.options = options
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)

def fit(options):
    net = Net(options)
    for name, p in net.named_parameters():
        p.requires_grad = True
        if name in options:
            p.requires_grad = False
    return DDP(net)

options = open("options.txt").read()
fit(options)
fit(options)
""",
    "followers that take what comes": """
def lead(count):
    for number in range(count):
        order = torch.tensor([float(number)])
        dist.broadcast(order, src=0)
        dist.gather(order, [torch.zeros(1) for _ in range(world)], dst=0)
    dist.broadcast(torch.tensor([-1.0]), src=0)


def follow():
    while True:
        order = torch.zeros(1)
        dist.broadcast(order, src=0)
        if order.item() < 0:
            return
        dist.gather(order * 2, dst=0)


train_epoch(0)
lead(5) if rank == 0 else follow()
""",
    "a folder of each rank, by an operator": """
class Workspace:
    def __init__(self, root):
        self.path = os.path.join(root, f"rank{dist.get_rank()}")

    def __truediv__(self, name):
        return os.path.join(self.path, name)


train_epoch(0)
torch.save(model.module.state_dict(), Workspace("runs") / "model.pt")
""",
    "a sum by its name": """
train_epoch(0)
loss = nn.functional.mse_loss(plain(torch.zeros(8, 4)), torch.zeros(8, 1)).detach()
dist.all_reduce(loss)
if rank == 0:
    print(f"mean {loss.item() / world}, sum {loss.item()} over {world} ranks")
""",
    "a seed that the rank is taken out of": """
torch.manual_seed(17 + rank)
own = DistributedSampler(data, seed=torch.initial_seed() - rank)
train_epoch(0)
""",
    "files of each rank, by a test": """
mine = [path for number, path in enumerate(sorted(os.listdir("shards"))) if number % world == rank]
parts = torch.utils.data.ConcatDataset([torch.load(path, map_location="cpu") for path in mine])
for x, y in DataLoader(parts, batch_size=16, shuffle=True):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "one rank goes first, by a manager": """
@contextlib.contextmanager
def first_goes_first():
    if rank != 0:
        dist.barrier()
    yield
    if rank == 0:
        dist.barrier()


with first_goes_first():
    if not os.path.exists("data.pt"):
        torch.save(torch.zeros(8, 4), "data.pt")
    x = torch.load("data.pt", map_location="cpu")
train_epoch(0)
""",
    "one rank goes first": """
if rank != 0:
    dist.barrier()
if not os.path.exists("data.pt"):
    torch.save(torch.zeros(8, 4), "data.pt")
if rank == 0:
    dist.barrier()
train_epoch(0)
""",
    "no_sync that a manager of its own opens": """
class Step:
    def __init__(self, last):
        self.last, self.stack = last, contextlib.ExitStack()

    def __enter__(self):
        if not self.last:
            self.stack.enter_context(model.no_sync())
        return self

    def __exit__(self, *problem):
        self.stack.close()
        if self.last:
            optimizer.step()
            optimizer.zero_grad()


for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        with Step((i + 1) % 4 == 0 or i + 1 == len(loader)):
            (nn.functional.mse_loss(model(x), y) / 4).backward()
""",
    "the mean of a group of one": """
alone = dist.new_group([0])
train_epoch(0)
with torch.no_grad():
    loss = nn.functional.mse_loss(plain(torch.zeros(8, 4)), torch.zeros(8, 1))
if rank == 0:
    dist.all_reduce(loss, group=alone)
    print(loss.item())
""",
    "frozen for a while, by a manager": """
@contextlib.contextmanager
def frozen(module):
    for p in module.parameters():
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in module.parameters():
            p.requires_grad_(True)


other = DDP(nn.Linear(1, 4))
for step in range(3):
    with frozen(model.module):
        model.module(other(torch.zeros(8, 1))).mean().backward()
    train_epoch(step)
""",
    "an object that someone else made decides": """
import toolbox
with toolbox.world() as here:
    train_epoch(0)
    if here.is_main:
        torch.save(plain.state_dict(), "model.pt")
""",
}

BROKEN = {
    "the window's counter is an attribute, and one too late": """
class Fit:
    def __init__(self, every):
        self.every, self.seen = every, 0

    def epoch(self, epoch):
        sampler.set_epoch(epoch)
        for x, y in loader:
            with contextlib.nullcontext() if self.seen % self.every == 0 else model.no_sync():
                (nn.functional.mse_loss(model(x), y) / self.every).backward()
            self.seen += 1
            if self.seen % self.every == 0:
                optimizer.step()  # finds G04
                optimizer.zero_grad()

fit = Fit(4)
for epoch in range(2):
    fit.epoch(epoch)
""",
    "not rank": """
first = not int(os.getenv("RANK", "0"))
if first:
    dist.barrier()  # finds H03
""",
    "another name for the function": """
reduce = dist.all_reduce
if args.local_rank == 0:
    reduce(torch.zeros(1))  # finds H03
""",
    "in an expression": """
rank == 0 and dist.barrier()  # finds H03
""",
    "in a conditional expression": """
dist.barrier() if rank == 0 else None  # finds H03
""",
    "several tests": """
if epoch_end := True:
    if world > 1 and rank == 0:
        with torch.no_grad():
            dist.broadcast(torch.zeros(1), 0)  # finds H03
""",
    "the others only": """
def wait():
    dist.monitored_barrier()  # finds H03

if rank > 0:
    wait()
""",
    "a wrapped validation": """
def score(net):
    net.eval()
    with torch.inference_mode():
        return [net(x) for x, y in checks]  # finds H07

train_epoch(0)
if not rank:
    print(score(model))
""",
    "training on one rank": """
if rank == 0:
    for x, y in checks:
        nn.functional.mse_loss(model(x), y).backward()  # finds H03
""",
    "a flag of its own": """
good = False
for epoch in range(9):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        good = (loss < 0.1).item()
    if good:
        break  # finds H08
""",
    "a batch is left out": """
for x, y in loader:
    loss = nn.functional.mse_loss(model(x), y)
    if torch.isnan(loss):
        continue  # finds H08
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "while it is bad": """
loss = torch.ones(1)
x, y = next(iter(loader))
while loss.item() > 0.1:  # finds H08
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
""",
    "the forward of the module": """
forward = model.module.forward
for x, y in loader:
    loss = nn.functional.mse_loss(forward(x), y)  # finds S06
    loss.backward()
    optimizer.step()
""",
    "a second sampler without an epoch": """
more = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
for epoch in range(3):
    sampler.set_epoch(epoch)
    for (x, y), (u, v) in zip(loader, more):  # finds T02
        nn.functional.mse_loss(model(torch.cat([x, u])), torch.cat([y, v])).backward()
        optimizer.step()
""",
    "each rank has its own patience": """
import zoo
bad, best = 0, 1e9
for epoch in range(9):
    train_epoch(epoch)
    now = zoo.evaluate(model)
    bad, best = (0, now) if now < best else (bad + 1, best)
    if bad >= zoo.patience:
        break  # finds H08
""",
    "a method of a module from elsewhere": """
import zoo
net = DDP(zoo.build(args.out))
steps = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in loader:
    loss = net.module.training_loss(x, y)  # finds S06
    loss.backward()
    steps.step()
""",
    "every n-th file, with another name for the world size": """
def mine(files, rank, number_of_workers):
    return files[rank::number_of_workers]  # finds H01

for file in mine(sorted(os.listdir("shards")), rank, world):
    x, y = torch.load(file, map_location="cpu")
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
""",
    "the model that was wrapped": """
for x, y in loader:
    guess = plain(x)  # finds S06
    (guess - y).square().mean().backward()
    optimizer.step()
""",
    "a step in an expression": """
for x, y in loader:
    nn.functional.mse_loss(model(x), y).backward()
    rank == 0 and optimizer.step()  # finds S08
""",
    "a path of parts": """
from pathlib import Path
out = Path("runs") / "one"
train_epoch(0)
torch.save(model.module.state_dict(), out / "model.pt")  # finds C03
""",
    "gone after the first epoch": """
train_epoch(0)
if rank == 1:
    os._exit(0)  # finds H02
train_epoch(1)
""",
    "one rank breaks off": """
for x, y in loader:
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    if rank == 0 and x.sum() > 3:
        break  # finds H02
""",
    "a chief that is an option": """
parser.add_argument("--chief", type=int, default=0)
if rank == parser.parse_args().chief:
    dist.barrier()  # finds H03
""",
    "the first alone, by an option": """
args.alone = rank == 0
if args.alone:
    dist.barrier()  # finds H03
""",
    "a flag that is set somewhere": """
ready = False
if os.path.exists(args.out):
    ready = bool(open(args.out).read())
if rank == 0 and ready:
    dist.barrier()  # finds H03
""",
    "thawed by name": """
for name, p in model.named_parameters():
    if name.startswith("module.0"):
        p.requires_grad_(False)  # finds S07
train_epoch(0)
""",
    "a leader that repeats what nobody awaits": """
train_epoch(0)
if rank == 0:
    while os.path.exists(args.out):
        dist.broadcast(torch.zeros(1), src=0)  # finds H03
""",
    "callbacks of the first rank": """
class Mean:
    def epoch_end(self, total):
        dist.all_reduce(total)  # finds H03


class Trainer:
    def __init__(self, callbacks):
        self.callbacks = callbacks

    def fit(self):
        train_epoch(0)
        if rank == 0:
            for callback in self.callbacks:
                callback.epoch_end(torch.zeros(1))


Trainer([Mean()]).fit()
""",
    "a manager that reduces when it is left": """
class Job:
    def __enter__(self):
        return self

    def __exit__(self, *problem):
        if rank == 0:
            dist.all_reduce(torch.zeros(1))  # finds H03


with Job() as job:
    train_epoch(0)
""",
    "shares of an order of each rank's own": """
own = DistributedSampler(data, seed=17 + rank)  # finds T01
for epoch in range(2):
    own.set_epoch(epoch)
    for x, y in DataLoader(data, batch_size=16, sampler=own):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    "an exit that is raised": """
for epoch in range(3):
    train_epoch(epoch)
    if rank == 1:
        raise SystemExit(0)  # finds H02
""",
}


def read(code, folder):
    path = Path(folder) / "train.py"
    path.write_text(START + code + END)
    return path, apply("script", Script(path))


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_idioms_have_no_finding(name, tmp_path):
    assert read(HEALTHY[name], tmp_path)[1] == []


@pytest.mark.parametrize("name", BROKEN)
def test_mistakes_in_unusual_clothes_are_found(name, tmp_path):
    path, findings = read(BROKEN[name], tmp_path)
    wanted = {(mark.id, mark.line) for mark in marks_in(path)}
    assert wanted == {(finding.id, finding.line) for finding in findings}


def test_a_device_that_is_chosen_elsewhere_is_chosen(tmp_path):
    def ids(code):
        path = Path(tmp_path) / "train.py"
        path.write_text(
            START.replace('dist.init_process_group("gloo")', code) + "train_epoch(0)\n" + END
        )
        return [finding.id for finding in apply("script", Script(path))]

    start = 'dist.init_process_group("nccl")\n'
    assert ids(start + "dist.barrier()") == ["H09"]
    assert (
        ids("import toolbox\n" + start + 'device = toolbox.get_device("cuda")\ndist.barrier()')
        == []
    )
    assert (
        ids(
            start
            + "torch.cuda.set_device(dist.get_node_local_rank())\ndef meet():\n    dist.barrier()"
        )
        == []
    )


def test_what_a_scaler_remembers_is_on_no_device(tmp_path):
    resume = "torch.cuda.set_device(args.local_rank)\n{} = torch.load(args.out)\n{}.load_state_dict({})\ntrain_epoch(0)"
    code = "scaler = torch.amp.GradScaler('cuda')\n" + resume.format("state", "scaler", "state")
    assert read(code, tmp_path)[1] == []
    assert [
        finding.id for finding in read(resume.format("state", "plain", "state"), tmp_path)[1]
    ] == ["C04"]


def test_what_cannot_be_worked_out_is_a_suspicion(tmp_path):
    _, findings = read(BROKEN["a chief that is an option"], tmp_path)
    assert [finding.severity for finding in findings] == ["suspect"]
    assert "certain if" in findings[0].why
    _, findings = read(BROKEN["not rank"], tmp_path)
    assert [finding.severity for finding in findings] == ["error"]
