"""Fixtures: pools of real gloo ranks, shared by all tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that rank processes can import test modules by name

from pool import Ranks

_pools: dict[int, Ranks] = {}


def ranks_of(size: int) -> Ranks:
    """The pool of this size."""
    return _pools.setdefault(size, Ranks(size))


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


def pytest_sessionfinish(session, exitstatus):
    for pool in _pools.values():
        pool.stop()
