# ways: script, ranks, log
# start: python
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(24, 8), torch.randn(24, 1))
    loader = DataLoader(dataset, batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu")
    accumulate = 2
    for i, (inputs, targets) in enumerate(loader):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(inputs), targets) / accumulate
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # finds A02
        if (i + 1) % accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
