"""`furlong plan` on lengths: what it chooses, prints and writes; bad input, item by item."""

import json
import re
from contextlib import contextmanager
from pathlib import Path

import pytest

from furlong.cli.main import main
from furlong.cost.shape import known_models
from furlong.plan.check import check
from furlong.plan.plan import Tiers
from furlong.plan.text import load_plan, save_plan

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


def test_prints_what_was_chosen_and_why(lengths, capsys):
    assert plan(lengths, "--devices", "2") == 0
    printed = capsys.readouterr().out
    heads = [line.split("  ")[0] for line in printed.splitlines() if line[0] != " "]
    assert heads == [
        "batch", "model", "devices", "figures", "plan", "chunks", "kept", "recompute", "order",
        "tier", "layout", "step", "bubble", "pool", "time", "memory", "longest", "runs here",
        "auto", "parallel", "search",
    ]  # fmt: skip
    assert f"6 sequences, 13.2K tokens, longest 9,000: all of {lengths}" in printed
    assert "2 x RTX4090" in printed
    assert "tokens/s" in printed
    assert "weights" in printed and "optimizer" in printed and "activations" in printed
    assert "9,000 tokens in the data (in the batch): fits" in printed
    assert "runs here  yes: torchrun --nproc-per-node 2 -m furlong train" in printed


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
    flags = ["--devices", "2", "--memory.device", "20GiB", "--model.lora.rank", "4"]
    assert plan(lengths, *QUICK, *flags, "--json", "--out", file) == 0
    first = json.loads(capsys.readouterr().out)
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
    assert "runs here  no, it needs " in printed
    assert main(["plan", file, "--model.name", "Qwen2.5-7B"]) == 2
    refused(capsys, "a model of 28 layers", "one of 24 layers")


def test_the_progress_of_a_search_goes_one_way(lengths, monkeypatch, capsys):
    said = []

    @contextmanager
    def noted(what):
        yield said.append

    monkeypatch.setattr("furlong.report.patience.patience", noted)
    assert plan(lengths, "--devices", "4") == 0
    found = [re.fullmatch(r"(\d+) tried(?:, best .*)?", words) for words in said]
    tried = [int(one[1]) for one in found if one]
    assert len(tried) > 1 and tried == sorted(tried)
    assert any("; what is left takes at least" in words for words in said)


def test_a_saved_plan_is_drawn_with_the_title_that_it_was_made_with(lengths, tmp_path, capsys):
    file, pages = str(tmp_path / "plan.json"), [tmp_path / "a.svg", tmp_path / "b.svg"]
    flags = [*QUICK, "--devices", "2", "--out", file, "--picture", str(pages[0])]
    assert plan(lengths, *flags) == 0
    assert main(["plan", file, "--picture", str(pages[1])]) == 0
    # matplotlib writes each text as a comment beside its outlines
    first, again = (re.findall(r"<!-- (.*?) -->", page.read_text()) for page in pages)
    assert first == again and any("chunkflow   ·   " in text for text in first)


def test_a_saved_plan_says_that_it_does_not_fit_a_smaller_device(lengths, tmp_path, capsys):
    file = str(tmp_path / "plan.json")
    assert plan(lengths, *QUICK, "--devices", "2", "--json", "--out", file) == 0
    fits = json.loads(capsys.readouterr().out)
    assert main(["plan", file, "--memory.device", "3GiB"]) == 0
    printed = capsys.readouterr().out
    assert "warning    it does not fit: rank 0 needs " in printed
    assert "required: at most 3 GiB" in printed
    assert "runs here  no, it does not fit" in printed
    assert main(["plan", file, "--memory.device", "3GiB", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert not values["fits"] and not values["runs_here"]
    assert values["peak_bytes"] == fits["peak_bytes"] > values["budget_bytes"]


def test_a_saved_plan_says_itself_what_it_gathers(lengths, tmp_path, capsys):
    file, flags = tmp_path / "plan.json", ["--devices", "2", "--parallel.sp", "2", "--json"]
    assert plan(lengths, *QUICK, *flags, "--out", str(file)) == 0
    found = json.loads(capsys.readouterr().out)
    assert not json.loads(file.read_text())["regathers"]
    assert main(["plan", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"] == found["memory"]


@pytest.mark.parametrize(
    "edited",
    [
        {"run": 5},
        {"num_tokens": 0},
        {"num_tokens": 10**9},
        {"hardware": None},
        [1],
    ],
)
def test_what_a_plan_was_made_for_is_refused_where_it_was_edited(lengths, tmp_path, capsys, edited):
    file = tmp_path / "plan.json"
    assert plan(lengths, *QUICK, "--chunks.size=4096", "--json", "--out", str(file)) == 0
    values = json.loads(file.read_text())
    values["made_for"] = values["made_for"] | edited if isinstance(edited, dict) else edited
    file.write_text(json.dumps(values))
    capsys.readouterr()
    assert main(["plan", str(file)]) == 2
    refused(capsys, "made_for = ", str(file))


def test_a_bare_plan_is_predicted_for_the_model_and_hardware_of_flags(lengths, tmp_path, capsys):
    file = tmp_path / "plan.json"
    assert plan(lengths, *QUICK, "--json", "--out", str(file)) == 0
    first = json.loads(capsys.readouterr().out)
    file.write_text(save_plan(load_plan(file.read_text())))
    model = ["--model.name=Qwen2.5-0.5B", "--hardware=RTX4090"]
    assert main(["plan", str(file), *model, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == first["step_s"]
    for flag in model:
        assert main(["plan", str(file), flag]) == 2
        refused(capsys, "one of --model.name and --hardware")


def test_dials_that_are_given_are_kept(lengths, capsys):
    flags = ["--chunks.size", "3000", "--chunks.num_retained", "2", "--chunks.keep", "kv"]
    assert plan(lengths, *flags, "--parallel.pp", "2", "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["layout"]["pp"] == 2
    assert values["dials"].items() >= {"size": 3000, "num_retained": 2, "keep": "kv"}.items()


def test_a_batch_is_drawn_by_the_seed(lengths, capsys):
    drawn = []
    for seed in ("0", "0", "1"):
        assert plan(lengths, *QUICK, "--sequences", "3", "--train.seed", seed, "--json") == 0
        drawn.append(json.loads(capsys.readouterr().out)["batch"])
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0]["num_sequences"] == 3
    assert "the longest of the 6" in drawn[0]["source"]
    assert all(batch["longest_tokens"] == max(MIXED) for batch in drawn)
    assert plan(lengths, *QUICK, "--data.max_seq_len", "1000", "--json") == 0
    batch = json.loads(capsys.readouterr().out)["batch"]
    assert batch["num_sequences"] == 4
    assert "2 longer ones left out" in batch["source"]


def test_presets_and_config_files_need_no_data(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(known_models()["Qwen2.5-0.5B"]["config"]))
    flags = ["--sequences", "8", "--data.max_seq_len", "4096", "--json"]
    assert plan("wikipedia", *flags, model=str(tmp_path)) == 0
    batch = json.loads(capsys.readouterr().out)["batch"]
    assert batch["num_sequences"] == 8
    assert batch["source"] == (
        "drawn from the preset wikipedia of at most 4,096 tokens with seed 0"
    )


def test_writes_pictures_and_traces(lengths, tmp_path, capsys):
    flags = [*QUICK, "--devices", "2", "--picture", str(tmp_path / "a.svg")]
    assert plan(lengths, *flags, "--trace", str(tmp_path / "a.json")) == 0
    assert f"wrote {tmp_path / 'a.svg'}" in capsys.readouterr().out
    assert "limit 2" in (tmp_path / "a.svg").read_text()
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]


def test_compares_every_method(lengths, tmp_path, capsys):
    from furlong.planners.search import METHODS

    flags = ["--compare", "--devices", "2", "--parallel.pp", "2"]
    assert plan(lengths, *flags, "--picture", str(tmp_path / "c.svg")) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert {m for m in METHODS if any(m in line for line in lines)} == set(METHODS)
    assert "seco: no plan: chunks.method = seco with pp 2" in printed
    picture = (tmp_path / "c.svg").read_text()
    assert picture.count("limit of device memory") == 1
    lengths.write_text('{"version": 1, "lengths": [900, 300, 90]}')
    assert plan(lengths, *flags, "--json") == 0
    methods = json.loads(capsys.readouterr().out)["methods"]
    assert {method["method"] for method in methods} == {"auto", *METHODS}
    by_name = {method["method"]: method for method in methods}
    assert by_name["auto"]["relative"] <= 1.01


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--lengths", "wikipdia"], ["'wikipdia'", "did you mean wikipedia?"]),
        (["--hardware", "H10"], ["'H10'", "did you mean H100"]),
        (["--model.name", "Qwen2.5-8B"], ["'Qwen2.5-8B'", "did you mean Qwen2.5-"]),
        (["--model.name", "no/such.json"], ["No such file"]),
        (["--chunks.method", "chunkflw"], ["'chunkflw'", "'chunkflow'"]),
        (["--parallel.pp", "0"], ["parallel.pp = '0'", "greater than 0"]),
        (["--memory.device", "lots"], ["'lots' is no amount of memory"]),
        (["--chunks.siz", "4"], ["did you mean --chunks.size?"]),
        (["--max-seq-len", "4"], ["did you mean --data.max_seq_len?"]),
        (["--model", "Qwen2.5-0.5B"], ["one of its keys: name", "did you mean --model.name?"]),
        (["--out", "plan.yaml"], ["--out plan.yaml", ".json"]),
        (["--compare", "--out", "plan.json"], ["--compare with --out"]),
        (["--picture", "no/such/folder.png"], ["--picture no/such", "make the folder no/such"]),
        (["--data.max_seq_len", "50"], ["max_seq_len 50", "at least 90 tokens"]),
    ],
)
def test_a_flag_that_cannot_be_obeyed_is_told(lengths, flags, parts, capsys):
    assert plan(lengths, *flags) == 2
    refused(capsys, *parts)


def test_no_lengths_model_or_hardware(capsys):
    assert main(["plan", "--model.name", "Qwen2.5-0.5B"]) == 2
    refused(capsys, "no --lengths", "--lengths, --model.name and --hardware")


def test_a_file_of_lengths_in_the_place_of_a_plan(lengths, capsys):
    assert main(["plan", str(lengths)]) == 2
    refused(capsys, f"write --lengths {lengths}")


def test_a_budget_below_the_weights_names_what_shards_them(lengths, capsys):
    flags = [*QUICK, "--devices", "2"]
    assert plan(lengths, *flags, "--memory.device", "1GB") == 2
    refused(capsys, "optimizer", "954 MiB less a margin of 10%", "start more processes", "LoRA")


def test_methods_that_make_chunks_of_their_own_take_no_dials(lengths, capsys):
    flags = ["--devices", "2", "--chunks.method=places"]
    assert plan(lengths, *flags, "--chunks.size=1024") == 2
    refused(capsys, "chunks.size with chunks.method = places", "leave chunks.size out")
    assert plan(lengths, *flags, "--parallel.pp=2") == 2
    refused(capsys, "chunks.method = places with pp 2", "another method")


@pytest.mark.slow
def test_a_budget_below_the_weights_of_one_device_names_one_that_would_do(lengths, capsys):
    assert plan(lengths, "--memory.device", "1GB") == 2
    message = refused(capsys, "rank 0 needs", "optimizer", "954 MiB less a margin of 10%", "ZeRO")
    enough = re.search(r"memory\.device: (\d+MiB)", message)
    assert enough is not None and plan(lengths, "--memory.device", enough[1], "--json") == 0


def test_sizes_that_do_not_multiply_show_the_arithmetic(lengths, capsys):
    assert plan(lengths, "--devices", "4", "--parallel.pp", "3", "--parallel.sp", "2") == 2
    refused(capsys, "dp auto x sp 2 x pp 3, a multiple of 6 devices", "multiply to 4 devices")
    sizes = ["--parallel.dp", "2", "--parallel.pp", "2", "--parallel.sp", "1"]
    assert plan(lengths, "--devices", "8", *sizes) == 2
    refused(capsys, "dp 2 x sp 1 x pp 2, = 4 devices", "multiply to 8 devices", "use 4 devices")


def test_a_sequence_that_fits_nowhere_says_what_lacks_and_what_to_change(tmp_path, capsys):
    file = tmp_path / "lens.json"
    file.write_text('{"version": 1, "lengths": [4000000]}')
    assert plan(file, *QUICK, "--memory.device", "12GB") == 2
    refused(capsys, "rank 0 needs", "K,V", "which lacks", "with memory.host: ")


def test_flags_of_the_search_do_not_go_with_a_saved_plan(tmp_path, capsys):
    assert main(["plan", str(tmp_path / "plan.json"), "--compare"]) == 2
    refused(capsys, "with a flag of the search (--compare)")


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
    assert main(["plan", str(run_file), "--hardware", "RTX4090", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["batch"]["num_sequences"] == 4
    assert values["batch"]["source"] == (
        f"the longest of the 6 of {counted}, and 3 others drawn with seed 3"
    )
    assert values["num_devices"] == 1
    assert values["model"] == str(Path(run_file).parent / "model")


def test_a_run_whose_data_would_be_refused_is_refused(run_file, lengths, capsys):
    run_file.write_text(run_file.read_text().replace("16384", "8192"))
    assert main(["plan", str(run_file), "--lengths", str(lengths)]) == 2
    refused(capsys, "a sequence of 9,000 tokens", "data.max_seq_len = 8,192", "too_long")


DIALS = {"order": "layer-first", "stage_layers": 6, "tier": {"attention": "host", "kv": "disk"}}


@pytest.mark.slow
def test_one_device_takes_the_dials_of_a_run(lengths, tmp_path, capsys):
    file = tmp_path / "plan.json"
    flags = [
        "--chunks.size=4096", "--chunks.order=layer-first", "--chunks.stage_layers=6",
        "--chunks.tier={attention: host, kv: disk}", "--memory.disk=1TB",
    ]  # fmt: skip
    assert plan(lengths, *flags, "--json", "--out", str(file)) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["dials"].items() >= (DIALS | {"size": 4096}).items()
    saved = load_plan(file.read_text())
    check(saved)
    assert saved.stages == (6,) * 4
    assert saved.tiers == Tiers(attention="host", kv="disk")
    run = tmp_path / "run.yaml"
    run.write_text(
        "model: {name: Qwen2.5-0.5B}\ndata: {train: a.jsonl}\nmemory: {disk: 1TB}\n"
        "chunks: {size: 4096, order: layer-first, stage_layers: 6,"
        " tier: {attention: host, kv: disk}}\ntrain: {sequences_per_step: 6}\n"
    )
    arguments = ["plan", str(run), "--lengths", str(lengths), "--hardware", "RTX4090", "--json"]
    assert main(arguments) == 0
    of_run = json.loads(capsys.readouterr().out)
    assert of_run["dials"] == values["dials"]
    assert of_run["step_s"] == pytest.approx(values["step_s"], rel=0.05)
    assert main([*arguments, "--chunks.stage_layers=8", "--memory.disk=2TB"]) == 0
    assert json.loads(capsys.readouterr().out)["dials"]["stage_layers"] == 8


@pytest.mark.slow
def test_budgets_of_host_and_disk_open_their_tiers(lengths, capsys):
    """With chunks of 1,024 tokens whose attention is kept 12,504 MiB are the least without."""
    fixed = ["--memory.device", "12200MiB", "--chunks.size=1024", "--chunks.keep=attention"]
    assert plan(lengths, *fixed, "--memory.host=0") == 2
    refused(capsys, "memory.device: ")
    for tier, flags in (
        ("host", ["--memory.host=8GB"]),
        ("disk", ["--memory.host=0", "--memory.disk=8GB"]),
    ):
        assert plan(lengths, *fixed, *flags, "--json") == 0
        dials = json.loads(capsys.readouterr().out)["dials"]
        assert set(dials["tier"].values()) == {tier}


def test_several_devices_keep_order_and_stage_layers(lengths, capsys):
    flags = ["--devices", "2", "--chunks.order=layer-first", "--chunks.stage_layers=3"]
    assert plan(lengths, *flags, "--json") == 0
    assert json.loads(capsys.readouterr().out)["dials"]["stage_layers"] == 3


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            ["--chunks.tier={atention: host}"],
            ["'atention'", "the flag --chunks.tier", "attention?"],
        ),
        (["--chunks.tier=hots"], ["'hots'", "or a mapping of kinds", "host?"]),
        (["--chunks.tier={kv: [}"], ["YAML", "the flag --chunks.tier"]),
        (["--chunks.tier=disk"], ["memory.disk = 0", "add memory.disk"]),
        (["--chunks.tier=host", "--memory.host=0"], ["memory.host = 0", "add memory.host"]),
        (["--chunks.order=layers"], ["'layers'", "'layer-first'"]),
        (["--chunks.stage_layers=0"], ["'0'", "greater than 0"]),
        (
            ["--chunks.order=chunk-first", "--chunks.stage_layers=2"],
            ["stage_layers = 2", "remove chunks.stage_layers"],
        ),
        (["--memory.host=24XB"], ["'24XB'", "512MiB"]),
        (["--memory.disk=auto"], ["'auto'", "a whole number"]),
    ],
)
def test_wrong_dials_are_told_in_four_parts(lengths, capsys, flags, parts):
    assert plan(lengths, *flags) == 2
    refused(capsys, *parts)


@pytest.mark.parametrize("flag", ["--chunks.tier=host", "--memory.host=1GB"])
def test_a_cpu_has_no_host(lengths, capsys, flag):
    assert plan(lengths, flag, hardware="cpu") == 2
    refused(capsys, "on a CPU", "device")
