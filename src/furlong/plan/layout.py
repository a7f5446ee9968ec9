"""The division of devices into replicas, pools and stages, as a value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """`dp` replicas, each a pipeline of `pp` stages, each stage on a group of `sp` devices."""

    dp: int = 1
    sp: int = 1
    pp: int = 1

    @property
    def num_devices(self) -> int:
        return self.dp * self.sp * self.pp

    def __str__(self) -> str:
        return f"dp {self.dp} x sp {self.sp} x pp {self.pp}"


ONE_DEVICE = Layout()


def first_device(plan_rank: int, layout: Layout) -> int:
    """The number, among all devices of a layout, of the first one that obeys a list of a plan.

    Lists are numbered replica by replica, and in each stage by stage; devices with the pool
    innermost and the stages outermost, so that those which share a stage's weights are neighbours.
    """
    replica, stage = divmod(plan_rank, layout.pp)
    return (stage * layout.dp + replica) * layout.sp
