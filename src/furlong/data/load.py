"""Sources to a data set: each is tokenized, or found in the cache."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Items
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from furlong.data.cache import (
    TokenizedSource,
    cache_folder,
    content_key,
    key_of,
    read_arrays,
    status_key,
    write_tokens,
    writing,
)
from furlong.data.dataset import DataSet, TooLong
from furlong.data.formats import (
    NEEDED_FIELDS,
    Format,
    check_endings,
    decide_format,
    unused_fields,
)
from furlong.data.pairs import NO_EOS, LeftOut, encode_pairs, require_pair
from furlong.data.records import SourceRecord, read_records
from furlong.data.sources import (
    Listing,
    Source,
    SourceFile,
    list_files,
    printable,
    unreadable,
)
from furlong.data.tokenize import Encoded, encode, fingerprint
from furlong.errors import DataError
from furlong.units import count_words


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
    folder = cache_folder(cache_dir)
    print_of_tokenizer = fingerprint(tokenizer)
    listings = [list_files(source, key) for source in sources]
    _refuse_repeated(listings, key)
    parts = tuple(
        _tokenized(source, listing, tokenizer, print_of_tokenizer, format, folder, key)
        for source, listing in zip(sources, listings, strict=True)
    )
    require_pair(((part.index, part.notes["left_out"]) for part in parts), key)
    return DataSet(parts, max_seq_len=max_seq_len, too_long=too_long, key=key)


def describe_shared(train: DataSet, held_out: DataSet) -> list[str]:
    """A line if files of the held-out data, or sources of the same content, are trained on."""
    files = {file.path.resolve() for part in train.parts for file in part.listing.files}
    contents = {part.content for part in train.parts}
    shared = [
        file.origin(0)
        for part in held_out.parts
        for file in part.listing.files
        if part.content in contents or file.path.resolve() in files
    ]
    if not shared:
        return []
    return [
        f"data.eval: {count_words(len(shared), 'file')} of data.train ({shared[0]}"
        f"{', ...' if len(shared) > 1 else ''}): its loss is of sequences that are learnt"
    ]


def _refuse_repeated(listings: Items[Listing], key: str) -> None:
    """A file that two sources hold would be learnt twice as often, and nothing would say so."""
    seen: set[Path] = set()
    for listing in listings:
        own = {file.path.resolve(): file.path for file in listing.files}
        for resolved, path in own.items():
            if resolved in seen:
                raise DataError(
                    given=f"{printable(path)}, which two sources name",
                    required="every file in one source",
                    source=key,
                    change="name it once; {path: ..., weight: 2.0} draws from a source twice as"
                    " often",
                )
        seen |= own.keys()


def _tokenized(
    source: Source,
    listing: Listing,
    tokenizer: Any,
    print_of_tokenizer: str,
    format: Format | Literal["auto"],
    folder: Path,
    key: str,
) -> TokenizedSource:
    files = listing.files
    if format != "text":
        check_endings(files, format)
    try:
        before = status_key(files)
        content = content_key(files, folder)
    except OSError as error:
        raise unreadable(source.path, key, error) from error
    place = folder / "tokens" / key_of(content, print_of_tokenizer, format)
    arrays = read_arrays(place)
    if arrays is not None:
        return TokenizedSource(source, listing, arrays, content, print_of_tokenizer)
    started_s = time.perf_counter()
    notes: dict[str, Any] = {}
    encoded = _encoded(files, tokenizer, format, key, notes)

    def unchanged() -> Iterator[Encoded]:
        yield from encoded
        if status_key(files) != before:
            raise DataError(
                given=f"{source.path}, which changed while it was read",
                required="data that stays as it is",
                source=key,
                change="start again when it is complete",
            )

    with writing(folder):
        arrays = write_tokens(place, unchanged(), notes)
    tokenized_s = time.perf_counter() - started_s
    return TokenizedSource(source, listing, arrays, content, print_of_tokenizer, tokenized_s)


def _encoded(
    files: tuple[SourceFile, ...],
    tokenizer: Any,
    format: Format | Literal["auto"],
    key: str,
    notes: dict[str, Any],
) -> Iterator[Encoded]:
    """The sequences of a source; fills `notes`."""
    left_out: Counter[str] = Counter()
    records = read_records(files, left_out, key)
    first: SourceRecord = next(records)
    decided = decide_format(first) if format == "auto" else format
    notes["format"] = decided
    is_file = files[first.file].kind == "text"
    notes["fields"] = [] if is_file else list(NEEDED_FIELDS[decided])
    notes["unused"] = [] if is_file else unused_fields(first.fields, decided)
    notes["highest"] = -1
    notes["first"] = {}
    whole = chain((first,), records)
    if decided == "preference":
        encoded = encode_pairs(whole, tokenizer, LeftOut(left_out, notes["first"]))
    else:
        encoded = encode(whole, tokenizer, decided, left_out)
    of_texts = decided == "preference" and isinstance(first.fields.get("chosen"), str)
    ends = of_texts or decided in ("text", "completion")
    lacks_eos = ends and tokenizer.eos_token_id is None
    for sequence in encoded:
        left_out[NO_EOS] += lacks_eos
        highest = max(int(sequence.input_ids.max()), int(sequence.labels.max()))
        notes["highest"] = max(notes["highest"], highest)
        yield sequence
    notes["left_out"] = {what: number for what, number in left_out.items() if number}
