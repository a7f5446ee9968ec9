"""The last stage's end: head and loss of a chunk, tile by tile, and the step's summed loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from furlong.errors import ConfigError
from furlong.models.causal_lm import CausalLM
from furlong.ops.loss import tile_tokens, tiled_loss, token_losses
from furlong.plan.values import Chunk
from furlong.runtime.inputs import ChunkInputs


class LossHead:
    """Losses of one step, added up on the device."""

    def __init__(self, model: CausalLM, seq_lens: Sequence[int] = ()) -> None:
        """`seq_lens`: tokens of the sequences whose token losses are kept."""
        self._model = model
        self._max_tile_tokens = tile_tokens(model.vocab_size, model.device)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=model.device)
        self.token_losses = [
            torch.zeros(n, dtype=torch.float64, device=model.device) for n in seq_lens
        ]
        """The loss of each token (T,) of each sequence."""

    def gradient(self, hidden: Tensor, inputs: ChunkInputs, factor: float) -> Tensor:
        """Add a chunk's loss; the gradient (T, D) of `factor` times it by the final hidden states.

        The head's parameters get theirs. Raises ConfigError if no trained parameter is reached.
        """
        if not hidden.requires_grad:
            self._require_gradient(hidden)
        loss_sum, gradient = tiled_loss(
            self._model.logits, hidden, inputs.labels, rows=inputs.labelled_rows,
            max_tile_tokens=self._max_tile_tokens, grad_scale=factor,
        )  # fmt: skip
        self.loss_sum += loss_sum
        return gradient

    def evaluate(self, hidden: Tensor, inputs: ChunkInputs, chunk: Chunk) -> None:
        """Add a chunk's loss, and note that of each token, of final hidden states (T, D)."""
        losses = token_losses(
            self._model.logits, hidden, inputs.labels, rows=inputs.labelled_rows,
            max_tile_tokens=self._max_tile_tokens,
        )  # fmt: skip
        self.loss_sum += losses.sum()
        if self.token_losses:
            for piece, rows in zip(chunk.slices, inputs.slices, strict=True):
                self.token_losses[piece.seq_id][piece.start : piece.stop] = losses[rows]

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
