# ways: script, ranks, log
# start: python
import torch
from torch import amp, nn


def log_norm(scaler, opt, net):
    scaler.unscale_(opt)
    return torch.stack([p.grad.norm() for p in net.parameters()]).norm().item()


def clip(scaler, opt, net):
    scaler.unscale_(opt)  # finds A02
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)


def main():
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    opt = torch.optim.Adam(net.parameters())
    scaler = amp.GradScaler("cpu")
    for _ in range(3):
        opt.zero_grad()
        with amp.autocast("cpu", dtype=torch.float16):
            loss = net(torch.randn(8, 4)).abs().mean()
        scaler.scale(loss).backward()
        norm = log_norm(scaler, opt, net)
        clip(scaler, opt, net)
        scaler.step(opt)
        scaler.update()
        print(norm)


main()
