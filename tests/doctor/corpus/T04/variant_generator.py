# ways: script, ranks

import torch
import torch.utils.data as tud
from torch import distributed
from torch.nn import Linear
from torch.nn.parallel import DistributedDataParallel


def lines(n):
    for i in range(n):
        yield f"{i},{i * 2}"


def parse(line):
    a, b = line.split(",")
    return torch.tensor([float(a)]) / 100, torch.tensor([float(b)]) / 100


class CsvStream(tud.IterableDataset):
    def read(self):
        yield from map(parse, lines(24))

    def __iter__(self):  # finds T04 by script
        return self.read()


def train(model, batches, optimizer):
    for x, y in batches:
        optimizer.zero_grad()
        (model(x) - y).abs().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    torch.manual_seed(17 + distributed.get_rank())
    model = DistributedDataParallel(Linear(1, 1))
    stream = CsvStream()
    batches = tud.DataLoader(stream, batch_size=3)  # finds T04 by ranks
    train(model, batches, torch.optim.SGD(model.parameters(), lr=0.1))
    distributed.destroy_process_group()
