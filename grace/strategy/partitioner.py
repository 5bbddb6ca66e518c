"""Base of builders that partition variables: each is cut into shards along an axis."""

from collections.abc import Callable
from dataclasses import dataclass

from grace.core.variable import Variable, equal_sizes
from grace.strategy.builder import Builder
from grace.strategy.plan import ShardPlan, VariablePlan


def smallest_divisor(n: int) -> int:
    """Return the smallest divisor of n that is at least 2; n itself for primes.

    >>> [smallest_divisor(n) for n in (2, 9, 13, 12)]
    [2, 3, 13, 2]
    """
    return next((d for d in range(2, int(n**0.5) + 1) if n % d == 0), n)


def smallest_nondivisor(n: int) -> int:
    """Return the smallest number of at least 2 that does not divide n.

    >>> [smallest_nondivisor(n) for n in (2, 9, 12)]
    [3, 2, 5]
    """
    return next(d for d in range(2, n + 2) if n % d)


@dataclass
class Partitioner(Builder):
    """Builder that partitions variables.

    Args:
        max_shards: a variable that would have more shards is not cut.
        min_shard_bytes: a variable whose shards would be smaller is not cut.
    """

    max_shards: int = 32
    min_shard_bytes: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_integer("max_shards", 1)
        self.check_integer("min_shard_bytes", 0)

    def count(self, n: int) -> int:
        """Return the number of shards of a dimension."""
        return smallest_divisor(n)

    def cut(self, variable: Variable, part_for: Callable[[Variable], ShardPlan], axis: int = 0) -> VariablePlan:
        """Return the variable cut along an axis into ``count(dimension)`` shards, or uncut where the caps say so.

        ``part_for`` is called for each shard, in order, with the shard as a variable of its own.
        """
        n = variable.shape[axis] if axis < len(variable.shape) else 0
        shards = self.count(n) if n >= 2 else 0
        if not 2 <= shards <= min(n, self.max_shards) or variable.nbytes < shards * self.min_shard_bytes:
            return VariablePlan(variable, (part_for(variable),))
        sizes = equal_sizes(n, shards)
        parts = VariablePlan(variable, (ShardPlan(),) * shards, axis, sizes).part_variables()
        return VariablePlan(variable, tuple(part_for(part) for part in parts), axis, sizes)
