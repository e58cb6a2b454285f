"""Follow one run for all its viewers: read the new events, and run the doctor from time to time."""

import threading
import time
from pathlib import Path

from paralab.analyse.manifest import RunManifest, manifest_of
from paralab.doctor.catalog import apply
from paralab.doctor.recorded import Recorded
from paralab.doctor.registry import Finding, ordered
from paralab.record.folder import RunFolder
from paralab.serve.problem import EXPECTED, explain
from paralab.serve.runs import last_written
from paralab.serve.safe_path import NotServed, open_folder, require_inside
from paralab.serve.state import Snapshot, snapshot_of
from paralab.serve.status import IS_OVER, Status, is_running, status_of
from paralab.show.follow import Follower

POLL_SECONDS = 0.2
# The doctor reads all events, so we limit its share of the time.
DOCTOR_SECONDS, DOCTOR_SHARE = 5.0, 0.05
MOST_BYTES = 200 << 20  # bytes of events; the doctor does not read more than this


class LiveRun:
    """One run. `update` may be called from multiple threads."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.folder = root, RunFolder(open_folder(root, name))
        self.manifest = manifest_of(self.folder.path, RunManifest)
        self.follower = Follower(self.manifest.plan, self.folder)
        self._lock = threading.Lock()
        self._updated_at = float("-inf")
        self._seen: tuple[object, ...] = ()
        self._snapshot: Snapshot | None = None
        self._findings: tuple[Finding, ...] = ()
        self._doctor_note = "The doctor starts after the first few steps."
        self._doctor_due = 0.0  # time.monotonic()
        self._examined: tuple[int, Status] = (0, "starting")

    def update(self) -> Snapshot:
        """Read the new events. If there are none, the snapshot is the same object as before."""
        with self._lock:
            now = time.monotonic()
            if self._snapshot is None or now - self._updated_at >= POLL_SECONDS:
                self._updated_at = now
                self._read()
            assert self._snapshot is not None
            return self._snapshot

    def _read(self) -> None:
        if not (self.folder.path / "manifest.json").exists():
            raise NotServed(f"{self.folder.path} was deleted.")
        require_inside(self.root, self.folder.path)  # someone may have added a link
        self.follower.poll()
        ranks = self.follower.ranks
        running = {each.plan.rank: is_running(each.started) for each in ranks if each.started}
        silent = max(0.0, time.time() - last_written(self.folder.path))
        ends = [rank.ended for rank in ranks if rank.ended]
        has_result = (self.folder.path / "result.json").exists()
        status = status_of(running.values(), ends, len(ranks), silent, has_result)
        self._examine(status)
        states = tuple(running.items())
        seen = self.follower.events_read, status, states, int(silent), self._findings
        if seen != self._seen or self._snapshot is None:
            self._seen = seen
            described = (self.follower, self.manifest, self.folder, status, silent, running)
            snapshot = snapshot_of(*described, self._findings, self._doctor_note)
            self._snapshot = snapshot if snapshot != self._snapshot else self._snapshot

    def _examine(self, status: Status) -> None:
        """Run the doctor if enough time has passed, and once more when the run is over."""
        examined = (self.follower.done, status)
        if examined == self._examined or (not self.follower.done and status not in IS_OVER):
            return
        if time.monotonic() < self._doctor_due and self._examined[1] == status:
            return
        size = sum(path.stat().st_size for path in self.folder.events.iterdir())
        if size > MOST_BYTES:
            self._doctor_note = "The events are too large for the live page: run `paralab doctor`."
            return
        begin = time.monotonic()
        self._examined = examined
        self._doctor_note = ""
        try:
            fresh = apply("run", Recorded.read(self.folder.path), on_error=lambda *_: None)
            self._findings = tuple(each for each in ordered(fresh) if not _is_early(each, status))
        except EXPECTED as error:
            self._doctor_note = f"The doctor could not read this run. {explain(error)}"
        spent = time.monotonic() - begin
        self._doctor_due = time.monotonic() + max(DOCTOR_SECONDS, spent / DOCTOR_SHARE)


def _is_early(finding: Finding, status: Status) -> bool:
    """Return whether the finding only says that a run has not finished."""
    suspected = finding.id == "H12" and finding.severity == "suspect"
    return suspected and status in ("starting", "not started", "running", "silent")
