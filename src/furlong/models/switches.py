"""Settings of a model for the length of a call, undone after it, also after an error."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from furlong.models.attention import ATTENTION_NAME, attention
from furlong.models.layer_cache import layer_caches
from furlong.models.support import rope_types
from furlong.models.wrappers import COMPILED_CALL

_PINNED = "pinned"


@contextmanager
def chunked_attention(
    base: nn.Module, max_seq_len: int | None, compiled: Collection[nn.Module] = ()
) -> Iterator[None]:
    """Within it the attention of every layer is ours. `compiled`: modules that stay compiled in
    place."""
    AttentionInterface.register(ATTENTION_NAME, attention)
    with (
        _attention_implementation(base, ATTENTION_NAME), own_forward(base, max_seq_len, compiled),
        layer_caches(base),
    ):  # fmt: skip
        yield


@contextmanager
def own_forward(
    base: nn.Module, max_seq_len: int | None, compiled: Collection[nn.Module] = ()
) -> Iterator[None]:
    """Within it the model's modules but those of `compiled` run as they are written, once, and
    return named outputs; its RoPE is that of the run."""
    with ExitStack() as stack:
        stack.enter_context(_without_gradient_checkpointing(base))
        stack.enter_context(_without_compiled_calls(base, compiled))
        stack.enter_context(_named_outputs(base))
        stack.enter_context(_pinned_longrope(base, max_seq_len))
        yield


@contextmanager
def _named_outputs(base: nn.Module) -> Iterator[None]:
    """A config that asks for tuples breaks transformers' own heads."""
    configs = {id(m.config): m.config for m in base.modules() if hasattr(m, "config")}
    switched: list[Any] = [c for c in configs.values() if getattr(c, "return_dict", True) is False]
    try:
        for config in switched:
            config.return_dict = True
        yield
    finally:
        for config in switched:
            config.return_dict = False


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
def _without_compiled_calls(base: nn.Module, compiled: Collection[nn.Module]) -> Iterator[None]:
    """Modules but those of `compiled` run as they are written."""
    written = set(base.modules()).difference(compiled)
    calls = [(module, module.__dict__.pop(COMPILED_CALL, None)) for module in written]
    try:
        yield
    finally:
        for module, call in calls:
            if call is not None:
                module.__dict__[COMPILED_CALL] = call


@contextmanager
def _pinned_longrope(base: nn.Module, max_seq_len: int | None) -> Iterator[None]:
    """Let longrope choose its factors by the run's longest sequence, once, and keep them.

    transformers chooses them per call, by the call's largest position: a chunk would choose
    otherwise than the sequence that it is a piece of. A model has one type of RoPE, or one per
    layer type.
    """
    if max_seq_len is None or "longrope" not in rope_types(base.config.get_text_config()):  # type: ignore[operator, union-attr]
        yield
        return
    rotaries: list[tuple[Any, Any]] = [
        (module, module.rope_type) for module in base.modules() if hasattr(module, "rope_type")
    ]
    try:
        for rotary, rope_type in rotaries:
            if isinstance(rope_type, dict):
                for layer_type in [name for name, t in rope_type.items() if t == "longrope"]:
                    _choose(rotary, max_seq_len, layer_type=layer_type)
                pinned = {n: _PINNED if t == "longrope" else t for n, t in rope_type.items()}
                rotary.rope_type = pinned
            elif rope_type == "longrope":
                _choose(rotary, max_seq_len)
                rotary.rope_type = _PINNED
        yield
    finally:
        for rotary, rope_type in rotaries:
            rotary.rope_type = rope_type


def _choose(rotary: Any, max_seq_len: int, **layer_type: str) -> None:
    """Make transformers choose the factors of a run of `max_seq_len` tokens."""
    device = next(rotary.buffers()).device
    longest = torch.tensor([[max_seq_len - 1]], device=device)
    rotary(torch.zeros(1, device=device), longest, **layer_type)
