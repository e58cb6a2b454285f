# ways: script
# start: never
import torch
from torch import nn
from torch.nn.parallel import DataParallel
from torch.utils import data

GPUS = list(range(4))


def batches(ds, size):
    return data.DataLoader(ds, size, True)  # finds D03


net = DataParallel(nn.Linear(3, 3).to("cuda"), GPUS)
opt = torch.optim.Adam(net.parameters())
for (x,) in batches(data.TensorDataset(torch.randn(33, 3)), 16):
    opt.zero_grad()
    net(x.cuda()).square().mean().backward()
    opt.step()
