"""User-facing errors: what the user asked for, what is wrong, and what to write instead.

A user's mistake is a `UsageError` (exit code 2, before any process starts). A run that started and
did not finish is a `RunFailed` (1), an `Interrupted` (128 + the signal: 130 for Ctrl-C), or a
`Paused` (75: saved, can resume). paralab's own invariants are checked with plain asserts.
"""

import difflib
import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# The exceptions that the analysis of a damaged or edited folder can raise.
DAMAGED = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError)
# What the exceptions contain that torch raises without enough memory: on a GPU, and on a CPU.
NO_MEMORY = ("OutOfMemoryError", "can't allocate memory")


class ParalabError(Exception):
    """An error that says how to fix it. paralab prints it without a traceback."""

    exit_code = 1

    def __init__(
        self,
        problem: str,
        fix: str | None = None,
        detail: str | None = None,
        exit_code: int | None = None,
    ) -> None:
        super().__init__(problem)
        self.problem, self.fix, self.detail = problem, fix, detail
        self.exit_code = self.exit_code if exit_code is None else exit_code

    def __str__(self) -> str:
        detail = f"\n{self.detail.rstrip()}" if self.detail else ""
        return self.problem + detail + (f"\nTry: {self.fix}" if self.fix else "")


class UsageError(ParalabError):
    """The command or the configuration is invalid."""

    exit_code = 2


class RunFailed(ParalabError):
    """The run started and did not finish."""


class Interrupted(ParalabError):
    """A signal stopped the run: Ctrl-C, SIGTERM, SIGHUP, or SIGQUIT."""

    exit_code = 130


class Paused(ParalabError):
    """A signal stopped the run after it saved a checkpoint. --resume continues the run."""

    exit_code = 75  # EX_TEMPFAIL in sysexits.h, which tells a job script to try again later


class NothingLeft(ParalabError):
    """The command has nothing left to do."""

    exit_code = 0


SYNONYMS = {"gpu": "cuda"}


def unknown(kind: str, given: str, known: Iterable[str]) -> UsageError:
    """Return the error for an unknown name. It suggests the nearest known name."""
    names = list(known)
    near = [SYNONYMS[given]] if SYNONYMS.get(given) in names else []
    near = near or difflib.get_close_matches(given, names, n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    return UsageError(f"There is no {kind} {given!r}.{meant}", fix="one of: " + ", ".join(names))


def from_os_error(error: OSError) -> ParalabError:
    """Return the error for a full disk or a missing permission, with the file and the reason."""
    file = error.filename2 or error.filename
    named = os.fsdecode(file) if isinstance(file, str | bytes | os.PathLike) else "A file"
    fix = None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = "a disk with free space"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        fix = "a folder that you can read and write"
    return ParalabError(f"{named}: {error.strerror or error}.", fix)


@contextmanager
def naming(file: str | os.PathLike[str]) -> Iterator[None]:
    """Add the file name to an OSError that lacks one, such as after a failed write or flush."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(file)
        raise


@contextmanager
def refusing(problem: str, fix: str) -> Iterator[None]:
    """Turn an OSError into a UsageError: `PROBLEM: Permission denied.`"""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{problem}: {error.strerror}.", fix=fix) from error
