"""`furlong plan` on lengths: what it chooses, prints and writes; bad input, item by item, and more
than can be planned for: told at once, in four parts, without torch."""

import importlib
import json
import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from furlong.cli.main import main
from furlong.cli.plan import parse_flags
from furlong.cli.plan_question import question_of
from furlong.cost.lengths import length_preset, length_presets
from furlong.cost.shape import known_models, model_shape
from furlong.plan.check import check
from furlong.plan.lengths import Lengths
from furlong.plan.text import load_plan, save_plan
from furlong.planners import search
from furlong.planners.search import METHODS
from furlong.report.patience import patience
from furlong.report.report import report_plan

MIXED = [9000, 3000, 700, 300, 120, 90]
QUICK = ["--chunks.method=chunkflow"]
"""Where it does not matter what is chosen: few candidates."""


@pytest.fixture
def lengths(tmp_path):
    path = tmp_path / "lens.json"
    path.write_text(json.dumps({"version": 1, "lengths": MIXED}))
    return path


def plan(lengths, *flags, model="Qwen2.5-0.5B", hardware="RTX4090"):
    return main(
        ["plan", "--lengths", str(lengths), "--model.name", model, "--hardware", hardware, *flags]
    )


def refused(capsys, *parts):
    """Asserts one message of four parts on stderr that holds `parts`."""
    message = capsys.readouterr().err
    labels = re.findall("^(given|required|from|change): ", message, re.MULTILINE)
    assert labels == ["given", "required", "from", "change"], message
    for part in parts:
        assert part in message
    return message


def test_prints_what_was_chosen_and_why(lengths, monkeypatch, capsys):
    said = []

    @contextmanager
    def noted(what):
        yield said.append

    monkeypatch.setattr("furlong.cli.plan.patience", noted)
    assert plan(lengths, "--devices", "2") == 0
    found = [re.search(r"(\S+) candidates?, (?:best|none fits) ", words) for words in said]
    counts = [int(one[1].replace(",", "")) for one in found if one]
    assert len(counts) > 1 and counts == sorted(counts)
    page = capsys.readouterr().out
    printed = " ".join(page.split())
    assert max(map(len, page.replace(str(lengths), "lens.json").splitlines())) <= 80
    heads = [line.split("  ")[0] for line in page.splitlines() if line[0] != " "]
    assert heads == [
        "batch", "model", "devices", "figures", "plan", "chunks", "order",
        "offload", "layout", "weights", "step", "MFU", "lost", "pool", "memory", "longest",
        "runs here", "auto", "search",
    ]  # fmt: skip
    assert f"6 sequences, 13.2K tokens, longest 9,000: all of {lengths}" in printed
    assert "2 x RTX4090" in printed
    assert "tokens/s" in printed
    assert "weights" in printed and "optimizer" in printed and "activations" in printed
    assert "9,000 tokens in the data (in the batch): fits" in printed
    assert "runs here yes: torchrun --nproc-per-node 2 -m furlong train" in printed


def test_json_is_one_object_with_everything(lengths, tmp_path, capsys):
    flags = ["--devices", "2", "--json", "--out", str(tmp_path / "plan.json")]
    assert plan(lengths, *flags) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["batch"]["num_tokens"] == sum(MIXED)
    assert values["tokens_per_s"] == pytest.approx(sum(MIXED) / values["step_s"])
    assert sum(values["breakdown"].values()) == pytest.approx(1)
    layout = values["layout"]
    assert layout["dp"] * layout["sp"] * layout["pp"] == 2
    assert values["next_best"]["step_s"] > values["step_s"]
    assert values["longest_sequence_tokens"] >= max(MIXED)
    assert max(rank["device_bytes"] for rank in values["memory"]) == values["peak_bytes"]
    saved = load_plan((tmp_path / "plan.json").read_text())
    check(saved)
    assert sorted(saved.seq_lens) == sorted(MIXED)


def test_a_saved_plan_is_predicted_again_with_the_same_figures(lengths, tmp_path, capsys):
    file = str(tmp_path / "plan.json")
    flags = ["--devices=2", "--parallel.sp=2", "--memory.device=20GiB", "--model.lora.rank=4"]
    assert plan(lengths, *QUICK, *flags, "--json", "--out", file) == 0
    first = json.loads(capsys.readouterr().out)
    assert not json.loads(Path(file).read_text())["regathers"]
    assert main(["plan", file, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    for name in ("step_s", "tokens_per_s", "memory", "budget_bytes"):
        assert again[name] == first[name]
    assert again["fits"] and again["layout"] == first["layout"]
    assert main(["plan", file, "--json", "--hardware", "H100"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] < first["step_s"] / 3
    assert main(["plan", file]) == 0
    printed = capsys.readouterr().out
    assert "2 x RTX4090, Qwen2.5-0.5B" in printed and "units" not in printed
    assert "runs here  no: it needs " in printed
    assert main(["plan", file, "--memory.device", "3GiB"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"runs here  no: it needs [\d.]+ GiB on a device that has 3 GiB, ", printed)
    assert main(["plan", file, "--memory.device", "3GiB", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert not values["fits"] and not values["runs_here"]
    assert values["peak_bytes"] == first["peak_bytes"] > values["budget_bytes"]
    assert main(["plan", file, "--model.name", "Qwen2.5-7B"]) == 2
    refused(capsys, "a model of 28 layers", "one of 24 layers")


def test_weights_in_cpu_memory_have_a_reason_and_are_saved_with_the_plan(lengths, tmp_path, capsys):
    file = str(tmp_path / "plan.json")
    flags = ["--memory.device=6GiB", "--memory.cpu=16GiB", "--chunks.size=1024", "--json"]
    assert plan(lengths, "--chunks.keep=attention", *flags, "--out", file) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["reasons"][0].startswith("weights on the CPU: ") and first["runs_here"]
    held = max(rank["cpu_bytes"] for rank in first["memory"])
    assert held >= first["weights"]["host_bytes"] == 16 * model_shape("Qwen2.5-0.5B").num_parameters
    assert main(["plan", file, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert all(again[name] == first[name] for name in ("step_s", "memory", "weights"))


def test_a_saved_plan_is_drawn_again(lengths, tmp_path, capsys):
    file, pages = str(tmp_path / "plan.json"), [tmp_path / "a.svg", tmp_path / "b.svg"]
    flags = [*QUICK, "--devices", "2", "--out", file, "--picture", str(pages[0])]
    assert plan(lengths, *flags, "--trace", str(tmp_path / "new" / "a.json")) == 0
    assert f"wrote {pages[0]}" in capsys.readouterr().out and "limit 2" in pages[0].read_text()
    assert json.loads((tmp_path / "new" / "a.json").read_text())["traceEvents"]
    assert main(["plan", file, "--picture", str(pages[1])]) == 0
    # matplotlib writes each text as a comment beside its outlines
    first, again = (re.findall(r"<!-- (.*?) -->", page.read_text()) for page in pages)
    assert (
        {word.replace("chunkflow", "plan") for word in first}
        >= {word for word in again if "idle" not in word}
        > {"forward"}
    )


def test_what_a_plan_was_made_for_is_checked_or_comes_from_flags(lengths, tmp_path, capsys):
    file = tmp_path / "plan.json"
    assert plan(lengths, *QUICK, "--chunks.size=4096", "--json", "--out", str(file)) == 0
    first = json.loads(capsys.readouterr().out)
    values = json.loads(file.read_text())
    for edited in ({"run": 5}, {"hardware": 4}, [1]):
        made_for = values["made_for"] | edited if isinstance(edited, dict) else edited
        file.write_text(json.dumps(values | {"made_for": made_for}))
        assert main(["plan", str(file)]) == 2
        refused(capsys, "made_for = ", str(file))
    file.write_text(save_plan(load_plan(json.dumps(values))))
    model = ["--model.name=Qwen2.5-0.5B", "--hardware=RTX4090"]
    assert main(["plan", str(file), *model, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == first["step_s"]
    for flag, missing in zip(model, ("--hardware", "--model.name"), strict=True):
        assert main(["plan", str(file), flag]) == 2
        refused(capsys, f"no {missing}")


def test_dials_that_are_given_are_kept(lengths, capsys):
    flags = ["--chunks.size", "3000", "--chunks.num_retained", "2", "--chunks.keep", "kv"]
    assert plan(lengths, *QUICK, *flags, "--parallel.pp", "2", "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["layout"]["pp"] == 2
    assert values["options"].items() >= {"size": 3000, "num_retained": 2, "keep": "kv"}.items()


def batch_of(lengths, *flags):
    asked = [f"--lengths={lengths}", "--model.name=Qwen2.5-0.5B", "--hardware=RTX4090", *flags]
    return question_of(parse_flags(asked)).batch


def test_a_batch_is_drawn_by_the_seed(lengths):
    drawn = [
        batch_of(lengths, "--sequences", "3", "--train.seed", seed) for seed in ("0", "0", "1")
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert "the longest of the 6" in drawn[0].source
    assert all(len(b.seq_lens) == 3 and max(b.seq_lens) == max(MIXED) for b in drawn)
    batch = batch_of(lengths, "--data.max_seq_len", "1000")
    assert len(batch.seq_lens) == 4 and "2 longer ones left out" in batch.source


@pytest.mark.parametrize("name", length_presets())
def test_a_batch_of_a_preset_has_its_longest_sequence(name):
    """Whatever is drawn beside it: as of a file, a plan that fits fits the worst step."""
    longest = length_preset(name).longest_tokens
    for flags, most, count in (
        ((), longest, 64),
        (("--sequences", "8", "--data.max_seq_len", "4096"), 4096, 8),
        (("--train.tokens_per_step", "20000", "--data.max_seq_len", "4096"), 4096, None),
        (("--sequences", "1", "--train.seed", "3"), longest, 1),
    ):
        batch = batch_of(name, *flags)
        assert max(batch.seq_lens) == batch.longest_tokens == batch.lengths.longest == most
        assert count in (None, len(batch.seq_lens))


def test_compares_every_method(lengths, tmp_path, capsys):
    lengths.write_text('{"version": 1, "lengths": [900, 300, 90]}')
    flags = ["--compare", "--devices", "2", "--parallel.pp", "2"]
    assert plan(lengths, *flags, "--json", "--picture", str(tmp_path / "c.svg")) == 0
    methods = json.loads(capsys.readouterr().out)["methods"]
    by_name = {method["method"]: method for method in methods}
    assert by_name.keys() == {"auto", *METHODS}
    assert by_name["auto"]["relative"] <= 1.01
    assert by_name["seco"]["refusal"].startswith("chunks.method = seco with parallel.pp")
    assert (tmp_path / "c.svg").read_text().count("limit of device memory") == 1


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--lengths", "wikipdia"], ["'wikipdia'", "did you mean wikipedia?"]),
        (["--lengths", "8k"], ["'8k'", "--lengths", "such as 8192, a .json"]),
        (["--model.name", "bert-base"], ["'bert-base'", "config.json, OWNER/NAME of the hub"]),
        (["--hardware", "H10"], ["'H10'", "did you mean H100"]),
        (["--model.name", "Qwen2.5-8B"], ["'Qwen2.5-8B'", "did you mean Qwen2.5-"]),
        (["--model.name", "no/such.json"], ["No such file"]),
        (["--chunks.method", "chunkflw"], ["'chunkflw'", "'chunkflow'"]),
        (["--chunks.siz", "4"], ["did you mean --chunks.size?"]),
        (["--model", "Qwen2.5-0.5B"], ["one of its keys: name", "did you mean --model.name?"]),
        (["--out", "plan.yaml"], ["--out plan.yaml", ".json"]),
        (["--compare", "--out", "plan.json"], ["--compare with --out"]),
        (["--data.max_seq_len", "50"], ["data.max_seq_len = 50", "at least 90 tokens"]),
        (["--offload=cpu", "--hardware=cpu"], ["on a CPU", "device"]),
        (["--devices=4", "--parallel.pp=3", "--parallel.sp=2"],
         ["dp auto x sp 2 x pp 3, a multiple of 6 devices", "multiply to 4 devices", "use 6"]),
        (["--devices=8", "--parallel.sp=3"], ["use 6 or 9 devices", "parallel.sp to 2, 4, 8"]),
        (["--devices=2", "--parallel.pp=2", "--chunks.stage_layers=4"],
         ["chunks.stage_layers, and parallel.pp", "set parallel.pp to 1"]),
        (["--devices=2", "--chunks.method=places", "--chunks.size=1024"],
         ["chunks.size with chunks.method = places", "leave chunks.size out"]),
        (["--chunks.method=places", "--offload={weights: cpu}"],
         ["offload with chunks.method = places", "leave offload out"]),
        ([*QUICK, "--offload={weights: cpu}"],
         ["chunks.method = chunkflow with offload on", "leave offload out"]),
        ([*QUICK, "--devices=2", "--memory.device=1GB"],
         ["optimizer", "954 MiB less a margin of 10%", "use more devices", "LoRA"]),
    ],
)  # fmt: skip
def test_a_flag_that_cannot_be_obeyed_is_told(lengths, flags, parts, capsys):
    assert plan(lengths, *flags) == 2
    refused(capsys, *parts)


def test_a_sequence_that_fits_nowhere_says_what_lacks_and_what_to_change(tmp_path, capsys):
    file = tmp_path / "lens.json"
    file.write_text('{"version": 1, "lengths": [4000000]}')
    assert plan(file, *QUICK, "--memory.device", "12GB", "--memory.cpu", "30GiB") == 2
    refused(capsys, "rank 0 needs", "K,V", "which lacks", "with memory.cpu: ")


RUN = """\
model: {{name: {model}, dtype: float32}}
data: {{train: [{data}], max_seq_len: {limit}, too_long: error}}
train: {{sequences_per_step: 4, seed: 3}}
"""


@pytest.fixture
def run_file(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        json.dumps(known_models()["Qwen2.5-0.5B"]["config"])
    )
    (tmp_path / "data.txt").write_text("text")
    file = tmp_path / "run.yaml"
    file.write_text(RUN.format(model=tmp_path / "model", data=tmp_path / "data.txt", limit=16384))
    return file


def test_a_run_file_takes_its_own_lengths_batch_seed_and_model(run_file, lengths, capsys):
    counted = run_file.with_name("run.lengths.json")
    counted.write_text(lengths.read_text())
    assert main(["plan", str(run_file), *QUICK, "--hardware", "RTX4090", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["batch"]["num_sequences"] == 4
    assert values["batch"]["source"] == (
        f"the longest of the 6 of {counted}, and 3 others drawn with seed 3"
    )
    assert values["num_devices"] == 1
    run = values["run"]
    assert run["steps"] == 100 and run["seconds"] == pytest.approx(100 * run["step_s"])
    assert run["seconds_between"][0] < run["seconds"] < run["seconds_between"][1]
    # the mean step is shorter than the one with the longest sequence, which is shown
    assert run["tokens_per_day"] == pytest.approx(
        round(4 * sum(MIXED) / 6) / run["step_s"] * 86_400
    )
    epochs = "--train.steps=null", "--train.epochs=2"
    assert main(["plan", str(run_file), *QUICK, "--hardware", "RTX4090", "--json", *epochs]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["steps"] == 4
    assert values["model"] == str(Path(run_file).parent / "model")


def test_a_run_that_refuses_a_sequence_as_too_long_does_not_run(run_file, lengths, capsys):
    run_file.with_name("run.lengths.json").write_text(lengths.read_text())
    asked = ["plan", str(run_file), *QUICK, "--hardware", "RTX4090", "--json"]
    for flags, runs in (((), True), (("--data.max_seq_len=1000",), False)):
        assert main([*asked, *flags]) == 0
        values = json.loads(capsys.readouterr().out)
        assert values["runs_here"] is runs and ("data.too_long" in values["refused"]) is not runs


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ([], "run.lengths.json"),
        (["--chunks.size=512", "--data.max_seq_len=9000"], "run.lengths.json"),
        (["--data.train=other.txt"], "data.train"),
        (["--data.too_long=truncate", "--data.max_seq_len=9000"], "data.train"),
    ],
)
def test_lengths_beside_a_run_file_are_of_its_own_data(run_file, flags, name, monkeypatch):
    """And not of what a flag makes of them, nor older than a file in a folder."""
    (folder := run_file.with_name("texts")).mkdir()
    (text := folder / "a.txt").write_text("text")
    run_file.write_text(run_file.read_text().replace("data.txt", "texts"))
    counted = run_file.with_name("run.lengths.json")
    counted.write_text('{"version": 1, "lengths": [[300, 3], 20]}')
    monkeypatch.setattr("furlong.cli.plan_question._count", lambda config: Lengths(((77, 4),)))
    assert name in question_of(parse_flags([str(run_file), *flags])).batch.source
    assert json.loads(counted.read_text())["lengths"] == [[300, 3], 20]
    later = counted.stat().st_mtime + 9
    os.utime(text, (later, later))
    assert question_of(parse_flags([str(run_file), *flags])).batch.seq_lens == (77,) * 4


def test_a_run_whose_data_would_be_refused_is_refused(run_file, lengths, capsys):
    run_file.write_text(run_file.read_text().replace("16384", "8192"))
    assert main(["plan", str(run_file), "--lengths", str(lengths)]) == 2
    refused(capsys, "a sequence of 9,000 tokens", "data.max_seq_len = 8,192", "too_long")


@pytest.mark.parametrize(
    ("flags", "given"),
    [
        (["--train.sequences_per_step=7"], "train.sequences_per_step = 7"),
        (["--parallel.dp=2", "--train.optimizer=adamw_8bit"], "train.optimizer: adamw_8bit with 2"),
        (["--data.train={folder}", "--data.cache_dir={folder}/c"], "within {folder} of data.train"),
        (["--train.loss=dpo", "--chunks.keep=all"], "chunks.keep = all with train.loss: dpo"),
    ],
)
def test_a_run_that_train_refuses_has_no_plan(run_file, lengths, flags, given, capsys):
    run_file.with_name("run.lengths.json").write_text(lengths.read_text())
    flags = [flag.format(folder=run_file.parent) for flag in flags]
    assert main(["plan", str(run_file), "--hardware", "RTX4090", *flags]) == 2
    refused(capsys, given.format(folder=run_file.parent))


@pytest.fixture(autouse=True, scope="module")
def loaded():
    """The seconds of a refusal are not those of imports."""
    for name in ("furlong.cli.plan", "furlong.cost.lengths", "furlong.config.schema"):
        importlib.import_module(name)


def plan_preset(*flags):
    """A plan of 4 sequences of a preset, but for what the flags change."""
    given = {
        "--lengths": "wikipedia", "--sequences": "4", "--model.name": "Qwen2.5-0.5B",
        "--hardware": "RTX4090", "--chunks.method": "chunkflow",
    }  # fmt: skip
    given |= dict(zip(flags[::2], flags[1::2], strict=True))
    return main(["plan", *(word for pair in given.items() for word in pair)])


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
def test_flags_have_bounds(flags, told, capsys):
    started_s = time.process_time()
    assert plan_preset(*flags) == 2
    refused(capsys, told)
    assert time.process_time() - started_s < 1


@pytest.mark.parametrize(
    ("listed", "told"),
    [
        ("[10, 1000000000000000]", "more than 100,000,000"),
        ("1000000000000000000", "= 1000000000000000000"),
        ("2147483649", "= 2147483649"),
        ("1" + "0" * 6000, "lens.json"),
        ("NaN", "= nan"),
        ("[true, 3]", "pair.0 = True"),
        ("[" * 100_000, "lens.json"),
    ],
)
def test_lengths_have_bounds(tmp_path, listed, told, capsys):
    file = tmp_path / "lens.json"
    file.write_text(f'{{"version": 1, "lengths": [100, {listed}]}}')
    started_s = time.process_time()
    assert plan_preset("--lengths", str(file)) == 2
    refused(capsys, told, str(file))
    assert time.process_time() - started_s < 2


def test_chunks_of_one_sequence_have_a_bound(tmp_path, capsys):
    file = tmp_path / "lens.json"
    file.write_text('{"version": 1, "lengths": [16777216]}')
    assert plan_preset("--lengths", str(file), "--chunks.size", "16") == 2
    refused(capsys, "chunks.size = 16 with a sequence", "at most 2,048", "chunks.size to 8,192")


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
def test_a_config_without_the_sizes_of_a_decoder_is_told(tmp_path, values, told, capsys):
    file = tmp_path / "config.json"
    config = known_models()["Qwen2.5-0.5B"]["config"]
    file.write_text(json.dumps(config | {"sliding_window": 8, "use_sliding_window": True} | values))
    assert plan_preset("--model.name", str(tmp_path)) == 2
    refused(capsys, told)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, "\x00"])
def test_a_config_that_is_no_json_object_is_told(tmp_path, text, capsys):
    (tmp_path / "config.json").write_text(text)
    assert plan_preset("--model.name", str(tmp_path)) == 2
    refused(capsys, "config.json")


def longest_line(text):
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("longest"))
    return " ".join(line.strip() for line in lines[first : first + 8])


def test_the_longest_sequence_stays_within_the_positions(tmp_path, capsys):
    file = tmp_path / "config.json"
    for positions, told in (
        (4096, "may have 4,096 tokens: the model's positions"),
        (64, "set model.rope: {rope_type: yarn, factor: "),
    ):
        sizes = {"max_position_embeddings": positions, "num_hidden_layers": 2}
        file.write_text(json.dumps(known_models()["Qwen2.5-0.5B"]["config"] | sizes))
        flags = "--model.name", str(file), "--model.lora.rank", "8", "--data.max_seq_len", "2000"
        assert plan_preset(*flags) == 0
        assert told in longest_line(capsys.readouterr().out)


RUN_OF_512 = """\
model: {{name: {folder}, dtype: float32{rope}}}
data: {{train: [{folder}/data.txt], max_seq_len: 640}}
"""


def run_of(folder, rope="", **values):
    """A run file of a tiny model with 512 positions, with its lengths beside it."""
    config = known_models()["Qwen2.5-0.5B"]["config"] | {"max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config | values))
    (folder / "data.txt").write_text("text")
    (folder / "run.yaml").write_text(RUN_OF_512.format(folder=folder, rope=rope))
    (folder / "run.lengths.json").write_text('{"version": 1, "lengths": [300, [20, 31]]}')
    return str(folder / "run.yaml")


@pytest.mark.parametrize(
    ("rope", "original", "positions"),
    [
        ("", None, 512),
        (", rope: {rope_type: yarn, factor: 4}", None, 2048),
        (", rope: {rope_type: yarn, factor: 4}", 256, 1024),
        (", rope: {rope_type: default, rope_theta: 1.0e6}", None, 640),
    ],
)  # fmt: skip
@pytest.mark.few(2)
def test_a_runs_rope_counts_among_the_positions(tmp_path, rope, original, positions):
    scaling = {"original_max_position_embeddings": original} if original else None
    run = run_of(tmp_path, rope, rope_scaling=scaling)
    assert question_of(parse_flags([run])).asked.model.shape.num_positions == positions


def test_a_run_on_one_device_is_not_told_to_use_more(tmp_path, capsys):
    for budget in ("1", "1MiB"):
        assert main(["plan", run_of(tmp_path), "--memory.device", budget]) == 2
        message = capsys.readouterr().err
        change = message[message.index("change:") :]
        assert "a larger memory.device" in change
        for word in ("ZeRO", "devices", "stages", "sp ", "cpu"):
            assert word not in change


def test_long_work_says_that_it_goes_on(capsys):
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


def test_bounds_are_told_without_torch():
    code = (
        "import sys; from furlong.cli.main import main\n"
        "assert main(['plan', '--lengths', 'github', '--devices', '9999999999']) == 2\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(("budget", "told"), [("80GB", 0), ("81GiB", 1)])
def test_a_budget_above_the_memory_of_the_card_is_told(budget, told):
    lengths = "--lengths=github", "--model.name=Qwen2.5-0.5B", "--hardware=H100"
    said = question_of(parse_flags([*lengths, "--memory.device", budget])).lines()["warning"]
    assert said == "memory.device, more than the 79.6 GiB that H100 has" * told


def test_a_step_above_the_budget_fits_nowhere_on_its_page(lengths, capsys, monkeypatch):
    def report(*arguments, **named):
        return replace(report_plan(*arguments, **named), budget_bytes=2**20)

    monkeypatch.setattr("furlong.cli.plan.report_plan", report)
    assert plan(lengths, *QUICK, "--json") == 0
    page = json.loads(capsys.readouterr().out)
    assert not page["fits"] and not page["runs_here"] and not page["longest_of_data_fits"]


def test_an_interrupted_search_prints_the_best_plan_so_far(lengths, capsys, monkeypatch):
    whole_try, tried = search._try, []

    def interrupted(trials, candidate, beat_s):
        if trials.fitting:
            raise KeyboardInterrupt
        tried.append(candidate)
        return whole_try(trials, candidate, beat_s)

    monkeypatch.setattr(search, "_try", interrupted)
    assert plan(lengths, *QUICK, "--json") == 0
    page = json.loads(capsys.readouterr().out)
    assert page["search"]["is_cut_short"] and page["search"]["num_tried"] == 1
    assert page["options"]["size"] == tried[-1].options.size and page["fits"]


@pytest.mark.slow
def test_cards_that_free_weights_are_fewer_and_start_with_their_share(capsys):
    """Of 14 G parameters in full no card keeps all weights, however many there are."""
    asked = [
        *("plan", "--lengths", "8192", "--hardware", "H100", "--model.name", "Qwen2.5-14B"),
        *("--smallest", "--parallel.pp=1", "--chunks.size=8192", "--offload=none", "--json"),
    ]
    assert main(asked) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_devices"] == 4 and found["options"]["reshard"] and found["runs_here"]
    held = found["weights"]
    assert held["share_bytes"] < held["start_bytes"] < 2 * held["share_bytes"]
    assert main([*asked, "--parallel.reshard=false"]) == 2
    capsys.readouterr()
    assert main([*asked, "--offload=auto"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_devices"] == 2 and found["weights"]["host_bytes"] > 2**36
    large = ["--devices=8", "--model.name=Qwen2.5-32B", "--train.state_dtype=bfloat16"]
    few = [flag for flag in asked if flag != "--smallest"]
    for more, runs in (((), True), (("--model.kernels=hub",), False)):
        capsys.readouterr()
        assert main([*few, *large, *more]) == 0
        assert json.loads(capsys.readouterr().out)["runs_here"] == runs


@pytest.mark.slow
def test_the_smallest_budget_is_that_with_weights_in_cpu_memory(capsys):
    model = ["plan", "--model.name=Qwen2.5-0.5B", "--hardware=RTX4090", "--lengths=4096"]
    assert main([*model, "--memory.device=600MiB"]) == 2
    named = re.search(r"memory\.device: (\S+)", capsys.readouterr().err)
    assert main([*model, f"--memory.device={named[1]}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["options"]["reshard"]
