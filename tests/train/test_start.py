"""What a run is refused for before torch is loaded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.tiny_runs import TinyRun

from furlong.cli import train as cli_train
from furlong.cli.main import main

PROGRAM = (
    "import sys; from furlong.cli.main import main; code = main(sys.argv[1:]); "
    "sys.exit(code + 10 * bool({'torch', 'transformers'} & set(sys.modules)))"
)

REFUSING = """
import contextlib, io, json, sys
from furlong.cli.main import main

found = []
for arguments in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(arguments)
    found.append((code, said.getvalue(), sorted({"torch", "transformers"} & set(sys.modules))))
json.dump(found, sys.stdout)
"""


def refused(*command_lines: list[str]) -> list[str]:
    """The messages of command lines that one process without torch refuses, one after another."""
    finished = subprocess.run(
        [sys.executable, "-c", REFUSING],
        input=json.dumps(command_lines),
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    messages = []
    for code, said, loaded in json.loads(finished.stdout):
        assert (code, loaded) == (2, []), said
        names = [line.split(":")[0] for line in said.splitlines()]
        assert names == ["given", "required", "from", "change"], said
        messages.append(said)
    assert len(messages) == len(command_lines)
    return messages


PATHS_AND_KEYS = [
    (["--data.train={home}/nowhere.jsonl"], "nowhere.jsonl: no such file or folder"),
    (["--data.eval={home}/nowhere"], "nowhere: no such file or folder"),
    (["--model.name=./nowhere"], "./nowhere: no such folder"),
    (["--model.name={home}/nowhere"], "nowhere: no such folder"),
    (["--model.name={home}"], "without config.json"),
    (["--model.name={home}/broken"], "broken/config.json: "),
    (["--model.name={home}/list"], "list/config.json holds a list"),
    (["--out={home}"], "which is not empty"),
    (["--out={home}/own"], "own, which is not empty"),
    (["--data.train={home}", "--out={home}/runs/a"], "runs/a, within {home} of data.train"),
    (["--data.train={home}/own", "--data.cache_dir={home}/own/c"], "own/c, within {home}/own of"),
    (["--out={home}/file"], "is no folder"),
    (["--out={home}/file/run"], "is no folder"),
    (["--train.lr=-1"], "train.lr = '-1'"),
    (["--chunks.sample.rule=fixed"], "rate = None, chunks = None"),
    (["--chunks.sample={rate: 0.5, chunks: 3}"], "rate = 0.5, chunks = 3"),
    (["--chunks.sample={rate: 0.5, cap: 2}"], "cap = 2.0 with rule unbiased"),
    (["--chunks.sample={chunks: 1, rule: fixed}"], "chunks = 1 with rule fixed"),
    (
        ["--chunks.sample={chunks: 3, rule: paper, label_rate: 0.5}"],
        "label_rate = 0.5 with rule paper",
    ),
]


def test_paths_and_keys(tiny_run: TinyRun, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "options.json").write_text("{}")
    for name, text in (("broken", '{"model_type": '), ("list", "[1]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    messages = refused(
        *(
            tiny_run.arguments(
                tmp_path / "run", *(flag.replace("{home}", str(tmp_path)) for flag in flags)
            )
            for flags, _ in PATHS_AND_KEYS
        )
    )
    for (flags, part), message in zip(PATHS_AND_KEYS, messages, strict=True):
        assert part.replace("{home}", str(tmp_path)) in message, flags
    assert not (tmp_path / "run").exists()


def test_another_launcher(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert main(tiny_run.arguments(tmp_path / "run")) == 2
    message = capsys.readouterr().err
    assert "given:    2 processes of mpirun" in message and "torchrun" in message


def test_run_folders(tiny_run: TinyRun, tmp_path: Path) -> None:
    run, edited, damaged = (tmp_path / name for name in ("run", "edited", "damaged"))
    for folder in (run, edited, damaged):
        tiny_run.leave_run(folder)
    (edited / "config.json").write_text((edited / "config.json").read_text()[:-20])
    (damaged / "report.json").unlink()
    shutil.rmtree(damaged / "model")
    for checkpoint in (damaged / "checkpoints").iterdir():
        (checkpoint / "manifest.json").unlink()
    messages = refused(
        tiny_run.arguments(run),
        tiny_run.arguments(run, "--train.lr=0.5", "--resume"),
        tiny_run.arguments(edited, "--resume"),
        tiny_run.arguments(damaged, "--resume"),
    )
    assert "which holds a run" in messages[0]
    assert "train.lr = 0.5, the run has" in messages[1]
    assert "config.json" in messages[2]
    assert "damaged checkpoints and no other" in messages[3]


def test_a_finished_run_needs_no_torch(tiny_run: TinyRun, tmp_path: Path) -> None:
    arguments = tiny_run.arguments(tmp_path / "run", "--train.epochs=1")
    tiny_run.leave_run(tmp_path / "run", "--train.epochs=1")
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments, "--resume"], capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    assert "is finished" in finished.stdout


def test_exports(tiny_run: TinyRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    tiny_run.leave_run(run, "--train.epochs=1")
    cases = (
        ([str(tmp_path / "nowhere")], "which is no folder"),
        ([str(run), "--merge"], "--merge for a checkpoint without adapters"),
        ([str(run), f"--out={run / 'model'}"], "model exists"),
        ([str(run), f"--out={run / 'report.json' / 'x'}"], "is no folder"),
    )
    messages = refused(*(["export", *arguments] for arguments, _ in cases))
    for (_, part), message in zip(cases, messages, strict=True):
        assert part in message


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"},
        {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "LRU_CACHE_CAPACITY": "7"},
    ],
)
def test_what_torch_reads_at_its_start_is_set_unless_the_user_has_set_it(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
    if not any("ALLOC_CONF" in name for name in given):
        expected["PYTORCH_ALLOC_CONF"] = (
            "expandable_segments:True,"
            "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
        )
    environment = dict(given)
    monkeypatch.setattr(cli_train, "os", SimpleNamespace(environ=environment))
    cli_train.set_allocators()
    assert environment == expected | given
