"""Costs of a run of blocks as a stage: seconds, bytes, and the objective that the search minimizes.

The objective of a stage is the seconds that its ranks are busy in a step:

    M (forward + backward + crossing) + exchange

for M micro-batches. Crossing is the time of its borders; values and gradients travel at once, in their two directions.
A neighbour is taken to have as many replicas, and the exchange is summed over blocks, so that a stage's cost depends on
the stage alone. A simulation then tells the best few cuts apart.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np

from grace.pipeline.planning.blocks import ModelBlock
from grace.pipeline.planning.exchange_prediction import LEAST, Exchanges
from grace.pipeline.planning.graph import Graph, GraphNode
from grace.pipeline.planning.rank_layout import Devices
from grace.pipeline.planning.schedules import ALTERNATING

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """The choices that a dynamic program takes as given.

    Attributes:
        schedule: one of :data:`grace.pipeline.planning.schedules.SCHEDULES`.
        microbatches: number of micro-batches, M.
        recompute: True if only the values that enter a stage are kept, and forward is computed again.
        layout: one of :data:`grace.pipeline.planning.rank_layout.LAYOUTS`.
        equal_stages: number of stages, all with as many replicas; 0 if stages may have different numbers of replicas.
    """

    schedule: str
    microbatches: int
    recompute: bool = False
    layout: str = "replicas"
    equal_stages: int = 0


def _remembered(method: "Callable[Concatenate[Space, P], T]") -> "Callable[Concatenate[Space, P], T]":
    """Return a method of a space that computes the result for the same arguments once."""

    @functools.wraps(method)
    def call(self: "Space", *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the known result, or compute it."""
        key = method.__name__, args, tuple(kwargs.items())
        if key not in self._known:
            self._known[key] = method(self, *args, **kwargs)
        return self._known[key]

    return call


class _Sums(NamedTuple):
    """Sums of a number over the first 0, 1, ... blocks: of the part that does not depend on rows, and of the rest for
    the profile's rows."""

    fixed: np.ndarray
    by_rows: np.ndarray

    @classmethod
    def of_blocks(cls, blocks: Iterable[Sequence[tuple[float, float]]]) -> "_Sums":
        """Return the sums, of the number of each node of each block and the part of it that does not depend on rows."""
        fixed, by_rows = [], []
        for own in blocks:
            fixed.append(sum(min(part, number) for number, part in own))
            by_rows.append(sum(number for number, _ in own) - fixed[-1])
        return cls(_sums(fixed), _sums(by_rows))

    def for_rows(self, scale: float) -> np.ndarray:
        """Return the sums for so many times the profile's rows."""
        return self.fixed + self.by_rows * scale

    def of_runs(self, scale: float) -> np.ndarray:
        """Return the sums over every run of blocks, for so many times the profile's rows."""
        return _of_runs(self.fixed) + _of_runs(self.by_rows) * scale


@dataclass(eq=False)
class Space:
    """The space of a search: a model in blocks, and devices.

    Attributes:
        graph: the model.
        blocks: in an order in which each reads values of earlier ones only.
        devices: the devices.
        exchanges: predictor of the gradients' exchange.
        batch: rows of a step.
        limit: bytes that a rank may use.
        state: bytes of optimizer state for each byte of parameters.
        update: seconds of the optimizer's step for each byte of parameters.
    """

    graph: Graph
    blocks: Sequence[ModelBlock]
    devices: Devices
    exchanges: Exchanges
    batch: int
    limit: float = math.inf
    state: float = 0.0
    update: float = 0.0

    def __post_init__(self) -> None:
        graph = self.graph
        self.count = len(self.blocks)
        nodes = [[graph.nodes[graph.index[name]] for name in block.nodes] for block in self.blocks]
        self._forward = _Sums.of_blocks([(n.forward, n.overhead) for n in own] for own in nodes)
        self._backward = _Sums.of_blocks([(n.backward, n.overhead_back) for n in own] for own in nodes)
        self._kept = _Sums.of_blocks([(n.kept, n.kept_fixed) for n in own] for own in nodes)
        self._working = [[_working_bytes(graph, node) for node in own] for own in nodes]
        self.names = [list(dict.fromkeys(name for node in own for name in node.parameters)) for own in nodes]
        """Names of the parameters of each block."""
        self._variables = [[graph.variable(name) for name in own] for own in self.names]
        self._known: dict[object, Any] = {}
        """Results of :func:`_remembered` methods, by name and arguments."""
        blocks_of = Counter(name for own in self.names for name in own)
        self.tied = {name for name, count in blocks_of.items() if count > 1}
        """Parameters of several blocks."""
        self.passed = graph.passed_on([block.nodes for block in self.blocks])
        """Names of the values at each border between blocks."""
        self.parameters = _bytes_of_runs([{name: graph.parameters[name] for name in own} for own in self.names])
        """Bytes of the trained parameters of every run of blocks."""
        self.untrained = _bytes_of_runs([{k: v for node in own for k, v in node.held.items()} for own in nodes])
        """Bytes of the tensors that do not train, of every run of blocks."""
        values = [tuple(graph.inputs), *self.passed, ()]
        self.there = np.array([sum(map(graph.nbytes, own)) for own in values])
        """Bytes of the values at each border; the first border has the model's inputs."""
        self.given = np.array([sum(graph.inputs.get(name, 0.0) for name in own) for own in values])
        """Bytes of the model's inputs that stages behind each border read."""
        self.received = np.array([sum(graph.nbytes(n) for n in own if n not in graph.inputs) for own in values])
        """Bytes of the values that a stage receives from the previous one, at each border."""
        self.back = np.array([sum(graph.nbytes(n) for n in own if graph.differentiable(n)) for own in values])
        """Bytes of the gradients at each border."""
        self.returned = sum(map(graph.nbytes, graph.outputs))
        """Bytes of the model's outputs. Its loss keeps as many."""

    # -- one stage: blocks i to j, on r replicas --------------------------------------------------------

    def rows(self, microbatches: int, replicas: int) -> float:
        """Return the rows of a micro-batch on each replica; 0 if replicas do not divide them."""
        whole, rest = divmod(self.batch // microbatches, replicas)
        return 0 if rest else whole

    def seconds(self, i: int, j: int, rows: float) -> tuple[float, float]:
        """Return the seconds of forward and backward of a stage."""
        scale = rows / self.graph.rows
        return float(self._forward.of_runs(scale)[i, j]), float(self._backward.of_runs(scale)[i, j])

    @_remembered
    def exchange(self, i: int, j: int, replicas: int, leaves: bool, groups: int) -> float:
        """Return the seconds of the exchange of a stage's parameters; see :meth:`Devices.exchange` for ``leaves`` and
        ``groups``."""
        names = dict.fromkeys(name for own in self.names[i:j] for name in own)
        network = self.devices.exchange_network(leaves, groups)
        return self.exchanges.seconds([self.graph.variable(name) for name in names], replicas, network)

    # -- all stages at once, as arrays [i, j] or [i, j, r] ----------------------------------------------

    @_remembered
    def needed_bytes(self, setting: Setting, replicas: int, in_flight: int) -> np.ndarray:
        """Return the bytes that a rank needs for every run of blocks, with so many micro-batches in flight."""
        scale = self.rows(setting.microbatches, replicas) / self.graph.rows
        received, returned = self.received[:, None] * scale, self.back * scale
        # parameters with gradients and optimizer state, the batch, and the gradients that come back
        needed = self.parameters * (2 + self.state) + self.untrained + _of_runs(self._grace_bytes(replicas))
        needed = needed + self.given[:, None] * scale * setting.microbatches + returned[None, :]
        needed = needed + self._working_bytes(setting.microbatches, replicas)
        if setting.schedule in ALTERNATING:  # gradients are sent back while the next micro-batch is computed
            needed = needed + returned[:, None]
        saved = self._kept.of_runs(scale)
        saved[:, -1] += self.returned * scale  # of the last stage, which computes the loss
        saved_at_once = np.full(self.count + 1, in_flight)
        if setting.recompute:
            saved_at_once[:-1] = 1  # the last stage keeps what it computes
        return needed + (received * in_flight + saved * saved_at_once[None, :])

    @_remembered
    def _working_bytes(self, microbatches: int, replicas: int) -> np.ndarray:
        """Return the bytes of gradients while one node is differentiated, of every run of blocks, and those of the
        values that it sends, which stay until backward ends."""
        scale = self.rows(microbatches, replicas) / self.graph.rows
        working = np.zeros((self.count + 1, self.count + 1))
        most = [max(rows * scale + own * (microbatches > 1) for rows, own in block) for block in self._working]
        freed = self._kept.for_rows(scale)  # backward of a block frees what later blocks kept
        for i in range(self.count):
            working[i, i + 1 :] = np.maximum.accumulate(most[i:] + freed[i + 1 :]) - freed[i + 1 :]
        return working + (self.received * scale)[None, :]

    @_remembered
    def _grace_bytes(self, replicas: int) -> np.ndarray:
        """Return the bytes of Grace's memories and wires, summed over blocks."""
        return _sums([self.exchanges.grace_bytes(own, replicas) for own in self._variables])

    @_remembered
    def _exchange_parts(self, replicas: int, leaves: bool, groups: int) -> tuple[float, np.ndarray]:
        """Return the seconds of an empty exchange, and those that blocks add to it, summed over blocks."""
        network = self.devices.exchange_network(leaves, groups)
        least = self.exchanges.seconds([LEAST], replicas, network)  # what every exchange takes, however few bytes
        each = [self.exchanges.seconds(own, replicas, network) for own in self._variables]
        return least, _sums([max(0.0, one - least) for one in each])

    def _neighbours(self, setting: Setting, start: int, replicas: int) -> list[tuple[int, ...]]:
        """Return the ranks of the previous stage, of this one and of the next; empty if there is no such stage. See
        :meth:`arrays` for ``start``."""
        count = self.devices.count
        if setting.layout == "stages":
            stages = setting.equal_stages
            near = (start - 1, start, start + 1)
            return [tuple(range(stage, count, stages)) if 0 <= stage < stages else () for stage in near]
        ends = [start - replicas, start, start + replicas, start + 2 * replicas]
        return [tuple(range(max(0, a), min(count, b))) for a, b in itertools.pairwise(ends)]

    @_remembered
    def arrays(self, setting: Setting, start: int, most: int, in_flight: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the cost and the bytes of every run of blocks with 1 to ``most`` replicas, as arrays [i, j, r]. Both
        are infinite if the run is impossible, the cost also if memory does not suffice.

        Args:
            setting: the choices that are given.
            start: first rank of the stage in the layout "replicas", number of the stage in the layout "stages"; 0 if
                all ranks are on one node, where all stages are alike.
            most: largest number of replicas.
            in_flight: number of micro-batches whose activations are kept at once.
        """
        size = self.count + 1
        cost = np.full((size, size, most + 1), np.inf)
        needed = np.full((size, size, most + 1), np.inf)
        runs = np.triu(np.ones((size, size), bool), 1)  # i < j: a stage has a block at least
        for r in range(1, most + 1):
            rows = self.rows(setting.microbatches, r)
            if not rows or (setting.equal_stages and r * setting.equal_stages != self.devices.count):
                continue
            needed[:, :, r] = np.where(runs, self.needed_bytes(setting, r, in_flight), np.inf)
            fits = needed[:, :, r] <= self.limit * (1 + 1e-12)  # a rounding error is not too much
            cost[:, :, r] = np.where(runs & fits, self._busy(setting, start, r, rows / self.graph.rows), np.inf)
        return cost, needed

    def _busy(self, setting: Setting, start: int, r: int, scale: float) -> np.ndarray:
        """Return the seconds that a rank is busy with every run of blocks."""
        forward, backward = self._forward.of_runs(scale), self._backward.of_runs(scale)
        busy = forward * (2 if setting.recompute else 1) + backward
        leaves, sharing = False, 1
        if self.devices.one_node:  # all ranks are alike
            before, here, behind = (tuple(range(k * r, k * r + r)) for k in range(3))
            crossing = Devices((0,) * (3 * r), self.devices.inner_network).crossing
        else:
            before, here, behind = self._neighbours(setting, start, r)
            crossing = self.devices.crossing
            groups = [here]
            if setting.layout == "stages":
                groups = [self._neighbours(setting, stage, r)[1] for stage in range(setting.equal_stages)]
            leaves, sharing = self.devices.exchange(groups, groups.index(here))
        for axis, (senders, receivers) in enumerate(((before, here), (here, behind))):
            side = np.zeros(self.count + 1)
            for b in range(1, self.count):
                there, back = float(self.there[b]) * (scale * r), float(self.back[b]) * (scale * r)
                side[b] = max(crossing(senders, receivers, there), crossing(receivers, senders, back))
            busy = busy + np.expand_dims(side, 1 - axis)
        least, each = self._exchange_parts(r, leaves, sharing)
        exchange = np.where(self.parameters > 0, least + each[None, :] - each[:, None], 0.0)
        return setting.microbatches * busy + exchange + self.parameters * self.update


def _bytes_of_runs(tables: Sequence[Mapping[str, float]]) -> np.ndarray:
    """Return the bytes of the tensors of every run of blocks, each tensor once, of the tensors of each block."""
    found = np.zeros((len(tables) + 1, len(tables) + 1))
    for i in range(len(tables)):
        known: set[str] = set()
        for j in range(i, len(tables)):
            new = tables[j].keys() - known
            known |= new
            found[i, j + 1] = found[i, j] + sum(tables[j][name] for name in sorted(new))
    return found


def _working_bytes(graph: Graph, node: GraphNode) -> tuple[float, float]:
    """Return the bytes of gradients while a node is differentiated: of values, for the profile's rows; and of
    parameters and of values without rows."""
    by_rows = node.nbytes + sum(graph.nbytes(name) for name in node.inputs if graph.differentiable(name))
    return by_rows, sum(node.parameters.values()) + node.kept_fixed


def _sums(values: Sequence[float]) -> np.ndarray:
    """Return the sums of the first 0, 1, ... values."""
    return np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])


def _of_runs(sums: np.ndarray) -> np.ndarray:
    """Return the sums over every run of blocks, of the sums over the first 0, 1, ... blocks."""
    return sums[None, :] - sums[:, None]
