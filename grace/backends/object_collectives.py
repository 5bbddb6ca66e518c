"""Calls that all ranks make together outside of exchanges: objects, barriers, and the comparison of calls."""

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import Any, TypeVar

from grace.backends.runtime import current
from grace.core.backend import Backend
from grace.errors import ConfigError, RankError

T = TypeVar("T")


def chosen_root(root: int, root_rank: int | None, size: int) -> int:
    """Return the rank that ``root`` or, as Horovod spells it, ``root_rank`` names.

    Raises:
        ConfigError: there is no such rank.

    >>> chosen_root(0, None, 2), chosen_root(0, 1, 2)
    (0, 1)
    >>> chosen_root(0, 2, 2)
    Traceback (most recent call last):
    grace.errors.ConfigError: root_rank=2: the ranks are 0 to 1
    """
    name, number = ("root", root) if root_rank is None else ("root_rank", root_rank)
    if root_rank is not None and root not in (0, root_rank):
        raise ConfigError(f"root={root!r} and root_rank={root_rank!r} are two names of one argument: give one of them")
    rank = int(number) if isinstance(number, Integral) and not isinstance(number, bool) else -1
    if not 0 <= rank < size:
        raise ConfigError(f"{name}={number!r}: the ranks are 0 to {size - 1}")
    return rank


def engine_for(framework: str) -> Backend:
    """Return the engine of this run; raise ConfigError if it does not move a framework's tensors."""
    backend = current()
    if backend.framework not in ("", framework):
        raise ConfigError(
            f"{backend.describe()} moves tensors of {backend.framework} here, and this is one of {framework}: call "
            f"grace.init(framework={framework!r}) under horovodrun or mpirun"
        )
    return backend


@contextlib.contextmanager
def compared(backend: Backend, kind: str, describe: Callable[[], str], detailed: bool = False) -> Iterator[None]:
    """Return a context in which all ranks make the same call; the ranks compare their calls before they enter it.

    Args:
        kind: the kind of call.
        describe: returns a description that must be the same on all ranks; or raises ConfigError, and then no rank
            enters.
        detailed: True if messages repeat the description beside the name of the function that the program called.

    Raises:
        ConfigError: this rank's arguments cannot work.
        RankError: other ranks make another call, or their arguments cannot work.
    """
    try:
        detail = describe()
    except ConfigError as refused:
        # the other ranks compare: they must hear of the refusal instead of waiting for this rank
        kind = f"{kind} that was refused: {refused}"
        with contextlib.suppress(RankError), backend.checked_operation(kind, "which it refused"):
            pass
        raise
    with backend.checked_operation(f"{kind} {detail}", detail if detailed else ""):
        yield


def from_root(make: Callable[[], T], root: int = 0) -> T:
    """Give every rank the result of ``make()`` on the root: to read a file that only one rank should. Every rank must
    call it.

    Args:
        make: called on the root alone; its result is pickled for the others.
        root: the rank.

    Raises:
        ConfigError: ``root`` is no rank.
        RankError: ``make`` failed on the root, where the error itself is raised; or other ranks call something else.

    >>> import grace
    >>> _ = grace.init("local")
    >>> from_root(lambda: {"step": 3})
    {'step': 3}
    >>> grace.shutdown()
    """
    backend = current()
    made = None
    error = None
    if backend.rank == root:
        try:
            made = make()
        except Exception as raised:
            error = raised
    values = _gather_values(
        backend, "from_root", lambda: f"from rank {chosen_root(root, None, backend.size)}", made, [root], error
    )
    return made if backend.rank == root else values[root]  # type: ignore[return-value]


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """Give every rank the root's object, as ``hvd.broadcast_object`` does. Every rank must call it.

    Args:
        obj: anything that pickle takes; objects of other ranks than the root are not used.
        root_rank: the rank whose object counts.
        name: for messages.

    Returns:
        The object itself on the root, and a copy of it on the other ranks.

    Raises:
        ConfigError: ``root_rank`` is no rank.
        RankError: pickle does not take the object, or other ranks call something else.

    >>> import grace
    >>> _ = grace.init("local")
    >>> broadcast_object({"epoch": 3}, root_rank=0)
    {'epoch': 3}
    >>> grace.shutdown()
    """
    backend = current()
    values = _gather_values(
        backend,
        "broadcast_object",
        lambda: f"from rank {chosen_root(0, root_rank, backend.size)}{named(name)}",
        obj if backend.rank == root_rank else None,
        [root_rank],
    )
    return obj if backend.rank == root_rank else values[root_rank]


def allgather_object(obj: T, name: str | None = None) -> list[T]:
    """Give every rank all ranks' objects, as ``hvd.allgather_object`` does. Every rank must call it.

    Args:
        obj: anything that pickle takes.
        name: for messages.

    Returns:
        A list of all objects, in the order of ranks.

    Raises:
        RankError: pickle does not take a rank's object, or other ranks call something else.

    >>> import grace
    >>> _ = grace.init("local")
    >>> allgather_object({"examples": 50})
    [{'examples': 50}]
    >>> grace.shutdown()
    """
    backend = current()
    values = _gather_values(backend, "allgather_object", lambda: named(name), obj, range(backend.size))
    return [obj if rank == backend.rank else values[rank] for rank in range(backend.size)]


def barrier() -> None:
    """Wait until every rank has called it, as ``hvd.barrier`` does.

    Raises:
        ExchangeError: another rank has ended, or did not come in time.
        RankError: other ranks call something else.

    >>> import grace
    >>> _ = grace.init("local")
    >>> barrier()
    >>> grace.shutdown()
    """
    backend = current()
    with compared(backend, "barrier", str):
        backend.allgather_object(None)


def named(name: str | None) -> str:
    """Return a name as part of a description.

    >>> named("loss"), named(None)
    (" named 'loss'", '')
    """
    return "" if name is None else f" named {name!r}"


def _gather_values(
    backend: Backend,
    kind: str,
    describe: Callable[[], str],
    value: T | None,
    roots: Sequence[int],
    error: Exception | None = None,
) -> dict[int, T]:
    """Return the values of some ranks, without this one's, by rank.

    Args:
        kind, describe: for :func:`compared`.
        value: this rank's value.
        roots: the ranks whose values count.
        error: the reason why this rank has no value; else None.

    Raises:
        RankError: one of these ranks has no value; on that rank the error itself.
    """
    packed = b""
    if error is None and backend.rank in roots and backend.size > 1:
        try:
            packed = pickle.dumps(value)
        except Exception as raised:
            error = raised
    failure = None if error is None else f"{type(error).__name__}: {error}"
    with compared(backend, kind, describe):
        values = backend.allgather_object((packed, failure))
    if error is not None:
        raise error
    for rank in roots:
        if values[rank][1] is not None:
            raise RankError(f"rank {rank} failed: {values[rank][1]}")
    # not this rank's: the caller gives back the object itself, no copy
    return {rank: pickle.loads(values[rank][0]) for rank in roots if rank != backend.rank}
