"""`furlong plan` on saved plans: what it prints and writes, and how it refuses."""

import json
import subprocess
import sys

import pytest
from papers.chunkflow_plan import plan_chunkflow

from furlong.cli.main import main
from furlong.cli.planning import show
from furlong.errors import ConfigError
from furlong.plan.text import save_plan
from furlong.planners.options import ChunkOptions


@pytest.fixture
def saved(tmp_path):
    options = ChunkOptions(size=2, num_retained=1, keep="kv", hybrid=False)
    plan = plan_chunkflow((1, 1, 2, 4), options, stages=(1,) * 4)
    path = tmp_path / "figure 6.json"
    path.write_text(save_plan(plan))
    return path


def test_prints_the_plan_and_its_figures(saved, capsys):
    assert main(["plan", str(saved)]) == 0
    printed = capsys.readouterr().out
    assert "4 sequences, 8 tokens, 4 chunks" in printed
    assert "chunk 1: split, 2 tokens, 3:2-4" in printed
    assert "rank 3\n  recv activation 0.2 from 2, F0.3 kv" in printed
    assert "step 44 units, bubble 45.45%" in printed
    assert "forward 18.2%   ·   backward 36.4%   ·   recompute 4.5%   ·   idle 40.9%" in printed


def test_json_holds_the_figures(saved, capsys):
    assert main(["plan", str(saved), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["duration_s"] == 44
    assert figures["time_unit"] == "units"
    assert figures["bubble_ratio"] == pytest.approx(1 - 24 / 44)
    assert len(figures["ranks"]) == 4


def test_writes_pictures_and_traces(saved, tmp_path, capsys):
    for name in ("a.png", "a.svg"):
        arguments = ["--picture", str(tmp_path / name), "--trace", str(tmp_path / "a.json")]
        assert main(["plan", str(saved), *arguments]) == 0
        assert f"wrote {tmp_path / name}" in capsys.readouterr().out
        assert (tmp_path / name).stat().st_size > 1000
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("old", "new", "given"),
    [
        ('"version": 5', '"version": 7', "version 7"),
        ('"B1.0"', '"B1.0 x"', "'B1.0 x'"),
        ('"R0.0"', '"R0.0",\n "R0.0"', "the graph of 0.0 is there already"),
    ],
)
def test_refuses_plans_that_were_edited(saved, old, new, given, capsys):
    text = saved.read_text()
    assert old in text
    saved.write_text(text.replace(old, new, 1))
    assert main(["plan", str(saved)]) == 2
    message = capsys.readouterr().err
    assert given in message
    assert str(saved) in message
    assert "change:" in message


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ([], "no --lengths"),
        (["no such.json"], "No such file"),
        (["plan.json", "--picture", "a.gif"], "--picture a.gif"),
        (["plan.json", "--trace", "a.png"], "--trace a.png"),
        (["run.yaml", "--out=runs/first"], "or leave --out out: a run's folder"),
        (["plan.json", "--colour"], "--colour"),
    ],
)
def test_refuses_what_it_cannot_read_or_write(arguments, given, capsys):
    assert main(["plan", *arguments]) == 2
    message = capsys.readouterr().err
    assert given in message
    assert [line[:8] for line in message.splitlines()] == [
        "given:  ", "required", "from:   ", "change: ",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "enough", "found", "num_tried"),
    [
        (["--hardware=H100"], {"devices": 4}, "smallest   4 x H100; too small: 1 x H100, 2", 3),
        ([], {"hardware": "A100-40"}, "smallest   1 x A100-40; too small: 1 x A10G, 1 x L4, ", 5),
        (["--devices=2"], {"hardware": "A10G"}, "smallest   2 x A10G\n", 1),
        (["--hardware=H100"], {"devices": 3}, "1024 x H100, the last of --smallest: too much", 11),
        (["--memory.device=40GiB"], {}, "smallest   1 x A100-40; too small: 1 x A10G, 1 x L4, ", 1),
        (["--model.name=nothing"], {}, "given:    model 'nothing'\n", 0),
        (["--compare"], {}, "--smallest with --compare", 0),
    ],
)
def test_the_smallest_card_or_number_of_cards(flags, enough, found, num_tried, capsys, monkeypatch):
    tried = []

    def search(flags, tell):
        tried.append(vars(flags.own).items())
        if not enough.items() <= tried[-1]:
            raise ConfigError(given="too much", required="less", source="", change="")

    monkeypatch.setattr(show, "show_search", search)
    asked = "--lengths=github", "--model.name=Qwen2.5-0.5B"
    assert main(["plan", *asked, "--smallest", *flags]) in (0, 2)
    printed = capsys.readouterr()
    assert found in printed.out + printed.err and len(tried) == num_tried


def test_help_loads_nothing_heavy():
    program = (
        "import sys\n"
        "import furlong.cli.plan\n"
        "from furlong.cli.main import main\n"
        "assert 'pydantic' not in sys.modules\n"
        "try:\n"
        "    main(['plan', '--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "assert not {'torch', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules)\n"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "PLAN.json" in finished.stdout
    for flag in ("--lengths", "--chunks.size", "--train.seed", "--model.lora.rank"):
        assert flag in finished.stdout


@pytest.mark.parametrize(
    ("text", "told"), [("[" * 100_000, "no JSON"), ("sp_size", "1,000,000,000,000 devices")]
)
def test_plans_that_nobody_can_have_are_told(saved, text, told, capsys):
    if text == "sp_size":
        text = json.dumps(json.loads(saved.read_text()) | {"sp_size": 250_000_000_000})
    saved.write_text(text)
    assert main(["plan", str(saved)]) == 2
    assert told in capsys.readouterr().err


def test_a_measured_step_that_is_nested_without_end_is_told(tmp_path, capsys):
    (tmp_path / "timeline.json").write_text("[" * 100_000)
    assert main(["plan", str(tmp_path)]) == 2
    assert "timeline.json" in capsys.readouterr().err
