"""The command line of `furlong export` and of `--resume`; what they do is tested in tests/train."""

from __future__ import annotations

import pytest

from furlong.cli.main import main


def test_resume_is_a_switch_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "--resume" in capsys.readouterr().out
    for flag, part in (("--resume=yes", "resume"), ("--resmue", "did you mean --resume?")):
        assert main(["train", "--model.name=x", "--data.train=y", flag]) == 2
        assert part in capsys.readouterr().err
