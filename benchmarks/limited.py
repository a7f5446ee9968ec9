"""Pools whose processes exchange over real links of a limited rate: the part `limited` of
`parallel.py`, which starts this file in namespaces of its own.

Each process has a network namespace, as a node of a cluster has an adapter: a pair of virtual
interfaces, of which tbf limits both ends, joined by a bridge. Processes sleep for the cost model's
seconds (`sleeping.py`), all-to-alls carry all their bytes. The links are measured as `furlong
calibrate` does it, then rivals and places are planned for what was measured, then they run.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from helpers.ranks import run_ranks
from parallel_plans import Contender, long_tailed, pools, slow_device
from parallel_steps import Ran, Trial, run_trials

from furlong.calibrate.measure import collective_links
from furlong.cost.machine import Link

NUM_PROCESSES = 4
RATE_MBIT = 320
_SHAPING = f"root tbf rate {RATE_MBIT}mbit burst 128kb latency 400ms"
_MTU = 9000
"""With the default one of a loopback tbf would drop every packet."""
_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET, as linux/sched.h has it."""
_IN_NAMESPACES = ("unshare", "--map-root-user", "--net", "--mount")
_LIMIT_S = 300.0
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 384, "num_hidden_layers": 8, "vocab_size": 2048, "head_dim": 16,
    "max_position_embeddings": 2**17, "tie_word_embeddings": False,
}  # fmt: skip
"""Narrow, so that attention is to matrices as it is for sequences that are long for their model."""


@dataclass(frozen=True)
class Asked:
    """What the part is to run."""

    num_sequences: int
    longest_tokens: int
    rounds: int


@dataclass(frozen=True)
class Answered:
    """What it has planned, and how it ran."""

    contenders: list[Contender]
    answers: list[list[list[Ran]]]
    """By process, by contender, by round."""
    words: str
    """The links, as they were measured."""


def why_not() -> str | None:
    """Why no namespace with limited links can be had here; None where one can."""
    missing = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found (packages util-linux, iproute2)"
    tried = subprocess.run(
        [*_IN_NAMESPACES, "sh", "-ec", _make_links(1)], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        return (tried.stderr.strip().splitlines() or ["the namespace was refused"])[-1]
    return None


def run_limited(asked: Asked) -> Answered:
    """Run the part in namespaces of its own. Raises CalledProcessError where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "asked", Path(folder) / "answered"
        given.write_bytes(pickle.dumps(asked))
        command = f'{_make_links(NUM_PROCESSES)}exec "$@"'
        own = sys.executable, str(Path(__file__).resolve()), str(given), str(found)
        subprocess.run([*_IN_NAMESPACES, "sh", "-ec", command, "sh", *own], check=True)
        answered: Answered = pickle.loads(found.read_bytes())
        return answered


def _make_links(count: int) -> str:
    """Commands that make a namespace for each of `count` processes, all on one bridge."""
    lines = [
        "mount -t tmpfs none /run", "mkdir /run/netns",
        f"ip link add bridge mtu {_MTU} type bridge", "ip link set bridge up",
    ]  # fmt: skip
    for n in range(count):
        inside = f"ip -n process{n}"
        lines += [
            f"ip netns add process{n}",
            f"ip link add port{n} mtu {_MTU} type veth peer name eth0 mtu {_MTU} netns process{n}",
            f"ip link set port{n} master bridge up",
            f"{inside} link set lo up",
            f"{inside} link set eth0 up",
            f"{inside} address add 10.0.0.{n + 1}/24 dev eth0",
            f"tc qdisc add dev port{n} {_SHAPING}",
            f"tc -n process{n} qdisc add dev eth0 {_SHAPING}",
        ]
    return "".join(f"{line}\n" for line in lines)


def enter(process: int) -> None:
    """Move this process into its namespace."""
    library = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/process{process}").open() as namespace:
        if library.setns(namespace.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"process {process} may not enter its namespace")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


def links_of(process: int) -> dict[str, Link]:
    """The links between all processes, by collective."""
    return collective_links(torch.device("cpu"))


def _answer(asked: Asked) -> Answered:
    links = run_ranks(links_of, num_ranks=NUM_PROCESSES, limit_s=_LIMIT_S, enter=enter)[0]
    link = links["all_to_all"]
    spec = slow_device().measured(links)
    lens = long_tailed(asked.num_sequences, asked.longest_tokens)
    contenders = [
        replace(one, family=f"pools of {NUM_PROCESSES}, limited links")
        for one in pools(lens, spec, NUM_PROCESSES, config=CONFIG)
    ]
    values = {name: value for name, value in CONFIG.items() if name != "model_type"}
    trials = [
        Trial(one.name, one.plan, one.layout, values, one.model, asked.rounds, has_links=True)
        for one in contenders
    ]
    answers = run_ranks(run_trials, trials, num_ranks=NUM_PROCESSES, limit_s=_LIMIT_S, enter=enter)
    words = (
        f"links limited to {RATE_MBIT} Mbit/s; an all-to-all of {NUM_PROCESSES} processes has "
        f"{link.bytes_per_s / 1e6:.1f} MB/s each and {link.latency_s * 1e3:.2f} ms"
    )
    return Answered(contenders, answers, words)


def main() -> None:
    given, found = map(Path, sys.argv[1:])
    found.write_bytes(pickle.dumps(_answer(pickle.loads(given.read_bytes()))))


if __name__ == "__main__":
    import limited  # by the name under which others unpickle what it answers

    limited.main()
