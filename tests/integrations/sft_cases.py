"""TRL's trainer for supervised fine-tuning with chunks, its tokenizer and its data."""

from __future__ import annotations

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTTrainer

from furlong.integrations import Trainer


class ChunkedSFTTrainer(Trainer, SFTTrainer):  # type: ignore[misc]
    """All it takes."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and an end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(["<pad>", "<end>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")


def prompts_and_completions() -> Dataset:
    records = [
        {"prompt": "x" * (1 + 5 * i % 7), "completion": " ".join(["ab", "cde"] * (1 + 11 * i % 5))}
        for i in range(60)
    ]
    return Dataset.from_list(records)
