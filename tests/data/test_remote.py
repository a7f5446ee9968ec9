"""Files elsewhere: an fsspec address, and a server that answers as the hub does."""

from __future__ import annotations

import gzip
import io
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_tokenizers import byte_tokenizer

from furlong.config.schema import DataConfig, Source
from furlong.data import stream
from furlong.data.loader import LoaderState
from furlong.data.records import Notes, read_records
from furlong.data.sources import list_files
from furlong.data.stream import StreamSet
from furlong.errors import DataError
from furlong.plan.lengths import StepSize

CARD = "---\nconfigs:\n- config_name: en\n  data_files:\n  - split: train\n    path: en/*\n---\n"


def lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def table(*texts: str, size: int = 2) -> bytes:
    """A Parquet file with row groups of so many rows."""
    file = io.BytesIO()
    pq.write_table(pa.table({"text": [*texts], "id": [1] * len(texts)}), file, row_group_size=size)
    return file.getvalue()


def arrow(*texts: str) -> bytes:
    file = io.BytesIO()
    own = pa.table({"text": [*texts]})
    with pa.ipc.new_stream(file, own.schema) as writer:
        writer.write_table(own)
    return file.getvalue()


FILES = {
    "README.md": CARD.encode(),
    "en/0.jsonl": lines("a", "b"),
    "en/1.parquet": table("c", "d", "e", "f", "g"),
    "en/2.jsonl.gz": gzip.compress(lines("h", "i")),
    "en/3.arrow": arrow("j", "k"),
    "de/0.jsonl": lines("x"),
}


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    for name, content in FILES.items():
        system.pipe(f"/set/{name}", content)
    yield system
    system.rm("/set", recursive=True)


def read(source: Source, skip: int = 0) -> list[tuple[str, str, int]]:
    listing = list_files(source, fetch=False)
    return [
        (record.fields["text"], record.origin, record.line)
        for record in read_records(listing, Notes(), ("text",), skip=skip)
    ]


def test_files_of_an_address_are_read_as_those_of_a_folder(memory: Any) -> None:
    found = read(Source(path="memory://set", name="en", split="train"))
    assert [text for text, _, _ in found] == list("abcdefghijk")
    assert found[1][1] == "memory:///set/en/0.jsonl:2"
    assert found[4][1] == "memory:///set/en/1.parquet, row 3"
    (one, *_) = read(Source(path="memory://set/de/0.jsonl"))
    assert one[0] == "x"
    for source, told in (
        (Source(path="memory://nothing"), "without files"),
        (Source(path="memory://set", name="fr"), "which holds en"),
        (Source(path="unheard://a"), "unheard"),
    ):
        with pytest.raises(DataError, match=told):
            list_files(source, fetch=False)


def test_row_groups_that_are_skipped_are_not_read(memory: Any) -> None:
    source = Source(path="memory://set/en/1.parquet")
    assert read(source, skip=3) == read(source)[2:]
    assert read(source, skip=4) == read(source)[4:]


class Hub(BaseHTTPRequestHandler):
    """The few answers of the hub that listing and reading a data set ask for."""

    asked: list[str]
    is_down = False

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlparse(self.path).path)
        self.asked.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        if self.is_down:
            status, headers, content = 503, {}, b""
        elif match := re.fullmatch(r"/datasets/a/b/resolve/[^/]+/(.*)", path):
            content = FILES[match[1]]
            status, headers = 200, {"ETag": '"1"', "X-Repo-Commit": "0" * 40}
            if span := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                status, content = 206, content[int(span[1]) : int(span[2]) + 1]
        elif match := re.fullmatch(r"/api/datasets/a/b/tree/[^/]+/?(.*)", path):
            own = [name for name in FILES if name.startswith(match[1])]
            folders = {name.rpartition("/")[0] for name in own} - {"", match[1]}
            entries: list[dict[str, Any]] = [
                {"type": "file", "path": name, "size": len(FILES[name]), "oid": "1"} for name in own
            ]
            entries += [{"type": "directory", "path": name, "oid": "2"} for name in folders]
            status, headers = 200, {"Content-Type": "application/json"}
            content = json.dumps(entries).encode()
        elif re.fullmatch(r"/api/datasets/a/b(/revision/.*)?", path):
            status, headers = 200, {"Content-Type": "application/json"}
            content = json.dumps({"id": "a/b", "sha": "0" * 40, "siblings": []}).encode()
        else:
            status, headers, content = 404, {"X-Error-Code": "RepoNotFound"}, b""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Requests to a server that stands in for the hub."""
    import huggingface_hub
    from huggingface_hub import HfFileSystem

    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    HfFileSystem.clear_instance_cache()
    yield Hub.asked
    HfFileSystem.clear_instance_cache()
    server.shutdown()
    thread.join()


def test_a_data_set_of_the_hub_is_read_without_being_fetched(
    hub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BLOCK_RECORDS", 3)
    home = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home))
    source = {"path": "a/b", "name": "en", "split": "train", "revision": "v1"}

    def opened() -> StreamSet:
        settings = DataConfig(train=[source], max_seq_len=9, streaming=True)
        return StreamSet(settings, byte_tokenizer(), say=print)

    data = opened()
    whole = list(islice(data.batches(StepSize(2), LoaderState()), 9))
    data.close()
    texts = [byte_tokenizer().decode(one.input_ids[:-1]) for b in whole for one in b.sequences]
    assert sorted(texts[:11]) == list("abcdefghijk")
    assert not home.exists()
    assert not any("de/0" in request for request in hub)
    assert any("/resolve/v1/en/1.parquet bytes=" in request for request in hub)
    data = opened()
    again = islice(data.batches(StepSize(2), whole[3].next_state), 5)
    assert [[o.origin for o in b.sequences] for b in again] == [
        [o.origin for o in b.sequences] for b in whole[4:]
    ]
    data.close()
    with pytest.raises(DataError, match="hf://datasets/a/c"):
        list_files(Source(path="a/c"), fetch=False)


def test_a_hub_that_stays_down_is_asked_again_by_its_own_client_alone(
    hub: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = list_files(Source(path="a/b", name="en"), fetch=False)
    records = read_records(listing, Notes(), ("text",))
    assert next(records).fields["text"] == "a"
    hub.clear()
    monkeypatch.setattr(Hub, "is_down", True)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(DataError, match=r"503[\s\S]*--resume"):
        list(records)
    assert len(hub) == 6
