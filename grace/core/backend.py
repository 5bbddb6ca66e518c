"""The backend contract: the engine that moves bytes, and the channels that optimizers exchange over."""

import abc
import contextlib
import copy
import functools
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from grace.core import watch
from grace.core.waits import TIMEOUT, called_function, waiting
from grace.errors import ConfigError, ExchangeError, GraceError

Tensor = Any
B = TypeVar("B", bound="Backend")


class Handle:
    """A collective in flight. ``wait()`` blocks and returns the result.

    Args:
        wait: blocks until the collective is done.
        result: the tensor, or the list of tensors, that the collective fills; None with ``later``.
        works: the engine's own work objects, for callers that need futures.
        later: returns the result once the collective is done, for engines that cannot fill a tensor.

    >>> Handle(lambda: None, ["what arrived"]).wait()
    ['what arrived']
    """

    def __init__(
        self,
        wait: Callable[[], object],
        result: object = None,
        works: tuple[Any, ...] = (),
        later: Callable[[], object] | None = None,
    ):
        self._wait, self.works = wait, works
        self._filled, self._later = result, later

    def wait(self) -> Any:
        """Block until the collective is done; return its result."""
        self._wait()
        return self.result()

    def result(self) -> Any:
        """Return the result of a collective that is known to be done."""
        return self._filled if self._later is None else self._later()

    def map(self, function: Callable[[Any], object]) -> "Handle":
        """Return a handle whose result is ``function`` of this handle's result. It is called once, when the result is
        first asked for."""
        return Handle(self._wait, works=self.works, later=functools.cache(lambda: function(self.result())))

    @staticmethod
    def all(handles: "list[Handle]") -> "Handle":
        """Return one handle for several collectives; its result is the list of their results."""

        def wait() -> None:
            for handle in handles:
                handle.wait()

        works = tuple(work for handle in handles for work in handle.works)
        return Handle(wait, works=works, later=lambda: [handle.result() for handle in handles])


class Backend(abc.ABC):
    """Asynchronous collectives over the ranks of one run, and a count of the bytes sent.

    Every rank must start the same collectives in the same order, unless the engine pairs them by name
    (``pairs_by_name``): then ``label`` names the next collective. ``sent_bytes`` counts the bytes that
    left this rank: each collective adds the bytes that its algorithm sends from this rank for the
    given buffer (ring all-reduce: 2 (W-1)/W times the buffer; all-to-all: (W-1)/W times;
    all-gather: W-1 times; broadcast: W-1 times at the root; gather: once everywhere else).
    """

    name: str = ""
    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    """Number of this rank among the ranks of its node; None if neither launcher nor engine says it."""
    local_size: int | None = None
    """Number of ranks on this rank's node; None if neither launcher nor engine says it."""
    sent_bytes: int = 0
    pairs_by_name: ClassVar[bool] = False
    """True if the engine pairs collectives by label, so that ranks may start them in different orders."""
    label: str = ""
    """Name of the exchange that the next collectives belong to, the same on every rank; empty for other collectives,
    which every rank starts in the same order."""
    elastic: bool = False
    """True if ranks may join and leave; a new rank must not start a collective before all ranks synchronize."""
    failure: ClassVar[type[ExchangeError]] = ExchangeError
    """Class of the error that is raised when the engine fails."""
    framework: ClassVar[str] = ""
    """The only framework whose tensors the backend moves; empty if it moves any."""
    last_started: ClassVar[Any] = None
    """The bucket whose exchange last started a collective, over any backend of this process."""
    started: int = 0
    """Number of collectives that exchanges have started over this backend."""
    done: int = 0
    """Number of started collectives that are known to be done."""
    by_ring: ClassVar[bool] = False
    """True if sums of small tensors go around a ring of ranks, so that each waits for a message from rank to rank."""
    concatenates: ClassVar[bool] = False
    """True if the engine gathers tensors of unequal lengths itself."""
    timeout: float = TIMEOUT
    """Seconds that a rank waits for others; see :func:`grace.init`."""
    owns: bool = False
    """True if Grace has initialized the engine, and shuts it down with the backend."""
    watched: bool = False
    """True if the backend connects all ranks of the run, so that the watch may use it; see :mod:`grace.core.watch`."""
    members: Sequence[int] | None = None
    """Numbers of the backend's ranks in the whole run; None if they are equal."""

    def describe(self) -> str:
        """Return a description of the engine and this rank."""
        return f"{self.name}, rank {self.rank} of {self.size}"

    def count(self, nbytes: float) -> None:
        """Add to the count of bytes that left this rank."""
        self.sent_bytes += round(nbytes)

    @abc.abstractmethod
    def allreduce(self, tensor: Tensor) -> Handle:
        """Sum ``tensor`` over ranks in its own dtype; the result is ``tensor``, overwritten, or a new tensor in
        frameworks whose tensors are immutable."""

    @abc.abstractmethod
    def allgather(self, tensor: Tensor) -> Handle:
        """Gather equally sized 1-d tensors; the result is a list with one tensor per rank."""

    def concatenate(self, tensor: Tensor) -> Handle:
        """Gather 1-d tensors of any lengths into one, in the order of ranks; the result is a list that holds it
        once the collective is done. For engines that ``concatenates``."""
        raise NotImplementedError(f"{self.name} gathers tensors of equal lengths only")

    @abc.abstractmethod
    def alltoall(self, tensor: Tensor) -> Handle:
        """Cut a 1-d tensor into one equal part per rank and send each its part; the result is a list with
        the part received from each rank."""

    @abc.abstractmethod
    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        """Send the root's ``tensor`` to all; the result is ``tensor``, overwritten, or a new tensor in frameworks whose
        tensors are immutable."""

    def gather(self, tensor: Tensor, root: int) -> Handle:
        """Gather equally sized 1-d tensors at one rank; the result is a list with one tensor per rank there, and an
        empty list on other ranks. The default is an all-gather."""
        return self.allgather(tensor).map(lambda gathered: gathered if self.rank == root else [])

    def supported(self, route: Sequence[Any], sums: bool) -> Sequence[Any]:
        """Return the route that a bucket takes over this backend: this route, with other collectives where the backend
        cannot start one.

        Args:
            route: see :class:`grace.core.route.Leg`.
            sums: True if payloads are summed on their way.
        """
        return route

    def duplicate(self) -> "Backend":
        """Return another backend over the same ranks, whose collectives may be started by another thread, in an order
        of their own. Every rank must call it.

        Every optimizer exchanges over a duplicate of its own. A backend without ``duplicate()`` is shared: several
        optimizers, and your own collectives over it, must then start their collectives in one order on all ranks."""
        raise ConfigError(
            f"{type(self).__name__} has no duplicate(), which exchanges beside training need: define it, or leave out "
            "staleness and sync=False"
        )

    def split(self, ranks: Sequence[int]) -> "Backend | None":
        """Return another backend over some of the ranks, which ascend; None on the others. Every rank must call it."""
        raise ConfigError(
            f"{type(self).__name__} has no split(), which reducing node by node needs: define it, or leave out "
            "hierarchical and local_replication"
        )

    def split_once(self, ranks: Sequence[int], use: str) -> "Backend | None":
        """Return a backend over some of the ranks, which ascend; None on the others. Every rank must call it.

        The groups of a channel are made once, and serve all optimizers that use the channel after each other: like
        channels they cannot be freed by all ranks together.

        Args:
            ranks: numbers of the ranks.
            use: name of the use, whose collectives all ranks start in one order. Other uses have other groups.
        """
        if self.is_its_own_channel:  # several optimizers use it at a time
            return self.split(ranks)
        key: tuple[str | int, ...] = (use, *ranks)
        if key not in self.splits:
            self.splits[key] = self.split(ranks)
        return self.splits[key]

    @property
    def splits(self) -> "dict[tuple[str | int, ...], Backend | None]":
        """Backends that :meth:`split_once` has made, by use and ranks."""
        splits: dict[tuple[str | int, ...], Backend | None] = self.__dict__.setdefault("_splits", {})
        return splits

    def copy_with(self: B, **changed: object) -> B:
        """Return a backend of the same class and settings that has sent nothing yet, with these attributes changed."""
        other = copy.copy(self)
        # Counters, channels, groups and functions to call at the end are one backend's own.
        for key in ("sent_bytes", "started", "done", "closing", "_channels", "_splits"):
            other.__dict__.pop(key, None)
        other.__dict__.update(changed)
        return other

    @property
    def is_ended(self) -> bool:
        """True if the program has ended the engine since this backend was made; it may have initialized it anew."""
        return False

    @property
    def is_its_own_channel(self) -> bool:
        """True if several optimizers exchange over this backend itself: because they may, or because it has no
        ``duplicate()``."""
        # By name, any order is right. An elastic run's new rank must start no collective, and a duplicate takes one.
        alone = self.size == 1 or type(self).duplicate is Backend.duplicate
        return alone or self.pairs_by_name or self.elastic

    @property
    def channels(self) -> "Channels":
        """Channels that were duplicated from this backend."""
        # Made at first use: Backend has no __init__ that users' classes would have to call.
        return self.__dict__.setdefault("_channels", Channels())

    def allgather_object(self, value: object) -> list[Any]:
        """Gather small Python objects, blocking. For start-up and checkpoints only. The default gathers their pickles
        as tensors, which :meth:`tensor_of` makes."""
        with self.checked_operation("allgather_object"):
            return self.allgather_pickled(value)

    def tensor_of(self, array: np.ndarray) -> Tensor:
        """Return an array as a tensor that the engine's collectives accept."""
        return array

    def allgather_pickled(self, value: object) -> list[Any]:
        """Gather small Python objects by two all-gathers, of sizes and of padded pickles, without counting their
        bytes."""
        # Metrics compare sent bytes with those of gradients, so what is gathered here must not count.
        before = self.sent_bytes
        raw = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = [int(size[0]) for size in self.allgather(self.tensor_of(np.array([raw.size]))).wait()]
        padded = np.zeros(max(sizes), np.uint8)
        padded[: raw.size] = raw
        parts = self.allgather(self.tensor_of(padded)).wait()
        arrays = [np.asarray(part.cpu() if hasattr(part, "cpu") else part) for part in parts]  # NCCL gathers on the GPU
        self.sent_bytes = before
        return [pickle.loads(part[:size].tobytes()) for part, size in zip(arrays, sizes, strict=True)]

    @contextlib.contextmanager
    def checked_operation(self, kind: str, detail: str = "") -> Iterator[None]:
        """Compare the operation with that of all other ranks, then run a blocking one that is no exchange in this
        context. Of nested contexts the outermost gives the name.

        Args:
            kind: the engine's operation, which must be equal on all ranks.
            detail: text for messages, after the name of the function that the program called.

        Raises:
            ExchangeError: the engine failed, or other ranks did not come in time.
            RankError: other ranks do something else.
        """
        name = " ".join(filter(None, (called_function(), detail.strip())))
        with self.waiting_for_ranks(lambda: name):
            watch.check_same_operation(self, kind, name)
            yield

    @contextlib.contextmanager
    def waiting_for_ranks(self, place: Callable[[], str]) -> Iterator[None]:
        """Wait for other ranks in this context. Of nested contexts the outermost gives the name.

        Args:
            place: returns a description of the operation, which must be equal on all ranks.

        Raises:
            ExchangeError: the engine failed, or other ranks did not come in time.
        """
        with waiting(place) as wait:
            try:
                yield
            except GraceError:  # it names the ranks already
                raise
            except Exception as error:
                raise self.engine_error(wait.place(), "", error) from error

    def engine_error(self, place: str, when: str, error: Exception) -> ExchangeError:
        """Return the error for an engine that failed in an operation; it names ranks that are known to have ended, or
        to be elsewhere."""
        why = watch.explain(f"{place}{when}", error)
        said = watch.timeout_message(self.timeout) if watch.timed_out(error) else error
        return self.failure(f"{self.rank_label}: {place} failed{when}; {why}. The engine says: {said}")

    def number_of(self, rank: int) -> int:
        """Return the number in the run, by which users know it, of one of the backend's ranks."""
        return rank if self.members is None else self.members[rank]

    @property
    def rank_label(self) -> str:
        """Description of this rank, by its number in the run."""
        if self.members is None:
            return f"rank {self.rank} of {self.size}"
        return f"rank {self.number_of(self.rank)} of the ranks {', '.join(map(str, self.members))}"

    def at_shutdown(self, function: Callable[[], object]) -> None:
        """Register a function that :meth:`close` calls while the ranks can still communicate."""
        self.__dict__.setdefault("closing", []).append(function)

    def cancel_at_shutdown(self, function: Callable[[], object]) -> None:
        """Remove a function that :meth:`at_shutdown` registered; do nothing if :meth:`close` has begun."""
        with contextlib.suppress(ValueError):
            self.__dict__.get("closing", []).remove(function)

    def close(self) -> None:
        """Call the functions that :meth:`at_shutdown` registered, close channels, and shut down."""
        try:
            # Taken out first, so that a second close() calls none of them again.
            for function in self.__dict__.pop("closing", []):
                function()
        finally:
            # Also after an error: a channel that stays open would keep the engine, and so the process, from ending.
            if "_channels" in self.__dict__:
                self.channels.close()
            self.shutdown()

    def shutdown(self) -> None:  # noqa: B027 - optional to override
        """Release the resources that the backend opened."""


class LocalBackend(Backend):
    """One process, no launcher: every collective returns its argument, and nothing is sent.

    >>> LocalBackend().describe()
    'local, rank 0 of 1'
    """

    name = "local"

    def allreduce(self, tensor: Tensor) -> Handle:
        return Handle(lambda: None, tensor)

    def allgather(self, tensor: Tensor) -> Handle:
        return Handle(lambda: None, [tensor])

    def alltoall(self, tensor: Tensor) -> Handle:
        return Handle(lambda: None, [tensor])

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        return Handle(lambda: None, tensor)

    def gather(self, tensor: Tensor, root: int) -> Handle:
        return Handle(lambda: None, [tensor])

    def duplicate(self) -> "LocalBackend":
        return LocalBackend()

    def split(self, ranks: Sequence[int]) -> "LocalBackend | None":
        return LocalBackend() if 0 in ranks else None

    def allgather_object(self, value: object) -> list[Any]:
        return [value]


StartedCounts = dict[tuple[str | int, ...], int | None]
"""Numbers of collectives that a rank has started over a channel, under (), and over each of its groups, by use and
ranks; None for groups of other ranks."""
FreeChannels = dict[int, StartedCounts]
"""Free channels of a rank, by channel number."""


class Channels:
    """Channels of one group of ranks, by number; each rank of the group has the same ones.

    torch.distributed and MPI pair collectives by the order in which ranks start them. The exchange of an optimizer
    starts in backward on a rank that has all gradients, and in ``step()`` on a rank that left a layer out. Over one
    process group it would be paired with a collective of another optimizer, or of the user, that was started between
    the two. So every optimizer exchanges over a channel, a duplicate of the backend.

    Channels are kept, and used again. They cannot be freed by all ranks together: optimizers end when Python collects
    them, at another moment on each rank. When ranks compare their settings they also compare which channels are free,
    and so choose the same channel.

    >>> channels = Channels()
    >>> first = channels.acquire(LocalBackend(), [channels.free_channels()])
    >>> other = channels.acquire(LocalBackend(), [channels.free_channels()])
    >>> channels.release(first)
    >>> channels.acquire(LocalBackend(), [channels.free_channels()]) is first, other is first
    (True, False)
    """

    def __init__(self) -> None:
        self.made: list[Backend] = []
        self.taken: set[int] = set()

    def free_channels(self) -> FreeChannels:
        """Return the channels that are free on this rank, which :meth:`acquire` needs from all ranks."""
        free: FreeChannels = {}
        for number, channel in enumerate(self.made):
            backends: dict[tuple[str | int, ...], Backend | None] = {(): channel, **channel.splits}
            # Collectives under way would be paired with those of the next optimizer.
            idle = all(one is None or one.started == one.done for one in backends.values())
            if idle and number not in self.taken:
                free[number] = {key: None if one is None else one.started for key, one in backends.items()}
        return free

    def acquire(self, parent: Backend, free_of_ranks: Sequence[FreeChannels]) -> Backend:
        """Return a channel that all ranks agree on: the first that is free on all ranks, and over which all ranks have
        started equally many collectives, over each of its groups, too; a new channel if there is none.

        Args:
            parent: the backend that new channels are duplicated from.
            free_of_ranks: the free channels of every rank, in the order of ranks.
        """
        # In one order, so that all ranks find the same channel.
        for number in sorted(free_of_ranks[0]):
            if number not in self.taken and _equally_started([free.get(number) for free in free_of_ranks]):
                self.taken.add(number)
                return self.made[number]
        self.taken.add(len(self.made))
        self.made.append(parent.duplicate())
        return self.made[-1]

    def release(self, channel: Backend) -> None:
        """Let other optimizers use a channel. It counts as free once none of its collectives is under way."""
        self.taken -= {number for number, other in enumerate(self.made) if other is channel}

    def close(self) -> None:
        """Close all channels."""
        made, self.made, self.taken = self.made, [], set()
        for channel in made:
            channel.close()


def _equally_started(counts: Sequence[StartedCounts | None]) -> bool:
    """Return True if all ranks have the same groups of a channel, and in each its ranks have started equally many
    collectives.

    Args:
        counts: of each rank; None if the channel is not free there.
    """
    known = [count for count in counts if count is not None]
    if len(known) < len(counts) or any(count.keys() != known[0].keys() for count in known):
        return False
    return all(len({count[key] for count in known} - {None}) == 1 for key in known[0])


class Leases:
    """Channels that one runner uses until it ends or is garbage-collected.

    Args:
        backend: the backend that channels are duplicated from.

    Attributes:
        free_of_ranks: the free channels of every rank. Set once the ranks have compared their settings.
        ends: finalizers that release the channels of this runner.
    """

    def __init__(self, backend: Backend):
        self.backend = backend
        self.free_of_ranks: list[FreeChannels] = []
        self.ends: list[weakref.finalize[..., Leases]] = []

    def free_channels(self) -> FreeChannels | None:
        """Return the channels that are free on this rank; None if the backend is its own channel."""
        return None if self.backend.is_its_own_channel else self.backend.channels.free_channels()

    def acquire(self, another: bool = False) -> Backend:
        """Return a channel for this runner. A backend that is its own channel is returned itself, or duplicated if
        ``another`` is True."""
        if self.backend.is_its_own_channel:
            return self.backend.duplicate() if another else self.backend
        channels = self.backend.channels
        channel = channels.acquire(self.backend, self.free_of_ranks)
        self.ends.append(weakref.finalize(self, channels.release, channel))
        self.ends[-1].atexit = False  # at exit no other runner needs the channel
        return channel

    def release(self) -> None:
        """Release all channels of this runner."""
        for end in self.ends:
            end()
