"""Preference training of long answers: one DPO pair against TRL, and what a shared prompt saves.

    python benchmarks/preference.py                       # 2 x 16,384 tokens, 14,336 of them shared
    python benchmarks/preference.py --tokens 8192 --rounds 1
    python benchmarks/preference.py --quick               # a few thousand tokens: that it runs

TRL is DPOTrainer's own loss with gradient checkpointing and precomputed references. Times are
seconds of the CPU, one thread: other work on the machine lengthens the others. StreamBP's trainer
needs older packages, so an environment of its own, named by `--streambp`:

    python -m venv V
    V/bin/pip install torch==2.13.0 transformers==4.51.3 trl==0.17.0 peft==0.15.1 psutil rich
    V/bin/pip install --no-deps streambp==1.0
    python benchmarks/preference.py --streambp V/bin/python
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import replace

from contenders import SHAPES, STEADY_ALLOCATOR
from harness import AGREEMENT, Promise, Report, add_common_arguments, ratios, run_rounds
from measuring import Measurement
from preference_trial import BETA, Trial

from furlong.cost.machine import Machine
from furlong.cost.memory import PARTS
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_two_phases
from furlong.simulate.predict import predict
from furlong.units import format_bytes

TRL, ATTENTION, KV, SHARED = "TRL", "keep=attention", "keep=kv", "keep=kv, prompt shared"
CHUNK_TOKENS, FLOAT_BYTES, GROWTH = 512, 4, 1.1
Results = Mapping[str, list[Measurement]]

PAIR_PROMISES: tuple[tuple[str, str, float], ...] = (
    (ATTENTION, "time", 0.85), (ATTENTION, "extra peak", 0.6), (KV, "extra peak", 0.35),
    (KV, "time", 1.0), (SHARED, "time", 0.6), (SHARED, "extra peak", 0.4),
)  # fmt: skip
"""Of 2 x 16,384 tokens, by TRL's."""


def main() -> int:
    args = _arguments()
    answer = args.tokens // 8
    report = Report("preference", vars(args))
    pair = Trial(TRL, "small", args.tokens - answer, answer)
    dials = {"size": CHUNK_TOKENS}
    trials = {
        TRL: replace(pair, contender="trl"),
        ATTENTION: _furlong(pair, dials | {"keep": "attention"}),
        KV: _furlong(pair, dials | {"keep": "kv"}),
        SHARED: replace(_furlong(pair, dials | {"keep": "kv"}), share_prompts=True),
    }
    part = f"one DPO pair, 2 x {args.tokens:,} tokens, {answer:,} of them the answer's"
    results = run_rounds({name: trial.command() for name, trial in trials.items()}, args.rounds)
    report.add(part, results)
    report.check_agreement(part, agreement(answer))
    report.promises += [] if args.quick else pair_promises(results)
    report.notes += _growth(report, args) if args.growth else []
    report.notes += _group(report, args)
    report.notes += _streambp(report, pair, dials, args)
    return report.finish(args.json)


def agreement(answer_tokens: int) -> float:
    """Relative difference that losses may show: TRL sums log-probabilities in float32, where an
    answer's sum, about its tokens times log V, has an error of 2^-23 of it; DPO takes BETA times
    the difference of two answers' sums."""
    nats = 2 * answer_tokens * math.log(SHAPES["small"]["vocab_size"])
    return max(AGREEMENT, BETA * nats * 2**-23)


def pair_promises(results: Results) -> list[Promise]:
    """The promised figures of one pair, by TRL's."""
    values = {"time": lambda m: m.cpu_s, "extra peak": lambda m: m.extra_bytes}
    return [
        Promise(f"{name}: {what} / TRL", ratios(results[name], results[TRL], values[what]), "<=", b)
        for name, what, b in PAIR_PROMISES
    ]


def growth_promise(short: Measurement, long: Measurement, shape: str) -> Promise:
    """Extra memory may grow by K,V of both sequences, dK,dV of one, and 10 %."""
    config = SHAPES[shape]
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    kv_bytes = 2 * config["num_key_value_heads"] * head_dim * FLOAT_BYTES
    more = (long.num_tokens - short.num_tokens) * kv_bytes * config["num_hidden_layers"] * 1.5
    grown = (long.extra_bytes - short.extra_bytes) / more
    return Promise("keep=kv: growth of memory / K,V and dK,dV", (grown,), "<=", GROWTH)


def _growth(report: Report, args: argparse.Namespace) -> list[str]:
    """Extra memory of keep=kv at half and at twice the length, of a model with few layers; glibc is
    told to give freed memory back, as in step.py's growth."""
    found = {}
    for tokens in (args.tokens // 2, 2 * args.tokens):
        pair = Trial(KV, args.growth, tokens - tokens // 8, tokens // 8)
        trial = _furlong(pair, {"size": 1024, "keep": "kv"})
        found[f"{tokens:,} tokens"] = replace(trial, environment=STEADY_ALLOCATOR).command()
    results = run_rounds(found, 1)
    report.add(f"keep=kv against length, shape {args.growth}", results)
    short, long = (rounds[0] for rounds in results.values())
    report.promises.append(growth_promise(short, long, args.growth))
    return []


def _streambp(
    report: Report, pair: Trial, dials: Mapping[str, object], args: argparse.Namespace
) -> list[str]:
    """The first step of a run by StreamBP's trainer, at its defaults and as its README says, and by
    ours."""
    if not args.streambp:
        return ["StreamBP: left out, --streambp names an interpreter that has its DPO trainer."]
    begins = replace(pair, begins=True)
    rival = replace(begins, contender="streambp", python=args.streambp)
    third = -(-args.tokens // 3)
    readme = {"logits_chunk_size": 100, "checkpoint_chunk_size": third}
    trials = {
        "StreamBP's defaults": rival,
        "StreamBP as its README says": replace(rival, dials=readme),
        ATTENTION: _furlong(begins, {**dials, "keep": "attention"}),
        KV: _furlong(begins, {**dials, "keep": "kv"}),
        SHARED: replace(_furlong(begins, {**dials, "keep": "kv"}), share_prompts=True),
    }
    part = f"the first step, 2 x {args.tokens:,} tokens, whose reference is the model itself"
    report.add(part, run_rounds({name: t.command() for name, t in trials.items()}, args.rounds))
    report.check_agreement(part)
    return []


def _group(report: Report, args: argparse.Namespace) -> list[str]:
    """A group of eight answers: predicted for a 7B model, measured at an eighth of the length."""
    prompt, answer = (512, 32) if args.quick else (2048, 128)
    group = Trial("group", "small", prompt, answer, num_answers=8)
    trials = {
        "own prompts": _furlong(group, {"size": 512, "keep": "kv"}),
        "prompt shared": replace(
            _furlong(group, {"size": 512, "keep": "kv"}), share_prompts=True
        ),
    }  # fmt: skip
    results = run_rounds({name: t.command() for name, t in trials.items()}, args.rounds)
    report.add(f"GRPO, {prompt:,} + 8 x {answer:,} tokens", results)
    report.check_agreement(f"GRPO, {prompt:,} + 8 x {answer:,} tokens", 1e-3)
    shared, own = results["prompt shared"], results["own prompts"]
    work = _work(prompt, answer, 8)
    time = ratios(shared, own, lambda m: m.cpu_s)
    name = "GRPO: time, prompt shared / own prompts"
    report.promises.append(Promise(name, time, "<=", 1.5 * work + 0.1))
    return [f"GRPO, {prompt:,} + 8 x {answer:,} tokens: {work:.3f} of the work", _predicted()]


def _predicted() -> str:
    """The cost model's figures of a 7B model with 16K + 8 x 1K tokens."""
    model = CostModel(model_shape("Qwen2.5-7B"), Machine.named("H100"))
    prompt, answer, answers = 16_384, 1024, 8
    options = ChunkOptions(size=4096, keep="kv")
    alone = plan_two_phases([prompt + answer] * answers, options, num_layers=28)
    forks = {0: [(prompt + answer * i, prompt) for i in range(1, answers)]}
    shared = plan_two_phases([prompt + answers * answer], options, num_layers=28, forks=forks)
    own, joined = predict(model, alone), predict(model, shared)
    before = [model.memory().curve(plan, 0) for plan in (alone, shared)]
    kv = [int(curve.device[:, PARTS.index("kv")].max()) for curve in before]
    return (
        f"GRPO, 16K + 8 x 1K tokens of Qwen2.5-7B on one H100, predicted: {joined.step_s:.1f} s "
        f"for {own.step_s:.1f} s ({joined.step_s / own.step_s:.2f}x), K,V {format_bytes(kv[1])} "
        f"for {format_bytes(kv[0])} ({kv[1] / kv[0]:.2f}x); {_work(prompt, answer, answers):.3f}x "
        "the tokens"
    )


def _work(prompt: int, answer: int, answers: int) -> float:
    """Tokens that are computed where the prompt is shared, by those where it is not."""
    return (prompt + answers * answer) / (answers * (prompt + answer))


def _furlong(trial: Trial, dials: Mapping[str, object]) -> Trial:
    return replace(trial, contender="furlong", dials=dials)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16_384, help="of each answer with its prompt")
    parser.add_argument("--growth", default="tiny", help="shape of the lengths; '' leaves them out")
    parser.add_argument("--quick", action="store_true", help="a few thousand tokens")
    parser.add_argument("--streambp", metavar="PYTHON", help="interpreter that has StreamBP")
    add_common_arguments(parser)
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.growth, args.rounds = 2048, "", 1
    return args


if __name__ == "__main__":
    raise SystemExit(main())
