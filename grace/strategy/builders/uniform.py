"""Uniform: one choice for all variables."""

from dataclasses import dataclass, replace

from grace.core.specs import Spec
from grace.strategy.builder import Builder
from grace.strategy.grouping import group_by_kind
from grace.strategy.sync import Sync


@dataclass
class Uniform(Builder):
    """One compressor, memory and communicator for all: what ``DistributedOptimizer(opt, compressor=...)`` means.

    Args:
        communicator: any, by its spec, as "scatter_reduce" or "reduce_broadcast(destination=1)", those of yours that
            are registered included; the compressor's default if left out.
        chunk_size: variables that travel together; by default as many as ``compressor=`` lets.

    >>> from grace.strategy.builder import OneNode
    >>> from grace.core.variable import Variable
    >>> (plan,) = Uniform("qsgd", communicator="scatter_reduce").build([Variable("w", (9, 2))], OneNode(2)).plans
    >>> plan.parts[0].sync.type, plan.parts[0].compressor
    ('scatter_reduce', 'qsgd')
    """

    communicator: Spec | None = None
    chunk_size: int | None = None

    name = "uniform"

    def __post_init__(self):
        if self.chunk_size is not None:
            self.check_integer("chunk_size", 1)

    def build(self, variables, resources):
        return group_by_kind(self, self.chunk_size, variables, resources, [self], lambda variable: 0)

    def collective(self, variable, group):
        part = super().collective(variable, group)
        if self.communicator is None:
            return part
        return replace(part, sync=Sync.from_spec(self.communicator, part.sync.group))
