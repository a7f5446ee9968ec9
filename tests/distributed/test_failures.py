"""How processes end together: by an error of all, of one, by a death, or where one hangs."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.launched import Ended, Launched
from helpers.load import slowed

from furlong.errors import DataError
from furlong.train.processes import Processes, joined, read_launch
from furlong.train.stop import QuietEnd


def work(what: Callable[[Processes], None]) -> None:
    try:
        with joined(read_launch(), limit=timedelta(seconds=slowed(3))) as processes:
            what(processes)
    except DataError as error:
        print(error, flush=True)
        raise SystemExit(2) from error


def is_done(processes: Processes) -> None:
    assert processes.sums([1.0, processes.launch.number]) == [2.0, 1.0]
    assert processes.any(not processes.is_first) and not processes.any(False)
    assert processes.from_first(lambda: {"a": [1]}) == {"a": [1]}
    assert processes.each(processes.launch.number) == [0, 1]
    order: list[int] = []
    processes.first_of_each_machine(lambda: order.append(time.monotonic_ns()))
    print(order[0], flush=True)


def raises_of_one(processes: Processes) -> None:
    def read() -> None:
        if not processes.is_first:
            error = DataError(given="no file", required="a file", source="here", change="add it")
            error.add_note("beside the four parts")
            raise error

    processes.together(read)


def raises_on_all(processes: Processes) -> None:
    raise DataError(given="no file", required="a file", source="here", change="add it").on_all()


def fails_on_one(processes: Processes) -> None:
    if not processes.is_first:
        raise ValueError("no such layer")
    dist.barrier()


def fails_on_the_first(processes: Processes) -> None:
    """It holds the store, where the others look for its word."""
    processes.any(False)  # all have joined
    if processes.is_first:
        raise ValueError("no such layer")
    dist.barrier()


def fails_as_a_user_may_mend(processes: Processes) -> None:
    if not processes.is_first:
        raise DataError(given="no room", required="room", source="here", change="make room")
    dist.barrier()


def dies(processes: Processes) -> None:
    processes.any(False)  # all have joined
    if processes.launch.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def dies_while_others_agree(processes: Processes) -> None:
    processes.any(False)  # all have joined
    if processes.launch.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    processes.together(lambda: None)


def the_first_dies(processes: Processes) -> None:
    processes.any(False)  # all have joined
    if processes.is_first:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def hangs(processes: Processes) -> None:
    processes.any(False)  # all have joined
    if processes.launch.number == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))


def the_first_dies_before_all_have_joined() -> None:
    launch = read_launch()
    if launch.is_first:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        dist.TCPStore(address, port, 2, is_master=True)  # until the other one has come
        os.kill(os.getpid(), signal.SIGKILL)
    work(is_done)


def is_ended_by_a_signal(processes: Processes) -> None:
    """One works and the other waits in C, where no handler of Python's runs."""
    with QuietEnd():
        print("begun", flush=True)
        processes.together(lambda: time.sleep(60) if processes.is_first else None)


def works_long(processes: Processes) -> None:
    """One process tokenizes, plans or hashes, the other waits."""
    processes.together(lambda: time.sleep(slowed(5)) if processes.is_first else None)


ENDS = "process {} ends, for another process has ended.*--resume"
CASES = {
    # what happens: exit codes, and what each process says
    is_done: ([0, 0], [r"\d+"] * 2),
    raises_of_one: (
        [2, 2],
        ["^given:    process 1: no file\nrequired: a file", "^given:    no file\nrequired: a file"],
    ),
    raises_on_all: ([2, 2], [r"^given:    no file.*change:   add it\s*\Z"] * 2),
    fails_on_one: (
        [1, 1], ["process 1 ended by ValueError: no such layer", "Traceback.*no such layer"],
    ),
    fails_on_the_first: ([1, 1], ["Traceback.*no such layer", "process 0 .*--resume"]),
    fails_as_a_user_may_mend: (
        [1, 2], ["process 1 ended by DataError: no room", "^given:    no room\nrequired: room"],
    ),
    dies: ([1, -9, 1], [ENDS.format(0), "", ENDS.format(2)]),
    dies_while_others_agree: ([1, -9, 1], [ENDS.format(0), "", ENDS.format(2)]),
    # it holds the store: the others cannot even ask
    the_first_dies: ([-9, 1], ["", ENDS.format(1)]),
}  # fmt: skip


def run(folder: Path, what: Callable[[Processes], None], num_processes: int = 2) -> Launched:
    return Launched(folder / what.__name__, work, what, num_processes=num_processes)


def test_all_processes_end_and_tell_what_ended_them(tmp_path: Path) -> None:
    """Mostly they wait: some cases run beside each other."""
    found: dict[Callable[[Processes], None], list[Ended]] = {}
    for beside in (list(CASES)[:5], list(CASES)[5:]):
        started = [run(tmp_path, what, len(CASES[what][0])) for what in beside]
        found |= {what: one.ended(20) for what, one in zip(beside, started, strict=True)}
    for what, (codes, told) in CASES.items():
        assert [process.code for process in found[what]] == codes, found[what]
        for process, text in zip(found[what], told, strict=True):
            assert re.search(text, process.said, re.DOTALL), (what, process.said)
            assert "Traceback" in text or "Traceback" not in process.said, what
    first, second = (int(process.said) for process in found[is_done])
    assert first < second


def test_a_death_before_all_have_joined_is_told_in_a_line(tmp_path: Path) -> None:
    ended = Launched(tmp_path, the_first_dies_before_all_have_joined).ended(20)
    assert [process.code for process in ended] == [-9, 1], ended
    assert ended[1].said.splitlines()[-1].startswith("process 1 ends before the start")
    assert "Traceback" not in ended[1].said


def test_one_that_hangs_ends_the_others_after_the_limit(tmp_path: Path) -> None:
    launched = run(tmp_path, hangs, num_processes=3)
    launched.processes[0].join(slowed(20))
    launched.processes[2].join(slowed(20))
    ended = launched.ended(1)
    assert [process.code for process in ended] == [1, None, 1], ended
    assert "does not answer" in ended[0].said and "--resume" in ended[0].said


def test_a_signal_while_one_works_and_others_wait(tmp_path: Path) -> None:
    launched = run(tmp_path, is_ended_by_a_signal)
    while not all("begun" in launched.said(number) for number in range(2)):
        time.sleep(0.01)
    for process in launched.processes:
        os.kill(process.pid or 0, signal.SIGTERM)
    ended = launched.ended(20)
    assert None not in [process.code for process in ended], ended


@pytest.mark.slow
def test_long_work_of_one_is_waited_for(tmp_path: Path) -> None:
    ended = run(tmp_path, works_long).ended(30)
    assert [process.code for process in ended] == [0, 0], ended
