"""The sequences of a step and the rows of a chunk: ids, labels, extras, shared prefixes. A row is
one token of a chunk on this process.

Labels are shifted before sequences are cut: the label of a chunk's last token is the first token of
the next chunk. A process that holds no token of a chunk computes one dummy row, without a label.

Extras are the caller's named tensors with one entry per token. Entry t belongs to token t, which
the hidden state of token t - 1 predicts. So entry t is used at the row of token t - 1, as the label
is.

The caller's sequences are those that the caller passes; the plan's sequences are those that the
plan cuts into chunks. They are the same, unless several of the caller's sequences begin with equal
tokens. Such sequences are joined to one sequence of the plan, a tree: the tokens of a shared prefix
are computed once, because equal tokens at equal positions have equal hidden states. After the
prefix the tree branches, and a branch may branch again. Each shared part is at least a chunk long.
The last token of a prefix has one label per branch. Labels, extras and outputs stay per sequence of
the caller.

    T  rows of the process;  R  labels of these rows
    i  index of a caller's sequence;  `seq_id`  index of a plan's sequence
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furlong.errors import ConfigError, DataError, in_short
from furlong.models.decoder import HFDecoder
from furlong.ops.loss import IGNORE_INDEX, labelled_rows
from furlong.plan.plan import ChunkPlan, Slice
from furlong.plan.rows import ChunkRows
from furlong.planners.chunks import Forks

WEIGHTS = "token_weights"
"""The extra by which losses are multiplied."""


@dataclass(frozen=True, slots=True)
class ShiftedSequence:
    input_ids: Tensor  # (T,) int64
    labels: Tensor  # (T,) int64, label t is what token t predicts
    first_position: int = 0
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> (T, ...), entry t about token t."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of tokens that one of the caller's sequences and one of the plan's have in common, and
    where the run begins in each of the two. (A plan's sequence may join several of the
    caller's.)"""

    sequence: int
    """Index of the sequence in the call."""
    token: int
    """Index of the first token in that sequence."""
    start: int
    """The tokens are [start, stop) of the plan's sequence."""
    stop: int


@dataclass(frozen=True, slots=True)
class JoinedSequence:
    """A sequence of the plan: a caller's sequence, or a tree of several with a shared prefix."""

    input_ids: Tensor  # (T,) int64
    first_position: int
    spans: tuple[Span, ...]
    """One span; for trees and branching sequences those of all paths."""

    def moved(self, indices: Sequence[int]) -> JoinedSequence:
        """Return the sequence for a call in which sequence i has the index `indices[i]`."""
        spans = (replace(span, sequence=indices[span.sequence]) for span in self.spans)
        return replace(self, spans=tuple(spans))


@dataclass(frozen=True, slots=True)
class Batch:
    """The caller's sequences of a step, the plan's sequences, and where the caller's tokens are in
    the plan's sequences."""

    sequences: Sequence[ShiftedSequence]
    """By index in the call; empty ones are on other processes."""
    planned: Sequence[JoinedSequence]
    """By `seq_id`."""
    seq_lens: Sequence[int]
    """Tokens of each sequence of the call, on whatever process."""
    num_labels: int | None
    """Labels of the whole batch; None if this process lacks some of its sequences."""
    forks: Forks = field(default_factory=dict)
    weights: Sequence[float] | None = None
    """By index in the call, factors of the loss in the gradient; None: 1."""

    def within(self, seq_id: int, start: int, stop: int) -> Iterator[tuple[int, range, int]]:
        """Map tokens [start, stop) of the plan's sequence `seq_id` to tokens of the caller's
        sequences.

        Yields (i, tokens, offset) for each run of tokens: `tokens` are the run's indices in the
        caller's sequence i, and the run begins at `start` + offset in the plan's sequence. A run
        that several of the caller's sequences share is yielded once for each of them."""
        for span in self.planned[seq_id].spans:
            tokens = range(max(start, span.start), min(stop, span.stop))
            if tokens:
                first = span.token + tokens.start - span.start
                yield span.sequence, range(first, first + len(tokens)), tokens.start - start

    def runs(self, rows: ChunkRows) -> Iterator[tuple[int, range, int]]:
        """Yield (i, tokens, row) for each run of consecutive tokens in a chunk's rows: `tokens` are
        the run's indices in the caller's sequence i, and `row` is the row of its first token."""
        for (seq_id, start, stop), row in rows.runs():
            for index, tokens, distance in self.within(seq_id, start, stop):
                yield index, tokens, row + distance

    def labels_of(self, index: int, tokens: range) -> tuple[Tensor, Tensor]:
        """Return which of some tokens have a label, and these labels. `tokens` are indices in the
        caller's sequence `index`. The result is (indices (r,) into `tokens`, labels (r,))."""
        rows = labelled_rows(labels := self.sequences[index].labels[tokens.start : tokens.stop])
        return rows, labels[rows]

    def members(self, piece: Slice) -> set[int]:
        """Return the indices of the caller's sequences that have tokens in a slice of the plan."""
        return {i for i, *_ in self.within(piece.seq_id, piece.start, piece.stop)}

    def extras_of(self, targets: ChunkTargets) -> dict[str, Tensor]:
        """Return a dict from the name of each extra to a tensor (R, ...): the entries of the extra
        for the chunk's labels, in order of the labels and on their device."""
        names = self.sequences[targets.tokens[0][0]].extras if targets.tokens else ()
        return {
            name: sent_to(
                targets.labels.device,
                torch.cat([_at(self.sequences[i].extras[name], at) for i, at in targets.tokens]),
            )
            for name in names
        }


def batch_of(sequences: Sequence[ShiftedSequence], seq_lens: Sequence[int] | None = None) -> Batch:
    """Return a batch in which no prefixes are joined. `seq_lens`: full lengths, if some `sequences`
    are empty because other processes hold their tokens."""
    lens = [len(s.input_ids) for s in sequences]
    is_whole = seq_lens is None or lens == list(seq_lens)
    planned = [
        JoinedSequence(s.input_ids, s.first_position, (Span(i, 0, 0, lens[i]),))
        for i, s in enumerate(sequences)
    ]
    num_labels = count_valid_tokens(sequences) if is_whole else None
    return Batch(sequences, planned, lens if seq_lens is None else seq_lens, num_labels)


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    """Token ids and positions of a chunk's rows on this process, kept from the chunk's first pass
    to its last."""

    input_ids: Tensor  # (T,) int64
    position_ids: Tensor  # (T,) int64, positions in each slice's sequence
    rows: ChunkRows


@dataclass(frozen=True, slots=True)
class ChunkTargets:
    """The labels of a chunk, kept while its loss is computed."""

    labels: Tensor  # (R,) int64, shifted
    labelled_rows: Tensor  # (R,) int64, the row of each label
    rows: ChunkRows
    tokens: Sequence[tuple[int, Tensor]]
    """(i, indices (r,) of its tokens that are the labels) for each run, in order."""


def labelled_chunks(plan: ChunkPlan, batch: Batch) -> set[int]:
    """Return the chunks with at least one label."""
    return {
        number
        for number, chunk in enumerate(plan.chunks)
        if any(
            len(batch.labels_of(index, tokens)[0])
            for s in chunk.slices
            for index, tokens, _ in batch.within(s.seq_id, s.start, s.stop)
        )
    }


def chunk_inputs(
    rows: ChunkRows,
    batch: Batch,
    device: torch.device,
    position: Callable[[int, int], int] = lambda seq_id, token: token,
) -> ChunkInputs:
    """Return ids and positions of one chunk's rows on this process, copied asynchronously.

    `position`: maps (seq_id, index of a token in the plan's sequence) to the number of tokens
    before it, which in a branch of a tree differs from its index."""
    ids, positions = [], []
    for (seq_id, start, stop), _ in rows.runs():
        sequence = batch.planned[seq_id]
        ids.append(sequence.input_ids[start:stop])
        first = sequence.first_position + position(seq_id, start)
        positions.append(torch.arange(first, first + stop - start, device="cpu"))
    if not rows.tokens:
        ids = positions = [torch.zeros(1, dtype=torch.int64, device="cpu")]
    # a single run is a view of the sequence: on a CPU copies of all ids would live for the step
    sent = [sent_to(device, torch.cat(x) if len(x) > 1 else x[0]) for x in (ids, positions)]
    return ChunkInputs(sent[0], sent[1], rows)


def chunk_targets(rows: ChunkRows, batch: Batch, device: torch.device) -> ChunkTargets:
    """Return the labels of one chunk's rows on this process, copied asynchronously."""
    none = torch.zeros(0, dtype=torch.int64, device="cpu")
    labels, labelled, found = [none], [none], []
    for index, tokens, row in batch.runs(rows):
        at, own_labels = batch.labels_of(index, tokens)
        labels.append(own_labels)
        labelled.append(at + row)
        found.append((index, at + tokens.start + 1))
    sent = [sent_to(device, torch.cat(x)) for x in (labels, labelled)]
    return ChunkTargets(sent[0], sent[1], rows, found)


def sent_to(device: torch.device, x: Tensor) -> Tensor:
    """Copy a tensor to the device, from pinned memory and asynchronously on CUDA."""
    if device.type == "cuda" and not x.is_cuda:
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def _at(x: Tensor, tokens: Tensor) -> Tensor:
    return x[sent_to(x.device, tokens)]


def shift_labels(
    sequences: object, *, extras: Collection[str] | None = (), needs_labels: bool = True
) -> list[ShiftedSequence]:
    """Check the caller's sequences and shift their labels by one token. Return one ShiftedSequence
    for each. A ShiftedSequence in `sequences` is returned as it is.

    Args:
        sequences: Dicts of input_ids and labels (T,) int64; further tensors (T, ...) are extras.
        extras: Names of known extras. A sequence that has extras, but none with such a name, is
            refused. None: extras of any names are taken.
        needs_labels: If False, a sequence may lack labels: its input_ids are used as labels. A
            sequence with the extra `token_weights` may always lack them.

    Raises:
        DataError: For other types, keys, dtypes or lengths, and for extras that require a gradient
            or that some sequences lack.
    """
    if not isinstance(sequences, Iterable) or isinstance(sequences, Mapping | Tensor | str):
        raise refused_data(f"sequences of type {type(sequences).__name__}", "a list of sequences")
    shifted: list[ShiftedSequence] = []
    for index, given in enumerate(sequences):
        if isinstance(given, ShiftedSequence):
            shifted.append(given)
        else:
            shifted.append(_shift(given, f"sequence {index}", extras, needs_labels))
        _require_extras(f"sequence {index}", shifted[-1], shifted[0].extras)
    return shifted


def _shift(
    sequence: object, name: str, extras: Collection[str] | None, needs_labels: bool
) -> ShiftedSequence:
    if not isinstance(sequence, Mapping):
        kind = type(sequence).__name__
        raise refused_data(f"{name} of type {kind}", "a dict of input_ids and labels")
    own = {key: x for key, x in sequence.items() if key not in ("input_ids", "labels")}
    if own and extras is not None and own.keys().isdisjoint(extras):
        raise refused_data(
            f"{name} with {', '.join(sorted(map(str, own)))}",
            "input_ids and labels alone: padding, packing and positions are furlong's own",
            "leave padding tokens and other keys out; give tokens without a loss the label -100",
        )
    input_ids, labels = sequence.get("input_ids"), sequence.get("labels")
    if labels is None and (not needs_labels or WEIGHTS in own):
        labels = input_ids
    for key, x in (("input_ids", input_ids), ("labels", labels)):
        if not _is_token_vector(x) or (key == "input_ids" and not len(x)):
            raise refused_data(
                f"{name} with input_ids {shown(input_ids)}, labels {shown(labels)}",
                "input_ids and labels as dense int64 tensors of one shape (T,), T at least 1",
                _as_token_vector(key, x),
            )
    assert input_ids is not None and labels is not None
    if input_ids.shape != labels.shape:
        raise refused_data(
            f"{name} with {len(input_ids)} input_ids and {len(labels)} labels",
            "a label for each token",
            "give tokens without a loss the label -100",
        )
    last = torch.full((1,), IGNORE_INDEX, device="cpu")
    return ShiftedSequence(input_ids, torch.cat([labels[1:].cpu(), last]), extras=own)


def whole_number(value: object, name: str) -> int:
    """Return a positive integer as an int, also from numpy or a one-element tensor. Raises
    ConfigError, with the argument's name, for anything else."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = -1
    if not 0 < number < 2**63:
        raise ConfigError(
            given=f"{name} {in_short(value, 60)}",
            required="a whole number above 0 (None: the default)",
            source="the arguments of furlong.Engine or forward_backward",
            change=f"pass an int of 1 or more as {name}",
        )
    return number


def check_ranges(sequences: Sequence[ShiftedSequence], model: HFDecoder, *, backward: bool) -> None:
    """Raise DataError for ids with no embedding, labels with no logit, or too long sequences.
    `backward`: whether gradients are computed. Without, sequences may have more positions than a
    model with RoPE, to see what it does there."""
    num_input_ids, vocab_size = model.num_input_ids, model.vocab_size
    longest_tokens = model.longest_tokens if backward else model.longest_evaluated
    for index, sequence in enumerate(sequences):
        num_tokens = len(sequence.input_ids)
        if not num_tokens:  # on another rank
            continue
        last_position = sequence.first_position + num_tokens
        if longest_tokens is not None and last_position > longest_tokens:
            raise refused_data(
                f"sequence {index} of {last_position:,} tokens",
                f"at most {longest_tokens:,}, the smaller of max_seq_len and the model's positions"
                " (with backward=False, max_seq_len may exceed those of RoPE)",
                "pass a larger max_seq_len, cut the sequence, or extend the model's RoPE",
            )
        first, last = (int(bound) for bound in sequence.input_ids.aminmax())
        if first < 0 or last >= num_input_ids:
            raise refused_data(
                f"sequence {index} with token id {first if first < 0 else last}",
                f"ids from 0 to {num_input_ids - 1}, which have an embedding",
                "use the model's own tokenizer, or resize_token_embeddings",
            )
        labels = sequence.labels[sequence.labels != IGNORE_INDEX]
        if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= vocab_size):
            wrong = labels[(labels < 0) | (labels >= vocab_size)]
            raise refused_data(
                f"sequence {index} with label {int(wrong[0])}",
                f"labels from 0 to {vocab_size - 1}, or {IGNORE_INDEX} for none",
                "use the model's own tokenizer, or resize_token_embeddings",
            )


def require_seq_lens(seq_lens: Iterable[object]) -> list[int]:
    """Return sequence lengths as ints. Raises ConfigError unless each is a positive integer."""
    lens = [whole_number(seq_len, "seq_lens") for seq_len in seq_lens]
    if not lens:
        raise refused_data("no sequences", "at least one sequence", "leave such a call out")
    return lens


def count_valid_tokens(sequences: Sequence[ShiftedSequence]) -> int:
    """Return the number of labels in all sequences."""
    return sum(int((sequence.labels != IGNORE_INDEX).sum()) for sequence in sequences)


_ONE_DICT = "pass one dict per sequence, unpadded, without a batch axis"


def _is_token_vector(x: Any) -> TypeGuard[Tensor]:
    is_dense = isinstance(x, Tensor) and x.layout == torch.strided and not x.is_meta
    return is_dense and x.dtype == torch.int64 and x.ndim == 1


def _as_token_vector(key: str, x: Any) -> str:
    """Return how to make a vector of int64 of `x`, which was passed as `key`."""
    if x is None:
        return f"add {key}" + ", a copy of input_ids with -100 where a token has no loss" * (
            key == "labels"
        )
    if not isinstance(x, Tensor):
        return f"pass {key} as torch.tensor([...], dtype=torch.int64) of token ids"
    if x.ndim != 1 or x.is_meta or x.layout != torch.strided:
        return _ONE_DICT
    return f"pass {key}.long()" if x.dtype != torch.int64 else "leave empty sequences out"


def shown(x: object) -> str:
    """Return a tensor's dtype, shape and layout, or another object's type, in words."""
    if not isinstance(x, Tensor):
        return f"of type {type(x).__name__}"
    where = "on meta" if x.is_meta else f"{x.layout}".removeprefix("torch.")
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} {where}"


def refused_data(given: str, required: str, change: str = _ONE_DICT) -> DataError:
    source = "the sequences that were passed"
    return DataError(given=given, required=required, source=source, change=change)


def require_type(value: object, kind: type, change: str = "") -> None:
    """Raise ConfigError unless `value` is of type `kind`. `change`: the advice in the error."""
    if not isinstance(value, kind):
        raise ConfigError(
            given=f"{in_short(repr(value), 60)}, of type {type(value).__name__}",
            required=f"a {kind.__name__}",
            source="the arguments that were passed",
            change=change or f"pass furlong.{kind.__name__}(...)",
        )


_Ids = NDArray[np.int64]


def join_prompts(
    sequences: Sequence[ShiftedSequence], least_tokens: int, most_tokens: int | None = None
) -> Batch:
    """Return a batch that joins sequences with at least `least_tokens` equal first tokens to trees,
    unless a tree has more than `most_tokens`."""
    batch = batch_of(sequences)
    if sum(len(sequence.input_ids) > least_tokens for sequence in sequences) < 2:
        return batch
    ids = [sequence.input_ids.cpu().numpy() for sequence in sequences]
    firsts = [sequence.first_position for sequence in sequences]
    order = sorted(range(len(ids)), key=lambda i: (firsts[i], ids[i].astype(">i8").tobytes()))
    shared = [
        _num_equal(ids[i], ids[j]) if firsts[i] == firsts[j] else 0 for i, j in pairwise(order)
    ]
    trees: list[tuple[JoinedSequence, list[tuple[int, int]]]] = []
    for group in _groups(range(len(order)), shared, least_tokens):
        tree = _tree(sequences, order, shared, group, least_tokens)
        if most_tokens is None or len(tree[0].input_ids) <= most_tokens:
            trees.append(tree)
        else:
            trees += [(batch.planned[order[number]], []) for number in group]
    if len(trees) == len(sequences):
        return batch
    forks = {seq_id: own for seq_id, (_, own) in enumerate(trees) if own}
    return replace(batch, planned=[tree for tree, _ in trees], forks=forks)


def _tree(
    sequences: Sequence[ShiftedSequence],
    order: Sequence[int],
    shared: Sequence[int],
    group: range,
    least_tokens: int,
) -> tuple[JoinedSequence, list[tuple[int, int]]]:
    """Join a group of sequences to a tree. Return (joined sequence, forks).

    The joined sequence has the tokens of the tree in depth-first order. A fork is a pair of indices
    into it: (first token of a branch, end of the prefix that the branch continues).

    `order` has the indices of all sequences, sorted by their tokens. `shared[n]` is the number of
    equal first tokens of the sequences `order[n]` and `order[n + 1]`. `group` is the range of
    `order` to join."""
    ids: list[Tensor] = []
    spans: list[Span] = []
    forks: list[tuple[int, int]] = []

    def grow(group: range, depth: int, parent: int) -> None:
        """Append the tokens from `depth` on of the sequences `order[n]`, n in `group`, to `ids`,
        `spans` and `forks`. The first `depth` tokens of these sequences are equal and already in
        the tree; `parent` is the index after the last of them."""
        for own in sorted(_groups(group, shared, depth + least_tokens), key=shortness):
            members = [order[number] for number in own]
            tokens = sequences[members[0]].input_ids
            stop = min((shared[at] for at in own[:-1]), default=len(tokens))
            end = parent
            if depth < stop:  # else a sequence is a prefix of the others
                at = spans[-1].stop if spans else 0
                end = at + stop - depth
                if parent != at:
                    forks.append((at, parent))
                ids.append(tokens[depth:stop])
                spans.extend(Span(i, depth, at, end) for i in members)
            if len(own) > 1:
                grow(own, stop, end)

    def shortness(own: range) -> int:
        """Return minus the length of the longest sequence of `own`, to sort longer branches first.
        The order of branches then depends on lengths alone, not on tokens."""
        return -max(len(sequences[order[number]].input_ids) for number in own)

    grow(group, 0, 0)
    first = sequences[order[group[0]]].first_position
    return JoinedSequence(torch.cat(ids), first, tuple(spans)), forks


def _groups(numbers: range, shared: Sequence[int], least: int) -> list[range]:
    """Split a range of sequences wherever two neighbours share fewer than `least` first tokens."""
    starts = [numbers.start] + [at + 1 for at in numbers[:-1] if shared[at] < least]
    return [range(a, b) for a, b in pairwise([*starts, numbers.stop])]


def _num_equal(one: _Ids, other: _Ids) -> int:
    """Return the number of equal first tokens."""
    num_tokens = min(len(one), len(other))
    differ = one[:num_tokens] != other[:num_tokens]
    return int(differ.argmax()) if differ.any() else num_tokens


def _require_extras(name: str, sequence: ShiftedSequence, first: Mapping[str, Any]) -> None:
    """Raise DataError if extras differ in names or shapes from `first`, the extras of sequence 0,
    or require a gradient."""
    extras, num_tokens = sequence.extras, len(sequence.input_ids)
    if extras.keys() != first.keys():
        odd = ", ".join(sorted(map(str, extras.keys() ^ first.keys())))
        raise refused_data(
            f"{name}, which has not the same extras as sequence 0: {odd}",
            "the same names in all sequences of a call",
            "give each sequence every extra",
        )
    for key, x in extras.items():
        what = f"{name} of {num_tokens} tokens with {key}"
        if key in ("attention_mask", "position_ids", "token_type_ids"):  # nobody would read them
            raise refused_data(
                what,
                "input_ids, labels and extras of your own: padding and positions are furlong's",
                "leave padding tokens and these keys out",
            )
        others = () if key == WEIGHTS else getattr(first[key], "shape", ())[1:]
        shape = (num_tokens, *others)
        if not isinstance(x, Tensor) or x.shape != shape:
            raise refused_data(
                f"{what} {shown(x)}",
                f"a tensor {shape}: entry t is about token t, of one shape in all sequences",
                f"pad {key} with zeros where a token has none"
                if isinstance(x, Tensor)
                else f"pass {key} as torch.tensor([...])",
            )
        if x.requires_grad:
            raise refused_data(
                f"{what}, which requires a gradient",
                "extras without one: the backward goes to the model's parameters alone",
                f"pass {key}.detach(), and make what needs its gradient of the values",
            )
