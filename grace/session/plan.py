"""How each variable is exchanged: the contract of plans, and the plan of one method for all."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from grace.communicators.choice import build_communicator
from grace.core.backend import Backend
from grace.core.communicator import Communicator
from grace.core.variable import Variable
from grace.session.bucketing import Limits
from grace.session.sharding import Shard, uniform


class ExchangePlan(Protocol):
    """What the user chose: how each variable is exchanged."""

    name: str
    """For messages and checkpoints."""
    strategy: Any
    """The strategy that is executed, if it is one."""

    def hand_out(
        self, variables: list[Variable], backend: Backend, error: Exception | None, later: bool
    ) -> list[Variable]:
        """A collective before anything else, if one is needed; ``error`` is what went wrong on this rank so far.

        Returns:
            the variables, with what the plan knows better.
        """
        ...

    def shards(self, variables: Sequence[Variable], ranks: int = 1) -> list[Shard]:
        """How they are cut, and what carries each shard.

        Args:
            variables: in declaration order.
            ranks: how many exchange with each other, for defaults that depend on it; 1 where that is not known yet, or
                changes.
        """
        ...

    def options(self) -> dict[str, Any]:
        """The choice, as DistributedOptimizer takes it again."""
        ...


class UniformPlan:
    """One compressor, memory and communicator for all variables.

    Args:
        compressor, memory, communicator: as the user gave them; a communicator that is not named is chosen by the
            number of ranks (:func:`~grace.communicators.choice.break_even`).
        limits: of what travels in one collective; None for all that there is.
        together: names of variables that may share a collective; asked for once the variables are known.
    """

    def __init__(
        self,
        compressor: Any,
        memory: Any,
        communicator: Any,
        limits: Limits | None = None,
        together: Callable[[], Sequence[Sequence[str]] | None] = lambda: None,
    ):
        self.choices, self.limits, self.together = (compressor, memory, communicator), limits, together
        self.name, self.strategy = "", None
        self.communicator: Communicator | None = None

    def hand_out(
        self, variables: list[Variable], backend: Backend, error: Exception | None, later: bool
    ) -> list[Variable]:
        """Nothing: every rank was given the same."""
        return variables

    def shards(self, variables: Sequence[Variable], ranks: int = 1) -> list[Shard]:
        """Whole variables: by the communicator what its compressor shrinks, and the others dense."""
        self.communicator = self._made(ranks)
        self.name = self.communicator.describe()
        return uniform(variables, self.communicator, self.limits, self.together())

    def _made(self, ranks: int = 1) -> Communicator:
        return build_communicator(*self.choices, ranks) if self.communicator is None else self.communicator

    def options(self) -> dict[str, Any]:
        """The three, as dict specs; None for a communicator that was not named."""
        chosen = self._made()
        named = None if chosen.by_default else chosen
        parts = {"compressor": chosen.compressor, "memory": chosen.memory, "communicator": named}
        return {kind: None if part is None else part.to_dict() for kind, part in parts.items()}
