"""`paralab tune`: search for the configuration with the most samples per second.

The search is a race over rounds of measurements. paralab does not use a search library, because
there are few options with few values each, and a measurement takes seconds. It is more important to
measure each value next to the default, at about the same time.

    layouts   every way to use the devices                        -> the best three
    changes   these, and these with one change                    -> the curve by bucket size
    combined  the promising changes combined                      -> the best of everything
    final     the best and the default, verified, five rounds     -> how much faster, how certain

Before the final phase, a configuration leaves the search only if it is clearly slower than the
fastest (`paralab.analyse.racing`). The others are measured again.

Before each phase (a rung), configurations that do not fit in memory are pruned. Low precision is
measured the same way but listed separately. It is fast because it rounds, which changes the last
digits of the results.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path

from msgspec.structs import replace as replace_fields

from paralab.analyse.compare import Comparison, Row
from paralab.analyse.manifest import LeftOut, Pruned
from paralab.analyse.racing import find_unsettled, rank, typical
from paralab.analyse.tune import TuneResult, choice_of
from paralab.errors import RunFailed, UsageError, unknown
from paralab.experiment.candidates import Candidates
from paralab.experiment.compare import compare
from paralab.experiment.configurations import with_common
from paralab.experiment.planning import inspect_once, slug
from paralab.launch.job import Print
from paralab.machine.host import Machine
from paralab.plan.check import check
from paralab.plan.option import flag_of, options_of
from paralab.plan.request import ALL, AVERAGED, STRATEGIES, Options, Request
from paralab.plan.search_space import TUNED, changes, divided, layouts
from paralab.record.folder import RunFolder
from paralab.units import plural, size
from paralab.workload.reference import check_reference

FINAL_ROUNDS = 5
KEPT = 3  # layouts whose options are searched
BEST = 2  # configurations in the final phase, besides the default and the best of their kind
TOLERATED = 1.02  # a change that looks at most this much slower on its own may help in combination
FULL = 0.95  # skip configurations that need more than this share of a device's memory


def tune(
    base: Request,
    *,
    devices: int | None = None,
    device_bytes: int | None = None,
    any_batch: bool = False,
    trials: int | None = None,
    budget_seconds: float | None = None,
    out: Path | None = None,
    say: Print = lambda line: None,
) -> TuneResult:
    """Run the search, and compute the choice from the run folders of the rungs.

    devices       search every way to use this many devices
    device_bytes  the memory of a device; by default, the GPU's memory
    any_batch     also search the batch size
    """
    if budget_seconds is not None and not budget_seconds > 0:
        problem = f"--seconds {budget_seconds:g} is not a positive number."
        raise UsageError(problem, fix="--seconds 60 or more")
    if base.strategy not in (ALL, *STRATEGIES):
        raise unknown("strategy", base.strategy, [ALL, *STRATEGIES])
    # A lossy strategy cannot win, because it trains differently.
    equivalent = [name for name in STRATEGIES if name not in AVERAGED]
    names = equivalent if base.strategy == ALL else [base.strategy]
    first = replace(base, strategy=names[0], workload=check_reference(base.workload))
    if base.strategy != ALL:
        check(first)
    started = time.perf_counter()
    inspected = inspect_once(first, names, blocks=True, verify=True)
    machine, summary = inspected
    on_gpu = bool(machine.gpus) and base.device != "cpu"
    if base.strategy == ALL and devices is None:
        devices = len(machine.gpus) if on_gpu else machine.cores
    if device_bytes is None and on_gpu:
        device_bytes = int(FULL * min(gpu.memory_bytes for gpu in machine.gpus))
    candidates = Candidates(inspected, device_bytes, base.batch_size or summary.batch_size)
    asked = _roots(first, names, devices)
    say(f"planning {plural(len(asked), 'layout')}")  # slow for tp, whose split must be proved
    roots = candidates.admit(asked, save=True)
    if not roots:
        raise _nothing_fits(candidates)

    folder = RunFolder.create(out, f"tune_{base.strategy}_{slug(summary.name)}")
    folder.write_manifest(
        kind="tune",
        machine=asdict(machine),
        workload=asdict(summary),
        devices=devices,
        device_bytes=device_bytes,
        any_batch=any_batch,
    )
    search = _Search(folder, candidates, roots, _Budget(started, trials, budget_seconds), say)
    try:
        search.run(lambda root: changes(root, summary, on_gpu, any_batch), save=any_batch)
    finally:  # even if the search is interrupted
        folder.write("search.json", search.notes())
    seconds = round(time.perf_counter() - started, 3)
    result = replace_fields(choice_of(folder.path), seconds=seconds)
    folder.write("result.json", result.to_dict())
    return result


def _roots(base: Request, names: list[str], devices: int | None) -> list[Request]:
    """Return the layouts to search. The options that the user gave stay fixed."""
    if devices is None:
        return [base]
    fixed = [
        own
        for own in layouts(devices, names)
        if all(
            getattr(base, axis) in (None, number)
            for axis, number in own.items()
            if axis != "strategy"
        )
    ]
    roots = [with_common(base, own) for own in fixed]
    if not roots:
        axes = [each for each in options_of(Request) if each.axis]
        given = [
            f"{flag_of(e.name)} {getattr(base, e.name)}" for e in axes if getattr(base, e.name)
        ]
        which = f"{' and '.join(names) if len(names) < 3 else 'A strategy'} "
        problem = f"{which}{' '.join(given)}".strip()
        problem += f" cannot use exactly {plural(devices, 'device')}."
        fix = "a different number of --devices, or "
        fix += (
            f"leave out {' and '.join(word.split()[0] for word in given)}" if given else "tune all"
        )
        raise UsageError(problem, fix=fix)
    if len(names) == 1:
        return roots
    roots.sort(key=lambda layout: layout.strategy not in ("single", "ddp"))  # the default is first
    alone = [] if devices == 1 else [with_common(base, {"strategy": "single"})]
    return [*_in_turns([divided(layout) for layout in roots]), *alone]


def _in_turns(columns: list[list[Request]]) -> list[Request]:
    """Return the first of each column, then the second of each, because --trials may cut off the
    list."""
    return [each for row in zip_longest(*columns) for each in row if each]


def _nothing_fits(candidates: Candidates) -> UsageError:
    if not candidates.pruned:
        reasons = "\n".join(f"{e.name}: {e.reason}" for e in candidates.left_out.values())
        return UsageError("None of these configurations can run here.", detail=reasons)
    least = min(candidates.pruned.values(), key=lambda each: each.needed_bytes)
    number = len(candidates.considered)
    none = (
        "The configuration does not fit" if number == 1 else f"None of {number} configurations fits"
    )
    return UsageError(
        f"{none} in {size(candidates.limit)}: "
        f"{least.name} needs the least, {size(least.needed_bytes)}, and recomputation and "
        "accumulation do not save enough.",
        fix="a smaller --batch-size, more --devices, or a larger --device-memory",
    )


@dataclass
class _Budget:
    """The time and the trials that the user allows. Half of each is for the final rung."""

    started: float
    trials: int | None
    seconds: float | None
    spent: int = 0  # trials used so far
    untried: int = 0  # configurations that were not measured because trials ran out

    def is_left(self) -> bool:
        """Return whether another phase may start before the final one."""
        enough_time = self.seconds is None or time.perf_counter() - self.started < self.seconds / 2
        return enough_time and (self.trials is None or self.spent < self.trials / 2)

    def rounds(self) -> int:
        """Return the number of rounds for single changes. If --trials limits the search, spend the
        trials on more configurations instead."""
        return 2 if self.trials is None else 1

    def limit(self, requests: list[Request], rounds: int = 1) -> list[Request]:
        """Return as many configurations as the remaining trials allow, and at least one."""
        if self.trials is None:
            return requests
        chosen = requests[: max(1, (self.trials // 2 - self.spent) // rounds)]
        self.untried += len(requests) - len(chosen)
        return chosen

    def trials_left(self) -> int | None:
        """Return how many configurations a phase may measure besides the default, or None."""
        return None if self.trials is None else max(0, self.trials // 2 - self.spent - 1)

    def final_rounds(self, finalists: int) -> int:
        if self.trials is None:
            return FINAL_ROUNDS
        return max(2, min(FINAL_ROUNDS, (self.trials - self.spent) // (finalists + 1)))


class _Search:
    """The search so far. `times` are each configuration's times per sample, one per round, relative
    to the default."""

    def __init__(
        self,
        folder: RunFolder,
        candidates: Candidates,
        roots: list[Request],
        budget: _Budget,
        say: Print,
    ) -> None:
        self.folder, self.candidates, self.roots, self.say = folder, candidates, roots, say
        self.default: Request | None = roots[0] if len(roots) == 1 else None  # None: unknown
        self.times: dict[Request, list[float]] = {}
        self.budget, self.rungs = budget, 0

    def run(self, change: Callable[[Request], list[Request]], save: bool) -> None:
        """Measure all rungs. `change` returns the variants of a layout with one change."""
        budget, admit = self.budget, self.candidates.admit
        if len(self.roots) > 1:
            self.measure(plural(len(self.roots), "layout"), budget.limit(self.roots))
            self.race(KEPT)
        if budget.is_left() or not self.times:
            self.keep_best(KEPT)
            own = budget.limit(admit(_in_turns([change(root) for root in self.roots]), save))
            self.measure(plural(len(own), "single change"), [*self.roots, *own], budget.rounds())
        if budget.is_left() and (combined := budget.limit(admit(self.combine()), 2)):
            self.measure(plural(len(combined), "combination"), combined, 2)
        self.race(BEST)
        finalists = admit(self.finalists())
        rounds = budget.final_rounds(len(finalists))
        self.measure(f"the best {len(finalists)}", finalists, rounds, verify=True)

    def race(self, keep: int) -> None:
        """Among the configurations that train like the default, keep measuring those that may be
        the fastest until only `keep` remain. A change of precision races only against other such
        changes."""
        while self.budget.is_left():
            same = self._by_precision(True)
            other = self._by_precision(False)
            left = find_unsettled(same, keep) if same else []
            left += find_unsettled(other, 1) if other else []
            chosen = left[: self.budget.trials_left()]
            if not chosen:
                return
            self.measure(f"{plural(len(chosen), 'configuration')} again", chosen)

    def _by_precision(self, same: bool) -> dict[Request, list[float]]:
        assert self.default
        own = self.default.precision
        return {r: times for r, times in self.times.items() if (r.precision == own) == same}

    def measure(
        self, what: str, requests: Sequence[Request], rounds: int = 1, verify: bool = False
    ) -> None:
        """Measure a rung: the default and these configurations. The final rung verifies them."""
        self.rungs += 1
        self.say(f"phase {self.rungs}: {what}, {plural(rounds, 'round')}")
        first = [self.default] if self.default else []
        asked = {self.candidates.name(each): each for each in [*first, *requests]}
        every = [self.candidates.configure(each) for each in asked.values()]
        self.budget.spent += len(every) * rounds
        path = self.folder.path / f"rung{self.rungs}"
        rung = compare(
            every,
            rounds=rounds,
            verify=verify,
            out=path,
            say=self.say if verify else lambda line: None,
            baseline=every[0].name if self.default else None,
            inspected=self.candidates.inspected,
        )
        for failed in rung.failed:
            if not rung.rows or (self.default and failed.name == every[0].name):
                raise RunFailed(f"{failed.name} fails: {failed.error}", f"read the logs in {path}")
            self.candidates.left_out[failed.name] = LeftOut(name=failed.name, reason=failed.error)
        times = self._relative_times(rung, asked)
        for request in asked.values():
            if request in times:
                self.times.setdefault(request, []).extend(times[request])
            else:  # it failed, for example because memory ran out, or does not fit
                self.times.pop(request, None)
        self._choose_default()
        if not self.times:
            raise _nothing_fits(self.candidates)

    def _choose_default(self) -> None:
        """Set the default to the first measured layout that fits in memory."""
        if self.default:
            return
        self.default = next((root for root in self.roots if root in self.times), None)
        if self.default is None:
            return
        [one] = self.times[self.default]
        self.times = {request: [time_ / one] for request, [time_] in self.times.items()}

    def _relative_times(
        self, rung: Comparison, asked: dict[str, Request]
    ) -> dict[Request, list[float]]:
        """Return the relative times of the configurations that fit in memory, one per round."""
        seconds = {row.name: row.round_seconds_per_sample for row in rung.rows}
        times = {}
        for row in rung.rows:
            if _fits(row, rung.machine, self.candidates.limit):
                pairs = zip(seconds[row.name], seconds[str(rung.baseline)], strict=True)
                times[asked[row.name]] = [own / baseline for own, baseline in pairs]
            else:
                needed = max(memory.bytes for memory in row.peak_bytes)
                pruned = Pruned(name=row.name, command=row.command, needed_bytes=needed)
                self.candidates.pruned[row.name] = pruned
        return times

    def keep_best(self, number: int) -> None:
        known = {root: self.times[root] for root in self.roots if root in self.times}
        if known:
            self.roots = rank(known)[:number]

    def combine(self) -> list[Request]:
        """Combine each layout's best values that do not look slower: all of them, and all but one."""
        combined = []
        usual = {request: typical(times) for request, times in self.times.items()}
        for root in self.roots:
            best: Options = {}
            for name in TUNED:
                values = {
                    getattr(request, name): time_ / usual[root]
                    for request, time_ in usual.items()
                    if root in usual and _only_change(root, request) == name
                }
                if values and name != "precision":
                    value = min(values, key=lambda value: values[value])
                    best |= {name: value} if values[value] <= TOLERATED else {}
            if best.get("accumulate"):
                best.pop("static_graph", None)
            fewer = [{name: best[name] for name in best if name != left_out} for left_out in best]
            combined += [replace(root, **own) for own in [best, *fewer] if len(own) > 1]
        return list(dict.fromkeys(combined))

    def finalists(self) -> list[Request]:
        """Return the best configurations, the best one of another strategy, and the best one in
        the fastest low precision."""
        assert self.default
        same = [r for r in rank(self._by_precision(True)) if r != self.default]
        other = self._by_precision(False)
        low = [r for r in rank(other) if typical(other[r]) < 1]
        chosen = same[:BEST]
        chosen += [r for r in same if chosen and r.strategy != chosen[0].strategy][:1]
        chosen += [replace((chosen or [self.default])[0], precision=r.precision) for r in low[:1]]
        return list(dict.fromkeys(chosen))

    def notes(self) -> dict[str, object]:
        candidates = self.candidates
        return {
            "considered": len(candidates.considered),
            "untried": self.budget.untried,
            "pruned": [each.to_dict() for each in candidates.pruned.values()],
            "left_out": [each.to_dict() for each in candidates.left_out.values()],
            "not_estimated": [
                {"name": name, "reason": why} for name, why in candidates.unknown.items()
            ],
        }


def _only_change(root: Request, request: Request) -> str | None:
    """Return the name of the only option that differs, or None if several differ."""
    differing = [name for name in vars(root) if getattr(root, name) != getattr(request, name)]
    return differing[0] if len(differing) == 1 else None


def _fits(row: Row, machine: Machine, limit: int | None) -> bool:
    """Return whether a configuration fits in memory. On a GPU, compare the allocator's peak with
    device memory. On CPUs, compare the tensors on all devices with the machine's memory."""
    peaks = [memory.bytes for memory in row.peak_bytes]
    if limit is not None and peaks and max(peaks) > limit:
        return False
    if machine.gpus and row.peak_bytes and row.peak_bytes[0].how == "allocator":
        return max(peaks) <= FULL * min(gpu.memory_bytes for gpu in machine.gpus)
    return machine.memory_bytes is None or sum(peaks) <= FULL * machine.memory_bytes
