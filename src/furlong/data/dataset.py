"""The sequences of a run: sources, tokenized or found in the cache, without what is too long."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from furlong.config.schema import Format, Source
from furlong.data.cache import (
    ReferenceLogProbs,
    TokenizedSource,
    cache_folder,
    key_of,
    read_arrays,
    status_key,
    write_tokens,
    writing,
)
from furlong.data.formats import FIELDS, FORMATS, decide_format, encode, unused_fields
from furlong.data.loader import Mixture, Units, rows_of
from furlong.data.pairs import require_answers
from furlong.data.records import Notes, SourceRecord, read_records
from furlong.data.sources import Listing, SourceFile, list_files, printable, unreadable
from furlong.data.tokenize import IGNORE_INDEX, Encoded, Sequence, fingerprint
from furlong.errors import DataError
from furlong.units import count_words, format_count, format_seconds, plural

TooLong = Literal["error", "truncate", "drop"]

_MAX_LISTED = 8
SEQUENCES = "the order of the sequences"
"""The name under which a fingerprint has all that decides which sequence has which number."""


class DataSet:
    """Sequences by number, read from disk when they are asked for.

    `seq_id` of a sequence is its number. A pair of answers is two of them, chosen and rejected, at
    2i and 2i + 1.
    """

    def __init__(
        self,
        parts: tuple[TokenizedSource, ...],
        *,
        max_seq_len: int | None = None,
        too_long: TooLong = "error",
        key: str = "data.train",
    ) -> None:
        """`max_seq_len` None takes sequences of any length. Raises DataError if one is too long and
        that is an error, and if nothing is left to learn from."""
        self.parts = parts
        self._references: Mapping[int, ReferenceLogProbs] = {}
        self._key = key
        self.max_seq_len = max_seq_len
        self._offsets = np.cumsum([0, *(len(part.index) for part in parts)])
        lens = np.concatenate([part.seq_lens for part in parts])
        starts = np.concatenate([part.starts + self._offsets[i] for i, part in enumerate(parts)])
        limit = max_seq_len if max_seq_len is not None else int(lens.max(initial=0))
        above = np.logical_or.reduceat(lens > limit, starts) if len(starts) else starts > 0
        num_above = int(above.sum())
        if num_above and too_long == "error":
            raise self._too_long(lens, num_above, limit, len(starts))
        dropping = too_long == "drop"
        self.num_dropped = num_above if dropping else 0
        self.num_truncated = 0 if dropping else num_above
        valid = np.concatenate([part.index[:, 3] for part in parts])
        if not dropping:
            for row in np.flatnonzero(lens > limit).tolist():
                number, own = self._find(row)
                labels = parts[number].tokens(own)[1][1:limit]
                valid[row] = np.count_nonzero(labels != IGNORE_INDEX)
            for row in starts[above].tolist() if self.noun == "pair" else ():
                number, own = self._find(row)
                part = parts[number]
                pair = [Encoded(*part.tokens(each)) for each in (own, own + 1)]
                require_answers(pair, limit, part.origin(own))
        kept = ~above if dropping else above | True
        sizes = np.diff(starts, append=len(lens))
        self._rows = np.flatnonzero(np.repeat(kept, sizes))
        stops = np.cumsum(sizes[kept])
        self.units: Units = np.stack([stops - sizes[kept], stops], axis=1)
        """(U, 2) the sequences of each record: they are drawn, and left out, as one."""
        of_parts = np.searchsorted(self._offsets, starts[kept], side="right") - 1
        self._num_units = tuple(np.bincount(of_parts, minlength=len(parts)).tolist())
        self.seq_lens: npt.NDArray[np.int64] = np.minimum(lens[self._rows], limit)
        """(N,) tokens of every sequence."""
        self.valid_tokens: npt.NDArray[np.int64] = valid[self._rows]
        """(N,) tokens of every sequence that are learnt."""
        self.num_valid_tokens = int(self.valid_tokens.sum())
        if not self.num_valid_tokens:
            raise self._nothing_to_learn()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, seq_id: int) -> Sequence:
        seq_id = range(len(self))[seq_id]
        number, row = self.row(seq_id)
        part = self.parts[number]
        ids, labels = part.tokens(row)
        counted = int(self.valid_tokens[seq_id])
        known = self._references.get(number)
        reference = None if known is None else known.read(row, counted)
        return Sequence(
            seq_id, part.origin(row), ids[: self.max_seq_len], labels[: self.max_seq_len],
            counted=counted, reference=reference,
        )  # fmt: skip

    def with_references(self, references: Mapping[int, ReferenceLogProbs]) -> DataSet:
        """A copy that has log-probabilities of a reference model, by number of the part."""
        same = copy.copy(self)
        same._references = references
        return same

    @property
    def noun(self) -> str:
        """The word for what is drawn."""
        return self.parts[0].noun

    @property
    def num_tokens(self) -> int:
        return int(self.seq_lens.sum())

    @property
    def longest(self) -> int:
        return int(self.seq_lens.max(initial=0))

    @property
    def mixture(self) -> Mixture:
        """How often an epoch draws from each source."""
        return Mixture(self._num_units, tuple(part.source.weight for part in self.parts))

    @property
    def has_label(self) -> npt.NDArray[np.bool_]:
        """Whether each thing that is drawn has something to learn."""
        return np.asarray(np.logical_or.reduceat(self.valid_tokens > 0, self.units[:, 0]))

    @property
    def unit_lens(self) -> npt.NDArray[np.int64]:
        """Tokens of each thing that is drawn."""
        return np.asarray(np.add.reduceat(self.seq_lens, self.units[:, 0]))

    def epoch_lens(self, seed: int) -> npt.NDArray[np.int64]:
        """Tokens of the sequences of a run's first epoch, in their order."""
        return self.seq_lens[rows_of(self.units[self.mixture.order(seed, 0)])]

    def row(self, seq_id: int) -> tuple[int, int]:
        """The number of the part of a sequence, and its row there."""
        return self._find(int(self._rows[seq_id]))

    def _find(self, row: int) -> tuple[int, int]:
        """The number of the part that holds a row of all parts together, and its row there."""
        number = int(np.searchsorted(self._offsets, row, side="right")) - 1
        return number, row - int(self._offsets[number])

    @property
    def fingerprint(self) -> dict[str, str]:
        """Checksums of all that decides which sequence has which number, by what they are of."""
        named = {
            f"the sequences of {printable(part.source.path)}": part.tokens_key
            for part in self.parts
        }
        named["the tokenizer (its files, or the versions of transformers and tokenizers)"] = (
            self.parts[0].tokenizer
        )
        keys = [[part.tokens_key, part.source.weight] for part in self.parts]
        limit = self.max_seq_len if self.num_truncated or self.num_dropped else None
        return named | {SEQUENCES: key_of(keys, limit, self.num_dropped)}

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises DataError for a token id or label that a model of `vocab_size` does not know."""
        for part in self.parts:
            if part.notes["highest"] < vocab_size:
                continue
            for row in range(len(part.index)):
                highest = int(max(map(np.max, part.tokens(row))))
                if highest >= vocab_size:
                    raise DataError(
                        given=f"token id {highest}",
                        required=f"ids below {vocab_size}, the model's vocab_size",
                        source=part.origin(row),
                        change="use the tokenizer that belongs to the model",
                    )

    def describe(self) -> list[str]:
        """Lines that tell what was found: one per source, one for all."""
        lines = []
        for part, draws in zip(self.parts, self.mixture.draws, strict=True):
            weight = part.source.weight
            drawn = f", weight {weight:g}: {draws:,} an epoch" if weight != 1 else ""
            lines.append(f"{self._key}: {_describe(part)}{drawn}")
            path = printable(part.source.path)
            lines += [f"{self._key}: {path}: {line}" for line in part.listing.notes]
        line = (
            f"{self._key}: {count_words(len(self.units), self.noun)},"
            f" {format_count(self.num_tokens)} {plural(self.num_tokens, 'token')},"
            f" {format_count(self.num_valid_tokens)} of them learnt, longest {self.longest:,}"
        )
        if self.num_truncated or self.num_dropped:
            line += (
                f"; above {self.max_seq_len:,}: {self.num_truncated:,} truncated,"
                f" {self.num_dropped:,} dropped"
            )
        return [*lines, line]

    def _too_long(
        self, lens: npt.NDArray[np.int64], num_above: int, limit: int, num_units: int
    ) -> DataError:
        number, row = self._find(int(lens.argmax()))
        others = f", and {num_above - 1:,} more above the limit" if num_above > 1 else ""
        return DataError(
            given=f"a {'pair with a ' * (self.noun == 'pair')}sequence of {lens.max():,} tokens"
            f"{others}, of {count_words(num_units, self.noun)}",
            required=f"at most data.max_seq_len = {limit:,}",
            source=self.parts[number].origin(row),
            change="raise data.max_seq_len, or set data.too_long to truncate or drop",
        )

    def _nothing_to_learn(self) -> DataError:
        left_out = [_left_out(part) for part in self.parts]
        return DataError(
            given=f"{count_words(len(self), 'sequence')} without a label"
            + (f", {self.num_dropped:,} dropped" if self.num_dropped else "")
            + "".join(left_out),
            required="at least one token that is to be predicted from one before it",
            source=self._key,
            change="check that the right files are named, and what their first records hold; add"
            " text or answers of the assistant, or raise data.max_seq_len",
        )


def _describe(part: TokenizedSource) -> str:
    """One line that says which format `auto` found, and what was left out."""
    notes = part.notes
    number = count_words(len(part.starts), part.noun)
    line = f"{printable(part.source.path)}: {number}, format {notes['format']}"
    if fields := notes["fields"]:
        line += f" by the field{'s' if len(fields) > 1 else ''} {' and '.join(fields)}"
    if unused := notes["unused"]:
        listed = ", ".join(map(printable, unused[:_MAX_LISTED]))
        line += f" (not used: {listed}{', ...' if len(unused) > _MAX_LISTED else ''})"
    seconds = part.tokenized_s
    how = "cached" if seconds is None else f"tokenized in {format_seconds(seconds)}"
    return f"{line}{_left_out(part)}, {how}"


def _left_out(part: TokenizedSource) -> str:
    """Counts of what a source did not take as it is, and where the first of each kind is."""
    return "".join(
        f", {count:,} {what} (first: {part.listing.files[file].origin(line)})"
        for what, (count, file, line) in part.notes["left_out"].items()
    )


def load_data(
    sources: Items[Source],
    tokenizer: Any,
    *,
    format: Format | Literal["auto"] = "auto",
    max_seq_len: int | None = None,
    too_long: TooLong = "error",
    cache_dir: str | None = None,
    key: str = "data.train",
) -> DataSet:
    """The data set of `sources`, tokenized or taken from the cache.

    key: where the sources were named, for messages. Raises DataError and ConfigError.
    """
    listings = [list_files(source, key, format) for source in sources]
    _refuse_repeated(listings, key)
    known = fingerprint(tokenizer)
    folder = cache_folder(cache_dir)
    parts = []
    for source, listing in zip(sources, listings, strict=True):
        files = listing.files
        try:
            place = folder / "tokens" / key_of(status_key(files), known, format)
        except OSError as error:
            raise unreadable(source.path, key, error) from error
        started_s = time.perf_counter()
        tokenized_s = None
        arrays = read_arrays(place)
        if arrays is None:
            facts: dict[str, Any] = {}
            encoded = _encoded(files, tokenizer, format, key, facts)
            with writing(folder):
                arrays = write_tokens(place, encoded, facts)
            tokenized_s = time.perf_counter() - started_s
        parts.append(TokenizedSource(source, listing, arrays, known, tokenized_s))
    return DataSet(tuple(parts), max_seq_len=max_seq_len, too_long=too_long, key=key)


def describe_shared(train: DataSet, held_out: DataSet) -> list[str]:
    """A line if files of the held-out data, or sources of the same tokens, are trained on."""
    files = {file.path.resolve() for part in train.parts for file in part.listing.files}
    contents = {part.tokens_key for part in train.parts}
    shared = [
        file.origin(0)
        for part in held_out.parts
        for file in part.listing.files
        if part.tokens_key in contents or file.path.resolve() in files
    ]
    if not shared:
        return []
    return [
        f"data.eval: {count_words(len(shared), 'file')} of data.train ({shared[0]}"
        f"{', ...' if len(shared) > 1 else ''}): its loss is of sequences that are learnt"
    ]


def _refuse_repeated(listings: Items[Listing], key: str) -> None:
    """A file that two sources hold would be learnt twice as often, and nothing would say so."""
    named = Counter(
        path for listing in listings for path in {file.path.resolve() for file in listing.files}
    )
    twice = [path for path, times in named.items() if times > 1]
    if twice:
        raise DataError(
            given=f"{printable(twice[0])}, which two sources name",
            required="every file in one source",
            source=key,
            change="name it once; {path: ..., weight: 2.0} draws from a source twice as often",
        )


def _encoded(
    files: tuple[SourceFile, ...],
    tokenizer: Any,
    format: Format | Literal["auto"],
    key: str,
    facts: dict[str, Any],
) -> Iterator[tuple[SourceRecord, list[Encoded]]]:
    """The sequences of a source; fills `facts`."""
    notes = Notes()
    records = read_records(files, notes, FIELDS, key)
    first: SourceRecord = next(records)
    decided = decide_format(first) if format == "auto" else format
    is_file = files[first.file].kind == "text"
    facts |= {
        "format": decided,
        "fields": [] if is_file else list(FORMATS[decided].needed),
        "unused": [] if is_file else unused_fields(first.fields, decided),
        "highest": -1,
        "left_out": notes,
    }
    for record, sequences in encode(chain((first,), records), tokenizer, decided, notes):
        for one in sequences:
            highest = max(int(one.input_ids.max()), int(one.labels.max()))
            facts["highest"] = max(facts["highest"], highest)
        yield record, sequences
