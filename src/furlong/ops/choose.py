"""Which backend computes attention on a device: probed once, chosen aloud, then kept."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from furlong.ops.backend import Backend, Block
from furlong.ops.cpu_flash import CPUFlash
from furlong.ops.cuda_flash import CUDNN, CUDAFlash
from furlong.ops.reference import Reference


class ProbedBackend:
    """A backend that takes, for each device, dtype and head dim, the fastest one that is right.

    A model may have several head dims; which, its first attention tells.
    """

    def __init__(self) -> None:
        self._chosen: dict[tuple[torch.device, torch.dtype, int], Backend] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        return self._of(q).forward(q, k, v, block)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._of(q).backward(dout, q, k, v, out, lse, block)

    def _of(self, q: Tensor) -> Backend:
        key = q.device, q.dtype, q.shape[-1]
        if key not in self._chosen:
            self._chosen[key] = choose_backend(*key)
        return self._chosen[key]


def choose_backend(device: torch.device, dtype: torch.dtype, head_dim: int) -> Backend:
    """The fastest backend that agrees with the reference here; the caller keeps it.

    Each candidate is probed once on a small block, values and gradients. One that fails is left
    out with a message: a kernel must never be chosen silently, nor be wrong silently.
    """
    candidates: list[Backend] = []
    if device.type == "cpu":
        candidates = [CPUFlash()]
    elif device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        candidates = [CUDNN(), CUDAFlash()]
    for candidate in candidates:
        fault = _probe(candidate, device, dtype, head_dim)
        if fault is None:
            return candidate
        logging.getLogger(__name__).warning(
            "attention backend %s left out on %s for %s, head dim %d: %s",
            type(candidate).__name__, device, dtype, head_dim, fault,
        )  # fmt: skip
    return Reference()


def _probe(backend: Backend, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """None if the backend agrees with the reference on a causal and a full block, else why not."""
    generator = torch.Generator().manual_seed(0)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4}.get(dtype, 3e-2)
    num_rows = 48
    for num_keys, distance in ((num_rows, 0), (80, 80)):
        q, dout = (
            torch.randn(4, num_rows, head_dim, generator=generator, device="cpu") for _ in range(2)
        )
        k, v = (
            torch.randn(2, num_keys, head_dim, generator=generator, device="cpu") for _ in range(2)
        )
        q, dout, k, v = (t.to(device, dtype) for t in (q, dout, k, v))
        block = Block(distance, head_dim**-0.5)
        wide_q, wide_k, wide_v = q.double(), k.double(), v.double()
        out, lse = Reference().forward(wide_q, wide_k, wide_v, block)
        grads = Reference().backward(dout.double(), wide_q, wide_k, wide_v, out, lse, block)
        expected = (out, lse, *grads)
        try:
            mine = backend.forward(q, k, v, block)
            given = (*mine, *backend.backward(dout, q, k, v, *mine, block))
        except (RuntimeError, NotImplementedError) as error:
            return str(error).splitlines()[0]
        for value, truth in zip(given, expected, strict=True):
            relative = float((value.double() - truth).norm() / truth.norm())
            if not relative <= tolerance:
                return f"relative error {relative:.1e} against the reference"
    return None
