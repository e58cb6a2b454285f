"""Fakes for testing launchers without processes: a plan, a job, ranks that end as the test says,
and a store in this process."""

import json
import time

from paralab.launch.job import Job, Training
from paralab.launch.ranks import RankExits
from paralab.launch.run_options import RunOptions
from paralab.launch.store import Lost
from paralab.machine.host import Machine
from paralab.machine.precision import Probe
from paralab.plan.request import Request
from paralab.plan.resolve import resolve
from paralab.record.folder import RunFolder
from paralab.record.status_board import Post
from paralab.workload.summary import Summary

MACHINE = Machine(4, 2**34, "a CPU", "linux", "3.11", "2.13", None, (), ("gloo",), "no CUDA")
SUMMARY = Summary(
    name="net",
    parameters=500,
    parameter_bytes=2000,
    data_path="here",
    weighted=False,
    optimizer="SGD",
    batch_norms=0,
    dropout=False,
    random=False,
    layers=(),
    samples=1000,
    batch_size=64,
)


def make_plan(strategy="ddp", **options):
    request = Request(strategy, **{"replicas": 2, "steps": 10} | options)
    return resolve(request, MACHINE, SUMMARY, lambda name: Probe(True, "tried"))


def make_training(folder, **fields):
    return Training(make_plan(), RunFolder.create(folder, ""), **fields)


def make_job(folder, **options):
    """Return a job and the list of lines that it prints for the user."""
    said = []
    job = Job(
        request=Request("ddp"),
        options=RunOptions(**options),
        prepare=lambda job, places: make_training(job.options.out or folder),
        explain=lambda outcome: f"attempt {outcome.attempt} failed",
        watch=lambda plan, run: lambda: None,
        say=said.append,
    )
    return job, said


def exits(*codes, **fields):
    return RankExits(list(codes), [Post("step", 7, 0.0, False)] * len(codes), **fields)


def write_events(folder, status, attempt=0, steps=(), ranks=2):
    """Write the events of every rank: these steps, and how it ended (None if it was killed)."""
    for rank in range(ranks):
        name = f"rank{rank}.{attempt}.jsonl" if attempt else f"rank{rank}.jsonl"
        events = [
            {"event": "step", "step": step, "start": 0, "end": 1, "samples": 8, "loss": 1.0}
            for step in steps
        ]
        events += [{"event": "end", "time": 9.0, "status": status}] if status else []
        text = "".join(json.dumps(event) + "\n" for event in events)
        (folder / "events" / name).write_text(text)


class FakeRanks:
    """Replaces `run_ranks`. There is one script per attempt; it gets the run folder and the attempt
    number, and returns the exits."""

    def __init__(self, *scripts):
        self.scripts, self.specs = list(scripts), []

    def __call__(self, folder, specs, origin, on_poll, deadlines=None, seat=None):
        [spec] = specs
        self.specs.append(spec)
        return self.scripts[len(self.specs) - 1](folder.path, spec["attempt"])


class FakeStore:
    """Replaces `Store` with a dict. `gone`: the process that served it has ended."""

    def __init__(self, **notes):
        self.notes = {name.replace("_", "/"): note for name, note in notes.items()}
        self.gone = False

    def put(self, name, note):
        self.notes[name] = json.loads(json.dumps(note))

    def has(self, name):
        if self.gone:
            raise Lost(name)
        return name in self.notes

    def get(self, name, seconds):
        if not self.has(name):
            raise Lost(name)
        return self.notes[name]


class Clock:
    """`time.monotonic` and `time.sleep` on a clock that only the test moves."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.pass_)

    def pass_(self, seconds):
        self.now += seconds
