"""An example of your own workload: tag sequences of different lengths, in plain PyTorch without any
parallelism.

    paralab run ddp --replicas 2 --workload examples/tagger.py:workload
    paralab verify all --workload examples/tagger.py:workload

The task is to mark each number that is larger than the previous number. `pad` pads sequences to the
length of the longest sequence in their batch, and the loss is a mean over the real positions.
`weight` counts the real positions, so that paralab can add up unequal parts of a batch correctly.
"""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from paralab import Workload

NUMBERS = 50
PADDING = -100


class Sequences(Dataset):
    """Random sequences. Item i is the same in every process, because i is its seed."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(5, 30, (), generator=generator))
        numbers = torch.randint(NUMBERS, (length,), generator=generator)
        larger = torch.cat([torch.zeros(1, dtype=torch.long), (numbers[1:] > numbers[:-1]).long()])
        return {"input": numbers, "target": larger}


def pad(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        "input": pad_sequence([item["input"] for item in items], batch_first=True),
        "target": pad_sequence(
            [item["target"] for item in items], batch_first=True, padding_value=PADDING
        ),
    }


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUMBERS, 64)
        self.memory = nn.GRU(64, 64, batch_first=True)
        self.hidden = nn.Linear(64, 64)
        self.tags = nn.Linear(64, 2)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        states, _ = self.memory(self.embedding(numbers))
        return self.tags(torch.relu(self.hidden(states)))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PADDING)


def workload() -> Workload:
    return Workload(
        model=Tagger,
        data=Sequences(),
        collate=pad,
        loss=loss,
        weight=lambda batch: int((batch["target"] != PADDING).sum()),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
        batch_size=32,
        data_path="generated: 2000 sequences of 5-29 numbers",
    )
