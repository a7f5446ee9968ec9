"""What lies beside the text of a record: honoured, refused by name, or counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tiny_tokenizers import CHATML, byte_tokenizer

from furlong.config.schema import DataConfig, Source
from furlong.data.dataset import load_data
from furlong.data.formats import Reading, encode, read_whole
from furlong.data.records import Notes, SourceRecord
from furlong.data.stream import StreamSet
from furlong.data.tokenize import IGNORE_INDEX
from furlong.errors import DataError

USER = {"role": "user", "content": "q"}


def said(content: str, **marks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **marks}


WITH_CALLS = CHATML.replace("['content']", "['content'] + (message.tool_calls or '') | string")


def learnt(*records: dict[str, Any], notes: Notes | None = None, **reading: Any) -> list[str]:
    """What is learnt of each record."""
    tokenizer = byte_tokenizer(WITH_CALLS)
    own = [SourceRecord(one, 0, at, f"a.jsonl:{at}") for at, one in enumerate(records, start=1)]
    decided = Reading(**reading).decided(own[0])
    counted = Notes() if notes is None else notes
    return [
        tokenizer.decode(one.input_ids[one.labels != IGNORE_INDEX])
        for _, sequences in encode(own, tokenizer, decided, counted)
        for one in sequences
    ]


def refused(*records: dict[str, Any], **reading: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        learnt(*records, **reading)
    assert caught.value.source == f"a.jsonl:{len(records)}"
    return caught.value


def two_answers(first: dict[str, Any], second: dict[str, Any], **beside: Any) -> dict[str, Any]:
    return {"messages": [USER, said("bad", **first), USER, said("good", **second)], **beside}


@pytest.mark.parametrize("mark", ["loss_weight", "loss_scale"])
def test_marks_of_other_trainers_are_read(mark: str) -> None:
    own = two_answers({mark: 0.0}, {mark: 1.0})
    assert learnt(own) == ["good<|im_end|>\n"]
    assert mark in refused(two_answers({mark: 0.3}, {mark: 1.0})).given


def test_a_list_of_marks_beside_the_messages_is_read() -> None:
    assert learnt(two_answers({}, {}, loss_mask=[0, 0, 0, 1])) == ["good<|im_end|>\n"]
    assert "loss_mask" in refused(two_answers({}, {}, loss_mask=[1, 0, 0, 1])).given  # a user's
    assert "loss_mask" in refused(two_answers({}, {}, loss_mask=[0, 1])).given


@pytest.mark.parametrize(
    "marks",
    [
        ({"mask": True}, {"mask": False}), ({"learn": False}, {"learn": True}),
        ({"is_masked": True}, {}), ({}, {"keep": True}), ({"reward": 0}, {"reward": 1}),
        ({"loss_of_turn": 0.25}, {"loss_of_turn": 0.5}), ({"token_mask": [0, 1, 1]}, {}),
        ({"spans": [{"begin": 0, "end": 2, "train": False}]}, {}),
    ],
)  # fmt: skip
def test_what_differs_among_answers_is_refused_by_name(marks: Any) -> None:
    key = next(iter(marks[0] or marks[1]))
    error = refused(two_answers(*marks))
    assert key in error.given and f"unused: [{key}]" in error.change
    is_named = key in ("mask", "learn", "is_masked")
    assert (f"weight: {key}" in error.change) == is_named
    if not isinstance(marks[0].get(key), list):  # of several records, too
        assert key in refused(*({"messages": [USER, said("a", **own)]} for own in marks)).given


def test_the_renaming_that_is_offered_works() -> None:
    own = two_answers({"learn": False}, {"learn": True})
    assert learnt(own, fields={"weight": "learn"}) == ["good<|im_end|>\n"]


@pytest.mark.parametrize(
    ("own", "what"),
    [
        (two_answers({"toxic": True}, {"toxic": False}), "toxic"),
        ({"messages": [USER, said("bad"), USER, said("good")], "images": ["a"]}, "images"),
        (
            {"messages": [USER, said("bad"), USER, said("good")], "loss_by_turn": [0.2, 0.7]},
            "loss_by_turn",
        ),
        ({"messages": [USER, said("bad"), USER, said("good")], "train": False}, "train"),
        (two_answers({}, {}, good=[1, 0, 1, 0]), "good"),
    ],
)
def test_what_says_nothing_of_the_text_is_taken_out_by_name(own: dict[str, Any], what: str) -> None:
    assert f"data.fields: {{unused: [{what}]}}" in refused(own).change
    notes = Notes()
    (one,) = learnt(own, fields={"unused": [what]}, notes=notes)
    assert ("good" in one, what in notes.unread) == (True, False)


TOOLS = [{"name": "f", "parameters": {}}]


@pytest.mark.parametrize(
    ("own", "format", "fields", "lost"),
    [
        ({"instruction": "q", "input": "i", "chosen": "a", "rejected": "b"},
         "preference", {"prompt": "instruction"}, "input"),
        ({"prompt": "q", "ctx": "i", "chosen": [said("a")], "rejected": [said("b")]},
         "preference", {"input": "ctx", "instruction": "prompt"}, None),
        ({"prompt": [USER], "input": "i", "chosen": [said("a")], "rejected": [said("b")]},
         "preference", {}, "input"),
        ({"prompt": [USER], "history": [["a", "b"]], "instruction": "i", "chosen": [said("a")],
          "rejected": [said("b")]}, "preference", {}, "history"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "functions": TOOLS},
         "preference", {}, "tools"),
        ({"prompt": "q", "completion": "a", "tools": TOOLS}, "auto", {}, "tools"),
        ({"prompt": "q", "completion": "a", "ctx": "i"}, "auto", {"input": "ctx"}, "input"),
        ({"prompt": [USER], "completion": [said("a")], "tools": TOOLS}, "auto", {}, None),
    ],
)  # fmt: skip
def test_what_the_branch_of_a_shape_does_not_read_is_refused(
    own: dict[str, Any], format: Any, fields: dict[str, Any], lost: str | None
) -> None:
    if lost is None:
        assert learnt(own, format=format, fields=fields)
        return
    error = refused(own, format=format, fields=fields)
    assert error.given.startswith(f"{lost} beside")
    change = error.change
    unused = yaml.safe_load(change[change.index("{") : change.index("}") + 1])
    assert learnt(own, format=format, fields={**fields, **unused})


def test_tools_in_the_words_of_alpaca_and_of_labels_are_refused() -> None:
    own = {"instruction": "q", "output": "a", "tools": TOOLS}
    assert learnt(own) == ["a<|im_end|>\n"]
    bare = byte_tokenizer(None)
    for format, one in (("alpaca", own), ("unpaired", {"prompt": "q", "completion": "a", **own})):
        record = SourceRecord({**one, "label": True}, 0, 1, "a.jsonl:1")
        with pytest.raises(DataError, match="tools"):
            list(read_whole([record], bare, Reading(format), Notes()))  # type: ignore[arg-type]


def test_what_the_branch_of_a_shape_does_not_read_is_counted() -> None:
    notes = Notes()
    beside = {"messages": [USER], "instruction": "i", "chat_template_kwargs": {"a": 1}}
    learnt({"prompt": "q", "chosen": "a", "rejected": "b", **beside}, format="preference",
           notes=notes)  # fmt: skip
    assert notes.unread == dict.fromkeys(beside, 1)


@pytest.mark.parametrize(
    "own",
    [
        {"question": "q", "answer": "good"}, {"query": "q", "response": "good", "history": []},
        {"problem": "q", "solution": "good"}, {"input": "q", "output": "good"},
        {"prompt": "q", "response": "good"}, {"system": "s", "query": "q", "response": "good"},
        {"instruction": "q", "input": "", "response": "good"},
        {"history": [USER, said("good")], "info": {}, "environment": "main"},
    ],
)  # fmt: skip
def test_the_fields_that_are_offered_work(own: dict[str, Any]) -> None:
    change = refused(own).change
    offered = yaml.safe_load(change[change.index("{") : change.index("}") + 1])
    assert learnt(own, fields=offered)[0].startswith("good")


def test_pairs_of_other_names_are_offered_as_pairs() -> None:
    own = {f"{name}_messages": [USER, said(name)] for name in ("chosen", "rejected")}
    change = refused(own).change
    assert "train.loss" in change
    offered = yaml.safe_load(change[change.index("{") : change.index("}") + 1])
    found = learnt(own, format="preference", fields=offered)
    assert found == ["chosen<|im_end|>\n", "rejected<|im_end|>\n"]
    assert "train.loss" not in refused(own, format="preference").change


@pytest.mark.parametrize(
    "own",
    [
        two_answers({"cost": 0.01}, {"cost": 0.02}), two_answers({"score": 0.5}, {"score": 1}),
        two_answers({"turn_idx": 1}, {"turn_idx": 3}),
        two_answers({"logprob": -0.5}, {"logprob": 0}),
        two_answers({"usage": {"cached": False, "n": 3}}, {"usage": {"cached": True, "n": 5}}),
        {"messages": [USER, said("good")], "correct": [True, False]},
        two_answers({}, {}, scores=[0.5, 0.7]), two_answers({}, {}, scores=[0.5, 0.7, 1, 0]),
    ],
)  # fmt: skip
def test_numbers_that_are_no_switch_are_counted(own: dict[str, Any]) -> None:
    assert learnt(own, own)[1].endswith("good<|im_end|>\n")


@pytest.mark.parametrize(
    "own",
    [
        {"messages": [USER], "response": "good"}, {"conversation": [USER], "output": "good"},
        {"input": [USER], "output": "good"}, {"context": "c", "instruction": "q", "answer": "good"},
        {"passage": "c", "question": "q", "answer": "good"},
    ],
)  # fmt: skip
def test_the_fields_that_are_offered_lose_no_text(own: dict[str, Any]) -> None:
    change = refused(own).change
    fields = yaml.safe_load(change[change.index("{") : change.index("}") + 1])
    record = SourceRecord(own, 0, 1, "a.jsonl:1")
    reading = Reading(fields=fields).decided(record)
    ((_, (one,)),) = encode([record], byte_tokenizer(), reading, Notes())
    text = byte_tokenizer().decode(one.input_ids)
    assert all(value in text for value in own.values() if isinstance(value, str))
    assert learnt(own, fields=fields) == ["good<|im_end|>\n"]


@pytest.mark.parametrize("format", ["text", "chat", "alpaca", "completion"])
def test_null_answers_are_left_out_and_counted(format: Any) -> None:
    own = {"instruction": "q", "output": None, "prompt": "q", "completion": None}
    notes = Notes()
    assert not learnt(own | {"text": None, "messages": None}, format=format, notes=notes)
    assert [count for count, *_ in notes.values()] == [1]


def test_a_conversation_without_an_answer_is_not_offered_as_messages() -> None:
    assert "messages: asked" not in refused({"asked": [USER], "meta": {"answer": "a"}}).change
    assert "messages: asked" in refused({"asked": [USER, said("a")]}).change
    assert "conversations" not in refused({"text": ["a", "b"]}).change
    assert "conversations" in refused({"text": [USER]}).change


def test_a_role_without_an_assistant_is_offered_as_the_assistant() -> None:
    own = {"messages": [{"role": "pretrain", "content": "good"}]}
    assert "pretrain: assistant" in refused(own).change
    assert learnt(own, fields={"roles": {"pretrain": "assistant"}}) == ["good<|im_end|>\n"]


def test_keys_of_answers_that_cannot_mark_are_left_alone() -> None:
    own = two_answers(
        {"timestamp": 1718000001.5, "id": 3, "model": "x", "turn": 1},
        {"timestamp": 1718000002.5, "id": 5, "turn": 2},
    )
    assert learnt(own) == ["bad<|im_end|>\ngood<|im_end|>\n"]
    tokenizer = byte_tokenizer(CHATML.replace("{% for", "{{ messages[-1].prefix }}{% for", 1))
    record = SourceRecord(two_answers({}, {"prefix": True}), 0, 1, "a.jsonl:1")
    assert len(list(encode([record], tokenizer, Reading("chat"), Notes()))) == 1


@pytest.mark.parametrize(
    "beside",
    [
        {"seq_lengths": [2, 2]}, {"cu_seqlens": [0, 1, 4]}, {"segment_ids": [0, 0, 1, 1]},
        {"document_ids": [7, 7, 8, 8]}, {"answer_tokens": [False, True, True, True]},
        {"position_ids": [0, 1, 0, 1]}, {"advantages": [0.5, 0.1, 2.0, 0.0]},
        {"loss_mask": [0, 0, 0, 0]}, {"attention_mask": [1, 1, 1]}, {"mask": "0011"},
        {"loss_mask": [[0, 0, 1, 1]]}, {"loss_ranges": [[2, 4]]}, {"doc_ends": [2]},
    ],
)  # fmt: skip
def test_numbers_beside_tokens_are_refused_by_their_shape(beside: dict[str, Any]) -> None:
    assert next(iter(beside)) in refused({"input_ids": [40, 41, 42, 43], **beside}).given


def test_numbers_beside_tokens_that_say_nothing_more_are_counted() -> None:
    harmless = {
        "attention_mask": [1, 1, 1], "position_ids": [0, 1, 2], "token_type_ids": [0, 0, 0],
        "segment_ids": [4, 4, 4], "special_tokens_mask": [1, 0, 0], "length": 3, "seq_lengths": [3],
        "completion_mask": [0, 1, 1], "ids_of_users": [5, 6], "text": "IJK", "scores": [],
    }  # fmt: skip
    notes = Notes()
    own = {"input_ids": [40, 41, 42], "labels": [-100, 41, 42]}
    assert learnt({**own, **harmless}, own, notes=notes) == ["JK", "JK"]
    assert notes.unread == dict.fromkeys(harmless.keys() - {"scores"}, 1)
    assert notes.num_records == 2


def test_labels_that_are_shifted_are_refused() -> None:
    own = {"input_ids": [40, 41, 42, 43], "labels": [-100, 42, 43, 44]}
    assert "labels" in refused(own).given
    assert learnt({**own, "labels": [-100, -100, 42, 43]}) == ["KL"]
    assert learnt({"input_ids": [40, 40, 40], "labels": [-100, 40, 40]}) == ["II"]


@pytest.mark.parametrize(
    ("beside", "is_refused"),
    [
        ({"images": ["a.png"]}, True), ({"image": "a.png"}, True), ({"videos": ["a"]}, True),
        ({"audio_url": "a"}, True), ({"pixel_values": [[0.5]]}, True), ({"images": []}, False),
        ({"image": None, "image_count": 0, "imagery": "a"}, False),
    ],
)  # fmt: skip
def test_pictures_and_sound_are_refused(beside: dict[str, Any], is_refused: bool) -> None:
    turns = {"messages": [USER, said("a")]}
    if is_refused:
        assert next(iter(beside)) in refused(turns, {**turns, **beside}).given
        assert learnt({"text": "a", **beside}) == ["a<end>"]  # a page, and where its picture is
        assert refused({"text": "<image>a", **beside})
    else:
        assert len(learnt(turns, {**turns, **beside})) == 2


def test_pairs_beside_a_conversation_without_its_answer_are_refused() -> None:
    answers = {"chosen": said("c"), "rejected": said("r")}
    error = refused({"messages": [USER, said("a"), USER], **answers})
    assert "chosen" in error.given and "train.loss" in error.change
    # the published form of a data set whose conversations are whole
    assert learnt({"messages": [USER, said("c")], **answers}) == ["c<|im_end|>\n"]
    pair = {"messages": [USER, said("a"), USER], "chosen": [said("c")], "rejected": [said("r")]}
    assert learnt(pair, format="preference") == ["c<|im_end|>\n", "r<|im_end|>\n"]


def test_marks_of_a_whole_record_are_refused() -> None:
    turns = {"messages": [USER, said("a")]}
    for beside in ({"train": False}, {"weight": 0.5}, {"loss_mask": 0}, {"loss": False}):
        assert next(iter(beside)) in refused(turns, {**turns, **beside}).given
    assert len(learnt({**turns, "train": True, "weight": 1.0, "loss": 2.3, "score": 0.1})) == 1


def test_answers_that_teach_little_are_counted() -> None:
    def counts(*records: dict[str, Any]) -> dict[str, list[int]]:
        notes = Notes()
        own = [SourceRecord(one, 0, at, f"a.jsonl:{at}") for at, one in enumerate(records, 1)]
        list(read_whole(own, byte_tokenizer(), Reading("chat"), notes))
        return dict(notes)

    call = {"type": "function", "function": {"name": "f", "arguments": {"a": None, "b": None}}}
    tool = {"name": "f", "parameters": {"properties": {"b": {}, "c": None}}}
    broken = {"type": "function", "function": {"name": "f", "arguments": "{a"}}
    counted = counts(
        {"messages": [USER, said("x"), USER, said(" ")]},
        {"messages": [USER, said("", tool_calls=[call, broken])], "tools": [tool]},
    )
    for part in ("an empty answer", "null arguments", "null properties", "no JSON object"):
        (what,) = [what for what in counted if part in what]
        assert counted[what][::2] == [1, 1 if "empty" in what else 2]
    call["function"]["arguments"] = {"b": None}  # the tool has it
    known = counts({"messages": [USER, said("", tool_calls=[call])], "tools": [tool]})
    assert not any("null arguments" in what for what in known)


def load(path: Path, tmp_path: Path, tokenizer: Any = None, **options: Any) -> Any:
    settings = DataConfig(train=[str(path)], cache_dir=str(tmp_path / "cache"), **options)
    return load_data(settings.train, tokenizer or byte_tokenizer(), settings)


def test_all_records_are_counted_and_told_again_from_the_cache(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(
        '{"text": "a"}\n{"text": "b", "meta": 1}\n{"text": "c", "meta": 2, "id": "x"}\n'
    )
    for _ in range(2):
        line = load(file, tmp_path).describe()[0]
        assert "(not used: id in 1 of 3 records, meta in 2 of 3 records)" in line
    turns = '{"messages": [{"role": "user", "content": "q"}]}\n'
    file.write_text(turns * 2 + turns.replace("user", "assistant"))
    assert "without a label: 2" in load(file, tmp_path).summary()


def test_a_stream_tells_later_fields_and_empty_sequences(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    user = '{"messages": [{"role": "user", "content": "q"}]'
    file.write_text(user.replace("user", "assistant") + ', "id": 1}\n' + user + ', "later": 1}\n')
    told: list[str] = []
    settings = DataConfig(train=[Source(path=str(file))], streaming=True, max_seq_len=99)
    stream = StreamSet(settings, byte_tokenizer(), say=told.append)
    assert "not used: id" in stream.describe()[0]
    assert len(stream.sample) == 2
    stream.check_vocabulary(9999)
    stream.close()
    assert any("later" in line for line in told) and any("without a label" in line for line in told)
    assert not any("with id" in line for line in told)


def test_a_bad_record_is_named_before_anything_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("furlong.data.formats.tokenized", lambda *_: 1 / 0)
    for last in ("{", '{"text": 5}', '{"other": "x"}'):
        (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 3 + last)
        with pytest.raises(DataError) as caught:
            load(tmp_path / "a.jsonl", tmp_path)
        assert caught.value.source.endswith("a.jsonl:4")


@pytest.mark.parametrize("kind", ["parquet", "disk"])
def test_unread_columns_of_tables_are_known(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"

    def write(**columns: Any) -> None:
        if kind == "parquet":
            pq.write_table(pa.table(columns), path)
        else:
            datasets.Dataset.from_dict(columns).save_to_disk(path)

    turns = [[USER, said("a")]] * 2
    write(messages=turns, images=[[], ["a.png"]], id=["x", "y"])
    with pytest.raises(DataError, match="images") as caught:
        load(path, tmp_path)
    assert caught.value.source.endswith("row 2")
    write(messages=turns, images=pa.array([[], None], pa.list_(pa.string())), id=["x", "y"])
    assert "(not used: id)" in load(path, tmp_path).describe()[0]
    write(input_ids=[[1, 2], [3, 4]], parts=[[1, 1], [1, 2]])
    with pytest.raises(DataError, match="parts"):
        load(path, tmp_path)


def test_a_column_of_json_keeps_its_nulls(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": None}}}
    rows = [{"messages": [USER, said("", tool_calls=[call])]}]
    features = datasets.Features({"messages": datasets.List(datasets.Json())})
    own = datasets.Dataset.from_list(rows, features=features)
    own.to_parquet(tmp_path / "a.parquet")
    own.save_to_disk(tmp_path / "disk")
    for path in (tmp_path / "a.parquet", tmp_path / "disk"):
        (one,) = load(path, tmp_path, byte_tokenizer(WITH_CALLS))
        assert "'b': None" in byte_tokenizer().decode(one.input_ids)
