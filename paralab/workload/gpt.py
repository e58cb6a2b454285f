"""`gpt`: a byte-level transformer, trained on text that every machine has: the source code of
Python's standard library.

Samples have different lengths and are padded, so a batch's loss is a mean over a varying number of
bytes. Naive data parallelism averages such means, which changes the gradients.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from paralab.workload.workload import Workload

PAD = 256  # the token after the 256 byte values
IGNORED = -100  # the target that cross_entropy ignores


def library_text(lengths: Iterator[int]) -> Iterator[bytes]:
    """Yield texts of these lengths: consecutive lines from the standard library, in order."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("[a-z]*/*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        run, length = b"", next(lengths)
        for line in path.read_bytes().splitlines(keepends=True):
            run += line
            if len(run) >= length:
                yield run[:length]
                run, length = b"", next(lengths)


def library_tokens(samples: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets with context/2 to context bytes each. Repeat the text if needed."""
    chance = random.Random(0)
    lengths = iter(lambda: chance.randint(context // 2, context) + 1, None)
    inputs = torch.full((samples, context), PAD)
    targets = torch.full((samples, context), IGNORED)
    row = 0
    while row < samples:
        for text in library_text(lengths):
            tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
            inputs[row, : len(tokens) - 1] = tokens[:-1]
            targets[row, : len(tokens) - 1] = tokens[1:]
            row += 1
            if row == samples:
                break
    return inputs, targets


class Embedding(nn.Module):
    def __init__(self, dim: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(PAD + 1, dim)
        self.position = nn.Embedding(context, dim)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.token(tokens) + self.position(places)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Causal attention and a feed-forward network, each with a residual connection. Padding is at
    the end of a text, so the causal mask already hides it from every real byte."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        # Use no bias. Attention does not depend on the keys' bias, so its gradient would be noise.
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.mix = nn.Linear(dim, dim)
        wide = 4 * dim
        self.feed_forward: nn.Module = nn.Sequential(
            nn.Linear(dim, wide), nn.GELU(), nn.Linear(wide, dim)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.query_key_value(self.norm1(x)).chunk(3, dim=-1)
        # Infer the number of heads (-1), because a tensor-parallel shard has only some of them.
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (query, key, value)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm2(x))  # type: ignore[no-any-return]


def byte_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Compute the mean cross-entropy per real byte."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def real_bytes(batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Count the bytes that a batch's loss averages over."""
    return float((batch[1] != IGNORED).sum())


def language_model(blocks: Sequence[nn.Module], dim: int, context: int) -> nn.Module:
    # The order in which modules are created determines their initial weights.
    embedding, norm = Embedding(dim, context), nn.LayerNorm(dim)
    model = nn.Sequential(embedding, *blocks, norm, nn.Linear(dim, PAD))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    return model


def build(name: str, *, dim: int, layers: int, heads: int, **data: int) -> Workload:
    def model() -> nn.Module:
        return language_model([Block(dim, heads) for _ in range(layers)], dim, data["context"])

    return byte_workload(name, model, dim, **data)


def byte_workload(
    name: str,
    model: Callable[[], nn.Module],
    dim: int,
    *,
    context: int,
    samples: int,
    batch_size: int,
) -> Workload:
    """Return a workload that predicts the next byte."""
    return Workload(
        model=model,
        data=library_tokens(samples, context),
        loss=byte_loss,
        # Do not use Adam, which divides each gradient by its size. Rounding errors in tiny
        # gradients would become full steps, so an fp32 comparison could not show that two runs are
        # equal. SGD also learns this text.
        optimizer=lambda parameters: torch.optim.SGD(
            parameters, lr=min(0.05, 6.4 / dim), momentum=0.9
        ),
        weight=real_bytes,
        batch_size=batch_size,
        data_path=(
            f"{sysconfig.get_paths()['stdlib']}: {samples} texts of {context // 2}–{context} bytes"
        ),
        name=name,
    )
