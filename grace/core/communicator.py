"""The communicator contract: one compressor, one memory, and the collective that carries payloads."""

import dataclasses
import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from grace.core.backend import Backend, Handle, LocalBackend
from grace.core.component import Component
from grace.core.compressor import Compressor, Tensor
from grace.core.context import Context
from grace.core.memory import Memory
from grace.core.registry import legal_communicators, legal_memories, make
from grace.core.route import ALL_GATHER, ALL_REDUCE, Carries, EngineTraits, Leg, Route, formula_of
from grace.core.transactional_dict import is_ours
from grace.errors import ConfigError


class RouteCost:
    """The cost of a communicator's class: the formulas of its legs, added up; empty where these say none, or where an
    object of the class takes parameters that have no defaults."""

    def __get__(self, communicator: Any, cls: Any) -> str:
        if dataclasses.MISSING in cls.parameters().values():
            return ""
        try:
            # A payload of any size: small sums may go another way, which is chosen for its delay.
            return formula_of(cls().route_of_wire(math.inf, EngineTraits()))
        except ConfigError:  # it does not carry the compressor that it takes if none is named
            return ""


class Communicator(Component):
    """Composes a compressor and a memory, and moves payloads. Write ``communicate``, or else ``send_receive``, or else
    ``async_send`` and ``wait_receive``.

    ``communicate(wire) -> Handle``: start sending the 1-d tensor ``wire`` and receiving what the
    aggregate is made of; the handle's result is a list of tensors like ``wire`` whose decoded sum is
    the sum over all ranks: one per rank, or a single one that is already the sum.

    ``sums`` says which: with ``sums = True`` the wire has the payload's own dtype and the engine adds
    it up, so the compressor's payload must be summable; otherwise it is bytes (uint8).

    The others are GRACE's contract: they are called for each variable, with its payload, a list of tensors, decode and
    aggregate what came, and return the mean. They may be called with ``ctx`` and ``name`` in any order.

    Args:
        compressor: a compressor, or its spec.
        memory: a memory or its spec; the compressor's default if left out.
        world_size: how many ranks will take part, for those who write it as in GRACE; checked when they begin.

    Raises:
        ConfigError: the parts do not go together; the message names what does. Or the class defines none of these.

    >>> from grace.communicators import Allgather
    >>> Allgather("topk(ratio=0.01)").describe()
    'allgather, topk, residual'
    """

    kind = "communicator"
    own_numbers = ("rank", "local_rank")
    sums: ClassVar[bool] = False
    cost: ClassVar[Any] = RouteCost()
    """Bytes that one exchange sends from a rank, for a payload of p bytes and W ranks; for people. A class may say it
    itself, as text."""
    rooted: ClassVar[bool] = False
    """True if one rank averages for all, and answers."""
    cuts: ClassVar[bool] = False
    """True if each rank owns a piece of every variable, and averages it."""
    codec: ClassVar[Any] = None
    """The class of its own bucket codec (:class:`grace.exchange.codec.PerVariableCodec`); None to have one chosen."""
    can_defer: ClassVar[bool] = True
    """True if headers on a device may be read at the end of the step."""
    delayed: bool = False
    """True if the means of a step are applied in a later one; its round trips then commit their state by themselves."""
    compress_after: int = 0
    """Steps in which its variables are exchanged uncompressed, before it compresses them."""
    uncompressed: "Communicator | None" = None
    """The communicator that carries its variables in those steps. Made by the session."""
    second: tuple[Compressor, Memory, str] | None = None
    """Compressor, memory, and label of the random numbers, of the compression of means; None if means are not
    compressed."""
    hand: ClassVar[Callable[["Communicator"], Any]]
    """Factory of :class:`grace.session.by_hand.ByHand`. Set by ``grace.session``, which this module may not import."""
    _by_hand: Any = None
    made_for: int | None = None
    """Number of ranks that it was made for, if somebody said so."""
    by_default: bool = False
    """True if nobody named it: another number of ranks may get another one."""
    lr: float | None = None
    """The learning rate, for memories that follow it, where steps are called by hand."""
    world_size: int = 1
    """Number of ranks that take part, as GRACE calls it."""
    beside: str = ""
    """Description of the user's communicator that this one carries small variables beside; else empty."""

    def __init__(self, compressor: Any = "none", memory: Any = None, world_size: int | None = None):
        self.made_for = world_size
        way = _way_of(type(self))
        self.moves_payloads = way in (("send_receive",), BOTH)
        """True if it moves payloads itself, variable by variable."""
        self.by_communicate = way == ("communicate",)
        if self.moves_payloads:
            self.can_defer = False  # type: ignore[misc]
        self.compressor: Compressor = make("compressor", compressor)
        self.foreign = any(not is_ours(type(part)) for part in self.compressor.whole().values())
        """Whether payloads are made by somebody's own compressor, and so are looked at."""
        traits = self.compressor.traits
        self.memory: Memory = make("memory", traits.memory if memory is None else memory)
        self.backend: Backend = LocalBackend()
        self.bind(self.context)
        self._check()

    def communicate(self, wire: Tensor) -> Handle:
        """Start the collective for this rank's ``wire``; see the class."""
        raise TypeError(f"{type(self).__name__} must define communicate(wire)")

    def send_receive(self, tensors: list[Tensor], ctx: Any, name: str) -> Tensor:
        """Exchange one variable's payload, and return the mean of what all ranks' decode to; may block. All ranks call
        it for the same variables in the same order, at the end of the step."""
        raise TypeError(f"{type(self).__name__} must define send_receive(tensors, ctx, name)")

    def async_send(self, tensors: list[Tensor], name: str) -> Any:
        """Start to exchange one variable's payload; returns what :meth:`wait_receive` takes."""
        raise TypeError(f"{type(self).__name__} must define async_send(tensors, name)")

    def wait_receive(self, handles: Any, ctx: Any, name: str) -> Tensor:
        """Await what :meth:`async_send` has started, and return the mean."""
        raise TypeError(f"{type(self).__name__} must define wait_receive(handles, ctx, name)")

    @property
    def blocks(self) -> bool:
        """Whether it moves payloads by ``send_receive``."""
        return _way_of(type(self)) == ("send_receive",)

    @classmethod
    def parameters(cls) -> dict[str, Any]:
        """What its spec, and a strategy's ``sync``, may say beside compressor and memory: what ``__init__`` takes, its
        bases' too where it passes ``**options`` on.

        >>> from grace.communicators import ReduceBroadcast
        >>> list(ReduceBroadcast.parameters())
        ['destination', 'staleness', 'sync', 'local_replication', 'ahead']
        """
        found: dict[str, Any] = {}
        for base in cls.__mro__:
            if base is Communicator:
                break
            if "__init__" in vars(base):
                taken = inspect.signature(vars(base)["__init__"]).parameters.values()
                named = [p for p in taken if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
                for p in named:
                    found.setdefault(p.name, dataclasses.MISSING if p.default is p.empty else p.default)
                if all(p.kind != p.VAR_KEYWORD for p in taken):
                    break
        every = inspect.signature(Communicator.__init__).parameters  # of all communicators: the parts and the run's
        return {key: default for key, default in found.items() if key not in every}

    @classmethod
    def accepts(cls, compressor: Compressor) -> str | None:
        """Why this communicator cannot carry the compressor's payloads; None if it can."""
        traits = compressor.traits
        if cls.sums and not traits.summable:
            if type(compressor).__module__.startswith("grace."):
                return "its payloads cannot be summed by the engine"
            return (
                "its traits do not say that the engine may sum its payloads (where it may, as where all ranks draw the "
                "same indices, its class says traits = Traits(summable=True))"
            )
        if not cls.sums and traits.rounds > 1:
            return "it needs several reductions"
        return None

    def _check(self) -> None:
        traits = self.compressor.traits
        why = self.accepts(self.compressor)
        if why:
            legal = ", ".join(legal_communicators(self.compressor))
            raise ConfigError(
                f"{self.name or type(self).__name__} cannot carry {self.compressor.spec}: {why}. "
                f"Legal communicators for {self.compressor.name or type(self.compressor).__name__}: {legal}"
            )
        memories = f"Legal memories for {self.compressor.name}: {', '.join(legal_memories(self.compressor))}"
        unfit = self.memory.accepts(self.compressor)
        if unfit:
            raise ConfigError(f"memory {self.memory.spec} cannot serve {self.compressor.spec}: {unfit}. {memories}")
        if traits.needs_memory and not self.memory.stateful:
            raise ConfigError(
                f"{self.compressor.spec} needs error feedback: memory {self.memory.spec} would lose what it "
                f"leaves out. Use memory={traits.memory!r}. {memories}"
            )
        if self.compressor.noisy and self.memory.stateful:
            warnings.warn(
                f"{self.compressor.spec} is not a contraction: its error can exceed the gradient, and error feedback "
                f"({self.memory.spec}) on it can diverge. Use {self.compressor.noise_advice}",
                stacklevel=3,
            )

    def check_world(self, size: int) -> None:
        """Refuse a run of another number of ranks than the communicator was made for.

        >>> from grace.communicators import Allgather
        >>> Allgather("topk", "residual", 4).check_world(2)
        Traceback (most recent call last):
        grace.errors.ConfigError: allgather: it was made for world_size=4, and the run has 2 ranks. Leave world_size out
        """
        if self.made_for not in (None, size):
            ranks = f"{size} rank{'s' * (size > 1)}"
            raise self.refuse(
                f"it was made for world_size={self.made_for!r}, and the run has {ranks}. Leave world_size out"
            )

    @property
    def components(self) -> dict[str, Component]:
        """The parts that keep state themselves or in parts of theirs, by the name they are saved under."""
        return {"compressor": self.compressor, "memory": self.memory}

    def legs(self, nbytes: float, engine: EngineTraits) -> Route:
        """Return the route of one wire of so many bytes.

        That of a class of the user's is one leg by ``communicate``, which counts as an all-reduce if it sums and as an
        all-gather if not; or a leg of a header alone, if it moves payloads itself."""
        if self.moves_payloads:
            return [Leg(ALL_GATHER, Carries.HEADERS)]
        counted_as = ALL_REDUCE if self.sums else ALL_GATHER
        return [Leg(dataclasses.replace(counted_as, start=self._communicate), Carries.GRADIENTS)]

    def _communicate(self, backend: Backend, wire: Tensor, root: Any) -> Handle:
        return self.communicate(wire)

    def route_of_wire(self, nbytes: float, engine: EngineTraits) -> Route:
        """:meth:`legs`, but where ``communicate`` was written nearer to this class."""
        own = self.by_communicate or self.moves_payloads
        return Communicator.legs(self, nbytes, engine) if own else self.legs(nbytes, engine)

    def rescale_second(self, loss_scale: float) -> None:
        """The means about to be compressed are in the units of this loss scale."""

    def use_leaders(self, leader_of: Sequence[int]) -> None:
        """One rank of each node takes part from now on: the number of the one that speaks for each of all ranks."""

    def resumed(self, loss_scale: float) -> None:
        """The state was loaded from a checkpoint, in the units of this loss scale."""

    def dense(self, usual: "Communicator") -> "Communicator":
        """What carries the variables that the compressor would not make smaller: ``usual``, all together."""
        return usual

    @property
    def stateful(self) -> bool:
        """Whether any part keeps something between steps."""
        return self.compressor.stateful or self.memory.stateful

    @property
    def keepers(self) -> dict[str, Component]:
        """The components and their parts, whatever may keep state, by the names that it is saved under."""
        found: dict[int, tuple[str, Component]] = {}
        for kind, component in self.components.items():
            for name, part in component.whole().items():
                found.setdefault(id(part.state), (f"{kind}.{name}" if name else kind, part))
        return dict(found.values())

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: these are in no run yet."""
        own = {"backend": LocalBackend(), "_by_hand": None, "uncompressed": None}
        return {**super().__getstate__(), **own}

    def bind(self, context: Context, backend: Backend | None = None) -> None:
        """Join a run: hand the context to both parts and remember the engine."""
        super().bind(context)
        if backend is not None:
            self.backend, self.world_size = backend, backend.size

    def describe(self) -> str:
        """Communicator, compressor and memory as specs."""
        return f"{self.spec}, {self.compressor.spec}, {self.memory.spec}"

    @property
    def choice(self) -> str:
        """The user's communicator, in words, where this one carries the variables beside it that it would not make
        smaller; else its own."""
        return self.beside or self.describe()

    # -- by hand ---------------------------------------------------------------------------------------

    @property
    def by_hand(self) -> Any:
        """Its steps, where the user calls them."""
        if self._by_hand is None:
            self._by_hand = Communicator.hand(self)
        return self._by_hand

    def step(self, tensors: Any, names: Any) -> Any:
        """One blocking exchange, GRACE's way: the mean over ranks of what is left of a tensor after compression.

        The first step joins the run that ``grace.init()`` began; every rank must exchange the same names in the same
        order. In a ``tf.function`` the exchange is made whenever the graph runs.

        Args:
            tensors: a tensor of any shape, of float16, bfloat16, float32 or float64; or a list of such ones, of one
                dtype, that travel together.
            names: its name, under which memories keep what they remember; or one for each.

        Returns:
            the mean, or the list of means, of the same dtype.

        Raises:
            ConfigError: what was given cannot be exchanged, or nobody called ``grace.init()`` in a run of several
                ranks; nothing was sent.
            RankError: ranks gave other tensors or names.
            PayloadError: what a rank sent cannot be decoded.
            StepError: ranks have made another number of steps.

        >>> import numpy as np
        >>> from grace.communicators import Allgather
        >>> Allgather("topk(ratio=0.5)").step(np.float32([4, 1]), "w")
        array([4., 0.], dtype=float32)
        """
        return self.by_hand.step(tensors, names)

    def send_step(self, tensors: Any, names: Any) -> Any:
        """Begin a step, and do something else while its payloads travel: :meth:`receive_step` ends it. Several may be
        under way; all of them end with the first that is received, in one step. Eager tensors only.

        Args:
            tensors, names: as for :meth:`step`.

        Returns:
            what :meth:`receive_step` takes.

        >>> import numpy as np
        >>> from grace.communicators import Allgather
        >>> communicator = Allgather("topk(ratio=0.5)")
        >>> begun = communicator.send_step(np.float32([4, 1]), "w")
        >>> communicator.receive_step(begun)
        array([4., 0.], dtype=float32)
        """
        return self.by_hand.start(tensors, names)

    def receive_step(self, begun: Any) -> Any:
        """The means of what :meth:`send_step` began."""
        return self.by_hand.finish(begun)

    def state_dict(self, everyone: bool = False) -> dict[str, Any]:
        """What steps by hand have left in memories and compressors, for ``torch.save`` or pickle.

        Args:
            everyone: of all ranks, for one file that rank 0 saves; every rank must call it then.

        Raises:
            ConfigError: there was no step yet.
        """
        return self.by_hand.state_dict(everyone)

    def load_state_dict(self, state: dict[str, Any], memory: str = "strict") -> None:
        """Go on from what :meth:`state_dict` returned; every rank must call it.

        Args:
            state: what was saved.
            memory: "strict" refuses what does not fit, "keep" keeps what fits, "reset" starts with empty memories.

        Raises:
            ConfigError: it is no such state, or it does not fit; nothing was changed.
            RankError: it was refused on another rank, or the ranks load different ones.
        """
        self.by_hand.load_state_dict(state, memory)


BOTH = ("async_send", "wait_receive")
WAYS = (("begin",), ("legs",), ("communicate",), ("send_receive",), BOTH)
"""How a class may say how payloads move; what its nearest base says holds."""


def _way_of(cls: type[Communicator]) -> tuple[str, ...]:
    """Which of the ways a class defines.

    Raises:
        ConfigError: none, or one that does not go with another.
    """
    bases = cls.__mro__[: cls.__mro__.index(Communicator)]
    for base in bases:
        for way in WAYS:
            if not any(name in vars(base) for name in way):
                continue
            lacking = [name for name in way if getattr(cls, name) is getattr(Communicator, name, None)]
            if lacking:
                raise ConfigError(f"{cls.__name__} defines one of {' and '.join(way)}, and lacks {lacking[0]}()")
            if way in WAYS[3:] and (cls.sums or cls.cuts or cls.rooted or hasattr(cls, "begin")):
                raise ConfigError(
                    f"{cls.__name__} defines {way[0]}(), and its base moves whole buckets: derive it from "
                    "grace.Communicator"
                )
            return way
    raise ConfigError(
        f"{cls.__name__} does not say how payloads move: define communicate(wire), which starts moving a whole bucket, "
        "or send_receive(tensors, ctx, name), or async_send(tensors, name) and wait_receive(handles, ctx, name), which "
        "move one variable's payload"
    )
