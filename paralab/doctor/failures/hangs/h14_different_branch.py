"""H14: Only some ranks use a branch of the model.

Symptom: One rank raises 'Expected to have finished reduction in the prior iteration'. The others
lose their connection to it, or hang.
Cause: The data decides which layers run (a batch without images skips the image tower), so ranks reduce different gradients.
Fix: Set `find_unused_parameters=True`, or use every branch in the loss with a weight of 0.
Reported: modelscope/ms-swift#9443 pytorch/pytorch#22049

  hidden = self.text(tokens)
- if images is not None:
-     hidden = hidden + self.vision(images)
+ seen = images if images is not None else torch.zeros(len(tokens), 3, 32, 32)
+ weight = float(images is not None)
+ hidden = hidden + weight * self.vision(seen)
"""

from paralab.doctor.registry import describe

ENTRY = describe(__doc__)
