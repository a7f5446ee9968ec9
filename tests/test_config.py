"""The schema, its sources, and what is said of wrong ones."""

from __future__ import annotations

import json
import math
import runpy
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from furlong.cli.main import main
from furlong.config import schema
from furlong.config.foreign import answer_to, foreign_table
from furlong.config.messages import example_of, suggest
from furlong.config.schema import RunConfig, Source, all_keys, keys_below, section_of
from furlong.config.sources import build_run, load_run, parse_run, put, read_yaml
from furlong.errors import ConfigError
from furlong.plan.plan import Offload, OffloadTarget
from furlong.planners.search import METHODS

ROOT = Path(__file__).parents[1]
RUN = "model: {name: x}\ndata: {train: x}\n"
NEEDED = ["--model.name=folder", "--data.train=a.jsonl"]
LEAVES = [key for key in all_keys() if not keys_below(key)]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {name: folder}\ndata: {train: a.jsonl, eval: b.jsonl}\ntrain: {lr: 1e-5}\n"
    )
    return file


def refused(build: Any, *arguments: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        build(*arguments)
    return caught.value


def refused_file(file: Path, text: str) -> ConfigError:
    file.write_text(text)
    return refused(load_run, file)


def nested(key: str, value: object) -> dict[str, Any]:
    """A whole run with one key set."""
    values: dict[str, Any] = {"model": {"name": "x"}, "data": {"train": "x"}}
    if key.startswith("model.rope"):
        put(values, "model.rope.rope_type", "yarn")
    put(values, key, value)
    return values


def test_growth_of_the_schema_is_a_decision() -> None:
    assert len(LEAVES) == 119


def test_every_key_has_a_help_text_and_the_reference_has_every_key() -> None:
    assert all(all_keys()[key].description for key in LEAVES)
    page = runpy.run_path(str(ROOT / "scripts" / "reference.py"))
    text = page["reference"]()
    assert page["PAGE"].read_text() == text, "run scripts/reference.py"
    assert all(f"| `{key}` |" in text for key in LEAVES)


@pytest.mark.parametrize("file", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda f: f.name)
def test_every_shipped_file_parses(file: Path) -> None:
    assert load_run(file) == parse_run([str(file)])


def test_flags_come_before_the_file_and_the_file_before_defaults(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", "elsewhere")  # the environment is no source
    monkeypatch.setenv("TRAIN__LR", "1")
    config = parse_run([str(run_file), "--train.eps=1e-7", "--model.lora.rank=4"])
    assert config.data.eval is not None
    assert parse_run([str(run_file), "--data.eval=null"]).data.eval is None
    assert (config.train.lr, config.train.eps, config.train.steps) == (1e-5, 1e-7, 100)
    assert parse_run([str(run_file), "--train.lr", "3e-4"]).train.lr == 3e-4
    assert config.model.lora is not None and config.model.lora.rank == 4
    assert (config.data.train, config.out) == ((Source(path="a.jsonl"),), "runs/first")
    with pytest.raises(ValueError, match="frozen"):
        config.train.lr = 1.0  # type: ignore[misc]


def test_the_resolved_config_is_accepted_back(tmp_path: Path) -> None:
    config = parse_run([*NEEDED, "--train.epochs=2", "--model.lora.target_modules=q_proj,v_proj"])
    assert config.train.steps is None
    written = tmp_path / "config.json"
    written.write_text(config.model_dump_json())
    assert load_run(written) == config


@pytest.mark.parametrize(
    ("flags", "given", "source", "change"),
    [
        (["--train.lrr=1"], "--train.lrr", "the command line", "--train.lr?"),
        (["--train.steps=no"], "train.steps = 'no'", "flag --train.steps", "set"),
        (["--train.lr=0"], "'0'", "train.lr", "such as 2e-05"),
        (["--offload=dsk"], "offload = 'dsk'", "flag --offload", "to disk"),
        (["--offload={atention: cpu}"], "atention", "--offload", "{attention: cpu}"),
        (["--offload.kv=disk"], "--offload.kv", "the command line", "mapping: {kv: cpu}"),
        (["--offload={kv: dsk}"], "'dsk'", "--offload", "{kv: disk}"),
        (["--offload={keys: disk, inputs: gpu}"], "keys", "--offload", "{kv: disk, inputs: none}"),
        (["--chunks.method=SeCO"], "'SeCO'", "--chunks.method", "to seco"),
        (["--chunks.method=chunk_flow"], "'chunk_flow'", "--chunks.method", "to chunkflow"),
        (["--chunks.sample.cap=.inf"], "'.inf'", "--chunks.sample.cap", "set"),
        (["--memory.device=24XB"], "'24XB'", "flag --memory.device", "24GiB"),
        (["--train.betas=[0.9]"], "no train.betas[1]", "--train.betas", "such as [0.9, 0.95]"),
        (["--train.betas=[.1, .2, .3]"], "train.betas = [0.1", "--train.betas", "set"),
        (["--train.betas=a,b"], "train.betas[0] = 'a'", "flag --train.betas", "set"),
        (["--log.profile_steps=2"], "profile_steps = '2'", "--log.profile_steps", "such as [3, 5]"),
        (["--train.learningRate=1"], "--train.learn", "command line", "write train.lr"),
        (["a.yaml", "b.yaml"], "b.yaml", "command line", "remove it"),
        (["--data.train=[x].jsonl"], "[x].jsonl", "the flag --data.train", "quote"),
        (["--model=x"], "--model x", "command line", "--model.name?"),
        (["--model={nme: x}"], "model.nme", "the flag --model", "model.name?"),
        (["--data.eval="], "data.eval[0].path = ''", "flag --data.eval", "set"),
        (["--data.train=[a, {path: ''}]"], "''", "flag", "set"),
        (["--data.eval=[&a [*a]]"], "data.eval[0] = [[...]]", "--data.eval", "set"),
        (["--train.lr"], "expected one argument", "command line", "--help"),
        (["--modle.name=x"], "--modle.name", "command line", "--model.name?"),
        (["--data.tarin=a b"], "--data.tarin", "command line", "--data.train?"),
        (["train.lr=1e-4"], "train.lr=1e-4", "command line", "--train.lr=1e-4?"),
        (["--data.max_seq_len=32k"], "'32k'", "flag --data.max_seq_len", "32768"),
        (["--model.rope.factor=2"], "model.rope.rope_type", "--model.rope.factor", "yarn"),
        (["--train.groups=[{mtch: a}]"], "groups[0].mtch", "--train.groups", "write match"),
        (["--train.groups=[{path: a}]"], "groups[0].path", "--train.groups", '"match":'),
        (["--memory.disk_dir=/x"], "memory.disk = 0", "--memory.disk_dir", "memory.disk"),
        (["--log.profile_steps=[101, 102]"], "[101,102]", "--log.profile_steps", "[1, 100]"),
    ],
)
def test_a_wrong_flag_names_what_is_meant(
    flags: list[str], given: str, source: str, change: str
) -> None:
    error = refused(parse_run, [*NEEDED, *flags])
    assert given in error.given and source in error.source and change in error.change


@pytest.mark.parametrize(
    "flags",
    [
        ["--train.epochs=1", "--train.steps=2"],
        ["--train.steps=null"],
        ["--model.init=random", "--model.lora.rank=2"],
        ["--offload=disk", "--memory.disk=0"],
        ["--chunks.order=chunk-first", "--chunks.stage_layers=2"],
        ["--chunks.size=auto", "--chunks.sample.rate=0.5"],
        ["--train.loss=sft", "--train.beta=0.2"],
        ["--train.loss=sft", "--train.loss_type=robust"],
        ["--train.loss=sft", "--data.format=preference"],
        ["--train.loss=dpo", "--data.format=chat"],
        ["--train.loss=dpo", "--train.loss_type=ipo", "--train.label_smoothing=0.1"],
    ],
)
def test_keys_that_do_not_fit_each_other_are_all_named(tmp_path: Path, flags: list[str]) -> None:
    error = refused(parse_run, [*NEEDED, *flags])
    asked = sorted(flag.split("=")[0] for flag in flags if "dpo" not in flag or len(flags) == 2)
    assert error.source == " and ".join(f"the flag {flag}" for flag in asked)
    values = nested("out", "x")
    for flag in flags:
        key, _, value = flag[2:].partition("=")
        put(values, key, read_yaml(value, "", ""))
    error = refused(build_run, values, "run.yaml")
    file, _, keys = error.source.partition(", key ")
    assert file == "run.yaml" and len(keys.split(" and ")) == 2


def test_a_source_whose_format_does_not_fit_the_loss_is_shown() -> None:
    data = {"train": [{"path": "a", "format": "preference"}]}
    error = refused(build_run, {"model": {"name": "m"}, "data": data, "out": "o"}, "run.yaml")
    assert "preference" in error.given and error.source.endswith("key train.loss and data.train")


def test_options_that_fit_a_loss(run_file: Path) -> None:
    pairs = parse_run([*NEEDED, "--train.loss=dpo", "--train.beta=0.2"])
    assert (pairs.train.loss_type, pairs.train.beta) == ("sigmoid", 0.2)
    for flag, other in (("epochs", "steps"), ("steps", "epochs")):
        run_file.write_text(f"{RUN}train: {{{other}: 5}}\n")
        assert "=null" in refused(parse_run, [str(run_file), f"--train.{flag}=1"]).change
        config = parse_run([str(run_file), f"--train.{flag}=1", f"--train.{other}=null"])
        assert getattr(config.train, other) is None


@pytest.mark.parametrize(
    ("text", "given", "source", "change"),
    [
        ("model: {name: x}\ndata: {trian: [a]}", "2 wrong keys", "", "data.trian     did you mean"),
        ("modle: {name: x}", "3 wrong keys", "", "modle     did you mean model?\n  no model  add"),
        ("model: {name: x}\ndata: {train: x, evil: y}", "data.evil", "key data.evil", "eval?"),
        ("train.steps: 1\n" + RUN, "with a dot", "key train.steps", "train: {steps: ...}"),
        (RUN + "Train: {lr: 3}\ntrain: {steps: 5}", "Train, an unknown", "Train", "mean train?"),
        (
            "model: {name: x}\ndata: {train: {path: x, weights: 2}}",
            "data.train[0].weights, an unknown key", "key data.train", "write weight",
        ),
        ("model: {name: x}\ndata: {train: {path: x, subset: y}}", "[0].subset", "", "write name"),
        ("model: {name: x}\ndata: {train: [{path: x, zzz: 1}]}", "[0].zzz", "", "weight: 2.0}"),
        ("model: {name: x}\ndata: {train: {path: a, share: 0.5}}", "0.5", "train", "up to 0.5"),
        ("model: {name: x}\ndata: {train: []}", "data.train = []", "train", "such as books.jsonl"),
        (RUN + "train: {epochs: .nan}", "epochs = nan", "epochs", "set train.epochs, such as 3"),
        (RUN + "log:\n  wandb: a\n   b: c", "in line 5, column 5: b: c", "", "line"),
        ("model: [", "expected", "", "line"),
        ("", "an empty file", "", "quickstart.yaml"),
        (RUN + "chunks: {size: 64, sample: 0.25}", "chunks.sample = 0.25", "chunks.sample",
         "write chunks.sample: {rate: 0.25}"),
        ("train: {lr: 1}\ntrain: {lr: 2}", 'key "train" in line 2', "", "line"),
        ("train: {steps: " + "9" * 6000 + "}", "Exceeds the limit", "", "line"),
        ("out: !!float ''", "index", "", "line"),
        ("[" * 900, "recursion", "", "line"),
        (f"{RUN}out: [{'long, ' * 99}]", "'long', ...", "out", "set out"),
    ],
)  # fmt: skip
def test_a_wrong_file_names_what_is_meant(
    tmp_path: Path, text: str, given: str, source: str, change: str
) -> None:
    error = refused_file(tmp_path / "run.yaml", text)
    assert given in error.given and "^" not in error.given and "\n" not in error.given
    assert "run.yaml" in error.source and source in error.source and change in error.change


def test_files_that_are_none(tmp_path: Path) -> None:
    assert "nowhere.yaml: No such file" in refused(parse_run, ["nowhere.yaml"]).given
    file = tmp_path / "run.yaml"
    file.write_bytes(b"out: \xff")
    assert "can't decode byte" in refused(load_run, file).given
    file.write_text("base_model: a\ndatasets: b\nmicro_batch_size: 1\n")
    assert f"furlong convert {file}" in refused(load_run, file).change


def test_offload_samples_and_budgets_are_the_same_in_files_and_as_flags(run_file: Path) -> None:
    sections = {
        "memory": "{cpu: 24GiB, disk: 1TB, disk_dir: /scratch}",
        "offload": "{attention: disk, kv: cpu}",
        "chunks": "{order: layer-first, stage_layers: 4, size: 64,"
        " sample: {chunks: 8, rule: fixed, cap: 2}}",
    }
    run_file.write_text(RUN + "".join(f"{name}: {text}\n" for name, text in sections.items()))
    config = load_run(run_file)
    assert config.offload == {"attention": "disk", "kv": "cpu"}
    memory = config.memory
    assert (memory.cpu, memory.disk, memory.disk_dir) == (24 * 2**30, 10**12, "/scratch")
    sample = config.chunks.sample
    assert sample is not None and not sample.report_loss
    assert (sample.chunks, sample.rule, sample.cap, sample.rate) == (8, "fixed", 2.0, None)
    by_flags = parse_run([*NEEDED, *(f"--{name}={text}" for name, text in sections.items())])
    for name in sections:
        assert getattr(by_flags, name) == getattr(config, name)
    assert build_run(json.loads(config.model_dump_json()), "config.json") == config
    assert parse_run([str(run_file), "--offload", "cpu"]).offload == "cpu"
    assert parse_run([str(run_file), "--chunks.sample=null"]).chunks.sample is None


def test_the_offload_kinds_and_targets_of_run_files_are_those_of_plans() -> None:
    """The schema spells them itself: config is not above plan."""
    assert get_args(schema.OffloadKind) == tuple(field.name for field in fields(Offload))
    assert get_args(schema.OffloadTarget) == get_args(OffloadTarget)


def test_the_methods_of_run_files_are_those_of_planners() -> None:
    named = get_args(schema.ChunksConfig.model_fields["method"].annotation)
    assert named == ("auto", *METHODS)


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
        assert source == Source(path="t.jsonl", weight=2)
    config = parse_run(
        [
            "--data.train=[a.jsonl, {path: b, split: train}]", "--data.eval={path: t.jsonl}",
            "--model={name: folder}", "--model.lora={target_modules: all-linear}",
            "--train.betas=[0.8, 0.9]", "--out={a}",
        ]
    )  # fmt: skip
    assert config.data.train == (Source(path="a.jsonl"), Source(path="b", split="train"))
    assert config.data.eval == (Source(path="t.jsonl"),)
    assert config.model_dump()["data"]["train"][0] == "a.jsonl"
    assert parse_run([*NEEDED, "--data.train=b,c", "--data.train=d"]).data.train == tuple(
        Source(path=path) for path in ("a.jsonl", "b", "c", "d")
    )
    assert config.model.lora is not None and config.model.lora.target_modules == "all-linear"
    assert (config.train.betas, config.out) == ((0.8, 0.9), "{a}")
    lora = parse_run([str(run_file), "--model.lora.target_modules=all-linear"]).model.lora
    assert lora is not None and lora.target_modules == "all-linear"


def number_keys() -> dict[str, str]:
    """Keys whose schema has a number somewhere, and the schema itself."""
    found = {}
    for key in LEAVES:
        outer, _, name = key.rpartition(".")
        section = section_of(all_keys()[outer]) if outer else RunConfig
        schema = json.dumps((section or RunConfig).model_json_schema()["properties"][name])
        if "number" in schema or "integer" in schema:
            found[key] = schema
    return found


NUMBERS = number_keys()


@pytest.mark.parametrize("key", NUMBERS)
def test_a_truth_value_and_infinity_are_no_numbers(key: str) -> None:
    assert len(NUMBERS) > 30
    example = example_of(key)
    assert example or key.startswith("model.rope.")
    if example:
        values = nested(key, read_yaml(example, "", ""))
        if key.startswith("chunks.sample"):
            values["chunks"]["size"] = 64
        if key == "train.early_stopping":
            values["data"]["eval"] = "held-out.jsonl"
        build_run(values, "run.yaml")
    for value in (True, math.inf, 10**23):
        wrong = [value, value] if "array" in NUMBERS[key] else value
        if value == 10**23 and "number" in NUMBERS[key]:
            continue
        error = refused(build_run, nested(key, wrong), "run.yaml")
        assert error.given.startswith((f"{key} = ", f"{key}[0] = "))
        assert error.source == f"run.yaml, key {key}"


def test_a_weight_is_a_number() -> None:
    for weight in (True, math.inf, "yes"):
        with pytest.raises(ConfigError, match=r"data.train\[0\].weight = "):
            build_run(nested("data.train", {"path": "x", "weight": weight}), "run.yaml")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [("train.steps", "1e3", 1000), ("train.steps", "1000.0", 1000), ("train.steps", "01000", 1000),
     ("train.steps", "0x10", 16), ("train.steps", "1:30", None), ("train.steps", "1.5", None),
     ("train.steps", "yes", None), ("train.steps", "1e400", None), ("train.steps", "0", None),
     ("train.lr", ".5", 0.5), ("memory.device", "10e9", 10**10),
     ("memory.device", "24GiB", 24 * 2**30)],
)  # fmt: skip
def test_a_number_is_the_same_in_a_file_and_as_a_flag(
    run_file: Path, key: str, text: str, value: float | None
) -> None:
    section, name = key.split(".")
    run_file.write_text(f"{RUN}{section}: {{{name}: {text}}}\n")
    for arguments in ([str(run_file)], [*NEEDED, f"--{key}={text}"]):
        if value is None:
            assert f"{key} = " in refused(parse_run, arguments).given
        else:
            assert getattr(getattr(parse_run(arguments), section), name) == value


def test_words_and_dates_stay_as_they_are_written(run_file: Path) -> None:
    text = "model: {name: no}\ndata: {train: [on, 1:30]}\nout: 2024-13-45\nlog: {wandb: yes}\n"
    run_file.write_text(text)
    config = load_run(run_file)
    assert config.model.name == "no"
    assert config.data.train == (Source(path="on"), Source(path="1:30"))
    assert (config.out, config.log.wandb) == ("2024-13-45", "yes")


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("train.learning_rate", "write train.lr"),
        ("per-device-train-batch-size", "write train.sequences_per_step"),
        ("lora_r", "write model.lora.rank"),
        ("lr", "train.lr?"),
        ("model.max_seq_len", "data.max_seq_len?"),
        ("train.stpes", "train.steps?"),
        ("train.foo", "remove it"),
        ("train.sequence_parallel_size", "write parallel.sp"),
        ("train.use_dora", "furlong.chunked"),
        ("train.plot_loss", "remove it: every step is logged"),
        ("train.precision", "write model.dtype"),
        ("train.ep", "there is none: "),
        ("train.tensor_parallel_size", "parallel.sp"),
    ],
)
def test_keys_of_other_trainers_are_answered_with_ours(key: str, change: str) -> None:
    error = refused(parse_run, [*NEEDED, f"--{key}=1"])
    assert change in error.change and error.given == f"--{key}"
    error = refused(build_run, nested(key, 1), "run.yaml")
    assert change in error.change and error.given == f"{key}, an unknown key"


def test_a_foreign_key_has_one_answer_which_names_a_key_of_ours() -> None:
    table = {kind: foreign_table()[kind] for kind in ("ours", "needless", "lost", "refused")}
    names = [name for answers in table.values() for theirs in answers.values() for name in theirs]
    assert len(names) == len(set(names))
    assert {answer_to(theirs[0]).target for theirs in table["ours"].values()} <= set(all_keys())
    ours = {key.rpartition(".")[2] for key in all_keys()}
    assert all(name in answer_to(name).text for name in names if name in ours)


def test_all_wrong_keys_of_a_file_are_told_at_once(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["base_model", "datasets", "adapter", "stage", "pref_beta", "use_peft", "plugins"]
    run_file.write_text("".join(f"{key}: [1]\n" for key in keys) + "train: {lr: fast}\n")
    assert main(["train", str(run_file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    rows = {line.split()[0]: line for line in lines[4:]}
    assert lines[0] == f"given:    {len(lines) - 4} wrong keys"
    assert all(suggest(key, ()) in rows[key] for key in keys)
    assert "a number" in rows["train.lr"] and "  no data" in "\n".join(lines)


def test_a_table_of_wrong_keys_says_which_are_flags(run_file: Path) -> None:
    flags = ["--train.lr=0", "--train.eps=0"]
    error = refused(parse_run, [str(run_file), *flags])
    assert error.source == "the command line" and "(the flag --train.lr)" in error.change
    run_file.write_text("modle: {}\n")
    error = refused(parse_run, [str(run_file), *flags])
    *_, last = error.change.splitlines()
    assert error.source == str(run_file) and "(the flag --train." in last


@pytest.mark.parametrize(
    "text", ["train: [1]", "train: 5", "train: !!set {a}", "train: &a [*a]", "chunks: {sample: 1}"]
)
def test_flags_do_not_hide_a_section_that_is_none(run_file: Path, text: str) -> None:
    run_file.write_text(RUN + text)
    for flags in ([], ["--train.steps=1", "--chunks.sample.rate=0.5"]):
        assert "a section with keys among" in refused(parse_run, [str(run_file), *flags]).required


def test_an_empty_section_is_one_without_keys(run_file: Path) -> None:
    run_file.write_text(f"{RUN}train:\n")
    assert load_run(run_file).train.steps == 100
    assert parse_run([str(run_file), "--train.steps=1"]).train.steps == 1


@pytest.mark.parametrize(
    ("key", "path"),
    [("out", "${OUT}"), ("data.cache_dir", "$(pwd)/x"), ("data.train", ["a", "$HOME/x"])],
)
def test_a_variable_in_a_path_is_refused(key: str, path: object) -> None:
    error = refused(build_run, nested(key, path), "run.yaml")
    assert error.given.startswith(key) and "variables such as $" in error.required
    build_run({"model": {"name": "~/x"}, "data": {"train": "a$"}, "out": "5$ a"}, "run.yaml")
