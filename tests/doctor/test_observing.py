"""Start watching in other programs, through real launchers, without changing the programs."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from paralab.analyse.stack_dumps import Frame
from paralab.doctor import attach as attachment
from paralab.doctor.attach import attach, ranks_of
from paralab.doctor.events import Batch, Collective, Save, Step
from paralab.doctor.observation import Observation
from paralab.doctor.watch import observe
from paralab.errors import UsageError
from paralab.observe.mmap_log import PIECE, MmapLog
from paralab.record.operations import OpenOperations, read_open_operations
from paralab.record.reader import Tail, parse_watched
from tests import forked
from tests.conftest import ROOT
from tests.doctor.ranks import waited_in

HERE = Path(__file__).parent


def written(path, text):
    path.write_text(textwrap.dedent(text))
    return path


def living(text):
    """Return the processes whose command line contains a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(path.parent.name)
        except OSError:
            pass
    return found


@pytest.mark.processes
def test_torchrun_hangs_and_is_named_before_the_timeout(tmp_path, capfd):
    """With --stall 2 and a group timeout of 20 s, the doctor names the rank, the collective, and
    both lines before the group times out."""
    script = HERE / "corpus" / "H03" / "variant_early_return.py"
    told = []
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    seen = observe(
        [*torchrun, str(script)],
        stall_seconds=2,
        folder=tmp_path / "seen",
        say=lambda finding: told.append((time.time(), finding)),
        end_when_hung=True,
    )
    at, finding = next(
        (at, finding) for at, finding in told if finding.severity == "error"
    )  # a slow start would only be a suspect
    assert (finding.id, finding.rank, finding.file) == ("H03", 0, str(script))
    assert "barrier" in finding.why
    assert "backward" in finding.why, "the other side's line"
    waiting = waited_in(Observation.read(tmp_path / "seen").ranks[0])
    assert isinstance(waiting, Collective)
    assert at - waiting.t < 20
    assert seen.stopped
    assert not living(str(script))
    assert sorted(path.name for path in (tmp_path / "seen").glob("*.jsonl")) == [
        "rank0.jsonl",
        "rank1.jsonl",
    ], "not the launcher"


@pytest.mark.processes
def test_spawned_ranks_workers_and_a_sitecustomize_of_the_user(tmp_path, capfd, monkeypatch):
    """Test mp.spawn in a plain `python train.py`, a spawned DataLoader worker, a sitecustomize
    that existed before, and the program's own exit code and output."""
    (tmp_path / "site").mkdir()
    written(tmp_path / "site" / "sitecustomize.py", "import os\nos.environ['WAS_THERE'] = 'yes'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    script = written(
        tmp_path / "train.py",
        """
        import os, sys
        import torch, torch.distributed as dist, torch.multiprocessing as mp
        from torch.utils.data import DataLoader

        def work(rank, meeting):
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
            loader = DataLoader(torch.arange(8.0), batch_size=4, num_workers=1, multiprocessing_context="spawn")
            weight = torch.zeros(1, requires_grad=True)
            optimizer = torch.optim.SGD([weight], lr=0.1)
            for batch in loader:
                (weight * batch.sum()).sum().backward()
                optimizer.step()
            dist.barrier()
            os.write(1, f"rank {rank} {os.environ['WAS_THERE']} {[p for p in sys.path if 'entrance' in p]}\\n".encode())
            dist.destroy_process_group()

        if __name__ == "__main__":
            mp.spawn(work, args=(sys.argv[1],), nprocs=2)
            sys.exit(3)
        """,
    )
    seen = observe(
        [sys.executable, str(script), str(tmp_path / "meeting")], folder=tmp_path / "seen"
    )
    out = capfd.readouterr().out
    assert seen.exit_code == 3
    assert sorted(out.splitlines()) == ["rank 0 yes []", "rank 1 yes []"]
    observation = Observation.read(tmp_path / "seen")
    assert [rank.rank for rank in observation.ranks] == [0, 1]
    assert all(
        len(rank.of(Batch)) == 2 and rank.made == 2 and rank.ended for rank in observation.ranks
    ), seen.notes
    assert sorted(path.name for path in (tmp_path / "seen").glob("*.jsonl")) == [
        "rank0.jsonl",
        "rank1.jsonl",
    ]


@pytest.mark.processes
def test_a_trial_of_a_gpu_script_ends_after_its_steps_and_spares_files(tmp_path):
    checkpoint = tmp_path / "model.pt"
    checkpoint.write_text("of the last real training")
    script = written(
        tmp_path / "train.py",
        """
        import os, sys
        import torch, torch.distributed as dist
        from torch import nn

        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local))
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4).to(local), device_ids=[local])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(1000):
            optimizer.zero_grad()
            model(torch.randn(8, 4, device="cuda").cuda(non_blocking=True)).sum().backward()
            optimizer.step()
            if dist.get_rank() == 0:
                torch.save(model.module.state_dict(), sys.argv[1])
                print(len(torch.load(sys.argv[1], map_location=f"cuda:{local}")), flush=True)
        """,
    )
    seen = observe(
        [*forked.python(2), str(script), str(checkpoint)], steps=3, folder=tmp_path / "seen"
    )
    printed = (tmp_path / "seen" / "rank0.txt").read_text()
    assert (seen.stopped, seen.exit_code) == (True, None), printed
    assert printed.split() == ["2", "2", "2"]
    assert checkpoint.read_text() == "of the last real training"
    notes = " | ".join(seen.notes)
    for what in ("nccl", "device_ids", "saving over"):
        assert what in notes
    observation = Observation.read(tmp_path / "seen")
    assert [rank.made for rank in observation.ranks] == [3, 3]
    assert observation.ranks[0].of(Save)[0].path == str(checkpoint), "as the script wrote it"
    assert all(step.gradients for rank in observation.ranks for step in rank.of(Step))


@pytest.mark.processes
def test_a_command_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="no command"):
        observe(["no-such-launcher", "train.py"], folder=tmp_path)


def test_an_error_of_ours_is_written_down_and_the_program_goes_on(tmp_path):
    from paralab.observe.rank import Rank
    from paralab.observe.wrappers import observed

    rank = Rank(str(tmp_path), None)
    rank.identify(0, 1)

    def wrong(*args):
        raise KeyError("ours")

    function = observed(rank, lambda x: x + 1, "loss", wrong)
    assert function(1) == 2
    assert not rank.on
    assert function(2) == 3
    assert "ours" in (tmp_path / f"off-{os.getpid()}.txt").read_text()
    rank.on = True
    failing = observed(rank, lambda: 1 / 0, "loss", dict)
    with pytest.raises(ZeroDivisionError):
        failing()
    rank.flush()
    assert (
        Observation.read(tmp_path).ranks[0].events[-1].error
        == "ZeroDivisionError: division by zero"
    )


@pytest.mark.processes
def test_no_memory_is_kept_that_the_program_gives_back(tmp_path):
    """Watching must not keep a batch, loss, model, or optimizer alive in any step, not even until
    Python collects cycles. CUDA once killed DataLoader workers that found pinned memory in such a
    cycle."""
    script = written(
        tmp_path / "train.py",
        """
        import gc, sys, time, weakref
        import torch, torch.distributed as dist
        from torch import nn
        from torch.utils.data import DataLoader, Dataset

        class Samples(Dataset):
            def __len__(self):
                return 320

            def __getitem__(self, index):
                return {"inputs": [torch.full((8,), float(index))], "target": torch.tensor(index % 3)}

        def fold(gone):
            model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
            optimizer = torch.optim.AdamW(model.parameters())
            schedule, scaler = torch.optim.lr_scheduler.StepLR(optimizer, 10), torch.amp.GradScaler("cpu")
            gone += [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.module[0].weight)]
            for epoch in range(2):
                for batch in DataLoader(Samples(), batch_size=8):
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        loss = nn.functional.cross_entropy(model(batch["inputs"][0]), batch["target"])
                    optimizer.zero_grad()
                    scaler.scale(loss).backward()
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    scaler.step(optimizer)
                    scaler.update()
                    schedule.step()
                    dist.all_reduce(mean := loss.detach().clone())
                    dist.all_gather([torch.zeros(1)], mean.view(1))
                print(min(alive() for _ in range(4)))

        def alive():
            time.sleep(0.1)  # gloo's threads release the tensors of a collective a little later
            return sum(type(thing) is torch.Tensor for thing in gc.get_objects())

        dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
        gone = []
        gc.collect()
        gc.disable()
        fold(gone)
        gc.collect()
        fold(gone)
        gc.collect()
        print([thing() for thing in gone])
        """,
    )
    command = [*forked.python(), str(script), str(tmp_path / "meeting")]
    plain = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    seen = observe(command, folder=tmp_path / "seen")
    assert (seen.exit_code, (tmp_path / "seen" / "rank0.txt").read_text()) == (0, plain)
    assert plain.endswith(f"{[None] * 6}\n")
    assert Observation.read(tmp_path / "seen").ranks[0].made == 160, (
        "the second model's steps follow the first one's"
    )


def test_a_warning_names_the_caller_of_torch_and_not_us(tmp_path, monkeypatch):
    import inspect
    import warnings

    from paralab.observe.rank import Rank
    from paralab.observe.wrappers import observed, show_warnings_of_callers

    shown = []
    monkeypatch.setattr(warnings, "showwarning", lambda *args: shown.append(args[2:4]))
    show_warnings_of_callers()
    old = observed(
        Rank(str(tmp_path), None),
        lambda: warnings.warn("old", FutureWarning, stacklevel=2),
        "loss",
        dict,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        old()
    assert shown == [(__file__, inspect.currentframe().f_lineno - 1)]


def test_a_module_that_we_hang_on_can_be_saved_copied_and_compiled(tmp_path):
    """torch.save(model.module) once failed while it was watched. The file must load without
    paralab."""
    import copy

    import torch

    from paralab.observe.rank import Guarded, Rank

    module = torch.nn.Linear(2, 1)
    called = []
    module.register_forward_pre_hook(
        Guarded(Rank(str(tmp_path), None), lambda *args: called.append(args), in_light_steps=False)
    )
    torch.save(module, tmp_path / "model.pt")
    assert b"paralab" not in (tmp_path / "model.pt").read_bytes()
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    given = torch.ones(3, 2)
    assert torch.equal(again(given), module(given))
    assert len(called) == 1
    copy.deepcopy(module)(given)
    assert len(called) == 2
    torch.compile(module, backend="eager", fullgraph=True)(given)
    assert len(called) == 2, "nothing of ours is compiled"


def test_what_was_written_is_there_at_once_and_room_grows(tmp_path):
    """Read the log while it is being written, over several pieces. Zeros after the last line are
    not events."""
    journal = MmapLog(tmp_path / "rank0.jsonl")
    tail = Tail(tmp_path / "rank0.jsonl", parse_watched, mapped=True)
    journal.append(b'{"event":"first"}')
    assert tail.new() == [{"event": "first"}]
    long = b'{"event":"%s"}' % (b"x" * 1000)
    for _ in range(PIECE // 500):
        journal.append(long)
    assert len(tail.new()) == PIECE // 500
    assert tail.new() == []
    journal.close()
    assert (tmp_path / "rank0.jsonl").read_bytes().endswith(b"}\n")
    slot = OpenOperations(tmp_path / "rank0.now")
    assert read_open_operations(tmp_path / "rank0.now") == (0, [])
    slot.write(b'[{"event":"collective"}]')
    slot.write(b"[]")
    assert read_open_operations(tmp_path / "rank0.now") == (2, [])


@pytest.mark.processes
def test_nothing_is_lost_that_is_written_while_it_is_read(tmp_path):
    """A line's end may be visible before its beginning, if the page was copied while it was
    written."""
    path = tmp_path / "rank0.jsonl"
    first, second = (b'{"event":"%d"}\n' % number for number in (1, 2))
    tail = Tail(path, parse_watched, mapped=True)
    path.write_bytes(first + b"\0" * 6 + second[6:] + bytes(100))
    assert tail.new() == [{"event": "1"}]
    path.write_bytes(first + second + bytes(100))
    assert tail.new() == [{"event": "2"}]
    count = 30_000
    writes = (
        "import sys, pathlib; from paralab.observe.mmap_log import MmapLog; journal = MmapLog(pathlib.Path(sys.argv[1]))\n"
        f'for number in range({count}): journal.append(b\'{{"event":"%d"}}\' % number)\n'
        "journal.close()"
    )
    tail, seen = Tail(tmp_path / "busy.jsonl", parse_watched, mapped=True), []
    with subprocess.Popen([sys.executable, "-c", writes, str(tail.path)], cwd=ROOT) as writer:
        while writer.poll() is None:
            seen += tail.new()
    seen += tail.new()
    assert [int(event["event"]) for event in seen] == list(range(count))


RANK = """
import os, sys, time
text = "import time\\ndef all_reduce():\\n    time.sleep(60)\\n"
names = {}
exec(compile(text, "/x/site-packages/torch/distributed/distributed_c10d.py", "exec"), names)
def train():
    if os.environ["RANK"] == "1":
        prepare("é")
    names["all_reduce"]()
def prepare(text):
    time.sleep(60)
train()
"""


def now(rank, function=None, line=7, state="S", moves=False):
    """Return the stack of a rank in a torch.distributed function that train.py calls, or in
    train.py itself."""
    stack = [Frame(file="/home/me/train.py", line=line, function="main")]
    if function:
        c10d = "/x/torch/distributed/distributed_c10d.py"
        stack.append(Frame(file=c10d, line=1, function=function))
    return attachment.RankNow(rank, 100 + rank, state, stack, None, moves)


@pytest.mark.parametrize(
    ("ranks", "expected", "found"),
    [
        ([now(0, "barrier")], {0, 1}, ("H02", "error", 1)),
        ([now(8, "barrier"), now(9, "barrier")], {8, 9}, ("H10", "suspect", None)),  # node 2
        ([now(0, "barrier"), now(1, state="T")], {0, 1}, ("H10", "error", 1)),
        ([now(0, "barrier"), now(1)], {0, 1}, ("H13", "suspect", 1)),
        ([now(0, "barrier"), now(1, "all_reduce")], {0, 1}, ("H04", "suspect", None)),
        ([now(0, "barrier"), now(1, "barrier", 9)], {0, 1}, ("H04", "suspect", None)),
        ([now(0, "send"), now(1, "recv", 9)], {0, 1}, ("H10", "suspect", None)),
        ([now(0, "barrier", moves=True), now(1)], {0, 1}, None),
    ],
)
def test_what_the_stacks_of_a_hung_job_show(ranks, expected, found):
    findings = attachment.judge(ranks, expected)
    assert [(f.id, f.severity, f.rank) for f in findings] == [found] * bool(found)


@pytest.mark.processes
def test_attach_reads_the_stacks_of_a_job_that_it_did_not_start(tmp_path):
    """Fake ranks without torch: one waits in a function with torch's name, and the other is
    elsewhere."""
    script = written(tmp_path / "train é.py", RANK)
    common = {
        **os.environ,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_PORT": f"test-{os.getpid()}",
    }
    ranks = [
        subprocess.Popen([sys.executable, str(script)], env={**common, "RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        until = time.monotonic() + 1000
        while time.monotonic() < until and not all(
            _is_in(rank.pid, name)
            for rank, name in zip(ranks, ("all_reduce", "prepare"), strict=True)
        ):
            time.sleep(0.1)
        assert ranks_of(ranks[1].pid) == {0: ranks[0].pid, 1: ranks[1].pid}
        findings, notes = attach(ranks[0].pid)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert len(findings) == 1, notes
    (finding,) = findings
    assert (finding.id, finding.severity, finding.rank) == ("H13", "suspect", 1)
    assert finding.file == str(script)
    assert script.read_text().splitlines()[finding.line - 1].strip() == "time.sleep(60)"
    assert any(
        "all_reduce" in line and 'names["all_reduce"]()' in line for line in finding.evidence
    )


def _is_in(pid, function):
    stack, _ = attachment._stack(attachment._find_spy(), pid)
    return bool(stack) and stack[-1].function == function


def test_attach_without_py_spy_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(attachment.shutil, "which", lambda *args, **options: None)
    with pytest.raises(UsageError) as raised:
        attach(os.getpid())
    assert raised.value.fix == 'pip install "paralab[attach]"'


@pytest.mark.processes
def test_attach_without_the_right_to_read_says_how_to_get_it(tmp_path):
    spy = tmp_path / "py-spy"
    spy.write_text("#!/bin/sh\necho 'Error: Operation not permitted (os error 1)' >&2\nexit 1\n")
    spy.chmod(0o755)
    stack, unread = attachment._stack(str(spy), os.getpid())
    assert stack is None
    assert "ptrace" in unread
    assert "sudo" in unread


def test_a_stack_has_the_main_thread_and_plain_function_names():
    """py-spy writes `Model.forward`, and torch's functions are looked up by their plain name."""
    threads = [
        {"thread_name": "loader", "os_thread_id": 8, "frames": []},
        {
            "thread_name": "MainThread",
            "os_thread_id": 7,
            "frames": [
                {"name": "DistributedDataParallel._sync_buffers", "filename": "ddp.py", "line": 3},
                {"name": "<module>", "filename": "train.py", "line": 9},
            ],
        },
    ]
    frames = attachment._main_frames(threads, 7)
    assert [(frame.file, frame.line, frame.function) for frame in frames] == [
        ("train.py", 9, "<module>"),
        ("ddp.py", 3, "_sync_buffers"),
    ]


SLEEPS = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)  # {mark}"], start_new_session=True)
signal.signal(signal.SIGINT, lambda *_: (child.kill(), sys.exit(7)))
signal.signal(signal.SIGTERM, lambda *_: (child.kill(), sys.exit(8)))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 7), (signal.SIGKILL, None)],
    ids=["Ctrl-C", "kill -9 of the doctor"],
)
@pytest.mark.processes
def test_signals_reach_the_command_and_nothing_is_left(tmp_path, number, code):
    """The command handles Ctrl-C. If the doctor itself is killed, the command gets a signal to
    end."""
    mark = f"mark-{os.getpid()}-{int(number)}"
    script = written(tmp_path / "train.py", SLEEPS.format(mark=mark))
    words = [sys.executable, str(script)]
    program = (
        "from pathlib import Path; from paralab.doctor.watch import observe; "
        f"print(observe({words!r}, folder=Path({str(tmp_path / 'seen')!r})).exit_code)"
    )
    doctor = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=HERE.parents[1]
    )
    assert doctor.stdout.readline() == "ready\n"
    doctor.send_signal(number)
    out = doctor.stdout.read()
    doctor.wait(100)
    doctor.stdout.close()
    if code is not None:
        assert out.strip() == str(code)
    until = time.monotonic() + 100
    while time.monotonic() < until and (living(mark) or living(str(script))):
        time.sleep(0.1)
    assert not living(mark)
    assert not living(str(script))
