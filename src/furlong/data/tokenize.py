"""Records to token ids and labels; besides models, the only package that knows transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from furlong.data.records import BLANK, LeftOut, SourceRecord, check_size, kind_of
from furlong.errors import ConfigError, DataError

IGNORE_INDEX = -100
"""The label of a token that adds no loss."""

_INT32 = np.iinfo(np.int32)
_TOKEN_MASKS = ("completion_mask", "assistant_masks", "loss_mask")
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


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text and the half-open ranges of its characters that are learnt."""

    text: str
    ranges: tuple[tuple[int, int], ...]
    told: tuple[str, ...] = ()
    """Each is counted once more for the source."""


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


def encode_tokens(
    records: Iterable[SourceRecord], tokenizer: Any, left_out: LeftOut
) -> Iterator[Encoded]:
    """Records of token ids, taken as they are. Raises DataError."""
    for record in records:
        yield Encoded(*tokens_of(record), record.file, record.line)


def encode_texts(
    records: Iterable[SourceRecord], tokenizer: Any, left_out: LeftOut
) -> Iterator[Encoded]:
    """Records of a text, all of which is learnt. Raises UserError."""

    def render(record: SourceRecord) -> Rendered | None:
        return _not_blank("", text_of(record, "text"))

    yield from encode_rendered(rendered(records, render, left_out), tokenizer, masked=False)


def encode_completions(
    records: Iterable[SourceRecord], tokenizer: Any, left_out: LeftOut
) -> Iterator[Encoded]:
    """Records of a prompt and a completion, which is learnt. Raises UserError."""

    def render(record: SourceRecord) -> Rendered | None:
        return _not_blank(text_of(record, "prompt"), text_of(record, "completion"))

    yield from encode_rendered(rendered(records, render, left_out), tokenizer)


def rendered(
    records: Iterable[SourceRecord],
    render: Callable[[SourceRecord], Rendered | None],
    left_out: LeftOut,
) -> Iterator[tuple[SourceRecord, Rendered]]:
    """Records with their texts; those without any are counted."""
    for record in records:
        found = render(record)
        if found is None:
            left_out.counts[BLANK] += 1
        else:
            left_out.counts.update(found.told)
            yield record, found


def _not_blank(prompt: str, rest: str) -> Rendered | None:
    text = prompt + rest
    return Rendered(text, ((len(prompt), len(text)),)) if text.strip() else None


def encode_rendered(
    rendered: Iterable[tuple[SourceRecord, Rendered]],
    tokenizer: Any,
    *,
    by_template: bool = False,
    masked: bool = True,
) -> Iterator[Encoded]:
    """Rendered records as sequences, one by one; they may be empty.

    A template writes all special tokens; elsewhere the tokenizer's own post-processor runs, and EOS
    is appended where it left it out. Where they are `masked`, a token that reaches into a learnt
    range of characters has a label, else all have. Raises UserError.
    """
    if masked and not tokenizer.is_fast:
        raise ConfigError(
            given=f"{tokenizer.name_or_path}: a tokenizer that cannot tell a token's characters",
            required="a fast tokenizer (tokenizer.json) for data of messages or completions",
            source="model.name",
            change="save the fast tokenizer into the folder, or give token ids and labels",
        )
    for batch in _batches(rendered):
        yield from _encode_batch(batch, tokenizer, by_template, masked)


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
    batch: list[tuple[SourceRecord, Rendered]], tokenizer: Any, by_template: bool, masked: bool
) -> Iterator[Encoded]:
    try:
        with _whole_tokens(tokenizer) if masked else nullcontext():
            encoded = tokenizer(
                [rendered.text for _, rendered in batch],
                add_special_tokens=not by_template,
                return_attention_mask=False,
                return_token_type_ids=False,
                return_offsets_mapping=masked,
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
            yield from _encode_batch([item], tokenizer, by_template, masked)
        return
    eos: int | None = None if by_template else tokenizer.eos_token_id
    for number, (record, rendered) in enumerate(batch):
        ids = np.asarray(encoded["input_ids"][number], dtype=np.int32)
        if eos is not None and (not len(ids) or ids[-1] != eos):
            ids = np.append(ids, np.int32(eos))
        labels = ids
        if masked:
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
    return record.refusal(
        f"a text of {len(rendered.text):,} characters on which the tokenizer fails: {error}",
        "a text that the tokenizer can split",
        "remove the record, or shorten its runs of one character, such as spaces",
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


def text_of(record: SourceRecord, field: str) -> str:
    """A field that must be a text. Raises DataError."""
    text = record.fields[field]
    if not isinstance(text, str):
        hint = "; conversations go into messages" if isinstance(text, list) else ""
        raise record.refusal(
            f"{field} that is {kind_of(text)}",
            f"a string in the field {field}",
            f"write {field} as a string{hint}",
        )
    check_size(record, field, text)
    return text


def tokens_of(record: SourceRecord) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """`input_ids` and `labels`, both (T,); without labels every token is one. Raises DataError."""
    ids = _integers(record, "input_ids", lowest=0)
    _check_beside_tokens(record, len(ids))
    if record.fields.get("labels") is None:
        return ids, ids
    labels = _integers(record, "labels", lowest=IGNORE_INDEX)
    negative = labels[(labels < 0) & (labels != IGNORE_INDEX)]
    if len(labels) != len(ids) or len(negative):
        raise record.refusal(
            f"label {negative[0]}"
            if len(negative)
            else f"{len(ids)} input_ids with {len(labels)} labels",
            f"a label for every token, unshifted: a token id, or {IGNORE_INDEX} for none",
            "mend or remove the record",
        )
    return ids, labels


def _check_beside_tokens(record: SourceRecord, num_tokens: int) -> None:
    """Raises DataError where other fields say that not all tokens are one sequence, or learnt."""
    mask, positions = (record.fields.get(name) for name in ("attention_mask", "position_ids"))
    masks = [name for name in _TOKEN_MASKS if name in record.fields]
    given, change = None, ""
    if mask is not None and mask != [1] * num_tokens:
        given = "an attention_mask that is not 1 for every token"
        change = "remove the padding from the lists: sequences are not padded here"
    elif positions is not None and positions != list(range(num_tokens)):
        given = f"position_ids that are not 0 to {num_tokens - 1}"
        change = "write packed sequences as records of their own: furlong packs them itself"
    elif masks and record.fields.get("labels") is None:
        given = f"{masks[0]} beside input_ids, without labels"
        change = f"write labels: the token where {masks[0]} is 1, {IGNORE_INDEX} elsewhere"
    if given is not None:
        raise record.refusal(
            given, "input_ids of one sequence, and labels if not every token is learnt", change
        )


def _integers(record: SourceRecord, field: str, lowest: int) -> npt.NDArray[np.int32]:
    values = record.fields[field]
    array = np.asarray(values) if _is_flat(values) else np.zeros(0, np.float64)
    if len(array) == 0 and values == []:
        return np.zeros(0, np.int32)
    if array.dtype.kind not in "iu" or array.min() < lowest or array.max() > _INT32.max:
        raise record.refusal(
            f"{field} that are {kind_of(values)}"
            + (f" from {array.min()} to {array.max()}" if array.dtype.kind in "iu" else ""),
            f"a list of whole numbers, token ids from {lowest}",
            "mend or remove the record",
        )
    return array.astype(np.int32)


def _is_flat(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)
