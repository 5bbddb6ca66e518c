"""Outer SGD with Nesterov's momentum."""

from dataclasses import dataclass

from grace.core.compressor import Tensor
from grace.outer.sgd import OuterSGD


@dataclass
class OuterNesterov(OuterSGD):
    """DiLoCo's outer optimizer: v = momentum v + d, then a = a - lr (d + momentum v).

    The defaults are the paper's; with some tens of iterations in a period a momentum of 0.6 was better here.
    Source: Douillard et al., arXiv 2311.08105.

    Args:
        lr: outer learning rate.
        momentum: outer momentum.
        offload: True to keep anchors and momenta on the CPU.

    >>> outer = OuterNesterov(lr=0.5, momentum=0.5)
    >>> outer.step(3.0, 2.0, "w"), outer.step(1.5, 2.0, "w")
    (1.5, -0.25)
    """

    lr: float = 0.7
    momentum: float = 0.9

    name = "nesterov"

    def step(self, anchor: Tensor, drift: Tensor, name: str) -> Tensor:
        velocity = self.velocity(drift, name)
        return anchor - self.lr * (drift + self.momentum * velocity)
