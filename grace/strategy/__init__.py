"""The strategy layer: how each variable's gradient is partitioned, synchronized and compressed."""

from grace.strategy.plan import Strategy

__all__ = ["Strategy"]
