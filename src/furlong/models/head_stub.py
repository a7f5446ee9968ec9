"""A stub that stands in a decoder's place while a model is its head alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast


@dataclass
class DecoderOutput(MoeModelOutputWithPast):  # type: ignore[misc]
    """The output of a decoder of which only the hidden states are there."""

    def __getattr__(self, name: str) -> Any:
        """None for any field that some family's head looks for."""
        if name.startswith("_"):
            raise AttributeError(name)
        return None


class HeadStub(nn.Module):
    """Stands in the decoder's place: its input is its output. What a head asks of the decoder
    beside its output (Falcon-H1's multiplier) is the decoder's own."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.__dict__["_decoder"] = decoder  # not a child: its parameters stay where they are

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattr__(name)
        return getattr(self._decoder, name)

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> DecoderOutput:
        return DecoderOutput(last_hidden_state=inputs_embeds)
