"""Gradient accumulation: several backward passes per optimizer step."""

from __future__ import annotations

from paralab.doctor.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        id="G01",
        title="The loss is not divided by the accumulation steps",
        symptom="No message. The gradient is as many times too large as passes are accumulated.",
        cause="backward adds up; the sum of N means is N times the mean of the large batch.",
        fix="Divide the loss by N before backward.",
        wrong="""\
loss = criterion(model(x), y)
loss.backward()
if (i + 1) % N == 0:
    optimizer.step()
    optimizer.zero_grad()
""",
        right="""\
loss = criterion(model(x), y) / N
loss.backward()
if (i + 1) % N == 0:
    optimizer.step()
    optimizer.zero_grad()
""",
        sources=("verl-project/verl#3332",),
        silent=True,
    ),
    Entry(
        id="G02",
        title="Every accumulated pass synchronizes",
        symptom="Right results, slow steps: N all-reduces of all gradients where one would do.",
        cause="DDP synchronizes in every backward unless it runs under no_sync().",
        fix="Run all passes but the last of a step under `model.no_sync()`.",
        wrong="""\
for i, (x, y) in enumerate(loader):
    (criterion(model(x), y) / N).backward()
    if (i + 1) % N == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        right="""\
for i, (x, y) in enumerate(loader):
    with nullcontext() if (i + 1) % N == 0 else model.no_sync():
        (criterion(model(x), y) / N).backward()
    if (i + 1) % N == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        sources=(
            "speechbrain/speechbrain#1802",
            "goodfire-ai/spd#215",
            "Lightning-AI/pytorch-lightning#2595",
        ),
        silent=True,
    ),
    Entry(
        id="G03",
        title="no_sync around backward only",
        symptom="Right results, but no time is saved: it still synchronizes.",
        cause="DDP decides in forward whether the next backward synchronizes, and forward ran outside of no_sync().",
        fix="Put forward into the block too.",
        wrong="""\
loss = criterion(model(x), y) / N
with model.no_sync():
    loss.backward()
""",
        right="""\
with model.no_sync():
    loss = criterion(model(x), y) / N
    loss.backward()
""",
        sources=(
            "facebookresearch/ClassyVision#706",
            "KellerJordan/modded-nanogpt#31",
            "pytorch/PiPPy#1133",
        ),
        silent=True,
    ),
    Entry(
        id="G04",
        title="An optimizer step on gradients that were not synchronized",
        symptom="No message. The ranks' parameters differ, and later steps do not bring them together again.",
        cause="The last pass before the step also ran under no_sync(), or the data ended inside a no_sync() window.",
        fix="Synchronize in the last pass before every step, and in the last batch of the epoch.",
        wrong="""\
with model.no_sync():
    loss = criterion(model(x), y)
    loss.backward()
optimizer.step()
""",
        right="""\
loss = criterion(model(x), y)
loss.backward()
optimizer.step()
""",
        silent=True,
    ),
    Entry(
        id="G05",
        title="Forward inside no_sync, backward outside",
        symptom="No message. This backward does not synchronize, although it stands outside of the block.",
        cause="DDP decides in forward, and forward ran under no_sync().",
        fix="Both inside or both outside.",
        wrong="""\
with model.no_sync():
    loss = criterion(model(x), y)
loss.backward()
optimizer.step()
""",
        right="""\
loss = criterion(model(x), y)
loss.backward()
optimizer.step()
""",
        sources=("NVlabs/stylegan2-ada-pytorch#233",),
        silent=True,
    ),
    Entry(
        id="G06",
        title="The rest of the epoch is dropped, or leaks into the next",
        symptom=(
            "No message. With 10 batches and N = 4, two batches per epoch make no step; their gradients are added to "
            "the next epoch."
        ),
        cause="The step is taken at multiples of N only, and the number of batches is none.",
        fix="Step also after the last batch, and divide by the passes that were really accumulated.",
        wrong="""\
if (i + 1) % N == 0:
    optimizer.step()
    optimizer.zero_grad()
""",
        right="""\
if (i + 1) % N == 0 or i + 1 == len(loader):
    optimizer.step()
    optimizer.zero_grad()
""",
        sources=(
            "timoschick/pet#36",
            "meta-pytorch/torchtune#2745",
            "Lightning-AI/pytorch-lightning#19987",
            "tomhosking/torchseq#8",
            "huggingface/transformers#2533",
        ),
        silent=True,
    ),
    Entry(
        id="G07",
        title="Micro-batches of different size count the same",
        symptom="No message. The gradient is not the one of the large batch (19 % off for micro-batches of 3, 3 and 2 samples).",
        cause="A mean of means weighs a sample in a small micro-batch more.",
        fix="Weigh every micro-batch by its number of samples, or drop the smaller one.",
        wrong="""\
for x, y in micro_batches:
    loss = criterion(model(x), y) / len(micro_batches)
    loss.backward()
""",
        right="""\
samples = sum(len(x) for x, _ in micro_batches)
for x, y in micro_batches:
    loss = criterion(model(x), y) * len(x) / samples
    loss.backward()
""",
        sources=("Lightning-AI/pytorch-lightning#19987",),
        silent=True,
    ),
    Entry(
        id="G08",
        title="Sequences of different length: a mean of means over tokens",
        symptom="No message. Tokens of short sequences weigh more; the direction of the gradient can be quite another.",
        cause="Cross-entropy takes the mean over the tokens of one micro-batch, DDP the mean over ranks; neither knows the counts.",
        fix="Sum the loss, divide by the number of tokens of the whole step over all ranks, times the world size.",
        wrong="""\
for tokens, targets in micro_batches:
    loss = F.cross_entropy(model(tokens).transpose(1, 2), targets, ignore_index=PAD)
    (loss / len(micro_batches)).backward()
""",
        right="""\
count = torch.tensor(sum(int((targets != PAD).sum()) for _, targets in micro_batches))
dist.all_reduce(count)
for tokens, targets in micro_batches:
    loss = F.cross_entropy(model(tokens).transpose(1, 2), targets, ignore_index=PAD, reduction="sum")
    (loss * dist.get_world_size() / count).backward()
""",
        sources=(
            "huggingface/transformers#34191",
            "huggingface/transformers#34242",
            "huggingface/transformers#34373",
            "meta-pytorch/torchtune#1917",
            "allenai/open-instruct#1736",
            "modelscope/ms-swift#10165",
        ),
        silent=True,
    ),
    Entry(
        id="G09",
        title="The scheduler steps in every micro-batch",
        symptom="No message. The learning rate falls N times too fast.",
        cause="scheduler.step() stands outside of the branch in which the optimizer steps.",
        fix="Step the scheduler where the optimizer steps.",
        wrong="""\
if (i + 1) % N == 0:
    optimizer.step()
    optimizer.zero_grad()
scheduler.step()
""",
        right="""\
if (i + 1) % N == 0:
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
""",
        sources=("tracel-ai/burn#5695",),
        silent=True,
    ),
)
