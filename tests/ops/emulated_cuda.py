"""torch's CUDA attention operators in plain arithmetic, so that the code around them runs here.

Under the mode the operators take CPU tensors of any dtype, refuse what the kernels refuse or read
wrongly, and everything that would launch a kernel is counted.
"""

from __future__ import annotations

import itertools
from collections import Counter

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

WITHOUT_LAUNCH = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


class EmulatedCUDA(TorchDispatchMode):
    def __init__(self, max_rows: int = 65_535, computes: bool = True) -> None:
        """max_rows: rows or keys that a call of cuDNN may have; computes: else shapes alone."""
        super().__init__()
        self.computes = computes
        self.max_rows = max_rows
        self.launches: Counter[str] = Counter()
        self._plans: dict[str, object] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if not func.is_view and name not in WITHOUT_LAUNCH and not is_copy_to_itself(func, args):
            self.launches[name] += 1
        if "_attention" in name and not self.computes:
            return shapes_alone(func, args, kwargs)
        match name:
            case "_flash_attention_forward":
                return flash_forward(*args, **kwargs)
            case "_flash_attention_backward":
                return flash_backward(*args, **kwargs)
            case "_scaled_dot_product_cudnn_attention":
                assert max(args[0].shape[2], args[1].shape[2]) <= self.max_rows
                return cudnn_forward(*args, **kwargs)
            case "_scaled_dot_product_cudnn_attention_backward":
                assert max(args[1].shape[2], args[2].shape[2]) <= self.max_rows
                self._refuse_a_second_layout(args)
                return cudnn_backward(*args, **kwargs)
        return func(*args, **kwargs)

    def _refuse_a_second_layout(self, args) -> None:
        """A cuDNN plan is kept by the layout of q, k, v, but has all layouts built in."""
        layouts = [
            [(size, stride) for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]
            for t in args[:6]
        ]
        first = self._plans.setdefault(str((layouts[1:4], args[14])), layouts)
        assert first == layouts, "dout, out or lse in another layout than the plan's"


def shapes_alone(func, args, kwargs):
    """What torch's own operator returns, with arbitrary values."""

    def as_tensor(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)

    given, named = tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
    return tree_map_only(Tensor, as_tensor, func(*given, **named))


def is_copy_to_itself(func, args) -> bool:
    """x[rows] += y writes x[rows] back to itself, which torch skips."""
    return (
        func is torch.ops.aten.copy_.default
        and args[0].data_ptr() == args[1].data_ptr()
        and args[0].stride() == args[1].stride()
    )


def window_bounds(num_keys, is_causal, left, right) -> tuple[int, int] | None:
    """Keys that a row sees left and right of its own, by the rule of torch's flash_api.cpp: where
    one side has a bound, the other side without one is as wide as there are keys. None: all."""
    left, right = (-1 if w is None or w >= num_keys else w for w in (left, right))
    right = 0 if is_causal else right
    if left < 0 and right < 0:
        return None
    return num_keys if left < 0 else left, num_keys if right < 0 else right


def seen_keys(num_rows, num_keys, is_causal, left, right) -> Tensor:
    """(T, S) bool; the last row stands at the last key."""
    found = window_bounds(num_keys, is_causal, left, right)
    if found is None:
        return torch.ones(num_rows, num_keys, dtype=torch.bool)
    at = torch.arange(num_rows)[:, None] + num_keys - num_rows
    key = torch.arange(num_keys)[None]
    return (key >= at - found[0]) & (key <= at + found[1])


def dense_forward(q, k, v, seen, scale):
    """q (N, T, H), k and v (K, S, H) -> out (N, T, H), lse (N, T), in float64.

    A row that sees nothing gets zeros and +inf, as the kernel's does.
    """
    k, v = (t.double().repeat_interleave(q.shape[0] // t.shape[0], 0) for t in (k, v))
    scores = (q.double() @ k.mT * scale).masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1).masked_fill(~seen.any(-1), torch.inf)
    return scores.softmax(-1).nan_to_num() @ v, lse


def dense_backward(dout, q, k, v, out, lse, seen, scale):
    groups = (k.shape[0], -1)
    wide_k, wide_v = (t.double().repeat_interleave(q.shape[0] // t.shape[0], 0) for t in (k, v))
    scores = (q.double() @ wide_k.mT * scale).masked_fill(~seen, -torch.inf)
    probabilities = torch.exp(scores - lse.double()[..., None])
    dout, out = dout.double(), out.double()
    dscores = probabilities * (dout @ wide_v.mT - (dout * out).sum(-1, keepdim=True)) * scale
    dk = (dscores.mT @ q.double()).unflatten(0, groups).sum(1)
    dv = (probabilities.mT @ dout).unflatten(0, groups).sum(1)
    return dscores @ wide_k, dk, dv


def spans(x, y, cum_seq_q, cum_seq_k):
    """Indices of each sequence's rows in x and keys in y, of one call of flash attention."""
    if cum_seq_q is None:
        return [((i, slice(None)), (i, slice(None))) for i in range(x.shape[0])]
    for ends, size in ((cum_seq_q, x.shape[0]), (cum_seq_k, y.shape[0])):
        assert ends.dtype == torch.int32 and ends.is_contiguous()
        assert int(ends[0]) == 0 and int(ends[-1]) == size
    q_spans, k_spans = (
        [slice(a, b) for a, b in itertools.pairwise(ends.tolist())]
        for ends in (cum_seq_q, cum_seq_k)
    )
    return [((q,), (k,)) for q, k in zip(q_spans, k_spans, strict=True)]


def check_inputs(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.stride(-1) == 1, "the last dimension must be dense"


def flash_forward(
    q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout, is_causal, debug, *,
    scale, window_size_left=None, window_size_right=None,
):  # fmt: skip
    check_inputs(q, k, v)
    assert dropout == 0 and not debug and q.ndim == (4 if cum_seq_q is None else 3)
    out = torch.empty_like(q)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads = q.shape[-2]
    if cum_seq_q is None:
        assert (max_q, max_k) == (q.shape[1], k.shape[1])
        lse = torch.empty(q.shape[0], heads, q.shape[1], dtype=wide)
    else:
        assert max_q > 1, "for single tokens the kernel takes a path of its own"
        lse = torch.empty(heads, q.shape[0], dtype=wide)
    for rows, keys in spans(q, k, cum_seq_q, cum_seq_k):
        mine = [t.transpose(0, 1) for t in (q[rows], k[keys], v[keys])]
        assert mine[0].shape[1] <= max_q and mine[1].shape[1] <= max_k
        seen = seen_keys(
            mine[0].shape[1], mine[1].shape[1], is_causal, window_size_left, window_size_right
        )
        own_out, own_lse = dense_forward(*mine, seen, scale)
        out[rows] = own_out.transpose(0, 1).to(q.dtype)
        lse[(*rows[:-1], slice(None), rows[-1])] = own_lse.to(wide)
    unused = torch.empty(2)
    return out, lse, unused, unused, unused


def flash_backward(
    dout, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout, is_causal, state, unused,
    *, scale, window_size_left=None, window_size_right=None,
):  # fmt: skip
    check_inputs(dout, q, k, v, out)
    assert lse.is_contiguous(), "the kernel reads it without strides"
    assert out.dtype == dout.dtype == q.dtype
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for rows, keys in spans(q, k, cum_seq_q, cum_seq_k):
        dout_, q_, out_ = (t[rows].transpose(0, 1) for t in (dout, q, out))
        k_, v_ = (t[keys].transpose(0, 1) for t in (k, v))
        seen = seen_keys(q_.shape[1], k_.shape[1], is_causal, window_size_left, window_size_right)
        own_lse = lse[(*rows[:-1], slice(None), rows[-1])]
        grads = dense_backward(dout_, q_, k_, v_, out_, own_lse, seen, scale)
        for whole, at, grad in zip((dq, dk, dv), (rows, keys, keys), grads, strict=True):
            whole[at] = grad.transpose(0, 1).to(whole.dtype)
    return dq, dk, dv


def cudnn_forward(
    q, k, v, bias, with_lse, dropout=0.0, is_causal=False, debug=False, *, scale
):  # fmt: skip
    check_inputs(q, k, v)
    assert bias is None and with_lse and dropout == 0 and not debug
    assert not is_causal or q.shape[2] == k.shape[2]
    seen = seen_keys(q.shape[2], k.shape[2], is_causal, None, None)
    out, lse = dense_forward(q[0], k[0], v[0], seen, scale)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    like_q = torch.empty_like(q[..., : v.shape[-1]]).copy_(out[None])
    unused = torch.empty(())
    return (
        like_q, lse.to(wide)[None, ..., None], unused, unused, q.shape[2], k.shape[2],
        unused, unused, unused,
    )  # fmt: skip


def cudnn_backward(
    dout, q, k, v, out, lse, seed, offset, bias, cum_seq_q, cum_seq_k, max_q, max_k, dropout,
    is_causal, *, scale,
):  # fmt: skip
    check_inputs(dout, q, k, v, out)
    assert lse.shape == (*q.shape[:3], 1) and lse.is_contiguous()
    assert bias is None and cum_seq_q is None and (max_q, max_k) == (q.shape[2], k.shape[2])
    seen = seen_keys(max_q, max_k, is_causal, None, None)
    grads = dense_backward(dout[0], q[0], k[0], v[0], out[0], lse[0, ..., 0], seen, scale)
    return tuple(torch.empty_like(t).copy_(g[None]) for t, g in zip((q, k, v), grads, strict=True))
