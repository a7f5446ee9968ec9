"""How processes end together: by an error of all, of one, by a death, or where one hangs."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.launched import Launched
from helpers.load import slowed

from furlong.errors import DataError
from furlong.train.processes import Processes, joined, read_launch
from furlong.train.stop import QuietEnd


def work(what: str) -> None:
    try:
        with joined(read_launch(), limit=timedelta(seconds=slowed(3))) as processes:
            CASES[what](processes)
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


def fails_on_one(processes: Processes) -> None:
    if not processes.is_first:
        raise ValueError("no such layer")
    dist.barrier()


def fails_on_the_first(processes: Processes) -> None:
    """It holds the store, where the others look for its word."""
    if processes.is_first:
        raise ValueError("no such layer")
    dist.barrier()


def fails_as_a_user_may_mend(processes: Processes) -> None:
    if not processes.is_first:
        raise DataError(given="no room", required="room", source="here", change="make room")
    dist.barrier()


def dies(processes: Processes) -> None:
    if processes.launch.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def dies_while_others_agree(processes: Processes) -> None:
    if processes.launch.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    processes.together(lambda: None)


def the_first_dies(processes: Processes) -> None:
    if processes.is_first:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def hangs(processes: Processes) -> None:
    if processes.launch.number == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))


def is_ended_by_a_signal(processes: Processes) -> None:
    """One works and the other waits in C, where no handler of Python's runs."""
    with QuietEnd():
        print("begun", flush=True)
        processes.together(lambda: time.sleep(60) if processes.is_first else None)


def works_long(processes: Processes) -> None:
    """One process tokenizes, plans or hashes, the other waits."""
    processes.together(lambda: time.sleep(slowed(5)) if processes.is_first else None)


CASES = {
    function.__name__: function
    for function in (
        is_done, raises_of_one, fails_on_one, fails_on_the_first, fails_as_a_user_may_mend, dies,
        dies_while_others_agree, the_first_dies, hangs, is_ended_by_a_signal, works_long,
    )
}  # fmt: skip


def run(folder: Path, what: str, num_processes: int = 2) -> Launched:
    return Launched(folder, work, what, num_processes=num_processes)


def test_they_agree_and_leave(tmp_path: Path) -> None:
    ended = run(tmp_path, "is_done").ended()
    assert [process.code for process in ended] == [0, 0], ended
    assert int(ended[0].said) < int(ended[1].said)


def test_an_error_of_one_is_that_of_all(tmp_path: Path) -> None:
    ended = run(tmp_path, "raises_of_one").ended()
    assert [process.code for process in ended] == [2, 2], ended
    assert ended[0].said.startswith("given:    process 1: no file\nrequired: a file")
    assert ended[1].said.startswith("given:    no file\nrequired: a file")


def test_a_failure_of_one_ends_the_others_with_its_text(tmp_path: Path) -> None:
    ended = run(tmp_path, "fails_on_one").ended(20)
    assert [process.code for process in ended] == [1, 1], ended
    assert "process 1 ended by ValueError: no such layer" in ended[0].said
    assert "Traceback" in ended[1].said and "no such layer" in ended[1].said


def test_a_failure_of_the_first(tmp_path: Path) -> None:
    ended = run(tmp_path, "fails_on_the_first").ended(20)
    assert [process.code for process in ended] == [1, 1], ended
    assert "Traceback" in ended[0].said and "no such layer" in ended[0].said
    assert "process 0 " in ended[1].said and "--resume" in ended[1].said


def test_what_one_alone_finds_wrong(tmp_path: Path) -> None:
    ended = run(tmp_path, "fails_as_a_user_may_mend").ended(20)
    assert [process.code for process in ended] == [1, 2], ended
    assert ended[1].said.startswith("given:    no room\nrequired: room")
    assert "Traceback" not in ended[1].said
    assert "process 1 ended by DataError: no room" in ended[0].said


@pytest.mark.parametrize("what", ["dies", "dies_while_others_agree"])
def test_a_death_ends_the_others(tmp_path: Path, what: str) -> None:
    ended = run(tmp_path, what, num_processes=3).ended(20)
    assert [process.code for process in ended] == [1, -signal.SIGKILL, 1], ended
    for number in (0, 2):
        assert f"process {number} ends, for another process has ended" in ended[number].said
        assert "--resume" in ended[number].said and "Traceback" not in ended[number].said


def test_the_death_of_the_first(tmp_path: Path) -> None:
    """It holds the store: the others cannot even ask."""
    ended = run(tmp_path, "the_first_dies").ended(20)
    assert [process.code for process in ended] == [-signal.SIGKILL, 1], ended
    assert "process 1 ends, for another process has ended" in ended[1].said


def test_one_that_hangs_ends_the_others_after_the_limit(tmp_path: Path) -> None:
    launched = run(tmp_path, "hangs", num_processes=3)
    launched.processes[0].join(slowed(20))
    launched.processes[2].join(slowed(20))
    ended = launched.ended(1)
    assert [process.code for process in ended] == [1, None, 1], ended
    assert "does not answer" in ended[0].said and "--resume" in ended[0].said


def test_a_signal_while_one_works_and_others_wait(tmp_path: Path) -> None:
    launched = run(tmp_path, "is_ended_by_a_signal")
    while not all("begun" in launched.said(number) for number in range(2)):
        time.sleep(0.01)
    for process in launched.processes:
        os.kill(process.pid or 0, signal.SIGTERM)
    ended = launched.ended(20)
    assert None not in [process.code for process in ended], ended


@pytest.mark.slow
def test_long_work_of_one_is_waited_for(tmp_path: Path) -> None:
    ended = run(tmp_path, "works_long").ended(30)
    assert [process.code for process in ended] == [0, 0], ended
