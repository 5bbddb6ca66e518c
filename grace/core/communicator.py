"""The communicator contract: one compressor, one memory, and the collective that carries payloads."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from grace.core.backend import Backend, Handle, LocalBackend
from grace.core.component import Component, is_ours
from grace.core.compressor import Compressor, Ctx, Tensor
from grace.core.context import AnyContext
from grace.core.memory import Memory
from grace.core.registry import legal_communicators, legal_memories, make
from grace.core.route import ALL_GATHER, ALL_REDUCE, Carries, EngineTraits, Leg, Route
from grace.core.specs import Spec
from grace.core.user_parts import check_shape
from grace.errors import ConfigError, warn
from grace.kernels import kernels_of


class MeanCompression(NamedTuple):
    """Compression of means by the ranks that average: the second one of a bucket's round trip.

    Attributes:
        compressor: the method; its random numbers must be others than the first compression's.
        memory: keeps what payloads of means leave out.
        label: label of the random numbers, behind a variable's name and a slash.
    """

    compressor: Compressor
    memory: Memory
    label: str


class Communicator(Component):
    """Composition of a compressor and a memory that moves payloads. Write ``communicate``, or ``send_receive``, or
    ``async_send`` and ``wait_receive``.

    ``communicate(wire) -> Handle``: start the collective that sends the 1-d tensor ``wire``; the handle's
    result is a list of tensors like ``wire`` whose decoded sum is the sum over all ranks: one per rank, or
    a single one that is already the sum.

    With ``sums = True`` the wire has the payload's own dtype and the engine adds wires up, so the
    compressor's payload must be summable; otherwise the wire is bytes (uint8).

    ``send_receive``, ``async_send`` and ``wait_receive`` are GRACE's contract: they are called for each variable with
    its payload, a list of tensors; they decode and aggregate the payloads of all ranks, and return the mean. They may
    be called with ``ctx`` and ``name`` in any order.

    Args:
        compressor: a compressor, or its spec.
        memory: a memory or its spec; the compressor's default if left out.
        world_size: number of ranks that will take part, which GRACE's users give; it is checked when training begins.

    Raises:
        ConfigError: the parts do not fit each other; the message names parts that do. Or the class defines none of
            these methods.

    >>> from grace.communicators import Allgather
    >>> Allgather("topk(ratio=0.01)").describe()
    'allgather, topk, residual'
    """

    kind = "communicator"
    own_numbers = ("rank", "local_rank")
    sums: bool = False
    """True if the engine adds the ranks' wires up, as an all-reduce does."""
    cost: ClassVar[str] = ""
    """Formula, as text, for the bytes that one exchange sends from a rank, for a payload of p bytes and W ranks; empty
    if it is unknown."""
    rooted: ClassVar[bool] = False
    """True if one rank averages for all ranks, and sends the means back."""
    piecewise: ClassVar[bool] = False
    """True if each rank owns a piece of every variable, and averages it."""
    begin: "ClassVar[Callable[[Any, Any], Any] | None]" = None
    """Method that returns the round trip of a bucket, not started, of its contribution; None for a
    :class:`grace.exchange.round_trip.RoundTrip`."""
    codec_class: ClassVar[type | None] = None
    """The class of its own bucket codec (:class:`grace.exchange.codec.PerVariableCodec`); None to have one chosen."""
    can_defer: bool = True
    """True if headers on a device may be read at the end of the step."""
    delayed: bool = False
    """True if the means of a step are applied in a later one; its round trips then commit their state by themselves."""
    sync: bool = True
    """False if delayed means are applied when they have arrived, and at most :attr:`ahead` exchanges are under way."""
    staleness: int = 1
    """Number of steps after which delayed means are applied, with :attr:`sync`."""
    ahead: int = 1
    """Largest number of exchanges under way, without :attr:`sync`."""
    compress_after: int = 0
    """Steps in which its variables are exchanged uncompressed, before it compresses them."""
    uncompressed: "Communicator | None" = None
    """The communicator that carries its variables in those steps. Made by the session."""
    by_hand_factory: ClassVar[Callable[["Communicator"], Any]]
    """Factory of :class:`grace.session.by_hand.ByHand`. Set by ``grace``; this module may not import sessions."""
    _by_hand: Any = None
    made_for: int | None = None
    """Number of ranks that the user made it for; None if the user did not say."""
    by_default: bool = False
    """True if the user did not name a communicator: another number of ranks may then get another one."""
    lr: float | None = None
    """The learning rate, for memories that follow it, where steps are called by hand."""
    world_size: int = 1
    """Number of ranks that take part (GRACE's name for it); before training begins as many as the user made it for."""
    companion_of: str = ""
    """Description of the user's communicator that this one carries small variables beside; else empty."""

    def __init__(
        self, compressor: "CompressorArg" = "none", memory: "MemoryArg | None" = None, world_size: int | None = None
    ):
        self.make_for(world_size)
        methods = _transfer_methods(type(self))
        self.moves_payloads = methods in (("send_receive",), ASYNC_METHODS)
        """True if it moves payloads itself, variable by variable."""
        self.blocks = methods == ("send_receive",)
        """True if it moves them by ``send_receive``, which may block."""
        self.by_communicate = methods == ("communicate",)
        if self.moves_payloads:
            self.can_defer = False
        self.compressor: Compressor = make("compressor", compressor)
        self.user_defined = any(not is_ours(type(part)) for part in self.compressor.named_components().values())
        """True if a part of the compressor is a user's class, so that its payloads are checked."""
        traits = self.compressor.traits
        self.memory: Memory = make("memory", traits.memory if memory is None else memory)
        self.backend: Backend = LocalBackend()
        self.bind(self.context)
        self._check()

    def communicate(self, wire: Tensor) -> Handle:
        """Start the collective for this rank's ``wire``; see the class."""
        raise TypeError(f"{type(self).__name__} must define communicate(wire)")

    def send_receive(self, tensors: list[Tensor], ctx: Ctx, name: str) -> Tensor:
        """Exchange one variable's payload, and return the mean of what all ranks' decode to; may block. All ranks call
        it for the same variables in the same order, at the end of the step."""
        raise TypeError(f"{type(self).__name__} must define send_receive(tensors, ctx, name)")

    def async_send(self, tensors: list[Tensor], name: str) -> object:
        """Start to exchange one variable's payload; return the handles for :meth:`wait_receive`."""
        raise TypeError(f"{type(self).__name__} must define async_send(tensors, name)")

    def wait_receive(self, handles: Any, ctx: Ctx, name: str) -> Tensor:
        """Await the exchange that :meth:`async_send` started, and return the mean."""
        raise TypeError(f"{type(self).__name__} must define wait_receive(handles, ctx, name)")

    @classmethod
    def parameters(cls) -> dict[str, object]:
        """Return the parameters of the spec, and of a strategy's ``sync``, besides compressor and memory: those of
        ``__init__``, and those of its bases where it passes ``**options`` on.

        >>> from grace.communicators import ReduceBroadcast
        >>> list(ReduceBroadcast.parameters())
        ['destination', 'sync', 'staleness', 'local_replication', 'ahead']
        """
        found: dict[str, object] = {}
        for base in cls.__mro__:
            if base is Communicator:
                break
            if "__init__" in vars(base):
                taken = inspect.signature(vars(base)["__init__"]).parameters.values()
                named = [p for p in taken if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
                for p in named:
                    # A default of the nearer class hides that of its base.
                    found.setdefault(p.name, dataclasses.MISSING if p.default is p.empty else p.default)
                if all(p.kind != p.VAR_KEYWORD for p in taken):
                    break
        # the parts and the run's, which all communicators have
        every = inspect.signature(Communicator.__init__).parameters
        return {key: default for key, default in found.items() if key not in every}

    @classmethod
    def accepts(cls, compressor: Compressor) -> str | None:
        """Return the reason why this communicator cannot carry the compressor's payloads; None if it can."""
        traits = compressor.traits
        if cls.sums and not traits.summable:
            if is_ours(type(compressor)):
                return "its payloads cannot be summed by the engine"
            return (
                "its traits do not say that the engine may sum its payloads (where it may, as where all ranks draw the "
                "same indices, its class says traits = Traits(summable=True))"
            )
        if not cls.sums and traits.rounds > 1:
            # Each round starts from the mean of the one before, which all ranks must have.
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
            advice = self.compressor.noise_advice or self.memory.noise_advice
            warn(
                f"{self.compressor.spec} is not a contraction: its error can exceed the gradient, and error feedback "
                f"({self.memory.spec}) on it can diverge. Use {advice}"
            )

    def make_for(self, world_size: int | None) -> None:
        """Set the number of ranks that will take part, as the user gave it; None if the user did not say."""
        self.made_for = world_size
        self.world_size = world_size or 1

    def check_world(self, size: int) -> None:
        """Refuse a run of another number of ranks than the communicator was made for.

        >>> from grace.communicators import Allgather
        >>> Allgather("topk", "residual", 4).check_world(2)
        Traceback (most recent call last):
        grace.errors.ConfigError: allgather: it was made for world_size=4, and the run has 2 ranks. Leave world_size out
        """
        if self.made_for not in (None, size):
            ranks = f"{size} rank{'s' * (size > 1)}"
            raise self.error(
                f"it was made for world_size={self.made_for!r}, and the run has {ranks}. Leave world_size out"
            )

    def release(self, owner: object) -> None:
        """Give up the ownership, and the number of uncompressed steps, which was set for that owner's run."""
        if self._owner is not None and self._owner() is owner:
            self.compress_after = 0
        super().release(owner)

    @property
    def components(self) -> dict[str, Component]:
        """The direct parts, by the name that their state is saved under."""
        return {"compressor": self.compressor, "memory": self.memory}

    def legs(self, nbytes: float, engine: EngineTraits) -> Route:
        """Return the route of one wire of ``nbytes`` bytes.

        The route of a user's class is one leg by ``communicate``, which counts as an all-reduce if it sums and as an
        all-gather if not; or a leg of a header alone, if the class moves payloads itself."""
        if self.moves_payloads:
            return [Leg(ALL_GATHER, Carries.HEADERS)]
        counted_as = ALL_REDUCE if self.sums else ALL_GATHER
        return [Leg(dataclasses.replace(counted_as, start=self._communicate), Carries.GRADIENTS)]

    def _communicate(self, backend: Backend, wire: Tensor, root: int | None) -> Handle:
        """Call a user's ``communicate``, and check what it returns, and what its handle brings."""
        handle = self.communicate(wire)
        if not isinstance(handle, Handle):
            raise self.error(f"communicate() must return a grace.Handle, not a {type(handle).__name__}")

        def checked(received: object) -> object:
            if not isinstance(received, (list, tuple)) or len(received) not in (1, 1 if self.sums else backend.size):
                wanted = "one tensor, the sum" if self.sums else f"{backend.size} tensors, one per rank"
                raise self.error(f"the handle of communicate() must bring a list of {wanted}")
            dtype = kernels_of(wire).dtype(wire)
            for one in received:
                if kernels_of(check_shape(one, wire, "the handle of communicate()")).dtype(one) != dtype:
                    raise self.error(f"the handle of communicate() must bring tensors of the wire's dtype, {dtype}")
            return received

        return handle.map(checked)

    def route_of_wire(self, nbytes: float, engine: EngineTraits) -> Route:
        """Return :meth:`legs`; the default route if a class nearer to this one in the MRO defines ``communicate`` or
        moves payloads itself."""
        own = self.by_communicate or self.moves_payloads
        return Communicator.legs(self, nbytes, engine) if own else self.legs(nbytes, engine)

    @property
    def mean_compression(self) -> MeanCompression | None:
        """Compressor and memory of means; None if means are not compressed."""
        return None

    def rescale_mean_memory(self, loss_scale: float) -> None:
        """Rescale the memory of means to the units of this loss scale, which the next means have."""

    def use_leaders(self, leader_of: Sequence[int]) -> None:
        """Let one rank of each node take part from now on.

        Args:
            leader_of: for each of all ranks, the position of its node's leader among those that take part.
        """

    def on_resume(self, loss_scale: float) -> None:
        """Prepare for state that was loaded from a checkpoint, in the units of this loss scale."""

    def dense_communicator(self, shared: "Communicator") -> "Communicator":
        """Return the communicator of the variables that the compressor would not make smaller: ``shared``, which
        carries them all together."""
        return shared

    @property
    def stateful(self) -> bool:
        """True if a part keeps state between steps."""
        return self.compressor.stateful or self.memory.stateful

    @property
    def stateful_parts(self) -> dict[str, Component]:
        """Components and their parts that may keep state, by the names that it is saved under."""
        found: dict[int, tuple[str, Component]] = {}
        for kind, component in self.components.items():
            for name, part in component.named_components().items():
                # By state, since two components may hold the same part: it is saved once.
                found.setdefault(id(part.state), (f"{kind}.{name}" if name else kind, part))
        return dict(found.values())

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes for copies and pickles, which are in no run yet."""
        own = {"backend": LocalBackend(), "_by_hand": None, "uncompressed": None}
        return {**super().__getstate__(), **own}

    def bind(self, context: AnyContext, backend: Backend | None = None) -> None:
        """Join a run: set the context of both parts, and the backend."""
        super().bind(context)
        if backend is not None:
            self.backend, self.world_size = backend, backend.size

    def describe(self) -> str:
        """Return the specs of communicator, compressor and memory."""
        return f"{self.spec}, {self.compressor.spec}, {self.memory.spec}"

    @property
    def choice(self) -> str:
        """Description of the communicator that the user chose; another one if this carries the variables that the
        chosen one would not make smaller."""
        return self.companion_of or self.describe()

    # -- by hand ---------------------------------------------------------------------------------------

    @property
    def by_hand(self) -> Any:
        """Runner of the steps that the user calls by hand; see :class:`grace.session.by_hand.ByHand`."""
        if self._by_hand is None:
            self._by_hand = Communicator.by_hand_factory(self)
        return self._by_hand

    def step(self, tensors: Tensor | Sequence[Tensor], names: str | Sequence[str]) -> Tensor | list[Tensor]:
        """Exchange tensors in one blocking step, as in GRACE, and return the mean over ranks of the compressed tensors.

        The first step joins the run that ``grace.init()`` began; every rank must exchange the same names in the same
        order. In a ``tf.function`` the exchange is made whenever the graph runs.

        Args:
            tensors: a tensor of any shape, of float16, bfloat16, float32 or float64; or a list of such ones, of one
                dtype, that travel together.
            names: the tensor's name, under which memories keep state; or one name for each tensor.

        Returns:
            the mean, or the list of means, of the same dtype.

        Raises:
            ConfigError: the tensors cannot be exchanged, or ``grace.init()`` was not called in a run of several ranks;
                nothing was sent.
            RankError: ranks passed different tensors or names.
            PayloadError: a rank's payload cannot be decoded.
            StepError: ranks have made another number of steps.

        >>> import numpy as np
        >>> from grace.communicators import Allgather
        >>> Allgather("topk(ratio=0.5)").step(np.float32([4, 1]), "w")
        array([4., 0.], dtype=float32)
        """
        return self.by_hand.step(tensors, names)

    def send_step(self, tensors: Tensor | Sequence[Tensor], names: str | Sequence[str]) -> object:
        """Start a step without waiting for its payloads; :meth:`receive_step` ends it. Several may be under way; all of
        them end with the first that is received, in one step. Eager tensors only. For the arguments see :meth:`step`.

        Returns:
            a handle for :meth:`receive_step`.

        >>> import numpy as np
        >>> from grace.communicators import Allgather
        >>> communicator = Allgather("topk(ratio=0.5)")
        >>> begun = communicator.send_step(np.float32([4, 1]), "w")
        >>> communicator.receive_step(begun)
        array([4., 0.], dtype=float32)
        """
        return self.by_hand.start(tensors, names)

    def receive_step(self, begun: object) -> Tensor | list[Tensor]:
        """Return the means of the step that :meth:`send_step` began."""
        return self.by_hand.receive(begun)

    def state_dict(self, everyone: bool = False) -> dict[str, Any]:
        """Return the state that steps by hand left in memories and compressors, for ``torch.save`` or pickle.

        Args:
            everyone: True for the states of all ranks, for one file that rank 0 saves; every rank must call it then.

        Raises:
            ConfigError: there was no step yet.
        """
        return self.by_hand.state_dict(everyone)

    def load_state_dict(self, state: dict[str, Any], memory: str = "strict") -> None:
        """Restore the state that :meth:`state_dict` returned; every rank must call it.

        Args:
            state: the saved state.
            memory: "strict" refuses a state that does not fit, "keep" loads the values that fit, "reset" starts with
                empty memories.

        Raises:
            ConfigError: it is no such state, or it does not fit; nothing was changed.
            RankError: it was refused on another rank, or the ranks load different ones.
        """
        self.by_hand.load_state_dict(state, memory)


CompressorArg = Spec | Compressor | Communicator
"""Compressor as users give it: a spec or an object; or, as in GRACE, a communicator, which holds a compressor."""
MemoryArg = Spec | Memory
"""Memory as users give it: a spec or an object."""
CommunicatorArg = Spec | Communicator
"""Communicator as users give it: a spec or an object."""
ASYNC_METHODS = ("async_send", "wait_receive")
TRANSFER_METHODS = (("begin",), ("legs",), ("communicate",), ("send_receive",), ASYNC_METHODS)
"""The groups of methods by which a class may move payloads. The group of the nearest class in the MRO is used."""


def _transfer_methods(cls: type[Communicator]) -> tuple[str, ...]:
    """Return the group of methods by which a class moves payloads.

    Raises:
        ConfigError: the class defines none of them, half of a group, or one that does not fit its base.
    """
    bases = cls.__mro__[: cls.__mro__.index(Communicator)]
    for base in bases:
        for methods in TRANSFER_METHODS:
            if not any(name in vars(base) for name in methods):
                continue
            lacking = [name for name in methods if getattr(cls, name) is getattr(Communicator, name, None)]
            if lacking:
                raise ConfigError(f"{cls.__name__} defines one of {' and '.join(methods)}, and lacks {lacking[0]}()")
            # The last two groups move single payloads, which a piecewise base, or one that sums buckets, cannot follow.
            if methods in TRANSFER_METHODS[3:] and (cls.sums or cls.piecewise or cls.rooted or cls.begin is not None):
                raise ConfigError(
                    f"{cls.__name__} defines {methods[0]}(), and its base moves whole buckets: derive it from "
                    "grace.Communicator"
                )
            return methods
    raise ConfigError(
        f"{cls.__name__} does not say how payloads move: define communicate(wire), which starts moving a whole bucket, "
        "or send_receive(tensors, ctx, name), or async_send(tensors, name) and wait_receive(handles, ctx, name), which "
        "move one variable's payload"
    )
