"""Choose the attention backend of a device: each is probed once, and the choice is logged."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from furlong.errors import ElsewhereError, first_line
from furlong.ops.backends.base import Backend, Block, Tally
from furlong.ops.backends.cpu_flash import CPUFlash
from furlong.ops.backends.cuda_flash import CUDAFlash, CUDAFlash4, flash_3, flash_4
from furlong.ops.backends.cudnn import CUDNN, is_trusted
from furlong.ops.backends.reference import Reference

_NO_MEMORY_ON_CPU = "can't allocate memory"  # torch's CPU allocator raises a RuntimeError


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is an out-of-memory error of this process, on a GPU or on a CPU."""
    if isinstance(error, ElsewhereError):  # it quotes the error of another process
        return False
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        _NO_MEMORY_ON_CPU in str(error)
    )


def is_of_machine(error: BaseException) -> bool:
    """Whether an error is caused by memory or files, not by the model whose code raised it."""
    return is_out_of_memory(error) or isinstance(error, OSError)


_REFUSALS = (RuntimeError, NotImplementedError)
_FATAL = (torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors after which the next backend would fail as well."""
_LARGE_PROBE = 256
"""Rows of a block that reaches the kernels for large blocks."""


@dataclass(frozen=True, slots=True)
class CallKind:
    """A kind of attention call, for which a backend is chosen: all properties but sizes."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    is_windowed: bool = False
    is_capped: bool = False
    is_token_major: bool = True
    """Whether q's memory layout is (T, N, H), as a projection leaves it."""
    value_width: int | None = None

    @classmethod
    def of(cls, q: Tensor, block: Block) -> CallKind:
        return cls(
            q.device, q.dtype, q.shape[-1], block.window is not None, block.softcap is not None,
            q.stride(0) <= q.stride(1), block.value_width,
        )  # fmt: skip

    def __str__(self) -> str:
        text = f"{self.dtype}, head dim {self.head_dim}"
        if self.value_width is not None:
            text += f", values of {self.value_width}"
        return text + ", windows" * self.is_windowed + ", softcap" * self.is_capped


class ProbedBackend(Backend):
    """A backend that chooses one backend for each kind of attention call: the fastest that passes
    its probe, a comparison with the reference.

    The choice is made at the first call of a kind. If the chosen backend refuses a call in the
    middle of a run, the next fastest one is probed and takes over calls of that kind.
    """

    def __init__(self) -> None:
        self._chosen: dict[CallKind, Backend] = {}
        self._untried: dict[CallKind, list[Backend]] = {}
        self.tally: Tally = Tally()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        return self._call("forward", q, k, v, block)  # type: ignore[no-any-return]

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._call("backward", dout, q, k, v, out, lse, block)  # type: ignore[no-any-return]

    def _call(self, what: str, *given: Any) -> Any:
        q, k = given[:2] if what == "forward" else given[1:3]
        kind = CallKind.of(q, given[-1])
        while True:
            if kind not in self._chosen:
                untried = self._untried.setdefault(kind, fitting_backends(kind))
                self._chosen[kind] = choose_backend(kind, untried)
                self._chosen[kind].tally = self.tally  # set after the probe, which must not count
            own = self._chosen[kind]
            if isinstance(own, Reference) and kind.device.type == "cuda":
                self.count("the reference", q, k, given[-1], backward=what == "backward")
            try:
                return getattr(own, what)(*given)
            except _REFUSALS as error:
                if isinstance(own, CPUFlash | Reference) or isinstance(error, _FATAL):
                    raise
                del self._chosen[kind]
                logging.getLogger(__name__).warning(
                    "attention backend %s refuses a %s of %d rows and %d keys on %s for %s (%s): "
                    "the next one takes its place", type(own).__name__, what, q.shape[1],
                    k.shape[1], kind.device, kind, first_line(error),
                )  # fmt: skip


def fitting_backends(kind: CallKind) -> list[Backend]:
    """Return the backends that may serve a kind of call, the fastest last."""
    if kind.device.type == "cpu":
        return [CPUFlash()]
    if kind.device.type != "cuda" or kind.dtype not in (torch.bfloat16, torch.float16):
        return []
    fourth = flash_4(kind.device)
    if kind.is_capped:
        return [fourth] if fourth else []
    found: list[Backend] = [CUDAFlash()]
    if is_trusted(kind.device):
        found.append(CUDNN())
    return found + [x for x in (fourth, flash_3(kind.device)) if x is not None]


def fastest(kind: CallKind) -> str:
    """Return the name of the fastest backend that may serve a kind of call, without a probe."""
    *_, last = [Reference(), *fitting_backends(kind)]
    return "cuDNN" if isinstance(last, CUDNN) else getattr(last, "name", "the reference")


def choose_backend(kind: CallKind, untried: list[Backend] | None = None) -> Backend:
    """Return the last of the backends `untried` that agrees with the reference, or the reference
    itself if none does. `untried`: candidates, the fastest last (None: all that may serve this kind
    of call). Each backend that is probed is removed from this list, also the one that is returned.

    Each backend is probed once on small blocks, values and gradients. A warning names each backend
    that fails, and another one a CUDA device for which only the reference is left: a kernel must be
    neither chosen nor wrong silently.
    """
    log, is_cuda = logging.getLogger(__name__), kind.device.type == "cuda"
    untried = fitting_backends(kind) if untried is None else untried
    while untried:
        candidate = untried.pop()
        name, fault = type(candidate).__name__, _probe(candidate, kind)
        if fault is None:
            if is_cuda:
                log.info("attention on %s for %s: backend %s", kind.device, kind, name)
            return candidate
        log.warning(
            "attention backend %s left out on %s for %s: %s", name, kind.device, kind, fault
        )
    if is_cuda:
        log.warning(
            "attention on %s for %s takes the plain reference, which is slow: %s", kind.device,
            kind, _why_none(kind) or "no fused kernel is left",
        )  # fmt: skip
    return Reference()


def _why_none(kind: CallKind) -> str:
    """Return why no fused kernel exists for a kind of call; "" if one does."""
    if kind.dtype not in (torch.bfloat16, torch.float16):
        return "the fused kernels compute in 16 bits, train in bfloat16 to have them"
    if kind.is_capped:
        return "of fused kernels FlashAttention 4 alone has softcap: pip install --pre flash-attn-4"
    return ""


def _probe(backend: Backend, kind: CallKind) -> str | None:
    """Compare a backend with the reference on blocks of a kind; return what is wrong, or None."""
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4}.get(kind.dtype, 3e-2)
    for num_rows, num_keys, block in _probes(
        kind, has_tiles=isinstance(backend, CUDNN | CUDAFlash4)
    ):
        q, dout, k, v = _drawn(kind, num_rows, num_keys)
        wide = (dout.double(), q.double(), k.double(), v.double())
        expected = _computed(Reference(), *wide, block)
        try:
            given = _computed(backend, dout, q, k, v, block)
        except _REFUSALS as error:
            return first_line(error)
        for value, truth in zip(given, expected, strict=True):
            relative = float((value.double() - truth).norm() / truth.norm())
            if not relative <= tolerance:
                return f"relative error {relative:.1e} against the reference"
    return None


def _drawn(kind: CallKind, num_rows: int, num_keys: int) -> tuple[Tensor, ...]:
    """Draw q and dout (4, T, H), k and v (2, S, H), with the strides that q and stored K,V have.

    On large blocks all scores are shifted down by a constant, which changes no probability: massive
    activations make log-sum-exps as low.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        x = torch.randn(*shape, kind.head_dim, generator=generator, device="cpu")
        return x.to(kind.device, kind.dtype)

    sizes = (num_rows, 4) if kind.is_token_major else (4, num_rows)
    q, dout, kv = draw(*sizes), draw(*sizes), draw(num_keys, 2, 2)
    if num_rows >= _LARGE_PROBE and not kind.is_windowed:
        shift = (120 * kind.head_dim**0.5) ** 0.5
        q[..., 0], kv[:, 0, :, 0] = shift, -shift
    if kind.value_width is not None:
        dout[..., kind.value_width :], kv[:, 1, :, kind.value_width :] = 0, 0
    if kind.is_token_major:
        q, dout = q.transpose(0, 1), dout.transpose(0, 1)
    return q, dout, kv[:, 0].transpose(0, 1), kv[:, 1].transpose(0, 1)


def _probes(kind: CallKind, *, has_tiles: bool) -> Iterator[tuple[int, int, Block]]:
    """Yield triples (number of rows, number of keys, block) that test a kind of call. The blocks
    are a causal square, packed slices, and earlier keys. With a window there are also blocks that
    the window does not limit, and one with fewer keys than rows. `has_tiles`: also yield large
    blocks."""
    softcap = 20.0 if kind.is_capped else None
    rule = Block(0, kind.head_dim**-0.5, None, softcap, kind.value_width)
    num_rows = 48

    def probe(num_keys: int, distance: int, window: int, *squares: slice) -> tuple[int, int, Block]:
        shown = window if kind.is_windowed else None
        block = replace(rule, distance=distance, window=shown, squares=squares)
        return num_rows, num_keys, block

    yield probe(48, 0, 7)
    yield probe(48, 0, 7, slice(0, 1), slice(1, 17), slice(17, 48))
    yield probe(80, 80, 100)
    if kind.is_windowed:
        yield probe(48, 0, 1000)
        yield probe(80, 80, 1000)
        yield probe(10, 10, 50)
    if has_tiles:
        num_rows = _LARGE_PROBE
        yield probe(num_rows, 0, 1000)
        yield probe(384, 384, 1000)
        yield probe(1100, 1100, 2000)
        num_rows = 1100
        yield probe(num_rows, 0, 2000)
        yield probe(384, 384, 2000)


def _computed(
    backend: Backend, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, block: Block
) -> tuple[Tensor, ...]:
    out, lse = backend.forward(q, k, v, block)
    return out, lse, *backend.backward(dout, q, k, v, out, lse, block)
