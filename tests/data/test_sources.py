"""Names in a run file to files, without reading them."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from furlong.config.schema import Source
from furlong.data.sources import list_files
from furlong.errors import DataError, UserError


def names(folder: Path, split: str | None = None) -> list[tuple[str, str]]:
    files = list_files(Source(path=str(folder), split=split)).files
    return [(str(file.path.relative_to(folder)), file.kind) for file in files]


def left_out(folder: Path) -> list[str]:
    return list_files(Source(path=str(folder))).notes


def write(folder: Path, *files: str) -> None:
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")


def test_a_folder_of_texts_is_sorted_and_hidden_files_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "b/two.txt", "a.md", ".hidden", ".git/config", "code.json")
    assert names(tmp_path) == [("a.md", "text"), ("b/two.txt", "text"), ("code.json", "text")]
    assert left_out(tmp_path) == ["records read as texts: 1 (code.json)"]


@pytest.mark.parametrize(
    ("files", "kinds"),
    [
        (("a.NDJSON",), ["json lines"]),
        (("a.arrow", "README.md", "LICENSE", "config.json", "b/a.jl"), ["arrow", "json lines"]),
        (("a.json", "README.md", "dataset_info.json"), ["json"]),
        (("a.TSV", "LICENSE"), ["tsv"]),
        (("a.csv.gz", "b.json.zst"), ["csv", "json"]),
        (("a.jsonl.bz2", "b.json"), ["json lines"]),
        (("a.md", "b.json", "c.txt.gz"), ["text", "text", "text"]),
    ],
)
def test_the_ending_tells_the_kind_and_what_describes_records_is_left_out(
    tmp_path: Path, files: tuple[str, ...], kinds: list[str]
) -> None:
    write(tmp_path, *files)
    assert [kind for _, kind in names(tmp_path)] == kinds
    alone = list_files(Source(path=str(tmp_path / files[0]))).files
    assert kinds[0] == "text" or alone[0].kind == kinds[0]


@pytest.mark.parametrize(
    "files",
    [
        ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet",
         "data/test-00000-of-00001.parquet"),
        ("train_sft.jsonl", "test_sft.jsonl"),
        ("my_train.jsonl", "my_test.jsonl"),
        ("train.jsonl", "test_gen.jsonl"),
        ("my-train/a.jsonl", "my-train/b.jsonl", "Test2/a.jsonl"),
        ("train/en/a.jsonl", "test/en/a.jsonl"),
        ("train/a.txt", "test/a.txt"),
        ("train.txt", "test.txt", "README.md"),
    ],
)  # fmt: skip
def test_one_of_several_splits_must_be_named(tmp_path: Path, files: tuple[str, ...]) -> None:
    write(tmp_path, *files)
    with pytest.raises(DataError, match=r"which holds test, train[\s\S]*split: train}"):
        names(tmp_path)
    with pytest.raises(DataError, match="split: test}"):
        list_files(Source(path=str(tmp_path)), "data.eval")
    with pytest.raises(DataError, match="split dev of"):
        names(tmp_path, "dev")
    for split in ("test", "train"):
        assert [name for name, _ in names(tmp_path, split)] == [
            file for file in files if split in file.lower()
        ]


@pytest.mark.parametrize("name", ["a.traj", "a.jsonlines", "a.jl", "a.ipynb", "a", "a.txt"])
@pytest.mark.parametrize(
    "content", ['{"text": "x"}', '{\n "text": "x"\n}', '\ufeff[{"text": "x"}]']
)
def test_records_are_known_by_their_content(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    for path in (tmp_path, tmp_path / name):
        assert list_files(Source(path=str(path))).files[0].kind in ("json", "json lines")
    if name == "a.traj":  # beside texts, as in a repository, it is one of them
        (tmp_path / "b.py").write_text("{}")
        assert [kind for _, kind in names(tmp_path)] == ["text", "text"]


@pytest.mark.parametrize(
    "content", ["{% if a %}", "{'a': 1}", "[1]", "[[a]] b", "[a](b)", "{ it: is }", ""]
)
def test_texts_are_no_records(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.txt").write_text(content)
    assert names(tmp_path) == [("a.txt", "text")]


def test_a_folder_of_datasets_is_one_file(tmp_path: Path) -> None:
    write(tmp_path, "train/state.json", "train/dataset_info.json", "train/data-0.arrow")
    write(tmp_path, "test/state.json", "test/dataset_info.json", "test/data-0.arrow")
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    (file,) = list_files(Source(path=str(tmp_path / "train"))).files
    assert (file.kind, len(file.parts)) == ("dataset", 3)
    assert list_files(Source(path=str(tmp_path), split="train[:5%]")).files == (file,)
    with pytest.raises(DataError, match=r"name en of .*, which holds no configurations"):
        list_files(Source(path=str(tmp_path), name="en", split="train"))
    with pytest.raises(DataError, match="which holds train, test"):
        list_files(Source(path=str(tmp_path)))
    write(tmp_path / "else", "state.json", "dataset_info.json")
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "train/../else"]}))
    assert list_files(Source(path=str(tmp_path))).files == (file,)
    (tmp_path / "dataset_dict.json").write_text("{")
    with pytest.raises(DataError, match="which holds no splits"):
        list_files(Source(path=str(tmp_path)))


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file or folder[\s\S]*data\.eval"):
        list_files(Source(path=str(tmp_path / "nowhere")), "data.eval")
    with pytest.raises(DataError, match="a folder without files"):
        list_files(Source(path=str(tmp_path)))
    write(tmp_path, "a.txt")
    with pytest.raises(DataError, match="a file, without split test"):
        list_files(Source(path=str(tmp_path / "a.txt"), split="test"))
    with pytest.raises(DataError, match="a file, without the name en"):
        list_files(Source(path=str(tmp_path / "a.txt"), name="en"))
    with pytest.raises(DataError, match="which holds files without a split"):
        list_files(Source(path=str(tmp_path), split="test"))
    with pytest.raises(DataError, match="revision v1 of"):
        list_files(Source(path=str(tmp_path), revision="v1"))
    # `datasets` calls train what no name says anything of.
    for path in (tmp_path, tmp_path / "a.txt"):
        assert len(list_files(Source(path=str(path), split="train")).files) == 1


def test_links_are_followed_and_a_folder_is_read_once(tmp_path: Path) -> None:
    write(tmp_path, "top/x.txt", "top/z/y.txt", "far/w.txt", "single.txt")
    (tmp_path / "top" / "z" / "up").symlink_to("..")
    (tmp_path / "top" / "b").symlink_to("../far")
    (tmp_path / "top" / "c").symlink_to("../far")
    (tmp_path / "top" / "s.txt").symlink_to("../single.txt")
    (tmp_path / "far" / "self").symlink_to(".")
    (tmp_path / "named").symlink_to("top")
    for folder in (tmp_path / "top", tmp_path / "named"):
        assert [name for name, _ in names(folder)] == ["b/w.txt", "s.txt", "x.txt", "z/y.txt"]
        assert left_out(folder) == []


def test_json_beside_records_is_told(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", "b.json", "dataset_infos.json")
    assert names(tmp_path) == [("a.jsonl", "json lines")]
    assert [note for note in left_out(tmp_path) if "1 left out (b.json)" in note]


def test_what_is_no_file_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, "x.txt")
    for name in "abcd":
        (tmp_path / name).symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    assert names(tmp_path) == [("x.txt", "text")]
    assert left_out(tmp_path) == ["links that lead nowhere: 5 left out (a, b, c, ...)"]
    (tmp_path / "x.txt").unlink()
    with pytest.raises(DataError, match="without files; links that lead nowhere: 5 left out"):
        names(tmp_path)


def test_a_missing_file_of_records_is_an_error(tmp_path: Path) -> None:
    """A link into a store from which a part is missing, as an interrupted download leaves it."""
    write(tmp_path, "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to("store/b")
    with pytest.raises(DataError, match=r"b\.jsonl: a link that leads nowhere[\s\S]*data\.train"):
        names(tmp_path)


def test_a_folder_that_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "a.txt", "locked/b.txt")
    scandir = os.scandir

    def refuse(path: str | Path) -> object:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    # A superuser may read every folder, whatever its mode.
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"locked: Permission denied[\s\S]*data\.eval"):
        list_files(Source(path=str(tmp_path)), "data.eval")


def test_a_part_of_a_split_that_is_missing_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, "train-00000-of-00002.parquet", "test-00000-of-00001.parquet")
    with pytest.raises(DataError, match="1 of the 2 files of train, without train-00001-of-00002"):
        names(tmp_path, "train")
    assert len(names(tmp_path, "test")) == 1
    assert len(list_files(Source(path=str(tmp_path / "train-00000-of-00002.parquet"))).files) == 1
    write(tmp_path / "from-one", "train-00001-of-00002.jsonl", "train-00002-of-00002.jsonl")
    assert len(names(tmp_path / "from-one")) == 2


def test_words_alone_make_no_splits(tmp_path: Path) -> None:
    write(tmp_path, "train_a.jsonl", "train_b.jsonl", "contest.jsonl")
    assert len(names(tmp_path)) == 3


def test_of_texts_some_of_which_name_a_split_all_are_read_and_told(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "test.py", "main.py", "README.md")
    assert len(names(tmp_path)) == 4
    assert left_out(tmp_path) == ["texts of several splits as one source (test, train)"]
    assert names(tmp_path, "train") == [("train.py", "text")]


def test_folders_of_records_that_are_read_as_one_are_told(tmp_path: Path) -> None:
    write(tmp_path, "en/a.jsonl", "de/a.jsonl")
    assert left_out(tmp_path) == ["records of 2 folders as one source (de, en)"]


def test_shards_of_mds_are_not_passed_over(tmp_path: Path) -> None:
    """Which are binary, so that the index beside them would be all that is trained on."""
    write(tmp_path, "index.json", "shard.00000.mds.zstd")
    for path in (tmp_path, tmp_path / "shard.00000.mds.zstd"):
        with pytest.raises(DataError) as caught:
            list_files(Source(path=str(path)))
        assert "input_ids" in caught.value.required


def test_a_split_that_no_file_names_is_not_proposed_again(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl")
    for key in ("data", "data.train"):
        with pytest.raises(DataError, match="which holds files without a split") as caught:
            list_files(Source(path=str(tmp_path), split="test"), key)
        assert caught.value.change == "remove split, or name the files that are meant"


@pytest.mark.parametrize(
    ("file", "split"), [("dev.jsonl", "validation"), ("eval/a.json", "test"), ("val/a.csv", "val")]
)
def test_splits_have_the_names_of_datasets(tmp_path: Path, file: str, split: str) -> None:
    write(tmp_path, file, file.replace("dev", "train").replace("val", "train"))
    assert [name for name, _ in names(tmp_path, split)] == [file]


def test_the_verb_that_takes_data_is_told_its_own_flag(tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl", "test.jsonl")
    with pytest.raises(DataError) as caught:
        list_files(Source(path=str(tmp_path)), "data")
    assert caught.value.change == "add --split train"


CARD = """---
license: mit
configs:
- config_name: en
  default: true
  data_files:
  - split: train
    path: ["en/train-*.jsonl", "more/*"]
  - split: test_sft
    path: en/test.jsonl
- config_name: de
  data_files: "de/**"
- config_name: fr
  data_dir: fr
---
# A card
"""
CARD_FILES = (
    "en/train-1.jsonl", "more/x.jsonl", "en/test.jsonl", "de/a/b.jsonl", "fr/dev.json",
    "fr/train.json", "loader.py", "picture.png",
)  # fmt: skip


def of_hub(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *files: str, card: str | None = None
) -> Path:
    """A cache of the hub with the data set a/b; its revision v1 has one file alone."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    home = folder / "datasets--a--b"
    for revision, commit, own in (("main", "0" * 40, files), ("v1", "1" * 40, ("old.jsonl",))):
        write(home / "snapshots" / commit, *own)
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / revision).write_text(commit)
    if card is not None:
        (home / "snapshots" / ("0" * 40) / "README.md").write_text(card)
    return home / "snapshots" / ("0" * 40)


@pytest.mark.parametrize(
    ("name", "split", "expected"),
    [
        (None, "train", ["en/train-1.jsonl", "more/x.jsonl"]),
        ("en", "test_sft[:5%]", ["en/test.jsonl"]),
        ("de", None, ["de/a/b.jsonl"]),
        ("de", "train", ["de/a/b.jsonl"]),
        ("fr", "validation", ["fr/dev.json"]),
        ("fr", "train+validation", ["fr/train.json", "fr/dev.json"]),
        ("en", None, "which holds train, test_sft(.|\n)*, name: en, split: train}"),
        ("en", "validation", "split validation of"),
        ("it", "train", "name it of .*which holds en, de, fr(.|\n)*, name: en, split: train}"),
    ],
)
def test_configurations_are_those_of_the_card(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str | None,
    split: str | None,
    expected: list[str] | str,
) -> None:
    """Of a cache of the hub, and of the same files in a folder."""
    home = of_hub(tmp_path, monkeypatch, *CARD_FILES, card=CARD)
    for path in ("a/b", "hf://datasets/a/b", str(home)):
        source = Source(path=path, name=name, split=split)
        if isinstance(expected, str):
            with pytest.raises(DataError, match=expected):
                list_files(source)
        else:
            listing = list_files(source)
            found = [file.path.relative_to(home) for file in listing.files]
            assert found == [Path(one) for one in expected]
            assert bool(listing.slices) == ("[" in (split or ""))


def test_a_name_is_a_folder_where_no_card_says_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = of_hub(tmp_path, monkeypatch, "en/a.jsonl", "data/de/train-00000-of-00001.parquet")
    for name, file in (("en", "en/a.jsonl"), ("de", "data/de/train-00000-of-00001.parquet")):
        listing = list_files(Source(path="a/b", name=name, split="train"))
        assert [one.path for one in listing.files] == [home / file]
    with pytest.raises(DataError, match="name it of a/b, which holds data, en"):
        list_files(Source(path="a/b", name="it"))
    with pytest.raises(DataError, match="no copy of revision v2"):
        list_files(Source(path="a/b", revision="v2"))
    (old,) = list_files(Source(path="a/b", revision="v1", split="train")).files
    assert old.path.name == "old.jsonl"
    # What lies here comes first.
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a/b/here.txt")
    assert [file.path.name for file in list_files(Source(path="a/b")).files] == ["here.txt"]
    for path in ("hf://datasets/a/b/en", "hf://datasets/a/b/en/a.jsonl"):
        (there,) = list_files(Source(path=path)).files
        assert there.path == home / "en/a.jsonl"


@pytest.mark.parametrize(
    "card",
    [
        "configs:\n- data_files: x",
        "configs: 3",
        "configs:\n- [",
        "configs:\n  a: b",
        # aliases of aliases, which are 10 ** 9 things where they are written out
        "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
        + "".join(
            f"{b}: &{b} [{','.join(f'*{a}' for _ in range(10))}]\n"
            for a, b in pairwise("abcdefghi")
        )
        + "configs:\n- config_name: y\n  data_files: *i",
    ],
)
def test_a_card_that_says_nonsense_is_told(tmp_path: Path, card: str) -> None:
    write(tmp_path, "a.jsonl")
    (tmp_path / "README.md").write_text(f"---\n{card}\n---\n")
    with pytest.raises(UserError, match=r"README\.md"):
        list_files(Source(path=str(tmp_path)))


def test_a_file_that_the_card_names_and_that_is_not_there_is_told(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl")
    (tmp_path / "README.md").write_text(CARD)
    with pytest.raises(DataError, match=r"no file of de/\*\*"):
        list_files(Source(path=str(tmp_path), name="de"))


def test_only_the_files_of_the_split_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = of_hub(tmp_path, monkeypatch, *CARD_FILES, card=CARD)
    asked = []

    class Api:
        def dataset_info(self, name: str, **options: object) -> Any:
            if name == "a/gone":
                raise FileNotFoundError("cannot find it\nmore")
            siblings = ["README.md", "en/unasked.jsonl", ".gitattributes", *reversed(CARD_FILES)]
            return SimpleNamespace(siblings=[SimpleNamespace(rfilename=one) for one in siblings])

    def fetch(name: str, **options: Any) -> str:
        asked.append((options["revision"], options["allow_patterns"]))
        return str(home)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    list_files(Source(path="a/b", split="train", revision="main"))
    files = ["en/train-1.jsonl", "more/x.jsonl"]
    assert asked == [("main", ["README.md"]), ("main", files)]
    list_files(Source(path="hf://datasets/a/b/en", split="test"))
    assert asked[2:] == [(None, ["en/README.md"]), (None, ["en/test.jsonl"])]
    with pytest.raises(DataError) as caught:
        list_files(Source(path="hf://datasets/a/gone"), "data.eval")
    assert (caught.value.given, caught.value.source) == (
        "hf://datasets/a/gone: cannot find it", "data.eval",
    )  # fmt: skip


@pytest.mark.parametrize("split", ["train[:5", "train[:200%]", "[:5]", "train[::2]", "+"])
def test_a_slice_that_is_none_is_told(tmp_path: Path, split: str) -> None:
    write(tmp_path, "a.jsonl")
    with pytest.raises(DataError, match=r"from: +data\.train\n"):
        list_files(Source(path=str(tmp_path), split=split))


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("https://example.com/a.jsonl", "https:/example.com/a.jsonl: no such file"),
        ("hf://datasets/a", "hf://datasets/a: Repo id must"),
        ("data/*.jsonl", "data/*.jsonl: no such file"),
        ("Org/set-1.5", "Org/set-1.5: nothing of that name is here"),
        ("data/books.jsonl", "data/books.jsonl: no such file"),
        ("a\0b", "no such file or folder"),
        ("a" * 300, "File name too long"),
        ("/dev/null", "neither a file nor a folder"),
    ],
)
def test_what_people_take_for_a_path(path: str, given: str) -> None:
    with pytest.raises(DataError) as caught:
        list_files(Source(path=path))
    assert given in caught.value.given and "\0" not in caught.value.given
    assert "hf://datasets/OWNER/NAME" in str(caught.value) or "permissions" in str(caught.value)
