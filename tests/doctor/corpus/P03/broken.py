# ways: script, ranks, log
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

WIDTH = 8
MICRO_BATCHES = 1


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    stage = PipelineStage(block, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.MSELoss())  # finds P03
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(7)
    for step in range(2):
        inputs = torch.randn(12, WIDTH, generator=generator)
        targets = torch.randn(12, WIDTH, generator=generator)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
