"""Graphs as JSON: Grace's own documents, and PipeDream's profiles.

A document of Grace's has ``"graph": 1`` (its version) and the fields of
:class:`~grace.pipeline.planning.graph.Graph`. A document of PipeDream's (Narayanan et al., SOSP 2019) has a row for
each node, with milliseconds of forward and backward and bytes of its value and of its parameters, for one batch on a
V100; and edges.
"""

import dataclasses
import graphlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grace.core import documents
from grace.core.atomic_files import atomic_write
from grace.core.schema_words import read_record
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.pipeline.planning.graph import Graph, GraphNode

VERSION = 1
ROWS = {
    "alexnet": 256,
    "densenet121": 64,
    "gnmt": 32,
    "gnmt_large": 128,
    "inception_v3": 128,
    "resnet18": 256,
    "resnet50": 128,
    "squeezenet1_0": 256,
    "vgg16": 128,
}
"""Rows of PipeDream's batches: bytes of the input over those of an image of 3 x 224 x 224 (299 x 299 of inception_v3)
floats, or of a hidden state over 1,024 floats."""
COLUMNS = ["id", "kind", "forward_ms", "backward_ms", "activation_bytes", "parameter_bytes"]
VIEWS = ("View", "Size", "__getitem__")
"""Kinds of nodes whose values are views, and keep no memory of their own."""


def read(path: str | Path, rows: int | None = None) -> Graph:
    """Return the graph in a file, which is Grace's or a profile of PipeDream's.

    Args:
        path: the file.
        rows: rows of the batch of a PipeDream profile; looked up in :data:`ROWS` by the model's name if left out.

    Raises:
        ConfigError: the file is of neither kind, of another version, or damaged.
    """
    document = documents.parse(documents.read(Path(path)), str(path), only_json=True)
    if isinstance(document, dict) and document.get("columns") == COLUMNS:
        return of_pipedream(document, rows, str(path))
    return of_dict(document, str(path))


def write(graph: Graph, path: str | Path) -> None:
    """Write a graph to a file, as Grace's JSON."""
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
    """Return the graph of a JSON document of Grace's.

    Raises:
        ConfigError: the document is no graph, or of another version.
    """
    if not isinstance(document, dict) or "graph" not in document:
        raise ConfigError(f"{source} is no graph: it needs the field graph (its version), or PipeDream's columns")
    if document["graph"] != VERSION:
        raise ConfigError(f"{source} is a graph of version {document['graph']!r}, and this reads version {VERSION}")
    try:
        nodes = tuple(read_record(list[GraphNode], document["nodes"], "nodes"))
        variables = tuple(read_record(list[Variable], document.get("variables", []), "variables"))
        together = tuple(frozenset(group) for group in document.get("together", ()))
        return Graph(nodes, dict(document["inputs"]), tuple(document["outputs"]), document["rows"], together, variables)
    except ConfigError as error:  # of its records, or of Graph: neither knows the file
        raise ConfigError(f"{source}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{source} is no graph: {type(error).__name__}: {error}") from None


def of_pipedream(document: Mapping[str, Any], rows: int | None = None, source: str = "the profile") -> Graph:
    """Return the graph of a PipeDream document. Its input nodes become the model's inputs, and take no time.

    Raises:
        ConfigError: an edge has no node, edges form a cycle, or the number of rows is not known.
    """
    if rows is None:
        named = re.search(r"profiles/(\w+)/graph\.txt", str(document.get("source", "")))
        rows = ROWS.get(named[1]) if named else None
        if rows is None:
            raise ConfigError(f"{source} does not tell how many rows its batch has: give rows=")
    try:
        table = {node.name: node for node in map(_parse_row, document["nodes"])}
        reads: dict[str, list[str]] = {name: [] for name in table}
        for start, end in document["edges"]:
            reads[end].append(table[start].name)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"{source} is no profile of PipeDream's: {type(error).__name__}: {error}") from None
    order = list(table)  # kept if it is topological
    position = {name: i for i, name in enumerate(order)}
    if any(position[start] > position[end] for end, starts in reads.items() for start in starts):
        try:
            order = list(graphlib.TopologicalSorter(reads).static_order())
        except graphlib.CycleError as error:
            raise ConfigError(f"{source}: its edges go in a circle: {' -> '.join(error.args[1])}") from None
    inputs = {name: node.nbytes for name, node in table.items() if node.kind.startswith("Input")}
    nodes = [dataclasses.replace(table[name], inputs=tuple(reads[name])) for name in order if name not in inputs]
    read_by = {start for start, _ in document["edges"]}
    # profiles have parts of a value that nobody reads, which the model does not return
    outputs = tuple(node.name for node in nodes if node.name not in read_by and node.kind != "__getitem__")
    return Graph(tuple(nodes), inputs, outputs, rows)


def _parse_row(row: Sequence[object]) -> GraphNode:
    """Return the node of a row of a PipeDream document, without its inputs."""
    name, kind, *numbers = row
    if not (isinstance(name, str) and isinstance(kind, str)):
        raise ValueError(f"a row begins with a name and a kind, not {documents.shown(row)}")
    values = list[float]()
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number <= sys.float_info.max:
            raise ValueError(f"node {name!r} has {documents.shown(number)} where a number of at least 0 must be")
        values.append(float(number))
    forward, backward, nbytes, weights = values
    return GraphNode(
        name,
        nbytes=nbytes,
        forward=forward / 1e3,  # profiles have milliseconds
        backward=backward / 1e3,
        kept=0.0 if kind in VIEWS else nbytes,
        parameters={f"{name}.parameters": weights} if weights else {},
        kind=kind,
    )
