"""The schema, its sources, and what is said of wrong ones."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from furlong.cli.main import main
from furlong.config.foreign import ANSWERS
from furlong.config.foreign import answer as foreign_answer
from furlong.config.schema import Kind, RunConfig, TierName
from furlong.config.sources import build_run, example_of, load_run, parse_run, read_yaml
from furlong.errors import ConfigError
from furlong.plan.plan import Tier, Tiers

ROOT = Path(__file__).parents[1]
SHIPPED = sorted((ROOT / "examples").glob("*.yaml"))
RUN = "model: {name: x}\ndata: {train: x}\n"
NEEDED = ["--model.name=folder", "--data.train=a.jsonl"]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text("model: {name: folder}\ndata: {train: a.jsonl}\ntrain: {lr: 1e-5}\n")
    return file


def leaves(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            keys += leaves(kind, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def test_growth_of_the_schema_is_a_decision() -> None:
    assert len(leaves(RunConfig)) == 49


def test_every_leaf_has_a_help_text() -> None:
    for section in RunConfig.model_fields.values():
        kind = section.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            assert all(field.description for field in kind.model_fields.values())


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
def test_every_shipped_file_parses(file: Path) -> None:
    assert load_run(file) == parse_run([str(file)])


def test_flags_come_before_the_file_and_the_file_before_defaults(run_file: Path) -> None:
    config = parse_run([str(run_file), "--train.eps=1e-7", "--model.lora.rank=4"])
    assert (config.train.lr, config.train.eps, config.train.steps) == (1e-5, 1e-7, 100)
    assert parse_run([str(run_file), "--train.lr", "3e-4"]).train.lr == 3e-4
    assert config.model.lora is not None and config.model.lora.rank == 4
    assert config.data.train == ("a.jsonl",)


def test_the_environment_is_no_source(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", "elsewhere")
    monkeypatch.setenv("TRAIN__LR", "1")
    config = load_run(run_file)
    assert (config.out, config.train.lr) == ("runs/first", 1e-5)


def test_the_resolved_config_is_accepted_back(tmp_path: Path) -> None:
    config = parse_run([*NEEDED, "--train.epochs=2", "--model.lora.target_modules=q_proj,v_proj"])
    assert config.train.steps is None
    written = tmp_path / "config.json"
    written.write_text(config.model_dump_json())
    assert load_run(written) == config


def test_config_is_frozen(run_file: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_run(run_file).train.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("flags", "given", "required", "source", "change"),
    [
        (["--train.lrr=1"], "--train.lrr", "a flag", "the command line", "--train.lr?"),
        (["--train.steps=no"], "train.steps = 'no'", "a whole number", "flag --train.steps", "set"),
        (["--chunks.size=big"], "chunks.size = 'big'", "number or 'auto'", "flag", "chunks.size"),
        (["--train.lr=-1"], "train.lr = '-1'", "greater than 0", "flag --train.lr", "set"),
        (["--parallel.sp=0"], "parallel.sp = '0'", "greater than 0", "flag --parallel.sp", "set"),
        (["--chunks.tier=hots"], "tier = 'hots'", "device, host, disk or a", "flag", "host?"),
        (["--chunks.tier=[kv]"], "['kv']", "or a mapping of kinds", "flag --chunks.tier", "set"),
        (["--chunks.tier={atention: host}"], "atention", "kinds among kv", "flag", "attention?"),
        (["--chunks.tier={kv: dsk}"], "'dsk'", "one of device, host, disk for kv", "flag", "disk?"),
        (["--chunks.tier.kv=host"], "--chunks.tier.kv", "a flag", "line", "--chunks.tier?"),
        (
            ["--chunks.tier=disk"],
            "disk = 0",
            "memory.disk above",
            "flag --chunks",
            "add memory.disk",
        ),
        (["--chunks.tier={kv: disk}"], "'kv': 'disk'", "memory.disk above", "--chunks.tier", "add"),
        (
            ["--chunks.tier=host", "--memory.host=0"],
            "'host' with memory.host = 0",
            "memory.host above 0",
            "flag --chunks.tier",
            "add",
        ),
        (
            ["--chunks.order=chunk-first", "--chunks.stage_layers=2"],
            "stage_layers = 2 with",
            "layer-first",
            "flag --chunks.order",
            "layer-first, or remove",
        ),
        (["--chunks.order=layers"], "'layers'", "'chunk-first' or 'layer-first'", "flag", "set"),
        (["--chunks.stage_layers=0"], "'0'", "greater than 0", "flag --chunks.stage_layers", "set"),
        (["--chunks.sample.rate=0"], "rate = '0'", "greater than 0", "--chunks.sample.rate", "set"),
        (["--chunks.sample.rate=1.5"], "rate = '1.5'", "or equal to 1", "--chunks.sample", "set"),
        (["--chunks.sample.chunks=0"], "chunks = '0'", "greater than 0", "--chunks.sample", "set"),
        (
            ["--chunks.sample.chunks=2.5"],
            "= 2.5",
            "a whole number",
            "--chunks.sample.chunks",
            "set",
        ),
        (["--chunks.sample.label_rate=0"], "'0'", "greater than 0", "sample.label_rate", "set"),
        (["--chunks.sample.cap=0.5"], "'0.5'", "or equal to 1", "--chunks.sample.cap", "set"),
        (["--chunks.sample.cap=.inf"], "'.inf'", "a finite number", "--chunks.sample.cap", "set"),
        (["--chunks.sample.rule=best"], "'best'", "'unbiased', 'fixed' or", "sample.rule", "set"),
        (["--chunks.sample.check_every_steps=-1"], "'-1'", "equal to 0", "check_every", "set"),
        (["--chunks.sample={rte: 0.5}"], "chunks.sample.rte", "one of rate", "sample", "rate?"),
        (
            ["--chunks.sample.rate=0.5"],
            "chunks.size = 'auto' with chunks.sample",
            "no search may choose it",
            "flag --chunks.sample.rate",
            "set chunks.size",
        ),
        (["--memory.disk=auto"], "'auto'", "a whole number", "flag --memory.disk", "set"),
        (["--memory.disk_dir="], "disk_dir = ''", "not empty", "flag --memory.disk", "set"),
        (["--memory.dsk=1GiB"], "--memory.dsk", "a flag", "the command line", "--memory.disk?"),
        (["--memory.device=24XB"], "'24XB'", "write one like 512MiB", "flag", "memory.device"),
        (["--memory.host=24XB"], "'24XB'", "write one like 512MiB", "flag", "memory.host"),
        (["--train.epochs=1", "--train.steps=2"], "both", "not both", "train.epochs", "remove"),
        (["--train.steps=null"], "none", "one of train.steps", "train.steps", "one of them"),
        (["--model.init=random", "--model.lora.rank=2"], "random", "pretrained", "lora", "set"),
        (["a.yaml", "b.yaml"], "b.yaml", "one run file", "command line", "remove it"),
        (["--train.betas=[0.9]"], "[0.9], 1 value", "a list of 2 values", "--train.betas", "set"),
        (["--train.betas=[.1, .2, .3]"], "3 values", "a list of 2 values", "--train.betas", "set"),
        (["--train.betas={a}"], "{'a': None}", "a list of 2 values", "flag --train.betas", "set"),
        (["--train.betas=a,b"], "train.betas = 'a'", "a number", "flag --train.betas", "set"),
        (["--data.train=[x].jsonl"], "[x].jsonl", "YAML", "the flag --data.train", "quote"),
        (["--data.train", "{a"], "expected", "YAML", "the flag --data.train", "quote"),
        (['--data.train=a"b'], "Mismatched quotes", "values that fit", "command line", "--help"),
        (["--model=x"], "--model x", "one of its keys: name", "command line", "--model.name?"),
        (["--model={nme: x}"], "model.nme", "one of name", "the flag --model", "model.name?"),
        (
            ["--data.eval="],
            "data.eval = ''",
            "path should be a text that is not empty",
            "flag",
            "set",
        ),
        (
            ["--data.train=[a, {path: ''}]"],
            "''",
            "path should be a text that is not empty",
            "flag",
            "set",
        ),
        (
            ["--data.eval=[&a [*a]]"],
            "Circular reference",
            "written out",
            "--data.eval",
            "without &",
        ),
        (["--train.lr=0"], "'0'", "a number greater than 0", "train.lr", "such as 2e-05"),
        (
            ["--train.epochs=1", "--train.steps=2"],
            "both of them",
            "not both",
            "the flag --train.epochs and the flag --train.steps",
            "remove one",
        ),
        (["--train.lr"], "expected one argument", "--section.key=value", "command line", "--help"),
    ],
)
def test_a_wrong_flag_is_told_in_four_parts(
    flags: list[str], given: str, required: str, source: str, change: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run([*NEEDED, *flags])
    error = caught.value
    assert given in error.given
    assert required in error.required
    assert source in error.source
    assert change in error.change


@pytest.mark.parametrize(
    ("text", "given", "source", "change"),
    [
        (
            "model: {name: x}\ndata: {trian: [a]}",
            "2 wrong keys",
            "run.yaml",
            "data.trian     did you mean",
        ),
        (
            "modle: {name: x}",
            "3 wrong keys",
            "run.yaml",
            "modle     did you mean model?\n  no model  add",
        ),
        (
            "model: {name: x}\ndata: {train: x, evil: y}",
            "data.evil, an unk",
            "key data.evil",
            "eval?",
        ),
        (
            "train.steps: 1\n" + RUN,
            "train.steps with a dot",
            "key train.steps",
            "train: {steps: 1}",
        ),
        (RUN + "Train: {lr: 3}\ntrain: {steps: 5}", "Train, an unknown", "Train", "mean train?"),
        (RUN + "train: {steps: 5}\nTRAIN: {lr: 3}", "TRAIN, an unknown", "TRAIN", "mean train?"),
        (RUN + "Out: x", "Out, an unknown key", "key Out", "did you mean out?"),
        (RUN + "train: {LR: 3}", "train.LR, an unknown key", "train.LR", "did you mean train.lr?"),
        (
            "model: {name: x}\ndata: {train: {path: x, weights: 2}}",
            "data.train = {'path': 'x', 'weights': 2}",
            "key data.train",
            "write weight for weights",
        ),
        ("model.lora.rank: 1\n" + RUN, "with a dot", "rank", "write model: {lora: {rank: 1}}"),
        ("model: {name: x}\ndata: {train: []}", "data.train = []", "train", "such as books.jsonl"),
        (RUN + "train: {epochs: .nan}", "'.nan'", "epochs", "set train.epochs, such as 3"),
        (RUN + "log:\n  wandb: a\n   b: c", "in line 5, column 5: b: c", "run.yaml", "line"),
        ("data: {train: x}", "no model", "run.yaml, key model", "model.name"),
        ("model: {name: x}", "no data", "run.yaml, key data", "data.train"),
        ("model: [", "expected", "run.yaml", "line"),
        ("- a", "a list", "run.yaml", "quickstart.yaml"),
        (
            "model: {name: x}\ndata: {train: x}\nchunks: {size: 64, sample: 0.25}",
            "chunks.sample = 0.25",
            "run.yaml, key chunks.sample",
            "write sample: {rate: ...}",
        ),
        (
            "model: {name: x}\ndata: {train: x}\nchunks: {sample: {chunks: 8}}",
            "chunks.size = 'auto' with chunks.sample",
            "run.yaml, key chunks.size and chunks.sample",
            "set chunks.size",
        ),
        ("", "an empty file", "run.yaml", "quickstart.yaml"),
        ("train: {lr: 1}\ntrain: {lr: 2}", "train is there twice in line 2", "run.yaml", "line"),
        ("data: {train: a, train: b}", "train is there twice in line 1", "run.yaml", "line"),
        ("train: {steps: " + "9" * 6000 + "}", "Exceeds the limit", "run.yaml", "line"),
        ('out: "a\\0b"', "a text with a NUL character in line 1", "run.yaml", "line"),
        ("[" * 3000, "recursion", "run.yaml", "line"),
        ("model: qwen\ndata: {train: x}", "model = 'qwen'", "key model", "model: {name: ...}"),
        ("model: {name: x}\ndata: {train: 5}", "data.train = 5", "key data.train", "data.train"),
        (
            f"model: {{name: x}}\ndata: {{train: x}}\nout: [{'long, ' * 99}]",
            "'long',...",
            "out",
            "set out",
        ),
    ],
)
def test_a_wrong_file_is_told_in_four_parts(
    tmp_path: Path, text: str, given: str, source: str, change: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_run(file)
    assert given in caught.value.given and "^" not in caught.value.given
    assert source in caught.value.source
    assert change in caught.value.change


def test_tiers_orders_and_budgets_are_read_from_files_and_flags(run_file: Path) -> None:
    run_file.write_text(
        "model: {name: x}\ndata: {train: x}\nmemory: {host: 24GiB, disk: 1TB, disk_dir: /scratch}\n"
        "chunks: {tier: {attention: disk, kv: host}, order: layer-first, stage_layers: 4}\n"
    )
    flags = [
        "--chunks.tier={attention: disk, kv: host}", "--chunks.order=layer-first",
        "--chunks.stage_layers=4", "--memory.host=24GiB", "--memory.disk=1TB",
        "--memory.disk_dir=/scratch",
    ]  # fmt: skip
    config = load_run(run_file)
    assert config.chunks.tier == {"attention": "disk", "kv": "host"}
    assert (config.chunks.order, config.chunks.stage_layers) == ("layer-first", 4)
    memory = config.memory
    assert (memory.host, memory.disk, memory.disk_dir) == (24 * 2**30, 10**12, "/scratch")
    by_flags = parse_run([*NEEDED, *flags])
    assert (by_flags.chunks, by_flags.memory) == (config.chunks, config.memory)
    assert parse_run([str(run_file), "--chunks.tier", "host"]).chunks.tier == "host"
    assert build_run(json.loads(config.model_dump_json()), "config.json") == config
    assert load_run(ROOT / "examples/quickstart.yaml").memory.disk == 0


def test_a_sample_is_read_from_files_and_flags(run_file: Path) -> None:
    run_file.write_text(
        "model: {name: x}\ndata: {train: x}\n"
        "chunks: {size: 64, sample: {chunks: 8, rule: fixed, cap: 2, check_every_steps: 50}}\n"
    )
    sample = load_run(run_file).chunks.sample
    assert sample is not None and not sample.report_loss
    assert (sample.chunks, sample.rule, sample.cap, sample.rate) == (8, "fixed", 2.0, None)
    size = [*NEEDED, "--chunks.size=64"]
    flags = [f"--chunks.sample.{x}" for x in ("chunks=8", "rule=fixed", "cap=2")]
    by_flags = parse_run([*size, *flags, "--chunks.sample.check_every_steps=50"])
    assert by_flags.chunks.sample == sample
    mapping = "--chunks.sample={chunks: 8, rule: fixed, cap: 2, check_every_steps: 50}"
    assert parse_run([*size, mapping]).chunks.sample == sample
    assert parse_run([str(run_file), "--chunks.sample=null"]).chunks.sample is None
    assert build_run(json.loads(by_flags.model_dump_json()), "config.json") == by_flags
    assert parse_run(NEEDED).chunks.sample is None


def test_stage_layers_alone_leave_the_order_to_the_search() -> None:
    chunks = parse_run([*NEEDED, "--chunks.stage_layers=2"]).chunks
    assert (chunks.order, chunks.stage_layers) == ("auto", 2)


def test_a_tier_without_room_in_a_file_names_both_keys() -> None:
    with pytest.raises(ConfigError) as caught:
        build_run(nested("chunks.tier", {"inputs": "disk"}), "run.yaml")
    assert caught.value.source == "run.yaml, key chunks.tier and memory.disk"


def test_the_kinds_and_tiers_of_run_files_are_those_of_plans() -> None:
    """The schema spells them itself: config is not above plan."""
    assert get_args(Kind) == tuple(field.name for field in fields(Tiers))
    assert get_args(TierName) == get_args(Tier)


def test_a_file_of_other_bytes_is_told(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(b"out: \xff")
    with pytest.raises(ConfigError, match=r"no UTF-8: invalid start byte at byte 5"):
        load_run(file)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        parse_run(["nowhere.yaml"])


def test_a_flag_can_take_the_held_out_data_away(run_file: Path) -> None:
    assert parse_run([str(run_file), "--data.eval=b.jsonl"]).data.eval == ("b.jsonl",)
    run_file.write_text("model: {name: folder}\ndata: {train: a.jsonl, eval: b.jsonl}\n")
    assert parse_run([str(run_file), "--data.eval=null"]).data.eval is None


def test_flags_take_the_mappings_and_lists_of_run_files(run_file: Path) -> None:
    """The forms that docs/data.md shows, as they stand there."""
    same = [
        ["--data.train={path: t.jsonl, weight: 2}"],
        ["--data.train", "{path: t.jsonl, weight: 2}"],
        ["--data.train=[{path: t.jsonl, weight: 2}]"],
        ['--data.train={"path": "t.jsonl", "weight": 2}'],
        ["--data={train: {path: t.jsonl, weight: 2}}"],
    ]
    for flags in same:
        (source,) = parse_run([str(run_file), *flags]).data.train
        assert not isinstance(source, str) and (source.path, source.weight) == ("t.jsonl", 2.0)
    config = parse_run(
        [
            "--data.train=[a.jsonl, {path: b, split: train}]", "--data.eval={path: t.jsonl}",
            "--model={name: folder}", "--model.lora={rank: 4}", "--train.betas=[0.8, 0.9]",
            "--out={a}",
        ]
    )  # fmt: skip
    assert config.data.train[0] == "a.jsonl" and config.data.eval is not None
    assert not isinstance(config.data.eval[0], str) and config.data.eval[0].path == "t.jsonl"
    assert config.model.lora is not None and config.model.lora.rank == 4
    assert (config.train.betas, config.out) == ((0.8, 0.9), "{a}")


def number_keys(section: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Keys whose schema has a number somewhere, and the schema itself."""
    keys: dict[str, str] = {}
    for name, field in section.model_fields.items():
        inner = [kind for kind in (field.annotation, *get_args(field.annotation))
                 if isinstance(kind, type) and issubclass(kind, BaseModel)]  # fmt: skip
        if inner:
            keys |= number_keys(inner[0], f"{prefix}{name}.")
        else:
            schema = json.dumps(section.model_json_schema()["properties"][name])
            if "number" in schema or "integer" in schema:
                keys[prefix + name] = schema
    return keys


NUMBERS = number_keys(RunConfig)


def nested(key: str, value: object) -> dict[str, Any]:
    """A whole run with one key set."""
    values: dict[str, Any] = {"model": {"name": "x"}, "data": {"train": "x"}}
    section = values
    *path, name = key.split(".")
    for part in path:
        section = section.setdefault(part, {})
    if "rope" in path:
        section["rope_type"] = "yarn"
    section[name] = value
    return values


@pytest.mark.parametrize("key", NUMBERS)
def test_a_truth_value_and_infinity_are_no_numbers(key: str) -> None:
    assert len(NUMBERS) > 30
    for value in (True, math.inf, 10**23):
        wrong = [value, value] if "array" in NUMBERS[key] else value
        if value == 10**23 and "number" in NUMBERS[key]:
            continue
        with pytest.raises(ConfigError) as caught:
            build_run(nested(key, wrong), "run.yaml")
        assert caught.value.given.startswith(f"{key} = ")
        assert caught.value.source == f"run.yaml, key {key}"


def test_a_weight_is_a_number() -> None:
    for weight in (True, math.inf, "yes"):
        with pytest.raises(ConfigError, match=r"weight should be "):
            build_run(nested("data.train", {"path": "x", "weight": weight}), "run.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1000", 1000), ("1e3", 1000), ("1000.0", 1000), ("01000", 1000), ("1_000", 1000),
     ("'1e3'", 1000), ("1:30", None), ("0x10", None), ("1.5", None), ("true", None),
     ("yes", None), ("1e400", None), (".inf", None), ("0", None), ("2024-01-01", None)],
)  # fmt: skip
def test_a_whole_number_is_the_same_in_a_file_and_as_a_flag(
    run_file: Path, text: str, value: int | None
) -> None:
    run_file.write_text(f"model: {{name: x}}\ndata: {{train: x}}\ntrain: {{steps: {text}}}\n")
    for arguments in ([str(run_file)], [*NEEDED, "--train.steps=" + text.strip("'")]):
        if value is None:
            with pytest.raises(ConfigError, match=r"train\.steps = "):
                parse_run(arguments)
        else:
            assert parse_run(arguments).train.steps == value


@pytest.mark.parametrize(("text", "value"), [("1e-5", 1e-5), ("1.0e-5", 1e-5), (".5", 0.5)])
def test_a_number_is_the_same_in_a_file_and_as_a_flag(
    run_file: Path, text: str, value: float
) -> None:
    run_file.write_text(f"model: {{name: x}}\ndata: {{train: x}}\ntrain: {{lr: {text}}}\n")
    assert load_run(run_file).train.lr == value
    assert parse_run([*NEEDED, f"--train.lr={text}"]).train.lr == value


@pytest.mark.parametrize(("text", "value"), [("10e9", 10**10), ("24GiB", 24 * 2**30), ("7", 7)])
def test_an_amount_is_the_same_in_a_file_and_as_a_flag(
    run_file: Path, text: str, value: int
) -> None:
    run_file.write_text(f"model: {{name: x}}\ndata: {{train: x}}\nmemory: {{device: {text}}}\n")
    assert load_run(run_file).memory.device == value
    assert parse_run([*NEEDED, f"--memory.device={text}"]).memory.device == value


def test_words_and_dates_stay_as_they_are_written(run_file: Path) -> None:
    text = "model: {name: no}\ndata: {train: [on, 1:30]}\nout: 2024-13-45\nlog: {wandb: yes}\n"
    run_file.write_text(text)
    config = load_run(run_file)
    assert (config.model.name, config.data.train) == ("no", ("on", "1:30"))
    assert (config.out, config.log.wandb) == ("2024-13-45", "yes")


def test_a_flag_for_the_other_length_says_how_to_take_the_files_away(run_file: Path) -> None:
    for flag, other in (("epochs", "steps"), ("steps", "epochs")):
        text = f"model: {{name: x}}\ndata: {{train: x}}\ntrain: {{{other}: 5}}\n"
        run_file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            parse_run([str(run_file), f"--train.{flag}=1"])
        assert caught.value.given == f"both: the run file has {other}"
        assert f"--train.{other}=null" in caught.value.change
        config = parse_run([str(run_file), f"--train.{flag}=1", f"--train.{other}=null"])
        assert getattr(config.train, other) is None


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("train.learning_rate", "write train.lr"),
        ("learning_rate", "write train.lr"),
        ("train.gradient_accumulation_steps", "write train.sequences_per_step"),
        ("per-device-train-batch-size", "write train.sequences_per_step"),
        ("data.chat_template", "chat_template.jinja"),
        ("train.optimizer", "AdamW"),
        ("train.save_total_limit", "newest 3"),
        ("model_name_or_path", "write model.name"),
        ("lora_r", "write model.lora.rank"),
        ("lr", "train.lr?"),
        ("model.max_seq_len", "data.max_seq_len?"),
        ("rank", "model.lora.rank?"),
        ("train.stpes", "train.steps?"),
        ("train.trainer_callback", "remove it"),
        ("train.foo", "remove it"),
        ("chunk.size", "chunks.size?"),
    ],
)
def test_keys_of_other_trainers_are_answered_with_ours(key: str, change: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run([*NEEDED, f"--{key}=1"])
    assert change in caught.value.change and caught.value.given == f"--{key}"
    if key != "chunk.size":
        with pytest.raises(ConfigError) as caught:
            build_run(nested(key, 1), "run.yaml")
        assert change in caught.value.change and caught.value.given == f"{key}, an unknown key"


def test_the_documented_table_is_the_one_that_answers() -> None:
    text = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    section = text.split("## From TRL, axolotl or LLaMA-Factory")[1].split("\n## ")[0]
    lines = [line for line in section.replace("`", "").splitlines() if line.startswith("| ")]
    rows = [line.strip("| ").split(" | ") for line in lines[2:]]
    assert {tuple(names.split(", ")): text for names, text in rows} == ANSWERS


def test_no_foreign_key_is_one_of_ours() -> None:
    foreign = {name for names in ANSWERS for name in names}
    assert len(foreign) == sum(map(len, ANSWERS))
    assert not foreign & {key.rpartition(".")[2] for key in leaves(RunConfig)}


AXOLOTL = """
base_model: NousResearch/Meta-Llama-3-8B
load_in_8bit: true
datasets: [{path: mhenrichsen/alpaca_2k_test, type: alpaca}]
val_set_size: 0.05
sequence_len: 4096
adapter: lora
lora_r: 32
lora_modules_to_save: [embed_tokens, lm_head]
evals_per_epoch: 4
special_tokens: {pad_token: x}
plugins: [x]
train: {lr: fast}
"""
LLAMA_FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: dpo
finetuning_type: lora
lora_target: all
pref_beta: 0.1
pref_ftx: 0.1
dataset: dpo_en_demo
template: llama3
cutoff_len: 2048
max_samples: 1000
plot_loss: true
learning_rate: 5.0e-6
"""
TRL = """
model_name_or_path: Qwen/Qwen2-0.5B
dataset_name: trl-lib/Capybara
learning_rate: 2.0e-5
packing: true
eval_strategy: steps
use_peft: true
push_to_hub: true
"""


@pytest.mark.parametrize("text", [AXOLOTL, LLAMA_FACTORY, TRL], ids=["axolotl", "factory", "trl"])
def test_all_wrong_keys_of_a_file_are_told_at_once(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert main(["train", str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    keys = [line.split(":")[0] for line in text.strip().splitlines()]
    rows = {line.split()[0]: line for line in lines[4:]}
    assert lines[0] == f"given:    {len(lines) - 4} wrong keys"
    for key in keys:
        answer = foreign_answer(key)
        found = rows["train.lr" if key == "train" else key]
        assert (answer or "furlong has none" if key != "train" else "a number") in found
    assert "  no data" in "\n".join(lines)


def test_all_foreign_flags_are_told_at_once() -> None:
    flags = ["--model_name_or_path=x", "--learning_rate", "2e-5", "--bf16"]
    with pytest.raises(ConfigError, match="3 wrong keys") as caught:
        parse_run(flags)
    assert [line.split()[0] for line in caught.value.change.splitlines()[1:]] == [
        "--model_name_or_path", "--learning_rate", "--bf16",
    ]  # fmt: skip


def test_a_table_of_wrong_keys_says_which_are_flags(run_file: Path) -> None:
    flags = ["--train.lr=0", "--train.eps=0"]
    with pytest.raises(ConfigError, match=r"\(the flag --train\.lr\)") as caught:
        parse_run([str(run_file), *flags])
    assert caught.value.source == "the command line"
    run_file.write_text("modle: {}\n")
    with pytest.raises(ConfigError) as caught:
        parse_run([str(run_file), *flags])
    *_, last = caught.value.change.splitlines()
    assert caught.value.source == str(run_file) and "(the flag --train." in last


def test_every_number_has_an_example_that_it_takes() -> None:
    for key in NUMBERS:
        example = example_of(key)
        assert example or key.startswith("model.rope."), key
        if example:
            values = nested(key, read_yaml(example, "", ""))
            if key.startswith("chunks.sample"):
                values["chunks"]["size"] = 64
            build_run(values, "run.yaml")


@pytest.mark.parametrize("text", ["train: [1]", "train: 5", "train: !!set {a}", "train: &a [*a]"])
def test_flags_do_not_hide_a_section_that_is_none(run_file: Path, text: str) -> None:
    run_file.write_text(f"model: {{name: x}}\ndata: {{train: x}}\n{text}\n")
    for flags in ([], ["--train.steps=1"]):
        with pytest.raises(ConfigError, match=r"train = [\s\S]*a section with keys among steps"):
            parse_run([str(run_file), *flags])


def test_flags_do_not_hide_an_inner_section_that_is_none(run_file: Path) -> None:
    run_file.write_text("model: {name: x, lora: [8]}\ndata: {train: x}\n")
    for flags in ([], ["--model.lora.rank=4"]):
        with pytest.raises(ConfigError, match=r"model\.lora = \[8\]"):
            parse_run([str(run_file), *flags])


def test_an_empty_section_is_one_without_keys(run_file: Path) -> None:
    run_file.write_text("model: {name: x}\ndata: {train: x}\ntrain:\n")
    assert load_run(run_file).train.steps == 100
    assert parse_run([str(run_file), "--train.steps=1"]).train.steps == 1


def test_all_linear_as_a_flag_is_that_of_a_file(run_file: Path) -> None:
    config = parse_run([str(run_file), "--model.lora.target_modules=all-linear"])
    assert config.model.lora is not None
    assert config.model.lora.target_modules == "all-linear"


def test_settings_of_the_library_are_no_keys(run_file: Path) -> None:
    for key in ("_cli_settings_source", "_cli_parse_args", "_env_file"):
        run_file.write_text(f"model: {{name: x}}\ndata: {{train: x}}\n{key}: [--train.steps=5]\n")
        with pytest.raises(ConfigError, match=f"{key}, an unknown key"):
            parse_run([str(run_file)])


def test_the_help_of_a_verb_says_what_it_does(capsys):
    for verb, words in (("train", "Train a model."), ("verify", "Prove gradients")):
        with contextlib.suppress(SystemExit):
            main([verb, "--help"])
        assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--train.beta=0.2"], "train.beta = 0.2 with train.loss: sft"),
        (["--train.loss_type=ipo"], "train.loss_type = ipo with train.loss: sft"),
        (["--data.format=preference"], "data.format = 'preference' with train.loss: sft"),
        (["--train.loss=dpo", "--data.format=chat"], "data.format = 'chat' with train.loss: dpo"),
        (
            ["--train.loss=dpo", "--train.loss_type=ipo", "--train.label_smoothing=0.1"],
            "train.label_smoothing = 0.1 with train.loss_type: ipo",
        ),
    ],
)
def test_options_of_a_loss_that_is_not_asked_for(flags: list[str], said: str) -> None:
    given = ["--model.name=m", "--data.train=t", *flags]
    with pytest.raises(ConfigError, match=said):
        parse_run(given)
    pairs = parse_run([*given[:2], "--train.loss=dpo", "--train.beta=0.2"])
    assert (pairs.train.loss_type, pairs.train.beta) == ("sigmoid", 0.2)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("out: ${OUT}", "out"),
        ("memory: {disk_dir: $TMPDIR/x}", "memory.disk_dir"),
        ("data: {train: x, cache_dir: $(pwd)/x}", "data.cache_dir"),
        ("data: {train: [a, $HOME/x]}", "data.train"),
        ("data: {train: {path: a/$X}}", "data.train"),
        ("model: {name: $HOME/model}", "model.name"),
    ],
)
def test_a_variable_in_a_path_is_refused(tmp_path: Path, text: str, key: str) -> None:
    values = {"model": {"name": "x"}, "data": {"train": "x"}} | yaml.safe_load(text)
    with pytest.raises(ConfigError, match=r"variables such as \$.* are not expanded") as caught:
        build_run(values, "run.yaml")
    assert caught.value.given.startswith(f"{key} = ")
    assert "the shell expands it" in caught.value.change
    build_run({"model": {"name": "~/x"}, "data": {"train": "a$"}, "out": "5$ a"}, "run.yaml")
