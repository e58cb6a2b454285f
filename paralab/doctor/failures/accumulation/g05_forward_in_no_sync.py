"""G05: no_sync covers forward but not backward. G04's check reports it.

Symptom: No error. The backward pass does not average gradients, although it runs outside the block.
Cause: DDP decides in forward whether backward synchronizes, and forward ran under `no_sync()`.
Fix: Put both inside the block, or both outside for the last micro-batch before a step.
Reported: NVlabs/stylegan2-ada-pytorch#233

- with model.no_sync():
-     loss = criterion(model(x), y)
+ loss = criterion(model(x), y)
  loss.backward()
  optimizer.step()
"""

from paralab.doctor.registry import describe

ENTRY = describe(__doc__, silent=True)
