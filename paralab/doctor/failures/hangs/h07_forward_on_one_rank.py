"""H07: Only rank 0 validates through the DDP wrapper."""

from paralab.doctor.registry import describe

ENTRY = describe(
    __doc__,
    symptom="A hang or crash during validation if the model has buffers (BatchNorm). NCCL shows OpType=BROADCAST.",
    cause="DDP's forward broadcasts the buffers from rank 0, even in eval mode and under no_grad, but only rank 0 calls it.",
    fix="Validate on all ranks, or call `model.module` in rank 0's branch.",
    example="""\
  if dist.get_rank() == 0:
      with torch.no_grad():
-         predicted = model(x)
+         predicted = model.module(x)
""",
    sources="pytorch/pytorch#53979 #137268 LibreYOLO/libreyolo#594 huggingface/accelerate#3861",
)
