"""What a run of blocks takes as a stage: seconds, bytes kept, and what the search minimizes.

The objective of a stage is the seconds that its ranks are busy in a step:

    M (forward + backward + crossing) + exchange

for M micro-batches; crossing is what its boundaries take, values and gradients at once in their two directions. The
neighbours' numbers of replicas are taken for its own, and the exchange for the sum over its blocks, so that a stage's
cost depends on nothing but itself; a simulation then tells the best few apart.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from grace.partition.blocks import Block, blocks, cut_at
from grace.partition.exchange import LEAST, Exchanges
from grace.partition.graph import Graph, Node
from grace.partition.layout import Devices
from grace.partition.orders import SINGLE, rank_of
from grace.partition.schedule import most_kept


@dataclass(frozen=True)
class Setting:
    """What a dynamic program takes as given.

    Attributes:
        schedule: one of :data:`grace.partition.plan.SCHEDULES`.
        microbatches: M.
        recompute: whether only what comes into a stage is kept, and forward computed again.
        layout: of :data:`grace.partition.layout.LAYOUTS`.
        places: of the pipeline; 0 for all that the program finds, with replicas as they come.
        local: stages on a place.
        share: part of a rank's memory that one stage may have.
    """

    schedule: str
    microbatches: int
    recompute: bool = False
    layout: str = "replicas"
    places: int = 0
    local: int = 1
    share: float = 1.0


class Memory(NamedTuple):
    """Bytes on a rank, of every run of blocks at [i, j].

    Attributes:
        static: whatever is under way: parameters, gradients, optimizer state, buffers, Grace's, the batch, and the
            gradients that come of one micro-batch.
        arrived: of one micro-batch, from forward to backward: the values that the stage before sent.
        made: of one micro-batch, from forward to backward: what forward keeps.
        working: beside them, while one node is differentiated: gradients of its values and parameters.
        returning: gradients that go to the stage before while the next micro-batch is computed; GPipe computes none.
    """

    static: np.ndarray
    arrived: np.ndarray
    made: np.ndarray
    working: np.ndarray
    returning: np.ndarray

    def around(self, schedule: str) -> np.ndarray:
        """Bytes beside those of micro-batches that wait for their backward."""
        return self.static + self.working + (self.returning if schedule != "gpipe" else 0.0)


class Space:
    """A model in blocks, on devices.

    Args:
        graph: the model.
        made: blocks, in an order in which each reads of earlier ones only.
        devices: the ranks.
        exchanges: of gradients.
        batch: rows of a step.
        limit: bytes that a rank may use; None for no limit.
        state: bytes of optimizer state for each byte of parameters.
        update: seconds of the optimizer's step for each byte of parameters.
    """

    def __init__(
        self,
        graph: Graph,
        made: Sequence[Block],
        devices: Devices,
        exchanges: Exchanges,
        batch: int,
        limit: float | None = None,
        state: float = 0.0,
        update: float = 0.0,
    ):
        self.graph, self.blocks, self.devices, self.exchanges = graph, list(made), devices, exchanges
        self.batch, self.limit = batch, math.inf if limit is None else limit
        self.state, self.update = state, update
        self.count = len(self.blocks)
        nodes = [[graph.nodes[graph.index[name]] for name in block.nodes] for block in self.blocks]
        fixed = [[min(n.overhead, n.forward) for n in own] for own in nodes]
        fixed_back = [[min(n.overhead_back, n.backward) for n in own] for own in nodes]
        self._fixed = _sums([sum(a) for a in fixed]), _sums([sum(b) for b in fixed_back])
        self._linear = (
            _sums([block.forward - sum(a) for block, a in zip(self.blocks, fixed, strict=True)]),
            _sums([block.backward - sum(b) for block, b in zip(self.blocks, fixed_back, strict=True)]),
        )
        fixed_kept = [[min(n.kept_fixed, n.kept) for n in own] for own in nodes]
        self._kept = (
            _sums([sum(fixed) for fixed in fixed_kept]),
            _sums([sum(n.kept for n in own) - sum(fixed) for own, fixed in zip(nodes, fixed_kept, strict=True)]),
        )
        self._working = _numbers(graph, nodes)
        self.names = [list(dict.fromkeys(name for node in own for name in node.parameters)) for own in nodes]
        self._variables = [[graph.variable(name) for name in own] for own in self.names]
        self._known_ours: dict[int, np.ndarray] = {}
        self._known_memory: dict[tuple[int, int], Memory] = {}
        self._known_exchanges: dict[tuple[int, bool, int], tuple[float, np.ndarray]] = {}
        self._known_stages: dict[tuple[int, int, int, bool, int], float] = {}
        often = Counter(name for own in self.names for name in own)
        self.tied = {name for name, count in often.items() if count > 1}
        """Parameters of several blocks."""
        self._arrays: dict[object, tuple[np.ndarray, np.ndarray]] = {}
        self.passed = graph.passed_on([block.nodes for block in self.blocks])
        self.untrained = _distinct([node.held for node in own] for own in nodes)
        """Bytes of what does not train, of blocks i to j, each once, at [i, j]."""
        values = [tuple(graph.inputs), *self.passed, ()]
        arriving = [[name for name in own if name not in graph.inputs] for own in values]
        self.arriving = np.array([sum(map(graph.nbytes, own)) for own in arriving])
        """Bytes of values that a stage gets from the one before it, at each boundary."""
        self.given = np.array([sum(graph.nbytes(name) for name in own if name in graph.inputs) for own in values])
        """Bytes of the model's inputs that stages behind each boundary read."""
        self.returned = sum(map(graph.nbytes, graph.outputs))
        """Bytes of the model's outputs, as much of which its loss keeps."""
        self.there = np.array([sum(graph.nbytes(name) for name in own) for own in values])
        """Bytes of values at each boundary, the model's inputs first."""
        self.back = np.array([sum(graph.nbytes(n) for n in own if graph.differentiable(n)) for own in values])
        """Bytes of gradients at each boundary."""

    def recut(self, cuts: Sequence[str] | None, most: int = 32) -> "Space":
        """The same with other blocks: between cuts (:func:`grace.partition.blocks.cut_at`), or at most so many."""
        made = blocks(self.graph, most) if cuts is None else cut_at(self.graph, cuts)
        limit = self.limit if math.isfinite(self.limit) else None
        return Space(self.graph, made, self.devices, self.exchanges, self.batch, limit, self.state, self.update)

    # -- one stage: blocks i to j, on r replicas --------------------------------------------------------

    def rows(self, microbatches: int, replicas: int) -> float:
        """Rows of a micro-batch on each of the replicas; 0 if they do not divide them."""
        whole, rest = divmod(self.batch // microbatches, replicas)
        return 0 if rest else whole

    def seconds(self, i: int, j: int, rows: float) -> tuple[float, float]:
        """Forward and backward."""
        scale = rows / self.graph.rows
        forward, backward = (
            float(fixed[j] - fixed[i] + (linear[j] - linear[i]) * scale)
            for fixed, linear in zip(self._fixed, self._linear, strict=True)
        )
        return forward, backward

    @functools.cached_property
    def parameters(self) -> np.ndarray:
        """Bytes of the parameters of blocks i to j, each once, at [i, j]."""
        return _distinct([{name: self.graph.parameters[name] for name in own}] for own in self.names)

    def memory(self, replicas: int, microbatches: int) -> "Memory":
        """Bytes of every run of blocks as a stage."""
        key = replicas, microbatches
        if key not in self._known_memory:
            scale, ours = self.rows(microbatches, replicas) / self.graph.rows, self._ours(replicas)
            static = self.parameters * (2 + self.state) + self.untrained + ours[None, :] - ours[:, None]
            fixed, linear = (sums[None, :] - sums[:, None] for sums in self._kept)
            made = fixed + linear * scale
            made[:, -1] += self.returned * scale
            working = np.zeros_like(made)
            most = [max(rows * scale + own * (microbatches > 1) for rows, own in block) for block in self._working]
            freed = self._kept[0] + self._kept[1] * scale  # by a block's backward, what later blocks kept
            for i in range(self.count):
                working[i, i + 1 :] = np.maximum.accumulate(most[i:] + freed[i + 1 :]) - freed[i + 1 :]
            working += (self.arriving * scale)[None, :]  # what is sent on is there until backward ends
            self._known_memory[key] = Memory(
                static + self.given[:, None] * scale * microbatches + self.back[None, :] * scale,
                np.broadcast_to((self.arriving * scale)[:, None], made.shape),
                made,
                working,
                np.broadcast_to((self.back * scale)[:, None], made.shape),
            )
        return self._known_memory[key]

    def _ours(self, replicas: int) -> np.ndarray:
        """Sums over the blocks of what Grace keeps."""
        if replicas not in self._known_ours:
            self._known_ours[replicas] = _sums([self.exchanges.kept(own, replicas) for own in self._variables])
        return self._known_ours[replicas]

    def _exchange(self, replicas: int, leaves: bool, groups: int) -> tuple[float, np.ndarray]:
        """Seconds of an exchange of almost nothing, and what each block adds, summed up."""
        key = replicas, leaves, groups
        if key not in self._known_exchanges:
            network = self.devices.between(leaves, groups)
            least = self.exchanges.seconds([LEAST], replicas, network)
            each = [self.exchanges.seconds(own, replicas, network) for own in self._variables]
            self._known_exchanges[key] = least, _sums([max(0.0, one - least) for one in each])
        return self._known_exchanges[key]

    def exchange(self, i: int, j: int, replicas: int, leaves: bool, groups: int) -> float:
        """Seconds of the exchange of all parameters of blocks i to j, over replicas that :meth:`Devices.exchange`
        tells about."""
        key = i, j, replicas, leaves, groups
        if key not in self._known_stages:
            names = dict.fromkeys(name for own in self.names[i:j] for name in own)
            network = self.devices.between(leaves, groups)
            variables = [self.graph.variable(name) for name in names]
            self._known_stages[key] = self.exchanges.seconds(variables, replicas, network)
        return self._known_stages[key]

    # -- all stages at once, as arrays [i, j, r] -------------------------------------------------------

    def groups(self, setting: Setting, start: int, replicas: int) -> list[tuple[int, ...]]:
        """Ranks of the place before, of this one, and of the one behind; empty where there is none.

        Args:
            start: the first rank of the layout "replicas", and the place of the layout "stages".
        """
        count = self.devices.count
        if setting.layout == "stages":
            places, many = setting.places, count
            return [
                tuple(range(place % places, many, places)) if 0 <= place < places or setting.local > 1 else ()
                for place in (start - 1, start, start + 1)
            ]
        ends = [start - replicas, start, start + replicas, start + 2 * replicas]
        found = [tuple(range(max(0, a), min(count, b))) for a, b in itertools.pairwise(ends)]
        if setting.local > 1:  # they are dealt round
            found = [
                own or tuple(range(count - replicas, count) if k == 0 else range(replicas))
                for k, own in enumerate(found)
            ]
        return found

    def arrays(self, setting: Setting, start: int, most: int, held: int) -> tuple[np.ndarray, np.ndarray]:
        """Cost and memory of every run of blocks with 1 to ``most`` replicas; infinite where none are possible.

        Args:
            start: see :meth:`groups`.
            held: micro-batches whose activations are kept at once.

        Returns:
            Two arrays [i, j, r]; the cost is infinite too where memory does not suffice.
        """
        key = setting, None if self.devices.one_node else start, most, held
        if key not in self._arrays:
            self._arrays[key] = self._made_arrays(setting, start, most, held)
        return self._arrays[key]

    def _made_arrays(self, setting: Setting, start: int, most: int, held: int) -> tuple[np.ndarray, np.ndarray]:
        size, many = self.count + 1, setting.microbatches
        cost = np.full((size, size, most + 1), np.inf)
        memory = np.full((size, size, most + 1), np.inf)
        runs = np.triu(np.ones((size, size), bool), 1)
        for r in range(1, most + 1):
            rows = self.rows(many, r)
            if not rows or (setting.places and r * setting.places != self.devices.count):
                continue
            scale = rows / self.graph.rows
            taken = self._busy(setting, start, r, scale)
            own = self.memory(r, many)
            at_once = np.full(size, held)
            if setting.recompute:
                at_once[:-1] = 1  # the last stage keeps what it computes
            under_way = own.arrived * held + own.made * at_once[None, :]
            memory[:, :, r] = np.where(runs, own.around(setting.schedule) + under_way, np.inf)
            fits = memory[:, :, r] <= self.limit * setting.share * (1 + 1e-12)
            cost[:, :, r] = np.where(runs & fits, taken, np.inf)
        return cost, memory

    def _busy(self, setting: Setting, start: int, r: int, scale: float) -> np.ndarray:
        """Seconds of each run of blocks."""
        own = [
            (f[None, :] - f[:, None]) + (n[None, :] - n[:, None]) * scale
            for f, n in zip(self._fixed, self._linear, strict=True)
        ]
        busy = own[0] * (2 if setting.recompute else 1) + own[1]
        before, here, behind = self.groups(setting, start, r)
        whole = scale * r
        sides = [np.zeros(self.count + 1), np.zeros(self.count + 1)]
        crossing = self.devices.crossing
        if self.devices.one_node:  # all places are alike
            before, here, behind = (tuple(range(k * r, k * r + r)) for k in range(3))
            crossing = _alike(3 * r, self.devices).crossing
        for side, (senders, receivers) in enumerate(((before, here), (here, behind))):
            for b in range(1, self.count):
                there, back = float(self.there[b]) * whole, float(self.back[b]) * whole
                sides[side][b] = max(crossing(senders, receivers, there), crossing(receivers, senders, back))
        busy = busy + sides[0][:, None] + sides[1][None, :]
        leaves, shared = False, 1
        if not self.devices.one_node:
            groups = [here]
            if setting.layout == "stages":
                groups = [self.groups(setting, place, r)[1] for place in range(setting.places)]
            leaves, shared = self.devices.exchange(groups, groups.index(here))
        least, each = self._exchange(r, leaves, shared)
        exchange = np.where(self.parameters > 0, least + each[None, :] - each[:, None], 0.0)
        return setting.microbatches * busy + exchange + self.parameters * self.update

    def held(self, setting: Setting, stages: int, stage: int) -> int:
        """Micro-batches that a stage keeps at once."""
        if setting.schedule in SINGLE:
            return setting.microbatches if setting.schedule == "gpipe" else min(setting.microbatches, stages - stage)
        places = setting.places
        rank = rank_of(setting.schedule, stage, places)
        own = [s for s in range(stages) if rank_of(setting.schedule, s, places) == rank]
        peaks = _most_kept(setting.schedule, places, stages, setting.microbatches)[rank]
        return max(counts[own.index(stage)] for counts in peaks)


def _alike(count: int, devices: Devices) -> Devices:
    """So many ranks on one node."""
    return Devices((0,) * count, devices.within)


_most_kept = functools.lru_cache(maxsize=1000)(most_kept)


def _distinct(blocks: Iterable[Sequence[Mapping[str, float]]]) -> np.ndarray:
    """Bytes of the tensors of blocks i to j, each once, at [i, j]."""
    tables = [{name: nbytes for one in own for name, nbytes in one.items()} for own in blocks]
    found = np.zeros((len(tables) + 1, len(tables) + 1))
    for i in range(len(tables)):
        known: set[str] = set()
        for j in range(i, len(tables)):
            new = tables[j].keys() - known
            known |= new
            found[i, j + 1] = found[i, j] + sum(tables[j][name] for name in sorted(new))
    return found


def _numbers(graph: Graph, blocks: Sequence[Sequence[Node]]) -> list[list[tuple[float, float]]]:
    """Of each block's nodes the bytes of the gradients of values, for the profile's rows, and of parameters and of
    values without rows, that are there while it is differentiated."""
    found = []
    for own in blocks:
        rows = [n.nbytes + sum(graph.nbytes(name) for name in n.inputs if graph.differentiable(name)) for n in own]
        fixed = [sum(n.parameters.values()) + n.kept_fixed for n in own]
        found.append(list(zip(rows, fixed, strict=True)))
    return found


def _sums(values: Sequence[float]) -> np.ndarray:
    """Sums of the first 0, 1, ... values."""
    return np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])
