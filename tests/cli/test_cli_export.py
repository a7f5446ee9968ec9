"""The command line of `furlong export` and of `--resume`; what they do is tested in tests/train."""

from __future__ import annotations

import subprocess
import sys

import pytest

from furlong.cli.main import main


def test_help_of_export_is_light() -> None:
    program = (
        "import atexit, os, sys\n"
        "def look():\n"
        "    if {'torch', 'transformers', 'numpy'} & set(sys.modules): os._exit(9)\n"
        "atexit.register(look)\n"
        "from furlong.cli.main import main\n"
        "main(['export', '--help'])\n"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "RUN_OR_CHECKPOINT" in finished.stdout and "--merge" in finished.stdout


def test_resume_is_a_switch_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "--resume" in capsys.readouterr().out
    for flag, part in (("--resume=yes", "resume"), ("--resmue", "did you mean --resume?")):
        assert main(["train", "--model.name=x", "--data.train=y", flag]) == 2
        assert part in capsys.readouterr().err
