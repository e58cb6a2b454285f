"""Which configurations `verify all` contains."""

from paralab.experiment.verify import _vary
from paralab.plan.request import STRATEGIES, Request
from paralab.workload.summary import Block
from tests.plan.test_resolve import summary


def find_ways(way, blocks, **given):
    names, base = list(STRATEGIES), Request("single", **given)
    cases = _vary(names, base, summary(blocks=blocks), pinned=False)
    return {(request.strategy, value) for request, _ in cases if (value := getattr(request, way))}


def test_verify_all_compiles_blocks_once_and_recomputes_them_in_every_strategy():
    blocks = (Block("a", ("full", "selective")), Block("b", ("full", "selective")))
    assert find_ways("compile", blocks) == {("ddp", True)}
    assert find_ways("compile", blocks, compile=False) == set()
    assert find_ways("compile", ()) == set()
    assert {strategy for strategy, _ in find_ways("recompute", blocks)} == set(STRATEGIES)
    assert find_ways("recompute", ()) == set()
