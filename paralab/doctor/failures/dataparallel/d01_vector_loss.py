"""D01: The loss is computed inside, and comes back as a vector."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

ENTRY = Entry(
    id="D01",
    title="The loss is computed inside, and comes back as a vector",
    symptom=(
        "'Was asked to gather along dimension 0, but all input tensors were scalars', then 'grad can be "
        "implicitly created only …'."
    ),
    cause="Every GPU returns a loss of its own; DataParallel puts them into a vector, and backward wants one number.",
    fix="`loss.mean().backward()`.",
    wrong="""\
model = nn.DataParallel(net_that_returns_its_loss)
loss = model(x, y)
loss.backward()
""",
    right="""\
model = nn.DataParallel(net_that_returns_its_loss)
loss = model(x, y).mean()
loss.backward()
""",
    sources=(
        "Lightning-AI/pytorch-lightning#249",
        "pytorch/pytorch#9811",
        "pytorch/pytorch#7956",
        "airsplay/lxmert#17",
    ),
    messages=(
        Message(
            r"grad can be implicitly created only for scalar outputs",
            "The loss is computed inside the DataParallel model. Every GPU returns one number, and "
            "backward(){at} gets a vector of them.",
            beside=r"Was asked to gather along dimension 0, but all input tensors were scalars",
        ),
        Message(
            r"Was asked to gather along dimension 0, but all input tensors were scalars",
            "The loss is computed inside the DataParallel model. Every GPU returns one number, and "
            "the script gets a vector of them.",
            severity="warning",
            kind="note",
        ),
    ),
)
