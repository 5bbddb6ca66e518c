"""PSLoadBalancing: each variable to the destination with the least so far."""

from dataclasses import dataclass

from grace.strategy.builder import Loads
from grace.strategy.plan import VariablePlan
from grace.strategy.ps_builder import PSBuilder


@dataclass
class PSLoadBalancing(PSBuilder):
    """Greedy: the next variable goes to the rank that has the fewest bytes so far, the first of several; where the
    resources tell ``network_bandwidth``, to the one that would have all of its bytes soonest.

    Args:
        sorted: place the largest first (of equal ones the first declared), which balances better.
        sync, staleness, local_replication, ahead: as in a strategy's ``sync``.

    >>> from grace.strategy.builder import OneNode
    >>> from grace.core.variable import Variable
    >>> variables = [Variable(name, (n,)) for name, n in (("a", 1), ("b", 2), ("c", 4))]
    >>> def destinations(builder):
    ...     return [plan.parts[0].sync.destination for plan in builder.build(variables, OneNode(2)).plans]
    >>> destinations(PSLoadBalancing()), destinations(PSLoadBalancing(sorted=True))
    ([0, 1, 0], [1, 1, 0])
    """

    sorted: bool = False

    name = "ps_load_balancing"

    def __post_init__(self):
        super().__post_init__()
        self.check_choice("sorted", (False, True))

    def build(self, variables, resources):
        loads = Loads(resources)
        order = sorted(variables, key=lambda v: -v.nbytes) if self.sorted else variables
        destination = {v.name: loads.assign(v.nbytes) for v in order}
        return self.strategy([VariablePlan(v, (self.reduced(v, destination[v.name]),)) for v in variables], resources)
