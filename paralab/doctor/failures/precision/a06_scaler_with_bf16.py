"""A06: GradScaler with bfloat16."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="A06",
    title="GradScaler with bfloat16",
    symptom="No message on CPU; on CUDA with bf16 gradients 'not implemented for BFloat16'.",
    cause="bf16 has the range of fp32, so nothing needs to be scaled; the scaler only adds work, and skips steps for nothing.",
    fix="Leave the scaler out, or switch it on for fp16 only.",
    wrong="""\
scaler = torch.amp.GradScaler("cuda")
with torch.autocast("cuda", dtype=torch.bfloat16):
    loss = criterion(model(x), y)
scaler.scale(loss).backward()
""",
    right="""\
with torch.autocast("cuda", dtype=torch.bfloat16):
    loss = criterion(model(x), y)
loss.backward()
""",
    sources=("pytorch/pytorch#127176", "huggingface/trl#4901", "huggingface/accelerate#1036"),
    silent=True,
)
