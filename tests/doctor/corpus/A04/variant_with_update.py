# ways: script, ranks, log
# start: python
import torch
from torch import amp, nn


def update(optimizer, scaler):
    optimizer.step()  # finds A04 by script
    scaler.update()
    optimizer.zero_grad()


def main():
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    loss_scaler = amp.GradScaler("cpu")
    for _ in range(3):
        with amp.autocast("cpu", dtype=torch.float16):
            cost = net(torch.randn(4, 4)).square().mean()
        loss_scaler.scale(cost).backward()
        update(sgd, loss_scaler)


main()
