"""Schedules of torch.distributed.pipelining: batch, micro-batches, and stages. We never import that
module ourselves."""

import sys
import weakref
from collections.abc import Callable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from paralab.observe import sites
from paralab.observe.digests import size_of
from paralab.observe.light import Light
from paralab.observe.rank import Fields, Rank
from paralab.observe.wrappers import is_inside, wrap

MODULE = "torch.distributed.pipelining.schedules"
NAMES = ("schedule", "microbatches", "stages", "stage", "size")


def install(rank: Rank) -> None:
    if MODULE in sys.modules:
        _install(rank, sys.modules[MODULE])
    else:
        sys.meta_path.insert(0, _AfterImport(lambda module: _install(rank, module)))


class _AfterImport:
    def __init__(self, then: Callable[[ModuleType], None]) -> None:
        self.then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        loader: Loader = spec.loader
        load = loader.exec_module

        def load_and_install(module: ModuleType) -> None:
            load(module)
            self.then(module)

        loader.exec_module = load_and_install  # type: ignore[method-assign]
        return spec


def _install(rank: Rank, module: ModuleType) -> None:
    made: weakref.WeakKeyDictionary[Any, list[list[Any]]] = weakref.WeakKeyDictionary()

    def make(schedule: Any, *args: Any, **kwargs: Any) -> None:
        made.setdefault(schedule, sites.places(sites.where()))

    def describe(schedule: Any, *args: Any, **kwargs: Any) -> Fields | None:
        rank.identify()
        values = brief((schedule, *args), kwargs)
        if values is None:
            return None
        return {**dict(zip(NAMES, values, strict=True)), "made": made.get(schedule, [])}

    def brief(args: tuple[Any, ...], kwargs: Fields) -> tuple[Any, ...] | None:
        if is_inside(rank, "pipeline"):
            return None
        schedule = args[0]
        stage = (getattr(schedule, "_stages", None) or [schedule._stage])[0]
        shape = schedule._n_microbatches, stage.num_stages, stage.stage_index
        return (type(schedule).__name__, *shape, size_of(args[1:]))

    try:
        for kind in [kind for kind in vars(module).values() if isinstance(kind, type)]:
            step = vars(kind).get("step")
            if step is not None and not getattr(step, "__isabstractmethod__", False):
                light = Light(rank, "pipeline", NAMES, brief)
                wrap(rank, kind, "step", "pipeline", describe, light=light)
            if "__init__" in vars(kind) and hasattr(kind, "step"):
                wrap(rank, kind, "__init__", "made", make)
    except Exception as error:
        rank.switch_off(error)
