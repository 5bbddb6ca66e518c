"""The communicator contract: one compressor, one memory, and the collective that carries payloads."""

import warnings
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from grace.core import specs
from grace.core.backend import Backend, Handle, LocalBackend
from grace.core.component import Component
from grace.core.compressor import Compressor, Tensor
from grace.core.context import Context
from grace.core.memory import Memory
from grace.core.registry import known, legal_communicators, legal_memories, make
from grace.core.variable import Variable
from grace.errors import ConfigError, PayloadError, StepError
from grace.exchange.background import ExchangeThread
from grace.exchange.base import Exchange
from grace.exchange.bucket import Bucket, Contribution, Traffic
from grace.kernels import kernels_of


class Nodes(Protocol):
    """The ranks of this one's node, and the leaders of all nodes; see :class:`grace.backends.topology.NodeGroups`."""

    node: Backend
    first: int
    leaders: Backend | None
    leader_of: list[int]


class Run(Protocol):
    """What a communicator may ask of the exchanger that it serves."""

    backend: Backend

    def exchange_thread(self) -> ExchangeThread: ...

    def node_groups(self, backend: Backend, leader: int) -> Nodes: ...


class Communicator(Component):
    """Composes a compressor and a memory, and moves payloads. Write ``communicate``.

    ``communicate(wire) -> Handle``: start sending the 1-d tensor ``wire`` and receiving what the
    aggregate is made of; the handle's result is a list of tensors like ``wire`` whose decoded sum is
    the sum over all ranks: one per rank, or a single one that is already the sum.

    ``sums`` says which: with ``sums = True`` the wire has the payload's own dtype and the engine adds
    it up, so the compressor's payload must be summable; otherwise it is bytes (uint8).

    Args:
        compressor: a compressor, or its spec.
        memory: a memory or its spec; the compressor's default if left out.

    Raises:
        ConfigError: the parts do not go together; the message names what does.

    >>> from grace.communicators import Allgather
    >>> Allgather("topk(ratio=0.01)").describe()
    'allgather, topk, residual'
    """

    kind = "communicator"
    sums: ClassVar[bool] = False
    gathers: ClassVar[bool] = False
    """Whether ``communicate`` is the engine's all-gather, which may take payloads of unequal sizes."""
    cost: ClassVar[str] = ""
    """What one exchange costs a rank, for a payload of p bytes and W ranks; for people."""

    def __init__(self, compressor: Any = "none", memory: Any = None):
        self.compressor: Compressor = make("compressor", compressor)
        traits = self.compressor.traits
        self.memory: Memory = make("memory", traits.memory if memory is None else memory)
        self.backend: Backend = LocalBackend()
        self.bind(self.context)
        self._check()

    def communicate(self, wire: Tensor) -> Handle:
        """Start the collective for this rank's ``wire``; see the class."""
        raise TypeError(f"{type(self).__name__} must define communicate(wire)")

    @classmethod
    def accepts(cls, compressor: Compressor) -> str | None:
        """Why this communicator cannot carry the compressor's payloads; None if it can."""
        traits = compressor.traits
        if cls.sums and not traits.summable:
            return "its payloads cannot be summed by the engine"
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
                f"Legal communicators for {self.compressor.name}: {legal}"
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

    @property
    def components(self) -> dict[str, Component]:
        """The parts that keep state themselves or in parts of theirs, by the name they are saved under."""
        return {"compressor": self.compressor, "memory": self.memory}

    def begin(self, contribution: Contribution) -> Exchange:
        """Start the exchange of a bucket."""
        return Exchange(contribution)

    @property
    def delayed(self) -> bool:
        """Whether what a step exchanges is applied in a later one; it then keeps its state by itself."""
        return False

    def use_leaders(self, leader_of: Sequence[int]) -> None:
        """One rank of each node takes part from now on: the number of the one that speaks for each of all ranks."""

    def open(self, exchanger: Run) -> None:
        """All ranks have agreed and are about to start; every rank comes here at the same moment."""

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
        return {**super().__getstate__(), "backend": LocalBackend()}

    def bind(self, context: Context, backend: Backend | None = None) -> None:
        """Join a run: hand the context to both parts and remember the engine."""
        super().bind(context)
        if backend is not None:
            self.backend = backend

    def describe(self) -> str:
        """Communicator, compressor and memory as specs."""
        return f"{self.spec}, {self.compressor.spec}, {self.memory.spec}"

    def step(self, tensor: Tensor, name: str) -> Tensor:
        """One blocking exchange of one tensor, GRACE's way; returns the aggregate, and commits the state.

        Raises:
            ConfigError: it is no tensor of floating point numbers; nothing was sent.
            PayloadError: what a rank sent cannot be decoded.
            StepError: ranks have exchanged another number of tensors.

        >>> import numpy as np
        >>> from grace.communicators import Allgather
        >>> Allgather("topk(ratio=0.5)").step(np.float32([4, 1]), "w")
        array([4., 0.], dtype=float32)
        """
        pass
        try:
            k = kernels_of(tensor)
            tensor = k.given(tensor)
        except (TypeError, ConfigError) as error:
            raise ConfigError(f"cannot exchange {name!r}: {error}") from None
        bucket = Bucket(0, self, [Variable(name, tuple(tensor.shape), k.dtype(tensor))])
        exchange = self.begin(Contribution(bucket, [tensor], [True], self.stateful, Traffic()))
        while exchange.advance():
            pass
        try:
            (outcome,) = exchange.finish([None])
            if exchange.astray:
                raise StepError(exchange.astray)
        except (PayloadError, StepError):
            for part in self.keepers.values():
                part.state.rollback()
            raise
        for part in self.keepers.values():
            part.state.rollback() if outcome.overflow else part.state.commit()
        self.context.step += 1
        return k.cast(outcome.value, k.dtype(tensor))


def build_communicator(compressor: Any, memory: Any, communicator: Any) -> Communicator:
    """The communicator that the user's three choices mean; each is a spec, an object or None (default).

    Raises:
        ConfigError: unknown names or parameters, or parts that do not go together.

    >>> build_communicator("topk", None, None).describe()
    'allgather, topk, residual'
    """
    if isinstance(communicator, Communicator):
        if compressor is not None or memory is not None:
            raise ConfigError("the communicator object holds its compressor and memory; do not pass them as well")
        return communicator
    chosen: Any = make("compressor", "none" if compressor is None else compressor)
    name, parameters = specs.parse(chosen.traits.communicator if communicator is None else communicator)
    if name not in known("communicator"):
        make("communicator", name)  # raises, naming what is known
    cls: Any = known("communicator")[name]
    return cls(chosen, memory, **parameters)
