"""The data, created on import."""

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rows = torch.linspace(0, 1, 96).reshape(32, 3)
pairs = TensorDataset(rows, rows.sum(1, keepdim=True))
order = DistributedSampler(pairs)  # finds L06
batches = DataLoader(pairs, batch_size=4, sampler=order)
