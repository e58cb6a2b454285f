# ways: script
# start: never
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(72, 8), torch.randn(72, 1))
    loader = DataLoader(dataset, batch_size=9, shuffle=True, drop_last=True)  # finds D03
    model = nn.DataParallel(nn.Linear(8, 1).cuda(), device_ids=[0, 1, 2, 3])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x.cuda()), y.cuda()).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
