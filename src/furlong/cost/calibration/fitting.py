"""Least squares of the relative error, so that small values count as much as large ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def relative_line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """(slope, constant) with the least sum of ((slope * x + constant) / y - 1)^2; y > 0.

    Needs two different xs.
    """
    slope, constant = relative_fit([xs, [1.0] * len(xs)], ys)
    return slope, constant


def relative_fit(columns: ArrayLike, ys: Sequence[float]) -> list[float]:
    """Non-negative coefficients c of sum(c_i * columns_i) ~ y, least relative error; y > 0."""
    targets = np.asarray(ys, dtype=float)
    matrix = np.asarray(columns, dtype=float).T / targets[:, None]
    return nonnegative(matrix, np.ones(len(targets)))


def nonnegative(matrix: NDArray[np.float64], targets: NDArray[np.float64]) -> list[float]:
    """Non-negative coefficients (n,) with the least squares of matrix (m, n) @ c - targets (m,)."""
    from scipy.optimize import nnls  # half a second to import, and few callers fit

    # columns of like size keep the solver's tolerance meaningful
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    solution, _ = nnls(matrix / scale, targets)
    coefficients: list[float] = (solution / scale).tolist()
    return coefficients
