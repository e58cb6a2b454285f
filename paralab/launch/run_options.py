"""`RunOptions`: what `paralab run` knows beyond the configuration, one field per option."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paralab.plan.option import option
from paralab.record.checkpoints import KEPT

OUTPUT = "Output"
CHECKPOINTS = "Checkpoints and restarts"


@dataclass(frozen=True)
class RunOptions:
    out: Path | None = option(
        "The run folder, which must not exist yet.",
        heading=OUTPUT,
        metavar="DIR",
        shown="runs/DATE_TIME_…",
    )
    save_weights: bool = option(
        "Save the final weights as weights.pt in the run folder.", heading=OUTPUT, default=False
    )
    profile: bool = option(
        "Save a torch.profiler trace of steps 4 to 7 of every rank in the run folder.",
        heading=OUTPUT,
        default=False,
    )
    tensorboard: Path | None = option(
        "Also write TensorBoard logs, in a subfolder of DIR.", heading=OUTPUT, metavar="DIR"
    )
    checkpoint: Path | None = option(
        "Save checkpoints in DIR: at the end, on a signal, and with --checkpoint-every.",
        heading=CHECKPOINTS,
        metavar="DIR",
    )
    checkpoint_every: int | None = option(
        "Save a checkpoint every N steps.", heading=CHECKPOINTS, metavar="N"
    )
    keep_checkpoints: int = option(
        "Keep the N newest checkpoints and delete older ones.",
        heading=CHECKPOINTS,
        default=KEPT,
        metavar="N",
    )
    resume: bool = option(
        "Continue from the last complete checkpoint, with any strategy and number of ranks.",
        heading=CHECKPOINTS,
        default=False,
    )
    max_restarts: int = option(
        "Restart failed ranks up to N times.", heading=CHECKPOINTS, default=0, metavar="N"
    )
    start_deadline: float = option(
        "Stop the run if its first step has not begun by then.",
        heading=CHECKPOINTS,
        default=600.0,
        metavar="SECONDS",
    )
    step_deadline: float = option(
        "Stop the run if a step takes longer than this.",
        heading=CHECKPOINTS,
        default=600.0,
        metavar="SECONDS",
    )
    save_deadline: float = option(
        "Stop the run if saving a checkpoint blocks training longer than this.",
        heading=CHECKPOINTS,
        default=600.0,
        metavar="SECONDS",
    )
