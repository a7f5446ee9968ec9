"""Documents to sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from furlong.data.sources import Document
from furlong.data.tokenize import Tokenized, load_tokenizer, tokenize
from furlong.errors import ConfigError, DataError

WORDS = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "c": 4}


def word_tokenizer(template: str | None = None) -> Any:
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="c"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if template is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>")


def run(
    texts: list[str],
    template: str | None = None,
    max_seq_len: int = 10,
    too_long: Literal["error", "truncate", "drop"] = "error",
    vocab_size: int = 5,
) -> Tokenized:
    documents = [Document(text, f"file:{line}") for line, text in enumerate(texts, start=1)]
    return tokenize(
        documents,
        word_tokenizer(template),
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
        too_long=too_long,
    )


@pytest.mark.parametrize(
    ("template", "ids"),
    [(None, [2, 3, 1]), ("<s> $A", [0, 2, 3, 1]), ("<s> $A </s>", [0, 2, 3, 1])],
)
def test_eos_ends_every_sequence_once(template: str | None, ids: list[int]) -> None:
    (sequence,) = run(["a b"], template).sequences
    assert sequence.input_ids.tolist() == sequence.labels.tolist() == ids
    assert sequence.num_valid_tokens == len(ids) - 1
    assert sequence.origin == "file:1"


def test_order_and_identity_over_many_calls() -> None:
    tokenized = run(["a " * (index % 7) + "b" for index in range(150)])
    assert [s.seq_id for s in tokenized.sequences] == list(range(150))
    assert [s.seq_len for s in tokenized.sequences] == [index % 7 + 2 for index in range(150)]


def test_too_long_is_an_error_or_counted() -> None:
    with pytest.raises(DataError, match=r"a sequence of 5 tokens[\s\S]*file:2"):
        run(["a", "a a a a", "b"], max_seq_len=3)
    truncated = run(["a", "a a a a", "b"], max_seq_len=3, too_long="truncate")
    assert [s.seq_len for s in truncated.sequences] == [2, 3, 2]
    assert (truncated.num_truncated, truncated.num_dropped) == (1, 0)
    dropped = run(["a", "a a a a", "b"], max_seq_len=3, too_long="drop")
    assert [s.seq_id for s in dropped.sequences] == [0, 1]
    assert (dropped.num_truncated, dropped.num_dropped) == (0, 1)


def test_a_token_outside_the_vocabulary_is_named() -> None:
    with pytest.raises(DataError, match=r"token id 4 in sequence 1[\s\S]*file:2"):
        run(["a b", "a c"], vocab_size=4)


def test_nothing_to_learn_from_is_an_error() -> None:
    with pytest.raises(DataError, match="1 sequences of at most one token"):
        run(["a b"], max_seq_len=1, too_long="truncate")


def test_a_folder_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without a tokenizer"):
        load_tokenizer(str(tmp_path))


def test_ids_are_small_integers() -> None:
    assert run(["a b"]).sequences[0].input_ids.dtype == np.int32
