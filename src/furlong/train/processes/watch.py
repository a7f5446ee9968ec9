"""Heartbeats: every process tells the others that it lives and where it is, and one of them looks.

Each second a thread of its own writes this process's beat into the store of the launcher, through
a connection of its own. The first process reads all beats and the others read its verdict, so that
the work grows with the number of processes only. A second thread does no input or output: where a
cable is cut the first one waits in the network, and never finds out.

Time is counted in rounds of the threads: a machine that was asleep, or a process that was stopped
and goes on, does not take its own pause for the silence of others.

Processes that beat may wait for each other for ever. All are ended when none has gone on for long:
a new position is progress, and so is work, of the processor or on files, but not where a process
that waits for another one spins on its processor, as it does for a GPU.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Protocol

from furlong.train.processes.flight import Flight

STEP, EVALUATION, REFERENCE = "step", "evaluation", "the reference"
"""How a position within a plan begins."""
PLAN = " plan"
"""How a position ends in which a plan is made, or waited for."""
_SEPARATOR = "\n"
_LEAST_WORK = 0.02
"""Share of a processor that counts as work: threads that only look use less."""
_BYTES_PER_S = 2**20
"""Bytes of files that count as one second of work."""


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
    stuck_rounds: int = 60
    """Rounds without progress of any process within a step after which all count as stuck, beside
    ten times the longest action so far."""
    idle_rounds: int = 300
    """The same outside of steps, and until the first one is over: a disk may take its time to write
    what it was given, a first action to load and compile its kernels."""


@dataclass(frozen=True, slots=True)
class _Beat:
    """The position of a process, as it tells the others."""

    number: int
    """Its beats so far."""
    count: int
    """Its positions so far."""
    text: str
    """The last one."""
    work_s: float
    """See `_work_s`."""
    place: str
    """Where its main thread is in the code."""

    @classmethod
    def of(cls, line: bytes) -> _Beat:
        number, count, text, work_s, place = line.decode().split(_SEPARATOR)
        return cls(int(number), int(count), text, float(work_s), place)

    def line(self) -> str:
        return _SEPARATOR.join(str(getattr(self, name)) for name in self.__slots__)

    @property
    def is_action(self) -> bool:
        """True within a plan, where waiting for others may look like work."""
        of_plan = self.text.startswith((STEP, EVALUATION, REFERENCE))
        return of_plan and not self.text.endswith(PLAN)


@dataclass(slots=True)
class _Seen:
    """The last beats of another process."""

    last: _Beat
    before: _Beat
    """That of its last progress."""
    first_step: str = ""
    silent_rounds: int = 0
    still_rounds: int = 0
    longest_rounds: int = 0
    """Those of its longest action."""
    has_stepped: bool = False

    def look(self, beat: _Beat, work_s: float) -> None:
        """Take note of the beat of a round; so much work since the last progress is progress."""
        self.silent_rounds = 0 if beat.number != self.last.number else self.silent_rounds + 1
        self.last = beat
        if beat.count == self.before.count and beat.work_s - self.before.work_s < work_s:
            self.still_rounds += 1
            return
        if self.before.is_action:
            self.longest_rounds = max(self.longest_rounds, self.still_rounds)
        if beat.text.startswith(STEP):
            step = " ".join(beat.text.split()[:2])
            self.first_step = self.first_step or step
            self.has_stepped |= step != self.first_step
        self.before, self.still_rounds = beat, 0


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
    spins: bool = False
    """Whether a process that waits for another one within a plan keeps its processor busy."""
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
        return self.flight.of(number) or self._told(number).text

    def _told(self, number: int) -> _Beat:
        return _Beat.of(self.board.get(f"beat/{number}"))

    def _beat(self) -> None:
        self._rounds += 1
        own = _Beat(self._rounds, self.flight.count, self.flight.text, _work_s(), _place())
        self.board.set(f"beat/{self.number}", own.line())

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

    def _read(self, number: int) -> None:
        beat = self._told(number)
        seen = self._seen.setdefault(number, _Seen(beat, beat))
        does_tell = not (self.spins and seen.before.is_action)
        limit_s = self._limit_of(seen) * self.limits.round_s
        seen.look(beat, _LEAST_WORK * limit_s if does_tell else inf)

    def _limit_of(self, seen: _Seen) -> int:
        """The rounds after which a process counts as stuck."""
        if not (seen.before.is_action and seen.has_stepped):
            return self.limits.idle_rounds
        longest = max(other.longest_rounds for other in self._seen.values())
        return self.limits.stuck_rounds + 10 * longest

    def _judge(self) -> str | None:
        """The verdict that this round leads to."""
        silent = [n for n, s in self._seen.items() if s.silent_rounds >= self.limits.silent_rounds]
        if silent:
            seconds = self.limits.silent_rounds * self.limits.round_s
            said = "; ".join(f"its last action was {self._where(n)}" for n in silent)
            names = ", ".join(f"process {number}" for number in silent)
            why = "it is stopped or swapped out, or one call in C keeps all its threads waiting"
            return self.accuse(f"{names}: silent for {seconds:.0f} s ({why}); {said}")
        if self.number or any(s.still_rounds < self._limit_of(s) for s in self._seen.values()):
            return None
        where = "; ".join(
            f"process {n} at {self._where(n)}, in {seen.last.place}"
            for n, seen in self._seen.items()
        )
        seconds = min(s.still_rounds for s in self._seen.values()) * self.limits.round_s
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


def _work_s() -> float:
    """Seconds of the processor that this process has used, but for the calling thread, and one for
    every `_BYTES_PER_S` that it has read from disks or written to them."""
    used_s = time.process_time() - time.thread_time()
    with suppress(OSError, ValueError):  # Linux alone tells the bytes
        for line in Path("/proc/self/io").read_text().splitlines():
            name, _, value = line.partition(": ")
            if name in ("read_bytes", "write_bytes"):
                used_s += int(value) / _BYTES_PER_S
    return used_s


def _place() -> str:
    """The innermost function of the main thread, with its file and line."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "no code"
    code = frame.f_code
    return f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
