"""Ask a tiny model of the same class what a model does: a key of its config is no proof.

Whether a later token, the length of a call or a position changes the logits, and whether a loss has
more terms than the cross-entropy, is computed. Answers are kept for each class and config.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from furlong.models.shrink import VOCAB_SIZE, shrink_config

_NUM_TOKENS, _FEW_POSITIONS = 20, 8
_LEAST = 1e-4
"""The least relative change of logits that is no rounding: scans compute in float32."""
_SPREAD = 5
"""Tokens and positions matter more where weights are larger than transformers draws them."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The effects of a decoder; all of them where a tiny one cannot be made."""

    sees_later: bool = True
    """Whether logits change with a later token."""
    depends_on_length: bool = True
    """Whether they change with the number of tokens in the call, within the model's positions."""
    adds_loss: bool = True
    """Whether its loss is more than the cross-entropy."""


def answers_of(model: Any) -> Answers:
    """The effects of a transformers model, by its class and config."""
    text = model.config.get_text_config()
    is_text = text is model.config  # a subclass of a family's has its own code
    model_class: Any = type(model) if is_text else None
    return _answers(model_class, type(text), _plain(text))  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def _answers(model_class: Any, config_class: Any, text: str) -> Answers:
    ids = _ids()
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 1) % VOCAB_SIZE
    half = _NUM_TOKENS // 2
    try:
        config = shrink_config(config_class.from_dict(json.loads(text)), max_seq_len=0)
        run = partial(_tiny(model_class, config), use_cache=False)
        out = run(input_ids=ids, labels=ids)
        own = cross_entropy(out.logits[0, :-1].double(), ids[0, 1:])
        later, short = run(input_ids=other).logits, run(input_ids=ids[:, :half]).logits
    except Exception:  # a family's own code may do anything with small sizes
        return Answers()
    has_loss = out.loss is not None and not torch.isclose(out.loss.double(), own, rtol=_LEAST)
    return Answers(
        sees_later=_differs(out.logits[:, :-1], later[:, :-1]),
        depends_on_length=_differs(out.logits[:, :half], short),
        adds_loss=getattr(out, "aux_loss", None) is not None or has_loss,
    )


Positions = Literal["rotary", "table", "none"]


def positions_of(config: Any) -> Positions:
    """How a decoder of this config tells positions apart: by RoPE, by a table with an entry for
    each, or not at all outside of what its layers are."""
    text = config.get_text_config()
    return _positions(type(text), _plain(text))  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def _positions(config_class: Any, text: str) -> Positions:
    def logits(change: Callable[[Any], None]) -> tuple[list[Any], Tensor]:
        config: Any = shrink_config(config_class.from_dict(json.loads(text)), max_seq_len=0)
        change(config)
        model = _tiny(None, config)
        shapes = [x.shape for x in model.state_dict().values()]
        return shapes, model(input_ids=_ids(), use_cache=False).logits

    def turn(config: Any) -> None:
        for entry in rope_entries(config):
            entry |= {"rope_type": "linear", "factor": 3.0}

    has_rope = bool(rope_entries(config_class.from_dict(json.loads(text))))
    try:
        shapes, truth = logits(lambda config: None)
        if has_rope and _differs(truth, logits(turn)[1]):
            return "rotary"
    except Exception:  # a family's own code may do anything with small sizes
        return "rotary" if has_rope else "table"
    try:
        fewer = logits(lambda config: setattr(config, "max_position_embeddings", _FEW_POSITIONS))
    except Exception:  # there is no such position
        return "table"
    return "none" if fewer[0] == shapes and not _differs(truth, fewer[1]) else "table"


def rope_entries(config: Any) -> list[dict[str, Any]]:
    """The RoPE parameters of a text config, one for all layers or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [x for x in parameters.values() if isinstance(x, dict)] or [parameters] * bool(
        parameters
    )


def _plain(config: Any) -> str:
    return json.dumps(config.to_dict(), sort_keys=True, default=str)


def _ids() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(5, VOCAB_SIZE, (1, _NUM_TOKENS), generator=generator, device="cpu")


def _tiny(model_class: Any, config: Any) -> Any:
    """A tiny model in float64 on the CPU, frozen."""
    from transformers import AutoModelForCausalLM

    make: Any = (
        AutoModelForCausalLM.from_config if model_class is None else model_class._from_config
    )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        model = make(
            config, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        for parameter in model.requires_grad_(False).parameters():
            if parameter.ndim >= 2:
                parameter.mul_(_SPREAD)
    return model


def _differs(a: Tensor, b: Tensor) -> bool:
    return not float((a - b).abs().max()) <= _LEAST * float(a.abs().max())
