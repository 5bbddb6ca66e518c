"""What the user chose: one method for all variables, or a strategy."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from grace.communicators.base import Communicator
from grace.core.backend import Backend
from grace.core.registry import make
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.pieces import Piece, uniform

STRATEGY = "GRACE_STRATEGY"
"""Where ``grace launch --strategy`` says which file."""


class Choices(NamedTuple):
    """What the user gave: specs, objects, or None where nothing was said."""

    compressor: Any = None
    memory: Any = None
    communicator: Any = None
    strategy: Any = None

    def plan(
        self,
        group_bytes: int | None = None,
        together: Callable[[], Sequence[Sequence[str]] | None] = lambda: None,
        sparse_known: bool = True,
    ) -> Plan:
        """What is meant.

        Args:
            group_bytes: bytes of gradient that travel in one collective, where no strategy says it.
            together: names of variables that may share a collective, likewise.
            sparse_known: whether the variables tell which gradients are sparse; else a strategy does.

        Raises:
            ConfigError: a strategy, and one method for all as well.
        """
        strategy = self.strategy
        given = [key for key in ("compressor", "memory", "communicator") if getattr(self, key) is not None]
        source = "strategy="
        if strategy is None and os.environ.get(STRATEGY):
            strategy, source = os.environ[STRATEGY], f"the strategy of {STRATEGY} ({os.environ[STRATEGY]})"
        if strategy is None:
            return Uniform(self.compressor, self.memory, self.communicator, group_bytes, together)
        if given:
            raise ConfigError(
                f"{source} says how each variable is exchanged, and {given[0]}= for all of them: leave one of them out"
            )
        from grace.strategy.execution import Executed

        return Executed(strategy, sparse_known)


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
    name, parameters = _communicator_spec(chosen.traits.communicator if communicator is None else communicator)
    from grace.core.registry import known

    if name not in known("communicator"):
        make("communicator", name)  # raises, naming what is known
    cls: Any = known("communicator")[name]
    return cls(chosen, memory, **parameters)


def _communicator_spec(spec: Any) -> tuple[str, dict[str, Any]]:
    from grace.core import specs

    return specs.parse(spec)


class Plan(Protocol):
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

    def pieces(self, variables: Sequence[Variable]) -> list[Piece]:
        """How they are cut, and what carries each piece."""
        ...

    def options(self) -> dict[str, Any]:
        """The choice, as DistributedOptimizer takes it again."""
        ...


class Uniform:
    """One compressor, memory and communicator for all variables.

    Args:
        compressor, memory, communicator: as the user gave them.
        group_bytes: bytes of gradient that travel in one collective; None for all that there are.
        together: names of variables that may share a collective; asked for once the variables are known.
    """

    def __init__(
        self,
        compressor: Any,
        memory: Any,
        communicator: Any,
        group_bytes: int | None = None,
        together: Callable[[], Sequence[Sequence[str]] | None] = lambda: None,
    ):
        self.choices, self.group_bytes, self.together = (compressor, memory, communicator), group_bytes, together
        self.name, self.strategy = "", None
        self.communicator: Communicator | None = None

    def hand_out(
        self, variables: list[Variable], backend: Backend, error: Exception | None, later: bool
    ) -> list[Variable]:
        """Nothing: every rank was given the same."""
        return variables

    def pieces(self, variables: Sequence[Variable]) -> list[Piece]:
        """Whole variables: by the communicator what its compressor shrinks, and the others dense."""
        self.communicator = self._made()
        self.name = self.communicator.describe()
        return uniform(variables, self.communicator, self.group_bytes, self.together())

    def _made(self) -> Communicator:
        return build_communicator(*self.choices) if self.communicator is None else self.communicator

    def options(self) -> dict[str, Any]:
        """The three, as dict specs."""
        chosen = self._made()
        parts = {"compressor": chosen.compressor, "memory": chosen.memory, "communicator": chosen}
        return {kind: part.to_dict() for kind, part in parts.items()}
