"""The Python interface: the same commands as typed functions, for scripts and notebooks.

Each function returns the object that its command prints with `--json`. The options match the
command line. They repeat the names and types of the `Request` fields so that editors can complete
them. A test compares the two.
"""

import inspect
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from inspect import Parameter
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack, get_args

from msgspec.structs import replace

from paralab.analyse.blocks import Document
from paralab.analyse.compare import Comparison
from paralab.analyse.result import Result
from paralab.analyse.verify import VerifyResult
from paralab.errors import UsageError, unknown
from paralab.experiment import compare as comparison
from paralab.experiment import run as experiment
from paralab.experiment import verify as verification
from paralab.experiment.configurations import Configuration, default_configurations, with_common
from paralab.experiment.planning import forget_inspections
from paralab.launch.processes import import_torch_once
from paralab.launch.run_options import RunOptions
from paralab.plan.option import Option, options_of
from paralab.plan.request import Request
from paralab.show.notebook import Shown, as_html, describe
from paralab.workload.reference import PICKLED
from paralab.workload.workload import Workload

Source = str | Callable[[], Workload | dict[str, Any]]
Function = TypeVar("Function", bound=Callable[..., Any])

# Results are plain data without a display method, so the interface adds one.
for each in get_args(Shown):
    each.__repr__ = describe
    each._repr_html_ = as_html


class ConfigurationOptions(TypedDict, total=False):
    """The `Request` fields except the workload and the strategy."""

    batch_size: int | None
    samples: int | None
    seed: int
    replicas: int | None
    stages: int | None
    zero: int | None
    shard_groups: int | None
    shards: int | None
    sequence_parallel: bool | None
    schedule: str | None
    micro_batches: int | None
    accumulate: int | None
    sync_every: int | None
    outer_lr: float | None
    outer_momentum: float | None
    placement: str | None
    recompute: str | None
    compile: bool | None
    precision: str | None
    loss_scale: float | None
    no_scaler: bool | None
    bucket_mb: float | None
    bucket_view: bool | None
    static_graph: bool | None
    find_unused: bool | None
    sync_every_pass: bool | None
    compress: str | None
    powersgd_rank: int | None
    steps: int | None
    epochs: int | None
    device: str
    backend: str | None
    mps: bool | None
    threads_per_device: int | None
    prefix: str | None


class AllOptions(ConfigurationOptions, total=False):
    """The `Request` and `RunOptions` fields."""

    out: str | Path | None
    save_weights: bool
    profile: bool
    tensorboard: str | Path | None
    checkpoint: str | Path | None
    checkpoint_every: int | None
    keep_checkpoints: int
    resume: bool
    max_restarts: int
    start_deadline: float
    step_deadline: float
    save_deadline: float


CONFIGURATION = tuple(each for each in options_of(Request) if each.name != "workload")
ALL = CONFIGURATION + options_of(RunOptions)


def lists(options: Sequence[Option]) -> Callable[[Function], Function]:
    """Replace `**options` with these options in a function's signature and docstring."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        *named, _ = signature.parameters.values()
        keyword = Parameter.KEYWORD_ONLY
        listed = [
            Parameter(each.name, keyword, default=each.default, annotation=each.annotation)
            for each in options
        ]
        complete = signature.replace(parameters=[*named, *listed])
        function.__signature__ = complete  # type: ignore[attr-defined]

        described = "\n".join(f"    {each.name}: {each.help}" for each in options)
        function.__doc__ = f"{inspect.getdoc(function)}\n\nOptions:\n\n{described}"
        return function

    return decorate


@lists(ALL)
def run(workload: Source, strategy: str, **options: Unpack[AllOptions]) -> Result:
    """Train a workload with a strategy and return the result.

    `workload` is a built-in name, "path/to/file.py:function", or a function that returns a Workload
    (or a dict with its fields).
    """
    _require_known(options, ALL)
    forget_inspections()
    chosen = RunOptions(**_values_of(RunOptions, options))
    with import_torch_once(), _reference(workload) as reference:
        request = Request(strategy, reference, **_values_of(Request, options))
        return experiment.run(request, chosen)


@lists(CONFIGURATION)
def verify(
    workload: Source | Sequence[Source] | None = None,
    strategy: str = "all",
    *,
    out: str | Path | None = None,
    step_deadline: float = verification.STEP_DEADLINE,
    **options: Unpack[ConfigurationOptions],
) -> VerifyResult:
    """Check that a strategy trains the workload like a single device.

    The given options apply to every configuration; all other options vary. All workloads in a list
    share one launch.
    """
    _require_known(options, CONFIGURATION)
    forget_inspections()
    sources: Any = [] if workload is None else workload
    sources = sources if isinstance(sources, list | tuple) else [sources]
    with import_torch_once(), ExitStack() as stack:
        references = [stack.enter_context(_reference(source)) for source in sources]
        folder = Path(out) if out else None
        return verification.verify(
            strategy, references, out=folder, step_deadline=step_deadline, **options
        )


@lists(CONFIGURATION)
def compare(
    workload: Source = "mlp",
    configurations: Sequence[str | dict[str, Any]] = (),
    *,
    rounds: int | None = None,
    prove: bool = True,
    out: str | Path | None = None,
    **options: Unpack[ConfigurationOptions],
) -> Comparison:
    """Measure configurations side by side. Return the comparison, which includes the path to its
    page.

    A configuration is a strategy or a dict of `run` arguments, for example {"strategy": "ddp",
    "replicas": 2, "accumulate": 4}. If you give no configurations, paralab measures the default
    ones. `options` apply to all configurations.
    """
    from paralab.show.page import write_report  # imported here, because jinja2 is slow to import

    if isinstance(configurations, str):
        problem = f"configurations={configurations!r} is a string."
        raise UsageError(problem, fix=f"a list: [{configurations!r}]")
    _require_known(options, CONFIGURATION)
    forget_inspections()
    with import_torch_once(), _reference(workload) as reference:
        base = Request("single", reference, **options)
        asked = [{"strategy": each} if isinstance(each, str) else each for each in configurations]
        cases = [Configuration(with_common(base, each)) for each in asked]
        result = comparison.compare(
            cases or default_configurations(base),
            rounds=rounds,
            verify=prove,
            out=Path(out) if out else None,
        )
    return replace(result, report=str(write_report(Path(result.run_folder))))


def practical(
    name: str | int,
    part: int | None = None,
    *,
    workload: Source | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    rounds: int | None = None,
    steps: int | None = None,
    variant: str | None = None,
    out: str | Path | None = None,
) -> Document:
    """Run a practical (5, 6, 7, 10, or "handbook") or a part of it. Return the filled-in sheet."""
    from paralab.course import practical as course
    from paralab.course.configurations import find

    with import_torch_once(), _reference(workload or find(name).workload) as reference:
        base = Request("single", reference, batch_size=batch_size, device=device)
        document, folder = course.run(
            str(name),
            part,
            base=base,
            variant=variant,
            rounds=rounds,
            steps=steps,
            out=Path(out) if out else None,
        )
    return replace(document, run_folder=str(folder))


def _require_known(given: Mapping[str, Any], options: Sequence[Option]) -> None:
    known = [each.name for each in options]
    for name in given:
        if name not in known:
            raise unknown("option", name, known)


def _values_of(owner: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options that are fields of this dataclass. File names become paths."""
    return {
        each.name: Path(value) if each.kind is Path and value is not None else value
        for each in options_of(owner)
        if (value := given.get(each.name, each.default)) is not each.default
    }


@contextmanager
def _reference(workload: Source) -> Iterator[str]:
    """Yield a name under which another process can load the workload.

    A function in a file is named by its file and its name. A function in a notebook is pickled.
    """
    if isinstance(workload, str):
        yield workload
        return
    if not callable(workload):
        problem = f"The workload is a {type(workload).__name__}, but each rank must build its own."
        fix = "pass the function that returns it: paralab.run(make_workload, ...)"
        raise UsageError(problem, fix)

    code = getattr(workload, "__code__", None)
    name = getattr(workload, "__qualname__", "")
    in_file = code is not None and name.isidentifier() and Path(code.co_filename).is_file()
    try:
        import cloudpickle
    except ImportError:
        cloudpickle = None
    # If possible, pickle a function in the running script, because importing the script would run
    # it again.
    if in_file and (workload.__module__ != "__main__" or cloudpickle is None):
        assert code is not None
        yield f"{code.co_filename}:{name}"
        return

    if cloudpickle is None:
        problem = "A function that is not at the top level of a file needs cloudpickle."
        fix = "pip install cloudpickle, or write it to a file and pass 'file.py:function'"
        raise UsageError(problem, fix)
    with tempfile.TemporaryDirectory(prefix="paralab-") as folder:
        path = Path(folder, "workload.pickle")
        path.write_bytes(cloudpickle.dumps(workload))
        yield f"{PICKLED}{path}"
