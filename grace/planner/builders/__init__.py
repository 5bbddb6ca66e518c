"""Builders that plan; :mod:`grace.core.registry` finds them here, beside those of :mod:`grace.strategy.builders`."""

from grace.planner.builders.auto import Auto

__all__ = ["Auto"]
