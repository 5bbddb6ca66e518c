"""What is to be planned: a model on a cluster, what is known of both, and what may be lost."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from grace.core.registry import make
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.planner.quality import Errors, check_quality
from grace.planner.simulate import simulate
from grace.planner.step import Prediction, Timeline
from grace.planner.works import Costs, works
from grace.strategy.builder import Cluster
from grace.strategy.plan import Strategy

REFERENCE = "powersgd(rank=4)"
"""Whose error a plan may have, unless the user names another."""


@dataclass(frozen=True)
class Problem:
    """A model on a cluster.

    Attributes:
        variables: the model's, in declaration order.
        timeline: when it computes what.
        costs: what exchanging and computing takes.
        cluster: the ranks and their nodes.
        errors: ``||x - C(x)||^2`` on captured gradients, by the method's spec and the variable's name; what is not
            there is expected (:mod:`grace.planner.expected`).
        norms: ``||x||^2`` of captured gradients, by name.
        quality: the class, of :data:`grace.planner.quality.CLASSES`.
        methods: what may be chosen beside no compression; None for all that the class allows. Specs of compressors,
            as "topk(ratio=0.01)"; of communicators, as "reduce_broadcast(staleness=1)", which then carry uncompressed
            gradients; or dicts of "compressor", "memory" and "communicator". Votes and staleness must be named.
        reference: the spec of the method whose error, at uniform settings, is the budget.
        seed: of what the search draws.

    Raises:
        ConfigError: there is no such class, or the timeline does not tell when a gradient is ready.
    """

    variables: Sequence[Variable]
    timeline: Timeline
    costs: Costs
    cluster: Cluster
    errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    norms: Mapping[str, float] = field(default_factory=dict)
    quality: str = "feedback"
    methods: Sequence[str | Mapping[str, str]] | None = None
    reference: str = REFERENCE
    seed: int = 0

    def __post_init__(self) -> None:
        check_quality(self.quality)
        make("compressor", self.reference)
        for variable in self.variables:
            if variable.name not in self.timeline.ready:
                raise ConfigError(f"the timeline does not tell when the gradient of {variable.name!r} is ready")

    @functools.cached_property
    def losses(self) -> Errors:
        """What methods lose of each variable."""
        return Errors.of(self.variables, self.errors, self.norms)

    @functools.cached_property
    def budget(self) -> float:
        """The error that a plan may have."""
        return self.losses.budget(self.reference, self.variables)

    @property
    def several_per_node(self) -> bool:
        """Whether ranks of a node could exchange among themselves first."""
        return 1 < len(set(self.cluster.ranks)) < self.cluster.world_size

    def predict(self, strategy: Strategy) -> Prediction:
        """What a step takes under a strategy.

        Raises:
            ConfigError: the costs do not tell what one of its methods takes.
        """
        found = works(strategy, self.costs, self.cluster.ranks)
        return simulate(self.timeline, found, self.costs.contention, self.costs.step)
