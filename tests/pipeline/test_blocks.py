"""Blocks of drawn graphs, of chains, and of PipeDream's profiles."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grace.errors import ConfigError
from grace.pipeline.planning.blocks import ModelBlock, blocks, units
from grace.pipeline.planning.graph import Graph, GraphNode
from tests.pipeline.graphs import chain, graphs

PROFILES = sorted((Path(__file__).parent / "profiles").glob("*.json"))


def reachable(graph):
    """Numbers of the nodes from which each one comes."""
    found = []
    for node in graph.nodes:
        own = {graph.index[name] for name in node.inputs if name in graph.index}
        found.append(own.union(*(found[i] for i in own)))
    return found


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(graph=graphs, most=st.integers(1, 12))
def test_blocks_are_convex_ordered_and_whole(graph, most):
    found = blocks(graph, most)
    assert 1 <= len(found) <= most
    graph.passed_on([block.nodes for block in found])  # each node once, values go forward, together honoured
    before = reachable(graph)
    for block in found:
        own = {graph.index[name] for name in block.nodes}
        ancestors = set().union(*(before[i] for i in own))
        for i in ancestors - own:
            assert not before[i] & own, "a path leaves the block and comes back"
    for total in ("forward", "backward", "kept"):
        assert sum(getattr(b, total) for b in found) == pytest.approx(sum(getattr(n, total) for n in graph.nodes))
    assert found == blocks(graph, most)


@settings(max_examples=60, deadline=None)
@given(graph=graphs, limit=st.floats(8, 200))
def test_blocks_fit_in_memory_but_for_single_nodes(graph, limit):
    def fits(parameters, kept):
        return 3 * parameters + kept <= limit

    alone = {frozenset(unit) for unit in units(graph)}
    for block in blocks(graph, 4, fits):
        assert fits(block.parameters, block.kept * (1 - 1e-9)) or frozenset(block.nodes) in alone


@settings(max_examples=60, deadline=None)
@given(graph=graphs)
def test_what_is_together_takes_what_lies_between(graph):
    found = units(graph)
    before = reachable(graph)
    at = {graph.index[name]: u for u, names in enumerate(found) for name in names}
    for i, ancestors in enumerate(before):
        assert all(at[j] <= at[i] for j in ancestors)
    if not graph.together:
        assert [[node.name] for node in graph.nodes] == found


def test_nodes_that_are_together_share_a_block():
    nodes = chain(10).nodes
    graph = Graph(nodes, {"x": 0.0}, ("n9",), together=(frozenset({"n2", "n5"}),))
    found = blocks(graph, 10)
    assert ("n2", "n3", "n4", "n5") in [block.nodes for block in found]
    assert len(found) == 7


def test_a_chain_is_cut_evenly_and_a_heavy_node_stays_alone():
    assert [len(block.nodes) for block in blocks(chain(64), 8)] == [8] * 8
    heavy = chain(33, forward=[1.0] * 32 + [40.0])
    assert blocks(heavy, 8)[-1].nodes == ("n32",)


@pytest.mark.parametrize("narrow", [13, 15, 17])
def test_a_narrow_place_is_where_it_is_cut(narrow):
    wide = [100.0] * 32
    wide[narrow] = 1.0
    found = blocks(chain(32, nbytes=wide), 4)
    assert f"n{narrow}" in [block.nodes[-1] for block in found]
    assert max(len(block.nodes) for block in found) <= 12


@pytest.mark.slow
def test_ten_thousand_nodes_are_few_blocks():
    draws = random.Random(1)
    nodes = [
        GraphNode(
            f"n{i}",
            tuple(dict.fromkeys(f"n{max(0, i - draws.choice([1, 1, 2, 40]))}" for _ in range(2))) if i else ("x",),
            nbytes=1.0,
            forward=draws.random(),
        )
        for i in range(10_000)
    ]
    graph = Graph(tuple(nodes), {"x": 1.0}, ("n9999",))
    found = blocks(graph)
    assert len(found) == 32
    times = [block.forward for block in found]
    assert max(times) < 2 * sum(times) / len(times)
    graph.passed_on([block.nodes for block in found])


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_profiles_are_cut(path):
    graph = Graph.load(path)
    found = blocks(graph)
    assert len(found) <= 32
    graph.passed_on([block.nodes for block in found])
    heaviest = max(node.forward + node.backward for node in graph.nodes)
    average = sum(block.forward + block.backward for block in found) / 32
    assert max(block.forward + block.backward for block in found) <= max(heaviest, 2 * average)


def test_a_block_counts_each_parameter_once():
    nodes = GraphNode("a", ("x",), parameters={"w": 8.0}), GraphNode("b", ("a",), parameters={"w": 8.0, "v": 4.0})
    assert ModelBlock.of_nodes(Graph(nodes, {"x": 1.0}, ("b",)), ("a", "b")).parameters == 12.0


def test_no_block_is_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        blocks(chain(2), 0)
