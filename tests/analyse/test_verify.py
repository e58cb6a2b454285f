"""The verdict and the cause, from numbers alone."""

import pytest
from msgspec.structs import replace

from paralab.analyse.judge import (
    compared_with_simulation,
    failed_verification,
    judge,
    with_excuse,
)
from paralab.analyse.verify import apart_from, outcome
from paralab.plan.plan import Plan
from paralab.record.events import Verify
from tests.analyse.recordings import plan

EQUAL = {
    "event": "verify",
    "time": 1.0,
    "of": 4,
    "parameter_error": 1e-15,
    "parameter_error_of_update": 1e-14,
    "worst_parameter": "0.weight",
    "gradient_error": 1e-16,
    "gradient_size": 1.0,
    "missing_gradients": [],
    "gradient_factor": 1.0,
    "gradient_residual": 1e-16,
    "losses": [1.0, 0.5],
    "reference_losses": [2.0, 1.0],
    "digest": "same",
}


def verdict(*changes, precision="fp64"):
    return judge(precision, [Verify(**EQUAL | change) for change in changes or ({}, {})])


def test_equal():
    assert verdict().equal
    assert verdict().cause is None


def test_the_named_parameter_is_the_one_that_differs():
    """Rank 0 holds another stage, whose worst parameter is equal."""
    other = {"stage": 1, "parameter_error": 1.0, "worst_parameter": "3.bias"}
    assert "3.bias" in verdict({"stage": 0}, other).cause


@pytest.mark.parametrize(
    ("precision", "field", "value", "equal"),
    [
        ("fp64", "parameter_error", 9e-11, True),
        ("fp64", "parameter_error", 2e-10, False),
        ("fp32", "parameter_error_of_update", 9e-6, True),
        ("fp32", "parameter_error_of_update", 2e-5, False),
        ("fp64", "gradient_error", 2e-10, False),
        ("fp64", "losses", [1.0, 0.5 + 1e-9], False),
    ],
)
def test_tolerances(precision, field, value, equal):
    assert verdict({field: value}, {}, precision=precision).equal is equal


@pytest.mark.parametrize(
    ("changes", "cause", "serious"),
    [
        ({"parameter_error": "nan"}, "not finite", True),
        ({"parameter_error": 1.0, "missing_gradients": ["1.bias"]}, "no gradient for 1.bias", True),
        ({"parameter_error": 1.0, "digest": "other"}, "missing synchronization", True),
        (
            {"parameter_error": 1.0, "gradient_error": 3.0, "gradient_factor": 4.0},
            "wrong scale: 4 ×",
            False,
        ),
        ({"parameter_error": 1.0, "losses": [1.0, 0.6]}, "from step 1 on", False),
        ({"parameter_error": 1.0}, "all 2 steps are equal, but 0.weight", False),
        ({"parameter_error": 1.0, "extra_gradients": ["2.bias"]}, "2.bias", False),
        (
            {"parameter_error": 1.0, "losses": [2.0, 0.5]},
            "first step's loss",
            False,
        ),
        (
            {"parameter_error": 1.0, "gradient_error": 0.1, "gradient_residual": 0.1},
            "not added up correctly",
            False,
        ),
        ({"buffer_errors": {"mean": 0.5, "count": 1e-12}}, "buffer mean differs by 0.5", False),
    ],
)
def test_a_difference_is_named(changes, cause, serious):
    found = verdict(changes, {})
    assert not found.equal
    assert found.serious == serious
    assert cause in found.cause


def test_what_one_device_found_out_is_the_cause():
    changes = {"gradient_error": 3.0, "gradient_factor": 4.0}
    assert judge("fp64", [Verify(**EQUAL | changes)], "a sum").cause == "a sum"
    assert judge("fp64", [Verify(**EQUAL | {"losses": [2.0, 1.0]})], "a sum").equal


def test_buffers_are_compared_on_every_rank_and_within_the_tolerance():
    found = verdict(
        {"buffer_errors": {"mean": 0.5, "tiny": 1e-12}},
        {"buffer_errors": {"mean": 0.7, "seen": "inf"}},
    )
    assert found.buffers == {"mean": 0.7, "seen": None}


def test_not_a_number_in_another_rank_is_not_lost():
    assert not verdict({}, {"parameter_error": "nan"}).equal
    assert not verdict({}, {}, {"gradient_error": "nan"}).equal


def test_ranks_with_different_parameters_are_never_equal():
    assert "missing synchronization" in verdict({}, {"digest": "other"}).cause


REASONS = ["BatchNorm normalizes over parts"]


def planned(precision="fp64"):
    return Plan.from_json(plan(precision=precision) | {"differences": REASONS})


def excused(asked, precision="fp64", control=("batch_norm",), proof=()):
    proved = replace(verdict(*proof), control=control)
    return with_excuse(proved, planned(precision), verdict(asked, {}, precision=precision))


def test_an_excuse_is_told_beside_the_proof_and_does_not_decide():
    found = excused(
        {
            "parameter_error": 0.1,
            "gradient_error": 0.1,
            "gradient_residual": 0.1,
            "buffer_errors": {"mean": 2.0},
        }
    )
    assert found.equal
    assert found.excused.max_difference == 0.1
    assert found.excused.buffers == {"mean": 2.0}
    assert found.excused.reasons == REASONS
    assert apart_from(found) == "BatchNorm"
    wrong = excused({"parameter_error": 0.1}, proof=({"parameter_error": 0.2}, {}))
    assert not wrong.equal


def test_no_excuse_covers_ranks_that_part_or_runs_that_fail():
    assert not excused({"parameter_error": 0.1, "digest": "other"}).equal
    assert not excused({"parameter_error": "nan"}).equal
    # Gemma 2 with padding, in fp64 as configured: the single device's loss is NaN too.
    assert excused({"parameter_error": "nan", "reference_losses": [1.0, "nan"]}).equal
    assert not verdict({"parameter_error": "nan", "reference_losses": [1.0, "nan"]}).equal
    proved = replace(verdict(), control=("batch_norm",))
    failed = with_excuse(proved, planned(), failed_verification("fp64", "Rank 0 failed"))
    assert not failed.equal
    assert "Rank 0 failed" in failed.cause


@pytest.mark.parametrize(
    ("precision", "gradient_error", "equal"),
    [("fp32", 9e-5, True), ("fp32", 2e-4, False), ("bf16", 0.3, True), ("bf16", 0.7, False)],
)
def test_rounding_excuses_only_what_rounding_does(precision, gradient_error, equal):
    """If nothing else excuses it, a gradient that is far off in low precision but correct in fp64
    is a mistake in the forward pass."""
    asked = {
        "parameter_error_of_update": 0.1,
        "gradient_error": gradient_error,
        "gradient_residual": 0.1,
    }
    assert excused(asked, precision, control=()).equal is equal
    assert excused(asked, precision, control=("random",)).equal


FAR = {"parameter_error": 3e-4, "gradient_error": 0.4, "gradient_residual": 0.1}


def lossy(asked=FAR, proof=()):
    proved = compared_with_simulation(verdict(*proof))
    return with_excuse(proved, planned(), verdict(asked, {}))


def test_a_lossy_configuration_is_as_simulated_and_never_equal():
    """Its gradients differ by more than rounding, which is intended."""
    found = lossy()
    assert (found.equal, found.as_simulated, found.passed) == (False, True, True)
    assert found.excused.max_difference == 3e-4
    assert outcome(found) == "as simulated"
    assert not lossy(asked={}).equal  # not even if it happens to be close

    for wrong in (lossy(proof=[{"parameter_error": 1e-9}, {}]), lossy(FAR | {"digest": "other"})):
        assert (wrong.equal, wrong.as_simulated, wrong.passed) == (False, False, False)
        assert wrong.cause
        assert outcome(wrong) == "DIFFERS"


def test_a_proof_that_fails_to_run_shows_no_difference():
    failed = failed_verification("fp64", "Rank 0 failed in step 0: OutOfMemoryError")
    assert (failed.ran, failed.passed, outcome(failed)) == (False, False, "not proved")


def test_nothing_to_excuse():
    assert with_excuse(verdict(), planned(), None).excused is None
    assert apart_from(with_excuse(verdict(), planned(), None)) == ""


def test_ranks_that_hold_a_stage_each_are_compared_with_their_like():
    def held(stage, digest, compared=2):
        return {"stage": stage, "digest": digest, "compared": compared, "of": 4}

    together = [held(0, "a"), held(1, "b"), held(0, "a"), held(1, "b")]
    quarter = {"losses": [0.5, 0.25]}
    assert verdict(*(quarter | rank for rank in together)).equal
    apart = [*together[:3], held(1, "c")]
    assert "missing synchronization" in verdict(*(quarter | rank for rank in apart)).cause
    forgotten = [held(0, "a"), held(1, "b", compared=1)]
    assert "1 parameter" in verdict(*forgotten).cause
