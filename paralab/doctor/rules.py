"""The rules, by what they look at. A rule is a function from what was read to findings; a decorator
names its entry.

@in_script("G01")
def undivided_loss(script: Script) -> Iterator[Finding]: ...
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any, Literal

from paralab.doctor.collecting import nothing_collected
from paralab.doctor.finding import Finding

Way = Literal["script", "ranks", "log", "run", "machine"]
Check = Callable[[Any], Iterable[Finding]]
_rules: dict[Way, dict[Check, str]] = {
    "script": {},
    "ranks": {},
    "log": {},
    "run": {},
    "machine": {},
}
PACKAGES: dict[Way, str] = {
    "script": "paralab.doctor.script_rules",
    "ranks": "paralab.doctor.rank_rules",
    "log": "paralab.doctor.log_rules",
    "run": "paralab.doctor.run_rules",
    "machine": "paralab.doctor.machine_rules",
}


def _decorator(way: Way) -> Callable[[str], Callable[[Check], Check]]:
    def of_entry(entry: str) -> Callable[[Check], Check]:
        def register(check: Check) -> Check:
            _rules[way][check] = entry
            return check

        return register

    return of_entry


in_script = _decorator("script")  # the syntax tree: doctor.script
in_ranks = _decorator("ranks")  # what observed ranks wrote down: doctor.observation
in_log = _decorator("log")  # text that a job has printed: doctor.logs
in_run = _decorator("run")  # a run folder of paralab: analyse.recording
on_machine = _decorator("machine")  # this machine: doctor.preflight


def rules(way: Way) -> dict[Check, str]:
    """All rules of one kind, with their entries' ids."""
    package = importlib.import_module(PACKAGES[way])
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{PACKAGES[way]}.{module.name}")
    return _rules[way]


def apply(way: Way, subject: Any) -> list[Finding]:
    """What the rules of one kind find. The same finding said twice (a function called from two
    places) is one."""
    with nothing_collected():
        return list(dict.fromkeys(finding for check in rules(way) for finding in check(subject)))
