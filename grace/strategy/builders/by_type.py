"""ByType: vectors as they are, matrices and sparse variables each in a way of their own."""

from dataclasses import dataclass
from typing import Any

from grace.strategy.builder import Builder
from grace.strategy.plan import VariablePlan


@dataclass
class ByType(Builder):
    """Variables of fewer than two dimensions (biases, norms) in one group, matrices and convolutions in a second,
    sparse ones in a third.

    Args:
        vectors, matrices, sparse: their compressors.

    >>> from grace.strategy.builder import OneNode
    >>> from grace.core.variable import Variable
    >>> variables = [Variable("w", (50, 50)), Variable("b", (50,)), Variable("emb", (99, 5), sparse=True)]
    >>> strategy = ByType(matrices="powersgd(rank=2)").build(variables, OneNode(2))
    >>> [(plan.parts[0].sync.group, plan.parts[0].compressor) for plan in strategy.plans]
    [(1, 'powersgd(rank=2)'), (0, 'none'), (2, 'none')]
    """

    vectors: Any = "none"
    matrices: Any = "powersgd(rank=4)"
    sparse: Any = "none"

    name = "by_type"

    def __post_init__(self):
        if (self.compressor, self.memory) != ("none", None):
            raise self.refuse("it takes vectors, matrices and sparse instead of compressor and memory")

    def build(self, variables, resources):
        plans = []
        for v in variables:
            group = 2 if v.sparse else 0 if len(v.shape) < 2 else 1
            chosen = (self.vectors, self.matrices, self.sparse)[group]
            plans.append(VariablePlan(v, (Builder(chosen).collective(v, group),)))
        return self.strategy(plans, resources)
