"""Uniform: one choice for all variables."""

from dataclasses import dataclass, replace
from typing import Any

from grace.strategy.builder import Builder
from grace.strategy.plan import VariablePlan


@dataclass
class Uniform(Builder):
    """One compressor, memory and communicator for all, in one group: what ``DistributedOptimizer(opt,
    compressor=...)`` means.

    Args:
        communicator: "allreduce", "allgather", "broadcast" or "scatter_reduce"; the compressor's default if left out.

    >>> from grace.strategy.builder import OneNode
    >>> from grace.core.variable import Variable
    >>> (plan,) = Uniform("qsgd", communicator="scatter_reduce").build([Variable("w", (9, 2))], OneNode(2)).plans
    >>> plan.parts[0].sync.type, plan.parts[0].compressor
    ('scatter_reduce', 'qsgd')
    """

    communicator: Any = None

    name = "uniform"

    def build(self, variables, resources):
        parts = [self.collective(v, 0) for v in variables]
        if self.communicator is not None:
            parts = [replace(part, sync=replace(part.sync, type=self.communicator)) for part in parts]
        return self.strategy([VariablePlan(v, (part,)) for v, part in zip(variables, parts, strict=True)], resources)
