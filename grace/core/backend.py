"""The backend contract: the engine that moves bytes."""

import abc
import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from grace.core import watch
from grace.core.channels import Channels
from grace.core.waits import TIMEOUT, asked_for, waiting
from grace.errors import ConfigError, ExchangeError, GraceError

Tensor = Any


class Handle:
    """A collective in flight. ``wait()`` blocks and returns what arrived.

    Args:
        wait: blocks until the collective is done.
        result: what arrives, if it is there to be filled; None with ``later``.
        works: the engine's own work objects, for those who need futures.
        later: gives the result once the collective is done, where nothing can be filled.

    >>> Handle(lambda: None, ["what arrived"]).wait()
    ['what arrived']
    """

    def __init__(
        self,
        wait: Callable[[], Any],
        result: Any = None,
        works: tuple[Any, ...] = (),
        later: Callable[[], Any] | None = None,
    ):
        self._wait, self.works = wait, works
        self._result = later or (lambda: result)

    def wait(self) -> Any:
        """Block until the collective is done; return its result."""
        self._wait()
        return self._result()

    def result(self) -> Any:
        """The result of a collective that is known to be done."""
        return self._result()

    def map(self, function: Callable[[Any], Any]) -> "Handle":
        """A handle with another form of the same result."""
        return Handle(self._wait, works=self.works, later=lambda: function(self._result()))

    @staticmethod
    def all(handles: "list[Handle]") -> "Handle":
        """One handle for several collectives; its result is the list of theirs."""

        def wait() -> None:
            for handle in handles:
                handle.wait()

        works = tuple(work for handle in handles for work in handle.works)
        return Handle(wait, works=works, later=lambda: [handle.result() for handle in handles])


class Backend(abc.ABC):
    """Asynchronous collectives over the ranks of one run, and a count of what they sent.

    Every rank must start the same collectives in the same order, unless the engine pairs them by name
    (``pairs_by_name``): then ``label`` names what is started next. ``sent_bytes`` counts the bytes that
    left this rank: each collective adds what its algorithm sends from here, given the buffer that it
    was really handed (ring all-reduce: 2 (W-1)/W times the buffer; all-to-all: (W-1)/W times;
    all-gather: W-1 times; broadcast: W-1 times at the root; gather: once everywhere else).
    """

    name: str = ""
    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    """Its number among the ranks of its node, if the launcher or the engine says it."""
    local_size: int | None = None
    """Number of ranks on its node, if the launcher or the engine says it."""
    sent_bytes: int = 0
    pairs_by_name: ClassVar[bool] = False
    """Whether collectives of the same label find each other, in whatever order ranks start them."""
    label: str = ""
    """The exchange that the next collectives belong to, the same on every rank; empty for all others, which every
    rank starts in the same order."""
    elastic: bool = False
    """Whether ranks come and go: a new one must not start a collective before all ranks synchronize."""
    failure: ClassVar[type[ExchangeError]] = ExchangeError
    """What is raised when the engine fails."""
    framework: ClassVar[str] = ""
    """The only framework whose tensors it moves; empty if it moves any."""
    began: ClassVar[Any] = None
    """The bucket whose exchange started a collective last, over any backend of this process."""
    started: int = 0
    done: int = 0
    """How many collectives exchanges have started over it, and how many of these are known to be done."""
    by_ring: ClassVar[bool] = False
    """Whether its sums of small tensors wait for a message from each rank to the next, and back."""
    concatenates: ClassVar[bool] = False
    """Whether the engine gathers tensors of unequal lengths itself."""
    timeout: float = TIMEOUT
    """Seconds that a rank waits for others; see :func:`grace.init`."""
    watched: bool = False
    """Whether it is over all ranks of the run, which may so find each other; see :mod:`grace.core.watch`."""
    members: Sequence[int] | None = None
    """Of its ranks, the numbers in the run; None if they are the same."""

    def describe(self) -> str:
        """The engine, for people."""
        return f"{self.name}, rank {self.rank} of {self.size}"

    def count(self, nbytes: float) -> None:
        """Add to the bytes that left this rank."""
        self.sent_bytes += round(nbytes)

    @abc.abstractmethod
    def allreduce(self, tensor: Tensor) -> Handle:
        """Sum ``tensor`` over ranks in its own dtype; the result is ``tensor``, overwritten, or a new one where
        tensors cannot change."""

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
        """Send the root's ``tensor`` to all; the result is ``tensor``, overwritten, or a new one where tensors
        cannot change."""

    def gather(self, tensor: Tensor, root: int) -> Handle:
        """Gather equally sized 1-d tensors at one rank; the result is a list with one tensor per rank there, and an
        empty one elsewhere. An all-gather, unless the engine can do better."""
        return self.allgather(tensor).map(lambda gathered: gathered if self.rank == root else [])

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for old, new in (("beside", "duplicate"), ("among", "split")):
            if old in vars(cls) and new not in vars(cls):
                warnings.warn(f"{cls.__name__}.{old}() is called {new}() now", DeprecationWarning, stacklevel=2)
                setattr(cls, new, vars(cls)[old])

    def duplicate(self) -> "Backend":
        """Another backend over the same ranks, whose collectives may be started by another thread, in an order of
        their own. Every rank must call it.

        Every optimizer's exchanges travel over one of their own. A backend without ``duplicate()`` is used as it is:
        then several optimizers, and whatever else you exchange over it, must start their collectives in one order
        on all ranks."""
        raise ConfigError(
            f"{type(self).__name__} has no duplicate(), which exchanges beside training need: define it, or leave out "
            "staleness and sync=False"
        )

    def split(self, ranks: Sequence[int]) -> "Backend | None":
        """Another backend over some of the ranks, for those; None for the others. Every rank must call it.

        Args:
            ranks: ascending.
        """
        raise ConfigError(
            f"{type(self).__name__} has no split(), which reducing node by node needs: define it, or leave out "
            "hierarchical and local_replication"
        )

    def beside(self) -> "Backend":
        """:meth:`duplicate`, as it was called."""
        return self.duplicate()

    def among(self, ranks: Sequence[int]) -> "Backend | None":
        """:meth:`split`, as it was called."""
        return self.split(ranks)

    def like(self, **changed: Any) -> Any:
        """A backend of the same class and settings that has sent nothing yet, with these attributes changed."""
        other = copy.copy(self)
        for key in ("sent_bytes", "started", "done", "closing", "_channels"):
            other.__dict__.pop(key, None)
        other.__dict__.update(changed)
        return other

    @property
    def is_its_own_channel(self) -> bool:
        """Whether several optimizers may exchange over this very backend, or must because it makes no others."""
        alone = self.size == 1 or type(self).duplicate is Backend.duplicate
        return alone or self.pairs_by_name or self.elastic

    @property
    def channels(self) -> Channels:
        """Those made beside it."""
        return self.__dict__.setdefault("_channels", Channels())

    @abc.abstractmethod
    def allgather_object(self, value: Any) -> list[Any]:
        """Gather small Python objects, blocking. For start-up and checkpoints only."""

    def tensor_of(self, array: np.ndarray) -> Tensor:
        """An array as the engine's collectives take it."""
        return array

    def all_objects(self, value: Any) -> list[Any]:
        """What ``allgather_object`` gives, by two all-gathers, which are not counted."""
        before, raw = self.sent_bytes, np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = [int(size[0]) for size in self.allgather(self.tensor_of(np.array([raw.size]))).wait()]
        padded = np.zeros(max(sizes), np.uint8)
        padded[: raw.size] = raw
        parts = self.allgather(self.tensor_of(padded)).wait()
        arrays = [np.asarray(part.cpu() if hasattr(part, "cpu") else part) for part in parts]
        self.sent_bytes = before
        return [pickle.loads(part[:size].tobytes()) for part, size in zip(arrays, sizes, strict=True)]

    @contextlib.contextmanager
    def asking(self, kind: str, detail: str = "") -> Iterator[None]:
        """The context of what all ranks do together that is no exchange, and block in; the outermost counts.

        Args:
            kind: what the engine does, and must do on all ranks.
            detail: for messages, beside the name of the function that the program called.

        Raises:
            ExchangeError: the engine failed, or other ranks did not come in time.
            RankError: other ranks do something else.
        """
        name = " ".join(filter(None, (asked_for(), detail.strip())))
        with self.awaiting(lambda: name):
            watch.meet(self, kind, name)
            yield

    @contextlib.contextmanager
    def awaiting(self, place: Callable[[], str]) -> Iterator[None]:
        """The context of a wait for other ranks, which are in the same place; the outermost counts.

        Args:
            place: what they do there, in words that are the same on all of them.

        Raises:
            ExchangeError: the engine failed, or other ranks did not come in time.
        """
        with waiting(place) as wait:
            try:
                yield
            except GraceError:
                raise
            except Exception as error:
                raise self.failed(wait.place(), "", error) from error

    def failed(self, place: str, when: str, error: Exception) -> ExchangeError:
        """The error of an engine that failed in a place; it says which rank ended or is elsewhere, as far as known."""
        why = watch.explain(f"{place}{when}", error)
        said = watch.no_answer(self.timeout) if watch.timed_out(error) else error
        return self.failure(f"{self.own_name}: {place} failed{when}; {why}. The engine says: {said}")

    @property
    def own_name(self) -> str:
        """This rank, by its number in the run."""
        if self.members is None:
            return f"rank {self.rank} of {self.size}"
        return f"rank {self.members[self.rank]} of the ranks {', '.join(map(str, self.members))}"

    def at_shutdown(self, function: Callable[[], Any]) -> None:
        """Call this before the ranks part."""
        self.__dict__.setdefault("closing", []).append(function)

    def close(self) -> None:
        """Do what is to be done before the ranks part, and leave."""
        try:
            for function in self.__dict__.pop("closing", []):
                function()
        finally:
            if "_channels" in self.__dict__:
                self.channels.close()
            self.shutdown()

    def shutdown(self) -> None:  # noqa: B027 - optional to override
        """Release what the backend opened."""


class LocalBackend(Backend):
    """One process, no launcher: every collective returns what it was given, and nothing is sent.

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

    def allgather_object(self, value: Any) -> list[Any]:
        return [value]
