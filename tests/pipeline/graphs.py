"""Graphs that tests partition."""

import random

from hypothesis import strategies as st

from grace.pipeline.planning.graph import Graph, GraphNode
from grace.pipeline.planning.search import SearchOptions, search_plan


def chain(count, forward=1.0, backward=2.0, nbytes=0.0, parameters=0.0, kept=0.0, rows=1, overhead=0.0):
    """Equal nodes one after the other; what is a list is told node by node."""

    def of(value, i):
        return value[i] if isinstance(value, (list, tuple)) else value

    nodes = [
        GraphNode(
            f"n{i}",
            (f"n{i - 1}",) if i else ("x",),
            nbytes=of(nbytes, i),
            forward=of(forward, i),
            backward=of(backward, i),
            kept=of(kept, i),
            parameters={f"w{i}": of(parameters, i)} if of(parameters, i) else {},
            overhead=overhead,
            overhead_back=overhead,
        )
        for i in range(count)
    ]
    return Graph(tuple(nodes), {"x": 0.0}, (f"n{count - 1}",), rows)


def drawn(seed, count, reach=None, together=0):
    """A random graph whose nodes read up to three of the ``reach`` before."""
    draws = random.Random(seed)
    nodes = []
    for i in range(count):
        before = range(max(0, i - (reach or count)), i)
        inputs = draws.sample(before, min(len(before), draws.choice([0, 1, 1, 2, 3])))
        nodes.append(
            GraphNode(
                f"n{i}",
                tuple(f"n{j}" for j in inputs) or ("x",),
                nbytes=draws.choice([0.0, draws.uniform(1, 100)]),
                forward=draws.choice([0.0, draws.expovariate(1)]),
                backward=draws.expovariate(0.5),
                kept=draws.uniform(0, 50),
                parameters={f"w{draws.randrange(count)}": 8.0} if draws.random() < 0.5 else {},
                differentiable=draws.random() < 0.8,
            )
        )
    groups = tuple(frozenset(f"n{draws.randrange(count)}" for _ in range(2)) for _ in range(together))
    outputs = tuple({f"n{draws.randrange(count)}": None, f"n{count - 1}": None})
    return Graph(tuple(nodes), {"x": 10.0}, outputs, 8, groups)


graphs = st.builds(drawn, st.integers(0, 2**32), st.integers(1, 40), st.sampled_from([None, 3, 8]), st.integers(0, 3))


def plan(graph, devices, batch, links, **options):
    """The plan that is found with some options."""
    return search_plan(graph, devices, batch, links, SearchOptions(**options))
