"""The two functions of `flash_attn.cute.interface` (flash-attn-4 4.0.0b36) in plain arithmetic.

Names, order and defaults of parameters are the wheel's; those that furlong must not use are left
out. A side of the window that is None is open, a number bounds that side alone; the last row stands
at the last key."""

import torch
from emulated_cuda import check_inputs, spans


def _flash_attn_fwd(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None,
    causal=False, softcap=None, window_size_left=None, window_size_right=None, *, return_lse=False,
):  # fmt: skip
    check_inputs(q, k, v)
    out, heads = torch.empty_like(q), q.shape[-2]
    is_packed = cu_seqlens_q is not None
    lse = torch.empty((heads, q.shape[0]) if is_packed else (1, heads, q.shape[1]))
    lse = lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    for rows, keys in spans(q, k, cu_seqlens_q, cu_seqlens_k):
        mine = [x.transpose(0, 1) for x in (q[rows], k[keys], v[keys])]
        scores, _, _, wide_v = _scores(
            *mine, softmax_scale, softcap or 0.0, causal, window_size_left, window_size_right
        )
        out[rows] = (scores.softmax(-1) @ wide_v).transpose(0, 1).to(q.dtype)
        lse[(*rows[:-1], slice(None), rows[-1])] = scores.logsumexp(-1).to(lse.dtype)
    return out, lse if return_lse else None, None, None, None


def _flash_attn_bwd(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
    max_seqlen_k=None, deterministic=False,
):  # fmt: skip
    check_inputs(dout, q, k, v, out)
    assert softcap != 0.0 or isinstance(softcap, float), "None would be a softcap"
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for rows, keys in spans(q, k, cu_seqlens_q, cu_seqlens_k):
        q_, out_, dout_ = (x[rows].transpose(0, 1).double() for x in (q, out, dout))
        k_, v_ = (x[keys].transpose(0, 1) for x in (k, v))
        scores, slope, wide_k, wide_v = _scores(
            q_, k_, v_, softmax_scale, softcap, causal, window_size_left, window_size_right
        )
        own_lse = lse[(*rows[:-1], slice(None), rows[-1])].double()
        p = torch.exp(scores - own_lse[..., None])
        ds = p * (dout_ @ wide_v.mT - (dout_ * out_).sum(-1, keepdim=True)) * slope * softmax_scale
        group = (k_.shape[0], -1)
        found = ds @ wide_k, (ds.mT @ q_).unflatten(0, group).sum(1), None
        found = (*found[:2], (p.mT @ dout_).unflatten(0, group).sum(1))
        for whole, at, grad in zip(grads, (rows, keys, keys), found, strict=True):
            whole[at] = grad.transpose(0, 1).to(whole.dtype)
    return grads


def _scores(q, k, v, scale, softcap, causal, left, right):
    """Masked scores (N, T, S), the slope of the capped ones, and k and v of every query head."""
    k, v = (x.double().repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    scores, slope = q.double() @ k.mT * scale, 1.0
    if softcap:
        tanh = torch.tanh(scores / softcap)
        scores, slope = softcap * tanh, 1 - tanh**2
    num_rows, num_keys = scores.shape[1:]
    at, key = torch.arange(num_rows)[:, None] + num_keys - num_rows, torch.arange(num_keys)[None]
    hidden = torch.zeros(num_rows, num_keys, dtype=torch.bool)
    right = 0 if causal else right
    for bound, too_far in ((left, lambda n: key < at - n), (right, lambda n: key > at + n)):
        if bound is not None:
            hidden |= too_far(bound)
    assert not hidden.all(-1).any(), "a row that sees nothing"
    return scores.masked_fill(hidden, -torch.inf), slope, k, v
