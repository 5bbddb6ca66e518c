"""Exchange plans: the contract, and the plan with one method for all variables."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

from grace.communicators.choice import build_communicator
from grace.core.backend import Backend
from grace.core.communicator import Communicator, CommunicatorArg, CompressorArg, MemoryArg
from grace.core.outer import Outer
from grace.core.variable import Variable
from grace.session.bucket_limits import Limits
from grace.session.sharding import Shard, uniform


class ExchangePlan(abc.ABC):
    """The user's choice of how each variable is exchanged."""

    name: str = ""
    """Name of the choice, for messages and checkpoints. Set by :meth:`shards`."""
    strategy: Any = None
    """The strategy that is executed; None if the plan is none."""

    def broadcast_plan(
        self, variables: list[Variable], backend: Backend, error: Exception | None, elastic: bool
    ) -> list[Variable]:
        """Broadcast the plan to all ranks before any other collective. The default is for plans that follow from the
        user's arguments, which every rank has.

        Args:
            variables: the variables of this rank.
            backend: the ranks.
            error: the error of this rank so far, if it failed.
            elastic: True if ranks may join and leave: no collective may run now.

        Returns:
            the variables, with facts that the plan corrects.
        """
        return variables

    @abc.abstractmethod
    def shards(self, variables: Sequence[Variable], ranks: int = 1) -> list[Shard]:
        """Return the shards of variables, with their communicators.

        Args:
            variables: the variables in declaration order.
            ranks: number of ranks that exchange with each other, for defaults that depend on it; 1 if it is unknown
                yet, or may change.
        """

    @abc.abstractmethod
    def options(self) -> dict[str, Any]:
        """Return the choice as arguments of DistributedOptimizer."""


class UniformPlan(ExchangePlan):
    """Plan of one compressor, memory and communicator for all variables.

    Args:
        compressor, memory, communicator: the user's arguments; a communicator that is not named is chosen by the
            number of ranks (:func:`~grace.communicators.choice.break_even`).
        limits: limits of a bucket; None for one bucket of all variables.
        together: returns names of variables that may share a collective; called once the variables are known.
        outer: the settings of rounds, if ranks train alone.
    """

    def __init__(
        self,
        compressor: CompressorArg | None,
        memory: MemoryArg | None,
        communicator: CommunicatorArg | None,
        limits: Limits | None = None,
        together: Callable[[], Sequence[Sequence[str]] | None] = lambda: None,
        outer: Outer | None = None,
    ):
        self.choices = compressor, memory, communicator
        self.limits = limits
        self.together = together
        self.outer = outer
        self.communicator: Communicator | None = None

    def shards(self, variables: Sequence[Variable], ranks: int = 1) -> list[Shard]:
        """Return a shard for each whole variable: compressed if the compressor makes it smaller, else dense."""
        self.communicator = self._build(ranks)
        self.name = self.communicator.describe() + ("" if self.outer is None else f", {self.outer.describe()}")
        return uniform(variables, self.communicator, self.limits, self.together(), self.outer)

    def _build(self, ranks: int = 1) -> Communicator:
        return build_communicator(*self.choices, ranks) if self.communicator is None else self.communicator

    def options(self) -> dict[str, Any]:
        """Return the three parts as dict specs; None for a communicator that the user did not name."""
        chosen = self._build()
        named = None if chosen.by_default else chosen
        parts = {"compressor": chosen.compressor, "memory": chosen.memory, "communicator": named}
        options: dict[str, Any] = {kind: None if part is None else part.to_dict() for kind, part in parts.items()}
        if self.outer is not None:
            options |= {"outer": self.outer.to_dict()["optimizer"], "period": self.outer.period}
        return options
