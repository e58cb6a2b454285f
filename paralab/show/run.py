"""Show a run in the terminal: first the plan as a sentence and a table, then the result."""

from collections.abc import Iterator

from rich.markup import escape

from paralab.analyse.grid_tables import grid_tables
from paralab.analyse.phrases import collectives_per_step, compile_cost, spread
from paralab.analyse.result import PeakMemory, Result
from paralab.plan.expert_plan import layer_table
from paralab.plan.plan import Plan, label
from paralab.plan.remarks import SHARE_CORES, find_sharing
from paralab.plan.sequence_plan import block_table
from paralab.plan.stages import stage_loads
from paralab.plan.tensor_plan import parallelize_code, table_of
from paralab.show.console import console, print_facts, print_table, say
from paralab.show.memory import KINDS
from paralab.units import count, plural, rate, seconds, size
from paralab.workload.tensor_group import TensorPlan


def print_sentence(plan: Plan, workload: str) -> None:
    """Print the plan as a sentence, with notes on virtual or shared devices and differences."""
    virtual = any(device.virtual for rank in plan.ranks for device in rank.devices)
    kind = "virtual device" if virtual and plan.num_devices > 1 else "device"
    trains = f"[bold]{label(plan)}[/] trains [bold]{escape(workload)}[/]"
    how = f"for {plural(plan.num_steps, 'step')} on {plural(plan.num_devices, kind)}"
    console.print(f"{trains} {how}: {plan.arithmetic}")
    for remark in plan.remarks:
        say(f"[yellow]note:[/] {escape(remark)}")
    for difference in plan.differences if plan.strategy != "single" else ():
        say(f"[yellow]may differ from a single device:[/] {escape(difference)}")


def print_ranks(plan: Plan, pids: dict[int, int] | None = None) -> None:
    """Print one line per rank and device. Process ids are known once the ranks have started."""
    nodes = any(rank.node for rank in plan.ranks)
    rows = []
    for rank in plan.ranks:
        who = {"rank": str(rank.rank), "local rank": str(rank.local_rank)}
        who |= {"node": rank.node} if nodes else {}
        who |= {"pid": str(pids[rank.rank])} if pids else {}
        for device, samples in zip(rank.devices, rank.split, strict=False):
            mark = " (virtual)" if device.virtual else " (shared)" if device.shared else ""
            device_cells = {"device": device.name + mark, "holds": device.role}
            rows.append({**who, **device_cells, "samples per step": str(samples)})
            who = dict.fromkeys(who, "")  # shown only once, next to the rank's first device
    right = ("rank", "local rank", "pid", "samples per step")
    print_table(tuple(rows[0]), (row.values() for row in rows), right)


def print_grid(plan: Plan) -> None:
    """Print which rank has which cell of the grid, and what the ranks along each axis exchange."""
    for table in grid_tables(plan):
        console.print(f"\n{table.title}:", style="dim")
        print_table(table.columns, ([cell.text for cell in row] for row in table.rows))


def print_stages(plan: Plan) -> None:
    """Print each stage's estimated time. Also print its memory if the plan has no estimate."""
    has_memory = bool(plan.memory and plan.memory.devices)
    is_timed = any(part.seconds for part in plan.stage_parts)
    rows = []
    for load in stage_loads(plan):
        sizes = (load.parameters, load.gradients, load.optimizer, load.activations)
        words = ["unknown" if number is None else size(number) for number in sizes]
        words = [] if has_memory else words
        time = [seconds(load.seconds), f"{load.share:.0%}"] if is_timed else []
        stage, layers, kept = map(str, (load.stage, load.layers, load.micro_batches_kept))
        rows.append((stage, layers, *time, *words, kept))
    if not rows:
        return
    kinds = () if has_memory else KINDS[:4]
    timed = ("time", "share") if is_timed else ()
    columns = ("stage", "layers", *timed, *kinds, "micro-batches kept")
    console.print()
    print_table(columns, rows, right=columns)
    notes = ["Time: forward and backward, measured on one device."] if is_timed else []
    notes += [] if has_memory else ["Memory: estimated, in fp32."]
    if notes:
        console.print(" ".join(notes), style="dim")


def print_splits(plan: Plan) -> None:
    """Print what tp, cp, or ep splits."""
    sequence = plan.tensor_plan.sequence if plan.tensor_plan else plan.sequence_plan
    if sequence:
        rows = [
            (escape(row.block), str(row.blocks), *_verdict(row.kept, row.result))
            for row in block_table(sequence)
        ]
        console.print()
        print_table(("block", "blocks", "tokens split", "proof"), rows, right=("blocks",))
    if plan.tensor_plan:
        _print_tensor_plan(plan.tensor_plan)
    if plan.expert_plan:
        layers = [
            (
                escape(row.layer),
                str(row.layers),
                str(row.experts),
                *_verdict(row.divided, row.result),
            )
            for row in layer_table(plan.expert_plan)
        ]
        console.print()
        columns = ("layer", "layers", "experts", "divided", "proof")
        print_table(columns, layers, right=columns[1:3])


def _verdict(kept: bool, result: str) -> tuple[str, str]:
    return "yes" if kept else "no", escape(result)


def _print_tensor_plan(split: TensorPlan) -> None:
    """Print the groups of layers that tp splits, those that it does not, and the code to paste."""
    rows = [
        (
            escape(row.block),
            escape(row.columns),
            escape(row.row),
            str(row.groups),
            count(row.parameters),
            *_verdict(row.kept, row.result),
        )
        for row in table_of(split)
    ]
    columns = ("block", "columns", "row", "groups", "parameters", "split", "proof")
    console.print()
    print_table(columns, rows, right=("groups", "parameters"))
    for name, reason in split.left:
        console.print(f"Replicated: {escape(name)}, because {escape(reason)}.", style="dim")
    console.print("\nFor your own script, with a device mesh of the shards:\n", style="dim")
    for line in parallelize_code(split):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_reasons(plan: Plan) -> None:
    console.print()
    print_table(
        ("choice", "value", "because"),
        ((each.choice, escape(each.value), escape(each.because)) for each in plan.reasons),
    )


def print_result(result: Result, show: tuple[str, ...]) -> None:
    for split in result.splits if "splits" in show else ():
        virtual = "" if split.device == split.physical else f" (virtual: {split.physical})"
        shape = f"shape: torch.Size({split.shape})"
        console.print(f"Inside model on device {split.device}{virtual}, {shape}", markup=False)
    print_facts([*_result_facts(result), *metric_lines(result), *_files(result)])
    for warning in result.warnings[len(result.remarks) :]:  # the plan's remarks were printed above
        say(f"[yellow]note:[/] {escape(warning)}")


def _result_facts(result: Result) -> Iterator[tuple[str, str]]:
    losses = [loss for loss in result.losses if loss is not None]
    yield "loss", f"{losses[0]:.4f} → {losses[-1]:.4f}" if losses else "not finite"
    times = spread(result.step_seconds) if result.step_seconds else "not measured"
    excluded = [plural(result.warm_up_steps, "warm-up step")] if result.warm_up_steps else []
    if result.smaller_steps:
        excluded.append(f"{plural(result.smaller_steps, 'step')} with a smaller batch")
    without = f", {' and '.join(excluded)} excluded" if excluded else ""
    crowded = SHARE_CORES in find_sharing(result.remarks)
    shared = "; [yellow]the devices share cores[/]" if crowded else ""
    yield "step time", f"{times}{without}{shared}"
    training, wall = seconds(result.total_seconds), seconds(result.wall_seconds)
    yield "total time", f"{training} training, {wall} including process startup"
    yield "samples/s", rate(result.samples_per_second)

    if result.compilation:
        yield "compile", compile_cost(result.compilation)

    devices: dict[str, list[str]] = {}  # replicas use the same memory
    for memory in result.peak_bytes:
        devices.setdefault(_memory(memory), []).append(memory.device)
    for words, names in devices.items():
        yield f"memory {together(names)}", words
    if result.memory_not_estimated:
        yield "memory estimate", f"none: {escape(result.memory_not_estimated)}"
    if collectives := collectives_per_step(result):
        total = f"{size(result.bytes_per_step)} in total, per rank and optimizer step"
        yield "synchronization", f"{collectives}, {total}, over {result.backend}"
    else:
        one = "replica" if result.grid.replicas == 1 and len(result.ranks) > 1 else "process"
        yield "synchronization", f"no all-reduce: one {one}"


def _memory(memory: PeakMemory) -> str:
    parts = " + ".join(f"{name} {size(memory[name])}" for name in KINDS if memory[name])
    how = "peak, including" if memory.how == "allocator" else "="
    expected = ""
    if memory.estimate_error is not None:
        expected = f"; estimated {size(memory.estimated_bytes)} ({memory.estimate_error:+.1%})"
    return f"{size(memory.bytes)} {how} {parts}{expected}"


def together(devices: list[str]) -> str:
    """`cpu:0`, `cpu:0,2`, or `cpu:0–7`."""
    kind = devices[0].partition(":")[0]
    numbers = sorted({int(device.partition(":")[2]) for device in devices})
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{kind}:{numbers[0]}–{numbers[-1]}"
    return f"{kind}:{','.join(map(str, numbers))}"


def metric_lines(result: Result) -> Iterator[tuple[str, str]]:
    """Yield the measured metrics that say where the step time went (docs/metrics.md)."""
    metrics, flops = result.metrics, result.metrics.flops
    if metrics.communication_seconds:
        share = f"{metrics.communication_share:.0%} of the step"
        rule = "" if metrics.keeps_rule else ", above the 10% rule of thumb"
        hidden = f"{metrics.overlap:.0%} hidden behind compute"
        exposed = seconds(metrics.exposed_communication_seconds)
        exposed += f" exposed ({metrics.exposed_share:.0%})"
        total = seconds(metrics.communication_seconds)
        yield "communication", f"{total}, {share}{rule}; {hidden}, {exposed}"
    if late := metrics.straggler:
        waiting = f"the others wait for it during {late.share_of_step:.0%} of the step"
        yield "straggler", f"[yellow]rank {late.rank}: {waiting}[/]"
    if bubble := metrics.bubble:
        idle = f"the stages are idle {bubble.measured:.0%} of the time"
        yield "bubble", f"{idle} ({bubble.ideal:.0%} is ideal)"
    if metrics.balance is not None:
        yield "balance", f"device 0 is {metrics.balance:.2f}× as busy as the others"
    if flops.per_second:
        known = flops.share_of_peak is not None
        peak = f", {flops.share_of_peak:.0%} of the devices' peak" if known else ""
        yield "model FLOP/s", f"{count(flops.per_second)}{peak}"


def _files(result: Result) -> Iterator[tuple[str, str]]:
    if saves := result.saves:
        saved = f"{plural(saves.number, 'checkpoint')}, the last is {escape(saves.last)}"
        yield "saved", f"{saved}; a save pauses training for {seconds(saves.blocked_seconds)}"
    yield "run folder", escape(result.run_folder)
