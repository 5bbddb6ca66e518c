"""Pools of ranks that all tests share.

They are here and not in conftest.py, which pytest and the tests that import from it would load as two modules.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.engine_pools import Launched, available
from tests.support.pool import Ranks

MOST = 5
"""Pools of engines' ranks that stay up, as many as `make test` uses; each takes some hundred megabytes."""
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


def on_ranks(
    *sizes: int, engine: str | tuple[str, ...] = "gloo", framework: str = "torch"
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run a test's body on every rank: what it returns, if anything, must be the same on all of them.

    A test that has a parameter ``engine`` or ``size`` says by that whose ranks they are, and how many. It gets the
    mark ``ranks``.

    Args:
        sizes: how many ranks there are (2); with several the test is run once for each.
        engine: what moves bytes; with several the test is run once for each.
        framework: whose tensors the ranks of an engine exchange.
    """
    engines = (engine,) if isinstance(engine, str) else engine

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        parameters = inspect.signature(body).parameters

        @functools.wraps(body)
        def test(**given: Any) -> None:
            size = given.get("size", sizes[0] if sizes else 2)
            own = {name: value for name, value in given.items() if name in parameters}
            pool = launched(given.get("engine", engines[0]), size, framework)
            answers = pool.run(_on_this_rank, body.__module__, body.__name__, own)
            assert answers == answers[:1] * size

        test.body = body  # type: ignore[attr-defined]
        several = {name: values for name, values in (("size", sizes), ("engine", engines)) if len(values) > 1}
        added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in several if name not in parameters]
        test.__signature__ = inspect.Signature([*parameters.values(), *added])  # type: ignore[attr-defined]
        for name, values in several.items():
            ids = [f"{value}ranks" if name == "size" else value for value in values]
            test = pytest.mark.parametrize(name, values, ids=ids)(test)
        return pytest.mark.ranks(test)

    return decorate


def _on_this_rank(module: str, name: str, given: dict[str, Any]) -> Any:
    """Call the body of a test of that name."""
    return getattr(importlib.import_module(module), name).body(**given)


def stop_engines() -> None:
    """Stop the ranks of engines; those that are used again start anew."""
    for pool in _launched.values():
        pool.stop()


def stop_all() -> None:
    """Stop all ranks."""
    stop_engines()
    for pool in _pools.values():
        pool.stop()
