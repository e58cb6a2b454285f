"""The commands on the pages: how the tests find them, shorten them, and which ones they leave out.

The tests run every command in README and docs/ except those in `SKIPPED`. `SHORTER` is the only
place that replaces anything: expensive arguments become cheap ones, and placeholders get values.
"""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.conftest import ROOT

TOP_PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*TOP_PAGES, *sorted((ROOT / "docs" / "strategies").glob("*.md"))]
TUTORIALS = [ROOT / "README.md", ROOT / "docs" / "tour.md"]

# Why a command does not run here: where its test is, or what it needs.
SKIPPED = {
    r"…|\bN\b": "a placeholder stands for other words",
    r"^(plan|verify|tune|show|practical|compare --json|run( \w+)?|doctor( --| --attach)?)$": (
        "names a command in a sentence"
    ),
    r"--device cuda|--mps": "needs a GPU: tests/gpu",
    r"^serve": "needs an extra, and runs until Ctrl-C: tests/serve",
    r"huggingface": "needs an extra: tests/workload",
    r"--launcher torchrun": "starts torchrun: tests/launch",
    r"^practical \w+( --variant \w+)?$|^practical check": "needs a whole practical: tests/course",
    # Each of these trains dozens of times.
    r"^verify (tp|cp|ep|hybrid|pipeline)": "verifies many configurations: tests/parity",
    r"^tune (hybrid|fsdp|single)|^tune .*(80GB|4MiB)": "searches with other options: tests/experiment",
    r"^doctor .*(-- torchrun|--attach)": "starts torchrun or needs a hung job: tests/doctor",
}
SHORTER = (
    (r"\S*FOLDER", "recorded"),  # a recorded run
    (r"'rank\*\.err'", "rank0.err"),  # a shell would expand it
    (r"^(tune.*)--workload gpt(?![:\w])", r"\1--workload mlp:tiny"),
    (r"--workload (gpt|moe)(?![:\w])", r"--workload \1:tiny"),
    # cp needs sequences and ep needs experts, so their commands must name a model that has them.
    (
        r"^((?:run|plan|verify|compare|scale|tune) (?!.*(?:--workload|\b[ce]p\b)).*)",
        r"\1 --workload mlp:tiny",
    ),
    (r"(?<=--steps )\d+", lambda found: str(min(int(found[0]), int(found[0]) // 100 + 2))),
    (r"^(run (?!.*--steps).*)", r"\1 --steps 2"),
    (r"--checkpoint-every \d+", "--checkpoint-every 2"),
    (r"--tensorboard \S+", ""),  # an extra
    (r"^(run .*--slurm(?!.*--dry-run).*)", r"\1 --dry-run"),
    (r"^verify all", "verify ddp"),
    (r"^(verify .*)", r"\1 --steps 2"),
    (r"1,2,4", "1,2"),
    (r"compare --all", "compare"),  # 35 configurations
    (r"^compare --workload", "compare single ddp --workload"),
    (r"^(compare|scale)(.*)", r"\1\2 --rounds 1 --steps 2"),
    (r"^((?:compare|scale)(?!.*--no-proof).*)", r"\1 --no-proof"),
    (r"^tune(.*)", r"tune\1 --trials 4 --seconds 1 --steps 2"),
    (r"^(tune --devices) \d+", r"\1 2"),
    # A part's sheet. tests/course trains all parts of each practical.
    (r"^(practical \w+ --part \d+)$", r"\1 --blank -"),
)


def code(text: str) -> Iterator[str]:
    """Yield each line of a fenced block and each `code span` outside of them. From a block that
    shows output, yield only the command."""
    in_block = shows_output = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            in_block, shows_output = not in_block, False
        elif in_block:
            shows_output = shows_output or line.startswith("$ ")
            if line.startswith("$ ") or not shows_output:
                yield line
        else:
            yield from re.findall(r"`([^`]+)`", line)


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words after `paralab` in each command line, without a comment or an explanation
    after two spaces."""
    for line in code(text):
        if found := re.match(r"(?:\$ )?(?:(?:torchrun|srun) .*)?\bparalab (?=[a-z…])(.*)", line):
            yield shlex.split(re.split(r"\s{2,}|\s#", found[1])[0])


def written(text: str) -> Iterator[str]:
    """Yield each command, as the rules above see it."""
    for words in commands(text):
        yield shlex.join(words).replace("'runs/…'", "FOLDER")


def runnable(text: str) -> dict[str, list[str]]:
    """Return each command of a page that a test runs, and the words that it runs instead."""
    return {
        command: shlex.split(shorter(command))
        for command in written(text)
        if not any(re.search(pattern, command) for pattern in SKIPPED)
    }


def shorter(command: str) -> str:
    for pattern, instead in SHORTER:
        command = re.sub(pattern, instead, command)
    return command


# Importing torch takes most of the time. So all commands run in one process, and a process that has
# imported torch forks their ranks.
DRIVER = """
import contextlib, io, json, os, sys
import paralab.api
from paralab.cli import main as cli
from paralab.launch.processes import import_torch_once

cli.import_torch_once = paralab.api.import_torch_once = contextlib.nullcontext
commands, snippet = json.load(sys.stdin)
ended = []
with import_torch_once():
    for page, words in commands:
        os.chdir(page)
        sys.argv = ["paralab", *words]
        said, code = io.StringIO(), 0
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                cli.main(words, standalone_mode=False)
            except SystemExit as end:
                code = end.code
        ended.append((code or 0, said.getvalue()))
    with contextlib.redirect_stdout(io.StringIO()):
        exec(snippet)
json.dump(ended, sys.stdout)
"""


def page_folder(folder: Path, workload: str) -> Path:
    """Create a folder with the files that the commands of a page name."""
    folder.mkdir()
    (folder / "mine.py").write_text(workload)
    shutil.copytree(ROOT / "examples", folder / "examples")
    shutil.copy(ROOT / "examples" / "train_with_ddp.py", folder / "train.py")
    shutil.copy(ROOT / "tests/doctor/corpus/H08/broken.py", folder)
    shutil.copytree(ROOT / "tests/runs/ddp", folder / "recorded")
    for name in ("job.log", "rank0.err"):
        shutil.copy(ROOT / "tests/doctor/logs/A02_twice.log", folder / name)
    return folder


def commands_of(
    pages: Sequence[Path], folder: Path, known: Iterable[list[str]] = ()
) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Return the names of the pages' commands, without those in `known`, and for each the folder
    and the words for DRIVER."""
    tutorials = "".join(page.read_text() for page in TUTORIALS)
    (workload,) = re.findall(r"```python\n# mine\.py\n(.*?)```", tutorials, re.DOTALL)
    done = list(known)
    named, given = [], []
    for page in pages:
        room = page_folder(folder / page.stem, workload)
        for command, words in runnable(page.read_text()).items():
            if words not in done:
                done.append(words)
                named.append(f"{page.name}: paralab {command}")
                given.append((str(room), words))
    return named, given


def check_commands(named: Sequence[str], done: subprocess.CompletedProcess[str]) -> None:
    """Every command ends with 0, or with 1 if the doctor found something."""
    assert done.returncode == 0, done.stderr
    wrong = []
    for command, (code, printed) in zip(named, json.loads(done.stdout), strict=True):
        has_finding = ": paralab doctor" in command and code == 1
        if "Traceback" in printed or not (code == 0 or has_finding):
            wrong.append(f"{command}\n{printed}")
    assert not wrong, "\n".join(wrong)
