"""Stop all ranks of a torchrun or srun job together: after the same step if there is a signal, or
soon after a rank fails."""

import time

from paralab.launch.launched_by import LaunchedRank
from paralab.launch.ranks import GRACE_SECONDS
from paralab.launch.stop_signals import StopRequest
from paralab.launch.store import Lost, Store
from paralab.record.status_board import NEVER, StatusBoard, next_stop

ASK_SECONDS = 0.5  # between two queries to the store


class OtherFailed(Exception):
    """Another rank has failed, and this rank has had enough time to notice and fail too."""


class StopTogether:
    """Lets launched processes agree on a step: each posts its rank's current step, and rank 0's
    process chooses the step before which all ranks stop."""

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
        except Lost:  # rank 0 has ended, and its store too
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
