"""H07: Validation on rank 0 through the DDP wrapper."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="H07",
    title="Validation on rank 0 through the DDP wrapper",
    symptom=(
        "Hang or crash at validation when the model has buffers (BatchNorm); NCCL shows OpType=BROADCAST. Without "
        "buffers it works."
    ),
    cause="DDP's forward broadcasts the buffers from rank 0, even in eval mode and under no_grad, and only rank 0 calls it.",
    fix="Validate on all ranks, or call `model.module` in the branch of rank 0.",
    example="""\
  if dist.get_rank() == 0:
      with torch.no_grad():
-         predicted = model(x)
+         predicted = model.module(x)
""",
    sources=(
        "pytorch/pytorch#53979",
        "pytorch/pytorch#137268",
        "LibreYOLO/libreyolo#594",
        "huggingface/accelerate#3861",
    ),
)
