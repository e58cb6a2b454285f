"""A torch.distributed backend named `local`, for ranks that share one machine.

Importing this package registers it: `import paralab.collectives`, then
`dist.init_process_group("local")`. This is the only subpackage whose import has a side effect,
because torch expects a backend to register itself on import.
"""

from paralab.collectives.group import register

register()
