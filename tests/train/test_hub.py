"""Model cards, and the push of exports to a hub, which is a small server here."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from helpers.tiny_runs import TinyRun
from huggingface_hub import ModelCard
from safetensors.torch import load, load_file

from furlong.cli.main import main


class Hub:
    """A hub with repositories: what it was asked, and the files of each commit."""

    def __init__(self) -> None:
        self.private: dict[str, bool] = {}
        self.commits: list[tuple[str, dict[str, bytes]]] = []
        self.refuses = ""

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        if self.refuses and self.refuses in path:
            return 403, {"error": "your token cannot write here"}
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            known = repo in self.private
            private = asked.get("private") or asked.get("visibility") == "private"
            self.private.setdefault(repo, private)
            return (409 if known else 200), {"url": f"https://huggingface.co/{repo}", "id": repo}
        if path.endswith("/preupload/main"):
            files = [file["path"] for file in json.loads(body)["files"]]
            regular = {"uploadMode": "regular", "shouldIgnore": False}
            return 200, {"files": [{"path": file, **regular} for file in files]}
        if path.endswith("/commit/main"):
            lines = [json.loads(line) for line in body.splitlines()]
            summary = next(x["value"]["summary"] for x in lines if x["key"] == "header")
            files = [x["value"] for x in lines if x["key"] == "file"]
            self.commits.append((summary, {f["path"]: base64.b64decode(f["content"])
                                           for f in files}))  # fmt: skip
            return 200, {"success": True, "commitOid": "0" * 40, "hookOutput": "",
                         "commitUrl": "https://huggingface.co/team/model/commit/0"}  # fmt: skip
        return 200, {"id": "team/model", "private": self.private.get("team/model", True)}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that huggingface_hub finds instead of the real one."""
    served = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer = served.answer(self.path.split("?")[0], body)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        do_GET = do_POST  # noqa: N815

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    yield served
    server.shutdown()
    server.server_close()


def test_every_export_has_a_card(tiny_run: TinyRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["--model.lora.rank=4", "--log.name=words | short", "--train.epochs=1"]
    assert main(tiny_run.arguments(run, *flags)) == 0
    assert main(["export", str(run), f"--out={tmp_path / 'again'}"]) == 0
    card = ModelCard.load(run / "model" / "README.md", ignore_metadata_errors=False)
    assert card.text == ModelCard.load(tmp_path / "again" / "README.md").text
    assert card.data.library_name == "peft" and card.data.base_model is None, "a local folder"
    assert {"furlong", "sft", "lora"} <= set(card.data.tags or [])
    state = json.loads((run / "checkpoints" / "step-00000003" / "state.json").read_text())
    fingerprints = state["data_fingerprint"].values()
    assert any(f"texts; fingerprint `{each}`" in card.text for each in fingerprints)
    for words in (
        "# words | short",
        "| Base model | model |",
        "LoRA of rank 4",
        "| Steps | 3, ",
        "size 64",
        "exact: those of whole sequences",
        f"torch {torch.__version__}",
    ):
        assert words in card.text  # fmt: skip
    assert str(tmp_path) not in card.text and str(tiny_run.folder) not in card.text


def test_exports_are_pushed_and_training_stays_the_same(
    tiny_run: TinyRun, tmp_path: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = ["--model.lora.rank=2", "--model.lora.dropout=0.3", "--train.epochs=1"]
    plain, run = tmp_path / "plain", tmp_path / "run"
    assert main(tiny_run.arguments(plain, *lora)) == 0
    flags = [*lora, "--hub.repo=team/model", "--hub.every_save=true"]
    assert main(tiny_run.arguments(run, *flags)) == 0
    assert hub.private == {"team/model": True}
    assert [summary for summary, _ in hub.commits] == ["step 2", "step 3", "step 3"]
    files = hub.commits[-1][1]
    assert {"README.md", "adapter_config.json", "tokenizer.json"} <= files.keys()
    assert b"what dropout leaves out" in files["README.md"]
    weights = load_file(plain / "model" / "adapter_model.safetensors")
    pushed = load(files["adapter_model.safetensors"])
    assert all(torch.equal(pushed[name], weights[name]) for name in weights)

    assert main(tiny_run.arguments(plain, *lora, "--hub.repo=team/model", "--resume")) == 0
    assert len(hub.commits) == 4, "a finished run may be pushed later"
    hub.refuses = "commit"
    late = tiny_run.arguments(tmp_path / "late", *flags)
    capsys.readouterr()
    assert main(late) == 2
    told = capsys.readouterr()
    assert told.out.count("warning: not pushed") == 2
    assert f"hf upload team/model {tmp_path / 'late' / 'model'}" in told.err
    assert (tmp_path / "late" / "report.json").exists()


@pytest.mark.parametrize("cause", ["offline", "token", "public"])
def test_a_hub_that_refuses_is_told_before_anything_is_written(
    tiny_run: TinyRun, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], cause: str,
) -> None:  # fmt: skip
    if cause == "offline":
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.refuses = "auth-check" if cause == "token" else ""
    hub.private = {"team/model": False}
    assert main(tiny_run.arguments(tmp_path / "run", "--hub.repo=team/model")) == 2
    told = capsys.readouterr().err
    assert "hub.repo" in told and ("public" in told) is (cause == "public")
    assert not (tmp_path / "run").exists()


def test_a_name_without_an_owner_is_refused(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tiny_run.arguments(tmp_path / "run", "--hub.repo=model")) == 2
    assert "hub.repo" in capsys.readouterr().err
