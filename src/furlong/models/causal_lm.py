"""The adapter of a Hugging Face decoder: hidden states, head, and the door through which attention
enters.

Attention enters through transformers' own `AttentionInterface`, under a name of ours. For that name
no mask function is registered, so transformers builds no mask. The cell that is being computed is
bound to the attention modules for the length of a call: some families drop keyword arguments on the
way down, none drops its own modules.

    T tokens, N query heads, K key-value heads, H head dim, D hidden size, V vocabulary
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_outputs import MoeModelOutputWithPast

from furlong.errors import FurlongError, UnsupportedModelError
from furlong.models.support import refuse_unsupported, rope_types
from furlong.ops.chunk_attention import AttentionRule

ATTENTION_NAME = "furlong"
_CELL = "_furlong_cell"


class Cell(Protocol):
    """What computes the attention of one (chunk, stage)."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, sinks: Tensor | None
    ) -> Tensor:
        """q (N, T, H), k and v (K, T, H), sinks (N,) or None -> (N, T, H)."""
        ...


class CausalLM:
    """A decoder with a language-model head, used in pieces.

    Raises UnsupportedModelError for what is known to be inexact.
    """

    def __init__(self, model: nn.Module, *, max_seq_len: int | None = None) -> None:
        wrapped: Any = model
        base = wrapped.get_base_model() if hasattr(model, "get_base_model") else wrapped
        refuse_unsupported(base, max_seq_len)
        self.model = model
        self.config = base.config.get_text_config()
        self.max_seq_len = max_seq_len
        self.num_layers = int(self.config.num_hidden_layers)
        self.vocab_size = int(base.get_output_embeddings().weight.shape[0])
        self._base = base
        self._decoder = base.get_decoder()
        self._head = _head_alone(base, self._decoder)
        self._attention_modules = [m for m in self._decoder.modules() if hasattr(m, "layer_idx")]

    @property
    def name(self) -> str:
        return type(self._base).__name__

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def hidden(self, input_ids: Tensor, position_ids: Tensor, cell: Cell) -> Tensor:
        """Final hidden states (T, D) of input_ids (T,) at position_ids (T,), inside `installed`."""
        for module in self._attention_modules:
            module.__dict__[_CELL] = cell
        try:
            output = self._decoder(
                input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False
            )
            return output.last_hidden_state[0]  # type: ignore[no-any-return]
        finally:
            for module in self._attention_modules:
                module.__dict__.pop(_CELL, None)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (T, V) of final hidden states (T, D), scaled and capped as the family does."""
        return self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]  # type: ignore[no-any-return]

    def whole_logits(self, input_ids: Tensor) -> Tensor:
        """Logits (T, V) of a sequence (T,) by the model's own forward, outside `installed`."""
        with _pinned_longrope(self._base, self.max_seq_len):
            return self._base(input_ids=input_ids[None], use_cache=False).logits[0]  # type: ignore[no-any-return]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within it attention is ours; on exit, also after an error, the model is as it was."""
        AttentionInterface.register(ATTENTION_NAME, _attention)
        with ExitStack() as stack:
            stack.enter_context(_attention_implementation(self._base, ATTENTION_NAME))
            stack.enter_context(_without_gradient_checkpointing(self._base))
            stack.enter_context(_pinned_longrope(self._base, self.max_seq_len))
            yield


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query (1, N, T, H), key and value (1, K, T, H)."""
    cell: Cell | None = module.__dict__.get(_CELL)
    if cell is None:
        raise FurlongError(
            f"{type(module).__name__} was called under the attention name {ATTENTION_NAME!r} "
            "outside of forward_backward; set the model's attention implementation to sdpa"
        )
    if key.shape[-1] != value.shape[-1]:
        raise UnsupportedModelError(
            given=f"{type(module).__name__}: keys of {key.shape[-1]}, values of {value.shape[-1]}",
            required="keys and values of the same head dim",
            source="the model's attention",
            change="train a model of another family",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    rule = AttentionRule(scale, sliding_window or None, softcap or None)
    out = cell.attend(module.layer_idx, query[0], key[0], value[0], rule, s_aux)  # type: ignore[arg-type]
    return out.transpose(0, 1)[None], None  # (N, T, H) -> (1, T, N, H)


@dataclass
class _DecoderOutput(MoeModelOutputWithPast):  # type: ignore[misc]
    """Every field that some family's head looks for."""

    cross_attentions: Any = None


class _HiddenStates(nn.Module):
    """Stands in the decoder's place: its input is its output."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _DecoderOutput:
        return _DecoderOutput(last_hidden_state=inputs_embeds)


def _head_alone(base: nn.Module, decoder: nn.Module) -> nn.Module:
    """The model without its decoder, parameters shared: its forward is the family's own head."""
    names = [name for name, child in base.named_children() if child is decoder]
    if not names:
        raise UnsupportedModelError(
            given=f"{type(base).__name__} holds its decoder inside another module",
            required="a model that is a decoder and a head",
            source="the model's modules",
            change="train the text model alone",
        )
    head = copy.copy(base)
    # Dicts are copied too: a child set on the copy must not appear on the original.
    head.__dict__ = {k: v.copy() if isinstance(v, dict) else v for k, v in base.__dict__.items()}
    head._modules[names[0]] = _HiddenStates()
    # A library's wrapper of this instance's forward (TRL's, accelerate's) would run the original.
    head.__dict__.pop("forward", None)
    return head


@contextmanager
def _attention_implementation(base: nn.Module, name: str) -> Iterator[None]:
    """Set the attention name on every config that the model's modules hold."""
    configs: dict[int, Any] = {
        id(m.config): m.config for m in base.modules() if hasattr(m, "config")
    }
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        for config, _ in before:
            config._attn_implementation = name
        yield
    finally:
        for config, implementation in reversed(before):
            config._attn_implementation = implementation


@contextmanager
def _without_gradient_checkpointing(base: nn.Module) -> Iterator[None]:
    """The plan decides what is recomputed."""
    switched = [m for m in base.modules() if getattr(m, "gradient_checkpointing", False) is True]
    try:
        for module in switched:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        yield
    finally:
        for module in switched:
            module.gradient_checkpointing = True  # type: ignore[assignment]


@contextmanager
def _pinned_longrope(base: nn.Module, max_seq_len: int | None) -> Iterator[None]:
    """Let longrope choose its factors by the run's longest sequence, once, and keep them.

    transformers chooses them per call, by the call's largest position: a chunk would choose
    otherwise than the sequence that it is a piece of.
    """
    if max_seq_len is None or "longrope" not in rope_types(base.config.get_text_config()):  # type: ignore[operator, union-attr]
        yield
        return
    rotaries: list[Any] = [m for m in base.modules() if getattr(m, "rope_type", None) == "longrope"]
    try:
        for rotary in rotaries:
            device = rotary.inv_freq.device
            longest = torch.tensor([[max_seq_len - 1]], device=device)
            rotary(torch.zeros(1, device=device), longest)  # transformers chooses
            rotary.rope_type = "pinned"
        yield
    finally:
        for rotary in rotaries:
            rotary.rope_type = "longrope"
