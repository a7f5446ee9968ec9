"""Exit codes, messages and speed of the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from furlong.cli.main import main
from furlong.cli.output import check_replaced
from furlong.families import versions_in_words

CALL = "import sys; from furlong.cli.main import main; code = main(sys.argv[1:]); "


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    assert "train RUN.yaml" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{versions_in_words()}\n"


def test_an_unknown_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "did you mean furlong train?" in capsys.readouterr().err


def test_what_the_user_can_mend_ends_with_2_and_four_parts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--train.lrr=3"]) == 2
    message = capsys.readouterr().err
    assert [line.split(":")[0] for line in message.splitlines()] == [
        "given", "required", "from", "change",
    ]  # fmt: skip


def test_what_a_command_line_lacks_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume"]) == 2
    assert "name a run file" in capsys.readouterr().err


LOGGING = """
import logging, furlong
logging.getLogger("torchao").warning("Failed to load _C_mxfp8.so")
logging.getLogger("torch.utils._pytree").warning("%s is an Enum subclass", "<enum 'Kind'>")
logging.getLogger("torchao").warning("news")
"""


def test_what_torchao_logs_as_it_is_imported_is_left_out_of_python_too() -> None:
    finished = subprocess.run([sys.executable, "-c", LOGGING], capture_output=True, text=True)
    assert (finished.returncode, finished.stderr) == (0, "news\n")


def test_our_own_failure_ends_with_1_and_a_traceback(tmp_path: Path) -> None:
    program = "import furlong.cli.train as verb; verb.run = lambda rest: 1 / 0; "
    finished = subprocess.run(
        [sys.executable, "-c", program + CALL + "sys.exit(code)", "train"],
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 1
    assert "Traceback" in finished.stderr


ENDING = """
import atexit, sys
from furlong.cli import main as module

class Torch:
    def __del__(self):
        print("taken apart")

def work(arguments):
    atexit.register(print, "handler")
    sys.modules["torch"] = Torch()
    print("done")
    if arguments:
        raise ZeroDivisionError
    return 3

module._dispatch = work
module.command()
"""


@pytest.mark.parametrize(
    ("arguments", "code", "printed"),
    [([], 3, "done\nhandler\n"), (["fail"], 1, "done\nhandler\ntaken apart\n")],
)
def test_the_program_ends_behind_its_handlers(
    arguments: list[str], code: int, printed: str
) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", ENDING, *arguments], capture_output=True, text=True
    )
    assert (finished.returncode, finished.stdout) == (code, printed)
    assert ("ZeroDivisionError" in finished.stderr) == (code == 1)


# Ends where torch or transformers would be loaded.
LOADING = """
import os, sys

class Block:
    def find_spec(self, name, *_):
        if name in ("torch", "transformers"):
            os._exit(7)

sys.meta_path.insert(0, Block())
from furlong.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "arguments",
    ["train run.yaml", "lengths t.jsonl --tokenizer=m", "plan run.yaml", "verify"],
)
def test_a_verb_says_so_before_it_loads_torch(tmp_path: Path, arguments: str) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "t.jsonl").write_text('{"text": "a"}')
    (tmp_path / "run.yaml").write_text("model: {name: m}\ndata: {train: t.jsonl}\n")
    finished = subprocess.run(
        [sys.executable, "-c", LOADING, *arguments.split()], cwd=tmp_path,
        capture_output=True, text=True,
    )  # fmt: skip
    said = finished.stderr.splitlines()[-1]
    assert (finished.returncode, said) == (7, "loading torch and transformers ...")
    printed = finished.stdout.splitlines()
    assert printed[:1] == ([versions_in_words()] if arguments.startswith("train") else [])


def test_help_is_light() -> None:
    """A module takes about a millisecond to import, torch takes seconds."""
    program = (
        "import sys\n"
        "from furlong.cli.main import main\n"
        "for verb in sys.argv[1:]:\n"
        "    try:\n        main([verb, '--help'])\n"
        "    except SystemExit:\n        pass\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert len(sys.modules) < 350, len(sys.modules)\n"
    )
    call = [sys.executable, "-c", program, "train", "export", "lengths"]
    finished = subprocess.run(call, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    said = finished.stdout
    for words in (
        "--train.lr NUMBER", "--memory.device {24GiB,auto}", "Peak learning rate",
        "RUN_OR_CHECKPOINT", "--tokenizer T",
    ):  # fmt: skip
        assert words in said
    assert not any(word in said for word in ("tuple[", "dict[", "None)", "int}"))


def test_memory_that_loses_its_file_ends_with_a_place() -> None:
    program = CALL + "import os, signal; os.kill(os.getpid(), signal.SIGBUS)"
    call = [sys.executable, "-c", program, "--version"]
    finished = subprocess.run(call, capture_output=True, text=True)
    assert finished.returncode < 0
    assert "Fatal Python error: Bus error" in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["lengths", "run.json", "--out=run.json"], "run.json"),
        (["lengths", "data", "--tokenizer=t", "--picture=photo.png"], "photo.png"),
        (["plan", "run.json", "--trace=lengths.json"], "lengths.json"),
        (["calibrate", "run.json", "--out=run.json"], "run.json"),
    ],
)
def test_a_file_of_the_user_is_not_replaced(
    arguments: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    text = json.dumps({"model": {"name": "m"}, "data": {"train": "d"}, "lengths": [1]})
    (tmp_path / name).write_text(text if name == "lengths.json" else text.replace("lengths", "x"))
    (tmp_path / "run.json").write_text(text.replace("lengths", "x"))
    before = (tmp_path / name).read_text()
    assert main(arguments) == 2
    assert f"given:    {name}, which is there and is something else" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == before


@pytest.mark.parametrize(
    ("name", "content", "keys"),
    [
        ("a.json", b'{"version": 1, "lengths": []}', ("lengths",)),
        ("a.json", b" \n", ("lengths",)),
        ("a.png", b"\x89PNG\r\n", ()),
        ("a.svg", b"<?xml version", ()),
        ("new.json", None, ("lengths",)),
    ],
)
def test_what_furlong_wrote_may_be_replaced(
    name: str, content: bytes | None, keys: tuple[str, ...], tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    check_replaced(tmp_path / name, "--out", *keys)
