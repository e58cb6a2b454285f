"""A05: GradScaler with parameters in fp16."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="A05",
    title="GradScaler with parameters in fp16",
    symptom="'Attempting to unscale FP16 gradients'.",
    cause="The model itself was made fp16 (half(), torch_dtype=float16); the scaler needs gradients in fp32.",
    fix="Keep the parameters in fp32 and let autocast choose.",
    wrong="""\
model = Net().half()
scaler = torch.amp.GradScaler()
""",
    right="""\
model = Net()
scaler = torch.amp.GradScaler()
""",
    sources=("huggingface/transformers#23165", "pytorch/pytorch#74739"),
)
