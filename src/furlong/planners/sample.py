"""Which chunks of a plan get a backward, and with what factors (SpaCO, Li et al., 2025).

Forwards stay exact, so only the set of surviving paths is random. A contribution to the gradient
that reaches its parameters through h earlier chunks needs h + 1 drawn chunks, the one with the loss
among them. A Backward multiplies its own loss by a and the dK,dV that later chunks sent by c, which
gives that contribution the weight a c^h; it is unbiased if a c^h times its survival is 1.

    bernoulli       every chunk by itself with q = t/k, a = c = 1/q: exact for every h
    adaptive        with p = clip((t - drawn) / chunks left, lowest, 1) from the last chunk down,
                    a = c = 1/p: exact for every h, almost t chunks, heavier tails
    fixed           t of k chunks, a = k/t, c = (k-1)/(t-1): exact for h <= 1, low beyond
    fixed printed   t of k chunks, a = 1, c = k/t, as in the paper's Algorithm 2: t/k of what
                    a = c = k/t would give, which is itself low for h >= 1
    capped          fixed with c at most `cap` (the paper's experiments: 2): mostly local gradient

No constant a and c are exact for h = 0, 1, 2 when exactly t chunks are drawn: inclusions are not
independent, while the paper's (k/t)^p takes them to be.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from furlong.errors import ConfigError
from furlong.plan.check import check
from furlong.plan.values import (
    Action,
    Backward,
    ChunkPlan,
    Forward,
    RebuildKV,
    Recompute,
    Recv,
    Send,
)

Rule = Literal["bernoulli", "fixed", "fixed printed", "capped", "adaptive"]


@dataclass(frozen=True, slots=True)
class Factors:
    """Of one Backward: of its chunk's own loss, and of the dK,dV from later chunks."""

    loss_factor: float = 1.0
    relay_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the chunks of every cut sequence are drawn. One of `num_drawn` and `probability`."""

    num_drawn: int | None = None
    """Chunks per sequence (t of SpaCO); under bernoulli and adaptive the expected number."""
    probability: float | None = None
    """Share of a sequence's chunks."""
    rule: Rule = "bernoulli"
    seed: int = 0
    """Another one every step; a sequence's draw depends on it and on its seq_id alone."""
    cap: float = 2.0
    """Highest relay factor of the rule `capped`."""
    lowest: float = 0.5
    """Lowest probability of the rule `adaptive`, as a share of t/k; lower ones add variance."""
    packed: bool = False
    """Whether packed chunks are drawn too, each by itself with factor 1/probability. By default
    all are trained: their backward is linear in their tokens, no context makes it dear, and no
    memory is saved, so drawing them buys little time for more variance."""

    def __post_init__(self) -> None:
        t, q = self.num_drawn, self.probability
        if (t is None) == (q is None) or (t is not None and t < 1) or (q and not 0 < q <= 1):
            raise _unusable(
                f"num_drawn = {t}, probability = {q}",
                "either num_drawn of at least 1, or a probability above 0 and at most 1",
            )
        if q == 0:
            raise _unusable("probability = 0", "a probability above 0 and at most 1")
        if self.rule not in get_args(Rule):
            raise _unusable(f"rule = {self.rule!r}", f"one of {', '.join(get_args(Rule))}")
        if not 0 < self.lowest <= 1 or self.cap <= 0:
            given = f"lowest = {self.lowest}, cap = {self.cap}"
            raise _unusable(given, "lowest above 0 and at most 1, cap above 0")
        if self.packed and q is None:
            raise _unusable("packed without a probability", "a probability, where packed is set")

    def budget(self, num_chunks: int) -> float:
        """t for a sequence of so many chunks."""
        if self.num_drawn is not None:
            return min(self.num_drawn, num_chunks)
        assert self.probability is not None
        return self.probability * num_chunks


def draw(num_chunks: int, sampling: Sampling, rng: random.Random) -> dict[int, Factors]:
    """The drawn positions of one sequence of `num_chunks` chunks."""
    budget = sampling.budget(num_chunks)
    if budget >= num_chunks:
        return {position: Factors() for position in range(num_chunks)}
    if sampling.rule == "adaptive":
        return _draw_adaptively(num_chunks, budget, sampling.lowest, rng)
    if sampling.rule == "bernoulli":
        q = budget / num_chunks
        positions = [position for position in range(num_chunks) if rng.random() < q]
        return dict.fromkeys(positions, Factors(1 / q, 1 / q))
    num_drawn = max(1, round(budget))
    factors = fixed_factors(sampling.rule, num_chunks, num_drawn, cap=sampling.cap)
    return dict.fromkeys(sorted(rng.sample(range(num_chunks), num_drawn)), factors)


def _draw_adaptively(
    num_chunks: int, budget: float, lowest: float, rng: random.Random
) -> dict[int, Factors]:
    drawn: dict[int, Factors] = {}
    for position in reversed(range(num_chunks)):
        p = adaptive_probability(num_chunks, budget, position, len(drawn), lowest)
        if rng.random() < p:
            drawn[position] = Factors(1 / p, 1 / p)
    return drawn


def adaptive_probability(
    num_chunks: int, budget: float, position: int, num_drawn: int, lowest: float = 0.5
) -> float:
    """Of drawing the chunk at `position` when `num_drawn` later ones are drawn.

    Any value in (0, 1] that depends on the chunks behind it alone keeps the estimate unbiased: by
    induction from the last chunk down, E[1{drawn} / p * gradient | chunks behind] = gradient.
    """
    wanted = (budget - num_drawn) / (position + 1)
    return min(1.0, max(lowest * budget / num_chunks, wanted))


def fixed_factors(rule: Rule, num_chunks: int, num_drawn: int, *, cap: float = 2.0) -> Factors:
    """a and c of the rules that draw exactly `num_drawn` of `num_chunks` chunks."""
    scale = num_chunks / num_drawn
    # a single drawn chunk relays nothing, so its c never matters
    pairs = (num_chunks - 1) / (num_drawn - 1) if num_drawn > 1 else 1.0
    match rule:
        case "fixed":
            return Factors(scale, pairs)
        case "fixed printed":
            return Factors(1.0, scale)
        case "capped":
            return Factors(scale, min(cap, pairs))
    raise ValueError(f"{rule} has no constant factors for a fixed number of chunks")


def survival(num_chunks: int, num_drawn: int, hops: int) -> float:
    """Probability that a contribution through `hops` earlier chunks survives a uniform draw of
    exactly `num_drawn`: prod over r = 0..hops of (t - r) / (k - r)."""
    return math.prod((num_drawn - r) / (num_chunks - r) for r in range(hops + 1))


def expected_weight(num_chunks: int, num_drawn: int, hops: int, factors: Factors) -> float:
    """a c^h times its survival: 1 where the draw is unbiased for that many hops."""
    weight = factors.loss_factor * factors.relay_factor**hops
    return weight * survival(num_chunks, num_drawn, hops)


def draw_chunks(plan: ChunkPlan, sampling: Sampling) -> dict[int, Factors]:
    """The drawn chunks of a plan; those of one sequence are drawn together.

    Where sp ranks have local pieces a chunk may be in two sequences; it is drawn with the first.
    """
    drawn: dict[int, Factors] = {}
    for seq_id, group in sorted(plan.groups.items()):
        own = [chunk for chunk in group if plan.links[chunk][0][0] == seq_id]
        rng = random.Random(f"{sampling.seed} {seq_id}")
        for position, factors in draw(len(own), sampling, rng).items():
            drawn[own[position]] = factors
    for chunk, links in enumerate(plan.links):
        if links:
            continue
        q = sampling.probability if sampling.packed else None
        first = plan.chunks[chunk].slices[0].seq_id
        if q is None or random.Random(f"{sampling.seed} {first}").random() < q:
            drawn[chunk] = Factors(1 / (q or 1.0), 1.0)
    return drawn


def sample_backwards(plan: ChunkPlan, drawn: Mapping[int, Factors]) -> ChunkPlan:
    """A checked plan in which only the `drawn` chunks of `plan`, which trains all, get a backward.

    Works on any plan, also on pipelines and on layer-first walks: what a chunk that is not drawn
    would do in the backward falls away, with its messages. A rank on which nothing is drawn trains
    its smallest chunk with factors 0, so that it has a gradient (of zeros) to reduce.
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
    sampled = replace(
        plan,
        actions=tuple(
            tuple(kept for a in actions if (kept := _sampled_action(a, trained, read)))
            for actions in plan.actions
        ),
        sampled=True,
    )
    check(sampled)
    return sampled


def _sampled_action(
    action: Action, trained: Mapping[int, Factors], read: set[int]
) -> Action | None:
    match action:
        case Backward(chunk, stage) if chunk in trained:
            factors = trained[chunk]
            return Backward(chunk, stage, factors.loss_factor, factors.relay_factor)
        case Forward(chunk, stage, "all") if chunk not in trained:
            # its K,V stay, and the graph that nobody consumes is never made
            return Forward(chunk, stage, "kv")
        case RebuildKV(chunk):
            return action if chunk in read else None
        case Backward(chunk) | Recompute(chunk) if chunk not in trained:
            return None
        case Send("gradient", chunk) | Recv("gradient", chunk) if chunk not in trained:
            return None
    return action


def _unusable(given: str, required: str) -> ConfigError:
    return ConfigError(
        given=given,
        required=required,
        source="the sampling of chunks (SpaCO)",
        change="correct it, or leave sampling out: then the gradient is exact",
    )
