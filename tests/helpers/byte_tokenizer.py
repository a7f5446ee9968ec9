"""A tokenizer that needs no training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(
    marks: Sequence[str] = ("<pad>", "<end>"), **settings: Any
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, after the special tokens `marks`."""
    symbols = [*marks, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    known = {"eos_token": "<end>", "pad_token": "<pad>"}
    named = {name: mark for name, mark in known.items() if mark in marks}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named, **settings)
