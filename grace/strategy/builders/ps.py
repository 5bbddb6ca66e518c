"""PS: one rank reduces everything."""

from dataclasses import dataclass

from grace.strategy.plan import VariablePlan
from grace.strategy.ps_builder import PSBuilder


@dataclass
class PS(PSBuilder):
    """Every variable to one destination: a parameter server.

    Args:
        destination: the rank that reduces; the first rank of the first node by default.
        sync, staleness, local_replication, ahead: as in a strategy's ``sync``.

    >>> from grace.strategy.builder import OneNode
    >>> from grace.core.variable import Variable
    >>> strategy = PS(destination=1, staleness=2).build([Variable("w", (4,)), Variable("b", (2,))], OneNode(2))
    >>> [(plan.parts[0].sync.destination, plan.parts[0].sync.options["staleness"]) for plan in strategy.plans]
    [(1, 2), (1, 2)]
    """

    destination: int = 0

    name = "ps"

    def __post_init__(self):
        super().__post_init__()
        self.check_integer("destination", 0)

    def build(self, variables, resources):
        return self.strategy([VariablePlan(v, (self.reduced(v, self.destination),)) for v in variables], resources)
