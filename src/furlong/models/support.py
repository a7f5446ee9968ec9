"""Refusal by name of models that could not be trained exactly, and what is worth a note."""

from __future__ import annotations

from typing import Any

from torch import nn

from furlong.errors import UnsupportedModelError
from furlong.families import (
    ATTENTION_BLOCK,
    ATTENTION_DROPOUTS,
    CAUSAL_LAYER_TYPES,
    CHUNKED,
    INDEXERS,
    RECURRENT_LAYER_TYPES,
    TOKEN_LAYER_TYPES,
    family_of,
)


def refuse_unsupported(
    model: nn.Module, max_seq_len: int | None, *, needs_head: bool = True
) -> None:
    """Raise UnsupportedModelError for what is known to break exactness."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_decoder"):
        raise _unsupported(model, "is no transformers model", "a causal decoder of transformers")
    head = model.get_output_embeddings()  # type: ignore[operator]
    if getattr(config, "is_encoder_decoder", False) or (needs_head and head is None):
        raise _unsupported(model, "has no causal language-model head", "a ...ForCausalLM model")
    for place, module in (
        *((("head", head),) if head is not None else ()),
        ("input embeddings", model.get_input_embeddings()),  # type: ignore[operator]
    ):
        if getattr(getattr(module, "weight", None), "ndim", 0) != 2:
            raise _unsupported(
                model,
                f"has a {place} of type {type(module).__name__}, without a weight of shape (V, D)",
                "one matrix that tells the size of the vocabulary",
                "use torch.nn.Linear and torch.nn.Embedding",
            )
        if getattr(module, "scale_grad_by_freq", False):
            raise _unsupported(
                model,
                f"has a {place} with scale_grad_by_freq=True, which counts the tokens of one call",
                "gradients that are sums over tokens: a chunk is one call of many",
                "set scale_grad_by_freq = False",
            )
    name = type(model).__name__
    refuse_config(config, name, f"the model ({name}) and its config")
    text = config.get_text_config()
    if not isinstance(getattr(text, "num_hidden_layers", None), int):
        raise _unsupported(model, "names no num_hidden_layers", "one stack of decoder layers")
    _refuse_layers(model, text)
    _refuse_rope(model, text, max_seq_len)
    if getattr(text, "output_router_logits", False):
        raise _unsupported(
            model,
            "adds a router loss (output_router_logits=True), which mixes all tokens of a batch",
            "no router loss",
            "set config.output_router_logits = False",
        )
    if model.training:
        refuse_attention_dropout(model)


def refuse_config(config: Any, given: str, source: str) -> None:
    """Raise UnsupportedModelError for the config of a model that no mend makes exact in chunks.

    `given` and `source`: the model's name in the error, and where it is from.
    """
    text = config.get_text_config()
    keys = [key for key, x in text.to_dict().items() if key.startswith(INDEXERS) and x is not None]
    if keys:
        what = f"picks the keys of each token with a learned indexer ({', '.join(sorted(keys))})"
    else:
        what = family_of(text.model_type).not_in_chunks
    if not what:
        return
    raise UnsupportedModelError(
        given=f"{given}, which {what}",
        required="layers in which each token sees all tokens before it, those of a window or a "
        "block, or a state in transformers' cache",
        source=source,
        change="train a model of another family",
    )


def refuse_attention_dropout(model: nn.Module) -> None:
    """Raise UnsupportedModelError if the config names an attention dropout above 0."""
    if attention_dropout(model) > 0:
        raise _unsupported(
            model,
            f"has attention dropout {attention_dropout(model)}",
            "no attention dropout: a chunk cannot draw what the whole sequence would have drawn",
            "set the attention dropout of its config to 0 before building it",
        )


def refuse_mixerless(model: nn.Module) -> None:
    """Raise UnsupportedModelError if the config names recurrent layers, of which none has shown."""
    text: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    named = set(getattr(text, "layer_types", None) or ()) & RECURRENT_LAYER_TYPES
    if named:
        raise _unsupported(
            model,
            f"has layers of type {', '.join(sorted(named))} that touch no cache",
            "recurrent layers that keep their states in one of transformers' caches",
        )


def attention_dropout(model: nn.Module) -> float:
    """The largest attention dropout that the config names."""
    text: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    return max(float(getattr(text, name, None) or 0.0) for name in ATTENTION_DROPOUTS)


def other_dropouts(model: nn.Module) -> dict[str, float]:
    """Names and probabilities of active dropouts: what they draw depends on the plan."""
    return {
        name: module.p
        for name, module in model.named_modules()
        if isinstance(module, nn.Dropout) and module.p > 0 and module.training
    }


def shortest_window(model: nn.Module) -> int | None:
    """The shortest sliding window of any layer in tokens, None if no layer has one."""
    text: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    window = getattr(text, "sliding_window", None)
    layer_types = getattr(text, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    if getattr(text, "use_sliding_window", True) is False:
        return None
    return int(window) if window else None


def rope_types(text_config: Any) -> set[str]:
    """The RoPE types of a text config, one for all layers or one per layer type."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    entries = [v for v in parameters.values() if isinstance(v, dict)] or [parameters]
    return {str(entry.get("rope_type", "default")) for entry in entries}


def _refuse_layers(model: nn.Module, text: Any) -> None:
    known = CAUSAL_LAYER_TYPES | RECURRENT_LAYER_TYPES | TOKEN_LAYER_TYPES
    unknown = set(getattr(text, "layer_types", None) or ()) - known
    if unknown:
        raise _unsupported(
            model,
            f"has layers of type {', '.join(sorted(unknown))}",
            "layers in which tokens meet in causal attention, whole or with a sliding window, "
            "or in a state",
        )
    if CHUNKED in (getattr(text, "layer_types", None) or ()) and not getattr(
        text, ATTENTION_BLOCK, None
    ):
        raise _unsupported(
            model,
            f"has layers of type {CHUNKED}, and its config names no {ATTENTION_BLOCK}",
            "the tokens of an attention block",
            f"set config.{ATTENTION_BLOCK}, or the layers' own types",
        )
    if getattr(text, "use_bidirectional_attention", None):
        raise _unsupported(model, "attends in both directions", "causal attention")


def _refuse_rope(model: nn.Module, text: Any, max_seq_len: int | None) -> None:
    types = rope_types(text)
    if "dynamic" in types:
        raise _unsupported(
            model,
            "has RoPE of type dynamic, whose frequencies depend on the length of each call",
            "position embeddings that depend on the position alone",
            "choose another type, such as yarn or linear, in config.rope_parameters",
        )
    if "longrope" in types and max_seq_len is None:
        raise _unsupported(
            model,
            "has RoPE of type longrope, with one set of factors for short and one for long runs",
            "the length of the run's longest sequence, to choose the set once",
            "pass max_seq_len to forward_backward or Engine",
        )


def _unsupported(
    model: nn.Module, what: str, required: str, change: str = "train a model of another family"
) -> UnsupportedModelError:
    name = type(model).__name__
    return UnsupportedModelError(
        given=f"{name} {what}", required=required, source=f"the model ({name}) and its config",
        change=change,
    )  # fmt: skip
