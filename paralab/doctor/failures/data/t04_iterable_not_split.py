"""T04: An IterableDataset that every rank and worker reads whole."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

ENTRY = Entry(
    id="T04",
    title="An IterableDataset that every rank and worker reads whole",
    symptom="No message. Each sample comes once per rank, and once more per loader worker.",
    cause="A sampler cannot divide an IterableDataset: its __iter__ has to, and this one asks neither for rank nor worker.",
    fix="In __iter__, take every n-th sample, where n = ranks × workers.",
    wrong="""\
class Stream(IterableDataset):
    def __iter__(self):
        yield from read(self.path)
""",
    right="""\
class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        first = dist.get_rank() * workers + number
        yield from islice(read(self.path), first, None, dist.get_world_size() * workers)
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
