"""Records to token ids and labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizers import CHATML, CHATML_WITH_TAGS, byte_tokenizer, word_tokenizer
from tokenizers import normalizers, processors

from furlong.config.schema import Format
from furlong.data import tokenize
from furlong.data.formats import Reading, encode
from furlong.data.records import BLANK, Notes, SourceRecord
from furlong.data.tokenize import Encoded, Sequence, fingerprint, load_tokenizer
from furlong.errors import ConfigError, DataError

TURNS = [
    {"role": "user", "content": "a?"},
    {"role": "assistant", "content": "Привет"},
    {"role": "user", "content": "b?"},
    {"role": "assistant", "content": ""},
]


def run(
    fields: list[dict[str, Any]], tokenizer: Any, format: Format = "text"
) -> tuple[list[Encoded], dict[str, int]]:
    notes = Notes()
    records = (SourceRecord(f, 0, line, f"file:{line}") for line, f in enumerate(fields, start=1))
    encoded = [one for _, own in encode(records, tokenizer, Reading(format), notes) for one in own]
    return encoded, {what: number for what, (number, *_) in notes.items()}


def words(text: str, post_processor: str | None = None) -> list[int]:
    (sequence,), _ = run([{"text": text}], word_tokenizer(post_processor))
    assert sequence.labels is sequence.input_ids
    assert sequence.input_ids.dtype == np.int32
    return sequence.input_ids.tolist()


def learnt(sequence: Encoded, tokenizer: Any) -> str:
    assert set(sequence.labels[sequence.labels != sequence.input_ids].tolist()) <= {-100}
    return str(tokenizer.decode(sequence.input_ids[sequence.labels != -100].tolist()))


@pytest.mark.parametrize(
    ("post_processor", "ids"),
    [(None, [2, 3, 1]), ("<s> $A", [0, 2, 3, 1]), ("<s> $A </s>", [0, 2, 3, 1])],
)
def test_eos_ends_every_text_once(post_processor: str | None, ids: list[int]) -> None:
    assert words("a b", post_processor) == ids


def test_an_eos_of_the_text_itself_is_not_repeated() -> None:
    assert words("a b </s>") == [2, 3, 1]


def test_order_over_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "_CHARS_PER_CALL", 100)
    texts = ["a " * (index % 70) + "b" for index in range(150)]
    sequences, _ = run([{"text": text} for text in texts], word_tokenizer())
    assert [len(s.input_ids) for s in sequences] == [index % 70 + 2 for index in range(150)]


def test_what_has_no_token_is_counted() -> None:
    texts = [{"text": ""}, {"text": "a"}, {"text": " \n"}]
    sequences, left_out = run(texts, word_tokenizer())
    assert ([s.input_ids.tolist() for s in sequences], left_out) == ([[2, 1]], {BLANK: 2})
    silent = word_tokenizer()
    silent.eos_token = None
    # The tokenizer drops every character of the first text.
    silent.backend_tokenizer.normalizer = normalizers.Replace("~", "")
    sequences, left_out = run([{"text": "~"}, {"text": "a"}], silent)
    assert [s.input_ids.tolist() for s in sequences] == [[2]]
    assert left_out == {tokenize.NO_EOS: 2, BLANK: 1}
    assert run([{"messages": []}], byte_tokenizer(), "chat") == ([], {BLANK: 1})
    assert run([{"input_ids": []}], byte_tokenizer(), "tokens") == ([], {BLANK: 1})
    assert run([{"prompt": " ", "completion": ""}], byte_tokenizer(), "completion")[1] == {BLANK: 1}


def test_a_text_is_of_bounded_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "MAX_TEXT_BYTES", 3)
    run([{"text": "123"}, {"text": "é"}], word_tokenizer())
    with pytest.raises(DataError, match=r"a text of more than 3 B[\s\S]*file:2"):
        run([{"text": "é"}, {"text": "éé"}], word_tokenizer())


@pytest.mark.parametrize("template", [CHATML, CHATML_WITH_TAGS], ids=["prefixes", "tags"])
def test_answers_are_learnt_and_nothing_is_added(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    (sequence,), _ = run([{"messages": TURNS}], tokenizer, "chat")
    assert learnt(sequence, tokenizer) == "Привет<|im_end|>\n<|im_end|>\n"
    expected = tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert tokenizer.decode(sequence.input_ids.tolist()) == expected


def test_tags_give_the_mask_that_transformers_gives() -> None:
    tokenizer = byte_tokenizer(CHATML_WITH_TAGS)
    (sequence,), _ = run([{"messages": TURNS}], tokenizer, "chat")
    reference = tokenizer.apply_chat_template(
        TURNS, return_dict=True, return_assistant_tokens_mask=True
    )
    assert sequence.input_ids.tolist() == reference["input_ids"]
    assert (sequence.labels != -100).tolist() == [bool(m) for m in reference["assistant_masks"]]


@pytest.mark.parametrize("post_processor", [None, "<s> $A", "<s> $A </s>"])
def test_a_completion_and_its_end_are_learnt(post_processor: str | None) -> None:
    records = [{"prompt": "a b ", "completion": "c b"}, {"prompt": "a", "completion": ""}]
    (one, empty), _ = run(records, word_tokenizer(post_processor), "completion")
    begin = [0] if post_processor else []
    assert one.input_ids.tolist() == [*begin, 2, 3, 4, 3, 1]
    assert one.labels.tolist() == [-100] * len(begin) + [-100, -100, 4, 3, 1]
    assert empty.labels.tolist() == [-100] * len(begin) + [-100, 1]


@pytest.mark.parametrize("trims", [True, False])
def test_white_space_of_answers_is_learnt(trims: bool) -> None:
    """Offsets that are trimmed, as GPT-NeoX has them, leave nothing of a token of spaces."""
    tokenizer = byte_tokenizer()
    added = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 258)])
    own = processors.Sequence([processors.ByteLevel(trim_offsets=trims), added])
    tokenizer.backend_tokenizer.post_processor = own
    code = "f():\n    x  =\n"
    (one,), _ = run([{"prompt": "a b\n", "completion": code}], tokenizer, "completion")
    assert learnt(one, tokenizer) == code + "<end>"
    turns = [TURNS[0], {"role": "assistant", "content": code}]
    (two,), _ = run([{"messages": turns}], tokenizer, "chat")
    assert learnt(two, tokenizer) == code + "<|im_end|>\n"
    left = tokenizer.backend_tokenizer.post_processor.__getstate__()
    assert left == own.__getstate__()


def test_a_token_on_the_border_is_learnt() -> None:
    (sequence,), _ = run(
        [{"prompt": "a unk", "completion": "nown"}], word_tokenizer(), "completion"
    )
    assert sequence.labels.tolist() == [-100, 4, 1]


def test_only_fast_tokenizers_can_mask() -> None:
    class Slow:
        is_fast = False
        name_or_path = "slow"
        eos_token_id = None

    with pytest.raises(ConfigError, match=r"slow: a tokenizer that cannot tell"):
        run([{"prompt": "a", "completion": "b"}], Slow(), "completion")


def test_a_text_that_breaks_the_tokenizer_is_named() -> None:
    """Rust code panics where its regular expression gives up; the texts beside it are taken."""
    panic = type("PanicException", (BaseException,), {})

    class Fragile:
        is_fast = True
        eos_token_id = None

        def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
            if any("   " in text for text in texts):
                raise panic("retry-limit-in-match over")
            return {"input_ids": [[len(text)] for text in texts]}

    records = [{"text": "ab"}, {"text": "a    b"}]
    with pytest.raises(DataError, match=r"6 characters on which the tokenizer fails: retry") as e:
        run(records, Fragile())
    assert e.value.source == "file:2"


def test_a_folder_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without a tokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"without a tokenizer[\s\S]*--tokenizer"):
        load_tokenizer(str(tmp_path), "--tokenizer")


def test_the_fingerprint_follows_what_decides_ids(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    before = fingerprint(tokenizer)
    # A call sets truncation and padding; where it was loaded from does not matter.
    tokenizer(["a", "bc"], padding=False, truncation=True, max_length=3)
    assert fingerprint(tokenizer) == before
    tokenizer.save_pretrained(tmp_path / "one")
    tokenizer.save_pretrained(tmp_path / "two")
    one, two = (load_tokenizer(str(tmp_path / name)) for name in ("one", "two"))
    assert fingerprint(one) == fingerprint(two)
    others = [byte_tokenizer(CHATML_WITH_TAGS), word_tokenizer(), word_tokenizer("<s> $A")]
    assert len({before, *map(fingerprint, others)}) == 4
    one.eos_token = "<|im_end|>"
    assert fingerprint(one) != fingerprint(two)


def test_a_sequence_counts_what_is_learnt() -> None:
    labels = np.array([5, -100, 3, 4], np.int32)
    sequence = Sequence(0, "x", np.arange(4, dtype=np.int32), labels)
    assert (sequence.seq_len, sequence.num_valid_tokens) == (4, 2)
