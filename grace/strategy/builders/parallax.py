"""Parallax: dense variables by collectives, sparse ones by parameter servers."""

from dataclasses import dataclass
from itertools import count

from grace.strategy.builder import Loads
from grace.strategy.plan import VariablePlan
from grace.strategy.ps_builder import PSBuilder


@dataclass
class Parallax(PSBuilder):
    """Dense variables as AllReduce has them (groups by their number among the dense ones); sparse ones to the rank
    with the fewest bytes so far. Source: Kim et al., EuroSys 2019, arXiv 1808.02621.

    Args:
        chunk_size: dense variables that travel together.
        sync, staleness, local_replication, ahead: for sparse variables, as in a strategy's ``sync``.

    >>> from grace.strategy.builder import OneNode
    >>> from grace.core.variable import Variable
    >>> variables = [Variable("emb", (9, 2), sparse=True), Variable("w", (2, 2))]
    >>> [plan.parts[0].sync.type for plan in Parallax().build(variables, OneNode(2)).plans]
    ['reduce_broadcast', 'allreduce']
    """

    chunk_size: int = 128

    name = "parallax"

    def __post_init__(self):
        super().__post_init__()
        self.check_integer("chunk_size", 1)

    def build(self, variables, resources):
        loads, dense = Loads(resources), count()
        parts = [
            self.reduced(v, loads.assign(v.nbytes)) if v.sparse else self.collective(v, next(dense) // self.chunk_size)
            for v in variables
        ]
        return self.strategy([VariablePlan(v, (part,)) for v, part in zip(variables, parts, strict=True)], resources)
