"""A run in the terminal: the plan as a sentence and a table, one progress line, then what it cost."""

from __future__ import annotations

from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paralab.plan.plan import Plan
from paralab.record.folder import RunFolder
from paralab.record.reader import Tail
from paralab.show.console import console, errors, fact_table, plain_table
from paralab.units import plural, rate, seconds, size


def print_plan(plan: Plan, workload: str) -> None:
    """What will happen, as a sentence and a table."""
    devices = "virtual devices" if any(d.virtual for rank in plan.ranks for d in rank.devices) else "devices"
    console.print(
        f"[bold]{plan.title()}[/] trains [bold]{workload}[/] for {plural(plan.num_steps, 'step')} in {plan.precision} "
        f"on {plan.num_devices} {devices if plan.num_devices > 1 else 'device'}: {plan.arithmetic}"
    )
    numbers = ("rank", "local rank", "samples per step")
    table = plain_table("rank", "local rank", "device", "holds", "samples per step", right=numbers)
    for rank in plan.ranks:
        for number, device in enumerate(rank.devices):
            mark = " (virtual)" if device.virtual else " (shared)" if device.shared else ""
            first = (str(rank.rank), str(rank.local_rank)) if number == 0 else ("", "")
            table.add_row(*first, device.name + mark, device.role, str(rank.split[number]))
    console.print(table)
    for remark in plan.remarks:
        console.print(f"[yellow]note[/] {remark}", soft_wrap=True)
    for difference in plan.differences if plan.strategy != "single" else ():
        console.print(f"[yellow]may differ from one device[/] {difference}", soft_wrap=True)


def print_reasons(plan: Plan) -> None:
    table = plain_table("choice", "value", "because")
    for reason in plan.reasons:
        table.add_row(reason.choice, reason.value, reason.because)
    console.print()
    console.print(table)


class Screen:
    """Follows a run through its event files: a bar in a terminal, a line per tenth of the run elsewhere."""

    def __init__(self, show: tuple[str, ...]) -> None:
        self.show = show
        self.progress: Progress | None = None

    def watch(self, plan: Plan, folder: RunFolder) -> Any:
        print_plan(plan, folder_workload(plan))
        tails = [Tail(folder.events / f"rank{rank.rank}.jsonl") for rank in plan.ranks]
        losses: dict[int, list[float]] = {}
        shown, started = 0, None
        if errors.is_terminal:
            self.progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[numbers]}"),
                console=errors,
                transient=True,
            )
            self.progress.start()
            task = self.progress.add_task("starting ranks", total=plan.num_steps, numbers="")

        def poll() -> None:
            nonlocal shown, started
            last = None
            for tail in tails:
                for event in tail.new():
                    if event["event"] == "step":
                        losses.setdefault(event["step"], []).append(event["loss"])
                        last = event
                        started = started if started is not None else event["start"]
                    elif event["event"] == "start":
                        self._rank_line(event)
            whole = sum(len(parts) == len(tails) for parts in losses.values())
            if last is None or whole == 0:
                return
            elapsed = last["end"] - (started or 0.0)
            numbers = f"loss {sum(losses[whole - 1]):.4f}  {rate(whole * plan.batch_size / elapsed)} samples/s"
            if self.progress:
                self.progress.update(task, description="training", completed=whole, numbers=numbers)
            elif whole * 10 // plan.num_steps > shown:
                shown = whole * 10 // plan.num_steps
                errors.print(f"step {whole}/{plan.num_steps}  {numbers}")

        return poll

    def _rank_line(self, event: dict[str, Any]) -> None:
        if "ranks" in self.show:
            where = f"Device: {', '.join(event['devices'])} | PID: {event['pid']}"
            console.print(f"Rank: {event['rank']} | Local Rank: {event['local_rank']} | {where}")

    def close(self) -> None:
        if self.progress:
            self.progress.stop()


def folder_workload(plan: Plan) -> str:
    return plan.workload.rpartition("/")[2]


def print_result(result: dict[str, Any], show: tuple[str, ...]) -> None:
    """What the run cost."""
    if "splits" in show:
        for split in result["splits"]:
            virtual = "" if split["device"] == split["physical"] else f" (virtual: {split['physical']})"
            shape = f"torch.Size({split['shape']})"
            console.print(f"Inside model on device {split['device']}{virtual}, shape: {shape}", markup=False)
    times = result["step_seconds"]
    pids = ", ".join(str(rank["pid"]) for rank in result["ranks"])
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
        parts = ", ".join(
            f"{name} {size(memory[name])}" for name in ("parameters", "gradients", "optimizer", "activations") if memory[name]
        )
        how = "peak" if memory["how"] == "allocator" else "counted from tensors"
        table.add_row(f"memory {memory['device']}", f"{size(memory['bytes'])} {how} ({parts})")
    if result["all_reduces_per_step"]:
        count = f"{result['all_reduces_per_step']:g}"
        table.add_row("synchronisation", f"{count} all-reduce(s), {size(result['bytes_per_step'])} per optimiser step and rank")
    else:
        table.add_row("synchronisation", "no all-reduce: one process")
    table.add_row("processes", f"pid {pids}")
    table.add_row("run folder", result["run_folder"])
    console.print(table)
    for warning in result["warnings"][len(result["remarks"]) :]:  # the plan's remarks stand above already
        console.print(f"[yellow]note[/] {warning}", soft_wrap=True)
