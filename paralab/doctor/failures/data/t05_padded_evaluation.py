"""T05: Padded samples are counted in the evaluation."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
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
)
