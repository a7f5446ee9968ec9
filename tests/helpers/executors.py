"""An executor without an engine around it."""

from __future__ import annotations

from typing import Any

from furlong.kv.arena import Arena
from furlong.kv.pools import Pools, Storage
from furlong.models.decoder import HFDecoder
from furlong.ops.backends.select import ProbedBackend
from furlong.plan.plan import ChunkPlan
from furlong.runtime.batch import batch_of, shift_labels
from furlong.runtime.distributed.comms import Comms
from furlong.runtime.executor import Executor
from furlong.testing import TokenSequences, num_labels


def executor_of(
    model: HFDecoder, plan: ChunkPlan, sequences: TokenSequences, **settings: Any
) -> Executor:
    """Return an executor for a plan of one rank; `settings` override its default arguments."""
    own = {
        "num_valid_tokens": num_labels(sequences), "backend": ProbedBackend(), "comms": Comms(),
        "pools": settings.get("pools") or Pools(Arena(model.device), Storage()),
    }  # fmt: skip
    return Executor(model, plan, batch_of(shift_labels(sequences)), **own | settings)
