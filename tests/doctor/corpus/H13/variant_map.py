# ways: script
"""The first process tokenizes a corpus and caches it."""

import os

import torch
import torch.distributed as td
from datasets import load_dataset, load_from_disk
from torch import nn


def encode(example):
    return {"ids": [ord(letter) for letter in example["text"]]}


def main():
    td.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(td.get_rank())
    if td.get_rank() == 0:
        load_dataset("text", data_files="corpus.txt")["train"].map(encode).save_to_disk("encoded")
    td.barrier()  # finds H13
    rows = load_from_disk("encoded").shard(td.get_world_size(), td.get_rank())
    net = nn.parallel.DistributedDataParallel(nn.Embedding(256, 8).cuda(), device_ids=[torch.cuda.current_device()])
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for row in range(min(4, len(rows))):
        opt.zero_grad()
        net(torch.tensor(rows[row]["ids"]).cuda()).mean().backward()
        opt.step()
    td.destroy_process_group()


if __name__ == "__main__":
    main()
