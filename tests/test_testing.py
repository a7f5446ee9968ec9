"""The distances that all proofs go by."""

import math

import pytest
import torch

from furlong.testing import relative_error, worst_error, worst_relative_error

TRUTH = {"a": torch.ones(3), "b": torch.ones(3), "none": torch.full((3,), 1e-20)}


def test_a_gradient_that_is_not_a_number_is_the_worst():
    """No comparison finds NaN among others: as the second of two it would be overlooked."""
    given = TRUTH | {"a": 1.5 * TRUTH["a"], "b": TRUTH["b"] * math.nan}
    assert worst_error(given, TRUTH) == (math.inf, "b")
    assert worst_relative_error(given, TRUTH) == relative_error(math.nan, 1.0) == math.inf


def test_a_gradient_that_is_zero_but_for_rounding_counts_against_all():
    assert worst_error(TRUTH | {"none": torch.zeros(3)}, TRUTH)[0] < 1e-9
    assert worst_error(TRUTH | {"b": 2 * TRUTH["b"]}, TRUTH) == (pytest.approx(1.0), "b")


def test_a_gradient_that_lacks_is_an_error():
    assert worst_error({"a": TRUTH["a"], "b": TRUTH["b"]}, TRUTH) == (math.inf, "none")
    with pytest.raises(AssertionError, match="none"):
        worst_relative_error({"a": TRUTH["a"], "b": TRUTH["b"]}, TRUTH)
