"""Every draw of a short sequence: what the rules promise holds, and a broken engine is found."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

import furlong
from furlong.cli.main import main
from furlong.config.schema import (
    ChunksConfig,
    DataConfig,
    ModelConfig,
    RunConfig,
    SampleConfig,
    TrainConfig,
)
from furlong.config.sources import build_run, read_yaml
from furlong.models.shrink import shrink_config
from furlong.planners.spaco import EXACT, Factors, Sampling, draw
from furlong.runtime import cell
from furlong.runtime.head import LossHead
from furlong.verify import run as verify_run
from furlong.verify import sampling
from furlong.verify.checks import (
    ROUNDED,
    WIDE,
    Finding,
    Subject,
    build_subject,
)
from furlong.verify.resume import check_resume
from furlong.verify.sampling import (
    UNBIASED,
    OverDraws,
    all_draws,
    bound_of_mean,
    check_draws,
    in_small,
    measure,
    sampling_of_run,
)

OPTIONS = furlong.ChunkOptions(size=16, keep="kv", num_retained=0)
NARROW = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64}
ROOT = Path(__file__).parents[2]
LONGEST = 64
"""Chunks of a run's longest sequence."""
SOME_LABELS = [False, False, True, False, False, True]


def subject_of(config_class: str, options: furlong.ChunkOptions = OPTIONS, **more: Any) -> Subject:
    config = getattr(transformers, config_class)(**NARROW, **more)
    return build_subject(shrink_config(config, max_seq_len=4096), options, None)


@pytest.fixture(scope="module")
def neox() -> Subject:
    """LayerNorm: nothing is rounded to float32."""
    return subject_of("GPTNeoXConfig")


def at_the_end(subject: Subject, rule: Sampling) -> OverDraws:
    return measure(subject, rule, sampling._with_labels_from(sampling._FIRST_LABEL["at the end"]))


def test_unbiased_draws_pass_wherever_labels_are(neox: Subject) -> None:
    """Without label_rate chunks with labels are always drawn: 2^4 draws of the other four."""
    assert bound_of_mean(neox).error == UNBIASED
    finding = check_draws(neox, Sampling(rate=0.3), LONGEST)
    assert finding.passed, finding
    at_end = next(line for line in finding.details if line.startswith("at the end")).split()[3:]
    assert at_end[0] == "16"
    assert float(at_end[1]) == pytest.approx((2 + 4 * 0.3) / 6, abs=1e-3)
    assert float(at_end[2]) <= UNBIASED and at_end[3] == "1.0000"
    assert float(at_end[4]) > 0.1
    assert not any(line.startswith("everywhere") for line in finding.details)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "report_loss"),
    [
        (OPTIONS, True),
        (furlong.ChunkOptions(size=16, order="layer-first", stage_layers=2), False),
    ],
    ids=["kv, report_loss", "layer-first"],
)
def test_unbiased_draws_of_chunks_with_labels_pass(
    options: furlong.ChunkOptions, report_loss: bool
) -> None:
    subject = subject_of("GPTNeoXConfig", options)
    rule = Sampling(rate=0.3, label_rate=0.6, report_loss=report_loss)
    finding = check_draws(subject, rule, LONGEST)
    assert finding.passed, finding
    everywhere = next(line for line in finding.details if line.startswith("everywhere")).split()
    assert everywhere[1:3] == ["64", "0.600"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config_class", "more"),
    [
        ("LlamaConfig", {}),
        ("Gemma3TextConfig", {"head_dim": 32, "num_key_value_heads": 1}),
    ],
)
def test_families_that_round_are_held_to_their_rounding(config_class: str, more: Any) -> None:
    subject = subject_of(config_class, **more)
    assert bound_of_mean(subject).error == ROUNDED
    finding = check_draws(subject, Sampling(rate=0.3, label_rate=0.7), LONGEST)
    assert finding.passed and "float32" in finding.figure, finding


@pytest.mark.slow
def test_draws_of_recurrent_layers_are_held_to_the_bound_of_their_gradients() -> None:
    config = transformers.AutoConfig.for_model("bamba")
    subject = build_subject(shrink_config(config, max_seq_len=4096), OPTIONS, None)
    assert bound_of_mean(subject).error == WIDE
    finding = check_draws(subject, Sampling(rate=0.3), LONGEST)
    assert finding.passed, finding


def test_relays_without_their_factor_are_found(
    neox: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unscaled(view: Any, slice_index: int) -> Any:
        piece = view.cell.pieces.get(slice_index)
        if piece is None:
            return None
        return view.cell.store.later_grads(piece.seq_id, view.layer, piece.index)

    monkeypatch.setattr(cell.LayerView, "later_grads", unscaled)
    finding = check_draws(neox, Sampling(rate=0.3), LONGEST)
    assert not finding.passed, finding


@pytest.mark.slow
def test_losses_without_their_factor_are_found(
    neox: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LossHead.gradient

    def unscaled(head: LossHead, hidden: Any, inputs: Any, _: float, divisor: int) -> Any:
        return plain(head, hidden, inputs, 1.0, divisor)

    monkeypatch.setattr(LossHead, "gradient", unscaled)
    assert check_draws(neox, Sampling(rate=0.3), LONGEST).passed  # all labels are drawn
    finding = check_draws(neox, Sampling(rate=0.3, label_rate=0.5), LONGEST)
    assert not finding.passed, finding


def test_draws_with_other_factors_are_found(neox: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw_without(*given: Any) -> dict[int, Factors]:
        return dict.fromkeys(draw(*given), EXACT)

    monkeypatch.setattr(sampling, "draw", draw_without)
    finding = check_draws(neox, Sampling(rate=0.3), LONGEST)
    assert not finding.passed, finding


def test_a_gradient_that_is_not_finite_fails_whatever_the_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = subject_of("GPTNeoXConfig", num_hidden_layers=1)
    rule, take = Sampling(rate=0.4, rule="paper"), sampling.take_grads
    assert check_draws(subject, rule, LONGEST).passed

    def not_finite(model: Any) -> Any:
        found = take(model)
        return found | {name: found[name] * math.nan for name in list(found)[:1]}

    monkeypatch.setattr(sampling, "take_grads", not_finite)
    assert not check_draws(subject, rule, LONGEST).passed


@pytest.mark.parametrize(
    "rule",
    [
        Sampling(rate=0.3),
        Sampling(chunks=4, label_rate=0.5),
        Sampling(chunks=3, rule="fixed"),
        Sampling(rate=0.4, rule="paper", cap=1.5),
    ],
    ids=lambda rule: f"{rule.rule} {rule.chunks or rule.rate}",
)
def test_all_draws_are_those_of_any_seed_with_their_probabilities(rule: Sampling) -> None:
    draws = list(all_draws(rule, SOME_LABELS))
    assert math.fsum(chance for chance, _ in draws) == pytest.approx(1)
    assert len({tuple(drawn) for _, drawn in draws}) == len(draws)
    tries = 4000
    seen = [draw(SOME_LABELS, rule, random.Random(seed)) for seed in range(tries)]
    for chance, drawn in draws:
        spread = math.sqrt(tries * chance * (1 - chance))
        assert seen.count(drawn) == pytest.approx(tries * chance, abs=5 * spread + 1)
    assert all(any(one == drawn for _, drawn in draws) for one in seen)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Sampling(chunks=8), Sampling(rate=0.125)),
        (Sampling(rate=0.2, label_rate=0.5), Sampling(rate=0.2, label_rate=0.5)),
        (Sampling(chunks=8, rule="fixed"), Sampling(chunks=2, rule="fixed")),
        (Sampling(rate=0.5, rule="paper", cap=2), Sampling(chunks=3, rule="paper", cap=2)),
        (Sampling(rate=0.99, rule="fixed"), Sampling(chunks=5, rule="fixed")),
    ],
)
def test_the_small_sequence_keeps_rule_and_share(rule: Sampling, expected: Sampling) -> None:
    assert in_small(rule, LONGEST) == expected


def test_weights_by_earlier_chunks_are_told_here_and_for_the_run() -> None:
    lines = sampling._weights(Sampling(chunks=8, rule="fixed"), 128)
    assert [line.split() for line in lines[1:]] == [
        ["drawn", "0", "1", "2", "3"],
        ["2", "of", "6", "1.000", "1.000", "0.000", "0.000"],
        ["8", "of", "128", "1.000", "1.000", "0.864", "0.627"],
    ]
    assert "-" in sampling._weights(Sampling(chunks=2, rule="fixed"), 3)[3]


def run_config(**sample: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(name="tiny"),
        data=DataConfig(train=("none",), max_seq_len=4096),
        chunks=ChunksConfig(size=64, sample=sample or None),
        train=TrainConfig(lr=1e-2),
    )


def test_a_run_without_a_sample_has_none() -> None:
    assert sampling_of_run(run_config()) is None
    expected = Sampling(rate=0.2, report_loss=True)
    assert sampling_of_run(run_config(rate=0.2, report_loss=True, check_every_steps=5)) == expected


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_draws() -> None:
    config = transformers.LlamaConfig(num_hidden_layers=2, **NARROW)
    run = run_config(chunks=8, check_every_steps=3)
    finding = check_resume(run, shrink_config(config, max_seq_len=4096))
    assert finding.passed, finding


@pytest.mark.slow
@pytest.mark.parametrize("sound", [True, False])
def test_the_verb_prints_the_table(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sound: bool,
) -> None:
    monkeypatch.setattr(verify_run, "check_resume", lambda *_: Finding("resume", "not here", True))
    if not sound:
        monkeypatch.setattr(sampling, "draw", lambda *given: dict.fromkeys(draw(*given), EXACT))
    transformers.GPTNeoXConfig(num_hidden_layers=2, **NARROW).save_pretrained(tmp_path)
    flags = [
        f"--model.name={tmp_path}", "--data.train=none", "--data.max_seq_len=1024",
        "--chunks.size=64", "--chunks.sample.chunks=4",
    ]  # fmt: skip
    assert main(["verify", *flags]) == (0 if sound else 1)
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[1] for line in lines if line.startswith(("ok", "FAIL"))]
    assert names == ["gradients", "isolation", "accumulation", "draws", "resume"]
    assert lines[4].startswith("ok" if sound else "FAIL")
    assert lines[5].startswith("      rate 0.25, rule unbiased: every draw of a sequence")
    assert sound or lines[-1] == "failed: draws"


def test_the_document_shows_runs_and_names_every_key() -> None:
    text = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
    shown = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(shown) == 4
    for block in shown:
        values = read_yaml(block, "", "") | {"model": {"name": "x"}, "data": {"train": "x"}}
        assert sampling_of_run(build_run(values, "run.yaml")) is not None
    table = text.split("| Key of `chunks.sample` |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(SampleConfig.model_fields)
