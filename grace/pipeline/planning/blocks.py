"""A graph cut into blocks, which stages are made of.

A unit is the smallest run of nodes, in the graph's order, that may be a stage. Each reads values of earlier units only,
so any run of neighbours may be a stage too. Blocks are such runs: as long as there are more than k, the two
neighbours that are shortest together are merged, if they fit on a device. Then each border moves to where the fewest
bytes cross nearby: on a slow network a cut there is worth more than blocks of equal length.

The blocks of RaNNC (Tanaka et al., IPDPS 2021, arXiv 2103.16063) may join nodes that are no neighbours in this order.
On profiles of PipeDream, U-Nets and transformers that gave no shorter steps.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from grace.errors import ConfigError
from grace.pipeline.planning.graph import Graph

Fits = Callable[[float, float], bool]
"""Function of a block's :attr:`ModelBlock.parameters` and :attr:`ModelBlock.kept`: True if it fits on a device."""
SLACK = 1.5
"""Length of a block to that of blocks of equal length, up to which a border may move to where fewer bytes cross."""


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
        """Return the block of some nodes of a graph, which stand in its order."""
        nodes = [graph.nodes[graph.index[name]] for name in names]
        parameters = {name: nbytes for node in nodes for name, nbytes in node.parameters.items()}
        return cls(
            tuple(node.name for node in nodes),
            sum(node.forward for node in nodes),
            sum(node.backward for node in nodes),
            sum(map(graph.kept_by_row, nodes)),
            float(sum(parameters.values())),
        )

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward


def blocks(graph: Graph, most: int = 32, fits: Fits = lambda parameters, kept: True) -> list[ModelBlock]:
    """Return a graph as blocks, in an order in which each reads values of earlier blocks only.

    Args:
        graph: the model.
        most: largest number of blocks, k; exceeded only if no two neighbours fit on a device together.
        fits: True if a block fits on a device. Units that do not fit alone are blocks of their own.

    >>> from grace.pipeline.planning.graph import GraphNode
    >>> nodes = [GraphNode(f"n{i}", (f"n{i - 1}",) if i else ("x",), forward=1.0) for i in range(8)]
    >>> [len(block.nodes) for block in blocks(Graph(tuple(nodes), {"x": 1.0}, ("n7",)), most=4)]
    [2, 2, 2, 2]
    """
    if most < 1:
        raise ConfigError(f"blocks= must be at least 1, not {most}")
    smallest = units(graph)
    found = [ModelBlock.of_nodes(graph, names) for names in smallest]
    # seconds of each two neighbours together; infinite if they do not fit
    pairs = [one.seconds + other.seconds for one, other in itertools.pairwise(found)]
    while len(found) > most:
        shortest = min(pairs)
        if shortest == math.inf:
            break
        at = pairs.index(shortest)
        merged = ModelBlock.of_nodes(graph, found[at].nodes + found[at + 1].nodes)
        if not fits(merged.parameters, merged.kept):
            pairs[at] = math.inf  # they are not tried again
            continue
        found[at : at + 2] = [merged]
        del pairs[at]  # two blocks became one, so there is a pair less
        for b in (at - 1, at):  # the pairs that the merged block is in now
            if 0 <= b < len(pairs):
                pairs[b] = found[b].seconds + found[b + 1].seconds
    _move_to_narrow_borders(graph, list(itertools.accumulate(map(len, smallest))), found, fits)
    return found


def _move_to_narrow_borders(graph: Graph, borders: Sequence[int], found: list[ModelBlock], fits: Fits) -> None:
    """Move each border of the blocks to the border of units (numbers of nodes before them) where the fewest bytes cross
    between its neighbours. No block gets longer than :data:`SLACK` blocks of equal length, or than the longest was."""
    names = [node.name for node in graph.nodes]
    last_read = dict(graph.index)
    for i, node in enumerate(graph.nodes):
        last_read.update((name, i) for name in node.inputs if name in last_read)
    changes = [0.0] * (len(names) + 1)
    for i, node in enumerate(graph.nodes):
        changes[i + 1] += node.nbytes
        changes[last_read[node.name] + 1] -= node.nbytes
    crossing = list(itertools.accumulate(changes))  # bytes that cross the border before each node
    until = [0.0, *itertools.accumulate(node.forward + node.backward for node in graph.nodes)]
    longest = max([SLACK * until[-1] / len(found), *(block.seconds for block in found)]) * (1 + 1e-9)
    ends = [0, *itertools.accumulate(len(block.nodes) for block in found)]
    for b in range(1, len(found)):
        start, at, end = ends[b - 1 : b + 2]
        possible = [
            i
            for i in borders
            if start < i < end and until[i] - until[start] <= longest and until[end] - until[i] <= longest
        ]
        best = min(possible, key=lambda i: (crossing[i], abs(i - at)), default=at)
        if crossing[best] < crossing[at]:
            moved = [ModelBlock.of_nodes(graph, names[i:j]) for i, j in ((start, best), (best, end))]
            if all(fits(block.parameters, block.kept) for block in moved):
                found[b - 1 : b + 1] = moved
                ends[b] = best


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


def units(graph: Graph) -> list[list[str]]:
    """Return the names of the nodes of each unit, in topological order: nodes that must be together, with all nodes
    between them in the graph's order.

    >>> from grace.pipeline.planning.graph import GraphNode
    >>> nodes = [GraphNode(f"n{i}", (f"n{i - 1}",) if i else ("x",)) for i in range(4)]
    >>> units(Graph(tuple(nodes), {"x": 1.0}, ("n3",), together=(frozenset({"n0", "n2"}),)))
    [['n0', 'n1', 'n2'], ['n3']]
    """
    until = list(range(len(graph.nodes)))
    """The last node that must be with each node or with one before it."""
    for group in graph.together:
        members = [graph.index[name] for name in group]
        if members:
            until[min(members)] = max(until[min(members)], *members)
    found: list[list[str]] = []
    end = -1
    for i, node in enumerate(graph.nodes):
        if i > end:
            found.append([])
        found[-1].append(node.name)
        end = max(end, until[i])
    return found
