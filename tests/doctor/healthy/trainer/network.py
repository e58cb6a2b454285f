"""A convolutional network for waveforms."""

from torch import nn


class ResidualBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv1d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm1d(width)
        self.conv2 = nn.Conv1d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm1d(width)

    def forward(self, signal):
        hidden = self.norm1(self.conv1(signal)).relu()
        return (signal + self.norm2(self.conv2(hidden))).relu()


class WaveNet(nn.Module):
    def __init__(self, width=32, depth=3, classes=4):
        super().__init__()
        self.stem = nn.Conv1d(1, width, 7, padding=3)
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(depth))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, classes)

    def forward(self, signal):
        hidden = self.stem(signal)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.dropout(hidden.mean(dim=-1)))
