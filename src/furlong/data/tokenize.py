"""Documents to sequences of token ids; besides models, the only code that knows transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from furlong.data.sources import Document
from furlong.errors import ConfigError, DataError

IGNORE_INDEX = -100
"""The label of a token that adds no loss."""

_DOCUMENTS_PER_CALL = 64


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """A tokenized document: `input_ids` and `labels` are (T,) int32, labels unshifted."""

    seq_id: int
    origin: str
    input_ids: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]

    @property
    def seq_len(self) -> int:
        return len(self.input_ids)

    @property
    def num_valid_tokens(self) -> int:
        """Positions that add to the loss: the first token has no one to predict it."""
        return int(np.count_nonzero(self.labels[1:] != IGNORE_INDEX))


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The sequences of a data set and what became of those that were too long."""

    sequences: tuple[Sequence, ...]
    num_truncated: int = 0
    num_dropped: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(sequence.seq_len for sequence in self.sequences)

    @property
    def longest(self) -> int:
        return max(sequence.seq_len for sequence in self.sequences)


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a hub id or folder. Raises ConfigError."""
    from transformers import AutoTokenizer

    folder = Path(name).expanduser()
    try:
        return AutoTokenizer.from_pretrained(
            str(folder) if folder.is_dir() else name, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            given=f"{name} without a tokenizer: {reason}",
            required="tokenizer files beside config.json",
            source="model.name",
            change="save the model's tokenizer into the folder",
        ) from error


def tokenize(
    documents: Iterable[Document],
    tokenizer: Any,
    *,
    vocab_size: int,
    max_seq_len: int,
    too_long: Literal["error", "truncate", "drop"] = "error",
) -> Tokenized:
    """Every document as one sequence that ends with EOS, if the tokenizer has one.

    The tokenizer's own post-processor runs; EOS is appended where it left it out. `vocab_size` is
    the model's. Raises DataError for a token id outside it, a sequence above `max_seq_len` when
    `too_long` is error, and when nothing is left to learn from.
    """
    sequences: list[Sequence] = []
    num_truncated = num_dropped = 0
    for document, ids in _encode(documents, tokenizer):
        if len(ids) > max_seq_len:
            if too_long == "error":
                raise _too_long(document, len(ids), max_seq_len)
            if too_long == "drop":
                num_dropped += 1
                continue
            ids = ids[:max_seq_len]
            num_truncated += 1
        if len(ids) and int(ids.max()) >= vocab_size:
            raise DataError(
                given=f"token id {int(ids.max())} in sequence {len(sequences)}",
                required=f"ids below {vocab_size}, the model's vocab_size",
                source=document.origin,
                change="use the tokenizer that belongs to the model",
            )
        sequences.append(Sequence(len(sequences), document.origin, ids, ids))
    if not any(sequence.num_valid_tokens for sequence in sequences):
        raise DataError(
            given=f"{len(sequences)} sequences of at most one token, {num_dropped} dropped",
            required="at least one sequence of two tokens",
            source="data.train or data.eval",
            change="add text, or raise data.max_seq_len",
        )
    return Tokenized(tuple(sequences), num_truncated, num_dropped)


def _encode(
    documents: Iterable[Document], tokenizer: Any
) -> Iterator[tuple[Document, npt.NDArray[np.int32]]]:
    stream = iter(documents)
    eos = tokenizer.eos_token_id
    # A batch lets the tokenizer use its threads.
    while batch := list(islice(stream, _DOCUMENTS_PER_CALL)):
        encoded = tokenizer(
            [document.text for document in batch],
            return_attention_mask=False,
            verbose=False,
        )
        for document, ids in zip(batch, encoded["input_ids"], strict=True):
            if eos is not None and (not ids or ids[-1] != eos):
                ids = [*ids, eos]
            yield document, np.asarray(ids, dtype=np.int32)


def _too_long(document: Document, seq_len: int, max_seq_len: int) -> DataError:
    return DataError(
        given=f"a sequence of {seq_len:,} tokens",
        required=f"at most data.max_seq_len = {max_seq_len:,}",
        source=document.origin,
        change="raise data.max_seq_len, or set data.too_long to truncate or drop",
    )
