"""Which backend computes attention on a device: probed once, chosen aloud, then kept."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from furlong.ops.backend import Backend, Block
from furlong.ops.cpu_flash import CPUFlash
from furlong.ops.cuda_flash import CUDAFlash
from furlong.ops.cudnn import CUDNN
from furlong.ops.reference import Reference


class ProbedBackend(Backend):
    """A backend that takes, for each kind of attention, the fastest one that is right.

    A kind is a device, a dtype, a head dim, and whether there is a window and a softcap. A model
    may have several; which, its first attentions tell.
    """

    def __init__(self) -> None:
        self._chosen: dict[tuple[object, ...], Backend] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        return self._of(q, block).forward(q, k, v, block)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._of(q, block).backward(dout, q, k, v, out, lse, block)

    def packed_forward(
        self, q: Tensor, k: Tensor, v: Tensor, slices: Sequence[slice], block: Block
    ) -> tuple[Tensor, Tensor]:
        return self._of(q, block).packed_forward(q, k, v, slices, block)

    def packed_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        slices: Sequence[slice], block: Block,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return self._of(q, block).packed_backward(dout, q, k, v, out, lse, slices, block)

    def _of(self, q: Tensor, block: Block) -> Backend:
        is_windowed, is_capped = block.window is not None, block.softcap is not None
        key = q.device, q.dtype, q.shape[-1], is_windowed, is_capped
        if key not in self._chosen:
            self._chosen[key] = choose_backend(
                q.device, q.dtype, q.shape[-1], is_windowed=is_windowed, is_capped=is_capped
            )
        return self._chosen[key]


def choose_backend(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    is_windowed: bool = False,
    is_capped: bool = False,
) -> Backend:
    """The fastest backend that agrees with the reference here; the caller keeps it.

    Each candidate is probed once on small blocks, values and gradients. One that fails is left out
    with a message, and so is a CUDA device that has none: a kernel must never be chosen silently,
    nor be wrong silently.
    """
    log = logging.getLogger(__name__)
    kind = f"{dtype}, head dim {head_dim}" + ", windows" * is_windowed + ", softcap" * is_capped
    candidates: list[Backend] = []
    if device.type == "cpu":
        candidates = [CPUFlash()]
    elif device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and not is_capped:
        candidates = [CUDNN(), CUDAFlash()]
    for candidate in candidates:
        fault = _probe(candidate, device, dtype, head_dim, is_windowed, is_capped)
        if fault is None:
            return candidate
        log.warning(
            "attention backend %s left out on %s for %s: %s",
            type(candidate).__name__, device, kind, fault,
        )  # fmt: skip
    if device.type == "cuda":
        log.warning(
            "attention on %s for %s takes the plain reference, which is slow: %s", device, kind,
            "every fused kernel was left out" if candidates
            else "the fused kernels have no softcap" if is_capped
            else "the fused kernels compute in 16 bits, train in bfloat16 to have them",
        )  # fmt: skip
    return Reference()


def _probe(
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    is_windowed: bool,
    is_capped: bool,
) -> str | None:
    """None if the backend agrees with the reference on blocks of a kind, else why not."""
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4}.get(dtype, 3e-2)
    for num_keys, slices, block in _probes(head_dim, is_windowed, is_capped):
        generator = torch.Generator().manual_seed(0)
        q, dout, k, v = (
            torch.randn(heads, size, head_dim, generator=generator, device="cpu").to(device, dtype)
            for heads, size in ((4, 48), (4, 48), (2, num_keys), (2, num_keys))
        )
        wide = (dout.double(), q.double(), k.double(), v.double())
        expected = _computed(Reference(), *wide, slices, block)
        try:
            given = _computed(backend, dout, q, k, v, slices, block)
        except (RuntimeError, NotImplementedError) as error:
            return str(error).splitlines()[0]
        for value, truth in zip(given, expected, strict=True):
            relative = float((value.double() - truth).norm() / truth.norm())
            if not relative <= tolerance:
                return f"relative error {relative:.1e} against the reference"
    return None


def _probes(
    head_dim: int, is_windowed: bool, is_capped: bool
) -> Iterator[tuple[int, tuple[slice, ...], Block]]:
    """Number of keys, slices of 48 rows and rule of blocks that cover a kind of attention."""
    window, softcap = 100 if is_windowed else None, 20.0 if is_capped else None
    square = Block(0, head_dim**-0.5, 7 if is_windowed else None, softcap)
    yield 48, (slice(0, 48),), square
    yield 48, (slice(0, 1), slice(1, 17), slice(17, 48)), square
    yield 80, (slice(0, 48),), Block(80, head_dim**-0.5, window, softcap)


def _computed(
    backend: Backend, dout: Tensor, q: Tensor, k: Tensor, v: Tensor,
    slices: tuple[slice, ...], block: Block,
) -> tuple[Tensor, ...]:  # fmt: skip
    if len(slices) == 1:
        out, lse = backend.forward(q, k, v, block)
        return out, lse, *backend.backward(dout, q, k, v, out, lse, block)
    out, lse = backend.packed_forward(q, k, v, slices, block)
    return out, lse, *backend.packed_backward(dout, q, k, v, out, lse, slices, block)
