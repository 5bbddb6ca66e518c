"""Profiles of PipeDream: a recorded one, their order, and what is refused of them."""

from pathlib import Path

import pytest

from grace.errors import ConfigError
from grace.pipeline.planning.pipedream import COLUMNS, graph_of, read_graph

PROFILES = Path(__file__).parent / "profiles"


def test_a_profile_of_pipedream():
    graph = read_graph(PROFILES / "vgg16.json")
    assert (len(graph.nodes), graph.rows, graph.outputs) == (40, 128, ("node41",))
    assert graph.inputs == {"node1": 128 * 3 * 224 * 224 * 4}
    conv = graph.nodes[graph.index["node2"]]
    assert (conv.forward, conv.backward) == (pytest.approx(0.022307), pytest.approx(0.024613))
    assert (conv.kind, conv.inputs) == ("Conv2d", ("node1",))
    assert sum(graph.parameters.values()) == 553430176
    assert read_graph(PROFILES / "vgg16.json", rows=64).rows == 64


def test_nodes_of_profiles_are_put_in_order():
    rows = [["b", "ReLU", 1, 1, 8, 0], ["a", "Linear", 1, 2, 8, 4], ["x", "Input", 5, 0, 16, 0]]
    document = {"columns": COLUMNS, "nodes": rows, "edges": [["x", "a"], ["a", "b"]]}
    graph = graph_of(document, rows=2)
    assert [node.name for node in graph.nodes] == ["a", "b"]
    assert graph.nodes[0].parameters == {"a.parameters": 4.0}
    with pytest.raises(ConfigError, match="give rows="):
        graph_of(document)
    with pytest.raises(ConfigError, match="circle: "):
        graph_of({**document, "edges": [["a", "b"], ["b", "a"]]}, rows=2)
    with pytest.raises(ConfigError, match="no profile of PipeDream's: KeyError: 'c'"):
        graph_of({**document, "edges": [["c", "b"]]}, rows=2)
