# ways: script, ranks, log
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import Schedule1F1B as OneForwardOneBackward

STAGES = 2


def build(rank, micro):
    part = nn.Linear(4, 4)
    stage = PipelineStage(part, rank, STAGES, torch.device("cpu"))
    return part, OneForwardOneBackward(stage, micro, loss_fn=lambda out, y: (out - y).square().mean())  # finds P03


dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(rank)
part, schedule = build(rank, STAGES // 2)
opt = torch.optim.SGD(part.parameters(), lr=0.1)
for _ in range(2):
    opt.zero_grad()
    if rank == 0:
        schedule.step(torch.randn(8, 4))
    else:
        schedule.step(target=torch.zeros(8, 4))
    opt.step()
dist.destroy_process_group()
