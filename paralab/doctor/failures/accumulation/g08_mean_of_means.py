"""G08: Tokens in short sequences count more than tokens in long ones.

Symptom: No error. The gradient differs from that of the whole batch, and may even point in a different direction.
Cause: Cross-entropy averages over the tokens of one micro-batch, and DDP averages over ranks. Neither takes the token counts into account.
Fix: Sum the loss, divide by the number of tokens in the whole step on all ranks, and multiply by the world size.
Reported: huggingface/transformers#34191 #34242 #34373 meta-pytorch/torchtune#1917
allenai/open-instruct#1736 modelscope/ms-swift#10165

+ count = torch.tensor(sum(int((targets != PAD).sum()) for _, targets in micro_batches))
+ dist.all_reduce(count)
  for tokens, targets in micro_batches:
-     loss = F.cross_entropy(model(tokens).transpose(1, 2), targets, ignore_index=PAD)
-     (loss / len(micro_batches)).backward()
+     loss = F.cross_entropy(model(tokens).transpose(1, 2), targets, ignore_index=PAD, reduction="sum")
+     (loss * dist.get_world_size() / count).backward()
"""

import math
from collections import defaultdict

from paralab.doctor.observation import Observation
from paralab.doctor.rank_checks import make_finding, watched
from paralab.doctor.registry import Findings, check, describe
from paralab.doctor.windows import MicroStep, are_weighted_by, windows

ENTRY = describe(__doc__, silent=True)


SPREAD = 1.5  # report if the largest token count is at least this many times the smallest


@check("G08", source="ranks")
def unequal_tokens(seen: Observation) -> Findings:
    steps: dict[int, list[tuple[int, MicroStep]]] = defaultdict(list)
    for rank in seen.ranks if watched(seen) else ():
        for window in windows(rank):
            if window.step:
                steps[window.step.number] += [(rank.rank, one) for one in window.micro_steps]
    for number, ones in sorted(steps.items()):
        passes = [one for _, one in ones]
        counts = [count for one in passes if (count := _count_targets(one)) is not None]
        all_ranks = len({rank for rank, _ in ones}) == len(seen.ranks)
        if len(ones) < 2 or not all_ranks or len(counts) < len(ones):
            continue
        fewest, most = min(counts), max(counts)
        if not fewest or most < SPREAD * fewest or not any(map(_is_padded, passes)):
            continue
        if are_weighted_by(passes, counts):
            continue
        why = (
            f"Step {number} averages {len(ones)} mean losses with equal weights, although each "
            f"covers between {fewest} and {most} targets (not counting ignore_index). A target "
            f"in the smallest micro-batch counts {most / fewest:.0f} times as much as one in the "
            "largest."
        )
        yield make_finding("G08", "warning", why, passes[0].backward)
        return


def _count_targets(one: MicroStep) -> int | None:
    """Return the number of targets in a mean loss; None unless there is exactly one loss."""
    losses = [loss for loss in one.losses if loss.grad]
    return losses[0].valid if len(losses) == 1 and losses[0].reduction == "mean" else None


def _is_padded(one: MicroStep) -> bool:
    total = math.prod(one.losses[-1].target_shape)
    return (_count_targets(one) or total) < total
