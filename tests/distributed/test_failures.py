"""How processes end together: by an error of all, of one, by a death, a stop, or a dead end."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.launched import Launched
from helpers.load import slowed

from furlong.errors import DataError
from furlong.train.processes import Limits, Processes, joined, read_launch
from furlong.train.stop import QuietEnd

QUICK = Limits(round_s=slowed(0.1), silent_rounds=15, stuck_rounds=15, idle_rounds=30)


def work(what: str) -> None:
    try:
        with joined(read_launch(), limits=QUICK) as processes:
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
    processes.at("step 3 F1.0 kv")
    if not processes.is_first:
        raise ValueError("no such layer")
    dist.barrier()


def fails_as_a_user_may_mend(processes: Processes) -> None:
    if not processes.is_first:
        raise DataError(given="no room", required="room", source="here", change="make room")
    dist.barrier()


def fails_outside(processes: Processes) -> None:
    """The others are not in a collective."""
    if not processes.is_first:
        raise ValueError("no such layer")
    time.sleep(60)


def begin(processes: Processes, position: str) -> None:
    """A new position, which the others have heard of."""
    processes.at(position)
    time.sleep(3 * QUICK.round_s)


def dies_at_a_collective(processes: Processes) -> None:
    begin(processes, f"step 3 F{processes.launch.number}.0 kv")
    if processes.launch.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def dies_outside(processes: Processes) -> None:
    begin(processes, f"step 3 F{processes.launch.number}.0 kv")
    if processes.launch.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def the_first_dies(processes: Processes) -> None:
    if processes.is_first:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def stops(processes: Processes) -> None:
    begin(processes, f"step 3 F{processes.launch.number}.0 kv")
    if processes.launch.number == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))


def sticks(processes: Processes) -> None:
    """Each waits for something else, in the second step."""
    processes.at("after step 3")
    begin(processes, f"step 4 B{processes.launch.number}.0")
    if processes.is_first:
        dist.all_reduce(torch.ones(1))
    time.sleep(60)


def is_ended_by_a_signal(processes: Processes) -> None:
    """One works and the other waits in C, where no handler of Python's runs."""
    with QuietEnd():
        print("begun", flush=True)
        processes.together(lambda: time.sleep(60) if processes.is_first else None)


def stands_still_in_a_checkpoint(processes: Processes) -> None:
    """The disk of one machine does not answer; the others wait for their verdict."""
    processes.at("a checkpoint")
    processes.together(lambda: None if processes.is_first else time.sleep(60))


def cannot_write_before_a_collective(processes: Processes) -> None:
    def write() -> None:
        if not processes.is_first:
            raise DataError(given="no room", required="room", source="here", change="make room")
        dist.barrier()

    processes.at("a checkpoint")
    processes.together(write)


def works_long_between_steps(processes: Processes) -> None:
    """One process tokenizes, plans or hashes, the other waits."""

    def work() -> None:
        until_s = time.monotonic() + 2 * QUICK.idle_rounds * QUICK.round_s
        while time.monotonic() < until_s:
            sum(range(1000))

    processes.at("step 3 plan")
    processes.together(work if processes.is_first else lambda: None)


CASES = {
    function.__name__: function
    for function in (
        is_done, raises_of_one, fails_on_one, fails_as_a_user_may_mend, fails_outside,
        dies_at_a_collective, dies_outside, the_first_dies, stops, sticks, is_ended_by_a_signal,
        stands_still_in_a_checkpoint, cannot_write_before_a_collective, works_long_between_steps,
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


@pytest.mark.parametrize("what", ["fails_on_one", "fails_outside"])
def test_a_failure_of_one_ends_the_others_with_its_text(tmp_path: Path, what: str) -> None:
    ended = run(tmp_path, what).ended(20)
    assert [process.code for process in ended] == [1, 1], ended
    assert "process 1 ended by ValueError: no such layer" in ended[0].said
    assert "Traceback" in ended[1].said and "no such layer" in ended[1].said


def test_what_one_alone_finds_wrong(tmp_path: Path) -> None:
    ended = run(tmp_path, "fails_as_a_user_may_mend").ended(20)
    assert [process.code for process in ended] == [1, 2], ended
    assert ended[1].said.startswith("given:    no room\nrequired: room")
    assert "Traceback" not in ended[1].said
    assert "process 1 ended by DataError: no room" in ended[0].said


@pytest.mark.parametrize("what", ["dies_at_a_collective", "dies_outside"])
def test_a_death_is_told_with_its_last_action(tmp_path: Path, what: str) -> None:
    ended = run(tmp_path, what, num_processes=3).ended(20)
    assert [process.code for process in ended] == [1, -signal.SIGKILL, 1], ended
    for number in (0, 2):
        assert "process 1" in ended[number].said
        assert "its last action was step 3 F1.0 kv" in ended[number].said
        assert f"it was at step 3 F{number}.0 kv" in ended[number].said
        assert "process 2 stopped" not in ended[number].said


def test_the_death_of_the_first(tmp_path: Path) -> None:
    """It holds the store: the others cannot even ask."""
    ended = run(tmp_path, "the_first_dies").ended(20)
    assert [process.code for process in ended] == [-signal.SIGKILL, 1], ended
    assert "process 1 ends; it was at its start" in ended[1].said


def test_a_stopped_process(tmp_path: Path) -> None:
    launched = run(tmp_path, "stops", num_processes=3)
    launched.processes[0].join(slowed(20))
    launched.processes[2].join(slowed(20))
    ended = launched.ended(1)
    assert [process.code for process in ended] == [1, None, 1], ended
    for number in (0, 2):
        told = r"process 1: silent for \d+ s \(.*\); its last action was step 3 F1.0 kv"
        assert re.search(told, ended[number].said)


def test_a_signal_while_one_works_and_others_wait(tmp_path: Path) -> None:
    launched = run(tmp_path, "is_ended_by_a_signal")
    while not all("begun" in launched.said(number) for number in range(2)):
        time.sleep(0.01)
    for process in launched.processes:
        os.kill(process.pid or 0, signal.SIGTERM)
    ended = launched.ended(20)
    assert None not in [process.code for process in ended], ended


def test_a_dead_end(tmp_path: Path) -> None:
    ended = run(tmp_path, "sticks").ended(20)
    assert [process.code for process in ended] == [1, 1], ended
    for process in ended:
        assert re.search(
            r"no process has gone on for \d+ s: process 0 at step 4 B0.0, in all_reduce \(distrib.*"
            r"process 1 at step 4 B1.0, in sticks \(test_failures.py:\d+\)", process.said
        )  # fmt: skip


def test_a_dead_end_outside_of_a_step(tmp_path: Path) -> None:
    ended = run(tmp_path, "stands_still_in_a_checkpoint").ended(20)
    assert [process.code for process in ended] == [1, 1], ended
    for process in ended:
        told = r"no process has gone on for \d+ s: process 0 at a checkpoint, in "
        assert re.search(told, process.said)
        assert "process 1 at a checkpoint, in <lambda> (test_failures.py" in process.said


def test_an_error_before_the_collectives_of_work_of_all(tmp_path: Path) -> None:
    ended = run(tmp_path, "cannot_write_before_a_collective").ended(20)
    assert [process.code for process in ended] == [1, 2], ended
    assert "process 1 ended by DataError: no room; it was at a checkpoint" in ended[0].said
    assert ended[1].said.startswith("given:    no room\nrequired: room")


@pytest.mark.slow
def test_long_work_is_no_dead_end(tmp_path: Path) -> None:
    ended = run(tmp_path, "works_long_between_steps").ended(30)
    assert [process.code for process in ended] == [0, 0], ended
