"""Build the data set of a run from its sources, which are tokenized unless the cache has them."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from furlong.config.schema import DataConfig, Format, Source, TooLong
from furlong.data.cache import (
    ReferenceLogProbs,
    TokenizedSource,
    cache_folder,
    cache_key,
    creating_folder,
    read_arrays,
    status_key,
    write_tokens,
)
from furlong.data.formats import Reading, encode, read_whole
from furlong.data.loader import Mixture, Units, each_alone, sequence_indices
from furlong.data.pairs import require_answers
from furlong.data.records import Notes, SourceRecord, left_out, read_records
from furlong.data.sources import Listing, list_files, printable, unreadable
from furlong.data.tokenize import (
    IGNORE_INDEX,
    Encoded,
    Sequence,
    token_in_words,
    tokenizer_checksum,
)
from furlong.errors import DataError
from furlong.units import count_words, format_count, format_seconds, plural

SPLIT = ("text", "tokens")
"""Formats whose sequences may be cut anywhere."""
_MAX_LISTED = 8
_LOOK = (
    "check that the right files are named, and what their first records hold; add text or answers"
    " of the assistant"
)
_NAME_ONCE = (
    "name it once, or slices that share no record; {path: ..., weight: 2.0} draws from a source"
    " twice as often"
)
SEQUENCES = "the order of the sequences"
"""The key, in a fingerprint, of the checksum of all that determines the order of sequences."""


class DataSet:
    """The data set of a run: its sequences, which are read from disk when they are used.

    The number of a sequence is its `seq_id`. A pair is two sequences, chosen at 2i and rejected at
    2i + 1.
    """

    def __init__(
        self, parts: tuple[TokenizedSource, ...], settings: DataConfig, key: str = "data.train"
    ) -> None:
        """Cut, leave out or join sequences as `settings` say.

        Args:
            parts: the tokenized sources.
            settings: the section `data` of the run.
            key: the key of the run file that names the sources.

        Raises:
            DataError: a sequence is too long under `too_long: error`, or cannot be split, or no
                sequence with a label is left.
        """
        self.parts, self.settings, self._key = parts, settings, key
        self._references: Mapping[int, ReferenceLogProbs] = {}
        self._offsets = np.cumsum([0, *(len(part.index) for part in parts)])
        self.above: Counter[TooLong] = Counter()
        """The number of records longer than `data.max_seq_len`, by what became of them."""
        kept = self._joined() if settings.join else self._fitted()
        short = self._any(self.seq_lens < settings.min_len) & kept
        self.num_short = int(short.sum())
        self._keep(kept & ~short)

    def _fitted(self) -> npt.NDArray[np.bool_]:
        """Make the sequences of a data set without `data.join`: one for each row in the cache, or
        several if `data.too_long` is "split" and the row is too long.

        Return a mask (U,) of the units to keep, which excludes those that `data.too_long` drops. A
        unit is drawn as a whole: a sequence, or the two of a pair.
        """
        parts, too_long = self.parts, self.settings.too_long
        lens = np.concatenate([part.seq_lens for part in parts])
        starts = np.concatenate([part.starts + self._offsets[i] for i, part in enumerate(parts)])
        # None in `furlong lengths`, which has no limit
        limit = self.settings.max_seq_len or int(lens.max(initial=1))
        is_long = lens > limit
        above = np.logical_or.reduceat(is_long, starts) if len(starts) else starts > 0
        num_above = int(above.sum())
        if num_above and too_long == "error":
            raise self._too_long(lens, num_above, limit, len(starts))
        if too_long == "split":
            self._require_splittable(lens, limit)
        self.above[too_long] = num_above
        pieces = -(-lens // limit) if too_long == "split" else np.ones_like(lens)
        first = np.cumsum(pieces) - pieces
        # (N,) of each sequence: its row, its first token there, its length, its valid tokens
        self._rows = np.repeat(np.arange(len(lens)), pieces)
        self._begins = (np.arange(len(self._rows)) - np.repeat(first, pieces)) * limit
        self.seq_lens: npt.NDArray[np.int64] = np.minimum(lens[self._rows] - self._begins, limit)
        valid = np.concatenate([part.index[:, 3] for part in parts])
        self.valid_tokens: npt.NDArray[np.int64] = valid[self._rows]
        if too_long in ("truncate", "split"):
            for piece in np.flatnonzero(is_long[self._rows]).tolist():
                labels = self._tokens(piece)[1][1:]
                self.valid_tokens[piece] = np.count_nonzero(labels != IGNORE_INDEX)
        if too_long == "truncate" and self.noun != "sequence":
            for row in starts[above].tolist():
                number, own = self._find(row)
                part = parts[number]
                pair = [Encoded(*part.tokens(each)) for each in (own, own + 1)]
                require_answers(pair, limit, part.origin(own), self.noun)
        is_first = self._begins > 0
        is_first[first[starts]] = True
        begins = np.flatnonzero(is_first)
        self.units: Units = np.stack([begins, np.append(begins, len(self._rows))[1:]], axis=1)
        """(U, 2) half-open ranges of sequences that are drawn, or left out, as one: those of a
        record, or one piece of it."""
        return ~self._any(is_long[self._rows] & (too_long == "drop"))

    def _joined(self) -> npt.NDArray[np.bool_]:
        """Make the sequences of a data set with `data.join`: the texts of a source are concatenated
        and cut. Return a mask (U,) that keeps all sequences.

        Each sequence begins at some token of a row in the cache, and continues into the rows that
        follow. The last sequence of a source has the remaining tokens.
        """
        rows, begins, lens = [], [], []
        limit = self.settings.max_seq_len
        for part, offset in zip(self.parts, self._offsets.tolist(), strict=False):
            stops = part.index[:, 0]
            firsts = np.arange(0, int(stops[-1]), limit)
            own = np.searchsorted(stops, firsts, side="right")
            rows.append(own + offset)
            begins.append(firsts - (stops[own] - part.seq_lens[own]))
            lens.append(np.minimum(limit, stops[-1] - firsts))
        self._rows, self._begins = np.concatenate(rows), np.concatenate(begins)
        self.seq_lens = np.concatenate(lens)
        self.valid_tokens = self.seq_lens - 1  # each token but the first one is learnt
        self.units = each_alone(len(self._rows))
        return np.ones(len(self._rows), bool)

    def _any(self, of_rows: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return a mask (U,): whether at least one sequence of a unit is True in the mask `of_rows`
        (N,) of all sequences. A unit is a sequence or the two of a pair."""
        if not len(self.units):
            return np.zeros(0, bool)
        return np.asarray(np.logical_or.reduceat(of_rows, self.units[:, 0]))

    def _keep(self, kept: npt.NDArray[np.bool_]) -> None:
        """Keep only units (sequences or pairs) in `kept`. Raises DataError if none has a label."""
        sizes = self.units[:, 1] - self.units[:, 0]
        own = np.repeat(kept, sizes)
        self._rows, self._begins = self._rows[own], self._begins[own]
        self.seq_lens, self.valid_tokens = self.seq_lens[own], self.valid_tokens[own]
        stops = np.cumsum(sizes[kept])
        self.units = np.stack([stops - sizes[kept], stops], axis=1)
        self.num_valid_tokens = int(self.valid_tokens.sum())
        if not self.num_valid_tokens:
            raise self._nothing_to_learn()
        self.mixture = self._mixture()

    def _mixture(self) -> Mixture:
        """Return the `Mixture`, which says how often an epoch draws from each source. Raises
        DataError for a source that sets `share` and has no sequence."""
        of_rows = np.searchsorted(self._offsets, self._rows, side="right") - 1
        count = len(self.parts)
        sizes = np.bincount(of_rows[self.units[:, 0]], minlength=count).tolist()
        tokens = np.bincount(of_rows, self.seq_lens, count)
        weights = []
        for part, num_tokens in zip(self.parts, tokens.tolist(), strict=True):
            if part.source.share is None:
                weights.append(part.source.weight)
            elif num_tokens:
                whole = sum(part.source.share or 0 for part in self.parts)
                weights.append(part.source.share / whole * self.num_tokens / num_tokens)
            else:
                raise DataError(
                    given=f"{named_source(part.source)}: no sequence for a share of"
                    f" {part.source.share}",
                    required="a sequence of every source that has a share",
                    source=self._key,
                    change="remove the source, or change what leaves its sequences out",
                )
        return Mixture(tuple(sizes), tuple(weights))

    def split_off(self, amount: float, seed: int) -> tuple[DataSet, DataSet]:
        """Return the data set to train on and the held-out one.

        All sequences made of one record are in the same data set.

        Args:
            amount: if below 1, the share of records to hold out, otherwise their number. The number
                taken from each source is in proportion to its size.
            seed: determines which records are held out.

        Raises:
            DataError: all records would be held out.
        """
        of_units = self._rows[self.units[:, 0]]
        rows = np.unique(of_units)
        of_parts = np.searchsorted(self._offsets, rows, side="right") - 1
        count = int(amount) if amount >= 1 else max(1, round(amount * len(rows)))
        if count >= len(rows):
            raise DataError(
                given=f"data.eval_share = {amount:g}, of {count_words(len(rows), 'record')}",
                required="fewer records than there are: the others are trained on",
                source="data.eval_share",
                change="lower it, or remove it",
            )
        sizes = np.bincount(of_parts, minlength=len(self.parts))
        counts = count * sizes // len(rows)
        most_left = np.argsort(-(count * sizes % len(rows)), kind="stable")
        counts[most_left[: count - counts.sum()]] += 1
        held = [
            np.random.default_rng((seed, number, 0, 2)).permutation(rows[of_parts == number])[:own]
            for number, own in enumerate(counts.tolist())
        ]
        is_held = np.isin(of_units, np.concatenate(held))
        rest, held_out = copy.copy(self), copy.copy(self)
        held_out._key = "data.eval_share"
        held_out.above, held_out.num_short = Counter(), 0
        rest._keep(~is_held)
        held_out._keep(is_held)
        return rest, held_out

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, seq_id: int) -> Sequence:
        seq_id = range(len(self))[seq_id]
        number, row = self.row(seq_id)
        ids, labels = self._tokens(seq_id)
        counted = int(self.valid_tokens[seq_id])
        known = self._references.get(number)
        reference = None if known is None else known.read(row, counted)
        return Sequence(
            seq_id, self.parts[number].origin(row), ids, labels,
            counted=counted, reference=reference,
            desirable=self.parts[number].desirable(row),
        )  # fmt: skip

    def _tokens(self, seq_id: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        number, row = self.row(seq_id)
        own = int(self._begins[seq_id]), int(self.seq_lens[seq_id])
        return self.parts[number].tokens(row, *own)

    def with_references(self, references: Mapping[int, ReferenceLogProbs]) -> DataSet:
        """Return a copy of the data set with log-probabilities of a reference model; `references`
        holds them by the number of the source."""
        same = copy.copy(self)
        same._references = references
        return same

    @property
    def noun(self) -> str:
        """The noun for one item that is drawn, used in messages: "sequence", "pair" or "answer"."""
        return self.parts[0].noun

    @property
    def num_tokens(self) -> int:
        return int(self.seq_lens.sum())

    @property
    def longest(self) -> int:
        return int(self.seq_lens.max(initial=0))

    @property
    def has_label(self) -> npt.NDArray[np.bool_]:
        """Mask (U,): whether each unit has a token with a label. A unit is drawn as a whole: a
        sequence, or the two of a pair."""
        return self._any(self.valid_tokens > 0)

    @property
    def unit_lens(self) -> npt.NDArray[np.int64]:
        """Array (U,): the number of tokens of each unit. A unit is drawn as a whole: a sequence, or
        the two of a pair."""
        return np.asarray(np.add.reduceat(self.seq_lens, self.units[:, 0]))

    def num_shared(self, unit: int) -> int:
        """Return how many first tokens both sequences of a pair share; `unit`: the pair's index."""
        one, other = (self._tokens(seq_id)[0] for seq_id in range(*self.units[unit].tolist()))
        shorter = min(len(one), len(other))
        differ = one[:shorter] != other[:shorter]
        return int(differ.argmax()) if differ.any() else shorter

    def epoch_lens(self, seed: int) -> npt.NDArray[np.int64]:
        """Return the lengths of the first epoch's sequences, in the order of the draws."""
        return self.seq_lens[sequence_indices(self.units[self.mixture.order(seed, 0)])]

    def row(self, seq_id: int) -> tuple[int, int]:
        """Return the number of the source of a sequence, and the sequence's row in the cache of
        that source."""
        return self._find(int(self._rows[seq_id]))

    def _find(self, row: int) -> tuple[int, int]:
        """Return the number of the source that a row belongs to, and the index of the row in the
        cache of that source. `row`: the index of the row among the rows of all sources."""
        number = int(np.searchsorted(self._offsets, row, side="right")) - 1
        return number, row - int(self._offsets[number])

    @property
    def fingerprint(self) -> dict[str, str]:
        """Checksums of the data set, with keys that say what each checksum covers. At least one of
        them changes if some `seq_id` stands for another sequence than before."""
        named = {
            f"the sequences of {named_source(part.source)}": part.tokens_key for part in self.parts
        }
        named["the tokenizer (its files, or the versions of transformers and tokenizers)"] = (
            self.parts[0].tokenizer
        )
        keys = [part.tokens_key for part in self.parts]
        order = xxhash.xxh3_128()
        for array in (self._rows, self._begins, self.seq_lens, self.units):
            order.update(array.tobytes())
        return named | {SEQUENCES: cache_key(keys, self.mixture.weights, order.hexdigest())}

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise DataError if a token id or a label is not below `vocab_size`."""
        for part in self.parts:
            if part.notes["highest"] < vocab_size:
                continue
            for row in range(len(part.index)):
                highest = int(max(map(np.max, part.tokens(row))))
                if highest >= vocab_size:
                    told = part.notes["highest_token"] if highest == part.notes["highest"] else ""
                    raise unknown_token(told or f"token id {highest}", vocab_size, part.origin(row))

    def describe(self) -> list[str]:
        """Return lines that describe the data set: one or more per source, and one for all."""
        lines = []
        for part, draws in zip(self.parts, self.mixture.draws, strict=True):
            weight, share = part.source.weight, part.source.share
            drawn = f", weight {weight:g}: {draws:,} an epoch" if weight != 1 else ""
            if share is not None:
                drawn = f", share {share:g}: {draws:,} an epoch"
            number = count_words(len(part.starts), part.noun)
            seconds = part.tokenized_s
            how = "cached" if seconds is None else f"tokenized in {format_seconds(seconds)}"
            found = format_in_words(part.notes) + left_out(part.notes["left_out"], part.listing)
            named = named_source(part.source)
            lines.append(f"{self._key}: {named}: {number}, {found}, {how}{drawn}")
            path = printable(part.source.path)
            lines += [f"{self._key}: {path}: {line}" for line in part.listing.notes]
        return [*lines, self.summary()]

    def summary(self) -> str:
        """Return one line that describes all sequences together."""
        line = (
            f"{self._key}: {count_words(len(self.units), self.noun)},"
            f" {format_count(self.num_tokens)} {plural(self.num_tokens, 'token')},"
            f" {format_count(self.num_valid_tokens)} of them learnt, longest {self.longest:,}"
        )
        if num_blank := int((~self.has_label).sum()):
            line += f"; without a label: {num_blank:,}"
        above, limit = self.above, self.settings.max_seq_len
        if above["truncate"] or above["drop"]:
            line += f"; above {limit:,}: {above['truncate']:,} truncated, {above['drop']:,} dropped"
        if self.settings.join:
            num_texts = sum(len(part.index) for part in self.parts)
            line += f", joined of {count_words(num_texts, 'text')}"
        if above["split"]:
            line += f"; above {limit:,}: {above['split']:,} split"
        if self.num_short:
            line += f"; below {self.settings.min_len:,}: {self.num_short:,} left out"
        return line

    def _require_splittable(self, lens: npt.NDArray[np.int64], limit: int) -> None:
        """Raise DataError if a sequence longer than `limit` is of a format that may not be cut.
        `lens`: the lengths of all rows in the cache."""
        for number, part in enumerate(self.parts):
            own = lens[self._offsets[number] : self._offsets[number + 1]]
            format = part.notes["format"]
            if format not in SPLIT and (own > limit).any():
                row = int(own.argmax())
                given = f"a sequence of {own[row]:,} tokens"
                raise above_limit(given, limit, part.origin(row), format)

    def _too_long(
        self, lens: npt.NDArray[np.int64], num_above: int, limit: int, num_units: int
    ) -> DataError:
        number, row = self._find(int(lens.argmax()))
        others = f", and {num_above - 1:,} more above the limit" if num_above > 1 else ""
        return above_limit(
            f"{'a pair with ' * (self.noun == 'pair')}a sequence of {lens.max():,} tokens"
            f"{others}, of {count_words(num_units, self.noun)}",
            limit,
            self.parts[number].origin(row),
            self.parts[number].notes["format"],
        )

    def _nothing_to_learn(self) -> DataError:
        told = f", {count_words(len(self), 'sequence')} without a label" if len(self) else ""
        told += (
            (f", {self.above['drop']:,} dropped" if self.above["drop"] else "")
            + (f", {count_words(self.num_short, 'sequence')} too short" if self.num_short else "")
            + "".join(left_out(part.notes["left_out"], part.listing) for part in self.parts)
        )
        return nothing_to_learn(
            told.removeprefix(", ") or "no sequence",
            self._key,
            "lower data.min_len" if self.num_short
            else "raise data.max_seq_len" if self.above.total()
            else _LOOK,
        )  # fmt: skip


def format_in_words(facts: Mapping[str, Any]) -> str:
    """Return in words the format of a source, with the fields that are used and those that are not.
    `facts`: the values stored beside its tokens."""
    words = f"format {facts['format']}"
    if fields := facts["fields"]:
        words += f" by the field{'s' if len(fields) > 1 else ''} {' and '.join(fields)}"
    if unused := sorted(facts["unused"].items()):
        total = facts["num_records"]
        told = [
            printable(name) + (f" in {count:,} of {total:,} records" if count < total else "")
            for name, count in unused[:_MAX_LISTED]
        ]
        words += f" (not used: {', '.join(told)}{', ...' if len(unused) > _MAX_LISTED else ''})"
    return words


def named_source(source: Source) -> str:
    """Return path, configuration and split of a source in words."""
    return " ".join(map(printable, filter(None, (source.path, source.name, source.split))))


def load_data(
    sources: Items[Source],
    tokenizer: Any,
    settings: DataConfig,
    *,
    format: Format | None = None,
    key: str = "data.train",
    is_compared: bool = False,
) -> DataSet:
    """Return the data set of some sources, which are tokenized unless the cache has them.

    Args:
        sources: the sources.
        tokenizer: the tokenizer of the run.
        settings: the section `data` of the run.
        format: the format of records that the loss requires; None for the format in `settings`.
        key: the key of the run file that names the sources.
        is_compared: see `read_arrays`.

    Raises:
        DataError: a source cannot be read, or two sources have a record in common.
        ConfigError: the cache cannot be written, or the tokenizer does not suit the records.
    """
    listings = [list_files(source, key) for source in sources]
    limits = [min(filter(None, (source.limit, settings.limit)), default=None) for source in sources]
    whole = [one for one, most in zip(listings, limits, strict=True) if not (one.slices or most)]
    refuse_repeated(whole, key)
    known, folder = tokenizer_checksum(tokenizer), cache_folder(settings.cache_dir)
    parts: list[TokenizedSource] = []
    for source, listing, most in zip(sources, listings, limits, strict=True):
        own = Reading.of(settings, source, format)
        meant = listing.slices, most
        try:
            place = folder / "tokens" / cache_key(status_key(listing.files), known, own.key, meant)
        except OSError as error:
            raise unreadable(source.path, key, error) from error
        started_s = time.perf_counter()
        tokenized_s = None
        arrays = read_arrays(place, is_compared=is_compared)
        if arrays is None:
            facts: dict[str, Any] = {}
            encoded = _encoded(listing, tokenizer, own, key, facts, most)
            with creating_folder(folder):
                arrays = write_tokens(place, encoded, facts)
            tokenized_s = time.perf_counter() - started_s
        if settings.join:
            check_joined(arrays.facts["format"], tokenizer, printable(source.path))
        parts.append(TokenizedSource(source, listing, arrays, known, tokenized_s))
    for one, other in combinations(parts, 2):
        if shared := _overlap(one, other):
            raise _repeated(shared[0], key, _NAME_ONCE)
    return DataSet(tuple(parts), settings, key)


def describe_shared(train: DataSet, held_out: DataSet) -> list[str]:
    """Return a list with one warning if held-out data is trained on, otherwise an empty list.

    Held-out data is trained on if a record is in both data sets, or if a source of one has the same
    tokens as a source of the other.
    """
    contents = {part.tokens_key for part in train.parts}
    shared = []
    for part in held_out.parts:
        found = {file for other in train.parts for file in _overlap(part, other)}
        if part.tokens_key in contents:
            found = {file.origin(0) for file in part.listing.files}
        shared += sorted(found)
    if not shared:
        return []
    return [
        f"data.eval: {count_words(len(shared), 'file')} of data.train ({shared[0]}"
        f"{', ...' if len(shared) > 1 else ''}): its loss is of sequences that are learnt"
    ]


def _overlap(one: TokenizedSource, other: TokenizedSource) -> list[str]:
    """Return the files in which two sources have a record in common."""
    numbers: dict[Path, list[int]] = {}
    for number, file in enumerate(other.listing.files):
        numbers.setdefault(file.path.resolve(), []).append(number)
    return [
        file.origin(0)
        for number, file in enumerate(one.listing.files)
        if any(
            np.isin(one.lines_of(number), other.lines_of(same)).any()
            for same in numbers.get(file.path.resolve(), ())
        )
    ]


def unknown_token(given: str, vocab_size: int, origin: str) -> DataError:
    """Return the error for a token id or label that is not in a model's vocabulary.

    `given`: the id in words. `origin`: file and line of the sequence that has the id.
    """
    return DataError(
        given=given,
        required=f"ids below {vocab_size}, the model's vocab_size",
        source=origin,
        change="remove it from the records, as a text model lacks the tokens of images, or use the"
        " tokenizer that belongs to the model",
    )


def above_limit(given: str, limit: int, origin: str, format: str) -> DataError:
    """Return the error for a sequence longer than data.max_seq_len (`limit`).

    `given`: the sequence and its length in words. `origin`: file and line of the sequence.
    `format`: the format of its record, which decides whether it could be split.
    """
    ways, required = "truncate, drop or split", f"at most data.max_seq_len = {limit:,}"
    if format not in SPLIT:
        ways = "truncate or drop"
        required += f"; texts and tokens are split, but no answers (format {format})"
    return DataError(
        given=given,
        required=required,
        source=origin,
        change=f"raise data.max_seq_len, or set data.too_long to {ways}",
    )


def nothing_to_learn(given: str, key: str, change: str = _LOOK) -> DataError:
    """Return the error for data in which no sequence has a label.

    `given`: the data in words. `key`: the key of the run file that names the data. `change`:
    advice.
    """
    return DataError(
        given=given,
        required="at least one token that is to be predicted from one before it",
        source=key,
        change=change,
    )


def check_joined(format: str, tokenizer: Any, origin: str) -> None:
    """Raise DataError unless data.join can concatenate the records of a source: they are texts, and
    the tokenizer has an EOS to end each text with. `origin`: the source, for the message."""
    given = f"format {format}" if format != "text" else "a tokenizer without EOS"
    if format != "text" or tokenizer.eos_token_id is None:
        raise DataError(
            given=f"{given} with data.join",
            required="format text, and a tokenizer with an EOS that is written between texts",
            source=origin,
            change="remove data.join: conversations and tokens are sequences of their own",
        )


def refuse_repeated(listings: Items[Listing], key: str, change: str = _NAME_ONCE) -> None:
    """Raise DataError if a file is in two sources, since its records would be trained on twice as
    often.

    `listings`: the files of each source. `key`: the key of the run file that names the sources.
    `change`: advice for the error.
    """
    named = Counter(
        path for listing in listings for path in {file.path.resolve() for file in listing.files}
    )
    twice = [path for path, times in named.items() if times > 1]
    if twice:
        raise _repeated(printable(twice[0]), key, change)


def _repeated(file: str, key: str, change: str) -> DataError:
    return DataError(
        given=f"{file}, which two sources name",
        required="every record in one source",
        source=key,
        change=change,
    )


def _encoded(
    listing: Listing,
    tokenizer: Any,
    reading: Reading,
    key: str,
    facts: dict[str, Any],
    limit: int | None,
) -> Iterator[tuple[SourceRecord, list[Encoded]]]:
    """Yield a source's records with their sequences. Fill `facts` with the values to store beside
    the tokens: format, fields, highest token id and counts.

    `reading`: how records become sequences. `limit`: the most records to read; None for all.
    """
    notes = Notes()
    records = partial(read_records, listing, fields=reading.columns, key=key, limit=limit)
    first = next(records(notes=Notes()))
    own = reading.decided(first)
    facts |= {**own.facts(first), "highest": -1, "left_out": notes}
    if any(file.kind in ("json lines", "json", "csv", "tsv") for file in listing.files):
        # Refuse what cannot be read before anything is tokenized, which takes far longer.
        for _ in read_whole(records(notes=Notes()), tokenizer, own, Notes()):
            pass
    for record, sequences in encode(records(notes=notes), tokenizer, own, notes):
        for one in sequences:
            highest = max(int(one.input_ids.max()), int(one.labels.max()))
            if highest > facts["highest"]:
                facts |= {"highest": highest, "highest_token": token_in_words(highest, tokenizer)}
        yield record, sequences
    facts |= {"unused": notes.unread, "num_records": notes.num_records}
