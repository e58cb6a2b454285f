"""T04: Every rank reads a whole IterableDataset. T01's file checks watched ranks.

Symptom: No error. Every rank and every loader worker yields all samples.
Cause: No sampler can divide an IterableDataset; its __iter__ must do it. This one ignores the rank and the worker.
Fix: In __iter__, yield sample i only if `i % n == r`, with n = ranks × workers and r = rank × workers + worker.
Reported: huggingface/datasets#5360 #3423 Lightning-AI/pytorch-lightning#15734 huggingface/transformers#11254

  class Stream(IterableDataset):
      def __iter__(self):
-         yield from read(self.path)
+         worker = get_worker_info()
+         number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
+         first = dist.get_rank() * workers + number
+         yield from islice(read(self.path), first, None, dist.get_world_size() * workers)
"""

import ast
import re

from paralab.doctor.failures.data.loaders import (
    FRAMEWORKS,
    asks_for_rank,
    knows_rank,
    trained_loaders,
)
from paralab.doctor.registry import Findings, Message, check, describe
from paralab.doctor.static.names import DDP
from paralab.doctor.static.report import at, found, line_of
from paralab.doctor.static.script import Script

ENTRY = describe(
    __doc__,
    Message(
        r"DataLoader with IterableDataset: expected unspecified (?P<option>\w+) option",
        "The DataLoader{at} got a {option} for an IterableDataset, which cannot be indexed. The "
        "dataset itself must skip the samples of other ranks.",
    ),
    silent=True,
)


_BY_CHANCE = re.compile(r"rand|shuffle|sample|choice", re.I)


@check("T04", source="script")
def stream_not_divided(script: Script) -> Findings:
    """Report a stream in the project that feeds a DDP model and never uses the rank."""
    if not script.calls_of(DDP) or script.imports(*FRAMEWORKS):
        return
    for loader in trained_loaders(script):
        makers = script.makers(loader.argument(0, "dataset"), loader.scope)
        for made in makers:
            owner = made.made
            method = script.method(owner, "__iter__") if owner else None
            if owner is None or method is None or not script.is_a(owner, "IterableDataset"):
                continue
            if asks_for_rank(script, owner) or knows_rank(script, made.node, made.scope):
                continue
            if _BY_CHANCE.search(ast.unparse(owner.node)):
                continue  # every rank may draw its own samples
            certain = all(isinstance(one, ast.Constant) for one in made.arguments)
            where = at(method.node, method)
            why = (
                f"`{owner.name}.__iter__` ignores the rank, so every rank gets the same samples from the "
                f"loader ({line_of(loader, where)})."
            )
            doubt = "" if certain else "if nothing divides the dataset's source either"
            yield found(script, "T04", "error", where, why, doubt=doubt, also=(loader,))
