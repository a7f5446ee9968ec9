"""Final hidden states that leave a step: as they are, or as values of tokens.

Both take them in the first phase of a plan (`two_phases`) and give back the gradient of what the
caller has made of them in the second. A fixed projection of each row is compared between the two: a
norm would see nothing, for behind an RMS norm it is constant.

    T tokens, of a chunk or of a sequence; D hidden size; R rows that have a label; k values
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from furlong.errors import ConfigError
from furlong.ops.token_values import TiledValues
from furlong.plan.rows import Run
from furlong.runtime.cells.chunk_inputs import ChunkInputs, sent_to
from furlong.runtime.tokens.inputs import TokenInputs, of_runs
from furlong.runtime.tokens.joined import Joined

_MOST_MOVED = {torch.float64: 1e-6, torch.float32: 1e-3}


class Outputs(Protocol):
    """The last stage's end of a plan of two phases."""

    def take(self, hidden: Tensor, inputs: ChunkInputs) -> Sequence[Tensor]:
        """Take a chunk's hidden states (T, D); what the second phase must meet again."""
        ...

    def give(
        self, hidden: Tensor, inputs: ChunkInputs, cotangents: Sequence[Tensor | None]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The gradient (T, D) of what was taken, and what was met again."""
        ...

    def finish(self) -> list[Tensor]:
        """The outputs of each sequence, which are forgotten here: what the caller holds must not be
        held by the graph that made it."""
        ...


class HiddenStates:
    """The final hidden states (T, D) of each sequence."""

    def __init__(self, seq_lens: Sequence[int], joined: Joined) -> None:
        self._seq_lens, self._joined = seq_lens, joined
        self._found: list[Tensor] = []

    def take(self, hidden: Tensor, inputs: ChunkInputs) -> Sequence[Tensor]:
        if not self._found:
            self._found = [hidden.new_empty((n, hidden.shape[1])) for n in self._seq_lens]
        for index, run, row in self._joined.runs(inputs.rows):
            self._found[index][run.start : run.stop] = hidden[row : row + len(run)]
        return ()

    def give(
        self, hidden: Tensor, inputs: ChunkInputs, cotangents: Sequence[Tensor | None]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        wide = torch.promote_types(hidden.dtype, torch.float32)  # rows may be of many sequences
        gradient = torch.zeros_like(hidden, dtype=wide)
        for index, run, row in self._joined.runs(inputs.rows):
            own = cotangents[index]
            if own is not None:
                gradient[row : row + len(run)] += own[run.start : run.stop]
        return gradient.to(hidden.dtype), ()

    def finish(self) -> list[Tensor]:
        found, self._found = self._found, []
        return found


class TokenValues:
    """The values (T,) or (T, k) of each sequence's tokens, 0 where a token has no label."""

    def __init__(self, batch: TokenInputs, tiled: TiledValues, device: torch.device) -> None:
        self._batch, self._tiled, self._device = batch, tiled, device
        self._found: list[Tensor] = []

    def take(self, hidden: Tensor, inputs: ChunkInputs) -> Sequence[Tensor]:
        extras = self._batch.extras_of(inputs.rows, self._device)
        values = self._tiled.values(hidden, inputs.labels, inputs.labelled_rows, extras)
        if values is None:
            return ()
        if not self._found:
            shape = values.shape[1:]
            self._found = [values.new_zeros((n, *shape)) for n in self._batch.seq_lens]
        row = 0
        for seq_id, tokens in self._batch.labelled(inputs.rows):
            self._found[seq_id][sent_to(self._device, tokens)] = values[row : row + len(tokens)]
            row += len(tokens)
        return (values,)

    def give(
        self, hidden: Tensor, inputs: ChunkInputs, cotangents: Sequence[Tensor | None]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        runs = list(self._batch.labelled(inputs.rows))
        own = of_runs(runs, cotangents, next(c for c in cotangents if c is not None))
        if own is None or not len(own):
            return torch.zeros_like(hidden), ()
        extras = self._batch.extras_of(inputs.rows, self._device)
        gradient, values = self._tiled.gradient(
            hidden, inputs.labels, inputs.labelled_rows, extras, own
        )
        return gradient, (values,)

    def finish(self) -> list[Tensor]:
        found, self._found = self._found, []
        return found


class OutputHead:
    """A `FinalHead` whose loss is the caller's."""

    num_labels = 1  # no backward is made up for a batch without labels

    def __init__(self, outputs: Outputs, *, is_rounded: bool) -> None:
        """`is_rounded`: passes compute in 16 bits, whatever the dtype of hidden states."""
        self.outputs, self._is_rounded = outputs, is_rounded
        self.token_losses: list[Tensor] = []
        self.cotangents: Sequence[Tensor | None] = ()
        self._projection: Tensor | None = None
        self._met: dict[tuple[Run, ...], tuple[Tensor, ...]] = {}
        self._moved: dict[tuple[Run, ...], Tensor] = {}

    def evaluate(self, hidden: Tensor, inputs: ChunkInputs) -> None:
        met = self.outputs.take(hidden, inputs)
        self._met[inputs.rows.tokens] = (self._projected(hidden), *met)

    def gradient(
        self, hidden: Tensor, inputs: ChunkInputs, loss_factor: float, num_valid_tokens: int
    ) -> Tensor:
        gradient, again = self.outputs.give(hidden, inputs, self.cotangents)
        met = self._met.pop(inputs.rows.tokens)
        moved = [_moved(met[0], self._projected(hidden.detach()), 1e-30)]
        for then, now in zip(met[1:], again, strict=False):
            # such as a log-ratio, which is all rounding while the policy is the one that sampled
            moved.append(_moved(then, now, then.numel() ** 0.5))
        self._moved[inputs.rows.tokens] = torch.stack(moved).max()
        return gradient

    def no_rows(self, hidden: Tensor) -> None:
        """Other processes wait for nothing."""

    def total(
        self, num_valid_tokens: int | None, add_up: Callable[[Tensor], Tensor]
    ) -> tuple[float, int]:
        return 0.0, 0

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

    def _projected(self, hidden: Tensor) -> Tensor:
        """A number for each row of hidden states (T, D)."""
        wide = hidden if hidden.dtype == torch.float64 else hidden.float()
        if self._projection is None:
            generator = torch.Generator("cpu").manual_seed(0)
            drawn = torch.randn(hidden.shape[1], generator=generator, device="cpu")
            self._projection = sent_to(wide.device, drawn.to(wide.dtype))
        return wide @ self._projection


def _moved(then: Tensor, now: Tensor, least: float) -> Tensor:
    """The distance of two tensors, relative to the norm of the first or to `least`. An infinity, or
    what is no number, is as near as any other value to itself."""
    same = (now == then) | (now.isnan() & then.isnan())
    known = torch.where(then.isfinite(), then, 0)
    return torch.where(same, 0, now - then).norm() / known.norm().clamp(min=least)
