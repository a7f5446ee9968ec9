"""Load tokenizers, and turn texts into token ids and labels."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from furlong.config.schema import DataConfig, RunConfig
from furlong.data.records import MAX_TEXT_BYTES, Notes, SourceRecord, too_large
from furlong.data.training_templates import template_text
from furlong.errors import ConfigError, first_line
from furlong.files import read_object
from furlong.models.folder import CONFIG, GENERATION, check_name, hushed, model_file

IGNORE_INDEX = -100
"""The label of a token that adds nothing to the loss."""
NO_EOS = "sequences without an end, since the tokenizer has no EOS"
HAS_BOS = "texts that begin with {} already, which is not added again"
HAS_END = "texts that end with {}, a special token, to which no EOS is added"

_TEXTS_PER_CALL = 64
_CHARS_PER_CALL = 2**20

_FILES = (
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab*.json", "vocab*.txt",
    "merges.txt", "tokenizer*.model", "s*piece*.model", "*.tiktoken", "tekken.json",
    "chat_template*", "additional_chat_templates/*.jinja",
)  # fmt: skip
"""The files of a tokenizer in a model's folder."""
_CONFIG = "tokenizer_config.json"
_PROBES = (
    "a", "The cat sat.", " leading", "    four  and   more ", "tab\tnew\n\n line\r\n", "it's WE'LL",
    "1234567 3.14 0x1F", "def f(x):\n    return x**2  # 10\n", "https://a.b/c?d=e_f&g=%20",
    "naïve cafe\u0301", "नमस्ते दुनिया, कैसे हो", "สวัสดีครับ", "العَرَبِيَّة", "עִבְרִית", "한국어 조선말",
    "漢字かな交じり文。", "Привет, мир", "Ελληνικά", "தமிழ்", "বাংলা ভাষা", "tiếng Việt", "👩‍👩‍👧 🇩🇪 ✈️",
)  # fmt: skip
"""Texts that equal tokenizers turn into the same ids."""
_FLAGGED = ("Llama", "CodeLlama", "Gemma", "Cohere", "GPTNeoX")
"""Classes whose flags `add_bos_token` and `add_eos_token` transformers 4 applied."""


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """A tokenized document: `input_ids` and `labels` are (T,) int32, labels unshifted."""

    seq_id: int
    origin: str
    input_ids: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    counted: int | None = None
    """The number of its valid tokens if an index holds it, which saves reading the labels."""
    reference: npt.NDArray[Any] | None = None
    """(number of valid tokens,) their log-probabilities by the model with which the run began."""
    desirable: bool | None = None
    """Whether the answer is desirable, for `train.loss: kto`; None for other losses."""

    @property
    def seq_len(self) -> int:
        return len(self.input_ids)

    @property
    def num_valid_tokens(self) -> int:
        """The number of tokens that add to the loss; the first one has no token to predict it."""
        if self.counted is not None:
            return self.counted
        return int(np.count_nonzero(self.labels[1:] != IGNORE_INDEX))


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Token ids and unshifted labels of a record or of one of its answers, (T,) int32 both.

    `labels` is the array `input_ids` itself where all tokens are trained on.
    """

    input_ids: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    desirable: bool | None = None
    """Whether the answer is desirable, for `train.loss: kto`; None for other losses."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text as the model reads it, and the characters in it that are trained on."""

    text: str
    ranges: tuple[tuple[int, int], ...] | None = None
    """Half-open ranges of the characters that are trained on; None for the whole text."""
    by_template: bool = False
    """Whether a chat template wrote all special tokens. Otherwise the tokenizer's post-processor
    adds them, and EOS is appended if it did not."""
    notes: tuple[str, ...] = ()
    """Notes on the record, which are counted."""


def load_tokenizer(
    name: str,
    source: str = "model.name",
    *,
    revision: str | None = None,
    settings: DataConfig | None = None,
    is_needed: bool = True,
    new_tokens: Items[str] = (),
) -> Any:
    """Load the tokenizer of a hub id or folder.

    A `tokenizer.json` is read as it is, since some classes of transformers build another tokenizer
    from its vocabulary.

    Args:
        name: a hub id or a folder.
        source: the key of the run file that names it, for messages.
        revision: the branch, tag or commit of a hub id.
        settings: may change the chat template and special tokens.
        is_needed: if false, `NoTokenizer` is returned where no file of a tokenizer exists.
        new_tokens: `model.new_tokens`, which are added to it.

    Returns:
        The tokenizer. Its attribute `source_files` holds the files to export, by name;
        `stop_tokens` the tokens at which the model of its folder stops; `new_ids` the ids of the
        new tokens.

    Raises:
        ConfigError: there is no tokenizer, it cannot be read, or it lacks a token of `settings`.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = Path(os.path.expanduser(name))
    path = str(folder) if folder.is_dir() else name
    tokenizer: Any = None
    cause: Exception | None = None
    reason = "there is no vocabulary"
    try:
        with hushed():
            tokenizer = AutoTokenizer.from_pretrained(
                path, trust_remote_code=False, revision=revision or "main"
            )
    except Exception as error:  # tokenizers raises plain Exceptions for a broken file
        cause, reason = error, first_line(error)
    model_file(path, "chat_template.json", revision)  # a processor's, which AutoTokenizer leaves
    found = (model_file(path, one, revision) for one in ("tokenizer.json", _CONFIG, "config.json"))
    home = next((file.parent for file in found if file is not None), folder)
    files = {
        file.relative_to(home).as_posix(): file.read_bytes()
        for pattern in _FILES
        for file in sorted(home.glob(pattern))
        if file.is_file()
    }
    mend = "download or save the tokenizer's files once more"
    for file in files if cause is not None else ():
        if file.endswith(".json"):
            read_object(home / file, source=source, change=mend)
    flags, what = json.loads(files.get(_CONFIG, b"{}")), ""
    if not files and folder.is_dir():
        reason = "there are no files of one"
    if "tokenizer.json" in files and type(tokenizer) is not PreTrainedTokenizerFast:
        other = tokenizer
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(home))
        except Exception as error:
            tokenizer, cause, reason = None, error, first_line(error)
        else:
            # special tokens that the class defines and tokenizer_config.json does not
            for key, token in getattr(other, "special_tokens_map", {}).items():
                if getattr(tokenizer, key, None) is None and token in tokenizer.get_vocab():
                    setattr(tokenizer, key, token)
            if what := _difference(tokenizer, other, reason):
                print(f"{name}: tokenizer.json is read as it is (by PreTrainedTokenizerFast), for"
                      f" AutoTokenizer {what}")  # fmt: skip
    # Without files transformers may build a tokenizer of the family with an empty vocabulary.
    if tokenizer is None or not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        if not (files or is_needed):
            none = NoTokenizer(f"{name} without a tokenizer: {reason}")
            if new_tokens:
                raise none.refusal("model.new_tokens", "remove model.new_tokens")
            return none if settings is None else _as_set(none, settings)
        raise ConfigError(
            given=f"{name} without a tokenizer: {reason}",
            required="tokenizer files beside config.json, in UTF-8",
            source=source,
            change="save the model's tokenizer into the folder; of the hub, check the whole id"
            " (Qwen/Qwen2.5-0.5B) and the connection",
        ) from cause
    tokenizer.name_or_path, tokenizer.source_files = name, files
    tokenizer.stop_tokens = _stop_tokens(tokenizer, path, revision)
    if "tokenizer.json" in files and not _apply_flags(tokenizer, flags) and what:
        files[_CONFIG] = _changed(files, {"tokenizer_class": "PreTrainedTokenizerFast"})
    _add(tokenizer, new_tokens)
    return tokenizer if settings is None else _as_set(tokenizer, settings)


def _add(tokenizer: Any, new_tokens: Items[str]) -> None:
    """Add new tokens to a tokenizer and to its files for export. Raises ConfigError."""
    from tokenizers import AddedToken

    files, known = tokenizer.source_files, tokenizer.get_vocab()
    if new_tokens and "tokenizer.json" not in files:
        raise ConfigError(
            given=f"model.new_tokens for {tokenizer.name_or_path} without tokenizer.json",
            required="a tokenizer.json, to which tokens are added",
            source="model.new_tokens",
            change="remove model.new_tokens, or save the tokenizer as a fast one of transformers",
        )
    if there := [one for one in dict.fromkeys(new_tokens) if one in known]:
        print(f"model.new_tokens: {', '.join(there)}: in the vocabulary already, left as they are")
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in new_tokens])
    tokenizer.new_ids = range(max(known.values()) + 1, max(tokenizer.get_vocab().values()) + 1)
    if tokenizer.new_ids:
        files["tokenizer.json"] = tokenizer.backend_tokenizer.to_str(pretty=True).encode()


def _stop_tokens(tokenizer: Any, path: str, revision: str | None) -> tuple[str, ...]:
    """Return the tokens at which generation stops by the files of a model; none if they do not
    say."""
    for name in (GENERATION, CONFIG):
        with suppress(ValueError, OSError, AttributeError):
            file = model_file(path, name, revision)
            given = None if file is None else json.loads(file.read_bytes()).get("eos_token_id")
            ids = [id for id in (given if isinstance(given, list) else [given]) if type(id) is int]
            if ids := [id for id in ids if 0 <= id < len(tokenizer)]:
                tokens = tokenizer.convert_ids_to_tokens(ids)
                return tuple(str(token) for token in tokens if token is not None)
    return ()


def _changed(files: Mapping[str, bytes], values: Mapping[str, Any], name: str = _CONFIG) -> bytes:
    """Return the bytes of a tokenizer's JSON file `name` with some values replaced."""
    kept = json.loads(files.get(name, b"{}"))
    return (json.dumps({**kept, **values}, indent=2, ensure_ascii=False) + "\n").encode()


def _difference(own: Any, other: Any, reason: str) -> str:
    """Return in words how many of some test texts (`_PROBES` and others) the tokenizer `other`
    encodes otherwise than `own`; "" if none. If `other` is None, return why it could not be loaded
    (`reason`)."""

    def ids(tokenizer: Any, text: str) -> Any:
        try:
            return tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception:  # a class may require a token that the vocabulary lacks
            return None

    if other is None:
        return f"cannot: {reason}"
    marks = list(own.get_added_vocab())[:16]
    texts = (*_PROBES, *(f" {mark}[A] {mark} b\n{mark}c  {mark}" for mark in marks))
    number = sum(ids(own, text) != ids(other, text) for text in texts)
    what = f"({type(other).__name__}) makes other ids of {number} of {len(texts)} texts"
    return what if number else ""


def _apply_flags(tokenizer: Any, flags: Mapping[str, Any]) -> bool:
    """Apply flags of tokenizer_config.json to a tokenizer. Return whether the flags for BOS and EOS
    were applied.

    transformers 5 ignores these flags beside a tokenizer.json. Here the flags for BOS and EOS are
    applied if transformers 4 did so for the tokenizer's class. If such a flag differs from
    tokenizer.json, a line is printed that says whether it is applied. The flag `legacy` is not
    needed: it matters only when transformers makes a tokenizer.json.
    """
    from tokenizers import pre_tokenizers

    prefix, splitter = flags.get("add_prefix_space"), tokenizer.backend_tokenizer.pre_tokenizer
    if isinstance(prefix, bool) and isinstance(splitter, pre_tokenizers.ByteLevel):
        splitter.add_prefix_space = prefix
    before, after = _added(tokenizer, _PROBES)
    does = {"add_bos_token": bool(before), "add_eos_token": bool(after)}
    asked = does | {key: flags[key] for key in does if isinstance(flags.get(key), bool)}
    if tokenizer.bos_token_id is None or asked == does:
        return False
    kind = str(flags.get("tokenizer_class")).removesuffix("Fast").removesuffix("Tokenizer")
    if is_applied := kind in _FLAGGED:
        tokenizer._add_eos_token = asked["add_eos_token"]
        tokenizer.add_bos_token = asked["add_bos_token"]
    what = "is applied" if is_applied else "is not applied: tokenizer.json decides"
    for key in does:
        if asked[key] != does[key]:
            print(f"{tokenizer.name_or_path}: {key} = {json.dumps(asked[key])} of {_CONFIG} {what}")
    return is_applied


def _added(tokenizer: Any, texts: Iterable[str]) -> tuple[list[int], list[int]]:
    """Return the ids that the post-processor adds before and after a text, determined on the first
    of `texts` that has tokens."""
    for text in texts:
        try:
            found = tokenizer(text, return_special_tokens_mask=True, verbose=False)
            ids, mask = found["input_ids"], found["special_tokens_mask"]
        except Exception:  # a vocabulary without this character and without an unknown token
            continue
        if 0 in mask:
            return ids[: mask.index(0)], ids[len(mask) - mask[::-1].index(0) :]
    return [], []


def with_begin(text: str, tokenizer: Any) -> list[int]:
    """Return the ids of a prompt. Tokens that the tokenizer puts before a text, such as BOS, come
    first, unless the prompt begins with them."""
    before, _ = _added(tokenizer, (text[:64], *_PROBES))
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids if ids[: len(before)] == before else [*before, *ids]


class NoTokenizer:
    """The tokenizer of a model without one, which can be trained on token ids."""

    is_fast, eos_token_id, chat_template = True, None, None
    source_files: Mapping[str, bytes] = {}

    def __init__(
        self,
        given: str,
        change: str = "save the model's tokenizer into its folder, name one in model.tokenizer",
    ) -> None:
        self.given, self.change = given, change

    def refusal(self, source: str, also: str = "") -> ConfigError:
        """Return the error of a run that needs a tokenizer; `also` is one more change to offer."""
        return ConfigError(
            given=self.given,
            required="a tokenizer for texts and messages; records of token ids need none",
            source=source,
            change=f"{self.change}, or {also or 'give token ids (input_ids)'}",
        )


def token_in_words(token: int, tokenizer: Any) -> str:
    """Return a token id in words, with its text if the tokenizer has one."""
    known = not isinstance(tokenizer, NoTokenizer) and tokenizer.convert_ids_to_tokens(token)
    return f"token id {token}{f', which is {known}' if known else ''}"


def tokenizer_of(config: RunConfig) -> Any:
    """Return the tokenizer that `model.tokenizer` names, by default the model's. If the model has
    none, return `NoTokenizer`.

    Raises:
        ConfigError: see `load_tokenizer`.
    """
    name, source, revision = config.model.name, "model.name", config.model.revision
    if config.model.tokenizer is not None:
        name, source, revision = config.model.tokenizer, "model.tokenizer", None
    check_name(name, source)
    is_needed, settings = source == "model.tokenizer", config.data
    return load_tokenizer(
        name, source, revision=revision, settings=settings, is_needed=is_needed,
        new_tokens=config.model.new_tokens,
    )  # fmt: skip


def _as_set(tokenizer: Any, settings: DataConfig) -> Any:
    """Return the tokenizer with the special tokens and template that a run sets. Raises
    ConfigError."""
    given = {"eos_token": settings.eos_token, "pad_token": settings.pad_token}
    named = {name: token for name, token in given.items() if token is not None}
    tokens = [(f"data.{name}", token) for name, token in named.items()]
    tokens += [("data.eot_tokens", token) for token in settings.eot_tokens]
    if isinstance(tokenizer, NoTokenizer):
        if tokens or settings.chat_template is not None:
            key = tokens[0][0] if tokens else "data.chat_template"
            raise tokenizer.refusal(key, f"remove {key}")
        return tokenizer
    known = tokenizer.get_vocab()
    for key, token in tokens:
        if token not in known:
            raise ConfigError(
                given=f"{key} = {token!r}, no token of {tokenizer.name_or_path}",
                required="a token of the model's vocabulary, or of model.new_tokens",
                source=key,
                change="name another token, or add it: model.new_tokens",
            )
    files = dict(tokenizer.source_files)
    changes: dict[str, Any] = dict(named)
    if named:
        tokenizer.add_special_tokens(named)  # as when an export of the run is loaded
        for name in {"special_tokens_map.json"} & files.keys():
            files[name] = _changed(files, named, name)
    if settings.chat_template is not None:
        changes["chat_template"] = text = template_text(settings.chat_template)
        tokenizer.chat_template = text
        files = {name: own for name, own in files.items() if "chat_template" not in name}
        if text is not None and "chat_template.jinja" in tokenizer.source_files:
            files["chat_template.jinja"] = text.encode()
    if changes:
        files[_CONFIG] = _changed(files, changes)
    tokenizer.source_files = files
    return tokenizer


def tokenizer_checksum(tokenizer: Any, *, by_template: bool = True) -> str:
    """Return a checksum of all that determines the ids of a text, chat templates included.

    `by_template`: whether a chat template may write texts, so that the tokens at which the model
    stops can change them.
    """
    import tokenizers
    import transformers

    if isinstance(tokenizer, NoTokenizer):
        return hashlib.sha256(b"no tokenizer").hexdigest()
    parts: dict[str, Any] = {
        "class": type(tokenizer).__name__,
        "versions": [transformers.__version__, tokenizers.__version__],
        "special": tokenizer.special_tokens_map,
        "eos": tokenizer.eos_token_id,
        "template": tokenizer.chat_template,
    }
    if by_template and tokenizer.chat_template:
        stops = set(getattr(tokenizer, "stop_tokens", ())) - {tokenizer.eos_token}
        # Also if there are none: texts without this key have no stops that begin the next message.
        parts["stops"] = sorted(one for one in stops if one in str(tokenizer.chat_template))
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # Each call of the tokenizer sets these two.
        parts["backend"] = {k: v for k, v in backend.items() if k not in ("truncation", "padding")}
        if tokenizer.split_special_tokens:  # not in `backend`: transformers sets it in each call
            parts["split_special_tokens"] = True
    else:
        unnamed = ("name_or_path", "vocab_file", "merges_file")
        parts["vocab"] = tokenizer.get_vocab()
        parts["init"] = {k: v for k, v in tokenizer.init_kwargs.items() if k not in unnamed}
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


Item = tuple[SourceRecord, Items[Rendered | Encoded]]
"""A record, and what becomes its sequences: one, or the two answers of a pair."""


def tokenized(
    items: Iterable[Item], tokenizer: Any, notes: Notes
) -> Iterator[tuple[SourceRecord, list[Encoded]]]:
    """Yield records with their sequences, which may be empty.

    A token has a label if one of its characters is in a range that is trained on.

    Args:
        items: records with texts or token ids.
        tokenizer: the tokenizer.
        notes: counts texts that get no EOS, as the tokenizer has none, and texts with special
            tokens that are not added again.

    Raises:
        UserError: a text is too long, or the tokenizer cannot tokenize or mask it.
    """
    for batch in _batches(items):
        texts = [(record, one) for record, own in batch for one in own if isinstance(one, Rendered)]
        encoded = iter(_encode(texts, tokenizer, notes) if texts else ())
        for record, own in batch:
            if _has_own_end(own) and tokenizer.eos_token_id is None:
                notes.add(NO_EOS, record.file, record.line, len(own))
            yield record, [one if isinstance(one, Encoded) else next(encoded) for one in own]


def _has_own_end(own: Items[Rendered | Encoded]) -> bool:
    """Return whether these sequences are texts that no chat template wrote, so that EOS is
    added."""
    return isinstance(own[0], Rendered) and not own[0].by_template


def _batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield the items in batches of bounded size. The tokenizer encodes each batch in several
    threads.

    The texts of a batch are alike: a chat template has written all of them, or none of them.
    """
    batch: list[Item] = []
    num_chars = 0
    for record, own in items:
        for text in (one.text for one in own if isinstance(one, Rendered)):
            # Encoding copies the text: do so only if four bytes a character would be too many.
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


def _encode(
    batch: Items[tuple[SourceRecord, Rendered]], tokenizer: Any, notes: Notes
) -> list[Encoded]:
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
                add_special_tokens=False,  # they are added below, where the text lacks them
                return_attention_mask=False,
                return_token_type_ids=False,
                return_offsets_mapping=masked,
                verbose=False,
            )
    except BaseException as error:
        # The Rust code of tokenizers panics, with a class that cannot be imported, where a regular
        # expression gives up: on millions of spaces in a row, for instance.
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
        return [one for item in batch for one in _encode([item], tokenizer, notes)]
    before, after = ([], []) if by_template else _added(tokenizer, (r.text[:64] for _, r in batch))
    eos: int | None = None if by_template else tokenizer.eos_token_id
    if eos is not None and after[-1:] != [eos]:
        after = [*after, eos]
    added = tokenizer.added_tokens_decoder.values() if after else ()
    special = (str(token) for token in added if token.special)
    ends = tuple(t for t in special if t not in (tokenizer.bos_token, tokenizer.unk_token))
    encoded = []
    for number, (record, rendered) in enumerate(batch):
        own, ranges = np.asarray(found["input_ids"][number], dtype=np.int32), rendered.ranges
        begin, end, text = before, after, rendered.text.rstrip()
        if before and own[: len(before)].tolist() == before:
            begin = []
            notes.add(HAS_BOS.format(tokenizer.decode(before)), record.file, record.line)
        if own[-len(after) :].tolist() == after or (eos is not None and own[-1:].tolist() == [eos]):
            end = []
        elif text.endswith(ends) and (ranges is None or (ranges and ranges[-1][0] < len(text))):
            end = []
            longest = max((one for one in ends if text.endswith(one)), key=len)
            notes.add(HAS_END.format(longest), record.file, record.line)
        ids = np.concatenate([begin, own, end]).astype(np.int32)
        labels = ids
        if ranges is not None:
            chars = np.asarray(found["offset_mapping"][number], dtype=np.int64).reshape(-1, 2)
            learnt = np.zeros(len(ids), dtype=bool)
            learnt[len(begin) : len(begin) + len(own)] = _within(chars, ranges)
            # The EOS after a completion is trained on, added here or by the post-processor.
            learnt[len(ids) - max(len(end), 1) :] |= eos is not None and bool(ranges)
            labels = np.where(learnt, ids, np.int32(IGNORE_INDEX))
        encoded.append(Encoded(ids, labels))
    return encoded


@contextmanager
def _whole_tokens(tokenizer: Any, masked: bool) -> Iterator[None]:
    """Context manager: include white space in the character offsets of tokens.

    With `trim_offsets` the post-processor leaves white space out, and a token of white space alone,
    such as an indent of code, has no characters.
    """
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
    """Return (T,) whether each token has a character in one of `ranges`.

    `chars`: (T, 2) the half-open ranges of the tokens' characters, ascending.
    """
    inside = np.zeros(len(chars), dtype=bool)
    # Special tokens without characters have an empty range that is not in order.
    tokens = np.flatnonzero(chars[:, 1] > chars[:, 0])
    starts, stops = chars[tokens, 0], chars[tokens, 1]
    for start, stop in ranges:
        if start < stop:
            first = np.searchsorted(stops, start, side="right")
            last = np.searchsorted(starts, stop, side="left")
            inside[tokens[first:last]] = True
    return inside
