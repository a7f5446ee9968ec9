"""One process's part in a pipeline: its links to its neighbours, and a weight that two may hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from furlong.errors import LinkError
from furlong.models.causal_lm import CausalLM
from furlong.runtime.parallel.links import Links, open_links
from furlong.runtime.parallel.ranks import Ranks
from furlong.runtime.parallel.tied import TiedWeight, open_tied


@dataclass
class Pipeline:
    """The links and the tied weight of one process."""

    links: Links
    tied: TiedWeight
    _is_broken: bool = field(default=False, init=False)

    def require_whole(self) -> None:
        """Raise LinkError after a step that ended with an error."""
        if self._is_broken:
            raise LinkError(
                "an earlier step of this model ended with an error, and some of its messages are "
                "still under way: end all processes and start them again"
            )

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Within it the messages of a step pass; on exit all have gone."""
        self._is_broken = True  # until the end: nobody can tell which of them have gone
        yield
        self.links.finish()
        self._is_broken = False


def open_pipeline(ranks: Ranks, model: CausalLM) -> Pipeline:
    """The pipeline of this process. Collective over the world: every process makes all groups."""
    by_stage = ranks.mesh.mesh.reshape(ranks.pp, -1).T.tolist()
    links = open_links(by_stage, model.device)
    return Pipeline(links, open_tied(by_stage, tied=bool(model.config.tie_word_embeddings)))
