"""Checkpoints: names that do not fit, files that several ranks write, copies on the wrong
device."""

from __future__ import annotations

import os
from collections.abc import Iterator

from paralab.doctor.agreement import found, listed, place_of
from paralab.doctor.events import Load, LoadState, Save
from paralab.doctor.finding import Finding
from paralab.doctor.observation import Observation, RankSeen
from paralab.doctor.registry import check

PREFIX = "module."


@check("C01", source="ranks")
def prefixed(seen: Observation) -> Iterator[Finding]:
    """A state with DDP's prefix, saved here and refused there."""
    for rank in seen.ranks:
        refused = next(
            (load for load in rank.of(LoadState) if load.error and _only_prefix(load)), None
        )
        if refused is None:
            continue
        save = next(
            (save for other in [rank, *seen.ranks] for save in other.of(Save) if save.prefixed),
            None,
        )
        where = (
            f"saved here with {save.prefixed} names that begin with 'module.'"
            if save
            else "whose names begin with 'module.'"
        )
        yield found(
            "C01",
            "error",
            f"a state {where} (that of the DDP wrapper, not of the model) is refused by {refused.model_class} at {refused.site}: "
            f"{refused.matched} of {refused.total} names fit",
            "save model.module.state_dict(); for files that exist: {k.removeprefix('module.'): v for k, v in state.items()}",
            place_of(save or refused),
            [
                f"missing: {listed(refused.missing, 3)}",
                f"unexpected: {listed(refused.unexpected, 3)}",
            ],
        )
        return


def _only_prefix(load: LoadState) -> bool:
    """Take the prefix away (or add it), and the names fit."""
    given, wanted = (
        {name.removeprefix(PREFIX) for name in names} for names in (load.unexpected, load.missing)
    )
    return bool(given) and given == wanted


@check("C02", source="ranks")
def nothing_loaded(seen: Observation) -> Iterator[Finding]:
    for rank in seen.ranks:
        for load in rank.of(LoadState):
            if load.strict or load.error or load.matched or not load.total or not load.unexpected:
                continue
            cause = (
                ": the file has DDP's prefix 'module.', the model has not (or the other way round)"
                if _only_prefix(load)
                else ""
            )
            yield found(
                "C02",
                "error",
                f"strict=False accepts a state of which none of the {load.total} names of {load.model_class} is found{cause}: "
                "nothing was "
                "loaded, and the model keeps its random parameters",
                "strip the prefix: {k.removeprefix('module.'): v for k, v in state.items()}, and look at what load_state_dict "
                "returns",
                place_of(load),
                [
                    f"rank {rank.rank}: missing {listed(load.missing, 3)}; unexpected {listed(load.unexpected, 3)}"
                ],
            )
            return


@check("C03", source="ranks")
def written_by_all(seen: Observation) -> Iterator[Finding]:
    """The same file, on the same machine, written by several ranks in the same step."""
    writers: dict[tuple[str, str, int], list[tuple[RankSeen, Save]]] = {}
    for rank in seen.ranks:
        for save in rank.of(Save):
            if save.path and save.path != os.devnull and not save.error:
                writers.setdefault((rank.start.host, save.path, save.step), []).append((rank, save))
    for (_, path, step), saves in writers.items():
        ranks = list(dict.fromkeys(rank.rank for rank, _ in saves))
        if len(ranks) > 1:
            yield found(
                "C03",
                "error",
                f"ranks {listed([str(rank) for rank in ranks])} all write {os.path.basename(path)} after step {step}: each "
                "empties the file "
                "while another one writes, and now and then what is left cannot be read",
                "if dist.get_rank() == 0: torch.save(…), then dist.barrier() before anyone reads it",
                place_of(saves[0][1]),
                [f"rank {rank.rank}: {path}" for rank, _ in saves[:4]],
            )
            return


@check("C04", source="ranks")
def loaded_where_it_was(seen: Observation) -> Iterator[Finding]:
    """On GPUs: a checkpoint goes back to the device it was saved from, which is rank 0's."""
    loads = [
        (rank, load)
        for rank in seen.ranks
        for load in rank.of(Load)
        if load.map_location is None and rank.start.gpus
    ]
    ranks = {rank.rank for rank, _ in loads}
    if len(ranks) > 1:
        load = loads[0][1]
        yield found(
            "C04",
            "warning",
            f"{len(ranks)} ranks load {os.path.basename(load.path or 'a file')} without map_location: its tensors go back to "
            "the device they "
            "were saved from, so every rank keeps a copy on the GPU of one",
            "torch.load(path, map_location='cpu'), or f'cuda:{local_rank}'",
            place_of(load),
            [f"rank {rank.rank}: {load.path}" for rank, load in loads[:4]],
        )
