"""What `auto` decides in a run: the search, over the plans that one device carries out today.

    decision = decide(lengths, sequences_per_step=32, model=model, budget_bytes=budget)
    decision.options, decision.words

Candidates are chunks of powers of two, chunk-first, K,V on the device, with each way to keep and
several numbers of retained chunks; dials that are given hold. Their time is that of the run's first
steps. Their memory must suffice for these and for the longest sequence. Among the plans within
`SLACK` of the fastest the one that needs least memory is taken: from some thousand tokens on a
larger chunk gains next to nothing and costs twice the memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, Any

from furlong.cost.model import CostModel
from furlong.cost.training import Lora, Training
from furlong.errors import ConfigError
from furlong.plan.lengths import Lengths, draw_lengths
from furlong.plan.values import Chunk, ChunkPlan, Keep
from furlong.planners.budget import fit
from furlong.planners.candidates import Candidate, Ladder, Room
from furlong.planners.chunkflow import group_chunks
from furlong.planners.options import ChunkOptions, fixed_options
from furlong.planners.pipeline import plan_1f1b
from furlong.planners.search import Found, Problem, search
from furlong.units import format_bytes

if TYPE_CHECKING:
    from furlong.config.schema import ChunksConfig, ModelConfig

SLACK = 0.02
"""Plans whose times differ by less are alike: no prediction is better."""
FREE_RAM = "three fifths of the free RAM"
"""The budget of `memory.device: auto` on a CPU."""
SEARCHED_DIALS = ("size", "num_retained", "keep")
_MIN_SEQUENCES = 32
"""Of the steps whose time is predicted, together."""
_MAX_SEQUENCES = 1024
"""Most sequences of the predicted steps: more change the prediction by less than its error."""
_MAX_TOKENS = 2**22
"""Most tokens of the predicted steps, beyond their least number of sequences."""
_MAX_CHUNKS = 2048
"""Of the longest sequence, in a search."""
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_KEPT: tuple[Keep, ...] = ("attention", "kv", "input")


@dataclass(frozen=True)
class Decision:
    """The dials of a run, and why."""

    options: ChunkOptions
    words: str
    """What was chosen, why, and what the next best would have cost; none where nothing was left to
    choose."""
    found: Found | None = None
    """The search with the chosen plan as its best; None where nothing was searched."""


def decide(
    lengths: Lengths,
    *,
    sequences_per_step: int,
    seed: int = 0,
    longest: int | None = None,
    model: CostModel,
    budget_bytes: int,
    budget_words: str = "memory.device",
    must_fit: bool = False,
    dials: Mapping[str, Any] | None = None,
) -> Decision:
    """The options of a run over sequences of these lengths on one device.

    `longest`: tokens of the data's longest sequence, if it is not among `lengths`. `dials`: what
    the user has given. Where no plan is predicted to fit, small chunks that keep K,V are taken,
    and the words say so; with `must_fit` that is a ConfigError.
    """
    given = dict(dials or {})
    longest = max(longest or 0, lengths.longest)
    if longest > _MAX_CHUNKS * given.get("size", inf):
        words = f"more than {_MAX_CHUNKS:,} chunks are not searched: by the fixed rule"
        return Decision(fixed_options(longest, given), words)
    num_steps = -(-_MIN_SEQUENCES // sequences_per_step)
    seq_lens = draw_lengths(lengths, min(num_steps * sequences_per_step, _MAX_SEQUENCES), seed)
    seq_lens = _bounded(seq_lens)
    runnable = _Runnable(given, sequences_per_step, longest)
    problem = Problem(
        seq_lens=seq_lens, model=model, dp=1, sp=1, pp=1, budget_bytes=budget_bytes, slack=SLACK
    )
    budget = f"{format_bytes(budget_bytes)} ({budget_words})"
    try:
        found = search(problem, {"furlong": runnable.ladders})
    except ConfigError as error:
        if must_fit:
            raise
        words = f"small chunks, for no plan is predicted to fit {budget}: {error.given}"
        return Decision(runnable.smallest(), words)
    return runnable.choose(found, problem, budget)


@dataclass(frozen=True)
class _Runnable:
    """The plans that the executor carries out on one device."""

    given: Mapping[str, Any]
    sequences_per_step: int
    longest: int

    def ladders(self, room: Room) -> Iterator[Ladder]:
        """One per size and keep, down from whole graphs to no retained chunk."""
        room = replace(room, longest_tokens=self.longest)
        seen: set[ChunkOptions] = set()
        for size in [self.given["size"]] if "size" in self.given else room.sizes():
            for rungs in self._dials(room, size):
                options = dict.fromkeys(ChunkOptions(**(rung | dict(self.given))) for rung in rungs)
                new = [one for one in options if one not in seen]
                seen.update(new)
                if new:
                    candidates = [self._candidate(one, room) for one in new]
                    yield Ladder(candidates, partial(self._groups, size=size))

    def _dials(self, room: Room, size: int) -> Iterator[list[dict[str, Any]]]:
        if size >= self.longest:  # nothing is cut: all graphs live as long, whatever is kept
            yield [{"size": size}]
            return
        numbers = [n for n in room.retained(size) if n * size < self.longest]
        keeps = [self.given["keep"]] if "keep" in self.given else _KEPT
        whole: list[dict[str, Any]] = [{"size": size, "keep": "all"}]
        for keep in keeps:
            some = [{"size": size, "keep": keep, "num_retained": n} for n in numbers]
            yield whole if keep == "all" else whole + some

    def _candidate(self, options: ChunkOptions, room: Room) -> Candidate:
        dials = {name: getattr(options, name) for name in SEARCHED_DIALS}

        def build(lens: Sequence[int], model: CostModel) -> ChunkPlan:
            worst = self._plan(self._worst(options.size), options, model)
            fit(worst, model, room.budget_bytes)
            return self._plan(lens, options, model)

        return Candidate("furlong", room.layout, dials, build)

    def _plan(self, lens: Sequence[int], options: ChunkOptions, model: CostModel) -> ChunkPlan:
        return plan_1f1b(
            lens,
            self._groups(lens, model, options.size),
            stages=(model.shape.num_layers,),
            num_retained=options.num_retained,
            keep=options.keep,
        )

    def _groups(self, lens: Sequence[int], _: CostModel, size: int) -> list[list[Chunk]]:
        """The chunks of several steps' sequences; no chunk has those of two steps."""
        groups: list[list[Chunk]] = []
        for first in range(0, len(lens), self.sequences_per_step):
            own = lens[first : first + self.sequences_per_step]
            for group in group_chunks(own, ChunkOptions(size=size)):
                groups.append([_moved(chunk, first) for chunk in group])
        return groups

    def _worst(self, size: int) -> list[int]:
        """The longest sequence, and as many tokens of others as may share its last chunk."""
        others = min(-self.longest % size, (self.sequences_per_step - 1) * self.longest)
        return [self.longest, others] if others else [self.longest]

    def choose(self, found: Found, problem: Problem, budget: str) -> Decision:
        """The plan that needs least memory of those within the slack, and the fastest other one."""
        outcomes = (found.best, *found.others)
        limit_s = found.best.step_s * (1 + SLACK)
        alike = [outcome for outcome in outcomes if outcome.step_s <= limit_s]
        needs = {id(o): self._needs(o.candidate, problem, o.peak_bytes) for o in alike}
        best = min(alike, key=lambda outcome: (needs[id(outcome)], outcome.step_s))
        others = tuple(outcome for outcome in outcomes if outcome is not best)
        why = f"the fastest that fits {budget}"
        if len(alike) > 1:
            why = f"needs least memory of {len(alike)} plans within {SLACK:.0%} of {why}"
        words = (
            f"{_words(best.candidate)}: {why}; {format_bytes(needs[id(best)])} predicted;"
            f" next best of {len(found.trials)} that fit: "
        )
        rivals = [trial for trial in found.trials if trial.candidate is not best.candidate]
        if rivals:
            rival = min(rivals, key=lambda trial: trial.bound_s)
            own = format_bytes(self._needs(rival.candidate, problem))
            words += f"{_words(rival.candidate)}: {_change(rival.bound_s / best.step_s)}, {own}"
        else:
            words += "none"
        options = _options(best.candidate)
        return Decision(options, words, replace(found, best=best, others=others))

    def _needs(self, candidate: Candidate, problem: Problem, at_least: int = 0) -> int:
        """Bytes of a plan of the steps, or of the longest sequence where it needs more."""
        options = _options(candidate)
        worst = self._plan(self._worst(options.size), options, problem.model)
        return max(at_least, fit(worst, problem.model, problem.budget_bytes))

    def smallest(self) -> ChunkOptions:
        """Options that need little, with the dials that are given."""
        size = min(1024, fixed_options(self.longest).size)
        small: dict[str, Any] = {"size": size, "num_retained": 0, "keep": "kv"}
        return ChunkOptions(**(small | dict(self.given)))


def _bounded(seq_lens: tuple[int, ...]) -> tuple[int, ...]:
    """The first sequences, at least the fewest to predict from, without tokens beyond the most."""
    num_fitting = bisect_right(list(accumulate(seq_lens)), _MAX_TOKENS)
    return seq_lens[: max(_MIN_SEQUENCES, num_fitting)]


def _moved(chunk: Chunk, first: int) -> Chunk:
    """The same slices of sequences that are numbered from `first` on."""
    return Chunk(tuple(replace(piece, seq_id=piece.seq_id + first) for piece in chunk.slices))


def _options(candidate: Candidate) -> ChunkOptions:
    dials: dict[str, Any] = dict(candidate.dials)
    return ChunkOptions(**dials)


def _words(candidate: Candidate) -> str:
    return ", ".join(candidate.words())


def _change(ratio: float) -> str:
    """Of two times."""
    if abs(ratio - 1) < 5e-4:
        return "as fast"
    return f"{abs(ratio - 1):.1%} {'slower' if ratio > 1 else 'faster'}"


def training_of(model: ModelConfig) -> Training:
    """What a run trains and in which dtypes, on one device."""
    training = Training.in_dtype(model.dtype)
    lora = model.lora
    if lora is None:
        return training
    if lora.target_modules == "all-linear":
        return replace(training, lora=Lora(lora.rank, attention=True, mlp=True))
    named = set(lora.target_modules)
    attention, mlp = bool(named & _ATTENTION), bool(named - _ATTENTION)
    return replace(training, lora=Lora(lora.rank, attention=attention, mlp=mlp))


def given_dials(chunks: ChunksConfig) -> dict[str, Any]:
    """The dials that a run file gives."""
    dials = {name: getattr(chunks, name) for name in (*SEARCHED_DIALS, "tier", "order")}
    return {name: value for name, value in dials.items() if value != "auto"}
