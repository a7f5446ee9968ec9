"""Rows of new tokens in the embedding and the head of a model, each the mean of the rows before.

transformers reads tensors of files as slices, each process the rows of its share; here the slices
of the embedding and the head get more rows, so that stages and shares are read as of any model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from furlong.errors import ConfigError, UnsupportedModelError

_BLOCK_ROWS = 4096


def grow_config(config: Any, rows: range, source: str) -> None:
    """Let a transformers config have `rows` (ids of new tokens) in its vocabulary, in place. Raises
    UnsupportedModelError for a family that has other tables by token id."""
    own = config.get_text_config()
    if getattr(own, "vocab_size_per_layer_input", None):
        raise UnsupportedModelError(
            given=f"new tokens for model type {config.model_type}, whose layers embed tokens, too",
            required="a model with one embedding and one head, whose rows are added",
            source=f"model.new_tokens, model.tokenizer, and {source}, config.json",
            change="remove model.new_tokens; or name tokens that the tokenizer has unused",
        )
    own.vocab_size = max(own.vocab_size, rows.stop)


def end_names(model: Any) -> list[str]:
    """Return the names of the parameters of a model's embedding and head."""
    ends = {model.get_input_embeddings(), model.get_output_embeddings()} - {None}
    return [
        f"{name}.{leaf}"
        for name, module in model.named_modules()
        if module in ends
        for leaf, _ in module.named_parameters()
    ]


class _Grown:
    """A tensor of a file by rows of tokens, as safetensors' slices are, with rows of new ones."""

    def __init__(self, known: Any, rows: range) -> None:
        # an empty model has tensors in the place of slices
        shape = known.shape if isinstance(known, Tensor) else known.get_shape()
        self.known, self.rows = known, rows
        self.num_known, self.sizes = shape[0], [*shape[1:]]

    def get_dtype(self) -> str:
        return str(self.known.get_dtype())

    def get_shape(self) -> list[int]:
        return [max(self.num_known, self.rows.stop), *self.sizes]

    @cached_property
    def mean(self) -> Tensor:
        """The mean of the rows of the tokens before the new ones, in float64."""
        starts = range(0, self.rows.start, _BLOCK_ROWS)
        ends = (min(start + _BLOCK_ROWS, self.rows.start) for start in starts)
        blocks = (self.known[start:end] for start, end in zip(starts, ends, strict=True))
        sums = [block.double().sum(0) for block in blocks]
        return torch.stack(sums).sum(0) / self.rows.start

    def __getitem__(self, index: Any) -> Tensor:
        own, *others = index if isinstance(index, tuple) else (index,)
        num_rows, *sizes = self.get_shape()
        asked = range(num_rows)[slice(None) if own is ... else own]
        stop = min(asked.stop, self.num_known)
        found: Tensor = self.known[min(asked.start, stop) : stop]
        new = range(max(asked.start, self.rows.start), min(asked.stop, self.rows.stop))
        if new:
            known, found = found, found.new_empty(len(asked), *sizes)
            found[: len(known)] = known
            found[new.start - asked.start : new.stop - asked.start] = self.mean.to(found.dtype)
        return found[:, *others]


@contextmanager
def reading_rows(rows: range, names: Collection[str]) -> Iterator[None]:
    """Context manager: let transformers read files as if they had `rows` (ids of new tokens) in the
    parameters `names`, of which files may have others before the last two parts."""
    from transformers import modeling_utils

    name = "convert_and_load_state_dict_in_model"
    load = getattr(modeling_utils, name)
    ends = tuple("." + ".".join(one.split(".")[-2:]) for one in names)

    def loaded(*given: Any, state_dict: dict[str, Any], **named: Any) -> Any:
        grown = {
            key: _Grown(one, rows) if f".{key}".endswith(ends) else one
            for key, one in state_dict.items()
        }
        return load(*given, state_dict=grown, **named)

    with patch.object(modeling_utils, name, loaded):
        yield


def token_indices(model: Any, rows: range, saved: Collection[str]) -> dict[str, list[int]]:
    """Return peft's `trainable_token_indices` for `rows`: all of the embedding and, unless it is
    tied, of the head, but those that `saved` (modules_to_save) trains whole.

    Raises UnsupportedModelError for a head with a bias, which peft leaves out.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    ends = [embedding] if head is None or head.weight is embedding.weight else [embedding, head]
    whole = tuple(f".{name}" for name in saved)
    apart = [end for end in ends if not f".{names[end]}".endswith(whole)]
    if len(ends) == 1 and head is not None and f".{names[head]}".endswith(whole):
        apart = []  # tied: naming one trains both whole
    if apart and getattr(head, "bias", None) is not None:
        raise UnsupportedModelError(
            given="new tokens under adapters for a head with a bias",
            required="a head without a bias: peft's trainable_token_indices leave it out",
            source="model.new_tokens, model.tokenizer, and model.lora",
            change="train every weight (remove model.lora), or"
            f" set model.lora.modules_to_save: [{', '.join(names[end] for end in ends)}]",
        )
    return {names[end]: [*rows] for end in apart}


def require_one_place(saved: Collection[str], *, divides: bool, layers: range | None) -> None:
    """Raise ConfigError for new rows beside adapters in a model that is divided, for peft reads the
    rows of a weight past the hooks that gather it; and in a stage, whose head may be elsewhere."""
    leaves = {name.rpartition(".")[2] for name in saved}
    if {"embed_tokens", "lm_head"} <= leaves or not (divides or layers is not None):
        return
    raise ConfigError(
        given="new tokens beside adapters of a model whose weights are divided or in stages",
        required="weights that are whole on each process, for peft's trainable_token_indices",
        source="model.new_tokens, model.tokenizer, parallel and offload",
        change="set model.lora.modules_to_save: [embed_tokens, lm_head], which trains all rows; or"
        " parallel: {replicate: DP} without pp and offload, for replicas that hold all weights",
    )
