"""PartitionedPS: equal shards of every variable, spread over ranks by load."""

from dataclasses import dataclass

from grace.strategy.builder import Loads
from grace.strategy.partitioner import Partitioner
from grace.strategy.ps_builder import PSBuilder


@dataclass
class PartitionedPS(PSBuilder, Partitioner):
    """Cuts axis 0 into the smallest divisor (of at least 2) of the dimension; each shard goes to the rank with the
    fewest bytes so far. The caps keep a prime dimension from becoming shards of one row: it stays whole.

    Args:
        max_shards, min_shard_bytes: the caps: a variable whose shards would be more, or smaller, stays whole.
        sync, staleness, local_replication, ahead: as in a strategy's ``sync``.

    >>> from grace.strategy.builder import OneNode
    >>> from grace.core.variable import Variable
    >>> (plan,) = PartitionedPS(min_shard_bytes=0).build([Variable("w", (9, 2))], OneNode(2)).plans
    >>> plan.sizes, [part.sync.destination for part in plan.parts]
    ((3, 3, 3), [0, 1, 0])
    """

    name = "partitioned_ps"

    def build(self, variables, resources):
        loads = Loads(resources)
        plans = [self.cut(v, lambda shard: self.reduced(shard, loads.assign(shard.nbytes))) for v in variables]
        return self.strategy(plans, resources)
