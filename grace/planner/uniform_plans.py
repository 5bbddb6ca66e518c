"""Strategies that give each variable one method, cut into the buckets that an optimizer without a strategy makes."""

from collections.abc import Sequence
from dataclasses import replace

from grace.communicators.choice import build_communicator
from grace.core.communicator import Communicator, CommunicatorArg, CompressorArg, MemoryArg
from grace.core.variable import Variable
from grace.session.bucket_limits import Limits
from grace.session.bucketing import make_buckets
from grace.session.sharding import Chooser, Shard
from grace.strategy.builder import Builder, Cluster
from grace.strategy.plan import ShardPlan, Strategy, VariablePlan
from grace.strategy.sync import Sync

LIMITS = Limits()
"""The usual limits of a bucket."""
DENSE = ShardPlan(Sync("allreduce"), "none", "none")


def shards_of(variables: Sequence[Variable], wanted: Sequence[Communicator], choose: Chooser) -> list[Shard]:
    """Return a shard for each variable, carried by the wanted communicator, or by another that ``choose`` gives: a
    variable that its method does not shrink is summed uncompressed."""
    return [
        Shard(variable, variable, choose(variable, carrier), None, None if variable.sparse else LIMITS)
        for variable, carrier in zip(variables, wanted, strict=True)
    ]


def assigned_strategy(
    variables: Sequence[Variable],
    wanted: Sequence[Communicator],
    ranks: int,
    nodes: int = 1,
    builder: dict[str, object] | None = None,
) -> Strategy:
    """Return the strategy that carries each variable by a communicator of its own; the same object for those that may
    share a bucket. ``builder`` has name, parameters and seed of the strategy's maker."""
    carrier_of = dict(zip((variable.name for variable in variables), wanted, strict=True))
    parts: dict[str, ShardPlan] = {}
    for bucket in make_buckets(shards_of(variables, wanted, Chooser())):
        for variable in bucket.variables:
            carrier, part = carrier_of[variable.name], DENSE
            if bucket.communicator is carrier or variable.sparse:
                part = ShardPlan(Sync.from_spec(carrier.to_dict()), carrier.compressor.spec, carrier.memory.spec)
            if part.sync.grouped:
                part = replace(part, sync=replace(part.sync, group=bucket.index))  # parts of one group share a bucket
            parts[variable.name] = part
    return Strategy(tuple(VariablePlan(v, (parts[v.name],)) for v in variables), ranks, nodes, builder or {})


def uniform_strategy(
    variables: Sequence[Variable],
    ranks: int,
    compressor: CompressorArg | None = "none",
    memory: MemoryArg | None = None,
    communicator: CommunicatorArg | None = None,
    nodes: int = 1,
) -> Strategy:
    """Return ``DistributedOptimizer(compressor=...)`` written down for so many ranks on so many nodes: the same buckets
    of variables in declaration order. Compressor, memory and communicator are specs or objects, or None for the usual
    ones. Raise ConfigError if they do not go together.

    >>> two = [Variable("w", (512, 512)), Variable("b", (1,))]
    >>> strategy = uniform_strategy(two, 4, "topk")
    >>> [(plan.parts[0].compressor, plan.parts[0].sync.type) for plan in strategy.plans]
    [('topk', 'allgather'), ('none', 'allreduce')]
    """
    wanted = build_communicator(compressor, memory, communicator, ranks)
    made = {"name": "uniform", "params": {"compressor": wanted.compressor.spec}, "seed": 0}
    return assigned_strategy(variables, [wanted] * len(variables), ranks, nodes, made)


class Baseline(Builder):
    """Sums everything uncompressed, as an optimizer without any choice does; planning starts from it.

    The strategy is the one that a plan without compression names; the builder ``uniform`` writes memories otherwise.
    """

    name = "uniform"

    def build(self, variables: Sequence[Variable], resources: Cluster) -> Strategy:
        return uniform_strategy(variables, resources.world_size, nodes=len(set(resources.ranks)))
