"""Data: which rank sees which samples, in which order, and how long it waits for them."""

from __future__ import annotations

from paralab.doctor.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        id="T01",
        title="Every rank sees all the data",
        symptom="No message. An epoch takes as long as on one device, and every sample is used once per rank.",
        cause="The DataLoader has no DistributedSampler, so each rank goes through the whole data set.",
        fix="Pass `sampler=DistributedSampler(data)`.",
        wrong="""\
loader = DataLoader(data, batch_size=32, shuffle=True)
""",
        right="""\
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=32, sampler=sampler)
""",
        sources=(
            "Lightning-AI/pytorch-lightning#91",
            "Lightning-AI/pytorch-lightning#81",
            "huggingface/datasets#5360",
        ),
    ),
    Entry(
        id="T02",
        title="The same order in every epoch",
        symptom="No message. The samples come in the same order, in the same batches, epoch after epoch.",
        cause="DistributedSampler shuffles by its seed and the epoch, and nobody told it the epoch.",
        fix="`sampler.set_epoch(epoch)` at the start of every epoch.",
        wrong="""\
sampler = DistributedSampler(data)
for epoch in range(10):
    train(loader)
""",
        right="""\
sampler = DistributedSampler(data)
for epoch in range(10):
    sampler.set_epoch(epoch)
    train(loader)
""",
        sources=(
            "pytorch/pytorch#31771",
            "kan-bayashi/ParallelWaveGAN#177",
            "cszn/KAIR#106",
            "Spijkervet/SimCLR#26",
            "facebookresearch/ClassyVision#118",
        ),
        silent=True,
    ),
    Entry(
        id="T03",
        title="shuffle and sampler together",
        symptom="'sampler option is mutually exclusive with shuffle'.",
        cause="The sampler decides the order, so the loader must not.",
        fix="Shuffle in the sampler.",
        wrong="""\
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=32, shuffle=True, sampler=sampler)
""",
        right="""\
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=32, sampler=sampler)
""",
    ),
    Entry(
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
    ),
    Entry(
        id="T05",
        title="Padded samples are counted in the evaluation",
        symptom="The accuracy depends on the number of ranks.",
        cause="DistributedSampler repeats samples until all ranks have equally many; they are evaluated twice.",
        fix="Divide the evaluation without padding, and reduce sums and counts.",
        wrong="""\
test_sampler = DistributedSampler(test_data, shuffle=False)
test_loader = DataLoader(test_data, sampler=test_sampler)
""",
        right="""\
test_sampler = range(dist.get_rank(), len(test_data), dist.get_world_size())
test_loader = DataLoader(test_data, sampler=test_sampler)
""",
        sources=(
            "pytorch/pytorch#25162",
            "pytorch/pytorch#22584",
            "pytorch/examples#1063",
            "roboflow/rf-detr#1507",
            "areal-project/AReaL#1100",
        ),
        silent=True,
    ),
    Entry(
        id="T06",
        title="Loader workers: too few, or more than cores",
        symptom="Steps wait for data, or all cores are busy and everything is slow.",
        cause="num_workers counts per rank; ranks × workers compete for the same cores.",
        fix="About (cores ÷ ranks) − 1 workers per rank, then measure.",
        wrong="""\
loader = DataLoader(data, batch_size=32, num_workers=16, sampler=sampler)
""",
        right="""\
cores = len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])
loader = DataLoader(data, batch_size=32, num_workers=max(1, cores - 1), sampler=sampler)
""",
        sources=("Lightning-AI/pytorch-lightning#18149", "pytorch/pytorch#105841"),
    ),
)
