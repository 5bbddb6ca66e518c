"""RandomAxisPartitionAllReduce: shards along an axis that is drawn."""

import random
from dataclasses import dataclass
from itertools import count

from grace.strategy.partitioner import Partitioner


@dataclass
class RandomAxisPartitionAllReduce(Partitioner):
    """PartitionedAllReduce along an axis of size > 1 that is drawn per variable; axis 0 of sparse ones.

    Args:
        seed: the seed of the draws (Python's Mersenne Twister), so that every run builds the same strategy.
        chunk_size: shards that travel together.

    >>> from grace.strategy.builder import OneNode
    >>> from grace.core.variable import Variable
    >>> variables = [Variable(f"w{i}", (4, 1, 6)) for i in range(4)]
    >>> builder = RandomAxisPartitionAllReduce(seed=1, min_shard_bytes=0)
    >>> [plan.axis for plan in builder.build(variables, OneNode(2)).plans]
    [0, 0, 2, 0]
    """

    seed: int = 0
    chunk_size: int = 128

    name = "random_axis_partition_all_reduce"

    def __post_init__(self):
        super().__post_init__()
        self.check_integer("seed", 0)
        self.check_integer("chunk_size", 1)

    def build(self, variables, resources):
        running, draws = count(), random.Random(self.seed)
        plans = []
        for v in variables:
            axes = [0] if v.sparse else [axis for axis, n in enumerate(v.shape) if n > 1]
            axis = draws.choice(axes) if axes else 0
            plans.append(self.cut(v, lambda p: self.collective(p, next(running) // self.chunk_size), axis))
        return self.strategy(plans, resources)
