"""Groups of variables that travel together: so many of a kind, or cut as an optimizer without a strategy cuts its
buckets, which overlap with backward."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from grace.core.variable import Variable
from grace.session.bucket_limits import Limits
from grace.session.bucketing import make_buckets
from grace.strategy.builder import Builder, Cluster
from grace.strategy.execution import make_shards
from grace.strategy.plan import Strategy, VariablePlan


def group_by_kind(
    builder: Builder,
    chunk_size: int | None,
    variables: Sequence[Variable],
    resources: Cluster,
    builders: Sequence[Builder],
    kind_of: Callable[[Variable], int],
) -> Strategy:
    """Return the strategy for variables of several kinds, which never share a group. Each group has ``chunk_size`` of
    them, or else as many as a bucket of :class:`~grace.session.bucket_limits.Limits`.

    Args:
        builder: makes the strategy.
        chunk_size: number of variables of a group; None for groups as large as buckets.
        variables, resources: the model's variables, and the cluster.
        builders: the builder of each kind, whose compressor its variables get.
        kind_of: returns the number of a variable's kind.

    >>> from grace.strategy.builder import OneNode
    >>> from grace.strategy.builders import Uniform
    >>> variables = [Variable(f"w{kind}{i}", (2,)) for i, kind in enumerate([0, 1, 0, 0, 1])]
    >>> both = [Builder(), Builder()]
    >>> strategy = group_by_kind(Uniform(), 2, variables, OneNode(2), both, lambda v: int(v.name[1]))
    >>> [plan.parts[0].sync.group for plan in strategy.plans]
    [0, 1, 0, 2, 1]
    """
    counts = Counter[int]()
    plans = []
    for variable in variables:
        kind = kind_of(variable)
        chunk = counts[kind] // chunk_size if chunk_size else 0
        counts[kind] += 1
        # Numbers of different kinds never meet: modulo the number of kinds they are the kind.
        plans.append(VariablePlan(variable, (builders[kind].collective(variable, kind + len(builders) * chunk),)))
    strategy = builder.strategy(plans, resources)
    return strategy if chunk_size else in_buckets(strategy)


def in_buckets(strategy: Strategy) -> Strategy:
    """Return the strategy with its groups cut where :class:`~grace.session.bucket_limits.Limits` cut buckets.

    A group travels when the last of its gradients is there, so a single group of a whole model would not overlap with
    backward.

    >>> from grace.strategy.plan import ShardPlan
    >>> large = [VariablePlan(Variable(name, (4096, 4096)), (ShardPlan(),)) for name in "abc"]
    >>> [plan.parts[0].sync.group for plan in in_buckets(Strategy(tuple(large), 2)).plans]
    [2, 1, 0]
    """
    shards = [
        shard if shard.variable.sparse else replace(shard, limits=Limits())  # a sparse gradient has few rows
        for shard in make_shards(strategy, strategy.variables)
    ]
    groups = {variable.name: bucket.index for bucket in make_buckets(shards) for variable in bucket.variables}
    plans = []
    for plan in strategy.plans:
        parts = [
            # Destinations and averages have no groups.
            replace(part, sync=replace(part.sync, group=groups[own.name])) if part.sync.grouped else part
            for part, own in zip(plan.parts, plan.part_variables(), strict=True)
        ]
        plans.append(replace(plan, parts=tuple(parts)))
    return replace(strategy, plans=tuple(plans))
