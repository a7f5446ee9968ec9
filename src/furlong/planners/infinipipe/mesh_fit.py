"""The paper's form of a chunk's time, fitted to the cost model (InfiniPipe, Eqs. 1 and 4)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from scipy.optimize import nnls

from furlong.cost.model import CostModel
from furlong.plan.values import ON_DEVICE, Chunk, Place, Slice, Tiers
from furlong.planners.cells import cell_seconds
from furlong.planners.infinipipe.mesh import EQUAL_TOKENS, SliceWork


def fit_work(
    model: CostModel,
    longest: int,
    num_slices: int,
    *,
    stages: tuple[int, ...],
    sp_size: int = 1,
    tiers: Tiers = ON_DEVICE,
) -> SliceWork:
    """The paper's a1 and a2 for the slowest stage, forward and backward together, from equal pieces
    of a sequence of `longest` tokens, about `num_slices` of them: efficiencies depend on their
    size. What a chunk costs however few its tokens is fitted too and left out."""
    place = Place(0, sp_size)
    slices = []
    cuts = (max(1, num_slices // 2), num_slices, 2 * num_slices)
    for seq_id, count in enumerate(cuts):
        bounds = np.unique(np.linspace(0, longest, count + 1).astype(int)).tolist()
        slices += [Slice(seq_id, start, stop, place) for start, stop in pairwise(bounds)]
    chunks = [Chunk((piece,)) for piece in slices]
    lens = (longest,) * len(cuts)
    cells = cell_seconds(chunks, lens, stages, model, sp_size=sp_size, tiers=tiers)
    seconds = cells.sum(axis=2)
    seconds = seconds[seconds.sum(axis=1).argmax()]
    start = np.array([piece.start for piece in slices], dtype=float)
    stop = np.array([piece.stop for piece in slices], dtype=float)
    terms = np.stack([stop**2 - start**2, stop - start, np.ones_like(start)], axis=1)
    scale = terms.max(axis=0)
    # errors count relative to the piece's own time
    (quadratic, linear, _), _ = nnls(terms / scale / seconds[:, None], np.ones_like(seconds))
    fitted = SliceWork(float(quadratic / scale[0]), float(linear / scale[1]))
    return fitted if fitted.quadratic or fitted.linear else EQUAL_TOKENS
