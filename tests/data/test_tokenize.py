"""Records to token ids and labels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tiny_tokenizers import CHATML, CHATML_WITH_TAGS, byte_tokenizer, word_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from furlong.config.schema import DataConfig, Format
from furlong.data import tokenize
from furlong.data.formats import Reading, encode
from furlong.data.records import BLANK, Notes, SourceRecord
from furlong.data.tokenize import (
    Encoded,
    Sequence,
    load_tokenizer,
    token_in_words,
    tokenizer_checksum,
)
from furlong.errors import ConfigError, DataError

TURNS = [
    {"role": "user", "content": "a?"},
    {"role": "assistant", "content": "Привет"},
    {"role": "user", "content": "b?"},
    {"role": "assistant", "content": ""},
]


def run(
    fields: list[dict[str, Any]], tokenizer: Any, format: Format = "text"
) -> tuple[list[Encoded], dict[str, int]]:
    notes = Notes()
    records = (SourceRecord(f, 0, line, f"file:{line}") for line, f in enumerate(fields, start=1))
    encoded = [one for _, own in encode(records, tokenizer, Reading(format), notes) for one in own]
    return encoded, {what: number for what, (number, *_) in notes.items()}


def words(text: str, post_processor: str | None = None) -> list[int]:
    (sequence,), _ = run([{"text": text}], word_tokenizer(post_processor))
    assert sequence.labels is sequence.input_ids
    assert sequence.input_ids.dtype == np.int32
    return sequence.input_ids.tolist()


def learnt(sequence: Encoded, tokenizer: Any) -> str:
    assert set(sequence.labels[sequence.labels != sequence.input_ids].tolist()) <= {-100}
    return str(tokenizer.decode(sequence.input_ids[sequence.labels != -100].tolist()))


@pytest.mark.parametrize(
    ("post_processor", "ids"),
    [(None, [2, 3, 1]), ("<s> $A", [0, 2, 3, 1]), ("<s> $A </s>", [0, 2, 3, 1])],
)
def test_eos_ends_every_text_once(post_processor: str | None, ids: list[int]) -> None:
    assert words("a b", post_processor) == ids


def test_an_eos_of_the_text_itself_is_not_repeated() -> None:
    assert words("a b </s>") == [2, 3, 1]


def test_order_over_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "_CHARS_PER_CALL", 100)
    texts = ["a " * (index % 70) + "b" for index in range(150)]
    sequences, _ = run([{"text": text} for text in texts], word_tokenizer())
    assert [len(s.input_ids) for s in sequences] == [index % 70 + 2 for index in range(150)]


def test_what_has_no_token_is_counted() -> None:
    texts = [{"text": ""}, {"text": "a"}, {"text": " \n"}]
    sequences, left_out = run(texts, word_tokenizer())
    assert ([s.input_ids.tolist() for s in sequences], left_out) == ([[2, 1]], {BLANK: 2})
    silent = word_tokenizer()
    silent.eos_token = None
    # The tokenizer drops every character of the first text.
    silent.backend_tokenizer.normalizer = normalizers.Replace("~", "")
    sequences, left_out = run([{"text": "~"}, {"text": "a"}], silent)
    assert [s.input_ids.tolist() for s in sequences] == [[2]]
    assert left_out == {tokenize.NO_EOS: 2, BLANK: 1}
    assert run([{"messages": []}], byte_tokenizer(), "chat") == ([], {BLANK: 1})
    assert run([{"input_ids": []}], byte_tokenizer(), "tokens") == ([], {BLANK: 1})
    assert run([{"prompt": " ", "completion": ""}], byte_tokenizer(), "completion")[1] == {BLANK: 1}


def test_a_text_is_of_bounded_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "MAX_TEXT_BYTES", 3)
    run([{"text": "123"}, {"text": "é"}], word_tokenizer())
    with pytest.raises(DataError, match=r"a text of more than 3 B[\s\S]*file:2"):
        run([{"text": "é"}, {"text": "éé"}], word_tokenizer())


@pytest.mark.parametrize("template", [CHATML, CHATML_WITH_TAGS], ids=["prefixes", "tags"])
def test_answers_are_learnt_and_nothing_is_added(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    (sequence,), _ = run([{"messages": TURNS}], tokenizer, "chat")
    assert learnt(sequence, tokenizer) == "Привет<|im_end|>\n<|im_end|>\n"
    expected = tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert tokenizer.decode(sequence.input_ids.tolist()) == expected


def test_tags_give_the_mask_that_transformers_gives() -> None:
    tokenizer = byte_tokenizer(CHATML_WITH_TAGS)
    (sequence,), _ = run([{"messages": TURNS}], tokenizer, "chat")
    reference = tokenizer.apply_chat_template(
        TURNS, return_dict=True, return_assistant_tokens_mask=True
    )
    assert sequence.input_ids.tolist() == reference["input_ids"]
    assert (sequence.labels != -100).tolist() == [bool(m) for m in reference["assistant_masks"]]


@pytest.mark.parametrize("post_processor", [None, "<s> $A", "<s> $A </s>"])
def test_a_completion_and_its_end_are_learnt(post_processor: str | None) -> None:
    records = [{"prompt": "a b ", "completion": "c b"}, {"prompt": "a", "completion": ""}]
    (one, empty), _ = run(records, word_tokenizer(post_processor), "completion")
    begin = [0] if post_processor else []
    assert one.input_ids.tolist() == [*begin, 2, 3, 4, 3, 1]
    assert one.labels.tolist() == [-100] * len(begin) + [-100, -100, 4, 3, 1]
    assert empty.labels.tolist() == [-100] * len(begin) + [-100, 1]


@pytest.mark.parametrize("trims", [True, False])
def test_white_space_of_answers_is_learnt(trims: bool) -> None:
    """Offsets that are trimmed, as GPT-NeoX has them, leave nothing of a token of spaces."""
    tokenizer = byte_tokenizer()
    added = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 258)])
    own = processors.Sequence([processors.ByteLevel(trim_offsets=trims), added])
    tokenizer.backend_tokenizer.post_processor = own
    code = "f():\n    x  =\n"
    (one,), _ = run([{"prompt": "a b\n", "completion": code}], tokenizer, "completion")
    assert learnt(one, tokenizer) == code + "<end>"
    turns = [TURNS[0], {"role": "assistant", "content": code}]
    (two,), _ = run([{"messages": turns}], tokenizer, "chat")
    assert learnt(two, tokenizer) == code + "<|im_end|>\n"
    left = tokenizer.backend_tokenizer.post_processor.__getstate__()
    assert left == own.__getstate__()


def test_a_token_on_the_border_is_learnt() -> None:
    (sequence,), _ = run(
        [{"prompt": "a unk", "completion": "nown"}], word_tokenizer(), "completion"
    )
    assert sequence.labels.tolist() == [-100, 4, 1]


def test_only_fast_tokenizers_can_mask() -> None:
    class Slow:
        is_fast = False
        name_or_path = "slow"
        eos_token_id = None

    with pytest.raises(ConfigError, match=r"slow: a tokenizer that cannot tell"):
        run([{"prompt": "a", "completion": "b"}], Slow(), "completion")


def test_a_text_that_breaks_the_tokenizer_is_named() -> None:
    """Rust code panics where its regular expression gives up; the texts beside it are taken."""
    panic = type("PanicException", (BaseException,), {})

    class Fragile:
        is_fast = True
        eos_token_id = None

        def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
            if any("   " in text for text in texts):
                raise panic("retry-limit-in-match over")
            return {"input_ids": [[len(text)] for text in texts]}

    records = [{"text": "ab"}, {"text": "a    b"}]
    with pytest.raises(DataError, match=r"6 characters on which the tokenizer fails: retry") as e:
        run(records, Fragile())
    assert e.value.source == "file:2"


def test_a_folder_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without a tokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: [\s\S]*--tokenizer"):
        load_tokenizer(str(tmp_path), "--tokenizer")


def test_the_fingerprint_follows_what_decides_ids(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    before = tokenizer_checksum(tokenizer)
    # A call sets truncation and padding; where it was loaded from does not matter.
    tokenizer(["a", "bc"], padding=False, truncation=True, max_length=3)
    assert tokenizer_checksum(tokenizer) == before
    tokenizer.save_pretrained(tmp_path / "one")
    tokenizer.save_pretrained(tmp_path / "two")
    one, two = (load_tokenizer(str(tmp_path / name)) for name in ("one", "two"))
    assert tokenizer_checksum(one) == tokenizer_checksum(two)
    others = [byte_tokenizer(CHATML_WITH_TAGS), word_tokenizer(), word_tokenizer("<s> $A")]
    assert len({before, *map(tokenizer_checksum, others)}) == 4
    one.eos_token = "<|im_end|>"
    assert tokenizer_checksum(one) != tokenizer_checksum(two)


def test_a_sequence_counts_what_is_learnt() -> None:
    labels = np.array([5, -100, 3, 4], np.int32)
    sequence = Sequence(0, "x", np.arange(4, dtype=np.int32), labels)
    assert (sequence.seq_len, sequence.num_valid_tokens) == (4, 2)


PREPEND = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
"""As tokenizer.json of Llama 2 and Mistral 7B has it."""


def save(folder: Path, backend: Tokenizer, **config: Any) -> str:
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def bytes_backend(*splitters: Any) -> Tokenizer:
    marks = ["<s>", "</s>", "<end>"]
    symbols = [*marks, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {symbol: i for i, symbol in enumerate([*symbols, "12", "123"])}
    backend = Tokenizer(models.BPE(vocab, [("1", "2"), ("12", "3")]))
    levels = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splitters, levels]) if splitters else levels
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(marks)
    return backend


def pieces_backend() -> Tokenizer:
    words = ["▁", "▁[", "[", "A", "]", "▁a", "▁▁", "a", "▁b", "b"]
    symbols = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
    vocab = {symbol: i for i, symbol in enumerate(symbols)}
    merges = [("▁", "["), ("▁", "a"), ("▁", "b"), ("▁", "▁")]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = PREPEND
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


DIGITS = pre_tokenizers.Digits(individual_digits=True)


@pytest.mark.parametrize(
    ("backend", "kind", "text"),
    [
        (bytes_backend(DIGITS), "GPT2Tokenizer", "in 123123 they 12345"),
        (bytes_backend(DIGITS), "Qwen2Tokenizer", "123"),
        (pieces_backend(), "LlamaTokenizer", " a b"),
        (pieces_backend(), "LlamaTokenizer", "<s>[A] a</s><s>[A] b</s>"),
        (bytes_backend(), "GemmaTokenizer", "no <unk> here"),
        (bytes_backend(DIGITS), "NobodysTokenizer", "123"),
    ],
)
def test_ids_are_those_of_tokenizer_json_in_an_export_too(
    backend: Tokenizer, kind: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>", "legacy": True}
    tokenizer = load_tokenizer(save(tmp_path / "model", backend, **known))
    expected = backend.encode(text, add_special_tokens=False).ids
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == expected
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    said = capsys.readouterr().out
    files = write(tokenizer, tmp_path / "export")
    assert files["tokenizer.json"] == (tmp_path / "model" / "tokenizer.json").read_bytes()
    written = json.loads(files["tokenizer_config.json"])
    is_other = kind not in ("NobodysTokenizer",)
    assert ("PreTrainedTokenizerFast" in said) == is_other
    assert written == known | ({"tokenizer_class": "PreTrainedTokenizerFast"} if said else {})
    again = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert again(text, add_special_tokens=False)["input_ids"] == expected


def test_a_class_whose_flags_are_applied_keeps_its_name_in_an_export(tmp_path: Path) -> None:
    """As DeepSeek R1 Distill Qwen has it, for whose type AutoTokenizer takes another splitter."""
    known = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "add_bos_token": True}
    name = save(tmp_path / "model", bytes_backend(DIGITS), **known)
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    tokenizer = load_tokenizer(name)
    assert json.loads(write(tokenizer, tmp_path / "export")["tokenizer_config.json"]) == known
    again = load_tokenizer(str(tmp_path / "export"))
    ids = bytes_backend(DIGITS).encode("a123").ids
    assert [one("a123")["input_ids"] for one in (tokenizer, again)] == [[0, *ids]] * 2


def write(tokenizer: Any, folder: Path) -> dict[str, bytes]:
    folder.mkdir()
    for name, content in tokenizer.source_files.items():
        (folder / name).write_bytes(content)
    return dict(tokenizer.source_files)


def test_the_template_of_a_processor_is_a_file_of_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub has it in a file that AutoTokenizer does not download."""
    source = Path(save(tmp_path / "source", bytes_backend(DIGITS)))
    known = {"chat_template": "of images"}

    def downloaded(path: str, name: str, revision: str | None = None) -> Path | None:
        if name == "chat_template.json":
            (source / name).write_text(json.dumps(known))
        return source / name if (source / name).exists() else None

    monkeypatch.setattr("furlong.data.tokenize.model_file", downloaded)
    files = load_tokenizer(str(source)).source_files
    assert json.loads(files["chat_template.json"]) == known
    settings = DataConfig(train="x", chat_template="{{ 1 }}")
    assert "chat_template.json" not in load_tokenizer(str(source), settings=settings).source_files


@pytest.mark.parametrize("kind", ["LlamaTokenizerFast", "PreTrainedTokenizerFast"])
def test_flags_of_begin_and_end_are_applied_as_by_transformers_4_or_told(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSeek asks for a BOS that its tokenizer.json leaves out, Cohere for no EOS beside it."""
    known = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>"}
    is_applied = kind != "PreTrainedTokenizerFast"
    for flags, processor in (
        ({"add_bos_token": True, "add_eos_token": False}, "$A"),
        ({"add_bos_token": False}, "<s> $A"),
        ({"add_bos_token": True, "add_eos_token": False}, "<s> $A </s> <end>"),
    ):
        backend = bytes_backend()
        backend.post_processor = processors.TemplateProcessing(
            single=processor, special_tokens=[("<s>", 0), ("</s>", 1), ("<end>", 2)]
        )
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        tokenizer = load_tokenizer(save(folder, backend, **known, **flags))
        (one,), _ = run([{"text": "a"}], tokenizer)
        begins = flags["add_bos_token"] if is_applied else "<s>" in processor
        tail = [1] if is_applied or "<end>" not in processor else [1, 2, 1]
        middle = backend.encode("a", add_special_tokens=False).ids
        assert one.input_ids.tolist() == [0] * begins + middle + tail
        assert "add_" in capsys.readouterr().out
        assert json.loads(tokenizer.source_files["tokenizer_config.json"]) == known | flags


@pytest.mark.parametrize(
    ("processor", "text", "ids"),
    [
        ("<s> $A", "<s>a", [0, 2, 1]),
        ("<s> $A", "a<s>", [0, 2, 0, 1]),
        (None, "<s>a", [0, 2, 1]),
        ("<s> $A </s>", "<s>a</s>", [0, 2, 1]),
        ("<s> $A", "<s>a <stop>\n", [0, 2, 5]),
        (None, "<stop> a", [5, 2, 1]),
    ],
)
def test_marks_that_a_text_has_already_are_not_added(
    processor: str | None, text: str, ids: list[int]
) -> None:
    tokenizer = word_tokenizer(processor)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<stop>"]})
    (sequence,), told = run([{"text": text}], tokenizer)
    assert sequence.input_ids.tolist() == ids
    assert len(told) == (processor is not None and text.startswith("<s>")) + ("<stop>\n" in text)
    (pair,), _ = run([{"prompt": text, "completion": " b"}], tokenizer, "completion")
    ends = pair.input_ids[-2:].tolist(), pair.labels[-2:].tolist()
    assert ends == ([3, 1], [3, 1])
    (pair,), _ = run([{"prompt": "<s>a", "completion": " b<stop>"}], tokenizer, "completion")
    assert pair.labels.tolist() == [-100, -100, 3, 5]


def test_what_a_run_sets_of_a_tokenizer_is_all_that_changes_in_its_export(tmp_path: Path) -> None:
    """A special token is cut out of texts, in the run as where the export is loaded."""
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}
    name = save(tmp_path / "model", bytes_backend(), **kind)
    for file in ("chat_template.jinja", "special_tokens_map.json", "README.md", "config.json"):
        (tmp_path / "model" / file).write_text("{}")
    settings = DataConfig(train="x", eos_token="12", pad_token="<end>", chat_template="{{ 1 }}")
    tokenizer = load_tokenizer(name, settings=settings)
    files = write(tokenizer, tmp_path / "export")
    changed = kind | {"eos_token": "12", "pad_token": "<end>", "chat_template": "{{ 1 }}"}
    assert json.loads(files["tokenizer_config.json"]) == changed
    assert json.loads(files["special_tokens_map.json"]) == {"eos_token": "12", "pad_token": "<end>"}
    assert files["chat_template.jinja"] == b"{{ 1 }}"
    assert files.keys() == {
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"
    }  # fmt: skip
    again = AutoTokenizer.from_pretrained(tmp_path / "export")
    for text in ("a123b12", "12</s>"):
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert (again.eos_token, again.pad_token, again.chat_template) == ("12", "<end>", "{{ 1 }}")


def test_token_ids_need_no_tokenizer_and_texts_are_refused_without_one(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tmp_path), is_needed=False)
    (sequence,), _ = run([{"input_ids": [1, 2]}], tokenizer, "tokens")
    assert sequence.input_ids.tolist() == [1, 2]
    tokenizer_checksum(tokenizer)
    assert token_in_words(7, tokenizer) == "token id 7"
    for record, format in (({"text": "a"}, "text"), ({"messages": TURNS}, "chat")):
        with pytest.raises(ConfigError) as caught:
            run([record], tokenizer, cast(Format, format))
        assert caught.value.source == "file:1"
        assert {"model.tokenizer", "input_ids"} <= set(re.findall(r"[\w.]+", caught.value.change))
    with pytest.raises(ConfigError):
        load_tokenizer(
            str(tmp_path), is_needed=False, settings=DataConfig(train="x", eos_token="a")
        )
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError):
        load_tokenizer(str(tmp_path), is_needed=False)
