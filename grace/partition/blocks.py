"""A graph cut into blocks: RaNNC's multilevel k-way partitioning (Tanaka et al., IPDPS 2021, arXiv 2103.16063).

Coarsening merges adjacent groups (:mod:`grace.partition.coarsening`); uncoarsening goes back level by level and moves
groups at the border of a block into the block before or behind it where less then crosses; compaction merges blocks
that are topological neighbours until there are k. Blocks stand in an order in which each reads of earlier ones only, so
any run of neighbours may be a stage. What crosses counts as often as it is passed on: a value of n bytes that is made
in block p and last read in block q costs n (q - p), twice if its gradient comes back.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from grace.errors import ConfigError
from grace.partition.coarsening import Fits, Groups, closed, coarsened
from grace.partition.graph import Graph

SWEEPS = 4
"""Times that all borders are looked at, on each level."""


@dataclass(frozen=True)
class Block:
    """Nodes that stay together.

    Attributes:
        nodes: names, in the graph's order.
        forward, backward: seconds for the profile's rows.
        kept: bytes beside parameters (:meth:`grace.partition.graph.Graph.kept_by_row`).
        parameters: bytes, each parameter once.
    """

    nodes: tuple[str, ...]
    forward: float = 0.0
    backward: float = 0.0
    kept: float = 0.0
    parameters: float = 0.0

    @classmethod
    def of(cls, graph: Graph, names: Iterable[str]) -> "Block":
        """That of some nodes of a graph."""
        nodes = [graph.nodes[i] for i in sorted(graph.index[name] for name in names)]
        parameters = {name: nbytes for node in nodes for name, nbytes in node.parameters.items()}
        return cls(
            tuple(node.name for node in nodes),
            sum(node.forward for node in nodes),
            sum(node.backward for node in nodes),
            sum(map(graph.kept_by_row, nodes)),
            float(sum(parameters.values())),
        )


def anything(parameters: float, kept: float) -> bool:
    """Where memory has no end."""
    return True


def blocks(graph: Graph, most: int = 32, fits: Fits = anything, uncoarsen: bool = True) -> list[Block]:
    """The graph as at most so many blocks, in an order in which each reads of earlier ones only.

    Args:
        graph: the model's.
        most: k; there are more only where memory lets no two neighbours be one.
        fits: whether so many bytes of parameters, and beside them, fit on a device. Nodes that do not fit alone are
            blocks of their own.
        uncoarsen: whether groups at borders are moved.

    Raises:
        ConfigError: ``most`` is less than 1.

    >>> from grace.partition.graph import Node
    >>> nodes = [Node(f"n{i}", (f"n{i - 1}",) if i else ("x",), forward=1.0) for i in range(8)]
    >>> [len(block.nodes) for block in blocks(Graph(tuple(nodes), {"x": 1.0}, ("n7",)), most=4)]
    [2, 2, 2, 2]
    """
    if most < 1:
        raise ConfigError(f"blocks= must be at least 1, not {most}")
    units = closed(graph)
    cap = sum(node.forward + node.backward for node in graph.nodes) / most
    groups = Groups(graph, units)
    levels = coarsened(groups, most, cap, fits)
    border = _Border(graph, units, levels[-1], cap, fits)
    if uncoarsen:
        for level in reversed(levels[:-1]):
            border.refine(level)
    found = [[i for u in members for i in units[u]] for members in border.blocks()]
    while len(found) > most and _compact(graph, found, fits):
        pass
    return [Block.of(graph, (graph.nodes[i].name for i in members)) for members in found]


def cut_at(graph: Graph, cuts: Sequence[str]) -> list[Block]:
    """A block up to each of some nodes, in the graph's order, and one of what is left.

    Raises:
        ConfigError: they are no nodes, or in another order.
    """
    names = [node.name for node in graph.nodes]
    ends = []
    for name in cuts:
        if name not in graph.index:
            raise ConfigError(f"the cut {name!r} is no node of the graph")
        ends.append(graph.index[name] + 1)
    bounds = [0, *ends, len(names)]
    if sorted(set(bounds)) != bounds:
        raise ConfigError(f"cuts must stand in the graph's order, each once, before its last node: {', '.join(cuts)}")
    return [Block.of(graph, names[a:b]) for a, b in itertools.pairwise(bounds)]


class _Border:
    """Blocks in order, each of several units, and what crosses between them."""

    def __init__(
        self, graph: Graph, units: Sequence[Sequence[int]], start: Sequence[Sequence[int]], cap: float, fits: Fits
    ):
        self.graph, self.units, self.fits = graph, units, fits
        self.at = [0] * len(units)
        """Each unit's block."""
        for b, members in enumerate(start):
            for u in members:
                self.at[u] = b
        self.count, last = len(start), len(start) - 1
        of = {graph.nodes[i].name: u for u, members in enumerate(units) for i in members}
        self.seconds = [sum(graph.nodes[i].forward + graph.nodes[i].backward for i in members) for members in units]
        self.kept = [sum(graph.kept_by_row(graph.nodes[i]) for i in members) for members in units]
        self.parameters = [sum(n for i in m for n in graph.nodes[i].parameters.values()) for m in units]
        values = [*graph.inputs, *(node.name for node in graph.nodes)]
        self.number = {name: v for v, name in enumerate(values)}
        self.weight = [graph.nbytes(name) * (1 + graph.differentiable(name)) for name in values]
        self.maker = [of.get(name, -1) for name in values]
        self.readers: list[dict[int, int]] = [{} for _ in values]
        """Readers of each value in each block."""
        self.read: list[dict[int, None]] = [{} for _ in units]
        self.made: list[list[int]] = [[] for _ in units]
        for node in graph.nodes:
            u = of[node.name]
            self.made[u].append(self.number[node.name])
            for name in node.inputs:
                if of.get(name, -1) != u:
                    self.read[u][self.number[name]] = None
        for u, read in enumerate(self.read):
            for v in read:
                self.readers[v][self.at[u]] = self.readers[v].get(self.at[u], 0) + 1
        for name in graph.outputs:  # they leave the last block
            v = self.number[name]
            self.readers[v][last] = self.readers[v].get(last, 0) + 1
        self.total = [[0.0, 0.0, 0.0] for _ in range(self.count)]
        self.size = [0] * self.count
        for u, b in enumerate(self.at):
            self._add(b, (u,), 1)
        self.cap = max(cap, *(total[0] for total in self.total)) if self.count > 1 else cap

    def _add(self, block: int, units: Iterable[int], sign: int) -> None:
        total = self.total[block]
        for u in units:
            total[0] += sign * self.seconds[u]
            total[1] += sign * self.parameters[u]
            total[2] += sign * self.kept[u]
            self.size[block] += sign

    def blocks(self) -> list[list[int]]:
        """The units of each block."""
        found: list[list[int]] = [[] for _ in range(self.count)]
        for u, b in enumerate(self.at):
            found[b].append(u)
        return found

    def refine(self, level: Sequence[Sequence[int]]) -> None:
        """Move groups of a level where less then crosses."""
        for _ in range(SWEEPS):
            moved = False
            for members in level:
                here = self.at[members[0]]
                for there in (here - 1, here + 1):
                    if 0 <= there < self.count and self._allowed(members, here, there) and self._gain(members, there):
                        moved = True
                        break
            if not moved:
                return

    def _allowed(self, members: Sequence[int], here: int, there: int) -> bool:
        if self.size[here] == len(members):
            return False
        own = set(members)
        if there < here:  # nothing that it reads is made here
            inside = any(
                self.maker[v] not in own and self.maker[v] >= 0 and self.at[self.maker[v]] > there
                for u in members
                for v in self.read[u]
            )
        else:  # nothing that it makes is read here, but by itself
            within: dict[int, int] = {}
            for u in members:
                for v in self.read[u]:
                    within[v] = within.get(v, 0) + 1
            inside = any(self.readers[v].get(here, 0) > within.get(v, 0) for u in members for v in self.made[u])
        if inside:
            return False
        seconds = self.total[there][0] + sum(self.seconds[u] for u in members)
        parameters = self.total[there][1] + sum(self.parameters[u] for u in members)
        kept = self.total[there][2] + sum(self.kept[u] for u in members)
        return seconds <= self.cap * (1 + 1e-9) and self.fits(parameters, kept)

    def _cost(self, values: Iterable[int]) -> float:
        total = 0.0
        for v in values:
            if self.readers[v]:
                made = self.at[self.maker[v]] if self.maker[v] >= 0 else 0
                total += self.weight[v] * (max(self.readers[v]) - made)
        return total

    def _gain(self, members: Sequence[int], there: int) -> bool:
        """Move it, and back again if no less crosses."""
        here = self.at[members[0]]
        values = dict.fromkeys(v for u in members for v in (*self.read[u], *self.made[u]))
        before = self._cost(values)
        self._move(members, here, there)
        if self._cost(values) < before * (1 - 1e-12):
            self._add(here, members, -1)
            self._add(there, members, 1)
            return True
        self._move(members, there, here)
        return False

    def _move(self, members: Sequence[int], here: int, there: int) -> None:
        for u in members:
            self.at[u] = there
            for v in self.read[u]:
                readers = self.readers[v]
                readers[here] -= 1
                if not readers[here]:
                    del readers[here]
                readers[there] = readers.get(there, 0) + 1


def _compact(graph: Graph, found: list[list[int]], fits: Fits) -> bool:
    """Merge the two neighbours that are shortest together and fit; in place. Whether there were any."""
    made = [Block.of(graph, (graph.nodes[i].name for i in members)) for members in found]
    seconds = [block.forward + block.backward for block in made]
    for b in sorted(range(len(found) - 1), key=lambda b: (seconds[b] + seconds[b + 1], b)):
        if fits(made[b].parameters + made[b + 1].parameters, made[b].kept + made[b + 1].kept):
            found[b : b + 2] = [found[b] + found[b + 1]]
            return True
    return False
