"""Pairs of answers: the shapes in which they lie around, and what is no pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_load import load, write_lines
from tiny_tokenizers import CHATML, CHATML_WITH_TAGS, byte_tokenizer, word_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from furlong.data.dataset import DataSet
from furlong.data.loader import Epochs, iterate_batches
from furlong.data.tokenize import IGNORE_INDEX
from furlong.errors import DataError
from furlong.plan.lengths import StepSize

ASK = {"role": "user", "content": "why?"}
GOOD = {"role": "assistant", "content": "because"}
BAD = {"role": "assistant", "content": "no"}
SYSTEM = {"role": "system", "content": "be kind"}
MORE = {"role": "user", "content": "and now?"}
ULTRA = {
    "prompt": "why?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD], "messages": [ASK, GOOD],
    "score_chosen": 7.5, "score_rejected": 2.0,
}  # fmt: skip
TURN = "<|im_start|>{role}\n{content}<|im_end|>\n"


def pairs_of(
    tmp_path: Path, *records: dict[str, Any], tokenizer: Any = None, **more: Any
) -> DataSet:
    file = write_lines(tmp_path / "pairs.jsonl", *records)
    return load(
        tmp_path, file, tokenizer=tokenizer or byte_tokenizer(), format="preference", **more
    )


def texts(data: DataSet, tokenizer: Any) -> list[tuple[str, str]]:
    """Of each sequence what is not learnt, and what is."""
    found = []
    for sequence in data:
        learnt = sequence.labels != IGNORE_INDEX
        parts = (sequence.input_ids[~learnt], sequence.input_ids[learnt])
        found.append(tuple(tokenizer.decode(part) for part in parts))
        assert (np.diff(np.flatnonzero(learnt)) == 1).all()
    return found


HUMAN, GPT, NO = (
    {"from": name, "value": said}
    for name, said in (("human", "why?"), ("gpt", "because"), ("gpt", "no"))
)


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [HUMAN], "chosen": GPT, "rejected": NO},
        {"chosen": [HUMAN, GPT], "rejected": [HUMAN, NO]},
        {"instruction": "why?", "input": "", "chosen": "because", "rejected": "no"},
        {"chosen": [ASK, GOOD], "rejected": "no"},
        {"system": "be kind", "prompt": [ASK], "chosen": GOOD, "rejected": BAD},
    ],
    ids=["sharegpt", "sharegpt whole", "alpaca", "another last message", "system"],
)
def test_pairs_of_other_programs(tmp_path: Path, record: dict[str, Any]) -> None:
    tokenizer = byte_tokenizer()
    system = TURN.format(**SYSTEM) if "system" in record else ""
    asked = system + TURN.format(**ASK) + "<|im_start|>assistant\n"
    assert texts(pairs_of(tmp_path, record, tokenizer=tokenizer), tokenizer) == [
        (asked, f"{answer}<|im_end|>\n") for answer in ("because", "no")
    ]


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}, [ASK]),
        ({"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, [ASK]),
        ({"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, [ASK]),
        (ULTRA, [ASK]),
        (ULTRA | {"chosen": [SYSTEM, ASK, GOOD], "rejected": [SYSTEM, ASK, BAD]}, [SYSTEM, ASK]),
        (
            {"chosen": [ASK, GOOD, MORE, GOOD], "rejected": [ASK, GOOD, MORE, BAD]},
            [ASK, GOOD, MORE],
        ),
    ],
    ids=["explicit", "explicit whole", "implicit", "ultrafeedback", "system", "later turns"],
)
def test_conversations(
    tmp_path: Path, record: dict[str, Any], prompt: list[dict[str, str]]
) -> None:
    tokenizer = byte_tokenizer(CHATML_WITH_TAGS if record is ULTRA else CHATML)
    data = pairs_of(tmp_path, record, tokenizer=tokenizer)
    asked = "".join(TURN.format(**turn) for turn in prompt) + "<|im_start|>assistant\n"
    assert texts(data, tokenizer) == [
        (asked, f"{answer['content']}<|im_end|>\n") for answer in (GOOD, BAD)
    ]
    assert (len(data), data.units.tolist(), data.mixture.sizes) == (2, [[0, 2]], (1,))


@pytest.mark.parametrize(
    ("record", "learnt"),
    [
        ({"prompt": "a b ", "chosen": "c c", "rejected": "b"}, [[4, 4, 1], [3, 1]]),
        ({"chosen": "a b c c", "rejected": "a b b"}, [[4, 4, 1], [3, 1]]),
    ],
    ids=["explicit", "implicit"],
)
def test_texts(tmp_path: Path, record: dict[str, Any], learnt: list[list[int]]) -> None:
    data = pairs_of(tmp_path, record, tokenizer=word_tokenizer())
    assert [s.input_ids[:2].tolist() for s in data] == [[2, 3]] * 2
    assert [s.labels.tolist() for s in data] == [[-100, -100, *own] for own in learnt]


def test_the_word_in_which_texts_part_is_learnt_whole(tmp_path: Path) -> None:
    """Its first letters are a token of one text, and a part of one in the other."""
    backend = Tokenizer(
        models.BPE(
            vocab={s: i for i, s in enumerate(["<end>", "a", "b", "c", "d", "x", "ab", "abc"])},
            merges=[("a", "b"), ("ab", "c")],
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    for record in (
        {"chosen": "x abc", "rejected": "x abd x"},
        {"prompt": "x ab", "chosen": "c", "rejected": "d x"},
    ):
        data = pairs_of(tmp_path, record, tokenizer=tokenizer)
        assert [s.input_ids.tolist() for s in data] == [[5, 7, 0], [5, 6, 4, 5, 0]]
        assert [s.labels.tolist() for s in data] == [[-100, 7, 0], [-100, 6, 4, 5, 0]]


@pytest.mark.parametrize("prompt", ["a b ", "a b", "a b \n"])
def test_texts_that_repeat_their_prompt_hold_it_once(tmp_path: Path, prompt: str) -> None:
    """As data sets of whole texts have it; one answer alone may well begin with its prompt."""
    record = {"prompt": prompt, "chosen": "a b c c", "rejected": "a b b"}
    one = {"prompt": "a b ", "chosen": "a b c", "rejected": "c"}
    data = pairs_of(tmp_path, record, one, record, tokenizer=word_tokenizer())
    whole = [[2, 3, 4, 4, 1], [2, 3, 3, 1]]
    assert [s.input_ids.tolist() for s in [*data][:2]] == whole
    assert [s.labels.tolist()[2:] for s in [*data][:2]] == [[4, 4, 1], [3, 1]]
    assert [s.labels.tolist()[:2] for s in [*data][:2]] == [[-100, -100]] * 2
    assert data[2].input_ids.tolist() == [2, 3, 2, 3, 4, 1]
    no_answer = {"prompt": "a b", "chosen": "a b", "rejected": "a b c"}
    with pytest.raises(DataError, match="1 pairs with an empty answer"):
        pairs_of(tmp_path, no_answer, tokenizer=word_tokenizer())


def test_what_is_no_pair_is_left_out_with_its_line(tmp_path: Path) -> None:
    same = {"prompt": "a ", "chosen": "b", "rejected": "b"}
    as_tokens = {"prompt": "a ", "chosen": "b", "rejected": "b  "}
    empty = {"prompt": "a ", "chosen": "b", "rejected": " "}
    pair = {"prompt": "a ", "chosen": "b", "rejected": "c"}
    records = (pair, same, empty, as_tokens, pair, same)
    data = pairs_of(
        tmp_path, *[record | {"score": 1} for record in records], tokenizer=word_tokenizer()
    )
    assert [Path(s.origin).name for s in [*data][::2]] == ["pairs.jsonl:1", "pairs.jsonl:5"]
    (line, total) = data.describe()
    assert "2 pairs, format preference by the fields chosen and rejected (not used: score)" in line
    assert total.startswith("data.train: 2 pairs,")
    assert "3 pairs with the same answers left out (first: " in line
    assert "pairs.jsonl:2)" in line
    assert "1 pairs with an empty answer left out (first: " in line


def test_conversations_without_a_choice(tmp_path: Path) -> None:
    blank = {"role": "assistant", "content": " "}
    others = [[ASK, GOOD], [ASK], [ASK, blank], [ASK, MORE], [ASK, BAD]]
    data = pairs_of(tmp_path, *[{"chosen": [ASK, GOOD], "rejected": other} for other in others])
    assert len(data) == 2
    assert "1 pairs with the same answers left out" in data.describe()[0]
    assert "3 pairs with an empty answer left out" in data.describe()[0]


@pytest.mark.parametrize(
    ("record", "given", "change"),
    [
        ({"question": "a", "chosen": "b", "rejected": "c"}, "question", "{prompt: question}"),
        ({"chosen": "b", "rejected": "c"}, "begin differently", "add the prompt"),
        (
            {"conversations": [], "chosen": {"from": "gpt", "value": "a"}, "rejected": {}},
            "rejected without a role", "data.fields",
        ),
        ({"text": "a"}, "a record with text", "data.fields: {prompt: ..., chosen: ..."),
        ({"prompt": "a", "chosen": "b", "rejected": [BAD]}, "begin differently", ""),
        ({"prompt": [ASK], "chosen": "b", "rejected": "c"}, "a prompt of messages", ""),
        ({"prompt": [], "chosen": [GOOD], "rejected": [BAD]}, "an empty prompt", ""),
        (
            {"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [BAD]},
            "a prompt that one answer repeats", "remove the prompt's messages",
        ),
        (
            {"prompt": [MORE, ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
            "or both in part", "remove the prompt's messages",
        ),
        (
            {"prompt": [ASK], "chosen": [MORE, ASK, GOOD], "rejected": [MORE, ASK, BAD]},
            "or both in part", "remove the prompt's messages",
        ),
        ({"chosen": [ASK, GOOD], "rejected": [MORE, BAD]}, "begin differently", "add the prompt"),
        (ULTRA | {"prompt": "who?"}, "a prompt 'who\\?' that is no turn", "write prompt as"),
        (ULTRA | {"chosen": [GOOD], "rejected": [BAD]}, "begin differently", "add the prompt"),
    ],
)  # fmt: skip
def test_refused_with_the_renaming(
    tmp_path: Path, record: dict[str, Any], given: str, change: str
) -> None:
    with pytest.raises(DataError, match=given) as caught:
        pairs_of(tmp_path, record)
    assert change in caught.value.change
    assert caught.value.source.endswith("pairs.jsonl:1")


def test_without_the_loss_pairs_are_named(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "p.jsonl", {"prompt": "a", "chosen": "b", "rejected": "c"})
    with pytest.raises(DataError) as caught:
        load(tmp_path, file)
    assert "set train.loss to dpo" in caught.value.change


LONG = [
    {"prompt": "a ", "chosen": "b", "rejected": "c"},
    {"prompt": "a a ", "chosen": "b " * 6, "rejected": "c"},
]


def test_too_long_is_of_the_pair(tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    with pytest.raises(DataError, match="a pair with a sequence of 9 tokens, of 2 pairs"):
        pairs_of(tmp_path, *LONG, tokenizer=tokenizer, max_seq_len=5)
    data = pairs_of(tmp_path, *LONG, tokenizer=tokenizer, max_seq_len=5, too_long="drop")
    assert (len(data), data.above["drop"]) == (2, 1)
    data = pairs_of(tmp_path, *LONG, tokenizer=tokenizer, max_seq_len=5, too_long="truncate")
    assert (len(data), data.above["truncate"], data.seq_lens.tolist()) == (4, 1, [3, 3, 5, 4])
    assert data.valid_tokens.tolist() == [2, 2, 3, 2]


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected", "what"),
    [("a a a a a a ", "b", "c", "no answer"), ("a ", "b b b b b b", "b b b b b c", "the same")],
)
def test_truncation_that_leaves_nothing_to_prefer(
    tmp_path: Path, prompt: str, chosen: str, rejected: str, what: str
) -> None:
    record = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    with pytest.raises(DataError, match=what) as caught:
        pairs_of(
            tmp_path, LONG[0], record, tokenizer=word_tokenizer(), max_seq_len=5,
            too_long="truncate",
        )  # fmt: skip
    assert caught.value.source.endswith("pairs.jsonl:2")


def test_batches_of_pairs_go_on_where_they_were(tmp_path: Path) -> None:
    records = [{"prompt": "a " * n, "chosen": "b", "rejected": "c"} for n in range(1, 8)]
    data = pairs_of(tmp_path, *records, tokenizer=word_tokenizer())
    epochs = Epochs(data.mixture, StepSize(3), 4, data.unit_lens)
    endless = iterate_batches(data, data.units, epochs)
    batches = [next(endless) for _ in range(5)]
    for batch in batches:
        ids = [sequence.seq_id for sequence in batch.sequences]
        assert ids[1::2] == [i + 1 for i in ids[::2]]
    assert [len(batch.sequences) for batch in batches] == [6, 6, 2, 6, 6]
    first_epoch = sorted(s.seq_id for batch in batches[:3] for s in batch.sequences)
    assert first_epoch == list(range(14))
    again = iterate_batches(data, data.units, epochs, state=batches[1].next_state)
    assert [s.seq_id for s in next(again).sequences] == [s.seq_id for s in batches[2].sequences]
    assert sorted(data.epoch_lens(4).tolist()) == sorted(data.seq_lens.tolist())


def test_the_cache_has_two_rows_of_a_record(tmp_path: Path) -> None:
    data = pairs_of(tmp_path, LONG[0], tokenizer=word_tokenizer())
    again = load(
        tmp_path, tmp_path / "pairs.jsonl", tokenizer=word_tokenizer(), format="preference"
    )
    assert again.parts[0].tokenized_s is None
    assert again.fingerprint == data.fingerprint
    assert again.parts[0].index[:, 2].tolist() == [1, 1]
    assert again.units.tolist() == [[0, 2]]
