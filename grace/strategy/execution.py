"""Execution of strategies: rank 0's is sent to all ranks, checked against the model, and made into an exchange plan."""

import dataclasses
import os
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from grace.backends.topology import Topology, node_name
from grace.core import documents
from grace.core.backend import Backend
from grace.core.communicator import Communicator
from grace.core.outer import Outer
from grace.core.registry import make
from grace.core.specs import Spec
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.session.agreement import gather_or_raise
from grace.session.bucket_limits import Limits
from grace.session.exchange_plan import ExchangePlan
from grace.session.sharding import Chooser, Shard
from grace.strategy.builder import Builder
from grace.strategy.plan import VERSION, ShardPlan, Strategy, communicator_of
from grace.strategy.resources import ResourcesArg, cluster_of, to_plain

StrategyArg = Spec | Path | Strategy | Builder
"""Strategy as users give it: a file's path, a document, the object, or a builder or its spec."""


class StrategyPlan(ExchangePlan):
    """Exchange plan of a strategy.

    Args:
        chosen: a strategy, a document, a file's path, or a builder or its spec; only rank 0's counts.
        sparse_known: True if the model's variables tell which are sparse; else the strategy does.
        resources: the nodes that a builder builds for; only rank 0's count. By default the file that
            ``grace launch -r`` names.
    """

    def __init__(self, chosen: StrategyArg, sparse_known: bool = True, resources: ResourcesArg | None = None):
        self.chosen = chosen
        self.sparse_known = sparse_known
        self.resources = resources
        self.strategy: Strategy | None = None

    def broadcast_plan(
        self, variables: list[Variable], backend: Backend, error: Exception | None, elastic: bool
    ) -> list[Variable]:
        """Make the strategy on rank 0, and send it to all ranks.

        Raises:
            ConfigError: (on rank 0) it is missing or wrong; or it is for another number of ranks.
            RankError: (on other ranks) rank 0 could not make it, or another rank has no strategy.
        """
        if elastic:
            raise ConfigError("a strategy is for a fixed number of ranks: it cannot be executed in elastic mode")
        what = f"a strategy of version {VERSION}"
        nodes = gather_or_raise(backend, what, node_name(), error)
        resolved: Strategy | None = None
        if backend.rank == 0:  # alone: files of nodes may differ, and builders draw random numbers
            try:
                resolved = resolve(self.chosen, variables, Topology(nodes), self.sparse_known, self.resources)
            except Exception as raised:
                error = raised
        self.strategy = strategy = gather_or_raise(backend, what, resolved, error)[0]
        if self.sparse_known:
            return variables
        sparse = {plan.variable.name for plan in strategy.plans if plan.variable.sparse}
        return [dataclasses.replace(v, sparse=v.name in sparse) for v in variables]

    def shards(self, variables: Sequence[Variable], ranks: int = 1) -> list[Shard]:
        """Return the shards of all variables, each with its communicator.

        Raises:
            ConfigError: the strategy is for another model, or has methods that this rank does not know.
        """
        assert self.strategy is not None
        self.name = f"strategy {self.strategy.id}"  # raises if this rank does not know its methods
        self.strategy.check_model(variables)
        return make_shards(self.strategy, variables)

    def options(self) -> dict[str, object]:
        """Return the arguments of an optimizer that has this strategy, as a document."""
        chosen = self.chosen if self.strategy is None else self.strategy
        options: dict[str, object] = {
            "strategy": chosen.to_dict() if isinstance(chosen, (Strategy, Builder)) else chosen
        }
        if self.strategy is None and self.resources is not None:
            options["resources"] = to_plain(self.resources)
        return options


def resolve(
    chosen: StrategyArg,
    variables: Sequence[Variable],
    cluster: Topology,
    sparse_known: bool = True,
    resources: ResourcesArg | None = None,
) -> Strategy:
    """Return the strategy that the user means: rules are resolved, and builders build, for the resources if there are
    any.

    Raises:
        ConfigError: there is no such file or builder, or the strategy is for another number of ranks.

    >>> resolve("parallax", [Variable("w", (2, 2))], Topology(["here"])).plans[0].parts[0].sync.type
    'allreduce'
    """
    if isinstance(chosen, dict) and "name" in chosen:  # a file's document has no name, a builder's dict spec has one
        chosen = make("builder", chosen)
    if isinstance(chosen, str) and not is_file(chosen):
        chosen = make("builder", chosen)
    if isinstance(chosen, Builder):
        return chosen.build(variables, cluster_of(resources, cluster))
    if resources is not None:
        raise ConfigError("resources= is for a builder, and this strategy is built already: leave out resources=")
    if not isinstance(chosen, Strategy):
        from grace.strategy import schema

        document, where = chosen, "the strategy"
        if isinstance(chosen, (str, Path)):
            document, where = read_document(chosen), str(chosen)
        elif not isinstance(chosen, dict):
            raise ConfigError(
                f"strategy must be a file's path, a Strategy, or a builder or its spec, not a {type(chosen).__name__}"
            )
        # A hook of DDP does not know which gradients are sparse: the file says it, and its variables are compared with
        # the model's later. Rules match variables, so they need them now.
        ruled = isinstance(document, dict) and document.get("rules")
        chosen = schema.parse(document, where, variables if sparse_known or ruled else None, cluster)
    if chosen.world_size != cluster.world_size:
        raise ConfigError(
            f"the strategy is for {chosen.world_size} ranks, this run has {cluster.world_size}: build it again "
            f"(grace strategy build -n {cluster.world_size}), or start as many; a file that names no cluster is for any"
        )
    return chosen


def is_file(chosen: StrategyArg) -> bool:
    """Return True if a strategy is given as a file: a path, or text that is no builder's spec."""
    if not isinstance(chosen, str):
        return isinstance(chosen, Path)
    return chosen.endswith((".yaml", ".yml", ".json")) or os.path.isfile(chosen)  # not a folder of a builder's name


def read_document(file: str | Path) -> Any:
    """Return the document in a strategy's file."""
    return documents.parse(documents.read(Path(file)), str(file))


def make_shards(strategy: Strategy, variables: Sequence[Variable]) -> list[Shard]:
    """Return the shards of all variables; parts with equal exchanges share one communicator."""
    communicators: dict[ShardPlan, Communicator] = {}
    keys: dict[Hashable, ShardPlan] = {}
    choosers: dict[tuple[bool, Outer | None], Chooser] = {}
    shards = []
    for plan, variable in zip(strategy.plans, variables, strict=True):
        if plan.variable != variable:
            plan = dataclasses.replace(plan, variable=variable)  # the model's variable knows its device
        bounds = plan.bounds() or [(0, 0)]
        for part, own, (start, stop) in zip(plan.parts, plan.part_variables(), bounds, strict=True):
            # Keys are found by identity first: parts of a large model are often one object, and specs take long.
            key = keys.get(id(part))
            if key is None:
                written = dataclasses.replace(part, compressor=str(part.compressor), memory=str(part.memory))
                if written not in keys:
                    keys[written] = _sharing_key(part)
                key = keys[id(part)] = keys[written]
            if key not in communicators:
                communicators[key] = communicator_of(part)
            sync = part.sync
            outer = part.rounds
            if outer is not None:
                own = dataclasses.replace(own, sparse=False)  # drifts are dense
            # Drifts and gradients share no communicator: their steps, and units, are not the same.
            choose = choosers.setdefault((sync.hierarchical, outer), Chooser())
            reduced = communicators[key].rooted
            limits = Limits() if reduced and not own.sparse else None
            # Shards with equal ``fusion_key`` may share a bucket: those of one destination, or of one group.
            fusion_key = key if reduced else (sync.type, sync.group)
            carrier = choose(own, communicators[key])
            by_node = sync.hierarchical or (outer is not None and outer.over == "nodes")
            shards.append(
                Shard(
                    variable=own,
                    whole=variable,
                    communicator=carrier,
                    fusion_key=fusion_key,
                    limits=limits,
                    priority=part.priority,
                    outer=outer,
                    axis=plan.axis,
                    start=start,
                    stop=stop,
                    hierarchical=by_node,
                )
            )
    return shards


def _sharing_key(part: ShardPlan) -> ShardPlan:
    """Return a part's plan without what parts that share a communicator may differ in, its specs in one form."""
    return dataclasses.replace(
        part,
        sync=dataclasses.replace(part.sync, group=0),
        compressor=make("compressor", part.compressor).spec,
        memory=None if part.memory is None else make("memory", part.memory).spec,
        priority=0,
        outer=part.rounds,
    )
