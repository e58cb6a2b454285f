import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_ as clip


class Mixed:
    def __init__(self, net, opt):
        self.net, self.opt = net, opt
        self.amp = GradScaler(device="cpu", init_scale=1024.0)

    def backward(self, loss):
        self.amp.scale(loss).backward()

    def step(self):
        self.amp.unscale_(self.opt)
        self.limit()
        self.amp.step(self.opt)
        self.amp.update()
        self.opt.zero_grad(set_to_none=True)

    def limit(self):
        clip(self.net.parameters(), max_norm=0.5)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    net = DDP(nn.Linear(6, 6))
    mixed = Mixed(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    for _ in range(3):
        x = torch.randn(4, 6)
        with autocast(device_type="cpu", dtype=torch.float16):
            out = net(x)
            loss = (out.float() - x).square().mean()
        mixed.backward(loss)
        mixed.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
