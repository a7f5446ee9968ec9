"""Dials: one way to plan a batch, as a value that can be compared, printed and built.

dials = Dials(method="ChunkFlow", stages=(14, 14), layout=Layout(pp=2), size=8192, num_retained=2)
plan = build(dials, seq_lens, model)        # papers.published.build
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from furlong.plan.plan import Keep, Layout, OffloadTarget
from furlong.planners.options import value_in_words
from papers.published.chunks import Balance
from papers.published.group_order import GroupOrder

Cut = Literal[
    "tokens", "time", "slices", "packed", "padded", "placed",
    "disjoint places", "places by length",
]  # fmt: skip
"""Which tokens make a chunk: pieces of `size` tokens and packed short sequences; the same of equal
time; every sequence in `slices` pieces; whole sequences packed up to `size`; each padded to `size`;
whole sequences in micro-batches as Skrull pairs and places them; on disjoint places of one pool, as
FlexSP does; on those that their lengths ask for, as Megatron-Core does."""

Walk = Literal["state-aware", "token-level", "layer-first", "elastic"]
"""In which order cells run: ChunkFlow's 1F1B, Seq1F1B's, FPDT's, InfiniPipe's pipelines."""


_ONE_DEVICE = Layout()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dials:
    """One way to plan a batch. A dial that a cut or a walk does not have stays at its default."""

    method: str
    layout: Layout = _ONE_DEVICE
    stages: tuple[int, ...] = ()
    """Layers of each stage of the pipeline."""
    balance: Balance = "none"
    """How replicas get their sequences."""
    cut: Cut = "tokens"
    walk: Walk = "state-aware"
    size: int | None = None
    """Tokens of a chunk, of all devices of an sp group together."""
    slices: int | None = None
    """Pieces of every sequence, or with equal time of the longest one."""
    hybrid: bool = False
    """Whether the tail of a cut sequence shares its chunk with whole short ones."""
    group_order: GroupOrder = "as listed"
    """In which order a pipeline runs its groups of chunks."""
    by_work: bool = False
    """Whether slices take equal work rather than equal tokens."""
    num_retained: int | None = None
    keep: Keep | None = None
    offload: OffloadTarget = "none"
    """Where K,V of cut sequences live."""
    stage_layers: int | None = None
    """Layers of a stage on one device, layer-first."""
    recompute_layers: tuple[int, ...] = ()
    """Checkpointed layers of each stage; empty: none."""

    def __str__(self) -> str:
        return f"{self.method}: " + ", ".join([self.layout_words(), *self.words()])

    @property
    def is_pool(self) -> bool:
        """Whether dp and sp have no sizes: each sequence has a place of one pool."""
        return self.cut in ("disjoint places", "places by length")

    def layout_words(self) -> str:
        """The layout, or the size of the pool."""
        if self.layout.num_devices == 1:
            return "one device"
        return f"a pool of {self.layout.num_devices}" if self.is_pool else str(self.layout)

    def words(self) -> list[str]:
        """The dials, each as its name and value."""
        return [f"{name} {value_in_words(value)}" for name, value in self.values().items()]

    def values(self) -> dict[str, object]:
        """The dials that set this value apart from others of its method, by the names that a run
        file has for them where it has any."""
        found = self._of_walk() | self._of_cut()
        if self.offload != "none":
            found["offload"] = self.offload
        if self.layout.dp > 1 and self.balance != "none":
            found["balanced by"] = self.balance
        if self.group_order != "as listed":
            found["order of groups"] = self.group_order
        return found

    def _of_walk(self) -> dict[str, object]:
        match self.walk:
            case "state-aware":
                return {"size": self.size, "num_retained": self.num_retained, "keep": self.keep}
            case "layer-first":
                return {"size": self.size, "stage_layers": self.stage_layers, "keep": self.keep}
            case _:
                return {}

    def _of_cut(self) -> dict[str, object]:
        found: dict[str, object] = {}
        match self.cut:
            case "tokens" if self.walk == "token-level":
                found["size"] = self.size
            case "time" if self.walk == "state-aware":
                found["chunks of"] = "equal time"
            case "slices":
                found |= {"slices": self.slices, "cut": f"equal {self._balanced}"}
            case "packed" | "placed" if len(self.stages) == 1:
                found["micro-batch"] = self.size
            case "disjoint places" | "places by length":
                found["whole sequences on"] = self.cut
        if self.cut in ("packed", "padded", "placed"):
            layers = sorted(set(self.recompute_layers)) or [0]
            found["recomputed layers"] = " to ".join(map(str, {layers[0]: 0, layers[-1]: 0}))
        return found

    @property
    def _balanced(self) -> str:
        return "work" if self.by_work else "tokens"

    @property
    def cuts_by_size(self) -> bool:
        """Whether the search tries sizes of their chunks."""
        return self.cut in ("tokens", "time")

    def planned_first(self) -> Dials:
        """The dials of the plan that is made before it is worth more effort: dealt by work where
        replicas may be dealt by time, groups as they are listed where their order may be searched.
        """
        balance = "flops" if self.balance == "time" else self.balance
        return replace(self, balance=balance, group_order="as listed")

    def chunks_only(self) -> Dials:
        """The part of them that decides the chunks and a bound of their time; equal parts, equal
        chunks."""
        return replace(
            self.planned_first(),
            method="",
            walk="state-aware",
            num_retained=None,
            keep=None,
            stage_layers=None,
            offload="none",
        )


Ladder = tuple[Dials, ...]
"""Dials over the same chunks, falling: every rung needs less memory and no less time than the one
above it, so the highest that fits is the one to take."""
