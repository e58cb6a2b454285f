"""L07: Ranks build different models.

Symptom: 'DDP expects same model across all ranks', or a parameter whose size 'appears not to match' rank 0's.
Cause: A size in the model depends on the rank itself, on random numbers, or on files that only one rank has.
Fix: Build the model from values that are the same on all ranks: broadcast sizes (vocabulary, classes) from rank 0.

- classes = sorted({label for _, label in files_of(rank)})
- model = DistributedDataParallel(Net(len(classes)))
+ classes = [sorted({label for _, label in all_files()})]
+ dist.broadcast_object_list(classes, src=0)
+ model = DistributedDataParallel(Net(len(classes[0])))
"""

import math

from paralab.doctor.events import Wrap
from paralab.doctor.observation import Observation
from paralab.doctor.rank_checks import listed, make_finding, odd_one_out
from paralab.doctor.registry import Findings, Message, check, describe

ENTRY = describe(
    __doc__,
    Message(
        r"DDP expects same model across all ranks, but Rank (?P<rank>\d+) has (?P<own>\d+) params, while "
        r"rank (?P<other>\d+) has inconsistent 0 params",
        "Rank {rank} compared its {own} parameters with rank {other}, but the other rank's "
        "count never arrived. Rank {other} failed, or did not reach this line. Its own log "
        "would confirm this.",
        fix="Find the first error of the other rank. Then check that all ranks wrap the same model.",
        severity="suspect",
        blames=False,
    ),
    Message(
        r"DDP expects same model across all ranks, but Rank (?P<rank>\d+) has (?P<own>\d+) params, while "
        r"rank (?P<other>\d+) has inconsistent (?P<others>\d+) params",
        "Rank {rank} wraps a model with {own} parameters, but rank {other} wraps one with "
        "{others}{at}. DDP pairs parameters by position.",
        blames=False,
    ),
    Message(
        r"\[(?P<rank>\d+)\]: params\[(?P<index>\d+)\] in this process with sizes \[(?P<shape>[\d, ]*)\] "
        r"appears not to match",
        "Parameter {index} has shape ({shape}) on rank {rank} and a different shape on rank "
        "0{at}: the model depends on the rank.",
    ),
)


Model = tuple[tuple[str, tuple[int, ...], bool], ...]  # name, shape, trainable


@check("L07", source="ranks")
def different_models(seen: Observation) -> Findings:
    wrapped = [
        [one for one in (*rank.events, *rank.doing) if isinstance(one, Wrap) and one.kind == "ddp"]
        for rank in seen.ranks
    ]
    for wraps_ in zip(*wrapped, strict=False) if len(seen.ranks) > 1 else ():
        if wraps_[0].ranks and len(wraps_[0].ranks) < seen.world:
            return
        by_rank = {rank.rank: wrap for rank, wrap in zip(seen.ranks, wraps_, strict=True)}
        models: dict[int, Model] = {
            rank: tuple(zip(wrap.names, map(tuple, wrap.shapes), wrap.trainable, strict=True))
            for rank, wrap in by_rank.items()
        }
        if len(set(models.values())) == 1:
            continue
        odd = odd_one_out(models)
        rank = next(one for one in models if one != odd)
        other = odd if odd is not None else next(r for r in models if models[r] != models[rank])
        difference = _difference(models[rank], models[other], rank, other)
        why = f"Ranks {rank} and {other} give different models to DDP: {difference}."
        values = {r: sum(math.prod(shape) for _, shape, _ in model) for r, model in models.items()}
        evidence = [f"rank {r}: {len(models[r])} parameters, {values[r]:,} values" for r in models]
        yield make_finding("L07", "error", why, by_rank[other], evidence, odd)
        return


def _difference(one: Model, other: Model, rank: int, its: int) -> str:
    for (name, shape, on), (its_name, its_shape, its_on) in zip(one, other, strict=False):
        if (name, shape) != (its_name, its_shape):
            return f"{name} has shape {list(shape)} on rank {rank}, {its_name} has {list(its_shape)} on rank {its}"
        if on != its_on:
            trainable, frozen = (rank, its) if on else (its, rank)
            return f"{name} is trainable on rank {trainable} and frozen on rank {frozen}"
    longer = one if len(one) > len(other) else other
    extra = [name for name, _, _ in longer[min(len(one), len(other)) :]]
    return f"only rank {rank if longer is one else its} has {listed(extra)}"
