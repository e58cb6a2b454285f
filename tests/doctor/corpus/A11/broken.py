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
    for inputs, targets in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        scaler.step(optimizer)  # finds A11
        scaler.update()


if __name__ == "__main__":
    main()
