"""Outer SGD."""

from dataclasses import dataclass

from grace.core.compressor import Shape, Tensor
from grace.core.outer import OuterOptimizer


@dataclass
class OuterSGD(OuterOptimizer):
    """SGD on the anchor, with the mean drift for a gradient: v = momentum v + d, then a = a - lr v.

    Args:
        lr: outer learning rate.
        momentum: outer momentum.
        offload: True to keep anchors and momenta on the CPU.

    >>> outer = OuterSGD(lr=0.5, momentum=0.5)
    >>> outer.step(3.0, 2.0, "w"), outer.step(2.0, 2.0, "w")
    (2.0, 0.5)
    """

    lr: float = 1.0
    momentum: float = 0.0
    offload: bool = False

    name = "sgd"

    def __post_init__(self) -> None:
        self.check_number("lr", 0, low_open=True)
        self.check_number("momentum", 0, 1)
        self.check_choice("offload", (False, True))

    def keeps(self, shape: Shape) -> Shape:
        # Arithmetic of NumPy turns 0-d arrays into numbers, so a scalar's velocity has one element.
        return shape or (1,)

    def velocity(self, drift: Tensor, name: str) -> Tensor:
        """Return v = momentum v + d, and keep it if there is momentum."""
        # Without momentum there is nothing to keep, nor to save.
        if self.momentum == 0:
            return drift
        before = self.state.get(name)
        after = drift if before is None else self.momentum * before + drift
        self.state[name] = after
        return after

    def step(self, anchor: Tensor, drift: Tensor, name: str) -> Tensor:
        return anchor - self.lr * self.velocity(drift, name)
