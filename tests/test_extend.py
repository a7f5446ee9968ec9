"""`docs/extend.md`: each diff is applied to a copy of the source, and its command is run."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.tiny_runs import build_tiny_run

ROOT = Path(__file__).parents[1]
SECTIONS = dict(
    re.findall(r"^## (.*)\n((?:(?!^## ).*\n)*)", (ROOT / "docs/extend.md").read_text(), re.M)
)


@pytest.fixture
def follow(tmp_path):
    """Applies the diff of a section, and gives what its command or program prints."""

    def follow_section(name):
        text = SECTIONS[name]
        [diff] = re.findall(r"```diff\n(.*?)```", text, flags=re.DOTALL)
        shutil.copytree(ROOT / "src", tmp_path / "src")
        apply = ["git", "apply", "--unidiff-zero", "-"]
        subprocess.run(apply, input=diff, text=True, cwd=tmp_path, check=True)
        [(kind, code)] = re.findall(r"```(bash|python)\n(.*?)```", text, flags=re.DOTALL)
        commands = [["-c", code]]
        if kind == "bash":
            commands = [["-m", *line.split()] for line in code.splitlines()]
        for command in commands:
            run = subprocess.run(
                [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True,
                timeout=120,
                env=os.environ | {"PYTHONPATH": str(tmp_path / "src"), "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
            if run.returncode:
                break
        return run.returncode, run.stdout, run.stderr

    return follow_section


@pytest.mark.slow
def test_a_planner_reaches_a_plan(follow):
    code, printed, error = follow("A planner")
    assert code == 0 and re.search(r"^plan +whole, .*size 9000", printed, re.M), error


@pytest.mark.slow
def test_a_kernel_reaches_a_step(follow):
    code, printed, error = follow("A kernel of attention")
    assert code == 0 and printed.startswith("Dense "), error


@pytest.mark.slow
def test_a_loss_reaches_the_metrics_of_a_run(follow, tmp_path):
    _, *flags = build_tiny_run(tmp_path).arguments(tmp_path / "out", "--train.steps=1")
    keys = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
    keys["train.epochs"] = "null"
    (tmp_path / "run.yaml").write_text(nested(keys))
    code, printed, error = follow("A loss")
    assert code == 0 and re.search(r"^batch +3 sequences", printed, re.M), error
    first = json.loads((tmp_path / "out/metrics.jsonl").read_text().splitlines()[0])
    assert first["bits"] == pytest.approx(first["loss"] / 0.6931)


def nested(keys):
    """The YAML of dotted keys."""
    sections = {}
    for name, value in keys.items():
        section, _, key = name.rpartition(".")
        sections.setdefault(section, []).append(f"{'  ' * bool(section)}{key}: {value}\n")
    return "".join(f"{name}:\n" * bool(name) + "".join(own) for name, own in sections.items())


@pytest.mark.slow
def test_a_record_format_is_read(follow, tmp_path):
    build_tiny_run(tmp_path)
    (tmp_path / "papers.jsonl").write_text('{"title": "On rows", "abstract": "They add up."}\n')
    code, printed, error = follow("A record format")
    assert code == 0 and "format paper" in printed, error


@pytest.mark.slow
def test_a_row_of_a_family_reaches_a_plan(follow, tmp_path):
    build_tiny_run(tmp_path)
    code, _, error = follow("A family of models")
    assert code == 2 and "is refused by this diff" in error
