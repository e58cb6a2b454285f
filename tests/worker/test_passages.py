"""Stages inside one process: nothing of a step outlives it."""

import gc
import json

import pytest
import torch

from paralab.plan.plan import Plan
from paralab.record.writer import EventWriter
from paralab.worker.loop import train
from paralab.worker.setup import Extras
from paralab.worker.strategies.pipeline_threads import Passage
from paralab.workload.load import load_workload
from tests.conftest import run_paralab


@pytest.mark.processes
def test_no_passage_outlives_its_step(tmp_path):
    """The graph refers to the passage and the passage to its loss: a cycle that the garbage
    collector cannot see through."""
    options = ["--workload", "mlp:tiny", "--micro-batches", "2", "--steps", "4", "--json"]
    plan = Plan.from_json(json.loads(run_paralab("plan", "pipeline", *options, cwd=tmp_path).out))
    threads = torch.get_num_threads()
    writer = EventWriter(tmp_path / "rank0.jsonl")
    train(load_workload("mlp:tiny"), plan, 0, writer, 0.0, Extras())
    writer.close()
    torch.set_num_threads(threads)
    gc.collect()
    assert not [
        thing for thing in gc.get_objects() if type(thing) is Passage and hasattr(thing, "micro")
    ]
