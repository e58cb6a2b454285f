"""The thread that runs a group's collectives in order, while the caller continues to compute."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Job = Callable[[], Any]
Entry = dict[str, Any]  # recorder.py's entry for a job
Work: Any = dist.Work  # torch's type stubs do not allow subclasses of it


class LocalWork(Work):  # type: ignore[misc]
    """The object that torch waits for, with the result or the error of a job.

    A job on a GPU is finished once its work is queued on `stream`. As with NCCL, waiting for the
    result makes the current stream wait for this work.
    """

    source: int  # of a message from any rank

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        super().__init__()
        self._stream = stream
        self._end: torch.cuda.Event | None = None
        self._outcome: torch.futures.Future[Any] = torch.futures.Future(
            devices=[stream.device] if stream else None
        )
        self._finished = threading.Event()
        if stream:
            self._ready = torch.cuda.current_stream(stream.device).record_event()
        # C++ code (DDP) sees an error only if a callback raises it.
        self._checked = self._outcome.then(_result_or_raise)

    @contextmanager
    def run(self) -> Iterator[None]:
        """Move this call's data in this context, on a GPU after the caller's earlier work."""
        # The caller's modes (such as selective recomputation's, which counts operators) must not see
        # how we move bytes. Only inference mode may write to the caller's inference tensors.
        with torch._C._DisableTorchDispatch(), torch.inference_mode():
            if not self._stream:
                yield
                return
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self._ready)
                yield

    def finish(self, outcome: Any) -> None:
        self._finished.set()
        if not self._stream:
            self._outcome.set_result(outcome)
            return
        with torch.cuda.stream(self._stream):
            self._end = self._stream.record_event()
            self._outcome.set_result(outcome)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if timeout and not self._finished.wait(timeout.total_seconds()):
            raise dist.DistBackendError(f"A collective did not finish within {timeout}.")
        outcome = self._outcome.wait()
        if isinstance(outcome, Exception):
            raise outcome
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._checked

    def add_done_callback(self, callback: Callable[[torch.futures.Future[Any]], None]) -> None:
        """Call this with the result or the error once the job is finished."""
        self._outcome.add_done_callback(callback)

    def is_completed(self) -> bool:
        return self._outcome.done() and (self._end is None or self._end.query())

    def is_success(self) -> bool:
        return self.is_completed() and not isinstance(self._outcome.value(), Exception)

    def exception(self) -> Exception | None:
        outcome = self._outcome.value() if self.is_completed() else None
        return outcome if isinstance(outcome, Exception) else None

    def _source_rank(self) -> int:
        return self.source

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        return self._checked.wait()


def _result_or_raise(future: torch.futures.Future[Any]) -> Any:
    outcome = future.value()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


class OrderedThread:
    """Run jobs one at a time. After the first error, every later job fails with the same error,
    because the ranks no longer agree on the next collective."""

    def __init__(self, name: str, on_error: Callable[[Exception], None]) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, Entry, LocalWork] | None] = queue.SimpleQueue()
        self._on_error = on_error
        self.error: Exception | None = None
        self._count = threading.Lock()
        self._unfinished = 0
        self._closed = False
        self._running = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name=f"local {name}", daemon=True)
        self._ready = threading.Event()
        # A thread's first torch call sets its thread count to the last count set in any thread. So
        # make that call here, and restore the count after the new thread has set its own.
        threads = torch.get_num_threads()
        self._thread.start()
        self._ready.wait()
        torch.set_num_threads(threads)

    def submit(
        self,
        job: Job,
        entry: Entry,
        caller_waits: bool = False,
        stream: torch.cuda.Stream | None = None,
    ) -> LocalWork:
        """Start a job. If no job is running and the caller waits for the result anyway, run the job
        in the caller's thread, which saves two thread switches. If a callback in our own thread
        submits a job, run it immediately, because the callback may wait for it."""
        work = LocalWork(stream)
        in_callback = threading.current_thread() is self._thread
        with self._count:
            if self._closed and not in_callback:
                raise dist.DistBackendError("This process group was destroyed.")
            self._unfinished += 1
            here = caller_waits and self._unfinished == 1
            if here:
                self._running.acquire()
            elif not in_callback:
                self._jobs.put((job, entry, work))
        if in_callback and not here:
            self._running.acquire()
        if in_callback or here:
            self._finish(job, entry, work)
        return work

    def close(self, seconds: float) -> bool:
        """Return whether the thread stopped within this time."""
        with self._count:
            self._closed = True
            self._jobs.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        # Jobs are elementwise work on shared cores, so more threads would only slow down training.
        torch.get_num_threads()
        torch.set_num_threads(1)
        self._ready.set()
        while (item := self._jobs.get()) is not None:
            self._running.acquire()
            self._finish(*item)
            del item  # do not keep its tensors until the next job

    def _finish(self, job: Job, entry: Entry, work: LocalWork) -> None:
        """Run a job while holding `_running`, then release it."""
        result = None
        entry["state"] = "started"
        try:
            if self.error is None:
                with work.run():
                    result = job()
                entry["state"] = "completed"
        except Exception as error:
            self.error = _name_call(error, entry)
            self._on_error(self.error)
        except BaseException as error:  # Ctrl-C in the caller's own thread
            self.error = dist.DistBackendError(f"{type(error).__name__} interrupted a collective.")
            self._on_error(self.error)
            raise
        finally:
            with self._count:
                self._unfinished -= 1
            self._running.release()
            work.finish(result if self.error is None else self.error)


def _name_call(error: Exception, entry: Entry) -> Exception:
    if isinstance(error, dist.DistBackendError):
        return error
    name = entry["profiling_name"].removeprefix("local:")
    return RuntimeError(f"{name} of {entry['input_sizes']} failed: {error}")
