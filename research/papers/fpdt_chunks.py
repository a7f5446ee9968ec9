"""FPDT's chunk size: blocks stream in while the block before computes.

Two buffers: while block j computes, block j + 1 is on its way. (FPDT, section on double buffering;
thresholds derived from its loop order. What a plan's streamed K,V take is in `cost.seconds.rates`.)
"""

from __future__ import annotations

from math import ceil, log2

from furlong.cost.model import CostModel


def smallest_hidden_chunk_tokens(
    flops_per_s: float,
    link_bytes_per_s: float,
    *,
    element_bytes: int = 2,
    kv_share: float = 1.0,
) -> float:
    """The chunk size from which a full block's compute hides the load of its K,V.

    c0 = e g Phi / (2 B): a block of c by c tokens computes 4 c^2 d / Phi and loads 2 c g d e / B.
    Independent of width, heads and devices; `kv_share` g = key-value width over hidden width. On
    the diagonal a block computes half as much: nothing waits anywhere from 2 c0 on.
    """
    return element_bytes * kv_share * flops_per_s / (2 * link_bytes_per_s)


def smallest_hidden_relay_chunk_tokens(
    backward_flops_per_s: float,
    link_bytes_per_s: float,
    *,
    element_bytes: int = 2,
    gradient_bytes: int = 4,
    kv_share: float = 1.0,
) -> float:
    """The same for a backward that walks K,V inside, as this project's does: 10 c^2 d / Phi_b
    against loads of K, V, dK and dV, 2 c g d (e + e_g) bytes; dK,dV return on the other direction.
    """
    loaded_bytes = 2 * kv_share * (element_bytes + gradient_bytes)
    return loaded_bytes * backward_flops_per_s / (10 * link_bytes_per_s)


def choose_fpdt_chunk(model: CostModel, sp_size: int = 1) -> int:
    """The smallest power of two of tokens per chunk whose attention hides the loads of K,V from
    the host: in the forward on diagonal blocks too (twice c0), in the backward with dK,dV.

    Counts tokens of the whole sp group, at the rates of long calls: where short ones reach less,
    loads hide the better. Width and heads cancel, but a process keeps at least one key-value head.
    """
    shape, hardware, training = model.shape, model.hardware, model.training
    kv_share = max(1.0, shape.num_kv_heads / sp_size) / (shape.num_heads / sp_size)
    link = hardware.links.host.bytes_per_s
    forward = smallest_hidden_chunk_tokens(
        hardware.peak_flops_per_s * hardware.attention_forward.best,
        link,
        element_bytes=training.compute_bytes,
        kv_share=kv_share,
    )
    backward = smallest_hidden_relay_chunk_tokens(
        hardware.peak_flops_per_s * hardware.attention_backward.best,
        link,
        element_bytes=training.compute_bytes,
        gradient_bytes=training.kv_gradient_bytes,
        kv_share=kv_share,
    )
    return 1 << max(0, ceil(log2(max(2 * forward, backward))))
