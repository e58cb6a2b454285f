# ways: script, ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Points(Dataset):
    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        self.points = torch.randn(count, 3, generator=g)

    def __getitem__(self, index):
        return self.points[index], self.points[index].sum().view(1)

    def __len__(self):
        return self.points.shape[0]


class Evaluator:
    def __init__(self, dataset):
        self.sampler = DistributedSampler(dataset, dist.get_world_size(), dist.get_rank(), shuffle=False)
        self.loader = DataLoader(dataset, batch_size=2, sampler=self.sampler)  # finds T05

    @torch.inference_mode()
    def __call__(self, net):
        net.eval()
        error = torch.zeros(1)
        seen = torch.zeros(1)
        for a, b in self.loader:
            error += (net(a) - b).abs().sum()
            seen += a.size(0)
        net.train()
        dist.all_reduce(error)
        dist.all_reduce(seen)
        return (error / seen).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    train = Points(24, seed=1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=4, sampler=sampler)
    net = DistributedDataParallel(nn.Linear(3, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    evaluate = Evaluator(Points(7, seed=2))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for a, b in loader:
            opt.zero_grad()
            nn.functional.l1_loss(net(a), b).backward()
            opt.step()
        print(epoch, evaluate(net.module))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
