"""Skrull's own fitted forms (Xu et al., arXiv 2505.19609), one function per equation.

S tokens of a sequence, N devices of a context-parallel group, h hidden size, h_kv key-value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

from furlong.calibrate.fit import relative_line
from furlong.plan.plan import Place


@dataclass(frozen=True, slots=True)
class TimeFit:
    """Coefficients of Eqs. 14 and 16."""

    seconds_per_flop: float
    """alpha'."""
    compute_constant_s: float = 0.0
    """beta'."""
    seconds_per_byte: float = 0.0
    """alpha''."""
    transfer_constant_s: float = 0.0
    """beta''."""
    fixed_s: float = 0.0
    """T_fixed, of a volume below the threshold."""
    threshold_bytes: float = 0.0
    """V_th."""


TABLE_3_US: dict[str, tuple[float, ...]] = {
    "all_gather": (53.29, 72.52, 97.86, 199.3, 286.2, 488.6, 910.6, 1758.4, 3416.4, 6467.9),
    "all_to_all": (80.62, 78.63, 110.9, 163.2, 277.5, 502.4, 939.2, 1803.9, 3411.2, 6629.6),
    "reduce_scatter": (59.48, 79.26, 104.7, 177.4, 269.5, 458.8, 864.3, 1663.9, 3239.5, 6294.3),
    "all_reduce": (84.65, 113.3, 168.4, 312.2, 479.2, 859.7, 1642.9, 3197.9, 6181.2, 12126.0),
}
"""Table 3: microseconds of each collective at `TABLE_3_MB`, on H100 nodes."""
TABLE_3_MB = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def flops(seq_len: float, hidden_size: int, kv_size: int) -> float:
    """Eq. 13: forward of one layer, batch size 1: 20 h^2 S + 4 h h_kv S + 4 h S^2.

    Its MLP is the two-matrix one of width 4 h, and attention is counted without the causal half;
    `cost.seconds.flops` has the exact counts.
    """
    linear = 20 * hidden_size**2 + 4 * hidden_size * kv_size
    return seq_len * linear + 4 * hidden_size * seq_len**2


def quadratic_from_tokens(hidden_size: int, kv_size: int) -> int:
    """Length from which Eq. 13's quadratic term is the larger one: 5 h + h_kv."""
    return 5 * hidden_size + kv_size


def compute_s(fit: TimeFit, num_flops: float) -> float:
    """Eq. 14; nothing to compute takes no time."""
    return fit.seconds_per_flop * num_flops + fit.compute_constant_s if num_flops else 0.0


def volume_bytes(seq_len: float, kv_size: int, element_bytes: int = 2) -> float:
    """Eq. 15: K and V of a distributed sequence (batch size 1)."""
    return 2 * seq_len * kv_size * element_bytes


def communication_s(fit: TimeFit, num_bytes: float) -> float:
    """Eq. 16: a fixed cost below the threshold, then linear; no volume takes no time."""
    if num_bytes == 0:
        return 0.0
    if num_bytes < fit.threshold_bytes:
        return fit.fixed_s
    return fit.seconds_per_byte * num_bytes + fit.transfer_constant_s


def bucket_tokens(memory_bytes: float, static_bytes: float, token_bytes: float) -> int:
    """Eq. 12: tokens that a device holds at a time, C = (M_gpu - M_static) / alpha, beta ~ 0."""
    return max(0, floor((memory_bytes - static_bytes) / token_bytes))


def rank_s(
    fit: TimeFit,
    local_lens: Sequence[int],
    distributed_lens: Sequence[int],
    sp_size: int,
    hidden_size: int,
    kv_size: int,
    num_layers: int = 1,
) -> float:
    """Eqs. 2 to 5: one rank's seconds for a micro-batch, forward.

    Communication of the distributed sequences hides behind the computation of the local ones.
    """
    local = sum(flops(s, hidden_size, kv_size) for s in local_lens)
    shared = sum(flops(s, hidden_size, kv_size) for s in distributed_lens) / sp_size
    volume = sum(volume_bytes(s, kv_size) for s in distributed_lens)
    overlapped = max(communication_s(fit, volume), compute_s(fit, local))
    return num_layers * (overlapped + compute_s(fit, shared))


def micro_batch_s(
    fit: TimeFit,
    seq_lens: Sequence[int],
    places: Sequence[Place],
    sp_size: int,
    hidden_size: int,
    kv_size: int,
    num_layers: int = 1,
) -> float:
    """Eq. 1: the slowest rank's seconds. `places`: of each sequence, one rank or the group."""
    placed = list(zip(seq_lens, places, strict=True))
    shared = [seq_len for seq_len, place in placed if place.size > 1]
    return max(
        rank_s(
            fit,
            [seq_len for seq_len, place in placed if place == Place(rank, 1)],
            shared,
            sp_size,
            hidden_size,
            kv_size,
            num_layers,
        )
        for rank in range(sp_size)
    )


def table_3_fit(collective: str, from_mb: float = 16) -> TimeFit:
    """Eq. 16 on Table 3: linear from `from_mb` on, below it the largest time of the table there.
    A megabyte is 10^6 bytes."""
    times = TABLE_3_US[collective]
    pairs = [(mb, us) for mb, us in zip(TABLE_3_MB, times, strict=True) if mb >= from_mb]
    below = [us for mb, us in zip(TABLE_3_MB, times, strict=True) if mb < from_mb]
    us_per_mb, constant_us = relative_line([mb for mb, _ in pairs], [us for _, us in pairs])
    return TimeFit(
        seconds_per_flop=0.0,
        seconds_per_byte=us_per_mb * 1e-12,
        transfer_constant_s=constant_us * 1e-6,
        fixed_s=max(below, default=0.0) * 1e-6,
        threshold_bytes=from_mb * 1e6,
    )
