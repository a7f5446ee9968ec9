"""The start-up check of recurrent layers: each kind alone, whole and in slices.

Gradients of a whole model tell too little: a state that is dropped moves them by less than float32
rounds. So one mixer of each kind is given random hidden states, whole and cut into chunks, one of
them of a single token. The loss is at the last chunk, and gradients are compared by the rows that
reach it through the recurrent state alone: those in front of what its convolution joins.

    T tokens, D hidden size, K tokens that a convolution joins
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from furlong.errors import UnsupportedModelError
from furlong.kv.arena import Arena
from furlong.kv.pools.device import DevicePool
from furlong.kv.store import KVStore
from furlong.models.attention import bound
from furlong.models.causal_lm import CausalLM
from furlong.models.mixers.caches import SliceCache
from furlong.models.mixers.find import Called, calls_of
from furlong.models.mixers.relay import Mixer, first, relaying
from furlong.models.switches import own_forward
from furlong.ops.backend import Backend
from furlong.plan.passes import Pass
from furlong.plan.plan import Chunk, ChunkPlan, Slice, piece_lens
from furlong.runtime.cells.cell import Cell
from furlong.runtime.cells.layout import chunk_pieces, rows_on
from furlong.runtime.checks.differences import relative

_LENS = (20, 19, 1, 20)
_ROWS = 4
"""Rows in front of the last chunk whose gradients are compared by themselves: those behind decay
least."""
_BOUND, _NARROW_BOUND = 1e-3, 1e-2
"""Bounds for weights and tables in float32, and in 16 bits, to which some families round decays. A
state that is dropped is at 1."""
_LEAST_SHARE = 1e-3
"""The least share in the gradient of all earlier rows that the compared ones are taken to have:
less may be the rounding of others."""


def mixer_errors(model: CausalLM, backend: Backend) -> list[float]:
    """The largest relative error of each kind of mixer; raises UnsupportedModelError for one that
    is no longer itself in slices. A mixer of a 16-bit type is compared in float32."""
    kinds = {type(mixer.module): mixer for mixer in reversed(model.probed.mixers)}
    if not kinds:
        return []
    with own_forward(model.base, model.max_seq_len):
        return _errors_of(model, list(kinds.values()), backend)


def _errors_of(model: CausalLM, mixers: Sequence[Mixer], backend: Backend) -> list[float]:
    found = []
    for given in calls_of(model, mixers, sum(_LENS)):
        bound_ = _NARROW_BOUND if given.inputs.x.dtype.itemsize < 4 else _BOUND
        called = _wide(given)
        x = _random_like(called.inputs.x)
        with torch.enable_grad():
            truth, width = _whole(called, x)
            errors = _errors(_in_slices(model, called, x, backend), truth, width)
        for name, error in errors.items():
            if not error <= bound_:
                kind = type(called.mixer.module).__name__
                raise UnsupportedModelError(
                    given=f"{model.name}, whose {kind} (layer {called.mixer.layer}) gives other "
                    f"{name} in slices than whole (relative error {error:.1e})",
                    required=f"a relative error of at most {bound_:.0e}: tokens meet in the states "
                    "that its layers keep in their cache",
                    source="the start-up self-check",
                    change="train a model of another family, or report this one",
                )
        found.append(max(errors.values()))
    return found


def _wide(called: Called) -> Called:
    """A copy of a mixer that computes in float32 if it has a 16-bit type."""
    dtype = called.inputs.x.dtype
    if dtype.itemsize > 2:
        return called
    mixer = Mixer(deepcopy(called.mixer.module).to(torch.float32), called.mixer.layer)
    return Called(mixer, called.inputs.to(torch.float32))


def _whole(called: Called, x: Tensor) -> tuple[tuple[Tensor, Tensor], int]:
    """Output (T, D) of all tokens and gradient (T, D) by them, and the width of the convolution."""
    leaf = x.clone().requires_grad_()
    cache = SliceCache({}, x.shape[1])
    args, kwargs = called.inputs.of(leaf, lambda of_tokens: of_tokens, cache)
    y = first(called.mixer.module(*args, **kwargs))
    (grad,) = torch.autograd.grad(y, leaf, _cotangent(y))
    widths = [state.shape[-1] for (kind, _), state in cache.after.items() if kind == "conv"]
    return (y.detach()[0], grad[0]), max(widths, default=0)


def _in_slices(
    model: CausalLM, called: Called, x: Tensor, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Output and gradient (T, D), see `_whole`, in chunks of one sequence, backwards descending."""
    cuts = list(pairwise(accumulate(_LENS, initial=0)))
    chunks = tuple(Chunk((Slice(0, start, stop),)) for start, stop in cuts)
    plan = ChunkPlan((sum(_LENS),), chunks, (model.num_layers,), ((),))
    arena, mixer = Arena(model.device), called.mixer
    store, rows_of = KVStore(arena, piece_lens(plan)), rows_on(model, plan)
    leaves, outputs = [], []
    with relaying([mixer]):
        for index, (start, stop) in enumerate(cuts):
            leaves.append(x[:, start:stop].clone().requires_grad_())
            cell = Cell(
                rows_of(chunks[index]), chunk_pieces(plan, index), store, backend,
                DevicePool(arena), range(model.num_layers), model.events,
            )  # fmt: skip
            take = partial(_rows, slice(start, stop))
            args, kwargs = called.inputs.of(leaves[-1], take, SliceCache({}, 0))
            positions = torch.arange(start, stop, device=x.device)
            with bound([mixer.module], cell, Pass("graph", writes_kv=True), positions):
                outputs.append(first(mixer.module(*args, **kwargs)))
        cotangents = _cotangent(torch.cat([y.detach() for y in outputs], 1)).split(_LENS, 1)
        grads = [
            torch.autograd.grad(y, leaf, cotangent)[0][0]
            for y, leaf, cotangent in reversed(list(zip(outputs, leaves, cotangents, strict=True)))
        ]
    return torch.cat([y.detach()[0] for y in outputs]), torch.cat(grads[::-1])


def _rows(rows: slice, of_tokens: Tensor) -> Tensor:
    return of_tokens[:, rows]


def _errors(
    given: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor], width: int
) -> dict[str, float]:
    """Relative errors by the name of what is compared."""
    (y, grad), (own_y, own_grad) = given, truth
    cut = sum(_LENS[:-1])
    rows = slice(cut - width - _ROWS + 1, cut - width + 1)
    floor = _LEAST_SHARE * float(own_grad[:cut].double().norm())
    return {
        "outputs": relative(y, own_y),
        "gradients": relative(grad[:cut], own_grad[:cut]),
        "gradients through its state": relative(grad[rows], own_grad[rows], floor),
    }


def _random_like(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(x.shape, generator=generator, device="cpu").to(x)


def _cotangent(y: Tensor) -> Tensor:
    """A random direction (1, T, D) at the tokens of the last chunk."""
    cotangent = torch.zeros_like(y)
    cotangent[:, -_LENS[-1] :] = _random_like(y[:, -_LENS[-1] :])
    return cotangent
