"""Which configurations `verify all` contains."""

import pytest

from paralab.analyse.judge import failed_verification
from paralab.analyse.verify import Verified, VerifyOptions
from paralab.experiment.verify import _cannot_run, _vary
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


@pytest.mark.parametrize("strategy", ["all", "fsdp"])
def test_a_part_of_one_sample_is_not_a_difference(strategy):
    """With 8 samples, verify's own splits once gave BatchNorm1d a single sample, and it reported
    DIFFERS."""

    def failed(error):
        kind = {"partial_last_batch": True, "varying_weights": False}
        options = VerifyOptions(workload="w", batch_size=8, **kind)
        proof = failed_verification("fp64", error)
        return Verified.like(proof, strategy="fsdp", options=options, arithmetic="")

    one = "ValueError: Expected more than 1 value per channel when training, got input size [1, 16]"
    assert _cannot_run(failed(one), strategy)
    assert not _cannot_run(failed("ValueError: wrong"), strategy)
