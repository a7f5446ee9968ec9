"""The runs that the self-check compares: a model whole, and the same model in chunks.

Each yields final hidden states, logits, and the gradient by the input embeddings of a loss at the
last tokens of the long sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from furlong.errors import UnsupportedModelError
from furlong.kv.arena import Arena
from furlong.kv.pools.device import DevicePool
from furlong.kv.store import KVStore
from furlong.models.causal_lm import CausalLM
from furlong.models.wrappers import compiled_in_place
from furlong.ops.backend import Backend
from furlong.ops.layer_kv import AttentionRule
from furlong.ops.loss import IGNORE_INDEX
from furlong.plan.passes import Pass
from furlong.plan.plan import Chunk, ChunkPlan, Slice, piece_lens
from furlong.runtime.cells.cell import Cell
from furlong.runtime.cells.chunk_inputs import chunk_inputs
from furlong.runtime.cells.layout import chunk_pieces, rows_on
from furlong.runtime.inputs import ShiftedSequence

Run = dict[str, Tensor]
"""Tensors to compare, by name."""
GRADIENTS = "gradients"
_LOSS_TOKENS = 4
"""The last tokens of the long sequence, whose hidden states the loss is made of."""
_TILE_TOKENS = 3
_MIN_LOSS_SCALE = 2.0**-20


@dataclass
class WatchedCell(Cell):
    """A cell that notes the sliding window of every attention it computes, and adds to no weight's
    gradient."""

    adds_gradients: bool = False
    windows: list[int | None] = field(default_factory=list)

    def attend(
        self,
        what: Pass,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: AttentionRule,
        sinks: Tensor | None,
        source: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        self.windows.append(rule.window)
        return super().attend(what, layer, q, k, v, rule, sinks, source)


@dataclass
class Watch:
    """Observations of the runs of a check, besides their outcome."""

    leaves: list[Tensor] = field(default_factory=list)
    """Outputs of the input embeddings: each call's becomes a leaf for a gradient."""
    windows: set[int | None] = field(default_factory=set)
    """Sliding windows that chunked attention was given."""
    loss_scale: float = 1.0
    """Factor of the loss, so that its gradients fit into float16."""

    def cut(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        self.leaves.append(output.detach().requires_grad_())
        return self.leaves[-1].clone()  # some families scale it in place


@contextmanager
def watched(*models: CausalLM) -> Iterator[Watch]:
    """Within it the models' input embeddings are cut off from what follows, for a gradient."""
    watch = Watch()
    embeddings = dict.fromkeys(model.base.get_input_embeddings() for model in models)
    handles = [module.register_forward_hook(watch.cut) for module in embeddings]
    try:
        yield watch
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def rounded_again(model: CausalLM, *, seed: int) -> Iterator[None]:
    """Within it what attentions and the modules in them return is moved by rounding.

    That is by at most half a unit in the last place.
    """
    generator = torch.Generator(device=model.device).manual_seed(seed)

    def move(module: nn.Module, inputs: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor) or not first.is_floating_point():
            return output
        noise = torch.rand(first.shape, generator=generator, device=first.device) * 2 - 1
        moved = first * (1 + noise * torch.finfo(first.dtype).eps / 2)
        moved = moved.to(first.dtype)
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    parts = {part: None for module in model.attention_modules for part in module.modules()}
    handles = [part.register_forward_hook(move) for part in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def whole_run(
    model: CausalLM, ids: Sequence[Tensor], watch: Watch, logits: Tensor | None = None
) -> Run:
    """Tensors to compare, by the model itself, one sequence at a time.

    `logits` (T, V): the short sequence's, if they are known.
    """
    long, short = ids
    with torch.enable_grad():
        watch.leaves.clear()
        hidden = model.whole_hidden(long)
        _require_leaves(model, len(watch.leaves), 1)
        grad = _gradient(hidden, watch.leaves[0], _cotangent(hidden, len(long)), watch)
    logits = model.whole_logits(short) if logits is None else logits
    compared = {"hidden states": hidden.detach(), "logits": logits}
    return compared | {GRADIENTS: grad[0]}


def chunked_run(
    parts: Sequence[CausalLM],
    backend: Backend,
    heights: Sequence[int],
    ids: Sequence[Tensor],
    watch: Watch,
) -> Run:
    """The same in chunks and stages of `heights` layers, backwards descending.

    `parts`: for each stage a model that holds it; the whole model holds all.
    """
    length, num_short = (len(i) for i in ids)
    with torch.enable_grad():
        outputs = chunked_forwards(parts, backend, heights, ids, watch)
        grads = []
        for output, leaf in zip(reversed(outputs), reversed(watch.leaves), strict=True):
            is_last = output is outputs[-1]
            of_long = output[: len(output) - num_short] if is_last else output
            cotangent = _cotangent(of_long, length) if is_last else torch.zeros_like(output)
            cotangent *= watch.loss_scale
            grads.append(torch.autograd.grad(of_long, leaf, cotangent)[0][0])
    hidden = torch.cat([output.detach() for output in outputs])
    tiles = hidden[-num_short:].split(_TILE_TOKENS)  # a head that mixes tokens differs in tiles
    compared = {
        "hidden states": hidden[:-num_short],
        "logits": torch.cat([parts[-1].logits(tile) for tile in tiles]),
    }
    return compared | {GRADIENTS: torch.cat(grads[::-1])[:length]}


def _gradient(hidden: Tensor, leaf: Tensor, cotangent: Tensor, watch: Watch) -> Tensor:
    """The gradient (1, T, D) by the embeddings; scales the loss down until it fits float16."""
    may_overflow = hidden.dtype == torch.float16
    while True:
        (grad,) = torch.autograd.grad(
            hidden, leaf, cotangent * watch.loss_scale, retain_graph=may_overflow
        )
        too_large = not bool(grad.isfinite().all())
        if not (may_overflow and too_large and watch.loss_scale > _MIN_LOSS_SCALE):
            return grad
        watch.loss_scale /= 64


def chunked_forwards(
    parts: Sequence[CausalLM],
    backend: Backend,
    heights: Sequence[int],
    ids: Sequence[Tensor],
    watch: Watch,
) -> list[Tensor]:
    """Final hidden states (T, D) of each chunk, after stages of `heights` layers.

    The long sequence is cut in three; its tail shares a chunk with the short one. A stage runs for
    all chunks before the next: what layers leave for others beside hidden states is then lost.
    """
    length, short = (len(i) for i in ids)
    pieces = [Slice(0, start, stop) for start, stop in pairwise(cuts(length))]
    chunks = (*(Chunk((piece,)) for piece in pieces[:-1]), Chunk((pieces[-1], Slice(1, 0, short))))
    plan = ChunkPlan((length, short), chunks, tuple(heights), ((),))
    model = parts[0]
    arena = Arena(model.device)
    store = KVStore(arena, piece_lens(plan))
    stages = {part: part.stages(heights) for part in parts}
    labels = [torch.full(i.shape, IGNORE_INDEX, device="cpu") for i in ids]
    sequences = [ShiftedSequence(i, label) for i, label in zip(ids, labels, strict=True)]
    what = Pass("graph", writes_kv=True)
    watch.leaves.clear()
    rows_of = rows_on(model, plan)
    inputs = [chunk_inputs(rows_of(chunk), sequences, model.device) for chunk in chunks]
    hidden = [own.input_ids for own in inputs]
    with ExitStack() as installed:
        for part in stages:
            installed.enter_context(part.installed())
        for number, part in enumerate(parts):
            stage = stages[part][number]
            for index, own in enumerate(inputs):
                num_leaves = len(watch.leaves)
                cell = WatchedCell(
                    own.rows, chunk_pieces(plan, index), store, backend, DevicePool(arena),
                    stage.layers, stage.events,
                )  # fmt: skip
                hidden[index] = stage.run(hidden[index], own.position_ids, cell, what)
                cell.require_met(model.name)
                watch.windows.update(cell.windows)
                if torch.is_grad_enabled():
                    _require_leaves(model, len(watch.leaves) - num_leaves, int(stage.is_first))
    return hidden


def cuts(length: int) -> list[int]:
    """Where a sequence is cut: no piece is empty, the last one holds the tokens of the loss."""
    tail = max(1, length - max(_LOSS_TOKENS, length // 4))
    return sorted({0, length // 3, tail, length})


def _cotangent(hidden: Tensor, length: int) -> Tensor:
    """The gradient (T, D) of the loss by hidden states that end with the long sequence's last: a
    random direction at its last tokens, all of them in its last piece, and 0 before."""
    generator = torch.Generator().manual_seed(1)
    shape = (min(_LOSS_TOKENS, length - cuts(length)[-2]), hidden.shape[-1])
    cotangent = torch.zeros_like(hidden)
    cotangent[-shape[0] :] = torch.randn(shape, generator=generator, device="cpu").to(hidden)
    return cotangent


def _require_leaves(model: CausalLM, found: int, required: int) -> None:
    """Raise UnsupportedModelError unless a forward has called the input embeddings so often."""
    if found != required:
        raise refusal(
            model,
            f"calls its input embeddings {found} times in a forward",
            "a decoder that embeds its tokens once",
        )


def random_ids(model: CausalLM, lens: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    highest = min(model.vocab_size, model.num_input_ids)
    ids = [torch.randint(highest, (n,), generator=generator, device="cpu") for n in lens]
    return [i.to(model.device) for i in ids]


def refusal(
    model: CausalLM,
    what: str,
    required: str,
    change: str = "train a model of another family, or report this one",
) -> UnsupportedModelError:
    if compiled_in_place(model.base):
        what += ", with layers that are compiled in place"
        change = "leave out layer.compile()"
    return UnsupportedModelError(
        given=f"{model.name} {what}", required=required, source="the start-up self-check",
        change=change,
    )  # fmt: skip


def refuse_not_finite(model: CausalLM) -> None:
    """Raise UnsupportedModelError for a weight that is NaN or infinite."""
    for name, parameter in model.model.named_parameters():
        # a sum is finite if every term is, but for overflow: then each element is looked at
        if not bool(parameter.detach().sum(dtype=torch.float32).isfinite()) and not bool(
            parameter.detach().isfinite().all()
        ):
            raise UnsupportedModelError(
                given=f"{model.name} with weights in {name} that are not finite",
                required="finite weights",
                source="the weights of the model",
                change="load the weights again, or an earlier checkpoint",
            )
