"""`furlong plan` with more than can be planned for: told at once, in four parts, without torch."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from furlong.cli.main import main
from furlong.cli.plan import parse_flags
from furlong.cli.question import question_of
from furlong.cost.shape import known_models
from furlong.report.patience import patience

QUICK = ["--chunks.method", "chunkflow"]


@pytest.fixture(autouse=True, scope="module")
def loaded() -> None:
    """The seconds of a refusal are not those of imports."""
    for name in ("furlong.cli.plan", "furlong.cost.lengths", "furlong.config.schema"):
        importlib.import_module(name)


def plan(*flags: str) -> int:
    """A plan of 4 sequences of a preset, but for what the flags change."""
    given = {
        "--lengths": "wikipedia", "--sequences": "4", "--model.name": "Qwen2.5-0.5B",
        "--hardware": "RTX4090", "--chunks.method": "chunkflow",
    }  # fmt: skip
    given |= dict(zip(flags[::2], flags[1::2], strict=True))
    return main(["plan", *(word for pair in given.items() for word in pair)])


def assert_refused(capsys: Any, *parts: str) -> None:
    message = capsys.readouterr().err
    labels = re.findall("^(given|required|from|change): ", message, re.MULTILINE)
    assert labels == ["given", "required", "from", "change"], message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--devices", "1000000000"], "at most 65,536"),
        (["--sequences", "100000000"], "at most 16,384"),
        (["--hardware", ""], "hardware ''"),
        (["--model.name", "x" * 5000], "model 'xxx"),
        (["--lengths", "x" * 5000], "length preset 'xxx"),
        (["--out", "a.json", "--trace", "a.json"], "two files"),
        (["--parallel.pp", "99999999"], "at most 65,536"),
        (["--parallel.dp", "60000", "--parallel.sp", "2"], "120,000 devices"),
        (["--train.seed", "1" + 30 * "0"], "less than 4294967296"),
        (["--data.max_seq_len", "1" + 30 * "0"], "equal to 1000000000000"),
        (["--chunks.size", "9" * 13], "equal to 1000000000000"),
        (["--chunks.num_retained", "-1"], "equal to 0"),
        (["--memory.device", "100000000TiB"], "more memory than there is"),
        (["--devices", "0"], "at least 1"),
        (["--sequences", "-3"], "at least 1"),
        (["--devices", "9" * 5000], "--devices"),
    ],
)
def test_flags_have_bounds(flags: list[str], told: str, capsys: Any) -> None:
    started_s = time.process_time()
    assert plan(*flags) == 2
    assert_refused(capsys, told)
    assert time.process_time() - started_s < 1


@pytest.mark.parametrize(
    ("listed", "told"),
    [
        ("[10, 1000000000000000]", "more than 100,000,000"),
        ("1000000000000000000", "a sequence of 1e+18 tokens"),
        ("2147483649", "more than 2,147,483,648"),
        ("1" + "0" * 6000, "lens.json"),
        ("NaN", "among its lengths"),
        ("[true, 3]", "among its lengths"),
        ("[" * 100_000, "lens.json"),
    ],
)
def test_lengths_have_bounds(tmp_path: Path, listed: str, told: str, capsys: Any) -> None:
    file = tmp_path / "lens.json"
    file.write_text(f'{{"version": 1, "lengths": [100, {listed}]}}')
    started_s = time.process_time()
    assert plan("--lengths", str(file)) == 2
    assert_refused(capsys, told, str(file))
    assert time.process_time() - started_s < 2


def test_chunks_of_one_sequence_have_a_bound(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "lens.json"
    file.write_text('{"version": 1, "lengths": [16777216]}')
    assert plan("--lengths", str(file), "--chunks.size", "16") == 2
    assert_refused(capsys, "1,048,576 of them", "at most 2,048 chunks", "chunks.size to 8,192")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"num_hidden_layers": 1_000_000_000}, "at most 512"),
        ({"hidden_size": 10**30}, "sizes and names of which transformers can build"),
        ({"num_attention_heads": 4096, "num_key_value_heads": 1}, "can build the model"),
        ({"head_dim": [64]}, "can read without remote code"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"text_config": 5, "hidden_size": None}, "hidden_size"),
        ({"model_type": "mixtral", "num_local_experts": "x"}, "num_local_experts"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 9},
         "not in range"),
        ({"model_type": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 1,
          "mlp_only_layers": ["a"]}, "mlp_only_layers"),
    ],
)  # fmt: skip
def test_a_config_without_the_sizes_of_a_decoder_is_told(
    tmp_path: Path, values: dict[str, Any], told: str, capsys: Any
) -> None:
    file = tmp_path / "config.json"
    config = known_models()["Qwen2.5-0.5B"]["config"]
    file.write_text(json.dumps(config | {"sliding_window": 8, "use_sliding_window": True} | values))
    assert plan("--model.name", str(tmp_path)) == 2
    assert_refused(capsys, told)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, "\x00"])
def test_a_config_that_is_no_json_object_is_told(tmp_path: Path, text: str, capsys: Any) -> None:
    (tmp_path / "config.json").write_text(text)
    assert plan("--model.name", str(tmp_path)) == 2
    assert_refused(capsys, "config.json")


def longest_line(text: str) -> str:
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("longest"))
    return " ".join(line.strip() for line in lines[first : first + 3])


def test_the_longest_sequence_stays_within_the_positions(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "config.json"
    for positions, told in (
        (4096, "alone, planned in the same way, 4,096 would: the model's positions"),
        (64, "but the model has 64 positions: longer sequences need model.rope"),
    ):
        sizes = {"max_position_embeddings": positions, "num_hidden_layers": 2}
        file.write_text(json.dumps(known_models()["Qwen2.5-0.5B"]["config"] | sizes))
        assert plan("--model.name", str(file), "--model.lora.rank", "8") == 0
        assert told in longest_line(capsys.readouterr().out)


RUN = """\
model: {{name: {folder}, dtype: float32{rope}}}
data: {{train: [{folder}/data.txt], max_seq_len: 640}}
"""


def run_of(folder: Path, rope: str = "", **values: Any) -> str:
    """A run file of a tiny model with 512 positions, with its lengths beside it."""
    config = known_models()["Qwen2.5-0.5B"]["config"] | {"max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config | values))
    (folder / "data.txt").write_text("text")
    (folder / "run.yaml").write_text(RUN.format(folder=folder, rope=rope))
    (folder / "run.lengths.json").write_text('{"version": 1, "lengths": [300, 20]}')
    return str(folder / "run.yaml")


@pytest.mark.parametrize(
    ("rope", "original", "positions"),
    [
        ("", None, 512),
        (", rope: {rope_type: yarn, factor: 4}", None, 2048),
        (", rope: {rope_type: yarn, factor: 4}", 256, 1024),
        (", rope: {rope_type: linear, factor: 4, original_max_position_embeddings: 300}",
         256, 1200),
        (", rope: {rope_type: default, rope_theta: 1.0e6}", None, 640),
    ],
)  # fmt: skip
def test_a_runs_rope_counts_among_the_positions(
    tmp_path: Path, rope: str, original: int | None, positions: int
) -> None:
    scaling = {"original_max_position_embeddings": original} if original else None
    run = run_of(tmp_path, rope, rope_scaling=scaling)
    assert question_of(parse_flags([run])).num_positions == positions


def test_a_run_on_one_device_is_not_told_to_use_more(tmp_path: Path, capsys: Any) -> None:
    for budget in ("1", "1MiB"):
        assert main(["plan", run_of(tmp_path), "--memory.device", budget]) == 2
        message = capsys.readouterr().err
        change = message[message.index("change:") :]
        assert "a larger memory.device" in change
        for word in ("ZeRO", "devices", "stages", "sp ", "host"):
            assert word not in change


def test_long_work_says_that_it_goes_on(capsys: Any) -> None:
    with patience("counting sheep", every_s=0.02) as tell:
        time.sleep(0.05)
        tell("12 of 30")
        time.sleep(0.05)
    printed = capsys.readouterr().err
    assert re.search(r"counting sheep: [\d.]+ ms so far\n", printed)
    assert re.search(r"counting sheep: [\d.]+ ms so far, 12 of 30\n", printed)
    with patience("counting sheep", every_s=0.02):
        pass
    with patience("counting sheep", every_s=0.01, speaks=False):
        time.sleep(0.03)
    assert capsys.readouterr().err == ""


def test_bounds_are_told_without_torch() -> None:
    code = (
        "import sys; from furlong.cli.main import main\n"
        "assert main(['plan', '--lengths', 'github', '--devices', '9999999999']) == 2\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(("budget", "told"), [("80GB", 0), ("81GiB", 1)])
def test_a_budget_above_the_memory_of_the_card_is_told(budget: str, told: int) -> None:
    lengths = "--lengths=github", "--model.name=Qwen2.5-0.5B", "--hardware=H100"
    said = question_of(parse_flags([*lengths, "--memory.device", budget])).lines()["warning"]
    assert said == "memory.device, more than the 79.6 GiB that H100 has" * told
