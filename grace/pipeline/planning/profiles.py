"""Graphs as JSON documents, with ``"graph": 1`` (their version) and the fields of
:class:`~grace.pipeline.planning.graph.Graph`."""

import dataclasses
import json
from pathlib import Path

from grace.core import documents
from grace.core.atomic_files import atomic_write
from grace.core.schema_words import read_record
from grace.errors import ConfigError
from grace.pipeline.planning.graph import Graph, GraphNode

VERSION = 1


def read(path: str | Path) -> Graph:
    """Return the graph in a file.

    Raises:
        ConfigError: the file has no graph, or one of another version.
    """
    return of_dict(documents.parse(documents.read(Path(path)), str(path), only_json=True), str(path))


def write(graph: Graph, path: str | Path) -> None:
    """Write a graph to a file."""
    with atomic_write(path) as draft:
        draft.write_text(json.dumps(to_dict(graph), indent=1) + "\n")


def to_dict(graph: Graph) -> dict[str, object]:
    """Return a graph as a JSON document. Nodes leave out fields that have their defaults.

    >>> graph = Graph((GraphNode("a", ("x",), 4.0),), {"x": 8.0}, ("a",))
    >>> to_dict(graph)["nodes"], of_dict(to_dict(graph)) == graph
    ([{'name': 'a', 'inputs': ['x'], 'nbytes': 4.0}], True)
    """
    plain = dataclasses.asdict(GraphNode(""))
    nodes = [
        {key: value for key, value in dataclasses.asdict(node).items() if key == "name" or value != plain[key]}
        for node in graph.nodes
    ]
    document = {
        "graph": VERSION,
        "rows": graph.rows,
        "inputs": dict(graph.inputs),
        "outputs": graph.outputs,
        "together": [sorted(group) for group in graph.together],
        "variables": [dataclasses.asdict(variable) for variable in graph.variables],
        "nodes": nodes,
    }
    return json.loads(json.dumps(document))  # type: ignore[no-any-return]  # tuples as lists


def of_dict(document: object, source: str = "the document") -> Graph:
    """Return the graph of a JSON document.

    Raises:
        ConfigError: the document is no graph, or of another version.
    """
    if not isinstance(document, dict) or "graph" not in document:
        raise ConfigError(f"{source} is no graph: it needs the field graph (its version)")
    if document["graph"] != VERSION:
        raise ConfigError(f"{source} is a graph of version {document['graph']!r}, and this reads version {VERSION}")
    if "rows" not in document:  # without which seconds would be taken for those of one row
        raise ConfigError(f"{source}, rows: is missing")
    return read_record(Graph, {key: value for key, value in document.items() if key != "graph"}, source)
