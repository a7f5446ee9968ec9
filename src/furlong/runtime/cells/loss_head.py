"""The last stage's end: head and loss of a chunk, tile by tile, and the step's summed loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from furlong.errors import ConfigError
from furlong.models.causal_lm import CausalLM
from furlong.ops.loss import tile_tokens, tiled_loss, token_losses
from furlong.plan.plan import ChunkPlan
from furlong.runtime.cells.chunk_inputs import ChunkInputs, sent_to


class FinalHead(Protocol):
    """Takes the final hidden states of chunks: without gradients, and with them."""

    num_labels: int
    """Rows of this process that went through the head."""
    token_losses: list[Tensor]

    def evaluate(self, hidden: Tensor, inputs: ChunkInputs) -> None:
        """Take a chunk's final hidden states (T, D), in a pass without a graph."""
        ...

    def gradient(
        self, hidden: Tensor, inputs: ChunkInputs, loss_factor: float, num_valid_tokens: int
    ) -> Tensor:
        """The gradient (T, D) by final hidden states; the head's parameters get theirs."""
        ...

    def no_rows(self, hidden: Tensor) -> None:
        """A backward through the head that changes no gradient."""
        ...

    def total(
        self, num_valid_tokens: int | None, add_up: Callable[[Tensor], Tensor]
    ) -> tuple[float, int]:
        """The summed loss of all ranks, and how many labels it is of."""
        ...


class LossHead:
    """Losses of one step, added up on the device."""

    def __init__(
        self, model: CausalLM, seq_lens: Sequence[int] = (), *, estimates: bool = False
    ) -> None:
        """`seq_lens`: tokens of the sequences whose token losses are kept. `estimates`: chunks that
        were not drawn have no loss here."""
        self._model, self._estimates = model, estimates
        self._max_tile_tokens = tile_tokens(model.vocab_size, model.device)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=model.device)
        self.token_losses = [
            torch.zeros(n, dtype=torch.float64, device=model.device) for n in seq_lens
        ]
        """The loss of each token (T,) of each sequence."""
        self._num_counted = 0.0
        """Labels of drawn chunks, each as often as its loss in `loss_sum`."""
        self.num_labels = 0
        """Labels of this process that a loss was taken of."""

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

    def gradient(
        self, hidden: Tensor, inputs: ChunkInputs, loss_factor: float, num_valid_tokens: int
    ) -> Tensor:
        """Add a chunk's loss; the gradient (T, D) by the final hidden states of `loss_factor` times
        it, divided by the number of labels.

        The head's parameters get theirs. Raises ConfigError if no trained parameter is reached.
        """
        if not hidden.requires_grad:
            self._require_gradient(hidden)
        loss_sum, gradient = self._pulled(hidden, inputs, loss_factor / num_valid_tokens)
        weight = loss_factor if self._estimates else 1.0
        self.loss_sum += weight * loss_sum
        self._num_counted += weight * len(inputs.labelled_rows)
        self.num_labels += len(inputs.labelled_rows)
        return gradient

    def no_rows(self, hidden: Tensor) -> None:
        """A backward through the head that changes no gradient, of hidden states (T, D): where
        several processes add up gradients, none may be missing."""
        with torch.enable_grad():
            total = self._model.logits(hidden[:0].detach()).sum()
        if total.requires_grad:
            torch.autograd.backward(total)

    def evaluate(self, hidden: Tensor, inputs: ChunkInputs) -> None:
        """Add a chunk's loss, and note that of each token, of final hidden states (T, D)."""
        losses = self._each(hidden, inputs)
        self.loss_sum += losses.sum()
        self.num_labels += len(inputs.labelled_rows)
        if self.token_losses:
            for (seq_id, start, stop), row in inputs.rows.runs():
                self.token_losses[seq_id][start:stop] = losses[row : row + stop - start]

    def _pulled(
        self, hidden: Tensor, inputs: ChunkInputs, grad_scale: float
    ) -> tuple[Tensor, Tensor]:
        """The summed loss, and the gradient (T, D) of `grad_scale` times it; see `tiled_loss`."""
        return tiled_loss(
            self._model.logits, hidden, inputs.labels, rows=inputs.labelled_rows,
            max_tile_tokens=self._max_tile_tokens, grad_scale=grad_scale,
        )  # fmt: skip

    def _each(self, hidden: Tensor, inputs: ChunkInputs) -> Tensor:
        """The loss (T,) of every token, float64, 0 where there is no label."""
        return token_losses(
            self._model.logits, hidden, inputs.labels, rows=inputs.labelled_rows,
            max_tile_tokens=self._max_tile_tokens,
        )  # fmt: skip

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


def loss_head(model: CausalLM, plan: ChunkPlan) -> LossHead:
    """The head of a plan's loss; without backwards it keeps the loss of each token."""
    seq_lens = () if plan.trained else plan.seq_lens
    return LossHead(model, seq_lens, estimates=not plan.report_loss)
