"""SizeThreshold: small variables as they are, the rest compressed."""

from dataclasses import dataclass

from grace.core.compressor import Compressor
from grace.core.specs import Spec
from grace.strategy.builder import Builder
from grace.strategy.grouping import group_by_kind
from grace.strategy.rule import CompressorRules


@dataclass
class SizeThreshold(Builder):
    """Variables of at most ``bytes``, and those of fewer than two dimensions, with ``small``; the rest, in other
    groups, with ``compressor`` and ``memory``.

    Args:
        compressor, memory: compressor and memory of the large variables.
        bytes: the size of the largest small variable, in bytes.
        small: the compressor of the small variables.
        large: another word for compressor.
        chunk_size: small variables, or large ones, that travel together; by default as many as ``compressor=`` lets.

    >>> from grace.strategy.builder import OneNode
    >>> from grace.core.variable import Variable
    >>> variables = [Variable("w", (500, 500)), Variable("b", (50_000,)), Variable("v", (2, 2))]
    >>> strategy = SizeThreshold("topk", bytes=65536).build(variables, OneNode(2))
    >>> [(plan.parts[0].sync.group, plan.parts[0].compressor) for plan in strategy.plans]
    [(1, 'topk'), (0, 'none'), (0, 'none')]
    """

    compressor: Spec | Compressor | CompressorRules = "topk"
    bytes: int = 65536
    small: Spec | Compressor = "none"
    large: Spec | Compressor | None = None
    chunk_size: int | None = None

    name = "size_threshold"

    def __post_init__(self):
        self.check_integer("bytes", 0)
        if self.chunk_size is not None:
            self.check_integer("chunk_size", 1)
        if self.large is not None and self.compressor != "topk":
            raise self.error("large is another word for compressor: leave one of them out")

    def build(self, variables, resources):
        builders = self.choosing(self.small), self.choosing(self.large or self.compressor, self.memory)
        return group_by_kind(self, self.chunk_size, variables, resources, builders, self._is_large)

    def _is_large(self, variable):
        return variable.nbytes > self.bytes and len(variable.shape) >= 2
