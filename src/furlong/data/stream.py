"""Read sources while a run trains, without a cache of tokens on disk.

A source is read in blocks, file after file. Seed and epoch determine the order of the files and the
shuffle of each block. A thread reads the next block while the current block is used.

The position in a source is the record before the current block, and the number of sequences drawn
from the block. A resumed run reads that block again and compares its checksum, so that it continues
with exactly the next sequence. `IterableDataset.shuffle` (datasets 5.2) does not resume exactly:
its `load_state_dict` drops the shuffle buffer.

The processes of one machine draw the same sequences. One of them reads each block and writes it
into a folder, from which the others map it into memory.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import xxhash

from furlong.config.schema import DataConfig, Source
from furlong.data.cache import CACHE_KEY, cache_key, creating_folder
from furlong.data.dataset import (
    SEQUENCES,
    SPLIT,
    above_limit,
    check_joined,
    format_in_words,
    named_source,
    nothing_to_learn,
    refuse_repeated,
    unknown_token,
)
from furlong.data.formats import Reading, encode, read_whole
from furlong.data.loader import LoaderState, TrainBatch
from furlong.data.records import Notes, SourceRecord, left_out, read_records
from furlong.data.sources import list_files, printable
from furlong.data.tokenize import Encoded, Sequence, token_in_words, tokenizer_checksum
from furlong.errors import DataError, LinkError, UserError, reason_of
from furlong.files import remove_stale
from furlong.plan.lengths import StepSize
from furlong.units import count_words

BLOCK_TOKENS = 2**24
"""Tokens of one block of every source together: 128 MiB with labels, and as much again for the
blocks that are read ahead."""
BLOCK_RECORDS = 10_000
_SHORTEST_LOOK_S, _LOOK_S = 0.0005, 0.02


@dataclass(frozen=True, slots=True)
class Position:
    """A position in a source: the record that precedes it."""

    epoch: int = 0
    file: int = 0
    """The number of the file in the epoch's order of files."""
    line: int = -1
    """The line of the record; -1 is before the first record of the file."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """The position of a run in a source, as a checkpoint stores it."""

    block: Position = field(default_factory=Position)
    """The start of the current block."""
    drawn: int = 0
    """The number of sequences drawn from the block."""
    checksum: str = ""
    """The checksum of the block; empty until it is read."""
    num_tokens: int = 0
    """The number of tokens that the run has drawn from the source."""

    @classmethod
    def of(cls, values: dict[str, Any]) -> Cursor:
        """Return the cursor whose fields are given as plain values, as `dataclasses.asdict` returns
        them."""
        return cls(**{**values, "block": Position(**values["block"])})


@dataclass(frozen=True, slots=True, eq=False)
class StreamBlock:
    """Consecutive sequences of a source, shuffled."""

    start: Position
    end: Position
    sequences: list[Sequence]
    checksum: str
    """The checksum of all tokens and labels, in order."""
    notes: list[str]
    """Lines about reasons to leave records out that occur for the first time in this block."""


class SharedBlocks:
    """A folder through which one process of a machine, the reader, shares its blocks or its error.

    All processes draw the same sequences, so each asks for the blocks that the reader reads. Blocks
    are removed when a batch starts. All processes have then finished the batch before, so no
    process waits for a block that is removed.
    """

    def __init__(self, folder: Path, reader: int | None = None) -> None:
        """Open the folder.

        Args:
            folder: where blocks are written.
            reader: the id of the process that reads; None for this one.

        Raises:
            ConfigError: the folder cannot be written.
        """
        self._folder = folder
        self._reader = None if reader is None else psutil.Process(reader)
        if self._reader is None:
            with creating_folder(folder):
                remove_stale(folder.parent.iterdir())

    def block(
        self, key: str, start: Position, read: Callable[[], StreamBlock],
        is_wanted: Callable[[], bool],
    ) -> StreamBlock | None:  # fmt: skip
        """Return the block with this key. The reader calls `read` and writes the block into the
        folder; any other process waits for the block, and maps it into memory.

        A waiting process returns None as soon as `is_wanted()` is false. If `read` raises a
        UserError, every process raises a UserError with the same text. `start`: the position where
        the block begins.
        """
        place = self._folder / key
        if self._reader is not None:
            found = self._await(place, self._reader, is_wanted)
            return None if found is None else _unpacked(start, found)
        try:
            block = read()
            if is_wanted():  # otherwise reading may have stopped early
                sequences = block.sequences
                facts = {
                    "end": asdict(block.end),
                    "checksum": block.checksum,
                    "origins": [one.origin for one in sequences],
                    "lens": [one.seq_len for one in sequences],
                }
                arrays = [one.input_ids for one in sequences] + [one.labels for one in sequences]
                self._write(place, facts, arrays)
            return block
        except Exception as error:  # a MemoryError too, since the others wait for this block
            parts = ("given", "required", "source", "change")
            facts = {"error": {name: getattr(error, name, reason_of(error)) for name in parts}}
            try:  # a full disk may still have room for an error
                self._write(place, facts)
            except UserError:
                self.close()  # the others stop when the folder is gone
            raise

    def keep(self, keys: Iterable[str]) -> None:
        """Remove all blocks but those with these keys; call it when a batch starts."""
        if self._reader is None:
            kept = {*keys}
            with creating_folder(self._folder):
                os.utime(self._folder)  # so that no other run removes it as stale
                for place in self._folder.iterdir():
                    if place.name not in kept and not place.name.startswith("."):
                        place.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder, if this process is the reader."""
        if self._reader is None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, place: Path, facts: dict[str, Any], arrays: Iterable[Any] = ()) -> None:
        """Write a file: the number of bytes of `facts` as JSON, `facts` itself, and the arrays.

        There is no fsync, since the file need not outlive the run.
        """
        head = json.dumps(facts).encode()
        head += b" " * (-len(head) % 8)
        aside = place.with_name(f".{place.name}")
        with creating_folder(self._folder):
            try:
                with aside.open("wb") as file:
                    file.writelines([np.int64(len(head)).tobytes(), head])
                    file.writelines(array.tobytes() for array in arrays)
                os.replace(aside, place)
            finally:
                aside.unlink(missing_ok=True)

    def _await(
        self, place: Path, reader: psutil.Process, is_wanted: Callable[[], bool]
    ) -> npt.NDArray[np.uint8] | None:
        look_s = _SHORTEST_LOOK_S
        while is_wanted():
            with suppress(FileNotFoundError):
                return np.memmap(place, np.uint8, mode="r")
            if not _lives(reader):
                raise LinkError(f"process {reader.pid}, which reads data.train for this one, ended")
            if not self._folder.exists():
                raise DataError(
                    given=f"{self._folder}, which is gone",
                    required="the blocks of the process that reads data.train for this one",
                    source=CACHE_KEY,
                    change="leave it there while the run trains, and see what that process says",
                )
            time.sleep(look_s)
            look_s = min(2 * look_s, _LOOK_S)
        return None


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _unpacked(start: Position, found: npt.NDArray[np.uint8]) -> StreamBlock:
    """Return the block in the bytes of a shared file (`found`). It has no notes: the process that
    wrote the file prints them. Raises that process's error as DataError."""
    stop = 8 + int(found[:8].view(np.int64)[0])
    facts = json.loads(found[8:stop].tobytes())
    if "error" in facts:
        raise DataError(**facts["error"])
    # a plain array: torch takes no subclass such as memmap
    ids, labels = np.asarray(found[stop:].view(np.int32)).reshape(2, -1)
    bounds = pairwise([0, *np.cumsum(facts["lens"], dtype=np.int64).tolist()])
    sequences = [
        Sequence(number, origin, ids[first:stop], labels[first:stop])
        for number, (origin, (first, stop)) in enumerate(zip(facts["origins"], bounds, strict=True))
    ]
    return StreamBlock(start, Position(**facts["end"]), sequences, facts["checksum"], [])


class Reader:
    """Draws the sequences of a source one by one, while a thread reads the next block."""

    def __init__(
        self, source: Source, number: int, settings: DataConfig, tokenizer: Any, seed: int,
        key: str, thread: ThreadPoolExecutor, check: Callable[[StreamBlock], None],
    ) -> None:  # fmt: skip
        """Read the first record, which decides the format.

        Args:
            source: the source.
            number: its number among the sources of the run.
            settings: the section `data` of the run.
            tokenizer: used by `thread` alone.
            seed: the seed of the run.
            key: the key of the run file that names the source.
            thread: reads the blocks.
            check: called with each block before sequences are drawn from it.

        Raises:
            DataError: the source cannot be listed, or its first record cannot be read.
        """
        self.source, self._settings, self._key = source, settings, key
        self.shared: SharedBlocks | None = None
        self._num_moves = self._move = 0
        self._tokenizer, self._seed = tokenizer, (seed, number)
        self._thread, self._check = thread, check
        self._most_tokens = BLOCK_TOKENS // len(settings.train)
        self._limit = min(filter(None, (source.limit, settings.limit)), default=None)
        self.listing = list_files(source, key, fetch=False)
        reading = Reading.of(settings, source)
        first = next(read_records(self.listing, Notes(), reading.columns, key))
        self.reading = reading.decided(first)
        seen = Notes()
        for _ in read_whole((first,), tokenizer, self.reading, seen):
            self.facts = self.reading.facts(first) | {"unused": seen.unread, "num_records": 1}
        if settings.join:
            check_joined(self.reading.format, tokenizer, first.origin)
        self.go_to(Cursor())
        self.is_closed = False
        self._notes, self._reported = Notes(), {f"with {name}, not used" for name in seen.unread}
        self._at: Position | None = None
        self._has_labels = True
        """Whether the current pass has had a label; taken to be so for a pass begun elsewhere."""
        self._encoded: Generator[tuple[SourceRecord, list[Encoded]]] | None = None

    def go_to(self, cursor: Cursor) -> None:
        """Move to a cursor, from which sequences are then drawn."""
        self._num_moves += 1
        self.cursor = cursor
        self.block: StreamBlock | None = None
        self._next: Future[StreamBlock] | None = None

    def peek(self) -> Sequence:
        """Return the sequence that is drawn next. Raises DataError for what cannot be read, and for
        a block that has changed since the checkpoint."""
        while self.block is None or self.cursor.drawn == len(self.block.sequences):
            coming = self._next or self._ask(self.cursor.block)
            block = coming.result()
            self._next = self._ask(block.end)
            if self.block is not None:
                self.cursor = replace(self.cursor, block=block.start, drawn=0, checksum="")
            elif self.cursor.checksum not in ("", block.checksum) or self.cursor.drawn not in range(
                len(block.sequences) + 1
            ):
                at = block.start
                raise DataError(
                    given=f"other sequences in {printable(self.source.path)} than the run has"
                    f" drawn, behind record {at.line} of file {at.file} of pass {at.epoch + 1}",
                    required="the records before the place where the run goes on as they were",
                    source="data.train, and the checkpoint",
                    change="restore the files (of the hub: name the revision), or start anew with"
                    " another out",
                )
            self._check(block)
            self.block = block
            self.cursor = replace(self.cursor, checksum=block.checksum)
        return self.block.sequences[self.cursor.drawn]

    def take(self) -> Sequence:
        """Return the next sequence, and move the cursor past it. Raises DataError as `peek`."""
        sequence, at = self.peek(), self.cursor
        num_tokens = at.num_tokens + sequence.seq_len
        self.cursor = replace(at, drawn=at.drawn + 1, num_tokens=num_tokens)
        return sequence

    @property
    def keys(self) -> list[str]:
        """The keys, in `SharedBlocks`, of the current block and, once it is read, of the next
        block."""
        known = [self.cursor.block]
        if self.block is not None:
            known += [self.block.start, self.block.end]
        return [self._key_of(start) for start in known]

    def _key_of(self, start: Position) -> str:
        return cache_key(self._seed, asdict(start))

    def _ask(self, start: Position) -> Future[StreamBlock]:
        """Start to read the block at a position in the thread, and return the block's future."""
        move = self._num_moves

        def read() -> StreamBlock:
            self._move = move  # read by the thread alone
            return self.read(start)

        return self._thread.submit(read)

    def read(self, start: Position) -> StreamBlock:
        """Return the block that starts at a position; the last one of an epoch is smaller. Raises
        DataError."""
        if self.shared is None:
            return self._read(start)

        def is_wanted() -> bool:
            return not self.is_closed and self._move == self._num_moves

        found = self.shared.block(self._key_of(start), start, partial(self._read, start), is_wanted)
        return found or StreamBlock(start, start, [], "", [])  # nobody draws from it

    def _read(self, start: Position) -> StreamBlock:
        if start != self._at:
            self._encoded = self._encode(start)
        end, found, num_tokens = Position(start.epoch + 1), list[tuple[str, Encoded]](), 0
        assert self._encoded is not None
        for record, sequences in self._encoded:
            fitted = self._fitted(record, sequences)
            found += [(record.origin, one) for one in fitted]
            num_tokens += sum(len(one.input_ids) for one in fitted)
            if num_tokens >= self._most_tokens or len(found) >= BLOCK_RECORDS or self.is_closed:
                end = Position(start.epoch, record.file, record.line)
                break
        self._at = end if end.epoch == start.epoch else None
        block_seed = (*self._seed, start.epoch, start.file, start.line + 1, 3)
        order = np.random.default_rng(block_seed).permutation(len(found))
        found = [found[i] for i in order.tolist()]
        if self._settings.join:
            found = _joined(found, self._settings.max_seq_len)
        least = self._settings.min_len
        found = [pair for pair in found if len(pair[1].input_ids) >= least]
        drawn = [
            Sequence(number, origin, one.input_ids, one.labels)
            for number, (origin, one) in enumerate(found)
        ]
        num_blank = sum(not one.num_valid_tokens for one in drawn)
        self._notes.add("sequences without a label", 0, 0, num_blank)
        if start == Position(start.epoch):
            self._has_labels = False
        self._has_labels |= any(one.num_valid_tokens for one in drawn)
        if end.epoch > start.epoch and not self._has_labels and not self.is_closed:
            given = f"{printable(self.source.path)}: a whole pass without a label"
            raise nothing_to_learn(given + left_out(self._notes), self._key)
        checksum = xxhash.xxh3_128()
        for one in drawn:
            checksum.update(one.input_ids.tobytes())
            checksum.update(one.labels.tobytes())
        return StreamBlock(start, end, drawn, checksum.hexdigest(), self._new_notes())

    def _encode(self, start: Position) -> Generator[tuple[SourceRecord, list[Encoded]]]:
        """Yield the records from a position to the end of its epoch, with their sequences.

        Files are numbered in the epoch's order. With a limit on records, files keep the order of
        the listing, since the limit selects the first records.
        """
        files, skipped = self.listing.files, 0
        if self._limit is None:
            order = np.random.default_rng((*self._seed, start.epoch, 4)).permutation(len(files))
            files, skipped = tuple(files[i] for i in order.tolist())[start.file :], start.file
        listing = replace(self.listing, files=files)

        def records() -> Iterator[SourceRecord]:
            skip = start.line if self._limit is None else 0
            read = read_records(
                listing, self._notes, self.reading.columns, self._key, self._limit, skip
            )
            for record in read:
                record = replace(record, file=record.file + skipped)
                if (record.file, record.line) > (start.file, start.line):
                    yield record

        yield from encode(records(), self._tokenizer, self.reading, self._notes)

    def _fitted(self, record: SourceRecord, sequences: list[Encoded]) -> list[Encoded]:
        """Return the sequences of a record, cut or left out as data.too_long says. Raises DataError
        for a sequence that is too long and may not be cut."""
        limit, too_long = self._settings.max_seq_len, self._settings.too_long
        if self._settings.join:
            return sequences
        fitted = []
        for one in sequences:
            if (num_tokens := len(one.input_ids)) <= limit:
                fitted.append(one)
                continue
            format = self.reading.format
            if too_long == "error" or (too_long == "split" and format not in SPLIT):
                given = f"a sequence of {num_tokens:,} tokens"
                raise above_limit(given, limit, record.origin, format)
            self._notes.add(f"longer than {limit:,} tokens: {too_long}", record.file, record.line)
            stop = {"truncate": limit, "drop": 0, "split": num_tokens}[too_long]
            cut = [slice(first, first + limit) for first in range(0, stop, limit)]
            fitted += [Encoded(one.input_ids[piece], one.labels[piece]) for piece in cut]
        return fitted

    def _new_notes(self) -> list[str]:
        unread = {f"with {name}, not used" for name in self._notes.unread}
        new = sorted((self._notes.keys() | unread) - self._reported)
        self._reported.update(new)
        return [f"{self._key}: {printable(self.source.path)}: {what}, from here on" for what in new]


def _joined(found: Items[tuple[str, Encoded]], limit: int) -> list[tuple[str, Encoded]]:
    """Concatenate texts, and return sequences of `limit` tokens; the last sequence has the rest.

    Each text in `found` has its origin (file and line) before it. The origin of a sequence is that
    of the text in which it begins.
    """
    ids = np.concatenate([np.zeros(0, np.int32), *(one.input_ids for _, one in found)])
    ends = np.cumsum([len(one.input_ids) for _, one in found])
    cut = []
    for first in range(0, len(ids), limit):
        piece = ids[first : first + limit]
        cut.append((found[int(np.searchsorted(ends, first, "right"))][0], Encoded(piece, piece)))
    return cut


class StreamSet:
    """Sequences of one or more sources, drawn so that each source has its share of the tokens."""

    noun = "sequence"

    def __init__(
        self, settings: DataConfig, tokenizer: Any, *, seed: int = 0,
        say: Callable[[str], None] = print, key: str = "data.train",
        shared: Callable[[], SharedBlocks] | None = None,
    ) -> None:  # fmt: skip
        """Open the sources and read the first record of each.

        Args:
            settings: the section `data` of the run.
            tokenizer: the tokenizer of the run.
            seed: the seed of the run, which determines every order.
            say: called with a line when records are left out for a new reason.
            key: the key of the run file that names the sources.
            shared: opens the folder of shared blocks; None for a single process.

        Raises:
            UserError: a source cannot be read, or two sources name one file.
        """
        self._settings, self._seed, self.say, self._key = settings, seed, say, key
        copied = copy.deepcopy(tokenizer)  # for the thread
        self._describe_token = partial(token_in_words, tokenizer=tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._vocab_size: int | None = None
        self._readers = [
            Reader(source, number, settings, copied, seed, key, self._thread, self._check)
            for number, source in enumerate(settings.train)
        ]
        by_template = any(one.reading.format not in ("text", "tokens") for one in self._readers)
        self._tokenizer = tokenizer_checksum(tokenizer, by_template=by_template)
        once = "name it once; a larger share draws from it more often"
        refuse_repeated([reader.listing for reader in self._readers], key, once)
        self._shared = None if shared is None else shared()
        for reader in self._readers:
            reader.shared = self._shared

    @property
    def longest(self) -> int:
        """`data.max_seq_len`, the most tokens that a sequence may have. The lengths of sequences
        that are not read yet are unknown."""
        return self._settings.max_seq_len

    @cached_property
    def sample(self) -> list[Sequence]:
        """The sequences of each source's first block; steps are planned from them."""
        self._begin(LoaderState())
        found = []
        for reader in self._readers:
            reader.peek()
            assert reader.block is not None
            found += reader.block.sequences
        return found

    @property
    def seq_lens(self) -> npt.NDArray[np.int64]:
        """(N,) the lengths of the sequences in `sample`."""
        return np.array([one.seq_len for one in self.sample])

    @property
    def valid_tokens(self) -> npt.NDArray[np.int64]:
        """(N,) the numbers of tokens in `sample` that have a label."""
        return np.array([one.num_valid_tokens for one in self.sample])

    def epoch_lens(self, seed: int) -> npt.NDArray[np.int64]:
        """Return the lengths of the sequences in `sample`. The lengths of an epoch, which a
        `DataSet` returns here, are unknown; `seed` has no effect."""
        return self.seq_lens

    @property
    def fingerprint(self) -> dict[str, str]:
        """Checksums, by name, of all that determines the sequences except the files' contents."""
        settings = self._settings
        named = {
            f"the names of the files of {named_source(reader.source)}": cache_key(
                [[file.kind, file.path.name] for file in reader.listing.files]
            )
            for reader in self._readers
        }
        named["the tokenizer (its files, or the versions of transformers and tokenizers)"] = (
            self._tokenizer
        )
        keys = [
            [reader.reading.key, reader.source.share, reader.source.limit]
            for reader in self._readers
        ]
        others = [settings.max_seq_len, settings.too_long, settings.join, self._seed, BLOCK_TOKENS]
        return named | {SEQUENCES: cache_key([*named.values()], keys, others)}

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise DataError if a token id or label is not below `vocab_size`.

        Blocks in memory are checked now, other blocks when they are read.
        """
        self._vocab_size = vocab_size
        for reader in self._readers:
            if reader.block is not None:
                self._check_ids(reader.block)

    def describe(self) -> list[str]:
        """Return lines that describe the sources."""
        lines = []
        for reader in self._readers:
            path, files = named_source(reader.source), reader.listing.files
            how = f"{count_words(len(files), 'file')}, {format_in_words(reader.facts)}"
            how += ", read while training"
            share = f", share {reader.source.share:g}" if len(self._readers) > 1 else ""
            lines.append(f"{self._key}: {path}: {how}{share}")
            lines += [f"{self._key}: {path}: {line}" for line in reader.listing.notes]
        return lines

    def describe_batches(self, size: StepSize) -> str:
        """Return the size of global batches in words."""
        of = f"{size} sequences" if size.tokens is None else str(size)
        return f"batches of {of}; plans are for {self.longest:,} tokens, which one may have"

    def batches(self, size: StepSize, state: LoaderState) -> Iterator[TrainBatch]:
        """Yield batches without end. `state`: where to begin, such as `TrainBatch.next_state` of
        the batch before. Raises DataError."""
        self._begin(state)
        while True:
            if self._shared is not None:
                self._shared.keep(key for reader in self._readers for key in reader.keys)
            drawn, num_tokens = list[Sequence](), 0
            while size.sequences is None or len(drawn) < size.sequences:
                reader = self._due()
                num_tokens += reader.peek().seq_len
                if drawn and size.tokens is not None and num_tokens > size.tokens:
                    break
                drawn.append(reader.take())
            cursors = tuple(asdict(reader.cursor) for reader in self._readers)
            yield TrainBatch(tuple(drawn), LoaderState(sources=cursors))

    def close(self) -> None:
        """Stop reading, and remove the shared blocks."""
        for reader in self._readers:
            reader.is_closed = True
        self._thread.shutdown(cancel_futures=True)
        if self._shared is not None:
            self._shared.close()

    def _begin(self, state: LoaderState) -> None:
        cursors = [Cursor.of(values) for values in state.sources] or [Cursor()] * len(self._readers)
        places = [(own.cursor.block, own.cursor.drawn) for own in self._readers]
        if places != [(own.block, own.drawn) for own in cursors]:
            for reader, cursor in zip(self._readers, cursors, strict=True):
                reader.go_to(cursor)

    def _due(self) -> Reader:
        """Return the reader of the source that is furthest below its share of the drawn tokens."""
        total = sum(reader.cursor.num_tokens for reader in self._readers)

        def lacks(reader: Reader) -> float:
            return (reader.source.share or 1) * total - reader.cursor.num_tokens

        return max(self._readers, key=lacks)

    def _check(self, block: StreamBlock) -> None:
        self._check_ids(block)
        for line in block.notes:
            self.say(line)

    def _check_ids(self, block: StreamBlock) -> None:
        if (vocab_size := self._vocab_size) is not None:
            for one in block.sequences:
                highest = int(max(one.input_ids.max(), one.labels.max()))
                if highest >= vocab_size:
                    raise unknown_token(self._describe_token(highest), vocab_size, one.origin)
