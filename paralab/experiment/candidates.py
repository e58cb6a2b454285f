"""Choose which of `tune`'s configurations to measure: those that this machine and model support and
whose estimated memory fits a device."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from paralab.analyse.manifest import LeftOut, Pruned
from paralab.errors import UsageError
from paralab.experiment.configurations import FEWEST_STEPS, Configuration, choose_steps
from paralab.experiment.memory import estimate_all
from paralab.experiment.planning import resolve_here
from paralab.launch.inspect import Inspected
from paralab.plan.memory_trial import Kind, MemoryTrial
from paralab.plan.plan import Plan, label
from paralab.plan.request import Request
from paralab.plan.search_space import SAVERS


@dataclass
class Candidates:
    """limit    bytes that a configuration may need on one device; None for no limit
    pruned      configurations that need more
    left_out    configurations that cannot run
    unknown     why configurations have no estimate: configuration -> reason
    """

    inspected: Inspected
    limit: int | None
    batch_size: int
    pruned: dict[str, Pruned] = field(default_factory=dict)
    left_out: dict[str, LeftOut] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    considered: set[str] = field(default_factory=set)
    # Plans of one kind share a trial.
    trials: dict[Kind, MemoryTrial | str] = field(default_factory=dict)

    def name(self, request: Request) -> str:
        """Return the label, with the batch size if it is not the default."""
        batch = request.batch_size or self.batch_size
        return label(request) + (f" · batch {batch}" if batch != self.batch_size else "")

    def configure(self, request: Request) -> Configuration:
        """Return the configuration to measure. A larger batch gets fewer steps, because each takes
        longer."""
        name, batch = self.name(request), request.batch_size or self.batch_size
        if request.steps is None and batch > self.batch_size:
            steps = choose_steps(request, self.inspected) * self.batch_size // batch
            request = replace(request, steps=max(FEWEST_STEPS, steps))
        return Configuration(request, name=name, optional=True)

    def admit(self, requests: Iterable[Request], save: bool = False) -> list[Request]:
        """Return the configurations that can be measured. With `save`, replace one that does not
        fit with its first variant (with recomputed blocks or accumulation) that fits."""
        plans: dict[Request, Plan] = {}
        for request in dict.fromkeys(requests):
            self.considered.add(self.name(request))
            try:
                plans[request] = resolve_here(request, self.inspected)
            except UsageError as error:
                name = self.name(request)
                self.left_out[name] = LeftOut(name=name, reason=error.problem)
        large = self._find_large(plans)
        for request in large:
            name, command = self.name(request), self.configure(request).command
            self.pruned[name] = Pruned(name=name, command=command, needed_bytes=large[request])
        smaller = self._save(list(large)) if save else {}
        admitted = [smaller.get(request, request) for request in plans]
        return [request for request in dict.fromkeys(admitted) if request not in large]

    def _find_large(self, plans: dict[Request, Plan]) -> dict[Request, int]:
        """Return the estimated bytes of each configuration that does not fit."""
        if self.limit is None:
            return {}
        large = {}
        memories = estimate_all(list(plans.values()), self.trials)
        for request, memory in zip(plans, memories, strict=True):
            if memory.peak is None:
                self.unknown[self.name(request)] = memory.not_estimated or memory.no_peak or ""
            elif memory.peak > self.limit:
                large[request] = memory.peak
        return large

    def _save(self, large: Sequence[Request]) -> dict[Request, Request]:
        """Map each configuration that does not fit to a variant that does, if there is one."""
        smaller: dict[Request, Request] = {}
        for way in SAVERS:
            plans: dict[Request, Plan] = {}
            owners: dict[Request, Request] = {}
            for request in large:
                is_free = all(getattr(request, name) is None for name in way)
                if request in smaller or not is_free:
                    continue
                changed = replace(request, **way)
                try:
                    plans[changed] = resolve_here(changed, self.inspected)
                except UsageError:
                    continue  # this model has no blocks, or the batch cannot be split further
                owners[changed] = request
            too_large = self._find_large(plans)
            smaller |= {owners[each]: each for each in plans if each not in too_large}
        return smaller
