"""Predictions of a stage's exchange of gradients over its replicas: seconds after the schedule, and bytes of Grace's
memories and buffers."""

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path

from grace.backends.topology import Topology
from grace.communicators.choice import build_communicator
from grace.core.communicator import Communicator, CommunicatorArg, CompressorArg, MemoryArg
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.planner.exchange_costs import Costs, costs_of_shards, costs_of_strategy
from grace.planner.network import Network
from grace.planner.problem import methods_of
from grace.planner.step_simulation import BucketCosts, Timeline, simulate_step
from grace.session.bucket_limits import Limits
from grace.session.sharding import uniform
from grace.strategy.choices import Choices
from grace.strategy.execution import StrategyArg, is_file, read_document, resolve
from grace.strategy.plan import Strategy

LEAST = Variable("", (1,))
"""The only variable of an exchange that shows the time of an empty one."""
ALL_READY = Timeline({})
"""Timeline of an exchange while nothing is computed."""


class Exchanges:
    """Predictor of exchanges by one method, or by a strategy.

    Args:
        costs: the cluster's costs; their networks are not used.
        compressor, memory, communicator: specs, or None for their defaults.
        strategy: a builder or its spec, or a document, instead. For ``auto`` the shortest of the possible exchanges
            counts: without compression, and with the methods that it names, or else with its reference; of another
            quality than "feedback" with all methods that offer themselves.

    Raises:
        ConfigError: a spec is unknown, or specs do not go together.

    >>> from grace.planner.network import Links
    >>> from grace.planner.costs import DefaultCodecs
    >>> slow, w = Links(1e8), [Variable("w", (1000, 1000))]
    >>> plain, sparse = (
    ...     Exchanges(Costs(slow, DefaultCodecs()), spec).seconds(w, 2, slow) for spec in ("none", "topk(ratio=0.01)")
    ... )
    >>> plain > 5 * sparse
    True
    >>> ruled = "uniform(compressor=topk(ratio=0.01), communicator=allgather)"
    >>> kinds = [Exchanges(Costs(slow, DefaultCodecs()), strategy=one).seconds(w, 2, slow) for one in ("auto", ruled)]
    >>> [plain > 5 * seconds for seconds in kinds]
    [True, True]
    """

    def __init__(
        self,
        costs: Costs,
        compressor: CompressorArg | None = None,
        memory: MemoryArg | None = None,
        communicator: CommunicatorArg | None = None,
        strategy: StrategyArg | None = None,
    ):
        self.costs, self.strategy = costs, strategy
        self.methods: list[Choices] = [Choices(compressor, memory, communicator)]
        auto = None if strategy is None else Choices(strategy=strategy).auto_request()
        if auto is not None:
            self.strategy = None
            quality = auto.options.quality
            usual = [auto.options.reference] if quality == "feedback" else None  # None: all that offer themselves
            methods = methods_of(auto.options.methods or usual, quality, 1)
            self.methods = [Choices(method.compressor) for method in methods]
        for method in self.methods:
            build_communicator(method.compressor, method.memory, method.communicator)
        self._made: dict[tuple[int, int], Communicator] = {}

    def seconds(
        self, variables: Sequence[Variable], replicas: int, network: Network, timeline: Timeline = ALL_READY
    ) -> float:
        """Return the seconds of a step whose gradients are ready as ``timeline`` says; by default those of the exchange
        alone, which begins when all gradients are there."""
        return min(simulate_step(timeline, one).step for one in self._bucket_costs(variables, replicas, network))

    def grace_bytes(self, variables: Sequence[Variable], replicas: int) -> float:
        """Return the bytes of memories and buffers on a rank."""
        every = self._bucket_costs(variables, replicas, self.costs.network)
        return max(sum(bucket.memory for bucket in buckets) for buckets in every)

    def _bucket_costs(self, variables: Sequence[Variable], replicas: int, network: Network) -> list[list[BucketCosts]]:
        """Return the costs of the exchange, for each method that may be chosen."""
        if replicas == 1 or not variables:
            return [[]]
        costs = dataclasses.replace(self.costs, network=network)
        if self.strategy is not None and variables[0] is not LEAST:  # no document names it
            own = strategy_of_stage(self.strategy, [variable.name for variable in variables])
            resources = None if isinstance(own, dict) and "name" not in own else ""  # not the launcher's, of all ranks
            chosen = resolve(own, variables, Topology(["here"] * replicas), resources=resources)
            return [costs_of_strategy(chosen, costs)]
        found = []
        for number, method in enumerate(self.methods):
            key = number, replicas
            if key not in self._made:
                self._made[key] = build_communicator(method.compressor, method.memory, method.communicator, replicas)
            found.append(costs_of_shards(uniform(variables, self._made[key], Limits()), replicas, costs))
        return found


def strategy_of_stage(strategy: StrategyArg, names: Collection[str]) -> StrategyArg:
    """Return the part of a strategy's document for one stage's variables, in their order. Its ranks are the stage's
    replicas.

    >>> strategy_of_stage({"version": 1, "cluster": {"world_size": 4}, "variables": {"a": 1, "b": 2}}, ["b"])
    {'version': 1, 'variables': {'b': 2}}
    """
    if not isinstance(strategy, dict) or "variables" not in strategy:
        return strategy
    kept = {key: value for key, value in strategy.items() if key not in ("model", "cluster")}
    known = strategy["variables"]
    return {**kept, "variables": {name: known[name] for name in names if name in known}}


def strategy_document(strategy: StrategyArg | None, known: Collection[str]) -> dict[str, object] | None:
    """Return the document of the user's strategy for parameters of ``known`` names; None if it is a builder.

    Raises:
        ConfigError: the document cannot be read, or names other variables.
    """
    if isinstance(strategy, Strategy):
        strategy = strategy.to_dict()
    elif isinstance(strategy, (str, Path)) and is_file(strategy):
        strategy = read_document(strategy)
    if not isinstance(strategy, dict) or "name" in strategy:
        return None
    odd = [name for name in strategy.get("variables") or () if name not in known]
    if odd:
        raise ConfigError(f"the strategy is for another model: this one has no parameter {odd[0]!r}")
    return strategy
