"""After a step, stages in one process keep none of its tensors alive."""

import gc

import torch

from paralab.record.status_board import StatusBoard
from paralab.record.writer import EventWriter
from paralab.worker.loop import Extras, train
from paralab.worker.strategies.pipeline_threads import Passage
from paralab.workload.load import load_workload
from tests.worker.one_rank import plan_workload


def test_no_passage_outlives_its_step(tmp_path):
    """The graph refers to the passage, and the passage to its loss. The garbage collector cannot
    see this cycle."""
    plan = plan_workload("mlp:tiny", "pipeline", micro_batches=2, steps=4)
    threads = torch.get_num_threads()
    writer = EventWriter(tmp_path / "rank0.jsonl")
    board = StatusBoard.create(tmp_path / "board", 1)
    train(load_workload("mlp:tiny"), plan, 0, writer, 0.0, Extras(), board)
    writer.close()
    torch.set_num_threads(threads)
    gc.collect()
    passages = [each for each in gc.get_objects() if type(each) is Passage]
    assert not [passage for passage in passages if hasattr(passage, "micro")]
