"""`furlong rope`: the loss by position with other factors of RoPE; the model is not trained."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.launched import Launched
from helpers.tiny_runs import TinyRun, run_command
from ruamel.yaml import YAML
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from furlong.cli.main import main
from furlong.config.sources import build_run
from furlong.errors import ConfigError
from furlong.models.build import read_config
from furlong.models.rope import ropes_to_try
from furlong.report.beyond import Beyond, PositionSpan, TriedRope, chosen_rope, format_ropes
from furlong.train.processes import ALONE
from furlong.train.ropes import try_ropes

SHORT = 32


def run_file(tiny_run: TinyRun, folder: Path, **model: Any) -> Path:
    settings = {"max_position_embeddings": SHORT}
    values = {
        "model": {"name": str(tiny_run.folder / "model"), "dtype": "float64", "config": settings},
        "data": {
            "train": [str(tiny_run.folder / "texts")], "max_seq_len": 4 * SHORT,
            "eval": [str(tiny_run.folder / "texts")], "too_long": "truncate",
        },
        "chunks": {"size": 20},
        "train": {"sequences_per_step": 3},
        "out": str(folder / "run"),
    }  # fmt: skip
    values["model"] |= model  # type: ignore[operator]
    (folder / "run.yaml").write_text(json.dumps(values))
    return folder / "run.yaml"


def losses_by_transformers(tiny_run: TinyRun, rope: dict[str, Any] | None) -> list[torch.Tensor]:
    """The losses of the tokens from position 1 on, of each text with more than `SHORT`."""
    config = AutoConfig.from_pretrained(tiny_run.folder / "model")
    if rope is not None:
        own = {"original_max_position_embeddings": SHORT, "rope_theta": 10000.0}
        config.rope_parameters = {**own, **rope}
        config.max_position_embeddings = int(rope["factor"] * SHORT)
    model = AutoModelForCausalLM.from_pretrained(
        tiny_run.folder / "model", config=config, dtype=torch.float64
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_run.folder / "model")
    found = []
    for file in sorted((tiny_run.folder / "texts").iterdir()):
        ids = [*tokenizer(file.read_text())["input_ids"], tokenizer.eos_token_id][: 4 * SHORT]
        if len(ids) > SHORT:
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0]
            found.append(cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none"))
    return found


def test_losses_are_those_of_transformers_with_the_same_rope(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = build_run(json.loads(run_file(tiny_run, tmp_path).read_text()), "a test")
    tried, longest = try_ropes(config, (1, 2, 4), ALONE)
    assert [(each.factor, each.positions) for each in tried] == [
        (1, SHORT), (2, 2 * SHORT), (4, 4 * SHORT),
    ]  # fmt: skip
    assert longest == 4 * SHORT and [p.name for p in tmp_path.iterdir()] == ["run.yaml"]
    width = SHORT // 4
    for each in tried:
        yarn = {"rope_type": "yarn", "factor": each.factor}
        assert each.rope == (yarn if each.factor > 1 else None)
        truth = losses_by_transformers(tiny_run, each.rope)
        assert each.beyond.trained_tokens == SHORT
        for span in each.beyond.spans:
            reaching = [own for own in truth if len(own) >= max(1, span.start)]
            inside = torch.cat([own[max(1, span.start) - 1 : span.stop - 1] for own in reaching])
            trained = torch.cat([own[SHORT // 2 - 1 : SHORT - 1] for own in reaching])
            assert span.num_valid_tokens == len(inside) and span.stop - span.start == width
            assert span.loss == pytest.approx(float(inside.mean()), rel=1e-6)
            assert span.trained_loss == pytest.approx(float(trained.mean()), rel=1e-6)
    assert len({each.beyond.spans[-1].loss for each in tried}) == 3


def test_the_verb_prints_and_draws_and_leaves_nothing_else(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """By default factors are doubled until they reach the longest sequence."""
    monkeypatch.chdir(tmp_path)
    file = run_file(tiny_run, tmp_path)
    assert main(["rope", str(file), "--picture=factors.png", "--chunks.size=64"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows if row[1:2] and row[1] in ("(its", "64", "128")] == [
        "1", "2", "4",
    ]  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == ["factors.png", "run.yaml"]
    assert main(["rope", str(file), "--factors", "0.5"]) == 2


@pytest.mark.slow
def test_processes_share_the_sequences(tiny_run: TinyRun, tmp_path: Path, capsys: Any) -> None:
    arguments = ["rope", str(run_file(tiny_run, tmp_path)), "--factors", "4"]
    assert main(arguments) == 0
    alone = capsys.readouterr().out.splitlines()
    for parallel in ({"dp": 2}, {"sp": 2}, {"pp": 2}):
        flags = [f"--parallel={json.dumps(parallel)}"]
        first, second = Launched(tmp_path / "out", run_command, [*arguments, *flags]).ended()
        assert (first.code, second.code) == (0, 0), first.said
        assert alone[-4:] == first.said.splitlines()[-4:]
        assert "factor" not in second.said


def beyond(*rises: float) -> Beyond:
    spans = [
        PositionSpan(start, start + 10, 2 + rise, 2.0, 0.01, 0.005, 100)
        for start, rise in zip(range(40, 90, 10), (0.0, *rises), strict=True)
    ]
    return Beyond(50, tuple(spans))


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ({1: (0, 0, 0, 0)}, "own RoPE holds to 90 tokens"),
        ({1: (0, nan, 0, 0), 2: (0, 0, 0, 0)}, "model.rope: {rope_type: yarn, factor: 2}"),
        ({1: (0, 0.1, -1, -1), 2: (0, 0, 0, 0)}, "mean loss of 2.000 is not below the 1.620"),
        ({1: (0, 1, 1, 1), 2: (0, 0, 0, 0)}, "model.rope: {rope_type: yarn, factor: 2}"),
        (  # the lower mean loss, of those that hold
            {1: (0, 1, 1, 1), 2: (0, 0, 0, 0), 4: (0, -0.1, 0, 0), 8: (-1, -1, 0, 1)},
            "model.rope: {rope_type: yarn, factor: 4}",
        ),
        ({1: (1, 1, 1, 1), 2: (0, 1, 1, 1), 4: (0, 0, 1, 1)}, "4 holds furthest, to 70"),
    ],
)
def test_the_rope_that_is_named_holds_to_the_end(
    losses: dict[int, tuple[float, ...]], told: str
) -> None:
    tried = [
        TriedRope(
            {"rope_type": "yarn", "factor": factor} if factor > 1 else None, factor, 50 * factor,
            beyond(*rises),
        )
        for factor, rises in losses.items()
    ]  # fmt: skip
    assert told in chosen_rope(tried, 90)
    assert len(format_ropes(tried, 90).splitlines()) == 2 + len(tried)


def test_the_positions_that_are_named_for_the_own_rope_are_accepted(tiny_run: TinyRun) -> None:
    said = chosen_rope([TriedRope(None, 1, 50, beyond(0, 0, 0, 0))], 90)
    folder, values = str(tiny_run.folder / "model"), YAML(typ="safe").load(said.splitlines()[-1])
    with pytest.raises(ConfigError):
        read_config(folder, changes={"max_position_embeddings": 50}, max_seq_len=90)
    read_config(folder, changes=values["model.config"], max_seq_len=90)


def test_the_cost_is_over_all_compared_sequences() -> None:
    own = beyond(0, 1, 1, 1)
    dearer = [replace(own.spans[0], trained_loss=2.25), *own.spans[1:]]
    tried = [
        TriedRope(rope, factor, 100, Beyond(50, tuple(spans)))
        for rope, factor, spans in ((None, 1, own.spans), ({"rope_type": "yarn"}, 2, dearer))
    ]
    assert format_ropes(tried, 90).splitlines()[-1].split()[3:5] == ["2.250", "+0.250"]


LATE = [{"prompt": "a b " * SHORT, "completion": "c d"}] * 3
NONE = [
    {"input_ids": [5] * n, "labels": [-100] * (n - 1) + [last]} for n, last in ((99, -100), (9, 5))
]


@pytest.mark.parametrize("records", [LATE, NONE], ids=["late", "none"])
def test_labels_on_one_side_alone_are_refused(
    tiny_run: TinyRun, tmp_path: Path, capsys: Any, records: list[dict[str, Any]]
) -> None:
    """The answers begin beyond the trained positions; the longer sequences have no labels."""
    file = run_file(tiny_run, tmp_path)
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, records)))
    path = str(tmp_path / "answers.jsonl")
    flags = ["--factors", "2", f'--data.eval=["{path}"]', f"--data.max_seq_len={16 * SHORT}"]
    assert main(["rope", str(file), *flags]) == 2
    assert "labels both within and beyond" in capsys.readouterr().err


def test_factors_below_the_trained_positions_are_refused(tiny_run: TinyRun, tmp_path: Path) -> None:
    folder = tmp_path / "scaled"
    shutil.copytree(tiny_run.folder / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    rope = LLAMA3 | {"rope_theta": 1e4, "original_max_position_embeddings": SHORT // 16}
    changes = {"rope_parameters": rope, "max_position_embeddings": SHORT}
    (folder / "config.json").write_text(json.dumps(config | changes))
    file = run_file(tiny_run, tmp_path, name=str(folder), config={})
    run = build_run(json.loads(file.read_text()), "a test")
    with pytest.raises(ConfigError) as error:
        try_ropes(run, (2, 4, 16), ALONE)
    assert "2 (8), 4 (16)" in error.value.given
    assert error.value.change == "choose factors of 8 or more"


def llama(positions: int, **rope: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32, num_attention_heads=4, max_position_embeddings=positions,
        rope_parameters={"rope_theta": 1e4, "rope_type": "default"} | rope,
    )  # fmt: skip


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("config", "given", "factors", "wanted", "expected"),
    [
        (llama(100), {}, (), 500, [(1, 100), (2, 200), (4, 400), (8, 800)]),
        (llama(100), {}, (4, 1, 3), 500, [(1, 100), (3, 300), (4, 400)]),
        (
            llama(400), {"original_max_position_embeddings": 100}, (), 300,
            [(1, 400), (2, 200), (4, 400)],
        ),
        # a model that scales already: its factor is that of model.rope, of its type
        (
            llama(1600, original_max_position_embeddings=100, **LLAMA3), {}, (), 3200,
            [(8, 1600), (16, 3200)],
        ),
        (
            llama(1600, original_max_position_embeddings=100, **LLAMA3), {"rope_type": "yarn"},
            (), 3200, [(16, 1600), (32, 3200)],
        ),
        (llama(400, rope_type="linear", factor=4.0), {}, (), 900, [(4, 400), (8, 800), (16, 1600)]),
    ],
)  # fmt: skip
def test_factors_are_those_of_the_run_file(
    config: Any, given: dict[str, Any], factors: tuple[float, ...], wanted: int, expected: Any
) -> None:
    found = ropes_to_try(config, given, factors, wanted)
    assert [(factor, positions) for _, factor, positions in found] == expected
    assert found[0][0] is None
