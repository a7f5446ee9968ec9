"""Texts to token ids and labels; besides models, the only package that knows transformers."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from furlong.config.schema import DataConfig, RunConfig
from furlong.data.records import MAX_TEXT_BYTES, Notes, SourceRecord, too_large
from furlong.data.training_templates import template_text
from furlong.errors import ConfigError
from furlong.models.folder import check_name

IGNORE_INDEX = -100
"""The label of a token that adds no loss."""
NO_EOS = "sequences without an end, since the tokenizer has no EOS"

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
    desirable: bool | None = None
    """Whether the answer is wanted, where data says so; None elsewhere."""

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
    """A record, or an answer of one, as tokens: (T,) int32 both; `labels` is `input_ids` itself
    where all are learnt."""

    input_ids: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    desirable: bool | None = None
    """Whether the answer is wanted, where data says so; None elsewhere."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text as the model reads it."""

    text: str
    ranges: tuple[tuple[int, int], ...] | None = None
    """Half-open ranges of its characters that are learnt; None = all of it."""
    by_template: bool = False
    """Whether a chat template has written all special tokens. Elsewhere the tokenizer's own
    post-processor runs, and EOS is appended where it left it out."""
    notes: tuple[str, ...] = ()
    """Remarks on the record, which are counted."""


def load_tokenizer(
    name: str,
    source: str = "model.name",
    *,
    revision: str | None = None,
    settings: DataConfig | None = None,
) -> Any:
    """The tokenizer of a hub id or folder, which `source` named, of a `revision` of the hub's, with
    the chat template and the special tokens of `settings`. Raises ConfigError."""
    from transformers import AutoTokenizer

    folder = Path(os.path.expanduser(name))
    cause: Exception | None = None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder) if folder.is_dir() else name,
            trust_remote_code=False,
            revision=revision or "main",
        )
        # Without files transformers may build a tokenizer of the family that knows no word.
        is_found = bool(set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens))
        reason = "there is no vocabulary"
    except Exception as error:  # the tokenizers' Rust code raises plain ones for a broken file
        is_found, cause, reason = False, error, str(error).strip().split("\n")[0]
    if not is_found:
        raise ConfigError(
            given=f"{name} without a tokenizer: {reason}",
            required="tokenizer files beside config.json, in UTF-8",
            source=source,
            change="save the model's tokenizer into the folder; of the hub, check the whole id"
            " (Qwen/Qwen2.5-0.5B) and the connection",
        ) from cause
    return tokenizer if settings is None else _as_set(tokenizer, settings)


def tokenizer_of(config: RunConfig) -> Any:
    """The tokenizer of a run: the model's own, or that of `model.tokenizer`. Raises ConfigError."""
    name, source, revision = config.model.name, "model.name", config.model.revision
    if config.model.tokenizer is not None:
        name, source, revision = config.model.tokenizer, "model.tokenizer", None
    check_name(name, source)
    return load_tokenizer(name, source, revision=revision, settings=config.data)


def _as_set(tokenizer: Any, settings: DataConfig) -> Any:
    """The tokenizer with what a run sets of it. Raises ConfigError."""
    named = {"eos_token": settings.eos_token, "pad_token": settings.pad_token}
    tokens = [(f"data.{name}", token) for name, token in named.items() if token is not None]
    known = tokenizer.get_vocab()
    tokens += [("data.eot_tokens", token) for token in settings.eot_tokens]
    for key, token in tokens:
        if token not in known:
            raise ConfigError(
                given=f"{key} = {token!r}, no token of {tokenizer.name_or_path}",
                required="a token of the model's vocabulary: none is added to it",
                source=key,
                change="name another token, or write the new one into the model's folder first",
            )
    for name, own in named.items():
        if own is not None:
            setattr(tokenizer, name, own)
    if settings.chat_template is not None:
        tokenizer.chat_template = template_text(settings.chat_template)
    return tokenizer


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


Item = tuple[SourceRecord, Items[Rendered | Encoded]]
"""A record, and what becomes one sequence each: one, or the two answers of a pair."""


def tokenized(
    items: Iterable[Item], tokenizer: Any, notes: Notes
) -> Iterator[tuple[SourceRecord, list[Encoded]]]:
    """Records with their sequences, which may be empty.

    A token that reaches into a range of characters that is learnt has a label. Raises UserError.
    """
    for batch in _batches(items):
        texts = [(record, one) for record, own in batch for one in own if isinstance(one, Rendered)]
        encoded = iter(_encode(texts, tokenizer) if texts else ())
        for record, own in batch:
            if _has_own_end(own) and tokenizer.eos_token_id is None:
                notes.add(NO_EOS, record.file, record.line, len(own))
            yield record, [one if isinstance(one, Encoded) else next(encoded) for one in own]


def _has_own_end(own: Items[Rendered | Encoded]) -> bool:
    """Whether the tokenizer, and neither a template nor a list of ids, ends these sequences."""
    return isinstance(own[0], Rendered) and not own[0].by_template


def _batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """A batch lets the tokenizer use its threads; its size bounds the memory that this takes. Its
    texts are all by a template, or none is."""
    batch: list[Item] = []
    num_chars = 0
    for record, own in items:
        for text in (one.text for one in own if isinstance(one, Rendered)):
            # Counting bytes takes a copy; a character has at most four.
            may_be = 4 * len(text) > MAX_TEXT_BYTES
            if may_be and len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
                raise too_large(record.origin, "a text", MAX_TEXT_BYTES)
        num_own = sum(len(o.text if isinstance(o, Rendered) else o.input_ids) for o in own)
        full = len(batch) == _TEXTS_PER_CALL or num_chars + num_own > _CHARS_PER_CALL
        if batch and (full or _has_own_end(batch[0][1]) != _has_own_end(own)):
            yield batch
            batch, num_chars = [], 0
        batch.append((record, own))
        num_chars += num_own
    if batch:
        yield batch


def _encode(batch: Items[tuple[SourceRecord, Rendered]], tokenizer: Any) -> list[Encoded]:
    by_template = batch[0][1].by_template
    masked = any(rendered.ranges is not None for _, rendered in batch)
    if masked and not tokenizer.is_fast:
        raise ConfigError(
            given=f"{tokenizer.name_or_path}: a tokenizer that cannot tell a token's characters",
            required="a fast tokenizer (tokenizer.json) for data of messages or completions",
            source="model.name",
            change="save the fast tokenizer into the folder, or give token ids and labels",
        )
    try:
        with _whole_tokens(tokenizer, masked):
            found = tokenizer(
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
            record, rendered = batch[0]
            raise record.refusal(
                f"a text of {len(rendered.text):,} characters on which the tokenizer fails:"
                f" {error}",
                "a text that the tokenizer can split",
                "remove the record, or shorten its runs of one character, such as spaces",
            ) from None
        return [one for item in batch for one in _encode([item], tokenizer)]
    eos: int | None = None if by_template else tokenizer.eos_token_id
    encoded = []
    for number, (_, rendered) in enumerate(batch):
        ids = np.asarray(found["input_ids"][number], dtype=np.int32)
        if eos is not None and (not len(ids) or ids[-1] != eos):
            ids = np.append(ids, np.int32(eos))
        labels = ids
        if rendered.ranges is not None:
            chars = np.asarray(found["offset_mapping"][number], dtype=np.int64).reshape(-1, 2)
            learnt = np.zeros(len(ids), dtype=bool)
            learnt[: len(chars)] = _within(chars, rendered.ranges)
            # That the completion ends here is learnt, whoever wrote the EOS.
            learnt[-1:] |= eos is not None and bool(rendered.ranges)
            labels = np.where(learnt, ids, np.int32(IGNORE_INDEX))
        encoded.append(Encoded(ids, labels))
    return encoded


@contextmanager
def _whole_tokens(tokenizer: Any, masked: bool) -> Iterator[None]:
    """Within it the characters of a token are all of them: with `trim_offsets` a post-processor
    leaves out the white space, and of white space alone (the indents of code) nothing stays."""
    own: Any = tokenizer.backend_tokenizer.post_processor if masked else None
    state = b"" if own is None else own.__getstate__()
    if (trims := b'"trim_offsets":true') not in state:
        yield
        return
    whole = copy(own)
    whole.__setstate__(state.replace(trims, b'"trim_offsets":false'))
    tokenizer.backend_tokenizer.post_processor = whole
    try:
        yield
    finally:
        tokenizer.backend_tokenizer.post_processor = own


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
