"""The schema, its sources, and what is said of wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from furlong.config.schema import RunConfig
from furlong.config.sources import load_run, parse_run
from furlong.errors import ConfigError

ROOT = Path(__file__).parents[1]
SHIPPED = sorted((ROOT / "examples").glob("*.yaml"))
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
    assert len(leaves(RunConfig)) == 42


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
        (["--train.steps=no"], "train.steps = 'no'", "valid integer", "flag --train.steps", "set"),
        (["--chunks.size=big"], "chunks.size = 'big'", "integer or 'auto'", "flag", "chunks.size"),
        (["--train.lr=-1"], "train.lr = '-1'", "greater than 0", "flag --train.lr", "set"),
        (["--parallel.sp=2"], "parallel.sp = '2'", "not in this release", "flag", "remove"),
        (["--chunks.tier=host"], "'host'", "auto or device: the rest is not", "flag", "remove"),
        (["--memory.device=24XB"], "'24XB'", "write one like 512MiB", "flag", "memory.device"),
        (["--memory.host=24GiB"], "'24GiB'", "not in this release", "flag", "remove"),
        (["--train.epochs=1", "--train.steps=2"], "both", "not both", "train.epochs", "remove"),
        (["--train.steps=null"], "none", "one of train.steps", "train.epochs", "one of them"),
        (["--model.init=random", "--model.lora.rank=2"], "random", "pretrained", "lora", "set"),
        (["a.yaml", "b.yaml"], "b.yaml", "one run file", "command line", "remove it"),
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
        ("model: {name: x}\ndata: {trian: [a]}", "data.trian, an unknown key", "trian", "train?"),
        ("modle: {name: x}", "modle, an unknown key", "run.yaml, key modle", "model?"),
        ("data: {train: x}", "no model", "run.yaml, key model", "model.name"),
        ("model: {name: x}", "no data", "run.yaml, key data", "data.train"),
        ("model: [", "expected", "run.yaml", "line"),
        ("- a", "a list", "run.yaml", "quickstart.yaml"),
        ("", "an empty file", "run.yaml", "quickstart.yaml"),
        ("train: {lr: 1}\ntrain: {lr: 2}", "train is there twice in line 2", "run.yaml", "line"),
        ("data: {train: a, train: b}", "train is there twice in line 1", "run.yaml", "line"),
        ("out: 2024-13-45", "month must be in 1..12", "run.yaml", "line"),
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
    assert given in caught.value.given
    assert source in caught.value.source
    assert change in caught.value.change


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
