"""Rows: variables by their first dimension."""

from dataclasses import dataclass

from grace.core.variable import Variable
from grace.strategy.rule import Rule


@dataclass
class Rows(Rule):
    """Variables of at least so many rows, and at most so many: what there is to cut along axis 0.

    Args:
        least: rows.
        most: rows; no limit if left out.

    >>> [Rows(least=100).fits(Variable("w", shape)) for shape in ((100, 3), (99, 50), ())]
    [True, False, False]
    """

    least: int = 1
    most: int | None = None

    name = "rows"

    def __post_init__(self) -> None:
        self.check_integer("least", 0)
        if self.most is not None:
            self.check_integer("most", self.least)

    def fits(self, variable: Variable) -> bool:
        rows = variable.shape[0] if variable.shape else 0
        return self.least <= rows and (self.most is None or rows <= self.most)
