# start: python
import torch
from torch import amp, nn, optim, randn

ACCUM = 4


def micro_loss(net, batch, parts):
    value = nn.functional.mse_loss(net(batch), batch)
    return value / parts


def main():
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    opt = optim.SGD(net.parameters(), lr=0.1)
    scaler = amp.GradScaler("cpu")
    batches = [randn(2, 4) for _ in range(8)]
    for i, batch in enumerate(batches):
        with amp.autocast("cpu", dtype=torch.float16):
            loss = micro_loss(net, batch, ACCUM)
        scaler.scale(loss).backward()
        if (i + 1) % ACCUM == 0:
            scaler.step(opt)
            scaler.update()
            opt.zero_grad(set_to_none=True)
    for batch in batches:
        loss = nn.functional.mse_loss(net(batch), batch)
        opt.zero_grad()
        loss.backward()
        opt.step()
    for step, batch in enumerate(batches):
        opt.zero_grad()
        value = nn.functional.mse_loss(net(batch), batch)
        value.backward()
        opt.step()
        if step % 4 == 0:
            print(step, value.item())


main()
