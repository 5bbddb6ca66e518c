"""The strategy layer: how each variable's gradient is partitioned, synchronized and compressed."""

from grace.strategy import builders
from grace.strategy.builder import Builder as StrategyBuilder
from grace.strategy.plan import ShardPlan, Strategy, VariablePlan
from grace.strategy.rule import Rule
from grace.strategy.sync import Sync

__all__ = ["Rule", "ShardPlan", "Strategy", "StrategyBuilder", "Sync", "VariablePlan", "builders"]
