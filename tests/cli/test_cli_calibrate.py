"""`furlong calibrate`: what cannot work is refused before minutes are spent on measuring."""

from __future__ import annotations

import pytest

from furlong.calibrate import run
from furlong.cli.main import main


@pytest.mark.parametrize("folder", ["/dev/shm", "nowhere"])
def test_a_folder_that_cannot_be_measured_is_refused_at_once(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "calibrate", lambda *_, **__: pytest.fail("measured"))
    arguments = ["calibrate", f"--disk-dir={folder}", "--out=c.json", "--device=cpu"]
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert f"given:    {folder}" in message
    assert "from:     --disk-dir" in message
    assert "change:   name a folder on the drive that runs will use" in message
