"""The result of `paralab verify`, and its words. `paralab.analyse.judge` decides the result."""

from typing import Any

import msgspec

from paralab.plan.option import flag_of
from paralab.record.types import Record
from paralab.units import difference, plural

LOSSY = ("compress", "powersgd_rank", "sync_every", "outer_lr", "outer_momentum")
WAYS = (
    *("schedule", "zero", "shard_groups", "sequence_parallel", "recompute", "compile"),
    *LOSSY,
)
CONTROLS = {
    "batch_norm": "BatchNorm",
    "random": "random numbers",
    "state": "state that the forward pass changes",
    "casts": "casts to fp32",
    "rank_order": "the order of additions",
}


class _Differences(Record, frozen=True, kw_only=True):
    equal: bool
    max_difference: float | None = None  # of a parameter; None if not finite or the run failed
    gradient_difference: float | None = None
    loss_difference: float | None = None
    buffers: dict[str, float | None] = msgspec.field(default_factory=dict)  # those that differ
    tolerance: float
    measure: str


class Excuse(_Differences, frozen=True, kw_only=True):
    """The differences between training as configured and a single device, and their known
    reasons."""

    reasons: list[str]


class Verification(_Differences, frozen=True, kw_only=True):
    """Whether a configuration trains like a single device. `control` lists what both sides held fixed.

    For a lossy configuration, `equal` is False, and `as_simulated` says whether it equals its
    simulation on one device; for all others, `as_simulated` is None. `excused` has the differences
    from a single device that have a known reason."""

    as_simulated: bool | None = None
    steps: int  # 0 if the run failed
    worst_parameter: str | None = None
    cause: str | None = None  # why it differs, or why the run failed
    serious: bool  # True if the difference is always a mistake
    control: tuple[str, ...] = ()
    excused: Excuse | None = None
    proof_batch: int | None = None  # the proof's batch, if the configured one did not fit in memory

    @property
    def ran(self) -> bool:
        """Whether there is anything to compare: the run that should prove this did not fail."""
        return self.steps > 0

    @property
    def passed(self) -> bool:
        """Whether training is correct: like a single device, or as simulated."""
        return self.equal or self.as_simulated is True


class VerifyOptions(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Options that distinguish a configuration from the others."""

    workload: str
    batch_size: int
    partial_last_batch: bool
    varying_weights: bool
    accumulate: int | None = None
    replicas: int | None = None
    stages: int | None = None
    shards: int | None = None
    micro_batches: int | None = None
    schedule: str | None = None
    zero: int | None = None
    shard_groups: int | None = None
    sequence_parallel: bool | None = None
    recompute: str | None = None
    compile: bool | None = None
    compress: str | None = None
    powersgd_rank: int | None = None
    sync_every: int | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None

    @property
    def ways(self) -> dict[str, Any]:
        """The options that change how the strategy works, rather than how it splits the batch."""
        return {name: value for name in WAYS if (value := getattr(self, name)) is not None}


class Verified(Verification, frozen=True, kw_only=True):
    strategy: str
    options: VerifyOptions
    arithmetic: str


class Skipped(Record, frozen=True, kw_only=True):
    strategy: str
    options: VerifyOptions
    reason: str


class VerifyResult(Record, frozen=True, kw_only=True):
    """The result of `verify --json`. `passed` is True if every configuration that ran is equal to
    one device or, if it is lossy, to its simulation."""

    strategy: str
    workloads: list[str]
    precision: str
    passed: bool
    steps: int
    configurations: list[Verified]
    skipped: list[Skipped]
    dropout: str
    state: dict[str, list[str]]  # workload -> state that each forward call changes
    seconds: float
    run_folder: str


def apart_from(proof: Verification) -> str:
    """Return what was held fixed (`BatchNorm and random numbers`), or "" if it did not matter."""
    if not proof.excused or proof.excused.equal:
        return ""
    fixed = " and ".join(CONTROLS[kind] for kind in proof.control)
    return fixed or ("rounding" if proof.as_simulated is None else "")


def describe_simulated(proof: Verification) -> str:
    """`as simulated, weights differ by 3e-04 from single`."""
    distance = proof.excused.max_difference if proof.excused else None
    differ = "an unknown amount" if distance is None else difference(distance, 0)
    return f"{outcome(proof)}, weights differ by {differ} from single"


def outcome(proof: Verification) -> str:
    """Return `equal`, `equal apart from BatchNorm`, `as simulated`, `DIFFERS`, or `not proved`."""
    if not proof.passed:
        return "DIFFERS" if proof.ran else "not proved"
    reason = f" apart from {apart_from(proof)}" if apart_from(proof) else ""
    return f"{'as simulated' if proof.as_simulated else 'equal'}{reason}"


def alike(equal: int, total: int) -> str:
    """`2 of 3 configurations train like a single device`."""
    verb = "trains" if equal == 1 else "train"
    return f"{equal} of {plural(total, 'configuration')} {verb} like a single device"


def headline(result: VerifyResult) -> str:
    """Return `48 of 54 configurations train like a single device …; 6 did not run`."""
    ran, skipped = result.configurations, result.skipped
    equal = [each for each in ran if each.equal]
    simulated = sum(each.as_simulated is True for each in ran)
    apart, unproved = sum(bool(apart_from(each)) for each in equal), sum(not e.ran for e in ran)
    differ = len(ran) - len(equal) - simulated - unproved
    text = (
        f"{alike(len(equal), len(ran) + len(skipped))} over {plural(result.steps, 'step')} "
        f"({result.precision}, {ran[0].measure} within {ran[0].tolerance:g})"
    )
    text += f"; {apart} of these with a known cause held fixed (see below)" if apart else ""
    if simulated:
        text += f"; {simulated} {'is' if simulated == 1 else 'are'} lossy: as simulated"
    text += f"; {differ} {'differs' if differ == 1 else 'differ'}" if differ else ""
    text += f"; {unproved} could not be proved" if unproved else ""
    return text + (f"; {len(skipped)} did not run" if skipped else "")


def skipped_by_reason(result: VerifyResult) -> list[tuple[str, int, str]]:
    """Return one entry per reason: the strategies, the number of configurations, and the reason."""
    by_reason: dict[str, list[str]] = {}
    for each in result.skipped:
        flags = [
            flag_of(name) if value is True else f"{flag_of(name)} {value}"
            for name, value in each.options.ways.items()
        ]
        by_reason.setdefault(each.reason, []).append(" ".join([each.strategy, *flags]))
    return [
        (", ".join(dict.fromkeys(names)), len(names), reason) for reason, names in by_reason.items()
    ]
