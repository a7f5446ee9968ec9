"""The head: takes a chunk's final hidden states and computes the loss or, for a loss that the
caller computes, the outputs: token values or hidden states.

A plan for outputs has two phases (`ChunkPlan.two_phases`): all Forwards, which compute the outputs,
then all backwards, which start from the gradients of the caller's loss. A fixed random projection
of each row of hidden states is compared between the phases, to detect a changed model. (Row norms
would not do: they are constant after an RMS norm.)

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
from furlong.plan.rows import RowRun
from furlong.runtime.batch import WEIGHTS, Batch, ChunkTargets, sent_to
from furlong.runtime.routing import RouterLoss, RouterOutputs
from furlong.values import Extras, TokenFunction


class LossHead:
    """The loss of one step, summed on the device."""

    def __init__(
        self, model: HFDecoder, plan: ChunkPlan, batch: Batch,
        function: TokenFunction = label_losses,
    ) -> None:  # fmt: skip
        """`function`: returns token losses (t,), which are summed, weighted by `token_weights`."""
        self._model, self._batch = model, batch
        self._estimates = not plan.report_loss
        """True for a sampled plan that computes the loss of sampled chunks only."""
        self._tiled = _tiled(model, partial(_weighted, function), source="token_loss",
                             takes_columns=False)  # fmt: skip
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=model.device)
        seq_lens = () if plan.trained else batch.seq_lens
        self.token_losses = [
            torch.zeros(n, dtype=torch.float64, device=model.device) for n in seq_lens
        ]
        """Token losses (T,) of each sequence; empty for a plan with backwards."""
        self._num_counted = 0.0
        """Labels, weighted as their losses are in `loss_sum`."""
        self.num_labels = 0
        """Labels evaluated on this process."""
        self.routing: RouterLoss | None = None
        """The model's router loss, if it adds one."""

    def evaluate(self, hidden: Tensor, targets: ChunkTargets) -> None:
        """Compute a chunk's loss from final hidden states (T, D), without a graph. Add it to the
        step's loss, and store its token losses."""
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
        """Compute a chunk's loss from final hidden states (T, D), and add it to the step's loss.
        Return the gradient (T, D) of loss * loss_factor / num_valid_tokens with respect to
        `hidden`. Gradients of the head's parameters are accumulated.

        Raises ConfigError if the loss depends on no trained parameter.
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
        """Run a backward of the head on zero rows, so that its parameters have a gradient on every
        rank before the reduce-scatter. `hidden`: (T, D)."""
        _end_without_rows(self._model, hidden)

    def total(
        self, num_valid_tokens: int | None, add_up: Callable[[Tensor], Tensor]
    ) -> tuple[float, int]:
        """Return (summed loss, number of labels), both of all ranks. Token losses are summed over
        the ranks in place. `add_up`: an all-reduce.

        If the plan computes the loss of sampled chunks only, the sum is estimated: their mean loss,
        weighted as in the gradient, times `num_valid_tokens`. It is NaN without labels. The number
        of labels is then `num_valid_tokens`."""
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
        if self.routing is not None:
            loss_sum += self.routing.total(int(num_labels), add_up)
        if not self._estimates:
            return loss_sum, int(num_labels)
        assert num_valid_tokens is not None
        mean = loss_sum / num_counted if num_counted else math.nan
        return mean * num_valid_tokens, num_valid_tokens

    def _scales(self, targets: ChunkTargets, scale: float) -> Tensor:
        """Return the factor by which each label's loss enters the gradient, (R,) float64: `scale`,
        times the weight of the label's sequence if the batch has weights."""
        of_all = torch.full(targets.labels.shape, scale, dtype=torch.float64, device="cpu")
        if self._batch.weights is not None:
            for (index, _), own in _by_run(targets, of_all):
                own *= self._batch.weights[index]
        return sent_to(targets.labels.device, of_all)

    def _require_gradient(self, hidden: Tensor) -> None:
        """Raise ConfigError if neither `hidden` nor its logits depend on a trained parameter."""
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
    """Token values or final hidden states of each sequence, for a loss outside the step."""

    def __init__(
        self, model: HFDecoder, batch: Batch, function: TokenFunction | None,
        modes: Callable[[], AbstractContextManager[object]], *, is_rounded: bool,
    ) -> None:  # fmt: skip
        """
        Args:
            function: Returns the values of tokens that have a label, (t,) or (t, k). These are the
                outputs; they are 0 for other tokens. None: final hidden states (T, D) are the
                outputs.
            modes: Makes the context manager that the head runs in, such as an autocast.
            is_rounded: Whether passes compute in 16 bits, whatever the dtype of hidden states.
        """
        self._model, self._batch, self._is_rounded = model, batch, is_rounded
        self.num_labels = 0
        """Labels evaluated on this process since the last `total`."""
        self._tiled = function and _tiled(model, function, modes=modes)
        self.routing: RouterOutputs | None = None
        """Collector of router logits, if they are outputs."""
        self.token_losses: list[Tensor] = []
        self.cotangents: Sequence[Tensor | None] = ()
        self._outputs: list[Tensor] = []
        self._projection: Tensor | None = None
        self._met: dict[tuple[RowRun, ...], list[Tensor]] = {}
        self._moved: dict[tuple[RowRun, ...], Tensor] = {}

    def evaluate(self, hidden: Tensor, targets: ChunkTargets) -> None:
        """Store the outputs of a chunk's final hidden states (T, D)."""
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
        """Return the gradient (T, D) of the caller's loss with respect to `hidden`. It is computed
        from the attribute `cotangents`, which the caller sets before: the gradient of the loss with
        respect to each sequence's output. Gradients of the head's parameters are accumulated."""
        self.num_labels += len(targets.labels)
        again = [self._projected(hidden.detach())]
        if self._tiled is None:
            wide = torch.promote_types(hidden.dtype, torch.float32)  # sequences may share rows
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
            return gradient  # the chunk has no token on this process
        met = self._met.pop(targets.rows.tokens)
        moved = [_moved(met[0], again[0], 1e-30)]
        for then, now in zip(met[1:], again[1:], strict=False):
            # relative to 1 per value: a log-ratio of an unchanged policy is nothing but rounding
            moved.append(_moved(then, now, then.numel() ** 0.5))
        self._moved[targets.rows.tokens] = torch.stack(moved).max()
        return gradient

    def no_rows(self, hidden: Tensor) -> None:
        """Do what `LossHead.no_rows` does, unless hidden states are output, which use no head."""
        if self._tiled is not None:
            _end_without_rows(self._model, hidden)

    def total(
        self, num_valid_tokens: int | None, add_up: Callable[[Tensor], Tensor]
    ) -> tuple[float, int]:
        """Return 0 for the loss, and the number of labels of all ranks."""
        own, self.num_labels = self.num_labels, 0
        return 0.0, int(add_up(torch.tensor([own], device="cpu")))

    def finish(self) -> list[Tensor]:
        """Return the outputs of each sequence, and drop this object's references to them. The graph
        of an output holds this object, so a reference here would keep the output alive."""
        found, self._outputs = self._outputs, []
        return found

    def require_unmoved(self, dtype: torch.dtype) -> None:
        """Raise ConfigError if hidden states or values differ between the two phases by more than
        rounding. `dtype`: the weights' dtype."""
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
        """Return the gradients (R, ...) of the caller's loss with respect to the outputs at a
        chunk's labels. They are zeros for a sequence whose output has no gradient."""
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
        """Return the tensor that collects the outputs of sequence `index`. The first call creates
        zeros for all sequences that this process was given, with the dtype and trailing shape of
        `like`."""
        if not self._outputs:
            given = self._batch.sequences  # those of other replicas are empty
            self._outputs = [like.new_zeros((len(s.input_ids), *like.shape[1:])) for s in given]
        return self._outputs[index]

    def _projected(self, hidden: Tensor) -> Tensor:
        """Return a fixed random projection (T,) of hidden states (T, D)."""
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
    """Split `values` (R, ...) of a chunk's labels by runs of tokens of one sequence. Yield ((index
    of the sequence, indices of its tokens), values) for each run."""
    lens = [len(tokens) for _, tokens in targets.tokens]
    return zip(targets.tokens, values.split(lens), strict=True)


def _moved(then: Tensor, now: Tensor, least: float) -> Tensor:
    """Return the norm of `now - then` divided by the norm of `then`, or by `least` if that is
    larger. Equal infinities, and two NaNs, differ by 0."""
    same = (now == then) | (now.isnan() & then.isnan())
    known = torch.where(then.isfinite(), then, 0)
    return torch.where(same, 0, now - then).norm() / known.norm().clamp(min=least)
