"""AllReduce: collectives, so many variables in each."""

from dataclasses import dataclass, replace
from typing import Literal

from grace.strategy.builder import Builder
from grace.strategy.plan import VariablePlan


@dataclass
class AllReduce(Builder):
    """Every variable by a collective (a sum where its method can be summed); group = index // chunk_size.

    Args:
        chunk_size: variables that travel together.
        hierarchical: the ranks of each node average first, and one of them exchanges with the other nodes; "auto" where
            there are several nodes, and one has several ranks.

    >>> from grace.strategy.builder import OneNode
    >>> from grace.core.variable import Variable
    >>> variables = [Variable(f"w{i}", (2,)) for i in range(5)]
    >>> [plan.parts[0].sync.group for plan in AllReduce(chunk_size=2).build(variables, OneNode(2)).plans]
    [0, 0, 1, 1, 2]
    """

    chunk_size: int = 128
    hierarchical: bool | Literal["auto"] = False

    name = "all_reduce"

    def __post_init__(self):
        self.check_integer("chunk_size", 1)
        if self.hierarchical != "auto":
            self.check_choice("hierarchical", (False, True))

    def build(self, variables, resources):
        hierarchical = self.hierarchical
        if hierarchical == "auto":
            hierarchical = 1 < len(set(resources.ranks)) < resources.world_size
        parts = [self.collective(v, i // self.chunk_size) for i, v in enumerate(variables)]
        parts = [replace(part, sync=replace(part.sync, hierarchical=hierarchical)) for part in parts]
        return self.strategy([VariablePlan(v, (part,)) for v, part in zip(variables, parts, strict=True)], resources)
