# ways: script
# start: never
import torch
from torch.cuda.amp import GradScaler, autocast
from torch.nn.utils import clip_grad_value_


def train_step(model, batch, optimizer, scaler, limit):
    with autocast():
        loss = model(batch.cuda()).square().mean()
    scaler.scale(loss).backward()
    if limit is not None:
        clip_grad_value_(model.parameters(), limit)  # finds A01
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler()
    for _ in range(4):
        train_step(model, torch.randn(4, 8), optimizer, scaler, 0.1)


main()
