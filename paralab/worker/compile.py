"""`--compile`: compile the forward and backward passes of each repeated block with torch.compile.

Blocks of one class share their compiled code, so a model with many layers compiles as fast as one
with two. Hooks of DDP and FSDP run outside the compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paralab.errors import ParalabError
from paralab.plan.compile import NOT_COMPILED
from paralab.worker.measure.probes import Probe


class BlockCompiler:
    """Compiles blocks, and counts the calls that actually ran compiled code."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], precision: str) -> None:
        import torch._dynamo  # import it here, because it is slow
        from torch._inductor import config

        torch._dynamo.reset()  # other runs may share this process
        # On a GPU, torch 2.10 and later fuse some sums in a way that does not compile in fp64.
        if hasattr(config.triton, "mix_order_reduction"):
            config.triton.mix_order_reduction = precision != "fp64"
        self.graphs = self.runs = self.calls = self.eager_calls = 0
        classes: dict[type, type] = {}
        for name in names:
            block = model.get_submodule(name)
            kind = type(block)
            if kind not in classes:
                classes[kind] = self._compiled_class(kind)
            block.__class__ = classes[kind]

    def _compiled_class(self, kind: Any) -> type:
        compiled: Any = torch.compile(kind.forward, backend=self._backend)

        def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            before = self.runs
            self.calls += 1
            try:
                return compiled(block, *args, **kwargs)
            except torch._dynamo.exc.BackendCompilerFailed as error:
                why = (str(error).splitlines() or [""])[0]
                problem = f"--compile: torch.compile failed on {kind.__name__}: {why}"
                raise ParalabError(problem, fix=NOT_COMPILED) from error
            finally:
                self.eager_calls += self.runs == before

        return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})

    def _backend(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        from torch._dynamo.backends.registry import lookup_backend

        self.graphs += 1
        inductor: Any = lookup_backend("inductor")
        code = inductor(graph, inputs)

        def run(*args: Any) -> Any:
            self.runs += 1
            return code(*args)

        return run

    def finish(self, probe: Probe) -> None:
        """Write the counts. Raise if no call ran compiled code."""
        if self.calls == self.eager_calls:
            raise ParalabError(
                f"--compile: none of {self.calls} calls of blocks ran compiled code.",
                fix=f"{NOT_COMPILED}, or set TORCH_LOGS=graph_breaks to see why",
            )
        fields = {"graphs": self.graphs, "calls": self.calls, "eager_calls": self.eager_calls}
        probe.emit("compile", **fields)
