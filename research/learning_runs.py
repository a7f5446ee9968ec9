"""The runs of sampled_learning.py and what they are compared by: free of torch and of files."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from harness import Promise
from learning_curve import VOCAB_SIZE, Curve, Learned, Rule

NUM_PROCESSES = 2
SEEDS = (0, 1, 2)
LRS = (1e-3, 3e-3, 1e-2)

_SHORTER = (0.3, 0.6)
_SHORTEST = _SHORTER[0]
_ALLOWED_S = 30 * 60
_LEAST_LEARNED = 0.8

Config = tuple[Rule, float]
EXACT: Config = ("exact", 1)
CONFIGS: tuple[Config, ...] = (
    EXACT,
    *(("unbiased", 1 / n) for n in (2, 4, 8)),
    *(("fixed", 1 / n) for n in (2, 4, 8)),
    *(("paper", 1 / n) for n in (2, 4, 8)),
)


@dataclass(frozen=True, slots=True)
class Row:
    """What the runs of one rule at one rate found, by seed."""

    config: Config
    lr: float
    update_ratio: float
    """Time of an update by that of an exact one."""
    losses: tuple[float, ...]
    """Held out, behind the last update."""
    exact_losses: tuple[float, ...]
    """Of exact training with as many updates."""
    timely_losses: tuple[float, ...]
    """Of exact training that takes as many seconds."""


def candidates(num_updates: int) -> list[Curve]:
    """The curves of the search for learning rates."""
    length = math.ceil(_SHORTEST * num_updates)
    return [Curve(*config, lr, SEEDS[0], length) for config in CONFIGS for lr in LRS]


def best_lrs(short: Iterable[Learned]) -> dict[Config, float]:
    """For each rule and rate, the learning rate that ends lowest; a loss that is nan loses."""
    best: dict[Config, tuple[float, float]] = {}
    for learned in short:
        loss = learned.loss
        reached = (loss if math.isfinite(loss) else math.inf, learned.curve.lr)
        config = config_of(learned)
        best[config] = min(reached, best.get(config, reached))
    return {config: lr for config, (_, lr) in best.items()}


def finals(num_updates: int, lrs: Mapping[Config, float]) -> list[Curve]:
    """The curves that are compared, and the ends of exact training with fewer updates."""
    full = [Curve(*config, lrs[config], seed, num_updates) for config in CONFIGS for seed in SEEDS]
    shorter = [
        Curve(*EXACT, lrs[EXACT], seed, math.ceil(share * num_updates))
        for share in _SHORTER
        for seed in SEEDS
    ]
    return full + shorter


def config_of(learned: Learned) -> Config:
    return learned.curve.rule, learned.curve.rate


def update_seconds(everything: Iterable[Learned]) -> dict[Config, float]:
    """CPU seconds of an update: the median of all curves of a rule at a rate."""
    found: dict[Config, list[float]] = {}
    for learned in everything:
        found.setdefault(config_of(learned), []).append(learned.update_s)
    return {config: statistics.median(values) for config, values in found.items()}


def summarize(
    runs: Sequence[Learned], seconds: Mapping[Config, float], num_updates: int
) -> list[Row]:
    """One row per rule and rate."""
    ends = {
        seed: sorted(
            (learned.curve.num_updates * seconds[EXACT], learned.loss)
            for learned in runs
            if config_of(learned) == EXACT and learned.curve.seed == seed
        )
        for seed in SEEDS
    }
    full = [learned for learned in runs if learned.curve.num_updates == num_updates]
    rows = []
    for config in CONFIGS:
        own = {learned.curve.seed: learned for learned in full if config_of(learned) == config}
        rows.append(
            Row(
                config,
                own[SEEDS[0]].curve.lr,
                seconds[config] / seconds[EXACT],
                tuple(own[seed].loss for seed in SEEDS),
                tuple(ends[seed][-1][1] for seed in SEEDS),
                tuple(loss_at(num_updates * seconds[config], ends[seed]) for seed in SEEDS),
            )
        )
    return rows


def loss_at(seconds: float, ends: Sequence[tuple[float, float]]) -> float:
    """The final loss of a run that takes so many seconds, between (seconds, loss) of runs that
    were done, in order; beyond them that of the nearest."""
    logs = [math.log(s) for s, _ in ends]
    return float(np.interp(math.log(seconds), logs, [loss for _, loss in ends]))


def verdict(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """How losses of one run per seed compare."""
    if max(ours) < min(theirs):
        return "better"
    return "worse" if min(ours) > max(theirs) else "no difference seen"


def remarks(rows: Sequence[Row]) -> list[str]:
    """Where sampling pays and where not, and what else has to be said."""
    found = []
    for row in rows:
        if row.lr in (min(LRS), max(LRS)):
            found.append(f"{name_of(row.config)}: the best learning rate, {row.lr:g}, is the last.")
    by_verdict: dict[str, list[str]] = {"better": [], "worse": [], "no difference seen": []}
    for row in rows:
        if row.config != EXACT:
            by_verdict[verdict(row.losses, row.timely_losses)].append(name_of(row.config))
    for what, names in by_verdict.items():
        found.append(f"At equal seconds, against exact: {what}: {', '.join(names) or 'none'}.")
    return found


def promises(rows: Sequence[Row], everything: Iterable[Learned]) -> list[Promise]:
    taken_s = sum(learned.taken_s for learned in everything) / NUM_PROCESSES
    guessing = math.log(VOCAB_SIZE)
    learned = tuple(
        (guessing - ours) / (guessing - exact)
        for row in rows
        for ours, exact in zip(row.losses, row.exact_losses, strict=True)
        if row.config != EXACT
    )
    return [
        Promise("time of all curves / 30 minutes", (taken_s / _ALLOWED_S,), "<=", 1.0),
        Promise("least that a sampled run learns / exact", (min(learned),), ">=", _LEAST_LEARNED),
    ]


def name_of(config: Config) -> str:
    rule, rate = config
    return rule if config == EXACT else f"{rule} 1/{round(1 / rate)}"
