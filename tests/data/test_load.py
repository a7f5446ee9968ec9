"""Sources to data sets: formats found, tokens cached, what is too long dealt with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_tokenizers import CHATML, byte_tokenizer, word_tokenizer

from furlong.config.schema import DataConfig, Source
from furlong.data.dataset import SEQUENCES, DataSet, load_data
from furlong.data.formats import Reading
from furlong.errors import DataError
from furlong.train.build import load_splits

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]


def write_lines(file: Path, *records: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def load(tmp_path: Path, *paths: Path, tokenizer: Any = None, **options: Any) -> DataSet:
    named = [str(path) for path in paths]
    settings = DataConfig(train=named, cache_dir=str(tmp_path / "cache"), **options)
    return load_data(settings.train, tokenizer or word_tokenizer(), settings)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    lines = [{"text": text} for text in ("a", "b b b b", "c", "a b c")]
    return write_lines(tmp_path / "texts.jsonl", *lines)


def test_sources_follow_each_other(tmp_path: Path, texts: Path) -> None:
    (tmp_path / "b.txt").write_text("c c")
    pq.write_table(pa.table({"text": ["b"]}), tmp_path / "c.parquet")
    data = load(tmp_path, texts, tmp_path / "b.txt", tmp_path / "c.parquet")
    assert [s.input_ids.tolist() for s in data] == [
        [2, 1], [3, 3, 3, 3, 1], [4, 1], [2, 3, 4, 1], [4, 4, 1], [3, 1],
    ]  # fmt: skip
    assert [s.seq_id for s in data] == list(range(len(data))) == list(range(6))
    origins = [Path(s.origin).name for s in data]
    assert origins[3:] == ["texts.jsonl:4", "b.txt", "c.parquet, row 1"]
    assert data.seq_lens.tolist() == [s.seq_len for s in data]
    assert (data.num_tokens, data.num_valid_tokens, data.longest) == (18, 12, 5)
    assert data[-1].seq_id == 5
    with pytest.raises(IndexError):
        data[6]


def test_a_second_start_neither_reads_nor_tokenizes(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [s.input_ids.tolist() for s in load(tmp_path, texts)]
    monkeypatch.setattr("furlong.data.dataset.read_records", lambda *_: 1 / 0)
    again = load(tmp_path, texts)
    assert [s.input_ids.tolist() for s in again] == before
    assert again.describe()[0].endswith("cached")


def test_another_tokenizer_content_or_format_is_another_entry(tmp_path: Path, texts: Path) -> None:
    def num_entries() -> int:
        return len(list((tmp_path / "cache" / "tokens").iterdir()))

    load(tmp_path, texts)
    load(tmp_path, texts, max_seq_len=2, too_long="drop")
    assert num_entries() == 1
    load(tmp_path, texts, tokenizer=word_tokenizer("<s> $A"))
    assert num_entries() == 2
    load(tmp_path, texts, format="text")
    assert num_entries() == 3
    splitting = word_tokenizer()
    splitting.split_special_tokens = True
    load(tmp_path, texts, tokenizer=splitting)
    assert num_entries() == 4
    texts.write_text('{"text": "a"}')
    assert len(load(tmp_path, texts)) == 1
    assert num_entries() == 5


def test_auto_decides_for_each_source_and_says_so(tmp_path: Path) -> None:
    chat = write_lines(tmp_path / "chat.jsonl", {"messages": CHAT, "id": 1})
    pair = write_lines(tmp_path / "pair.jsonl", {"prompt": "a", "completion": "b", "text": "c"})
    ids = write_lines(tmp_path / "ids.jsonl", {"input_ids": [1, 2], "labels": [-100, 2]})
    text = tmp_path / "text.txt"
    text.write_text("abc")
    data = load(tmp_path, chat, pair, ids, text, tokenizer=byte_tokenizer())
    formats = [line.split("sequence, ")[1].split(",")[0] for line in data.describe()[:4]]
    assert formats == [
        "format chat by the field messages (not used: id)",
        "format completion by the fields prompt and completion (not used: text)",
        "format tokens by the field input_ids",
        "format text",
    ]
    assert [int((s.labels != -100).sum()) for s in data] == [4, 2, 1, 4]
    assert data.describe()[-1].startswith("data.train: 4 sequences, 33 tokens, 10 of them learnt")


def test_what_was_left_out_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"a b c a b c \xff")
    (folder / "b.bin").write_bytes(b"\0")
    (folder / "c.txt").write_text("")
    line = load(tmp_path, folder).describe()[0]
    assert f"1 binary files left out (first: {folder / 'b.bin'})" in line
    assert "1 blank texts left out" in line and "1 bytes that are no UTF-8 replaced" in line
    assert load(tmp_path, folder).describe()[0].rsplit(", ", 1)[0] == line.rsplit(", ", 1)[0]


def test_too_long_is_an_error_or_counted(tmp_path: Path, texts: Path) -> None:
    with pytest.raises(DataError) as caught:
        load(tmp_path, texts, max_seq_len=3)
    assert (
        caught.value.given == "a sequence of 5 tokens, and 1 more above the limit, of 4 sequences"
    )
    assert caught.value.source == f"{texts}:2"
    truncated = load(tmp_path, texts, max_seq_len=3, too_long="truncate")
    assert [s.input_ids.tolist() for s in truncated] == [[2, 1], [3, 3, 3], [4, 1], [2, 3, 4]]
    assert truncated.above == {"truncate": 2}
    assert truncated.num_valid_tokens == sum(s.num_valid_tokens for s in truncated) == 6
    dropped = load(tmp_path, texts, max_seq_len=3, too_long="drop")
    assert [(s.seq_id, s.input_ids.tolist()) for s in dropped] == [(0, [2, 1]), (1, [4, 1])]
    assert dropped.above == {"drop": 2}
    assert dropped.seq_lens.tolist() == [2, 2] and dropped.num_valid_tokens == 2
    assert dropped.describe()[-1].endswith("above 3: 0 truncated, 2 dropped")
    assert Path(dropped[1].origin).name == "texts.jsonl:3"


def test_labels_that_truncation_cuts_off_do_not_count(tmp_path: Path) -> None:
    records = [{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}] * 2
    file = write_lines(tmp_path / "a.jsonl", *records)
    data = load(tmp_path, file, max_seq_len=3, too_long="truncate")
    assert data.num_valid_tokens == 2
    with pytest.raises(DataError, match="2 sequences without a label"):
        load(tmp_path, file, max_seq_len=2, too_long="truncate")
    with pytest.raises(DataError, match="given:    2 dropped"):
        load(tmp_path, file, max_seq_len=2, too_long="drop")


def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path, texts: Path) -> None:
    data = load(tmp_path, texts)
    data.check_vocabulary(5)
    with pytest.raises(
        DataError, match=r"token id 4, which is c\b[\s\S]*below 4[\s\S]*texts\.jsonl:3"
    ):
        data.check_vocabulary(4)
    file = write_lines(tmp_path / "a.jsonl", {"input_ids": [1, 2], "labels": [-100, 7]})
    with pytest.raises(DataError, match="token id 7"):
        load(tmp_path, file).check_vocabulary(7)


def test_the_fingerprint_is_that_of_the_sequences(tmp_path: Path, texts: Path) -> None:
    other = write_lines(tmp_path / "other.jsonl", {"text": "c"})

    def fingerprint(*sources: Any, **options: Any) -> tuple[tuple[str, str], ...]:
        data = of_settings(tmp_path, train=sources, **options)["train"]
        return tuple(data.fingerprint.items())

    one, two = str(texts), str(other)
    first = fingerprint(one, two)
    assert fingerprint(one, two) == first == fingerprint(one, two, max_seq_len=9)
    others = {
        fingerprint(two, one),
        fingerprint(one),
        fingerprint(one, {"path": two, "weight": 2.0}),
        fingerprint(one, two, max_seq_len=3, too_long="drop"),
        fingerprint(one, two, max_seq_len=3, too_long="truncate"),
        fingerprint(one, two, max_seq_len=4, too_long="truncate"),
    }
    assert len(others | {first}) == 7


def test_a_template_that_writes_the_time_makes_other_data(tmp_path: Path) -> None:
    """The same files and the same tokenizer, but a cache that was deleted in between."""
    turn = "{% if m.role == 'user' %}{{ m.content }}{% else %}{% generation %}{{ m.content }}"
    turns = f"{{% for m in messages %}}{turn}{{% endgeneration %}}{{% endif %}}{{% endfor %}}"
    tokenizer = byte_tokenizer("{{ strftime_now('%f') }}" + turns)
    chats = write_lines(tmp_path / "chats.jsonl", {"messages": CHAT})
    first = load(tmp_path, chats, tokenizer=tokenizer).fingerprint
    assert load(tmp_path, chats, tokenizer=tokenizer).fingerprint == first
    shutil.rmtree(tmp_path / "cache")
    second = load(tmp_path, chats, tokenizer=tokenizer).fingerprint
    changed = {name for name in first if first[name] != second[name]}
    assert changed == {f"the sequences of {chats}", SEQUENCES}


def test_tokens_of_a_template_that_writes_the_date_are_of_one_day(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer('{{ strftime_now("%d %b %Y") }}' + CHATML)
    chats = write_lines(tmp_path / "chats.jsonl", {"messages": CHAT})
    settings = DataConfig(train=[str(chats)], cache_dir=str(tmp_path / "cache"))

    def first_text(day: str | None, **kwargs: Any) -> str:
        own = settings.model_copy(update={"chat_template_kwargs": kwargs})
        (one,) = load_splits(own, tokenizer, None, day=day)["train"]
        return str(tokenizer.decode(one.input_ids))

    assert first_text("2026-01-31").startswith("31 Jan 2026<|im_start|>user")
    assert first_text("2026-02-01").startswith("01 Feb 2026<")
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 2
    assert first_text("2026-01-31").startswith("31 Jan 2026<")
    assert first_text("2026-02-01", strftime_now="2025-12-24").startswith("24 Dec 2025<")
    with pytest.raises(DataError, match="isoformat"):
        first_text(None, strftime_now="yesterday")


def test_weights_make_the_mixture(tmp_path: Path, texts: Path) -> None:
    other = write_lines(tmp_path / "other.jsonl", {"text": "c"})
    named = [{"path": str(texts), "weight": 0.5}, {"path": str(other), "weight": 3.0}]
    data = of_settings(tmp_path, train=named)["train"]
    assert data.mixture.sizes == (4, 1) and data.mixture.draws == (2, 3)
    lines = data.describe()
    assert lines[0].endswith("weight 0.5: 2 an epoch") and lines[1].endswith("weight 3: 3 an epoch")


def test_sequences_are_read_from_disk_and_fit_torch(tmp_path: Path, texts: Path) -> None:
    data = load(tmp_path, texts)
    sequence = data[1]
    assert isinstance(data.parts[0].arrays.arrays["input_ids"].base.base, np.memmap)
    assert type(sequence.input_ids) is np.ndarray
    assert not sequence.input_ids.flags.owndata


def test_a_file_of_two_sources_is_refused(tmp_path: Path, texts: Path) -> None:
    (tmp_path / "link.jsonl").symlink_to(texts)
    for other in (texts, tmp_path / "link.jsonl", tmp_path / "." / "texts.jsonl"):
        with pytest.raises(DataError, match=r"which two sources name[\s\S]*weight: 2"):
            load(tmp_path, texts, other)
    folder = tmp_path / "folder"
    folder.mkdir()
    texts.rename(folder / "a.jsonl")
    with pytest.raises(DataError, match=r"a\.jsonl, which two sources name"):
        load(tmp_path, folder, folder / "a.jsonl")


def test_a_file_that_fails_while_it_is_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"/proc/self/mem: Input/output error"):
        load(tmp_path, Path("/proc/self/mem"))


def test_a_file_name_that_is_no_text_can_be_printed(tmp_path: Path) -> None:
    import os

    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / os.fsdecode(b"\xff.txt")).write_text("a b")
    (folder / "a\x1b[31m.txt").write_text("a b")
    (folder / os.fsdecode(b"\xfe")).symlink_to("nowhere")
    data = load(tmp_path, folder)
    for text in (*data.describe(), data[0].origin):
        text.encode("utf-8")
        assert text.isprintable()


@pytest.mark.parametrize("record", [{"text": " "}, {"messages": []}, {"input_ids": []}])
def test_blank_records_alone_are_told(tmp_path: Path, record: dict[str, Any]) -> None:
    file = write_lines(tmp_path / "a.jsonl", *[record] * 3)
    with pytest.raises(DataError, match="given:    3 blank texts left out"):
        load(tmp_path, file, tokenizer=byte_tokenizer())


def test_held_out_files_that_are_trained_on_are_told(
    tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_lines(tmp_path / "other.jsonl", {"text": "c"})
    copied = Path(shutil.copy(texts, tmp_path / "copy.jsonl"))
    (tmp_path / "link.jsonl").symlink_to(texts)
    for same in (None, copied, tmp_path / "link.jsonl"):
        named = (str(other), str(same)) if same else (str(other),)
        settings = DataConfig(train=(str(texts),), eval=named, cache_dir=str(tmp_path / "cache"))
        load_splits(settings, word_tokenizer(), None)
        told = f"data.eval: 1 file of data.train ({same}): its loss is of sequences that are learnt"
        assert (told in capsys.readouterr().out) == (same is not None)


def numbers(data: DataSet) -> list[int]:
    """The first token of each sequence."""
    return [int(sequence.input_ids[0]) for sequence in data]


def ids_file(tmp_path: Path, name: str, *lens: int) -> Path:
    """A record of token ids of each length; the first id is its number."""
    records = [{"input_ids": [10 * i, *range(1, n)]} for i, n in enumerate(lens)]
    return write_lines(tmp_path / f"{name}.jsonl", *records)


def of_settings(tmp_path: Path, seed: int = 0, **options: Any) -> dict[str, DataSet]:
    settings = DataConfig(cache_dir=str(tmp_path / "cache"), **options)
    return load_splits(settings, word_tokenizer(), None, seed)


def test_a_limit_takes_the_first_records_of_each_source(tmp_path: Path) -> None:
    a, b = ids_file(tmp_path, "a", 2, 2, 2, 2), ids_file(tmp_path, "b", 2, 2, 2)
    named = [{"path": str(a), "limit": 3, "split": "train[1:]"}, str(b)]
    assert numbers(of_settings(tmp_path, train=named)["train"]) == [10, 20, 30, 0, 10, 20]
    both = of_settings(tmp_path, train=named, limit=2, eval={"path": str(a), "split": "train[:1]"})
    assert numbers(both["train"]) == [10, 20, 0, 10] and numbers(both["eval"]) == [0]


def test_slices_of_one_file_are_sources_if_they_share_no_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = ids_file(tmp_path, "a", 2, 2, 2, 2)

    def named(first: str, second: str) -> list[dict[str, str]]:
        return [{"path": str(file), "split": split} for split in (first, second)]

    data = of_settings(tmp_path, train=named("train[:50%]", "train[50%:]"))["train"]
    assert numbers(data) == [0, 10, 20, 30]
    assert len(data.fingerprint) == 4  # each slice has a name of its own
    with pytest.raises(DataError, match="two sources name"):
        of_settings(tmp_path, train=named("train[:3]", "train[2:]"))
    capsys.readouterr()
    for first, is_told in (("train[:2]", False), ("train[:3]", True)):
        train, held_out = named(first, "train[2:]")
        of_settings(tmp_path, train=train, eval=held_out)
        assert ("of sequences that are learnt" in capsys.readouterr().out) == is_told


def test_documents_go_on_in_the_next_sequence(tmp_path: Path) -> None:
    labels = [-100, -100, -100, -100, 5, 6, -100]
    file = write_lines(
        tmp_path / "a.jsonl",
        {"input_ids": [1, 2]},
        {"input_ids": [1, 2, 3, 4, 5, 6, 7], "labels": labels},
        {"input_ids": [1, 2, 3]},
    )
    data = load(tmp_path, file, max_seq_len=3, too_long="split")
    assert [s.input_ids.tolist() for s in data] == [[1, 2], [1, 2, 3], [4, 5, 6], [7], [1, 2, 3]]
    assert [s.labels.tolist() for s in data][1:4] == [labels[:3], labels[3:6], labels[6:]]
    assert [s.num_valid_tokens for s in data] == [1, 0, 2, 0, 2] == data.valid_tokens.tolist()
    assert data.describe()[-1].endswith("above 3: 1 split")
    assert Path(data[3].origin).name == "a.jsonl:2"
    longer = load(tmp_path, file, max_seq_len=3, too_long="split", min_len=2)
    assert len(longer) == 4 and longer.describe()[-1].endswith("below 2: 1 left out")


def test_conversations_and_answers_are_not_split(tmp_path: Path) -> None:
    chats = write_lines(tmp_path / "a.jsonl", {"messages": CHAT})
    pairs = write_lines(tmp_path / "b.jsonl", {"prompt": "a", "completion": "b"})
    for file in (chats, pairs):
        for limit in (99, 1):
            options = {"max_seq_len": limit, "too_long": "split", "tokenizer": byte_tokenizer()}
            if limit == 99:
                assert len(load(tmp_path, file, **options)) == 1
            else:
                with pytest.raises(DataError, match=r"texts and tokens[\s\S]*jsonl:1"):
                    load(tmp_path, file, **options)


def test_short_sequences_are_left_out_and_counted(tmp_path: Path, texts: Path) -> None:
    data = load(tmp_path, texts, min_len=4)
    assert [s.seq_len for s in data] == [5, 4] and data.num_short == 2
    assert data.describe()[-1].endswith("below 4: 2 left out")
    both = load(tmp_path, texts, min_len=3, max_seq_len=4, too_long="drop")
    assert [s.seq_len for s in both] == [4] and (both.num_short, both.above["drop"]) == (2, 1)
    with pytest.raises(DataError, match="given:    4 sequences too short"):
        load(tmp_path, texts, min_len=6)


def test_held_out_records_are_split_off_each_source(tmp_path: Path, capsys: Any) -> None:
    a, b = ids_file(tmp_path, "a", *[2] * 30), ids_file(tmp_path, "b", *[7] * 10)
    for amount, expected in ((0.1, (3, 1)), (8, (6, 2)), (5, (4, 1)), (1e-6, (1, 0))):
        data = of_settings(tmp_path, train=[str(a), str(b)], eval_share=amount)
        held = [Path(s.origin).name for s in data["eval"]]
        counts = (sum(o.startswith("a") for o in held), sum(o.startswith("b") for o in held))
        assert counts == expected
        rest = [Path(s.origin).name for s in data["train"]]
        assert len({*held, *rest}) == len(held) + len(rest) == 40
        assert "data.eval_share: " in capsys.readouterr().out
    again = of_settings(tmp_path, train=[str(a), str(b)], eval_share=8)
    other = of_settings(tmp_path, train=[str(a), str(b)], eval_share=8, seed=1)
    same = of_settings(tmp_path, train=[str(a), str(b)], eval_share=0.2)
    prints = [d["train"].fingerprint[SEQUENCES] for d in (again, other, same)]
    assert prints[0] == prints[2] != prints[1]
    assert "eval" not in of_settings(tmp_path, train=str(a), eval_share=0)
    with pytest.raises(DataError, match=r"data\.eval_share = 30, of 30 records"):
        of_settings(tmp_path, train=str(a), eval_share=30)


def test_pieces_of_a_record_are_held_out_together(tmp_path: Path) -> None:
    file = ids_file(tmp_path, "a", *range(1, 30))
    data = of_settings(tmp_path, train=str(file), max_seq_len=4, too_long="split", eval_share=0.3)
    held, rest = ({s.origin for s in data[name]} for name in ("eval", "train"))
    assert not held & rest and len(held) == 9 and len(rest) == 20
    assert data["eval"].num_tokens + data["train"].num_tokens == sum(range(1, 30))


def test_shares_are_of_the_tokens_of_an_epoch(tmp_path: Path) -> None:
    a, b, c = (
        ids_file(tmp_path, name, *lens)
        for name, lens in (("a", [10] * 40), ("b", [100] * 12), ("c", [2] * 200))
    )
    named = [{"path": str(path), "share": share} for path, share in ((a, 0.5), (b, 0.3), (c, 0.2))]
    train = of_settings(tmp_path, train=named)["train"]
    lens = train.epoch_lens(0)
    assert abs(lens.sum() - train.num_tokens) <= 100  # an epoch is as long as the sources are
    of_sources = [lens[lens == one].sum() / lens.sum() for one in (10, 100, 2)]
    assert np.allclose(of_sources, [0.5, 0.3, 0.2], atol=0.03)
    assert train.describe()[0].endswith("share 0.5: 100 an epoch")
    other = [named[0] | {"share": 0.4}, named[1] | {"share": 0.4}, named[2]]
    assert of_settings(tmp_path, train=other)["train"].fingerprint != train.fingerprint
    with pytest.raises(DataError, match=r"no sequence for a share of 0\.2"):
        of_settings(tmp_path, train=named, min_len=5)


@pytest.mark.parametrize("reading", [{"train_on": "last"}, {"eot_tokens": "<|im_end|>"}])
def test_what_decides_the_tokens_decides_the_entry(tmp_path: Path, reading: dict[str, Any]) -> None:
    file = write_lines(tmp_path / "chats.jsonl", {"messages": [*CHAT, *CHAT]})
    first = load(tmp_path, file, tokenizer=byte_tokenizer())
    for is_cached in (False, True):
        again = load(tmp_path, file, tokenizer=byte_tokenizer(), **reading)
        assert (again.parts[0].tokenized_s is None) == is_cached
    assert (again.fingerprint == first.fingerprint) == ("train_on" not in reading)


def test_every_key_of_how_records_are_read_decides_the_tokens() -> None:
    source = Source(path="x")
    own = {"fields": {"text": "x"}, "format": "chat"}
    other = {"chat_template_kwargs": {"a": 1}, "train_on": "all", "eot_tokens": ("x",)}
    settings = [DataConfig(train="x", **{key: own[key]}) for key in own]
    settings += [DataConfig(train="x", **{key: other[key]}) for key in other]
    keys = [Reading.of(one, source).key for one in settings]
    keys += [
        Reading.of(DataConfig(train="x"), Source(path="x", **{key: own[key]})).key for key in own
    ]
    assert keys[:2] == keys[5:] and all(keys.count(key) == 1 for key in keys[2:5])


def test_texts_are_joined_over_the_tokens_of_the_cache(tmp_path: Path, texts: Path) -> None:
    (tmp_path / "more.jsonl").write_text('{"text": "b c"}\n{"text": "a"}')
    data = load(tmp_path, texts, tmp_path / "more.jsonl", join=True, max_seq_len=5)
    assert [s.input_ids.tolist() for s in data] == [
        [2, 1, 3, 3, 3], [3, 1, 4, 1, 2], [3, 4, 1], [3, 4, 1, 2, 1],
    ]  # fmt: skip
    origins = [s.origin.rpartition("/")[2] for s in data]
    assert origins == ["texts.jsonl:1", "texts.jsonl:2", "texts.jsonl:4", "more.jsonl:1"]
    assert data.seq_lens.tolist() == [s.seq_len for s in data] == [5, 5, 3, 5]
    assert data.valid_tokens.tolist() == [4, 4, 2, 4] and data.num_valid_tokens == 14
    assert all(s.labels is s.input_ids or (s.labels == s.input_ids).all() for s in data)
    assert "4 sequences, 18 tokens" in data.summary() and "joined of 6 texts" in data.summary()
    assert data.mixture.sizes == (3, 1)
    shorter = load(tmp_path, texts, join=True, max_seq_len=5, min_len=5)
    assert shorter.seq_lens.tolist() == [5, 5] and shorter.num_short == 1
    whole = load(tmp_path, texts, join=True, max_seq_len=100)
    assert len(whole) == 1 and whole.seq_lens.tolist() == [13]
    fingerprints = {str(one.fingerprint) for one in (data, shorter, whole, load(tmp_path, texts))}
    assert len(fingerprints) == 4
    train, held_out = data.split_off(1, seed=0)
    assert sorted([*train.seq_lens, *held_out.seq_lens]) == [3, 5, 5, 5]


def test_what_is_no_text_or_has_no_end_is_not_joined(tmp_path: Path, texts: Path) -> None:
    chat = write_lines(tmp_path / "chat.jsonl", {"messages": CHAT})
    with pytest.raises(DataError, match="format chat with data"):
        load(tmp_path, chat, tokenizer=byte_tokenizer(), join=True, max_seq_len=5)
    endless = word_tokenizer()
    endless.eos_token = None
    with pytest.raises(DataError, match="a tokenizer without EOS with data"):
        load(tmp_path, texts, tokenizer=endless, join=True, max_seq_len=5)


def test_the_cache_knows_which_answers_are_wanted(tmp_path: Path) -> None:
    records = [{"prompt": "a ", "completion": "b", "label": label} for label in (True, False)]
    file = write_lines(tmp_path / "answers.jsonl", *records)
    for _ in range(2):
        found = [one.desirable for one in load(tmp_path, file, format="unpaired")]
        assert found == [True, True, False, False]  # each with what it is compared with
    texts = load(tmp_path, file, fields={"text": "prompt"})
    assert {one.desirable for one in texts} == {None}
