"""DiLoCo: ranks train alone, and an outer optimizer with momentum moves what they share."""

from dataclasses import dataclass, replace

from grace.core.outer import OVER, Outer, OuterArg
from grace.core.registry import make
from grace.strategy.builders.uniform import Uniform


@dataclass
class DiLoCo(Uniform):
    """Rounds of all variables after each ``period`` iterations, with an outer optimizer with Nesterov's momentum.

    The defaults are the paper's. With a period of 15 or 50 a momentum of 0.6 was better here, and
    ``compressor=block(bits=4)`` lost little. Source: Douillard et al., arXiv 2311.08105.

    Args:
        period: iterations between two rounds.
        optimizer: the outer optimizer.
        over: "ranks"; or "nodes": the ranks of a node average gradients in every iteration.

    >>> from grace.strategy.builder import OneNode
    >>> from grace.core.variable import Variable
    >>> (plan,) = DiLoCo("block(bits=4)", period=20).build([Variable("w", (9, 200))], OneNode(2)).plans
    >>> plan.parts[0].outer.describe()
    'outer nesterov(period=20)'
    """

    period: int = 500
    optimizer: OuterArg = "nesterov(lr=0.7, momentum=0.9)"
    over: OVER = "ranks"

    name = "diloco"

    def __post_init__(self):
        super().__post_init__()
        self.outer().check()

    def outer(self) -> Outer:
        """Return the settings of the rounds."""
        return Outer(make("outer", self.optimizer).spec, period=self.period, over=self.over)

    def collective(self, variable, group):
        return replace(super().collective(replace(variable, sparse=False), group), outer=self.outer())
