"""Every method and our search on every preset of lengths: simulated seconds of a step.

    python benchmarks/comparison.py                 # docs/comparison.md, exits 1 on a miss

Each method has its own best layout of the same devices, every way to deal sequences to replicas
and ZeRO-1 or 3. Promises: the search is never slower than the best published method that has a
plan, and on at least three presets at least 5 % faster with a plan that none of them can write,
which is judged by the plan (`planners.search.writable`).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from harness import console

from furlong.cost.devices.hardware import hardware
from furlong.cost.lengths import sample_lengths
from furlong.cost.memory.training import Training
from furlong.cost.model import CostModel
from furlong.cost.shapes.known_models import model_shape
from furlong.errors import ConfigError
from furlong.planners.search.catalogue import PUBLISHED, SEARCHED
from furlong.planners.search.problem import Found, Problem
from furlong.planners.search.search import search
from furlong.planners.search.writable import writers

_GAIN = 0.05
_NUM_PRESETS = 3
_DOCUMENT = Path(__file__).parent.parent / "docs" / "comparison.md"
_OURS = "furlong"


@dataclass(frozen=True)
class Setting:
    preset: str
    model: str
    hardware: str
    num_devices: int
    num_sequences: int
    context_tokens: int
    """Longer sequences are cut off at it."""

    def problem(self) -> Problem:
        lens = sample_lengths(
            self.preset, self.num_sequences,
            max_seq_len=self.context_tokens, too_long="truncate",
        )  # fmt: skip
        model = CostModel(model_shape(self.model), hardware(self.hardware), Training(zero_stage=3))
        return Problem(seq_lens=lens, model=model, num_devices=self.num_devices, zeros=(1, 3),
                       tiers=("device", "host"))  # fmt: skip


_K = 1024
SETTINGS = (
    Setting("lmsys-chunkflow", "Qwen2.5-7B", "A100-80", 32, 256, 256 * _K),
    Setting("lmsys-skrull", "Qwen2.5-0.5B", "H100", 32, 256, 208 * _K),
    Setting("chunkflow-evaluation", "Qwen2.5-14B", "A100-80", 32, 256, 256 * _K),
    Setting("wikipedia", "Qwen2.5-7B", "H100", 32, 256, 128 * _K),
    Setting("chatqa2", "Qwen2.5-7B", "H100", 32, 128, 128 * _K),
    Setting("llama3-long-sft", "Llama-3-8B", "H100", 32, 512, 128 * _K),
    Setting("github", "GPT-13B", "A800", 32, 128, 192 * _K),
    Setting("commoncrawl", "GPT-13B", "A800", 32, 128, 192 * _K),
)


@dataclass(frozen=True)
class Result:
    """One preset: seconds of a step by method; None where no plan fits."""

    setting: Setting
    step_s: dict[str, float | None]
    winner: Found

    @property
    def best_published(self) -> tuple[str, float]:
        found = {n: s for n, s in self.step_s.items() if s is not None and n != _OURS}
        return min(found.items(), key=lambda pair: pair[1])

    @property
    def ours_s(self) -> float:
        return self.winner.best.step_s

    @property
    def gain(self) -> float:
        """Of the search over the best published plan, as a share of the latter's time."""
        return 1 - self.ours_s / self.best_published[1]

    @property
    def writers(self) -> tuple[str, ...]:
        """Published methods that could have written the winner."""
        return writers(self.winner.best.plan, self.winner.best.model.shape)

    @property
    def wins(self) -> bool:
        """Whether it is faster by enough, with a plan that no single method can write."""
        return self.gain >= _GAIN and not self.writers


def compare(setting: Setting) -> Result:
    problem = setting.problem()
    step_s: dict[str, float | None] = {}
    for name, method in PUBLISHED.items():
        try:
            step_s[name] = search(problem, {name: method}).best.step_s
        except ConfigError:
            step_s[name] = None
    winner = search(problem, SEARCHED)
    step_s[_OURS] = winner.best.step_s
    return Result(setting, step_s, winner)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[s.preset for s in SETTINGS], default=None)
    only = parser.parse_args().only
    results = []
    for setting in SETTINGS:
        if only in (None, setting.preset):
            results.append(compare(setting))
            console.print(line(results[-1]))
    better, slower = [r for r in results if r.wins], [r for r in results if r.gain < -1e-9]
    verdict = (
        f"On {len(better)} of {len(results)} presets the search is at least {_GAIN:.0%} faster "
        "than the best published plan, with one that no single method can write "
        f"(promised: {_NUM_PRESETS}); on {len(slower)} it is slower (promised: 0)."
    )
    console.print(verdict)
    if only is None:
        _DOCUMENT.write_text(document(results, verdict), encoding="utf-8")
        console.print(f"written: {_DOCUMENT.relative_to(_DOCUMENT.parent.parent)}")
    return int(only is None and (len(better) < _NUM_PRESETS or bool(slower)))


def line(result: Result) -> str:
    name, seconds = result.best_published
    return (
        f"{result.setting.preset}: {result.ours_s:.3g} s, best published {name} {seconds:.3g} s, "
        f"gain {result.gain:.1%}; {result.winner.best.dials}, {_written_by(result)}"
    )


def _written_by(result: Result) -> str:
    could = result.writers
    return f"a plan of {' or '.join(could)}" if could else "a plan of no single method"


_HEAD = """\
# The same batch under every method

Written by `python benchmarks/comparison.py`. All seconds are simulated, none is measured.

Every method takes the fastest of its own plans on the same devices: any layout of data, sequence
and pipeline parallelism that it knows, the dials that its paper or its public code has, sequences
dealt to replicas in turn, by tokens or by FLOPs, ZeRO-1 or 3, and 5 % of the memory left free. All
share one cost model and one cut of the layers into stages. The search is over all of these plans
and over their combinations; whether one of the methods could have written its plan is judged by the
plan: cut and mixed sequences, places, what is kept and where, stages.

"""


def document(results: list[Result], verdict: str) -> str:
    names = [name for name in results[0].step_s if name != _OURS]
    lines = [
        "| preset | setting | " + " | ".join([*names, _OURS]) + " | gain |",
        "| --- | --- |" + " ---: |" * (len(names) + 2),
    ]
    for result in results:
        s = result.setting
        best = result.best_published[0]
        cells = [_cell(result.step_s[name], name == best) for name in names]
        setting = (
            f"{s.model}, {s.num_devices} {s.hardware}, {s.num_sequences} sequences up to "
            f"{s.context_tokens // _K}K"
        )
        figures = [*cells, f"{result.ours_s:.3g}", f"{result.gain:.1%}"]
        lines.append(f"| {s.preset} | {setting} | {' | '.join(figures)} |")
    lines += ["", "Seconds per step; the best published plan in bold; a dash: none fits.", ""]
    lines += ["What the search chose:", ""]
    lines += [f"- {r.setting.preset}: {r.winner.best.dials} ({_written_by(r)})" for r in results]
    return _HEAD + "\n".join([*lines, "", verdict, ""])


def _cell(seconds: float | None, is_best: bool) -> str:
    if seconds is None:
        return "-"
    return f"**{seconds:.3g}**" if is_best else f"{seconds:.3g}"


if __name__ == "__main__":
    sys.exit(main())
