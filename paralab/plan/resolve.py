"""Request + machine + summary -> Plan. Every automatic choice is stored with one sentence why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise

from paralab.errors import UsageError
from paralab.machine.host import Machine
from paralab.machine.precision import Probe
from paralab.plan.batch_plan import Choose, Shape, arithmetic, shape_of
from paralab.plan.batches import chunk_sizes, num_steps, pieces, shares
from paralab.plan.check import check
from paralab.plan.grid import PROCESS_PER_REPLICA, Device, Place, grid, placed
from paralab.plan.plan import Plan, RankPlan, Reason, Stage
from paralab.plan.request import APPLIES, Request
from paralab.plan.schedules import PARTS_PER_RANK, ideal_bubble
from paralab.plan.sharding import shard_units
from paralab.plan.stages import balance
from paralab.units import plural, seconds, size
from paralab.workload.summary import Summary

DEFAULT_STEPS = 20
ADAPTIVE = (
    "Ada",
    "RMSprop",
    "Rprop",
    "NAdam",
    "RAdam",
)  # parts of names of optimizers that divide by the gradient's size


def needs_layers(strategy: str) -> bool:
    """Does this strategy cut the model into stages?"""
    return strategy in APPLIES["stages"]


def resolve(
    request: Request,
    machine: Machine,
    summary: Summary,
    probe: Callable[[str], Probe],
    threads_asked: int | None = None,
    places: Sequence[Place] = (),
    cuts: Sequence[str] = (),
) -> Plan:
    """The complete plan, or the UsageError that says what to write instead.

    places   where the ranks already are, if something else launched them
    cuts     where the stages begin in the checkpoint that the run resumes from
    """
    check(request)
    _require_supported(request, summary)
    request = _with_launched(request, places)
    reasons: list[Reason] = []

    def choose(name: str, given: object, chosen: object, because: str) -> None:
        reasons.append(Reason(name, str(chosen), "asked for" if given is not None else because))

    strategy = request.strategy
    device, gpus = _device(request, machine, reasons)
    shape = shape_of(request, summary, choose)
    precision, environment = _precision(request, machine, device, probe, reasons)
    scaler = precision == "fp16" and not request.no_scaler
    placement = request.placement or "spread"
    cells = grid(
        strategy,
        shape.replicas,
        shape.stages,
        placement,
        gpus,
        process_per_stage=bool(request.schedule),
    )
    if places:
        cells = _where_launched(request, cells, places, device)
    ranks = _ranks(request, shape, cells, places)
    devices = {cell.name: cell for row in cells for cell in row}
    threads = _threads(request, machine, device, len(devices), threads_asked, places, reasons)
    samples, steps = _length(request, summary, choose)
    _bucket(request, choose)
    chunks = _schedule(request, shape, reasons)
    return Plan(
        strategy=strategy,
        workload=request.workload,
        **asdict(shape),
        precision=precision,
        loss_scale=request.loss_scale or (65536.0 if scaler else None),
        scaler=scaler,
        bucket_mb=request.bucket_mb,
        bucket_view=bool(request.bucket_view),
        static_graph=bool(request.static_graph),
        sync_every_pass=bool(request.sync_every_pass),
        find_unused=_find_unused(request, summary, reasons),
        steps=steps,
        epochs=request.epochs,
        samples=samples,
        num_steps=num_steps(shape.batch_size, samples, steps, request.epochs),
        seed=request.seed,
        device=device,
        placement=placement,
        threads_per_device=threads,
        backend=_backend(strategy, cells, device, reasons, request.schedule),
        prefix=request.prefix,
        schedule=request.schedule,
        chunks=chunks,
        optimizer_bytes_per_byte=summary.optimizer_bytes_per_byte,
        draws=summary.dropout or summary.random,
        ranks=ranks,
        shard_units=shard_units(strategy, machine, summary, reasons),
        stage_parts=_stages(request, shape.stages, chunks, summary, reasons, cuts),
        arithmetic=arithmetic(shape, ranks),
        environment=environment,
        reasons=tuple(reasons),
        remarks=_remarks(strategy, machine, device, devices, threads, placement, cells, places),
        differences=_differences(
            summary, precision, shape, ranks, moved=device == "cuda" and len(devices) > 1
        ),
    )


def _require_supported(request: Request, summary: Summary) -> None:
    """Refuse what this strategy would train wrongly, or not at all."""
    strategy = request.strategy
    if summary.sparse and strategy not in ("single", "ddp"):
        raise UsageError(
            f"The gradient of {summary.sparse[0]!r} in {summary.name} is sparse, and only single and ddp train with sparse "
            "gradients.",
            fix="nn.Embedding(…, sparse=False), or ddp",
        )
    if summary.scalar_output and strategy == "dp":
        raise UsageError(
            f"dp: the model of {summary.name} returns a scalar (such as a loss it computes itself), and DataParallel would return "
            "one per replica.",
            fix="return one value per sample and compute the loss in `loss`, or use ddp",
        )
    if summary.whole_tensors and strategy == "fsdp":
        raise UsageError(
            f"fsdp: {summary.optimizer} needs whole parameters, but each rank holds only a shard of each.",
            fix="an elementwise optimizer such as AdamW or SGD, or use ddp",
        )
    if summary.whole_model and request.schedule:
        raise UsageError(
            f"--schedule {request.schedule}: {summary.optimizer} needs all parameters at once (to clip a global norm, say), but "
            "each stage has its own process and optimizer.",
            fix="leave --schedule out, so that one optimizer sees all parameters",
        )


def _bucket(request: Request, choose: Choose) -> None:
    if request.strategy in APPLIES["bucket_mb"]:
        default = "25 MB" if request.schedule else "25 MB, the first one 1 MB"
        size_of_bucket = f"{request.bucket_mb:g} MB" if request.bucket_mb else default
        choose("bucket", request.bucket_mb, size_of_bucket, "the default of PyTorch's DDP")


def _length(request: Request, summary: Summary, choose: Choose) -> tuple[int | None, int | None]:
    """(samples in an epoch, optimizer steps); None: endless, or as many as the epochs give."""
    if (
        request.samples is not None
        and summary.samples is not None
        and request.samples > summary.samples
    ):
        raise UsageError(
            f"--samples {request.samples}: the data of {summary.name} has only {summary.samples} samples.",
            fix=f"--samples {summary.samples} or less",
        )
    samples = request.samples or summary.samples
    if request.epochs and samples is None:
        raise UsageError(
            f"--epochs {request.epochs}: the get_batch function of {summary.name} never ends, so it has no epochs.",
            fix=f"--steps {request.epochs * 100}, or --samples N to say how many samples an epoch has",
        )
    steps = request.steps if request.steps or request.epochs else DEFAULT_STEPS
    if not request.epochs:
        choose(
            "steps",
            request.steps,
            steps,
            "enough for a median; say --steps or --epochs for a training",
        )
    return samples, steps


def _device(request: Request, machine: Machine, reasons: list[Reason]) -> tuple[str, int]:
    found = len(machine.gpus)
    if request.device == "cuda" and not found:
        raise UsageError(
            f"--device cuda: this machine has no usable GPU ({machine.no_gpu_reason}).",
            fix="--device cpu (CPU ranks over gloo), or leave --device out",
        )
    device = request.device if request.device != "auto" else "cuda" if found else "cpu"
    because = plural(found, "GPU") + " found" if found else f"no GPU: {machine.no_gpu_reason}"
    reasons.append(Reason("device", device, "asked for" if request.device != "auto" else because))
    return device, found if device == "cuda" else 0


def _precision(
    request: Request,
    machine: Machine,
    device: str,
    probe: Callable[[str], Probe],
    reasons: list[Reason],
) -> tuple[str, dict[str, str]]:
    precision = request.precision or "fp32"
    environment: dict[str, str] = {}
    because = "asked for" if request.precision else "the default of PyTorch"
    if device == "cuda" and precision in ("tf32", "bf16"):
        weak = [gpu for gpu in machine.gpus if gpu.capability < (8, 0)]
        if weak:
            have = ".".join(map(str, weak[0].capability))
            raise UsageError(
                f"--precision {precision} needs a GPU of compute capability 8.0; {weak[0].name} has {have}.",
                fix="--precision fp16 or fp32",
            )
    if device == "cpu" and precision == "tf32":
        raise UsageError(
            "--precision tf32 is a mode of NVIDIA GPUs; on a CPU it does not exist.",
            fix="--precision fp32 or bf16",
        )
    if device == "cpu" and precision in ("bf16", "fp16"):
        tried = probe(precision)
        if not tried.works:
            raise UsageError(
                f"--precision {precision} does not run on this CPU: {tried.seen}.",
                fix="--precision fp32",
            )
        environment, because = tried.environment, f"{because}; {tried.seen}"
    reasons.append(Reason("precision", precision, because))
    return precision, environment


def _schedule(request: Request, shape: Shape, reasons: list[Reason]) -> int:
    """How many parts of the model a rank of this schedule holds."""
    if request.schedule is None:
        return 1
    chunks = PARTS_PER_RANK[request.schedule]
    idle = ideal_bubble(shape.stages, shape.micro_batches, request.schedule)
    because = f"asked for; ideally the stages idle {idle:.1%} of a pass"
    because += f"; {chunks} parts of the model per stage" if chunks > 1 else ""
    reasons.append(Reason("schedule", request.schedule, because))
    return chunks


def _with_launched(request: Request, places: Sequence[Place]) -> Request:
    """The launched ranks are the replicas, or the stages of a pipeline over processes, unless it
    was said how many there are."""
    if not places:
        return request
    if request.schedule and request.strategy == "pipeline":
        return replace(request, stages=request.stages or len(places))
    if request.replicas is not None or request.strategy not in PROCESS_PER_REPLICA:
        return request
    per_replica = (request.stages or 2) if request.schedule else 1
    return replace(request, replicas=max(1, len(places) // per_replica))


def _where_launched(
    request: Request, cells: list[list[Device]], places: Sequence[Place], device: str
) -> list[list[Device]]:
    """The grid on the devices of the ranks that were launched, if they are as many as it needs, and
    each has what it needs."""
    launched, needed = len(places), len(cells)
    if needed != launched:
        asked = "".join(
            f" --{name} {n}"
            for name in ("replicas", "stages")
            if (n := getattr(request, name)) is not None
        )
        fix = f"launch {plural(needed, 'rank')} (torchrun --nproc_per_node={needed}, srun -n {needed})"
        if request.strategy in PROCESS_PER_REPLICA:
            fix = f"leave --replicas out, or {fix}"
        elif needed == 1:
            fix = f"paralab run {request.strategy} without torchrun or srun, or a strategy with a process per replica: ddp"
        were = "was" if launched == 1 else "were"
        raise UsageError(
            f"{request.strategy}{asked} is {plural(needed, 'rank')}, and {launched} {were} launched.",
            fix=fix,
        )
    blind = [place.node for place in places if not place.gpus]
    if device == "cuda" and blind:
        raise UsageError(
            f"A rank on {blind[0]} sees no GPU, and rank 0 does.",
            fix="--device cpu, or GPUs for every rank",
        )
    return placed(cells, places, request.placement or "spread", device == "cuda")


def _ranks(
    request: Request, shape: Shape, cells: list[list[Device]], places: Sequence[Place]
) -> tuple[RankPlan, ...]:
    strategy, schedule = request.strategy, request.schedule
    ranks = []
    per_replica = (
        shares(shape.batch_size, shape.replicas)
        if strategy in PROCESS_PER_REPLICA
        else (shape.batch_size,)
    )
    stages: list[int | None] = list(range(shape.stages)) if schedule else [None]
    owners = [(replica, stage) for replica in range(len(per_replica)) for stage in stages]
    for rank, ((replica, stage), row) in enumerate(zip(owners, cells, strict=True)):
        samples = per_replica[replica]
        if strategy == "dp":
            # Each accumulation step is split by DataParallel on its own: add up what each replica
            # gets.
            splits = [
                chunk_sizes(stop - start, shape.replicas)
                for [(start, stop)] in pieces(samples, shape.accumulate, 1)
            ]
            split = tuple(sum(column) for column in zip(*splits, strict=True))
        else:
            split = (samples,) * len(row)
        local_rank, node = (places[rank].local_rank, places[rank].node) if places else (rank, "")
        ranks.append(RankPlan(rank, local_rank, tuple(row), samples, split, replica, stage, node))
    return tuple(ranks)


def _threads(
    request: Request,
    machine: Machine,
    device: str,
    devices: int,
    asked: int | None,
    places: Sequence[Place],
    reasons: list[Reason],
) -> int:
    cores: float = machine.cores
    because = f"{plural(machine.cores, 'core')} ÷ {plural(devices, 'device')}, at least 1"
    if places:  # one number for all ranks: what the one with the fewest cores has
        cores, devices = min(place.cores for place in places), -(-devices // len(places))
        because = f"{cores:g} cores per rank ÷ {plural(devices, 'device')}, at least 1"
    if device == "cuda":
        return max(1, asked or int(cores / max(1, devices)))
    threads = request.threads_per_device or asked or max(1, int(cores / devices))
    if request.threads_per_device:
        because = "asked for"
    elif asked:
        because = "OMP_NUM_THREADS" + (
            " (torchrun sets it to 1 where it is not set)" if places and asked == 1 else ""
        )
    reasons.append(Reason("threads per device", str(threads), because))
    return threads


def _backend(
    strategy: str,
    cells: list[list[Device]],
    device: str,
    reasons: list[Reason],
    schedule: str | None,
) -> str | None:
    if strategy not in PROCESS_PER_REPLICA and not schedule:
        return None
    users: dict[str, set[int]] = {}
    for rank, row in enumerate(cells):
        for cell in row:
            users.setdefault(cell.name, set()).add(rank)
    if device == "cpu":
        backend, because = "gloo", "the ranks are CPU processes"
    elif any(len(ranks) > 1 for ranks in users.values()):
        if strategy == "fsdp":
            raise UsageError(
                f"fsdp on {plural(len(cells), 'rank')} and {plural(len(users), 'GPU')}: ranks would share a GPU, NCCL refuses it, "
                "and gloo's collectives for shards crash on CUDA tensors.",
                fix=f"--device cpu, --replicas {len(users)}, or ddp",
            )
        backend, because = "gloo", "ranks share a GPU, which NCCL refuses"
    else:
        backend, because = "cpu:gloo,cuda:nccl", "every rank has GPUs of its own"
    reasons.append(Reason("backend", backend, because))
    return backend


def _find_unused(request: Request, summary: Summary, reasons: list[Reason]) -> bool:
    """DDP waits for the gradient of every parameter, unless it is told to look for those that get
    none."""
    strategy = request.strategy
    if strategy not in APPLIES["bucket_mb"] or request.schedule:
        return False
    if request.find_unused:
        reasons.append(Reason("find_unused_parameters", "yes", "asked for"))
        return True
    if not summary.unused:
        return False
    names = ", ".join(summary.unused[:3]) + (", …" if len(summary.unused) > 3 else "")
    if strategy == "hybrid":
        raise UsageError(
            f"hybrid: {plural(len(summary.unused), 'parameter')} of {summary.name} got no gradient in a trial step ({names}), "
            "and the stages' synchronization waits for every one.",
            fix="requires_grad_(False) on them, or use ddp",
        )
    reasons.append(Reason("find_unused_parameters", "yes", f"no gradient in a trial step: {names}"))
    return True


def _stages(
    request: Request,
    stages: int,
    chunks: int,
    summary: Summary,
    reasons: list[Reason],
    cuts: Sequence[str],
) -> tuple[Stage, ...]:
    if not needs_layers(request.strategy):
        return ()
    layers = summary.layers
    if stages <= len(layers) < stages * chunks:
        raise UsageError(
            f"--schedule {request.schedule} needs {chunks} parts of the model per stage: {stages} stages × {chunks} = "
            f"{stages * chunks}, and {summary.name} can be cut into {plural(len(layers), 'part')} at most"
            + (f", because {summary.uncut_reason}." if summary.uncut_reason else "."),
            fix="--schedule 1f1b"
            + (f", or --stages {len(layers) // chunks}" if len(layers) // chunks > 1 else ""),
        )
    if len(layers) < stages:
        raise UsageError(
            f"--stages {stages}: {summary.name} can be cut into {plural(len(layers), 'part')} at most"
            + (f", because {summary.uncut_reason}." if summary.uncut_reason else "."),
            fix=f"--stages {len(layers)} or fewer"
            if len(layers) > 1
            else "a strategy that keeps the model whole: single, dp, ddp, fsdp",
        )
    parts = []
    names = [layer.name for layer in layers]
    if len(cuts) == stages * chunks and set(cuts) <= set(names):
        starts = [names.index(cut) for cut in cuts]
        spans, basis = list(pairwise([*starts, len(layers)])), "as in the checkpoint"
    else:
        spans, how = balance(layers, stages * chunks, summary.batch_size)
        basis = f"balanced by {how}"
    for first, stop in spans:
        chosen = layers[first:stop]
        modules = tuple(name for layer in chosen for name in layer.modules)
        time, weight = (
            sum(layer.seconds for layer in chosen),
            sum(layer.parameter_bytes for layer in chosen),
        )
        kept = [
            layer.activation_bytes_per_sample
            for layer in chosen
            if layer.activation_bytes_per_sample is not None
        ]
        parts.append(
            Stage(
                chosen[0].name,
                modules,
                len(chosen),
                time,
                weight,
                sum(kept) if len(kept) == len(chosen) else None,
            )
        )
    for number, part in enumerate(parts):
        held = f"{plural(part.layers, 'layer')} from {part.start or 'the input'!r}, {size(part.parameter_bytes)} of parameters"
        because = f"{basis}; {seconds(part.seconds)} of the {seconds(sum(p.seconds for p in parts))} measured for all layers"
        where = f"stage {number}" if chunks == 1 else f"part {number}, on stage {number % stages}"
        reasons.append(Reason(where, held, because))
    return tuple(parts)


def _remarks(
    strategy: str,
    machine: Machine,
    device: str,
    devices: dict[str, Device],
    threads: int,
    placement: str,
    cells: list[list[Device]],
    places: Sequence[Place],
) -> tuple[str, ...]:
    """What is virtual or shared; shown with the plan and with every timing."""
    remarks = []
    nodes = len({place.node for place in places})
    cores = round(sum(place.cores for place in places)) or machine.cores
    if any(cell.virtual for cell in devices.values()):
        unit = "ranks" if len(cells) > 1 else "threads"
        where = f"the CPUs of {nodes} nodes" if nodes > 1 else "one CPU"
        remarks.append(f"virtual devices: {len(devices)} shares of {where}, run by {unit}")
        if strategy == "dp":
            remarks.append("DataParallel is emulated: nn.DataParallel does nothing without a GPU")
    if device == "cpu" and len(devices) * threads > cores:
        remarks.append(
            f"the devices share cores: {len(devices)} devices × {threads} threads > {cores} cores, "
            "so these timings do not show what separate devices would take"
        )
    shared = [name for name, cell in devices.items() if cell.shared]
    if placement == "same":
        remarks.append(
            f"every stage of a rank is on the same device ({', '.join(shared)}): no model parallelism is left"
        )
    elif shared:
        remarks.append(
            f"shared: {', '.join(shared)} does the work of several devices, so nothing can get faster by it"
        )
    return tuple(remarks)


def _differences(
    summary: Summary, precision: str, shape: Shape, ranks: tuple[RankPlan, ...], moved: bool
) -> tuple[str, ...]:
    """Why this training will legitimately not be equal to the single-device one."""
    differences = []
    parts = shape.replicas * shape.accumulate * shape.micro_batches
    if summary.batch_norms and parts > 1:
        norms = plural(summary.batch_norms, "layer")
        padded = (
            ", with copies where micro-batches are filled up to the same size"
            if ranks[0].stage is not None
            else ""
        )
        differences.append(
            f"BatchNorm ({norms}) normalizes over the samples that pass together, not over the whole batch{padded}"
        )
    if (summary.dropout or summary.random) and (parts > 1 or moved):
        what = "dropout" if summary.dropout else "the forward pass"
        differences.append(f"{what} draws other random numbers when the work is split")
    if summary.state and parts > 1:
        names = ", ".join(summary.state[:3]) + (", …" if len(summary.state) > 3 else "")
        differences.append(
            f"every call of the forward changes {names}, and a split batch takes more calls, of fewer samples each"
        )
    if precision in ("bf16", "fp16", "tf32"):
        differences.append(f"{precision} rounds every product, so the order of sums shows")
    if precision == "fp32" and any(name in summary.optimizer for name in ADAPTIVE):
        differences.append(
            f"{summary.optimizer} divides each gradient by its own size, so fp32 rounding of tiny gradients shows "
            "(fp64 tells whether it is more)"
        )
    return tuple(differences)
