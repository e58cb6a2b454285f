"""The base class for types that are read from a folder or printed with `--json`.

mypy checks the attributes. `to_dict()` returns plain dicts and lists. `result["steps"]` also works
and means `result.steps`.
"""

import json
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from paralab.errors import UsageError
from paralab.record.folder import SCHEMA_VERSION

T = TypeVar("T")
JsonObject = dict[str, Any]  # parsed JSON, not yet converted to a type


class Record(msgspec.Struct, frozen=True, kw_only=True):
    def to_dict(self) -> JsonObject:
        """Convert to plain dicts, lists, numbers, and strings, ready for `json.dumps`."""
        fields: JsonObject = msgspec.to_builtins(self)
        return fields

    @classmethod
    def like(cls, source: object, **more: Any) -> Self:
        """Copy the fields that `source` also has, and set those in `more`."""
        same = {n: getattr(source, n) for n in cls.__struct_fields__ if hasattr(source, n)}
        return cls(**(same | more))

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    @property
    def known(self) -> JsonObject:
        """The fields that are not None."""
        fields = msgspec.structs.asdict(self).items()
        return {name: value for name, value in fields if value is not None}


def read_object(path: Path) -> JsonObject:
    """Read a JSON object from a file. Raise a UsageError if the file is unusable."""
    try:
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError(f"{path.name} does not contain a JSON object")
    except OSError as error:
        problem = f"{path.parent} is not a paralab folder: {path.name}: {error.strerror}."
        runs = []
        if isinstance(error, FileNotFoundError):  # rather than an unreadable one
            if not path.parent.exists():
                problem = f"{path.parent} does not exist."
            runs = sorted(path.parent.glob(f"*/{path.name}"), key=lambda run: run.stat().st_mtime)
        fix = f"{runs[-1].parent}, the newest folder there" if runs else "pass a folder in runs/"
        raise UsageError(problem, fix) from error
    except (ValueError, RecursionError) as error:
        problem = f"{path} is damaged: {error}."
        raise UsageError(problem, fix="pass another folder, or repeat the run") from error
    return value


def read_manifest(folder: Path) -> JsonObject:
    """Read a folder's manifest. Raise a UsageError if this version cannot read the folder."""
    manifest = read_object(folder / "manifest.json")
    version = manifest.get("schema")
    if version != SCHEMA_VERSION:
        older = isinstance(version, int) and version < SCHEMA_VERSION
        fix = "repeat the run, or use an older paralab" if older else "install a newer paralab"
        known = f"this paralab reads version {SCHEMA_VERSION}"
        raise UsageError(f"{folder} has schema version {version}, but {known}.", fix)
    return manifest


def convert(value: object, to: type[T], where: Path) -> T:
    """Convert parsed JSON to a type. Raise a UsageError that names a field that does not match."""
    try:
        return msgspec.convert(value, to)
    except msgspec.ValidationError as error:
        problem = f"{where} cannot be read: {error}."
        raise UsageError(problem, fix="pass a folder that this version wrote") from error
