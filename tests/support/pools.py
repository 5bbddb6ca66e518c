"""Pools of ranks that all tests share.

They are here and not in conftest.py, which pytest and the tests that import from it would load as two modules.
"""

import pytest

from tests.support.engine_pools import Launched, available
from tests.support.pool import Ranks

MOST = 3
"""Pools of engines' ranks that stay up; each takes gigabytes."""
_pools: dict[int, Ranks] = {}
_launched: dict[tuple[str, int, str], Launched] = {}


def ranks_of(size: int) -> Ranks:
    """So many real gloo ranks."""
    pool = _pools.setdefault(size, Ranks(size))
    if pool.crowded():
        pool.stop()
    return pool


def launched(engine: str, size: int, framework: str = "torch") -> Ranks:
    """The pool of an engine's ranks; "gloo" is torch.distributed's.

    To start one takes many seconds, so those that were used last stay up, unless they are of another framework.
    """
    if engine == "gloo":
        return ranks_of(size)
    if not available(engine):
        pytest.skip(f"{engine}: its packages are not installed (make horovod)")
    mine = engine, size, framework
    pool = _launched[mine] = _launched.pop(mine, None) or Launched(*mine)  # the last one is the one used last
    others = list(_launched.values())[:-1]
    for place, other in enumerate(others):
        if other.framework != framework or place < len(others) - (MOST - 1):
            other.stop()
    return pool


def stop_engines() -> None:
    """Stop the ranks of engines; those that are used again start anew."""
    for pool in _launched.values():
        pool.stop()


def stop_all() -> None:
    """Stop all ranks."""
    stop_engines()
    for pool in _pools.values():
        pool.stop()
