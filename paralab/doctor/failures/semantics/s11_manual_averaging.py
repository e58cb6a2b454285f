"""S11: Manual gradient averaging that starts from different weights."""

import ast

from paralab.doctor.registry import Findings, check, describe
from paralab.doctor.static.models import is_decided
from paralab.doctor.static.names import INIT
from paralab.doctor.static.order import runs_after
from paralab.doctor.static.report import found, line_of
from paralab.doctor.static.script import Script

ENTRY = describe(
    __doc__,
    symptom="No error. The ranks start with different weights and never become equal, although every gradient is synchronized.",
    cause="DDP copies rank 0's weights when it wraps a model. Code that reduces gradients itself must also copy rank 0's weights.",
    fix="Broadcast every parameter and buffer from rank 0 before the first step.",
    example="""\
  model = Net()
+ for tensor in model.state_dict().values():
+     dist.broadcast(tensor, src=0)
  for parameter in model.parameters():
      parameter.register_post_accumulate_grad_hook(average_over_ranks)
""",
    silent=True,
)
# Any of these may give all ranks the same weights.
_EQUALIZE = ("broadcast", "broadcast_parameters", "broadcast_object_list", "load_state_dict", "from_pretrained", "scatter", "all_gather")  # fmt: skip


@check("S11", source="script")
def different_first_weights(script: Script) -> Findings:
    """Report manual averaging after a seed that differs between ranks. Without any seed, torch
    starts every process from the same default."""
    reductions = [
        call
        for call in script.calls_of("torch.distributed.all_reduce")
        if any(isinstance(n, ast.Attribute) and n.attr == "grad" for n in ast.walk(call.scope.node))
    ]
    wrapped = script.methods("DistributedDataParallel", "FullyShardedDataParallel", "fully_shard")
    if not reductions or wrapped or not script.calls_of(INIT):
        return
    if script.methods(*_EQUALIZE):
        return
    seeds = [
        call
        for call in script.calls_of("torch.manual_seed")
        if call.node.args and script.nature(call.node.args[0], call.scope) == "rank"
    ]
    if not seeds or len(seeds) < len(script.calls_of("torch.manual_seed")):
        return
    seed = seeds[0]
    optimizers = [call for call in script.calls if call.target.startswith("torch.optim.")]
    orders = [
        runs_after(script, (call.node, call.scope), (seed.node, seed.scope)) for call in optimizers
    ]
    if not orders or not all(order == {"after"} for order in orders):
        return
    where = reductions[0]
    values = {script.evaluate(seed.node.args[0], seed.scope, rank) for rank in (0, 1)}
    differs = len(values) == 2 or isinstance(seed.node.args[0], (ast.Name, ast.Attribute))
    sure = differs and is_decided(script, seed) and is_decided(script, where)
    why = (
        f"This averages gradients by hand, but the ranks start with different weights: the seed "
        f"({line_of(seed, where)}) depends on the rank, and nothing broadcasts rank 0's weights."
    )
    doubt = "" if sure else "if the seed differs between ranks"
    yield found(script, "S11", "error", where, why, doubt=doubt, also=(seed,))
