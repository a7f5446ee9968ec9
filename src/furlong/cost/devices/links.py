"""Seconds on a link: latency plus bytes over bandwidth, per collective (InfiniPipe, Eq. 2).

A bandwidth is what one device moves: `bytes_per_s` is a bus bandwidth in the sense of nccl-tests,
so that it does not depend on the size of the group. Between nodes it is one device's share of its
node's adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Collective = Literal["all_to_all", "all_gather", "reduce_scatter", "all_reduce", "p2p"]


@dataclass(frozen=True, slots=True)
class Link:
    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class ClusterLinks:
    """The links of a cluster of equal nodes."""

    devices_per_node: int
    within_node: Link
    between_nodes: Link
    host: Link
    """Link of a device to its host's memory, in one direction, with all devices at work."""
    disk: Link
    collectives: Mapping[tuple[Collective, bool], Link] | None = None
    """Calibrated values by (collective, between nodes?); the others use the two links above."""

    def link(self, collective: Collective, between: bool) -> Link:
        plain = self.between_nodes if between else self.within_node
        return (self.collectives or {}).get((collective, between), plain)

    def num_nodes(self, devices: Sequence[int]) -> int:
        """Nodes that a group of device numbers touches."""
        return len({device // self.devices_per_node for device in devices})

    def p2p_s(self, num_bytes: float, sender: int, receiver: int) -> float:
        """One message between two devices."""
        between = self.num_nodes((sender, receiver)) > 1
        return self.link("p2p", between).seconds(num_bytes)

    def effective(self, collective: Collective, group_size: int, num_nodes: int = 1) -> Link:
        """The link that a device of a group sees, for the bytes that it moves itself.

        The group is spread evenly over `num_nodes` nodes. Rings cross each node once: a node's
        adapters carry every byte once, so each of its g devices one g-th. In an all-to-all each
        device sends to all others, and waits for the slower of near and far.
        """
        if num_nodes <= 1 or group_size <= 1:
            return self.link(collective, False)
        local = max(1, group_size // num_nodes)
        within, between = self.link(collective, False), self.link(collective, True)
        if collective == "all_to_all":
            far = (group_size - local) / (group_size - 1)
            near = (local - 1) / (group_size - 1)
        else:
            far, near = 1 / local, 1.0
        slowest_s = max(far / between.bytes_per_s, near / within.bytes_per_s)
        return Link(between.latency_s, 1 / slowest_s)

    def collective_s(
        self, collective: Collective, num_bytes: float, group_size: int, num_nodes: int = 1
    ) -> float:
        """Seconds of a collective.

        `num_bytes`: what one device holds at the wide end: the gathered result, the gradient before
        it is scattered, the buffer of an all-to-all. All but the own share moves, in an all_reduce
        twice.
        """
        if group_size <= 1:
            return 0.0
        moved = num_bytes * (group_size - 1) / group_size * (2 if collective == "all_reduce" else 1)
        return self.effective(collective, group_size, num_nodes).seconds(moved)
