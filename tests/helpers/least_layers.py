"""InfiniPipe's integer program (Eqs. 17 to 20), to which its greedy choice is compared."""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from furlong.planners.infinipipe import Integers, Loads, choose_layers


def least_layers(loads: Loads) -> Integers | None:
    """The layers of least sum; those of the greedy choice if nothing lacks or the solver fails.

    Variables per diagonal: its layers, as a sum of one integer per distinct stage height (a stage
    counts the levels up to its own height); and whether it has any.
    """
    if not len(loads.heights):
        return choose_layers(loads)
    num_diagonals = loads.saved_bytes.shape[1]
    tops = np.unique(loads.heights)
    most = np.diff(tops, prepend=0).astype(float)
    again = np.zeros_like(loads.saved_bytes)
    again[range(len(again)), loads.acting] = loads.again_bytes
    felt = [loads.saved_bytes * (top <= loads.heights[:, None]) for top in tops]
    scale = np.maximum(loads.saved_bytes.max(axis=1, keepdims=True), 1.0)
    room = LinearConstraint(np.hstack([*felt, -again]) / scale, lb=loads.excess_bytes / scale[:, 0])
    # a diagonal's levels may be positive only if the diagonal recomputes
    eye = np.eye(num_diagonals)
    linked = np.hstack([np.kron(-np.eye(len(tops)), eye), np.kron(most, eye).T])
    found = milp(
        np.concatenate([*[loads.counts] * len(tops), np.zeros(num_diagonals)]),
        constraints=[room, LinearConstraint(linked, lb=0)],
        bounds=Bounds(0, np.repeat([*most, 1.0], num_diagonals)),
        integrality=np.ones((len(tops) + 1) * num_diagonals),
        options={"node_limit": 10_000, "mip_rel_gap": 0.0},  # a count is reproducible
    )
    if found.x is None:
        return choose_layers(loads)
    levels = np.rint(found.x).astype(np.int64).reshape(-1, num_diagonals)[:-1]
    layers = levels.sum(axis=0)
    return layers if loads.fit(layers) else choose_layers(loads)
