"""Relative differences between runs of a model that should be equal."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from furlong.runtime.checks.trial import GRADIENTS, Run, cuts


def differences(given: Run, truth: Run) -> dict[str, float]:
    """Relative L2 errors by name; of gradients, the largest of any piece of the long sequence."""
    return {
        name: _gradient_error(given[name], truth[name])
        if name == GRADIENTS
        else relative(given[name], truth[name])
        for name in truth
    }


def _gradient_error(given: Tensor, truth: Tensor) -> float:
    """The largest error of a piece: a relay that is dropped loses the first one, however little
    that is of the whole.

    A gradient that is zero but for rounding counts against a millionth of the whole one.
    """
    floor = 1e-6 * float(truth.double().norm())
    pieces = [slice(start, stop) for start, stop in pairwise(cuts(len(truth)))]
    return max(relative(given[piece], truth[piece], floor) for piece in pieces)


def relative(given: Tensor, truth: Tensor, floor: float = 0.0) -> float:
    """The norm of a difference, relative to that of the truth or to `floor` if that is larger."""
    difference = float((given.double() - truth.double()).norm())
    return difference / max(float(truth.double().norm()), floor) if difference else 0.0
