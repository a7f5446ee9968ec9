"""Every method and our search on every preset of lengths: simulated seconds of a step.

    python research/comparison.py                                   # all settings
    python research/comparison.py --settings github-32 wikipedia-8  # some
    python research/comparison.py --settings                        # none: the page alone

Each method has its own best layout of the same devices, every way to deal sequences to replicas,
groups larger than the heads allow, and ZeRO-1 (`CONDITIONS`). What is found is kept in a file,
search by search, so that a run goes on where another one ended and settings add up; a search by
other code is made again. docs/research/comparison.md is written from all that is there. Promises,
which decide the exit status: the search over all methods is never slower than the best published
method that has a plan, and no plan of one pool is faster than the lower bound.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from harness import console
from papers.places_bound import lower_bound_s
from papers.published.catalogue import PUBLISHED
from papers.published.problem import Problem
from papers.published.replicas import Outcome
from papers.published.search import search

from furlong.cost.lengths import draw_with_longest, sample_lengths
from furlong.cost.machine import Machine
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Lora, Training
from furlong.errors import ConfigError
from furlong.planners.options import options_in_words
from furlong.planners.orders import gathered_first
from furlong.planners.question import MARGIN, Limits, Question, whole_model
from furlong.planners.search import best_plan
from furlong.planners.search import search as one_search
from furlong.simulate.predict import step_s

_ROOT = Path(__file__).parent.parent
_DOCUMENT = _ROOT / "docs" / "research" / "comparison.md"
_RESULTS = _ROOT / "docs" / "research" / "comparison.json"
_CODE = ("src/furlong/cost", "src/furlong/plan", "src/furlong/planners", "src/furlong/simulate",
         "research/comparison.py", "research/papers/places_bound.py",
         "research/papers/places_forced.py", "research/papers/published")  # fmt: skip
"""Code that decides the results."""
_NEAR = 0.05
_EQUAL = 1e-9
"""Share of a step by which two may differ and be equal."""
_K = 1024


@dataclass(frozen=True)
class Setting:
    preset: str
    model: str
    hardware: str
    num_sequences: int
    context_tokens: int
    """Longer sequences are cut off at it."""
    num_devices: int = 32
    seed: int = 0
    lora_rank: int | None = None
    has_longest: bool = False
    """Whether one is the longest sequence of the preset, or the draw is taken as it comes."""

    @property
    def name(self) -> str:
        return f"{self.preset}-{self.num_devices}" + "-longest" * self.has_longest

    @cached_property
    def seq_lens(self) -> tuple[int, ...]:
        draw = draw_with_longest if self.has_longest else sample_lengths
        drawn = draw(self.preset, self.num_sequences, self.seed)
        return tuple(min(n, self.context_tokens) for n in drawn)

    def problem(self) -> Problem:
        lora = None if self.lora_rank is None else Lora(self.lora_rank)
        training = Training(zero_stage=1, gathers=True, lora=lora)
        model = CostModel(model_shape(self.model), Machine.named(self.hardware), training)
        return Problem(seq_lens=self.seq_lens, model=model, num_devices=self.num_devices,
                       offload=("none", "cpu"))  # fmt: skip

    def __str__(self) -> str:
        lora = "" if self.lora_rank is None else f" with LoRA {self.lora_rank}"
        return (
            f"{self.model}{lora}, {self.num_devices} {self.hardware}, {self.num_sequences} "
            f"sequences, the longest {max(self.seq_lens) / _K:.3g}K"
        )


SETTINGS = (
    Setting("lmsys-chunkflow", "Qwen2.5-7B", "A100-80", 256, 256 * _K),
    Setting("lmsys-skrull", "Qwen2.5-0.5B", "H100", 256, 208 * _K),
    Setting("chunkflow-evaluation", "Qwen2.5-14B", "A100-80", 256, 256 * _K),
    Setting("wikipedia", "Qwen2.5-7B", "H100", 256, 128 * _K),
    Setting("chatqa2", "Qwen2.5-7B", "H100", 128, 128 * _K),
    Setting("llama3-long-sft", "Llama-3-8B", "H100", 512, 128 * _K),
    Setting("github", "GPT-13B", "A800", 128, 192 * _K),
    Setting("commoncrawl", "GPT-13B", "A800", 128, 192 * _K),
)
LONGEST = tuple(
    replace(s, has_longest=True) for s in SETTINGS if max(s.seq_lens) < s.context_tokens
)
"""The same draws with the longest sequence of the preset, which few draws have: what a plan has to
fit, and what long-context methods are for."""
HELD_OUT = tuple(
    other
    for s in SETTINGS
    for other in (
        replace(s, num_devices=8, num_sequences=s.num_sequences // 2, seed=1, lora_rank=16),
        replace(s, num_devices=128, seed=2, has_longest=True),
    )
)
"""Settings on which nothing was tuned: other draws, few and many devices, adapters."""
ALL = {setting.name: setting for setting in (*SETTINGS, *LONGEST, *HELD_OUT)}

CONDITIONS = {
    "ChunkFlow": ("`chunkflow`", "sp, pp", "TP x SP x PP of Megatron-LM (Table 3)"),
    "InfiniPipe": ("`infinipipe`", "sp, pp", "Ulysses x PP, FSDP (ZeRO-3) within stages"),
    "Skrull": ("`skrull`", "sp", "DP x CP on DeepSpeed, ZeRO-2"),
    "FlexSP": ("no", "places of one pool", "Ulysses groups of several sizes, ZeRO-3"),
    "Hybrid CP": ("no", "places of one pool", "CP groups of several sizes, optimizer sharded"),
    "SeCO": ("`seco`", "sp", "one device, LoRA"),
    "FPDT": ("`fpdt`", "sp", "Ulysses, ZeRO-3"),
    "Ulysses": ("no", "sp", "Ulysses, ZeRO-1 to 3"),
    "Data parallel": ("no", "none", "ZeRO-1 to 3"),
    "1F1B padded": ("no", "sp, pp", "TP x PP, ZeRO-1"),
    "1F1B packed": ("no", "sp, pp", "TP x PP, ZeRO-1"),
    "Seq1F1B": ("no", "sp, pp", "TP x PP"),
    "Seq1F1B packed": ("no", "sp, pp", "Ulysses x PP, as InfiniPipe runs it"),
}
"""By published method: its name as `chunks.method`, if a run has it; the parallelism under which it
is planned here, replicas and ZeRO-1 beside it; that of its paper."""

Answer = dict[str, Any]
"""One search's: seconds of the step (None: no plan fits), dials in words, whether it is one pool,
seconds of CPU; or the bound's seconds."""
Results = dict[str, dict[str, Answer]]
"""By the name of a setting, then of the search."""
_OURS, _PUBLISHED, _BOUND = "furlong", "published", "bound"


_AS_LONG = ("1F1B padded", "Seq1F1B")
"""Methods that treat each sequence as the longest one: not asked where one is far longer, for their
searches take longest and nothing comes of them."""


def methods_of(setting: Setting) -> list[str]:
    """Published methods that are asked of a setting that is not held out."""
    return [name for name in PUBLISHED if not (setting in LONGEST and name in _AS_LONG)]


def searches(setting: Setting) -> list[str]:
    """What is asked of a setting: our search, the bound, and the published methods, each alone or
    of held-out settings all together."""
    return [_OURS, _BOUND, *([_PUBLISHED] if setting in HELD_OUT else methods_of(setting))]


def answer(name: str, asked: str) -> Answer:
    problem, started_s = ALL[name].problem(), time.process_time()
    found: Answer = {"s": None}
    if asked == _BOUND:
        found["s"] = bound_s(problem)
    else:
        methods = PUBLISHED if asked == _PUBLISHED else {asked: PUBLISHED.get(asked)}
        try:
            if asked == _OURS:
                found |= _ours(problem)
            else:
                tried = search(problem, methods)
                best = min((tried.best, *tried.others), key=as_run_s)
                found |= {"s": as_run_s(best), "method": best.dials.method,
                          "dials": str(best.dials), "is_pool": best.dials.is_pool}  # fmt: skip
        except ConfigError:
            pass
    return found | {"cpu_s": round(time.process_time() - started_s, 1)}


def as_run_s(outcome: Outcome) -> float:
    """Seconds of a published plan whose step begins as a run's does: weights are gathered first."""
    return step_s(outcome.model, gathered_first(outcome.plan))


def _ours(problem: Problem) -> Answer:
    """The answer of furlong plan and furlong train."""
    model = problem.model
    limits = Limits(model.hardware.budget_bytes, int(model.hardware.host_bytes))
    found = one_search(Question([problem.seq_lens], model, limits, problem.num_devices))
    method, plan = best_plan(problem.seq_lens, found)
    layout = found.best.layout
    step = step_s(whole_model(found.question.model_of(layout)), plan)
    return {"s": step, "method": method, "is_pool": method == "places" and layout.dp == 1,
            "dials": f"{layout}, {options_in_words(found.options)}"}  # fmt: skip


def bound_s(problem: Problem) -> float:
    """Seconds that no plan of whole sequences on one pool of all devices undercuts."""
    return lower_bound_s(
        problem.seq_lens, problem.model, pool_size=problem.num_devices,
        budget_bytes=problem.limit_bytes,
    )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One setting, with the answers of all its searches."""

    setting: Setting
    answers: Mapping[str, Answer]

    @property
    def ours_s(self) -> float:
        return float(self.answers[_OURS]["s"])

    @property
    def best_published(self) -> tuple[str, float]:
        """Method and seconds."""
        found = [a for name, a in self.answers.items() if name not in (_OURS, _BOUND)]
        best = min(found, key=lambda one: inf if one["s"] is None else one["s"])
        return ("none", inf) if best["s"] is None else (best["method"], best["s"])

    @property
    def gain(self) -> float:
        """Share of the best published plan's time that ours saves."""
        return 1 - self.ours_s / self.best_published[1]

    @property
    def above_bound(self) -> float:
        """Share of the bound that ours takes more."""
        return self.ours_s / float(self.answers[_BOUND]["s"]) - 1

    @property
    def breaks(self) -> list[str]:
        """The promises that it breaks, in words."""
        found = []
        if self.gain < -_EQUAL:
            name, seconds = self.best_published
            found.append(f"{name} takes {seconds:.6g} s, ours {self.ours_s:.6g} s")
        least_s = float(self.answers[_BOUND]["s"]) * (1 - _EQUAL)
        found += [
            f"the pool of {one['method']} takes {one['s']:.6g} s, its bound {least_s:.6g} s"
            for one in self.answers.values() if one.get("is_pool") and one["s"] < least_s
        ]  # fmt: skip
        return [f"{self.setting.name}: {words}" for words in found]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", nargs="*", choices=list(ALL), default=list(ALL),
                        metavar="NAME", help=", ".join(ALL))  # fmt: skip
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="searches at a time")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="what was found up to now")
    parser.add_argument("--page", type=Path, default=_DOCUMENT)
    given = parser.parse_args(argv)
    code = fingerprint()  # once: files may change while it runs
    results = load(given.results, code)
    left = [
        (name, asked)
        for name in given.settings
        for asked in searches(ALL[name])
        if asked not in results.get(name, {})
    ]
    with ProcessPoolExecutor(given.jobs) as pool:
        running = {pool.submit(answer, *one): one for one in left}
        for future in as_completed(running):
            name, asked = running[future]
            found = results.setdefault(name, {})[asked] = future.result()
            save(given.results, results, code)
            console.print(f"{name}, {asked}: {_seconds(found['s'])}, {found['cpu_s']:.0f} s of CPU")
    rows = complete(results)
    if rows:
        given.page.write_text(document(rows), encoding="utf-8")
        console.print(f"written: {given.page}, {len(rows)} of {len(ALL)} settings")
    broken = [words for row in rows for words in row.breaks]
    for words in broken:
        console.print(f"promise broken: {words}")
    return int(bool(broken) or not rows)


def fingerprint() -> str:
    """A hash of the code that decides the results."""
    digest = hashlib.sha256()
    for path in map(_ROOT.joinpath, _CODE):
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def load(path: Path, code: str) -> Results:
    """What an earlier run found by the code of that fingerprint."""
    if not path.exists():
        return {}
    saved = json.loads(path.read_text(encoding="utf-8"))
    found: Results = saved["results"] if saved["code"] == code else {}
    return found


def save(path: Path, results: Results, code: str) -> None:
    ordered = {
        name: {asked: results[name][asked] for asked in searches(one) if asked in results[name]}
        for name, one in ALL.items() if name in results
    }  # fmt: skip
    text = json.dumps({"code": code, "results": ordered}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def complete(results: Results) -> list[Row]:
    """The settings of which every search has been made."""
    return [
        Row(setting, results[name])
        for name, setting in ALL.items()
        if all(asked in results.get(name, {}) for asked in searches(setting))
    ]


_HEAD = """\
# The same batch under every method

Written by `python research/comparison.py` from `comparison.json`. All seconds are simulated.

Every method takes the fastest of its own plans on the same devices: any layout that it knows, the
dials that its paper or its public code has, sequences dealt to replicas in turn, by tokens, by
FLOPs or by the time of its plans (InfiniPipe: not by time), and {margin} of the memory left free.
All share one cost model. *furlong* is the answer of `furlong plan` and `furlong train`. Methods
that share whole sequences have groups larger than the heads of a model allow, too.

**Published methods have the parallelism under which `furlong train` runs them**: ZeRO-1 (states of
the optimizer are sharded over replicas and sequence-parallel groups, weights and gradients of a
stage are whole), sequence and pipeline parallelism, no tensor parallelism. Some papers have another
one; where a dash stands for one with ZeRO-2 or ZeRO-3, its system may fit. *furlong* may also free
weights between stages (`parallel.reshard`, ZeRO-3 that gathers twice a step), and does so in
{freed}. There its gain is over methods that are not given this:

{conditions}

*Hybrid CP* is Megatron-Core's `--hybrid-context-parallel` (commit d98e8a6). Its
`max_seqlen_per_dp_cp_rank` is searched, and places are chosen by this cost model's seconds, so it
is faster here than there.

The *bound* is one of whole sequences on one pool of all devices. A pipeline or replicas may
undercut it. Promised is that the search is never slower than the best published method, and that no
pool is faster than the bound.
"""


def document(rows: Sequence[Row]) -> str:
    missing = [name for name in ALL if name not in {row.setting.name for row in rows}]
    known = [row for row in rows if row.setting in SETTINGS]
    held_out = [row for row in rows if row.setting in HELD_OUT]
    longest = [row for row in rows if row.setting in LONGEST]
    table = ["| method | `chunks.method` | here, with ZeRO-1 | in its paper |",
             "| --- | --- | --- | --- |"]  # fmt: skip
    table += [f"| {name} | {' | '.join(words)} |" for name, words in CONDITIONS.items()]
    freed = [row.setting.name for row in rows if "reshard true" in row.answers[_OURS]["dials"]]
    parts = [_HEAD.format(
        margin=f"{MARGIN:.0%}", conditions="\n".join(table),
        freed=", ".join(freed) or "no setting",
    )]  # fmt: skip
    if missing:
        parts += [f"**Not run** of {len(ALL)} settings: {', '.join(missing)}.", ""]
    for title, words, own in (
        ("As they are drawn", "Most draws of these presets have no long sequence: the longest of "
         "each is told.", known),
        ("With the longest sequence", "The same draws, one sequence of which is the longest that "
         "its preset has, cut at the context of the paper. Methods that pad or slice all sequences "
         "as the longest one are left out.", longest),
    ):  # fmt: skip
        if own:
            parts += [f"## {title}", "", f"{words} Seconds per step; the best published plan in "
                      "bold; a dash: none fits.", "", *_table(own), "", *_words(own)]  # fmt: skip
    if held_out:
        parts += ["## Held out", "", "Settings on which nothing was tuned: other draws, 8 devices "
                  "with LoRA, and 128 with the longest sequence.", "", *_short_table(held_out), "",
                  *_words(held_out)]  # fmt: skip
    cpu_s = sum(one["cpu_s"] for row in rows for one in row.answers.values())
    return "\n".join([*parts, f"All searches took {cpu_s / 60:.0f} minutes of CPU.", ""])


def _table(rows: Sequence[Row]) -> list[str]:
    methods = methods_of(rows[0].setting)
    lines = [
        "| preset | setting | " + " | ".join([*methods, "furlong"]) + " | gain | bound |",
        "| --- | --- |" + " ---: |" * (len(methods) + 3),
    ]
    for row in rows:
        best = row.best_published[0]
        cells = [
            f"**{cell}**" if name == best else cell
            for name in methods
            for cell in [_seconds(row.answers[name]["s"])]
        ]
        cells += [f"{row.ours_s:.3g}", f"{row.gain:.1%}", _seconds(row.answers[_BOUND]["s"])]
        lines.append(f"| {row.setting.preset} | {row.setting} | {' | '.join(cells)} |")
    return lines


def _short_table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| preset | setting | best published | s | furlong | gain | bound |",
        "| --- | --- | --- |" + " ---: |" * 4,
    ]
    for row in rows:
        name, seconds = row.best_published
        lines.append(
            f"| {row.setting.preset} | {row.setting} | {name} | {_seconds(seconds)} | "
            f"{row.ours_s:.3g} | {row.gain:.1%} | {_seconds(row.answers[_BOUND]['s'])} |"
        )
    return lines


def _words(rows: Sequence[Row]) -> list[str]:
    """What came of the search."""
    gains = [max(0.0, row.gain) for row in rows]
    most = max(rows, key=lambda row: row.gain)
    slower = sum(row.gain < -_EQUAL for row in rows)
    near = sum(row.above_bound <= _NEAR for row in rows)
    taken = sum(abs(row.gain) <= _EQUAL for row in rows)
    return [
        f"On {slower} of {len(rows)} settings the search is slower than the best published plan "
        f"(promised: 0), on {taken} it has found no faster one. It saves {median(gains):.1%} of "
        f"the time in the median, {max(gains):.1%} at most ({most.setting.name}); on {near} it is "
        f"within {_NEAR:.0%} of the bound.",
        "",
    ]


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None or seconds == inf else f"{seconds:.3g}"


if __name__ == "__main__":
    sys.exit(main())
