"""G08: Sequences of different length: a mean of means over tokens."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
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
)
