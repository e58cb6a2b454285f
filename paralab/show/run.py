"""A run in the terminal: the plan as a sentence and a table, one progress line, then what it cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paralab.plan.plan import Plan
from paralab.record.folder import RunFolder
from paralab.record.reader import Tail
from paralab.show.console import console, errors, fact_table, plain_table, show_table
from paralab.units import plural, rate, seconds, size


def print_sentence(plan: Plan, workload: str) -> None:
    """What will happen, as a sentence, with what is virtual, shared or different."""
    devices = "virtual devices" if any(d.virtual for rank in plan.ranks for d in rank.devices) else "devices"
    console.print(
        f"[bold]{plan.title()}[/] trains [bold]{escape(workload)}[/] for {plural(plan.num_steps, 'step')} in {plan.precision} "
        f"on {plan.num_devices} {devices if plan.num_devices > 1 else 'device'}: {plan.arithmetic}"
    )
    for remark in plan.remarks:
        console.print(f"[yellow]note:[/] {escape(remark)}", soft_wrap=True)
    for difference in plan.differences if plan.strategy != "single" else ():
        console.print(f"[yellow]may differ from one device:[/] {escape(difference)}", soft_wrap=True)


def print_ranks(plan: Plan, pids: dict[int, int] | None = None) -> None:
    """Who does what: one line per rank and device. The process numbers are known when the ranks have started."""
    process = ("pid",) if pids else ()
    right = ("rank", "local rank", "pid", "samples per step")
    table = plain_table("rank", "local rank", *process, "device", "holds", "samples per step", right=right)
    for rank in plan.ranks:
        who = [str(rank.rank), str(rank.local_rank), *([str(pids[rank.rank])] if pids else [])]
        for number, device in enumerate(rank.devices):
            mark = " (virtual)" if device.virtual else " (shared)" if device.shared else ""
            table.add_row(*(who if number == 0 else [""] * len(who)), device.name + mark, device.role, str(rank.split[number]))
    show_table(table)


def print_reasons(plan: Plan) -> None:
    table = plain_table("choice", "value", "because")
    for reason in plan.reasons:
        table.add_row(reason.choice, escape(reason.value), escape(reason.because))
    console.print()
    show_table(table)


class Screen:
    """Follows a run through its event files: a bar in a terminal, a line per tenth of the run elsewhere."""

    def __init__(self, show: tuple[str, ...]) -> None:
        self.show = show
        self.bar: Progress | None = None
        self.looking = errors.status("looking at the machine and the workload")  # shown in a terminal alone
        self.looking.start()

    def watch(self, plan: Plan, folder: RunFolder) -> Callable[[], None]:
        """Print what will happen; return what is to be called while it does."""
        self.looking.stop()
        print_sentence(plan, plan.workload.rpartition("/")[2])
        self.plan = plan
        self.tails = [Tail(folder.events / f"rank{rank.rank}.jsonl") for rank in plan.ranks]
        self.pids: dict[int, int] = {}
        self.parts: list[list[float]] = [[] for _ in plan.ranks]  # every rank's part of every step's loss
        self.first_start, self.tenths = 0.0, 0
        return self.poll

    def poll(self) -> None:
        end = 0.0
        for tail, parts in zip(self.tails, self.parts, strict=True):
            for event in tail.new():
                if event["event"] == "start":
                    self._rank_started(event)
                elif event["event"] == "step":
                    self.first_start = self.first_start or event["start"]
                    end = max(end, event["end"])
                    parts.append(event["loss"])
        if end:
            self._steps_done(min(map(len, self.parts)), end - self.first_start)

    def _rank_started(self, event: dict[str, Any]) -> None:
        self.pids[event["rank"]] = event["pid"]
        if "ranks" in self.show:
            where = f"Device: {', '.join(event['devices'])} | PID: {event['pid']}"
            console.print(f"Rank: {event['rank']} | Local Rank: {event['local_rank']} | {where}")
        if len(self.pids) == len(self.tails):
            print_ranks(self.plan, self.pids)
            if errors.is_terminal:  # only now: what is printed beside a live bar would break it
                columns = (BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
                self.bar = Progress(*columns, console=errors, transient=True)
                self.task = self.bar.add_task("", total=self.plan.num_steps)
                self.bar.start()

    def _steps_done(self, done: int, seconds_spent: float) -> None:
        if not done:
            return
        loss = sum(parts[done - 1] for parts in self.parts)
        numbers = f"loss {loss:.4f}  {rate(done * self.plan.batch_size / seconds_spent)} samples/s"
        if self.bar:
            self.bar.update(self.task, completed=done, description=numbers)
        elif done * 10 // self.plan.num_steps > self.tenths:
            self.tenths = done * 10 // self.plan.num_steps
            errors.print(f"step {done}/{self.plan.num_steps}  {numbers}")

    def close(self) -> None:
        self.looking.stop()
        if self.bar:
            self.bar.stop()


def print_result(result: dict[str, Any], show: tuple[str, ...]) -> None:
    """What the run cost."""
    if "splits" in show:
        for split in result["splits"]:
            virtual = "" if split["device"] == split["physical"] else f" (virtual: {split['physical']})"
            shape = f"torch.Size({split['shape']})"
            console.print(f"Inside model on device {split['device']}{virtual}, shape: {shape}", markup=False)
    times = result["step_seconds"]
    table = fact_table()
    losses = [loss for loss in result["losses"] if loss is not None]
    table.add_row("loss", f"{losses[0]:.4f} → {losses[-1]:.4f}" if losses else "not finite")
    spread = f"{seconds(times['median'])} (p10 {seconds(times['p10'])}, p90 {seconds(times['p90'])})"
    shared = "; [yellow]the devices share cores[/]" if any("share cores" in remark for remark in result["remarks"]) else ""
    table.add_row("step time", f"{spread}, {plural(result['warm_up_steps'], 'warm-up step')} left out{shared}")
    table.add_row(
        "total time",
        f"{seconds(result['total_seconds'])} training, {seconds(result['wall_seconds'])} with the start of the processes",
    )
    table.add_row("samples/s", rate(result["samples_per_second"]))
    for memory in result["peak_bytes"]:
        names = ("parameters", "gradients", "optimizer", "activations")
        parts = " + ".join(f"{name} {size(memory[name])}" for name in names if memory[name])
        how = "peak, of it" if memory["how"] == "allocator" else "="
        table.add_row(f"memory {memory['device']}", f"{size(memory['bytes'])} {how} {parts}")
    if result["all_reduces_per_step"]:
        count, together = f"{result['all_reduces_per_step']:g}", size(result["bytes_per_step"])
        table.add_row("synchronisation", f"{count} all-reduce(s), {together} together, per optimiser step and rank")
    else:
        table.add_row("synchronisation", "no all-reduce: one process")
    table.add_row("run folder", escape(result["run_folder"]))
    show_table(table)
    for warning in result["warnings"][len(result["remarks"]) :]:  # the plan's remarks stand above already
        console.print(f"[yellow]note:[/] {escape(warning)}", soft_wrap=True)
