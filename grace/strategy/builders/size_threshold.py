"""SizeThreshold: small variables as they are, the rest compressed."""

from dataclasses import dataclass
from typing import Any

from grace.strategy.builder import Builder
from grace.strategy.plan import VariablePlan


@dataclass
class SizeThreshold(Builder):
    """Variables of at most ``bytes``, and those of fewer than two dimensions, in one group with ``small``; the rest
    in another with ``large``.

    Args:
        bytes: the largest small variable.
        small, large: their compressors.

    >>> from grace.strategy.builder import OneNode
    >>> from grace.core.variable import Variable
    >>> variables = [Variable("w", (500, 500)), Variable("b", (50_000,)), Variable("v", (2, 2))]
    >>> strategy = SizeThreshold(bytes=65536, large="topk").build(variables, OneNode(2))
    >>> [(plan.parts[0].sync.group, plan.parts[0].compressor) for plan in strategy.plans]
    [(1, 'topk'), (0, 'none'), (0, 'none')]
    """

    bytes: int = 65536
    small: Any = "none"
    large: Any = "topk"

    name = "size_threshold"

    def __post_init__(self):
        self.check_integer("bytes", 0)
        if self.compressor != "none":
            raise self.refuse("it takes small and large instead of compressor")

    def build(self, variables, resources):
        plans = []
        for v in variables:
            is_small = v.nbytes <= self.bytes or len(v.shape) < 2
            chosen = Builder(self.small) if is_small else Builder(self.large, self.memory)
            plans.append(VariablePlan(v, (chosen.collective(v, 0 if is_small else 1),)))
        return self.strategy(plans, resources)
