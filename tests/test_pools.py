"""Pools of ranks (pool.py, engines.py) tell of ranks that fail or hang, and go on with new ones."""

import signal
import time

import pytest

import grace
from tests.support import engine_pools as engines
from tests.support.drawing import THOROUGH
from tests.support.engine_pools import ENGINES, Launched
from tests.support.pool import RankFailure
from tests.support.pools import launched

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.parametrize("engine", ["gloo", *(ENGINES if THOROUGH else ("mpirun-mpi",))]),
]


def forgets_handlers():
    """Put back the handlers that Python knows of, as Lightning's Trainer does."""
    signal.signal(signal.SIGUSR1, signal.getsignal(signal.SIGUSR1))


def stands_still_here(rank):
    if grace.rank() == rank:
        time.sleep(100)


def fails(rank):
    if grace.rank() == rank:
        raise ValueError("a mistake")
    return grace.size()


def test_where_a_rank_hangs_is_said(engine):
    pool = launched(engine, 2)
    pool.run(forgets_handlers)
    with pytest.raises(RankFailure, match=r"no answer within 1 s(.|\n)*in stands_still_here"):
        pool.run(stands_still_here, 1, timeout=1)
    assert pool.run(fails, 2) == [2, 2]


def test_what_a_rank_failed_of_is_said(engine):
    pool = launched(engine, 2)
    with pytest.raises(RankFailure, match=r"rank 1 of 2(.|\n)*ValueError: a mistake"):
        pool.run(fails, 1)
    assert pool.run(fails, 2) == [2, 2]


def test_ranks_that_do_not_start_are_an_error_with_their_command(engine, monkeypatch):
    if engine == "gloo" or not engines.available(engine):
        pytest.skip("no launcher starts them")
    monkeypatch.setattr(engines, "HANGS", 0)
    with pytest.raises(RankFailure, match=r"-np 2 (.|\n)* did not start: nobody has come"):
        Launched(engine, 2).run(time.monotonic)
