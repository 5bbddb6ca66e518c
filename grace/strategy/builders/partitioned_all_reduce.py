"""PartitionedAllReduce: equal shards, each its own all-reduce."""

from dataclasses import dataclass
from itertools import count

from grace.strategy.partitioner import Partitioner


@dataclass
class PartitionedAllReduce(Partitioner):
    """PartitionedPS's shards, each by a collective of its own; group = running number of the shard // chunk_size.

    Args:
        chunk_size: shards that travel together.

    >>> from grace.strategy.builder import OneNode
    >>> from grace.core.variable import Variable
    >>> builder = PartitionedAllReduce(chunk_size=2, min_shard_bytes=0)
    >>> strategy = builder.build([Variable("w", (9, 2)), Variable("b", (4,))], OneNode(2))
    >>> [[part.sync.group for part in plan.parts] for plan in strategy.plans]
    [[0, 0, 1], [1, 2]]
    """

    chunk_size: int = 128

    name = "partitioned_all_reduce"

    def __post_init__(self):
        super().__post_init__()
        self.check_integer("chunk_size", 1)

    def build(self, variables, resources):
        running = count()
        plans = [self.cut(v, lambda p: self.collective(p, next(running) // self.chunk_size)) for v in variables]
        return self.strategy(plans, resources)
