"""PS: one rank reduces everything."""

from dataclasses import dataclass

from grace.strategy.builder import Builder
from grace.strategy.plan import VariablePlan


@dataclass
class PS(Builder):
    """Every variable to one destination: a parameter server.

    Args:
        destination: the rank that reduces; the first rank of the first node by default.

    >>> from grace.strategy.builder import OneNode
    >>> from grace.core.variable import Variable
    >>> strategy = PS(destination=1).build([Variable("w", (4,)), Variable("b", (2,))], OneNode(2))
    >>> [plan.parts[0].sync.destination for plan in strategy.plans]
    [1, 1]
    """

    destination: int = 0

    name = "ps"

    def __post_init__(self):
        self.check_integer("destination", 0)

    def build(self, variables, resources):
        return self.strategy([VariablePlan(v, (self.reduced(v, self.destination),)) for v in variables], resources)
