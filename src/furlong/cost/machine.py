"""Machine: a cluster's data sheet, and what was measured of it.

    Machine.named("H100")                     # data sheet and assumptions
    Machine.named("H100").calibrated("bfloat16")   # what furlong calibrate has measured, if it has

Efficiency saturates with the tokens of a call: best * t / (t + half_tokens). Equivalently a call
costs its FLOPs at the best rate plus a fixed time worth `half_tokens` tokens. Without it every
search picks the smallest chunk. InfiniPipe (Appendix B) and ChunkFlow (Table 6) publish the shape:
fewer tokens per call, less throughput. What a data sheet does not tell, and a large model hides
(kernels that pass bytes, slices, tiles), costs nothing until a calibration has measured it.

Seconds on a link: latency plus bytes over bandwidth, per collective (InfiniPipe, Eq. 2).

A bandwidth is what one device moves: `bytes_per_s` is a bus bandwidth in the sense of nccl-tests,
so that it does not depend on the size of the group. Between nodes it is one device's share of its
node's adapters.

Data sheets are in known_machines.toml, with their sources. What they do not say (efficiencies,
launch times, reserved memory, how a node is cabled) is an assumption. `furlong calibrate` measures
it with the executor, and writes a JSON file for the card and the dtype in the user's cache.
"""

from __future__ import annotations

import json
import os
import platform
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, Literal, get_args

import psutil

from furlong.errors import ConfigError, look_up
from furlong.files import read_object, user_cache, write_text
from furlong.plan.plan import OffloadTarget
from furlong.units import format_bytes

THIS_CPU = "cpu"
FREE_RAM = "three fifths of the free RAM"
"""The budget of `memory.device: auto` on a CPU."""
ASSUMED = "assumed; furlong calibrate measures them"
ASSUMED_ERROR = {"cuda": 0.5, "cpu": 2.0}
"""Relative error of predicted seconds while rates are assumed, by type of device: a guess. Rates
that are published of kernels, in the place of the assumed ones, made steps of cards 1.3 to 1.5
times as long or as short; nobody knows the cores of a CPU."""
VERSION = 1
"""The version of a calibration's file."""
CONTEXT_BYTES = 2**29
"""Assumed bytes of a card that the driver and the context take before a model is on it."""
_LEAST_MARGIN = 0.02
"""Least share of a budget that is left free: no prediction of memory is better."""
_CORE_FLOPS_PER_S = 5e10
OPTIMIZER_STEP_BYTES = 30
"""AdamW reads a gradient (4 bytes), a master weight (4) and two moments (8) of each parameter, and
writes all but the gradient, and the weight in 16 bits (2)."""
HOST_PARAMETERS_PER_S = 190e9 / 28
"""Assumed: torch's fused AdamW passes 28 bytes of each parameter (gradient, weight, two moments;
all but the gradient come back) at 190 GB/s of a node's DRAM. Nobody has measured it."""
_ACHIEVED_BANDWIDTH, _BYTES_PER_SAVED = 0.77, 1.8
"""Assumed of a card's memory; and bytes that element-wise kernels read and write for each byte of a
graph in each pass of a forward, and twice in a backward, counted by operator in a layer of 8B."""
AS_WRITTEN = 2.4
"""Bytes that they pass where modules keep their forward (`model.kernels: none`), over those: 2.2
with all weights trained, 2.7 with adapters."""
CPU_TILE_TOKENS = 512
"""Keys of a tile of torch's flash attention on a CPU (kvSplitSize in FlashAttentionKernel.cpp)."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Share of the peak that a call of some tokens reaches."""

    best: float
    half_tokens: float
    """Tokens at which half of `best` is reached."""
    square: float = 1.0
    """Share of `best`, which in attention is that of blocks without a mask, that one causal square
    reaches."""
    packed: float = 1.0
    """The share that squares of several slices in one call reach, perhaps in another kernel."""

    def share(self, call: Call) -> float:
        """The share of `best` that a kind of calls of attention reaches."""
        return {"full": 1.0, "square": self.square, "packed": self.packed}[call]


Call = Literal["full", "square", "packed"]
"""Kinds of calls of attention: blocks of a prefix, one causal square, those of several slices."""
CALLS: tuple[Call, ...] = get_args(Call)

EFFICIENCIES = ("linear", "attention_forward", "attention_backward")
"""The fields of Machine that are one."""


@dataclass(frozen=True)
class Machine:
    """One device of a cluster, and what joins it to the others."""

    name: str
    peak_flops_per_s: float
    """FLOPs per second of dense matrices in the dtype of the computation."""
    memory_bytes: int
    reserved_bytes: int
    """Bytes of `memory_bytes` that go to the driver, the context and the allocator's gaps."""
    linear: Efficiency
    attention_forward: Efficiency
    attention_backward: Efficiency
    layer_launch_s: float
    """Least time of one layer's forward, however few its tokens: the kernels are launched."""
    links: ClusterLinks
    wide_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """dtype wider than 16 bits -> FLOPs per second of dense matrices in it."""
    pass_launch_s: float = 0.0
    """Least time of one pass over a stage, beside its layers': what a family does around them."""
    slice_launch_s: float = 0.0
    """Least time of one slice of a chunk in the attention of one layer's forward."""
    hides_launches: bool = True
    """Whether a device computes while its host launches what comes next: then a pass takes the
    longer of the two, else both."""
    activation_bytes_per_s: float = inf
    """Bytes of saved tensors and of logits that pass per second through the
    kernels beside products and attention; a layer's backward passes them twice."""
    unpacking_bytes_per_s: float = inf
    """Bytes per second where a product makes its weight of codes in 4 bits, which are read, written
    as floats, and read again. Of a card it is a guess, its memory's: none has been measured."""
    tile_tokens: int = 0
    """Keys in a tile of attention: what the causal mask hides of one is computed all the same."""
    optimizer_parameters_per_s: float = inf
    """Trained parameters that a step of the optimizer updates per second."""
    host_parameters_per_s: float = HOST_PARAMETERS_PER_S
    """The same of an optimizer on the CPUs of a GPU's node, of all processes there together."""
    host_bytes: float = inf
    """Bytes that one device may keep in the memory of its host: its share of the node's."""
    activation_factor: float = 1.0
    """Bytes of a graph as they are held over those that are counted."""
    heap_blocks: float = 0.0
    """As in `cost.memory.PlanMemory`."""
    heap_share: float = 0.0
    time_error: float | None = None
    """Largest relative error of the predicted steps that a calibration's fit has not seen."""
    memory_error: float | None = None
    """Largest share of a measured peak that a calibration's predictions lacked."""
    measurements: Mapping[str, Any] = field(default_factory=dict)
    """Figures that a calibration has measured: values of fields, and links by name."""
    origin: str = ASSUMED
    """The origin of the figures in words, and how far they can be trusted."""
    device_type: str = "cuda"
    """Type, cuda or cpu: it decides the sizes of tiles and segments, and whether collectives run
    beside the computation (those of a CPU do not)."""
    card: str = ""
    """The one device that measurements hold for: a CPU's name, cores and threads, or the driver's
    name of a card that is not this one, but has the memory that is nearest."""

    @classmethod
    def named(cls, name: str) -> Machine:
        """A device by name: a known card's, or `cpu` for this machine. Raises ConfigError that
        names the nearest."""
        known: dict[str, Machine | None] = {THIS_CPU: None, **known_machines()}
        return look_up(name, known, kind="hardware", source="the hardware's name") or this_cpu()

    @classmethod
    def of_card(cls, device_name: str, memory_bytes: int) -> Machine:
        """A card by its driver's name; of an unknown one the figures are those of the known one
        with the nearest memory: good enough to rank plans by, not to tell a peak."""
        if (found := known_card(device_name)) is not None:
            return found
        cards = known_machines().values()
        nearest = min(cards, key=lambda known: abs(known.memory_bytes - memory_bytes))
        return replace(nearest, card=device_name, memory_bytes=memory_bytes)

    def attended_by(self, kernel: str) -> Machine:
        """The card with the rates that are assumed of another kernel of attention, as kernels are
        called in known_machines.toml; as it is where nothing is assumed of it."""
        card = _known()["cards"].get(self.name, {})
        rates = _known()["efficiency"].get(card.get("efficiency"), {}).get("attention", {})
        if kernel not in rates:
            return self
        half_tokens, (forward, backward) = self.linear.half_tokens, rates[kernel]
        return replace(
            self, attention_forward=Efficiency(forward[0], half_tokens, *forward[1:]),
            attention_backward=Efficiency(backward[0], half_tokens, *backward[1:]),
            origin=f"assumed, attention by {kernel}; furlong calibrate measures them",
        )  # fmt: skip

    @property
    def budget_bytes(self) -> int:
        return self.memory_bytes - self.reserved_bytes

    def seconds_between(self, seconds: float) -> tuple[float, float]:
        """The range of predicted seconds, by the error of a calibration or of assumptions."""
        error = ASSUMED_ERROR[self.device_type] if self.time_error is None else self.time_error
        return seconds / (1 + error), seconds * (1 + error)

    def budget(
        self,
        given: int | Literal["auto"],
        num_local: int = 1,
        free_bytes: int | None = None,
    ) -> tuple[int, str]:
        """Bytes of the device that plans may use, and the words for them: the given ones, with a
        warning where they are above the memory; else those that its free memory allows.

        `num_local`: processes that share a CPU's RAM; `free_bytes`: of a card, before a model is on
        it; None: all but what the driver takes."""
        if given != "auto":
            memory = format_bytes(self.memory_bytes)
            more = f", more than the {memory} that {self.name} has"
            return given, "memory.device" + more * (given > self.memory_bytes)
        if self.name == THIS_CPU:
            words = f"{FREE_RAM} over {num_local} processes" if num_local > 1 else FREE_RAM
            return free_ram_budget_bytes() // num_local, words
        if free_bytes is None:
            free_bytes = self.memory_bytes - CONTEXT_BYTES
        return card_budget_bytes(free_bytes), f"95% of what is free, as {self.name}"

    def margin(self, otherwise: float) -> float:
        """Share of a device's budget that plans should leave free."""
        return otherwise if self.memory_error is None else max(_LEAST_MARGIN, self.memory_error)

    def computing_in(self, dtype: str) -> Machine:
        """The device at its peak in `dtype`; as it is where no other peak is known (16 bits, and a
        CPU). The bytes of a wider matrix take longer to read, so more tokens hide that."""
        peak = self.wide_flops_per_s.get(dtype)
        if peak is None:
            return self
        longer = peak / self.peak_flops_per_s * {"float32": 2, "float64": 4}[dtype]
        changed = {
            name: replace(of, half_tokens=of.half_tokens * longer)
            for name in EFFICIENCIES
            if (of := getattr(self, name))
        }
        return replace(self, peak_flops_per_s=peak, **changed)

    def measured(self, figures: Mapping[str, Any]) -> Machine:
        """The machine with what was measured in the place of what was assumed: values of fields,
        and links by name."""
        links = {name: value for name, value in figures.items() if isinstance(value, Link)}
        fields = {name: value for name, value in figures.items() if name not in links}
        measurements = {**self.measurements, **figures}
        return replace(
            self, links=self.links.with_links(links), measurements=measurements, **fields
        )

    def calibration_file(self, dtype: str) -> Path:
        """The file that `furlong calibrate` writes unless told otherwise, in the user's cache."""
        name = self.name if self.device_type == "cpu" else self.card or self.name
        return user_cache() / f"calibration-{re.sub(r'[^-.A-Za-z0-9]+', '-', name)}-{dtype}.json"

    def calibrated(self, dtype: str, file: Path | None = None) -> Machine:
        """The machine as it was measured in this dtype, in the user's cache or in a `file`; as it
        is assumed to compute in it where it was not. A calibration's rates are shares of the peak
        in 16 bits, in whatever dtype it measured them.

        Raises ConfigError for a file that `save` has not written.
        """
        file, assumed = file or self.calibration_file(dtype), self.computing_in(dtype)
        if not os.path.exists(file):
            return assumed
        made_for, figures = _read_calibration(file)
        if made_for != {"hardware": self.name, "machine": self.card, "dtype": dtype}:
            other, own = made_for["machine"] or made_for["hardware"], self.card or self.name
            words = f"assumed: {file} was measured on another machine ({other}; this is {own})"
            return replace(assumed, origin=words)
        found = self.measured(figures)
        words = f"measured by furlong calibrate ({file})"
        for what, error in (("times", found.time_error), ("peaks", found.memory_error)):
            words += "" if error is None else f", {what} within {error:.0%}"
        return replace(found, origin=words)

    def save(self, file: str | Path, dtype: str) -> None:
        """Write what was measured, as `calibrated` reads it."""
        links = {n: of for n, of in self.measurements.items() if isinstance(of, Link)}
        values = {
            "version": VERSION, "hardware": self.name, "machine": self.card, "dtype": dtype,
            **{n: of for n, of in self.measurements.items() if n not in links}, "links": links,
        }  # fmt: skip
        write_text(Path(file), json.dumps(values, indent=2, default=asdict) + "\n")


_NUMBERS = (
    "peak_flops_per_s", "pass_launch_s", "layer_launch_s", "slice_launch_s",
    "activation_bytes_per_s", "optimizer_parameters_per_s", "activation_factor", "heap_blocks",
    "heap_share", "time_error", "memory_error",
)  # fmt: skip


_SHARES = {"best", "square", "packed", "memory_error"}
_DIVISORS = {
    "best", "square", "packed", "peak_flops_per_s", "activation_bytes_per_s",
    "optimizer_parameters_per_s",
}  # fmt: skip


def _read_calibration(file: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """The machine and dtype of a calibration's file, and its figures. Raises ConfigError for
    anything else than `Machine.save` writes."""
    source, again = f"the calibration file {file}", "run furlong calibrate again"
    values = read_object(file, source=source, change=again)
    try:
        if (version := values.pop("version", None)) != VERSION:
            raise ValueError(f"version {version}")
        values.pop("measured_on", None)  # of older files
        made_for = {name: str(values.pop(name)) for name in ("hardware", "machine", "dtype")}
        figures: dict[str, Any] = {n: Link(**of) for n, of in values.pop("links").items()}
        for name, value in values.items():
            figures[name] = of = Efficiency(**value) if name in EFFICIENCIES else value
            numbers = asdict(of) if isinstance(of, Efficiency) else {name: of}
            for key, number in numbers.items():
                is_number = isinstance(number, int | float) and not isinstance(number, bool)
                is_sound = is_number and number >= 0 and (key not in _DIVISORS or number > 0)
                most = 1 if key in _SHARES else inf
                is_sound = is_sound and (number < inf or key == "activation_bytes_per_s")
                is_sound = is_sound and number <= most
                if not is_sound or (name not in _NUMBERS and name not in EFFICIENCIES):
                    raise ValueError(f"{name} = {value!r}")
        return made_for, figures
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            given=str(error), required="what furlong calibrate writes", source=source, change=again
        ) from error


def this_cpu() -> Machine:
    """This machine: memory from the system, a fixed rate per core, for decisions that no noise may
    turn."""
    memory = psutil.virtual_memory().total
    cores = os.cpu_count() or 1
    copy = 1e10
    return Machine(
        name=THIS_CPU,
        card=_cpu_words(),
        device_type="cpu",
        peak_flops_per_s=cores * _CORE_FLOPS_PER_S,
        memory_bytes=memory,
        reserved_bytes=memory // 8,
        linear=Efficiency(0.7, 32),
        attention_forward=Efficiency(0.5, 32),
        attention_backward=Efficiency(0.5, 32),
        layer_launch_s=5e-4,
        pass_launch_s=8e-4,
        slice_launch_s=6e-4,
        activation_bytes_per_s=2e9,
        unpacking_bytes_per_s=5e9,  # of 18,944 by 3,584 weights; 13e9 where they fit the cache
        hides_launches=False,
        tile_tokens=CPU_TILE_TOKENS,
        host_bytes=memory - memory // 8,
        heap_blocks=3.5,  # both as in the steps of docs/research/simulated-and-real.md
        heap_share=1.0,
        links=ClusterLinks(
            devices_per_node=cores,
            within_node=Link(5e-5, copy / 2),
            between_nodes=Link(1e-4, 1e9),
            host=Link(0.0, copy),
            disk=Link(1e-4, 5e8),
        ),
    )


def _cpu_words() -> str:
    """The CPU's name, its cores and its threads."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = named[0] if named else name
    except OSError:
        pass
    return f"{name}, {cores} cores, threads: {threads}"


def one_of(spec: Machine, num_local: int) -> Machine:
    """The device of one of `num_local` processes of a machine: these are a node, and have equal
    parts of its RAM and of a CPU's cores."""
    links, before = replace(spec.links, devices_per_node=num_local), spec.links.devices_per_node
    if spec.device_type == "cpu":
        return replace(spec, links=links, peak_flops_per_s=spec.peak_flops_per_s / num_local)
    return replace(spec, links=links, host_bytes=spec.host_bytes * before // num_local)


def are_links_measured(spec: Machine) -> bool:
    """Whether a calibration has measured a link between devices."""
    return not {"within_node", *get_args(Collective)}.isdisjoint(spec.measurements)


def free_ram_budget_bytes() -> int:
    """Three fifths of the RAM that is free now, rounded down to four binary digits so that a little
    more or less of it changes nothing. A control group's limit counts as RAM.

    A process takes a fourth to a third more than is counted (benchmarks/step.py: predicted peaks
    are 0.76 to 0.80 of the measured ones): the C library's heap keeps what was freed.
    """
    return ram_budget_bytes(min(psutil.virtual_memory().available, _free_in_control_group()))


def ram_budget_bytes(free_bytes: int) -> int:
    """Bytes of free RAM that plans may use."""
    return rounded_budget(free_bytes * 3 // 5)


def card_budget_bytes(free_bytes: int) -> int:
    """Bytes of a card's free memory that plans may use, rounded alike: there are gaps between the
    allocator's blocks."""
    return rounded_budget(free_bytes * 19 // 20)


def rounded_budget(num_bytes: int) -> int:
    """`num_bytes` rounded down to four binary digits."""
    step = 1 << max(0, num_bytes.bit_length() - 4)
    return num_bytes // step * step


def _free_in_control_group(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes below the limit that a container sets (cgroup v2), files in the cache not counted as
    used; without a limit more than any machine has."""
    try:
        limit = int((root / "memory.max").read_text())
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(stat["inactive_file"]) + int(stat["active_file"]))
    except (OSError, ValueError, KeyError):
        return 2**62


Collective = Literal["all_to_all", "all_gather", "reduce_scatter", "all_reduce", "p2p"]
_BETWEEN = " between nodes"
_LINKS = ("within_node", "between_nodes", "host", "disk")


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
    collectives: Mapping[str, Link] = field(default_factory=dict)
    """Measured links by collective, such as `all_reduce` or `all_reduce between nodes`; the others
    use the two links above."""

    def link(self, collective: Collective, between: bool) -> Link:
        plain = self.between_nodes if between else self.within_node
        return self.collectives.get(collective + _BETWEEN if between else collective, plain)

    def to(self, target: OffloadTarget) -> Link:
        """Link of a device to what it offloads to."""
        return self.host if target == "cpu" else self.disk

    def with_links(self, links: Mapping[str, Link]) -> ClusterLinks:
        """With some links by name in the place of these."""
        plain: dict[str, Any] = {name: links[name] for name in _LINKS if name in links}
        collectives = {name: link for name, link in links.items() if name not in plain}
        return replace(self, collectives={**self.collectives, **collectives}, **plain)

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


@cache
def _known() -> dict[str, dict[str, Any]]:
    """The tables of known_machines.toml."""
    return tomllib.loads(Path(__file__).with_name("known_machines.toml").read_text("utf-8"))


@cache
def known_machines() -> dict[str, Machine]:
    """The cards of known_machines.toml by name."""
    return {name: _machine(name, **card) for name, card in _known()["cards"].items()}


def known_card(device_name: str) -> Machine | None:
    """The card that the driver calls by this whole name."""
    cards = _known()["cards"].items()
    name = next((name for name, card in cards if device_name in card["driver_names"]), None)
    return None if name is None else known_machines()[name]


def _machine(
    name: str, *, tflops: list[float], memory_mib: int, memory_tb_per_s: float, node: str,
    efficiency: str, linear: float | None = None, **_: Any,
) -> Machine:  # fmt: skip
    sixteen, wide, widest = (each * 1e12 for each in tflops)
    memory_bytes, of_node = memory_mib * 2**20, _known()["nodes"][node]
    # a matrix in 16 bits is read in the time in which peak / bandwidth tokens go through it
    half_tokens = 5 / 3 * tflops[0] / memory_tb_per_s
    assumed = _known()["efficiency"][efficiency]
    matrices = Efficiency(linear or assumed["linear"], half_tokens)
    machine = Machine(
        name=name,
        peak_flops_per_s=sixteen,
        wide_flops_per_s={"float32": wide, "float64": widest},
        memory_bytes=memory_bytes,
        reserved_bytes=CONTEXT_BYTES + int(0.03 * memory_bytes),
        linear=matrices,
        attention_forward=matrices,
        attention_backward=matrices,
        layer_launch_s=1.5e-4,
        optimizer_parameters_per_s=memory_tb_per_s * 1e12 / OPTIMIZER_STEP_BYTES,
        unpacking_bytes_per_s=memory_tb_per_s * 1e12,
        activation_bytes_per_s=_ACHIEVED_BANDWIDTH / _BYTES_PER_SAVED * memory_tb_per_s * 1e12,
        links=ClusterLinks(
            devices_per_node=8,
            within_node=Link(2e-5, of_node["within_node_bytes_per_s"]),
            between_nodes=Link(3e-5, of_node["between_nodes_bytes_per_s"]),
            host=Link(1e-5, of_node["host_bytes_per_s"]),
            disk=Link(1e-4, 5e8),
        ),
        host_bytes=ram_budget_bytes(of_node["host_gib"] * 2**30) // 8,
    )
    return machine.attended_by(next(iter(assumed["attention"])))
