"""Machine: a device and its cluster's links, from data sheets, assumptions and calibration.

    Machine.named("H100")                     # data sheet and assumptions
    Machine.named("H100").calibrated("bfloat16")   # measured by furlong calibrate, if it was run

The rate of a kernel depends on the tokens t of a call. The share of the peak FLOPs per second that
it reaches is best * t / (t + half_tokens). In other words, a call takes the time of t +
`half_tokens` tokens at the best rate. Without this fixed addition each search would pick the
smallest chunk. InfiniPipe (Appendix B) and ChunkFlow (Table 6) report the same: calls with fewer
tokens have less throughput. Kernel launches per pass and per slice take no time on a card without a
calibration, since they are short for large models.

Seconds on a link: latency plus bytes over bandwidth, per collective (InfiniPipe, Eq. 2).

Bandwidths are per device: `bytes_per_s` is a bus bandwidth in the sense of nccl-tests, which does
not depend on the size of the group. Between nodes it is one device's share of its node's adapters.

Data sheets are in known_machines.toml, with their sources. All else (efficiencies, launch times,
reserved memory, topology of a node) is assumed until `furlong calibrate` measures it with the
executor and writes a JSON file for the card and the dtype to the user's cache.
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
"""Relative error of predicted seconds while rates are assumed, by type of device: a guess. Using
published rates of kernels instead changed predicted steps on GPUs by factors of 1.3 to 1.5; for a
CPU's cores there are no such figures."""
CALIBRATION_VERSION = 1
"""Version of a calibration file."""
CONTEXT_BYTES = 2**29
"""Assumed bytes of a card that driver and context use before a model is loaded."""
_LEAST_MARGIN = 0.02
"""Least share of a budget that is left free: the best accuracy of memory predictions."""
_CORE_FLOPS_PER_S = 5e10
OPTIMIZER_STEP_BYTES = 30
"""AdamW reads a gradient (4 bytes), a master weight (4) and two moments (8) of each parameter, and
writes all but the gradient, and the weight in 16 bits (2)."""
HOST_PARAMETERS_PER_S = 190e9 / 28
"""Assumed, not measured: torch's fused AdamW moves 28 bytes per parameter (it reads gradient,
weight and two moments, and writes all but the gradient) at 190 GB/s of a node's DRAM."""
_ACHIEVED_BANDWIDTH, _BYTES_PER_SAVED = 0.77, 1.8
"""Assumed share of a card's memory bandwidth that kernels achieve; and bytes that element-wise
kernels move per saved byte in a forward (twice in a backward), counted by operator in an 8B layer.
"""
AS_WRITTEN = 2.4
"""Factor of `_BYTES_PER_SAVED` if modules keep their own forward (`model.kernels: none`): 2.2 with
all weights trained, 2.7 with adapters."""
CPU_TILE_TOKENS = 512
"""Keys per tile of torch's flash attention on a CPU (kvSplitSize in FlashAttentionKernel.cpp)."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How efficient a kind of kernel is: the share of the peak FLOPs per second that it reaches.
    The share grows with the tokens of a call."""

    best: float
    half_tokens: float
    """Tokens at which half of `best` is reached."""
    square: float = 1.0
    """Factor of `best` for one causal square of attention; `best` is for unmasked blocks."""
    packed: float = 1.0
    """Factor of `best` for causal squares of several slices in one call."""

    def share(self, call: AttentionCall) -> float:
        """Return the factor by which `best` is multiplied for attention calls of the kind `call`: 1
        for "full", `square` for "square", `packed` for "packed"."""
        return {"full": 1.0, "square": self.square, "packed": self.packed}[call]


AttentionCall = Literal["full", "square", "packed"]
"""Kinds of attention calls: unmasked blocks of a prefix, one causal square, causal squares of
several slices."""
CALLS: tuple[AttentionCall, ...] = get_args(AttentionCall)

EFFICIENCIES = ("linear", "attention_forward", "attention_backward")
"""The fields of Machine of type Efficiency."""


@dataclass(frozen=True)
class Machine:
    """One device of a cluster, and its links to the other devices."""

    name: str
    peak_flops_per_s: float
    """Peak FLOPs per second of dense matrices in the compute dtype."""
    memory_bytes: int
    reserved_bytes: int
    """Bytes of `memory_bytes` for the driver, the context and gaps of the allocator."""
    linear: Efficiency
    attention_forward: Efficiency
    attention_backward: Efficiency
    layer_launch_s: float
    """Least time of one layer's forward: the time of its kernel launches."""
    links: ClusterLinks
    wide_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """dtype wider than 16 bits -> peak FLOPs per second of dense matrices in it."""
    pass_launch_s: float = 0.0
    """Least time of one pass over a stage outside its layers."""
    slice_launch_s: float = 0.0
    """Least time of one slice of a chunk in the attention of one layer's forward."""
    hides_launches: bool = True
    """Whether a device computes while its host launches further kernels: a pass then takes the
    maximum of the two times, otherwise their sum."""
    activation_bytes_per_s: float = inf
    """Saved bytes (and bytes of logits) per second in kernels other than matrix products and
    attention; a layer's backward counts them twice."""
    unpacking_bytes_per_s: float = inf
    """Bytes per second of dequantizing 4-bit weights: codes are read, floats written and read
    again. For cards it is assumed to be the memory bandwidth; none has been measured."""
    tile_tokens: int = 0
    """Keys per tile of attention: masked parts of a tile are computed, too."""
    optimizer_parameters_per_s: float = inf
    """Trained parameters that the optimizer updates per second."""
    host_parameters_per_s: float = HOST_PARAMETERS_PER_S
    """Parameters that an optimizer on the CPUs of a GPU node updates per second, for all of its
    processes together."""
    host_bytes: float = inf
    """Bytes of CPU memory that one device may use: its share of the node's CPU memory."""
    activation_factor: float = 1.0
    """Measured bytes of a graph over counted ones."""
    heap_blocks: float = 0.0
    """`heap_blocks` and `heap_share` of `cost.memory.PlanMemory`."""
    heap_share: float = 0.0
    time_error: float | None = None
    """Largest relative error of predicted step times that the calibration was not fitted to."""
    memory_error: float | None = None
    """Largest underestimate of a measured peak in a calibration, as a share of the peak."""
    measurements: Mapping[str, Any] = field(default_factory=dict)
    """Calibrated figures: values of fields, and links by name."""
    origin: str = ASSUMED
    """Words for the origin of the figures and their accuracy."""
    device_type: str = "cuda"
    """cuda or cpu: decides the sizes of tiles and segments, and whether collectives overlap with
    computation (on a CPU they do not)."""
    card: str = ""
    """The device that measurements hold for: a CPU's name, cores and threads, or the driver's name
    of an unknown card, for which this one was chosen as the nearest in memory."""

    @classmethod
    def named(cls, name: str) -> Machine:
        """Return a device by name: a known card, or `cpu` for this machine. Raises ConfigError that
        suggests the nearest name."""
        known: dict[str, Machine | None] = {THIS_CPU: None, **known_machines()}
        return look_up(name, known, kind="hardware", source="the hardware's name") or this_cpu()

    @classmethod
    def of_card(cls, device_name: str, memory_bytes: int) -> Machine:
        """Return the card with the name `device_name`, as its driver reports it. A card that is not
        in known_machines.toml gets the figures of the known card nearest in memory: good enough to
        rank plans, not to predict peak memory."""
        if (found := known_card(device_name)) is not None:
            return found
        cards = known_machines().values()
        nearest = min(cards, key=lambda known: abs(known.memory_bytes - memory_bytes))
        return replace(nearest, card=device_name, memory_bytes=memory_bytes)

    def attended_by(self, kernel: str) -> Machine:
        """Return this card with the rates that known_machines.toml assumes for the attention kernel
        `kernel`; unchanged if the file has none."""
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
        """Return the least and the most seconds that a step with predicted `seconds` may take. The
        relative error is the calibration's or, without a calibration, an assumed one."""
        error = ASSUMED_ERROR[self.device_type] if self.time_error is None else self.time_error
        return seconds / (1 + error), seconds * (1 + error)

    def budget(
        self,
        given: int | Literal["auto"],
        num_local: int = 1,
        free_bytes: int | None = None,
    ) -> tuple[int, str]:
        """Return the device's memory budget in bytes, and a text that says where this budget comes
        from.

        Args:
            given: The budget that the user set, in bytes, which is returned as it is. If it exceeds
                the memory, the text warns of that. "auto": a share of the free memory.
            num_local: Number of processes that share a CPU's RAM.
            free_bytes: Free bytes of a card before a model is loaded; None: all but
                `CONTEXT_BYTES`.
        """
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
        """Return the share of a device's memory budget that plans must leave free. It is the
        relative memory error of the calibration or, without a calibration, `otherwise`."""
        return otherwise if self.memory_error is None else max(_LEAST_MARGIN, self.memory_error)

    def computing_in(self, dtype: str) -> Machine:
        """Return the device for computation in `dtype`: with the peak FLOPs of this dtype in place
        of the 16-bit peak. If the peak of `dtype` is not known (CPUs, 16-bit dtypes), return the
        device unchanged.

        `half_tokens` stand for the time to read the weights. They grow with the new peak, relative
        to the old one, and with the bytes per weight, relative to 16 bits.
        """
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
        """Return the machine with measured values in place of assumed ones. `figures`: name of a
        field or of a link -> its measured value."""
        links = {name: value for name, value in figures.items() if isinstance(value, Link)}
        fields = {name: value for name, value in figures.items() if name not in links}
        measurements = {**self.measurements, **figures}
        return replace(
            self, links=self.links.with_links(links), measurements=measurements, **fields
        )

    def calibration_file(self, dtype: str) -> Path:
        """Return the file that `furlong calibrate` writes by default, in the user's cache."""
        name = self.name if self.device_type == "cpu" else self.card or self.name
        return user_cache() / f"calibration-{re.sub(r'[^-.A-Za-z0-9]+', '-', name)}-{dtype}.json"

    def calibrated(self, dtype: str, file: Path | None = None) -> Machine:
        """Return the machine with the calibration for `dtype` from `file` or the user's cache. If
        the file is missing or was measured on another machine, return `computing_in(dtype)`.
        Calibrated efficiencies are shares of the 16-bit peak, whatever the dtype. Raises
        ConfigError unless `save` wrote the file."""
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
        """Write the measurements to a file that `calibrated` reads."""
        links = {n: of for n, of in self.measurements.items() if isinstance(of, Link)}
        values = {
            "version": CALIBRATION_VERSION, "hardware": self.name, "machine": self.card,
            "dtype": dtype,
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
    """Return what a calibration file was measured for (hardware, machine, dtype), and its figures
    by name. Raises ConfigError for a file that `Machine.save` has not written."""
    source, again = f"the calibration file {file}", "run furlong calibrate again"
    values = read_object(file, source=source, change=again)
    try:
        if (version := values.pop("version", None)) != CALIBRATION_VERSION:
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
    """Return the `Machine` of this computer's CPU, with the system's memory and with fixed rates
    per core, so that plans are reproducible."""
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
        unpacking_bytes_per_s=5e9,  # for 18,944 by 3,584 weights; 13e9 if they fit the cache
        hides_launches=False,
        tile_tokens=CPU_TILE_TOKENS,
        host_bytes=memory - memory // 8,
        heap_blocks=3.5,  # both from the steps of docs/research/simulated-and-real.md
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
    """Return a text with the CPU's name, its number of cores, and OMP_NUM_THREADS."""
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
    """Return the device `spec` with the resources of one of `num_local` processes on its node. Of a
    CPU, a process has an equal part of the FLOPs; of a GPU node, an equal part of the RAM."""
    links, before = replace(spec.links, devices_per_node=num_local), spec.links.devices_per_node
    if spec.device_type == "cpu":
        return replace(spec, links=links, peak_flops_per_s=spec.peak_flops_per_s / num_local)
    return replace(spec, links=links, host_bytes=spec.host_bytes * before // num_local)


def are_links_measured(spec: Machine) -> bool:
    """Whether a calibration has measured a link between devices."""
    return not {"within_node", *get_args(Collective)}.isdisjoint(spec.measurements)


def free_ram_budget_bytes() -> int:
    """Return three fifths of the RAM that is free now, also under a cgroup's limit. The bytes are
    rounded down to four significant binary digits, so that small changes do not matter.

    A process uses a fourth to a third more RAM than predicted (benchmarks/step.py: predicted peaks
    are 0.76 to 0.80 of the measured ones), since the C library's heap keeps freed memory.
    """
    return ram_budget_bytes(min(psutil.virtual_memory().available, _free_in_control_group()))


def ram_budget_bytes(free_bytes: int) -> int:
    """Return the part of `free_bytes` of RAM that plans may use: three fifths, rounded down."""
    return rounded_budget(free_bytes * 3 // 5)


def card_budget_bytes(free_bytes: int) -> int:
    """Return how many of a card's free bytes plans may use; the allocator's gaps take the rest."""
    return rounded_budget(free_bytes * 19 // 20)


def rounded_budget(num_bytes: int) -> int:
    """Round `num_bytes` down to four significant binary digits."""
    step = 1 << max(0, num_bytes.bit_length() - 4)
    return num_bytes // step * step


def _free_in_control_group(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that a container's memory limit (cgroup v2) leaves free. Cached files count
    as free. Without a limit, return 2**62."""
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
    """Latency and bandwidth of the links in a cluster of equal nodes."""

    devices_per_node: int
    within_node: Link
    between_nodes: Link
    host: Link
    """Link of a device to its host's memory, in one direction, while all devices use theirs."""
    disk: Link
    collectives: Mapping[str, Link] = field(default_factory=dict)
    """Measured links by collective, such as `all_reduce` or `all_reduce between nodes`; other
    collectives use `within_node` and `between_nodes`."""

    def link(self, collective: Collective, between: bool) -> Link:
        plain = self.between_nodes if between else self.within_node
        return self.collectives.get(collective + _BETWEEN if between else collective, plain)

    def to(self, target: OffloadTarget) -> Link:
        """Return the link of a device to an offload target (CPU memory or disk)."""
        return self.host if target == "cpu" else self.disk

    def with_links(self, links: Mapping[str, Link]) -> ClusterLinks:
        """Return a copy in which `links` (name -> link) replace links of the same names."""
        plain: dict[str, Any] = {name: links[name] for name in _LINKS if name in links}
        collectives = {name: link for name, link in links.items() if name not in plain}
        return replace(self, collectives={**self.collectives, **collectives}, **plain)

    def num_nodes(self, devices: Sequence[int]) -> int:
        """Return the number of nodes that a group of devices spans."""
        return len({device // self.devices_per_node for device in devices})

    def p2p_s(self, num_bytes: float, sender: int, receiver: int) -> float:
        """Return the seconds of one message between two devices."""
        between = self.num_nodes((sender, receiver)) > 1
        return self.link("p2p", between).seconds(num_bytes)

    def effective(self, collective: Collective, group_size: int, num_nodes: int = 1) -> Link:
        """Return the latency and bandwidth at which one device moves its bytes in a collective.

        The group has `group_size` devices, evenly spread over `num_nodes` nodes, g on each node.
        All collectives but the all-to-all run as a ring: each byte crosses a node's adapters once,
        and each of the node's g devices moves 1/g of the bytes between nodes. In an all-to-all each
        device sends an equal part to each other device, within its node and between nodes. In both
        cases the slower of the two transfers (within a node, between nodes) sets the bandwidth.
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
        """Return the seconds of a collective.

        `num_bytes`: bytes of one device's input or output, whichever is larger: the gathered
        result, the gradient before the scatter, the buffer of an all-to-all. All of these bytes but
        the device's own share are moved, in an all_reduce twice.
        """
        if group_size <= 1:
            return 0.0
        moved = num_bytes * (group_size - 1) / group_size * (2 if collective == "all_reduce" else 1)
        return self.effective(collective, group_size, num_nodes).seconds(moved)


@cache
def _known() -> dict[str, dict[str, Any]]:
    """Return the tables of known_machines.toml."""
    return tomllib.loads(Path(__file__).with_name("known_machines.toml").read_text("utf-8"))


@cache
def known_machines() -> dict[str, Machine]:
    """Return the cards of known_machines.toml by name."""
    return {name: _machine(name, **card) for name, card in _known()["cards"].items()}


def known_card(device_name: str) -> Machine | None:
    """Return the card of known_machines.toml that has this driver name, or None."""
    cards = _known()["cards"].items()
    name = next((name for name, card in cards if device_name in card["driver_names"]), None)
    return None if name is None else known_machines()[name]


def _machine(
    name: str, *, tflops: list[float], memory_mib: int, memory_tb_per_s: float, node: str,
    efficiency: str, linear: float | None = None, **_: Any,
) -> Machine:  # fmt: skip
    sixteen, wide, widest = (each * 1e12 for each in tflops)
    memory_bytes, of_node = memory_mib * 2**20, _known()["nodes"][node]
    # reading a 16-bit matrix takes as long as multiplying peak / bandwidth tokens with it
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
