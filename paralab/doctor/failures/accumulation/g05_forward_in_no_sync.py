"""G05: no_sync covers forward but not backward. G04's check reports it."""

from paralab.doctor.registry import describe

ENTRY = describe(
    __doc__,
    symptom="No error. The backward pass does not average gradients, although it runs outside the block.",
    cause="DDP decides in forward whether backward synchronizes, and forward ran under `no_sync()`.",
    fix="Put both inside the block, or both outside for the last micro-batch before a step.",
    example="""\
- with model.no_sync():
-     loss = criterion(model(x), y)
+ loss = criterion(model(x), y)
  loss.backward()
  optimizer.step()
""",
    sources="NVlabs/stylegan2-ada-pytorch#233",
    silent=True,
)
