"""What each bucket of a plan does in a step: bytes as its exchange packs them, and seconds as they were measured.

    allreduce                       allreduce, or alltoall and allgather of small ones where the engine's sums go round
                                    a ring (grace.exchange.two_hops); again for each of the method's rounds
    allgather                       (sizes,) allgather, or one of both where the engine takes unequal lengths
    broadcast                       (sizes,) a broadcast from each rank
    scatter_reduce, scatter_merge   alltoall, allgather
    reduce_broadcast                (sizes,) gather, (sizes,) broadcast; again for each of the method's rounds

Sizes go ahead where the data decide them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grace.communicators import Allreduce
from grace.communicators.sparse import row_communicator
from grace.core.route import EngineTraits
from grace.core.variable import equal_sizes
from grace.errors import ConfigError
from grace.exchange.bucket import Bucket
from grace.exchange.route_bytes import bytes_of, bytes_within_node
from grace.planner.costs import Codec
from grace.planner.network import Network, rooted
from grace.planner.payloads import Payloads, check_bits, elements_of, kept_bytes, payloads_of
from grace.planner.step import ALONE, Contention, Transfer, Work
from grace.session.sharding import Shard, make_buckets
from grace.strategy.execution import compiled
from grace.strategy.plan import Strategy

DENSE = "allreduce, none, none"
"""What carries averages, and what the ranks of a node reduce among themselves."""
MOST_KNOWN = 100_000
"""Buckets that are remembered."""


@dataclass(frozen=True)
class Costs:
    """What is known of a cluster and of the methods on it.

    Attributes:
        network: between the ranks that exchange.
        codecs: what computing takes, by :func:`codec_key`.
        inside: within a node; the network itself if left out.
        between: between the nodes' leaders in hierarchical exchanges; the network itself if left out.
        contention: what computing and exchanges beside it cost each other.
        bucket: seconds of fixed work per bucket.
        step: seconds of fixed work per step.
        by_ring: whether the engine's sums go round a ring (:attr:`grace.core.backend.Backend.by_ring`).
        concatenates: whether it gathers payloads of unequal sizes itself
            (:attr:`grace.core.backend.Backend.concatenates`).
        rows: rows that a step's gradients have, of sparse variables by name; all of them where it does not say.
    """

    network: Network
    codecs: Mapping[str, Codec]
    inside: Network | None = None
    contention: Contention = ALONE
    bucket: float = 0.0
    step: float = 0.0
    by_ring: bool = False
    concatenates: bool = False
    rows: Mapping[str, float] = field(default_factory=dict)
    between: Network | None = None
    known: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)
    """Buckets that were worked out before."""


def codec_key(communicator: Any) -> str:
    """By which a codec is known: communicator, compressor and memory, without the communicator's own parameters, which
    say who computes and when.

    >>> from grace.communicators import ReduceBroadcast
    >>> codec_key(ReduceBroadcast("topk", destination=1))
    'reduce_broadcast, topk, residual'
    """
    return f"{communicator.name}, {communicator.compressor.spec}, {communicator.memory.spec}"


def works(strategy: Strategy, costs: Costs, nodes: Sequence[int] | None = None) -> list[Work]:
    """The buckets of a strategy, in the order in which ranks start them; averages come last.

    Args:
        strategy: whose world size counts.
        costs: of what it does.
        nodes: the number of the node of each rank; as many on each of the strategy's nodes if left out.

    Raises:
        ConfigError: there is no codec for what it uses; the message names it.

    >>> from grace.core.variable import Variable
    >>> from grace.planner.network import Links
    >>> from grace.strategy.plan import ShardPlan, VariablePlan
    >>> plans = tuple(VariablePlan(Variable(name, (1000,)), (ShardPlan(),)) for name in "ab")
    >>> (work,) = works(Strategy(plans, world_size=2), Costs(Links(1e9), {DENSE: Codec()}))
    >>> work.names, work.transfers[0].nbytes
    (('a', 'b'), 8048.0)
    """
    if nodes is None:
        sizes = equal_sizes(strategy.world_size, strategy.nodes)
        nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    return works_of(compiled(strategy, strategy.variables), strategy.world_size, costs, nodes)


def works_of(shards: Sequence[Shard], ranks: int, costs: Costs, nodes: Sequence[int] | None = None) -> list[Work]:
    """The same for shards (of a plan that is no strategy), whose communicators need not be in a run.

    Args:
        nodes: the number of the node of each rank; all on one if left out.

    Raises:
        ConfigError: as :func:`works`; or the nodes are those of another number of ranks.
    """
    if nodes is not None and len(nodes) != ranks:
        raise ConfigError(f"nodes= tells the nodes of {len(nodes)} ranks, and there are {ranks}")
    by_name = {shard.variable.name: shard for shard in shards}
    places = Places.of(ranks, nodes)
    ways: dict[int, Way] = {}
    for shard in shards:
        if id(shard.communicator) not in ways:
            ways[id(shard.communicator)] = Way.of(shard.communicator)
    found, carried = [], set[bool]()
    for bucket in make_buckets([shard for shard in shards if not shard.period]):
        delayed = bucket.communicator.delayed
        bucket.carries = delayed not in carried  # one bucket of a step tells the ranks' places, and one beside training
        carried.add(delayed)
        found.append(
            _known(bucket, ways[id(bucket.communicator)], [by_name[name] for name in bucket.names], places, costs)
        )
    for bucket in make_buckets([shard for shard in shards if shard.period]):
        found.append(
            _known(bucket, ways[id(bucket.communicator)], [by_name[name] for name in bucket.names], places, costs)
        )
    return found


@dataclass(frozen=True)
class Way:
    """What is the same for all buckets of a communicator.

    Attributes:
        described: it, with all of its parameters.
        key: of its codec.
        stateful_parts: those of its parts that keep something, by what they are.
    """

    described: str
    key: str
    stateful_parts: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, communicator: Any) -> "Way":
        """That of a communicator."""
        stateful = tuple((kind, part) for kind, part in communicator.stateful_parts.items() if part.stateful)
        return cls(communicator.describe(), codec_key(communicator), stateful)


@dataclass(frozen=True)
class Places:
    """Who takes part.

    Attributes:
        ranks: how many.
        nodes: on how many nodes.
        largest: ranks of the largest node.
        node_of: each rank's node; empty if all are on one.
    """

    ranks: int
    nodes: int = 1
    largest: int = 1
    node_of: tuple[int, ...] = ()

    @classmethod
    def of(cls, ranks: int, nodes: Sequence[int] | None) -> "Places":
        """Of so many ranks on these nodes."""
        if nodes is None:
            return cls(ranks, 1, ranks)
        counts: dict[int, int] = {}
        for node in nodes:
            counts[node] = counts.get(node, 0) + 1
        order = {node: i for i, node in enumerate(counts)}
        return cls(ranks, len(counts), max(counts.values(), default=1), tuple(order[node] for node in nodes))


def _known(bucket: Bucket, way: Way, shards: Sequence[Shard], places: Places, costs: Costs) -> Work:
    """The bucket's work, which may have been worked out before."""
    variables, names = tuple(bucket.variables), tuple(dict.fromkeys([shard.whole.name for shard in shards]))
    first = shards[0]
    key = (
        way.described,
        variables,
        names,
        bucket.carries,
        first.hierarchical,
        first.period,
        places,
    )
    work = costs.known.get(key)
    if work is None:
        if len(costs.known) >= MOST_KNOWN:
            costs.known.clear()
        work = costs.known[key] = _Exchange(bucket, way, names, first, places, costs).work()
    return work  # type: ignore[no-any-return]


class _Exchange:
    """What one bucket does."""

    def __init__(self, bucket: Bucket, way: Way, names: tuple[str, ...], shard: Shard, places: Places, costs: Costs):
        self.bucket, self.way, self.names, self.shard, self.costs, self.places = (
            bucket,
            way,
            names,
            shard,
            costs,
            places,
        )
        self.communicator: Any = bucket.communicator
        self.led = shard.hierarchical and places.ranks > 1
        self.ranks = places.nodes if self.led else places.ranks
        self.inside, self.between = costs.inside or costs.network, costs.between or costs.network
        self.network = self.between if self.led else costs.network
        key = DENSE if shard.period else way.key
        codec = costs.codecs.get(key)
        if codec is None:
            raise ConfigError(
                f"{self.names[0]!r} is carried by {key}, and nobody measured what that takes. Measured: "
                f"{', '.join(map(repr, costs.codecs)) or 'nothing'}"
            )
        self.codec, self.key = codec, key
        variables = bucket.variables
        self.sparse = variables[0].sparse and not shard.period  # averages now and then are dense
        self.elements = elements_of(variables, costs.rows, self.sparse)
        check_bits(bucket, codec.bits)

    def _engine(self, ranks: int) -> EngineTraits:
        on_cpu = self.bucket.variables[0].device.startswith("cpu")
        return EngineTraits(ranks, self.costs.by_ring, self.costs.concatenates, on_cpu)

    def work(self) -> Work:
        """All of it."""
        legs = bytes_of(self.bucket, self._engine(self.ranks), self.codec.bits, self.costs.rows)
        payloads = payloads_of(legs, self.ranks)
        transfers = tuple(transfer for one in payloads for transfer in self._transfers(one))
        before, after, inside = self._within() if self.led else (0.0, 0.0, 0.0)
        gaps, usual = len(payloads) - 1, sum(not payload.hop for payload in payloads) - 1
        size = len(self.bucket.variables), self.elements, self.ranks
        return Work(
            names=self.names,
            start=self.codec.start.seconds(*size) + self.costs.bucket,
            transfers=transfers if self.ranks > 1 else (),
            middle=self.codec.middle.seconds(*size) * usual / gaps if gaps else 0.0,
            finish=self.codec.finish.seconds(*size),
            delayed=self.communicator.delayed and not self.shard.period,
            memory=kept_bytes(
                self.bucket, self.ranks, self.elements, payloads, () if self.shard.period else self.way.stateful_parts
            ),
            before=before,
            after=after,
            inside=inside,
            period=self.shard.period,
            method=self.key,
        )

    def _transfers(self, payload: Payloads) -> list[Transfer]:
        """A collective, as the wire sees it."""
        kind, nbytes, ranks, network = payload.kind, payload.nbytes, self.ranks, self.network
        others = ranks - 1
        if not payload.rooted:
            timed = "allreduce16" if payload.half else kind
            each = network.seconds(timed, nbytes, ranks)
            occupies = max(0.0, each - network.seconds(timed, 0.0, ranks))
            if kind == "broadcast":  # from each rank in its turn
                return [Transfer(kind, ranks * each, others * nbytes, occupies=ranks * occupies)]
            share = {"allreduce": 2 * others / ranks, "allgather": others, "alltoall": others / ranks}[kind]
            return [Transfer(kind, each, share * nbytes, occupies=occupies)]
        root = self.root
        each, one = rooted(network, kind, nbytes, ranks, root)
        if kind == "gather":
            return [Transfer(kind, each, nbytes, root, one)]
        if not self.communicator.local_replication or self.led or self.places.ranks == 1:
            return [Transfer(kind, each, 0.0, root, one, others * nbytes)]
        nodes, largest = self.places.nodes, self.places.largest
        hand_on = self.inside.seconds(kind, nbytes, largest)
        between = self.between.seconds(kind, nbytes, nodes)
        own = self._node_size(root)
        sent = (nodes - 1 + own - 1) * nbytes
        return [Transfer(kind, between + hand_on, 0.0, root, (one if nodes > 1 else 0.0) + hand_on, sent)]

    @property
    def root(self) -> int:
        """The destination; that of the node that speaks for it, among those."""
        destination: int = self.communicator.destination
        if not self.led:
            return destination
        return self.places.node_of[destination] if self.places.node_of else 0

    def _node_size(self, rank: int) -> int:
        node_of = self.places.node_of
        return node_of.count(node_of[rank]) if node_of else self.places.ranks

    def _within(self) -> tuple[float, float, float]:
        """Seconds before and behind, and bytes, of the exchange within the node."""
        largest, inside = self.places.largest, self.inside
        if largest == 1:
            return 0.0, 0.0, 0.0
        dense = self.costs.codecs.get(DENSE)
        if dense is None:
            raise ConfigError(f"hierarchical exchanges need a codec of {DENSE}, and nobody measured that")
        own: Any = row_communicator(Allreduce("none"), "") if self.sparse else Allreduce("none")
        there = bytes_within_node(self.bucket, own, self._engine(largest), self.costs.rows)
        before, after = (
            sum(inside.seconds(one.kind, one.nbytes, largest) for one in payloads_of(legs, largest)) for legs in there
        )
        variables, elements = len(self.bucket.variables), self.elements
        before += dense.start.seconds(variables, elements, largest) + dense.finish.seconds(variables, elements, largest)
        return before, after, sum(one.leg.sent(one.nbytes, largest, 0) for legs in there for one in legs)
