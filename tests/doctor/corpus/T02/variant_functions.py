# ways: script, ranks
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler as Shards


def get_batches(n_samples):
    gen = torch.Generator().manual_seed(1)
    ds = TensorDataset(torch.randn(n_samples, 6, generator=gen), torch.randint(0, 3, (n_samples,), generator=gen))
    return DataLoader(ds, batch_size=4, sampler=Shards(ds, shuffle=True, seed=11), drop_last=True)


def one_pass(net, batches, opt):
    criterion = nn.CrossEntropyLoss()
    for features, labels in batches:  # finds T02
        opt.zero_grad(set_to_none=True)
        criterion(net(features), labels).backward()
        opt.step()


def run():
    dist.init_process_group("gloo")
    torch.manual_seed(100 + dist.get_rank())
    net = DistributedDataParallel(nn.Linear(6, 3))
    opt = optim.AdamW(net.parameters(), lr=1e-3)
    batches = get_batches(24)
    e = 0
    while e < 2:
        one_pass(net, batches, opt)
        e += 1
    dist.destroy_process_group()


run()
