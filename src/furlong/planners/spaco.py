"""SpaCO: a backward of drawn chunks only, with factors that make up for the others.

Li et al., Findings of ACL 2025 (arXiv 2505.16710), Algorithm 2. Forwards stay exact, so only the
set of surviving paths is random (Eqs. 2 to 5). A contribution to the gradient that reaches its
parameters through h earlier chunks needs h + 1 drawn chunks, the one with the loss among them
(Eq. 6). A Backward multiplies its own loss by a and the dK,dV that later chunks sent by c, which
gives that contribution the weight a c^h; it is unbiased if a c^h times the probability of those
draws is 1 (Eq. 6).

    unbiased   chunk i by itself with any probability p_i above 0, a = c = 1/p_i: exact for every h.
               Proof by induction from the last chunk down: E[1{drawn} / p_i * gradient of i, given
               the chunks behind] is that gradient
    fixed      exactly n of k chunks, a = k/n, c = (k-1)/(n-1): exact for h <= 1, low beyond
    paper      exactly n of k chunks, a = 1, c = k/n, as in Algorithm 2: n/k of what a = c = k/n
               would give, which is itself low for h >= 1. An optimizer that divides by the size of
               gradients (Adam) does not see a common factor, so the paper's runs learn

Errata: Eqs. 8 to 10 compensate by (k/n)^p, as if inclusions were independent, and count one chunk
too few where a chain begins at the loss; no constant a and c are exact for h = 0, 1, 2 when exactly
n chunks are drawn. Algorithm 2 lacks the loss's factor, and runs over the drawn chunks in any order
where it must descend. Its condition "chunks >= layers" is layers + 1.

Ours: `unbiased`; draws inside any plan, not SeCO's alone; what no drawn chunk reads is not computed
unless the whole loss is reported. `seco.sampled_candidates` offers the plans of the method spaco.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from furlong.errors import ConfigError, in_short
from furlong.plan.check import check
from furlong.plan.plan import (
    Action,
    Backward,
    ChunkPlan,
    Forward,
    RebuildKV,
    Recompute,
    Recv,
    Send,
)
from furlong.units import count_words

Rule = Literal["unbiased", "fixed", "paper"]
_LEAST_RATE = 1e-6


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of one Backward."""

    loss_factor: float = 1.0
    """Multiplies the chunk's own loss."""
    relay_factor: float = 1.0
    """Multiplies the dK,dV of later chunks."""


EXACT = Factors()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """A rule and a budget by which chunks of every cut sequence are drawn. Give one of `rate` and
    `chunks`.

    Chunks that hold whole sequences only are always drawn: no context makes their backward dear,
    and no memory is saved. A sequence of no more chunks than the budget is computed exactly.
    """

    rate: float | None = None
    """Share of a sequence's chunks, above 0 and at most 1."""
    chunks: int | None = None
    """Chunks of a sequence; under `unbiased` their expected number."""
    rule: Rule = "unbiased"
    label_rate: float | None = None
    """`unbiased` only: probability of chunks that have labels; None: 1, they are all drawn."""
    cap: float | None = None
    """`fixed` and `paper` only: highest relay factor (the paper's experiments: 2). It trades
    gradients through other chunks, of which it keeps less, for variance."""
    report_loss: bool = False
    """Whether chunks that are not drawn compute their loss, at the price of the rest of their
    forward. Without it the loss of a step is estimated from the drawn ones."""
    seed: int | None = None
    """Decides, with its place in the batch, a sequence's draw; another one every step. None: drawn
    from torch's generator."""

    def __post_init__(self) -> None:
        is_free, a_rate = self.rule == "unbiased", f"a number from {_LEAST_RATE} to 1, above 0"
        for name, fits, required in (
            ("rate", _is_within(self.rate, float, _LEAST_RATE, 1), a_rate),
            ("chunks", _is_within(self.chunks, int, 1), "a whole number of at least 1"),
            ("rule", self.rule in get_args(Rule), f"one of {', '.join(get_args(Rule))}"),
            ("label_rate", _is_within(self.label_rate, float, _LEAST_RATE, 1), a_rate),
            ("cap", _is_within(self.cap, float, 1), "a number of at least 1"),
            ("report_loss", isinstance(self.report_loss, bool), "true or false"),
            ("seed", _is_within(self.seed, int, -math.inf), "a whole number, or none"),
        ):
            if not fits:
                raise _unusable(f"{name} = {getattr(self, name)!r}", required)
        if (self.rate is None) == (self.chunks is None):
            raise _unusable(f"rate = {self.rate}, chunks = {self.chunks}", "one of rate and chunks")
        for is_wrong, name, required, change in (
            (is_free and self.cap is not None, "cap",
             "no cap: a smaller relay factor would make the estimate biased",
             "remove cap, or set rule to fixed"),
            (not is_free and self.label_rate is not None, "label_rate",
             "no label_rate: all chunks of a sequence are as likely",
             "remove label_rate, or set rule to unbiased"),
            (not is_free and self.chunks == 1, "chunks",
             "at least 2: the gradient of a single chunk has no other to go through",
             "draw more chunks, or set rule to unbiased"),
        ):  # fmt: skip
            if is_wrong:
                given = f"{name} = {getattr(self, name)!r} with rule {self.rule}"
                raise _unusable(given, required, change)

    def share(self, num_chunks: int) -> float:
        """The budget of a sequence of so many chunks, as a share of them."""
        if self.chunks is not None:
            return min(1.0, self.chunks / num_chunks)
        assert self.rate is not None
        return self.rate

    def probabilities(self, has_labels: Sequence[bool]) -> list[float]:
        """Probabilities of drawing the chunks of a sequence, by whether each has labels, under
        `unbiased`."""
        rate = self.share(len(has_labels))
        labelled = 1.0 if self.label_rate is None else self.label_rate
        return [1.0 if rate == 1 else labelled if has else rate for has in has_labels]

    def num_drawn(self, num_chunks: int) -> int:
        """Number of chunks of a sequence that `fixed` and `paper` draw: at least two where it has
        them, for a single one has nobody to send gradients to."""
        if self.chunks is not None:
            return min(self.chunks, num_chunks)
        return min(num_chunks, max(2, round(self.share(num_chunks) * num_chunks)))


def sampling_of(value: object) -> Sampling | None:
    """The Sampling that a value or a mapping of its fields means. Raises ConfigError for others."""
    if value is None or isinstance(value, Sampling):
        return value
    if not isinstance(value, Mapping):
        raise _unusable(
            f"sample = {in_short(repr(value), 80)}", "a furlong.Sampling, a mapping, or none"
        )
    names = list(Sampling.__dataclass_fields__)
    if unknown := [str(name) for name in value if name not in names]:
        raise _unusable(f"sample with {', '.join(unknown)}", f"among {', '.join(names)}")
    return Sampling(**dict[str, Any](value))


def draw(has_labels: Sequence[bool], sampling: Sampling, rng: random.Random) -> dict[int, Factors]:
    """Positions and factors of the drawn chunks of one sequence; `has_labels`: which of its chunks
    have labels."""
    if sampling.rule == "unbiased":
        chances = sampling.probabilities(has_labels)
        return {i: Factors(1 / p, 1 / p) for i, p in enumerate(chances) if rng.random() < p}
    num_chunks = len(has_labels)
    drawn = rng.sample(range(num_chunks), sampling.num_drawn(num_chunks))
    return dict.fromkeys(sorted(drawn), fixed_factors(sampling, num_chunks))


def fixed_factors(sampling: Sampling, num_chunks: int) -> Factors:
    """The a and c of the rules that draw exactly n of k chunks."""
    num_drawn = sampling.num_drawn(num_chunks)
    if num_drawn == num_chunks:
        return EXACT
    scale = num_chunks / num_drawn
    cap = math.inf if sampling.cap is None else sampling.cap
    if sampling.rule == "paper":
        return Factors(1.0, min(cap, scale))
    return Factors(scale, min(cap, (num_chunks - 1) / (num_drawn - 1)))


def draw_chunks(
    plan: ChunkPlan, sampling: Sampling, labelled: Collection[int] = ()
) -> dict[int, Factors]:
    """The drawn chunks of a plan; those of one sequence are drawn together.

    `labelled`: chunks that have labels. Where they are not known, no estimate is biased, but chunks
    with labels are drawn at the rate of the others. Where sp ranks have local pieces a chunk may be
    in two sequences; it is drawn with the first.
    """
    drawn: dict[int, Factors] = {}
    for seq_id, group in sorted(plan.groups.items()):
        own = [chunk for chunk in group if plan.links[chunk][0][0] == seq_id]
        rng = random.Random(f"{sampling.seed} {seq_id}")
        has_labels = [chunk in labelled for chunk in own]
        for position, factors in draw(has_labels, sampling, rng).items():
            drawn[own[position]] = factors
    whole = (chunk for chunk, links in enumerate(plan.links) if not links)
    return drawn | dict.fromkeys(whole, EXACT)


def _is_within(value: object, kind: type, lowest: float, highest: float = math.inf) -> bool:
    """Whether a value is None, or a finite number of a kind within bounds."""
    if value is None:
        return True
    is_number = isinstance(value, int | kind) and not isinstance(value, bool)
    return is_number and lowest <= value <= highest and value < math.inf  # type: ignore[operator]


def _unusable(
    given: str,
    required: str,
    change: str = "correct it, or leave sampling out: then the gradient is exact",
) -> ConfigError:
    return ConfigError(given=given, required=required, source="chunks.sample", change=change)


_Cells = Mapping[tuple[int, int], int]


def sampled(plan: ChunkPlan, sampling: Sampling, labelled: Collection[int] = ()) -> ChunkPlan:
    """A checked plan of the same walk with a draw of its chunks; `labelled` as for
    `draw_chunks`."""
    drawn = draw_chunks(plan, sampling, labelled)
    return sample_backwards(plan, drawn, report_loss=sampling.report_loss)


def one_draw(plan: ChunkPlan, sampling: Sampling | None) -> ChunkPlan:
    """Return the plan used for predictions: chunks are sampled with seed 0, as if none had
    labels."""
    return plan if sampling is None else sampled(plan, replace(sampling, seed=0))


def sample_backwards(
    plan: ChunkPlan, drawn: Mapping[int, Factors], *, report_loss: bool = False
) -> ChunkPlan:
    """A checked plan in which only the `drawn` chunks of `plan`, which trains all, get a backward.

    Works on any plan, also on pipelines and on layer-first walks: what a chunk that is not drawn
    would do in the backward falls away, with its messages; without `report_loss` so does the whole
    of one that no drawn chunk reads. Where `plan` retains the graphs of a sequence's last chunks,
    those of as many of its last drawn chunks are retained, as long as they have no more tokens: a
    draw needs no more memory than `plan`. A rank on which nothing is drawn trains its smallest
    chunk with factors 0, so that it has a gradient (of zeros) to reduce.
    """
    trained = dict(drawn)
    for actions in plan.actions:
        own = {action.chunk for action in actions if isinstance(action, Forward)}
        if own and own.isdisjoint(trained):
            smallest = min(own, key=lambda chunk: (plan.chunks[chunk].num_tokens, chunk))
            trained[smallest] = Factors(0.0, 0.0)
    read = {
        earlier
        for chunk in trained
        for seq_id, position in plan.links[chunk]
        for earlier in plan.groups[seq_id][:position]
    }
    computed = range(len(plan.chunks)) if report_loss else read | trained.keys()
    retained = _retained(plan, trained)
    lists = [
        [_sampled_action(action, trained, read, computed, retained) for action in actions]
        for actions in plan.actions
    ]
    kept = tuple(tuple(action for action in own if action is not None) for own in lists)
    found = replace(plan, actions=kept, sampled=True, report_loss=report_loss)
    check(found)
    return found


def _retained(plan: ChunkPlan, trained: Mapping[int, Factors]) -> _Cells:
    """The cells of cut sequences that keep their graph, with the layers of it that run again."""
    every = [action for actions in plan.actions for action in actions]
    again = {(a.chunk, a.stage): a.recompute_layers for a in every if isinstance(a, Recompute)}
    graphs = again | {
        (a.chunk, a.stage): a.recompute_layers
        for a in every
        if isinstance(a, Forward) and a.keep == "all"
    }
    retained = {}
    for group in plan.groups.values():
        own = [chunk for chunk in group if chunk in trained]
        for stage in range(len(plan.stages)):
            kept = [c for c in group if (c, stage) in graphs and (c, stage) not in again]
            room = sum(plan.chunks[c].num_tokens for c in kept)
            for chunk in own[max(0, len(own) - len(kept)) :][::-1]:
                room -= plan.chunks[chunk].num_tokens
                if room < 0:
                    break
                if (chunk, stage) in graphs:
                    retained[chunk, stage] = graphs[chunk, stage]
    return retained


def _sampled_action(
    action: Action,
    trained: Mapping[int, Factors],
    read: Collection[int],
    computed: Collection[int],
    retained: _Cells,
) -> Action | None:
    """The action that takes the place of one; None where it falls away."""
    match action:
        case Forward(chunk) | Send("activation", chunk) | Recv("activation", chunk) if (
            chunk not in computed
        ):
            return None
        case Forward(chunk, stage) if (chunk, stage) in retained:
            return Forward(chunk, stage, "all", retained[chunk, stage])
        case Forward(chunk, stage, "all") if chunk not in trained:
            # its K,V stay, and the graph that nobody consumes is never made
            return Forward(chunk, stage, "kv")
        case Recompute(chunk, stage) if (chunk, stage) in retained:
            return None
        case Backward(chunk, stage) if chunk in trained:
            factors = trained[chunk]
            return Backward(chunk, stage, factors.loss_factor, factors.relay_factor)
        case RebuildKV(chunk, stage) if chunk not in read or (chunk, stage) in retained:
            return None  # what keeps its graph has not dropped its K,V
        case Backward(chunk) | Recompute(chunk) if chunk not in trained:
            return None
        case Send("gradient", chunk) | Recv("gradient", chunk) if chunk not in trained:
            return None
    return action


def check_sampling(
    sampling: Sampling, *, size: int, longest: int, has_unlabelled: bool = True
) -> None:
    """Raises ConfigError for a sample that never leaves a chunk out.

    `size`: most tokens in a chunk. `longest`: tokens of the data's longest sequence.
    `has_unlabelled`: whether a chunk of some sequence that is cut may be without labels.
    """
    num_chunks, is_free = -(-longest // size), sampling.rule == "unbiased"
    share = sampling.share(num_chunks) if is_free else sampling.num_drawn(num_chunks) / num_chunks
    budget = "rate" if sampling.chunks is None else "chunks"
    if num_chunks == 1:
        keys = "size and chunks.sample"
        given = f"chunks.size = {size:,}, and a longest sequence of {count_words(longest, 'token')}"
        required = "a sequence of several chunks: a single one is always computed exactly"
        change = "lower chunks.size"
    elif share == 1:
        keys = f"sample.{budget}"
        given = f"chunks.{keys} = {getattr(sampling, budget)}, which draws all of the "
        given += f"{count_words(num_chunks, 'chunk')} of the longest sequence ({longest:,} tokens)"
        required = "a draw that leaves one out" + "; it has two at least" * (not is_free)
        change = f"lower chunks.{keys} or chunks.size"
    elif is_free and not has_unlabelled and sampling.label_rate in (None, 1):
        keys = "sample.label_rate"
        given = "chunks.sample with rule unbiased and labels in every chunk, as plain text has them"
        required = "chunks.sample.label_rate below 1: by default chunks with labels are all drawn"
        change = "set chunks.sample.label_rate, such as 0.5, or chunks.sample.rule to fixed"
    else:
        return
    raise ConfigError(
        given=given,
        required=required,
        source=f"chunks.{keys}",
        change=f"{change}, or remove chunks.sample: the run computes the same, exactly",
    )


def sampling_in_words(sampling: Sampling) -> str:
    """The keys of a sample, each as its name and value; defaults left out, but for the rule."""
    budget = "rate" if sampling.chunks is None else "chunks"
    words = [f"{budget} {getattr(sampling, budget)}", f"rule {sampling.rule}"]
    words += [
        f"{name} {getattr(sampling, name)}"
        for name in ("label_rate", "cap")
        if getattr(sampling, name) is not None
    ]
    return ", ".join(words + ["report_loss"] * sampling.report_loss)


def num_drawn(plan: ChunkPlan) -> int:
    """Number of chunks whose backward counts; where none was drawn, one runs with factors of 0."""
    backwards = [a for actions in plan.actions for a in actions if isinstance(a, Backward)]
    return len({a.chunk for a in backwards if a.loss_factor or a.relay_factor})
