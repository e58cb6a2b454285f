"""Record this process's last calls on `local`, with the field names of torch's Flight Recorder.
torch records only gloo and NCCL. With these entries, paralab can explain hangs on `local` too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

LENGTH = 50
entries: deque[dict[str, Any]] = deque(maxlen=LENGTH)


def record(
    group: str, number: int | None, name: str, tensors: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """Add a call. A call without a number is a send or a receive. The caller sets its `state`."""
    entry = {
        "process_group": [group, "local"],
        "collective_seq_id": number,
        "is_p2p": number is None,
        "profiling_name": f"local:{name}",
        "state": "scheduled",
        "retired": False,
        "input_sizes": [list(each.shape) for each in tensors],
    }
    entries.append(entry)
    return entry
