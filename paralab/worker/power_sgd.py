"""The PowerSGD algorithm for one gradient matrix, without communication.

P Qᵀ approximates an n × m matrix M with rank r, and needs only r · (n + m) numbers:

    P = orthonormal columns of M Q       Q = Mᵀ P

Each step starts with the previous step's Q, so the approximation improves over time.
"""

from __future__ import annotations

import torch

EPSILON = 1e-8  # added to the norm of a column, because a gradient may be zero
WORTH = 2  # compress a matrix only if it shrinks by more than this factor, as in torch


def starting_vectors(matrix: torch.Tensor, rank: int, seed: int) -> torch.Tensor | None:
    """Return a random Q for this matrix, or None if compression would save too little."""
    n, m = matrix.shape
    rank = min(n, m, rank)
    if (n + m) * rank * WORTH >= n * m:
        return None
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, rank, generator=generator, dtype=torch.float64).to(matrix)


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Return orthonormal columns that span the same space, using the same algorithm as torch."""
    if matrix.shape[1] > 2:
        q: torch.Tensor = torch.linalg.qr(matrix).Q
        return q
    columns: list[torch.Tensor] = []
    for column in matrix.unbind(1):
        for other in columns:
            column = column - (other @ column) * other
        columns.append(column / (column.norm() + EPSILON))
    return torch.stack(columns, 1)


def compress(matrices: list[torch.Tensor], q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the approximate mean of the ranks' matrices, and the next Q."""
    q = orthonormal(q)
    p = orthonormal(sum((matrix @ q for matrix in matrices[1:]), matrices[0] @ q))
    products = [matrix.T @ p for matrix in matrices]
    q = sum(products[1:], products[0]) / len(matrices)
    return p @ q.T, q
