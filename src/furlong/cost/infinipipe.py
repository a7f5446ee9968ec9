"""InfiniPipe's own fitted forms (Wang et al., arXiv 2509.21275), one function per equation.

N = d_s * d_p devices; d_s of a sequence-parallel group with ZeRO-3, d_p pipeline stages; L layers,
D hidden, D_kv key-value width, e bytes per element. Where the first version of the paper and the
revised one differ, the revised one holds (D_kv, logits); errata of Eq. 5, 9 and 11 are corrected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeFit:
    """Coefficients of Eq. 1, fitted apart for forward and backward; on all N devices together."""

    quadratic_s: float
    """alpha_1, seconds per squared token."""
    linear_s: float
    """alpha_2, seconds per token."""
    constant_s: float = 0.0
    """beta_1, seconds per pass."""


@dataclass(frozen=True, slots=True)
class Layout:
    sp_size: int
    """d_s."""
    pp_size: int
    """d_p."""
    num_layers: int
    hidden_size: int
    kv_size: int
    """D_kv."""
    element_bytes: int = 2

    @property
    def num_devices(self) -> int:
        return self.sp_size * self.pp_size


def compute_s(
    fit: TimeFit, layout: Layout, context: int, lens: Sequence[int], tail: int = 0
) -> float:
    """Eq. 1: one stage's seconds for a chunk. `tail`: s_0, the slice behind `context` tokens;
    `lens`: the other slices, whole sequences."""
    quadratic = (context + tail) ** 2 - context**2 + sum(s * s for s in lens)
    linear = tail + sum(lens)
    work = fit.quadratic_s * quadratic + fit.linear_s * linear
    return work / layout.num_devices + fit.constant_s / layout.pp_size


def communication_s(num_bytes: float, bytes_per_s: float, latency_s: float, count: float) -> float:
    """Eq. 2."""
    return (num_bytes / bytes_per_s + latency_s) * count


def all_to_all_s(layout: Layout, num_tokens: int, bytes_per_s: float, latency_s: float) -> float:
    """Eq. 3 (revised): per layer of the stage two all-to-alls of queries' width, two of keys'."""
    width = layout.hidden_size + layout.kv_size
    num_bytes = layout.element_bytes * width * num_tokens / layout.sp_size
    layers = layout.num_layers / layout.pp_size
    return communication_s(num_bytes, bytes_per_s, 2 * latency_s, 2 * layers)


def kv_gradient_bytes(layout: Layout, num_tokens: int, continues: bool) -> float:
    """Eq. 5, M_dkv: only a chunk whose K,V a later chunk needs holds its dK,dV early."""
    if not continues:
        return 0.0
    per_token = 2 * layout.element_bytes * layout.num_layers * layout.kv_size
    return per_token * num_tokens / layout.num_devices


def activation_bytes(
    layout: Layout,
    num_tokens: int,
    token_bytes: float,
    logits_bytes: float = 0.0,
    recompute_layers: int = 0,
) -> float:
    """Eqs. 5 and 10, Act: `token_bytes` M_token over the whole model, `logits_bytes` M_logits per
    token where the stage is the last."""
    kept = (layout.num_layers - recompute_layers * layout.pp_size) / layout.num_layers
    per_token = kept * token_bytes / layout.num_devices + logits_bytes / layout.sp_size
    return per_token * num_tokens


def checkpoint_bytes(
    layout: Layout, num_tokens: int, recompute_layers: int, continues: bool
) -> float:
    """Eq. 9: inputs of the checkpointed layers, and their K,V where a later chunk needs them."""
    width = layout.hidden_size + (2 * layout.kv_size if continues else 0)
    return layout.element_bytes * width * recompute_layers * num_tokens / layout.sp_size


def chunk_bytes(
    layout: Layout,
    num_tokens: int,
    *,
    token_bytes: float,
    logits_bytes: float = 0.0,
    recompute_layers: int = 0,
    continues: bool = False,
) -> float:
    """Eq. 10: everything that a stage holds of a chunk between its forward and its backward."""
    kept = activation_bytes(layout, num_tokens, token_bytes, logits_bytes, recompute_layers)
    checkpoints = checkpoint_bytes(layout, num_tokens, recompute_layers, continues)
    return kept + checkpoints + kv_gradient_bytes(layout, num_tokens, continues)


def window_chunks(layout: Layout, stage: int, num_split: int, num_chunks: int) -> int:
    """Eq. 7: chunks alive on a stage (counted from 0) in the steady phase. `num_split`: chunks of
    the longest sequence of the pipeline."""
    return min(num_chunks, layout.pp_size - 1 - stage + num_split)


def recompute_s(layout: Layout, recompute_layers: int, forward_s: float) -> float:
    """Eq. 11, corrected: `forward_s` is one stage's, of its L / d_p layers."""
    return recompute_layers * layout.pp_size / layout.num_layers * forward_s
