# ways: script, ranks
import torch
import torch.distributed as dist
from steps import step_done, train_batch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(50 + dist.get_rank())
    net = DistributedDataParallel(nn.Linear(3, 1))
    sgd = torch.optim.SGD(net.parameters(), lr=0.01)
    window = 3
    for outer in range(2):
        for k in range(window):
            x = torch.randn(5, 3)
            if k < window - 1:
                with net.no_sync():
                    train_batch(net, x)
            else:
                train_batch(net, x)
        step_done(sgd)
    dist.destroy_process_group()


main()
