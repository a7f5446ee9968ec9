"""Test what a model does by running a tiny one of its class, as config keys may be unused."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from furlong.models.routers import COEFFICIENT, Router, RouterRule, routers_of, rule_of
from furlong.models.shrink import VOCAB_SIZE, shrink_config

_NUM_TOKENS, _FEW_POSITIONS = 20, 8
_LEAST = 1e-4
"""Smallest relative change of logits that is not rounding: scans compute in float32."""
Positions = Literal["rotary", "table", "none"]


@dataclass(frozen=True, slots=True)
class Answers:
    """Effects of a decoder that make chunks inexact, one flag for each. If no tiny model of its
    class runs, all flags are true."""

    sees_later: bool = True
    """Whether logits change with a later token."""
    depends_on_length: bool = True
    """Whether logits change with the number of tokens in the call, within the model's positions."""
    adds_loss: bool = True
    """Whether the loss is more than the cross-entropy, and not by `RouterRule.loss`."""
    adds_router_loss: bool = False
    """Whether the loss is the cross-entropy and `RouterRule.loss`."""


def answers_of(model: Any) -> Answers:
    """Return the `Answers` for a transformers model, tested on a tiny one of its class."""
    text = model.config.get_text_config()
    # the model's own class, which may be a subclass with other code
    own: Any = type(model) if text is model.config else None
    return _answers(_key(text), own)


def positions_of(config: Any) -> Positions:
    """Return how a decoder of this config encodes positions: "rotary", "table" (one entry for each
    position), or "none" (any number of positions)."""
    return _positions(_key(config.get_text_config()))


def rope_entries(config: Any, *, but: str = "") -> list[dict[str, Any]]:
    """Return the RoPE parameters of a text config: a list with one dict or, if layer types have
    different RoPE, with one dict per layer type. `but`: a layer type to leave out."""
    parameters = getattr(config, "rope_parameters", None) or {}
    layered = {key: entry for key, entry in parameters.items() if isinstance(entry, dict)}
    if parameters and not layered:
        return [parameters]
    return [entry for key, entry in layered.items() if key != but]


@lru_cache(maxsize=64)
def _answers(key: tuple[Any, str], model_class: Any) -> Answers:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, VOCAB_SIZE, (1, _NUM_TOKENS), generator=generator, device="cpu")
    other, half = ids.clone(), _NUM_TOKENS // 2
    other[0, -1] = 4
    try:
        tiny = _tiny(_small(key), model_class)
        run = partial(tiny, use_cache=False)
        out, rule, routed = _routed(tiny, ids)
        later, short = run(other).logits, run(ids[:, :half]).logits
        own = cross_entropy(out.logits[0, :-1].double(), ids[0, 1:])
        balanced = own if rule is None else own + rule.loss(routed)
    except Exception:  # a family's own code may do anything with small sizes
        return Answers()
    has_aux = getattr(out, "aux_loss", None) is not None and rule is not None
    return Answers(
        sees_later=_differs(out.logits[:, :-1], later[:, :-1]),
        depends_on_length=_differs(out.logits[:, :half], short),
        adds_loss=_differs(out.loss, balanced if has_aux else own),
        adds_router_loss=has_aux and not _differs(out.loss, balanced),
    )


def _routed(tiny: Any, ids: Tensor) -> tuple[Any, RouterRule | None, list[Tensor]]:
    """Return (output of a tiny model with labels, the loss of routers that its config asks for, the
    logits of the routers that are found). The loss has the coefficient 1, so that it is seen."""
    rule, found, text = rule_of(tiny), list[Tensor](), tiny.config.get_text_config()
    if rule is not None:
        for place in (tiny, text):
            if hasattr(place, COEFFICIENT):
                setattr(place, COEFFICIENT, 1.0)

    def note(router: Router, _: Any, __: Any, output: Any) -> None:
        if (logits := router.logits(output)) is not None:
            found.append(logits)

    with ExitStack() as stack:
        for router in routers_of(tiny.get_decoder()):
            stack.callback(router.module.register_forward_hook(partial(note, router)).remove)
        out = tiny(ids, labels=ids, use_cache=False)
    return out, rule, found


@lru_cache(maxsize=64)
def _positions(key: tuple[Any, str]) -> Positions:
    plain, turned, few = _small(key), _small(key), _small(key)
    has_rope = bool(rope_entries(plain))
    for entry in rope_entries(turned):
        entry |= {"rope_type": "linear", "factor": 3.0}
    few.max_position_embeddings = _FEW_POSITIONS
    ids = torch.arange(5, 5 + _NUM_TOKENS, device="cpu")[None]
    try:
        truth = _tiny(plain)(ids, use_cache=False).logits
        if has_rope and _differs(truth, _tiny(turned)(ids, use_cache=False).logits):
            return "rotary"
        return "table" if _differs(truth, _tiny(few)(ids, use_cache=False).logits) else "none"
    except Exception:  # a position beyond the table, or the family's code fails with small sizes
        return "rotary" if has_rope else "table"


def _key(config: Any) -> tuple[Any, str]:
    return type(config), json.dumps(config.to_dict(), sort_keys=True, default=str)


def _small(key: tuple[Any, str]) -> Any:
    return shrink_config(key[0].from_dict(json.loads(key[1])), max_seq_len=0)


def _tiny(config: Any, model_class: Any = None) -> Any:
    """Return the model of a tiny config, for tests: frozen, in eval mode, in float64 on the CPU,
    with random weights. `model_class`: its class; None: the one that transformers chooses."""
    from transformers import AutoModelForCausalLM

    make = model_class._from_config if model_class else AutoModelForCausalLM.from_config
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        return spread(make(config, dtype=torch.float64, **eager).eval().requires_grad_(False))


@torch.no_grad()
def spread(model: Any) -> Any:
    """Scale up a tiny model's weights in place, so that attention and positions matter."""
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.mul_(5)
    return model


def _differs(a: Tensor, b: Tensor) -> bool:
    return not float((a - b).abs().max()) <= _LEAST * float(a.abs().max())
