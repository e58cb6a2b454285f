"""Stop all ranks after the same step and save, on the first signal. A second one stops the ranks
immediately. In a torchrun or srun job, the launched processes agree on the step."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from paralab.launch.launched_by import LaunchedRank
from paralab.launch.ranks import GRACE_SECONDS
from paralab.launch.store import Lost, Store
from paralab.machine.signals import STOPS, TYPED, StopSignal, name_of, set_handlers
from paralab.record.status_board import NEVER, StatusBoard, next_stop

REPEAT_SECONDS = 5.0  # ignore repeats within this time: `timeout` may send a signal twice
ASK_SECONDS = 0.5  # time between two queries to the store


class StopRequest:
    """The signal that asked the run to stop, if any."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.signal: int | None = None
        self._say: Callable[[str], None] | None = say

    def __bool__(self) -> bool:
        return self.signal is not None

    def announce(self) -> None:
        """Tell the user once, outside the signal handler, which may interrupt a print."""
        if self.signal is not None and self._say:
            say, self._say = self._say, None
            again = "Ctrl-C again" if self.signal == signal.SIGINT else "Ctrl-C"
            stopping = f"{name_of(self.signal)}: stopping after this step and saving."
            say(f"{stopping} Press {again} to stop immediately.")


@contextmanager
def stop_in_order(
    enabled: bool, say: Callable[[str], None] = lambda line: None, together_seconds: float = 0.0
) -> Iterator[StopRequest]:
    """Record the first stop signal instead of stopping immediately.

    With --checkpoint, the run saves and stops on the first Ctrl-C, SIGTERM (from a cluster or
    `kill`), SIGHUP (a closed ssh session), SIGQUIT, or SIGUSR1 (Slurm's warning before the time
    limit). After that, Ctrl-C or a second SIGTERM stops the run immediately. Signals within
    `together_seconds` count as one, because Ctrl-C reaches a launched rank twice: directly, and
    forwarded by the launcher.
    """
    request = StopRequest(say)
    first = 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if not request:
            request.signal, first = number, now
            return
        again = number == request.signal == signal.SIGTERM and now - first > REPEAT_SECONDS
        if (number in TYPED or again) and now - first > together_seconds:
            raise StopSignal(number)

    before = set_handlers(dict.fromkeys(STOPS, handle)) if enabled else {}
    try:
        yield request
    finally:
        set_handlers(before)


class OtherFailed(Exception):
    """Another rank has failed, and this rank has had enough time to notice and fail too."""


class StopTogether:
    """Lets launched processes agree on a step: each posts its rank's step, and rank 0 chooses."""

    def __init__(self, place: LaunchedRank, store: Store, request: StopRequest) -> None:
        self.place, self.store, self.request = place, store, request
        self.wanted, self.stop_at, self.next = False, NEVER, 0.0
        self.failed_at: float | None = None  # when we noticed that another rank has failed

    def poll(self, board: StatusBoard) -> None:
        """Check for signals and failures. Raise OtherFailed soon after another rank fails."""
        self.request.announce()
        now = time.monotonic()
        if self.failed_at is not None and now - self.failed_at > GRACE_SECONDS:
            raise OtherFailed
        if self.request and not self.wanted:
            self.wanted = True
            self.store.put("stop", True)
        if self.failed_at is not None or now < self.next:
            return

        try:
            self.wanted = self.wanted or self.store.has("stop")
            if self.wanted:
                self._agree(board)
            failed = self.store.has("failed")
        except Lost:  # rank 0 has exited, so its store is gone
            failed = True
        self.failed_at = now if failed else None
        self.next = now if self.wanted else now + ASK_SECONDS

    def _agree(self, board: StatusBoard) -> None:
        post = board.read(self.place.rank)
        self.store.put(f"post/{self.place.rank}", [post.step, post.waiting])
        if self.place.rank == 0:
            names = [f"post/{rank}" for rank in range(self.place.world_size)]
            if not all(self.store.has(name) for name in names):
                return
            posts = [tuple(self.store.get(name, ASK_SECONDS)) for name in names]
            self.stop_at, agreed = next_stop(self.stop_at, posts)
            self.store.put("stop_at", [self.stop_at, agreed])
        if self.store.has("stop_at"):
            board.stop(*self.store.get("stop_at", ASK_SECONDS))
