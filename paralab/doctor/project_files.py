"""Find the Python files in a folder that train in parallel. They contain words such as
torch.distributed, and git does not ignore them."""

import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paralab.doctor.globs import Pattern, compile_patterns, is_matched
from paralab.doctor.static.imports import find_module, search_path

SKIPPED = frozenset(
    ["node_modules", "site-packages", "__pycache__", "venv", "build", "dist", "__pypackages__"]
)  # in addition to folders whose name begins with a dot or that contain a pyvenv.cfg
GIT_SECONDS = 30
# Match code, not comments: many scripts only mention `accelerate launch` or torchrun.
PARALLEL = re.compile(
    rb"torch\.distributed|torch import distributed|init_process_group|DataParallel|\bDDP\b|FSDP|"
    rb"fully_shard|Distributed\w*Sampler|GradScaler|no_sync|Accelerator\b|pipelining|LOCAL_RANK|"
    rb"local_rank|world_size|all_reduce|\bdist\."
    rb"|^\s*(?:import|from) (?:accelerate|lightning|pytorch_lightning|deepspeed|horovod)",
    re.MULTILINE,
)
IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(?P<base>[.\w]+)[ \t]+import[ \t]+(?P<names>\([^)]*\)|[^\n]*)"
    r"|import[ \t]+(?P<modules>[^\n]*))",
    re.MULTILINE,
)
MAIN = re.compile(r"""^if\s+__name__\s*==\s*["']__main__["']""", re.MULTILINE)


@dataclass(frozen=True)
class ProjectFiles:
    """`python` is the number of Python files. `parallel` lists those that train in parallel."""

    python: int
    parallel: list[Path]


def find_files(folder: Path) -> ProjectFiles:
    every = python_files(folder)
    return ProjectFiles(len(every), [path for path in every if trains_in_parallel(path)])


def python_files(folder: Path) -> list[Path]:
    listed = [path for path in _list_with_git(folder) if path.suffix == ".py"]
    if not listed:  # this is not a git repository, or the user named an ignored folder
        listed = [path for path in _walk(folder) if path.suffix == ".py"]
    environments: dict[Path, bool] = {}
    kept = (path for path in sorted(listed) if not _is_skipped(path, folder, environments))
    return list({os.path.realpath(path): path for path in kept if path.is_file()}.values())


def trains_in_parallel(path: Path) -> bool:
    try:
        text = path.read_bytes()
    except OSError:
        return True  # the check reports why it cannot be read
    if b"torch" not in text and b"accelerate" not in text:
        return False
    accumulates = b".backward(" in text and b"accum" in text
    return accumulates or bool(PARALLEL.search(text))


def entry_points(files: Iterable[Path]) -> list[Path]:
    """Return the files that are scripts or that none of the other files imports.

    A module that another file imports is checked together with that file, which contains the calls
    and their enclosing conditions.
    """
    texts = {path.resolve(): path.read_text("utf-8", "replace") for path in files if path.exists()}
    pairs = [(path, module) for path in texts for module in _local_imports(path, texts[path])]
    imported = {module for path, module in pairs if module != path}
    return [
        path
        for path in files
        if path.resolve() not in imported or MAIN.search(texts.get(path.resolve(), ""))
    ]


def _local_imports(path: Path, text: str) -> Iterator[Path]:
    top = search_path(path)
    for found in IMPORT.finditer(text):
        folders = top
        if found["modules"]:
            names = [each.split(" as ")[0].strip() for each in found["modules"].split(",")]
        else:
            stem = found["base"].lstrip(".")
            if level := len(found["base"]) - len(stem):
                folders = (path.parents[level - 1],)
            parts = re.findall(r"\w+", re.sub(r"\bas\s+\w+|#[^\n]*", "", found["names"]))
            names = [stem, *(f"{stem}.{part}" if stem else part for part in parts)]
        yield from (at for each in names if each and (at := find_module(each, folders)))


def _list_with_git(folder: Path) -> list[Path]:
    """Return tracked files and new files that are not ignored, or an empty list without git."""
    here = folder.resolve()
    if not any((each / ".git").exists() for each in (here, *here.parents)):
        return []
    # fsmonitor is a command from the repository's own configuration; never run it.
    command = ["git", "-c", "core.fsmonitor=false", "ls-files", "-z"]
    command += ["--cached", "--others", "--exclude-standard"]
    environment = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, timeout=GIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    names = dict.fromkeys(os.fsdecode(done.stdout).split("\0"))
    return [folder / name for name in names if name]


def _walk(top: Path) -> Iterator[Path]:
    """Yield the files under a folder. Each .gitignore applies from its own folder down."""
    waiting: list[tuple[Path, list[tuple[Path, list[Pattern]]]]] = [(top, [])]
    while waiting:
        folder, rules = waiting.pop()
        ignore = folder / ".gitignore"
        if ignore.is_file():
            lines = ignore.read_text("utf-8", "replace").splitlines()
            rules = [*rules, (folder, compile_patterns(lines))]
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            path, is_folder = folder / entry.name, entry.is_dir(follow_symlinks=False)
            if any(
                is_matched(path.relative_to(start).as_posix(), patterns, is_folder)
                for start, patterns in rules
            ):
                continue
            if not is_folder:
                yield path
            elif entry.name not in SKIPPED and not entry.name.startswith("."):
                waiting.append((path, rules))


def _is_skipped(path: Path, top: Path, environments: dict[Path, bool]) -> bool:
    """Return whether a file is in a hidden folder, build folder, or virtual environment."""
    parts = path.relative_to(top).parts[:-1]
    if any(part in SKIPPED or part.startswith(".") for part in parts):
        return True
    folder = top
    for part in parts:
        folder = folder / part
        if folder not in environments:
            environments[folder] = (folder / "pyvenv.cfg").exists()
        if environments[folder]:
            return True
    return False
