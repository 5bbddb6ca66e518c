"""A graph cut into blocks: RaNNC's multilevel k-way partitioning (Tanaka et al., IPDPS 2021, arXiv 2103.16063).

Coarsening merges adjacent groups (:mod:`grace.pipeline.planning.coarsening`). Uncoarsening goes back level by level,
and moves groups at the border of a block into the block before or behind it if fewer bytes then cross. Compaction
merges blocks that are topological neighbours until there are k. Each block reads values of earlier blocks only, so any
run of neighbours may be a stage. A value counts once for each border that it crosses: n bytes that are made in block p
and last read in block q cost n (q - p), twice if the gradient comes back.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from grace.errors import ConfigError
from grace.pipeline.planning.coarsening import Fits, Groups, closed, coarsened
from grace.pipeline.planning.graph import Graph

SWEEPS = 4
"""Number of passes over all borders on each level."""


@dataclass(frozen=True)
class ModelBlock:
    """Nodes that are always in one stage.

    Attributes:
        nodes: names, in the graph's order.
        forward, backward: seconds for the profile's rows.
        kept: bytes beside parameters (:meth:`grace.pipeline.planning.graph.Graph.kept_by_row`).
        parameters: bytes, each parameter once.
    """

    nodes: tuple[str, ...]
    forward: float = 0.0
    backward: float = 0.0
    kept: float = 0.0
    parameters: float = 0.0

    @classmethod
    def of_nodes(cls, graph: Graph, names: Iterable[str]) -> "ModelBlock":
        """Return the block of some nodes of a graph."""
        nodes = [graph.nodes[i] for i in sorted(graph.index[name] for name in names)]
        parameters = {name: nbytes for node in nodes for name, nbytes in node.parameters.items()}
        return cls(
            tuple(node.name for node in nodes),
            sum(node.forward for node in nodes),
            sum(node.backward for node in nodes),
            sum(map(graph.kept_by_row, nodes)),
            float(sum(parameters.values())),
        )


def fits_always(parameters: float, kept: float) -> bool:
    """Return True: memory has no limit."""
    return True


def blocks(graph: Graph, most: int = 32, fits: Fits = fits_always, uncoarsen: bool = True) -> list[ModelBlock]:
    """Return a graph as blocks, in an order in which each reads values of earlier blocks only.

    Args:
        graph: the model.
        most: largest number of blocks, k; exceeded only if no two neighbours fit in memory together.
        fits: True if a block fits on a device (:data:`Fits`). Nodes that do not fit alone are blocks of their own.
        uncoarsen: True to move groups at borders.

    Raises:
        ConfigError: ``most`` is less than 1.

    >>> from grace.pipeline.planning.graph import GraphNode
    >>> nodes = [GraphNode(f"n{i}", (f"n{i - 1}",) if i else ("x",), forward=1.0) for i in range(8)]
    >>> [len(block.nodes) for block in blocks(Graph(tuple(nodes), {"x": 1.0}, ("n7",)), most=4)]
    [2, 2, 2, 2]
    """
    if most < 1:
        raise ConfigError(f"blocks= must be at least 1, not {most}")
    units = closed(graph)
    cap = sum(node.forward + node.backward for node in graph.nodes) / most
    groups = Groups(graph, units)
    levels = coarsened(groups, most, cap, fits)
    border = _BlockBorders(graph, units, levels[-1], cap, fits)
    if uncoarsen:
        for level in reversed(levels[:-1]):
            border.refine(level)
    found = [[i for u in members for i in units[u]] for members in border.blocks()]
    while len(found) > most and _compact(graph, found, fits):
        pass
    return [ModelBlock.of_nodes(graph, (graph.nodes[i].name for i in members)) for members in found]


def cut_at(graph: Graph, cuts: Sequence[str]) -> list[ModelBlock]:
    """Return the blocks between cuts: one up to each named node, in the graph's order, and one of the rest.

    Raises:
        ConfigError: a cut is no node, or cuts are in another order.
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
    return [ModelBlock.of_nodes(graph, names[a:b]) for a, b in itertools.pairwise(bounds)]


class _BlockBorders:
    """The borders between blocks, and the values that cross them. Blocks are sets of units (:func:`closed`)."""

    def __init__(
        self, graph: Graph, units: Sequence[Sequence[int]], start: Sequence[Sequence[int]], cap: float, fits: Fits
    ):
        self.graph, self.units, self.fits = graph, units, fits
        self.at = [0] * len(units)
        """Number of each unit's block."""
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
        """Number of readers of each value, by block."""
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
        for name in graph.outputs:  # outputs leave the last block
            v = self.number[name]
            self.readers[v][last] = self.readers[v].get(last, 0) + 1
        self.total = [[0.0, 0.0, 0.0] for _ in range(self.count)]
        self.size = [0] * self.count
        for u, b in enumerate(self.at):
            self._add(b, (u,), 1)
        self.cap = max(cap, *(total[0] for total in self.total)) if self.count > 1 else cap

    def _add(self, block: int, units: Iterable[int], sign: int) -> None:
        """Add units to a block's totals, or subtract them if the sign is -1."""
        total = self.total[block]
        for u in units:
            total[0] += sign * self.seconds[u]
            total[1] += sign * self.parameters[u]
            total[2] += sign * self.kept[u]
            self.size[block] += sign

    def blocks(self) -> list[list[int]]:
        """Return the units of each block."""
        found: list[list[int]] = [[] for _ in range(self.count)]
        for u, b in enumerate(self.at):
            found[b].append(u)
        return found

    def refine(self, level: Sequence[Sequence[int]]) -> None:
        """Move groups of a level into a neighbouring block where that lowers the bytes that cross."""
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
        """Return True if a group may move: no value then goes backwards, and the other block has time and memory."""
        if self.size[here] == len(members):
            return False
        own = set(members)
        if there < here:  # no value that the group reads may be made in its present block
            inside = any(
                self.maker[v] not in own and self.maker[v] >= 0 and self.at[self.maker[v]] > there
                for u in members
                for v in self.read[u]
            )
        else:  # no value that the group makes may be read in its present block, except by the group
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
        """Return the bytes of some values that cross borders, once for each border."""
        total = 0.0
        for v in values:
            if self.readers[v]:
                made = self.at[self.maker[v]] if self.maker[v] >= 0 else 0
                total += self.weight[v] * (max(self.readers[v]) - made)
        return total

    def _gain(self, members: Sequence[int], there: int) -> bool:
        """Move a group, and move it back unless fewer bytes cross. Return True if it stays moved."""
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
        """Move a group to another block, and the readers of values with it."""
        for u in members:
            self.at[u] = there
            for v in self.read[u]:
                readers = self.readers[v]
                readers[here] -= 1
                if not readers[here]:
                    del readers[here]
                readers[there] = readers.get(there, 0) + 1


def _compact(graph: Graph, found: list[list[int]], fits: Fits) -> bool:
    """Merge, in place, the two neighbouring blocks that are shortest together and fit. Return True if some were
    merged."""
    made = [ModelBlock.of_nodes(graph, (graph.nodes[i].name for i in members)) for members in found]
    seconds = [block.forward + block.backward for block in made]
    for b in sorted(range(len(found) - 1), key=lambda b: (seconds[b] + seconds[b + 1], b)):
        if fits(made[b].parameters + made[b + 1].parameters, made[b].kept + made[b + 1].kept):
            found[b : b + 2] = [found[b] + found[b + 1]]
            return True
    return False
