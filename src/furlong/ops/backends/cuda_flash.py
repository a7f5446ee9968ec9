"""Attention on CUDA with FlashAttention: version 2 of PyTorch, or version 4 or 3 if installed.

The functions called here return and take the log-sum-exp, so that blocks can be merged; the
backward gets the merged output and log-sum-exp, as in torch's context parallelism. The kernel
accepts any strides except in the last dimension, so that inputs and outputs need no copies."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from furlong.ops.backends.base import Backend, Block, lse_dtype

DATA_CENTER = {(9, 0), (10, 0), (10, 3)}
"""Compute capabilities of data-center Hopper and Blackwell."""
_FLASH_3 = "flash_attn_interface"
"""Module that registers the kernels of version 3."""


class CUDAFlash(Backend):
    """FlashAttention 2, with grouped heads, sliding windows and slices of any lengths.

    The backward of packed slices needs 128 float32 rows of scratch memory per slice in addition to
    the chunk's rows: 0.4 GB for 200 slices, 4,000 tokens and 28 heads of 128.
    """

    name = "FlashAttention 2"
    has_softcap = False

    def __init__(self) -> None:
        self._last_ends: tuple[object, Tensor] | None = None
        self._forward: Any = torch.ops.aten._flash_attention_forward
        self._backward: Any = torch.ops.aten._flash_attention_backward

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        if block.squares:
            ends, longest = self._ends(block.squares, q), _longest(block.squares)
            result = self._forward(
                _rows_first(q), _rows_first(k), _rows_first(v), ends, ends, longest, longest,
                0.0, True, False, **self._scores(block), **_square_window(block),
            )  # fmt: skip
            self.count(self.name, q, k, block)
            return result[0].transpose(0, 1), result[1]
        if apart := _rows_apart(q.shape[1], k.shape[1], block):
            outs, lses = zip(
                self.forward(q[:, :apart], k, v, block),
                self.forward(q[:, apart:], k, v, block.at(apart, 0)),
                strict=True,
            )
            return torch.cat(outs, 1), torch.cat(lses, 1)
        call = _call_for(q.shape[1], k.shape[1], block)
        if call.rows == 0:
            return _empty(q)
        rows, keys = slice(call.rows), slice(call.first_key, None)
        result = self._forward(
            _rows_first(q[:, rows])[None], _rows_first(k[:, keys])[None],
            _rows_first(v[:, keys])[None], None, None, call.rows, k.shape[1] - call.first_key,
            0.0, call.is_causal, False, **self._scores(block), **call.window,
        )  # fmt: skip
        self.count(self.name, q, k, block)
        seen_out, seen_lse = result[0][0].transpose(0, 1), result[1][0]
        if call.rows == q.shape[1]:
            return seen_out, seen_lse
        out, lse = _empty(q)
        out[:, rows], lse[:, rows] = seen_out, seen_lse
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)
        if block.squares:
            ends, longest = self._ends(block.squares, q), _longest(block.squares)
            dq, dk, dv = self._backward(
                *(_rows_first(x) for x in (dout, q, k, v, out)), lse.contiguous(), ends, ends,
                longest, longest, 0.0, True, unused, unused,
                **self._scores(block), **_square_window(block),
            )  # fmt: skip
            self.count(self.name, q, k, block, backward=True)
            return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)
        if apart := _rows_apart(q.shape[1], k.shape[1], block):
            (dq, dk, dv), (more_dq, more_dk, more_dv) = (
                self.backward(
                    dout[:, rows], q[:, rows], k, v, out[:, rows], lse[:, rows],
                    block.at(rows.start, 0),
                )
                for rows in (slice(0, apart), slice(apart, q.shape[1]))
            )  # fmt: skip
            return (
                torch.cat((dq, more_dq), 1),
                dk.to(lse.dtype) + more_dk,
                dv.to(lse.dtype) + more_dv,
            )
        call = _call_for(q.shape[1], k.shape[1], block)
        if call.rows == 0:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        rows, keys = slice(call.rows), slice(call.first_key, None)
        grads = self._backward(
            *(_rows_first(x)[None] for x in (dout[:, rows], q[:, rows], k[:, keys], v[:, keys])),
            _rows_first(out[:, rows])[None], lse[:, rows].contiguous()[None], None, None,
            call.rows, k.shape[1] - call.first_key, 0.0, call.is_causal, unused, unused,
            **self._scores(block), **call.window,
        )  # fmt: skip
        self.count(self.name, q, k, block, backward=True)
        dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
        return (
            _padded(dq, 0, q.shape[1]),
            _padded(dk, call.first_key, k.shape[1]),
            _padded(dv, call.first_key, k.shape[1]),
        )

    def _scores(self, block: Block) -> dict[str, float]:
        """Return the arguments for scale and softcap, or raise NotImplementedError for a softcap
        that the kernel lacks."""
        if block.softcap is None:
            return {"scale": block.scale}
        if not self.has_softcap:
            raise NotImplementedError(f"{self.name} has no softcap here")
        return {"scale": block.scale, "softcap": block.softcap}

    def _ends(self, slices: Sequence[slice], q: Tensor) -> Tensor:
        """Return `cu_seqlens` of the slices: 0 and the stop row of each one, int32 on q's device.

        The tensor is cached for the chunk's other layers, and copied without making the host wait.
        """
        stops = tuple(rows.stop for rows in slices)
        key = stops, q.device
        if self._last_ends is None or self._last_ends[0] != key:
            assert tuple(rows.start for rows in slices) == (0, *stops[:-1]), "slices leave gaps"
            assert stops[-1] == q.shape[1], "slices do not cover all rows"
            ends = torch.tensor((0, *stops), dtype=torch.int32, device="cpu")
            if q.is_cuda:
                ends = ends.pin_memory()
            self._last_ends = key, ends.to(q.device, non_blocking=True)
        return self._last_ends[1]


class CUDAFlash3(CUDAFlash):
    """FlashAttention 3, through the functions with which torch can replace its own operators.

    These functions are called directly, so that other callers of the operators are not affected.
    """

    name = "FlashAttention 3"

    def __init__(self, torch_fa3: Any) -> None:
        """`torch_fa3`: torch.nn.attention._fa3."""
        super().__init__()
        self._forward = torch_fa3._fa3_flash_attention_forward_impl_default
        self._backward = torch_fa3._fa3_flash_attention_backward_impl


def flash_3(device: torch.device) -> CUDAFlash3 | None:
    """Return FlashAttention 3 if installed, callable by this torch, and on a Hopper; else None."""
    if torch.cuda.get_device_capability(device) != (9, 0) or not find_spec(_FLASH_3):
        return None
    try:
        from torch.nn.attention import _fa3  # torch calls it a prototype

        _fa3._fa3_import_module(_FLASH_3)
        return CUDAFlash3(_fa3)
    except (ImportError, AttributeError, RuntimeError) as error:
        log = logging.getLogger(__name__)
        log.warning("flash attention 3 is installed and cannot be called: %s", error)
        return None


class CUDAFlash4(CUDAFlash):
    """FlashAttention 4, through the functions that its autograd function calls: torch's module for
    it unpacks fewer values than these return. Each kind of call is compiled on first use."""

    name = "FlashAttention 4"
    has_softcap = True

    def __init__(self, interface: Any) -> None:
        """`interface`: flash_attn.cute.interface."""
        super().__init__()
        self._forward, self._backward = self._forward_4, self._backward_4
        self._interface = interface

    def _forward_4(
        self, q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor | None, ends_k: Tensor | None,
        max_q: int, max_k: int, dropout: float, is_causal: bool, debug: bool, **scores: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        call = self._arguments(ends_q, ends_k, max_q, max_k, **scores)
        with _as_refusals():
            forward = self._interface._flash_attn_fwd
            out, lse, *_ = forward(q, k, v, causal=is_causal, return_lse=True, **call)
        return out, lse

    def _backward_4(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        ends_q: Tensor | None, ends_k: Tensor | None, max_q: int, max_k: int, dropout: float,
        is_causal: bool, *unused: Tensor, **scores: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        call = self._arguments(ends_q, ends_k, max_q, max_k, **scores)
        call["deterministic"] = torch.are_deterministic_algorithms_enabled()
        with _as_refusals():
            backward = self._interface._flash_attn_bwd
            dq, dk, dv = backward(q, k, v, out, dout, lse, causal=is_causal, **call)
        return dq, dk, dv

    def _arguments(
        self, ends_q: Tensor | None, ends_k: Tensor | None, max_q: int, max_k: int, *,
        scale: float, softcap: float = 0.0, window_size_left: int = -1, window_size_right: int = -1,
    ) -> dict[str, Any]:  # fmt: skip
        """Return arguments that forward and backward share; unbounded window sizes become None."""
        is_packed = ends_q is not None
        return {
            "softmax_scale": scale,
            "softcap": softcap,
            "window_size_left": None if window_size_left < 0 else window_size_left,
            "window_size_right": None if window_size_right < 0 else window_size_right,
            "cu_seqlens_q": ends_q,
            "cu_seqlens_k": ends_k,
            "max_seqlen_q": max_q if is_packed else None,
            "max_seqlen_k": max_k if is_packed else None,
        }


@contextmanager
def _as_refusals() -> Iterator[None]:
    """Context manager: turn errors of a kernel into RuntimeError, also failed assertions and errors
    of its compiler, which derive from Exception alone."""
    try:
        yield
    except RuntimeError:
        raise  # torch's own: an OutOfMemoryError must stay one
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def flash_4(device: torch.device) -> CUDAFlash4 | None:
    """Return FlashAttention 4 if installed, callable, and on a data-center Hopper or Blackwell."""
    if not find_spec("flash_attn") or torch.cuda.get_device_capability(device) not in DATA_CENTER:
        return None
    try:
        if find_spec("flash_attn.cute"):  # which version 2 does not bring
            return CUDAFlash4(import_module("flash_attn.cute.interface"))
    except Exception as error:  # whatever its compiler's import meets
        log = logging.getLogger(__name__)
        log.warning("flash attention 4 is installed and cannot be called: %s", error)
    return None


@dataclass(frozen=True, slots=True)
class _Call:
    """One dense call of the kernel, which aligns the last row with the last key."""

    rows: int
    """Number of leading rows, which see a key."""
    first_key: int
    """First key that a row sees."""
    is_causal: bool
    window: dict[str, Any]
    """Arguments for the keys that a row sees left and right of its own."""


def _rows_apart(num_rows: int, num_keys: int, block: Block) -> int:
    """Return the number of leading rows that need a separate kernel call. With a window and more
    rows than keys these are the rows that see every key; otherwise there are none.

    With a window on the left the kernel also limits the keys on the right, and would hide keys from
    these rows. The remaining rows are fewer than the keys.
    """
    if block.window is None or block.is_full(num_rows, num_keys) or num_rows <= num_keys:
        return 0
    return max(0, block.window - block.distance) if block.distance >= num_keys - 1 else 0


def _call_for(num_rows: int, num_keys: int, block: Block) -> _Call:
    """Return the kernel call for a block; NotImplementedError if one call cannot compute it."""
    if block.is_full(num_rows, num_keys):
        return _Call(num_rows, 0, False, {})
    if block.distance == 0 and num_rows == num_keys:
        return _Call(num_rows, 0, True, _square_window(block))
    if block.window is None and block.distance == num_keys - num_rows:
        return _Call(num_rows, 0, True, {})  # the last rows of a causal square
    if block.window is None or block.distance < num_keys - 1:
        raise NotImplementedError(f"flash attention has no call for {num_keys} keys of {block}")
    rows = block.visible_rows(num_rows, num_keys)
    if rows == 0:
        return _Call(0, 0, False, {})
    first = max(0, block.distance - block.window + 1)
    aligned = (num_keys - first) - rows  # the key, after the first, that the kernel gives row 0
    left = aligned - (block.distance - first) + block.window - 1
    assert aligned >= 0, "a window on the left hides keys on the right of rows beyond the last key"
    return _Call(rows, first, False, {"window_size_left": left, "window_size_right": -1})


def _square_window(block: Block) -> dict[str, Any]:
    if block.window is None:
        return {}
    return {"window_size_left": block.window - 1, "window_size_right": 0}


def _longest(slices: Sequence[slice]) -> int:
    """Return the rows of the longest slice, at least 2: for 1 the kernel takes a different path."""
    return max(2, *(rows.stop - rows.start for rows in slices))


def _rows_first(x: Tensor) -> Tensor:
    """Return x (N, T, H) as (T, N, H), FlashAttention's layout; copied if H is not contiguous."""
    return (x if x.stride(-1) == 1 else x.contiguous()).transpose(0, 1)


def _empty(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of rows that see no key."""
    return torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=lse_dtype(q.dtype))


def _padded(grad: Tensor, first: int, size: int) -> Tensor:
    """Pad grad (K, s, H) of rows or keys from `first` on with zeros to (K, size, H)."""
    if grad.shape[1] == size:
        return grad
    whole = grad.new_zeros((grad.shape[0], size, grad.shape[2]))
    whole[:, first : first + grad.shape[1]] = grad
    return whole
