"""No outer optimizer: averages."""

from dataclasses import dataclass

from grace.core.compressor import Tensor
from grace.core.outer import OuterOptimizer


@dataclass
class NoOuter(OuterOptimizer):
    """Average of the ranks' parameters: a = a - d, which is the mean of x if drifts are sent uncompressed.

    Source: local SGD, Stich, ICLR 2019, arXiv 1805.09767.

    Args:
        offload: True to keep anchors on the CPU.

    >>> NoOuter().step(3.0, 2.0, "w")
    1.0
    """

    offload: bool = False

    name = "none"

    def __post_init__(self) -> None:
        self.check_choice("offload", (False, True))

    def step(self, anchor: Tensor, drift: Tensor, name: str) -> Tensor:
        return anchor - drift
