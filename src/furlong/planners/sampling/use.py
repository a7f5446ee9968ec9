"""What a run says of its sample: its words, and the refusal of one that leaves no chunk out.

Such a run would compute exact gradients, which is hardly what its user means.
"""

from __future__ import annotations

from furlong.errors import ConfigError
from furlong.plan.values import Backward, ChunkPlan
from furlong.planners.sampling.rules import Sampling


def check_sampling(
    sampling: Sampling, *, size: int, longest: int, has_unlabelled: bool = True
) -> None:
    """Raises ConfigError for a sample that never leaves a chunk out.

    `size`: most tokens in a chunk. `longest`: tokens of the data's longest sequence.
    `has_unlabelled`: whether a chunk of some sequence that is cut may be without labels.
    """
    num_chunks = -(-longest // size)
    if num_chunks == 1:
        raise _meaningless(
            f"chunks.size = {size:,}, and a longest sequence of {longest:,} tokens",
            "a sequence of several chunks: those of a single one are always computed exactly",
            "chunks.size and chunks.sample",
            "lower chunks.size",
        )
    if sampling.chunks is not None and sampling.chunks >= num_chunks:
        raise _meaningless(
            f"chunks.sample.chunks = {sampling.chunks:,}, and {num_chunks:,} chunks of the longest"
            f" sequence ({longest:,} tokens)",
            f"at most {num_chunks - 1:,}: else every chunk is drawn",
            "chunks.sample.chunks",
            "lower chunks.sample.chunks or chunks.size",
        )
    if sampling.share(num_chunks) == 1:
        raise _meaningless(
            f"chunks.sample.rate = {sampling.rate}",
            "a rate below 1: else every chunk is drawn",
            "chunks.sample.rate",
            "lower chunks.sample.rate",
        )
    if sampling.rule == "unbiased":
        _check_labels(sampling, has_unlabelled)
    elif sampling.num_drawn(num_chunks) == num_chunks:
        raise _meaningless(
            f"chunks.sample.rate = {sampling.rate}, which draws {num_chunks:,} of the"
            f" {num_chunks:,} chunks of the longest sequence ({longest:,} tokens)",
            f"a rate that leaves one out; rule {sampling.rule} draws two at least",
            "chunks.sample.rate",
            "lower chunks.sample.rate or chunks.size",
        )


def sampling_in_words(sampling: Sampling) -> str:
    """Its keys, each as its name and value; those at their defaults left out, but for the rule."""
    budget = "rate" if sampling.chunks is None else "chunks"
    words = [f"{budget} {getattr(sampling, budget)}", f"rule {sampling.rule}"]
    words += [
        f"{name} {getattr(sampling, name)}"
        for name in ("label_rate", "cap")
        if getattr(sampling, name) is not None
    ]
    return ", ".join(words + ["report_loss"] * sampling.report_loss)


def num_drawn(plan: ChunkPlan) -> int:
    """Chunks whose backward counts; where none was drawn, one runs with factors of 0."""
    return len(
        {
            action.chunk
            for actions in plan.actions
            for action in actions
            if isinstance(action, Backward) and (action.loss_factor or action.relay_factor)
        }
    )


def _check_labels(sampling: Sampling, has_unlabelled: bool) -> None:
    if not has_unlabelled and sampling.label_rate in (None, 1):
        raise _meaningless(
            "chunks.sample with rule unbiased and labels in every chunk, as plain text has them",
            "chunks.sample.label_rate below 1: chunks with labels are drawn at that rate, by"
            " default all of them",
            "chunks.sample.label_rate",
            "set chunks.sample.label_rate, such as 0.5, or chunks.sample.rule to fixed",
        )


def _meaningless(given: str, required: str, source: str, change: str) -> ConfigError:
    exactly = "or remove chunks.sample: the run computes the same, exactly"
    return ConfigError(given=given, required=required, source=source, change=f"{change}, {exactly}")
