"""Show a run in the terminal: first the plan as a sentence and a table, then the result."""

from __future__ import annotations

from collections.abc import Iterator

from rich.markup import escape

from paralab.analyse.phrases import collectives_per_step, spread
from paralab.analyse.result import Result
from paralab.plan.plan import Plan, label
from paralab.plan.remarks import SHARE_CORES, find_sharing
from paralab.plan.stages import stage_loads
from paralab.show.console import console, fact_table, plain_table, show_table
from paralab.units import count, plural, rate, seconds, size


def print_sentence(plan: Plan, workload: str) -> None:
    """Print the plan as a sentence, and note what is virtual, shared, or different."""
    devices = (
        "virtual devices"
        if any(d.virtual for rank in plan.ranks for d in rank.devices)
        else "devices"
    )
    console.print(
        f"[bold]{label(plan)}[/] trains [bold]{escape(workload)}[/] for {plural(plan.num_steps, 'step')}"
        f" on {plan.num_devices} {devices if plan.num_devices > 1 else 'device'}: {plan.arithmetic}"
    )
    for remark in plan.remarks:
        console.print(f"[yellow]note:[/] {escape(remark)}", soft_wrap=True)
    for difference in plan.differences if plan.strategy != "single" else ():
        console.print(
            f"[yellow]may differ from one device:[/] {escape(difference)}", soft_wrap=True
        )


def print_ranks(plan: Plan, pids: dict[int, int] | None = None) -> None:
    """Print one line per rank and device. Process ids are known once the ranks have started."""
    process = ("pid",) if pids else ()
    right = ("rank", "local rank", "pid", "samples per step")
    nodes = ("node",) if any(rank.node for rank in plan.ranks) else ()
    table = plain_table(
        "rank", "local rank", *nodes, *process, "device", "holds", "samples per step", right=right
    )
    for rank in plan.ranks:
        who = [
            str(rank.rank),
            str(rank.local_rank),
            *([rank.node] if nodes else []),
            *([str(pids[rank.rank])] if pids else []),
        ]
        for number, device in enumerate(rank.devices):
            mark = " (virtual)" if device.virtual else " (shared)" if device.shared else ""
            table.add_row(
                *(who if number == 0 else [""] * len(who)),
                device.name + mark,
                device.role,
                str(rank.split[number]),
            )
    show_table(table)


def print_stages(plan: Plan) -> None:
    """Print each stage's estimated time and memory."""
    loads = stage_loads(plan)
    if not loads:
        return
    columns = (
        "stage",
        "layers",
        "time",
        "share",
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "micro-batches kept",
    )
    table = plain_table(*columns, right=columns)
    for load in loads:
        sizes = [load.parameters, load.gradients, load.optimizer, load.activations]
        words = ["unknown" if number is None else size(number) for number in sizes]
        time = [seconds(load.seconds), f"{load.share:.0%}"]
        table.add_row(
            str(load.stage), str(load.layers), *time, *words, str(load.micro_batches_kept)
        )
    console.print()
    show_table(table)
    console.print(
        "Time: forward and backward, measured on one device. Memory: estimated, in fp32.",
        style="dim",
    )


def print_reasons(plan: Plan) -> None:
    table = plain_table("choice", "value", "because")
    for reason in plan.reasons:
        table.add_row(reason.choice, escape(reason.value), escape(reason.because))
    console.print()
    show_table(table)


def print_result(result: Result, show: tuple[str, ...]) -> None:
    """Print the result of the run: loss, times, memory, and communication."""
    if "splits" in show:
        for split in result.splits:
            virtual = "" if split.device == split.physical else f" (virtual: {split.physical})"
            shape = f"torch.Size({split.shape})"
            console.print(
                f"Inside model on device {split.device}{virtual}, shape: {shape}", markup=False
            )
    table = fact_table()
    losses = [loss for loss in result.losses if loss is not None]
    table.add_row("loss", f"{losses[0]:.4f} → {losses[-1]:.4f}" if losses else "not finite")
    times = spread(result.step_seconds) if result.step_seconds else "not measured"
    crowded = SHARE_CORES in find_sharing(result.remarks)
    shared = "; [yellow]the devices share cores[/]" if crowded else ""
    table.add_row(
        "step time", f"{times}, {plural(result.warm_up_steps, 'warm-up step')} excluded{shared}"
    )
    table.add_row(
        "total time",
        f"{seconds(result.total_seconds)} training, {seconds(result.wall_seconds)} including "
        "process start-up",
    )
    table.add_row("samples/s", rate(result.samples_per_second))
    for memory in result.peak_bytes:
        names = ("parameters", "gradients", "optimizer", "activations", "gathered", "unreduced")
        parts = " + ".join(f"{name} {size(memory[name])}" for name in names if memory[name])
        how = "peak, including" if memory.how == "allocator" else "="
        table.add_row(f"memory {memory.device}", f"{size(memory.bytes)} {how} {parts}")
    if collectives := collectives_per_step(result):
        total = f"{size(result.bytes_per_step)} in total"
        table.add_row("synchronization", f"{collectives}, {total}, per rank and optimizer step")
    else:
        one = (
            "one replica" if result.grid.replicas == 1 and len(result.ranks) > 1 else "one process"
        )
        table.add_row("synchronization", f"no all-reduce: {one}")
    for what, words in metric_lines(result):
        table.add_row(what, words)
    if saves := result.saves:
        each = f"{plural(saves.number, 'checkpoint')}, the last is {escape(saves.last)}"
        table.add_row(
            "saved", f"{each}; a save pauses training for {seconds(saves.blocked_seconds)}"
        )
    table.add_row("run folder", escape(result.run_folder))
    show_table(table)
    for warning in result.warnings[len(result.remarks) :]:  # the plan's remarks are already above
        console.print(f"[yellow]note:[/] {escape(warning)}", soft_wrap=True)


def metric_lines(result: Result) -> Iterator[tuple[str, str]]:
    """Yield where step time went, as far as it was measured. docs/metrics.md defines the
    numbers."""
    metrics = result.metrics
    if metrics.communication_seconds:
        hidden = f"{metrics.overlap:.0%} hidden behind compute"
        exposed = f"{seconds(metrics.exposed_communication_seconds)} exposed ({metrics.exposed_share:.0%})"
        share = f"{metrics.communication_share:.0%} of the step"
        rule = "" if metrics.keeps_rule else ", above the 10 % rule of thumb"
        yield (
            "communication",
            f"{seconds(metrics.communication_seconds)}, {share}{rule}; {hidden}, {exposed}",
        )
    if metrics.straggler:
        late = metrics.straggler
        yield (
            "straggler",
            f"[yellow]rank {late.rank}: the others wait for it {late.share_of_step:.0%} of the step[/]",
        )
    if metrics.bubble:
        yield (
            "bubble",
            f"the stages are idle {metrics.bubble.measured:.0%} of the time ({metrics.bubble.ideal:.0%} is ideal)",
        )
    if metrics.balance is not None:
        yield "balance", f"device 0 is {metrics.balance:.2f}× as busy as the others"
    flops = metrics.flops
    if flops.per_second:
        peak = (
            ""
            if flops.share_of_peak is None
            else f", {flops.share_of_peak:.0%} of the devices' peak"
        )
        yield "model FLOP/s", f"{count(flops.per_second)}{peak}"
