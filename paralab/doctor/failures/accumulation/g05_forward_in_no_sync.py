"""G05: forward inside no_sync, backward outside. G04's check reports it."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="G05",
    title="Forward inside no_sync, backward outside",
    symptom="No message. This backward does not synchronize, although it runs outside the block.",
    cause="DDP decides in forward, and forward ran under `no_sync()`.",
    fix="Keep both inside or both outside.",
    example="""\
- with model.no_sync():
-     loss = criterion(model(x), y)
+ loss = criterion(model(x), y)
  loss.backward()
  optimizer.step()
""",
    sources=("NVlabs/stylegan2-ada-pytorch#233",),
    silent=True,
)
