"""UnevenPartitionedPS: shards of unequal sizes, spread over ranks by load."""

from dataclasses import dataclass

from grace.strategy.builders.partitioned_ps import PartitionedPS
from grace.strategy.partitioner import smallest_nondivisor


@dataclass
class UnevenPartitionedPS(PartitionedPS):
    """Cuts axis 0 into the smallest number of at least 2 that does not divide the dimension; the first shards get
    the remainder. Each goes to the rank with the fewest bytes so far.

    Args:
        max_shards, min_shard_bytes: a variable whose shards would be more, or smaller, stays whole.
        sync, staleness, local_replication, ahead: as in a strategy's ``sync``.

    >>> from grace.strategy.builder import OneNode
    >>> from grace.core.variable import Variable
    >>> (plan,) = UnevenPartitionedPS(min_shard_bytes=0).build([Variable("w", (10, 2))], OneNode(2)).plans
    >>> plan.sizes, [part.sync.destination for part in plan.parts]
    ((4, 3, 3), [0, 1, 1])
    """

    name = "uneven_partitioned_ps"

    def count(self, n):
        return smallest_nondivisor(n)
