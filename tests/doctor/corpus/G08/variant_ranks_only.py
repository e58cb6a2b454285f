# ways: ranks
"""Sentences of different lengths, with one step per batch."""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

PAD = 0
LENGTHS = [[[12, 11], [3, 4], [9, 9]], [[2, 1], [10, 12], [9, 9]]]


def sentences(lengths):
    tokens = torch.randint(1, 9, (len(lengths), max(lengths) + 1))
    for row, length in enumerate(lengths):
        tokens[row, length + 1 :] = PAD
    return torch.nn.functional.pad(tokens, (0, 13 - tokens.shape[1]), value=PAD)


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    torch.manual_seed(4 + rank)
    model = DDP(nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for lengths in LENGTHS[rank]:
        tokens = sentences(lengths)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], ignore_index=PAD)
        loss.backward()  # finds G08
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
