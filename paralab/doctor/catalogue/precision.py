"""Mixed precision: autocast and GradScaler."""

from __future__ import annotations

from paralab.doctor.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        id="A01",
        title="Clipping gradients that are still scaled",
        symptom="No message. Every gradient is clipped (its norm is thousands of times too large), and nearly nothing is learnt.",
        cause="clip_grad_norm_ runs between scale(loss).backward() and step() without unscale_.",
        fix="`scaler.unscale_(optimizer)` before clipping.",
        wrong="""\
scaler.scale(loss).backward()
clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
""",
        right="""\
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
""",
        sources=("milesial/Pytorch-UNet#470",),
        silent=True,
    ),
    Entry(
        id="A02",
        title="unscale_ twice in one step",
        symptom="'unscale_() has already been called on this optimizer since the last update()'.",
        cause="It stands in every micro-batch, or update() was skipped together with the step.",
        fix="Unscale once, just before the step, and update after each.",
        wrong="""\
for x, y in micro_batches:
    scaler.scale(criterion(model(x), y) / N).backward()
    scaler.unscale_(optimizer)
scaler.step(optimizer)
scaler.update()
""",
        right="""\
for x, y in micro_batches:
    scaler.scale(criterion(model(x), y) / N).backward()
scaler.unscale_(optimizer)
scaler.step(optimizer)
scaler.update()
""",
        sources=(
            "huggingface/accelerate#641",
            "microsoft/Swin-Transformer#311",
            "Haian-Jin/LVSM#19",
            "huggingface/transformers#24840",
        ),
    ),
    Entry(
        id="A03",
        title="scaler.update() is missing",
        symptom="'step() has already been called since the last update()'.",
        cause="The scaler is stepped twice without the update in which it adapts its scale.",
        fix="`scaler.update()` after every `scaler.step()`.",
        wrong="""\
scaler.scale(loss).backward()
scaler.step(optimizer)
""",
        right="""\
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
""",
    ),
    Entry(
        id="A04",
        title="optimizer.step() although the loss was scaled",
        symptom=(
            "With update(): 'No inf checks were recorded prior to update'. Without: no message, and steps that are "
            "65536 times too large. After unscale_: no message, and weights that are NaN after the first overflow."
        ),
        cause=(
            "The optimizer takes the gradients as they are. Only scaler.step() unscales them, if unscale_() has not, and leaves "
            "out a step whose gradients have overflowed."
        ),
        fix="`scaler.step(optimizer)`.",
        wrong="""\
scaler.scale(loss).backward()
optimizer.step()
scaler.update()
""",
        right="""\
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
""",
        silent=True,
    ),
    Entry(
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
    ),
    Entry(
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
    ),
    Entry(
        id="A07",
        title="The scheduler steps although the scaler skipped the step",
        symptom="'Detected call of lr_scheduler.step() before optimizer.step()', although the order in the code is right.",
        cause="The first steps of fp16 often overflow; the scaler skips the optimizer, and the schedule goes on without it.",
        fix="Step the scheduler only if the scale did not fall.",
        wrong="""\
scaler.step(optimizer)
scaler.update()
scheduler.step()
""",
        right="""\
before = scaler.get_scale()
scaler.step(optimizer)
scaler.update()
if scaler.get_scale() >= before:
    scheduler.step()
""",
        sources=(
            "Lightning-AI/pytorch-lightning#5558",
            "Lightning-AI/pytorch-lightning#18828",
            "pytorch/pytorch#44511",
            "princeton-vl/RAFT#104",
        ),
    ),
    Entry(
        id="A08",
        title="Every step is skipped: the loss is NaN under the scaler",
        symptom="Training seems to run, but nothing is learnt; the scale halves in every step.",
        cause="NaN comes out of the model itself. The scaler takes it for an overflow, skips the step and scales less, for ever.",
        fix="Find the first layer that gives NaN (anomaly detection, hooks); stop when the scale falls below 1.",
        wrong="""\
scaler.step(optimizer)
scaler.update()
""",
        right="""\
scaler.step(optimizer)
scaler.update()
if scaler.get_scale() < 1:
    raise RuntimeError("gradients are not finite, however small the scale: look for NaN in forward")
""",
    ),
    Entry(
        id="A09",
        title="Backward inside autocast",
        symptom="Usually none; under torch.compile the gradients may be wrong without a message.",
        cause="Backward already runs in the types that forward chose; a second choice is not wanted.",
        fix="End the autocast block after the loss.",
        wrong="""\
with torch.autocast("cuda"):
    loss = criterion(model(x), y)
    loss.backward()
""",
        right="""\
with torch.autocast("cuda"):
    loss = criterion(model(x), y)
loss.backward()
""",
        silent=True,
    ),
    Entry(
        id="A10",
        title="The GradScaler has switched itself off",
        symptom="'GradScaler is enabled, but CUDA is not available. Disabling.'",
        cause="GradScaler is for CUDA unless another device is named, and there is none here.",
        fix="Name the device that is trained on: `torch.amp.GradScaler('cpu')`.",
        wrong="""\
scaler = torch.amp.GradScaler()
""",
        right="""\
scaler = torch.amp.GradScaler("cuda" if torch.cuda.is_available() else "cpu")
""",
    ),
    Entry(
        id="A11",
        title="The scaler steps, but the loss was never scaled",
        symptom="'Attempted step but _scale is None'.",
        cause="loss.backward() was called without scaler.scale(…).",
        fix="`scaler.scale(loss).backward()`.",
        wrong="""\
loss.backward()
scaler.step(optimizer)
scaler.update()
""",
        right="""\
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
""",
    ),
)
