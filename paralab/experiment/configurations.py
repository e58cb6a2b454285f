"""Choose and plan an experiment's configurations, and skip those that cannot run here."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from paralab.analyse.manifest import LeftOut
from paralab.errors import UsageError, unknown
from paralab.experiment.planning import inspect_once, resolve_here
from paralab.launch.inspect import Inspected
from paralab.launch.launched_by import refuse_inside
from paralab.machine.host import threads_asked
from paralab.plan.option import flag_of, options_of, to_words
from paralab.plan.plan import Plan, label
from paralab.plan.request import (
    APPLIES,
    DDP,
    PARALLELISM,
    STRATEGIES,
    Options,
    Request,
    only_applicable,
    uses_blocks,
)
from paralab.workload.reference import check_reference

STEPS = {"cpu": 10, "cuda": 30}  # steps per configuration and round; the first three are warm-up
# If a step takes longer than this, use more rounds instead of longer ones.
SLOW_SECONDS, FEWEST_STEPS = 0.1, 6


@dataclass(frozen=True)
class Configuration:
    """One row in a comparison. An `optional` configuration is skipped if it cannot run here."""

    request: Request
    name: str = ""
    optional: bool = False

    @property
    def label(self) -> str:
        return self.name or label(self.request)

    @property
    def command(self) -> str:
        """The `paralab run` command, without the number of measured steps."""
        words = to_words(replace(self.request, steps=None))
        return shlex.join(["paralab", "run", self.request.strategy, *words])


@dataclass(frozen=True)
class Resolved:
    configuration: Configuration
    plan: Plan
    inspected: Inspected


def resolve_all(
    configurations: Sequence[Configuration], known: Inspected | None = None, verify: bool = True
) -> tuple[list[Resolved], list[LeftOut]]:
    """Return the plans, and the configurations that cannot run. All CPU devices get the same number
    of cores. `known` is the inspection of the only workload, if it was already inspected. Without
    `verify`, do not check whether a batch can be split."""
    refuse_inside()
    strategies: dict[str, list[str]] = {}
    for each in configurations:
        workload = check_reference(each.request.workload)
        strategies.setdefault(workload, []).append(each.request.strategy)
    inspections = dict.fromkeys(strategies, known) if known else {}
    left_out: list[LeftOut] = []

    def resolve_one(each: Configuration, threads: int | None) -> Resolved | None:
        workload = check_reference(each.request.workload)
        if workload not in inspections:
            blocks = any(uses_blocks(each.request) for each in configurations)
            inspections[workload] = inspect_once(
                each.request, strategies[workload], blocks=blocks, verify=verify
            )
        inspected = inspections[workload]
        request = replace(
            each.request,
            workload=workload,
            steps=choose_steps(each.request, inspected),
            threads_per_device=each.request.threads_per_device or threads,
        )
        try:
            plan = resolve_here(request, inspected)
        except UsageError as error:
            if not each.optional:
                raise
            left_out.append(LeftOut(name=each.label, reason=error.problem))
            return None
        return Resolved(replace(each, request=request), plan, inspected)

    first = [item for each in configurations if (item := resolve_one(each, None))]
    if not first:
        reasons = "\n".join(f"{each.name}: {each.reason}" for each in left_out)
        raise UsageError("None of these configurations can run here.", detail=reasons)
    if first[0].plan.device != "cpu":
        return first, left_out

    most = max(item.plan.num_devices for item in first)
    threads = threads_asked() or max(1, first[0].inspected.machine.cores // most)
    again = [resolve_one(item.configuration, threads) for item in first]
    return [item for item in again if item], left_out


def choose_steps(request: Request, inspected: Inspected) -> int:
    """Return the number of steps per round."""
    if request.steps is not None:
        return request.steps
    if sum(layer.seconds for layer in inspected.summary.layers) > SLOW_SECONDS:
        return FEWEST_STEPS
    return STEPS["cuda" if inspected.machine.gpus and request.device != "cpu" else "cpu"]


def default_configurations(base: Request) -> list[Configuration]:
    """Return each strategy on two devices, and each low precision that this machine supports."""
    machine, _ = inspect_once(base, ["pipeline", "hybrid"], verify=True)
    on_gpu = bool(machine.gpus) and base.device != "cpu"
    low = ("tf32", "bf16", "fp16") if on_gpu else ("bf16",)
    asked: list[Options] = [
        *({"strategy": name} for name in ("single", "dp", "ddp")),
        {"strategy": "ddp", "accumulate": 4},
        *({"strategy": "ddp", "precision": precision} for precision in low),
        {"strategy": "ddp", "precision": "bf16", "accumulate": 4},
        *({"strategy": name} for name in ("pipeline", "hybrid")),
    ]
    requests = [with_common(base, own) for own in asked]
    return [Configuration(each, optional=number > 3) for number, each in enumerate(requests)]


def all_configurations(base: Request) -> list[Configuration]:
    """Return the default configurations, and every strategy with every way to divide its work.

    Only `single` varies options that do not depend on the strategy, such as recomputation.
    """
    asked: list[Options] = [{"strategy": name} for name in STRATEGIES]
    options = {each.name: each for each in options_of(Request)}
    for each in options.values():
        choices = each.choices if each.heading in (PARALLELISM, DDP) else ()
        examples = each.examples or tuple({each.name: choice} for choice in choices)
        names = ["single"] if each.applies_to("single") else each.strategies
        asked += [
            {"strategy": name, **example}
            for name in names
            for example in examples
            if all(options[other].applies_to(name) for other in example)
        ]

    requests = [each.request for each in default_configurations(base)]
    requests += [with_common(base, own) for own in asked]
    different: dict[str, Request] = {}
    for request in requests:
        different.setdefault(label(request), request)
    order = list(STRATEGIES)
    ordered = sorted(different.values(), key=lambda request: order.index(request.strategy))
    return [Configuration(request, optional=True) for request in ordered]


def with_common(base: Request, own: Options) -> Request:
    """Build a configuration from its options and the common options that apply to it."""
    known = [field.name for field in fields(Request)]
    for name in own:
        if name not in known:
            raise unknown("option", name, known)
    strategy = own.get("strategy")
    if not isinstance(strategy, str):
        example = '{"strategy": "ddp", "replicas": 2}'
        raise UsageError(f"The configuration {own} has no strategy.", fix=example)
    common = Request(strategy)  # a later check rejects an unknown strategy
    if strategy in STRATEGIES:
        common = only_applicable(replace(base, strategy=strategy))
    return replace(common, **own)


def scale_configurations(base: Request, counts: str, weak: bool) -> list[Configuration]:
    """Return a configuration for each number of replicas. If `weak` is true, the batch size grows
    in proportion."""
    words = {word.strip() for word in counts.split(",")}
    numbers = sorted(int(word) for word in words if word.isdecimal() and int(word))
    if base.strategy not in APPLIES["replicas"]:
        known = "one of: " + ", ".join(APPLIES["replicas"])
        raise UsageError(f"{base.strategy} has no replicas to scale.", fix=known)
    if len(numbers) < max(2, len(words)):
        problem = f"--replicas {counts} is not a list of at least two positive numbers."
        raise UsageError(problem, fix="--replicas 1,2,4")
    _, summary = inspect_once(base, [base.strategy])
    batch = base.batch_size or summary.batch_size
    batches = [batch * number // numbers[0] if weak else batch for number in numbers]
    return [
        Configuration(replace(base, replicas=number, batch_size=size))
        for number, size in zip(numbers, batches, strict=True)
    ]


def with_distinct_names(configurations: Sequence[Configuration]) -> list[Configuration]:
    """Make equal labels distinct by adding options that differ. Reject duplicate configurations."""
    requests = [each.request for each in configurations]
    twice = next((each for each in configurations if requests.count(each.request) > 1), None)
    if twice:
        problem = f"The configuration {twice.label!r} appears twice."
        raise UsageError(problem, fix="list each configuration once; the rounds repeat it")
    if len({request.prefix for request in requests}) > 1:
        problem = "Configurations with different --prefix values cannot share processes."
        raise UsageError(problem, fix="put --prefix outside the quotes")

    labels = [each.label for each in configurations]
    silent = [option.name for option in options_of(Request) if option.label is None]
    differing = [name for name in silent if len({getattr(r, name) for r in requests}) > 1]

    def lengthen(each: Configuration) -> Configuration:
        values = {name: getattr(each.request, name) for name in differing}
        words = [f"{flag_of(name)} {value}" for name, value in values.items() if value is not None]
        return replace(each, name=" · ".join([each.label, *words]))

    return [lengthen(each) if labels.count(each.label) > 1 else each for each in configurations]
