"""Heartbeats: every process tells the others that it lives and where it is, and one of them looks.

Each second a thread of its own writes this process's beat into the store of the launcher, through
a connection of its own. The first process reads all beats and the others read its verdict, so that
the work grows with the number of processes only. A second thread does no input or output: where a
cable is cut the first one waits in the network, and never finds out.

Time is counted in rounds of the threads: a machine that was asleep, or a process that was stopped
and goes on, does not take its own pause for the silence of others.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from furlong.train.processes.flight import Flight

STEP, EVALUATION = "step", "evaluation"
"""How a position within a plan begins: where all processes are, they can be stuck."""
_SEPARATOR = "\n"


class Board(Protocol):
    """A store that several processes share (torch.distributed.Store)."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """After which silence processes are given up."""

    round_s: float = 1.0
    """Seconds between two beats of a process."""
    silent_rounds: int = 20
    """Rounds without a beat after which a process counts as stopped."""
    stuck_rounds: int = 600
    """Rounds without progress of any process within a step after which all count as stuck; ten
    times the longest action so far if that is more."""


@dataclass(slots=True)
class _Seen:
    """The last beats of another process."""

    beat: bytes = b""
    silent_rounds: int = 0
    position: str = ""
    still_rounds: int = 0
    longest_rounds: int = 0

    def look(self, beat: bytes) -> None:
        """Take note of the beat of a round."""
        self.silent_rounds = 0 if beat != self.beat else self.silent_rounds + 1
        self.beat = beat
        position = _position_of(beat)
        if position == self.position:
            self.still_rounds += 1
        else:
            self.longest_rounds = max(self.longest_rounds, self.still_rounds)
            self.position, self.still_rounds = position, 0

    @property
    def text(self) -> str:
        return _text_of(self.position)


LIMITS = Limits()


def end_process(message: str) -> None:
    """Say why, and end at once: the main thread may wait for a process that is no more."""
    sys.stdout.flush()
    os.write(2, f"{message}\n".encode())
    os._exit(1)


@dataclass
class Heartbeat:
    """The two threads, from `start` to `stop`."""

    board: Board
    """A connection that nobody else uses."""
    number: int
    num_processes: int
    flight: Flight
    limits: Limits = LIMITS
    end: Callable[[str], None] = end_process
    """Told why this process has to leave."""
    _stopping: threading.Event = field(default_factory=threading.Event)
    _rounds: int = 0
    _threads: list[threading.Thread] = field(default_factory=list)
    _seen: dict[int, _Seen] = field(default_factory=dict)

    def start(self) -> None:
        """Begin to beat. All processes must have begun before one of them may be missed: call it
        between two barriers."""
        self._beat()
        for work in (self._keep_beating, self._watch_the_other_thread):
            thread = threading.Thread(target=work, daemon=True, name=work.__name__)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """End both threads: one inside the store at the interpreter's exit would abort."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(5 * self.limits.round_s)

    def accuse(self, verdict: str) -> str:
        """Tell all others why they have to leave; returns the first verdict that anyone gave."""
        return self.board.compare_set("verdict", "", verdict).decode()

    def linger(self) -> None:
        """Let the others read the verdict: without torchrun the first process holds the store."""
        if self.number == 0:
            time.sleep(2.5 * self.limits.round_s)

    def verdict(self) -> str | None:
        """The reason why all have to leave, if there is one."""
        return self.board.get("verdict").decode() if self.board.check(["verdict"]) else None

    def positions(self) -> dict[int, str]:
        """Where each process is, or was when it stopped."""
        return {number: self._where(number) for number in range(self.num_processes)}

    def silent_since(self, wait_s: float) -> list[int]:
        """The processes without a beat for so many seconds, which this call takes."""
        before = [self.board.get(f"beat/{number}") for number in range(self.num_processes)]
        time.sleep(wait_s)
        return [
            number
            for number in range(self.num_processes)
            if self.board.get(f"beat/{number}") == before[number]
        ]

    def _where(self, number: int) -> str:
        beat = self.board.get(f"beat/{number}")
        return self.flight.of(number) or _text_of(_position_of(beat))

    def _beat(self) -> None:
        self._rounds += 1
        line = _SEPARATOR.join((str(self._rounds), str(self.flight.count), self.flight.text))
        self.board.set(f"beat/{self.number}", line)

    def _keep_beating(self) -> None:
        looked_at = range(self.num_processes) if self.number == 0 else (0,)
        while not self._stopping.wait(self.limits.round_s):
            try:
                self._beat()
                for number in looked_at:
                    self._read(number)
                found = self.verdict() or self._judge()
            except RuntimeError as error:
                if not self._stopping.is_set():
                    self.end(f"{self._here()}: the launcher's store is gone ({_first_line(error)})")
                return
            if found and not self._stopping.is_set():
                self.linger()
                self.end(f"{found}\n{self._here()}")
                return

    def _read(self, number: int) -> _Seen:
        seen = self._seen.setdefault(number, _Seen())
        seen.look(self.board.get(f"beat/{number}"))
        return seen

    def _judge(self) -> str | None:
        """The verdict that this round leads to."""
        silent = [n for n, s in self._seen.items() if s.silent_rounds >= self.limits.silent_rounds]
        if silent:
            seconds = self.limits.silent_rounds * self.limits.round_s
            said = "; ".join(f"its last action was {self._where(n)}" for n in silent)
            names = ", ".join(f"process {number}" for number in silent)
            return self.accuse(f"{names}: silent for {seconds:.0f} s; {said}")
        texts = [seen.text for seen in self._seen.values()]
        if self.number or not all(text.startswith((STEP, EVALUATION)) for text in texts):
            return None
        still = min(seen.still_rounds for seen in self._seen.values())
        longest = max(seen.longest_rounds for seen in self._seen.values())
        if still < max(self.limits.stuck_rounds, 10 * longest):
            return None
        where = "; ".join(f"process {n} at {seen.text}" for n, seen in self._seen.items())
        seconds = still * self.limits.round_s
        return self.accuse(f"no process has gone on for {seconds:.0f} s: {where}")

    def _watch_the_other_thread(self) -> None:
        before, still_rounds = self._rounds, 0
        while not self._stopping.wait(self.limits.round_s):
            still_rounds = 0 if self._rounds != before else still_rounds + 1
            before = self._rounds
            if still_rounds > self.limits.silent_rounds:
                seconds = still_rounds * self.limits.round_s
                self.end(f"{self._here()}: no answer from the launcher's store for {seconds:.0f} s")
                return

    def _here(self) -> str:
        return f"process {self.number} ends; it was at {self.flight.text}"


def _position_of(beat: bytes) -> str:
    """A beat without its own number: the count of positions, and the text of the last one."""
    return beat.decode().partition(_SEPARATOR)[2]


def _text_of(position: str) -> str:
    return position.partition(_SEPARATOR)[2]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
