"""The baseline: findings that a project accepts for now. The doctor then reports only new ones.

A finding is identified by its id, its file, and the text of its line, so the line may move.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from paralab.doctor.registry import Finding
from paralab.doctor.settings import Settings
from paralab.doctor.sources import Sources
from paralab.errors import UsageError, refusing

VERSION = 1


@dataclass(frozen=True)
class Accepted:
    id: str
    file: str  # a path relative to the root of the settings
    code: str


class Baseline:
    """The accepted findings. Each entry accepts one finding."""

    def __init__(self, settings: Settings, sources: Sources) -> None:
        self._settings, self._sources = settings, sources
        self._left = _read(settings.baseline) if settings.baseline else Counter[Accepted]()

    def accepts(self, finding: Finding) -> bool:
        """Return whether the baseline accepts the finding, and mark the matching entry as used."""
        key = _key(finding, self._settings, self._sources)
        if key is None or not self._left[key]:
            return False
        self._left[key] -= 1
        return True

    def stale(self, files: Collection[str]) -> int:
        checked = {self._settings.relative(file) for file in files}
        return sum(count for key, count in self._left.items() if key.file in checked)


def write_baseline(
    path: Path, findings: Iterable[Finding], settings: Settings, sources: Sources
) -> int:
    """Replace a baseline with these findings, and return the number of entries."""
    if path.exists():
        _read(path)  # raises if the file is not a baseline, so that we do not overwrite it
    keys = Counter(key for each in findings if (key := _key(each, settings, sources)))
    rows = [
        {"id": key.id, "file": key.file, "code": key.code, "count": count}
        for key, count in sorted(
            keys.items(), key=lambda row: (row[0].file, row[0].id, row[0].code)
        )
    ]
    text = json.dumps({"version": VERSION, "findings": rows}, indent=1, ensure_ascii=False)
    with refusing(f"{path} cannot be written", fix="a file in an existing folder"):
        path.write_text(text + "\n", encoding="utf-8")
    return keys.total()


def _key(finding: Finding, settings: Settings, sources: Sources) -> Accepted | None:
    if finding.file is None:
        return None
    code = (sources.line(finding.file, finding.line) or "").strip()
    return Accepted(finding.id, settings.relative(finding.file), code)


def _read(path: Path) -> Counter[Accepted]:
    again = f"paralab doctor . --baseline {path} --write-baseline"
    try:
        content = json.loads(path.read_text("utf-8"))
        if content["version"] != VERSION:
            raise UsageError(f"{path} was written by a different version of paralab.", fix=again)
        return Counter(
            {
                Accepted(str(row["id"]), str(row["file"]), str(row["code"])): int(row["count"])
                for row in content["findings"]
            }
        )
    except FileNotFoundError:
        raise UsageError(f"There is no baseline {path}.", fix=again) from None
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.", fix=again) from error
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} is not a baseline from paralab doctor.", fix=again) from error
