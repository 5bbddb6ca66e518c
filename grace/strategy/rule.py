"""Contract of rules: conditions on a strategy's variables where name, size and shape do not suffice."""

from collections.abc import Sequence
from typing import Any

from grace.core.component import Component
from grace.core.variable import Variable

CompressorRules = Sequence[dict[str, Any]]
"""Rules ``{"match": {...}, "compressor": ..., "memory": ...}`` of a builder, the first of which that matches counts."""


class Rule(Component):
    """A condition on variables, for ``match: {rule: ...}`` in files of rules and in the rules of builders. Write
    ``fits``; parameters are the fields of a dataclass.

    >>> class Square(Rule):
    ...     name = "square"
    ...     def fits(self, variable):
    ...         return len(variable.shape) == 2 and len(set(variable.shape)) == 1
    >>> Square().fits(Variable("w", (3, 3)))
    True
    """

    kind = "rule"

    def fits(self, variable: Variable) -> bool:
        """Return True if the rule is for this variable."""
        raise TypeError(f"{type(self).__name__} must define fits(variable)")
