"""The head: the loss, or values or hidden states, of a chunk's final hidden states.

Values and hidden states leave the step in the first phase of a plan (`two_phase`); the second gives
back the gradient of what the caller has made of them. A fixed projection of each row is compared
between the two: a norm would see nothing, for behind an RMS norm it is constant.

    T tokens, of a chunk or of a sequence; D hidden size; R labels; k values
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from furlong.cost.memory import tile_tokens
from furlong.errors import ConfigError
from furlong.models.decoder import HFDecoder
from furlong.ops.loss import TiledHead, label_losses
from furlong.plan.plan import ChunkPlan
from furlong.plan.rows import Run
from furlong.runtime.batch import WEIGHTS, Batch, ChunkTargets, sent_to
from furlong.values import Extras, TokenFunction


class LossHead:
    """The summed loss of one step, added up on the device."""

    def __init__(
        self, model: HFDecoder, plan: ChunkPlan, batch: Batch,
        function: TokenFunction = label_losses,
    ) -> None:  # fmt: skip
        """`function`: its values (t,) are summed, each as often as `token_weights` say."""
        self._model, self._batch = model, batch
        self._estimates = not plan.report_loss
        """Whether chunks that were not drawn have no loss here."""
        self._tiled = _tiled(model, partial(_weighted, function), source="token_loss",
                             takes_columns=False)  # fmt: skip
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=model.device)
        seq_lens = () if plan.trained else batch.seq_lens
        self.token_losses = [
            torch.zeros(n, dtype=torch.float64, device=model.device) for n in seq_lens
        ]
        """The loss of each token (T,) of each sequence, of a plan without backwards."""
        self._num_counted = 0.0
        """Labels of drawn chunks, each as often as its loss in `loss_sum`."""
        self.num_labels = 0
        """Labels of this process that a loss was taken of."""

    def evaluate(self, hidden: Tensor, targets: ChunkTargets) -> None:
        """Add a chunk's loss, and note that of each token, of final hidden states (T, D), in a pass
        without a graph."""
        extras = self._batch.extras_of(targets)
        values = self._tiled.forward(hidden, targets.labelled_rows, targets.labels, extras)
        if values is None:
            return
        losses = values.double()
        self.loss_sum += losses.sum()
        self.num_labels += len(targets.labels)
        if self.token_losses:
            for (index, tokens), own in _by_run(targets, losses):
                self.token_losses[index][sent_to(own.device, tokens - 1)] = own

    def gradient(
        self, hidden: Tensor, targets: ChunkTargets, loss_factor: float, num_valid_tokens: int
    ) -> Tensor:
        """Add a chunk's loss; the gradient (T, D) by the final hidden states of `loss_factor` times
        it, divided by the number of labels.

        The head's parameters get theirs. Raises ConfigError if no trained parameter is reached.
        """
        if not hidden.requires_grad:
            self._require_gradient(hidden)
        gradient, losses = self._tiled.backward(
            hidden, targets.labelled_rows, targets.labels, self._batch.extras_of(targets),
            self._scales(targets, loss_factor / num_valid_tokens),
        )  # fmt: skip
        weight = loss_factor if self._estimates else 1.0
        self.loss_sum += weight * losses.double().sum()
        self._num_counted += weight * len(targets.labels)
        self.num_labels += len(targets.labels)
        return gradient

    def no_rows(self, hidden: Tensor) -> None:
        """A backward through the head that changes no gradient, of hidden states (T, D): where
        several processes add up gradients, none may be missing."""
        _end_without_rows(self._model, hidden)

    def total(
        self, num_valid_tokens: int | None, add_up: Callable[[Tensor], Tensor]
    ) -> tuple[float, int]:
        """The summed loss of all ranks, and how many labels it is of. Of drawn chunks alone the
        loss is an estimate for `num_valid_tokens` labels from their mean, in which each weighs as
        in the gradient, and nan where none of them has a label."""
        counts = [0.0, self._num_counted, self.num_labels]
        own = sent_to(self.loss_sum.device, torch.tensor(counts, dtype=torch.float64, device="cpu"))
        own[0] = self.loss_sum
        loss_sum, num_counted, num_labels = add_up(own).tolist()
        if self.token_losses:
            lens = [len(losses) for losses in self.token_losses]
            for losses, total in zip(
                self.token_losses, add_up(torch.cat(self.token_losses)).split(lens), strict=True
            ):
                losses.copy_(total)
        if not self._estimates:
            return loss_sum, int(num_labels)
        assert num_valid_tokens is not None
        mean = loss_sum / num_counted if num_counted else math.nan
        return mean * num_valid_tokens, num_valid_tokens

    def _scales(self, targets: ChunkTargets, scale: float) -> Tensor:
        """How often the loss of each label counts in the gradient, (R,)."""
        of_all = torch.full(targets.labels.shape, scale, dtype=torch.float64, device="cpu")
        if self._batch.weights is not None:
            for (index, _), own in _by_run(targets, of_all):
                own *= self._batch.weights[index]
        return sent_to(targets.labels.device, of_all)

    def _require_gradient(self, hidden: Tensor) -> None:
        """Raise ConfigError if neither the decoder nor the head leads to a trained parameter."""
        with torch.enable_grad():
            logits = self._model.logits(hidden[:1].detach())
        if not logits.requires_grad:
            raise ConfigError(
                given=f"{self._model.name}, whose loss depends on no parameter that requires a "
                "gradient",
                required="a trained parameter that the forward uses",
                source="the model that was passed",
                change="call unmerge_adapter() on merged adapters, or train parameters in use",
            )


_MOST_MOVED = {torch.float64: 1e-6, torch.float32: 1e-3}


class OutputHead:
    """Values or final hidden states of each sequence of a call, whose loss is the caller's."""

    def __init__(
        self, model: HFDecoder, batch: Batch, function: TokenFunction | None,
        modes: Callable[[], AbstractContextManager[object]], *, is_rounded: bool,
    ) -> None:  # fmt: skip
        """`function`: its values (T,) or (T, k) are put out, 0 where a token has no label; None:
        hidden states (T, D) are. `modes`: torch's, within which the head runs. `is_rounded`: passes
        compute in 16 bits, whatever the dtype of hidden states."""
        self._model, self._batch, self._is_rounded = model, batch, is_rounded
        self.num_labels = 0
        """Labels of this process in what has run since the last `total`."""
        self._tiled = function and _tiled(model, function, modes=modes)
        self.token_losses: list[Tensor] = []
        self.cotangents: Sequence[Tensor | None] = ()
        self._outputs: list[Tensor] = []
        self._projection: Tensor | None = None
        self._met: dict[tuple[Run, ...], list[Tensor]] = {}
        self._moved: dict[tuple[Run, ...], Tensor] = {}

    def evaluate(self, hidden: Tensor, targets: ChunkTargets) -> None:
        """Put out what is of a chunk's final hidden states (T, D)."""
        self.num_labels += len(targets.labels)
        met = self._met[targets.rows.tokens] = [self._projected(hidden)]
        if self._tiled is None:
            for index, run, row in self._batch.runs(targets.rows):
                own = self._output(index, hidden)
                own[run.start : run.stop] = hidden[row : row + len(run)]
            return
        extras = self._batch.extras_of(targets)
        values = self._tiled.forward(hidden, targets.labelled_rows, targets.labels, extras)
        if values is None:
            return
        met.append(values)
        for (index, tokens), own in _by_run(targets, values):
            self._output(index, values)[sent_to(own.device, tokens)] = own

    def gradient(
        self, hidden: Tensor, targets: ChunkTargets, loss_factor: float, num_valid_tokens: int
    ) -> Tensor:
        """The gradient (T, D) of what was put out, whose own are `cotangents`."""
        self.num_labels += len(targets.labels)
        again = [self._projected(hidden.detach())]
        if self._tiled is None:
            wide = torch.promote_types(hidden.dtype, torch.float32)  # rows may be of many sequences
            gradient = torch.zeros_like(hidden, dtype=wide)
            for index, run, row in self._batch.runs(targets.rows):
                own = self.cotangents[index]
                if own is not None:
                    gradient[row : row + len(run)] += own[run.start : run.stop]
            gradient = gradient.to(hidden.dtype)
        elif not len(targets.labels) or all(self.cotangents[i] is None for i, _ in targets.tokens):
            gradient = torch.zeros_like(hidden)
        else:
            gradient, values = self._tiled.backward(
                hidden, targets.labelled_rows, targets.labels, self._batch.extras_of(targets),
                self._own_cotangents(targets),
            )  # fmt: skip
            again.append(values)
        if not targets.rows.tokens:
            return gradient  # of a chunk that has no token on this process
        met = self._met.pop(targets.rows.tokens)
        moved = [_moved(met[0], again[0], 1e-30)]
        for then, now in zip(met[1:], again[1:], strict=False):
            # such as a log-ratio, which is all rounding while the policy is the one that sampled
            moved.append(_moved(then, now, then.numel() ** 0.5))
        self._moved[targets.rows.tokens] = torch.stack(moved).max()
        return gradient

    def no_rows(self, hidden: Tensor) -> None:
        """See `LossHead`; hidden states do not go through the head."""
        if self._tiled is not None:
            _end_without_rows(self._model, hidden)

    def total(
        self, num_valid_tokens: int | None, add_up: Callable[[Tensor], Tensor]
    ) -> tuple[float, int]:
        """No loss, and the labels of all ranks."""
        own, self.num_labels = self.num_labels, 0
        return 0.0, int(add_up(torch.tensor([own], device="cpu")))

    def finish(self) -> list[Tensor]:
        """The outputs of each sequence, which are forgotten here: what the caller holds must not be
        held by the graph that made it."""
        found, self._outputs = self._outputs, []
        return found

    def require_unmoved(self, dtype: torch.dtype) -> None:
        """Raise ConfigError if the second phase has met other hidden states or values than the
        first one. `dtype` is that of the weights."""
        bound = 5e-2 if self._is_rounded else _MOST_MOVED.get(dtype, 5e-2)
        if not self._moved:
            return
        distances = torch.stack([*self._moved.values()]).tolist()
        for runs, moved in zip(self._moved, distances, strict=True):
            if not moved <= bound:
                seq_id, start, stop = runs[0]
                raise ConfigError(
                    given=f"tokens {start} to {stop} of sequence {seq_id}, whose hidden states or "
                    f"values moved by {moved:.1e} between forward and backward",
                    required="the model that the values were computed with",
                    source="the backward of token_values, hidden_states or a chunked model",
                    change="change weights, adapters and modes after the backward alone",
                )

    def _own_cotangents(self, targets: ChunkTargets) -> Tensor:
        """The cotangents (R, ...) of a chunk's labels, zeros of sequences that have none."""
        like = next(own for own in self.cotangents if own is not None)
        found = []
        for index, tokens in targets.tokens:
            own = self.cotangents[index]
            found.append(
                like.new_zeros((len(tokens), *like.shape[1:]))
                if own is None
                else own[sent_to(own.device, tokens)]
            )
        return torch.cat(found)

    def _output(self, index: int, like: Tensor) -> Tensor:
        """The output of a sequence, each entry of which is as one of `like`."""
        if not self._outputs:
            self._outputs = [like.new_zeros((n, *like.shape[1:])) for n in self._batch.seq_lens]
        return self._outputs[index]

    def _projected(self, hidden: Tensor) -> Tensor:
        """A number for each row of hidden states (T, D)."""
        wide = hidden if hidden.dtype == torch.float64 else hidden.float()
        if self._projection is None:
            generator = torch.Generator("cpu").manual_seed(0)
            drawn = torch.randn(hidden.shape[1], generator=generator, device="cpu")
            self._projection = sent_to(wide.device, drawn.to(wide.dtype))
        return wide @ self._projection


Head = LossHead | OutputHead


def _tiled(model: HFDecoder, function: TokenFunction, **more: Any) -> TiledHead:
    most_tokens = tile_tokens(model.vocab_size, model.device.type)
    return TiledHead(model.logits, function, most_tokens, **more)


def _end_without_rows(model: HFDecoder, hidden: Tensor) -> None:
    with torch.enable_grad():
        total = model.logits(hidden[:0].detach()).sum()
    if total.requires_grad:
        torch.autograd.backward(total)


def _weighted(function: TokenFunction, logits: Tensor, labels: Tensor, extras: Extras) -> Tensor:
    losses = function(logits, labels, extras)
    weights = extras.get(WEIGHTS)
    return losses if weights is None else losses * weights.to(losses.dtype)


def _by_run(targets: ChunkTargets, values: Tensor) -> Iterator[tuple[tuple[int, Tensor], Tensor]]:
    """The runs of a chunk's labels, each with its own of the values (R, ...)."""
    lens = [len(tokens) for _, tokens in targets.tokens]
    return zip(targets.tokens, values.split(lens), strict=True)


def _moved(then: Tensor, now: Tensor, least: float) -> Tensor:
    """The distance of two tensors, relative to the norm of the first or to `least`. An infinity, or
    what is no number, is as near as any other value to itself."""
    same = (now == then) | (now.isnan() & then.isnan())
    known = torch.where(then.isfinite(), then, 0)
    return torch.where(same, 0, now - then).norm() / known.norm().clamp(min=least)
