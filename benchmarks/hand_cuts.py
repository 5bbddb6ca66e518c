"""Cuts by hand that plans of pipelines are compared with: equal layers or parameters, and GPipe's balance."""

import itertools
from collections.abc import Callable, Sequence

from grace.errors import ConfigError
from grace.pipeline.planning.graph import Graph


def equal_layers(graph: Graph, stages: int) -> list[str]:
    """Return the last nodes of all stages but the last, so that each stage has as many nodes with parameters.

    >>> from grace.pipeline.planning.graph import GraphNode
    >>> nodes = [GraphNode(f"n{i}", (f"n{i - 1}",) if i else ("x",), parameters={f"w{i}": 4.0 + i}) for i in range(6)]
    >>> graph = Graph(tuple(nodes), {"x": 1.0}, ("n5",))
    >>> equal_layers(graph, 2), equal_parameters(graph, 2)
    (['n2'], ['n3'])
    """
    return _even(graph, [float(bool(node.parameters)) for node in graph.nodes], stages)


def equal_parameters(graph: Graph, stages: int) -> list[str]:
    """Return the last nodes of all stages but the last, so that each stage has as many bytes of parameters."""
    return _even(graph, [sum(node.parameters.values()) for node in graph.nodes], stages)


def equal_time(graph: Graph, stages: int) -> list[str]:
    """Return the last nodes of all stages but the last, so that the longest stage is as short as it can be in forward
    and backward alone, as GPipe balances (Huang et al., NeurIPS 2019)."""
    seconds = [node.forward + node.backward for node in graph.nodes]
    sums = [0.0, *itertools.accumulate(seconds)]
    low, high = max(seconds), sums[-1]
    for _ in range(60):  # as many as a float has bits
        middle = (low + high) / 2
        if len(_ends_within(sums, middle)) < stages:
            high = middle
        else:
            low = middle
    ends = _ends_within(sums, high)
    for end in range(len(seconds) - 1, 0, -1):  # a stage has a node at least
        if len(ends) < stages - 1 and end not in ends:
            ends.append(end)
    return [graph.nodes[end - 1].name for end in sorted(ends)]


BY_HAND: dict[str, Callable[[Graph, int], list[str]]] = {
    "equal layers": equal_layers,
    "equal parameters": equal_parameters,
    "equal time": equal_time,
}


def _even(graph: Graph, weights: Sequence[float], stages: int) -> list[str]:
    """Return the cuts at which the sum of the weights comes nearest to equal parts."""
    if stages > len(graph.nodes):
        raise ConfigError(f"{len(graph.nodes)} nodes cannot be cut into {stages} stages")
    sums = list(itertools.accumulate(weights))
    ends: list[int] = []
    for part in range(1, stages):
        wanted, least = sums[-1] * part / stages, ends[-1] + 1 if ends else 1
        possible = range(least, len(sums) - (stages - part) + 1)
        ends.append(min(possible, key=lambda end: (abs(sums[end - 1] - wanted), end)))
    return [graph.nodes[end - 1].name for end in ends]


def _ends_within(sums: Sequence[float], most: float) -> list[int]:
    """Return the ends of all stages but the last, if each has as many nodes as take no longer than ``most``, or one."""
    ends, start = [], 0
    for i in range(2, len(sums)):
        if sums[i] - sums[start] > most * (1 + 1e-12) and i - 1 > start:
            start = i - 1
            ends.append(start)
    return ends
