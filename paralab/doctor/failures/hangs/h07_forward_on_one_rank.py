"""H07: Only rank 0 validates through the DDP wrapper.

Symptom: A hang or crash during validation if the model has buffers (BatchNorm). NCCL shows OpType=BROADCAST.
Cause: DDP's forward broadcasts the buffers from rank 0, even in eval mode and under no_grad, but only rank 0 calls it.
Fix: Validate on all ranks, or call `model.module` in rank 0's branch.
Reported: pytorch/pytorch#53979 #137268 LibreYOLO/libreyolo#594 huggingface/accelerate#3861

  if dist.get_rank() == 0:
      with torch.no_grad():
-         predicted = model(x)
+         predicted = model.module(x)
"""

from paralab.doctor.registry import describe

ENTRY = describe(__doc__)
