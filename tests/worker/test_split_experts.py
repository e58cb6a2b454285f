"""Rows of several tensors in one message."""

import pytest
import torch

from paralab.worker.sharding.split_experts import pack, unpack


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_rows_arrive_as_they_were_sent(rows):
    """A single row of 140 bytes once could not be read as int64."""
    sent = (
        torch.randn(rows, 31),
        torch.arange(rows)[:, None],
        torch.randn(rows, dtype=torch.bfloat16),
        torch.randn(rows, 2, 3, dtype=torch.float64).transpose(1, 2),
    )
    packed = pack(sent)
    assert packed.shape == (rows, 31 * 4 + 8 + 2 + 6 * 8)
    received = unpack(packed, sent)
    assert all(torch.equal(one, other) for one, other in zip(received, sent, strict=True))
    # The number of rows that arrive may differ from the number that is sent.
    assert [len(each) for each in unpack(packed[:1], sent)] == [min(rows, 1)] * 4
