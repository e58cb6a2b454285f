"""Trains with Lightning Fabric, which wraps the model, the optimizer, and the loaders."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(32, 2)

    def forward(self, inputs):
        return self.head(self.body(inputs))


@torch.no_grad()
def validate(fabric, model, loader):
    model.eval()
    losses = [nn.functional.cross_entropy(model(inputs), targets) for inputs, targets in loader]
    model.train()
    return fabric.all_reduce(torch.stack(losses).mean(), reduce_op="mean")


def main():
    fabric = L.Fabric(accelerator="auto", devices=2, strategy="ddp", precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(1234)
    inputs = torch.randn(512, 16)
    data = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    train_loader, valid_loader = fabric.setup_dataloaders(
        DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8)
    )
    accumulate = 4
    for epoch in range(3):
        for index, (inputs, targets) in enumerate(train_loader):
            is_accumulating = (index + 1) % accumulate != 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                fabric.backward(loss / accumulate)
            if not is_accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        loss = validate(fabric, model, valid_loader)
        if fabric.global_rank == 0:
            print(f"epoch {epoch}: {loss.item():.3f}")
        fabric.save(f"epoch-{epoch}.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})
        fabric.barrier()


if __name__ == "__main__":
    main()
