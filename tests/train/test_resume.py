"""A run that stops and goes on is the run that did not stop."""

from __future__ import annotations

import fcntl
import gzip
import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.covering import Design
from helpers.pair_runs import pair_flags
from helpers.tiny_runs import TEXTS, TinyRun, build_hybrid_run, signal_after

from furlong.cli.lengths import count_run
from furlong.cli.main import main
from furlong.config.sources import build_run, load_run
from furlong.errors import ConfigError
from furlong.plan.plan import Layout
from furlong.planners.decide import Decision
from furlong.planners.options import ChunkOptions
from furlong.train import run_folder
from furlong.train.metrics import MetricsLog

TIMES = ("_s", "tokens_per_s", "_memory_bytes")
LORA = ("--model.lora.rank=2", "--model.lora.dropout=0.3")
PACKED = (
    "--model.lora.rank=2",
    "--model.quantize=nf4",
    "--model.lora.modules_to_save=embed_tokens",
)
HALF = ("--chunks.sample={rate: 0.5, label_rate: 0.5}", "--chunks.size=16")


def weights(run: Path) -> bytes:
    return next((run / "model").glob("*.safetensors")).read_bytes()


def records(run: Path) -> list[dict[str, Any]]:
    """The metrics without what depends on the machine's speed."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if not key.endswith(TIMES)}
        for line in lines
    ]


def report(run: Path) -> dict[str, Any]:
    return {
        key: value
        for key, value in json.loads((run / "report.json").read_text()).items()
        if not key.endswith((*TIMES, "_folder"))
    }


DIALS = Design(
    {
        "end": (signal.SIGTERM, signal.SIGINT, SystemError),
        "loss": ("sft", "dpo"),
        "trained": ((), LORA, PACKED),
        "model": ("llama", "lfm2"),
        "chunks": ((), ("--chunks.keep=kv",), HALF),
        "save": ((), ("--train.async_save=true",)),
        "size": ((), ("--train.sequences_per_step=null", "--train.tokens_per_step=150")),
        "stream": ((), ("--data.streaming=true",)),
        "join": ((), ("--data.join=true",)),
    },
    {
        "chunks": lambda row: row["loss"] == "sft",
        "stream": lambda row: row["loss"] == "sft",
        "join": lambda row: row["loss"] == "sft" and row["model"] == "llama",  # of texts
    },
    steering=("loss", "model"),
)
ROWS = DIALS.cases(2, num_orders=60)


@pytest.fixture(scope="module")
def tiny_runs(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyRun]:
    hybrid = build_hybrid_run("lfm2", tmp_path_factory.mktemp("lfm2"))
    return {"llama": tiny_run, "lfm2": replace(hybrid, chunk_size=64)}


@contextmanager
def ends_after(step: int, end: Any) -> Iterator[None]:
    """The run gets a signal in a step, or an error that it does not know."""
    if end is not SystemError:
        with signal_after(step, end):
            yield
        return
    log = MetricsLog.step

    def fail(self: MetricsLog, at: int, figures: Any) -> None:
        log(self, at, figures)
        if at == step:
            raise SystemError

    with patch.object(MetricsLog, "step", fail), pytest.raises(SystemError):
        yield


@pytest.mark.slow
def test_a_mix_of_sources_goes_on_to_the_same_bits(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """A data set of the hub, compressed, sliced, limited, mixed by tokens, in pieces, of which a
    part is held out; lengths are those of the run."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    home = tmp_path / "datasets--own--set"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0" * 40)
    folder = home / "snapshots" / ("0" * 40) / "long"
    folder.mkdir(parents=True)
    lists = json.dumps([{"text": f"{number} {text}"} for number, text in enumerate(TEXTS * 3)])
    (folder / "train-00000-of-00001.json.gz").write_bytes(gzip.compress(lists.encode()))
    (folder.parent / "README.md").write_text(
        "---\nconfigs:\n- config_name: long\n  data_files: long/train-*\n---\n"
    )
    rows = "".join(f'{number},"{text}"\n' for number, text in enumerate(TEXTS))
    (tmp_path / "short.csv").write_text(f"id,text\n{rows}")
    long = {"path": "own/set", "name": "long", "split": "train[:80%]", "limit": 15, "share": 0.7}
    data = {
        "train": [long, {"path": str(tmp_path / "short.csv"), "share": 0.3}],
        "eval_share": 0.2, "max_seq_len": 64, "too_long": "split", "min_len": 8, "limit": 18,
    }  # fmt: skip
    flags = [
        f"--data.{key}={value if key == 'too_long' else json.dumps(value)}"
        for key, value in data.items()
    ]
    flags = [*flags, "--train.epochs=null", "--train.steps=4"]
    run = tmp_path / "run"
    assert main(tiny_run.arguments(tmp_path / "whole", *flags)) == 0
    with signal_after(3):
        assert main(tiny_run.arguments(run, *flags)) == 0
    capsys.readouterr()
    for key, value in (("eval_share", 0.3), ("min_len", 9)):
        assert main(tiny_run.arguments(run, *flags, f"--data.{key}={value}", "--resume")) == 2
        assert f"data.{key} = " in capsys.readouterr().err
    assert main(tiny_run.arguments(run, *flags, "--resume")) == 0
    assert weights(run) == weights(tmp_path / "whole")
    assert records(run) == records(tmp_path / "whole")
    assert "eval_loss" in {key for record in records(run) for key in record}
    said = capsys.readouterr().out
    lengths = count_run(load_run(str(run / "config.json")))
    assert f"data.train: {lengths.num_sequences} sequences per epoch" in said
    assert lengths.longest == 64


@pytest.mark.parametrize(
    [*DIALS.dials],
    [pytest.param(*row, marks=[pytest.mark.slow] * (i > 1)) for i, row in enumerate(ROWS)],
)
@pytest.mark.few(1)
def test_a_run_that_ends_early_goes_on_to_the_same_bits(
    tiny_runs: dict[str, TinyRun], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    end: Any, loss: str, trained: tuple[str, ...], model: str, chunks: tuple[str, ...],
    save: tuple[str, ...], size: tuple[str, ...], stream: tuple[str, ...], join: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("furlong.data.stream.BLOCK_RECORDS", 3)
    tiny, run = tiny_runs[model], tmp_path / "run"
    flags = (
        *trained,
        *chunks,
        *save,
        *size,
        *stream,
        *join,
        "--train.epochs=null",
        "--train.steps=7",
    )
    if loss == "dpo":
        flags += pair_flags(tiny, tmp_path)
    elif chunks != HALF:
        flags += (f"--data.eval={tiny.folder / 'held-out.jsonl'}",)
    assert main(tiny.arguments(tmp_path / "whole", *flags)) == 0
    with ends_after(5, end):
        assert main(tiny.arguments(run, *flags)) == 0
    printed = capsys.readouterr().out
    saved_step = 4 if end is SystemError else 5
    if end is not SystemError:
        assert f"stopped by {end.name} after step 5 of 7" in printed
        assert f"go on with: furlong train {run / 'config.json'} --resume" in printed
    assert not (run / "report.json").exists()
    assert (run / "checkpoints" / f"step-{saved_step:08d}").is_dir()

    assert main(["train", str(run / "config.json"), "--resume"]) == 0
    assert f"resumed from step-{saved_step:08d}: step {saved_step} of 7" in capsys.readouterr().out
    assert weights(run) == weights(tmp_path / "whole")
    assert records(run) == records(tmp_path / "whole")
    assert report(run) == report(tmp_path / "whole")

    before = (run / "report.json").stat().st_mtime_ns
    assert main(["train", str(run / "config.json"), "--resume"]) == 0
    assert "is finished" in capsys.readouterr().out
    assert (run / "report.json").stat().st_mtime_ns == before


def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    tiny_run: TinyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny_run.leave_run(tmp_path / "whole")
    run = tmp_path / "run"
    tiny_run.leave_run(run, stopped_after=5)
    damaged = run / "checkpoints" / "step-00000005"
    tensors = next(damaged.glob("*.safetensors"))
    tensors.write_bytes(tensors.read_bytes()[:-100])
    capsys.readouterr()
    assert main(tiny_run.arguments(run, "--resume")) == 0
    printed = capsys.readouterr().out
    assert "not loaded: checkpoint step-00000005 is damaged" in printed
    assert "resumed from step-00000004" in printed and "last bits" not in printed
    assert weights(run) == weights(tmp_path / "whole")
    assert records(run) == records(tmp_path / "whole")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--train.lr=3e-3"], "train.lr = 0.003, the run has 0.01"),
        (["--train.seed=4"], "train.seed = 4, the run has 0"),
        (["--data.max_seq_len=300"], "data.max_seq_len = 300, the run has 256"),
        (["--model.lora.rank=4"], "model.lora.rank = 4, the run has None"),
    ],
)
def test_a_run_folder_of_another_config_is_refused(
    tiny_run: TinyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    named: str,
) -> None:
    run = tmp_path / "run"
    tiny_run.leave_run(run, stopped_after=1)
    files = {file: file.stat().st_mtime_ns for file in run.rglob("*") if file.name != ".lock"}
    capsys.readouterr()
    assert main(tiny_run.arguments(run, *flags, "--resume")) == 2
    message = capsys.readouterr().err
    assert [line.split(":")[0] for line in message.splitlines()] == [
        "given", "required", "from", "change",
    ]  # fmt: skip
    assert named in message and "= None, the run has None" not in message
    assert main(tiny_run.arguments(run)) == 2
    assert "--resume; in Python resume=True" in capsys.readouterr().err
    now = {file: file.stat().st_mtime_ns for file in run.rglob("*") if file.name != ".lock"}
    assert now == files


@pytest.mark.parametrize("written", [{}, {"kernels": "none"}])
def test_a_default_of_today_is_not_given_to_a_run_of_before(
    written: dict[str, str], tmp_path: Path
) -> None:
    values: dict[str, Any] = {"model": {"name": "m"}, "data": {"train": "t"}, "out": str(tmp_path)}
    whole = build_run(values, "here").model_dump(mode="json")
    del whole["model"]["kernels"]
    whole["model"] |= written
    (tmp_path / "config.json").write_text(json.dumps(whole))
    (tmp_path / "metrics.jsonl").touch()
    with ExitStack() as stack:
        opened = run_folder.open_run_folder(stack, build_run(values, "here"), resume=True)
    assert opened.config is not None and opened.config.model.kernels == "none"
    values["model"]["kernels"] = "auto"
    with ExitStack() as stack, pytest.raises(ConfigError, match=r"model\.kernels"):
        run_folder.open_run_folder(stack, build_run(values, "here"), resume=True)


def test_options_are_written_only_where_a_run_is_or_begins(tmp_path: Path) -> None:
    """Else they would be found in a folder that has to be empty when the run is started again."""
    assert not run_folder.is_ours(tmp_path)
    with ExitStack() as stack:
        run_folder.create_run_folder(stack, tmp_path)
        assert run_folder.is_ours(tmp_path)


@pytest.mark.parametrize(
    ("processes", "size"), [(2, 64), (4, 256), (8, None)], ids=["shrunk", "checkpoint", "anew"]
)
def test_options_are_the_newest_that_fit_the_processes(
    processes: int, size: int | None, tmp_path: Path
) -> None:
    """A run of 4 went on with 2, where chunks have shrunk before the first checkpoint."""
    saved, shrunk = (
        run_folder.values_of(Decision(ChunkOptions(size=size), "", layout=Layout(dp=dp)))
        for size, dp in ((256, 4), (64, 2))
    )
    (tmp_path / "options.json").write_text(json.dumps(shrunk))
    state: Any = {"options": saved, "written_by": {"processes": 4}}
    checkpoint: Any = SimpleNamespace(state=state)
    found = run_folder._decided(tmp_path, checkpoint, {}, processes)
    assert (found and found.options.size) == size
    assert run_folder._decided(tmp_path, checkpoint, {"chunks.size": 32}, processes) is None


@pytest.mark.slow
def test_how_it_is_computed_may_change(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What may change the last bits is told."""
    run, threads = tmp_path / "run", torch.get_num_threads()
    tiny_run.leave_run(run, stopped_after=5)
    flags = ["--chunks.size=16", "--offload=disk", "--memory.disk=1GiB"]
    flags += ["--train.save_every_steps=3", "--resume"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    assert main(tiny_run.arguments(run, *flags)) == 0
    told = capsys.readouterr().out
    assert "decided again, for these keys have changed: chunks.size, memory.disk, offload" in told
    assert f"threads = {threads + 1}, before {threads}: the last bits may differ" in told
    options = json.loads((run / "options.json").read_text())
    assert (options["size"], options["offload"]) == (16, "disk")
    assert json.loads((run / "config.json").read_text())["train"]["save_every_steps"] == 3
    kept = sorted(path.name[-1] for path in (run / "checkpoints").iterdir())
    assert kept == ["5", "6", "9"]


def test_other_data_is_refused(
    tiny_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for file in (tiny_run.folder / "texts").iterdir():
        (texts / file.name).write_text(file.read_text())
    run, flag = tmp_path / "run", f"--data.train={texts}"
    with signal_after(2):
        assert main(tiny_run.arguments(run, flag)) == 0
    (texts / "0.txt").write_text("other words")
    monkeypatch.delattr("furlong.train.build.build_run_model")  # it is told before that
    assert main(tiny_run.arguments(run, flag, "--resume")) == 2
    assert f"given:    the sequences of {texts}: changed since" in capsys.readouterr().err


def test_the_same_files_may_be_spelled_otherwise_or_lie_elsewhere(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, model = tmp_path / "run", f"{tiny_run.folder}/./model/"
    texts = shutil.copytree(tiny_run.folder / "texts", tmp_path / "moved")
    tiny_run.leave_run(run, stopped_after=2)
    resume = tiny_run.arguments(run, f"--data.train={texts}", f"--model.name={model}", "--resume")
    shutil.move(run / "checkpoints", tmp_path / "aside")
    assert main(resume) == 2  # nothing knows what the data were
    told = capsys.readouterr().err
    assert f"data.train = [{{'path': '{texts}'" in told and "}], the run has" in told
    shutil.move(tmp_path / "aside", run / "checkpoints")
    with signal_after(3):
        assert main(resume) == 0
    assert "resumed from step-00000002" in capsys.readouterr().out
    named = f"[{{path: {texts}, weight: 2.0}}]"
    assert main(tiny_run.arguments(run, f"--data.train={named}", "--resume")) == 2
    assert "'weight': 2.0" in capsys.readouterr().err
    (texts / "0.txt").write_text("other words")
    assert main(resume) == 2
    assert "the sequences of " in capsys.readouterr().err


def test_another_tokenizer_is_refused(
    tiny_run: TinyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_run.folder / "model", model)
    run, flag = tmp_path / "run", f"--model.name={model}"
    with signal_after(2):
        assert main(tiny_run.arguments(run, flag)) == 0
    values = json.loads((model / "tokenizer.json").read_text())
    values["model"]["merges"] = values["model"]["merges"][:5]
    (model / "tokenizer.json").write_text(json.dumps(values))
    assert main(tiny_run.arguments(run, flag, "--resume")) == 2
    assert "the tokenizer (its files, or the versions of tr" in capsys.readouterr().err


def test_checkpoints_without_their_run(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    tiny_run.leave_run(run, "--train.epochs=1")
    (run / "config.json").write_text('{"model')
    assert main(tiny_run.arguments(run, "--train.epochs=1", "--resume")) == 2
    assert "state.json" in capsys.readouterr().err
    (run / "config.json").unlink()
    assert main(tiny_run.arguments(run, "--train.epochs=1", "--resume")) == 2
    message = capsys.readouterr().err
    assert f"out = {run}, which holds checkpoints but no config.json" in message
    assert "change:   restore config.json" in message


def test_a_run_that_was_moved_is_not_begun_anew(
    tiny_run: TinyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its config still names the old place."""
    old, new = tmp_path / "old", tmp_path / "new"
    tiny_run.leave_run(old, stopped_after=2)
    old.rename(new)
    resume = ["train", str(new / "config.json"), "--resume"]
    assert main(resume) == 2
    message = capsys.readouterr().err
    assert f"given:    {new}, a run whose config says out = {old}" in message
    assert f"change:   add --out={new}" in message
    assert not old.exists()
    assert main([*resume, f"--out={new}"]) == 0
    tiny_run.leave_run(tmp_path / "whole")
    assert weights(new) == weights(tmp_path / "whole")
    assert main([*resume]) == 0  # its config names the new place now


def test_nothing_to_resume_is_a_new_run(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in (".lock", "options.json", ".config.json.tmp"):  # killed before the run began
        (run / name).write_text("{")
    assert main(tiny_run.arguments(run, "--train.epochs=1", "--resume")) == 0
    assert f"nothing to resume in {run}: a new run" in capsys.readouterr().out
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("precious")
    assert main(tiny_run.arguments(tmp_path / "other", "--resume")) == 2
    assert "which is not empty" in capsys.readouterr().err


def test_damaged_files_of_a_run_folder(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    once = ("--train.epochs=1", "--train.save_every_steps=0")
    tiny_run.leave_run(run, *once)
    trained = weights(run)
    (run / "report.json").write_text("{")
    (run / "options.json").write_text("{")
    assert main(tiny_run.arguments(run, *once, "--resume")) == 0
    assert weights(run) == trained
    (run / "config.json").write_text("{")
    assert main(tiny_run.arguments(run, *once, "--resume")) == 2
    assert f"from:     {run / 'config.json'}" in capsys.readouterr().err


def test_the_folder_of_a_model_holds_no_run(
    tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in ((), ("--resume",)):
        assert main(tiny_run.arguments(tiny_run.folder / "model", *flags)) == 2
        assert "model, which is not empty" in capsys.readouterr().err


def test_one_process_per_run_folder_goes_on_and_does_not_decide_again(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run = tmp_path / "run"
    tiny_run.leave_run(run, stopped_after=2)
    monkeypatch.delattr("furlong.train.trainer.choose_run_plan")
    with (run / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(tiny_run.arguments(run, "--resume")) == 2
    assert "in which another process is training" in capsys.readouterr().err
    assert main(tiny_run.arguments(run, "--resume")) == 0


def test_a_disk_without_room_is_told_before_the_first_step(
    tiny_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    usage = run_folder.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    assert main(tiny_run.arguments(tmp_path / "run")) == 2
    message = capsys.readouterr().err
    assert "9.77 KiB free on the disk" in message and "4 checkpoints of" in message
    assert not (tmp_path / "run").exists()
