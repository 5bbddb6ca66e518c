"""How each variable is exchanged: the contract of plans, and the plan of one method for all."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from grace.communicators.base import Communicator, build_communicator
from grace.core.backend import Backend
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

    def shards(self, variables: Sequence[Variable]) -> list[Shard]:
        """How they are cut, and what carries each shard."""
        ...

    def options(self) -> dict[str, Any]:
        """The choice, as DistributedOptimizer takes it again."""
        ...


class UniformPlan:
    """One compressor, memory and communicator for all variables.

    Args:
        compressor, memory, communicator: as the user gave them.
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

    def shards(self, variables: Sequence[Variable]) -> list[Shard]:
        """Whole variables: by the communicator what its compressor shrinks, and the others dense."""
        self.communicator = self._made()
        self.name = self.communicator.describe()
        return uniform(variables, self.communicator, self.limits, self.together())

    def _made(self) -> Communicator:
        return build_communicator(*self.choices) if self.communicator is None else self.communicator

    def options(self) -> dict[str, Any]:
        """The three, as dict specs."""
        chosen = self._made()
        parts = {"compressor": chosen.compressor, "memory": chosen.memory, "communicator": chosen}
        return {kind: part.to_dict() for kind, part in parts.items()}
