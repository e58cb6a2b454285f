"""T06: Too few loader workers, or more workers than cores.

Symptom: Steps wait for data, or all cores are busy and everything is slow.
Cause: num_workers is per rank, and ranks × workers compete for the same cores.
Fix: Start with (cores ÷ ranks) − 1 workers per rank, then try other values and measure.
Reported: Lightning-AI/pytorch-lightning#18149 pytorch/pytorch#105841

- loader = DataLoader(data, batch_size=32, num_workers=16, sampler=sampler)
+ cores = len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])
+ loader = DataLoader(data, batch_size=32, num_workers=max(1, cores - 1), sampler=sampler)
"""

from paralab.doctor.events import Loader
from paralab.doctor.failures.data.uses import Use, uses
from paralab.doctor.observation import Observation
from paralab.doctor.preflight import Facts
from paralab.doctor.rank_checks import make_finding, ranks_by_host
from paralab.doctor.recorded import Run, check_each_run
from paralab.doctor.registry import Finding, Findings, check, describe
from paralab.units import plural, seconds

ENTRY = describe(__doc__)


ENOUGH_BATCHES = 20  # batches to measure before judging waiting times
LONG_WAIT = 0.3  # share of the time between two batches
DATA_SHARE = 0.10  # share of a recorded run's time
JITTER_SECONDS = 0.002  # a delay that the operating system may cause
LOAD_AHEAD = (
    "Load data while the device computes: use at least 2 workers (but workers × ranks at most the "
    "number of cores), and pin_memory=True on GPUs. If that is not enough, use cheaper "
    "transforms, or prepare the data once."
)


@check("T06", source="ranks")
def workers_and_cores(seen: Observation) -> Findings:
    """Report more workers than cores, or else a loop that waits for its batches."""
    for host, ranks in ranks_by_host(seen).items():
        cores = max(rank.start.cores for rank in ranks)
        workers = [max((e.workers for e in rank.of(Loader)), default=0) for rank in ranks]
        if sum(workers) <= cores or not workers[0]:
            continue
        loader = max(ranks[0].of(Loader), key=lambda loader: loader.workers)
        why = (
            f"{plural(len(ranks), 'rank')} with {workers[0]} workers each start {sum(workers)} "
            f"loader processes, which compete with training for the {cores} cores of {host}."
        )
        fix = f"Use num_workers={max(0, cores // len(ranks) - 1)}: cores per rank, minus one."
        yield make_finding("T06", "warning", why, loader.made_at or loader, fix=fix)
        return
    yield from _waiting(seen)


def _waiting(seen: Observation) -> Findings:
    training = (use for rank in seen.ranks for use in uses(rank).values() if use.trains)
    shares = [(share, use) for use in training if (share := _share(use))]
    share, use = max(shares, key=lambda pair: pair[0], default=(0.0, None))
    if use is None or share < LONG_WAIT:
        return
    workers = use.loader.workers
    how = (
        f"{workers} workers are too few"
        if workers
        else "num_workers=0: the rank itself loads its batches"
    )
    why = f"This loop spends {share:.0%} of its time waiting for the next batch ({how})."
    yield make_finding("T06", "warning", why, use.place, fix=LOAD_AHEAD, gain=share)


def _share(use: Use) -> float | None:
    batches = use.batches[1:]  # the first batch starts the workers
    took = batches[-1].t - use.batches[0].t if len(batches) >= ENOUGH_BATCHES else 0.0
    return sum(batch.wait for batch in batches) / took if took > 0 else None


@check("T06", source="machine")
def few_cores(facts: Facts) -> Findings:
    ranks = facts.ranks_here
    if not facts.gpus or not ranks or facts.cores >= 2 * ranks:
        return
    why = (
        f"This job has {plural(facts.cores, 'core')} (of {facts.machine_cores} in the machine) "
        f"for {ranks} GPU ranks, so no core is left for loader workers."
    )
    fix = "Ask for more cores (srun --cpus-per-task=8, docker run --cpus=…), then set num_workers to cores per rank - 1."
    doubt, cores = "if a run waits for data", facts.evidence("cores")
    yield make_finding("T06", "suspect", why, None, cores, fix=fix, doubt=doubt)


def judge_data_wait(waited: float, step: float) -> Finding | None:
    """Report a run that waits `waited` seconds for data before each step of `step` seconds."""
    whole = waited + step
    if not step or waited < max(DATA_SHARE * whole, JITTER_SECONDS):
        return None
    share = waited / whole
    why = (
        f"Between two steps, every rank waits {seconds(waited)} for its next batch, {share:.0%} of the "
        f"time (a step takes {seconds(step)})."
    )
    return make_finding("T06", "warning", why, None, fix=LOAD_AHEAD, gain=share)


@check_each_run("T06")
def data_wait_in_run(run: Run) -> Finding | None:
    # Checkpoints and status updates also run between steps, so count only the loading time.
    waited = min(run.metrics.data_wait_seconds or 0.0, run.metrics.data_seconds or 0.0)
    return judge_data_wait(waited, run.step_seconds)
