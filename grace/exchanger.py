"""The exchanger: plans the groups of one model, and runs a step's exchanges in one fixed order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from grace.agreement import agree
from grace.backend import Backend
from grace.communicator import Communicator
from grace.communicators import Allreduce
from grace.component import Component, Context
from grace.compressor import Tensor
from grace.errors import ConfigError
from grace.exchange import Exchange, Group, Outcome, Traffic
from grace.memory import Memory
from grace.registry import make
from grace.rows import RowAllgather
from grace.variable import Variable

FIRST_GROUP_BYTES = 1 << 20
"""Where there are several groups, the one that is ready first is small, so that the engine starts early."""


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
    from grace.registry import known

    if name not in known("communicator"):
        make("communicator", name)  # raises, naming what is known
    cls: Any = known("communicator")[name]
    return cls(chosen, memory, **parameters)


def _communicator_spec(spec: Any) -> tuple[str, dict[str, Any]]:
    from grace import specs

    return specs.parse(spec)


class Exchanger:
    """Assigns variables to groups, and exchanges them step by step.

    Variables that the compressor would not shrink ride dense, together. Groups hold up to ``group_bytes`` of
    gradient (the first of several 1 MiB), in reverse order of declaration, as backward produces them; those with the
    earliest complete gradients come first. All ranks start group 0, 1, 2, ... in that order whatever becomes
    ready first.

    Args:
        variables: in declaration order; names are unique.
        communicator: for all that it shrinks.
        backend: the engine.
        context: shared by all components.
        group_bytes: bytes of gradient per group.
        parts: names of variables that may share a group; all may, if left out.
    """

    def __init__(
        self,
        variables: Sequence[Variable],
        communicator: Communicator,
        backend: Backend,
        context: Context,
        group_bytes: int,
        parts: Sequence[Sequence[str]] | None = None,
    ):
        self.variables, self.communicator, self.backend, self.context = (
            list(variables),
            communicator,
            backend,
            context,
        )
        self.dense = Allreduce("none")
        context.rank, context.size = backend.rank, backend.size
        for part in (communicator, self.dense):
            part.bind(context, backend)
        shapes = {variable.name: variable.shape for variable in self.variables if variable.sparse}
        if shapes:
            self.sparse = RowAllgather(communicator.compressor, communicator.memory, shapes)
            self.sparse.bind(context, backend)
        self.traffic = Traffic()
        self.settings: list[tuple[str, str]] = []
        self.groups = self._plan(group_bytes, parts)
        self.numel = sum(variable.numel for variable in self.variables)
        self._begun: list[Exchange] = []
        self._overflow = False

    @property
    def components(self) -> dict[str, Component]:
        """The parts that keep state, by kind."""
        return self.communicator.components

    # -- planning --------------------------------------------------------------------------------------

    def choose(self, variable: Variable) -> Communicator:
        """The communicator for one variable: the user's if it shrinks the gradient, else dense."""
        if variable.sparse:
            return self.sparse
        traits = self.communicator.compressor.traits
        if traits.exact:
            return self.communicator
        bits = self.communicator.compressor.wire_bits(variable.shape)
        if variable.numel == 0 or (bits is not None and bits >= variable.bits):
            return self.dense
        return self.communicator

    def _plan(self, group_bytes: int, parts: Sequence[Sequence[str]] | None) -> list[Group]:
        position = {variable.name: i for i, variable in enumerate(self.variables)}
        part_of = {name: i for i, names in enumerate(parts or []) for name in names}
        kinds: dict[Any, tuple[Communicator, list[list[Variable]]]] = {}
        several = sum(variable.nbytes for variable in self.variables) > group_bytes
        first = min(group_bytes, FIRST_GROUP_BYTES) if several else group_bytes
        for variable in reversed(self.variables):
            communicator = self.choose(variable)
            exact = communicator.compressor.traits.exact
            dtype = variable.dtype if exact and not communicator.memory.stateful else "float32"
            key = (id(communicator), dtype, variable.device, part_of.get(variable.name))
            _, groups = kinds.setdefault(key, (communicator, []))
            limit: float = first if len(groups) == 1 else group_bytes
            if variable.sparse:  # its rows are few, whatever the variable's size
                limit = math.inf
            if not groups or sum(v.nbytes for v in groups[-1]) + variable.nbytes > limit:
                groups.append([])
            groups[-1].append(variable)
        ordered = sorted(
            ((communicator, members[::-1]) for communicator, groups in kinds.values() for members in groups),
            key=lambda item: -position[item[1][0].name],
        )
        return [Group(index, communicator, members) for index, (communicator, members) in enumerate(ordered)]

    def agree(self) -> None:
        """Compare with the other ranks what this one is about to do.

        Raises:
            RankError: they differ; the message names the first difference.
        """
        agree(self.backend, [*self.settings, *self.facts()])

    def facts(self) -> list[tuple[str, str]]:
        """What all ranks must agree on."""
        facts = [("the seed", str(self.context.seed)), ("the communicator", self.communicator.describe())]
        facts += [(f"variable {v.name!r}", v.describe()) for v in self.variables]
        facts += [("the groups", str([[v.name for v in group.variables] for group in self.groups]))]
        return facts

    # -- a step ----------------------------------------------------------------------------------------

    def start(self, group: Group, gradients: Sequence[Tensor], present: Sequence[bool]) -> Exchange:
        """Begin the exchange of one group. Groups must be started in order, each once a step."""
        exchange = group.communicator.begin(group, gradients, present, self.communicator.stateful, self.traffic)
        self._begun.append(exchange)
        return exchange

    def finish(self, outs: Callable[[Group], Sequence[Tensor | None]]) -> list[Outcome]:
        """Await all exchanges begun, in order, and end the step: commit state, or roll it back."""
        while any([exchange.advance() for exchange in self._begun]):
            pass
        outcomes = []
        for exchange in self._begun:
            outcomes += exchange.finish(outs(exchange.group))
        self.settle(outcomes)
        return outcomes

    def under_way(self, group: Group) -> bool:
        """Whether the group's exchange was begun and not finished."""
        return any(exchange.group is group for exchange in self._begun)

    def settle(self, outcomes: Sequence[Outcome]) -> None:
        """All exchanges begun are finished, and brought this: end the step."""
        self._begun = []
        self.end_step(outcomes)

    def end_step(self, outcomes: Sequence[Outcome], keep: bool = True) -> None:
        """Commit the state that this step changed; roll it back if any variable overflowed on any rank.

        A variable that no rank had a gradient for keeps its state as well."""
        keep = keep and not any(outcome.overflow for outcome in outcomes)
        for component in self.components.values():
            for outcome in outcomes:
                if outcome.value is None:
                    component.state.rollback(outcome.variable.name)
            if keep:
                component.state.commit()
            else:
                component.state.rollback()
        self.context.step += 1
        self.traffic.steps += 1
        self.traffic.elements += self.numel

    def discard(self) -> None:
        """Complete the exchanges begun and forget them, state included."""
        while any([exchange.advance() for exchange in self._begun]):
            pass
        for exchange in self._begun:
            exchange.wait()
        self._begun = []
        self.end_step([], keep=False)

    def abandon(self) -> None:
        """Forget the exchanges begun, which the engine has given up, and what they changed."""
        self._begun = []
        for component in self.components.values():
            component.state.rollback()

    def share(self, root: int) -> None:
        """Give every rank the root's step counter, loss scale, and state of the parts whose state all ranks share."""
        shared = {kind: part for kind, part in self.components.items() if part.shared_state}
        mine = (self.context.step, self.context.loss_scale, {kind: dict(part.state) for kind, part in shared.items()})
        answers = self.backend.allgather_object(mine if self.backend.rank == root else None)
        self.context.step, self.context.loss_scale, states = answers[root]
        for kind, part in shared.items():
            part.state.clear()
            part.state.update(states[kind])
            part.state.commit()

    def rescale(self, loss_scale: float) -> None:
        """The loss scale is now this: memories follow."""
        if loss_scale != self.context.loss_scale:
            for component in self.components.values():
                if isinstance(component, Memory):
                    component.rescale(loss_scale / self.context.loss_scale)
            self.context.loss_scale = loss_scale


def build_exchanger(
    variables: Callable[[], Sequence[Variable]],
    choices: tuple[Any, Any, Any],
    backend: Backend,
    context: Context,
    group_bytes: int,
    settings: Sequence[tuple[str, str]] = (),
    check: Callable[[Communicator], None] = lambda communicator: None,
    parts: Callable[[], Sequence[Sequence[str]] | None] = lambda: None,
    later: bool = False,
) -> Exchanger:
    """Check everything on this rank, then compare it with the others: either every rank goes on or none.

    Args:
        variables: lists the variables, or raises what is wrong with them.
        choices: compressor, memory and communicator as the user gave them.
        check: raises if this communicator does not suit the run.
        parts: names of variables that may share a group, asked for after ``variables``.
        later: no collective now; the ranks compare when somebody calls the exchanger's ``agree()``.
        settings: further (what, value) facts that all ranks must share.

    Raises:
        ConfigError: this rank's choices or variables are wrong.
        RankError: another rank's are, or they differ.
    """
    exchanger: Exchanger | None = None
    try:
        communicator = build_communicator(*choices)
        check(communicator)
        exchanger = Exchanger(variables(), communicator, backend, context, group_bytes, parts())
        exchanger.settings = list(settings)
    except Exception as error:
        if not later:
            agree(backend, [], error)
        raise
    if not later:
        exchanger.agree()
    return exchanger
