"""Start watching this process, after the user's program imports torch but before it uses torch."""

import multiprocessing
import os
import threading
import time
from contextlib import suppress

import torch

from paralab.observe import collectives, exits, files, losses, pipelines, trial, without_gpu
from paralab.observe.data import Loaders
from paralab.observe.models import Models
from paralab.observe.optimizers import Optimizers
from paralab.observe.rank import Rank
from paralab.observe.wrappers import is_inside, show_warnings_of_callers, wrap
from paralab.record.stack_dump import dump_stacks

QUERY_SECONDS = 0.25


def begin(folder: str) -> Rank:
    trial_steps = os.environ.get("PARALAB_TRIAL_STEPS")
    rank = Rank(folder, int(trial_steps) if trial_steps else None)
    if rank.trial_steps is not None:
        trial.spare_files(rank)
        without_gpu.install(rank)
    models = Models(rank)
    collectives.install(rank)
    models.install()
    Optimizers(rank, models).install()
    Loaders(rank).install()
    files.install(rank, models)
    losses.install(rank)
    pipelines.install(rank)
    exits.install(rank)
    wrap(rank, torch, "set_num_threads", "threads", lambda threads: {"threads": int(threads)})
    seeded = lambda seed: None if is_inside(rank, "seed") else {"seed": int(seed)}  # noqa: E731
    for owner in (torch, torch.random):  # these differ once torch.compile has wrapped one
        wrap(rank, owner, "manual_seed", "seed", seeded)
    show_warnings_of_callers()
    rank.when_known = lambda: _answer_when_asked(rank)
    os.register_at_fork(after_in_child=lambda: _start_over(rank))
    if multiprocessing.parent_process() is not None:
        exits.children_end_too(rank)  # this may be a DataLoader worker, which inherits RANK
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank.identify()
    return rank


def _start_over(rank: Rank) -> None:
    """Start over in a forked child, which has none of our threads and may become another rank."""
    # Keep the parent's files open and its GPU memory allocated.
    rank.parents = rank.journal, rank.slot, rank.overwritten
    rank.fresh()
    exits.children_end_too(rank)


def _answer_when_asked(rank: Rank) -> None:
    """Start a thread that reports this rank's stack and last collectives when the file `ask` appears
    in the ranks' folder."""
    args = (rank, rank.path, os.getpid())
    threading.Thread(target=_answer, args=args, name="paralab-answers", daemon=True).start()


def _answer(rank: Rank, path: object, pid: int) -> None:
    answered = 0.0
    ask = rank.folder / "ask"
    while rank.path is path and rank.path is not None and os.getpid() == pid:
        with suppress(Exception):  # one failed report does not prevent the next
            asked = os.stat(ask).st_mtime if ask.exists() else 0.0
            if asked > answered:
                dump_stacks(rank.path.with_suffix(".testimony"))
                answered = asked
        time.sleep(QUERY_SECONDS)
