# ways: ranks
"""An epoch of a hundred full batches and a smaller last one."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

SAMPLES = 100 * 8 + 5


def batches():
    order = torch.Generator().manual_seed(1)
    points = torch.randn(SAMPLES, 4, generator=order)
    yield from zip(points.split(8), points.flip(1).split(8), strict=True)


def main():
    dist.init_process_group("gloo")
    place, count = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(place)
    part = nn.Linear(4, 4)
    pipe = ScheduleGPipe(PipelineStage(part, place, count, torch.device("cpu")), 2, loss_fn=nn.MSELoss())
    sgd = torch.optim.SGD(part.parameters(), lr=0.01)
    for points, wanted in batches():
        sgd.zero_grad()
        if place == 0:
            pipe.step(points)  # finds P01
        else:
            pipe.step(target=wanted)
        sgd.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
