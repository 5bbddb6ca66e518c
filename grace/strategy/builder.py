"""The builder contract: from a model's variables and a cluster to a strategy."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Union

from grace.backends.topology import Topology
from grace.communicators.choice import default_communicator
from grace.core.component import Component
from grace.core.compressor import Compressor
from grace.core.memory import Memory
from grace.core.registry import legal_communicators, make
from grace.core.specs import Spec
from grace.core.variable import Variable
from grace.strategy.plan import ShardPlan, Strategy, VariablePlan
from grace.strategy.rule import CompressorRules
from grace.strategy.sync import Sync

if TYPE_CHECKING:  # it needs pydantic, which a run without a strategy does not
    from grace.launch.cluster import Resources


Cluster = Union[Topology, "Resources"]
"""Cluster as builders see it: ``world_size``, the number of ranks; ``ranks``, the number of each rank's node; and
``nodes``, each with its ``address``, the numbers of its ``gpus`` and ``cpus``, and its ``network_bandwidth`` in Gbit/s,
None where no file tells it."""


class OneNode(Topology):
    """Cluster of so many ranks on this machine, for examples and for runs without a resource spec.

    >>> OneNode(3).ranks
    [0, 0, 0]
    """

    def __init__(self, world_size: int):
        super().__init__(["localhost"] * world_size)


@dataclass
class Builder(Component):
    """Decides how each variable is exchanged. Write ``build``.

    Args:
        compressor: for all variables: a spec, or a list of rules ``{"match": {...}, "compressor": ..., "memory":
            ...}``, the first of which that matches counts (as in a strategy file); what none matches travels as it is.
        memory: a spec, for what a rule compresses without one too; the compressor's default if left out.

    >>> class Everything(Builder):
    ...     name = "everything"
    ...     def build(self, variables, resources):
    ...         return self.strategy([VariablePlan(v, (self.collective(v, group=0),)) for v in variables], resources)
    >>> everything = Everything(compressor="topk")
    >>> everything.build([Variable("w", (4, 2))], OneNode(2)).plans[0].parts[0].sync.type
    'allgather'
    """

    compressor: Spec | Compressor | CompressorRules = "none"
    memory: Spec | Memory | None = None

    kind = "builder"
    _world_size: ClassVar[int] = 1
    """Number of ranks of the cluster that it builds for."""

    def __init_subclass__(cls, **kwargs: object):
        super().__init_subclass__(**kwargs)
        if "build" in vars(cls):
            cls.build = _with_world_size(cls.build)  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        """Check parameters; see ``check_integer`` and the like."""

    def build(self, variables: Sequence[Variable], resources: Cluster) -> Strategy:
        """Return the strategy for these variables, in their order, on this cluster.

        Args:
            variables: the model's variables with ``name``, ``shape``, ``dtype``, ``sparse``, ``nbytes``, ``device``; in
                the order of declaration, which :meth:`ready` turns into that in which gradients come.
            resources: the number of ranks, the node of each, and the nodes: addresses, devices, ``network_bandwidth``.
        """
        raise TypeError(f"{type(self).__name__} must define build(variables, resources)")

    @staticmethod
    def ready(variables: Sequence[Variable]) -> list[Variable]:
        """Return the variables in the order in which their gradients are expected: backward goes from the last declared
        to the first, and so do exchanges of equal ``priority``.
        >>> [variable.name for variable in Builder.ready([Variable("first", (1,)), Variable("last", (1,))])]
        ['last', 'first']
        """
        return list(reversed(variables))

    # -- helpers for builders --------------------------------------------------------------------------

    def choice(self, variable: Variable) -> tuple[Spec | Compressor, Spec | Memory | None]:
        """Return compressor and memory for a variable, as the user chose them."""
        if isinstance(self.compressor, (str, dict, Compressor)):
            return self.compressor, self.memory
        from grace.strategy.matching import chosen

        compressor, memory = chosen(self.compressor, variable)
        return compressor, self.memory if memory is None and compressor != "none" else memory

    def choosing(
        self, compressor: Spec | Compressor | CompressorRules, memory: Spec | Memory | None = None
    ) -> "Builder":
        """Return a builder for the same cluster that gives variables another compressor and memory."""
        other = Builder(compressor, memory)
        vars(other)["_world_size"] = self._world_size
        return other

    def _checked_choice(self, variable: Variable) -> tuple[Spec | Compressor, Spec | Memory | None]:
        """Return :meth:`choice`, which a user's class may define."""
        choice = self.choice(variable)
        if not isinstance(choice, (tuple, list)) or len(choice) != 2:
            raise self.error(f"choice() must return two things, (compressor, memory), not {choice!r}")
        return choice

    def collective(self, variable: Variable, group: int) -> ShardPlan:
        """Return the plan of a part that travels in a group: by a sum where the method allows it, else by the method's
        default communicator for the cluster's number of ranks."""
        compressor, memory = self._checked_choice(variable)
        method: Compressor = make("compressor", compressor)
        summed = "allreduce" in legal_communicators(method)
        kind = "allreduce" if summed else default_communicator(method, memory, self._world_size)
        return ShardPlan(Sync(kind, group=group), compressor, memory)

    def reduced(self, variable: Variable, destination: int, **options: Any) -> ShardPlan:
        """Return the plan of a part that one rank reduces, with further fields of ``sync``."""
        compressor, memory = self._checked_choice(variable)
        return ShardPlan(Sync("reduce_broadcast", destination=destination, **options), compressor, memory)

    def strategy(self, plans: Sequence[VariablePlan], resources: Cluster) -> Strategy:
        """Return the strategy with these plans, and with this builder's name and parameters."""
        params = {key: _to_plain(value) for key, value in self.to_dict().items() if key not in ("name", "seed")}
        builder = {"name": self.name, "params": params, "seed": getattr(self, "seed", 0)}
        return Strategy(tuple(plans), resources.world_size, len(set(resources.ranks)), builder)


def _with_world_size(build: Callable[..., Strategy]) -> Callable[..., Strategy]:
    """Wrap ``build`` so that the builder knows the number of ranks while it builds."""

    @functools.wraps(build)
    def run(self: Builder, variables: Sequence[Variable], resources: Cluster) -> Strategy:
        # Not an attribute that ``self`` sets: a user's builder may be a frozen dataclass.
        vars(self)["_world_size"] = resources.world_size
        built = build(self, variables, resources)
        if not isinstance(built, Strategy):
            made = type(built).__name__
            raise self.error(
                f"build() must return a Strategy, which self.strategy(plans, resources) makes, not a {made}"
            )
        return built

    return run


def _to_plain(value: object) -> object:
    """Return a parameter in its form in a file: components as specs."""
    if isinstance(value, dict):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    return value.spec if isinstance(value, Component) else value


def bandwidths(resources: Cluster) -> list[float] | None:
    """Return each rank's share of its node's bandwidth, in Gbit/s. A node without a bandwidth counts as the slowest of
    the others; None if no node has one.

    >>> from grace.launch.cluster import Resources
    >>> nodes = [{"address": "a", "chief": True, "cpus": [0, 1], "network_bandwidth": 10}, {"address": "b"}]
    >>> nodes[1]["ssh_config"] = "x"
    >>> bandwidths(Resources.from_document({"nodes": nodes, "ssh": {"x": {}}})), bandwidths(OneNode(2))
    ([5.0, 5.0, 10.0], None)
    """
    known = [node.network_bandwidth for node in resources.nodes if node.network_bandwidth is not None]
    if not known:
        return None
    ranks = Counter(resources.ranks)  # the ranks of a node share its link
    return [(resources.nodes[node].network_bandwidth or min(known)) / ranks[node] for node in resources.ranks]


class Loads:
    """Bytes assigned to each destination so far, with the destinations' speeds.

    >>> loads = Loads(OneNode(2))
    >>> [loads.assign(nbytes) for nbytes in (8, 4, 3, 2)]
    [0, 1, 1, 1]
    """

    def __init__(self, resources: Cluster):
        self.bytes = [0] * resources.world_size
        self.speed = bandwidths(resources) or [1.0] * resources.world_size

    def assign(self, nbytes: int) -> int:
        """Assign bytes to the destination that would have received all of its bytes first, and return it.

        It is the first of several. Where no bandwidths are known, it is the one with the fewest bytes.
        """
        # min takes the first of equals: every build gives the same strategy
        soonest = min(range(len(self.bytes)), key=lambda rank: (self.bytes[rank] + nbytes) / self.speed[rank])
        self.bytes[soonest] += nbytes
        return soonest
