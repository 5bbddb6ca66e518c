"""Fixtures: pools of real gloo ranks, shared by all tests."""

import atexit
import functools
import gc
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; what tests start must hear of it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes would compile Grace again
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two took up to three times as much of the CPUs, for waiting
sys.path.insert(0, str(Path(__file__).parents[1]))  # so that ranks find tests.* by their names

from tests.support import warm

if "PYTEST_XDIST_WORKER" not in os.environ:  # workers have their controller's
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # tests' own folders, which pytest keeps
    # what is killed leaves its temporary files behind, launchers and frameworks do so in any case
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="grace-t-")  # short: names of sockets are
    atexit.register(warm.remove, os.getpid(), tempfile.tempdir)
warm.install()  # before others read sys.executable
sys.dont_write_bytecode = False  # or pytest would rewrite all tests' assertions each time

from tests.support import drawing  # noqa: E402
from tests.support.engine_pools import DRAWN, STARTED  # noqa: E402
from tests.support.pool import Ranks  # noqa: E402
from tests.support.pools import ranks_of, stop_all, stop_engines  # noqa: E402

settings.register_profile("all", deadline=None, derandomize=True, max_examples=20)
settings.register_profile("fuzz", deadline=None, max_examples=400, print_blob=True)
settings.register_profile("quick", settings.get_profile("all"), max_examples=8)


def pytest_configure(config):
    """Fewer examples for ``@given`` in `make check`, which leaves out the slow tests."""
    usual = "quick" if "not slow" in config.option.markexpr else "all"
    settings.load_profile("fuzz" if os.environ.get("GRACE_FUZZ") else usual)  # see fuzzing.py
    if config.option.markexpr == "alone":  # benchmarks in torch
        warm.BEFOREHAND = warm.BEFOREHAND[: warm.BEFOREHAND.index("tensorflow")]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Look for no garbage meanwhile: what is imported stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session):
    """All that tests import is there."""
    warm.collect_seldom()


def pytest_itemcollected(item):
    """Mark tests that start ranks by a fixture, which a test's own values of that name do not."""
    own = [mark.args[0] for mark in item.iter_markers("parametrize") if "indirect" not in mark.kwargs]
    started = {"ranks", "two_ranks", "three_ranks", "horovod", "mpi"} & set(item.fixturenames)
    if any(not any(name in names for names in own) for name in started):
        item.add_marker(pytest.mark.ranks)


@functools.cache
def _room(file: str) -> str:
    """Files that share pools of engines' ranks are run by one worker, one framework after the other."""
    path = Path(__file__).parents[1] / file
    if path.parent.name == "in_tensorflow":  # whose fixtures start them
        return "ranks of TensorFlow"
    shared = re.search(r"launched\(|on_ranks\(.*engine=|on_ranks\(.*\)\ndef .*\bengine\b", path.read_text())
    return "ranks of engines" if shared and path.parent.name != "tests" else file


def pytest_collection_modifyitems(config, items):
    """Leave out cases that `make test` does not draw; begin with tests that share engines' ranks, which take
    longest."""
    if not drawing.THOROUGH and not all("::" in arg for arg in config.args):  # of what is named all cases are run
        left = set(drawing.left_out(items))
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    rooms = {file: _room(file) for file in {item.nodeid.partition("::")[0] for item in items}}
    items.sort(key=lambda item: not rooms[item.nodeid.partition("::")[0]].startswith("ranks of"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Return a scheduler that works as ``--dist loadfile`` does, but by room."""
    from xdist.scheduler import LoadFileScheduling

    class LoadRoomScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return _room(nodeid.partition("::")[0])

    config.option.loadscopereorder = False  # which would begin with the rooms of the most tests
    return LoadRoomScheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config, specs):
    """Workers are no forks themselves, and most of them start some."""
    for spec in specs:
        spec.python = warm.REAL
    if "not ranks" not in config.option.markexpr:
        warm.start()


def pytest_runtest_teardown(item, nextitem):
    """Engines' ranks are stopped before tests that do not share them, which want the memory."""
    if nextitem is not None and not _room(nextitem.nodeid.partition("::")[0]).startswith("ranks of"):
        stop_engines()


@pytest.fixture
def local():
    """One process, which exchanges with nobody."""
    import grace

    grace.shutdown()
    grace.init("local")
    yield
    grace.shutdown()


@pytest.fixture(params=[2, 3], ids=["2ranks", "3ranks"])
def ranks(request) -> Ranks:
    """2 and 3 real gloo ranks."""
    return ranks_of(request.param)


@pytest.fixture
def two_ranks() -> Ranks:
    """2 real gloo ranks."""
    return ranks_of(2)


@pytest.fixture
def three_ranks() -> Ranks:
    """3 real gloo ranks."""
    return ranks_of(3)


@pytest.fixture(params=DRAWN, scope="module")
def engine(request) -> str:
    """Every engine but torch.distributed's, by a launcher."""
    return request.param


@pytest.fixture(params=[name for name in STARTED if "mpirun-mpi" not in name], scope="module")
def horovod_engine(request) -> str:
    """Every launcher of Horovod."""
    return request.param


def pytest_sessionfinish(session, exitstatus):
    stop_all()
