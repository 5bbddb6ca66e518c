"""Bytes that a strategy sends, by part and by rank; headers are not counted."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from grace.core.route import Carries, EngineTraits, Leg
from grace.core.variable import Variable
from grace.exchange.bucket import Bucket
from grace.exchange.route_bytes import LegBytes, predict_bytes
from grace.session.sharding import Chooser
from grace.strategy.plan import ShardPlan, Strategy, communicator_of


class PayloadBytes(NamedTuple):
    """Bytes of one part's payload; an upper bound where they depend on the data."""

    nbytes: int
    exact: bool


def legs_of(part: ShardPlan, variable: Variable, world: int) -> list[LegBytes]:
    """Return the legs of a part on so many ranks, and their bytes.

    For a part that ranks train alone they are those of a round. A part that its compressor would not shrink is summed,
    dense.
    """
    if part.rounds is not None:
        variable = replace(variable, sparse=False)  # drifts are dense
    carrier = Chooser()(variable, communicator_of(part))
    return predict_bytes(Bucket(0, carrier, [variable]), EngineTraits(world), headers=False)


def collectives_of(part: ShardPlan) -> list[str]:
    """Return the names of the collectives by which a part's communicator is counted."""
    return [leg.collective.name for leg in communicator_of(part).route_of_wire(math.inf, EngineTraits())]


def payload_bytes(part: ShardPlan, variable: Variable, world: int) -> PayloadBytes:
    """Return the bytes of one rank's payload of a part.

    >>> payload_bytes(ShardPlan(compressor="fp16"), Variable("w", (10, 4)), 2)
    PayloadBytes(nbytes=80, exact=True)
    """
    own = (Carries.GRADIENTS, Carries.ROUND)
    nbytes = sum(nbytes for leg, nbytes, _ in legs_of(part, variable, world) if leg.carries in own)
    dense = not variable.sparse or part.rounds is not None
    known = dense and communicator_of(part).compressor.wire_bits(variable.shape) is not None
    return PayloadBytes(math.ceil(nbytes), known)


def bytes_by_rank(strategy: Strategy) -> tuple[dict[int, float], float]:
    """Return the bytes that each root of a rooted collective sends in a step, by its rank, and those that each other
    rank sends. Each rank receives as many bytes as it sends.

    >>> from grace.strategy import VariablePlan, Sync
    >>> part = ShardPlan(Sync("reduce_broadcast", destination=7))
    >>> bytes_by_rank(Strategy((VariablePlan(Variable("w", (25,)), (part,)),), world_size=10**9))
    ({7: 99999999900.0}, 100.0)
    """
    world = strategy.world_size
    usual = 0.0
    more: dict[int, float] = {}
    for leg, nbytes in _legs(strategy):
        other = leg.sent(nbytes, world, rank=-1)  # of a rank that is no root
        usual += other
        if leg.root is not None:
            more[leg.root] = more.get(leg.root, 0.0) + leg.sent(nbytes, world, leg.root) - other
    return {rank: usual + extra for rank, extra in sorted(more.items())}, usual


def _legs(strategy: Strategy) -> Iterator[tuple[Leg, float]]:
    """Yield the legs of all parts, and the bytes of a rank's buffer in each, as many as in a step on average."""
    for plan in strategy.plans:
        for part, variable in zip(plan.parts, plan.part_variables(), strict=True):
            for leg, nbytes, _ in legs_of(part, variable, strategy.world_size):
                yield leg, nbytes / (1 if part.rounds is None else part.rounds.period)
