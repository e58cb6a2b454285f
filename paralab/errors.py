"""What paralab says when something is wrong: what was asked, what is wrong with the numbers, what to write instead.

A user's mistake is a `UsageError` (exit code 2, nothing was started); a training that was started and did not finish is a
`RunFailed` (exit code 1), an `Interrupted` (130) or a `Paused` (75: saved, and can go on). Our own broken invariants are plain
asserts.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ParalabError(Exception):
    """An error with its cure; printed as it is, without a traceback."""

    exit_code = 1

    def __init__(self, problem: str, cure: str | None = None, detail: str | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.cure = cure
        self.detail = detail

    def __str__(self) -> str:
        parts = [self.problem]
        if self.detail:
            parts.append(self.detail.rstrip())
        if self.cure:
            parts.append(f"Try: {self.cure}")
        return "\n".join(parts)


class UsageError(ParalabError):
    """The request cannot be carried out as written."""

    exit_code = 2


class RunFailed(ParalabError):
    """The training was started and did not finish."""

    exit_code = 1


class Interrupted(ParalabError):
    """The user stopped the training."""

    exit_code = 130


class Paused(ParalabError):
    """The user, or the cluster, stopped the training, and it was saved first: the same command with --resume goes on with it."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: "try again later", which is what a job script can do


class NothingLeft(ParalabError):
    """What was asked for has been done before."""

    exit_code = 0


def unknown(kind: str, given: str, known: Iterable[str]) -> UsageError:
    """The error for a name that does not exist, with the nearest one that does."""
    names = list(known)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    return UsageError(f"There is no {kind} {given!r}.{meant}", cure="one of: " + ", ".join(names))
