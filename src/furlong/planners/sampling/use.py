"""Words for a run's sample, and the refusal of one that leaves no chunk out.

Such a run would compute exact gradients, which is hardly what its user means.
"""

from __future__ import annotations

from furlong.errors import ConfigError
from furlong.plan.values import Backward, ChunkPlan
from furlong.planners.sampling.rules import Sampling
from furlong.units import count_words


def check_sampling(
    sampling: Sampling, *, size: int, longest: int, has_unlabelled: bool = True
) -> None:
    """Raises ConfigError for a sample that never leaves a chunk out.

    `size`: most tokens in a chunk. `longest`: tokens of the data's longest sequence.
    `has_unlabelled`: whether a chunk of some sequence that is cut may be without labels.
    """
    num_chunks = -(-longest // size)
    rate, all_of_them = sampling.rate, f"{count_words(num_chunks, 'chunk')} of the longest sequence"
    is_free = sampling.rule == "unbiased"
    for is_wrong, keys, given, required, change in (
        (num_chunks == 1, "size and chunks.sample",
         f"chunks.size = {size:,}, and a longest sequence of {count_words(longest, 'token')}",
         "a sequence of several chunks: those of a single one are always computed exactly",
         "lower chunks.size"),
        (sampling.chunks is not None and sampling.chunks >= num_chunks, "sample.chunks",
         f"chunks.sample.chunks = {sampling.chunks}, and {all_of_them} ({longest:,} tokens)",
         f"at most {num_chunks - 1:,}: else every chunk is drawn",
         "lower chunks.sample.chunks or chunks.size"),
        (sampling.share(num_chunks) == 1, "sample.rate", f"chunks.sample.rate = {rate}",
         "a rate below 1: else every chunk is drawn", "lower chunks.sample.rate"),
        (not is_free and sampling.num_drawn(num_chunks) == num_chunks, "sample.rate",
         f"chunks.sample.rate = {rate}, which draws {num_chunks:,} of the {all_of_them}"
         f" ({longest:,} tokens)",
         f"a rate that leaves one out; rule {sampling.rule} draws two at least",
         "lower chunks.sample.rate or chunks.size"),
        (is_free and not has_unlabelled and sampling.label_rate in (None, 1), "sample.label_rate",
         "chunks.sample with rule unbiased and labels in every chunk, as plain text has them",
         "chunks.sample.label_rate below 1: chunks with labels are drawn at that rate, by default"
         " all of them",
         "set chunks.sample.label_rate, such as 0.5, or chunks.sample.rule to fixed"),
    ):  # fmt: skip
        if is_wrong:
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
    return len(
        {
            action.chunk
            for actions in plan.actions
            for action in actions
            if isinstance(action, Backward) and (action.loss_factor or action.relay_factor)
        }
    )
