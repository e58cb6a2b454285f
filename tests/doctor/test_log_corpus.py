"""Run the corpus scripts and check their output with the log checks, which must report the
mistake's id and line. Most ranks are forked from a process that has imported torch. If the
launcher's output matters, torchrun starts the script."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from paralab.doctor.catalog import apply
from paralab.doctor.logs.reading import read_logs
from tests.doctor.cases import broken
from tests.doctor.ranks import observed

pytestmark = pytest.mark.processes
AT_A_TIME = 4  # most of them wait
STARTS = {"torchrun": 2, "python": 0}
# torchrun's own report matters here, or the script must import torch itself.
LAUNCHED = {"H16-broken", "H19-variant_environment"}
SMALL = "mount -t tmpfs -o size=1m tmpfs /dev/shm && exec"  # runs in a separate namespace
# The log has the line that failed, but the mark is at the line that is wrong.
NOTICED_LATER = {"A03-variant_engine", "C01-broken", "C01-variant_checkpoint"}
# These need a launcher's report about a rank that was killed, or that ended before the others timed
# out. Such logs are in logs/.
NOT_HERE = {"H12-broken", "H13-broken"}
WRONG = [case for case in broken("log") if case.start in STARTS and str(case) not in NOT_HERE]
# test_rank_corpus.py runs the others and checks their output.
ALONE = [case for case in WRONG if "ranks" not in case.ways or case.entry[0] == "H"]


def launched(case, folder, *command):
    log = folder / "job.log"
    with log.open("w") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [*command, case.script],
            stdout=file,
            stderr=file,
            timeout=200,
            check=False,
            env=environment,
        )
    return [log]


@pytest.fixture(scope="module")
def printed(request, tmp_path_factory):
    """Return the logs of each requested case. The cases run concurrently, a few at a time."""
    items = [
        item
        for item in request.session.items
        if item.module is request.module and hasattr(item, "callspec")
    ]
    cases = [case for item in items if (case := item.callspec.params["case"]).start in STARTS]
    root = tmp_path_factory.mktemp("printed")  # once: several threads would fight for a number

    def run(case):
        folder = root / str(case)
        folder.mkdir()
        if str(case) in LAUNCHED:
            return launched(
                case, folder, sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"
            )
        observed(
            case.script,
            folder=folder / "seen",
            stall_seconds=8,
            count=STARTS[case.start],
        )
        return sorted((folder / "seen").glob("rank*.txt"))

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        asked = {str(case): pool.submit(run, case) for case in cases}
    return {name: future.result() for name, future in asked.items()}


def assert_told(case, logs):
    """The finding has the right id. If a log gives a certain line, it is the marked one."""
    findings = apply("log", read_logs(logs))
    own = [finding for finding in findings if finding.id == case.entry]
    assert own, [path.read_text()[-2000:] for path in logs]
    marked = {(str(mark.file), mark.line) for mark in case.marks if mark.way in (None, "log")}
    named = {
        (finding.file, finding.line)
        for finding in own
        if finding.line is not None and finding.severity == "error"
    }
    assert not marked or not named or named & marked or str(case) in NOTICED_LATER, own


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_what_is_printed_tells_the_mistake(case, printed):
    assert_told(case, printed[str(case)])


@pytest.mark.parametrize("case", [case for case in broken("log") if case.entry == "L11"], ids=str)
def test_too_little_shared_memory(case, tmp_path):
    """Give this process its own /dev/shm with 1 MB, if the system allows that."""
    inside = ["unshare", "-m", "sh", "-c"]
    try:
        subprocess.run([*inside, f"{SMALL} true"], check=True, capture_output=True, timeout=100)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("needs the right to mount")
    assert_told(case, launched(case, tmp_path, *inside, f'{SMALL} "$@"', "sh", sys.executable))
