"""The last stage's end: head and loss of a chunk, tile by tile, and the step's summed loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from furlong.errors import ConfigError
from furlong.models.causal_lm import CausalLM
from furlong.ops.loss import tile_tokens, tiled_loss, token_losses
from furlong.runtime.chunk_inputs import ChunkInputs
from furlong.runtime.exchange import PoolExchange


class LossHead:
    """Losses of one step, added up on the device."""

    def __init__(
        self, model: CausalLM, seq_lens: Sequence[int] = (), *, estimates: bool = False,
        exchange: PoolExchange | None = None,
    ) -> None:  # fmt: skip
        """`seq_lens`: tokens of the sequences whose token losses are kept. `estimates`: chunks that
        were not drawn have no loss here. `exchange`: the pool among whose processes they lie."""
        self._model, self._estimates, self._exchange = model, estimates, exchange
        self._max_tile_tokens = tile_tokens(model.vocab_size, model.device)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=model.device)
        self.token_losses = [
            torch.zeros(n, dtype=torch.float64, device=model.device) for n in seq_lens
        ]
        """The loss of each token (T,) of each sequence."""
        self._num_counted = 0.0
        """Labels of drawn chunks, each as often as its loss in `loss_sum`."""
        self._is_reached = False
        """Whether the head's parameters have a gradient."""

    def total(self, num_valid_tokens: int) -> float:
        """The summed loss of so many labels, over all processes; of drawn chunks alone an estimate
        from their mean, in which each weighs as in the gradient, and nan where none of them has a
        label."""
        loss_sum, num_counted = self.loss_sum, self._num_counted
        if self._exchange is not None:
            counted = loss_sum.new_tensor(num_counted)
            loss_sum, counted = self._exchange.summed(torch.stack((loss_sum, counted)))
            num_counted = float(counted) if self._estimates else 0.0
            if self.token_losses:
                lens = [len(losses) for losses in self.token_losses]
                each = self._exchange.summed(torch.cat(self.token_losses))
                self.token_losses[:] = each.split(lens)
        if not self._estimates:
            return float(loss_sum)
        if not num_counted:
            return math.nan
        return float(loss_sum) / num_counted * num_valid_tokens

    def gradient(
        self, hidden: Tensor, inputs: ChunkInputs, loss_factor: float, num_valid_tokens: int
    ) -> Tensor:
        """Add a chunk's loss; the gradient (T, D) by the final hidden states of `loss_factor` times
        it, divided by the number of labels.

        The head's parameters get theirs. Raises ConfigError if no trained parameter is reached.
        """
        if not hidden.requires_grad:
            self._require_gradient(hidden)
        loss_sum, gradient = tiled_loss(
            self._model.logits, hidden, inputs.labels, rows=inputs.labelled_rows,
            max_tile_tokens=self._max_tile_tokens, grad_scale=loss_factor / num_valid_tokens,
        )  # fmt: skip
        weight = loss_factor if self._estimates else 1.0
        self.loss_sum += weight * loss_sum
        self._num_counted += weight * len(inputs.labelled_rows)
        self._is_reached |= len(inputs.labelled_rows) > 0
        return gradient

    def evaluate(self, hidden: Tensor, inputs: ChunkInputs) -> None:
        """Add a chunk's loss, and note that of each token, of final hidden states (T, D)."""
        losses = token_losses(
            self._model.logits, hidden, inputs.labels, rows=inputs.labelled_rows,
            max_tile_tokens=self._max_tile_tokens,
        )  # fmt: skip
        self.loss_sum += losses.sum()
        if self.token_losses:
            for (seq_id, start, stop), row in inputs.rows.runs():
                self.token_losses[seq_id][start:stop] = losses[row : row + stop - start]

    def end(self, hidden: Tensor) -> None:
        """Called in the last backward, with its final hidden states (T, D): a process of several
        that has met no label gives the head's parameters a gradient of zero, since all have to add
        up the same ones."""
        if self._exchange is None or self._is_reached:
            return
        with torch.enable_grad():
            logits = self._model.logits(hidden[:1].detach().requires_grad_())
            torch.autograd.backward(logits, torch.zeros_like(logits))

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
