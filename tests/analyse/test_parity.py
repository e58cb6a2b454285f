"""The verdict and the named cause, on numbers alone."""

import pytest

from paralab.analyse.parity import judge

EQUAL = {
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


def verdict(*changes, precision="fp64", differences=()):
    ranks = [EQUAL | change for change in changes or ({}, {})]
    return judge({"precision": precision, "differences": list(differences)}, ranks)


def test_equal():
    assert verdict()["equal"]
    assert verdict()["cause"] is None


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
    assert verdict({field: value}, {}, precision=precision)["equal"] is equal


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"parameter_error": "nan"}, "not finite"),
        ({"parameter_error": 1.0, "missing_gradients": ["1.bias"]}, "no gradient for 1.bias"),
        ({"parameter_error": 1.0, "digest": "other"}, "missing synchronisation"),
        ({"parameter_error": 1.0, "gradient_error": 3.0, "gradient_factor": 4.0}, "wrong scale: 4 ×"),
        ({"parameter_error": 1.0}, "the first step is equal"),
        ({"parameter_error": 1.0, "losses": [2.0, 0.5]}, "the loss of the first step differs"),
        ({"parameter_error": 1.0, "gradient_error": 0.1, "gradient_residual": 0.1}, "not added up correctly"),
    ],
)
def test_a_difference_is_named_and_is_no_excuse(changes, cause):
    found = verdict(changes, {})
    assert not found["equal"]
    assert not found["legitimate"]
    assert cause in found["cause"]


def test_not_a_number_in_another_rank_is_not_lost():
    assert not verdict({}, {"parameter_error": "nan"})["equal"]
    assert not verdict({}, {}, {"gradient_error": "nan"})["equal"]


def test_ranks_with_different_parameters_are_never_equal():
    assert "missing synchronisation" in verdict({}, {"digest": "other"})["cause"]


def test_a_known_reason_is_legitimate_but_does_not_hide_a_mistake():
    known = ["BatchNorm normalises over parts"]
    assert verdict({"parameter_error": 0.1, "gradient_error": 0.1, "gradient_residual": 0.1}, {}, differences=known)["legitimate"]
    assert not verdict({"parameter_error": 0.1, "digest": "other"}, {}, differences=known)["legitimate"]
    assert verdict(differences=known)["equal"]


def test_ranks_that_hold_a_stage_each_are_compared_with_their_like():
    def held(stage, digest, compared=2):
        return {"stage": stage, "digest": digest, "compared": compared, "of": 4}

    together = [held(0, "a"), held(1, "b"), held(0, "a"), held(1, "b")]
    quarter = {"losses": [0.5, 0.25]}
    assert verdict(*(quarter | rank for rank in together))["equal"]
    apart = [*together[:3], held(1, "c")]
    assert "missing synchronisation" in verdict(*(quarter | rank for rank in apart))["cause"]
    forgotten = [held(0, "a"), held(1, "b", compared=1)]
    assert "1 parameters are held by no rank" in verdict(*forgotten)["cause"]
