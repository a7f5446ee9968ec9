"""The reference of a run: log-probabilities of the answers by the initial model, computed once.

With new adapters, the initial model is the model without these adapters. Answers are computed
without gradients, in groups of similar length. The groups depend on the data only, so a computation
that is killed and resumed gives the same bits.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from furlong.data.cache import ReferenceLogProbs
from furlong.data.dataset import DataSet
from furlong.report.patience import patience
from furlong.train.batches import BatchEngine
from furlong.train.checkpoints import checksums, fingerprint_of
from furlong.train.evaluation import evaluating
from furlong.train.memory import Fitting
from furlong.train.objective import log_probs
from furlong.train.processes import ALONE, Processes
from furlong.units import count_words, format_seconds

_GROUP_TOKENS = 2**16
"""Most tokens of a call, unless a single sequence is longer."""


def reference_fingerprint(
    model: Any, architecture: Mapping[str, Any], *, dtype: str, max_seq_len: int,
    processes: Processes = ALONE, like: str | None = None,
) -> str:  # fmt: skip
    """Return a checksum of all that the reference's log-probabilities depend on besides tokens: the
    initial model without new adapters, and the compute dtype. `like`: a checkpoint's fingerprint,
    see `checksums`. A collective."""
    is_adapted = hasattr(model, "disable_adapter") and not has_learnt(model)
    named = dict(model.named_parameters())
    own = {name: p for name, p in named.items() if not (is_adapted and p.requires_grad)}
    weights = checksums(own, processes, like)  # each pipeline stage has only its layers
    known = json.dumps(architecture, sort_keys=True, default=str)
    # its factors depend on the run's longest sequence
    limit = max_seq_len if "longrope" in known else None
    text = json.dumps([weights, known, dtype, limit], sort_keys=True)
    return fingerprint_of(text, like)


def referenced(
    data: DataSet, engine: BatchEngine, fitting: Fitting, *, folder: Path, fingerprint: str,
    key: str,
) -> DataSet:  # fmt: skip
    """Return the data set with the reference's log-probabilities of each answer. They are computed
    unless they are cached. A collective.

    Args:
        engine: An engine with the initial model.
        folder: The cache folder.
        fingerprint: See `reference_fingerprint`.
        key: The config key of the data set, for messages.
    """
    started_s = time.perf_counter()
    processes, model = engine.processes, engine.model
    facts: dict[str, Any] = {"model": fingerprint}
    if data.above["truncate"]:
        facts["max_seq_len"] = data.settings.max_seq_len
    is_wide = next(model.parameters()).dtype == torch.float64
    references: dict[int, ReferenceLogProbs] = {}
    num_computed = 0
    waiting = patience(f"{key}: the reference", speaks=processes.is_first)
    with torch.no_grad(), evaluating(model), _as_it_begins(engine), waiting as tell:
        for number, group in _groups(data):
            if number not in references:
                opened = partial(
                    ReferenceLogProbs, folder, data.parts[number], facts,
                    "float64" if is_wide else "float32",
                )  # fmt: skip
                references[number] = processes.first_of_each_machine(opened)
            rows = [data.row(seq_id)[1] for seq_id in group]
            if not processes.any(not references[number].is_done(rows)):
                continue
            found = fitting.compute(
                partial(log_probs, engine, [data[i] for i in group]),
                name=f"the reference of {key}", device=engine.device,
                num_tokens=int(data.seq_lens[group].sum()),
            )  # fmt: skip
            if processes.launch.local_number == 0:
                references[number].write(dict(zip(rows, found, strict=True)))
            num_computed += len(group)
            tell(f"{num_computed:,} of at most {len(data.seq_lens):,} answers")
    processes.together(lambda: None)  # the others read what their machine's first process wrote
    seconds = format_seconds(time.perf_counter() - started_s)
    said = f"{count_words(num_computed, 'answer')} computed in {seconds}"
    print(f"{key}: log-probabilities of the reference: {said if num_computed else 'cached'}")
    return data.with_references(references)


def _groups(data: DataSet) -> Iterator[tuple[int, list[int]]]:
    """Yield (index in `data.parts`, seq_ids) for each engine call. In each part, calls go from
    short sequences to long ones."""
    by_part: dict[int, list[int]] = defaultdict(list)
    for seq_id in np.argsort(data.seq_lens, kind="stable").tolist():
        by_part[data.row(seq_id)[0]].append(seq_id)
    for number, own in sorted(by_part.items()):
        group: list[int] = []
        num_tokens = 0
        for seq_id in own:
            seq_len = int(data.seq_lens[seq_id])
            if group and num_tokens + seq_len > _GROUP_TOKENS:
                yield number, group
                group, num_tokens = [], 0
            group.append(seq_id)
            num_tokens += seq_len
        yield number, group


def has_learnt(model: Any) -> bool:
    """Whether the adapters change the model's outputs, as adapters loaded by `lora.adapter` do; new
    adapters do not, since their B matrices are 0."""
    weights = [parameter for name, parameter in model.named_parameters() if ".lora_B." in name]
    wholes = (w.full_tensor() if isinstance(w, DTensor) else w for w in weights)
    return any(bool(whole.any()) for whole in wholes)


def _as_it_begins(engine: BatchEngine) -> AbstractContextManager[object]:
    """Context manager: disable new adapters, so that the model computes as at the start of the run.
    Adapters of sharded models stay enabled, as new adapters add 0."""
    model: Any = engine.model
    if not engine.is_alone or not hasattr(model, "disable_adapter") or has_learnt(model):
        return nullcontext()
    disabled: AbstractContextManager[object] = model.disable_adapter()
    return disabled
