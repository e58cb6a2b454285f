"""T03: A DataLoader gets both shuffle and sampler.

Symptom: 'sampler option is mutually exclusive with shuffle'.
Cause: The sampler decides the order, so the DataLoader must not shuffle.
Fix: Let the sampler shuffle. If there may be no sampler: `shuffle=(sampler is None)`.

- sampler = DistributedSampler(data)
- loader = DataLoader(data, batch_size=32, shuffle=True, sampler=sampler)
+ sampler = DistributedSampler(data, shuffle=True)
+ loader = DataLoader(data, batch_size=32, sampler=sampler)
"""

from paralab.doctor.registry import Findings, Message, check, describe
from paralab.doctor.static.names import LOADER
from paralab.doctor.static.report import found, replace
from paralab.doctor.static.script import OBJECT, Script

ENTRY = describe(
    __doc__,
    Message(
        r"sampler option is mutually exclusive with shuffle",
        "The DataLoader{at} got shuffle=True and a sampler. The sampler decides the order.",
    ),
)


@check("T03", source="script")
def shuffle_with_sampler(script: Script) -> Findings:
    """Report a DataLoader that gets both shuffle and sampler."""
    for loader in script.calls_of(LOADER):
        sampler, shuffle = loader.argument(3, "sampler"), loader.argument(2, "shuffle")
        if sampler is None or shuffle is None or not script.truth(shuffle, loader.scope, 0):
            continue
        if script.evaluate(sampler, loader.scope, 0) is not OBJECT:
            continue  # the sampler may be None
        why = "This DataLoader gets a sampler and `shuffle=True`, and raises a ValueError."
        edits = replace(script, loader.module, shuffle, "False")
        yield found(script, "T03", "error", loader, why, edits=edits)
