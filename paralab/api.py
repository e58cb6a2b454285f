"""The same as the command line, from Python: typed, also from a notebook. What is returned is what
`--json` prints."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from paralab.errors import UsageError
from paralab.experiment import compare as comparison
from paralab.experiment import run as training
from paralab.experiment import verify as proof
from paralab.experiment.rounds import Case
from paralab.launch.processes import loading_once
from paralab.launch.restart import RestartPolicy
from paralab.plan.request import Request
from paralab.record.checkpoints import KEPT
from paralab.workload.reference import PICKLED
from paralab.workload.workload import Workload

Source = str | Callable[[], Workload | dict[str, Any]]


def run(
    workload: Source,
    strategy: str,
    *,
    replicas: int | None = None,
    stages: int | None = None,
    batch_size: int | None = None,
    accumulate: int | None = None,
    micro_batches: int | None = None,
    schedule: str | None = None,
    precision: str | None = None,
    loss_scale: float | None = None,
    no_scaler: bool | None = None,
    bucket_mb: float | None = None,
    bucket_view: bool | None = None,
    static_graph: bool | None = None,
    find_unused: bool | None = None,
    sync_every_pass: bool | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    samples: int | None = None,
    seed: int = 0,
    device: str = "auto",
    placement: str | None = None,
    threads_per_device: int | None = None,
    prefix: str | None = None,
    out: str | Path | None = None,
    save_weights: bool = False,
    profile: bool = False,
    tensorboard: str | Path | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    keep_checkpoints: int = KEPT,
    resume: bool = False,
    max_restarts: int = 0,
) -> dict[str, Any]:
    """Train a workload under a strategy; return the result object.

    `workload` is a built-in name, "path/to/file.py:function", or a function that returns a Workload
    (or a dict with its fields).
    """
    with loading_once(), _reference(workload) as reference:
        request = Request(
            strategy=strategy,
            workload=reference,
            replicas=replicas,
            stages=stages,
            batch_size=batch_size,
            accumulate=accumulate,
            micro_batches=micro_batches,
            schedule=schedule,
            precision=precision,
            loss_scale=loss_scale,
            no_scaler=no_scaler,
            bucket_mb=bucket_mb,
            bucket_view=bucket_view,
            static_graph=static_graph,
            find_unused=find_unused,
            sync_every_pass=sync_every_pass,
            steps=steps,
            epochs=epochs,
            samples=samples,
            seed=seed,
            device=device,
            placement=placement,
            threads_per_device=threads_per_device,
            prefix=prefix,
        )
        return training.run(
            request,
            out=Path(out) if out else None,
            save_weights=save_weights,
            profile=profile,
            tensorboard=Path(tensorboard) if tensorboard else None,
            survival=RestartPolicy(
                directory=Path(checkpoint) if checkpoint else None,
                every=checkpoint_every,
                keep=keep_checkpoints,
                resume=resume,
                max_restarts=max_restarts,
            ),
        )


def verify(
    workload: Source | Sequence[Source] | None = None,
    strategy: str = "all",
    *,
    out: str | Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Prove that a strategy trains the workload like one device does; options as for `run`, those
    left out are varied. Several workloads, in a list, share one launch."""
    given: Any = [] if workload is None else workload
    sources = given if isinstance(given, list | tuple) else [given]
    with loading_once(), ExitStack() as stack:
        references = [stack.enter_context(_reference(source)) for source in sources]
        return proof.verify(strategy, references, out=Path(out) if out else None, **options)


def compare(
    workload: Source = "mlp",
    setups: Sequence[str | dict[str, Any]] = (),
    *,
    rounds: int | None = None,
    steps: int | None = None,
    prove: bool = True,
    out: str | Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Measure set-ups side by side; return the comparison, whose `report` is the page that was
    written.

    A set-up is a strategy or a dict with the arguments of `run`, e.g. {"strategy": "ddp",
    "replicas": 2, "accumulate": 4}; without any, the default set. `options` hold for all of them.
    """
    from paralab.show.page import (
        write_report,
    )  # here: the template engine takes longer to import than all the rest

    if isinstance(setups, str):
        raise UsageError(f"setups={setups!r} is a string.", fix=f"a list of set-ups: [{setups!r}]")
    training.look_again()
    with loading_once(), _reference(workload) as reference:
        base = Request(strategy="single", workload=reference, **options)
        asked = [{"strategy": setup} if isinstance(setup, str) else setup for setup in setups]
        cases = [
            Case(comparison.with_common(base, setup)) for setup in asked
        ] or comparison.default_cases(base)
        result = comparison.compare(
            cases, rounds=rounds, steps=steps, prove=prove, out=Path(out) if out else None
        )
    return result | {"report": str(write_report(Path(result["run_folder"])))}


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError:
        return None
    return cloudpickle


@contextmanager
def _reference(workload: Source) -> Iterator[str]:
    """A name that another process can load: functions of a file by file and name, functions of a
    notebook by pickling."""
    if isinstance(workload, str):
        yield workload
        return
    if not callable(workload):
        raise UsageError(
            f"The workload is a {type(workload).__name__}; the ranks are other processes and must build their own.",
            fix="pass the function that returns it: paralab.run(make_workload, ...)",
        )
    code = getattr(workload, "__code__", None)
    name = getattr(workload, "__qualname__", "")
    in_file = code is not None and name.isidentifier() and Path(code.co_filename).is_file()
    cloudpickle = _cloudpickle()
    # The running script's own function is pickled where that is possible: importing the script
    # would run it again.
    if in_file and (workload.__module__ != "__main__" or cloudpickle is None):
        assert code is not None
        yield f"{code.co_filename}:{name}"
        return
    if cloudpickle is None:
        raise UsageError(
            "A function that stands in no file (a notebook's, or one inside another) needs cloudpickle to reach the ranks.",
            fix="pip install cloudpickle, or write the function to a file and pass 'file.py:function'",
        )
    with tempfile.TemporaryDirectory(prefix="paralab-") as folder:
        path = Path(folder, "workload.pickle")
        path.write_bytes(cloudpickle.dumps(workload))
        yield f"{PICKLED}{path}"
