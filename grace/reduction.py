"""What the exchange makes of the ranks' gradients: their mean or their sum."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from grace.errors import ConfigError


@dataclass
class Reduction:
    """What the exchange makes of the ranks' gradients.

    Args:
        op: "average" or "sum", or Horovod's constants of these names.
        predivide: gradients are divided by this before they are compressed, and the average is multiplied with
            it: keeps a sum of 16-bit numbers in their range.
    """

    op: Any = "average"
    predivide: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.op, str):
            self.op = self.op.lower()
            return
        for module in ("horovod.torch", "horovod.tensorflow"):
            horovod: Any = sys.modules.get(module)
            if horovod is not None:
                constants = {horovod.Average: "average", horovod.Sum: "sum", horovod.Adasum: "adasum"}
                self.op = constants.get(self.op, self.op)
                return

    def check(self) -> None:
        """Raise ConfigError if it makes no sense."""
        if self.op == "adasum":
            raise ConfigError("op=Adasum combines whole gradients, not compressed ones; use op='average' or 'sum'")
        if self.op not in ("average", "sum"):
            raise ConfigError(f"op must be 'average' or 'sum', not {self.op!r}")
        if not isinstance(self.predivide, (int, float)) or not 0 < self.predivide < float("inf"):
            raise ConfigError(f"gradient_predivide_factor must be a positive number, not {self.predivide!r}")
        if self.predivide != 1 and self.op != "average":
            raise ConfigError("gradient_predivide_factor goes with op='average' only")

    def factors(self, size: int) -> tuple[float, float]:
        """What gradients are multiplied with before the exchange, and means after it.

        >>> Reduction("average", 4.0).factors(2), Reduction("sum").factors(2)
        ((0.25, 4.0), (1.0, 2.0))
        """
        return 1.0 / self.predivide, float(size) if self.op == "sum" else float(self.predivide)


def check_integer(name: str, value: Any) -> None:
    """Refuse what is not a whole number of at least 1.

    >>> check_integer("group_bytes", 0)
    Traceback (most recent call last):
    grace.errors.ConfigError: group_bytes must be a whole number of at least 1, not 0
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
