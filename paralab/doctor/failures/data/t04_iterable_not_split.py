"""T04: an IterableDataset that every rank reads completely. T01's file has the check on ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from paralab.doctor.failures.data.loaders import (
    FRAMEWORKS,
    asks_for_rank,
    knows_rank,
    trained_loaders,
)
from paralab.doctor.finding import Finding, Severity
from paralab.doctor.registry import Entry, Message, check
from paralab.doctor.static.names import DDP
from paralab.doctor.static.report import at, found, line_of
from paralab.doctor.static.script import Script

ENTRY = Entry(
    id="T04",
    title="An IterableDataset that every rank reads completely",
    symptom="No message. Every rank, and every loader worker, yields each sample.",
    cause="No sampler can divide an IterableDataset. Its __iter__ must do that, but this one ignores rank and worker.",
    fix="In __iter__, take every n-th sample, where n = ranks × workers.",
    example="""\
  class Stream(IterableDataset):
      def __iter__(self):
-         yield from read(self.path)
+         worker = get_worker_info()
+         number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
+         first = dist.get_rank() * workers + number
+         yield from islice(read(self.path), first, None, dist.get_world_size() * workers)
""",
    sources=(
        "huggingface/datasets#5360",
        "huggingface/datasets#3423",
        "Lightning-AI/pytorch-lightning#15734",
        "huggingface/transformers#11254",
    ),
    silent=True,
    messages=(
        Message(
            r"DataLoader with IterableDataset: expected unspecified (?P<option>\w+) option",
            "The DataLoader{at} got a {option} for an IterableDataset, which cannot be indexed. The "
            "dataset itself must skip the samples of other ranks.",
        ),
    ),
)


_BY_CHANCE = re.compile(r"rand|shuffle|sample|choice", re.I)


@check("T04", source="script")
def stream_not_divided(script: Script) -> Iterator[Finding]:
    """Report a project's stream that trains a DDP model and never uses the rank."""
    if not script.calls_of(DDP) or script.imports(*FRAMEWORKS):
        return
    for loader in trained_loaders(script):
        data = loader.argument(0, "dataset")
        makers = script.makers(data, loader.scope) if data is not None else []
        for made in makers:
            owner = made.made
            if owner is None or not script.is_a(owner, "IterableDataset"):
                continue
            method = script.method(owner, "__iter__")
            if (
                method is None
                or asks_for_rank(script, owner)
                or knows_rank(script, made.node, made.scope)
            ):
                continue
            source = ast.unparse(owner.node)
            if _BY_CHANCE.search(source):
                continue  # perhaps every rank draws its own samples
            certain = (len(makers) == 1 and not (made.node.args or made.node.keywords)) or all(
                isinstance(one, ast.Constant) for one in made.node.args
            )
            where = at(method.node, method)
            why = (
                f"`{owner.name}.__iter__` does not use the rank, and an IterableDataset has no sampler: every "
                f"rank gets the same samples from the loader ({line_of(loader, where)})."
            )
            if not certain:
                why += " Certain if the dataset's source is not divided either."
            fix = (
                "Yield sample i only if `i % n == r`, with n = ranks × workers and r = rank × workers + worker "
                "(`dist.get_rank()`, `torch.utils.data.get_worker_info()`)."
            )
            severity: Severity = "error" if certain else "suspect"
            yield found(script, "T04", severity, where, why, fix, also=(loader,))
