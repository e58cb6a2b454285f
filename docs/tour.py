"""Run the commands in docs/tour.md again and update their outputs.

    python docs/tour.py                 all of them (about ten minutes on two cores)
    python docs/tour.py doctor plan     only commands that contain one of these words

A comment above a block says how much of the output to keep:

    <!-- output: 3 … 2 -->              the first 3 lines and the last 2
    <!-- output: 4 …/speed-up/ 5 -->    the first 4 lines, and 5 from the first with `speed-up`

Commands run in one scratch folder, in page order, so `paralab show runs/…` shows the previous run.
Blocks without a comment stay unchanged.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from paralab.show.console import PIPED_WIDTH

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "tour.md"
BLOCK = re.compile(
    r"(?P<head><!-- output: (?P<first>\d+) …(?:/(?P<mark>[^/]+)/)? (?P<last>\d+) -->\n```\n)"
    r"\$ (?P<command>[^\n]+)\n(?P<old>.*?)```",
    re.DOTALL,
)
SECONDS = 400


def scratch_folder(page: str) -> Path:
    """Create a folder with the files that the commands need: the page's mine.py, a correct script,
    and a script that hangs."""
    folder = Path(tempfile.mkdtemp(prefix="tour"))
    for workload in re.findall(r"```python\n# mine\.py\n(.*?)```", page, re.DOTALL):
        (folder / "mine.py").write_text(workload)
    shutil.copytree(ROOT / "examples", folder / "examples")
    shutil.copy(ROOT / "examples" / "train_with_ddp.py", folder / "train.py")
    broken = (ROOT / "tests" / "doctor" / "corpus" / "H08" / "broken.py").read_text()
    (folder / "broken.py").write_text(re.sub(r"  # finds \w+", "", broken))
    return folder


def run(command: str, folder: Path) -> list[str]:
    """Run a command and return its output lines without this machine's paths."""
    runs = sorted(folder.glob("runs/*"), key=lambda path: path.stat().st_mtime)
    words = shlex.split(
        command.partition("   #")[0].replace("runs/…", str(runs[-1] if runs else ""))
    )
    if words[0] == "paralab":
        words[:1] = [sys.executable, "-m", "paralab"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words,
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    text = done.stdout or done.stderr
    for path, instead in (
        (f"{folder}{os.sep}", ""),
        (sys.executable, "python"),
        (f"{ROOT}{os.sep}", ""),
    ):
        text = text.replace(path, instead)
    return text.rstrip().splitlines()


def shorten(lines: list[str], first: int, last: int, mark: str | None) -> list[str]:
    """Keep the first lines, plus the last lines or the lines from `mark` on. Wrap long lines."""
    start = max(first, len(lines) - last)
    if mark:
        start = next((n for n, line in enumerate(lines) if n >= first and mark in line), start)
    end = start + last
    kept = [*lines[:first], *(["…"] if start > first else []), *lines[start:end]]
    kept += ["…"] if end < len(lines) else []
    return [part for line in kept for part in wrap(line)]


def wrap(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, PIPED_WIDTH, subsequent_indent=indent) or [""]


def refresh(only: list[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    folder = scratch_folder(text)

    def replace(block: re.Match[str]) -> str:
        command = block["command"]
        if only and not any(word in command for word in only):
            return block[0]
        print(f"$ {command}", flush=True)
        lines = shorten(
            run(command, folder), int(block["first"]), int(block["last"]), block["mark"]
        )
        return f"{block['head']}$ {command}\n" + "".join(f"{line}\n" for line in lines) + "```"

    PAGE.write_text(BLOCK.sub(replace, text), encoding="utf-8")
    shutil.rmtree(folder)


if __name__ == "__main__":
    refresh(sys.argv[1:])
