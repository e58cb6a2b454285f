"""S11: Manual gradient averaging that starts from different weights.

Symptom: No error. The ranks start with different weights and never become equal, although every gradient is synchronized.
Cause: DDP copies rank 0's weights when it wraps a model. Code that reduces gradients itself must also copy rank 0's weights.
Fix: Broadcast every parameter and buffer from rank 0 before the first step.

  model = Net()
+ for tensor in model.state_dict().values():
+     dist.broadcast(tensor, src=0)
  for parameter in model.parameters():
      parameter.register_post_accumulate_grad_hook(average_over_ranks)
"""

from paralab.doctor.registry import describe

ENTRY = describe(__doc__, silent=True)
