"""Real text: source files of the Python standard library, tokenized.

A byte-level BPE is trained on the whole library (without its tests). A long-tailed batch is that
of the first seed whose draw of files has the wanted shape: most of them short, one of them long.
Windows are pieces of equal length, to train a small model on and to hold out.
"""

from __future__ import annotations

import hashlib
import random
import statistics
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_LEFT_OUT = {"site-packages", "test", "tests", "idle_test"}
_TABLES = {"encodings"}
"""Folders of tables rather than text, each file much like the next."""
_FILES_PER_HELD_OUT = 10
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


def windows(num_tokens: int, *, vocab_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Pieces of `num_tokens` tokens, each of one file, without overlap: to train on, and held out.

    A hash of its path says which file is held out, and in which order files come: the same
    wherever Python is installed.
    """
    root = Path(sysconfig.get_path("stdlib"))
    digests = {
        hashlib.sha256(path.relative_to(root).as_posix().encode()).hexdigest(): path
        for path in _files()
        if not _TABLES & set(path.parts)
    }
    texts = [
        digests[digest].read_text(encoding="utf-8", errors="replace") for digest in sorted(digests)
    ]
    num_held_out = len(texts) // _FILES_PER_HELD_OUT
    tokenizer = _tokenizer(texts[num_held_out:], vocab_size)
    ids = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    held_out, trained = (
        [piece for sequence in part for piece in pieces(sequence, num_tokens)]
        for part in (ids[:num_held_out], ids[num_held_out:])
    )
    return trained, held_out


def pieces(sequence: list[int], num_tokens: int) -> list[list[int]]:
    """All whole pieces of `num_tokens` tokens, from the first token on; what is left over is not
    used."""
    starts = range(0, len(sequence) - num_tokens + 1, num_tokens)
    return [sequence[start : start + num_tokens] for start in starts]


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
