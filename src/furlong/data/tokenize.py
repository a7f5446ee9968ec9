"""Records to token ids and labels; besides models, the only package that knows transformers."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from furlong.data.chat import Rendered, render_conversation
from furlong.data.formats import IGNORE_INDEX, Format, check_fields, text_of, tokens_of
from furlong.data.records import BLANK, SourceRecord
from furlong.data.rendering import rendering
from furlong.errors import ConfigError, DataError

__all__ = ["IGNORE_INDEX", "Encoded", "Sequence", "encode", "fingerprint", "load_tokenizer"]

_TEXTS_PER_CALL = 64
_CHARS_PER_CALL = 2**20


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """A tokenized document: `input_ids` and `labels` are (T,) int32, labels unshifted."""

    seq_id: int
    origin: str
    input_ids: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    counted: int | None = None
    """Its valid tokens where an index knows them, so that nobody reads the labels for it."""
    reference: npt.NDArray[Any] | None = None
    """Log-probabilities of its tokens with a label, by the model that a run began with."""

    @property
    def seq_len(self) -> int:
        return len(self.input_ids)

    @property
    def num_valid_tokens(self) -> int:
        """Positions that add to the loss: the first token has no one to predict it."""
        if self.counted is not None:
            return self.counted
        return int(np.count_nonzero(self.labels[1:] != IGNORE_INDEX))


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A record as tokens: (T,) int32 both; `labels` is `input_ids` itself where all are learnt."""

    input_ids: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    file: int
    line: int


def load_tokenizer(name: str, source: str = "model.name") -> Any:
    """The tokenizer of a hub id or folder, which `source` named. Raises ConfigError."""
    from transformers import AutoTokenizer

    folder = Path(name).expanduser()
    cause: Exception | None = None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder) if folder.is_dir() else name, trust_remote_code=False
        )
        # Without files transformers may build a tokenizer of the family that knows no word.
        if set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
            return tokenizer
        reason = "there is no vocabulary"
    except Exception as error:  # the tokenizers' Rust code raises plain ones for a broken file
        cause, reason = error, str(error).strip().split("\n")[0]
        if isinstance(error, UnicodeDecodeError) and folder.is_dir():
            _refuse_other_encodings(folder, source)
    raise ConfigError(
        given=f"{name} without a tokenizer: {reason}",
        required="tokenizer files beside config.json",
        source=source,
        change="save the model's tokenizer into the folder"
        if folder.is_dir()
        else "check the name, which is a folder or a whole id of the hub (Qwen/Qwen2.5-0.5B), and"
        " the connection to the hub",
    ) from cause


def _refuse_other_encodings(folder: Path, source: str) -> None:
    """Raises ConfigError for the first text of a tokenizer that is no UTF-8."""
    for file in sorted(
        file for end in ("json", "jinja", "txt") for file in folder.rglob(f"*.{end}")
    ):
        try:
            file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                given=f"{file}: {error.reason} at byte {error.start}",
                required="a tokenizer's files in UTF-8",
                source=source,
                change="save this file in UTF-8",
            ) from error


def fingerprint(tokenizer: Any) -> str:
    """A checksum of everything that decides which ids a text gets, templates included."""
    import tokenizers
    import transformers

    parts: dict[str, Any] = {
        "class": type(tokenizer).__name__,
        "versions": [transformers.__version__, tokenizers.__version__],
        "special": tokenizer.special_tokens_map,
        "eos": tokenizer.eos_token_id,
        "template": tokenizer.chat_template,
    }
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # Every call sets these two anew.
        parts["backend"] = {k: v for k, v in backend.items() if k not in ("truncation", "padding")}
        if tokenizer.split_special_tokens:  # which transformers sets at a call
            parts["split_special_tokens"] = True
    else:
        unnamed = ("name_or_path", "vocab_file", "merges_file")
        parts["vocab"] = tokenizer.get_vocab()
        parts["init"] = {k: v for k, v in tokenizer.init_kwargs.items() if k not in unnamed}
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def encode(
    records: Iterable[SourceRecord], tokenizer: Any, format: Format, left_out: Counter[str]
) -> Iterator[Encoded]:
    """Every record as one sequence; those without any token are counted in `left_out`.

    Texts and completions: the tokenizer's own post-processor runs, and EOS is appended where it
    left it out. Conversations: the template writes all special tokens. Tokens: as they are.
    A token that reaches into a learnt range of characters has a label. Raises UserError.
    """
    if format == "tokens":
        for record in records:
            check_fields(record, format)
            ids, labels = tokens_of(record)
            if len(ids):
                yield Encoded(ids, labels, record.file, record.line)
            else:
                left_out[BLANK] += 1
        return
    for sequence in encode_rendered(
        _render(records, tokenizer, format, left_out), tokenizer, format
    ):
        if len(sequence.input_ids):
            yield sequence
        else:
            left_out[BLANK] += 1


def encode_rendered(
    rendered: Iterable[tuple[SourceRecord, Rendered]], tokenizer: Any, format: Format
) -> Iterator[Encoded]:
    """Rendered records as sequences, one by one, as `encode` says of their format; they may be
    empty. Raises UserError."""
    if format != "text" and not tokenizer.is_fast:
        raise ConfigError(
            given=f"{tokenizer.name_or_path}: a tokenizer that cannot tell a token's characters",
            required="a fast tokenizer (tokenizer.json) for data of messages or completions",
            source="model.name",
            change="save the fast tokenizer into the folder, or give token ids and labels",
        )
    for batch in _batches(rendered):
        yield from _encode_batch(batch, tokenizer, format)


def _render(
    records: Iterable[SourceRecord], tokenizer: Any, format: Format, left_out: Counter[str]
) -> Iterator[tuple[SourceRecord, Rendered]]:
    by_text = nullcontext(partial(_render_text, format=format))
    with rendering(tokenizer, render_conversation) if format == "chat" else by_text as render:
        for record in records:
            check_fields(record, format)
            rendered = render(record)
            if rendered is None:
                left_out[BLANK] += 1
            else:
                left_out.update(rendered.told)
                yield record, rendered


def _render_text(record: SourceRecord, format: Format) -> Rendered | None:
    """A record with a text, or with a prompt and a completion; None if it is blank."""
    if format == "completion":
        prompt = text_of(record, "prompt")
        text = prompt + text_of(record, "completion")
    else:
        prompt, text = "", text_of(record)
    return Rendered(text, ((len(prompt), len(text)),)) if text.strip() else None


def _batches(
    rendered: Iterable[tuple[SourceRecord, Rendered]],
) -> Iterator[list[tuple[SourceRecord, Rendered]]]:
    """A batch lets the tokenizer use its threads; its size bounds the memory that this takes."""
    batch: list[tuple[SourceRecord, Rendered]] = []
    num_chars = 0
    for item in rendered:
        num_item_chars = len(item[1].text)
        full = len(batch) == _TEXTS_PER_CALL or num_chars + num_item_chars > _CHARS_PER_CALL
        if batch and full:
            yield batch
            batch, num_chars = [], 0
        batch.append(item)
        num_chars += num_item_chars
    if batch:
        yield batch


def _encode_batch(
    batch: list[tuple[SourceRecord, Rendered]], tokenizer: Any, format: Format
) -> Iterator[Encoded]:
    needs_chars = format != "text"
    try:
        with _whole_tokens(tokenizer) if needs_chars else nullcontext():
            encoded = tokenizer(
                [rendered.text for _, rendered in batch],
                add_special_tokens=format != "chat",
                return_attention_mask=False,
                return_token_type_ids=False,
                return_offsets_mapping=needs_chars,
                verbose=False,
            )
    except BaseException as error:
        # The tokenizers' Rust code panics, with a class that has no name to import, where its
        # regular expressions give up: on millions of spaces in a row, for instance.
        if type(error).__name__ != "PanicException":
            raise
        if len(batch) == 1:
            raise _cannot_tokenize(*batch[0], error) from None
        for item in batch:
            yield from _encode_batch([item], tokenizer, format)
        return
    eos: int | None = None if format == "chat" else tokenizer.eos_token_id
    for number, (record, rendered) in enumerate(batch):
        ids = np.asarray(encoded["input_ids"][number], dtype=np.int32)
        if eos is not None and (not len(ids) or ids[-1] != eos):
            ids = np.append(ids, np.int32(eos))
        labels = ids
        if format != "text":
            chars = np.asarray(encoded["offset_mapping"][number], dtype=np.int64).reshape(-1, 2)
            learnt = np.zeros(len(ids), dtype=bool)
            learnt[: len(chars)] = _within(chars, rendered.ranges)
            # That the completion ends here is learnt, whoever wrote the EOS.
            learnt[-1:] |= eos is not None and bool(rendered.ranges)
            labels = np.where(learnt, ids, np.int32(IGNORE_INDEX))
        yield Encoded(ids, labels, record.file, record.line)


@contextmanager
def _whole_tokens(tokenizer: Any) -> Iterator[None]:
    """Within it the characters of a token are all of them: with `trim_offsets` a post-processor
    leaves out the white space, and of white space alone (the indents of code) nothing stays."""
    backend = tokenizer.backend_tokenizer
    own = backend.post_processor
    state = b"" if own is None else own.__getstate__()
    if (trims := b'"trim_offsets":true') not in state:
        yield
        return
    whole = copy(own)
    whole.__setstate__(state.replace(trims, b'"trim_offsets":false'))
    backend.post_processor = whole
    try:
        yield
    finally:
        backend.post_processor = own


def _cannot_tokenize(record: SourceRecord, rendered: Rendered, error: BaseException) -> DataError:
    return DataError(
        given=f"a text of {len(rendered.text):,} characters on which the tokenizer fails: {error}",
        required="a text that the tokenizer can split",
        source=record.origin,
        change="remove the record, or shorten its runs of one character, such as spaces",
    )


def _within(
    chars: npt.NDArray[np.int64], ranges: Iterable[tuple[int, int]]
) -> npt.NDArray[np.bool_]:
    """Which tokens, (T, 2) ranges of characters in ascending order, reach into one of `ranges`."""
    inside = np.zeros(len(chars), dtype=bool)
    # Special tokens that stand for no character have an empty range, out of order.
    tokens = np.flatnonzero(chars[:, 1] > chars[:, 0])
    starts, stops = chars[tokens, 0], chars[tokens, 1]
    for start, stop in ranges:
        if start < stop:
            first = np.searchsorted(stops, start, side="right")
            last = np.searchsorted(starts, stop, side="left")
            inside[tokens[first:last]] = True
    return inside
