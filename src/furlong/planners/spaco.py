"""SpaCO: backwards of drawn chunks only, with factors that make up for the chunks left out.

Li et al., Findings of ACL 2025 (arXiv 2505.16710), Algorithm 2. Forwards are exact. Only the
gradient is sampled: it is a sum over paths, of which some are left out at random (Eqs. 2 to 5). A
path leads from a chunk's loss back through the K,V of h earlier chunks. It remains if all h + 1
chunks are drawn (Eq. 6). A Backward multiplies the gradient of the chunk's loss by a, and dK,dV
from later chunks by c, so the path has the weight a c^h. The gradient is unbiased if, for each
path, a c^h times the probability that the path remains is 1 (Eq. 6).

    unbiased   each chunk i independently, with any probability p_i > 0, a = c = 1/p_i: unbiased for
               every h. Proof by induction from the last chunk down: given the draws of later
               chunks, E[1{i is drawn} / p_i * gradient of chunk i] is the gradient of chunk i
    fixed      exactly n of k chunks, a = k/n, c = (k-1)/(n-1): unbiased for h <= 1, too small for
               larger h
    paper      exactly n of k chunks, a = 1, c = k/n, as in Algorithm 2: n/k times the gradient for
               a = c = k/n, which is itself too small for h >= 1. Adam divides by the size of
               gradients, so a common factor has no effect, and the paper's runs train

Errata: Eqs. 8 to 10 compensate by (k/n)^p, as if chunks were drawn independently, and count one
chunk too few in a path that begins at the loss. When exactly n chunks are drawn, no constant a and
c are unbiased for h = 0, 1 and 2. Algorithm 2 lacks the factor of the loss. It visits drawn chunks
in any order, though it must descend. Its condition "chunks >= layers" must be layers + 1.

Our additions: the rule `unbiased`; sampling in any plan, not only SeCO's. Chunks that no drawn
chunk reads are not computed, unless the whole loss is reported. `seco.sampled_candidates` yields
plans of method spaco.
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
    """Factors by which one Backward multiplies gradients."""

    loss_factor: float = 1.0
    """Factor of the gradient of the chunk's own loss."""
    relay_factor: float = 1.0
    """Factor of dK,dV from later chunks."""


EXACT = Factors()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the chunks of each cut sequence are drawn for a backward. Give one of `rate` and
    `chunks`.

    Chunks of whole sequences are always drawn: they have no prefix that makes their backward
    expensive, and no memory would be saved. A sequence with no more chunks than are to be drawn is
    computed exactly.
    """

    rate: float | None = None
    """Share of a sequence's chunks, above 0 and at most 1."""
    chunks: int | None = None
    """Chunks of a sequence; under `unbiased` their expected number."""
    rule: Rule = "unbiased"
    label_rate: float | None = None
    """`unbiased` only: probability of chunks that have labels; None: 1, they are all drawn."""
    cap: float | None = None
    """`fixed` and `paper` only: maximum of `relay_factor` (the paper's experiments: 2). It lowers
    the variance, but makes gradients through other chunks too small."""
    report_loss: bool = False
    """Whether chunks that are not drawn run their whole forward and compute their loss. If not, the
    loss of a step is estimated from the drawn chunks."""
    seed: int | None = None
    """Seed of the draws, combined with each sequence's index in the batch; use another one for each
    step. None: drawn from torch's generator."""

    def __post_init__(self) -> None:
        is_free, a_rate = self.rule == "unbiased", f"a number above 0, from {_LEAST_RATE:g} to 1"
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
            change = "give rate or chunks" if self.rate is None else "remove rate or chunks"
            given = f"rate = {self.rate}, chunks = {self.chunks}"
            raise _unusable(given, "one of rate and chunks", change)
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
        """Return the share of a sequence's chunks to draw, as `rate` or `chunks` sets it."""
        if self.chunks is not None:
            return min(1.0, self.chunks / num_chunks)
        assert self.rate is not None
        return self.rate

    def probabilities(self, has_labels: Sequence[bool]) -> list[float]:
        """Return the probability of drawing each chunk of a sequence under `unbiased`.
        `has_labels`: whether each chunk has labels."""
        rate = self.share(len(has_labels))
        labelled = 1.0 if self.label_rate is None else self.label_rate
        return [1.0 if rate == 1 else labelled if has else rate for has in has_labels]

    def num_drawn(self, num_chunks: int) -> int:
        """Return the number of chunks of a sequence that the rules `fixed` and `paper` draw: at
        least two if it has two, as a single chunk has no other to send gradients to."""
        if self.chunks is not None:
            return min(self.chunks, num_chunks)
        return min(num_chunks, max(2, round(self.share(num_chunks) * num_chunks)))


def sampling_of(value: object) -> Sampling | None:
    """Return a mapping of fields as a Sampling; return a Sampling or None as it is. Raises
    ConfigError for other values."""
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
    """Return {index of a chunk: its gradient factors} for the drawn chunks of one sequence.
    `has_labels`: whether each chunk has labels."""
    if sampling.rule == "unbiased":
        chances = sampling.probabilities(has_labels)
        return {i: Factors(1 / p, 1 / p) for i, p in enumerate(chances) if rng.random() < p}
    num_chunks = len(has_labels)
    drawn = rng.sample(range(num_chunks), sampling.num_drawn(num_chunks))
    return dict.fromkeys(sorted(drawn), fixed_factors(sampling, num_chunks))


def fixed_factors(sampling: Sampling, num_chunks: int) -> Factors:
    """Return the gradient factors of drawn chunks under the rules `fixed` and `paper`, which draw
    exactly n of k chunks."""
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
    """Return {chunk: gradient factors} of a plan's drawn chunks, drawn sequence by sequence.

    `labelled`: chunks that have labels. If empty, gradients stay unbiased, but chunks with labels
    are drawn as rarely as the others. If processes of a pool hold different sequences, a chunk may
    hold pieces of two cut sequences; it is drawn with the first of them.
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
    """Whether a value is None, or a finite number of type `kind` (or int) within bounds."""
    if value is None:
        return True
    is_number = isinstance(value, int | kind) and not isinstance(value, bool)
    return is_number and lowest <= value <= highest and value < math.inf  # type: ignore[operator]


def _unusable(
    given: str,
    required: str,
    change: str = "write what is required, or leave sampling out: then the gradient is exact",
) -> ConfigError:
    return ConfigError(
        given=given, required=required, source="chunks.sample, or furlong.Sampling", change=change
    )


_Cells = Mapping[tuple[int, int], int]


def sampled(plan: ChunkPlan, sampling: Sampling, labelled: Collection[int] = ()) -> ChunkPlan:
    """Return a checked plan in which only randomly drawn chunks of `plan` get backwards.
    `labelled`: see `draw_chunks`."""
    drawn = draw_chunks(plan, sampling, labelled)
    return sample_backwards(plan, drawn, report_loss=sampling.report_loss)


def one_draw(plan: ChunkPlan, sampling: Sampling | None) -> ChunkPlan:
    """Return the sampled plan used for predictions: its chunks are drawn with seed 0, as if none
    had labels."""
    return plan if sampling is None else sampled(plan, replace(sampling, seed=0))


def sample_backwards(
    plan: ChunkPlan, drawn: Mapping[int, Factors], *, report_loss: bool = False
) -> ChunkPlan:
    """Return a checked plan in which only the `drawn` chunks of `plan` get a backward. `plan`
    trains all chunks; it may be of any kind, also a pipeline or layer-first.

    Backwards of the other chunks are removed, with their recomputation and messages. Without
    `report_loss`, chunks that no drawn chunk reads are removed altogether.

    A draw needs no more memory than `plan`. If `plan` retains the graphs of the last n chunks of a
    sequence, the result retains those of its last n drawn chunks, or of fewer, so that they have no
    more tokens than the n chunks of `plan`.

    A rank without drawn chunks trains its smallest chunk with factors 0, so that it has a gradient
    (zeros) to reduce.
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
    """Return {(chunk, stage): recompute_layers} of cells of cut sequences that keep their graph."""
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
    """Return the action that replaces `action` in a sampled plan, or None if it is removed.

    `trained`: chunks that have a Backward, with factors of their gradients. `read`: chunks whose
    K,V trained chunks read. `computed`: chunks that have a Forward. `retained`: {(chunk, stage):
    checkpointed layers} of cells that keep their graph.
    """
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
    """Raise ConfigError if a sample never leaves a chunk out.

    `size`: most tokens in a chunk. `longest`: tokens of the data's longest sequence.
    `has_unlabelled`: whether a chunk of a cut sequence may have no labels.
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
    """Return the keys of a sample as text, with their values, without defaults except `rule`."""
    budget = "rate" if sampling.chunks is None else "chunks"
    words = [f"{budget} {getattr(sampling, budget)}", f"rule {sampling.rule}"]
    words += [
        f"{name} {getattr(sampling, name)}"
        for name in ("label_rate", "cap")
        if getattr(sampling, name) is not None
    ]
    return ", ".join(words + ["report_loss"] * sampling.report_loss)


def num_drawn(plan: ChunkPlan) -> int:
    """Return the number of chunks whose backward has a factor other than 0."""
    backwards = [a for actions in plan.actions for a in actions if isinstance(a, Backward)]
    return len({a.chunk for a in backwards if a.loss_factor or a.relay_factor})
