"""Streaming DiLoCo: fragments of the model travel one after the other, while training goes on."""

from dataclasses import dataclass, replace

from grace.core.compressor import Compressor
from grace.core.outer import Outer
from grace.core.specs import Spec
from grace.strategy.builders.diloco import DiLoCo
from grace.strategy.rule import CompressorRules


@dataclass
class StreamingDiLoCo(DiLoCo):
    """DiLoCo in fragments, of 4 bits, which travel for ``delay`` iterations; ranks keep half of their own drift.

    The link is used evenly: a fragment is sent after each ``period / fragments`` iterations. Source: Douillard et al.,
    "Streaming DiLoCo with overlapping communication", arXiv 2501.18512.

    Args:
        period: iterations between two rounds of a fragment; a multiple of ``fragments``.
        optimizer, over: see :class:`~grace.strategy.builders.DiLoCo`.
        fragments: number of fragments.
        delay: iterations for which a fragment may travel; less than ``period / fragments``.
        merge: share of its own drift that a rank keeps.

    >>> from grace.strategy.builder import OneNode
    >>> from grace.core.variable import Variable
    >>> variables = [Variable(f"w{i}", (9, 200)) for i in range(4)]
    >>> StreamingDiLoCo(period=20).build(variables, OneNode(2)).plans[0].parts[0].outer.describe()
    'outer nesterov(period=20, fragments=4, delay=1, merge=0.5)'
    """

    compressor: Spec | Compressor | CompressorRules = "block(bits=4)"
    period: int = 100
    fragments: int = 4
    delay: int = 1
    merge: float = 0.5

    name = "streaming_diloco"

    def outer(self) -> Outer:
        """Return the settings of the rounds."""
        return replace(super().outer(), fragments=self.fragments, delay=self.delay, merge=self.merge)
