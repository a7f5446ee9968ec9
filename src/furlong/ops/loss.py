"""The language-model head on tiles of labelled rows, so that logits exist for one tile at a time.

Losses and other values of tokens are treated alike: as a function of the logits of single tokens.
The rows with a label are known in advance and sums stay on the device: the host never waits for it.

    T rows of hidden states, R of them with a label, t of a tile, D hidden size, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from furlong.errors import ConfigError

IGNORE_INDEX = -100


def labelled_rows(labels: Tensor) -> Tensor:
    """Return the int64 indices (R,) of labels (T,) other than -100; call it with CPU labels."""
    return torch.nonzero(labels != IGNORE_INDEX).flatten()


def wide(logits: Tensor) -> Tensor:
    """Cast logits to float32; float64 stays."""
    return logits if logits.dtype == torch.float64 else logits.float()


def label_losses(logits: Tensor, labels: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
    """Return the cross-entropy (t,) of each label."""
    return cross_entropy(logits, labels, reduction="none")


@dataclass(frozen=True, slots=True)
class TiledHead:
    """A head and a function of the logits of single tokens, called tile by tile.

    `forward` and `backward` take hidden states (T, D), `rows` (R,) int64, `labels` (R,), already
    shifted, and `extras` (R, ...), all on one device. Rows without a label never reach the head; a
    row that several tokens follow occurs in `rows` once for each of them.
    """

    head: Callable[[Tensor], Tensor]
    """Hidden states (t, D) -> logits (t, V)."""
    function: Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]
    """Logits (t, V) in float32 or wider, labels (t,), extras (t, ...) -> (t,) or (t, k)."""
    max_tile_tokens: int
    modes: Callable[[], AbstractContextManager[object]] = nullcontext
    """Makes the context in which the head and the function run, such as an autocast."""
    source: str = "fn"
    """Name of the argument that held the function, for messages."""
    takes_columns: bool = True
    """Whether a token may have several values."""

    def forward(
        self, hidden: Tensor, rows: Tensor, labels: Tensor, extras: Mapping[str, Tensor]
    ) -> Tensor | None:
        """Return the function's values (R, ...) without a graph, or None if there are no rows."""
        with torch.no_grad():
            found = [
                self._of_tile(hidden[tile], labels[at], some)
                for tile, at, some in self._tiles(rows, extras)
            ]
        if any(x.shape[1:] != found[0].shape[1:] for x in found):
            raise self._refusal(f"{found[0].shape[1:]} values per token, then others")
        return torch.cat(found) if found else None

    def backward(
        self, hidden: Tensor, rows: Tensor, labels: Tensor, extras: Mapping[str, Tensor],
        cotangents: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the gradient (T, D) of the hidden states, and the function's values. `cotangents`
        (R, ...): gradient of these values. The head's parameters accumulate gradients, too."""
        gradient, found = torch.zeros_like(hidden), []
        for tile, at, some in self._tiles(rows, extras):
            tile_hidden = hidden.detach()[tile].requires_grad_()  # (t, D)
            with torch.enable_grad():
                values = self._of_tile(tile_hidden, labels[at], some)
            if values.requires_grad:
                torch.autograd.backward(values, cotangents[at].to(values.dtype))
            if tile_hidden.grad is not None:
                gradient.index_add_(0, tile, tile_hidden.grad)
            found.append(values.detach())
        return gradient, torch.cat(found) if found else hidden.new_zeros(0)

    def _tiles(
        self, rows: Tensor, extras: Mapping[str, Tensor]
    ) -> Iterator[tuple[Tensor, slice, dict[str, Tensor]]]:
        start = 0
        # of no rows, split would make one empty tile
        for tile in rows.split(self.max_tile_tokens) if len(rows) else ():
            at = slice(start, start + len(tile))
            yield tile, at, {name: x[at] for name, x in extras.items()}
            start = at.stop

    def _of_tile(self, hidden: Tensor, labels: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
        with self.modes():
            logits = wide(self.head(hidden))
            values = self.function(logits, labels, extras)
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        widths = (1, 2) if self.takes_columns else (1,)
        if (
            not isinstance(values, Tensor)
            or values.ndim not in widths
            or len(values) != len(labels)
            or not values.is_floating_point()
        ):
            is_odd = isinstance(values, Tensor) and not values.is_floating_point()
            dtype = f"{values.dtype} ".removeprefix("torch.") if is_odd else ""
            raise self._refusal(f"{dtype}{shape} for {len(labels)} tokens")
        if logits.requires_grad and not values.requires_grad:
            raise ConfigError(
                given=f"{self.source} returned values without a graph: every gradient would be 0",
                required="values that are differentiable functions of the logits",
                source=self._source,
                change=f"leave detach(), item() and torch.no_grad() out of {self.source}; where "
                "no token counts, return logits[:, 0] * 0",
            )
        return values

    @property
    def _source(self) -> str:
        return f"{self.source}, called with logits (t, V), labels (t,) and extras (t, ...)"

    def _refusal(self, given: str) -> ConfigError:
        columns = ", or (t, k) for k of them" if self.takes_columns else ""
        return ConfigError(
            given=f"{self.source} returned {given}",
            required=f"one floating-point value per token: a tensor of shape (t,){columns}",
            source=self._source,
            change="reduce over the vocabulary alone: the loss is made of what comes back",
        )
