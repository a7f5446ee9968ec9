"""One process's part in a pipeline: its links to its neighbours, and a weight that two may hold."""

from __future__ import annotations

from dataclasses import dataclass

from furlong.models.causal_lm import CausalLM
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
