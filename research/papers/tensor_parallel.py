"""Tensor parallelism, as Megatron's baselines have it: a device is a group of GPUs.

The group computes as many times as fast, is as narrow per GPU (calls lose as much to their size as
a GPU's share of it), and its links carry as many times as much; beside that each layer gathers and
scatters hidden states twice.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any

from furlong.cost.machine import ClusterLinks, Efficiency, Link, Machine
from furlong.cost.model import CostModel
from furlong.cost.seconds import Hidden, PassPart, StageSeconds
from furlong.cost.shape import ModelShape
from furlong.cost.training import RankWeights, Training
from furlong.plan.plan import Layout, OffloadTarget
from papers.fused import OtherMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTraining(Training):
    """The training of one GPU of a group, which holds its share of all weights."""

    tp_size: int

    @classmethod
    def of(cls, training: Training, tp_size: int) -> SharedTraining:
        given = {field.name: getattr(training, field.name) for field in fields(Training)}
        return cls(**given, tp_size=tp_size)

    def weights(self, *whose: Any) -> RankWeights:
        return _Share(self, *whose)


class _Share(RankWeights):
    """One GPU's share of its group's weights."""

    @property
    def all(self) -> Any:
        return super().all / self.training.tp_size  # type: ignore[attr-defined]

    def gradients(self, stage: int, num_backwards: int) -> list[float]:
        whole = super().gradients(stage, num_backwards)
        return [n / self.training.tp_size for n in whole]  # type: ignore[attr-defined]


@dataclass(frozen=True)
class TensorParallel(CostModel):
    """The cost model of such groups."""

    tp_size: int = 1
    num_nodes: int = 1
    """Nodes that a group spans."""

    @classmethod
    def of(
        cls, shape: ModelShape, spec: Machine, training: Training, tp_size: int
    ) -> TensorParallel:
        per_node = spec.links.devices_per_node
        return cls(
            shape, _joined(spec, tp_size), training, tp_size=tp_size,
            num_nodes=-(-tp_size // per_node),
        )  # fmt: skip

    def memory(self, budget_bytes: int | None = None) -> OtherMemory:
        """Of one GPU of a group."""
        plain = super().memory(budget_bytes)
        training = SharedTraining.of(self.training, self.tp_size)
        given = {field.name: getattr(plain, field.name) for field in fields(plain)}
        return OtherMemory(**given | {"training": training}, tp_size=self.tp_size, cut=True)

    def stage_seconds(
        self,
        stages: tuple[int, ...],
        stage: int,
        *,
        layout: Layout,
        ranks: tuple[int, ...],
        kv: OffloadTarget = "none",
        free: Collection[Hidden] = (),
        unsharded: bool = False,
    ) -> StageSeconds:
        assert self.training.replicas == 1, "replicas of groups are in the plan"
        return _Gathering(
            self.shape, self.hardware, self.training, stages, stage, layout=layout, ranks=ranks,
            kv=kv, free=free, unsharded=unsharded, layer_s=self._layer_s(),
        )  # fmt: skip

    def _layer_s(self) -> tuple[float, float]:
        """Two all-gathers and two reduce-scatters of hidden states per layer: what does not grow,
        and what each token adds."""
        tp = self.tp_size
        if tp == 1:
            return 0.0, 0.0
        link = self.hardware.links.effective("all_gather", tp, self.num_nodes)
        moved = self.shape.hidden_size * self.training.compute_bytes * (tp - 1) / tp
        return 4 * link.latency_s, 4 * moved * tp / link.bytes_per_s


class _Gathering(StageSeconds):
    """Seconds of a stage whose layers gather hidden states."""

    def __init__(self, *what: Any, layer_s: tuple[float, float], **where: Any) -> None:
        super().__init__(*what, **where)
        self._layer_s = layer_s

    def _row(self, part: PassPart) -> tuple[list[float], list[float], int, list[float]]:
        matrices, *others = super()._row(part)
        call_s, token_s = (self._num_layers(part) * each for each in self._layer_s)
        return [matrices[0] + token_s, matrices[1] + call_s, *matrices[2:]], *others


def _joined(spec: Machine, tp: int) -> Machine:
    """So many GPUs as one device."""

    def wider(link: Link) -> Link:
        return replace(link, bytes_per_s=tp * link.bytes_per_s)

    def narrower(eff: Efficiency) -> Efficiency:
        return replace(eff, half_tokens=tp * eff.half_tokens)

    links = spec.links
    return replace(
        spec,
        peak_flops_per_s=tp * spec.peak_flops_per_s,
        activation_bytes_per_s=tp * spec.activation_bytes_per_s,
        optimizer_parameters_per_s=tp * spec.optimizer_parameters_per_s,
        linear=narrower(spec.linear),
        attention_forward=narrower(spec.attention_forward),
        attention_backward=narrower(spec.attention_backward),
        links=ClusterLinks(
            max(1, links.devices_per_node // tp),
            *map(wider, (links.within_node, links.between_nodes, links.host, links.disk)),
            {name: wider(link) for name, link in links.collectives.items()},
        ),
    )
