"""One process's part in a pipeline: its links to its neighbours, and a weight that two may hold."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from furlong.models.causal_lm import CausalLM
from furlong.runtime.parallel.agreement import gathered
from furlong.runtime.parallel.links import Links, open_links
from furlong.runtime.parallel.ranks import Ranks
from furlong.runtime.parallel.tied import TiedWeight, open_tied


@dataclass
class Pipeline:
    """The links and the tied weight of one process."""

    links: Links
    tied: TiedWeight


def open_pipeline(ranks: Ranks, model: CausalLM) -> Pipeline:
    """The pipeline of this process. Collective over the world: every process makes all groups."""
    by_stage = ranks.mesh.mesh.reshape(ranks.pp, -1).T.tolist()
    links = open_links(by_stage, model.device)
    return Pipeline(links, open_tied(by_stage, tied=bool(model.config.tie_word_embeddings)))


def stage_heights(ranks: Ranks, model: CausalLM) -> tuple[int, ...]:
    """Layers of each stage: those that its processes hold, or about equally many where all hold all
    of them. Collective over the world."""
    held = gathered(ranks, [model.held.start, len(model.held)])
    firsts, counts = zip(*held[:: ranks.dp * ranks.sp], strict=True)
    if firsts == tuple(accumulate((0, *counts[:-1]))) and sum(counts) == model.num_layers:
        return counts
    least, more = divmod(model.num_layers, ranks.pp)
    return tuple(least + (stage < more) for stage in range(ranks.pp))
