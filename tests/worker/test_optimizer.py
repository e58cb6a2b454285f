"""What each rank's optimizer gets."""

from torch import nn, optim

from paralab.worker.optimizer import make_optimizer
from tests.worker.one_rank import make_workload


def test_a_stage_may_train_nothing():
    """A filter of trainable parameters once gave an empty list, which no optimizer accepts."""
    workload = make_workload(optimizer=lambda p: optim.SGD([q for q in p if q.requires_grad], 0.1))
    frozen = nn.Linear(3, 2).requires_grad_(False)
    [group] = make_optimizer(workload, frozen).param_groups
    assert [parameter.numel() for parameter in group["params"]] == [0]
