"""Sources that are read while a run trains: what is drawn, in which order, how a run goes on."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizers import byte_tokenizer

from furlong.config.schema import DataConfig
from furlong.data import stream
from furlong.data.loader import LoaderState, TrainBatch
from furlong.data.stream import SharedBlocks, StreamSet
from furlong.errors import DataError, LinkError, UserError
from furlong.plan.lengths import StepSize

THREE = StepSize(3)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BLOCK_RECORDS", 5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of records, seven in each."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        lines = [json.dumps({"text": f"{number}{line}" * (line + 1)}) for line in range(7)]
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def open_stream(path: Any, said: list[str] | None = None, **settings: Any) -> StreamSet:
    shared = settings.pop("shared", None)
    own: dict[str, Any] = {"train": path if isinstance(path, list) else str(path)}
    config = DataConfig(**(own | {"max_seq_len": 64, "streaming": True} | settings))
    say = (lambda line: None) if said is None else said.append
    return StreamSet(config, byte_tokenizer(), seed=3, say=say, shared=shared)


def drawn(batches: Iterator[TrainBatch], count: int) -> list[list[tuple[str, bytes]]]:
    """Origins and tokens of some batches."""
    return [
        [(one.origin, one.input_ids.tobytes()) for one in batch.sequences]
        for batch in islice(batches, count)
    ]


def states(data: StreamSet, size: StepSize, count: int) -> list[LoaderState]:
    """The states behind batches, as a checkpoint holds them."""
    batches = islice(data.batches(size, LoaderState()), count)
    return [LoaderState(sources=json.loads(json.dumps(b.next_state.sources))) for b in batches]


def test_an_epoch_has_every_record_once_in_its_own_order(folder: Path) -> None:
    data = open_stream(folder)
    epochs = drawn(data.batches(StepSize(21), LoaderState()), 2)
    first, second = ([origin for origin, _ in epoch] for epoch in epochs)
    assert Counter(first) == Counter(second) and len(set(first)) == 21
    assert first != second and first != sorted(first)
    data.close()


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (THREE, {}),
        (THREE, {"limit": 17}),
        (StepSize(tokens=50), {"too_long": "truncate", "max_seq_len": 10}),
        (THREE, {"too_long": "drop", "max_seq_len": 10}),
        (StepSize(tokens=100), {"join": True, "max_seq_len": 16}),
    ],
    ids=["sequences", "limited", "tokens", "dropped", "joined"],
)
def test_any_position_goes_on_as_if_nothing_had_happened(
    folder: Path, size: StepSize, settings: dict[str, Any]
) -> None:
    whole = drawn(open_stream(folder, **settings).batches(size, LoaderState()), 20)
    for number, state in enumerate(states(open_stream(folder, **settings), size, 19), start=1):
        data = open_stream(folder, **settings)
        assert drawn(data.batches(size, state), 20 - number) == whole[number:]
        data.close()


def test_the_block_at_hand_is_compared_and_what_follows_may_be_mended(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    original = [json.dumps({"text": f"{number:02}"}) for number in range(12)]
    file.write_text("\n".join(original))
    *_, state = states(open_stream(file), THREE, 2)  # one of the second five is drawn
    for number in range(12):
        file.write_text("\n".join([*original[:number], '{"text": "ab"}', *original[number + 1 :]]))
        data = open_stream(file)
        if 5 <= number < 10:
            with pytest.raises(DataError, match=r"other sequences in .*texts.jsonl than the run"):
                next(data.batches(THREE, state))
        else:
            next(data.batches(THREE, state))
        data.close()
    (source,) = state.sources
    data = open_stream(file)
    with pytest.raises(DataError, match="other sequences"):
        next(data.batches(THREE, LoaderState(sources=[source | {"drawn": 6}])))
    data.close()


def test_no_more_than_one_block_is_read_ahead(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, original = [], stream.Reader.read
    monkeypatch.setattr(
        stream.Reader, "read", lambda self, start: read.append(start) or original(self, start)
    )
    data = open_stream(folder)
    for number, _ in enumerate(islice(data.batches(StepSize(1), LoaderState()), 20)):
        assert len(read) <= 2 + number // 5
    data.close()


def test_what_is_left_out_is_told_once_and_nothing_at_all_is_refused(tmp_path: Path) -> None:
    said: list[str] = []
    file = tmp_path / "texts.jsonl"
    texts = ["ab", " ", "abcdef", "", "abcdef"] * 4
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    data = open_stream(file, said, max_seq_len=4, too_long="drop")
    next(data.batches(THREE, LoaderState()))
    data.check_vocabulary(1000)  # of the block at hand, whose notes have been told
    drawn(data.batches(THREE, LoaderState()), 9)
    assert len(said) == 2 and "blank texts left out" in said[0] and "longer than 4" in said[1]
    data.close()
    data = open_stream(file, max_seq_len=2, too_long="drop")
    with pytest.raises(DataError, match=r"without a label, .*8 blank texts"):
        next(data.batches(THREE, LoaderState()))
    data.close()
    data = open_stream(file, max_seq_len=4)
    with pytest.raises(DataError, match="a sequence of 7 tokens"):
        next(data.batches(THREE, LoaderState()))
    data.close()


@pytest.mark.parametrize("settings", [{"min_len": 9}, {"min_len": 40, "join": True}, {}])
def test_a_pass_in_which_nothing_is_learnt_is_refused(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    file = tmp_path / "records.jsonl"
    record = {"text": "ab"} if settings else {"input_ids": [1, 2], "labels": [-100, -100]}
    file.write_text("\n".join([json.dumps(record)] * 12))
    data = open_stream(file, **settings)
    with pytest.raises(DataError, match="a whole pass without a label"):
        drawn(data.batches(THREE, LoaderState()), 9)
    data.close()


def test_what_decides_which_sequences_come_is_in_the_fingerprint(folder: Path) -> None:
    own = {"path": str(folder / "0.jsonl"), "share": 0.5}
    other = {"path": str(folder / "1.jsonl"), "share": 0.5}
    found = [
        open_stream(sources).fingerprint["the order of the sequences"]
        for sources in (
            [own, other],
            [other, own],
            [own | {"share": 0.2}, other | {"share": 0.8}],
            [own | {"limit": 3}, other],
        )
    ]
    assert len(set(found)) == 4


def test_stops_are_in_the_fingerprint_of_conversations_alone(tmp_path: Path) -> None:
    own = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "a"}))
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": own}))
    tokenizer = byte_tokenizer("{% for m in messages %}<|im_end|>{{ m.content }}{% endfor %}")
    for name, number in (("text", 1), ("chat", 2)):
        found = set[str]()
        for tokenizer.stop_tokens in ((), ("<|im_end|>",)):
            given = {"train": str(tmp_path / f"{name}.jsonl"), "streaming": True}
            data = StreamSet(DataConfig.model_validate(given), tokenizer)
            found.add(data.fingerprint["the order of the sequences"])
        assert len(found) == number


def test_a_file_of_two_sources_is_refused_with_advice_for_streams(folder: Path) -> None:
    half = {"path": str(folder / "0.jsonl"), "share": 0.5}
    with pytest.raises(DataError, match="two sources name") as caught:
        open_stream([half, half])
    assert "share" in caught.value.change and "weight" not in caught.value.change


def open_two(folder: Path, path: Any, **settings: Any) -> tuple[StreamSet, StreamSet]:
    """The streams of two processes of a machine, of which the first one reads."""
    opened = partial(SharedBlocks, folder), partial(SharedBlocks, folder, os.getpid())
    first, second = (open_stream(path, shared=one, **settings) for one in opened)
    return first, second


@pytest.mark.parametrize("join", [False, True])
def test_one_process_reads_for_another(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, join: bool
) -> None:
    """It has the same batches and states, also from another place on; what both have drawn goes."""
    alone, states = [], []
    data = open_stream(folder, join=join)
    for batch in islice(data.batches(THREE, LoaderState()), 12):
        alone.append(batch)
        states.append(LoaderState(sources=json.loads(json.dumps(batch.next_state.sources))))
    data.close()
    encoded, plain = [], stream.Reader._encode
    monkeypatch.setattr(
        stream.Reader, "_encode", lambda self, start: encoded.append(self) or plain(self, start)
    )
    monkeypatch.setattr(os, "fsync", None)  # what goes with the run waits for no disk
    both = open_two(tmp_path / "shared", folder, join=join)
    assert len(both[0].sample) > 0  # the first one plans
    for begin in (0, 8, 2):
        state = states[begin - 1] if begin else LoaderState()
        drawn = [data.batches(THREE, state) for data in both]
        for expected in alone[begin : begin + 4]:
            for own in map(next, drawn):
                assert own.next_state == expected.next_state
                for one, other in zip(own.sequences, expected.sequences, strict=True):
                    assert one.origin == other.origin and one.seq_id == other.seq_id
                    assert np.array_equal(one.input_ids, other.input_ids)
                    assert np.array_equal(one.labels, other.labels)
            # that at hand and the next one, and those of a batch
            assert len([*(tmp_path / "shared").glob("[!.]*")]) <= (6 if join else 4)
    assert encoded and {*encoded} <= {*both[0]._readers}
    for data in reversed(both):
        data.close()
    assert not (tmp_path / "shared").exists()


def test_the_error_of_the_process_that_reads_is_that_of_the_others(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join([json.dumps({"text": "ab"})] * 7 + ["{"]))
    both = open_two(tmp_path / "shared", file)
    told = []
    for data in both:
        with pytest.raises(DataError) as caught:
            drawn(data.batches(THREE, LoaderState()), 9)
        told.append((caught.value.given, caught.value.source, caught.value.change))
    assert told[0] == told[1] and f"{file}:8" in told[0][1]
    for data in reversed(both):
        data.close()


def test_a_lack_of_memory_of_the_process_that_reads_ends_the_others(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = open_two(tmp_path / "shared", folder)

    def read(*_: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(stream.Reader, "_read", read)
    for data, kind in zip(both, (MemoryError, DataError), strict=True):
        with pytest.raises(kind, match="no room"):
            next(data.batches(THREE, LoaderState()))
    for data in reversed(both):
        data.close()


@pytest.mark.parametrize("room", ["for an error", "none"])
def test_a_full_disk_ends_all(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: str
) -> None:
    both, plain = open_two(tmp_path / "shared", folder), os.replace

    def replace(aside: Path, place: Path) -> None:
        if room == "none" or b"error" not in aside.read_bytes():
            raise OSError(errno.ENOSPC, "No space left on device", str(place))
        plain(aside, place)

    monkeypatch.setattr(os, "replace", replace)
    told = []
    for data in both:
        with pytest.raises(UserError) as caught:
            next(data.batches(THREE, LoaderState()))
        told.append(caught.value.given)
    assert "No space left" in told[0] and (told[1] == told[0]) == (room == "for an error")
    for data in reversed(both):
        data.close()


def test_who_waits_for_a_process_that_has_gone_ends(folder: Path, tmp_path: Path) -> None:
    first, second = open_two(tmp_path / "shared", folder)
    first.close()
    with pytest.raises(DataError, match="which is gone"):
        next(second.batches(THREE, LoaderState()))
    second.close()
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        one = open_stream(folder, shared=partial(SharedBlocks, tmp_path / "other", ended.pid))
        ended.kill()
    with pytest.raises(LinkError):
        next(one.batches(THREE, LoaderState()))
    one.close()


def test_a_token_that_the_model_does_not_know_is_named(tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text("\n".join(json.dumps({"input_ids": [1, n]}) for n in range(9)))
    data = open_stream(file)
    data.check_vocabulary(8)
    with pytest.raises(DataError, match="token id 8") as caught:
        drawn(data.batches(THREE, LoaderState()), 3)
    assert caught.value.source == f"{file}:9"
    data.close()


def test_sequences_for_the_plan_are_those_of_the_first_blocks(folder: Path) -> None:
    data = open_stream(folder)
    assert len(data.seq_lens) == 5 and data.longest == 64
    assert data.seq_lens.tolist() == [len(one.input_ids) for one in data.sample]
    first = drawn(data.batches(StepSize(5), LoaderState()), 1)[0]
    assert first == [(one.origin, one.input_ids.tobytes()) for one in data.sample]
    data.close()


def test_texts_are_joined_to_full_sequences(folder: Path) -> None:
    data = open_stream(folder, join=True, max_seq_len=16)
    (batch,) = islice(data.batches(StepSize(len(data.sample)), LoaderState()), 1)
    ids = [one.input_ids.tolist() for one in batch.sequences]
    assert {len(own) for own in ids[:-1]} == {16} and len(ids[-1]) <= 16
    end = byte_tokenizer().eos_token_id
    assert sum(own.count(end) for own in ids) == 5
    assert all(one.num_valid_tokens == one.seq_len - 1 for one in batch.sequences)
    data.close()
    chats = folder.parent / "chats.jsonl"
    chats.write_text(json.dumps({"input_ids": [1, 2]}))
    with pytest.raises(DataError, match="format tokens with data"):
        open_stream(chats, join=True)
