"""Graphs as JSON, and what is refused of graphs."""

import json

import pytest
from hypothesis import given, settings

from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.pipeline.planning.graph import Graph, GraphNode
from tests.pipeline.graphs import chain, graphs


@settings(max_examples=50, deadline=None)
@given(graph=graphs)
def test_graphs_are_read_as_they_were_written(graph):
    again = Graph.from_dict(json.loads(json.dumps(graph.to_dict())))
    assert again == graph
    assert again.key == graph.key


def test_files_are_read_as_they_were_written(tmp_path):
    graph = Graph(chain(3, parameters=8.0).nodes, {"x": 1.0}, ("n2",), 4, (), (Variable("w0", (2, 1)),))
    graph.save(tmp_path / "graph.json")
    assert Graph.load(tmp_path / "graph.json") == graph
    assert graph.variable("w0").shape == (2, 1)
    assert graph.variable("w1") == Variable("w1", (2,))


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ([], "needs the field graph"),
        ({"graph": 7}, "version 7"),
        (
            {"graph": 1, "rows": 1, "nodes": [{"name": "a", "weight": 3}]},
            r"nodes\[0\].weight: unknown key.*; known: name, inputs, ",
        ),
        (
            {
                **{"graph": 1, "rows": 1, "inputs": {}, "outputs": [], "nodes": []},
                "variables": [{"name": "w", "shape": [1], "sprase": True}],
            },
            r"variables\[0\].sprase: unknown key \(did you mean 'sparse'\?\); known: name, shape, ",
        ),
        ({"graph": 1, "nodes": []}, "rows: is missing"),
        ({"graph": 1, "rows": 1, "nodes": []}, "inputs: is missing"),
        ({"graph": 1, "rows": 1, "inputs": {}, "outputs": [], "nodes": []}, "at least one node"),
    ],
)
def test_what_is_no_graph_is_refused(tmp_path, document, says):
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=says):
        Graph.load(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        Graph.load(path)


@pytest.mark.parametrize(
    ("nodes", "more", "says"),
    [
        ([GraphNode("a"), GraphNode("a")], {}, "two nodes or inputs"),
        ([GraphNode("a", ("b",)), GraphNode("b")], {}, "topological order"),
        ([GraphNode("a", forward=-1.0)], {}, "forward must be a finite number"),
        ([GraphNode("a", kept=float("nan"))], {}, "kept must be"),
        (
            [GraphNode("a", parameters={"w": 1.0}), GraphNode("b", parameters={"w": 2.0})],
            {},
            "has 1 bytes in one node, 2 in another",
        ),
        ([GraphNode("a")], {"outputs": ("c",)}, "output 'c'"),
        ([GraphNode("a")], {"rows": 0}, "rows must be"),
        ([GraphNode("a")], {"together": (frozenset({"z"}),)}, "no node"),
    ],
)
def test_graphs_that_cannot_be_are_refused(nodes, more, says):
    with pytest.raises(ConfigError, match=says):
        Graph(tuple(nodes), {"x": 1.0}, **{"outputs": ("a",), **more})


def test_values_are_passed_on_to_whoever_reads_them_later():
    nodes = GraphNode("a", ("x",)), GraphNode("b", ("a", "y")), GraphNode("c", ("a", "b")), GraphNode("d", ("c", "x"))
    graph = Graph(nodes, {"x": 1.0, "y": 1.0}, ("d", "a"))
    assert graph.passed_on([["a"], ["b"], ["c"], ["d"]]) == [("x", "y", "a"), ("x", "a", "b"), ("x", "a", "c")]
    assert [graph.differentiable(name) for name in ("x", "a")] == [False, True]
    for stages, says in (
        ([["a"], ["b", "c"]], "in no stage"),
        ([["a", "b"], ["b", "c", "d"]], "in stages 0 and 1"),
        ([["b"], ["a", "c", "d"]], "which stage 1 computes"),
        ([["a", "b", "c", "d"], []], "no nodes"),
        ([["a", "b", "c", "d", "e"]], "no node of the graph"),
    ):
        with pytest.raises(ConfigError, match=says):
            graph.passed_on(stages)


def test_the_key_is_of_the_structure():
    one, slower, other = chain(3), chain(3, forward=9.0, rows=4), chain(3, parameters=4.0)
    assert one.key == slower.key != other.key
