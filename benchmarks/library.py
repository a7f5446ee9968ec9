"""A long-tailed batch of real text: source files of the Python standard library, tokenized.

A byte-level BPE is trained on the whole library (without its tests), then the first seed is taken
whose draw of files has the wanted shape: most of them short, one of them long.
"""

from __future__ import annotations

import random
import statistics
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_LEFT_OUT = {"site-packages", "test", "tests", "idle_test"}
_LONGEST_TOKENS = (16_384, 20_480)
_MEDIAN_TOKENS = 2_048
_TOTAL_TOKENS = 65_536
"""Of all files: a step of the slowest contender takes minutes, not a quarter of an hour."""
_NUM_SEEDS = 100_000


def long_tailed_batch(num_files: int, *, vocab_size: int) -> list[list[int]]:
    """Token ids of `num_files` files: median under 2,048 tokens, longest 16,385 to 20,480."""
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in _files()]
    ids = [encoding.ids for encoding in _tokenizer(texts, vocab_size).encode_batch(texts)]
    at_least, at_most = _LONGEST_TOKENS
    candidates = [sequence for sequence in ids if 2 <= len(sequence) <= at_most]
    for seed in range(_NUM_SEEDS):
        drawn = random.Random(seed).sample(candidates, num_files)
        lens = [len(sequence) for sequence in drawn]
        is_long_tailed = max(lens) > at_least and statistics.median(lens) < _MEDIAN_TOKENS
        if is_long_tailed and sum(lens) <= _TOTAL_TOKENS:
            return drawn
    raise RuntimeError(f"no draw of {num_files} files out of {len(candidates)} has a long tail")


def shrunk(batch: list[list[int]], factor: float) -> list[list[int]]:
    """The beginning of every sequence, `factor` of it: the same shape, smaller."""
    return [sequence[: max(2, round(factor * len(sequence)))] for sequence in batch]


def _files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    found = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    return [root / path for path in found if not _LEFT_OUT & set(path.parts)]


def _tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
