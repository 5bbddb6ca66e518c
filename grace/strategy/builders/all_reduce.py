"""AllReduce: collectives, so many variables in each."""

from dataclasses import dataclass

from grace.strategy.builder import Builder
from grace.strategy.plan import VariablePlan


@dataclass
class AllReduce(Builder):
    """Every variable by a collective (a sum where its method can be summed); group = index // chunk_size.

    Args:
        chunk_size: variables that travel together.

    >>> from grace.strategy.builder import OneNode
    >>> from grace.core.variable import Variable
    >>> variables = [Variable(f"w{i}", (2,)) for i in range(5)]
    >>> [plan.parts[0].sync.group for plan in AllReduce(chunk_size=2).build(variables, OneNode(2)).plans]
    [0, 0, 1, 1, 2]
    """

    chunk_size: int = 128

    name = "all_reduce"

    def __post_init__(self):
        self.check_integer("chunk_size", 1)

    def build(self, variables, resources):
        plans = [VariablePlan(v, (self.collective(v, i // self.chunk_size),)) for i, v in enumerate(variables)]
        return self.strategy(plans, resources)
