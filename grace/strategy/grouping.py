"""Groups that overlap with backward, cut as an optimizer without a strategy cuts its buckets."""

from dataclasses import replace

from grace.session.bucketing import Limits
from grace.session.sharding import make_buckets
from grace.strategy.execution import compiled
from grace.strategy.plan import Strategy


def in_buckets(strategy: Strategy) -> Strategy:
    """Return the strategy with its groups cut where :class:`~grace.session.bucketing.Limits` cut buckets.

    A group travels when the last of its gradients is there, so a single group of a whole model would not overlap with
    backward.

    >>> from grace.core.variable import Variable
    >>> from grace.strategy.plan import ShardPlan, VariablePlan
    >>> large = [VariablePlan(Variable(name, (4096, 4096)), (ShardPlan(),)) for name in "abc"]
    >>> [plan.parts[0].sync.group for plan in in_buckets(Strategy(tuple(large), 2)).plans]
    [2, 1, 0]
    """
    shards = [
        shard if shard.variable.sparse else replace(shard, limits=Limits())  # a sparse gradient has few rows
        for shard in compiled(strategy, strategy.variables)
    ]
    groups = {variable.name: bucket.index for bucket in make_buckets(shards) for variable in bucket.variables}
    plans = []
    for plan in strategy.plans:
        parts = [
            replace(part, sync=replace(part.sync, group=groups[own.name])) if "group" in part.sync.to_dict() else part
            for part, own in zip(plan.parts, plan.part_variables(), strict=True)
        ]
        plans.append(replace(plan, parts=tuple(parts)))
    return replace(strategy, plans=tuple(plans))
