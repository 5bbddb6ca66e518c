"""A graph cut into blocks, which stages are made of.

A unit is the smallest group of nodes that may be a stage. Units stand in an order in which each reads values of earlier
units only, so any run of neighbours may be a stage too. Blocks are such runs: as long as there are more than k, the two
neighbours that are shortest together are merged, if they fit on a device. Then each border moves to where the fewest
bytes cross nearby: on a slow network a cut there is worth more than blocks of equal length.

The blocks of RaNNC (Tanaka et al., IPDPS 2021, arXiv 2103.16063) may join nodes that are no neighbours in this order.
On profiles of PipeDream, U-Nets and transformers that gave no shorter steps.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from grace.errors import ConfigError
from grace.pipeline.planning.graph import Graph

Fits = Callable[[float, float], bool]
"""Function that returns True if a block fits on a device, of its :attr:`ModelBlock.parameters` and
:attr:`ModelBlock.kept`."""


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

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward


def fits_always(parameters: float, kept: float) -> bool:
    """Return True: memory has no limit."""
    return True


def blocks(graph: Graph, most: int = 32, fits: Fits = fits_always) -> list[ModelBlock]:
    """Return a graph as blocks, in an order in which each reads values of earlier blocks only.

    Args:
        graph: the model.
        most: largest number of blocks, k; exceeded only if no two neighbours fit on a device together.
        fits: True if a block fits on a device. Units that do not fit alone are blocks of their own.

    Raises:
        ConfigError: ``most`` is less than 1.

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
            pairs[at] = math.inf
            continue
        found[at : at + 2] = [merged]
        del pairs[at]
        for b in (at - 1, at):  # the pairs that the merged block is in now
            if 0 <= b < len(pairs):
                pairs[b] = found[b].seconds + found[b + 1].seconds
    return _at_narrow_borders(graph, smallest, found, fits)


def _at_narrow_borders(
    graph: Graph, smallest: Sequence[Sequence[str]], found: list[ModelBlock], fits: Fits
) -> list[ModelBlock]:
    """Return the blocks with each border moved to where the fewest bytes cross between its neighbours. No block gets
    longer than :data:`SLACK` blocks of equal length, or than the longest was."""
    numbers = {name: u for u, names in enumerate(smallest) for name in names}
    last_read = dict(numbers)
    for node in graph.nodes:
        for name in node.inputs:
            if name in last_read:
                last_read[name] = max(last_read[name], numbers[node.name])
    changes = [0.0] * (len(smallest) + 1)
    for node in graph.nodes:
        changes[numbers[node.name] + 1] += node.nbytes
        if last_read[node.name] + 1 < len(changes):
            changes[last_read[node.name] + 1] -= node.nbytes
    crossing = list(itertools.accumulate(changes))  # bytes that cross the border before each unit
    seconds = [
        sum(graph.nodes[graph.index[name]].forward + graph.nodes[graph.index[name]].backward for name in names)
        for names in smallest
    ]
    until = [0.0, *itertools.accumulate(seconds)]
    longest = max([SLACK * until[-1] / len(found), *(block.seconds for block in found)]) * (1 + 1e-9)
    ends = [max(numbers[name] for name in block.nodes) + 1 for block in found]
    for b in range(len(found) - 1):
        start, at, end = (ends[b - 1] if b else 0), ends[b], ends[b + 1]
        possible = [
            i for i in range(start + 1, end) if until[i] - until[start] <= longest and until[end] - until[i] <= longest
        ]
        best = min(possible, key=lambda i: (crossing[i], abs(i - at)), default=at)
        if crossing[best] >= crossing[at]:
            continue
        names = [name for unit in smallest[start:end] for name in unit]
        size = sum(map(len, smallest[start:best]))
        moved = [ModelBlock.of_nodes(graph, part) for part in (names[:size], names[size:])]
        if all(fits(block.parameters, block.kept) for block in moved):
            found[b : b + 2] = moved
            ends[b] = best
    return found


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
    between them."""
    parent = list(range(len(graph.nodes)))

    def root(i: int) -> int:
        """Return the representative of a node's group."""
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for group in graph.together:
        first, *others = sorted(graph.index[name] for name in group) or [0]
        for other in others:
            low, high = sorted((root(first), root(other)))
            parent[high] = low
    reads: dict[int, dict[int, None]] = {root(i): {} for i in range(len(graph.nodes))}
    members: dict[int, list[int]] = {}
    for i, node in enumerate(graph.nodes):
        members.setdefault(root(i), []).append(i)
        for name in node.inputs:
            if name in graph.index and root(graph.index[name]) != root(i):
                reads[root(i)][root(graph.index[name])] = None
    # what lies between the nodes of a group reads from it and is read by it: a circle
    circles = _strongly_connected(reads)
    return [[graph.nodes[i].name for i in sorted(i for one in circle for i in members[one])] for circle in circles]


def _strongly_connected(reads: Mapping[int, Iterable[int]]) -> list[list[int]]:
    """Return the strongly connected components in topological order, by Tarjan's algorithm without recursion."""
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found = []
    for start in reads:
        if start in number:
            continue
        work = [(start, iter(reads[start]))]
        number[start] = low[start] = len(number)
        stack.append(start)
        on_stack.add(start)
        while work:
            at, others = work[-1]
            for other in others:
                if other not in number:
                    number[other] = low[other] = len(number)
                    stack.append(other)
                    on_stack.add(other)
                    work.append((other, iter(reads[other])))
                    break
                if other in on_stack:
                    low[at] = min(low[at], number[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[at])
                if low[at] == number[at]:
                    component: list[int] = []
                    while not component or component[-1] != at:
                        component.append(stack.pop())
                        on_stack.discard(component[-1])
                    found.append(component)
    return found
