"""SparseLoCo: the largest of what ranks drifted, in few bits."""

from dataclasses import dataclass

from grace.core.compressor import Compressor
from grace.core.memory import Memory
from grace.core.outer import OuterArg
from grace.core.specs import Spec
from grace.strategy.builders.diloco import DiLoCo
from grace.strategy.rule import CompressorRules


@dataclass
class SparseLoCo(DiLoCo):
    """Rounds that send a sixteenth of the drift, in 2 bits; a decaying residual has the place of outer momentum.

    Source: Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo", arXiv 2508.15706.

    Args:
        period: iterations between two rounds.
        optimizer, over: see :class:`~grace.strategy.builders.DiLoCo`.

    >>> from grace.strategy.builder import OneNode
    >>> from grace.core.variable import Variable
    >>> SparseLoCo().build([Variable("w", (90, 200))], OneNode(2)).plans[0].parts[0].memory
    'residual(beta=0.95)'
    """

    compressor: Spec | Compressor | CompressorRules = "topk(ratio=0.0625, chunk=4096) | block(bits=2, scale='rms')"
    memory: Spec | Memory | None = "residual(beta=0.95)"
    period: int = 15
    optimizer: OuterArg = "sgd(lr=1.0)"

    name = "sparseloco"
