"""Ranks that wait in vain: loops of different lengths, timeouts, a group that is not closed."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.registry import check
from paralab.doctor.script.agreement import is_alone, is_collective, is_ddp_backward, synchronizes
from paralab.doctor.script.naming import LOADER
from paralab.doctor.script.pointing import called, file_of, found, line_of, place, short, test_of
from paralab.doctor.script.questions import (
    comes_from,
    depends_on_rank,
    iterated,
    number,
    origins,
    rank_branch,
    roles,
    under,
    who_takes,
)
from paralab.doctor.script.reading import Script
from paralab.doctor.script.remembering import remembered
from paralab.doctor.script.settings import INIT, SET_DEVICE, backends
from paralab.doctor.script.values import (
    Call,
    Computed,
    Entered,
    Happening,
    Loop,
    Made,
    Object,
    Value,
    options,
)
from paralab.doctor.script_rules.partings import goers

_MAKE_TENSORS = ("randn", "rand", "zeros", "ones", "empty", "arange")

# --- H01: every n-th item
# --------------------------------------------------------------------------------------------------------


@check("H01", source="script")
def shards_of_different_length(script: Script) -> Iterator[Finding]:
    for loop, backward in training_loops(script):
        if under(backward, "join") or _agrees_on_length(script):
            continue
        for loader in iterated(loop):
            if "loader" not in roles(loader) or comes_from(loader, "sampler"):
                continue
            for node in _every_nth(script, loader):
                file = file_of(script, node)
                if file is None:
                    continue
                at = Happening(backward.number, node, file, ())
                why = (
                    f"`{short(node)}` gives rank r every n-th item from r on: if the items cannot be divided by the number of "
                    f"ranks, the first ranks have one more, call `backward` ({place(backward, at)}) once more and wait there "
                    "for the others. Certain if the number of items is not a multiple of the number of ranks times the batch "
                    "size."
                )
                fix = (
                    "Give all ranks the same number: cut the rest off (`n // world * world`), use DistributedSampler, or "
                    "train in `with model.join():`."
                )
                yield found(script, "H01", "suspect", at, why, fix, also=(backward,))


def training_loops(script: Script) -> Iterator[tuple[Loop, Call]]:
    seen = set()
    for call in script.calls:
        if is_ddp_backward(call):
            for loop in call.inside(Loop):
                if id(loop.node) not in seen:
                    seen.add(id(loop.node))
                    yield loop, call


@remembered
def _agrees_on_length(script: Script) -> bool:
    """`all_reduce` of `len(loader)`, in any form."""
    for call in script.calls:
        if is_collective(call):
            for argument in call.args:
                if any(
                    isinstance(o, Made)
                    and o.call.target == "builtins.len"
                    and comes_from(o, "loader")
                    for o in origins(argument)
                ):
                    return True
    return False


def _every_nth(script: Script, loader: Value) -> Iterator[ast.AST]:
    """The places where the loader's data is cut into every n-th item."""
    data = [
        value
        for call in _loaders(loader)
        for value in [call.argument(0, "dataset")]
        if value is not None
    ]
    held = [
        store.value
        for store in script.stores
        if any(option in data for option in options(store.base))
    ]
    seen = set()
    for value in (*data, *held):
        for origin in origins(value):
            node = _strided(origin)
            if node is not None and id(node) not in seen:
                seen.add(id(node))
                yield node
    for dataset in data:
        yield from (node for node in _strided_iteration(script, dataset) if id(node) not in seen)


def _loaders(loader: Value) -> list[Call]:
    return [
        option.call
        for option in options(loader)
        if isinstance(option, Made) and option.call.target == LOADER
    ]


def _strided(value: Value) -> ast.AST | None:
    if isinstance(value, Computed) and value.op == "Index" and len(value.parents) == 2:
        base, key = value.parents
        node = getattr(key, "node", None)
        if (
            isinstance(node, ast.Slice)
            and node.lower
            and node.step
            and not node.upper
            and _is_stride(key.parents[0], key.parents[-1])
        ):
            return value.node if not _is_trimmed(base) else None
    if (
        isinstance(value, Made)
        and value.call.target == "builtins.range"
        and len(value.call.args) == 3
    ):
        first, last, step = value.call.args
        if (
            _is_stride(first, step)
            and isinstance(last, Made)
            and last.call.target == "builtins.len"
            and not _is_trimmed(last)
        ):
            return value.call.node
    return None


def _is_stride(first: Value, step: Value) -> bool:
    return depends_on_rank(first) and comes_from(step, "world")


def _is_trimmed(value: Value) -> bool:
    if any((rows := _rows(origin)) is not None and rows % 8 == 0 for origin in origins(value)):
        return True  # equal shares on any usual number of ranks
    return any(
        isinstance(o, Computed) and o.op in ("Mod", "FloorDiv") and comes_from(o, "world")
        for o in origins(value)
    )


def _rows(value: Value) -> float | None:
    """How many samples a TensorDataset has, where its first tensor is made with numbers."""
    tensor = (
        value.call.args[0]
        if isinstance(value, Made) and value.call.method == "TensorDataset" and value.call.args
        else None
    )
    made = (
        isinstance(tensor, Made)
        and tensor.call.target.startswith("torch.")
        and tensor.call.method in _MAKE_TENSORS
    )
    return (
        number(tensor.call.args[0])
        if isinstance(tensor, Made) and made and tensor.call.args
        else None
    )


def _strided_iteration(script: Script, dataset: Value) -> Iterator[ast.AST]:
    """`if number % world == rank: yield item` in the dataset's own `__iter__`."""
    if not isinstance(dataset, Object) or "iterable dataset" not in roles(dataset):
        return
    for call in script.calls_of("itertools.islice"):
        own = any(
            isinstance(context, Entered) and context.function.owner is dataset
            for context in call.context
        )
        if own and len(call.args) == 4 and _is_stride(call.args[1], call.args[3]):
            yield call.node


# --- H09, H13, H17: barriers, timeouts, the end
# -----------------------------------------------------------------------------------


_CHOOSE_DEVICE = (SET_DEVICE, "torch.set_default_device")


def _is_elsewhere(call: Call) -> bool:
    """`toolbox.get_device(…)`: a function that we cannot read, which may choose the device."""
    known = call.target.startswith(("torch.", "builtins.", "?")) or call.into is not None
    return "device" in call.method.lower() and not known


@check("H09", source="script")
def barrier_without_device(script: Script) -> Iterator[Finding]:
    starts = list(script.calls_of(INIT))
    if "nccl" not in backends(script) or any(
        "device_id" in call.keywords or "**" in call.keywords for call in starts
    ):
        return
    barriers = [
        call
        for call in script.calls_of("torch.distributed.barrier")
        if "device_ids" not in call.keywords
    ]
    chosen = [
        call.number for call in script.calls if call.target in _CHOOSE_DEVICE or _is_elsewhere(call)
    ]
    first = next(
        (call for call in barriers if not any(number < call.number for number in chosen)), None
    )
    if (
        first and not is_alone(first) and not is_alone(starts[0])
    ):  # else nobody knows what comes before
        why = (
            f"The backend is nccl and no device was chosen before `{called(first)}()`: neither torch.cuda.set_device nor "
            f"device_id in init_process_group ({place(starts[0], first)}). NCCL guesses the device from the rank and can hang "
            "if the guess is wrong."
        )
        fix = (
            "torch.cuda.set_device(local_rank) before init_process_group, or init_process_group(…, "
            "device_id=torch.device('cuda', local_rank))."
        )
        yield found(script, "H09", "warning", first, why, fix, also=(starts[0],))


_LONG = (
    "tokenize",
    "preprocess",
    "prepare_data",
    "build_index",
    "build_cache",
    "build_vocab",
    "snapshot_download",
    "load_dataset",
)


@check("H13", source="script")
def waiting_for_preprocessing(script: Script) -> Iterator[Finding]:
    starts = list(script.calls_of(INIT))
    if not starts or any("timeout" in call.keywords or "**" in call.keywords for call in starts):
        return
    for barrier in script.calls_of("torch.distributed.barrier"):
        if rank_branch(barrier) is not None or "timeout" in barrier.keywords:
            continue
        before = [
            call for call in script.calls if call.number < barrier.number and _takes_long(call)
        ]
        long = next(
            (
                call
                for call in reversed(before)
                if (b := rank_branch(call)) and who_takes(b) == "rank 0 only"
            ),
            None,
        )
        between = [
            c
            for c in script.calls
            if long and long.number < c.number < barrier.number and synchronizes(c)
        ]
        if long is None or between or rank_branch(long) is None:
            continue
        minutes = 10 if "nccl" in backends(script) else 30
        why = (
            f"The other ranks wait here while rank 0 is in `{called(long)}` ({place(long, barrier)}). init_process_group "
            f"({place(starts[0], barrier)}) has no timeout=, so the waiting ends with an error after {minutes} minutes. "
            "Certain if that takes longer on the real data."
        )
        fix = "Prepare the data before the job, or give init_process_group(timeout=timedelta(hours=…))."
        yield found(script, "H13", "suspect", barrier, why, fix, also=(long,))
        return


def _takes_long(call: Call) -> bool:
    if call.method == "map" and call.receiver is not None:
        made = (origin.call.target for origin in origins(call.receiver) if isinstance(origin, Made))
        return any(target.startswith("datasets.") for target in made)
    return call.method.startswith(_LONG)


def _is_named(script: Script, name: str) -> bool:
    return any(
        getattr(node, "attr", getattr(node, "id", None)) == name for node in script.all_nodes
    )


@check("H17", source="script")
def group_is_not_closed(script: Script) -> Iterator[Finding]:
    starts = [call for call in script.calls_of(INIT) if not is_alone(call)]
    if not starts:
        return
    ends = list(script.calls_of("torch.distributed.destroy_process_group"))
    if not ends and not _is_named(
        script, "destroy_process_group"
    ):  # atexit.register(dist.destroy_process_group) closes it too
        why = (
            f"`{called(starts[0])}` opens a process group and nothing in the script closes it: torch warns at the end, and "
            "NCCL may hang there."
        )
        fix = "Call torch.distributed.destroy_process_group() on all ranks at the end, in a `finally`."
        yield found(script, "H17", "warning", starts[0], why, fix)
    if not ends:
        return
    gone = {branch.node for _, branch, _ in goers(script)}
    branches = [(end, rank_branch(end)) for end in ends]
    if all(branch is not None and branch.node not in gone for _, branch in branches):
        end, branch = branches[0]
        assert branch
        if {who_takes(b) for _, b in branches if b} >= {"rank 0 only", "all ranks but 0"}:
            return
        why = (
            f"`{line_of(script, end)}` is called by {who_takes(branch)} (`{test_of(branch)}`): the others leave the group "
            "open, and NCCL may hang at exit."
        )
        yield found(
            script,
            "H17",
            "warning",
            end,
            why,
            "Call destroy_process_group() on all ranks, outside the branch.",
        )
