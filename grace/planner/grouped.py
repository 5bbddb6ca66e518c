"""One method for all variables as a strategy, cut into the buckets that an optimizer without a strategy makes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from grace.communicators.choice import build_communicator
from grace.core.variable import Variable
from grace.session.bucketing import Limits
from grace.session.sharding import make_buckets, uniform
from grace.strategy.plan import ShardPlan, Strategy, Sync, VariablePlan

_LIMITS = Limits()


def grouped(
    variables: Sequence[Variable],
    ranks: int,
    compressor: Any = "none",
    memory: Any = None,
    communicator: Any = None,
    nodes: int = 1,
    limits: Limits | None = _LIMITS,
) -> Strategy:
    """What ``DistributedOptimizer(compressor=...)`` does, written down: the same buckets, in the same order.

    Args:
        variables: in declaration order.
        ranks: how many there are.
        compressor, memory, communicator: specs or objects; None for the usual ones.
        nodes: how many machines the ranks are on.
        limits: of a bucket; None for all variables in one.

    Raises:
        ConfigError: the three do not go together.

    >>> two = [Variable("w", (512, 512)), Variable("b", (1,))]
    >>> strategy = grouped(two, 4, "topk")
    >>> [(plan.parts[0].compressor, plan.parts[0].sync.type) for plan in strategy.plans]
    [('topk', 'allgather'), ('none', 'allreduce')]
    """
    wanted = build_communicator(compressor, memory, communicator, ranks)
    own = ShardPlan(Sync.from_spec(wanted.to_dict()), wanted.compressor.spec, wanted.memory.spec)
    dense = ShardPlan(Sync("allreduce"), "none", "none")
    parts: dict[str, ShardPlan] = {}
    for bucket in make_buckets(uniform(variables, wanted, limits)):
        for variable in bucket.variables:
            part = own if bucket.communicator is wanted or variable.sparse else dense
            groups = "group" in part.sync.to_dict()
            parts[variable.name] = replace(part, sync=replace(part.sync, group=bucket.index)) if groups else part
    plans = tuple(VariablePlan(variable, (parts[variable.name],)) for variable in variables)
    return Strategy(plans, ranks, nodes, {"name": "uniform", "params": {"compressor": own.compressor}, "seed": 0})
