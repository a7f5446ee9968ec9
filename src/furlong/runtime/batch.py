"""The sequences of a step and the rows of a chunk: ids, labels, extras, shared prefixes.

Labels are shifted before cutting: the label of a chunk's last token is the first token of the next.
Where a sequence branches, a token has as many labels as there are tokens that follow it. A process
without a token has one row of no sequence, without a label.

Extras are tensors per token, of the caller's own names. Entry t of each is about token t, as its
label is. It is shifted with the labels, so that it meets the hidden state that predicts token t.

Sequences that begin alike are joined to trees: what they share is computed once. Equal first tokens
at equal positions have equal hidden states. They are compared token by token, and shared where they
make at least a chunk; so are those behind a fork, as agents' traces have them. What each sequence
is, its labels and whatever is computed of its tokens stay its own.

    T  rows of the process;  R  labels of these rows;  B  rows of a padded batch
    i  number of a sequence in its call;  `seq_id`  one of a tree, as the plan numbers them
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
    """By name: (T, ...), entry t about token t."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of a sequence of the call, in one of the plan."""

    sequence: int
    """The number of that sequence in its call."""
    token: int
    """The number of the first token in that sequence."""
    start: int
    """Where in the plan's sequence the tokens lie: [start, stop)."""
    stop: int


@dataclass(frozen=True, slots=True)
class JoinedSequence:
    """A sequence of the plan: one of the call's, or several that share what they begin with."""

    input_ids: Tensor  # (T,) int64
    first_position: int
    spans: tuple[Span, ...]
    """One; of a joined or branching sequence those of all paths."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of a step, and how those of its plan are made of them."""

    sequences: Sequence[ShiftedSequence]
    """By number in the call; those that are not here are empty."""
    planned: Sequence[JoinedSequence]
    """By `seq_id`."""
    seq_lens: Sequence[int]
    """Tokens of each sequence of the call, wherever it is."""
    num_labels: int | None
    """Labels of the whole batch; None where this process does not know them."""
    forks: Forks = field(default_factory=dict)
    weights: Sequence[float] | None = None
    """By number in the call, how often a sequence's loss counts in the gradient; None: once."""

    def within(self, seq_id: int, start: int, stop: int) -> Iterator[tuple[int, range, int]]:
        """(i, its tokens, the distance of the first one from `start`) of all that lies in [start,
        stop) of a sequence of the plan; tokens that several sequences share come with each."""
        for span in self.planned[seq_id].spans:
            tokens = range(max(start, span.start), min(stop, span.stop))
            if tokens:
                first = span.token + tokens.start - span.start
                yield span.sequence, range(first, first + len(tokens)), tokens.start - start

    def runs(self, rows: ChunkRows) -> Iterator[tuple[int, range, int]]:
        """(i, its tokens, the row of the first one) of all that lies in a chunk."""
        for (seq_id, start, stop), row in rows.runs():
            for index, tokens, distance in self.within(seq_id, start, stop):
                yield index, tokens, row + distance

    def labels_of(self, index: int, tokens: range) -> tuple[Tensor, Tensor]:
        """Which of a sequence's tokens, from the first of them on, have a label (r,); the labels
        (r,)."""
        rows = labelled_rows(labels := self.sequences[index].labels[tokens.start : tokens.stop])
        return rows, labels[rows]

    def members(self, piece: Slice) -> set[int]:
        """The sequences of the call that have tokens in a slice."""
        return {i for i, *_ in self.within(piece.seq_id, piece.start, piece.stop)}

    def extras_of(self, targets: ChunkTargets) -> dict[str, Tensor]:
        """The extras (R, ...) of a chunk's labels, on their device."""
        names = self.sequences[targets.tokens[0][0]].extras if targets.tokens else ()
        return {
            name: sent_to(
                targets.labels.device,
                torch.cat([_at(self.sequences[i].extras[name], at) for i, at in targets.tokens]),
            )
            for name in names
        }


def batch_of(sequences: Sequence[ShiftedSequence], seq_lens: Sequence[int] | None = None) -> Batch:
    """A batch whose plan has the same sequences. `seq_lens`: with those that are not here, which
    are empty."""
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
    """The inputs of a chunk, which live from its first pass to its last one."""

    input_ids: Tensor  # (T,) int64
    position_ids: Tensor  # (T,) int64, from each slice's own place in its sequence
    rows: ChunkRows


@dataclass(frozen=True, slots=True)
class ChunkTargets:
    """The labels of a chunk, which live while its loss is computed."""

    labels: Tensor  # (R,) int64, shifted
    labelled_rows: Tensor  # (R,) int64, the row of each label
    rows: ChunkRows
    tokens: Sequence[tuple[int, Tensor]]
    """(i, those of its tokens (r,) that are the labels), run by run, in their order."""


def labelled_chunks(plan: ChunkPlan, batch: Batch) -> set[int]:
    """The chunks that have a label."""
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
    branches: Mapping[tuple[int, int], int] | None = None,
) -> ChunkInputs:
    """The inputs of a process's rows of one chunk, on their way to the device. `branches`: by
    sequence and first token, the position of runs for which it is another than that token."""
    ids, positions = [], []
    for (seq_id, start, stop), _ in rows.runs():
        sequence = batch.planned[seq_id]
        ids.append(sequence.input_ids[start:stop])
        first = sequence.first_position + (branches or {}).get((seq_id, start), start)
        positions.append(torch.arange(first, first + stop - start, device="cpu"))
    if not rows.tokens:
        ids = positions = [torch.zeros(1, dtype=torch.int64, device="cpu")]
    # of one run they are the sequence's own: on a CPU a copy of all ids would live for the step
    sent = [sent_to(device, torch.cat(x) if len(x) > 1 else x[0]) for x in (ids, positions)]
    return ChunkInputs(sent[0], sent[1], rows)


def chunk_targets(rows: ChunkRows, batch: Batch, device: torch.device) -> ChunkTargets:
    """The labels of a process's rows of one chunk, on their way to the device."""
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
    """A copy on the device, for which the host does not wait."""
    if device.type == "cuda" and not x.is_cuda:
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def _at(x: Tensor, tokens: Tensor) -> Tensor:
    return x[sent_to(x.device, tokens)]


def shift_labels(
    sequences: object, *, extras: Collection[str] | None = (), needs_labels: bool = True
) -> list[ShiftedSequence]:
    """Check sequences of unshifted labels and shift them by one token; shifted ones stay.

    `extras`: names of which a sequence must have one that has extras at all; None: any. Without
    `needs_labels`, and beside weights, the ids are the labels that are left out. Raises DataError
    for what is no such list, for other keys, for tensors of other dtypes or lengths, and for extras
    that require a gradient or that not all sequences have.
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
    if not _is_token_vector(input_ids) or not _is_token_vector(labels) or not len(input_ids):
        raise refused_data(
            f"{name} with input_ids {_shown(input_ids)}, labels {_shown(labels)}",
            "input_ids and labels as dense int64 tensors of one shape (T,), T at least 1",
        )
    if input_ids.shape != labels.shape:
        raise refused_data(
            f"{name} with {len(input_ids)} input_ids and {len(labels)} labels",
            "a label for each token",
            "give tokens without a loss the label -100",
        )
    last = torch.full((1,), IGNORE_INDEX, device="cpu")
    return ShiftedSequence(input_ids, torch.cat([labels[1:].cpu(), last]), extras=own)


def whole_number(value: object, name: str) -> int:
    """A whole number above 0 as an int: also one of numpy, or a tensor of one integer.

    Raises ConfigError, with the argument's name, for anything else.
    """
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = -1
    if not 0 < number < 2**63:
        raise ConfigError(
            given=f"{name} {in_short(value, 60)}",
            required="a whole number above 0 (None: the default)",
            source="the arguments of furlong.Engine or forward_backward",
            change=f"pass {name} as an int",
        )
    return number


def check_ranges(sequences: Sequence[ShiftedSequence], model: HFDecoder) -> None:
    """Raise DataError for ids without an embedding, labels without a logit, too long sequences."""
    num_input_ids, vocab_size, longest_tokens = (
        model.num_input_ids, model.vocab_size, model.longest_tokens,
    )  # fmt: skip
    for index, sequence in enumerate(sequences):
        num_tokens = len(sequence.input_ids)
        if not num_tokens:  # another rank has it
            continue
        last_position = sequence.first_position + num_tokens
        if longest_tokens is not None and last_position > longest_tokens:
            raise refused_data(
                f"sequence {index} of {last_position:,} tokens",
                f"at most {longest_tokens:,}, the smaller of max_seq_len and the model's positions",
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
    """Lengths of sequences as ints. Raises ConfigError for what is no whole number."""
    lens = [whole_number(seq_len, "seq_lens") for seq_len in seq_lens]
    if not lens:
        raise refused_data("no sequences", "at least one sequence", "leave such a call out")
    return lens


def count_valid_tokens(sequences: Sequence[ShiftedSequence]) -> int:
    """Tokens that have a label, over all sequences."""
    return sum(int((sequence.labels != IGNORE_INDEX).sum()) for sequence in sequences)


def _is_token_vector(x: Any) -> TypeGuard[Tensor]:
    is_dense = isinstance(x, Tensor) and x.layout == torch.strided and not x.is_meta
    return is_dense and x.dtype == torch.int64 and x.ndim == 1


def _shown(x: object) -> str:
    if not isinstance(x, Tensor):
        return f"of type {type(x).__name__}"
    where = "on meta" if x.is_meta else f"{x.layout}".removeprefix("torch.")
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} {where}"


def refused_data(
    given: str,
    required: str,
    change: str = "pass one dict per sequence, unpadded, without a batch axis",
) -> DataError:
    source = "the sequences that were passed"
    return DataError(given=given, required=required, source=source, change=change)


def require_type(value: object, kind: type, change: str = "") -> None:
    """Raise ConfigError for what is not of a kind: `ChunkOptions`, or `ChunkPlan`."""
    if not isinstance(value, kind):
        raise ConfigError(
            given=f"a {kind.__name__} of type {type(value).__name__}",
            required=f"a furlong.{kind.__name__}",
            source="the arguments that were passed",
            change=change or f"pass furlong.{kind.__name__}(...)",
        )


_Ids = NDArray[np.int64]


def join_prompts(sequences: Sequence[ShiftedSequence], least_tokens: int) -> Batch:
    """The sequences of a call, those joined that share their first `least_tokens` or more."""
    batch = batch_of(sequences)
    if sum(len(sequence.input_ids) > least_tokens for sequence in sequences) < 2:
        return batch
    ids = [sequence.input_ids.cpu().numpy() for sequence in sequences]
    firsts = [sequence.first_position for sequence in sequences]
    order = sorted(range(len(ids)), key=lambda i: (firsts[i], ids[i].astype(">i8").tobytes()))
    shared = [
        _num_equal(ids[i], ids[j]) if firsts[i] == firsts[j] else 0 for i, j in pairwise(order)
    ]
    groups = _groups(range(len(order)), shared, least_tokens)
    if all(len(group) == 1 for group in groups):
        return batch
    trees = [_tree(sequences, order, shared, group, least_tokens) for group in groups]
    forks = {seq_id: own for seq_id, (_, own) in enumerate(trees) if own}
    return replace(batch, planned=[tree for tree, _ in trees], forks=forks)


def _tree(
    sequences: Sequence[ShiftedSequence],
    order: Sequence[int],
    shared: Sequence[int],
    group: range,
    least_tokens: int,
) -> tuple[JoinedSequence, list[tuple[int, int]]]:
    """The tree of one group of sequences, laid out depth-first as one of the plan, and its forks.

    `order`: sequences by their tokens; `shared`: equal first tokens of two neighbours in it."""
    ids: list[Tensor] = []
    spans: list[Span] = []
    forks: list[tuple[int, int]] = []

    def grow(group: range, depth: int, parent: int) -> None:
        """Lay out sequences of the order, behind the `depth` tokens that all share, which end at
        token `parent` of the tree."""
        for own in sorted(_groups(group, shared, depth + least_tokens), key=shortness):
            members = [order[number] for number in own]
            tokens = sequences[members[0]].input_ids
            stop = min((shared[at] for at in own[:-1]), default=len(tokens))
            end = parent
            if depth < stop:  # else a sequence ends where others go on
                at = spans[-1].stop if spans else 0
                end = at + stop - depth
                if parent != at:
                    forks.append((at, parent))
                ids.append(tokens[depth:stop])
                spans.extend(Span(i, depth, at, end) for i in members)
            if len(own) > 1:
                grow(own, stop, end)

    def shortness(own: range) -> int:
        """Longest first, so that lengths alone say how a pair lies (`plan.lengths.Call`)."""
        return -max(len(sequences[order[number]].input_ids) for number in own)

    grow(group, 0, 0)
    first = sequences[order[group[0]]].first_position
    return JoinedSequence(torch.cat(ids), first, tuple(spans)), forks


def _groups(numbers: range, shared: Sequence[int], least: int) -> list[range]:
    """Runs of consecutive numbers of which neighbours share at least `least` tokens."""
    starts = [numbers.start] + [at + 1 for at in numbers[:-1] if shared[at] < least]
    return [range(a, b) for a, b in pairwise([*starts, numbers.stop])]


def _num_equal(one: _Ids, other: _Ids) -> int:
    """The first tokens that are equal."""
    num_tokens = min(len(one), len(other))
    differ = one[:num_tokens] != other[:num_tokens]
    return int(differ.argmax()) if differ.any() else num_tokens


def _require_extras(name: str, sequence: ShiftedSequence, first: Mapping[str, Any]) -> None:
    """`first`: the extras of sequence 0, which have been checked."""
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
                f"{what} {_shown(x)}",
                f"a tensor {shape}: entry t is about token t, of one shape in all sequences",
                f"pad {key} with zeros where a token has none",
            )
        if x.requires_grad:
            raise refused_data(
                f"{what}, which requires a gradient",
                "extras without one: the backward goes to the model's parameters alone",
                f"pass {key}.detach(), and make what needs its gradient of the values",
            )


# What collators add for kernels that we do not call: all of it follows from position_ids.
IMPLIED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
_PADDED = "pad or pack as TRL does"
_CARRIES_PADDING = {"recurrent_gemma"}
"""Model types whose recurrent layers in transformers go over padding, though a mask names it."""


def read_padded(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    labels: Tensor | None = None,
    *,
    has_cache: bool,
    model_type: str,
) -> tuple[list[ShiftedSequence], list[int]]:
    """The sequences of a batch of token ids (B, T), in order, and in which of the B * T cells each
    begins.

    `attention_mask` (B, T): ones, with zeros in front of them or behind. `position_ids` (B, T) or
    (1, T): default the column, padding counted. With neither mask nor cache (`has_cache`: whether
    transformers would make one) a sequence begins wherever positions do not go on by 1, as
    transformers has it. `labels` (B, T), unshifted; None: there are none. `model_type`: that of the
    model which reads the batch. Raises DataError for anything else, and for labels that padding
    predicts.
    """
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or not input_ids.numel():
        raise refused_data(f"input_ids {_shown(input_ids)}", "token ids of shape (B, T)", _PADDED)
    positions = _positions(input_ids, position_ids)
    bounds = _bounds(input_ids, attention_mask)
    predicted = torch.full(input_ids.shape, IGNORE_INDEX, device="cpu")  # by each token: the next
    if labels is not None:
        predicted[:, :-1] = labels[:, 1:]
        if attention_mask is not None and (lost := labels_of_padding(labels, attention_mask)):
            raise padding_read(f"{lost} labels")
    sequences, cells = [], []
    for index, (start, stop) in enumerate(bounds):
        own = positions[index, start:stop]
        breaks = (own.diff() != 1).nonzero().flatten() + 1
        beside = "an attention_mask" if attention_mask is not None else "a cache" * has_cache
        if len(breaks) and beside:
            raise refused_data(
                f"position_ids that jump within row {index}, beside {beside}",
                "positions that go on by 1: there transformers takes a row for one sequence",
                "leave the attention_mask out of packed rows, and pass use_cache=False",
            )
        for a, b in pairwise([start, *(breaks + start).tolist(), stop]):
            first = int(positions[index, a])
            sequences.append(ShiftedSequence(input_ids[index, a:b], predicted[index, a:b], first))
            cells.append(index * input_ids.shape[1] + a)
    if any(sequence.first_position < 0 for sequence in sequences):
        raise refused_data("position_ids below 0", "positions from 0 on", _PADDED)
    is_padded = attention_mask is not None and not bool(attention_mask[:, 0].all())
    if model_type in _CARRIES_PADDING and is_padded:
        raise refused_data(
            f"a batch of {model_type} with padding in front: its own recurrent layers carry padding"
            " on in their states",
            "padding behind",
            "pad behind",
        )
    return sequences, cells


def labels_of_padding(labels: Tensor, attention_mask: Tensor) -> int:
    """How many labels (B, T), unshifted, tokens of padding predict."""
    return int(((labels[:, 1:] != IGNORE_INDEX) & (attention_mask[:, :-1] == 0)).sum())


def padding_read(what: str) -> DataError:
    """The refusal of `what` that is made of padding."""
    return refused_data(
        f"{what} of what tokens of padding predict",
        "a loss of real tokens alone: padding does not go through the chunks",
        "give padding, and the first token of a row that is padded in front, the label -100, or "
        'pad behind (tokenizer.padding_side = "right"); make a loss of your own of '
        "logits[attention_mask.bool()] alone",
    )


def _bounds(input_ids: Tensor, mask: Tensor | None) -> list[tuple[int, int]]:
    """The first and the last column but one of each row's tokens."""
    num_rows, num_columns = input_ids.shape
    if mask is None:
        return [(0, num_columns)] * num_rows
    if not isinstance(mask, Tensor) or mask.shape != input_ids.shape:
        raise refused_data(
            f"attention_mask {_shown(mask)}",
            f"shape {tuple(input_ids.shape)}: ones of tokens, zeros of padding",
            "leave it out where nothing is padded: attention is causal, and position_ids tell the"
            " sequences of a packed row",
        )
    bounds = []
    for index, row in enumerate(mask.detach().cpu()):
        inside = row.nonzero().flatten()
        if not len(inside) or bool((row[inside[0] : inside[-1] + 1] != 1).any()):
            raise refused_data(
                f"an attention_mask with {'holes' if len(inside) else 'no token'} in row {index}",
                "one run of ones per row, zeros before or behind it",
                _PADDED,
            )
        bounds.append((int(inside[0]), int(inside[-1]) + 1))
    return bounds


def _positions(input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
    """Positions (B, T) on the CPU."""
    num_rows, num_columns = input_ids.shape
    if position_ids is None:
        return torch.arange(num_columns, device="cpu").expand(num_rows, -1)
    shapes = ((num_rows, num_columns), (1, num_columns))
    if not isinstance(position_ids, Tensor) or tuple(position_ids.shape) not in shapes:
        raise refused_data(
            f"position_ids {_shown(position_ids)}", f"shape {shapes[0]}, or one row for all",
            "pass a position for each token, or leave them out",
        )  # fmt: skip
    return position_ids.detach().cpu().expand(num_rows, -1)
