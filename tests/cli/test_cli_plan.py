"""`furlong plan` on saved plans: what it prints and writes, and how it refuses."""

import json
import subprocess
import sys

import pytest
from papers.chunkflow_plan import plan_chunkflow
from papers.unit_costs import UnitCosts

from furlong.cli import plan as verb
from furlong.cli.main import main
from furlong.errors import ConfigError
from furlong.plan.text import load_plan, save_plan
from furlong.planners.options import ChunkOptions
from furlong.simulate.clock import simulate
from furlong.timeline import MEASURED, MeasuredStep
from furlong.units import format_bytes


@pytest.fixture
def saved(tmp_path):
    options = ChunkOptions(size=2, num_retained=1, keep="kv", hybrid=False)
    plan = plan_chunkflow((1, 1, 2, 4), options, stages=(1,) * 4)
    path = tmp_path / "figure 6.json"
    path.write_text(save_plan(plan))
    return path


def test_prints_a_measured_step_and_its_figures(saved, tmp_path, capsys):
    plan = load_plan(saved.read_text())
    measured = MeasuredStep(3, plan, simulate(plan, UnitCosts(plan)))
    (tmp_path / MEASURED).write_text(json.dumps(measured.to_json()))
    assert main(["plan", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "4 sequences, 8 tokens, 4 chunks" in printed
    assert "chunk 1: split, 2 tokens, 3:2-4" in printed
    assert "rank 3\n  recv activation 0.2 from 2, F0.3 kv" in printed
    assert "step 44.0 s, lost 45.5%: recompute 4.5%, idle 40.9%" in printed
    assert "forward 18.2%   ·   backward 36.4%   ·   recompute 4.5%   ·   idle 40.9%" in printed
    assert main(["plan", str(tmp_path), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["step"], figures["duration_s"]) == (3, 44)
    assert figures["bubble_ratio"] == pytest.approx(1 - 24 / 44) and len(figures["ranks"]) == 4


@pytest.mark.parametrize(
    ("old", "new", "given"),
    [
        ('"version": 7', '"version": 8', "version = 8"),
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
        (["--lengths=3000000000", "--model.name=Llama-3-8B", "--hardware=H100"], "tokens of a seq"),
        (["no such.json"], "No such file"),
        (["plan.json", "--picture", "a.gif"], "--picture a.gif"),
        (["plan.json", "--trace", "a.png"], "--trace a.png"),
        (["run.yaml", "--out=runs/first"], "ends in .json"),
        (["plan.json", "--colour"], "--colour"),
        (["plan.json", "--compare"], "with a flag of the search (--compare)"),
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
    ("flags", "enough", "told", "num_tried"),
    [
        (["--hardware=H100"], {"devices": 4}, "4 x H100; no plan for 1 x H100, 2 x H100", 3),
        ([], {"hardware": "A100-40"}, "1 x A100-40; no plan for 1 x RTX4060-Laptop, 1 x A10G, ", 6),
        (["--devices=2"], {"hardware": "A10G"}, "2 x A10G", 2),
        (["--hardware=H100"], {"devices": 3}, "1024 x H100, the last of --smallest: too much", 11),
        (["--hardware=H100", "--parallel.dp=3"], {"devices": 6}, "no plan for 3 x H100", 2),
        (["--parallel.dp=3"], {"hardware": "A10G"}, "3 x A10G", 2),
        (["--hardware=L4", *(f"--parallel.{n}=2" for n in ("dp", "sp", "pp"))], {"devices": 9},
         "8 x L4, the last of --smallest: too much", 1),
        (["--memory.device=40GiB"], {}, "1 x A100-40", 1),
        (["--model.name=nothing"], {}, "given:    model 'nothing'\n", 0),
        (["--compare"], {}, "--smallest with --compare", 0),
        (["--hardware=H100", "--chunks.size=512"], {"devices": 9}, "given:    places with", 11),
    ],
)  # fmt: skip
def test_the_smallest_card_or_number_of_cards(flags, enough, told, num_tried, capsys, monkeypatch):
    tried = []

    def find(question, tell):
        hardware, devices = question.asked.model.hardware.name, question.asked.num_devices
        tried.append({"hardware": hardware, "devices": devices})
        if not enough.items() <= tried[-1].items():
            is_of_options = "--chunks.size=512" in flags
            given = "places with a dial" if is_of_options else f"too much: {devices}"
            most = "" if is_of_options else format_bytes(question.asked.limits.device_bytes)
            raise ConfigError(given=given, required=most, source="", change="")

    def show(found, question, chosen, tell, smallest):
        print(smallest)

    monkeypatch.setattr(verb, "find", find)
    monkeypatch.setattr(verb, "_show_found", show)
    asked = "--lengths=github", "--model.name=Qwen2.5-0.5B"
    assert main(["plan", *asked, "--smallest", *flags]) in (0, 2)
    printed = capsys.readouterr()
    assert told in printed.out + printed.err and len(tried) == num_tried


def test_help_loads_nothing_heavy():
    program = (
        "import sys\n"
        "from furlong.cli.main import main\n"
        "try:\n"
        "    main(['plan', '--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "assert not {'torch', 'transformers', 'matplotlib', 'scipy'} & set(sys.modules)\n"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "PLAN.json" in finished.stdout
    for flag in ("--lengths", "--chunks.size", "--train.seed", "--model.lora.rank"):
        assert flag in finished.stdout


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[" * 100_000, "no saved plan"),
        ("sp_size", "1,000,000,000,000 devices"),
        ('{"version": 1, "lengths": [9]}', "comes as --lengths "),
    ],
)
def test_plans_that_nobody_can_have_are_told(saved, text, told, capsys):
    if text == "sp_size":
        text = json.dumps(json.loads(saved.read_text()) | {"sp_size": 250_000_000_000})
    saved.write_text(text)
    (saved.parent / "timeline.json").write_text("[" * 100_000)  # a measured step
    for named, words in ((saved, told), (saved.parent, "timeline.json")):
        assert main(["plan", str(named)]) == 2
        assert words in capsys.readouterr().err
