"""ByType: vectors as they are, matrices and sparse variables each in a way of their own."""

from dataclasses import dataclass

from grace.core.compressor import Compressor
from grace.core.specs import Spec
from grace.strategy.builder import Builder
from grace.strategy.grouping import group_by_kind
from grace.strategy.rule import CompressorRules


@dataclass
class ByType(Builder):
    """Variables of fewer than two dimensions (biases, norms) in one group, matrices and convolutions in a second,
    sparse ones in a third.

    Args:
        compressor, memory: compressor and memory of the matrices.
        vectors, sparse: compressors of the other types.
        matrices: another word for compressor.
        chunk_size: variables of one type that travel together; by default as many as ``compressor=`` lets.

    >>> from grace.strategy.builder import OneNode
    >>> from grace.core.variable import Variable
    >>> variables = [Variable("w", (50, 50)), Variable("b", (50,)), Variable("emb", (99, 5), sparse=True)]
    >>> strategy = ByType("powersgd(rank=2)").build(variables, OneNode(2))
    >>> [(plan.parts[0].sync.group, plan.parts[0].compressor) for plan in strategy.plans]
    [(2, 'powersgd(rank=2)'), (1, 'none'), (0, 'none')]
    """

    compressor: Spec | Compressor | CompressorRules = "powersgd(rank=4)"
    vectors: Spec | Compressor = "none"
    matrices: Spec | Compressor | None = None
    sparse: Spec | Compressor = "none"
    chunk_size: int | None = None

    name = "by_type"

    def __post_init__(self):
        if self.chunk_size is not None:
            self.check_integer("chunk_size", 1)
        if self.matrices is not None and self.compressor != "powersgd(rank=4)":
            raise self.error("matrices is another word for compressor: leave one of them out")

    def build(self, variables, resources):
        matrices = self.choosing(self.matrices or self.compressor, self.memory)
        builders = self.choosing(self.vectors), matrices, self.choosing(self.sparse)
        return group_by_kind(self, self.chunk_size, variables, resources, builders, _kind_of)


def _kind_of(variable):
    if variable.sparse:
        return 2
    return 0 if len(variable.shape) < 2 else 1
