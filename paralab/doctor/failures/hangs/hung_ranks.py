"""Find why watched ranks hang or fail together. There is at most one cause; all other
errors are consequences."""

from collections.abc import Callable

from paralab.doctor.failures.hangs.different_calls import (
    different_sizes,
    made_different_calls,
    wait_for_each_other,
)
from paralab.doctor.failures.hangs.failed_ranks import raised_alone, used_other_parameters
from paralab.doctor.failures.hangs.missing_ranks import did_not_come, left_their_loops
from paralab.doctor.observation import Observation
from paralab.doctor.registry import Finding, check

# The order matters. After a collective with different sizes, any later line can raise. A rank that
# raised cannot arrive. Ranks that left a loop or diverged explain later failures.
CAUSES: tuple[Callable[[Observation], Finding | None], ...] = (
    used_other_parameters,
    different_sizes,
    raised_alone,
    left_their_loops,
    made_different_calls,
    wait_for_each_other,
    did_not_come,
)
IDS = ("H01", "H02", "H03", "H04", "H06", "H07", "H08", "H10", "H11", "H12", "H13", "H14")


@check(*IDS, source="ranks")
def why_ranks_hang(seen: Observation) -> Finding | None:
    causes = CAUSES if len(seen.ranks) > 1 else ()
    return next((finding for cause in causes if (finding := cause(seen))), None)
