"""The term of a state in a selective scan (Mamba) that started without it.

The scan is linear in its state h: with decays a_t = exp(A dt_t)

    h_t = a_t h_(t-1) + dt_t B_t u_t,    y_t = (C_t h_t + D u_t) silu(z_t),

so a state h_0 adds C_t (a_1 ... a_t) h_0 silu(z_t) to y_t, whatever has computed the rest.

    b batch, d channels, T tokens, n size of the state
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

_TILE_ELEMENTS = 2**22


def with_state(
    y: Tensor, last: Tensor, before: Tensor, given: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """y (b, d, T) and the last state (b, d, n) of a scan that had begun with `before` (b, d, n).

    `given`: the arguments of the scan by name.
    """
    steps, a, c, z = given["dt"], given["A"], given["C"], given.get("z")
    if given.get("delta_bias") is not None:
        steps = steps + given["delta_bias"].to(steps.dtype)[..., None]
    if given.get("delta_softplus"):
        steps = softplus(steps)
    wide = torch.promote_types(torch.promote_types(y.dtype, torch.float32), before.dtype)
    total, h = steps.to(wide).cumsum(-1), before.to(wide)  # (b, d, T), (b, d, n)
    num_tokens = max(1, _TILE_ELEMENTS // (h.numel() or 1))
    parts = []
    for own, read in zip(
        total.split(num_tokens, -1), c.to(wide).split(num_tokens, -1), strict=True
    ):
        decay = torch.exp(a.to(wide)[None, :, None, :] * own[..., None])  # (b, d, t, n)
        parts.append(torch.einsum("bdtn,bdn,bnt->bdt", decay, h, read))
    more = torch.cat(parts, -1)
    if z is not None:
        more = more * silu(z.to(wide))
    decayed = torch.exp(a.to(wide)[None] * total[..., -1:]) * h
    return (y + more.to(y.dtype)), (last + decayed.to(last.dtype))
