"""A step whose backward runs for drawn chunks only, against the exact step. Float32, on a CPU.

Promises, at the default sizes: one sequence of 8,192 tokens in 64 chunks, 8 layers, 8 chunks drawn,
the mean over eight draws (seeds) in every round.
  time     rule fixed with keep=kv and num_retained=0: at most 0.40x the exact step with the same.
           Theory, in which a forward costs 1 and recompute and backward together 3:
           (k + 3 t) / (4 k) = 0.34.
  memory   its extra peak, the highest of all draws: at most that of the exact step.
Printed beside: the exact step under its best settings (keep=attention, also in chunks eight times
as long, of which sampling would have 8 to draw from), fixed with keep=attention, fixed with
report_loss, and rule unbiased with the same expected number of chunks.
Exact steps must agree in loss and gradient norm; those of rule fixed, which draw the same chunks,
in the gradient norm, and with report_loss in the exact loss. Exits 1 on a miss.

`--tokens` makes all of it smaller, to try the commands out: then misses mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from harness import Promise, Report, add_common_arguments, disagreements, ratios, run_rounds
from measuring import Measurement, measure_each

from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_on_device
from furlong.planners.spaco import draw_chunks

_TOKENS = 8_192
_NUM_CHUNKS = 64
_BUDGET = 8
_NUM_DRAWS = 8
_TIMES_LONGER = 8
_START_TOKENS = 256

_EXACT = "exact, keep=kv"
_BEST = "exact, keep=attention"
_LONGER = f"exact, keep=attention, chunks {_TIMES_LONGER}x as long"
_FIXED = "fixed, keep=kv"
_FIXED_ATTENTION = "fixed, keep=attention"
_REPORTING = "fixed, keep=kv, report_loss"
_UNBIASED = "unbiased, keep=kv"

_PRICES = (
    (_BEST, _EXACT),
    (_LONGER, _EXACT),
    (_FIXED, _EXACT),
    (_FIXED, _BEST),
    (_FIXED_ATTENTION, _BEST),
    (_FIXED_ATTENTION, _LONGER),
    (_REPORTING, _EXACT),
    (_UNBIASED, _EXACT),
)
"""Whose price is printed in terms of whose."""

Results = Mapping[str, Sequence[Measurement]]


def main() -> int:
    arguments = _parse()
    if arguments.step:
        print(json.dumps(asdict(run_step(**json.loads(arguments.step)))))
        return 0
    dials = contenders(arguments.tokens // _NUM_CHUNKS)
    given = {"num_tokens": arguments.tokens, "warmup_tokens": arguments.warmup_tokens}
    commands = {
        name: [sys.executable, __file__, "--step", json.dumps(given | {"dials": dials[name]})]
        for name in dials
    }
    results = run_rounds(commands, arguments.rounds)
    report = Report("sampled", vars(arguments))
    report.add(f"{_BUDGET} of {_NUM_CHUNKS} chunks: {arguments.tokens:,} tokens", results)
    report.promises += promises(results)
    report.errors += disagreeing(results)
    report.notes += [*prices(results), _drawn(arguments.tokens, dials[_UNBIASED])]
    if arguments.tokens != _TOKENS:
        report.notes.append(f"The promises are made for --tokens {_TOKENS}.")
    return report.finish(arguments.json)


def contenders(size: int) -> dict[str, dict[str, Any]]:
    """ChunkOptions by name."""
    plain = {"size": size, "keep": "kv", "num_retained": 0}
    best = {"size": size, "keep": "attention"}
    fixed = {"rule": "fixed", "chunks": _BUDGET}
    # every token has a label, so that unbiased draws as few chunks only if told so
    unbiased = {"rule": "unbiased", "chunks": _BUDGET, "label_rate": _BUDGET / _NUM_CHUNKS}
    return {
        _EXACT: plain,
        _BEST: best,
        _LONGER: best | {"size": _TIMES_LONGER * size},
        _FIXED: plain | {"sample": fixed},
        _FIXED_ATTENTION: best | {"sample": fixed},
        _REPORTING: plain | {"sample": fixed | {"report_loss": True}},
        _UNBIASED: plain | {"sample": unbiased},
    }


def promises(results: Results) -> list[Promise]:
    fixed, exact = results[_FIXED], results[_EXACT]
    return [
        Promise(f"time: {_FIXED} / {_EXACT}", ratios(fixed, exact, lambda m: m.step_s), "<=", 0.40),
        Promise(
            f"extra peak: {_FIXED} / {_EXACT}", ratios(fixed, exact, lambda m: m.extra_bytes),
            "<=", 1.0,
        ),
    ]  # fmt: skip


def disagreeing(results: Results) -> list[str]:
    """Who computes another thing than it should."""
    found = disagreements({name: results[name] for name in (_EXACT, _BEST, _LONGER)})
    found += disagreements({name: results[name] for name in (_FIXED, _FIXED_ATTENTION)})
    # the loss is the exact one, the gradient that of the draw
    expected = [
        replace(fixed, loss=exact.loss)
        for fixed, exact in zip(results[_FIXED], results[_EXACT], strict=True)
    ]
    named = {"exact loss and fixed gradient": expected, _REPORTING: results[_REPORTING]}
    return found + disagreements(named)


def prices(results: Results) -> list[str]:
    """What a contender takes of another's time, CPU time and extra peak: medians of the rounds."""
    theory = (_NUM_CHUNKS + 3 * _BUDGET) / (4 * _NUM_CHUNKS)
    found = [f"theory, time of {_FIXED} / {_EXACT}: {theory:.3g}"]
    for name, other in _PRICES:
        pair = results[name], results[other]
        time, cpu, extra = (
            statistics.median(ratios(*pair, lambda m, what=what: getattr(m, what)))
            for what in ("step_s", "cpu_s", "extra_bytes")
        )
        found.append(
            f"{name} / {other}: time {time:.3g}, CPU time {cpu:.3g}, extra peak {extra:.3g}"
        )
    return found


def over_draws(draws: Sequence[Measurement]) -> Measurement:
    """One measurement of several: the means, and the highest extra peak."""

    def mean(what: str) -> float:
        return statistics.fmean(getattr(draw, what) for draw in draws)

    return Measurement(
        mean("step_s"), mean("cpu_s"), max(draw.extra_bytes for draw in draws), mean("loss"),
        mean("grad_norm"), draws[0].num_tokens,
    )  # fmt: skip


def num_drawn(num_tokens: int, dials: Mapping[str, Any]) -> list[int]:
    """Chunks that each draw of a sampled step trains; all tokens have labels."""
    counts = []
    for seed in range(_NUM_DRAWS):
        options = ChunkOptions(**_seeded(dials, seed))
        assert options.sampling is not None
        plan = plan_on_device([num_tokens], options, num_layers=1)
        counts.append(len(draw_chunks(plan, options.sampling, range(len(plan.chunks)))))
    return counts


def run_step(num_tokens: int, dials: Mapping[str, Any], warmup_tokens: int | None) -> Measurement:
    """The step in this process; where it samples, the mean over the draws."""
    from contenders import Trial, build

    import furlong

    model = build("small")
    (sequence,) = Trial("furlong", "small", num_tokens).batch()
    engine = furlong.Engine(model)

    def step(tokens: int, seed: int) -> Any:
        options = furlong.ChunkOptions(**_seeded(dials, seed))
        batch = [{name: ids[:tokens] for name, ids in sequence.items()}]
        return lambda: engine.forward_backward(batch, options).loss

    seeds = range(_NUM_DRAWS if "sample" in dials else 1)
    return over_draws(
        measure_each(
            model, [step(num_tokens, seed) for seed in seeds], num_tokens=num_tokens,
            start=step(_START_TOKENS, 0), warm_up=step(warmup_tokens or num_tokens, len(seeds)),
        )
    )  # fmt: skip


def _seeded(dials: Mapping[str, Any], seed: int) -> dict[str, Any]:
    return (
        {**dials, "sample": {**dials["sample"], "seed": seed}} if "sample" in dials else {**dials}
    )


def _drawn(num_tokens: int, dials: Mapping[str, Any]) -> str:
    counts = num_drawn(num_tokens, dials)
    return (
        f"unbiased drew {min(counts)} to {max(counts)} chunks, {statistics.fmean(counts):.3g} in "
        f"the mean; fixed always {_BUDGET}."
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.add_argument("--tokens", type=int, default=_TOKENS, help="of the sequence")
    parser.add_argument("--step", default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
