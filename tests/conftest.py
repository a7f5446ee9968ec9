"""Shared by all tests: GPU tests skip without a device; no test uses a hub or the user's cache."""

import fcntl
import gc
import os
import pickle
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# a test that is slow because others compute beside it is not wrong
settings.register_profile("furlong", deadline=None)
settings.load_profile("furlong")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Modules and tests are no garbage: nobody looks through them, neither now nor in a test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_make_parametrize_id(val):
    """Name bytes by their number: a .gz holds the time, so workers would name its test apart."""
    return f"{len(val)}B" if isinstance(val, bytes) else None


@pytest.fixture(autouse=True, scope="session")
def _cache_of_the_tests(tmp_path_factory):
    """Tokenized data goes into a folder of the session, also in the processes that tests start."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    _keep_few_fast(items)
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


def _keep_few_fast(items):
    """Mark as slow what `few(n)` leaves out: n cases of the test, evenly spread, stay fast. With
    `few(n, m)` what leaves m out is nightly.
    """
    cases = defaultdict(list)
    for item in items:
        few = item.get_closest_marker("few")
        if few and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0], few.args].append(item)
    for (_, counts), own in cases.items():
        fast, *slow = [{len(own) * i // count for i in range(count)} for count in counts]
        for number, item in enumerate(own):
            if number not in fast:
                item.add_marker("nightly" if slow and number not in slow[0] else "slow")


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """`once(name, make)`: what `make` returns, made by one worker of a run for all of them, which
    worksteal may give tests of one module."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    made = {}

    def call(name, make):
        path = folder / f"{name}.pickle"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if name not in made and not path.exists():
                made[name] = make()
                path.write_bytes(pickle.dumps(made[name]))
        if name not in made:
            made[name] = pickle.loads(path.read_bytes())
        return made[name]

    return call


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """A run in chunks that cut two of its eight texts: half as many take half as long."""
    from helpers.tiny_runs import build_tiny_run

    return replace(build_tiny_run(tmp_path_factory.mktemp("tiny")), chunk_size=64)
