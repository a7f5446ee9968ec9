"""Losses that are a sum over tokens: one phase, with a function in the place of the cross-entropy.

Weights of tokens, label smoothing, z-losses, clipped ratios and distillation are such sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from furlong.models.causal_lm import CausalLM
from furlong.ops.loss import tile_tokens
from furlong.ops.token_values import TiledValues
from furlong.plan.plan import ChunkPlan
from furlong.planners.options import ChunkOptions
from furlong.runtime.batch import PlannedSequences
from furlong.runtime.cells.chunk_inputs import ChunkInputs, sent_to
from furlong.runtime.cells.loss_head import LossHead
from furlong.runtime.followed_model import FollowedModel
from furlong.runtime.inputs import ShiftedSequence, refused_data, require_options, shift_labels
from furlong.runtime.step import batch_for
from furlong.runtime.tokens.inputs import TokenInputs, token_inputs
from furlong.runtime.tokens.joined import Joined, join_prompts
from furlong.runtime.tokens.values import may_share, require_one_device
from furlong.values import Extras, TokenFunction, log_prob, require_function

WEIGHTS = "token_weights"


@dataclass(frozen=True, slots=True)
class OwnLoss:
    """The loss of a call, with all that its sequences hold."""

    batch: TokenInputs
    function: TokenFunction
    share_prompts: bool

    @property
    def sequences(self) -> Sequence[ShiftedSequence]:
        """Those of the plan."""
        return self.batch.joined.sequences

    def joined(self, followed: FollowedModel, options: ChunkOptions) -> OwnLoss:
        """The loss of sequences that are joined where they begin alike, if that is wanted."""
        require_options(options)
        if not self.share_prompts or options.sampling or not may_share(followed.model):
            return self
        joined = join_prompts(self.batch.sequences, options.size)
        return replace(self, batch=replace(self.batch, joined=joined))

    def head(self, model: CausalLM, plan: ChunkPlan) -> LossHead:
        """The head of a plan's step."""
        return _TokenLossHead(model, plan, self)


def weighted_batch(
    followed: FollowedModel, plan: object, sequences: object, weights: Sequence[float] | None
) -> PlannedSequences:
    """The batch that a caller has passed to this process, each sequence of which counts as often
    in the gradient as `weights` say (None: once)."""
    batch = batch_for(followed, plan, sequences)
    if weights is None:
        return batch
    if len(weights) != len(batch.plan.seq_lens) or batch.plan.sampled:
        raise refused_data(
            f"{len(weights)} weights of a plan with {len(batch.plan.seq_lens)} sequences"
            + ", which samples" * batch.plan.sampled,
            "a number for each sequence of an exact plan",
            "pass one for each seq_id, or leave weights out",
        )

    def make(model: CausalLM, plan: ChunkPlan) -> LossHead:
        sequences = list(batch.sequences)
        return _WeightedHead(model, plan, TokenInputs(sequences, (), Joined(sequences)), weights)

    return replace(batch, make_head=make)


def own_loss(
    followed: FollowedModel, sequences: object, token_loss: TokenFunction | None, *,
    share_prompts: bool = False,
) -> OwnLoss | None:  # fmt: skip
    """The loss of a call with a function of its own, weights of tokens or shared prompts; None of
    another."""
    if token_loss is None and not _is_weighted(sequences):
        if not share_prompts:
            return None
        require_one_device(followed, "share_prompts")
        shifted = shift_labels(sequences)
        plain_batch = TokenInputs(shifted, [{}] * len(shifted), Joined(shifted))
        return OwnLoss(plain_batch, _cross_entropy, share_prompts)
    require_one_device(followed, "token_loss" if token_loss else WEIGHTS)
    plain = token_loss or _cross_entropy
    require_function(plain, "token_loss")
    batch = token_inputs(sequences)
    if WEIGHTS not in batch.extras[0]:
        return OwnLoss(batch, plain, share_prompts)
    for index, extras in enumerate(batch.extras):
        if extras[WEIGHTS].ndim != 1:
            raise refused_data(
                f"sequence {index} with {WEIGHTS} {tuple(extras[WEIGHTS].shape)}",
                "one weight per token: a tensor of shape (T,)",
                "pass a vector",
            )
    return OwnLoss(batch, _weighted(plain), share_prompts)


class _TokenLossHead(LossHead):
    def __init__(self, model: CausalLM, plan: ChunkPlan, loss: OwnLoss) -> None:
        seq_lens = () if plan.trained else loss.batch.seq_lens
        super().__init__(model, seq_lens, estimates=not plan.report_loss)
        self._batch, self._device = loss.batch, model.device
        self._tiled = TiledValues(
            model.logits, loss.function, tile_tokens(model.vocab_size, model.device), nullcontext,
            source="token_loss", takes_columns=False,
        )  # fmt: skip

    def _pulled(
        self, hidden: Tensor, inputs: ChunkInputs, grad_scale: float
    ) -> tuple[Tensor, Tensor]:
        extras, rows = self._batch.extras_of(inputs.rows, self._device), inputs.labelled_rows
        scales = torch.full(rows.shape, grad_scale, dtype=torch.float64, device=self._device)
        gradient, losses = self._tiled.gradient(hidden, inputs.labels, rows, extras, scales)
        return losses.double().sum(), gradient

    def evaluate(self, hidden: Tensor, inputs: ChunkInputs) -> None:
        extras, rows = self._batch.extras_of(inputs.rows, self._device), inputs.labelled_rows
        values = self._tiled.values(hidden, inputs.labels, rows, extras)
        if values is None:
            return
        losses = values.double()
        self.loss_sum += losses.sum()
        self.num_labels += len(losses)
        start = 0
        for index, tokens in self._batch.labelled(inputs.rows):  # a row has a label for each answer
            own = losses[start : start + len(tokens)]
            self.token_losses[index][sent_to(self._device, tokens - 1)] = own
            start += len(tokens)


class _WeightedHead(LossHead):
    """The cross-entropy, whose gradient counts each sequence as often as its weight says."""

    def __init__(
        self, model: CausalLM, plan: ChunkPlan, batch: TokenInputs, weights: Sequence[float]
    ) -> None:
        super().__init__(model, () if plan.trained else plan.seq_lens)
        self._batch, self._weights = batch, weights
        self._tiled = TiledValues(
            model.logits, _cross_entropy, tile_tokens(model.vocab_size, model.device), nullcontext
        )

    def _pulled(
        self, hidden: Tensor, inputs: ChunkInputs, grad_scale: float
    ) -> tuple[Tensor, Tensor]:
        scales = [torch.empty(0, dtype=torch.float64)]  # a process may have no token of a chunk
        scales += [
            torch.full((len(tokens),), self._weights[seq_id] * grad_scale, dtype=torch.float64)
            for seq_id, tokens in self._batch.labelled(inputs.rows)
        ]
        cotangents = sent_to(hidden.device, torch.cat(scales))
        gradient, losses = self._tiled.gradient(
            hidden, inputs.labels, inputs.labelled_rows, {}, cotangents
        )
        return losses.double().sum(), gradient


def _cross_entropy(logits: Tensor, labels: Tensor, extras: Extras) -> Tensor:
    return -log_prob()(logits, labels, extras)


def _weighted(function: TokenFunction) -> TokenFunction:
    def of_tile(logits: Tensor, labels: Tensor, extras: Extras) -> Tensor:
        losses = function(logits, labels, extras)
        return losses * extras[WEIGHTS].to(losses.dtype)

    return of_tile


def _is_weighted(sequences: object) -> bool:
    return isinstance(sequences, Sequence) and any(
        isinstance(sequence, Mapping) and WEIGHTS in sequence for sequence in sequences
    )
